"""Whether rejected proposals can be taken back out of the two models' caches."""

from __future__ import annotations

from typing import Any

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.errors import Refused
from draftpair.families.specs import MOST
from draftpair.validate.draft import Draft
from draftpair.validate.geometry import LAYERS, Unlikely, number
from draftpair.validate.layers import UnknownLayers, layer_kinds

_WINDOW = (
    "sliding-window attention, whose cache overwrites what a rejected token would have to give back unless the "
    "runtime keeps more than the window"
)
_WHY = {
    "linear": "linear attention, whose state has no way back",
    "mamba": "state-space layers, whose state has no way back",
    "conv": "short convolutions, whose state has no way back",
}


# Of a pair, the side that can do least decides.
_RELATIONS = {"no": "not both", "unknown": "unknown", "window": "windows"}


def rollback_facts(target: Checkpoint, draft: Draft) -> dict[str, Any]:
    """The ``rollback`` of the pair facts.

    Each side is ``trim`` where every cache can be cut back, ``window`` where a sliding window is the only one that
    cannot once it is full, ``no`` where another cannot, or ``unknown``; ``relation`` is ``both``, ``windows``,
    ``not both`` or ``unknown``. A runtime may have a way of its own for its targets (it replays what was
    accepted): this says what an ordinary cache allows. A drafter that is no whole model brings its own cache.
    """
    sides = {"target": target.config}
    if draft.is_model:
        sides["drafter"] = draft.config
    said = {side: _of(config) for side, config in sides.items()}
    words = [f"the {side} has {why}" for side, (can, why) in said.items() if can != "trim"]
    cans = {side: can for side, (can, _) in said.items()}
    relation = next((_RELATIONS[can] for can in _RELATIONS if can in cans.values()), "both")
    return {
        "target": cans["target"],
        "drafter": cans.get("drafter"),
        "relation": relation,
        "detail": "; ".join(words) or None,
    }


def _of(config: ConfigView) -> tuple[str, str]:
    try:
        layers = number(config, *LAYERS, maximum=MOST)
        kinds = layer_kinds(config, layers) if layers else None
    except (UnknownLayers, Unlikely, Refused) as why:
        return "unknown", str(why)
    if kinds is None:
        return "unknown", "no number of layers in its config.json"
    parts = {part for kind in kinds for part in kind.split("+")}
    stuck = [why for kind, why in _WHY.items() if kind in parts]
    if stuck:
        return "no", ", and ".join(stuck)
    return ("window", _WINDOW) if "sliding" in parts else ("trim", "")
