"""Time and peak memory of split-mtp, beside `cp` of the same bytes and the splitter of mlx-vlm, in one run.

    python benchmarks/split.py                              # both heads, all modes; 10 GB of disk, 40 minutes
    python benchmarks/split.py --heads 2.56GB --modes bf16 --no-peer        # against cp only: 2 minutes
    python benchmarks/split.py --scale 0.05 --runs 1 --no-peer              # a quick look at everything

Each split is a whole process: start of the interpreter, plan, read-back and checks included. The contenders take
turns, and what they wrote is removed before the next one, so that all meet the same machine. "fsync" is with
everything on the disk, which mlx-vlm never asks for. Best and median are shown: other work on the machine makes a run
slower, and never faster.

mlx-vlm is installed into an environment of its own. Its mxfp4 takes minutes and its nvfp4 runs out of memory, so they
are left out unless --peer-modes names them; a run that is killed is told as such.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from big_checkpoint import HEADS, LAYERS, config, head_shapes, machine

__all__ = ["LAYERS", "config", "head_shapes", "machine"]

PEER = "mlx-vlm==0.7.10"
MODES = {
    "bf16": [],
    "affine4": ["--q-bits", "4"],
    "affine8": ["--q-bits", "8"],
    "mxfp4": ["--q-mode", "mxfp4"],
    "mxfp8": ["--q-mode", "mxfp8"],
    "nvfp4": ["--q-mode", "nvfp4"],
}
OURS = "import os, sys; from draftpair.cli import main; main(sys.argv[1:])"
WITHOUT_FSYNC = OURS.replace("from", "os.fsync = lambda fd: None; from", 1)
SETTLED_BYTES = 7 << 30


@dataclass
class Runs:
    """The runs of one contender: seconds of each, the highest peak of memory, and how a failed one ended."""

    seconds: list[float] = field(default_factory=list)
    peak_mib: float = 0.0
    failure: str | None = None

    @property
    def best(self) -> float | None:
        """The fastest run."""
        return min(self.seconds, default=None)

    @property
    def median(self) -> float | None:
        """The middle run."""
        return statistics.median(self.seconds) if self.seconds else None

    def as_json(self) -> dict[str, Any]:
        """What --json prints of it."""
        return {
            "best": self.best,
            "median": self.median,
            "seconds": self.seconds,
            "peak_mib": round(self.peak_mib) or None,
            "failure": self.failure,
        }


class Peaks(threading.Thread):
    """Adds up the peak resident memory of a process and its children, as Linux tells it.

    Pages that they share count for each of them, so it is a bound from above.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self._peaks, self._over = pid, dict[int, int](), threading.Event()

    def run(self) -> None:
        """Looks every 20 ms until `total_mib` is called."""
        while not self._over.wait(0.02):
            for pid in (self._pid, *self._children()):
                self._peaks[pid] = max(self._peaks.get(pid, 0), self._peak_kib(pid))

    def total_mib(self) -> float:
        """The sum of the peaks, 0 where the system does not tell."""
        self._over.set()
        self.join()
        return sum(self._peaks.values()) / 1024

    def _children(self) -> list[int]:
        try:
            return [
                int(pid) for pid in Path(f"/proc/{self._pid}/task/{self._pid}/children").read_text().split()
            ]
        except OSError:
            return []

    def _peak_kib(self, pid: int) -> int:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")), 0)


def run(command: list[str], into: Runs, flush: Path | None, timeout: float) -> None:
    """One run of a contender; `flush` is a folder or file that is put on the disk, within the time."""
    settle()
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    peaks = Peaks(process.pid)
    peaks.start()
    try:
        _, told = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        into.failure = f"not done after {timeout:.0f} s"
        return
    finally:
        into.peak_mib = max(into.peak_mib, peaks.total_mib())
    if flush is not None:
        for path in (flush, *flush.glob("*")):
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
    seconds = time.perf_counter() - begin
    if process.returncode < 0:
        into.failure = f"killed by signal {-process.returncode} after {seconds:.0f} s"
    elif process.returncode:
        into.failure = f"exit code {process.returncode}: {told.decode(errors='replace').strip()[-200:]}"
    else:
        into.seconds.append(seconds)


def settle() -> None:
    """Lets the disk finish, and sees to it that free memory is really there.

    A virtual machine may give memory that is free to its host, and whoever takes it again first waits for the host.
    A process that takes some and ends leaves it for the contender.
    """
    os.sync()
    if sys.platform != "linux":
        return
    pid = os.fork()
    if pid == 0:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
        mmap.mmap(
            -1,
            min(SETTLED_BYTES, available // 2),
            flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0x8000),
        )
        os._exit(0)
    os.waitpid(pid, 0)


