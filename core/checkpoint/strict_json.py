"""JSON read so that nothing about the text is lost: what the standard reader passes over is named.

Python's reader keeps the last of two equal keys and takes NaN; both mean that two readers can see two
different files. `parse_json` returns the value together with such oddities and lets the caller decide.
"""

from __future__ import annotations

import codecs
import json
from dataclasses import dataclass
from typing import Any

from draftpair.checkpoint.wording import printable

MAX_JSON_BYTES = 100_000_000
"""Longest text that is parsed: far beyond every real config, index or header."""


class JSONProblem(ValueError):
    """The bytes are no JSON text; the message says why and where, without a file name."""


@dataclass(frozen=True)
class Parsed:
    """A JSON value and the oddities that a strict reader would refuse, in the order of the text.

    `repeated` are those after which two readers may see two values; of the others Python's readers make the same.
    """

    value: Any
    oddities: tuple[str, ...]
    repeated: tuple[str, ...]


def parse_json(data: bytes) -> Parsed:
    """Parse UTF-8 bytes; JSONProblem for anything that is not one JSON text.

    Oddities: a key that occurs twice in one object (the last one counts), and NaN or infinities.
    """
    if len(data) > MAX_JSON_BYTES:
        raise JSONProblem(f"it is longer than {MAX_JSON_BYTES:,} bytes")
    oddities: list[str] = []
    repeated: list[str] = []

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            repeated.append(f"the key {_first_repeated(pairs)!r} occurs twice in one object")
            oddities.append(repeated[-1])
        return members

    def constant(name: str) -> float:
        oddities.append(f"{name} is not a JSON number")
        return float(name)

    text = _decode(data)
    try:
        value = json.loads(text, object_pairs_hook=unique_keys, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise JSONProblem(f"{_lowered(error.msg)} at line {error.lineno} column {error.colno}") from None
    except ValueError:
        # The only other ValueError of the reader: Python's limit on the digits of an integer.
        raise JSONProblem("it holds a number with thousands of digits") from None
    except RecursionError:
        raise JSONProblem("it is nested too deeply") from None
    return Parsed(value, tuple(oddities), tuple(repeated))


def _decode(data: bytes) -> str:
    if data.startswith(codecs.BOM_UTF8):
        raise JSONProblem("it starts with a byte order mark; save it as UTF-8 without one")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise JSONProblem(f"byte {error.start:,} is not UTF-8") from None


def _first_repeated(pairs: list[tuple[str, Any]]) -> str:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return printable(key)
        seen.add(key)
    raise LookupError("no key is repeated")


def _lowered(message: str) -> str:
    return message[:1].lower() + message[1:]
