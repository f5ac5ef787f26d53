"""How tensors are recognised by names, dtypes, shapes and config, and what is refused with which words."""

from __future__ import annotations

import re
from typing import Any

import pytest

from draftpair.checkpoint import ConfigView, TensorInfo, nbytes
from draftpair.checkpoint.stored import Stored, UnknownPacking, find_stored, mlx_packings, side_names
from fixtures.packed import EXAMPLES, compressed_config

Entry = tuple[str, tuple[int, ...]]
X = "x.weight"


def headers(entries: dict[str, Entry]) -> dict[str, TensorInfo]:
    return {
        name: TensorInfo(name, dtype, shape, "model.safetensors", 0, nbytes(dtype, shape))
        for name, (dtype, shape) in entries.items()
    }


def find(entries: dict[str, Entry], config: dict[str, Any] | None = None, name: str = X) -> Stored | None:
    return find_stored(headers(entries), name, ConfigView(config or {}))


def found(entries: dict[str, Entry], config: dict[str, Any] | None = None, name: str = X) -> Stored:
    stored = find(entries, config, name)
    assert stored is not None
    return stored


def refusal(entries: dict[str, Entry], config: dict[str, Any] | None = None, name: str = X) -> str:
    with pytest.raises(UnknownPacking) as caught:
        find(entries, config, name)
    assert caught.value.hint
    assert caught.value.exit_code == 1
    return caught.value.message


def quantization(**settings: Any) -> dict[str, Any]:
    return {"quantization_config": settings}


def fp8(shape: tuple[int, ...], scale: tuple[int, ...], dtype: str = "F32") -> dict[str, Entry]:
    return {X: ("F8_E4M3", shape), "x.weight_scale_inv": (dtype, scale)}


# What is recognised -----------------------------------------------------------------------------------------

