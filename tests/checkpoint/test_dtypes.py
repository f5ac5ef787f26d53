"""Numbers of the float dtypes against struct and MLX; sizes of all dtypes against the library."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from draftpair.checkpoint import (
    FLOAT_DTYPES,
    ITEM_BITS,
    from_float32,
    nbytes,
    nonfinite_count,
    to_float32,
)

ALL_16_BIT_WORDS = np.arange(2**16, dtype="<u2")


@pytest.fixture
def mx():
    return pytest.importorskip("mlx.core")


def bits(*words: int) -> np.ndarray:
    return np.array(words, "<u4").view("<f4")


def bf16_words(values: np.ndarray) -> list[int]:
    return np.frombuffer(from_float32(values, "BF16"), "<u2").tolist()


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("BF16", (3, 4), 24),
        ("U32", (), 4),
        ("F4", (4,), 2),
        ("F6_E2M3", (2, 2), 3),
        ("F64", (2, 0, 5), 0),
        ("C64", (3,), 24),
        ("BOOL", (7,), 7),
    ],
)
def test_bytes_of_a_tensor(dtype, shape, expected):
    assert nbytes(dtype, shape) == expected


@pytest.mark.parametrize(("dtype", "shape"), [("F4", (3,)), ("F6_E3M2", (2,)), ("BF8", (1,))])
def test_bytes_of_an_impossible_tensor(dtype, shape):
    with pytest.raises(ValueError, match=dtype):
        nbytes(dtype, shape)


def test_every_dtype_has_a_size():
    assert len(ITEM_BITS) == 22
    assert set(ITEM_BITS) >= FLOAT_DTYPES


def test_every_bf16_word_widens_to_the_float_with_those_upper_bits():
    floats = to_float32(ALL_16_BIT_WORDS.tobytes(), "BF16")
    assert (floats.view("<u4") == ALL_16_BIT_WORDS.astype("<u4") << 16).all()


def test_every_f16_word_widens_as_struct_does():
    floats = to_float32(ALL_16_BIT_WORDS.tobytes(), "F16")
    expected = struct.unpack("<65536e", ALL_16_BIT_WORDS.tobytes())
    assert np.array_equal(floats, np.array(expected, "<f4"), equal_nan=True)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_16_bit_number_survives_the_round_trip(dtype):
    data = ALL_16_BIT_WORDS.tobytes()
    floats = to_float32(data, dtype)
    back = np.frombuffer(from_float32(floats, dtype), "<u2")
    number = ~np.isnan(floats)
    assert (back[number] == ALL_16_BIT_WORDS[number]).all()
    assert np.isnan(to_float32(back.tobytes(), dtype)[~number]).all()


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        pytest.param(0x3F80_0000, 0x3F80, id="exact"),
        pytest.param(0x3F80_7FFF, 0x3F80, id="below the tie"),
        pytest.param(0x3F80_8000, 0x3F80, id="tie to even, down"),
        pytest.param(0x3F81_8000, 0x3F82, id="tie to even, up"),
        pytest.param(0x3F80_8001, 0x3F81, id="above the tie"),
        pytest.param(0xBF81_8000, 0xBF82, id="negative tie"),
        pytest.param(0x3FFF_FFFF, 0x4000, id="carry into the exponent"),
        pytest.param(0x7F7F_FFFF, 0x7F80, id="largest float becomes infinity"),
        pytest.param(0x7F7F_7FFF, 0x7F7F, id="largest that stays finite"),
        pytest.param(0xFF80_0000, 0xFF80, id="minus infinity"),
        pytest.param(0x0000_8000, 0x0000, id="subnormal tie to zero"),
        pytest.param(0x0000_8001, 0x0001, id="smallest subnormal"),
        pytest.param(0x007F_FFFF, 0x0080, id="subnormal rounds to normal"),
        pytest.param(0x8000_0000, 0x8000, id="minus zero"),
        pytest.param(0x7F80_0001, 0x7FC0, id="NaN whose payload would be lost"),
        pytest.param(0xFFFF_FFFF, 0xFFFF, id="NaN that would wrap around"),
    ],
)
def test_bf16_rounding(word, expected):
    assert bf16_words(bits(word)) == [expected]


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_rounding_agrees_with_mlx(mx, dtype):
    words = np.random.default_rng(5).integers(0, 2**32, 200_000, dtype=np.uint32)
    # MLX flushes float32 subnormals on some backends; those words are covered above.
    words = words[(words & 0x7F80_0000) != 0]
    floats = words.view(np.float32)
    kind = {"BF16": mx.bfloat16, "F16": mx.float16}[dtype]
    theirs = np.array(mx.array(floats).astype(kind).view(mx.uint16))
    ours = np.frombuffer(from_float32(floats, dtype), "<u2")
    number = ~np.isnan(floats)
    assert (ours[number] == theirs[number]).all()
    assert np.isnan(to_float32(ours.tobytes(), dtype)[~number]).all()


@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1.0, 65504.0, 2.0**-24, 2.0**-25, 2049.0, 2051.0, 1e-8], ids=repr
)
def test_f16_rounding_agrees_with_struct(value):
    assert from_float32(np.array([value], "f4"), "F16") == struct.pack("<e", np.float32(value))


def test_too_large_for_f16_becomes_infinity():
    assert from_float32(np.array([65520.0, -1e30], "f4"), "F16") == struct.pack("<2e", math.inf, -math.inf)


def test_f32_and_f64_are_exact():
    values = np.array([[1.5, -0.0], [math.inf, 1e-45]], "f4")
    assert from_float32(values, "F32") == values.tobytes()
    assert struct.unpack("<4d", from_float32(values, "F64")) == tuple(values.astype("f8").ravel())
    assert (to_float32(values.tobytes(), "F32") == values.ravel()).all()


def test_f64_beyond_float32_overflows_without_a_warning():
    assert to_float32(struct.pack("<3d", 1e300, -1e300, 1e-300), "F64").tolist() == [math.inf, -math.inf, 0.0]


def test_result_is_fresh_and_writable():
    data = struct.pack("<2f", 1.0, 2.0)
    floats = to_float32(data, "F32")
    floats[0] = 9.0
    assert data == struct.pack("<2f", 1.0, 2.0)


def test_a_memoryview_and_a_transposed_array_are_taken():
    values = np.arange(6, dtype="f4").reshape(2, 3)
    data = memoryview(from_float32(values.T, "BF16"))
    assert to_float32(data, "BF16").tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]


def test_integers_have_no_float_values():
    with pytest.raises(ValueError, match="U32"):
        to_float32(bytes(4), "U32")
    with pytest.raises(ValueError, match="F8_E4M3"):
        from_float32(np.zeros(1, "f4"), "F8_E4M3")


@pytest.mark.parametrize(("dtype", "code"), [("F16", "e"), ("F32", "f"), ("F64", "d")])
def test_nonfinite_values_are_counted(dtype, code):
    values = [0.0, math.nan, 1.0, math.inf, -math.inf, -math.nan, 6e-8]
    assert nonfinite_count(struct.pack(f"<7{code}", *values), dtype) == 4


def test_nonfinite_bf16_words():
    assert nonfinite_count(ALL_16_BIT_WORDS.tobytes(), "BF16") == 2 * 128
    assert nonfinite_count(struct.pack("<3H", 0x7F7F, 0x0001, 0xFF7F), "BF16") == 0


def test_packed_words_are_never_nonfinite():
    assert nonfinite_count(b"\xff" * 64, "U32") == 0
    assert nonfinite_count(b"\xff" * 3, "F8_E4M3") == 0
