"""The weight map against the headers, both ways: one finding for each rule and file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftpair.checkpoint import Checkpoint, open_checkpoint
from draftpair.findings import Finding
from fixtures.safetensors_files import write_index, write_weights

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
U8 = ("U8", (4,))


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two shards of two tensors with a correct index."""
    (tmp_path / "config.json").write_text("{}")
    write_weights(tmp_path / FIRST, {"a": U8, "b": U8}, fill=1)
    write_weights(tmp_path / SECOND, {"c": U8, "d": U8}, fill=2)
    write_index(tmp_path, {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND}, total_size=16)
    return tmp_path


def only(folder: Path) -> Finding:
    """The one finding of a folder; it must be fit for a report."""
    findings = open_checkpoint(folder).findings
    assert len(findings) == 1, findings
    json.dumps(findings[0].as_dict(), allow_nan=False)
    return findings[0]


def rules(checkpoint: Checkpoint) -> dict[str, str]:
    return {finding.rule: finding.level for finding in checkpoint.findings}


def test_a_correct_index_has_no_findings(folder):
    checkpoint = open_checkpoint(folder)
    assert checkpoint.findings == ()
    assert list(checkpoint.tensors) == ["a", "b", "c", "d"]
    assert checkpoint.tensor_bytes == 16
    assert checkpoint.index.total_size == 16
    assert checkpoint.index.shards == [FIRST, SECOND]
    assert all(file.indexed for file in checkpoint.files.values())


def test_missing_shard(folder):
    (folder / SECOND).unlink()
    finding = only(folder)
    assert (finding.rule, finding.level) == ("INDEX-SHARD-MISSING", "error")
    assert "incomplete download: 1 of the 2 files" in finding.message
    assert SECOND in finding.message
    assert "hf download" in finding.hint


def test_no_shard_was_downloaded(folder):
    (folder / FIRST).unlink()
    (folder / SECOND).unlink()
    finding = only(folder)
    assert (finding.rule, finding.level) == ("INDEX-SHARD-MISSING", "error")
    assert "2 of the 2 files" in finding.message


def test_many_missing_shards_are_named_in_short(folder):
    names = [f"model-{number:05d}-of-00048.safetensors" for number in range(1, 49)]
    (folder / SECOND).unlink()
    (folder / FIRST).rename(folder / names[0])
    write_index(folder, {"a": names[0], "b": names[0], **{f"t{name}": name for name in names[1:]}})
    finding = only(folder)
    assert "47 of the 48 files" in finding.message
    assert "and 42 more" in finding.message


def test_stale_index(folder):
    (folder / FIRST).rename(folder / "weights-1.safetensors")
    (folder / SECOND).rename(folder / "weights-2.safetensors")
    write_index(folder, {"a": FIRST, "ghost": SECOND}, total_size=999)
    checkpoint = open_checkpoint(folder)
    finding = only(folder)
    assert (finding.rule, finding.level) == ("INDEX-STALE", "warning")
    assert "none of the 2 files" in finding.message
    assert "1 of its 2 tensors are in no file (ghost)" in finding.message
    assert "3 tensors here are unlisted" in finding.message
    assert "Rebuild" in finding.hint
    assert sorted(checkpoint.tensors) == ["a", "b", "c", "d"]


def test_stale_index_over_an_incomplete_set(folder):
    (folder / SECOND).unlink()
    write_index(folder, {"a": "old.safetensors"})
    assert rules(open_checkpoint(folder)) == {"INDEX-STALE": "warning", "INDEX-SHARD-MISSING": "error"}


def test_listed_but_in_no_file(folder):
    write_index(folder, {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND, "mtp.fc.weight": SECOND})
    finding = only(folder)
    assert (finding.rule, finding.level, finding.where) == ("INDEX-TENSOR-ABSENT", "error", SECOND)
    assert "mtp.fc.weight" in finding.message


