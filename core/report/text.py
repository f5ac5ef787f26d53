"""Reports as text for a terminal: every function takes a report and gives lines, and prints nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from draftpair.report.units import bytes_text, count_text

_VERDICTS = {
    "sound": "nothing is wrong with it",
    "proven": "the drafter was cut from this very target",
    "compatible": "every rule passes",
    "doubtful": "it may run, but something deserves a look",
    "unsafe": "do not run this",
    "unknown": "this cannot be told from the files",
}


def findings_text(findings: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each finding, errors first, and its hint on the next."""
    order = {"error": 0, "warning": 1, "note": 2}
    for finding in sorted(findings, key=lambda f: order[f["level"]]):
        yield f"{finding['level']:<8}{finding['rule']}: {finding['message']}"
        if finding["hint"]:
            yield f"        -> {finding['hint']}"


def inspect_text(report: Mapping[str, Any]) -> Iterator[str]:
    """What the checkpoint is, its head, its sizes, the memory it needs, and what is wrong with it."""
    about = report["checkpoint"]
    yield f"{about['source']}" + (f" @ {about['revision']}" if about["revision"] else "")
    yield _row("role", f"{about['role']}, model_type {about['model_type'] or 'not stated'}")
    yield _row(
        "family",
        (about["family"] or "no record of this family") + (f", {about['kind']}" if about["kind"] else ""),
    )
    untold = report["memory"]["weights_bytes"] is None and not report["head"]["present"]
    yield _row(
        "head",
        "cannot be told: weight files are missing or damaged" if untold else _head_text(report["head"]),
    )
    sizes = report["sizes"]
    parameters = sizes["parameters"]
    yield _row(
        "tensors",
        bytes_text(sizes["tensor_bytes"]) + (f", {count_text(parameters)} parameters" if parameters else ""),
    )
    for name, size in sizes["groups"].items():
        if size:
            yield _row(f"  {name}", bytes_text(size))
    if about["fetched_bytes"] is not None:
        yield _row("read", f"{bytes_text(about['fetched_bytes'])} from the Hub")
    yield from _memory_text(report["memory"], report["inputs"])
    yield from findings_text(report["integrity"]["findings"])


def _head_text(head: Mapping[str, Any]) -> str:
    if not head["present"]:
        if head["declared"]:
            return f"declared ({_count(head['layers_declared'], 'layer')}), but no tensor of it is here"
        return "none"
    recognised = (
        f"recognised, not split ({head['family']})" if head["family"] else "of a family without a record"
    )
    state = {True: "whole", False: "incomplete or malformed", None: recognised}[head["complete"]]
    files = ", ".join(f["name"] + ("" if f["indexed"] else " (not in the index)") for f in head["files"])
    tensors = _count(head["tensors"], "tensor")
    return f"{state}: {tensors} under {head['prefix']}, {bytes_text(head['bytes'])}, in {files}"


def _memory_text(memory: Mapping[str, Any], inputs: Mapping[str, Any]) -> Iterator[str]:
    yield f"memory at context {inputs['context']:,}, batch {inputs['batch']}, {inputs['kv_bits']}-bit cache"
    names = ("weights", "kv", "state", "drafter", "verify", "activation", "overhead", "total", "available")
    for name in names:
        size = memory[f"{name}_bytes"]
        if size is None or size or name in ("kv", "total"):
            yield _row(f"  {name}", "not known" if size is None else bytes_text(size))
        told = {"kv": memory["caches"], "drafter": memory["drafter_caches"]}.get(name)
        if told and not told.startswith("unknown"):
            yield _row("", told)
    if memory["fits"] is not None:
        difference = memory["available_bytes"] - memory["total_bytes"]
        fits = (
            f"fits, {bytes_text(difference)} to spare"
            if memory["fits"]
            else f"does not fit: {bytes_text(-difference)} over"
        )
        yield _row("  result", fits)


def split_text(report: Mapping[str, Any]) -> Iterator[str]:
    """What was written, or with a dry run what would be."""
    did = "wrote" if report["written"] else "would write"
    quantized = sum(tensor["quantized"] and tensor["dtype"] == "U32" for tensor in report["tensors"])
    yield f"{did} {report['output']}"
    maturity = "" if report["maturity"] == "stable" else f", {report['maturity']}"
    yield _row("family", f"{report['family']}, model_type {report['drafter_model_type']}{maturity}")
    yield _row("block width", f"{report['block_size']} (counts the bonus token)")
    packed = f", {quantized} of them the words of quantized matrices" if quantized else ""
    yield _row("tensors", f"{len(report['tensors'])}{packed}")
    yield _row(
        "bytes", f"{bytes_text(report['bytes_read'])} read, {bytes_text(report['bytes_written'])} written"
    )
    yield _row("files", ", ".join(report["files"]))
    if upload := report["upload"]:
        yield _row("uploaded", f"{upload['url']}, commit {upload['commit']}")
    if quantized:
        for reason, names in _by_reason(report["kept_full_precision"]).items():
            yield _row(
                "not quantized",
                f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if names[3:] else ''}: {reason}",
            )
    yield from findings_text(report["findings"])


