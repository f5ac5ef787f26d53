"""How much of the time of speculative decoding is the loop's own: neither the target's forwards nor the drafter's.

A Qwen3.5-layout pair with random weights (about 140 million parameters, 12 layers, 16,384 tokens in the vocabulary)
decodes greedily on the CPU in float32 and in bfloat16, in blocks of 2, 3 and 4 rows. Nearly every draft is wrong, so
that there are as many rounds as tokens. Each row of the table is the median of some runs.

    forwards   seconds in `Target.verify`, `Drafter.draft` and `Drafter.accept`, and `Target.decode` for the last token,
               each evaluated before the clock stops
    rollback   seconds in `Target.rollback`
    rest       everything else between the first token and the last: draws, comparisons, statistics, the loop itself
    unwrapped  the decoding time of the same run without those clocks, in turn with the measured one

`overhead` is (rollback + rest) / (forwards + rollback + rest); the bound is 5 %.

    pip install ".[cpu,run]" && python benchmarks/loop_overhead.py [--tokens 24] [--runs 2]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from big_pairs import Pair, qwen
from figures import show

from fixtures.pairs import load, run

BOUND = 0.05
WIDTHS = (2, 3, 4)


class Clocked:
    """A target or drafter, some of whose methods are timed, each until what it returns is there."""

    def __init__(self, wrapped: Any, names: tuple[str, ...], seconds: Counter[str]) -> None:
        self._wrapped = wrapped
        for name in names:
            setattr(self, name, self._clocked(getattr(wrapped, name), name, seconds))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wrapped, name)

    @staticmethod
    def _clocked(method: Callable[..., Any], name: str, seconds: Counter[str]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.perf_counter()
            found = method(*args)
            mx.eval(found if isinstance(found, (tuple, mx.array)) else ())
            seconds[name] += time.perf_counter() - started
            return found

        return call


def measure(pair: Pair, dtype: str, width: int, tokens: int, runs: int) -> dict[str, Any]:
    """A row of the table."""
    target, drafter = load(pair.target, pair.drafter, family=pair.family, dtype=dtype)
    found: list[dict[str, float]] = []
    for number in range(runs + 1):
        seconds: Counter[str] = Counter()
        clocked = (
            Clocked(target, ("verify", "rollback", "decode"), seconds),
            Clocked(drafter, ("draft", "accept"), seconds),
        )
        unwrapped = run(target, drafter, pair.prompt, width, tokens=tokens)
        outcome = run(*clocked, pair.prompt, width, tokens=tokens)  # type: ignore[arg-type]
        assert outcome.ids == unwrapped.ids
        whole, rollback = outcome.stats["decode_seconds"], seconds.pop("rollback")
        forwards = seconds.total()
        if number:  # the first is for warming up
            found.append(
                {
                    "forwards": forwards,
                    "rollback": rollback,
                    "rest": whole - forwards - rollback,
                    "unwrapped": unwrapped.stats["decode_seconds"],
                    "overhead": 1 - forwards / whole,
                }
            )
    medians = {name: median(each[name] for each in found) for name in found[0]}
    stats = outcome.stats
    rounds = {"rounds": stats["rounds"], "accepted": stats["accepted"]}
    return {"dtype": dtype, "width": width, **rounds, **medians, "within 5 %": medians["overhead"] <= BOUND}


def main() -> None:
    """Exit 1 when a row is above the bound."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--runs", type=int, default=2)
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    with tempfile.TemporaryDirectory() as folder:
        pair = qwen(Path(folder))
        rows = [
            measure(pair, dtype, width, options.tokens, options.runs)
            for dtype in ("float32", "bfloat16")
            for width in WIDTHS
        ]
    show(
        "loop_overhead", rows, "mlx-lm", parameters=pair.parameters, tokens=options.tokens, runs=options.runs
    )
    sys.exit(0 if all(row["within 5 %"] for row in rows) else 1)


if __name__ == "__main__":
    main()
