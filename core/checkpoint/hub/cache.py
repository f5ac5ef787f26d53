"""Where the local Hub cache keeps a repository; nothing here uses the network.

Layout: `models--owner--name/refs/<revision>` holds a commit, `snapshots/<commit>/` holds links to files. The cache's
place is huggingface_hub's, so `HF_HOME`, `HF_HUB_CACHE` and `HF_ASSETS_CACHE` apply.
"""

from __future__ import annotations

from pathlib import Path

from draftpair.checkpoint.index import is_plain_name
from draftpair.checkpoint.source import HubName
from draftpair.errors import ToolError


def is_offline() -> bool:
    """Whether the user wants the Hub left alone: `HF_HUB_OFFLINE`."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def find_snapshot(name: HubName) -> tuple[Path, str] | None:
    """The snapshot folder of a cached repository at a revision and its commit; None when it is not in the cache.

    The revision defaults to `main`. A snapshot may hold a part of the files only.
    """
    repository, commit = _cached(name)
    snapshot = repository / "snapshots" / commit
    return (snapshot, commit) if is_plain_name(commit) and snapshot.is_dir() else None


def cached_snapshot(name: HubName) -> tuple[Path, str]:
    """As `find_snapshot`; ToolError when it is not in the cache."""
    found = find_snapshot(name)
    if found is None:
        raise _not_cached(name, *_cached(name))
    return found


def commit_of(folder: Path) -> str | None:
    """The commit when `folder` is a snapshot in a Hub cache, else None."""
    parts = folder.absolute().parts[-3:]
    if len(parts) == 3 and parts[0].startswith("models--") and parts[1] == "snapshots":
        return parts[2]
    return None


def spool_folder(name: HubName, commit: str) -> Path:
    """The folder for what is fetched of a commit, made if need be; it lies among the assets of the Hub's cache."""
    from huggingface_hub import cached_assets_path, constants

    try:
        assets = constants.HF_ASSETS_CACHE
        return Path(cached_assets_path("draftpair", _folder_name(name), commit, assets_dir=assets))
    except (OSError, ValueError) as error:
        detail = (error.strerror if isinstance(error, OSError) else None) or error
        raise ToolError(
            f"no folder for the fetched bytes can be made in {constants.HF_ASSETS_CACHE}: {detail}",
            "Set HF_ASSETS_CACHE or HF_HOME to a folder that you may write to.",
        ) from error


def _folder_name(name: HubName) -> str:
    return "--".join(("models", *name.repository.split("/")))


def _cached(name: HubName) -> tuple[Path, str]:
    """The repository's folder in the cache, and the commit that a revision names there; a commit names itself."""
    from huggingface_hub import constants

    repository = Path(constants.HF_HUB_CACHE) / _folder_name(name)
    revision = name.revision or constants.DEFAULT_REVISION
    reference = repository / "refs" / revision
    try:
        return repository, reference.read_text(encoding="utf-8").strip() or revision
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return repository, revision
    except (OSError, UnicodeDecodeError) as error:
        raise ToolError(f"{reference} in the Hub cache cannot be read: {error}") from error


def _not_cached(name: HubName, repository: Path, commit: str) -> ToolError:
    hint = f"HF_HUB_OFFLINE is set. Unset it, or download it where there is a network: {name.download}"
    if not repository.is_dir():
        return ToolError(f"{name} is no path here, and {name.repository} is not in the Hub cache", hint)
    snapshots = repository / "snapshots"
    held = sorted(entry.name for entry in snapshots.iterdir()) if snapshots.is_dir() else []
    message = (
        f"{name} ({commit}) is not in the Hub cache, which holds {', '.join(held) or 'no snapshot'} of it"
    )
    return ToolError(
        message, f"{hint}, or name a commit that is there: {name.repository}@{held[0]}" if held else hint
    )
