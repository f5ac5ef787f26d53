"""Gemma 4 pairs: no run differs from plain decoding, and a head that is right by construction is always accepted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from draftpair.runtime.drafters.gemma4_assistant import Drafter
from draftpair.runtime.targets.gemma4 import FULL, SLIDING, Target
from draftpair.runtime.window import Rows
from fixtures.gemma4_assistant import write_drafter, write_target
from fixtures.gemma4_copy import CopyPair, write_copy_pair
from fixtures.pairs import Outcome, load, run

FAMILY = "gemma4_assistant"
SEEDS = range(20)
TARGET: dict[str, Any] = {
    "vocab": 16, "hidden": 32, "intermediate": 32, "types": (SLIDING, FULL), "shared": 0, "heads": 2, "groups": 1,
    "window": 8, "tied": False, "alone": True,
}  # fmt: skip
ASSISTANT: dict[str, Any] = {
    "vocab": 16, "hidden": 32, "backbone": 32, "intermediate": 32, "types": (SLIDING, FULL), "heads": 2, "groups": 1,
    "clusters": 4, "window": 8,
}  # fmt: skip
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "dense head": ({}, {}, "float32"),
    "ordered head, inputs by layer, shared layers": (
        {"types": (SLIDING, FULL) * 2, "shared": 2, "by_layer": 8, "wide": True, "softcap": 30.0},
        {"ordered": True},
        "float32",
    ),
    "keys are values, bfloat16": ({"keys_are_values": True, "global_groups": 1}, {"tied": False}, "bfloat16"),
    "experts": ({"experts": 8}, {}, "float32"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_no_run_differs_from_plain_decoding(tmp_path: Path, name: str) -> None:
    options, drafter_options, dtype = PAIRS[name]
    accepted = rejected = 0
    for seed in SEEDS:
        place = tmp_path / str(seed)
        target, drafter = load(
            write_target(place / "target", seed=seed, tokenizer=False, **TARGET | options),
            write_drafter(place / "drafter", seed=seed, tokenizer=False, **ASSISTANT | drafter_options),
            family=FAMILY,
            dtype=dtype,
        )
        width, prompt = 2 + seed % 7, [(5 * i + seed) % 16 for i in range(5 if seed % 2 else 30)]
        sampling: dict[str, Any] = {"temperature": 1.0, "seed": seed} if seed % 4 < 2 else {}
        outcome = run(target, drafter, prompt, width, **sampling)
        assert outcome.ids == run(target, None, prompt, **sampling).ids, f"seed {seed}, {sampling}"
        assert outcome.stats["draft_error"] is None
        accepted += outcome.stats["accepted"]
        rejected += outcome.stats["proposed"] - outcome.stats["accepted"]
    assert accepted > 0
    assert rejected > 0


def run_copy(
    pair: CopyPair, target: Any, drafter: Any, width: int, length: int = 12, tokens: int = 64
) -> Outcome:
    prompt = [3, *pair.continuation(3, length - 1)]
    outcome = run(target, drafter, prompt, width, tokens=tokens)
    assert outcome.ids == pair.continuation(prompt[-1], tokens)
    assert outcome.stats["draft_error"] is None
    return outcome


def acceptance(outcome: Outcome) -> float:
    return float(outcome.stats["accepted"] / outcome.stats["proposed"])


@pytest.mark.parametrize(
    ("head", "widths"),
    [({}, range(2, 9)), ({"ordered": True}, (4, 8)), ({"tied": False}, (4, 8))],
    ids=["dense", "ordered", "untied"],
)
def test_a_head_that_is_right_by_construction_is_always_accepted(
    tmp_path: Path, head: dict[str, bool], widths: Iterable[int]
) -> None:
    pair = write_copy_pair(tmp_path, seed=1, **head)
    target, drafter = load(pair.target, pair.drafter, family=FAMILY)
    for width in widths:
        for length in (5, 30):
            outcome = run_copy(pair, target, drafter, width, length, tokens=80)
            assert acceptance(outcome) == 1, f"width {width}, prompt of {length}"


Break = Callable[[Any, Any, pytest.MonkeyPatch], None]


def without_norm(name: str) -> Break:
    def broken(target: Target, drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
        found = [module for path, module in drafter.network.named_modules() if path.endswith(name)]
        assert found
        for module in found:
            module.weight = mx.ones_like(module.weight)

    return broken


def swapped_inputs(target: Target, drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
    halves = mx.split(drafter.network.pre_projection.weight, 2, axis=1)
    drafter.network.pre_projection.weight = mx.concatenate(halves[::-1], axis=1)


def tap_before_the_norm(target: Target, drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
    start, gain = drafter._start_from, target.text.model.norm.weight
    patch.setattr(drafter, "_start_from", lambda bonus, carry: start(bonus, carry / gain))


def embedding_without_scale(target: Target, drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
    step, width = drafter.network.__class__.__call__, drafter.args.backbone

    def broken(network: Any, embedded: mx.array, *others: Any) -> Any:
        return step(network, embedded / width**0.5, *others)

    patch.setattr(drafter.network.__class__, "__call__", broken)


def shifted_position(by: int) -> Break:
    def broken(target: Target, drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Drafter, "position", property(lambda self: target.offset - 1 + by))

    return broken


def moving_position(target: Target, drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
    step, taken = drafter.step, [0]

    def moving(token: mx.array, carry: mx.array, shared: Any, position: mx.array) -> Any:
        taken[0] += 1
        return step(token, carry, shared, position + (taken[0] - 1) % 3)

    patch.setattr(drafter, "step", moving)


def usual_attention_scale(target: Target, drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
    for layer in drafter.network.model.layers:
        layer.self_attn.scale = layer.self_attn.head_dim**-0.5


def no_layer_scalars(target: Target, drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
    for layer in drafter.network.model.layers:
        layer.layer_scalar = mx.ones((1,))


def shared_kv(change: Callable[[str, Rows], Rows]) -> Break:
    def broken(target: Target, drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
        shared = target.shared_kv
        patch.setattr(
            target, "shared_kv", lambda: {kind: change(kind, rows) for kind, rows in shared().items()}
        )

    return broken


def stale_keys_and_values(target: Target, drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
    first: list[Any] = []
    shared = target.shared_kv

    def once() -> Any:
        first.extend([] if first else [shared()])
        return first[0]

    patch.setattr(target, "shared_kv", once)


def carry_of_the_first_row(target: Target, drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
    accept = drafter.accept
    patch.setattr(drafter, "accept", lambda accepted, bonus, hidden: accept(0, bonus, hidden))


def no_carry_between_steps(target: Target, drafter: Drafter, patch: pytest.MonkeyPatch) -> None:
    drafter.network.post_projection.weight = mx.zeros_like(drafter.network.post_projection.weight)


BROKEN: dict[str, Break] = {
    "input norm": without_norm("input_layernorm"),
    "norm after attention": without_norm("post_attention_layernorm"),
    "norm before the MLP": without_norm("pre_feedforward_layernorm"),
    "norm after the MLP": without_norm("post_feedforward_layernorm"),
    "query norm": without_norm("q_norm"),
    "final norm": without_norm("model.norm"),
    "order of the inputs": swapped_inputs,
    "tap": tap_before_the_norm,
    "scale of the embedding": embedding_without_scale,
    "position one too far": shifted_position(1),
    "position one short": shifted_position(-1),
    "position that moves": moving_position,
    "attention scale": usual_attention_scale,
    "layer scalars": no_layer_scalars,
    "keys for values": shared_kv(lambda kind, rows: rows[::-1]),
    "two rows short": shared_kv(lambda kind, rows: (rows[0][:, :, :-2], rows[1][:, :, :-2])),
    "two rows short in the window": shared_kv(
        lambda kind, rows: (rows[0][:, :, :-2], rows[1][:, :, :-2]) if kind == SLIDING else rows
    ),
    "keys and values of the first round": stale_keys_and_values,
    "hidden state of the first row": carry_of_the_first_row,
    "carry": no_carry_between_steps,
}


@pytest.mark.parametrize("name", BROKEN)
def test_every_ingredient_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pair = write_copy_pair(tmp_path, seed=1)
    target, drafter = load(pair.target, pair.drafter, family=FAMILY)
    assert acceptance(run_copy(pair, target, drafter, 4)) == 1
    BROKEN[name](target, drafter, monkeypatch)
    assert acceptance(run_copy(pair, target, drafter, 4)) < 0.7