RECOGNISED: dict[str, tuple[str, tuple[int, ...], str, int]] = {
    "fp8 of 128 x 128": ("fp8", (256, 384), "F8_E4M3, F32 scales of 128 x 128 blocks", 2),
    "fp8 of ragged blocks": ("fp8", (200, 300), "F8_E4M3, F32 scales of 128 x 128 blocks", 2),
    "fp8 with BF16 scales": ("fp8", (130, 129), "F8_E4M3, BF16 scales of 128 x 128 blocks", 2),
    "fp8 of 32 x 32 with E8M0 scales": ("fp8", (64, 96), "F8_E4M3, F8_E8M0 scales of 32 x 32 blocks", 2),
    "fp8 E5M2": ("fp8", (70, 50), "F8_E5M2, F32 scales of 32 x 32 blocks", 2),
    "fp8 of fused experts": ("fp8", (3, 40, 70), "F8_E4M3, F32 scales of 32 x 32 blocks", 2),
    "fp8 by tensor": ("fp8", (9, 20), "F8_E4M3, one F32 scale", 2),
    "fp8 by row": ("fp8", (9, 20), "F8_E4M3, BF16 scales of rows", 2),
    "fp8 by expert": ("fp8", (4, 6, 20), "F8_E4M3, one F32 scale an expert", 2),
    "mxfp4": ("fp4", (12, 96), "MXFP4, F8_E8M0 scales of groups of 32", 2),
    "mxfp4 of ModelOpt": ("fp4", (12, 64), "MXFP4, U8 scales of groups of 32", 2),
    "nvfp4": ("fp4", (12, 80), "NVFP4, F8_E4M3 scales of groups of 16 times one F32 scale", 4),
    "nvfp4 of fused experts": (
        "fp4",
        (3, 5, 48),
        "NVFP4, F8_E4M3 scales of groups of 16 times one F32 scale an expert",
        4,
    ),
    "compressed nvfp4": ("fp4", (12, 80), "NVFP4, F8_E4M3 scales of groups of 16 divided by one F32 scale", 4),
    "compressed mxfp4": ("fp4", (12, 96), "MXFP4, U8 scales of groups of 32", 2),
    "compressed fp8 by tensor": ("fp8", (9, 20), "F8_E4M3, one F32 scale", 2),
    "compressed fp8 by channel": ("fp8", (9, 20), "F8_E4M3, F32 scales of rows", 2),
    "compressed fp8 by block": ("fp8", (70, 100), "F8_E4M3, F32 scales of 32 x 32 blocks", 2),
    "compressed mxfp8": ("fp8", (9, 96), "F8_E4M3, U8 scales of groups of 32", 2),
    "compressed int4": ("int", (11, 64), "INT4, F32 scales of groups of 32", 3),
    "compressed int4 with zero points": ("int", (11, 96), "INT4, F32 scales and zero points of groups of 32", 4),
    "compressed int8 by channel": ("int", (11, 20), "INT8, BF16 scales of rows", 3),
    "compressed int8 by channel with zero points": ("int", (11, 20), "INT8, F32 scales and zero points of rows", 4),
    "compressed int4 of padded rows": ("int", (6, 36), "INT4, F32 scales of groups of 12", 3),
    **{
        f"mlx affine {bits} bits": ("mlx", (2, 5, 128), f"MLX affine {bits} bits, groups of 64", 3)
        for bits in (2, 3, 4, 5, 6, 8)
    },
    "mlx affine in F16": ("mlx", (5, 128), "MLX affine 4 bits, groups of 32", 3),
    "mlx affine in F32": ("mlx", (5, 128), "MLX affine 4 bits, groups of 128", 3),
    "mlx mxfp4": ("mlx", (2, 5, 96), "MLX mxfp4", 2),
    "mlx mxfp8": ("mlx", (5, 96), "MLX mxfp8", 2),
    "mlx nvfp4": ("mlx", (5, 96), "MLX nvfp4", 2),
}  # fmt: skip


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_format_is_recognised(example: str) -> None:
    packed = EXAMPLES[example]()
    tensors = headers({name: (dtype, values.shape) for name, (values, dtype) in packed.tensors.items()})
    name = next(iter(tensors)).removesuffix("_packed")
    stored = find_stored(tensors, name, ConfigView(packed.config))
    encoding, shape, detail, count = RECOGNISED[example]
    assert stored is not None
    assert (stored.name, stored.encoding, stored.shape, stored.detail) == (name, encoding, shape, detail)
    assert stored.dtype == ("U32" if encoding == "mlx" else "F32")
    assert stored.tensors[0].name in (name, f"{name}_packed")
    assert {tensor.name for tensor in stored.tensors} == set(tensors)
    assert len(stored.tensors) == count
    assert stored.nbytes == sum(tensor.nbytes for tensor in tensors.values())
    assert (stored.rows * stored.columns, stored.columns) == (packed.values.size, packed.values.shape[-1])
    assert side_names(tensors) == set(tensors) - {stored.tensors[0].name}


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("shape", [(), (7,), (3, 5), (2, 3, 5), (0, 5)])
def test_plain_weights(dtype: str, shape: tuple[int, ...]) -> None:
    stored = found({X: (dtype, shape)})
    assert (stored.encoding, stored.shape, stored.dtype, stored.detail) == ("plain", shape, dtype, dtype)


def test_what_is_not_there_is_none() -> None:
    assert (
        find({"y.weight": ("BF16", (2, 2)), "x.weight_scale": ("F32", ()), "x.bias": ("BF16", (2,))}) is None
    )
    assert find({X: ("BF16", (2, 2))}, name="x") is None


def test_scales_of_activations_and_caches_are_accounted_for_and_not_used() -> None:
    entries = {
        "a.k_proj.weight": ("BF16", (2, 2)),
        "a.k_proj.k_scale": ("F32", ()),
        "a.k_proj.input_scale": ("F32", (1,)),
        "a.v_scale": ("F32", ()),
    }
    stored = found(entries, name="a.k_proj.weight")
    assert stored.encoding == "plain"
    assert [tensor.name for tensor in stored.tensors[1:]] == ["a.k_proj.input_scale", "a.k_proj.k_scale"]
    assert side_names(headers(entries)) == {"a.k_proj.input_scale", "a.k_proj.k_scale"}


def test_parameters_that_are_called_scale_are_no_sides_of_plain_weights() -> None:
    entries = {
        "router.weight": ("BF16", (4, 8)),
        "router.scale": ("BF16", (8,)),
        "router.biases": ("BF16", (4,)),
        "hc_attn": ("F32", (4,)),
        "hc_attn_scale": ("F32", (3,)),
        "hc_attn_shape": ("F32", (3,)),
    }
    assert side_names(headers(entries)) == frozenset()
    for name, (dtype, shape) in entries.items():
        assert found(entries, name=name).tensors == (headers({name: (dtype, shape)})[name],)


