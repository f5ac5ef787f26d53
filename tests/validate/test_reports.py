"""Faults that users of other tools reported, one test each: what goes wrong there is done, found or refused here.

Each test says what happened and where it was reported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair import api
from draftpair.errors import Refused, ToolError, Usage
from fixtures import deepseek_v3, deepseek_v4, glm4_moe, glm4_moe_lite, qwen3_5, tapped
from fixtures.split_heads import Words, edit_config, edit_tensors, read_words, shift_norms
from fixtures.weights import sha256_of_weights

Document = dict[str, Any]
INDEX = "model.safetensors.index.json"
HEAD_FILE = "model-00003-of-00003.safetensors"
MOE = {"model_type": "qwen3_5_moe"}


def split(source: Path, output: Path, **options: Any) -> Path:
    api.split_mtp(source, output, **options)
    return output


def edit_json(path: Path, change: Callable[[Document], object]) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    change(document)
    path.write_text(json.dumps(document), encoding="utf-8")


def config_of(folder: Path) -> Document:
    document: Document = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return document


def dtypes(folder: Path) -> dict[str, str]:
    return {name: dtype for name, (_, dtype) in read_words(folder).items()}


def said(report: Document) -> dict[str, str]:
    """Rule -> the message of its first finding, in a report of any command."""
    findings = report["findings"] if "findings" in report else report["integrity"]["findings"]
    return {finding["rule"]: finding["message"] for finding in reversed(findings)}


def errors(report: Document) -> dict[str, str]:
    """Rule -> the message of its first error."""
    return {f["rule"]: f["message"] for f in reversed(report["findings"]) if f["level"] == "error"}


def sources(report: Document) -> set[str]:
    """The tensors that a split read."""
    return {name for tensor in report["tensors"] for name in tensor["sources"]}


def shards(folder: Path, **options: Any) -> Path:
    """A checkpoint in three files, the last of which holds the head alone."""
    return qwen3_5.write_checkpoint(folder, files="shards", **options)


def test_t01_an_fp8_head_is_decoded_and_no_scale_is_left_over(tmp_path: Path) -> None:
    """FP8 bytes were written as integers, the scales of the experts left loose, and the drafter did not load.

    https://github.com/Blaizzy/mlx-vlm/pull/2044
    """
    raw = qwen3_5.write_checkpoint(tmp_path / "raw", **MOE, hidden=192, moe=192, shared=192, fp8=True)
    drafter = split(raw, tmp_path / "drafter")
    assert set(dtypes(drafter).values()) == {"BF16"}
    assert not [name for name in dtypes(drafter) if "scale" in name]
    assert "quantization" not in config_of(drafter)
    assert api.validate(raw, drafter)["verdict"] == "proven"


def test_t02_stages_of_a_dspark_drafter_are_not_split_as_a_head(tmp_path: Path) -> None:
    """What lies below mtp. is a drafter of another kind; a split of it wrote 10 GB that nothing loads.

    https://github.com/Blaizzy/mlx-vlm/issues/2095
    """
    raw = deepseek_v4.write_checkpoint(tmp_path / "raw", head="dspark")
    assert api.inspect(raw)["head"]["family"] == "deepseek_v4_dspark"
    with pytest.raises(ToolError, match="stages of a DSpark drafter"):
        api.split_mtp(raw, tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_t03_a_head_that_a_conversion_dropped_is_called_declared_and_absent(tmp_path: Path) -> None:
    """Five published conversions declare a head and hold none of its tensors.

    https://github.com/lablup/mlxcel/issues/1165
    """
    converted = qwen3_5.write_mlx_checkpoint(tmp_path / "converted", head=False)
    report = api.inspect(converted)
    assert (report["head"]["declared"], report["head"]["layers_found"]) == (True, 0)
    assert "declares 1 head layer(s)" in said(report)["HEAD-ABSENT"]
    with pytest.raises(Refused, match="converted without its MTP head") as refused:
        api.split_mtp(converted, tmp_path / "drafter")
    assert "raw Qwen checkpoint" in (refused.value.hint or "")


@pytest.mark.parametrize("level", ["nowhere", "at the root", "in text_config"])
def test_t04_a_head_is_found_wherever_the_config_declares_it(tmp_path: Path, level: str) -> None:
    """A converter that trusts the config, or looks at one level of it, loses the head without a word.

    https://github.com/am17an/llama.cpp/pull/8
    """
    raw = qwen3_5.write_checkpoint(tmp_path / "raw", declared=1 if level == "in text_config" else None)
    if level == "at the root":
        edit_json(raw / "config.json", lambda config: config.update(mtp_num_hidden_layers=1))
    report = api.split_mtp(raw, tmp_path / "drafter")
    assert len(report["tensors"]) == 15
    assert config_of(tmp_path / "drafter")["text_config"]["mtp_num_hidden_layers"] == 1
    assert ("HEAD-UNDECLARED" in said(report)) == (level == "nowhere")


@pytest.mark.parametrize("layers", [3, 12])
def test_t05_the_head_is_the_layer_after_the_last_whatever_its_number(tmp_path: Path, layers: int) -> None:
    """A literal layer number took trunk layers for the head; a prefix of one, layer 1 for layers 10 and 11.

    https://github.com/ml-explore/mlx-lm/pull/1524
    """
    raw = deepseek_v3.write_checkpoint(tmp_path / "raw", kept="BF16", layers=layers)
    report = api.split_mtp(raw, tmp_path / "drafter")
    assert {name.split(".")[2] for name in sources(report)} == {str(layers)}
    assert sources(report) == {n for n in read_words(raw) if n.startswith(f"model.layers.{layers}.")}


def test_t06_stacked_experts_gates_and_fusion_norms_are_all_taken_care_of(tmp_path: Path) -> None:
    """Stacked experts without .weight were skipped, one-row gates packed, and fusion norms left out of the shift.

    https://github.com/raullenchai/Rapid-MLX/pull/1214
    """
    raw = qwen3_5.write_checkpoint(tmp_path / "raw", **MOE)
    drafter = read_words(split(raw, tmp_path / "drafter", q_bits=4))
    mlp = "layers.0.mlp."
    packed = {name for name, (_, dtype) in drafter.items() if dtype == "U32"}
    assert {f"{mlp}switch_mlp.{part}_proj.weight" for part in ("gate", "up", "down")} < packed
    assert packed.isdisjoint({f"{mlp}gate.weight", f"{mlp}shared_expert_gate.weight"})
    assert drafter[f"{mlp}shared_expert_gate.weight"][1] == "BF16"
    for norm in ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"):
        assert np.allclose(floats(drafter[norm][0]), 1 + floats(read_words(raw)[f"mtp.{norm}"][0]), atol=0.01)


def floats(words: Any) -> Any:
    """BF16 words as numbers."""
    return (words.astype("<u4") << 16).view("<f4")


def test_t07_a_head_that_was_converted_before_is_not_shifted_again(tmp_path: Path) -> None:
    """One was added to norms that had it already, and acceptance fell.

    https://github.com/Blaizzy/mlx-vlm/pull/1554
    """
    raw = split(qwen3_5.write_checkpoint(tmp_path / "raw"), tmp_path / "from raw")
    converted = split(qwen3_5.write_mlx_checkpoint(tmp_path / "converted"), tmp_path / "from converted")
    assert sha256_of_weights(raw) == sha256_of_weights(converted)


@pytest.mark.parametrize("name", ["pre_fc_norm_embedding.weight", "layers.0.input_layernorm.weight"])
def test_t08_a_drafter_with_a_raw_norm_is_refused(tmp_path: Path, name: str) -> None:
    """Gains that are the raw numbers have the wrong sign: all checks passed, and decoding got slower.

    https://github.com/youssofal/MTPLX/pull/511
    """
    raw = qwen3_5.write_checkpoint(tmp_path / "raw")
    drafter = split(raw, tmp_path / "drafter")
    edit_tensors(drafter, raw_norm(name))
    report = api.validate(raw, drafter)
    assert report["verdict"] == "unsafe"
    assert name in errors(report)["DRAFTER-NORMS"]


def raw_norm(name: str) -> Callable[[Words], object]:
    """A norm as the raw checkpoint stores it."""

    def change(tensors: Words) -> None:
        one = {name: tensors[name]}
        shift_norms(-1)(one)
        tensors.update(one)

    return change


@pytest.mark.parametrize("write", [qwen3_5.write_checkpoint, qwen3_5.write_mlx_checkpoint])
def test_t09_twice_gives_the_same_bytes(tmp_path: Path, write: Callable[..., Path]) -> None:
    """A conversion that is not idempotent turned sound checkpoints to garbage.

    https://github.com/Blaizzy/mlx-vlm/issues/1521, https://github.com/Blaizzy/mlx-vlm/issues/1718
    """
    source = write(tmp_path / "source")
    first, second = split(source, tmp_path / "first"), split(source, tmp_path / "second")
    assert sha256_of_weights(first) == sha256_of_weights(second)
    with pytest.raises(ToolError):
        api.split_mtp(first, tmp_path / "third")


def test_t10_a_head_keeps_its_own_embedding_and_output_matrix_and_its_router(tmp_path: Path) -> None:
    """One family's head owns both; its router must not be quantized, and the router's bias stays float32.

    https://github.com/Blaizzy/mlx-vlm/pull/1570
    """
    raw = glm4_moe_lite.write_checkpoint(tmp_path / "raw")
    report = api.split_mtp(raw, tmp_path / "drafter", q_bits=4, q_group_size=32)
    found = dtypes(tmp_path / "drafter")
    assert {"model.embed_tokens.weight", "lm_head.weight"} < found.keys()
    assert found["model.mtp_block.mlp.gate.weight"] == "BF16"
    assert found["model.mtp_block.mlp.gate.e_score_correction_bias"] == "F32"
    kept = {entry["name"]: entry["reason"] for entry in report["kept_full_precision"]}
    assert "router" in kept["model.mtp_block.mlp.gate.weight"]


def test_t11_a_folder_with_other_weights_is_not_written_into_and_options_are_checked_first(
    tmp_path: Path,
) -> None:
    """Old shards stayed and were merged by the loader; a bad bit width ended the run after all the work.

    https://github.com/lablup/mlxcel/pull/1778
    """
    raw = qwen3_5.write_checkpoint(tmp_path / "raw")
    used = tmp_path / "used"
    used.mkdir()
    (used / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(Usage, match=r"model-00001-of-00002\.safetensors"):
        api.split_mtp(raw, used)
    for options in ({"q_bits": 1}, {"q_bits": 4, "q_group_size": 16}):
        with pytest.raises(Usage, match="--q-"):
            split(raw, tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_t12_a_depth_of_null_is_no_depth_and_the_tensors_decide(tmp_path: Path) -> None:
    """An explicit null for the number of head layers was a TypeError.

    https://github.com/NVIDIA/Model-Optimizer/pull/1532
    """
    raw = glm4_moe.write_checkpoint(tmp_path / "raw", layers=3)
    edit_config(raw, lambda config: config.update(num_nextn_predict_layers=None))
    report = api.split_mtp(raw, tmp_path / "drafter")
    assert "declares none under num_nextn_predict_layers" in said(report)["HEAD-UNDECLARED"]
    assert config_of(tmp_path / "drafter")["text_config"]["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("files", ["indexed side", "side"])
@pytest.mark.parametrize("name", ["mtp.safetensors", "mtp_grafted.safetensors"])
def test_t13_a_head_in_a_file_of_its_own_is_found_by_index_and_headers(
    tmp_path: Path, files: Any, name: str
) -> None:
    """A pattern for file names missed the head's file, whether the index named it or not.

    https://github.com/jundot/omlx/issues/2062, https://github.com/jundot/omlx/issues/1944,
    https://github.com/noonghunna/club-3090/pull/645
    """
    raw = qwen3_5.write_checkpoint(tmp_path / "raw", files=files)
    (raw / "mtp.safetensors").rename(raw / name)
    edit_json(raw / INDEX, lambda index: rename_file(index["weight_map"], "mtp.safetensors", name))
    report = api.inspect(raw)
    assert [file["name"] for file in report["head"]["files"]] == [name]
    assert ("FILE-UNINDEXED" in said(report)) == (files == "side")
    assert len(api.split_mtp(raw, tmp_path / "drafter")["tensors"]) == 15


def rename_file(places: dict[str, str], old: str, new: str) -> None:
    """In an index, another name of a file."""
    places.update({tensor: new for tensor, file in places.items() if file == old})


def test_t14_a_head_is_never_written_beside_the_trunk(tmp_path: Path) -> None:
    """A head put into the model's folder makes the model itself unloadable where every file is read.

    https://github.com/lmstudio-ai/mlx-engine/issues/343
    """
    raw = qwen3_5.write_checkpoint(tmp_path / "raw")
    before = sha256_of_weights(raw)
    for force in (False, True):
        with pytest.raises(Usage, match="is the source itself"):
            api.split_mtp(raw, raw, force=force)
    assert sha256_of_weights(raw) == before
    side = qwen3_5.write_mlx_checkpoint(tmp_path / "side", files="side")
    assert "names no tensor of mtp.safetensors" in said(api.inspect(side))["FILE-UNINDEXED"]


def test_t15_a_head_that_the_index_forgot_is_found_and_the_omission_reported(tmp_path: Path) -> None:
    """An index that was written anew left all tensors of the head out, and it was gone the next day.

    https://github.com/osaurus-ai/vmlx-swift/pull/388
    """
    raw = shards(tmp_path / "raw")
    edit_json(raw / INDEX, lambda index: forget(index["weight_map"], "mtp."))
    assert f"names no tensor of {HEAD_FILE}" in said(api.inspect(raw))["FILE-UNINDEXED"]
    assert len(api.split_mtp(raw, tmp_path / "drafter")["tensors"]) == 15


def forget(places: dict[str, str], prefix: str) -> None:
    """No entries for these tensors in an index."""
    for name in [name for name in places if name.startswith(prefix)]:
        del places[name]


@pytest.mark.parametrize(
    ("change", "rule", "words"),
    [
        ({"mtp.ghost.weight": HEAD_FILE}, "INDEX-TENSOR-ABSENT", "mtp.ghost.weight"),
        ({"mtp.fc.weight": "model-00001-of-00003.safetensors"}, "INDEX-TENSOR-ELSEWHERE", "mtp.fc.weight"),
    ],
)
def test_t16_index_and_headers_are_held_against_each_other(
    tmp_path: Path, change: dict[str, str], rule: str, words: str
) -> None:
    """An index lists a tensor that no file holds, or places it in another file; nobody looks.

    https://github.com/huggingface/huggingface_hub/issues/4725
    """
    raw = shards(tmp_path / "raw")
    edit_json(raw / INDEX, lambda index: index["weight_map"].update(change))
    report = api.validate(raw)
    assert report["verdict"] == "unsafe"
    assert words in errors(report)[rule]
    with pytest.raises(Refused, match=words):
        api.split_mtp(raw, tmp_path / "drafter")


def test_t17_a_missing_shard_is_an_incomplete_download(tmp_path: Path) -> None:
    """A server started without a shard's weights and answered garbage; a loader named tensors, not the file.

    https://github.com/sgl-project/sglang/pull/32279, https://github.com/Blaizzy/mlx-vlm/pull/1827
    """
    raw = shards(tmp_path / "raw")
    (raw / "model-00002-of-00003.safetensors").unlink()
    report = api.validate(raw)
    assert report["verdict"] == "unsafe"
    assert "incomplete download" in errors(report)["INDEX-SHARD-MISSING"]
    assert "model-00002-of-00003.safetensors" in errors(report)["INDEX-SHARD-MISSING"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        (lambda _: b"<!DOCTYPE html><html><body>Not found</body></html>", "web page"),
        (lambda whole: whole[:-100], "truncated"),
        (lambda whole: (10**12).to_bytes(8, "little") + whole[8:], "states a header of 1,000,000,000,000 bytes"),
    ],
)  # fmt: skip
def test_t18_what_is_no_weights_is_called_what_it_is(
    tmp_path: Path, content: Callable[[bytes], bytes], words: str
) -> None:
    """ "Header too large" was all that was said of a pointer, a web page or half a download.

    https://github.com/huggingface/transformers/issues/27923, https://github.com/microsoft/OmniParser/issues/34
    """
    raw = qwen3_5.write_checkpoint(tmp_path / "raw")
    file = raw / "model.safetensors"
    file.write_bytes(content(file.read_bytes()))
    report = api.validate(raw)
    assert report["verdict"] == "unsafe"
    assert words in errors(report)["FILE-HEADER"]


def test_t19_the_family_of_a_drafter_is_told_by_its_tensors(tmp_path: Path) -> None:
    """A DFlash2 drafter ran as DFlash, a plain model_type made a drafter a full model, an unknown type a DFlash.

    https://github.com/ddalcu/mlx-serve/issues/224, https://github.com/jundot/omlx/pull/2730,
    https://github.com/lablup/mlxcel/issues/1168
    """
    target = tapped.write_target(tmp_path / "target")
    second = tapped.write_drafter(tmp_path / "dflash2", "dflash2", next(iter(tapped.variants("dflash2"))))
    assert api.validate(target, second)["pair"]["drafter_family"] == "dflash2"
    plain = tapped.write_drafter(tmp_path / "plain", "dflash", "old_shape")
    assert config_of(plain)["model_type"] == "qwen3"
    assert api.inspect(plain)["checkpoint"]["role"] == "drafter"
    assert api.validate(target, plain)["pair"]["drafter_family"] == "dflash"
    unknown = tapped.write_drafter(
        tmp_path / "unknown", "dflash", "old_shape", only_type("somebodys_dflash"), only("other.weight")
    )
    report = api.validate(target, unknown)
    assert (report["verdict"], report["pair"]["drafter_family"]) == ("unknown", None)
    assert "somebodys_dflash" in said(report)["DRAFTER-FAMILY-UNKNOWN"]


def only_type(model_type: str) -> tapped.ConfigChange:
    """A config that says no more than this."""

    def change(config: tapped.Config) -> None:
        config.clear()
        config["model_type"] = model_type

    return change


def only(name: str) -> tapped.TensorChange:
    """One tensor that no family knows."""

    def change(tensors: tapped.Tensors) -> None:
        tensors.clear()
        tensors[name] = (np.ones((4, 4)), "BF16")

    return change


@pytest.mark.parametrize(
    ("variant", "change", "width"),
    [
        ("old_shape", None, 8),
        ("new_shape", None, 16),
        ("old_shape", tapped.nested(block_size=8), 8),
        ("old_shape", tapped.nested(block_size=4), None),
    ],
)
def test_t20_both_spellings_of_the_block_size_are_read_and_a_conflict_is_an_error(
    tmp_path: Path, variant: str, change: tapped.ConfigChange | None, width: int | None
) -> None:
    """Older drafters state the block size at the top, newer ones in dflash_config; one of them was not seen.

    https://github.com/InternLM/lmdeploy/pull/4789
    """
    target = tapped.write_target(tmp_path / "target")
    drafter = tapped.write_drafter(tmp_path / "drafter", "dflash", variant, change)
    report = api.validate(target, drafter)
    assert report["pair"]["block_size"] == width
    if width is None:
        assert (
            errors(report)["CONFIG-CONFLICT"]
            == "block_size is 4 at /dflash_config/block_size and 8 at /block_size"
        )
    else:
        assert report["verdict"] == "compatible"


NESTED_IDS = tapped.top(eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3, 5]})
WITHOUT_IDS = tapped.without("eagle_aux_hidden_state_layer_ids")


@pytest.mark.parametrize(
    ("change", "ids"),
    [(None, [2, 3, 5]), (tapped.both(WITHOUT_IDS, NESTED_IDS), [2, 3, 5]), (WITHOUT_IDS, None)],
)
def test_t21_the_layers_that_eagle3_reads_are_read_at_either_place_and_never_guessed(
    tmp_path: Path, change: tapped.ConfigChange | None, ids: list[int] | None
) -> None:
    """Nested ids were not seen and a formula took their place: one of three layers wrong, or 1 % accepted.

    https://github.com/ggml-org/llama.cpp/pull/27040, https://github.com/vllm-project/vllm/pull/50170
    """
    target = tapped.write_target(tmp_path / "target")
    drafter = tapped.write_drafter(tmp_path / "drafter", "eagle3", "speculators_qwen3", change)
    report = api.validate(target, drafter)
    if ids is None:
        assert report["verdict"] == "unsafe"
        assert "eagle_aux_hidden_state_layer_ids" in errors(report)["CONFIG-TAPS"]
    else:
        assert (report["verdict"], report["facts"]["taps"]["ids"]) == ("compatible", ids)


@pytest.mark.parametrize(
    ("change", "model_type", "rule", "words"),
    [
        (tapped.both(tapped.nested(target_layer_ids=[0, 2, 6]), tapped.without("num_target_layers")),
         "qwen3", "PAIR-TAPS", "id 6 is past the target's 6 layers"),
        (tapped.nested(mask_token_id=128), "qwen3", "CONFIG-MASK-VOCABULARY", "mask_token_id is 128"),
        (tapped.top(block_size=10**6), "qwen3", "CONFIG-BLOCK-SIZE", "block_size is 1000000"),
        (None, "lfm2", "PAIR-FAMILY", "the target is a lfm2 model; a dflash drafter"),
    ],
)  # fmt: skip
def test_t22_what_would_reach_past_the_target_is_refused_before_anything_runs(
    tmp_path: Path, change: tapped.ConfigChange | None, model_type: str, rule: str, words: str
) -> None:
    """A layer that the target lacks was a matmul error; mask ids and widths without a bound killed the server.

    https://github.com/vllm-project/vllm/pull/48113, https://github.com/lablup/mlxcel/pull/1751
    """
    target = tapped.write_target(tmp_path / "target", model_type)
    drafter = tapped.write_drafter(tmp_path / "drafter", "dflash", "old_shape", change)
    report = api.validate(target, drafter)
    assert report["verdict"] == "unsafe"
    assert words in errors(report)[rule]


def test_t23_another_model_of_the_same_sizes_is_not_taken_for_the_right_one(tmp_path: Path) -> None:
    """Hidden sizes were all that was compared: another model's weights or another vocabulary passed.

    https://github.com/Blaizzy/mlx-vlm/pull/1142, https://github.com/a-ghorbani/pocketpal-ai/issues/876
    """
    own = qwen3_5.write_checkpoint(tmp_path / "own")
    other = qwen3_5.write_checkpoint(tmp_path / "other", seed=1)
    drafter = split(own, tmp_path / "drafter")
    assert api.validate(own, drafter)["verdict"] == "proven"
    report = api.validate(other, drafter)
    assert report["verdict"] == "doubtful"
    assert "PAIR-PROVENANCE" in said(report)
    edit_json(own / "tokenizer.json", lambda document: swap(document["model"]["vocab"], "t3", "t4"))
    report = api.validate(own, drafter)
    assert report["verdict"] == "unsafe"
    assert 'id 3 is "t4" in the target and "t3" in the drafter' in errors(report)["PAIR-TOKENIZER"]


def swap(vocabulary: dict[str, int], one: str, other: str) -> None:
    """The ids of two tokens in each other's place."""
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_t24_bits_are_held_against_the_shapes(tmp_path: Path, bits: int) -> None:
    """Overrides kept the names of the source and missed; 5 bits were taken for another group size.

    https://github.com/jundot/omlx/issues/2326, https://github.com/youssofal/MTPLX/issues/182
    """
    raw = qwen3_5.write_checkpoint(tmp_path / "raw")
    override = [f"*.mlp.down_proj={bits}"]
    drafter = split(raw, tmp_path / "drafter", q_bits=4, q_group_size=64, q_overrides=override)
    assert config_of(drafter)["quantization"]["layers.0.mlp.down_proj"]["bits"] == bits
    assert api.validate(raw, drafter)["verdict"] == "proven"
    edit_json(drafter / "config.json", rename_override)
    report = api.validate(raw, drafter)
    assert report["verdict"] == "unsafe"
    assert "layers.0.mlp.down_proj.weight" in errors(report)["DRAFTER-TENSOR-SHAPE"]


