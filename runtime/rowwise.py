"""Verifies a block with projections and attention row by row: the way out where a block's kernels round differently.

GPU backends choose a kernel by the number of rows. A row on its own takes the kernel that single-token decoding
takes, at the price of reading the weights once a row. Everything around the projections still runs on the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models import deepseek_v3, glm4_moe, glm4_moe_lite
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import SwitchGLU

from draftpair.runtime.interfaces import Target

# Modules whose arithmetic reads weights, with the axis that counts rows.
PROJECTIONS: tuple[tuple[type[nn.Module], int], ...] = (
    (nn.Linear, -2),
    (nn.QuantizedLinear, -2),
    (nn.Embedding, -2),
    (nn.QuantizedEmbedding, -2),
    (MultiLinear, -2),
    (QuantizedMultiLinear, -2),
    (SwitchGLU, 1),
    *((models.MoEGate, 1) for models in (deepseek_v3, glm4_moe, glm4_moe_lite)),
)


class RowWise:
    """A target whose ``verify`` runs row by row; all else is the wrapped target's."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._switch = _Switch()
        for module in target.network.modules():
            axis = next((axis for kind, axis in PROJECTIONS if type(module) is kind), None)
            if axis is not None:
                module.__class__ = _by_rows_class(type(module), axis, self._switch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def verify(self, tokens: Sequence[int]) -> tuple[mx.array, mx.array]:
        with self._switch.on(), _attention_by_rows():
            return self._target.verify(tokens)

    def undo(self) -> Target:
        """The wrapped target, as it was before."""
        for module in self._target.network.modules():
            if hasattr(type(module), "rows_of"):
                module.__class__ = type(module).rows_of
        return self._target


class _Switch:
    active = False

    @contextmanager
    def on(self) -> Iterator[None]:
        self.active = True
        try:
            yield
        finally:
            self.active = False


def _by_rows_class(kind: Any, axis: int, switch: _Switch) -> Any:
    """A subclass of ``kind`` that, while the switch is on, is called for each row of its inputs alone."""

    def call(self: Any, x: mx.array, *others: mx.array, **options: Any) -> Any:
        return _rows(lambda *row: kind.__call__(self, *row, **options), axis, switch, x, *others)

    def as_linear(self: Any, x: mx.array) -> Any:
        return _rows(lambda row: kind.as_linear(self, row), axis, switch, x)

    gathers = hasattr(kind, "as_linear")  # a table's lookup copies rows, only its use as a head multiplies
    members: dict[str, Any] = {
        "rows_of": kind,
        **({"as_linear": as_linear} if gathers else {"__call__": call}),
    }
    return type(kind.__name__, (kind,), members)


def _rows(call: Callable[..., Any], axis: int, switch: _Switch, *inputs: mx.array) -> Any:
    """What ``call`` makes of the inputs, an array or several, of each row alone while the switch is on."""
    count = inputs[0].shape[axis] if inputs[0].ndim > 2 else 1
    if not switch.active or count == 1:
        return call(*inputs)
    parts = [
        call(*(mx.contiguous(part) for part in row))
        for row in zip(*(mx.split(x, count, axis) for x in inputs), strict=True)
    ]
    if isinstance(parts[0], tuple):
        return tuple(mx.concatenate(list(same), axis=axis) for same in zip(*parts, strict=True))
    return mx.concatenate(parts, axis=axis)


@contextmanager
def _attention_by_rows() -> Iterator[None]:
    """Inside, MLX's attention of several causal queries is made of single ones, each with the keys it may see."""
    whole: Callable[..., mx.array] = mx.fast.scaled_dot_product_attention

    def by_rows(q: mx.array, k: mx.array, v: mx.array, *, mask: Any = None, **options: Any) -> mx.array:
        count, keys = q.shape[2], k.shape[2]
        if count == 1 or not (isinstance(mask, str) and mask == "causal"):
            return whole(q, k, v, mask=mask, **options)
        rows = []
        for row in range(count):
            seen = slice(0, keys - count + row + 1)
            query = mx.contiguous(q[:, :, row : row + 1])
            rows.append(whole(query, k[:, :, seen], v[:, :, seen], mask=None, **options))
        return mx.concatenate(rows, axis=2)

    mx.fast.scaled_dot_product_attention = by_rows
    try:
        yield
    finally:
        mx.fast.scaled_dot_product_attention = whole
