"""Quantizes with numpy, bit for bit as MLX does, in all four of its modes.

The promise is equality with `mx.quantize` of MLX 0.32.4 on a CPU for every finite BF16, F16 and F32 value,
subnormal ones and groups whose scale saturates or wraps around included. MLX's CPU has a kernel for affine
only, and needs 3 to 38 times the input in memory for the other modes. Here a block at a time is worked on: a few
megabytes are enough, and numpy lets go of Python's lock, so that threads add up.

Values are handled as the bits they are stored as: without the sign bit, the pattern of a larger number is
the larger integer. Codes and scales are OCP's formats: E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives),
E4M3 (up to 448) and E8M0 (powers of two).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from draftpair.checkpoint.dtypes import code_values, from_float32, to_float32

BLOCK_BYTES = 1 << 18
"""Input that is worked on at once: with its intermediate results it fits the caches close to a core."""

PATTERNS = {"BF16": "<u2", "F16": "<u2", "F32": "<u4"}
"""The dtypes that can be quantized, and the unsigned integers their values are read as."""

_UNIT = 16  # bytes that move as one when a block is rearranged
_FP4_LARGEST, _FP8_LARGEST = 6.0, 448.0
_LOWEST_EXPONENT, _HIGHEST_EXPONENT = -149, 127
_E8M0_BIAS = 127

_Encoder = Callable[[np.ndarray, str], tuple[bytes, ...]]
_Scales = Callable[[np.ndarray, str], np.ndarray]


def encode(data: bytes | memoryview, dtype: str, mode: str, bits: int, group_size: int) -> tuple[bytes, ...]:
    """Packed words and scales, and biases in mode affine, of whole groups of values.

    `data` is little-endian `dtype`. The first value has the lowest bits of a 32-bit word, stored
    little-endian. Scales and biases of affine have the dtype of the values, other scales are a byte each.
    What NaN and infinity become has no meaning.
    """
    patterns = np.frombuffer(data, PATTERNS[dtype])
    step = BLOCK_BYTES // patterns.itemsize
    blocks = (patterns[begin : begin + step] for begin in range(0, len(patterns), step))
    with np.errstate(all="ignore"):
        if mode == "affine":
            parts = [_affine(block, dtype, bits, group_size) for block in blocks]
        else:
            parts = [_FLOATING[mode](block, dtype) for block in blocks]
    return tuple(b"".join(pieces) for pieces in zip(*parts, strict=True))


def _affine(block: np.ndarray, dtype: str, bits: int, group_size: int) -> tuple[bytes, ...]:
    """A value is about scale * code + bias. Zero and the end of the range that is farther from it are met exactly."""
    patterns, lanes = _by_place(block, group_size)
    values = _values(patterns, dtype)
    high, low = _of_groups(np.maximum, values, lanes), _of_groups(np.minimum, values, lanes)
    steps = np.float32((1 << bits) - 1)
    from_low = np.abs(low) > np.abs(high)
    scale = np.maximum((high - low) / steps, np.float32(1e-7))
    scale = np.where(from_low, scale, -scale)
    edge = np.where(from_low, low, high)
    code_of_zero = np.rint(edge / scale)
    exact = code_of_zero != 0
    scale = np.where(exact, edge / code_of_zero, scale)
    bias = np.where(exact, edge, np.float32(0))
    values -= np.repeat(bias, lanes)
    values /= np.repeat(scale, lanes)
    codes = _at_most(int(steps), _rounded_to_integers(values, 0)).astype(np.uint8)
    words = _pack(_in_order(codes, lanes), bits)
    return words, from_float32(scale, dtype), from_float32(bias, dtype)


def _mxfp4(block: np.ndarray, dtype: str) -> tuple[bytes, ...]:
    patterns, lanes = _by_place(block, 32)
    magnitudes, negative = _magnitudes(patterns)
    exponents = _scales(_mxfp4_exponents, _of_groups(np.maximum, magnitudes, lanes), dtype)
    codes = _fp4_codes(magnitudes, negative, _mxfp4_limits(dtype), exponents - _LOWEST_EXPONENT)
    return _pack(_in_order(codes, lanes), 4), _e8m0(exponents)


def _nvfp4(block: np.ndarray, dtype: str) -> tuple[bytes, ...]:
    patterns, lanes = _by_place(block, 16)
    magnitudes, negative = _magnitudes(patterns)
    largest = _of_groups(np.maximum, magnitudes, lanes)
    scales = _scales(_nvfp4_scales, largest, dtype)
    codes = _in_order(_fp4_codes(magnitudes, negative, _nvfp4_limits(dtype), scales), lanes)
    far = np.flatnonzero(largest > _floor(np.array(_FAR), dtype))
    if far.size:
        codes.reshape(-1, 16)[far] = _far_codes(block.reshape(-1, 16)[far], dtype)
    return _pack(codes, 4), scales.astype(np.uint8).tobytes()


def _mxfp8(block: np.ndarray, dtype: str) -> tuple[bytes, ...]:
    patterns, lanes = _by_place(block, 32)
    magnitudes, negative = _magnitudes(patterns)
    exponents = _scales(_mxfp8_exponents, _of_groups(np.maximum, magnitudes, lanes), dtype)
    quotients = _values(magnitudes, dtype)
    quotients /= np.repeat(_powers_of_two().take(exponents - _LOWEST_EXPONENT, mode="clip"), lanes)
    codes = _fp8_codes(quotients).astype(np.uint8)
    codes += negative.view(np.uint8) * np.uint8(0x80)
    return _in_order(codes, lanes).tobytes(), _e8m0(exponents)


_FLOATING: dict[str, _Encoder] = {"mxfp4": _mxfp4, "nvfp4": _nvfp4, "mxfp8": _mxfp8}


# How a block lies in memory while it is worked on.


def _by_place(block: np.ndarray, group_size: int) -> tuple[np.ndarray, int]:
    """A copy of the block as rows that have 16 bytes of each group, and the number of values in 16 bytes.

    numpy is fast on long rows, and what belongs to a group lies only so many times in a row, not
    `group_size` times. Complex numbers stand for 16 bytes of any kind.
    """
    rows = group_size * block.itemsize // _UNIT
    units = block.view(np.complex128).reshape(-1, rows)
    return units.T.copy().view(block.dtype), _UNIT // block.itemsize


def _in_order(codes: np.ndarray, lanes: int) -> np.ndarray:
    """Codes, a byte each, laid out by `_by_place`, in the order of the values they stand for."""
    return np.ascontiguousarray(codes.view(f"u{lanes}").T).view(np.uint8).reshape(-1)


def _of_groups(choose: np.ufunc, rows: np.ndarray, lanes: int) -> np.ndarray:
    """The largest or smallest value of each group."""
    found: np.ndarray = choose.reduce(rows, axis=0)
    while lanes > 1:
        found, lanes = choose(found[0::2], found[1::2]), lanes // 2
    return found


def _magnitudes(patterns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The patterns without their sign bits, in place, and which values had one."""
    sign = patterns.dtype.type(1 << (8 * patterns.itemsize - 1))
    negative = patterns >= sign
    patterns &= sign - patterns.dtype.type(1)
    return patterns, negative


