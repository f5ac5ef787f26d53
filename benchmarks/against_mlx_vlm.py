"""draftpair and mlx-vlm 0.7.10 on the same pairs: same folders, block width, prompt and number of tokens, in turn.

Each engine runs in a process of its own. The two take turns, prompt by prompt, and which one begins alternates; the
other one waits meanwhile. Both decode greedily on the CPU and are timed alike: from the first token to the last, so
that the prompt is left out and taking it into the drafter counts. mlx-vlm is asked for `prefill_step_size=None`,
without which it gives its drafter the last prompt token alone. Pairs: Qwen3.5 with its head and Gemma 4 with an
assistant, at about 20 and 140 million parameters with random weights, whose drafts are nearly all wrong, and a
Qwen3.5 pair whose head is always right.

The table has tokens a second of each (medians), the ratio, and the drafts that each accepted a round. In bfloat16 the
two may round a near tie differently; `same tokens` says whether they did.

    pip install ".[cpu,run]"
    python benchmarks/against_mlx_vlm.py PYTHON [--tokens 48] [--runs 5] [--width 4] [--quick]

PYTHON is the interpreter of an environment with mlx-vlm 0.7.10 and the same MLX. `--quick` leaves out the large
pairs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parent.parent
Turn = Callable[[list[int], int, int], dict[str, Any]]
"""Prompt, tokens, width -> the tokens, seconds from the first to the last, rounds, drafts accepted."""


def timed(tokens: Iterator[list[int]]) -> tuple[list[int], float]:
    """All tokens, and the seconds after the first ones."""
    found = list(next(tokens))
    started = time.perf_counter()
    for group in tokens:
        found += group
    return found, time.perf_counter() - started


def draftpair_turns(target: Path, drafter: Path, family: str, dtype: str) -> Turn:
    """Through `draftpair.runtime.loop`."""
    sys.path.insert(0, str(ROOT))
    from draftpair.runtime.loop import Request, generate
    from draftpair.runtime.sampling import Sampler
    from draftpair.runtime.stats import Stats
    from draftpair.runtime.width import Fixed
    from fixtures.pairs import load

    model, head = load(target, drafter, family=family, dtype=dtype)

    def turn(prompt: list[int], count: int, width: int) -> dict[str, Any]:
        request, stats = Request(prompt, Sampler(model.vocab_size), count), Stats()
        tokens, seconds = timed(iter(generate(model, head, request, Fixed(width), stats)))
        report = stats.report()
        return {
            "tokens": tokens,
            "seconds": seconds,
            "rounds": report["rounds"],
            "accepted": report["accepted"],
        }

    return turn


def mlx_vlm_turns(target: Path, drafter: Path, family: str, dtype: str) -> Turn:
    """Through mlx-vlm's `generate_step`."""
    import mlx.core as mx
    from mlx_vlm.generate.ar import generate_step
    from mlx_vlm.speculative.drafters import load_drafter, validate_drafter_compatibility
    from mlx_vlm.speculative.utils import speculative_stats_since, speculative_stats_snapshot
    from mlx_vlm.utils import load_model

    model = load_model(target)
    head, kind = load_drafter(str(drafter))
    validate_drafter_compatibility(model, head, kind)
    for network in (model, head):
        network.set_dtype(getattr(mx, dtype))
        mx.eval(network.parameters())

    def turn(prompt: list[int], count: int, width: int) -> dict[str, Any]:
        head.config.block_size = width  # a request for more than this is not followed from the first round on
        before = speculative_stats_snapshot(head)
        steps = generate_step(
            mx.array([prompt]),
            model,
            None,
            None,
            max_tokens=count,
            temperature=0.0,
            prefill_step_size=None,
            draft_model=head,
            draft_kind=kind,
            draft_block_size=width,
        )
        tokens, seconds = timed([int(token)] for token, _ in steps)
        rounds, accepted, _ = speculative_stats_since(head, before)
        return {"tokens": tokens, "seconds": seconds, "rounds": rounds, "accepted": accepted}

    return turn


