"""What a drafter reads of its target's layers, and the id with which it fills a block, held against the target."""

from __future__ import annotations

import itertools
from typing import Any

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.families.specs import MOST, TapsSpec
from draftpair.validate.draft import Draft
from draftpair.validate.geometry import LAYERS, number
from draftpair.validate.tokenizer import special_ids

DECLARED_LAYERS = "num_target_layers"
EMBEDDING_OUTPUT = -1


def tap_facts(target: Checkpoint, draft: Draft) -> dict[str, Any]:
    """The ``taps`` of the pair facts: ids, and how they lie in a target of so many layers.

    ``relation`` is ``in range``, ``beyond``, ``malformed``, ``unknown`` where the target does not say how many layers
    it has, or ``none`` for a drafter that taps none; ``depth``
    compares the number of layers that the drafter was made for with the target's. ``last`` is the layer whose output
    the last tap is, ``at_end`` whether that is the target's last.
    """
    layers = number(target.config, *LAYERS, maximum=MOST)
    spec = draft.family.drafter.taps
    declared = draft.config.get(DECLARED_LAYERS) if draft.family.head is None else None
    facts: dict[str, Any] = {
        "ids": None,
        "convention": spec.convention if spec else None,
        "target_layers": layers,
        "declared_layers": declared if type(declared) is int else None,
        "depth": _depth(declared, layers),
        "last": None,
        "at_end": False,
        "relation": "none",
        "detail": None,
    }
    return facts if spec is None else facts | _placed(spec, draft.config, layers)


def _depth(declared: Any, layers: int | None) -> str:
    if type(declared) is not int:
        return "none"
    return "unknown" if layers is None else "equal" if declared == layers else "different"


def _placed(spec: TapsSpec, config: ConfigView, layers: int | None) -> dict[str, Any]:
    ids = config.get(spec.ids)
    problem = ids_problem(ids)
    if problem:
        return {"ids": ids if isinstance(ids, list) else None, "relation": "malformed", "detail": problem}
    # Counted as outputs: the input of a layer is the output of the one before it.
    outputs = [number - (spec.convention == "input") for number in ids]
    beyond = [number for number, output in zip(ids, outputs, strict=True) if layers and output >= layers]
    placed = {"ids": ids, "last": outputs[-1], "at_end": outputs[-1] + 1 == layers}
    if layers is None:
        return {**placed, "relation": "unknown"}
    if beyond:
        which = ", ".join(map(str, beyond))
        detail = f"id {which} is past the target's {layers} layers"
        return {**placed, "relation": "beyond", "detail": detail}
    return {**placed, "relation": "in range"}


def ids_problem(ids: Any) -> str | None:
    """What is wrong with a list of tap ids, None when nothing is: they are whole numbers, each above the one before.

    -1 is the output of the embedding.
    """
    if not isinstance(ids, list) or not ids:
        return "no list of layer ids is stated, and none may be guessed"
    if any(type(number) is not int or number < EMBEDDING_OUTPUT for number in ids):
        return "they are not all numbers of layers"
    falling = next((b for a, b in itertools.pairwise(ids) if b <= a), None)
    return (
        None
        if falling is None
        else f"they do not increase: {falling} comes after a number that is not smaller"
    )


def mask_facts(target: Checkpoint, draft: Draft, rows: int | None) -> dict[str, Any]:
    """The ``mask`` of the pair facts; ``rows`` are those of the target's embedding.

    ``relation`` is ``in range``, ``beyond``, ``missing``, or ``none`` for a drafter without a mask token.
    """
    key = draft.family.drafter.mask
    if key is None:
        return {"id": None, "rows": rows, "relation": "none", "special": None, "detail": None}
    value = draft.config.get(key)
    facts = {"id": value if type(value) is int else None, "rows": rows, "special": None}
    if type(value) is not int or value < 0:
        return {**facts, "relation": "missing", "detail": f"which is no id: {key} has to state one"}
    if rows is not None and value >= rows:
        return {**facts, "relation": "beyond", "detail": f"and the target's embedding has {rows} rows"}
    ids = special_ids(target)
    names = sorted({name.split()[-1] for name, listed in ids.items() if value in listed and "eos" in name})
    names += sorted({name.split()[-1] for name, listed in ids.items() if value in listed and "pad" in name})
    return {**facts, "special": names[0] if names else None, "relation": "in range", "detail": None}
