"""Decides everything about a split before anything is touched: every tensor, file, byte count and refusal.

`plan_split` reads headers, config and the names in the output folder, and of the tensors' values norms whose convention
no file states, and samples of copies that are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from draftpair.checkpoint import Checkpoint, TensorInfo
from draftpair.checkpoint.card import CARD
from draftpair.checkpoint.manifest import MANIFEST
from draftpair.checkpoint.stored import Stored
from draftpair.checkpoint.writer import Output
from draftpair.convert.block_size import BlockSize, choose_block_size
from draftpair.convert.card import Fields, inherited_fields
from draftpair.convert.companions import Companion, find_companions, is_companion
from draftpair.convert.copies import left_out_copies
from draftpair.convert.destination import CONFIG, INDEX, WEIGHTS, check_destination, replaced_note
from draftpair.convert.drafter_config import drafter_config
from draftpair.convert.norms import added_to_norms
from draftpair.convert.quantize import Quantization
from draftpair.convert.refusals import experimental, partial_source, require_head
from draftpair.convert.request import DTYPES, Request, check_request
from draftpair.convert.scheme import Scheme
from draftpair.convert.snapshot import Snapshot, snapshot
from draftpair.convert.transforms import KEEPS_ROWS, TRANSFORMS, Place
from draftpair.errors import Refused, ToolError, Usage
from draftpair.families.heads import HeadMatch, MatchedTensor
from draftpair.families.record import SplitFamily
from draftpair.families.rules import apply_rules
from draftpair.findings import Finding

DECODED = "BF16"
"""What a packed tensor is written as when nothing else is asked for."""


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the drafter, before quantization: what it is called, and what it is made of.

    `transform` is one of the record's, `part` which of its outputs this is; `added` is what every value gets, 0 mostly;
    `transforms` says in words what changes the bytes, nothing when they pass through; `full_precision` is why it is
    never to be quantized. One with a `quantization` becomes packed words and scales; `packed` is how the words of a
    head that is packed already are to be read.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sources: tuple[Stored, ...]
    transform: str
    part: int
    transforms: tuple[str, ...]
    added: int = 0
    full_precision: str | None = None
    quantization: Quantization | None = None
    packed: Quantization | None = None

    @property
    def place(self) -> Place:
        """What its transform needs to know about it."""
        return Place(self.part, self.shape)

    @property
    def module(self) -> str:
        """The module it belongs to, as config.json names it."""
        return self.name.rpartition(".")[0]

    @property
    def dense(self) -> Output:
        """The tensor as it would be written unquantized."""
        return Output(self.name, self.dtype, self.shape)

    @property
    def outputs(self) -> tuple[Output, ...]:
        """The tensors written for it: itself, or packed words, scales and perhaps biases."""
        return self.quantization.outputs(self.dense) if self.quantization else (self.dense,)

    @property
    def tensors(self) -> tuple[TensorInfo, ...]:
        """The tensors of the source it is made of, scales included."""
        return tuple(tensor for stored in self.sources for tensor in stored.tensors)

    @property
    def parameters(self) -> int:
        """How many values it stands for."""
        if self.packed is None:
            return prod(self.shape)
        return prod(self.shape) * 32 // self.packed.bits if self.dtype == "U32" else 0


@dataclass(frozen=True)
class SplitPlan:
    """Everything that will be written.

    `dense_config` is the drafter's config.json but for its quantization, `sources` the state of the source files that
    were looked at, `files` the names of those that will be written, sorted; `inherited` what the drafter's card takes
    over from the source's, None when no card is written.
    """

    checkpoint: Checkpoint
    match: HeadMatch
    request: Request
    scheme: Scheme
    block_size: BlockSize
    dense_config: Mapping[str, Any]
    tensors: tuple[PlannedTensor, ...]
    dropped: tuple[TensorInfo, ...]
    kept_full_precision: tuple[tuple[str, str], ...]
    companions: tuple[Companion, ...]
    inherited: Fields | None
    sources: Snapshot
    files: tuple[str, ...]
    findings: tuple[Finding, ...]

    @property
    def family(self) -> SplitFamily:
        """The record of the drafter's family."""
        return self.match.family

    @cached_property
    def outputs(self) -> tuple[tuple[Output, PlannedTensor], ...]:
        """Every tensor of the weight file with the planned tensor it comes from, sorted by name."""
        pairs = [(output, tensor) for tensor in self.tensors for output in tensor.outputs]
        return tuple(sorted(pairs, key=lambda pair: pair[0].name))

    @property
    def total_size(self) -> int:
        """Bytes of all tensors that will be written."""
        return sum(output.nbytes for output, _ in self.outputs)

    @property
    def dense_size(self) -> int:
        """Bytes of all tensors before any is quantized: how much there is to do."""
        return sum(tensor.dense.nbytes for tensor in self.tensors)

    @property
    def total_parameters(self) -> int:
        """Parameters of the drafter: packed weights count as the values they stand for."""
        return sum(tensor.parameters for tensor in self.tensors)

    @property
    def bytes_read(self) -> int:
        """Bytes of tensor data that will be read from the source."""
        return sum(source.nbytes for source in {s for tensor in self.tensors for s in tensor.tensors})

    @cached_property
    def quantization(self) -> dict[str, Any] | None:
        """How the drafter's packed weights are to be read, as config.json says it; None when nothing is packed."""
        packed = {t.module: t.quantization or t.packed for t in self.tensors}
        found = {module: settings for module, settings in packed.items() if settings}
        if not found:
            return None
        usual = self.scheme.base or Counter(found.values()).most_common(1)[0][0]
        return Scheme(usual, ()).as_config(found)

    def config(self) -> dict[str, Any]:
        """The drafter's config.json."""
        config = dict(self.dense_config)
        if self.quantization:
            config |= {"quantization": self.quantization, "quantization_config": self.quantization}
        return config


