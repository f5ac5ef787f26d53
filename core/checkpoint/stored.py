"""How a logical tensor lies in the files: plain, or packed beside the tensors that say how to read it.

Decided from headers alone: names, dtypes and shapes, with config.json as the second witness. Where the two
contradict each other, or either is not understood, the answer is `UnknownPacking` and never a guess: a byte
that is a code is not to be read as a number.

| encoding | weight | scales | a value is |
|---|---|---|---|
| plain | BF16, F16, F32 | none | as stored |
| fp8 | F8_E4M3, F8_E5M2; U8 if the config says so | one a block, row, expert or tensor | code x scale |
| fp4 | MXFP4: two E2M1 codes a byte | an E8M0 one for 32 columns | code x scale |
| fp4 | NVFP4: the same codes | an E4M3 one for 16 columns, and one for all | code x (scale x or / that one) |
| int | 4 or 8 bits in I32 words | one a row or group, perhaps zero points | (code - zero) x scale |
| mlx | U32 words | one a group, in affine mode with biases | as `mx.dequantize` has it |

Every scale multiplies, also one called `scale_inv`: it is the inverse of what the weight was multiplied by. Only
compressed-tensors' `weight_global_scale` divides.

The low half of a byte is the even column everywhere. For the FP4 experts of DeepSeek V4 that is how the release's
own `inference/convert.py` unpacks them (`cast_e2m1fn_to_e4m3fn`, read in public copies), how transformers 5.24.0
does (`Fp8Dequantize`, run), and what mlx-vlm 0.7.10 relies on when it views the bytes as MLX's words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from draftpair.checkpoint.config import ConfigView
from draftpair.checkpoint.dtypes import PLAIN_DTYPES
from draftpair.checkpoint.header import TensorInfo
from draftpair.checkpoint.packings.candidate import (
    BIASES,
    COLUMN_ORDER,
    COMPRESSED_TENSORS,
    DIVISOR,
    MULTIPLIER,
    SCALE,
    SHAPE,
    UNUSED,
    ZERO_POINTS,
    Candidate,
    Packing,
    Stored,
    UnknownPacking,
)
from draftpair.checkpoint.packings.compressed_tensors import packed, quantized_fp8
from draftpair.checkpoint.packings.floats import codes_in_bytes, fp8
from draftpair.checkpoint.packings.mlx_words import mlx, mlx_packings
from draftpair.checkpoint.wording import printable

__all__ = ["Packing", "Stored", "UnknownPacking", "find_stored", "mlx_packings", "side_names"]

_WEIGHT, _PACKED = ".weight", "_packed"

# Behind the weight's whole name: `X.weight_scale`, and `X_scale` where fused experts are called X.
_BEHIND = (
    ("_scale_inv", SCALE),
    ("_scale", SCALE),
    ("_weight_scale", SCALE),
    ("_scale_2", MULTIPLIER),
    ("_weight_scale_2", MULTIPLIER),
    ("_global_scale", DIVISOR),
    ("_zero_point", ZERO_POINTS),
    ("_shape", SHAPE),
    ("_g_idx", COLUMN_ORDER),
    ("_input_scale", UNUSED),
    ("_activation_scale", UNUSED),
)
# Below its module.
_BELOW = (
    (".scale", SCALE),
    (".scales", SCALE),
    (".biases", BIASES),
    (".input_scale", UNUSED),
    (".input_global_scale", UNUSED),
    (".activation_scale", UNUSED),
    (".k_scale", UNUSED),
    (".v_scale", UNUSED),
)
# What betrays formats that are not read: the name the weight has in them, or what lies beside it.
_FOREIGN_WEIGHTS = (".qweight", ".q_weight", ".W_q", ".codes", ".trellis", ".Qidxs")
_FOREIGN_SIDES = (".qzeros", ".SCB", ".pre_quant_scale", ".svdquant_lora_a")
_FOREIGN_BELOW_WEIGHT = (".absmax", ".quant_map")


def find_stored(tensors: Mapping[str, TensorInfo], name: str, config: ConfigView) -> Stored | None:
    """How the logical tensor `name` lies in `tensors`; None when it is not there.

    `name` ends in `.weight`, or is that of a bare parameter, such as fused experts. Raises UnknownPacking for a
    format that is not understood, and for tensors that contradict each other or the config.
    """
    plain_name, packed_name = tensors.get(name), tensors.get(name + _PACKED)
    weight = plain_name or packed_name
    if weight is None:
        _refuse_foreign_weight(tensors, name, config)
        return None
    candidate = _candidate(tensors, name, weight, config)
    _refuse_foreign_sides(candidate)
    if plain_name is None:
        return packed(candidate)
    if packed_name is not None:
        raise candidate.refusal(f"{printable(packed_name.name)} is there as well")
    reader = _READERS.get(weight.dtype)
    if reader is None:
        raise candidate.refusal(f"{weight.dtype} is no format of weights that is understood")
    return reader(candidate)


def side_names(tensors: Mapping[str, TensorInfo]) -> frozenset[str]:
    """The names that `find_stored` takes for sides of some weight, so that they are no tensors of their own."""
    return frozenset(
        side.name
        for name, weight in tensors.items()
        for _, side in _sides(tensors, name.removesuffix(_PACKED), weight)
    )


def _sides(
    tensors: Mapping[str, TensorInfo], name: str, weight: TensorInfo
) -> Iterator[tuple[str, TensorInfo]]:
    """The tensors beside a weight, each with its role.

    A plain weight has nothing to scale: `X.scale`, and `Y_scale` beside a bare Y, are then parameters of their
    own. Names that can only be scales are told, for the weight to be refused.
    """
    is_plain = weight.dtype in PLAIN_DTYPES
    is_bare = not name.endswith(_WEIGHT)
    for ending, role in _BEHIND:
        side = tensors.get(name + ending)
        if side is not None and not (is_plain and is_bare and role != UNUSED and ending != "_scale_inv"):
            yield role, side
    module = name.removesuffix(_WEIGHT)
    for ending, role in _BELOW:
        side = tensors.get(module + ending)
        if side is not None and not (is_plain and role != UNUSED and ending != ".scales"):
            yield role, side


def _candidate(
    tensors: Mapping[str, TensorInfo], name: str, weight: TensorInfo, config: ConfigView
) -> Candidate:
    declared = config.get("quantization_config")
    sides = tuple(_sides(tensors, name, weight))
    return Candidate(name, weight, sides, tensors, config, declared if isinstance(declared, dict) else {})


def _plain(candidate: Candidate) -> Stored:
    candidate.take()
    weight = candidate.weight
    return candidate.stored("plain", weight.shape[-1] if weight.shape else 1, None, weight.dtype)


def _fp8(candidate: Candidate) -> Stored:
    return quantized_fp8(candidate) if candidate.method == COMPRESSED_TENSORS else fp8(candidate)


_READERS: dict[str, Callable[[Candidate], Stored]] = {
    **dict.fromkeys(PLAIN_DTYPES, _plain),
    "F8_E4M3": _fp8,
    "F8_E5M2": _fp8,
    "U8": codes_in_bytes,
    "I8": codes_in_bytes,
    "F4": codes_in_bytes,
    "U32": mlx,
}


def _refuse_foreign_weight(tensors: Mapping[str, TensorInfo], name: str, config: ConfigView) -> None:
    module = name.removesuffix(_WEIGHT)
    for other in (*(module + ending for ending in _FOREIGN_WEIGHTS), f"{name}_blocks"):
        if other in tensors:
            problem = f"it stands for {printable(name)}, in a format that is not understood"
            raise _candidate(tensors, other, tensors[other], config).refusal(problem)


def _refuse_foreign_sides(candidate: Candidate) -> None:
    module = candidate.name.removesuffix(_WEIGHT)
    others = [module + ending for ending in _FOREIGN_SIDES]
    others += [candidate.weight.name + ending for ending in _FOREIGN_BELOW_WEIGHT]
    for other in others:
        if other in candidate.tensors:
            raise candidate.refusal(f"{printable(other)} belongs to a format that is not understood")
