"""Checks a drafter folder, or a target, by itself: config, exact inventory, shapes, and the small tensors' values.

A drafter that passes has every tensor its family's record asks for, each with the shape that config.json implies,
packed where and only where the quantization block says how. A target of a family with a record is held to the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.checkpoint.memo import per_checkpoint
from draftpair.checkpoint.wording import printable
from draftpair.errors import Refused
from draftpair.families import family_of_target
from draftpair.families.drafters import DrafterMatch, output_shapes
from draftpair.families.record import Family, SplitFamily
from draftpair.families.rules import apply_rules
from draftpair.families.specs import TrunkSpec
from draftpair.families.trunk import stray_layers, trunk_shapes
from draftpair.families.views import own_checks
from draftpair.findings import Finding, has_errors
from draftpair.validate.inventory import Inventory, tensors_of
from draftpair.validate.manifest import check_manifest
from draftpair.validate.quantization import check_quantization, check_twins
from draftpair.validate.taps import DECLARED_LAYERS, ids_problem
from draftpair.validate.values import check_values

_REWRITE = "write the drafter again with split-mtp"
_FETCH = "download the drafter again, or compare config.json with the original repository's"
_DOWNLOAD = "download the checkpoint again, or compare config.json with the original's"


# Errors after which role, head and tensors cannot be judged.
_UNREADABLE = frozenset(
    {"CONFIG-PARSE", "CONFIG-MISSING", "FILE-HEADER", "FILE-DANGLING-LINK", "INDEX-SHARD-MISSING"}
)


def is_unreadable(checkpoint: Checkpoint) -> bool:
    """Whether files are missing or damaged, so that whatever else were said of the checkpoint would be a guess."""
    errors = [finding for finding in checkpoint.findings if finding.level == "error"]
    # A finding with a pointer is about one value of config.json.
    return any(finding.rule in _UNREADABLE and "#" not in (finding.where or "") for finding in errors)


def check_drafter(checkpoint: Checkpoint, match: DrafterMatch, values: bool = True) -> list[Finding]:
    """Everything that is wrong with a drafter folder, whatever its target; no weight is read without ``values``.

    Nothing is said of one that `is_unreadable`. The tensors are only compared with the config when the config passes
    its own rules: shapes are computed from it.
    """
    if is_unreadable(checkpoint):
        return []
    family, config = match.family, match.config
    rules = apply_rules(config.raw, family.name, "config", "config.json", config)
    findings = [*match.findings, *rules, *check_twins(checkpoint, _remedy(family)), *_experts(config)]
    findings += _depth(config, family)
    if not has_errors(findings):
        findings += check_quantization(checkpoint)
    if not has_errors(findings):
        findings += _from_config(lambda: _check_drafter_tensors(checkpoint, family, config, values))
    return [*findings, *check_manifest(checkpoint, family)]


@per_checkpoint
def check_target(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """What is wrong with a target: with its quantization block, and where its record describes them its tensors.

    Of its head, if it has one, nothing is looked at here; no weight is read.
    """
    family = family_of_target(checkpoint.config)
    unreadable = [*check_quantization(checkpoint)]
    if unreadable or family is None or family.trunk is None:
        return tuple(unreadable)
    trunk = family.trunk
    # The rules are written for a drafter, whose text_config is its target's config.
    text = {"text_config": dict(checkpoint.config.text)}
    rules = apply_rules(text, family.name, "config", "config.json")
    findings = [*(_placed(checkpoint.config, finding) for finding in rules), *_experts(checkpoint.config)]
    if not has_errors(findings):
        findings += _from_config(lambda: _check_trunk(checkpoint, family, trunk))
    return tuple(findings)


def _placed(config: ConfigView, finding: Finding) -> Finding:
    """A finding of a drafter's rules, which know of a text_config, at the place in a target's config.json."""
    asked, there = "/text_config", f"/{config.text_key}" if config.text_key else ""
    where = finding.where.replace(asked, there) if finding.where else None
    return replace(finding, where=where, message=finding.message.replace(f"{asked}/", f"{there}/"))


def _depth(config: ConfigView, family: Family) -> Iterator[Finding]:
    """A config.json that promises more layers than the family's drafters hold."""
    key = family.drafter_depth(config)
    depth = config.get(key) if key else None
    if key and type(depth) is int and depth > family.max_layers:
        yield Finding(
            "CONFIG-HEAD-DEPTH",
            "error",
            f"config.json declares {depth} layers under {key}; a {family.name} drafter holds {family.max_layers}",
            where=f"config.json#{config.where(key)}",
            expected=family.max_layers,
            found=depth,
            hint=_remedy(family),
        )


