"""Finding a head in a checkpoint: the tensors decide, the config is compared, every difference is a finding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair.checkpoint import Checkpoint, open_checkpoint
from draftpair.families.heads import HeadMatch, declared_depth, find_head, recognised_head
from fixtures import inkling, nemotron_h
from fixtures.glm4_moe_lite import Geometry, checkpoint_tensors, config_document
from fixtures.split_heads import Words, edit_tensors, removed
from fixtures.weights import write_json, write_weights

Tensors = dict[str, tuple[np.ndarray, str]]


def build(
    folder: Path,
    change_tensors: Callable[[Tensors], None] = lambda tensors: None,
    change_config: Callable[[dict[str, Any]], None] = lambda config: None,
    **sizes: Any,
) -> Checkpoint:
    """A raw checkpoint with something changed."""
    geometry = Geometry(**sizes)
    tensors: Tensors = {
        name: (values, "F32" if name.endswith("e_score_correction_bias") else "BF16")
        for name, values in checkpoint_tensors(geometry, 0).items()
    }
    config = config_document(geometry)
    change_tensors(tensors)
    change_config(config)
    folder.mkdir()
    write_weights(folder, tensors, shards=1)
    write_json(folder / "config.json", config)
    return open_checkpoint(folder)


def findings_of(checkpoint: Checkpoint) -> dict[str, str]:
    match = find_head(checkpoint)
    assert match is not None
    return {finding.rule: finding.message for finding in match.findings}


def test_a_whole_head_has_nothing_to_be_said_of_it(tmp_path: Path) -> None:
    match = find_head(build(tmp_path / "raw"))
    assert match is not None
    assert match.complete
    assert match.findings == ()
    assert (match.prefix, match.layers_declared, match.layers_found) == ("model.layers.3.", 1, 1)
    assert len(match.tensors) == sum(len(matched.sources) for matched in match.matched) == 44


@pytest.mark.parametrize(
    "name",
    [
        "embed_tokens.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        "self_attn.kv_b_proj.weight",
        "self_attn.q_a_proj.weight",
        "mlp.gate.e_score_correction_bias",
        "mlp.experts.0.up_proj.weight",
        "mlp.experts.7.down_proj.weight",
        "mlp.shared_experts.gate_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    checkpoint = build(tmp_path / "raw", lambda tensors: tensors.pop(f"model.layers.3.{name}"))
    match = find_head(checkpoint)
    assert match is not None
    assert not match.complete
    assert match.missing == (f"model.layers.3.{name}",)
    assert name in findings_of(checkpoint)["HEAD-TENSOR-MISSING"]


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    def drop_experts(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.3.mlp.experts.")]:
            del tensors[name]

    message = findings_of(build(tmp_path / "raw", drop_experts))["HEAD-TENSOR-MISSING"]
    assert "and 19 more" in message


@pytest.mark.parametrize(
    "name", ["surprise.weight", "mlp.experts.8.up_proj.weight", "self_attn.q_proj.weight"]
)
def test_an_unexpected_tensor_is_named(tmp_path: Path, name: str) -> None:
    extra = (np.zeros((4, 4), "f4"), "BF16")
    checkpoint = build(tmp_path / "raw", lambda tensors: tensors.__setitem__(f"model.layers.3.{name}", extra))
    findings = findings_of(checkpoint)
    assert name in findings.get("HEAD-TENSOR-UNEXPECTED", "") + findings.get("HEAD-TENSOR-SHAPE", "")


def test_a_wrong_shape_shows_both(tmp_path: Path) -> None:
    def cut(tensors: Tensors) -> None:
        values, dtype = tensors["model.layers.3.eh_proj.weight"]
        tensors["model.layers.3.eh_proj.weight"] = (values[:, :64], dtype)

    message = findings_of(build(tmp_path / "raw", cut))["HEAD-TENSOR-SHAPE"]
    assert "[64, 64]" in message
    assert "[64, 128]" in message


@pytest.mark.parametrize(
    ("suffix", "dtype"),
    [
        ("scales", "BF16"),
        ("weight_scale_inv", "F32"),
        ("weight", "U32"),
        ("weight", "F8_E4M3"),
        ("weight", "U8"),
    ],
)
def test_a_packed_head_is_refused_as_such(tmp_path: Path, suffix: str, dtype: str) -> None:
    name = f"model.layers.3.self_attn.o_proj.{suffix}"
    values = np.zeros((64, 8), "u4" if dtype == "U32" else "u1" if dtype in ("F8_E4M3", "U8") else "f4")
    checkpoint = build(tmp_path / "raw", lambda tensors: tensors.__setitem__(name, (values, dtype)))
    findings = findings_of(checkpoint)
    assert set(findings) == {"HEAD-PACKED"}
    assert name in findings["HEAD-PACKED"]
    assert dtype in findings["HEAD-PACKED"]


@pytest.mark.parametrize("declared", [None, 0], ids=["null", "zero"])
def test_an_undeclared_head_is_found_all_the_same(tmp_path: Path, declared: int | None) -> None:
    checkpoint = build(
        tmp_path / "raw", change_config=lambda config: config.update(num_nextn_predict_layers=declared)
    )
    match = find_head(checkpoint)
    assert match is not None
    assert match.complete
    assert [finding.rule for finding in match.findings] == ["HEAD-UNDECLARED"]
    assert declared_depth(checkpoint) is None


def test_a_declared_depth_that_the_tensors_do_not_have(tmp_path: Path) -> None:
    checkpoint = build(
        tmp_path / "raw", change_config=lambda config: config.update(num_nextn_predict_layers=2)
    )
    assert "declares 2 as the number of head layers" in findings_of(checkpoint)["HEAD-DEPTH"]


def test_a_second_head_layer_is_counted(tmp_path: Path) -> None:
    def twice(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.3.")]:
            tensors[name.replace("layers.3.", "layers.4.")] = tensors[name]

    match = find_head(build(tmp_path / "raw", twice))
    assert match is not None
    assert match.layers == (3, 4)
    assert match.prefix == "model.layers.3."


def test_layer_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    match = find_head(build(tmp_path / "raw", layers=12))
    assert match is not None
    assert match.complete
    assert match.layers == (12,)  # not 1, though "model.layers.1" is a prefix of "model.layers.12"
    assert len(match.tensors) == 44


def test_a_head_at_another_number_than_the_config_says(tmp_path: Path) -> None:
    checkpoint = build(tmp_path / "raw", change_config=lambda config: config.update(num_hidden_layers=4))
    assert "number 3" in findings_of(checkpoint)["HEAD-LAYER-NUMBER"]


def test_model_type_alone_makes_no_head_and_markers_alone_no_family(tmp_path: Path) -> None:
    def drop_head(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith("model.layers.3.")]:
            del tensors[name]

    without = build(tmp_path / "without", drop_head)
    assert find_head(without) is None
    depth = declared_depth(without)
    assert depth is not None
    assert (depth[0].name, *depth[1:]) == ("glm4_moe_lite_mtp", "num_nextn_predict_layers", 1)
    stranger = build(tmp_path / "stranger", change_config=lambda config: config.update(model_type="stranger"))
    assert find_head(stranger) is None
    unrecorded = recognised_head(stranger)
    assert unrecorded is not None
    assert (unrecorded.record, unrecorded.prefix, len(unrecorded.tensors)) == (None, "model.layers.3.", 44)


@pytest.mark.parametrize("prefix", ["mtp.", "model.mtp.", "language_model.mtp.", "model.mtp_layers."])
def test_a_head_of_a_family_without_a_record_is_noticed(tmp_path: Path, prefix: str) -> None:
    extra = (np.zeros((4, 4), "f4"), "BF16")
    checkpoint = build(
        tmp_path / "raw",
        lambda tensors: tensors.__setitem__(f"{prefix}fc.weight", extra),
        lambda config: config.update(model_type="stranger"),
    )
    assert find_head(checkpoint) is None
    unrecorded = recognised_head(checkpoint)
    assert unrecorded is not None
    assert (unrecorded.record, unrecorded.prefix, unrecorded.layers_found) == (None, prefix, None)


def edited(folder: Path, change: Callable[[Words], object]) -> HeadMatch:
    """The head of a written folder after a change of its tensors."""
    edit_tensors(folder, change)
    match = find_head(open_checkpoint(folder))
    assert match is not None
    return match


def rules_of(match: HeadMatch) -> dict[str, str]:
    return {finding.rule: finding.message for finding in match.findings}


def test_a_head_below_its_own_prefix_is_taken_as_a_whole(tmp_path: Path) -> None:
    match = find_head(open_checkpoint(nemotron_h.write_checkpoint(tmp_path / "raw")))
    assert match is not None
    assert (match.complete, match.prefix, match.layers, match.layers_declared) == (True, "mtp.", (0,), 1)
    assert len(match.tensors) == len(nemotron_h.head_shapes(nemotron_h.Geometry()))


def test_two_heads_in_one_checkpoint_are_an_error(tmp_path: Path) -> None:
    def twice(tensors: Words) -> None:
        tensors.update(
            {f"language_model.{name}": t for name, t in tensors.items() if name.startswith("mtp.")}
        )

    match = edited(nemotron_h.write_checkpoint(tmp_path / "raw"), twice)
    assert set(rules_of(match)) == {"HEAD-SEVERAL"}
    assert "mtp." in rules_of(match)["HEAD-SEVERAL"]
    assert "language_model.mtp." in rules_of(match)["HEAD-SEVERAL"]


def test_a_gap_in_the_layers_is_an_error(tmp_path: Path) -> None:
    def drop(tensors: Words) -> None:
        for name in [name for name in tensors if name.startswith("model.mtp.layers.1.")]:
            del tensors[name]

    match = edited(inkling.write_checkpoint(tmp_path / "raw"), drop)
    assert match.layers == (0, 2)
    assert "0, 2" in rules_of(match)["HEAD-LAYER-NUMBER"]
    assert "declares 3" in rules_of(match)["HEAD-DEPTH"]


def test_alternatives_of_the_same_names_are_told_apart_by_their_shapes(tmp_path: Path) -> None:
    match = find_head(open_checkpoint(inkling.write_checkpoint(tmp_path / "raw", local=(1,))))
    assert match is not None
    assert match.complete
    attention = {m.layer: m.rule.choice for m in match.matched if str(m.rule.choice).startswith("attention:")}
    assert attention == {
        0: "attention:published, global",
        1: "attention:published, local",
        2: "attention:published, global",
    }


def test_a_tensor_that_the_drafter_copies_from_the_target_is_no_part_of_the_head(tmp_path: Path) -> None:
    match = find_head(open_checkpoint(inkling.write_checkpoint(tmp_path / "raw", shards=2)))
    assert match is not None
    assert all(tensor.name.startswith("model.mtp.") for tensor in match.tensors)
    assert match.files == {"mtp.safetensors", "model.safetensors"}
    assert match.nbytes == sum(tensor.nbytes for tensor in match.tensors)
    without = edited(inkling.write_checkpoint(tmp_path / "one file"), removed("model.llm.norm.weight"))
    assert without.missing == ("model.llm.norm.weight",)
