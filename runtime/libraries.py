"""Errors of the libraries that read a checkpoint's files, told as errors of the checkpoint.

mlx-lm, transformers and chat templates meet a file's content deep inside and fail with whatever the code there
raises. Nothing of ours runs inside these blocks, so such an error is the file's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from draftpair.checkpoint.wording import printable
from draftpair.errors import Refused, ToolError

# What code of other projects, and MLX, raises for files and numbers that it cannot take.
RAISED = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, TypeError,
           ValueError)  # fmt: skip


@contextmanager
def reading(what: str, hint: str, also: type[Exception] = ValueError) -> Iterator[None]:
    """Raise Refused, "<what>: <the error>", for an error of a library; ``also`` adds its own class of errors."""
    try:
        yield
    except ToolError:
        raise
    except (*RAISED, also) as error:
        text = " ".join(str(error).split()) or type(error).__name__
        raise Refused(f"{what}: {printable(text, 300)}", hint) from error
