"""GLM-4.7-Flash (``glm4_moe_lite``) as a target: latent attention, experts, and a choice of the hidden state tapped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask

from draftpair.checkpoint import Checkpoint
from draftpair.errors import Usage
from draftpair.runtime.rope import rope_overrides
from draftpair.runtime.targets._latent import attend_latent
from draftpair.runtime.targets._layered import LayeredTarget
from draftpair.runtime.targets._mlx_lm import load_network

TAP_VARIABLE = "MLXCEL_GLM_MTP_HIDDEN_TAP"


class Target(LayeredTarget):
    """See ``draftpair.runtime.interfaces.Target``.

    ``tap`` says which hidden state the drafter is fed: "post" is what the final norm returned, "pre" what it
    was given. The choice moves acceptance and never an emitted token.
    """

    by_rows = True  # mlx-lm attends in another way, and gives other bytes, for a block

    def __init__(self, network: Any, tap: str = "post") -> None:
        super().__init__(network)
        self.tap = tap

    @classmethod
    def load(cls, checkpoint: Checkpoint, environ: Mapping[str, str]) -> Target:
        tap = environ.get(TAP_VARIABLE) or "post"
        if tap not in ("pre", "post"):
            raise Usage(f"{TAP_VARIABLE} is {tap!r}; expected pre or post")
        return cls(load_network(checkpoint, rope_overrides(checkpoint.config)), tap)

    def attend(self, attention: Any, x: mx.array, cache: Any) -> mx.array:
        return attend_latent(attention, x, cache)

    def hidden(self, ids: mx.array) -> tuple[mx.array, mx.array]:
        """The layers of mlx-lm's model one after another, because it returns no state before the final norm."""
        x = self.embed(ids)
        mask = create_attention_mask(x, self.caches[0], return_array=True)
        for layer, cache in zip(self.network.model.layers, self.caches, strict=True):
            x = layer(x, mask, cache)
        return self.finish(x)

    def finish(self, x: mx.array) -> tuple[mx.array, mx.array]:
        normed: mx.array = self.network.model.norm(x)
        return normed, x if self.tap == "pre" else normed
