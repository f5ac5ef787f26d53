"""How a tensor can be quantized: the modes MLX runs, and what each makes of a tensor a few rows at a time.

Groups never cross a row, so the pieces together are bit for bit what `mx.quantize` makes of the whole
tensor. No MLX is needed for it, and the bytes do not depend on the machine; where MLX is installed its affine kernel
does the work.
"""

from __future__ import annotations

import importlib
import threading
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np

from draftpair.checkpoint.writer import Output
from draftpair.convert.encoders import PATTERNS, encode
from draftpair.errors import Usage

AFFINE = "affine"
WORD_BITS = 32
_WHOLE = 64


@dataclass(frozen=True)
class Mode:
    """What a mode can be asked for, and what it is when not asked."""

    bits: tuple[int, ...]
    group_sizes: tuple[int, ...]
    default_bits: int
    default_group_size: int


# MLX packs single bits too, but mlx-vlm runs those on Metal only.
MODES = {
    AFFINE: Mode((2, 3, 4, 5, 6, 8), (32, 64, 128), 4, 64),
    "mxfp4": Mode((4,), (32,), 4, 32),
    "nvfp4": Mode((4,), (16,), 4, 16),
    "mxfp8": Mode((8,), (32,), 8, 32),
}


_POWER_OF_TWO_SCALES = frozenset({"mxfp4", "mxfp8"})
_WRAPPED = 234
"""From this scale byte on a scale is above 1e32, which no weight needs."""


@dataclass(frozen=True)
class Quantization:
    """One way to quantize a tensor: each group of a row has a scale, and in mode affine a bias.

    Raises Usage for what MLX cannot make or readers of the folder refuse.
    """

    bits: int
    group_size: int
    mode: str = AFFINE

    def __post_init__(self) -> None:
        _check(self.mode, self.bits, self.group_size, None)

    def __str__(self) -> str:
        return f"{self.mode} {self.bits}/{self.group_size}"

    def as_config(self) -> dict[str, Any]:
        """The object that config.json has under `quantization`, for all modules or one."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    def outputs(self, tensor: Output) -> tuple[Output, ...]:
        """What a dense tensor `X.weight` becomes: packed words, `X.scales` and, in mode affine, `X.biases`."""
        *outer, columns = tensor.shape
        stem = tensor.name.removesuffix("weight")
        groups = (*outer, columns // self.group_size)
        words = Output(tensor.name, "U32", (*outer, columns * self.bits // WORD_BITS))
        if self.mode != AFFINE:
            return words, Output(f"{stem}scales", "U8", groups)
        return (
            words,
            Output(f"{stem}scales", tensor.dtype, groups),
            Output(f"{stem}biases", tensor.dtype, groups),
        )

    def rows(self, data: bytes, dtype: str, columns: int) -> tuple[bytes, ...]:
        """Packed words, scales and, in mode affine, biases, as bytes, of whole rows of `columns` values of `dtype`.

        ValueError when a row is no whole number of groups.
        """
        if columns % self.group_size:
            raise ValueError(f"rows of {columns} values are no whole groups of {self.group_size}")
        if self.mode == AFFINE and (mlx := _mlx()) is not None:
            return _by_mlx(mlx, data, dtype, columns, self)
        return encode(data, dtype, self.mode, self.bits, self.group_size)

    def lost_groups(self, scales: bytes) -> int:
        """How many groups of these scales would be read back as huge numbers or infinity.

        MLX lets the exponent of a scale wrap around for groups below about 1e-36 in mxfp8 and 2e-38 in mxfp4, and
        `rows` gives MLX's bytes; what such a group decodes to has nothing to do with what was stored.
        """
        if self.mode not in _POWER_OF_TWO_SCALES:
            return 0
        return int(np.count_nonzero(np.frombuffer(scales, np.uint8) >= _WRAPPED))

    def obstacle(self, tensor: Output) -> str | None:
        """Why the tensor must stay dense, None when it can be quantized."""
        if not tensor.name.endswith(".weight"):
            return "not a weight"
        if len(tensor.shape) < 2:
            return "a vector: too small to matter, and norms need full precision"
        if tensor.dtype not in PATTERNS:
            return f"{tensor.dtype} cannot be quantized"
        size = prod(tensor.shape)
        if not size:
            return "empty"
        if tensor.shape[-1] % self.group_size:
            return f"its rows of {tensor.shape[-1]} are not a multiple of the group size {self.group_size}"
        if size % _WHOLE:
            # mlx-vlm takes such a module for a dense one, and MLX's CPU packs no odd number of nvfp4 groups.
            return f"its {size} values are not a multiple of {_WHOLE}, which loaders ask for"
        return None


def quantization(
    mode: str, bits: int | None, group_size: int | None, given: str | None = None
) -> Quantization:
    """The quantization asked for; what is None is as the mode has it by default.

    Raises Usage that says what is possible. `given` is what the user wrote where it was not `--q-mode`,
    `--q-bits` and `--q-group-size`.
    """
    _require("mode", mode, tuple(MODES), "", given)
    bits = MODES[mode].default_bits if bits is None else bits
    group_size = MODES[mode].default_group_size if group_size is None else group_size
    _check(mode, bits, group_size, given)
    return Quantization(bits, group_size, mode)


@cache
def _mlx() -> Any:
    """The module `mlx.core`, None where it cannot be imported.

    Its affine kernel lets two threads run at once, where numpy's many small steps take turns; the bytes are the same.
    """
    try:
        return importlib.import_module("mlx.core")
    except ImportError:
        return None


_streams = threading.local()


def _by_mlx(mx: Any, data: bytes, dtype: str, columns: int, how: Quantization) -> tuple[bytes, ...]:
    """What `mx.quantize` makes of whole rows, on the CPU, so that the bytes do not depend on there being a GPU."""
    if not hasattr(_streams, "stream"):  # threads that share a stream would take turns
        _streams.stream = mx.new_stream(mx.cpu)
    storage, name = _MLX_TYPES[dtype]
    unsigned = getattr(mx, np.dtype(storage).name)
    with mx.stream(_streams.stream):
        values = mx.array(np.frombuffer(data, storage).reshape(-1, columns)).view(getattr(mx, name))
        words, *sides = mx.quantize(values, group_size=how.group_size, bits=how.bits)
        # numpy has no bfloat16: scales and biases leave MLX as the integers they are stored as.
        parts = [words, *(side.view(unsigned) for side in sides)]
        mx.eval(*parts)
    return tuple(np.array(part).tobytes() for part in parts)


_MLX_TYPES = {"BF16": (np.uint16, "bfloat16"), "F16": (np.uint16, "float16"), "F32": (np.uint32, "float32")}


def _check(mode: str, bits: int, group_size: int, given: str | None) -> None:
    """Raises Usage for what MLX does not have."""
    _require("mode", mode, tuple(MODES), "", given)
    _require("bits", bits, MODES[mode].bits, f" in mode {mode}", given)
    _require("group-size", group_size, MODES[mode].group_sizes, f" in mode {mode}", given)


def _require(name: str, value: object, possible: tuple[object, ...], where: str, given: str | None) -> None:
    if value in possible:
        return
    subject = f"--q-{name}" if given is None else f"{given}: {name.replace('-', ' ')}"
    (only, *others) = possible
    must = f"one of {', '.join(map(str, possible))}" if others else str(only)
    hint = None if others else f"leave it out, or choose mode {AFFINE}, which has more than one"
    raise Usage(f"{subject} ({value}) must be {must}{where}", hint=hint)
