"""A drafter's own embedding and output matrix beside the target's: copies, others, and what cannot be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair.checkpoint import ConfigView, open_checkpoint
from draftpair.families import family, load_families
from draftpair.validate.copies import REMOTE_ROWS, copies
from draftpair.validate.vocabulary import find_matrix
from fixtures import deepseek_v4, glm4_moe_lite, qwen3_5
from fixtures.counting import counted
from fixtures.split_heads import Words, edit_tensors, split
from fixtures.weights import write_json, write_safetensors

GLM = "glm4_moe_lite_mtp"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
WIDE = {"vocab": 8192, "hidden": 128}


def compared(target: Path, drafter: Path, name: str = GLM) -> dict[str, Any]:
    checkpoint = open_checkpoint(drafter)
    return copies(open_checkpoint(target), checkpoint, family(name), checkpoint.config)


def pair(folder: Path, **options: Any) -> tuple[Path, Path]:
    """A target and its drafter, whose two matrices are copies of the target's unless said otherwise."""
    made = {"own_head": False, **options}
    raw = glm4_moe_lite.write_checkpoint(folder / "raw", **made)
    return raw, split(raw, folder / "drafter")


def own_names(drafter: Path) -> tuple[str, str]:
    tensors = open_checkpoint(drafter).tensors
    embedding = next(name for name in tensors if name.endswith("embed_tokens.weight"))
    return embedding, next(name for name in tensors if name.endswith("head.weight"))


@pytest.mark.parametrize("sizes", [{}, WIDE], ids=["small", "large"])
def test_copies_are_equal_and_others_different(tmp_path: Path, sizes: dict[str, int]) -> None:
    found = compared(*pair(tmp_path, own_head=True, **sizes))
    rows = "64 of 8,192 rows compared" if sizes else None
    assert found["embedding"] == {"own": True, "relation": "equal", "detail": rows}
    assert (found["head"]["own"], found["head"]["relation"]) == (True, "different")
    assert "64 of 64 rows differ" in found["head"]["detail"]


def test_one_bit_of_a_small_matrix(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path)

    def flip(tensors: Words) -> None:
        words = tensors[own_names(drafter)[1]][0].copy()
        words[7, 3] ^= 1
        tensors[own_names(drafter)[1]] = words, "BF16"

    edit_tensors(drafter, flip)
    found = compared(target, drafter)
    assert found["embedding"]["relation"] == "equal"
    assert found["head"] == {"own": True, "relation": "different", "detail": "1 of 64 rows differ"}


