"""What the round loop may ask of a target and of a drafter: the interfaces every family implements.

Shapes: P prompt tokens, K rows of a verify block (the bonus token and K - 1 drafts), V vocabulary entries,
H hidden size. The bonus token is the last token emitted; it is in no cache yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import mlx.core as mx
from mlx import nn

from draftpair.checkpoint import Checkpoint

ALL_ROWS = 2**31


class Target(Protocol):
    """The model whose output is served. One sequence at a time; ``reset`` starts a new one.

    An adapter's class has ``load(checkpoint, environ)`` as well, like a drafter's.
    """

    network: nn.Module
    vocab_size: int
    hidden_size: int
    by_rows: bool
    """Whether ``verify`` attends row by row, as decoding does: slower, and exact on more backends. May be set."""

    @property
    def offset(self) -> int:
        """Tokens resident in the caches."""

    @property
    def irreversible(self) -> str | None:
        """Why a verified block cannot be taken back, as the end of a sentence; None where it can."""

    @property
    def probe_lengths(self) -> tuple[int, ...]:
        """Prompt lengths at which the exactness probe has to look as well, such as one past a sliding window."""

    def reset(self) -> None:
        """Forget the sequence."""

    def prefill(self, tokens: Sequence[int], rows: int) -> tuple[mx.array, mx.array]:
        """Logits [1, V] after the last token, and the tapped hidden states [1, min(rows, P), H] of the last tokens.

        An adapter that taps nothing returns hidden states of width 0.
        """

    def decode(self, token: mx.array) -> mx.array:
        """Logits [1, V] after one more token; ``token`` has shape [1]."""

    def verify(self, tokens: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Logits [1, K, V] and tapped hidden states [1, K, H] after each of K more tokens, K at least 1.

        Row i holds the bytes that i + 1 calls of ``decode`` would have given last.
        """

    def rollback(self, rejected: int) -> None:
        """Forget the last ``rejected`` of the tokens that the last ``verify`` took in."""

    def embed(self, tokens: mx.array) -> mx.array:
        """Ids [1, L] -> what the first layer is given for them [1, L, H], a scale of the embedding included."""

    def head(self, normed: mx.array) -> mx.array:
        """Hidden states behind the final norm [1, L, H] -> logits [1, L, V]."""


class Pick(Protocol):
    """Draws tokens for one position after another, as the request asks."""

    def __call__(self, logits: mx.array) -> mx.array:
        """A token [1], not yet evaluated, from logits [1, v] for the next position; v may be less than V."""


class Drafter(Protocol):
    """What proposes. Whatever it proposes, the target decides.

    ``prompt_rows`` is how many of the prompt's last hidden states it wants: 0, 1 or ALL_ROWS. ``widens`` says
    whether a wider block than the drafter declares is tried against the declared one, and kept only while faster.
    """

    prompt_rows: int
    widens: bool

    def reset(self) -> None:
        """Forget the sequence."""

    def prefill(self, prompt: Sequence[int], hidden: mx.array, bonus: int) -> None:
        """Take in the prompt, the target's hidden states [1, R, H] of its last tokens, and the first bonus token."""

    def draft(self, count: int, pick: Pick) -> list[int]:
        """Propose up to ``count`` tokens to follow the bonus token, each drawn by ``pick``."""

    def accept(self, accepted: int, bonus: int, hidden: mx.array) -> None:
        """Learn that the first ``accepted`` drafts were right and that ``bonus`` follows them.

        ``hidden`` [1, K, H] is what the target's ``verify`` returned for the block; the target is rolled back already.
        """


class ModelDrafter(Drafter, Protocol):
    """A drafter that is a network, from a checkpoint of its own."""

    network: nn.Module
    vocab_size: int

    @classmethod
    def load(cls, checkpoint: Checkpoint, environ: Mapping[str, str]) -> ModelDrafter:
        """The drafter, its weights not yet evaluated. Refused when they do not fit the config."""

    def bind(self, target: Target) -> None:
        """Take what it borrows from the target, both loaded and cast. Refused when that does not fit."""
