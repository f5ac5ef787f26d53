"""Puts a whole folder in place at once, or not at all.

Promises: work goes on in a temporary folder beside the destination, on the same file system; on any
exception, an interrupt included, that folder and the parents made for it are gone and the destination is
as it was. On success everything is on disk before one rename, or one atomic exchange when the
destination exists. A destination that anybody changed in the meantime is left as they made it, and the
run fails: of several runs into one destination one wins and nothing is mixed. Once the folder is in place only the
flush of its parent is left; should that fail, the error says that the folder is there.

A run that was killed leaves its temporary folder; the next run into the same destination removes it. It
can tell, because a living run holds a lock on its folder.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from draftpair.checkpoint.exchange import exchange
from draftpair.errors import ToolError, Usage

try:
    import fcntl
except ImportError:  # not on Windows, where stale folders are left alone
    fcntl = None  # type: ignore[assignment]

# A folder younger than this may belong to a run that has not locked it yet.
_SETTLED_SECONDS = 60

_State = tuple[int, int, frozenset[tuple[str, int, int, int]]]


@contextmanager
def staged_folder(
    destination: Path, replace: bool, superseded: Callable[[str], bool] = lambda name: False
) -> Iterator[Path]:
    """Gives a new, empty folder that becomes `destination` when the block ends without an exception.

    When the destination exists it must be a folder of plain files and symbolic links: those that the new
    folder does not have, and that `superseded` does not claim by name, are carried over. Without
    `replace` only a destination that is missing or empty is accepted.

    Raises Usage for a destination that can never be used, ToolError when the file system refuses or the
    destination changed while the block ran; or, with the folder in place, when that may not have reached the disk.
    """
    destination = _resolved(destination)
    before = destination_state(destination)
    if before is not None and before[2] and not replace:
        raise Usage(f"{destination} exists and is not empty", hint="choose another folder, or replace it")
    made: list[Path] = []
    staged: Path | None = None
    try:
        with _reported(f"cannot make the folder {destination.parent}"):
            _make_parents(destination.parent, made)
        _remove_stale(destination)
        staged = _sibling(destination, "new")
        with _reported(f"cannot make a folder in {destination.parent}"):
            os.mkdir(staged)
        with _locked(staged):
            yield staged
            with _reported(f"cannot put {destination} in place"):
                _put_in_place(staged, destination, before, superseded)
        made = []
        with _reported(f"{destination} is in place, but the disk has not confirmed it"):
            _sync_folder(destination.parent)
    finally:
        if staged is not None:
            _remove(staged)
        for folder in made:
            with suppress(OSError):
                folder.rmdir()


def final_path(path: Path, destination: Path) -> Path:
    """Where a file of the temporary folder of `destination` is to lie in the end; any other path as it is."""
    prefix = _prefix(_resolved(destination), "new")
    if path.name.startswith(prefix):
        return destination
    return destination / path.name if path.parent.name.startswith(prefix) else path


def _resolved(path: Path) -> Path:
    """The path with every link of its parents followed, and a link at its end left alone.

    `link/../out` lies beside what the link names, not beside the link.
    """
    if path.name in ("", ".."):
        return Path(os.path.realpath(path))
    return Path(os.path.realpath(path.parent)) / path.name


def destination_state(destination: Path) -> _State | None:
    """What is at `destination` now, to be compared later; None when nothing is.

    Raises Usage for a symbolic link, a file, a mount point, the current folder, or a folder that may not be
    changed or holds anything but plain files and symbolic links; ToolError for one that cannot be listed.
    """
    try:
        found = os.lstat(destination)
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise Usage(f"{destination}: a parent of it is not a folder") from error
    except OSError as error:
        raise ToolError(f"{destination} cannot be examined: {error.strerror}") from error
    if stat.S_ISLNK(found.st_mode):
        raise Usage(
            f"{destination} is a symbolic link", hint="name the folder itself; no link is followed on write"
        )
    if not stat.S_ISDIR(found.st_mode):
        raise Usage(f"{destination} exists and is not a folder", hint="choose another output folder")
    for what, is_it in (("a mount point", os.path.ismount), ("the current folder", _is_current_folder)):
        if is_it(destination):
            raise Usage(f"{destination} is {what} and cannot be replaced", hint="name a folder inside it")
    # A folder whose files cannot be removed could be exchanged, and would then stay under its temporary name.
    if not os.access(destination, os.W_OK | os.X_OK):
        raise Usage(f"{destination} may not be changed by this user", hint="choose another output folder")
    return found.st_dev, found.st_ino, frozenset(_entries(destination))


def _is_current_folder(path: Path) -> bool:
    with suppress(OSError):
        return os.path.samefile(path, os.curdir)
    return False


def _entries(folder: Path) -> Iterator[tuple[str, int, int, int]]:
    try:
        with os.scandir(folder) as listing:
            entries = [(entry.name, entry.stat(follow_symlinks=False)) for entry in listing]
    except OSError as error:
        raise ToolError(
            f"{folder} cannot be listed ({error.strerror}), so nothing can be said about what is in it",
            hint="choose another output folder, or make this one readable",
        ) from error
    others = sorted(n for n, s in entries if not (stat.S_ISREG(s.st_mode) or stat.S_ISLNK(s.st_mode)))
    if others:
        raise Usage(
            f"{folder} holds {others[0]!r}, which is not a plain file"
            + (f", and {len(others) - 1} more" * (len(others) > 1)),
            hint="a folder that is replaced may hold only plain files; choose another output folder",
        )
    for name, found in entries:
        yield name, found.st_ino, found.st_size, found.st_mtime_ns


def _put_in_place(
    staged: Path, destination: Path, before: _State | None, superseded: Callable[[str], bool]
) -> None:
    if before is None:
        _sync(staged)
        try:
            os.rename(staged, destination)
        except OSError as error:
            if os.path.lexists(destination):
                raise _changed(destination) from error
            raise
    else:
        with _locked(destination, wait=True):  # of several runs one at a time; the others find it changed
            if destination_state(destination) != before:
                raise _changed(destination)
            _carry_over(destination, staged, superseded)
            _sync(staged)
            exchange(staged, destination)
            _confirm(staged, destination, before)


def _confirm(old: Path, destination: Path, before: _State) -> None:
    """After the exchange: what was taken out must be what was there at the start, or it goes back."""
    with suppress(ToolError):  # as for a folder that was put into it
        if destination_state(old) == before:
            return
    try:
        exchange(old, destination)
    except OSError as error:
        kept = _sibling(destination, "old")
        os.rename(old, kept)
        raise ToolError(f"{destination} changed during the run; what it held is now in {kept}") from error
    raise _changed(destination)


def _carry_over(destination: Path, staged: Path, superseded: Callable[[str], bool]) -> None:
    """Links or copies the files the new folder does not have; a symbolic link stays a symbolic link."""
    os.chmod(staged, stat.S_IMODE(os.lstat(destination).st_mode) | stat.S_IRWXU)
    for entry in sorted(destination.iterdir()):
        new = staged / entry.name
        if os.path.lexists(new) or superseded(entry.name):
            continue
        if entry.is_symlink():
            os.symlink(os.readlink(entry), new)
            continue
        try:
            os.link(entry, new)
        except OSError:
            shutil.copy2(entry, new)


def _changed(destination: Path) -> ToolError:
    return ToolError(
        f"{destination} changed while this run was writing; it is left as it is now",
        hint="another run may be writing there; run again, or choose another output folder",
    )


def _make_parents(folder: Path, made: list[Path]) -> None:
    """Makes the missing folders up to `folder`, and puts those it makes into `made`, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        made.insert(0, path)
        try:
            path.mkdir()
        except FileExistsError:  # another run was faster
            made.remove(path)


