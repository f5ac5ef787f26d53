"""Qwen3.5, 3.6 and 3.8 (``qwen3_5``) as a target: mlx-lm's model, and what speculation needs beside it.

Most layers are gated delta nets, whose state no cache can trim; a verified block is taken back by replaying the
delta rule over the rows that stay, not by a second forward. ``decode`` is mlx-lm's own call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.qwen3_5 import Model, ModelArgs

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.errors import Refused
from draftpair.runtime.rope import rope_overrides
from draftpair.runtime.targets._gated_delta import Taken, mix_rows
from draftpair.runtime.targets._layered import feed_forward
from draftpair.runtime.targets._mlx_lm import MlxLmTarget, load_network
from draftpair.runtime.targets._rows import attended, rotated, up_to_each

# mlx-lm's arguments have the sizes of some release as defaults; these must come from the config.
SIZES = ("hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads")
TRUNK_SIZES = (
    "num_hidden_layers",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
DENSE_SIZES = ("intermediate_size",)
SPARSE_SIZES = (
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
)


class Trunk:
    """Mixed into a model of mlx-lm's: leaves the head of a checkpoint where it is.

    mlx-lm does so too, but before 0.32 took a head for a sign that the norms are zero-centred, which in a
    converter's checkpoint they are not.
    """

    def sanitize(self, weights: dict[str, mx.array]) -> Any:
        trunk = {name: tensor for name, tensor in weights.items() if "mtp." not in name}
        return super().sanitize(trunk)  # type: ignore[misc]


class Network(Trunk, Model):
    """mlx-lm's model, whatever lies beside it."""


@dataclass(frozen=True)
class Block:
    """The last verified block: how many rows, where they end, and what its linear layers took in."""

    rows: int
    end: int
    taken: list[Taken]


class Target(MlxLmTarget):
    """See ``draftpair.runtime.interfaces.Target``; the hidden state tapped is what the final norm returned."""

    network_class: ClassVar[type] = Network
    sparse: ClassVar[bool] = False

    def __init__(self, network: Any) -> None:
        super().__init__(network, network.language_model)

    @classmethod
    def load(cls, checkpoint: Checkpoint, environ: Mapping[str, str]) -> Target:
        config = checkpoint.config
        check_sizes(config, cls.sparse, TRUNK_SIZES)
        overrides = {"full_attention_interval": full_attention_interval(config), **rope_parameters(config)}
        return cls(load_network(checkpoint, overrides, (cls.network_class, ModelArgs)))

    @property
    def offset(self) -> int:
        return int(next(c.offset for layer, c in self._layers() if not layer.is_linear))

    def reset(self) -> None:
        super().reset()
        self._block: Block | None = None

    def verify(self, tokens: Sequence[int]) -> tuple[mx.array, mx.array]:
        x = self.embed(mx.array([tokens]))
        taken: list[Taken] = []
        for layer, cache in self._layers():
            normed = layer.input_layernorm(x)
            if layer.is_linear:
                mixed, rows = mix_rows(layer.linear_attn, normed, cache, self.by_rows)
                taken.append(rows)
            elif self.by_rows:
                mixed = attend_rows(layer.self_attn, normed, cache)
            else:
                mixed = layer.self_attn(normed, create_attention_mask(normed, cache), cache)
            h = x + mixed
            x = h + feed_forward(layer.mlp, layer.post_attention_layernorm(h), self.text.args)
        self._block = Block(len(tokens), self.offset, taken)
        normed = self.text.model.norm(x)
        return self.head(normed), normed

    def rollback(self, rejected: int) -> None:
        block, self._block = self._block, None
        if rejected == 0:
            return
        if block is None or block.end != self.offset or rejected > block.rows:
            last = "no block" if block is None else f"a block of {block.rows} rows that ends at {block.end}"
            raise RuntimeError(f"asked to drop {rejected} of {self.offset} tokens; verified last: {last}")
        for layer, cache in self._layers():
            if not layer.is_linear:
                cache.trim(rejected)
        for rows in block.taken:
            rows.keep(block.rows - rejected)

    def _layers(self) -> Any:
        """Every layer with its cache."""
        return zip(self.text.layers, self.caches, strict=True)


