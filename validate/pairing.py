"""Validates a pair from its files, and makes the only thing the runtime accepts: a validated pair."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from draftpair.checkpoint import Checkpoint
from draftpair.errors import Refused, ToolError
from draftpair.families import family_of_target
from draftpair.families.drafters import DrafterMatch, find_drafter
from draftpair.families.heads import find_head
from draftpair.families.record import Family
from draftpair.families.rules import apply_rules
from draftpair.findings import Finding, has_errors
from draftpair.validate.facts import pair_facts
from draftpair.validate.selfcheck import check_drafter, check_target
from draftpair.validate.verdict import PASSING, Verdict, grade
from draftpair.validate.width import block_width


@dataclass(frozen=True)
class ValidatedPair:
    """A pair that may run. It can only be made from a verdict that lets it; the runtime has no other door."""

    target: Checkpoint
    drafter: Checkpoint
    family: Family
    block_size: int
    block_size_from: str
    verdict: Verdict
    allow_doubtful: bool = False

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


def validate_pair(target: Checkpoint, drafter: Checkpoint, block_size: int | None = None) -> Verdict:
    """Whether target and drafter are safe to run together; ``block_size`` replaces the drafter's own width.

    The verdict is ``proven``, ``compatible``, ``doubtful``, ``unsafe`` or ``unknown``.
    """
    match = find_drafter(drafter)
    findings = [*_said_of("target", [*target.findings, *_target_findings(target)])]
    findings += _said_of("drafter", drafter.findings)
    if match is None:
        findings.append(_no_family(drafter))
        return _verdict(target, drafter, None, findings, None, {})
    own = check_drafter(drafter, match)
    findings += own
    if has_errors([*drafter.findings, *own]):
        # Facts would be computed from a config or tensors that are already known to be wrong.
        return _verdict(target, drafter, match, findings, None, {})
    try:
        width = block_width(block_size, os.environ, drafter.config, match.family)
        facts = pair_facts(target, drafter, match.family, width)
    except Refused as error:
        findings.append(Finding("PAIR-FACTS", "error", error.message, hint=error.hint))
        return _verdict(target, drafter, match, findings, None, {})
    findings += apply_rules(facts, match.family.name, "pair")
    return _verdict(target, drafter, match, findings, width, facts)


def require_pair(target: Checkpoint, drafter: Checkpoint) -> tuple[Family, Verdict]:
    """The drafter's family, and the verdict on the pair. Raises Refused when it is unsafe, ToolError when unknown."""
    verdict, match = validate_pair(target, drafter), find_drafter(drafter)
    if match is None or verdict.name in ("unsafe", "unknown"):
        first = next((f for f in verdict.findings if f.level == "error"), verdict.findings[-1])
        raise (Refused if verdict.name == "unsafe" else ToolError)(
            f"{drafter.source} does not belong to {target.source} ({verdict.name}): {first.message}", _SEE
        )
    return match.family, verdict


def validated_pair(
    target: Checkpoint, drafter: Checkpoint, block_size: int | None = None, allow_doubtful: bool = False
) -> ValidatedPair:
    """The pair, when its verdict lets it run; raises as `ValidatedPair` does."""
    verdict = validate_pair(target, drafter, block_size)
    match = find_drafter(drafter)
    if match is None or verdict.pair is None or verdict.pair["block_size"] is None:
        first = next((f for f in verdict.findings if f.level == "error"), verdict.findings[0])
        raise (Refused if verdict.name == "unsafe" else ToolError)(
            f"{drafter.source} with {target.source} cannot run: {first.message}", first.hint
        )
    width, source = verdict.pair["block_size"], verdict.pair["block_size_from"]
    return ValidatedPair(target, drafter, match.family, width, source, verdict, allow_doubtful)


def _verdict(
    target: Checkpoint,
    drafter: Checkpoint,
    match: DrafterMatch | None,
    findings: list[Finding],
    width: tuple[int, str] | None,
    facts: dict[str, Any],
) -> Verdict:
    proven = bool(facts) and facts["provenance"]["relation"] == "same"
    target_family = family_of_target(target.config, match.family if match else None)
    pair = {
        "target_family": target_family.name if target_family else None,
        "drafter_family": match.family.name if match else None,
        "kind": match.family.kind if match else None,
        "block_size": width[0] if width else None,
        "block_size_from": width[1] if width else None,
    }
    inputs = {
        "target": target.source,
        "drafter": drafter.source,
        "target_revision": target.revision,
        "drafter_revision": drafter.revision,
    }
    return Verdict(
        grade(findings, "proven" if proven else "compatible"), inputs, tuple(findings), pair, facts
    )


def _said_of(role: str, findings: Iterable[Finding]) -> list[Finding]:
    """A checkpoint's own findings, each saying whose it is."""
    return [replace(finding, message=f"{role}: {finding.message}") for finding in findings]


def _target_findings(target: Checkpoint) -> list[Finding]:
    """What is wrong with the target's own tensors; its head, if it has one, is not part of the pair."""
    if find_drafter(target):
        return [
            Finding(
                "PAIR-TARGET-ROLE",
                "error",
                f"{target.source} is a drafter, not a target",
                where=target.source,
                found=target.config.root_model_type,
                hint="give the target first, then the drafter",
            )
        ]
    return check_target(target)


def _no_family(drafter: Checkpoint) -> Finding:
    return Finding(
        "DRAFTER-FAMILY-UNKNOWN",
        "warning",
        f"{drafter.source} is not a drafter of a family that draftpair knows "
        f"(model_type {drafter.config.root_model_type!r})",
        where=drafter.source,
        found=drafter.config.root_model_type,
        hint=_split_hint(drafter) if find_head(drafter) else "`draftpair families` lists them",
    )


def _split_hint(raw: Checkpoint) -> str:
    return f"it holds a head; split it first: draftpair split-mtp --model {raw.source} --output DIR"
