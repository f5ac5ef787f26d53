"""mlx-lm's gated-delta-net layers for a block of rows, with the bytes of single steps, and the way back.

Such a layer keeps no keys and values but two things that every token overwrites: the last inputs of a short
convolution, and a matrix a head that the delta rule updates. Neither can be trimmed, so a block keeps what
it takes to compute both again after any of its rows.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    ``rows`` are the delta rule's inputs q, k, v, a, b, each [1, K, ...]; ``state`` is the matrices before the block,
    ``after`` those behind each row, where the rule went row by row.
    """

    layer: Any
    cache: Any
    window: mx.array
    rows: tuple[mx.array, ...]
    state: mx.array
    after: list[mx.array]

    def keep(self, count: int) -> None:
        """Leave the layer's cache as after the first ``count`` rows."""
        reach = self.layer.conv_kernel_size - 1
        self.cache[0] = mx.contiguous(self.window[:, count : count + reach])
        if count == 0:
            self.cache[1] = self.state
        elif self.after:
            self.cache[1] = self.after[count - 1]
        else:
            _, self.cache[1] = _rule(self.layer, [values[:, :count] for values in self.rows], self.state)


def mix_rows(layer: Any, x: mx.array, cache: Any, by_rows: bool) -> tuple[mx.array, Taken]:
    """What the layer makes of K new rows [1, K, H], each as if it had come alone; its cache moves on by all of them.

    The projections run on the block, and so does the convolution unless ``by_rows``: a kernel picked for another
    length may add in another order. The delta rule's state and arithmetic are float32, so that one call for the
    block rounds nothing that a call a row would have rounded. Where mlx-lm has no kernel for it and goes row by row
    itself, the states on the way are kept, and taking rows back costs nothing.
    """
    count, kernel = x.shape[1], layer.conv_kernel_size
    z = layer.in_proj_z(x).reshape(1, count, layer.num_v_heads, layer.head_v_dim)
    b, a = layer.in_proj_b(x), layer.in_proj_a(x)
    window = mx.concatenate([cache[0], layer.in_proj_qkv(x)], axis=1)
    if by_rows:
        seen = [mx.contiguous(window[:, row : row + kernel]) for row in range(count)]
        convolved = nn.silu(mx.concatenate([layer.conv1d(rows) for rows in seen], axis=1))
    else:
        convolved = nn.silu(layer.conv1d(window))
    q, k, v = mx.split(convolved, [layer.key_dim, 2 * layer.key_dim], axis=-1)
    q, k = (part.reshape(1, count, layer.num_k_heads, layer.head_k_dim) for part in (q, k))
    rows = (*_normalized(q, k), v.reshape(1, count, layer.num_v_heads, layer.head_v_dim), a, b)
    before = cache[1]
    if _has_kernel(layer):
        out, state = _rule(layer, rows, before)
        states: list[mx.array] = []
    else:
        out, states = _rule_by_rows(layer, rows, before)
        state = states[-1]
    cache[0], cache[1] = mx.contiguous(window[:, count:]), state
    mixed: mx.array = layer.out_proj(layer.norm(out, z).reshape(1, count, -1))
    return mixed, Taken(layer, cache, window, rows, before, states)


def _has_kernel(layer: Any) -> bool:
    """Whether mlx-lm runs the rule for all rows in one kernel here: on Metal, for some widths."""
    return bool(mx.default_device() == mx.gpu and mx.metal.is_available() and layer.head_k_dim % 32 == 0)


def _rule(layer: Any, rows: Sequence[mx.array], state: mx.array) -> tuple[mx.array, mx.array]:
    """Outputs [1, K, heads, width] of the delta rule and the state behind the last row, as mlx-lm has them."""
    q, k, v, a, b = rows
    out, state = gated_delta.gated_delta_update(
        q, k, v, a, b, layer.A_log, layer.dt_bias, state, None, use_kernel=not layer.training
    )
    return out, state


def _rule_by_rows(layer: Any, rows: Sequence[mx.array], state: mx.array) -> tuple[mx.array, list[mx.array]]:
    """The same, and the state behind each row."""
    q, k, v, a, b = rows
    decay, beta = gated_delta.compute_g(layer.A_log, a, layer.dt_bias), mx.sigmoid(b)
    outs, states = [], []
    for row in range(q.shape[1]):
        one = slice(row, row + 1)
        out, state = gated_delta.gated_delta_ops(
            q[:, one], k[:, one], v[:, one], decay[:, one], beta[:, one], state
        )
        outs.append(out)
        states.append(state)
    return mx.concatenate(outs, axis=1), states


def _normalized(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
    """Queries and keys [..., d] as the mlx-lm at hand scales them; before 0.32 its epsilon was not divided by d."""
    scale = q.shape[-1] ** -0.5
    eps = EPS * scale**2 if hasattr(gated_delta, "normalize_qk") else EPS
    return scale**2 * mx.fast.rms_norm(q, None, eps), scale * mx.fast.rms_norm(k, None, eps)
