"""The assistants of Gemma 4 (``gemma4_assistant``): layers with queries only, over the target's keys and values.

One step predicts the token after t from the target's embedding of t and a carry as wide as the target:
x = pre_projection([embed(t), carry]), through the layers to y = norm(x), logits = head(y), next carry =
post_projection(y). The first carry is the target's hidden state behind its final norm. Every step of a round reads the
same keys and values, from the same position: that of the last token the target holds. Nothing is kept between rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.gemma4_text import DecoderLayer
from mlx_lm.models.gemma4_text import ModelArgs as TextArgs

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.errors import Refused
from draftpair.families.views.gemma4 import ORDERING, check_values
from draftpair.runtime.interfaces import Pick, Target
from draftpair.runtime.libraries import reading
from draftpair.runtime.targets.gemma4 import SLIDING, text_config
from draftpair.runtime.tokens import check_ids
from draftpair.runtime.weights import Weights, fill, quantize_like, read_weights
from draftpair.runtime.window import Rows

HEAD = "lm_head."
AGAIN = "compare config.json with the original repository's, or download the assistant again"


@dataclass(frozen=True)
class DrafterArgs:
    """The numbers of a drafter's config.json; ``text`` are those of its layers, for mlx-lm.

    ``clusters`` and ``best`` are 0 where the head scores every token: else the tokens of the ``best`` clusters only.
    """

    backbone: int
    tied: bool
    clusters: int
    best: int
    text: TextArgs

    @classmethod
    def from_config(cls, config: ConfigView) -> DrafterArgs:
        """Refused when a size is missing, below 1, or does not fit the others."""
        text = text_config(config)
        # No layer has keys and values of its own, whichever way the config says so.
        text |= {"num_kv_shared_layers": text["num_hidden_layers"], "hidden_size_per_layer_input": 0}
        clusters = best = 0
        if config.get("use_ordered_embeddings"):
            clusters, best = (config.get(key, default) for key, default in CLUSTERS.items())
            _check_clusters(text["vocab_size"], clusters, best)
        backbone = config.require_int("backbone_hidden_size", minimum=1)
        return cls(backbone, text["tie_word_embeddings"], clusters, best, TextArgs.from_dict(text))


CLUSTERS = {"num_centroids": 2048, "centroid_intermediate_top_k": 32}


def _check_clusters(vocab: int, clusters: Any, best: Any) -> None:
    """Refused unless clusters of one size make up the vocabulary, and no more of them are taken than there are."""
    whole = type(clusters) is int and type(best) is int
    if not whole or clusters < 1 or vocab % clusters or not 1 <= best <= clusters:
        raise Refused(
            f"config.json: num_centroids is {clusters!r} and centroid_intermediate_top_k {best!r}; expected a divisor "
            f"of vocab_size {vocab}, and no more than that"
        )


class Layers(nn.Module):
    """The layers without what leads into them: x [1, 1, h] -> the final norm's output [1, 1, h]."""

    def __init__(self, args: TextArgs) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [DecoderLayer(args, number) for number in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, x: mx.array, shared: Mapping[str, Rows], position: mx.array) -> mx.array:
        for layer in self.layers:
            x, _, _ = layer(x, shared_kv=shared[layer.layer_type], offset=position)
        normed: mx.array = self.norm(x)
        return normed


class Clusters(nn.Module):
    """Picks the clusters whose tokens are worth scoring. Cluster c has the c-th part of ``token_ordering``."""

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__()
        self.centroids = nn.Linear(args.text.hidden_size, args.clusters, bias=False)
        self.token_ordering = mx.zeros((args.text.vocab_size,), dtype=mx.int32)
        self._best = args.best

    def __call__(self, y: mx.array) -> mx.array:
        """y [1, 1, h] -> ids [N] of the tokens of the best clusters, in no order."""
        scores = self.centroids(y)[0, 0]
        best = mx.argpartition(-scores, kth=self._best - 1)[: self._best]
        return self.token_ordering.reshape(scores.shape[0], -1)[best].reshape(-1)


class Network(nn.Module):
    """The module tree whose parameter names are the tensor names of the drafter folder."""

    def __init__(self, args: DrafterArgs) -> None:
        super().__init__()
        width, vocab = args.text.hidden_size, args.text.vocab_size
        self.model = Layers(args.text)
        self.pre_projection = nn.Linear(2 * args.backbone, width, bias=False)
        self.post_projection = nn.Linear(width, args.backbone, bias=False)
        self._tied, self._vocab = args.tied, vocab
        if not args.tied:
            self.lm_head = nn.Embedding(vocab, width)  # rows by token, of which an ordered head reads some
        if args.clusters:
            self.masked_embedding = Clusters(args)

    def __call__(
        self, embedded: mx.array, carry: mx.array, shared: Mapping[str, Rows], position: mx.array
    ) -> tuple[mx.array, mx.array]:
        """One step from a token's embedding and a carry, each [1, 1, H]: logits [1, V] and the next carry."""
        x = self.pre_projection(mx.concatenate([embedded, carry], axis=-1))
        y = self.model(x, shared, position)
        return self.head(y), self.post_projection(y)

    def head(self, y: mx.array) -> mx.array:
        """[1, 1, h] -> [1, V]. Tokens of other clusters share one value, 1 below the lowest that was scored."""
        table = self.model.embed_tokens if self._tied else self.lm_head
        if "masked_embedding" not in self:
            logits: mx.array = table.as_linear(y)[:, 0]
            return logits
        ids = self.masked_embedding(y)
        scored = (y @ table(ids).T)[0]
        others = mx.broadcast_to(scored.min(keepdims=True) - 1, (1, self._vocab))
        return mx.put_along_axis(others, ids[None], scored, axis=-1)


