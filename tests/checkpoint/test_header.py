"""Each way in which a header can be wrong has its own message, and the message names file and tensor."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import re
import struct
import sys
import zipfile

import pytest

from draftpair.checkpoint import Header, HeaderError, TensorInfo, parse_header, read_header
from draftpair.checkpoint.header import MAX_HEADER_BYTES
from draftpair.errors import Refused, ToolError
from fixtures.safetensors_files import layout, pack, write_weights

NAME = "model-00001-of-00002.safetensors"


def parse(file: bytes, size: int | None = None) -> Header:
    return parse_header(file, len(file) if size is None else size, NAME)


def entry(dtype="F32", shape=(1,), offsets=(0, 4), **more) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def test_tensors_have_absolute_offsets_and_come_in_data_order():
    header = {"b": entry("BF16", (2, 3), (4, 16)), "a": entry(), "__metadata__": {"format": "mlx"}}
    file = pack(header, bytes(16))
    parsed = parse(file)
    start = len(file) - 16
    assert list(parsed.tensors) == ["a", "b"]
    assert parsed.tensors["b"] == TensorInfo("b", "BF16", (2, 3), NAME, start + 4, start + 16)
    assert parsed.tensors["b"].nbytes == 12
    assert parsed.metadata == {"format": "mlx"}
    assert parsed.length == start


@pytest.mark.parametrize("metadata", [{}, {"__metadata__": {}}, {"__metadata__": None}], ids=str)
def test_missing_metadata_is_fine(metadata):
    assert parse(pack({"a": entry(), **metadata}, bytes(4))).metadata == {}


def test_a_file_without_tensors_is_fine():
    assert parse(pack({})).tensors == {}


def test_padding_after_the_json_is_fine():
    text = json.dumps({"a": entry()}).encode() + b"     \n"
    assert list(parse(pack(text, bytes(4))).tensors) == ["a"]


def test_scalars_and_empty_tensors_are_fine():
    header = {
        "empty": entry(shape=(0, 7), offsets=(0, 0)),
        "scalar": entry(shape=(), offsets=(0, 4)),
        "last": entry(shape=(0,), offsets=(4, 4)),
    }
    assert set(parse(pack(header, bytes(4))).tensors) == set(header)


@pytest.mark.parametrize(
    ("dtype", "shape", "size"), [("F4", (4,), 2), ("F6_E2M3", (4,), 3), ("F6_E3M2", (2, 4), 6)]
)
def test_dtypes_below_a_byte(dtype, shape, size):
    assert parse(pack({"a": entry(dtype, shape, (0, size))}, bytes(size))).tensors["a"].nbytes == size


NOT_A_FRAME = [
    pytest.param(b"", "is empty", id="empty"),
    pytest.param(b"1234567", "is 7 bytes long, shorter than the 8-byte length field", id="7 bytes"),
    pytest.param(bytes(64), "states a header of 0 bytes", id="zeros"),
    pytest.param(
        struct.pack("<Q", 500) + b"{}", "states a header of 500 bytes but is only 10 bytes long", id="cut"
    ),
    pytest.param(struct.pack("<Q", 2**63) + b"{}", "more than the limit of 100,000,000", id="huge"),
    pytest.param(pack(b"\xff\xfe{}"), "byte 0 is not UTF-8", id="not UTF-8"),
    pytest.param(pack(b'{"a": [}'), "not JSON: expecting value at line 1 column 8", id="bad JSON"),
    pytest.param(pack(b"{} {}"), "not JSON: extra data at line 1 column 4", id="two texts"),
    pytest.param(pack(b"{}\0"), "not JSON: extra data", id="trailing NUL"),
    pytest.param(pack(b'\xef\xbb\xbf{"a":1}'), "not JSON", id="byte order mark"),
    pytest.param(pack(b'{"a\x01":1}'), "not JSON: invalid control character", id="control character"),
    pytest.param(pack(b"[" * 200_000), "nested too deeply", id="arrays 200,000 deep"),
    pytest.param(pack(b'{"a":' * 200_000), "nested too deeply", id="objects 200,000 deep"),
    pytest.param(pack(b'{"a":' + b"1" * 5000 + b"}"), "a number with thousands of digits", id="long number"),
    pytest.param(pack([]), "a JSON array, not an object", id="array"),
    pytest.param(pack("text"), "a JSON string, not an object", id="string"),
    pytest.param(pack(b"null"), "a JSON null, not an object", id="null"),
    pytest.param(pack(b"true"), "a JSON boolean, not an object", id="boolean"),
]


@pytest.mark.parametrize(("file", "problem"), NOT_A_FRAME)
def test_the_frame_is_wrong(file, problem):
    with pytest.raises(HeaderError) as caught:
        parse(file)
    assert problem in caught.value.message
    assert caught.value.message.startswith(NAME)


AMBIGUOUS = [
    pytest.param(b'{"a":1,"a":2}', "the key 'a' occurs twice in one object", id="tensor twice"),
    pytest.param(b'{"a":{"dtype":"F32","dtype":"F16"}}', "the key 'dtype' occurs twice", id="field twice"),
    pytest.param(b'{"__metadata__":{"k":"1","k":"2"}}', "the key 'k' occurs twice", id="metadata key twice"),
    pytest.param(b'{"a":NaN}', "NaN is not a JSON number", id="NaN"),
    pytest.param(b'{"a":-Infinity}', "-Infinity is not a JSON number", id="infinity"),
    pytest.param(b'{"\\ud800":{}}', "half of a surrogate pair", id="lone surrogate in a name"),
    pytest.param(
        b'{"__metadata__":{"k":"\\udfff"}}', "half of a surrogate pair", id="lone surrogate in a value"
    ),
]


@pytest.mark.parametrize(("text", "problem"), AMBIGUOUS)
def test_two_readers_could_differ(text, problem):
    with pytest.raises(HeaderError, match=re.escape(problem)):
        parse(pack(text))


METADATA = [
    pytest.param(["x"], "__metadata__ that is a JSON array, not an object", id="array"),
    pytest.param({"k": 1}, "__metadata__ that maps 'k' to a JSON number, not a string", id="number"),
    pytest.param({"k": None}, "__metadata__ that maps 'k' to a JSON null, not a string", id="null"),
    pytest.param({"k": {}}, "__metadata__ that maps 'k' to a JSON object, not a string", id="object"),
]


@pytest.mark.parametrize(("metadata", "problem"), METADATA)
def test_metadata_maps_strings_to_strings(metadata, problem):
    with pytest.raises(HeaderError, match=re.escape(problem)):
        parse(pack({"__metadata__": metadata}))


BAD_ENTRIES = [
    pytest.param(None, "is described by a JSON null, not an object", id="null"),
    pytest.param(["F32", [1], [0, 4]], "is described by a JSON array, not an object", id="array"),
    pytest.param({"dtype": "F32", "shape": [1]}, "lacks data_offsets", id="no offsets"),
    pytest.param({}, "lacks data_offsets, dtype, shape", id="no fields"),
    pytest.param(entry(strides=[1]), "has unknown fields: strides", id="unknown field"),
    pytest.param(entry("F32x"), "has the unknown dtype 'F32x'", id="dtype"),
    pytest.param(entry(7), "has the unknown dtype 7", id="dtype a number"),
    pytest.param(entry([]), "has the unknown dtype []", id="dtype a list"),
    pytest.param({**entry(), "shape": None}, "has shape None", id="shape null"),
    pytest.param({**entry(), "shape": {"0": 1}}, "has shape a JSON object", id="shape an object"),
    pytest.param(entry(shape=(True,)), "has shape [True]", id="shape boolean"),
    pytest.param(entry(shape=(1.0,)), "has shape [1.0]", id="shape float"),
    pytest.param(entry(shape=(-1,)), "has shape [-1]", id="shape negative"),
    pytest.param(entry(shape=("1",)), "has shape ['1']", id="shape text"),
    pytest.param(entry(shape=(2**64,)), "has shape [a number beyond 64 bits]", id="shape beyond 64 bits"),
    pytest.param(entry(shape=(2**32, 2**32)), "whose size overflows 64 bits", id="product overflows"),
    pytest.param(entry(shape=(2**62,)), "whose size overflows 64 bits", id="bytes overflow"),
    pytest.param(
        entry(shape=(2**63, 2, 0), offsets=(0, 0)), "whose size overflows 64 bits", id="before a zero"
    ),
    pytest.param({**entry(), "data_offsets": 4}, "has data_offsets 4", id="offsets a number"),
    pytest.param(entry(offsets=(0,)), "has data_offsets [0]", id="one offset"),
    pytest.param(entry(offsets=(0, 4, 8)), "has data_offsets [0, 4, 8]", id="three offsets"),
    pytest.param(entry(offsets=(-4, 0)), "has data_offsets [-4, 0]", id="negative offset"),
    pytest.param(entry(offsets=(False, 4)), "has data_offsets [False, 4]", id="boolean offset"),
    pytest.param(entry(offsets=(0, 2**65)), "[0, a number beyond 64 bits]", id="offset beyond 64 bits"),
    pytest.param(entry(offsets=(4, 0)), "has descending data_offsets [4, 0]", id="descending"),
    pytest.param(
        entry(shape=(2,)), "of F32 [2] needs 8 bytes, data_offsets give 4 bytes", id="too few bytes"
    ),
    pytest.param(
        entry("F4", (3,), (0, 2)), "of F4 [3] needs 12 bits, no whole number of bytes", id="half a byte"
    ),
    pytest.param(entry("F6_E2M3", (4,), (0, 4)), "needs 3 bytes, data_offsets give 4 bytes", id="6 bits"),
]


@pytest.mark.parametrize(("bad", "problem"), BAD_ENTRIES)
def test_an_entry_is_wrong(bad, problem):
    with pytest.raises(HeaderError) as caught:
        parse(pack({"layer.weight": bad}, bytes(4)))
    assert problem in caught.value.message
    assert caught.value.message.startswith(f"{NAME} is malformed: tensor 'layer.weight' ")


BAD_LAYOUTS = [
    pytest.param(
        {"a": entry(offsets=(4, 8))}, 8, "'a' leaves a gap of 4 bytes after the header", id="gap first"
    ),
    pytest.param(
        {"a": entry(), "b": entry(offsets=(6, 10))},
        10,
        "'b' leaves a gap of 2 bytes after tensor 'a'",
        id="gap",
    ),
    pytest.param(
        {"a": entry(), "b": entry(offsets=(2, 6))}, 6, "'b' overlaps tensor 'a' by 2 bytes", id="overlap"
    ),
    pytest.param(
        {"a": entry(), "b": entry()}, 4, "'b' overlaps tensor 'a' by 4 bytes", id="the same bytes twice"
    ),
    pytest.param(
        {"a": entry(shape=(2,), offsets=(0, 8)), "b": entry(shape=(0,), offsets=(4, 4))},
        8,
        "'b' overlaps tensor 'a' by 4 bytes",
        id="empty tensor inside another",
    ),
    pytest.param({"a": entry()}, 3, "'a' ends 1 byte past the end of the file", id="truncated"),
    pytest.param({"a": entry()}, 7, "has 3 surplus bytes after tensor 'a'", id="surplus"),
    pytest.param({}, 3, "has 3 surplus bytes after the header", id="surplus without tensors"),
]


@pytest.mark.parametrize(("header", "size", "problem"), BAD_LAYOUTS)
def test_the_data_is_not_covered_exactly(header, size, problem):
    with pytest.raises(HeaderError) as caught:
        parse(pack(header, bytes(size)))
    assert problem in caught.value.message
    assert NAME in caught.value.message


def zip_bytes() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", b"x" * 200)
    return buffer.getvalue()


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5124\n"
FOREIGN = [
    pytest.param(POINTER, "a Git LFS pointer", "git lfs pull", id="LFS pointer"),
    pytest.param(b"<!DOCTYPE html><title>401</title>", "a web page", "download it again", id="HTML"),
    pytest.param(b"\n  <html lang=en></html>", "a web page", "download it again", id="HTML after blanks"),
    pytest.param(b"<?xml version='1.0'?><Error/>", "a web page", "download it again", id="XML"),
    pytest.param(b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "a GGUF file", "safetensors", id="GGUF"),
    pytest.param(gzip.compress(b"x" * 100, mtime=0), "a gzip archive", "Unpack", id="gzip"),
    pytest.param(zip_bytes(), "a zip archive", "Convert", id="zip"),
    pytest.param(pickle.dumps({"weight": [1.0] * 9}, 4), "a Python pickle", "Convert", id="pickle"),
    pytest.param(b'{"weight_map": {}}', "a JSON text", "file that really holds", id="JSON"),
    pytest.param(b"<html>", "a web page", "download it again", id="shorter than the length field"),
]


@pytest.mark.parametrize(("file", "title", "hint"), FOREIGN)
def test_another_kind_of_file_is_named(file, title, hint):
    with pytest.raises(HeaderError) as caught:
        parse(file)
    assert caught.value.message.startswith(f"{NAME} is {title}")
    assert "not weights" in caught.value.message
    assert hint.lower() in caught.value.hint.lower()


@pytest.mark.parametrize("signature", [b"\x1f\x8b", b"\x80\x02"], ids=["gzip", "pickle"])
def test_a_valid_length_that_looks_like_a_signature_is_still_weights(signature):
    text = json.dumps({"a": entry()}).encode().ljust(int.from_bytes(signature, "little"))
    assert list(parse(pack(text, bytes(4))).tensors) == ["a"]


def test_a_header_at_the_limit_is_refused_only_beyond_it():
    with pytest.raises(HeaderError, match="more than the limit"):
        parse(struct.pack("<Q", MAX_HEADER_BYTES + 1), size=2**40)
    with pytest.raises(HeaderError, match="gave 8 of its 100,000,008 header bytes"):
        parse(struct.pack("<Q", MAX_HEADER_BYTES), size=2**40)


def test_nesting_does_not_depend_on_the_stack_that_is_left():
    def descend(depth: int) -> None:
        if depth:
            descend(depth - 1)
            return
        with pytest.raises(HeaderError):
            parse(pack(b"[" * 100_000))

    descend(sys.getrecursionlimit() // 3)


def test_tensor_names_survive_as_they_are():
    names = ["47", "model.layers.470.x", "model.layers.47.x", "1e5", "NaN", "null", "", "é\u0000\U0001f600"]
    tensors = dict.fromkeys(names, ("U8", (1,)))
    assert list(parse(pack(layout(tensors), bytes(len(names)))).tensors) == names


def test_a_hostile_name_stays_on_one_line_in_the_message():
    with pytest.raises(HeaderError) as caught:
        parse_header(pack({"a\nb\x1b[31m" + "x" * 5000: None}), 5100, "evil\n.safetensors")
    assert "\n" not in caught.value.message
    assert "\x1b" not in caught.value.message
    assert len(caught.value.message) < 400


def test_read_header_reads_a_header_longer_than_its_first_read(tmp_path):
    tensors = {f"model.layers.{layer}.weight": ("BF16", (2, 2)) for layer in range(3000)}
    write_weights(tmp_path / "w.safetensors", tensors)
    header = read_header(tmp_path / "w.safetensors")
    assert header.length > 100_000
    assert list(header.tensors) == list(tensors)
    assert header.tensors["model.layers.7.weight"].file == "w.safetensors"


def test_read_header_takes_another_name(tmp_path):
    write_weights(tmp_path / "blob", {"a": ("U8", (1,))})
    assert read_header(tmp_path / "blob", "model.safetensors").tensors["a"].file == "model.safetensors"


def test_an_unreadable_file_is_a_tool_error(tmp_path):
    with pytest.raises(ToolError, match=r"gone\.safetensors cannot be read: No such file") as caught:
        read_header(tmp_path / "gone.safetensors")
    assert not isinstance(caught.value, Refused)


def test_a_malformed_header_is_a_refusal():
    assert HeaderError("x").exit_code == 1


@pytest.mark.parametrize("length", [0, 5, 8, 40])
def test_a_file_cut_in_its_header_is_to_be_downloaded_again(length):
    whole = pack({"a": entry()}, bytes(4))
    with pytest.raises(HeaderError) as caught:
        parse(whole[:length])
    assert caught.value.hint == "Download the file again."
