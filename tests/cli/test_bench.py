"""`bench` as a user runs it: the report, its exit code, what a pair that is not exact comes to, and interruptions."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import mlx.core as mx
import pytest

from draftpair.cli import run
from draftpair.runtime.drafters import glm4_moe_lite_mtp
from draftpair.runtime.targets import glm4_moe_lite
from draftpair.schemas import check, load_schema
from fixtures.folders import Folders
from fixtures.glm4_moe_lite_copy import CopyPair, write_copy_pair

SHORT = ["--max-tokens", "9", "--runs", "2"]
ONCE = ["--max-tokens", "9", "--runs", "1"]


@pytest.fixture(scope="module")
def copy_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[CopyPair, list[str]]:
    """A pair that accepts everything, and the options that name it."""
    folder = tmp_path_factory.mktemp("copy")
    pair = write_copy_pair(folder / "raw", folder / "target")
    assert run(["split-mtp", "-m", str(pair.raw), "-o", str(folder / "drafter"), "--block-size", "4"]) == 0
    return pair, ["--model", str(pair.target), "--draft-model", str(folder / "drafter")]


@pytest.fixture
def prompts(tmp_path: Path) -> list[str]:
    path = tmp_path / "prompts.txt"
    path.write_text("t1 t2\nt5 t6 t7\n")
    return ["--prompts", str(path), "--no-chat-template"]


def benched(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> dict[str, Any]:
    capsys.readouterr()
    assert run(["bench", *args, "--json"]) == code
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert check(report, load_schema("bench")) == []
    return report


def test_a_copying_head_is_always_right(
    copy_pair: tuple[CopyPair, list[str]], prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    report = benched(capsys, *copy_pair[1], *prompts, *SHORT)
    assert report["draft"] == {"kind": "mtp", "block_size": 4, "block_size_from": "block_size of the drafter"}
    assert report["exactness"]["verdict"] == "exact"
    assert report["findings"] == []
    assert [(entry["prompt"], entry["prompt_tokens"]) for entry in report["prompts"]] == [
        ("t1 t2", 2),
        ("t5 t6 t7", 3),
    ]
    for entry in (*report["prompts"], report["total"]):
        assert entry["identical"]
        assert entry["acceptance"]["draft_acceptance_rate"] == 1.0
        assert set(entry["acceptance"]["acceptance_by_position"]) == {1.0}
        assert entry["ratio"] == pytest.approx(entry["speculative"]["median"] / entry["plain"]["median"])
        for speed in (entry["plain"], entry["speculative"]):
            assert len(speed["runs"]) == 2
            assert 0 < speed["slowest"] == min(speed["runs"]) <= speed["median"] <= max(speed["runs"])
    total = report["total"]
    assert total["tokens"] == 18
    for figure in ("rounds", "proposed", "accepted"):
        assert total["acceptance"][figure] == sum(entry["acceptance"][figure] for entry in report["prompts"])
    # Two runs of each of two prompts bring eight tokens after the first, of which every round decides one itself.
    assert total["acceptance"]["accepted"] + total["acceptance"]["rounds"] == 2 * 2 * 8


@pytest.mark.parametrize(
    "sampling", [[], ["--temp", "0.9", "--top-k", "12", "--seed", "7"]], ids=["greedy", "sampled"]
)
def test_a_random_head_changes_no_token(
    folders: Folders, prompts: list[str], capsys: pytest.CaptureFixture[str], sampling: list[str]
) -> None:
    pair = ["-m", str(folders.target), "--draft-model", str(folders.drafter_4bit), "--draft-block-size", "3"]
    report = benched(capsys, *pair, *prompts, *ONCE, *sampling)
    assert report["total"]["identical"]
    assert report["draft"]["block_size_from"] == "--draft-block-size"
    assert (report["inputs"]["draft_block_size"], report["inputs"]["runs"]) == (3, 1)
    assert report["total"]["acceptance"]["proposed"] > report["total"]["acceptance"]["accepted"]


def test_prompt_lookup_needs_no_drafter(
    copy_pair: tuple[CopyPair, list[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    whole_cycle = copy_pair[0].continuation(1, 30)  # from here on, all has been there before
    (tmp_path / "prompts").write_text(" ".join(f"t{token}" for token in whole_cycle))
    prompts = ["--prompts", str(tmp_path / "prompts"), "--no-chat-template"]
    report = benched(capsys, *copy_pair[1][:2], "--prompt-lookup", *prompts, *ONCE)
    assert report["draft"]["kind"] == report["inputs"]["draft_kind"] == "prompt-lookup"
    assert report["total"]["identical"]
    assert report["total"]["acceptance"]["draft_acceptance_rate"] == 1.0
    assert report["total"]["acceptance"]["accepted"] > 4


def test_the_text_and_the_image(
    copy_pair: tuple[CopyPair, list[str]],
    prompts: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    capsys.readouterr()
    assert run(["bench", *copy_pair[1], *prompts, *ONCE, "--svg", str(tmp_path / "bench.svg")]) == 0
    captured = capsys.readouterr()
    assert f"  position 1  {'█' * 40}  100.0%" in captured.out.splitlines()
    assert captured.out.count("identical in every run") == 3
    assert captured.err == ""
    assert "\x1b" not in captured.out
    root = ElementTree.parse(tmp_path / "bench.svg").getroot()
    assert "100.0%" in "".join(root.itertext())


def test_bars_are_ascii_where_the_output_cannot_carry_more(
    copy_pair: tuple[CopyPair, list[str]], prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert run(["bench", *copy_pair[1], *prompts, *ONCE]) == 0
    sys.stdout.flush()
    assert f"  position 1  {'#' * 40}  100.0%" in raw.getvalue().decode("ascii").splitlines()


def test_progress_is_told_where_somebody_looks(
    copy_pair: tuple[CopyPair, list[str]],
    prompts: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capsys.readouterr()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(["bench", *copy_pair[1], *prompts, *SHORT, "--json"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines[:3] == [
        "prompt 1: speculative, warming up",
        "prompt 1: plain, warming up",
        "prompt 1: plain, run 1 of 2",
    ]
    assert len(lines) == 2 * 2 * 3


def test_the_report_is_not_lost_with_an_image_that_cannot_be_written(
    copy_pair: tuple[CopyPair, list[str]],
    prompts: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("draftpair.report.svg.os.replace", full)
    capsys.readouterr()
    assert run(["bench", *copy_pair[1], *prompts, *ONCE, "--svg", str(tmp_path / "bench.svg"), "--json"]) == 3
    captured = capsys.readouterr()
    assert check(json.loads(captured.out), load_schema("bench")) == []
    assert "bench.svg cannot be written: No space left on device" in captured.err


def wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on a block's logits are not those of single steps."""
    verify = glm4_moe_lite.Target.verify

    def rolled(self: Any, tokens: Any) -> tuple[mx.array, mx.array]:
        logits, hidden = verify(self, tokens)
        return mx.roll(logits, 1, axis=-1), hidden

    monkeypatch.setattr(glm4_moe_lite.Target, "verify", rolled)


