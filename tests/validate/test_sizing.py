"""Bytes by group."""

from __future__ import annotations

import pytest

from draftpair.checkpoint import TensorInfo
from draftpair.validate.sizing import GROUPS, bytes_by_group, group_of

NAMES = {
    "model.embed_tokens.weight": "embedding",
    "model.language_model.embed_tokens_per_layer.weight": "embedding",
    "lm_head.weight": "embedding",
    "transformer.wte.weight": "embedding",
    "backbone.embeddings.weight": "embedding",
    "model.layers.47.embed_tokens.weight": "embedding",
    "model.layers.0.self_attn.q_a_proj.weight": "attention",
    "model.layers.0.self_attn.q_norm.weight": "attention",
    "model.layers.0.linear_attn.conv1d.weight": "attention",
    "model.layers.0.conv.in_proj.weight": "attention",
    "backbone.layers.0.mixer.in_proj.weight": "attention",
    "backbone.layers.1.mixer.up_proj.weight": "mlp",
    "backbone.layers.1.mixer.experts.3.up_proj.weight": "experts",
    "model.layers.1.mlp.experts.3.up_proj.weight": "experts",
    "model.layers.1.mlp.switch_mlp.up_proj.weight": "experts",
    "model.layers.1.mlp.experts.gate_up_proj": "experts",
    "model.layers.1.mlp.shared_experts.up_proj.weight": "mlp",
    "model.layers.1.mlp.gate.e_score_correction_bias": "mlp",
    "model.layers.1.mlp.down_proj.weight": "mlp",
    "model.layers.1.feed_forward.w1.weight": "mlp",
    "model.layers.1.input_layernorm.weight": "other",
    "model.layers.1.post_attention_layernorm.weight": "other",
    "model.norm.weight": "other",
    "model.visual.blocks.3.attn.qkv.weight": "vision",
    "vision_tower.encoder.layers.0.mlp.fc1.weight": "vision",
    "multi_modal_projector.linear.weight": "vision",
}


@pytest.mark.parametrize(("name", "group"), NAMES.items(), ids=NAMES)
def test_group_of_a_tensor(name: str, group: str) -> None:
    assert group_of(name) == group


def test_groups_sum_to_all_bytes_and_the_head_is_one_of_them() -> None:
    tensors = [TensorInfo(name, "U8", (size,), "f", 0, size) for size, name in enumerate(NAMES, start=1)]
    head = {"model.layers.47.embed_tokens.weight", "model.layers.1.input_layernorm.weight"}
    groups = bytes_by_group(tensors, head)
    assert tuple(groups) == GROUPS
    assert sum(groups.values()) == sum(tensor.nbytes for tensor in tensors)
    assert groups["head"] == sum(tensor.nbytes for tensor in tensors if tensor.name in head)


def test_no_tensors_no_bytes() -> None:
    assert bytes_by_group([]) == dict.fromkeys(GROUPS, 0)
