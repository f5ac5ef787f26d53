"""Pair facts: a target and a drafter reduced to the values and relations that decide whether they fit.

The document is public (``draftpair schema pair-facts``): another tool may produce it and apply a family's
``pair`` schema to it. Values that cannot be had from the files are null, never left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from draftpair.checkpoint import Checkpoint
from draftpair.families import family_of_target
from draftpair.families.record import Family
from draftpair.schemas import load_schema
from draftpair.validate.provenance import provenance
from draftpair.validate.tokenizer import TokenizerComparison, compare, special_ids
from draftpair.validate.tokenizer_files import Tokenizer, read_both
from draftpair.validate.vocabulary import VocabularySizes, vocabulary_relation, vocabulary_sizes

# Sizes that have facts of their own.
_NOT_GEOMETRY = frozenset({"hidden_size", "vocab_size"})
# Keys that change what a layer computes without changing a shape.
_SETTINGS = (
    "rms_norm_eps", "hidden_act", "num_experts_per_tok", "n_group", "topk_group", "topk_method", "scoring_func",
    "norm_topk_prob", "routed_scaling_factor", "partial_rotary_factor", "tie_word_embeddings",
)  # fmt: skip


def pair_facts(
    target: Checkpoint, drafter: Checkpoint, family: Family, block_size: tuple[int, str]
) -> dict[str, Any]:
    """The facts document of a pair; ``block_size`` is the width and the rule it came from."""
    tokenizers = read_both(target, drafter)
    return {
        "schema": load_schema("pair-facts")["$id"],
        "target": _side(target, family_of_target(target.config, family)),
        "drafter": {
            **_side(drafter, family),
            "kind": family.kind,
            "borrows": list(family.borrows(drafter.tensors)),
        },
        "hidden": _numbers(target, drafter, "hidden_size"),
        "vocabulary": _vocabulary(target, drafter, *tokenizers),
        "tokenizer": _tokenizer(compare(*tokenizers)),
        "geometry": _differences(target, drafter, _size_keys(family, target)),
        # A split states for the drafter what its loaders need; what the target leaves open cannot disagree.
        "settings": _differences(target, drafter, [k for k in _SETTINGS if target.config.get(k) is not None]),
        "layers": _numbers(target, drafter, "num_hidden_layers"),
        "rope": _rope(target, drafter),
        "tap": {"hidden_state": family.drafter.tap, "fusion": family.drafter.fusion},
        "special_ids": _special_ids(target, drafter),
        "block_size": _block_size(drafter, family, *block_size),
        "provenance": provenance(target, drafter),
    }


def _side(checkpoint: Checkpoint, family: Family | None) -> dict[str, Any]:
    return {
        "source": checkpoint.source,
        "revision": checkpoint.revision,
        "family": family.name if family else None,
        "model_type": checkpoint.config.model_type,
        "quantization": checkpoint.config.quantization,
        "dtypes": dict(Counter(tensor.dtype for tensor in checkpoint.tensors.values())),
    }


def _numbers(target: Checkpoint, drafter: Checkpoint, key: str) -> dict[str, Any]:
    mine, theirs = (_whole(c.config.get(key)) for c in (target, drafter))
    relation = "unknown" if None in (mine, theirs) else "equal" if mine == theirs else "different"
    return {"target": mine, "drafter": theirs, "relation": relation}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _vocabulary(
    target: Checkpoint, drafter: Checkpoint, mine: Tokenizer | None, theirs: Tokenizer | None
) -> dict[str, Any]:
    lengths = [tokenizer.length if tokenizer else None for tokenizer in (mine, theirs)]
    sizes = vocabulary_sizes(target, lengths[0]), vocabulary_sizes(drafter, lengths[1])
    return {
        "target": sizes[0].rows,
        "drafter": sizes[1].rows,
        "relation": vocabulary_relation(*sizes),
        "target_rows": _rows(sizes[0]),
        "drafter_rows": _rows(sizes[1]),
        "tokens": sizes[0].tokenizer,
        "consistent": all(side.consistent for side in sizes),
    }


def _rows(sizes: VocabularySizes) -> dict[str, int | None]:
    return {"config": sizes.config, "embedding": sizes.embedding_rows, "head": sizes.head_rows}


def _tokenizer(compared: TokenizerComparison) -> dict[str, Any]:
    return {
        "relation": compared.relation,
        "detail": compared.detail,
        "first_different": [
            {"id": d.id, "target": d.target, "drafter": d.drafter} for d in compared.different
        ],
        "pipeline": list(compared.pipeline),
    }


def _differences(target: Checkpoint, drafter: Checkpoint, keys: Sequence[str]) -> dict[str, Any]:
    """Config keys compared one by one; null equals absent."""
    values = [(key, target.config.get(key), drafter.config.get(key)) for key in keys]
    different = [
        {"key": key, "target": mine, "drafter": theirs} for key, mine, theirs in values if mine != theirs
    ]
    detail = ", ".join(f"{d['key']} {d['target']} and {d['drafter']}" for d in different)
    return {
        "relation": "different" if different else "equal",
        "detail": detail or None,
        "different": different,
    }


def _size_keys(family: Family, target: Checkpoint) -> list[str]:
    """The config keys that size the drafter's tensors: a pair that differs in one was cut from another model.

    A head may have what its target's layers lack, and a flag be wrong in the target's config: it counts only where
    the target states that such tensors are there, and they are. Then its head has them too.
    """
    shapes = [source.shape or () for rule in family.rules for source in rule.sources]
    keys = {key for shape in shapes for entry in shape for key in _keys(family, entry)}
    untold = {key for key in family.flags if not _bears_out(target, family, key)}
    return sorted(key for key in keys - untold if not key.isdecimal() and key not in _NOT_GEOMETRY)


def _bears_out(target: Checkpoint, family: Family, flag: str) -> bool:
    ends = tuple(f".{name}" for name in family.flags[flag])
    return target.config.get(flag) is True and any(name.endswith(ends) for name in target.tensors)


def _keys(family: Family, product: str) -> Iterator[str]:
    """The config keys and numbers of a product, those of its named sums included."""
    for word in re.split(r" [*/] ", product):
        if word in family.dims:
            yield from (key for entry in family.dims[word] for key in _keys(family, entry))
        else:
            yield word


def _rope(target: Checkpoint, drafter: Checkpoint) -> dict[str, Any]:
    mine, theirs = ({"theta": c.config.rope.theta, "scaling": _scaling(c)} for c in (target, drafter))
    return {"target": mine, "drafter": theirs, "relation": "equal" if mine == theirs else "different"}


def _scaling(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The scaling of the rotary embedding without its sections: a text token has one position in all of them."""
    scaling = {k: v for k, v in (checkpoint.config.rope.scaling or {}).items() if not k.startswith("mrope_")}
    return None if scaling == {"rope_type": "default"} else scaling or None


def _special_ids(target: Checkpoint, drafter: Checkpoint) -> dict[str, Any]:
    """The special ids as each side's files give them; a side that states none cannot disagree."""
    mine, theirs = special_ids(target), special_ids(drafter)
    both = sorted(name for name in mine.keys() & theirs.keys() if mine[name] and theirs[name])
    different = [f"{name} {mine[name]} and {theirs[name]}" for name in both if mine[name] != theirs[name]]
    relation = "different" if different else "equal" if both else "unknown"
    return {"relation": relation, "detail": ", ".join(different) or None, "target": mine, "drafter": theirs}


def _block_size(drafter: Checkpoint, family: Family, value: int, source: str) -> dict[str, Any]:
    trained, _ = family.trained_width(drafter.config)
    return {
        "value": value,
        "from": source,
        "trained": trained,
        "beyond_trained": value > trained,
        "counts_bonus_token": family.drafter.block_size.counts_bonus_token,
    }
