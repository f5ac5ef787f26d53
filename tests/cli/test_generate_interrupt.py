"""Ctrl-C while `generate` runs, in a process of its own: what was generated stays, and its figures follow."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from draftpair.cli import run
from draftpair.schemas import check, load_schema
from fixtures.glm4_moe_lite_copy import CopyPair

# More than can be generated before the signal comes.
TOKENS = "1000000"
PATIENCE = 120


def started(pair: CopyPair, *args: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    command = ["generate", "-m", str(pair.target), "-p", "t1", "--no-chat-template", "-n", TOKENS, *args]
    return subprocess.Popen(
        [sys.executable, "-m", "draftpair", *command],
        stdout=stdout,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
        bufsize=0,
    )


def ids_of(text: str) -> list[int]:
    return [int(word.removeprefix("t")) for word in text.split()]


def drafter(pair: CopyPair) -> list[str]:
    return ["--draft-model", str(pair.raw.with_name("drafter")), "--draft-block-size", "2"]


@pytest.mark.parametrize("alone", [True, False], ids=["plainly", "with a drafter"])
def test_the_text_stays_and_the_figures_follow(copying: CopyPair, alone: bool) -> None:
    with started(copying, *([] if alone else drafter(copying))) as process:
        assert process.stdout
        begin = b""
        while len(begin) < 200:
            begin += process.stdout.read(200)
        process.send_signal(signal.SIGINT)
        rest, error = process.communicate(timeout=PATIENCE)
    text, told = (begin + rest).decode(), error.decode()
    assert process.returncode == 130
    ids = ids_of(text)
    assert ids == copying.continuation(1, len(ids))
    assert text.count("\n") == 1
    assert text.endswith("\n")
    assert f"{len(ids)} tokens, " in told
    assert ("proposals accepted (100.0%)" in told) != alone
    assert told.endswith("\ninterrupted\n")
    assert "Traceback" not in told


def test_on_a_terminal_the_line_is_ended_too(copying: CopyPair) -> None:
    """The terminal itself sends the signal, when its user types Ctrl-C."""
    screen, terminal = pty.openpty()
    with started(copying, stdout=terminal) as process:
        os.close(terminal)
        text = b""
        while len(text) < 200:
            text += os.read(screen, 1024)
        process.send_signal(signal.SIGINT)
        text += read_to_the_end(screen)
        told = process.communicate(timeout=PATIENCE)[1].decode()
    os.close(screen)
    assert process.returncode == 130
    assert text.decode().count("\r\n") == 1
    assert text.endswith(b"\r\n")
    assert b"\x1b" not in text
    assert "Traceback" not in told


def test_a_reader_that_has_gone_ends_it_quietly(copying: CopyPair) -> None:
    with started(copying, *drafter(copying)) as process:
        assert process.stdout
        assert process.stdout.read(10)
        process.stdout.close()
        assert process.stderr
        told = process.stderr.read()
    assert (process.returncode, told) == (0, b"")


def test_an_interruption_while_the_pair_is_loaded(
    copying: CopyPair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("draftpair.runtime.session.load_pair", load)
    before = signal.getsignal(signal.SIGINT)
    assert run(["generate", "-m", str(copying.target), "-p", "t1", *drafter(copying)]) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err.split()) == ("", ["interrupted"])
    assert signal.getsignal(signal.SIGINT) is before


def read_to_the_end(screen: int) -> bytes:
    text = b""
    while True:
        try:
            data = os.read(screen, 1 << 16)
        except OSError:  # Linux, when the last process has closed the terminal
            return text
        if not data:
            return text
        text += data


def test_json_is_the_report_of_what_was_generated(copying: CopyPair) -> None:
    with started(copying, *drafter(copying), "--json") as process:
        # Nothing is printed before the end: the drafter's own lines tell that rounds are going on.
        assert process.stderr
        wait_for_rounds(process, copying)
        out, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    report: dict[str, Any] = json.loads(out)
    assert check(report, load_schema("generate")) == []
    assert report["finish_reason"] == "interrupted"
    assert report["tokens"] == copying.continuation(1, len(report["tokens"]))
    assert ids_of(report["text"]) == report["tokens"]
    assert len(report["tokens"]) >= 20
    assert report["stats"]["draft_acceptance_rate"] == 1.0
    assert error.decode().endswith("interrupted\n")
    assert "Traceback" not in error.decode()


def wait_for_rounds(process: subprocess.Popen[bytes], pair: CopyPair) -> None:
    assert process.stderr
    walks = 0
    while walks < 20:
        line = process.stderr.readline()
        assert line, "it ended before its rounds"
        walks += line.startswith(b"MTPWALK")
    process.send_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def rounds_are_told(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "json" in request.node.name:
        monkeypatch.setenv("MLXCEL_MTP_GAP_LOG", "1")
