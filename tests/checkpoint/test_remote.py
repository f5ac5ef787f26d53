"""Repositories read from a Hub on loopback: what is asked of it, who gets the token, and every way it can fail."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, snapshot_download

from draftpair.checkpoint import Checkpoint, open_checkpoint
from draftpair.checkpoint.hub import client, remote, workers
from draftpair.errors import Refused, ToolError, Usage
from fixtures.glm4_moe_lite import write_checkpoint
from fixtures.hub_server import Fault, HubServer, hub_server
from fixtures.safetensors_files import write_index, write_weights

TOKEN = "hf_notToBeShownToAnybody"
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("remote") / "raw", shards=3)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub without repositories; pauses between tries are short."""
    monkeypatch.setattr(workers, "PAUSE", 0.001)
    monkeypatch.chdir(tmp_path)
    with hub_server() as server, server.in_use(tmp_path / "home", monkeypatch):
        yield server


@pytest.fixture
def owner(server: HubServer, raw: Path) -> HubServer:
    """The Hub with `owner/name`."""
    server.add("owner/name", raw, branches=("main", "dev", "refs/pr/3"))
    return server


@pytest.fixture
def small(server: HubServer, tmp_path: Path) -> Callable[..., Path]:
    """Adds `owner/small` to the Hub, a weight file of 4,096 bytes of data and a config, and returns its folder."""

    def add(**options: Any) -> Path:
        folder = tmp_path / "small"
        folder.mkdir()
        write_weights(folder / "model.safetensors", {"a": ("U8", (4096,))}, fill=7)
        (folder / "config.json").write_text('{"model_type": "tiny"}')
        server.add("owner/small", folder, **options)
        return folder

    return add


def refusal(source: str) -> ToolError:
    """The error that opening gives; it never holds the token or a signed address."""
    with pytest.raises(ToolError) as caught:
        open_checkpoint(source)
    shown = f"{caught.value.message} {caught.value.hint}"
    assert TOKEN not in shown
    assert "signature" not in shown
    return caught.value


def spans(server: HubServer, host: str = "storage") -> list[tuple[int, int] | None]:
    return [request.span for request in server.requests if request.host == host]


def test_a_repository_is_what_its_folder_is(owner: HubServer, raw: Path) -> None:
    there, here = open_checkpoint("owner/name"), open_checkpoint(raw)
    assert there.revision == owner.repositories[0].commit
    assert (there.tensors, there.files, there.index) == (here.tensors, here.files, here.index)
    assert (there.config.raw, there.findings) == (here.config.raw, ())
    assert all(there.read(tensor) == here.read(tensor) for tensor in list(here.tensors.values())[::9])
    assert there.read_bytes("tokenizer.json") == (raw / "tokenizer.json").read_bytes()
    assert there.has_file("tokenizer.json")
    assert not there.has_file("tokenizer.model")
    assert there.place == f"owner/name@{there.revision}"
    assert there.shown("config.json") == f"owner/name@{there.revision}/config.json"


def test_opening_reads_config_index_and_the_start_of_each_weight_file(owner: HubServer, raw: Path) -> None:
    open_checkpoint("owner/name")
    asked = [re.sub(r".*/", "", request.path) for request in owner.requests if request.host == "hub"]
    shards = sorted(path.name for path in raw.glob("*.safetensors"))
    assert asked[:3] == ["name?blobs=true", "config.json", "model.safetensors.index.json"]
    assert sorted(asked[3:]) == shards
    assert spans(owner) == [(0, 65536)] * 3


