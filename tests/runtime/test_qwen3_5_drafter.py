"""The qwen3_5_mtp drafter: transformers' numbers, heads whose every proposal is right, no token changed, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models import gated_delta

from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Refused, ToolError
from draftpair.runtime.drafters import _nextn, qwen3_5_mtp
from draftpair.runtime.interfaces import ALL_ROWS
from draftpair.runtime.load import load_drafter, load_target
from fixtures import pairs
from fixtures.goldens import as_array
from fixtures.pairs import run, split
from fixtures.qwen3_5 import write_checkpoint, write_mlx_checkpoint
from fixtures.qwen3_5_copy import CopyPair, write_copy_pair
from fixtures.qwen3_5_golden import load_goldens, rebuild
from fixtures.weights import write_json

FAMILY = "qwen3_5_mtp"
GOLDENS = load_goldens()
# Before 0.32, mlx-lm took another epsilon for the norm of queries and keys than transformers.
TOLERANCE = {"rtol": 0, "atol": 1e-4 if hasattr(gated_delta, "normalize_qk") else 5e-3}
SMALL = {"vocab": 16, "hidden": 32, "head_dim": 32, "dense": 48, "moe": 32, "shared": 32, "dtype": "F32"}
EXPERTS = {"model_type": "qwen3_5_moe"}
START = [3, 4, 5]


def load(folder: Path, drafter: Path | None = None, dtype: str = "auto", **environ: str) -> tuple[Any, Any]:
    return pairs.load(folder, drafter, environ, FAMILY, dtype)


def greedy(logits: mx.array) -> mx.array:
    return mx.argmax(logits, axis=-1)


def prefilled(target: Any, drafter: Any, prompt: list[int]) -> int:
    """Take the prompt in, on both sides; the first bonus token."""
    target.reset()
    logits, hidden = target.prefill(prompt, drafter.prompt_rows)
    bonus = int(logits.argmax().item())
    drafter.reset()
    drafter.prefill(prompt, hidden, bonus)
    return bonus


@pytest.fixture(scope="module", params=GOLDENS)
def recorded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Any, Any]:
    golden = GOLDENS[request.param]
    return golden, *load(rebuild(golden, tmp_path_factory.mktemp("golden") / "raw"))


def test_target_logits_and_hidden_states_are_those_of_transformers(recorded: tuple[Any, Any, Any]) -> None:
    golden, target, _ = recorded
    expected = golden["target"]
    target.reset()
    last, hidden = target.prefill(golden["prompt"], ALL_ROWS)
    np.testing.assert_allclose(np.array(hidden)[0], as_array(expected["hidden"]), **TOLERANCE)
    rows = np.array(target.head(hidden))[0, golden["logit_rows"]]
    np.testing.assert_allclose(rows, as_array(expected["logits"]), **TOLERANCE)
    np.testing.assert_allclose(np.array(last)[0], as_array(expected["logits"])[-1], **TOLERANCE)


def test_verified_rows_are_those_of_transformers(recorded: tuple[Any, Any, Any]) -> None:
    golden, target, _ = recorded
    target.reset()
    target.prefill(golden["prompt"][:4], 0)
    logits, hidden = target.verify(golden["prompt"][4:])
    np.testing.assert_allclose(np.array(hidden)[0], as_array(golden["target"]["hidden"])[4:], **TOLERANCE)
    np.testing.assert_allclose(np.array(logits)[0, -1], as_array(golden["target"]["logits"])[-1], **TOLERANCE)


def test_greedy_ids_are_those_of_transformers(recorded: tuple[Any, Any, Any]) -> None:
    golden, target, drafter = recorded
    count = len(golden["greedy"])
    assert run(target, None, golden["prompt"], tokens=count).ids == golden["greedy"]
    for width in (2, 5):
        assert run(target, drafter, golden["prompt"], width, tokens=count).ids == golden["greedy"]


def test_head_outputs_and_logits_are_those_of_transformers(recorded: tuple[Any, Any, Any]) -> None:
    golden, target, drafter = recorded
    head = golden["head"]
    target.reset()
    _, hidden = target.prefill(golden["prompt"], ALL_ROWS)
    drafter.reset()
    output = drafter.forward(mx.array([head["tokens"]]), hidden)
    np.testing.assert_allclose(np.array(output)[0], as_array(head["output"]), **TOLERANCE)
    rows = np.array(target.head(output))[0, golden["logit_rows"]]
    np.testing.assert_allclose(rows, as_array(head["logits"]), **TOLERANCE)


def test_chained_proposals_are_those_of_transformers(recorded: tuple[Any, Any, Any]) -> None:
    golden, target, drafter = recorded
    assert prefilled(target, drafter, golden["prompt"]) == golden["head"]["tokens"][-1]
    outputs, forward = [drafter.seed], drafter.forward

    def spy(tokens: mx.array, hidden: mx.array) -> mx.array:
        outputs.append(forward(tokens, hidden))
        return outputs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "forward", spy)
        assert drafter.draft(len(golden["chain"]["drafts"]), greedy) == golden["chain"]["drafts"]
    found = np.array(mx.concatenate(outputs, axis=1))[0]
    np.testing.assert_allclose(found, as_array(golden["chain"]["outputs"]), **TOLERANCE)


COPIES: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": EXPERTS,
    "two layers, four in the trunk": {"depth": 2, "declared": 2, "layers": 4, "seed": 1},
}


@pytest.mark.parametrize("sizes", COPIES.values(), ids=COPIES.keys())
def test_a_head_that_is_right_is_always_accepted(tmp_path: Path, sizes: dict[str, Any]) -> None:
    written = write_copy_pair(tmp_path / "raw", **sizes)
    target, drafter = load(written.raw)
    for width in range(2, 9):
        outcome = run(target, drafter, START, width, tokens=41)
        assert outcome.ids == written.continuation(5, 41)
        assert outcome.stats["draft_acceptance_rate"] == 1, width


@pytest.fixture
def copying(tmp_path: Path) -> tuple[CopyPair, Any, Any]:
    written = write_copy_pair(tmp_path / "raw")
    return written, *load(written.raw)


Mutation = Callable[[Any, Any], None]


def swap_halves(drafter: Any, _: Any) -> None:
    layer = drafter.network.fc
    layer.weight = mx.roll(layer.weight, layer.weight.shape[1] // 2, axis=1)


def flatten(*path: str) -> Mutation:
    def mutate(drafter: Any, _: Any) -> None:
        norm = drafter.network
        for name in path:
            norm = norm[int(name)] if name.isdecimal() else norm[name]
        norm.weight = mx.ones_like(norm.weight)

    return mutate


def add_one_again(drafter: Any, _: Any) -> None:
    for _, module in drafter.network.named_modules():
        if isinstance(module, nn.RMSNorm):
            module.weight = module.weight + 1


def tap_before_norm(drafter: Any, target: Any) -> None:
    gain, verify, prefill = target.text.model.norm.weight, target.verify, target.prefill
    target.verify = lambda tokens: (lambda logits, normed: (logits, normed / gain))(*verify(tokens))
    target.prefill = lambda tokens, rows: (lambda logits, normed: (logits, normed / gain))(
        *prefill(tokens, rows)
    )


def pair_one_later(drafter: Any, _: Any) -> None:
    forward = drafter.forward
    drafter.forward = lambda tokens, hidden: forward(tokens, mx.roll(hidden, 1, axis=1))


def scramble(drafter: Any, _: Any) -> None:
    forward = drafter.forward
    drafter.forward = lambda tokens, hidden: forward(tokens, mx.roll(hidden, 1, axis=2))


def turn_embedding(drafter: Any, target: Any) -> None:
    drafter.target = SimpleNamespace(embed=lambda tokens: -target.embed(tokens), head=target.head)


def carry_before_norm(drafter: Any, _: Any) -> None:
    gain = drafter.network.norm.weight
    drafter.carried = lambda x: x / gain


def stand_still(drafter: Any, _: Any) -> None:
    rope = drafter.network.layers[0].self_attn.rope
    drafter.network.layers[0].self_attn.rope = lambda x, offset: rope(x, offset=0)


def swap_query_and_gate(drafter: Any, _: Any) -> None:
    attention = drafter.network.layers[0].self_attn
    rows = attention.q_proj.weight.reshape(attention.num_attention_heads, 2, attention.head_dim, -1)
    attention.q_proj.weight = mx.roll(rows, 1, axis=1).reshape(attention.q_proj.weight.shape)


def forget_verified(drafter: Any, _: Any) -> None:
    drafter.accept = lambda accepted, bonus, hidden: None


def skip_last_draft(drafter: Any, _: Any) -> None:
    append = drafter._append
    drafter._append = lambda tokens, hidden: append(tokens[-1:], hidden[:, -1:])


MUTATIONS: dict[str, Mutation] = {
    "halves of fc swapped": swap_halves,
    "pre_fc_norm_embedding left out": flatten("pre_fc_norm_embedding"),
    "pre_fc_norm_hidden left out": flatten("pre_fc_norm_hidden"),
    "input_layernorm left out": flatten("layers", "0", "input_layernorm"),
    "q_norm left out": flatten("layers", "0", "self_attn", "q_norm"),
    "k_norm left out": flatten("layers", "0", "self_attn", "k_norm"),
    "last norm left out": flatten("norm"),
    "norms shifted once more": add_one_again,
    "tap before the final norm": tap_before_norm,
    "carry before the head's norm": carry_before_norm,
    "paired with the state one later": pair_one_later,
    "hidden state scrambled": scramble,
    "embedding of the other sign": turn_embedding,
    "query and gate of a head swapped": swap_query_and_gate,
    "positions that stand still": stand_still,
    "verified block not taken in": forget_verified,
    "last accepted draft left out of the cache": skip_last_draft,
}


@pytest.mark.parametrize("mutate", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_any_wrong_turn_costs_acceptance_and_no_token(
    copying: tuple[CopyPair, Any, Any], mutate: Mutation
) -> None:
    written, target, drafter = copying
    mutate(drafter, target)
    outcome = run(target, drafter, START, 4, tokens=25)
    assert outcome.stats["draft_error"] is None
    assert outcome.stats["draft_acceptance_rate"] < 0.7
    assert outcome.ids == written.continuation(5, 25)


LOSSLESS: dict[str, tuple[dict[str, Any], str]] = {
    "dense": ({}, "float32"),
    "two layers, bfloat16": ({"depth": 2, "declared": 2, "key_heads": 1, "value_heads": 3}, "bfloat16"),
    "experts": (EXPERTS, "float32"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "dtype"), LOSSLESS.values(), ids=LOSSLESS.keys())
def test_no_token_changes_with_a_drafter(tmp_path: Path, sizes: dict[str, Any], dtype: str) -> None:
    accepted = 0
    for seed in range(20):
        target, drafter = load(
            write_checkpoint(tmp_path / str(seed), seed=seed, **SMALL, **sizes), dtype=dtype
        )
        prompt = [(5 * i + seed) % 16 for i in range(1 + seed % 6)]
        warm = {"temperature": 0.8, "top_p": 0.9, "seed": seed} if seed % 2 else {}
        plain = run(target, None, prompt, tokens=40, **warm)
        drafted = run(target, drafter, prompt, 2 + seed % 7, tokens=40, **warm)
        assert drafted.ids == plain.ids, f"seed {seed}"
        assert drafted.stats["draft_error"] is None
        accepted += drafted.stats["accepted"]
        if not warm and not seed % 4:
            steps = generate_step(mx.array(prompt), target.network, max_tokens=40)
            assert plain.ids == [token for token, _ in steps]
    assert accepted > 20


@pytest.mark.parametrize(("accepted", "kept"), [(0, 0), (1, 1), (2, 2), (3, 2)])
def test_entries_of_accepted_drafts_stay_and_the_rest_is_forwarded_once_through_every_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accepted: int, kept: int
) -> None:
    target, drafter = load(write_checkpoint(tmp_path / "raw", depth=2, declared=2, **SMALL))
    bonus = prefilled(target, drafter, START)
    assert [cache.offset for cache in drafter.caches] == [3, 3]
    drafts = drafter.draft(3, greedy)  # leaves entries of the first two: the third is never fed back
    _, verified = target.verify([bonus, *drafts])
    calls, forward = [], drafter.forward

    def spy(tokens: mx.array, states: mx.array) -> mx.array:
        calls.append((drafter.caches[1].offset, tokens.tolist(), np.array(states)))
        return forward(tokens, states)

    monkeypatch.setattr(drafter, "forward", spy)
    drafter.accept(accepted, 9, verified)
    [(offset, tokens, states)] = calls
    assert (offset, tokens) == (3 + kept, [[*drafts[kept:accepted], 9]])
    np.testing.assert_array_equal(states, np.array(verified)[:, kept : accepted + 1])
    assert [cache.offset for cache in drafter.caches] == [4 + accepted, 4 + accepted]


def test_a_prompt_in_chunks_leaves_the_proposals_of_one_in_a_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, drafter = load(write_checkpoint(tmp_path / "raw", **SMALL))
    prompt = [(7 * i + 2) % 16 for i in range(12)]
    prefilled(target, drafter, prompt)
    whole, keys = np.array(drafter.seed), np.array(drafter.caches[0].keys[:, :, :12])
    monkeypatch.setattr(_nextn, "PREFILL_CHUNK", 5)
    prefilled(target, drafter, prompt)
    np.testing.assert_allclose(np.array(drafter.seed), whole, atol=1e-5)
    np.testing.assert_allclose(np.array(drafter.caches[0].keys[:, :, :12]), keys, atol=1e-5)


def test_a_bonus_token_outside_the_vocabulary_never_reaches_mlx(copying: tuple[CopyPair, Any, Any]) -> None:
    _, target, drafter = copying
    _, hidden = target.prefill(START, ALL_ROWS)
    with pytest.raises(ToolError, match=r"token id 16 at position 2 .* the drafter's vocabulary of 16"):
        drafter.prefill(START, hidden, 16)


FORMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": EXPERTS,
    "Qwen3-Next": {"model_type": "qwen3_next"},
    "two layers": {"depth": 2, "declared": 2},
}


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("sizes", FORMS.values(), ids=FORMS.keys())
def test_whatever_split_mtp_writes_of_the_family_loads_with_every_tensor_in_place(
    tmp_path: Path, sizes: dict[str, Any], bits: int | None
) -> None:
    raw = write_checkpoint(tmp_path / "raw", **sizes)
    folder = split(raw, tmp_path / "drafter", q_bits=bits)
    drafter = qwen3_5_mtp.Drafter.load(open_checkpoint(folder), {})
    parameters: Any = dict(tree_flatten(drafter.network.parameters()))
    stored: Any = mx.load(str(folder / "model.safetensors"))
    assert parameters.keys() == stored.keys()
    assert all(mx.array_equal(parameters[name], stored[name]) for name in stored)
    assert (parameters["fc.weight"].dtype == mx.uint32) == (bits is not None)


def test_a_packed_head_on_a_packed_target_changes_no_token(tmp_path: Path) -> None:
    raw = write_mlx_checkpoint(tmp_path / "raw", group_size=64, vocab=16, dtype="F32", **EXPERTS)
    target, drafter = load(raw)
    for prompt in ([7], [1, 2, 3, 4, 5]):
        assert run(target, drafter, prompt, 4, tokens=24).ids == run(target, None, prompt, tokens=24).ids


VARIABLE = "MLXCEL_MTP_QUANTIZE_DRAFTER"


@pytest.mark.parametrize("sizes", [{}, EXPERTS], ids=["dense", "experts"])
def test_a_head_is_packed_at_load_when_the_environment_says_so(tmp_path: Path, sizes: dict[str, Any]) -> None:
    raw = write_checkpoint(tmp_path / "raw", vocab=16, dtype="F32", **sizes)
    target, drafter = load(raw, **{VARIABLE: "1"})
    kinds = {name: type(module) for name, module in drafter.network.named_modules()}
    assert kinds["fc"] is kinds["layers.0.self_attn.q_proj"] is nn.QuantizedLinear
    if sizes:
        assert kinds["layers.0.mlp.gate"] is kinds["layers.0.mlp.shared_expert_gate"] is nn.Linear
        assert "weight" in drafter.network.layers[0].mlp.switch_mlp.up_proj
        assert "scales" not in drafter.network.layers[0].mlp.switch_mlp.up_proj
    for prompt in ([7], [1, 2, 3, 4, 5]):
        assert run(target, drafter, prompt, 4, tokens=24).ids == run(target, None, prompt, tokens=24).ids


def test_a_head_packed_at_load_gives_almost_what_it_gave_before(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", vocab=16, dtype="F32")
    folder, seeds = split(raw, tmp_path / "drafter"), []
    for said in ("0", "1"):
        target, drafter = load(raw, folder, **{VARIABLE: said})
        prefilled(target, drafter, START)
        seeds.append(np.array(drafter.seed).ravel())
    assert not np.array_equal(*seeds)
    assert np.corrcoef(*seeds)[0, 1] > 0.95


@pytest.mark.parametrize(
    ("said", "device", "packs"),
    [(None, "cpu", False), ("1", "cpu", True), (None, "gpu", True), ("0", "gpu", False), ("", "gpu", True)],
)
def test_packing_is_off_on_a_cpu_and_on_elsewhere_unless_told(
    monkeypatch: pytest.MonkeyPatch, said: str | None, device: str, packs: bool
) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(getattr(mx, device)))
    assert qwen3_5_mtp.quantizes({} if said is None else {VARIABLE: said}) is packs


def test_a_head_that_is_stored_packed_stays_as_it_is(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    folder = split(raw, tmp_path / "drafter", q_bits=8, q_group_size=32)
    drafter = qwen3_5_mtp.Drafter.load(open_checkpoint(folder), {VARIABLE: "1"})
    assert (drafter.network.fc.bits, drafter.network.fc.group_size) == (8, 32)


def test_a_head_computes_in_its_own_dtype_and_hands_on_in_the_targets(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", **SMALL)
    target = load_target(open_checkpoint(raw), "float32", environ={})
    folder = split(raw, tmp_path / "drafter")
    drafter: Any = load_drafter(open_checkpoint(folder), FAMILY, target, "bfloat16", environ={})
    prefilled(target, drafter, START)
    assert drafter.caches[0].keys.dtype == mx.bfloat16
    assert drafter.seed.dtype == mx.float32


@pytest.mark.parametrize(("other", "found"), [({"hidden": 64}, "64 and 16"), ({"vocab": 24}, "32 and 24")])
def test_a_target_of_another_size_is_refused(tmp_path: Path, other: dict[str, int], found: str) -> None:
    folder = split(write_checkpoint(tmp_path / "raw", **SMALL), tmp_path / "drafter")
    target = write_checkpoint(tmp_path / "other", **{**SMALL, **other})
    with pytest.raises(Refused, match=rf"states of 32 and a vocabulary of 16; the target has {found}"):
        load(target, folder)


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    folder = split(write_checkpoint(tmp_path / "raw", **SMALL), tmp_path / "drafter")
    path = str(folder / "model.safetensors")
    weights: Any = dict(mx.load(path))
    del weights["pre_fc_norm_hidden.weight"]
    weights |= {"surprise.weight": mx.zeros((2,)), "norm.weight": mx.zeros((3,))}
    mx.save_safetensors(path, weights)
    for extra in folder.glob("*.index.json"):
        extra.unlink()
    with pytest.raises(Refused) as refusal:
        qwen3_5_mtp.Drafter.load(open_checkpoint(folder), {})
    for part in (
        "pre_fc_norm_hidden.weight is missing",
        "surprise.weight is unexpected",
        "norm.weight has shape [3], expected [32]",
    ):
        assert part in refusal.value.message


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no size": ({"num_key_value_heads": None}, "does not state num_key_value_heads"),
    "no width": ({"intermediate_size": None}, "does not state intermediate_size"),
    "no base": ({"rope_parameters": None, "rope_theta": None}, "names no RoPE base"),
    "no layer": ({"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers is 0"),
    "nine layers": ({"mtp_num_hidden_layers": 9}, "the head has 9 layers; expected 1 to 8"),
    "one layer more": ({"mtp_num_hidden_layers": 2}, r"layers\.1\..* are missing"),
    "a size of another kind": ({"head_dim": "wide"}, r"mlx-lm cannot use its config\.json"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_config_that_does_not_hold_is_refused_in_words(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = split(write_checkpoint(tmp_path / "raw", **SMALL), tmp_path / "drafter")
    raw = open_checkpoint(folder).config.raw
    text = {key: value for key, value in {**raw["text_config"], **changes}.items() if value is not None}
    write_json(
        folder / "config.json", {k: v for k, v in raw.items() if k not in changes} | {"text_config": text}
    )
    with pytest.raises(Refused, match=message):
        qwen3_5_mtp.Drafter.load(open_checkpoint(folder), {})
