"""GLM-5 and GLM-5.3: every variant of the head, its drafter computed independently, and its faults."""

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
from fixtures.glm_moe_dsa import SIZES, checkpoint_tensors, write_checkpoint
from fixtures.latent import Kept
from fixtures.split_heads import (
    Change,
    Words,
    altered,
    assert_holds,
    attach,
    copied,
    cut_up_projection,
    edit_config,
    edit_tensors,
    pair_verdict,
    removed,
    split,
    stacked,
    verdict,
)
from fixtures.weights import Array

BIAS = "mlp.gate.e_score_correction_bias"
HEAD = "model.layers.2."
ATTENTION = HEAD + "self_attn."


def expected(values: dict[str, Array], dtype: str = "BF16") -> dict[str, tuple[Array, str]]:
    """The drafter of a checkpoint whose tensors stand for `values`."""
    head = {name.removeprefix(HEAD): value for name, value in values.items() if name.startswith(HEAD)}
    made = {
        f"mtp.{name.replace('shared_head.norm', 'shared_head_norm')}": value
        for name, value in head.items()
        if ".experts." not in name
        and not name.startswith(("self_attn.kv_b", "embed_tokens.", "shared_head.head."))
    }
    keys, others = cut_up_projection(head["self_attn.kv_b_proj.weight"], SIZES.heads, SIZES.nope)
    made["mtp.self_attn.embed_q.weight"], made["mtp.self_attn.unembed_out.weight"] = keys, others
    for name in ("gate_proj", "up_proj", "down_proj"):
        made[f"mtp.mlp.switch_mlp.{name}.weight"] = stacked(
            head, "mlp.experts.", f".{name}.weight", SIZES.experts
        )
    return {name: (value, "F32" if name.endswith(BIAS) else dtype) for name, value in made.items()}


@pytest.mark.parametrize("kept", ["fp8", "BF16", "F32"])
def test_every_tensor_is_what_an_independent_computation_says(tmp_path: Path, kept: Kept) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw", kept=kept), tmp_path / "drafter")
    _, values = checkpoint_tensors(SIZES, 0, kept)
    assert_holds(drafter, expected(values, "F32" if kept == "F32" else "BF16"))
    assert verdict(drafter) == ("sound", set())


def with_copies(folder: Path, change: Change = lambda words: None) -> Path:
    """A checkpoint whose head repeats the target's embedding and output head, with something changed."""
    raw = write_checkpoint(folder, own_embedding=True, own_head=True)

    def repeat(words: Words) -> None:
        words[HEAD + "embed_tokens.weight"] = words["model.embed_tokens.weight"]
        words[HEAD + "shared_head.head.weight"] = words["lm_head.weight"]

    edit_tensors(raw, repeat)
    edit_tensors(raw, change)
    return raw


def test_copies_of_embedding_and_head_are_compared_and_left_out(tmp_path: Path) -> None:
    report = api.split_mtp(with_copies(tmp_path / "raw"), tmp_path / "drafter")
    values = checkpoint_tensors(SIZES, own_embedding=True, own_head=True)[1]
    assert_holds(tmp_path / "drafter", expected(values))
    manifest = json.loads((tmp_path / "drafter" / "draftpair-manifest.json").read_text())
    assert manifest["dropped"] == [HEAD + "embed_tokens.weight", HEAD + "shared_head.head.weight"]
    notes = [f["where"] for f in report["findings"] if f["rule"] == "SPLIT-COPY-LEFT-OUT"]
    assert notes == manifest["dropped"]