def rename_override(config: Document) -> None:
    """The override under the name that the source had for the module."""
    for block in ("quantization", "quantization_config"):
        config[block]["mtp.layers.0.mlp.down_proj"] = config[block].pop("layers.0.mlp.down_proj")


def test_t25_packed_data_without_scales_is_never_read_as_numbers(tmp_path: Path) -> None:
    """Packed nibbles at half width were read as numbers, and nothing was accepted.

    https://github.com/kekzl/imp/pull/1428
    """
    raw = qwen3_5.write_checkpoint(tmp_path / "raw")
    drafter = split(raw, tmp_path / "drafter")
    edit_tensors(drafter, halved("fc.weight"))
    assert "U8 and has no scales" in errors(api.validate(raw, drafter))["DRAFTER-TENSOR-DTYPE"]
    edit_tensors(raw, halved("mtp.fc.weight"))
    assert "no scale beside it" in said(api.inspect(raw))["HEAD-PACKED"]
    with pytest.raises(Refused, match="bytes are no numbers without a scale"):
        api.split_mtp(raw, tmp_path / "again")


def halved(name: str) -> Callable[[Words], object]:
    """Bytes of two numbers each, without a scale."""

    def change(tensors: Words) -> None:
        rows, columns = tensors[name][0].shape
        tensors[name] = (np.zeros((rows, columns // 2), "u1"), "U8")

    return change


def test_t25_a_plain_head_of_a_quantized_trunk_is_plain(tmp_path: Path) -> None:
    """The head was built in the trunk's format, which its tensors do not have.

    https://github.com/vllm-project/vllm/pull/39475
    """
    raw = qwen3_5.write_checkpoint(tmp_path / "raw")
    block = {"bits": 4, "group_size": 128, "quant_method": "gptq", "sym": True}
    edit_json(raw / "config.json", lambda config: config.update(quantization_config=block))
    drafter = split(raw, tmp_path / "drafter")
    assert {"quantization", "quantization_config"}.isdisjoint(config_of(drafter))
    assert set(dtypes(drafter).values()) == {"BF16"}


def test_t25_scales_are_found_under_each_of_their_names(tmp_path: Path) -> None:
    """A bare .scale was not looked for, so that a packed head passed for a plain one.

    https://github.com/vllm-project/vllm/pull/43319
    """
    options = {"hidden": 192, "dense": 320, "fp8": True}
    raw = qwen3_5.write_checkpoint(tmp_path / "raw", **options)
    renamed = qwen3_5.write_checkpoint(tmp_path / "renamed", **options)
    edit_tensors(renamed, lambda tensors: rename_scales(tensors, list(tensors)))
    drafters = [split(folder, tmp_path / f"{folder.name}-mtp") for folder in (raw, renamed)]
    assert set(dtypes(drafters[1]).values()) == {"BF16"}
    assert sha256_of_weights(drafters[0]) == sha256_of_weights(drafters[1])


def rename_scales(tensors: Words, names: Iterable[str]) -> None:
    """The head's scales under the shorter name."""
    for name in names:
        if name.startswith("mtp.") and name.endswith("weight_scale_inv"):
            tensors[name.replace("weight_scale_inv", "scale")] = tensors.pop(name)
