"""Validates a pair from its files, and makes the only thing the runtime accepts: a validated pair."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.memo import per_checkpoint
from draftpair.errors import Refused, ToolError
from draftpair.families import family_of_target
from draftpair.families.drafters import find_drafter
from draftpair.families.heads import HeadMatch
from draftpair.families.record import Family
from draftpair.families.rules import apply_rules
from draftpair.findings import Finding, has_errors
from draftpair.validate.draft import Draft, find_draft
from draftpair.validate.facts import pair_facts
from draftpair.validate.questions import answers
from draftpair.validate.samples import to_be_read, unread
from draftpair.validate.selfcheck import check_drafter, check_target
from draftpair.validate.target_values import check_target_values, trunk_values
from draftpair.validate.verdict import PASSING, Verdict, grade, inputs_of
from draftpair.validate.width import Width, block_width


@dataclass(frozen=True)
class ValidatedPair:
    """A pair that may run. It can only be made from a verdict that lets it; the runtime has no other door.

    ``block_size`` is the width to run with, ``declared_block_size`` the drafter's own, None where that is unusable.
    """

    target: Checkpoint
    drafter: Checkpoint
    family: Family
    block_size: int
    block_size_from: str
    verdict: Verdict
    allow_doubtful: bool = False
    declared_block_size: int | None = None

    def __post_init__(self) -> None:
        """Raises Refused for an unsafe or doubtful pair, ToolError for an unknown verdict, or another pair's."""
        if (self.verdict.inputs["target"], self.verdict.inputs["drafter"]) != (
            self.target.source,
            self.drafter.source,
        ):
            raise ToolError(f"the verdict is not about {self.drafter.source} with {self.target.source}")
        if self.verdict.name in PASSING or (self.verdict.name == "doubtful" and self.allow_doubtful):
            return
        reasons = "; ".join(f"{f.rule}: {f.message}" for f in self.verdict.findings if f.level != "note")
        sources = f"{self.drafter.source} with {self.target.source}"
        if self.verdict.name == "doubtful":
            raise Refused(
                f"{sources} is a doubtful pair: {reasons}", "look at it, then run with --allow-doubtful"
            )
        if self.verdict.name == "unknown":
            raise ToolError(f"cannot tell whether {sources} is a safe pair: {reasons}", _SEE)
        raise Refused(f"{sources} is an unsafe pair: {reasons}", _SEE)


_SEE = "see `draftpair validate TARGET DRAFTER` for every finding"


def validate_pair(
    target: Checkpoint,
    drafter: Checkpoint,
    block_size: int | None = None,
    *,
    kind: str | None = None,
    values: bool | None = None,
) -> Verdict:
    """Whether target and drafter are safe to run together.

    ``block_size`` replaces the drafter's own width; ``kind`` is the draft kind that is asked for, and chooses where a
    whole model holds a head as well. ``values`` says whether weights are looked at, beyond those that show where a
    head is from; where it is None, those on this machine are.
    The verdict is ``proven``, ``compatible``, ``doubtful``, ``unsafe`` or ``unknown``.
    """
    same = drafter.is_same_as(target)
    if find_drafter(target):
        return _verdict(target, drafter, None, [_no_target(target, same)])
    findings = [
        *_said_of("target", [*target.findings, *_target_findings(target, to_be_read(target, values))])
    ]
    findings += _said_of("drafter", () if same else drafter.findings)
    findings += [*unread(target, values), *(() if same else unread(drafter, values))]
    try:
        draft = find_draft(target, drafter, kind)
    except Refused as error:
        draft = Finding(
            "CONFIG-DIMENSION", "error", f"drafter: {error.message}", "config.json", hint=error.hint
        )
    if isinstance(draft, Finding):
        return _verdict(target, drafter, None, [*findings, draft])
    own = _own_findings(draft, to_be_read(drafter, values))
    findings += own
    if has_errors([*drafter.findings, *own]):
        # Facts would be computed from a config or tensors that are already known to be wrong.
        return _verdict(target, drafter, draft, findings)
    try:
        width = block_width(block_size, os.environ, draft.config, draft.family)
        compared = to_be_read(target, values) and to_be_read(drafter, values)
        facts = pair_facts(target, draft, width, kind, compared)
    except Refused as error:
        findings.append(Finding("PAIR-FACTS", "error", error.message, hint=error.hint))
        return _verdict(target, drafter, draft, findings)
    findings += apply_rules(facts, draft.family.name, "pair")
    return _verdict(target, drafter, draft, findings, width, facts)