def test_training_that_only_reached_the_first_ids_of_a_large_matrix(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path, **WIDE)

    def train(tensors: Words) -> None:
        words = tensors[own_names(drafter)[0]][0].copy()
        words[: WIDE["vocab"] // 16] ^= 1
        tensors[own_names(drafter)[0]] = words, "BF16"

    edit_tensors(drafter, train)
    found = compared(target, drafter)
    assert found["embedding"]["relation"] == "different"
    assert int(found["embedding"]["detail"].split()[0]) >= 32
    assert found["head"]["relation"] == "equal"


@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_another_dtype_of_the_same_numbers(tmp_path: Path, dtype: str) -> None:
    target, drafter = pair(tmp_path)

    def widen(tensors: Words) -> None:
        for name in own_names(drafter):
            values = (tensors[name][0].astype("<u4") << 16).view("<f4")
            words = values.view("<u4") if dtype == "F32" else values.astype("<f2").view("<u2")
            tensors[name] = (words, dtype)

    edit_tensors(drafter, widen)
    found = compared(target, drafter)
    assert [found[role]["relation"] for role in found] == ["equal", "equal"]
    assert found["head"]["detail"] == f"BF16 in the target and {dtype} in the drafter"


def test_numbers_that_another_dtype_shows_to_differ(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path)

    def shift(tensors: Words) -> None:
        name = own_names(drafter)[1]
        values = (tensors[name][0].astype("<u4") << 16).view("<f4") + np.float32(0.25)
        tensors[name] = (values.view("<u4"), "F32")

    edit_tensors(drafter, shift)
    assert compared(target, drafter)["head"]["relation"] == "different"


@pytest.mark.parametrize("more", ["target", "drafter"])
def test_rows_of_padding_on_one_side(tmp_path: Path, more: str) -> None:
    target, drafter = pair(tmp_path)
    folder = target if more == "target" else drafter
    name = HEAD if more == "target" else own_names(drafter)[1]

    def pad(tensors: Words) -> None:
        tensors[name] = (np.vstack([tensors[name][0], np.zeros((8, 64), "<u2")]), "BF16")

    edit_tensors(folder, pad)
    found = compared(target, drafter)["head"]
    assert found["relation"] == "equal"
    mine, theirs = (72, 64) if more == "target" else (64, 72)
    assert found["detail"] == f"{mine} rows in the target and {theirs} in the drafter"


def test_a_reduced_vocabulary_is_not_compared_row_by_row(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path)

    def reduce(tensors: Words) -> None:
        name = own_names(drafter)[1]
        tensors[name] = (tensors[name][0][::2].copy(), "BF16")
        tensors["d2t"] = (np.arange(32, dtype="<i8"), "I64")

    edit_tensors(drafter, reduce)
    found = compared(target, drafter)["head"]
    assert (found["own"], found["relation"]) == (True, "unknown")
    assert "32 rows are those of a vocabulary of its own" in found["detail"]


def test_another_width_is_another_matrix(tmp_path: Path) -> None:
    target, _ = pair(tmp_path / "one")
    _, drafter = pair(tmp_path / "other", hidden=128)
    found = compared(target, drafter)["embedding"]
    assert found["relation"] == "unknown"
    assert found["detail"] == "rows of 64 in the target and of 128 in the drafter: it is no copy"


def test_packed_on_one_side_is_unknown_with_the_reason(tmp_path: Path) -> None:
    raw = glm4_moe_lite.write_checkpoint(tmp_path / "raw")
    drafter = split(raw, tmp_path / "drafter", q_bits=4, q_group_size=32)
    found = compared(raw, drafter)["embedding"]
    assert (found["own"], found["relation"]) == (True, "unknown")
    assert (
        found["detail"]
        == "stored as BF16 in the target and as MLX affine 4 bits, groups of 32 in the drafter"
    )


def test_packed_alike_on_both_sides_is_compared(tmp_path: Path) -> None:
    raw = glm4_moe_lite.write_checkpoint(tmp_path / "raw", own_head=False)
    first = split(raw, tmp_path / "first", q_bits=4, q_group_size=32)
    second = split(raw, tmp_path / "second", q_bits=4, q_group_size=32)
    assert compared(first, second)["head"]["relation"] == "equal"
    name = own_names(second)[1].replace("weight", "scales")
    edit_tensors(second, lambda tensors: tensors.update({name: (tensors[name][0] ^ 1, tensors[name][1])}))
    assert compared(first, second)["head"]["relation"] == "different"
    assert compared(first, second)["embedding"]["relation"] == "equal"


def test_what_is_borrowed_is_not_its_own(tmp_path: Path) -> None:
    raw = qwen3_5.write_checkpoint(tmp_path / "raw")
    found = compared(raw, split(raw, tmp_path / "drafter"), "qwen3_5_mtp")
    assert found["head"] == found["embedding"] == {"own": False, "relation": "borrowed", "detail": None}


def test_a_target_without_an_output_matrix_has_it_tied(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path, own_head=False)
    edit_tensors(target, lambda tensors: tensors.pop(HEAD))
    found = compared(target, drafter)
    assert found["head"]["relation"] == "different"
    edit_tensors(target, lambda tensors: tensors.pop(EMBEDDING))
    found = compared(target, drafter)
    assert found["head"] == {"own": True, "relation": "unknown", "detail": "the target has no output matrix"}


def test_a_packing_that_is_not_understood_is_unknown(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path)
    edit_tensors(target, lambda tensors: tensors.update({HEAD: (np.zeros((64, 8), "u1"), "U8")}))
    found = compared(target, drafter)["head"]
    assert found["relation"] == "unknown"
    assert "cannot be read" in found["detail"]


def test_a_tied_drafter_is_compared_with_the_targets_output_matrix(tmp_path: Path) -> None:
    """A family that borrows nothing, and whose output matrix is its embedding."""
    target, drafter = pair(tmp_path)
    edit_tensors(drafter, lambda tensors: tensors.pop(own_names(drafter)[1]))
    checkpoint = open_checkpoint(drafter)
    record = next(f for f in load_families().values() if f.name == GLM)
    alone = type(record)(**{**vars(record), "rules": tuple(r for r in record.rules if not r.role)})
    object.__setattr__(alone, "drafter", _borrowing_nothing(record.drafter))
    found = copies(open_checkpoint(target), checkpoint, alone, checkpoint.config)
    assert found["embedding"]["relation"] == "equal"
    assert (found["head"]["own"], found["head"]["relation"]) == (True, "different")
    assert found["head"]["detail"].startswith("the drafter's is tied to its embedding")


def _borrowing_nothing(spec: Any) -> Any:
    return type(spec)(**{**vars(spec), "borrows": ()})


@pytest.mark.parametrize(
    ("names", "embedding", "head"),
    [
        (["model.embed_tokens.weight", "lm_head.weight"], 0, 1),
        (["model.language_model.embed_tokens.weight", "model.layers.3.embed_tokens.weight"], 0, None),
        (["language_model.model.embed_tokens.weight", "language_model.lm_head.weight"], 0, 1),
        (["embed.weight", "head.weight", "mtp.0.head.weight", "mtp.0.embed.weight"], 0, 1),
        (["backbone.embeddings.weight", "model.visual.embed.weight"], 0, None),
        (["layers.0.attention.output.weight", "output.weight", "tok_embeddings.weight"], 2, 1),
    ],
)
def test_where_targets_keep_them(
    tmp_path: Path, names: list[str], embedding: int | None, head: int | None
) -> None:
    write_safetensors(tmp_path / "model.safetensors", {name: (np.ones((4, 4)), "BF16") for name in names})
    write_json(tmp_path / "config.json", {})
    checkpoint = open_checkpoint(tmp_path)
    for role, place in (("embedding", embedding), ("head", head)):
        assert find_matrix(checkpoint, role) == (None if place is None else names[place])


def test_deepseek_v4_names_them_barely(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(deepseek_v4.write_checkpoint(tmp_path / "raw"))
    assert find_matrix(checkpoint, "embedding") == "embed.weight"
    assert find_matrix(checkpoint, "head") == "head.weight"


def test_few_requests_where_each_read_is_one(tmp_path: Path) -> None:
    target, drafter = pair(tmp_path, **WIDE)
    (mine, read), (theirs, also) = counted(target, remote=True), counted(drafter, remote=True)
    found = copies(mine, theirs, family(GLM), ConfigView(theirs.config.raw))
    assert found["head"]["detail"] == f"{REMOTE_ROWS} of 8,192 rows compared"
    assert len(read.reads) + len(also.reads) <= 4 * REMOTE_ROWS
