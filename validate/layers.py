"""What each decoder layer is, as far as its cache is concerned, read from a config.json.

Model families write this down in about ten ways; `layer_kinds` turns them into one list of words:
``full`` and ``sliding`` attention, ``chunked`` (a window that starts anew), ``sparse`` (an index beside the
keys and values), ``linear`` attention, ``mamba``, ``conv`` (short convolution), ``mamba+full`` (both in one
layer) and ``none`` (a layer that keeps nothing between tokens).
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
    "qwen_sparse_attention": "full",
    "sliding_attention": "sliding",
    "local_attention": "sliding",
    "chunked_attention": "chunked",
    "minimax_m3_sparse": "sparse",
    "linear_attention": "linear",
    "mamba": "mamba",
    "mamba2": "mamba",
    "conv": "conv",
    "mlp": "none",
    "moe": "none",
}
_LETTERS: dict[str, str] = {"*": "full", "M": "mamba", "-": "none", "E": "none", "G": "full", "L": "sliding"}
_LISTS = ("layer_types", "layers_block_type", "block_types")
# A layer of these holds two attention blocks.
DOUBLE_LAYERS = frozenset({"longcat_flash", "longcat_flash_ngram"})
_MAMBA_ONLY = frozenset({"mamba", "mamba2", "falcon_mamba"})
# Where a config leaves the pattern out, these families mean one full-attention layer in every n
# (the class defaults of mlx-lm 0.32.2).
_DEFAULT_PATTERN = {
    "gemma3_text": 6, "gemma3": 6, "cohere2": 4, "gemma4_text": 5, "gpt_oss": 2, "plamo3": 8, "step3p5": 2,
    "muse_glimmer": 4, "muse_glimmer_text": 4, "olmo3": 4, "spark2_5": 4,
}  # fmt: skip
# Chunks of attention, one full layer in every four: the class has it and the config does not say so.
_CHUNKED = frozenset({"llama4", "llama4_text"})
_LING = frozenset({"bailing_hybrid", "bailing_moe_linear", "bailing_moe_v3"})
# Their caches are of kinds that nothing here describes, and no key would tell.
_UNDESCRIBED = frozenset(
    {
        "afm7", "baichuan_m1", "iquestloopcoder", "nanbeige", "nemotron-nas", "plamo2", "recurrent_gemma", "rwkv7",
        "longcat_flash_sparse",
    }
)  # fmt: skip
# Signs of layer patterns or caches that none of the readers below understands.
_ODD_KEYS = ("mamba_d_state", "mamba_d_conv", "layer_group_size", "compress_ratios", "num_loops")


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


def layer_count(config: ConfigView, stated: int | None) -> int | None:
    """How many layers there are: ``stated``, else as many as the list or the pattern of them names."""
    if config.model_type in DOUBLE_LAYERS:
        # transformers states twice as many under num_hidden_layers: it counts attention blocks.
        return number(config, "num_layers") or stated
    if stated is not None:
        return stated
    named = (config.get(key) for key in ("hybrid_override_pattern", *_LISTS))
    return next((len(kinds) for kinds in named if isinstance(kinds, (str, list)) and kinds), None)


def has_index(config: ConfigView) -> bool:
    """Whether layers may have an index beside keys and values, as MiniMax-M3's have."""
    return any(config.get(key) is not None for key in ("sparse_attention_config", "index_block_size"))


def _described(config: ConfigView, layers: int) -> list[str]:
    if config.model_type in _UNDESCRIBED:
        raise UnknownLayers(f"the caches of {config.model_type} are not known here")
    for key in _LISTS:
        if config.get(key) is not None:
            return _as_meant(config, _from_words(key, config.get(key), layers))
    if config.get("hybrid_override_pattern") is not None:
        return _from_letters("hybrid_override_pattern", config.get("hybrid_override_pattern"))
    for read in (_periodic, _grouped, _linear, _sparse, _windowed):
        if (found := read(config, layers)) is not None:
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


def _as_meant(config: ConfigView, kinds: list[str]) -> list[str]:
    """transformers calls the Mamba layers of Nemotron-H linear attention."""
    if config.get("mamba_num_heads") is not None and config.get("linear_num_value_heads") is None:
        return ["mamba" if kind in ("linear", "conv") else kind for kind in kinds]
    return kinds


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


def _grouped(config: ConfigView, layers: int) -> list[str] | None:
    """Ling and Ring: the last layer of each group is full, and so are those after the last whole group."""
    group = number(config, "layer_group_size")
    if group is None or config.model_type not in _LING:
        return None
    whole = layers // group * group
    kinds = _one_full_in(group, "linear", layers)
    return kinds[:whole] + ["full"] * (layers - whole)


def _sparse(config: ConfigView, layers: int) -> list[str] | None:
    """MiniMax-M3: a flag for each layer that has an index, every layer where there are no flags."""
    if not has_index(config):
        return None
    flags = config.get("sparse_attention_config.sparse_attention_freq", config.get("sparse_attention_freq"))
    if flags is None:
        return ["sparse"] * layers
    if not isinstance(flags, list) or len(flags) < layers:
        raise UnknownLayers(f"sparse_attention_freq does not name all {layers} layers")
    return ["sparse" if flag else "full" for flag in flags[:layers]]


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
    """A sliding-window pattern: a number n (each n-th layer is full), letters, or MiMo's list of 0 and 1.

    DFlash drafters have ``use_swa``: every layer slides.
    """
    if config.get("use_swa") is True:
        return ["sliding"] * layers
    if config.model_type in _CHUNKED:
        return _one_full_in(4, "chunked", layers)
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
