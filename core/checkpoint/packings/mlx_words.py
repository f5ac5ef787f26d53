"""MLX's own packing: U32 words, the first code in the lowest bits, beside `scales` and in affine mode `biases`.

As mlx 0.32.4 has it: docs of `mx.quantize`, and runs of it.
"""

from __future__ import annotations

from typing import Any

from draftpair.checkpoint.dtypes import PLAIN_DTYPES
from draftpair.checkpoint.header import TensorInfo
from draftpair.checkpoint.packings.candidate import (
    BIASES,
    E8M0,
    SCALE,
    Candidate,
    Packing,
    Stored,
    described,
    quoted,
)
from draftpair.checkpoint.rope import CONFIG_NAME

WORD_BITS = 32
AFFINE = "affine"
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)
FLOAT_MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}
"""The modes with byte scales, and the one number of bits and of columns for a scale that each has."""


def mlx_packings(words: int, groups: int, *, byte_scales: bool) -> tuple[tuple[str, int, int], ...]:
    """Every (mode, bits, group size) with which MLX makes rows of `words` words and `groups` scales.

    Shapes fix only the product of bits and group size, which several pairs have in affine mode. Byte scales
    mean a floating mode, and then there is one at most.
    """
    if groups <= 0 or words * WORD_BITS % groups:
        return ()
    product = words * WORD_BITS // groups
    if byte_scales:
        modes = [(mode, bits, group) for mode, (bits, group) in FLOAT_MODES.items()]
    else:
        modes = [(AFFINE, bits, group) for group in AFFINE_GROUPS for bits in AFFINE_BITS]
    return tuple((mode, bits, group) for mode, bits, group in modes if bits * group == product)


def mlx(candidate: Candidate) -> Stored:
    """U32 words beside `X.scales`: the config decides among what fits the shapes."""
    weight = candidate.weight
    scales, biases = candidate.take(SCALE, BIASES)
    if scales is None or not scales.name.endswith(".scales"):
        raise candidate.refusal("32-bit words are read only beside MLX's scales")
    rows, words = candidate.matrix
    if len(weight.shape) < 2 or not scales.shape or scales.shape[:-1] != weight.shape[:-1]:
        raise candidate.refusal("its scales do not have its rows")
    if scales.dtype == "U8":
        if biases is not None:
            raise candidate.refusal("byte scales belong to modes without biases")
    elif scales.dtype not in PLAIN_DTYPES:
        raise candidate.refusal(f"{scales.dtype} scales are not MLX's")
    elif biases is None or described(biases) != described(scales):
        raise candidate.refusal("affine mode needs biases of the dtype and shape of the scales")
    mode, bits, group = _chosen(candidate, words, scales)
    scale_dtype = {AFFINE: scales.dtype, "nvfp4": "F8_E4M3"}.get(mode, E8M0)
    packing = Packing(mode, bits, (1, group), rows, scale_dtype)
    detail = f"MLX {mode} {bits} bits, groups of {group}" if mode == AFFINE else f"MLX {mode}"
    return candidate.stored("mlx", scales.shape[-1] * group, packing, detail)


def _chosen(candidate: Candidate, words: int, scales: TensorInfo) -> tuple[str, int, int]:
    groups = scales.shape[-1]
    fitting = mlx_packings(words, groups, byte_scales=scales.dtype == "U8")
    if not fitting:
        raise candidate.refusal(f"no bits and group size of MLX give {words} words for {groups} scales")
    declared = _declared(candidate)
    agreeing = [
        found
        for found in fitting
        if all(declared.get(key, value) == value for key, value in zip(_KEYS, found, strict=True))
    ]
    if len(agreeing) == 1:
        return agreeing[0]
    fit = ", ".join(f"{mode} {bits} bits in groups of {group}" for mode, bits, group in fitting)
    if agreeing:
        raise candidate.undecided(f"its shapes fit {fit}, and {CONFIG_NAME} does not say which")
    stated = ", ".join(f"{key} {quoted(value)}" for key, value in declared.items())
    raise candidate.contradiction(f"it states {stated}, and the shapes fit {fit}")


_KEYS = ("mode", "bits", "group_size")


def _declared(candidate: Candidate) -> dict[str, Any]:
    """What the config states for the module: in its own entry, else for all."""
    everywhere = candidate.config.quantization
    if everywhere is None:
        return {}
    own = everywhere.get(candidate.name.removesuffix(".weight"))
    if own is False:
        raise candidate.contradiction("its quantization says that this module has none")
    entry = own if isinstance(own, dict) else everywhere
    return {key: entry[key] for key in _KEYS if entry.get(key) is not None}
