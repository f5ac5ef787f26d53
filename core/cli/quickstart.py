"""``draftpair quickstart``: every step on a tiny pair, offline."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import click

from draftpair.cli._streams import show


@click.command("quickstart")
@click.option(
    "--keep", metavar="DIR", type=click.Path(path_type=Path), help="Keep the tiny pair in this new folder."
)
def command(keep: Path | None) -> None:
    """Build a tiny pair offline and take it through every step.

    Needs mlx and mlx-lm: pip install "draftpair[cpu,run]" on Linux, "draftpair[run]" on macOS.
    """
    from draftpair.api import require_runtime
    from draftpair.errors import ToolError, Usage
    from draftpair.quickstart import quickstart

    require_runtime()
    if keep is not None and keep.expanduser().exists():
        raise Usage(f"{keep} exists", hint="give --keep the name of a folder that does not")
    try:
        with TemporaryDirectory() as scratch:
            show(quickstart(keep.expanduser() if keep else Path(scratch)))
    except OSError as error:
        raise ToolError(
            f"{error.filename}: {error.strerror}", hint="give --keep a folder that can be made"
        ) from error
