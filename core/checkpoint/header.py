"""Safetensors headers, parsed with every bound checked.

A file is accepted only when each byte of it is accounted for: the length field, one JSON object without
surprises, and tensors that follow each other without gap or overlap up to the last byte. Whatever else a
file may be, the one outcome is `HeaderError` with a message that names the file, and the tensor if the
fault lies in one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftpair.checkpoint.dtypes import ITEM_BITS
from draftpair.checkpoint.foreign import recognise
from draftpair.checkpoint.strict_json import MAX_JSON_BYTES, JSONProblem, parse_json
from draftpair.checkpoint.wording import count, printable, some
from draftpair.errors import Refused, ToolError

MAX_HEADER_BYTES = MAX_JSON_BYTES
"""Longest JSON header; the safetensors library has the same limit."""

_LENGTH_BYTES = 8
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_METADATA = "__metadata__"
_MAX_COUNT = 2**64 - 1
# One read covers the header of a usual shard, and little else.
_FIRST_READ = 64 * 1024
_DOWNLOAD = "Download the file again."


class HeaderError(Refused):
    """The file is no valid safetensors file."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `begin` and `end` are absolute byte offsets in `file`.

    `file` is a name relative to the checkpoint's folder; `dtype` is spelled as safetensors does.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """One file's tensors in the order of their data; `length` counts the length field and the JSON."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    length: int


def read_header(path: Path, name: str | None = None) -> Header:
    """The header of the file at `path`; `name` is used in messages and as `TensorInfo.file`.

    HeaderError when it is no valid safetensors file, ToolError when it cannot be read at all.
    """
    shown = path.name if name is None else name
    try:
        prefix, size = read_prefix(path)
    except OSError as error:
        raise ToolError(f"{printable(shown)} cannot be read: {error.strerror or error}") from error
    return parse_header(prefix, size, shown)


def read_prefix(path: Path) -> tuple[bytes, int]:
    """The first bytes of a file, its whole header if that has a possible length, and the file's size."""
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = file.read(_FIRST_READ)
        wanted = _LENGTH_BYTES + int.from_bytes(prefix[:_LENGTH_BYTES], "little")
        if len(prefix) < wanted <= min(size, MAX_HEADER_BYTES + _LENGTH_BYTES):
            prefix += file.read(wanted - len(prefix))
    return prefix, size


def parse_header(prefix: bytes, size: int, name: str) -> Header:
    """Parse the first bytes of a file of `size` bytes; `prefix` must hold the whole header.

    `name` is used in messages and as `TensorInfo.file`. HeaderError when anything is wrong.
    """
    length = _header_length(prefix, size, name)
    members = _members(prefix[_LENGTH_BYTES:length], prefix, name)
    metadata = _metadata(members.pop(_METADATA, None), name)
    tensors = sorted(
        (_tensor(key, entry, name, length) for key, entry in members.items()),
        key=lambda tensor: (tensor.begin, tensor.end),
    )
    _check_layout(tensors, length, size, name)
    return Header({tensor.name: tensor for tensor in tensors}, metadata, length)


def _header_length(prefix: bytes, size: int, name: str) -> int:
    """Bytes of length field and JSON together, once they are known to lie inside the file."""
    if size == 0:
        raise _error(name, "is empty", _DOWNLOAD)
    if size < _LENGTH_BYTES or len(prefix) < _LENGTH_BYTES:
        short = f"is {count(size, 'byte')} long, shorter than the 8-byte length field"
        raise _malformed(prefix, name, short, _DOWNLOAD)
    json_bytes = int.from_bytes(prefix[:_LENGTH_BYTES], "little")
    if json_bytes == 0:
        unfilled = "states a header of 0 bytes, as a file that was never filled does"
        raise _malformed(prefix, name, unfilled, _DOWNLOAD)
    if json_bytes > MAX_HEADER_BYTES:
        if foreign := recognise(prefix):  # the "length" is text, and as a number explains nothing
            raise _error(name, f"is {foreign.title}, not weights", foreign.hint)
        stated = f"states a header of {json_bytes:,} bytes, more than the limit of {MAX_HEADER_BYTES:,}"
        raise _error(name, stated)
    length = _LENGTH_BYTES + json_bytes
    if length > size:
        stated = f"states a header of {json_bytes:,} bytes but is only {size:,} bytes long"
        raise _malformed(prefix, name, f"{stated}: truncated, or not safetensors", _DOWNLOAD)
    if length > len(prefix):
        raise _error(name, f"gave {len(prefix):,} of its {length:,} header bytes: it changed meanwhile")
    return length


def _members(text: bytes, prefix: bytes, name: str) -> dict[str, Any]:
    """The members of the one JSON object, refused when two readers could understand it differently."""
    try:
        parsed = parse_json(text)
    except JSONProblem as problem:
        raise _malformed(prefix, name, f"has a header that is not JSON: {problem}") from None
    if parsed.oddities:
        raise _error(name, f"has an ambiguous header: {parsed.oddities[0]}")
    if not isinstance(parsed.value, dict):
        raise _error(name, f"has a header that is a JSON {_kind(parsed.value)}, not an object")
    # Only an escape can bring in half of a surrogate pair, so most headers skip the look at each name.
    if b"\\u" in text:
        _refuse_surrogates(parsed.value, name)
    return parsed.value


def _refuse_surrogates(members: dict[str, Any], name: str) -> None:
    metadata = members.get(_METADATA)
    texts = [*members, *(metadata or {}), *metadata.values()] if isinstance(metadata, dict) else [*members]
    for text in texts:
        if isinstance(text, str) and any("\ud800" <= character <= "\udfff" for character in text):
            raise _error(name, f"has half of a surrogate pair in the header's text {printable(text)!r}")


