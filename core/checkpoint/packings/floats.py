"""FP8 and FP4 weights, and the blocks of rows and columns that share their scales."""

from __future__ import annotations

from math import prod

from draftpair.checkpoint.dtypes import PLAIN_DTYPES
from draftpair.checkpoint.header import TensorInfo
from draftpair.checkpoint.packings.candidate import (
    E8M0,
    MULTIPLIER,
    SCALE,
    Candidate,
    Packing,
    Stored,
    quoted,
)
from draftpair.checkpoint.packings.schemes import block_size, schemes
from draftpair.checkpoint.rope import CONFIG_NAME

# `quant_method` under which each kind of tensor is known to be written.
_FP8_METHODS = frozenset({"fp8", "fbgemm_fp8", "mxfp8", "modelopt", "modelopt_fp4", "modelopt_mixed"})
_FP4_METHODS = frozenset({"fp8", "mxfp4", "modelopt", "modelopt_fp4", "modelopt_mixed"})
_MXFP4_GROUP, _NVFP4_GROUP = 32, 16

Blocks = tuple[tuple[int, int], int]
"""The block that shares a scale, and after how many rows the rows of blocks start anew."""


def fp8(candidate: Candidate, codes: str | None = None) -> Stored:
    """FP8 codes: those of the weight's dtype, or of `codes` when it is bytes that the config declares."""
    codes = codes or candidate.weight.dtype
    scale = fp8_scale(candidate)
    candidate.require_method(_FP8_METHODS)
    fmt = candidate.quantization.get("fmt")
    if fmt is not None and fmt != codes.removeprefix("F8_").lower():
        raise candidate.contradiction(f"fmt is {quoted(fmt)}")
    stated = candidate.quantization.get("weight_block_size", candidate.config.get("weight_block_size"))
    if stated is None:
        return fp8_stored(candidate, codes, scale, implied_blocks(candidate, scale))
    block = block_size(stated)
    if block is None or not fits(candidate, scale, block):
        raise candidate.contradiction(f"weight_block_size is {quoted(stated)}")
    return fp8_stored(candidate, codes, scale, (block, candidate.matrix[0]))


def fp8_scale(candidate: Candidate) -> TensorInfo:
    """The one scale tensor that FP8 codes must have."""
    (scale,) = candidate.take(SCALE)
    if scale is None:
        raise candidate.refusal("FP8 codes are no numbers without a scale")
    return scale


def fp8_stored(candidate: Candidate, codes: str, scale: TensorInfo, blocks: Blocks) -> Stored:
    """The answer for FP8 codes whose blocks are known."""
    (height, width), stack = blocks
    rows, columns = candidate.matrix
    if prod(scale.shape) == 1:
        shared = f"one {scale.dtype} scale"
    elif height >= rows and width >= columns:
        shared = f"one {scale.dtype} scale an expert"
    elif height > 1:
        shared = f"{scale.dtype} scales of {height} x {width} blocks"
    else:
        shared = f"{scale.dtype} scales of {'rows' if width >= columns else f'groups of {width}'}"
    packing = Packing(codes, 8, (height, width), stack, scale_dtype(candidate, scale))
    return candidate.stored("fp8", columns, packing, f"{codes}, {shared}")


def scale_dtype(candidate: Candidate, scale: TensorInfo) -> str:
    """The dtype to read scales as.

    Bytes are E8M0, as all who write such scales have it (transformers 5.24.0, compressed-tensors 0.20.1 and
    nvidia-modelopt 0.47.0, run); a config must name one of them, or nothing tells that they are scales.
    """
    if scale.dtype == "U8":
        if candidate.method is None:
            raise candidate.undecided(f"its scales are bytes, and {CONFIG_NAME} names no quant_method")
        return E8M0
    if scale.dtype != E8M0 and scale.dtype not in PLAIN_DTYPES:
        raise candidate.refusal(f"{scale.dtype} scales are not understood")
    return scale.dtype


def codes_in_bytes(candidate: Candidate) -> Stored:
    """U8, I8 and F4: what they hold shows in their scales."""
    weight = candidate.weight
    scale, multiplier = candidate.take(SCALE, MULTIPLIER)
    if scale is None:
        raise candidate.refusal("bytes are no numbers without a scale")
    columns = candidate.matrix[1] * (1 if weight.dtype == "F4" else 2)
    if multiplier is None:
        if scale.dtype in (E8M0, "U8") and _has_groups(candidate, scale, columns, _MXFP4_GROUP):
            return _mxfp4_weight(candidate, scale, columns)
        if weight.dtype == "U8" and candidate.method == "fp8" and scale.dtype != "F8_E4M3":
            return fp8(candidate, "F8_E4M3")
    elif weight.dtype != "I8":
        candidate.require_method(_FP4_METHODS)
        _require_group(candidate, _NVFP4_GROUP)
        return nvfp4(candidate, scale, multiplier, columns, "times")
    raise candidate.refusal(f"{weight.dtype} codes with such scales are not understood")


