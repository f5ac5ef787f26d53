"""Decoded rows against the recipes, other implementations, MLX itself, and every combination that is read at all."""

from __future__ import annotations

import hashlib
import tracemalloc
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftpair.checkpoint import ConfigView, TensorInfo, nbytes, open_checkpoint
from draftpair.checkpoint.dtypes import code_values
from draftpair.checkpoint.stored import Stored, UnknownPacking, find_stored, side_names
from draftpair.convert.decode import Read, dequantize_rows, read_rows
from fixtures.packed import (
    EXAMPLES,
    Packed,
    X,
    code_table,
    compressed_config,
    compressed_integers,
    digest,
    fp8,
    load_goldens,
    mxfp4,
    nvfp4,
    table_digests,
)
from fixtures.weights import Array, tensor_bytes, write_json, write_safetensors

Tensors = dict[str, tuple[Array, str]]
Entry = tuple[str, tuple[int, ...]]


def opened(
    tensors: Tensors, config: dict[str, Any] | None = None, name: str | None = None
) -> tuple[Stored, Read]:
    """The tensor that a recipe packed, and a reader of its bytes that refuses what lies outside of them."""
    data = {key: tensor_bytes(values, dtype) for key, (values, dtype) in tensors.items()}
    headers = {
        key: TensorInfo(key, dtype, values.shape, "model.safetensors", 0, len(data[key]))
        for key, (values, dtype) in tensors.items()
    }

    def read(tensor: TensorInfo, begin: int, end: int) -> bytes:
        assert 0 <= begin <= end <= tensor.nbytes
        return data[tensor.name][begin:end]

    found = find_stored(
        headers, name or next(iter(tensors)).removesuffix("_packed"), ConfigView(config or {})
    )
    assert found is not None
    return found, read


def opened_recipe(packed: Packed) -> tuple[Stored, Read]:
    return opened(packed.tensors, packed.config)


def everything(stored: Stored, read: Read) -> Array:
    return dequantize_rows(read, stored, 0, stored.rows)


# The numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_numbers_of_codes_are_those_of_torch(dtype: str) -> None:
    values = code_values(dtype)
    assert values.dtype == np.float32
    canonical = np.where(np.isnan(values), np.float32(np.nan), values)
    assert hashlib.sha256(canonical.astype("<f4").tobytes()).hexdigest() == table_digests()[dtype]


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"])
def test_numbers_of_codes_are_those_of_the_recipes(dtype: str) -> None:
    ours, theirs = code_values(dtype), code_table(dtype)
    assert np.array_equal(ours, theirs, equal_nan=True)
    number = ~np.isnan(theirs)
    assert np.array_equal(np.signbit(ours[number]), np.signbit(theirs[number]))


def test_the_table_of_numbers_cannot_be_spoilt() -> None:
    with pytest.raises(ValueError, match="read-only"):
        code_values("F4")[0] = 1


# The examples -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("example", EXAMPLES)
def test_values_are_bit_for_bit_those_of_the_recipe(example: str) -> None:
    packed = EXAMPLES[example]()
    values = everything(*opened_recipe(packed))
    assert values.dtype == np.float32
    assert values.tobytes() == packed.values.astype("<f4").tobytes()


