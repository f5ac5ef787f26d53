"""What inspect reports: memory of every kind of drafter, groups that sum up, and a report whatever config.json says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftpair import api
from draftpair.errors import Refused
from draftpair.report.text import inspect_text
from draftpair.validate.sizing import group_of
from fixtures.folders import Folders
from fixtures.published import DRAFTERS, HEADS, PAIRS, TARGETS
from fixtures.published.releases import Release, write_headers
from fixtures.weights import write_json


def rules(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["rule"]: finding for finding in report["integrity"]["findings"]}


def write(folder: Path, release: Release) -> Path:
    """A release without its tokenizer, which inspect does not read."""
    write_headers(folder, release.tensors())
    write_json(folder / "config.json", release.config)
    return folder


@pytest.mark.parametrize("name", TARGETS)
def test_a_published_target_has_known_memory_and_groups_that_sum_up(tmp_path: Path, name: str) -> None:
    report = api.inspect(write(tmp_path, TARGETS[name]), memory="1GB")
    sizes, memory = report["sizes"], report["memory"]
    assert sum(sizes["groups"].values()) == sizes["tensor_bytes"]
    assert report["head"]["bytes"] == sizes["groups"]["head"]
    assert memory["kv_bytes"] > 0
    assert memory["total_bytes"] > sizes["tensor_bytes"]
    assert report["checkpoint"]["fetched_bytes"] is None
    assert f"                {memory['caches']}" in list(inspect_text(report))


@pytest.mark.parametrize("name", [name for name in PAIRS if name not in HEADS])
def test_a_published_drafter_has_known_memory_alone_and_beside_its_target(tmp_path: Path, name: str) -> None:
    drafter = write(tmp_path / "drafter", DRAFTERS[name])
    report = api.inspect(drafter, memory="1GB")
    alone, sizes = report["memory"], report["sizes"]
    assert sum(sizes["groups"].values()) == sizes["tensor_bytes"]
    assert sizes["groups"]["head"] == sizes["groups"]["vision"] == 0
    assert alone["weights_bytes"] == sizes["tensor_bytes"]
    for served in PAIRS[name]:
        pair = api.inspect(write(tmp_path / served, TARGETS[served]), drafter, memory="1GB")["memory"]
        assert pair["drafter_bytes"] == sizes["tensor_bytes"] + alone["kv_bytes"] + alone["state_bytes"]
        assert pair["drafter_caches"] == alone["caches"]
        assert pair["total_bytes"] > pair["drafter_bytes"] + pair["weights_bytes"]


DRAFTER_CACHES = {
    # 5 layers, 8 heads of 128, two rows, 8,192 tokens, BF16.
    "Qwen3-4B-DFlash-b16": 5 * 8192 * 2 * 8 * 128 * 2,
    "Qwen3.6-27B-DFlash": (4 * 2048 + 8192) * 2 * 8 * 128 * 2,
    "dspark_qwen3_4b_block7": 5 * 8192 * 2 * 8 * 128 * 2,
    "LFM2.5-1.2B-Instruct-DSpark": 5 * 8192 * 2 * 8 * 64 * 2,
    "gemma-4-E2B-it-assistant": 0,
    "gemma-4-31B-it-assistant": 0,
    "Laguna-XS-2.1-DFlash": 5 * 512 * 2 * 8 * 128 * 2,
    "Muse-Glimmer-30B-assistant": 5 * 2048 * 2 * 8 * 128 * 2,
}


@pytest.mark.parametrize(("name", "expected"), DRAFTER_CACHES.items(), ids=DRAFTER_CACHES)
def test_the_cache_of_a_published_drafter(tmp_path: Path, name: str, expected: int) -> None:
    memory = api.inspect(write(tmp_path, DRAFTERS[name]), context=8192)["memory"]
    assert memory["kv_bytes"] == expected


def test_a_drafter_that_reads_its_targets_keys_says_whose_they_are(tmp_path: Path) -> None:
    memory = api.inspect(write(tmp_path, DRAFTERS["gemma-4-E2B-it-assistant"]))["memory"]
    assert memory["caches"] == "no cache of its own: it reads the target's keys and values"


def test_the_verify_block_has_a_row_for_each_token_and_the_states_of_every_tap(tmp_path: Path) -> None:
    target = write(tmp_path / "target", TARGETS["Qwen3-4B"])
    drafter = write(tmp_path / "drafter", DRAFTERS["Qwen3-4B-DFlash-b16"])
    memory = api.inspect(target, drafter, batch=3)["memory"]
    assert memory["verify_bytes"] == 16 * 3 * (151936 + 5 * 2560) * 2


def test_an_ordinary_model_beside_another_keeps_all_its_caches(tmp_path: Path) -> None:
    target = write(tmp_path / "target", TARGETS["Qwen3-8B"])
    small = write(tmp_path / "small", TARGETS["Qwen3-4B"])
    alone, pair = api.inspect(small)["memory"], api.inspect(target, small)["memory"]
    assert pair["drafter_bytes"] == alone["weights_bytes"] + alone["kv_bytes"]
    assert pair["drafter_caches"] == alone["caches"]


def test_what_is_no_drafter_is_refused(tmp_path: Path, folders: Folders) -> None:
    write_headers(tmp_path, {"strange.weight": ("BF16", (4, 4))})
    write_json(tmp_path / "config.json", {"model_type": "stranger"})
    with pytest.raises(Refused, match=r"--drafter .* is neither a drafter of a family"):
        api.inspect(folders.target, tmp_path)
    with pytest.raises(Refused, match=r"--drafter .* no tensor of an MTP head is in its files"):
        api.inspect(folders.target, folders.target)


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "kv_lora_rank"])
def test_a_config_without_a_size_of_the_head_gives_a_report_that_says_so(folders: Folders, key: str) -> None:
    folders.edit(folders.raw, "config.json", lambda config: config.pop(key))
    report = api.inspect(folders.raw)
    finding = rules(report)["CONFIG-DIMENSION"]
    assert finding["level"] == "error"
    assert key in finding["message"]
    assert report["head"]["present"] is True
    assert report["head"]["complete"] is None
    assert report["sizes"]["groups"]["head"] == report["head"]["bytes"] > 0


def test_a_size_that_is_no_number_gives_a_report_that_points_at_it(folders: Folders) -> None:
    folders.edit(folders.target, "config.json", lambda config: config.update(num_hidden_layers="many"))
    report = api.inspect(folders.target)
    assert report["memory"]["kv_bytes"] is None
    assert "/num_hidden_layers is 'many'" in rules(report)["MEMORY-UNKNOWN"]["message"]


def test_a_drafter_whose_vocabulary_is_its_targets_says_why_its_memory_is_open(tmp_path: Path) -> None:
    report = api.inspect(write(tmp_path, DRAFTERS["Muse-Glimmer-30B-assistant"]))
    assert report["memory"]["activation_bytes"] is report["memory"]["total_bytes"] is None
    assert "vocab_size" in rules(report)["MEMORY-UNKNOWN"]["message"]


def test_what_is_not_counted_is_a_note(tmp_path: Path) -> None:
    finding = rules(api.inspect(write(tmp_path, TARGETS["GLM-5.3-Flash"])))["MEMORY-NOT-COUNTED"]
    assert finding["level"] == "note"


def test_the_tables_of_a_drafter_are_no_parameters(tmp_path: Path) -> None:
    tables = {
        "d2t": ("I32", (16,)),
        "t2d": ("BOOL", (32,)),
        "masked_embedding.token_ordering": ("I64", (32,)),
    }
    write_headers(tmp_path, {**tables, "fc.weight": ("BF16", (4, 8))})
    write_json(tmp_path / "config.json", {"model_type": "stranger"})
    report = api.inspect(tmp_path)
    assert report["sizes"]["parameters"] == 32
    assert report["sizes"]["groups"]["embedding"] == 16 * 4 + 32 + 32 * 8


@pytest.mark.parametrize(
    ("name", "group"),
    {
        "fc.weight": "other",
        "encoder.fc.weight": "other",
        "pre_projection.weight": "other",
        "aux_hidden_norms.0.weight": "other",
        "confidence_head.proj.weight": "other",
        "candidate_selector.hidden_projection.weight": "other",
        "markov_head.markov_w1.weight": "embedding",
        "mtp.2.markov_head.embed.weight": "embedding",
        "candidate_selector.predecessor_codebook": "embedding",
        "candidate_selector.successor_codebook": "embedding",
        "masked_embedding.centroids.weight": "embedding",
        "d2t": "embedding",
        "t2d": "embedding",
        "layers.0.attention_conv.base_kernel": "attention",
        "layers.0.attention_conv.kernel_projection.weight": "attention",
        "layers.0.mlp_conv.base_kernel": "mlp",
        "midlayer.self_attn.q_proj.weight": "attention",
        "mtp_layers.0.mlp.up_proj.weight": "mlp",
    }.items(),
)
def test_the_group_of_a_drafters_tensor(name: str, group: str) -> None:
    assert group_of(name) == group
