"""The config format of the speculators package, brought to the flat keys of the families that it stores.

It has no ``model_type``; the drafter's sizes are in ``transformer_layer_config``; the tapped layers of everything but
EAGLE-3 are counted one higher than elsewhere, because there the embedding's output is number 0.
"""

from __future__ import annotations

from typing import Any

from draftpair.checkpoint import ConfigView
from draftpair.checkpoint.wording import printable, some
from draftpair.families.views._shared import at, problem, spelt, whole
from draftpair.findings import Finding

NESTED = "transformer_layer_config"
_METHODS = "speculators_config.proposal_methods"
# Said at both levels, of two different things: the drafter's class, and the layer's.
_OF_THE_CLASS = frozenset({
    "architectures", "auto_map", "dtype", "model_type", "tie_word_embeddings", "torch_dtype", "transformers_version",
})  # fmt: skip


def flattened(config: ConfigView) -> tuple[ConfigView, list[Finding]]:
    """The config with the layer's sizes and the taps at its root.

    ``backbone`` is the type of its layers, ``speculative_tokens`` how many tokens its default method proposes. Any
    other config only gets ``backbone``.
    """
    nested = config.raw.get(NESTED)
    if not isinstance(nested, dict):
        return config.having({"backbone": config.get("model_type")}, where={"backbone": "/model_type"}), []
    spellings: dict[str, tuple[str, ...]] = {
        key: (f"{NESTED}.{key}", key) for key in nested if key not in _OF_THE_CLASS
    }
    spellings["backbone"] = (f"{NESTED}.model_type",)
    flat, findings = spelt(config, spellings)
    for read in (_taps, _method):
        flat, more = read(flat)
        findings += more
    return flat, findings


def _taps(config: ConfigView) -> tuple[ConfigView, list[Finding]]:
    ids = config.raw.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not all(type(number) is int for number in ids):
        return config, []
    taps = [number - 1 for number in ids]
    stated = config.raw.get("target_layer_ids")
    conflicts = []
    if stated is not None and stated != taps:
        conflicts.append(
            problem(
                "CONFIG-CONFLICT",
                f"aux_hidden_state_layer_ids {_shown(ids)} are the outputs of layers {_shown(taps)}, target_layer_ids "
                f"says {_shown(stated)}",
                "/target_layer_ids",
                expected=taps,
                found=stated,
            )
        )
    places = {"target_layer_ids": "/aux_hidden_state_layer_ids"}
    return config.having({"target_layer_ids": taps}, where=places), conflicts


def _method(config: ConfigView) -> tuple[ConfigView, list[Finding]]:
    methods, name = at(config.raw, _METHODS), at(config.raw, "speculators_config.default_proposal_method")
    if not isinstance(methods, list):
        return config, []
    listed = [method for method in methods if isinstance(method, dict)]
    for number, method in enumerate(listed):
        if name in (None, method.get("proposal_type")):
            place = f"/speculators_config/proposal_methods/{number}/speculative_tokens"
            tokens: Any = method.get("speculative_tokens")
            return config.having({"speculative_tokens": tokens}, where={"speculative_tokens": place}), []
    types = [method.get("proposal_type") for method in listed]
    return config, [
        problem(
            "CONFIG-PROPOSAL-METHOD",
            f"the default proposal method {_shown(name)} is not among those listed, {some([repr(t) for t in types])}",
            "/speculators_config/default_proposal_method",
            expected=types,
            found=name,
        )
    ]


def _shown(value: Any) -> str:
    return printable(repr(value), 60)


def rows_to_verify(config: ConfigView) -> tuple[int, str] | None:
    """A row for each of the tokens that the default method proposes, and one for the bonus token."""
    tokens = config.get("speculative_tokens")
    return (tokens + 1, "speculative_tokens + 1 of the drafter") if whole(tokens) else None
