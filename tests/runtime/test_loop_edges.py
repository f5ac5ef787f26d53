"""What the round loop tells controller and drafter, and where a drafter's vocabulary begins to be too large."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Refused
from draftpair.runtime.drafters.full_model import Drafter
from draftpair.runtime.load import load_target
from draftpair.runtime.loop import Request, generate
from draftpair.runtime.sampling import Sampler
from draftpair.runtime.stats import Stats
from draftpair.runtime.width import Fixed
from fixtures.glm4_moe_lite import write_target
from fixtures.pairs import run


class Oracle:
    """Knows the text, and gets the second proposal of a round wrong."""

    prompt_rows, widens = 0, False

    def __init__(self, ids: list[int], vocab: int) -> None:
        self.ids, self.vocab, self.at = ids, vocab, 0
        self.calls: list[str] = []

    def reset(self) -> None:
        self.calls = ["reset"]

    def prefill(self, prompt: Sequence[int], hidden: mx.array, bonus: int) -> None:
        self.calls.append("prefill")
        self.at = 1

    def draft(self, count: int, pick: Callable[[mx.array], mx.array]) -> list[int]:
        self.calls.append("draft")
        right = self.ids[self.at : self.at + count]
        return [(token + (place == 1)) % self.vocab for place, token in enumerate(right)]

    def accept(self, accepted: int, bonus: int, hidden: mx.array) -> None:
        self.calls.append("accept")
        self.at += accepted + 1


class Listening(Fixed):
    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.told: list[tuple[int, int]] = []

    def record(self, rows: int, emitted: int, seconds: float) -> None:
        assert seconds > 0
        self.told.append((rows, emitted))


def test_the_controller_is_told_the_rows_and_the_tokens_of_each_round(tmp_path: Path) -> None:
    target: Any = load_target(open_checkpoint(write_target(tmp_path / "target", layers=2)), environ={})
    prompt, tokens = [1, 2, 3], 12
    plain = run(target, None, prompt, tokens=tokens).ids
    controller = Listening(4)
    request = Request(prompt, Sampler(target.vocab_size), tokens)
    groups = list(generate(target, Oracle(plain, target.vocab_size), request, controller, Stats()))
    assert [token for group in groups for token in group] == plain
    # One token is the prefill's and two are a round's, so that the last one is decoded plainly; blocks narrow before.
    assert controller.told == [(4, 2), (4, 2), (4, 2), (4, 2), (3, 2)]


def test_a_drafter_forgets_the_last_request_and_is_not_asked_to_prepare_a_round_that_never_comes(
    tmp_path: Path,
) -> None:
    target: Any = load_target(open_checkpoint(write_target(tmp_path / "target", layers=2)), environ={})
    plain = run(target, None, [1, 2, 3], tokens=7).ids
    drafter = Oracle(plain, target.vocab_size)
    for _ in range(2):
        assert run(target, drafter, [1, 2, 3], 4, tokens=7).ids == plain
        assert drafter.calls == ["reset", "prefill", "draft", "accept", "draft", "accept", "draft"]


@pytest.mark.parametrize("vocab", [15, 16])
def test_a_drafter_with_one_token_more_than_the_target_is_refused(vocab: int) -> None:
    model: Any = SimpleNamespace(network=None, vocab_size=16, reset=lambda: None)
    target: Any = SimpleNamespace(vocab_size=vocab)
    if vocab == 16:
        Drafter(model).bind(target)
    else:
        with pytest.raises(Refused, match="vocabulary has 16 entries, the target's 15"):
            Drafter(model).bind(target)
