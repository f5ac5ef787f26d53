"""Qwen3.5 and 3.6 with experts (``qwen3_5_moe``) as a target: as ``qwen3_5``, but for the feed-forward part."""

from __future__ import annotations

from typing import ClassVar

from mlx_lm.models.qwen3_5_moe import Model

from draftpair.runtime.targets import qwen3_5


class Network(qwen3_5.Trunk, Model):
    """mlx-lm's model, whatever lies beside it."""


class Target(qwen3_5.Target):
    """See ``draftpair.runtime.interfaces.Target``."""

    network_class: ClassVar[type] = Network
    sparse: ClassVar[bool] = True
