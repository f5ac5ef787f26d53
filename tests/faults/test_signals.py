"""A run that is asked to end, at whatever moment, says so by its exit code and leaves nothing half done."""

from __future__ import annotations

import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

ENDS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
FORMS = ("split", "replaced", "attached")


def lay_out(form: str, sources: Any, parent: Path) -> Path:
    """The output of a run below an empty folder, or below one with a drafter to replace."""
    shutil.rmtree(parent, ignore_errors=True)
    parent.mkdir()
    if form == "replaced":
        shutil.copytree(sources.drafter, parent / "p" / "out")
        (parent / "p" / "out" / "notes").write_text("mine")
    return parent / "p" / "out"


@pytest.mark.parametrize("form", FORMS)
def test_a_request_to_end_at_any_call(driver: Any, small: Any, tools: Any, tmp_path: Path, form: str) -> None:
    folder = tmp_path / "folder"
    out = lay_out(form, small, folder)
    run = small.command(form, out)
    whole = driver.run(*run, roots=[str(folder)])
    assert whole.code == 0, whole.err
    written = tools.contents(out)
    calls = tools.some(whole.calls, each=2)
    begin = next(place for place, call in enumerate(calls) if call.startswith("os.mkdir"))
    for place, call in enumerate(calls[begin:]):
        number = list(ENDS)[place % len(ENDS)]
        out = lay_out(form, small, folder)
        before = tools.state(out)
        outcome = driver.run(*run, roots=[str(folder)], faults={call: f"os.kill(os.getpid(), {int(number)})"})
        said = f"{number.name} at {call}: {outcome.code} {outcome.err}"
        assert outcome.code == ENDS[number], said
        assert (
            "interrupted" if number == signal.SIGINT else f"terminated by {number.name}"
        ) in outcome.err, said
        assert "Traceback" not in outcome.err, said
        if tools.state(out) != before:
            assert tools.contents(out) == written, said
        elif before is None:
            assert list(folder.iterdir()) == [], said
        if out.parent.exists():
            assert list(out.parent.iterdir()) == [out], said


def test_a_second_request_does_not_cut_the_removal_short(
    driver: Any, small: Any, tools: Any, tmp_path: Path
) -> None:
    """Ctrl-C pressed twice: once while tensors are written, and once more while what was written is removed."""
    for second in ("shutil.rmtree .out.draftpair-new 1", "os.remove model.safetensors 1"):
        interrupt = f"os.kill(os.getpid(), {int(signal.SIGINT)})"
        faults = {"os.pwrite 9": interrupt, second: interrupt}
        outcome = driver.run(*small.command("split", tmp_path / "out"), roots=[str(tmp_path)], faults=faults)
        assert second in outcome.calls
        assert outcome.code == 130
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", ENDS)
def test_a_request_to_end_at_a_random_moment(
    driver: Any, large: Any, tools: Any, tmp_path: Path, number: signal.Signals
) -> None:
    out, other = tmp_path / "one" / "out", tmp_path / "two" / "out"
    runs = [large.command("split", output) for output in (out, other)]
    seconds = min(outcome.seconds for outcome in driver.together([(run, {}) for run in runs]))
    whole = tools.contents(out)
    chance = random.Random(number)
    for _ in range(3):
        for output in (out, other):
            shutil.rmtree(output.parent, ignore_errors=True)
        asked = [{"signals": [(chance.uniform(0.1, 0.95) * seconds, number)]} for _ in runs]
        for output, outcome in zip(
            (out, other), driver.together(list(zip(runs, asked, strict=True))), strict=True
        ):
            # Before the command line has begun, and when nothing is left to do, the system itself ends the process.
            assert outcome.code in (ENDS[number], -number, 0), outcome.err
            if output.exists():
                assert tools.contents(output) == whole
            else:
                assert outcome.code != 0
                assert not output.parent.exists()
