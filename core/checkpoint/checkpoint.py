"""A checkpoint as its headers describe it: which tensors there are, where their bytes lie, what is wrong.

Holds no tensor data and no open file. Bytes are read by range when asked for, from a folder here or from the
Hub, and a file that is no longer the one whose header was parsed is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftpair.checkpoint.config import ConfigView
from draftpair.checkpoint.header import Header, TensorInfo
from draftpair.checkpoint.index import Index, is_plain_name
from draftpair.checkpoint.storage import Storage
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

    `source` is what the user wrote, `storage` where the files lie, `revision` the commit when they are on the
    Hub or in its cache. `tensors` has every tensor once: of two copies the one the index names, else that of
    the first file.
    """

    source: str
    storage: Storage
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

    @property
    def bytes_fetched(self) -> int | None:
        """Bytes that came from the Hub so far, to open the checkpoint and to look at it; None for a folder."""
        return self.storage.bytes_fetched

    @property
    def root(self) -> Path:
        """The folder that holds the files; ToolError when they are read from the Hub."""
        return self.require_folder("this command")

    @property
    def place(self) -> str:
        """The folder, or the repository with its commit, as messages name it."""
        return self.storage.place

    def require_folder(self, purpose: str) -> Path:
        """The folder that holds the files; ToolError when they are read from the Hub, which `purpose` cannot use."""
        if self.storage.folder is not None:
            return self.storage.folder
        name = self.storage.hub_name
        raise ToolError(
            f"{printable(self.source)} is on the Hub, and {purpose} needs all of its files on this machine",
            f"Download it first: {name.download}" if name else None,
        )

    def read(self, tensor: TensorInfo, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes `begin` to `end` of a tensor's data; safe in threads, every call opens the file anew.

        ValueError for a range outside the tensor, ToolError when the file is not the one that was opened.
        """
        stop = tensor.nbytes if end is None else end
        if not 0 <= begin <= stop <= tensor.nbytes:
            raise ValueError(f"bytes {begin} to {stop} do not lie in {tensor.name} of {tensor.nbytes} bytes")
        expected = self.files[tensor.file].size
        data, size = self.storage.read(tensor.file, tensor.begin + begin, tensor.begin + stop)
        if size != expected or len(data) != stop - begin:
            changed = f"{printable(tensor.file)} changed while it was in use: it had {expected:,} bytes"
            found = f"{changed} and now has {size:,} (reading {printable(tensor.name)})"
            raise ToolError(found, "Run again when nothing writes to it.")
        return data

    def read_each(self, ranges: Iterable[tuple[TensorInfo, int, int]]) -> Iterator[bytes]:
        """Bytes `begin` to `end` of each tensor, in order, as `read` gives them; from the Hub several at once."""
        return self.storage.each(lambda wanted: self.read(*wanted), ranges)

    def is_same_as(self, other: Checkpoint) -> bool:
        """Whether both are the same files of the same folder or commit, however they were named."""
        return self.storage.is_same_as(other.storage) and self.files.keys() == other.files.keys()

    def has_file(self, name: str) -> bool:
        """Whether a plain file of that name lies at the top level of the folder; links are followed."""
        return is_plain_name(name) and self.storage.has(name)

    def shown(self, name: str) -> str:
        """A file as messages name it: with its folder, for a pair has two of most."""
        return self.storage.shown(name)

    def read_bytes(self, name: str) -> bytes:
        """The content of a file at the top level; ToolError when it cannot be read."""
        if not is_plain_name(name):
            raise Refused(f"{printable(name)!r} is no plain file name, so it is not read from {self.place}")
        return self.storage.read_whole(name)

    def read_json(self, name: str) -> Any:
        """The value of a JSON file at the top level, as lenient as Python's reader on NaN and repeated keys.

        Refused, naming file and position, when it is no JSON; ToolError when it cannot be read.
        """
        try:
            return parse_json(self.read_bytes(name)).value
        except JSONProblem as problem:
            message = f"{self.shown(name)} is not JSON: {problem}"
            raise Refused(message, "Take the file from the original repository again.") from None
