"""DSpark: a DFlash backbone with a Markov head, whose ``block_size`` counts proposals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.families.views import dflash
from draftpair.families.views._shared import problem, whole
from draftpair.findings import Finding

LARGEST = 32
"""Most rows that a verify block of a DSpark drafter may have."""
_RUNTIME = 8


def canonical(config: ConfigView) -> tuple[ConfigView, list[Finding]]:
    """As for DFlash; which Markov head it has, and the sizes of its layers, which Gemma 4 spells its own way."""
    flat, findings = dflash.canonical(config)
    head = flat.get("markov_head_type", "vanilla")
    values: dict[str, Any] = {f"markov_{kind}": int(head == kind) for kind in ("gated", "rnn")}
    values["confidence_head_with_markov"] = flat.get("confidence_head_with_markov", True)
    return _attention(flat.having(values)), findings


def _attention(config: ConfigView) -> ConfigView:
    """Gemma 4's draft layers are all global ones: wider heads, and values that are the keys."""
    gemma = isinstance(backbone := config.get("backbone"), str) and backbone.startswith("gemma4")
    shared = gemma and config.get("attention_k_eq_v") is True
    keys = {
        "head_width": "global_head_dim" if gemma else "head_dim",
        "kv_heads": "num_global_key_value_heads" if shared else "num_key_value_heads",
    }
    values = {name: config.get(key) for name, key in keys.items()}
    places = {name: config.where(key) or f"/{key}" for name, key in keys.items()}
    return config.having({**values, "own_values": int(not shared), "sandwich": int(gemma)}, where=places)


def block_width(config: ConfigView) -> tuple[int, str] | None:
    """One row more than ``block_size``, at most ``runtime_block_size`` (8 where that is not stated), never above 32."""
    trained, cap = _trained(config), config.get("runtime_block_size")
    if trained is None:
        return None
    rows, said = trained
    cap, bound = (cap, f"runtime_block_size, {cap}") if whole(cap) else (_RUNTIME, f"{_RUNTIME} by default")
    if min(cap, LARGEST) >= rows:
        return rows, said
    return min(cap, LARGEST), f"{said}: {rows}, cut to {bound if cap <= LARGEST else LARGEST}"


def _trained(config: ConfigView) -> tuple[int, str] | None:
    """The rows that a block was trained with: the committed token's proposes too, unless the config says otherwise."""
    size = config.get("block_size")
    if not whole(size):
        return None
    if config.get("dspark_bonus_anchor") is True or config.get("sample_from_anchor") is False:
        return size, "block_size of the drafter, which counts the bonus token here"
    return size + 1, "block_size + 1 of the drafter, which counts proposals"


def check(checkpoint: Checkpoint, config: ConfigView) -> Iterator[Finding]:
    """What every such backbone is checked for, and a confidence head that is declared and not there."""
    trained = _trained(config)
    yield from dflash.check_backbone(checkpoint, config, trained[0] if trained else None)
    declared, tensor = config.get("enable_confidence_head"), "confidence_head.proj.weight"
    if declared is True and tensor not in checkpoint.tensors:
        yield problem(
            "DRAFTER-CONFIDENCE-HEAD",
            f"enable_confidence_head is true, and {tensor} is not there",
            config.where("enable_confidence_head"),
            expected=tensor,
            hint="download the drafter again, or compare config.json with the original's",
        )


check_values = dflash.check_values
