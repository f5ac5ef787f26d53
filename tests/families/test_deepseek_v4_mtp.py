"""DeepSeek V4: the classic head in all its packings, its drafter computed independently, and its faults."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Refused
from draftpair.families.heads import find_head
from fixtures.deepseek_v4 import Geometry, checkpoint_tensors, write_checkpoint
from fixtures.fp8 import E2M1, E4M3
from fixtures.glm4_moe_lite import write_target
from fixtures.latent import Kept
from fixtures.split_heads import (
    Change,
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
    stacked,
    verdict,
)
from fixtures.weights import Array

SIZES = Geometry()
HEAD = "mtp.0."
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
FLOAT32 = ("attn_sink", "e_score_correction_bias", ".base", ".fn", ".scale")


def expected(
    values: dict[str, Array], dtype: str = "BF16", sizes: Geometry = SIZES
) -> dict[str, tuple[Array, str]]:
    """The drafter of a checkpoint whose tensors stand for `values`."""
    head = {name.removeprefix(HEAD): value for name, value in values.items() if name.startswith(HEAD)}
    made = {
        f"{name}.weight": head.pop(f"{name}.weight")
        for name in ("e_proj", "h_proj", "enorm", "hnorm", "norm")
    }
    for part in ("base", "fn", "scale"):
        made[f"hc_head.{part}"] = head.pop(f"hc_head_{part}")
        for branch in ("attn", "ffn"):
            made[f"decoder.{branch}_hc.{part}"] = head.pop(f"hc_{branch}_{part}")
    for raw, name in PROJECTIONS.items():
        made[f"decoder.ffn.shared_experts.{name}.weight"] = head.pop(f"ffn.shared_experts.{raw}.weight")
        experts = stacked(head, "ffn.experts.", f".{raw}.weight", sizes.experts)
        made[f"decoder.ffn.switch_mlp.{name}.weight"] = experts
    made["decoder.ffn.gate.e_score_correction_bias"] = head.pop("ffn.gate.bias")
    by_group = head.pop("attn.wo_a.weight").reshape(sizes.o_groups, sizes.o_lora, -1)
    made["decoder.attn.wo_a.weight"] = by_group
    made |= {f"decoder.{name}": value for name, value in head.items() if ".experts." not in name}
    return {name: (value, "F32" if name.endswith(FLOAT32) else dtype) for name, value in made.items()}


@pytest.mark.parametrize("kept", ["fp8", "BF16", "F32"])
def test_every_tensor_is_what_an_independent_computation_says(tmp_path: Path, kept: Kept) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw", kept=kept), tmp_path / "drafter")
    _, values = checkpoint_tensors(SIZES, 0, kept)
    assert_holds(drafter, expected(values, "F32" if kept == "F32" else "BF16"))
    assert verdict(drafter) == ("sound", set())


def test_experts_in_fp8_with_float32_scales(tmp_path: Path) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw", experts="fp8"), tmp_path / "drafter")
    assert_holds(drafter, expected(checkpoint_tensors(SIZES, experts="fp8")[1]))


def test_bfloat16_holds_fp8_and_fp4_without_loss(tmp_path: Path) -> None:
    """Power-of-two scales only move the exponent, and bfloat16 has more digits than either format."""
    raw = write_checkpoint(tmp_path / "raw")
    narrow = read_words(split(raw, tmp_path / "bf16"))
    wide = read_words(split(raw, tmp_path / "f32", dtype="float32"))
    words = read_words(raw)
    codes, scales = words[HEAD + "e_proj.weight"][0], words[HEAD + "e_proj.scale"][0]
    every = np.repeat(np.repeat(2.0 ** (scales.astype(int) - 127), 128, 0), 128, 1)[:192, :192]
    assert np.array_equal(wide["e_proj.weight"][0].view("<f4"), (E4M3[codes] * every).astype("<f4"))
    packed, scales = (
        words[HEAD + "ffn.experts.1.w2.weight"][0].view("u1"),
        words[HEAD + "ffn.experts.1.w2.scale"][0],
    )
    nibbles = np.stack([packed & 15, packed >> 4], -1).reshape(192, 96)
    exact = (
        np.where(nibbles & 8, -1, 1) * E2M1[nibbles & 7] * np.repeat(2.0 ** (scales.astype(int) - 127), 32, 1)
    )
    down = wide["decoder.ffn.switch_mlp.down_proj.weight"][0].view("<f4")
    assert np.array_equal(down[1], exact.astype("<f4"))
    for name in ("e_proj.weight", "decoder.ffn.switch_mlp.down_proj.weight"):
        again = (narrow[name][0].astype("<u4") << 16).view("<f4")
        assert np.array_equal(again, wide[name][0].view("<f4"))


def test_the_published_packing_can_be_had_in_mlx_terms_without_loss(tmp_path: Path) -> None:
    """MXFP8 and MXFP4 of values that came from FP8 and FP4 with power-of-two scales are those values."""
    mx = pytest.importorskip("mlx.core")
    raw = write_checkpoint(tmp_path / "raw")
    drafter = split(
        raw, tmp_path / "drafter", q_mode="mxfp8", q_overrides=("decoder.ffn.switch_mlp.*=mxfp4",)
    )
    config = json.loads((drafter / "config.json").read_text())["quantization"]
    wanted = expected(checkpoint_tensors(SIZES)[1])
    tensors = mx.load(str(drafter / "model.safetensors"))
    packed = [name.removesuffix(".scales") for name in tensors if name.endswith(".scales")]
    assert len(packed) == 13
    for module in packed:
        how = config.get(module, config)
        assert how["mode"] == ("mxfp4" if "switch_mlp" in module else "mxfp8")
        sizes = {key: how[key] for key in ("group_size", "bits", "mode")}
        weight, scales = tensors[f"{module}.weight"], tensors[f"{module}.scales"]
        values = mx.dequantize(weight, scales, **sizes).astype(mx.float32)
        assert np.array_equal(np.array(values), wanted[f"{module}.weight"][0]), module
    assert verdict(drafter) == ("sound", set())


def test_the_config_is_not_that_of_dspark_whatever_the_source_says(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    edit_config(raw, lambda config: config.update(dspark_target_layer_ids=[0, 1], dspark_block_size=5))
    drafter = split(raw, tmp_path / "drafter")
    config = json.loads((drafter / "config.json").read_text())
    assert config["model_type"] == "deepseek_v4_mtp"
    assert config["block_size"] == 2
    assert not [key for key in config["text_config"] if key.startswith("dspark")]
    assert verdict(drafter) == ("sound", set())


@pytest.mark.parametrize("prefix", ["model.mtp.", "language_model.mtp."])
def test_the_head_is_found_under_the_names_of_converters_too(tmp_path: Path, prefix: str) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    plain = split(raw, tmp_path / "plain")
    edit_tensors(
        raw,
        lambda tensors: tensors.update(
            {n.replace("mtp.", prefix, 1): tensors.pop(n) for n in list(tensors) if n.startswith("mtp.")}
        ),
    )
    moved = split(raw, tmp_path / "moved")
    assert (plain / "model.safetensors").read_bytes() == (moved / "model.safetensors").read_bytes()


def test_a_second_layer_is_refused(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", depth=2)
    with pytest.raises(Refused, match=r"2 head layers \(mtp\.0, mtp\.1\)"):
        split(raw, tmp_path / "drafter")


def test_stages_are_numbered_not_spelt(tmp_path: Path) -> None:
    match = find_head(open_checkpoint(write_checkpoint(tmp_path / "raw", depth=11)))
    assert match.layers == tuple(range(11))  # 10 after 9


def test_routers_and_bare_arrays_are_never_quantized(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    raw = write_checkpoint(tmp_path / "raw")
    drafter = split(raw, tmp_path / "drafter", q_bits=8, q_group_size=32)
    words = read_words(drafter)
    assert words["decoder.ffn.gate.weight"][1] == "BF16"
    assert {words[name][1] for name in words if name.endswith(FLOAT32)} == {"F32"}
    packed = {name.removesuffix(".scales") for name in words if name.endswith(".scales")}
    assert packed == {
        "e_proj",
        "h_proj",
        *(f"decoder.attn.{name}" for name in ("wkv", "wo_a", "wo_b", "wq_a", "wq_b")),
        *(
            f"decoder.ffn.{owner}.{name}"
            for owner in ("shared_experts", "switch_mlp")
            for name in PROJECTIONS.values()
        ),
    }
    assert verdict(drafter) == ("sound", set())


FAULTS: dict[str, tuple[Change, str]] = {
    "an expert missing": (
        removed(
            *(f"{HEAD}ffn.experts.3.{name}.{part}" for name in PROJECTIONS for part in ("weight", "scale"))
        ),
        r"ffn\.experts\.3\.",
    ),
    "one expert's projection missing": (removed(HEAD + "ffn.experts.1.w3.weight"), r"experts\.1\.w3"),
    "half of the fusion missing": (removed(HEAD + "h_proj.weight", HEAD + "h_proj.scale"), "h_proj"),
    "stream mixer missing": (removed(HEAD + "hc_head_fn"), "hc_head_fn"),
    "scale missing": (removed(HEAD + "attn.wo_a.scale"), "wo_a"),
    "FP4 scales missing": (removed(HEAD + "ffn.experts.0.w1.scale"), r"experts\.0\.w1"),
    "a weight cut short": (altered(HEAD + "attn.wkv.weight", lambda words: words[:32]), "wkv"),
    "scales of another block size": (
        altered(HEAD + "e_proj.scale", lambda words: np.repeat(words, 3, 0)),
        "e_proj",
    ),
    "FP4 scales of another group": (
        altered(HEAD + "ffn.experts.0.w1.scale", lambda words: words[:, :2]),
        r"experts\.0\.w1",
    ),
    "NaN": (altered(HEAD + "hc_attn_base", lambda words: np.full_like(words, 0x7FC00000)), "hc_attn_base"),
    "NaN among FP8 codes": (
        altered(HEAD + "attn.wq_a.weight", lambda words: np.full_like(words, 0x7F)),
        "wq_a",
    ),
    "NaN in an E8M0 scale": (
        altered(HEAD + "attn.wq_b.scale", lambda words: np.full_like(words, 0xFF)),
        "wq_b",
    ),
    "an unknown tensor": (copied(HEAD + "enorm.weight", HEAD + "surprise.weight"), "surprise"),
    "an embedding of its own": (copied("embed.weight", HEAD + "emb.tok_emb.weight"), "emb"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_head_is_refused_by_name_and_nothing_is_written(tmp_path: Path, fault: str) -> None:
    change, said = FAULTS[fault]
    raw = write_checkpoint(tmp_path / "raw")
    edit_tensors(raw, change)
    with pytest.raises(Refused, match=said):
        split(raw, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_sizes_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    edit_config(raw, lambda config: config.update(o_groups=3))
    with pytest.raises(Refused, match="o_groups"):
        split(raw, tmp_path / "drafter")


MUTATIONS: dict[str, tuple[Change, str]] = {
    "a tensor missing": (removed("decoder.attn_hc.fn"), "DRAFTER-TENSOR-MISSING"),
    "a tensor too many": (copied("enorm.weight", "decoder.enorm.weight"), "DRAFTER-TENSOR-UNEXPECTED"),
    "groups joined again": (
        altered("decoder.attn.wo_a.weight", lambda words: words.reshape(192, 128)),
        "DRAFTER-TENSOR-SHAPE",
    ),
    "NaN": (altered("hc_head.base", lambda words: np.full_like(words, 0x7FC00000)), "DRAFTER-TENSOR-VALUES"),
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
        ("model_type", "deepseek_v3", "CONFIG-TEXT-MODEL-TYPE"),
        ("hc_mult", None, "CONFIG-DIMENSION"),
        ("hc_mult", 2, "DRAFTER-TENSOR-SHAPE"),
        ("o_groups", 3, "CONFIG-DIMENSION"),
        ("scoring_func", "sigmoid", "CONFIG-ROUTING"),
        ("dspark_target_layer_ids", [0, 1], "CONFIG-DSPARK"),
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
    target = write_checkpoint(tmp_path / "target", head="none")
    assert pair_verdict(target, drafter) == ("compatible", set())
    wider = write_checkpoint(tmp_path / "wider", head="none", hidden=128)
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
    target = write_checkpoint(tmp_path / "target", head="none", kept=kept)
    again = split(attach(target, drafter, tmp_path / "attached"), tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (drafter / name).read_bytes()
