"""20,000 headers from hypothesis and from seeded mutations: parsed, or HeaderError, and nothing else.

Each one is also given to the safetensors library. What we accept it accepts, with the same tensors; what
it accepts we accept, except for the deliberate differences listed here.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Iterator

import pytest
import safetensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftpair.checkpoint import ITEM_BITS, Header, HeaderError, parse_header
from fixtures.safetensors_files import data_size, layout, pack

GENERATED = 500
MUTATED = 19_500

STRICTER = (
    # Two readers may take different ones of two equal keys; the library takes the last.
    "occurs twice in one object",
    # The library passes over fields it does not know; a tensor that needs one would be misread.
    "has unknown fields",
    # serde also reads a struct from an array, and an enum from an object; no writer does that.
    "is described by a JSON array",
    "has the unknown dtype a JSON object",
)
"""Parts of our messages for files that the library takes and we refuse on purpose."""


def outcome(file: bytes) -> Header | HeaderError:
    try:
        return parse_header(file, len(file), "fuzzed.safetensors")
    except HeaderError as error:
        return error


def library(file: bytes) -> dict | None:
    """Name to (dtype, shape, data) as the library reads it, None when it refuses."""
    try:
        return {
            name: (info["dtype"], tuple(info["shape"]), bytes(info["data"]))
            for name, info in safetensors.deserialize(file)
        }
    except safetensors.SafetensorError:
        return None


def check(file: bytes) -> None:
    ours, theirs = outcome(file), library(file)
    if isinstance(ours, Header):
        # JSON says that -0 is zero; the library's reader makes a float of it.
        if theirs is None and b"-0" in file:
            return
        assert theirs == {
            name: (tensor.dtype, tensor.shape, file[tensor.begin : tensor.end])
            for name, tensor in ours.tensors.items()
        }
        return
    assert ours.message.startswith("fuzzed.safetensors ")
    assert "\n" not in ours.message
    assert len(ours.message) < 600
    assert theirs is None or any(reason in ours.message for reason in STRICTER), ours.message


numbers = st.one_of(st.integers(-2, 9), st.integers(-(2**66), 2**66), st.floats(), st.booleans(), st.none())
values = st.recursive(
    st.one_of(numbers, st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
shapes = st.lists(st.integers(0, 4), max_size=3) | st.lists(numbers, max_size=3) | values
offsets = st.lists(st.integers(0, 12), min_size=2, max_size=2) | values
entries = st.fixed_dictionaries(
    {"dtype": st.sampled_from(sorted(ITEM_BITS)) | values, "shape": shapes, "data_offsets": offsets},
    optional={"extra": values},
)
headers = st.dictionaries(st.text(max_size=4), entries | values, max_size=3) | st.dictionaries(
    st.just("__metadata__"), st.dictionaries(st.text(max_size=3), values, max_size=2)
)


@settings(
    max_examples=GENERATED,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
@given(headers | values, st.binary(max_size=16))
def test_generated_headers(header, data):
    check(pack(json.dumps(header).encode(), data))


def valid_files(rng: random.Random) -> Iterator[bytes]:
    """Endless valid files: a few small tensors of any dtype, with and without metadata."""
    dtypes = sorted(ITEM_BITS)
    while True:
        tensors = {
            f"model.layers.{number}.w": (rng.choice(dtypes), (8, *rng.choices(range(4), k=rng.randrange(3))))
            for number in range(rng.randrange(1, 4))
        }
        header = layout(tensors)
        data = rng.randbytes(data_size(header))
        if rng.random() < 0.5:
            header["__metadata__"] = {"format": "pt", "note": "é\n"}
        yield pack(json.dumps(header, ensure_ascii=rng.random() < 0.5).encode(), data)


def flip(rng: random.Random, file: bytearray) -> None:
    file[rng.randrange(len(file))] ^= 1 << rng.randrange(8)


def overwrite(rng: random.Random, file: bytearray) -> None:
    file[rng.randrange(len(file))] = rng.choice(b'{}[]":,0129-+.eEn\\u \x00\xff')


def insert(rng: random.Random, file: bytearray) -> None:
    at = rng.randrange(8, len(file))
    file[at:at] = rng.choice(
        [b"0", b"-", b"9" * 20, b"1e9", b"NaN", b"[", b'"a":', b"\\ud800", b"\xc3", b" "]
    )
    repair(rng, file)


def delete(rng: random.Random, file: bytearray) -> None:
    at = rng.randrange(len(file))
    del file[at : at + rng.randrange(1, 9)]
    repair(rng, file)


def repeat(rng: random.Random, file: bytearray) -> None:
    at = rng.randrange(8, len(file))
    file[at:at] = file[at : at + rng.randrange(1, 40)]
    repair(rng, file)


def cut(rng: random.Random, file: bytearray) -> None:
    del file[rng.randrange(len(file)) :]


def lengthen(rng: random.Random, file: bytearray) -> None:
    file += rng.randbytes(rng.randrange(1, 9))


def replace_number(rng: random.Random, file: bytearray) -> None:
    """Exchange one digit for a number that is a trap somewhere."""
    digits = [at for at in range(8, len(file)) if chr(file[at]).isascii() and chr(file[at]).isdigit()]
    if digits:
        at = rng.choice(digits)
        trap = rng.choice(
            [b"true", b"1.0", b"-1", b"00", b"4294967296", b"18446744073709551615", b"null", b"[]"]
        )
        file[at : at + 1] = trap
        repair(rng, file)


def repair(rng: random.Random, file: bytearray) -> None:
    """Mostly restore the length field after an edit, so that deeper checks are reached."""
    end = file.rfind(b"}") + 1
    if rng.random() < 0.8 and end > 8:
        file[:8] = struct.pack("<Q", end - 8)


MUTATIONS = [flip, overwrite, insert, delete, repeat, cut, lengthen, replace_number]


def test_mutated_headers():
    rng = random.Random(20_000)
    files = valid_files(rng)
    accepted = 0
    for _ in range(MUTATED):
        file = bytearray(next(files))
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            if len(file) > 9:
                rng.choice(MUTATIONS)(rng, file)
        check(bytes(file))
        accepted += isinstance(outcome(bytes(file)), Header)
    assert accepted > MUTATED // 50, "too few mutations stay valid to test the accepting side"


def test_unmutated_files_are_accepted():
    files = valid_files(random.Random(1))
    for _ in range(500):
        assert isinstance(outcome(next(files)), Header)


def test_the_one_file_that_only_we_accept():
    file = pack(b'{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}')
    assert isinstance(outcome(file), Header)
    assert library(file) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a":1,"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}', "occurs twice"),
        (b'{"__metadata__":{"k":"1","k":"2"}}', "occurs twice"),
        (b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"x":1}}', "unknown fields"),
        (b'{"a":["U8",[0],[0,0]]}', "JSON array"),
        (b'{"a":{"dtype":{"U8":null},"shape":[0],"data_offsets":[0,0]}}', "unknown dtype a JSON object"),
    ],
    ids=["tensor twice", "metadata twice", "unknown field", "entry as array", "dtype as object"],
)
def test_files_that_only_the_library_accepts(text, reason):
    refused = outcome(pack(text))
    assert isinstance(refused, HeaderError)
    assert reason in refused.message
