"""A family's record: the dataclasses behind ``core/families/<family>.toml``.

A record holds names, shapes and constants, never a condition. Shapes are products of config keys, of the
record's named sums, and of whole numbers; a shape with a zero in it means the tensor is not expected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from draftpair.checkpoint import ConfigView
from draftpair.checkpoint.wording import printable
from draftpair.errors import Refused

Shape = tuple[str, ...]

LARGEST = 1 << 24
"""Largest dimension of any model, with room to spare."""
MOST = 10_000
"""Most layers, or experts of one layer, of any model, with room to spare."""


class NamedShape(NamedTuple):
    """A tensor's name, possibly with ``{layer}`` or ``{expert}`` in it, and its shape in words of the record."""

    name: str
    shape: Shape | None


@dataclass(frozen=True)
class TensorRule:
    """One tensor of a head, or one numbered run of tensors, and what becomes of it.

    The names of ``sources`` are below the prefix of a head layer, or with ``per`` "head" below the head's own;
    with "target" they are whole names of tensors of the target that the drafter has a copy of; ``{expert}`` in them
    stands for 0 up to the value of the config key ``repeat``. ``{layer}`` in a name of
    ``outputs`` counts the head's layers from 0. ``choice`` is ``"<question>:<alternative>"``: of each question
    exactly one alternative is present, and the tensors decide which. ``full_precision`` is the reason why the
    tensor is never quantized; ``dtype`` is a dtype it must be written in; ``norm`` says that the raw head
    stores w where the model multiplies by 1 + w: "zero_centred" when the drafter wants the gain, "stays_zero_centred"
    when it adds the 1 itself; ``role`` says what need not be borrowed if it is there; ``copy_of``
    what the target calls the tensor that a dropped one must be a copy of.
    """

    sources: tuple[NamedShape, ...]
    outputs: tuple[NamedShape, ...]
    per: str = "layer"
    transform: str = "copy"
    repeat: str | None = None
    choice: str | None = None
    optional: bool = False
    dtype: str | None = None
    full_precision: str | None = None
    norm: str | None = None
    role: str | None = None
    copy_of: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The name of the first source."""
        return self.sources[0].name

    @property
    def shape(self) -> Shape | None:
        """The shape of the first source; None for a tensor that is dropped whatever its shape."""
        return self.sources[0].shape


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

    Its names start with one of ``prefixes``, and those of its layers go on with ``layers``, which holds ``{layer}``;
    a head without numbered layers has None there. The first head layer is numbered ``first_layer``: a number when
    the prefix is the head's own, a config key when its layers follow the decoder's. What carries one of the
    ``markers``, below a layer or below the head's own prefix, is a head. ``depth`` are the config keys that may
    declare how many layers there are, ``max_depth`` how many the family's drafter can hold.
    """

    prefixes: tuple[str, ...]
    layers: str | None
    first_layer: int | str
    depth: tuple[str, ...]
    max_depth: int
    markers: tuple[str, ...]

    @property
    def owns_prefix(self) -> bool:
        """Whether everything below the prefix is the head's."""
        return isinstance(self.first_layer, int)

    def layer_prefix(self, prefix: str, layer: int) -> str:
        """What the names of head layer ``layer`` start with, when the head's start with ``prefix``."""
        return prefix + (self.layers.format(layer=layer) if self.layers else "")

    def declared_depth(self, config: ConfigView) -> tuple[str, Any] | None:
        """The first depth key that config.json states, and its value, which may be no number."""
        return next(((key, config.get(key)) for key in self.depth if config.get(key) is not None), None)


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
    """The folder that split-mtp writes and the runtime loads.

    ``block_prefix`` names its decoder layer. ``depth`` is the key of its text_config that counts its layers;
    ``text_defaults`` are keys that its text_config gets when the target's states none, ``config_edits`` the names
    of functions of `draftpair.convert.drafter_config` that do what a table cannot.
    """

    model_type: str
    block_prefix: str
    depth: str | None
    text_defaults: Mapping[str, Any]
    config_edits: tuple[str, ...]
    markers: tuple[str, ...]
    borrows: tuple[str, ...]
    tap: str
    fusion: str
    block_size: BlockSizeSpec


@dataclass(frozen=True, eq=False)
class Record:
    """What draftpair knows of a family of heads: its name, its targets, and where the head lives.

    A record that is no `Family` is enough to recognise a head; ``unsupported`` says why it is not split.
    """

    name: str
    title: str
    kind: str
    maturity: str
    notes: str | None
    engines: tuple[str, ...]
    target: TargetSpec
    head: HeadSpec
    unsupported: str | None

    def serves(self, config: ConfigView) -> bool:
        """Whether targets of this config's ``model_type``, of the text model or at the root, are the family's."""
        return not {config.model_type, config.root_model_type}.isdisjoint(self.target.model_types)


