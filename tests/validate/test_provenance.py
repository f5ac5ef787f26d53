"""Where a drafter was cut from is told across what converters do to norms: renames, casts, and the 1 added."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair import api
from draftpair.checkpoint import open_checkpoint
from draftpair.checkpoint.dtypes import from_float32, to_float32
from draftpair.schemas import check, load_schema
from fixtures import glm4_moe_lite, qwen3_5, qwen4_exp
from fixtures.safetensors_files import pack

NORM = "layers.0.input_layernorm.weight"


def outcome(target: Path, drafter: Path) -> tuple[str, str, dict[str, str]]:
    """The verdict, the relation, and message by rule id."""
    report = api.validate(target, drafter)
    assert check(report, load_schema("validate")) == []
    rules = {finding["rule"]: finding["message"] for finding in report["findings"]}
    return report["verdict"], report["facts"]["provenance"]["relation"], rules


def split(raw: Path) -> Path:
    output = raw.with_name(f"{raw.name}-drafter")
    api.split_mtp(raw, output)
    return output


@pytest.fixture
def qwen(tmp_path: Path) -> Path:
    return qwen3_5.write_checkpoint(tmp_path / "raw")


def rewritten(folder: Path, output: Path, change: Callable[[str, Any], tuple[str, Any, str]]) -> Path:
    """A copy of a checkpoint in one file; `change` gives each tensor of floats its new name, values and dtype."""
    checkpoint = open_checkpoint(folder)
    output.mkdir()
    for path in folder.iterdir():
        if not path.name.startswith("model"):
            shutil.copy(path, output / path.name)
    header: dict[str, Any] = {}
    data = bytearray()
    for tensor in checkpoint.tensors.values():
        name, dtype, stored = tensor.name, tensor.dtype, checkpoint.read(tensor)
        if dtype in ("BF16", "F16", "F32"):
            name, values, dtype = change(tensor.name, (to_float32(stored, dtype), dtype))
            stored = from_float32(values, dtype)
        header[name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(stored)],
        }
        data += stored
    (output / "model.safetensors").write_bytes(pack(json.dumps(header).encode(), bytes(data)))
    return output


def test_a_drafter_of_the_raw_checkpoint_fits_its_conversion(qwen: Path, tmp_path: Path) -> None:
    drafter = split(qwen)
    for options in ({}, {"group_size": 32}, {"head": False}, {"dtype": "F16", "group_size": 64}):
        target = qwen3_5.write_mlx_checkpoint(tmp_path / f"mlx{len(str(options))}", **options)
        verdict, relation, rules = outcome(target, drafter)
        assert (verdict, relation) == ("compatible", "derived"), rules
        assert "a conversion of it" in rules["PAIR-DERIVED"]


def test_a_drafter_of_a_conversion_fits_the_raw_checkpoint_and_other_conversions(tmp_path: Path) -> None:
    source = qwen3_5.write_mlx_checkpoint(tmp_path / "mlx", group_size=64)
    drafter = split(source)
    assert outcome(source, drafter)[:2] == ("proven", "same")
    for target in (
        qwen3_5.write_checkpoint(tmp_path / "raw"),
        qwen3_5.write_checkpoint(tmp_path / "raw float32", dtype="F32"),
        qwen3_5.write_mlx_checkpoint(tmp_path / "other", group_size=32, prefix="mtp."),
        qwen3_5.write_mlx_checkpoint(tmp_path / "without head", head=False),
    ):
        assert outcome(target, drafter)[:2] == ("compatible", "derived"), target


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_next"])
def test_a_drafter_fits_what_mlx_lm_makes_of_its_source(tmp_path: Path, model_type: str) -> None:
    from mlx_lm import convert

    raw = qwen3_5.write_checkpoint(tmp_path / "raw", model_type=model_type)
    convert(str(raw), str(tmp_path / "q4"), quantize=True, q_bits=4, q_group_size=32)
    convert(str(raw), str(tmp_path / "float16"), dtype="float16")
    drafter = split(raw)
    for name in ("q4", "float16"):
        # transformers saves the tokenizer that it knows for a model_type, whatever the folder's is.
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(raw / file, tmp_path / name / file)
        verdict, relation, rules = outcome(tmp_path / name, drafter)
        assert (verdict, relation) == ("compatible", "derived"), rules


def test_norms_that_the_family_leaves_as_they_are(tmp_path: Path) -> None:
    drafter = split(qwen4_exp.write_checkpoint(tmp_path / "raw"))
    target = qwen4_exp.write_mlx_checkpoint(tmp_path / "mlx", group_size=64)
    assert outcome(target, drafter)[:2] == ("compatible", "derived")


@pytest.mark.parametrize("write", [qwen3_5.write_checkpoint, qwen3_5.write_mlx_checkpoint])
def test_the_weights_of_another_seed_are_doubtful(qwen: Path, tmp_path: Path, write: Any) -> None:
    verdict, relation, rules = outcome(write(tmp_path / "other", seed=1), split(qwen))
    assert (verdict, relation) == ("doubtful", "different")
    assert "are not that model's" in rules["PAIR-PROVENANCE"]


def test_a_fine_tune_that_moved_one_value_of_one_norm_is_doubtful_however_it_is_stored(
    qwen: Path, tmp_path: Path
) -> None:
    def tuned(name: str, stored: Any) -> tuple[str, Any, str]:
        values, dtype = stored
        if name.endswith(NORM):
            values[3] += np.float32(0.5)
        return name, values, dtype

    drafter = split(qwen)
    converted = qwen3_5.write_mlx_checkpoint(tmp_path / "mlx", group_size=64)
    for source in (qwen, converted):
        target = rewritten(source, tmp_path / f"tuned {source.name}", tuned)
        verdict, relation, rules = outcome(target, drafter)
        assert (verdict, relation) == ("doubtful", "different")
        assert f"({NORM})" in rules["PAIR-PROVENANCE"]


def test_a_raw_checkpoint_whose_norms_have_the_1_added_is_not_the_very_source(
    qwen: Path, tmp_path: Path
) -> None:
    """Headers, matrices and config are the same; that names the norms' gains as a conversion is all that is told."""

    def gains(name: str, stored: Any) -> tuple[str, Any, str]:
        values, dtype = stored
        return name, values + np.float32(1) if name.endswith("layernorm.weight") else values, dtype

    target = rewritten(qwen, tmp_path / "gains", gains)
    assert outcome(target, split(qwen))[:2] == ("compatible", "derived")


