"""How the Hub is asked: by huggingface_hub's address, token, time limits and connections, one try at a time.

The library is imported when a Hub name is used and not before; `HF_ENDPOINT`, `HF_TOKEN` and stored tokens,
`HF_HUB_OFFLINE` and `HF_HUB_DOWNLOAD_TIMEOUT` apply. The token goes to the endpoint alone: a storage host that the
Hub redirects to gets none. No message holds a token, or more of an address than its host, because the addresses of
storage hosts are signed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import import_module
from typing import Any
from urllib.parse import urljoin, urlsplit

from draftpair.checkpoint.index import is_plain_name
from draftpair.checkpoint.source import HubName
from draftpair.errors import ToolError
from draftpair.version import VERSION

_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAX_REDIRECTS = 8
_TRY_LATER = frozenset({408, 429, 500, 502, 503, 504})
_LOGIN = "set HF_TOKEN or run `hf auth login`"


class HubError(ToolError):
    """One try to ask the Hub failed; `again` says whether another may succeed, `wait` after how many seconds."""

    def __init__(
        self, message: str, hint: str | None = None, *, again: bool = False, wait: float | None = None
    ) -> None:
        super().__init__(message, hint)
        self.again = again
        self.wait = wait


@dataclass(frozen=True)
class Listing:
    """The files at the top of a repository at one commit, by name, with their sizes in bytes."""

    name: HubName
    commit: str
    files: dict[str, int]


@dataclass(frozen=True)
class Answer:
    """The start of a server's answer: its `chunks` are still to come, as they are on the wire.

    `url` is the address that answered. `linked_etag` is the file's identity by the Hub, `etag` by the server
    that answered.
    """

    url: str
    status: int
    headers: Mapping[str, str]
    etag: str | None
    linked_etag: str | None
    commit: str | None
    chunks: Iterator[bytes]


class Hub:
    """One Hub as huggingface_hub is set up to reach it; safe in threads."""

    def __init__(self) -> None:
        """ToolError when the address or the token cannot be used at all."""
        from huggingface_hub import constants, get_session
        from huggingface_hub.errors import HfHubHTTPError

        self._endpoint = str(constants.ENDPOINT)
        self._timeout = float(constants.HF_HUB_DOWNLOAD_TIMEOUT)
        if _origin(self._endpoint) is None:
            raise ToolError(
                "HF_ENDPOINT is no http:// or https:// address", "Leave it unset for the public Hub."
            )
        self._headers = {**_headers(), "accept-encoding": "identity"}
        self._session = get_session
        # httpx for huggingface_hub 1, httpx2 since; both have the names that are used here.
        self._library: Any = sys.modules[HfHubHTTPError.__mro__[1].__module__]

    @property
    def host(self) -> str:
        """The Hub's host, for messages."""
        return _host(self._endpoint)

    @property
    def has_token(self) -> bool:
        """Whether requests carry a token."""
        return "authorization" in self._headers

    def list_files(self, name: HubName) -> Listing:
        """Resolve the revision to a commit and list its files: one try, HubError when it fails."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        with self._failures(name, None):
            try:
                api = HfApi(endpoint=self._endpoint, library_name="draftpair", library_version=VERSION)
                info = api.model_info(
                    name.repository, revision=name.revision, timeout=self._timeout, files_metadata=True
                )
                sizes = {
                    file.rfilename: file.lfs.size if file.lfs else file.size for file in info.siblings or ()
                }
            except HfHubHTTPError:
                raise
            except HFValidationError:
                raise HubError(f"{name.repository} is no name that a repository can have") from None
            except (ValueError, TypeError, LookupError, AttributeError):
                raise self._strange(name) from None
        files = {file: size for file, size in sizes.items() if is_plain_name(file) and isinstance(size, int)}
        if not _COMMIT.fullmatch(info.sha or "") or len(files) != sum(map(is_plain_name, sizes)):
            raise self._strange(name)
        return Listing(name, str(info.sha), files)

    def url(self, name: HubName, commit: str, file: str) -> str:
        """The address of a file at a commit."""
        from huggingface_hub import hf_hub_url

        return hf_hub_url(name.repository, file, revision=commit, endpoint=self._endpoint)

    @contextmanager
    def get(self, url: str, begin: int, end: int, name: HubName, file: str) -> Iterator[Answer]:
        """Ask for bytes `begin` to `end` of what lies at `url`, redirects followed; HubError when that fails.

        Also what breaks while the chunks are read is a HubError.
        """
        from huggingface_hub import hf_raise_for_status

        linked_etag = commit = None
        with self._failures(name, file):
            for _ in range(_MAX_REDIRECTS):
                with self._ask(url, begin, end) as response:
                    linked_etag = response.headers.get("x-linked-etag") or linked_etag
                    commit = response.headers.get("x-repo-commit") or commit
                    if response.has_redirect_location:
                        url = self._target(url, response.headers["location"])
                        continue
                    hf_raise_for_status(response)
                    yield Answer(
                        url,
                        response.status_code,
                        response.headers,
                        _plain(response.headers.get("etag")),
                        _plain(linked_etag),
                        commit,
                        response.iter_raw(),
                    )
                    return
        raise HubError(f"{self.host} redirects {file} of {name} in circles")

    def is_elsewhere(self, url: str) -> bool:
        """Whether an address is not the Hub's own: a storage host that it redirects to."""
        return _origin(url) != _origin(self._endpoint)

    def _ask(self, url: str, begin: int, end: int) -> Any:
        headers = {**self._headers, "range": f"bytes={begin}-{end - 1}"}
        if self.is_elsewhere(url):
            headers.pop("authorization", None)
        return self._session().stream(
            "GET", url, headers=headers, timeout=self._timeout, follow_redirects=False
        )

    def _target(self, url: str, location: str) -> str:
        target = urljoin(url, location)
        if _origin(target) is None or (url.startswith("https:") and not target.startswith("https:")):
            raise HubError(f"{_host(url)} redirects to an address that is not safe to follow")
        return target

    def _strange(self, name: HubName) -> HubError:
        return HubError(
            f"{self.host} answers with something that is no list of the files of {name}",
            "Is HF_ENDPOINT a Hub, and does the network want a log-in first?",
        )

    @contextmanager
    def _failures(self, name: HubName, file: str | None) -> Iterator[None]:
        """What the library raises, as HubErrors about a file of a repository, or about its list of files."""
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        try:
            yield
        except HfHubHTTPError as error:
            raise self._refusal(error, name, file) from None
        except OfflineModeIsEnabled:
            raise HubError(
                f"{name} is on the Hub, and HF_HUB_OFFLINE is set", f"Unset it, or: {name.download}"
            ) from None
        except self._library.HTTPError as error:
            raise self._broken(error) from None
        except self._library.InvalidURL:
            raise HubError(f"{self.host} gives an address that cannot be used for {file or name}") from None

    def _broken(self, error: Exception) -> HubError:
        """A request that got no answer, or not the whole of it."""
        request = getattr(error, "_request", None)
        host = _host(str(request.url)) if request is not None else self.host
        hint = "Check the network, a proxy, and HF_ENDPOINT; with HF_HUB_OFFLINE=1 only the cache is used."
        if isinstance(error, self._library.ConnectError):
            return HubError(f"{host} cannot be reached: {error}", hint, again=True)
        if isinstance(error, self._library.TimeoutException):
            waited = f"{host} did not answer within {self._timeout:g} seconds"
            return HubError(waited, "HF_HUB_DOWNLOAD_TIMEOUT sets how long to wait.", again=True)
        if isinstance(error, self._library.TransportError):
            return HubError(f"the connection to {host} broke", hint, again=True)
        return HubError(f"{host} cannot be read from: {type(error).__name__}", hint)

    def _refusal(self, error: Any, name: HubName, file: str | None) -> HubError:
        """A request that was answered, with an error."""
        from huggingface_hub import errors

        status, url = int(error.response.status_code), str(error.response.request.url)
        what, wait = f"{file} of {name}" if file else f"{name}", _wait(error.response.headers)
        if self.is_elsewhere(url):
            # Signed addresses expire, so the next try asks the Hub for a new one.
            stored = f"{_host(url)}, which stores {what}, answered {status}"
            return HubError(stored, "Try again later.", again=True, wait=wait)
        if status in _TRY_LATER:
            return self._later(status, what, wait)
        if isinstance(error, errors.RevisionNotFoundError):
            return HubError(
                f"{name.repository} on {self.host} has no revision {name.revision or 'main'!r}",
                "Give a branch, a tag or a commit that is there, or none for the default branch.",
            )
        if isinstance(error, errors.RemoteEntryNotFoundError):
            return HubError(f"{self.host} lists {what} and does not have it", "Try again later.")
        if isinstance(error, errors.DisabledRepoError):
            return HubError(f"{name.repository} is disabled on {self.host}")
        if isinstance(error, errors.GatedRepoError):
            gated = f"{name.repository} is gated, and access was refused ({status})"
            return HubError(gated, self._terms(name))
        if isinstance(error, errors.RepositoryNotFoundError) or (status == 404 and not file):
            return self._not_there(name)
        if status == 401:
            return HubError(f"{self.host} refuses access to {what} (401)", self._log_in())
        if status == 403:
            return HubError(f"{self.host} refuses access to {what} (403)", self._terms(name))
        return HubError(f"{self.host} answered {status} for {what}")

    def _later(self, status: int, what: str, wait: float | None) -> HubError:
        if status != 429:
            return HubError(
                f"{self.host} answered {status} for {what}", "Try again later.", again=True, wait=wait
            )
        hint = "Try again in a few minutes" + (
            "." if self.has_token else f"; with a token the limits are higher: {_LOGIN}."
        )
        return HubError(
            f"{self.host} refuses more requests for now (429), at {what}", hint, again=True, wait=wait
        )

    def _not_there(self, name: HubName) -> HubError:
        """The Hub does not tell a repository that is not there from one that is not for this user."""
        whose = "that the token of this machine may read" if self.has_token else "that is open to everyone"
        message = f"{name} is no path here, and {self.host} has no repository {name.repository} {whose}"
        return HubError(message, self._log_in())

    def _log_in(self) -> str:
        if self.has_token:
            return "Check the spelling, and whether the token is valid and may read it: `hf auth whoami`."
        return f"Check the spelling; a private repository needs a token: {_LOGIN}."

    def _terms(self, name: HubName) -> str:
        where = f"{urlsplit(self._endpoint).scheme}://{self.host}/{name.repository}"
        return f"Accept its terms at {where}, then {_LOGIN} with a token that may read it."


