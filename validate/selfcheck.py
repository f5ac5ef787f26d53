"""Checks a drafter folder by itself: its config, its exact inventory, and the shape of every tensor.

Nothing here needs the target. A drafter that passes has every tensor its family's record asks for, each with
the shape that config.json implies, packed where and only where the quantization block says how.
"""

from __future__ import annotations

from collections.abc import Iterator

from draftpair.checkpoint import Checkpoint, TensorInfo
from draftpair.checkpoint.manifest import check_manifest
from draftpair.checkpoint.wording import some
from draftpair.errors import Refused
from draftpair.families.drafters import DrafterMatch, output_shapes
from draftpair.families.record import Family
from draftpair.findings import Finding, has_errors
from draftpair.validate.rules import apply_rules

_SIDES = (".scales", ".biases")
_REWRITE = "write the drafter again with split-mtp"


def check_drafter(checkpoint: Checkpoint, match: DrafterMatch) -> list[Finding]:
    """Everything that is wrong with a drafter folder, whatever its target.

    The tensors are only compared with the config when the config passes its own rules: shapes are computed
    from it.
    """
    findings = [
        *match.findings,
        *apply_rules(checkpoint.config.raw, match.family.name, "config", "config.json"),
    ]
    if not has_errors(findings):
        try:
            findings += check_inventory(checkpoint, match.family)
        except Refused as error:
            findings.append(
                Finding("CONFIG-DIMENSION", "error", error.message, "config.json", hint=error.hint)
            )
    return [*findings, *check_manifest(checkpoint)]


def check_inventory(checkpoint: Checkpoint, family: Family) -> Iterator[Finding]:
    """Missing, unexpected and misshapen tensors. Raises Refused when config.json lacks a dimension."""
    expected = output_shapes(family, checkpoint)
    missing = [name for name in expected if name not in checkpoint.tensors]
    unexpected = [
        name for name in checkpoint.tensors if name not in expected and _owner(name) not in expected
    ]
    if missing:
        yield _listed("DRAFTER-TENSOR-MISSING", "the drafter lacks", missing)
    if unexpected:
        yield _listed("DRAFTER-TENSOR-UNEXPECTED", f"a {family.name} drafter has no", sorted(unexpected))
    for name, shape in expected.items():
        if tensor := checkpoint.tensors.get(name):
            yield from _check_tensor(checkpoint, tensor, shape)


def _owner(name: str) -> str:
    """The weight that a quantization side tensor belongs to, or the name itself."""
    return next((name[: -len(side)] + ".weight" for side in _SIDES if name.endswith(side)), name)


def _listed(rule: str, what: str, names: list[str]) -> Finding:
    return Finding(rule, "error", f"{what} {some(names)}", where=names[0], found=len(names), hint=_REWRITE)


def _check_tensor(checkpoint: Checkpoint, tensor: TensorInfo, shape: tuple[int, ...]) -> Iterator[Finding]:
    stem = tensor.name.removesuffix(".weight")
    scales = checkpoint.tensors.get(stem + ".scales")
    if scales is not None or tensor.dtype == "U32":
        yield from _check_packed(checkpoint, tensor, scales, shape)
    elif tensor.dtype not in ("BF16", "F16", "F32"):
        yield Finding(
            "DRAFTER-TENSOR-DTYPE",
            "error",
            f"{tensor.name} is {tensor.dtype} and has no scales: its bytes would be read as numbers",
            where=tensor.name,
            expected="BF16, F16 or F32, or U32 with scales",
            found=tensor.dtype,
            hint=_REWRITE,
        )
    elif tensor.shape != shape:
        yield _misshapen(tensor, shape)


def _check_packed(
    checkpoint: Checkpoint, tensor: TensorInfo, scales: TensorInfo | None, shape: tuple[int, ...]
) -> Iterator[Finding]:
    """A packed weight: words of 32 bits, one scale (and for affine one bias) a group of columns."""
    settings = checkpoint.config.raw.get("quantization")
    if scales is None or tensor.dtype != "U32" or not isinstance(settings, dict):
        lacking = "scales" if scales is None else "a quantization block" if settings is None else "U32 words"
        yield Finding(
            "DRAFTER-PACKED",
            "error",
            f"{tensor.name} ({tensor.dtype}) is packed but there is no {lacking} to read it by",
            where=tensor.name,
            hint=_REWRITE,
        )
        return
    own = settings.get(tensor.name.removesuffix(".weight"), settings)
    bits, group = own.get("bits", settings["bits"]), own.get("group_size", settings["group_size"])
    if shape[-1] % group or tensor.shape != (*shape[:-1], shape[-1] * bits // 32):
        yield _misshapen(tensor, (*shape[:-1], shape[-1] * bits // 32), f" at {bits} bits")
        return
    affine = own.get("mode", settings.get("mode", "affine")) == "affine"
    sides = (
        [scales, checkpoint.tensors.get(tensor.name.removesuffix(".weight") + ".biases")]
        if affine
        else [scales]
    )
    for side in sides:
        if side is None:
            yield Finding(
                "DRAFTER-PACKED",
                "error",
                f"{tensor.name} has scales and no biases",
                where=tensor.name,
                hint=_REWRITE,
            )
        elif side.shape != (*shape[:-1], shape[-1] // group):
            yield _misshapen(side, (*shape[:-1], shape[-1] // group), f" at group size {group}")


def _misshapen(tensor: TensorInfo, shape: tuple[int, ...], why: str = "") -> Finding:
    return Finding(
        "DRAFTER-TENSOR-SHAPE",
        "error",
        f"{tensor.name} has shape {list(tensor.shape)}; config.json asks for {list(shape)}{why}",
        where=tensor.name,
        expected=list(shape),
        found=list(tensor.shape),
        hint=_REWRITE,
    )
