"""Opens a checkpoint by its headers alone: a folder, one file, or a repository, in the local Hub cache or on the Hub.

What is wrong with a file, the index or the config becomes a finding, so that a damaged checkpoint can still
be described. An error is raised only when there is nothing to open, or the system will not let us read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from draftpair.checkpoint.checkpoint import Checkpoint, WeightFile
from draftpair.checkpoint.config import ConfigView, parse_config
from draftpair.checkpoint.header import Header, HeaderError, parse_header
from draftpair.checkpoint.hub.cache import cached_snapshot, commit_of, find_snapshot, is_offline
from draftpair.checkpoint.index import INDEX_NAME, Index, check_index, parse_index
from draftpair.checkpoint.rope import CONFIG_NAME
from draftpair.checkpoint.shards import check_numbering, check_single, named_files, union
from draftpair.checkpoint.source import HubName, parse_source
from draftpair.checkpoint.storage import Folder, Storage, list_folder, unreadable
from draftpair.checkpoint.strict_json import MAX_JSON_BYTES
from draftpair.checkpoint.wording import printable, some
from draftpair.errors import ToolError
from draftpair.findings import Finding, Level

SUFFIX = ".safetensors"

_FETCH = "The file was deleted or never downloaded: fetch the checkpoint again with `hf download`."


def open_checkpoint(source: str | Path, revision: str | None = None) -> Checkpoint:
    """Open a folder, one `.safetensors` file, or a repository on the Hub, by headers alone.

    `source` may be a path, `owner/name`, `owner/name@revision` or `hf://owner/name[@revision]`. A repository is
    taken from the local cache when its revision is there with all weights, else it is read from the Hub by range.
    ToolError when there is nothing to open: no such path or repository, or neither weights nor a config in it.
    """
    meant = parse_source(source, revision)
    if isinstance(meant, HubName):
        return _open_hub(str(source), meant)
    if os.path.isdir(meant):
        return _open_folder(str(source), meant, commit_of(meant))
    if os.path.isfile(meant):
        return _open(str(source), Folder(meant.parent), commit_of(meant.parent), _single(meant))
    raise _no_such_path(source, meant)


@dataclass(frozen=True)
class _Contents:
    """The names that matter: plain files, links that lead nowhere, and the files to read as weights.

    `whole` is False for a single file, which has no index to satisfy and needs no config.
    """

    files: list[str]
    dangling: dict[str, str]
    weights: list[str]
    whole: bool = True


def _open_hub(source: str, name: HubName) -> Checkpoint:
    """From the cache alone when the Hub is to be left alone, or when what is cached is all that is needed."""
    if is_offline():
        return _open_folder(source, *cached_snapshot(name))
    cached = find_snapshot(name)
    if cached is not None and (contents := _scan(cached[0])).weights:
        checkpoint = _open(source, Folder(cached[0]), cached[1], contents)
        if not any(map(_is_partial, checkpoint.findings)):
            return checkpoint
    # The only part that uses the network, and what it takes to load.
    from draftpair.checkpoint.hub.client import HubError
    from draftpair.checkpoint.hub.remote import open_repository

    try:
        storage, commit = open_repository(name)
    except HubError as error:
        if cached is not None:
            error.hint = (
                f"{error.hint or ''} A part of it is in the cache: HF_HUB_OFFLINE=1 looks at that.".strip()
            )
        raise
    if storage.folder is not None:
        return _open_folder(source, storage.folder, commit)
    files = storage.names()
    weights = [file for file in files if file.endswith(SUFFIX)]
    return _open(source, storage, commit, _Contents(files, {}, weights))


def _is_partial(finding: Finding) -> bool:
    """Whether a finding about a snapshot in the cache may say no more than that it was downloaded in part."""
    missing = finding.rule in ("CONFIG-MISSING", "FILE-DANGLING-LINK", "INDEX-SHARD-MISSING")
    return finding.rule == "INDEX-STALE" or (missing and finding.level == "error")


def _open_folder(source: str, root: Path, commit: str | None) -> Checkpoint:
    return _open(source, Folder(root), commit, _scan(root))


def _scan(root: Path) -> _Contents:
    names = list_folder(root)
    files = [name for name in names if os.path.isfile(root / name)]
    links = [name for name in names if os.path.islink(root / name) and not os.path.exists(root / name)]
    weights = [name for name in files if name.endswith(SUFFIX)]
    return _Contents(files, {name: os.readlink(root / name) for name in links}, weights)


def _single(path: Path) -> _Contents:
    files = [CONFIG_NAME] if os.path.isfile(path.parent / CONFIG_NAME) else []
    return _Contents(files, {}, [path.name], whole=False)


def _open(source: str, storage: Storage, commit: str | None, contents: _Contents) -> Checkpoint:
    _require_something(source, storage.folder, contents)
    config, config_findings = _load_config(storage, contents)
    index, index_findings = _load_index(storage, contents)
    shards = index.shards if index is not None else []
    weights = sorted({*contents.weights, *(name for name in shards if name in contents.files)})
    headers, sizes, header_findings = _load_headers(storage, weights)
    tensors, duplicates = union(headers, index)
    findings = [*config_findings, *(_dangling(*link) for link in contents.dangling.items())]
    findings += [*header_findings, *index_findings, *duplicates]
    if contents.whole:
        broken = {*(name for name in weights if name not in headers), *contents.dangling}
        findings += _check_files(headers, broken, index)
    taken = named_files(headers, index)
    files = {name: WeightFile(name, sizes[name], header, name in taken) for name, header in headers.items()}
    return Checkpoint(source, storage, commit, files, tensors, config, index, tuple(findings))


def _load_config(storage: Storage, contents: _Contents) -> tuple[ConfigView, list[Finding]]:
    if CONFIG_NAME in contents.files:
        return parse_config(storage.read_whole(CONFIG_NAME, MAX_JSON_BYTES + 1))
    if CONFIG_NAME in contents.dangling:
        return ConfigView({}), []
    message = f"there is no {CONFIG_NAME} beside the weights, so only names, types and shapes can be judged"
    hint = "Give the checkpoint's whole folder, or copy its config.json there."
    level: Level = "error" if contents.whole else "note"
    return ConfigView({}), [Finding("CONFIG-MISSING", level, message, CONFIG_NAME, hint=hint)]


def _load_index(storage: Storage, contents: _Contents) -> tuple[Index | None, list[Finding]]:
    if INDEX_NAME not in contents.files:
        return None, []
    return parse_index(storage.read_whole(INDEX_NAME, MAX_JSON_BYTES + 1))


def _load_headers(
    storage: Storage, names: list[str]
) -> tuple[dict[str, Header], dict[str, int], list[Finding]]:
    """Headers and sizes of the files that can be parsed, and a finding for each that cannot."""
    headers: dict[str, Header] = {}
    sizes: dict[str, int] = {}
    findings: list[Finding] = []
    for name, (prefix, size) in zip(names, storage.each(storage.prefix, names), strict=True):
        try:
            headers[name], sizes[name] = parse_header(prefix, size, name), size
        except HeaderError as error:
            findings.append(Finding("FILE-HEADER", "error", error.message, name, hint=error.hint))
    return headers, sizes, findings


def _check_files(headers: Mapping[str, Header], broken: set[str], index: Index | None) -> list[Finding]:
    """How the files fit together: by the index if it says anything about them, else by their names."""
    present = {*headers, *broken}
    if index is None:
        return [*check_single(headers), *check_numbering(present, None)]
    used = index if present.intersection(index.shards) else None
    return [*check_index(index, headers, broken), *check_numbering(present, used)]


def _dangling(name: str, target: str) -> Finding:
    """A link without a file: an error where draftpair or a loader needs the file."""
    level: Level = "error" if name.endswith((SUFFIX, ".json")) else "warning"
    message = f"{printable(name)} is a link to {printable(target)}, which is not there"
    return Finding("FILE-DANGLING-LINK", level, message, name, hint=_FETCH)


def _require_something(source: str, root: Path | None, contents: _Contents) -> None:
    candidates = [*contents.weights, *contents.files, *contents.dangling]
    if contents.weights or any(name in (CONFIG_NAME, INDEX_NAME) for name in candidates):
        return
    if any(name.endswith(SUFFIX) for name in contents.dangling):
        return
    if root is not None and (commits := _cached_commits(root)):
        raise ToolError(
            f"{printable(source)} is a repository's folder in the Hub cache, not the checkpoint at one of its commits",
            f"Give one of these: {some([str(Path(source, 'snapshots', commit)) for commit in commits])}",
        )
    held = f"it holds {some(contents.files)}" if contents.files else "it holds no files"
    raise ToolError(
        f"{printable(source)} has neither {SUFFIX} files nor a {CONFIG_NAME}: {held}",
        "Give the folder of a checkpoint in safetensors format.",
    )


def _cached_commits(root: Path) -> list[str]:
    """The commits that the Hub's cache has of a repository, when the folder is that of one there."""
    snapshots = root / "snapshots"
    is_cached = root.absolute().name.startswith("models--") and os.path.isdir(snapshots)
    return list_folder(snapshots) if is_cached else []


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
