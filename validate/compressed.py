"""Models whose layers keep several caches: DeepSeek V4 and V4.1, GLM-5.3-Flash, Qwen3.8-Flash-Next, HY-V4, Inkling.

The attention of most is sparse: keys are pooled, one row for each group of tokens, or an index beside them says which
to read; Inkling's has convolutions around it. mlx-lm 0.32.2 has V4.1, mlx-vlm 0.7.10 the others; the tests compare
the figures with what they allocate.
"""

from __future__ import annotations

from typing import Any

from draftpair.checkpoint import ConfigView
from draftpair.validate.attention import sliding_window
from draftpair.validate.geometry import HEAD_DIM, HIDDEN, geometry, number
from draftpair.validate.layercache import LayerCache
from draftpair.validate.layers import UnknownLayers, layer_kinds
from draftpair.validate.recurrent import LayerState, layer_state

_V4_RATIOS = (0, 4, 128)
_POSITION_BYTES = 4


def compressed_caches(config: ConfigView, layers: int, first: int = 0) -> list[LayerCache] | None:
    """The caches of layers ``first`` to ``layers`` of such a model, in order; None for any other model.

    Layers past the last one of the trunk are those of its head. Raises UnknownLayers when a size is missing.
    """
    make = _MAKERS.get((config.model_type or "").removesuffix("_text"))
    if make is None:
        return None
    return [cache for layer in range(first, layers) for cache in make(config, layer)]


def _layer_v41(config: ConfigView, layer: int) -> list[LayerCache]:
    """A window of single rows; a layer that is a source keeps the groups, and the rows of the one still open.

    A row is both key and value. The open group has a gate beside each row, both in float32. Layers that are no
    source read those of one before them.
    """
    width, window = _size(config, *HEAD_DIM), sliding_window(config)
    caches = [LayerCache(f"sliding window {window}", ((1, width),), window, growth="exact")]
    ratios = _numbers(config, "compress_ratios")
    ratio = ratios[layer] if layer < len(ratios) else 0
    if ratio and layer in _numbers(config, "kv_source_layer_ids"):
        index = layer in _numbers(config, "index_source_layer_ids")
        rows = ((1, width), (1, _size(config, "index_head_dim"))) if index else ((1, width),)
        gates = 2 * width if ratio > 1 else 0
        name = f"groups of {ratio}" + (" with an index" if index else "")
        caches.append(LayerCache(name, rows, growth="exact", group=ratio, open_elements=gates))
    return caches


def _layer_v4(config: ConfigView, layer: int) -> list[LayerCache]:
    """A window of single rows, and pools of the groups; with groups of four, which overlap, also a pooled index."""
    width, window = _size(config, *HEAD_DIM), sliding_window(config)
    ratios = _numbers(config, "compress_ratios")
    ratio = ratios[layer] if layer < len(ratios) else 0
    if ratio not in _V4_RATIOS:
        raise UnknownLayers(f"compress_ratios has {ratio}; known are {', '.join(map(str, _V4_RATIOS))}")
    caches = [LayerCache(f"sliding window {window}", ((1, width),), window, growth="rotating")]
    overlap = 2 if ratio == 4 else 1
    if ratio:
        caches.append(_pool(f"groups of {ratio}", width, ratio, overlap))
    if ratio == 4:
        caches.append(_pool("pooled index", _size(config, "index_head_dim"), ratio, overlap))
    return caches


def _layer_glm5(config: ConfigView, layer: int) -> list[LayerCache]:
    """Delta attention, or latent attention without a rotary part and, but for layers that share one, a pooled index.

    What mlx-vlm also keeps of a prompt, expanded, to read further parts of it faster is not counted.
    """
    if layer < _layers(config) and layer_kinds(config, _layers(config))[layer] == "linear":
        return [_delta(config)]
    latent = LayerCache("latent attention", ((1, _size(config, "kv_lora_rank")),))
    if _shares_index(config, layer):
        return [latent]
    group = _size(config, "index_kpool")
    flags = LayerCache("index flags", extra_bytes=1)
    return [latent, flags, _pool("pooled index", _size(config, "index_head_dim"), group)]


def _shares_index(config: ConfigView, layer: int) -> bool:
    """Whether a sparse layer reads what the index of a layer before it chose. The head has an index of its own."""
    types = config.get("indexer_types", config.get("index_topk_pattern"))
    if layer >= _layers(config):
        return False
    if types is None:
        every = number(config, "index_topk_freq") or 1
        offset = number(config, "index_skip_topk_offset", minimum=0)
        return max(layer - (2 if offset is None else offset) + 1, 0) % every != 0
    if not isinstance(types, (list, str)) or len(types) < _layers(config):
        raise UnknownLayers("indexer_types does not name all layers")
    return types[layer] in ("shared", "S")


