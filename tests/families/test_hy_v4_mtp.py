"""HY-V4: plain and in MXFP8, the drafter computed independently, and its faults."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from draftpair import api
from draftpair.errors import Refused
from fixtures.glm4_moe_lite import write_target
from fixtures.hy_v4 import SIZES, Kept, checkpoint_tensors, write_checkpoint
from fixtures.split_heads import (
    Change,
    altered,
    assert_holds,
    attach,
    copied,
    cut_up_projection,
    edit_config,
    edit_tensors,
    pair_verdict,
    read_words,
    removed,
    split,
    verdict,
)
from fixtures.weights import Array

HEAD = "model.mtp_layers.0."
ATTENTION = HEAD + "self_attn."
BIAS = "mlp.gate.e_score_correction_bias"
OUTSIDE = ("enorm.weight", "hnorm.weight", "eh_proj.weight")


def expected(values: dict[str, Array], dtype: str = "BF16") -> dict[str, tuple[Array, str]]:
    """The drafter of a checkpoint whose tensors stand for `values`."""
    head = {name.removeprefix(HEAD): value for name, value in values.items() if name.startswith(HEAD)}
    made = {name: head.pop(name) for name in OUTSIDE}
    made["norm.weight"] = head.pop("final_layernorm.weight")
    keys, others = cut_up_projection(head.pop("self_attn.kv_b_proj.weight"), SIZES.heads, SIZES.nope)
    made["decoder.self_attn.embed_q.weight"], made["decoder.self_attn.unembed_out.weight"] = keys, others
    for name in ("gate_up_proj", "down_proj"):
        made[f"decoder.mlp.switch_mlp.{name}.weight"] = head.pop(f"mlp.experts.{name}")
    made |= {f"decoder.{name}": value for name, value in head.items()}
    return {name: (value, "F32" if name.endswith(BIAS) else dtype) for name, value in made.items()}


@pytest.mark.parametrize("kept", ["mxfp8", "BF16", "F32"])
def test_every_tensor_is_what_an_independent_computation_says(tmp_path: Path, kept: Kept) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw", kept=kept), tmp_path / "drafter")
    _, values = checkpoint_tensors(SIZES, 0, kept)
    assert_holds(drafter, expected(values, "F32" if kept == "F32" else "BF16"))
    assert verdict(drafter) == ("sound", set())


def test_where_the_head_is_found(tmp_path: Path) -> None:
    head = api.inspect(write_checkpoint(tmp_path / "raw"))["head"]
    assert (head["family"], head["prefix"], head["layers_found"], head["complete"]) == (
        "hy_v4_mtp",
        "model.mtp_layers.",
        1,
        True,
    )


def test_what_stays_in_full_precision(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    drafter = split(
        write_checkpoint(tmp_path / "raw", kept="mxfp8"), tmp_path / "drafter", q_bits=4, q_group_size=32
    )
    dtypes = {name: dtype for name, (_, dtype) in read_words(drafter).items()}
    assert dtypes["decoder.mlp.gate.weight"] == dtypes["decoder.self_attn.learnable_sink_param"] == "BF16"
    assert dtypes[f"decoder.{BIAS}"] == "F32"
    assert dtypes["decoder.mlp.switch_mlp.gate_up_proj.weight"] == "U32"
    assert dtypes["decoder.self_attn.embed_q.weight"] == "U32"
    assert verdict(drafter) == ("sound", set())


def test_the_config_of_the_drafter(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", kept="mxfp8")
    config = json.loads((split(raw, tmp_path / "drafter") / "config.json").read_text())
    text = json.loads((raw / "config.json").read_text())
    del text["quantization_config"]
    assert config == {
        "model_type": "hy_v4_mtp",
        "block_size": 2,
        "tie_word_embeddings": False,
        "text_config": text,
    }


def test_a_second_layer_is_refused(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    edit_tensors(raw, copied(HEAD + "enorm.weight", "model.mtp_layers.1.enorm.weight"))
    with pytest.raises(Refused, match="2 head layers"):
        split(raw, tmp_path / "drafter")


FAULTS: dict[str, tuple[Change, str]] = {
    "the gate missing": (removed(ATTENTION + "linear_gate.weight"), "linear_gate"),
    "the sink missing": (removed(ATTENTION + "learnable_sink_param"), "learnable_sink_param"),
    "a scale missing": (removed(HEAD + "mlp.experts.gate_up_proj_scale"), "gate_up_proj"),
    "the indexer's bias missing": (removed(ATTENTION + "indexer.k_norm.bias"), r"k_norm\.bias"),
    "experts of another width": (
        altered(HEAD + "mlp.experts.down_proj", lambda words: words[:, :32]),
        r"experts\.down_proj",
    ),
    "streams": (copied(HEAD + "enorm.weight", HEAD + "hc_attn_layer.hc_pre.hc_fn"), "hc_fn"),
    "NaN in a packed weight": (
        altered(ATTENTION + "q_a_proj.weight", lambda words: np.full_like(words, 0x7F)),
        "q_a_proj",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_head_is_refused_by_name_and_nothing_is_written(tmp_path: Path, fault: str) -> None:
    change, said = FAULTS[fault]
    raw = write_checkpoint(tmp_path / "raw", kept="mxfp8")
    edit_tensors(raw, change)
    with pytest.raises(Refused, match=said):
        split(raw, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


MUTATIONS: dict[str, tuple[Change, str]] = {
    "a tensor missing": (removed("decoder.self_attn.unembed_out.weight"), "DRAFTER-TENSOR-MISSING"),
    "the joined projection as well": (
        copied("decoder.self_attn.q_b_proj.weight", "decoder.self_attn.kv_b_proj.weight"),
        "DRAFTER-TENSOR-UNEXPECTED",
    ),
    "another shape": (
        altered("decoder.mlp.switch_mlp.gate_up_proj.weight", lambda words: words[:, :64]),
        "DRAFTER-TENSOR-SHAPE",
    ),
    "NaN": (
        altered("norm.weight", lambda words: np.full_like(words, 0x7FC0)),
        "DRAFTER-TENSOR-VALUES",
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_validate_calls_a_changed_drafter_unsafe(tmp_path: Path, mutation: str) -> None:
    change, rule = MUTATIONS[mutation]
    drafter = split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter")
    edit_tensors(drafter, change)
    name, rules = verdict(drafter)
    assert name == "unsafe"
    assert rule in rules


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("model_type", "hy_v3", "CONFIG-TEXT-MODEL-TYPE"),
        ("index_head_dim", None, "CONFIG-DIMENSION"),
        ("v_head_dim", 16, "DRAFTER-TENSOR-SHAPE"),
        ("num_nextn_predict_layers", 2, "CONFIG-HEAD-DEPTH"),
        ("qk_rope_head_dim", 3, "CONFIG-ROPE-DIM"),
        ("rope_theta", -1, "CONFIG-NUMBER"),
        ("topk_method", "greedy", "CONFIG-ROUTING"),
        ("hidden_act", "relu2", "CONFIG-ACTIVATION"),
        ("attention_bias", True, "CONFIG-BIAS"),
        ("num_experts_per_tok", None, "CONFIG-EXPERTS-PER-TOKEN"),
    ],
)
def test_validate_calls_a_changed_config_unsafe(tmp_path: Path, key: str, value: object, rule: str) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter")
    edit_config(drafter, lambda config: config.update({key: value}))
    name, rules = verdict(drafter)
    assert name == "unsafe"
    assert rule in rules


def test_the_pair_is_proven_by_its_own_source_and_unsafe_with_another_target(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    drafter = split(raw, tmp_path / "drafter")
    assert pair_verdict(raw, drafter) == ("proven", set())
    target = write_checkpoint(tmp_path / "target", head=False)
    assert pair_verdict(target, drafter) == ("compatible", set())
    name, rules = pair_verdict(write_checkpoint(tmp_path / "other", head=False, experts=8), drafter)
    assert name == "unsafe"
    assert "PAIR-GEOMETRY" in rules
    name, rules = pair_verdict(write_target(tmp_path / "stranger"), drafter)
    assert name == "unsafe"
    assert "PAIR-FAMILY" in rules


@pytest.mark.parametrize("bits", [None, 4])
def test_a_head_put_back_splits_into_the_same_bytes(tmp_path: Path, bits: int | None) -> None:
    if bits:
        pytest.importorskip("mlx.core")
    options = {"q_bits": bits, "q_group_size": 32} if bits else {}
    drafter = split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter", **options)
    target = write_checkpoint(tmp_path / "target", head=False)
    again = split(attach(target, drafter, tmp_path / "attached"), tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (drafter / name).read_bytes()
