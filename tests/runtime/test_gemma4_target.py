"""The gemma4 target: verify equals decoding byte for byte, rollback is exact past the window, sizes are not guessed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU

from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Refused
from draftpair.runtime.load import load_target
from draftpair.runtime.targets import _mlx_lm, gemma4, gemma4_unified
from draftpair.runtime.targets.gemma4 import FULL, SLIDING
from fixtures.gemma4_assistant import RUN_GOLDEN, RUN_VARIANTS, write_run_variant, write_target
from fixtures.goldens import as_array, load_goldens
from fixtures.pairs import run
from fixtures.weights import sha256_of_weights, write_json

GOLDENS = load_goldens(RUN_GOLDEN)
TINY: dict[str, Any] = {
    "vocab": 64,
    "hidden": 64,
    "intermediate": 32,
    "types": (SLIDING, FULL) * 2,
    "window": 8,
}
SHORT, LONG = 5, 30
TOKENS = [(13 * i + 4) % 64 for i in range(24)]

SIZES: dict[str, dict[str, Any]] = {
    "shared layers": {},
    "inputs by layer": {"by_layer": 8, "wide": True, "softcap": 30.0},
    "keys are values": {"shared": 0, "keys_are_values": True, "global_groups": 1, "softcap": 30.0},
    "experts": {"shared": 0, "experts": 16, "top_k": 8, "keys_are_values": True, "global_groups": 1},
    "a text model": {"alone": True, "tied": False},
    "without towers": {"model_type": "gemma4_unified", "shared": 0},
    "sliding layers first": {"types": (SLIDING, SLIDING, FULL), "shared": 0, "global_width": 16},
}


def build(folder: Path, bits: int | None = None, **options: Any) -> gemma4.Target:
    sizes = TINY | options
    checkpoint = open_checkpoint(write_target(folder / "target", tokenizer=False, **sizes))
    target = load_target(checkpoint, "float32", environ={})
    if bits is not None:
        nn.quantize(target.network, group_size=32, bits=bits)
    assert isinstance(target, gemma4.Target)
    return target


def prompt(length: int) -> list[int]:
    return [(7 * i + 1) % 64 for i in range(length)]


def started(target: gemma4.Target, length: int) -> gemma4.Target:
    target.reset()
    target.prefill(prompt(length), 1)
    return target


def chain(target: gemma4.Target, tokens: Sequence[int]) -> list[bytes]:
    return [np.array(target.decode(mx.array([token]))).tobytes() for token in tokens]


def block(target: gemma4.Target, tokens: Sequence[int]) -> list[bytes]:
    logits = np.array(target.verify(tokens)[0])
    return [logits[0, row].tobytes() for row in range(len(tokens))]


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_every_row_of_a_verify_block_has_the_bytes_of_single_token_decoding(
    tmp_path: Path, sizes: dict[str, Any], length: int
) -> None:
    target = build(tmp_path, **sizes)
    expected = chain(started(target, length), TOKENS[:16])
    for width in (1, 2, 3, 5, 8, 16):
        started(target, length)
        assert block(target, TOKENS[:width]) == expected[:width], f"width {width}"


def test_a_quantized_target_verifies_with_the_bytes_of_decoding(tmp_path: Path) -> None:
    target = build(tmp_path, bits=4, width=32)
    expected = chain(started(target, LONG), TOKENS[:8])
    started(target, LONG)
    assert block(target, TOKENS[:8]) == expected


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("name", ["shared layers", "keys are values", "inputs by layer"])
def test_after_rollbacks_the_target_continues_as_if_nothing_had_been_drafted(
    tmp_path: Path, name: str, length: int
) -> None:
    target = build(tmp_path, **SIZES[name])
    expected = chain(started(target, length), TOKENS)
    shared = numbers(target)
    started(target, length)
    taken = 0
    for right, wrong in ((1, 7), (2, 1), (3, 20), (1, 0), (4, 12), (2, 31)):
        rows = block(target, [*TOKENS[taken : taken + right], *[(5 * i + 1) % 64 for i in range(wrong)]])
        assert rows[:right] == expected[taken : taken + right]
        target.rollback(wrong)
        taken += right
        assert target.offset == length + taken
    assert chain(target, TOKENS[taken:]) == expected[taken:]
    for kind, parts in numbers(target).items():
        for part, once in zip(parts, shared[kind], strict=True):
            np.testing.assert_allclose(part, once, atol=1e-6)


def numbers(target: gemma4.Target) -> dict[str, list[Any]]:
    return {kind: [np.array(part) for part in rows] for kind, rows in target.shared_kv().items()}


def test_rolling_back_more_than_the_caches_hold_is_an_error(tmp_path: Path) -> None:
    target = started(build(tmp_path), SHORT)
    with pytest.raises(RuntimeError, match=r"drop 9 tokens, it dropped 5"):
        target.rollback(9)


def test_experts_are_called_with_too_few_rows_to_be_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = build(tmp_path, **SIZES["experts"])
    expected = chain(started(target, SHORT), TOKENS[:16])
    started(target, SHORT)
    pairs, call = [], SwitchGLU.__call__

    def spy(experts: SwitchGLU, x: mx.array, indices: mx.array) -> mx.array:
        pairs.append(indices.size)
        return call(experts, x, indices)

    monkeypatch.setattr(SwitchGLU, "__call__", spy)
    assert block(target, TOKENS[:16]) == expected
    assert sum(pairs) == 16 * 8 * 4
    assert max(pairs) < 64  # from here on mlx-lm sorts


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("name", ["a text model", "inputs by layer", "experts"])
def test_plain_decoding_emits_what_mlx_lm_generates(tmp_path: Path, name: str, length: int) -> None:
    target = build(tmp_path, **SIZES[name])
    steps = generate_step(mx.array(prompt(length)), target.network, max_tokens=30)
    assert run(target, None, prompt(length), tokens=30).ids == [int(token) for token, _ in steps]


@pytest.mark.parametrize("name", RUN_VARIANTS)
def test_logits_and_hidden_states_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    golden = GOLDENS[name]
    place, _ = write_run_variant(name, tmp_path)
    assert sha256_of_weights(place)["model.safetensors"] == golden["weights_sha256"][0]
    target = load_target(open_checkpoint(place), "float32", environ={})
    target.reset()
    last, hidden = target.prefill(golden["prompt"], len(golden["prompt"]))
    logits = np.array(target.head(hidden))[0, golden["logit_rows"]]
    np.testing.assert_allclose(np.array(hidden)[0], as_array(golden["target"]["hidden"]), atol=1e-4, rtol=0)
    np.testing.assert_allclose(logits, as_array(golden["target"]["logits"]), atol=1e-4, rtol=0)
    np.testing.assert_allclose(np.array(last)[0], logits[-1], atol=1e-5)
    _, verified = started_with(target, golden["prompt"][:2]).verify(golden["prompt"][2:])
    np.testing.assert_allclose(np.array(verified), np.array(hidden)[:, 2:], atol=1e-5)
    assert run(target, None, golden["prompt"], tokens=24).ids == golden["greedy"]


def started_with(target: Any, tokens: list[int]) -> Any:
    target.reset()
    target.prefill(tokens, 1)
    return target


def test_a_long_prompt_is_prefilled_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build(tmp_path)
    whole, hidden = started(target, SHORT).prefill(TOKENS, 6)
    monkeypatch.setattr(_mlx_lm, "PREFILL_CHUNK", 5)
    logits, chunked = started(target, SHORT).prefill(TOKENS, 6)
    assert hidden.shape == (1, 6, 64)
    np.testing.assert_allclose(np.array(logits), np.array(whole), atol=1e-5)
    np.testing.assert_allclose(np.array(chunked), np.array(hidden), atol=1e-5)


def test_shared_keys_and_values_are_those_of_the_last_layers_that_have_their_own(tmp_path: Path) -> None:
    target = started(build(tmp_path, types=(SLIDING, FULL) * 3, shared=2), LONG)
    caches = make_prompt_cache(target.network)
    target.text.model(mx.array([prompt(LONG)]), caches)
    for kind, number, count in ((SLIDING, 2, 8), (FULL, 3, LONG)):
        keys, values = target.shared_kv()[kind]
        assert keys.shape[2] == values.shape[2] == count
        theirs = caches[number].keys[:, :, :LONG][:, :, -count:]
        np.testing.assert_allclose(np.array(keys), np.array(theirs), atol=1e-5)
        assert target.shared_attention()[kind] is target.text.model.layers[number].self_attn


def test_embeddings_have_the_scale_of_the_first_layers_input(tmp_path: Path) -> None:
    target = build(tmp_path)
    table = target.text.model.embed_tokens.weight
    np.testing.assert_allclose(
        np.array(target.embed(mx.array([[3]])))[0, 0], np.array(table)[3] * 8, rtol=1e-6
    )


def test_the_probe_looks_one_past_the_window(tmp_path: Path) -> None:
    assert build(tmp_path).probe_lengths == (9,)
    assert build(tmp_path / "full", types=(FULL, FULL), shared=0).probe_lengths == ()


def test_the_unified_model_is_the_same_target() -> None:
    assert gemma4_unified.Target is gemma4.Target


def test_what_transformers_saves_of_heads_by_layer_is_read(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", tokenizer=False, **TINY, keys_are_values=True, global_groups=1)
    raw = open_checkpoint(folder).config.raw
    text = {**raw["text_config"], "per_layer_config": {"1": {"head_dim": 32, "num_key_value_heads": 1}}}
    text["per_layer_config"]["3"] = text["per_layer_config"]["1"]
    del text["global_head_dim"], text["num_global_key_value_heads"]
    expected = chain(
        started(build(tmp_path / "as published", keys_are_values=True, global_groups=1), SHORT), [1]
    )
    write_json(folder / "config.json", raw | {"text_config": text})
    target = load_target(open_checkpoint(folder), "float32", environ={})
    assert isinstance(target, gemma4.Target)
    assert chain(started(target, SHORT), [1]) == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "does not state hidden_size"),
        ({"sliding_window": 0}, r"sliding_window is 0, expected an integer of at least 1"),
        ({"num_key_value_heads": None}, "does not state num_key_value_heads"),
        ({"global_head_dim": None}, "does not state global_head_dim"),
        ({"layer_types": [SLIDING]}, "layer_types has to name"),
        ({"layer_types": ["linear"] * 4}, "layer_types has to name"),
        ({"enable_moe_block": True}, "does not state num_experts"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 63}, r"63, expected an .* at least 64"),
        ({"head_dim": 32}, "mlx-lm cannot load it as gemma4"),
        ({"num_kv_shared_layers": 4}, "mlx-lm cannot load it as gemma4"),
    ],
)  # fmt: skip
def test_a_config_that_leaves_a_size_open_or_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_target(tmp_path / "target", tokenizer=False, **TINY)
    raw = open_checkpoint(folder).config.raw
    write_json(folder / "config.json", raw | {"text_config": {**raw["text_config"], **changes}})
    with pytest.raises(Refused, match=message):
        load_target(open_checkpoint(folder), environ={})
