"""Puts a folder on the Hub in an order in which nobody meets half of it.

Promises: only the files that are named leave this machine. Weights go first, and with them all that no reader
starts from; index, config and card follow in a commit of their own. Whoever looks in between finds weights without
a config, which every loader refuses, never a config that asks for weights that are not there yet. A repository that
holds an older drafter loses its index and config in the first commit: nobody reads new weights by an old config.
No message holds the token.
"""

from __future__ import annotations

import glob
import os
import re
import shlex
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftpair.checkpoint.index import INDEX_NAME
from draftpair.checkpoint.manifest import MANIFEST
from draftpair.checkpoint.rope import CONFIG_NAME
from draftpair.checkpoint.source import HubName
from draftpair.checkpoint.wording import printable, some
from draftpair.errors import Refused, ToolError, Usage

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

_READ_FIRST = (INDEX_NAME, CONFIG_NAME)
_LAST = (*_READ_FIRST, "README.md")
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_REPOSITORY = re.compile(rf"(?!.*(?:--|\.\.|\.git$)){_PART}/{_PART}")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")

# HTTP status -> what it means here, and what to do about it.
_REASONS = {
    401: ("the token is missing or not accepted", "log in with `hf auth login`, or set HF_TOKEN"),
    403: ("the token may not write there", "use a token that may write to this repository"),
    404: ("there is no such repository or branch for this token", "look at the name"),
    409: ("something else is changing the repository", "wait for it"),
    412: ("something else changed the repository meanwhile", "look at what it did"),
    429: ("too many requests", "wait a few minutes"),
}
_HUB_FAILED = ("the Hub failed", "try later")
_NOT_TAKEN = ("it does not take what was sent", "look at what it says")


@dataclass(frozen=True)
class Upload:
    """A folder that is on the Hub: the repository, its page, and the commit that has everything."""

    repository: str
    url: str
    commit: str


def check_upload(repository: str) -> HubName:
    """The repository that is meant, `owner/name` or `owner/name@branch`, as far as can be told without a request.

    Raises Usage for a name that the Hub cannot have, ToolError when huggingface_hub is told to stay offline.
    """
    from huggingface_hub import constants

    name, at, branch = repository.partition("@")
    if not _REPOSITORY.fullmatch(name) or (at and not branch):
        raise Usage(
            f"{printable(repository)!r} is no name that a repository on the Hub can have",
            hint="write owner/name or owner/name@branch: letters, digits, `-`, `_` and `.`, 96 characters at most",
        )
    if constants.HF_HUB_OFFLINE:
        raise ToolError(
            f"nothing can be uploaded to {name}: HF_HUB_OFFLINE is set",
            hint=f"unset it; a folder that is complete can be uploaded with: hf upload {name} FOLDER .",
        )
    return HubName(name, branch or None)


def upload_folder_to_hub(
    folder: Path,
    files: Collection[str],
    repository: str,
    *,
    private: bool = False,
    message: str = "Upload with draftpair",
    token: str | None = None,
    superseded: Callable[[str], bool] = lambda name: False,
    bars: bool = False,
) -> Upload:
    """Uploads the `files` of a complete folder to a repository, which is made when there is none.

    `private` is for a new repository. Files of the repository that `superseded` claims by name and that are not
    uploaded are deleted there; others stay. Without a `token` huggingface_hub's own counts, as do HF_ENDPOINT and
    its retries. With `bars` its progress bars are shown.

    Raises as `check_upload`; Refused for a repository whose weights are no drafter of ours; ToolError, with the
    command that finishes the upload by hand, when the Hub cannot be reached or does not take the files.
    """
    from huggingface_hub import HfApi

    name = check_upload(repository)
    _require_plain_files(folder, files)
    hub = HfApi(token=token)

    def commit(names: Collection[str], what: str, delete: Collection[str] = ()) -> str:
        done = hub.upload_folder(
            repo_id=name.repository,
            revision=name.revision,
            folder_path=folder,
            allow_patterns=[glob.escape(file) for file in names],
            delete_patterns=[glob.escape(file) for file in delete] or None,
            commit_message=f"{message}: {what}",
        )
        return str(done.oid)

    with _explained(name, folder, token), _progress_bars(bars):
        page = hub.create_repo(name.repository, private=private or None, exist_ok=True)
        present = hub.list_repo_files(name.repository, revision=name.revision)
        _refuse_other_weights(present, files, name)
        stale = [n for n in present if n in _READ_FIRST or (n not in files and superseded(n))]
        commit([file for file in files if file not in _LAST], "weights", delete=stale)
        oid = commit([file for file in files if file in _LAST], "index, config and card")
        _require_all(hub.list_repo_files(name.repository, revision=oid), files, name)
    return Upload(name.repository, str(page), oid)


