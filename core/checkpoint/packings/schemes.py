"""`config_groups` of a quantization config, as compressed-tensors and ModelOpt write it.

Its `targets` name modules as the writer's classes had them, which a checkpoint's names need not resemble. So it
is the tensors that say which of the schemes is theirs, and the schemes that confirm it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from draftpair.checkpoint.packings.candidate import positive


class Scheme(NamedTuple):
    """How one group's weights are quantized, as far as that was stated and makes sense.

    `reordered` means that columns were sorted before they were put in groups.
    """

    format: str | None
    kind: str | None
    bits: int | None
    strategy: str
    group: int | None
    block: tuple[int, int] | None
    symmetric: bool
    reordered: bool


def schemes(quantization: Mapping[str, Any]) -> list[Scheme]:
    """The schemes for weights, in the order of the config."""
    groups = quantization.get("config_groups")
    return [
        _scheme(entry, weights, quantization)
        for entry in (groups.values() if isinstance(groups, dict) else ())
        if isinstance(entry, dict) and isinstance(weights := entry.get("weights"), dict)
    ]


def block_size(stated: Any) -> tuple[int, int] | None:
    """Rows and columns of a block as a config states them; None when it is no pair of positive integers."""
    if isinstance(stated, list) and len(stated) == 2 and all(positive(extent) for extent in stated):
        return stated[0], stated[1]
    return None


def _scheme(entry: Mapping[str, Any], weights: Mapping[str, Any], quantization: Mapping[str, Any]) -> Scheme:
    # A format stated for all holds where the group has none, unless it says that they are mixed.
    formats = [entry.get("format"), quantization.get("format")]
    known = [name for name in formats if isinstance(name, str) and name != "mixed-precision"]
    group, strategy = weights.get("group_size"), weights.get("strategy")
    if not isinstance(strategy, str):
        strategy = "group" if positive(group) else "channel" if group == -1 else "tensor"
    kind, bits = weights.get("type"), weights.get("num_bits")
    return Scheme(
        format=known[0] if known else None,
        kind=kind.lower() if isinstance(kind, str) else None,
        bits=bits if positive(bits) else None,
        strategy=strategy.lower(),
        group=group if positive(group) else None,
        block=block_size(weights.get("block_structure")),
        symmetric=weights.get("symmetric") is not False,
        reordered=weights.get("actorder") in ("group", "dynamic"),
    )
