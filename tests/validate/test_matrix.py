"""Every published drafter with every published target: what was made for each other passes, all else is refused.

The checkpoints are headers only, so nothing is judged by values: what tells the pairs apart is what their files say.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from draftpair.checkpoint import Checkpoint
from draftpair.validate import validate_pair
from draftpair.validate.verdict import Verdict
from fixtures.published import DRAFTERS, HEADS, LOOKALIKES, PAIRS, TARGETS, lookalikes, open_all

Judge = Callable[[str, str], Verdict]

FAMILIES = {
    "Qwen3-Next-80B-A3B-MTP": "qwen3_5_mtp",
    "Qwen3.8-Flash-Next-MTP": "qwen4_exp_mtp",
    "GLM-4.7-Flash-MTP": "glm4_moe_lite_mtp",
    "GLM-4.5-Air-MTP": "glm4_moe_mtp",
    "GLM-5.3-Flash-MTP": "glm5_next_mtp",
    "DeepSeek-V3-MTP": "deepseek_v3_mtp",
    "Nemotron-3.5-Lightning-30B-A3B-MTP": "nemotron_h_mtp",
    "Laguna-XS-2.1-DFlash": "laguna_dflash",
    "Muse-Glimmer-30B-assistant": "muse_glimmer_assistant",
    "LFM2.5-1.2B-Instruct-DSpark": "lfm2_dspark",
    "LFM2.5-2.6B-DSpark": "lfm2_dspark",
    "dspark_qwen3_4b_block7": "deepspec_dspark",
    "dspark_qwen3_8b_block7": "deepspec_dspark",
    **{name: "gemma4_assistant" for name in DRAFTERS if name.endswith("-it-assistant")},
    **{name: "dflash" for name in DRAFTERS if "DFlash" in name and "Laguna" not in name},
    **{name: "qwen3_5_mtp" for name in HEADS if name.startswith(("Qwen3.5-", "Qwen3.6-", "Qwen3.8-27B"))},
}


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, Checkpoint], dict[str, Checkpoint]]:
    return open_all(tmp_path_factory.mktemp("published"))


@pytest.fixture(scope="module")
def judge(checkpoints: tuple[dict[str, Checkpoint], dict[str, Checkpoint]]) -> Judge:
    targets, drafters = checkpoints
    return cache(lambda drafter, target: validate_pair(targets[target], drafters[drafter], values=False))


def own(drafter: str) -> set[str]:
    """The targets that nothing in the files tells from those the drafter was made for."""
    return {like for target in PAIRS[drafter] for like in lookalikes(target)}


def against(verdict: Verdict) -> list[str]:
    """What speaks against a pair."""
    return [
        f"{f.rule} at {f.where}: {f.message}" for f in verdict.findings if f.level in ("error", "warning")
    ]


@pytest.mark.parametrize("drafter", PAIRS)
def test_a_drafter_passes_with_the_target_it_was_made_for(judge: Judge, drafter: str) -> None:
    for target in PAIRS[drafter]:
        verdict = judge(drafter, target)
        assert verdict.pair is not None
        assert verdict.pair["drafter_family"] == FAMILIES[drafter]
        assert (verdict.name, against(verdict)) == ("compatible", [])


@pytest.mark.parametrize("drafter", PAIRS)
def test_every_other_target_is_refused_and_the_field_is_named(judge: Judge, drafter: str) -> None:
    for target in TARGETS.keys() - own(drafter):
        verdict = judge(drafter, target)
        assert verdict.name == "unsafe", (target, against(verdict))
        refused = [f for f in verdict.findings if f.level == "error"]
        for finding in refused:
            assert finding.rule.startswith("PAIR-"), (target, finding)
            assert finding.where is not None, (target, finding)
            assert points_into(verdict, finding.where), (target, finding)
            assert finding.hint, (target, finding)


def points_into(verdict: Verdict, pointer: str) -> bool:
    """Whether the pointer leads to a field of the facts that the verdict rests on."""
    value: object = verdict.facts
    for key in pointer.split("/")[1:]:
        if not isinstance(value, dict) or key not in value:
            return False
        value = value[key]
    return pointer.startswith("/")


@pytest.mark.parametrize("drafter", [name for name in PAIRS if len(own(name)) > 1])
def test_where_generations_share_a_geometry_a_pair_is_never_proven_and_the_report_says_why(
    judge: Judge, drafter: str
) -> None:
    for target in own(drafter):
        verdict = judge(drafter, target)
        assert verdict.name == "compatible", (target, against(verdict))
        (note,) = [f for f in verdict.findings if f.rule == "PAIR-LOOKALIKES"]
        assert note.level == "note"
        assert "one geometry" in note.message
        assert all(like in note.message for like in lookalikes(target)), note.message


def test_the_matrix_has_pairs_of_lookalikes_in_both_sizes() -> None:
    assert {group for group in LOOKALIKES for name in PAIRS if group <= own(name)} == set(LOOKALIKES)


def test_a_drafter_whose_target_is_not_here_is_refused_with_every_one(judge: Judge) -> None:
    (without,) = [name for name, serves in PAIRS.items() if not serves]
    assert {judge(without, target).name for target in TARGETS} == {"unsafe"}
