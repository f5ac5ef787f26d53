"""Recognises a drafter folder: by its tensors first, by ``model_type`` second, by its name never."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from draftpair.checkpoint import Checkpoint, TensorInfo
from draftpair.families import load_families
from draftpair.families.heads import chosen, wanted
from draftpair.families.record import Family, TensorRule
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
    carried = {f: sum(m in checkpoint.tensors for m in f.drafter.markers) for f in load_families().values()}
    by_tensors = sorted((f for f in carried if carried[f]), key=lambda f: carried[f], reverse=True)
    by_type = [f for f in load_families().values() if f.drafter.model_type == declared]
    if by_tensors:
        family = next((f for f in by_tensors if f in by_type), by_tensors[0])
        return DrafterMatch(family, () if family in by_type else (_type_disagrees(family, declared),))
    if by_type:
        return DrafterMatch(by_type[0], (_type_alone(by_type[0]),))
    return None


def output_shapes(family: Family, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """The names and logical (unquantized) shapes that the family's drafter folder must hold.

    Where the record offers alternatives, the folder's own tensors choose, and what is optional is expected where
    it is there. There are as many layers as config.json declares, one when it declares none.
    """
    config = checkpoint.config
    key = family.drafter_depth(config)
    depth = family.count(key, config) if key and config.get(key) else 1
    rules = [rule for rule in family.rules if rule.outputs and wanted(rule, family, config)]
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(min(depth, family.head.max_depth)):
        here = [rule for rule in rules if rule.per == "layer" or layer == 0]
        shapes.update(_of_layer(family, checkpoint, here, layer))
    return shapes


def _of_layer(
    family: Family, checkpoint: Checkpoint, rules: list[TensorRule], layer: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    config, held = checkpoint.config, checkpoint.tensors
    outputs = {
        rule: {o.name.format(layer=layer): family.resolve(o.shape or (), config) for o in rule.outputs}
        for rule in rules
    }

    def is_present(rule: TensorRule) -> bool:
        return any(name in held for name in outputs[rule])

    def fits(rule: TensorRule) -> bool:
        return all(_fits(held.get(name), shape) for name, shape in outputs[rule].items())

    for rule in chosen(rules, is_present, fits):
        if not rule.optional or is_present(rule):
            yield from outputs[rule].items()


def _fits(tensor: TensorInfo | None, shape: tuple[int, ...]) -> bool:
    """Whether a tensor may be one of this shape; of packed words the rows are compared."""
    return (
        tensor is None or tensor.shape == shape or (tensor.dtype == "U32" and tensor.shape[:-1] == shape[:-1])
    )


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
