"""Values that are not finite: found wherever they are, and never seen where there is none."""

from __future__ import annotations

import numpy as np
import pytest

from draftpair.checkpoint.dtypes import nonfinite_count

# Unsigned type, exponent bits, and numpy's float of the same width where it has one.
KINDS = {
    "BF16": ("<u2", 0x7F80, None),
    "F16": ("<u2", 0x7C00, "<f2"),
    "F32": ("<u4", 0x7F80_0000, "<f4"),
    "F64": ("<u8", 0x7FF0_0000_0000_0000, "<f8"),
}


def boundary_words(dtype: str) -> list[tuple[int, bool]]:
    """Words beside each boundary, with both signs, and whether they are finite."""
    unsigned, exponent, _ = KINDS[dtype]
    bits = 8 * np.dtype(unsigned).itemsize
    top = (1 << (bits - 1)) - 1
    plain = [
        (0, True),
        (1, True),
        (exponent - 1, True),
        (exponent, False),
        (exponent + 1, False),
        (top, False),
    ]
    return [(word | sign << (bits - 1), finite) for sign in (0, 1) for word, finite in plain]


@pytest.mark.parametrize("dtype", KINDS)
def test_a_single_word_is_judged_alone_and_among_others(dtype: str) -> None:
    unsigned = KINDS[dtype][0]
    finite = np.array([word for word, is_finite in boundary_words(dtype) if is_finite], unsigned)
    many = np.resize(finite, 1003)
    assert nonfinite_count(many.tobytes(), dtype) == 0
    for word, is_finite in boundary_words(dtype):
        assert nonfinite_count(np.array([word], unsigned).tobytes(), dtype) == (not is_finite), hex(word)
        for place in (0, 500, 1002):
            changed = many.copy()
            changed[place] = word
            assert nonfinite_count(changed.tobytes(), dtype) == (not is_finite), hex(word)


@pytest.mark.parametrize("dtype", ["F16", "F32", "F64"])
def test_random_words_agree_with_numpy(dtype: str) -> None:
    unsigned, _, floating = KINDS[dtype]
    words = np.random.default_rng(3).integers(0, np.iinfo(unsigned).max, 5000, unsigned, endpoint=True)
    for part in (words, words[:7], words[-1:]):
        expected = int(np.count_nonzero(~np.isfinite(part.view(floating))))
        assert nonfinite_count(part.tobytes(), dtype) == expected


@pytest.mark.parametrize("dtype", [*KINDS, "U8"])
def test_no_bytes_hold_no_values(dtype: str) -> None:
    assert nonfinite_count(b"", dtype) == 0
