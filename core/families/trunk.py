"""The tensors a target of a family must have, by its record and config.json; the head is not among them."""

from __future__ import annotations

from collections.abc import Iterator

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.families.heads import chosen, source_names, wanted
from draftpair.families.locate import layers_by_number
from draftpair.families.record import SplitFamily
from draftpair.families.specs import TensorRule, TrunkSpec

_Rows = list[tuple[TensorRule, tuple[str, ...], tuple[int, ...]]]


def trunk_shapes(family: SplitFamily, trunk: TrunkSpec, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Names and unquantized shapes of a target's tensors; ``trunk`` is the record's.

    Raw names and those of an MLX conversion are alternatives of the same rules, so both are understood.
    Raises Refused, naming the key, when config.json lacks a size.
    """
    config = checkpoint.config
    expected = {name: family.resolve(shape, config) for name, shape in trunk.outer}
    sparse = _rows(family, config)
    dense = _rows(family, ConfigView({**config.text, **dict.fromkeys(trunk.dense_zeroes, 0)}))
    for layer in range(family.count(trunk.layers, config)):
        prefix = family.head.layer_prefix(family.head.prefixes[0], layer)
        rows = dense if prefix + trunk.dense_marker in checkpoint.tensors else sparse
        expected.update(_of_layer(rows, prefix, checkpoint))
    return expected


def stray_layers(family: SplitFamily, trunk: TrunkSpec, checkpoint: Checkpoint) -> list[int]:
    """Numbers of layers past the last one that config.json counts, and that carry no marker of a head."""
    depth, head = family.count(trunk.layers, checkpoint.config), family.head
    layers = layers_by_number(checkpoint.tensors, head.prefixes[0], head.layers or "")
    return sorted(n for n, names in layers.items() if n >= depth and names.isdisjoint(head.markers))


def _rows(family: SplitFamily, config: ConfigView) -> _Rows:
    """The rules of one decoder layer, with the names and the shape each stands for."""
    block = family.drafter.block_prefix
    return [
        (rule, source_names(rule, family, config), family.resolve(rule.shape, config))
        for rule in family.rules
        if rule.outputs
        and rule.outputs[0].name.startswith(block)
        and rule.shape
        and wanted(rule, family, config)
    ]


def _of_layer(rows: _Rows, prefix: str, checkpoint: Checkpoint) -> Iterator[tuple[str, tuple[int, ...]]]:
    names = {rule: names for rule, names, _ in rows}
    here = checkpoint.tensors
    taken = chosen(
        list(names), lambda rule: any(prefix + name in here for name in names[rule]), lambda rule: True
    )
    kept = set(taken)
    for rule, own, shape in rows:
        if rule in kept:
            yield from ((prefix + name, shape) for name in own)
