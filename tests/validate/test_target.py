"""A target whose family has a record is held to it: every tensor, every shape, whatever the config claims."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair import api
from draftpair.checkpoint import open_checkpoint
from draftpair.families import family
from draftpair.families.trunk import trunk_shapes
from draftpair.schemas import check, load_schema
from fixtures.folders import Folders
from fixtures.glm4_moe_lite import Geometry, checkpoint_tensors, config_document
from fixtures.tokenizers import write_tokenizer
from fixtures.weights import write_json, write_weights

Tensors = dict[str, tuple[np.ndarray, str]]


def build(folder: Path, change: Callable[[Tensors], None], config: dict[str, Any] | None = None) -> Path:
    """A target without a head, with something changed."""
    geometry = Geometry()
    tensors: Tensors = {
        name: (values, "F32" if name.endswith("e_score_correction_bias") else "BF16")
        for name, values in checkpoint_tensors(geometry, 0).items()
        if not name.startswith("model.layers.3.")
    }
    change(tensors)
    folder.mkdir()
    write_weights(folder, tensors, shards=1)
    write_json(folder / "config.json", {**config_document(geometry), **(config or {})})
    write_tokenizer(folder, geometry.vocab)
    return folder


def drop(start: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(start)]:
            del tensors[name]

    return change


def put(name: str, values: np.ndarray, dtype: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__setitem__(name, (values, dtype))


O_PROJ = "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("change", "config", "rule", "text"),
    [
        (drop("model.layers.1.mlp.experts.3.up_proj."), {}, "TARGET-TENSOR-MISSING", "experts.3.up_proj"),
        (drop("lm_head."), {}, "TARGET-TENSOR-MISSING", "lm_head.weight"),
        (drop("model.norm."), {}, "TARGET-TENSOR-MISSING", "model.norm.weight"),
        (drop("model.layers.1."), {}, "TARGET-TENSOR-MISSING", "model.layers.1."),
        (put(O_PROJ, np.zeros((64, 32), "f4"), "BF16"), {}, "TARGET-TENSOR-SHAPE", "[64, 32]"),
        (put(O_PROJ, np.zeros((64, 64), "u1"), "F8_E4M3"), {}, "TARGET-TENSOR-DTYPE", "F8_E4M3"),
        (put(O_PROJ, np.zeros((64, 8), "u4"), "U32"), {}, "TARGET-TENSOR-PACKED", "no scales"),
        (drop("-"), {"quantization": {"bits": 4, "group_size": 32}}, "TARGET-QUANTIZATION", "no tensor is packed"),
        (drop("-"), {"vocab_size": 63}, "TARGET-TENSOR-SHAPE", "[63, 64]"),
        (drop("-"), {"num_hidden_layers": 4}, "TARGET-TENSOR-MISSING", "model.layers.3."),
        (drop("-"), {"num_hidden_layers": 10**8}, "CONFIG-DIMENSION", "num_hidden_layers"),
        (drop("-"), {"n_routed_experts": 10**9}, "CONFIG-DIMENSION", "n_routed_experts"),
        (drop("-"), {"kv_lora_rank": None}, "CONFIG-DIMENSION", "kv_lora_rank"),
        (drop("-"), {"num_hidden_layers": 2}, "TARGET-LAYERS", "[2]"),
        (drop("-"), {"num_experts_per_tok": 99}, "CONFIG-EXPERTS", "99"),
        (drop("-"), {"n_group": 3}, "CONFIG-EXPERTS", "n_group 3"),
        (drop("-"), {"topk_group": 2}, "CONFIG-EXPERTS", "topk_group 2"),
        (drop("-"), {"topk_group": 0}, "CONFIG-ROUTING", "topk_group"),
        (drop("-"), {"topk_method": "greedy"}, "CONFIG-ROUTING", "greedy"),
        (drop("-"), {"norm_topk_prob": None}, "CONFIG-ROUTING", "norm_topk_prob"),
        (drop("-"), {"routed_scaling_factor": None}, "CONFIG-NUMBER", "routed_scaling_factor"),
        (drop("-"), {"rms_norm_eps": "x"}, "CONFIG-NUMBER", "rms_norm_eps"),
        (drop("-"), {"hidden_act": "gelu"}, "CONFIG-ACTIVATION", "gelu"),
    ],
    ids=[
        "expert", "output head", "final norm", "layer", "shape", "fp8", "packed", "quantization", "vocabulary",
        "layers", "huge layers", "huge experts", "no rank", "fewer layers", "experts per token", "groups",
        "groups taken", "no group", "method", "null flag", "null factor", "text for a number", "activation",
    ],
)  # fmt: skip
def test_a_damaged_target_is_unsafe_alone_and_in_a_pair(
    folders: Folders,
    tmp_path: Path,
    change: Callable[[Tensors], None],
    config: dict[str, Any],
    rule: str,
    text: str,
) -> None:
    target = build(tmp_path / "damaged", change, config)
    for report in (api.validate(target), api.validate(target, folders.drafter)):
        assert check(report, load_schema("validate")) == []
        assert report["verdict"] == "unsafe"
        assert text in " ".join(f["message"] for f in report["findings"] if f["rule"] == rule)


def test_an_untouched_target_is_sound(tmp_path: Path) -> None:
    assert api.validate(build(tmp_path / "sound", drop("-")))["verdict"] == "sound"


def test_the_expected_tensors_are_exactly_the_trunk(folders: Folders) -> None:
    checkpoint = open_checkpoint(folders.target)
    record = family("glm4_moe_lite_mtp")
    assert record.trunk
    expected = trunk_shapes(record, record.trunk, checkpoint)
    assert expected == {name: tensor.shape for name, tensor in checkpoint.tensors.items()}


def test_a_target_converted_by_mlx_lm_is_sound_and_makes_a_pair(folders: Folders, tmp_path: Path) -> None:
    from mlx_lm import convert

    for mode, options in (("4bit", {"q_bits": 4, "q_group_size": 32}), ("mxfp4", {"q_mode": "mxfp4"})):
        converted = tmp_path / mode
        convert(str(folders.raw), str(converted), quantize=True, **options)
        assert api.validate(converted)["verdict"] == "sound"
        report = api.validate(converted, folders.drafter_4bit)
        assert report["verdict"] == "compatible", report["findings"]
        assert "a conversion of it" in report["findings"][0]["message"]


def test_a_module_left_unquantized_is_named_false_and_understood(folders: Folders, tmp_path: Path) -> None:
    from mlx_lm import convert

    def all_but_head(path: str, module: object) -> bool | dict[str, Any]:
        return False if path == "lm_head" else {"bits": 8, "group_size": 32} if "q_b_proj" in path else True

    converted = tmp_path / "mixed"
    convert(
        str(folders.raw),
        str(converted),
        quantize=True,
        q_bits=4,
        q_group_size=32,
        quant_predicate=all_but_head,
    )
    assert api.validate(converted)["verdict"] == "sound"


def test_a_drafter_is_no_target(folders: Folders) -> None:
    report = api.validate(folders.drafter, folders.drafter)
    assert report["verdict"] == "unsafe"
    assert "PAIR-TARGET-ROLE" in [finding["rule"] for finding in report["findings"]]


def test_an_unreadable_config_or_shard_is_all_that_is_said(folders: Folders) -> None:
    (folders.target / "config.json").write_text("")
    rules = [finding["rule"] for finding in api.validate(folders.target)["findings"]]
    assert rules == ["CONFIG-PARSE"]
    shard = sorted(folders.raw.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-1])
    findings = api.validate(folders.raw)["findings"]
    assert {finding["rule"] for finding in findings if finding["level"] != "warning"} == {"FILE-HEADER"}