def plan_split(checkpoint: Checkpoint, match: HeadMatch | None, request: Request) -> SplitPlan:
    """The plan of a split of `match`, the head found in `checkpoint`.

    Raises Usage for an option or an output folder that cannot be used, Refused for a source that cannot
    be split (`match` None included), ToolError for one of a family that is not supported.
    """
    scheme = check_request(request)
    present = check_destination(checkpoint, request.output, request.force)
    match = require_head(checkpoint, match)
    block_size = choose_block_size(match.family, match.layers_found, request.block_size)
    # The whole source counts: its fingerprint, its config and its card go into what is written.
    sources = snapshot(checkpoint, {*checkpoint.files, *filter(_is_read, checkpoint.storage.names())})
    companions, companion_findings = find_companions(checkpoint)
    inherited, card_findings = _card(checkpoint, CARD in present and not request.force)
    written = [WEIGHTS, INDEX, CONFIG, MANIFEST, *(companion.name for companion in companions)]
    written += [CARD] if inherited is not None else []
    added, norm_findings = added_to_norms(match, request.norms)
    copy_findings = left_out_copies(match)
    dense_config = drafter_config(match, block_size)
    config_findings = _refuse_unsafe_config(match, dense_config)
    planned = tuple(sorted(_planned(match, request, added), key=lambda tensor: tensor.name))
    tensors, kept = _quantized(planned, scheme)
    return SplitPlan(
        checkpoint=checkpoint,
        match=match,
        request=request,
        scheme=scheme,
        block_size=block_size,
        dense_config=dense_config,
        tensors=tensors,
        dropped=tuple(
            t for m in match.matched if m.rule.transform == "drop" for s in m.sources for t in s.tensors
        ),
        kept_full_precision=kept,
        companions=tuple(companions),
        inherited=inherited,
        sources=sources,
        files=tuple(sorted(written)),
        findings=(
            *experimental(match.family),
            *partial_source(checkpoint),
            *match.findings,
            *config_findings,
            *norm_findings,
            *copy_findings,
            *companion_findings,
            *card_findings,
            *replaced_note(present, written, request.force),
        ),
    )


def _refuse_unsafe_config(match: HeadMatch, config: Mapping[str, Any]) -> list[Finding]:
    """What the family's rules find in the drafter's config.json. Raises Refused for what `validate` calls an error."""
    findings = apply_rules(config, match.family.name, "config", CONFIG)
    if errors := [finding for finding in findings if finding.level == "error"]:
        raise Refused(
            "the drafter's config.json would be unsafe: "
            + "; ".join(f"{f.where}: {f.message}" for f in errors),
            hint="compare the source's config.json with that of the original repository",
        )
    return findings


def _card(checkpoint: Checkpoint, kept: bool) -> tuple[Fields | None, list[Finding]]:
    """What the drafter's card takes over from the source's; None when the output's own README.md stays."""
    if not kept:
        return inherited_fields(checkpoint)
    message = f"the output folder's own {CARD} stays, so no card of the drafter is written"
    return None, [Finding("SPLIT-CARD-KEPT", "note", message, CARD, hint="--force replaces it")]


def _is_read(name: str) -> bool:
    return name in (CONFIG, INDEX, CARD) or is_companion(name)


def _planned(match: HeadMatch, request: Request, added: Mapping[str, int]) -> Iterator[PlannedTensor]:
    for matched in match.matched:
        if matched.rule.transform not in TRANSFORMS:
            raise ToolError(
                f"family record {match.family.name}: there is no transform called {matched.rule.transform!r}"
            )
        packed = any(source.encoding == "mlx" for source in matched.sources)
        yield from (_components if packed else _dense)(matched, match, request, added)


