"""Recognises a head inside a target's checkpoint: one decision, shared by inspect and split-mtp.

The tensors decide. The config is only compared: a declared head that is not there, and a head that is
there and not declared, are both findings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

from draftpair.checkpoint import PLAIN_DTYPES, Checkpoint, ConfigView, TensorInfo
from draftpair.checkpoint.wording import some
from draftpair.families import load_families
from draftpair.families.record import Family, TensorRule
from draftpair.findings import Finding, has_errors

# Where heads of families without a record are known to live; only used to say that something is there.
_ELSEWHERE = re.compile(r"^(?:(?:model|language_model)\.)?mtp(?:_layers|_block)?\.")


@dataclass(frozen=True)
class MatchedTensor:
    """A rule and the tensors it matched: one, or one an expert in order."""

    rule: TensorRule
    sources: tuple[TensorInfo, ...]


@dataclass(frozen=True)
class HeadMatch:
    """A head found in ``checkpoint``: what belongs to it, what is missing, what does not belong."""

    checkpoint: Checkpoint
    family: Family
    layers: tuple[int, ...]
    prefix: str
    layers_declared: int | None
    tensors: tuple[TensorInfo, ...]
    matched: tuple[MatchedTensor, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def layers_found(self) -> int:
        """How many head layers carry tensors."""
        return len(self.layers)

    @property
    def complete(self) -> bool:
        """Whether every tensor is there with the right shape, and nothing else."""
        return not has_errors(self.findings)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the head's tensors, from the headers."""
        return sum(tensor.nbytes for tensor in self.tensors)


def find_head(checkpoint: Checkpoint) -> HeadMatch | None:
    """The head of a family with a record, or None when no tensor of one is there.

    Structure comes first: layers that carry a family's marker tensors. Families may share markers, so
    ``model_type`` picks among those found; it never makes a head out of nothing.
    """
    found = [(f, layers) for f in load_families().values() if (layers := _head_layers(checkpoint, f))]
    model_type = checkpoint.config.model_type
    for family, layers in found:
        if model_type in family.target.model_types:
            return _match(checkpoint, family, layers)
    return None


def declared_depth(checkpoint: Checkpoint) -> tuple[Family, int] | None:
    """The family and the number of head layers that config.json promises, None when it promises none."""
    model_type = checkpoint.config.model_type
    for family in load_families().values():
        depth = checkpoint.config.get(family.head.depth)
        if model_type in family.target.model_types and type(depth) is int and depth > 0:
            return family, depth
    return None


def unrecorded_head(checkpoint: Checkpoint) -> tuple[str, tuple[TensorInfo, ...]] | None:
    """Tensors that look like a head of a family without a record: the common prefix and the tensors.

    Two layouts are known: a name that starts with ``mtp.`` or the like, and a layer past the last one
    that carries a fusion projection ``eh_proj``.
    """
    named = [t for t in checkpoint.tensors.values() if _ELSEWHERE.match(t.name)]
    if named:
        match = _ELSEWHERE.match(named[0].name)
        return (match.group() if match else "mtp."), tuple(named)
    fusion = next((name for name in checkpoint.tensors if re.search(r"\.layers\.\d+\.eh_proj\.", name)), None)
    if fusion is None:
        return None
    prefix = fusion[: fusion.index("eh_proj")]
    return prefix, tuple(t for t in checkpoint.tensors.values() if t.name.startswith(prefix))


def layers_by_number(checkpoint: Checkpoint, family: Family) -> dict[int, set[str]]:
    """Number of every layer in the tensors' names, and the names below its prefix.

    Layer numbers are compared as numbers: layer 4 is no prefix of layer 47.
    """
    before, after = family.head.layer_prefix.split("{layer}")
    pattern = re.compile(re.escape(before) + r"(\d+)" + re.escape(after) + r"(.+)")
    layers: dict[int, set[str]] = {}
    for name in checkpoint.tensors:
        if found := pattern.fullmatch(name):
            layers.setdefault(int(found[1]), set()).add(found[2])
    return layers


def _head_layers(checkpoint: Checkpoint, family: Family) -> tuple[int, ...]:
    """Numbers of the layers that are heads: past the last decoder layer, or carrying a marker.

    One of them must carry a marker: a layer too many alone is no head.
    """
    depth = checkpoint.config.get(family.head.first_layer)
    layers = layers_by_number(checkpoint, family)
    marked = {number for number, names in layers.items() if not names.isdisjoint(family.head.markers)}
    past = {number for number in layers if isinstance(depth, int) and number >= depth}
    return tuple(sorted(marked | past)) if marked else ()


def _match(checkpoint: Checkpoint, family: Family, layers: tuple[int, ...]) -> HeadMatch:
    config = checkpoint.config
    prefix = family.head.layer_prefix.format(layer=layers[0])
    belonging = tuple(
        tensor
        for layer in layers
        for tensor in checkpoint.tensors.values()
        if tensor.name.startswith(family.head.layer_prefix.format(layer=layer))
    )
    first = {t.name[len(prefix) :]: t for t in belonging if t.name.startswith(prefix)}
    expected = list(_expected(family, config, first))
    matched = tuple(
        MatchedTensor(r, tuple(first[n] for n in ns)) for r, ns in expected if all(n in first for n in ns)
    )
    missing = tuple(prefix + n for r, ns in expected if not r.optional for n in ns if n not in first)
    known = {n for _, ns in expected for n in ns}
    unexpected = tuple(prefix + n for n in sorted(first) if n not in known and not is_packed(first[n]))
    declared = config.get(family.head.depth)
    findings = [
        *_depth_findings(family, config, layers),
        *_packed(prefix, first.values()),
        *_listed(
            "HEAD-TENSOR-MISSING", "the head lacks", missing, prefix, f"split from {family.target.source}"
        ),
        *_listed(
            "HEAD-TENSOR-UNEXPECTED",
            f"the {family.name} record does not know",
            unexpected,
            prefix,
            "a tensor that is not understood cannot be carried over; compare with the original repository",
        ),
        *(f for m in matched for f in _shape_findings(m, family, config)),
    ]
    return HeadMatch(
        checkpoint=checkpoint,
        family=family,
        layers=layers,
        prefix=prefix,
        layers_declared=declared if isinstance(declared, int) else None,
        tensors=belonging,
        matched=matched,
        missing=missing,
        unexpected=unexpected,
        findings=tuple(findings),
    )


