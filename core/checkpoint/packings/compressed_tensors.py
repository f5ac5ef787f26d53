"""Weights as compressed-tensors packs them; the config must say so, and with a scheme that fits the tensors.

Established by running compressed-tensors 0.20.1 on torch 2.13.0: integers are stored plus half their range, code
i of a row in bits i x b and up; zero points in the same way, but packed along rows; `weight_global_scale` divides.
"""

from __future__ import annotations

from math import prod

from draftpair.checkpoint.dtypes import PLAIN_DTYPES
from draftpair.checkpoint.header import TensorInfo
from draftpair.checkpoint.packings.candidate import (
    COLUMN_ORDER,
    COMPRESSED_TENSORS,
    DIVISOR,
    SCALE,
    SHAPE,
    ZERO_POINTS,
    Candidate,
    Packing,
    Stored,
    described,
    quoted,
)
from draftpair.checkpoint.packings.floats import (
    Blocks,
    fits,
    fp8_scale,
    fp8_stored,
    implied_blocks,
    mxfp4,
    nvfp4,
)
from draftpair.checkpoint.packings.schemes import Scheme, schemes

_WORD_BITS = 32
_FP8_FORMATS = ("float-quantized", "naive-quantized", "mxfp8-quantized")


def packed(candidate: Candidate) -> Stored:
    """`X.weight_packed`: FP4 in bytes, or integers in words."""
    if candidate.weight.dtype == "I32":
        return _integers(candidate)
    if candidate.weight.dtype != "U8":
        raise candidate.refusal(f"packed weights of {candidate.weight.dtype} are not understood")
    scale, divisor = candidate.take(SCALE, DIVISOR)
    if scale is None:
        raise candidate.refusal("bytes are no numbers without a scale")
    columns = 2 * candidate.matrix[1]
    if divisor is not None:
        _require(candidate, "float", (4,), ("nvfp4-pack-quantized",), group=16)
        return nvfp4(candidate, scale, divisor, columns, "divided by")
    _require(candidate, "float", (4,), ("mxfp4-pack-quantized",), group=32)
    return mxfp4(candidate, scale, columns)


def quantized_fp8(candidate: Candidate) -> Stored:
    """`X.weight` in FP8, always E4M3 here: the first scheme that the scales agree with gives the blocks."""
    scale = fp8_scale(candidate)
    if candidate.weight.dtype != "F8_E4M3":
        raise candidate.contradiction(f"{COMPRESSED_TENSORS} has no {candidate.weight.dtype}")
    for scheme in _require(candidate, "float", (8,), _FP8_FORMATS):
        blocks = _blocks(candidate, scale, scheme)
        if blocks is not None:
            return fp8_stored(candidate, candidate.weight.dtype, scale, blocks)
    raise candidate.contradiction("no scheme of 8-bit floats in config_groups has such scales")


def _blocks(candidate: Candidate, scale: TensorInfo, scheme: Scheme) -> Blocks | None:
    rows, columns = candidate.matrix
    if scheme.strategy == "tensor" and prod(scale.shape) == 1:
        return implied_blocks(candidate, scale)
    if scheme.strategy == "channel" and not candidate.lead and scale.shape == (rows,):
        return (1, columns), rows
    block = {
        "channel": (1, columns),
        "group": (1, scheme.group) if scheme.group else None,
        "block": scheme.block,
    }.get(scheme.strategy)
    return (block, rows) if block is not None and fits(candidate, scale, block) else None


def _require(
    candidate: Candidate, kind: str, bits: tuple[int, ...], formats: tuple[str, ...], group: int | None = None
) -> list[Scheme]:
    """The config's schemes for such codes, at least one."""
    if candidate.method != COMPRESSED_TENSORS:
        stated = "not stated" if candidate.method is None else quoted(candidate.method)
        raise candidate.contradiction(f"quant_method is {stated}, expected {COMPRESSED_TENSORS}")
    found = [
        scheme
        for scheme in schemes(candidate.quantization)
        if scheme.kind == kind
        and scheme.bits in bits
        and scheme.format in (None, *formats)
        and (group is None or scheme.group in (None, group))
    ]
    if not found:
        widths = f"{kind} weights of {' or '.join(map(str, bits))} bits"
        groups = "" if group is None else f" in groups of {group}"
        raise candidate.contradiction(f"config_groups has no {widths}{groups} in format {formats[0]}")
    return found


def _integers(candidate: Candidate) -> Stored:
    """Integers in words. The length of a row is data, not header, so it is compared when rows are read."""
    weight = candidate.weight
    scale, zeros, shape, order = candidate.take(SCALE, ZERO_POINTS, SHAPE, COLUMN_ORDER)
    rows, words = candidate.matrix
    found = _require(candidate, "int", (4, 8), ("pack-quantized",))
    if len(weight.shape) < 2 or scale is None or scale.dtype not in PLAIN_DTYPES:
        raise candidate.refusal("packed integers need a float scale for each row or group")
    if scale.shape[:-1] != weight.shape[:-1] or not scale.shape[-1]:
        raise candidate.refusal("its scales do not have its rows")
    if shape is None or shape.dtype not in ("I64", "I32") or shape.shape != (len(weight.shape),):
        raise candidate.refusal("packed integers need a weight_shape")
    groups = scale.shape[-1]
    options = {_option(scheme, words, groups) for scheme in found if scheme.symmetric is (zeros is None)}
    fitting = [option for option in options if option is not None]
    if len(fitting) != 1:
        problem = "more than one scheme" if fitting else "no scheme"
        raise candidate.contradiction(f"{problem} of integers in config_groups fits")
    bits, group, reordered = fitting[0]
    packed_rows = -(-rows * bits // _WORD_BITS)
    if zeros is not None and described(zeros) != f"I32 {[*candidate.lead, packed_rows, groups]}":
        raise candidate.refusal("its zero points do not fit its scales")
    if order is None and reordered:
        raise candidate.contradiction("actorder is group, and no weight_g_idx gives the order")
    if order is not None and (order.dtype not in ("I32", "I64") or order.shape != (groups * group,)):
        raise candidate.refusal("its weight_g_idx does not have its columns")
    of = "rows" if groups == 1 else f"groups of {group}"
    detail = f"INT{bits}, {scale.dtype} scales{' and zero points' if zeros else ''} of {of}"
    packing = Packing("INT", bits, (1, group), rows, scale.dtype)
    return candidate.stored("int", groups * group, packing, detail)


def _option(scheme: Scheme, words: int, groups: int) -> tuple[int, int, bool] | None:
    """Bits, group size and whether columns were reordered, if a scheme makes so many words and groups of a row."""
    bits = scheme.bits or 0
    if scheme.strategy == "group" and scheme.group:
        makes = -(-groups * scheme.group * bits // _WORD_BITS)
        return (bits, scheme.group, scheme.reordered) if makes == words else None
    if scheme.strategy == "channel" and groups == 1:
        return bits, words * _WORD_BITS // bits, scheme.reordered
    return None
