"""The targets of the next-token-prediction families: verify equals decoding byte for byte, rollback leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.switch_layers import SwitchGLU

from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Refused, ToolError
from draftpair.runtime.interfaces import ALL_ROWS, Target
from draftpair.runtime.load import load_target
from draftpair.runtime.targets import _mlx_lm
from fixtures import deepseek_v3, glm4_moe
from fixtures.goldens import NEXTN_RECIPES, SMALL
from fixtures.pairs import run
from fixtures.split_heads import edit_config

PROMPT = [1, 2, 3, 5, 8, 13, 21, 34]
TOKENS = [(13 * i + 4) % 64 for i in range(16)]

SIZES: dict[str, dict[str, Any]] = {
    "glm4_moe_lite": {},
    "glm4_moe_lite full query": {"q_lora": None},
    "glm4_moe_lite grouped experts": {"experts": 8, "groups": 4, "top_groups": 2},
    "glm4_moe_lite enough experts to be sorted": {"experts": 16, "top_k": 8},
    "glm4_moe": {},
    "glm4_moe without biases and norms": {"bias": False, "qk_norm": False},
    "glm4_moe enough experts to be sorted": {"experts": 16, "top_k": 8},
    "deepseek_v3": {"kept": "F32", **SMALL},
    "deepseek_v3 grouped experts": {"kept": "F32", **SMALL, "experts": 8, "groups": 4, "top_groups": 2},
    "deepseek_v3 enough experts to be sorted": {"kept": "F32", **SMALL, "experts": 16, "top_k": 8},
}
FAMILIES = ("glm4_moe_lite", "glm4_moe", "deepseek_v3")


def build(folder: Path, case: str, bits: int | None = None, **more: Any) -> Target:
    family = case.split()[0]
    options = {"head": False, "tokenizer": False, "layers": 2, **SIZES[case], **more}
    raw = NEXTN_RECIPES[family].write_checkpoint(folder / "target", **options)
    target = load_target(open_checkpoint(raw), environ={})
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
    target.prefill(PROMPT, 1)
    return target


@pytest.mark.parametrize("bits", [None, 4], ids=["dense", "4-bit"])
@pytest.mark.parametrize("case", SIZES)
def test_every_row_of_a_verify_block_has_the_bytes_of_single_token_decoding(
    tmp_path: Path, case: str, bits: int | None
) -> None:
    target = build(tmp_path, case, bits)
    expected = chain(started(target), TOKENS)
    for width in (1, *range(2, 9), 16):
        started(target)
        assert block(target, TOKENS[:width]) == expected[:width], f"width {width}"


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_called_with_too_few_rows_to_be_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    target = build(tmp_path, family, experts=16, top_k=4)
    expected = chain(started(target), TOKENS)
    started(target)
    pairs, call = [], SwitchGLU.__call__

    def spy(experts: SwitchGLU, x: mx.array, indices: mx.array) -> mx.array:
        pairs.append(indices.size)
        return call(experts, x, indices)

    monkeypatch.setattr(SwitchGLU, "__call__", spy)
    assert block(target, TOKENS) == expected
    assert sum(pairs) == 16 * 4
    assert max(pairs) < 64  # from here on mlx-lm sorts


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_and_rollbacks_leave_the_bytes_of_single_tokens(tmp_path: Path, family: str) -> None:
    target = build(tmp_path, family)
    expected = chain(started(target), TOKENS)
    started(target)
    assert [row for begin in range(0, 16, 3) for row in block(target, TOKENS[begin : begin + 3])] == expected
    started(target)
    assert block(target, [*TOKENS[:2], 60, 61, 62])[:2] == expected[:2]
    target.rollback(3)
    assert target.offset == len(PROMPT) + 2
    assert block(target, [TOKENS[2], 63])[0] == expected[2]
    target.rollback(1)
    assert chain(target, TOKENS[3:]) == expected[3:]


def test_rolling_back_more_than_the_cache_holds_is_an_error(tmp_path: Path) -> None:
    target = started(build(tmp_path, "glm4_moe"))
    with pytest.raises(RuntimeError, match=r"drop 9 tokens, it dropped 8"):
        target.rollback(9)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_emits_what_mlx_lm_generates(tmp_path: Path, family: str) -> None:
    target = build(tmp_path, family)
    steps = generate_step(mx.array(PROMPT), target.network, max_tokens=30)
    assert run(target, None, PROMPT, tokens=30).ids == [token for token, _ in steps]


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_of_prefill_and_verify_are_those_of_the_model(tmp_path: Path, family: str) -> None:
    target = build(tmp_path, family)
    target.reset()
    _, hidden = target.prefill([*PROMPT, *TOKENS[:4]], ALL_ROWS)
    expected = np.array(target.network.model(mx.array([[*PROMPT, *TOKENS[:4]]])))
    np.testing.assert_allclose(np.array(hidden), expected, atol=1e-5)
    _, verified = started(target).verify(TOKENS[:4])
    np.testing.assert_allclose(np.array(verified), expected[:, len(PROMPT) :], atol=1e-5)


def test_what_a_drafter_borrows_is_the_models_embedding_and_head(tmp_path: Path) -> None:
    target = build(tmp_path, "glm4_moe")
    weights = dict(tree_flatten(target.network.parameters()))
    ids = mx.array([[3, 1]])
    assert mx.array_equal(target.embed(ids), weights["model.embed_tokens.weight"][ids])
    normed = target.embed(ids)
    assert mx.array_equal(target.head(normed), normed @ weights["lm_head.weight"].T)


def test_a_long_prompt_is_prefilled_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build(tmp_path, "glm4_moe")
    logits, hidden = started(target).prefill(TOKENS, ALL_ROWS)
    target.reset()
    target.prefill(PROMPT, 0)
    monkeypatch.setattr(_mlx_lm, "PREFILL_CHUNK", 5)
    chunked_logits, chunked_hidden = target.prefill(TOKENS, ALL_ROWS)
    np.testing.assert_allclose(np.array(chunked_logits), np.array(logits), atol=1e-5)
    np.testing.assert_allclose(np.array(chunked_hidden), np.array(hidden), atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits", [None, 4], ids=["dense", "4-bit"])
def test_the_last_prompt_token_takes_the_path_of_decoding(
    tmp_path: Path, family: str, bits: int | None
) -> None:
    target = build(tmp_path, family, bits)
    target.reset()
    logits, _ = target.prefill(PROMPT, 1)
    target.reset()
    target.network(mx.array([PROMPT[:-1]]), target.caches)  # type: ignore[attr-defined]
    assert [np.array(logits).tobytes()] == chain(target, PROMPT[-1:])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_target_that_lacks_a_tensor_is_refused_with_its_name(tmp_path: Path, family: str) -> None:
    build(tmp_path, family)
    edit_config(tmp_path / "target", lambda config: config.update(num_hidden_layers=3))
    with pytest.raises(Refused, match=rf"(?s)cannot load it as {family}.*model\.layers\.2\."):
        load_target(open_checkpoint(tmp_path / "target"), environ={})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_without_any_rope_base_is_refused(tmp_path: Path, family: str) -> None:
    build(tmp_path, family)
    edit_config(tmp_path / "target", lambda config: config.pop("rope_theta"))
    with pytest.raises(Refused, match="names no RoPE base"):
        load_target(open_checkpoint(tmp_path / "target"), environ={})


@pytest.mark.parametrize("family", FAMILIES)
def test_rope_parameters_of_transformers_5_give_the_bytes_of_flat_keys(tmp_path: Path, family: str) -> None:
    flat = chain(started(build(tmp_path, family)), TOKENS)

    def nest(config: dict[str, Any]) -> None:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")}
        if "partial_rotary_factor" in config:
            config["rope_parameters"]["partial_rotary_factor"] = config.pop("partial_rotary_factor")
        config.pop("rope_scaling")

    edit_config(tmp_path / "target", nest)
    nested = load_target(open_checkpoint(tmp_path / "target"), environ={})
    assert chain(started(nested), TOKENS) == flat
    edit_config(tmp_path / "target", lambda config: config["rope_parameters"].update(rope_theta=100.0))
    other = load_target(open_checkpoint(tmp_path / "target"), environ={})
    assert chain(started(other), TOKENS) != flat


@pytest.mark.parametrize("token", [64, -1, 10**9])
def test_a_prompt_token_outside_the_vocabulary_never_reaches_mlx(tmp_path: Path, token: int) -> None:
    with pytest.raises(ToolError, match=rf"token id {token} at position 2 .* vocabulary of 64 entries"):
        run(build(tmp_path, "glm4_moe"), None, [1, 2, token])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_raw_checkpoint_gives_its_trunk_wherever_the_head_is_numbered(tmp_path: Path, depth: int) -> None:
    for family in ("glm4_moe", "deepseek_v3"):
        alone = build(tmp_path / family / "alone", family)
        raw = build(tmp_path / family / "raw", family, head=True, depth=depth)
        assert chain(started(raw), TOKENS[:4]) == chain(started(alone), TOKENS[:4])


def test_fp8_is_decoded_block_by_block_and_rounded_to_bfloat16(tmp_path: Path) -> None:
    for kept in ("fp8", "decoded"):
        deepseek_v3.write_checkpoint(tmp_path / kept, kept=kept, tokenizer=False)
    packed, twin = (load_target(open_checkpoint(tmp_path / kept), environ={}) for kept in ("fp8", "decoded"))
    found, expected = (dict(tree_flatten(target.network.parameters())) for target in (packed, twin))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        exact = value if name.endswith("e_score_correction_bias") else value.astype(mx.bfloat16)
        assert mx.array_equal(found[name], exact.astype(found[name].dtype)), name


def test_rope_scaling_that_mlx_lm_does_not_read_is_refused(tmp_path: Path) -> None:
    folder = glm4_moe.write_checkpoint(tmp_path / "target", head=False, tokenizer=False)
    edit_config(folder, lambda config: config.update(rope_scaling={"type": "yarn", "factor": 4.0}))
    with pytest.raises(Refused, match="asks for RoPE scaling yarn"):
        load_target(open_checkpoint(folder), environ={})
    edit_config(folder, lambda config: config.update(rope_scaling=None, partial_rotary_factor=None))
    with pytest.raises(Refused, match="does not state partial_rotary_factor"):
        load_target(open_checkpoint(folder), environ={})


def test_yarn_reaches_the_rotation_and_the_scale(tmp_path: Path) -> None:
    plain = build(tmp_path, "deepseek_v3")
    expected = chain(started(plain), TOKENS)
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
            "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
    edit_config(tmp_path / "target", lambda config: config.update(rope_scaling=yarn))
    scaled = load_target(open_checkpoint(tmp_path / "target"), environ={})
    tokens = chain(started(scaled), TOKENS)
    assert tokens != expected
    assert block(started(scaled), TOKENS[:8]) == tokens[:8]
