"""A family's record: the dataclasses behind ``core/families/<family>.toml``.

A record holds names, shapes and constants, never a condition. Shapes are products of config keys, of the
record's named sums, and of whole numbers; a shape with a zero in it means the tensor is not expected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
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
    ``outputs`` counts the drafter's layers from 0, and with ``per`` "tap" ``{tap}`` its taps. A drafter that is
    published as such has no sources. ``choice`` is ``"<question>:<alternative>"``: of each question
    exactly one alternative is present, and the tensors decide which. ``full_precision`` is the reason why the
    tensor is never quantized; ``dtype`` is a dtype it must be written in; ``holds`` says that it is no weight but a
    table, of "ids" or of "flags"; ``norm`` says that the raw head
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
    holds: str | None = None

    @property
    def source(self) -> str:
        """The name of the first source."""
        return self.sources[0].name

    @property
    def shape(self) -> Shape | None:
        """The shape of the first source, else output; None for a tensor that is dropped whatever its shape."""
        return (self.sources or self.outputs)[0].shape


@dataclass(frozen=True)
class Lookalikes:
    """Releases of one geometry: which of them a drafter was made for cannot be told from files alone.

    ``geometry`` are the config keys of their targets that tell them from all others; none where all targets of the
    family are meant.
    """

    releases: str
    geometry: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TargetSpec:
    """Which targets the drafter belongs to; ``source`` says in words where it can be had.

    No ``model_types`` stands for targets of any type.
    """

    model_types: tuple[str, ...]
    source: str
    lookalikes: tuple[Lookalikes, ...] = ()


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

    The width is ``config[key]``, else the declared depth plus ``depth_plus``, else ``default``. With
    ``counts_bonus_token`` a width of n means n - 1 proposals; without it the declared number counts the proposals,
    and the family's view turns it into rows.
    """

    key: str
    minimum: int
    maximum: int
    counts_bonus_token: bool
    depth_plus: int | None = None
    default: int | None = None


@dataclass(frozen=True)
class TapsSpec:
    """The layers of the target whose outputs the drafter reads, by the ids under config key ``ids``.

    With ``convention`` "output" id i is the output of layer i, with "input" its input. ``fc`` is the tensor as wide
    as all of them together. ``per_layer`` says that each layer of the drafter has one of its own.
    """

    ids: str
    convention: str
    fc: str
    per_layer: bool = False


@dataclass(frozen=True)
class DrafterSpec:
    """The drafter's folder: what marks it, what it reads and what it borrows.

    What marks it: its tensors ``markers``; ``architectures``, ``config_markers`` (paths of config.json) and the
    ``speculators`` types; and ``model_type``, which nothing else declares. Some declare a plain model's type instead,
    one of ``plain_model_types``, which marks nothing. ``view`` is the module of `draftpair.families.views` that reads
    its config. ``block_prefix`` names its decoder layer. ``depth`` is the key that counts its layers;
    ``text_defaults`` are keys that its text_config gets when the target's states none, ``config_edits`` the names
    of functions of `draftpair.convert.drafter_config` that do what a table cannot. ``hidden`` is the key that says
    how wide the target's hidden states are. ``cache`` says whose keys and values its layers read: "own", "none" for
    the target's, "model" for those of an ordinary model. ``shared_kv`` are the layer types of the target whose last
    keys and values it reads. ``position`` and ``verification`` say in words what a runtime has to know.
    """

    model_type: str | None
    plain_model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    config_markers: tuple[str, ...]
    speculators: tuple[str, ...]
    view: str | None
    block_prefix: str
    depth: str | None
    text_defaults: Mapping[str, Any]
    config_edits: tuple[str, ...]
    markers: tuple[str, ...]
    hidden: str
    borrows: tuple[str, ...]
    tap: str
    fusion: str
    cache: str
    position: str | None
    verification: str | None
    taps: TapsSpec | None
    mask: str | None
    shared_kv: tuple[str, ...]
    block_size: BlockSizeSpec


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
