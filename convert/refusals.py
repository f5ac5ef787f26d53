"""The sources a head cannot be split from, each with its own message."""

from __future__ import annotations

from collections.abc import Sequence

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.fingerprint import is_incomplete
from draftpair.checkpoint.wording import some
from draftpair.errors import Refused, ToolError
from draftpair.families import family_of_target, load_records, load_splits
from draftpair.families.heads import HeadMatch, declared_depth, recognised_head
from draftpair.families.record import SplitFamily
from draftpair.findings import Finding, by_severity

# Without a readable config or index nothing else can be said, wherever the head lies.
_FATAL = ("CONFIG-MISSING", "CONFIG-PARSE", "INDEX-PARSE", "INDEX-NO-WEIGHT-MAP")
_PACKED = "HEAD-PACKED"
_BROKEN = ("FILE-HEADER", "FILE-DANGLING-LINK", "INDEX-SHARD-MISSING")


def require_head(checkpoint: Checkpoint, match: HeadMatch | None) -> HeadMatch:
    """The head, when it can be split: whole, of packings that are understood, in files that are sound.

    Raises Refused, or ToolError when the family has no record.
    """
    _refuse_unreadable(checkpoint)
    if match is None:
        raise _no_head(checkpoint)
    if isinstance(match.family.head.first_layer, str):
        match.family.number(match.family.head.first_layer, checkpoint.config)
    _refuse_depth(match)
    errors = [finding for finding in match.findings if finding.level == "error"]
    # Packed tensors also have unknown names and wrong shapes; that they are packed is the cause.
    if cause := [finding for finding in errors if finding.rule == _PACKED] or errors:
        broken = _broken_files(checkpoint, match.place.prefixes) if match.missing else []
        raise _refused([*cause, *broken])
    if touching := [f for f in checkpoint.findings if f.level == "error" and _touches(f, match)]:
        raise _refused(touching)
    return match


def experimental(family: SplitFamily) -> list[Finding]:
    """A warning when facts about the family are disputed or not established."""
    if family.maturity != "experimental":
        return []
    return [
        Finding(
            "SPLIT-FAMILY-EXPERIMENTAL",
            "warning",
            f"{family.name} is experimental: {family.notes}",
            where=family.name,
            hint="measure the acceptance of the pair before relying on it",
        )
    ]


def partial_source(checkpoint: Checkpoint) -> list[Finding]:
    """A warning when weight files without head tensors are absent or damaged: the split works, the proof does not."""
    if not is_incomplete(checkpoint):
        return []
    return [
        Finding(
            "SPLIT-SOURCE-PARTIAL",
            "warning",
            "weight files of the source, or tensors that its index names, are missing or damaged; the head is whole, "
            "and the manifest cannot say which target it belongs to",
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
            f"{checkpoint.place} has no config.json",
            hint="--model wants the raw checkpoint's whole folder: config.json, weights and tokenizer",
        )
    if fatal := [f for f in by_severity(checkpoint.findings) if f.level == "error" and f.rule in _FATAL]:
        raise _refused(fatal)


def _no_head(checkpoint: Checkpoint) -> ToolError:
    config = checkpoint.config
    if not checkpoint.files and checkpoint.index is None:
        held = some(checkpoint.storage.names()) or "nothing"
        return Refused(
            f"{checkpoint.source} holds no readable .safetensors file; it holds {held}",
            hint="--model wants the raw checkpoint's whole folder: config.json, weights and tokenizer",
        )
    drafters = {f.drafter.model_type: f for f in load_splits().values()}
    if own := drafters.get(config.root_model_type or ""):
        return Refused(
            f"{checkpoint.source} is a drafter already (model_type {own.drafter.model_type}), and holds no head",
            hint=f"split {own.target.source}",
        )
    found = recognised_head(checkpoint)
    if found and found.record and found.record.unsupported:
        return ToolError(
            f"{checkpoint.source} holds a head of {found.record.title} ({found.record.name}: {len(found.tensors)} "
            f"tensors under {found.prefix}), which is not split: {found.record.unsupported}",
            hint="supported: " + ", ".join(_supported()),
        )
    family = family_of_target(config)
    known = next((r for r in load_records().values() if r.unsupported and r.serves(config)), None)
    if family is None and known:
        return ToolError(
            f"{checkpoint.source} is a target of {known.title} ({known.name}) without its head, which would not be "
            f"split either: {known.unsupported}",
            hint="supported: " + ", ".join(_supported()),
        )
    if family is None:
        seen = f" (its {found.prefix}* tensors look like a head)" if found else ""
        model_type = config.root_model_type or config.model_type
        declared = f"model_type {model_type!r}" if model_type else "no model_type"
        return ToolError(
            f"{checkpoint.source}: config.json declares {declared}{seen}, and there is no family record for it",
            hint="supported: " + ", ".join(_supported()),
        )
    spec = family.head
    first = spec.first_layer if isinstance(spec.first_layer, int) else family.number(spec.first_layer, config)
    prefixes = [prefix if spec.owns_prefix else spec.layer_prefix(prefix, first) for prefix in spec.prefixes]
    if broken := _broken_files(checkpoint, prefixes):
        return _refused(broken)
    promised = declared_depth(checkpoint)
    said = f", though config.json declares {promised[2]} layer(s) of one" if promised else ""
    return Refused(
        f"{checkpoint.source} has no tensor {' or '.join(f'{prefix}*' for prefix in prefixes)}: it was converted "
        f"without its MTP head{said}",
        hint=f"use {family.target.source}",
    )


def _supported() -> list[str]:
    return sorted({name for family in load_splits().values() for name in family.target.model_types})


def _refuse_depth(match: HeadMatch) -> None:
    if match.layers_found > match.family.head.max_depth:
        spec, prefix = match.place.spec, match.place.prefix
        names = ", ".join(spec.layer_prefix(prefix, layer).rstrip(".") for layer in match.layers)
        raise Refused(
            f"the source has {match.layers_found} head layers ({names}); a {match.family.drafter.model_type} "
            f"drafter holds {match.family.head.max_depth}, and draftpair drops none in silence",
            hint="no layout is known that holds all of them",
        )


def _broken_files(checkpoint: Checkpoint, prefixes: Sequence[str]) -> list[Finding]:
    """Findings about files that are absent or damaged, and that may hold tensors below one of `prefixes`.

    A file that the index does not name may hold anything.
    """
    listed = {**checkpoint.index.refused, **checkpoint.index.weight_map} if checkpoint.index else {}
    ours = {file for name, file in listed.items() if name.startswith(tuple(prefixes))} - set(checkpoint.files)
    others = set(listed.values()) - ours
    broken = [
        f for f in checkpoint.findings if f.rule in _BROKEN and f.level == "error" and f.where not in others
    ]
    if absent := ours - {finding.where for finding in broken}:
        names = sorted(absent)
        places = some([repr(name) for name in names])
        message = f"the index puts {prefixes[0]}* in {places}, which is no readable file of the folder"
        hint = "download what is missing; a split needs only the files that hold the head"
        broken.insert(0, Finding("INDEX-SHARD-MISSING", "error", message, names[0], hint=hint))
    return broken


def _touches(finding: Finding, match: HeadMatch) -> bool:
    """Whether a finding is about a file that holds one of the head's tensors, or that is said to."""
    checkpoint, names = match.checkpoint, {tensor.name for tensor in match.tensors}
    holding = {f.name for f in checkpoint.files.values() if not names.isdisjoint(f.header.tensors)}
    listed = checkpoint.index.weight_map if checkpoint.index else {}
    return finding.where in holding | match.files | {listed[name] for name in names & listed.keys()}
