"""Latent attention of a verify block, as mlx-lm's DeepSeek and GLM models attend with a single query.

mlx-lm's own forward of K rows gives other bytes than K single ones: it expands keys and values for more than
one row and works in the compressed space for one. Here every row works in the compressed space.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from draftpair.runtime.targets._rows import rotated, up_to_each


def attend_latent(attention: Any, x: mx.array, cache: Any) -> mx.array:
    """Attention of K new rows [1, K, H]; ``attention`` is mlx-lm's module, ``cache`` the layer's own.

    Projections run on the block. Rotation and attention run row by row: row i sees the keys [0, offset + i] and
    no mask. Rows are made contiguous, because a kernel picked for another layout or count rounds differently.
    """
    start, count = cache.offset, x.shape[1]
    heads, width = attention.num_heads, attention.q_head_dim
    queries = _queries(attention, x).reshape(1, count, heads, width).transpose(0, 2, 1, 3)
    nope, rope = mx.split(queries, [attention.qk_nope_head_dim], axis=-1)
    nope = attention.embed_q(nope)
    latent, k_rope = mx.split(attention.kv_a_proj_with_mqa(x), [attention.kv_lora_rank], axis=-1)
    latent = attention.kv_a_layernorm(latent)
    k_rope = mx.concatenate(rotated(attention.rope, k_rope[:, None], start), axis=2)
    seen = up_to_each(cache.update_and_fetch(latent[:, None], k_rope), count)
    turned = rotated(attention.rope, rope, start)
    attended = [
        _attend_one(attention, mx.contiguous(nope[:, :, row : row + 1]), turned[row], *seen[row])
        for row in range(count)
    ]
    out = attention.unembed_out(mx.concatenate(attended, axis=2))
    projected: mx.array = attention.o_proj(out.transpose(0, 2, 1, 3).reshape(1, count, -1))
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