def _expected(
    family: Family, config: ConfigView, present: Iterable[str]
) -> Iterable[tuple[TensorRule, tuple[str, ...]]]:
    """Every rule that applies to this head, with the names it wants below the prefix."""
    rules = [rule for rule in family.rules if wanted(rule, family, config)]
    names = {id(rule): source_names(rule, family, config) for rule in rules}
    present = set(present)
    for rule in chosen(rules, lambda rule: any(name in present for name in names[id(rule)])):
        if not rule.optional or names[id(rule)][0] in present:
            yield rule, names[id(rule)]


def wanted(rule: TensorRule, family: Family, config: ConfigView) -> bool:
    """Whether the config leaves room for the tensor: no factor of its shape is zero."""
    return rule.shape is None or 0 not in family.resolve(rule.shape, config)


def source_names(rule: TensorRule, family: Family, config: ConfigView) -> tuple[str, ...]:
    """The names a rule stands for, below the prefix: one, or one an expert."""
    if rule.repeat is None:
        return (rule.source,)
    return tuple(rule.source.format(expert=e) for e in range(family.count(rule.repeat, config)))


def chosen(rules: list[TensorRule], is_present: Callable[[TensorRule], bool]) -> list[TensorRule]:
    """The rules without the alternatives that the tensors did not take.

    For each question the first alternative with a tensor present wins; when none has one, the first
    alternative stays, so that its tensors are reported missing.
    """
    taken: dict[str, str] = {}
    for rule in [r for r in rules if r.choice and is_present(r)] + [r for r in rules if r.choice]:
        question, alternative = str(rule.choice).split(":")
        taken.setdefault(question, alternative)
    return [r for r in rules if r.choice is None or r.choice.split(":")[1] == taken[r.choice.split(":")[0]]]


def _shape_findings(matched: MatchedTensor, family: Family, config: ConfigView) -> Iterable[Finding]:
    if matched.rule.shape is None:
        return
    expected = family.resolve(matched.rule.shape, config)
    for tensor in matched.sources:
        if tensor.shape != expected and not is_packed(tensor):
            yield Finding(
                "HEAD-TENSOR-SHAPE",
                "error",
                f"{tensor.name} in {tensor.file} has shape {list(tensor.shape)}; config.json asks for "
                f"{list(expected)} ({' x '.join(matched.rule.shape)})",
                where=tensor.name,
                expected=list(expected),
                found=list(tensor.shape),
                hint="config.json and the tensors do not belong together",
            )


def _depth_findings(family: Family, config: ConfigView, layers: tuple[int, ...]) -> Iterable[Finding]:
    declared, first = config.get(family.head.depth), config.get(family.head.first_layer)
    if declared is None or declared == 0:
        yield Finding(
            "HEAD-UNDECLARED",
            "note",
            f"the tensors hold {len(layers)} head layer(s); config.json declares none under {family.head.depth}",
            where=config.where(family.head.depth),
            expected=len(layers),
            found=declared,
            hint="the tensors decide; runtimes that read only the config will not use the head",
        )
    elif declared != len(layers):
        yield Finding(
            "HEAD-DEPTH",
            "warning",
            f"config.json declares {declared} head layer(s) under {family.head.depth}; the tensors hold {len(layers)}",
            where=config.where(family.head.depth),
            expected=declared,
            found=len(layers),
            hint="the tensors decide",
        )
    if layers[0] != first:
        yield Finding(
            "HEAD-LAYER-NUMBER",
            "error",
            f"the head's first layer is number {layers[0]}, but config.json says that {first} decoder layers come "
            f"before it",
            where=config.where(family.head.first_layer),
            expected=first,
            found=layers[0],
            hint="config.json and the tensors do not belong together",
        )


_PACKED_SUFFIXES = (".scales", ".biases", ".weight_scale_inv", ".weight_scale", ".weight_scale_2", ".scale",
                    ".weight_packed", ".qweight", ".qzeros")  # fmt: skip


def is_packed(tensor: TensorInfo) -> bool:
    """Whether the tensor's elements are not plain numbers, or scale such elements."""
    return tensor.name.endswith(_PACKED_SUFFIXES) or tensor.dtype not in PLAIN_DTYPES


def _packed(prefix: str, tensors: Iterable[TensorInfo]) -> Iterable[Finding]:
    """Quantized tensors in the head: a packed word must never be read as a number."""
    packed = [tensor for tensor in tensors if is_packed(tensor)]
    if packed:
        names = sorted(tensor.name for tensor in packed)
        dtypes = sorted({tensor.dtype for tensor in packed})
        yield Finding(
            "HEAD-PACKED",
            "error",
            f"{len(packed)} tensors of the head are quantized or packed ({', '.join(dtypes)}): {some(names)}",
            where=prefix,
            expected="BF16, F16 or F32 tensors",
            found=dtypes,
            hint="use the raw, unquantized checkpoint",
        )


def _listed(rule: str, what: str, names: tuple[str, ...], prefix: str, hint: str) -> Iterable[Finding]:
    if names:
        yield Finding(rule, "error", f"{what} {some(names)}", where=prefix, found=len(names), hint=hint)
