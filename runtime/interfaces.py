"""What the round loop may ask of a target and of a drafter: the two interfaces every family implements.

Shapes: P prompt tokens, K rows of a verify block (the bonus token and K - 1 drafts), V vocabulary entries,
H hidden size. The bonus token is the last token emitted; it is in no cache yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import mlx.core as mx
from mlx import nn

from draftpair.checkpoint import Checkpoint


class Target(Protocol):
    """The model whose output is served. One sequence at a time; ``reset`` starts a new one."""

    network: nn.Module
    vocab_size: int

    @classmethod
    def load(cls, checkpoint: Checkpoint, environ: Mapping[str, str]) -> Target:
        """The target, its weights not yet evaluated. Refused when they do not fit the config."""

    @property
    def offset(self) -> int:
        """Tokens resident in the caches."""

    def reset(self) -> None:
        """Forget the sequence."""

    def prefill(self, tokens: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Logits [1, V] after the last token, and the tapped hidden state [1, P, H] of every token."""

    def decode(self, token: mx.array) -> mx.array:
        """Logits [1, V] after one more token; ``token`` has shape [1]."""

    def verify(self, tokens: Sequence[int]) -> tuple[mx.array, mx.array]:
        """Logits [1, K, V] and tapped hidden states [1, K, H] after each of K more tokens.

        Row i holds the bytes that i + 1 calls of ``decode`` would have given last.
        """

    def rollback(self, rejected: int) -> None:
        """Forget the last ``rejected`` tokens."""


class Drafter(Protocol):
    """The model that proposes. Whatever it proposes, the target decides."""

    network: nn.Module
    vocab_size: int

    @classmethod
    def load(cls, checkpoint: Checkpoint, environ: Mapping[str, str]) -> Drafter:
        """The drafter, its weights not yet evaluated. Refused when they do not fit the config."""

    def reset(self) -> None:
        """Forget the sequence."""

    def prefill(self, prompt: Sequence[int], hidden: mx.array, bonus: int) -> None:
        """Take in the prompt, the target's hidden states [1, P, H] of it, and the first bonus token."""

    def draft(self, count: int) -> list[int]:
        """Propose ``count`` tokens to follow the bonus token, greedily."""

    def accept(self, accepted: int, bonus: int, hidden: mx.array) -> None:
        """Learn that the first ``accepted`` drafts were right and that ``bonus`` follows them.

        ``hidden`` [1, K, H] is what the target's ``verify`` returned for the block.
        """
