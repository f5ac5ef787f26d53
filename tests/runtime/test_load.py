"""Loading: adapters are found by name, the compute dtype is one that works, end-of-text ids are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from draftpair import api
from draftpair.checkpoint import open_checkpoint
from draftpair.errors import ToolError, Usage
from draftpair.runtime import load as loading
from draftpair.runtime.load import eos_ids, load_drafter, load_pair, load_target, load_text_codec
from draftpair.validate.pairing import validated_pair
from fixtures.glm4_moe_lite import write_checkpoint, write_target
from fixtures.pairs import FAMILY, run, split
from fixtures.weights import write_json


def dtypes(model: Any) -> dict[str, mx.Dtype]:
    return {name: value.dtype for name, value in tree_flatten(model.network.parameters())}


def router_biases(model: Any) -> set[mx.Dtype]:
    return {dtype for name, dtype in dtypes(model).items() if name.endswith("e_score_correction_bias")}


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "raw", layers=2)


def test_a_pair_is_loaded_with_tokenizer_and_end_of_text_ids(raw: Path, tmp_path: Path) -> None:
    drafter = open_checkpoint(split(raw, tmp_path / "drafter"))
    pair = load_pair(validated_pair(open_checkpoint(raw), drafter), environ={})
    assert pair.eos == frozenset({63})
    prompt = pair.tokenizer.encode("t3 t5 t8")
    assert (
        run(pair.target, pair.drafter, prompt, 3, tokens=8).ids
        == run(pair.target, None, prompt, tokens=8).ids
    )


def test_on_the_cpu_bf16_weights_are_computed_in_float32(raw: Path) -> None:
    target = load_target(open_checkpoint(raw), environ={})
    assert set(dtypes(target).values()) == {mx.float32}


def test_elsewhere_weights_keep_their_dtype(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "on_cpu", lambda: False)
    target = load_target(open_checkpoint(raw), environ={})
    assert set(dtypes(target).values()) == {mx.bfloat16, mx.float32}
    assert router_biases(target) == {mx.float32}


def test_a_requested_dtype_spares_the_router_bias(raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "on_cpu", lambda: False)
    target = load_target(open_checkpoint(raw), "float16", environ={})
    assert router_biases(target) == {mx.float32}
    assert set(dtypes(target).values()) == {mx.float16, mx.float32}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_experts_on_the_cpu_are_refused_before_mlx_fails(raw: Path, dtype: str) -> None:
    with pytest.raises(ToolError, match=f"experts are not quantized.*float32 only, not in {dtype}"):
        load_target(open_checkpoint(raw), dtype, environ={})


def test_16_bit_quantized_experts_work_on_the_cpu(raw: Path, tmp_path: Path) -> None:
    folder = split(raw, tmp_path / "drafter", q_bits=4, q_group_size=32)
    target = load_target(open_checkpoint(raw), environ={})
    drafter: Any = load_drafter(open_checkpoint(folder), FAMILY, target, "bfloat16", environ={})
    assert dtypes(drafter)["model.embed_tokens.scales"] == mx.bfloat16
    drafter.prefill([1, 2, 3], mx.zeros((1, 3, 64)), 4)
    assert len(drafter.draft(3, lambda logits: mx.argmax(logits, axis=-1))) == 3


def test_an_unknown_dtype_is_wrong_usage(raw: Path) -> None:
    with pytest.raises(Usage, match="dtype is 'int8'; expected auto, float32, bfloat16, float16"):
        load_target(open_checkpoint(raw), "int8", environ={})


@pytest.mark.parametrize("model_type", ["llama", "../drafters/glm4_moe_lite_mtp", "__init__", "base"])
def test_a_target_type_that_does_not_load_is_named(raw: Path, model_type: str) -> None:
    write_json(raw / "config.json", open_checkpoint(raw).config.raw | {"model_type": model_type})
    with pytest.raises(ToolError, match="mlx-lm") as error:
        load_target(open_checkpoint(raw), environ={})
    assert model_type in error.value.message


@pytest.mark.parametrize("family", ["eagle9", "_nextn", "../targets/glm4_moe_lite"])
def test_an_unknown_family_is_named_with_those_that_run(raw: Path, family: str) -> None:
    target = load_target(open_checkpoint(raw), environ={})
    with pytest.raises(ToolError, match=r"draftpair runs .*glm4_moe_lite_mtp") as error:
        load_drafter(open_checkpoint(raw), family, target, environ={})
    assert f"family {family} cannot be run" in error.value.message
    assert error.value.exit_code == 3


def test_a_target_without_a_tokenizer_is_refused_in_words(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_target(tmp_path / "target", tokenizer=False))
    with pytest.raises(ToolError, match="its tokenizer cannot be loaded"):
        load_text_codec(checkpoint)


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([5, 6], 7, {5, 6}), (5, 7, {5}), (None, 7, {7}), (None, None, {9})],
    ids=["generation config", "one id", "config", "tokenizer"],
)
def test_end_of_text_ids_come_from_the_first_file_that_names_them(
    tmp_path: Path, generation: Any, config: Any, expected: set[int]
) -> None:
    folder = write_target(tmp_path / "target")
    write_json(folder / "generation_config.json", {"eos_token_id": generation})
    raw = open_checkpoint(folder).config.raw
    write_json(folder / "config.json", raw | {"eos_token_id": config})
    tokenizer = SimpleNamespace(eos_token_ids={9})
    assert eos_ids(open_checkpoint(folder), tokenizer) == expected


def test_the_width_is_decided_without_mlx() -> None:
    code = "import sys, draftpair.validate.width; sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_modules_quantized_in_ways_of_their_own_are_read_so(tmp_path: Path) -> None:
    api.split_mtp(
        write_checkpoint(tmp_path / "raw"),
        tmp_path / "mixed",
        q_bits=4,
        q_overrides=("lm_head=8", "eh_proj=mxfp4"),
    )
    checkpoint = open_checkpoint(tmp_path / "mixed")
    target = load_target(open_checkpoint(tmp_path / "raw"), environ={})
    drafter = load_drafter(checkpoint, "glm4_moe_lite_mtp", target)
    modules = dict(drafter.network.named_modules())
    found = {name: (m.bits, m.mode) for name, m in modules.items() if hasattr(m, "bits")}
    assert found["lm_head"] == (8, "affine")
    assert found["model.eh_proj"] == (4, "mxfp4")
    assert found["model.mtp_block.self_attn.o_proj"] == (4, "affine")
