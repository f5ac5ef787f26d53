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

from draftpair.checkpoint.card import CARD
from draftpair.checkpoint.fingerprint import fingerprint
from draftpair.checkpoint.folder import final_path, staged_folder
from draftpair.checkpoint.hub.fetch import fetch_ranges
from draftpair.checkpoint.manifest import MANIFEST
from draftpair.convert.card import model_card
from draftpair.convert.companions import copy_companion
from draftpair.convert.destination import CONFIG, INDEX, WEIGHTS, check_destination, is_superseded
from draftpair.convert.manifest import index, manifest, to_json
from draftpair.convert.parallel import Meter, Progress
from draftpair.convert.plan import SplitPlan
from draftpair.convert.snapshot import refuse_changes
from draftpair.convert.stream import write_weights
from draftpair.errors import ToolError


@dataclass(frozen=True)
class SplitResult:
    """A split that is in place; `hashes` are the SHA-256 of each tensor's data."""

    plan: SplitPlan
    hashes: dict[str, str]


def carry_out(plan: SplitPlan, progress: Progress | None = None) -> SplitResult:
    """Writes the drafter folder of `plan`.

    Raises Refused when a source value is not finite or the source changes, ToolError when a file cannot
    be read or written; the output is then as it was.
    """
    output, force = plan.request.output, plan.request.force
    superseded = is_superseded if force else _nothing
    tensors = {tensor for planned in plan.tensors for tensor in planned.tensors}
    require_space(output, plan.total_size + sum(companion.nbytes for companion in plan.companions))
    with (
        disk_errors(output),
        fetch_ranges(plan.checkpoint, tensors, progress),
        staged_folder(output, replace=True, superseded=superseded) as folder,
    ):
        # From here on every change of the output is noticed: another run may have finished since the plan.
        check_destination(plan.checkpoint, output, force)
        weights = folder / WEIGHTS
        hashes = write_weights(plan, weights, Meter("write", plan.dense_size, progress))
        _write_others(plan, folder, hashes)
        refuse_changes(plan.checkpoint, plan.sources)
    return SplitResult(plan, hashes)


def _nothing(name: str) -> bool:
    return False


def _write_others(plan: SplitPlan, folder: Path, hashes: dict[str, str]) -> None:
    written = {CONFIG: to_json(plan.config()), INDEX: to_json(index(plan))}
    files = {name: hashlib.sha256(data).hexdigest() for name, data in written.items()}
    files |= {companion.name: copy_companion(companion, folder) for companion in plan.companions}
    source = fingerprint(plan.checkpoint, plan.match.place.prefixes)
    document = manifest(plan, source, hashes, files)
    written[MANIFEST] = to_json(document)
    # Not in the manifest: a card may be edited, and a drafter stays what it is.
    if plan.inherited is not None:
        written[CARD] = model_card(document, plan.family, plan.inherited, plan.family.engines)
    for name, data in written.items():
        with open(folder / name, "xb") as file:
            file.write(data)


def require_space(output: Path, needed: int) -> None:
    """Raises ToolError when the disk that `output` will lie on has less than `needed` bytes free."""
    with disk_errors(output):
        place = next(folder for folder in output.absolute().parents if folder.exists())
        free = shutil.disk_usage(place).free
    if free < needed:
        raise ToolError(
            f"{needed:,} bytes are needed; the disk of {output} has {free:,} free",
            hint="free some space, or choose another output folder",
        )


@contextmanager
def disk_errors(output: Path) -> Iterator[None]:
    """File-system errors as errors of the tool, naming the file, or `output` where the system names none."""
    try:
        yield
    except OSError as error:
        path = Path(str(error.filename2 or error.filename or output))
        raise ToolError(f"{final_path(path, output)}: {error.strerror or error}") from error
