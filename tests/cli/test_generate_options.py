"""What surrounds the rounds of `generate`: penalties and biases, where a text ends, drafts without a drafter."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from draftpair.cli import run
from draftpair.runtime.targets.glm4_moe_lite import Target
from fixtures.folders import Folders
from fixtures.glm4_moe_lite import write_checkpoint
from fixtures.glm4_moe_lite_copy import CopyPair

EOS = 31


def arguments(pair: CopyPair, *args: str) -> list[str]:
    return ["generate", "-m", str(pair.target), "-p", "t1", "--no-chat-template", "-n", "40", *args]


def drafted(pair: CopyPair, *args: str) -> list[str]:
    return arguments(
        pair, "--draft-model", str(pair.raw.with_name("drafter")), "--draft-block-size", "4", *args
    )


def report_of(capsys: pytest.CaptureFixture[str], args: list[str], code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert run([*args, "--json"]) == code
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def words(tokens: list[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)


def test_penalties_are_asked_for_by_mlx_lms_names(
    copying: CopyPair, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"repetition_penalty": 1.5, "presence_penalty": 30.0, "frequency_penalty": -0.5}
    sizes = {"repetition_context_size": 30, "presence_context_size": 64, "frequency_context_size": 4}
    given = [
        text
        for name, value in (options | sizes).items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    plain, speculative = (report_of(capsys, command(copying, *given)) for command in (arguments, drafted))
    assert plain["tokens"] == speculative["tokens"] != copying.continuation(1, 40)
    assert {name: plain["inputs"][name] for name in options | sizes} == options | sizes


def test_a_bias_decides_and_names_its_tokens_in_the_report(
    copying: CopyPair, capsys: pytest.CaptureFixture[str]
) -> None:
    report = report_of(capsys, drafted(copying, "--logit-bias", '{"7": 1000}'))
    assert report["tokens"] == [7] * 40
    assert report["inputs"]["logit_bias"] == {"7": 1000.0}


def test_the_end_of_text_can_be_ignored(copying: CopyPair, capsys: pytest.CaptureFixture[str]) -> None:
    forced = ["--logit-bias", json.dumps({str(EOS): 1000})]
    ended = report_of(capsys, drafted(copying, *forced))
    assert (ended["tokens"], ended["finish_reason"], ended["text"]) == ([EOS], "stop", "")
    going = report_of(capsys, drafted(copying, *forced, "--ignore-eos"))
    assert (going["tokens"], going["finish_reason"]) == ([EOS] * 40, "length")
    assert going["inputs"]["ignore_eos"] is True


def test_a_stop_string_inside_a_block(copying: CopyPair, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = copying.continuation(1, 40)
    stop = words(tokens[6:8]) + " "
    report = report_of(capsys, drafted(copying, "--stop", "nothing of this", "--stop", stop))
    # The blank that completes the stop string comes with the word after it.
    assert (report["tokens"], report["finish_reason"]) == (tokens[:9], "stop")
    assert report["text"] == words(tokens[:6]) + " "
    assert report["inputs"]["stop"] == ["nothing of this", stop]


def test_a_beginning_of_a_stop_string_comes_out_at_the_end(
    copying: CopyPair, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = copying.continuation(1, 12)
    args = drafted(
        copying, "-n", "12", "--stop", words(tokens[10:]) + "!", "--stop", words(tokens[2:4]) + "!"
    )
    assert run(args) == 0
    assert capsys.readouterr().out == words(tokens) + "\n"
    report = report_of(capsys, args)
    assert (report["text"], report["finish_reason"]) == (words(tokens), "length")


def test_a_text_that_comes_round_again_is_drafted_from_itself(
    copying: CopyPair, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = report_of(capsys, arguments(copying, "-n", "90"))
    width = ["-n", "90", "--draft-block-size", "4"]
    report = report_of(capsys, arguments(copying, *width, "--prompt-lookup", "--prompt-lookup-policy", "off"))
    assert report["tokens"] == plain["tokens"]
    stats = report["stats"]
    assert (stats["draft_kind"], stats["block_size"]) == ("prompt-lookup", 4)
    assert stats["accepted"] == stats["proposed"] > 40
    assert report["exactness"]["verdict"] == "exact"
    assert report["inputs"]["draft_model"] is None
    assert report["inputs"]["prompt_lookup_policy"] == "off"
    assert stats["prompt_lookup"]["policy"] == "off"
    assert stats["prompt_lookup"]["drafted_rounds"] > 10
    kind = ["--draft-kind", "prompt-lookup", "--prompt-lookup-ngram-max", "1"]
    report = report_of(capsys, arguments(copying, *width, *kind))
    assert report["tokens"] == plain["tokens"]
    assert report["stats"]["block_size_from"] == "--draft-block-size"
    assert report["inputs"]["prompt_lookup_ngram_max"] == 1


@pytest.mark.parametrize("rows", ["1", "66"])
def test_a_width_that_prompt_lookup_does_not_have(
    copying: CopyPair, capsys: pytest.CaptureFixture[str], rows: str
) -> None:
    assert run(arguments(copying, "--prompt-lookup", "--draft-block-size", rows)) == 2
    assert f"--draft-block-size is {rows}; expected 2 to 65 for prompt-lookup" in capsys.readouterr().err


@pytest.mark.parametrize("way", [["--prompt-lookup"], ["--draft-model"]])
def test_a_target_that_cannot_take_a_block_back_is_named(
    copying: CopyPair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, way: list[str]
) -> None:
    monkeypatch.setattr(Target, "irreversible", "its caches keep no history", raising=False)
    drafter = [str(copying.raw.with_name("drafter"))] if way == ["--draft-model"] else []
    assert run(arguments(copying, *way, *drafter)) == 1
    assert f"{copying.target} cannot verify drafts: its caches keep no history" in capsys.readouterr().err
    assert run(arguments(copying)) == 0


def test_a_head_in_the_targets_own_files_runs_in_place(
    copying: CopyPair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    raw = str(copying.raw)
    place = ["generate", "-m", raw, "--draft-model", raw, "-p", "t1", "--no-chat-template", "-n", "40"]
    report = report_of(capsys, [*place, "--draft-block-size", "4"])
    assert report["tokens"] == copying.continuation(1, 40)
    assert report["stats"]["draft_acceptance_rate"] == 1.0
    assert (report["stats"]["draft_kind"], report["stats"]["block_size"]) == ("mtp", 4)
    assert report["inputs"]["draft_model"] == raw
    assert str(tmp_path) not in json.dumps(report)
    assert report_of(capsys, [*place, "--draft-kind", "mtp"])["tokens"] == report["tokens"]
    assert list(tmp_path.iterdir()) == []
    assert run([*place, "--draft-kind", "dflash"]) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_doubtful_head_in_place_is_named_as_the_user_named_it(
    folders: Folders, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    weights = next(folders.raw.glob("model-*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-8])
    raw = str(folders.raw)
    assert run(["generate", "-m", raw, "--draft-model", raw, "-p", "t1"]) == 1
    error = capsys.readouterr().err
    assert raw in error
    assert "gone" not in error


def test_bytes_of_characters_come_out_as_characters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Random weights give random bytes; by the biases, most of them are those of two characters of three bytes."""
    raw = str(write_checkpoint(tmp_path / "raw", vocab=300))
    biases = dict.fromkeys(map(str, "\u65e5\u6c34".encode()), 9.0)
    args = ["generate", "-m", raw, "-p", "a", "-n", "60", "--temp", "2", "--seed", "3", "--ignore-eos"]
    args += ["--logit-bias", json.dumps(biases), "--stop", "\u65e5\u65e5\u65e5\u65e5"]
    pieces: list[str] = []
    pair = [*args, "--draft-model", raw, "--draft-block-size", "2"]
    with monkeypatch.context() as patch:
        patch.setattr("click.echo", lambda text="", nl=True, err=False: nl or err or pieces.append(text))
        assert run(args) == 0
        plain = pieces.copy()
        pieces.clear()
        assert run(pair) == 0
    text = report_of(capsys, pair)["text"]
    assert "".join(plain) == "".join(pieces) == text
    assert [letter for letter in text if ord(letter) >= 0x800 and letter != "\ufffd"]
    assert len(plain) > 10
    assert not [piece for piece in plain[:-1] if piece.endswith("\ufffd")]
