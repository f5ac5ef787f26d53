"""What ``draftpair inspect`` reports: role, head, integrity, sizes and memory of one checkpoint."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

from draftpair.checkpoint import Checkpoint, TensorInfo
from draftpair.checkpoint.fingerprint import is_incomplete
from draftpair.errors import Refused
from draftpair.families import family_of_target, load_records
from draftpair.families.drafters import find_drafter
from draftpair.families.heads import HeadMatch, declared_depth, find_head, recognised_head
from draftpair.findings import Finding, by_severity
from draftpair.validate.kvcache import CacheSize, cache_size
from draftpair.validate.memory import DrafterMemory, available_memory, estimate_memory, resident_weights
from draftpair.validate.parameters import count_parameters
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

    Raises Usage for a memory limit that cannot be read, Refused for a drafter that is none.
    """
    head = _find(checkpoint)
    # A drafter's text_config describes its target; its own cache is one layer's.
    depth = 1 if find_drafter(checkpoint) else None
    cache = cache_size(checkpoint.config, context, batch, kv_bits, depth)
    beside = _beside(checkpoint, head.match, drafter, context, batch, kv_bits) if drafter else None
    head_bytes = sum(tensor.nbytes for tensor in head.tensors)
    estimate = estimate_memory(
        checkpoint.config,
        None if is_incomplete(checkpoint) else resident_weights(checkpoint.tensor_bytes, head_bytes, beside),
        cache,
        context,
        batch,
        beside,
        available_memory(memory),
    )
    findings = by_severity([*checkpoint.findings, *own_findings(checkpoint), *_unknown_memory(cache)])
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
        "memory": estimate.as_dict(),
    }


def _unknown_memory(cache: CacheSize) -> list[Finding]:
    """Why the memory is not known; an estimate without a cache would only mislead."""
    if cache.kv_bytes is not None:
        return []
    message = f"the memory that this takes is not known: {cache.note.removeprefix('unknown: ')}"
    return [Finding("MEMORY-UNKNOWN", "note", message, "config.json")]


def _beside(
    target: Checkpoint, head: HeadMatch | None, drafter: Checkpoint, context: int, batch: int, kv_bits: int
) -> DrafterMemory:
    """What runs beside the target: a drafter folder, or the target's own head when both are one folder."""
    own = drafter.is_same_as(target)
    match = find_drafter(drafter)
    if own and head:
        family, weights, layers = head.family, head.nbytes, head.layers_found
    elif match:
        family, weights, layers = match.family, drafter.tensor_bytes, 1
    else:
        raise Refused(
            f"--drafter {drafter.source} is "
            + ("the model itself, and it has no head" if own else "no known drafter"),
            hint="`draftpair families` lists the families that draftpair knows",
        )
    width, _ = block_width(None, os.environ, drafter.config, family)
    return DrafterMemory(weights, cache_size(drafter.config, context, batch, kv_bits, depth=layers), width)


def _about(checkpoint: Checkpoint, head: _Head) -> dict[str, Any]:
    drafter = find_drafter(checkpoint)
    return {
        "source": checkpoint.source,
        "revision": checkpoint.revision,
        "role": role_of(checkpoint),
        "family": drafter.family.name if drafter else head.family or _family_served(checkpoint),
        "model_type": checkpoint.config.root_model_type or checkpoint.config.model_type,
        "kind": drafter.family.kind if drafter else None,
    }


def _family_served(checkpoint: Checkpoint) -> str | None:
    """The family whose heads belong to such a target: one that can be split before one that is only recognised."""
    recognised = (record for record in load_records().values() if record.serves(checkpoint.config))
    record = family_of_target(checkpoint.config) or next(recognised, None)
    return record.name if record else None


@dataclass(frozen=True)
class _Head:
    """What is known of the checkpoint's own head, whole or not, split or only recognised."""

    match: HeadMatch | None = None
    family: str | None = None
    prefix: str | None = None
    layers: int | None = 0
    tensors: tuple[TensorInfo, ...] = ()


def _find(checkpoint: Checkpoint) -> _Head:
    """The head by a record, else what looks like one. A drafter folder has none."""
    if find_drafter(checkpoint):
        return _Head()
    if match := find_head(checkpoint):
        return _Head(match, match.family.name, match.prefix, match.layers_found, match.tensors)
    if seen := recognised_head(checkpoint):
        return _Head(
            None, seen.record.name if seen.record else None, seen.prefix, seen.layers_found, seen.tensors
        )
    return _Head()


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
