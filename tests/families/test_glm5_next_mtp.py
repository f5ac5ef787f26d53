"""GLM-5.3-Flash: every variant of the head, its drafter computed independently, and its faults."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from draftpair import api
from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Refused
from draftpair.families.heads import find_head
from fixtures.glm4_moe_lite import write_target
from fixtures.glm5_next import PREFIX, SIZES, checkpoint_tensors, write_checkpoint
from fixtures.latent import Kept
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
    stacked,
    verdict,
)
from fixtures.weights import Array

BIAS = "mlp.gate.e_score_correction_bias"
HEAD = PREFIX + "layers.2."
ATTENTION = HEAD + "self_attn."
PREFIXES = (PREFIX, "language_model.model.", "model.", "")


def expected(
    values: dict[str, Array], prefix: str = PREFIX, dtype: str = "BF16"
) -> dict[str, tuple[Array, str]]:
    """The drafter of a checkpoint whose tensors stand for `values`."""
    raw = f"{prefix}layers.2."
    head = {name.removeprefix(raw): value for name, value in values.items() if name.startswith(raw)}
    made = {name: head.pop(name) for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight")}
    made["shared_head_norm.weight"] = head.pop("shared_head.norm.weight")
    joined = {
        "self_attn.qkv_a_proj": ("self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        "mlp.shared_experts.gate_up_proj": ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    }
    for output, (first, second) in joined.items():
        made[f"mtp_block.{output}.weight"] = np.vstack(
            [head.pop(f"{first}.weight"), head.pop(f"{second}.weight")]
        )
    keys, others = cut_up_projection(head.pop("self_attn.kv_b_proj.weight"), SIZES.heads, SIZES.nope)
    made["mtp_block.self_attn.embed_q.weight"], made["mtp_block.self_attn.unembed_out.weight"] = keys, others
    for name in ("gate_proj", "up_proj", "down_proj"):
        experts = stacked(head, "mlp.experts.", f".{name}.weight", SIZES.experts)
        made[f"mtp_block.mlp.switch_mlp.{name}.weight"] = experts
    made |= {f"mtp_block.{name}": value for name, value in head.items() if ".experts." not in name}
    return {name: (value, "F32" if name.endswith(BIAS) else dtype) for name, value in made.items()}


@pytest.mark.parametrize("kept", ["fp8", "BF16", "F32"])
def test_every_tensor_is_what_an_independent_computation_says(tmp_path: Path, kept: Kept) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw", kept=kept), tmp_path / "drafter")
    _, values = checkpoint_tensors(SIZES, 0, kept)
    assert_holds(drafter, expected(values, dtype="F32" if kept == "F32" else "BF16"))
    assert verdict(drafter) == ("sound", set())


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_head_is_found_under_the_names_of_converters_too(tmp_path: Path, prefix: str) -> None:
    raw = write_checkpoint(tmp_path / "raw", prefix=prefix)
    drafter = split(raw, tmp_path / "drafter")
    assert_holds(drafter, expected(checkpoint_tensors(SIZES, prefix=prefix)[1], prefix))


def test_two_heads_under_two_prefixes_are_refused(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")

    def double(tensors: dict[str, tuple[Array, str]]) -> None:
        for name in [name for name in tensors if name.startswith(HEAD)]:
            tensors[name.replace(PREFIX, "model.")] = tensors[name]

    edit_tensors(raw, double)
    with pytest.raises(Refused, match="a head under each of"):
        split(raw, tmp_path / "drafter")


def test_bare_arrays_of_the_indexer_are_never_quantized(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    raw = write_checkpoint(tmp_path / "raw")
    drafter = split(raw, tmp_path / "drafter", q_bits=4, q_group_size=32)
    dtypes = {name: dtype for name, (_, dtype) in read_words(drafter).items()}
    for name in ("index_kpool_compress_ape", "index_kpool_compress_gate"):
        assert dtypes[f"mtp_block.self_attn.indexer.{name}"] == "BF16"
    assert dtypes["mtp_block.mlp.gate.weight"] == "BF16"
    assert dtypes["mtp_block.self_attn.qkv_a_proj.weight"] == "U32"
    assert verdict(drafter) == ("sound", set())


def test_inspect_looks_at_a_config_whose_head_dim_is_zero(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    assert json.loads((raw / "config.json").read_text())["text_config"]["head_dim"] == 0
    head = api.inspect(raw)["head"]
    assert (head["family"], head["prefix"], head["complete"]) == ("glm5_next_mtp", HEAD, True)


def test_the_config_of_the_drafter(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    config = json.loads((split(raw, tmp_path / "drafter") / "config.json").read_text())
    text = json.loads((raw / "config.json").read_text())["text_config"]
    assert config == {
        "model_type": "glm5_next_mtp",
        "block_size": 2,
        "tie_word_embeddings": False,
        "text_config": text,
    }


def test_layer_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    match = find_head(open_checkpoint(write_checkpoint(tmp_path / "raw", layers=10)))
    assert match.layers == (10,)
    assert match.complete


def test_a_second_layer_is_refused(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", depth=2)
    with pytest.raises(Refused, match="2 head layers"):
        split(raw, tmp_path / "drafter")


FAULTS: dict[str, tuple[Change, str]] = {
    "an expert missing": (
        removed(*(f"{HEAD}mlp.experts.0.{name}_proj.weight" for name in ("gate", "up", "down"))),
        r"mlp\.experts\.0\.",
    ),
    "one of two joined projections missing": (
        removed(ATTENTION + "kv_a_proj_with_mqa.weight"),
        "kv_a_proj_with_mqa",
    ),
    "half of the shared expert missing": (
        removed(HEAD + "mlp.shared_experts.up_proj.weight"),
        r"shared_experts\.up_proj",
    ),
    "pooling missing": (removed(ATTENTION + "indexer.index_kpool_compress_ape"), "index_kpool_compress_ape"),
    "scale missing": (removed(ATTENTION + "q_a_proj.weight_scale_inv"), "q_a_proj"),
    "pooling of another size": (
        altered(ATTENTION + "indexer.index_kpool_compress_ape", lambda words: words[:2]),
        "index_kpool_compress_ape",
    ),
    "scales of another block size": (
        altered(ATTENTION + "o_proj.weight_scale_inv", lambda words: np.repeat(words, 3, 0)),
        "o_proj",
    ),
    "NaN in a joined projection": (
        altered(ATTENTION + "q_a_proj.weight", lambda words: np.full_like(words, 0x7F)),
        "q_a_proj",
    ),
    "hyper-connections": (copied(HEAD + "enorm.weight", HEAD + "hc_attn_base"), "hc_attn_base"),
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
    "a tensor missing": (removed("mtp_block.self_attn.qkv_a_proj.weight"), "DRAFTER-TENSOR-MISSING"),
    "projections apart again": (
        copied("mtp_block.self_attn.q_b_proj.weight", "mtp_block.self_attn.q_a_proj.weight"),
        "DRAFTER-TENSOR-UNEXPECTED",
    ),
    "another shape": (
        altered("mtp_block.mlp.shared_experts.gate_up_proj.weight", lambda words: words[:96]),
        "DRAFTER-TENSOR-SHAPE",
    ),
    "NaN": (
        altered("shared_head_norm.weight", lambda words: np.full_like(words, 0x7FC0)),
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
        ("model_type", "glm_moe_dsa", "CONFIG-TEXT-MODEL-TYPE"),
        ("qk_rope_head_dim", 8, "CONFIG-NO-ROPE"),
        ("mla_use_nope", False, "CONFIG-NO-ROPE"),
        ("index_kpool", None, "CONFIG-DIMENSION"),
        ("index_kpool", 8, "DRAFTER-TENSOR-SHAPE"),
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
    wider = write_checkpoint(tmp_path / "wider", head=False, hidden=128)
    name, rules = pair_verdict(wider, drafter)
    assert name == "unsafe"
    assert "PAIR-HIDDEN-SIZE" in rules
    name, rules = pair_verdict(write_target(tmp_path / "stranger"), drafter)
    assert name == "unsafe"
    assert "PAIR-FAMILY" in rules


@pytest.mark.parametrize("bits", [None, 4])
def test_a_head_put_back_splits_into_the_same_bytes(tmp_path: Path, bits: int | None) -> None:
    options = {"q_bits": bits, "q_group_size": 32} if bits else {}
    kept: Kept = "BF16" if bits else "fp8"  # one config.json cannot describe MLX's packing and FP8
    drafter = split(write_checkpoint(tmp_path / "raw", kept=kept), tmp_path / "drafter", **options)
    target = write_checkpoint(tmp_path / "target", kept=kept, head=False)
    again = split(attach(target, drafter, tmp_path / "attached"), tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (drafter / name).read_bytes()
