"""Puts a split head back into a target, as the embedded head that its conversion lost.

The head's tensors keep their bytes, in the form an MLX conversion gives them, in a weight file of their own. The
target's other files are copied, or linked, as they are; only the index and config.json are written anew. The folder
appears whole or not at all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftpair.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from draftpair.checkpoint.folder import staged_folder
from draftpair.checkpoint.writer import Output, TensorFile
from draftpair.convert.destination import CONFIG, INDEX, refuse_source
from draftpair.convert.manifest import to_json
from draftpair.convert.parallel import Meter, Progress, in_parallel
from draftpair.convert.snapshot import Snapshot, refuse_changes, snapshot
from draftpair.convert.stream import read_back
from draftpair.convert.write import disk_errors, require_space
from draftpair.errors import Refused, ToolError
from draftpair.families.heads import find_head, recognised_head
from draftpair.families.record import Family
from draftpair.version import VERSION

HEAD_FILE = "model-mtp-head.safetensors"
_PIECE = 1 << 22
_SIDES = ("scales", "biases")


@dataclass(frozen=True)
class AttachPlan:
    """Everything that will be written: each of the drafter's tensors under its name in the target, and the files.

    `copied` are the target's files that go along as they are; `config` and `index` are the two documents.
    """

    target: Checkpoint
    drafter: Checkpoint
    family: Family
    output: Path
    prefix: str
    names: Mapping[str, str]
    copied: tuple[str, ...]
    config: Mapping[str, Any]
    index: Mapping[str, Any]
    link: bool
    sources: Snapshot

    @property
    def outputs(self) -> list[Output]:
        """The tensors of the head's weight file."""
        tensors = self.drafter.tensors
        return [
            Output(new, tensors[old].dtype, tensors[old].shape) for old, new in sorted(self.names.items())
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the head's tensors."""
        return sum(output.nbytes for output in self.outputs)


def plan_attach(
    target: Checkpoint, drafter: Checkpoint, family: Family, output: Path, link: bool = False
) -> AttachPlan:
    """Decides what `carry_out_attach` writes; `family` is that of the drafter.

    Raises Refused when the target has a head or is another family's, or when the drafter's tensors have no place
    in it; Usage for an output folder that cannot be used.
    """
    refuse_source(target, output)
    refuse_source(drafter, output)
    if seen := find_head(target) or recognised_head(target):
        raise Refused(f"{target.source} has a head already: {len(seen.tensors)} tensors under {seen.prefix}")
    if not family.serves(target.config):
        raise Refused(
            f"{drafter.source} is a {family.name} drafter; its targets are {', '.join(family.target.model_types)}, and "
            f"{target.source} is {target.config.root_model_type or target.config.model_type}"
        )
    prefix, first = _prefix(target, family), _first_layer(target, family)
    names = dict(_names(drafter, family, prefix, first))
    if clashes := sorted(target.tensors.keys() & set(names.values())):
        raise Refused(f"{target.source} has tensors of these names already: {', '.join(clashes[:5])}")
    copied = tuple(
        name
        for name in sorted(os.listdir(target.require_folder("attach")))
        if _goes_along(target.root / name)
    )
    return AttachPlan(
        target=target,
        drafter=drafter,
        family=family,
        output=output,
        prefix=prefix if family.head.owns_prefix else family.head.layer_prefix(prefix, first),
        names=names,
        copied=copied,
        config=_config(target, drafter, family, names),
        index=_index(target, drafter, names),
        link=link,
        sources=snapshot(drafter, drafter.files),
    )


def carry_out_attach(plan: AttachPlan, progress: Progress | None = None) -> None:
    """Writes the folder of `plan`.

    Raises ToolError when a file cannot be read or written, Refused when the drafter changes or the result does not
    hold a whole head; nothing is then left at the output.
    """
    require_space(plan.output, plan.nbytes + (0 if plan.link else _size(plan)))
    with disk_errors(plan.output), staged_folder(plan.output, replace=False) as folder:
        hashes = _write_head(plan, folder / HEAD_FILE, Meter("write", plan.nbytes, progress))
        for name in plan.copied:
            _bring(Path(os.path.realpath(plan.target.root / name)), folder / name, plan.link)
        for name, document in ((CONFIG, plan.config), (INDEX, plan.index)):
            (folder / name).write_bytes(to_json(document))
        refuse_changes(plan.drafter, plan.sources)
        read_back(plan.outputs, folder / HEAD_FILE, hashes, Meter("verify", plan.nbytes, progress))
        _require_whole(folder)


def _names(drafter: Checkpoint, family: Family, prefix: str, first: int) -> Iterator[tuple[str, str]]:
    """Old and new name of each of the drafter's tensors, by the rules that copy one tensor into one."""
    stems: dict[str, str] = {}
    for rule in family.rules:
        if rule.transform == "copy" and len(rule.outputs) == 1:
            for layer in range(len(drafter.tensors) if "{layer}" in rule.outputs[0].name else 1):
                output = rule.outputs[0].name.format(layer=layer)
                if not any(name in drafter.tensors for name in (output, _stem(output) + "scales")):
                    break
                start = family.head.layer_prefix(prefix, first + layer) if rule.per == "layer" else prefix
                stems.setdefault(output, start + rule.source)
    # What the drafter has a copy of is there in the target already.
    theirs = {output.name for rule in family.rules if rule.per == "target" for output in rule.outputs}
    homeless = []
    for name in sorted(drafter.tensors):
        owner = next((_stem(name) + "weight" for side in _SIDES if name == _stem(name) + side), name)
        new = stems.get(owner)
        if owner in theirs:
            continue
        if new is None:
            homeless.append(name)
        elif owner == name:
            yield name, new
        else:
            yield name, _stem(new) + name.rpartition(".")[2]
    if homeless:
        raise Refused(
            f"{len(homeless)} tensors of {drafter.source} have no name in a target: {', '.join(homeless[:5])}",
            hint="only a drafter that split-mtp wrote, of a family whose record has such names, can be attached",
        )


def _stem(name: str) -> str:
    return name[: name.rfind(".") + 1]


def _prefix(target: Checkpoint, family: Family) -> str:
    """The first of the head's prefixes that goes with the names of the target's decoder layers."""
    spec = family.head
    if not spec.owns_prefix:
        layer = [spec.layer_prefix(prefix, 0) for prefix in spec.prefixes]
        found = (p for p, start in zip(spec.prefixes, layer, strict=True) if _any_below(target, start))
        prefix = next(found, None)
        if prefix is None:
            raise Refused(
                f"{target.source} has no tensor under {' or '.join(layer)}, so a head has no place after it"
            )
        return prefix
    if _any_below(target, "language_model.model.") and "language_model.mtp." in spec.prefixes:
        return "language_model.mtp."
    return spec.prefixes[0]


def _any_below(target: Checkpoint, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in target.tensors)


def _first_layer(target: Checkpoint, family: Family) -> int:
    first = family.head.first_layer
    return first if isinstance(first, int) else family.count(first, target.config)


def _goes_along(path: Path) -> bool:
    """Whether a file of the target is copied as it is; folders and broken links are not."""
    return path.is_file() and path.name not in (CONFIG, INDEX)


def _config(
    target: Checkpoint, drafter: Checkpoint, family: Family, names: Mapping[str, str]
) -> dict[str, Any]:
    """The target's config.json, declaring the head's depth and how its packed tensors are read."""
    config = dict(target.config.raw)
    level = config
    if target.config.text_key:
        level = config[target.config.text_key] = dict(target.config.text)
    depth = drafter.config.get(family.drafter.depth) if family.drafter.depth else None
    if family.head.depth and "." not in family.head.depth[0] and depth is not None:
        level[family.head.depth[0]] = depth
    if packing := drafter.config.quantization:
        base = {key: value for key, value in packing.items() if not isinstance(value, (dict, bool))}
        own = target.config.quantization
        merged = dict(own) if own else dict(base)
        for old, new in names.items():
            if old.endswith(".scales"):
                settings = packing.get(old.removesuffix(".scales"))
                merged[new.removesuffix(".scales")] = settings if isinstance(settings, dict) else base
        config["quantization"] = merged
        if not own or "quantization_config" in config:
            config["quantization_config"] = merged
    return config


def _index(target: Checkpoint, drafter: Checkpoint, names: Mapping[str, str]) -> dict[str, Any]:
    """The index of the target's tensors where they are, and of the head's in their file."""
    weight_map = {name: tensor.file for name, tensor in target.tensors.items()}
    weight_map |= dict.fromkeys(names.values(), HEAD_FILE)
    total = target.tensor_bytes + sum(drafter.tensors[name].nbytes for name in names)
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def _write_head(plan: AttachPlan, path: Path, meter: Meter) -> dict[str, str]:
    metadata = {"format": "mlx", "draftpair_version": VERSION, "draftpair_family": plan.family.name}
    with TensorFile(path, plan.outputs, metadata) as file:

        def copy(tensor: TensorInfo) -> str:
            digest = hashlib.sha256()
            for begin in range(0, tensor.nbytes, _PIECE):
                data = plan.drafter.read(tensor, begin, min(begin + _PIECE, tensor.nbytes))
                digest.update(data)
                file.write(plan.names[tensor.name], begin, data)
                meter.advance(len(data))
            return digest.hexdigest()

        tensors = [plan.drafter.tensors[name] for name in plan.names]
        hashes = in_parallel(tensors, copy, meter)
    return {plan.names[tensor.name]: digest for tensor, digest in zip(tensors, hashes, strict=True)}


def _bring(source: Path, copy: Path, link: bool) -> None:
    if link:
        try:
            os.link(source, copy)
        except OSError as error:
            raise ToolError(
                f"{source} cannot be linked: {error.strerror}",
                hint="leave --link out: the files are then copied",
            ) from error
    else:
        shutil.copyfile(source, copy)


def _size(plan: AttachPlan) -> int:
    return sum(os.stat(plan.target.root / name).st_size for name in plan.copied)


def _require_whole(folder: Path) -> None:
    head = find_head(open_checkpoint(folder))
    if head is None or not head.complete:
        problems = (
            "; ".join(f.message for f in head.findings if f.level == "error") if head else "it is not found"
        )
        raise Refused(
            f"the attached head does not fit the target: {problems}",
            hint="the drafter may belong to another model; draftpair validate TARGET DRAFTER says more",
        )


def attach_body(plan: AttachPlan, written: bool) -> dict[str, Any]:
    """The report of a plan, carried out or not, without what validate says of the pair."""
    how = "linked" if plan.link else "copied"
    brought = [{"name": name, "how": how} for name in plan.copied]
    made = [{"name": name, "how": "written"} for name in (CONFIG, HEAD_FILE, INDEX)]
    return {
        "family": plan.family.name,
        "prefix": plan.prefix,
        "written": written,
        "output": str(plan.output),
        "tensors": [
            {
                "name": new,
                "source": old,
                "dtype": plan.drafter.tensors[old].dtype,
                "shape": list(plan.drafter.tensors[old].shape),
                "bytes": plan.drafter.tensors[old].nbytes,
            }
            for old, new in sorted(plan.names.items())
        ],
        "files": sorted([*brought, *made], key=lambda file: file["name"]),
        "bytes_written": plan.nbytes,
    }