def _layer_qwen4(config: ConfigView, layer: int) -> list[LayerCache]:
    """Delta attention, with the state of an n-gram embedding where the layer has one; or sparse attention.

    The latter keeps keys and values in steps, and for each token the key of its index and a position; the keys of
    whole groups once more, pooled.
    """
    if layer < _layers(config) and layer_kinds(config, _layers(config))[layer] == "linear":
        return [_delta(config), *_ngrams(config, layer)]
    sizes = geometry(config)
    width = _size(config, "indexer_head_dim")
    keys = (number(config, "indexer_kv_heads") or 1) * width
    if sizes.kv_heads is None or sizes.head_dim is None:
        raise UnknownLayers("config.json does not give one number of key-value heads and one head width")
    return [
        LayerCache("sparse attention", ((sizes.kv_heads, sizes.head_dim),) * 2),
        LayerCache("index", ((1, keys),), growth="exact", extra_bytes=_POSITION_BYTES),
        LayerCache(
            "pooled index", ((1, width),), growth="exact", group=_size(config, "indexer_compress_ratio")
        ),
    ]


def _ngrams(config: ConfigView, layer: int) -> list[LayerCache]:
    """Last tokens, and inputs of a dilated convolution over all streams; ``ple_layer_ids`` counts from one."""
    if layer + 1 not in _numbers(config, "ple_layer_ids"):
        return []
    order = _size(config, "ngram_size")
    reach = (_size(config, "ple_conv_kernel_size") - 1) * order
    streams = _size(config, "hc_count") * _size(config, *HIDDEN)
    return [LayerCache("n-gram embedding", state=LayerState(reach * streams, int64=order - 1))]


def _layer_hy4(config: ConfigView, layer: int) -> list[LayerCache]:
    """Latent attention and, but for layers that share one, an index; both have room for twice the prompt."""
    if config.get("indexer_types") is None:
        raise UnknownLayers("config.json does not give indexer_types")
    rows = ((1, _size(config, "kv_lora_rank")), (1, _size(config, "qk_rope_head_dim")))
    latent = LayerCache("latent attention", rows, growth="doubling")
    if _shares_index(config, layer):
        return [latent]
    return [latent, LayerCache("index", ((1, _size(config, "index_head_dim")),), growth="doubling")]


def _layer_inkling(config: ConfigView, layer: int) -> list[LayerCache]:
    """Keys and values without a window, and the inputs of four short convolutions in float32.

    Layers that attend within a window have heads of their own number and width, and keep all tokens nevertheless.
    """
    sizes = geometry(config)
    heads, width = sizes.kv_heads, sizes.head_dim
    if _is_local(config, layer):
        heads, width = number(config, "swa_num_key_value_heads"), number(config, "swa_head_dim")
    if heads is None or width is None:
        raise UnknownLayers("config.json does not give one number of key-value heads and one head width")
    inputs = 2 * heads * width + 2 * _size(config, *HIDDEN)
    state = LayerState(0, (_size(config, "sconv_kernel_size") - 1) * inputs)
    return [LayerCache("attention with convolutions", ((heads, width), (heads, width)), state=state)]


def _is_local(config: ConfigView, layer: int) -> bool:
    """Whether a layer attends within a window; the head's layers are listed apart."""
    trunk = _layers(config)
    if layer >= trunk:
        own = config.get("mtp_config.local_layer_ids")
        return isinstance(own, list) and layer - trunk in own
    types = config.get("layer_types")
    if isinstance(types, list):
        if len(types) < trunk:
            raise UnknownLayers(f"layer_types does not name all {trunk} layers")
        return bool(types[layer] == "hybrid_sliding")
    return layer in _numbers(config, "local_layer_ids")


def _delta(config: ConfigView) -> LayerCache:
    state = layer_state(config, "linear")
    if state is None:
        raise UnknownLayers("config.json does not give the sizes of its linear attention layers")
    return LayerCache("linear attention", state=state)


def _pool(name: str, width: int, group: int, overlap: int = 1) -> LayerCache:
    """One row a whole group, and room for the rows of the open one with a gate for each."""
    buffers = LayerState(2 * group * overlap * width)
    return LayerCache(name, ((1, width),), growth="exact", group=group, state=buffers)


def _layers(config: ConfigView) -> int:
    layers = geometry(config).layers
    if layers is None:
        raise UnknownLayers("config.json does not say how many layers there are")
    return layers


def _size(config: ConfigView, *keys: str) -> int:
    value = number(config, *keys)
    if value is None:
        raise UnknownLayers(f"config.json does not give {keys[0]}")
    return value


def _numbers(config: ConfigView, key: str) -> list[int]:
    values: Any = config.get(key)
    if not isinstance(values, list) or any(type(value) is not int or value < 0 for value in values):
        raise UnknownLayers(f"{key} is no list of numbers")
    return values


_MAKERS = {
    "deepseek_v41": _layer_v41,
    "deepseek_v4": _layer_v4,
    "glm5_next": _layer_glm5,
    "qwen4_exp": _layer_qwen4,
    "hy_v4": _layer_hy4,
    "inkling": _layer_inkling,
    "inkling_mm_model": _layer_inkling,
}
