"""How wide the vocabulary is on either side of a pair, and whether a difference is only padding.

Embedding and output matrices are often rounded up beyond the tokenizer's last id, by another amount in each
release (151,936 rows against 152,064). Such rows mean nothing, and a pair may differ in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draftpair.checkpoint import Checkpoint, TensorInfo
from draftpair.validate.geometry import VOCABULARY, number

VocabularyRelation = Literal["equal", "padded", "different", "unknown"]

_EMBEDDING = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight")
_HEAD = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True)
class VocabularySizes:
    """Widths of one side; None where the side has no such matrix or does not say.

    ``config`` is config.json's ``vocab_size``; the rows are those of the matrices in the weight files;
    ``tokenizer`` is the highest id plus one.
    """

    config: int | None
    embedding_rows: int | None
    head_rows: int | None
    tokenizer: int | None

    @property
    def rows(self) -> int | None:
        """Width of the logits: output rows, else embedding rows (tied), else the config's size."""
        return next(
            (size for size in (self.head_rows, self.embedding_rows, self.config) if size is not None), None
        )

    @property
    def consistent(self) -> bool:
        """Whether this side's known figures agree: matrices with the config, every token id within both."""
        sizes = {size for size in (self.config, self.embedding_rows, self.head_rows) if size is not None}
        return len(sizes) <= 1 and (self.tokenizer is None or all(self.tokenizer <= size for size in sizes))


def vocabulary_sizes(checkpoint: Checkpoint, tokenizer_length: int | None = None) -> VocabularySizes:
    """Sizes from config and headers; of several matrices of a name, the one outside the layers counts."""
    return VocabularySizes(
        config=number(checkpoint.config, *VOCABULARY),
        embedding_rows=_rows(checkpoint.tensors, _EMBEDDING),
        head_rows=_rows(checkpoint.tensors, _HEAD),
        tokenizer=tokenizer_length,
    )


def vocabulary_relation(target: VocabularySizes, drafter: VocabularySizes) -> VocabularyRelation:
    """``equal`` widths; ``padded`` if they differ and both hold every id of both tokenizers; ``different``.

    Without any tokenizer a difference cannot be shown to be padding, so it is ``different``.
    ``unknown`` when a side has no width at all.
    """
    if target.rows is None or drafter.rows is None:
        return "unknown"
    if target.rows == drafter.rows:
        return "equal"
    needed = max(target.tokenizer or 0, drafter.tokenizer or 0)
    return "padded" if 0 < needed <= min(target.rows, drafter.rows) else "different"


def _rows(tensors: dict[str, TensorInfo], endings: tuple[str, ...]) -> int | None:
    """First dimension of the shortest matching name that has no ``layers`` in it; packing keeps the rows."""
    names = [
        name
        for name in tensors
        if any(name == ending or name.endswith(f".{ending}") for ending in endings)
        and "layers" not in name.split(".")
        and len(tensors[name].shape) >= 2
    ]
    return tensors[min(names, key=lambda name: (len(name), name))].shape[0] if names else None
