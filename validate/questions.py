"""Six questions to ask of a drafter before loading it, each with what the files answer, or that they do not say.

They are those that mlxcel's documentation puts under "Pairing Community Checkpoints Safely".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.card import CARD
from draftpair.validate.claims import card_speaks_of_speed

NOT_STATED = "not stated"
_COMPARED = (
    ("tokenizer", "tokenizer"), ("vocabulary", "vocabulary"), ("hidden", "hidden width"), ("layers", "layers"),
    ("taps", "taps"), ("shared_kv", "shared keys and values"), ("rope", "rotary embedding"),
)  # fmt: skip


def answers(facts: Mapping[str, Any], drafter: Checkpoint) -> list[dict[str, str]]:
    """Question and answer for each of the six; an answer that the files do not give is `NOT_STATED`."""
    said = (
        _trained_on(facts),
        _run_by(facts),
        _compatible(facts),
        _contract(facts),
        _packed(facts),
        _speed(drafter),
    )
    return [
        {"question": question, "answer": answer or NOT_STATED}
        for question, answer in zip(_QUESTIONS, said, strict=True)
    ]


_QUESTIONS = (
    "Which target repository and revision was it trained for?",
    "Which engines implement this drafter?",
    "Do tokenizer, sizes, tap, layers and positions fit?",
    "Which block width and verification does it state?",
    "Are its weights quantized, and can they be read?",
    "Was its published speed measured end to end?",
)


def _trained_on(facts: Mapping[str, Any]) -> str | None:
    provenance, claim = facts["provenance"], facts["claim"]
    if provenance["source"]:
        return f"{provenance['source']} at revision {provenance['revision'] or NOT_STATED}: {provenance['relation']}"
    if claim["drafter"]:
        names = " or ".join(claim["drafter"])
        return f"{names} by {claim['from']}, which proves nothing; revision {NOT_STATED}"
    return None


def _run_by(facts: Mapping[str, Any]) -> str:
    family, engines = facts["drafter"]["family"], facts["engines"]
    return f"{family}: {', '.join(engines)}" if engines else f"{family}: none that draftpair knows"


def _compatible(facts: Mapping[str, Any]) -> str:
    compared = (
        f"{word} {facts[key]['relation']}" for key, word in _COMPARED if facts[key]["relation"] != "none"
    )
    tap = facts["tap"]["hidden_state"].replace("_", " ")
    return ", ".join([*compared, f"tap {tap}", *_position(facts)])


def _position(facts: Mapping[str, Any]) -> Iterator[str]:
    if facts["position"]:
        yield f"positions: {facts['position']}"


def _contract(facts: Mapping[str, Any]) -> str:
    width, verification = facts["block_size"], facts["verification"]
    return f"{width['meaning']} ({width['from']}); verification: {verification or NOT_STATED}"


def _packed(facts: Mapping[str, Any]) -> str:
    block, dtypes = facts["drafter"]["quantization"], facts["drafter"]["dtypes"]
    held = ", ".join(sorted(dtypes)) or "no tensors"
    if isinstance(block, dict) and "bits" in block:
        return f"yes, MLX {block.get('mode', 'affine')} {block['bits']} bits, groups of {block.get('group_size')}"
    if isinstance(block, dict):
        return (
            f"yes, {block.get('quant_method') or block.get('quant_algo') or 'in a form not named'} ({held})"
        )
    return f"no ({held})"


def _speed(drafter: Checkpoint) -> str | None:
    if card_speaks_of_speed(drafter):
        return f"{CARD} gives figures; whether target, batch, length and hardware compare is for the reader"
    return None
