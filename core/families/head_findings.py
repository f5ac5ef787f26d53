"""What is to be said of a head that was found: what it lacks or holds besides, and where config.json disagrees."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.checkpoint.stored import Stored, UnknownPacking
from draftpair.checkpoint.wording import some
from draftpair.families.locate import Place
from draftpair.families.record import SplitFamily
from draftpair.families.specs import TensorRule
from draftpair.findings import Finding


def flag_finding(config: ConfigView, key: str, value: bool) -> Finding:
    """A flag of config.json that the tensors contradict; ``value`` is what they say."""
    return Finding(
        "HEAD-CONFIG-FLAG",
        "warning",
        f"config.json says {key} {config.get(key)!r}; the tensors are those of {key} {value}",
        where=config.place(key),
        expected=value,
        found=config.get(key),
        hint="the tensors decide",
    )


def shape_findings(
    rule: TensorRule, sources: Sequence[Stored], family: SplitFamily, config: ConfigView
) -> Iterable[Finding]:
    """Where the tensors that a rule stands for have other shapes than config.json asks for."""
    shapes = [source.shape for source in rule.sources] if rule.repeat is None else [rule.shape] * len(sources)
    for stored, shape in zip(sources, shapes, strict=True):
        expected = family.resolve(shape, config) if shape else stored.shape
        if stored.shape != expected and stored.shape not in as_written(rule, family, config):
            tensor = stored.tensors[0]
            yield Finding(
                "HEAD-TENSOR-SHAPE",
                "error",
                f"{tensor.name} in {tensor.file} has shape {list(stored.shape)}; config.json asks for "
                f"{list(expected)} ({' x '.join(shape or ())})",
                where=tensor.name,
                expected=list(expected),
                found=list(stored.shape),
                hint="config.json and the tensors do not belong together",
            )


def as_written(rule: TensorRule, family: SplitFamily, config: ConfigView) -> list[tuple[int, ...]]:
    """The shape in which the drafter holds a tensor that is only copied: conversions store it so already."""
    outputs = rule.outputs if rule.transform == "copy" else ()
    return [family.resolve(output.shape, config) for output in outputs if output.shape]


def several(found: list[Place]) -> Iterable[Finding]:
    """Two heads in one checkpoint: nothing says which is meant."""
    if len(found) > 1:
        prefixes = [place.prefixes[0] for place in found]
        yield Finding(
            "HEAD-SEVERAL",
            "error",
            f"the checkpoint holds a head under each of {some(prefixes)}",
            where=prefixes[1],
            found=prefixes,
            hint="take the file that holds one of them out of the folder",
        )


def depth_findings(family: SplitFamily, config: ConfigView, place: Place) -> Iterable[Finding]:
    """The number of head layers and where they begin, against what config.json declares."""
    spec, layers = family.head, place.layers
    stated = spec.declared_depth(config)
    key, declared = stated or (spec.depth[0] if spec.depth else None, None)
    if key is not None and declared in (None, 0):
        yield Finding(
            "HEAD-UNDECLARED",
            "note",
            f"the tensors hold {len(layers)} head layer(s); config.json declares none under {key}",
            where=config.place(key),
            expected=len(layers),
            found=declared,
            hint="the tensors decide; runtimes that read only the config will not use the head",
        )
    elif key is not None and declared != len(layers):
        yield Finding(
            "HEAD-DEPTH",
            "warning",
            f"config.json declares {declared!r} as the number of head layers, {key}; the tensors hold {len(layers)}",
            where=config.place(key),
            expected=declared,
            found=len(layers),
            hint="the tensors decide",
        )
    first = spec.first_layer if isinstance(spec.first_layer, int) else config.get(spec.first_layer)
    where = None if isinstance(spec.first_layer, int) else config.place(spec.first_layer)
    if spec.layers and layers[0] != first:
        yield Finding(
            "HEAD-LAYER-NUMBER",
            "error",
            f"the head's first layer is number {layers[0]}; expected {first}"
            + (", the number of decoder layers that config.json says come before it" if where else ""),
            where=where or place.prefixes[0],
            expected=first,
            found=layers[0],
            hint="config.json and the tensors do not belong together",
        )
    elif spec.layers and layers != tuple(range(layers[0], layers[0] + len(layers))):
        yield Finding(
            "HEAD-LAYER-NUMBER",
            "error",
            f"the head's layers are numbered {', '.join(map(str, layers))}: there is a gap",
            where=place.prefixes[0],
            expected=list(range(layers[0], layers[0] + len(layers))),
            found=list(layers),
            hint=f"split from {family.target.source}",
        )


def packed(prefix: str, unknown: dict[str, UnknownPacking], checkpoint: Checkpoint) -> Iterable[Finding]:
    """Tensors packed in a way that is not understood: a packed word must never be read as a number."""
    if unknown:
        first = next(iter(unknown.values()))
        others = sorted(unknown)[1:]
        more = f"; and {len(others)} more tensors that are not understood: {some(others)}" if others else ""
        dtypes = {checkpoint.tensors[name].dtype for name in unknown if name in checkpoint.tensors}
        yield Finding(
            "HEAD-PACKED",
            "error",
            first.message + more,
            where=prefix,
            expected="plain numbers, or a packing that draftpair decodes",
            found=sorted(dtypes),
            hint=first.hint,
        )


def listed_tensors(rule: str, what: str, names: Iterable[str], prefix: str, hint: str) -> Iterable[Finding]:
    """One finding that names tensors, where there are any."""
    listed = list(names)
    if listed:
        yield Finding(rule, "error", f"{what} {some(listed)}", where=prefix, found=len(listed), hint=hint)
