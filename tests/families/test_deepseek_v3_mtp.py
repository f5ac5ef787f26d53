"""DeepSeek V3, R1 and V3.2: every variant of the published head, its drafter computed independently, and its faults."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Refused
from draftpair.families.heads import find_head
from fixtures.deepseek_v3 import checkpoint_tensors, write_checkpoint
from fixtures.fp8 import E4M3
from fixtures.glm4_moe_lite import write_target
from fixtures.latent import Kept, Latent
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
HEAD = "model.layers.2."


def expected(values: dict[str, Array], sizes: Latent, dtype: str = "BF16") -> dict[str, tuple[Array, str]]:
    """The drafter of a checkpoint whose tensors stand for `values`."""
    made: dict[str, Array] = {}
    for layer in range(sizes.depth):
        raw = f"model.layers.{sizes.layers + layer}."
        head = {name.removeprefix(raw): value for name, value in values.items() if name.startswith(raw)}
        mine, block = f"layers.{layer}.", f"layers.{layer}.mtp_block."
        renamed = {
            "shared_head.norm.weight": "shared_head_norm.weight",
            "shared_head.head.weight": "lm_head.weight",
        }
        for name in ("embed_tokens.weight", "enorm.weight", "hnorm.weight", "eh_proj.weight", *renamed):
            if name in head:
                made[mine + renamed.get(name, name)] = head[name]
        kept = (
            "self_attn.",
            "mlp.gate.",
            "mlp.shared_experts.",
            "input_layernorm.",
            "post_attention_layernorm.",
        )
        made |= {
            block + name: head[name] for name in head if name.startswith(kept) and "kv_b_proj" not in name
        }
        keys, others = cut_up_projection(head["self_attn.kv_b_proj.weight"], sizes.heads, sizes.nope)
        made[block + "self_attn.embed_q.weight"], made[block + "self_attn.unembed_out.weight"] = keys, others
        for name in ("gate_proj", "up_proj", "down_proj"):
            experts = stacked(head, "mlp.experts.", f".{name}.weight", sizes.experts)
            made[f"{block}mlp.switch_mlp.{name}.weight"] = experts
    return {name: (value, "F32" if name.endswith(BIAS) else dtype) for name, value in made.items()}


@pytest.mark.parametrize("kept", ["fp8", "BF16", "F32"])
@pytest.mark.parametrize("indexer", [0, 4], ids=["V3", "V3.2"])
def test_every_tensor_is_what_an_independent_computation_says(
    tmp_path: Path, kept: Kept, indexer: int
) -> None:
    sizes = Latent(index_heads=indexer)
    raw = write_checkpoint(tmp_path / "raw", kept=kept, index_heads=indexer)
    drafter = split(raw, tmp_path / "drafter")
    _, values = checkpoint_tensors(sizes, 0, kept)
    assert_holds(drafter, expected(values, sizes, "F32" if kept == "F32" else "BF16"))
    assert verdict(drafter) == ("sound", set())


@pytest.mark.parametrize("own_embedding", [False, True])
@pytest.mark.parametrize("own_head", [False, True])
def test_copies_of_embedding_and_head_are_kept_where_they_are(
    tmp_path: Path, own_embedding: bool, own_head: bool
) -> None:
    own = {"own_embedding": own_embedding, "own_head": own_head}
    raw = write_checkpoint(tmp_path / "raw", **own)
    drafter = split(raw, tmp_path / "drafter")
    _, values = checkpoint_tensors(Latent(), **own)
    assert_holds(drafter, expected(values, Latent()))
    assert verdict(drafter) == ("sound", set())
    borrowed = find_head(open_checkpoint(raw)).family.borrows(read_words(drafter))
    wanted = [name for name, has in (("embedding", own_embedding), ("head", own_head)) if not has]
    assert list(borrowed) == wanted


def test_every_layer_of_a_deeper_head_is_kept(tmp_path: Path) -> None:
    sizes = Latent(depth=2, layers=9)  # the head is layers 9 and 10, which do not sort as text
    raw = write_checkpoint(tmp_path / "raw", depth=2, layers=9)
    drafter = split(raw, tmp_path / "drafter")
    _, values = checkpoint_tensors(sizes)
    assert_holds(drafter, expected(values, sizes))
    config = json.loads((drafter / "config.json").read_text())
    assert config["block_size"] == 3
    assert config["text_config"]["num_nextn_predict_layers"] == 2
    assert verdict(drafter) == ("sound", set())


def test_fp8_is_decoded_once_to_float32(tmp_path: Path) -> None:
    """With --dtype float32 the product of table value and scale is there to the last bit; bfloat16 rounds it once."""
    raw = write_checkpoint(tmp_path / "raw")
    words, name = read_words(raw), HEAD + "self_attn.o_proj.weight"
    codes, scales = words[name][0], words[name + "_scale_inv"][0].view("<f4")
    assert codes.shape == (192, 96)
    assert scales.shape == (2, 1)
    exact = np.vstack([E4M3[codes[:128]] * scales[0], E4M3[codes[128:]] * scales[1]])
    drafter = split(raw, tmp_path / "drafter", dtype="float32")
    written, dtype = read_words(drafter)["layers.0.mtp_block.self_attn.o_proj.weight"]
    assert dtype == "F32"
    assert np.array_equal(written.view("<f4"), exact)


def test_the_config_of_the_drafter(tmp_path: Path) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw", index_heads=4), tmp_path / "drafter")
    config = json.loads((drafter / "config.json").read_text())
    assert config["model_type"] == "deepseek_v3_mtp"
    assert config["text_config"]["model_type"] == "deepseek_v32"
    assert "quantization_config" not in config["text_config"]
    assert config["block_size"] == 2


BLOCK = HEAD + "self_attn."
FAULTS: dict[str, tuple[Change, str]] = {
    "last expert missing": (
        removed(*(f"{HEAD}mlp.experts.3.{name}_proj.weight" for name in ("gate", "up", "down"))),
        r"mlp\.experts\.3\.",
    ),
    "one expert's projection missing": (
        removed(HEAD + "mlp.experts.1.up_proj.weight"),
        r"experts\.1\.up_proj",
    ),
    "norm missing": (removed(HEAD + "hnorm.weight"), "hnorm"),
    "indexer's norm missing": (removed(BLOCK + "indexer.k_norm.bias"), r"k_norm\.bias"),
    "up-projection missing": (removed(BLOCK + "kv_b_proj.weight"), "kv_b_proj"),
    "scale missing": (removed(BLOCK + "o_proj.weight_scale_inv"), "o_proj"),
    "a weight cut short": (altered(HEAD + "eh_proj.weight", lambda words: words[:, :192]), r"\[192, 192\]"),
    "scales of another block size": (
        altered(BLOCK + "o_proj.weight_scale_inv", lambda words: np.repeat(words, 3, 0)),
        "o_proj",
    ),
    "NaN in a norm": (altered(HEAD + "enorm.weight", lambda words: np.full_like(words, 0x7FC0)), "enorm"),
    "NaN among FP8 codes": (
        altered(BLOCK + "q_a_proj.weight", lambda words: np.full_like(words, 0x7F)),
        "q_a_proj",
    ),
    "NaN in a scale": (
        altered(BLOCK + "q_a_proj.weight_scale_inv", lambda words: np.full_like(words, 0x7FC00000)),
        "q_a_proj",
    ),
    "an unknown tensor": (copied(HEAD + "enorm.weight", HEAD + "surprise.weight"), "surprise"),
    "one expert too many": (
        copied(HEAD + "mlp.experts.3.up_proj.weight", HEAD + "mlp.experts.4.up_proj.weight"),
        r"experts\.4\.up_proj",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_head_is_refused_by_name_and_nothing_is_written(tmp_path: Path, fault: str) -> None:
    change, said = FAULTS[fault]
    raw = write_checkpoint(tmp_path / "raw", index_heads=4)
    edit_tensors(raw, change)
    with pytest.raises(Refused, match=said):
        split(raw, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_a_config_of_other_sizes_is_refused(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    edit_config(raw, lambda config: config.update(kv_lora_rank=96))
    with pytest.raises(Refused, match="kv_lora_rank"):
        split(raw, tmp_path / "drafter")


MUTATIONS: dict[str, tuple[Change, str]] = {
    "a layer's norm missing": (removed("layers.1.enorm.weight"), "DRAFTER-TENSOR-MISSING"),
    "a tensor too many": (
        copied("layers.1.enorm.weight", "layers.2.enorm.weight"),
        "DRAFTER-TENSOR-UNEXPECTED",
    ),
    "another shape": (
        altered("layers.0.eh_proj.weight", lambda words: words[:, :192]),
        "DRAFTER-TENSOR-SHAPE",
    ),
    "NaN": (
        altered("layers.1.hnorm.weight", lambda words: np.full_like(words, 0x7FC0)),
        "DRAFTER-TENSOR-VALUES",
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_validate_calls_a_changed_drafter_unsafe(tmp_path: Path, mutation: str) -> None:
    change, rule = MUTATIONS[mutation]
    drafter = split(write_checkpoint(tmp_path / "raw", depth=2, kept="BF16"), tmp_path / "drafter")
    edit_tensors(drafter, change)
    name, rules = verdict(drafter)
    assert name == "unsafe"
    assert rule in rules


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("model_type", "deepseek_v2", "CONFIG-TEXT-MODEL-TYPE"),
        ("kv_lora_rank", None, "CONFIG-DIMENSION"),
        ("qk_rope_head_dim", 7, "CONFIG-ROPE-DIM"),
        ("scoring_func", "softmax", "CONFIG-ROUTING"),
        ("index_topk", 0, "CONFIG-INDEXER"),
        ("num_nextn_predict_layers", 2, "DRAFTER-TENSOR-MISSING"),
    ],
)
def test_validate_calls_a_changed_config_unsafe(tmp_path: Path, key: str, value: object, rule: str) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw", index_heads=4, kept="BF16"), tmp_path / "drafter")
    edit_config(drafter, lambda config: config.update({key: value}))
    name, rules = verdict(drafter)
    assert name == "unsafe"
    assert rule in rules


def test_a_head_whose_number_the_config_does_not_say_is_refused(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", layers=12)
    match = find_head(open_checkpoint(raw))
    assert match.layers == (12,)  # not 1, though "model.layers.1" is how "model.layers.12" begins
    edit_config(raw, lambda config: config.update(num_hidden_layers=11))
    with pytest.raises(Refused, match=r"model\.layers\.11\.enorm"):
        split(raw, tmp_path / "drafter")


def test_sizes_of_the_fixture_leave_ragged_blocks() -> None:
    """Otherwise the edges of FP8 blocks would go untested."""
    sizes = replace(Latent(), index_heads=4)
    files, _ = checkpoint_tensors(sizes)
    ragged = {
        name
        for name, (words, dtype) in files.items()
        if dtype == "F8_E4M3" and any(size > 128 and size % 128 for size in words.shape)
    }
    assert HEAD + "self_attn.kv_b_proj.weight" in ragged


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
    drafter = split(write_checkpoint(tmp_path / "raw", kept=kept, depth=2), tmp_path / "drafter", **options)
    target = write_checkpoint(tmp_path / "target", kept=kept, head=False, depth=2)
    again = split(attach(target, drafter, tmp_path / "attached"), tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (drafter / name).read_bytes()
