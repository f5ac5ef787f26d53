"""Whether a drafter's norms hold what its engines multiply by: the most common fault of drafters cut by hand."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from draftpair.checkpoint import PLAIN_DTYPES, Checkpoint, TensorInfo
from draftpair.checkpoint.dtypes import to_float32
from draftpair.checkpoint.wording import some
from draftpair.families.norms import ENOUGH, norm_conventions
from draftpair.families.record import Family
from draftpair.findings import Finding
from draftpair.validate.inventory import tensors_of

if TYPE_CHECKING:
    import numpy as np

_WANTED = {"zero_centred": "shifted", "stays_zero_centred": "zero-centred"}
_STORED = {
    "zero-centred": "stored as w where the engine multiplies by what is stored, and 1 + w was trained",
    "shifted": "stored as 1 + w where the engine adds the 1 itself",
    "doubled": "stored as 2 + w, the 1 added twice",
    "diminished": "stored as w - 1, the 1 taken off too often",
    "reduced": "stored with a 1 taken off, as w or w - 1, where the engine multiplies by what is stored",
}
# By the module's name, the mean below which a norm is w - 1: between the smallest mean of w that was measured in
# releases and the largest that w - 1 would have. For query and key norms these overlap, so it is below all w.
_LAYER, _HEADS, _FUSION = -0.35, -0.5, -0.93
_LOWEST = {
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


def check_norms(checkpoint: Checkpoint, family: Family) -> Iterator[Finding]:
    """One finding for the norms whose values say that they are stored the other way; those that do not tell pass."""
    wanted = {tensor.name: (tensor, how) for tensor, how in _norms(checkpoint, family)}
    vectors = {name: to_float32(checkpoint.read(t), t.dtype) for name, (t, _) in wanted.items()}
    evidence = norm_conventions(vectors, converted=True)
    found: dict[str, tuple[str | None, str]] = {n: (e.convention, e.reason) for n, e in evidence.items()}
    for name, values in vectors.items():
        how = wanted[name][1]
        if reason := _diminished(name, values):
            found[name] = "diminished", reason
        elif how == "shifted" and found[name][0] in (how, None) and (reason := _reduced(values)):
            found[name] = "reduced", reason
    wrong = sorted(name for name, (_, how) in wanted.items() if found[name][0] not in (how, None))
    if wrong:
        first = wrong[0]
        convention, reason = found[first]
        yield Finding(
            "DRAFTER-NORMS",
            "error",
            f"norms are {_STORED[str(convention)]}: {some(wrong)} ({reason})",
            where=first,
            expected=wanted[first][1],
            found=convention,
            hint=f"split again from {family.target.source}; with this folder nothing would be accepted",
        )


def _diminished(name: str, values: np.ndarray) -> str | None:
    """What shows that a norm is w - 1: its mean, by what it is for; None when it does not."""
    mean = float(values.mean(dtype="float64")) if values.size else 0.0
    lowest = _LOWEST.get(name.removesuffix(".weight").rpartition(".")[2])
    return f"its mean is {mean:.2f}" if lowest is not None and mean < lowest else None


def _reduced(values: np.ndarray) -> str | None:
    """What shows in its bits that 1 was taken off a bfloat16 number; None when nothing does.

    1 more than such a value is a bfloat16 number. Of other values whose sum with 1 has a coarser grid than they have,
    at random half would give none. A gain that a converter computed is no such value, though w may be one.
    """
    import numpy as np

    exact = np.unique(np.asarray(values, np.float64))
    (_, before), (mantissa, after) = np.frexp(exact), np.frexp(exact + 1)
    telling = int(np.count_nonzero(after > before))
    if telling >= ENOUGH and bool(np.all(mantissa * 256 == np.rint(mantissa * 256))):
        return f"all its values, {telling} of them of a size to tell, are 1 less than bfloat16 numbers"
    return None


def _norms(checkpoint: Checkpoint, family: Family) -> Iterator[tuple[TensorInfo, str]]:
    """The norms that the family's record speaks of and the folder holds, and how they are to be stored."""
    for rule in family.rules:
        for tensor in tensors_of(rule, checkpoint) if rule.norm else ():
            if tensor.dtype in PLAIN_DTYPES:
                yield tensor, _WANTED[str(rule.norm)]
