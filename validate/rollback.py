"""Whether rejected proposals can be taken back out of the two models' caches."""

from __future__ import annotations

from typing import Any

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.errors import Refused
from draftpair.families.specs import MOST
from draftpair.validate.draft import Draft
from draftpair.validate.geometry import LAYERS, Unlikely, number
from draftpair.validate.layers import UnknownLayers, layer_kinds

_WHY = {
    "sliding": "sliding-window attention, whose cache overwrites what a rejected token would have to give back",
    "linear": "linear attention, whose state has no way back",
    "mamba": "state-space layers, whose state has no way back",
    "conv": "short convolutions, whose state has no way back",
}


def rollback_facts(target: Checkpoint, draft: Draft) -> dict[str, Any]:
    """The ``rollback`` of the pair facts.

    Each side is ``trim`` where every cache can be cut back, ``no`` where one cannot, or ``unknown``; ``relation`` is
    ``both``, ``not both`` or ``unknown``. A runtime may have a way of its own for its targets (it replays what was
    accepted): this says what an ordinary cache allows. A drafter that is no whole model brings its own cache.
    """
    sides = {"target": target.config}
    if draft.is_model:
        sides["drafter"] = draft.config
    said = {side: _of(config) for side, config in sides.items()}
    words = [f"the {side} has {why}" for side, (can, why) in said.items() if can != "trim"]
    cans = {side: can for side, (can, _) in said.items()}
    relation = "not both" if "no" in cans.values() else "unknown" if "unknown" in cans.values() else "both"
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
    return ("no", ", and ".join(stuck)) if stuck else ("trim", "")
