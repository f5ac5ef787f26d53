"""Gemma 4's assistants: head widths by layer type, the output head, and the order of the clusters' tokens.

Releases state the width of full-attention heads as ``global_head_dim``; transformers 5.24 saves it, and the number
of key-value heads, as ``per_layer_config``, by layer. Targets state theirs in the same ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.checkpoint.wording import printable
from draftpair.families.views._shared import problem, whole
from draftpair.findings import Finding

ORDERING = "masked_embedding.token_ordering"
_HEAD = "lm_head.weight"
_FULL = "full_attention"
_BY_LAYER = "per_layer_config"
_MLX_WIDTH = 512
"""What mlx-vlm 0.7.10 takes for ``global_head_dim`` where it is not stated."""


def canonical(config: ConfigView) -> tuple[ConfigView, list[Finding]]:
    """``tied`` and ``untied`` by the root's tie_word_embeddings; that of text_config means nothing."""
    tied = config.raw.get("tie_word_embeddings") is not False
    return config.having({"tied": int(tied), "untied": int(not tied)}), list(_conflicts(config))


def layer(config: ConfigView, number: int) -> ConfigView:
    """``head_dim`` and ``num_key_value_heads`` as this layer has them."""
    full, by_layer = _is_full(config, number), config.get(_BY_LAYER)
    width, groups = config.get("head_dim"), config.get("num_key_value_heads")
    if full:
        # An object without this layer says that it is like the others.
        width = config.get("global_head_dim", width if isinstance(by_layer, Mapping) else None)
    if full and config.get("attention_k_eq_v") is True:
        groups = config.get("num_global_key_value_heads", groups)
    own = _own(config, number)
    return config.having(
        {
            "head_dim": own.get("head_dim", width),
            "num_key_value_heads": own.get("num_key_value_heads", groups),
        }
    )


def check(checkpoint: Checkpoint, config: ConfigView) -> Iterator[Finding]:
    """Numbers against each other, and the tensors of the output head."""
    yield from _layers(config)
    yield from _sharing(config)
    yield from _heads(config)
    yield from _width_for_mlx(config)
    yield from _clusters(config)
    yield from _unused_head(checkpoint, config)


def check_values(checkpoint: Checkpoint, config: ConfigView) -> Iterator[Finding]:
    """The clusters' tokens in order: every id of the vocabulary once, in 64 or, where MLX wrote it, 32 bits."""
    tensor, entries = checkpoint.tensors.get(ORDERING), config.get("vocab_size")
    if tensor is None or tensor.shape != (entries,) or tensor.dtype not in ("I64", "I32"):
        return  # the inventory says so
    if not _is_permutation(checkpoint.read(tensor), tensor.dtype, entries):
        said = f"does not hold every id from 0 to {entries - 1} once: some tokens could never be proposed"
        yield problem(
            "DRAFTER-TENSOR-VALUES", f"{ORDERING} {said}", ORDERING, hint="download the drafter again"
        )


def _own(config: ConfigView, number: int) -> Mapping[str, Any]:
    """What per_layer_config says of a layer."""
    by_layer = config.get(_BY_LAYER)
    own = by_layer.get(str(number)) if isinstance(by_layer, Mapping) else None
    return own if isinstance(own, Mapping) else {}


def _types(config: ConfigView) -> list[Any]:
    types = config.get("layer_types")
    return types if isinstance(types, list) else []


def _is_full(config: ConfigView, number: int) -> bool:
    types = _types(config)
    return number < len(types) and types[number] == _FULL


def _conflicts(config: ConfigView) -> Iterator[Finding]:
    """The two spellings of the head width of full attention."""
    stated = config.get("global_head_dim")
    if stated is None or not isinstance(config.get(_BY_LAYER), Mapping):
        return
    for number in range(len(_types(config))):
        width = _own(config, number).get("head_dim", config.get("head_dim"))
        if _is_full(config, number) and width != stated:
            place = f"{config.where(_BY_LAYER)}/{number}/head_dim"
            yield problem(
                "CONFIG-CONFLICT",
                f"global_head_dim is {printable(repr(stated), 60)}, and {printable(repr(width), 60)} by {place}",
                place,
                expected=stated,
                found=width,
                hint="engines differ in which of the two they read; keep the one that the tensors have",
            )
            return


