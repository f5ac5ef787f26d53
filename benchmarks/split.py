"""Time and peak memory of split-mtp beside `cp` and mlx-vlm's splitter, on heads of GLM-4.7-Flash's shapes.

Each contender is a whole process; all of them take turns, in every round, on the same source, with the page cache warm
and nothing left to be written back. A head holds random finite bfloat16 values in six shards; the trunk is there by
name only, as holes in sparse files, but for its norms. Without fsync means that the process's fsync does nothing;
`cp` and the peer never flush. `cp` copies the bytes of the bf16 drafter.

    python benchmarks/split.py                     # heads of 1.1 and 2.56 GB; 12 GB of disk; installs the peer
    python benchmarks/split.py --scales 1 --modes bf16 mxfp4 --peer-modes --runs 5      # without the peer
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

SHARDS = 6
LAYERS = 47


def config(scale: float) -> dict[str, object]:
    """The published config.json, with vocabulary and experts scaled."""
    return {
        "model_type": "glm4_moe_lite",
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "kv_lora_rank": 512,
        "moe_intermediate_size": 1536,
        "n_routed_experts": max(1, int(64 * scale)),
        "n_shared_experts": 1,
        "num_attention_heads": 20,
        "num_experts_per_tok": 4,
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rope_theta": 1000000.0,
        "v_head_dim": 256,
        "vocab_size": max(64, int(154880 * scale)),
    }


def head_shapes(experts: int, vocab: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names below `model.layers.47.` and shapes, in file order."""
    yield "embed_tokens.weight", (vocab, 2048)
    for norm in ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm"):
        yield f"{norm}.weight", (2048,)
    yield "eh_proj.weight", (2048, 4096)
    yield "self_attn.q_a_proj.weight", (768, 2048)
    yield "self_attn.q_a_layernorm.weight", (768,)
    yield "self_attn.q_b_proj.weight", (20 * 256, 768)
    yield "self_attn.kv_a_proj_with_mqa.weight", (576, 2048)
    yield "self_attn.kv_a_layernorm.weight", (512,)
    yield "self_attn.kv_b_proj.weight", (20 * 448, 512)
    yield "self_attn.o_proj.weight", (2048, 20 * 256)
    yield "mlp.gate.weight", (experts, 2048)
    yield "mlp.gate.e_score_correction_bias", (experts,)
    for owner in (*(f"experts.{e}" for e in range(experts)), "shared_experts"):
        for name, shape in (("gate", (1536, 2048)), ("up", (1536, 2048)), ("down", (2048, 1536))):
            yield f"mlp.{owner}.{name}_proj.weight", shape
    yield "shared_head.head.weight", (vocab, 2048)


def make_checkpoint(folder: Path, scale: float) -> None:
    """Write the checkpoint: tensors go to the shards in turn, whole."""
    import numpy as np

    folder.mkdir()
    settings = config(scale)
    (folder / "config.json").write_text(json.dumps(settings))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    experts, vocab = int(str(settings["n_routed_experts"])), int(str(settings["vocab_size"]))
    tensors = {f"model.layers.{LAYERS}.{name}": shape for name, shape in head_shapes(experts, vocab)}
    tensors |= {f"model.layers.{n}.input_layernorm.weight": (2048,) for n in range(LAYERS)}
    tensors |= {"model.embed_tokens.weight": (vocab, 2048), "lm_head.weight": (vocab, 2048)}
    shards: list[dict[str, tuple[int, ...]]] = [{} for _ in range(SHARDS)]
    for place, (name, shape) in enumerate(tensors.items()):
        shards[place % SHARDS][name] = shape
    block = np.random.default_rng(0).integers(0, 1 << 16, 1 << 23, "<u2") & np.uint16(0xBFFF)
    files = [f"model-{n + 1:05}-of-{SHARDS:05}.safetensors" for n in range(SHARDS)]
    for file, shard in zip(files, shards, strict=True):
        write_shard(folder / file, shard, memoryview(block.tobytes()))
    where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def write_shard(path: Path, tensors: dict[str, tuple[int, ...]], block: memoryview) -> None:
    """Write one file; the trunk's matrices stay holes, the rest repeats `block` from varying places."""
    header, end, sizes = {}, 0, {}
    for name, shape in tensors.items():
        dtype = "F32" if name.endswith("e_score_correction_bias") else "BF16"
        sizes[name] = (4 if dtype == "F32" else 2) * int(shape[0]) * (int(shape[1]) if shape[1:] else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + sizes[name]]}
        end += sizes[name]
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for place, (name, size) in enumerate(sizes.items()):
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                file.seek(size, os.SEEK_CUR)
                continue
            begin = place * 4096 % len(block)
            while size:
                part = block[begin : begin + size]
                file.write(part)
                size, begin = size - len(part), 0
        file.truncate(len(text) + 8 + end)


MODES = {
    "bf16": [],
    "affine 4": ["--q-bits", "4"],
    "affine 8": ["--q-bits", "8"],
    "mxfp4": ["--q-mode", "mxfp4", "--q-bits", "4", "--q-group-size", "32"],
    "mxfp8": ["--q-mode", "mxfp8", "--q-bits", "8", "--q-group-size", "32"],
    "nvfp4": ["--q-mode", "nvfp4", "--q-bits", "4", "--q-group-size", "16"],
}
_WITHOUT_FSYNC = "import os; os.fsync = lambda fd: None; from draftpair.cli import main; main()"


@dataclass(frozen=True)
class Contender:
    """What is measured: a name, the mode it splits in, and its command but for the output."""

    name: str
    mode: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """Seconds of wall clock, seconds of processor and peak MiB of one process; `failed` is how it ended."""

    seconds: float
    processor: float
    peak: float
    failed: int


