"""A ``bench`` report as one SVG image: acceptance by position, rounds by drafts accepted, and the ratio in words.

The image has no fonts or scripts of its own, carries its ground with it, follows a dark theme where the viewer has
one, and says all of its figures in its description, for those who cannot see it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import wrap
from typing import Any
from xml.sax.saxutils import escape

from draftpair.errors import ToolError, Usage
from draftpair.report.bench import acceptance_text, draft_text, histogram, identity_text, positions
from draftpair.report.subjects import one_line

_WIDTH, _MARGIN, _ROW, _LINE = 640, 20, 24, 20
_BAR_LEFT, _BAR_WIDTH, _BAR_HEIGHT = 130, 410, 14
_COLUMNS = 84

_STYLE = """\
.draftpair text { fill: #1f2328; font: 13px system-ui, sans-serif }
.draftpair .name { font-weight: bold }
.draftpair .ground { fill: #ffffff }
.draftpair .track { fill: #d8dee4 }
.draftpair .bar { fill: #0969da }
@media (prefers-color-scheme: dark) {
.draftpair text { fill: #f0f6fc }
.draftpair .ground { fill: #0d1117 }
.draftpair .track { fill: #30363d }
.draftpair .bar { fill: #4493f8 }
}"""


def bench_svg(report: Mapping[str, Any]) -> str:
    """The image as a text of XML, with a line break at the end."""
    caption, panels = _caption(report), _panels(report)
    body: list[str] = []
    top = _MARGIN
    for line in (line for sentence in caption for line in wrap(sentence, _COLUMNS)):
        top += _LINE
        body.append(_text(_MARGIN, top, line))
    for name, rows in panels:
        top += _LINE + _ROW
        body.append(_text(_MARGIN, top, name, "name"))
        for row in rows:
            top += _ROW
            body.extend(_bar(top, *row))
    height = top + _MARGIN
    told = [*caption, *(f"{name}: " + ", ".join(_spoken(row) for row in rows) + "." for name, rows in panels)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="draftpair" viewBox="0 0 {_WIDTH} {height}"'
            f' width="{_WIDTH}" height="{height}" role="img"'
            ' aria-labelledby="draftpair-title draftpair-desc">',
            f'<title id="draftpair-title">{_escaped(_title(report))}</title>',
            f'<desc id="draftpair-desc">{_escaped(" ".join(told))}</desc>',
            f"<style>\n{_STYLE}\n</style>",
            f'<rect class="ground" width="{_WIDTH}" height="{height}" rx="6"/>',
            *body,
            "</svg>",
            "",
        ]
    )


def check_destination(path: Path) -> None:
    """Raise Usage where no file can be written."""
    if path.is_dir():
        raise Usage(f"{path} is a folder", hint="name a file, such as bench.svg")
    if not path.parent.is_dir():
        raise Usage(f"{path.parent} is no folder", hint=f"make it first: mkdir -p {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise Usage(f"{path} cannot be written: no file can be added to {path.parent}")


def write_svg(report: Mapping[str, Any], path: Path) -> None:
    """The image at ``path``, whole or not at all; a file that is there is replaced. Raises ToolError when it fails."""
    check_destination(path)
    staged: str | None = None
    try:
        handle, staged = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(bench_svg(report))
        os.chmod(staged, 0o666 & ~_umask())  # a temporary file is its owner's alone
        os.replace(staged, path)
    except OSError as error:
        raise ToolError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        if staged is not None:
            with suppress(FileNotFoundError):
                os.unlink(staged)


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _title(report: Mapping[str, Any]) -> str:
    inputs = report["inputs"]
    drafter = inputs["draft_model"] or inputs["draft_kind"]
    return f"Speculative decoding of {inputs['model']} with {drafter}"


def _caption(report: Mapping[str, Any]) -> list[str]:
    """The figures of the whole report in sentences."""
    total, draft = report["total"], report["draft"]
    if draft is None:
        return [_title(report) + ".", f"It was decoded plainly: {report['exactness']['detail']}."]
    sentences = [_title(report) + ".", f"{draft_text(draft)}: {acceptance_text(total['acceptance'])}."]
    if total["ratio"] is not None:
        plain, speculative = total["plain"]["median"], total["speculative"]["median"]
        sentences.append(
            f"{total['ratio']:.2f} times the speed of plain decoding: {speculative:.1f} against {plain:.1f} tokens a"
            f" second, runs of each kind: {report['inputs']['runs']}."
        )
    return [*sentences, f"Token ids: {identity_text(total)}."]


def _panels(report: Mapping[str, Any]) -> list[tuple[str, Sequence[tuple[str, float, str]]]]:
    acceptance = report["total"]["acceptance"]
    if acceptance is None or not acceptance["proposed"]:
        return []
    return [
        ("Acceptance by position", positions(acceptance)),
        (f"Rounds by drafts accepted, of {acceptance['rounds']:,}", histogram(acceptance)),
    ]


def _bar(baseline: int, name: str, share: float, figure: str) -> Iterator[str]:
    yield _text(_MARGIN, baseline, name)
    top = baseline - _BAR_HEIGHT + 2
    for kind, width in (("track", _BAR_WIDTH), ("bar", share * _BAR_WIDTH)):
        yield f'<rect class="{kind}" x="{_BAR_LEFT}" y="{top}" width="{width:.1f}" height="{_BAR_HEIGHT}" rx="2"/>'
    yield _text(_BAR_LEFT + _BAR_WIDTH + 10, baseline, figure)


def _text(left: int, baseline: int, text: str, kind: str | None = None) -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{left}" y="{baseline}">{_escaped(text)}</text>'


def _spoken(row: tuple[str, float, str]) -> str:
    name, _, figure = row
    return f"{name} {figure}"


def _escaped(text: str) -> str:
    """Text as XML can hold it: controls and halves of surrogate pairs are not characters of it."""
    return escape(one_line(text))
