"""Judges a pair-facts document that another tool may have made: a family's pair rules, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftpair.errors import Usage
from draftpair.families import family, load_families
from draftpair.families.record import Family
from draftpair.families.rules import apply_rules
from draftpair.schemas import check, load_schema
from draftpair.validate.verdict import Verdict, grade


def _contradiction(document: Mapping[str, Any], record: Family) -> str | None:
    """A relation that its own values deny, or a family that is not the drafter's; None when there is none."""
    for key in ("hidden", "streams", "layers"):
        mine, theirs, relation = (document[key][part] for part in ("target", "drafter", "relation"))
        if (
            None not in (mine, theirs)
            and relation in ("equal", "different")
            and (mine == theirs) != (relation == "equal")
        ):
            return f"{key} is {mine} and {theirs}, and its relation {relation}"
    if document["family"]["expected"] != list(record.target.model_types):
        return f"family expects {document['family']['expected']}, which are not the targets of {record.name}"
    if document["drafter"]["kind"] != record.kind:
        return f"drafter is of kind {document['drafter']['kind']!r}, and {record.name} of {record.kind!r}"
    return None


def judge(document: Any) -> Verdict:
    """The verdict on a document; what is wrong with either side's own files is not in it.

    Raises Usage for one that is malformed.
    """
    problems = check(document, load_schema("pair-facts"))
    if problems:
        raise Usage(
            f"this is no pair-facts document: {'; '.join(problems[:3])}",
            hint="`draftpair schema pair-facts` prints what one holds",
        )
    name = document["drafter"]["family"]
    if name not in load_families():
        raise Usage(
            f"the document says that the drafter's family is {name!r}, which draftpair does not know",
            hint="known families: " + ", ".join(load_families()),
        )
    if contradiction := _contradiction(document, family(name)):
        raise Usage(
            f"the document contradicts itself: {contradiction}", hint="every relation follows from its values"
        )
    findings = apply_rules(document, name, "pair")
    proven = document["provenance"]["relation"] == "same"
    pair = {
        "target_family": document["target"]["family"],
        "drafter_family": name,
        "kind": family(name).kind,
        "block_size": document["block_size"]["value"],
        "block_size_from": document["block_size"]["from"],
    }
    inputs = {
        "target": document["target"]["source"],
        "drafter": document["drafter"]["source"],
        "target_revision": document["target"]["revision"],
        "drafter_revision": document["drafter"]["revision"],
    }
    best = "proven" if proven else "compatible"
    return Verdict(grade(findings, best), inputs, tuple(findings), pair, document)
