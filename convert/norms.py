"""What is to be added to a head's norms, so that they are stored as the drafter expects; decided norm by norm."""

from __future__ import annotations

from typing import cast

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.dtypes import to_float32
from draftpair.checkpoint.stored import Stored
from draftpair.checkpoint.wording import some
from draftpair.errors import Refused
from draftpair.families.heads import HeadMatch
from draftpair.families.norms import Convention, NormEvidence, converter, norm_conventions
from draftpair.findings import Finding

_WANTED = {"zero_centred": "shifted", "stays_zero_centred": "zero-centred"}
_ADDED = {("zero-centred", "shifted"): 1, ("shifted", "zero-centred"): -1}


def added_to_norms(match: HeadMatch, asked: str) -> tuple[dict[str, int], list[Finding]]:
    """1 or -1 by the name of each norm that it must be added to, and what is to be said about the norms.

    `asked` is "auto", or the convention of those norms whose values do not tell. Raises Refused, naming each norm and
    what speaks for either convention, when that stays open, or when `asked` is not what any norm's values say.
    """
    stored = {s.name: (s, _WANTED[m.rule.norm]) for m in match.matched if m.rule.norm for s in m.sources}
    if not stored:
        return {}, [_unused(asked, "the family stores no norm zero-centred")] if asked != "auto" else []
    vectors = {name: to_float32(_values(match.checkpoint, s), s.dtype) for name, (s, _) in stored.items()}
    found = norm_conventions(vectors, converter(match.checkpoint, vectors) is not None)
    open_ones = [name for name, evidence in found.items() if evidence.convention is None]
    findings = []
    if asked != "auto":
        _refuse_contradiction(asked, found)
        found |= {name: NormEvidence(name, cast(Convention, asked), "--norms says so") for name in open_ones}
        findings += [] if open_ones else [_unused(asked, "the values of every norm tell how it is stored")]
    if unclear := [e for e in found.values() if e.convention not in _WANTED.values()]:
        raise _unclear(unclear)
    convention = {name: str(evidence.convention) for name, evidence in found.items()}
    added = {name: _ADDED.get((convention[name], wanted), 0) for name, (_, wanted) in stored.items()}
    said = _said(set(open_ones) if asked != "auto" else set(), convention, found, added)
    return {name: what for name, what in added.items() if what}, [*findings, *said]


def _refuse_contradiction(asked: str, found: dict[str, NormEvidence]) -> None:
    """What values say cannot be overruled: the drafter would be wrong, and nothing would show it."""
    decided = [evidence for evidence in found.values() if evidence.convention]
    if decided and all(evidence.convention != asked for evidence in decided):
        first = decided[0]
        raise Refused(
            f"--norms says {asked}, and the values of {len(decided)} norms say {first.convention}: {first.name}: "
            f"{first.reason}",
            hint="leave --norms out: it is for norms whose values do not tell",
        )


def _unused(asked: str, why: str) -> Finding:
    message = f"--norms {asked} has no effect: {why}"
    return Finding("SPLIT-OPTION-UNUSED", "warning", message, "--norms", found=asked, hint="leave it out")


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
    told: set[str], convention: dict[str, str], found: dict[str, NormEvidence], added: dict[str, int]
) -> list[Finding]:
    """A note when norms are not what a raw head's are, and for those that the user said something about."""
    names = sorted(name for name, one in convention.items() if name in told or one == "shifted")
    if not names:
        return []
    done = {1: "1 is added to them", 0: "nothing is added to them", -1: "1 is taken off them"}[
        added[names[0]]
    ]
    which = some(names) if len(names) < len(convention) else f"all {len(names)} norms"
    how, why = convention[names[0]], f"{names[0]}: {found[names[0]].reason}"
    return [Finding("SPLIT-NORMS", "note", f"{which} are stored {how} ({why}), so {done}", found=how)]
