"""One safetensors file: read back by the safetensors library, and every byte written exactly once."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from draftpair.checkpoint import ITEM_BITS, read_header, writer
from draftpair.checkpoint.writer import Output, TensorFile, encode_header
from draftpair.errors import ToolError

OUTPUTS = (
    Output("b", "F16", (3, 5)),
    Output("a", "F32", (7,)),
    Output("c", "U8", (3,)),
    Output("ü", "I64", (2, 0)),
    Output("d", "F64", ()),
)


def data_of(output: Output) -> bytes:
    return random.Random(output.name).randbytes(output.nbytes)


def write_whole(path: Path, metadata: dict[str, str]) -> None:
    with TensorFile(path, OUTPUTS, metadata) as file:
        for output in OUTPUTS:
            file.write(output.name, 0, data_of(output))


def test_the_safetensors_library_reads_what_was_written(tmp_path: Path) -> None:
    write_whole(tmp_path / "x", {"format": "mlx", "z": "ä"})
    tensors = load_file(tmp_path / "x")
    assert {name: (tensor.shape, tensor.tobytes()) for name, tensor in tensors.items()} == {
        output.name: (output.shape, data_of(output)) for output in OUTPUTS
    }
    with safe_open(tmp_path / "x", framework="numpy") as file:
        assert file.metadata() == {"format": "mlx", "z": "ä"}


def test_our_own_parser_agrees_and_every_tensor_is_aligned(tmp_path: Path) -> None:
    write_whole(tmp_path / "x", {})
    header = read_header(tmp_path / "x")
    assert header.length % 8 == 0
    for output in OUTPUTS:
        info = header.tensors[output.name]
        assert (info.dtype, info.shape, info.nbytes) == (output.dtype, output.shape, output.nbytes)
        assert info.begin % (ITEM_BITS[info.dtype] // 8) == 0


def test_names_are_sorted_after_the_metadata_and_the_order_given_does_not_matter() -> None:
    header = encode_header(OUTPUTS, {"format": "mlx"})
    assert list(json.loads(header[8:])) == ["__metadata__", "a", "b", "c", "d", "ü"]
    assert header == encode_header(OUTPUTS[::-1], {"format": "mlx"})


def test_pieces_may_come_in_any_order_and_from_several_threads(tmp_path: Path) -> None:
    output = Output("x", "U8", (10_000,))
    data = data_of(output)
    places = list(range(0, 10_000, 77))
    random.Random(0).shuffle(places)
    with TensorFile(tmp_path / "x", [output], {}) as file, ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda begin: file.write("x", begin, data[begin : begin + 77]), places))
    assert load_file(tmp_path / "x")["x"].tobytes() == data


def write_pieces(path: Path, *pieces: tuple[int, bytes]) -> None:
    with TensorFile(path, [Output("x", "U8", (9,)), Output("y", "U8", (0,))], {}) as file:
        for offset, data in pieces:
            file.write("x", offset, data)


def test_a_byte_that_was_never_written_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="x: bytes 4 to 6 were never written"):
        write_pieces(tmp_path / "x", (0, b"abcd"), (6, b"efg"))


@pytest.mark.parametrize(("offset", "size"), [(0, 1), (3, 4), (2, 3), (8, 2), (9, 1)])
def test_a_byte_written_twice_or_past_the_end_is_noticed(tmp_path: Path, offset: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"x: bytes .* are written already or pass the end"):
        write_pieces(tmp_path / "x", (0, b"abcd"), (offset, bytes(size)))


def test_an_exception_closes_the_file_and_is_the_one_that_is_seen(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), TensorFile(tmp_path / "x", OUTPUTS, {}) as file:
        raise KeyboardInterrupt
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.write("a", 0, b"1234")


@pytest.mark.parametrize("target", ["there", "nowhere"])
def test_no_link_is_followed_and_no_file_is_overwritten(tmp_path: Path, target: str) -> None:
    (tmp_path / "there").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / target)
    for name in ("there", "link"):
        with pytest.raises(FileExistsError):
            TensorFile(tmp_path / name, OUTPUTS, {})
    assert (tmp_path / "there").read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("names", [("a", "a"), ("__metadata__",)])
def test_names_that_cannot_be_tensors_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="distinct"):
        encode_header([Output(name, "U8", (1,)) for name in names], {})


def test_closing_flushes_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[tuple[int, bytes]] = []

    def record(fd: int) -> None:
        flushed.append((os.fstat(fd).st_ino, (tmp_path / "x").read_bytes()))

    monkeypatch.setattr(os, "fsync", record)
    write_whole(tmp_path / "x", {})
    assert flushed == [((tmp_path / "x").stat().st_ino, (tmp_path / "x").read_bytes())]


Pwrite = Callable[[int, memoryview, int], int]


def flip_a_bit(pwrite: Pwrite, fd: int, view: memoryview, offset: int) -> int:
    damaged = bytearray(view)
    damaged[-1] ^= 1
    return pwrite(fd, memoryview(damaged), offset)


def lose(pwrite: Pwrite, fd: int, view: memoryview, offset: int) -> int:
    return len(view)


def misplace(pwrite: Pwrite, fd: int, view: memoryview, offset: int) -> int:
    return pwrite(fd, view, offset - 1)


@pytest.mark.parametrize("fault", [flip_a_bit, lose, misplace])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("size", [900, 1 << 20, (1 << 20) + 1, 3_000_000])
def test_a_piece_that_reads_back_differently_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., int], kind: type, size: int
) -> None:
    output = Output("x", "U8", (100 + size,))
    data = kind(random.Random(size).randbytes(size))
    file, pwrite = TensorFile(tmp_path / "f", [output], {}), os.pwrite
    try:
        monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: fault(pwrite, fd, view, offset))
        with pytest.raises(ToolError, match="f was not stored as it was written: x reads back differently"):
            file.write("x", 100, data)
    finally:
        file.abandon()


def test_a_header_that_reads_back_differently_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite

    def rename(fd: int, view: memoryview, offset: int) -> int:
        return pwrite(fd, memoryview(bytes(view).replace(b'"a"', b'"A"')), offset)

    monkeypatch.setattr(os, "pwrite", rename)
    with pytest.raises(ToolError, match="x was not stored as it was written: its header is another one"):
        TensorFile(tmp_path / "x", OUTPUTS, {})


def test_a_write_in_parts_is_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, view, offset: pwrite(fd, view[:5], offset))
    write_whole(tmp_path / "x", {})
    assert load_file(tmp_path / "x")["a"].tobytes() == data_of(OUTPUTS[1])


def test_the_flush_begins_while_writing_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    flushes: list[int] = []

    def slow(fd: int) -> None:
        flushes.append(threading.get_ident())
        begun.set()
        assert go_on.wait(10)

    monkeypatch.setattr(os, "fsync", slow)
    monkeypatch.setattr(writer, "FLUSH_BYTES", 1000)
    with TensorFile(tmp_path / "x", [Output("x", "U8", (5000,))], {}) as file:
        file.write("x", 0, bytes(999))
        assert not flushes
        file.write("x", 999, bytes(1))
        assert begun.wait(10)
        file.write("x", 1000, bytes(4000))  # one flush at a time: this one waits for the last
        assert len(flushes) == 1
        go_on.set()
    assert len(flushes) == 2
    assert flushes[0] != threading.get_ident() == flushes[1]


@pytest.mark.parametrize("pause", [0.001, 0], ids=["soon", "at the end at the latest"])
def test_a_flush_that_failed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: float) -> None:
    flushed: list[int] = []
    count = 1000 if pause else 1

    def fail_once(fd: int) -> None:
        flushed.append(fd)
        if len(flushed) == 1:
            raise OSError(5, "Input/output error")

    def write_bytewise(written: list[int]) -> None:
        with TensorFile(tmp_path / "x", [Output("x", "U8", (count,))], {}) as file:
            for place in range(count):
                file.write("x", place, b"a")
                written.append(place)
                time.sleep(pause)

    monkeypatch.setattr(os, "fsync", fail_once)
    monkeypatch.setattr(writer, "FLUSH_BYTES", 1)
    written: list[int] = []
    with pytest.raises(OSError, match="Input/output error"):
        write_bytewise(written)
    assert len(flushed) == 1
    assert len(written) < count or not pause


def test_the_file_has_its_full_size_from_the_start(tmp_path: Path) -> None:
    file = TensorFile(tmp_path / "x", OUTPUTS, {})
    try:
        assert os.stat(tmp_path / "x").st_size == file.size
    finally:
        file.abandon()
