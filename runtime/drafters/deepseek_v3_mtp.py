"""The next-token-prediction layer of DeepSeek V3 and R1 (``deepseek_v3_mtp``), cut out into its own folder.

What it has no copy of, embedding or output head, is the target's. V3.2 writes the same folder with a lightning
indexer; that one is refused, because its target is not run either.
"""

from __future__ import annotations

from collections.abc import Mapping

from mlx_lm.models.deepseek_v3 import DeepseekV3DecoderLayer, ModelArgs

from draftpair.checkpoint import Checkpoint
from draftpair.errors import Refused
from draftpair.runtime.drafters._nextn import EXPERT_SIZES, LATENT_SIZES, NextnDrafter, load_numbered
from draftpair.runtime.rope import rope_overrides

MODEL_TYPE = "deepseek_v3"
SIZES = (*LATENT_SIZES, *EXPERT_SIZES)
FLAGS = {"attention_bias": "self_attn.kv_a_proj_with_mqa.bias"}


class Drafter(NextnDrafter):
    """See ``draftpair.runtime.interfaces.ModelDrafter``."""

    @classmethod
    def load(cls, checkpoint: Checkpoint, environ: Mapping[str, str]) -> Drafter:
        text_type = checkpoint.config.text.get("model_type")
        if text_type != MODEL_TYPE:
            raise Refused(
                f"{checkpoint.source}: the head of a {text_type} target; draftpair runs those of {MODEL_TYPE}",
                hint="run the target without a drafter",
            )
        network, args = load_numbered(
            checkpoint,
            ModelArgs,
            DeepseekV3DecoderLayer,
            SIZES,
            FLAGS,
            rope_overrides(checkpoint.config),
        )
        return cls(network, network.layers[0], args)
