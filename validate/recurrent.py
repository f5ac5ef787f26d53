"""The state that recurrent layers keep for one sequence, whatever its length.

Shapes are those that mlx-lm 0.32.2 allocates; the tests compare them with its caches. Each layer keeps the
last ``kernel - 1`` inputs of its convolution, where it has one, and a matrix state, except for a plain short
convolution.
"""

from __future__ import annotations

from dataclasses import dataclass

from draftpair.checkpoint import ConfigView
from draftpair.validate.geometry import HEAD_DIM, HEADS, HIDDEN, number


@dataclass(frozen=True)
class LayerState:
    """Elements one layer keeps: ``activation`` in the model's dtype, ``float32`` in float32, ``int64`` in int64."""

    activation: int
    float32: int = 0
    int64: int = 0

    def nbytes(self, activation_bytes: int) -> int:
        """Bytes with activations of ``activation_bytes`` bytes."""
        return self.activation * activation_bytes + self.float32 * 4 + self.int64 * 8


def layer_state(config: ConfigView, kind: str) -> LayerState | None:
    """State of a ``linear``, ``mamba`` or ``conv`` layer; None when the config does not give its sizes."""
    if kind == "linear":
        if config.get("layer_group_size") is not None:
            return _ling(config)
        return _gated_delta(config) or _kimi_delta(config)
    if kind == "mamba":
        return _mamba2(config) or _mamba1(config)
    return _short_conv(config)


def _product(*factors: int | None) -> int | None:
    """The product, or None when a factor is unknown."""
    result = 1
    for factor in factors:
        if factor is None:
            return None
        result *= factor
    return result


def _state(
    kernel: int | None, width: int | None, activation: int | None, float32: int | None
) -> LayerState | None:
    """``(kernel - 1) * width`` convolution inputs plus the matrix state; None when a size is unknown."""
    if kernel is None or width is None or activation is None or float32 is None:
        return None
    return LayerState((kernel - 1) * width + activation, float32)


def _gated_delta(config: ConfigView) -> LayerState | None:
    """Gated delta net: queries, keys and values pass the convolution; state [Hv, Dv, Dk] in float32."""
    key_dim, value_dim = number(config, "linear_key_head_dim"), number(config, "linear_value_head_dim")
    value_heads = number(config, "linear_num_value_heads")
    keys = _product(number(config, "linear_num_key_heads"), key_dim)
    values = _product(value_heads, value_dim)
    width = 2 * keys + values if keys is not None and values is not None else None
    kernel = number(config, "linear_conv_kernel_dim")
    return _state(kernel, width, 0, _product(value_heads, value_dim, key_dim))


def _kimi_delta(config: ConfigView) -> LayerState | None:
    """Kimi delta attention: three convolutions of heads * dim; state [H, D, D] in float32."""
    sizes = config.get("linear_attn_config")
    if not isinstance(sizes, dict):
        return None
    view = ConfigView(sizes)
    heads, dim = number(view, "num_heads"), number(view, "head_dim")
    kernel = number(view, "short_conv_kernel_size")
    return _state(kernel, _product(3, heads, dim), 0, _product(heads, dim, dim))


def _ling(config: ConfigView) -> LayerState | None:
    """Ling and Ring: lightning attention, state [H, D, D], in float32 where the rest is latent attention.

    Version 3 has Kimi's delta attention instead, without sizes of its own.
    """
    heads, dim = number(config, *HEADS), number(config, *HEAD_DIM)
    if "BailingMoeV3ForCausalLM" in (config.get("architectures") or ()):
        kernel = number(config, "short_conv_kernel_size") or 4
        return _state(kernel, _product(3, heads, dim), 0, _product(heads, dim, dim))
    if config.get("kv_lora_rank") is not None:
        return _state(1, 0, 0, _product(heads, dim, dim))
    hidden = number(config, *HIDDEN)
    own = hidden // heads if hidden and heads else None
    return _state(1, 0, _product(heads, own, own), 0)


def _mamba2(config: ConfigView) -> LayerState | None:
    """Mamba 2: inner width plus both groups pass the convolution; state [heads, dim, state] in float32."""
    prefixed = config.get("mamba_num_heads") is not None or config.get("mamba_n_heads") is not None
    heads = number(config, "mamba_num_heads", "mamba_n_heads", *(() if prefixed else ("num_heads",)))
    dim = number(config, "mamba_head_dim", "mamba_d_head", *(() if prefixed else ("head_dim",)))
    size = number(config, "ssm_state_size", "mamba_d_state", "state_size")
    groups = _product(2, number(config, "n_groups", "mamba_n_groups"), size)
    inner = _product(heads, dim)
    width = inner + groups if inner is not None and groups is not None else None
    return _state(number(config, "conv_kernel", "mamba_d_conv"), width, 0, _product(inner, size))


def _mamba1(config: ConfigView) -> LayerState | None:
    """Mamba 1: the inner width passes the convolution; state [inner, state]."""
    inner = _product(number(config, "mamba_expand"), number(config, *HIDDEN))
    if inner is None:
        inner = number(config, "intermediate_size", "d_inner")
    size = number(config, "mamba_d_state", "state_size", "d_state")
    return _state(number(config, "conv_kernel", "mamba_d_conv", "d_conv"), inner, _product(inner, size), 0)


def _short_conv(config: ConfigView) -> LayerState | None:
    """LFM2: the last ``conv_L_cache - 1`` gated inputs of the hidden width."""
    return _state(number(config, "conv_L_cache"), number(config, *HIDDEN), 0, 0)
