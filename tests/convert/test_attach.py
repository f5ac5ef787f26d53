"""A split head back in its target: same bytes when split again, trunk untouched, and every refusal."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair import api
from draftpair.checkpoint import open_checkpoint, to_float32
from draftpair.convert.attach import HEAD_FILE
from draftpair.errors import Refused, ToolError, Usage
from draftpair.families.heads import find_head
from fixtures import deepseek_v3, qwen3_5
from fixtures.glm4_moe_lite import write_target

FORMS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "float32": {"dtype": "float32"},
    "affine": {"q_bits": 4, "q_group_size": 32},
    "mxfp4": {"q_mode": "mxfp4"},
    "mixed": {"q_mode": "nvfp4", "q_overrides": ("lm_head=8", "eh_proj=none")},
}


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return write_target(tmp_path / "target", shards=2)


@pytest.mark.parametrize("form", FORMS)
def test_split_attach_split_gives_the_same_bytes(raw: Path, target: Path, tmp_path: Path, form: str) -> None:
    first, whole, second = tmp_path / "first", tmp_path / "whole", tmp_path / "second"
    api.split_mtp(raw, first, **FORMS[form])
    before = digests(target)
    report = api.attach(target, first, whole)
    after = digests(whole)
    assert {name: after[name] for name in before if not name.endswith(("config.json", "index.json"))} == {
        name: digest for name, digest in before.items() if not name.endswith(("config.json", "index.json"))
    }
    assert digests(target) == before
    api.split_mtp(whole, second)
    # Manifest and card name the checkpoint that was split; everything else is the same.
    origin = ("draftpair-manifest.json", "README.md")
    assert {n: d for n, d in digests(first).items() if n not in origin} == {
        n: d for n, d in digests(second).items() if n not in origin
    }
    assert report["written"]
    assert report["bytes_written"] == sum(t["bytes"] for t in report["tensors"])


def test_the_result_is_one_sound_checkpoint_with_an_indexed_head(
    raw: Path, target: Path, tmp_path: Path
) -> None:
    api.split_mtp(raw, tmp_path / "drafter", q_bits=4)
    api.attach(target, tmp_path / "drafter", tmp_path / "whole")
    whole = open_checkpoint(tmp_path / "whole")
    assert whole.findings == ()
    assert api.validate(tmp_path / "whole")["verdict"] == "sound"
    head = find_head(whole)
    assert head
    assert head.complete
    assert {tensor.file for tensor in head.tensors} == {HEAD_FILE}
    assert whole.index
    assert whole.index.total_size == whole.tensor_bytes
    inspected = api.inspect(tmp_path / "whole")["head"]
    assert inspected["files"] == [{"name": HEAD_FILE, "indexed": True}]
    assert inspected["declared"]


def test_a_target_in_one_file_gets_an_index_of_both(raw: Path, tmp_path: Path) -> None:
    target = write_target(tmp_path / "single")
    assert not (target / "model.safetensors.index.json").exists()
    api.split_mtp(raw, tmp_path / "drafter")
    api.attach(target, tmp_path / "drafter", tmp_path / "whole")
    index = json.loads((tmp_path / "whole" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {"model.safetensors", HEAD_FILE}


def test_the_targets_own_quantization_stays_and_the_heads_is_said_per_module(
    raw: Path, target: Path, tmp_path: Path, tools: Any
) -> None:
    own = {"group_size": 64, "bits": 8, "mode": "affine", "model.layers.0.self_attn.o_proj": False}
    tools.edit_json(target / "config.json", lambda config: config.update(quantization=own))
    api.split_mtp(raw, tmp_path / "drafter", q_bits=4, q_group_size=32, q_overrides=("lm_head=8",))
    checkpoint, drafter = open_checkpoint(target), open_checkpoint(tmp_path / "drafter")
    from draftpair.convert.attach import plan_attach
    from draftpair.families import family

    plan = plan_attach(checkpoint, drafter, family("glm4_moe_lite_mtp"), tmp_path / "whole")
    merged = plan.config["quantization"]
    assert {key: merged[key] for key in own} == own
    assert merged["model.layers.3.eh_proj"] == {"group_size": 32, "bits": 4, "mode": "affine"}
    assert merged["model.layers.3.shared_head.head"]["bits"] == 8


def test_files_are_linked_when_asked(raw: Path, target: Path, tmp_path: Path) -> None:
    api.split_mtp(raw, tmp_path / "drafter")
    report = api.attach(target, tmp_path / "drafter", tmp_path / "whole", link=True)
    shard = next(target.glob("model-00001*.safetensors"))
    assert os.path.samefile(shard, tmp_path / "whole" / shard.name)
    assert not os.path.samefile(target / "config.json", tmp_path / "whole" / "config.json")
    assert {"name": shard.name, "how": "linked"} in report["files"]


def test_a_dry_run_writes_nothing_and_says_the_same(raw: Path, target: Path, tmp_path: Path) -> None:
    api.split_mtp(raw, tmp_path / "drafter")
    dry = api.attach(target, tmp_path / "drafter", tmp_path / "whole", dry_run=True)
    assert not (tmp_path / "whole").exists()
    assert not dry["written"]
    done = api.attach(target, tmp_path / "drafter", tmp_path / "whole")
    assert {**dry, "written": True} == done


def test_a_target_with_a_head_is_refused(raw: Path, sharded: Path, tmp_path: Path) -> None:
    api.split_mtp(raw, tmp_path / "drafter")
    with pytest.raises(Refused, match=r"has a head already: 44 tensors under model\.layers\.3\."):
        api.attach(sharded, tmp_path / "drafter", tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_a_drafter_of_another_model_is_refused(raw: Path, tmp_path: Path) -> None:
    other = write_target(tmp_path / "other", hidden=128)
    api.split_mtp(raw, tmp_path / "drafter")
    with pytest.raises(Refused, match="does not belong to"):
        api.attach(other, tmp_path / "drafter", tmp_path / "whole")
    assert not (tmp_path / "whole").exists()


def test_what_is_no_drafter_is_refused(raw: Path, target: Path, tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="holds a head as well"):
        api.attach(target, raw, tmp_path / "whole")


@pytest.mark.parametrize("where", ["target", "drafter", "occupied"])
def test_an_output_that_holds_something_is_left_alone(
    raw: Path, target: Path, tmp_path: Path, where: str
) -> None:
    drafter = tmp_path / "drafter"
    api.split_mtp(raw, drafter)
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "note.txt").write_text("mine")
    output = {"target": target, "drafter": drafter, "occupied": tmp_path / "occupied"}[where]
    before = digests(output)
    with pytest.raises(Usage):
        api.attach(target, drafter, output)
    assert digests(output) == before


def test_a_drafter_that_changes_meanwhile_leaves_nothing(raw: Path, target: Path, tmp_path: Path) -> None:
    drafter = tmp_path / "drafter"
    api.split_mtp(raw, drafter)

    def touch(stage: str, done: int, total: int) -> None:
        os.utime(drafter / "model.safetensors", (1, 1))

    with pytest.raises(Refused, match="changed while it was being read"):
        api.attach(target, drafter, tmp_path / "whole", progress=touch)
    assert not (tmp_path / "whole").exists()
    assert not [path for path in tmp_path.iterdir() if ".draftpair" in path.name]


@pytest.mark.parametrize("profile", ["published", "mlx"])
def test_norms_go_back_as_the_target_stores_its_own(tmp_path: Path, profile: str) -> None:
    raw = qwen3_5.write_checkpoint(tmp_path / "raw")
    write = qwen3_5.write_checkpoint if profile == "published" else qwen3_5.write_mlx_checkpoint
    target = write(tmp_path / "target", head=False)
    api.split_mtp(raw, tmp_path / "drafter")
    api.attach(target, tmp_path / "drafter", tmp_path / "whole")
    whole = open_checkpoint(tmp_path / "whole")
    head = find_head(whole)
    assert head
    gains = open_checkpoint(tmp_path / "drafter")
    name = "pre_fc_norm_hidden.weight"
    attached = next(tensor for tensor in head.tensors if tensor.name.endswith(name))
    stored = to_float32(whole.read(attached), "BF16")
    gain = to_float32(gains.read(gains.tensors[name]), "BF16")
    assert np.array_equal(stored + (profile == "published"), gain)
    api.split_mtp(tmp_path / "whole", tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "drafter" / "model.safetensors"
    ).read_bytes()


def test_a_packed_head_is_not_put_beside_another_format(tmp_path: Path) -> None:
    raw = deepseek_v3.write_checkpoint(tmp_path / "raw", kept="fp8")
    target = deepseek_v3.write_checkpoint(tmp_path / "target", kept="fp8", head=False)
    api.split_mtp(raw, tmp_path / "packed", q_bits=4, q_group_size=32)
    with pytest.raises(Refused, match="packed in a format that is not MLX's"):
        api.attach(target, tmp_path / "packed", tmp_path / "whole")
    assert not (tmp_path / "whole").exists()
    api.split_mtp(raw, tmp_path / "plain")
    report = api.attach(target, tmp_path / "plain", tmp_path / "whole")
    assert "ATTACH-FORM" in {finding["rule"] for finding in report["findings"]}
    before, after = (json.loads((f / "config.json").read_text()) for f in (target, tmp_path / "whole"))
    assert after["quantization_config"] == before["quantization_config"]
    assert "quantization" not in after


def test_folders_of_the_target_are_named_and_its_own_file_of_that_name_is_refused(
    raw: Path, target: Path, tmp_path: Path, tools: Any
) -> None:
    api.split_mtp(raw, tmp_path / "drafter")
    (target / "original").mkdir()
    report = api.attach(target, tmp_path / "drafter", tmp_path / "whole")
    (finding,) = [finding for finding in report["findings"] if finding["rule"] == "ATTACH-FOLDERS"]
    assert finding["found"] == ["original"]
    tools.write(target / HEAD_FILE, {})
    with pytest.raises(Refused, match=HEAD_FILE):
        api.attach(target, tmp_path / "drafter", tmp_path / "again")