def _metadata(metadata: Any, name: str) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise _error(name, f"has a {_METADATA} that is a JSON {_kind(metadata)}, not an object")
    for key, value in metadata.items():
        if not isinstance(value, str):
            what = f"maps {printable(key)!r} to a JSON {_kind(value)}, not a string"
            raise _error(name, f"has a {_METADATA} that {what}")
    return metadata


def _tensor(key: str, entry: Any, file: str, data_begin: int) -> TensorInfo:
    """One entry with its fields, its shape and its bytes checked against each other."""
    if type(entry) is not dict or entry.keys() != _FIELDS:
        raise _bad(file, key, _entry_problem(entry))
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or dtype not in ITEM_BITS:
        raise _bad(file, key, f"has the unknown dtype {_value(dtype)}")
    if type(shape) is not list or not _are_counts(shape):
        raise _bad(file, key, f"has shape {_value(shape)}, expected a list of non-negative integers")
    if type(offsets) is not list or len(offsets) != 2 or not _are_counts(offsets):
        raise _bad(file, key, f"has data_offsets {_value(offsets)}, expected two non-negative integers")
    begin, end = offsets
    if end < begin:
        raise _bad(file, key, f"has descending data_offsets [{begin}, {end}]")
    bits = _bits(key, dtype, shape, file)
    if bits != 8 * (end - begin):
        need = f"{count(bits // 8, 'byte')}" if bits % 8 == 0 else f"{bits:,} bits, no whole number of bytes"
        stated = f"of {dtype} {_value(shape)} needs {need}"
        raise _bad(file, key, f"{stated}, data_offsets give {count(end - begin, 'byte')}")
    return TensorInfo(key, dtype, tuple(shape), file, data_begin + begin, data_begin + end)


def _bits(key: str, dtype: str, shape: list[int], file: str) -> int:
    """Bits of the tensor, refused when they do not fit the 64-bit arithmetic of other readers."""
    product = 1
    for extent in shape:
        product *= extent
        if product > _MAX_COUNT:
            break
    bits = product * ITEM_BITS[dtype]
    if bits > _MAX_COUNT:
        raise _bad(file, key, f"has shape {_value(shape)}, whose size overflows 64 bits")
    return bits


def _check_layout(tensors: list[TensorInfo], begin: int, size: int, name: str) -> None:
    """Refuse overlaps, gaps, data past the end of the file, and bytes that belong to no tensor."""
    previous: TensorInfo | None = None
    position = begin
    for tensor in tensors:
        if tensor.begin < position:
            overlap = f"overlaps {_after(previous)} by {count(position - tensor.begin, 'byte')}"
            raise _bad(name, tensor.name, overlap)
        if tensor.begin > position:
            gap = f"leaves a gap of {count(tensor.begin - position, 'byte')} after {_after(previous)}"
            raise _bad(name, tensor.name, gap)
        if tensor.end > size:
            missing = f"ends {count(tensor.end - size, 'byte')} past the end of the file ({size:,} bytes)"
            raise _bad(name, tensor.name, f"{missing}: truncated", _DOWNLOAD)
        previous, position = tensor, tensor.end
    if position < size:
        raise _error(
            name,
            f"has {count(size - position, 'surplus byte')} after {_after(previous)} that belong to no tensor",
            "Two downloads may have been joined, or the header is that of another file.",
        )


def _after(previous: TensorInfo | None) -> str:
    return "the header" if previous is None else f"tensor {printable(previous.name)!r}"


def _are_counts(values: list[Any]) -> bool:
    """Whether all are unsigned 64-bit integers; a list, because it is fastest and runs for every tensor."""
    return not [value for value in values if type(value) is not int or not 0 <= value <= _MAX_COUNT]


def _entry_problem(entry: Any) -> str:
    if not isinstance(entry, dict):
        return f"is described by a JSON {_kind(entry)}, not an object"
    missing = sorted(_FIELDS - entry.keys())
    if missing:
        return f"lacks {some(missing)}"
    return f"has unknown fields: {some(sorted(entry.keys() - _FIELDS))}"


def _error(name: str, problem: str, hint: str | None = None) -> HeaderError:
    return HeaderError(f"{printable(name)} {problem}", hint)


def _bad(name: str, tensor: str, problem: str, hint: str | None = None) -> HeaderError:
    return _error(name, f"is malformed: tensor {printable(tensor)!r} {problem}", hint)


def _malformed(prefix: bytes, name: str, problem: str, hint: str | None = None) -> HeaderError:
    """The error for a file whose very frame is wrong; names what the file is, if that can be told."""
    foreign = recognise(prefix)
    if foreign is None:
        return _error(name, problem, hint)
    return _error(name, f"is {foreign.title}, not weights: it {problem}", foreign.hint)


def _kind(value: Any) -> str:
    kinds: Iterable[tuple[type, str]] = (
        (bool, "boolean"),
        (dict, "object"),
        (list, "array"),
        (str, "string"),
        (int, "number"),
        (float, "number"),
    )
    return next((kind for python, kind in kinds if isinstance(value, python)), "null")


def _value(value: Any) -> str:
    """A short form of any JSON value for a message."""
    if isinstance(value, str):
        return repr(printable(value, 60))
    if isinstance(value, int) and abs(value) > _MAX_COUNT:
        return "a number beyond 64 bits"
    if (
        isinstance(value, list)
        and len(value) <= 8
        and not any(isinstance(item, list | dict) for item in value)
    ):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, list | dict):
        return f"a JSON {_kind(value)} of {len(value):,}"
    return repr(value)
