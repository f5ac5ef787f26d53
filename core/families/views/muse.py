"""Muse Glimmer's assistant: a flat config, some of which may stand in a dflash_config instead."""

from __future__ import annotations

from collections.abc import Iterator

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.families.views._shared import check_numbers, counted, lifted, whole
from draftpair.findings import Finding

TAPS = "target_layer_ids"


def canonical(config: ConfigView) -> tuple[ConfigView, list[Finding]]:
    """Everything at the root, and ``taps``. An empty layer_types says what a missing one says."""
    flat, conflicts = lifted(config, ("dflash_config",), {})
    if flat.get("layer_types") == []:
        flat = flat.having({"layer_types": None})
    return counted(flat, TAPS), conflicts


def block_width(config: ConfigView) -> tuple[int, str] | None:
    """The smaller of block_size and runtime_block_size; both count the bonus token."""
    block, runtime = config.get("block_size"), config.get("runtime_block_size")
    if not whole(block):
        return None
    if whole(runtime) and runtime < block:
        return runtime, f"runtime_block_size of the drafter, below its block_size of {block}"
    return block, "block_size of the drafter"


def check(checkpoint: Checkpoint, config: ConfigView) -> Iterator[Finding]:
    """Numbers against each other."""
    yield from check_numbers(config)