def _layers(config: ConfigView) -> Iterator[Finding]:
    types, layers = _types(config), config.get("num_hidden_layers")
    if len(types) != layers:
        yield problem(
            "CONFIG-LAYER-TYPES",
            f"layer_types names {len(types)} layers, num_hidden_layers counts {layers}",
            config.where("layer_types"),
            expected=layers,
            found=len(types),
        )
    elif types[-1] != _FULL:
        yield Finding(
            "CONFIG-LAST-LAYER",
            "warning",
            f"the last layer is of {types[-1]}: transformers makes it {_FULL}, other engines do not",
            where=f"config.json#{config.where('layer_types')}",
            expected=_FULL,
            found=types[-1],
            hint="compare config.json with the original repository's",
        )


def _sharing(config: ConfigView) -> Iterator[Finding]:
    """0, and nothing, stand for all layers."""
    shared, layers = config.get("num_kv_shared_layers"), config.get("num_hidden_layers")
    if shared and shared != layers:
        yield problem(
            "CONFIG-KV-SHARING",
            f"num_kv_shared_layers is {shared} of {layers}: no layer of an assistant has keys and values of its own",
            config.where("num_kv_shared_layers"),
            expected=layers,
            found=shared,
        )


def _heads(config: ConfigView) -> Iterator[Finding]:
    heads = config.get("num_attention_heads")
    for number in range(len(_types(config))):
        groups = layer(config, number).get("num_key_value_heads")
        if whole(heads) and whole(groups) and groups and heads % groups:
            full = _is_full(config, number) and groups == config.get("num_global_key_value_heads")
            yield problem(
                "CONFIG-HEADS",
                f"{heads} attention heads cannot share the {groups} key/value heads of layer {number} evenly",
                config.where("num_global_key_value_heads" if full else "num_key_value_heads"),
                expected=f"a divisor of {heads}",
                found=groups,
            )
            return


def _width_for_mlx(config: ConfigView) -> Iterator[Finding]:
    if config.get("global_head_dim") is not None:
        return
    full = (number for number in range(len(_types(config))) if _is_full(config, number))
    widths = (layer(config, number).get("head_dim") for number in full)
    other = next((width for width in widths if width != _MLX_WIDTH), None)
    if other is not None:
        yield Finding(
            "CONFIG-HEAD-DIM-SPELLING",
            "warning",
            f"the head width of full attention, {other}, stands in {_BY_LAYER} alone: mlx-vlm 0.7.10 does not read it "
            f"there and takes {_MLX_WIDTH}",
            where=f"config.json#{config.where(_BY_LAYER)}",
            expected="global_head_dim",
            found=other,
            hint="state it as global_head_dim in text_config too",
        )


def _clusters(config: ConfigView) -> Iterator[Finding]:
    """Every cluster has the same number of tokens, and no more of them are taken than there are."""
    if config.get("use_ordered_embeddings") is not True:
        return
    entries, clusters = config.get("vocab_size"), config.get("num_centroids", 2048)
    taken = config.get("centroid_intermediate_top_k", 32)
    if entries % clusters:
        yield problem(
            "CONFIG-CENTROIDS",
            f"vocab_size {entries} is no multiple of num_centroids {clusters}, and clusters are of one size",
            config.where("num_centroids"),
            expected=f"a divisor of {entries}",
            found=clusters,
        )
    if taken > clusters:
        yield problem(
            "CONFIG-CENTROIDS",
            f"centroid_intermediate_top_k is {taken} of {clusters} clusters",
            config.where("centroid_intermediate_top_k"),
            expected=clusters,
            found=taken,
        )


def _is_permutation(data: bytes, dtype: str, entries: int) -> bool:
    import numpy as np

    ids = np.sort(np.frombuffer(data, "<i8" if dtype == "I64" else "<i4"))
    return bool(np.array_equal(ids, np.arange(entries)))


def _unused_head(checkpoint: Checkpoint, config: ConfigView) -> Iterator[Finding]:
    if config.get("tied") and _HEAD in checkpoint.tensors:
        yield Finding(
            "CONFIG-TIED-HEAD",
            "warning",
            f"tie_word_embeddings is true, and {_HEAD} is there: engines take the embedding and pass over it",
            where="config.json#/tie_word_embeddings",
            expected=f"no {_HEAD}",
            found=_HEAD,
            hint="if the two differ, the config is wrong; compare it with the original repository's",
        )
