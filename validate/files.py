"""Checks single files of a checkpoint, as a commit hook hands them over: an index, or a config.json.

What lies beside a file is used where it is there. In a repository the weights are often Git LFS pointers, or not
checked out at all: that is a note, for a commit cannot be asked to bring them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.config import parse_config
from draftpair.checkpoint.foreign import recognise
from draftpair.checkpoint.header import Header, HeaderError, parse_header
from draftpair.checkpoint.index import INDEX_NAME, Index, check_index, parse_index
from draftpair.checkpoint.packings.mlx_words import AFFINE
from draftpair.checkpoint.rope import CONFIG_NAME
from draftpair.checkpoint.shards import union
from draftpair.checkpoint.storage import Folder
from draftpair.checkpoint.strict_json import MAX_JSON_BYTES
from draftpair.checkpoint.wording import count, printable, some
from draftpair.errors import Usage
from draftpair.families.drafters import find_drafter
from draftpair.families.rules import apply_rules
from draftpair.findings import Finding, by_severity
from draftpair.validate.quantization import check_quantization, check_twins, is_possible
from draftpair.validate.verdict import grade

INDEX_SUFFIX = ".safetensors.index.json"
_WEIGHTS = ".safetensors"
_LFS = "a Git LFS pointer"
_FETCH = "fetch the real files with `git lfs pull` to have them compared"


def check_files(paths: Sequence[Path]) -> dict[str, Any]:
    """The body of the report: a verdict for each file, and the one that they come to.

    Raises Usage, before anything is read, for a file that is neither an index nor a config.json; ToolError for one
    that cannot be read.
    """
    for path in paths:
        if path.name != CONFIG_NAME and not path.name.endswith(INDEX_SUFFIX):
            raise Usage(
                f"{printable(str(path), 1000)} is neither a {CONFIG_NAME} nor a *{INDEX_SUFFIX}",
                hint="give the files of a checkpoint by these names; a whole folder is checked by `draftpair validate`",
            )
    checked = [_check(path) for path in paths]
    everything = [finding for _, _, findings in checked for finding in findings]
    files = [
        {
            "file": str(path),
            "kind": kind,
            "family": family,
            "verdict": grade(findings, "sound"),
            "findings": [_placed(finding, path).as_dict() for finding in by_severity(findings)],
        }
        for path, (kind, family, findings) in zip(paths, checked, strict=True)
    ]
    return {"verdict": grade(everything, "sound"), "files": files}


def _check(path: Path) -> tuple[str, str | None, list[Finding]]:
    """What kind of file it is, the drafter family that a config is of, and what was found."""
    folder = Folder(path.parent)
    data = folder.read_whole(path.name, MAX_JSON_BYTES + 1)
    kind = "config" if path.name == CONFIG_NAME else "index"
    if _is_pointer(data):
        return kind, None, [_pointer_itself(path)]
    if kind == "config":
        return kind, *_check_config(folder, data)
    return kind, None, _check_index(folder, path.name, data)


def _check_index(folder: Folder, name: str, data: bytes) -> list[Finding]:
    index, findings = parse_index(data)
    if index is None:
        return findings
    headers, unread, broken = _headers(folder, _weights_of(folder, name, index))
    missing = [file for file in index.shards if not folder.has(file)]
    findings += broken
    # Files that are not here say nothing against the index, unless none is and others are.
    known = {*unread, *(finding.where or "" for finding in broken)}
    is_stale = bool(headers) and len(missing) == len(index.shards)
    findings += check_index(index, headers, known if is_stale else {*known, *missing})
    findings += union(headers, index)[1]
    absent = sorted({*missing, *(set(unread) & set(index.shards))})
    if absent and not is_stale:
        findings.append(_not_compared(absent, len(index.shards), len(absent) - len(missing)))
    return findings


def _weights_of(folder: Folder, name: str, index: Index) -> list[str]:
    """The weight files to compare: all of the folder, when the index is the one that loaders read."""
    beside = folder.names() if name == INDEX_NAME else []
    named = [file for file in index.shards if folder.has(file)]
    return sorted({*named, *(file for file in beside if file.endswith(_WEIGHTS))})


def _headers(folder: Folder, names: list[str]) -> tuple[dict[str, Header], list[str], list[Finding]]:
    """The headers that can be parsed, the Git LFS pointers, and a finding for each other file."""
    headers: dict[str, Header] = {}
    pointers: list[str] = []
    findings: list[Finding] = []
    for name in names:
        prefix, size = folder.prefix(name)
        try:
            headers[name] = parse_header(prefix, size, name)
        except HeaderError as error:
            if _is_pointer(prefix):
                pointers.append(name)
            else:
                findings.append(Finding("FILE-HEADER", "error", error.message, name, hint=error.hint))
    return headers, pointers, findings


def _check_config(folder: Folder, data: bytes) -> tuple[str | None, list[Finding]]:
    config, findings = parse_config(data)
    alone = Checkpoint(str(folder.root), folder, None, {}, {}, config, None, ())
    hint = "keep one of the two, or make both equal"
    family, own = _check_drafter(alone)
    findings += own
    if "CONFIG-QUANTIZATION" not in {finding.rule for finding in own}:
        findings += _settings(config.raw)
    return family, [*findings, *check_quantization(alone), *check_twins(alone, hint)]


def _check_drafter(alone: Checkpoint) -> tuple[str | None, list[Finding]]:
    """The family of drafters that a config is of, and what its rules have against it."""
    match = find_drafter(alone)
    if match is None:
        return None, []
    # There are no tensors to find the family by, and none to miss.
    conflicts = [finding for finding in match.findings if finding.rule.startswith("CONFIG-")]
    name = match.family.name
    rules = apply_rules(match.config.raw, name, "config", CONFIG_NAME, match.config)
    return name, [*conflicts, *rules]


def _settings(config: dict[str, Any]) -> Iterator[Finding]:
    """MLX's own quantization block, which can only name packings that MLX has."""
    block = config.get("quantization")
    if not isinstance(block, dict) or {"bits", "group_size"}.isdisjoint(block):
        return
    mode, bits, group = (block.get(key) for key in ("mode", "bits", "group_size"))
    if not is_possible(block):
        yield Finding(
            "CONFIG-QUANTIZATION",
            "error",
            f"MLX has no mode {printable(str(mode or AFFINE), 60)} with bits {printable(str(bits), 60)} and group_size "
            f"{printable(str(group), 60)}",
            f"{CONFIG_NAME}#/quantization",
            found=block,
            hint="affine takes bits 2, 3, 4, 5, 6 or 8 in groups of 32, 64 or 128; "
            "mxfp4 4/32, nvfp4 4/16, mxfp8 8/32",
        )


