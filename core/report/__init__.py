"""Reports: one object a command, the same shape at every verbosity, each valid against its own schema.

`render` turns the reports of ``validate``, ``inspect`` and ``check`` into any of `formats`, and prints nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from draftpair.report.subjects import Report, exit_code, kind_of, one_line
from draftpair.schemas import load_schema
from draftpair.version import VERSION

__all__ = ["Report", "envelope", "exit_code", "formats", "render", "strict"]


def envelope(name: str, inputs: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
    """A whole report: the ``$id`` of the schema called ``name``, the tool, the inputs, then the body."""
    report = {
        "schema": load_schema(name)["$id"],
        "tool": {"name": "draftpair", "version": VERSION},
        "inputs": inputs,
        **body,
    }
    return dict(strict(report))


def strict(value: Any) -> Any:
    """The value as JSON can hold it: a number that JSON lacks, which Python's reader takes from a config all the
    same, becomes the text ``"NaN"``, ``"Infinity"`` or ``"-Infinity"``.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return value


def formats() -> tuple[str, ...]:
    """The names of the formats, as ``--format`` takes them."""
    return tuple(_FORMATS)


def render(reports: Report | Iterable[Report], form: str, *, strict: bool = False) -> str:
    """One report, or several, in the format called ``form``, without a line break at the end.

    ``strict`` makes warnings count as failures where a format tells the two apart.
    """
    several = [reports] if isinstance(reports, Mapping) else list(reports)
    return _FORMATS[form](several, strict)


def _text(reports: Sequence[Report], strict: bool) -> str:
    return "\n".join(one_line(line) for report in reports for line in _lines(report))


def _lines(report: Report) -> Iterable[str]:
    from draftpair.report.check import check_text
    from draftpair.report.text import inspect_text, validate_text

    return {"check": check_text, "inspect": inspect_text, "validate": validate_text}[kind_of(report)](report)


def _json(reports: Sequence[Report], strict: bool) -> str:
    """One report over many lines, several with one on each."""
    return "\n".join(json.dumps(report, indent=2 if len(reports) == 1 else None) for report in reports)


def _module(name: str) -> Callable[[Sequence[Report], bool], str]:
    """A format with a module of its own, which is imported when it is asked for."""
    return lambda reports, strict: str(import_module(f"{__name__}.{name}").render(reports, strict))


_FORMATS: dict[str, Callable[[Sequence[Report], bool], str]] = {
    "text": _text,
    "json": _json,
    **{name: _module(name) for name in ("sarif", "junit", "github")},
}
