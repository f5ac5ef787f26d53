"""Plain and speculative runs of the same prompts in turn: how fast each is, and whether they emit the same tokens.

A machine is not equally fast at every moment. So the runs alternate, and so does which kind begins; each prompt is
run once in each way first, and those runs count for nothing but the comparison of the token ids.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

from draftpair.checkpoint.strict_json import JSONProblem, parse_json
from draftpair.errors import Usage
from draftpair.findings import Finding
from draftpair.runtime import stats
from draftpair.runtime.options import Options
from draftpair.runtime.session import Session, encode, run

PROMPTS = (
    "List the numbers from one to forty in words, one on each line.",
    "Write a Python class for a stack with the methods push, pop, peek and is_empty. Give every method a docstring.",
    "Tell the story of a lighthouse keeper who finds a letter in a bottle on the morning after a storm.",
)
"""What is run when no file is given: an enumeration, code, prose."""

Bodies = dict[str, list[dict[str, Any]]]
"""Kind of run, "plain" or "speculative", -> what each gave; the first was for warming up."""


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: its lines that are not blank, or the "prompt" of each if its first is a JSON object.

    Raises Usage for a file that cannot be read or has no prompt, and for a line without one.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").splitlines()
    except OSError as error:
        raise Usage(f"the prompts cannot be read: {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Usage(f"the prompts cannot be read: {path} is not UTF-8: {error.reason}") from error
    listed = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not listed:
        raise Usage(f"{path} has no prompts", hint="give one on each line")
    if not _is_object(listed[0][1]):
        return [line for _, line in listed]
    return [_prompt_of(line, f"{path}, line {number}") for number, line in listed]


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _prompt_of(line: str, where: str) -> str:
    try:
        value = parse_json(line.encode()).value
    except JSONProblem as error:
        raise Usage(f"{where}: {error}", hint="the first line is JSON, so every line has to be") from error
    prompt = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise Usage(
            f"{where} has no prompt", hint='expected an object such as {"prompt": "Why is the sky blue?"}'
        )
    return prompt


def bench(
    session: Session,
    prompts: Sequence[str],
    options: Options,
    runs: int,
    environ: Mapping[str, str] = os.environ,
    on_run: Callable[[int, str, int], None] = lambda prompt, kind, run: None,
) -> dict[str, Any]:
    """The body of the report on ``runs`` runs of each kind for each prompt; plain ones alone where the probe declines.

    ``on_run`` is told the number of the prompt, the kind, and the number of the run that begins, 0 for warming up.
    """
    if runs < 1 or not prompts:
        raise Usage("a benchmark needs at least one prompt and one run")
    encoded = [encode(session, prompt, options.chat_template) for prompt in prompts]
    gate = session.gate(environ)
    sessions = {"plain": replace(session, pair=None, drafter=None)}
    if gate.engage:
        sessions["speculative"] = session
    every = [
        in_turn(
            list(sessions),
            runs,
            partial(_run, sessions, ids, options, environ),
            number,
            partial(on_run, number),
        )
        for number, ids in enumerate(encoded, 1)
    ]
    return {
        "draft": _draft(every),
        "prompts": [
            {
                "prompt": prompt,
                "prompt_tokens": len(ids),
                "finish_reason": bodies["plain"][0]["finish_reason"],
                **summary({number: bodies}),
            }
            for number, (prompt, ids, bodies) in enumerate(zip(prompts, encoded, every, strict=True), 1)
        ],
        "total": summary(dict(enumerate(every, 1))),
        "exactness": gate.exactness.report(),
        "findings": [
            finding.as_dict()
            for finding in (*session.findings, *_findings(every, gate.engage, gate.exactness.detail))
        ],
    }


def _run(
    sessions: Mapping[str, Session],
    ids: Sequence[int],
    options: Options,
    environ: Mapping[str, str],
    kind: str,
) -> dict[str, Any]:
    return run(sessions[kind], ids, options, lambda piece: None, environ)


def in_turn(
    kinds: Sequence[str],
    runs: int,
    turn: Callable[[str], dict[str, Any]],
    offset: int = 0,
    on_run: Callable[[str, int], None] = lambda kind, run: None,
) -> Bodies:
    """What ``turn`` gives for each kind, once for warming up and ``runs`` times more; each time another kind begins."""
    bodies: Bodies = {kind: [] for kind in kinds}
    for number in range(runs + 1):
        first = (offset + number) % len(kinds)
        for kind in [*kinds[first:], *kinds[:first]]:
            on_run(kind, number)
            bodies[kind].append(turn(kind))
    return bodies


def summary(every: Mapping[int, Bodies]) -> dict[str, Any]:
    """The figures of some prompts, by their numbers, together."""
    plain, speculative = (_speed(every, kind) for kind in ("plain", "speculative"))
    difference = next(filter(None, (_difference(number, bodies) for number, bodies in every.items())), None)
    drafted = [body["stats"] for bodies in every.values() for body in bodies.get("speculative", ())[1:]]
    fast, slow = speculative and speculative["median"], plain and plain["median"]
    return {
        "tokens": sum(len(bodies["plain"][0]["tokens"]) for bodies in every.values()),
        "plain": plain,
        "speculative": speculative,
        "ratio": fast / slow if fast and slow else None,
        "identical": difference is None,
        "first_difference": difference,
        "acceptance": acceptance(drafted) if drafted else None,
    }


def _speed(every: Mapping[int, Bodies], kind: str) -> dict[str, Any] | None:
    """Tokens a second of each run that counts, over all prompts; the first token of each is the prefill's."""
    series = [bodies[kind][1:] for bodies in every.values() if kind in bodies]
    if not series:
        return None
    rates = []
    for bodies in zip(*series, strict=True):
        seconds = sum(body["stats"]["decode_seconds"] for body in bodies)
        tokens = sum(len(body["tokens"]) - 1 for body in bodies)
        rates.append(tokens / seconds if tokens and seconds else None)
    known = [rate for rate in rates if rate is not None]
    return {
        "median": median(known) if known else None,
        "slowest": min(known, default=None),
        "fastest": max(known, default=None),
        "runs": rates,
    }


