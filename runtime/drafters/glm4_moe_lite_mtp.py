"""The next-token-prediction layer of GLM-4.7-Flash (``glm4_moe_lite_mtp``), cut out into its own folder.

The layer borrows nothing from the target: embedding and output head are its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from mlx import nn
from mlx_lm.models.glm4_moe_lite import Glm4MoeLiteDecoderLayer, ModelArgs

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.runtime.drafters._nextn import (
    AGAIN,
    EXPERT_SIZES,
    LATENT_SIZES,
    NextnDrafter,
    NextnLayer,
    require_sizes,
)
from draftpair.runtime.libraries import reading
from draftpair.runtime.rope import rope_overrides
from draftpair.runtime.weights import fill, quantize_like, read_weights

SPARSE_MARK = "model.mtp_block.mlp.switch_mlp.gate_proj.weight"


def block_args(config: ConfigView, sparse: bool) -> ModelArgs:
    """mlx-lm's arguments of the decoder layer, which has experts if ``sparse``.

    Refused when a size is missing or below 1.
    """
    require_sizes(config, LATENT_SIZES + (EXPERT_SIZES if sparse else ()))
    args: ModelArgs = ModelArgs.from_dict({**config.text, **rope_overrides(config)})
    # mlx-lm decides from a layer's index whether it has experts; as layer 0 this one has, or has none.
    return replace(args, first_k_dense_replace=0) if sparse else replace(args, n_routed_experts=None)


class Network(nn.Module):
    """The module tree whose parameter names are the tensor names of the drafter folder."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        block = Glm4MoeLiteDecoderLayer(args, 0)
        self.model = NextnLayer(args, block, own_embedding=True, own_head=False)
        self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)


class Drafter(NextnDrafter):
    """See ``draftpair.runtime.interfaces.ModelDrafter``."""

    # As mlxcel does.
    carry_after_norm: ClassVar[bool] = False

    @classmethod
    def load(cls, checkpoint: Checkpoint, environ: Mapping[str, str]) -> Drafter:
        weights = read_weights(checkpoint)
        with reading(f"{checkpoint.source}: mlx-lm cannot use its config.json", AGAIN):
            args = block_args(checkpoint.config, sparse=SPARSE_MARK in weights)
            network = Network(args)
        quantize_like(network, weights, checkpoint)
        fill(network, weights, checkpoint)
        return cls(network, network.model, args, owner=network)
