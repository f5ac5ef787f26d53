"""An ordinary model that drafts for a larger one with the same tokenizer (``full_model``).

It reads the same text as the target and borrows nothing. Its caches hold the prompt and what was emitted, but for the
tokens it has not been shown yet: the bonus token, and before it the last draft where every draft was accepted,
since a draft that nothing followed was never fed back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

from draftpair.checkpoint import Checkpoint
from draftpair.errors import Refused
from draftpair.families.drafters import find_drafter
from draftpair.families.models import is_model
from draftpair.runtime.interfaces import Pick
from draftpair.runtime.interfaces import Target as AnyTarget
from draftpair.runtime.targets._ordinary import Target
from draftpair.runtime.tokens import check_ids
from draftpair.validate.tokenizer_files import read_tokenizer


class Drafter:
    """See ``draftpair.runtime.interfaces.ModelDrafter``.

    ``model`` is the network with its caches. ``used`` is how many entries of its vocabulary stand for a token; rows
    beyond are padding and may be more than the target has.
    """

    prompt_rows = 0
    widens = False

    def __init__(self, model: Target, used: int | None = None) -> None:
        self.model = model
        self.network = model.network
        self.vocab_size = model.vocab_size
        self.used = min(used or model.vocab_size, model.vocab_size)
        self.common = self.vocab_size
        self.reset()

    @classmethod
    def load(cls, checkpoint: Checkpoint, environ: Mapping[str, str]) -> Drafter:
        _require_model(checkpoint)
        checkpoint.config.require_int("vocab_size", minimum=1)
        model = Target.load(checkpoint, environ)
        if model.irreversible is not None:
            raise Refused(
                f"{checkpoint.source} cannot draft: {model.irreversible}",
                hint="take a drafter with full or sliding-window attention in every layer",
            )
        tokenizer = read_tokenizer(checkpoint)
        return cls(model, None if tokenizer is None else tokenizer.length)

    def bind(self, target: AnyTarget) -> None:
        if self.used > target.vocab_size:
            raise Refused(
                f"the drafter's vocabulary has {self.used} entries, the target's {target.vocab_size}: "
                "it can propose ids that the target has no row for",
                hint="take a drafter whose vocabulary is not larger than the target's",
            )
        self.common = min(self.vocab_size, target.vocab_size)

    def reset(self) -> None:
        self.model.reset()
        self.pending: list[int] = []
        self.drafts: list[int] = []

    def prefill(self, prompt: Sequence[int], hidden: mx.array, bonus: int) -> None:
        check_ids(prompt, self.vocab_size, "drafter")
        self.model.prefill(prompt, 0)
        self.pending = [bonus]

    def draft(self, count: int, pick: Pick) -> list[int]:
        self.drafts = []
        if count < 1:
            return self.drafts
        tokens = [pick(self._logits(self._catch_up()))]
        while len(tokens) < count:
            # A draw is among the logits' entries even where it is none of a smaller vocabulary's (of NaN, say).
            fed_back = mx.minimum(tokens[-1], self.vocab_size - 1)
            tokens.append(pick(self._logits(self.model.extend(fed_back[None]))))
        ids: Any = mx.concatenate(tokens).tolist()
        self.drafts = ids
        return self.drafts

    def accept(self, accepted: int, bonus: int, hidden: mx.array) -> None:
        resident = max(0, len(self.drafts) - 1)
        kept = min(accepted, resident)
        self.model.rollback(resident - kept)
        self.pending += [*self.drafts[kept:accepted], bonus]

    def _catch_up(self) -> mx.array:
        """Logits [1, L, V] of the tokens that it has not been shown yet."""
        check_ids(self.pending, self.vocab_size, "drafter")
        logits = self.model.extend(mx.array([self.pending]))
        self.pending = []
        return logits

    def _logits(self, logits: mx.array) -> mx.array:
        """The last row of [1, L, v], over the entries that both vocabularies have."""
        return logits[:, -1, : self.common]


def _require_model(checkpoint: Checkpoint) -> None:
    """Refused for a folder that holds a drafter of another family, or no whole model."""
    match = find_drafter(checkpoint)
    if match is not None:
        raise Refused(
            f"{checkpoint.source} is no ordinary model but a drafter: {match.family.title} ({match.family.name})",
            hint=f"draftpair generate --draft-kind {match.family.kind}, with the target it was made for",
        )
    if not is_model(checkpoint):
        raise Refused(
            f"{checkpoint.source} is no whole model: decoder layers or an embedding are missing",
            hint="take the folder of an ordinary model with the target's tokenizer",
        )
