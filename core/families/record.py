"""A family's record: the dataclasses behind ``core/families/<family>.toml``.

A record holds names, shapes and constants, never a condition. Shapes are products of config keys, of the
record's named sums, and of whole numbers; a shape with a zero in it means the tensor is not expected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from draftpair.checkpoint import ConfigView
from draftpair.checkpoint.wording import printable
from draftpair.errors import Refused

Shape = tuple[str, ...]

LARGEST = 1 << 24
"""Largest dimension of any model, with room to spare."""
MOST = 10_000
"""Most layers, or experts of one layer, of any model, with room to spare."""


@dataclass(frozen=True)
class TensorRule:
    """One tensor of a head, or one numbered run of tensors, and what becomes of it.

    ``source`` is the name below the head's prefix; ``{expert}`` in it stands for 0 up to the value of the
    config key ``repeat``. ``choice`` is ``"<question>:<alternative>"``: of each question exactly one
    alternative is present, and the tensors decide which. ``full_precision`` is the reason why the tensor
    is never quantized; ``dtype`` is a dtype it must be written in.
    """

    source: str
    shape: Shape | None
    outputs: tuple[str, ...]
    output_shapes: tuple[Shape, ...]
    transform: str = "copy"
    repeat: str | None = None
    choice: str | None = None
    optional: bool = False
    dtype: str | None = None
    full_precision: str | None = None


@dataclass(frozen=True)
class TargetSpec:
    """Which targets the head belongs to; ``source`` says in words where a whole head can be had."""

    model_types: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class TrunkSpec:
    """The target's own tensors: ``outer`` by name and shape, and ``config[layers]`` decoder layers.

    The layers have the tensors of the head's block. One that carries ``dense_marker`` has no experts; there the
    config keys of ``dense_zeroes`` count as zero.
    """

    layers: str
    dense_marker: str
    dense_zeroes: tuple[str, ...]
    outer: tuple[tuple[str, Shape], ...]


@dataclass(frozen=True)
class HeadSpec:
    """Where the head lives in its target's checkpoint.

    ``layer_prefix`` holds ``{layer}``; the first head layer is numbered ``config[first_layer]``.
    A layer is a head when it carries one of the ``markers``. ``depth`` is the config key that declares
    how many there are, ``max_depth`` how many the family's drafter can hold.
    """

    layer_prefix: str
    first_layer: str
    depth: str
    max_depth: int
    markers: tuple[str, ...]


@dataclass(frozen=True)
class BlockSizeSpec:
    """How the drafter's block width is declared and bounded.

    The width is ``config[key]``, else the declared depth plus ``depth_plus``. With ``counts_bonus_token``
    a width of n means n - 1 proposals.
    """

    key: str
    depth_plus: int
    minimum: int
    maximum: int
    counts_bonus_token: bool


@dataclass(frozen=True)
class DrafterSpec:
    """The folder that split-mtp writes and the runtime loads; ``block_prefix`` names its decoder layer."""

    model_type: str
    block_prefix: str
    markers: tuple[str, ...]
    borrows: tuple[str, ...]
    tap: str
    fusion: str
    block_size: BlockSizeSpec


@dataclass(frozen=True)
class Family:
    """One family of drafters. ``rules`` describe the head's tensors; see the TOML file for the words."""

    name: str
    title: str
    kind: str
    maturity: str
    target: TargetSpec
    trunk: TrunkSpec
    head: HeadSpec
    drafter: DrafterSpec
    defaults: Mapping[str, int]
    dims: Mapping[str, tuple[str, ...]]
    rules: tuple[TensorRule, ...]

    def number(self, name: str, config: ConfigView) -> int:
        """The value of a config key or of one of the record's named sums.

        Raises Refused, naming the key, when the config does not hold a whole number there.
        """
        if name in self.dims:
            return sum(self.number(key, config) for key in self.dims[name])
        value = config.get(name, self.defaults.get(name))
        if isinstance(value, bool):
            return int(value)
        if not isinstance(value, int) or not 0 <= value <= LARGEST:
            raise Refused(
                f"config.json: {name} is {printable(repr(value), 60)}; {self.name} needs a whole number there, "
                f"up to {LARGEST:,}",
                hint="compare config.json with the one of the original repository",
            )
        return value

    def count(self, name: str, config: ConfigView) -> int:
        """A config key that says how often something is there. Raises Refused above `MOST` as well."""
        value = self.number(name, config)
        if value > MOST:
            raise Refused(
                f"config.json: {name} is {value:,}; no model has more than {MOST:,}",
                hint="compare config.json with the one of the original repository",
            )
        return value

    def trained_width(self, config: ConfigView) -> tuple[int, str]:
        """The block width that follows from the head's depth, one layer where none is declared; and why."""
        spec, key = self.drafter.block_size, self.head.depth
        depth = self.count(key, config) if config.get(key) else 1
        return depth + spec.depth_plus, f"{key} + {spec.depth_plus}"

    def resolve(self, shape: Shape, config: ConfigView) -> tuple[int, ...]:
        """A shape of the record as numbers: each entry is a product such as ``"2 * hidden_size"``."""
        return tuple(prod(self._factor(word, config) for word in entry.split("*")) for entry in shape)

    def _factor(self, word: str, config: ConfigView) -> int:
        word = word.strip()
        return int(word) if word.isdecimal() else self.number(word, config)


def _tensor_rule(row: Mapping[str, Any]) -> TensorRule:
    shape = tuple(row["shape"]) if "shape" in row else None
    listed = [{"name": row["output"], "shape": row["shape"]}] if "output" in row else row.get("outputs", [])
    return TensorRule(
        shape=shape,
        outputs=tuple(entry["name"] for entry in listed),
        output_shapes=tuple(tuple(entry["shape"]) for entry in listed),
        **{key: row[key] for key in _PLAIN_KEYS if key in row},
    )


_PLAIN_KEYS = ("source", "transform", "repeat", "choice", "optional", "dtype", "full_precision")


def parse_record(data: Mapping[str, Any]) -> Family:
    """The record of a TOML document that has passed the record schema."""
    target, trunk, head, drafter = data["target"], data["trunk"], data["head"], data["drafter"]
    return Family(
        name=data["name"],
        title=data["title"],
        kind=data["kind"],
        maturity=data["maturity"],
        target=TargetSpec(tuple(target["model_types"]), target["source"]),
        trunk=TrunkSpec(
            layers=trunk["layers"],
            dense_marker=trunk["dense_marker"],
            dense_zeroes=tuple(trunk["dense_zeroes"]),
            outer=tuple((row["name"], tuple(row["shape"])) for row in trunk["outer"]),
        ),
        head=HeadSpec(
            layer_prefix=head["layer_prefix"],
            first_layer=head["first_layer"],
            depth=head["depth"],
            max_depth=head["max_depth"],
            markers=tuple(head["markers"]),
        ),
        drafter=DrafterSpec(
            model_type=drafter["model_type"],
            block_prefix=drafter["block_prefix"],
            markers=tuple(drafter["markers"]),
            borrows=tuple(drafter["borrows"]),
            tap=drafter["tap"],
            fusion=drafter["fusion"],
            block_size=BlockSizeSpec(**drafter["block_size"]),
        ),
        defaults=data.get("defaults", {}),
        dims={name: tuple(keys) for name, keys in data.get("dims", {}).items()},
        rules=tuple(_tensor_rule(row) for row in data["tensors"]),
    )
