"""What is to be added to a head's norms, so that they are stored as the drafter expects; decided norm by norm."""

from __future__ import annotations

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.dtypes import to_float32
from draftpair.checkpoint.stored import Stored
from draftpair.checkpoint.wording import some
from draftpair.errors import Refused
from draftpair.families.heads import HeadMatch
from draftpair.families.norms import NormEvidence, converter, norm_conventions
from draftpair.findings import Finding

_WANTED = {"zero_centred": "shifted", "stays_zero_centred": "zero-centred"}
_ADDED = {("zero-centred", "shifted"): 1, ("shifted", "zero-centred"): -1}


def added_to_norms(match: HeadMatch, asked: str) -> tuple[dict[str, int], list[Finding]]:
    """1 or -1 by the name of each norm that it must be added to, and what is to be said about the norms.

    `asked` is "auto", or the convention of all of them. Raises Refused, naming each norm and what speaks for either
    convention, when its values do not tell.
    """
    stored = {s.name: (s, _WANTED[m.rule.norm]) for m in match.matched if m.rule.norm for s in m.sources}
    if not stored:
        return {}, []
    found = dict.fromkeys(stored, NormEvidence("all", None, "--norms says so"))
    convention = dict.fromkeys(stored, asked)
    if asked == "auto":
        vectors = {name: to_float32(_values(match.checkpoint, s), s.dtype) for name, (s, _) in stored.items()}
        found = norm_conventions(vectors, converter(match.checkpoint, vectors) is not None)
        if unclear := [e for e in found.values() if e.convention not in _WANTED.values()]:
            raise _unclear(unclear)
        convention = {name: str(evidence.convention) for name, evidence in found.items()}
    added = {name: _ADDED.get((convention[name], wanted), 0) for name, (_, wanted) in stored.items()}
    return {name: what for name, what in added.items() if what}, _said(asked, convention, found, added)


def _values(checkpoint: Checkpoint, stored: Stored) -> bytes:
    if stored.encoding != "plain":
        raise Refused(
            f"{stored.name} is {stored.detail}; a norm is expected to be BF16, F16 or F32",
            hint="split from the raw checkpoint",
        )
    return checkpoint.read(stored.tensors[0])


def _unclear(evidence: list[NormEvidence]) -> Refused:
    listed = "; ".join(f"{e.name}: {e.reason}" for e in evidence[:3])
    more = f"; and {len(evidence) - 3} more" if len(evidence) > 3 else ""
    return Refused(
        f"norms are not clearly stored as w (zero-centred) or as 1 + w (shifted): {listed}{more}",
        hint="compare with the original repository, then say which with --norms zero-centred or --norms shifted",
    )


def _said(
    asked: str, convention: dict[str, str], found: dict[str, NormEvidence], added: dict[str, int]
) -> list[Finding]:
    """A note when norms are not what a raw head's are, or when the user said what they are."""
    names = sorted(name for name, one in convention.items() if asked != "auto" or one == "shifted")
    if not names:
        return []
    done = {1: "1 is added to them", 0: "nothing is added to them", -1: "1 is taken off them"}[
        added[names[0]]
    ]
    which = some(names) if len(names) < len(convention) else f"all {len(names)} norms"
    how = convention[names[0]]
    why = found[names[0]].reason if asked != "auto" else f"{names[0]}: {found[names[0]].reason}"
    return [Finding("SPLIT-NORMS", "note", f"{which} are stored {how} ({why}), so {done}", found=how)]
