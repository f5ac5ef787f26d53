"""Uploads to a Hub on loopback: what arrives, in which order, and what is said when it does not."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import are_progress_bars_disabled

from draftpair.checkpoint.hub.upload import Upload, check_upload, upload_folder_to_hub
from draftpair.errors import Refused, ToolError, Usage
from fixtures.hub_upload import DROPPED, Repository, UploadHub, upload_hub

# huggingface_hub 2.4.0 sends plain LFS objects in a way that httpx2 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

TOKEN = "hf_" + "s3cret" * 5
CONTENT = {
    "model.safetensors": bytes(range(256)) * 300,
    "model.safetensors.index.json": b'{"weight_map": {}}\n',
    "config.json": b'{"model_type": "x_mtp"}\n',
    "draftpair-manifest.json": b'{"family": "x_mtp"}\n',
    "README.md": b"---\nlibrary_name: mlx\n---\n\n# A drafter\n",
    "tokenizer.json": b'{"model": "\xc3\xa9"}',
    "LICENSE-[a-z]*.txt": b"free",
}
FIRST = {"model.safetensors", "draftpair-manifest.json", "tokenizer.json", "LICENSE-[a-z]*.txt"}
LAST = {"model.safetensors.index.json", "config.json", "README.md"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[UploadHub]:
    with upload_hub(TOKEN, monkeypatch) as hub:
        yield hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A drafter folder in which more lies than belongs to it."""
    folder = tmp_path / "my drafter"
    folder.mkdir()
    for name, data in CONTENT.items():
        (folder / name).write_bytes(data)
    (folder / "notes.txt").write_text("private")
    (folder / "LICENSE-b.txt").write_text("matches the pattern that a name could be taken for")
    return folder


def upload(folder: Path, repository: str = "me/x-MTP-bf16", **options: Any) -> Upload:
    return upload_folder_to_hub(folder, list(CONTENT), repository, **options)


def test_everything_arrives_byte_for_byte_and_nothing_else_does(hub: UploadHub, folder: Path) -> None:
    done = upload(folder)
    repository = hub.repositories["me/x-MTP-bf16"]
    assert {**repository.files} == {**CONTENT, ".gitattributes": repository.files[".gitattributes"]}
    assert not repository.private
    assert (done.repository, done.url) == ("me/x-MTP-bf16", f"{hub.endpoint}/me/x-MTP-bf16")
    assert done.commit == repository.commits[-1].oid


def test_weights_are_there_before_anything_asks_for_them(hub: UploadHub, folder: Path) -> None:
    upload(folder, message="x_mtp")
    first, last = hub.repositories["me/x-MTP-bf16"].commits
    assert (set(first.added), first.deleted) == (FIRST, ())
    assert (set(last.added), last.deleted) == (LAST, ())
    assert (first.summary, last.summary) == ("x_mtp: weights", "x_mtp: index, config and card")
    assert hub.requests[:2] == ["create", "list"]
    assert hub.requests.index("put") < hub.requests.index("commit")


