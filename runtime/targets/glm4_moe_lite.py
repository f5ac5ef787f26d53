"""GLM-4.7-Flash (``glm4_moe_lite``) as a target: mlx-lm's model, and what speculation needs beside it.

``decode`` is mlx-lm's own call. ``verify`` does the same arithmetic for K rows, so that on a backend whose
matrix products do not depend on the number of rows it returns the same bytes; the exactness probe measures
whether that holds. mlx-lm's own forward of K rows does not: its latent attention expands keys and values
for more than one row and works in the compressed space for a single one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU
from mlx_lm.utils import load_model

from draftpair.checkpoint import Checkpoint
from draftpair.errors import Usage
from draftpair.runtime.libraries import reading
from draftpair.runtime.rope import rope_overrides
from draftpair.runtime.staging import loadable_folder

PREFILL_CHUNK = 2048
TAP_VARIABLE = "MLXCEL_GLM_MTP_HIDDEN_TAP"

# SwitchGLU sorts its rows by expert from 64 (row, expert) pairs on, which changes the reduction.
SORTED_FROM = 64


class Target:
    """See ``draftpair.runtime.interfaces.Target``.

    ``tap`` says which hidden state the drafter is fed: "post" is what the final norm returned, "pre" what it
    was given. The choice moves acceptance and never an emitted token.
    """

    def __init__(self, network: Any, tap: str = "post") -> None:
        self.network = network
        self.tap = tap
        self.vocab_size: int = network.args.vocab_size
        self._rows_per_expert_call = max(1, (SORTED_FROM - 1) // network.args.num_experts_per_tok)
        self.reset()

    @classmethod
    def load(cls, checkpoint: Checkpoint, environ: Mapping[str, str]) -> Target:
        tap = environ.get(TAP_VARIABLE) or "post"
        if tap not in ("pre", "post"):
            raise Usage(f"{TAP_VARIABLE} is {tap!r}; expected pre or post")
        overrides = rope_overrides(checkpoint.config)
        failed = f"{checkpoint.source}: mlx-lm cannot load it as glm4_moe_lite"
        with (
            loadable_folder(checkpoint, overrides) as folder,
            reading(failed, f"draftpair validate {checkpoint.source}"),
        ):
            network, _ = load_model(folder, lazy=True, strict=True)
        return cls(network, tap)

    @property
    def offset(self) -> int:
        return int(self.caches[0].offset)

    def reset(self) -> None:
        self.caches = make_prompt_cache(self.network)

    def prefill(self, tokens: Sequence[int]) -> tuple[mx.array, mx.array]:
        """As mlx-lm's generation does: chunks of 2048, and the last token alone, along the decode path."""
        ids = mx.array([tokens])
        taps, last = [], len(tokens) - 1
        bounds = [*range(0, last, PREFILL_CHUNK), last, last + 1]
        for begin, end in pairwise(bounds):
            normed, tap = self._finish(self._trunk(ids[:, begin:end]))
            taps.append(tap)
            mx.eval(tap, [cache.state for cache in self.caches])
        return self.network.lm_head(normed)[:, -1], mx.concatenate(taps, axis=1)

    def decode(self, token: mx.array) -> mx.array:
        logits: mx.array = self.network(token[None], self.caches)
        return logits[:, -1]

    def verify(self, tokens: Sequence[int]) -> tuple[mx.array, mx.array]:
        model = self.network.model
        x = model.embed_tokens(mx.array([tokens]))
        for layer, cache in zip(model.layers, self.caches, strict=True):
            h = x + _attend(layer.self_attn, layer.input_layernorm(x), cache)
            x = h + self._feed_forward(layer.mlp, layer.post_attention_layernorm(h))
        normed, tap = self._finish(x)
        return self.network.lm_head(normed), tap

    def rollback(self, rejected: int) -> None:
        for cache in self.caches:
            trimmed = cache.trim(rejected)
            if trimmed != rejected:
                raise RuntimeError(f"asked the KV cache to drop {rejected} tokens, it dropped {trimmed}")

    def _trunk(self, ids: mx.array) -> mx.array:
        """The layers of mlx-lm's model without its final norm: [1, L] -> [1, L, H]."""
        x: mx.array = self.network.model.embed_tokens(ids)
        mask = create_attention_mask(x, self.caches[0], return_array=True)
        for layer, cache in zip(self.network.model.layers, self.caches, strict=True):
            x = layer(x, mask, cache)
        return x

    def _finish(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """The final norm of the residual stream, and of the two the one the drafter is fed."""
        normed: mx.array = self.network.model.norm(x)
        return normed, x if self.tap == "pre" else normed

    def _feed_forward(self, mlp: Any, x: mx.array) -> mx.array:
        """The layer's MLP, experts called with so few rows that they are never sorted."""
        step = self._rows_per_expert_call if isinstance(mlp.get("switch_mlp"), SwitchGLU) else x.shape[1]
        parts = [mlp(x[:, begin : begin + step]) for begin in range(0, x.shape[1], step)]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def _attend(attention: Any, x: mx.array, cache: Any) -> mx.array:
    """Latent attention of K new rows [1, K, H], each as mlx-lm attends with a single query.

    Projections run on the block. Rotation and attention run row by row: row i sees the keys [0, offset + i] and
    no mask. Rows are made contiguous, because a kernel picked for another layout or count rounds differently.
    """
    start, rows = cache.offset, range(x.shape[1])
    heads, width = attention.num_heads, attention.q_head_dim
    queries = _queries(attention, x).reshape(1, len(rows), heads, width).transpose(0, 2, 1, 3)
    nope, rope = mx.split(queries, [attention.qk_nope_head_dim], axis=-1)
    nope = attention.embed_q(nope)
    latent, k_rope = mx.split(attention.kv_a_proj_with_mqa(x), [attention.kv_lora_rank], axis=-1)
    latent = attention.kv_a_layernorm(latent)
    k_rope = mx.concatenate(
        [attention.rope(k_rope[:, None, row : row + 1], start + row) for row in rows], axis=2
    )
    latent, k_rope = cache.update_and_fetch(latent[:, None], k_rope)
    attended = []
    for row in rows:
        one, seen = slice(row, row + 1), slice(0, start + row + 1)
        query = mx.contiguous(nope[:, :, one]), attention.rope(rope[:, :, one], start + row)
        attended.append(_attend_one(attention, *query, latent[:, :, seen], k_rope[:, :, seen]))
    out = attention.unembed_out(mx.concatenate(attended, axis=2))
    projected: mx.array = attention.o_proj(out.transpose(0, 2, 1, 3).reshape(1, len(rows), -1))
    return projected


def _attend_one(
    attention: Any, nope: mx.array, rope: mx.array, latent: mx.array, k_rope: mx.array
) -> mx.array:
    """One query, its parts [1, heads, 1, rank] and [1, heads, 1, rope], over T keys: [1, heads, 1, rank]."""
    scores = (rope * attention.scale) @ k_rope.swapaxes(-1, -2)
    return mx.fast.scaled_dot_product_attention(nope, latent, latent, scale=attention.scale, mask=scores)


def _queries(attention: Any, x: mx.array) -> mx.array:
    """[1, K, H] -> [1, K, heads * (nope + rope)]."""
    if attention.q_lora_rank is None:
        queries: mx.array = attention.q_proj(x)
    else:
        queries = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(x)))
    return queries
