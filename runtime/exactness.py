"""The exactness probe: does a verify block give the same logit bytes as the same tokens decoded one by one?

Which kernel MLX picks depends on the number of rows, on the device and on the quantization, so this is measured
on the loaded model before the first round. Equal bytes mean that speculation emits what plain decoding does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from draftpair.errors import Usage
from draftpair.runtime.interfaces import Target
from draftpair.runtime.options import is_on
from draftpair.runtime.rowwise import RowWise

ALLOW_VARIABLE = "MLXCEL_MTP_ALLOW_INEXACT"
PROMPT_VARIABLE = "MLXCEL_MTP_PROBE_PROMPT_LEN"
LONGEST_PROMPT = 32_768
DRAWS = 3
# MLX's GPU kernels attend in two passes from about 1,024 keys on; blocks and single steps pass that mark apart.
NEAR_TWO_PASSES = 1020
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
    """Whether to speculate, the probe's result, and the target to verify with: the one probed, or its row-wise form."""

    engage: bool
    exactness: Exactness
    target: Target


# From the fastest to the one that is exact on most backends.
AS_IT_COMES, ATTENTION_BY_ROWS, ALL_BY_ROWS = range(3)
WAYS = {ATTENTION_BY_ROWS: "attention row by row", ALL_BY_ROWS: "projections and attention row by row"}

# What was found in this process, and the way to verify: a server opens the same pair again and again.
_found: dict[tuple[object, ...], tuple[Exactness, int]] = {}


def gate(
    target: Target, block_size: int, environ: Mapping[str, str], key: tuple[str, ...] | None = None
) -> Gate:
    """Probe, and decide: exact targets verify drafts, others decode plainly unless the environment overrides.

    ``key`` names family, model and dtype; with one, the same question is answered once a process. A target that is
    not exact is tried again with its attention, and then its projections as well, row by row.
    """
    prompt = prompt_length(environ)
    question = (key, block_size, prompt, str(mx.default_device()))
    found, way = (key and _found.get(question)) or _try(target, block_size, prompt)
    if key:
        _found[question] = found, way
    used = _verifying(target, way)
    if found.verdict == "exact":
        return Gate(True, found, used)
    if is_on(environ.get(ALLOW_VARIABLE)):
        log.warning("%s; speculating all the same, because %s is set", found.detail, ALLOW_VARIABLE)
        return Gate(True, Exactness(found.verdict, f"{found.detail}; overridden by {ALLOW_VARIABLE}"), used)
    log.warning("%s; decoding plainly", found.detail)
    return Gate(False, Exactness(found.verdict, f"{found.detail}; declined to plain decoding"), used)


def _try(target: Target, block_size: int, prompt: int) -> tuple[Exactness, int]:
    """What the probe finds, and the first way to verify that it finds exact. The target is left as it came."""
    first = probe(target, block_size, prompt)
    if first.verdict != "inexact":
        return first, AS_IT_COMES
    came_by_rows = target.by_rows
    for way, words in WAYS.items():
        if way == ATTENTION_BY_ROWS and came_by_rows:
            continue
        used = _verifying(target, way)
        found = probe(used, block_size, prompt)
        if isinstance(used, RowWise):
            used.undo()
        target.by_rows = came_by_rows
        if found.verdict == "exact":
            log.warning("%s; verifying with %s, which is exact and slower", first.detail, words)
            return Exactness("exact", f"with {words}: {found.detail}; as a block, {first.detail}"), way
    return first, AS_IT_COMES


def _verifying(target: Target, way: int) -> Target:
    """The target set to verify in that way."""
    target.by_rows = target.by_rows or way != AS_IT_COMES
    return cast(Target, RowWise(target)) if way == ALL_BY_ROWS else target


def probe(target: Target, block_size: int, prompt_tokens: int = 8) -> Exactness:
    """Compare every width from 1 to ``block_size``, narrowest first: rounds narrow near the token budget, and to the
    bonus token alone where nothing is proposed.

    Per draw one chain of ``4 * block_size`` single-token steps, and per width four consecutive blocks, which
    the head of that chain answers; one more draw for each longer prompt that the target names. Ends at the first
    difference. Resets the target.
    """
    if block_size < 2 or target.vocab_size < 2:
        return Exactness("not_run", f"width {block_size} and vocabulary {target.vocab_size} leave no choice")
    # The draws differ in their ids; a longer prompt is about its length, and one draw of it is dear enough.
    runs = [(draw, prompt_tokens) for draw in range(DRAWS)]
    runs += [(DRAWS, length) for length in _lengths(target) if length > prompt_tokens]
    for number, (draw, length) in enumerate(runs, 1):
        prompt, tokens = probe_ids(draw, target.vocab_size, length, BLOCKS * block_size)
        chain = _chain(target, prompt, tokens)
        for width in range(1, block_size + 1):
            difference = _compare(target, prompt, tokens, width, chain)
            if difference:
                target.reset()
                after = f" after {length} prompt tokens" if length > prompt_tokens else ""
                return Exactness(
                    "inexact", f"draw {number} of {len(runs)}{after}, width {width}: {difference}"
                )
    target.reset()
    return Exactness(
        "exact", f"{len(runs)} draws of {BLOCKS} blocks at widths 1 to {block_size}: all logit bytes equal"
    )


def _lengths(target: Target) -> tuple[int, ...]:
    """The longer prompts to probe: the target's own, and on a GPU one where attention changes its kernel."""
    return target.probe_lengths if mx.default_device() == mx.cpu else (*target.probe_lengths, NEAR_TWO_PASSES)


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
    target.prefill(prompt, 0)
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
    target.prefill(prompt, 0)
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
