"""Recognises a drafter folder: by its tensors first, by ``model_type`` second, by its name never."""

from __future__ import annotations

from dataclasses import dataclass

from draftpair.checkpoint import Checkpoint
from draftpair.families import load_families
from draftpair.families.heads import chosen, wanted
from draftpair.families.record import Family
from draftpair.findings import Finding


@dataclass(frozen=True)
class DrafterMatch:
    """The family of a drafter folder, and what its two markers (tensors, model_type) disagree about."""

    family: Family
    findings: tuple[Finding, ...]


def find_drafter(checkpoint: Checkpoint) -> DrafterMatch | None:
    """The family whose marker tensors the checkpoint carries, or whose drafter type its config declares.

    None when neither points to a family with a record. A disagreement of the two is a finding.
    """
    declared = checkpoint.config.root_model_type
    by_tensors = [
        f for f in load_families().values() if any(m in checkpoint.tensors for m in f.drafter.markers)
    ]
    by_type = [f for f in load_families().values() if f.drafter.model_type == declared]
    if by_tensors:
        family = next((f for f in by_tensors if f in by_type), by_tensors[0])
        return DrafterMatch(family, () if family in by_type else (_type_disagrees(family, declared),))
    if by_type:
        return DrafterMatch(by_type[0], (_type_alone(by_type[0]),))
    return None


def output_shapes(family: Family, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The names and logical (unquantized) shapes that the family's drafter folder must hold.

    Where the record offers alternatives, the folder's own tensors choose.
    """
    config = checkpoint.config
    rules = [rule for rule in family.rules if rule.outputs and wanted(rule, family, config)]
    rules = chosen(rules, lambda rule: rule.outputs[0] in checkpoint.tensors)
    return {
        name: family.resolve(shape, config)
        for rule in rules
        for name, shape in zip(rule.outputs, rule.output_shapes, strict=True)
    }


def _type_disagrees(family: Family, declared: str | None) -> Finding:
    return Finding(
        "DRAFTER-MODEL-TYPE",
        "error",
        f"the tensors are those of a {family.name} drafter; config.json says model_type {declared!r}",
        where="config.json#/model_type",
        expected=family.drafter.model_type,
        found=declared,
        hint="a runtime that goes by model_type will load something else; restore the drafter's own config.json",
    )


def _type_alone(family: Family) -> Finding:
    return Finding(
        "DRAFTER-TENSORS",
        "error",
        f"config.json says model_type {family.drafter.model_type!r}, but no tensor of such a drafter is there",
        where="config.json#/model_type",
        expected=list(family.drafter.markers),
        found=[],
        hint=f"write the drafter again with split-mtp from {family.target.source}",
    )
