"""GLM-4.5, 4.6 and 4.7 (``glm4_moe``) as a target: grouped-query attention, of which RoPE turns a part, and experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
from mlx_lm.models.glm4_moe import Model, ModelArgs

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.errors import Refused
from draftpair.runtime.rope import rope_overrides
from draftpair.runtime.targets._layered import LayeredTarget, Trunk
from draftpair.runtime.targets._mlx_lm import load_network
from draftpair.runtime.targets._rows import attended, rotated, up_to_each


class Network(Trunk, Model):
    """mlx-lm's model, which may be given a raw checkpoint."""


class Target(LayeredTarget):
    """See ``draftpair.runtime.interfaces.Target``."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, environ: Mapping[str, str]) -> Target:
        return cls(load_network(checkpoint, overrides(checkpoint.config), (Network, ModelArgs)))

    def attend(self, attention: Any, x: mx.array, cache: Any) -> mx.array:
        """Projections run on the block, rotation and attention row by row: row i sees the keys [0, offset + i]."""
        queries, keys, values = (
            projection(x).reshape(1, x.shape[1], heads, -1)
            for projection, heads in (
                (attention.q_proj, attention.n_heads),
                (attention.k_proj, attention.n_kv_heads),
                (attention.v_proj, attention.n_kv_heads),
            )
        )
        if attention.use_qk_norm:
            queries, keys = attention.q_norm(queries), attention.k_norm(keys)
        queries, keys, values = (part.transpose(0, 2, 1, 3) for part in (queries, keys, values))
        turned = rotated(attention.rope, queries, cache.offset)
        keys = mx.concatenate(rotated(attention.rope, keys, cache.offset), axis=2)
        seen = up_to_each(cache.update_and_fetch(keys, values), len(turned))
        projected: mx.array = attention.o_proj(attended(turned, seen, attention.scale))
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