def test_the_default_transfer_keeps_the_order(
    hub: UploadHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With hf_xet, which huggingface_hub 2 requires, another code path commits; small files do not need its storage.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    hub.large = lambda name: False
    upload(folder)
    repository = hub.repositories["me/x-MTP-bf16"]
    assert [set(commit.added) for commit in repository.commits] == [FIRST, LAST]
    assert {name: repository.files[name] for name in CONTENT} == CONTENT


def test_a_private_repository_and_a_branch(hub: UploadHub, folder: Path) -> None:
    upload(folder, "me/new", private=True)
    assert hub.repositories["me/new"].private
    hub.repositories["me/old"] = Repository(branches={"main": {}, "next": {}})
    upload(folder, "me/old@next")
    assert hub.repositories["me/old"].branches["main"] == {}
    assert hub.repositories["me/old"].branches["next"] == CONTENT


def test_the_token_given_is_the_one_used(
    hub: UploadHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    upload(folder, token=TOKEN)
    assert hub.repositories["me/x-MTP-bf16"].commits


def test_an_older_drafter_gives_way_without_a_moment_of_old_config_and_new_weights(
    hub: UploadHub, folder: Path
) -> None:
    upload(folder)
    repository = hub.repositories["me/x-MTP-bf16"]
    repository.files.update({"merges.txt": b"old", "picture.png": b"theirs", "model.safetensors": b"old"})
    (folder / "model.safetensors").write_bytes(b"new")
    upload(folder, superseded=lambda name: name in ("merges.txt", "README.md", "tokenizer.json"))
    first, last = repository.commits[2:]
    assert set(first.added) == {"model.safetensors"}
    assert set(first.deleted) == {"config.json", "model.safetensors.index.json", "merges.txt"}
    assert {"config.json", "model.safetensors.index.json"} <= set(last.added)
    assert repository.files["model.safetensors"] == b"new"
    assert repository.files["picture.png"] == b"theirs"
    assert repository.files.keys() == {*CONTENT, "picture.png", ".gitattributes"}


def test_an_upload_that_broke_off_can_be_taken_up_again(hub: UploadHub, folder: Path) -> None:
    hub.fail("preupload", 403)
    with pytest.raises(ToolError):
        upload(folder)
    hub.fail("card", 500)
    with pytest.raises(ToolError):
        upload(folder)
    assert hub.repositories["me/x-MTP-bf16"].files.keys() == {*FIRST, ".gitattributes"}
    upload(folder)
    assert [set(commit.added) for commit in hub.repositories["me/x-MTP-bf16"].commits] == [FIRST, LAST]


@pytest.mark.parametrize(
    "present",
    [
        {"model.safetensors": b"a whole model", "config.json": b"{}"},
        {"model.safetensors": b"", "draftpair-manifest.json": b"", "model-00001-of-00002.safetensors": b""},
        {"weights/pytorch_model.bin": b""},
        {"draftpair-manifest.json": b"", "x-Q4_K.gguf": b""},
    ],
)
def test_weights_that_are_not_a_drafter_of_ours_are_left_alone(
    hub: UploadHub, folder: Path, present: dict[str, bytes]
) -> None:
    hub.repositories["me/model"] = Repository(branches={"main": dict(present)})
    with pytest.raises(Refused, match="me/model holds weights that are no drafter of draftpair's") as caught:
        upload(folder, "me/model")
    foreign = [name for name in present if name.endswith((".bin", ".gguf", "of-00002.safetensors"))]
    assert (foreign or ["model.safetensors"])[0] in caught.value.message
    assert "another repository" in str(caught.value.hint)
    assert hub.repositories["me/model"].files == present
    assert hub.requests == ["create", "list"]


MALFORMED = [
    "", "x", "me/", "/x", "me/x/y", "./out", "../me/x", "~/x", "me/x.git", "me--x/y", "me/x..y", "me x/y", "mé/x",
    "hf://me/x", "https://huggingface.co/me/x", "me/x@", "-me/x", f"me/{'x' * 97}", "me/x\nhf_upload",
]  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_name_is_refused_before_any_request(hub: UploadHub, folder: Path, name: str) -> None:
    with pytest.raises(Usage, match="is no name that a repository on the Hub can have") as caught:
        upload(folder, name)
    assert caught.value.message.isprintable()
    assert "owner/name" in str(caught.value.hint)
    assert hub.requests == []


def test_a_name_is_understood_without_a_request(hub: UploadHub) -> None:
    assert (check_upload("me/x").repository, check_upload("me/x").revision) == ("me/x", None)
    assert check_upload("me/x@refs/pr/1").revision == "refs/pr/1"
    assert hub.requests == []


def test_offline_nothing_is_tried(hub: UploadHub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ToolError, match="HF_HUB_OFFLINE is set") as caught:
        upload(folder)
    assert "hf upload me/x-MTP-bf16" in str(caught.value.hint)
    assert (caught.value.exit_code, hub.requests) == (3, [])


@pytest.mark.parametrize("change", ["gone", "link", "folder"])
def test_a_file_that_is_no_plain_file_stops_everything(
    hub: UploadHub, folder: Path, tmp_path: Path, change: str
) -> None:
    path = folder / "tokenizer.json"
    path.unlink()
    if change == "link":
        (tmp_path / "secret").write_text("secret")
        path.symlink_to(tmp_path / "secret")
    elif change == "folder":
        path.mkdir()
    with pytest.raises(ToolError, match=r"tokenizer\.json is not there, or no plain file"):
        upload(folder)
    assert hub.requests == []


def refusal(folder: Path, **options: Any) -> ToolError:
    """The error of an upload, which says that the folder is whole and how to finish, and holds no token."""
    with pytest.raises(ToolError) as caught:
        upload(folder, **options)
    error = caught.value
    assert (type(error), error.exit_code) == (ToolError, 3)
    assert error.message.startswith("uploading to me/x-MTP-bf16 at http://127.0.0.1:")
    assert error.message.endswith(f"; {folder} is complete on disk")
    assert str(error.hint).endswith(f"then finish with: hf upload me/x-MTP-bf16 '{folder}' .")
    assert TOKEN not in f"{error.message} {error.hint}"
    return error


@pytest.mark.parametrize(
    ("endpoint", "status", "said", "advice"),
    [
        ("create", 401, "the token is missing or not accepted", "hf auth login"),
        ("create", 403, "the token may not write there", "a token that may write"),
        ("create", 404, "there is no such repository", "look at the name"),
        ("list", 404, "there is no such repository", "look at the name"),
        ("preupload", 403, "the token may not write there", "a token that may write"),
        ("commit", 409, "something else is changing the repository", "wait"),
        ("commit", 412, "something else changed the repository", "look at what it did"),
        ("commit", 413, "it does not take what was sent", "what it says"),
        ("card", 400, "it does not take what was sent", "what it says"),
        ("commit", 500, "the Hub failed", "try later"),
        ("create", 503, "the Hub failed", "try later"),
        ("batch", 403, "the token may not write there", "a token that may write"),
        ("put", 403, "the token may not write there", "a token that may write"),
        ("verify", 404, "there is no such repository", "look at the name"),
    ],
)
def test_an_answer_that_is_a_refusal_is_told_with_its_reason(
    hub: UploadHub, folder: Path, endpoint: str, status: int, said: str, advice: str
) -> None:
    hub.fail(endpoint, status, f"no, not with {TOKEN}!")
    error = refusal(folder)
    assert f"it answered {status}, {said}" in error.message
    assert "(no, not with ***!)" in error.message
    assert advice in str(error.hint)


def test_a_token_that_is_not_known_is_not_shown(
    hub: UploadHub, folder: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    hub.token = "hf_other"
    assert "it answered 401, the token is missing or not accepted" in refusal(folder).message
    assert TOKEN not in caplog.text + "".join(capfd.readouterr())


def test_a_branch_that_is_not_there_is_told(hub: UploadHub, folder: Path) -> None:
    with pytest.raises(ToolError, match="it answered 404") as caught:
        upload(folder, "me/x@next")
    assert str(caught.value.hint).endswith(f"hf upload me/x '{folder}' . --revision next")


@pytest.mark.parametrize("endpoint", ["list", "preupload", "batch", "put", "verify"])
@pytest.mark.parametrize("status", [500, DROPPED])
def test_one_failure_of_the_moment_is_overcome(
    hub: UploadHub, folder: Path, endpoint: str, status: int
) -> None:
    hub.fail(endpoint, status)
    upload(folder)
    files = hub.repositories["me/x-MTP-bf16"].files
    assert {name: files[name] for name in CONTENT} == CONTENT


@pytest.mark.parametrize("endpoint", ["create", "list", "put", "commit", "card"])
def test_a_connection_that_always_breaks_is_told(hub: UploadHub, folder: Path, endpoint: str) -> None:
    hub.fail(endpoint, DROPPED, times=20)
    error = refusal(folder)
    assert "HF_ENDPOINT" in str(error.hint)
    assert re.search(r"failed: [^;]*disconnected", error.message)


def test_a_server_that_is_not_there_is_told(
    hub: UploadHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert "refused" in refusal(folder).message.lower()
    assert hub.requests == []


def test_storage_that_does_not_answer_is_told(
    hub: UploadHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    assert "404" in refusal(folder).message
    assert hub.repositories["me/x-MTP-bf16"].commits == []


@pytest.mark.parametrize("answer", [{}, {"files": "x"}, b"<html>Sign in</html>"])
@pytest.mark.parametrize("endpoint", ["create", "preupload", "commit"])
def test_an_answer_that_no_hub_would_give_is_told(
    hub: UploadHub, folder: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str, answer: object
) -> None:
    monkeypatch.setattr(UploadHub, f"_{endpoint}", lambda *args, **kwargs: answer)
    assert "HF_ENDPOINT" in str(refusal(folder).hint)


def test_files_that_the_repository_ignores_are_missed(hub: UploadHub, folder: Path) -> None:
    hub.repositories["me/x-MTP-bf16"] = Repository(ignored=frozenset({"tokenizer.json"}))
    with pytest.raises(ToolError, match=r"left out tokenizer\.json") as caught:
        upload(folder)
    assert ".gitignore" in str(caught.value.hint)


@pytest.mark.parametrize("shown", [True, False])
def test_bars_are_shown_when_asked_for(
    hub: UploadHub, folder: Path, capfd: pytest.CaptureFixture[str], shown: bool
) -> None:
    upload(folder, bars=shown)
    out, err = capfd.readouterr()
    assert (out, "model.safetensors" in err) == ("", shown)
    assert not are_progress_bars_disabled()


def test_the_objects_are_those_of_the_folder(hub: UploadHub, folder: Path) -> None:
    upload(folder)
    assert list(hub.objects) == [hashlib.sha256(CONTENT["model.safetensors"]).hexdigest()]


def test_only_calls_are_used_that_every_admitted_version_has() -> None:
    calls: list[Callable[..., Any]] = [
        huggingface_hub.HfApi.create_repo, huggingface_hub.HfApi.upload_folder, huggingface_hub.HfApi.list_repo_files
    ]  # fmt: skip
    used = {"repo_id", "private", "exist_ok", "revision", "folder_path", "allow_patterns", "delete_patterns"}
    assert used <= {name for call in calls for name in inspect.signature(call).parameters}
