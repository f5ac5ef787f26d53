"""Quantization by rows against `mx.quantize` of the whole tensor, and which tensors are quantized."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from draftpair.checkpoint.writer import Output
from draftpair.convert import stream
from draftpair.convert.quantize import BITS, GROUP_SIZES, Quantization, Quantizer, load_mlx
from draftpair.errors import Refused, ToolError, Usage
from fixtures.glm4_moe_lite import write_checkpoint

STORED = {"BF16": ("u2", "bfloat16"), "F16": ("u2", "float16"), "F32": ("u4", "float32")}
BLOCK = "model.mtp_block."


def random_words(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    values = np.random.default_rng(len(shape)).standard_normal(shape).astype("<f4")
    if dtype == "BF16":
        return (values.view("<u4") >> 16).astype("<u2")
    return values.astype("<f2").view("<u2") if dtype == "F16" else values.view("<u4")


def whole(words: np.ndarray, dtype: str, bits: int, group: int) -> list[bytes]:
    """What MLX makes of the whole tensor at once."""
    mx = pytest.importorskip("mlx.core")
    storage, name = STORED[dtype]
    with mx.stream(mx.cpu):
        made = mx.quantize(mx.array(words).view(getattr(mx, name)), group_size=group, bits=bits)
        kinds = (mx.uint32, *[getattr(mx, np.dtype(storage).name)] * 2)
        return [np.array(part.view(kind)).tobytes() for part, kind in zip(made, kinds, strict=True)]


@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("shape", [(7, 256), (3, 5, 128)], ids=["matrix", "stack"])
def test_rows_are_bit_for_bit_the_whole_tensor(shape: tuple[int, ...], bits: int, group: int) -> None:
    words = random_words(shape, "BF16")
    expected = whole(words, "BF16", bits, group)
    quantization = Quantization(bits, group)
    quantizer = Quantizer(quantization)
    rows = words.reshape(-1, shape[-1])
    pieces = [
        quantizer.rows(rows[begin : begin + 2].tobytes(), "BF16", shape[-1])
        for begin in range(0, len(rows), 2)
    ]
    assert [b"".join(parts) for parts in zip(*pieces, strict=True)] == expected
    outputs = quantization.outputs(Output("x.weight", "BF16", shape))
    assert [output.nbytes for output in outputs] == [len(data) for data in expected]


@pytest.mark.parametrize("dtype", STORED)
def test_scales_keep_the_dtype_of_the_weight(dtype: str) -> None:
    words = random_words((4, 64), dtype)
    expected = whole(words, dtype, 4, 32)
    assert list(Quantizer(Quantization(4, 32)).rows(words.tobytes(), dtype, 64)) == expected


@pytest.mark.parametrize("bits", BITS)
def test_a_quantized_split_holds_what_mlx_makes_of_the_dense_split(
    raw: Path, tmp_path: Path, tools, bits: int
) -> None:
    pytest.importorskip("mlx.core")
    tools.split(raw, tmp_path / "dense")
    plan = tools.split(raw, tmp_path / "out", q_bits=bits, q_group_size=32).plan
    dense, found = tools.read(tmp_path / "dense"), tools.read(tmp_path / "out")
    quantized = {tensor.name for tensor in plan.tensors if tensor.quantized}
    assert {f"{BLOCK}mlp.switch_mlp.down_proj.weight", "lm_head.weight"} < quantized
    for name, (dtype, words) in dense.items():
        if name in quantized:
            stem = name.removesuffix("weight")
            made = [found[name], found[f"{stem}scales"], found[f"{stem}biases"]]
            assert [kind for kind, _ in made] == ["U32", "BF16", "BF16"]
            assert [part.tobytes() for _, part in made] == whole(words, dtype, bits, 32), name
        else:
            assert np.array_equal(found[name][1], words), name


@pytest.mark.parametrize("piece", [1, 100, 5000])
def test_the_size_of_pieces_changes_no_byte(
    raw: Path, tmp_path: Path, tools, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    pytest.importorskip("mlx.core")
    tools.split(raw, tmp_path / "usual", q_bits=4, q_group_size=32)
    monkeypatch.setattr(stream, "PIECE_BYTES", piece)
    tools.split(raw, tmp_path / "small", q_bits=4, q_group_size=32)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("usual", "small")]
    assert files[0] == files[1]


def test_what_stays_dense_is_listed_with_the_reason(raw: Path, tmp_path: Path, tools) -> None:
    plan = tools.plan(raw, tmp_path / "out", q_bits=4, q_group_size=64)
    kept = dict(plan.kept_full_precision)
    assert "router" in kept[f"{BLOCK}mlp.gate.weight"]
    assert "not a weight" in kept[f"{BLOCK}mlp.gate.e_score_correction_bias"]
    assert "vector" in kept["model.enorm.weight"]
    assert "rows of 32" in kept[f"{BLOCK}self_attn.embed_q.weight"]
    quantized = {tensor.name for tensor in plan.tensors if tensor.quantized}
    assert quantized | set(kept) == {tensor.name for tensor in plan.tensors}
    assert not quantized & set(kept)


def test_true_shapes_give_54_tensors_and_embed_q_stays_dense_at_128(tmp_path: Path, tools) -> None:
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
    for group in GROUP_SIZES:
        plan = tools.plan(raw, tmp_path / "out", q_bits=4, q_group_size=group)
        assert len(plan.tensors) == 24
        counts[group] = len(plan.outputs)
    assert counts == {32: 54, 64: 54, 128: 52}


def test_quantization_is_recorded_twice_and_parameters_are_counted_unpacked(
    raw: Path, tmp_path: Path, tools
) -> None:
    pytest.importorskip("mlx.core")
    out = tmp_path / "out"
    tools.split(raw, out, q_bits=4, q_group_size=32)
    tools.split(raw, tmp_path / "dense")
    config = json.loads((out / "config.json").read_text())
    assert (
        config["quantization"]
        == config["quantization_config"]
        == {"bits": 4, "group_size": 32, "mode": "affine"}
    )
    metadata = [
        json.loads((folder / "model.safetensors.index.json").read_text())["metadata"]
        for folder in (out, tmp_path / "dense")
    ]
    assert metadata[0]["total_parameters"] == metadata[1]["total_parameters"]
    assert metadata[0]["total_size"] == sum(words.nbytes for _, words in tools.read(out).values())
    manifest = json.loads((out / "draftpair-manifest.json").read_text())
    assert manifest["tensors"]["lm_head.scales"]["transforms"] == ["quantize affine 4/32"]
    assert manifest["mlx_version"] == load_mlx().__version__


def test_a_quantization_of_nothing_is_refused(tmp_path: Path, tools) -> None:
    sizes = {"hidden": 24, "heads": 1, "nope": 8, "value": 8, "kv_lora": 8, "q_lora": 8, "moe": 8}
    raw = write_checkpoint(tmp_path / "raw", **sizes)
    with pytest.raises(Refused, match=r"would quantize nothing.*group size 32"):
        tools.plan(raw, tmp_path / "out", q_bits=4, q_group_size=32)


@pytest.mark.parametrize("bits", [0, 1, 7, 9, 16, 32])
def test_other_bit_widths_are_refused(bits: int) -> None:
    with pytest.raises(Usage, match=rf"--q-bits \({bits}\) must be one of 2, 3, 4, 5, 6, 8"):
        Quantization(bits, 64)


@pytest.mark.parametrize("group", [1, 16, 48, 256])
def test_other_group_sizes_are_refused(group: int) -> None:
    with pytest.raises(Usage, match=rf"--q-group-size \({group}\) must be one of 32, 64, 128"):
        Quantization(4, group)


def test_without_mlx_the_hint_says_how_to_install_it(
    raw: Path, tmp_path: Path, tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(ToolError, match="needs MLX") as caught:
        tools.split(raw, tmp_path / "out", q_bits=4)
    assert caught.value.hint is not None
    assert 'pip install "draftpair[cpu]"' in caught.value.hint
    assert not (tmp_path / "out").exists()
    tools.plan(raw, tmp_path / "out", q_bits=4)
    tools.split(raw, tmp_path / "out")


def test_an_unquantized_split_imports_no_mlx(raw: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from draftpair import api;"
        f"api.split_mtp(Path({str(raw)!r}), Path({str(tmp_path / 'out')!r}));"
        "sys.exit('mlx.core' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