def _require_plain_files(folder: Path, files: Collection[str]) -> None:
    """A link would upload whatever it leads to."""
    for file in files:
        path = folder / file
        if not os.path.lexists(path) or not stat.S_ISREG(os.lstat(path).st_mode):
            raise ToolError(f"{path} is not there, or no plain file; nothing was uploaded")


def _refuse_other_weights(present: Collection[str], files: Collection[str], name: HubName) -> None:
    """Only a drafter that draftpair wrote is replaced, and nothing is left for loaders to merge with it."""
    weights = [file for file in present if file.endswith(_WEIGHTS)]
    if others := [file for file in weights if file not in files or MANIFEST not in present]:
        raise Refused(
            f"{name} holds weights that are no drafter of draftpair's: {some(others)}; nothing was uploaded",
            hint="choose another repository, or delete them there first",
        )


def _require_all(present: Collection[str], files: Collection[str], name: HubName) -> None:
    if missing := [file for file in files if file not in present]:
        raise ToolError(
            f"{name} took the upload and left out {some(missing)}",
            hint="a .gitignore in the repository names them; change it there, and upload again",
        )


@contextmanager
def _explained(name: HubName, folder: Path, token: str | None) -> Iterator[None]:
    """What goes wrong between here and the Hub, as an error that says what to do with the folder."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError

    # The base of all errors of the HTTP library: httpx or httpx2, by huggingface_hub's version.
    transport: type[Exception] = HfHubHTTPError.__bases__[0]
    try:
        yield
    except (transport, OSError, RuntimeError, ValueError, LookupError) as error:
        # huggingface_hub wraps what went wrong in a thread, or with a card.
        cause = error if isinstance(error, HfHubHTTPError) else error.__cause__ or error
        if isinstance(cause, HfHubHTTPError):
            why, advice = _answered(cause)
        else:
            why, advice = str(cause) or type(cause).__name__, "look at the network, and at HF_ENDPOINT"
        why = printable(_without_token(why, token), 300)
        finish = f"hf upload {name.repository} {shlex.quote(str(folder))} ."
        finish += f" --revision {name.revision}" if name.revision else ""
        raise ToolError(
            f"uploading to {name} at {constants.ENDPOINT} failed: {why}; {folder} is complete on disk",
            hint=f"{advice}, then finish with: {finish}",
        ) from error


def _answered(error: HfHubHTTPError) -> tuple[str, str]:
    """What the Hub's answer means, and what to do about it."""
    status = error.response.status_code
    meaning, advice = _REASONS.get(status, _HUB_FAILED if status >= 500 else _NOT_TAKEN)
    said = f" ({'; '.join(error.server_message.splitlines())})" if error.server_message else ""
    return f"it answered {status}, {meaning}{said}", advice


def _without_token(text: str, token: str | None) -> str:
    """A server may repeat what it was sent."""
    from huggingface_hub import get_token

    secret = token or get_token()
    return text.replace(secret, "***") if secret else text


@contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """huggingface_hub's bars only when `shown`, or when its own variable asks for them."""
    from huggingface_hub import constants
    from huggingface_hub.utils import (  # type: ignore[attr-defined]  # documented there, not in its __all__
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    hidden = not shown and constants.HF_HUB_DISABLE_PROGRESS_BARS is None and not are_progress_bars_disabled()
    if hidden:
        disable_progress_bars()
    try:
        yield
    finally:
        if hidden:
            enable_progress_bars()