@pytest.mark.parametrize("row", [0, -1])
@pytest.mark.parametrize("name", ["embed_tokens.weight", "shared_head.head.weight"])
def test_what_is_no_copy_is_not_left_out(tmp_path: Path, name: str, row: int) -> None:
    def train(words: Words) -> None:
        values, dtype = words[HEAD + name]
        values = values.copy()
        values[row, 0] ^= 1
        words[HEAD + name] = (values, dtype)

    with pytest.raises(Refused, match=rf"{name} is not a copy of "):
        api.split_mtp(with_copies(tmp_path / "raw", train), tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_a_copy_without_its_original_is_left_out_with_a_warning(tmp_path: Path) -> None:
    raw = with_copies(tmp_path / "raw", removed("model.embed_tokens.weight"))
    report = api.split_mtp(raw, tmp_path / "drafter")
    (finding,) = [f for f in report["findings"] if f["rule"] == "SPLIT-COPY-UNCOMPARED"]
    assert (finding["level"], finding["where"]) == ("warning", HEAD + "embed_tokens.weight")


def test_the_config_states_what_the_engine_reads_nowhere_else(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")

    def older(config: dict[str, object]) -> None:
        del config["rope_parameters"], config["moe_layer_freq"], config["topk_method"]
        config["rope_theta"] = 1_000_000

    edit_config(raw, older)
    drafter = split(raw, tmp_path / "drafter")
    config = json.loads((drafter / "config.json").read_text())
    assert config["model_type"] == "glm_moe_dsa_mtp"
    text = config["text_config"]
    assert text["rope_parameters"] == {"rope_type": "default", "rope_theta": 1_000_000}
    assert (text["moe_layer_freq"], text["topk_method"]) == (1, "noaux_tc")
    assert verdict(drafter) == ("sound", set())


def test_rope_parameters_that_are_there_stay(tmp_path: Path) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter")
    text = json.loads((drafter / "config.json").read_text())["text_config"]
    assert text["rope_parameters"] == {"rope_theta": 1_000_000, "rope_type": "default"}


def test_layer_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    match = find_head(open_checkpoint(write_checkpoint(tmp_path / "raw", layers=10)))
    assert match.layers == (10,)
    assert match.complete


def test_a_second_layer_is_refused(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", depth=2)
    with pytest.raises(Refused, match=r"2 head layers \(model\.layers\.2, model\.layers\.3\)"):
        split(raw, tmp_path / "drafter")


FAULTS: dict[str, tuple[Change, str]] = {
    "an expert missing": (
        removed(*(f"{HEAD}mlp.experts.2.{name}_proj.weight" for name in ("gate", "up", "down"))),
        r"mlp\.experts\.2\.",
    ),
    "indexer missing": (removed(ATTENTION + "indexer.wk.weight"), r"indexer\.wk"),
    "indexer's bias missing": (removed(ATTENTION + "indexer.k_norm.bias"), r"k_norm\.bias"),
    "scale missing": (removed(ATTENTION + "kv_b_proj.weight_scale_inv"), "kv_b_proj"),
    "a weight cut short": (altered(HEAD + "eh_proj.weight", lambda words: words[:, :192]), r"\[192, 192\]"),
    "scales of another block size": (
        altered(ATTENTION + "kv_b_proj.weight_scale_inv", lambda words: np.repeat(words, 3, 0)),
        "kv_b_proj",
    ),
    "scales of another dtype": (
        lambda tensors: tensors.update(
            {ATTENTION + "o_proj.weight_scale_inv": (np.ones((2, 1), "<u4"), "U32")}
        ),
        "o_proj",
    ),
    "NaN among FP8 codes": (
        altered(HEAD + "mlp.experts.3.up_proj.weight", lambda words: np.full_like(words, 0xFF)),
        r"experts\.3\.up_proj",
    ),
    "NaN": (altered(HEAD + "enorm.weight", lambda words: np.full_like(words, 0x7FC0)), "enorm"),
    "an unknown tensor": (copied(HEAD + "enorm.weight", HEAD + "hc_attn_base"), "hc_attn_base"),
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
    "a tensor missing": (removed("mtp.self_attn.indexer.wq_b.weight"), "DRAFTER-TENSOR-MISSING"),
    "a tensor too many": (copied("mtp.enorm.weight", "mtp.embed_tokens.weight"), "DRAFTER-TENSOR-UNEXPECTED"),
    "another shape": (altered("mtp.eh_proj.weight", lambda words: words[:, :192]), "DRAFTER-TENSOR-SHAPE"),
    "NaN": (
        altered("mtp.self_attn.indexer.k_norm.bias", lambda words: np.full_like(words, 0x7FC0)),
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
        ("model_type", "glm4_moe", "CONFIG-TEXT-MODEL-TYPE"),
        ("rope_parameters", {"rope_type": "default"}, "CONFIG-ROPE-PARAMETERS"),
        ("index_n_heads", 0, "CONFIG-DIMENSION"),
        ("scoring_func", "softmax", "CONFIG-ROUTING"),
    ],
)
def test_validate_calls_a_changed_config_unsafe(tmp_path: Path, key: str, value: object, rule: str) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter")
    edit_config(drafter, lambda config: config.update({key: value}))
    name, rules = verdict(drafter)
    assert name == "unsafe"
    assert rule in rules


def test_validate_misses_no_key_that_the_engine_needs(tmp_path: Path) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter")
    edit_config(drafter, lambda config: config.pop("moe_layer_freq"))
    assert verdict(drafter) == ("unsafe", {"CONFIG-ENGINE"})


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
