"""Cache sizes: published figures, and the bytes that mlx-lm really allocates for tiny models."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from draftpair.checkpoint import ConfigView
from draftpair.errors import Refused, Usage
from draftpair.validate.kvcache import cache_size, layer_caches

GLM_FLASH: dict[str, Any] = {
    "model_type": "glm4_moe_lite",
    "num_hidden_layers": 47,
    "hidden_size": 2048,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
}
GQA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
}
DELTA: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "max_position_embeddings": 64,
}
ALLOCATED: dict[str, tuple[str, dict[str, Any]]] = {
    "latent attention": (
        "glm4_moe_lite",
        {
            "vocab_size": 32,
            "hidden_size": 32,
            "intermediate_size": 32,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "n_shared_experts": 1,
            "n_routed_experts": 2,
            "num_experts_per_tok": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 8,
            "first_k_dense_replace": 3,
        },
    ),
    "grouped queries": ("llama", GQA),
    "declared windows": (
        "llama",
        GQA
        | {
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "a window pattern": (
        "gemma3_text",
        GQA
        | {
            "model_type": "gemma3_text",
            "num_hidden_layers": 4,
            "sliding_window": 32,
            "sliding_window_pattern": 2,
        },
    ),
    "shared and global layers": (
        "gemma4_text",
        GQA
        | {
            "model_type": "gemma4_text",
            "num_hidden_layers": 6,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
        },
    ),
    "gated delta net": (
        "qwen3_5",
        {"model_type": "qwen3_5", "text_config": DELTA | {"model_type": "qwen3_5_text"}},
    ),
    "short convolution": (
        "lfm2",
        {
            "model_type": "lfm2",
            "vocab_size": 32,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 32,
            "block_ff_dim": 32,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
    "mamba 2": (
        "mamba2",
        {
            "model_type": "mamba2",
            "num_heads": 4,
            "head_dim": 16,
            "vocab_size": 32,
            "hidden_size": 32,
            "intermediate_size": 64,
            "state_size": 8,
            "num_hidden_layers": 2,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "n_groups": 2,
            "use_bias": False,
            "use_conv_bias": True,
            "tie_word_embeddings": True,
            "time_step_limit": [0.0, 100.0],
            "time_step_rank": "auto",
        },
    ),
}


def nbytes_in_mlx_lm(name: str, config: dict[str, Any], context: int, dtype: str) -> int:
    """Bytes of the caches of a freshly made model after a prompt of all but one token, and one more step."""
    mx = pytest.importorskip("mlx.core")
    cache = pytest.importorskip("mlx_lm.models.cache")
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.set_dtype(getattr(mx, dtype))
    caches = cache.make_prompt_cache(model)
    for tokens in (mx.zeros((1, context - 1), mx.int32), mx.zeros((1, 1), mx.int32)):
        mx.eval(model(tokens, cache=caches))
    return sum(int(entry.nbytes) for entry in caches)


@pytest.mark.parametrize(("name", "config"), ALLOCATED.values(), ids=ALLOCATED)
def test_mlx_lm_allocates_what_the_formula_says(name: str, config: dict[str, Any]) -> None:
    size = cache_size(ConfigView(config), context=48, kv_bits=32)
    assert size.kv_bytes is not None
    assert size.state_bytes is not None
    assert size.kv_bytes + size.state_bytes == nbytes_in_mlx_lm(name, config, 48, "float32")


@pytest.mark.parametrize("name", ["grouped queries", "declared windows", "gated delta net"])
def test_sixteen_bits_are_half_except_for_float32_states(name: str) -> None:
    module, config = ALLOCATED[name]
    size = cache_size(ConfigView(config), context=48, kv_bits=16)
    assert (size.kv_bytes or 0) + (size.state_bytes or 0) == nbytes_in_mlx_lm(module, config, 48, "bfloat16")


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_cache_is_as_large_as_mlx_lm_makes_it(bits: int) -> None:
    mx = pytest.importorskip("mlx.core")
    cache = pytest.importorskip("mlx_lm.models.cache").QuantizedKVCache(group_size=64, bits=bits)
    keys = mx.zeros((1, 2, 300, 64), mx.bfloat16)
    cache.update_and_fetch(keys, keys)
    size = cache_size(ConfigView(GQA | {"num_hidden_layers": 1}), context=300, kv_bits=bits)
    assert size.kv_bytes == cache.nbytes


def test_glm_flash_keeps_576_elements_a_token_and_layer() -> None:
    layers = layer_caches(ConfigView(GLM_FLASH))
    assert [layer.elements for layer in layers] == [576] * 47
    size = cache_size(ConfigView(GLM_FLASH), context=8192)
    assert size.bytes_per_token == 47 * 576 * 2
    assert size.kv_bytes == 8192 * 47 * 576 * 2
    assert size.note == "47 x latent attention (576 elements a token)"


def test_latent_attention_without_rotary_part_keeps_the_rank_alone() -> None:
    (layer,) = layer_caches(ConfigView(GLM_FLASH | {"qk_rope_head_dim": 0, "num_hidden_layers": 1}))
    assert layer.elements == 512


def test_an_mtp_head_keeps_as_many_layers_as_it_is_deep() -> None:
    size = cache_size(ConfigView({"text_config": GLM_FLASH}), context=256, depth=1)
    assert size.kv_bytes == 256 * 576 * 2


@pytest.mark.parametrize(("context", "tokens"), [(1, 256), (256, 256), (257, 512)])
def test_the_context_is_rounded_up_to_256_tokens(context: int, tokens: int) -> None:
    assert cache_size(ConfigView(GQA), context).kv_bytes == 3 * tokens * 2 * 2 * 64 * 2


def test_the_batch_multiplies_caches_and_states_but_not_the_rate() -> None:
    config = ConfigView(DELTA)
    one, four = cache_size(config, 100), cache_size(config, 100, batch=4)
    assert four.kv_bytes == 4 * (one.kv_bytes or 0) > 0
    assert four.state_bytes == 4 * (one.state_bytes or 0) > 0
    assert four.bytes_per_token == one.bytes_per_token


def test_a_window_bounds_the_cache_and_costs_nothing_per_further_token() -> None:
    config = ConfigView(GQA | {"sliding_window": 300, "sliding_window_pattern": 3})
    size = cache_size(config, 4096)
    token = 2 * 2 * 64 * 2
    assert size.kv_bytes == (300 + 300 + 4096) * token
    assert size.bytes_per_token == token
    assert size.note == (
        "2 x sliding window 300 (256 elements a token), 1 x full attention (256 elements a token)"
    )


def test_caches_that_mlx_lm_cannot_quantize_stay_at_16_bits() -> None:
    sixteen, four = (cache_size(ConfigView(GLM_FLASH), 256, kv_bits=bits) for bits in (16, 4))
    assert four.kv_bytes == sixteen.kv_bytes
    assert four.note.endswith("; 47 caches stay at 16 bits")


def test_published_qwen_27b_state_is_as_its_shapes_say() -> None:
    config = {
        "model_type": "qwen3_5",
        "text_config": DELTA
        | {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 24,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "linear_num_value_heads": 48,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
        },
    }
    size = cache_size(ConfigView(config), 8192)
    assert size.bytes_per_token == 16 * 2 * 4 * 256 * 2
    assert size.state_bytes == 48 * (3 * (2 * 2048 + 6144) * 2 + 48 * 128 * 128 * 4)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({}, "how many layers"),
        ({"num_hidden_layers": 2}, "key-value heads"),
        (GQA | {"num_key_value_heads": [1, 2, 4]}, "key-value heads"),
        ({"num_hidden_layers": 2, "kv_lora_rank": 8}, "qk_rope_head_dim"),
        (GQA | {"layer_types": ["full_attention", "telepathy", "full_attention"]}, "telepathy"),
        (GQA | {"layer_types": ["full_attention"]}, "all 3 layers"),
        (GQA | {"hybrid_override_pattern": "M*X"}, "M*X"),
        (GQA | {"layer_types": ["linear_attention"] * 3}, "linear attention"),
        (GQA | {"mamba_d_state": 16}, "mamba_d_state"),
        (GQA | {"num_hidden_layers": 10_001}, "/num_hidden_layers is 10001; no model has more than 10,000"),
        (GQA | {"num_hidden_layers": 10**4000}, "no model has more than 10,000"),
        (GQA | {"head_dim": 2**31 + 1}, "/head_dim is 2147483649; no model has more than 2,147,483,648"),
        (GQA | {"v_head_dim": 2.0**40}, "/v_head_dim is 1099511627776"),
        (GQA | {"num_kv_shared_layers": 10**12}, "/num_kv_shared_layers"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_the_config_leaves_open_is_unknown_with_a_reason(config: dict[str, Any], part: str) -> None:
    size = cache_size(ConfigView(config), 256)
    assert (size.kv_bytes, size.bytes_per_token, size.state_bytes) == (None, None, None)
    assert size.note.startswith("unknown: ")
    assert part in size.note


def test_an_impossible_size_is_refused_with_its_place() -> None:
    with pytest.raises(Refused, match=r"config\.json: /text_config/num_hidden_layers is 'many', expected"):
        cache_size(ConfigView({"text_config": {"num_hidden_layers": "many"}}), 256)


@pytest.mark.parametrize(
    "arguments",
    [
        {"context": 0},
        {"context": 1, "batch": 0},
        {"context": 1, "kv_bits": 5},
        {"context": 10**400},
        {"context": 1, "batch": 2**31 + 1},
    ],
)
def test_requests_out_of_range_are_usage_errors(arguments: dict[str, int]) -> None:
    with pytest.raises(Usage):
        cache_size(ConfigView(GQA), **arguments)
