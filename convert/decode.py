"""Rows of a stored tensor as numbers: packed weights are decoded once, to float32, and only as they are asked for.

Codes become numbers by tables that give two to four of them at a time. Then, in float32 and in this order: the
zero point is subtracted, which is exact; a second scale, if there is one, goes into the first, which is rounded;
and that product multiplies the number, which is rounded again. With one scale there is one multiplication and one
rounding. compressed-tensors 0.20.1 and nvidia-modelopt 0.47.0 do it in the same order, so that float32 results
are theirs bit for bit. Codes and scales that are NaN or infinite come out as such, for the checks that follow.

Beside the bytes read and the result, memory is needed for the scales of the rows, and for a strip of `_STRIP`
values at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import gcd

import numpy as np

from draftpair.checkpoint.dtypes import FLOAT_DTYPES, ITEM_BITS, code_values, from_float32, to_float32
from draftpair.checkpoint.header import TensorInfo
from draftpair.checkpoint.packings.candidate import (
    BIASES,
    COLUMN_ORDER,
    DIVISOR,
    E8M0,
    HINT,
    MULTIPLIER,
    SCALE,
    SHAPE,
    ZERO_POINTS,
)
from draftpair.checkpoint.stored import Packing, Stored, UnknownPacking
from draftpair.checkpoint.wording import printable

Read = Callable[[TensorInfo, int, int], bytes]
"""Bytes begin to end of a tensor's data."""

_STRIP = 1 << 16
# Bits that a table takes at a time: its entries are then as wide as numpy copies at once, 8 or 16 bytes.
_TABLE_BITS = {8: 16, 4: 16, 2: 8}
_ENTRY = {8: np.dtype("u8"), 16: np.dtype("c16")}


def read_rows(read: Read, stored: Stored, begin: int, end: int) -> bytes:
    """Rows begin to end of the tensor seen as `stored.rows` rows, little-endian, in `stored.dtype`.

    Plain rows and MLX's words come as they lie in the file; the rows of MLX's scales and biases are the same ones,
    to be read by themselves. ValueError for rows that are not there; UnknownPacking when the data says that the
    header was understood wrongly.
    """
    if stored.packing is None or stored.encoding == "mlx":
        return _rows_of(read, stored, stored.tensors[0], begin, end)
    return dequantize_rows(read, stored, begin, end).astype("<f4", copy=False).tobytes()


