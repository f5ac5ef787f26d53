"""Pair facts: a target and what drafts for it, reduced to the values and relations that decide whether they fit.

The document is public (``draftpair schema pair-facts``): another tool may produce it and apply a family's
``pair`` schema to it. Values that cannot be had from the files are null, never left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.checkpoint.memo import per_checkpoint
from draftpair.families import family_of_target
from draftpair.families.record import Family
from draftpair.schemas import load_schema
from draftpair.validate.borrowing import borrowed_facts, rope_facts, shared_kv_facts
from draftpair.validate.claims import claim_facts
from draftpair.validate.copies import copies
from draftpair.validate.draft import Draft
from draftpair.validate.provenance import provenance
from draftpair.validate.rollback import rollback_facts
from draftpair.validate.taps import mask_facts, tap_facts
from draftpair.validate.tokenizer import TokenizerComparison, compare, special_ids
from draftpair.validate.tokenizer_files import Tokenizer, read_tokenizer
from draftpair.validate.vocabulary import VocabularySizes, vocabulary_relation, vocabulary_sizes
from draftpair.validate.width import Width

# Sizes that have facts of their own.
_NOT_GEOMETRY = frozenset({"hidden_size", "vocab_size"})
# Keys that change what a layer computes without changing a shape.
_SETTINGS = (
    "rms_norm_eps", "hidden_act", "num_experts_per_tok", "n_group", "topk_group", "topk_method", "scoring_func",
    "norm_topk_prob", "routed_scaling_factor", "partial_rotary_factor", "tie_word_embeddings",
)  # fmt: skip
_STREAMS = ("hc_count", "hc_mult")
_PLAIN = ("F16", "BF16", "F32")


def pair_facts(
    target: Checkpoint, draft: Draft, width: Width, kind: str | None = None, values: bool = True
) -> dict[str, Any]:
    """The facts document of a pair.

    ``width`` is the block width and the rule it came from, ``kind`` the draft kind that was asked for. Without
    ``values`` no weight is read.
    """
    drafter, family = draft.checkpoint, draft.family
    tokenizers = read_tokenizer(target), read_tokenizer(drafter)
    vocabulary = _vocabulary(target, draft, *tokenizers)
    same_config = family.describes_target
    proven = _provenance(target, draft)
    return {
        "schema": load_schema("pair-facts")["$id"],
        "target": _side(target, family_of_target(target.config, family)),
        "drafter": {
            **_side(drafter, family),
            "kind": family.kind,
            "borrows": list(draft.borrows),
            "embedded": draft.head is not None,
            "published": family.head is None,
        },
        "family": _family(target, family),
        "kind": _kind(family, kind),
        "hidden": _hidden(target, draft),
        "streams": _streams(target, draft),
        "vocabulary": vocabulary,
        "tokenizer": _tokenizer(compare(*tokenizers), draft, tokenizers[1]),
        "geometry": _differences(target, draft.config, _size_keys(family, target) if same_config else []),
        # A split states for the drafter what its loaders need; what the target leaves open cannot disagree.
        "settings": _differences(
            target,
            draft.config,
            [key for key in _SETTINGS if same_config and target.config.get(key) is not None],
        ),
        "layers": _layers(target, draft),
        "taps": tap_facts(target, draft),
        "mask": mask_facts(target, draft, vocabulary["target_rows"]["embedding"] or vocabulary["target"]),
        "shared_kv": shared_kv_facts(target, draft),
        "borrowed": borrowed_facts(target, draft),
        "copies": _copies(target, draft) if values else _NOT_READ,
        "rope": rope_facts(target, draft),
        "dtype": _dtype(target, drafter),
        "rollback": rollback_facts(target, draft),
        "tap": {"hidden_state": family.drafter.tap, "fusion": family.drafter.fusion},
        "position": family.drafter.position,
        "verification": family.drafter.verification,
        "engines": list(family.engines),
        "lookalikes": _lookalikes(target, family, proven),
        "special_ids": _special_ids(target, drafter),
        "block_size": _block_size(draft, width),
        "provenance": proven,
        "claim": claim_facts(target, drafter, proven["relation"] in ("same", "derived")),
    }


_NOT_READ: dict[str, Any] = {"embedding": None, "head": None, "different": []}


def _copies(target: Checkpoint, draft: Draft) -> dict[str, Any]:
    """The drafter's own embedding and output matrix against the target's; a whole model's are its own business."""
    if draft.head is not None or draft.is_model:
        return _NOT_READ
    compared = copies(target, draft.checkpoint, draft.family, draft.config)
    different = [role for role, found in compared.items() if found["relation"] == "different"]
    return {**compared, "different": different}


