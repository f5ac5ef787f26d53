"""The true parameter count: what a packed weight stands for, not how many words it is stored in.

A module's packing is read from its tensors: a weight of dtype U32 beside ``scales`` is MLX's (affine, mxfp4,
mxfp8 or nvfp4), an FP8 weight beside a scale counts once an element, a byte weight beside block scales of 16
or 32 columns holds two FP4 values a byte. Scales, zero points and other side tensors are not parameters, and
neither are integer lookup tables. Words and columns are multiplied out, so 3, 5 and 6 bits come out exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draftpair.checkpoint import ConfigView, TensorInfo
from draftpair.checkpoint.stored import mlx_packings

# Of the affine mode, MLX's own choice first.
_USUAL_GROUPS = (64, 32, 128)

_SCALES = ("scales", "weight_scale_inv", "weight_scale", "scale_inv", "scale")
_SIDE = frozenset(
    {
        *_SCALES, "biases", "weight_scale_2", "weight_global_scale", "weight_zero_point", "weight_shape",
        "weight_g_idx", "input_scale", "input_global_scale", "activation_scale", "qzeros", "g_idx",
    }
)  # fmt: skip
# Fused experts put the kind of tensor behind an underscore; cache scales belong to no weight.
_SIDE_ENDINGS = ("_scales", "_scale_inv", "_weight_scale", ".k_scale", ".v_scale")
_BLOCK_SCALES = frozenset({"U8", "F8_E8M0", "F8_E4M3"})
_PACKED_WORDS = frozenset({"U32", "I32"})
_BYTES = frozenset({"U8", "I8"})
_TABLES = frozenset({"BOOL", "I16", "U16", "I64", "U64"})
# Tables of drafters, whatever integers they are stored as.
_TABLE_NAMES = frozenset({"d2t", "t2d", "token_ordering"})


@dataclass(frozen=True)
class ParameterCount:
    """``total`` is None when a packed weight cannot be resolved; ``unresolved`` names such weights."""

    total: int | None
    unresolved: tuple[str, ...] = ()


def count_parameters(tensors: Mapping[str, TensorInfo], config: ConfigView) -> ParameterCount:
    """Parameters of all ``tensors`` (by name), each weight once."""
    total, unresolved = 0, []
    for tensor in tensors.values():
        count = _elements(tensor, tensors, config)
        if count is None:
            unresolved.append(tensor.name)
        else:
            total += count
    return ParameterCount(None if unresolved else total, tuple(sorted(unresolved)))


def mlx_packing(
    weight: TensorInfo, scales: TensorInfo, config: ConfigView, module: str
) -> tuple[int, int] | None:
    """(bits, group size) of an MLX weight ``[..., words]`` with scales ``[..., groups]``; None if none fits.

    Shapes fix only bits x group = 32 x words / groups. Byte scales imply the mode and so the group; else the
    module's own entry in config ``quantization`` names it, else the global one, else it is 64, 32 or 128.
    Whatever is named must give a legal number of bits: shapes outrank the config.
    """
    if weight.shape[:-1] != scales.shape[:-1]:
        return None
    fitting = mlx_packings(_last(weight), _last(scales), byte_scales=scales.dtype == "U8")
    bits_by_group = {group: bits for _, bits, group in fitting}
    groups = (*_declared_groups(config, module), *_USUAL_GROUPS, *bits_by_group)
    return next(((bits_by_group[group], group) for group in groups if group in bits_by_group), None)


def _elements(tensor: TensorInfo, tensors: Mapping[str, TensorInfo], config: ConfigView) -> int | None:
    """Parameters one tensor stands for: 0 for a side tensor, None when its packing cannot be told."""
    module, _, last = tensor.name.rpartition(".")
    if _is_side(tensor.name, module, last, tensors) or tensor.dtype in _TABLES or last in _TABLE_NAMES:
        return 0
    if tensor.dtype in _PACKED_WORDS:
        return _unpacked_words(tensor, _scales_of(tensor.name, module, tensors), config, module)
    count = math.prod(tensor.shape)
    if tensor.dtype in _BYTES:
        scales = _scales_of(tensor.name, module, tensors)
        return count * 2 if scales is not None and _is_fp4(tensor, scales) else count
    return count


def _is_side(name: str, module: str, last: str, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether a tensor only describes how another one is packed.

    ``scale`` and ``biases`` are also names of parameters (a router's scale), so a weight must be beside them.
    """
    if name.endswith(_SIDE_ENDINGS):
        return True
    if last not in _SIDE:
        return False
    beside = (module, *(f"{module}.{weight}" for weight in ("weight", "weight_packed", "qweight", "blocks")))
    return any(other in tensors for other in beside)


def _scales_of(name: str, module: str, tensors: Mapping[str, TensorInfo]) -> TensorInfo | None:
    """The scales beside a weight, below it (``gate_up_proj.scales``), or ``_scales`` for ``_blocks``."""
    if name.endswith("_blocks"):
        return tensors.get(f"{name[: -len('_blocks')]}_scales")
    below = [f"{owner}.{ending}" for owner in (module, name) for ending in _SCALES]
    return next((tensors[candidate] for candidate in below if candidate in tensors), None)


def _unpacked_words(
    weight: TensorInfo, scales: TensorInfo | None, config: ConfigView, module: str
) -> int | None:
    """Parameters in 32-bit words: MLX by shapes; GPTQ, AWQ and compressed-tensors by the declared bits."""
    if scales is None:
        return None
    if scales.name.endswith(".scales") and not weight.name.endswith(".qweight"):
        owner = weight.name if scales.name == f"{weight.name}.scales" else module
        packing = mlx_packing(weight, scales, config, owner)
        return math.prod(scales.shape) * packing[1] if packing else None
    bits = _declared_bits(config)
    return math.prod(weight.shape) * 32 // bits if bits else None


def _is_fp4(weight: TensorInfo, scales: TensorInfo) -> bool:
    """Whether bytes hold two FP4 values: blocks of 16 or 32 values are 8 or 16 bytes wide.

    gpt-oss keeps the blocks on an axis of their own, ``[..., groups, 16]`` beside ``[..., groups]``.
    """
    if scales.dtype not in _BLOCK_SCALES:
        return False
    if weight.shape[:-1] == scales.shape:
        return _last(weight) in (8, 16)
    return weight.shape[:-1] == scales.shape[:-1] and _last(weight) in (8 * _last(scales), 16 * _last(scales))


def _declared_groups(config: ConfigView, module: str) -> tuple[int, ...]:
    """Group sizes the config names for a module: its own entry, then the global one."""
    declared = config.quantization
    if declared is None:
        return ()
    own = declared.get(module)
    entries = [own, declared] if isinstance(own, dict) else [declared]
    sizes: list[Any] = [entry.get("group_size") for entry in entries]
    return tuple(size for size in sizes if _positive(size))


def _declared_bits(config: ConfigView) -> int | None:
    """Bits of a GPTQ, AWQ or compressed-tensors checkpoint; None when the config names none or several."""
    declared: Any = config.get("quantization_config")
    if not isinstance(declared, dict):
        return None
    if _positive(declared.get("bits")):
        return int(declared["bits"])
    groups = declared.get("config_groups")
    schemes = (
        [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    )
    bits = [scheme.get("num_bits") for scheme in schemes if isinstance(scheme, dict)]
    return bits[0] if bits and _positive(bits[0]) and bits.count(bits[0]) == len(bits) else None


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _last(tensor: TensorInfo) -> int:
    return tensor.shape[-1] if tensor.shape else 0
