"""EAGLE-3 and P-EAGLE: the tapped layers at the root or in ``eagle_config``, or a speculators config."""

from __future__ import annotations

from collections.abc import Iterator

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.families.views._shared import (
    check_numbers,
    check_vocabulary_map,
    check_width,
    derived,
    lifted,
    rope_conflicts,
    whole,
)
from draftpair.families.views._speculators import flattened, rows_to_verify
from draftpair.findings import Finding

TAPS = "eagle_aux_hidden_state_layer_ids"
_FLAGS = ("attention_bias", "fc_norm", "mlp_bias", "norm_before_fc")


def canonical(config: ConfigView) -> tuple[ConfigView, list[Finding]]:
    """The config with everything at its root; which tensors are there follows from its flags and types.

    ``head_dim`` is what the heads' share of the width leaves where it is not stated, as Llama's layers have it.
    """
    flat, findings = flattened(config)
    flat, conflicts = lifted(flat, ("eagle_config",), {"aux_hidden_state_layer_ids": TAPS})
    flat = derived(flat, TAPS)
    values = {
        flag: int(flat.get(flag) is True) for flag in _FLAGS if type(flat.get(flag)) in (bool, type(None))
    }
    values["parallel"] = int(flat.get("speculators_model_type") == "peagle")
    values["head_norms"] = int(flat.get("backbone") == "qwen3")
    values["own_head"] = int(flat.get("tie_word_embeddings") is not True or flat.get("reduced") == 1)
    hidden, heads = flat.get("hidden_size"), flat.get("num_attention_heads")
    if flat.get("head_dim") is None and whole(hidden) and whole(heads) and heads and hidden % heads == 0:
        values["head_dim"] = hidden // heads
    return flat.having(values), [*findings, *conflicts, *rope_conflicts(flat)]


def layer(config: ConfigView, number: int) -> ConfigView:
    """The first layer attends over the embedding and the target's state side by side, and norms the state itself."""
    first = int(number == 0)
    hidden = config.get("hidden_size")
    return config.having({"first": first, "input_width": hidden * (1 + first) if whole(hidden) else hidden})


def check(checkpoint: Checkpoint, config: ConfigView) -> Iterator[Finding]:
    """Numbers against each other."""
    yield from check_numbers(config)
    yield from check_width(checkpoint, config)


check_values = check_vocabulary_map


block_width = rows_to_verify
