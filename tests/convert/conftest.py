"""A tiny raw checkpoint, splits of it, and a reader of safetensors files that shares no code with ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.convert import Request, SplitPlan, SplitResult, carry_out, plan_split
from draftpair.families.heads import find_head
from fixtures.glm4_moe_lite import write_checkpoint

WORDS = {"BF16": "<u2", "F16": "<u2", "F32": "<u4", "U32": "<u4", "F64": "<u8", "U8": "<u1"}


def read_tensors(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """Name -> (dtype, raw words in the tensor's shape) of one file."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return {
        name: (
            entry["dtype"],
            np.frombuffer(
                data[8 + length + entry["data_offsets"][0] : 8 + length + entry["data_offsets"][1]],
                WORDS[entry["dtype"]],
            ).reshape(entry["shape"]),
        )
        for name, entry in header.items()
    }


def read_folder(folder: Path) -> dict[str, tuple[str, np.ndarray]]:
    return {
        name: t for path in sorted(folder.glob("*.safetensors")) for name, t in read_tensors(path).items()
    }


def write_tensors(path: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """The opposite of `read_tensors`."""
    header, data = {}, b""
    for name, (dtype, words) in tensors.items():
        begin = len(data)
        data += words.tobytes()
        header[name] = {"dtype": dtype, "shape": list(words.shape), "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def state_of(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Inode, size, time and content of every file."""
    return {
        str(path.relative_to(folder)): (s.st_ino, s.st_size, s.st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and (s := path.stat())
    }


def make_plan(source: Path, output: Path, **options: Any) -> SplitPlan:
    checkpoint = open_checkpoint(source)
    return plan_split(checkpoint, find_head(checkpoint), Request(output, **options))


class Tools:
    """What the tests of this folder use, in one fixture."""

    read = staticmethod(read_folder)
    read_file = staticmethod(read_tensors)
    write = staticmethod(write_tensors)
    state = staticmethod(state_of)
    plan = staticmethod(make_plan)

    @staticmethod
    def split(source: Path, output: Path, progress: Any = None, **options: Any) -> SplitResult:
        return carry_out(make_plan(source, output, **options), progress)

    @staticmethod
    def edit_json(path: Path, change: Callable[[Any], Any]) -> None:
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    @staticmethod
    def edit_tensors(folder: Path, change: Callable[[dict[str, tuple[str, np.ndarray]]], Any]) -> None:
        """Change the tensors of a folder with one weight file."""
        tensors = read_folder(folder)
        change(tensors)
        write_tensors(folder / "model.safetensors", tensors)


@pytest.fixture
def tools() -> type[Tools]:
    return Tools


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A raw checkpoint in one file."""
    return write_checkpoint(tmp_path / "raw")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """The same in three shards with an index."""
    return write_checkpoint(tmp_path / "sharded", shards=3)