def attach_text(report: Mapping[str, Any]) -> Iterator[str]:
    """What was attached, or with a dry run what would be."""
    yield f"{'wrote' if report['written'] else 'would write'} {report['output']}"
    yield _row("family", report["family"])
    yield _row("head", f"{len(report['tensors'])} tensors under {report['prefix']}")
    yield _row("bytes", f"{bytes_text(report['bytes_written'])} of the head")
    for how in ("written", "copied", "linked"):
        if names := [file["name"] for file in report["files"] if file["how"] == how]:
            yield _row(how, ", ".join(names))
    yield _row("pair", f"{report['verdict']}: {_VERDICTS[report['verdict']]}")
    yield from findings_text(report["findings"])


def _by_reason(kept: Iterable[Mapping[str, str]]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for entry in kept:
        names.setdefault(entry["reason"], []).append(entry["name"])
    return names


def validate_text(report: Mapping[str, Any]) -> Iterator[str]:
    """The verdict first, then the pair, then every finding."""
    yield f"{report['verdict']}: {_VERDICTS[report['verdict']]}"
    pair = report["pair"]
    if pair:
        # Of a pair that could not be compared there are no facts; what a side is may then not be known.
        kind = pair["target_family"] or report["facts"].get("target", {}).get("model_type")
        for side, known in (("target", kind), ("drafter", pair["drafter_family"])):
            yield _row(side, report["inputs"][side] + (f" ({known})" if known else ""))
        if pair["kind"]:
            yield _row("draft kind", pair["kind"])
        if pair["block_size"]:
            yield _row("block width", f"{pair['block_size']} ({pair['block_size_from']})")
    for side, size in report["fetched_bytes"].items():
        if size is not None:
            yield _row("read", f"{bytes_text(size)} of the {side} from the Hub")
    yield from findings_text(report["findings"])
    if report["questions"]:
        yield "before loading it, ask"
        for question in report["questions"]:
            yield f"  {question['question']}"
            yield f"        {question['answer']}"


def generate_text(report: Mapping[str, Any]) -> Iterator[str]:
    """The figures after a generation; the text itself is printed as it comes.

    Why the probe declined, and what ended a drafter, was said when it happened and is not said again.
    """
    stats, exactness = report["stats"], report["exactness"]
    rate, rounds = stats["tokens_per_second"], stats["rounds"]
    yield _count(len(report["tokens"]), "token") + (f", {rate:.1f} tokens a second" if rate else "")
    if exactness["verdict"] == "exact":
        yield f"exactness: exact ({exactness['detail']})"
    elif exactness["verdict"] == "inexact":
        yield "exactness: inexact, so " + ("the tokens may differ" if rounds else "no draft was made")
    if rounds:
        accepted, proposed = stats["accepted"], stats["proposed"]
        share = f" ({stats['draft_acceptance_rate']:.1%})" if proposed else ""
        yield (
            f"{_count(rounds, 'round')} of block width {stats['block_size']} ({stats['block_size_from']}): "
            f"{accepted} of {proposed} proposals accepted{share}, "
            f"{stats['mean_acceptance_length']:.2f} tokens a round{_widths_text(stats)}"
        )
    if lookup := stats["prompt_lookup"]:
        yield (
            f"prompt lookup, policy {lookup['policy']}: {_count(lookup['drafted_rounds'], 'round')} with proposals, "
            f"{lookup['paused_rounds']:,} paused, {lookup['shadow_confirmations']:,} of those predicted rightly"
        )
    yield from findings_text(report["findings"])


def _widths_text(stats: Mapping[str, Any]) -> str:
    """The widths that the rounds had, where they were not all as asked for."""
    widths = stats["effective_block_sizes"]
    if list(widths) == [str(stats["block_size"])]:
        return ""
    return ", effective widths " + ", ".join(
        f"{rows} ({_count(times, 'round')})" for rows, times in widths.items()
    )


def profile_text(report: Mapping[str, Any]) -> Iterator[str]:
    """Seconds by phase and, where they were measured, by component; and how often each proposal was accepted."""
    stats = report["stats"]
    for phase in ("prefill", "decode", "draft", "verify", "plain", "other"):
        yield _row(f"{phase}", f"{stats[f'{phase}_seconds']:.3f} s")
    for component, seconds in (stats["draft_profile"] or {}).items():
        yield _row(f"  {component}", f"{seconds:.3f} s, waited for")
    for position, share in enumerate(stats["acceptance_by_position"], 1):
        yield _row(f"position {position}", f"{share:.1%} accepted")
    for accepted, rounds in stats["acceptance_histogram"].items():
        yield _row(f"{accepted} accepted", f"in {_count(rounds, 'round')}")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _row(name: str, text: str) -> str:
    return f"{name:<16}{text}".rstrip()
