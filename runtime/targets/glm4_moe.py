"""GLM-4.5, 4.6 and 4.7 (``glm4_moe``) as a target: grouped-query attention, of which RoPE turns a part, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.glm4_moe import Model, ModelArgs

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.errors import Refused
from draftpair.runtime.rope import rope_overrides
from draftpair.runtime.targets._layered import LayeredTarget, Trunk
from draftpair.runtime.targets._mlx_lm import load_network


class Network(Trunk, Model):
    """mlx-lm's model, which may be given a raw checkpoint."""


class Target(LayeredTarget):
    """See ``draftpair.runtime.interfaces.Target``."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, environ: Mapping[str, str]) -> Target:
        return cls(load_network(checkpoint, overrides(checkpoint.config), (Network, ModelArgs)))

    def attend(self, attention: Any, x: mx.array, cache: Any) -> mx.array:
        """Projections run on the block, rotation and attention row by row: row i sees the keys [0, offset + i]."""
        start = cache.offset
        queries = _heads(attention.q_proj(x), attention.n_heads)
        keys = _heads(attention.k_proj(x), attention.n_kv_heads)
        values = _heads(attention.v_proj(x), attention.n_kv_heads).transpose(0, 2, 1, 3)
        if attention.use_qk_norm:
            queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        turned = _turned(attention.rope, queries, start)
        keys = mx.concatenate(_turned(attention.rope, keys, start), axis=2)
        keys, values = cache.update_and_fetch(keys, values)
        attended = []
        for row, query in enumerate(turned):
            seen = keys[:, :, : start + row + 1], values[:, :, : start + row + 1]
            one = scaled_dot_product_attention(query, *seen, cache, scale=attention.scale, mask=None)
            attended.append(one)
        out = mx.concatenate(attended, axis=2).transpose(0, 2, 1, 3)
        projected: mx.array = attention.o_proj(out.reshape(1, x.shape[1], -1))
        return projected


def overrides(config: ConfigView) -> dict[str, Any]:
    """The rotary keys of a config as mlx-lm's arguments want them.

    Refused where mlx-lm would turn other angles than the config says: it reads no ``rope_scaling`` here.
    """
    if config.rope.scaling is not None:
        raise Refused(
            f"config.json asks for RoPE scaling {config.rope.scaling.get('rope_type')}; mlx-lm's glm4_moe has none",
            hint="the published GLM-4.5, 4.6 and 4.7 have no rope_scaling: compare config.json with the original's",
        )
    if config.rope.partial is None:
        raise Refused(
            "config.json does not state partial_rotary_factor",
            hint="copy it from the original repository's config.json",
        )
    return {**rope_overrides(config), "partial_rotary_factor": config.rope.partial}


def _heads(x: mx.array, heads: int) -> mx.array:
    """[1, K, heads * d] -> [1, K, heads, d]."""
    return x.reshape(1, x.shape[1], heads, -1)


def _turned(rope: Any, x: mx.array, start: int) -> list[mx.array]:
    """Each of the rows of x [1, K, heads, d] at its own position: K arrays [1, heads, 1, d]."""
    by_head = x.transpose(0, 2, 1, 3)
    return [
        rope(mx.contiguous(by_head[:, :, row : row + 1]), offset=start + row) for row in range(x.shape[1])
    ]
