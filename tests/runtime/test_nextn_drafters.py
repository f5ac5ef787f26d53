"""Heads of GLM and DeepSeek V3: those right by construction, every way to break one, their caches and strictness."""

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
from draftpair.runtime.drafters import _nextn
from draftpair.runtime.interfaces import ALL_ROWS
from fixtures import deepseek_v3
from fixtures.goldens import NEXTN_RECIPES
from fixtures.nextn_copy import CopyPair, write_copy_pair
from fixtures.pairs import load, run, split
from fixtures.split_heads import edit_config

FAMILIES = ("glm4_moe_lite", "glm4_moe", "deepseek_v3")
CARRY = {"glm4_moe_lite": "pre", "glm4_moe": "post", "deepseek_v3": "post"}
VARIANTS: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {},
    "glm4_moe_lite full query": {"q_lora": None},
    "glm4_moe": {},
    "glm4_moe without biases and norms": {"bias": False, "qk_norm": False},
    "deepseek_v3": {},
}
START = [3, 4, 5]

Copying = tuple[CopyPair, Any, Any]
Mutation = Callable[[Any, Any], None]


def greedy(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


def copying(folder: Path, case: str, look_back: bool = False, **options: Any) -> Copying:
    family = case.split()[0]
    options = {"carry": CARRY[family], "layers": 2, **VARIANTS[case], **options}
    written = write_copy_pair(family, folder / "raw", look_back=look_back, **options)
    return written, *load(written.raw, family=f"{family}_mtp")


@pytest.mark.parametrize("look_back", [False, True], ids=["hidden state", "attention"])
@pytest.mark.parametrize("case", VARIANTS)
def test_a_head_that_is_right_is_always_accepted(tmp_path: Path, case: str, look_back: bool) -> None:
    written, target, drafter = copying(tmp_path, case, look_back)
    for width in range(2, 9):
        outcome = run(target, drafter, START, width, tokens=30 if width < 8 else 100)
        assert outcome.stats["draft_acceptance_rate"] == 1, f"width {width}"
        assert outcome.ids == written.continuation(5, len(outcome.ids))


def swap_halves(drafter: Any, _: Any) -> None:
    fusion = drafter.layer.eh_proj
    fusion.weight = mx.roll(fusion.weight, fusion.weight.shape[1] // 2, axis=1)


def flatten_norm(path: str) -> Mutation:
    def mutate(drafter: Any, _: Any) -> None:
        *parents, name = path.split(".")
        module = drafter.layer
        for part in parents:
            module = module[part]
        module[name].weight = mx.ones_like(module[name].weight)

    return mutate


def tap_before_norm(_: Any, target: Any) -> None:
    target.finish = lambda x: (target.network.model.norm(x), x)


def tap_without_gain(_: Any, target: Any) -> None:
    norm = target.network.model.norm
    target.finish = lambda x: (norm(x), norm(x) / norm.weight)


def shift_hidden(axis: int) -> Mutation:
    def mutate(drafter: Any, _: Any) -> None:
        forward = drafter.forward
        drafter.forward = lambda tokens, hidden: forward(tokens, mx.roll(hidden, 1, axis=axis))

    return mutate


def carry_the_other(drafter: Any, _: Any) -> None:
    drafter.carry_after_norm = not drafter.carry_after_norm


def take_nothing_in(drafter: Any, _: Any) -> None:
    drafter.accept = lambda accepted, bonus, hidden: None


def forget_positions(drafter: Any, _: Any) -> None:
    attention = drafter.layer.mtp_block.self_attn
    rope = attention.rope
    attention.rope = lambda x, offset: rope(x, 0)


def turn_the_other_pairs(drafter: Any, _: Any) -> None:
    rope = drafter.layer.mtp_block.self_attn.rope
    rope.traditional = not rope.traditional


def flatten_scores(drafter: Any, _: Any) -> None:
    drafter.layer.mtp_block.self_attn.scale = 0.0


def after_accept(change: Callable[[Any], None]) -> Mutation:
    def mutate(drafter: Any, _: Any) -> None:
        accept = drafter.accept

        def changed(accepted: int, bonus: int, hidden: mx.array) -> None:
            accept(accepted, bonus, hidden)
            change(drafter)

        drafter.accept = changed

    return mutate


def lose_an_entry(drafter: Any) -> None:
    drafter.caches[0].trim(1)


def repeat_entries(drafter: Any) -> None:
    cache = drafter.caches[0]
    cache.update_and_fetch(
        *(part[..., cache.offset - 2 : cache.offset, :] for part in (cache.keys, cache.values))
    )


FROM_HIDDEN: dict[str, Mutation] = {
    "halves of eh_proj swapped": swap_halves,
    "enorm left out": flatten_norm("enorm"),
    "hnorm left out": flatten_norm("hnorm"),
    "shared_head_norm left out": flatten_norm("shared_head_norm"),
    "tap before the final norm": tap_before_norm,
    "tap without the final norm's gains": tap_without_gain,
    "hidden state of the row before": shift_hidden(axis=1),
    "hidden state scrambled": shift_hidden(axis=-1),
    "the other state carried": carry_the_other,
    "verified block not taken in": take_nothing_in,
}
FROM_ATTENTION: dict[str, Mutation] = {
    "norm before attention left out": flatten_norm("mtp_block.input_layernorm"),
    "rotary positions from 0 in every call": forget_positions,
    "other rotary pairs": turn_the_other_pairs,
    "scale left out": flatten_scores,
    "an entry of the cache lost a round": after_accept(lose_an_entry),
    "two entries of the cache repeated a round": after_accept(repeat_entries),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mutation", [*FROM_HIDDEN, *FROM_ATTENTION])
def test_any_wrong_turn_costs_acceptance_and_no_token(tmp_path: Path, mutation: str, family: str) -> None:
    written, target, drafter = copying(tmp_path, family, look_back=mutation in FROM_ATTENTION)
    {**FROM_HIDDEN, **FROM_ATTENTION}[mutation](drafter, target)
    outcome = run(target, drafter, START, 4, tokens=30)
    assert outcome.stats["draft_acceptance_rate"] < 0.7
    assert outcome.ids == written.continuation(5, 30)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_trained_on_the_other_carry_shows_at_the_second_proposal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    other = {"pre": "post", "post": "pre"}[CARRY[family]]
    _, target, drafter = copying(tmp_path, family, carry=other)

    def rate(width: int) -> float:
        return float(run(target, drafter, START, width, tokens=13).stats["draft_acceptance_rate"])

    assert rate(2) == 1
    assert rate(4) < 0.7
    monkeypatch.setattr(type(drafter), "carry_after_norm", other == "post")
    assert rate(4) == 1


@pytest.fixture(scope="module", params=["glm4_moe", "deepseek_v3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Copying:
    return copying(tmp_path_factory.mktemp("pair"), request.param)


def started(pair: Copying) -> mx.array:
    """The states of a verified block [1, 4, H] after the prompt, the bonus token 6 and three drafts."""
    _, target, drafter = pair
    target.reset()
    _, hidden = target.prefill(START, ALL_ROWS)
    drafter.reset()
    drafter.prefill(START, hidden, 6)
    assert drafter.caches[0].offset == len(START)
    states: mx.array = target.verify([6, *drafter.draft(3, greedy)])[1]
    return states


@pytest.mark.parametrize(("accepted", "kept"), [(0, 0), (1, 1), (2, 2), (3, 2)])
def test_entries_of_accepted_drafts_are_kept_and_only_the_rest_is_forwarded(
    pair: Copying, monkeypatch: pytest.MonkeyPatch, accepted: int, kept: int
) -> None:
    drafter = pair[2]
    verified = started(pair)  # leaves entries of the first two drafts: the third is never fed back
    cache, drafts, begin, end = drafter.caches[0], drafter.drafts, len(START), len(START) + kept
    before = [np.array(part[:, :, begin:end]) for part in (cache.keys, cache.values)]
    calls, forward = [], drafter.forward

    def spy(tokens: mx.array, states: mx.array) -> mx.array:
        calls.append((cache.offset, tokens.tolist(), np.array(states)))
        output: mx.array = forward(tokens, states)
        return output

    monkeypatch.setattr(drafter, "forward", spy)
    drafter.accept(accepted, 9, verified)
    [(offset, tokens, states)] = calls
    assert (offset, tokens) == (end, [[*drafts[kept:accepted], 9]])
    assert cache.offset == len(START) + accepted + 1
    np.testing.assert_array_equal(states, np.array(verified)[:, kept : accepted + 1])
    after = [np.array(part[:, :, begin:end]) for part in (cache.keys, cache.values)]
    np.testing.assert_equal(after, before)


def test_each_proposal_is_picked_from_its_own_logits_without_waiting(pair: Copying) -> None:
    _, _, drafter = pair
    started(pair)
    drafter.accept(0, 9, mx.zeros((1, 4, 64)))
    second, shapes = [], []

    def pick(logits: mx.array) -> mx.array:
        shapes.append(logits.shape)
        second.append(mx.argsort(logits, axis=-1)[:, -2])
        return second[-1]

    assert drafter.draft(3, pick) == mx.concatenate(second).tolist()
    assert shapes == [(1, 32)] * 3
    assert drafter.draft(0, pick) == []


def test_chunks_of_a_prefill_leave_the_seed_and_cache_of_one_forward(
    pair: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, target, drafter = pair
    prompt = [1, 2, 3, 5, 8, 13, 21, 30, 15, 26, 18, 4]
    target.reset()
    _, hidden = target.prefill(prompt, ALL_ROWS)

    def prefilled() -> list[Any]:
        drafter.reset()
        drafter.prefill(prompt, hidden, 7)
        [cache] = drafter.caches
        sides = [side[:, :, : cache.offset] for side in (cache.keys, cache.values)]
        return [np.array(part) for part in (drafter.seed, *sides)]

    whole = prefilled()
    for chunk in (3, 4):
        monkeypatch.setattr(_nextn, "PREFILL_CHUNK", chunk)
        for part, expected in zip(prefilled(), whole, strict=True):
            np.testing.assert_allclose(part, expected, rtol=0, atol=1e-5)


def test_tokens_outside_the_vocabulary_never_reach_mlx(pair: Copying) -> None:
    _, target, drafter = pair
    target.reset()
    _, hidden = target.prefill(START, ALL_ROWS)
    drafter.reset()
    with pytest.raises(ToolError, match=r"token id 32 at position 2 .* the drafter's vocabulary of 32"):
        drafter.prefill(START, hidden, 32)
    with pytest.raises(RuntimeError, match=r"draft\(\) before prefill\(\)"):
        drafter.draft(1, greedy)


def raw(folder: Path, family: str, **options: Any) -> Path:
    if family == "deepseek_v3":
        options = {"kept": "F32", **options}
    written: Path = NEXTN_RECIPES[family].write_checkpoint(folder / "raw", tokenizer=False, **options)
    return written


@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantized_head_is_packed_where_scales_are_stored(tmp_path: Path, family: str) -> None:
    written = raw(tmp_path, family)
    drafter_folder = split(written, tmp_path / "drafter", q_bits=4, q_group_size=32)
    target, drafter = load(written, drafter_folder, family=f"{family}_mtp")
    block = dict(tree_flatten(drafter.layer.mtp_block.parameters()))  # type: ignore[attr-defined]
    assert block["mlp.switch_mlp.up_proj.weight"].dtype == mx.uint32
    assert block["mlp.gate.weight"].dtype == mx.float32
    assert drafter.layer.embed_tokens.scales.dtype == mx.float32  # type: ignore[attr-defined]
    plain = run(target, None, [1, 2, 3], tokens=20).ids
    assert run(target, drafter, [1, 2, 3], 3, tokens=20).ids == plain


@pytest.mark.parametrize("family", FAMILIES)
def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path, family: str) -> None:
    written = raw(tmp_path, family)
    folder = split(written, tmp_path / "drafter")
    path, prefix = str(folder / "model.safetensors"), "model" if family == "glm4_moe_lite" else "layers.0"
    weights = dict(mx.load(path))
    del weights[f"{prefix}.hnorm.weight"]
    weights[f"{prefix}.surprise"] = mx.zeros((2,))
    weights[f"{prefix}.enorm.weight"] = mx.zeros((3,))
    mx.save_safetensors(path, weights)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(Refused) as refusal:
        load(written, folder, family=f"{family}_mtp")
    for part in (
        "hnorm.weight is missing",
        "surprise is unexpected",
        "enorm.weight has shape [3], expected [",
    ):
        assert f"{prefix}.{part}" in refusal.value.message


@pytest.mark.parametrize(
    ("family", "key"),
    [("glm4_moe_lite", "kv_lora_rank"), ("glm4_moe", "head_dim"), ("deepseek_v3", "v_head_dim")],
)
@pytest.mark.parametrize("value", [None, 0, "64", 1.5])
def test_a_config_without_a_size_is_refused(tmp_path: Path, family: str, key: str, value: Any) -> None:
    written = raw(tmp_path, family)
    folder = split(written, tmp_path / "drafter")
    edit_config(folder, lambda config: config.update({key: value}))
    with pytest.raises(Refused, match=key):
        load(written, folder, family=f"{family}_mtp")


def test_a_config_that_mlx_lm_cannot_use_is_refused(tmp_path: Path) -> None:
    written = raw(tmp_path, "glm4_moe")
    folder = split(written, tmp_path / "drafter")
    edit_config(folder, lambda config: config.pop("n_group"))
    with pytest.raises(Refused, match=r"mlx-lm cannot use its config\.json.*n_group"):
        load(written, folder, family="glm4_moe_mtp")


@pytest.mark.parametrize("key", ["attention_bias", "use_qk_norm"])
def test_the_tensors_decide_about_biases_and_norms(tmp_path: Path, key: str) -> None:
    written = raw(tmp_path, "glm4_moe")
    folder = split(written, tmp_path / "drafter")
    edit_config(folder, lambda config: config.update({key: False}))
    target, drafter = load(written, folder, family="glm4_moe_mtp")
    assert run(target, drafter, START, 3, tokens=4).ids == run(target, None, START, tokens=4).ids


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_head_of_several_layers_is_refused(tmp_path: Path, family: str) -> None:
    with pytest.raises(Refused, match="the head has 2 layers"):
        load(raw(tmp_path, family, depth=2), family=f"{family}_mtp")


def test_a_head_with_an_indexer_is_refused(tmp_path: Path) -> None:
    newer = deepseek_v3.write_checkpoint(tmp_path / "newer", kept="F32", tokenizer=False, index_heads=4)
    folder = split(newer, tmp_path / "drafter")
    with pytest.raises(Refused, match="the head of a deepseek_v32 target"):
        load(raw(tmp_path, "deepseek_v3"), folder, family="deepseek_v3_mtp")


@pytest.mark.parametrize(
    ("options", "other"),
    [
        ({}, {"hidden": 128}),
        ({}, {"vocab": 48}),
        ({"own_head": False}, {"vocab": 80}),
        ({"own_embedding": False}, {"vocab": 80}),
    ],
)
def test_a_target_that_does_not_fit_is_refused(
    tmp_path: Path, options: dict[str, Any], other: dict[str, Any]
) -> None:
    folder = split(raw(tmp_path / "own", "glm4_moe", **options), tmp_path / "drafter")
    with pytest.raises(Refused, match=r"hidden states of 64 and a vocabulary of 64; the target has"):
        load(raw(tmp_path / "other", "glm4_moe", **other), folder, family="glm4_moe_mtp")


def test_a_head_with_tables_of_its_own_runs_on_a_target_with_a_longer_vocabulary(tmp_path: Path) -> None:
    folder = split(raw(tmp_path / "own", "glm4_moe"), tmp_path / "drafter")
    target, drafter = load(raw(tmp_path / "other", "glm4_moe", vocab=80), folder, family="glm4_moe_mtp")
    assert target.vocab_size == 80
    assert drafter.vocab_size == 64


def test_a_head_that_borrows_needs_its_target(tmp_path: Path) -> None:
    from draftpair.runtime.drafters.glm4_moe_mtp import Drafter

    folder = split(raw(tmp_path, "glm4_moe", own_embedding=False), tmp_path / "drafter")
    drafter = Drafter.load(open_checkpoint(folder), {})
    with pytest.raises(RuntimeError, match=r"before bind\(\)"):
        drafter.prefill(START, mx.zeros((1, 3, 64)), 6)
