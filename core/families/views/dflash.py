"""DFlash and what is built on it: keys in ``dflash_config`` or at the root, or a speculators config."""

from __future__ import annotations

from collections.abc import Iterator

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.families.views._shared import (
    check_numbers,
    check_vocabulary_map,
    check_width,
    derived,
    lifted,
    problem,
    rope_conflicts,
    whole,
)
from draftpair.families.views._speculators import flattened
from draftpair.findings import Finding

TAPS = "target_layer_ids"
_BLOCKS = ("dflash_config", "dspark_config")
_ALIASES = {"causal": "is_causal", "dflash_query_causal": "is_causal", "swa_window_size": "sliding_window"}


def canonical(config: ConfigView) -> tuple[ConfigView, list[Finding]]:
    """The config with everything at its root. What is said at both levels must be the same."""
    flat, findings = flattened(config)
    flat, conflicts = lifted(flat, _BLOCKS, _ALIASES)
    return derived(flat, TAPS), [*findings, *conflicts, *rope_conflicts(flat)]


def block_width(config: ConfigView) -> tuple[int, str] | None:
    """``block_size`` rows: the committed token, and a proposal in each row but that.

    A drafter that is trained to sample from the committed token's row as well proposes one more.
    """
    size = config.get("block_size")
    if not whole(size):
        return None
    if config.get("sample_from_anchor") is True:
        return size + 1, "block_size + 1 of the drafter, which counts proposals as sample_from_anchor is set"
    return size, "block_size of the drafter, which counts the bonus token"


def check(checkpoint: Checkpoint, config: ConfigView) -> Iterator[Finding]:
    """Numbers against each other, and the table of a vocabulary of its own."""
    width = block_width(config)
    yield from check_backbone(checkpoint, config, width[0] if width else None)
    yield from _parts(config)


def _parts(config: ConfigView) -> Iterator[Finding]:
    """DFlash2: groups that the width is a multiple of, and no more candidates than there are token ids."""
    hidden, group = config.get("hidden_size"), config.get("conv_group_size")
    if whole(hidden) and whole(group) and group and hidden % group:
        yield problem(
            "CONFIG-CONVOLUTION",
            f"conv_group_size is {group}, and hidden_size, {hidden}, is no multiple of it",
            config.where("conv_group_size"),
            expected=f"a divisor of {hidden}",
            found=group,
        )
    best, vocabulary = config.get("selector_top_k"), config.get("vocab_size")
    if whole(best) and whole(vocabulary) and best > vocabulary:
        yield problem(
            "CONFIG-SELECTOR",
            f"selector_top_k is {best}; the vocabulary has {vocabulary} entries",
            config.where("selector_top_k"),
            expected=vocabulary,
            found=best,
        )


def check_backbone(checkpoint: Checkpoint, config: ConfigView, rows: int | None) -> Iterator[Finding]:
    """What all drafters with this backbone are checked for; ``rows`` are those that a block was trained with.

    mlx-vlm refuses to load a ``runtime_block_size`` above them.
    """
    yield from check_numbers(config)
    yield from check_width(checkpoint, config)
    runtime, tokens = config.get("runtime_block_size"), config.get("speculative_tokens")
    if rows is not None and whole(runtime) and runtime > rows:
        yield problem(
            "CONFIG-RUNTIME-BLOCK-SIZE",
            f"runtime_block_size is {runtime}; a block of this drafter has {rows} rows",
            config.where("runtime_block_size"),
            expected=rows,
            found=runtime,
        )
    if rows is not None and whole(tokens) and tokens > rows - 1:
        yield problem(
            "CONFIG-SPECULATIVE-TOKENS",
            f"{tokens} tokens are to be proposed, and a block of {rows} rows holds {rows - 1}",
            config.where("speculative_tokens"),
            expected=rows - 1,
            found=tokens,
        )


check_values = check_vocabulary_map