def _provenance(target: Checkpoint, draft: Draft) -> dict[str, Any]:
    if draft.head is not None and draft.checkpoint.is_same_as(target):
        return {
            "relation": "same",
            "detail": "the head lies in the target's own files",
            "source": target.source,
            "revision": target.revision,
        }
    return provenance(target, draft.checkpoint)


def _lookalikes(target: Checkpoint, family: Family, provenance: dict[str, Any]) -> str | None:
    """The releases of the target's geometry, where nothing proves which of them the drafter was made for."""
    if provenance["relation"] in ("same", "derived"):
        return None
    return next(
        (
            group.releases
            for group in family.target.lookalikes
            if all(target.config.get(key) == value for key, value in group.geometry.items())
        ),
        None,
    )


def _side(checkpoint: Checkpoint, family: Family | None) -> dict[str, Any]:
    return {
        "source": checkpoint.source,
        "revision": checkpoint.revision,
        "family": family.name if family else None,
        "model_type": checkpoint.config.model_type,
        "quantization": checkpoint.config.quantization,
        "dtypes": dict(_dtypes(checkpoint)[0]),
    }


@per_checkpoint
def _dtypes(checkpoint: Checkpoint) -> tuple[Counter[str], str | None]:
    """How many tensors have each dtype; and the one that most of the plain numbers have, None without any."""
    tensors, numbers = Counter[str](), Counter[str]()
    for tensor in checkpoint.tensors.values():
        tensors[tensor.dtype] += 1
        if tensor.dtype in _PLAIN:
            numbers[tensor.dtype] += tensor.end - tensor.begin
    return tensors, numbers.most_common(1)[0][0] if numbers else None


def _family(target: Checkpoint, family: Family) -> dict[str, Any]:
    expected = list(family.target.model_types)
    served = not expected or family.serves(target.config)
    return {
        "target": target.config.model_type or target.config.root_model_type,
        "expected": expected,
        "relation": "expected" if served else "other",
    }


def _kind(family: Family, asked: str | None) -> dict[str, Any]:
    relation = "not asked" if asked is None else "same" if asked == family.kind else "different"
    return {"asked": asked, "drafter": family.kind, "relation": relation}


def _hidden(target: Checkpoint, draft: Draft) -> dict[str, Any]:
    if draft.family.drafter.tap == "none":
        return {"target": None, "drafter": None, "relation": "none"}
    return _compared(target.config.get("hidden_size"), draft.config.get(draft.family.drafter.hidden))


def _streams(target: Checkpoint, draft: Draft) -> dict[str, Any]:
    """How many streams of hidden states the target keeps; a drafter that states a number reads that many."""
    mine, theirs = (_first(config, _STREAMS) for config in (target.config, draft.config))
    compared = _compared(mine, theirs)
    return compared if draft.family.drafter.tap == "streams" else {**compared, "relation": "none"}


def _first(config: ConfigView, keys: Sequence[str]) -> Any:
    return next((config.get(key) for key in keys if config.get(key) is not None), None)


def _layers(target: Checkpoint, draft: Draft) -> dict[str, Any]:
    """The depth of the target, and of the one that a head was cut from; other drafters have `taps` for it."""
    if draft.family.head is None:
        return {"target": _whole(target.config.get("num_hidden_layers")), "drafter": None, "relation": "none"}
    return _compared(*(config.get("num_hidden_layers") for config in (target.config, draft.config)))