class Drafter:
    """See ``draftpair.runtime.interfaces.Drafter``."""

    prompt_rows = 1
    widens = True

    def __init__(self, args: DrafterArgs, network: Network, source: str = "the assistant") -> None:
        self.args = args
        self.network = network
        self.vocab_size: int = args.text.vocab_size
        self._source = source
        self.reset()

    @classmethod
    def load(cls, checkpoint: Checkpoint, environ: Mapping[str, str]) -> Drafter:
        args = DrafterArgs.from_config(checkpoint.config)
        weights = _weights(checkpoint, args)
        with reading(f"{checkpoint.source}: config.json describes no assistant", AGAIN):
            network = Network(args)
        quantize_like(network, weights, checkpoint)
        fill(network, weights, checkpoint)
        return cls(args, network, checkpoint.source)

    def bind(self, target: Target) -> None:
        shared: dict[str, Any] = getattr(target, "shared_attention", dict)()
        types = {layer.layer_type: layer.self_attn for layer in self.network.model.layers}
        found = {
            "vocabulary": (target.vocab_size, self.vocab_size),
            "width": (target.hidden_size, self.args.backbone),
            **{
                f"head width in {kind}": (shared[kind].head_dim if kind in shared else None, own.head_dim)
                for kind, own in types.items()
            },
        }
        wrong = [f"{what} is {has}, expected {wants}" for what, (has, wants) in found.items() if has != wants]
        wrong += [
            f"{shared[kind].n_kv_heads} key-value heads in {kind} cannot serve {own.n_heads} query heads"
            for kind, own in types.items()
            if kind in shared and own.n_heads % shared[kind].n_kv_heads
        ]
        if wrong:
            raise Refused(
                f"{self._source} reads keys and values of another target: {'; '.join(wrong)}",
                hint="an assistant runs with the Gemma 4 model that it was published beside",
            )
        self._target: Any = target

    def reset(self) -> None:
        self.bonus = 0
        self.carry: mx.array | None = None

    def prefill(self, prompt: Sequence[int], hidden: mx.array, bonus: int) -> None:
        self._start_from(bonus, hidden[:, -1:])

    def draft(self, count: int, pick: Pick) -> list[int]:
        if self.carry is None:
            raise RuntimeError("draft() before prefill()")
        shared, position = self._shared_kv(), mx.array(self.position)
        carry, token = self.carry, mx.array([self.bonus])
        tokens: list[mx.array] = []
        for _ in range(count):
            logits, carry = self.step(token, carry, shared, position)
            token = pick(logits)
            tokens.append(token)
        ids: Any = mx.concatenate(tokens).tolist() if tokens else []
        drafts: list[int] = ids
        return drafts

    def accept(self, accepted: int, bonus: int, hidden: mx.array) -> None:
        self._start_from(bonus, hidden[:, accepted : accepted + 1])

    def step(
        self, token: mx.array, carry: mx.array, shared: Mapping[str, Rows], position: mx.array
    ) -> tuple[mx.array, mx.array]:
        """Logits [1, V] for the token after ``token`` [1], and the carry of the step after this one, [1, 1, H]."""
        embedded = self._target.embed(token[None])
        return self.network(embedded.astype(self._dtype), carry.astype(self._dtype), shared, position)

    @property
    def position(self) -> int:
        """Where every query of a round stands: at the last token that the target holds."""
        resident: int = self._target.offset
        return max(0, resident - 1)

    @property
    def _dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = self.network.model.norm.weight.dtype
        return dtype

    def _start_from(self, bonus: int, carry: mx.array) -> None:
        check_ids([bonus], self.vocab_size, "target")
        self.bonus, self.carry = bonus, mx.contiguous(carry)

    def _shared_kv(self) -> dict[str, Rows]:
        """What the query sees of the target's keys and values: no key lies behind it, so that it needs no mask."""
        window = self.args.text.sliding_window
        seen: dict[str, Rows] = self._target.shared_kv()
        return {
            kind: _cut(rows, window if kind == SLIDING else rows[0].shape[2], self._dtype)
            for kind, rows in seen.items()
        }


def _cut(rows: Rows, count: int, dtype: mx.Dtype) -> Rows:
    """The last ``count`` rows."""
    keys, values = (part[:, :, max(0, part.shape[2] - count) :].astype(dtype) for part in rows)
    return keys, values


def _weights(checkpoint: Checkpoint, args: DrafterArgs) -> Weights:
    """The tensors, without an output matrix that a tied embedding stands for; the ordering's ids are checked."""
    weights = read_weights(checkpoint)
    if args.tied:
        weights = {name: values for name, values in weights.items() if not name.startswith(HEAD)}
    if args.clusters and ORDERING in weights:
        info = checkpoint.tensors[ORDERING]
        if info.dtype not in ("I64", "I32"):
            raise Refused(f"{checkpoint.source}: {ORDERING} is {info.dtype}, expected I64 or I32")
        for finding in check_values(checkpoint, checkpoint.config):
            raise Refused(f"{checkpoint.source}: {finding.message}", finding.hint)
        weights[ORDERING] = weights[ORDERING].astype(mx.int32)
    return weights
