"""The modes and what they can be asked for, quantization by rows, and which tensors of a split are quantized."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair.checkpoint import from_float32
from draftpair.checkpoint.writer import Output
from draftpair.convert import stream
from draftpair.convert.quantize import MODES, Quantization, quantization
from draftpair.errors import Refused, Usage
from fixtures.glm4_moe_lite import write_checkpoint

STORED = {"BF16": ("u2", "bfloat16"), "F16": ("u2", "float16"), "F32": ("u4", "float32")}
BLOCK = "model.mtp_block."
EVERY = [
    Quantization(bits, group, mode)
    for mode, found in MODES.items()
    for bits in found.bits
    for group in found.group_sizes
]
ONE_OF_EACH = [Quantization(4, 32), *(quantization(mode, None, None) for mode in ("mxfp4", "nvfp4", "mxfp8"))]


def random_words(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = np.random.default_rng(len(shape)).standard_normal(shape).astype("<f4")
    if dtype == "BF16":
        return (values.view("<u4") >> 16).astype("<u2")
    return values.astype("<f2").view("<u2") if dtype == "F16" else values.view("<u4")


def whole(words: np.ndarray, dtype: str, how: Quantization) -> list[bytes]:
    """What MLX makes of the whole tensor at once."""
    mx = pytest.importorskip("mlx.core")
    storage, name = STORED[dtype]
    unsigned = getattr(mx, np.dtype(storage).name)
    with mx.stream(mx.cpu):
        made = mx.quantize(mx.array(words).view(getattr(mx, name)), **how.as_config())
        kinds = (mx.uint32, unsigned, unsigned) if how.mode == "affine" else (mx.uint32, mx.uint8)
        return [np.array(part.view(kind)).tobytes() for part, kind in zip(made, kinds, strict=True)]


@pytest.mark.parametrize("how", EVERY, ids=str)
@pytest.mark.parametrize("shape", [(8, 256), (3, 5, 128)], ids=["matrix", "stack"])
def test_rows_are_bit_for_bit_the_whole_tensor(shape: tuple[int, ...], how: Quantization) -> None:
    words = random_words(shape, "BF16")
    expected = whole(words, "BF16", how)
    rows = words.reshape(-1, shape[-1])
    pieces = [
        how.rows(rows[begin : begin + 2].tobytes(), "BF16", shape[-1]) for begin in range(0, len(rows), 2)
    ]
    assert [b"".join(parts) for parts in zip(*pieces, strict=True)] == expected
    outputs = how.outputs(Output("x.weight", "BF16", shape))
    assert [output.nbytes for output in outputs] == [len(data) for data in expected]


@pytest.mark.parametrize("how", ONE_OF_EACH, ids=str)
@pytest.mark.parametrize("dtype", STORED)
def test_what_is_written_beside_the_words(dtype: str, how: Quantization) -> None:
    """Affine has scales and biases in the dtype of the weight, the other modes scales of a byte each."""
    words = random_words((4, 64), dtype)
    assert list(how.rows(words.tobytes(), dtype, 64)) == whole(words, dtype, how)
    scales = (4, 64 // how.group_size)
    sides = [("a.b.scales", dtype), ("a.b.biases", dtype)] if how.mode == "affine" else [("a.b.scales", "U8")]
    assert how.outputs(Output("a.b.weight", dtype, (4, 64))) == (
        Output("a.b.weight", "U32", (4, 64 * how.bits // 32)),
        *(Output(name, kind, scales) for name, kind in sides),
    )


@pytest.mark.parametrize("how", EVERY, ids=str)
def test_layers_of_mlx_take_what_was_written(how: Quantization) -> None:
    """Modules that mlx-lm's and mlx-vlm's loaders quantize by the config have our names, shapes and dtypes."""
    mx, nn = pytest.importorskip("mlx.core"), pytest.importorskip("mlx.nn")
    words = random_words((8, 128), "BF16")
    data = how.rows(words.tobytes(), "BF16", 128)
    kinds = {"U32": np.uint32, "U8": np.uint8, "BF16": np.uint16}
    arrays = {}
    for output, part in zip(how.outputs(Output("weight", "BF16", (8, 128))), data, strict=True):
        stored = mx.array(np.frombuffer(part, kinds[output.dtype]).reshape(output.shape))
        arrays[output.name] = stored.view(mx.bfloat16) if output.dtype == "BF16" else stored
    with mx.stream(mx.cpu):
        linear = nn.Linear(128, 8, bias=False)
        linear.set_dtype(mx.bfloat16)
        layer = linear.to_quantized(**how.as_config())
        assert {n: (a.shape, a.dtype) for n, a in arrays.items()} == {
            n: (a.shape, a.dtype) for n, a in layer.parameters().items()
        }
        layer.load_weights(list(arrays.items()))
        values = mx.array(words).view(mx.bfloat16).astype(mx.float32)
        error = mx.abs(layer(mx.eye(128)).T - values).max().item()
    assert error < 8 / 2**how.bits + 0.1


def test_the_modes_are_those_of_mlx() -> None:
    """And nothing else is accepted, but for single bits, which mlx-vlm cannot run everywhere."""
    mx = pytest.importorskip("mlx.core")
    accepted = {(mode, 1, group) for mode, group in [("affine", 32), ("affine", 64), ("affine", 128)]}
    for mode, found in MODES.items():
        default = mx.quantize(mx.zeros((8, 512)), mode=mode)
        explicit = mx.quantize(mx.zeros((8, 512)), found.default_group_size, found.default_bits, mode=mode)
        assert [part.shape for part in default] == [part.shape for part in explicit]
        accepted |= {(mode, bits, group) for bits in found.bits for group in found.group_sizes}
    for mode in MODES:
        for bits in range(17):
            for group in (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 256, 512):
                try:
                    mx.quantize(mx.zeros((8, 1536)), group_size=group, bits=bits, mode=mode)
                except ValueError:
                    assert (mode, bits, group) not in accepted
                else:
                    assert (mode, bits, group) in accepted


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (("affine", None, None), Quantization(4, 64, "affine")),
        (("affine", 8, None), Quantization(8, 64, "affine")),
        (("affine", None, 32), Quantization(4, 32, "affine")),
        (("mxfp4", None, None), Quantization(4, 32, "mxfp4")),
        (("mxfp4", 4, 32), Quantization(4, 32, "mxfp4")),
        (("nvfp4", None, None), Quantization(4, 16, "nvfp4")),
        (("mxfp8", None, None), Quantization(8, 32, "mxfp8")),
    ],
)
def test_what_is_left_out_is_the_default_of_the_mode(asked: Any, expected: Quantization) -> None:
    assert quantization(*asked) == expected


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("affine", 7, None), r"--q-bits \(7\) must be one of 2, 3, 4, 5, 6, 8 in mode affine"),
        (("affine", 1, None), r"--q-bits \(1\) must be one of 2, 3, 4, 5, 6, 8"),
        (("affine", 0, None), r"--q-bits \(0\) must be one of 2, 3, 4, 5, 6, 8"),
        (("affine", 4, 16), r"--q-group-size \(16\) must be one of 32, 64, 128 in mode affine"),
        (("affine", 4, 0), r"--q-group-size \(0\) must be one of 32, 64, 128"),
        (("mxfp4", 8, None), r"--q-bits \(8\) must be 4 in mode mxfp4"),
        (("mxfp4", None, 64), r"--q-group-size \(64\) must be 32 in mode mxfp4"),
        (("nvfp4", None, 32), r"--q-group-size \(32\) must be 16 in mode nvfp4"),
        (("mxfp8", 4, None), r"--q-bits \(4\) must be 8 in mode mxfp8"),
        (("int8", None, None), r"--q-mode \(int8\) must be one of affine, mxfp4, nvfp4, mxfp8"),
    ],
)
def test_what_mlx_does_not_have_is_refused(asked: Any, message: str) -> None:
    with pytest.raises(Usage, match=message) as caught:
        quantization(*asked)
    has_one_choice = caught.value.hint is not None
    assert has_one_choice == (asked[0] in ("mxfp4", "nvfp4", "mxfp8"))


@pytest.mark.parametrize("made", [(7, 64, "affine"), (4, 64, "mxfp4"), (4, 32, "int4")])
def test_no_quantization_is_made_that_mlx_does_not_have(made: Any) -> None:
    with pytest.raises(Usage):
        Quantization(*made)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "how", "reason"),
    [
        ("x.weight", "BF16", (4, 64), Quantization(4, 64), None),
        ("x.weight", "BF16", (2, 2, 16), quantization("nvfp4", None, None), None),
        ("x.bias", "BF16", (4, 64), Quantization(4, 64), "not a weight"),
        ("x.weight", "BF16", (64,), Quantization(4, 64), "a vector"),
        ("x.weight", "U8", (4, 64), Quantization(4, 64), "U8 cannot be quantized"),
        ("x.weight", "BF16", (0, 64), Quantization(4, 64), "empty"),
        (
            "x.weight",
            "BF16",
            (4, 96),
            Quantization(4, 64),
            "rows of 96 are not a multiple of the group size 64",
        ),
        ("x.weight", "BF16", (4, 48), quantization("mxfp8", None, None), "of the group size 32"),
        (
            "x.weight",
            "BF16",
            (3, 96),
            quantization("mxfp4", None, None),
            "its 288 values are not a multiple of 64",
        ),
        ("x.weight", "BF16", (1, 3, 48), quantization("nvfp4", None, None), "its 144 values"),
    ],
)
def test_what_keeps_a_tensor_dense(
    name: str, dtype: str, shape: tuple[int, ...], how: Quantization, reason: str | None
) -> None:
    found = how.obstacle(Output(name, dtype, shape))
    assert found == reason if reason is None else reason in str(found)


def test_rows_of_broken_groups_are_no_input() -> None:
    with pytest.raises(ValueError, match="rows of 96 values are no whole groups of 64"):
        Quantization(4, 64).rows(bytes(4 * 96 * 2), "BF16", 96)


@pytest.mark.parametrize("how", ONE_OF_EACH, ids=str)
def test_a_quantized_split_holds_what_mlx_makes_of_the_dense_split(
    raw: Path, tmp_path: Path, tools: Any, how: Quantization
) -> None:
    pytest.importorskip("mlx.core")
    tools.split(raw, tmp_path / "dense")
    options = {"q_bits": how.bits, "q_group_size": how.group_size, "q_mode": how.mode}
    plan = tools.split(raw, tmp_path / "out", **options).plan
    dense, found = tools.read(tmp_path / "dense"), tools.read(tmp_path / "out")
    quantized = {tensor.name for tensor in plan.tensors if tensor.quantization}
    assert {f"{BLOCK}mlp.switch_mlp.down_proj.weight", "lm_head.weight"} < quantized
    for name, (dtype, words) in dense.items():
        if name in quantized:
            names = [output.name for output in how.outputs(Output(name, dtype, words.shape))]
            assert [found[part][1].tobytes() for part in names] == whole(words, dtype, how), name
        else:
            assert np.array_equal(found[name][1], words), name


@pytest.mark.parametrize("piece", [1, 100, 5000])
def test_the_size_of_pieces_changes_no_byte(
    raw: Path, tmp_path: Path, tools: Any, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    tools.split(raw, tmp_path / "usual", q_bits=4, q_group_size=32)
    monkeypatch.setattr(stream, "PIECE_BYTES", piece)
    tools.split(raw, tmp_path / "small", q_bits=4, q_group_size=32)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("usual", "small")]
    assert files[0] == files[1]


def test_what_stays_dense_is_listed_with_the_reason(raw: Path, tmp_path: Path, tools: Any) -> None:
    plan = tools.plan(raw, tmp_path / "out", q_bits=4, q_group_size=64)
    kept = dict(plan.kept_full_precision)
    assert "router" in kept[f"{BLOCK}mlp.gate.weight"]
    assert "not a weight" in kept[f"{BLOCK}mlp.gate.e_score_correction_bias"]
    assert "vector" in kept["model.enorm.weight"]
    assert "rows of 32" in kept[f"{BLOCK}self_attn.embed_q.weight"]
    quantized = {tensor.name for tensor in plan.tensors if tensor.quantization}
    assert quantized | set(kept) == {tensor.name for tensor in plan.tensors}
    assert not quantized & set(kept)


def test_true_shapes_give_54_tensors_and_embed_q_stays_dense_at_128(tmp_path: Path, tools: Any) -> None:
    """24 tensors, 15 of them quantized, as the maintainers of mlxcel report for the real checkpoint."""
    sizes = {
        "hidden": 128,
        "nope": 192,
        "value": 256,
        "kv_lora": 128,
        "q_lora": 128,
        "moe": 128,
        "experts": 2,
    }
    raw = write_checkpoint(tmp_path / "raw", heads=1, rope=64, **sizes)
    counts = {}
    for group in (32, 64, 128):
        plan = tools.plan(raw, tmp_path / "out", q_bits=4, q_group_size=group)
        assert len(plan.tensors) == 24
        counts[group] = len(plan.outputs)
    assert counts == {32: 54, 64: 54, 128: 52}


@pytest.mark.parametrize("how", ONE_OF_EACH, ids=str)
def test_quantization_is_recorded_twice_and_parameters_are_counted_unpacked(
    raw: Path, tmp_path: Path, tools: Any, how: Quantization
) -> None:
    out = tmp_path / "out"
    tools.split(raw, out, q_mode=how.mode, q_group_size=how.group_size)
    tools.split(raw, tmp_path / "dense")
    config = json.loads((out / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"] == how.as_config()
    metadata = [
        json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]
        for folder in (out, tmp_path / "dense")
    ]
    assert metadata[0]["total_parameters"] == metadata[1]["total_parameters"]
    assert metadata[0]["total_size"] == sum(words.nbytes for _, words in tools.read(out).values())
    manifest = json.loads((out / "draftpair-manifest.json").read_text())
    assert manifest["tensors"]["lm_head.scales"]["transforms"] == [f"quantize {how}"]


def test_a_quantization_of_nothing_is_refused(tmp_path: Path, tools: Any) -> None:
    sizes = {"hidden": 24, "heads": 1, "nope": 8, "value": 8, "kv_lora": 8, "q_lora": 8, "moe": 8}
    raw = write_checkpoint(tmp_path / "raw", **sizes)
    with pytest.raises(Refused, match=r"nothing would be quantized.*group size 32"):
        tools.plan(raw, tmp_path / "out", q_bits=4, q_group_size=32)


@pytest.mark.parametrize("mode", [None, *(mode for mode in MODES if mode != "affine")])
def test_no_split_but_an_affine_one_imports_mlx(raw: Path, tmp_path: Path, mode: str | None) -> None:
    code = (
        "import sys; from pathlib import Path; from draftpair import api;"
        f"api.split_mtp(Path({str(raw)!r}), Path({str(tmp_path / 'out')!r}), q_mode={mode!r});"
        "sys.exit('mlx.core' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("mode", "value"), [("mxfp4", 1e-38), ("mxfp8", 1e-36)])
def test_groups_that_would_be_read_back_as_huge_numbers_are_refused(
    raw: Path, tmp_path: Path, tools: Any, mode: str, value: float
) -> None:
    name = "model.layers.3.eh_proj.weight"

    def shrink(tensors: dict[str, Any]) -> None:
        words = tensors[name][1].copy()
        words[2, :32] = np.full(32, value, "<f4").view("<u4") >> 16
        tensors[name] = ("BF16", words)

    tools.edit_tensors(raw, shrink)
    with pytest.raises(Refused, match=rf"read back as huge numbers: model.eh_proj.weight \({mode}.* \(1\)"):
        tools.split(raw, tmp_path / "out", q_mode=mode)
    assert not (tmp_path / "out").exists()
    tools.split(raw, tmp_path / "out", q_mode=mode, q_overrides=("eh_proj=none",))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_affine_bytes_are_the_same_with_and_without_mlx(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    values = np.random.default_rng(5).standard_normal((64, 256), "<f4")
    data, how = from_float32(values, dtype), Quantization(4, 64)
    with_mlx = how.rows(data, dtype, 256)
    monkeypatch.setattr("draftpair.convert.quantize._mlx", lambda: None)
    assert how.rows(data, dtype, 256) == with_mlx
