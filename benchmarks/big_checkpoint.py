"""Synthetic checkpoints with the true names of GLM-4.7-Flash: a head of random finite bfloat16 values in six shards.

The trunk is there by name only, as holes in sparse files, but for its norms.

    python benchmarks/big_checkpoint.py FOLDER [--head 2.56GB] [--scale 1.0]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

SHARDS = 6
LAYERS = 47


class Size(NamedTuple):
    """What decides how large a head is."""

    experts: int
    vocab: int
    moe: int


HEADS = {"2.56GB": Size(64, 154880, 1536), "1.1GB": Size(64, 51200, 768)}
"""The head of GLM-4.7-Flash in its true size, and one with a third of the vocabulary and half the experts' width."""


def scaled(size: Size, scale: float) -> Size:
    """A size with vocabulary and experts scaled."""
    return Size(max(1, int(size.experts * scale)), max(64, int(size.vocab * scale)), size.moe)


def config(scale: float, size: Size = HEADS["2.56GB"]) -> dict[str, object]:
    """The published config.json, with vocabulary and experts scaled."""
    experts, vocab, moe = scaled(size, scale)
    return {
        "model_type": "glm4_moe_lite",
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "kv_lora_rank": 512,
        "moe_intermediate_size": moe,
        "n_routed_experts": experts,
        "n_shared_experts": 1,
        "num_attention_heads": 20,
        "num_experts_per_tok": min(4, experts),
        "num_hidden_layers": LAYERS,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "rope_theta": 1000000.0,
        "v_head_dim": 256,
        "vocab_size": vocab,
    }


def head_shapes(experts: int, vocab: int, moe: int = 1536) -> Iterator[tuple[str, tuple[int, ...]]]:
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
        for name, shape in (("gate", (moe, 2048)), ("up", (moe, 2048)), ("down", (2048, moe))):
            yield f"mlp.{owner}.{name}_proj.weight", shape
    yield "shared_head.head.weight", (vocab, 2048)


def make_checkpoint(folder: Path, scale: float, size: Size = HEADS["2.56GB"]) -> None:
    """Write the checkpoint: tensors go to the shards in turn, whole."""
    import numpy as np

    folder.mkdir()
    experts, vocab, moe = scaled(size, scale)
    (folder / "config.json").write_text(json.dumps(config(scale, size)))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    tensors = {f"model.layers.{LAYERS}.{name}": shape for name, shape in head_shapes(experts, vocab, moe)}
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
                part = block[begin : begin + min(size, 1 << 20)]
                file.write(part)
                size, begin = size - len(part), (begin + len(part)) % len(block)
        file.truncate(len(text) + 8 + end)


def machine() -> str:
    """Processor, cores and versions, for the table's last line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line
        ]
        model = names[0] if names else model
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("numpy", "draftpair"))
    system = f"{platform.system()}, Python {platform.python_version()}"
    return f"{model}, {os.cpu_count()} cores, {system}, {versions}"


def main() -> None:
    """Make one checkpoint."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--head", choices=HEADS, default="2.56GB")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for vocabulary and experts")
    options = parser.parse_args()
    make_checkpoint(options.folder, options.scale, HEADS[options.head])


if __name__ == "__main__":
    sys.exit(main())
