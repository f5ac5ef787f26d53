"""What the environment lets see of the rounds is true, and looking changes no token."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from draftpair.cli import run
from draftpair.runtime.diagnostics import COMPONENTS, gap_logged, profiled, watched
from draftpair.runtime.interfaces import ModelDrafter, Target
from draftpair.runtime.loop import Request, generate
from draftpair.runtime.sampling import Sampler
from draftpair.runtime.stats import Stats
from draftpair.runtime.width import Fixed
from fixtures import pairs
from fixtures.folders import Folders
from fixtures.glm4_moe_lite import write_checkpoint

PROMPT = [1, 2, 3]
Loaded = tuple[Target, ModelDrafter]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return pairs.load(write_checkpoint(tmp_path_factory.mktemp("raw") / "raw"))


def tokens_of(
    target: Any, drafter: Any, sampler: Any, stats: Stats, eos: frozenset[int] = frozenset()
) -> list[int]:
    request = Request(PROMPT, sampler, 20, eos)
    return [token for group in generate(target, drafter, request, Fixed(4), stats) for token in group]


SAMPLING = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 3},
    "penalized": {"repetition_penalty": 1.3, "temperature": 0.8},
}


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_gaps_and_walks_are_those_of_the_rounds(loaded: Loaded, sampling: dict[str, Any]) -> None:
    target, drafter = loaded
    lines: list[str] = []
    sampler, stats = Sampler(target.vocab_size, **sampling), Stats()
    ids = tokens_of(*_gaps(target, drafter, sampler, lines), stats)
    assert ids == pairs.run(target, None, PROMPT, tokens=20, **sampling).ids
    walks = [line.split("\t")[1:] for line in lines if line.startswith("MTPWALK\t")]
    assert [(int(width) - 1, int(accepted)) for width, accepted, _, _ in walks] == list(
        _in_order(stats, walks)
    )
    told = ids[:1]
    gaps = iter(line.split("\t")[1:] for line in lines if line.startswith("MTPGAP\t"))
    for width, accepted, drafts, decided in walks:
        proposed = [int(token) for token in drafts.split(",") if token]
        targets = [int(token) for token in decided.split(",")]
        assert (len(proposed) + 1, len(targets)) == (int(width), int(width))
        assert proposed[: int(accepted)] == targets[: int(accepted)]
        assert proposed[int(accepted) : int(accepted) + 1] != targets[int(accepted) : int(accepted) + 1] or (
            int(accepted) == len(proposed)
        )
        for row, token in enumerate(targets):
            position, top, *figures = next(gaps)
            assert int(position) == len(PROMPT) + len(told) + row
            _check_row(target, [*PROMPT, *told, *proposed[:row]], int(top), list(map(float, figures)))
            assert sampling or int(top) == token
        told += targets[: int(accepted) + 1]
    assert next(gaps, None) is None
    # What is left after the rounds is decoded plainly.
    assert told == ids[: len(told)]
    assert len(told) >= 19


def _gaps(target: Target, drafter: ModelDrafter, sampler: Sampler, lines: list[str]) -> tuple[Any, Any, Any]:
    around, drawing = gap_logged(target, sampler, lines.append)
    return around, drafter, drawing


def _in_order(stats: Stats, walks: list[list[str]]) -> Any:
    """The rounds that were counted, put in the order of the walks; short of one where they are not the same."""
    left = stats.rounds.copy()
    for width, accepted, _, _ in walks:
        key = (int(width) - 1, int(accepted))
        if left[key]:
            left[key] -= 1
            yield key
    assert not left.total()


def _check_row(target: Target, text: list[int], top: int, figures: list[float]) -> None:
    """Against the logits of the same text, prefilled by another target state that is put back afterwards."""
    caches = target.caches  # type: ignore[attr-defined]
    target.reset()
    logits: Any = target.prefill(text, 0)[0][0]
    target.caches = caches  # type: ignore[attr-defined]
    assert top == mx.argmax(logits).item()
    second, first = sorted(logits.tolist())[-2:]
    assert figures == pytest.approx([first, second, first - second], abs=1e-3)


def test_a_profile_has_every_component_and_changes_no_token(loaded: Loaded) -> None:
    target, drafter = loaded
    sampler, stats = Sampler(target.vocab_size, temperature=0.8, seed=3), Stats()
    ids = tokens_of(*profiled(target, drafter, sampler, stats), stats)
    assert ids == pairs.run(target, None, PROMPT, tokens=20, temperature=0.8, seed=3).ids
    profile = stats.draft_profile
    assert profile is not None
    assert tuple(profile) == COMPONENTS
    assert all(seconds > 0 for name, seconds in profile.items() if name not in ("decode", "rollback"))
    assert sum(profile.values()) <= stats.total_seconds
    assert profile["draft"] + profile["accept"] <= stats.draft_seconds
    assert stats.report()["draft_profile"] == profile


def test_a_profile_waits_for_what_accepting_leaves_to_be_computed(loaded: Loaded) -> None:
    """Else its time would be counted where it is first needed."""

    class Slow:
        def __init__(self) -> None:
            self.kept: dict[str, list[mx.array]] = {"rows": []}

        def accept(self, accepted: int, bonus: int, hidden: mx.array) -> None:
            product = mx.full((400, 400), 1 / 400)
            for _ in range(20):
                product = product @ product
            self.kept["rows"].append(product)

        prefill = draft = accept

    stats = Stats()
    _, slow, _ = profiled(loaded[0], Slow(), Sampler(4), stats)  # type: ignore[arg-type]
    slow.accept(0, 0, mx.zeros(1))
    assert stats.draft_profile is not None
    assert stats.draft_profile["accept"] > 0.005


def test_nothing_is_watched_unless_asked_for(loaded: Loaded) -> None:
    target, drafter = loaded
    sampler, stats = Sampler(target.vocab_size), Stats()
    off = {"MLXCEL_MTP_GAP_LOG": "0", "MLXCEL_MTP_DRAFT_PROFILE": ""}
    assert watched(target, drafter, sampler, stats, off) == (target, drafter, sampler)
    assert stats.draft_profile is None


def test_both_are_asked_for_on_the_command_line(
    folders: Folders, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [
        "generate",
        "-m",
        str(folders.target),
        "-p",
        "t1 t2",
        "-n",
        "12",
        "--no-chat-template",
        "--profile",
    ]
    pair = [*args, "--draft-model", str(folders.drafter), "--draft-block-size", "3"]
    assert run(pair) == 0
    unwatched = capsys.readouterr()
    assert "MTP" not in unwatched.err
    assert "waited for" not in unwatched.err
    monkeypatch.setenv("MLXCEL_MTP_GAP_LOG", "1")
    monkeypatch.setenv("MLXCEL_MTP_DRAFT_PROFILE", "1")
    assert run(pair) == 0
    watched_run = capsys.readouterr()
    assert watched_run.out == unwatched.out
    assert re.search(r"^MTPGAP\t3(\t-?[0-9.e+-]+){4}$", watched_run.err, re.MULTILINE)
    assert re.search(r"^MTPWALK\t3\t[0-2]\t\d+,\d+\t\d+,\d+,\d+$", watched_run.err, re.MULTILINE)
    for component in COMPONENTS:
        assert re.search(rf"^  {component} +\d+\.\d\d\d s, waited for$", watched_run.err, re.MULTILINE)
    assert run(args) == 0
    alone = capsys.readouterr()
    assert "MTP" not in alone.err
    assert "waited for" not in alone.err


def test_a_network_is_not_waited_for_again(tmp_path: Path, loaded: Loaded) -> None:
    from draftpair.runtime.diagnostics import _arrays

    found = {id(array) for array in _arrays(loaded[0])}
    assert found
    weights = dict(_flat(loaded[0].network.parameters()))
    assert not found & {id(array) for array in weights.values()}


def _flat(tree: Any) -> Any:
    from mlx.utils import tree_flatten

    return tree_flatten(tree)
