"""One generation from a prompt to a report: load, probe, run the round loop, stream the text."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import TemplateError

from draftpair.checkpoint import Checkpoint
from draftpair.errors import Usage
from draftpair.findings import Finding
from draftpair.runtime.exactness import Exactness, Gate, gate
from draftpair.runtime.interfaces import Drafter, Target
from draftpair.runtime.libraries import reading
from draftpair.runtime.load import eos_ids, load_pair, load_target, load_text_codec
from draftpair.runtime.loop import Request, generate
from draftpair.runtime.options import Options
from draftpair.runtime.sampling import Sampler
from draftpair.runtime.stats import Stats
from draftpair.runtime.text import TextStream
from draftpair.validate import ValidatedPair


@dataclass
class Session:
    """A loaded target, alone or with its drafter, ready for prompts."""

    target: Target
    drafter: Drafter | None
    tokenizer: Any
    eos: frozenset[int]
    pair: ValidatedPair | None
    findings: tuple[Finding, ...] = ()
    _gate: Gate | None = None

    def gate(self, environ: Mapping[str, str]) -> Gate:
        """Whether the pair speculates; probed once, for the pair and its width do not change."""
        if self._gate is None and self.pair:
            self._gate = gate(self.target, self.pair.block_size, environ)
        return self._gate or Gate(False, Exactness("not_run", "there is no pair"))


def open_session(
    target: Checkpoint,
    pair: ValidatedPair | None,
    dtype: str = "auto",
    environ: Mapping[str, str] = os.environ,
) -> Session:
    """Load ``target`` alone, or ``pair`` whose target it is. Raises ToolError when something does not load."""
    if pair is None:
        loaded, tokenizer = load_target(target, dtype, environ), load_text_codec(target)
        noted = tuple(finding for finding in target.findings if finding.level != "note")
        return Session(loaded, None, tokenizer, eos_ids(target, tokenizer), None, noted)
    both = load_pair(pair, dtype, environ)
    noted = tuple(finding for finding in pair.verdict.findings if finding.level != "note")
    return Session(both.target, both.drafter, both.tokenizer, both.eos, pair, noted)


def encode(session: Session, prompt: str, chat_template: bool) -> list[int]:
    """Token ids of a prompt, as a user's turn of a chat if the tokenizer has a template for that.

    Raises Usage when nothing is left to start from or the prompt is no text, Refused when the template fails.
    """
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Usage(
            "the prompt is not valid UTF-8", hint="check the encoding of your terminal or file"
        ) from error
    tokenizer = session.tokenizer
    if chat_template and getattr(tokenizer, "has_chat_template", False):
        turn = [{"role": "user", "content": prompt}]
        with reading("the chat template fails", "give --no-chat-template", also=TemplateError):
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
        decision, width = session.gate(environ), session.pair.block_size
        exactness = decision.exactness
        drafter = session.drafter if decision.engage else None
        if drafter:
            stats = Stats(session.pair.family.kind, width, session.pair.block_size_from)
    request = Request(prompt, sampler, options.max_tokens, session.eos)
    tokens: list[int] = []
    pieces: list[str] = []
    stream = TextStream(session.tokenizer)

    def tell(piece: str) -> None:
        pieces.append(piece)
        on_text(piece)

    for group in generate(session.target, drafter, request, width, stats):
        tokens += group
        tell(stream.add([token for token in group if token not in session.eos]))
    tell(stream.finish())
    return {
        "text": "".join(pieces),
        "tokens": tokens,
        "finish_reason": request.finish_reason,
        "stats": stats.report(),
        "exactness": exactness.report(),
        "findings": [finding.as_dict() for finding in session.findings],
    }