@pytest.mark.parametrize("example", EXAMPLES)
def test_values_are_those_another_implementation_read(example: str) -> None:
    packed, golden = EXAMPLES[example](), load_goldens()[example]
    assert digest(packed) == golden["tensors_sha256"]
    values = everything(*opened_recipe(packed)) + np.float32(0)
    assert values.reshape(-1)[:4].tolist() == golden["first"]
    assert hashlib.sha256(values.astype("<f4").tobytes()).hexdigest() == golden["values_sha256"], golden["by"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_rows_in_any_cut_are_those_of_the_whole(example: str) -> None:
    stored, read = opened_recipe(EXAMPLES[example]())
    whole = everything(stored, read)
    random = np.random.default_rng(7)
    for _ in range(8):
        begin, end = sorted(random.integers(0, stored.rows + 1, 2).tolist())
        assert dequantize_rows(read, stored, begin, end).tobytes() == whole[begin:end].tobytes()
    single = [dequantize_rows(read, stored, row, row + 1) for row in range(stored.rows)]
    assert np.concatenate(single).tobytes() == whole.tobytes()


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_byte_that_matters_is_read(example: str) -> None:
    stored, read = opened_recipe(EXAMPLES[example]())
    assert read_of_each(stored, read) == {t.name: t.nbytes for t in used(stored)}


def used(stored: Stored) -> list[TensorInfo]:
    """The weight and the sides that are not accounted for only."""
    sides = zip(stored.tensors[1:], stored.roles, strict=True)
    return [stored.tensors[0], *(side for side, role in sides if role != "unused")]


def read_of_each(stored: Stored, read: Read) -> dict[str, int]:
    """How many different bytes of each tensor one pass over all rows reads."""
    seen = {tensor.name: np.zeros(tensor.nbytes, bool) for tensor in stored.tensors}

    def watching(tensor: TensorInfo, begin: int, end: int) -> bytes:
        seen[tensor.name][begin:end] = True
        return read(tensor, begin, end)

    dequantize_rows(watching, stored, 0, stored.rows)
    return {name: int(places.sum()) for name, places in seen.items() if places.any()}


def test_strips_of_many_rows_are_put_together_in_order() -> None:
    values = np.random.default_rng(1).standard_normal((700, 260)).astype("<f4")
    packed = fp8(X, values)
    assert everything(*opened_recipe(packed)).tobytes() == packed.values.tobytes()


# Bytes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("shape", [(), (6,), (5, 6), (2, 5, 6)])
def test_plain_rows_come_as_they_are_stored(dtype: str, shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(2).standard_normal(shape).astype("<f4")
    stored, read = opened({X: (values, dtype)})
    data = tensor_bytes(values, dtype)
    size = len(data) // stored.rows
    assert read_rows(read, stored, 0, stored.rows) == data
    assert read_rows(read, stored, stored.rows - 1, stored.rows) == data[-size:]
    numbers = dequantize_rows(read, stored, 0, stored.rows)
    assert numbers.shape == (stored.rows, stored.columns)
    assert np.allclose(numbers.reshape(shape), values, rtol=2**-7)


@pytest.mark.parametrize("example", ["fp8 of ragged blocks", "nvfp4", "compressed int4 with zero points"])
def test_packed_rows_come_as_little_endian_float32(example: str) -> None:
    stored, read = opened_recipe(EXAMPLES[example]())
    assert stored.dtype == "F32"
    data = read_rows(read, stored, 3, 9)
    assert isinstance(data, bytes)
    assert data == everything(stored, read)[3:9].astype("<f4").tobytes()


@pytest.mark.parametrize("example", [name for name in EXAMPLES if name.startswith("mlx")])
def test_rows_of_mlx_come_as_words(example: str) -> None:
    packed = EXAMPLES[example]()
    stored, read = opened_recipe(packed)
    words = packed.tensors[X][0]
    assert read_rows(read, stored, 1, stored.rows) == words.reshape(stored.rows, -1)[1:].tobytes()


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (0, 10), (5, 4), (10, 10)])
@pytest.mark.parametrize("read_them", [read_rows, dequantize_rows])
def test_rows_that_are_not_there(begin: int, end: int, read_them: Any) -> None:
    stored, read = opened_recipe(EXAMPLES["fp8 by row"]())
    with pytest.raises(ValueError, match=r"do not lie in x\.weight of 9 rows"):
        read_them(read, stored, begin, end)


def test_no_rows_are_no_bytes() -> None:
    for recipe in EXAMPLES.values():
        stored, read = opened_recipe(recipe())
        assert dequantize_rows(read, stored, 2, 2).shape == (0, stored.columns)
        assert read_rows(read, stored, stored.rows, stored.rows) == b""


