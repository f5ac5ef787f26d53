"""Validates one checkpoint alone: its files, and its head or its drafter's tensors."""

from __future__ import annotations

from collections.abc import Iterable

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.wording import some
from draftpair.errors import Refused
from draftpair.families.drafters import find_drafter
from draftpair.families.heads import HeadMatch, declared_depth, find_head, recognised_head
from draftpair.families.models import is_model
from draftpair.findings import Finding
from draftpair.validate.samples import to_be_read, unread
from draftpair.validate.selfcheck import check_drafter, check_target, is_unreadable
from draftpair.validate.target_values import check_target_values
from draftpair.validate.verdict import Verdict, grade, inputs_of

_OTHER_WEIGHTS = (".gguf", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".h5", ".msgpack", ".onnx")
"""How the names of weights in other formats end."""


def validate_one(checkpoint: Checkpoint, *, values: bool | None = None) -> Verdict:
    """Whether a checkpoint is sound: ``sound``, ``doubtful``, ``unsafe`` or ``unknown``.

    ``values`` says whether weights are looked at; where it is None those on this machine are.
    """
    own = _own_findings(checkpoint, to_be_read(checkpoint, values))
    findings = (*checkpoint.findings, *own, *unread(checkpoint, values))
    fetched = (checkpoint.bytes_fetched, None)
    return Verdict(grade(findings, "sound"), inputs_of(checkpoint), findings, None, {}, fetched=fetched)


def _own_findings(checkpoint: Checkpoint, values: bool) -> list[Finding]:
    """`own_findings`; a config that lacks a size, so that nothing can be compared, is the only one then."""
    try:
        return own_findings(checkpoint, values)
    except Refused as error:
        return [Finding("CONFIG-DIMENSION", "error", error.message, "config.json", hint=error.hint)]


def require_runnable(target: Checkpoint) -> None:
    """Raises Refused for a drafter, and for what `validate` would call unsafe apart from an embedded head."""
    if role_of(target) == "drafter":
        raise Refused(
            f"{target.source} is a drafter, not a model that runs alone",
            hint="give it with --draft-model, and its target with --model",
        )
    errors = [finding for finding in (*target.findings, *check_target(target)) if finding.level == "error"]
    if errors:
        raise Refused(f"{target.source} is damaged: {errors[0].message}", errors[0].hint)


def own_findings(checkpoint: Checkpoint, values: bool) -> list[Finding]:
    """What is to be said of a checkpoint's role: as a drafter, or as a target with or without a head."""
    if is_unreadable(checkpoint):
        return []
    if drafter := find_drafter(checkpoint):
        return check_drafter(checkpoint, drafter, values)
    if head := find_head(checkpoint):
        return [*check_target(checkpoint), *head.findings, *_target_values(checkpoint, head, values)]
    if role_of(checkpoint) == "unknown" and recognised_head(checkpoint) is None:
        return [_no_role(checkpoint) if checkpoint.files else without_weights(checkpoint)]
    return [
        *check_target(checkpoint),
        *_absent_head(checkpoint),
        *_target_values(checkpoint, None, values),
    ]


def without_weights(checkpoint: Checkpoint) -> Finding:
    """That a checkpoint has no weights to judge; what it has in other formats is named."""
    others = [name for name in checkpoint.storage.names() if name.lower().endswith(_OTHER_WEIGHTS)]
    return Finding(
        "ROLE-UNKNOWN",
        "warning",
        "there are no .safetensors files, so nothing but config.json can be judged"
        + (f"; the weights are in another format: {some(others)}" if others else ""),
        where=checkpoint.source,
        expected="*.safetensors",
        found=others[:5],
        hint="give the original checkpoint in safetensors format"
        if others
        else "download the weights, `*.safetensors`, beside config.json",
    )


def _no_role(checkpoint: Checkpoint) -> Finding:
    return Finding(
        "ROLE-UNKNOWN",
        "warning",
        "this is neither a target (no decoder layers with an embedding) nor a drafter of a known family",
        where=checkpoint.source,
        found=checkpoint.config.root_model_type,
        hint="`draftpair families` lists the drafters that draftpair knows",
    )


def _target_values(checkpoint: Checkpoint, head: HeadMatch | None, values: bool) -> Iterable[Finding]:
    return check_target_values(checkpoint, head) if values else ()


def _absent_head(checkpoint: Checkpoint) -> list[Finding]:
    if seen := recognised_head(checkpoint):
        if record := seen.record:
            message = (
                f"{len(seen.tensors)} tensors under {seen.prefix} are a head of {record.title} ({record.name}); it is "
                f"not split: {record.unsupported}"
            )
        else:
            message = (
                f"{len(seen.tensors)} tensors under {seen.prefix} look like a head; no record of its family says what "
                f"is whole"
            )
        return [
            Finding(
                "HEAD-RECOGNISED" if seen.record else "HEAD-FAMILY-UNRECORDED",
                "note",
                message,
                where=seen.prefix,
                found=len(seen.tensors),
                hint="`draftpair families` lists the families that can be checked and split",
            )
        ]
    if declared := declared_depth(checkpoint):
        record, key, depth = declared
        return [
            Finding(
                "HEAD-ABSENT",
                "note",
                f"config.json declares {depth} head layer(s) under {key}; no tensor of one is here",
                where=checkpoint.config.place(key),
                expected=depth,
                found=0,
                hint=f"conversions drop the head; it can be had from {record.target.source}",
            )
        ]
    return []


def role_of(checkpoint: Checkpoint) -> str:
    """``drafter`` for a family with a record; ``target`` for decoder layers with an embedding; else ``unknown``."""
    if find_drafter(checkpoint):
        return "drafter"
    return "target" if is_model(checkpoint) else "unknown"