def test_a_pair_that_is_not_exact_is_measured_plainly(
    folders: Folders, prompts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_rows(monkeypatch)
    pair = ["-m", str(folders.target), "--draft-model", str(folders.drafter)]
    report = benched(capsys, *pair, *prompts, *ONCE)
    assert report["exactness"]["verdict"] == "inexact"
    assert [finding["rule"] for finding in report["findings"]] == ["BENCH-DECLINED"]
    total = report["total"]
    assert (report["draft"], total["speculative"], total["ratio"], total["acceptance"]) == (
        None,
        None,
        None,
        None,
    )
    assert total["plain"]["median"] > 0


def test_tokens_that_differ_exit_1_and_the_place_is_named(
    folders: Folders, prompts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong_rows(monkeypatch)
    monkeypatch.setenv("MLXCEL_MTP_ALLOW_INEXACT", "1")
    pair = ["-m", str(folders.target), "--draft-model", str(folders.drafter)]
    report = benched(capsys, *pair, *prompts, *ONCE, code=1)
    assert report["total"]["identical"] is False
    first = report["total"]["first_difference"]
    assert (first["prompt"], first["run"], first["position"]) == (1, "speculative", 1)
    assert first["expected"] != first["found"]
    assert report["exactness"]["verdict"] == "inexact"
    assert run(["bench", *pair, *prompts, *ONCE]) == 1
    assert "DIFFERENT: generated token 1 of prompt 1, counted from 0, is id" in capsys.readouterr().out


def test_a_drafter_that_fails_is_told(
    folders: Folders, prompts: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> list[int]:
        raise ValueError("no such row")

    monkeypatch.setattr(glm4_moe_lite_mtp.Drafter, "draft", broken)
    pair = ["-m", str(folders.target), "--draft-model", str(folders.drafter)]
    report = benched(capsys, *pair, *prompts, *ONCE)
    assert report["total"]["identical"]
    (finding,) = report["findings"]
    assert finding["rule"] == "BENCH-DRAFTER-FAILED"
    assert finding["message"].startswith("prompt 1: the drafter failed")
    assert "no such row" in finding["message"]


@pytest.mark.parametrize("after", [1, 30])
def test_an_interrupt_presents_no_result(
    copy_pair: tuple[CopyPair, list[str]],
    prompts: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    after: int,
) -> None:
    decode, calls = glm4_moe_lite.Target.decode, iter(range(after))

    def interrupted(self: Any, token: mx.array) -> mx.array:
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return decode(self, token)

    benched(capsys, *copy_pair[1], *prompts, *ONCE)  # probed: what is interrupted is a run
    monkeypatch.setattr(glm4_moe_lite.Target, "decode", interrupted)
    assert run(["bench", *copy_pair[1], *prompts, *ONCE, "--svg", str(tmp_path / "bench.svg")]) == 130
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "interrupted" in captured.err
    assert not (tmp_path / "bench.svg").exists()


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (["--prompts", "absent"], "prompts cannot be read"),
        (["--runs", "0"], "--runs"),
        (["--svg", "."], "is a folder"),
        (["--svg", "absent/bench.svg"], "is no folder"),
        (["--draft-kind", "medusa"], "known kinds"),
        (["--prompt-lookup"], "needs no drafter"),
        (["--max-tokens", "0"], "--max-tokens"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_told_before_anything_is_loaded(
    folders: Folders,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    extra: list[str],
    text: str,
) -> None:
    monkeypatch.setattr(glm4_moe_lite.Target, "load", None)
    assert run(["bench", "-m", str(folders.target), "--draft-model", str(folders.drafter), *extra]) == 2
    captured = capsys.readouterr()
    assert text in captured.err
    assert captured.out == ""


def test_a_target_alone_has_nothing_to_be_compared_with(
    folders: Folders, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "-m", str(folders.target)]) == 2
    assert "--draft-model" in capsys.readouterr().err


def test_an_unsafe_pair_is_not_measured(folders: Folders, capsys: pytest.CaptureFixture[str]) -> None:
    folders.edit(folders.drafter, "config.json", lambda config: config["text_config"].update(hidden_size=32))
    assert run(["bench", "-m", str(folders.target), "--draft-model", str(folders.drafter)]) == 1
    assert capsys.readouterr().out == ""
