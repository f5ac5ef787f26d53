"""Ten wrong pairs that other tools take: each is refused here, and the message names the field that differs.

The two models of a pair have one hidden width, and one vocabulary unless that is what is wrong. Drafters that are
whole pass with the target they were made for, so that the other target is all there is to refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draftpair import api
from fixtures import deepseek_v4, gemma4_assistant, inkling, qwen3_5, tapped

Make = Callable[[Path], Path]
Drafter = Callable[[Path, Path], Path]

VOCAB, HIDDEN = 64, 64


def qwen(**options: Any) -> Make:
    return lambda folder: qwen3_5.write_checkpoint(folder, vocab=VOCAB, hidden=HIDDEN, **options)


def ink(folder: Path) -> Path:
    return inkling.write_checkpoint(folder, vocab=VOCAB, hidden=HIDDEN)


def deepseek(folder: Path) -> Path:
    return deepseek_v4.write_checkpoint(folder, kept="BF16", experts="bf16", vocab=VOCAB, hidden=HIDDEN)


def gemma(folder: Path) -> Path:
    return gemma4_assistant.write_target(folder, vocab=VOCAB, hidden=HIDDEN)


def qwen3(folder: Path) -> Path:
    return tapped.write_target(folder)


def split(target: Path, folder: Path) -> Path:
    api.split_mtp(target, folder)
    return folder


def assistant(target: Path, folder: Path) -> Path:
    return gemma4_assistant.write_drafter(folder, vocab=VOCAB, backbone=HIDDEN)


def dflash(target: Path, folder: Path) -> Path:
    return tapped.write_drafter(folder, "dflash", "old_shape")


# The mask id has a row in either vocabulary.
WIDE_VOCABULARY = tapped.both(tapped.top(vocab_size=1000), tapped.nested(mask_token_id=4))


@dataclass(frozen=True)
class Wrong:
    """A drafter made for `own`, given to `target`; the rule that refuses it, and what its message says."""

    own: Make
    drafter: Drafter
    target: Make
    rule: str
    words: str


WRONG = {
    "qwen3_5_mtp on inkling": Wrong(qwen(), split, ink, "PAIR-FAMILY", "the target is a inkling"),
    "qwen3_5_mtp on gemma4": Wrong(qwen(), split, gemma, "PAIR-FAMILY", "the target is a gemma4"),
    "inkling_mtp on qwen3_5": Wrong(ink, split, qwen(), "PAIR-FAMILY", "the target is a qwen3_5"),
    "another model's qwen3_5_mtp": Wrong(
        qwen(), split, qwen(heads=4, kv_heads=2), "PAIR-GEOMETRY", "num_attention_heads 4 and 2"
    ),
    "deepseek_v4_mtp on qwen3_5": Wrong(deepseek, split, qwen(), "PAIR-FAMILY", "the target is a qwen3_5"),
    "gemma4_assistant on qwen3_5": Wrong(gemma, assistant, qwen(), "PAIR-FAMILY", "the target is a qwen3_5"),
    "dflash of another hidden width": Wrong(
        qwen3, dflash, lambda folder: tapped.write_target(folder, hidden=32), "PAIR-HIDDEN-SIZE", "64 wide"
    ),
    "dflash of another vocabulary": Wrong(
        lambda folder: tapped.write_target(folder, vocab=1000),
        lambda target, folder: tapped.write_drafter(folder, "dflash", "old_shape", WIDE_VOCABULARY),
        lambda folder: tapped.write_target(folder, vocab=16),
        "PAIR-VOCAB-SIZE",
        "16 entries, the drafter's 1000",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_drafter_of_another_model_is_refused(tmp_path: Path, name: str) -> None:
    wrong = WRONG[name]
    own = wrong.own(tmp_path / "own")
    drafter = wrong.drafter(own, tmp_path / "drafter")
    assert api.validate(own, drafter)["verdict"] in ("proven", "compatible")
    assert_refused(wrong.target(tmp_path / "other"), drafter, wrong.rule, wrong.words)


@pytest.mark.parametrize(
    ("change", "rule", "words"),
    [
        pytest.param(
            tapped.both(tapped.nested(target_layer_ids=[0, 2, 9]), tapped.without("num_target_layers")),
            "PAIR-TAPS",
            "9",
            id="tap 9 of 6 layers",
        ),
        pytest.param(
            tapped.nested(target_layer_ids=[0, 2, 9]),
            "DRAFTER-TAPS",
            "target_layer_ids ends with 9",
            id="tap 9 of the 6 layers that the drafter says its target has",
        ),
        pytest.param(
            tapped.nested(target_layer_ids=[2, 1, 0]),
            "DRAFTER-TAPS",
            "target_layer_ids is [2, 1, 0]",
            id="taps in another order",
        ),
        pytest.param(tapped.without("mask_token_id"), "CONFIG-MASK-ID", "mask_token_id", id="no mask id"),
    ],
)
def test_a_drafter_that_would_read_what_is_not_there_is_refused(
    tmp_path: Path, change: tapped.ConfigChange, rule: str, words: str
) -> None:
    target = qwen3(tmp_path / "target")
    assert api.validate(target, dflash(target, tmp_path / "whole"))["verdict"] == "compatible"
    drafter = tapped.write_drafter(tmp_path / "drafter", "dflash", "old_shape", change)
    assert_refused(target, drafter, rule, words)


def assert_refused(target: Path, drafter: Path, rule: str, words: str) -> None:
    report = api.validate(target, drafter)
    assert report["verdict"] == "unsafe"
    found = {f["rule"]: f for f in report["findings"] if f["level"] == "error"}
    assert rule in found, found
    assert words in found[rule]["message"]
    assert found[rule]["where"]