def test_a_cast_of_every_tensor_is_a_conversion(tmp_path: Path) -> None:
    raw = glm4_moe_lite.write_checkpoint(tmp_path / "raw")
    drafter = split(raw)
    for dtype in ("F16", "F32"):
        target = rewritten(raw, tmp_path / dtype, lambda name, stored, d=dtype: (name, stored[0], d))
        assert outcome(target, drafter)[:2] == ("compatible", "derived")


def test_norms_under_names_that_are_not_known_are_found_by_value(qwen: Path, tmp_path: Path) -> None:
    drafter = split(qwen)
    converted = qwen3_5.write_mlx_checkpoint(tmp_path / "mlx", head=False)

    def renamed(name: str, stored: Any) -> tuple[str, Any, str]:
        return name.replace(".layers.", ".decoder.layers."), *stored

    target = rewritten(converted, tmp_path / "renamed", renamed)
    assert outcome(target, drafter)[:2] == ("compatible", "derived")


def test_norms_with_neither_name_nor_value_in_common_tell_nothing(qwen: Path, tmp_path: Path) -> None:
    drafter = split(qwen)

    def stranger(name: str, stored: Any) -> tuple[str, Any, str]:
        values, dtype = stored
        is_norm = name.endswith("norm.weight") and not name.startswith("mtp.")
        return (f"decoder.{name}", 3 * values, dtype) if is_norm else (name, values, dtype)

    verdict, relation, rules = outcome(rewritten(qwen, tmp_path / "stranger", stranger), drafter)
    assert (verdict, relation) == ("compatible", "unknown")
    assert "PAIR-PROVENANCE" not in rules
    assert "too few" in rules["PAIR-PROVENANCE-PARTIAL"]
