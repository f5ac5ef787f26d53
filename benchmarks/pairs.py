"""Pairs a second of `draftpair validate --pairs`, on header-only checkpoints with published geometries.

Every target of `fixtures/published` with every drafter, the list begun again until it has 1,000 lines, each judged with
a report of its own. Sparse files: headers, indexes, configs and tokenizers are whole, weights are holes, so that values
are not looked at.

    pip install . && python benchmarks/pairs.py [--lines 1000] [--jobs 1 2]
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from big_checkpoint import machine

from fixtures.published import open_all


def write_list(folder: Path, lines: int) -> Path:
    """The checkpoints, and the list of pairs."""
    targets, drafters = open_all(folder)
    pairs = [
        {"target": str(target.root), "drafter": str(drafter.root)}
        for target in targets.values()
        for drafter in drafters.values()
    ]
    listed = folder / "pairs.jsonl"
    listed.write_text(
        "".join(json.dumps(pair) + "\n" for pair in itertools.islice(itertools.cycle(pairs), lines))
    )
    return listed


def main() -> None:
    """Measure once for each number of processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    tool = str(Path(sys.executable).with_name("draftpair"))
    with tempfile.TemporaryDirectory() as scratch:
        listed = write_list(Path(scratch), options.lines)
        print(machine())
        print("| processes | seconds | pairs a second | seconds of processor |\n|---|---|---|---|")
        for jobs in options.jobs:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            started = time.perf_counter()
            command = [tool, "validate", "--pairs", str(listed), "--no-values", "--jobs", str(jobs)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            seconds = time.perf_counter() - started
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            results = [json.loads(line) for line in done.stdout.splitlines()]
            assert len(results) == options.lines, done.returncode
            assert all(result["report"] for result in results)
            used = sum(getattr(after, kind) - getattr(before, kind) for kind in ("ru_utime", "ru_stime"))
            print(f"| {jobs} | {seconds:.1f} | {options.lines / seconds:.0f} | {used:.1f} |")


if __name__ == "__main__":
    main()
