"""How wide the vocabulary is on either side of a pair, and whether a difference is only padding.

Embedding and output matrices are often rounded up beyond the tokenizer's last id, by another amount in each
release (151,936 rows against 152,064). Such rows mean nothing, and a pair may differ in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from draftpair.checkpoint import Checkpoint, ConfigView, TensorInfo
from draftpair.checkpoint.memo import per_checkpoint
from draftpair.validate.geometry import VOCABULARY, number

VocabularyRelation = Literal["equal", "padded", "different", "unknown"]

_EMBEDDING = (
    "embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight", "llm.embed.weight",
    "backbone.embeddings.weight",
)  # fmt: skip
_HEAD = ("lm_head.weight", "embed_out.weight", "llm.unembed.weight")
# DeepSeek V4 calls its matrices so; below a prefix the names would be others'.
_BARE_EMBEDDING, _BARE_HEAD = "embed.weight", "head.weight"
_REDUCED = "draft_vocab_size"


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


def vocabulary_sizes(
    checkpoint: Checkpoint, tokenizer_length: int | None = None, config: ConfigView | None = None
) -> VocabularySizes:
    """Sizes from config and headers; ``config`` replaces the checkpoint's.

    The output matrix of a drafter that proposes from a reduced vocabulary, with a table to the full one, does not
    count.
    """
    config = config or checkpoint.config
    embedding, head = embedding_of(checkpoint), output_head_of(checkpoint)
    reduced = head is not None and head.shape[0] == config.get(_REDUCED)
    return VocabularySizes(
        config=number(config, *VOCABULARY),
        embedding_rows=embedding.shape[0] if embedding else None,
        head_rows=head.shape[0] if head and not reduced else None,
        tokenizer=tokenizer_length,
    )


@per_checkpoint
def embedding_of(checkpoint: Checkpoint) -> TensorInfo | None:
    """The matrix of token embeddings, None when there is none; of several the one outside the layers."""
    return _matrix(checkpoint.tensors, _EMBEDDING) or checkpoint.tensors.get(_BARE_EMBEDDING)


@per_checkpoint
def output_head_of(checkpoint: Checkpoint) -> TensorInfo | None:
    """The output matrix over the vocabulary, None when there is none: then it is the embedding, or not here."""
    return _matrix(checkpoint.tensors, _HEAD) or checkpoint.tensors.get(_BARE_HEAD)


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


def _matrix(tensors: dict[str, TensorInfo], endings: tuple[str, ...]) -> TensorInfo | None:
    """The tensor of the shortest matching name that is no layer's and no head's; packing keeps the rows."""
    names = [
        name
        for name in tensors
        if name.endswith(endings)
        and (name in endings or name.endswith(tuple(f".{ending}" for ending in endings)))
        and not {"layers", "mtp"}.intersection(name.split("."))
        and len(tensors[name].shape) >= 2
    ]
    return tensors[min(names, key=lambda name: (len(name), name))] if names else None
