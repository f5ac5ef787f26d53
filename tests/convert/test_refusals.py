"""Sources that cannot be split: each refusal names what is wrong, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair.errors import Refused, ToolError
from fixtures.glm4_moe_lite import write_checkpoint, write_target

HEAD = "model.layers.3."


@pytest.fixture
def refused(tmp_path: Path, tools) -> Any:
    """A function that splits, expects a refusal, and returns it after checking that nothing was written."""

    def split(source: Path, kind: type[ToolError] = Refused, **options: Any) -> ToolError:
        before = sorted(tmp_path.iterdir())
        with pytest.raises(ToolError) as caught:
            tools.split(source, tmp_path / "out", **options)
        assert sorted(tmp_path.iterdir()) == before
        assert type(caught.value) is kind
        assert "  " not in caught.value.message
        return caught.value

    return split


def test_no_config(raw: Path, refused: Any) -> None:
    (raw / "config.json").unlink()
    error = refused(raw)
    assert f"{raw} has no config.json" in error.message
    assert "raw checkpoint" in error.hint


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_unparsable_json_names_the_file_and_the_position(sharded: Path, refused: Any, name: str) -> None:
    (sharded / name).write_text('{"a": }')
    assert name in refused(sharded).message


def test_an_index_without_a_weight_map(sharded: Path, refused: Any) -> None:
    (sharded / "model.safetensors.index.json").write_text("{}")
    assert "model.safetensors.index.json" in refused(sharded).message


@pytest.mark.parametrize("model_type", ["llama", None])
def test_another_family_names_the_declared_and_the_supported_type(
    raw: Path, tools, refused: Any, model_type: str | None
) -> None:
    tools.edit_json(raw / "config.json", lambda config: config.update(model_type=model_type))
    error = refused(raw, ToolError)
    assert (f"model_type '{model_type}'" if model_type else "no model_type") in error.message
    assert "glm4_moe_lite" in error.hint
    assert HEAD in error.message


@pytest.mark.parametrize(
    "key",
    [
        "num_hidden_layers",
        "num_attention_heads",
        "qk_nope_head_dim",
        "v_head_dim",
        "kv_lora_rank",
        "hidden_size",
    ],
)
@pytest.mark.parametrize("value", [None, "20", -1, 1.5], ids=str)
def test_a_missing_or_odd_config_key_is_named(
    raw: Path, tools, refused: Any, key: str, value: object
) -> None:
    tools.edit_json(raw / "config.json", lambda config: config.update({key: value}))
    assert key in refused(raw).message


def test_no_head(tmp_path: Path, refused: Any) -> None:
    error = refused(write_target(tmp_path / "target", shards=2))
    assert f"no tensor {HEAD}*: it was converted without its MTP head" in error.message
    assert "raw zai-org/GLM-4.7-Flash" in error.hint


def test_a_drafter_folder_has_no_head(raw: Path, tmp_path: Path, tools, refused: Any) -> None:
    tools.split(raw, tmp_path / "drafter")
    error = refused(tmp_path / "drafter")
    assert "is a drafter already (model_type glm4_moe_lite_mtp)" in error.message


@pytest.mark.parametrize(
    "name",
    [
        "hnorm.weight",
        "mlp.experts.0.up_proj.weight",
        "mlp.experts.7.down_proj.weight",
        "self_attn.o_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(raw: Path, tools, refused: Any, name: str) -> None:
    tools.edit_tensors(raw, lambda tensors: tensors.pop(HEAD + name))
    assert HEAD + name in refused(raw).message


def test_a_wrong_shape_is_named_with_both_shapes(raw: Path, tools, refused: Any) -> None:
    name = f"{HEAD}shared_head.head.weight"
    tools.edit_tensors(raw, lambda tensors: tensors.update({name: ("BF16", tensors[name][1][:, :32].copy())}))
    message = refused(raw).message
    assert name in message
    assert "[64, 32]" in message
    assert "[64, 64]" in message


def test_kv_b_proj_of_another_geometry(raw: Path, tools, refused: Any) -> None:
    tools.edit_json(raw / "config.json", lambda config: config.update(v_head_dim=16))
    assert f"{HEAD}self_attn.kv_b_proj.weight" in refused(raw).message


def test_an_unknown_tensor_is_named(raw: Path, tools, refused: Any) -> None:
    tools.edit_tensors(raw, lambda t: t.update({f"{HEAD}surprise.weight": ("BF16", np.zeros(2, "<u2"))}))
    assert f"{HEAD}surprise.weight" in refused(raw).message


def test_joined_and_split_key_values_together(raw: Path, tools, refused: Any) -> None:
    extra = {f"{HEAD}self_attn.embed_q.weight": ("BF16", np.zeros((2, 64, 32), "<u2"))}
    tools.edit_tensors(raw, lambda tensors: tensors.update(extra))
    assert "self_attn.embed_q.weight" in refused(raw).message


def pack_stacked(tensors: dict[str, Any]) -> None:
    """Quantized, already stacked experts, as converters that keep the head write them."""
    for projection in ("gate_proj", "up_proj", "down_proj"):
        for expert in range(8):
            del tensors[f"{HEAD}mlp.experts.{expert}.{projection}.weight"]
        stem = f"{HEAD}mlp.switch_mlp.{projection}."
        tensors[f"{stem}weight"] = ("U32", np.zeros((8, 32, 8), "<u4"))
        tensors[f"{stem}scales"] = tensors[f"{stem}biases"] = ("BF16", np.zeros((8, 32, 2), "<u2"))


def pack_expert(tensors: dict[str, Any]) -> None:
    stem = f"{HEAD}mlp.experts.3.up_proj."
    tensors[f"{stem}weight"] = ("U32", np.zeros((32, 8), "<u4"))
    tensors[f"{stem}scales"] = ("BF16", np.zeros((32, 2), "<u2"))


def pack_fp8(tensors: dict[str, Any]) -> None:
    stem = f"{HEAD}self_attn.kv_b_proj.weight"
    tensors[f"{stem}_scale_inv"] = ("F32", np.zeros((1, 1), "<u4"))


def pack_int8(tensors: dict[str, Any]) -> None:
    name = f"{HEAD}eh_proj.weight"
    tensors[name] = ("U8", np.zeros((64, 128), "<u1"))


@pytest.mark.parametrize(
    ("pack", "count", "dtype", "name"),
    [
        (pack_stacked, "2 more tensors", "U32", "mlp.switch_mlp.up_proj.weight"),
        (pack_expert, "1 tensor here", "U32", "mlp.experts.3.up_proj.scales"),
        (pack_fp8, "", "F32", "self_attn.kv_b_proj.weight_scale_inv"),
        (pack_int8, "1 tensor here", "U8", "eh_proj.weight"),
    ],
    ids=["stacked", "expert", "fp8", "u8"],
)
def test_packed_tensors_are_counted_and_named(
    raw: Path, tools, refused: Any, pack: Any, count: str, dtype: str, name: str
) -> None:
    tools.edit_tensors(raw, pack)
    error = refused(raw, q_bits=4)
    assert count in error.message
    assert dtype in error.message
    assert HEAD + name in error.message
    assert "plain weights" in error.hint


def test_more_than_one_head_layer_names_them(raw: Path, tools, refused: Any) -> None:
    def double(tensors: dict[str, Any]) -> None:
        tensors.update(
            {n.replace(HEAD, "model.layers.4."): t for n, t in tensors.items() if n.startswith(HEAD)}
        )

    tools.edit_tensors(raw, double)
    message = refused(raw).message
    assert "2 head layers (model.layers.3, model.layers.4)" in message


def test_experts_of_different_dtypes(raw: Path, tmp_path: Path, tools, refused: Any) -> None:
    name = f"{HEAD}mlp.experts.2.up_proj.weight"

    def widen(tensors: dict[str, Any]) -> None:
        tensors[name] = ("F32", tensors[name][1].astype("<u4") << 16)

    tools.split(raw, tmp_path / "before")
    tools.edit_tensors(raw, widen)
    error = refused(raw)
    assert "mlp.experts.0.up_proj.weight" in error.message
    assert "BF16, F32" in error.message
    tools.split(raw, tmp_path / "after", dtype="bfloat16")
    weights = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("before", "after")]
    assert weights[0] == weights[1]


def test_a_shard_that_the_index_names_and_that_is_not_there(sharded: Path, refused: Any) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[-1]
    gone.unlink()
    error = refused(sharded)
    assert gone.name in error.message
    assert error.hint


def test_all_of_the_heads_shards_gone(tmp_path: Path, tools, refused: Any) -> None:
    raw = write_checkpoint(tmp_path / "raw", shards=3)
    for path in raw.glob("*.safetensors"):
        if any(name.startswith(HEAD) for name in tools.read_file(path)):
            path.unlink()
    if not list(raw.glob("*.safetensors")):
        tools.write(raw / "other.safetensors", {"x": ("BF16", np.zeros(2, "<u2"))})
    message = refused(raw).message
    assert "model-00003-of-00003.safetensors" in message
    assert "converted without" not in message


def test_a_shard_name_that_leaves_the_folder(sharded: Path, tools, refused: Any) -> None:
    outside = sharded.parent / "outside.safetensors"
    last = sorted(sharded.glob("*.safetensors"))[-1]
    last.rename(outside)

    def redirect(index: Any) -> None:
        places = index["weight_map"]
        index["weight_map"] = {
            n: "../outside.safetensors" if f == last.name else f for n, f in places.items()
        }

    tools.edit_json(sharded / "model.safetensors.index.json", redirect)
    assert "outside.safetensors" in refused(sharded).message


@pytest.mark.parametrize("keep", [5, 1000, 100_000], ids=["in the length", "in the header", "in the data"])
@pytest.mark.parametrize("shards", [1, 3])
def test_a_truncated_file_is_named(tmp_path: Path, refused: Any, keep: int, shards: int) -> None:
    raw = write_checkpoint(tmp_path / "raw", shards=shards)
    path = sorted(raw.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[:keep])
    message = refused(raw).message
    assert path.name in message
    assert "converted without" not in message


def test_a_head_tensor_in_two_files_without_an_index(raw: Path, tools, refused: Any) -> None:
    tensors = tools.read(raw)
    name = f"{HEAD}hnorm.weight"
    tools.write(raw / "extra.safetensors", {name: tensors[name]})
    message = refused(raw).message
    assert "extra.safetensors" in message
    assert name in message


def test_an_index_that_puts_a_head_tensor_into_another_file(sharded: Path, tools, refused: Any) -> None:
    first = sorted(sharded.glob("*.safetensors"))[0].name
    name = f"{HEAD}hnorm.weight"
    tools.edit_json(
        sharded / "model.safetensors.index.json", lambda index: index["weight_map"].update({name: first})
    )
    message = refused(sharded).message
    assert first in message
    assert name in message


def test_an_index_of_other_files_is_no_obstacle(sharded: Path, tmp_path: Path, tools) -> None:
    tools.split(sharded, tmp_path / "before")
    stale = dict.fromkeys(tools.read(sharded), "model-00001-of-00009.safetensors")
    for path in sharded.glob("*.safetensors"):
        path.rename(path.with_name("part-" + path.name[6:11] + ".safetensors"))
    tools.edit_json(sharded / "model.safetensors.index.json", lambda index: index.update(weight_map=stale))
    tools.split(sharded, tmp_path / "after")
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("before", "after")]
    assert weights[0] == weights[1]


def test_a_damaged_file_that_has_nothing_to_do_with_the_head_is_no_obstacle(
    sharded: Path, tmp_path: Path, tools
) -> None:
    first = sorted(sharded.glob("*.safetensors"))[0]
    assert not any(name.startswith(HEAD) for name in tools.read_file(first))
    first.write_bytes(b"not a checkpoint")
    tools.split(sharded, tmp_path / "out")


def test_messages_name_no_more_than_five_tensors(raw: Path, tools, refused: Any) -> None:
    def strip(tensors: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith(f"{HEAD}mlp.experts.")]:
            if not name.endswith("0.up_proj.weight"):
                del tensors[name]

    tools.edit_tensors(raw, strip)
    message = refused(raw).message
    assert message.count("experts.") == 5
    assert "18 more" in message
    assert json.dumps(message)


def test_a_folder_without_weights_is_not_called_a_conversion(raw: Path, refused: Any) -> None:
    (raw / "model.safetensors").rename(raw / "model.safetensors.part")
    error = refused(raw)
    assert "holds no readable .safetensors file; it holds" in error.message
    assert "model.safetensors.part" in error.message


def test_a_config_that_validate_would_call_unsafe_is_refused_before_anything_is_written(
    raw: Path, tools, refused: Any
) -> None:
    tools.edit_json(raw / "config.json", lambda config: config.update(hidden_act="gelu"))
    error = refused(raw)
    assert "the drafter's config.json would be unsafe" in error.message
    assert "hidden_act" in error.message


def test_a_norm_of_nothing_but_zeros_is_refused(raw: Path, tmp_path: Path, tools) -> None:
    name = f"{HEAD}enorm.weight"
    tools.edit_tensors(raw, lambda tensors: tensors.update({name: ("BF16", np.zeros(64, "<u2"))}))
    with pytest.raises(Refused, match=r"nothing but zeros: model\.enorm\.weight"):
        tools.split(raw, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_layer_number_that_no_model_has_is_no_layer(raw: Path, tmp_path: Path, tools) -> None:
    name = f"model.layers.{'9' * 5000}.eh_proj.weight"
    tools.edit_tensors(raw, lambda tensors: tensors.update({name: ("BF16", np.zeros((1, 1), "<u2"))}))
    tools.split(raw, tmp_path / "out")
