"""A session takes prompt after prompt: where its texts end, what draws are made from, and what its reports tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftpair import api
from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Usage
from draftpair.runtime import session as sessions
from draftpair.runtime.drafters._prompt_lookup import Drafter as LookupDrafter
from draftpair.runtime.exactness import Exactness
from draftpair.runtime.options import Interrupted, Options
from draftpair.runtime.session import Session, lookup_width, open_lookup, open_session, run
from draftpair.runtime.width import Fixed
from draftpair.validate import validated_pair
from fixtures.glm4_moe_lite_copy import CopyPair, write_copy_pair

EOS = 31
WIDTH = 4


@pytest.fixture(scope="module")
def copying(tmp_path_factory: pytest.TempPathFactory) -> CopyPair:
    folder = tmp_path_factory.mktemp("copying")
    return write_copy_pair(folder / "raw", folder / "target")


@pytest.fixture(scope="module")
def _loaded(copying: CopyPair, tmp_path_factory: pytest.TempPathFactory) -> Session:
    drafter = tmp_path_factory.mktemp("head") / "drafter"
    api.split_mtp(copying.raw, drafter)
    target = open_checkpoint(copying.target or "")
    return open_session(target, validated_pair(target, open_checkpoint(drafter), WIDTH), environ={})


@pytest.fixture
def session(_loaded: Session) -> Session:
    return replace(_loaded)


@pytest.fixture
def plain(session: Session) -> Session:
    return replace(session, drafter=None, pair=None)


def body(
    session: Session, on_text: Callable[[str], None] = lambda piece: None, **options: Any
) -> dict[str, Any]:
    return run(session, [1], Options(**({"max_tokens": 40} | options)), on_text, {})


def words(tokens: list[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)


@pytest.mark.parametrize("temp", [0.0, 0.9])
@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({"repetition_penalty": 100.0, "repetition_context_size": 40}, True),
        ({"repetition_penalty": 1.0}, False),
        ({"presence_penalty": 30.0, "presence_context_size": 64}, True),
        ({"frequency_penalty": 30.0, "frequency_context_size": 64}, True),
        ({"logit_bias": {3: 11.5, 30: -40.0}}, True),
    ],
    ids=["repetition", "repetition off", "presence", "frequency", "bias"],
)
def test_penalties_and_biases_count_at_every_position(
    session: Session, plain: Session, temp: float, options: dict[str, Any], changes: bool
) -> None:
    sampling = {"temp": temp, "seed": 5, "ignore_eos": True}
    expected = body(plain, **sampling, **options)["tokens"]
    assert body(session, **sampling, **options)["tokens"] == expected
    assert (expected != body(plain, **sampling)["tokens"]) == changes


@pytest.mark.parametrize("after", range(1, 10))
@pytest.mark.parametrize("length", [1, 2, 5])
def test_a_stop_string_anywhere_in_a_block(
    copying: CopyPair, session: Session, plain: Session, after: int, length: int
) -> None:
    tokens = copying.continuation(1, 40)
    stop = (words(tokens[after : after + length]) + " ", "none of this")
    pieces: list[str] = []
    speculative = body(session, pieces.append, stop=stop)
    # The blank that completes the stop string comes with the word after it.
    assert speculative["tokens"] == tokens[: after + length + 1] == body(plain, stop=stop)["tokens"]
    assert "".join(pieces) == speculative["text"] == words(tokens[:after]) + " "
    assert speculative["finish_reason"] == "stop"
    # The last round verified more than was kept.
    rounds = speculative["stats"]["rounds"]
    assert (rounds - 1) * WIDTH + 1 < after + length + 1 <= rounds * WIDTH + 1


def test_tokens_a_second_count_the_tokens_that_were_kept(session: Session, copying: CopyPair) -> None:
    tokens = copying.continuation(1, 40)
    stats = body(session, stop=(words(tokens[1:2]),))["stats"]
    assert stats["rounds"] == 1
    assert stats["tokens_per_second"] == pytest.approx(1 / stats["decode_seconds"])


def test_a_text_stops_at_the_end_of_text_before_any_stop_string(session: Session) -> None:
    report = body(session, logit_bias={EOS: 1000.0}, stop=("t1",))
    assert (report["tokens"], report["text"], report["finish_reason"]) == ([EOS], "", "stop")
    report = body(session, logit_bias={EOS: 1000.0}, stop=("<eos> <eos>",), ignore_eos=True)
    assert (report["tokens"], report["text"], report["finish_reason"]) == ([EOS, EOS], "", "stop")


def test_an_interruption_reports_what_was_generated(session: Session, copying: CopyPair) -> None:
    pieces: list[str] = []

    def tell(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as interrupted:
        body(session, tell)
    report = interrupted.value.report
    assert report["tokens"] == copying.continuation(1, 1 + 2 * WIDTH)
    assert report["finish_reason"] == "interrupted"
    assert report["text"] == "".join(pieces) == words(report["tokens"])
    assert report["stats"]["rounds"] == 2
    assert body(session)["tokens"] == copying.continuation(1, 40)


def test_an_interruption_before_the_first_token(
    session: Session, plain: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert session.gate({}).engage

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(session.target, "prefill", stop)
    for each in (session, plain):
        with pytest.raises(Interrupted) as interrupted:
            body(each)
        report = interrupted.value.report
        assert (report["tokens"], report["text"], report["finish_reason"]) == ([], "", "interrupted")
        assert report["stats"]["tokens_per_second"] in (0, None)


def test_another_error_is_no_interruption(session: Session) -> None:
    class Gone(Exception):
        pass

    def tell(piece: str) -> None:
        raise Gone

    with pytest.raises(Gone):
        body(session, tell)


def test_a_drafter_that_fails_is_told_once_and_given_up(
    session: Session, copying: CopyPair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(session.drafter, "accept", fail)
    report = body(session)
    assert report["tokens"] == copying.continuation(1, 40)
    assert report["stats"]["draft_error"] == "RuntimeError: out of luck"
    assert [record.message.count("out of luck") for record in caplog.records] == [1]


def test_a_decline_is_told_once_however_many_prompts_follow(
    session: Session, copying: CopyPair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "draftpair.runtime.exactness.probe", lambda *args: Exactness("inexact", "bytes differ")
    )
    session._gate, session.model = None, None
    for _ in range(3):
        report = body(session)
        assert report["tokens"] == copying.continuation(1, 40)
        assert report["stats"]["rounds"] == 0
        assert report["exactness"]["verdict"] == "inexact"
    assert [record.message for record in caplog.records] == ["bytes differ; decoding plainly"]


def test_a_bias_beyond_the_vocabulary_is_wrong_usage(session: Session) -> None:
    with pytest.raises(Usage, match="token id 32; the vocabulary has the ids 0 to 31"):
        body(session, logit_bias={32: 1.0})


@pytest.fixture(scope="module")
def lookup(copying: CopyPair) -> Session:
    return open_lookup(open_checkpoint(copying.target or ""), 4, Options(), {})


def test_prompt_lookup_drafts_what_came_before(lookup: Session, plain: Session) -> None:
    assert isinstance(lookup.drafter, LookupDrafter)
    assert (lookup.drafter.policy, lookup.drafter.max_draft, lookup.drafter.lengths) == (
        "graded",
        3,
        range(3, 1, -1),
    )
    report = body(lookup, max_tokens=90)
    assert report["tokens"] == body(plain, max_tokens=90)["tokens"]
    assert report["stats"]["accepted"] == report["stats"]["proposed"] > 30
    assert report["stats"]["block_size_from"] == "--draft-block-size"


@pytest.mark.parametrize(
    ("given", "environ", "width"),
    [
        (None, {}, (8, "default for prompt-lookup")),
        (None, {"MLXCEL_DRAFT_BLOCK_SIZE": "5"}, (5, "MLXCEL_DRAFT_BLOCK_SIZE")),
        (65, {"MLXCEL_DRAFT_BLOCK_SIZE": "5"}, (65, "--draft-block-size")),
    ],
)
def test_widths_of_prompt_lookup(given: int | None, environ: dict[str, str], width: tuple[int, str]) -> None:
    assert lookup_width(given, environ) == width


@pytest.mark.parametrize(
    ("given", "environ"), [(1, {}), (66, {}), (None, {"LLAMA_ARG_DRAFT_BLOCK_SIZE": "99"}), (-(10**30), {})]
)
def test_widths_that_prompt_lookup_does_not_have(given: int | None, environ: dict[str, str]) -> None:
    with pytest.raises(Usage, match="expected 2 to 65 for prompt-lookup"):
        lookup_width(given, environ)


def test_options_of_prompt_lookup_reach_it(copying: CopyPair, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(sessions, "LookupDrafter", lambda *args: asked.append(args))
    options = Options(prompt_lookup_ngram_max=1, prompt_lookup_policy="off")
    opened = open_lookup(open_checkpoint(Path(copying.target or "")), 3, options, {})
    assert asked == [(32, 1, 1, 2, "off")]
    assert isinstance(opened.controller, Fixed)
    assert opened.controller.ceiling == 3
