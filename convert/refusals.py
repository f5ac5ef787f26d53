"""The sources a head cannot be split from, each with its own message."""

from __future__ import annotations

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.fingerprint import is_incomplete
from draftpair.checkpoint.wording import some
from draftpair.errors import Refused, ToolError
from draftpair.families import family_of_target, load_families
from draftpair.families.heads import HeadMatch, unrecorded_head
from draftpair.findings import Finding, by_severity

# Without a readable config or index nothing else can be said, wherever the head lies.
_FATAL = ("CONFIG-MISSING", "CONFIG-PARSE", "INDEX-PARSE", "INDEX-NO-WEIGHT-MAP")
_PACKED = "HEAD-PACKED"
_BROKEN = ("FILE-HEADER", "FILE-DANGLING-LINK", "INDEX-SHARD-MISSING")


def require_head(checkpoint: Checkpoint, match: HeadMatch | None) -> HeadMatch:
    """The head, when it can be split: whole, unpacked, one layer deep, in files that are sound.

    Raises Refused, or ToolError when the family has no record.
    """
    _refuse_unreadable(checkpoint)
    if match is None:
        raise _no_head(checkpoint)
    match.family.number(match.family.head.first_layer, checkpoint.config)
    _refuse_depth(match)
    errors = [finding for finding in match.findings if finding.level == "error"]
    # Packed tensors also have unknown names and wrong shapes; that they are packed is the cause.
    if cause := [finding for finding in errors if finding.rule == _PACKED] or errors:
        broken = _broken_files(checkpoint, match.prefix) if match.missing else []
        raise _refused([*cause, *broken])
    if touching := [f for f in checkpoint.findings if f.level == "error" and _touches(f, match)]:
        raise _refused(touching)
    return match


def partial_source(checkpoint: Checkpoint) -> list[Finding]:
    """A warning when weight files without head tensors are absent or damaged: the split works, the proof does not."""
    if not is_incomplete(checkpoint):
        return []
    return [
        Finding(
            "SPLIT-SOURCE-PARTIAL",
            "warning",
            "weight files of the source are missing or damaged; the head is whole, and the manifest cannot say which "
            "target it belongs to",
            where=checkpoint.source,
            hint="split from the whole checkpoint to have the origin recorded",
        )
    ]


def _refused(findings: list[Finding]) -> Refused:
    """All the errors in one message, with the last one's hint: causes come last."""
    return Refused("; ".join(finding.message for finding in findings), findings[-1].hint)


def _refuse_unreadable(checkpoint: Checkpoint) -> None:
    if not checkpoint.has_file("config.json"):
        raise Refused(
            f"{checkpoint.root} has no config.json",
            hint="--model wants the raw checkpoint's whole folder: config.json, weights and tokenizer",
        )
    if fatal := [f for f in by_severity(checkpoint.findings) if f.level == "error" and f.rule in _FATAL]:
        raise _refused(fatal)


def _no_head(checkpoint: Checkpoint) -> ToolError:
    family = family_of_target(checkpoint.config.model_type)
    if family is None:
        return _other_family(checkpoint, checkpoint.config.model_type)
    if checkpoint.config.root_model_type == family.drafter.model_type:
        return Refused(
            f"{checkpoint.root} is a drafter already (model_type {family.drafter.model_type}), and holds no head",
            hint=f"split {family.target.source}",
        )
    prefix = family.head.layer_prefix.format(layer=family.number(family.head.first_layer, checkpoint.config))
    if broken := _broken_files(checkpoint, prefix):
        return _refused(broken)
    return Refused(
        f"{checkpoint.root} has no tensor {prefix}*: it was converted without its MTP layer",
        hint=f"use {family.target.source}",
    )


def _other_family(checkpoint: Checkpoint, model_type: str | None) -> ToolError:
    supported = sorted({name for family in load_families().values() for name in family.target.model_types})
    elsewhere = unrecorded_head(checkpoint)
    seen = f" (its {elsewhere[0]}* tensors look like a head)" if elsewhere else ""
    declared = f"model_type {model_type!r}" if model_type else "no model_type"
    return ToolError(
        f"{checkpoint.root}: config.json declares {declared}{seen}, and there is no family record for it",
        hint=f"supported: {', '.join(supported)}",
    )


def _refuse_depth(match: HeadMatch) -> None:
    if match.layers_found > match.family.head.max_depth:
        names = ", ".join(match.family.head.layer_prefix.format(layer=n).rstrip(".") for n in match.layers)
        raise Refused(
            f"the source has {match.layers_found} head layers ({names}); a {match.family.drafter.model_type} "
            f"drafter holds {match.family.head.max_depth}, and draftpair drops none in silence",
        )


def _broken_files(checkpoint: Checkpoint, prefix: str) -> list[Finding]:
    """Findings about files that are absent or damaged, and that may hold tensors below `prefix`.

    A file that the index does not name may hold anything.
    """
    listed = {**checkpoint.index.refused, **checkpoint.index.weight_map} if checkpoint.index else {}
    ours = {file for name, file in listed.items() if name.startswith(prefix)} - set(checkpoint.files)
    others = set(listed.values()) - ours
    broken = [
        f for f in checkpoint.findings if f.rule in _BROKEN and f.level == "error" and f.where not in others
    ]
    if absent := ours - {finding.where for finding in broken}:
        names = sorted(absent)
        places = some([repr(name) for name in names])
        message = f"the index puts {prefix}* in {places}, which is no readable file of the folder"
        hint = "download what is missing; a split needs only the files that hold the head"
        broken.insert(0, Finding("INDEX-SHARD-MISSING", "error", message, names[0], hint=hint))
    return broken


def _touches(finding: Finding, match: HeadMatch) -> bool:
    """Whether a finding is about a file that holds one of the head's tensors, or that is said to."""
    checkpoint, names = match.checkpoint, {tensor.name for tensor in match.tensors}
    holding = {f.name for f in checkpoint.files.values() if not names.isdisjoint(f.header.tensors)}
    listed = checkpoint.index.weight_map if checkpoint.index else {}
    return finding.where in holding | {listed[name] for name in names & listed.keys()}
