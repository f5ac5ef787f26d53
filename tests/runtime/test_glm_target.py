"""The glm4_moe_lite target: verify equals decoding byte for byte, rollback leaves no trace, rope is not guessed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.generate import generate_step
from mlx_lm.models.switch_layers import SwitchGLU

from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Refused, ToolError, Usage
from draftpair.runtime.interfaces import Target
from draftpair.runtime.load import load_target
from draftpair.runtime.targets import glm4_moe_lite
from fixtures.glm4_moe_lite import write_target
from fixtures.pairs import run
from fixtures.weights import write_json

PROMPT = [1, 2, 3, 5, 8, 13, 21, 34]
TOKENS = [(13 * i + 4) % 64 for i in range(24)]

SIZES: dict[str, dict[str, Any]] = {
    "low-rank query": {},
    "full query": {"q_lora": None},
    "grouped experts": {"experts": 8, "groups": 4, "top_groups": 2},
    "enough experts to be sorted": {"experts": 16, "top_k": 8},
}


def build(folder: Path, bits: int | None = None, **options: Any) -> Target:
    target = load_target(open_checkpoint(write_target(folder / "target", **options)), environ={})
    if bits is not None:
        nn.quantize(target.network, group_size=32, bits=bits)
    return target


def chain(target: Target, tokens: Sequence[int]) -> list[bytes]:
    return [np.array(target.decode(mx.array([token]))).tobytes() for token in tokens]


def block(target: Target, tokens: Sequence[int]) -> list[bytes]:
    logits = np.array(target.verify(tokens)[0])
    return [logits[0, row].tobytes() for row in range(len(tokens))]


def started(target: Target) -> Target:
    target.reset()
    target.prefill(PROMPT)
    return target


@pytest.mark.parametrize("bits", [None, 4], ids=["dense", "4-bit"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
def test_every_row_of_a_verify_block_has_the_bytes_of_single_token_decoding(
    tmp_path: Path, sizes: dict[str, Any], bits: int | None
) -> None:
    target = build(tmp_path, bits, **sizes)
    expected = chain(started(target), TOKENS)
    for width in range(2, 17):
        started(target)
        assert block(target, TOKENS[:width]) == expected[:width], f"width {width}"


def test_experts_are_called_with_too_few_rows_to_be_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = build(tmp_path, experts=16, top_k=4, layers=2)
    expected = chain(started(target), TOKENS[:16])
    started(target)
    pairs, call = [], SwitchGLU.__call__

    def spy(experts: SwitchGLU, x: mx.array, indices: mx.array) -> mx.array:
        pairs.append(indices.size)
        return call(experts, x, indices)

    monkeypatch.setattr(SwitchGLU, "__call__", spy)
    assert block(target, TOKENS[:16]) == expected
    assert sum(pairs) == 16 * 4
    assert max(pairs) < 64  # from here on mlx-lm sorts


def test_blocks_that_follow_each_other_stay_equal_to_single_tokens(tmp_path: Path) -> None:
    target = build(tmp_path)
    expected = chain(started(target), TOKENS)
    started(target)
    assert [row for begin in range(0, 24, 3) for row in block(target, TOKENS[begin : begin + 3])] == expected


def test_after_a_rollback_the_target_continues_as_if_nothing_had_been_drafted(tmp_path: Path) -> None:
    target = build(tmp_path)
    expected = chain(started(target), TOKENS)
    started(target)
    assert block(target, [*TOKENS[:2], 60, 61, 62])[:2] == expected[:2]
    target.rollback(3)
    assert target.offset == len(PROMPT) + 2
    assert block(target, [TOKENS[2], 63])[0] == expected[2]
    target.rollback(1)
    assert chain(target, TOKENS[3:]) == expected[3:]


def test_rolling_back_more_than_the_cache_holds_is_an_error(tmp_path: Path) -> None:
    target = started(build(tmp_path))
    with pytest.raises(RuntimeError, match=r"drop 9 tokens, it dropped 8"):
        target.rollback(9)


def test_plain_decoding_emits_what_mlx_lm_generates(tmp_path: Path) -> None:
    target = build(tmp_path)
    steps = generate_step(mx.array(PROMPT), target.network, max_tokens=30)
    assert run(target, None, PROMPT, tokens=30).ids == [token for token, _ in steps]


def test_hidden_states_of_prefill_and_verify_are_those_of_the_model(tmp_path: Path) -> None:
    target = build(tmp_path)
    target.reset()
    _, hidden = target.prefill([*PROMPT, *TOKENS[:4]])
    expected = np.array(target.network.model(mx.array([[*PROMPT, *TOKENS[:4]]])))
    np.testing.assert_allclose(np.array(hidden), expected, atol=1e-5)
    _, verified = started(target).verify(TOKENS[:4])
    np.testing.assert_allclose(np.array(verified), expected[:, len(PROMPT) :], atol=1e-5)


def test_a_long_prompt_is_prefilled_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build(tmp_path)
    logits, hidden = started(target).prefill(TOKENS)
    target.reset()
    target.prefill(PROMPT)
    monkeypatch.setattr(glm4_moe_lite, "PREFILL_CHUNK", 5)
    chunked_logits, chunked_hidden = target.prefill(TOKENS)
    np.testing.assert_allclose(np.array(chunked_logits), np.array(logits), atol=1e-5)
    np.testing.assert_allclose(np.array(chunked_hidden), np.array(hidden), atol=1e-5)


@pytest.mark.parametrize("bits", [None, 4], ids=["dense", "4-bit"])
def test_the_last_prompt_token_takes_the_path_of_decoding(tmp_path: Path, bits: int | None) -> None:
    target = build(tmp_path, bits)
    target.reset()
    logits, _ = target.prefill(PROMPT)
    target.reset()
    target.network(mx.array([PROMPT[:-1]]), target.caches)
    assert [np.array(logits).tobytes()] == chain(target, PROMPT[-1:])


def test_the_pre_tap_hands_out_the_input_of_the_final_norm_and_leaves_logits_alone(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_target(tmp_path / "target"))
    post = load_target(checkpoint, environ={})
    pre = load_target(checkpoint, environ={"MLXCEL_GLM_MTP_HIDDEN_TAP": "pre"})
    for step in ("prefill", "verify"):
        logits, normed = getattr(post, step)(PROMPT)
        same_logits, residual = getattr(pre, step)(PROMPT)
        assert np.array_equal(np.array(logits), np.array(same_logits))
        assert not np.allclose(np.array(normed), np.array(residual), atol=0.1)
        np.testing.assert_allclose(
            np.array(pre.network.model.norm(residual)), np.array(normed), rtol=1e-6, atol=1e-6
        )


def test_an_unknown_tap_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_target(tmp_path / "target"))
    with pytest.raises(Usage, match=r"MLXCEL_GLM_MTP_HIDDEN_TAP is 'middle'; expected pre or post"):
        load_target(checkpoint, environ={"MLXCEL_GLM_MTP_HIDDEN_TAP": "middle"})


def test_a_config_with_rope_parameters_only_gives_the_logits_of_a_flat_one(tmp_path: Path) -> None:
    flat, nested = (build(tmp_path / rope, rope=rope) for rope in ("flat", "nested"))
    assert chain(started(flat), TOKENS) == chain(started(nested), TOKENS)


def test_another_base_in_rope_parameters_is_heard(tmp_path: Path) -> None:
    flat = build(tmp_path / "flat")
    folder = write_target(tmp_path / "other", rope="nested")
    config = open_checkpoint(folder).config.raw
    config["rope_parameters"]["rope_theta"] = 100.0
    write_json(folder / "config.json", config)
    other = load_target(open_checkpoint(folder), environ={})
    assert chain(started(flat), TOKENS) != chain(started(other), TOKENS)


def test_a_config_without_any_rope_base_is_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target")
    config = open_checkpoint(folder).config.raw
    del config["rope_theta"]
    write_json(folder / "config.json", config)
    with pytest.raises(Refused, match="names no RoPE base"):
        load_target(open_checkpoint(folder), environ={})


def test_a_target_that_lacks_a_tensor_is_refused_with_its_name(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "target", layers=2)
    config = open_checkpoint(folder).config.raw
    write_json(folder / "config.json", config | {"num_hidden_layers": 3})
    with pytest.raises(Refused, match=r"(?s)cannot load it as glm4_moe_lite.*model\.layers\.2\."):
        load_target(open_checkpoint(folder), environ={})


@pytest.mark.parametrize("token", [64, -1, 10**9])
def test_a_prompt_token_outside_the_vocabulary_never_reaches_mlx(tmp_path: Path, token: int) -> None:
    with pytest.raises(ToolError, match=rf"token id {token} at position 2 .* vocabulary of 64 entries"):
        run(build(tmp_path), None, [1, 2, token])
