"""What ``draftpair inspect`` reports: role, head, integrity, sizes and memory of one checkpoint."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

from draftpair.checkpoint import Checkpoint, ConfigView, TensorInfo
from draftpair.checkpoint.fingerprint import is_incomplete
from draftpair.errors import Refused
from draftpair.families import family_of_target, load_records
from draftpair.families.drafters import find_drafter
from draftpair.families.heads import HeadMatch, declared_depth, find_head, recognised_head
from draftpair.families.record import Family
from draftpair.findings import Finding, by_severity
from draftpair.validate.draft import find_draft
from draftpair.validate.geometry import LAYERS
from draftpair.validate.kvcache import CacheSize, cache_size, drafter_cache, unknown_cache
from draftpair.validate.memory import (
    DrafterMemory,
    MemoryEstimate,
    available_memory,
    estimate_memory,
    resident_weights,
)
from draftpair.validate.parameters import count_parameters
from draftpair.validate.samples import to_be_read
from draftpair.validate.single import own_findings, role_of
from draftpair.validate.sizing import bytes_by_group
from draftpair.validate.width import block_width


def inspect(
    checkpoint: Checkpoint,
    drafter: Checkpoint | None = None,
    *,
    context: int = 8192,
    batch: int = 1,
    kv_bits: int = 16,
    memory: str | None = None,
) -> dict[str, Any]:
    """The body of the report. ``drafter`` may be the checkpoint itself: then its own head is meant.

    What a config.json that makes no sense leaves open is a finding, and null. Raises Usage for a memory limit that
    cannot be read, Refused for a drafter that is none.
    """
    head = _find(checkpoint)
    match = find_drafter(checkpoint)
    cache = _cache(
        match.family if match else None, match.config if match else checkpoint.config, context, batch, kv_bits
    )
    beside = _beside(checkpoint, drafter, context, batch, kv_bits) if drafter else None
    head_bytes = sum(tensor.nbytes for tensor in head.tensors)
    estimate = estimate_memory(
        match.config if match else checkpoint.config,
        None if is_incomplete(checkpoint) else resident_weights(checkpoint.tensor_bytes, head_bytes, beside),
        cache,
        context,
        batch,
        beside,
        available_memory(memory),
    )
    memory_findings = [*_memory_findings("this", cache), *_activation_findings(cache, estimate)]
    if beside:
        memory_findings += _memory_findings("the drafter", beside.cache)
    findings = by_severity([*checkpoint.findings, *_own_findings(checkpoint, head), *memory_findings])
    return {
        "checkpoint": _about(checkpoint, head),
        "head": _head_facts(checkpoint, head),
        "integrity": {"findings": [finding.as_dict() for finding in findings]},
        "sizes": {
            "tensor_bytes": checkpoint.tensor_bytes,
            "index_total_size": checkpoint.index.total_size if checkpoint.index else None,
            "parameters": count_parameters(checkpoint.tensors, checkpoint.config).total,
            "groups": bytes_by_group(checkpoint.tensors.values(), {tensor.name for tensor in head.tensors}),
        },
        "memory": {
            **estimate.as_dict(),
            "caches": cache.note,
            "drafter_caches": beside.cache.note if beside else None,
        },
    }


def _cache(
    family: Family | None,
    config: ConfigView,
    context: int,
    batch: int,
    kv_bits: int,
    depth: int | None = None,
) -> CacheSize:
    """The caches of a model, of a drafter's folder, or with ``depth`` of the head of the model of this config."""
    try:
        if family is None:
            return cache_size(config, context, batch, kv_bits)
        layers = _layers_of_target(family, config) if depth is None else depth
        return drafter_cache(config, family.drafter.cache, layers, context, batch, kv_bits)
    except Refused as error:
        return unknown_cache(error.message)


def _layers_of_target(family: Family, config: ConfigView) -> int | None:
    """How many layers like its target's a drafter has; None where its config describes layers of its own."""
    key = family.drafter_depth(config)
    if key in LAYERS:
        return None
    return family.count(key, config) if key and config.get(key) else 1


def _memory_findings(whose: str, cache: CacheSize) -> list[Finding]:
    """Why the memory is not known, for an estimate without a cache would only mislead; or what is not counted."""
    if (why := cache.why_unknown) is not None:
        return [
            Finding(
                "MEMORY-UNKNOWN", "note", f"the memory that {whose} takes is not known: {why}", "config.json"
            )
        ]
    return [Finding("MEMORY-NOT-COUNTED", "note", cache.caveat, "config.json")] if cache.caveat else []


