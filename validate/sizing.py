"""How the bytes of a checkpoint divide into groups.

The bytes are sums over the headers of the weight files, never an index's ``total_size`` and never a
parameter count. Every tensor is in exactly one group, so the groups sum to `Checkpoint.tensor_bytes`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from draftpair.checkpoint import TensorInfo

GROUPS = ("embedding", "attention", "mlp", "experts", "head", "vision", "other")

# fmt: off
_VISION = frozenset(
    {
        "visual", "vision_tower", "vision_model", "vision_encoder", "vision_embed_tokens",
        "vision_projector", "multi_modal_projector", "mm_projector", "embed_vision", "image_newline",
        "patch_embed",
    }
)
# fmt: on
# fmt: off
_EMBEDDING = frozenset(
    {
        "embed_tokens", "embed_tokens_per_layer", "tok_embeddings", "word_embeddings", "wte", "lm_head",
        "markov_head", "predecessor_codebook", "successor_codebook", "masked_embedding", "d2t", "t2d",
    }
)
# fmt: on
# These words mean the vocabulary's matrices only outside the layers.
# fmt: off
_OUTER_EMBEDDING = frozenset(
    {
        "wpe", "embeddings", "embedding", "embed", "embed_in", "embed_out", "output", "head",
    }
)
# fmt: on
_EXPERTS = frozenset({"experts", "switch_mlp", "switch_glu"})
# fmt: off
_ATTENTION = frozenset(
    {
        "self_attn", "attn", "attention", "self_attention", "cross_attn", "linear_attn", "mamba", "conv",
        "short_conv", "temporal_block", "time_mix", "indexer", "attention_conv",
    }
)
# fmt: on
# fmt: off
_MLP = frozenset(
    {
        "mlp", "feed_forward", "ffn", "ff", "block_sparse_moe", "moe", "router", "shared_experts",
        "shared_expert", "shared_expert_gate", "shared_mlp", "up_proj", "down_proj", "gate_proj", "gate",
        "fc1", "fc2", "mlp_conv",
    }
)
# fmt: on
# Order matters: an expert sits inside an mlp, and a vision tower has attention of its own.
_BY_SEGMENT = (
    ("vision", _VISION),
    ("experts", _EXPERTS),
    ("attention", _ATTENTION),
    ("mlp", _MLP),
    ("attention", frozenset({"mixer"})),
    ("embedding", _EMBEDDING),
)
_LAYER = re.compile(r"(^|\.)(layers|blocks|h)\.\d+\.")


def bytes_by_group(tensors: Iterable[TensorInfo], head: Collection[str] = ()) -> dict[str, int]:
    """Bytes in each of `GROUPS`; ``head`` names the tensors of the checkpoint's own MTP head.

    ``embedding`` holds everything that has a row for each token of the vocabulary or chooses among them, so
    ``lm_head`` too, and of drafters Markov heads, codebooks, clusters of tokens and tables of a smaller vocabulary;
    a head's own copies are in ``head``. ``experts`` are the routed experts only: routers and shared experts, which
    run for every token, are in ``mlp``. ``attention`` is any token mixer, recurrent ones included; convolutions of
    draft layers are with the module they follow. Norms outside those modules, projections between parts (a drafter's
    ``fc`` over the tapped states as well) and audio towers are in ``other``.
    """
    sums = dict.fromkeys(GROUPS, 0)
    names = frozenset(head)
    for tensor in tensors:
        sums["head" if tensor.name in names else group_of(tensor.name)] += tensor.nbytes
    return sums


def group_of(name: str) -> str:
    """The group of a tensor that is not part of an MTP head, by the segments of its dotted name."""
    segments = name.split(".")
    for group, known in _BY_SEGMENT:
        if not known.isdisjoint(segments):
            return group
    outside = _LAYER.search(name) is None
    return "embedding" if outside and not _OUTER_EMBEDDING.isdisjoint(segments) else "other"
