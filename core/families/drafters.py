"""Recognises a drafter folder: by its tensors first, by what its config says second, by its name never."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from draftpair.checkpoint import Checkpoint, ConfigView, TensorInfo
from draftpair.checkpoint.memo import per_checkpoint
from draftpair.checkpoint.wording import printable
from draftpair.families import load_families
from draftpair.families.heads import chosen, wanted
from draftpair.families.record import Family
from draftpair.families.specs import TensorRule
from draftpair.families.views import canonical, of_layer
from draftpair.findings import Finding, Level


@dataclass(frozen=True)
class DrafterMatch:
    """The family of a drafter folder, its config under the family's keys, and what its markers disagree about."""

    family: Family
    config: ConfigView
    findings: tuple[Finding, ...]


@per_checkpoint
def find_drafter(checkpoint: Checkpoint) -> DrafterMatch | None:
    """The family whose tensors the checkpoint carries, or that its config points to.

    Of several families the one with most of its markers wins, then the one with the largest share of them, then the
    one that the config points to. None when nothing points to a family with a record, or a config alone points to
    several: it is never guessed. Where tensors and config point to different families, that is a finding.
    """
    marks = {family: config_marks(family, checkpoint.config) for family in load_families().values()}
    family = _by_tensors(checkpoint, marks)
    if family:
        problems = _disagreement(family, checkpoint, marks)
    else:
        family = _by_config(marks)
        if family is None:
            return None
        problems = [_no_tensors(family, marks[family], checkpoint)]
    config, conflicts = canonical(family, checkpoint.config)
    return DrafterMatch(family, config, (*problems, *conflicts))


def config_marks(family: Family, config: ConfigView) -> dict[str, str]:
    """What in config.json points to the family: the key, and what it says, in words."""
    spec, marks = family.drafter, {}
    if spec.model_type and config.root_model_type == spec.model_type:
        marks["model_type"] = f"model_type {spec.model_type!r}"
    named = config.raw.get("architectures")
    for name in spec.architectures:
        if isinstance(named, list) and name in named:
            marks["architectures"] = f"architectures {name!r}"
    for path in spec.config_markers:
        if config.get(path):
            marks[path] = path
    if (kind := config.raw.get("speculators_model_type")) in spec.speculators:
        marks["speculators_model_type"] = f"speculators_model_type {kind!r}"
    return marks


_NAMING = ("model_type", "architectures", "speculators_model_type")
"""Marks that name one family; others, such as a block of settings, are shared."""


def _by_tensors(checkpoint: Checkpoint, marks: dict[Family, dict[str, str]]) -> Family | None:
    def rank(family: Family) -> tuple[int, float, int]:
        own = family.drafter.markers
        carried = sum(marker in checkpoint.tensors for marker in own)
        return carried, carried / max(1, len(own)), len(marks[family])

    best = max(marks, key=rank, default=None)
    return best if best and rank(best)[0] else None


def _by_config(marks: dict[Family, dict[str, str]]) -> Family | None:
    """The one family with most marks that name it, then with most marks at all; None where several have as many."""

    def rank(family: Family) -> tuple[int, int]:
        return sum(key in _NAMING for key in marks[family]), len(marks[family])

    most = max(map(rank, marks))
    pointed = [family for family in marks if marks[family] and rank(family) == most]
    return pointed[0] if len(pointed) == 1 else None


def _disagreement(
    family: Family, checkpoint: Checkpoint, marks: dict[Family, dict[str, str]]
) -> list[Finding]:
    """What config.json says that is not said of drafters with these tensors."""
    own, spec, config = marks[family], family.drafter, checkpoint.config
    others = [
        f"{mark}, which is {other.name}"
        for other, found in marks.items()
        for key, mark in found.items()
        if other is not family and key in _NAMING and mark not in own.values()
    ]
    declared = config.root_model_type
    if others or not own:
        return [_disagrees(family, "error", others[0] if others else f"model_type {declared!r}", config)]
    if declared not in (None, spec.model_type, *spec.plain_model_types):
        return [_disagrees(family, "warning", f"model_type {declared!r}", config)]
    return []


def output_shapes(
    family: Family, checkpoint: Checkpoint, config: ConfigView | None = None
) -> dict[str, tuple[int, ...]]:
    """The names and logical (unquantized) shapes that the family's drafter folder must hold.

    ``config`` is the checkpoint's under the family's keys. Where the record offers alternatives, the folder's own
    tensors choose, and what is optional is expected where it is there. There are as many layers as config.json
    declares, one when it declares none.
    """
    config = config or canonical(family, checkpoint.config)[0]
    key = family.drafter_depth(config)
    depth = family.count(key, config) if key and config.get(key) else 1
    shapes = dict(_of_layer(family, checkpoint, config, "head", 0))
    for tap in range(family.count("taps", config) if family.drafter.taps else 0):
        shapes.update(_of_layer(family, checkpoint, config, "tap", tap))
    for layer in range(min(depth, family.max_layers)):
        shapes.update(_of_layer(family, checkpoint, of_layer(family, config, layer), "layer", layer))
    return shapes


def _of_layer(
    family: Family, checkpoint: Checkpoint, config: ConfigView, per: str, number: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    scopes = (per, "target") if per == "head" else (per,)
    rules = [rule for rule in family.rules if rule.outputs and rule.per in scopes]
    rules = [rule for rule in rules if wanted(rule, family, config)]
    held = checkpoint.tensors
    outputs = {
        rule: {
            o.name.format(layer=number, tap=number): family.resolve(o.shape or (), config)
            for o in rule.outputs
        }
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


def _disagrees(family: Family, level: Level, said: str, config: ConfigView) -> Finding:
    spec = family.drafter
    return Finding(
        "DRAFTER-MODEL-TYPE",
        level,
        f"the tensors are those of a {family.name} drafter; config.json says {printable(said)}",
        where="config.json#/model_type",
        expected=spec.model_type or [*spec.architectures, *spec.speculators],
        found=config.root_model_type,
        hint="a runtime that goes by config.json will load something else; restore the drafter's own config.json",
    )


def _no_tensors(family: Family, marks: dict[str, str], checkpoint: Checkpoint) -> Finding:
    key, said = next(iter(marks.items()))
    return Finding(
        "DRAFTER-TENSORS",
        "error",
        f"config.json says {printable(said)}, but no tensor of such a drafter is there",
        where=f"config.json#{checkpoint.config.where(key) or ''}",
        expected=list(family.drafter.markers),
        found=[],
        hint=f"download the drafter again; it can be had from {family.target.source}",
    )
