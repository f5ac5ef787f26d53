"""Any model of mlx-lm's as a target: it decodes as mlx-lm does, verifying equals it, what cannot roll back says so."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.models.switch_layers import SwitchGLU

from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Refused, ToolError
from draftpair.runtime.exactness import probe
from draftpair.runtime.load import load_target
from draftpair.runtime.targets import _mlx_lm, _ordinary
from draftpair.runtime.targets._ordinary import Target
from draftpair.runtime.window import WindowCache
from fixtures.cache_configs import ALLOCATED
from fixtures.ordinary import write_model, write_quantized
from fixtures.pairs import run
from fixtures.weights import write_json

# gemma3_text has a window of 8 in every other layer.
SHORT, LONG = [3, 10, 1, 8, 15], [(7 * i + 3) % 16 for i in range(30)]
TOKENS = [(13 * i + 4) % 16 for i in range(24)]
ROLLING = ["llama", "qwen3", "qwen3_moe", "gemma3_text"]
DENSE = ["llama", "qwen3", "gemma3_text"]


def build(folder: Path, recipe: str, dtype: str = "auto", **options: Any) -> Any:
    return load_target(open_checkpoint(write_model(folder / recipe, recipe, **options)), dtype, {})


def raw(array: mx.array) -> list[bytes]:
    """The bytes of each row."""
    return [np.array(row.astype(mx.float32)).tobytes() for row in array]


def chain(target: Target, prompt: Sequence[int], tokens: Sequence[int]) -> list[bytes]:
    target.reset()
    target.prefill(prompt, 0)
    return [raw(target.decode(mx.array([token])))[0] for token in tokens]


def block(target: Target, tokens: Sequence[int]) -> list[bytes]:
    return raw(target.verify(tokens)[0][0])


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("recipe", [*ROLLING, "jamba"])
def test_plain_decoding_emits_what_mlx_lm_generates(tmp_path: Path, recipe: str, prompt: list[int]) -> None:
    target = build(tmp_path, recipe)
    steps = generate_step(mx.array(prompt), target.network, max_tokens=30)
    ids = run(target, None, prompt, tokens=30).ids
    assert ids == [token for token, _ in steps]
    assert len(set(ids)) > 4  # a text that says nothing would prove nothing


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize(
    ("recipe", "dtype"), [*((name, "float32") for name in ROLLING), *((name, "bfloat16") for name in DENSE)]
)
def test_every_row_of_a_verify_block_has_the_bytes_of_single_token_decoding(
    tmp_path: Path, recipe: str, dtype: str, prompt: list[int]
) -> None:
    target = build(tmp_path, recipe, dtype)
    expected = chain(target, prompt, TOKENS)
    for width in range(1, 17):
        target.reset()
        target.prefill(prompt, 0)
        assert block(target, TOKENS[:width]) == expected[:width], f"width {width}"


@pytest.mark.parametrize("prompt", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("recipe", ROLLING)
def test_after_a_rollback_the_target_continues_as_if_nothing_had_been_drafted(
    tmp_path: Path, recipe: str, prompt: list[int]
) -> None:
    target = build(tmp_path, recipe)
    expected = chain(target, prompt, TOKENS)
    target.reset()
    target.prefill(prompt, 0)
    for begin in range(0, 20, 2):
        rejected = [(token + 1) % 16 for token in TOKENS[begin + 2 : begin + 10]]
        assert block(target, [*TOKENS[begin : begin + 2], *rejected])[:2] == expected[begin : begin + 2]
        target.rollback(len(rejected))
        assert target.offset == len(prompt) + begin + 2
    assert [raw(target.decode(mx.array([token])))[0] for token in TOKENS[20:]] == expected[20:]


@pytest.mark.parametrize("recipe", ROLLING)
def test_the_exactness_probe_passes_on_the_cpu_past_the_window_too(tmp_path: Path, recipe: str) -> None:
    target = build(tmp_path, recipe)
    assert target.probe_lengths == ((9,) if recipe == "gemma3_text" else ())
    assert probe(target, 4).verdict == "exact"


def test_nothing_is_tapped_and_nothing_is_lent(tmp_path: Path) -> None:
    target = build(tmp_path, "llama")
    assert target.hidden_size == 32
    logits, hidden = target.prefill(SHORT, 3)
    assert (logits.shape, hidden.shape) == ((1, 16), (1, 3, 0))
    logits, hidden = target.verify(TOKENS[:4])
    assert (logits.shape, hidden.shape) == ((1, 4, 16), (1, 4, 0))
    for lend in (target.embed, target.head):
        with pytest.raises(ToolError, match="borrows the target's"):
            lend(mx.array([[1]]))


def test_a_long_prompt_is_prefilled_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = build(tmp_path, "gemma3_text")
    whole, _ = target.prefill(LONG, 0)
    monkeypatch.setattr(_mlx_lm, "PREFILL_CHUNK", 7)
    lengths, forward = [], target.extend
    monkeypatch.setattr(target, "extend", lambda ids: (lengths.append(ids.shape[1]), forward(ids))[1])
    target.reset()
    chunked, _ = target.prefill(LONG, 0)
    assert lengths == [7, 7, 7, 7, 1, 1]
    np.testing.assert_allclose(np.array(chunked), np.array(whole), atol=1e-5)


def test_experts_are_called_with_too_few_rows_to_be_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = build(tmp_path, "qwen3_moe")
    target.prefill(SHORT, 0)
    pairs, call = [], SwitchGLU.__call__

    def spy(experts: SwitchGLU, x: mx.array, indices: mx.array) -> mx.array:
        pairs.append(indices.size)
        return call(experts, x, indices)

    monkeypatch.setattr(SwitchGLU, "__call__", spy)
    target.verify(TOKENS[:16])
    assert sum(pairs) == 2 * 16 * 8  # layers, rows, experts of a token
    assert max(pairs) < 64  # from here on mlx-lm sorts


def test_a_dense_model_verifies_in_one_call_whatever_its_config_says_of_experts(tmp_path: Path) -> None:
    assert build(tmp_path, "llama", num_experts_per_tok=8).rows_per_call == 64
    assert build(tmp_path, "qwen3_moe").rows_per_call == 7


OTHERS = [
    "mixtral",
    "hunyuan with layers that share",
    "llama with windows",
    "gpt_oss",
    "cohere2",
    "exaone4",
    "olmo3",
]


@pytest.mark.parametrize("name", OTHERS)
def test_models_of_many_kinds_of_attention_roll_back(name: str) -> None:
    module, config = ALLOCATED[name]
    mlx_lm = importlib.import_module(f"mlx_lm.models.{module}")
    network = mlx_lm.Model(mlx_lm.ModelArgs.from_dict(copy.deepcopy(config)))
    target = Target(network, experts_per_token=config.get("num_experts_per_tok"))
    assert target.irreversible is None
    expected = chain(target, LONG, TOKENS[:8])
    target.reset()
    target.prefill(LONG, 0)
    assert block(target, [*TOKENS[:3], 1, 2, 3, 4])[:3] == expected[:3]
    target.rollback(4)
    assert block(target, TOKENS[3:8]) == expected[3:]


def test_a_state_space_layer_cannot_be_taken_back_and_plain_decoding_is_left(tmp_path: Path) -> None:
    target = build(tmp_path, "jamba")
    assert "cache 0 of 2 is mlx-lm's ArraysCache" in target.irreversible
    assert [type(cache) for cache in target.caches] == [
        type(cache) for cache in make_prompt_cache(target.network)
    ]
    target.prefill(LONG, 0)
    target.decode(mx.array([1]))
    assert target.offset == 31


class OtherCache(KVCache):
    """A model's own cache: what it does with rows is not known."""