def test_names_of_fused_experts() -> None:
    entries = {
        "experts.up": ("F8_E4M3", (2, 64, 64)),
        "experts.up_scale_inv": ("F32", (2, 2, 2)),
        "experts.up_activation_scale": ("F32", (2,)),
        "experts.down": ("U8", (2, 64, 32)),
        "experts.down_weight_scale": ("F8_E4M3", (2, 64, 4)),
        "experts.down_weight_scale_2": ("F32", (2,)),
        "experts.down_input_scale": ("F32", (2,)),
        "experts.gate": ("U32", (2, 8, 8)),
        "experts.gate.scales": ("U8", (2, 8, 2)),
    }
    assert found(entries, name="experts.up").detail == "F8_E4M3, F32 scales of 32 x 32 blocks"
    assert found(entries, name="experts.down").shape == (2, 64, 64)
    assert found(entries, name="experts.gate").detail == "MLX mxfp4"
    assert side_names(headers(entries)) == set(entries) - {"experts.up", "experts.down", "experts.gate"}


def test_fp4_as_a_dtype_of_its_own() -> None:
    scale = ("F8_E8M0", (3, 2))
    assert found({X: ("F4", (3, 64)), "x.scale": scale}).shape == (3, 64)
    assert found({X: ("U8", (3, 32)), "x.scale": scale}).shape == (3, 64)
    nvfp4 = {"x.weight_scale": ("F8_E4M3", (3, 4)), "x.weight_scale_2": ("F32", (1,))}
    assert found({X: ("F4", (3, 64)), **nvfp4}).shape == (3, 64)


@pytest.mark.parametrize(
    ("method", "codes"),
    [({}, "U8"), ({"fmt": "e4m3"}, "U8"), ({"fmt": "e4m3", "weight_block_size": [128, 128]}, "F8_E4M3")],
)
def test_bytes_are_fp8_when_the_config_says_so(method: dict[str, Any], codes: str) -> None:
    entries = {**fp8((256, 128), (2, 1)), X: (codes, (256, 128))}
    stored = found(entries, quantization(quant_method="fp8", **method))
    assert (stored.encoding, stored.detail) == ("fp8", "F8_E4M3, F32 scales of 128 x 128 blocks")


# Blocks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "scale", "block"),
    [
        pytest.param((512, 256), (4, 2), (128, 128), id="whole blocks"),
        pytest.param((576, 2048), (5, 16), (128, 128), id="the last one short"),
        pytest.param((64, 1024), (1, 8), (64, 128), id="one row of blocks"),
        pytest.param((96, 96), (3, 3), (32, 32), id="blocks of 32"),
        pytest.param((96, 100), (24, 25), (4, 4), id="blocks of 4"),
        pytest.param((120, 64), (5, 1), (24, 64), id="no power of two would do"),
        pytest.param((6, 96), (6, 3), (1, 32), id="groups"),
        pytest.param((6, 96), (6,), (1, 96), id="rows as a vector"),
        pytest.param((6, 96), (6, 1), (1, 96), id="rows as a column"),
        pytest.param((6, 96), (), (6, 96), id="a scalar"),
        pytest.param((6, 96), (1,), (6, 96), id="a vector of one"),
        pytest.param((96,), (1,), (1, 96), id="a vector as weight"),
        pytest.param((4, 6, 96), (1,), (24, 96), id="one for all experts"),
        pytest.param((4, 6, 96), (4,), (6, 96), id="one an expert"),
        pytest.param((4, 6, 96), (4, 1), (6, 96), id="one an expert, as a column"),
        pytest.param((4, 6, 96), (4, 1, 1), (6, 96), id="one an expert, as a matrix"),
        pytest.param((4, 6, 96), (4, 6, 1), (1, 96), id="one a row of each expert"),
        pytest.param((4, 160, 96), (4, 5, 3), (32, 32), id="blocks of each expert"),
        pytest.param((2, 3, 64, 64), (2, 3, 2, 2), (32, 32), id="two axes before the matrix"),
    ],
)
def test_blocks_that_shapes_imply(
    shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int]
) -> None:
    packing = found(fp8(shape, scale)).packing
    assert packing is not None
    assert packing.block == block


