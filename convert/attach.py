"""Puts a split head back into a target, as the embedded head that its conversion lost.

The head's tensors keep their bytes, in the form an MLX conversion gives them, in a weight file of their own. The
target's other files are copied, or linked, as they are; only the index and config.json are written anew. The folder
appears whole or not at all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftpair.checkpoint import (
    PLAIN_DTYPES,
    Checkpoint,
    TensorInfo,
    from_float32,
    open_checkpoint,
    to_float32,
)
from draftpair.checkpoint.folder import staged_folder
from draftpair.checkpoint.storage import list_folder
from draftpair.checkpoint.wording import some
from draftpair.checkpoint.writer import Output, TensorFile
from draftpair.convert.companions import leads_out
from draftpair.convert.destination import CONFIG, INDEX, refuse_source
from draftpair.convert.manifest import to_json
from draftpair.convert.parallel import Meter, Progress, in_parallel
from draftpair.convert.snapshot import Snapshot, refuse_changes, snapshot
from draftpair.convert.write import disk_errors, require_space
from draftpair.errors import Refused, ToolError
from draftpair.families.heads import find_head, recognised_head
from draftpair.families.norms import norm_conventions
from draftpair.families.record import Family, SplitFamily
from draftpair.findings import Finding
from draftpair.version import VERSION

HEAD_FILE = "model-mtp-head.safetensors"
_PIECE = 1 << 22
_SIDES = ("scales", "biases")
_TRUNK_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
_LOOKED_AT = 32


@dataclass(frozen=True)
class AttachPlan:
    """Everything that will be written: each of the drafter's tensors under its name in the target, and the files.

    `copied` are the target's files that go along as they are; `config` and `index` are the two documents; `sources`
    is the state of the files of both that go into them.
    `lowered` are the drafter's norms that 1 is taken off again, because the target stores such norms zero-centred.
    """

    target: Checkpoint
    drafter: Checkpoint
    family: SplitFamily
    output: Path
    prefix: str
    names: Mapping[str, str]
    copied: tuple[str, ...]
    config: Mapping[str, Any]
    index: Mapping[str, Any]
    link: bool
    lowered: frozenset[str]
    findings: tuple[Finding, ...]
    sources: tuple[tuple[Checkpoint, Snapshot], ...]

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
        raise Refused(
            f"{target.source} has a head already: {len(seen.tensors)} tensors under {seen.prefix}",
            hint="attach it to a target without one",
        )
    if not isinstance(family, SplitFamily):
        raise Refused(
            f"{drafter.source} is a {family.name} drafter, which is published by itself: it is no head of a target",
            hint="attach what split-mtp cut out",
        )
    if not family.serves(target.config):
        raise Refused(
            f"{drafter.source} is a {family.name} drafter; its targets are {', '.join(family.target.model_types)}, and "
            f"{target.source} is {target.config.root_model_type or target.config.model_type}",
            hint="split the head of this target's own raw checkpoint",
        )
    prefix, first = _prefix(target, family), _first_layer(target, family)
    names = dict(_names(drafter, family, prefix, first))
    _refuse_other_copies(target, drafter, family)
    if HEAD_FILE in target.storage.names():
        raise Refused(
            f"{target.source} has a file {HEAD_FILE}, the name the head is written under", "rename that file"
        )
    if clashes := sorted(target.tensors.keys() & set(names.values())):
        raise Refused(
            f"{target.source} has tensors of these names already: {', '.join(clashes[:5])}",
            hint="attach the head to a target without them",
        )
    target.require_folder("attach")
    copied = tuple(name for name in target.storage.names() if name not in (CONFIG, INDEX))
    # A weight file may lie elsewhere: its header says that it is one.
    if astray := [name for name in copied if name not in target.files and leads_out(target.root / name)]:
        raise Refused(
            f"{astray[0]} in {target.source} is a symbolic link that leads out of the folder; it is not copied",
            hint="replace the link by the file if you trust it, or remove it",
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
        lowered=_lowered(target, drafter, family, names),
        findings=(*_form(target, family, names), *_folders(target)),
        sources=(
            (drafter, snapshot(drafter, {*drafter.files, CONFIG})),
            (target, snapshot(target, {*copied, *filter(target.has_file, (CONFIG, INDEX))})),
        ),
    )


def carry_out_attach(plan: AttachPlan, progress: Progress | None = None) -> None:
    """Writes the folder of `plan`.

    Raises ToolError when a file cannot be read or written, Refused when a source changes or the result does not
    hold a whole head; nothing is then left at the output.
    """
    with disk_errors(plan.output):
        require_space(plan.output, plan.nbytes + (0 if plan.link else _size(plan)))
    with disk_errors(plan.output), staged_folder(plan.output, replace=False) as folder:
        _write_head(plan, folder / HEAD_FILE, Meter("write", plan.nbytes, progress))
        for name in plan.copied:
            _bring(Path(os.path.realpath(plan.target.root / name)), folder / name, plan.link)
        for name, document in ((CONFIG, plan.config), (INDEX, plan.index)):
            (folder / name).write_bytes(to_json(document))
        for checkpoint, before in plan.sources:
            refuse_changes(checkpoint, before, linked=plan.link)
        _require_whole(folder)


def _names(drafter: Checkpoint, family: SplitFamily, prefix: str, first: int) -> Iterator[tuple[str, str]]:
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


def _refuse_other_copies(target: Checkpoint, drafter: Checkpoint, family: SplitFamily) -> None:
    """What the drafter has copies of is not written again, so the target's must be what was copied."""
    for rule in family.rules:
        copy = drafter.tensors.get(rule.outputs[0].name) if rule.per == "target" else None
        own = target.tensors.get(rule.source)
        if copy and own and (copy.dtype, drafter.read(copy)) != (own.dtype, target.read(own)):
            raise Refused(
                f"{copy.name} of {drafter.source} is not {own.name} of {target.source}, which it was copied from",
                hint="the drafter belongs to another model, or to another conversion of this one",
            )


