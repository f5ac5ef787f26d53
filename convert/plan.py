"""Decides everything about a split before anything is touched: every tensor, file, byte count and refusal.

`plan_split` reads headers, config and the names in the output folder, never a tensor's values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from draftpair.checkpoint import Checkpoint, TensorInfo
from draftpair.checkpoint.manifest import MANIFEST
from draftpair.checkpoint.writer import Output
from draftpair.convert.block_size import BlockSize, choose_block_size
from draftpair.convert.companions import Companion, find_companions
from draftpair.convert.destination import CONFIG, INDEX, WEIGHTS, check_destination, replaced_note
from draftpair.convert.quantize import MODE, Quantization
from draftpair.convert.refusals import partial_source, require_head
from draftpair.convert.request import DTYPES, Request, check_request, unused_options
from draftpair.convert.snapshot import Snapshot, snapshot
from draftpair.convert.transforms import TRANSFORMS, Place
from draftpair.errors import Refused, ToolError
from draftpair.families.heads import HeadMatch, MatchedTensor
from draftpair.families.record import Family
from draftpair.findings import Finding

_QUANTIZATION_KEYS = ("quantization", "quantization_config")


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the drafter, before quantization: what it is called, and what it is made of.

    `transform` is one of the record's, `part` which of its outputs this is; `transforms` says in
    words what changes the bytes, nothing when they pass through. A `quantized` tensor becomes three.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sources: tuple[TensorInfo, ...]
    transform: str
    part: int
    transforms: tuple[str, ...]
    quantized: bool

    @property
    def place(self) -> Place:
        """What its transform needs to know about it."""
        return Place(self.part, self.shape)

    @property
    def dense(self) -> Output:
        """The tensor as it would be written unquantized."""
        return Output(self.name, self.dtype, self.shape)

    def outputs(self, quantization: Quantization | None) -> tuple[Output, ...]:
        """The tensors written for it: itself, or packed words, scales and biases."""
        return quantization.outputs(self.dense) if quantization and self.quantized else (self.dense,)


@dataclass(frozen=True)
class SplitPlan:
    """Everything that will be written. `sources` is the state of the source files that were looked at."""

    checkpoint: Checkpoint
    match: HeadMatch
    request: Request
    quantization: Quantization | None
    block_size: BlockSize
    tensors: tuple[PlannedTensor, ...]
    dropped: tuple[TensorInfo, ...]
    kept_full_precision: tuple[tuple[str, str], ...]
    companions: tuple[Companion, ...]
    sources: Snapshot
    findings: tuple[Finding, ...]

    @property
    def family(self) -> Family:
        """The record of the drafter's family."""
        return self.match.family

    @cached_property
    def outputs(self) -> tuple[tuple[Output, PlannedTensor], ...]:
        """Every tensor of the weight file with the planned tensor it comes from, sorted by name."""
        pairs = [(output, tensor) for tensor in self.tensors for output in tensor.outputs(self.quantization)]
        return tuple(sorted(pairs, key=lambda pair: pair[0].name))

    @property
    def total_size(self) -> int:
        """Bytes of all tensors that will be written."""
        return sum(output.nbytes for output, _ in self.outputs)

    @property
    def total_parameters(self) -> int:
        """Parameters of the drafter: packed weights count as the values they stand for."""
        return sum(prod(tensor.shape) for tensor in self.tensors)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data that will be read from the source."""
        return sum(source.nbytes for source in {s for tensor in self.tensors for s in tensor.sources})

    @property
    def files(self) -> list[str]:
        """Names of the files that will be written, sorted."""
        return sorted(_written(self.companions))

    def config(self) -> dict[str, Any]:
        """The drafter's config.json."""
        text = {k: v for k, v in self.checkpoint.config.text.items() if k not in _QUANTIZATION_KEYS}
        theta = self.checkpoint.config.rope.theta
        if text.get("rope_theta") is None and theta is not None:
            # Engines that know only the flat key would take their own default without a word.
            text["rope_theta"] = theta
        config: dict[str, Any] = {
            "model_type": self.family.drafter.model_type,
            self.family.drafter.block_size.key: self.block_size.value,
            "tie_word_embeddings": False,
            "text_config": text,
        }
        if self.quantization:
            config |= {key: self.quantization.as_config() for key in _QUANTIZATION_KEYS}
        return config


