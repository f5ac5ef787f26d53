"""A family's record: what ``core/families/<family>.toml`` says, and what follows from it for a config.json.

A record holds names, shapes and constants, never a condition. Shapes are products of config keys, of the
record's named sums, and of whole numbers; a shape with a zero in it means the tensor is not expected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

from draftpair.checkpoint import ConfigView
from draftpair.checkpoint.wording import printable
from draftpair.errors import Refused
from draftpair.families.specs import (
    LARGEST,
    MOST,
    DrafterSpec,
    HeadSpec,
    Shape,
    TargetSpec,
    TensorRule,
    TrunkSpec,
)


@dataclass(frozen=True, eq=False)
class Record:
    """What draftpair knows of a family of drafters: its name, its targets, and where a head of it lives.

    ``head`` is None for drafters that are published as such. A record that is no `Family` is enough to recognise a
    head; ``unsupported`` says why it is not split.
    """

    name: str
    title: str
    kind: str
    maturity: str
    notes: str | None
    engines: tuple[str, ...]
    target: TargetSpec
    head: HeadSpec | None
    unsupported: str | None

    def serves(self, config: ConfigView) -> bool:
        """Whether targets of this config's ``model_type``, of the text model or at the root, are the family's."""
        return not {config.model_type, config.root_model_type}.isdisjoint(self.target.model_types)


@dataclass(frozen=True, eq=False)
class Family(Record):
    """A family whose drafters can be checked. ``rules`` describe their tensors; see the TOML file for the words.

    ``flags`` are config keys that only say whether some tensors are there, each with the names of such tensors below
    a layer: where the tensors say otherwise than config.json, they are right.
    """

    drafter: DrafterSpec
    defaults: Mapping[str, int]
    flags: Mapping[str, tuple[str, ...]]
    dims: Mapping[str, tuple[str, ...]]
    rules: tuple[TensorRule, ...]

    @property
    def describes_target(self) -> bool:
        """Whether the drafter's config is that of its target: then sizes and settings of both have to agree."""
        return self.head is not None or self.drafter.describes_target

    @property
    def max_layers(self) -> int:
        """How many layers a drafter of the family can have."""
        return self.head.max_depth if self.head else MOST

    def number(self, name: str, config: ConfigView) -> int:
        """The value of a config key or of one of the record's named sums.

        Raises Refused, naming the key, when the config does not hold a whole number there.
        """
        if name in self.dims:
            return sum(self._entry(product, config) for product in self.dims[name])
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

    def trained_width(self, config: ConfigView) -> tuple[int, str] | None:
        """The block width that follows from the head's depth, one layer where none is declared; and why.

        None for a family whose width has nothing to do with its depth.
        """
        spec, declared = self.drafter.block_size, self.drafter_depth(config)
        if spec.depth_plus is None:
            return None
        depth = self.count(declared, config) if declared and config.get(declared) else 1
        return depth + spec.depth_plus, f"{declared or 'depth'} + {spec.depth_plus}"

    def drafter_depth(self, config: ConfigView) -> str | None:
        """The key under which a drafter's config.json, or else a target's, declares the depth."""
        declared = self.head.depth if self.head else ()
        keys = (self.drafter.depth, *declared) if self.drafter.depth else declared
        return next((key for key in keys if config.get(key) is not None), keys[0] if keys else None)

    def borrows(self, names: Collection[str]) -> tuple[str, ...]:
        """What a drafter with tensors of these names takes from its target: ``embedding``, ``head``, both or none."""
        own = {
            rule.role
            for rule in self.rules
            if rule.role and any(output.name.format(layer=0, tap=0) in names for output in rule.outputs)
        }
        return tuple(role for role in self.drafter.borrows if role not in own)

    def resolve(self, shape: Shape, config: ConfigView) -> tuple[int, ...]:
        """A shape of the record as numbers: each entry is a product such as ``"2 * hidden_size"``.

        ``"hidden_size / groups"`` is a share of one. Raises Refused where it is no whole number.
        """
        return tuple(self._entry(entry, config) for entry in shape)

    def _entry(self, entry: str, config: ConfigView) -> int:
        product, _, divisor = entry.partition("/")
        value = prod(self._factor(word, config) for word in product.split("*"))
        shares = self._factor(divisor, config) if divisor else 1
        if not shares or value % shares:
            raise Refused(
                f"config.json: {divisor.strip()} is {shares}, and {product.strip()}, {value}, is no multiple of it",
                hint="compare config.json with the one of the original repository",
            )
        return value // shares

    def _factor(self, word: str, config: ConfigView) -> int:
        word = word.strip()
        return int(word) if word.isdecimal() else self.number(word, config)


@dataclass(frozen=True, eq=False)
class SplitFamily(Family):
    """A family whose drafters are heads that can be cut out of their targets."""

    head: HeadSpec
    trunk: TrunkSpec | None