ENGINES = {"draftpair": draftpair_turns, "mlx-vlm": mlx_vlm_turns}


def work(engine: str, target: str, drafter: str, family: str, dtype: str) -> None:
    """A process of one engine: says what it is, then answers each line of JSON with one."""
    from importlib import metadata

    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    answers, sys.stdout = sys.stdout, sys.stderr  # what a library prints is no answer
    turn = ENGINES[engine](Path(target), Path(drafter), family, dtype)
    print(json.dumps({name: metadata.version(name) for name in (engine, "mlx")}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(turn(*json.loads(line))), file=answers, flush=True)


class Engine:
    """A process that runs one pair on request."""

    def __init__(self, python: str, engine: str, *what: str) -> None:
        command = [python, __file__, "--engine", engine, *what]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions: dict[str, str] = self._answer()

    def turn(self, *what: Any) -> dict[str, Any]:
        """One generation."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Ends the process, which has nothing left to do."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"{self._process.args} ended with {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def compare(
    options: argparse.Namespace, name: str, pair: Any, dtype: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """A row of the table, and the versions of both engines."""
    from draftpair.runtime.bench import in_turn

    what = (str(pair.target), str(pair.drafter), pair.family, dtype)
    with (
        closing(Engine(sys.executable, "draftpair", *what)) as ours,
        closing(Engine(options.python, "mlx-vlm", *what)) as theirs,
    ):
        engines = {"draftpair": ours, "mlx-vlm": theirs}
        asked = (list(pair.prompt), options.tokens, options.width)
        turns = in_turn(list(engines), options.runs, lambda kind: engines[kind].turn(*asked))
        assert ours.versions["mlx"] == theirs.versions["mlx"], (ours.versions, theirs.versions)
        versions = {**ours.versions, **theirs.versions}
    speeds = {
        kind: median((len(turn["tokens"]) - 1) / turn["seconds"] for turn in found[1:])
        for kind, found in turns.items()
    }
    last = {kind: found[-1] for kind, found in turns.items()}
    row = {
        "pair": name,
        "parameters": f"{pair.parameters / 1e6:.0f} M",
        "dtype": dtype,
        "width": options.width,
        **{f"{kind} tokens/s": speed for kind, speed in speeds.items()},
        "ratio": speeds["draftpair"] / speeds["mlx-vlm"],
        **{f"{kind} accepted a round": turn["accepted"] / turn["rounds"] for kind, turn in last.items()},
        "same tokens": last["draftpair"]["tokens"] == last["mlx-vlm"]["tokens"],
    }
    return row, versions


def main() -> None:
    """As an engine, answer; else compare. Exit 1 when draftpair is slower on any pair."""
    if sys.argv[1:2] == ["--engine"]:
        work(*sys.argv[2:])
        return
    from big_pairs import COPIES, SMALL, SMALL_ASSISTED, gemma, qwen
    from figures import show

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("python")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--width", type=int, default=4)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small, large, always = (Path(folder, name) for name in ("small", "large", "always"))
        pairs = {"qwen3_5_mtp": qwen(small, SMALL), "gemma4_assistant": gemma(small, SMALL_ASSISTED)}
        measured = list(pairs.items())
        if not options.quick:
            measured += [("qwen3_5_mtp", qwen(large)), ("gemma4_assistant", gemma(large))]
            measured += [("qwen3_5_mtp, always right", qwen(always, COPIES))]
        found = [
            compare(options, name, pair, dtype)
            for name, pair in measured
            for dtype in ("float32", "bfloat16")
        ]
    rows = [row for row, _ in found]
    show("against_mlx_vlm", rows, "mlx-lm", engines=found[0][1], tokens=options.tokens, runs=options.runs)
    sys.exit(0 if all(row["ratio"] >= 1 for row in rows) else 1)


if __name__ == "__main__":
    main()
