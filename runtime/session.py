"""One generation from a prompt to a report: load, probe, run the round loop, stream the text."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftpair.checkpoint import Checkpoint
from draftpair.errors import Usage
from draftpair.findings import Finding
from draftpair.runtime.exactness import Exactness, gate
from draftpair.runtime.interfaces import Drafter, Target
from draftpair.runtime.load import eos_ids, load_pair, load_target, load_text_codec
from draftpair.runtime.loop import Request, generate
from draftpair.runtime.options import Options
from draftpair.runtime.sampling import Sampler
from draftpair.runtime.stats import Stats
from draftpair.validate import ValidatedPair


@dataclass(frozen=True)
class Session:
    """A loaded target, alone or with its drafter, ready for prompts."""

    target: Target
    drafter: Drafter | None
    tokenizer: Any
    eos: frozenset[int]
    pair: ValidatedPair | None
    findings: tuple[Finding, ...] = field(default=())


def open_session(
    target: Checkpoint,
    pair: ValidatedPair | None,
    dtype: str = "auto",
    environ: Mapping[str, str] = os.environ,
) -> Session:
    """Load ``target`` alone, or ``pair`` whose target it is. Raises ToolError when something does not load."""
    if pair is None:
        loaded, tokenizer = load_target(target, dtype, environ), load_text_codec(target)
        return Session(loaded, None, tokenizer, eos_ids(target, tokenizer), None)
    both = load_pair(pair, dtype, environ)
    noted = tuple(finding for finding in pair.verdict.findings if finding.level != "note")
    return Session(both.target, both.drafter, both.tokenizer, both.eos, pair, noted)


def encode(session: Session, prompt: str, chat_template: bool) -> list[int]:
    """Token ids of a prompt, as a user's turn of a chat if the tokenizer has a template for that.

    Raises Usage when nothing is left to start from.
    """
    tokenizer = session.tokenizer
    if chat_template and getattr(tokenizer, "has_chat_template", False):
        turn = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(
            turn, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    else:
        ids = tokenizer.encode(prompt)
    if not ids:
        raise Usage("the prompt has no tokens", hint="give some text with --prompt")
    return list(ids)


def run(
    session: Session,
    prompt: Sequence[int],
    options: Options,
    on_text: Callable[[str], None],
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Generate and return the body of the report; ``on_text`` gets each piece of text once it is complete."""
    sampler = Sampler(
        session.target.vocab_size, options.temp, options.top_p, options.top_k, options.min_p, options.seed
    )
    stats, drafter, exactness, width = Stats(), None, Exactness("not_run", "no drafter was given"), 1
    if session.pair and session.drafter:
        decision = gate(session.target, session.pair.block_size, environ)
        exactness, width = decision.exactness, session.pair.block_size
        drafter = session.drafter if decision.engage else None
        if drafter:
            stats = Stats(session.pair.family.kind, width, session.pair.block_size_from)
    request = Request(prompt, sampler, options.max_tokens, session.eos)
    tokens: list[int] = []
    text = _stream(session, generate(session.target, drafter, request, width, stats), tokens, on_text)
    return {
        "text": text,
        "tokens": tokens,
        "finish_reason": request.finish_reason,
        "stats": stats.report(),
        "exactness": exactness.report(),
        "findings": [finding.as_dict() for finding in session.findings],
    }


def _stream(session: Session, groups: Any, tokens: list[int], on_text: Callable[[str], None]) -> str:
    """Decode the groups of tokens as they come; a token that ends the text is no part of it."""
    detokenizer = session.tokenizer.detokenizer
    detokenizer.reset()
    for group in groups:
        tokens += group
        for token in group:
            if token not in session.eos:
                detokenizer.add_token(token)
        on_text(detokenizer.last_segment)
    detokenizer.finalize()
    on_text(detokenizer.last_segment)
    return str(detokenizer.text)
