"""Gemma 4 (``gemma4``, ``gemma4_text``) as a target: mlx-lm's model, with caches that roll back past the window.

``decode`` is mlx-lm's own call. ``verify`` does the same arithmetic for K rows: projections on the block, rotation and
attention row by row. Layers that share keys and values read, for each row, what that row saw in the layer they share
with. The tap is what the final norm returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.gemma4_text import logit_softcap

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.errors import Refused
from draftpair.families.views.gemma4 import layer as layer_config
from draftpair.runtime.targets._layered import SORTED_FROM
from draftpair.runtime.targets._mlx_lm import MlxLmTarget, load_network
from draftpair.runtime.targets._rows import attended, rotated, up_to_each
from draftpair.runtime.window import Rows, WindowCache

FULL, SLIDING = "full_attention", "sliding_attention"

# mlx-lm's arguments have the published sizes of E2B as defaults; these must come from the config.
SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "sliding_window",
)
EXPERT_SIZES = ("num_experts", "top_k_experts", "moe_intermediate_size")

# What a key means that a config leaves out; mlx-lm takes E2B's. Where a model has inputs by layer, its tensors say so
# too, and do not load without the key.
ABSENT = {
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": None,
}


class Target(MlxLmTarget):
    """See ``draftpair.runtime.interfaces.Target``.

    ``sources`` names for each type of attention the last layer with keys and values of its own: those an assistant
    reads.
    """

    def __init__(self, network: Any) -> None:
        super().__init__(network, getattr(network, "language_model", network))
        model = self.text.model
        self.sources: dict[str, int] = {
            layer.layer_type: number
            for number, layer in enumerate(model.layers)
            if model.previous_kvs[number] == number
        }
        self.probe_lengths = (model.window_size + 1,) if SLIDING in self.sources else ()
        self._experts_per_token: int = (self.text.args.enable_moe_block and self.text.args.top_k_experts) or 0

    @classmethod
    def load(cls, checkpoint: Checkpoint, environ: Mapping[str, str]) -> Target:
        config = checkpoint.config
        text = text_config(config)
        wrapped = {"model_type": "gemma4", "text_config": text, "vocab_size": text["vocab_size"]}
        return cls(load_network(checkpoint, {}, nested=wrapped if config.text_key else text))

    def reset(self) -> None:
        window = self.text.model.window_size
        self.caches = [
            cache if isinstance(cache, KVCache) else WindowCache(window)
            for cache in make_prompt_cache(self.network)
        ]

    def verify(self, tokens: Sequence[int]) -> tuple[mx.array, mx.array]:
        model, ids = self.text.model, mx.array([tokens])
        if not self.by_rows and len(tokens) * self._experts_per_token < SORTED_FROM:
            normed, tap = self.hidden(ids)
            return self.head(normed), tap
        x = self.embed(ids)
        inputs = self._inputs_by_layer(ids, x)
        seen: dict[int, list[Rows]] = {}
        start = self.offset
        for number, (layer, shared) in enumerate(zip(model.layers, model.previous_kvs, strict=True)):
            normed = layer.input_layernorm(x)
            if shared == number:
                seen[number] = _remember(layer.self_attn, normed, self.caches[number])
            attended = _attend(layer.self_attn, normed, seen[shared], start)
            h = x + layer.post_attention_layernorm(attended)
            h = h + layer.post_feedforward_layernorm(_feed_forward(layer, h))
            x = _gated(layer, h, inputs[number]) * layer.layer_scalar
        normed = model.norm(x)
        return self.head(normed), normed

    def embed(self, tokens: mx.array) -> mx.array:
        scaled: mx.array = super().embed(tokens) * self.text.model.embed_scale
        return scaled

    def head(self, normed: mx.array) -> mx.array:
        logits, cap = super().head(normed), self.text.final_logit_softcapping
        capped: mx.array = logits if cap is None else logit_softcap(cap, logits)
        return capped

    def shared_kv(self) -> dict[str, Rows]:
        """Keys and values, rotated, [1, heads, T, width] by type of attention, as the last resident position sees them.

        T is the number of resident tokens in full attention, and at most the window in sliding attention.
        """
        return {kind: _resident(self.caches[number]) for kind, number in self.sources.items()}

    def shared_attention(self) -> dict[str, Any]:
        """The attention module behind each entry of ``shared_kv``."""
        return {kind: self.text.model.layers[number].self_attn for kind, number in self.sources.items()}

    def _inputs_by_layer(self, ids: mx.array, x: mx.array) -> list[mx.array | None]:
        """What each layer is told of the tokens besides the residual stream, or None: E2B and E4B only."""
        model = self.text.model
        if not model.hidden_size_per_layer_input:
            return [None] * len(model.layers)
        inputs = model._project_per_layer_inputs(x, model._get_per_layer_inputs(ids))
        return [inputs[:, :, number] for number in range(len(model.layers))]


def text_config(config: ConfigView) -> dict[str, Any]:
    """The text model's config with every key that mlx-lm would else fill in with E2B's.

    Refused when a size is missing or below 1, or when a token would have no row in the table of inputs by layer.
    """
    for key in SIZES + (EXPERT_SIZES if config.get("enable_moe_block") else ()):
        config.require_int(key, minimum=1)
    vocab, tied = config.get("vocab_size"), config.raw.get("tie_word_embeddings") is not False
    if config.get("hidden_size_per_layer_input"):
        config.require_int("vocab_size_per_layer_input", minimum=vocab)
    own = {"model_type": "gemma4_text", "tie_word_embeddings": tied, "vocab_size": vocab}
    return {**ABSENT, **config.text, **own, **full_heads(config)}


def full_heads(config: ConfigView) -> dict[str, Any]:
    """The width and number of key-value heads in full attention, from either of the two ways to state them."""
    types = config.get("layer_types")
    count = config.require_int("num_hidden_layers", minimum=1)
    if not isinstance(types, list) or len(types) != count or not {FULL, SLIDING} >= set(types):
        raise Refused(f"config.json: layer_types has to name {FULL} or {SLIDING} for each of {count} layers")
    if FULL not in types:
        return {}
    own = layer_config(config, types.index(FULL))
    if own.get("head_dim") is None:
        raise Refused("config.json does not state global_head_dim, the width of heads in full attention")
    return {
        "global_head_dim": own.require_int("head_dim", minimum=1),
        "num_global_key_value_heads": own.require_int("num_key_value_heads", minimum=1),
    }


def _remember(attention: Any, x: mx.array, cache: Any) -> list[Rows]:
    """Add keys and values of K new rows [1, K, H]; for each row, the keys and values that decoding it would see."""
    start, count = cache.offset, x.shape[1]
    shape = (1, count, attention.n_kv_heads, attention.head_dim)
    projected = attention.k_proj(x).reshape(shape)
    keys = attention.k_norm(projected).transpose(0, 2, 1, 3)
    values = projected if attention.use_k_eq_v else attention.v_proj(x).reshape(shape)
    values = attention.v_norm(values).transpose(0, 2, 1, 3)
    keys = mx.concatenate(rotated(_rope(attention), keys, start), axis=2)
    if isinstance(cache, WindowCache):
        cache.append(keys, values)
        return [cache.visible(count - 1 - row) for row in range(count)]
    return up_to_each(cache.update_and_fetch(keys, values), count)


def _attend(attention: Any, x: mx.array, seen: Sequence[Rows], start: int) -> mx.array:
    """Attention of K rows [1, K, H], the first at position ``start``, each over its own keys and without a mask."""
    count = x.shape[1]
    queries = attention.q_proj(x).reshape(1, count, attention.n_heads, attention.head_dim)
    queries = attention.q_norm(queries).transpose(0, 2, 1, 3)
    out = attended(rotated(_rope(attention), queries, start), seen, attention.scale)
    projected: mx.array = attention.o_proj(out)
    return projected


def _rope(attention: Any) -> Callable[[mx.array, int], mx.array]:
    """The layer's rotation, told its position as mlx-lm tells it, which may pick another kernel."""

    def turn(heads: mx.array, position: int) -> mx.array:
        turned: mx.array = attention.rope(heads, offset=mx.array(position))
        return turned

    return turn


