"""The qwen3_5 target, dense and with experts: verify equals decoding, rollback replays, every form of it loads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.generate import generate_step
from mlx_lm.models.switch_layers import SwitchGLU

from draftpair.checkpoint import open_checkpoint
from draftpair.errors import Refused
from draftpair.runtime.load import load_target
from draftpair.runtime.targets import _mlx_lm
from fixtures.pairs import run
from fixtures.qwen3_5 import write_checkpoint, write_mlx_checkpoint
from fixtures.weights import read_weights, write_json, write_safetensors

PROMPT = [1, 2, 3, 5, 8, 13, 21, 30]
SMALL = {"vocab": 32, "hidden": 32, "head_dim": 32, "dense": 48, "moe": 32, "shared": 32}
EXPERTS = {"model_type": "qwen3_5_moe"}
SIZES: dict[str, dict[str, Any]] = {
    "dense": {},
    "more layers": {"layers": 4, "kv_heads": 2},
    "experts": EXPERTS,
    "enough experts to be sorted": {**EXPERTS, "experts": 16, "top_k": 8},
    "one key head, three value heads": {"key_heads": 1, "value_heads": 3, "linear_dim": 12},
    "kernel of 2": {"kernel": 2},
    "kernel of 5": {"kernel": 5},
}


def build(folder: Path, dtype: str = "float32", bits: int | None = None, **sizes: Any) -> Any:
    path = write_checkpoint(folder / "target", dtype="F32", head=False, **{**SMALL, **sizes})
    target: Any = load_target(open_checkpoint(path), dtype, environ={})
    if bits is not None:
        nn.quantize(target.network, group_size=32, bits=bits)
    return target


def tokens(count: int, seed: int = 0) -> list[int]:
    return (
        [random.Random(seed).randrange(32) for _ in range(count)]
        if seed
        else [(13 * i + 4) % 32 for i in range(count)]
    )


def logit_bytes(logits: mx.array) -> list[bytes]:
    rows = logits.reshape(-1, logits.shape[-1]).astype(mx.float32)
    return [np.array(row).tobytes() for row in rows]


def chain(target: Any, ids: Sequence[int]) -> list[bytes]:
    return [row for token in ids for row in logit_bytes(target.decode(mx.array([token])))]


def block(target: Any, ids: Sequence[int]) -> list[bytes]:
    return logit_bytes(target.verify(ids)[0])


def started(target: Any, prompt: Sequence[int] = PROMPT) -> Any:
    target.reset()
    target.prefill(prompt, 1)
    return target


def states(target: Any) -> list[bytes]:
    """Bytes of all that the caches remember."""
    found = []
    for cache in target.caches:
        end = getattr(cache, "offset", 0)
        parts = [part[:, :, :end] for part in (cache.keys, cache.values)] if end else cache.cache
        found += [np.array(part.astype(mx.float32)).tobytes() for part in parts]
    return found


# MLX has no 16-bit product of unpacked experts on the CPU.
CASES = [(name, "float32") for name in SIZES] + [
    (name, "bfloat16") for name in SIZES if "experts" not in name
]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_row_of_a_verify_block_has_the_bytes_of_single_token_decoding(
    tmp_path: Path, name: str, dtype: str
) -> None:
    target, ids = build(tmp_path, dtype, **SIZES[name]), tokens(16)
    for length in (1, 2, 3, 8):
        expected = chain(started(target, PROMPT[:length]), ids)
        for width in (1, 2, 3, 7, 16):
            started(target, PROMPT[:length])
            assert block(target, ids[:width]) == expected[:width], f"prompt of {length}, width {width}"


@pytest.mark.parametrize("sizes", [{}, EXPERTS], ids=["dense", "experts"])
def test_a_4_bit_target_verifies_what_it_decodes(tmp_path: Path, sizes: dict[str, Any]) -> None:
    target, ids = build(tmp_path, bits=4, **{**sizes, "dense": 64}), tokens(12)
    expected = chain(started(target), ids)
    started(target)
    assert [row for begin in range(0, 12, 4) for row in block(target, ids[begin : begin + 4])] == expected


@pytest.mark.parametrize(("name", "seed"), [*((name, 1) for name in SIZES), ("dense", 2), ("experts", 2)])
def test_forty_rounds_of_any_acceptance_leave_the_caches_of_single_steps(
    tmp_path: Path, name: str, seed: int
) -> None:
    target, draw = build(tmp_path, **SIZES[name], seed=seed), random.Random(seed)
    text = tokens(200, seed)
    prompt = text[: draw.randint(1, 6)]
    widths = [draw.randint(1, 5) for _ in range(40)]
    kept = [draw.randint(1, width) for width in widths]
    after = text[len(prompt) : len(prompt) + sum(kept) + 1]
    expected, position = chain(started(target, prompt), after[:-1]), 0
    fresh = states(target)
    last = chain(target, after[-1:])
    started(target, prompt)
    for width, count in zip(widths, kept, strict=True):
        junk = [draw.randrange(32) for _ in range(width - count)]
        rows = block(target, [*after[position : position + count], *junk])
        assert rows[:count] == expected[position : position + count]
        target.rollback(width - count)
        position += count
        assert target.offset == len(prompt) + position
    assert states(target) == fresh
    assert chain(target, after[-1:]) == last


def test_a_whole_block_can_be_taken_back(tmp_path: Path) -> None:
    target = started(build(tmp_path), [5])
    before = states(target)
    target.verify([1, 2, 3])
    target.rollback(3)
    assert states(target) == before


def test_taking_back_is_no_second_forward_and_nothing_at_all_when_all_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = started(build(tmp_path, layers=4))
    mx.eval(target.verify([1, 2, 3, 4]))
    held = [list(cache.cache) for cache in target.caches if hasattr(cache, "cache")]

    def forbidden(*_: Any) -> mx.array:
        raise AssertionError("a layer of weights was run")

    for kind in (nn.Linear, nn.RMSNorm, nn.Conv1d, nn.Embedding):
        monkeypatch.setattr(kind, "__call__", forbidden)
    target.rollback(0)
    kept = [list(cache.cache) for cache in target.caches if hasattr(cache, "cache")]
    assert all(a is b for one, other in zip(held, kept, strict=True) for a, b in zip(one, other, strict=True))
    monkeypatch.undo()
    mx.eval(target.verify([5, 6, 7]))
    for kind in (nn.Linear, nn.RMSNorm, nn.Conv1d, nn.Embedding):
        monkeypatch.setattr(kind, "__call__", forbidden)
    target.rollback(2)
    assert target.offset == len(PROMPT) + 5


def test_tokens_of_no_verified_block_cannot_be_taken_back(tmp_path: Path) -> None:
    target = started(build(tmp_path))
    with pytest.raises(RuntimeError, match=r"asked to drop 1 of 8 tokens; verified last: no block"):
        target.rollback(1)
    target.verify([1, 2])
    with pytest.raises(
        RuntimeError, match=r"drop 3 of 10 tokens; verified last: a block of 2 rows that ends at 10"
    ):
        target.rollback(3)
    target.verify([1, 2])
    target.decode(mx.array([3]))
    with pytest.raises(RuntimeError, match=r"drop 1 of 13 tokens; .* ends at 12"):
        target.rollback(1)


def test_experts_are_called_with_too_few_rows_to_be_sorted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = started(build(tmp_path, **EXPERTS, experts=16, top_k=4))
    pairs, call = [], SwitchGLU.__call__

    def spy(experts: SwitchGLU, x: mx.array, indices: mx.array) -> mx.array:
        pairs.append(indices.size)
        return call(experts, x, indices)

    monkeypatch.setattr(SwitchGLU, "__call__", spy)
    target.verify(tokens(20))
    assert sum(pairs) == 2 * 20 * 4
    assert max(pairs) < 64  # from here on mlx-lm sorts


@pytest.mark.parametrize("sizes", [{}, EXPERTS], ids=["dense", "experts"])
def test_plain_decoding_emits_what_mlx_lm_generates(tmp_path: Path, sizes: dict[str, Any]) -> None:
    target = build(tmp_path, **sizes)
    steps = generate_step(mx.array(PROMPT), target.network, max_tokens=24)
    assert run(target, None, PROMPT, tokens=24).ids == [token for token, _ in steps]


def test_hidden_states_are_those_behind_the_final_norm_and_as_many_as_asked_for(tmp_path: Path) -> None:
    target, ids = build(tmp_path), tokens(4)
    target.reset()
    expected = np.array(target.network.language_model.model(mx.array([[*PROMPT, *ids]])))
    _, hidden = target.prefill([*PROMPT, *ids], 2**31)
    np.testing.assert_allclose(np.array(hidden), expected, atol=1e-5)
    np.testing.assert_allclose(
        np.array(target.head(hidden)), np.array(target.network(mx.array([[*PROMPT, *ids]]))), atol=1e-5
    )
    assert started(target).prefill(PROMPT, 3)[1].shape == (1, 3, 32)
    _, verified = started(target).verify(ids)
    np.testing.assert_allclose(np.array(verified), expected[:, len(PROMPT) :], atol=1e-5)


def test_a_prompt_in_chunks_gives_the_states_of_one_in_a_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = build(tmp_path)
    target.reset()
    logits, hidden = target.prefill(tokens(24), 2**31)
    monkeypatch.setattr(_mlx_lm, "PREFILL_CHUNK", 5)
    target.reset()
    chunked_logits, chunked_hidden = target.prefill(tokens(24), 2**31)
    np.testing.assert_allclose(np.array(chunked_logits), np.array(logits), atol=1e-5)
    np.testing.assert_allclose(np.array(chunked_hidden), np.array(hidden), atol=1e-5)


def text_only(raw: Path, folder: Path) -> Path:
    """The same model as a checkpoint of the text model alone, as transformers saves it."""
    folder.mkdir()
    config = open_checkpoint(raw).config
    trunk = {
        n.replace("model.language_model.", "model."): v
        for n, v in read_weights(raw).items()
        if ".visual." not in n
    }
    write_safetensors(folder / "model.safetensors", {name: (values, "F32") for name, values in trunk.items()})
    text = {**config.text, "architectures": ["ForCausalLM"]}
    del text["full_attention_interval"]  # transformers 5 writes layer_types in its place
    write_json(folder / "config.json", text)
    return folder


@pytest.mark.parametrize("sizes", [{}, EXPERTS], ids=["dense", "experts"])
def test_all_forms_of_a_checkpoint_give_the_same_logits(tmp_path: Path, sizes: dict[str, Any]) -> None:
    options = {**SMALL, **sizes, "dtype": "F32", "layers": 3}
    raw = write_checkpoint(tmp_path / "raw", **options)
    forms = [raw, text_only(write_checkpoint(tmp_path / "bare", head=False, **options), tmp_path / "text"),
             write_mlx_checkpoint(tmp_path / "mlx", **options)]  # fmt: skip
    logits = [chain(started(load_target(open_checkpoint(form), environ={})), tokens(4)) for form in forms]
    assert logits[0] == logits[1] == logits[2]


@pytest.mark.parametrize("sizes", [{}, EXPERTS], ids=["dense", "experts"])
def test_a_quantized_mlx_checkpoint_loads_packed_and_verifies_what_it_decodes(
    tmp_path: Path, sizes: dict[str, Any]
) -> None:
    folder = write_mlx_checkpoint(tmp_path / "mlx", group_size=64, dtype="F32", **sizes)
    target: Any = load_target(open_checkpoint(folder), environ={})
    assert target.text.model.layers[0].linear_attn.in_proj_qkv.weight.dtype == mx.uint32
    expected = chain(started(target), tokens(8))
    assert block(started(target), tokens(8)) == expected


def test_a_tied_target_lends_its_table_both_ways_and_unscaled(tmp_path: Path) -> None:
    target = build(tmp_path, tied=True)
    table = np.array(target.text.model.embed_tokens.weight)
    np.testing.assert_array_equal(np.array(target.embed(mx.array([[4, 7]])))[0], table[[4, 7]])
    states_ = mx.random.normal((1, 2, 32), key=mx.random.key(0))
    np.testing.assert_allclose(np.array(target.head(states_)), np.array(states_) @ table.T, atol=1e-5)


def test_an_untied_target_lends_its_output_matrix(tmp_path: Path) -> None:
    target = build(tmp_path)
    states_ = mx.random.normal((1, 2, 32), key=mx.random.key(0))
    expected = np.array(states_) @ np.array(target.text.lm_head.weight).T
    np.testing.assert_allclose(np.array(target.head(states_)), expected, atol=1e-5)


def edited(folder: Path, model_type: str = "qwen3_5", **changes: Any) -> Any:
    """A checkpoint whose text config has other values; None removes a key."""
    path = write_checkpoint(folder, dtype="F32", head=False, model_type=model_type, **SMALL)
    raw = open_checkpoint(path).config.raw
    text = {key: value for key, value in {**raw["text_config"], **changes}.items() if value is not None}
    write_json(path / "config.json", raw | {"text_config": text})
    return open_checkpoint(path)


def test_the_rotary_base_is_heard_in_either_form_and_never_guessed(tmp_path: Path) -> None:
    published = chain(started(load_target(edited(tmp_path / "nested"), environ={})), tokens(4))
    flat = edited(tmp_path / "flat", rope_parameters=None, rope_theta=10_000_000)
    other = edited(tmp_path / "other", rope_parameters=None, rope_theta=10)
    assert chain(started(load_target(flat, environ={})), tokens(4)) == published
    assert chain(started(load_target(other, environ={})), tokens(4)) != published
    with pytest.raises(Refused, match="names no RoPE base"):
        load_target(edited(tmp_path / "none", rope_parameters=None), environ={})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no kernel size": ({"linear_conv_kernel_dim": None}, "does not state linear_conv_kernel_dim"),
    "no size": ({"hidden_size": 0}, "hidden_size is 0, expected an integer of at least 1"),
    "no number of experts a token": ({"num_experts_per_tok": None}, "does not state num_experts_per_tok"),
    "more experts a token than there are": ({"num_experts_per_tok": 5}, "is 5, expected at most num_experts, 4"),
    "heads in unequal groups": ({"num_key_value_heads": 3}, "is 2, expected a multiple of num_key_value_heads, 3"),
    "value heads in unequal groups": ({"linear_num_key_heads": 3}, "is 4, expected a multiple of linear_num_key"),
    "no full attention": ({"layer_types": ["linear_attention"] * 2}, r"of 2 layers those with full attention are \[\]"),
    "an interval past the end": ({"layer_types": None, "full_attention_interval": 3}, r"full attention are \[\]"),
    "neither order nor interval": ({"layer_types": None, "full_attention_interval": None}, "full_attention_interval"),
    "unequal distances": (
        {"layer_types": ["full_attention", "linear_attention"]}, r"full attention are \[0\]; .* equal distances"),
    "another geometry": ({"linear_value_head_dim": 8}, r"mlx-lm cannot load it"),
    "a layer too many": ({"num_hidden_layers": 4, "layer_types": None}, r"mlx-lm cannot load it.*layers\.2\."),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_config_that_does_not_hold_is_refused_in_words(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused, match=f"(?s){message}"):
        load_target(edited(tmp_path / "target", "qwen3_5_moe", **changes), environ={})
