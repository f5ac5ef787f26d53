"""DeepSeek V3 and R1 (``deepseek_v3``) as a target: latent attention and experts; FP8 is decoded to bfloat16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.models.deepseek_v3 import Model, ModelArgs

from draftpair.checkpoint import Checkpoint
from draftpair.runtime.rope import rope_overrides
from draftpair.runtime.targets._latent import attend_latent
from draftpair.runtime.targets._layered import LayeredTarget, Trunk
from draftpair.runtime.targets._mlx_lm import load_network


class Network(Trunk, Model):
    """mlx-lm's model, which may be given a raw checkpoint."""


class Target(LayeredTarget):
    """See ``draftpair.runtime.interfaces.Target``."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, environ: Mapping[str, str]) -> Target:
        overrides = rope_overrides(checkpoint.config)
        return cls(load_network(checkpoint, overrides, (Network, ModelArgs)))

    by_rows = True  # mlx-lm attends in another way, and gives other bytes, for a block

    def attend(self, attention: Any, x: mx.array, cache: Any) -> mx.array:
        return attend_latent(attention, x, cache)
