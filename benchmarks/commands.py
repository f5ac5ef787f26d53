"""Whole-process time of the commands that look: `--help`, `inspect`, `validate`.

They look at a checkpoint with the true shapes of GLM-4.7-Flash: 48 shards, 62 GB, 9,700 tensors, and a
154,880-entry tokenizer. The matrices of its decoder are holes in sparse files; norms and the head have numbers.

    pip install . && python benchmarks/commands.py [--runs 7]

An editable install is slower to start: Python may have to compile the sources at each run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from split import LAYERS, config, head_shapes, machine

from draftpair.checkpoint import open_checkpoint
from draftpair.checkpoint.writer import Output, encode_header

SHARDS = 48


def trunk_shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes outside of the head: a decoder layer has the head layer's block."""
    vocab, experts = 154880, 64
    outer = ("embed_tokens.", "enorm.", "hnorm.", "eh_proj.", "shared_head.")
    block = [(name, shape) for name, shape in head_shapes(experts, vocab) if not name.startswith(outer)]
    yield "model.embed_tokens.weight", (vocab, 2048)
    for layer in range(LAYERS):
        for name, shape in block:
            if layer or not name.startswith("mlp."):
                yield f"model.layers.{layer}.{name}", shape
    for name, shape in (("gate", (10240, 2048)), ("up", (10240, 2048)), ("down", (2048, 10240))):
        yield f"model.layers.0.mlp.{name}_proj.weight", shape
    yield "model.norm.weight", (2048,)
    yield "lm_head.weight", (vocab, 2048)


def all_outputs() -> list[Output]:
    head = [(f"model.layers.{LAYERS}.{name}", shape) for name, shape in head_shapes(64, 154880)]
    return [
        Output(name, "F32" if name.endswith("correction_bias") else "BF16", shape)
        for name, shape in [*trunk_shapes(), *head]
    ]


def write_sparse(folder: Path) -> int:
    """The checkpoint, its data a hole; returns the bytes of all tensors."""
    folder.mkdir()
    outputs = all_outputs()
    share, weight_map, total = len(outputs) / SHARDS, {}, sum(output.nbytes for output in outputs)
    for shard in range(SHARDS):
        own = outputs[round(shard * share) : round((shard + 1) * share)]
        name = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        header = encode_header(own, {"format": "pt"})
        (folder / name).write_bytes(header)
        os.truncate(folder / name, len(header) + sum(output.nbytes for output in own))
        weight_map |= dict.fromkeys((output.name for output in own), name)
    fill(folder)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config(1.0)))
    vocab = {f"token {number}": number for number in range(154880)}
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"type": "BPE", "vocab": vocab, "merges": []}})
    )
    return total


def fill(folder: Path) -> None:
    """Numbers where validate looks for them: gains around 1 in every norm, and random ones in the head."""
    numbers = np.random.default_rng(0)
    block = (numbers.integers(0, 1 << 16, 1 << 22, "<u2") & np.uint16(0xBFFF)).tobytes()
    for tensor in open_checkpoint(folder).tensors.values():
        if tensor.name.endswith("norm.weight"):
            gains = 1 + 0.1 * numbers.standard_normal(tensor.shape[0], "f4")
            data = (gains.view("<u4") >> 16).astype("<u2").tobytes()
        elif tensor.name.startswith(f"model.layers.{LAYERS}."):
            data = (block * (tensor.nbytes // len(block) + 1))[: tensor.nbytes]
            if tensor.dtype == "F32":
                data = numbers.random(tensor.shape, "f4").tobytes()
        else:
            continue
        with (folder / tensor.file).open("r+b") as file:
            file.seek(tensor.begin)
            file.write(data)


def measure(commands: dict[str, list[str]], runs: int) -> dict[str, list[float]]:
    """Seconds of whole processes, the commands in turn, so that a slow minute of the machine slows all of them."""
    seconds: dict[str, list[float]] = {shown: [] for shown in commands}
    for _ in range(runs + 1):
        for shown, command in commands.items():
            started = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds[shown].append(time.perf_counter() - started)
    return {shown: times[1:] for shown, times in seconds.items()}  # the first run warms the page cache


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=7)
    runs = parser.parse_args().runs
    with tempfile.TemporaryDirectory() as scratch:
        raw, drafter = Path(scratch, "raw"), Path(scratch, "drafter")
        total = write_sparse(raw)
        tool = [str(Path(sys.executable).with_name("draftpair"))]
        subprocess.run([*tool, "split-mtp", "-m", raw, "-o", drafter], check=True, stdout=subprocess.DEVNULL)
        print(f"{machine()}; {SHARDS} shards, {total / 1e9:.1f} GB, {len(all_outputs())} tensors")
        commands = {
            "draftpair --help": ["--help"],
            "draftpair inspect RAW": ["inspect", str(raw)],
            "draftpair validate RAW": ["validate", str(raw)],
            "draftpair validate RAW DRAFTER --no-values": ["validate", str(raw), str(drafter), "--no-values"],
            "draftpair validate RAW DRAFTER": ["validate", str(raw), str(drafter)],
        }
        print("| command | median | best |\n|---|---|---|")
        for shown, times in measure({k: [*tool, *v] for k, v in commands.items()}, runs).items():
            print(f"| `{shown}` | {statistics.median(times) * 1000:.0f} ms | {min(times) * 1000:.0f} ms |")


if __name__ == "__main__":
    main()
