"""Holds a checkpoint's tensors against the names and shapes it must have, packed ones included."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from draftpair.checkpoint import PLAIN_DTYPES, Checkpoint, TensorInfo
from draftpair.checkpoint.wording import some
from draftpair.families.specs import TensorRule
from draftpair.findings import Finding

SHOWN = 5
_SIDES = (".scales", ".biases")
_FP8_SCALE = ".weight_scale_inv"
_TABLE_DTYPES = {"ids": ("I64", "I32"), "flags": ("BOOL", "U8")}

Shape = tuple[int, ...]


def tensors_of(rule: TensorRule, checkpoint: Checkpoint) -> Iterator[TensorInfo]:
    """The tensors of a drafter folder that a rule puts there, in whichever layers."""
    for output in rule.outputs:
        start, numbered, end = output.name.partition("{tap}" if rule.per == "tap" else "{layer}")
        pattern = re.compile(re.escape(start) + (r"\d+" if numbered else "") + re.escape(end))
        yield from (tensor for name, tensor in checkpoint.tensors.items() if pattern.fullmatch(name))


class Inventory:
    """The tensors of one checkpoint against ``expected``: unquantized shapes by name.

    ``whose`` starts the rule ids (``DRAFTER-TENSOR-SHAPE``), ``hint`` ends every finding. ``tables`` says which
    tensors are no weights, and of what they are tables: "ids" or "flags".
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        expected: Mapping[str, Shape],
        whose: str,
        hint: str,
        tables: Mapping[str, str] | None = None,
    ) -> None:
        self.tensors = checkpoint.tensors
        self.expected = expected
        self.whose = whose
        self.hint = hint
        self.tables = tables or {}
        self.settings: dict[str, Any] = checkpoint.config.quantization or {}

    def missing(self) -> Iterator[Finding]:
        """Tensors that ought to be there and are not: one finding."""
        names = [name for name in self.expected if name not in self.tensors]
        if names:
            yield self._listed("MISSING", "these tensors are missing:", names)

    def unexpected(self, prefix: str = "") -> Iterator[Finding]:
        """Tensors below ``prefix`` that have no place: one finding. Scales belong to a packed weight only."""
        names = sorted(n for n in self.tensors if n.startswith(prefix) and not self._has_place(n))
        if names:
            yield self._listed("UNEXPECTED", "these tensors have no place:", names)

    def misshapen(self) -> Iterator[Finding]:
        """The first tensors whose shape, dtype or packing is not what is expected, and how many more there are."""
        found = list(self._all_misshapen())
        yield from found[:SHOWN]
        if len(found) > SHOWN:
            more = len(found) - SHOWN
            yield self._finding(
                "SHAPE", found[SHOWN].where or "", f"{more} more tensors like these", None, more
            )

    def _all_misshapen(self) -> Iterator[Finding]:
        for name, shape in self.expected.items():
            tensor = self.tensors.get(name)
            if tensor is not None and (
                tensor.shape != shape or tensor.dtype not in PLAIN_DTYPES or self._scales(name)
            ):
                yield from self._check(tensor, shape)

    def _has_place(self, name: str) -> bool:
        if name in self.expected:
            return True
        owner = next((name.removesuffix(side) + ".weight" for side in _SIDES if name.endswith(side)), None)
        if owner is not None:
            return (
                owner in self.expected
                and self._scales(owner) is not None
                and self.tensors[owner].dtype == "U32"
            )
        return name.endswith(_FP8_SCALE) and name.removesuffix("_scale_inv") in self.expected

    def _scales(self, name: str) -> TensorInfo | None:
        return self.tensors.get(name.removesuffix(".weight") + ".scales")

    def _check(self, tensor: TensorInfo, shape: Shape) -> Iterator[Finding]:
        if tensor.name in self.tables:
            yield from self._check_table(tensor, shape, _TABLE_DTYPES[self.tables[tensor.name]])
            return
        scales = self._scales(tensor.name)
        if scales is not None or tensor.dtype == "U32":
            yield from self._check_packed(tensor, scales, shape)
        elif tensor.dtype not in PLAIN_DTYPES and tensor.name + "_scale_inv" not in self.tensors:
            yield self._finding(
                "DTYPE",
                tensor.name,
                f"{tensor.name} is {tensor.dtype} and has no scales: its bytes would be read as numbers",
                "BF16, F16 or F32, or U32 with scales",
                tensor.dtype,
            )
        elif tensor.shape != shape:
            yield self._misshapen(tensor, shape)

    def _check_table(self, tensor: TensorInfo, shape: Shape, dtypes: tuple[str, ...]) -> Iterator[Finding]:
        if tensor.dtype not in dtypes:
            wanted = " or ".join(dtypes)
            message = f"{tensor.name} is {tensor.dtype}; a table of {self.tables[tensor.name]} is {wanted}"
            yield self._finding("DTYPE", tensor.name, message, wanted, tensor.dtype)
        elif tensor.shape != shape:
            yield self._misshapen(tensor, shape)

    def _check_packed(self, tensor: TensorInfo, scales: TensorInfo | None, shape: Shape) -> Iterator[Finding]:
        """A packed weight: words of 32 bits, one scale (and for affine one bias) a group of columns."""
        own = self.settings.get(tensor.name.removesuffix(".weight"))
        settings = {**self.settings, **own} if isinstance(own, dict) else self.settings
        bits, group = settings.get("bits"), settings.get("group_size")
        if scales is None or tensor.dtype != "U32":
            yield self._packed(
                tensor, "has no scales" if scales is None else f"is {tensor.dtype} and has scales"
            )
        elif own is False or type(bits) is not int or type(group) is not int or group < 1:
            yield self._packed(tensor, "is packed, and config.json's quantization block does not say how")
        elif shape[-1] % group or tensor.shape != (*shape[:-1], shape[-1] * bits // 32):
            told = f" at {bits} bits in groups of {group}{_inferred(tensor, scales, shape)}"
            yield self._misshapen(tensor, (*shape[:-1], shape[-1] * bits // 32), told)
        else:
            yield from self._check_sides(tensor, scales, (*shape[:-1], shape[-1] // group), settings)

    def _check_sides(
        self, tensor: TensorInfo, scales: TensorInfo, shape: Shape, settings: Mapping[str, Any]
    ) -> Iterator[Finding]:
        """Affine has float scales and biases, the other modes have byte scales alone."""
        mode = settings.get("mode", "affine")
        biases = self.tensors.get(tensor.name.removesuffix(".weight") + ".biases")
        affine = scales.dtype in PLAIN_DTYPES and biases is not None
        if affine != (mode == "affine") or (not affine and (scales.dtype != "U8" or biases is not None)):
            found = f"{scales.dtype} scales {'and' if biases else 'without'} biases"
            yield self._packed(tensor, f"has {found}, which is not {mode}, the mode that config.json names")
            return
        for side in (scales, biases):
            if side is not None and (side.shape != shape or side.dtype != scales.dtype):
                yield self._misshapen(side, shape, f" at group size {settings['group_size']}")

    def _packed(self, tensor: TensorInfo, problem: str) -> Finding:
        return self._finding("PACKED", tensor.name, f"{tensor.name} {problem}", None, tensor.dtype)

    def _misshapen(self, tensor: TensorInfo, shape: Shape, why: str = "") -> Finding:
        message = f"{tensor.name} has shape {list(tensor.shape)}; config.json asks for {list(shape)}{why}"
        return self._finding("SHAPE", tensor.name, message, list(shape), list(tensor.shape))

    def _listed(self, what: str, words: str, names: list[str]) -> Finding:
        return self._finding(what, names[0], f"{words} {some(names)}", None, len(names))

    def _finding(self, what: str, where: str, message: str, expected: Any, found: Any) -> Finding:
        rule = f"{self.whose}-TENSOR-{what}"
        return Finding(rule, "error", message, where, expected, found, self.hint)


def _inferred(tensor: TensorInfo, scales: TensorInfo, shape: Shape) -> str:
    """What bits and group the words and scales themselves speak of, where they are whole numbers."""
    columns, words, groups = shape[-1], tensor.shape[-1], scales.shape[-1]
    if not columns or not groups or words * 32 % columns or columns % groups:
        return ""
    return (
        f"; its words and scales are those of {words * 32 // columns} bits in groups of {columns // groups}"
    )
