"""The JSON files beside the weights: index, config and manifest.

The manifest says where a drafter comes from and what was done to it, so that `validate` can prove that
it belongs to a target. It holds no time and no path: the same split gives the same bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.hashing import ALGORITHM
from draftpair.convert.destination import WEIGHTS
from draftpair.convert.plan import SplitPlan
from draftpair.schemas import load_schema
from draftpair.version import VERSION


def to_json(document: Mapping[str, Any]) -> bytes:
    """The document as it is written to a file: indented, keys sorted, one newline at the end.

    Infinity, which published config.json files have and JSON has no word for, is written as a number that is read
    as infinity; NaN, which no number is read as, as null.
    """
    text = json.dumps(document, indent=2, sort_keys=True, ensure_ascii=False)
    strict = _OUTSIDE_JSON.sub(lambda found: _SPELLED.get(found[0], found[0]), text)
    # Of half a surrogate pair a backslash escape is the one that JSON has for it.
    return (strict + "\n").encode("utf-8", "backslashreplace")


_OUTSIDE_JSON = re.compile(r'"(?:[^"\\]|\\.)*"|-?Infinity|NaN')
_SPELLED = {"Infinity": "1e999", "-Infinity": "-1e999", "NaN": "null"}


def index(plan: SplitPlan) -> dict[str, Any]:
    """model.safetensors.index.json; `total_parameters` counts packed weights as what they stand for."""
    return {
        "metadata": {"total_size": plan.total_size, "total_parameters": plan.total_parameters},
        "weight_map": {output.name: WEIGHTS for output, _ in plan.outputs},
    }


def manifest(
    plan: SplitPlan,
    fingerprint: Mapping[str, Any],
    tensor_hashes: Mapping[str, str],
    file_hashes: Mapping[str, str],
) -> dict[str, Any]:
    """draftpair-manifest.json. Hashes are SHA-256: of each tensor's data, and of the other files."""
    drafter = plan.family.drafter
    name, revision = source_name(plan.checkpoint)
    return {
        "schema": load_schema("manifest")["$id"],
        "tool": {"name": "draftpair", "version": VERSION},
        "family": plan.family.name,
        "maturity": plan.family.maturity,
        "source": {
            "name": name,
            "revision": revision,
            "prefixes": list(plan.match.place.prefixes),
            "fingerprint": dict(fingerprint),
        },
        "block_size": {
            "value": plan.block_size.value,
            "from": plan.block_size.origin,
            "counts_bonus_token": drafter.block_size.counts_bonus_token,
        },
        "tap": drafter.tap,
        "fusion": drafter.fusion,
        "dtype": plan.request.dtype,
        "quantization": plan.quantization,
        "kept_full_precision": dict(plan.kept_full_precision),
        "tensors": {
            output.name: {
                "dtype": output.dtype,
                "shape": list(output.shape),
                "sources": [source.name for source in tensor.tensors],
                "transforms": list(tensor.transforms),
                ALGORITHM: tensor_hashes[output.name],
            }
            for output, tensor in plan.outputs
        },
        "dropped": [tensor.name for tensor in plan.dropped],
        "files": dict(file_hashes),
    }


def source_name(checkpoint: Checkpoint) -> tuple[str, str | None]:
    """The source's name without any path of this machine, and its revision.

    A folder of the Hub cache, `models--owner--name/snapshots/<commit>`, is named as on the Hub.
    """
    if checkpoint.storage.hub_name is not None:
        return checkpoint.storage.hub_name.repository, checkpoint.revision
    root = checkpoint.root.resolve()
    if root.parent.name == "snapshots" and root.parent.parent.name.startswith("models--"):
        return root.parent.parent.name.removeprefix("models--").replace(
            "--", "/", 1
        ), checkpoint.revision or root.name
    # A name on disk is bytes; the manifest is text.
    return os.fsencode(root.name).decode("utf-8", "backslashreplace"), checkpoint.revision
