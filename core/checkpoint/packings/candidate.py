"""A weight that is being recognised, the answer when it is, and the refusal when it is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from draftpair.checkpoint.config import ConfigView
from draftpair.checkpoint.dtypes import PLAIN_DTYPES
from draftpair.checkpoint.header import TensorInfo
from draftpair.checkpoint.rope import CONFIG_NAME
from draftpair.checkpoint.wording import count, printable
from draftpair.errors import Refused

SCALE = "scale"
BIASES = "biases"
MULTIPLIER = "multiplier"
DIVISOR = "divisor"
ZERO_POINTS = "zero points"
SHAPE = "shape"
COLUMN_ORDER = "column order"
UNUSED = "unused"
"""Roles of side tensors. An unused one concerns activations or caches: accounted for, and not read."""

E8M0 = "F8_E8M0"
COMPRESSED_TENSORS = "compressed-tensors"

HINT = "Use a release of this model with plain weights, or in a format that draftpair reads."
"""What to do about a format that is not understood."""

_CONFIG_HINT = f"Take {CONFIG_NAME} from the original repository again, or use a release with plain weights."


class UnknownPacking(Refused):
    """A weight is stored in a way that is not understood; the message says which, and what lies beside it."""


@dataclass(frozen=True)
class Packing:
    """How codes become numbers; every tensor's shape has been found to agree.

    `codes` is F8_E4M3, F8_E5M2, F4, INT, or MLX's mode. One scale holds for a `block` of rows and columns, cut
    at the edges; the rows of blocks start anew after `stack` rows, where the next expert begins. `scales` is the
    dtype to read scales as.
    """

    codes: str
    bits: int
    block: tuple[int, int]
    stack: int
    scales: str


@dataclass(frozen=True)
class Stored:
    """A logical tensor and the tensors in the files that make it.

    `shape` is the logical one, `tensors` the weight and then every side tensor. `dtype` is that of the bytes
    which `draftpair.convert.decode.read_rows` gives: the stored one when plain, U32 for mlx, else F32.
    `packing` is None when plain.
    """

    name: str
    shape: tuple[int, ...]
    encoding: str
    tensors: tuple[TensorInfo, ...]
    detail: str
    dtype: str
    packing: Packing | None
    roles: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def rows(self) -> int:
        """Rows of the tensor seen as a matrix; a vector is one row."""
        return prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        """Length of a row; 1 for a scalar."""
        return self.shape[-1] if self.shape else 1

    def side(self, role: str) -> TensorInfo | None:
        """The side tensor of a role."""
        return next((t for t, held in zip(self.tensors[1:], self.roles, strict=True) if held == role), None)


class Candidate(NamedTuple):
    """A weight and what lies beside it, not recognised yet.

    `quantization` is the config's `quantization_config`, {} without one.
    """

    name: str
    weight: TensorInfo
    sides: tuple[tuple[str, TensorInfo], ...]
    tensors: Mapping[str, TensorInfo]
    config: ConfigView
    quantization: Mapping[str, Any]

    @property
    def lead(self) -> tuple[int, ...]:
        """The axes before the matrix: those of the experts."""
        return self.weight.shape[:-2]

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns as stored; refused for scalars and for what is empty."""
        shape = self.weight.shape
        if not shape or not prod(shape):
            raise self.refusal("a packed weight must have rows and columns")
        return (shape[-2] if len(shape) > 1 else 1), shape[-1]

    @property
    def method(self) -> str | None:
        """`quant_method` of the config in small letters, None when it is not stated."""
        method = self.quantization.get("quant_method")
        return method.lower() if isinstance(method, str) else None

    def take(self, *roles: str) -> list[TensorInfo | None]:
        """The side of each role; refused when a role is held twice, or a side has none of these roles."""
        held: dict[str, TensorInfo] = {}
        for role, side in self.sides:
            if role == UNUSED:
                if side.dtype not in PLAIN_DTYPES:
                    raise self.refusal(f"{printable(side.name)} is not a float")
            elif role not in roles:
                raise self.refusal(f"{printable(side.name)} does not go with {self.weight.dtype} weights")
            elif role in held:
                raise self.refusal(f"{printable(held[role].name)} and {printable(side.name)} are both there")
            else:
                held[role] = side
        return [held.get(role) for role in roles]

    def require_method(self, methods: frozenset[str]) -> None:
        """Refused when the config names a method that does not store such tensors."""
        if self.method is not None and self.method not in methods:
            raise self.contradiction(f"quant_method is {quoted(self.method)}")

    def stored(self, encoding: str, columns: int, packing: Packing | None, detail: str) -> Stored:
        """The answer: the stored shape with rows of `columns`."""
        dtype = {"plain": self.weight.dtype, "mlx": "U32"}.get(encoding, "F32")
        tensors = (self.weight, *(side for _, side in self.sides))
        roles = tuple(role for role, _ in self.sides)
        shape = (*self.weight.shape[:-1], columns) if self.weight.shape else ()
        return Stored(self.name, shape, encoding, tensors, detail, dtype, packing, roles)

    def refusal(self, problem: str, hint: str = HINT) -> UnknownPacking:
        """What is wrong, what was found and where, and how many such tensors there are.

        Counting costs a pass over all tensors.
        """
        sides = ", ".join(f"{printable(side.name)} {described(side)}" for _, side in self.sides)
        beside = f"beside {sides}" if sides else "with no scale beside it"
        alike = sum(tensor.dtype == self.weight.dtype for tensor in self.tensors.values())
        verb = "is" if alike == 1 else "are"
        found = f"{described(self.weight)} in {printable(self.weight.file)}, {beside}"
        total = f"{count(alike, 'tensor')} here {verb} {self.weight.dtype}"
        return UnknownPacking(f"{printable(self.name)} cannot be read: {problem} ({found}; {total})", hint)

    def undecided(self, problem: str) -> UnknownPacking:
        """The refusal when the config should have said which of several readings is meant."""
        return self.refusal(problem, _CONFIG_HINT)

    def contradiction(self, problem: str) -> UnknownPacking:
        """The refusal when the config says something else than the tensors."""
        return self.refusal(f"{CONFIG_NAME} contradicts the tensors: {problem}", _CONFIG_HINT)


def described(tensor: TensorInfo) -> str:
    """Dtype and shape as messages put them."""
    return f"{tensor.dtype} {list(tensor.shape)}"


def quoted(value: Any) -> str:
    """A value of the config in a message."""
    return printable(repr(value), 60)


def positive(value: Any) -> bool:
    """Whether a value of the config is a positive integer."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