def require_pair(target: Checkpoint, drafter: Checkpoint) -> tuple[Family, Verdict]:
    """The drafter's family, and the verdict on the pair. Raises Refused when it is unsafe, ToolError when unknown."""
    verdict, draft = validate_pair(target, drafter), find_draft(target, drafter)
    if isinstance(draft, Finding) or verdict.name in ("unsafe", "unknown"):
        first = next((f for f in verdict.findings if f.level == "error"), verdict.findings[-1])
        raise (Refused if verdict.name == "unsafe" else ToolError)(
            f"{drafter.source} does not belong to {target.source} ({verdict.name}): {first.message}", _SEE
        )
    return draft.family, verdict


def validated_pair(
    target: Checkpoint,
    drafter: Checkpoint,
    block_size: int | None = None,
    allow_doubtful: bool = False,
    *,
    kind: str | None = None,
) -> ValidatedPair:
    """The pair, when its verdict lets it run; raises as `ValidatedPair` does."""
    verdict, draft = validate_pair(target, drafter, block_size, kind=kind), find_draft(target, drafter, kind)
    if isinstance(draft, Finding) or verdict.pair is None or verdict.pair["block_size"] is None:
        first = next((f for f in verdict.findings if f.level == "error"), verdict.findings[0])
        raise (Refused if verdict.name == "unsafe" else ToolError)(
            f"{drafter.source} with {target.source} cannot run: {first.message}", first.hint
        )
    width, source = verdict.pair["block_size"], verdict.pair["block_size_from"]
    declared = _declared_width(draft)
    return ValidatedPair(target, drafter, draft.family, width, source, verdict, allow_doubtful, declared)


def _declared_width(draft: Draft) -> int | None:
    try:
        return block_width(None, {}, draft.config, draft.family).rows
    except Refused:
        return None  # a request took its place


def _own_findings(draft: Draft, values: bool) -> list[Finding]:
    """What is wrong with what drafts, whatever its target."""
    if draft.head is not None:
        return [*draft.head.findings, *(_head_values(draft.checkpoint, draft.head) if values else ())]
    if draft.is_model:
        rules = apply_rules(draft.checkpoint.config.raw, draft.family.name, "config", "config.json")
        return [*rules, *_said_of("drafter", check_target(draft.checkpoint))]
    return list(_drafter_findings(draft.checkpoint, values))


@per_checkpoint
def _drafter_findings(drafter: Checkpoint, values: bool) -> tuple[Finding, ...]:
    match = find_drafter(drafter)
    return tuple(check_drafter(drafter, match, values)) if match else ()


def _head_values(checkpoint: Checkpoint, head: HeadMatch) -> Iterator[Finding]:
    """What the values of a head in a whole checkpoint show; its trunk's are not the pair's business here."""
    names = {tensor.name for tensor in head.tensors}
    for finding in check_target_values(checkpoint, head):
        if finding.rule.startswith("HEAD-") or finding.where in names:
            yield finding


def _verdict(
    target: Checkpoint,
    drafter: Checkpoint,
    draft: Draft | None,
    findings: list[Finding],
    width: Width | None = None,
    facts: dict[str, Any] | None = None,
) -> Verdict:
    proven = facts is not None and facts["provenance"]["relation"] == "same"
    family = draft.family if draft else None
    target_family = family_of_target(target.config, family)
    pair = {
        "target_family": target_family.name if target_family else None,
        "drafter_family": family.name if family else None,
        "kind": family.kind if family else None,
        "block_size": width.rows if width else None,
        "block_size_from": width.source if width else None,
    }
    return Verdict(
        grade(findings, "proven" if proven else "compatible"),
        inputs_of(target, drafter),
        tuple(findings),
        pair,
        facts or {},
        tuple(answers(facts, drafter)) if facts else (),
        (target.bytes_fetched, drafter.bytes_fetched),
    )


def _said_of(role: str, findings: Iterable[Finding]) -> list[Finding]:
    """A checkpoint's own findings, each saying whose it is."""
    return [replace(finding, message=f"{role}: {finding.message}") for finding in findings]


def _target_findings(target: Checkpoint, values: bool) -> list[Finding]:
    """What is wrong with the target's own tensors; its head, if it has one, is not part of the pair."""
    return [*check_target(target), *(trunk_values(target) if values else ())]


def _no_target(drafter: Checkpoint, twice: bool) -> Finding:
    return Finding(
        "PAIR-TARGET-ROLE",
        "error",
        f"{drafter.source} is a drafter, not a target",
        where=drafter.source,
        found=drafter.config.root_model_type,
        hint="give its target first" if twice else "give the target first, then the drafter",
    )
