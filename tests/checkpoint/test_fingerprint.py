"""What a fingerprint notices, and what it does not."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.checkpoint.dtypes import from_float32, to_float32
from draftpair.checkpoint.fingerprint import _header_line, _spread, fingerprint, forms, unwrapped
from draftpair.checkpoint.header import TensorInfo
from fixtures.glm4_moe_lite import write_checkpoint
from fixtures.weights import write_safetensors

ONES, MATRIX = np.ones(4, "<f4"), np.ones((4, 4), "<f4")


def short(values: np.ndarray) -> str:
    """The hash of a form, of bfloat16 numbers that are not very small."""
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


@pytest.fixture
def make(tmp_path: Path):
    def write(name: str, config: str = "{}", **tensors: tuple[np.ndarray, str]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
        named = {key.replace("__", "."): value for key, value in tensors.items()}
        write_safetensors(tmp_path / name / "model.safetensors", named)
        return open_checkpoint(tmp_path / name)

    return write


def test_it_follows_its_definition(make) -> None:
    found = fingerprint(make("one", a__norm__weight=(2 * ONES, "BF16"), w__weight=(MATRIX, "F32")))
    line = json.dumps(["a.norm.weight", [4]]).encode() + b"\n"
    headers = (
        json.dumps(["a.norm.weight", "BF16", [4]]) + "\n" + json.dumps(["w.weight", "F32", [4, 4]]) + "\n"
    )
    samples = json.dumps(["w.weight"]).encode() + b"\n" + 3 * MATRIX.tobytes()
    assert found == {
        "headers_sha256": hashlib.sha256(headers.encode()).hexdigest(),
        "norms_sha256": hashlib.sha256(line + (2 * ONES).tobytes()).hexdigest(),
        "norms": {"a.norm.weight": [short(2 * ONES), short(3 * ONES)]},
        "samples_sha256": hashlib.sha256(samples).hexdigest(),
        "config_sha256": hashlib.sha256(b"{}").hexdigest(),
    }


def test_norms_survive_a_conversion_of_the_matrices_and_of_the_dtype(make) -> None:
    one = fingerprint(make("one", a__norm__weight=(ONES, "BF16"), w__weight=(MATRIX, "BF16")))
    two = fingerprint(make("two", a__norm__weight=(ONES, "F32"), w__weight=(3 * MATRIX, "F32")))
    assert one["norms_sha256"] == two["norms_sha256"]
    assert one["headers_sha256"] != two["headers_sha256"]


def test_other_norms_are_noticed_and_those_of_the_head_left_out(make) -> None:
    one = make("one", a__norm__weight=(ONES, "BF16"), head__norm__weight=(ONES, "BF16"))
    two = make("two", a__norm__weight=(ONES, "BF16"), head__norm__weight=(2 * ONES, "BF16"))
    assert fingerprint(one)["norms_sha256"] != fingerprint(two)["norms_sha256"]
    assert fingerprint(one, ["head."])["norms_sha256"] == fingerprint(two, ["head."])["norms_sha256"]


def test_without_norms_there_is_no_hash(make) -> None:
    found = fingerprint(make("one", norm__weight=(MATRIX, "F32")))
    assert (found["norms_sha256"], found["norms"]) == (None, {})


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return to_float32(from_float32(values, dtype), dtype)


@pytest.mark.parametrize("seed", range(20))
def test_what_conversions_make_of_a_norm_has_its_forms(seed: int) -> None:
    """Casts of either form, the 1 added before or after them, on either side."""
    noise = np.random.RandomState(seed).standard_normal(4096).astype("<f4")
    raw = rounded(noise * np.float32(0.2), "BF16")
    raw[:64] *= np.float32(2.0**-16)  # of which float16 loses bits
    raw[64] = -0.0
    one = np.float32(1)
    gains = rounded(one + raw, "BF16")
    for made in (
        rounded(raw, "F16"),
        gains,
        rounded(gains, "F16"),
        one + raw,
        rounded(one + raw, "F16"),
        rounded(one + rounded(raw, "F16"), "F16"),
    ):
        assert forms(made)[0] in forms(raw), made
    changed = gains.copy()
    changed[100] += np.float32(2.0**-6)
    assert not set(forms(changed)[:1]) & set(forms(raw))
    assert not set(forms(raw)[:1]) & set(forms(changed))


def test_a_cast_of_float32_values_has_their_forms() -> None:
    values = np.random.RandomState(0).standard_normal(4096).astype("<f4")
    for dtype in ("BF16", "F16"):
        assert forms(rounded(values, dtype))[0] in forms(values)


def test_values_beyond_float16_have_forms() -> None:
    assert len(forms(np.array([1e5, 3e38, np.inf, np.nan], "<f4"))) == 2


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("model.language_model.layers.0.input_layernorm.weight", "layers.0.input_layernorm.weight"),
        ("language_model.model.layers.0.input_layernorm.weight", "layers.0.input_layernorm.weight"),
        ("layers.0.model.weight", "layers.0.model.weight"),
        ("language_model.model.norm.weight", "norm.weight"),
        ("language_model.mtp.", "mtp."),
        ("model.layers.47.", "layers.47."),
        ("model.visual.merger.norm.weight", "visual.merger.norm.weight"),
        ("model", "model"),
    ],
)
def test_a_name_without_what_is_wrapped_around_it(name: str, bare: str) -> None:
    assert unwrapped(name) == bare


def test_norms_that_would_share_a_name_keep_their_own(make) -> None:
    one = make("one", model__norm__weight=(ONES, "F32"), llm__norm__weight=(2 * ONES, "F32"))
    assert list(fingerprint(one)["norms"]) == ["llm.norm.weight", "model.norm.weight"]


def test_a_head_under_another_name_is_left_out(make) -> None:
    found = fingerprint(make("one", language_model__mtp__norm__weight=(ONES, "F32")), ["mtp."])
    assert found["norms"] == {}


@pytest.mark.parametrize("place", [0, 7, 15], ids=["first", "middle", "last"])
def test_a_changed_matrix_is_noticed_where_it_is_sampled(make, place: int) -> None:
    changed = MATRIX.copy()
    changed.flat[place] = 5
    one = fingerprint(make("one", a__norm__weight=(ONES, "F32"), w__weight=(MATRIX, "F32")))
    two = fingerprint(make("two", a__norm__weight=(ONES, "F32"), w__weight=(changed, "F32")))
    assert one["samples_sha256"] != two["samples_sha256"]
    assert one["norms_sha256"] == two["norms_sha256"]


def test_at_most_256_tensors_are_sampled_spread_over_all() -> None:
    names = [str(number) for number in range(9_703)]
    sampled = _spread(names)
    assert len(sampled) == 256
    assert (sampled[0], sampled[-1]) == ("0", "9702")
    assert len(set(sampled)) == 256
    assert _spread(names[:3]) == ["0", "1", "2"]
    assert _spread(names[:1]) == ["0"]
    assert _spread([]) == []


def test_a_checkpoint_with_a_missing_shard_has_no_norm_hash(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "raw", shards=3)
    (tmp_path / "raw" / "model-00001-of-00003.safetensors").unlink()
    found = fingerprint(open_checkpoint(tmp_path / "raw"))
    assert (found["norms_sha256"], found["samples_sha256"], found["norms"]) == (None, None, {})


@pytest.mark.parametrize(
    "name", ["a.b", 'a"b', "a\\b", "a\nb", "\u00e9", "\x7f", "", "a b", "model.layers.0.x"]
)
def test_a_line_of_the_headers_is_json_whatever_the_name(name: str) -> None:
    tensor = TensorInfo(name, "BF16", (2, 3), "model.safetensors", 8, 20)
    expected = json.dumps([name, "BF16", [2, 3]], ensure_ascii=False) + "\n"
    assert _header_line(tensor) == expected.encode()
