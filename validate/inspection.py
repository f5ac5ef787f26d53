"""What ``draftpair inspect`` reports: role, head, integrity, sizes and memory of one checkpoint."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from draftpair.checkpoint import Checkpoint, TensorInfo
from draftpair.checkpoint.fingerprint import is_incomplete
from draftpair.errors import Refused
from draftpair.families import family_of_target
from draftpair.families.drafters import find_drafter
from draftpair.families.heads import HeadMatch, declared_depth, find_head, unrecorded_head
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
    head, prefix, tensors = _find(checkpoint)
    # A drafter's text_config describes its target; its own cache is one layer's.
    depth = 1 if find_drafter(checkpoint) else None
    cache = cache_size(checkpoint.config, context, batch, kv_bits, depth)
    beside = _beside(checkpoint, head, drafter, context, batch, kv_bits) if drafter else None
    head_bytes = sum(tensor.nbytes for tensor in tensors)
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
        "checkpoint": _about(checkpoint),
        "head": _head_facts(checkpoint, head, prefix, tensors),
        "integrity": {"findings": [finding.as_dict() for finding in findings]},
        "sizes": {
            "tensor_bytes": checkpoint.tensor_bytes,
            "index_total_size": checkpoint.index.total_size if checkpoint.index else None,
            "parameters": count_parameters(checkpoint.tensors, checkpoint.config).total,
            "groups": bytes_by_group(checkpoint.tensors.values(), {tensor.name for tensor in tensors}),
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


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    drafter, target = find_drafter(checkpoint), family_of_target(checkpoint.config.model_type)
    family = drafter.family if drafter else target
    return {
        "source": checkpoint.source,
        "revision": checkpoint.revision,
        "role": role_of(checkpoint),
        "family": family.name if family else None,
        "model_type": checkpoint.config.root_model_type or checkpoint.config.model_type,
        "kind": drafter.family.kind if drafter else None,
    }


def _find(checkpoint: Checkpoint) -> tuple[HeadMatch | None, str | None, tuple[TensorInfo, ...]]:
    """The head by a record, else what looks like one: match, prefix and tensors. A drafter folder has none."""
    if find_drafter(checkpoint):
        return None, None, ()
    if head := find_head(checkpoint):
        return head, head.prefix, head.tensors
    return (None, *(unrecorded_head(checkpoint) or (None, ())))


def _head_facts(
    checkpoint: Checkpoint, head: HeadMatch | None, prefix: str | None, tensors: tuple[TensorInfo, ...]
) -> dict[str, Any]:
    declared = None if find_drafter(checkpoint) else declared_depth(checkpoint)
    unrecorded = bool(tensors) and head is None
    return {
        "family": head.family.name if head else declared[0].name if declared else None,
        "present": bool(tensors),
        "declared": declared is not None,
        "complete": head.complete if head else None if unrecorded else False,
        "prefix": prefix,
        "layers_declared": declared[1] if declared and type(declared[1]) is int else None,
        "layers_found": head.layers_found if head else None if unrecorded else 0,
        "tensors": len(tensors),
        "bytes": sum(tensor.nbytes for tensor in tensors),
        "dtypes": dict(Counter(tensor.dtype for tensor in tensors)),
        "files": _files(checkpoint, tensors),
        "missing": list(head.missing) if head else [],
    }


def _files(checkpoint: Checkpoint, tensors: tuple[TensorInfo, ...]) -> list[dict[str, Any]]:
    names = sorted({tensor.file for tensor in tensors})
    return [{"name": name, "indexed": checkpoint.files[name].indexed} for name in names]
