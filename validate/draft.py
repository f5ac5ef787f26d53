"""What drafts in a pair: a drafter's folder, a whole model, or the head in a target's own files.

The files decide; a draft kind that is asked for only chooses where they leave a choice, and is compared elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.families import family
from draftpair.families.drafters import find_drafter
from draftpair.families.heads import HeadMatch, find_head
from draftpair.families.models import is_model
from draftpair.families.record import Family
from draftpair.findings import Finding


@dataclass(frozen=True)
class Draft:
    """A drafter of a known family: where it lies, its config under the family's keys, what its markers disagree about.

    ``head`` is the head in the files of a whole checkpoint, None for a folder of its own or a whole model.
    """

    checkpoint: Checkpoint
    family: Family
    config: ConfigView
    findings: tuple[Finding, ...] = ()
    head: HeadMatch | None = None

    @property
    def is_model(self) -> bool:
        """Whether an ordinary model drafts."""
        return self.family.drafter.cache == "model"

    @property
    def borrows(self) -> tuple[str, ...]:
        """What it takes from the target: ``embedding``, ``head``, both or none."""
        return self.family.borrows(self.checkpoint.tensors if self.head is None else set(_written(self.head)))


def find_draft(target: Checkpoint, drafter: Checkpoint, kind: str | None = None) -> Draft | Finding:
    """What would draft, or why nothing does.

    A target that is given as its own drafter means its embedded head. A whole model elsewhere drafts as such; one
    that holds a head as well could be meant either way, and then ``kind`` has to say which.
    """
    if match := find_drafter(drafter):
        return Draft(drafter, match.family, match.config, match.findings)
    own = drafter.is_same_as(target)
    if not is_model(drafter) and not own:
        return _no_family(drafter)
    head = find_head(drafter)
    if kind == "mtp" or (own and kind is None):
        if head is None:
            return _no_head(drafter, own)
        return Draft(drafter, head.family, head.config, (), head)
    if head is not None and kind is None:
        return _either(drafter, head)
    return Draft(drafter, family("full_model"), drafter.config)


def _written(head: HeadMatch) -> Iterator[str]:
    return (output.name.format(layer=m.layer) for m in head.matched for output in m.rule.outputs)


def _no_head(drafter: Checkpoint, own: bool) -> Finding:
    given = "was given as its own drafter" if own else "was given as an MTP drafter"
    return Finding(
        "DRAFT-NO-EMBEDDED-HEAD",
        "error",
        f"{drafter.source} {given}, and no tensor of an MTP head is in its files",
        where=drafter.source,
        expected="mtp.* tensors, or layers past the last decoder layer",
        found=None,
        hint="conversions drop the head: give the folder of a drafter, or attach a head with draftpair attach",
    )


def _either(drafter: Checkpoint, head: HeadMatch) -> Finding:
    return Finding(
        "DRAFT-KIND-UNKNOWN",
        "warning",
        f"{drafter.source} is a whole model and holds a head as well ({len(head.tensors)} tensors under "
        f"{head.prefix}): nothing says which of them is to draft",
        where=drafter.source,
        found=["full-model", "mtp"],
        hint=f"to use the head, split it: draftpair split-mtp --model {drafter.source} --output DIR; "
        "or say which with --draft-kind mtp or full-model",
    )


def _no_family(drafter: Checkpoint) -> Finding:
    declared = drafter.config.root_model_type
    return Finding(
        "DRAFTER-FAMILY-UNKNOWN",
        "warning",
        f"{drafter.source} is neither a drafter of a family that draftpair knows nor a whole model "
        f"(model_type {declared!r})",
        where=drafter.source,
        found=declared,
        hint="`draftpair families` lists them",
    )