def _compared(mine: Any, theirs: Any) -> dict[str, Any]:
    mine, theirs = _whole(mine), _whole(theirs)
    relation = "unknown" if None in (mine, theirs) else "equal" if mine == theirs else "different"
    return {"target": mine, "drafter": theirs, "relation": relation}


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _vocabulary(
    target: Checkpoint, draft: Draft, mine: Tokenizer | None, theirs: Tokenizer | None
) -> dict[str, Any]:
    lengths = [tokenizer.length if tokenizer else None for tokenizer in (mine, theirs)]
    sizes = (
        vocabulary_sizes(target, lengths[0]),
        vocabulary_sizes(draft.checkpoint, lengths[1], draft.config),
    )
    return {
        "target": sizes[0].rows,
        "drafter": sizes[1].rows,
        "relation": vocabulary_relation(*sizes),
        "larger": _larger(sizes[0].rows, sizes[1].rows),
        "target_rows": _rows(sizes[0]),
        "drafter_rows": _rows(sizes[1]),
        "tokens": sizes[0].tokenizer,
        "consistent": all(side.consistent for side in sizes),
    }


def _larger(mine: int | None, theirs: int | None) -> str | None:
    if mine is None or theirs is None:
        return None
    return "target" if mine > theirs else "drafter" if theirs > mine else "neither"


def _rows(sizes: VocabularySizes) -> dict[str, int | None]:
    return {"config": sizes.config, "embedding": sizes.embedding_rows, "head": sizes.head_rows}


def _tokenizer(compared: TokenizerComparison, draft: Draft, theirs: Tokenizer | None) -> dict[str, Any]:
    # A head's folder has its target's tokenizer; what is published as a drafter may go without one.
    absent = theirs is None and draft.family.head is None and not draft.is_model
    return {
        "relation": "absent" if absent else compared.relation,
        "detail": compared.detail,
        "first_different": [
            {"id": d.id, "target": d.target, "drafter": d.drafter} for d in compared.different
        ],
        "pipeline": list(compared.pipeline),
    }


def _differences(target: Checkpoint, drafter: ConfigView, keys: Sequence[str]) -> dict[str, Any]:
    """Config keys compared one by one; null equals absent."""
    values = [(key, target.config.get(key), drafter.get(key)) for key in keys]
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


def _dtype(target: Checkpoint, drafter: Checkpoint) -> dict[str, Any]:
    """The type that most of each side's plain numbers have; what overflows in one may be a number in the other."""
    mine, theirs = _dtypes(target)[1], _dtypes(drafter)[1]
    relation = "compatible"
    if {mine, theirs} == {"F16", "BF16"}:
        relation = "drafter in float16" if theirs == "F16" else "target in float16"
    return {"target": mine, "drafter": theirs, "relation": relation}


def _special_ids(target: Checkpoint, drafter: Checkpoint) -> dict[str, Any]:
    """The special ids as each side's files give them; a side that states none cannot disagree."""
    mine, theirs = special_ids(target), special_ids(drafter)
    both = sorted(name for name in mine.keys() & theirs.keys() if mine[name] and theirs[name])
    different = [f"{name} {mine[name]} and {theirs[name]}" for name in both if mine[name] != theirs[name]]
    relation = "different" if different else "equal" if both else "unknown"
    return {"relation": relation, "detail": ", ".join(different) or None, "target": mine, "drafter": theirs}


def _block_size(draft: Draft, width: Width) -> dict[str, Any]:
    rule = draft.family.drafter.block_size
    trained = draft.family.trained_width(draft.config)
    return {
        "value": width.rows,
        "from": width.source,
        "trained": trained[0] if trained else None,
        "beyond_trained": trained is not None and width.rows > trained[0],
        "counts_bonus_token": rule.counts_bonus_token,
        "minimum": rule.minimum,
        "maximum": rule.maximum,
        "in_range": rule.minimum <= width.rows <= rule.maximum,
        "meaning": width.meaning,
    }
