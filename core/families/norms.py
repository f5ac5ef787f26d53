"""Tells from its values how a norm weight is stored: as w, the gain being 1 + w, or as the gain itself.

Some families train and publish w, converters write the gain, and names, shapes and dtypes are the same either way.
Two kinds of evidence speak for a tensor, each for itself:

- its bits. The published weights are bfloat16 numbers. What 1 + w comes to, rounded to bfloat16, float16 or float32,
  is 1 more than a bfloat16 number again: true of all of them. A tensor with a value that is not is no sum, so it is w;
  one whose values are all of them, though at random half of those below 0.5 would not be, is a sum.
- its mean, by what the norm is for. The bounds of `MEANS` lie between what was measured in releases and in
  conversions of them, and leave a gap where the two kinds are too close.

A tensor that says nothing follows the other norms of its head, as long as these agree and nothing speaks against it.
One that contradicts itself, that has one kind of evidence alone and all other norms against it, or that has nothing
to follow, stays undecided: nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from draftpair.checkpoint import Checkpoint

Convention = Literal["zero-centred", "shifted", "doubled"]
"""zero-centred: the tensor holds w, and 1 + w is applied. shifted: the 1 is in it. doubled: it is in it twice."""

# By the module's name: a mean below the first number is w, one above the second a gain, one above the third a gain
# with another 1. Measured means of w and of gains: layer norms -0.10 to 0.39 and 0.87 to 1.21, query and key norms
# -0.23 to 0.79 and 0.77 to 1.79, norms before the fusion -0.73 to -0.13 and 0.27 to 0.87, hyper-connection and
# indexer norms around 0 and 1. The last norm is not here: its w, 1.25 to 2.58, and its gains, 2.25 to 3.8, overlap.
_NEVER = float("inf")
_LAYER, _HEADS, _FUSION = (0.5, 0.75, 1.65), (0.5, 1.25, _NEVER), (0.0, 0.65, 1.1)
MEANS: dict[str, tuple[float, float, float]] = {
    "input_layernorm": _LAYER,
    "post_attention_layernorm": _LAYER,
    "hc_norm": _LAYER,
    "q_layernorm": _LAYER,
    "k_layernorm": _LAYER,
    "q_norm": _HEADS,
    "k_norm": _HEADS,
    "pre_fc_norm_embedding": _FUSION,
    "pre_fc_norm_hidden": _FUSION,
}

ENOUGH = 16
"""Different values that must all lie where a sum puts them: by chance one in 65,536 tensors of w has as many."""


@dataclass(frozen=True)
class NormEvidence:
    """What is known of one norm: how it is stored, None when that cannot be told, and why, in words."""

    name: str
    convention: Convention | None
    reason: str


def norm_conventions(vectors: Mapping[str, np.ndarray], converted: bool) -> dict[str, NormEvidence]:
    """How each norm of one head is stored, by name; `vectors` are their values, exact in float32.

    `converted` says that a converter wrote the files, so that a norm of which nothing is known may have been
    changed though others were not.
    """
    signs = {name: (_bits(values), _mean(name, values)) for name, values in vectors.items()}
    return {name: _decide(name, own, _others(name, signs), converted) for name, own in signs.items()}


class _Sign(NamedTuple):
    """What one kind of evidence says of a tensor, and in what words."""

    convention: Convention | None
    reason: str


_Signs = tuple[_Sign, _Sign]


def _others(name: str, signs: Mapping[str, _Signs]) -> set[Convention]:
    """What the other norms of the head say, each of itself."""
    return {sign.convention for other in signs if other != name for sign in signs[other] if sign.convention}


def _decide(name: str, signs: _Signs, others: set[Convention], converted: bool) -> NormEvidence:
    """What follows from the tensor's own signs, and from the others' where these are not enough."""
    speaking = [sign for sign in signs if sign.convention]
    own = {sign.convention for sign in speaking}
    said = "; ".join(f"{s.reason}, as if {s.convention}" if s.convention else s.reason for s in signs)
    agreed = next(iter(others)) if len(others) == 1 else None
    if "doubled" in own:  # which the bits do not tell from shifted
        return NormEvidence(name, "doubled", said)
    if len(own) > 1:
        return NormEvidence(name, None, said)
    if len(speaking) == 1 and agreed and agreed not in own:
        return NormEvidence(name, None, f"{said}; but all other norms of the head are {agreed}")
    if own:
        return NormEvidence(name, own.pop(), said)
    if agreed is None:
        what = "disagree" if others else "do not tell either"
        return NormEvidence(name, None, f"{said}; and the other norms of the head {what}")
    if agreed == "zero-centred" and converted:
        return NormEvidence(
            name, None, f"{said}; the others are {agreed}, but a converter may have changed it"
        )
    return NormEvidence(name, agreed, f"{said}; all other norms of the head are {agreed}")


def _bits(values: np.ndarray) -> _Sign:
    """What the places of the values say: a sum of 1 and a bfloat16 number has no digits below its own."""
    import numpy as np

    exact = np.asarray(values, np.float64).ravel()
    sums = _in_bfloat16(exact - 1)
    if not _in_bfloat16(exact).all():
        if sums.all():
            return _Sign("shifted", "its values less 1 are bfloat16 numbers, and they themselves are not")
        return _Sign(None, "its values are no bfloat16 numbers")
    broken = int(np.count_nonzero(~sums))
    if broken:
        return _Sign("zero-centred", f"{broken} of {exact.size} values are not 1 more than a bfloat16 number")
    telling = np.unique(exact[(exact < 0.5) & (exact != 0)]).size
    if telling >= ENOUGH:
        return _Sign(
            "shifted", f"all its values, {telling} different ones below 0.5, are 1 more than bfloat16 numbers"
        )
    return _Sign(None, f"{telling} different values below 0.5 are too few to show")


def _in_bfloat16(values: np.ndarray) -> np.ndarray:
    """Which of these float64 numbers are bfloat16 numbers: 8 significant bits. Very small ones count as such."""
    import numpy as np

    mantissa, _ = np.frexp(values)
    scaled = mantissa * 256
    return np.asarray(scaled == np.rint(scaled))


def _mean(name: str, values: np.ndarray) -> _Sign:
    """What the mean says, by what the norm is for."""
    mean = float(values.mean(dtype="float64")) if values.size else 0.0
    said = f"its mean is {mean:.2f}"
    low, high, twice = MEANS.get(_module(name), (-_NEVER, _NEVER, _NEVER))
    if mean > twice:
        return _Sign("doubled", said)
    if mean < low:
        return _Sign("zero-centred", said)
    return _Sign("shifted" if mean > high else None, said)


def _module(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def converter(checkpoint: Checkpoint, names: Iterable[str]) -> str | None:
    """What shows that an MLX converter wrote the tensors of these names or their target; None when nothing does.

    Converters state the format in the header, and put the axes of a trunk's convolutions in MLX's order, the
    kernel's before the one of length 1.
    """
    for file in sorted({checkpoint.tensors[name].file for name in names if name in checkpoint.tensors}):
        if checkpoint.files[file].header.metadata.get("format") == "mlx":
            return f"the header of {file} says format mlx"
    for tensor in checkpoint.tensors.values():
        if (
            tensor.name.endswith("conv1d.weight")
            and len(tensor.shape) == 3
            and tensor.shape[2] == 1 < tensor.shape[1]
        ):
            return f"{tensor.name} of shape {list(tensor.shape)} is in MLX's order of axes"
    return None
