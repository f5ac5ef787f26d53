"""Which module is quantized how: a choice for all of them, and other ones for those a pattern names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from draftpair.convert.quantize import AFFINE, MODES, Quantization, quantization
from draftpair.errors import Usage

DENSE = "none"
_WHAT = re.compile(
    r"(?:(?P<mode>[a-z]\w*)(?::(?P<bits>[0-9]{1,4}))?|(?P<bare>[0-9]{1,4}))(?:/(?P<group>[0-9]{1,4}))?"
)


@dataclass(frozen=True)
class Override:
    """What one `PATTERN=WHAT` asks for; None is what it leaves open, and mode `none` is full precision."""

    pattern: str
    mode: str | None
    bits: int | None = None
    group_size: int | None = None

    def __str__(self) -> str:
        bits = [] if self.bits is None else [str(self.bits)]
        what = ":".join([*([self.mode] if self.mode else []), *bits])
        return f"{self.pattern}={what}" + (f"/{self.group_size}" if self.group_size is not None else "")

    def matches(self, module: str) -> bool:
        """Whether the pattern fits the module's dotted name, or what is left of it after some of the dots."""
        parts = module.split(".")
        return any(fnmatchcase(".".join(parts[first:]), self.pattern) for first in range(len(parts)))

    def quantization(self, base: Quantization | None) -> Quantization | None:
        """What matching modules get beside `base`; raises Usage for what MLX does not have.

        Bits alone keep the mode of `base` when it has them, and are affine when not. What else is left out
        is as in `base` when the mode is the same, else as the mode has it by default.
        """
        if self.mode == DENSE:
            return None
        mode = self.mode or _mode_of_bits(self.bits, base)
        bits, group_size = self.bits, self.group_size
        if base is not None and base.mode == mode:
            bits = base.bits if bits is None else bits
            group_size = base.group_size if group_size is None else group_size
        return quantization(mode, bits, group_size, given=f"--q-override {self}")


def _mode_of_bits(bits: int | None, base: Quantization | None) -> str:
    return base.mode if base is not None and bits in MODES[base.mode].bits else AFFINE


def parse_override(text: str) -> Override:
    """The override that `PATTERN=WHAT` says, WHAT being BITS, MODE or MODE:BITS, each also with /GROUP, or `none`.

    PATTERN has the wildcards `*`, `?` and `[...]`. Raises Usage for anything else.
    """
    pattern, _, what = text.rpartition("=")
    found = _WHAT.fullmatch(what)
    if not pattern or not found:
        raise Usage(
            f"--q-override {text!r} is not PATTERN=WHAT, with WHAT being BITS, MODE or MODE:BITS, each also with "
            f"/GROUP, or {DENSE}",
            hint="for example lm_head=8, '*.down_proj=mxfp8', 'mlp.switch_mlp.*=affine:3/32' or eh_proj=none",
        )
    mode, bits, group = found["mode"], found["bits"] or found["bare"], found["group"]
    if mode == DENSE and (bits or group):
        raise Usage(
            f"--q-override {text}: {DENSE} has no bits and no groups", hint=f"write {pattern}={DENSE}"
        )
    if mode not in (None, DENSE, *MODES):
        raise Usage(f"--q-override {text}: mode ({mode}) must be one of {', '.join([*MODES, DENSE])}")
    return Override(pattern, mode, int(bits) if bits else None, int(group) if group else None)


@dataclass(frozen=True)
class Scheme:
    """How each module is quantized. Without a `base` only modules that an override names are; the last one counts.

    Raises Usage for an override that asks for what MLX does not have.
    """

    base: Quantization | None
    overrides: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        for override in self.overrides:
            override.quantization(self.base)

    def __bool__(self) -> bool:
        """Whether any quantization was asked for."""
        return self.base is not None or any(override.mode != DENSE for override in self.overrides)

    def of(self, module: str) -> Quantization | None:
        """The quantization of a module, None for full precision."""
        for override in reversed(self.overrides):
            if override.matches(module):
                return override.quantization(self.base)
        return self.base

    def unmatched(self, modules: Iterable[str]) -> tuple[Override, ...]:
        """The overrides that name none of the modules."""
        names = tuple(modules)
        return tuple(o for o in self.overrides if not any(o.matches(name) for name in names))

    def as_config(self, quantized: Mapping[str, Quantization]) -> dict[str, Any]:
        """What config.json has under `quantization` when `quantized` are the modules that are packed.

        The keys of the base, and an entry for each module that differs. mlx-lm and mlx-vlm read the former
        unconditionally: without a base it is what most modules have. Dense modules need no entry: the
        loaders know them by their missing scales. Empty when nothing is packed.
        """
        if not quantized:
            return {}
        base = self.base or Counter(quantized[name] for name in sorted(quantized)).most_common(1)[0][0]
        others = {name: how.as_config() for name, how in sorted(quantized.items()) if how != base}
        return base.as_config() | others
