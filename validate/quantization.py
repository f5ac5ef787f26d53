"""Whether a loader can read a checkpoint's packed tensors as config.json's quantization block says.

Loaders take ``bits`` and ``group_size`` from the block's own keys, also where every module has an entry of its own,
and ``mode`` affine where none is named. What of it has no place in MLX fails while the model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.packings.mlx_words import AFFINE, AFFINE_BITS, AFFINE_GROUPS, FLOAT_MODES
from draftpair.checkpoint.wording import printable, some
from draftpair.findings import Finding

_BLOCKS = ("quantization", "quantization_config")
_SETTINGS = ("mode", "bits", "group_size")
_POSSIBLE: tuple[tuple[str, int, int], ...] = (
    *((AFFINE, bits, group) for bits in AFFINE_BITS for group in AFFINE_GROUPS),
    *((mode, bits, group) for mode, (bits, group) in FLOAT_MODES.items()),
)
_HINT = (
    "affine takes bits 2, 3, 4, 5, 6 or 8 and group_size 32, 64 or 128; take config.json from the folder that the "
    "tensors were written to"
)


def check_quantization(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What MLX's loaders cannot use of the settings for all packed tensors, and of each module's own."""
    block = next((key for key in _BLOCKS if isinstance(checkpoint.config.raw.get(key), dict)), _BLOCKS[0])
    settings: dict[str, Any] = checkpoint.config.raw.get(block) or {}
    packed = _packed(checkpoint)
    missing = [key for key in ("bits", "group_size") if settings.get(key) is None]
    if packed and missing:
        stated = " and no ".join(missing)
        yield _finding(
            f"the quantization block states no {stated}; packed are {some(packed, 2)}", block, None
        )
    elif packed and not is_possible(settings):
        yield _finding(f"MLX has no {_stated(settings)}; packed are {some(packed, 2)}", block, settings)
    for module, own in settings.items():
        if isinstance(own, dict) and not own.keys().isdisjoint(_SETTINGS) and not is_possible(own):
            yield _finding(
                f"{printable(module)} has settings of its own, and MLX has no {_stated(own)}",
                f"{block}/{module}",
                own,
            )
        elif not isinstance(own, (bool, dict)) and f"{module}.weight" in checkpoint.tensors:
            yield _finding(
                f"{printable(module)} is a module, and its setting is {printable(repr(own), 60)}",
                f"{block}/{module}",
                own,
            )


def check_twins(checkpoint: Checkpoint, hint: str) -> Iterator[Finding]:
    """The two quantization blocks: loaders read one or the other, so they must agree."""
    first, second = (checkpoint.config.raw.get(key) for key in _BLOCKS)
    if first is not None and second is not None and first != second:
        yield Finding(
            "CONFIG-QUANTIZATION-TWINS",
            "error",
            "quantization and quantization_config in config.json differ, and loaders read one or the other",
            where="config.json#/quantization_config",
            expected=first,
            found=second,
            hint=hint,
        )


def _packed(checkpoint: Checkpoint) -> list[str]:
    """The tensors that MLX packed: words of 32 bits with scales beside them."""
    return [
        tensor.name
        for tensor in checkpoint.tensors.values()
        if tensor.dtype == "U32" and f"{tensor.name.removesuffix('.weight')}.scales" in checkpoint.tensors
    ]


def is_possible(settings: Mapping[str, Any]) -> bool:
    """Whether MLX has a packing with everything that is stated; for a module it fills in what is not."""
    mode, bits, group = (settings.get(key) for key in _SETTINGS)
    mode = AFFINE if mode is None else mode
    if not all(value is None or type(value) is int for value in (bits, group)):
        return False
    return any(
        mode == one and bits in (None, its_bits) and group in (None, its_group)
        for one, its_bits, its_group in _POSSIBLE
    )


def _stated(settings: Mapping[str, Any]) -> str:
    mode = settings.get("mode", AFFINE)
    stated = [f"{key} {printable(repr(settings[key]), 60)}" for key in _SETTINGS[1:] if key in settings]
    return f"mode {printable(str(mode), 60)}" + (f" with {' and '.join(stated)}" if stated else "")


def _finding(message: str, where: str, found: Any) -> Finding:
    return Finding("CONFIG-QUANTIZATION", "error", message, f"config.json#/{where}", found=found, hint=_HINT)
