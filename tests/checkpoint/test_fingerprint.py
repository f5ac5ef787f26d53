"""What a fingerprint notices, and what it does not."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.checkpoint.fingerprint import _spread, fingerprint
from fixtures.glm4_moe_lite import write_checkpoint
from fixtures.weights import write_safetensors

ONES, MATRIX = np.ones(4, "<f4"), np.ones((4, 4), "<f4")


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
        "norms": 1,
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
    assert fingerprint(one, "head.")["norms_sha256"] == fingerprint(two, "head.")["norms_sha256"]


def test_without_norms_there_is_no_hash(make) -> None:
    found = fingerprint(make("one", norm__weight=(MATRIX, "F32")))
    assert (found["norms_sha256"], found["norms"]) == (None, 0)


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
    assert (found["norms_sha256"], found["samples_sha256"], found["norms"]) == (None, None, 0)
