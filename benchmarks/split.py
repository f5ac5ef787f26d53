"""Time and peak memory of split-mtp on a synthetic checkpoint with the true GLM-4.7-Flash layer shapes.

Each split is a whole process, read-back and fsync included. The head (2.56 GB) holds random finite
bfloat16 values in six shards; the trunk is there by name only, as holes in sparse files, but for its norms.

    python benchmarks/split.py                 # the real size; needs 6 GB of disk
    python benchmarks/split.py --scale 0.1     # a quick look: vocabulary and experts at a tenth
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
from collections.abc import Iterator
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


def split_command(source: Path, output: Path, bits: int) -> list[str]:
    """The command line of one split."""
    command = [sys.executable, "-m", "draftpair", "split-mtp", "-m", str(source), "-o", str(output)]
    return [*command, *(["--q-bits", str(bits)] if bits else [])]


def measure(command: list[str]) -> tuple[float, float, float]:
    """Seconds of wall clock, seconds of processor, and peak MiB of one process."""
    begin = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"failed with {process.returncode}: {command}")
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / unit


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
    """Build the checkpoint in a process of its own, split it, print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scale", type=float, default=1.0, help="factor for vocabulary and experts")
    parser.add_argument("--runs", type=int, default=3, help="splits of each kind; the median is shown")
    parser.add_argument("--bits", type=int, nargs="*", default=[0, 4], help="bit widths, 0 for none")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.make:
        make_checkpoint(options.make, options.scale)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        source, output = Path(folder, "source"), Path(folder, "drafter")
        make = [sys.executable, __file__, "--scale", str(options.scale), "--make", str(source)]
        subprocess.run(make, check=True)
        print(f"{'split':<8}{'seconds':>9}{'cpu s':>8}{'peak MiB':>10}{'output MB':>11}")
        for bits in options.bits:
            results = []
            for _ in range(options.runs):
                shutil.rmtree(output, ignore_errors=True)
                results.append(measure(split_command(source, output, bits)))
            seconds, cpu, _ = (statistics.median(column) for column in zip(*results, strict=True))
            peak = max(result[2] for result in results)
            size = (output / "model.safetensors").stat().st_size / 1e6
            name = f"{bits}-bit" if bits else "bf16"
            print(f"{name:<8}{seconds:>9.1f}{cpu:>8.1f}{peak:>10.0f}{size:>11.0f}")
    print(machine())


if __name__ == "__main__":
    main()
