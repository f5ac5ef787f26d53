"""Swaps two folders: atomically where the system can, else by renames that are undone on failure."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import sys
from contextlib import ExitStack
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2  # Linux, renameat2(2)
_RENAME_SWAP = 2  # macOS, renamex_np(2)
_CANNOT = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


def exchange(first: Path, second: Path) -> None:
    """Afterwards each path names what the other named. Raises OSError, with both as they were."""
    try:
        swapped = _swap_call(os.fsencode(first), os.fsencode(second))
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        swapped = False
    if not swapped:
        exchange_by_renames(first, second)


def exchange_by_renames(first: Path, second: Path) -> None:
    """The exchange in three renames; between the first and the second, `second` does not exist.

    A run killed there leaves what `second` held beside it, under a name with `draftpair-old`.
    """
    aside = second.with_name(f".{second.name[:40]}.draftpair-old-{secrets.token_hex(6)}")
    os.rename(second, aside)
    with ExitStack() as undo:
        undo.callback(os.rename, aside, second)
        os.rename(first, second)
        undo.pop_all()
    os.rename(aside, first)


def _swap_call(first: bytes, second: bytes) -> bool:
    """The system's own exchange; False when this C library has none."""
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "darwin":
        call, arguments = getattr(libc, "renamex_np", None), (first, second, _RENAME_SWAP)
    else:
        at = ctypes.c_int(_AT_FDCWD)
        call, arguments = getattr(libc, "renameat2", None), (at, first, at, second, _RENAME_EXCHANGE)
    if call is None:
        return False
    if call(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), os.fsdecode(second))
    return True
