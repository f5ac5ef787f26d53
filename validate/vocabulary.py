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

_NAMES = {
    "embedding": (
        "embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "embeddings", "embed",
    ),
    "head": ("lm_head", "embed_out", "output", "unembed", "head"),
}  # fmt: skip
# Parts of names below which a matrix is another's: a layer's, a head's, an encoder's.
_ELSEWHERE = frozenset(
    {"layers", "blocks", "h", "mtp", "visual", "vision_tower", "vision_model", "audio_tower"}
)
ROLES = tuple(_NAMES)
_REDUCED = "draft_vocab_size"
# Matrices are padded to a multiple of 64, 128, 256 or 1,024 rows.
_MOST_PADDING = 1024


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


def embedding_of(checkpoint: Checkpoint) -> TensorInfo | None:
    """The matrix of token embeddings, None when there is none."""
    name = find_matrix(checkpoint, "embedding")
    return _stored_under(checkpoint, name) if name else None


def output_head_of(checkpoint: Checkpoint) -> TensorInfo | None:
    """The output matrix over the vocabulary, None when there is none: then it is the embedding, or not here."""
    name = find_matrix(checkpoint, "head")
    return _stored_under(checkpoint, name) if name else None


def _stored_under(checkpoint: Checkpoint, name: str) -> TensorInfo:
    """The tensor itself, or the packed words that stand for it; packing keeps the rows."""
    return checkpoint.tensors.get(name) or checkpoint.tensors[f"{name}_packed"]


@per_checkpoint
def find_matrix(checkpoint: Checkpoint, role: str) -> str | None:
    """The name of the ``embedding`` or output ``head`` outside of all layers, the shortest of several; None without."""
    modules = _NAMES[role]
    # Of thousands of names few end so: only these are taken apart.
    endings = tuple(f"{module}.weight{packed}" for module in modules for packed in ("", "_packed"))
    names = [
        name
        for full, tensor in checkpoint.tensors.items()
        if full.endswith(endings)
        and len(tensor.shape) == 2
        and _is_called(name := full.removesuffix("_packed"), modules)
    ]
    return min(names, key=lambda name: (len(name), name), default=None)


def _is_called(name: str, modules: tuple[str, ...]) -> bool:
    *path, module, _ = name.split(".")
    return module in modules and _ELSEWHERE.isdisjoint(path)


def vocabulary_relation(target: VocabularySizes, drafter: VocabularySizes) -> VocabularyRelation:
    """``equal`` widths; ``padded`` if they differ and both hold every id of both tokenizers; ``different``.

    Without any tokenizer a difference cannot be shown to be padding, so it is ``different``; so is one that no padding
    explains where a side has no tokenizer. ``unknown`` when a side has no width at all.
    """
    if target.rows is None or drafter.rows is None:
        return "unknown"
    if target.rows == drafter.rows:
        return "equal"
    smaller, larger = sorted((target.rows, drafter.rows))
    needed = max(target.tokenizer or 0, drafter.tokenizer or 0)
    told = None not in (target.tokenizer, drafter.tokenizer)
    likely = larger - smaller <= min(_MOST_PADDING, smaller // 8)
    return "padded" if 0 < needed <= smaller and (told or likely) else "different"
