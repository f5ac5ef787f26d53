"""GLM-4.5, 4.6 and 4.7: every variant of the head, its drafter computed independently, and its faults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Refused
from draftpair.families.heads import find_head
from fixtures.glm4_moe import Geometry, checkpoint_tensors, write_checkpoint
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

BIAS = "mlp.gate.e_score_correction_bias"
HEAD = "model.layers.2."
ROOTS = {
    "embed_tokens.weight": "embed_tokens.weight",
    "enorm.weight": "enorm.weight",
    "hnorm.weight": "hnorm.weight",
    "eh_proj.weight": "eh_proj.weight",
    "shared_head.norm.weight": "shared_head_norm.weight",
    "shared_head.head.weight": "lm_head.weight",
}


def expected(values: dict[str, Array], sizes: Geometry, dtype: str = "BF16") -> dict[str, tuple[Array, str]]:
    """The drafter of a checkpoint whose tensors stand for `values`."""
    made: dict[str, Array] = {}
    for layer in range(sizes.depth):
        raw = f"model.layers.{sizes.layers + layer}."
        head = {name.removeprefix(raw): value for name, value in values.items() if name.startswith(raw)}
        block = f"layers.{layer}.mtp_block."
        for name, value in head.items():
            if ".experts." not in name:
                made[f"layers.{layer}.{ROOTS[name]}" if name in ROOTS else block + name] = value
        for name in ("gate_proj", "up_proj", "down_proj"):
            experts = stacked(head, "mlp.experts.", f".{name}.weight", sizes.experts)
            made[f"{block}mlp.switch_mlp.{name}.weight"] = experts
    return {name: (value, "F32" if name.endswith(BIAS) else dtype) for name, value in made.items()}


VARIANTS: dict[str, dict[str, Any]] = {
    "GLM-4.5": {},
    "Air, without query and key norms": {"qk_norm": False},
    "without attention biases": {"bias": False},
    "without copies": {"own_embedding": False, "own_head": False},
    "two layers": {"depth": 2, "layers": 9},  # layers 9 and 10, which do not sort as text
    "two layers without embeddings": {"depth": 2, "own_embedding": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kept", ["BF16", "F16", "F32"])
def test_every_tensor_is_what_an_independent_computation_says(
    tmp_path: Path, variant: str, kept: Kept
) -> None:
    options = VARIANTS[variant]
    own = {key: value for key, value in options.items() if key.startswith("own_")}
    sizes = replace(Geometry(), **{key: value for key, value in options.items() if key not in own})
    raw = write_checkpoint(tmp_path / "raw", kept=kept, **options)
    drafter = split(raw, tmp_path / "drafter")
    _, values = checkpoint_tensors(sizes, 0, kept, **own)
    found = read_words(drafter)
    wanted = expected(values, sizes, kept)
    if kept == "F16":
        assert {name: dtype for name, (_, dtype) in found.items()} == {
            n: dtype for n, (_, dtype) in wanted.items()
        }
        for name, (value, dtype) in wanted.items():
            words = value.astype("<f2").view("<u2") if dtype == "F16" else value.astype("<f4").view("<u4")
            assert np.array_equal(found[name][0], words), name
    else:
        assert_holds(drafter, wanted)
    assert verdict(drafter) == ("sound", set())


def test_the_config_of_the_drafter(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", depth=2)
    edit_config(raw, lambda config: config.update(num_nextn_predict_layers=1))
    drafter = split(raw, tmp_path / "drafter")
    config = json.loads((drafter / "config.json").read_text())
    assert config["model_type"] == "glm4_moe_mtp"
    assert config["tie_word_embeddings"] is False
    assert config["text_config"]["model_type"] == "glm4_moe"
    assert (
        config["text_config"]["num_nextn_predict_layers"] == 2
    )  # what the tensors have, not what was declared
    assert verdict(drafter) == ("sound", set())


def test_a_head_in_several_files(tmp_path: Path) -> None:
    one = split(write_checkpoint(tmp_path / "one"), tmp_path / "a")
    many = split(write_checkpoint(tmp_path / "many", shards=5), tmp_path / "b")
    assert (one / "model.safetensors").read_bytes() == (many / "model.safetensors").read_bytes()


def test_layer_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    match = find_head(open_checkpoint(write_checkpoint(tmp_path / "raw", layers=12)))
    assert match.layers == (12,)  # not 1, though "model.layers.1" is how "model.layers.12" begins
    assert match.complete


FAULTS: dict[str, tuple[Change, str]] = {
    "last expert missing": (
        removed(*(f"{HEAD}mlp.experts.3.{name}_proj.weight" for name in ("gate", "up", "down"))),
        r"mlp\.experts\.3\.",
    ),
    "one expert's projection missing": (
        removed(HEAD + "mlp.experts.0.up_proj.weight"),
        r"experts\.0\.up_proj",
    ),
    "bias missing": (removed(HEAD + "self_attn.k_proj.bias"), r"k_proj\.bias"),
    "query norm missing": (removed(HEAD + "self_attn.q_norm.weight"), "q_norm"),
    "final norm missing": (removed(HEAD + "shared_head.norm.weight"), "shared_head"),
    "a weight cut short": (altered(HEAD + "eh_proj.weight", lambda words: words[:, :64]), r"\[64, 64\]"),
    "NaN": (altered(HEAD + "hnorm.weight", lambda words: np.full_like(words, 0x7FC0)), "hnorm"),
    "infinity in an expert": (
        altered(HEAD + "mlp.experts.2.down_proj.weight", lambda words: np.full_like(words, 0x7F80)),
        r"experts\.2\.down_proj",
    ),
    "an unknown tensor": (copied(HEAD + "enorm.weight", HEAD + "self_attn.o_proj.bias"), r"o_proj\.bias"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_head_is_refused_by_name_and_nothing_is_written(tmp_path: Path, fault: str) -> None:
    change, said = FAULTS[fault]
    raw = write_checkpoint(tmp_path / "raw")
    edit_tensors(raw, change)
    with pytest.raises(Refused, match=said):
        split(raw, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_a_layer_missing_from_the_middle_is_refused(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", depth=3)
    edit_tensors(
        raw, lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith("model.layers.3.")]
    )
    with pytest.raises(Refused, match=r"layers\.?"):
        split(raw, tmp_path / "drafter")


MUTATIONS: dict[str, tuple[Change, str]] = {
    "a tensor missing": (
        removed("layers.0.mtp_block.mlp.switch_mlp.up_proj.weight"),
        "DRAFTER-TENSOR-MISSING",
    ),
    "a tensor too many": (
        copied("layers.0.enorm.weight", "layers.1.enorm.weight"),
        "DRAFTER-TENSOR-UNEXPECTED",
    ),
    "an expert less": (
        altered("layers.0.mtp_block.mlp.switch_mlp.up_proj.weight", lambda words: words[:3]),
        "DRAFTER-TENSOR-SHAPE",
    ),
    "NaN": (
        altered("layers.0.hnorm.weight", lambda words: np.full_like(words, 0x7FC0)),
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
        ("model_type", "glm4_moe_lite", "CONFIG-TEXT-MODEL-TYPE"),
        ("head_dim", None, "CONFIG-DIMENSION"),
        ("use_qk_norm", "yes", "CONFIG-ATTENTION"),
        ("use_qk_norm", False, "DRAFTER-TENSOR-UNEXPECTED"),
        ("rms_norm_eps", 0, "CONFIG-NUMBER"),
        ("hidden_act", "gelu", "CONFIG-ACTIVATION"),
        ("num_nextn_predict_layers", 2, "DRAFTER-TENSOR-MISSING"),
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
    if bits:
        pytest.importorskip("mlx.core")
    options = {"q_bits": bits, "q_group_size": 32} if bits else {}
    drafter = split(write_checkpoint(tmp_path / "raw", depth=2), tmp_path / "drafter", **options)
    target = write_checkpoint(tmp_path / "target", head=False, depth=2)
    again = split(attach(target, drafter, tmp_path / "attached"), tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (drafter / name).read_bytes()
