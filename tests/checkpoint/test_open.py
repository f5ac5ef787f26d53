"""Opening folders and files, reading ranges, and the cost of both."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from draftpair.checkpoint import Checkpoint, open_checkpoint
from draftpair.errors import Refused, ToolError
from fixtures.safetensors_files import data_size, layout, pack, write_weights


@pytest.fixture
def folder(tmp_path) -> Path:
    """One file with two tensors of counting bytes, and a config."""
    entries = layout({"a": ("U8", (10,)), "b": ("F32", (5, 2))})
    (tmp_path / "model.safetensors").write_bytes(pack(entries, bytes(range(data_size(entries)))))
    (tmp_path / "config.json").write_text('{"model_type": "tiny"}')
    return tmp_path


@pytest.fixture
def checkpoint(folder) -> Checkpoint:
    return open_checkpoint(folder)


def test_a_folder(folder, checkpoint):
    assert checkpoint.source == str(folder)
    assert (checkpoint.root, checkpoint.revision, checkpoint.index) == (folder, None, None)
    assert checkpoint.findings == ()
    assert list(checkpoint.tensors) == ["a", "b"]
    assert checkpoint.tensor_bytes == 50
    file = checkpoint.files["model.safetensors"]
    assert (file.size, file.indexed) == ((folder / "model.safetensors").stat().st_size, True)


def test_a_single_file_ignores_its_neighbours(folder):
    write_weights(folder / "other.safetensors", {"c": ("U8", (1,))})
    checkpoint = open_checkpoint(folder / "other.safetensors")
    assert list(checkpoint.tensors) == ["c"]
    assert checkpoint.config.model_type == "tiny"
    assert checkpoint.findings == ()
    assert checkpoint.files["other.safetensors"].indexed


def test_a_single_shard_is_not_an_incomplete_download(tmp_path):
    path = tmp_path / "model-00002-of-00009.safetensors"
    write_weights(path, {"c": ("U8", (1,))})
    [finding] = open_checkpoint(path).findings
    assert (finding.rule, finding.level) == ("CONFIG-MISSING", "note")


def test_a_single_file_that_is_no_weights(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(40))
    assert [finding.rule for finding in open_checkpoint(path).findings] == ["CONFIG-MISSING", "FILE-HEADER"]


def test_weights_without_a_config(folder):
    (folder / "config.json").unlink()
    [finding] = open_checkpoint(folder).findings
    assert (finding.rule, finding.level, finding.where) == ("CONFIG-MISSING", "error", "config.json")


def test_a_config_without_weights(folder):
    (folder / "model.safetensors").unlink()
    checkpoint = open_checkpoint(folder)
    assert (checkpoint.tensors, checkpoint.config.model_type) == ({}, "tiny")


@pytest.mark.parametrize("text", ["[]", "{"])
def test_an_unusable_config_is_a_finding(folder, text):
    (folder / "config.json").write_text(text)
    checkpoint = open_checkpoint(folder)
    assert [finding.rule for finding in checkpoint.findings] == ["CONFIG-PARSE"]
    assert checkpoint.config.raw == {}
    assert list(checkpoint.tensors) == ["a", "b"]


def test_rope_conflicts_are_findings_of_the_checkpoint(folder):
    (folder / "config.json").write_text('{"rope_theta": 1, "rope_parameters": {"rope_theta": 2}}')
    assert [finding.rule for finding in open_checkpoint(folder).findings] == ["CONFIG-ROPE-CONFLICT"]


def test_one_broken_file_leaves_the_others_readable(folder):
    (folder / "broken.safetensors").write_bytes(b"<html>not found</html>")
    checkpoint = open_checkpoint(folder)
    [finding] = checkpoint.findings
    assert (finding.rule, finding.where) == ("FILE-HEADER", "broken.safetensors")
    assert "a web page" in finding.message
    assert "broken.safetensors" not in checkpoint.files
    assert list(checkpoint.tensors) == ["a", "b"]


def test_folders_and_pipes_named_like_weights_are_not_opened(folder):
    (folder / "x.safetensors").mkdir()
    os.mkfifo(folder / "y.safetensors")
    assert list(open_checkpoint(folder).files) == ["model.safetensors"]


@pytest.mark.parametrize("name", ["nowhere", "./owner/name", "no/such/folder", "owner/na me"])
def test_a_path_that_is_not_there(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ToolError, match=f"there is no file or folder {name}") as caught:
        open_checkpoint(name)
    assert caught.value.exit_code == 3


def test_a_path_too_long_for_the_system():
    with pytest.raises(ToolError, match="there is no file or folder"):
        open_checkpoint("x" * 5000)


def test_an_empty_folder(tmp_path):
    with pytest.raises(
        ToolError, match=r"has neither \.safetensors files nor a config\.json: it holds no files"
    ):
        open_checkpoint(tmp_path)


def test_a_folder_of_other_things(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(ToolError, match=r"it holds pytorch_model\.bin"):
        open_checkpoint(tmp_path)


def test_a_link_to_nothing(tmp_path):
    (tmp_path / "model").symlink_to("gone")
    with pytest.raises(ToolError, match="is a link to gone, which is not there"):
        open_checkpoint(tmp_path / "model")


def test_what_is_neither_folder_nor_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ToolError, match="is neither a folder nor a plain file"):
        open_checkpoint(tmp_path / "pipe")


def test_a_file_that_may_not_be_read_is_a_tool_error(folder, monkeypatch):
    def denied(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(ToolError, match=r"config\.json cannot be read: Permission denied") as caught:
        open_checkpoint(folder)
    assert caught.value.exit_code == 3


@pytest.fixture
def unprivileged(tmp_path, monkeypatch):
    """The current folder is `tmp_path`, and whoever runs the test may not read what is closed to others."""
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield
    if root:
        os.seteuid(0)


@pytest.fixture
def closed(tmp_path):
    """`closed/m` is a folder behind one that may not be entered; `listed` may be listed and not entered."""
    (tmp_path / "closed" / "m").mkdir(parents=True)
    (tmp_path / "listed").mkdir()
    (tmp_path / "listed" / "config.json").write_text("{}")
    (tmp_path / "closed").chmod(0o000)
    (tmp_path / "listed").chmod(0o444)
    yield
    (tmp_path / "closed").chmod(0o755)
    (tmp_path / "listed").chmod(0o755)


@pytest.mark.parametrize("name", ["closed/m", "closed/m/../m", "listed"])
def test_what_may_not_be_entered_is_not_said_to_be_absent(closed, unprivileged, name):
    with pytest.raises(ToolError, match=f"{name} cannot be read: Permission denied"):
        open_checkpoint(name)


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [(0, None, range(10)), (3, None, range(3, 10)), (2, 5, range(2, 5)), (4, 4, ()), (10, 10, ())],
)
def test_ranges_of_a_tensor(checkpoint, begin, end, expected):
    assert checkpoint.read(checkpoint.tensors["a"], begin, end) == bytes(expected)


def test_the_second_tensor_starts_after_the_first(checkpoint):
    assert checkpoint.read(checkpoint.tensors["b"], 38) == bytes([48, 49])


@pytest.mark.parametrize(("begin", "end"), [(-1, 3), (0, 11), (5, 4), (11, None)])
def test_a_range_outside_the_tensor(checkpoint, begin, end):
    with pytest.raises(ValueError, match="do not lie in a of 10 bytes"):
        checkpoint.read(checkpoint.tensors["a"], begin, end)


@pytest.mark.parametrize("size", [0, 100, 100_000])
def test_a_file_that_changed_since_it_was_opened(folder, checkpoint, size):
    os.truncate(folder / "model.safetensors", size)
    with pytest.raises(
        ToolError, match=r"model\.safetensors changed while it was in use.*reading a"
    ) as caught:
        checkpoint.read(checkpoint.tensors["a"])
    assert caught.value.exit_code == 3


def test_a_file_that_vanished(folder, checkpoint):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ToolError, match=r"model\.safetensors cannot be read"):
        checkpoint.read(checkpoint.tensors["a"])


def test_reading_from_threads(checkpoint):
    tensor = checkpoint.tensors["b"]
    with ThreadPoolExecutor(8) as pool:
        parts = list(pool.map(lambda at: checkpoint.read(tensor, at, at + 1), [*range(40)] * 20))
    assert b"".join(parts) == bytes(range(10, 50)) * 20


def test_no_file_stays_open(checkpoint):
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("needs /proc")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        checkpoint.read(checkpoint.tensors["a"])
    assert len(os.listdir("/proc/self/fd")) == before


def test_other_files(folder, checkpoint):
    (folder / "tokenizer.json").write_text('{"a": 1, "a": 2}')
    (folder / "bad.json").write_text('{"a": }')
    (folder / "sub").mkdir()
    assert checkpoint.has_file("tokenizer.json")
    assert not checkpoint.has_file("sub")
    assert not checkpoint.has_file("../x")
    assert checkpoint.read_bytes("bad.json") == b'{"a": }'
    assert checkpoint.read_json("tokenizer.json") == {"a": 2}
    with pytest.raises(Refused, match=rf"{folder}/bad\.json is not JSON: expecting value at line 1 column 7"):
        checkpoint.read_json("bad.json")
    with pytest.raises(ToolError, match=rf"{folder}/gone\.json cannot be read: No such file"):
        checkpoint.read_json("gone.json")


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", ""])
def test_files_outside_the_folder_are_not_read(checkpoint, name):
    with pytest.raises(Refused, match="no plain file name"):
        checkpoint.read_bytes(name)


def test_only_headers_are_read(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    entries = layout({f"model.layers.{layer}.w": ("BF16", (4096, 4096)) for layer in range(40)})
    with (tmp_path / "model.safetensors").open("wb") as file:
        size = file.write(pack(entries)) + data_size(entries)
        file.truncate(size)
    checkpoint = open_checkpoint(tmp_path)
    assert (len(checkpoint.tensors), checkpoint.findings) == (40, ())
    assert checkpoint.files["model.safetensors"].size == size > 1_300_000_000
    assert checkpoint.read(checkpoint.tensors["model.layers.39.w"], 33_554_430) == b"\0\0"


def test_opening_imports_neither_numpy_nor_the_hub_client(folder):
    program = (
        "import sys; from draftpair.checkpoint import open_checkpoint; open_checkpoint(sys.argv[1]);"
        "print([name for name in ('numpy', 'safetensors', 'huggingface_hub') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True
    )
    assert run.stdout == "[]\n"