@pytest.mark.parametrize(
    ("shape", "scale"),
    [
        pytest.param((480, 128), (4, 1), id="120 or 128"),
        pytest.param((96, 64), (2, 1), id="48 or 64"),
        pytest.param((100, 64), (9, 1), id="12, which leaves a rest"),
    ],
)
def test_blocks_that_cannot_be_told_need_the_config(shape: tuple[int, ...], scale: tuple[int, ...]) -> None:
    message = refusal(fp8(shape, scale))
    assert "no block size, or more than one, makes so many scales" in message
    assert "does not state weight_block_size" in message
    height = {480: 128, 96: 64, 100: 12}[shape[0]]
    stored = found(fp8(shape, scale), quantization(quant_method="fp8", weight_block_size=[height, 128]))
    assert stored.packing is not None
    assert stored.packing.block == (height, 128)


@pytest.mark.parametrize(
    "scale",
    [(3, 1), (1, 2), (2, 2), (128, 2), (256,), (128,), (2, 1, 1), (1, 2, 1), (0, 1), (256, 129)],
    ids=str,
)
def test_scales_that_do_not_fit(scale: tuple[int, ...]) -> None:
    block = {"weight_block_size": [128, 128]}
    contradicted = refusal(fp8((256, 128), scale), quantization(quant_method="fp8", **block))
    assert "config.json contradicts the tensors: weight_block_size is [128, 128]" in contradicted


@pytest.mark.parametrize("scale", [(128,), (2, 1, 1), (0, 1), (257, 1), (256, 129), (4,)], ids=str)
def test_scales_that_fit_no_block(scale: tuple[int, ...]) -> None:
    refusal(fp8((256, 128), scale))


def test_rows_of_experts_as_a_matrix_could_be_columns() -> None:
    assert "its scales do not fit its shape" in refusal(fp8((4, 6, 6), (4, 6)))


@pytest.mark.parametrize("stated", [[64, 64], [128], "128x128", [128, 0], [128, True], 128], ids=str)
def test_a_stated_block_size_must_fit(stated: Any) -> None:
    config = quantization(quant_method="fp8", weight_block_size=stated)
    assert "weight_block_size is" in refusal(fp8((256, 256), (2, 2)), config)


def test_a_block_size_beside_the_quantization_is_compared_as_well() -> None:
    message = refusal(fp8((256, 256), (2, 2)), {"text_config": {"weight_block_size": [32, 32]}})
    assert "weight_block_size is [32, 32]" in message


# MLX --------------------------------------------------------------------------------------------------------


