"""How much a sequence of tokens costs in caches, by the architecture that config.json describes.

Every figure is what mlx-lm 0.32.2 allocates, and the tests compare it with the ``nbytes`` of its caches:

- standard attention keeps keys and values: 2 x kv_heads x head_dim elements a token and layer;
- latent attention (MLA) keeps ``kv_lora_rank + qk_rope_head_dim`` elements a token and layer, shared by
  all heads, so the count is *not* multiplied by them; a rope width of 0 is legal; a sparse-attention
  indexer adds two rows of ``index_head_dim``;
- how a cache grows is in `draftpair.validate.layercache`; a full-length one has steps of 256 tokens, and a
  sliding-window layer never keeps more than its window;
- recurrent layers keep a state that does not grow (`draftpair.validate.recurrent`);
- models with compressed or indexed keys keep several caches a layer (`draftpair.validate.compressed`; those that
  mlx-lm does not have are counted as mlx-vlm 0.7.10 allocates them);
- layers that reuse another layer's cache keep nothing.

A quantized cache (4 or 8 bits) stores, for each row of ``d`` elements of a head, ``d * bits / 32`` words of
32 bits and a 16-bit scale and bias for each group of 64. mlx-lm has it for standard attention with ``d`` a
multiple of 64 only; sliding-window and latent caches, and those of layers that keep two caches, are counted
at 16 bits, and the note says so.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from draftpair.checkpoint import ConfigView
from draftpair.checkpoint.wording import printable
from draftpair.errors import Usage
from draftpair.validate.attention import attention_cache
from draftpair.validate.compressed import compressed_caches
from draftpair.validate.geometry import LARGEST, Geometry, Unlikely, geometry, number
from draftpair.validate.layercache import LayerCache
from draftpair.validate.layers import DOUBLE_LAYERS, UnknownLayers, layer_count, layer_kinds
from draftpair.validate.recurrent import LayerState, layer_state

KV_BITS = (4, 8, 16, 32)

_UNKNOWN = "unknown: "
_NO_CACHE = "no cache of its own: it reads the target's keys and values"
_EXPANDED = (
    "mlx-vlm also keeps expanded keys and values of a prompt of up to 32,768 tokens, which are not counted"
)
_STATE_NAMES = {"linear": "linear attention", "mamba": "mamba", "conv": "short convolution"}


@dataclass(frozen=True)
class CacheSize:
    """Bytes of all caches of a model; None where the config does not say enough, and ``note`` says why.

    ``kv_bytes`` and ``state_bytes`` are for the whole batch at the given context; ``bytes_per_token`` is what
    one more token of one sequence costs once every sliding window is full. ``caveat`` says what an engine keeps
    besides, if that is known and not counted.
    """

    kv_bytes: int | None
    bytes_per_token: int | None
    state_bytes: int | None
    note: str
    caveat: str | None = None

    @property
    def why_unknown(self) -> str | None:
        """Why there are no bytes, None where there are."""
        return self.note.removeprefix(_UNKNOWN) if self.kv_bytes is None else None


def unknown_cache(why: str) -> CacheSize:
    """No figures, and the reason."""
    return CacheSize(None, None, None, f"{_UNKNOWN}{why}")


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
        return unknown_cache(str(why))
    activation_bytes = 4 if kv_bits == 32 else 2
    return CacheSize(
        kv_bytes=batch * sum(layer.nbytes(context, kv_bits) for layer in layers),
        bytes_per_token=sum(layer.token_bytes(kv_bits) for layer in layers),
        state_bytes=batch * sum(layer.state.nbytes(activation_bytes) for layer in layers if layer.state),
        note=_note(layers, kv_bits),
        caveat=_EXPANDED if config.model_type in ("glm5_next", "glm5_next_text") else None,
    )


def drafter_cache(
    config: ConfigView,
    cache: str,
    layers: int | None,
    context: int,
    batch: int = 1,
    kv_bits: int = 16,
) -> CacheSize:
    """Size of a drafter's caches beside its target.

    ``cache`` is what the drafter's family says: "own" layers keep keys and values, "none" reads the target's, "model"
    is an ordinary model's. With "own", ``layers`` full-attention layers of the model that ``config`` describes are
    meant, as for a head, whose config is its target's; with None ``config`` describes the drafter's own layers, and
    their sliding windows count; mlx-vlm keeps a row less of a window, or a few more while a block is checked. Raises
    Usage for numbers out of range.
    """
    if cache == "none":
        return CacheSize(0, 0, 0, _NO_CACHE)
    return cache_size(config, context, batch, kv_bits, layers if cache == "own" else None)


def layer_caches(config: ConfigView, depth: int | None = None) -> list[LayerCache]:
    """One entry a cache, in layer order. Raises UnknownLayers when a size is missing."""
    sizes = geometry(config)
    if depth is not None:
        return _head_caches(config, sizes, depth)
    layers = layer_count(config, sizes.layers)
    if layers is None:
        raise UnknownLayers("config.json does not say how many layers there are")
    if (compressed := compressed_caches(config, layers)) is not None:
        return compressed
    kinds = layer_kinds(config, layers)
    if config.model_type in DOUBLE_LAYERS:
        kinds = kinds * 2
    made = {kind: _caches_of(config, sizes, kind) for kind in dict.fromkeys(kinds)}
    return [*_embedding_context(config), *(cache for kind in kinds for cache in made[kind])]


def _head_caches(config: ConfigView, sizes: Geometry, depth: int) -> list[LayerCache]:
    trunk = sizes.layers or 0
    own = compressed_caches(config, trunk + depth, first=trunk)
    return list(_caches_of(config, sizes, "full")) * depth if own is None else own


def _caches_of(config: ConfigView, sizes: Geometry, kind: str) -> tuple[LayerCache, ...]:
    if kind == "none":
        return ()
    parts = kind.split("+")
    caches = tuple(_cache_of(config, sizes, part) for part in parts)
    return caches if len(parts) == 1 else tuple(replace(cache, quantizable=False) for cache in caches)


def _embedding_context(config: ConfigView) -> list[LayerCache]:
    """The last tokens themselves, which n-gram embeddings of LongCat look back at."""
    neighbours = number(config, "emb_neighbor_num") if config.model_type == "longcat_flash_ngram" else None
    return [LayerCache("n-gram context", state=LayerState(0, int64=neighbours - 1))] if neighbours else []


def _cache_of(config: ConfigView, sizes: Geometry, kind: str) -> LayerCache:
    return _recurrent(config, kind) if kind in _STATE_NAMES else attention_cache(config, sizes, kind)


def _recurrent(config: ConfigView, kind: str) -> LayerCache:
    state = layer_state(config, kind)
    if state is None:
        raise UnknownLayers(f"config.json does not give the sizes of its {_STATE_NAMES[kind]} layers")
    return LayerCache(_STATE_NAMES[kind], state=state)


def _note(layers: list[LayerCache], kv_bits: int) -> str:
    """For example "47 x latent attention (576 elements a token)"."""
    counts = Counter(f"{layer.name} ({_row(layer)})" if layer.rows else layer.name for layer in layers)
    text = ", ".join(f"{count} x {name}" for name, count in counts.items()) or "no cache of its own"
    kept = sum(1 for layer in layers if layer.rows and not layer.can_quantize())
    return f"{text}; {kept} caches stay at 16 bits" if kv_bits < 16 and kept else text


def _row(layer: LayerCache) -> str:
    return f"{layer.elements} elements " + ("a token" if layer.group == 1 else f"for {layer.group} tokens")
