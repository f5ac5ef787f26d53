"""mlx-lm is given the checkpoint that was opened, and nothing that lies beside it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from draftpair import api
from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Refused
from draftpair.runtime.options import Options
from draftpair.runtime.staging import loadable_folder, needed_files
from fixtures.glm4_moe_lite import write_target
from fixtures.weights import write_json

PROMPT, OPTIONS = "t1 t2 t3", Options(max_tokens=8, chat_template=False)


def tokens(model: Path) -> list[int]:
    return list(api.generate(model, PROMPT, options=OPTIONS)["tokens"])


def test_a_stray_copy_beside_indexed_shards_is_not_loaded(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", shards=2)
    plain = tokens(target)
    stranger = (write_target(tmp_path / "other", seed=5) / "model.safetensors").read_bytes()
    for letter in "abcdefgh":  # mlx-lm's order is the file system's, so try several names
        (target / f"model-{letter}.safetensors").write_bytes(stranger)
        assert tokens(target) == plain
        (target / f"model-{letter}.safetensors").unlink()


@pytest.mark.parametrize("stray", ["model-extra.safetensors", "adapter.safetensors"])
def test_only_files_that_the_index_names_are_needed(tmp_path: Path, stray: str) -> None:
    target = write_target(tmp_path / "target", shards=2)
    save_file({"another.weight": np.zeros(2, np.float32)}, target / stray)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    checkpoint = open_checkpoint(target)
    assert sorted(checkpoint.files) == sorted([*shards, stray])
    assert needed_files(checkpoint) == shards
    with loadable_folder(checkpoint, {}) as folder:
        links = [path.resolve().name for path in sorted(folder.glob("*.safetensors"))]
    assert links == shards


@pytest.mark.parametrize("name", ["model.safetensors", "model2.safetensors", "weights.safetensors"])
def test_a_single_file_is_that_file(tmp_path: Path, name: str) -> None:
    plain = tokens(write_target(tmp_path / "plain"))
    target = write_target(tmp_path / "target")
    (target / "model.safetensors").rename(target / name)
    stranger = (write_target(tmp_path / "other", seed=5) / "model.safetensors").read_bytes()
    (target / "model-b.safetensors").write_bytes(stranger)
    assert tokens(target / name) == plain


def test_one_shard_of_several_is_no_model(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target", shards=2)
    with pytest.raises(Refused):
        tokens(target / "model-00001-of-00002.safetensors")


def test_a_stale_index_does_not_keep_the_files_from_being_loaded(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    plain = tokens(target)
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00001-of-00048.safetensors"}}
    write_json(target / "model.safetensors.index.json", index)
    assert tokens(target) == plain


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    plain = tokens(target)
    (target / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = json.loads((target / "config.json").read_text())
    write_json(
        target / "config.json", {**config, "model_file": "evil.py", "auto_map": {"AutoModel": "evil.Model"}}
    )
    assert tokens(target) == plain
    assert not (tmp_path / "ran").exists()


def test_a_tensor_in_two_files_that_are_both_needed_is_refused(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    weights = (target / "model.safetensors").read_bytes()
    (target / "model.safetensors").unlink()
    length = int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8 : 8 + length])
    for name in ("one", "two"):  # each lacks a tensor by name that the other has
        renamed = {
            f"only.{name}" if key == "model.norm.weight" else key: value for key, value in header.items()
        }
        text = json.dumps(renamed).encode()
        text += b" " * (-len(text) % 8)
        (target / f"model-{name}.safetensors").write_bytes(
            len(text).to_bytes(8, "little") + text + weights[8 + length :]
        )
    with pytest.raises(Refused, match=r"model-one\.safetensors and in model-two\.safetensors"):
        needed_files(open_checkpoint(target))


def test_the_folder_is_gone_afterwards_and_the_source_untouched(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in target.iterdir())
    with loadable_folder(open_checkpoint(target), {"rope_theta": 5.0}) as folder:
        assert json.loads((folder / "config.json").read_text())["rope_theta"] == 5.0
    assert not folder.exists()
    assert sorted((path.name, path.stat().st_mtime_ns) for path in target.iterdir()) == before
