"""Writes the quickstart's toy: a whole GLM-4.7-Flash checkpoint in small, that spells the alphabet.

True tensor names, a byte-level tokenizer, and a head that predicts what the target says next. The layers' tensors
come from the family's record, so the toy has what the record asks for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from draftpair.checkpoint import ConfigView
from draftpair.checkpoint.dtypes import from_float32
from draftpair.checkpoint.writer import Output, TensorFile
from draftpair.families import family
from draftpair.families.heads import source_names, wanted

FAMILY = "glm4_moe_lite_mtp"
END = 256  # the bytes are 0 to 255
CYCLE = b"abcdefghijklmnopqrstuvwxyz "
CONFIG: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 16,
    "v_head_dim": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 1.8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "partial_rotary_factor": 1.0,
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "eos_token_id": [END],
}
# Of the record's alternatives, those of the published checkpoint.
_CHOICES = (None, "query:low rank", "key-value up-projection:joined", "experts:separate")


def write_toy(folder: Path, with_head: bool) -> None:
    """A checkpoint folder of the toy, with or without its head: weights, config and tokenizer."""
    folder.mkdir(parents=True)
    tensors = dict(_tensors(with_head))
    outputs = [Output(name, "BF16", values.shape) for name, values in tensors.items()]
    with TensorFile(folder / "model.safetensors", outputs, {"format": "pt"}) as file:
        for name, values in tensors.items():
            file.write(name, 0, from_float32(values, "BF16"))
    for name, document in {"config.json": CONFIG, **tokenizer_files()}.items():
        (folder / name).write_text(json.dumps(document, indent=2), encoding="utf-8")


def _tensors(with_head: bool) -> Iterator[tuple[str, Any]]:
    """Names and float32 values. Layers add little to the residual stream, so it stays close to the embedding."""
    import numpy as np

    random = np.random.RandomState(0)
    embedding = random.standard_normal((CONFIG["vocab_size"], CONFIG["hidden_size"])).astype("f4")
    # Row t+1 of the output head is the embedding of the token t that comes before it.
    head = embedding[[_before(token) for token in range(len(embedding))]]
    yield "model.embed_tokens.weight", embedding
    yield "model.norm.weight", np.ones(CONFIG["hidden_size"], "f4")
    yield "lm_head.weight", head
    layers = CONFIG["num_hidden_layers"]
    for layer in range(layers + with_head):
        special = (
            {"embed_tokens.weight": embedding, "shared_head.head.weight": head} if layer == layers else None
        )
        yield from _layer(f"model.layers.{layer}.", special, random.standard_normal)


def _layer(
    prefix: str, special: dict[str, Any] | None, normal: Callable[..., Any]
) -> Iterator[tuple[str, Any]]:
    """The tensors of one layer by the family's record; only a head (``special`` given) has its outer tensors."""
    import numpy as np

    record, config = family(FAMILY), ConfigView(CONFIG)
    for rule in record.rules:
        outer = not any(".mtp_block." in output.name for output in rule.outputs)
        if rule.choice not in _CHOICES or rule.shape is None or not wanted(rule, record, config):
            continue
        if outer and special is None:
            continue
        shape = record.resolve(rule.shape, config)
        for name in source_names(rule, record, config):
            values = 0.02 * normal(shape).astype("f4")
            if len(shape) == 1:  # gains of exactly 1 are those of a model that was never trained
                values += 1
            if name == "eh_proj.weight":  # the embedding half passes through, the hidden half adds a little
                values[:, : shape[0]] += np.eye(shape[0], dtype="f4")
            yield prefix + name, (special or {}).get(name, values)


def _before(token: int) -> int:
    """The token that the toy follows with this one."""
    place = CYCLE.find(token) if token < END else -1
    return token if place < 0 else CYCLE[place - 1]


def tokenizer_files() -> dict[str, Any]:
    """A byte-level tokenizer without merges: one token a byte, and one that ends the text."""
    end = {"id": END, "content": "<end>", "special": True, "normalized": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{**end, **flags}],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {letter: byte for byte, letter in enumerate(byte_letters())},
                "merges": [],
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<end>",
            "model_max_length": CONFIG["max_position_embeddings"],
        },
    }


def byte_letters() -> list[str]:
    """The printable letter that stands for each byte in byte-level tokenizers.

    Printable Latin-1 bytes stand for themselves, the others for the letters from U+0100 on, as in GPT-2.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
