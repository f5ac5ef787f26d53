"""``draftpair bench``: plain and speculative decoding in turn."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from draftpair.cli._common import emit, json_option
from draftpair.cli._generation import drafting_of, options_of, pair_options, sampling_options


@click.command("bench")
@pair_options
@click.option(
    "--prompts",
    type=click.Path(dir_okay=False),
    metavar="FILE",
    help='A prompt a line, or {"prompt": TEXT} a line  [default: an enumeration, code and prose]',
)
@click.option(
    "--runs",
    type=click.IntRange(min=1),
    default=3,
    show_default=True,
    metavar="N",
    help="Runs of each kind and prompt, besides one for warming up.",
)
@sampling_options
@click.option(
    "--svg", type=click.Path(path_type=Path), metavar="FILE", help="Draw the figures as an SVG image, too."
)
@json_option
def command(prompts: str | None, runs: int, svg: Path | None, as_json: bool, **params: Any) -> int:
    """Measure a pair against its target alone, in turn, and compare the token ids.

    Speeds are medians of tokens a second after the first token, with the slowest and the fastest run. Figures on
    acceptance are sums over the runs.

    \b
    Exit codes: 0 the token ids are the same in every run, or the exactness probe declined and only plain decoding
    was measured; 1 they differ.

    \b
    Example:
      draftpair bench --model ./GLM-4.7-Flash-4bit --draft-model ./GLM-4.7-Flash-MTP-4bit \\
        --max-tokens 128 --svg bench.svg
    """
    from draftpair.api import bench
    from draftpair.report.bars import can_show_blocks
    from draftpair.report.bench import bench_text
    from draftpair.report.svg import check_destination, write_svg

    if svg is not None:
        check_destination(svg)  # before a measurement that may take an hour, not after it
    report = bench(
        params["model"],
        **drafting_of(params),
        prompts=prompts,
        runs=runs,
        options=options_of(params),
        on_run=_progress(runs),
    )
    blocks = can_show_blocks(sys.stdout.encoding)
    emit(report, as_json, lambda report: bench_text(report, blocks))
    if svg is not None:
        write_svg(report, svg)
    return 0 if report["total"]["identical"] else 1


def _progress(runs: int) -> Callable[[int, str, int], None]:
    """Says on stderr what is being run, where somebody looks."""

    def tell(prompt: int, kind: str, run: int) -> None:
        if sys.stderr.isatty():
            what = f"run {run} of {runs}" if run else "warming up"
            click.echo(f"prompt {prompt}: {kind}, {what}", err=True)

    return tell
