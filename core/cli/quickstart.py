"""``draftpair quickstart``: every step on a tiny pair, offline."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import click


@click.command("quickstart")
@click.option(
    "--keep", metavar="DIR", type=click.Path(path_type=Path), help="Keep the tiny pair in this new folder."
)
def command(keep: Path | None) -> None:
    """Build a tiny pair offline and take it through every step.

    Needs mlx and mlx-lm: pip install "draftpair[cpu,run]" on Linux, "draftpair[run]" on macOS.
    """
    from draftpair.errors import Usage
    from draftpair.quickstart import quickstart

    if keep is not None and keep.exists():
        raise Usage(f"{keep} exists", hint="give --keep the name of a folder that does not")
    with TemporaryDirectory() as scratch:
        for line in quickstart(keep or Path(scratch)):
            click.echo(line)
