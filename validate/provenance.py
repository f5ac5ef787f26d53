"""Where a drafter was cut from, by its manifest, held against the target at hand.

``same``: the target's headers and norm weights are those of the manifest's source. ``derived``: only the norm
weights are, as after a quantizing conversion. ``different``: they are not. ``unknown``: the target has no
comparable norms. ``none``: the drafter has no manifest.
"""

from __future__ import annotations

from typing import Any

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.fingerprint import fingerprint
from draftpair.checkpoint.manifest import MANIFEST, Manifest, read_manifest


def provenance(target: Checkpoint, drafter: Checkpoint) -> dict[str, Any]:
    """The ``provenance`` of the pair facts. Raises Refused when the manifest is malformed."""
    if not drafter.has_file(MANIFEST):
        return {"relation": "none", "source": None, "revision": None}
    manifest = read_manifest(drafter)
    return {
        "relation": _relation(target, manifest),
        "source": manifest.source_name,
        "revision": manifest.source_revision,
    }


def _relation(target: Checkpoint, manifest: Manifest) -> str:
    source, mine = manifest.fingerprint, fingerprint(target, manifest.head_prefix)
    if mine["norms_sha256"] is None or source["norms_sha256"] is None:
        return "unknown"
    if mine["norms_sha256"] != source["norms_sha256"]:
        return "different"
    return "same" if mine["headers_sha256"] == source["headers_sha256"] else "derived"
