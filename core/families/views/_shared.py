"""What several views do: find a key under each of its spellings, count taps, and hold numbers against each other."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.checkpoint.wording import printable
from draftpair.findings import Finding

FILE = "config.json"
_ORIGINAL = "compare config.json with the original repository's"
_SHOWN = 5


def spelt(config: ConfigView, spellings: Mapping[str, Sequence[str]]) -> tuple[ConfigView, list[Finding]]:
    """The config with each key of ``spellings`` at its root, from the first of its paths that states it.

    Null counts as not stated. Another path that says something else is a CONFIG-CONFLICT: engines differ in which
    of the two they read.
    """
    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    conflicts: list[Finding] = []
    for key, paths in spellings.items():
        stated = [(path, value) for path in paths if (value := at(config.raw, path)) is not None]
        if not stated:
            continue
        (first, taken), *others = stated
        values[key], places[key] = taken, place(config, first)
        conflicts += [
            _conflict(key, places[key], taken, place(config, path), value)
            for path, value in others
            if value != taken
        ]
    return config.having(values, where=places), conflicts


def lifted(
    config: ConfigView, blocks: Iterable[str], aliases: Mapping[str, str]
) -> tuple[ConfigView, list[Finding]]:
    """The config with the keys of nested objects at its root as well; ``aliases`` are other names of keys."""
    spellings: dict[str, list[str]] = {}
    for block in blocks:
        nested = config.raw.get(block)
        for key in nested if isinstance(nested, dict) else ():
            spellings.setdefault(aliases.get(key, key), []).append(f"{block}.{key}")
    for alias, key in aliases.items():
        if alias in config.raw:
            spellings.setdefault(key, []).append(alias)
    for key, paths in spellings.items():
        if key not in paths:
            paths.append(key)
    return spelt(config, spellings)


def rope_conflicts(config: ConfigView) -> list[Finding]:
    """Where the flat base of the rotary embedding is not the one in ``rope_parameters``."""
    return spelt(config, {"rope_theta": ("rope_parameters.rope_theta", "rope_theta")})[1]


def derived(config: ConfigView, ids: str) -> ConfigView:
    """The config with what follows from other keys: ``taps``, and the sizes that count as others' where not stated.

    ``reduced`` is 1 where the drafter's head has a vocabulary of its own, and ``whole`` the opposite.
    """
    vocabulary = config.get("vocab_size")
    own = config.get("draft_vocab_size", vocabulary)
    values: dict[str, Any] = {"reduced": int(own != vocabulary), "whole": int(own == vocabulary)}
    places: dict[str, str] = {}
    for key, other in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        if config.get(key) is None and config.get(other) is not None:
            values[key], places[key] = config.get(other), config.where(other) or ""
    stated = "draft_vocab_size" if config.get("draft_vocab_size") is not None else "vocab_size"
    places |= dict.fromkeys(("reduced", "whole"), config.where(stated) or "")
    return counted(config.having(values, where=places), ids)


def counted(config: ConfigView, ids: str) -> ConfigView:
    """The config with the number of ids under a key as ``taps``, 0 where that is no list."""
    taps = config.get(ids)
    return config.having({"taps": len(taps) if isinstance(taps, list) else 0})


def check_numbers(config: ConfigView) -> Iterator[Finding]:
    """Relations between numbers that no schema can state; a number that is none is reported elsewhere."""
    yield from _heads(config)
    yield from _layer_types(config)
    yield from _mask(config)
    if (
        whole(own := config.get("draft_vocab_size"))
        and whole(size := config.get("vocab_size"))
        and own > size
    ):
        yield problem(
            "CONFIG-DRAFT-VOCABULARY",
            f"the drafter's own vocabulary has {own} entries, the target's {size}",
            config.where("draft_vocab_size"),
            expected=size,
            found=own,
        )


def check_width(checkpoint: Checkpoint, config: ConfigView) -> Iterator[Finding]:
    """A drafter without an embedding of its own is as wide as its target, whose embedding it reads."""
    wide, hidden = config.get("target_hidden_size"), config.get("hidden_size")
    if whole(wide) and wide != hidden and "embed_tokens.weight" not in checkpoint.tensors:
        yield problem(
            "CONFIG-TARGET-HIDDEN",
            f"the drafter is {hidden} wide and has no embedding; the target's, which it would read, is {wide} wide",
            config.where("target_hidden_size"),
            expected=hidden,
            found=wide,
        )


def _heads(config: ConfigView) -> Iterator[Finding]:
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if whole(heads) and whole(groups) and groups and heads % groups:
        yield problem(
            "CONFIG-HEADS",
            f"{heads} attention heads cannot share {groups} key/value heads evenly",
            config.where("num_key_value_heads"),
            expected=f"a divisor of {heads}",
            found=groups,
        )


def _layer_types(config: ConfigView) -> Iterator[Finding]:
    types, layers = config.get("layer_types"), config.get("num_hidden_layers")
    if isinstance(types, list) and whole(layers) and len(types) != layers:
        yield problem(
            "CONFIG-LAYER-TYPES",
            f"layer_types names {len(types)} layers, num_hidden_layers counts {layers}",
            config.where("layer_types"),
            expected=layers,
            found=len(types),
        )


def _mask(config: ConfigView) -> Iterator[Finding]:
    mask, vocabulary = config.get("mask_token_id"), config.get("vocab_size")
    if not whole(mask):
        return
    if whole(vocabulary) and mask >= vocabulary:
        yield problem(
            "CONFIG-MASK-VOCABULARY",
            f"mask_token_id is {mask}; the vocabulary has {vocabulary} entries, so ids end with {vocabulary - 1}",
            config.where("mask_token_id"),
            expected=vocabulary - 1,
            found=mask,
        )
    for key in ("eos_token_id", "pad_token_id"):
        value = config.get(key)
        if mask in (value if isinstance(value, list) else [value]):
            yield problem(
                "CONFIG-MASK-SPECIAL",
                f"mask_token_id is {mask}, which is also the {key}",
                config.where("mask_token_id"),
                found=mask,
            )


def check_vocabulary_map(checkpoint: Checkpoint, config: ConfigView) -> Iterator[Finding]:
    """Reads ``d2t``, which says how far from a draft id its id in the target's vocabulary is, and ``t2d``.

    Every id that comes out must be one of the target's, and no two the same; and ``t2d`` has to be true for them
    alone.
    """
    table, vocabulary = checkpoint.tensors.get("d2t"), config.get("vocab_size")
    form = {"I64": "q", "I32": "i"}.get(table.dtype) if table else None
    if table is None or not whole(vocabulary):
        return
    if form is None:
        yield problem(
            "DRAFTER-VOCABULARY-MAP", f"d2t is {table.dtype}", "d2t", expected="I64 or I32", found=table.dtype
        )
        return
    offsets = struct.unpack(f"<{prod(table.shape)}{form}", checkpoint.read(table))
    ids = [number + offset for number, offset in enumerate(offsets)]
    if outside := [number for number in ids if not 0 <= number < vocabulary]:
        yield problem(
            "DRAFTER-VOCABULARY-MAP",
            f"d2t leads to {len(outside)} ids outside the target's vocabulary of {vocabulary}, "
            f"such as {', '.join(map(str, outside[:_SHOWN]))}",
            "d2t",
            expected=vocabulary - 1,
            found=outside[0],
            hint="its entries are offsets, target id minus draft id; a table of target ids has been stored instead, "
            "or it belongs to another vocabulary",
        )
    elif len(set(ids)) != len(ids):
        yield problem(
            "DRAFTER-VOCABULARY-MAP",
            f"d2t leads from {len(ids)} draft ids to only {len(set(ids))} of the target's",
            "d2t",
            expected=len(ids),
            found=len(set(ids)),
            hint="its entries are offsets, target id minus draft id; download the drafter again",
        )
    else:
        yield from _check_flags(checkpoint, ids, vocabulary)


def _check_flags(checkpoint: Checkpoint, ids: Sequence[int], vocabulary: int) -> Iterator[Finding]:
    """``t2d`` against the target ids that ``d2t`` leads to; engines take one of the two, or both."""
    table = checkpoint.tensors.get("t2d")
    if table is None or table.shape != (vocabulary,) or table.dtype not in ("BOOL", "U8"):
        return  # the inventory says so
    flagged = {number for number, flag in enumerate(checkpoint.read(table)) if flag}
    if other := sorted(flagged.symmetric_difference(ids)):
        yield problem(
            "DRAFTER-VOCABULARY-MAP",
            f"d2t and t2d disagree on {len(other)} of the target's ids, "
            f"such as {', '.join(map(str, other[:_SHOWN]))}",
            "t2d",
            expected=len(ids),
            found=len(flagged),
            hint="one of them belongs to another drafter, or was changed; download the drafter again",
        )


def problem(
    rule: str, message: str, where: str | None, expected: Any = None, found: Any = None, hint: str = _ORIGINAL
) -> Finding:
    """An error about a place in config.json, or about a tensor, which has no slash before its name."""
    place = f"{FILE}#{where}" if where is None or where.startswith("/") else where
    return Finding(rule, "error", message, place if where else FILE, expected, found, hint)


def whole(value: Any) -> bool:
    """Whether a value of a config is a whole number, none below zero."""
    return type(value) is int and value >= 0


def at(level: Any, path: str) -> Any:
    """The value that a path of keys joined by dots leads to; None where it leads nowhere."""
    for part in path.split("."):
        level = level.get(part) if isinstance(level, dict) else None
    return level


def place(config: ConfigView, path: str) -> str:
    """The JSON pointer, in the file, of a path of keys joined by dots."""
    first, dot, rest = path.partition(".")
    return (config.where(first) or f"/{first}") + dot.replace(".", "/") + rest.replace(".", "/")


def _conflict(key: str, first: str, taken: Any, other: str, value: Any) -> Finding:
    shown, contrary = printable(repr(taken), 60), printable(repr(value), 60)
    return Finding(
        "CONFIG-CONFLICT",
        "error",
        f"{key} is {shown} at {first} and {contrary} at {other}",
        where=f"{FILE}#{other}",
        expected=taken,
        found=value,
        hint="engines differ in which of the two they read; keep the one that the drafter was trained with",
    )
