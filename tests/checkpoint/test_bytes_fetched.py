"""How much of a repository was read: counted where it arrives, and by the server that sent it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import snapshot_download

from draftpair import api
from draftpair.checkpoint import open_checkpoint
from draftpair.checkpoint.hub import workers
from draftpair.report.text import inspect_text
from fixtures.glm4_moe_lite import write_checkpoint
from fixtures.hub_server import Fault, HubServer, hub_server


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards, of a model large enough that their headers are next to nothing."""
    folder = tmp_path_factory.mktemp("large") / "raw"
    return write_checkpoint(folder, shards=4, layers=6, dense=4096, moe=2048, hidden=256)


@pytest.fixture
def server(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(workers, "PAUSE", 0.001)
    with hub_server() as server, server.in_use(tmp_path / "home", monkeypatch):
        server.add("owner/name", source)
        yield server


def sent(server: HubServer) -> int:
    """Bytes of files that the server sent: the list of the repository's files is none of them."""
    return sum(request.sent for request in server.requests if not request.path.startswith("/api/"))


def weights(source: Path) -> int:
    return sum(path.stat().st_size for path in source.glob("*.safetensors"))


def small(source: Path) -> int:
    return sum(path.stat().st_size for path in source.iterdir() if path.suffix != ".safetensors")


def test_to_open_a_repository_is_to_read_headers_and_two_small_files(server: HubServer, source: Path) -> None:
    checkpoint = open_checkpoint("owner/name")
    assert checkpoint.bytes_fetched == sent(server)
    names = ("config.json", "model.safetensors.index.json")
    read = sum((source / name).stat().st_size for name in names) + len(checkpoint.files) * 64 * 1024
    assert checkpoint.bytes_fetched == read


def test_inspect_and_validate_read_less_than_a_hundredth_of_the_weights(
    server: HubServer, source: Path
) -> None:
    report = api.inspect("owner/name")
    assert report["checkpoint"]["fetched_bytes"] == sent(server)
    assert sent(server) - small(source) < weights(source) // 100
    server.forget()
    api.validate("owner/name")
    assert 0 < sent(server) - small(source) < weights(source) // 100


def test_reading_on_is_counted(server: HubServer) -> None:
    checkpoint = open_checkpoint("owner/name")
    opened = checkpoint.bytes_fetched
    assert opened is not None
    tensor = checkpoint.tensors["model.norm.weight"]
    assert len(checkpoint.read(tensor)) == tensor.nbytes
    assert checkpoint.bytes_fetched == opened + tensor.nbytes == sent(server)


def test_a_connection_that_breaks_is_taken_up_and_no_byte_counted_twice(server: HubServer) -> None:
    open_checkpoint("owner/name")
    once, requests = sent(server), len(server.requests)
    server.forget()
    server.misbehave("/storage/", Fault(drop=1000))
    assert open_checkpoint("owner/name").bytes_fetched == once == sent(server)
    assert len(server.requests) > requests


def test_what_is_thrown_away_is_counted(server: HubServer) -> None:
    checkpoint = open_checkpoint("owner/name")
    opened = checkpoint.bytes_fetched or 0
    tensor = checkpoint.tensors["model.norm.weight"]
    server.misbehave("/storage/", Fault(whole=True))
    checkpoint.read(tensor)
    assert checkpoint.bytes_fetched is not None
    assert checkpoint.bytes_fetched - opened > tensor.begin


def test_a_folder_and_a_cached_repository_fetch_nothing(server: HubServer, source: Path) -> None:
    assert open_checkpoint(source).bytes_fetched is None
    snapshot_download("owner/name")
    assert open_checkpoint("owner/name").bytes_fetched is None


def test_the_text_says_how_much_was_read(server: HubServer) -> None:
    lines = list(inspect_text(api.inspect("owner/name")))
    (line,) = [line for line in lines if line.startswith("read ")]
    assert line.endswith(" from the Hub")