def install_peer(folder: Path) -> str:
    """A Python with mlx-vlm, in an environment of its own."""
    print(f"installing {PEER}", file=sys.stderr)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    extra = ["mlx[cpu]"] if sys.platform == "linux" else []
    subprocess.run([python, "-m", "pip", "install", "-q", PEER, *extra], check=True)
    return python


def compare(
    source: Path,
    folder: Path,
    modes: list[str],
    peer: str | None,
    peer_modes: list[str],
    runs: int,
    limit: float,
) -> dict[str, dict[str, Runs]]:
    """The runs of every contender in every mode, by mode and contender."""
    results: dict[str, dict[str, Runs]] = {}
    output, same_bytes = folder / "drafter", folder / "bytes"
    split = ["split-mtp", "--model", str(source), "--output", str(output)]
    for mode in modes:
        found = results[mode] = {name: Runs() for name in ("ours", "ours, fsync", "peer", "cp", "cp, fsync")}
        if mode == "bf16":
            subprocess.run([sys.executable, "-c", OURS, *split], check=True, stdout=subprocess.DEVNULL)
            (output / "model.safetensors").rename(same_bytes)
        commands: list[tuple[str, list[str], Path | None]] = [
            ("ours", [sys.executable, "-c", WITHOUT_FSYNC, *split, *MODES[mode]], None),
            ("ours, fsync", [sys.executable, "-c", OURS, *split, *MODES[mode]], None),
        ]
        if mode == "bf16":
            copy = ["cp", str(same_bytes), str(output)]
            commands += [("cp", copy, None), ("cp, fsync", copy, output)]
        if peer is not None and mode in peer_modes:
            args = ["--model", str(source), "--output", str(output), *MODES[mode]]
            commands.append(("peer", [peer, "-m", "mlx_vlm.split_mtp", *args], None))
        for _ in range(runs):
            for name, command, flush in commands:
                remove(output)
                if found[name].failure is None:
                    run(command, found[name], flush, limit)
        remove(output)
        print(f"{mode} done", file=sys.stderr)
    same_bytes.unlink(missing_ok=True)
    return results


def remove(path: Path) -> None:
    """Removes a folder or a file, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def table(results: dict[str, dict[str, Runs]]) -> str:
    """Best and median seconds of each contender, and the ratios of the best."""
    head = (
        "mode",
        "no fsync",
        "fsync",
        "peak MiB",
        "mlx-vlm",
        "its MiB",
        "times faster",
        "cp",
        "speed of cp",
    )
    rows = [head]
    for mode, found in results.items():
        ours, peer, copy = found["ours"], found["peer"], found["cp"]
        flushed = found["ours, fsync"]
        rows.append(
            (
                mode,
                _seconds(ours),
                _seconds(flushed),
                f"{max(ours.peak_mib, flushed.peak_mib):.0f}",
                _seconds(peer),
                f"{peer.peak_mib:.0f}" if peer.peak_mib else "",
                _ratio(peer.best, ours.best),
                _seconds(copy),
                _ratio(copy.best, ours.best),
            )
        )
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def _seconds(runs: Runs) -> str:
    if runs.failure:
        return runs.failure
    return f"{runs.best:.2f} ({runs.median:.2f})" if runs.seconds else ""


def _ratio(other: float | None, ours: float | None) -> str:
    return f"{other / ours:.2f}" if other and ours else ""


def main() -> None:
    """Make the checkpoints in processes of their own, run the contenders, print a table for each head."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", nargs="*", choices=HEADS, default=list(HEADS))
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--scale", type=float, default=1.0, help="factor for vocabulary and experts")
    parser.add_argument("--runs", type=int, default=5, help="runs of each contender")
    parser.add_argument("--no-peer", action="store_true", help="leave mlx-vlm out")
    parser.add_argument("--peer-python", metavar="PATH", help="a Python that has mlx-vlm already")
    parser.add_argument(
        "--peer-modes", nargs="*", choices=MODES, default=["bf16", "affine4", "affine8", "mxfp8"]
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for one run of anybody")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")
    options = parser.parse_args()
    report: dict[str, Any] = {"machine": machine(), "heads": {}}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        peer = None if options.no_peer else options.peer_python or install_peer(folder / "peer")
        for head in options.heads:
            source = folder / "source"
            make = [str(source), "--head", head, "--scale", str(options.scale)]
            subprocess.run(
                [sys.executable, str(Path(__file__).with_name("big_checkpoint.py")), *make], check=True
            )
            results = compare(
                source, folder, options.modes, peer, options.peer_modes, options.runs, options.timeout
            )
            shutil.rmtree(source)
            report["heads"][head] = {
                mode: {who: runs.as_json() for who, runs in found.items()} for mode, found in results.items()
            }
            if not options.json:
                print(f"head of {head}: seconds as best (median)\n{table(results)}\n")
    print(json.dumps(report, indent=2) if options.json else report["machine"])


if __name__ == "__main__":
    main()
