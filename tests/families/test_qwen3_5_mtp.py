"""Qwen3.5 and Qwen3-Next: every form of the head, its drafter computed independently, and its faults."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair import api
from draftpair.checkpoint import open_checkpoint
from draftpair.convert import Request, plan_split
from draftpair.errors import Refused
from draftpair.families.heads import find_head
from fixtures.qwen3_5 import (
    PROFILES,
    head_tensors,
    recipe,
    source_tensors,
    write_checkpoint,
    write_mlx_checkpoint,
)
from fixtures.qwen_parts import fp8_values
from fixtures.split_heads import (
    Change,
    Words,
    altered,
    assert_holds,
    copied,
    edit_config,
    edit_tensors,
    read_words,
    removed,
    shift_norms,
    split,
    verdict,
)
from fixtures.weights import Array, bf16_bits, on_bf16_grid, write_json

EXPERTS = "mlp.experts."
MOE = {"model_type": "qwen3_5_moe"}
BLOCKS = {"hidden": 192, "moe": 192, "shared": 192}
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {},
    "dense, float32": {"dtype": "F32"},
    "dense, tied": {"tied": True},
    "two layers": {"depth": 2, "declared": 2},
    "below model.mtp": {"prefix": "model.mtp."},
    "below language_model.mtp": {"prefix": "language_model.mtp."},
    "three shards": {"files": "shards"},
    "side file, not in the index": {"files": "side"},
    "side file, in the index": {"files": "indexed side"},
    "fused experts": MOE,
    "the head's experts separate, the trunk's fused": {**MOE, "head_experts": "separate"},
    "Qwen3-Next": {"model_type": "qwen3_next"},
    "FP8, several blocks": {**MOE, **BLOCKS, "fp8": True},
    "FP8, dense": {"fp8": True, "hidden": 192, "dense": 320},
}


def drafter_of(head: Mapping[str, Array]) -> dict[str, Array]:
    """The drafter of a head's values: norms as gains, experts in three stacks."""
    made = {
        name: value + np.float32(1) if value.ndim == 1 else value
        for name, value in head.items()
        if EXPERTS not in name
    }
    for layer in sorted({name.split(EXPERTS)[0] for name in head if EXPERTS in name}):
        stack = f"{layer}mlp.switch_mlp."
        fused = head.get(f"{layer}{EXPERTS}gate_up_proj")
        if fused is not None:
            made[f"{stack}gate_proj.weight"], made[f"{stack}up_proj.weight"] = np.split(fused, 2, axis=1)
            made[f"{stack}down_proj.weight"] = head[f"{layer}{EXPERTS}down_proj"]
            continue
        count = sum(name.endswith("gate_proj.weight") and name.startswith(layer + EXPERTS) for name in head)
        for part in ("gate_proj", "up_proj", "down_proj"):
            names = [f"{layer}{EXPERTS}{expert}.{part}.weight" for expert in range(count)]
            made[f"{stack}{part}.weight"] = np.stack([head[name] for name in names])
    return made


def expected(dtype: str = "BF16", **options: Any) -> dict[str, tuple[Array, str]]:
    """The drafter of a checkpoint made with these options."""
    made = recipe(**options)
    _, head = source_tensors(made)
    values = {name.removeprefix(made.prefix): value for name, value in fp8_values(head).items()}
    return {name: (value, dtype) for name, value in drafter_of(values).items()}


