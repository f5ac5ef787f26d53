"""Finds where a head lies in a checkpoint: its prefix and its layers, by tensor names alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from draftpair.checkpoint import Checkpoint, TensorInfo
from draftpair.families.record import Record
from draftpair.families.specs import HeadSpec

# As the published names are written; no model has a billion layers.
_NUMBER = r"(0|[1-9][0-9]{0,8})"


@dataclass(frozen=True)
class Place:
    """One head: the prefix of its names, and the numbers its layers have there, sorted."""

    spec: HeadSpec
    prefix: str
    layers: tuple[int, ...]

    @property
    def prefixes(self) -> tuple[str, ...]:
        """What the head's names start with: its own prefix, or that of each of its layers."""
        if self.spec.owns_prefix:
            return (self.prefix,)
        return tuple(self.spec.layer_prefix(self.prefix, layer) for layer in self.layers)

    def tensors(self, checkpoint: Checkpoint) -> tuple[TensorInfo, ...]:
        """Every tensor of the head, layer by layer."""
        return tuple(
            t for start in self.prefixes for t in checkpoint.tensors.values() if t.name.startswith(start)
        )


def places(checkpoint: Checkpoint, record: Record) -> list[Place]:
    """Every place of the checkpoint that carries one of the record's markers, in the order of its prefixes."""
    head = record.head
    found = (_place(checkpoint, head, prefix) for prefix in head.prefixes) if head else ()
    return [place for place in found if place]


def layers_by_number(names: Iterable[str], prefix: str, layers: str) -> dict[int, set[str]]:
    """Number of every layer in the names, and the names below its prefix.

    Layer numbers are compared as numbers: layer 4 is no prefix of layer 47.
    """
    before, after = layers.split("{layer}")
    pattern = re.compile(re.escape(prefix + before) + _NUMBER + re.escape(after) + r"(.+)")
    numbered: dict[int, set[str]] = {}
    for name in names:
        if found := pattern.fullmatch(name):
            numbered.setdefault(int(found[1]), set()).add(found[2])
    return numbered


def _place(checkpoint: Checkpoint, spec: HeadSpec, prefix: str) -> Place | None:
    markers = set(spec.markers)
    numbered = layers_by_number(checkpoint.tensors, prefix, spec.layers) if spec.layers else {}
    marked = {number for number, names in numbered.items() if not names.isdisjoint(markers)}
    if spec.owns_prefix:
        if not marked and markers.isdisjoint(_below(checkpoint, prefix)):
            return None
        return Place(spec, prefix, tuple(sorted(numbered)) or (0,))
    # A layer too many alone is no head: one of those past the last must carry a marker.
    depth = checkpoint.config.get(str(spec.first_layer))
    past = {number for number in numbered if isinstance(depth, int) and number >= depth}
    return Place(spec, prefix, tuple(sorted(marked | past))) if marked else None


def _below(checkpoint: Checkpoint, prefix: str) -> Iterator[str]:
    return (name[len(prefix) :] for name in checkpoint.tensors if name.startswith(prefix))