def test_a_long_header_takes_one_more_request_for_just_the_rest(server: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    folder.mkdir()
    write_weights(folder / "model.safetensors", {f"tensor.{n:05}": ("U8", (64,)) for n in range(2000)})
    length = open_checkpoint(folder).files["model.safetensors"].header.length
    assert length > 100_000
    server.add("owner/wide", folder)
    assert len(open_checkpoint("owner/wide").tensors) == 2000
    assert spans(server) == [(0, 65536), (65536, length)]


@pytest.mark.parametrize("revision", [None, "main", "dev", "refs/pr/3", "commit"])
def test_a_revision_is_resolved_once_and_files_are_read_at_its_commit(
    owner: HubServer, revision: str | None
) -> None:
    commit = owner.repositories[0].commit
    checkpoint = open_checkpoint("owner/name", commit if revision == "commit" else revision)
    assert checkpoint.revision == commit
    listings = [request for request in owner.requests if request.path.startswith("/api/models/")]
    assert len(listings) == 1
    assert all(
        f"/resolve/{commit}/" in r.path for r in owner.requests if r.host == "hub" and r not in listings
    )


def test_two_revisions_are_two_checkpoints(
    owner: HubServer, small: Callable[..., Path], tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", seed=1)
    owner.add("owner/name", other, branches=("other",))
    first, second = open_checkpoint("owner/name"), open_checkpoint("owner/name@other")
    assert first.revision != second.revision
    assert not first.is_same_as(second)
    assert first.is_same_as(open_checkpoint("hf://owner/name@main"))
    small()
    assert not open_checkpoint("owner/small").is_same_as(open_checkpoint(tmp_path / "small"))


def test_files_in_folders_of_the_repository_are_not_looked_at(
    server: HubServer, small: Callable[..., Path]
) -> None:
    folder = small()
    (folder / "sub").mkdir()
    write_weights(folder / "sub" / "more.safetensors", {"b": ("U8", (4,))})
    assert list(open_checkpoint("owner/small").tensors) == ["a"]
    assert not open_checkpoint("owner/small").has_file("sub/more.safetensors")


def _truncated(folder: Path) -> None:
    path = folder / SHARD
    path.write_bytes(path.read_bytes()[:-5])


def _stale(folder: Path) -> None:
    write_index(folder, {"a": "other.safetensors"})


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": _truncated,
    "empty": lambda folder: (folder / SHARD).write_bytes(b""),
    "short": lambda folder: (folder / SHARD).write_bytes(b"abc"),
    "pickle": lambda folder: (folder / SHARD).write_bytes(b"PK\3\4" + bytes(100)),
    "shard missing": lambda folder: (folder / SHARD).unlink(),
    "stale index": _stale,
    "bad index": lambda folder: (folder / "model.safetensors.index.json").write_text("{"),
    "bad config": lambda folder: (folder / "config.json").write_text("["),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "unindexed": lambda folder: write_weights(folder / "mtp.safetensors", {"mtp.a": ("U8", (4,))}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_wrong_with_the_files_is_told_as_it_is_of_a_folder(
    server: HubServer, raw: Path, tmp_path: Path, damage: str
) -> None:
    folder = shutil.copytree(raw, tmp_path / "raw")
    DAMAGE[damage](folder)
    server.add("owner/name", folder)
    here, there = open_checkpoint(folder), open_checkpoint("owner/name")
    assert there.findings == here.findings != ()
    assert there.tensors == here.tensors


def test_a_repository_without_weights_or_config(server: HubServer, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "README.md").write_text("hello")
    server.add("owner/docs", folder)
    assert re.search(r"owner/docs has neither .* it holds README\.md", refusal("owner/docs").message)


@pytest.mark.parametrize(
    "text", ["./owner/name", "/owner/name", "~/owner/name", "owner/name/", "a/owner/name", "owner"]
)
def test_what_looks_like_a_path_never_becomes_a_request(owner: HubServer, text: str) -> None:
    with pytest.raises(ToolError, match="there is no file or folder"):
        open_checkpoint(text)
    assert owner.requests == []


def test_a_revision_of_a_path_never_becomes_a_request(owner: HubServer, raw: Path) -> None:
    with pytest.raises(Usage, match="is a path"):
        open_checkpoint(str(raw), "main")
    assert owner.requests == []


def test_a_folder_is_opened_without_what_the_hub_needs(raw: Path) -> None:
    code = f"import sys; from draftpair.checkpoint import open_checkpoint; open_checkpoint({str(raw)!r}); "
    code += "print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert "draftpair" in loaded
    assert not loaded & {"huggingface_hub", "httpx", "httpx2", "concurrent", "numpy"}


# Files and folders


def test_there_is_no_folder_to_be_had(owner: HubServer) -> None:
    checkpoint = open_checkpoint("owner/name@dev")
    with pytest.raises(
        ToolError, match="owner/name@dev is on the Hub, and this command needs all of its files"
    ) as caught:
        _ = checkpoint.root
    assert caught.value.hint == "Download it first: hf download owner/name --revision dev"
    assert caught.value.exit_code == 3


def test_names_that_are_no_plain_files_are_not_asked_for(owner: HubServer) -> None:
    checkpoint = open_checkpoint("owner/name")
    owner.forget()
    with pytest.raises(Refused, match="is no plain file name"):
        checkpoint.read_bytes("../secret")
    assert owner.requests == []


def test_a_small_file_is_fetched_once(owner: HubServer) -> None:
    checkpoint = open_checkpoint("owner/name")
    owner.forget()
    assert checkpoint.read_json("tokenizer_config.json") == checkpoint.read_json("tokenizer_config.json")
    checkpoint.read_bytes("config.json")
    assert len(owner.requests) == 1


def test_a_large_file_is_not_read_whole(owner: HubServer, raw: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint("owner/name")
    monkeypatch.setattr(remote, "MAX_WHOLE_BYTES", 1000)
    size = (raw / "tokenizer.json").stat().st_size
    with pytest.raises(ToolError, match=rf"tokenizer\.json has {size:,} bytes; at most 1,000") as caught:
        checkpoint.read_bytes("tokenizer.json")
    assert caught.value.hint == "Download the repository: hf download owner/name"


def test_many_ranges_come_in_order_and_several_at_once(owner: HubServer, raw: Path) -> None:
    there, here = open_checkpoint("owner/name"), open_checkpoint(raw)
    ranges = [(tensor, 3, 7) for tensor in there.tensors.values()]
    owner.misbehave("/storage/", Fault(stall=0.05), times=16)
    most = 0
    for data, wanted in zip(there.read_each(ranges), ranges, strict=True):
        assert data == here.read(*wanted)
        most = max(most, sum(thread.name.startswith("ThreadPool") for thread in threading.enumerate()))
    assert most == remote.READERS


def test_a_storage_address_is_used_again(owner: HubServer) -> None:
    checkpoint = open_checkpoint("owner/name")
    owner.forget()
    for tensor in checkpoint.tensors.values():
        checkpoint.read(tensor, 0, 1)
    assert {request.host for request in owner.requests} == {"storage"}


def test_an_expired_storage_address_is_asked_for_again(owner: HubServer, raw: Path) -> None:
    checkpoint, here = open_checkpoint("owner/name"), open_checkpoint(raw)
    owner.forget()
    owner.misbehave("/storage/", Fault(status=403))
    tensor = checkpoint.tensors["model.norm.weight"]
    assert checkpoint.read(tensor) == here.read(tensor)
    assert [(request.host, request.status) for request in owner.requests] == [
        ("storage", 403),
        ("hub", 302),
        ("storage", 206),
    ]


# The token


def _by_variable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def _stored(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.mkdir(exist_ok=True)
    (home / "token").write_text(TOKEN)


@pytest.mark.parametrize("give", [_by_variable, _stored])
def test_the_token_goes_to_the_hub_and_nowhere_else(
    server: HubServer, raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, give: Callable[..., None]
) -> None:
    give(tmp_path / "home", monkeypatch)
    server.tokens.add(TOKEN)
    server.add("owner/name", raw, closed="private")
    checkpoint = open_checkpoint("owner/name")
    checkpoint.read(checkpoint.tensors["model.norm.weight"])
    sent = {request.host: request.headers.get("authorization") for request in server.requests}
    assert sent == {"hub": f"Bearer {TOKEN}", "storage": None}
    assert {r.headers.get("authorization") for r in server.requests if r.host == "storage"} == {None}


@pytest.mark.parametrize("where", ["/resolve/", "/api/"])
def test_no_redirect_takes_the_token_elsewhere(
    owner: HubServer, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    owner.tokens.add(TOKEN)
    away = Fault(status=307, headers={"Location": f"{owner.storage}/caught"})
    owner.misbehave(where, away, times=9)
    refusal("owner/name")
    caught = [request for request in owner.requests if request.host == "storage"]
    assert caught
    assert not any("authorization" in request.headers or TOKEN in str(request) for request in caught)


def test_a_redirect_on_the_hub_keeps_the_token(owner: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a repository got another name."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    owner.tokens.add(TOKEN)
    commit = owner.repositories[0].commit
    moved = Fault(status=307, headers={"Location": f"/owner/name/resolve/{commit}/config.json?again"})
    owner.misbehave("config.json", moved)
    assert open_checkpoint("owner/name").config.model_type == "glm4_moe_lite"
    asked = [request for request in owner.requests if "config.json" in request.path]
    assert [request.status for request in asked] == [307, 206]
    assert {request.headers["authorization"] for request in asked} == {f"Bearer {TOKEN}"}


@pytest.mark.parametrize("target", ["file:///etc/passwd", "ftp://127.0.0.1/x"])
def test_a_redirect_that_is_no_web_address_is_not_followed(owner: HubServer, target: str) -> None:
    owner.misbehave("config.json", Fault(status=302, headers={"Location": target}))
    assert "not safe to follow" in refusal("owner/name").message


def test_from_https_no_redirect_leads_to_http(server: HubServer) -> None:
    target = client.Hub()._target
    assert target("https://hub/a", "/b") == "https://hub/b"
    with pytest.raises(ToolError, match="not safe to follow"):
        target("https://hub/a", "http://storage/b")


def test_redirects_in_circles_end(owner: HubServer) -> None:
    commit = owner.repositories[0].commit
    again = Fault(status=302, headers={"Location": f"/owner/name/resolve/{commit}/config.json"})
    owner.misbehave("config.json", again, times=99)
    assert "in circles" in refusal("owner/name").message
    assert len(owner.requests) < 20


def test_a_token_that_cannot_be_sent(owner: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN + "\u2026")
    error = refusal("owner/name")
    assert "token for the Hub cannot be used: it holds characters that no token has" in error.message
    assert "hf auth login" in str(error.hint)


def test_a_token_file_that_cannot_be_read(owner: HubServer, tmp_path: Path) -> None:
    (tmp_path / "home" / "token").mkdir(parents=True)
    assert "token for the Hub cannot be used" in refusal("owner/name").message


# No access


def test_a_repository_that_is_not_there(owner: HubServer) -> None:
    error = refusal("owner/typo")
    host = owner.endpoint.removeprefix("http://")
    assert error.message == (
        f"owner/typo is no path here, and {host} has no repository owner/typo that is open to everyone"
    )
    assert "HF_TOKEN" in str(error.hint)
    assert "hf auth login" in str(error.hint)
    assert error.exit_code == 3
    assert len(owner.requests) == 1


def test_a_repository_that_is_not_there_for_somebody_with_a_token(
    owner: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    owner.tokens.add(TOKEN)
    error = refusal("owner/typo")
    assert "no repository owner/typo that the token of this machine may read" in error.message
    assert "hf auth whoami" in str(error.hint)


def test_a_token_that_the_hub_does_not_know(owner: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    error = refusal("owner/name")
    assert "refuses access to owner/name (401)" in error.message
    assert "hf auth whoami" in str(error.hint)


def test_a_gated_repository(server: HubServer, raw: Path) -> None:
    server.add("owner/name", raw, closed="gated")
    error = refusal("owner/name")
    assert "owner/name is gated, and access was refused (401)" in error.message
    assert f"Accept its terms at {server.endpoint}/owner/name" in str(error.hint)
    assert "hf auth login" in str(error.hint)
    assert error.exit_code == 3


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(status=403, code="GatedRepo"), "owner/name is gated, and access was refused (403)"),
        (Fault(status=403), "refuses access to config.json of owner/name (403)"),
        (Fault(status=404, code="EntryNotFound"), "lists config.json of owner/name and does not have it"),
        (
            Fault(status=403, headers={"X-Error-Message": "Access to this resource is disabled."}),
            "is disabled on",
        ),
        (Fault(status=404), "answered 404 for config.json of owner/name"),
        (Fault(status=401), "refuses access to config.json of owner/name (401)"),
        (Fault(status=418), "answered 418 for config.json of owner/name"),
    ],
)
def test_a_file_that_is_refused_is_asked_for_once(owner: HubServer, fault: Fault, said: str) -> None:
    owner.misbehave("config.json", fault, times=9)
    assert said in refusal("owner/name").message
    assert len([request for request in owner.requests if "config.json" in request.path]) == 1


def test_a_revision_that_is_not_there(owner: HubServer) -> None:
    error = refusal("owner/name@v9")
    assert error.message.endswith("has no revision 'v9'")
    assert "a branch, a tag or a commit" in str(error.hint)


@pytest.mark.parametrize(
    ("status", "said"),
    [(404, "has no repository owner/name"), (400, "answered 400 for owner/name"), (403, "(403)")],
)
def test_a_list_of_files_that_is_refused(owner: HubServer, status: int, said: str) -> None:
    owner.misbehave("/api/", Fault(status=status), times=9)
    assert said in refusal("owner/name").message
    assert len(owner.requests) == 1


def test_a_name_that_no_repository_can_have(server: HubServer) -> None:
    assert "is no name that a repository can have" in refusal(f"owner/{'n' * 100}").message
    assert server.requests == []


# Trouble that passes, and trouble that stays


PASSING = [
    Fault(status=429, headers={"Retry-After": "0"}),
    Fault(status=503, headers={"Retry-After": "0"}),
    Fault(status=500),
    Fault(status=408),
    Fault(drop=0),
    Fault(drop=100),
]


@pytest.mark.parametrize("where", ["/api/", "config.json", "/resolve/", "/storage/"])
@pytest.mark.parametrize("fault", PASSING, ids=repr)
def test_trouble_that_passes_is_not_seen(owner: HubServer, raw: Path, where: str, fault: Fault) -> None:
    owner.misbehave(where, fault, times=2)
    assert open_checkpoint("owner/name").tensors == open_checkpoint(raw).tensors


def test_a_broken_connection_is_taken_up_where_it_broke(owner: HubServer, raw: Path) -> None:
    there, here = open_checkpoint("owner/name"), open_checkpoint(raw)
    tensor = there.tensors["model.layers.3.eh_proj.weight"]
    owner.forget()
    owner.misbehave("/storage/", Fault(drop=1000), Fault(short=5000), Fault(drop=1))
    assert there.read(tensor) == here.read(tensor)
    begin, end = tensor.begin, tensor.end
    sent = [request.sent for request in owner.requests if request.host == "storage"]
    assert sum(sent) == end - begin
    assert spans(owner) == [(begin + sum(sent[:n]), end) for n in range(4)]


def test_failures_are_counted_anew_after_progress(owner: HubServer, raw: Path) -> None:
    there = open_checkpoint("owner/name")
    tensor = there.tensors["model.layers.3.eh_proj.weight"]
    owner.misbehave("/storage/", Fault(drop=10), times=3 * remote.TRIES)
    assert there.read(tensor) == open_checkpoint(raw).read(tensor)


@pytest.mark.parametrize(
    ("fault", "said", "hint"),
    [
        (
            Fault(status=429),
            "refuses more requests for now (429), at config.json of owner/name",
            "few minutes; with a",
        ),
        (Fault(status=503), "answered 503 for config.json of owner/name", "Try again later"),
        (Fault(drop=0), "the connection to 127.0.0.1", "HF_ENDPOINT"),
        (Fault(drop=1), "/config.json ended ", "None"),
    ],
)
def test_trouble_that_stays_is_told(owner: HubServer, fault: Fault, said: str, hint: str) -> None:
    if fault.drop == 1:
        # Each byte that arrives is progress, so that this cannot go on for ever.
        owner.misbehave("config.json", fault)
        fault = Fault(body=b"")
    owner.misbehave("config.json", fault, times=99)
    error = refusal("owner/name")
    assert said in error.message
    assert hint in str(error.hint)
    assert error.exit_code == 3
    assert len([request for request in owner.requests if "config.json" in request.path]) == remote.TRIES


def test_a_storage_host_that_refuses_for_good_is_told_apart_from_the_hub(owner: HubServer) -> None:
    owner.misbehave("/storage/", Fault(status=403), times=99)
    host = owner.storage.removeprefix("http://")
    assert re.search(
        rf"{host}, which stores model-0000\d-of-00003\.safetensors of owner/name, answered 403",
        refusal("owner/name").message,
    )


class Clock:
    """Takes down how long it would have been waited."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        return False

    def is_set(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("header", "waits"),
    [
        ({}, [0.5, 1, 2, 4]),
        ({"Retry-After": "7"}, [7] * 4),
        ({"Retry-After": "86400"}, [60] * 4),
        ({"Retry-After": "soon"}, [0.5, 1, 2, 4]),
        ({"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}, [0] * 4),
        ({"Retry-After": "Wed, 21 Oct 2099 07:28:00 GMT"}, [60] * 4),
        ({"RateLimit": '"resolvers";r=0;t=33'}, [33] * 4),
        ({"RateLimit": '"resolvers";r=5;t=33'}, [0.5, 1, 2, 4]),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
def test_how_long_is_waited(
    owner: HubServer, monkeypatch: pytest.MonkeyPatch, header: dict[str, str], waits: list[float], status: int
) -> None:
    clock = Clock()
    monkeypatch.setattr(workers, "PAUSE", 0.5)
    monkeypatch.setattr(workers, "stop_of_thread", lambda: clock)
    owner.misbehave("config.json", Fault(status=status, headers=header), times=99)
    refusal("owner/name")
    assert clock.waits == waits


def test_a_hub_that_cannot_be_reached(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        port = nobody.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    error = refusal("owner/name")
    assert error.message.startswith(f"127.0.0.1:{port} cannot be reached: ")
    assert "refused" in error.message
    assert "HF_HUB_OFFLINE=1" in str(error.hint)
    assert error.exit_code == 3


def test_a_hub_whose_name_nobody_knows(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*args: object, **more: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.invalid")
    message = refusal("owner/name").message
    assert message == "hub.invalid cannot be reached: [Errno -2] Name or service not known"


@pytest.mark.parametrize("where", ["/api/", "config.json", "/storage/"])
def test_a_server_that_does_not_answer_in_time(
    owner: HubServer, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    monkeypatch.setattr(remote, "TRIES", 2)
    owner.misbehave(where, Fault(stall=0.3), times=99)
    error = refusal("owner/name")
    assert re.fullmatch(r"(127\.0\.0\.1|localhost):\d+ did not answer within 0\.05 seconds", error.message)
    assert "HF_HUB_DOWNLOAD_TIMEOUT" in str(error.hint)


@pytest.mark.parametrize(
    "address", ["hub.example", "ftp://hub.example", "http://", "http://hub:port", "http://[::1"]
)
def test_an_endpoint_that_is_no_address(
    server: HubServer, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", address)
    assert refusal("owner/name").message == "HF_ENDPOINT is no http:// or https:// address"


@pytest.mark.parametrize(
    "answer",
    [b"<html>log in first</html>", b"[]", b"{}", b'{"id": "a/b", "sha": "../../x", "siblings": []}', b"null"],
)
def test_an_answer_that_is_no_list_of_files(owner: HubServer, answer: bytes) -> None:
    owner.misbehave("/api/", Fault(body=answer), times=9)
    error = refusal("owner/name")
    assert "answers with something that is no list of the files of owner/name" in error.message
    assert "HF_ENDPOINT" in str(error.hint)


def test_a_list_of_files_without_sizes(owner: HubServer) -> None:
    commit = owner.repositories[0].commit
    body = f'{{"id": "owner/name", "sha": "{commit}", "siblings": [{{"rfilename": "config.json"}}]}}'
    owner.misbehave("/api/", Fault(body=body.encode()))
    assert "is no list of the files" in refusal("owner/name").message


# Answers that are not what was asked for


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(total=1), "changed while it was being read: the Hub lists it with"),
        (Fault(etag="other"), "changed while it was being read: its ETag is no longer the one that it had"),
        (Fault(begin=1), r"were asked for, the answer is status 206, Content-Range 'bytes \d+-"),
        (Fault(status=416), "answered 416"),
        (Fault(status=304), "the answer is status 304"),
        (Fault(status=204), "the answer is status 204, Content-Range ''"),
        (Fault(headers={"Content-Encoding": "gzip"}), "compressed, which was not asked for"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("what", ["tokenizer_config.json", SHARD])
def test_another_file_is_refused(owner: HubServer, fault: Fault, said: str, what: str) -> None:
    checkpoint = open_checkpoint("owner/name")
    where = "/storage/" if what == SHARD else what
    storage = checkpoint.storage
    storage.read(what, 0, 10)
    owner.forget()
    owner.misbehave(where, fault, times=99)
    with pytest.raises(ToolError, match=said) as caught:
        storage.read(what, 10, 30)
    assert caught.value.exit_code == 3
    assert what in caught.value.message
    assert isinstance(caught.value, remote.Changed) == ("changed" in said)


@pytest.mark.parametrize("fault", [Fault(etag="other"), Fault(commit="f" * 40)], ids=repr)
def test_another_answer_of_the_hub_is_refused(owner: HubServer, fault: Fault) -> None:
    checkpoint = open_checkpoint("owner/name")
    tensor = next(tensor for tensor in checkpoint.tensors.values() if tensor.file == SHARD)
    owner.misbehave("/storage/", Fault(status=403))  # so that the Hub is asked for the address again
    owner.misbehave("/resolve/", fault)
    with pytest.raises(remote.Changed, match=f"{SHARD} changed while it was being read"):
        checkpoint.read(tensor)


@pytest.mark.parametrize("what", ["config.json", "/storage/"])
def test_a_server_that_ignores_ranges_will_do_for_what_lies_near_the_start(
    owner: HubServer, raw: Path, what: str
) -> None:
    owner.misbehave(what, Fault(whole=True), times=99)
    there, here = open_checkpoint("owner/name"), open_checkpoint(raw)
    assert there.config.raw == here.config.raw
    tensor = there.tensors["model.norm.weight"]
    assert there.read(tensor, 5, 100) == here.read(tensor, 5, 100)


def test_a_server_that_ignores_ranges_is_refused_where_it_costs_much(
    owner: HubServer, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = open_checkpoint("owner/name")
    tensor = there.tensors["model.norm.weight"]
    monkeypatch.setattr(remote, "_MAX_DISCARDED", tensor.end - 1)
    owner.misbehave("/storage/", Fault(whole=True))
    with pytest.raises(
        ToolError, match=f"ignores the range .* sends .*{tensor.file} from its start"
    ) as caught:
        there.read(tensor)
    assert caught.value.hint == "Download the repository: hf download owner/name"


def test_a_whole_file_of_another_size_is_refused(owner: HubServer) -> None:
    owner.misbehave("config.json", Fault(whole=True, short=1))
    assert "changed while it was being read" in refusal("owner/name").message


# The cache


@pytest.fixture
def cached(owner: HubServer) -> Path:
    """The snapshot of `owner/name` that huggingface_hub downloads from this very server."""
    snapshot = Path(snapshot_download("owner/name"))
    owner.forget()
    return snapshot


def test_a_cached_repository_is_read_from_the_cache_alone(owner: HubServer, cached: Path) -> None:
    checkpoint = open_checkpoint("owner/name")
    assert (checkpoint.root, checkpoint.revision) == (cached, cached.name)
    checkpoint.read(checkpoint.tensors["model.norm.weight"])
    assert owner.requests == []


def test_a_cached_repository_that_lacks_a_readme_is_whole_enough(owner: HubServer, cached: Path) -> None:
    (cached / "README.md").symlink_to("nowhere")
    assert [finding.level for finding in open_checkpoint("owner/name").findings] == ["warning"]
    assert owner.requests == []


def test_the_cached_commit_counts_even_when_the_hub_has_a_newer_one(
    owner: HubServer, cached: Path, small: Callable[..., Path]
) -> None:
    owner.repositories.clear()
    assert open_checkpoint("owner/name").revision == cached.name
    assert owner.requests == []


def test_what_is_cached_of_a_commit_is_not_fetched(owner: HubServer, raw: Path, cached: Path) -> None:
    for name in (SHARD, "tokenizer.json"):
        (cached / name).unlink()
    there, here = open_checkpoint("owner/name"), open_checkpoint(raw)
    assert there.findings == ()
    assert all(there.read(tensor) == here.read(tensor) for tensor in here.tensors.values())
    assert there.read_bytes("tokenizer.json") == here.read_bytes("tokenizer.json")
    asked = {re.sub(r".*/", "", request.path) for request in owner.requests if request.host == "hub"}
    assert asked == {"name?blobs=true", SHARD, "tokenizer.json"}


def test_a_cached_file_of_another_size_is_not_used(owner: HubServer, raw: Path, cached: Path) -> None:
    for name in (SHARD, "model-00001-of-00003.safetensors"):
        (cached / name).unlink()
    (cached / SHARD).write_bytes((raw / SHARD).read_bytes()[:-1])
    assert open_checkpoint("owner/name").findings == ()


@pytest.mark.parametrize("keep", ["config.json", "tokenizer.json"])
def test_a_snapshot_without_weights_is_completed_from_the_hub(
    owner: HubServer, cached: Path, keep: str
) -> None:
    for path in cached.iterdir():
        if path.name != keep:
            path.unlink()
    assert len(open_checkpoint("owner/name").files) == 3


def test_a_whole_snapshot_under_another_name_is_found_by_its_commit(owner: HubServer, cached: Path) -> None:
    checkpoint = open_checkpoint("owner/name@dev")
    assert checkpoint.root == cached
    assert [request.path for request in owner.requests] == ["/api/models/owner/name/revision/dev?blobs=true"]


def test_a_partial_snapshot_and_no_network(
    owner: HubServer, cached: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cached / SHARD).unlink()
    owner.misbehave("/api/", Fault(status=503), times=99)
    error = refusal("owner/name")
    assert "answered 503 for owner/name" in error.message
    assert "HF_HUB_OFFLINE=1 looks at that" in str(error.hint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert [finding.rule for finding in open_checkpoint("owner/name").findings] == ["INDEX-SHARD-MISSING"]


def test_offline_nothing_is_asked(owner: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = refusal("owner/name")
    assert "owner/name is not in the Hub cache" in error.message
    assert str(error.hint).startswith("HF_HUB_OFFLINE is set. Unset it, or")
    assert "hf download owner/name" in str(error.hint)
    assert owner.requests == []


def test_offline_in_the_middle(owner: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint: Checkpoint = open_checkpoint("owner/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ToolError, match="owner/name is on the Hub, and HF_HUB_OFFLINE is set"):
        checkpoint.read(checkpoint.tensors["model.norm.weight"])


# Work at once


def test_work_that_fails_ends_all_work() -> None:
    begun: list[int] = []
    ended: list[bool] = []

    def work(item: int) -> int:
        begun.append(item)
        if item == 3:
            raise ToolError("three")
        if item > 3:
            ended.append(workers.stop_of_thread().wait(20))
        return item

    results = workers.at_once(work, range(1000), 4)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ToolError, match="three"):
        next(results)
    assert all(ended)
    assert len(begun) < 20


def test_a_reader_that_goes_away_ends_all_work() -> None:
    ended: list[bool] = []

    def work(item: int) -> None:
        if item:
            ended.append(workers.stop_of_thread().wait(20))

    results = workers.at_once(work, range(1000), 4)
    next(results)
    results.close()
    assert all(ended)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ThreadPool")]


def test_a_thread_that_is_to_end_takes_no_more_bytes(
    owner: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = open_checkpoint("owner/name").storage
    assert isinstance(storage, remote.Repository)
    stop = threading.Event()
    monkeypatch.setattr(workers._thread, "stop", stop, raising=False)
    taken: list[bytes] = []

    def take(chunk: bytes) -> None:
        taken.append(chunk)
        stop.set()

    with pytest.raises(workers.Stopped):
        storage.download(SHARD, 0, 200_000, take)
    assert len(taken) == 1