def config_of(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return document


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_is_what_an_independent_computation_says(tmp_path: Path, variant: str) -> None:
    options = VARIANTS[variant]
    drafter = split(write_checkpoint(tmp_path / "raw", **options), tmp_path / "drafter")
    assert_holds(drafter, expected(**{"dtype": "BF16", **options}))
    assert verdict(drafter) == ("sound", set())


def test_the_names_of_a_dense_drafter_are_those_that_engines_look_for(tmp_path: Path) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter")
    attention = [f"self_attn.{part}_proj" for part in "qkvo"] + ["self_attn.q_norm", "self_attn.k_norm"]
    layer = ["input_layernorm", "post_attention_layernorm", *attention]
    layer += [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
    modules = ["fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm", *(f"layers.0.{m}" for m in layer)]
    assert sorted(read_words(drafter)) == sorted(f"{module}.weight" for module in modules)


# Norms


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_raw_head_and_converted_head_give_the_same_drafter(tmp_path: Path, profile: str, dtype: str) -> None:
    options = {**MOE, "profile": profile, "dtype": dtype}
    raw = split(write_checkpoint(tmp_path / "raw", **options), tmp_path / "one")
    converted = split(write_mlx_checkpoint(tmp_path / "mlx", **options), tmp_path / "two")
    assert (raw / "model.safetensors").read_bytes() == (converted / "model.safetensors").read_bytes()
    assert_holds(raw, expected(**options))


def test_one_is_added_in_float32_and_rounded_once_to_what_is_written(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "raw")
    values = head_tensors(recipe().geometry)["layers.0.input_layernorm.weight"][0]
    exact = values + np.float32(1)
    assert not np.array_equal(on_bf16_grid(exact), exact)
    for dtype, bits in (("keep", "<u2"), ("float32", "<u4")):
        drafter = split(tmp_path / "raw", tmp_path / dtype, dtype=dtype)
        words, _ = read_words(drafter)["layers.0.input_layernorm.weight"]
        wanted = exact.view("<u4") if bits == "<u4" else on_bf16_grid(exact).view("<u4") >> 16
        assert np.array_equal(words, wanted)


def test_norms_that_a_converter_missed_are_the_only_ones_that_one_is_added_to(tmp_path: Path) -> None:
    """A list of names that end in norm leaves the two norms before the fusion raw."""
    raw, mlx = write_checkpoint(tmp_path / "raw"), write_mlx_checkpoint(tmp_path / "mlx")
    # A last norm whose bits tell: half of its gains are below 1.
    last = on_bf16_grid(np.linspace(-0.95, 0.5, 64, dtype="<f4"))
    edit_tensors(raw, altered("mtp.norm.weight", lambda words: bf16_bits(last)))
    missed = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
    stored = read_words(raw)

    def miss(tensors: Words) -> None:
        tensors["language_model.mtp.norm.weight"] = bf16_bits(last + np.float32(1)), "BF16"
        tensors.update({f"language_model.mtp.{name}": stored[f"mtp.{name}"] for name in missed})

    edit_tensors(mlx, miss)
    one, two = split(raw, tmp_path / "one"), split(mlx, tmp_path / "two")
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


def silent_last_norm(folder: Path, name: str) -> None:
    """A last norm whose gains could be 3 as well as 2."""
    values = bf16_bits(np.linspace(1.0, 4.0, 64))
    edit_tensors(folder, altered(name, lambda words: values))


def test_a_norm_of_which_nothing_is_known_is_refused_by_name_or_decided_by_the_user(tmp_path: Path) -> None:
    """The layer's norms are raw, the trunk was converted: the last norm may be either, and bundles with both exist."""
    mlx = write_mlx_checkpoint(tmp_path / "mlx")
    raw = read_words(write_checkpoint(tmp_path / "raw"))
    heads = {
        name.replace("mtp.", "language_model.mtp."): t for name, t in raw.items() if name.startswith("mtp.")
    }
    edit_tensors(mlx, lambda tensors: tensors.update(heads))
    silent_last_norm(mlx, "language_model.mtp.norm.weight")
    with pytest.raises(
        Refused, match=r"language_model\.mtp\.norm\.weight.*a converter may have changed it"
    ) as error:
        split(mlx, tmp_path / "drafter")
    assert "--norms" in str(error.value.hint)
    decided = split(mlx, tmp_path / "decided", norms="zero-centred")
    silent_last_norm(tmp_path / "raw", "mtp.norm.weight")
    plain = split(tmp_path / "raw", tmp_path / "plain")
    assert (decided / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()


def test_norms_with_two_ones_in_them_are_refused(tmp_path: Path) -> None:
    mlx = write_mlx_checkpoint(tmp_path / "mlx", dtype="F32")
    one = np.float32(1)
    prefix = "language_model.mtp."

    def add(tensors: Words) -> None:
        for name in [
            name for name, (words, _) in tensors.items() if name.startswith(prefix) and words.ndim == 1
        ]:
            tensors[name] = (tensors[name][0].view("<f4") + one).view("<u4"), "F32"

    edit_tensors(mlx, add)
    with pytest.raises(Refused, match="as if doubled"):
        split(mlx, tmp_path / "drafter")


@pytest.mark.parametrize(("norms", "added"), [("zero-centred", 1), ("shifted", 0)])
def test_the_user_may_say_how_norms_are_stored_that_do_not_tell(
    tmp_path: Path, norms: str, added: int
) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    names = [
        name for name, (words, _) in read_words(raw).items() if name.startswith("mtp.") and words.ndim == 1
    ]
    between = np.uint16(0x3F20)  # 0.625, which may be a gain as well as a w
    edit_tensors(raw, lambda t: t.update({n: (np.full_like(t[n][0], between), "BF16") for n in names}))
    with pytest.raises(Refused, match="not clearly stored"):
        split(raw, tmp_path / "auto")
    drafter = read_words(split(raw, tmp_path / "drafter", norms=norms))
    assert set(drafter["norm.weight"][0].tolist()) == {0x3FD0 if added else 0x3F20}


@pytest.mark.parametrize("saved", ["raw", "mlx"])
def test_what_the_values_say_is_not_overruled(tmp_path: Path, saved: str) -> None:
    write = write_checkpoint if saved == "raw" else write_mlx_checkpoint
    asked = "shifted" if saved == "raw" else "zero-centred"
    with pytest.raises(Refused, match=rf"--norms says {asked}, and the values of \d+ norms say"):
        split(write(tmp_path / saved), tmp_path / "drafter", norms=asked)
    assert not (tmp_path / "drafter").exists()


def test_biases_are_carried_over_and_nothing_is_added_to_them(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    rows = {"q": 256, "k": 64, "v": 64, "o": 64}
    biases = {f"self_attn.{part}_proj.bias": np.arange(count, dtype="<u2") for part, count in rows.items()}
    edit_tensors(raw, lambda t: t.update({LAYER + name: (words, "BF16") for name, words in biases.items()}))
    edit_config(raw, lambda text: text.update(attention_bias=True))
    stored = read_words(split(raw, tmp_path / "drafter"))
    for name, words in biases.items():
        assert np.array_equal(stored[f"layers.0.{name}"][0], words)
    edit_tensors(raw, removed(LAYER + "self_attn.o_proj.bias"))
    with pytest.raises(Refused, match=r"o_proj\.bias"):
        split(raw, tmp_path / "other")


# Configuration


def test_the_config_of_the_drafter(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", tied=True)
    text = config_of(raw)["text_config"]
    rope = text["rope_parameters"]
    assert config_of(split(raw, tmp_path / "drafter")) == {
        "model_type": "qwen3_5_mtp",
        "block_size": 3,
        "tie_word_embeddings": True,
        "text_config": {**text, "rope_theta": rope["rope_theta"]},
    }


def test_a_tie_that_only_the_root_states_is_stated_where_loaders_read_it(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", tied=True)
    edit_config(raw, lambda text: text.pop("tie_word_embeddings"))
    config = config_of(split(raw, tmp_path / "drafter"))
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is True


def test_a_flat_config_gets_the_rotary_settings_that_loaders_want_in_one_object(tmp_path: Path) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw", model_type="qwen3_next"), tmp_path / "drafter")
    text = config_of(drafter)["text_config"]
    assert text["rope_parameters"] == {
        "mrope_section": [8, 0, 0],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10_000_000.0,
        "rope_type": "default",
    }
    assert (text["model_type"], text["mtp_num_hidden_layers"], text["norm_topk_prob"]) == (
        "qwen3_next",
        1,
        True,
    )


def test_a_head_that_was_decoded_leaves_no_trace_of_its_packing(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", fp8=True)
    assert config_of(raw)["quantization_config"]["quant_method"] == "fp8"
    config = config_of(split(raw, tmp_path / "drafter"))
    assert not [key for key in (*config, *config["text_config"]) if "quant" in key]


@pytest.mark.parametrize("declared", [None, 2], ids=["undeclared", "declared as two"])
def test_the_tensors_say_how_deep_the_head_is(tmp_path: Path, declared: int | None) -> None:
    raw = write_checkpoint(tmp_path / "raw", declared=declared)
    checkpoint = open_checkpoint(raw)
    plan = plan_split(checkpoint, find_head(checkpoint), Request(tmp_path / "drafter"))
    assert {finding.rule for finding in plan.findings} == {"HEAD-DEPTH" if declared else "HEAD-UNDECLARED"}
    config = config_of(split(raw, tmp_path / "drafter"))
    assert (config["text_config"]["mtp_num_hidden_layers"], config["block_size"]) == (1, 3)


def test_a_deep_head_has_a_wider_block(tmp_path: Path) -> None:
    config = config_of(split(write_checkpoint(tmp_path / "raw", depth=2, declared=2), tmp_path / "drafter"))
    assert (config["text_config"]["mtp_num_hidden_layers"], config["block_size"]) == (2, 4)


# Quantization

AFFINE = {"bits": 4, "group_size": 64, "mode": "affine"}
MODES = {
    "affine": {"q_bits": 4, "q_group_size": 64},
    "mxfp4": {"q_mode": "mxfp4"},
    "nvfp4": {"q_mode": "nvfp4"},
    "mxfp8": {"q_mode": "mxfp8"},
}


@pytest.mark.parametrize("mode", MODES)
def test_every_matrix_is_quantized_but_the_routers(tmp_path: Path, mode: str) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw", **MOE), tmp_path / "drafter", **MODES[mode])
    stored = read_words(drafter)
    dense = {
        name
        for name, (_, dtype) in stored.items()
        if dtype == "BF16" and not name.endswith(("scales", "biases"))
    }
    assert {name for name in dense if stored[name][0].ndim > 1} == {
        "layers.0.mlp.gate.weight",
        "layers.0.mlp.shared_expert_gate.weight",
    }
    assert {
        dtype for name, (_, dtype) in stored.items() if name not in dense and name.endswith("weight")
    } == {"U32"}
    assert config_of(drafter)["quantization"]["mode"] == mode
    assert verdict(drafter) == ("sound", set())


def test_a_head_that_mlx_packed_passes_through_word_for_word(tmp_path: Path) -> None:
    mlx = write_mlx_checkpoint(tmp_path / "mlx", group_size=64, **MOE)
    drafter = split(mlx, tmp_path / "drafter")
    prefix = "language_model.mtp."
    source = {n.removeprefix(prefix): t for n, t in read_words(mlx).items() if n.startswith(prefix)}
    written = read_words(drafter)
    assert written.keys() == source.keys()
    for name, (words, dtype) in source.items():
        assert written[name][1] == dtype
        assert np.array_equal(written[name][0], words), name
    assert config_of(drafter)["quantization"] == config_of(drafter)["quantization_config"] == AFFINE
    assert verdict(drafter) == ("sound", set())


# Faults

SEPARATE = {**MOE, "head_experts": "separate"}
LAYER = "mtp.layers.0."
QUERY = LAYER + "self_attn.q_proj.weight"


def expert(number: int) -> list[str]:
    """The names of one expert of the head."""
    return [f"{LAYER}{EXPERTS}{number}.{part}_proj.weight" for part in ("gate", "up", "down")]


FAULTS: dict[str, tuple[dict[str, Any], Change, str]] = {
    "no fusion": ({}, removed("mtp.fc.weight"), r"mtp\.fc\.weight"),
    "a norm missing": ({}, removed("mtp.pre_fc_norm_hidden.weight"), r"pre_fc_norm_hidden"),
    "the last norm missing": ({}, removed("mtp.norm.weight"), r"mtp\.norm"),
    "a projection missing": ({}, removed(LAYER + "mlp.up_proj.weight"), r"mlp\.up_proj"),
    "an expert missing": (SEPARATE, removed(*expert(1)), "experts.1."),
    "the last expert missing": (SEPARATE, removed(*expert(3)), "experts.3."),
    "a projection of an expert missing": (SEPARATE, removed(expert(2)[0]), "experts.2.gate_proj"),
    "an expert too many": (
        SEPARATE,
        copied(f"{LAYER}{EXPERTS}0.up_proj.weight", f"{LAYER}{EXPERTS}4.up_proj.weight"),
        "experts.4.up_proj",
    ),
    "half of the fused experts missing": (MOE, removed(LAYER + EXPERTS + "down_proj"), "experts.down_proj"),
    "no gate for the shared expert": (MOE, removed(LAYER + "mlp.shared_expert_gate.weight"), "shared_expert_gate"),
    "a query without its gate": ({}, altered(QUERY, lambda words: words[:128]), r"\[128, 64\]"),
    "fusion of another model": ({}, altered("mtp.fc.weight", lambda words: words[:, :64]), r"mtp\.fc\.weight"),
    "NaN": ({}, altered(LAYER + "self_attn.o_proj.weight", lambda words: np.full_like(words, 0x7FC0)), "o_proj"),
    "NaN in a norm": ({}, altered("mtp.norm.weight", lambda words: np.full_like(words, 0x7FC0)), r"mtp\.norm"),
    "an embedding of its own": ({}, copied("mtp.fc.weight", "mtp.embed_tokens.weight"), "embed_tokens"),
    "FP8 without scales": ({"fp8": True}, removed(LAYER + "self_attn.q_proj.weight_scale_inv"), "q_proj"),
    "FP8 in other blocks": (
        {"fp8": True, "hidden": 192},
        altered(LAYER + "self_attn.o_proj.weight_scale_inv", lambda words: np.repeat(words, 5, 0)),
        "o_proj",
    ),
    "NaN in FP8": (
        {"fp8": True},
        altered(LAYER + "mlp.up_proj.weight", lambda words: np.full_like(words, 0x7F)),
        "up_proj",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_head_is_refused_by_name_and_nothing_is_written(tmp_path: Path, fault: str) -> None:
    options, change, said = FAULTS[fault]
    raw = write_checkpoint(tmp_path / "raw", **options)
    edit_tensors(raw, change)
    with pytest.raises(Refused, match=said):
        split(raw, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_two_heads_under_two_prefixes_are_refused(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw")
    names = [name for name in read_words(raw) if name.startswith("mtp.")]
    edit_tensors(raw, lambda tensors: tensors.update({f"model.{name}": tensors[name] for name in names}))
    with pytest.raises(Refused, match="a head under each of"):
        split(raw, tmp_path / "drafter")


def test_a_converted_target_without_its_head_is_told_so(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", head=False)
    with pytest.raises(Refused, match="without its MTP head"):
        split(raw, tmp_path / "drafter")


def test_the_output_of_a_split_is_not_split_again(tmp_path: Path) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter")
    with pytest.raises(Refused, match="is a drafter already"):
        split(drafter, tmp_path / "again")


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quantized"])
@pytest.mark.parametrize("variant", ["dense, float32", "two layers", "fused experts", "Qwen3-Next"])
def test_a_head_that_was_put_back_is_split_into_the_same_bytes(
    tmp_path: Path, variant: str, quantized: bool
) -> None:
    """Its norms are gains now, in a target whose own are not: each is told by its values again."""
    options = VARIANTS[variant]
    drafter = split(
        write_checkpoint(tmp_path / "raw", **options),
        tmp_path / "drafter",
        **(MODES["affine"] if quantized else {}),
    )
    target = write_checkpoint(tmp_path / "target", head=False, **options)
    api.attach(target, drafter, tmp_path / "attached")
    again = split(tmp_path / "attached", tmp_path / "again")
    for name in ("model.safetensors", "config.json"):
        assert (drafter / name).read_bytes() == (again / name).read_bytes()


def test_splitting_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    raw = write_checkpoint(tmp_path / "raw", **SEPARATE)
    one, two = split(raw, tmp_path / "one"), split(raw, tmp_path / "two")
    assert all((two / path.name).read_bytes() == path.read_bytes() for path in one.iterdir())


# Validation

MUTATIONS: dict[str, tuple[Change, str]] = {
    "a tensor missing": (removed("pre_fc_norm_hidden.weight"), "DRAFTER-TENSOR-MISSING"),
    "a tensor under its raw name": (copied("fc.weight", "mtp.fc.weight"), "DRAFTER-TENSOR-UNEXPECTED"),
    "a second layer": (copied("fc.weight", "layers.1.mlp.up_proj.weight"), "DRAFTER-TENSOR-UNEXPECTED"),
    "another shape": (altered("fc.weight", lambda words: words[:32]), "DRAFTER-TENSOR-SHAPE"),
    "NaN": (altered("norm.weight", lambda words: np.full_like(words, 0x7FC0)), "DRAFTER-TENSOR-VALUES"),
    "nothing but zeros": (altered("norm.weight", np.zeros_like), "DRAFTER-TENSOR-VALUES"),
}  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_validate_calls_a_changed_drafter_unsafe(tmp_path: Path, mutation: str) -> None:
    change, rule = MUTATIONS[mutation]
    drafter = split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter")
    edit_tensors(drafter, change)
    name, rules = verdict(drafter)
    assert name == "unsafe"
    assert rule in rules


@pytest.mark.parametrize("profile", PROFILES)
def test_validate_finds_the_norms_that_were_left_raw_or_had_their_one_added_twice(
    tmp_path: Path, profile: str
) -> None:
    raw = write_checkpoint(tmp_path / "raw", profile=profile)
    left = split(raw, tmp_path / "left")
    edit_tensors(left, shift_norms(-1))
    assert verdict(left) == ("unsafe", {"DRAFTER-NORMS", "MANIFEST-TENSORS"})
    mlx = write_mlx_checkpoint(tmp_path / "mlx", profile=profile)
    twice = split(mlx, tmp_path / "twice")
    edit_tensors(twice, shift_norms(1))
    assert verdict(twice) == ("unsafe", {"DRAFTER-NORMS", "MANIFEST-TENSORS"})
    assert verdict(split(mlx, tmp_path / "good")) == ("sound", set())


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("model_type", "qwen4_exp_text", "CONFIG-TEXT-MODEL-TYPE"),
        ("hidden_size", None, "CONFIG-DIMENSION"),
        ("head_dim", "64", "CONFIG-DIMENSION"),
        ("linear_num_key_heads", 0, "CONFIG-DIMENSION"),
        ("mtp_num_hidden_layers", 0, "CONFIG-HEAD-DEPTH"),
        ("mtp_num_hidden_layers", 9, "CONFIG-HEAD-DEPTH"),
        ("rope_parameters", None, "CONFIG-ROPE"),
        ("rope_parameters", {"rope_theta": 1e7, "rope_type": "default"}, "CONFIG-ROPE"),
        ("rms_norm_eps", 0, "CONFIG-NUMBER"),
        ("hidden_act", "gelu", "CONFIG-ACTIVATION"),
        ("attn_output_gate", False, "CONFIG-OUTPUT-GATE"),
        ("intermediate_size", None, "CONFIG-EXPERTS-PER-TOKEN"),
        ("num_experts", 4, "CONFIG-EXPERTS-PER-TOKEN"),
        ("mtp_use_dedicated_embeddings", True, "CONFIG-EMBEDDINGS"),
    ],
)
def test_validate_names_what_is_wrong_with_the_text_config(
    tmp_path: Path, key: str, value: Any, rule: str
) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter")
    edit_config(drafter, lambda text: text.update({key: value}))
    name, rules = verdict(drafter)
    assert name == "unsafe"
    assert rule in rules


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("block_size", 1, "CONFIG-BLOCK-SIZE"),
        ("block_size", 17, "CONFIG-BLOCK-SIZE"),
        ("tie_word_embeddings", "no", "CONFIG-TIED"),
        ("text_config", None, "CONFIG-TEXT-CONFIG"),
        ("quantization", {"bits": 7, "group_size": 64}, "CONFIG-QUANTIZATION"),
        ("quantization", {"bits": 4, "group_size": 64, "mode": "mxfp4"}, "CONFIG-QUANTIZATION"),
        ("quantization", {"bits": 8, "group_size": 16, "mode": "nvfp4"}, "CONFIG-QUANTIZATION"),
        ("quantization", {**AFFINE, "fc": {"bits": 9, "group_size": 64}}, "CONFIG-QUANTIZATION-MODULE"),
    ],
)  # fmt: skip
def test_validate_names_what_is_wrong_with_the_root_of_the_config(
    tmp_path: Path, key: str, value: Any, rule: str
) -> None:
    drafter = split(write_checkpoint(tmp_path / "raw"), tmp_path / "drafter")
    write_json(drafter / "config.json", {**config_of(drafter), key: value})
    name, rules = verdict(drafter)
    assert name == "unsafe"
    assert rule in rules


def test_a_deep_head_is_sound_and_the_engine_that_loads_one_layer_is_named(tmp_path: Path) -> None:
    from draftpair.validate.single import validate_one

    drafter = split(write_checkpoint(tmp_path / "raw", depth=2, declared=2), tmp_path / "drafter")
    found = validate_one(open_checkpoint(drafter))
    assert found.name == "sound"
    assert [finding.level for finding in found.findings if finding.rule == "CONFIG-HEAD-LAYERS"] == ["note"]


@pytest.mark.parametrize(
    "options", [{}, MOE, {"model_type": "qwen3_next"}], ids=["dense", "experts", "Qwen3-Next"]
)
def test_source_and_drafter_are_a_proven_pair(tmp_path: Path, options: dict[str, Any]) -> None:
    """Qwen3-Next too, whose drafter states sections that its target does not."""
    from draftpair.validate.pairing import validate_pair

    raw = write_checkpoint(tmp_path / "raw", **options)
    drafter = split(raw, tmp_path / "drafter")
    found = validate_pair(open_checkpoint(raw), open_checkpoint(drafter))
    assert (found.name, [f.rule for f in found.findings if f.level != "note"]) == ("proven", [])
