"""Whether a drafter's norms hold what its engines multiply by: the most common fault of drafters cut by hand."""

from __future__ import annotations

from collections.abc import Iterator

from draftpair.checkpoint import PLAIN_DTYPES, Checkpoint, TensorInfo
from draftpair.checkpoint.dtypes import to_float32
from draftpair.checkpoint.wording import some
from draftpair.families.norms import norm_conventions
from draftpair.families.record import Family
from draftpair.findings import Finding

_WANTED = {"zero_centred": "shifted", "stays_zero_centred": "zero-centred"}
_DONE = {
    "shifted": "stored as w where the engine multiplies by what is stored, and 1 + w was trained",
    "zero-centred": "stored as 1 + w where the engine adds the 1 itself",
    "doubled": "stored as 2 + w, the 1 added twice",
}


def check_norms(checkpoint: Checkpoint, family: Family) -> Iterator[Finding]:
    """One finding for the norms whose values say that they are stored the other way; those that do not tell pass."""
    wanted = {tensor.name: (tensor, how) for tensor, how in _norms(checkpoint, family)}
    vectors = {name: to_float32(checkpoint.read(t), t.dtype) for name, (t, _) in wanted.items()}
    found = norm_conventions(vectors, converted=True)
    wrong = sorted(n for n, (_, how) in wanted.items() if found[n].convention not in (how, None))
    if wrong:
        first = wrong[0]
        fault = "doubled" if found[first].convention == "doubled" else wanted[first][1]
        yield Finding(
            "DRAFTER-NORMS",
            "error",
            f"norms are {_DONE[fault]}: {some(wrong)} ({found[first].reason})",
            where=first,
            expected=wanted[first][1],
            found=found[first].convention,
            hint=f"split again from {family.target.source}; with this folder nothing would be accepted",
        )


def _norms(checkpoint: Checkpoint, family: Family) -> Iterator[tuple[TensorInfo, str]]:
    """The norms that the family's record speaks of and the folder holds, and how they are to be stored."""
    for rule in family.rules:
        for layer in range(family.head.max_depth) if rule.norm else ():
            for output in rule.outputs:
                tensor = checkpoint.tensors.get(output.name.format(layer=layer))
                if tensor is not None and tensor.dtype in PLAIN_DTYPES:
                    yield tensor, _WANTED[str(rule.norm)]
