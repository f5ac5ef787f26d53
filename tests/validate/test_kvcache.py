"""Cache sizes: published figures, and the bytes that mlx-lm really allocates for tiny models."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest

from draftpair.checkpoint import ConfigView
from draftpair.errors import Refused, Usage
from draftpair.validate.kvcache import cache_size, drafter_cache, layer_caches
from fixtures import deepseek_v4, glm5_next, hy_v4, inkling, qwen4_exp
from fixtures.cache_configs import ALLOCATED, DELTA, SIZES, Config
from fixtures.record_cache_configs import GOLDEN, RUNS, SIDED, SIDES, key_of, nbytes_in_mlx_lm, widened

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


@pytest.fixture
def mlx(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """MLX, whose CPU back end multiplies by experts in float32 alone: the other types go through that here."""
    mx: ModuleType = pytest.importorskip("mlx.core")
    monkeypatch.setattr(mx, "gather_mm", widened(mx.gather_mm))
    return mx


RECORDED = json.loads(GOLDEN.read_text(encoding="utf-8"))


def allocated(mlx: Any, key: str, context: int, batch: int, dtype: str) -> int:
    """The recorded figure; where this mlx-lm is at least that new, also what it allocates now, which must be the same.

    Python 3.10 has an older one only, without some of the models.
    """
    recorded: int = RECORDED["nbytes"][key][key_of(context, batch, dtype)]
    if _version(metadata.version("mlx-lm")) >= _version(RECORDED["versions"]["mlx_lm"]):
        name, config = ALLOCATED[key]
        assert nbytes_in_mlx_lm(name, config, context, batch, dtype) == recorded
    return recorded


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3])


@pytest.mark.parametrize(("context", "batch", "dtype"), RUNS)
@pytest.mark.parametrize("key", ALLOCATED)
def test_mlx_lm_allocates_what_the_formula_says(
    mlx: Any, key: str, context: int, batch: int, dtype: str
) -> None:
    config = ConfigView(ALLOCATED[key][1])
    size = cache_size(config, context, batch, kv_bits=32 if dtype == "float32" else 16)
    assert size.kv_bytes is not None
    assert size.state_bytes is not None
    assert size.kv_bytes + size.state_bytes == allocated(mlx, key, context, batch, dtype)


@pytest.mark.parametrize("context", SIDES)
@pytest.mark.parametrize("name", SIDED)
def test_every_side_of_a_step_and_of_a_window(mlx: Any, name: str, context: int) -> None:
    size = cache_size(ConfigView(ALLOCATED[name][1]), context)
    assert size.kv_bytes == allocated(mlx, name, context, 1, "bfloat16")


def test_every_architecture_of_the_tests_is_a_different_one() -> None:
    sizes = [cache_size(ConfigView(config), 300).note for _, config in ALLOCATED.values()]
    kinds = {re.sub(r"[0-9]+", "N", note) for note in sizes}
    words = (
        "sliding",
        "chunks",
        "latent",
        "indexer",
        "index",
        "groups",
        "linear",
        "mamba",
        "convolution",
        "n-gram",
    )
    assert all(any(word in kind for kind in kinds) for word in words)


WITH_TWO = [
    name
    for name in ("falcon_h1", "deepseek_v32", "minimax_m3_vl", "longcat_flash")
    if importlib.util.find_spec(f"mlx_lm.models.{ALLOCATED[name][0]}")
]


@pytest.mark.parametrize("name", WITH_TWO)
def test_a_layer_with_two_caches_is_not_quantized_by_mlx_lm(name: str) -> None:
    pytest.importorskip("mlx_lm")
    module, config = ALLOCATED[name]
    made = importlib.import_module(f"mlx_lm.models.{module}")
    caches = made.Model(made.ModelArgs.from_dict(copy.deepcopy(config))).make_cache()
    assert not any(hasattr(cache, "to_quantized") for cache in caches)
    wide = ConfigView({**config, "text_config": {**config.get("text_config", config), "head_dim": 64}})
    assert cache_size(wide, 256, kv_bits=4).kv_bytes == cache_size(wide, 256, kv_bits=16).kv_bytes


PUBLISHED_BY_MLX_VLM: dict[str, tuple[Config, dict[tuple[int, int, int], int]]] = {
    "deepseek_v4": (
        deepseek_v4.config_document(deepseek_v4.Geometry()) | {"compress_ratios": [0, 4, 128, 0]},
        {(10, 1, 32): 78592, (300, 2, 32): 214272, (10, 1, 16): 39296, (300, 2, 16): 107136},
    ),
    "glm5_next": (
        glm5_next.config_document(),
        {(10, 1, 32): 77568, (300, 2, 32): 305408, (10, 1, 16): 43008, (300, 2, 16): 161408},
    ),
    "qwen4_exp": (
        qwen4_exp.config_document(qwen4_exp.Geometry()),
        {(10, 1, 32): 142904, (300, 2, 32): 643200, (10, 1, 16): 73528, (300, 2, 16): 326912},
    ),
    "hy_v4": (
        hy_v4.config_document(),
        {(10, 1, 32): 262144, (300, 2, 32): 1572864, (10, 1, 16): 131072, (300, 2, 16): 786432},
    ),
    "inkling": (
        inkling.config_document(inkling.Geometry()),
        {(10, 1, 32): 201984, (300, 2, 32): 797184, (10, 1, 16): 103680, (300, 2, 16): 403968},
    ),
}
"""What mlx-vlm 0.7.10 allocates at (context, batch, bits); tests/engines asks it again. Of GLM without the expanded
keys and values that it keeps of a prompt."""


@pytest.mark.parametrize(("config", "sizes"), PUBLISHED_BY_MLX_VLM.values(), ids=PUBLISHED_BY_MLX_VLM)
def test_what_mlx_vlm_allocates(config: Config, sizes: dict[tuple[int, int, int], int]) -> None:
    for (context, batch, bits), expected in sizes.items():
        size = cache_size(ConfigView(config), context, batch, bits)
        assert (size.kv_bytes or 0) + (size.state_bytes or 0) == expected


def test_what_is_known_and_not_counted_is_said() -> None:
    size = cache_size(ConfigView(glm5_next.config_document()), 300)
    assert "32,768 tokens" in (size.caveat or "")
    assert cache_size(ConfigView(GQA), 300).caveat is None


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
    config = ConfigView(SIZES | DELTA)
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
        (GQA | {"layer_types": ["sliding_attention"] * 3}, "window"),
        (GQA | {"layer_types": ["sliding_attention"] * 3, "sliding_window": 0}, "window"),
        (GQA | {"model_type": "gemma4_text", "layer_types": ["full_attention"] * 3}, "global_head_dim"),
        (GQA | {"model_type": "rwkv7"}, "the caches of rwkv7 are not known here"),
        (GQA | {"num_loops": 2}, "num_loops"),
        (GQA | {"layer_group_size": 2}, "layer_group_size"),
        (GQA | {"model_type": "deepseek_v4", "sliding_window": 8}, "compress_ratios"),
        (GQA | {"model_type": "deepseek_v4", "sliding_window": 8, "compress_ratios": [0, 3, 4]}, "has 3"),
        (GQA | {"model_type": "qwen4_exp", "layer_types": ["full_attention"] * 3}, "indexer_head_dim"),
        (GQA | {"model_type": "glm5_next", "layer_types": ["full_attention"] * 3}, "kv_lora_rank"),
        (GQA | {"model_type": "hy_v4"}, "indexer_types"),
        (GQA | {"model_type": "inkling_text"}, "local_layer_ids"),
        (GQA | {"sparse_attention_config": {"sparse_attention_freq": [1]}}, "sparse_attention_freq"),
        (GQA | {"sparse_attention_config": {"sparse_block_size": 16}}, "width of the index"),
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


DRAFTER: Config = GQA | {
    "num_hidden_layers": 5,
    "sliding_window": 32,
    "layer_types": ["sliding_attention"] * 4 + ["full_attention"],
}
_TOKEN = 2 * 2 * 64 * 2


def test_a_drafter_with_layers_of_its_own_keeps_no_more_than_its_windows() -> None:
    size = drafter_cache(ConfigView(DRAFTER), "own", None, context=4096, batch=2)
    assert size.kv_bytes == 2 * (4 * 32 + 4096) * _TOKEN
    assert size.note.startswith("4 x sliding window 32")


def test_a_head_keeps_full_layers_of_its_target() -> None:
    assert drafter_cache(ConfigView(DRAFTER), "own", 2, context=4096).kv_bytes == 2 * 4096 * _TOKEN


def test_a_drafter_that_reads_its_targets_keys_keeps_nothing() -> None:
    size = drafter_cache(ConfigView({}), "none", None, context=4096)
    assert (size.kv_bytes, size.bytes_per_token, size.state_bytes) == (0, 0, 0)
    assert "target's keys and values" in size.note


def test_an_ordinary_model_that_drafts_keeps_what_it_keeps_as_a_target() -> None:
    config = ConfigView(SIZES | DELTA)
    assert drafter_cache(config, "model", None, 300, 2, 32) == cache_size(config, 300, 2, 32)


def test_every_layer_slides_where_the_drafter_says_so() -> None:
    config = GQA | {"use_swa": True, "sliding_window": 16}
    assert drafter_cache(ConfigView(config), "own", None, context=4096).kv_bytes == 3 * 16 * _TOKEN


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (deepseek_v4.config_document(deepseek_v4.Geometry()), ["sliding window 8"]),
        (glm5_next.config_document(), ["latent attention", "index flags", "pooled index"]),
        (qwen4_exp.config_document(qwen4_exp.Geometry()), ["sparse attention", "index", "pooled index"]),
        (hy_v4.config_document(), ["latent attention", "index"]),
        (inkling.config_document(inkling.Geometry()), ["attention with convolutions"]),
    ],
    ids=["deepseek_v4", "glm5_next", "qwen4_exp", "hy_v4", "inkling"],
)
def test_the_head_of_a_model_with_several_caches_a_layer(config: Config, names: list[str]) -> None:
    assert [layer.name for layer in layer_caches(ConfigView(config), depth=1)] == names
