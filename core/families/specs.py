"""What a family's record is made of: a tensor rule, the target, a head and its trunk, the drafter, its block width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from draftpair.checkpoint import ConfigView

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

    With ``convention`` "output" id i is the output of layer i, with "input" its input. ``per_layer`` says that each
    layer of the drafter has one of its own.
    """

    ids: str
    convention: str
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
    keys and values it reads. ``describes_target`` says that its config is its target's. ``position`` and
    ``verification`` say in words what a runtime has to know.
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
    describes_target: bool
    block_size: BlockSizeSpec
