"""Takes a tiny pair through every step, offline: inspect, split, validate, generate, as on a real checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftpair import api
from draftpair.errors import Refused
from draftpair.report.text import generate_text, inspect_text, split_text, validate_text
from draftpair.runtime.options import Options
from draftpair.toy import write_toy

PROMPT = "abc"


def quickstart(folder: Path) -> Iterator[str]:
    """The lines to show. Writes the toy and its drafter below ``folder``.

    Raises Refused when the pair is not safe, or when the drafter changes a single token.
    """
    raw, target, drafter = folder / "raw", folder / "target", folder / "drafter-4bit"
    write_toy(raw, with_head=True)
    write_toy(target, with_head=False)
    yield from _step("inspect RAW", inspect_text(api.inspect(raw)))
    yield from _step(
        "split-mtp --model RAW --output DRAFTER --q-bits 4", split_text(api.split_mtp(raw, drafter, q_bits=4))
    )
    verdict = api.validate(target, drafter)
    yield from _step("validate TARGET DRAFTER", validate_text(verdict))
    if verdict["verdict"] not in ("proven", "compatible"):
        raise Refused(f"the quickstart pair is {verdict['verdict']}: please report this")
    options = Options(max_tokens=40, chat_template=False)
    plain = api.generate(target, PROMPT, options=options)
    yield from _step(f"generate --model TARGET --prompt {PROMPT!r}", _generated(plain))
    pair = api.generate(target, PROMPT, drafter, draft_block_size=4, options=options)
    command = f"generate --model TARGET --draft-model DRAFTER --draft-block-size 4 --prompt {PROMPT!r}"
    yield from _step(command, _generated(pair))
    if plain["tokens"] != pair["tokens"]:
        raise Refused("the drafter changed the output of the quickstart pair: please report this")
    yield f"All {len(pair['tokens'])} tokens are the same with and without the drafter."


def _step(command: str, lines: Iterator[str]) -> Iterator[str]:
    yield f"$ draftpair {command}"
    yield from (f"  {line}" for line in lines)
    yield ""


def _generated(report: dict[str, Any]) -> Iterator[str]:
    yield report["text"]
    yield from generate_text(report)
