"""Layer kinds from every way of writing them down."""

from __future__ import annotations

from typing import Any

import pytest

from draftpair.checkpoint import ConfigView
from draftpair.validate.layers import layer_count, layer_kinds

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing said": ({}, "full full full full full full"),
    "a lone window, which mlx-lm ignores": ({"sliding_window": 8}, "full full full full full full"),
    "words": (
        {"layer_types": ["linear_attention", "full_attention"] * 3},
        "linear full linear full linear full",
    ),
    "more words than layers": ({"layer_types": ["conv"] * 9}, "conv conv conv conv conv conv"),
    "windows switched off": (
        {"layer_types": ["sliding_attention"] * 6, "use_sliding_window": False},
        "full full full full full full",
    ),
    "shared caches": ({"num_kv_shared_layers": 4}, "full full none none none none"),
    "all caches shared": ({"num_kv_shared_layers": 6}, "none none none none none none"),
    "letters": ({"hybrid_override_pattern": "M-M*ME"}, "mamba none mamba full mamba none"),
    "a period": ({"attn_layer_period": 3, "attn_layer_offset": 1}, "mamba full mamba mamba full mamba"),
    "an interval": ({"full_attention_interval": 3}, "linear linear full linear linear full"),
    "the default interval": ({"linear_num_value_heads": 2}, "linear linear linear full linear linear"),
    "kimi counts from one": (
        {"linear_attn_config": {"kda_layers": [1, 2, 4, 5]}},
        "linear linear full linear linear full",
    ),
    "attention indices": ({"full_attn_idxs": [1, 4]}, "conv full conv conv full conv"),
    "a window pattern": ({"sliding_window_pattern": 3}, "sliding sliding full sliding sliding full"),
    "a window pattern in letters": (
        {"sliding_window_pattern": "LLG"},
        "sliding sliding full sliding sliding full",
    ),
    "a family's default pattern": ({"model_type": "gpt_oss"}, "sliding full sliding full sliding full"),
    "flags": ({"hybrid_layer_pattern": [0, 1, 1, 0, 1, 1]}, "full sliding sliding full sliding sliding"),
    "a window that a drafter switches on": (
        {"model_type": "qwen3", "use_swa": True},
        " ".join(["sliding"] * 6),
    ),
    "groups, and full layers after the last whole one": (
        {"model_type": "bailing_hybrid", "layer_group_size": 4},
        "linear linear linear full full full",
    ),
    "chunks": ({"model_type": "llama4_text"}, "chunked chunked chunked full chunked chunked"),
    "an index in some layers": (
        {"sparse_attention_config": {"sparse_attention_freq": [0, 1, 1, 0, 0, 1]}},
        "full sparse sparse full full sparse",
    ),
    "an index in all layers": ({"index_block_size": 64}, " ".join(["sparse"] * 6)),
    "linear attention that is Mamba": (
        {"mamba_num_heads": 2, "layer_types": ["linear_attention", "moe", "full_attention"] * 2},
        "mamba none full mamba none full",
    ),
    "mamba alone": ({"model_type": "mamba2"}, "mamba mamba mamba mamba mamba mamba"),
    "both in one layer": ({"model_type": "falcon_h1", "mamba_d_state": 8}, " ".join(["mamba+full"] * 6)),
}


@pytest.mark.parametrize(("config", "kinds"), CASES.values(), ids=CASES)
def test_layer_kinds(config: dict[str, Any], kinds: str) -> None:
    assert layer_kinds(ConfigView(config), 6) == kinds.split()


def test_the_text_config_is_read_first() -> None:
    config = ConfigView({"full_attention_interval": 2, "text_config": {"full_attention_interval": 3}})
    assert layer_kinds(config, 3) == ["linear", "linear", "full"]


@pytest.mark.parametrize("key", ["full_attention_interval", "sliding_window_pattern"])
def test_an_interval_beyond_the_last_layer_costs_nothing(key: str) -> None:
    kinds = layer_kinds(ConfigView({key: 2**31}), 3)
    assert len(kinds) == 3
    assert "full" not in kinds


@pytest.mark.parametrize(
    ("config", "stated", "count"),
    [
        ({}, 7, 7),
        ({}, None, None),
        ({"hybrid_override_pattern": "M*E"}, None, 3),
        ({"layers_block_type": ["mamba", "moe"]}, None, 2),
        ({"model_type": "longcat_flash", "num_layers": 3}, 6, 3),
    ],
)
def test_how_many_layers(config: dict[str, Any], stated: int | None, count: int | None) -> None:
    assert layer_count(ConfigView(config), stated) == count