def acceptance(reports: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The rounds of several `Stats.report()` together, summed."""
    histogram, widths = Counter[int](), Counter[int]()
    for report in reports:
        histogram.update({int(accepted): times for accepted, times in report["acceptance_histogram"].items()})
        widths.update({int(rows): times for rows, times in report["effective_block_sizes"].items()})
    return stats.acceptance(widths, histogram)


def _difference(number: int, bodies: Bodies) -> dict[str, Any] | None:
    """Where a run's tokens first are not those of the first plain run; None where all are the same."""
    expected = bodies["plain"][0]["tokens"]
    for kind in sorted(bodies, reverse=True):
        for body in bodies[kind]:
            pairs = enumerate(zip_longest(expected, body["tokens"]))
            found = next(((position, *pair) for position, pair in pairs if pair[0] != pair[1]), None)
            if found is not None:
                names = ("position", "expected", "found")
                return {"prompt": number, "run": kind, **dict(zip(names, found, strict=True))}
    return None


def _draft(every: Sequence[Bodies]) -> dict[str, Any] | None:
    if "speculative" not in every[0]:
        return None
    first = every[0]["speculative"][0]["stats"]
    return {
        "kind": first["draft_kind"],
        "block_size": first["block_size"],
        "block_size_from": first["block_size_from"],
    }


def _findings(every: Sequence[Bodies], engaged: bool, detail: str) -> list[Finding]:
    """That there was no speculation to measure, or that it ended early."""
    if not engaged:
        return [Finding("BENCH-DECLINED", "warning", f"only plain decoding was measured: {detail}")]
    errors = {
        body["stats"]["draft_error"]: number
        for number, bodies in reversed(list(enumerate(every, 1)))
        for body in bodies["speculative"]
        if body["stats"]["draft_error"] is not None
    }
    return [
        Finding(
            "BENCH-DRAFTER-FAILED",
            "warning",
            f"prompt {number}: the drafter failed and the rest was decoded plainly: {error}",
        )
        for error, number in errors.items()
    ]
