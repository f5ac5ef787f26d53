"""The report of ``bench`` as text: speeds of every prompt and of all, then acceptance as bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from draftpair.report.bars import bars
from draftpair.report.text import findings_text

_SHOWN = 60


def bench_text(report: Mapping[str, Any], blocks: bool = True) -> Iterator[str]:
    """Lines for a terminal; without ``blocks``, the bars are of ASCII."""
    inputs, draft, exactness = report["inputs"], report["draft"], report["exactness"]
    runs = inputs["runs"]
    drafting = inputs["draft_model"] or inputs["draft_kind"]
    yield f"{inputs['model']} with {drafting}: {_counted(runs, 'run')} of each kind"
    for number, entry in enumerate(report["prompts"], 1):
        yield f"prompt {number}: {_shortened(entry['prompt'])}"
        yield from _speeds_text(entry)
    yield "total"
    yield from _speeds_text(report["total"])
    yield _row(
        "exactness", exactness["verdict"] + (f" ({exactness['detail']})" if exactness["detail"] else "")
    )
    if draft is not None:
        yield _row("drafts", draft_text(draft))
        yield from _acceptance_text(report["total"]["acceptance"], runs, blocks)
    yield from findings_text(report["findings"])


def speed_text(speed: Mapping[str, Any]) -> str:
    """``12.3 tokens a second (12.1 to 12.9)``: the median of the runs, the slowest and the fastest."""
    if speed["median"] is None:
        return "not measured: nothing was decoded after the first token"
    return f"{speed['median']:.1f} tokens a second ({speed['slowest']:.1f} to {speed['fastest']:.1f})"


def draft_text(draft: Mapping[str, Any]) -> str:
    """``mtp, block width 4 (--draft-block-size)``"""
    return f"{draft['kind']}, block width {draft['block_size']} ({draft['block_size_from']})"


def acceptance_text(acceptance: Mapping[str, Any]) -> str:
    """``8 of 12 proposals accepted (66.7%), 2.33 tokens a round``"""
    if not acceptance["proposed"]:
        return "nothing was proposed"
    return (
        f"{acceptance['accepted']:,} of {acceptance['proposed']:,} proposals accepted"
        f" ({acceptance['draft_acceptance_rate']:.1%}), {acceptance['mean_acceptance_length']:.2f} tokens a round"
    )


def positions(acceptance: Mapping[str, Any]) -> list[tuple[str, float, str]]:
    """(place, share, figure) of the drafts of a block, from the first on."""
    shares = acceptance["acceptance_by_position"]
    return [(f"position {place}", share, f"{share:.1%}") for place, share in enumerate(shares, 1)]


def histogram(acceptance: Mapping[str, Any]) -> list[tuple[str, float, str]]:
    """(drafts accepted, share, figure) of the rounds that accepted so many."""
    rounds = acceptance["rounds"]
    return [
        (f"{accepted} accepted", times / rounds, f"{times:,}")
        for accepted, times in acceptance["acceptance_histogram"].items()
    ]


def identity_text(entry: Mapping[str, Any]) -> str:
    """Whether the token ids were the same, and where they first were not."""
    difference = entry["first_difference"]
    if difference is None:
        return "identical in every run"
    return (
        f"DIFFERENT: generated token {difference['position']} of prompt {difference['prompt']}, counted from 0, is "
        f"{_id(difference['expected'])} in the first plain run and {_id(difference['found'])} in a "
        f"{difference['run']} one"
    )


def _speeds_text(entry: Mapping[str, Any]) -> Iterator[str]:
    yield _row("tokens", f"{entry['tokens']:,}")
    yield _row("plain", speed_text(entry["plain"]))
    if entry["speculative"] is not None:
        yield _row("speculative", speed_text(entry["speculative"]))
        if entry["ratio"] is not None:
            yield _row("ratio", f"{entry['ratio']:.2f}")
        yield _row("acceptance", acceptance_text(entry["acceptance"]))
    yield _row("token ids", identity_text(entry))


def _acceptance_text(acceptance: Mapping[str, Any], runs: int, blocks: bool) -> Iterator[str]:
    widths = acceptance["effective_block_sizes"].items()
    if widths:
        yield _row(
            "block widths", ", ".join(f"{rows} in {_counted(rounds, 'round')}" for rows, rounds in widths)
        )
    if acceptance["proposed"]:
        yield "acceptance by position"
        yield from bars(positions(acceptance), blocks)
        yield f"rounds by drafts accepted, of {acceptance['rounds']:,} in {_counted(runs, 'run')}"
        yield from bars(histogram(acceptance), blocks)


def _shortened(prompt: str) -> str:
    """One line of at most ``_SHOWN`` characters."""
    line = " ".join(prompt.split())
    return line if len(line) <= _SHOWN else line[: _SHOWN - 3] + "..."


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def _id(token: int | None) -> str:
    return "the end" if token is None else f"id {token}"


def _row(name: str, text: str) -> str:
    return f"  {name:<14}{text}"
