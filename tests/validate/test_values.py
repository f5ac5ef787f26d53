"""What the numbers of a drafter show: damage, destroyed scales, and untrained heads."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.families.drafters import find_drafter
from draftpair.findings import Finding
from draftpair.validate.samples import REMOTE_READS
from draftpair.validate.values import EVEN, check_values, unevenness
from fixtures import (
    deepseek_v3,
    deepseek_v4,
    gemma4_assistant,
    glm4_moe,
    glm4_moe_lite,
    glm4_moe_lite_copy,
    glm5_next,
    glm_moe_dsa,
    hy_v4,
    inkling,
    nemotron_h,
    qwen3_5,
    qwen4_exp,
)
from fixtures.counting import counted
from fixtures.split_heads import Change, Words, altered, edit_tensors, read_words, split
from fixtures.weights import Array, bf16_bits, stream

FOLDERS = {
    "glm4_moe_lite": glm4_moe_lite.write_checkpoint,
    "glm4_moe": glm4_moe.write_checkpoint,
    "glm5_next": glm5_next.write_checkpoint,
    "glm_moe_dsa": glm_moe_dsa.write_checkpoint,
    "deepseek_v3": deepseek_v3.write_checkpoint,
    "deepseek_v4": deepseek_v4.write_checkpoint,
    "hy_v4": hy_v4.write_checkpoint,
    "inkling": inkling.write_checkpoint,
    "nemotron_h": nemotron_h.write_checkpoint,
    "qwen3_5": qwen3_5.write_checkpoint,
    "qwen4_exp": qwen4_exp.write_checkpoint,
}
MATRIX = "model.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter in each form: plain, in 4 bits of MLX, one of zero-centred norms, one of gains."""
    folder = tmp_path_factory.mktemp("values")
    raw = glm4_moe_lite.write_checkpoint(folder / "raw")
    split(raw, folder / "plain")
    split(raw, folder / "packed", q_bits=4, q_group_size=32)
    split(qwen3_5.write_checkpoint(folder / "qwen"), folder / "gains")
    split(qwen4_exp.write_checkpoint(folder / "qwen4"), folder / "centred")
    return folder


def found(folder: Path) -> list[Finding]:
    checkpoint = open_checkpoint(folder)
    match = find_drafter(checkpoint)
    assert match is not None
    return list(check_values(checkpoint, match.family, match.config))


def changed(source: Path, folder: Path, *changes: Change) -> list[Finding]:
    """Findings of a copy of a drafter after changes to its tensors."""
    shutil.copytree(source, folder)
    for change in changes:
        edit_tensors(folder, change)
    return found(folder)


def said(findings: list[Finding]) -> list[tuple[str, str, str | None]]:
    return [(finding.rule, finding.level, finding.where) for finding in findings]


def filled(name: str, word: int) -> Change:
    return altered(name, lambda words: np.full_like(words, word))


def ending(folder: Path, *ends: str) -> str:
    """The name of the drafter's first tensor that ends so."""
    return next(name for name in sorted(read_words(folder)) if name.endswith(ends))


@pytest.mark.parametrize("name", FOLDERS)
def test_nothing_is_said_of_sound_drafters(tmp_path: Path, name: str) -> None:
    assert found(split(FOLDERS[name](tmp_path / "raw"), tmp_path / "drafter")) == []


def test_nothing_is_said_of_negative_gains_that_work(tmp_path: Path) -> None:
    """Seven of eight gains are negative, and every proposal is right."""
    glm4_moe_lite_copy.write_copy_pair(tmp_path / "raw")
    assert found(split(tmp_path / "raw", tmp_path / "drafter")) == []


def test_nothing_is_said_of_packed_drafters(made: Path) -> None:
    assert found(made / "packed") == []


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_nothing_is_said_of_floats_in_blocks(made: Path, tmp_path: Path, mode: str) -> None:
    bits, group = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}[mode]
    folder = split(made / "raw", tmp_path / "drafter", q_bits=bits, q_group_size=group, q_mode=mode)
    assert found(folder) == []
    scales = ending(folder, ".scales")
    # 255 is no number in E8M0; in E4M3, which nvfp4 has, 127 is none.
    bad = changed(folder, tmp_path / "bad", filled(scales, 0x7F if mode == "nvfp4" else 0xFF))
    assert ("DRAFTER-SCALES", "error", scales) in said(bad)


