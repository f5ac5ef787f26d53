"""A head that the speculators package has taken out of its target: its config is the target's, inside another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.families.views._shared import check_numbers, rope_conflicts, whole
from draftpair.families.views._speculators import flattened, rows_to_verify
from draftpair.findings import Finding

_GATED = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})


def canonical(config: ConfigView) -> tuple[ConfigView, list[Finding]]:
    """The target's sizes at the root; its layers are counted by ``num_target_layers``, the head's are always one."""
    flat, findings = flattened(config)
    experts, shared = flat.get("num_experts"), flat.get("shared_expert_intermediate_size")
    values: dict[str, Any] = {
        "num_target_layers": flat.get("num_hidden_layers"),
        "num_nextn_predict_layers": flat.get("num_nextn_predict_layers", 1),
        "num_experts": experts if whole(experts) else 0,
        "dense": int(not (whole(experts) and experts)),
        "shared_gates": int(whole(shared) and shared > 0),
        "query_parts": 2 if flat.get("backbone") in _GATED else 1,
    }
    places = {"num_target_layers": flat.where("num_hidden_layers") or ""}
    return flat.having(values, where=places), [*findings, *rope_conflicts(flat)]


def check(checkpoint: Checkpoint, config: ConfigView) -> Iterator[Finding]:
    """Numbers against each other."""
    yield from check_numbers(config)


block_width = rows_to_verify
