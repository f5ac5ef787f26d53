"""What the targets have in common: a network of mlx-lm's, its caches, and a prefill that all paths share.

Plain decoding and speculation fill the caches by the same calls, so that they start from the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from draftpair.checkpoint import Checkpoint
from draftpair.runtime.libraries import reading
from draftpair.runtime.staging import loadable_folder

PREFILL_CHUNK = 2048


def chunks(count: int) -> Iterator[tuple[int, int]]:
    """The parts in which a prompt is taken in, as by mlx-lm's generation: 2048 tokens each, the last one alone."""
    return pairwise([*range(0, count - 1, PREFILL_CHUNK), count - 1, count])


def load_network(
    checkpoint: Checkpoint,
    overrides: Mapping[str, Any],
    classes: tuple[Any, Any] | None = None,
    nested: Mapping[str, Any] | None = None,
) -> Any:
    """The checkpoint as mlx-lm's model, its weights not yet evaluated; ``overrides`` replace keys of its config.

    ``classes`` are model and arguments to take in place of those mlx-lm has for the model type; ``nested`` are
    keys that mlx-lm is told as they are, such as a ``text_config``. Raises Refused when mlx-lm cannot load it.
    """
    chosen: dict[str, Any] = {} if classes is None else {"get_model_classes": lambda config: classes}
    failed = f"{checkpoint.source}: mlx-lm cannot load it as {checkpoint.config.model_type}"
    with (
        loadable_folder(checkpoint, overrides) as folder,
        reading(failed, f"draftpair validate {checkpoint.source}"),
    ):
        network, _ = load_model(folder, lazy=True, strict=True, model_config=dict(nested or {}), **chosen)
    return network


class MlxLmTarget:
    """See ``draftpair.runtime.interfaces.Target``; a family adds ``verify`` and what differs.

    ``text`` is the part of the network that has the layers, the embedding and the head.
    """

    irreversible: str | None = None
    probe_lengths: tuple[int, ...] = ()
    by_rows = False

    def __init__(self, network: Any, text: Any = None) -> None:
        self.network = network
        self.text = network if text is None else text
        self.vocab_size: int = self.text.args.vocab_size
        self.hidden_size: int = self.text.args.hidden_size
        self.reset()

    @property
    def offset(self) -> int:
        return int(self.caches[0].offset)

    def reset(self) -> None:
        self.caches: list[Any] = make_prompt_cache(self.network)

    def prefill(self, tokens: Sequence[int], rows: int) -> tuple[mx.array, mx.array]:
        ids = mx.array([tokens])
        taps = []
        for begin, end in chunks(len(tokens)):
            normed, tap = self.hidden(ids[:, begin:end])
            tap = tap[:, max(0, len(tokens) - rows - begin) :]
            taps.append(mx.contiguous(tap))  # a slice of its own, so that the chunk's rows can be freed
            mx.eval(normed, taps[-1], [cache.state for cache in self.caches])
        return self.head(normed)[:, -1], mx.concatenate(taps, axis=1)

    def decode(self, token: mx.array) -> mx.array:
        logits: mx.array = self.network(token[None], self.caches)
        return logits[:, -1]

    def rollback(self, rejected: int) -> None:
        for cache in self.caches:
            trimmed = cache.trim(rejected)
            if trimmed != rejected:
                raise RuntimeError(f"asked the KV cache to drop {rejected} tokens, it dropped {trimmed}")

    def hidden(self, ids: mx.array) -> tuple[mx.array, mx.array]:
        """Final norm's output and tapped hidden states, both [1, L, H], of ids [1, L], by mlx-lm's own forward."""
        normed: mx.array = self.text.model(ids, self.caches)
        return normed, normed

    def embed(self, tokens: mx.array) -> mx.array:
        rows: mx.array = self.text.model.embed_tokens(tokens)
        return rows

    def head(self, normed: mx.array) -> mx.array:
        tied = getattr(self.text.args, "tie_word_embeddings", False)
        logits: mx.array = (
            self.text.model.embed_tokens.as_linear(normed) if tied else self.text.lm_head(normed)
        )
        return logits