def _remove(folder: Path) -> None:
    """Removes a folder as far as it can be; one interrupt does not cut that short."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _prefix(destination: Path, kind: str) -> str:
    return f".{destination.name[:40]}.draftpair-{kind}-"


def _sibling(destination: Path, kind: str) -> Path:
    return destination.parent / (_prefix(destination, kind) + secrets.token_hex(6))


def _remove_stale(destination: Path) -> None:
    """Removes temporary folders of dead runs into this destination: settled, and locked by nobody."""
    if fcntl is None:
        return
    prefix = _prefix(destination, "new")
    with suppress(OSError):
        for name in os.listdir(destination.parent):
            folder = destination.parent / name
            if not name.startswith(prefix) or folder.is_symlink():
                continue
            with suppress(OSError), _locked(folder, strict=True):
                if time.time() - folder.stat().st_mtime > _SETTLED_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path, strict: bool = False, wait: bool = False) -> Iterator[None]:
    """Holds a lock on the folder, with `wait` once nobody else does. To get none is no error unless `strict`."""
    if fcntl is None:
        yield
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError:
            if strict:
                raise
        yield
    finally:
        os.close(fd)


def _sync(folder: Path) -> None:
    """Flushes the folder's plain files, then the folder itself."""
    for path in folder.iterdir():
        if path.is_symlink():
            continue
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    try:
        fd = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return  # it may be written and not read: nothing can be asked of it
    try:
        os.fsync(fd)
    except OSError as error:
        # Some network file systems cannot flush a folder; the files themselves are on disk.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(fd)


@contextmanager
def _reported(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ToolError(f"{what}: {error.strerror or error}") from error
