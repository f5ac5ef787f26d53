"""Recognises a whole model, of whatever family: decoder layers with an embedding."""

from __future__ import annotations

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.fingerprint import unwrapped
from draftpair.checkpoint.memo import per_checkpoint

_TRUNK_LAYER = (".layers.0.", ".blocks.0.", ".h.0.")
_EMBEDDING = (
    "embed_tokens.", "word_embeddings.", "backbone.embeddings.", "llm.embed.", "wte.", "embed_in.", "tok_embeddings.",
)  # fmt: skip
# Others have such a module as well, for other things.
_BARE_EMBEDDING = "embed."


@per_checkpoint
def is_model(checkpoint: Checkpoint) -> bool:
    """Whether the tensors hold decoder layers and an embedding; a drafter that has both is for others to tell."""
    names = checkpoint.tensors
    layers = any(part in name or name.startswith(part[1:]) for name in names for part in _TRUNK_LAYER)
    return layers and (
        any(part in name for name in names for part in _EMBEDDING)
        or any(unwrapped(name).startswith(_BARE_EMBEDDING) for name in names)
    )