def mlx(words: int, groups: int, scales: str = "BF16", biases: bool = True) -> dict[str, Entry]:
    entries: dict[str, Entry] = {X: ("U32", (3, words)), "x.scales": (scales, (3, groups))}
    return {**entries, "x.biases": (scales, (3, groups))} if biases else entries


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_bits_and_group_of_mlx(bits: int, group: int) -> None:
    columns = 640
    stored = found(
        mlx(columns * bits // 32, columns // group), {"quantization": {"bits": bits, "group_size": group}}
    )
    assert stored.shape == (3, columns)
    assert stored.detail == f"MLX affine {bits} bits, groups of {group}"
    assert ("affine", bits, group) in mlx_packings(columns * bits // 32, columns // group, byte_scales=False)


@pytest.mark.parametrize(
    ("words", "groups", "byte_scales", "expected"),
    [
        (40, 5, False, [("affine", 8, 32), ("affine", 4, 64), ("affine", 2, 128)]),
        (6, 1, False, [("affine", 6, 32), ("affine", 3, 64)]),
        (32, 1, False, [("affine", 8, 128)]),
        (4, 1, True, [("mxfp4", 4, 32)]),
        (8, 1, True, [("mxfp8", 8, 32)]),
        (2, 1, True, [("nvfp4", 4, 16)]),
        (64, 1, False, []),
        (16, 1, True, []),
        (3, 5, False, []),
        (3, 0, False, []),
    ],
)
def test_what_shapes_leave_open(words: int, groups: int, byte_scales: bool, expected: list[Any]) -> None:
    assert list(mlx_packings(words, groups, byte_scales=byte_scales)) == expected


def test_an_entry_for_the_module_goes_before_the_one_for_all() -> None:
    config = {"quantization": {"bits": 4, "group_size": 64, "x": {"bits": 8, "group_size": 32}}}
    assert found(mlx(40, 5), config).detail == "MLX affine 8 bits, groups of 32"
    assert found({f"y{name[1:]}": entry for name, entry in mlx(40, 5).items()}, config, "y.weight").shape == (
        3,
        320,
    )


def test_shapes_decide_alone_when_they_can() -> None:
    assert found(mlx(32, 1)).detail == "MLX affine 8 bits, groups of 128"
    assert found(mlx(40, 5), {"quantization": {"group_size": 64}}).detail == "MLX affine 4 bits, groups of 64"
    message = refusal(mlx(40, 5))
    assert "its shapes fit affine 8 bits in groups of 32, affine 4 bits in groups of 64" in message
    assert "config.json does not say which" in message


@pytest.mark.parametrize(
    "declared",
    [
        {"bits": 4, "group_size": 32},
        {"bits": 6, "group_size": 64},
        {"bits": "4", "group_size": 64},
        {"bits": 4, "group_size": 64, "mode": "mxfp4"},
        {"bits": 4, "group_size": 64, "x": {"bits": 8, "group_size": 64}},
        {"bits": 4, "group_size": 64, "x": False},
    ],
    ids=str,
)
def test_a_config_that_cannot_be_right_is_refused(declared: dict[str, Any]) -> None:
    assert "config.json contradicts the tensors" in refusal(mlx(40, 5), {"quantization": declared})


def test_a_mode_that_byte_scales_do_not_have() -> None:
    config = {"quantization": {"bits": 4, "group_size": 64, "mode": "affine"}}
    assert "contradicts" in refusal(mlx(8, 2, "U8", biases=False), config)
    own = {"quantization": {"bits": 4, "group_size": 64, "x": {"bits": 4, "group_size": 32, "mode": "mxfp4"}}}
    assert found(mlx(8, 2, "U8", biases=False), own).detail == "MLX mxfp4"


# Refusals ---------------------------------------------------------------------------------------------------


def parsed(text: str) -> dict[str, Entry]:
    """Headers below x in short: `weight F8_E4M3[4,4] weight_scale F32[]`."""
    entries = re.findall(r"(\S+) (\w+)\[([\d,]*)\]", text)
    return {
        f"x.{name}": (dtype, tuple(map(int, filter(None, shape.split(",")))))
        for name, dtype, shape in entries
    }


def integers(**weights: Any) -> dict[str, Any]:
    return compressed_config("pack-quantized", **{"type": "int", "num_bits": 4, "group_size": 32, **weights})


CT_INT4 = integers()
CT_NVFP4 = compressed_config("nvfp4-pack-quantized", type="float", num_bits=4, group_size=16)
CT_MXFP4 = compressed_config("mxfp4-pack-quantized", type="float", num_bits=4, group_size=32)
CT_FP8 = compressed_config("float-quantized", type="float", num_bits=8, strategy="channel")
FP8_CONFIG = quantization(quant_method="fp8", fmt="e4m3", weight_block_size=[128, 128])
MODELOPT_BY_32 = {"quantization_config": {**CT_MXFP4["quantization_config"], "quant_method": "modelopt"}}
GPTQ = quantization(quant_method="gptq")

FP8 = "weight F8_E4M3[256,256] weight_scale_inv F32[2,2] "
FP8_BYTES = "weight U8[256,256] weight_scale F32[2,2] "
MODELOPT = "weight U8[8,32] weight_scale F8_E4M3[8,4] weight_scale_2 F32[] "
V4 = "weight I8[8,32] scale F8_E8M0[8,2] "
MLX = "weight U32[3,8] scales BF16[3,1] biases BF16[3,1] "
NVFP4 = "weight_packed U8[8,32] weight_scale F8_E4M3[8,4] weight_global_scale F32[1] "
INT4 = "weight_packed I32[8,8] weight_scale BF16[8,2] weight_shape I64[2] "

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # Dtypes that are no weights, and codes without what makes them numbers.
    ("weight F8_E4M3[4,4]", {}, "FP8 codes are no numbers without a scale"),
    ("weight F8_E8M0[4,4]", {}, "F8_E8M0 is no format of weights"),
    ("weight F8_E4M3FNUZ[4,4] weight_scale F32[]", {}, "F8_E4M3FNUZ is no format"),
    ("weight F8_E5M2FNUZ[4,4]", {}, "F8_E5M2FNUZ is no format"),
    ("weight F6_E2M3[4,4]", {}, "F6_E2M3 is no format"),
    ("weight F6_E3M2[4,4]", {}, "F6_E3M2 is no format"),
    ("weight F64[4,4]", {}, "F64 is no format"),
    ("weight I64[4]", {}, "I64 is no format"),
    ("weight I32[4]", {}, "I32 is no format"),
    ("weight BOOL[4]", {}, "BOOL is no format"),
    ("weight U8[4,4]", {}, "bytes are no numbers without a scale"),
    ("weight U32[4,4]", {}, "read only beside MLX's scales"),
    # FP8.
    (FP8 + "weight_scale F32[2,2]", {}, "x.weight_scale_inv and x.weight_scale are both there"),
    (FP8 + "weight_scale_inv F8_E4M3[2,2]", {}, "F8_E4M3 scales are not understood"),
    (FP8 + "weight_scale_inv U8[2,2]", {}, "its scales are bytes, and config.json names no quant_method"),
    (FP8 + "weight_zero_point F8_E4M3[2,2]", {}, "x.weight_zero_point does not go with F8_E4M3 weights"),
    (FP8 + "weight_scale_2 F32[]", {}, "x.weight_scale_2 does not go with F8_E4M3 weights"),
    (FP8 + "input_scale I8[]", {}, "x.input_scale is not a float"),
    (FP8, GPTQ, "quant_method is 'gptq'"),
    (FP8, quantization(quant_method="fp8", fmt="e5m2"), "fmt is 'e5m2'"),
    (FP8, quantization(quant_method="fp8", fmt=8), "fmt is 8"),
    ("weight F8_E4M3[] weight_scale F32[]", {}, "must have rows and columns"),
    ("weight F8_E4M3[0,4] weight_scale F32[]", {}, "must have rows and columns"),
    (FP8_BYTES, {}, "U8 codes with such scales are not understood"),
    (FP8_BYTES, quantization(quant_method="modelopt"), "U8 codes with such scales are not understood"),
    (FP8_BYTES, quantization(quant_method="fp8", fmt="e5m2"), "fmt is 'e5m2'"),
    (FP8_BYTES + "weight I8[256,256]", FP8_CONFIG, "I8 codes with such scales are not understood"),
    ("weight I8[4,4] weight_scale F32[4,1]", {}, "I8 codes with such scales are not understood"),
    # FP4.
    (MODELOPT + "weight_scale_2 BF16[]", {}, "needs one more F32 scale"),
    (MODELOPT + "weight_scale_2 F32[8]", {}, "needs one more F32 scale"),
    (MODELOPT + "weight_scale F8_E4M3[8,2]", {}, "needs one F8_E4M3 scale for 16 columns"),
    (MODELOPT + "weight_scale BF16[8,4]", {}, "needs one F8_E4M3 scale for 16 columns"),
    (MODELOPT + "weight I8[8,32]", {}, "I8 codes with such scales are not understood"),
    (MODELOPT + "pre_quant_scale BF16[64]", {}, "x.pre_quant_scale belongs to a format"),
    (MODELOPT + "svdquant_lora_a BF16[8,64]", {}, "x.svdquant_lora_a belongs to a format"),
    (MODELOPT, GPTQ, "quant_method is 'gptq'"),
    (MODELOPT, CT_NVFP4, "quant_method is 'compressed-tensors'"),
    (MODELOPT, MODELOPT_BY_32, "config_groups has no 4-bit floats in groups of 16"),
    ("weight U8[8,32] weight_scale F8_E4M3[8,4]", {}, "U8 codes with such scales are not understood"),
    ("weight U8[8,32] weight_scale_2 F32[]", {}, "bytes are no numbers without a scale"),
    (V4, {"expert_dtype": "fp8"}, "expert_dtype is 'fp8'"),
    (V4, quantization(quant_method="awq"), "quant_method is 'awq'"),
    (V4 + "scale F8_E8M0[8,4]", {}, "I8 codes with such scales are not understood"),
    (V4 + "scale F32[8,2]", {}, "I8 codes with such scales are not understood"),
    (V4 + "scale U8[8,2]", {}, "its scales are bytes, and config.json names no quant_method"),
    ("weight I8[64] scale F8_E8M0[4]", {}, "I8 codes with such scales are not understood"),
    ("weight U8[1,16] scale F8_E8M0[1,1]", FP8_CONFIG, "fit FP4 codes and FP8 blocks alike"),
    # MLX.
    ("weight U32[4,4] weight_scale BF16[4,1]", {}, "read only beside MLX's scales"),
    ("weight U32[4,8] scales BF16[4,1]", {}, "affine mode needs biases"),
    (MLX + "biases F32[3,1]", {}, "affine mode needs biases"),
    (MLX + "biases BF16[3,2]", {}, "affine mode needs biases"),
    (MLX + "scales U8[3,1]", {}, "byte scales belong to modes without biases"),
    (MLX + "scales I8[3,1]", {}, "I8 scales are not MLX's"),
    (MLX + "scales BF16[2,1]", {}, "its scales do not have its rows"),
    (MLX + "scales BF16[3,0] biases BF16[3,0]", {}, "no bits and group size of MLX"),
    (MLX + "weight U32[3,7]", {}, "no bits and group size of MLX"),
    ("weight U32[8] scales BF16[1] biases BF16[1]", {}, "its scales do not have its rows"),
    ("weight U32[3,4] scales U8[3,1] weight_scale_2 F32[]", {}, "x.weight_scale_2 does not go with U32"),
    # Plain, but not alone.
    ("weight BF16[4,4] weight_scale F32[4,1]", {}, "x.weight_scale does not go with BF16 weights"),
    ("weight BF16[4,4] scales BF16[4,1]", {}, "x.scales does not go with BF16 weights"),
    ("weight BF16[4,4] pre_quant_scale BF16[4]", {}, "x.pre_quant_scale belongs to a format"),
    ("weight BF16[4,4] weight_packed I32[4,1]", {}, "x.weight_packed is there as well"),
    # Formats of others.
    ("qweight I32[4,4] qzeros I32[1,1] scales F16[1,4]", {}, "it stands for x.weight, in a format"),
    ("weight_blocks U8[4,2,16] weight_scales U8[4,2]", {}, "it stands for x.weight, in a format"),
    ("weight U8[8,1] weight.absmax F32[1]", {}, "x.weight.absmax belongs to a format"),
    ("weight I8[8,8] SCB F32[8]", {}, "x.SCB belongs to a format"),
    # compressed-tensors.
    (NVFP4, {}, "quant_method is not stated, expected compressed-tensors"),
    (NVFP4, CT_INT4, "no float weights of 4 bits in groups of 16 in format nvfp4-pack-quantized"),
    (NVFP4, CT_MXFP4, "no float weights of 4 bits in groups of 16"),
    (NVFP4 + "weight_scale U8[8,4]", CT_NVFP4, "needs one F8_E4M3 scale for 16 columns"),
    (NVFP4 + "weight_global_scale F32[8]", CT_NVFP4, "needs one more F32 scale"),
    (NVFP4 + "weight_zero_point F8_E4M3[8,4]", CT_NVFP4, "x.weight_zero_point does not go with U8"),
    (NVFP4 + "weight_packed I8[8,32]", CT_NVFP4, "packed weights of I8 are not understood"),
    ("weight_packed U8[8,32]", CT_NVFP4, "bytes are no numbers without a scale"),
    ("weight_packed U8[8,32] weight_scale F8_E4M3[8,4]", CT_MXFP4, "needs one E8M0 scale for 32 columns"),
    ("weight_packed U8[32] weight_scale U8[2]", CT_MXFP4, "needs one E8M0 scale for 32 columns"),
    (INT4, {}, "quant_method is not stated, expected compressed-tensors"),
    (INT4, CT_NVFP4, "config_groups has no int weights of 4 or 8 bits in format pack-quantized"),
    (INT4, integers(num_bits=2), "config_groups has no int weights of 4 or 8 bits"),
    (INT4, integers(group_size=64), "no scheme of integers in config_groups fits"),
    (INT4, integers(strategy="tensor"), "no scheme of integers in config_groups fits"),
    (INT4, integers(symmetric=False), "no scheme of integers in config_groups fits"),
    (INT4, integers(actorder="group"), "actorder is group, and no weight_g_idx gives the order"),
    (INT4 + "weight_zero_point I32[1,2]", CT_INT4, "no scheme of integers in config_groups fits"),
    (INT4 + "weight_zero_point I32[8,2]", integers(symmetric=False), "its zero points do not fit"),
    (INT4 + "weight_g_idx I32[63]", CT_INT4, "its weight_g_idx does not have its columns"),
    (INT4 + "weight_scale F8_E4M3[8,2]", CT_INT4, "need a float scale for each row or group"),
    (INT4 + "weight_scale BF16[4,2]", CT_INT4, "its scales do not have its rows"),
    (INT4 + "weight_shape I64[3]", CT_INT4, "packed integers need a weight_shape"),
    ("weight_packed I32[8,8] weight_scale BF16[8,2]", CT_INT4, "packed integers need a weight_shape"),
    ("weight F8_E4M3[8,32] weight_scale F32[8,1]", CT_INT4, "config_groups has no float weights of 8 bits"),
    ("weight F8_E4M3[8,32] weight_scale F32[2,1]", CT_FP8, "no scheme of 8-bit floats in config_groups"),
    ("weight F8_E5M2[8,32] weight_scale F32[8,1]", CT_FP8, "compressed-tensors has no F8_E5M2"),
]
"""Later entries of a name replace earlier ones."""


@pytest.mark.parametrize(("entries", "config", "expected"), REFUSED)
def test_what_is_not_understood_is_refused(entries: str, config: dict[str, Any], expected: str) -> None:
    assert expected in refusal(parsed(entries), config)


def test_a_refusal_names_tensor_dtype_shape_sides_file_and_count() -> None:
    entries: dict[str, Entry] = {f"{i}.weight": ("F8_E4M3FNUZ", (4, 8)) for i in range(12)}
    entries["0.weight_scale"] = ("F32", (4, 1))
    assert refusal(entries, name="0.weight") == (
        "0.weight cannot be read: F8_E4M3FNUZ is no format of weights that is understood "
        "(F8_E4M3FNUZ [4, 8] in model.safetensors, beside 0.weight_scale F32 [4, 1]; 12 tensors here are F8_E4M3FNUZ)"
    )
    assert refusal({"x.qweight": ("I32", (4, 4))}) == (
        "x.qweight cannot be read: it stands for x.weight, in a format that is not understood "
        "(I32 [4, 4] in model.safetensors, with no scale beside it; 1 tensor here is I32)"
    )


def test_names_in_messages_are_printable() -> None:
    assert "\n" not in refusal({"a\nb.weight": ("F64", (1,))}, name="a\nb.weight")


# Configs with several schemes -------------------------------------------------------------------------------


def schemes(**groups: dict[str, Any]) -> dict[str, Any]:
    entries = {
        name: {"targets": ["Linear"], "format": weights.pop("format", None), "weights": weights}
        for name, weights in ((name, dict(weights)) for name, weights in groups.items())
    }
    return quantization(quant_method="compressed-tensors", format="mixed-precision", config_groups=entries)


def test_the_scheme_that_fits_is_taken() -> None:
    config = schemes(
        a={"type": "float", "num_bits": 8, "strategy": "channel", "format": "float-quantized"},
        b={"type": "float", "num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
        c={"type": "float", "num_bits": 4, "group_size": 16, "format": "nvfp4-pack-quantized"},
        d={"type": "int", "num_bits": 8, "group_size": 32, "format": "pack-quantized"},
        e={"type": "int", "num_bits": 4, "group_size": 32, "format": "pack-quantized"},
    )
    assert found(fp8((256, 256), (256, 1)), config).detail == "F8_E4M3, F32 scales of rows"
    assert found(fp8((256, 256), (256,)), config).detail == "F8_E4M3, F32 scales of rows"
    assert found(fp8((256, 256), (2, 2)), config).detail == "F8_E4M3, F32 scales of 128 x 128 blocks"
    assert found(parsed(NVFP4), config).encoding == "fp4"
    assert found(parsed(INT4), config).detail == "INT4, BF16 scales of groups of 32"
    assert (
        found(parsed(INT4 + "weight_packed I32[8,16]"), config).detail == "INT8, BF16 scales of groups of 32"
    )


def test_two_schemes_that_fit_are_one_too_many() -> None:
    config = schemes(
        a={"type": "int", "num_bits": 4, "group_size": 64}, b={"type": "int", "num_bits": 8, "group_size": 32}
    )
    message = refusal(parsed(INT4 + "weight_packed I32[8,16]"), config)
    assert "more than one scheme of integers in config_groups fits" in message


def test_a_scheme_of_another_format_does_not_count() -> None:
    config = schemes(a={"type": "int", "num_bits": 4, "group_size": 32, "format": "marlin-24"})
    assert "has no int weights" in refusal(parsed(INT4), config)


@pytest.mark.parametrize(
    "groups",
    [
        None,
        [],
        "all",
        {"a": None},
        {"a": {"weights": None}},
        {"a": {"weights": {"num_bits": "4", "type": 5}}},
    ],
    ids=str,
)
def test_schemes_that_make_no_sense_are_no_schemes(groups: Any) -> None:
    config = quantization(quant_method="compressed-tensors", format=7, config_groups=groups)
    assert "has no int weights" in refusal(parsed(INT4), config)
