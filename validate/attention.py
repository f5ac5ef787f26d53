"""The rows that a layer with attention caches for each token: grouped queries, latent, with a sparse index.

Sizes are those of mlx-lm 0.32.2 and, for what it does not have, of mlx-vlm 0.7.10; the tests compare them.
"""

from __future__ import annotations

from draftpair.checkpoint import ConfigView
from draftpair.validate.geometry import Geometry, number
from draftpair.validate.layercache import LayerCache
from draftpair.validate.layers import UnknownLayers, has_index

# These have kv_lora_rank, but mlx-lm caches keys and values of every head for them.
_EXPANDED_MLA = frozenset({"deepseek_v2", "minicpm3", "youtu_llm"})
_WINDOW = ("sliding_window", "sliding_window_size", "attention_chunk_size", "window_size")
# What the class of mlx-lm takes where the config leaves the window out.
_DEFAULT_WINDOW = {
    "gemma3_text": 512, "gemma3": 512, "gemma4_text": 512, "gpt_oss": 128, "cohere2": 4096, "plamo3": 2048,
    "laguna": 512, "step3p5": 512, "muse_glimmer": 2048, "muse_glimmer_text": 2048, "afmoe": 2048,
}  # fmt: skip
# Their full-attention layers have heads of another width, which must be stated.
_GLOBAL_HEADS = frozenset({"gemma4_text", "gemma4", "gemma4_unified_text", "gemma4_unified"})

Rows = tuple[tuple[int, int], ...]


def attention_cache(config: ConfigView, sizes: Geometry, kind: str) -> LayerCache:
    """The cache of a layer of a kind of `layer_kinds` that has attention. Raises UnknownLayers for missing sizes."""
    rank = number(config, "kv_lora_rank")
    if rank is not None:
        return _expanded(config, sizes) if config.model_type in _EXPANDED_MLA else _latent(config, rank)
    if kind == "sparse":
        return _indexed(config, sizes)
    if kind == "full":
        rows = _key_value_rows(config, sizes, sliding=False)
        return LayerCache("full attention", rows, quantizable=not has_index(config))
    window = sliding_window(config)
    rows = _key_value_rows(config, sizes, sliding=True)
    if kind == "chunked":
        return LayerCache(f"chunks of {window}", rows, window, growth="chunked")
    return LayerCache(f"sliding window {window}", rows, window, growth="rotating")


def sliding_window(config: ConfigView) -> int:
    """The window of the sliding-window layers. Raises UnknownLayers when there is none."""
    window = number(config, *_WINDOW, minimum=0)
    if window is None:
        window = _DEFAULT_WINDOW.get(config.model_type or "")
    if not window:
        raise UnknownLayers("config.json has sliding-window layers and does not give their window")
    return window


def _key_value_rows(config: ConfigView, sizes: Geometry, sliding: bool) -> Rows:
    """Rows for keys and values.

    Full-attention layers of Gemma 4 have their own head width, and with ``attention_k_eq_v`` their own number
    of heads (both rows are cached even then); sliding layers of MiMo and Step have theirs.
    """
    heads, key, value = sizes.kv_heads, sizes.head_dim, number(config, "v_head_dim")
    heads = number(config, "num_attention_groups") or heads
    if sliding:
        other = "attention_other_setting.num_attention_groups"
        heads = number(config, "swa_num_key_value_heads", other) or heads
        key = number(config, "swa_head_dim") or key
        value = number(config, "swa_v_head_dim") or value
    else:
        key = _global_width(config) or key
        if config.get("attention_k_eq_v") is True:
            heads = number(config, "num_global_key_value_heads") or heads
    if heads is None or key is None:
        raise UnknownLayers("config.json does not give one number of key-value heads and one head width")
    return ((heads, key), (heads, value or key))


def _global_width(config: ConfigView) -> int | None:
    width = number(config, "global_head_dim", minimum=0)
    if width is None and config.model_type in _GLOBAL_HEADS:
        raise UnknownLayers(
            "config.json does not give global_head_dim, the head width of its full-attention layers"
        )
    return width


def _latent(config: ConfigView, rank: int) -> LayerCache:
    """MLA: one row of the rank and one of the rotary part, shared by all heads; an indexer keeps two of its width."""
    rope = number(config, "qk_rope_head_dim", minimum=0)
    if rope is None:
        raise UnknownLayers("config.json has kv_lora_rank but no qk_rope_head_dim")
    index = number(config, "index_head_dim", minimum=0) or 0
    return LayerCache(
        "latent attention with an indexer" if index else "latent attention",
        ((1, rank), (1, rope), *(((1, index), (1, index)) if index else ())),
    )


def _expanded(config: ConfigView, sizes: Geometry) -> LayerCache:
    nope, rope = number(config, "qk_nope_head_dim", minimum=0), number(config, "qk_rope_head_dim", minimum=0)
    value = number(config, "v_head_dim") or sizes.head_dim
    if sizes.heads is None or nope is None or rope is None or value is None:
        raise UnknownLayers("config.json does not give the head widths of its latent attention")
    rows = ((sizes.heads, nope + rope), (sizes.heads, value))
    return LayerCache("expanded latent attention", rows, quantizable=True)


def _indexed(config: ConfigView, sizes: Geometry) -> LayerCache:
    """MiniMax-M3: keys and values, and one row of index keys that all heads share."""
    width = number(config, "sparse_attention_config.sparse_index_dim", "index_head_dim")
    if width is None:
        raise UnknownLayers("config.json does not give the width of the index of its sparse attention")
    rows = _key_value_rows(config, sizes, sliding=False)
    return LayerCache("sparse attention with an index", (*rows, (1, width)))