def test_many_absent_tensors_are_one_finding_a_file(folder):
    ghosts = {f"ghost.{number}": SECOND for number in range(300)}
    write_index(folder, {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND, **ghosts})
    finding = only(folder)
    assert "places 300 tensors" in finding.message
    assert "and 295 more" in finding.message
    assert len(finding.message) < 500


def test_present_but_unlisted(folder):
    write_index(folder, {"a": FIRST, "c": SECOND, "d": SECOND}, total_size=16)
    finding = only(folder)
    assert (finding.rule, finding.level, finding.where) == ("INDEX-TENSOR-UNLISTED", "warning", FIRST)
    assert "holds 1 tensor " in finding.message
    assert finding.found == ["b"]


def test_listed_in_another_shard(folder):
    write_index(folder, {"a": FIRST, "b": SECOND, "c": SECOND, "d": SECOND})
    finding = only(folder)
    assert (finding.rule, finding.level, finding.where) == ("INDEX-TENSOR-ELSEWHERE", "error", SECOND)
    assert FIRST in finding.message
    assert open_checkpoint(folder).tensors["b"].file == FIRST


def test_the_three_reasons_for_a_tensor_that_cannot_be_had(folder):
    third = "model-00003-of-00003.safetensors"
    write_index(folder, {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND, "x": third, "y": SECOND})
    checkpoint = open_checkpoint(folder)
    assert rules(checkpoint) == {"INDEX-SHARD-MISSING": "error", "INDEX-TENSOR-ABSENT": "error"}
    assert "z" not in checkpoint.tensors


@pytest.mark.parametrize("name", ["mtp.safetensors", "mtp_grafted.safetensors", "model-mtp.safetensors"])
def test_side_file_outside_the_index(folder, name):
    write_weights(folder / name, {"mtp.fc.weight": U8})
    checkpoint = open_checkpoint(folder)
    finding = only(folder)
    assert (finding.rule, finding.level, finding.where) == ("FILE-UNINDEXED", "warning", name)
    assert "mtp.fc.weight" in finding.message
    assert checkpoint.tensors["mtp.fc.weight"].file == name
    assert not checkpoint.files[name].indexed


@pytest.mark.parametrize(
    "name",
    [
        "mtp.safetensors",
        "mtp_grafted.safetensors",
        "model.safetensors-00001-of-00001.safetensors",
        "head.weights",
    ],
)
def test_side_file_in_the_index(folder, name):
    write_weights(folder / name, {"mtp.fc.weight": U8})
    write_index(folder, {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND, "mtp.fc.weight": name})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.findings == ()
    assert checkpoint.files[name].indexed
    assert checkpoint.tensors["mtp.fc.weight"].file == name


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "a\\b",
        "C:x",
        "x\ny.safetensors",
        "x\0.safetensors",
        "..",
        ".",
        "",
    ],
    ids=repr,
)
def test_entries_that_leave_the_folder_are_not_followed(folder, shard):
    write_weights(folder.parent / "x.safetensors", {"outside": U8})
    (folder / "a").mkdir()
    write_weights(folder / "a" / "b.safetensors", {"outside": U8})
    write_index(folder, {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND, "outside": shard})
    checkpoint = open_checkpoint(folder)
    finding = only(folder)
    assert (finding.rule, finding.level) == ("INDEX-SHARD-PATH", "error")
    assert "outside" in finding.message
    assert "\0" not in finding.message
    assert "outside" not in checkpoint.tensors
    assert "outside" not in checkpoint.index.weight_map


def test_an_empty_file_name_can_be_seen(folder):
    write_index(folder, {"a": "", "b": FIRST, "c": SECOND, "d": SECOND})
    assert "places 1 tensor in '', which is no plain file name" in only(folder).message


@pytest.mark.parametrize("shard", [7, None, ["x"], {"file": "x"}, True], ids=repr)
def test_entries_that_are_no_file_name(folder, shard):
    write_index(folder, {"a": shard, "b": FIRST, "c": SECOND, "d": SECOND})
    finding = only(folder)
    assert (finding.rule, finding.found) == ("INDEX-SHARD-PATH", repr(shard))


