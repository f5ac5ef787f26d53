"""The gemma4 assistants: steps as transformers takes them, the life of a round, heads, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Refused, ToolError
from draftpair.runtime.drafters import gemma4_assistant, gemma4_unified_assistant
from draftpair.runtime.load import load_drafter
from draftpair.runtime.targets import gemma4
from fixtures.gemma4_assistant import (
    FULL,
    RUN_GOLDEN,
    RUN_VARIANTS,
    SLIDING,
    write_drafter,
    write_run_variant,
    write_target,
)
from fixtures.glm4_moe_lite import write_target as write_other_target
from fixtures.goldens import as_array, load_goldens
from fixtures.pairs import load, run
from fixtures.weights import sha256_of_weights, write_json

FAMILY = "gemma4_assistant"
GOLDENS = load_goldens(RUN_GOLDEN)
TARGET: dict[str, Any] = {
    "vocab": 32, "hidden": 32, "intermediate": 32, "types": (SLIDING, FULL), "shared": 0, "window": 8, "tied": False,
    "alone": True,
}  # fmt: skip
ASSISTANT: dict[str, Any] = {
    "vocab": 32, "hidden": 32, "backbone": 32, "intermediate": 32, "types": (SLIDING, FULL), "clusters": 8, "window": 8,
}  # fmt: skip
PROMPT = [(7 * i + 1) % 32 for i in range(12)]

Pair = tuple[gemma4.Target, gemma4_assistant.Drafter]


def build(folder: Path, target: dict[str, Any] | None = None, **options: Any) -> Pair:
    places = (
        write_target(folder / "target", tokenizer=False, **TARGET | (target or {})),
        write_drafter(folder / "drafter", tokenizer=False, **ASSISTANT | options),
    )
    made = load(*places, family=FAMILY, dtype="float32")
    assert isinstance(made[0], gemma4.Target)
    assert isinstance(made[1], gemma4_assistant.Drafter)
    return made[0], made[1]


def best(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


def begin(pair: Pair, prompt: list[int] = PROMPT) -> int:
    """Prefill both; the bonus token."""
    target, drafter = pair
    target.reset()
    logits, hidden = target.prefill(prompt, drafter.prompt_rows)
    bonus = int(best(logits).item())
    drafter.reset()
    drafter.prefill(prompt, hidden, bonus)
    return bonus


@pytest.mark.parametrize("name", RUN_VARIANTS)
def test_steps_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    golden = GOLDENS[name]
    places = write_run_variant(name, tmp_path)
    assert [sha256_of_weights(place)["model.safetensors"] for place in places] == golden["weights_sha256"]
    target, drafter = load(*places, family=FAMILY, dtype="float32")
    assert isinstance(target, gemma4.Target)
    assert isinstance(drafter, gemma4_assistant.Drafter)
    assert begin((target, drafter), golden["prompt"]) == golden["bonus"]
    token, carry = mx.array([golden["bonus"]]), drafter.carry
    assert carry is not None
    for expected in golden["steps"]:
        logits, carry = drafter.step(token, carry, target.shared_kv(), mx.array(len(golden["prompt"]) - 1))
        np.testing.assert_allclose(np.array(logits)[0], as_array(expected["logits"]), atol=1e-4, rtol=0)
        np.testing.assert_allclose(np.array(carry)[0, 0], as_array(expected["carry"]), atol=1e-4, rtol=0)
        token = best(logits)
        assert int(token.item()) == expected["token"]
    assert drafter.draft(3, best) == [step["token"] for step in golden["steps"]]
    assert run(target, drafter, golden["prompt"], 4, tokens=24).ids == golden["greedy_with_assistant"]


def test_a_round_reads_what_the_last_resident_token_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = target, drafter = build(tmp_path)
    bonus, seen, step = begin(pair), [], drafter.network.__class__.__call__

    def spy(network: Any, embedded: mx.array, carry: mx.array, shared: Any, position: mx.array) -> Any:
        seen.append((int(position.item()), {kind: rows[0].shape[2] for kind, rows in shared.items()}))
        return step(network, embedded, carry, shared, position)

    monkeypatch.setattr(drafter.network.__class__, "__call__", spy)
    drafts = drafter.draft(3, best)
    assert seen == [(11, {SLIDING: 8, FULL: 12})] * 3
    _, hidden = target.verify([bonus, *drafts])
    target.rollback(2)
    drafter.accept(1, 5, hidden)
    assert drafter.carry is not None
    np.testing.assert_array_equal(np.array(drafter.carry), np.array(hidden)[:, 1:2])
    seen.clear()
    drafter.draft(1, best)
    assert seen == [(13, {SLIDING: 8, FULL: 14})]


def test_a_drafter_with_a_narrower_window_reads_fewer_rows(tmp_path: Path) -> None:
    pair = target, drafter = build(tmp_path, window=3)
    begin(pair)
    _, wide = build(tmp_path / "wide")
    wide.bind(target)
    begin((target, wide))
    assert drafter.carry is not None
    kept = {kind: (keys[:, :, -3:], values[:, :, -3:]) if kind == SLIDING else (keys, values)
            for kind, (keys, values) in target.shared_kv().items()}  # fmt: skip
    token, position = mx.array([drafter.bonus]), mx.array(11)
    expected, _ = wide.step(token, drafter.carry, kept, position)
    assert drafter.draft(1, best) == [int(best(expected).item())]
    seen = [
        np.array(one.step(token, drafter.carry, one._shared_kv(), position)[0]) for one in (drafter, wide)
    ]
    np.testing.assert_allclose(seen[0], np.array(expected), atol=1e-6)
    assert not np.allclose(seen[1], np.array(expected), atol=1e-3)


def test_nothing_is_drafted_before_a_prefill_and_none_where_none_is_asked_for(tmp_path: Path) -> None:
    pair = build(tmp_path)
    begin(pair)
    assert pair[1].draft(0, best) == []
    pair[1].reset()
    with pytest.raises(RuntimeError, match="before prefill"):
        pair[1].draft(1, best)


def test_a_token_outside_the_vocabulary_does_not_reach_mlx(tmp_path: Path) -> None:
    _, drafter = build(tmp_path)
    with pytest.raises(ToolError, match="token id 32 at position 0"):
        drafter.prefill(PROMPT, mx.zeros((1, 1, 32)), 32)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bits", [False, True], ids=["dense", "4-bit"])
def test_an_ordered_head_scores_the_tokens_of_the_best_clusters_as_a_dense_one_does(
    tmp_path: Path, tied: bool, bits: bool
) -> None:
    group_size = 32 if bits else None
    _, drafter = build(tmp_path, ordered=True, tied=tied, group_size=group_size)
    drafter.network.masked_embedding._best = 3
    y = mx.random.normal((1, 1, 32), key=mx.random.key(3))
    logits = np.array(drafter.network.head(y))[0]
    table = drafter.network.model.embed_tokens if tied else drafter.network.lm_head
    dense = np.array(table.as_linear(y))[0, 0]
    clusters = drafter.network.masked_embedding
    scores = np.array(clusters.centroids(y))[0, 0]
    ordering = np.array(clusters.token_ordering).reshape(8, 4)
    ids = ordering[np.argsort(-scores)[:3]].reshape(-1)
    np.testing.assert_allclose(logits[ids], dense[ids], atol=1e-5)
    others = np.setdiff1d(np.arange(32), ids)
    np.testing.assert_allclose(logits[others], logits[ids].min() - 1, atol=1e-6)


def test_a_quantized_drafter_runs_and_stays_quantized(tmp_path: Path) -> None:
    target, drafter = build(tmp_path, group_size=32, ordered=True)
    assert "scales" in drafter.network.pre_projection
    assert "scales" in drafter.network.model.embed_tokens
    outcome = run(target, drafter, PROMPT, 4)
    assert outcome.ids == run(target, None, PROMPT).ids
    assert outcome.stats["draft_error"] is None


def test_an_output_matrix_beside_a_tied_embedding_is_passed_over(tmp_path: Path) -> None:
    write_drafter(tmp_path / "drafter", tokenizer=False, **ASSISTANT, tied=False)
    config = open_checkpoint(tmp_path / "drafter").config.raw
    write_json(tmp_path / "drafter" / "config.json", config | {"tie_word_embeddings": True})
    drafter = gemma4_assistant.Drafter.load(open_checkpoint(tmp_path / "drafter"), {})
    assert "lm_head" not in drafter.network


def test_the_unified_assistant_is_the_same_drafter(tmp_path: Path) -> None:
    assert gemma4_unified_assistant.Drafter is gemma4_assistant.Drafter
    family = "gemma4_unified_assistant"
    target = write_target(
        tmp_path / "target",
        tokenizer=False,
        model_type="gemma4_unified",
        **{**TARGET, "tied": True, "alone": False},
    )
    drafter = write_drafter(tmp_path / "drafter", tokenizer=False, family=family, **ASSISTANT)
    pair = load(target, drafter, family=family, dtype="float32")
    assert run(*pair, PROMPT, 4).ids == run(pair[0], None, PROMPT).ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"backbone_hidden_size": None}, "does not state backbone_hidden_size"),
        ({"num_centroids": 7}, r"num_centroids is 7 .* expected a divisor of vocab_size 32"),
        ({"num_centroids": "8"}, r"num_centroids is '8'"),
        ({"centroid_intermediate_top_k": 9}, r"centroid_intermediate_top_k 9"),
        ({"centroid_intermediate_top_k": 0}, r"centroid_intermediate_top_k 0"),
        ({"text_config": {"hidden_size": None}}, "does not state hidden_size"),
        ({"text_config": {"layer_types": [FULL]}}, "layer_types has to name"),
        ({"text_config": {"global_head_dim": None}}, "does not state global_head_dim"),
        ({"text_config": {"rope_parameters": 3}}, "describes no assistant"),
        (
            {"text_config": {"intermediate_size": 64}},
            r"mlp.down_proj.weight has shape \[32, 32\], expected \[32, 64\]",
        ),
    ],
)
def test_a_config_that_does_not_describe_the_tensors_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_drafter(tmp_path / "drafter", tokenizer=False, **ASSISTANT, ordered=True)
    raw = open_checkpoint(folder).config.raw
    text = {**raw["text_config"], **changes.get("text_config", {})}
    write_json(folder / "config.json", {**raw, **changes, "text_config": text})
    with pytest.raises(Refused, match=message):
        gemma4_assistant.Drafter.load(open_checkpoint(folder), {})


@pytest.mark.parametrize(
    ("ordering", "message"),
    [
        (mx.arange(32).astype(mx.int64) + 1, "does not hold every id from 0 to 31 once"),
        (mx.zeros(32, mx.int32), "does not hold every id from 0 to 31 once"),
        (mx.arange(32).astype(mx.int64) - 2**40, "does not hold every id from 0 to 31 once"),
        (mx.arange(32).astype(mx.float32), "is F32, expected I64 or I32"),
        (mx.arange(16).astype(mx.int64), r"token_ordering has shape \[16\], expected \[32\]"),
    ],
)
def test_an_ordering_that_is_no_permutation_is_refused_before_it_is_used(
    tmp_path: Path, ordering: mx.array, message: str
) -> None:
    folder = write_drafter(tmp_path / "drafter", tokenizer=False, **ASSISTANT, ordered=True)
    path = str(folder / "model.safetensors")
    weights: Any = mx.load(path)
    mx.eval(weights)
    mx.save_safetensors(path, {**weights, "masked_embedding.token_ordering": ordering})
    with pytest.raises(Refused, match=message):
        gemma4_assistant.Drafter.load(open_checkpoint(folder), {})


def test_an_ordering_in_32_bits_is_taken(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", tokenizer=False, **ASSISTANT, ordered=True)
    path = str(folder / "model.safetensors")
    weights: Any = mx.load(path)
    ordering = weights["masked_embedding.token_ordering"]
    mx.eval(weights)
    mx.save_safetensors(path, {**weights, "masked_embedding.token_ordering": ordering.astype(mx.int32)})
    drafter = gemma4_assistant.Drafter.load(open_checkpoint(folder), {})
    np.testing.assert_array_equal(
        np.array(drafter.network.masked_embedding.token_ordering), np.array(ordering)
    )


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    folder = write_drafter(tmp_path / "drafter", tokenizer=False, **ASSISTANT)
    path = str(folder / "model.safetensors")
    weights: Any = mx.load(path)
    mx.eval(weights)
    del weights["model.layers.0.layer_scalar"]
    weights["model.layers.0.self_attn.k_proj.weight"] = mx.zeros((2, 2))
    mx.save_safetensors(path, weights)
    with pytest.raises(Refused) as refusal:
        gemma4_assistant.Drafter.load(open_checkpoint(folder), {})
    assert "layer_scalar is missing" in refusal.value.message
    assert "k_proj.weight is unexpected" in refusal.value.message


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        ({"hidden": 64}, {}, "width is 64, expected 32"),
        ({"vocab": 64}, {}, "vocabulary is 64, expected 32"),
        ({"width": 32}, {}, "head width in sliding_attention is 32, expected 16"),
        ({"global_width": 16}, {}, "head width in full_attention is 16, expected 32"),
        ({"types": (FULL, FULL)}, {}, "head width in sliding_attention is None, expected 16"),
        ({}, {"heads": 3, "groups": 3}, "2 key-value heads in sliding_attention cannot serve 3 query heads"),
    ],
)
def test_another_target_is_refused(
    tmp_path: Path, target: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused, match=message):
        build(tmp_path, target, **options)


def test_a_target_of_another_family_is_refused(tmp_path: Path) -> None:
    target = write_other_target(tmp_path / "target", tokenizer=False)
    drafter = write_drafter(tmp_path / "drafter", tokenizer=False, **ASSISTANT)
    with pytest.raises(Refused, match="reads keys and values of another target"):
        load(target, drafter, family=FAMILY)


def test_it_is_loaded_by_the_name_of_its_family(tmp_path: Path) -> None:
    target, _ = build(tmp_path)
    loaded = load_drafter(open_checkpoint(tmp_path / "drafter"), FAMILY, target, environ={})
    assert isinstance(loaded, gemma4_assistant.Drafter)
    assert (loaded.prompt_rows, loaded.widens, loaded.vocab_size) == (1, True, 32)
