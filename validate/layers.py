"""What each decoder layer is, as far as its cache is concerned, read from a config.json.

Model families write this down in about ten ways; `layer_kinds` turns them into one list of words:
``full`` and ``sliding`` attention, ``linear`` attention, ``mamba``, ``conv`` (short convolution),
``mamba+full`` (both in one layer) and ``none`` (a layer that keeps nothing between tokens).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draftpair.checkpoint import ConfigView
from draftpair.checkpoint.wording import printable, some
from draftpair.validate.geometry import number

_WORDS: dict[str, str] = {
    "full_attention": "full",
    "attention": "full",
    "full": "full",
    "deepseek_sparse_attention": "full",
    "sliding_attention": "sliding",
    "local_attention": "sliding",
    "chunked_attention": "sliding",
    "linear_attention": "linear",
    "mamba": "mamba",
    "mamba2": "mamba",
    "conv": "conv",
    "mlp": "none",
    "moe": "none",
}
_LETTERS: dict[str, str] = {"*": "full", "M": "mamba", "-": "none", "E": "none", "G": "full", "L": "sliding"}
_MAMBA_ONLY = frozenset({"mamba", "mamba2", "falcon_mamba"})
# Where a config leaves the pattern out, these families mean one full-attention layer in every n
# (the class defaults of mlx-lm 0.32.2).
_DEFAULT_PATTERN = {"gemma3_text": 6, "gemma3": 6, "cohere2": 4, "gemma4_text": 5, "gpt_oss": 2, "plamo3": 8}
# Signs of layer patterns or caches that none of the readers below understands.
_ODD_KEYS = ("mamba_d_state", "mamba_d_conv", "layer_group_size", "compress_ratios")


class UnknownLayers(Exception):
    """The config describes its layers in a way this module does not know; the text says which."""


def layer_kinds(config: ConfigView, layers: int) -> list[str]:
    """The kind of each of ``layers`` decoder layers; the last ones that share a cache are ``none``.

    Sources, first that answers: a list of words, a pattern of letters, a period, an interval, indices of
    the full-attention layers, a sliding-window pattern. Without any of them every layer is ``full``,
    which is what mlx-lm allocates (it ignores a lone ``sliding_window``).
    Raises UnknownLayers for a word or a length that makes no sense.
    """
    kinds = _described(config, layers)
    if config.get("use_sliding_window") is False:
        kinds = ["full" if kind == "sliding" else kind for kind in kinds]
    shared = number(config, "num_kv_shared_layers", minimum=0) or 0
    own = max(len(kinds) - shared, 0)
    return kinds[:own] + ["none"] * (len(kinds) - own)


def _described(config: ConfigView, layers: int) -> list[str]:
    for key in ("layer_types", "layers_block_type", "block_types"):
        if config.get(key) is not None:
            return _from_words(key, config.get(key), layers)
    if config.get("hybrid_override_pattern") is not None:
        return _from_letters("hybrid_override_pattern", config.get("hybrid_override_pattern"))
    for found in (_periodic(config, layers), _linear(config, layers), _windowed(config, layers)):
        if found is not None:
            return found
    if config.model_type in _MAMBA_ONLY:
        return ["mamba"] * layers
    if config.model_type == "falcon_h1":
        return ["mamba+full"] * layers
    odd = [key for key in _ODD_KEYS if config.get(key) is not None]
    if odd:
        raise UnknownLayers(f"{odd[0]} belongs to an architecture whose caches are not known here")
    return ["full"] * layers


def _from_words(key: str, words: Any, layers: int) -> list[str]:
    if not isinstance(words, list) or len(words) < layers:
        raise UnknownLayers(f"{key} does not name all {layers} layers")
    unknown = sorted({str(word) for word in words[:layers] if str(word) not in _WORDS})
    if unknown:
        raise UnknownLayers(f"{key} has layer types that are not known here: {some(unknown)}")
    return [_WORDS[str(word)] for word in words[:layers]]


def _from_letters(key: str, letters: Any, layers: int | None = None) -> list[str]:
    """One kind a letter; a pattern shorter than ``layers`` repeats."""
    kinds = [_LETTERS.get(str(letter)) for letter in letters] if isinstance(letters, (str, list)) else []
    known = [kind for kind in kinds if kind is not None]
    if not known or len(known) < len(kinds):
        raise UnknownLayers(f"{key} is {printable(repr(letters), 60)}")
    return _repeat(known, layers) if layers is not None else known


def _periodic(config: ConfigView, layers: int) -> list[str] | None:
    """Jamba: attention where ``index % attn_layer_period == attn_layer_offset``, Mamba elsewhere."""
    period = number(config, "attn_layer_period")
    if period is None:
        return None
    offset = number(config, "attn_layer_offset", minimum=0) or 0
    return ["full" if index % period == offset else "mamba" for index in range(layers)]


def _linear(config: ConfigView, layers: int) -> list[str] | None:
    """Gated delta net every layer but each n-th; Kimi's list of layers; LFM2's attention indices."""
    kimi = config.get("linear_attn_config")
    if isinstance(kimi, dict) and isinstance(kimi.get("kda_layers"), list):
        return ["linear" if index + 1 in kimi["kda_layers"] else "full" for index in range(layers)]
    interval = number(config, "full_attention_interval")
    if interval is None and config.get("linear_num_value_heads") is not None:
        interval = 4
    if interval is not None:
        return _one_full_in(interval, "linear", layers)
    attention = config.get("full_attn_idxs")
    if isinstance(attention, list):
        return ["full" if index in attention else "conv" for index in range(layers)]
    return None


def _windowed(config: ConfigView, layers: int) -> list[str] | None:
    """A sliding-window pattern: a number n (each n-th layer is full), letters, or MiMo's list of 0 and 1."""
    flags = config.get("hybrid_layer_pattern")
    if isinstance(flags, list):
        return ["sliding" if flag == 1 else "full" for flag in flags[:layers]]
    pattern = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
    if isinstance(pattern, str):
        return _from_letters("sliding_window_pattern", pattern, layers)
    every = pattern if isinstance(pattern, int) else _DEFAULT_PATTERN.get(config.model_type or "")
    return _one_full_in(every, "sliding", layers) if every else None


def _one_full_in(interval: int, other: str, layers: int) -> list[str]:
    return ["full" if index % interval == interval - 1 else other for index in range(layers)]


def _repeat(kinds: Sequence[str], layers: int) -> list[str]:
    return [kinds[index % len(kinds)] for index in range(layers)]