def _values(patterns: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers the patterns stand for, in float32."""
    return to_float32(patterns.data, dtype).reshape(patterns.shape)


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """The float32 values, in one dimension, rounded to what `dtype` can hold."""
    return to_float32(from_float32(values, dtype), dtype)


def _pack(codes: np.ndarray, bits: int) -> bytes:
    """The codes, a byte each and a multiple of eight of them, without the upper bits of the bytes."""
    while bits <= 4:
        pairs = codes.view("<u2")
        codes = ((pairs >> np.uint16(8 - bits)) | pairs).astype(np.uint8)
        bits *= 2
    if bits == 8:
        return codes.tobytes()
    # Eight codes become `bits` bytes: the upper one of two neighbouring lanes moves down to the lower one.
    words, lane, width = codes.view("<u8"), 8, bits
    while lane < 64:
        lower = np.uint64(sum(((1 << width) - 1) << place for place in range(0, 64, 2 * lane)))
        upper = lower << np.uint64(width)
        words = (words & lower) | (words >> np.uint64(lane - width) & upper)
        lane, width = lane * 2, width * 2
    found = words.view(np.uint8).reshape(-1, 8)
    packed = np.empty((len(words), bits), np.uint8)
    for column in range(bits):
        packed[:, column] = found[:, column]
    return packed.tobytes()


# The scales of the floating modes.


def _scales(compute: _Scales, largest: np.ndarray, dtype: str) -> np.ndarray:
    """What `compute` makes of each group's largest magnitude: looked up where there are few magnitudes."""
    if largest.itemsize > 2:
        return compute(largest, dtype)
    found: np.ndarray = _table(compute, dtype).take(largest)
    return found


@cache
def _table(compute: _Scales, dtype: str) -> np.ndarray:
    return compute(np.arange(1 << 15, dtype=np.uint16), dtype)


def _mxfp4_exponents(largest: np.ndarray, dtype: str) -> np.ndarray:
    return _exponents(largest, dtype, _FP4_LARGEST)


def _mxfp8_exponents(largest: np.ndarray, dtype: str) -> np.ndarray:
    return _exponents(largest, dtype, _FP8_LARGEST)


def _exponents(largest: np.ndarray, dtype: str, representable: float) -> np.ndarray:
    """Exponents of the smallest powers of two that bring the largest magnitudes within `representable`.

    MLX rounds the quotient to the dtype of the values before it takes the logarithm. A quotient of zero has
    exponent zero. Those of infinity and NaN are not defined: whoever looks something up by exponent clips.
    """
    quotients = _rounded(_values(largest, dtype) / np.float32(representable), dtype)
    fractions, exponents = np.frexp(quotients)
    below: np.ndarray = exponents.astype(np.int16) - (fractions == 0.5)
    return below


def _nvfp4_scales(largest: np.ndarray, dtype: str) -> np.ndarray:
    """E4M3 codes of the scales that bring the largest magnitudes to 6."""
    return _fp8_codes(_values(largest, dtype) / np.float32(_FP4_LARGEST))


def _e8m0(exponents: np.ndarray) -> bytes:
    """The bytes of powers of two. Below 2**-127 they wrap around, as MLX's do."""
    return (exponents + _E8M0_BIAS).astype(np.uint8).tobytes()


@cache
def _powers_of_two() -> np.ndarray:
    """2**e in float32 from the lowest exponent to the highest."""
    exponents = np.arange(_LOWEST_EXPONENT, _HIGHEST_EXPONENT + 1)
    return np.ldexp(np.ones(len(exponents), np.float32), exponents)


# Codes.


def _fp8_codes(values: np.ndarray) -> np.ndarray:
    """E4M3 codes of values that are not negative, rounded to nearest even and at most 448. Overwrites the values."""
    # Up to 2**-6, code 8, E4M3 counts steps of 2**-9.
    subnormal = _at_most(8, _rounded_to_integers(values, 9))
    # From there the code is the exponent and the upper three bits of the fraction: 20 bits of a float32 go.
    # Carried on below, it gives smaller codes than the steps do: the larger of the two is right everywhere.
    patterns = values.view(np.int32)
    last_kept = patterns >> 20
    last_kept &= 1
    patterns += np.int32((1 << 19) - 1 - ((127 - 7) << 23))
    patterns += last_kept
    patterns >>= 20
    np.maximum(patterns, subnormal, out=patterns)
    return _at_most(126, patterns)


def _rounded_to_integers(values: np.ndarray, fraction_bits: int) -> np.ndarray:
    """values * 2**fraction_bits rounded to nearest even, as int32. Results beyond 2**22 are only larger than that."""
    # Numbers this large have steps of exactly 2**-fraction_bits: adding one of them rounds.
    large = np.float32(1.5 * 2.0 ** (23 - fraction_bits))
    shifted = (values + large).view(np.int32)
    shifted -= large.view(np.int32)
    return shifted


def _at_most(limit: int, integers: np.ndarray) -> np.ndarray:
    """The integers with larger ones lowered to the limit, in place."""
    # numpy compares with a row of numbers three times as fast as with one.
    row = np.full(integers.shape[-1], limit, integers.dtype)
    np.minimum(integers, row, out=integers)
    return integers


def _fp4_codes(
    magnitudes: np.ndarray, negative: np.ndarray, limits: np.ndarray, scales: np.ndarray
) -> np.ndarray:
    """E2M1 codes: how many of its group's seven limits a value exceeds, and 8 more for a negative one.

    `limits` has them for every scale, `scales` is each group's place there. Zero has no sign.
    """
    codes = np.zeros(magnitudes.shape, np.uint8)
    exceeds = np.empty(magnitudes.shape, np.bool_)
    scales = scales.astype(np.intp)
    for limit in limits:
        np.greater(magnitudes, limit.take(scales, axis=0, mode="clip").reshape(-1), out=exceeds)
        codes += exceeds.view(np.uint8)
    negative &= codes > 0
    codes += negative.view(np.uint8) * np.uint8(8)
    return codes


@cache
def _mxfp4_limits(dtype: str) -> np.ndarray:
    return _fp4_limits(_powers_of_two(), dtype)


@cache
def _nvfp4_limits(dtype: str) -> np.ndarray:
    limits = _fp4_limits(code_values("F8_E4M3")[:127], dtype)
    # With a scale of zero MLX divides by zero, and makes zeros of what comes out.
    limits[:, 0] = np.iinfo(limits.dtype).max
    return limits


def _fp4_limits(scales: np.ndarray, dtype: str) -> np.ndarray:
    """The largest patterns that are rounded down, at the seven middles between E2M1 values and for each scale.

    An array [7, scales, values in 16 bytes] that is constant along the last axis. MLX divides by the scale
    and takes the nearer value, of two equally near ones the smaller. That it rounds the quotient to `dtype`
    changes nothing: middle times scale has so few bits that the quotient of the next value stays away from it.
    """
    values = code_values("F4")[:8].astype(np.float64)
    middles = (values[:-1] + values[1:]) / 2
    limits = _floor(np.outer(middles, scales.astype(np.float64)), dtype)
    return np.repeat(limits[..., None], _UNIT // limits.itemsize, axis=-1)


def _floor(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """Patterns of the largest values of `dtype` that are not above the positive float64 `numbers`."""
    kind, pattern = (np.float16, np.uint16) if dtype == "F16" else (np.float32, np.uint32)
    nearest = numbers.astype(kind)
    below: np.ndarray = nearest.view(pattern) - (nearest > numbers)
    # bfloat16 is the upper half of a float32.
    return (below >> 16 if dtype == "BF16" else below).astype(PATTERNS[dtype])


_FAR = _FP8_LARGEST * 2.0**25
"""Up to this magnitude 6 is the nearest E2M1 value to nvfp4's large quotients, in float32 as well."""


def _far_codes(patterns: np.ndarray, dtype: str) -> np.ndarray:
    """Codes of nvfp4 groups with values of billions, far beyond what the largest scale brings to 6.

    MLX takes the E2M1 value at the least distance, in float32, and the first of equal ones. Beyond 2**25
    distances are rounded to multiples of four: another value than 6 may come first, and beyond 2**27 zero does.
    """
    quotients = _rounded(_values(patterns, dtype).reshape(-1) / np.float32(_FP8_LARGEST), dtype)
    sizes = np.abs(quotients)
    codes, least = np.zeros(len(sizes), np.uint8), sizes
    for code, value in enumerate(code_values("F4")[1:8], start=1):
        distances = np.abs(sizes - value)
        codes[distances < least] = code
        least = np.minimum(least, distances)
    codes[(quotients < 0) & (codes > 0)] += 8
    return codes.reshape(patterns.shape)
