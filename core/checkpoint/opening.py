"""Opens a checkpoint by its headers alone: a folder, one file, or a repository in the local Hub cache.

What is wrong with a file, the index or the config becomes a finding, so that a damaged checkpoint can still
be described. An error is raised only when there is nothing to open, or the system will not let us read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from draftpair.checkpoint.checkpoint import Checkpoint, WeightFile, list_folder, unreadable
from draftpair.checkpoint.config import ConfigView, parse_config
from draftpair.checkpoint.header import Header, HeaderError, parse_header, read_prefix
from draftpair.checkpoint.hub import cached_snapshot, commit_of
from draftpair.checkpoint.index import INDEX_NAME, Index, check_index, parse_index
from draftpair.checkpoint.rope import CONFIG_NAME
from draftpair.checkpoint.shards import check_numbering, check_single, named_files, union
from draftpair.checkpoint.source import HubName, parse_source
from draftpair.checkpoint.strict_json import MAX_JSON_BYTES
from draftpair.checkpoint.wording import printable, some
from draftpair.errors import ToolError
from draftpair.findings import Finding, Level

SUFFIX = ".safetensors"

_FETCH = "The file was deleted or never downloaded: fetch the checkpoint again with `hf download`."


def open_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Open a folder, one `.safetensors` file, or a repository in the local Hub cache, by headers alone.

    `source` may be a path, `owner/name`, `owner/name@revision` or `hf://owner/name[@revision]`. ToolError
    when there is nothing to open: no such path, or neither weights nor a config in it.
    """
    meant = parse_source(source, revision)
    if isinstance(meant, HubName):
        root, commit = cached_snapshot(meant)
        return _open(str(source), root, commit, _scan(root))
    if os.path.isdir(meant):
        return _open(str(source), meant, commit_of(meant), _scan(meant))
    if os.path.isfile(meant):
        return _open(str(source), meant.parent, commit_of(meant.parent), _single(meant))
    raise _no_such_path(source, meant)


@dataclass(frozen=True)
class _Folder:
    """The names that matter: plain files, links that lead nowhere, and the files to read as weights.

    `whole` is False for a single file, which has no index to satisfy and needs no config.
    """

    files: list[str]
    dangling: list[str]
    weights: list[str]
    whole: bool = True


def _scan(root: Path) -> _Folder:
    names = list_folder(root)
    files = [name for name in names if os.path.isfile(root / name)]
    dangling = [name for name in names if os.path.islink(root / name) and not os.path.exists(root / name)]
    return _Folder(files, dangling, [name for name in files if name.endswith(SUFFIX)])


def _single(path: Path) -> _Folder:
    files = [CONFIG_NAME] if os.path.isfile(path.parent / CONFIG_NAME) else []
    return _Folder(files, [], [path.name], whole=False)


def _open(source: str, root: Path, commit: str | None, folder: _Folder) -> Checkpoint:
    _require_something(source, folder)
    config, config_findings = _load_config(root, folder)
    index, index_findings = _load_index(root, folder)
    shards = index.shards if index is not None else []
    weights = sorted({*folder.weights, *(name for name in shards if name in folder.files)})
    headers, sizes, header_findings = _load_headers(root, weights)
    tensors, duplicates = union(headers, index)
    findings = [*config_findings, *(_dangling(root, name) for name in folder.dangling)]
    findings += [*header_findings, *index_findings, *duplicates]
    if folder.whole:
        broken = {*(name for name in weights if name not in headers), *folder.dangling}
        findings += _check_files(headers, broken, index)
    taken = named_files(headers, index)
    files = {name: WeightFile(name, sizes[name], header, name in taken) for name, header in headers.items()}
    return Checkpoint(source, root, commit, files, tensors, config, index, tuple(findings))


def _load_config(root: Path, folder: _Folder) -> tuple[ConfigView, list[Finding]]:
    if CONFIG_NAME in folder.files:
        return parse_config(_read_json_bytes(root, CONFIG_NAME))
    if CONFIG_NAME in folder.dangling:
        return ConfigView({}), []
    message = f"there is no {CONFIG_NAME} beside the weights, so only names, types and shapes can be judged"
    hint = "Give the checkpoint's whole folder, or copy its config.json there."
    level: Level = "error" if folder.whole else "note"
    return ConfigView({}), [Finding("CONFIG-MISSING", level, message, CONFIG_NAME, hint=hint)]


def _load_index(root: Path, folder: _Folder) -> tuple[Index | None, list[Finding]]:
    if INDEX_NAME not in folder.files:
        return None, []
    return parse_index(_read_json_bytes(root, INDEX_NAME))


def _load_headers(root: Path, names: list[str]) -> tuple[dict[str, Header], dict[str, int], list[Finding]]:
    """Headers and sizes of the files that can be parsed, and a finding for each that cannot."""
    headers: dict[str, Header] = {}
    sizes: dict[str, int] = {}
    findings: list[Finding] = []
    for name in names:
        try:
            prefix, sizes[name] = read_prefix(root / name)
            headers[name] = parse_header(prefix, sizes[name], name)
        except OSError as error:
            raise unreadable(root / name, error) from error
        except HeaderError as error:
            findings.append(Finding("FILE-HEADER", "error", error.message, name, hint=error.hint))
    return headers, sizes, findings


def _read_json_bytes(root: Path, name: str) -> bytes:
    """A whole file, or one byte more than is ever parsed."""
    try:
        with (root / name).open("rb") as file:
            return file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise unreadable(root / name, error) from error


def _check_files(headers: Mapping[str, Header], broken: set[str], index: Index | None) -> list[Finding]:
    """How the files fit together: by the index if it says anything about them, else by their names."""
    present = {*headers, *broken}
    if index is None:
        return [*check_single(headers), *check_numbering(present, None)]
    used = index if present.intersection(index.shards) else None
    return [*check_index(index, headers, broken), *check_numbering(present, used)]


def _dangling(root: Path, name: str) -> Finding:
    """A link without a file: an error where draftpair or a loader needs the file."""
    level: Level = "error" if name.endswith((SUFFIX, ".json")) else "warning"
    message = f"{printable(name)} is a link to {printable(os.readlink(root / name))}, which is not there"
    return Finding("FILE-DANGLING-LINK", level, message, name, hint=_FETCH)


def _require_something(source: str, folder: _Folder) -> None:
    candidates = [*folder.weights, *folder.files, *folder.dangling]
    if folder.weights or any(name in (CONFIG_NAME, INDEX_NAME) for name in candidates):
        return
    if any(name.endswith(SUFFIX) for name in folder.dangling):
        return
    held = f"it holds {some(folder.files)}" if folder.files else "it holds no files"
    raise ToolError(
        f"{printable(source)} has neither {SUFFIX} files nor a {CONFIG_NAME}: {held}",
        "Give the folder of a checkpoint in safetensors format.",
    )


def _no_such_path(source: str | Path, path: Path) -> ToolError:
    shown = printable(str(source))
    try:
        os.stat(path)
    except PermissionError as error:
        return unreadable(path, error)
    except OSError:
        pass
    else:
        return ToolError(f"{shown} is neither a folder nor a plain file")
    if os.path.islink(path):
        return ToolError(f"{shown} is a link to {printable(os.readlink(path))}, which is not there", _FETCH)
    hint = "Give a folder, a .safetensors file, or a repository as owner/name."
    return ToolError(f"there is no file or folder {shown}", hint)