def _activation_findings(cache: CacheSize, estimate: MemoryEstimate) -> list[Finding]:
    if cache.kv_bytes is None or estimate.activation_bytes is not None:
        return []
    message = (
        "the memory that this takes is not known: config.json does not give vocab_size, hidden_size and "
        "intermediate_size as numbers"
    )
    return [Finding("MEMORY-UNKNOWN", "note", message, "config.json")]


def _own_findings(checkpoint: Checkpoint, head: _Head) -> list[Finding]:
    """What there is to say of the checkpoint's role, or why that cannot be said."""
    if head.refused:
        return [_refusal(head.refused)]
    try:
        return own_findings(checkpoint, to_be_read(checkpoint, None))
    except Refused as error:
        return [_refusal(error)]


def _refusal(error: Refused) -> Finding:
    return Finding("CONFIG-DIMENSION", "error", error.message, "config.json", hint=error.hint)


def _beside(target: Checkpoint, drafter: Checkpoint, context: int, batch: int, kv_bits: int) -> DrafterMemory:
    """What runs beside the target: a drafter's folder, a whole model, or the target's own head."""
    draft = find_draft(target, drafter)
    if isinstance(draft, Finding):
        raise Refused(f"--drafter {drafter.source}: {draft.message}", draft.hint)
    rows, *_ = block_width(None, os.environ, draft.config, draft.family)
    taps = draft.config.get("taps")
    return DrafterMemory(
        draft.head.nbytes if draft.head else drafter.tensor_bytes,
        _cache(
            draft.family,
            draft.config,
            context,
            batch,
            kv_bits,
            draft.head.layers_found if draft.head else None,
        ),
        rows,
        taps if type(taps) is int and taps > 0 else 1,
    )


def _about(checkpoint: Checkpoint, head: _Head) -> dict[str, Any]:
    drafter = find_drafter(checkpoint)
    return {
        "source": checkpoint.source,
        "revision": checkpoint.revision,
        "role": role_of(checkpoint),
        "family": drafter.family.name if drafter else head.family or _family_served(checkpoint),
        "model_type": checkpoint.config.root_model_type or checkpoint.config.model_type,
        "kind": drafter.family.kind if drafter else None,
        "fetched_bytes": checkpoint.bytes_fetched,
    }


def _family_served(checkpoint: Checkpoint) -> str | None:
    """The family of drafters that serves such a target: one that is split before one that is only recognised, and
    that before one of drafters published on their own."""
    config = checkpoint.config
    recognised = (record for record in load_records().values() if record.head and record.serves(config))
    record = family_of_target(config) or next(recognised, None)
    return record.name if record else None


@dataclass(frozen=True)
class _Head:
    """What is known of the checkpoint's own head, whole or not, split or only recognised."""

    match: HeadMatch | None = None
    family: str | None = None
    prefix: str | None = None
    layers: int | None = 0
    tensors: tuple[TensorInfo, ...] = ()
    refused: Refused | None = None


def _find(checkpoint: Checkpoint) -> _Head:
    """The head by a record, else what looks like one. A drafter folder has none."""
    if find_drafter(checkpoint):
        return _Head()
    refused = None
    try:
        if match := find_head(checkpoint):
            return _Head(match, match.family.name, match.prefix, match.layers_found, match.tensors)
    except Refused as error:
        refused = error
    if seen := recognised_head(checkpoint):
        name = seen.record.name if seen.record else None
        return _Head(None, name, seen.prefix, seen.layers_found, seen.tensors, refused)
    return _Head(refused=refused)


def _head_facts(checkpoint: Checkpoint, head: _Head) -> dict[str, Any]:
    declared = None if find_drafter(checkpoint) else declared_depth(checkpoint)
    only_seen = bool(head.tensors) and head.match is None
    return {
        "family": head.family or (declared[0].name if declared else None),
        "present": bool(head.tensors),
        "declared": declared is not None,
        "complete": head.match.complete if head.match else None if only_seen else False,
        "prefix": head.prefix,
        "layers_declared": declared[2] if declared else None,
        "layers_found": head.layers,
        "tensors": len(head.tensors),
        "bytes": sum(tensor.nbytes for tensor in head.tensors),
        "dtypes": dict(Counter(tensor.dtype for tensor in head.tensors)),
        "files": _files(checkpoint, head.tensors),
        "missing": list(head.match.missing) if head.match else [],
    }


def _files(checkpoint: Checkpoint, tensors: tuple[TensorInfo, ...]) -> list[dict[str, Any]]:
    names = sorted({tensor.file for tensor in tensors})
    return [{"name": name, "indexed": checkpoint.files[name].indexed} for name in names]