class Caches(nn.Module):
    """Stands for a network with these caches, `layers` as many as given."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = [None] * layers


def reversible(*caches: Any, layers: int = 2) -> tuple[list[Any], str | None]:
    return _ordinary._reversible(list(caches), Caches(layers))


@pytest.mark.parametrize(
    ("cache", "name"),
    [
        (ArraysCache(2), "ArraysCache"),
        (ChunkedKVCache(8), "ChunkedKVCache"),
        (ConcatenateKVCache(), "ConcatenateKVCache"),
        (OtherCache(), "OtherCache"),
        (CacheList(KVCache(), ArraysCache(1)), "ArraysCache"),
        (RotatingKVCache(8, keep=4), "RotatingKVCache that keeps the first tokens"),
    ],
)
def test_a_cache_that_is_not_known_to_roll_back_is_named_and_left_as_it_is(cache: Any, name: str) -> None:
    window = RotatingKVCache(8)
    caches, why = reversible(window, cache)
    assert caches == [window, cache]
    assert why is not None
    assert f"cache 1 of 2 is mlx-lm's {name}, from" in why


def test_ring_buffers_are_replaced_in_lists_of_caches_as_well() -> None:
    caches, why = reversible(KVCache(), CacheList(KVCache(), RotatingKVCache(12)))
    assert why is None
    assert isinstance(caches[1][1], WindowCache)
    assert [cache.window for cache in _ordinary._windows(caches)] == [12]


def test_a_window_that_later_layers_read_as_well_is_left_to_mlx_lm() -> None:
    caches, why = reversible(RotatingKVCache(8), KVCache(), layers=3)
    assert isinstance(caches[0], RotatingKVCache)
    assert why is not None
    assert "share the sliding-window caches" in why
    assert reversible(KVCache(), layers=3)[1] is None


WRAPPER = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "vocab_size": 16}


def test_a_text_model_inside_one_that_sees_is_what_it_is_alone(tmp_path: Path) -> None:
    wrapped = write_model(tmp_path / "wrapped", "gemma3_text", wrapper=WRAPPER, prefix="language_model.")
    target: Any = load_target(open_checkpoint(wrapped), environ={})
    alone = build(tmp_path, "gemma3_text")
    assert (target.vocab_size, target.hidden_size, target.probe_lengths) == (16, 32, (9,))
    assert run(target, None, LONG, tokens=20).ids == run(alone, None, LONG, tokens=20).ids
    assert chain(target, LONG, TOKENS) == chain(alone, LONG, TOKENS)


def test_packed_weights_are_run_as_they_are(tmp_path: Path) -> None:
    packed = write_quantized(write_model(tmp_path / "model"), tmp_path / "packed", group_size=32)
    target: Any = load_target(open_checkpoint(packed), environ={})
    assert isinstance(target.network.model.layers[0].self_attn.q_proj, nn.QuantizedLinear)
    assert target.vocab_size == 16
    assert probe(target, 3).verdict == "exact"


ROPE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (
        {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_theta": 500_000.0, "rope_type": "linear", "factor": 4.0},
    ),
    "gemma3_text": (
        {"rope_theta": 70_000.0, "rope_local_base_freq": 300.0},
        {
            "full_attention": {"rope_theta": 70_000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 300.0, "rope_type": "default"},
        },
    ),
}


@pytest.mark.parametrize("recipe", ROPE)
def test_rotary_settings_of_transformers_5_are_read(tmp_path: Path, recipe: str) -> None:
    flat, nested = ROPE[recipe]
    without = dict.fromkeys(flat)
    expected = chain(build(tmp_path / "flat", recipe, **flat), LONG, TOKENS)
    assert (
        chain(build(tmp_path / "nested", recipe, **without, rope_parameters=nested), LONG, TOKENS) == expected
    )
    assert chain(build(tmp_path / "none", recipe), LONG, TOKENS) != expected


def edit(folder: Path, **changes: Any) -> Path:
    write_json(folder / "config.json", open_checkpoint(folder).config.raw | changes)
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"model_type": "../llama"}, r"\.\./llama"),
        ({"model_type": None}, "as None"),
        ({"hidden_size": 64}, "mlx-lm cannot load it as llama"),
        ({"vocab_size": 24}, "mlx-lm cannot load it as llama"),
        ({"num_hidden_layers": 1}, "mlx-lm cannot load it as llama"),
    ],
)
def test_what_mlx_lm_cannot_load_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = edit(write_model(tmp_path / "model"), **changes)
    with pytest.raises(Refused, match=message):
        Target.load(open_checkpoint(folder), {})


def test_a_token_that_could_not_be_read_back_is_refused(tmp_path: Path) -> None:
    network = build(tmp_path, "llama").network
    network.model.embed_tokens = nn.Embedding(12, 32)
    with pytest.raises(Refused, match="16 entries and the embedding has 12 rows"):
        Target(network)


@pytest.mark.parametrize("token", [16, -1])
def test_ids_outside_the_vocabulary_never_reach_mlx(tmp_path: Path, token: int) -> None:
    with pytest.raises(ToolError, match=rf"token id {token} at position 2 .* vocabulary of 16 entries"):
        run(build(tmp_path, "llama"), None, [1, 2, token])
