"""Where a drafter was cut from, by its manifest, held against the target at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.fingerprint import fingerprint
from draftpair.validate.manifest import read_manifest

_OTHER_NORMS = "the norm weights are not that model's: a fine-tune, or another release of the same size"
_OTHER_VALUES = "the norm weights are that model's and other weights are not: a fine-tune, or a damaged copy"
_CONVERTED = "the norm weights are that model's, the tensors are stored differently: a conversion of it"
_OTHER_CONFIG = "the weights are that model's, the config.json is not"


def provenance(target: Checkpoint, drafter: Checkpoint) -> dict[str, Any]:
    """The ``provenance`` of the pair facts.

    ``same``: headers, norms, sampled weights and config are those of the manifest's source. ``derived``: the norms
    are, as after a quantizing conversion. ``different``: norms, or weights in the same places, are not. ``unknown``:
    one side's norms are not known. ``none``: the drafter has no manifest. Raises Refused for a malformed one.
    """
    manifest = read_manifest(drafter)
    if manifest is None:
        return {"relation": "none", "detail": None, "source": None, "revision": None}
    source = manifest["source"]
    relation, detail = _relation(source["fingerprint"], fingerprint(target, source["prefixes"]))
    return {"relation": relation, "detail": detail, "source": source["name"], "revision": source["revision"]}


def _relation(source: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[str, str | None]:
    if source["norms_sha256"] is None or target["norms_sha256"] is None:
        return "unknown", "the norm weights of one side are not all there"
    if source["norms_sha256"] != target["norms_sha256"]:
        return "different", _OTHER_NORMS
    if source["headers_sha256"] != target["headers_sha256"]:
        return "derived", _CONVERTED
    if source["samples_sha256"] != target["samples_sha256"]:
        return "different", _OTHER_VALUES
    return (
        ("same", None) if source["config_sha256"] == target["config_sha256"] else ("derived", _OTHER_CONFIG)
    )
