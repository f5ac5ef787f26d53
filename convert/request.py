"""What the user asks split-mtp for, and the checks that need no checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftpair.convert.quantize import quantization
from draftpair.convert.scheme import Scheme, parse_override
from draftpair.errors import Usage

KEEP = "keep"
DTYPES = {KEEP: None, "bfloat16": "BF16", "float32": "F32"}
NORMS = ("auto", "zero-centred", "shifted")


@dataclass(frozen=True)
class Request:
    """The options of one split; None leaves the choice to the mode, the family or the source.

    Any of `q_bits`, `q_group_size` and `q_mode` asks for a quantization of the whole head, `q_overrides`
    (`PATTERN=WHAT`) for another one of some modules.
    """

    output: Path
    block_size: int | None = None
    q_bits: int | None = None
    q_group_size: int | None = None
    q_mode: str | None = None
    q_overrides: tuple[str, ...] = ()
    dtype: str = KEEP
    norms: str = "auto"
    force: bool = False


def check_request(request: Request) -> Scheme:
    """How to quantize what. Raises Usage for a value that no checkpoint can make right."""
    if request.dtype not in DTYPES:
        raise Usage(f"--dtype ({request.dtype}) must be one of {', '.join(DTYPES)}")
    if request.norms not in NORMS:
        raise Usage(f"--norms ({request.norms}) must be one of {', '.join(NORMS)}")
    base = None
    if request.q_bits is not None or request.q_mode is not None:
        base = quantization(request.q_mode or "affine", request.q_bits, request.q_group_size)
    elif request.q_group_size is not None:
        raise Usage(
            f"--q-group-size ({request.q_group_size}) has no effect without --q-bits or --q-mode: nothing is quantized",
            hint="give one of them as well, or leave --q-group-size out",
        )
    return Scheme(base, tuple(parse_override(text) for text in request.q_overrides))
