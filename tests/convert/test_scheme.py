"""Overrides: how they are written, which modules they name, what they mean, and what config.json then says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair.checkpoint.writer import Output
from draftpair.convert.quantize import Quantization, quantization
from draftpair.convert.scheme import Override, Scheme, parse_override
from draftpair.errors import Usage

AFFINE = Quantization(4, 32)
MXFP4 = quantization("mxfp4", None, None)
NVFP4 = quantization("nvfp4", None, None)
MXFP8 = quantization("mxfp8", None, None)


def scheme(base: Quantization | None, *overrides: str) -> Scheme:
    return Scheme(base, tuple(parse_override(text) for text in overrides))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lm_head=8", Override("lm_head", None, 8)),
        ("lm_head=8/32", Override("lm_head", None, 8, 32)),
        ("*.down_proj=mxfp8", Override("*.down_proj", "mxfp8")),
        ("mlp.*=affine:3", Override("mlp.*", "affine", 3)),
        ("mlp.*=affine:3/128", Override("mlp.*", "affine", 3, 128)),
        ("mlp.*=affine/128", Override("mlp.*", "affine", None, 128)),
        ("a[=]b=none", Override("a[=]b", "none")),
    ],
)
def test_an_override_is_read_and_written_alike(text: str, expected: Override) -> None:
    assert parse_override(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    "text",
    ["", "lm_head", "lm_head=", "=8", "8", "x=-8", "x=8.0", "x=8/", "x=/32", "x=affine:", "x=:8", "x=8:affine",
     "x=affine:8:8", "x= 8", "x=AFFINE", "x=8 bits"],
)  # fmt: skip
def test_what_is_no_override_is_refused(text: str) -> None:
    with pytest.raises(Usage, match=r"--q-override .* is not PATTERN=WHAT") as caught:
        parse_override(text)
    assert caught.value.hint is not None
    assert "lm_head=8" in caught.value.hint


def test_an_unknown_mode_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        Usage, match=r"x=int8: mode \(int8\) must be one of affine, mxfp4, nvfp4, mxfp8, none"
    ):
        parse_override("x=int8")


@pytest.mark.parametrize("text", ["x=none:4", "x=none/32", "x=none:4/32"])
def test_none_has_no_settings(text: str) -> None:
    with pytest.raises(Usage, match="none has no bits and no groups"):
        parse_override(text)


@pytest.mark.parametrize(
    ("base", "text", "message"),
    [
        (
            AFFINE,
            "lm_head=7",
            r"--q-override lm_head=7: bits \(7\) must be one of 2, 3, 4, 5, 6, 8 in mode affine",
        ),
        (None, "lm_head=1", r"bits \(1\) must be one of"),
        (MXFP4, "lm_head=16", r"bits \(16\) must be one of .* in mode affine"),
        (
            AFFINE,
            "lm_head=8/16",
            r"lm_head=8/16: group size \(16\) must be one of 32, 64, 128 in mode affine",
        ),
        (MXFP4, "lm_head=4/64", r"group size \(64\) must be 32 in mode mxfp4"),
        (None, "*=mxfp8:4", r"\*=mxfp8:4: bits \(4\) must be 8 in mode mxfp8"),
        (None, "*=nvfp4/32", r"group size \(32\) must be 16 in mode nvfp4"),
    ],
)
def test_what_mlx_does_not_have_is_refused_by_the_override_that_asks(
    base: Quantization | None, text: str, message: str
) -> None:
    with pytest.raises(Usage, match=message):
        scheme(base, text)


@pytest.mark.parametrize(
    ("pattern", "module", "named"),
    [
        ("lm_head", "lm_head", True),
        ("lm_head", "model.lm_head", True),
        ("lm_head", "model.lm_head.inner", False),
        ("lm_head", "model.my_lm_head", False),
        ("head", "lm_head", False),
        ("mlp.switch_mlp.*", "model.mtp_block.mlp.switch_mlp.down_proj", True),
        ("mlp.switch_mlp.*", "model.mtp_block.mlp.switch_mlp", False),
        ("*.down_proj", "model.mtp_block.mlp.switch_mlp.down_proj", True),
        ("*.down_proj", "down_proj", False),
        ("down_proj", "mlp.down_proj", True),
        ("*", "anything.at.all", True),
        ("layers.[01].mlp", "model.layers.1.mlp", True),
        ("layers.[01].mlp", "model.layers.2.mlp", False),
        ("layers.?.mlp", "layers.12.mlp", False),
        ("model.*_proj", "model.mlp.down_proj", True),
        ("LM_HEAD", "lm_head", False),
    ],
)
def test_a_pattern_names_a_module_or_the_end_of_its_name(pattern: str, module: str, named: bool) -> None:
    assert parse_override(f"{pattern}=8").matches(module) is named


@pytest.mark.parametrize(
    ("base", "what", "expected"),
    [
        # Bits keep the mode and the groups of the base where it has them.
        (AFFINE, "8", Quantization(8, 32, "affine")),
        (AFFINE, "8/128", Quantization(8, 128, "affine")),
        (MXFP4, "4", MXFP4),
        (NVFP4, "4", NVFP4),
        (MXFP8, "8", MXFP8),
        # Bits that the mode of the base has not are affine's, with affine's own default of groups.
        (MXFP4, "8", Quantization(8, 64, "affine")),
        (MXFP8, "4", Quantization(4, 64, "affine")),
        (NVFP4, "6/32", Quantization(6, 32, "affine")),
        (None, "4", Quantization(4, 64, "affine")),
        # A mode that is named has its own defaults, unless it is the one of the base.
        (AFFINE, "mxfp8", MXFP8),
        (AFFINE, "nvfp4:4/16", NVFP4),
        (AFFINE, "affine:8", Quantization(8, 32, "affine")),
        (Quantization(6, 128), "affine/32", Quantization(6, 32, "affine")),
        (Quantization(6, 128), "affine", Quantization(6, 128, "affine")),
        (MXFP4, "affine", Quantization(4, 64, "affine")),
        (None, "affine/128", Quantization(4, 128, "affine")),
        (AFFINE, "none", None),
        (None, "none", None),
    ],
)
def test_what_is_left_out_is_as_little_surprising_as_can_be(
    base: Quantization | None, what: str, expected: Quantization | None
) -> None:
    assert scheme(base, f"lm_head={what}").of("lm_head") == expected


def test_the_last_override_that_matches_counts() -> None:
    found = scheme(AFFINE, "*=none", "mlp.*=8", "*.down_proj=mxfp8", "lm_head=6", "lm_head=5")
    modules = ["eh_proj", "mlp.up_proj", "mlp.down_proj", "lm_head"]
    assert [found.of(module) for module in modules] == [
        None,
        Quantization(8, 32),
        MXFP8,
        Quantization(5, 32),
    ]


def test_without_an_override_or_a_base_a_module_is_as_the_base_or_dense() -> None:
    assert scheme(MXFP4, "lm_head=8").of("eh_proj") == MXFP4
    assert scheme(None, "lm_head=8").of("eh_proj") is None


@pytest.mark.parametrize(
    ("found", "asked"),
    [
        (scheme(None), False),
        (scheme(None, "lm_head=none"), False),
        (scheme(None, "lm_head=8"), True),
        (scheme(AFFINE), True),
        (scheme(AFFINE, "*=none"), True),
    ],
)
def test_whether_a_quantization_was_asked_for(found: Scheme, asked: bool) -> None:
    assert bool(found) is asked


def test_overrides_that_name_nothing_are_found() -> None:
    found = scheme(AFFINE, "lm_head=8", "head=8", "*.up_proj=none", "lm_head.weight=8")
    unmatched = found.unmatched(module for module in ["lm_head", "mlp.up_proj"])
    assert [str(override) for override in unmatched] == ["head=8", "lm_head.weight=8"]


def test_the_config_has_the_base_and_an_entry_for_each_module_that_differs() -> None:
    quantized = {"lm_head": Quantization(8, 32), "mlp.up_proj": AFFINE, "mlp.down_proj": MXFP8}
    assert scheme(AFFINE, "lm_head=8").as_config(quantized) == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "lm_head": {"group_size": 32, "bits": 8, "mode": "affine"},
        "mlp.down_proj": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    }


def test_a_base_that_no_module_has_still_heads_the_config() -> None:
    config = scheme(AFFINE, "*=mxfp4").as_config({"lm_head": MXFP4})
    assert config == AFFINE.as_config() | {"lm_head": MXFP4.as_config()}


def test_without_a_base_the_config_is_headed_by_what_most_modules_have() -> None:
    quantized = {"a": Quantization(8, 64), "b": MXFP8, "c": MXFP8}
    assert scheme(None, "a=8").as_config(quantized) == MXFP8.as_config() | {
        "a": Quantization(8, 64).as_config()
    }
    for names in ("ab", "ba"):
        assert scheme(None).as_config({name: quantized[name] for name in names})["mode"] == "affine"


def test_nothing_quantized_is_nothing_to_say() -> None:
    assert scheme(AFFINE, "*=none").as_config({}) == {}


SMALL = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
LAYER = "model.layers.0."
MATRICES = {
    "model.embed_tokens": (64, 64),
    "lm_head": (64, 64),
    **{f"{LAYER}self_attn.{name}_proj": (64, 64) for name in "qkvo"},
    f"{LAYER}mlp.gate_proj": (128, 64),
    f"{LAYER}mlp.up_proj": (128, 64),
    f"{LAYER}mlp.down_proj": (64, 128),
}
NORMS = [f"{LAYER}input_layernorm", f"{LAYER}post_attention_layernorm", "model.norm"]


@pytest.mark.parametrize(
    "found",
    [
        scheme(AFFINE, "lm_head=8", "q_proj=mxfp8", "mlp.*=nvfp4", "mlp.down_proj=3/64", "o_proj=none"),
        scheme(MXFP4, "lm_head=6", "v_proj=none", "embed_tokens=none"),
        scheme(None, "mlp.*=mxfp8", "lm_head=nvfp4", "up_proj=none"),
    ],
    ids=["affine", "mxfp4", "no base"],
)
def test_mlx_lm_loads_each_module_as_it_was_written(tmp_path: Path, tools: Any, found: Scheme) -> None:
    """Its own loader, strict about missing, unexpected and misshapen tensors."""
    mx, mlx_lm = pytest.importorskip("mlx.core"), pytest.importorskip("mlx_lm.utils")
    rng = np.random.default_rng(0)
    ones = np.full(64, 0x3F80, "<u2")
    tensors = {f"{name}.weight": ("BF16", ones) for name in NORMS}
    expected = {name: how for name in MATRICES if (how := found.of(name))}
    kinds = {"U32": "<u4", "U8": "<u1", "BF16": "<u2"}
    for name, shape in MATRICES.items():
        words = (rng.standard_normal(shape).astype("<f4").view("<u4") >> 16).astype("<u2")
        dense = Output(f"{name}.weight", "BF16", shape)
        if name not in expected:
            tensors[dense.name] = ("BF16", words)
            continue
        how = expected[name]
        parts = how.rows(words.tobytes(), "BF16", shape[-1])
        for output, part in zip(how.outputs(dense), parts, strict=True):
            data = np.frombuffer(part, kinds[output.dtype]).reshape(output.shape)
            tensors[output.name] = (output.dtype, data)
    tools.write(tmp_path / "model.safetensors", tensors)
    quantized = found.as_config(expected)
    config = SMALL | {"quantization": quantized, "quantization_config": quantized}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model, _ = mlx_lm.load_model(tmp_path)
    modules = dict(model.named_modules())
    for name in MATRICES:
        module = modules[name]
        loaded = Quantization(module.bits, module.group_size, module.mode) if "scales" in module else None
        assert loaded == expected.get(name), name
    assert bool(mx.isfinite(model(mx.array([[1, 2, 3]]))).all())


@pytest.mark.parametrize("what", ["٤", "9" * 5000, "affine:4/" + "9" * 5000])
def test_numbers_that_no_packing_has_are_wrong_usage(what: str) -> None:
    with pytest.raises(Usage):
        parse_override(f"lm_head={what}")
