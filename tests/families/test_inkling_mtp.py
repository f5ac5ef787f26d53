"""Inkling: layers of two kinds, rows in turns, a norm of the target's; the drafter computed independently; faults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair import api
from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Refused
from draftpair.families.heads import find_head
from fixtures.glm4_moe_lite import write_target
from fixtures.inkling import Geometry, checkpoint_tensors, write_checkpoint
from fixtures.split_heads import (
    Change,
    Words,
    altered,
    assert_holds,
    attach,
    copied,
    edit_config,
    edit_tensors,
    pair_verdict,
    read_words,
    removed,
    split,
    verdict,
)
from fixtures.weights import Array, write_json

HEAD = "model.mtp.layers."
BLOCK = "transformer_block."
RENAMED = {
    "attn.wo_ud.weight": "self_attn.o_proj.weight",
    "attn.q_norm.weight": "self_attn.q_norm.weight",
    "attn.k_norm.weight": "self_attn.k_norm.weight",
    "attn.rel_logits_proj.proj": "self_attn.rel_proj",
    "attn_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.w2_md.weight": "mlp.down_proj.weight",
    "mlp.global_scale": "mlp.global_scale",
}
CONVOLUTIONS = {
    "attn.k_sconv": "self_attn.k_sconv",
    "attn.v_sconv": "self_attn.v_sconv",
    "attn_sconv": "attn_sconv",
    "mlp_sconv": "mlp_sconv",
}


def expected(dtype: str = "BF16", **sizes: Any) -> dict[str, tuple[Array, str]]:
    """The drafter of a checkpoint of these sizes."""
    geometry = replace(Geometry(), **sizes)
    values = checkpoint_tensors(geometry, 0)
    made = {"norm.weight": values["model.llm.norm.weight"]}
    for layer in range(geometry.depth):
        raw, base = f"{HEAD}{layer}.", f"blocks.{layer}."
        for name in ("embed_norm", "hidden_norm", "input_proj"):
            made[f"{base}{name}.weight"] = values[f"{raw}{name}.weight"]
        raw, base = raw + BLOCK, base + BLOCK
        made |= {base + new: values[raw + old] for old, new in RENAMED.items()}
        for old, new in CONVOLUTIONS.items():
            made[f"{base}{new}.conv.weight"] = values[f"{raw}{old}.weight"].transpose(0, 2, 1)
        four = [values[f"{raw}attn.{name}.weight"] for name in ("wq_du", "wk_dv", "wv_dv", "wr_du")]
        made[f"{base}self_attn.qkvr_proj.weight"] = np.concatenate(four)
        turns = values[f"{raw}mlp.w13_dn.weight"]
        made[f"{base}mlp.gate_proj.weight"], made[f"{base}mlp.up_proj.weight"] = turns[0::2], turns[1::2]
    return {name: (value, dtype) for name, value in made.items()}


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("shards", [1, 2], ids=["one file", "a file of its own"])
def test_every_tensor_is_what_an_independent_computation_says(
    tmp_path: Path, dtype: str, shards: int
) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw", dtype=dtype, shards=shards), tmp_path / "drafter")
    assert_holds(drafter, expected(dtype))
    assert verdict(drafter) == ("sound", set())


@pytest.mark.parametrize("local", [(), (1,), (0, 1, 2)], ids=repr)
def test_layers_of_either_kind_have_their_own_shapes(tmp_path: Path, local: tuple[int, ...]) -> None:
    raw = write_checkpoint(tmp_path / "raw", local=local)
    drafter = split(raw, tmp_path / "drafter")
    assert_holds(drafter, expected(local=local))
    assert verdict(drafter) == ("sound", set())
    config = json.loads((drafter / "config.json").read_text())
    assert config["mtp_local_layer_ids"] == config["text_config"]["mtp_local_layer_ids"] == list(local)


def test_a_head_as_deep_as_the_published_one(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", depth=8, local=(0, 2, 4, 5, 6, 7))
    match = find_head(open_checkpoint(raw))
    assert match is not None
    assert (match.layers, len(match.tensors), match.complete) == (tuple(range(8)), 160, True)
    drafter = split(raw, tmp_path / "drafter")
    assert json.loads((drafter / "config.json").read_text())["block_size"] == 10
    assert verdict(drafter) == ("sound", set())


def test_the_config_of_the_drafter(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    config = json.loads((split(raw, tmp_path / "drafter") / "config.json").read_text())
    text = json.loads((raw / "config.json").read_text())["text_config"]
    assert config == {
        "model_type": "inkling_mtp",
        "block_size": 5,
        "tie_word_embeddings": False,
        "num_mtp_layers": 3,
        "mtp_local_layer_ids": [0, 2],
        "text_config": {**text, "num_mtp_layers": 3, "mtp_local_layer_ids": [0, 2]},
    }


def set_head_config(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    document = json.loads(path.read_text())
    document["mtp_config"].update(values)
    write_json(path, document)


def test_layers_that_no_config_tells_apart_are_told_by_their_shapes(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    set_head_config(raw, local_layer_ids=None)
    config = json.loads((split(raw, tmp_path / "drafter") / "config.json").read_text())
    assert config["mtp_local_layer_ids"] == [0, 2]


def test_a_config_that_the_shapes_contradict_is_refused(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    set_head_config(raw, local_layer_ids=[1])
    with pytest.raises(Refused, match=r"\[1\] attend within a window.* shapes these are layers \[0, 2\]"):
        split(raw, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


@pytest.mark.parametrize(("stated", "written"), [([1], [1]), (None, [])], ids=["stated", "not stated"])
def test_where_both_kinds_have_one_shape_the_config_decides(
    tmp_path: Path, stated: list[int] | None, written: list[int]
) -> None:
    raw = write_checkpoint(tmp_path / "raw", local_kv_heads=1, window=12)
    set_head_config(raw, local_layer_ids=stated)
    config = json.loads((split(raw, tmp_path / "drafter") / "config.json").read_text())
    assert config["mtp_local_layer_ids"] == written


def test_a_shallower_head_than_declared_is_written_as_deep_as_it_is(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    set_head_config(raw, num_nextn_predict_layers=8)
    found = api.split_mtp(raw, tmp_path / "drafter")
    assert "HEAD-DEPTH" in {finding["rule"] for finding in found["findings"]}
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert (config["num_mtp_layers"], config["block_size"]) == (3, 5)


def test_a_head_of_nine_layers_is_refused(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", depth=9, local=(0,))
    with pytest.raises(Refused, match="9 head layers"):
        split(raw, tmp_path / "drafter")


def test_the_norm_of_a_converted_target_has_another_name(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")

    def convert(tensors: Words) -> None:
        for name in [name for name in tensors if name.startswith("model.llm.")]:
            tensors[name.replace("model.llm.", "language_model.model.")] = tensors.pop(name)

    edit_tensors(raw, convert)
    assert_holds(split(raw, tmp_path / "drafter"), expected())


def test_convolutions_position_biases_and_scales_are_never_quantized(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    drafter = split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter", q_bits=4)
    dtypes = {name: dtype for name, (_, dtype) in read_words(drafter).items()}
    packed = {name.split(BLOCK)[-1] for name, dtype in dtypes.items() if dtype == "U32"}
    assert packed == {
        *(f"blocks.{layer}.input_proj.weight" for layer in range(3)),
        *(f"self_attn.{name}.weight" for name in ("qkvr_proj", "o_proj")),
        *(f"mlp.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")),
    }
    for name in ("self_attn.k_sconv.conv.weight", "self_attn.rel_proj", "mlp.global_scale"):
        assert dtypes[f"blocks.0.{BLOCK}{name}"] == "BF16"
    assert verdict(drafter) == ("sound", set())


def test_widths_that_would_fit_a_group_make_no_difference(tmp_path: Path) -> None:
    """A table of position biases is no weight, even where its rows could be cut into groups."""
    pytest.importorskip("mlx.core")
    raw = write_checkpoint(tmp_path / "raw", window=64, extent=128)
    found = api.split_mtp(raw, tmp_path / "drafter", q_bits=4)
    dtypes = {name: dtype for name, (_, dtype) in read_words(tmp_path / "drafter").items()}
    assert dtypes[f"blocks.0.{BLOCK}self_attn.rel_proj"] == "BF16"
    reasons = {entry["name"]: entry["reason"] for entry in found["kept_full_precision"]}
    assert "position biases" in reasons[f"blocks.1.{BLOCK}self_attn.rel_proj"]


def test_a_target_without_its_head_is_told_so(tmp_path: Path) -> None:
    report = api.validate(write_checkpoint(tmp_path / "target", head=False))
    assert report["verdict"] == "sound"
    (absent,) = report["findings"]
    assert (absent["rule"], absent["where"]) == (
        "HEAD-ABSENT",
        "config.json#/mtp_config/num_nextn_predict_layers",
    )


FAULTS: dict[str, tuple[Change, str]] = {
    "the target's norm missing": (removed("model.llm.norm.weight"), r"model\.llm\.norm\.weight"),
    "one of four joined projections missing": (removed(f"{HEAD}1.{BLOCK}attn.wr_du.weight"), r"1\.\S*wr_du"),
    "a convolution missing": (removed(f"{HEAD}0.{BLOCK}mlp_sconv.weight"), r"0\.\S*mlp_sconv"),
    "the scale missing": (removed(f"{HEAD}2.{BLOCK}mlp.global_scale"), r"2\.\S*global_scale"),
    "an odd number of rows": (
        altered(f"{HEAD}0.{BLOCK}mlp.w13_dn.weight", lambda words: words[:-1]),
        r"w13_dn\S* in \S+ has shape \[255, 64\]",
    ),
    "keys of neither kind": (
        altered(f"{HEAD}0.{BLOCK}attn.wk_dv.weight", lambda words: words[:16]),
        r"0\.\S*wk_dv",
    ),
    "a convolution of another width": (
        altered(f"{HEAD}1.{BLOCK}attn_sconv.weight", lambda words: words[..., :3]),
        r"1\.\S*attn_sconv",
    ),
    "a norm between the layers": (
        copied("model.llm.norm.weight", "model.mtp.chain_norm.weight"),
        r"model\.mtp\.chain_norm",
    ),
    "NaN in interleaved rows": (
        altered(f"{HEAD}0.{BLOCK}mlp.w13_dn.weight", lambda words: np.full_like(words, 0x7FC0)),
        "w13_dn",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_head_is_refused_by_name_and_nothing_is_written(tmp_path: Path, fault: str) -> None:
    change, said = FAULTS[fault]
    raw = write_checkpoint(tmp_path / "raw")
    edit_tensors(raw, change)
    with pytest.raises(Refused, match=said):
        split(raw, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


MUTATIONS: dict[str, tuple[Change, str]] = {
    "a tensor missing": (removed(f"blocks.1.{BLOCK}mlp.up_proj.weight"), "DRAFTER-TENSOR-MISSING"),
    "the norm missing": (removed("norm.weight"), "DRAFTER-TENSOR-MISSING"),
    "a layer too many": (
        copied("blocks.2.embed_norm.weight", "blocks.3.embed_norm.weight"),
        "DRAFTER-TENSOR-UNEXPECTED",
    ),
    "a layer of neither kind": (
        altered(f"blocks.0.{BLOCK}self_attn.qkvr_proj.weight", lambda words: words[:100]),
        "DRAFTER-TENSOR-SHAPE",
    ),
    "a convolution in the published order": (
        altered(f"blocks.0.{BLOCK}attn_sconv.conv.weight", lambda words: words.transpose(0, 2, 1)),
        "DRAFTER-TENSOR-SHAPE",
    ),
    "NaN": (
        altered("blocks.0.hidden_norm.weight", lambda words: np.full_like(words, 0x7FC0)),
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
        ("model_type", "qwen3_5", "CONFIG-TEXT-MODEL-TYPE"),
        ("dense_intermediate_size", None, "CONFIG-DIMENSION"),
        ("dense_intermediate_size", 64, "DRAFTER-TENSOR-SHAPE"),
        ("swa_num_key_value_heads", 4, "DRAFTER-TENSOR-SHAPE"),
        ("num_mtp_layers", 9, "CONFIG-HEAD-DEPTH"),
        ("num_mtp_layers", 2, "DRAFTER-TENSOR-UNEXPECTED"),
        ("mtp_local_layer_ids", None, "CONFIG-LOCAL-LAYERS"),
        ("logits_mup_width_multiplier", 0, "CONFIG-NUMBER"),
        ("chain_hidden_post_norm", True, "CONFIG-CHAIN-NORM"),
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
    name, rules = pair_verdict(write_checkpoint(tmp_path / "other", head=False, local_kv_heads=4), drafter)
    assert name == "unsafe"
    assert "PAIR-GEOMETRY" in rules
    name, rules = pair_verdict(write_target(tmp_path / "stranger"), drafter)
    assert name == "unsafe"
    assert "PAIR-FAMILY" in rules


@pytest.mark.parametrize("bits", [None, 4])
def test_a_head_put_back_splits_into_the_same_bytes(tmp_path: Path, bits: int | None) -> None:
    if bits:
        pytest.importorskip("mlx.core")
    drafter = split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter", q_bits=bits)
    target = write_checkpoint(tmp_path / "target", head=False)
    again = split(attach(target, drafter, tmp_path / "attached"), tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (drafter / name).read_bytes()