def _headers() -> dict[str, str]:
    """Those of huggingface_hub, with the user's token if there is one."""
    from huggingface_hub import errors

    # Versions before 2 do not know log-in by a CI provider.
    no_log_in: type[Exception] = getattr(errors, "OIDCError", OSError)
    try:
        headers: dict[str, str] = _utils().build_hf_headers(library_name="draftpair", library_version=VERSION)
        headers.get("authorization", "").encode("ascii")
    except (OSError, ValueError, no_log_in) as error:
        detail = error if isinstance(error, (OSError, no_log_in)) else "it holds characters that no token has"
        hint = "Set HF_TOKEN anew, or run `hf auth login` again."
        raise ToolError(f"the token for the Hub cannot be used: {detail}", hint) from None
    return headers


def _utils() -> Any:
    """huggingface_hub.utils, whose types do not say which of its names are public."""
    return import_module("huggingface_hub.utils")


def _origin(url: str) -> tuple[str, str, int] | None:
    """Scheme, host and port: who gets a request. None for what is no address on the web."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    default = {"http": 80, "https": 443}.get(parts.scheme)
    if default is None or not parts.hostname:
        return None
    return parts.scheme, parts.hostname.lower(), port or default


def _host(url: str) -> str:
    """The host, with a port that is not the usual one; neither path nor password."""
    parts = urlsplit(url)
    return (parts.hostname or "the Hub") + (f":{parts.port}" if parts.port else "")


def _plain(etag: str | None) -> str | None:
    """An ETag without its quotes, and without the mark of a weak one."""
    return etag.removeprefix("W/").strip('"') if etag else None


def _wait(headers: Mapping[str, str]) -> float | None:
    """How many seconds the server asks to wait, None when it does not say."""
    from email.utils import parsedate_to_datetime

    text = headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(0.0, (parsedate_to_datetime(text) - datetime.now(timezone.utc)).total_seconds())
    except (ValueError, TypeError):
        limit = _utils().parse_ratelimit_headers(headers)
        return float(limit.reset_in_seconds) if limit is not None and limit.remaining == 0 else None