def attend_rows(attention: Any, x: mx.array, cache: Any) -> mx.array:
    """Gated attention of K new rows [1, K, H], each as mlx-lm attends with a single query.

    Projections run on the block, rotation and attention row by row: row i sees the keys [0, offset + i].
    """
    count = x.shape[1]
    heads, groups = attention.num_attention_heads, attention.num_key_value_heads
    queries, gate = mx.split(attention.q_proj(x).reshape(1, count, heads, -1), 2, axis=-1)
    queries = attention.q_norm(queries).transpose(0, 2, 1, 3)
    keys = attention.k_norm(attention.k_proj(x).reshape(1, count, groups, -1)).transpose(0, 2, 1, 3)
    values = attention.v_proj(x).reshape(1, count, groups, -1).transpose(0, 2, 1, 3)
    turned = rotated(attention.rope, queries, cache.offset)
    keys = mx.concatenate(rotated(attention.rope, keys, cache.offset), axis=2)
    seen = up_to_each(cache.update_and_fetch(keys, values), count)
    out = attended(turned, seen, attention.scale)
    projected: mx.array = attention.o_proj(out * mx.sigmoid(gate.reshape(1, count, -1)))
    return projected


def check_sizes(config: ConfigView, sparse: bool, more: Sequence[str] = ()) -> None:
    """Refused when a size that mlx-lm would take a default for is missing or no size, or when two contradict."""
    for key in (*SIZES, *more, *(SPARSE_SIZES if sparse else DENSE_SIZES)):
        config.require_int(key, minimum=1)
    pairs = [("num_attention_heads", "num_key_value_heads")]
    if more:
        pairs.append(("linear_num_value_heads", "linear_num_key_heads"))
    for whole, part in pairs:
        if config.get(whole) % config.get(part):
            raise Refused(
                f"config.json: {whole} is {config.get(whole)}, expected a multiple of {part}, {config.get(part)}"
            )
    if sparse and config.get("num_experts_per_tok") > config.get("num_experts"):
        chosen, experts = config.get("num_experts_per_tok"), config.get("num_experts")
        raise Refused(
            f"config.json: num_experts_per_tok is {chosen}, expected at most num_experts, {experts}"
        )


def full_attention_interval(config: ConfigView) -> int:
    """Every how many layers one has full attention; mlx-lm reads it, transformers 5 saves ``layer_types`` only.

    Refused when the config says neither, or names an order that no interval gives, or no such layer.
    """
    layers, kinds = config.require_int("num_hidden_layers", minimum=1), config.get("layer_types")
    if isinstance(kinds, list):
        full = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
        interval = full[0] + 1 if full else layers + 1
    else:
        interval = config.require_int("full_attention_interval", minimum=1)
        full = list(range(interval - 1, layers, interval))
        kinds = [None] * layers
    if not full or len(kinds) != layers or full != list(range(interval - 1, layers, interval)):
        raise Refused(
            f"config.json: of {layers} layers those with full attention are {full}; expected at least one, at "
            "equal distances, and layer_types with an entry a layer",
            hint="mlx-lm knows no other order: compare config.json with the original repository's",
        )
    return interval


def rope_parameters(config: ConfigView) -> dict[str, Any]:
    """``rope_parameters`` as mlx-lm reads them, which takes a base of 100,000 where a config has them flat.

    Refused when the config names no base.
    """
    flat = rope_overrides(config)
    partial = 0.25 if config.rope.partial is None else config.rope.partial  # the default of every library
    kind = flat["rope_scaling"] or {"rope_type": "default"}
    return {"rope_parameters": {**kind, "rope_theta": flat["rope_theta"], "partial_rotary_factor": partial}}
