"""The arithmetic of a benchmark: order of the runs, medians, sums of acceptance, differences; and files of prompts."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draftpair.errors import Usage
from draftpair.runtime.bench import PROMPTS, acceptance, in_turn, read_prompts, summary
from draftpair.runtime.stats import Stats


def body(
    tokens: list[int], seconds: float = 1.0, rounds: dict[tuple[int, int], int] | None = None
) -> dict[str, Any]:
    """What a run gives, as far as a summary reads it."""
    stats = Stats(tokens=len(tokens), total_seconds=seconds, rounds=Counter(rounds or {}))
    return {"tokens": tokens, "finish_reason": "length", "stats": stats.report()}


def test_runs_alternate_and_so_does_which_begins() -> None:
    told: list[tuple[str, int]] = []
    numbers = iter(range(100))
    bodies = in_turn(
        ["plain", "speculative"],
        2,
        lambda kind: {"kind": kind, "number": next(numbers)},
        on_run=lambda kind, run: told.append((kind, run)),
    )
    assert told == [
        ("plain", 0), ("speculative", 0), ("speculative", 1), ("plain", 1), ("plain", 2), ("speculative", 2),
    ]  # fmt: skip
    assert [run["number"] for run in bodies["plain"]] == [0, 3, 4]
    assert {run["kind"] for run in bodies["speculative"]} == {"speculative"}
    shifted: list[str] = []
    in_turn(["plain", "speculative"], 1, lambda kind: {}, 1, lambda kind, run: shifted.append(kind))
    assert shifted == ["speculative", "plain", "plain", "speculative"]
    assert set(in_turn(["plain"], 3, lambda kind: {})) == {"plain"}


def test_speeds_are_medians_over_all_prompts_without_the_run_for_warming_up() -> None:
    every = {
        1: {
            "plain": [body([1, 2, 3], seconds) for seconds in (99.0, 1.0, 2.0, 4.0)],
            "speculative": [body([1, 2, 3], seconds) for seconds in (99.0, 0.5, 0.5, 0.5)],
        },
        2: {
            "plain": [body([1, 2, 3, 4, 5], seconds) for seconds in (99.0, 1.0, 1.0, 1.0)],
            "speculative": [body([1, 2, 3, 4, 5], seconds) for seconds in (99.0, 0.5, 1.0, 2.5)],
        },
    }
    found = summary(every)
    assert found["tokens"] == 8
    assert found["plain"] == {"median": 2.0, "slowest": 6 / 5, "fastest": 3.0, "runs": [3.0, 2.0, 6 / 5]}
    assert found["speculative"] == {"median": 4.0, "slowest": 2.0, "fastest": 6.0, "runs": [6.0, 4.0, 2.0]}
    assert found["ratio"] == 2.0
    assert summary({1: every[1]})["plain"]["runs"] == [2.0, 1.0, 0.5]


def test_nothing_is_divided_by_nothing() -> None:
    found = summary({1: {"plain": [body([7], 0.0)] * 2, "speculative": [body([7], 0.0)] * 2}})
    assert found["plain"] == {"median": None, "slowest": None, "fastest": None, "runs": [None]}
    assert found["ratio"] is None
    assert found["identical"]
    assert found["acceptance"]["draft_acceptance_rate"] is None
    assert found["acceptance"]["mean_acceptance_length"] is None
    assert found["acceptance"]["acceptance_by_position"] == []


def test_plain_runs_alone_have_no_ratio() -> None:
    found = summary({1: {"plain": [body([1, 2])] * 2}})
    assert (found["speculative"], found["ratio"], found["acceptance"]) == (None, None, None)
    assert found["identical"]


@pytest.mark.parametrize(
    ("kind", "run", "tokens", "expected"),
    [
        ("speculative", 0, [1, 9, 3], {"position": 1, "expected": 2, "found": 9}),
        ("speculative", 2, [1, 2], {"position": 2, "expected": 3, "found": None}),
        ("speculative", 1, [1, 2, 3, 4], {"position": 3, "expected": None, "found": 4}),
        ("plain", 1, [5, 2, 3], {"position": 0, "expected": 1, "found": 5}),
    ],
)
def test_the_first_difference_is_named(
    kind: str, run: int, tokens: list[int], expected: dict[str, Any]
) -> None:
    same = {"plain": [body([1, 2, 3])] * 3, "speculative": [body([1, 2, 3])] * 3}
    other = {name: list(bodies) for name, bodies in same.items()}
    other[kind][run] = body(tokens)
    found = summary({1: same, 2: other})
    assert found["identical"] is False
    assert found["first_difference"] == {"prompt": 2, "run": kind, **expected}
    assert summary({1: same})["first_difference"] is None


@pytest.mark.parametrize("seed", range(20))
def test_acceptance_is_what_one_run_with_all_the_rounds_would_report(seed: int) -> None:
    numbers = random.Random(seed)
    rounds: list[Counter[tuple[int, int]]] = []
    for _ in range(3):
        widths = [numbers.randint(0, 6) for _ in range(numbers.randint(0, 9))]
        rounds.append(Counter((width, numbers.randint(0, width)) for width in widths))
    found = acceptance(Stats(rounds=counts).report() for counts in rounds)
    whole = Stats(rounds=sum(rounds, Counter[tuple[int, int]]())).report()
    assert found == {name: whole[name] for name in found}
    assert found["rounds"] == sum(sum(counts.values()) for counts in rounds)


def test_the_built_in_prompts_are_an_enumeration_code_and_prose() -> None:
    assert len(PROMPTS) == len(set(PROMPTS)) == 3
    for prompt, word in zip(PROMPTS, ("List", "Python", "story"), strict=True):
        assert word in prompt


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one\n\n  \n two \nthree", ["one", " two ", "three"]),
        ("\ufeffone\r\ntwo\r\n", ["one", "two"]),
        ("{not json}\n[1]\n", ["{not json}", "[1]"]),
        ('"quoted"\n', ['"quoted"']),
        ('{"prompt": "a\\nb"}\n\n{"id": 7, "prompt": "c"}\n', ["a\nb", "c"]),
    ],
    ids=["lines", "byte-order mark", "braces", "a JSON text", "JSON lines"],
)
def test_prompts_are_lines_or_json_lines(tmp_path: Path, text: str, expected: list[str]) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(text.encode())
    assert read_prompts(path) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "has no prompts"),
        (b"\n \n", "has no prompts"),
        (b"caf\xe9\n", "not UTF-8"),
        (b'{"prompt": "a"}\nb\n', "line 2: "),
        (b'{"prompt": "a"}\n\n{"text": "b"}\n', "line 3 has no prompt"),
        (b'{"prompt": "a"}\n["b"]\n', "line 2 has no prompt"),
        (b'{"prompt": 1}\n', "line 1 has no prompt"),
        (b'{"prompt": ""}\n', "line 1 has no prompt"),
    ],
)
def test_a_file_that_gives_no_prompts_is_wrong_usage(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "prompts"
    path.write_bytes(data)
    with pytest.raises(Usage, match=message) as error:
        read_prompts(path)
    assert str(path) in error.value.message


def test_a_file_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(Usage, match="cannot be read"):
            read_prompts(path)


def test_a_long_number_in_a_prompt_is_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts"
    path.write_text("1" * 5000 + "\n" + json.dumps({"prompt": "b"}))
    assert read_prompts(path)[0] == "1" * 5000
