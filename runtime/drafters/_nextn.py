"""Next-token-prediction heads: the life of a session with one, and the layer that GLM and DeepSeek have in common.

One step predicts token t + 2 from token t + 1 and the target's hidden state of token t. In GLM and DeepSeek:
x = block(eh_proj([enorm(embed(token)), hnorm(hidden)])), logits = head(shared_head_norm(x)).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.errors import Refused
from draftpair.runtime.interfaces import ALL_ROWS, Pick, Target
from draftpair.runtime.libraries import reading
from draftpair.runtime.targets._mlx_lm import PREFILL_CHUNK
from draftpair.runtime.tokens import check_ids
from draftpair.runtime.weights import fill, quantize_like, read_weights

# The sizes of a decoder layer with latent attention, and of one with experts.
LATENT_SIZES = (
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
)
EXPERT_SIZES = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")

AGAIN = "make the drafter again: draftpair split-mtp --model RAW --output DRAFTER"


class NextnLayer(nn.Module):
    """Embedded tokens [1, L, H] and hidden states [1, L, H] -> residual stream [1, L, H].

    ``args`` are mlx-lm's arguments of ``block``, one of its decoder layers. The layer keeps copies of embedding
    and output head where ``own_embedding`` and ``own_head`` say so.
    """

    def __init__(self, args: Any, block: nn.Module, own_embedding: bool, own_head: bool) -> None:
        super().__init__()
        width, eps = args.hidden_size, args.rms_norm_eps
        if own_embedding:
            self.embed_tokens = nn.Embedding(args.vocab_size, width)
        self.enorm = nn.RMSNorm(width, eps=eps)
        self.hnorm = nn.RMSNorm(width, eps=eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.mtp_block = block
        self.shared_head_norm = nn.RMSNorm(width, eps=eps)
        if own_head:
            self.lm_head = nn.Linear(width, args.vocab_size, bias=False)

    def __call__(self, embedded: mx.array, hidden: mx.array, cache: KVCache) -> mx.array:
        halves = [self.enorm(embedded), self.hnorm(hidden)]
        x = self.eh_proj(mx.concatenate(halves, axis=-1))
        mask = create_attention_mask(x, cache, return_array=True)
        out: mx.array = self.mtp_block(x, mask, cache)
        return out


class NumberedNetwork(nn.Module):
    """The module tree whose parameter names are the tensor names of a folder with layers below their numbers.

    ``names`` are the folder's tensors: they tell whether the layer has its own embedding and output head.
    """

    def __init__(self, args: Any, block: nn.Module, names: Collection[str]) -> None:
        super().__init__()
        own_embedding, own_head = (f"layers.0.{part}.weight" in names for part in ("embed_tokens", "lm_head"))
        self.layers = [NextnLayer(args, block, own_embedding, own_head)]


def load_numbered(
    checkpoint: Checkpoint,
    arguments: Any,
    block: Any,
    sizes: Sequence[str],
    flags: Mapping[str, str],
    overrides: Mapping[str, Any],
) -> tuple[NumberedNetwork, Any]:
    """The network of such a folder, with one layer around mlx-lm's decoder layer ``block``, and its arguments.

    mlx-lm's ``arguments`` are made of the config, of which ``overrides`` replace keys, and so do ``flags``: whether
    the decoder layer has the tensor named. Refused when one of ``sizes`` is missing or below 1, when mlx-lm needs
    more keys than there are, and for several layers.
    """
    config = checkpoint.config
    require_sizes(config, sizes)
    depth = config.require_int("num_nextn_predict_layers", minimum=1)
    if depth > 1:
        raise Refused(
            f"{checkpoint.source}: the head has {depth} layers; the published ones have one, and draftpair runs those",
            hint="run the target without this drafter",
        )
    weights = read_weights(checkpoint)
    with reading(f"{checkpoint.source}: mlx-lm cannot use its config.json", AGAIN):
        found = {key: f"layers.0.mtp_block.{name}" in weights for key, name in flags.items()}
        # mlx-lm decides from a layer's index whether it has experts; as layer 0 this one has.
        args = replace(arguments.from_dict({**config.text, **overrides, **found}), first_k_dense_replace=0)
        network = NumberedNetwork(args, block(args, 0), weights)
    quantize_like(network, weights, checkpoint)
    fill(network, weights, checkpoint)
    return network, args


def require_sizes(config: ConfigView, sizes: Iterable[str]) -> None:
    """Refused, naming the key, when one of the sizes is missing or below 1.

    mlx-lm's arguments have the sizes of some release as defaults, so they are looked for in the config itself.
    """
    for key in sizes:
        config.require_int(key, minimum=1)


class HeadDrafter:
    """The sequence half of ``draftpair.runtime.interfaces.Drafter``; a head adds ``forward``, ``logits`` and the rest.

    Entry i of the caches pairs the embedding of token i + 1 with the target's hidden state of token i. The output
    of the last entry is the ``seed``: its logits give the first proposal, for which no forward is needed.
    """

    prompt_rows = ALL_ROWS
    widens = False

    vocab_size: int
    hidden_size: int
    depth = 1
    target: Target | None = None

    @property
    def borrows(self) -> bool:
        """Whether the embedding or the output head is the target's."""
        return True

    def bind(self, target: Target) -> None:
        fits = self.vocab_size == target.vocab_size or (
            not self.borrows and self.vocab_size < target.vocab_size
        )
        if self.hidden_size != target.hidden_size or not fits:
            raise Refused(
                f"the head was made for hidden states of {self.hidden_size} and a vocabulary of {self.vocab_size}; "
                f"the target has {target.hidden_size} and {target.vocab_size}",
                hint="take the target whose checkpoint the head was cut out of: draftpair validate TARGET DRAFTER",
            )
        self.target = target
        self.reset()

    @property
    def lender(self) -> Target:
        """The target that it is bound to."""
        if self.target is None:
            raise RuntimeError("a head that borrows from its target was used before bind()")
        return self.target

    def forward(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        """Add an entry for each of the tokens [1, L] and the states before them [1, L, H]: outputs [1, L, H]."""
        raise NotImplementedError

    def carried(self, x: mx.array) -> mx.array:
        """What stands for the target's hidden state after an output [1, 1, H] of the head."""
        return x

    def logits(self, x: mx.array) -> mx.array:
        """An output of the head [1, 1, H] -> logits [1, V]."""
        raise NotImplementedError

    def reset(self) -> None:
        self.caches = [KVCache() for _ in range(self.depth)]
        self.seed: mx.array | None = None
        self.drafts: list[int] = []
        self.appended = 0

    def prefill(self, prompt: Sequence[int], hidden: mx.array, bonus: int) -> None:
        tokens = [*prompt[1:], bonus]
        for begin in range(0, len(tokens), PREFILL_CHUNK):
            self._append(tokens[begin : begin + PREFILL_CHUNK], hidden[:, begin : begin + PREFILL_CHUNK])
            mx.eval(self.seed, [cache.state for cache in self.caches])

    def draft(self, count: int, pick: Pick) -> list[int]:
        if self.seed is None:
            raise RuntimeError("draft() before prefill()")
        carry = self.seed
        tokens: list[mx.array] = []
        for step in range(count):
            if step:
                # Drawn among the target's tokens, of which a head's own embedding may have fewer.
                known = mx.minimum(tokens[-1], self.vocab_size - 1)
                carry = self.forward(known[None], self.carried(carry))
            tokens.append(pick(self.logits(carry)))
        self.appended = max(0, count - 1)
        ids: Any = mx.concatenate(tokens).tolist() if tokens else []
        self.drafts = ids
        return self.drafts

    def accept(self, accepted: int, bonus: int, hidden: mx.array) -> None:
        keep = min(accepted, self.appended)
        self._trim(self.appended - keep)
        tokens = [*self.drafts[keep:accepted], bonus]
        self._append(tokens, hidden[:, keep : accepted + 1])
        mx.async_eval(self.seed)

    def _append(self, tokens: Sequence[int], hidden: mx.array) -> None:
        """Add one entry a token, each with the target's hidden state before it; renew the seed."""
        check_ids(tokens, self.vocab_size, "drafter")
        self.seed = self.forward(mx.array([tokens]), hidden)[:, -1:]

    def _trim(self, count: int) -> None:
        for cache in self.caches:
            trimmed = cache.trim(count)
            if trimmed != count:
                raise RuntimeError(
                    f"asked the drafter's KV cache to drop {count} entries, it dropped {trimmed}"
                )


class NextnDrafter(HeadDrafter):
    """See ``draftpair.runtime.interfaces.ModelDrafter``; a family adds how its network is built.

    ``network`` has one ``NextnLayer``, ``layer``; ``owner`` is what has the output head in place of the layer. What
    neither has is borrowed from the target.
    """

    # What a draft step hands to the next in place of a hidden state of the target: what shared_head_norm makes of
    # the residual stream, as vLLM, SGLang and transformers do, or (False) the stream itself. Only acceptance on
    # published weights can tell which is right. At the default width of two no step follows another.
    carry_after_norm: ClassVar[bool] = True

    def __init__(
        self, network: nn.Module, layer: NextnLayer, args: Any, owner: nn.Module | None = None
    ) -> None:
        self.network, self.layer, self.owner = network, layer, owner or layer
        self.vocab_size: int = args.vocab_size
        self.hidden_size: int = args.hidden_size
        self.reset()

    @property
    def borrows(self) -> bool:
        return not ("embed_tokens" in self.layer and "lm_head" in self.owner)

    def forward(self, tokens: mx.array, hidden: mx.array) -> mx.array:
        embed = self.layer.embed_tokens if "embed_tokens" in self.layer else self.lender.embed
        own = self.layer.enorm.weight.dtype
        return self.layer(embed(tokens).astype(own), hidden.astype(own), self.caches[0])

    def carried(self, x: mx.array) -> mx.array:
        return self.layer.shared_head_norm(x) if self.carry_after_norm else x

    def logits(self, x: mx.array) -> mx.array:
        head = self.owner.lm_head if "lm_head" in self.owner else self.lender.head
        logits: mx.array = head(self.layer.shared_head_norm(x))
        return logits[:, -1]
