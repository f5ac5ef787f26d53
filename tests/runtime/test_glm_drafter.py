"""The glm4_moe_lite_mtp drafter: transformers' numbers, a head whose every proposal is right, and its strictness."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Refused, ToolError
from draftpair.runtime.drafters.glm4_moe_lite_mtp import Drafter
from draftpair.runtime.interfaces import Target
from draftpair.runtime.load import _load_drafter
from fixtures.glm4_moe_lite import write_checkpoint
from fixtures.glm4_moe_lite_copy import CopyPair, write_copy_pair
from fixtures.goldens import as_array, load_goldens, rebuild
from fixtures.pairs import FAMILY, load, run, split
from fixtures.weights import write_json

GOLDENS = load_goldens()
TOLERANCE = {"rtol": 0, "atol": 1e-4}
START = [3, 4, 5]

Golden = dict[str, Any]


@pytest.fixture(scope="module", params=GOLDENS)
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Golden, Target, Any]:
    golden = GOLDENS[request.param]
    return golden, *load(rebuild(golden, tmp_path_factory.mktemp("golden") / "raw"))


def test_target_logits_and_hidden_states_are_those_of_transformers(
    recorded: tuple[Golden, Target, Any],
) -> None:
    golden, target, _ = recorded
    logits = np.array(target.network(mx.array([golden["prompt"]])))[0, golden["logit_rows"]]
    np.testing.assert_allclose(logits, as_array(golden["target"]["logits"]), **TOLERANCE)
    target.reset()
    last, hidden = target.prefill(golden["prompt"])
    np.testing.assert_allclose(np.array(hidden)[0], as_array(golden["target"]["hidden"]), **TOLERANCE)
    np.testing.assert_allclose(np.array(last)[0], as_array(golden["target"]["logits"])[-1], **TOLERANCE)


def test_greedy_ids_are_those_of_transformers(recorded: tuple[Golden, Target, Any]) -> None:
    golden, target, drafter = recorded
    count = len(golden["greedy"])
    assert run(target, None, golden["prompt"], tokens=count).ids == golden["greedy"]
    for width in (2, 5):
        assert run(target, drafter, golden["prompt"], width, tokens=count).ids == golden["greedy"]


def test_head_states_and_logits_are_those_of_transformers(recorded: tuple[Golden, Target, Any]) -> None:
    golden, target, drafter = recorded
    target.reset()
    _, hidden = target.prefill(golden["prompt"])
    drafter.reset()
    head, model = golden["head"], drafter.network.model
    before = model(mx.array([head["tokens"]]), hidden, drafter.cache)
    after = model.shared_head_norm(before)
    logits = drafter.network.lm_head(after)
    np.testing.assert_allclose(np.array(before)[0], as_array(head["before_norm"]), **TOLERANCE)
    np.testing.assert_allclose(np.array(after)[0], as_array(head["after_norm"]), **TOLERANCE)
    rows = np.array(logits)[0, golden["logit_rows"]]
    np.testing.assert_allclose(rows, as_array(head["logits"]), **TOLERANCE)


@pytest.mark.parametrize(("carry", "after_norm"), [("pre", False), ("post", True)])
def test_chained_proposals_are_those_of_transformers(
    recorded: tuple[Golden, Target, Any], monkeypatch: pytest.MonkeyPatch, carry: str, after_norm: bool
) -> None:
    golden, target, drafter = recorded
    monkeypatch.setattr(Drafter, "CARRY_AFTER_NORM", after_norm)
    target.reset()
    _, hidden = target.prefill(golden["prompt"])
    drafter.reset()
    drafter.prefill(golden["prompt"], hidden, golden["head"]["tokens"][-1])
    expected = golden["chain"][carry]["drafts"]
    assert drafter.draft(len(expected)) == expected


@pytest.fixture
def copying(tmp_path: Path) -> tuple[CopyPair, Target, Any]:
    written = write_copy_pair(tmp_path / "raw")
    return written, *load(written.raw)


def rate(target: Target, drafter: Any, width: int = 4) -> float:
    return float(run(target, drafter, START, width, tokens=13).stats["draft_acceptance_rate"])


def swap_halves(drafter: Any, _: Target) -> None:
    layer = drafter.network.model.eh_proj
    layer.weight = mx.roll(layer.weight, layer.weight.shape[1] // 2, axis=1)


def flatten_norm(name: str) -> Callable[[Any, Target], None]:
    def mutate(drafter: Any, _: Target) -> None:
        norm = drafter.network.model[name]
        norm.weight = mx.ones_like(norm.weight)

    return mutate


def tap_before_norm(_: Any, target: Target) -> None:
    target.tap = "pre"  # type: ignore[attr-defined]


def shift_hidden(drafter: Any, _: Target) -> None:
    forward = drafter._forward
    drafter._forward = lambda tokens, hidden: forward(tokens, mx.roll(hidden, 1, axis=-1))


def keep_rejected(drafter: Any, _: Target) -> None:
    drafter.accept = lambda accepted, bonus, hidden: None


MUTATIONS = {
    "halves of eh_proj swapped": swap_halves,
    "enorm left out": flatten_norm("enorm"),
    "hnorm left out": flatten_norm("hnorm"),
    "shared_head_norm left out": flatten_norm("shared_head_norm"),
    "tap before the final norm": tap_before_norm,
    "hidden state scrambled": shift_hidden,
    "verified block not taken in": keep_rejected,
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_any_wrong_turn_costs_acceptance_and_no_token(
    copying: tuple[CopyPair, Target, Any], mutate: Callable[[Any, Target], None]
) -> None:
    written, target, drafter = copying
    mutate(drafter, target)
    outcome = run(target, drafter, START, 4, tokens=13)
    assert outcome.stats["draft_acceptance_rate"] < 0.7
    assert outcome.ids == written.continuation(5, 13)


def test_the_untouched_head_is_always_right(copying: tuple[CopyPair, Target, Any]) -> None:
    assert rate(*copying[1:]) == 1


def test_a_head_trained_on_the_other_carry_shows_at_the_second_proposal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = load(write_copy_pair(tmp_path / "raw", carry="post").raw)
    assert rate(target, drafter, width=2) == 1
    assert rate(target, drafter, width=4) < 0.7
    monkeypatch.setattr(Drafter, "CARRY_AFTER_NORM", True)
    assert rate(target, drafter, width=4) == 1


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_the_cache_holds_one_entry_for_every_verified_token(
    copying: tuple[CopyPair, Target, Any], accepted: int
) -> None:
    _, target, drafter = copying
    target.reset()
    _, hidden = target.prefill(START)
    drafter.reset()
    drafter.prefill(START, hidden, 6)
    assert drafter.cache.offset == len(START)
    drafts = drafter.draft(3)
    _, verified = target.verify([6, *drafts])
    drafter.accept(accepted, 9, verified)
    assert drafter.cache.offset == len(START) + accepted + 1


@pytest.mark.parametrize(("accepted", "kept"), [(0, 0), (1, 1), (2, 2), (3, 2)])
def test_entries_of_accepted_drafts_are_kept_and_only_the_rest_is_forwarded(
    copying: tuple[CopyPair, Target, Any], accepted: int, kept: int
) -> None:
    _, target, drafter = copying
    target.reset()
    _, hidden = target.prefill(START)
    drafter.reset()
    drafter.prefill(START, hidden, 6)
    drafts = drafter.draft(3)  # leaves entries of the first two: the third is never fed back
    _, verified = target.verify([6, *drafts])
    begin, end = len(START), len(START) + kept
    before = [np.array(part[:, :, begin:end]) for part in (drafter.cache.keys, drafter.cache.values)]
    calls, forward = [], drafter._forward

    def spy(tokens: mx.array, states: mx.array) -> mx.array:
        calls.append((drafter.cache.offset, tokens.tolist(), np.array(states)))
        return forward(tokens, states)

    drafter._forward = spy
    drafter.accept(accepted, 9, verified)
    [(offset, tokens, states)] = calls
    assert (offset, tokens) == (end, [[*drafts[kept:accepted], 9]])
    np.testing.assert_array_equal(states, np.array(verified)[:, kept : accepted + 1])
    after = [np.array(part[:, :, begin:end]) for part in (drafter.cache.keys, drafter.cache.values)]
    np.testing.assert_equal(after, before)


@pytest.mark.parametrize("chunk", [3, 4])
def test_chunks_of_a_prefill_leave_the_seed_and_cache_of_one_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    target, drafter = load(write_checkpoint(tmp_path / "raw", tokenizer=False))
    prompt = [1, 2, 3, 5, 8, 13, 21, 34, 55, 26, 18, 44]
    _, hidden = target.prefill(prompt)

    def prefilled() -> list[Any]:
        drafter.reset()
        drafter.prefill(prompt, hidden, 7)
        cache, end = drafter.cache, drafter.cache.offset
        return [np.array(part) for part in (drafter.seed, cache.keys[:, :, :end], cache.values[:, :, :end])]

    whole = prefilled()
    monkeypatch.setattr("draftpair.runtime.drafters.glm4_moe_lite_mtp.PREFILL_CHUNK", chunk)
    for part, expected in zip(prefilled(), whole, strict=True):
        np.testing.assert_allclose(part, expected, rtol=0, atol=1e-5)


def test_a_long_prompt_is_taken_in_by_chunks(
    copying: tuple[CopyPair, Target, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    written, target, drafter = copying
    monkeypatch.setattr("draftpair.runtime.drafters.glm4_moe_lite_mtp.PREFILL_CHUNK", 4)
    outcome = run(target, drafter, written.continuation(5, 11), 3, tokens=10)
    assert outcome.stats["draft_acceptance_rate"] == 1


def test_a_bonus_token_outside_the_drafters_vocabulary_never_reaches_mlx(
    copying: tuple[CopyPair, Target, Any],
) -> None:
    _, target, drafter = copying
    target.reset()
    _, hidden = target.prefill(START)
    with pytest.raises(ToolError, match=r"token id 32 at position 2 .* the drafter's vocabulary of 32"):
        drafter.prefill(START, hidden, 32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return split(write_checkpoint(tmp_path / "raw", tokenizer=False), tmp_path / "drafter")


def test_a_quantized_head_is_packed_where_scales_are_stored(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", tokenizer=False)
    target, drafter = load(raw, split(raw, tmp_path / "drafter", q_bits=4, q_group_size=32))
    parameters = dict(tree_flatten(drafter.network.parameters()))
    assert parameters["model.mtp_block.mlp.switch_mlp.up_proj.weight"].dtype == mx.uint32
    assert parameters["model.mtp_block.mlp.gate.weight"].dtype == mx.float32
    assert parameters["model.embed_tokens.scales"].dtype == mx.float32
    plain = run(target, None, [1, 2, 3]).ids
    assert run(target, drafter, [1, 2, 3], 3).ids == plain


def edit(folder: Path, **changes: Any) -> None:
    write_json(folder / "config.json", open_checkpoint(folder).config.raw | changes)


def test_packing_that_differs_from_the_config_is_refused(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", tokenizer=False)
    drafter = split(raw, tmp_path / "drafter", q_bits=4, q_group_size=32)
    edit(drafter, quantization={"bits": 8, "group_size": 32, "mode": "affine"})
    with pytest.raises(Refused, match=r"packed with 4 bits in groups of 32, config\.json says 8 bits"):
        _load_drafter(open_checkpoint(drafter), FAMILY, environ={})
    edit(drafter, quantization=None, quantization_config=None)
    with pytest.raises(Refused, match=r"config\.json has no quantization"):
        _load_drafter(open_checkpoint(drafter), FAMILY, environ={})


def test_missing_unexpected_and_misshapen_tensors_are_named(folder: Path) -> None:
    path = str(folder / "model.safetensors")
    weights = dict(mx.load(path))
    del weights["model.hnorm.weight"]
    weights["model.surprise"] = mx.zeros((2,))
    weights["model.enorm.weight"] = mx.zeros((3,))
    mx.save_safetensors(path, weights)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(Refused) as refusal:
        _load_drafter(open_checkpoint(folder), FAMILY, environ={})
    for part in (
        "model.hnorm.weight is missing",
        "model.surprise is unexpected",
        "model.enorm.weight has shape [3], expected [64]",
    ):
        assert part in refusal.value.message


def test_a_config_without_a_size_is_refused(folder: Path) -> None:
    raw = open_checkpoint(folder).config.raw
    edit(folder, text_config={**raw["text_config"], "kv_lora_rank": None})
    with pytest.raises(Refused, match="kv_lora_rank"):
        _load_drafter(open_checkpoint(folder), FAMILY, environ={})
