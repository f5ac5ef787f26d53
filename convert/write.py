"""Carries out a plan: streams the tensors, reads them back, and puts the folder in place.

Promises: nothing appears at the output before every tensor was written, read back from the file and found
equal, and the source was found unchanged.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from draftpair.checkpoint.fingerprint import fingerprint
from draftpair.checkpoint.folder import staged_folder
from draftpair.checkpoint.manifest import MANIFEST
from draftpair.convert.card import CARD, model_card
from draftpair.convert.companions import copy_companion
from draftpair.convert.destination import CONFIG, INDEX, WEIGHTS, check_destination, is_superseded
from draftpair.convert.manifest import index, manifest, to_json
from draftpair.convert.parallel import Meter, Progress
from draftpair.convert.plan import SplitPlan
from draftpair.convert.quantize import Quantizer
from draftpair.convert.snapshot import refuse_changes
from draftpair.convert.stream import Quantizers, read_back, write_weights
from draftpair.errors import ToolError


@dataclass(frozen=True)
class SplitResult:
    """A split that is in place; `hashes` are the SHA-256 of each tensor's data."""

    plan: SplitPlan
    hashes: dict[str, str]


def carry_out(plan: SplitPlan, progress: Progress | None = None) -> SplitResult:
    """Writes the drafter folder of `plan`.

    Raises Refused when a source value is not finite or the source changes, ToolError when a file cannot
    be read or written or MLX is needed and absent; the output is then as it was.
    """
    quantizers = {q: Quantizer(q) for q in {t.quantization for t in plan.tensors} if q}
    output, force = plan.request.output, plan.request.force
    check_destination(plan.checkpoint, output, force)
    superseded = is_superseded if force else _nothing
    with disk_errors(), staged_folder(output, replace=True, superseded=superseded) as folder:
        needed = plan.total_size + sum(companion.nbytes for companion in plan.companions)
        require_space(folder, output, needed)
        weights = folder / WEIGHTS
        hashes = write_weights(plan, weights, quantizers, Meter("write", plan.dense_size, progress))
        _write_others(plan, folder, hashes, quantizers)
        refuse_changes(plan.checkpoint, plan.sources)
        read_back(
            [output for output, _ in plan.outputs],
            weights,
            hashes,
            Meter("verify", plan.total_size, progress),
        )
    return SplitResult(plan, hashes)


def _nothing(name: str) -> bool:
    return False


def _write_others(plan: SplitPlan, folder: Path, hashes: dict[str, str], quantizers: Quantizers) -> None:
    written = {CONFIG: to_json(plan.config()), INDEX: to_json(index(plan))}
    files = {name: hashlib.sha256(data).hexdigest() for name, data in written.items()}
    files |= {companion.name: copy_companion(companion, folder) for companion in plan.companions}
    source = fingerprint(plan.checkpoint, plan.match.place.prefixes)
    version = next((q.version for q in quantizers.values() if q.version), None)
    document = manifest(plan, source, hashes, files, version)
    written[MANIFEST] = to_json(document)
    # Not in the manifest: a card may be edited, and a drafter stays what it is.
    if plan.inherited is not None:
        written[CARD] = model_card(document, plan.family, plan.inherited, plan.family.engines)
    for name, data in written.items():
        with open(folder / name, "xb") as file:
            file.write(data)


def require_space(folder: Path, output: Path, needed: int) -> None:
    """Raises ToolError when the disk of `folder`, which becomes `output`, has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ToolError(f"{needed:,} bytes are needed; the disk of {output} has {free:,} free")


@contextmanager
def disk_errors() -> Iterator[None]:
    """File-system errors as errors of the tool, naming the file."""
    try:
        yield
    except OSError as error:
        raise ToolError(f"{error.filename or 'a file'}: {error.strerror or error}") from error
