"""The next-token-prediction layer of GLM-4.5, 4.6 and 4.7 (``glm4_moe_mtp``), cut out into its own folder.

What it has no copy of, embedding or output head, is the target's.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlx_lm.models.glm4_moe import DecoderLayer, ModelArgs

from draftpair.checkpoint import Checkpoint
from draftpair.runtime.drafters._nextn import EXPERT_SIZES, NextnDrafter, load_numbered
from draftpair.runtime.targets.glm4_moe import overrides

SIZES = (
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    *EXPERT_SIZES,
)
FLAGS = {"attention_bias": "self_attn.q_proj.bias", "use_qk_norm": "self_attn.q_norm.weight"}


class Drafter(NextnDrafter):
    """See ``draftpair.runtime.interfaces.ModelDrafter``."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, environ: Mapping[str, str]) -> Drafter:
        network, args = load_numbered(
            checkpoint, ModelArgs, DecoderLayer, SIZES, FLAGS, overrides(checkpoint.config)
        )
        return cls(network, network.layers[0], args)