def test_all_entries_refused(folder):
    write_index(folder, {"a": "../x", "b": "../x"})
    checkpoint = open_checkpoint(folder)
    assert rules(checkpoint) == {"INDEX-SHARD-PATH": "error", "FILE-UNINDEXED": "warning"}
    assert len(checkpoint.findings) == 3


def test_empty_weight_map(folder):
    write_index(folder, {})
    assert rules(open_checkpoint(folder)) == {"FILE-UNINDEXED": "warning"}


@pytest.mark.parametrize("metadata", [{}, {"total_size": None}, {"total_size": 16.0}, {"other": 1}], ids=str)
def test_total_size_may_be_missing_or_a_whole_float(folder, metadata):
    write_index(folder, {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND}, **metadata)
    assert open_checkpoint(folder).findings == ()


@pytest.mark.parametrize("metadata", [None, [], "x"], ids=repr)
def test_metadata_may_be_anything_else(folder, metadata):
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "metadata": metadata}))
    assert open_checkpoint(folder).findings == ()


def test_wrong_total_size(folder):
    write_index(folder, {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND}, total_size=15)
    finding = only(folder)
    assert (finding.rule, finding.level) == ("INDEX-TOTAL-SIZE", "warning")
    assert (finding.expected, finding.found) == (16, 15)


@pytest.mark.parametrize("value", ["16", -1, True, 1.5, [16]], ids=repr)
def test_total_size_that_is_no_number_of_bytes(folder, value):
    write_index(folder, {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND}, total_size=value)
    finding = only(folder)
    assert (finding.rule, finding.level) == ("INDEX-TOTAL-SIZE", "warning")
    assert open_checkpoint(folder).index.total_size is None


def test_total_size_leaves_side_files_out(folder):
    write_weights(folder / "mtp.safetensors", {"mtp.fc.weight": U8})
    assert rules(open_checkpoint(folder)) == {"FILE-UNINDEXED": "warning"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON: expecting property name"),
        ("[]", "is not a JSON object"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "is ambiguous: the key 'a' occurs twice"),
        ('{"weight_map": {}, "metadata": {"total_size": NaN}}', "is ambiguous: NaN"),
        ("[" * 50_000, "nested too deeply"),
    ],
    ids=["cut", "array", "key twice", "NaN", "nested"],
)
def test_an_index_that_cannot_be_parsed(folder, text, problem):
    (folder / "model.safetensors.index.json").write_text(text)
    finding = only(folder)
    assert (finding.rule, finding.level) == ("INDEX-PARSE", "error")
    assert problem in finding.message
    assert open_checkpoint(folder).index is None
    assert sorted(open_checkpoint(folder).tensors) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("text", ["{}", '{"weight_map": null}', '{"weight_map": ["a"]}'])
def test_an_index_without_a_weight_map(folder, text):
    (folder / "model.safetensors.index.json").write_text(text)
    assert only(folder).rule == "INDEX-NO-WEIGHT-MAP"


def test_tensor_names_that_look_like_numbers(folder):
    names = ["47", "model.layers.47.w", "model.layers.470.w", "model.layers.4.w", "0", "1e3", "null"]
    write_weights(folder / FIRST, dict.fromkeys(names, U8))
    write_index(folder, {**dict.fromkeys(names, FIRST), "c": SECOND, "d": SECOND})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.findings == ()
    assert set(checkpoint.tensors) == {*names, "c", "d"}


def test_the_same_tensor_in_two_files_and_the_index_decides(folder):
    write_weights(folder / "model.safetensors", {"a": ("U8", (2,)), "c": ("U8", (2,))})
    checkpoint = open_checkpoint(folder)
    assert rules(checkpoint) == {"TENSOR-DUPLICATE": "warning", "FILE-UNINDEXED": "warning"}
    assert checkpoint.tensors["a"].file == FIRST
    assert checkpoint.tensors["c"].file == SECOND
    assert checkpoint.tensor_bytes == 16


