"""The exactness probe: does a verify block give the same logit bytes as the same tokens decoded one by one?

Which kernel MLX picks depends on the number of rows, on the device and on the quantization, so this is measured
on the loaded model before the first round. Equal bytes mean that speculation emits what plain decoding does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from draftpair.errors import Usage
from draftpair.runtime.interfaces import Target
from draftpair.runtime.options import is_on

ALLOW_VARIABLE = "MLXCEL_MTP_ALLOW_INEXACT"
PROMPT_VARIABLE = "MLXCEL_MTP_PROBE_PROMPT_LEN"
LONGEST_PROMPT = 32_768
DRAWS = 3
BLOCKS = 4  # a difference may show only once earlier blocks have fed the cache

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Exactness:
    """``verdict`` is exact, inexact or not_run; ``detail`` says why, in one sentence."""

    verdict: str
    detail: str

    def report(self) -> dict[str, str]:
        return {"verdict": self.verdict, "detail": self.detail}


@dataclass(frozen=True)
class Gate:
    """Whether to speculate, and the probe's result."""

    engage: bool
    exactness: Exactness


def gate(target: Target, block_size: int, environ: Mapping[str, str]) -> Gate:
    """Probe, and decide: exact pairs speculate, others decode plainly unless the environment overrides."""
    found = probe(target, block_size, prompt_length(environ))
    if found.verdict == "exact":
        return Gate(True, found)
    if is_on(environ.get(ALLOW_VARIABLE)):
        log.warning("%s; speculating all the same, because %s is set", found.detail, ALLOW_VARIABLE)
        return Gate(True, Exactness(found.verdict, f"{found.detail}; overridden by {ALLOW_VARIABLE}"))
    log.warning("%s; decoding plainly", found.detail)
    return Gate(False, Exactness(found.verdict, f"{found.detail}; declined to plain decoding"))


def probe(target: Target, block_size: int, prompt_tokens: int = 8) -> Exactness:
    """Compare every width from 2 to ``block_size``, narrowest first: rounds narrow near the token budget.

    Per draw one chain of ``4 * block_size`` single-token steps, and per width four consecutive blocks, which
    the head of that chain answers. Ends at the first difference. Resets the target.
    """
    if block_size < 2 or target.vocab_size < 2:
        return Exactness("not_run", f"width {block_size} and vocabulary {target.vocab_size} leave no choice")
    for draw in range(DRAWS):
        prompt, tokens = probe_ids(draw, target.vocab_size, prompt_tokens, BLOCKS * block_size)
        chain = _chain(target, prompt, tokens)
        for width in range(2, block_size + 1):
            difference = _compare(target, prompt, tokens, width, chain)
            if difference:
                return Exactness("inexact", f"draw {draw + 1} of {DRAWS}, width {width}: {difference}")
    target.reset()
    widths = "width 2" if block_size == 2 else f"widths 2 to {block_size}"
    return Exactness("exact", f"{DRAWS} draws of {BLOCKS} blocks at {widths}: all logit bytes equal")


def probe_ids(draw: int, vocab_size: int, prompt: int, block: int) -> tuple[list[int], list[int]]:
    """Prompt and block ids of a draw, the same as mlxcel's probe takes."""
    salt = 977 * draw + 1
    return (
        [(7 * i + 1 + salt) % vocab_size for i in range(prompt)],
        [(13 * i + 3 + salt) % vocab_size for i in range(block)],
    )


def prompt_length(environ: Mapping[str, str]) -> int:
    """Prompt tokens of the probe: ``MLXCEL_MTP_PROBE_PROMPT_LEN``, or 8."""
    text = environ.get(PROMPT_VARIABLE) or "8"
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and 1 <= int(text) <= LONGEST_PROMPT):
        raise Usage(
            f"{PROMPT_VARIABLE} is {text[:20]!r}; expected a number of tokens from 1 to {LONGEST_PROMPT:,}"
        )
    return int(text)


def _chain(target: Target, prompt: list[int], tokens: list[int]) -> list[mx.array]:
    """Logits [1, V] after each token, by single-token decoding."""
    target.reset()
    target.prefill(prompt)
    rows = []
    for token in tokens:
        rows.append(target.decode(mx.array([token])))
        mx.eval(rows[-1])
    return rows


def _compare(
    target: Target, prompt: list[int], tokens: list[int], width: int, chain: list[mx.array]
) -> str | None:
    """The first difference between four blocks of ``width`` rows and the chain, or None."""
    target.reset()
    target.prefill(prompt)
    for begin in range(0, BLOCKS * width, width):
        logits, _ = target.verify(tokens[begin : begin + width])
        for row in range(width):
            differing, total = _differing_bytes(logits[:, row], chain[begin + row])
            if differing:
                return f"position {begin + row}: {differing} of {total} logit bytes differ"
    return None


def _differing_bytes(left: mx.array, right: mx.array) -> tuple[int, int]:
    if left.dtype != right.dtype:
        return left.nbytes, left.nbytes
    left, right = mx.contiguous(left).view(mx.uint8), mx.contiguous(right).view(mx.uint8)
    differing: Any = (left != right).sum().item()
    return int(differing), left.size
