"""One generation from a prompt to a report: load, probe, run the round loop, stream the text."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from jinja2.exceptions import TemplateError

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.wording import printable
from draftpair.errors import Refused, Usage
from draftpair.findings import Finding
from draftpair.runtime.diagnostics import watched
from draftpair.runtime.drafters._prompt_lookup import MOST_DRAFTS
from draftpair.runtime.drafters._prompt_lookup import Drafter as LookupDrafter
from draftpair.runtime.exactness import Exactness, Gate, gate
from draftpair.runtime.interfaces import Drafter, Target
from draftpair.runtime.libraries import reading
from draftpair.runtime.load import eos_ids, load_pair, load_target, load_text_codec, on_cpu
from draftpair.runtime.loop import Request, generate
from draftpair.runtime.options import LOOKUP, Interrupted, Options
from draftpair.runtime.sampling import Sampler
from draftpair.runtime.stats import Stats
from draftpair.runtime.text import StopStrings, TextStream
from draftpair.runtime.width import Controller, Fixed, choose
from draftpair.validate import ValidatedPair
from draftpair.validate.width import requested_width

NGRAM_MAX, NGRAM_MIN = 3, 2
LOOKUP_ROWS = 8


@dataclass
class Session:
    """A loaded target, alone or with what drafts for it, ready for prompts. Without a drafter it decodes plainly.

    ``model`` names family, checkpoint and dtype; the controller outlives a request, so that it need not learn again.
    """

    target: Target
    drafter: Drafter | None
    tokenizer: Any
    eos: frozenset[int]
    pair: ValidatedPair | None
    findings: tuple[Finding, ...] = ()
    draft_kind: str | None = None
    block_size_from: str | None = None
    controller: Controller = field(default_factory=lambda: Fixed(1))
    model: tuple[str, ...] | None = None
    _gate: Gate | None = None

    def gate(self, environ: Mapping[str, str]) -> Gate:
        """Whether to speculate; probed once, for neither the target nor the width changes."""
        if self.drafter is None:
            return Gate(False, Exactness("not_run", "no drafter was given"), self.target)
        if self._gate is None:
            self._gate = gate(self.target, self.controller.ceiling, environ, self.model)
        return self._gate

    def stats(self) -> Stats:
        """Of a request that speculates."""
        return Stats(self.draft_kind, self.controller.ceiling, self.block_size_from)


def open_session(
    target: Checkpoint,
    pair: ValidatedPair | None,
    dtype: str = "auto",
    environ: Mapping[str, str] = os.environ,
) -> Session:
    """Load ``target`` alone, or ``pair`` whose target it is. Raises ToolError when something does not load."""
    if pair is None:
        loaded, tokenizer = load_target(target, dtype, environ), load_text_codec(target)
        return Session(loaded, None, tokenizer, eos_ids(target, tokenizer), None, noted(target.findings))
    both = load_pair(pair, dtype, environ)
    return Session(
        both.target,
        both.drafter,
        both.tokenizer,
        both.eos,
        pair,
        noted(pair.verdict.findings),
        draft_kind=pair.family.kind,
        block_size_from=pair.block_size_from,
        controller=choose(pair.block_size, pair.declared_block_size, both.drafter, environ),
        model=named(pair.family.name, target, dtype),
    )


def open_lookup(
    target: Checkpoint, block_size: int | None, options: Options, environ: Mapping[str, str] = os.environ
) -> Session:
    """Load ``target`` to draft by what followed in its own text; ``block_size`` as for a pair.

    Raises Usage for a width out of range, Refused for a target whose caches cannot give up what they took in.
    """
    rows, source = lookup_width(block_size, environ)
    session = open_session(target, None, options.dtype, environ)
    if session.target.irreversible:
        raise Refused(
            f"{target.source} cannot verify drafts: {session.target.irreversible}",
            hint=f"run it without {LOOKUP}",
        )
    ngram = options.prompt_lookup_ngram_max or NGRAM_MAX
    policy = options.prompt_lookup_policy or (
        "gated" if not on_cpu() and mx.cuda.is_available() else "graded"
    )
    session.drafter = LookupDrafter(session.target.vocab_size, ngram, min(ngram, NGRAM_MIN), rows - 1, policy)
    session.draft_kind, session.block_size_from, session.controller = LOOKUP, source, Fixed(rows)
    session.model = named(LOOKUP, target, options.dtype)
    return session


def lookup_width(explicit: int | None, environ: Mapping[str, str]) -> tuple[int, str]:
    """Rows of a block of prompt lookup, and the rule they are by. Raises Usage for a number out of range."""
    rows, source = requested_width(explicit, environ) or (LOOKUP_ROWS, f"default for {LOOKUP}")
    if not 2 <= rows <= MOST_DRAFTS + 1:
        raise Usage(f"{source} is {printable(str(rows), 40)}; expected 2 to {MOST_DRAFTS + 1} for {LOOKUP}")
    return rows, source


def named(family: str, target: Checkpoint, dtype: str) -> tuple[str, ...]:
    """What the probe's answer depends on; the config is in it, for a folder may be written again."""
    return family, target.source, dtype, json.dumps(target.config.raw, sort_keys=True)


