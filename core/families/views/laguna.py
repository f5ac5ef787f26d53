"""Laguna's DFlash drafters: what dflash_config holds is brought to the root, where plain models have their keys."""

from __future__ import annotations

from collections.abc import Iterator

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.checkpoint.wording import printable
from draftpair.families.views._shared import check_numbers, counted, lifted, problem, whole
from draftpair.findings import Finding

TAPS = "target_layer_ids"
_AUXILIARY = "eagle_aux_hidden_state_layer_ids"
_WINDOWS = "sliding_windows"


def canonical(config: ConfigView) -> tuple[ConfigView, list[Finding]]:
    """Everything at the root, and ``taps``."""
    flat, conflicts = lifted(config, ("dflash_config",), {})
    return counted(flat, TAPS), conflicts


def check(checkpoint: Checkpoint, config: ConfigView) -> Iterator[Finding]:
    """Numbers against each other."""
    yield from check_numbers(config)
    yield from _windows(config)
    yield from _vocabularies(config)
    yield from _auxiliary(config)


def _windows(config: ConfigView) -> Iterator[Finding]:
    """One window for all layers: mlxcel takes each layer's own, mlx-vlm the one for all."""
    windows, window = config.get(_WINDOWS), config.get("sliding_window")
    if not isinstance(windows, list) or not windows:
        return
    expected = [window] * config.get("num_hidden_layers", 0)
    if windows != expected:
        yield problem(
            "CONFIG-WINDOW",
            f"sliding_windows is not sliding_window {window} for every layer; engines read one or the other",
            config.where(_WINDOWS),
            expected=expected,
            found=windows,
        )


def _vocabularies(config: ConfigView) -> Iterator[Finding]:
    """The target's embedding and output matrix serve the drafter: it has no vocabulary of its own."""
    own, entries = config.get("draft_vocab_size"), config.get("vocab_size")
    if whole(own) and whole(entries) and own < entries:
        yield problem(
            "CONFIG-DRAFT-VOCABULARY",
            f"draft_vocab_size is {own} and vocab_size {entries}; the target's matrices are used whole",
            config.where("draft_vocab_size"),
            expected=entries,
            found=own,
        )


def _auxiliary(config: ConfigView) -> Iterator[Finding]:
    """The same taps as vLLM counts them, from 1: an engine that reads these would tap other layers."""
    taps, auxiliary = config.get(TAPS), config.get(_AUXILIARY)
    if not isinstance(auxiliary, list) or not isinstance(taps, list) or not all(map(whole, taps)):
        return
    expected = [tap + 1 for tap in taps]
    if auxiliary != expected:
        yield problem(
            "CONFIG-TAPS-AUXILIARY",
            f"{_AUXILIARY} is {printable(repr(auxiliary), 60)} and target_layer_ids {printable(repr(taps), 60)}; the "
            f"former are the latter, each one higher",
            config.where(_AUXILIARY),
            expected=expected,
            found=auxiliary,
        )
