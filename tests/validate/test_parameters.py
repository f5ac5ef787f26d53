"""True parameter counts of packed weights."""

from __future__ import annotations

from typing import Any

import pytest

from draftpair.checkpoint import ConfigView, TensorInfo
from draftpair.validate.parameters import ParameterCount, count_parameters, mlx_packing


def tensors(**shapes: tuple[str, tuple[int, ...]]) -> dict[str, TensorInfo]:
    """Headers by name; ``__`` in a name stands for a dot."""
    named = {name.replace("__", "."): entry for name, entry in shapes.items()}
    return {name: TensorInfo(name, dtype, shape, "f", 0, 0) for name, (dtype, shape) in named.items()}


def total(named: dict[str, TensorInfo], config: dict[str, Any] | None = None) -> int | None:
    return count_parameters(named, ConfigView(config or {})).total


def quantization(bits: int, group: int, **modules: dict[str, int]) -> dict[str, Any]:
    return {"quantization": {"bits": bits, "group_size": group, **modules}}


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_what_mlx_packs_is_counted_as_it_was(bits: int, group: int) -> None:
    mx = pytest.importorskip("mlx.core")
    packed, scales, biases = mx.quantize(mx.zeros((6, 640)), group_size=group, bits=bits)
    named = tensors(
        q__weight=("U32", packed.shape),
        q__scales=("BF16", scales.shape),
        q__biases=("BF16", biases.shape),
        q__bias=("BF16", (6,)),
    )
    assert total(named, quantization(bits, group)) == 6 * 640 + 6


@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_floating_modes_are_recognised_without_a_config(mode: str, bits: int, group: int) -> None:
    mx = pytest.importorskip("mlx.core")
    packed, scales = mx.quantize(mx.zeros((4, 128)), group_size=group, bits=bits, mode=mode)
    named = tensors(q__weight=("U32", packed.shape), q__scales=("U8", scales.shape))
    assert total(named) == 4 * 128
    assert total(named, quantization(4, 64)) == 4 * 128


def test_stacked_experts_keep_their_leading_axis() -> None:
    named = tensors(
        up__weight=("U32", (8, 5, 16)), up__scales=("BF16", (8, 5, 2)), up__biases=("BF16", (8, 5, 2))
    )
    assert total(named, quantization(4, 64)) == 8 * 5 * 128


def test_a_module_with_its_own_bits_and_group() -> None:
    named = tensors(a__gate__weight=("U32", (3, 32)), a__gate__scales=("BF16", (3, 4)))
    own = quantization(4, 128, **{"a.gate": {"bits": 8, "group_size": 32}})
    assert total(named, own) == 3 * 128
    assert total(named, quantization(4, 64)) == 3 * 256


def test_shapes_outrank_a_config_that_cannot_be_right() -> None:
    weight = TensorInfo("q.weight", "U32", (2, 5), "f", 0, 0)
    scales = TensorInfo("q.scales", "BF16", (2, 1), "f", 0, 0)
    assert mlx_packing(weight, scales, ConfigView(quantization(4, 128)), "q") == (5, 32)


def test_renamed_overrides_do_not_mislead_bits_of_the_same_group() -> None:
    named = tensors(q__weight=("U32", (1, 32)), q__scales=("BF16", (1, 2)), q__biases=("BF16", (1, 2)))
    assert total(named, quantization(4, 64, **{"old.q": {"bits": 8, "group_size": 64}})) == 128


def test_fused_experts_carry_their_scales_below_their_name() -> None:
    named = tensors(experts__gate_up=("U32", (2, 4, 8)), experts__gate_up__scales=("BF16", (2, 4, 1)))
    assert total(named, quantization(4, 64)) == 2 * 4 * 64


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale", "scale"])
def test_fp8_counts_elements_and_no_scales(scale: str) -> None:
    named = tensors(q__weight=("F8_E4M3", (256, 128)), **{f"q__{scale}": ("F32", (2, 1))})
    assert total(named) == 256 * 128


def test_fused_fp8_experts() -> None:
    named = tensors(experts__down=("F8_E4M3", (2, 4, 8)), experts__down_scale_inv=("F32", (2, 1, 1)))
    assert total(named) == 64


@pytest.mark.parametrize("dtype", ["U8", "I8"])
@pytest.mark.parametrize(("group", "scale"), [(16, "F8_E4M3"), (32, "F8_E8M0"), (32, "U8")])
def test_fp4_in_bytes_counts_two_a_byte(dtype: str, group: int, scale: str) -> None:
    named = tensors(
        q__weight=(dtype, (8, 64)),
        q__weight_scale=(scale, (8, 128 // group)),
        q__weight_scale_2=("F32", ()),
        q__input_scale=("F32", ()),
    )
    assert total(named) == 8 * 128


def test_fp4_blocks_of_gpt_oss() -> None:
    named = tensors(
        experts__up_blocks=("U8", (2, 6, 3, 16)),
        experts__up_scales=("U8", (2, 6, 3)),
        experts__up_bias=("BF16", (2, 6)),
    )
    assert total(named) == 2 * 6 * 96 + 12


@pytest.mark.parametrize(
    ("weight", "scale"),
    [
        (("I8", (8, 16)), ("F32", (8, 1))),
        (("U8", (8, 64)), ("F8_E8M0", (8, 2))),
        (("U8", (256, 128)), ("F32", (2, 1))),
    ],
    ids=["int8 by channel", "mxfp8 by byte", "fp8 blocks as bytes"],
)
def test_one_value_a_byte_is_counted_once(weight: Any, scale: Any) -> None:
    assert total(tensors(q__weight=weight, q__weight_scale=scale)) == weight[1][0] * weight[1][1]


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        {"quantization_config": {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}},
    ],
    ids=["gptq", "compressed-tensors"],
)
def test_words_of_other_tools_count_by_the_declared_bits(config: dict[str, Any]) -> None:
    gptq = tensors(
        q__qweight=("I32", (16, 8)),
        q__scales=("F16", (1, 8)),
        q__qzeros=("I32", (1, 1)),
        q__g_idx=("I32", (128,)),
    )
    packed = tensors(
        q__weight_packed=("I32", (8, 16)), q__weight_scale=("BF16", (8, 1)), q__weight_shape=("I64", (2,))
    )
    assert total(gptq, config) == total(packed, config) == 8 * 128


def test_words_that_cannot_be_told_make_the_total_unknown_and_are_named() -> None:
    named = tensors(a__weight=("U32", (4, 4)), b__weight=("BF16", (4, 4)), c__qweight=("I32", (4, 4)))
    assert count_parameters(named, ConfigView({})) == ParameterCount(None, ("a.weight", "c.qweight"))


def test_parameters_that_are_called_scale_or_biases_count() -> None:
    named = tensors(
        router__scale=("BF16", (8,)), router__proj__weight=("BF16", (2, 8)), layer_scalar=("BF16", (1,))
    )
    assert total(named) == 8 + 16 + 1


def test_integer_tables_are_no_parameters() -> None:
    assert total(tensors(d2t=("I64", (32,)), t2d=("BOOL", (128,)), w=("F32", (3,)))) == 3