def dequantize_rows(read: Read, stored: Stored, begin: int, end: int) -> np.ndarray:
    """The numbers of rows begin to end, float32 `[end - begin, columns]`, whatever the encoding.

    For MLX's packing they are bit for bit what `mx.dequantize` of mlx 0.32.4 gives on the CPU, cast to float32. In
    affine mode MLX computes in the dtype of the scales and rounds to it twice, after the product and after the sum;
    in the other modes the result is exact in float32.
    """
    data = _rows_of(read, stored, stored.tensors[0], begin, end)
    packing = stored.packing
    if packing is None:
        return to_float32(data, stored.dtype).reshape(end - begin, stored.columns)
    values = np.empty((end - begin, stored.columns), np.float32)
    if begin == end:
        return values
    _check_order(read, stored)
    codes = np.frombuffer(data, np.uint8).reshape(end - begin, -1)
    scales = _scales(read, stored, packing, begin, end)
    zeros = _zero_points(read, stored, packing, begin, end)
    biases = _biases(read, stored, begin, end)
    step = max(1, _STRIP // stored.columns)
    with np.errstate(all="ignore"):
        for first in range(0, end - begin, step):
            strip = slice(first, first + step)
            numbers = values[strip]
            _fill(numbers, codes[strip], packing)
            if zeros is not None:
                _spread(np.subtract, numbers, zeros[strip], packing)
            _spread(np.multiply, numbers, scales[strip], packing)
            if biases is not None:
                _round(numbers, packing.scales)
                _spread(np.add, numbers, biases[strip], packing)
                _round(numbers, packing.scales)
    return values


def _rows_of(read: Read, stored: Stored, tensor: TensorInfo, begin: int, end: int) -> bytes:
    """Rows of a tensor that has as many of them as the logical one."""
    if not 0 <= begin <= end <= stored.rows:
        raise ValueError(f"rows {begin} to {end} do not lie in {stored.name} of {stored.rows} rows")
    size = tensor.nbytes // stored.rows if stored.rows else 0
    return read(tensor, begin * size, end * size)


# Codes ------------------------------------------------------------------------------------------------------


def _fill(numbers: np.ndarray, codes: np.ndarray, packing: Packing) -> None:
    """Put into rows of numbers what rows of bytes stand for before they are scaled; bytes may go on past a row."""
    if packing.bits not in _TABLE_BITS:
        numbers[...] = _odd_integers(codes, packing.bits).reshape(len(codes), -1)[:, : numbers.shape[1]]
        return
    padded = codes.shape[1] * 8 // packing.bits
    if padded > numbers.shape[1]:
        wider = np.empty((len(codes), padded), np.float32)
        _fill(wider, codes, packing)
        numbers[...] = wider[:, : numbers.shape[1]]
        return
    each, flat = numbers.reshape(-1), codes.reshape(-1)
    wide = _TABLE_BITS[packing.bits] // 8
    table = _table(packing.codes, packing.bits)
    whole = flat.size // wide * wide
    # In this mode numpy writes straight into the array; no index can be outside of the table.
    entries = each[: whole * 8 // packing.bits].view(table.dtype)
    np.take(table, flat[:whole].view(f"<u{wide}"), out=entries, mode="clip")
    each[whole * 8 // packing.bits :] = _each(flat[whole:], packing.codes, packing.bits).reshape(-1)


@cache
def _table(codes: str, bits: int) -> np.ndarray:
    """The numbers for every pattern of so many bytes, those of one pattern as one entry; the first code is lowest."""
    each = _each(np.arange(1 << _TABLE_BITS[bits]), codes, bits, _TABLE_BITS[bits])
    return each.view(_ENTRY[each.itemsize * each.shape[1]]).reshape(-1)


def _each(patterns: np.ndarray, codes: str, bits: int, size: int = 8) -> np.ndarray:
    """The numbers of every code in each pattern of `size` bits, `[patterns, codes of one]`."""
    shifts = np.arange(0, size, bits)
    numbers: np.ndarray = _values_of(codes, bits)[patterns[:, None] >> shifts & (1 << bits) - 1]
    return numbers


def _values_of(codes: str, bits: int) -> np.ndarray:
    """The number of every single code."""
    if codes == "INT":
        return np.arange(1 << bits, dtype=np.float32) - np.float32(1 << (bits - 1))
    if codes == "affine":
        return np.arange(1 << bits, dtype=np.float32)
    return code_values({"mxfp4": "F4", "nvfp4": "F4", "mxfp8": "F8_E4M3"}.get(codes, codes))


def _odd_integers(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of 3, 5 and 6 bits: the fewest bytes that hold whole codes are one integer at a time."""
    size = bits // gcd(bits, 8)
    units = codes.reshape(-1, size)
    packed = np.zeros(len(units), np.uint64)
    for place in range(size):
        packed |= units[:, place].astype(np.uint64) << np.uint64(8 * place)
    shifts = np.arange(0, 8 * size, bits, dtype=np.uint64)
    numbers: np.ndarray = (packed[:, None] >> shifts & np.uint64((1 << bits) - 1)).astype(np.float32)
    return numbers


# Scales -----------------------------------------------------------------------------------------------------


def _spread(operation: np.ufunc, numbers: np.ndarray, sides: np.ndarray, packing: Packing) -> None:
    """Apply to each number, in place, what it shares with the other columns of its block."""
    width = packing.block[1]
    rows, columns = numbers.shape
    if columns % width:
        operation(numbers, np.repeat(sides, width, axis=1)[:, :columns], out=numbers)
        return
    blocks = numbers.reshape(rows, -1, width)
    operation(blocks, sides[:, :, None], out=blocks)


def _scales(read: Read, stored: Stored, packing: Packing, begin: int, end: int) -> np.ndarray:
    """Scales of every row, `[rows, scales of a row]`, a second scale already applied."""
    scale = stored.tensors[1 + stored.roles.index(SCALE)]
    height, width = packing.block
    per_row = -(-stored.columns // width)
    stack, inside = np.divmod(np.arange(begin, end), packing.stack)
    places = stack * -(-packing.stack // height) + inside // height
    first, last = int(places[0]), int(places[-1]) + 1
    size = per_row * ITEM_BITS[scale.dtype] // 8
    data = read(scale, first * size, last * size)
    scales: np.ndarray = _floats(data, packing.scales).reshape(-1, per_row)
    if stored.encoding == "mlx" and packing.scales == E8M0:
        # OCP has NaN here; MLX has two to the 128, which is too large.
        scales[np.frombuffer(data, np.uint8).reshape(scales.shape) == 255] = np.inf
    scales = scales[places - first]
    for role, operation in ((MULTIPLIER, np.multiply), (DIVISOR, np.divide)):
        second = stored.side(role)
        if second is not None:
            with np.errstate(all="ignore"):
                operation(scales, _second_scales(read, second, stack), out=scales)
    return scales


def _second_scales(read: Read, second: TensorInfo, stack: np.ndarray) -> np.ndarray:
    """The second scale of every row: that of its expert, or the only one."""
    values = to_float32(read(second, 0, second.nbytes), second.dtype)
    mine: np.ndarray = values[stack if len(values) > 1 else np.zeros_like(stack)][:, None]
    return mine


def _zero_points(read: Read, stored: Stored, packing: Packing, begin: int, end: int) -> np.ndarray | None:
    """Zero points of every row, `[rows, groups]`: in words that hold consecutive rows, lowest bits first."""
    zeros = stored.side(ZERO_POINTS)
    if zeros is None:
        return None
    groups = zeros.shape[-1]
    in_word = 32 // packing.bits
    stack, inside = np.divmod(np.arange(begin, end), packing.stack)
    places = stack * -(-packing.stack // in_word) + inside // in_word
    first, last = int(places[0]), int(places[-1]) + 1
    words = np.frombuffer(read(zeros, first * groups * 4, last * groups * 4), "<u4").reshape(-1, groups)
    shifts = (inside % in_word * packing.bits).astype(np.uint32)[:, None]
    codes = words[places - first] >> shifts & np.uint32((1 << packing.bits) - 1)
    numbers: np.ndarray = _values_of(packing.codes, packing.bits)[codes]
    return numbers


def _biases(read: Read, stored: Stored, begin: int, end: int) -> np.ndarray | None:
    biases = stored.side(BIASES)
    if biases is None:
        return None
    return to_float32(_rows_of(read, stored, biases, begin, end), biases.dtype).reshape(end - begin, -1)


def _floats(data: bytes, dtype: str) -> np.ndarray:
    """A fresh array of the float32 values of floats, or of codes of one byte."""
    if dtype in FLOAT_DTYPES:
        return to_float32(data, dtype)
    return code_values(dtype)[np.frombuffer(data, np.uint8)]


def _round(numbers: np.ndarray, dtype: str) -> None:
    if dtype != "F32":
        numbers[...] = to_float32(from_float32(numbers, dtype), dtype).reshape(numbers.shape)


# What only the data can say ---------------------------------------------------------------------------------


def _check_order(read: Read, stored: Stored) -> None:
    """That integers have the shape they were taken for, and that no columns were moved to other groups."""
    shape = stored.side(SHAPE)
    if shape is not None:
        stated = _integers(read, shape)
        if stated != list(stored.shape):
            assumed = f"its header was read as {list(stored.shape)}"
            raise _misunderstood(shape, f"states the shape {stated}, and {assumed}")
    order = stored.side(COLUMN_ORDER)
    if order is not None and stored.packing is not None:
        width = stored.packing.block[1]
        if _integers(read, order) != [column // width for column in range(stored.columns)]:
            raise _misunderstood(order, "puts columns in another order than that of their groups")


def _integers(read: Read, tensor: TensorInfo) -> list[int]:
    kind = f"<i{ITEM_BITS[tensor.dtype] // 8}"
    values: list[int] = np.frombuffer(read(tensor, 0, tensor.nbytes), kind).tolist()
    return values


def _misunderstood(tensor: TensorInfo, problem: str) -> UnknownPacking:
    return UnknownPacking(f"{printable(tensor.name)} in {printable(tensor.file)} {problem}", HINT)
