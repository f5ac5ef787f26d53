"""Where a finding points: the file that its ``where`` names, and the line when that file can be read here.

A finding names a file, a JSON pointer into one, a tensor, or nothing. Of a tensor the place is the weight file that
holds it, where an index or a single file says which; else the checkpoint itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import quote

from draftpair.report.subjects import Subject

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"

# Files of this length are searched for a line; the indexes of the largest models stay far below.
_MAX_TEXT = 64 * 1024 * 1024
_ENDINGS = (".json", ".safetensors", ".jinja", ".md", ".model", ".txt")
_DECODER = json.JSONDecoder(strict=False)


@dataclass(frozen=True)
class Place:
    """A path, relative to the current folder where it lies below it, and what in that file is meant.

    ``line`` counts from 1, None when it is not known; ``name`` is a tensor or a JSON pointer. A repository on the
    Hub has no path here: its name takes the place of the folder.
    """

    path: str
    line: int | None = None
    name: str | None = None

    @property
    def uri(self) -> str:
        """The path as a reference that any reader of URIs resolves against the current folder."""
        path = self.path.replace(os.sep, "/").encode("utf-8", "backslashreplace")
        return f"file://{quote(path)}" if os.path.isabs(self.path) else quote(path)


class Places:
    """Finds the places of findings. What was read last is kept, for findings come checkpoint by checkpoint."""

    def __init__(self) -> None:
        self._text = lru_cache(maxsize=4)(_read)
        self._weight_map = lru_cache(maxsize=2)(_weight_map)

    def of(self, subject: Subject, finding: Mapping[str, Any]) -> Place:
        """The place of one finding of a subject."""
        folder, only = _folder(_side(subject, finding))
        where = finding["where"]
        if where is None or where in (subject.target, subject.drafter):
            return Place(_shown(only or folder))
        file, sharp, pointer = where.partition("#")
        is_path = bool(sharp) or file.endswith(_ENDINGS) or os.path.exists(os.path.join(folder, file))
        if not is_path and file.startswith("/"):
            return self._bare_pointer(subject, folder, where)
        if is_path:
            path = os.path.join(folder, file)
            return Place(_shown(path), self._line(path, pointer), pointer or None)
        return Place(_shown(only or self._holder(folder, where)), None, where)

    def _bare_pointer(self, subject: Subject, folder: str, pointer: str) -> Place:
        """A pointer into the facts of a pair, which are no file, else into config.json."""
        path = os.path.join(folder, CONFIG)
        is_fact = pointer.split("/")[1] in (subject.facts or {})
        return Place(_shown(path), None if is_fact else self._line(path, pointer), pointer)

    def _line(self, path: str, pointer: str) -> int | None:
        if not path.endswith(".json"):
            return None
        text = self._text(path)
        return None if text is None else line_of(text, pointer)

    def _holder(self, folder: str, tensor: str) -> str:
        """The weight file of a tensor, or of the first one with that prefix; the folder when that is not known."""
        weight_map = self._weight_map(folder)
        file = weight_map.get(tensor)
        if file is None and tensor.endswith("."):
            file = next((held for name, held in weight_map.items() if name.startswith(tensor)), None)
        if file is None and not weight_map and os.path.isfile(os.path.join(folder, "model.safetensors")):
            file = "model.safetensors"
        return os.path.join(folder, file) if isinstance(file, str) and os.sep not in file else folder


def line_of(text: str, pointer: str) -> int | None:
    """The line of the member or element that a JSON pointer leads to, of the last step that is there.

    Of a text that is no JSON the line where it breaks, and without a pointer None.
    """
    try:
        _DECODER.decode(text)
    except json.JSONDecodeError as error:
        return error.lineno
    except (ValueError, RecursionError):
        return None
    if not pointer:
        return None
    mark = at = _blank(text, 0)
    for step in pointer.split("/")[1:]:
        found = _member(text, at, step.replace("~1", "/").replace("~0", "~"))
        if found is None:
            break
        mark, at = found
    return text.count("\n", 0, mark) + 1


def _member(text: str, at: int, step: str) -> tuple[int, int] | None:
    """Where a member or element begins, and where its value does; of equal keys the last, as readers take it."""
    opening = text[at]
    if opening not in "{[":
        return None
    found, at, number = None, _blank(text, at + 1), 0
    while text[at] not in "}]":
        begin, key = at, str(number)
        if opening == "{":
            key, at = _DECODER.raw_decode(text, at)
            at = _blank(text, _blank(text, at) + 1)
        if key == step:
            found = begin, at
        at = _blank(text, _DECODER.raw_decode(text, at)[1])
        if text[at] == ",":
            at = _blank(text, at + 1)
        number += 1
    return found


def _blank(text: str, at: int) -> int:
    """The next position that is not blank."""
    while text[at] in " \t\r\n":
        at += 1
    return at


def _side(subject: Subject, finding: Mapping[str, Any]) -> str:
    """Whose finding it is: a pair's are the drafter's unless they say that they are the target's."""
    if subject.drafter is None:
        return subject.target
    is_targets = finding["message"].startswith("target: ") or finding["rule"].startswith("TARGET-")
    return subject.target if is_targets or finding["where"] == subject.target else subject.drafter


def _folder(source: str) -> tuple[str, str | None]:
    """The folder that a source names, or a repository's name without scheme and revision; and the file if it is one."""
    try:
        path = os.path.expanduser(source)
    except ValueError:  # a name that no user can have
        path = source
    if os.path.isfile(path):
        return os.path.dirname(path) or ".", path
    if os.path.exists(path):
        return path, None
    name = source.removeprefix("hf://").partition("@")[0]
    return name or ".", None


def _shown(path: str) -> str:
    """The path from the current folder, when it lies below that; else the whole path."""
    whole, here = os.path.abspath(path), os.getcwd()
    return os.path.relpath(whole, here) if os.path.commonpath((whole, here)) == here else whole


def _read(path: str) -> str | None:
    try:
        if not os.path.isfile(path) or os.path.getsize(path) > _MAX_TEXT:
            return None
        with open(path, encoding="utf-8", newline="") as file:
            return file.read()
    except (OSError, ValueError):
        return None


def _weight_map(folder: str) -> dict[str, Any]:
    text = _read(os.path.join(folder, INDEX))
    try:
        index = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    return weight_map if isinstance(weight_map, dict) else {}
