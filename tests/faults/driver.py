"""Runs the command line in forked processes, with faults on order.

It is started once and imports everything, so that a run costs no more than its own work, and a hundred of them
can be killed. A line of JSON on stdin holds a list of runs, which start at the same moment; a line on stdout
answers with what became of each.

A run has `args`, and perhaps
- `signals`: pairs of seconds after the start and a signal's number;
- `roots`: folders below which its calls on files are counted, and named in the answer under `calls`;
- `faults`: names of such calls, each with Python code that is run right before the call is made;
- `powerless`: true for a run that permission bits bind, whoever runs the tests.

A call's name is what is called, on which file, and for the how many-th time; the part of a temporary folder's
name that is random is left out.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import resource
import selectors
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, NoReturn

from draftpair import cli

Run = dict[str, Any]

# Of what Python announces, what touches files.
MAKE_THE_SECOND = ("os.rename", "os.link", "os.symlink")
EVENTS = (
    *MAKE_THE_SECOND,
    *("open", "os.listdir", "os.scandir", "os.mkdir", "os.rmdir", "os.remove"),
    *("os.chmod", "os.utime", "os.truncate", "shutil.rmtree", "fcntl.flock"),
)
# Loaded for one purpose only: the system's exchange of two folders.
EXCHANGE = "ctypes.dlopen"
# What Python does not announce.
ON_DESCRIPTORS = (
    *("read", "pread", "write", "writev", "pwrite", "pwritev", "posix_fallocate"),
    *("sendfile", "copy_file_range", "fsync", "fdatasync"),
)
# A run that takes so many seconds waits for something that never comes: it is killed, and fails its test.
PATIENCE = 60
RANDOM = re.compile(r"-[0-9a-f]{12}\b")


class Watch:
    """Counts a run's calls on files below some folders, and lets something happen at some of them."""

    def __init__(self, roots: list[str], faults: dict[str, str]) -> None:
        self.calls: list[str] = []
        self._roots = roots
        self._faults = faults
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._off = False

    def start(self) -> None:
        sys.addaudithook(self._announced)
        for name in ON_DESCRIPTORS:
            if hasattr(os, name):
                setattr(os, name, self._counting(name, getattr(os, name)))

    def stop(self) -> None:
        self._off = True

    def _announced(self, event: str, args: tuple[Any, ...]) -> None:
        if self._off or (event not in EVENTS and event != EXCHANGE):
            return
        which = args[1 if event in MAKE_THE_SECOND else 0] if args else None
        path = os.fsdecode(which) if isinstance(which, (str, bytes, os.PathLike)) else None
        if event == "open" and path is None:
            return  # a descriptor is open already
        if path is not None and os.path.isabs(path):
            root = next((root for root in self._roots if (path + os.sep).startswith(root + os.sep)), None)
            if root is None:
                return
            name = os.path.relpath(path, root)
        else:
            name = path or ""  # a removal goes by descriptors and names
        if event == "open" and args[2] & os.O_CREAT:
            event = "create"
        self._happens(f"{event} {RANDOM.sub('', name)}".rstrip(), path)

    def _counting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(fd: int, *args: Any, **options: Any) -> Any:
            self._happens(f"os.{name}", None)
            # A flush costs time, and is of no matter to what ends with a process.
            return None if "sync" in name else call(fd, *args, **options)

        return counted

    def _happens(self, what: str, path: str | None) -> None:
        if self._off:
            return
        with self._lock:
            self._seen[what] += 1
            call = f"{what} {self._seen[what]}"
            self.calls.append(call)
        if call in self._faults:
            self._off = True
            try:
                exec(self._faults[call], {"os": os, "resource": resource, "time": time, "path": path})
            finally:
                self._off = False


def give_up_power() -> None:
    """Lets permission bits bind this process, as they bind a user's already, and root's when it has no capability."""
    if os.geteuid() != 0:
        return
    version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
    none = (ctypes.c_uint32 * 6)()
    if ctypes.CDLL(None, use_errno=True).capset(version_3, none) != 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be given up")


def become(run: Run, gate: tuple[int, int], outlets: list[int]) -> NoReturn:
    """The life of a forked process: that of the command line's own."""
    out, err, told = outlets
    os.dup2(out, 1)
    os.dup2(err, 2)
    if run.get("powerless"):
        give_up_power()
    watch = Watch(run.get("roots", []), run.get("faults", {}))
    os.close(gate[1])
    os.read(gate[0], 1)  # ends when the driver closes the other end
    if "roots" in run:
        watch.start()
    try:
        cli.main(run["args"])
    except SystemExit as end:
        watch.stop()
        os.write(told, json.dumps(watch.calls).encode())
        if "signals" in run:
            raise
        # Taking the interpreter apart costs more than most runs.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(end.code or 0))
    sys.exit("the command line returned")


def start(run: Run, gate: tuple[int, int]) -> tuple[int, list[int]]:
    """A process that waits at the gate, and where its stdout, its stderr and its calls can be read."""
    pipes = [os.pipe() for _ in range(3)]
    gc.freeze()  # what was imported is the same in all, and stays in pages that they share
    process = os.fork()
    if process == 0:
        become(run, gate, [inlet for _, inlet in pipes])
    for _, inlet in pipes:
        os.close(inlet)
    return process, [outlet for outlet, _ in pipes]


def run_together(runs: list[Run]) -> list[dict[str, Any]]:
    """What became of each run: its exit code (minus a signal's number), what it said, its seconds and calls."""
    gate = os.pipe()
    started = [start(run, gate) for run in runs]
    for end in gate:
        os.close(end)
    begin = time.monotonic()
    due = sorted(
        (begin + after, number, process)
        for run, (process, _) in zip(runs, started, strict=True)
        for after, number in (*run.get("signals", ()), (PATIENCE, signal.SIGKILL))
    )
    said = {outlet: b"" for _, outlets in started for outlet in outlets}
    ended: dict[int, float] = {}
    with selectors.DefaultSelector() as selector:
        for outlet in said:
            selector.register(outlet, selectors.EVENT_READ)
        while selector.get_map():
            left = max(0.0, due[0][0] - time.monotonic()) if due else None
            for key, _ in selector.select(left):
                data = os.read(key.fd, 1 << 16)
                said[key.fd] += data
                if not data:
                    ended[key.fd] = time.monotonic()
                    selector.unregister(key.fd)
            while due and due[0][0] <= time.monotonic():
                _, number, process = due.pop(0)
                os.kill(process, number)  # not waited for yet, so the number is still this process's
    outcomes = []
    for process, outlets in started:
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        out, err, told = (said[outlet].decode() for outlet in outlets)
        seconds = max(ended[outlet] for outlet in outlets) - begin
        outcomes.append(
            {"code": code, "out": out, "err": err, "seconds": seconds, "calls": json.loads(told or "[]")}
        )
        for outlet in outlets:
            os.close(outlet)
    return outcomes


def main() -> None:
    """Answers requests until there are no more."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        if "warm" in request:
            answer: Any = [cli.run(args) for args in request["warm"]]
        else:
            answer = run_together(request["runs"])
        channel.write(json.dumps(answer) + "\n")
        channel.flush()


if __name__ == "__main__":
    main()
