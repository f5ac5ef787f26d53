"""Options that mean nothing are wrong usage before anything is loaded, whoever gives them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from draftpair.errors import Usage
from draftpair.runtime.options import Options, is_on


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_tokens": 0}, "max-tokens is 0; expected a whole number of tokens"),
        ({"max_tokens": 2.5}, "max-tokens is 2.5"),
        ({"temp": -1.0}, "temp is -1.0"),
        ({"temp": math.nan}, "temp is nan"),
        ({"temp": 1e-40}, "temp is 1e-40"),
        ({"temp": 1e300}, "temp is 1e+300"),
        ({"repetition_penalty": 0.0}, "repetition-penalty is 0.0"),
        ({"top_p": 1.5}, "top-p is 1.5"),
        ({"min_p": math.nan}, "min-p is nan"),
        ({"top_k": -1}, "top-k is -1"),
        ({"dtype": "int8"}, "dtype is 'int8'; expected auto, float32"),
        ({"repetition_penalty": -1.0}, "repetition-penalty is -1.0"),
        ({"repetition_penalty": math.inf}, "repetition-penalty is inf"),
        ({"presence_penalty": math.nan}, "presence-penalty is nan"),
        ({"frequency_context_size": 0}, "frequency-context-size is 0"),
        ({"stop": "abc"}, "stop is 'abc'; expected texts"),
        ({"stop": ("a", "")}, "none of them empty"),
        ({"logit_bias": {"5": 1.0}}, "logit-bias gives token id '5' the bias 1.0"),
        ({"logit_bias": {-1: 1.0}}, "logit-bias gives token id -1"),
        ({"logit_bias": {1: math.inf}}, "expected a finite number"),
        ({"prompt_lookup_ngram_max": 17}, "prompt-lookup-ngram-max is 17; expected 1 to 16"),
        ({"prompt_lookup_policy": "on"}, "prompt-lookup-policy is 'on'; expected graded, gated, off"),
    ],
    ids=str,
)
def test_what_means_nothing(given: dict[str, Any], text: str) -> None:
    with pytest.raises(Usage) as error:
        Options(**given)
    assert text in error.value.message


def test_what_is_off_is_allowed() -> None:
    Options(temp=0, repetition_penalty=1, presence_penalty=0, frequency_penalty=-2, logit_bias={}, stop=())


@pytest.mark.parametrize("value", [None, "", "0", "false", " No ", "OFF"])
def test_switches_that_are_off(value: str | None) -> None:
    assert not is_on(value)


@pytest.mark.parametrize("value", ["1", "true", "yes", "on", "2"])
def test_switches_that_are_on(value: str) -> None:
    assert is_on(value)
