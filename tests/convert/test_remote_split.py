"""Commands on a repository on a Hub on loopback: reports and bytes as from a folder, and little that is read."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, snapshot_download

from draftpair import api
from draftpair.checkpoint import open_checkpoint
from draftpair.checkpoint.hub import fetch, workers
from draftpair.cli import run
from draftpair.errors import ToolError, Usage
from fixtures.folders import Folders
from fixtures.glm4_moe_lite import write_checkpoint
from fixtures.hub_server import Fault, HubServer, hub_server

TOKEN = "hf_notToBeShownToAnybody"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A raw checkpoint in six shards, most of which hold nothing of the head."""
    folder = write_checkpoint(tmp_path_factory.mktemp("remote") / "raw", shards=6, layers=8, vocab=512)
    (folder / "LICENSE").write_text("free")
    return folder


@pytest.fixture
def server(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A Hub with `owner/name`; pieces are small, pauses are short."""
    monkeypatch.setattr(workers, "PAUSE", 0.001)
    monkeypatch.setattr(fetch, "PIECE_BYTES", 20_000)
    with hub_server() as server, server.in_use(tmp_path / "home", monkeypatch):
        server.add("owner/name", source)
        yield server


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def journals(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "home").rglob("journal"))


def all_reports(output: Path, **options: Any) -> list[dict[str, Any]]:
    reports = [
        api.inspect("owner/name", memory="64GB"),
        api.validate("owner/name"),
        api.split_mtp("owner/name", output, dry_run=True, **options),
        api.split_mtp("owner/name", output, **options),
    ]
    return json.loads(json.dumps(reports).replace(str(output), "OUTPUT"))  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"q_bits": 4, "q_group_size": 32}, {"dtype": "float32"}], ids=str)
def test_reports_and_bytes_are_those_of_the_downloaded_repository(
    server: HubServer, tmp_path: Path, options: dict[str, Any]
) -> None:
    there = all_reports(tmp_path / "there", **options)
    assert there[0]["checkpoint"]["revision"] == server.repositories[0].commit
    assert there[0]["checkpoint"]["fetched_bytes"] > 0
    there[0]["checkpoint"]["fetched_bytes"] = None
    assert there[1]["fetched_bytes"]["target"] > 0
    there[1]["fetched_bytes"]["target"] = None
    assert [finding.pop("rule") for finding in there[1]["findings"]] == ["VALUES-NOT-READ"]
    there[1]["findings"] = []
    assert journals(tmp_path) == []
    snapshot_download("owner/name")
    server.forget()
    assert all_reports(tmp_path / "here", **options) == there
    assert server.requests == []
    assert content(tmp_path / "here") == content(tmp_path / "there")


def test_the_drafter_is_that_of_the_folder_and_its_origin_is_recorded(
    server: HubServer, source: Path, tmp_path: Path
) -> None:
    api.split_mtp("hf://owner/name", tmp_path / "there", revision="main")
    api.split_mtp(source, tmp_path / "here")
    there, here = content(tmp_path / "there"), content(tmp_path / "here")
    manifest = json.loads(there.pop("draftpair-manifest.json"))
    other = json.loads(here.pop("draftpair-manifest.json"))
    # The card names the repository.
    assert {name for name in {**there, **here} if there.get(name) != here.get(name)} <= {"README.md"}
    assert (manifest["source"]["name"], manifest["source"]["revision"]) == (
        "owner/name",
        server.repositories[0].commit,
    )
    assert manifest["source"]["fingerprint"] == other["source"]["fingerprint"]


def test_a_split_reads_headers_the_head_and_small_files(
    server: HubServer, source: Path, tmp_path: Path
) -> None:
    """Nothing of the trunk but norms, samples for the fingerprint, and small gaps inside the head."""
    shards = {path.name: path.stat().st_size for path in source.glob("*.safetensors")}
    small = sum(path.stat().st_size for path in source.iterdir() if path.name not in shards)
    here = open_checkpoint(source)
    head = [tensor for tensor in here.tensors.values() if tensor.name.startswith("model.layers.8.")]
    trunk = [tensor for tensor in here.tensors.values() if not tensor.name.startswith("model.layers.8.")]
    read = 65536 * len(shards) + sum(tensor.nbytes for tensor in head) + small
    norms = sum(tensor.nbytes for tensor in trunk if len(tensor.shape) == 1)
    samples = 3 * 64 * len(trunk)
    listing = 4096
    api.split_mtp("owner/name", tmp_path / "out")
    assert server.sent <= read + norms + samples + listing
    assert server.sent < 0.7 * sum(shards.values())
    head_files = {tensor.file for tensor in head}
    large = [
        r for r in server.requests if r.host == "storage" and r.span and r.span[0] >= 65536 and r.sent > 256
    ]
    assert len(large) >= sum(tensor.nbytes for tensor in head) // 20_000 - 4
    assert head_files < shards.keys()


def test_inspect_and_validate_read_no_weights_to_speak_of(server: HubServer, source: Path) -> None:
    weights = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    api.inspect("owner/name")
    api.validate("owner/name")
    sent = [
        request.sent
        for request in server.requests
        if request.host == "storage" and request.span != (0, 65536)
    ]
    assert sum(sent) < weights // 50


def test_progress_begins_with_what_is_fetched(server: HubServer, tmp_path: Path) -> None:
    stages: list[str] = []
    api.split_mtp("owner/name", tmp_path / "out", progress=lambda stage, done, total: stages.append(stage))
    assert list(dict.fromkeys(stages)) == ["fetch", "write"]


def test_a_pair_of_repositories_is_judged_as_a_pair_of_folders(server: HubServer, folders: Folders) -> None:
    server.add("owner/target", folders.target)
    server.add("owner/drafter", folders.drafter)
    here = api.validate(folders.target, folders.drafter)
    there = api.validate("owner/target", "owner/drafter", values=True)
    assert (there["verdict"], there["findings"]) == (here["verdict"], here["findings"])
    assert min(there["fetched_bytes"].values()) > 0
    seen = api.validate("owner/target", "owner/drafter")
    unread = [finding["where"] for finding in seen["findings"] if finding["rule"] == "VALUES-NOT-READ"]
    assert unread == ["owner/target", "owner/drafter"]
    assert seen["facts"]["copies"] == {"embedding": None, "head": None, "different": []}
    assert seen["verdict"] == here["verdict"] == "compatible"
    revisions = [repository.commit for repository in server.repositories[1:]]
    assert [seen["inputs"][f"{side}_revision"] for side in ("target", "drafter")] == revisions


def test_a_malformed_tokenizer_on_the_hub_is_named_with_its_repository(
    server: HubServer, folders: Folders
) -> None:
    (folders.target / "tokenizer.json").write_text("{}")
    server.add("owner/target", folders.target)
    server.add("owner/drafter", folders.drafter)
    messages = [finding["message"] for finding in api.validate("owner/target", "owner/drafter")["findings"]]
    assert any(re.search(r"owner/target@[0-9a-f]{40}/tokenizer\.json: ", message) for message in messages)


def test_a_repository_without_a_head_is_named(server: HubServer, folders: Folders, tmp_path: Path) -> None:
    server.add("owner/target", folders.target)
    with pytest.raises(ToolError, match="owner/target has no tensor"):
        api.split_mtp("owner/target", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_refused_option_asks_nothing_of_the_hub(server: HubServer, tmp_path: Path) -> None:
    with pytest.raises(Usage):
        api.split_mtp("owner/name", tmp_path / "out", q_bits=99)
    assert server.requests == []


def test_the_files_of_a_cached_snapshot_are_not_overwritten(
    server: HubServer, source: Path, tmp_path: Path
) -> None:
    snapshot = Path(snapshot_download("owner/name"))
    (snapshot / "tokenizer.json").unlink()
    shard = next(iter(sorted(snapshot.glob("*.safetensors"))))
    for other in sorted(snapshot.glob("*.safetensors"))[1:]:
        other.unlink()
    before = shard.read_bytes()
    with pytest.raises(Usage, match="holds the source"):
        api.split_mtp("owner/name", Path(os.path.realpath(shard)).parent, force=True)
    assert shard.read_bytes() == before


def test_a_run_that_breaks_off_leaves_no_folder_and_the_next_goes_on(
    server: HubServer, source: Path, tmp_path: Path
) -> None:
    gone = [Fault(status=503, headers={"Retry-After": "0"})] * 999
    server.misbehave("/storage/", *[Fault()] * 12, *gone)
    with pytest.raises(ToolError, match="answered 503") as caught:
        api.split_mtp("owner/name", tmp_path / "out")
    assert "run again to go on" in str(caught.value.hint)
    assert not (tmp_path / "out").exists()
    server.forget()
    done: list[int] = []
    api.split_mtp("owner/name", tmp_path / "out", progress=lambda stage, count, total: done.append(count))
    assert done[0] > 0
    api.split_mtp(source, tmp_path / "here")
    assert content(tmp_path / "out")["model.safetensors"] == content(tmp_path / "here")["model.safetensors"]
    assert journals(tmp_path) == []


# The command line


def command(*args: str) -> list[str]:
    """The command line in a process of its own, with small pieces."""
    small = "from draftpair.checkpoint.hub import fetch; fetch.PIECE_BYTES = 20000"
    code = f"{small}\nfrom draftpair.cli import main; main()"
    return [sys.executable, "-c", code, *args]


def test_the_command_line_uses_the_variables_of_the_hub(
    server: HubServer, source: Path, tmp_path: Path
) -> None:
    server.repositories.clear()
    server.add("owner/private", source, closed="private")
    server.tokens.add(TOKEN)
    environment = server.environment(tmp_path / "home") | {"HF_TOKEN": TOKEN, "HF_DEBUG": ""}
    split = command("split-mtp", "-m", "owner/private", "-o", str(tmp_path / "out"), "--json")
    done = subprocess.run(split, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["inputs"]["revision"] == server.repositories[0].commit
    assert done.stderr == ""
    assert (tmp_path / "out" / "LICENSE").read_text() == "free"
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert TOKEN.encode() not in written
    assert TOKEN not in done.stdout


def test_a_killed_run_is_taken_up_by_the_next(server: HubServer, source: Path, tmp_path: Path) -> None:
    server.misbehave("/storage/", *[Fault()] * 12, *[Fault(stall=30)] * 20)
    split = command("split-mtp", "-m", "owner/name", "-o", str(tmp_path / "out"))
    environment = server.environment(tmp_path / "home")
    with subprocess.Popen(split, env=environment, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not any(journal.stat().st_size for journal in journals(tmp_path)):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert not (tmp_path / "out").exists()
    [journal] = journals(tmp_path)
    kept = sum(line["end"] - line["begin"] for line in map(json.loads, journal.read_text().splitlines()))
    server.forget()
    fetched: list[int] = []
    api.split_mtp("owner/name", tmp_path / "out", progress=lambda stage, done, total: fetched.append(done))
    assert fetched[0] == kept > 0
    api.split_mtp(source, tmp_path / "here")
    assert content(tmp_path / "out")["model.safetensors"] == content(tmp_path / "here")["model.safetensors"]
    assert journals(tmp_path) == []


@pytest.mark.parametrize("name", ["inspect", "validate", "split-mtp"])
@pytest.mark.parametrize(
    ("source_name", "fault", "said"),
    [
        ("owner/gated", None, r"is gated, .*\nhint: Accept its terms"),
        ("owner/typo", None, r"has no repository owner/typo.*\nhint: Check the spelling"),
        ("owner/name@v9", None, r"has no revision 'v9'"),
        ("owner/name", Fault(status=429, headers={"Retry-After": "0"}), r"\(429\).*\nhint: .*HF_TOKEN"),
        ("owner/name", Fault(drop=0), r"the connection to .* broke\nhint: "),
    ],
)
def test_what_cannot_be_looked_at_has_its_own_exit_code(
    server: HubServer,
    source: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    source_name: str,
    fault: Fault | None,
    said: str,
) -> None:
    server.add("owner/gated", source, closed="gated")
    if fault is not None:
        server.misbehave("/", fault, times=999)
    options = ["-m", source_name, "-o", str(tmp_path / "out")] if name == "split-mtp" else [source_name]
    assert run([name, *options]) == 3
    shown = capsys.readouterr()
    assert re.search(rf"^error: .*{said}", shown.err)
    assert shown.out == ""
    assert not (tmp_path / "out").exists()


def test_offline_only_the_cache_counts(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run(["inspect", "owner/name"]) == 3
    assert "hint: HF_HUB_OFFLINE is set." in capsys.readouterr().err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    snapshot_download("owner/name")
    server.forget()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run(["inspect", "owner/name"]) == 0
    assert server.requests == []


def test_a_model_that_is_not_here_is_not_run(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlx_lm")
    assert run(["generate", "-m", "owner/name", "-p", "hello"]) == 3
    error = capsys.readouterr().err
    assert re.search("owner/name is on the Hub, and .* needs all of its files on this machine", error)
    assert "hint: Download it first: hf download owner/name\n" in error