def noted(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Those that a user of the checkpoint should see."""
    return tuple(finding for finding in findings if finding.level != "note")


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
    """Generate and return the body of the report; ``on_text`` gets each piece of text once it is complete.

    A KeyboardInterrupt on the way becomes `Interrupted`, with the body of what was generated until then.
    """
    options.require_vocabulary(session.target.vocab_size)
    decision = session.gate(environ)
    drafter = session.drafter if decision.engage else None
    stats = session.stats() if drafter else Stats()
    sampler = Sampler(
        session.target.vocab_size,
        options.temp,
        options.top_p,
        options.top_k,
        options.min_p,
        options.seed,
        **options.sampling,
    )
    target = decision.target
    if drafter:
        target, drafter, sampler = watched(target, drafter, sampler, stats, environ)
    eos = frozenset[int]() if options.ignore_eos else session.eos
    request = Request(prompt, sampler, options.max_tokens, eos)
    output = Output(session.tokenizer, eos, options.stop, on_text)
    groups = generate(target, drafter, request, session.controller, stats)
    interrupt = None
    try:
        while not output.stopped and (group := next(groups, None)) is not None:
            output.take(group)
        output.finish()
    except KeyboardInterrupt as error:
        interrupt = error
        output.finish_interrupted()
    stats.tokens = len(output.tokens)
    ended = "interrupted" if interrupt else "stop" if output.stopped else request.finish_reason
    body = {
        "text": output.text,
        "tokens": output.tokens,
        "finish_reason": ended,
        "stats": {
            **stats.report(),
            "prompt_lookup": _lookup_report(session.drafter if decision.engage else None),
        },
        "exactness": decision.exactness.report(),
        "findings": [finding.as_dict() for finding in session.findings],
    }
    if interrupt:
        raise Interrupted(body) from interrupt
    return body


def _lookup_report(drafter: Drafter | None) -> dict[str, Any] | None:
    return drafter.report() if isinstance(drafter, LookupDrafter) else None


class Output:
    """Takes tokens, and gives out their text up to the first stop string; no token after that string is kept."""

    def __init__(
        self, tokenizer: Any, eos: frozenset[int], stops: Sequence[str], on_text: Callable[[str], None]
    ) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self._with = (tokenizer, eos, stops)
        self._eos = eos
        self._stream, self._stops = TextStream(tokenizer), StopStrings(stops)
        self._on_text = on_text

    @property
    def stopped(self) -> bool:
        """Whether the text has come to a stop string."""
        return self._stops.found

    def take(self, group: Sequence[int]) -> None:
        """Tokens that were decided together; their text goes out together as well."""
        pieces = []
        for token in group:
            self.tokens.append(token)
            if token not in self._eos:
                pieces.append(self._stops.add(self._stream.add([token])))
            if self.stopped:
                break
        self._tell("".join(pieces))

    def finish(self) -> None:
        """The text that was held back."""
        rest = self._stops.add(self._stream.finish())
        self._tell(rest + self._stops.finish())

    def finish_interrupted(self) -> None:
        """The text of the tokens that is not out, wherever an interruption came between."""
        whole = Output(*self._with, on_text=lambda piece: None)
        whole.take(self.tokens)
        whole.finish()
        self._tell(whole.text[len(self.text) :])

    def _tell(self, piece: str) -> None:
        if piece:
            self.text += piece
            self._on_text(piece)
