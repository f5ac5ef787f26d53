"""Targets of plain decoder layers, attention and feed-forward each behind a norm: what verifying them takes.

``decode`` is mlx-lm's own call. ``verify`` does the same arithmetic for K rows, so that on a backend whose
products do not depend on the number of rows it returns the same bytes; the exactness probe measures whether that
holds. Projections run on the block, attention too or, ``by_rows``, as a family's ``attend`` does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.switch_layers import SwitchGLU

from draftpair.runtime.targets._mlx_lm import MlxLmTarget

# SwitchGLU sorts its rows by expert from 64 (row, expert) pairs on, which changes the reduction.
SORTED_FROM = 64


class LayeredTarget(MlxLmTarget):
    """See ``draftpair.runtime.interfaces.Target``; a family adds ``attend``."""

    def attend(self, attention: Any, x: mx.array, cache: Any) -> mx.array:
        """Attention of K new rows [1, K, H], each with the bytes that a single row would have given."""
        raise NotImplementedError

    def verify(self, tokens: Sequence[int]) -> tuple[mx.array, mx.array]:
        x = self.embed(mx.array([tokens]))
        for layer, cache in zip(self.text.model.layers, self.caches, strict=True):
            normed = layer.input_layernorm(x)
            if self.by_rows:
                h = x + self.attend(layer.self_attn, normed, cache)
            else:
                h = x + layer.self_attn(normed, create_attention_mask(normed, cache), cache)
            x = h + feed_forward(layer.mlp, layer.post_attention_layernorm(h), self.text.args)
        normed, tap = self.finish(x)
        return self.head(normed), tap

    def finish(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """The final norm of the residual stream [1, L, H], and the hidden states that the drafter is fed."""
        normed: mx.array = self.text.model.norm(x)
        return normed, normed


def feed_forward(mlp: Any, x: mx.array, args: Any) -> mx.array:
    """A layer's MLP of x [1, K, H], experts called with so few rows that they are never sorted."""
    step = x.shape[1]
    if isinstance(mlp.get("switch_mlp"), SwitchGLU):
        step = max(1, (SORTED_FROM - 1) // args.num_experts_per_tok)
    parts = [mlp(x[:, begin : begin + step]) for begin in range(0, x.shape[1], step)]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


class Trunk:
    """Mixed into a model of mlx-lm's: leaves the head of a raw checkpoint, the layers past the last, where it is.

    mlx-lm leaves out one layer, of a fixed number in some models.
    """

    args: Any

    def sanitize(self, weights: dict[str, mx.array]) -> Any:
        layers = self.args.num_hidden_layers
        trunk = {name: tensor for name, tensor in weights.items() if _layer(name) < layers}
        return super().sanitize(trunk)  # type: ignore[misc]


def _layer(name: str) -> int:
    """The number in ``model.layers.<number>.``, -1 without one."""
    number = name.removeprefix("model.layers.").split(".", 1)[0]
    return int(number) if number.isdecimal() else -1
