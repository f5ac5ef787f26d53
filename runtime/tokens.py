"""Token ids are checked here before they reach MLX, whose gathers do not check them and read other memory."""

from __future__ import annotations

from collections.abc import Sequence

from draftpair.errors import ToolError


def check_ids(ids: Sequence[int], vocab_size: int, whose: str) -> None:
    """Raise ToolError naming the first id outside [0, vocab_size); ``whose`` names the vocabulary."""
    for position, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise ToolError(
                f"token id {token} at position {position} is outside the {whose}'s vocabulary of "
                f"{vocab_size} entries (0 to {vocab_size - 1})",
                hint="check that tokenizer and checkpoint belong together: draftpair validate TARGET DRAFTER",
            )
