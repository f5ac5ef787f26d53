"""What a generation is asked to do, by options and by the environment. Needs no MLX, as a command line does not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """How to generate; ``temp`` 0 is greedy, the three filters are off at 0, ``dtype`` auto suits the device."""

    max_tokens: int = 256
    temp: float = 0.0
    top_p: float = 0.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    dtype: str = "auto"
    chat_template: bool = True


def is_on(value: str | None) -> bool:
    """Whether an environment switch is set: not empty, 0, false, no or off."""
    return (value or "").strip().lower() not in ("", "0", "false", "no", "off")