def _stem(name: str) -> str:
    return name[: name.rfind(".") + 1]


def _prefix(target: Checkpoint, family: SplitFamily) -> str:
    """The first of the head's prefixes that goes with the names of the target's decoder layers."""
    spec = family.head
    if not spec.owns_prefix:
        layer = [spec.layer_prefix(prefix, 0) for prefix in spec.prefixes]
        found = (p for p, start in zip(spec.prefixes, layer, strict=True) if _any_below(target, start))
        prefix = next(found, None)
        if prefix is None:
            raise Refused(
                f"{target.source} has no tensor under {' or '.join(layer)}, so a head has no place after it",
                hint="give the whole folder of the target",
            )
        return prefix
    if _any_below(target, "language_model.model.") and "language_model.mtp." in spec.prefixes:
        return "language_model.mtp."
    return spec.prefixes[0]


def _any_below(target: Checkpoint, prefix: str) -> bool:
    return any(name.startswith(prefix) for name in target.tensors)


def _first_layer(target: Checkpoint, family: SplitFamily) -> int:
    first = family.head.first_layer
    return first if isinstance(first, int) else family.count(first, target.config)


def _config(
    target: Checkpoint, drafter: Checkpoint, family: SplitFamily, names: Mapping[str, str]
) -> dict[str, Any]:
    """The target's config.json, declaring the head's depth and how its packed tensors are read."""
    config = dict(target.config.raw)
    level = config
    if target.config.text_key:
        level = config[target.config.text_key] = dict(target.config.text)
    depth = drafter.config.get(family.drafter.depth) if family.drafter.depth else None
    if family.head.depth and depth is not None and target.config.get(family.head.depth[0]) != depth:
        *path, key = family.head.depth[0].split(".")
        for step in path:  # a dot leads into an object
            level[step] = dict(level[step]) if isinstance(level.get(step), dict) else {}
            level = level[step]
        level[key] = depth
    if packing := drafter.config.quantization:
        config |= _packing(target, packing, names)
    return config


