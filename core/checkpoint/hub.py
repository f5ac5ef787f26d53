"""Where the local Hub cache keeps a repository; nothing here uses the network.

Layout: `models--owner--name/refs/<revision>` holds a commit, `snapshots/<commit>/` holds links to files.
"""

from __future__ import annotations

from pathlib import Path

from draftpair.checkpoint.index import is_plain_name
from draftpair.checkpoint.source import HubName
from draftpair.errors import ToolError


def cached_snapshot(name: HubName) -> tuple[Path, str]:
    """The snapshot folder of a cached repository and its commit; ToolError when it is not in the cache.

    The revision defaults to `main`. The cache's place is huggingface_hub's, so `HF_HOME` and
    `HF_HUB_CACHE` apply.
    """
    from huggingface_hub import constants

    folder = constants.REPO_ID_SEPARATOR.join(("models", *name.repository.split("/")))
    repository = Path(constants.HF_HUB_CACHE) / folder
    commit = _commit(repository, name.revision or constants.DEFAULT_REVISION)
    snapshot = repository / "snapshots" / commit
    if not is_plain_name(commit) or not snapshot.is_dir():
        raise _not_cached(name, repository, commit)
    return snapshot, commit


def commit_of(folder: Path) -> str | None:
    """The commit when `folder` is a snapshot in a Hub cache, else None."""
    parts = folder.absolute().parts[-3:]
    if len(parts) == 3 and parts[0].startswith("models--") and parts[1] == "snapshots":
        return parts[2]
    return None


def _commit(repository: Path, revision: str) -> str:
    """The commit that a branch or tag names in the cache; a commit names itself."""
    reference = repository / "refs" / revision
    try:
        return reference.read_text(encoding="utf-8").strip() or revision
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return revision
    except (OSError, UnicodeDecodeError) as error:
        raise ToolError(f"{reference} in the Hub cache cannot be read: {error}") from error


def _not_cached(name: HubName, repository: Path, commit: str) -> ToolError:
    download = f"hf download {name.repository}" + (f" --revision {name.revision}" if name.revision else "")
    hint = f"Download it first: {download}"
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