def _mxfp4_weight(candidate: Candidate, scale: TensorInfo, columns: int) -> Stored:
    """MXFP4 as an ordinary weight: experts of DeepSeek V4 and MiMo V2, and what ModelOpt writes."""
    candidate.require_method(_FP4_METHODS)
    experts = candidate.config.get("expert_dtype")
    if experts is not None and experts != "fp4":
        raise candidate.contradiction(f"expert_dtype is {quoted(experts)}")
    _require_group(candidate, _MXFP4_GROUP)
    fp8_block = block_size(candidate.quantization.get("weight_block_size"))
    if candidate.weight.dtype == "U8" and fp8_block is not None and fits(candidate, scale, fp8_block):
        raise candidate.undecided("its scales fit FP4 codes and FP8 blocks alike")
    return mxfp4(candidate, scale, columns)


def mxfp4(candidate: Candidate, scale: TensorInfo, columns: int) -> Stored:
    """E2M1 codes, one power of two for 32 of them."""
    if scale.dtype not in (E8M0, "U8") or not _has_groups(candidate, scale, columns, _MXFP4_GROUP):
        raise candidate.refusal(f"MXFP4 needs one E8M0 scale for {_MXFP4_GROUP} columns")
    packing = Packing("F4", 4, (1, _MXFP4_GROUP), candidate.matrix[0], scale_dtype(candidate, scale))
    groups = f"{scale.dtype} scales of groups of {_MXFP4_GROUP}"
    return candidate.stored("fp4", columns, packing, f"MXFP4, {groups}")


def nvfp4(candidate: Candidate, scale: TensorInfo, second: TensorInfo, columns: int, verb: str) -> Stored:
    """E2M1 codes, one E4M3 scale for 16 of them, and a second scale for all."""
    if scale.dtype != "F8_E4M3" or not _has_groups(candidate, scale, columns, _NVFP4_GROUP):
        raise candidate.refusal(f"NVFP4 needs one F8_E4M3 scale for {_NVFP4_GROUP} columns")
    lead = candidate.lead
    is_one = prod(second.shape) == 1
    if second.dtype != "F32" or not (is_one or second.shape in (lead, (*lead, 1), (*lead, 1, 1))):
        raise candidate.refusal("NVFP4 needs one more F32 scale, for the tensor or for each expert")
    packing = Packing("F4", 4, (1, _NVFP4_GROUP), candidate.matrix[0], scale.dtype)
    groups = f"F8_E4M3 scales of groups of {_NVFP4_GROUP}"
    whose = "one F32 scale" if is_one else "one F32 scale an expert"
    return candidate.stored("fp4", columns, packing, f"NVFP4, {groups} {verb} {whose}")


def _has_groups(candidate: Candidate, scale: TensorInfo, columns: int, group: int) -> bool:
    """Whether there is one scale for every `group` columns of each row; FP4 is never a vector."""
    rows = candidate.weight.shape[:-1]
    return bool(rows) and columns % group == 0 and scale.shape == (*rows, columns // group)


def _require_group(candidate: Candidate, group: int) -> None:
    """Refused when the config describes how weights are quantized, and it is not as 4-bit floats in such groups."""
    found = schemes(candidate.quantization)
    if found and not any((s.kind, s.bits) == ("float", 4) and s.group in (None, group) for s in found):
        raise candidate.contradiction(f"config_groups has no 4-bit floats in groups of {group}")


def fits(candidate: Candidate, scale: TensorInfo, block: tuple[int, int]) -> bool:
    """Whether there is one scale for each block, those at the edges cut; a single one may be a scalar or a vector."""
    rows, columns = candidate.matrix
    grid = (*candidate.lead, -(-rows // block[0]), -(-columns // block[1]))
    return scale.shape == grid or (prod(grid) == 1 and scale.shape in ((), (1,)))


def implied_blocks(candidate: Candidate, scale: TensorInfo) -> Blocks:
    """What the shapes alone say: one scale for all, one a row, one an expert, or one a block."""
    rows, columns = candidate.matrix
    lead = candidate.lead
    if prod(scale.shape) == 1:
        everything = prod(lead) * rows
        return (everything, columns), everything
    if not lead and scale.shape == (rows,):
        return (1, columns), rows
    if lead and scale.shape in (lead, (*lead, 1)):
        return (rows, columns), rows
    if len(scale.shape) != len(lead) + 2 or scale.shape[:-2] != lead:
        raise candidate.refusal("its scales do not fit its shape")
    height = _implied_extent(rows, scale.shape[-2])
    width = _implied_extent(columns, scale.shape[-1])
    if height is None or width is None:
        problem = "no block size, or more than one, makes so many scales"
        raise candidate.undecided(f"{problem}, and {CONFIG_NAME} does not state weight_block_size")
    return (height, width), rows


def _implied_extent(length: int, blocks: int) -> int | None:
    """The extent of blocks that cut `length` into `blocks`, the last one perhaps short; None if it is not plain.

    Of the extents that would do, the one power of two may be meant, or the one that leaves no rest; when these
    are two different ones, nothing is certain.
    """
    if blocks == 1:
        return length
    if not 1 < blocks <= length:
        return None
    smallest, largest = -(-length // blocks), -(-length // (blocks - 1)) - 1
    power = 1 << largest.bit_length() >> 1
    likely = {power} if smallest <= power else set()
    if length % blocks == 0:
        likely.add(length // blocks)
    return likely.pop() if len(likely) == 1 else None
