"""The report of `bench` as text and as SVG, whole, from a report written by hand; and the bars in both."""

from __future__ import annotations

import copy
import json
import os
import stat
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from draftpair.errors import ToolError, Usage
from draftpair.findings import Finding
from draftpair.report.bars import WIDTH, bar, bars, can_show_blocks
from draftpair.report.bench import bench_text
from draftpair.report.svg import bench_svg, check_destination, write_svg
from draftpair.schemas import check, load_schema
from fixtures.reports import HOSTILE

GOLDEN = Path(__file__).parent / "golden"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def report() -> dict[str, Any]:
    """Two prompts of a pair whose second ids differ; a copy, to be changed."""
    document: dict[str, Any] = json.loads((GOLDEN / "bench.json").read_text(encoding="utf-8"))
    assert check(document, load_schema("bench")) == []
    return document


def declined(report: dict[str, Any]) -> dict[str, Any]:
    """The same, had the probe found a difference."""
    found = copy.deepcopy(report)
    nothing = {
        "speculative": None,
        "ratio": None,
        "identical": True,
        "first_difference": None,
        "acceptance": None,
    }
    for entry in (*found["prompts"], found["total"]):
        entry.update(nothing)
    found["draft"] = None
    found["exactness"] = {"verdict": "inexact", "detail": "width 2: 3 of 64 logit bytes differ"}
    found["findings"] = [Finding("BENCH-DECLINED", "warning", "only plain decoding was measured").as_dict()]
    assert check(found, load_schema("bench")) == []
    return found


def test_the_text(report: dict[str, Any]) -> None:
    assert "\n".join(bench_text(report)) + "\n" == (GOLDEN / "bench.txt").read_text(encoding="utf-8")


def test_the_text_in_ascii(report: dict[str, Any]) -> None:
    lines = list(bench_text(report, blocks=False))
    assert all(line.isascii() for line in lines)
    assert f"  position 1  {'#' * 30:<{WIDTH}}  75.0%" in lines


def test_the_text_of_a_pair_that_was_declined(report: dict[str, Any]) -> None:
    lines = list(bench_text(declined(report)))
    assert not any("speculative" in line or "position" in line for line in lines)
    assert lines[-1] == "warning BENCH-DECLINED: only plain decoding was measured"


def test_the_text_of_runs_that_decoded_nothing(report: dict[str, Any]) -> None:
    nothing = {"median": None, "slowest": None, "fastest": None, "runs": [None]}
    report["total"].update(plain=nothing, speculative=nothing, ratio=None)
    report["total"]["acceptance"].update(
        rounds=0,
        proposed=0,
        accepted=0,
        draft_acceptance_rate=None,
        mean_acceptance_length=None,
        acceptance_histogram={},
        acceptance_by_position=[],
        effective_block_sizes={},
    )
    assert check(report, load_schema("bench")) == []
    lines = list(bench_text(report))
    assert "  plain         not measured: nothing was decoded after the first token" in lines
    assert "acceptance by position" not in lines
    assert len(ElementTree.fromstring(bench_svg(report)).findall(f"{SVG}rect")) == 1


