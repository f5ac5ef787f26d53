"""Validates a list of pairs, one JSON object a line in and out: in parallel, in order, no bad line stopping the rest.

A line in: ``{"target": ..., "drafter": ..., "draft_kind": ..., "draft_block_size": ...}``, of which all but ``target``
may be left out or null; the last two go with a drafter. A line out: the number of the line, what it asked for, the
exit code that `validate` would have had, and the report, or the error that stood in its way.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple

from draftpair.checkpoint import Checkpoint, open_checkpoint
from draftpair.checkpoint.strict_json import JSONProblem, parse_json
from draftpair.checkpoint.wording import printable
from draftpair.errors import ToolError, Usage

KEYS = ("target", "drafter", "draft_kind", "draft_block_size")
_OPEN = 64
_CHUNK = 16
_LONGEST_LINE = 1 << 16

Report = Callable[[dict[str, Any]], dict[str, Any]]
"""Makes a verdict's body the report that `validate` prints."""


class Line(NamedTuple):
    """A line of the list: its number from 1, and its text."""

    number: int
    text: str


def validate_lines(
    lines: Iterable[str], judge: Callable[[Line], dict[str, Any]], jobs: int | None = None
) -> Iterator[dict[str, Any]]:
    """What ``judge`` makes of each line that is not blank, in the order of the lines.

    ``judge`` is carried out in ``jobs`` processes, as many as there are processors where None: lines of one target
    are given to one process together, because it keeps what it has read. It must be importable by name.
    """
    listed = [Line(number, text) for number, text in enumerate(lines, 1) if text.strip()]
    groups = list(_groups(listed))
    workers = min(jobs or os.cpu_count() or 1, len(groups))
    if workers < 2:
        yield from map(judge, listed)
        return
    with ProcessPoolExecutor(workers, initializer=_end_when_told) as pool:
        running = [(group, pool.submit(_judge_all, judge, group)) for group in groups]
        try:
            yield from _in_order(running)
        finally:  # whoever stops listening does not wait for the rest of the list
            pool.shutdown(wait=False, cancel_futures=True)


def _end_when_told() -> None:
    """A process of the pool ends at once: handlers that the command has for itself would turn that into a result."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        if number := getattr(signal, name, None):
            signal.signal(number, signal.SIG_DFL)


def _groups(lines: Sequence[Line]) -> Iterator[list[Line]]:
    """The lines by target, cut into pieces small enough to keep all processes busy."""
    by_target: dict[str, list[Line]] = {}
    for line in lines:
        by_target.setdefault(_target_of(line.text), []).append(line)
    for group in by_target.values():
        rest = iter(group)
        while piece := list(islice(rest, _CHUNK)):
            yield piece


def _target_of(text: str) -> str:
    try:
        asked = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    return str(asked.get("target")) if isinstance(asked, dict) else ""


def _judge_all(judge: Callable[[Line], dict[str, Any]], lines: list[Line]) -> list[dict[str, Any]]:
    return [judge(line) for line in lines]


def _in_order(
    running: Sequence[tuple[list[Line], Future[list[dict[str, Any]]]]],
) -> Iterator[dict[str, Any]]:
    """The results by number of the line, each as soon as all before it are there."""
    owner = {line.number: (group[0].number, future) for group, future in running for line in group}
    done: dict[int, dict[str, Any]] = {}
    lines = {line.number: line for group, _ in running for line in group}
    for number in sorted(owner):
        if number not in done:
            try:
                done |= {result["line"]: result for result in owner[number][1].result()}
            except BrokenExecutor:
                done[number] = failed(lines[number], None, ToolError(_ENDED, hint="judge this pair alone"))
        yield done.pop(number)


_ENDED = "the process that was to judge this pair, or one beside it, was ended"


def parse_line(text: str) -> dict[str, Any]:
    """What a line asks for: every one of `KEYS`, None where it was left out. Raises Usage for anything else."""
    if len(text) > _LONGEST_LINE:
        raise Usage(f"the line is {len(text):,} characters long", hint=f"expected at most {_LONGEST_LINE:,}")
    try:
        parsed = parse_json(text.encode())
    except UnicodeEncodeError:
        raise Usage("the line is not UTF-8", hint="save the list as UTF-8") from None
    except JSONProblem as problem:
        raise Usage(f"the line is no JSON: {problem}", hint=_HINT) from None
    if parsed.repeated:
        raise Usage(f"the line is ambiguous: {parsed.repeated[0]}", hint="give each key once")
    asked = parsed.value
    if not isinstance(asked, dict):
        raise Usage(f"the line is {printable(text.strip(), 40)}, which is no JSON object", hint=_HINT)
    if unknown := sorted(set(asked) - set(KEYS)):
        raise Usage(f"unknown key {printable(unknown[0], 40)!r}", hint=f"known keys: {', '.join(KEYS)}")
    for key in KEYS:
        value, whole = asked.get(key), key == "draft_block_size"
        fits = type(value) is int if whole else _is_text(value)
        if not fits and (value is not None or key == "target"):
            wanted = "a whole number" if whole else "text"
            raise Usage(f"{key} is {printable(json.dumps(value), 40)}, expected {wanted}", hint=_HINT)
        if key.startswith("draft_") and value is not None and asked.get("drafter") is None:
            raise Usage(f"{key} is given and no drafter", hint=_HINT)
    return {key: asked.get(key) for key in KEYS}


def _is_text(value: Any) -> bool:
    """Whether it is text that can name something: half of a surrogate pair cannot be encoded."""
    try:
        return isinstance(value, str) and bool(value.encode())
    except UnicodeEncodeError:
        return False


_HINT = 'a line is an object such as {"target": "owner/name", "drafter": "path/to/folder"}'


@lru_cache(_OPEN)
def opened(source: str) -> Checkpoint:
    """The checkpoint, opened once: a list of pairs names the same ones again and again."""
    return open_checkpoint(source)


def failed(line: Line, asked: dict[str, Any] | None, error: ToolError) -> dict[str, Any]:
    """The line out for a pair that could not be looked at."""
    return {
        "line": line.number,
        "input": asked,
        "exit_code": error.exit_code,
        "report": None,
        "error": {"message": error.message, "hint": error.hint},
    }