def _check_trunk(checkpoint: Checkpoint, family: SplitFamily, trunk: TrunkSpec) -> Iterator[Finding]:
    if strays := stray_layers(family, trunk, checkpoint):
        yield Finding(
            "TARGET-LAYERS",
            "error",
            f"layers {strays} are past the {checkpoint.config.get(trunk.layers)} that config.json counts, "
            f"and are no head",
            where=checkpoint.config.place(trunk.layers),
            found=strays,
            hint="config.json and the tensors do not belong together: a loader would drop these layers",
        )
    inventory = Inventory(checkpoint, trunk_shapes(family, trunk, checkpoint), "TARGET", _DOWNLOAD)
    yield from inventory.missing()
    yield from inventory.misshapen()
    if "quantization" in checkpoint.config.raw and not any(
        t.dtype == "U32" for t in checkpoint.tensors.values()
    ):
        yield Finding(
            "TARGET-QUANTIZATION",
            "error",
            "config.json has a quantization block, and no tensor is packed",
            where="config.json#/quantization",
            hint=_DOWNLOAD,
        )


def _check_drafter_tensors(
    checkpoint: Checkpoint, family: Family, config: ConfigView, values: bool
) -> Iterator[Finding]:
    shapes, tables = output_shapes(family, checkpoint, config), _tables(family)
    inventory = Inventory(checkpoint, shapes, "DRAFTER", _remedy(family), tables)
    yield from inventory.missing()
    yield from inventory.unexpected()
    yield from inventory.misshapen()
    yield from _taps(family, config)
    yield from own_checks(family, checkpoint, config, values)
    yield from _forced_dtypes(checkpoint, family)
    if values:
        yield from check_values(checkpoint, family, config)


def _remedy(family: Family) -> str:
    """What to do about a drafter that is not as it must be: heads are cut out again, others downloaded."""
    return _FETCH if family.head is None else _REWRITE


def _tables(family: Family) -> dict[str, str]:
    return {output.name: rule.holds for rule in family.rules if rule.holds for output in rule.outputs}


def _taps(family: Family, config: ConfigView) -> Iterator[Finding]:
    """The ids of the target layers that a drafter reads, as far as they can be judged without the target."""
    spec = family.drafter.taps
    if spec is None:
        return
    ids, where = config.get(spec.ids), f"config.json#{config.where(spec.ids) or ''}"
    layers = config.get(family.drafter.depth or "")
    declared = config.get(DECLARED_LAYERS)
    problem = ids_problem(ids)
    if problem:
        yield _tap(f"{spec.ids} is {printable(json.dumps(ids), 60)}: {problem}", where, None, ids)
    elif type(declared) is int and ids[-1] - (spec.convention == "input") >= declared:
        said = f"{spec.ids} ends with {ids[-1]}, and {DECLARED_LAYERS} says that the target has {declared} layers"
        yield _tap(said, where, declared, ids[-1])
    elif spec.per_layer and type(layers) is int and len(ids) != layers:
        said = f"{spec.ids} lists {len(ids)} layers of the target; this family has one for each of its {layers} layers"
        yield _tap(said, where, layers, len(ids))


def _tap(message: str, where: str, expected: Any, found: Any) -> Finding:
    hint = "take config.json from the original repository: a tap that is guessed drafts nonsense"
    return Finding("DRAFTER-TAPS", "error", f"config.json: {message}", where, expected, found, hint)


def _from_config(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """The findings of a check that computes shapes; a config that lacks a size is the only one then."""
    try:
        return list(check())
    except Refused as error:
        return [Finding("CONFIG-DIMENSION", "error", error.message, "config.json", hint=error.hint)]


_EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts")


def _experts(config: ConfigView) -> Iterator[Finding]:
    """Relations between the numbers of a mixture of experts, where config.json has them as whole numbers."""
    count = next((key for key in _EXPERTS if config.get(key) is not None), _EXPERTS[0])
    keys = (count, "num_experts_per_tok", "n_group", "topk_group")
    experts, chosen, groups, taken = (config.get(key) for key in keys)
    for holds, said in (
        (_at_most(chosen, experts), f"num_experts_per_tok {chosen} of {count} {experts}"),
        (_at_most(taken, groups), f"topk_group {taken} of n_group {groups}"),
        (
            not _whole(experts, groups) or experts % groups == 0,
            f"{count} {experts} in n_group {groups}",
        ),
    ):
        if not holds:
            yield Finding(
                "CONFIG-EXPERTS",
                "error",
                f"config.json asks for {said}",
                where="config.json",
                hint="compare config.json with the original repository's",
            )


def _at_most(part: Any, whole: Any) -> bool:
    return not _whole(part, whole) or part <= whole


def _whole(*values: Any) -> bool:
    return all(type(value) is int and value > 0 for value in values)


def _forced_dtypes(checkpoint: Checkpoint, family: Family) -> Iterator[Finding]:
    for rule in family.rules:
        for tensor in tensors_of(rule, checkpoint) if rule.dtype else ():
            if tensor.dtype != rule.dtype:
                yield Finding(
                    "DRAFTER-TENSOR-ROUNDED",
                    "warning",
                    f"{tensor.name} is {tensor.dtype}; the family keeps it in {rule.dtype}",
                    where=tensor.name,
                    expected=rule.dtype,
                    found=tensor.dtype,
                    hint=_remedy(family),
                )
