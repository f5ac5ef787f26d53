"""The record of a TOML document that has passed the record schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from draftpair.families.record import Family, Record, SplitFamily
from draftpair.families.specs import (
    MOST,
    BlockSizeSpec,
    DrafterSpec,
    HeadSpec,
    Lookalikes,
    NamedShape,
    TapsSpec,
    TargetSpec,
    TensorRule,
    TrunkSpec,
)


def parse_record(data: Mapping[str, Any]) -> Record:
    """The record of a TOML document that has passed the record schema."""
    known = _known(data)
    if data["maturity"] == "recognised":
        return Record(**known)
    known |= {
        "drafter": _drafter(data["drafter"]),
        "defaults": data.get("defaults", {}),
        "flags": {key: tuple(names) for key, names in data.get("flags", {}).items()},
        "dims": {name: tuple(keys) for name, keys in data.get("dims", {}).items()},
        "rules": tuple(_tensor_rule(row) for row in data["tensors"]),
    }
    if data["maturity"] == "checked":
        return Family(**known)
    return SplitFamily(**known, trunk=_trunk(data["trunk"]) if "trunk" in data else None)


def _known(data: Mapping[str, Any]) -> dict[str, Any]:
    target = data["target"]
    return {
        **{key: data[key] for key in ("name", "title", "kind", "maturity")},
        "notes": data.get("notes"),
        "engines": tuple(data.get("engines", ())),
        "unsupported": data.get("unsupported"),
        "target": TargetSpec(
            tuple(target["model_types"]),
            target["source"],
            tuple(Lookalikes(**group) for group in target.get("lookalikes", ())),
        ),
        "head": _head(data["head"]) if "head" in data else None,
    }


def _head(head: Mapping[str, Any]) -> HeadSpec:
    return HeadSpec(
        prefixes=tuple(head["prefixes"]),
        layers=head.get("layers"),
        first_layer=head["first_layer"],
        depth=tuple(head["depth"]),
        max_depth=head.get("max_depth", MOST),
        markers=tuple(head["markers"]),
    )


def _trunk(trunk: Mapping[str, Any]) -> TrunkSpec:
    return TrunkSpec(
        layers=trunk["layers"],
        dense_marker=trunk["dense_marker"],
        dense_zeroes=tuple(trunk["dense_zeroes"]),
        outer=tuple((row["name"], tuple(row["shape"])) for row in trunk["outer"]),
    )


def _drafter(drafter: Mapping[str, Any]) -> DrafterSpec:
    lists = (
        "plain_model_types", "architectures", "config_markers", "speculators", "config_edits", "markers", "borrows",
    )  # fmt: skip
    words = ("model_type", "view", "depth", "position", "verification")
    read: dict[str, Any] = {key: tuple(drafter.get(key, ())) for key in lists}
    read |= {key: drafter.get(key) for key in words}
    return DrafterSpec(
        **read,
        block_prefix=drafter["block_prefix"],
        text_defaults=drafter.get("text_defaults", {}),
        hidden=drafter.get("hidden", "hidden_size"),
        tap=drafter["tap"],
        fusion=drafter["fusion"],
        cache=drafter.get("cache", "own"),
        taps=TapsSpec(**drafter["taps"]) if "taps" in drafter else None,
        mask=drafter["mask"]["key"] if "mask" in drafter else None,
        shared_kv=tuple(drafter["shared_kv"]["types"]) if "shared_kv" in drafter else (),
        describes_target=drafter.get("describes_target", False),
        block_size=BlockSizeSpec(**drafter["block_size"]),
    )


def _tensor_rule(row: Mapping[str, Any]) -> TensorRule:
    single = (
        [{"name": row["source"], "shape": row.get("shape")}] if "source" in row else row.get("sources", [])
    )
    listed = [{"name": row["output"], "shape": row["shape"]}] if "output" in row else row.get("outputs", [])
    return TensorRule(
        sources=tuple(map(_named_shape, single)),
        outputs=tuple(map(_named_shape, listed)),
        copy_of=tuple(row.get("copy_of", ())),
        **{key: row[key] for key in _PLAIN_KEYS if key in row},
    )


def _named_shape(entry: Mapping[str, Any]) -> NamedShape:
    return NamedShape(entry["name"], tuple(entry["shape"]) if entry.get("shape") is not None else None)


_PLAIN_KEYS = (
    "per", "transform", "repeat", "choice", "optional", "dtype", "full_precision", "norm", "role", "holds",
)  # fmt: skip
