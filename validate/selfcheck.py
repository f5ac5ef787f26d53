"""Checks a drafter folder, or a target, by itself: config, exact inventory, shapes, and the small tensors' values.

A drafter that passes has every tensor its family's record asks for, each with the shape that config.json implies,
packed where and only where the quantization block says how. A target of a family with a record is held to the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from draftpair.checkpoint import PLAIN_DTYPES, Checkpoint, nonfinite_count
from draftpair.checkpoint.dtypes import to_float32
from draftpair.checkpoint.wording import some
from draftpair.errors import Refused
from draftpair.families import family_of_target
from draftpair.families.drafters import DrafterMatch, output_shapes
from draftpair.families.record import Family, TrunkSpec
from draftpair.families.rules import apply_rules
from draftpair.families.trunk import stray_layers, trunk_shapes
from draftpair.findings import Finding, has_errors
from draftpair.validate.inventory import Inventory, tensors_of
from draftpair.validate.manifest import check_manifest
from draftpair.validate.norms import check_norms
from draftpair.validate.quantization import check_quantization, check_twins

_REWRITE = "write the drafter again with split-mtp"
_DOWNLOAD = "download the checkpoint again, or compare config.json with the original's"


def check_drafter(checkpoint: Checkpoint, match: DrafterMatch) -> list[Finding]:
    """Everything that is wrong with a drafter folder, whatever its target.

    The tensors are only compared with the config when the config passes its own rules: shapes are computed
    from it.
    """
    family = match.family
    rules = apply_rules(checkpoint.config.raw, family.name, "config", "config.json")
    findings = [*match.findings, *rules, *check_twins(checkpoint, _REWRITE), *_experts(checkpoint)]
    findings += _depth(checkpoint, family)
    if not has_errors(findings):
        findings += check_quantization(checkpoint)
    if not has_errors(findings):
        findings += _from_config(lambda: _check_drafter_tensors(checkpoint, family))
    return [*findings, *check_manifest(checkpoint, family)]


def check_target(checkpoint: Checkpoint) -> list[Finding]:
    """What is wrong with a target: with its quantization block, and where its record describes them its tensors.

    Its head, if it has one, is not looked at here.
    """
    family = family_of_target(checkpoint.config)
    unreadable = [*check_quantization(checkpoint)]
    if unreadable or family is None or family.trunk is None:
        return unreadable
    trunk = family.trunk
    # The rules are written for a drafter, whose text_config is its target's config.
    text = {"text_config": dict(checkpoint.config.text)}
    findings = [*apply_rules(text, family.name, "config", "config.json"), *_experts(checkpoint)]
    if not has_errors(findings):
        findings += _from_config(lambda: _check_trunk(checkpoint, family, trunk))
    return findings


def _depth(checkpoint: Checkpoint, family: Family) -> Iterator[Finding]:
    """A config.json that promises more layers than the family's drafters hold."""
    key = family.drafter_depth(checkpoint.config)
    depth = checkpoint.config.get(key) if key else None
    if key and type(depth) is int and depth > family.head.max_depth:
        yield Finding(
            "CONFIG-HEAD-DEPTH",
            "error",
            f"config.json declares {depth} layers under {key}; a {family.name} drafter holds {family.head.max_depth}",
            where=f"config.json#{checkpoint.config.where(key)}",
            expected=family.head.max_depth,
            found=depth,
            hint=_REWRITE,
        )


def _check_trunk(checkpoint: Checkpoint, family: Family, trunk: TrunkSpec) -> Iterator[Finding]:
    if strays := stray_layers(family, trunk, checkpoint):
        yield Finding(
            "TARGET-LAYERS",
            "error",
            f"layers {strays} are past the {checkpoint.config.get(trunk.layers)} that config.json counts, "
            f"and are no head",
            where=checkpoint.config.where(trunk.layers),
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


def _check_drafter_tensors(checkpoint: Checkpoint, family: Family) -> Iterator[Finding]:
    inventory = Inventory(checkpoint, output_shapes(family, checkpoint), "DRAFTER", _REWRITE)
    yield from inventory.missing()
    yield from inventory.unexpected()
    yield from inventory.misshapen()
    yield from _forced_dtypes(checkpoint, family)
    yield from _vectors(checkpoint)
    yield from check_norms(checkpoint, family)


def _from_config(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """The findings of a check that computes shapes; a config that lacks a size is the only one then."""
    try:
        return list(check())
    except Refused as error:
        return [Finding("CONFIG-DIMENSION", "error", error.message, "config.json", hint=error.hint)]


def _experts(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Relations between the numbers of a mixture of experts, where config.json has them as whole numbers."""
    keys = ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group")
    experts, chosen, groups, taken = (checkpoint.config.get(key) for key in keys)
    for holds, said in (
        (_at_most(chosen, experts), f"num_experts_per_tok {chosen} of n_routed_experts {experts}"),
        (_at_most(taken, groups), f"topk_group {taken} of n_group {groups}"),
        (
            not _whole(experts, groups) or experts % groups == 0,
            f"n_routed_experts {experts} in n_group {groups}",
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
                    hint=_REWRITE,
                )


def _vectors(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Norms and biases are small enough to be read: none may hold NaN, and no norm may be zero all over."""
    bad = []
    for tensor in checkpoint.tensors.values():
        if len(tensor.shape) == 1 and tensor.dtype in PLAIN_DTYPES:
            data = checkpoint.read(tensor)
            is_norm = "norm" in tensor.name and not tensor.name.endswith("bias")
            if nonfinite_count(data, tensor.dtype) or (is_norm and not to_float32(data, tensor.dtype).any()):
                bad.append(tensor.name)
    if bad:
        yield Finding(
            "DRAFTER-TENSOR-VALUES",
            "error",
            f"these vectors hold values that are not finite, or nothing but zeros: {some(bad)}",
            where=bad[0],
            found=len(bad),
            hint=_REWRITE,
        )
