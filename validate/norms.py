"""Whether a drafter's norms hold what its engines multiply by: the most common fault of drafters cut by hand.

Two kinds of families are told apart by their records. Where heads are published as w, the gain being 1 + w, bits and
means say of each tensor how it is stored. Where the gain itself is published, as by most, means say little: trained
gains reach from 0.0 in a first layer to 4 in a last norm. Of the 61 norms of SmolLM2-135M-Instruct, which are plain,
42 have no negative value and 18 at most 3 of 576; the first has 47 %, and a mean of 0.001. So there a tensor is wrong
by itself where its bits show a 1 that was taken off or added, or where it is negative nearly all over; values around
0 count when most norms of the drafter have such.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from draftpair.checkpoint import PLAIN_DTYPES, Checkpoint, TensorInfo, to_float32
from draftpair.checkpoint.wording import some
from draftpair.families.norms import ENOUGH, norm_conventions
from draftpair.families.record import Family
from draftpair.findings import Finding
from draftpair.validate.inventory import tensors_of

if TYPE_CHECKING:
    import numpy as np

PLAIN = "plain"
"""How the norms of most families are stored: the gain as it was trained."""

_WANTED = {"zero_centred": "shifted", "stays_zero_centred": "zero-centred"}
_STORED = {
    "zero-centred": "stored as w where the engine multiplies by what is stored, and 1 + w was trained",
    "shifted": "stored as 1 + w where the engine adds the 1 itself",
    "doubled": "stored as 2 + w, the 1 added twice",
    "diminished": "stored as w - 1, the 1 taken off too often",
    "reduced": "stored with a 1 taken off, as w or w - 1, where the engine multiplies by what is stored",
    "raised": "stored with a 1 added to them, where the engine multiplies by what is stored",
    "negative": "negative nearly all over: they turn the sign of what they multiply",
    "around 0": "around 0, as if a 1 had been taken off, where the engine multiplies by what is stored",
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
# Shares of negative values. Training starts at 1 and hardly ever takes a gain through 0.
_NEARLY_ALL, _MIXED = 0.95, (0.25, 0.75)
_AROUND_ZERO = 0.25

_Evidence = tuple[str | None, str]
"""What a norm's values say, a key of `_STORED`, None when they say nothing; and why."""


def is_norm(tensor: TensorInfo) -> bool:
    """Whether a tensor holds the gains of a norm, by name, rank and dtype."""
    return (
        len(tensor.shape) == 1
        and "norm" in tensor.name
        and not tensor.name.endswith("bias")
        and tensor.dtype in PLAIN_DTYPES
    )


def wanted_norms(checkpoint: Checkpoint, family: Family) -> dict[str, str]:
    """How each norm of a drafter's folder is to be stored: "shifted" or "zero-centred" by the record, else "plain"."""
    names = {tensor.name: PLAIN for tensor in checkpoint.tensors.values() if is_norm(tensor)}
    for rule in family.rules:
        for tensor in tensors_of(rule, checkpoint) if rule.norm else ():
            if tensor.dtype in PLAIN_DTYPES:
                names[tensor.name] = _WANTED[str(rule.norm)]
    return names


def check_norms(
    checkpoint: Checkpoint, family: Family, vectors: Mapping[str, np.ndarray] | None = None
) -> Iterator[Finding]:
    """What the values of a drafter's norms say of how they are stored, each norm for itself.

    An error for those that are stored another way than the family's engines want; a warning where no value of any
    plain norm is below 1; a note for those of which nothing can be said. ``vectors`` are values in float32 by name,
    read where they are not given; a norm without values, or with one value all over, is left out.
    """
    wanted = wanted_norms(checkpoint, family)
    if vectors is None:
        vectors = {name: _read(checkpoint, name) for name in wanted}
    spoken = {name: vectors[name] for name in wanted if name in vectors and _varies(vectors[name])}
    ruled = {name: values for name, values in spoken.items() if wanted[name] != PLAIN}
    plain = {name: values for name, values in spoken.items() if wanted[name] == PLAIN}
    found = {**_by_record(ruled, wanted), **_plain(plain, checkpoint)}
    yield from _wrong(family, wanted, found)
    yield from _undecided(family, {n: e for n, e in found.items() if e[0] is None and n in ruled})
    if len(plain) > 1 and all(found[n][0] is None and _above_one(v) for n, v in plain.items()):
        yield Finding(
            "DRAFTER-NORMS",
            "warning",
            f"no value of any norm is below 1, as if a 1 had been added to all: {some(sorted(plain))}",
            where=min(plain),
            expected=PLAIN,
            found="raised",
            hint=f"compare the norms with those of {family.target.source}",
        )


def _read(checkpoint: Checkpoint, name: str) -> np.ndarray:
    tensor = checkpoint.tensors[name]
    return to_float32(checkpoint.read(tensor), tensor.dtype)


def _varies(values: np.ndarray) -> bool:
    """Whether there is anything to be said of how the values lie; NaN and infinity are told elsewhere."""
    import numpy as np

    return bool(values.size and np.isfinite(values).all() and values.min() != values.max())


