"""Pairs that are large enough to be timed: the layouts of Qwen3.5 and Gemma 4 at about 140 million parameters.

Their weights are random, so that a drafter is hardly ever right, or (`COPIES`) such that it always is. The small pairs
have about 20 million.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from fixtures import gemma4_assistant
from fixtures.copying import permutation
from fixtures.gemma4_assistant import FULL, SLIDING
from fixtures.pairs import split
from fixtures.qwen3_5 import Geometry, Recipe, config_document, source_tensors
from fixtures.qwen3_5_copy import copy_tensors
from fixtures.qwen_parts import Stored, stays_float32, write_folder
from fixtures.weights import Array

INTERVAL = 4  # every how many layers one has full attention


@dataclass(frozen=True)
class Qwen(Geometry):
    """A dense Qwen3.5 with its kinds of layers in the published order."""

    @property
    def layer_types(self) -> list[str]:
        """Three with linear attention, then one with full attention."""
        return [
            "full_attention" if number % INTERVAL == INTERVAL - 1 else "linear_attention"
            for number in range(self.layers)
        ]


RANDOM = Qwen(
    vocab=16384, hidden=768, layers=12, heads=6, kv_heads=2, head_dim=128, dense=3072, key_heads=6, value_heads=12,
    linear_dim=64,
)  # fmt: skip
SMALL = Qwen(
    vocab=4096, hidden=384, layers=8, heads=6, kv_heads=2, head_dim=64, dense=1280, key_heads=6, value_heads=6,
    linear_dim=64,
)  # fmt: skip
# A head that is right by construction needs twice as many dimensions as there are tokens.
COPIES = Qwen(
    vocab=448, hidden=1024, layers=12, heads=8, kv_heads=2, head_dim=128, dense=2560, key_heads=8, value_heads=16,
    linear_dim=64,
)  # fmt: skip


@dataclass(frozen=True)
class Gemma:
    """Fields of the fixture's `Target` and `Assistant`: of both, of either."""

    both: Mapping[str, Any]
    target: Mapping[str, Any]
    drafter: Mapping[str, Any]


ASSISTED = Gemma(
    {"vocab": 16384, "heads": 6, "groups": 2, "width": 128, "global_width": 256, "window": 512},
    {"hidden": 768, "intermediate": 4096, "types": (*(SLIDING,) * 5, FULL) * 2, "shared": 2},
    {"hidden": 256, "backbone": 768, "intermediate": 1024, "types": (*(SLIDING,) * 3, FULL)},
)
SMALL_ASSISTED = Gemma(
    {"vocab": 4096, "heads": 6, "groups": 2, "width": 64, "global_width": 128, "window": 512},
    {"hidden": 384, "intermediate": 1536, "types": (*(SLIDING,) * 3, FULL) * 2, "shared": 2},
    {"hidden": 128, "backbone": 384, "intermediate": 512, "types": (*(SLIDING,) * 3, FULL)},
)


@dataclass(frozen=True)
class Pair:
    """Folders of a target and its drafter, the drafter's family, and the number of the target's parameters."""

    target: Path
    drafter: Path
    family: str
    parameters: int

    @property
    def prompt(self) -> tuple[int, ...]:
        """32 tokens, none of which ends a text."""
        return tuple(range(1, 33))


def qwen(folder: Path, geometry: Qwen = RANDOM) -> Pair:
    """A bfloat16 target with its head inside, and the head cut out of it; with `COPIES`, one that is always right."""
    made = Recipe(geometry)
    if geometry is COPIES:
        trunk, head = map(_stored, copy_tensors(made, permutation(geometry.vocab, made.seed)))
    else:
        trunk, head = source_tensors(made)
    trunk = {name: tensor for name, tensor in trunk.items() if ".visual." not in name}
    config = config_document(geometry)
    config["text_config"]["full_attention_interval"] = INTERVAL
    target = write_folder(folder / "qwen", trunk, head, config, vocab=geometry.vocab)
    parameters = sum(values.size for values, _ in trunk.values())
    return Pair(target, split(target, folder / "qwen-mtp"), "qwen3_5_mtp", parameters)


def _stored(tensors: Mapping[str, Array]) -> dict[str, Stored]:
    return {name: (values, "F32" if stays_float32(name) else "BF16") for name, values in tensors.items()}


def gemma(folder: Path, sizes: Gemma = ASSISTED) -> Pair:
    """A bfloat16 target and an assistant for it."""
    own = {**sizes.both, **sizes.target}
    target = gemma4_assistant.write_target(folder / "gemma", **own)
    config = json.loads((target / "config.json").read_text())
    config["text_config"]["use_double_wide_mlp"] = (
        False  # engines differ in what they take where it is not said
    )
    (target / "config.json").write_text(json.dumps(config))
    drafter = gemma4_assistant.write_drafter(folder / "gemma-assistant", **sizes.both, **sizes.drafter)
    shapes = gemma4_assistant.target_shapes(gemma4_assistant.Target(**own))
    return Pair(target, drafter, "gemma4_assistant", sum(map(prod, shapes.values())))
