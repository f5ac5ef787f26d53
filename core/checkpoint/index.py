"""The weight map, `model.safetensors.index.json`: read without trusting it, then held against the headers.

Headers are the truth. An index that disagrees with them yields findings, each naming what it says and what
the files hold; nothing it names is opened unless it is a plain file name in the folder.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftpair.checkpoint.header import Header
from draftpair.checkpoint.strict_json import JSONProblem, parse_json
from draftpair.checkpoint.wording import count, printable, some
from draftpair.findings import Finding

INDEX_NAME = "model.safetensors.index.json"

_DOWNLOAD = "Download the checkpoint again, or fetch the missing files with `hf download`."
_REBUILD = "Rebuild the index from the headers of the files."


@dataclass(frozen=True)
class Index:
    """A weight map: tensor name to file name, plain names only; `refused` holds the other entries.

    `total_size` is the stated number of bytes, None when the index states none.
    """

    weight_map: dict[str, str]
    total_size: int | None = None
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def shards(self) -> list[str]:
        """The file names that the map uses, sorted."""
        return sorted(set(self.weight_map.values()))


def is_plain_name(name: str) -> bool:
    """Whether `name` can only mean a file directly in a folder, on any system, and fits on a line."""
    return name not in ("", ".", "..") and name.isprintable() and not any(part in name for part in "/\\:")


def parse_index(data: bytes) -> tuple[Index | None, list[Finding]]:
    """The index in `data` and what is wrong with it; None when it holds no usable weight map."""
    try:
        parsed = parse_json(data)
    except JSONProblem as problem:
        return None, [_unparsable(f"is not JSON: {problem}")]
    if parsed.oddities:
        return None, [_unparsable(f"is ambiguous: {parsed.oddities[0]}")]
    if not isinstance(parsed.value, dict):
        return None, [_unparsable("is not a JSON object")]
    weight_map = parsed.value.get("weight_map")
    if not isinstance(weight_map, dict):
        message = f"{INDEX_NAME} has no weight_map object, so it says nothing about the files"
        return None, [Finding("INDEX-NO-WEIGHT-MAP", "error", message, INDEX_NAME, hint=_REBUILD)]
    total_size, findings = _total_size(parsed.value.get("metadata"))
    files = {file for file in weight_map.values() if isinstance(file, str)}
    plain = {file for file in files if is_plain_name(file)}
    kept = {name: file for name, file in weight_map.items() if isinstance(file, str) and file in plain}
    refused = {name: _shown(file) for name, file in weight_map.items() if name not in kept}
    index = Index(kept, total_size, refused)
    return index, [*_refused_shards(refused), *findings]


def check_index(index: Index, headers: Mapping[str, Header], broken: Collection[str]) -> list[Finding]:
    """Everything in which the index and the headers differ, both ways.

    `headers` has every file that could be parsed, `broken` the names that exist but could not be.
    """
    named = index.shards
    missing = [file for file in named if file not in headers and file not in broken]
    if named and len(missing) == len(named):
        return _none_present(index, headers)
    findings = _missing_shards(missing, len(named))
    findings += _misplaced(index, headers)
    findings += _unlisted(index, headers)
    findings += [_unindexed(file, headers[file]) for file in sorted(headers.keys() - set(named))]
    if not missing and not any(file in broken for file in named):
        findings += _compare_total(index, headers)
    return findings


def _total_size(metadata: Any) -> tuple[int | None, list[Finding]]:
    """`metadata.total_size` as an integer; a missing or null one is fine."""
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    if stated is None:
        return None, []
    if isinstance(stated, float) and stated.is_integer():
        stated = int(stated)
    if type(stated) is int and stated >= 0:
        return stated, []
    message = f"{INDEX_NAME} states a total_size that is no number of bytes"
    where = f"{INDEX_NAME}#/metadata/total_size"
    return None, [
        Finding(
            "INDEX-TOTAL-SIZE", "warning", message, where, "a non-negative integer", _shown(stated), _REBUILD
        )
    ]


def _refused_shards(refused: Mapping[str, str]) -> Iterable[Finding]:
    """One finding for each file name that is not followed."""
    for shard in sorted(set(refused.values())):
        tensors = [name for name, file in refused.items() if file == shard]
        yield Finding(
            "INDEX-SHARD-PATH",
            "error",
            f"{INDEX_NAME} places {count(len(tensors), 'tensor')} in '{shard}', which is no plain file name "
            f"and is not followed: {some(tensors)}",
            INDEX_NAME,
            "the name of a file in the same folder",
            shard,
            "Do not use this checkpoint unless you know where the entry comes from.",
        )


def _none_present(index: Index, headers: Mapping[str, Header]) -> list[Finding]:
    """No file that the index names is there: a stale index, or weights that were never downloaded."""
    if not headers:
        return _missing_shards(index.shards, len(index.shards))
    held = {name for header in headers.values() for name in header.tensors}
    ghosts = [name for name in index.weight_map if name not in held]
    unlisted = len(held - index.weight_map.keys())
    detail = f"{len(ghosts):,} of its {count(len(index.weight_map), 'tensor')} are in no file"
    detail += f" ({some(ghosts)})" if ghosts else ""
    message = f"{INDEX_NAME} belongs to other files: none of the {count(len(index.shards), 'file')} it names "
    message += f"is here; {detail}, and {unlisted:,} tensors here are unlisted. The headers are used instead"
    shards, found = index.shards[:5], sorted(headers)[:5]
    return [Finding("INDEX-STALE", "warning", message, INDEX_NAME, shards, found, _REBUILD)]


def _missing_shards(missing: list[str], named: int) -> list[Finding]:
    if not missing:
        return []
    message = f"incomplete download: {len(missing):,} of the {count(named, 'file')} that {INDEX_NAME} names "
    message += f"{'is' if len(missing) == 1 else 'are'} not here: {some(missing)}"
    return [
        Finding(
            "INDEX-SHARD-MISSING",
            "error",
            message,
            INDEX_NAME,
            f"{count(named, 'file')}",
            missing[:5],
            _DOWNLOAD,
        )
    ]


def _misplaced(index: Index, headers: Mapping[str, Header]) -> list[Finding]:
    """Listed tensors that their file lacks: in another file, or in none."""
    elsewhere: dict[str, dict[str, str]] = {}
    absent: dict[str, list[str]] = {}
    for name, file in index.weight_map.items():
        if file in headers and name in headers[file].tensors:
            continue
        holder = next((other for other, header in headers.items() if name in header.tensors), None)
        if holder is not None:
            elsewhere.setdefault(file, {})[name] = holder
        elif file in headers:
            absent.setdefault(file, []).append(name)
    return [
        *(_elsewhere(file, holders) for file, holders in sorted(elsewhere.items())),
        *(_absent(file, names) for file, names in sorted(absent.items())),
    ]


def _elsewhere(file: str, holders: Mapping[str, str]) -> Finding:
    found = sorted(set(holders.values()))
    message = f"{INDEX_NAME} places {count(len(holders), 'tensor')} in {file}, but the headers have them in "
    message += f"{some(found)}: {some(holders)}"
    return Finding("INDEX-TENSOR-ELSEWHERE", "error", message, file, file, found[:5], _REBUILD)


def _absent(file: str, names: list[str]) -> Finding:
    message = (
        f"{INDEX_NAME} places {count(len(names), 'tensor')} in {file}, but neither that file nor any other "
    )
    message += f"holds them: {some(names)}"
    hint = "The tensors were dropped when the checkpoint was written: use the original, or rebuild the index."
    return Finding("INDEX-TENSOR-ABSENT", "error", message, file, names[:5], None, hint)


def _unlisted(index: Index, headers: Mapping[str, Header]) -> list[Finding]:
    findings = []
    for file in index.shards:
        held = headers[file].tensors if file in headers else {}
        names = [name for name in held if name not in index.weight_map and name not in index.refused]
        if names:
            message = f"{file} holds {count(len(names), 'tensor')} that {INDEX_NAME} does not list, so that "
            message += f"readers which trust the index miss them: {some(names)}"
            findings.append(
                Finding("INDEX-TENSOR-UNLISTED", "warning", message, file, None, names[:5], _REBUILD)
            )
    return findings


def _unindexed(file: str, header: Header) -> Finding:
    held = count(len(header.tensors), "tensor")
    message = f"{INDEX_NAME} names no tensor of {printable(file)}, which holds {held}"
    message += f": {some(header.tensors)}" if header.tensors else ""
    hint = "Some readers load such a file and some do not: add it to the index, or move it away."
    return Finding("FILE-UNINDEXED", "warning", message, file, hint=hint)


def _compare_total(index: Index, headers: Mapping[str, Header]) -> list[Finding]:
    total = sum(tensor.nbytes for file in index.shards for tensor in headers[file].tensors.values())
    if index.total_size is None or index.total_size == total:
        return []
    message = f"{INDEX_NAME} states {index.total_size:,} bytes, the tensors of its files have {total:,}"
    where = f"{INDEX_NAME}#/metadata/total_size"
    return [Finding("INDEX-TOTAL-SIZE", "warning", message, where, total, index.total_size, _REBUILD)]


def _unparsable(problem: str) -> Finding:
    return Finding("INDEX-PARSE", "error", f"{INDEX_NAME} {problem}", INDEX_NAME, hint=_REBUILD)


def _shown(value: Any) -> str:
    return printable(value) if isinstance(value, str) else printable(repr(value))