def test_rows_are_read_from_a_checkpoint(tmp_path: Path) -> None:
    tensors: Tensors = {"plain.weight": (np.ones((2, 2), "<f4"), "F32")}
    packed = EXAMPLES["fp8 of ragged blocks"]()
    write_safetensors(tmp_path / "model.safetensors", {**tensors, **packed.tensors})
    write_json(tmp_path / "config.json", packed.config)
    checkpoint = open_checkpoint(tmp_path)
    stored = find_stored(checkpoint.tensors, X, checkpoint.config)
    assert stored is not None
    assert side_names(checkpoint.tensors) == {"x.weight_scale_inv"}
    assert read_rows(checkpoint.read, stored, 0, stored.rows) == packed.values.tobytes()


PIECE = 1 << 20


@pytest.mark.parametrize("dtype", ["F8_E4M3", "I8", "U32"])
def test_a_piece_needs_little_more_memory_than_its_values(dtype: str) -> None:
    """A mebibyte of values: FP8, FP4, and MLX's 3 bits, which take the most steps."""
    codes = np.zeros((512, 1536), "u1")
    sides: Tensors = {"x.scale": (np.zeros((512, 96 if dtype == "I8" else 48), "u1"), "F8_E8M0")}
    if dtype == "U32":
        sides = {name: (np.zeros((512, 64), "<f4"), "BF16") for name in ("x.scales", "x.biases")}
    stored, read = opened(
        {X: (codes.view("<u4") if dtype == "U32" else codes, dtype), **sides},
        {"quantization": {"bits": 3, "group_size": 64}},
    )
    rows = PIECE // (4 * stored.columns)
    dequantize_rows(read, stored, 0, 1)
    tracemalloc.start()
    try:
        dequantize_rows(read, stored, 100, 100 + rows)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert PIECE < peak < 3.5 * PIECE


# What is no number ------------------------------------------------------------------------------------------


def one(code: int, dtype: str, scale: Array, scale_dtype: str) -> float:
    """A single FP8 code times a single scale."""
    stored, read = opened({X: (np.full((1, 2), code, "u1"), dtype), "x.weight_scale": (scale, scale_dtype)})
    return float(everything(stored, read)[0, 0])


@pytest.mark.parametrize(
    ("code", "dtype"), [(0x7F, "F8_E4M3"), (0xFF, "F8_E4M3"), (0x7D, "F8_E5M2"), (0xFF, "F8_E5M2")]
)
def test_nan_codes_come_out_as_nan(code: int, dtype: str) -> None:
    assert np.isnan(one(code, dtype, np.ones((), "<f4"), "F32"))


def test_infinity_comes_out_as_infinity() -> None:
    assert one(0xFC, "F8_E5M2", np.ones((), "<f4"), "F32") == -np.inf
    assert one(0x7E, "F8_E4M3", np.array(1e37, "<f4"), "F32") == np.inf
    assert one(0x38, "F8_E4M3", np.array(np.inf, "<f4"), "F32") == np.inf


@pytest.mark.parametrize("scale", [np.array(np.nan, "<f4"), np.array(np.inf, "<f4")])
def test_a_scale_that_is_no_number_spoils_even_zeros(scale: Array) -> None:
    assert np.isnan(one(0, "F8_E4M3", scale, "F32"))


def test_the_last_code_of_e8m0_is_nan() -> None:
    assert np.isnan(one(0x38, "F8_E4M3", np.array([255], "u1"), "F8_E8M0"))
    assert one(0x38, "F8_E4M3", np.array([0], "u1"), "F8_E8M0") == 2.0**-127
    packed = mxfp4(X, np.ones((2, 32), "<f4"))
    packed.tensors["x.scale"][0][1] = 255
    values = everything(*opened_recipe(packed))
    assert np.isfinite(values[0]).all()
    assert np.isnan(values[1]).all()


def test_scales_of_nvfp4_that_are_no_numbers() -> None:
    packed = nvfp4(X, np.ones((2, 16), "<f4"))
    packed.tensors["x.weight_scale"][0][1] = 0x7F
    values = everything(*opened_recipe(packed))
    assert np.isfinite(values[0]).all()
    assert np.isnan(values[1]).all()
    packed.tensors["x.weight_scale_2"] = (np.array(np.nan, "<f4"), "F32")
    assert np.isnan(everything(*opened_recipe(packed))).all()


