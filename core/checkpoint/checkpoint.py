"""A checkpoint as its headers describe it: which tensors there are, where their bytes lie, what is wrong.

Holds no tensor data and no open file. Bytes are read by range when asked for, and a file that is no longer
the one whose header was parsed is refused.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftpair.checkpoint.config import ConfigView
from draftpair.checkpoint.header import Header, TensorInfo
from draftpair.checkpoint.index import Index, is_plain_name
from draftpair.checkpoint.strict_json import JSONProblem, parse_json
from draftpair.checkpoint.wording import printable
from draftpair.errors import Refused, ToolError
from draftpair.findings import Finding


@dataclass(frozen=True)
class WeightFile:
    """One parsed weight file: its `size` in bytes, and whether a reader that trusts the index takes it.

    Without an index, `model.safetensors` counts as named; when that is not there either, every file does.
    """

    name: str
    size: int
    header: Header
    indexed: bool


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The headers, config, index and findings of one checkpoint.

    `source` is what the user wrote, `root` the folder, `revision` the commit when it lies in the Hub cache.
    `tensors` has every tensor once: of two copies the one the index names, else that of the first file.
    """

    source: str
    root: Path
    revision: str | None
    files: dict[str, WeightFile]
    tensors: dict[str, TensorInfo]
    config: ConfigView
    index: Index | None
    findings: tuple[Finding, ...]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors by their headers, each tensor counted once."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def read(self, tensor: TensorInfo, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes `begin` to `end` of a tensor's data; safe in threads, every call opens the file anew.

        ValueError for a range outside the tensor, ToolError when the file is not the one that was opened.
        """
        stop = tensor.nbytes if end is None else end
        if not 0 <= begin <= stop <= tensor.nbytes:
            raise ValueError(f"bytes {begin} to {stop} do not lie in {tensor.name} of {tensor.nbytes} bytes")
        expected = self.files[tensor.file].size
        try:
            with (self.root / tensor.file).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(tensor.begin + begin)
                data = file.read(stop - begin) if size == expected else b""
        except OSError as error:
            raise unreadable(self.root / tensor.file, error) from error
        if size != expected or len(data) != stop - begin:
            changed = f"{printable(tensor.file)} changed while it was in use: it had {expected:,} bytes"
            found = f"{changed} and now has {size:,} (reading {printable(tensor.name)})"
            raise ToolError(found, "Run again when nothing writes to it.")
        return data

    def is_same_as(self, other: Checkpoint) -> bool:
        """Whether both are the same files of the same folder, however they were named."""
        return self.root.samefile(other.root) and self.files.keys() == other.files.keys()

    def has_file(self, name: str) -> bool:
        """Whether a plain file of that name lies at the top level of the folder; links are followed."""
        return is_plain_name(name) and os.path.isfile(self.root / name)

    def read_bytes(self, name: str) -> bytes:
        """The content of a file at the top level; ToolError when it cannot be read."""
        if not is_plain_name(name):
            raise Refused(f"{printable(name)!r} is no plain file name, so it is not read from {self.root}")
        try:
            return (self.root / name).read_bytes()
        except OSError as error:
            raise unreadable(self.root / name, error) from error

    def read_json(self, name: str) -> Any:
        """The value of a JSON file at the top level, as lenient as Python's reader on NaN and repeated keys.

        Refused, naming file and position, when it is no JSON; ToolError when it cannot be read.
        """
        try:
            return parse_json(self.read_bytes(name)).value
        except JSONProblem as problem:
            message = f"{shown_path(self.root / name)} is not JSON: {problem}"
            raise Refused(message, "Take the file from the original repository again.") from None


def list_folder(root: Path) -> list[str]:
    """The names in a folder, sorted; ToolError when it cannot be listed, or what it holds cannot be looked at."""
    try:
        names = sorted(os.listdir(root))
        os.stat(os.path.join(root, os.curdir))  # may the folder be entered as well
    except OSError as error:
        raise unreadable(root, error) from error
    return names


def unreadable(path: Path, error: OSError) -> ToolError:
    """The error for a file or folder that the system does not let us read."""
    return ToolError(f"{shown_path(path)} cannot be read: {error.strerror or error}")


def shown_path(path: Path) -> str:
    """A path as messages name it: whole, so that a message about a pair says whose file is meant."""
    return printable(str(path), 1000)
