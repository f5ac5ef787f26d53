"""Draws tokens from logits so that a draw depends on the logits, the seed, the position and the text before it alone.

Whether a position is decided by a single-token step or inside a verify block, and in a block of which width,
makes no difference to its draw. So with a drafter the same tokens are drawn as without.

A drafter draws its proposals the same way, from its own logits with the noise of the position. Where its
distribution is the target's, so are its draws. Otherwise they agree with a probability of at least
(1 - d) / (1 + d) for a total variation d of the two distributions: the maximum of log-probabilities under the same
Gumbel noise (Daliri, Musco and Suresh, 2024, "Coupling without communication and drafter-invariant speculative
decoding"). MLX's own categorical draw inverts a cumulative sum, under which a small shift moves many draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, make_logits_processors

from draftpair.runtime.tokens import check_ids


class Sampler:
    """Temperature 0 takes the most likely token; otherwise mlx-lm's filters, in its order, and a draw.

    ``top_p`` and ``min_p`` 0 and ``top_k`` 0 mean no such filter; so does a ``top_k`` of the vocabulary's
    size or more. Of ``seed`` the lower 32 bits count. MLX's global random state is neither used nor changed.
    The penalties are mlx-lm's, over the last ``..._context_size`` tokens before a position, the prompt's included;
    ``logit_bias`` is added to the logits of the tokens it names. They come before temperature and filters. What the
    numbers may be, `draftpair.runtime.options.Options` says.
    """

    def __init__(
        self,
        vocab_size: int,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int = 0,
        *,
        repetition_penalty: float | None = None,
        repetition_context_size: int = 20,
        presence_penalty: float | None = None,
        presence_context_size: int = 20,
        frequency_penalty: float | None = None,
        frequency_context_size: int = 20,
        logit_bias: Mapping[int, float] | None = None,
    ) -> None:
        check_ids(list(logit_bias or ()), vocab_size, "target")
        self.vocab_size = vocab_size
        self.greedy = temperature == 0
        self.seed = seed
        self.temperature = temperature
        self._filters: list[Callable[[mx.array], mx.array]] = []
        if 0 < top_p < 1:
            self._filters.append(partial(apply_top_p, top_p=top_p))
        if min_p > 0:
            self._filters.append(partial(apply_min_p, min_p=min_p))
        if 0 < top_k < vocab_size:
            self._filters.append(partial(apply_top_k, top_k=top_k))
        contexts = {
            "repetition": (repetition_penalty, repetition_context_size),
            "presence": (presence_penalty, presence_context_size),
            "frequency": (frequency_penalty, frequency_context_size),
        }
        self._processors = make_logits_processors(
            dict(logit_bias or {}),
            repetition_penalty=repetition_penalty,
            repetition_context_size=repetition_context_size,
            presence_penalty=presence_penalty,
            presence_context_size=presence_context_size,
            frequency_penalty=frequency_penalty,
            frequency_context_size=frequency_context_size,
        )
        self.memory = max((size for penalty, size in contexts.values() if penalty), default=0)

    def __call__(self, logits: mx.array, position: int, before: mx.array | None = None) -> mx.array:
        """Tokens [n] for the consecutive positions that start at ``position``, from logits [n, v].

        ``before`` are the ids before the last of these positions, the newest last; without penalties it may be None.
        Rows of another width than the vocabulary, a drafter's, are cut or filled with what is never drawn.
        """
        logits = self._fit(logits)
        if self._processors:
            rows = range(logits.shape[0])
            logits = mx.concatenate(
                [self._process(logits[row : row + 1], before, rows[-1] - row) for row in rows]
            )
        if self.greedy:
            return mx.argmax(logits, axis=-1)
        logits = logits.astype(mx.float32)
        kept = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        for keep in self._filters:
            kept = keep(kept)
        return mx.argmax(kept / self.temperature + self._noise(position, *kept.shape), axis=-1)

    def _fit(self, logits: mx.array) -> mx.array:
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            return mx.pad(logits, [(0, 0), (0, missing)], constant_values=float("-inf"))
        return logits[:, : self.vocab_size]

    def _process(self, logits: mx.array, before: mx.array | None, newer: int) -> mx.array:
        """``newer``: how many of the ids in ``before`` are not yet known at this row."""
        history: Any = mx.array([], mx.int32) if before is None else before[: before.size - newer]
        for processor in self._processors:
            logits = processor(history, logits)
        return logits

    def _noise(self, position: int, rows: int, width: int) -> mx.array:
        """Gumbel noise, each row by its position alone; a key's two words are the halves of what it is made from."""
        keys = (mx.random.key((self.seed & 0xFFFFFFFF) << 32 | position + row) for row in range(rows))
        return mx.stack([mx.random.gumbel((width,), key=key) for key in keys])


class Picks:
    """One draw after another, each knowing those before it: plain decoding, and a drafter's proposals."""

    def __init__(self, sampler: Sampler, position: int, before: mx.array | None) -> None:
        """``position`` of the first draw, ``before`` as for `Sampler`."""
        self._sampler = sampler
        self._position = position
        self._before = before

    def __call__(self, logits: mx.array) -> mx.array:
        """The token [1], not yet evaluated, for the next position from logits [1, v]."""
        token = self._sampler(logits, self._position, self._before)
        self._position += 1
        if self._before is not None:
            self._before = mx.concatenate([self._before, token.astype(mx.int32)])[-self._sampler.memory :]
        return token
