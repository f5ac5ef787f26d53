"""What speculation can bring on this machine: a pair whose head is always right, against plain decoding of its target.

A Qwen3.5-layout pair of about 140 million parameters in bfloat16, whose head is right by construction, decodes
greedily on the CPU in blocks of 4 rows (`--width`), in turn with plain decoding in the same dtype. Every draft is
accepted, so a round brings as many tokens as it has rows; the speed-up is what an ideal drafter of that size would
bring.

`break-even` is how often a draft has to be right for a round to cost no more than the tokens it brings cost plainly.
With s seconds a token plainly and r seconds a round of n rows, a round has to bring r / s tokens; drafts that are
each right with probability p bring (1 - p^n) / (1 - p), a draft counting only when all before it were right.
`break-even` is that p. `mean accepted` is the same as drafts accepted a round, r / s - 1.

    pip install ".[cpu,run]" && python benchmarks/copy_head.py [--width 4] [--tokens 64] [--runs 5] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
from big_pairs import COPIES, Pair, qwen
from figures import show

from draftpair.runtime.bench import in_turn
from fixtures.pairs import load, run


def measure(pair: Pair, options: argparse.Namespace) -> dict[str, Any]:
    """The row of the table."""
    target, drafter = load(pair.target, pair.drafter, family=pair.family, dtype=options.dtype)

    def turn(kind: str) -> dict[str, Any]:
        outcome = run(
            target,
            drafter if kind == "speculative" else None,
            pair.prompt,
            options.width,
            tokens=options.tokens,
        )
        return {"ids": outcome.ids, **outcome.stats}

    turns = in_turn(["plain", "speculative"], options.runs, turn)
    assert all(found["ids"] == turns["plain"][0]["ids"] for found in (*turns["plain"], *turns["speculative"]))
    plain, speculative = (
        median(found["tokens_per_second"] for found in turns[kind][1:]) for kind in ("plain", "speculative")
    )
    # Rounds near the token budget are narrower and the last token is decoded plainly; their share is small.
    rounds = turns["speculative"][0]["rounds"]
    round_seconds = median(found["decode_seconds"] / rounds for found in turns["speculative"][1:])
    needed = round_seconds * plain
    return {
        "parameters": f"{pair.parameters / 1e6:.0f} M",
        "dtype": options.dtype,
        "width": options.width,
        "plain tokens/s": plain,
        "speculative tokens/s": speculative,
        "speed-up": speculative / plain,
        "acceptance": turns["speculative"][0]["draft_acceptance_rate"],
        "round / token": needed,
        "break-even": break_even(needed, options.width),
        "mean accepted": needed - 1,
    }


def break_even(tokens: float, rows: int) -> float | None:
    """The acceptance p with 1 + p + ... + p^(rows - 1) = ``tokens``; None where no acceptance brings as many."""
    if tokens > rows:
        return None
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**power for power in range(rows)) < tokens else (low, middle)
    return high


def main() -> None:
    """Build the pair in a temporary folder and measure it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    with tempfile.TemporaryDirectory() as folder:
        row = measure(qwen(Path(folder), COPIES), options)
    show("copy_head", [row], "mlx-lm", tokens=options.tokens, runs=options.runs)


if __name__ == "__main__":
    main()
