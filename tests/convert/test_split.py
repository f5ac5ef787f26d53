"""The written drafter against an independent computation: names, bytes, config, index, manifest."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from safetensors import safe_open

from draftpair.checkpoint import open_checkpoint
from draftpair.convert import split_body, split_inputs
from draftpair.families.heads import find_head
from draftpair.report import envelope
from draftpair.schemas import check, load_schema
from fixtures.glm4_moe_lite import Geometry, write_checkpoint

G = Geometry()
HEAD = "model.layers.3."
BLOCK = "model.mtp_block."
ROOTS = {
    "embed_tokens.weight": "model.embed_tokens.weight",
    "enorm.weight": "model.enorm.weight",
    "hnorm.weight": "model.hnorm.weight",
    "eh_proj.weight": "model.eh_proj.weight",
    "shared_head.norm.weight": "model.shared_head_norm.weight",
    "shared_head.head.weight": "lm_head.weight",
}
ALLOWED = (
    "model.embed_tokens.",
    "model.enorm.",
    "model.hnorm.",
    "model.eh_proj.",
    "model.shared_head_norm.",
    "lm_head.",
    "model.mtp_block.",
)


def expected_words(source: dict[str, tuple[str, np.ndarray]]) -> dict[str, tuple[str, np.ndarray]]:
    """The drafter's tensors, computed the plain way."""
    head = {name[len(HEAD) :]: tensor for name, tensor in source.items() if name.startswith(HEAD)}
    made = {}
    for name, tensor in head.items():
        if "experts." not in name.replace("shared_experts.", "") and "kv_b_proj" not in name:
            made[ROOTS.get(name, BLOCK + name)] = tensor
    for projection in ("gate_proj", "up_proj", "down_proj"):
        experts = [head[f"mlp.experts.{e}.{projection}.weight"] for e in range(G.experts)]
        made[f"{BLOCK}mlp.switch_mlp.{projection}.weight"] = (
            experts[0][0],
            np.stack([e[1] for e in experts]),
        )
    dtype, joined = head["self_attn.kv_b_proj.weight"]
    per_head = joined.reshape(G.heads, G.nope + G.value, G.kv_lora)
    made[f"{BLOCK}self_attn.embed_q.weight"] = (dtype, per_head[:, : G.nope].transpose(0, 2, 1))
    made[f"{BLOCK}self_attn.unembed_out.weight"] = (dtype, per_head[:, G.nope :])
    return made


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_every_byte_is_where_an_independent_computation_puts_it(tmp_path: Path, tools, dtype: str) -> None:
    raw = write_checkpoint(tmp_path / "raw", dtype=dtype, shards=3)
    tools.split(raw, tmp_path / "out")
    expected, found = expected_words(tools.read(raw)), tools.read(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(name.startswith(ALLOWED) for name in found)
    for name, (kind, words) in expected.items():
        assert found[name][0] == kind, name
        assert np.array_equal(found[name][1], words), name


def test_low_rank_query_or_full_rank_query_is_taken_from_the_tensors(tmp_path: Path, tools) -> None:
    raw = write_checkpoint(tmp_path / "raw", q_lora=None)
    names = set(tools.read(tools.split(raw, tmp_path / "out").plan.request.output))
    assert f"{BLOCK}self_attn.q_proj.weight" in names
    assert f"{BLOCK}self_attn.q_a_proj.weight" not in names


def test_a_rotary_table_is_dropped_and_reported(raw: Path, tmp_path: Path, tools) -> None:
    table = {f"{HEAD}self_attn.rotary_emb.inv_freq": ("F32", np.ones(4, "<u4"))}
    tools.edit_tensors(raw, lambda tensors: tensors.update(table))
    tools.split(raw, tmp_path / "out")
    assert not [name for name in tools.read(tmp_path / "out") if "rotary" in name]
    manifest = json.loads((tmp_path / "out" / "draftpair-manifest.json").read_text())
    assert manifest["dropped"] == [f"{HEAD}self_attn.rotary_emb.inv_freq"]


@pytest.mark.parametrize(("option", "stored"), [("bfloat16", "BF16"), ("float32", "F32")])
def test_dtype_converts_everything_but_the_router_bias(
    tmp_path: Path, tools, option: str, stored: str
) -> None:
    raw = write_checkpoint(tmp_path / "raw", dtype="F32" if stored == "BF16" else "BF16")
    tools.split(raw, tmp_path / "out", dtype=option)
    other = write_checkpoint(tmp_path / "other", dtype=stored)  # the same numbers, stored in that dtype
    tools.split(other, tmp_path / "kept")
    found, expected = tools.read(tmp_path / "out"), tools.read(tmp_path / "kept")
    assert {dtype for name, (dtype, _) in found.items() if not name.endswith("bias")} == {stored}
    for name in expected:
        assert found[name][0] == expected[name][0]
        assert np.array_equal(found[name][1], expected[name][1]), name


def test_router_bias_is_float32_even_when_the_source_has_it_in_bf16(raw: Path, tmp_path: Path, tools) -> None:
    name = f"{HEAD}mlp.gate.e_score_correction_bias"
    bf16 = np.arange(G.experts, dtype="<f4").view("<u4") >> 16
    tools.edit_tensors(raw, lambda tensors: tensors.update({name: ("BF16", bf16.astype("<u2"))}))
    tools.split(raw, tmp_path / "out")
    dtype, words = tools.read(tmp_path / "out")[f"{BLOCK}mlp.gate.e_score_correction_bias"]
    assert dtype == "F32"
    assert words.view("<f4").tolist() == list(range(G.experts))


def test_config_has_the_keys_that_loaders_require_and_nothing_else(raw: Path, tmp_path: Path, tools) -> None:
    stale = {"group_size": 64, "bits": 4}
    tools.edit_json(
        raw / "config.json", lambda config: config.update(quantization=stale, quantization_config=stale)
    )
    tools.split(raw, tmp_path / "out", block_size=5)
    text = (tmp_path / "out" / "config.json").read_text()
    config = json.loads(text)
    assert list(config) == ["block_size", "model_type", "text_config", "tie_word_embeddings"]
    assert config["model_type"] == "glm4_moe_lite_mtp"
    assert config["block_size"] == 5
    assert config["tie_word_embeddings"] is False
    source = json.loads((raw / "config.json").read_text())
    assert config["text_config"] == {k: v for k, v in source.items() if not k.startswith("quantization")}
    assert text == json.dumps(config, indent=2, sort_keys=True) + "\n"


def test_a_nested_text_config_is_the_one_that_is_kept(raw: Path, tmp_path: Path, tools) -> None:
    config = json.loads((raw / "config.json").read_text())
    (raw / "config.json").write_text(json.dumps({"model_type": "outer", "text_config": config, "vision": {}}))
    tools.split(raw, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["text_config"] == config


def test_index_and_header_agree_with_the_tensors(raw: Path, tmp_path: Path, tools) -> None:
    tools.split(raw, tmp_path / "out")
    tensors = tools.read(tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {
        "total_parameters": sum(words.size for _, words in tensors.values()),
        "total_size": sum(words.nbytes for _, words in tensors.values()),
    }
    assert list(index["weight_map"]) == sorted(tensors)
    assert set(index["weight_map"].values()) == {"model.safetensors"}
    with safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as file:
        assert file.metadata()["format"] == "mlx"
        assert file.metadata()["draftpair_family"] == "glm4_moe_lite_mtp"
        assert set(file.keys()) == set(tensors)


def test_manifest_names_sources_transforms_and_true_hashes(raw: Path, tmp_path: Path, tools) -> None:
    out = tmp_path / "out"
    tools.split(raw, out)
    text = (out / "draftpair-manifest.json").read_text()
    manifest = json.loads(text)
    assert not check(manifest, load_schema("manifest"))
    assert str(tmp_path) not in text
    for name, (dtype, words) in tools.read(out).items():
        entry = manifest["tensors"][name]
        assert (entry["dtype"], entry["shape"]) == (dtype, list(words.shape))
        assert entry["blake3"] == blake3(words.tobytes()).hexdigest()
    stacked = manifest["tensors"][f"{BLOCK}mlp.switch_mlp.up_proj.weight"]
    assert stacked["sources"] == [f"{HEAD}mlp.experts.{e}.up_proj.weight" for e in range(G.experts)]
    assert stacked["transforms"] == ["stack"]
    assert manifest["tensors"]["lm_head.weight"]["transforms"] == []
    assert manifest["source"]["name"] == "raw"
    assert manifest["tap"] == "post_norm"
    assert manifest["fusion"] == "embedding, hidden"
    assert manifest["block_size"] == {
        "value": 2,
        "from": "1 head layer(s) + 1",
        "counts_bonus_token": True,
    }
    for name, digest in manifest["files"].items():
        assert digest == hashlib.sha256((out / name).read_bytes()).hexdigest()


def test_a_folder_of_the_hub_cache_is_named_as_on_the_hub(tmp_path: Path, tools) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    raw = write_checkpoint(tmp_path / "models--zai-org--GLM-4.7-Flash" / "snapshots" / commit)
    tools.split(raw, tmp_path / "out")
    source = json.loads((tmp_path / "out" / "draftpair-manifest.json").read_text())["source"]
    assert (source["name"], source["revision"]) == ("zai-org/GLM-4.7-Flash", commit)


@pytest.mark.parametrize("bits", [None, 4])
def test_splitting_twice_gives_identical_bytes(
    sharded: Path, tmp_path: Path, tools, bits: int | None
) -> None:
    for name in ("one", "two"):
        tools.split(sharded, tmp_path / name, q_bits=bits)
    one, two = ({n: s[3] for n, s in tools.state(tmp_path / name).items()} for name in ("one", "two"))
    assert one == two


def test_report_of_a_dry_run_equals_that_of_the_split(sharded: Path, tmp_path: Path, tools) -> None:
    plan = tools.plan(sharded, tmp_path / "out", block_size=3)
    dry = envelope("split-mtp", split_inputs(plan), split_body(plan))
    assert not (tmp_path / "out").exists()
    result = tools.split(sharded, tmp_path / "out", block_size=3)
    done = envelope("split-mtp", split_inputs(result.plan), split_body(result))
    assert not check(dry, load_schema("split-mtp"))
    assert not check(done, load_schema("split-mtp"))
    assert (dry.pop("written"), done.pop("written")) == (False, True)
    assert dry == done
    written = tools.read(tmp_path / "out")
    assert {t["name"]: (t["dtype"], t["shape"], t["bytes"]) for t in done["tensors"]} == {
        name: (dtype, list(words.shape), words.nbytes) for name, (dtype, words) in written.items()
    }
    assert done["files"] == sorted(path.name for path in (tmp_path / "out").iterdir())
    assert done["bytes_read"] == sum(
        w.nbytes for n, (_, w) in tools.read(sharded).items() if n.startswith(HEAD)
    )
    assert done["bytes_written"] == sum(words.nbytes for _, words in written.values())


def test_the_written_folder_is_a_sound_checkpoint_without_a_head(raw: Path, tmp_path: Path, tools) -> None:
    tools.split(raw, tmp_path / "out")
    drafter = open_checkpoint(tmp_path / "out")
    assert drafter.findings == ()
    assert find_head(drafter) is None


def test_only_the_files_that_hold_the_head_are_needed(sharded: Path, tmp_path: Path, tools) -> None:
    tools.split(sharded, tmp_path / "whole")
    for path in sharded.glob("*.safetensors"):
        if not any(name.startswith(HEAD) for name in tools.read_file(path)):
            path.unlink()
    tools.split(sharded, tmp_path / "part")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "part")]
    assert weights[0] == weights[1]


def test_a_head_in_a_side_file_that_the_index_does_not_name_is_found(
    sharded: Path, tmp_path: Path, tools
) -> None:
    tools.split(sharded, tmp_path / "before")
    head = {n: t for n, t in tools.read(sharded).items() if n.startswith(HEAD)}
    trunk = {n: t for n, t in tools.read(sharded).items() if not n.startswith(HEAD)}
    for path in sharded.glob("*.safetensors"):
        path.unlink()
    tools.write(sharded / "model-00001-of-00001.safetensors", trunk)
    tools.write(sharded / "mtp.safetensors", head)
    places = {"weight_map": dict.fromkeys(trunk, "model-00001-of-00001.safetensors")}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(places))
    tools.split(sharded, tmp_path / "after")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("before", "after")]
    assert weights[0] == weights[1]


def test_infinity_in_a_config_is_written_as_a_number_that_strict_readers_take(
    raw: Path, tmp_path: Path, tools
) -> None:
    odd = {"a": float("inf"), "b": [0.0, float("-inf")], "c": "NaN, Infinity", "d": float("nan")}
    tools.edit_json(raw / "config.json", lambda config: config.update(odd))
    tools.split(raw, tmp_path / "out")

    def refuse(word: str) -> None:
        raise AssertionError(word)

    text = json.loads((tmp_path / "out" / "config.json").read_text(), parse_constant=refuse)["text_config"]
    assert (text["a"], text["b"][1], text["c"], text["d"]) == (odd["a"], odd["b"][1], odd["c"], None)
