"""What a generation is asked to do, by options and by the environment. Needs no MLX, as a command line does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from draftpair.errors import Usage

# Outside of these, logits divided by the temperature leave float32, and filtered tokens are drawn.
COLDEST, HOTTEST = 1e-4, 1e4

# MLX slices by 32-bit numbers.
MOST_TOKENS = 2**31 - 1
LARGEST = 3.4028234e38

LOOKUP = "prompt-lookup"
"""The draft kind that needs no drafter."""

LOOKUP_POLICIES = ("graded", "gated", "off")
LONGEST_NGRAM = 16
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Options:
    """How to generate. Raises Usage, naming the option, for a value that means nothing.

    ``temp`` 0 is greedy, the three filters are off at 0, ``dtype`` auto suits the device. The penalties are mlx-lm's,
    and off at None; their context sizes are tokens before a position, the prompt's included. ``logit_bias`` is added
    to the logits of the token ids that it names. The text ends before the first of the ``stop`` strings in it, and
    with ``ignore_eos`` not at the end-of-text tokens. The two of prompt lookup are for that kind only.
    """

    max_tokens: int = 256
    temp: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    dtype: str = "auto"
    chat_template: bool = True
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    presence_penalty: float | None = None
    presence_context_size: int = 20
    frequency_penalty: float | None = None
    frequency_context_size: int = 20
    logit_bias: Mapping[int, float] | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    prompt_lookup_ngram_max: int | None = None
    prompt_lookup_policy: str | None = None

    def __post_init__(self) -> None:
        for name in (
            "max_tokens",
            "repetition_context_size",
            "presence_context_size",
            "frequency_context_size",
        ):
            expected = f"a whole number of tokens, 1 to {MOST_TOKENS:,}"
            self._require(name, _is_count(getattr(self, name)), expected)
        for name in ("temp", "top_p", "min_p"):
            self._require(name, _is_number(getattr(self, name)), "a number")
        self._require("seed", type(self.seed) is int, "a whole number")
        warm = self.temp == 0 or COLDEST <= self.temp <= HOTTEST
        self._require("temp", warm, f"0 (greedy), or a number from {COLDEST} to {HOTTEST}")
        for name in ("top_p", "min_p"):
            self._require(name, 0 <= getattr(self, name) <= 1, "a number from 0 to 1")
        self._require("top_k", type(self.top_k) is int and self.top_k >= 0, "0 (off) or more")
        repetition = self.repetition_penalty
        allowed = repetition is None or (_is_number(repetition) and repetition > 0)
        self._require("repetition_penalty", allowed, "a number above 0 (1 is off)")
        for name in ("presence_penalty", "frequency_penalty"):
            penalty = getattr(self, name)
            self._require(name, penalty is None or _is_number(penalty), "a finite number")
        self._require("dtype", self.dtype in DTYPES, ", ".join(DTYPES))
        texts = isinstance(self.stop, (tuple, list)) and all(map(_is_text, self.stop))
        self._require("stop", texts, "texts of valid UTF-8, none of them empty")
        named = self.logit_bias is None or isinstance(self.logit_bias, Mapping)
        self._require("logit_bias", named, "token ids and numbers")
        for token, bias in (self.logit_bias or {}).items():
            if type(token) is not int or token < 0 or not _is_number(bias):
                raise Usage(
                    f"logit-bias gives token id {token!r} the bias {bias}; expected a finite number for an id"
                )
        ngram, policy = self.prompt_lookup_ngram_max, self.prompt_lookup_policy
        fits = ngram is None or (type(ngram) is int and 1 <= ngram <= LONGEST_NGRAM)
        self._require("prompt_lookup_ngram_max", fits, f"1 to {LONGEST_NGRAM}")
        known = policy is None or policy in LOOKUP_POLICIES
        self._require("prompt_lookup_policy", known, ", ".join(LOOKUP_POLICIES))

    def _require(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise Usage(f"{name.replace('_', '-')} is {getattr(self, name)!r}; expected {expected}")

    def require_vocabulary(self, size: int) -> None:
        """Raise Usage for a bias on a token id that a vocabulary of ``size`` entries does not have."""
        beyond = [token for token in self.logit_bias or () if token >= size]
        if beyond:
            raise Usage(f"logit-bias names token id {beyond[0]}; the vocabulary has the ids 0 to {size - 1}")

    def report(self) -> dict[str, Any]:
        """Every option, as JSON holds it."""
        bias = (
            None
            if self.logit_bias is None
            else {str(token): value for token, value in self.logit_bias.items()}
        )
        return {**asdict(self), "stop": list(self.stop), "logit_bias": bias}

    @property
    def sampling(self) -> dict[str, Any]:
        """The penalties and the bias, as keyword arguments of `draftpair.runtime.sampling.Sampler`."""
        names = [f"{kind}_{what}" for kind in PENALTIES for what in ("penalty", "context_size")]
        return {name: getattr(self, name) for name in (*names, "logit_bias")}


PENALTIES = ("repetition", "presence", "frequency")


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a generation; ``report`` tells what was generated until then, its ``finish_reason`` is
    "interrupted".
    """

    def __init__(self, report: dict[str, Any]) -> None:
        super().__init__()
        self.report = report


def is_on(value: str | None) -> bool:
    """Whether an environment switch is set: not empty, 0, false, no or off."""
    return (value or "").strip().lower() not in ("", "0", "false", "no", "off")


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value <= MOST_TOKENS


def _is_number(value: object) -> bool:
    """Whether it is a number that a float32 holds."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST


def _is_text(text: object) -> bool:
    if not isinstance(text, str):
        return False
    try:
        return bool(text.encode("utf-8"))
    except UnicodeEncodeError:
        return False
