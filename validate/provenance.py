"""Where a drafter was cut from, by its manifest, held against the target at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.fingerprint import exact_hashes, fingerprint
from draftpair.checkpoint.wording import some
from draftpair.validate.manifest import read_manifest

_NO_NORMS = "the norm weights of one side are not all there"
_UNALIGNED = "too few of its norm weights are found in this target, by name or by value, to tell"
_OTHER_NORMS = "norm weights are not that model's ({}): a fine-tune, or another release of the same size"
_OTHER_VALUES = "the norm weights are that model's and other weights are not: a fine-tune, or a damaged copy"
_CONVERTED = "the norm weights are that model's, the tensors are stored differently: a conversion of it"
_OTHER_CONFIG = "the weights are that model's, the config.json is not"
_EXACT = ("headers_sha256", "norms_sha256")

_Forms = Mapping[str, Sequence[str]]
"""A fingerprint's `norms`: hashes of the forms that conversions give a norm, by name, the stored form first."""


def provenance(target: Checkpoint, drafter: Checkpoint) -> dict[str, Any]:
    """The ``provenance`` of the pair facts.

    ``same``: headers, norms, sampled weights and config are those of the manifest's source, bit for bit.
    ``derived``: the norms are the source's, perhaps renamed, cast, or stored as 1 + w on one side, as after a
    conversion; that matrices are the source's too is not shown. ``different``: a norm that both sides name alike is
    the other's in no such form, or weights that are stored alike are others. ``unknown``: the norms of a side are not
    known, or most have neither a name nor a value in common. ``none``: the drafter has no manifest. Raises Refused
    for a malformed one.
    """
    manifest = read_manifest(drafter)
    if manifest is None:
        return {"relation": "none", "detail": None, "source": None, "revision": None}
    source = manifest["source"]
    known, prefixes = source["fingerprint"], source["prefixes"]
    # The forms of the norms take longest, and are only asked of what is not the very same.
    exact = exact_hashes(target, prefixes)
    if known["norms"] and all(known[key] == value for key, value in exact.items()):
        relation, detail = "same", None
    else:
        relation, detail = _relation(known, fingerprint(target, prefixes))
    return {"relation": relation, "detail": detail, "source": source["name"], "revision": source["revision"]}


def _relation(source: Mapping[str, Any], target: Mapping[str, Any]) -> tuple[str, str | None]:
    if not source["norms"] or not target["norms"]:
        return "unknown", _NO_NORMS
    changed = _changed(source["norms"], target["norms"])
    if changed:
        return "different", _OTHER_NORMS.format(some(changed, 2))
    if 2 * _found(source["norms"], target["norms"]) < min(len(source["norms"]), len(target["norms"])):
        return "unknown", _UNALIGNED
    if any(source[key] != target[key] for key in _EXACT):
        return "derived", _CONVERTED
    if source["samples_sha256"] != target["samples_sha256"]:
        return "different", _OTHER_VALUES
    return (
        ("same", None) if source["config_sha256"] == target["config_sha256"] else ("derived", _OTHER_CONFIG)
    )


def _changed(source: _Forms, target: _Forms) -> list[str]:
    """The norms of the source that the target has under the same name, and with other values."""
    return [name for name, forms in source.items() if name in target and not _agree(forms, target[name])]


def _found(source: _Forms, target: _Forms) -> int:
    """How many norms of the source the target has, under the same name or under another."""
    others = [forms for name, forms in target.items() if name not in source]
    stored, possible = {forms[0] for forms in others}, {form for forms in others for form in forms}
    return sum(
        name in target or forms[0] in possible or not stored.isdisjoint(forms)
        for name, forms in source.items()
    )


def _agree(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether one side's stored form is a form of the other's."""
    return one[0] in other or other[0] in one
