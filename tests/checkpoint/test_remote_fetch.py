"""Fetching tensors ahead: just their bytes, kept where a broken-off run can go on, and gone when the work is done."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from draftpair.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from draftpair.checkpoint.hub import fetch, remote, spool, workers
from draftpair.checkpoint.hub.fetch import fetch_ranges
from draftpair.checkpoint.hub.spool import merged, open_spool, pieces, without
from draftpair.errors import Refused, ToolError
from fixtures.glm4_moe_lite import write_checkpoint
from fixtures.hub_server import Fault, HubServer, hub_server
from fixtures.safetensors_files import write_weights

PIECE = 20_000


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("fetch") / "raw", shards=4)


@pytest.fixture
def server(raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub with `owner/name`; pieces are small, pauses are short."""
    monkeypatch.setattr(workers, "PAUSE", 0.001)
    monkeypatch.setattr(fetch, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(fetch, "MAX_GAP", 0)
    with hub_server() as server, server.in_use(tmp_path / "home", monkeypatch):
        server.add("owner/name", raw)
        yield server


@pytest.fixture
def checkpoint(server: HubServer) -> Checkpoint:
    checkpoint = open_checkpoint("owner/name")
    server.forget()
    return checkpoint


def head(checkpoint: Checkpoint) -> list[TensorInfo]:
    return [tensor for tensor in checkpoint.tensors.values() if tensor.name.startswith("model.layers.3.")]


def size(tensors: list[TensorInfo]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def kept(tmp_path: Path) -> list[str]:
    """What lies in the folder of spools."""
    return sorted(path.name for path in (tmp_path / "home" / "assets").rglob("*") if path.is_file())


def same(checkpoint: Checkpoint, raw: Path) -> bool:
    here = open_checkpoint(raw)
    return all(checkpoint.read(tensor) == here.read(tensor) for tensor in head(here))


def test_just_the_bytes_of_the_tensors_are_fetched_and_then_read_from_the_disk(
    server: HubServer, checkpoint: Checkpoint, raw: Path, tmp_path: Path
) -> None:
    tensors = head(checkpoint)
    with fetch_ranges(checkpoint, tensors):
        assert sum(r.sent for r in server.requests if r.host == "storage") == size(tensors)
        assert all(0 < r.span[1] - r.span[0] <= PIECE for r in server.requests if r.span)
        server.forget()
        assert same(checkpoint, raw)
        assert checkpoint.read(tensors[0], 3, 8) == open_checkpoint(raw).read(tensors[0], 3, 8)
        assert server.requests == []
    assert kept(tmp_path) == []
    checkpoint.read(tensors[0], 0, 8)
    assert server.requests != []


def test_other_tensors_still_come_from_the_hub(server: HubServer, checkpoint: Checkpoint, raw: Path) -> None:
    with fetch_ranges(checkpoint, head(checkpoint)):
        server.forget()
        tensor = checkpoint.tensors["model.norm.weight"]
        assert checkpoint.read(tensor) == open_checkpoint(raw).read(tensor)
        assert len(server.requests) == 1


def test_neighbours_come_in_one_request_and_small_gaps_with_them(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "MAX_GAP", 100)
    monkeypatch.setattr(fetch, "PIECE_BYTES", 1000)
    folder = tmp_path / "gaps"
    folder.mkdir()
    sizes = {"a": 10, "b": 20, "small": 100, "c": 30, "large": 101, "d": 2500}
    write_weights(folder / "model.safetensors", {name: ("U8", (count,)) for name, count in sizes.items()})
    server.add("owner/gaps", folder)
    checkpoint = open_checkpoint("owner/gaps")
    server.forget()
    begin = {name: checkpoint.tensors[name].begin for name in sizes}
    with fetch_ranges(checkpoint, [checkpoint.tensors[name] for name in "dcba"]):
        asked = sorted(
            request.span for request in server.requests if request.host == "storage" and request.span
        )
    d = begin["d"]
    assert asked == [(begin["a"], begin["large"]), (d, d + 1000), (d + 1000, d + 2000), (d + 2000, d + 2500)]


def test_progress_counts_up_to_all_bytes(checkpoint: Checkpoint) -> None:
    calls: list[tuple[str, int, int]] = []
    tensors = head(checkpoint)
    with fetch_ranges(checkpoint, tensors, lambda *call: calls.append(call)):
        pass
    assert {(stage, total) for stage, _, total in calls} == {("fetch", size(tensors))}
    done = [done for _, done, _ in calls]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, size(tensors))


def test_a_folder_needs_no_fetching(raw: Path, server: HubServer, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(raw)
    with fetch_ranges(checkpoint, head(checkpoint), lambda *call: pytest.fail("nothing is to be fetched")):
        assert checkpoint.read(head(checkpoint)[0])
    assert server.requests == []
    assert kept(tmp_path) == []


def test_no_tensors_need_no_fetching(checkpoint: Checkpoint, server: HubServer) -> None:
    with fetch_ranges(checkpoint, []):
        assert server.requests == []


def test_what_is_cached_is_not_fetched(server: HubServer, raw: Path, tmp_path: Path) -> None:
    files = sorted({tensor.file for tensor in head(open_checkpoint(raw))})
    assert len(files) > 1
    snapshot = tmp_path / "home" / "hub" / "models--owner--name" / "snapshots" / server.repositories[0].commit
    snapshot.mkdir(parents=True)
    shutil.copy(raw / files[0], snapshot)
    checkpoint = open_checkpoint("owner/name")
    server.forget()
    with fetch_ranges(checkpoint, head(checkpoint)):
        assert same(checkpoint, raw)
    left = size([tensor for tensor in head(checkpoint) if tensor.file != files[0]])
    assert sum(r.sent for r in server.requests if r.host == "storage") == left


@pytest.mark.parametrize(
    "fault", [Fault(drop=7000), Fault(short=100), Fault(drop=0), Fault(status=503)], ids=repr
)
def test_trouble_that_passes_costs_no_byte_twice(
    server: HubServer, checkpoint: Checkpoint, raw: Path, fault: Fault
) -> None:
    server.misbehave("/storage/", fault, times=3)
    with fetch_ranges(checkpoint, head(checkpoint)):
        assert same(checkpoint, raw)
    sent = sum(r.sent for r in server.requests if r.host == "storage" and r.status == 206)
    assert sent == size(head(checkpoint))


# Runs that break off


def broken_off(server: HubServer, checkpoint: Checkpoint, after: int) -> ToolError:
    """The error of a run for which the storage host fails for good after some requests."""
    server.misbehave(
        "/storage/", *[Fault()] * after, *[Fault(status=503, headers={"Retry-After": "0"})] * 999
    )
    with pytest.raises(ToolError) as caught, fetch_ranges(checkpoint, head(checkpoint)):
        pytest.fail("not everything is there")
    server.forget()
    return caught.value


def test_a_run_that_broke_off_goes_on_where_it_was(
    server: HubServer, checkpoint: Checkpoint, raw: Path, tmp_path: Path
) -> None:
    total = size(head(checkpoint))
    error = broken_off(server, checkpoint, after=4)
    assert error.exit_code == 3
    [folder] = [path.parent for path in (tmp_path / "home").rglob("journal")]
    assert f"What was fetched is kept in {folder}; run again" in str(error.hint)
    calls: list[int] = []
    again = open_checkpoint("owner/name")
    server.forget()
    with fetch_ranges(again, head(again), lambda stage, done, of: calls.append(done)):
        assert same(again, raw)
    sent = sum(request.sent for request in server.requests if request.host == "storage")
    assert 0 < calls[0] == total - sent < total
    assert kept(tmp_path) == []


def test_a_run_that_got_nothing_leaves_nothing(
    server: HubServer, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    assert "is kept in" not in str(broken_off(server, checkpoint, after=0).hint)
    assert kept(tmp_path) == []


def journal_of(tmp_path: Path) -> Path:
    [journal] = (tmp_path / "home").rglob("journal")
    return journal


def _flip(journal: Path) -> None:
    """A piece whose bytes never came to the disk, as after a power cut."""
    entry = json.loads(journal.read_bytes().splitlines()[0])
    with (journal.parent / f"{entry['file']}.part").open("r+b") as file:
        file.seek(entry["begin"])
        file.write(bytes(100))


def _resize(journal: Path) -> None:
    first, *rest = journal.read_text().splitlines()
    entry = json.loads(first)
    journal.write_text("\n".join([json.dumps({**entry, "size": entry["size"] + 1}), *rest]) + "\n")


def _tear(journal: Path) -> None:
    first, *rest = journal.read_text().splitlines()
    journal.write_text("\n".join([*rest, first[: len(first) // 2]]))


def _garble(journal: Path) -> None:
    _, *rest = journal.read_text().splitlines()
    other = ["[]", "1", "{}", '{"file": 1}', "\xff", json.dumps({"file": "x", "size": "1"})]
    journal.write_text("\n".join([*other, *rest]))


def _lose(journal: Path) -> None:
    entry = json.loads(journal.read_bytes().splitlines()[0])
    (journal.parent / f"{entry['file']}.part").unlink()


@pytest.mark.parametrize("damage", [_flip, _resize, _tear, _garble, _lose])
def test_a_damaged_spool_is_used_as_far_as_it_is_good(
    server: HubServer, checkpoint: Checkpoint, raw: Path, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    broken_off(server, checkpoint, after=5)
    lines = [json.loads(line) for line in journal_of(tmp_path).read_bytes().splitlines()]
    assert len(lines) >= 3
    left = size(head(checkpoint)) - sum(line["end"] - line["begin"] for line in lines)
    damage(journal_of(tmp_path))
    with fetch_ranges(checkpoint, head(checkpoint)):
        assert same(checkpoint, raw)
    assert left < sum(r.sent for r in server.requests if r.host == "storage") <= size(head(checkpoint))
    assert kept(tmp_path) == []


def test_a_file_that_changed_between_the_runs_is_refused_and_nothing_of_it_is_kept(
    server: HubServer, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    broken_off(server, checkpoint, after=4)
    again = open_checkpoint("owner/name")
    journal = journal_of(tmp_path)
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert all(line["etag"] for line in lines)
    journal.write_text("".join(json.dumps({**line, "etag": "old"}) + "\n" for line in lines))
    with (
        pytest.raises(remote.Changed, match="changed while it was being read"),
        fetch_ranges(again, head(again)),
    ):
        pytest.fail("the files are not the same")
    assert kept(tmp_path) == []


@pytest.mark.parametrize("fault", [Fault(etag="other"), Fault(total=1)], ids=repr)
def test_a_file_that_changes_between_two_pieces_is_refused(
    server: HubServer, checkpoint: Checkpoint, tmp_path: Path, fault: Fault
) -> None:
    server.misbehave("/storage/", Fault(), Fault(), Fault(), fault)
    with pytest.raises(remote.Changed), fetch_ranges(checkpoint, head(checkpoint)):
        pytest.fail("the file is another")
    assert kept(tmp_path) == []


@pytest.mark.parametrize(
    ("error", "stays"), [(Refused("no"), False), (ToolError("disk full"), True), (KeyboardInterrupt(), True)]
)
def test_what_is_kept_when_the_work_with_the_tensors_fails(
    server: HubServer, checkpoint: Checkpoint, tmp_path: Path, error: BaseException, stays: bool
) -> None:
    with pytest.raises(type(error)), fetch_ranges(checkpoint, head(checkpoint)):
        raise error
    assert bool(kept(tmp_path)) == stays
    server.forget()
    with fetch_ranges(checkpoint, head(checkpoint)):
        assert (server.requests == []) == stays
    assert kept(tmp_path) == []


def test_an_interrupt_while_fetching_keeps_what_is_there(
    server: HubServer, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(stage: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), fetch_ranges(checkpoint, head(checkpoint), interrupt):
        pytest.fail("interrupted")
    assert "journal" in kept(tmp_path)


def test_two_runs_at_one_commit_do_not_meet(
    server: HubServer, checkpoint: Checkpoint, raw: Path, tmp_path: Path
) -> None:
    other = open_checkpoint("owner/name")
    with fetch_ranges(checkpoint, head(checkpoint)):
        with fetch_ranges(other, head(other)):
            assert len(list((tmp_path / "home").rglob("journal"))) == 2
            assert same(other, raw)
        assert same(checkpoint, raw)
    assert kept(tmp_path) == []


def test_a_spool_that_was_left_is_taken_before_a_new_one(tmp_path: Path) -> None:
    first, second = open_spool(tmp_path, {}), open_spool(tmp_path, {})
    assert (first.folder.name, second.folder.name) == ("0", "1")
    second.close()
    first.discard()
    again = open_spool(tmp_path, {})
    assert again.folder.name == "1"
    again.discard()


def test_too_many_runs_at_one_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "_MAX_SPOOLS", 2)
    running = [open_spool(tmp_path, {}) for _ in range(2)]
    with pytest.raises(ToolError, match="2 other runs are fetching into"):
        open_spool(tmp_path, {})
    for one in running:
        one.discard()


# The disk


def test_a_full_disk_is_told_and_what_is_there_is_kept(
    server: HubServer, checkpoint: Checkpoint, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, write = 50_000, os.pwrite

    def pwrite(file: int, data: bytes, offset: int) -> int:
        nonlocal left
        if len(data) > left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left -= len(data)
        return write(file, data, offset)

    monkeypatch.setattr(spool.os, "pwrite", pwrite)
    with pytest.raises(ToolError, match="cannot be used: No space left on device") as caught:  # noqa: SIM117
        with fetch_ranges(checkpoint, head(checkpoint)):
            pytest.fail("there is no room")
    assert ".part, where fetched bytes are kept" in caught.value.message
    assert "Make room" in str(caught.value.hint)
    monkeypatch.undo()
    assert "journal" in kept(tmp_path)


def test_too_little_room_is_told_before_anything_is_fetched(
    server: HubServer, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = size(head(checkpoint))
    usage = shutil.disk_usage(tmp_path)._replace(free=need - 1)
    monkeypatch.setattr(spool.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ToolError, match=rf"{need:,} bytes have to be fetched, .* has {need - 1:,} free"):  # noqa: SIM117
        with fetch_ranges(checkpoint, head(checkpoint)):
            pytest.fail("there is no room")
    assert server.requests == []
    assert kept(tmp_path) == []


def test_a_folder_that_cannot_be_made(server: HubServer, checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir(exist_ok=True)
    (tmp_path / "home" / "assets").write_text("a file")
    with pytest.raises(ToolError, match="no folder for the fetched bytes can be made") as caught:  # noqa: SIM117
        with fetch_ranges(checkpoint, head(checkpoint)):
            pytest.fail("there is no folder")
    assert "HF_ASSETS_CACHE" in str(caught.value.hint)


def test_no_link_is_followed_in_a_spool(server: HubServer, checkpoint: Checkpoint, tmp_path: Path) -> None:
    broken_off(server, checkpoint, after=4)
    journal, victim = journal_of(tmp_path), tmp_path / "victim"
    victim.write_bytes(b"precious")
    for part in journal.parent.glob("*.part"):
        part.unlink()
        part.symlink_to(victim)
    with pytest.raises(ToolError, match="cannot be used"), fetch_ranges(checkpoint, head(checkpoint)):
        pytest.fail("a link")
    assert victim.read_bytes() == b"precious"


# Spans


def test_spans_against_sets_of_bytes() -> None:
    chance = random.Random(0)

    def some(count: int) -> list[tuple[int, int]]:
        return [(begin, begin + chance.randrange(1, 9)) for begin in chance.sample(range(60), count)]

    def bytes_of(spans: object) -> set[int]:
        return {byte for begin, end in spans for byte in range(begin, end)}  # type: ignore[attr-defined]

    for _ in range(500):
        first, second = some(chance.randrange(6)), merged(some(chance.randrange(6)))
        joined = merged(first)
        assert bytes_of(joined) == bytes_of(first)
        assert all(a[1] < b[0] for a, b in pairwise(joined))
        assert all(b[0] - a[1] > 3 for a, b in pairwise(merged(first, 3)))
        left = list(without(joined, second))
        assert bytes_of(left) == bytes_of(first) - bytes_of(second)
        assert all(begin < end for begin, end in left)
        cut = list(pieces(joined, 4))
        assert bytes_of(cut) == bytes_of(first)
        assert all(0 < end - begin <= 4 for begin, end in cut)