def contenders(source: Path, plain: Path, options: argparse.Namespace, peer: str | None) -> list[Contender]:
    """Every contender of one source; `plain` is a file of the bytes that `cp` copies."""
    found = [Contender("cp", "bf16", ("cp", str(plain)))]
    for mode in options.modes:
        tail = ("split-mtp", "-m", str(source), *MODES[mode], "-o")
        found.append(Contender("draftpair", mode, (sys.executable, "-m", "draftpair", *tail)))
        found.append(Contender("draftpair, no fsync", mode, (sys.executable, "-c", _WITHOUT_FSYNC, *tail)))
    for mode in options.peer_modes if peer else ():
        split = ("-m", "mlx_vlm.split_mtp", "--model", str(source), *MODES[mode], "--output")
        found.append(Contender("mlx-vlm", mode, (str(peer), *split)))
    return found


def measure(command: Sequence[str]) -> Result:
    """Runs one process."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return Result(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / unit, process.returncode)


def install_peer(folder: Path) -> str:
    """mlx-vlm 0.7.10 in an environment of its own; the Python of it."""
    python = str(folder / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [python, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, "mlx[cpu]==0.32.4", "mlx-lm==0.32.2", "requests", "pillow"], check=True)
    subprocess.run([*pip, "--no-deps", "mlx-vlm==0.7.10"], check=True)
    return python


def remove(path: Path) -> None:
    """Removes what a contender wrote, and waits until nothing is left to be written to disk."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    os.sync()


def race(fields: list[Contender], output: Path, runs: int) -> dict[Contender, list[Result]]:
    """All contenders in turn, `runs` times; one that failed once is not run again."""
    results: dict[Contender, list[Result]] = {contender: [] for contender in fields}
    for _ in range(runs):
        for contender, done in results.items():
            if not (done and done[-1].failed):
                done.append(measure((*contender.command, str(output))))
                remove(output)
    return results


def rows(results: Mapping[Contender, list[Result]]) -> Iterator[dict[str, object]]:
    """One row a contender; the ratios are of medians of the same mode, and of `cp` for what does not flush."""
    medians = {c: statistics.median(r.seconds for r in done) for c, done in results.items()}
    by_name = {(c.name, c.mode): seconds for c, seconds in medians.items() if not results[c][-1].failed}
    for contender, done in results.items():
        peer = by_name.get(("mlx-vlm", contender.mode))
        cp = by_name.get(("cp", contender.mode))
        yield {
            "contender": contender.name,
            "mode": contender.mode,
            "seconds": round(medians[contender], 2),
            "best": round(min(r.seconds for r in done), 2),
            "processor": round(statistics.median(r.processor for r in done), 2),
            "peak_mib": round(max(r.peak for r in done)),
            "of_peer": round(medians[contender] / peer, 2) if peer else None,
            "speed_of_cp": round(cp / medians[contender], 2) if cp else None,
            "failed": done[-1].failed or None,
        }


def table(found: list[dict[str, object]]) -> Iterator[str]:
    """The rows as text."""
    yield (
        f"{'contender':<21}{'mode':<10}{'seconds':>8}{'best':>7}{'cpu s':>7}{'peak MiB':>10}"
        f"{'time / peer':>13}{'speed / cp':>12}"
    )
    for row in found:
        line = (
            f"{row['contender']:<21}{row['mode']:<10}{row['seconds']:>8}{row['best']:>7}{row['processor']:>7}"
        )
        line += f"{row['peak_mib']:>10}{row['of_peer'] or '-':>13}{row['speed_of_cp'] or '-':>12}"
        yield line + (f"  failed with {row['failed']}" if row["failed"] else "")


def machine() -> str:
    """Processor, cores and versions, for the table's last line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("numpy", "mlx", "draftpair"))
    system = f"{platform.system()}, Python {platform.python_version()}"
    return f"{model}, {os.cpu_count()} cores, {system}, {versions}"


def main() -> None:
    """Build the checkpoints in processes of their own, let the contenders split them, print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scales", type=float, nargs="*", default=[0.43, 1.0], help="of vocabulary and experts"
    )
    parser.add_argument("--runs", type=int, default=3, help="rounds; medians are compared")
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument("--peer-modes", nargs="*", choices=MODES, default=["bf16", "affine 4", "affine 8"])
    parser.add_argument("--peer-python", help="a Python with mlx-vlm 0.7.10 (default: one is installed)")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make_checkpoint(options.make, options.scales[0])
        return
    report = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        peer = options.peer_python
        if options.peer_modes and not peer:
            peer = install_peer(folder / "peer")
        for scale in options.scales:
            source, plain = folder / "source", folder / "plain"
            make = [sys.executable, __file__, "--scales", str(scale), "--make", str(source)]
            subprocess.run(make, check=True)
            split = [
                sys.executable,
                "-m",
                "draftpair",
                "split-mtp",
                "-m",
                str(source),
                "-o",
                str(folder / "first"),
            ]
            subprocess.run(split, check=True, stdout=subprocess.DEVNULL)
            (folder / "first" / "model.safetensors").rename(plain)
            remove(folder / "first")
            fields = contenders(source, plain, options, peer)
            found = list(rows(race(fields, folder / "output", options.runs)))
            size = f"{plain.stat().st_size / 1e9:.2f} GB"
            report[size] = found
            print(f"head of {size}", *table(found), "", sep="\n", flush=True)
            remove(source)
            remove(plain)
    print(machine())
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "heads": report}, indent=2))


if __name__ == "__main__":
    main()