def _wrong(family: Family, wanted: Mapping[str, str], found: Mapping[str, _Evidence]) -> Iterator[Finding]:
    wrong = sorted(name for name, (said, _) in found.items() if said not in (wanted[name], None))
    if wrong:
        first = wrong[0]
        convention, reason = found[first]
        yield Finding(
            "DRAFTER-NORMS",
            "error",
            f"norms are {_STORED[str(convention)]}: {some(wrong)} ({reason})",
            where=first,
            expected=wanted[first],
            found=convention,
            hint=f"split again from {family.target.source}; with this folder nothing would be accepted",
        )


def _undecided(family: Family, silent: Mapping[str, _Evidence]) -> Iterator[Finding]:
    if silent:
        first = min(silent)
        yield Finding(
            "DRAFTER-NORMS-UNDECIDED",
            "note",
            f"values do not tell whether these norms hold w or 1 + w: {some(sorted(silent))} ({silent[first][1]})",
            where=first,
            found=len(silent),
            hint=f"compare them with those of {family.target.source}",
        )


def _by_record(ruled: Mapping[str, np.ndarray], wanted: Mapping[str, str]) -> dict[str, _Evidence]:
    """What is known of the norms of which the record says that they are published as w."""
    found: dict[str, _Evidence] = {
        name: (evidence.convention, evidence.reason)
        for name, evidence in norm_conventions(ruled, converted=True).items()
    }
    for name, values in ruled.items():
        gains = values if wanted[name] == "shifted" else values + 1
        if reason := _diminished(name, values):
            found[name] = "diminished", reason
        elif found[name][0] in (wanted[name], None) and (reason := _negative(gains)):
            found[name] = "negative", reason
        elif (
            wanted[name] == "shifted" and found[name][0] in ("shifted", None) and (reason := _reduced(values))
        ):
            found[name] = "reduced", reason
    return found


def _plain(plain: Mapping[str, np.ndarray], checkpoint: Checkpoint) -> dict[str, _Evidence]:
    """What is known of the norms whose gains are published as they were trained."""
    found = {name: _of_gains(values, checkpoint.tensors[name].dtype) for name, values in plain.items()}
    around = {name: reason for name, values in plain.items() if (reason := _around_zero(values))}
    low = {name for name, (said, _) in found.items() if said in ("reduced", "negative")}
    if len(low | around.keys()) > max(1, len(plain) / 2):
        found |= {name: ("around 0", reason) for name, reason in around.items() if name not in low}
    return found


def _of_gains(values: np.ndarray, dtype: str) -> _Evidence:
    """What a plain norm says by itself."""
    if reason := _reduced(values):
        return "reduced", reason
    if reason := _negative(values):
        return "negative", reason
    if dtype == "F32" and (reason := _raised(values)):
        return "raised", reason
    return None, ""


def _negative(gains: np.ndarray) -> str | None:
    """What shows that a norm turns signs: that nearly all of its gains are negative."""
    share = float((gains < 0).mean())
    return f"{share:.0%} of its gains are negative" if gains.size >= ENOUGH and share >= _NEARLY_ALL else None


def _around_zero(gains: np.ndarray) -> str | None:
    share, mean = float((gains < 0).mean()), float(gains.mean(dtype="float64"))
    if gains.size >= ENOUGH and _MIXED[0] <= share <= _MIXED[1] and abs(mean) < _AROUND_ZERO:
        return f"its mean is {mean:.2f}, {share:.0%} of it negative"
    return None


def _above_one(gains: np.ndarray) -> bool:
    return gains.size >= ENOUGH and float(gains.min()) >= 1


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
    (_, before), (_, after) = np.frexp(exact), np.frexp(exact + 1)
    telling = int(np.count_nonzero(after > before))
    if telling >= ENOUGH and _are_bfloat16(exact + 1):
        return f"all its values, {telling} of them of a size to tell, are 1 less than bfloat16 numbers"
    return None


def _raised(values: np.ndarray) -> str | None:
    """What shows in its bits that 1 was added to bfloat16 numbers, and the sum kept in float32.

    Numbers that were float16 once, and lie within a quarter of 1, are so by themselves and tell nothing.
    """
    import numpy as np

    exact = np.unique(np.asarray(values, np.float64))
    with np.errstate(over="ignore"):
        telling = int(np.count_nonzero((np.abs(exact - 1) >= 0.25) | (exact != exact.astype(np.float16))))
    if telling >= ENOUGH and _are_bfloat16(exact - 1) and not _are_bfloat16(exact):
        return f"all its values, {telling} of them of a size to tell, are 1 more than bfloat16 numbers"
    return None


def _are_bfloat16(values: np.ndarray) -> bool:
    """Whether all of these float64 numbers have no more than 8 significant bits."""
    import numpy as np

    mantissa, _ = np.frexp(values)
    return bool(np.all(mantissa * 256 == np.rint(mantissa * 256)))