# Order of operations ----------------------------------------------------------------------------------------


def test_a_second_scale_goes_into_the_first() -> None:
    """With these numbers code x (scale x second) and (code x scale) x second differ in the last bit."""
    second = np.array(0.1, "<f4")
    tensors: Tensors = {
        X: (np.full((1, 8), 0x55, "u1"), "U8"),
        "x.weight_scale": (np.array([[0x3B]], "u1"), "F8_E4M3"),
        "x.weight_scale_2": (second, "F32"),
    }
    scale, code = np.float32(1.375), np.float32(3.0)
    expected = code * np.float32(scale * second)
    assert expected != np.float32(code * scale) * second
    assert (everything(*opened(tensors)) == expected).all()


def test_fp4_in_bytes_and_as_a_dtype_are_the_same() -> None:
    packed = EXAMPLES["mxfp4"]()
    codes, scales = packed.tensors[X][0], packed.tensors["x.scale"]
    nibbles = np.repeat(codes.view("u1"), 2, axis=1)
    for tensors in (
        {X: (codes.view("u1"), "U8"), "x.scale": scales},
        {X: (nibbles, "F4"), "x.scale": scales},
    ):
        headers = {
            name: TensorInfo(name, dtype, values.shape, "f", 0, nbytes(dtype, values.shape))
            for name, (values, dtype) in tensors.items()
        }
        data = {X: codes.tobytes(), "x.scale": scales[0].tobytes()}
        stored = find_stored(headers, X, ConfigView({}))
        assert stored is not None
        values = dequantize_rows(
            lambda tensor, begin, end, data=data: data[tensor.name][begin:end], stored, 0, 12
        )
        assert values.tobytes() == packed.values.tobytes()


def test_bytes_that_the_config_calls_fp8_are_e4m3() -> None:
    packed = EXAMPLES["fp8 of ragged blocks"]()
    tensors = {**packed.tensors, X: (packed.tensors[X][0], "U8")}
    assert everything(*opened(tensors, packed.config)).tobytes() == packed.values.tobytes()


def test_zero_points_of_experts_start_anew_for_each() -> None:
    parts = [
        compressed_integers(X, np.random.default_rng(i).standard_normal((11, 32)), 4, 32, False)
        for i in (1, 2)
    ]
    tensors: Tensors = {
        name: (np.stack([part.tensors[name][0] for part in parts]), dtype)
        for name, (_, dtype) in parts[0].tensors.items()
    }
    tensors["x.weight_shape"] = (np.array([2, 11, 32], "<i8"), "I64")
    stored, read = opened(tensors, parts[0].config)
    assert stored.shape == (2, 11, 32)
    expected = np.concatenate([part.values for part in parts])
    assert everything(stored, read).tobytes() == expected.tobytes()
    assert dequantize_rows(read, stored, 9, 14).tobytes() == expected[9:14].tobytes()


# What only the data says ------------------------------------------------------------------------------------


def ordered(order: Array, dtype: str = "I32") -> tuple[Stored, Read]:
    packed = EXAMPLES["compressed int4"]()
    return opened({**packed.tensors, "x.weight_g_idx": (order, dtype)}, packed.config)


