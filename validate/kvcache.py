"""How much a sequence of tokens costs in caches, by the architecture that config.json describes.

Every figure is what mlx-lm 0.32.2 allocates, and the tests compare it with the ``nbytes`` of its caches:

- standard attention keeps keys and values: 2 x kv_heads x head_dim elements a token and layer;
- latent attention (MLA) keeps ``kv_lora_rank + qk_rope_head_dim`` elements a token and layer, shared by
  all heads, so the count is *not* multiplied by them; a rope width of 0 is legal; a sparse-attention
  indexer adds two rows of ``index_head_dim``;
- a full-length cache grows in steps of 256 tokens (a prompt cut into odd chunks can add one step);
- a sliding-window layer never keeps more than its window;
- recurrent layers keep a state that does not grow (`draftpair.validate.recurrent`);
- layers that reuse another layer's cache keep nothing.

A quantized cache (4 or 8 bits) stores, for each row of ``d`` elements of a head, ``d * bits / 32`` words of
32 bits and a 16-bit scale and bias for each group of 64. mlx-lm has it for standard attention with ``d`` a
multiple of 64 only; sliding-window and latent caches are counted at 16 bits, and the note says so.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from draftpair.checkpoint import ConfigView
from draftpair.checkpoint.wording import printable
from draftpair.errors import Usage
from draftpair.validate.geometry import LARGEST, Geometry, Unlikely, geometry, number
from draftpair.validate.layers import UnknownLayers, layer_kinds
from draftpair.validate.recurrent import LayerState, layer_state

STEP = 256
QUANT_GROUP = 64
KV_BITS = (4, 8, 16, 32)

# These have kv_lora_rank, but mlx-lm caches keys and values of every head for them.
_EXPANDED_MLA = frozenset({"deepseek_v2", "minicpm3", "youtu_llm"})
# A layer of these holds two attention blocks.
_DOUBLE_LAYERS = frozenset({"longcat_flash", "longcat_flash_ngram"})

_WINDOW = ("sliding_window", "sliding_window_size", "attention_chunk_size")
_STATE_NAMES = {"linear": "linear attention", "mamba": "mamba", "conv": "short convolution"}


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps: rows of (heads, elements) a token, an optional window, a fixed state."""

    name: str
    rows: tuple[tuple[int, int], ...] = ()
    window: int | None = None
    quantizable: bool = False
    state: LayerState | None = None

    @property
    def elements(self) -> int:
        """Cached elements a token."""
        return sum(heads * width for heads, width in self.rows)

    def tokens(self, context: int) -> int:
        """Tokens the cache has room for when ``context`` tokens were seen."""
        room = -(-context // STEP) * STEP
        return room if self.window is None else min(room, self.window)

    def token_bytes(self, kv_bits: int) -> int:
        """Bytes a token at ``kv_bits``, or at 16 bits where mlx-lm cannot quantize this cache."""
        if kv_bits >= 16:
            return self.elements * kv_bits // 8
        if not self.can_quantize():
            return self.elements * 2
        return sum(h * (w * kv_bits // 32 * 4 + w // QUANT_GROUP * 2 * 2) for h, w in self.rows)

    def can_quantize(self) -> bool:
        """Whether mlx-lm has a quantized form of this cache."""
        return self.quantizable and all(width % QUANT_GROUP == 0 for _, width in self.rows)


@dataclass(frozen=True)
class CacheSize:
    """Bytes of all caches of a model; None where the config does not say enough, and ``note`` says why.

    ``kv_bytes`` and ``state_bytes`` are for the whole batch at the given context; ``bytes_per_token`` is what
    one more token of one sequence costs once every sliding window is full.
    """

    kv_bytes: int | None
    bytes_per_token: int | None
    state_bytes: int | None
    note: str


def cache_size(
    config: ConfigView, context: int, batch: int = 1, kv_bits: int = 16, depth: int | None = None
) -> CacheSize:
    """Size of the caches for ``batch`` sequences of ``context`` tokens.

    ``depth`` asks for that many full-attention layers instead of the model's own: the cache of an MTP head,
    whose text config describes the target. Raises Usage for numbers out of range.
    """
    for name, count in (("context", context), ("batch", batch)):
        if not 1 <= count <= LARGEST:
            raise Usage(f"--{name} {printable(str(count), 40)}: expected 1 to {LARGEST:,}")
    if kv_bits not in KV_BITS:
        raise Usage(f"--kv-bits {kv_bits}: expected one of {', '.join(map(str, KV_BITS))}")
    try:
        layers = layer_caches(config, depth)
    except (UnknownLayers, Unlikely) as why:
        return CacheSize(None, None, None, f"unknown: {why}")
    activation_bytes = 4 if kv_bits == 32 else 2
    return CacheSize(
        kv_bytes=batch * sum(layer.token_bytes(kv_bits) * layer.tokens(context) for layer in layers),
        bytes_per_token=sum(layer.token_bytes(kv_bits) for layer in layers if layer.window is None),
        state_bytes=batch * sum(layer.state.nbytes(activation_bytes) for layer in layers if layer.state),
        note=_note(layers, kv_bits),
    )


def layer_caches(config: ConfigView, depth: int | None = None) -> list[LayerCache]:
    """One entry a cache, in layer order. Raises UnknownLayers when a size is missing."""
    sizes = geometry(config)
    if depth is not None:
        kinds = ["full"] * depth
    elif sizes.layers is None:
        raise UnknownLayers("config.json does not say how many layers there are")
    else:
        kinds = layer_kinds(config, sizes.layers)
    if depth is None and config.model_type in _DOUBLE_LAYERS:
        kinds = kinds * 2
    made = {kind: _caches_of(config, sizes, kind) for kind in dict.fromkeys(kinds)}
    return [cache for kind in kinds for cache in made[kind]]


def _caches_of(config: ConfigView, sizes: Geometry, kind: str) -> tuple[LayerCache, ...]:
    if kind == "none":
        return ()
    return tuple(_cache_of(config, sizes, part) for part in kind.split("+"))


def _cache_of(config: ConfigView, sizes: Geometry, kind: str) -> LayerCache:
    return _attention(config, sizes, kind) if kind in ("full", "sliding") else _recurrent(config, kind)


def _recurrent(config: ConfigView, kind: str) -> LayerCache:
    state = layer_state(config, kind)
    if state is None:
        raise UnknownLayers(f"config.json does not give the sizes of its {_STATE_NAMES[kind]} layers")
    return LayerCache(_STATE_NAMES[kind], state=state)


def _attention(config: ConfigView, sizes: Geometry, kind: str) -> LayerCache:
    rank = number(config, "kv_lora_rank")
    if rank is not None:
        return _expanded(config, sizes) if config.model_type in _EXPANDED_MLA else _latent(config, rank)
    window = number(config, *_WINDOW, minimum=0)
    if kind == "full" or not window:
        return LayerCache("full attention", _key_value_rows(config, sizes, sliding=False), quantizable=True)
    return LayerCache(f"sliding window {window}", _key_value_rows(config, sizes, sliding=True), window)


def _key_value_rows(config: ConfigView, sizes: Geometry, sliding: bool) -> tuple[tuple[int, int], ...]:
    """Rows for keys and values.

    Full-attention layers of Gemma 4 have their own head width, and with ``attention_k_eq_v`` their own number
    of heads (both rows are cached even then); sliding layers of MiMo have theirs.
    """
    heads, key, value = sizes.kv_heads, sizes.head_dim, number(config, "v_head_dim")
    if sliding:
        heads = number(config, "swa_num_key_value_heads") or heads
        key = number(config, "swa_head_dim") or key
        value = number(config, "swa_v_head_dim") or value
    else:
        key = number(config, "global_head_dim", minimum=0) or key
        if config.get("attention_k_eq_v") is True:
            heads = number(config, "num_global_key_value_heads") or heads
    if heads is None or key is None:
        raise UnknownLayers("config.json does not give one number of key-value heads and one head width")
    return ((heads, key), (heads, value or key))


def _latent(config: ConfigView, rank: int) -> LayerCache:
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


def _note(layers: list[LayerCache], kv_bits: int) -> str:
    """For example "47 x latent attention (576 elements a token)"."""
    counts = Counter(
        f"{layer.name} ({layer.elements} elements a token)" if layer.rows else layer.name for layer in layers
    )
    text = ", ".join(f"{count} x {name}" for name, count in counts.items()) or "no cache of its own"
    kept = sum(1 for layer in layers if layer.rows and not layer.can_quantize())
    return f"{text}; {kept} caches stay at 16 bits" if kv_bits < 16 and kept else text