def _dense(
    matched: MatchedTensor, match: HeadMatch, request: Request, added: Mapping[str, int]
) -> Iterator[PlannedTensor]:
    rule, sources = matched.rule, matched.sources
    natural = sorted({source.dtype if source.encoding == "plain" else DECODED for source in sources})
    wanted = rule.dtype or DTYPES[request.dtype]
    if wanted is None and len(natural) > 1:
        raise Refused(
            f"{sources[0].name} and the tensors stacked with it differ in dtype: {', '.join(natural)}",
            hint="choose one with --dtype bfloat16 or --dtype float32",
        )
    dtype = wanted or natural[0]
    plus = added.get(sources[0].name, 0) if sources else 0
    decoded = sorted({source.detail for source in sources if source.encoding != "plain"})
    casts = sorted({source.dtype for source in sources if source.encoding == "plain"} - {dtype})
    steps = (
        *(f"decode {how} to {dtype}" for how in decoded),
        *(() if rule.transform == "copy" else (rule.transform,)),
        *((f"add {plus}",) if plus else ()),
        *(f"cast {found} to {dtype}" for found in casts),
    )
    for part, (name, shape) in enumerate(_outputs(matched, match)):
        yield PlannedTensor(
            name, dtype, shape, sources, rule.transform, part, steps, plus, rule.full_precision
        )


def _components(
    matched: MatchedTensor, match: HeadMatch, request: Request, added: Mapping[str, int]
) -> Iterator[PlannedTensor]:
    """MLX-packed sources: words, scales and biases pass through byte for byte, each as a tensor of its own."""
    rule, sources = matched.rule, matched.sources
    packings = {source.packing for source in sources}
    (packing, *others) = packings
    if rule.transform not in KEEPS_ROWS or others or packing is None:
        raise Refused(
            f"{sources[0].name} is {sources[0].detail}; {rule.transform} would have to unpack and round it again, or "
            f"its parts are packed in different ways",
            hint="split from the raw, unquantized checkpoint, and quantize with --q-bits",
        )
    steps = () if rule.transform == "copy" else (rule.transform,)
    for part, (name, shape) in enumerate(_outputs(matched, match)):
        stem = name.removesuffix("weight") if name.endswith(".weight") else f"{name}."
        for place, tensors in enumerate(zip(*(source.tensors for source in sources), strict=True)):
            parts = tuple(as_stored(t) for t in tensors)
            yield PlannedTensor(
                stem + ("weight" if place == 0 else tensors[0].name.rpartition(".")[2]),
                parts[0].dtype,
                (*shape[:-1], parts[0].columns),
                parts,
                rule.transform,
                part,
                steps,
                packed=Quantization(packing.bits, packing.block[1], packing.codes),
            )


def as_stored(tensor: TensorInfo) -> Stored:
    """A tensor of the files as it is, whatever it is packed in."""
    return Stored(tensor.name, tensor.shape, "plain", (tensor,), tensor.dtype, tensor.dtype, None, ())


def _outputs(matched: MatchedTensor, match: HeadMatch) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in matched.rule.outputs:
        resolved = match.family.resolve(shape or (), match.config)
        yield name.format(layer=matched.layer), resolved


def _quantized(
    planned: Sequence[PlannedTensor], scheme: Scheme
) -> tuple[tuple[PlannedTensor, ...], tuple[tuple[str, str], ...]]:
    """The planned tensors with their quantization, and (name, reason) of those it leaves as they are."""
    _refuse_unmatched(planned, scheme)
    if not scheme and not scheme.overrides:
        return tuple(planned), ()
    if packed := [tensor for tensor in planned if tensor.packed]:
        raise Refused(
            f"the head is quantized already: {packed[0].name} and {len(packed) - 1} more tensors are "
            f"{packed[0].packed}; quantizing again would round what is rounded already",
            hint="leave the quantization options out to keep it as it is, or split from the raw checkpoint",
        )
    chosen = [(tensor, *_choice(tensor, scheme)) for tensor in planned]
    if not any(quantization for _, quantization, _ in chosen):
        reasons = Counter(reason for _, _, reason in chosen).most_common(1)[0][0]
        raise Refused(
            f"nothing would be quantized: of {len(chosen)} tensors none can be, most because: {reasons}",
            hint="choose a smaller group size or leave fewer modules out, or leave the quantization options out",
        )
    tensors = tuple(_with(tensor, quantization) for tensor, quantization, _ in chosen)
    return tensors, tuple(
        (tensor.name, reason) for tensor, quantization, reason in chosen if not quantization
    )


def _choice(tensor: PlannedTensor, scheme: Scheme) -> tuple[Quantization | None, str]:
    """The quantization of a tensor, or None and why."""
    if tensor.full_precision:
        return None, tensor.full_precision
    quantization = scheme.of(tensor.module)
    if quantization is None:
        return None, "not asked for"
    reason = quantization.obstacle(tensor.dense)
    return (None, reason) if reason else (quantization, "")


def _with(tensor: PlannedTensor, quantization: Quantization | None) -> PlannedTensor:
    if quantization is None:
        return tensor
    step = f"quantize {quantization}"
    return replace(tensor, quantization=quantization, transforms=(*tensor.transforms, step))


def _refuse_unmatched(planned: Sequence[PlannedTensor], scheme: Scheme) -> None:
    modules = sorted({tensor.module for tensor in planned if tensor.name.endswith(".weight")})
    if unmatched := scheme.unmatched(modules):
        raise Usage(
            f"--q-override {unmatched[0]} matches no module of the drafter",
            hint=f"its modules are, for example: {', '.join(modules[:8])}",
        )