def test_a_bar_is_as_long_as_its_share() -> None:
    assert bar(0, blocks=True) == bar(0, blocks=False) == ""
    assert bar(1, blocks=True) == "█" * WIDTH
    assert bar(1, blocks=False) == "#" * WIDTH
    assert bar(0.5, blocks=True) == "█" * (WIDTH // 2)
    assert bar(0.5 + 3 / 8 / WIDTH, blocks=True) == "█" * (WIDTH // 2) + "▍"
    assert bar(1e-9, blocks=True) == "▏"
    assert bar(1e-9, blocks=False) == "#"
    lengths = [len(bar(share / 1000, blocks=True)) for share in range(1001)]
    assert lengths == sorted(lengths)


def test_bars_are_aligned() -> None:
    first, second = bars([("a", 1.0, "7"), ("longer", 0.25, "1,000")], blocks=False)
    assert first.index("#") == second.index("#") == len("  longer  ")
    assert len(first) == len(second)
    assert list(bars([], blocks=True)) == []


@pytest.mark.parametrize(
    ("encoding", "able"),
    [
        ("utf-8", True),
        ("ascii", False),
        ("latin-1", False),
        ("cp1252", False),
        ("cp437", False),
        ("no-such", False),
        (None, False),
    ],
)
def test_blocks_are_drawn_where_they_can_be_written(encoding: str | None, able: bool) -> None:
    assert can_show_blocks(encoding) is able


def test_the_svg(report: dict[str, Any]) -> None:
    image = bench_svg(report)
    assert image == (GOLDEN / "bench.svg").read_text(encoding="utf-8")


def test_the_svg_says_in_words_what_it_shows(report: dict[str, Any]) -> None:
    root = ElementTree.fromstring(bench_svg(report))
    names = {element.get("id"): element for element in root if element.get("id")}
    assert root.get("role") == "img"
    labels = [names[label] for label in str(root.get("aria-labelledby")).split()]
    assert [label.tag for label in labels] == [f"{SVG}title", f"{SVG}desc"]
    description = str(labels[1].text)
    texts = [str(element.text) for element in root.iter(f"{SVG}text")]
    for figure in (
        "75.0%",
        "50.0%",
        "2.25 tokens a round",
        "1.50 times",
        "DIFFERENT",
        "position 2",
        "2 accepted",
    ):
        assert figure in description
        assert any(figure in text for text in texts)


def test_the_svg_has_colours_for_both_themes_and_nothing_from_elsewhere(report: dict[str, Any]) -> None:
    image = bench_svg(report)
    root = ElementTree.fromstring(image)
    style = str(root.findtext(f"{SVG}style"))
    light, dark = style.split("@media (prefers-color-scheme: dark)")
    for kind in (" text", " .ground", " .track", " .bar"):
        assert f".draftpair{kind} {{ fill: #" in light
        assert f".draftpair{kind} {{ fill: #" in dark
    assert contrast(light) > 7
    assert contrast(dark) > 7
    assert {element.tag.removeprefix(SVG) for element in root.iter()} == {
        "svg", "title", "desc", "style", "rect", "text",
    }  # fmt: skip
    assert image.count("http") == 1  # the name space
    assert "url(" not in image


def contrast(style: str) -> float:
    """Of text on its ground, as WCAG 2 defines it."""
    text, ground = sorted(luminance(style, kind) for kind in ("text", ".ground"))
    return (ground + 0.05) / (text + 0.05)


def luminance(style: str, kind: str) -> float:
    colour = style.split(f"{kind} {{ fill: #")[1][:6]
    parts = [int(colour[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_nothing_in_the_svg_leaves_its_frame(report: dict[str, Any]) -> None:
    report["inputs"]["model"] = "/a/long/path/" * 30
    report["total"]["acceptance"]["acceptance_by_position"] = [1.0] * 15
    root = ElementTree.fromstring(bench_svg(report))
    width, height = float(str(root.get("width"))), float(str(root.get("height")))
    for element in root.iter(f"{SVG}rect"):
        assert float(element.get("x", 0)) + float(str(element.get("width"))) <= width
        assert float(element.get("y", 0)) + float(str(element.get("height"))) <= height
    for element in root.iter(f"{SVG}text"):
        assert float(str(element.get("y"))) < height
        assert len(str(element.text)) <= 84


def test_hostile_names_are_text(report: dict[str, Any]) -> None:
    report["inputs"]["model"] = report["draft"]["block_size_from"] = report["prompts"][0]["prompt"] = HOSTILE
    root = ElementTree.fromstring(bench_svg(report))
    assert "<d> ]]> &" in str(root.findtext(f"{SVG}title"))
    assert "\x1b" not in "".join(root.itertext())


def test_the_svg_of_a_pair_that_was_declined(report: dict[str, Any]) -> None:
    root = ElementTree.fromstring(bench_svg(declined(report)))
    assert "It was decoded plainly: width 2: 3 of 64 logit bytes differ." in str(root.findtext(f"{SVG}desc"))
    assert len(root.findall(f"{SVG}rect")) == 1


def test_the_svg_is_written_whole_or_not_at_all(report: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "bench.svg"
    path.write_text("old")
    write_svg(report, path)
    assert path.read_text(encoding="utf-8") == bench_svg(report)
    assert [entry.name for entry in tmp_path.iterdir()] == ["bench.svg"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask
    del report["total"]["plain"]
    with pytest.raises(KeyError):
        write_svg(report, path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["bench.svg"]
    assert path.read_text(encoding="utf-8").endswith("</svg>\n")


def test_a_folder_is_not_overwritten(report: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(Usage, match="is a folder"):
        write_svg(report, tmp_path / "there")
    with pytest.raises(Usage, match="is no folder"):
        check_destination(tmp_path / "absent" / "bench.svg")
    assert [entry.name for entry in tmp_path.iterdir()] == ["there"]


def test_a_folder_that_takes_no_file_is_noticed_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_destination(tmp_path / "bench.svg")
    monkeypatch.setattr("draftpair.report.svg.os.access", lambda path, mode: path != tmp_path)
    with pytest.raises(Usage, match="cannot be written: no file can be added to"):
        check_destination(tmp_path / "bench.svg")


def test_a_full_or_forbidden_disk_is_an_error_of_the_tool(
    report: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*args: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("draftpair.report.svg.os.replace", forbidden)
    with pytest.raises(ToolError, match="cannot be written: Permission denied"):
        write_svg(report, tmp_path / "bench.svg")
    assert list(tmp_path.iterdir()) == []