def test_columns_in_the_order_of_their_groups() -> None:
    expected = EXAMPLES["compressed int4"]().values
    for kind, dtype in (("<i4", "I32"), ("<i8", "I64")):
        assert everything(*ordered((np.arange(64) // 32).astype(kind), dtype)).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "order", [np.arange(64)[::-1] // 32, np.arange(64) % 2, np.full(64, -1)], ids=["back", "mixed", "none"]
)
def test_columns_that_were_moved_are_refused(order: Array) -> None:
    stored, read = ordered(order.astype("<i4"))
    with pytest.raises(
        UnknownPacking, match=r"x\.weight_g_idx in model\.safetensors puts columns in another order"
    ):
        read_rows(read, stored, 0, 1)


def test_integers_whose_true_shape_is_another_are_refused() -> None:
    packed = EXAMPLES["compressed int8 by channel"]()
    packed.tensors["x.weight_shape"][0][1] = 18
    stored, read = opened_recipe(packed)
    with pytest.raises(
        UnknownPacking, match=r"states the shape \[11, 18\], and its header was read as \[11, 20\]"
    ):
        dequantize_rows(read, stored, 0, 11)


# MLX itself -------------------------------------------------------------------------------------------------

MLX_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


@pytest.mark.parametrize("dtype", MLX_DTYPES)
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_affine_mode_is_bit_for_bit_that_of_mlx(dtype: str, bits: int, group: int) -> None:
    mx = pytest.importorskip("mlx.core")
    random = np.random.default_rng(bits * group)
    kind = getattr(mx, MLX_DTYPES[dtype])
    words = random.integers(0, 2**32, (2, 7, 256 * bits // 32), dtype="u4")
    with mx.stream(mx.cpu):
        sides = [
            mx.array(random.standard_normal((2, 7, 256 // group)).astype("f4")).astype(kind) for _ in "sb"
        ]
        made = mx.dequantize(mx.array(words), *sides, group_size=group, bits=bits)
        expected = np.array(made.astype(mx.float32))
        scales, biases = (np.array(side.astype(mx.float32)) for side in sides)
    tensors: Tensors = {X: (words, "U32"), "x.scales": (scales, dtype), "x.biases": (biases, dtype)}
    stored, read = opened(tensors, {"quantization": {"bits": bits, "group_size": group}})
    assert everything(stored, read).tobytes() == expected.tobytes()


@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_floating_modes_are_bit_for_bit_those_of_mlx(mode: str, bits: int, group: int) -> None:
    """Every scale byte with random codes; a NaN is a NaN, whatever its sign."""
    mx = pytest.importorskip("mlx.core")
    words = np.random.default_rng(bits * group).integers(0, 2**32, (256, 4 * group * bits // 32), dtype="u4")
    scales = np.tile(np.arange(256, dtype="u1")[:, None], 4)
    with mx.stream(mx.cpu):
        made = mx.dequantize(
            mx.array(words), mx.array(scales), mode=mode, group_size=group, bits=bits, dtype=mx.float32
        )
        expected = np.array(made)
    values = everything(*opened({X: (words, "U32"), "x.scales": (scales, "U8")}))
    number = ~np.isnan(expected)
    assert np.array_equal(np.isnan(values), ~number)
    assert values[number].tobytes() == expected[number].tobytes()


# Every combination ------------------------------------------------------------------------------------------

NAMES = [
    "x.weight_packed", "x.weight_scale_inv", "x.weight_scale", "x.scale", "x.weight_scale_2",
    "x.weight_global_scale", "x.weight_shape", "x.weight_zero_point", "x.weight_g_idx", "x.scales", "x.biases",
    "x.input_scale",
]  # fmt: skip
DTYPES = ["BF16", "F16", "F32", "F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I8", "U32", "I32", "I64", "F4"]
EXTENTS = st.sampled_from([0, 1, 2, 3, 4, 6, 8, 16, 32, 33, 64, 128])
SHAPES = st.lists(EXTENTS, max_size=3).filter(lambda shape: prod(shape) <= 1 << 14).map(tuple)
SCHEMES = st.builds(
    compressed_config,
    st.sampled_from(["pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "float-quantized"]),
    type=st.sampled_from(["int", "float"]),
    num_bits=st.sampled_from([4, 8, 2]),
    group_size=st.sampled_from([16, 32, 4, -1, None]),
    strategy=st.sampled_from(["group", "channel", "tensor", "block", None]),
    symmetric=st.booleans(),
    block_structure=st.sampled_from([[2, 2], [32, 32], None]),
)
CONFIGS = st.one_of(
    st.just({}),
    SCHEMES,
    st.builds(
        lambda method, block: {"quantization_config": {"quant_method": method, "weight_block_size": block}},
        st.sampled_from(["fp8", "modelopt", "mxfp8", "gptq", 5]),
        st.sampled_from([None, [128, 128], [2, 2], [1, 32], "x", [0, 1]]),
    ),
    st.builds(
        lambda bits, group: {"quantization": {"bits": bits, "group_size": group}},
        st.sampled_from([2, 3, 4, 8, None]),
        st.sampled_from([32, 64, 128, "64", None]),
    ),
)


@cache
def example_headers() -> list[tuple[dict[str, Entry], dict[str, Any]]]:
    """Headers and config of every example, all by the name of x.weight."""
    made = [recipe() for recipe in EXAMPLES.values()]
    return [
        (
            {
                name.replace("experts.up", X).replace("experts.", "x."): (dtype, values.shape)
                for name, (values, dtype) in packed.tensors.items()
            },
            packed.config,
        )
        for packed in made
    ]


@st.composite
def near_examples(draw: st.DrawFn) -> tuple[dict[str, Entry], dict[str, Any]]:
    """An example with up to two things changed, added or taken away."""
    original, config = draw(st.sampled_from(example_headers()))
    headers = dict(original)
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from([*headers, *NAMES]))
        dtype, shape = headers.get(name, ("F32", ()))
        change = draw(st.sampled_from(["dtype", "shape", "extent", "remove"]))
        if change == "dtype":
            headers[name] = (draw(st.sampled_from(DTYPES)), shape)
        elif change == "shape":
            headers[name] = (dtype, draw(SHAPES))
        elif change == "extent" and shape:
            axis = draw(st.integers(0, len(shape) - 1))
            headers[name] = (dtype, (*shape[:axis], draw(EXTENTS), *shape[axis + 1 :]))
        else:
            headers.pop(name, None)
    return headers, draw(st.one_of(st.just(config), st.just(config), CONFIGS))


ANY_TENSOR = st.tuples(st.sampled_from(DTYPES), SHAPES)
ANY_HEADERS = st.tuples(
    st.fixed_dictionaries({X: ANY_TENSOR}, optional=dict.fromkeys(NAMES, ANY_TENSOR)), CONFIGS
)


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.one_of(near_examples(), near_examples(), ANY_HEADERS))
def test_any_combination_is_refused_or_read_to_the_last_byte(
    world: tuple[dict[str, Entry], dict[str, Any]],
) -> None:
    """Nothing but UnknownPacking is raised, and what is read uses each byte of each tensor that takes part."""
    entries, config = world
    headers = {
        name: TensorInfo(name, dtype, shape, "f", 0, nbytes(dtype, shape))
        for name, (dtype, shape) in entries.items()
        if dtype != "F4" or prod(shape) % 2 == 0
    }
    try:
        stored = find_stored(headers, X, ConfigView(config))
    except UnknownPacking:
        return
    if stored is None:
        assert not {"x.weight", "x.weight_packed"} & headers.keys()
        return
    assert {tensor.name for tensor in stored.tensors[1:]} <= side_names(headers)
    data = {name: filling(tensor, stored) for name, tensor in headers.items()}

    def read(tensor: TensorInfo, begin: int, end: int) -> bytes:
        assert 0 <= begin <= end <= tensor.nbytes
        return data[tensor.name][begin:end]

    assert read_of_each(stored, read) == {
        tensor.name: tensor.nbytes for tensor in used(stored) if tensor.nbytes
    }
    assert dequantize_rows(read, stored, 0, stored.rows).shape == (stored.rows, stored.columns)
    in_memory = stored.tensors[0].nbytes if stored.encoding == "mlx" else nbytes(stored.dtype, stored.shape)
    assert len(read_rows(read, stored, 0, stored.rows)) == in_memory


def filling(tensor: TensorInfo, stored: Stored) -> bytes:
    """Random bytes, but the shape and the order of columns that the header was taken for."""
    if stored.packing is not None and stored.encoding == "int":
        if tensor.name == "x.weight_shape":
            return np.array(stored.shape, f"<i{tensor.nbytes // len(stored.shape)}").tobytes()
        if tensor.name == "x.weight_g_idx":
            groups = np.arange(stored.columns) // stored.packing.block[1]
            return groups.astype(f"<i{tensor.nbytes // stored.columns}").tobytes()
    return np.random.default_rng(len(tensor.name)).bytes(tensor.nbytes)