def test_the_index_decides_for_a_later_file(folder):
    write_weights(folder / SECOND, {"a": U8, "c": U8, "d": U8})
    write_index(folder, {"a": SECOND, "b": FIRST, "c": SECOND, "d": SECOND})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors["a"].file == SECOND
    assert rules(checkpoint)["TENSOR-DUPLICATE"] == "warning"


def test_the_same_tensor_in_two_files_and_nothing_decides(folder):
    (folder / "model.safetensors.index.json").unlink()
    write_weights(folder / SECOND, {"a": U8, "b": U8, "c": U8})
    checkpoint = open_checkpoint(folder)
    finding = only(folder)
    assert (finding.rule, finding.level, finding.where) == ("TENSOR-DUPLICATE", "error", SECOND)
    assert "both hold 2 tensors" in finding.message
    assert checkpoint.tensors["a"].file == FIRST


def test_single_file_and_shards_without_an_index(folder):
    (folder / "model.safetensors.index.json").unlink()
    write_weights(folder / "model.safetensors", {"a": U8, "b": U8, "c": U8, "d": U8})
    checkpoint = open_checkpoint(folder)
    assert rules(checkpoint) == {"TENSOR-DUPLICATE": "error", "FILE-UNINDEXED": "warning"}
    assert [name for name, file in checkpoint.files.items() if file.indexed] == ["model.safetensors"]


def test_side_file_beside_a_single_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    write_weights(tmp_path / "model.safetensors", {"a": U8})
    write_weights(tmp_path / "mtp.safetensors", {"mtp.fc.weight": U8})
    finding = only(tmp_path)
    assert (finding.rule, finding.where) == ("FILE-UNINDEXED", "mtp.safetensors")
    assert "mtp.fc.weight" in open_checkpoint(tmp_path).tensors


def test_shards_without_an_index_are_taken_whole(folder):
    (folder / "model.safetensors.index.json").unlink()
    checkpoint = open_checkpoint(folder)
    assert checkpoint.findings == ()
    assert all(file.indexed for file in checkpoint.files.values())


@pytest.mark.parametrize("kept", ["model-00001-of-00003.safetensors", "model-00000-of-00003.safetensors"])
def test_a_gap_in_the_numbering_without_an_index(tmp_path, kept):
    (tmp_path / "config.json").write_text("{}")
    write_weights(tmp_path / kept, {"a": U8})
    finding = only(tmp_path)
    assert (finding.rule, finding.level) == ("INDEX-SHARD-MISSING", "error")
    assert "promises 3 files, 2 of them are not here" in finding.message


def test_a_numbering_with_an_absurd_total_is_cheap(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    write_weights(tmp_path / "model-00001-of-999999999.safetensors", {"a": U8})
    assert "and 999,999,993 more" in only(tmp_path).message


def test_a_numbered_sibling_that_the_index_forgot(folder):
    write_index(folder, {"a": FIRST, "b": FIRST})
    finding = only(folder)
    assert (finding.rule, finding.where) == ("FILE-UNINDEXED", SECOND)


def test_a_numbered_sibling_that_index_and_folder_lack(folder):
    (folder / SECOND).unlink()
    write_index(folder, {"a": FIRST, "b": FIRST})
    finding = only(folder)
    assert finding.rule == "INDEX-SHARD-MISSING"
    assert SECOND in finding.message


def test_an_unparsable_shard_is_no_missing_shard(folder):
    (folder / SECOND).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    finding = only(folder)
    assert (finding.rule, finding.level, finding.where) == ("FILE-HEADER", "error", SECOND)
    assert "Git LFS pointer" in finding.message
    assert "git lfs pull" in finding.hint


def test_file_names_with_control_characters_stay_on_one_line(folder):
    name = "evil\n\x1b[31m.safetensors"
    write_weights(folder / name, {"a": U8, "e": U8})
    checkpoint = open_checkpoint(folder)
    assert rules(checkpoint) == {"TENSOR-DUPLICATE": "warning", "FILE-UNINDEXED": "warning"}
    assert all(finding.message.isprintable() for finding in checkpoint.findings)
    assert checkpoint.read(checkpoint.tensors["e"]) == bytes(4)
