"""The command line: options in, one call, a report out. Each command is a file of its own, found by name.

Data goes to stdout and everything else to stderr. Exit codes: 0 done, 1 the answer is no, 2 wrong usage,
3 could not look, 130 interrupted, 128 + n ended by signal n.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from pkgutil import iter_modules
from types import FrameType

import click

from draftpair.cli._streams import ReaderGone, prepare, show
from draftpair.errors import ToolError
from draftpair.version import VERSION


class _Commands(click.Group):
    """Finds a command in the module of its name, and imports only the one that is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(m.name.replace("_", "-") for m in iter_modules(__path__) if not m.name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = import_module(f"{__name__}.{cmd_name.replace('-', '_')}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, _SUMMARIES.get(name, "")) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


# Written here so that --help imports no command; a test holds them against the commands' own help.
_SUMMARIES = {
    "attach": "Put a split head back into a target that was converted or fine-tuned without it.",
    "bench": "Measure a pair against its target alone, in turn, and compare the token ids.",
    "check": "Whether an index or a config.json is sound, as far as it can be told without the weights.",
    "env": "Versions, device and cache, for bug reports.",
    "families": "The families of drafters that draftpair knows.",
    "generate": "Run a target, alone or with its drafter.",
    "inspect": "What a checkpoint holds, whether its head is whole, and how much memory it needs.",
    "quickstart": "Build a tiny pair offline and take it through every step.",
    "schema": "The JSON schemas of the reports and families.",
    "split-mtp": "Cut the MTP head out of a raw checkpoint into a drafter folder.",
    "validate": "Whether a checkpoint is sound, or a target and a drafter are safe to run together.",
}


@click.command(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(VERSION, prog_name="draftpair")
def cli() -> None:
    """Cut out, check and run the drafters of speculative-decoding pairs on MLX.

    MODEL, TARGET and DRAFTER are each a folder, a .safetensors file, owner/name, owner/name@revision or
    hf://owner/name[@revision].

    Exit codes: 0 done; 1 looked, and the answer is no; 2 wrong usage; 3 could not look; 130 interrupted.
    """


def main(args: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with the code of the table above."""
    prepare()
    # Headers and tokenizers are hundreds of thousands of small objects that live until the end: to look among them for
    # garbage every few hundred would take a sixth of the time of a command.
    gc.set_threshold(200_000)
    for number in _ENDINGS:
        # `nohup` ignores the hangup on our behalf.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _end)
    sys.exit(run(args))


_ENDINGS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class _Ended(BaseException):
    """A request to end: as an exception, it lets a split remove what it has not finished."""


def _end(number: int, frame: FrameType | None) -> None:
    for other in _ENDINGS:  # a second request must not cut the removal short
        signal.signal(other, signal.SIG_IGN)
    raise _Ended(number)


def run(args: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code; errors are told on stderr."""
    try:
        outcome = cli.main(args, standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ToolError as error:
        tell(error)
        return error.exit_code
    except ReaderGone:
        return 0
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        return 130
    except _Ended as request:
        number = request.args[0]
        click.echo(f"terminated by {signal.Signals(number).name}", err=True)
        return 128 + int(number)
    except Exception as error:
        if os.environ.get("DRAFTPAIR_DEBUG"):
            raise
        what = f"this is a bug in draftpair: {type(error).__name__}: {error}"
        tell(ToolError(what, "run again with DRAFTPAIR_DEBUG=1 for the traceback, and report it"))
        return 3
    return outcome if isinstance(outcome, int) else 0


def tell(error: ToolError) -> None:
    """The error on stderr, its hint on a line of its own."""
    show([f"error: {error.message}", *([f"hint: {error.hint}"] if error.hint else [])], err=True)
