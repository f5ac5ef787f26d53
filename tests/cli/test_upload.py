"""`split-mtp --upload-repo`, whole: what was written is on the Hub, or nothing was asked of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import ModelCard, constants

from draftpair.cli import run
from draftpair.schemas import check, load_schema
from fixtures.folders import Folders
from fixtures.glm4_moe_lite import Geometry, checkpoint_tensors, write_folder
from fixtures.hub_upload import Repository, UploadHub, upload_hub

# huggingface_hub 2.4.0 sends plain LFS objects in a way that httpx2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

TOKEN = "hf_" + "s3cret" * 5
NAME = "me/tiny-MTP-bf16"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadHub]:
    with upload_hub(TOKEN, monkeypatch) as hub:
        yield hub


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def split(raw: Path, output: Path, *options: str, repository: str = NAME) -> int:
    return run(["split-mtp", "-m", str(raw), "-o", str(output), "--upload-repo", repository, *options])


def test_the_folder_is_on_the_hub(
    hub: UploadHub, folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert split(folders.raw, output, "--json") == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert check(report, load_schema("split-mtp")) == []
    repository = hub.repositories[NAME]
    assert report["upload"] == {
        "repository": NAME,
        "url": f"{hub.endpoint}/{NAME}",
        "commit": repository.commits[-1].oid,
    }
    del repository.files[".gitattributes"]
    assert repository.files == contents(output)
    assert repository.files.keys() == set(report["files"])
    assert "config.json" not in repository.commits[0].added
    assert TOKEN not in out + err


def test_the_card_says_what_was_done(hub: UploadHub, folders: Folders, tmp_path: Path) -> None:
    card = "---\nlicense: mit\nlanguage: [no, en]\npipeline_tag: text-generation\n---\n# Tiny\n"
    (folders.raw / "README.md").write_text(card)
    assert split(folders.raw, tmp_path / "out", "--q-bits", "4", "--q-group-size", "32") == 0
    text = hub.repositories[NAME].files["README.md"].decode()
    assert ModelCard(text).data.to_dict() == {
        "library_name": "mlx",
        "license": "mit",
        "language": ["no", "en"],
        "tags": ["mlx", "mtp", "speculative-decoding", "draft-model", "glm4_moe_lite_mtp"],
    }
    assert "# raw-MTP-4bit\n" in text
    assert "affine, 4 bits, groups of 32" in text
    assert str(tmp_path) not in text


def test_the_same_split_gives_the_same_card(folders: Folders, tmp_path: Path) -> None:
    for name in ("a", "b"):
        assert run(["split-mtp", "-m", str(folders.raw), "-o", str(tmp_path / name)]) == 0
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_what_lies_in_the_folder_besides_stays_here(hub: UploadHub, folders: Folders, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("private")
    assert split(folders.raw, tmp_path / "out") == 0
    assert (tmp_path / "out" / "notes.txt").exists()
    assert "notes.txt" not in hub.repositories[NAME].files


def test_a_new_split_takes_the_place_of_an_old_one(hub: UploadHub, folders: Folders, tmp_path: Path) -> None:
    assert split(folders.raw, tmp_path / "out") == 0
    hub.repositories[NAME].files["merges.txt"] = b"of another tokenizer"
    assert split(folders.raw, tmp_path / "out", "--force", "--q-bits", "8", "--q-group-size", "32") == 0
    del hub.repositories[NAME].files[".gitattributes"]
    assert hub.repositories[NAME].files == contents(tmp_path / "out")


def damaged(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    tensors = checkpoint_tensors(Geometry(), 0)
    change(tensors)
    return write_folder(folder, Geometry(), tensors)


def misshapen_trunk(tensors: dict[str, Any]) -> None:
    tensors["model.norm.weight"] = np.ones(7, "<f4")


@pytest.mark.parametrize(("change", "rule"), [(misshapen_trunk, "TARGET-TENSOR")])
def test_what_validate_calls_unsafe_is_not_uploaded(
    hub: UploadHub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[dict[str, Any]], None],
    rule: str,
) -> None:
    raw = damaged(tmp_path / "raw", change)
    assert split(raw, tmp_path / "out") == 1
    out, err = capsys.readouterr()
    assert f"{tmp_path / 'out'} was written, and is not uploaded: validate calls it unsafe" in err
    assert rule in err
    assert "draftpair validate" in err
    assert (out, hub.requests) == ("", [])
    assert (tmp_path / "out" / "config.json").is_file()


def test_what_validate_cannot_judge_is_not_uploaded(
    hub: UploadHub, folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folders.raw / name).unlink()
    assert split(folders.raw, tmp_path / "out") == 3
    err = capsys.readouterr().err
    assert "validate calls it unknown: PAIR-TOKENIZER-UNKNOWN" in err
    assert f"draftpair validate {folders.raw} {tmp_path / 'out'}" in err
    assert hub.requests == []


def test_a_source_that_is_not_whole_is_no_pair_to_judge(
    hub: UploadHub, folders: Folders, tmp_path: Path
) -> None:
    index = json.loads((folders.raw / "model.safetensors.index.json").read_text())["weight_map"]
    head = {file for name, file in index.items() if name.startswith("model.layers.3.")}
    spare = sorted(set(index.values()) - head)
    assert spare
    (folders.raw / spare[0]).unlink()
    assert split(folders.raw, tmp_path / "out") == 0
    assert hub.repositories[NAME].files["config.json"]


@pytest.mark.parametrize("repository", ["out", "./me/x", "me/x/y", ""])
def test_a_malformed_name_stops_everything(
    hub: UploadHub, folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str], repository: str
) -> None:
    assert split(folders.raw, tmp_path / "out", repository=repository) == 2
    assert "is no name that a repository on the Hub can have" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert hub.requests == []


def test_offline_nothing_is_begun(
    hub: UploadHub,
    folders: Folders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert split(folders.raw, tmp_path / "out") == 3
    assert "HF_HUB_OFFLINE" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_dry_run_uploads_nothing(
    hub: UploadHub, folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert split(folders.raw, tmp_path / "out", "--dry-run", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["upload"], report["written"], hub.requests) == (None, False, [])
    assert "README.md" in report["files"]


def test_a_failed_upload_leaves_the_folder_and_says_how_to_finish(
    hub: UploadHub, folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.fail("commit", 403, f"not with {TOKEN}")
    output = tmp_path / "out"
    assert split(folders.raw, output) == 3
    out, err = capsys.readouterr()
    assert f"{output} is complete on disk" in err
    assert f"hf upload {NAME} {output} ." in err
    assert TOKEN not in out + err
    assert run(["validate", str(folders.raw), str(output)]) == 0


def test_a_model_in_the_repository_is_not_overwritten(
    hub: UploadHub, folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    present = {"model.safetensors": b"a model", "config.json": b"{}"}
    hub.repositories[NAME] = Repository(branches={"main": dict(present)})
    assert split(folders.raw, tmp_path / "out") == 1
    assert "model.safetensors" in capsys.readouterr().err
    assert hub.repositories[NAME].files == present


def test_the_text_report_names_the_page(
    hub: UploadHub, folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert split(folders.raw, tmp_path / "out") == 0
    assert f"{hub.endpoint}/{NAME}" in capsys.readouterr().out


def test_the_environment_is_honoured_and_the_token_is_never_shown(
    hub: UploadHub, folders: Folders, tmp_path: Path
) -> None:
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.endpoint,
        "HF_TOKEN": TOKEN,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "home"),
        "HF_DEBUG": "1",
    }
    command = [
        sys.executable,
        "-m",
        "draftpair",
        "split-mtp",
        "-m",
        str(folders.raw),
        "-o",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(
        [*command, "--upload-repo", NAME], capture_output=True, text=True, env=environment, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert hub.repositories[NAME].files["config.json"] == (tmp_path / "out" / "config.json").read_bytes()
    assert TOKEN not in done.stdout + done.stderr
