"""Several runs into one destination: one whole folder, of a run that said so; the others say why they gave way."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draftpair import api
from draftpair.convert import write
from draftpair.errors import ToolError

GAVE_WAY = (
    "already looks like a checkpoint",
    "changed while this run was writing",
    "exists and is not empty",
)


@pytest.fixture(scope="module")
def rivals(
    small: Any, tools: Any, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[list[str | Path], Any]]:
    """Five command lines, all but the output, and what each writes: no two write the same."""
    folder = tmp_path_factory.mktemp("rivals")
    made = []
    for width, source in ((2, small.raw), (3, small.other), (4, small.raw), (5, small.other), (6, small.raw)):
        out = folder / str(width)
        api.split_mtp(source, out, block_size=width)
        command = ["split-mtp", "--model", source, "--block-size", str(width)]
        made.append((command, tools.contents(out)))
    return made


def race(driver: Any, out: Path, rivals: Sequence[tuple[list[str | Path], Any]], *options: str) -> list[Any]:
    return driver.together([([*command, "--output", out, *options], {}) for command, _ in rivals])


@pytest.mark.parametrize("count", [2, 5])
def test_without_force_exactly_one_wins(
    driver: Any, rivals: Any, tools: Any, tmp_path: Path, count: int
) -> None:
    chance = random.Random(count)
    for turn in range(4):
        racing = chance.sample(rivals, count)
        out = tmp_path / f"missing{turn}" / "parent" / "out"
        outcomes = race(driver, out, racing)
        (winner,) = [place for place, outcome in enumerate(outcomes) if outcome.code == 0]
        assert tools.contents(out) == racing[winner][1]
        for outcome in outcomes:
            if outcome.code != 0:
                assert outcome.code in (2, 3), outcome.err
                assert any(words in outcome.err for words in GAVE_WAY), outcome.err
        assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("there", [False, True], ids=["nothing there", "a drafter there"])
def test_with_force_the_last_to_say_so_wins(
    driver: Any, rivals: Any, tools: Any, tmp_path: Path, count: int, there: bool
) -> None:
    chance = random.Random(count)
    out = tmp_path / "out"
    for _ in range(4):
        racing = chance.sample(rivals, count)
        if there:
            api.split_mtp(rivals[0][0][2], out, force=True)
            (out / "notes").write_text("mine")
        outcomes = race(driver, out, racing, "--force")
        kept = {"notes": tools.contents(out)["notes"]} if there else {}
        assert tools.contents(out) in [
            {**whole, **kept}
            for (_, whole), outcome in zip(racing, outcomes, strict=True)
            if outcome.code == 0
        ]
        for outcome in outcomes:
            if outcome.code != 0:
                assert outcome.code == 3, outcome.err
                assert "changed while this run was writing" in outcome.err
        assert list(tmp_path.iterdir()) == [out]


def until(moment: float) -> str:
    return f"time.sleep(max(0, {moment} - time.time()))"


def test_three_that_replace_one_folder_in_the_same_moment(
    driver: Any, rivals: Any, tools: Any, tmp_path: Path
) -> None:
    """Each has found the folder as it was, and they exchange it one after the other: only one of them may."""
    out = tmp_path / "out"
    api.split_mtp(rivals[4][0][2], out)
    calls = driver.run(*rivals[0][0], "--output", out, "--force", roots=[str(tmp_path)]).calls
    after = calls[calls.index("ctypes.dlopen 1") :]
    looking = next(call for call in after if call.startswith("os.scandir .out.draftpair-new"))
    start = time.time() + 1.5
    moments = [(0.0, 0.0), (0.2, 0.6), (0.4, 0.8)]
    runs = [
        (
            [*command, "--output", out, "--force"],
            {
                "roots": [str(tmp_path)],
                "faults": {
                    "ctypes.dlopen 1": until(start + exchange),
                    looking: until(start + look),
                },
            },
        )
        for (command, _), (exchange, look) in zip(rivals, moments, strict=False)
    ]
    outcomes = driver.together(runs)
    (winner,) = [place for place, outcome in enumerate(outcomes) if outcome.code == 0]
    assert tools.contents(out) == rivals[winner][1]
    assert list(tmp_path.iterdir()) == [out]


def test_a_run_that_ends_while_another_looks_is_not_replaced(
    rivals: Any, tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --force: right after this run found the destination free, another one puts its folder there."""
    out, other = tmp_path / "out", tmp_path / "elsewhere"
    api.split_mtp(rivals[1][0][2], other, block_size=3)
    check, looked = write.check_destination, []

    def check_and_act(*args: Any) -> list[str]:
        found = check(*args)
        looked.append(other.rename(out))
        return found

    monkeypatch.setattr(write, "check_destination", check_and_act)
    with pytest.raises(ToolError, match="changed while this run was writing"):
        api.split_mtp(rivals[0][0][2], out)
    assert looked
    assert tools.contents(out) == rivals[1][1]
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize("options", [[], ["--link"]], ids=["copied", "linked"])
def test_several_attach_to_one_output(
    driver: Any, small: Any, tools: Any, tmp_path: Path, options: list[str]
) -> None:
    attach = ["attach", "--model", small.target, "--drafter", small.drafter, *options, "--output"]
    assert driver.run(*attach, tmp_path / "alone").code == 0
    for turn in range(3):
        out = tmp_path / f"out{turn}"
        outcomes = driver.together([([*attach, out], {})] * 3)
        losers = [outcome for outcome in outcomes if outcome.code != 0]
        assert len(losers) == 2
        assert {outcome.code for outcome in losers} <= {2, 3}, losers
        assert all(any(words in outcome.err for words in GAVE_WAY) for outcome in losers), losers
        assert tools.contents(out) == tools.contents(tmp_path / "alone")
    assert not tools.temporary(tmp_path)


def test_a_run_that_starts_leaves_a_younger_ones_folder_alone(
    driver: Any, rivals: Any, tools: Any, tmp_path: Path
) -> None:
    """A temporary folder that is not locked yet may be that of a run which is about to."""
    young = tmp_path / ".out.draftpair-new-0123456789ab"
    young.mkdir()
    assert driver.run(*rivals[0][0], "--output", tmp_path / "out").code == 0
    assert young.is_dir()
    tools.age(tmp_path)
    assert driver.run(*rivals[0][0], "--output", tmp_path / "out", "--force").code == 0
    assert not young.exists()
