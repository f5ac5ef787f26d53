"""Remembers what was found out about a checkpoint for as long as it is open: its files are read once.

A checkpoint is what its headers were when it was opened; what is derived from it does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, TypeVar, cast
from weakref import WeakKeyDictionary

from draftpair.checkpoint.checkpoint import Checkpoint

if TYPE_CHECKING:
    from collections.abc import Hashable

Function = TypeVar("Function", bound=Callable[..., object])


def per_checkpoint(function: Function) -> Function:
    """A function of a checkpoint, and of hashable values, that is carried out once for each.

    Its result must not be changed by who gets it. An error is not remembered.
    """
    known: WeakKeyDictionary[Checkpoint, dict[Hashable, object]] = WeakKeyDictionary()

    @wraps(function)
    def remembered(checkpoint: Checkpoint, *args: Hashable, **kwargs: Hashable) -> object:
        results = known.setdefault(checkpoint, {})
        key = (args, *sorted(kwargs.items()))
        if key not in results:
            results[key] = function(checkpoint, *args, **kwargs)
        return results[key]

    return cast("Function", remembered)
