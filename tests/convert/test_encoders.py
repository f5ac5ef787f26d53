"""Our encoders against `mx.quantize`, byte for byte, over values chosen to hit every rule."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from draftpair.convert import encoders
from draftpair.convert.encoders import BLOCK_BYTES, encode

mx = pytest.importorskip("mlx.core")

STORAGE = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
EXPONENT = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}
FRACTION_BITS = {"BF16": 7, "F16": 10, "F32": 23}
FLOATING = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}
AFFINE = [(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
WIDTH = 1024
ROWS_A_TIME = 256

# The middles between neighbouring codes, and the codes, of both formats.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([c * 2.0**-9 if c < 8 else (8 + c % 8) * 2.0 ** (c // 8 - 10) for c in range(127)])
LANDMARKS = {
    "mxfp4": np.concatenate([E2M1, (E2M1[:-1] + E2M1[1:]) / 2]),
    # Far from the largest code the distances to several codes are the same, after rounding.
    "nvfp4": np.concatenate([E2M1, (E2M1[:-1] + E2M1[1:]) / 2, 2.0 ** np.arange(20, 30)]),
    "mxfp8": np.concatenate([E4M3, (E4M3[:-1] + E4M3[1:]) / 2]),
    "affine": np.arange(512) / 2,
}


def by_mlx(words: np.ndarray, dtype: str, mode: str, bits: int, group: int) -> list[bytes]:
    """What MLX makes of the rows, some at a time: its own chain of operations needs 38 times the input."""
    unsigned = getattr(mx, np.dtype(STORAGE[dtype]).name)
    kinds = (mx.uint32, unsigned, unsigned) if mode == "affine" else (mx.uint32, mx.uint8)
    pieces = []
    with mx.stream(mx.cpu):
        for first in range(0, len(words), ROWS_A_TIME):
            values = mx.array(words[first : first + ROWS_A_TIME]).view(getattr(mx, NAMES[dtype]))
            made = mx.quantize(values, group_size=group, bits=bits, mode=mode)
            pieces.append([np.array(part.view(k)).tobytes() for part, k in zip(made, kinds, strict=True)])
    return [b"".join(parts) for parts in zip(*pieces, strict=True)]


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest patterns of float64 values, cut to the finite ones."""
    if dtype == "F16":
        return np.clip(values, -65504, 65504).astype(np.float16).view(np.uint16)
    patterns = np.clip(values, -3.38e38, 3.38e38).astype(np.float32).view(np.uint32)
    return patterns if dtype == "F32" else ((patterns.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)


def finite(patterns: np.ndarray, dtype: str) -> np.ndarray:
    """The patterns, with the lowest exponent bit of infinities and NaNs cleared."""
    exponent = EXPONENT[dtype]
    clear = patterns.dtype.type(1 << FRACTION_BITS[dtype])
    return np.where((patterns & exponent) == exponent, patterns & ~clear, patterns)


def signs(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    top = 8 * np.dtype(STORAGE[dtype]).itemsize - 1
    return (rng.integers(0, 2, shape) << top).astype(STORAGE[dtype])


def every_pattern(rng: np.random.Generator, dtype: str, mode: str) -> np.ndarray:
    """All finite 16-bit patterns, in several random orders; for float32 with four different lower halves."""
    if dtype == "F32":
        upper = every_pattern(rng, "BF16", mode).astype(np.uint32) << 16
        return upper | rng.choice([0, 1, 0x8000, 0xFFFF], upper.shape).astype(np.uint32)
    patterns = finite(np.arange(1 << 16, dtype=np.uint16), dtype)
    return np.concatenate([rng.permutation(patterns) for _ in range(8)]).reshape(-1, WIDTH)


def near_magnitudes(rng: np.random.Generator, dtype: str, mode: str) -> np.ndarray:
    """Groups of all magnitudes there are, whose values differ by at most eight binary orders."""
    bits = FRACTION_BITS[dtype]
    highest = (EXPONENT[dtype] >> bits) - 1
    largest = rng.integers(0, highest + 1, ((1 << 19) // 16, 1))
    exponents = np.clip(largest - rng.integers(0, 9, (len(largest), 16)), 0, None)
    fractions = rng.integers(0, 1 << bits, exponents.shape)
    patterns = (exponents << bits | fractions).astype(STORAGE[dtype])
    return (patterns | signs(rng, patterns.shape, dtype)).reshape(-1, WIDTH)


def landmarks(rng: np.random.Generator, dtype: str, mode: str) -> np.ndarray:
    """Codes and middles between codes, times the scale of their group, and the patterns beside them.

    A power of two times the largest code sets the scale, or a number of few bits, or one out of reach.
    """
    groups, width = (1 << 20) // 64, 64
    marks = LANDMARKS[mode]
    scales = 2.0 ** rng.integers(-30, 12, (groups, 1))
    if mode == "nvfp4":
        saturated = rng.random((groups, 1)) < 0.2
        scales = np.where(saturated, 448.0, rng.choice(E4M3[1:], (groups, 1)))
        limit = np.where(saturated, 2.0**29, 6.0)
    else:
        limit = marks.max()
    values = rng.choice(marks, (groups, width)) * scales
    values = np.minimum(values, limit * scales)
    values[:, ::16] = limit * scales
    patterns = stored(values, dtype).astype(np.int64)
    beside = rng.integers(-1, 2, patterns.shape)
    # The largest values move as well, for all of a group or not at all, so that scales are met from both sides.
    beside[:, ::16] = rng.integers(-1, 2, (groups, 1))
    patterns = np.maximum(patterns + beside, 0).astype(STORAGE[dtype])
    return (finite(patterns, dtype) | signs(rng, patterns.shape, dtype)).reshape(-1, WIDTH)


def tiny(rng: np.random.Generator, dtype: str, mode: str) -> np.ndarray:
    """Zeros of both signs, whole groups of them, subnormal numbers and the smallest normal ones."""
    shape = ((1 << 18) // 16, 16)
    widths = rng.integers(0, FRACTION_BITS[dtype] + 4, (shape[0], 1))
    patterns = rng.integers(0, 1 << 62, shape) & ((1 << widths) - 1)
    return (patterns.astype(STORAGE[dtype]) | signs(rng, shape, dtype)).reshape(-1, WIDTH)


def weights(rng: np.random.Generator, dtype: str, mode: str) -> np.ndarray:
    """What the weights of a model look like."""
    return stored(rng.standard_normal(1 << 19) * 0.02, dtype).reshape(-1, WIDTH)


KINDS: list[Callable[[np.random.Generator, str, str], np.ndarray]] = [
    every_pattern,
    near_magnitudes,
    landmarks,
    tiny,
    weights,
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", STORAGE)
@pytest.mark.parametrize("mode", FLOATING)
def test_floating_modes_are_bit_for_bit_mlx(
    mode: str, dtype: str, kind: Callable[[np.random.Generator, str, str], np.ndarray]
) -> None:
    words = kind(np.random.default_rng(0), dtype, mode)
    made = encode(words.tobytes(), dtype, mode, *FLOATING[mode])
    assert list(made) == by_mlx(words, dtype, mode, *FLOATING[mode])


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", STORAGE)
def test_affine_is_bit_for_bit_mlx(
    dtype: str, kind: Callable[[np.random.Generator, str, str], np.ndarray]
) -> None:
    words = kind(np.random.default_rng(1), dtype, "affine")
    for part, (bits, group) in zip(np.array_split(words, len(AFFINE)), AFFINE, strict=True):
        made = encode(part.tobytes(), dtype, "affine", bits, group)
        assert list(made) == by_mlx(part, dtype, "affine", bits, group), (bits, group)


MODES = [("affine", 4, 64), ("affine", 5, 32), *((mode, *how) for mode, how in FLOATING.items())]


@pytest.mark.parametrize(("mode", "bits", "group"), MODES)
def test_pieces_give_the_bytes_of_the_whole(mode: str, bits: int, group: int) -> None:
    """Pieces of a block, of several blocks and a rest, and of a single row."""
    words = weights(np.random.default_rng(2), "BF16", mode)
    assert words.nbytes > 3 * BLOCK_BYTES
    whole = encode(words.tobytes(), "BF16", mode, bits, group)
    for edges in ([1, 2, 7], [128], [300, 301]):
        pieces = [encode(p.tobytes(), "BF16", mode, bits, group) for p in np.split(words, edges)]
        assert tuple(b"".join(parts) for parts in zip(*pieces, strict=True)) == whole


@pytest.mark.parametrize(("mode", "bits", "group"), MODES)
@pytest.mark.parametrize("dtype", STORAGE)
def test_a_single_group_is_enough(mode: str, bits: int, group: int, dtype: str) -> None:
    """And the input is left as it was, even where it can be written to."""
    words = weights(np.random.default_rng(3), dtype, mode)[:2, : 2 * group].copy()
    expected = by_mlx(words, dtype, mode, bits, group)
    data = bytearray(words.tobytes())
    made = encode(memoryview(data)[: group * words.itemsize], dtype, mode, bits, group)
    assert [expected[at][: len(part)] for at, part in enumerate(made)] == list(made)
    assert data == words.tobytes()


@pytest.mark.parametrize(("mode", "bits", "group"), MODES)
def test_threads_do_not_disturb_one_another(mode: str, bits: int, group: int) -> None:
    """Four at once, from the first table lookup on."""
    pieces = [weights(np.random.default_rng(seed), "BF16", mode)[:200].tobytes() for seed in range(8)]
    expected = [encode(piece, "BF16", mode, bits, group) for piece in pieces]
    for table in (encoders._table, encoders._powers_of_two, encoders._mxfp4_limits, encoders._nvfp4_limits):
        table.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda piece: encode(piece, "BF16", mode, bits, group), pieces)) == expected


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize(("mode", "bits", "group"), MODES)
def test_memory_does_not_grow_with_the_input(mode: str, bits: int, group: int, dtype: str) -> None:
    """64 MiB in pieces of 1 MiB, as the stream hands them over."""
    data = memoryview(bytes(1 << 20) * 64)
    encode(data[: 1 << 20], dtype, mode, bits, group)
    tracemalloc.start()
    try:
        for begin in range(0, len(data), 1 << 20):
            encode(data[begin : begin + (1 << 20)], dtype, mode, bits, group)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 << 20


@pytest.mark.parametrize(("mode", "bits", "group"), MODES)
@pytest.mark.parametrize("dtype", STORAGE)
def test_values_that_are_not_finite_do_no_harm(mode: str, bits: int, group: int, dtype: str) -> None:
    """They are refused elsewhere, by name, and must not end in an exception here first; others keep their codes."""
    words = weights(np.random.default_rng(4), dtype, mode)[:1]
    clean = encode(words.tobytes(), dtype, mode, bits, group)
    infinity = EXPONENT[dtype]
    sign = 1 << (8 * words.itemsize - 1)
    words[0, :4] = [infinity, infinity | sign, infinity | 1, (infinity | 1) | sign]
    for at, part in enumerate(encode(words.tobytes(), dtype, mode, bits, group)):
        unharmed = len(part) // (WIDTH // group)
        assert part[unharmed:] == clean[at][unharmed:]
