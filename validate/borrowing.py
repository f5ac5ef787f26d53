"""What a drafter uses of its target besides hidden states: embedding, output head, keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draftpair.checkpoint import PLAIN_DTYPES, Checkpoint, ConfigView
from draftpair.checkpoint.fingerprint import is_incomplete
from draftpair.checkpoint.rope import Rope
from draftpair.families.record import Family
from draftpair.families.views import of_layer
from draftpair.validate.draft import Draft
from draftpair.validate.vocabulary import embedding_of, output_head_of

_TYPES, _SLIDING = "layer_types", "sliding_attention"


def borrowed_facts(target: Checkpoint, draft: Draft) -> dict[str, Any]:
    """The ``borrowed`` of the pair facts: what the drafter takes from the target, and whether that is there.

    ``relation`` is ``present``, ``missing``, ``none`` where nothing is borrowed, or ``unknown`` where the target's
    weights are not all at hand. ``packed`` lists what is quantized there.
    """
    needed = draft.borrows
    found = {"embedding": embedding_of(target), "head": output_head_of(target) or _tied(target)}
    absent = [role for role in needed if found[role] is None]
    packed = [role for role in needed if (tensor := found[role]) and tensor.dtype not in PLAIN_DTYPES]
    relation = "none" if not needed else "present"
    if absent:
        relation = "unknown" if is_incomplete(target) or not target.tensors else "missing"
    return {
        "needed": list(needed),
        "relation": relation,
        "packed": packed,
        "detail": f"no tensor of it looks like its {' or its '.join(absent)}" if absent else None,
    }


def _tied(target: Checkpoint) -> Any:
    """The embedding, where the target's config says that it is the output head as well, or says nothing."""
    return embedding_of(target) if target.config.get("tie_word_embeddings") is not False else None


def shared_kv_facts(target: Checkpoint, draft: Draft) -> dict[str, Any]:
    """The ``shared_kv`` of the pair facts, for a drafter that reads its target's keys and values.

    It reads those of the target's last layer of each type that keeps its own. ``relation`` is ``equal``,
    ``different``, ``missing`` (a type that the target has no such layer of), ``unknown``, or ``none``.
    """
    types = draft.family.drafter.shared_kv
    if not types:
        return {"relation": "none", "detail": None, "layers": []}
    own = draft.config.get(_TYPES)
    theirs = _own_layer_types(target)
    if not isinstance(own, list) or theirs is None:
        side = "drafter" if theirs is not None else "target"
        return {"relation": "unknown", "detail": f"the {side} does not list its layer types", "layers": []}
    layers = [_shared_layer(target, draft, name, theirs, own.index(name)) for name in types if name in own]
    missing = [layer["type"] for layer in layers if layer["target_layer"] is None]
    if missing:
        detail = f"the target has no {' and no '.join(missing)} layer that keeps its own keys and values"
        return {"relation": "missing", "detail": detail, "layers": layers}
    different = [text for layer in layers for text in _unlike(layer)]
    unknown = [text for layer in layers for text in _unstated(layer)]
    relation = "different" if different else "unknown" if unknown else "equal"
    return {"relation": relation, "detail": "; ".join(different or unknown) or None, "layers": layers}


def _own_layer_types(target: Checkpoint) -> list[Any] | None:
    """The types of the target's layers that keep their own keys and values; the last ones may share others'."""
    listed, shared = target.config.get(_TYPES), target.config.get("num_kv_shared_layers", 0)
    if not isinstance(listed, list) or type(shared) is not int or not 0 <= shared <= len(listed):
        return None
    return listed[: len(listed) - shared]


def _shared_layer(
    target: Checkpoint, draft: Draft, name: str, theirs: list[Any], number: int
) -> dict[str, Any]:
    places = [place for place, other in enumerate(theirs) if other == name]
    mine = of_layer(draft.family, draft.config, number)
    facts: dict[str, Any] = {
        "type": name,
        "target_layer": places[-1] if places else None,
        "drafter": _key_sizes(mine, name),
        "target": dict.fromkeys(_key_sizes(mine, name)),
    }
    if places:
        facts["target"] = _key_sizes(of_layer(draft.family, target.config, places[-1]), name)
    return facts


def _key_sizes(config: ConfigView, layer_type: str) -> dict[str, Any]:
    """What shapes the keys that a layer of a type keeps; the window of one that keeps the last ones only."""
    sizes = {"head_dim": config.get("head_dim"), "kv_heads": config.get("num_key_value_heads")}
    return sizes | ({"window": config.get("sliding_window")} if layer_type == _SLIDING else {})


def _unlike(layer: dict[str, Any]) -> Iterator[str]:
    for key, mine in layer["drafter"].items():
        theirs = layer["target"][key]
        if None not in (mine, theirs) and mine != theirs:
            yield (
                f"{key} of the {layer['type']} layers is {mine} in the drafter and {theirs} in the target's layer "
                f"{layer['target_layer']}"
            )


def _unstated(layer: dict[str, Any]) -> Iterator[str]:
    for side in ("drafter", "target"):
        for key, value in layer[side].items():
            if value is None:
                yield f"the {side} does not state {key} of its {layer['type']} layers"


def rope_facts(target: Checkpoint, draft: Draft) -> dict[str, Any]:
    """The ``rope`` of the pair facts.

    ``relation``: ``equal`` or ``different`` for a head, whose settings are its target's; ``shared, different`` for
    a drafter whose queries meet the target's keys; ``own`` for one with keys of its own, whose settings are its own.
    """
    mine, theirs = _rope(target.config.rope), _rope(draft.config.rope)
    facts: dict[str, Any] = {"target": mine, "drafter": theirs, "detail": None}
    if draft.family.drafter.shared_kv:
        unlike = list(_unlike_ropes(target, draft, draft.family))
        return {
            **facts,
            "detail": "; ".join(unlike) or None,
            "relation": "shared, different" if unlike else "equal",
        }
    if not draft.family.describes_target:
        return {**facts, "relation": "own"}
    return {**facts, "relation": "equal" if mine == theirs else "different"}


def _unlike_ropes(target: Checkpoint, draft: Draft, family: Family) -> Iterator[str]:
    for name in family.drafter.shared_kv:
        mine = draft.config.rope.layer_types.get(name, draft.config.rope)
        theirs = target.config.rope.layer_types.get(name, target.config.rope)
        for key, word in (("theta", "the base"), ("partial", "the turned part"), ("scaling", "the scaling")):
            one, other = getattr(mine, key), getattr(theirs, key)
            if one != other:
                yield (
                    f"{word} of the {name} layers is {_stated(one)} in the drafter and {_stated(other)} in the target"
                )


def _stated(value: Any) -> str:
    return "not stated" if value is None else str(value)


def _rope(rope: Rope) -> dict[str, Any]:
    """Base and scaling without the scaling's sections: a text token has one position in all of them."""
    scaling = {key: value for key, value in (rope.scaling or {}).items() if not key.startswith("mrope_")}
    return {"theta": rope.theta, "scaling": None if scaling == {"rope_type": "default"} else scaling or None}