@dataclass(frozen=True, eq=False)
class Family(Record):
    """One family of drafters. ``rules`` describe the head's tensors; see the TOML file for the words.

    ``flags`` are config keys that only say whether some tensors are there, each with the names of such tensors below
    a layer: where the tensors say otherwise than config.json, they are right.
    """

    trunk: TrunkSpec | None
    drafter: DrafterSpec
    defaults: Mapping[str, int]
    flags: Mapping[str, tuple[str, ...]]
    dims: Mapping[str, tuple[str, ...]]
    rules: tuple[TensorRule, ...]

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

    def trained_width(self, config: ConfigView) -> tuple[int, str]:
        """The block width that follows from the head's depth, one layer where none is declared; and why."""
        spec, declared = self.drafter.block_size, self.drafter_depth(config)
        depth = self.count(declared, config) if declared and config.get(declared) else 1
        return depth + spec.depth_plus, f"{declared or 'depth'} + {spec.depth_plus}"

    def drafter_depth(self, config: ConfigView) -> str | None:
        """The key under which a drafter's config.json, or else a target's, declares the depth."""
        keys = (self.drafter.depth, *self.head.depth) if self.drafter.depth else self.head.depth
        return next((key for key in keys if config.get(key) is not None), keys[0] if keys else None)

    def borrows(self, names: Collection[str]) -> tuple[str, ...]:
        """What a drafter with tensors of these names takes from its target: ``embedding``, ``head``, both or none."""
        own = {
            rule.role
            for rule in self.rules
            if rule.role and any(output.name.format(layer=0) in names for output in rule.outputs)
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


def parse_record(data: Mapping[str, Any]) -> Record:
    """The record of a TOML document that has passed the record schema."""
    known = _known(data)
    if data["maturity"] == "recognised":
        return Record(**known)
    return Family(
        **known,
        trunk=_trunk(data["trunk"]) if "trunk" in data else None,
        drafter=_drafter(data["drafter"]),
        defaults=data.get("defaults", {}),
        flags={key: tuple(names) for key, names in data.get("flags", {}).items()},
        dims={name: tuple(keys) for name, keys in data.get("dims", {}).items()},
        rules=tuple(_tensor_rule(row) for row in data["tensors"]),
    )


def _known(data: Mapping[str, Any]) -> dict[str, Any]:
    target, head = data["target"], data["head"]
    return {
        **{key: data[key] for key in ("name", "title", "kind", "maturity")},
        "notes": data.get("notes"),
        "engines": tuple(data.get("engines", ())),
        "unsupported": data.get("unsupported"),
        "target": TargetSpec(tuple(target["model_types"]), target["source"]),
        "head": HeadSpec(
            prefixes=tuple(head["prefixes"]),
            layers=head.get("layers"),
            first_layer=head["first_layer"],
            depth=tuple(head["depth"]),
            max_depth=head.get("max_depth", MOST),
            markers=tuple(head["markers"]),
        ),
    }


def _trunk(trunk: Mapping[str, Any]) -> TrunkSpec:
    return TrunkSpec(
        layers=trunk["layers"],
        dense_marker=trunk["dense_marker"],
        dense_zeroes=tuple(trunk["dense_zeroes"]),
        outer=tuple((row["name"], tuple(row["shape"])) for row in trunk["outer"]),
    )


def _drafter(drafter: Mapping[str, Any]) -> DrafterSpec:
    return DrafterSpec(
        model_type=drafter["model_type"],
        block_prefix=drafter["block_prefix"],
        depth=drafter.get("depth"),
        text_defaults=drafter.get("text_defaults", {}),
        config_edits=tuple(drafter.get("config_edits", ())),
        markers=tuple(drafter["markers"]),
        borrows=tuple(drafter["borrows"]),
        tap=drafter["tap"],
        fusion=drafter["fusion"],
        block_size=BlockSizeSpec(**drafter["block_size"]),
    )


def _tensor_rule(row: Mapping[str, Any]) -> TensorRule:
    single = [{"name": row["source"], "shape": row.get("shape")}] if "source" in row else row["sources"]
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
    "per", "transform", "repeat", "choice", "optional", "dtype", "full_precision", "norm", "role",
)  # fmt: skip