def plan_split(checkpoint: Checkpoint, match: HeadMatch | None, request: Request) -> SplitPlan:
    """The plan of a split of `match`, the head found in `checkpoint`.

    Raises Usage for an option or an output folder that cannot be used, Refused for a source that cannot
    be split (`match` None included), ToolError for one of a family that is not supported.
    """
    quantization = check_request(request)
    present = check_destination(checkpoint, request.output, request.force)
    match = require_head(checkpoint, match)
    block_size = choose_block_size(match.family, checkpoint.config, request.block_size)
    sources = snapshot(checkpoint, {source.file for source in match.tensors})
    companions, companion_findings = find_companions(checkpoint)
    tensors, kept = _tensors(match, request, quantization)
    return SplitPlan(
        checkpoint=checkpoint,
        match=match,
        request=request,
        quantization=quantization,
        block_size=block_size,
        tensors=tensors,
        dropped=tuple(s for m in match.matched if m.rule.transform == "drop" for s in m.sources),
        kept_full_precision=kept,
        companions=tuple(companions),
        sources=sources,
        findings=(
            *unused_options(request),
            *partial_source(checkpoint),
            *match.findings,
            *companion_findings,
            *replaced_note(present, _written(companions), request.force),
        ),
    )


def _written(companions: Sequence[Companion]) -> list[str]:
    return [WEIGHTS, INDEX, CONFIG, MANIFEST, *(companion.name for companion in companions)]


def _tensors(
    match: HeadMatch, request: Request, quantization: Quantization | None
) -> tuple[tuple[PlannedTensor, ...], tuple[tuple[str, str], ...]]:
    """The planned tensors sorted by name, and (name, reason) of those a quantization leaves dense."""
    planned: list[PlannedTensor] = []
    kept: list[tuple[str, str]] = []
    for matched in match.matched:
        for tensor in _outputs_of(matched, match, request):
            reason = quantization and (matched.rule.full_precision or quantization.obstacle(tensor.dense))
            if quantization and reason is None:
                tensor = _quantized(tensor, quantization)
            elif reason:
                kept.append((tensor.name, reason))
            planned.append(tensor)
    if quantization and len(kept) == len(planned):
        raise Refused(
            f"--q-bits {quantization.bits} would quantize nothing: no weight has rows that are a multiple of "
            f"the group size {quantization.group_size}",
            hint="choose a smaller group size, or leave --q-bits out",
        )
    return tuple(sorted(planned, key=lambda tensor: tensor.name)), tuple(sorted(kept))


def _quantized(tensor: PlannedTensor, quantization: Quantization) -> PlannedTensor:
    step = f"quantize {MODE} {quantization.bits}/{quantization.group_size}"
    return PlannedTensor(**{**vars(tensor), "quantized": True, "transforms": (*tensor.transforms, step)})


def _outputs_of(matched: MatchedTensor, match: HeadMatch, request: Request) -> Iterator[PlannedTensor]:
    rule, sources = matched.rule, matched.sources
    if rule.transform not in TRANSFORMS:
        raise ToolError(f"family record {match.family.name}: there is no transform called {rule.transform!r}")
    dtypes = sorted({source.dtype for source in sources})
    wanted = rule.dtype or DTYPES[request.dtype]
    if wanted is None and len(dtypes) > 1:
        raise Refused(
            f"{sources[0].name} and the tensors stacked with it differ in dtype: {', '.join(dtypes)}",
            hint="choose one with --dtype bfloat16 or --dtype float32",
        )
    dtype = wanted or dtypes[0]
    casts = tuple(f"cast {found} to {dtype}" for found in dtypes if found != dtype)
    steps = () if rule.transform == "copy" else (rule.transform,)
    for part, (name, shape) in enumerate(zip(rule.outputs, rule.output_shapes, strict=True)):
        resolved = match.family.resolve(shape, match.checkpoint.config)
        yield PlannedTensor(
            name, dtype, resolved, sources, rule.transform, part, (*steps, *casts), quantized=False
        )
