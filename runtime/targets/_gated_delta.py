"""mlx-lm's gated-delta-net layers for a block of rows, with the bytes of single steps, and the way back.

Such a layer keeps no keys and values but two things that every token overwrites: the last inputs of a short
convolution, and a matrix a head that the delta rule updates. Neither can be trimmed, so a block keeps what
it takes to compute both again after any of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import gated_delta

EPS = 1e-6  # of the norm of queries and keys, in every release


@dataclass(frozen=True)
class Taken:
    """What one layer took in with a block of K rows.

    ``window`` [1, kernel - 1 + K, channels] is what the convolution reads, the rows before the block included;
    ``rows`` are the delta rule's inputs q, k, v, a, b, each [1, K, ...]; ``state`` is the matrices before the block.
    """

    layer: Any
    cache: Any
    window: mx.array
    rows: tuple[mx.array, ...]
    state: mx.array

    def advance(self, count: int) -> mx.array:
        """Leave the layer's cache as after the first ``count`` rows; their outputs [1, count, heads, width]."""
        reach = self.layer.conv_kernel_size - 1
        self.cache[0] = mx.contiguous(self.window[:, count : count + reach])
        q, k, v, a, b = (values[:, :count] for values in self.rows)
        if count == 0:
            self.cache[1] = self.state
            return v
        # The state is float32, and so is the rule's arithmetic: nothing is rounded between two rows of one call
        # that two calls would have rounded.
        rule, layer = gated_delta.gated_delta_update, self.layer
        out, self.cache[1] = rule(
            q, k, v, a, b, layer.A_log, layer.dt_bias, self.state, use_kernel=not layer.training
        )
        return out


def mix_rows(layer: Any, x: mx.array, cache: Any) -> tuple[mx.array, Taken]:
    """What the layer makes of K new rows [1, K, H], each as if it had come alone; its cache moves on by all of them.

    The projections run on the block. The convolution runs row by row, because a kernel picked for another length
    may add in another order.
    """
    count, kernel = x.shape[1], layer.conv_kernel_size
    z = layer.in_proj_z(x).reshape(1, count, layer.num_v_heads, layer.head_v_dim)
    b, a = layer.in_proj_b(x), layer.in_proj_a(x)
    window = mx.concatenate([cache[0], layer.in_proj_qkv(x)], axis=1)
    seen = [mx.contiguous(window[:, row : row + kernel]) for row in range(count)]
    convolved = nn.silu(mx.concatenate([layer.conv1d(rows) for rows in seen], axis=1))
    q, k, v = mx.split(convolved, [layer.key_dim, 2 * layer.key_dim], axis=-1)
    q, k = (part.reshape(1, count, layer.num_k_heads, layer.head_k_dim) for part in (q, k))
    v = v.reshape(1, count, layer.num_v_heads, layer.head_v_dim)
    taken = Taken(layer, cache, window, (*_normalized(q, k), v, a, b), cache[1])
    out = layer.norm(taken.advance(count), z)
    mixed: mx.array = layer.out_proj(out.reshape(1, count, -1))
    return mixed, taken


def _normalized(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
    """Queries and keys [..., d] as the mlx-lm at hand scales them; before 0.32 its epsilon was not divided by d."""
    scale = q.shape[-1] ** -0.5
    eps = EPS * scale**2 if hasattr(gated_delta, "normalize_qk") else EPS
    return scale**2 * mx.fast.rms_norm(q, None, eps), scale * mx.fast.rms_norm(k, None, eps)
