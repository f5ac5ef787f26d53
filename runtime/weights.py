"""Fills a module tree from a drafter folder; a tensor without a place, or a place without one, is refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from draftpair.checkpoint import Checkpoint
from draftpair.errors import Refused

Weights = dict[str, mx.array]


def read_weights(checkpoint: Checkpoint) -> Weights:
    """Every tensor of the checkpoint by name, not yet evaluated."""
    files: dict[str, Weights] = {}
    for info in checkpoint.tensors.values():
        if info.file not in files:
            loaded: Any = mx.load(str(checkpoint.root / info.file))
            files[info.file] = loaded
    return {name: files[info.file][name] for name, info in checkpoint.tensors.items()}


def quantize_like(network: nn.Module, weights: Weights, checkpoint: Checkpoint) -> None:
    """Quantize the modules whose ``.scales`` are stored, as ``quantization`` in config.json says for each.

    Refused when scales are stored and config.json has no ``quantization``, or when the stored shapes are of
    another number of bits or another group size.
    """
    if not any(name.endswith(".scales") for name in weights):
        return
    everywhere = _settings(checkpoint)

    def stored(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if f"{path}.scales" not in weights or not hasattr(module, "to_quantized"):
            return False
        own = (checkpoint.config.quantization or {}).get(path)
        settings = {**everywhere, **own} if isinstance(own, dict) else everywhere
        _check_packing(path, module, weights, settings, checkpoint)
        return settings

    nn.quantize(network, class_predicate=stored, **everywhere)


def fill(network: nn.Module, weights: Weights, checkpoint: Checkpoint) -> None:
    """Load the tensors into the tree. Refused on missing, unexpected or differently shaped tensors."""
    places: Weights = dict(tree_flatten(network.parameters()))
    problems = [
        *_named("is missing", "are missing", places.keys() - weights.keys()),
        *_named("is unexpected", "are unexpected", weights.keys() - places.keys()),
        *(
            f"{name} has shape {list(weights[name].shape)}, expected {list(place.shape)}"
            for name, place in sorted(places.items())
            if name in weights and weights[name].shape != place.shape
        ),
    ]
    if problems:
        raise Refused(
            f"{checkpoint.source}: {'; '.join(problems[:5])}",
            hint="make the drafter again: draftpair split-mtp --model RAW --output DRAFTER; or download it again",
        )
    network.load_weights(list(weights.items()))


def _settings(checkpoint: Checkpoint) -> dict[str, Any]:
    declared = checkpoint.config.quantization
    if declared is None or not {"bits", "group_size"} <= declared.keys():
        raise Refused(
            f"{checkpoint.source}: tensors are quantized, but config.json has no quantization with bits "
            "and group_size",
            hint="make the drafter again: draftpair split-mtp --model RAW --output DRAFTER --q-bits 4",
        )
    return {
        "bits": declared["bits"],
        "group_size": declared["group_size"],
        "mode": declared.get("mode", "affine"),
    }


def _check_packing(
    path: str, module: nn.Module, weights: Weights, settings: dict[str, Any], checkpoint: Checkpoint
) -> None:
    packed, scales = weights.get(f"{path}.weight"), weights[f"{path}.scales"]
    if packed is None:
        return  # reported as missing by fill()
    width = module["weight"].shape[-1]
    found = (packed.shape[-1] * 32 / width, width / scales.shape[-1])
    if found != (settings["bits"], settings["group_size"]):
        raise Refused(
            f"{checkpoint.source}: {path} is packed with {found[0]:g} bits in groups of {found[1]:g}, "
            f"config.json says {settings['bits']} bits in groups of {settings['group_size']}"
        )


def _named(one: str, many: str, names: Iterable[str]) -> list[str]:
    """One phrase that names up to five, or nothing."""
    found = sorted(names)
    if not found:
        return []
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return [f"{', '.join(found[:5])}{more} {one if len(found) == 1 else many}"]