@pytest.mark.parametrize("word", [0x7FC0, 0x7F80, 0xFF80], ids=["NaN", "infinity", "minus infinity"])
@pytest.mark.parametrize("name", ["model.enorm.weight", MATRIX, "mlp.gate.weight"])
def test_one_number_that_is_none(made: Path, tmp_path: Path, name: str, word: int) -> None:
    full = ending(made / "plain", name.removeprefix("model."))

    def spoil(words: Array) -> Array:
        words = words.copy()
        words.flat[5] = word
        return words

    assert said(changed(made / "plain", tmp_path / "bad", altered(full, spoil))) == [
        ("DRAFTER-TENSOR-VALUES", "error", full)
    ]


@pytest.mark.parametrize("zero", [0, 0x8000], ids=["zero", "minus zero"])
@pytest.mark.parametrize("end", ["enorm.weight", "o_proj.weight", "eh_proj.weight"])
def test_nothing_but_zeros(made: Path, tmp_path: Path, end: str, zero: int) -> None:
    name = ending(made / "plain", end)
    assert said(changed(made / "plain", tmp_path / "bad", filled(name, zero))) == [
        ("DRAFTER-TENSOR-VALUES", "error", name)
    ]


@pytest.mark.parametrize(("word", "is_told"), [(0x4780, True), (0xC780, True), (0x477F, False)])
def test_a_gain_beyond_float16(made: Path, tmp_path: Path, word: int, is_told: bool) -> None:
    """In bfloat16 65,536 and its negative, and 65,280."""
    name = ending(made / "plain", "enorm.weight")

    def spoil(words: Array) -> Array:
        words = words.copy()
        words.flat[5] = word
        return words

    bad = changed(made / "plain", tmp_path / "bad", altered(name, spoil))
    assert (("DRAFTER-TENSOR-VALUES", "error", name) in said(bad)) == is_told


@pytest.mark.parametrize(("word", "is_told"), [(0, True), (0x8000, True), (0x4780, True), (0xBF80, False)])
def test_the_scalar_of_a_layer(tmp_path: Path, word: int, is_told: bool) -> None:
    folder, name = gemma4_assistant.write_drafter(tmp_path / "drafter"), "model.layers.0.layer_scalar"
    assert found(folder) == []
    edit_tensors(folder, filled(name, word))
    assert said(found(folder)) == ([("DRAFTER-TENSOR-VALUES", "error", name)] if is_told else [])


def test_one_number_all_over_a_matrix(made: Path, tmp_path: Path) -> None:
    name = ending(made / "plain", "o_proj.weight")
    assert said(changed(made / "plain", tmp_path / "bad", filled(name, 0x3C00))) == [
        ("DRAFTER-TENSOR-CONSTANT", "warning", name)
    ]


@pytest.mark.parametrize(("rows", "is_hole"), [(1, False), (16, True)])
@pytest.mark.parametrize("end", ["o_proj.weight", "embed_tokens.weight"])
def test_rows_of_zeros_are_padding_in_a_vocabulary_and_a_hole_elsewhere(
    made: Path, tmp_path: Path, end: str, rows: int, is_hole: bool
) -> None:
    name = ending(made / "plain", end)

    def cut(words: Array) -> Array:
        words = words.copy()
        words[-rows:] = 0
        return words

    expected = [("DRAFTER-TENSOR-HOLES", "warning", name)] if is_hole and end.startswith("o_proj") else []
    assert said(changed(made / "plain", tmp_path / "bad", altered(name, cut))) == expected


