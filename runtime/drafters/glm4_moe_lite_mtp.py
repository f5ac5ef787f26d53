"""The next-token-prediction layer of GLM-4.7-Flash (``glm4_moe_lite_mtp``), cut out into its own folder.

One step predicts token t + 2 from token t + 1 and the target's hidden state of token t:
x = block(eh_proj([enorm(embed(token)), hnorm(hidden)])), logits = lm_head(shared_head_norm(x)).
The layer borrows nothing from the target: embedding and output head are its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache
from mlx_lm.models.glm4_moe_lite import Glm4MoeLiteDecoderLayer
from mlx_lm.models.glm4_moe_lite import ModelArgs as BlockArgs

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.runtime.rope import rope_overrides
from draftpair.runtime.tokens import check_ids
from draftpair.runtime.weights import fill, quantize_like, read_weights

PREFILL_CHUNK = 2048
SPARSE_MARK = "model.mtp_block.mlp.switch_mlp.gate_proj.weight"

# mlx-lm's arguments have the published sizes as defaults; these must come from the config.
SIZES = (
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
SPARSE_SIZES = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")


@dataclass(frozen=True)
class DrafterArgs:
    """The numbers of a drafter's config.json; ``block`` are those of the decoder layer, for mlx-lm."""

    hidden_size: int
    vocab_size: int
    rms_norm_eps: float
    block: BlockArgs

    @classmethod
    def from_config(cls, config: ConfigView, sparse: bool) -> DrafterArgs:
        """``sparse``: the layer has experts. Refused when a size is missing or below 1."""
        for key in SIZES + (SPARSE_SIZES if sparse else ()):
            config.require_int(key, minimum=1)
        block = BlockArgs.from_dict(dict(config.text) | rope_overrides(config))
        # mlx-lm decides from a layer's index whether it has experts; as layer 0 this one has, or has none.
        block = replace(block, first_k_dense_replace=0) if sparse else replace(block, n_routed_experts=None)
        return cls(block.hidden_size, block.vocab_size, block.rms_norm_eps, block)


class MtpLayer(nn.Module):
    """Tokens [1, L] and hidden states [1, L, H] -> residual stream [1, L, H]."""

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__()
        width, eps = args.hidden_size, args.rms_norm_eps
        self.embed_tokens = nn.Embedding(args.vocab_size, width)
        self.enorm = nn.RMSNorm(width, eps=eps)
        self.hnorm = nn.RMSNorm(width, eps=eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.mtp_block = Glm4MoeLiteDecoderLayer(args.block, 0)
        self.shared_head_norm = nn.RMSNorm(width, eps=eps)

    def __call__(self, tokens: mx.array, hidden: mx.array, cache: KVCache) -> mx.array:
        halves = [self.enorm(self.embed_tokens(tokens)), self.hnorm(hidden)]
        x = self.eh_proj(mx.concatenate(halves, axis=-1))
        mask = create_attention_mask(x, cache, return_array=True)
        out: mx.array = self.mtp_block(x, mask, cache)
        return out


class Network(nn.Module):
    """The module tree whose parameter names are the tensor names of the drafter folder."""

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__()
        self.model = MtpLayer(args)
        self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)


class Drafter:
    """See ``draftpair.runtime.interfaces.Drafter``.

    Cache entry i pairs the embedding of token i + 1 with the target's hidden state of token i. The output of
    the last entry is the ``seed``: its logits give the first proposal, for which no forward is needed.
    """

    # What a draft step hands to the next in place of a hidden state of the target: the residual stream, as
    # mlxcel does, or (True) what shared_head_norm makes of it, as vLLM and transformers do. Only acceptance on
    # the published weights can tell which is right. At the default width of two no step follows another.
    CARRY_AFTER_NORM: ClassVar[bool] = False

    def __init__(self, args: DrafterArgs, network: Network) -> None:
        self.args = args
        self.network = network
        self.vocab_size = args.vocab_size
        self.reset()

    @classmethod
    def load(cls, checkpoint: Checkpoint, environ: Mapping[str, str]) -> Drafter:
        weights = read_weights(checkpoint)
        args = DrafterArgs.from_config(checkpoint.config, sparse=SPARSE_MARK in weights)
        network = Network(args)
        quantize_like(network, weights, checkpoint)
        fill(network, weights, checkpoint)
        return cls(args, network)

    def reset(self) -> None:
        self.cache = KVCache()
        self.seed: mx.array | None = None
        self.drafts: list[int] = []
        self.appended = 0

    def prefill(self, prompt: Sequence[int], hidden: mx.array, bonus: int) -> None:
        tokens = [*prompt[1:], bonus]
        for begin in range(0, len(tokens), PREFILL_CHUNK):
            self._append(tokens[begin : begin + PREFILL_CHUNK], hidden[:, begin : begin + PREFILL_CHUNK])
            mx.eval(self.seed, self.cache.state)

    def draft(self, count: int) -> list[int]:
        if self.seed is None:
            raise RuntimeError("draft() before prefill()")
        carry = self.seed
        tokens: list[mx.array] = []
        for step in range(count):
            if step:
                carry = self._forward(tokens[-1][None], self._carried(carry))
            tokens.append(mx.argmax(self._logits(carry), axis=-1))
        self.appended = max(0, count - 1)
        ids: Any = mx.concatenate(tokens).tolist() if tokens else []
        self.drafts = ids
        return self.drafts

    def accept(self, accepted: int, bonus: int, hidden: mx.array) -> None:
        keep = min(accepted, self.appended)
        _trim(self.cache, self.appended - keep)
        tokens = [*self.drafts[keep:accepted], bonus]
        self._append(tokens, hidden[:, keep : accepted + 1])
        mx.async_eval(self.seed)

    def _append(self, tokens: Sequence[int], hidden: mx.array) -> None:
        """Add one cache entry a token, each with the target's hidden state before it; renew the seed."""
        check_ids(tokens, self.vocab_size, "drafter")
        self.seed = self._forward(mx.array([tokens]), hidden)[:, -1:]

    def _forward(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        model = self.network.model
        return model(tokens, hidden.astype(model.enorm.weight.dtype), self.cache)

    def _carried(self, x: mx.array) -> mx.array:
        return self.network.model.shared_head_norm(x) if self.CARRY_AFTER_NORM else x

    def _logits(self, x: mx.array) -> mx.array:
        """Residual stream [1, 1, H] -> logits [1, V]."""
        return self.network.lm_head(self.network.model.shared_head_norm(x))[:, -1]


def _trim(cache: Any, count: int) -> None:
    trimmed = cache.trim(count)
    if trimmed != count:
        raise RuntimeError(f"asked the drafter's KV cache to drop {count} entries, it dropped {trimmed}")