def _feed_forward(layer: Any, h: mx.array) -> mx.array:
    """The layer's MLP, and its experts if it has any, called with so few rows that they are never sorted."""
    if not layer.enable_moe:
        dense: mx.array = layer.mlp(layer.pre_feedforward_layernorm(h))
        return dense
    dense = layer.post_feedforward_layernorm_1(layer.mlp(layer.pre_feedforward_layernorm(h)))
    chosen, weights = layer.router(h)
    given = layer.pre_feedforward_layernorm_2(h)
    step = max(1, (SORTED_FROM - 1) // chosen.shape[-1])
    parts = [
        layer.experts(*(part[:, begin : begin + step] for part in (given, chosen, weights)))
        for begin in range(0, h.shape[1], step)
    ]
    sparse: mx.array = layer.post_feedforward_layernorm_2(mx.concatenate(parts, axis=1))
    return dense + sparse


def _gated(layer: Any, h: mx.array, told: mx.array | None) -> mx.array:
    """The residual stream with what the layer makes of its own input."""
    if told is None:
        return h
    gate = layer.per_layer_projection(nn.gelu_approx(layer.per_layer_input_gate(h)) * told)
    out: mx.array = h + layer.post_per_layer_input_norm(gate)
    return out


def _resident(cache: Any) -> Rows:
    """The rows of a cache that the last position sees."""
    if isinstance(cache, WindowCache):
        return cache.visible()
    return cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :]
