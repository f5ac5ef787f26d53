"""Element types of safetensors: sizes for all of them, numbers for the floating-point ones.

Everything here works on raw little-endian bytes. bfloat16 is handled with integer shifts, so no package
that teaches numpy about it is needed. FP8 and FP4 codes are numbers only together with their scales, so
they are not converted here: `code_values` gives the numbers that codes stand for. Other packed and integer
data stay bytes. numpy is imported on the first conversion only: reading headers must not pay for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

ITEM_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits per element of every dtype that safetensors 0.8 knows."""

FLOAT_DTYPES: frozenset[str] = frozenset({"BF16", "F16", "F32", "F64"})
"""The dtypes whose values `to_float32`, `from_float32` and `nonfinite_count` understand."""

PLAIN_DTYPES: frozenset[str] = FLOAT_DTYPES - {"F64"}
"""The dtypes in which models store weights that are not packed."""

# Unsigned integer of the same width, and the exponent bits: all of them set means infinity or NaN.
_EXPONENT: dict[str, tuple[str, int]] = {
    "BF16": ("<u2", 0x7F80),
    "F16": ("<u2", 0x7C00),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
}
_NUMPY: dict[str, str] = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
# Exponent bits, mantissa bits and exponent bias of floats of a byte or less; a sign bit stands before them.
_SMALL_FLOATS: dict[str, tuple[int, int, int]] = {
    "F4": (2, 1, 1),
    "F8_E4M3": (4, 3, 7),
    "F8_E5M2": (5, 2, 15),
}
_QUIET_BIT = 0x0040


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor; ValueError for an unknown dtype or one that does not fill whole bytes."""
    if dtype not in ITEM_BITS:
        raise ValueError(f"{dtype!r} is not a safetensors dtype")
    whole, rest = divmod(prod(shape) * ITEM_BITS[dtype], 8)
    if rest:
        raise ValueError(f"{dtype} elements of shape {list(shape)} do not fill whole bytes")
    return whole


def to_float32(data: bytes | memoryview, dtype: str) -> np.ndarray:
    """The values of BF16, F16, F32 or F64 bytes as a fresh one-dimensional float32 array.

    Exact for the first three; F64 is rounded to nearest even and overflows to infinity.
    """
    import numpy as np

    _require_float(dtype)
    if dtype == "BF16":
        widened = np.frombuffer(data, "<u2").astype("<u4")
        widened <<= np.uint32(16)
        return widened.view("<f4").astype(np.float32, copy=False)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.frombuffer(data, _NUMPY[dtype]).astype(np.float32)


def from_float32(values: np.ndarray, dtype: str) -> bytes:
    """The bytes of float32 `values` (any shape, row-major) as BF16, F16, F32 or F64.

    Rounds to nearest, ties to even; too large becomes infinity; a NaN stays a NaN with its sign.
    """
    import numpy as np

    _require_float(dtype)
    floats = np.ascontiguousarray(values, "<f4")
    if dtype == "BF16":
        return _round_to_bf16(floats).tobytes()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return floats.astype(_NUMPY[dtype]).tobytes()


@cache
def code_values(dtype: str) -> np.ndarray:
    """What each code of F4 (16 of them), F8_E4M3, F8_E5M2 or F8_E8M0 (256) stands for, in float32.

    OCP's formats: F4 is E2M1 and all numbers; E4M3 has no infinity, and NaN where all bits but the sign are
    set; E5M2 has both, as IEEE does; E8M0 is 2**(code - 127), and 255 is NaN. The array is read-only.
    """
    import numpy as np

    if dtype == "F8_E8M0":
        values = np.ldexp(1.0, np.arange(256) - 127)
        values[255] = np.nan
    else:
        exponent_bits, mantissa_bits, bias = _SMALL_FLOATS[dtype]
        codes = np.arange(1 << (exponent_bits + mantissa_bits))
        exponent, mantissa = codes >> mantissa_bits, codes & ((1 << mantissa_bits) - 1)
        # An exponent of zero means no leading one, and counts as one.
        significand = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa)
        positive = np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
        if dtype == "F8_E4M3":
            positive[-1] = np.nan
        if dtype == "F8_E5M2":
            positive[-4:] = [np.inf, np.nan, np.nan, np.nan]
        values = np.concatenate([positive, -positive])
    table: np.ndarray = values.astype(np.float32)
    table.flags.writeable = False
    return table


def nonfinite_count(data: bytes | memoryview, dtype: str) -> int:
    """How many elements of BF16, F16, F32 or F64 bytes are infinite or NaN; 0 for every other dtype."""
    if dtype not in _EXPONENT:
        return 0
    import numpy as np

    unsigned, mask = _EXPONENT[dtype]
    words = np.frombuffer(data, unsigned)
    if not _any_nonfinite(words, mask):
        return 0
    exponent = words.dtype.type(mask)
    return int(np.count_nonzero((words & exponent) == exponent))


def _any_nonfinite(words: np.ndarray, exponent: int) -> bool:
    """Whether any of the unsigned words has all its exponent bits set.

    Infinity and NaN are the largest words of their sign: as unsigned numbers those with the sign, as signed
    ones those without. Two maxima need no array of their own, and run at several times the speed of masking.
    """
    if not words.size:
        return False
    signed = words.view(words.dtype.str.replace("u", "i"))
    sign = 1 << (8 * words.itemsize - 1)
    return int(words.max()) >= sign | exponent or int(signed.max()) >= exponent


def _round_to_bf16(floats: np.ndarray) -> np.ndarray:
    """The upper halves of float32 words, as uint16, rounded to nearest even."""
    import numpy as np

    words = floats.view("<u4")
    upper = words >> np.uint32(16)
    # Adding 0x7FFF plus the lowest kept bit carries into the upper half exactly when rounding goes up.
    rounded = (words + (upper & np.uint32(1)) + np.uint32(0x7FFF)) >> np.uint32(16)
    # The carry would turn some NaNs into infinities or wrap around: those are truncated and kept quiet.
    is_nan = np.isnan(floats)
    return np.where(is_nan, upper | np.uint32(_QUIET_BIT), rounded).astype("<u2")


def _require_float(dtype: str) -> None:
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"{dtype} has no float32 values here; expected one of {sorted(FLOAT_DTYPES)}")