def _packing(target: Checkpoint, packing: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The `quantization` of the target with an entry for each packed module of the head."""
    own = target.config.quantization
    if own is not None and not {"bits", "group_size"} <= own.keys():
        raise Refused(
            f"{target.source} is packed in a format that is not MLX's ({some(sorted(own))} in its config.json), and "
            f"the drafter in MLX's: one config.json cannot say both",
            hint="attach a drafter that is not quantized: split again without the quantization options",
        )
    base = {key: value for key, value in packing.items() if not isinstance(value, (dict, bool))}
    merged = dict(own or base)
    for old, new in names.items():
        if old.endswith(".scales"):
            settings = packing.get(old.removesuffix(".scales"))
            merged[new.removesuffix(".scales")] = settings if isinstance(settings, dict) else base
    return {"quantization": merged, "quantization_config": merged}


def _lowered(
    target: Checkpoint, drafter: Checkpoint, family: SplitFamily, names: Mapping[str, str]
) -> frozenset[str]:
    """The drafter's norms that hold 1 + w, where the target's own decoder layers store w."""
    shifted = {
        output.name.format(layer=layer)
        for rule in family.rules
        if rule.norm == "zero_centred"
        for output in rule.outputs
        for layer in range(len(names))
    } & names.keys()
    if not shifted or _stored_as(target, _TRUNK_NORMS) != "zero-centred":
        return frozenset()
    for name in shifted:
        values = to_float32(drafter.read(drafter.tensors[name]), drafter.tensors[name].dtype)
        if (
            to_float32(from_float32(values - 1, drafter.tensors[name].dtype), drafter.tensors[name].dtype) + 1
            != values
        ).any():
            raise Refused(
                f"{name} of {drafter.source} cannot be stored as {target.source} stores such norms, without the 1 that "
                f"is in it: a digit would be lost",
                hint="attach it to an MLX conversion of the target",
            )
    return frozenset(shifted)


def _stored_as(target: Checkpoint, suffixes: tuple[str, ...]) -> str | None:
    """How the target stores its norms, by the values of those of a few layers; None when they do not tell."""
    named = [t for t in target.tensors.values() if t.name.endswith(suffixes) and t.dtype in PLAIN_DTYPES][
        :_LOOKED_AT
    ]
    vectors = {t.name: to_float32(target.read(t), t.dtype) for t in named}
    found = {e.convention for e in norm_conventions(vectors, converted=False).values()} - {None}
    return found.pop() if len(found) == 1 else None


def _form(target: Checkpoint, family: SplitFamily, names: Mapping[str, str]) -> list[Finding]:
    """A warning when the target is in its publisher's form and the head can only be given in MLX's."""
    if any(file.header.metadata.get("format") == "mlx" for file in target.files.values()):
        return []
    made = [o.name for rule in family.rules if rule.transform not in ("copy", "drop") for o in rule.outputs]
    odd = sorted(new for old, new in names.items() if any(_is_layer_of(old, name) for name in made))
    if not odd:
        return []
    return [
        Finding(
            "ATTACH-FORM",
            "warning",
            f"{len(odd)} tensors of the head, such as {odd[0]}, have the names and shapes that MLX conversions give "
            f"them; engines that read the published form do not find them",
            where=odd[0],
            found=len(odd),
            hint="attach the head to an MLX conversion of the target",
        )
    ]


def _is_layer_of(name: str, pattern: str) -> bool:
    before, _, after = pattern.partition("{layer}")
    return name.startswith(before) and name.endswith(after)


def _folders(target: Checkpoint) -> list[Finding]:
    folders = [name for name in list_folder(target.root) if os.path.isdir(target.root / name)]
    if not folders:
        return []
    message = f"folders of the target are not copied: {some(folders)}"
    return [Finding("ATTACH-FOLDERS", "note", message, folders[0], found=folders)]


def _index(target: Checkpoint, drafter: Checkpoint, names: Mapping[str, str]) -> dict[str, Any]:
    """The index of the target's tensors where they are, and of the head's in their file."""
    weight_map = {name: tensor.file for name, tensor in target.tensors.items()}
    weight_map |= dict.fromkeys(names.values(), HEAD_FILE)
    total = target.tensor_bytes + sum(drafter.tensors[name].nbytes for name in names)
    return {"metadata": {"total_size": total}, "weight_map": weight_map}


def _write_head(plan: AttachPlan, path: Path, meter: Meter) -> None:
    # Readers that know both forms go by this word.
    form = "pt" if plan.lowered else "mlx"
    metadata = {"format": form, "draftpair_version": VERSION, "draftpair_family": plan.family.name}
    with TensorFile(path, plan.outputs, metadata) as file:

        def copy(tensor: TensorInfo) -> None:
            for begin in range(0, tensor.nbytes, _PIECE):
                data = plan.drafter.read(tensor, begin, min(begin + _PIECE, tensor.nbytes))
                if tensor.name in plan.lowered:
                    data = from_float32(to_float32(data, tensor.dtype) - 1, tensor.dtype)
                file.write(plan.names[tensor.name], begin, data)
                meter.advance(len(data))

        in_parallel([plan.drafter.tensors[name] for name in plan.names], copy, meter)


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
