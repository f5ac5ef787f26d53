"""Reads draftpair-manifest.json, and holds the folder it lies in against it.

A manifest proves something only as long as nothing in the folder was changed: tensors by name, dtype, shape
and, where they are small, by hash; the other files by hash; and what it says of the drafter by the record.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.hashing import ALGORITHM, hash_of
from draftpair.checkpoint.manifest import MANIFEST
from draftpair.checkpoint.memo import per_checkpoint
from draftpair.checkpoint.wording import some
from draftpair.errors import Refused
from draftpair.families.record import Family
from draftpair.findings import Finding
from draftpair.schemas import check, load_schema

# Norms and biases: enough to notice a tensor that was edited, without reading the large ones.
_SMALL = 1 << 20
_HINT = "write the drafter again with split-mtp, or delete the manifest: then nothing is proven by it"


@per_checkpoint
def read_manifest(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The manifest of a drafter folder, None without one. Raises Refused when it breaks its schema."""
    if not checkpoint.has_file(MANIFEST):
        return None
    data = checkpoint.read_json(MANIFEST)
    problems = check(data, load_schema("manifest"))
    if problems:
        raise Refused(f"{MANIFEST} in {checkpoint.source} is malformed: {'; '.join(problems[:3])}", _HINT)
    manifest: dict[str, Any] = data
    return manifest


def check_manifest(checkpoint: Checkpoint, family: Family) -> Iterator[Finding]:
    """Whether the folder still holds what its manifest says was written."""
    try:
        manifest = read_manifest(checkpoint)
    except Refused as error:
        yield Finding("MANIFEST-PARSE", "error", error.message, MANIFEST, hint=error.hint)
        return
    if manifest is not None:
        yield from _check_tensors(checkpoint, manifest)
        yield from _check_files(checkpoint, manifest)
        yield from _check_words(checkpoint, manifest, family)


def _check_tensors(checkpoint: Checkpoint, manifest: dict[str, Any]) -> Iterator[Finding]:
    written = manifest["tensors"]
    changed = sorted(name for name in {*written, *checkpoint.tensors} if _changed(checkpoint, written, name))
    if changed:
        yield Finding(
            "MANIFEST-TENSORS",
            "error",
            f"{len(changed)} tensors are not those that {MANIFEST} says were written: {some(changed)}",
            where=MANIFEST,
            found=len(changed),
            hint=_HINT,
        )


def _changed(checkpoint: Checkpoint, written: dict[str, Any], name: str) -> bool:
    tensor, entry = checkpoint.tensors.get(name), written.get(name)
    if (
        tensor is None
        or entry is None
        or [tensor.dtype, list(tensor.shape)] != [entry["dtype"], entry["shape"]]
    ):
        return True
    return tensor.nbytes <= _SMALL and hash_of(checkpoint.read(tensor)) != entry[ALGORITHM]


def _check_files(checkpoint: Checkpoint, manifest: dict[str, Any]) -> Iterator[Finding]:
    changed = [name for name, digest in manifest["files"].items() if _digest(checkpoint, name) != digest]
    if changed:
        yield Finding(
            "MANIFEST-FILES",
            "warning",
            f"these files were changed or removed since they were written: {some(sorted(changed))}",
            where=changed[0],
            found=len(changed),
            hint=_HINT,
        )


def _digest(checkpoint: Checkpoint, name: str) -> str | None:
    return hashlib.sha256(checkpoint.read_bytes(name)).hexdigest() if checkpoint.has_file(name) else None


def _check_words(checkpoint: Checkpoint, manifest: dict[str, Any], family: Family) -> Iterator[Finding]:
    """What the manifest says in words against the record and config.json."""
    config, drafter = checkpoint.config.raw, family.drafter
    for key, said, actual in (
        ("family", manifest["family"], family.name),
        ("tap", manifest["tap"], drafter.tap),
        ("fusion", manifest["fusion"], drafter.fusion),
        ("block_size", manifest["block_size"]["value"], config.get(drafter.block_size.key)),
        ("quantization", manifest["quantization"], config.get("quantization")),
    ):
        if said != actual:
            yield Finding(
                "MANIFEST-CONTENT",
                "error",
                f"{MANIFEST} says {key} is {said!r}; the drafter's is {actual!r}",
                where=f"{MANIFEST}#/{key}",
                expected=actual,
                found=said,
                hint=_HINT,
            )
