"""Reads draftpair-manifest.json: where a drafter was cut from, and the hashes of what was written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from draftpair.checkpoint.checkpoint import Checkpoint
from draftpair.checkpoint.wording import some
from draftpair.errors import Refused
from draftpair.findings import Finding

MANIFEST = "draftpair-manifest.json"

# Norms and biases: enough to notice a tensor that was edited, without reading the large ones.
_SMALL = 1 << 20


@dataclass(frozen=True)
class Manifest:
    """The parts that checks need; ``tensors`` maps each written tensor to its dtype, shape and SHA-256."""

    source_name: str
    source_revision: str | None
    head_prefix: str
    fingerprint: dict[str, Any]
    tensors: dict[str, dict[str, Any]]


def read_manifest(checkpoint: Checkpoint) -> Manifest:
    """The manifest of a drafter folder. Raises Refused, naming the file, when a part is missing or no JSON."""
    data = checkpoint.read_json(MANIFEST)
    try:
        source = data["source"]
        return Manifest(
            source_name=str(source["name"]),
            source_revision=source["revision"],
            head_prefix=str(source["prefix"]),
            fingerprint={key: source["fingerprint"][key] for key in ("headers_sha256", "norms_sha256")},
            tensors={name: {**entry} for name, entry in data["tensors"].items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise Refused(
            f"{MANIFEST} in {checkpoint.source} lacks or garbles {error}",
            hint="write the drafter again with split-mtp, or delete the manifest",
        ) from error


def check_manifest(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Whether the folder still holds what the manifest says was written: headers, and small tensors by hash."""
    if not checkpoint.has_file(MANIFEST):
        return
    try:
        manifest = read_manifest(checkpoint)
    except Refused as error:
        yield Finding("MANIFEST-PARSE", "error", error.message, MANIFEST, hint=error.hint)
        return
    changed = sorted(
        name for name in {*manifest.tensors, *checkpoint.tensors} if _changed(checkpoint, manifest, name)
    )
    if changed:
        yield Finding(
            "MANIFEST-TENSORS",
            "error",
            f"{len(changed)} tensors are not those that {MANIFEST} says were written: {some(changed)}",
            where=MANIFEST,
            found=len(changed),
            hint="the weights were changed after the split: write the drafter again, or delete the manifest",
        )


def _changed(checkpoint: Checkpoint, manifest: Manifest, name: str) -> bool:
    tensor, entry = checkpoint.tensors.get(name), manifest.tensors.get(name)
    if tensor is None or entry is None:
        return True
    if [tensor.dtype, list(tensor.shape)] != [entry.get("dtype"), entry.get("shape")]:
        return True
    small = tensor.nbytes <= _SMALL
    return small and hashlib.sha256(checkpoint.read(tensor)).hexdigest() != entry.get("sha256")
