"""The options of the commands that run models. Their parameters are named as the fields of `Options` are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import reduce
from typing import Any, TypeVar

import click

from draftpair.cli._common import asked_kind
from draftpair.runtime.options import DTYPES, LONGEST_NGRAM, LOOKUP, LOOKUP_POLICIES

_Command = TypeVar("_Command", bound=Callable[..., object])


def _all(*options: Callable[[Any], Any]) -> Callable[[_Command], _Command]:
    """One decorator of several options, which the help lists in this order."""
    return lambda command: reduce(lambda inner, option: option(inner), reversed(options), command)


def _bias(ctx: click.Context, param: click.Parameter, text: str | None) -> dict[int, float] | None:
    """``{"id": bias}`` as token ids and numbers."""
    if text is None:
        return None
    from draftpair.checkpoint.strict_json import JSONProblem, parse_json

    try:
        parsed = parse_json(text.encode("utf-8", "replace"))
    except JSONProblem as problem:
        raise click.BadParameter(f"it is not JSON: {problem}") from None
    if parsed.oddities:
        raise click.BadParameter("; ".join(parsed.oddities))
    found: dict[str, Any] = parsed.value if isinstance(parsed.value, dict) else {"": None}
    for token, bias in found.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10 and type(bias) in (int, float)):
            raise click.BadParameter('expected token ids and numbers, such as {"1234": -5.5}')
    return {int(token): bias for token, bias in found.items()}


pair_options = _all(
    click.option("-m", "--model", required=True, metavar="TARGET", help="The target model."),
    click.option(
        "--draft-model",
        "--model-draft",
        metavar="DRAFTER",
        help="Its drafter; the target itself for the head in its files. Without one, plain decoding.",
    ),
    click.option(
        "--draft-kind",
        metavar="KIND",
        help=f"The kind the drafter must be of [default: what it is]; {LOOKUP} needs no drafter.",
    ),
    click.option(
        "--draft-block-size", type=int, metavar="N", help="Rows of a verify block, the bonus token included."
    ),
    click.option(
        "--prompt-lookup",
        is_flag=True,
        help=f"Propose what followed in the text before; --draft-kind {LOOKUP}.",
    ),
    click.option(
        "--prompt-lookup-ngram-max",
        type=click.IntRange(1, LONGEST_NGRAM),
        metavar="N",
        help="Most tokens that are looked up at once  [default: 3]",
    ),
    click.option(
        "--prompt-lookup-policy",
        type=click.Choice(LOOKUP_POLICIES),
        help="How misses are answered: with fewer proposals, with none, or not  [default: graded; gated on CUDA]",
    ),
    click.option("--allow-doubtful", is_flag=True, help="Run a pair whose verdict is doubtful."),
    click.option(
        "--dtype",
        type=click.Choice(DTYPES),
        default="auto",
        show_default=True,
        help="auto: float32 on the CPU, else the checkpoint's own.",
    ),
)
"""``model``, ``draft_model``, what is asked of the drafter, ``allow_doubtful`` and ``dtype``."""

_CONTEXT: dict[str, Any] = {
    "type": click.IntRange(min=1),
    "default": 20,
    "show_default": True,
    "metavar": "N",
}

sampling_options = _all(
    click.option("-n", "--max-tokens", type=click.IntRange(min=1), default=256, show_default=True),
    click.option("--temp", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy."),
    click.option("--top-p", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="0 is off."),
    click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="0 is off."),
    click.option("--min-p", type=click.FloatRange(0, 1), default=0.0, show_default=True, help="0 is off."),
    click.option(
        "--seed", type=int, default=0, show_default=True, help="The same seed draws the same tokens."
    ),
    click.option(
        "--repetition-penalty",
        type=float,
        metavar="X",
        help="Divides the logits of tokens that were there; 1 is off.",
    ),
    click.option("--repetition-context-size", **_CONTEXT, help="How many tokens back it looks."),
    click.option(
        "--presence-penalty", type=float, metavar="X", help="Taken off the logits of tokens that were there."
    ),
    click.option("--presence-context-size", **_CONTEXT, help="How many tokens back it looks."),
    click.option(
        "--frequency-penalty", type=float, metavar="X", help="The same, for each time they were there."
    ),
    click.option("--frequency-context-size", **_CONTEXT, help="How many tokens back it looks."),
    click.option(
        "--logit-bias",
        callback=_bias,
        metavar="JSON",
        help='Added to the logits of some tokens: {"ID": BIAS, ...}.',
    ),
    click.option("--ignore-eos", is_flag=True, help="Go on after the end of the text, up to --max-tokens."),
    click.option("--no-chat-template", is_flag=True, help="Take the prompt as it is."),
)
"""Everything that a draw depends on, and where the text ends but for stop strings."""


def options_of(params: Mapping[str, Any]) -> Any:
    """The `Options` that a command's parameters ask for; those it does not have are as by default."""
    from draftpair.runtime.options import Options

    given = {field.name: params[field.name] for field in fields(Options) if field.name in params}
    return Options(**given, chat_template=not params["no_chat_template"])


def drafting_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """``draft_model``, ``draft_kind``, ``draft_block_size`` and ``allow_doubtful`` as the functions of `api` take them.

    Raises click.UsageError for two kinds at once. A kind of the environment does not make a drafter necessary.
    """
    model, kind = params["draft_model"], params["draft_kind"]
    if params["prompt_lookup"]:
        if kind not in (None, LOOKUP):
            raise click.UsageError(f"--prompt-lookup does not go with --draft-kind {kind}")
        kind = LOOKUP
    elif kind is None:
        kind = asked_kind(None)
        kind = None if model is None and kind != LOOKUP else kind
    names = ("draft_model", "draft_block_size", "allow_doubtful")
    return {"draft_kind": kind, **{name: params[name] for name in names}}