def _is_pointer(data: bytes) -> bool:
    foreign = recognise(data)
    return foreign is not None and foreign.title == _LFS


def _pointer_itself(path: Path) -> Finding:
    message = f"{path.name} is {_LFS}, so nothing can be said about the file that it stands for"
    return Finding("FILE-LFS-UNKNOWN", "warning", message, path.name, hint=_FETCH)


def _not_compared(absent: list[str], named: int, pointers: int) -> Finding:
    of_them = f", {count(pointers, 'Git LFS pointer')} among them," if pointers else ""
    return Finding(
        "INDEX-SHARD-MISSING",
        "note",
        f"{len(absent):,} of the {count(named, 'file')} that the index names{of_them} "
        f"{'is' if len(absent) == 1 else 'are'} not compared with it: {some(absent)}",
        INDEX_NAME,
        found=absent[:5],
        hint=_FETCH,
    )


def _placed(finding: Finding, path: Path) -> Finding:
    """The finding with paths, as the user gave them, where it has names in the folder; an index by its own name."""
    name, sharp, pointer = (finding.where or path.name).partition("#")
    if name.startswith("/"):
        name, sharp, pointer = path.name, "#", name
    place = path if name in (path.name, INDEX_NAME) else path.parent / name
    message = finding.message.replace(INDEX_NAME, path.name) if path.name != CONFIG_NAME else finding.message
    return replace(finding, message=message, where=f"{place}{sharp}{pointer}")