@pytest.mark.parametrize("place", range(4))
def test_a_hole_in_a_large_matrix_is_seen_wherever_it_lies(tmp_path: Path, place: int) -> None:
    raw = glm4_moe_lite.write_checkpoint(tmp_path / "raw", hidden=128, value=512)
    drafter = split(raw, tmp_path / "drafter")
    name = ending(drafter, "o_proj.weight")
    every = read_words(drafter)[name][0].shape[0]

    def cut(words: Array) -> Array:
        words = words.copy()
        words[place * every // 4 : (place + 1) * every // 4] = 0
        return words

    assert said(changed(drafter, tmp_path / "bad", altered(name, cut))) == [
        ("DRAFTER-TENSOR-HOLES", "warning", name)
    ]


def test_a_bias_of_zeros_is_sound(tmp_path: Path) -> None:
    drafter = split(glm4_moe.write_checkpoint(tmp_path / "raw", bias=True), tmp_path / "drafter")
    assert changed(drafter, tmp_path / "zero", filled(ending(drafter, "q_proj.bias"), 0)) == []


def test_several_at_once_are_one_finding(made: Path, tmp_path: Path) -> None:
    names = sorted(n for n, (words, _) in read_words(made / "plain").items() if words.ndim == 2)[:7]
    findings = changed(made / "plain", tmp_path / "bad", *(filled(name, 0) for name in names))
    assert [finding.found for finding in findings] == [7]
    assert "and 2 more" in findings[0].message


@pytest.mark.parametrize(
    ("word", "level"),
    [(0, "error"), (0x7FC0, "error"), (0x3C00, "warning")],
    ids=["zero", "NaN", "all one number"],
)
def test_scales_of_mlx_that_are_no_scales(made: Path, tmp_path: Path, word: int, level: str) -> None:
    name = ending(made / "packed", "o_proj.scales")
    assert said(changed(made / "packed", tmp_path / "bad", filled(name, word))) == [
        ("DRAFTER-SCALES", level, name)
    ]


@pytest.mark.parametrize(("end", "is_told"), [("o_proj.scales", False), ("switch_mlp.up_proj.scales", True)])
def test_a_few_scales_may_be_one_number_that_is_no_placeholder(
    made: Path, tmp_path: Path, end: str, is_told: bool
) -> None:
    name = ending(made / "packed", end)
    expected = [("DRAFTER-SCALES", "warning", name)] if is_told else []
    assert said(changed(made / "packed", tmp_path / "equal", filled(name, 0x3D12))) == expected


def test_a_scale_far_beyond_its_neighbours(made: Path, tmp_path: Path) -> None:
    name = ending(made / "packed", "o_proj.scales")

    def spoil(words: Array) -> Array:
        words = words.copy()
        words[3, 0] = bf16_bits(np.array([1e6]))[0]
        return words

    findings = changed(made / "packed", tmp_path / "bad", altered(name, spoil))
    assert said(findings) == [("DRAFTER-SCALES", "warning", name)]
    assert "their neighbours" in findings[0].message


def test_biases_that_are_not_finite_and_biases_of_zero(made: Path, tmp_path: Path) -> None:
    name = ending(made / "packed", "o_proj.biases")
    assert said(changed(made / "packed", tmp_path / "bad", filled(name, 0x7F80))) == [
        ("DRAFTER-SCALES", "error", name)
    ]
    assert changed(made / "packed", tmp_path / "zero", filled(name, 0)) == []


def test_packed_words_of_zeros(made: Path, tmp_path: Path) -> None:
    name = ending(made / "packed", "o_proj.weight")
    assert said(changed(made / "packed", tmp_path / "bad", filled(name, 0))) == [
        ("DRAFTER-TENSOR-VALUES", "error", name)
    ]


def fp8_head(folder: Path) -> Path:
    """A folder with the names of a drafter whose matrices are FP8 codes beside a grid of scales."""
    raw = qwen3_5.write_checkpoint(folder / "raw", fp8=True, hidden=256, dense=1024, heads=4)
    drafter = split(raw, folder / "drafter")
    fp8 = {name.removeprefix("mtp."): tensor for name, tensor in read_words(raw).items() if "mtp." in name}

    def put(tensors: Words) -> None:
        for name, tensor in fp8.items():
            if name in tensors and tensor[1] == "F8_E4M3":
                tensors[name] = tensor
                tensors[f"{name}_scale_inv"] = fp8[f"{name}_scale_inv"]

    edit_tensors(drafter, put)
    return drafter


def test_grids_of_fp8_scales(tmp_path: Path) -> None:
    drafter = fp8_head(tmp_path)
    assert found(drafter) == []
    scales, codes = (ending(drafter, f"mlp.up_proj.weight{end}") for end in ("_scale_inv", ""))
    for word, level in ((0, "error"), (0x7FC0, "error"), (0x3F80, "warning")):
        findings = changed(drafter, tmp_path / f"bad {word}", filled(scales, word))
        assert said(findings) == [("DRAFTER-SCALES", level, scales)]
    # 127 is no number in E4M3; 0 and 128 are both zero.
    for word in (0x7F, 0, 0x80):
        findings = changed(drafter, tmp_path / f"codes {word}", filled(codes, word))
        assert said(findings) == [("DRAFTER-TENSOR-VALUES", "error", codes)]


def fresh(start: int = 0x3F80) -> Change:
    """Norms as training finds them."""

    def change(tensors: Words) -> None:
        for name, (words, dtype) in tensors.items():
            if words.ndim == 1 and "norm" in name:
                tensors[name] = (np.full_like(words, start), dtype)

    return change


def trained(tensors: Words) -> None:
    """Rows of other sizes, as those of trained matrices have: by half or twice at most."""
    for name, (words, dtype) in tensors.items():
        if words.ndim > 1:
            factors = np.exp2(stream(1, name).random_sample((*words.shape[:-1], 1)) * 2 - 1)
            values = (words.astype("<u4") << 16).view("<f4") * factors
            tensors[name] = (bf16_bits(values), dtype)


@pytest.mark.parametrize(("drafter", "start"), [("plain", 0x3F80), ("gains", 0x3F80), ("centred", 0)])
def test_an_untrained_head_is_a_warning_and_nothing_else(
    made: Path, tmp_path: Path, drafter: str, start: int
) -> None:
    findings = changed(made / drafter, tmp_path / "fresh", fresh(start))
    assert [(finding.rule, finding.level) for finding in findings] == [("DRAFTER-UNTRAINED", "warning")]
    assert "norms hold" in findings[0].message


def test_norms_of_one_number_with_trained_matrices_are_not_untrained(made: Path, tmp_path: Path) -> None:
    assert changed(made / "plain", tmp_path / "trained", fresh(), trained) == []


def test_one_trained_matrix_is_enough(made: Path, tmp_path: Path) -> None:
    name = ending(made / "plain", "o_proj.weight")

    def train(tensors: Words) -> None:
        one = {name: tensors[name]}
        trained(one)
        tensors.update(one)

    assert changed(made / "plain", tmp_path / "trained", fresh(), train) == []


def test_zeros_are_no_start_where_the_gain_is_stored(made: Path, tmp_path: Path) -> None:
    rules = {finding.rule for finding in changed(made / "plain", tmp_path / "zero", fresh(0))}
    assert rules == {"DRAFTER-TENSOR-VALUES"}


@pytest.mark.parametrize("columns", [64, 576, 4096])
@pytest.mark.parametrize("rows", [32, 64])
@pytest.mark.parametrize("draw", ["normal", "uniform", "cut"])
def test_random_matrices_are_even(rows: int, columns: int, draw: str) -> None:
    random = np.random.RandomState(0)
    for _ in range(20):
        matrix = (
            random.standard_normal((rows, columns))
            if draw != "uniform"
            else random.random_sample((rows, columns)) - 0.5
        )
        if draw == "cut":
            matrix = np.clip(matrix, -2, 2)
        assert unevenness(matrix.astype(np.float32)) <= EVEN


def test_orthogonal_matrices_are_even_and_rows_of_other_sizes_not() -> None:
    random = np.random.RandomState(1)
    square, _ = np.linalg.qr(random.standard_normal((256, 256)))
    assert unevenness(square[:64].astype(np.float32)) < 0.1
    matrix = random.standard_normal((64, 576)) * np.exp2(random.random_sample((64, 1)))
    assert unevenness(matrix.astype(np.float32)) > 16 * EVEN
    assert unevenness(np.zeros((64, 64), np.float32)) == np.inf


def test_from_the_hub_the_same_is_found_in_few_requests(made: Path, tmp_path: Path) -> None:
    name = ending(made / "plain", "o_proj.weight")
    shutil.copytree(made / "plain", tmp_path / "bad")
    edit_tensors(tmp_path / "bad", filled(name, 0))
    checkpoint, storage = counted(tmp_path / "bad", remote=True)
    match = find_drafter(checkpoint)
    assert match is not None
    assert said(list(check_values(checkpoint, match.family, match.config))) == [
        ("DRAFTER-TENSOR-VALUES", "error", name)
    ]
    assert len(storage.reads) <= REMOTE_READS
