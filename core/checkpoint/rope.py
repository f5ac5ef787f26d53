"""The rotary position settings of a config, whichever of three generations wrote it.

1. flat: `rope_theta`, `rope_scaling`, `partial_rotary_factor`;
2. `rope_parameters`, one object that holds all three (transformers 5);
3. `rope_parameters` keyed by layer type, such as `full_attention`.

A nested value wins over a flat one: a reader that misses it falls back to a base of 10,000 and drafts rot
with position. Where both are stated and differ, that is a finding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from draftpair.checkpoint.wording import printable
from draftpair.findings import Finding

CONFIG_NAME = "config.json"

_LARGEST = sys.float_info.max
_MAIN_LAYER_TYPES = ("full_attention", "main")
_KINDS = ("rope_type", "type")
_NUMBERS = frozenset({"rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True)
class Rope:
    """Resolved settings; None means that the config does not say.

    `theta` is the base; `scaling` has its kind under `rope_type` and is None for plain RoPE; `partial` is
    the rotated fraction of a head; `where` is the JSON pointer of `theta`. With settings by layer type,
    these are those of full attention, and `layer_types` has every type's.
    """

    theta: float | None = None
    scaling: dict[str, Any] | None = None
    partial: float | None = None
    where: str | None = None
    conflicts: tuple[Finding, ...] = ()
    layer_types: Mapping[str, Rope] = field(default_factory=dict)


def resolve_rope(get: Callable[[str], Any], where: Callable[[str], str | None]) -> Rope:
    """The one `Rope` of a config whose `get` treats null as absent and whose `where` gives JSON pointers."""
    reader = _Reader(get, where)
    nested = reader.object_at("rope_parameters")
    pointer = where("rope_parameters") or ""
    by_type = {name: value for name, value in nested.items() if isinstance(value, dict)}
    if not by_type:
        rope = reader.merge(nested, pointer)
        return Rope(rope.theta, rope.scaling, rope.partial, rope.where, tuple(reader.findings))
    main = next((name for name in _MAIN_LAYER_TYPES if name in by_type), next(iter(by_type)))
    layer_types = {
        name: reader.merge(value, f"{pointer}/{_escape(name)}", compare=name == main)
        for name, value in by_type.items()
    }
    rope = layer_types[main]
    return Rope(rope.theta, rope.scaling, rope.partial, rope.where, tuple(reader.findings), layer_types)


class _Reader:
    """Reads checked values and collects what is wrong with them."""

    def __init__(self, get: Callable[[str], Any], where: Callable[[str], str | None]) -> None:
        self.get, self.where = get, where
        self.findings: list[Finding] = []

    def merge(self, nested: Mapping[str, Any], pointer: str, compare: bool = True) -> Rope:
        """Nested settings completed by flat ones; `compare` reports where the two disagree."""
        theta_pointer = f"{pointer}/rope_theta"
        theta = self._number(nested.get("rope_theta"), theta_pointer)
        partial = self._number(nested.get("partial_rotary_factor"), f"{pointer}/partial_rotary_factor")
        flat_theta, flat_partial = self._flat_number("rope_theta"), self._flat_number("partial_rotary_factor")
        flat_scaling = self.object_at("rope_scaling")
        speaks = any(nested.get(key) is not None for key in nested.keys() - _NUMBERS)
        scaling = _normalised(nested if speaks else flat_scaling)
        if compare:
            self._compare("rope_theta", theta, flat_theta, pointer)
            self._compare("partial_rotary_factor", partial, flat_partial, pointer)
            if speaks and flat_scaling:
                self._compare("rope_scaling", scaling, _normalised(flat_scaling), pointer)
        if theta is not None:
            return Rope(theta, scaling, flat_partial if partial is None else partial, theta_pointer)
        where = None if flat_theta is None else self.where("rope_theta")
        return Rope(flat_theta, scaling, flat_partial if partial is None else partial, where)

    def object_at(self, key: str) -> dict[str, Any]:
        """A JSON object of the config, {} when absent or of another type."""
        value = self.get(key)
        if value is None or isinstance(value, dict):
            return value or {}
        self._wrong_type(self.where(key) or f"/{key}", "an object", value)
        return {}

    def _flat_number(self, key: str) -> float | None:
        return self._number(self.get(key), self.where(key) or f"/{key}")

    def _number(self, value: Any, pointer: str) -> float | None:
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LARGEST:
            return float(value)
        self._wrong_type(pointer, "a positive number", value)
        return None

    def _wrong_type(self, pointer: str, expected: str, value: Any) -> None:
        message = (
            f"{CONFIG_NAME}: {pointer} is {printable(repr(value), 60)}, expected {expected}; it is ignored"
        )
        finding = Finding(
            "CONFIG-PARSE", "error", message, f"{CONFIG_NAME}#{pointer}", expected, printable(repr(value))
        )
        if finding not in self.findings:
            self.findings.append(finding)

    def _compare(self, key: str, nested: Any, flat: Any, pointer: str) -> None:
        """Report a flat value that contradicts the nested one; a nested scaling of None means plain RoPE."""
        if flat == nested or (key != "rope_scaling" and None in (nested, flat)):
            return
        flat_pointer = self.where(key)
        stated = f"{key} is {nested} in {pointer} but {flat} at {flat_pointer}"
        self.findings.append(
            Finding(
                "CONFIG-ROPE-CONFLICT",
                "warning",
                f"{CONFIG_NAME}: {stated}; the first is used",
                f"{CONFIG_NAME}#{flat_pointer}",
                nested,
                flat,
                "Make both equal: some readers take the other one.",
            )
        )


def _normalised(scaling: Mapping[str, Any]) -> dict[str, Any] | None:
    """A scaling object with its kind under `rope_type`, nulls left out; None for plain RoPE."""
    kind = next((scaling[key] for key in _KINDS if scaling.get(key) is not None), "default")
    rest = {
        key: value for key, value in scaling.items() if value is not None and key not in (*_NUMBERS, *_KINDS)
    }
    return {"rope_type": kind, **rest} if rest or kind != "default" else None


def _escape(token: str) -> str:
    return token.replace("~", "~0").replace("/", "~1")
