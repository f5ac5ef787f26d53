"""What the user asks split-mtp for, and the checks that need no checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftpair.convert.quantize import DEFAULT_GROUP_SIZE, MODE, Quantization
from draftpair.errors import Usage
from draftpair.findings import Finding

KEEP = "keep"
DTYPES = {KEEP: None, "bfloat16": "BF16", "float32": "F32"}


@dataclass(frozen=True)
class Request:
    """The options of one split; `q_bits` None means no quantization, `block_size` None the default."""

    output: Path
    block_size: int | None = None
    q_bits: int | None = None
    q_group_size: int = DEFAULT_GROUP_SIZE
    q_mode: str = MODE
    dtype: str = KEEP
    force: bool = False


def check_request(request: Request) -> Quantization | None:
    """The quantization asked for, or None. Raises Usage for a value that no checkpoint can make right."""
    if request.dtype not in DTYPES:
        raise Usage(f"--dtype ({request.dtype}) must be one of {', '.join(DTYPES)}")
    if request.q_mode != MODE:
        raise Usage(
            f"--q-mode ({request.q_mode}) is not available yet: only {MODE} is",
            hint=f"leave --q-mode out, or give --q-mode {MODE}",
        )
    if request.q_bits is None:
        return None
    return Quantization(request.q_bits, request.q_group_size)


def unused_options(request: Request) -> list[Finding]:
    """Warnings for options that have no effect in this request."""
    if request.q_bits is not None or request.q_group_size == DEFAULT_GROUP_SIZE:
        return []
    return [
        Finding(
            "SPLIT-OPTION-UNUSED",
            "warning",
            f"--q-group-size ({request.q_group_size}) has no effect without --q-bits: nothing is quantized",
            where="--q-group-size",
            found=request.q_group_size,
            hint="give --q-bits as well, or leave --q-group-size out",
        )
    ]
