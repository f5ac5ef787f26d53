"""Where a split may write: decided by looking only, before anything is touched.

The rules guard against two accidents that other tools allowed: writing over the source, and leaving old
weight files beside the new one, which loaders then merge (https://github.com/lablup/mlxcel/pull/1778).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.folder import destination_state
from draftpair.checkpoint.manifest import MANIFEST
from draftpair.convert.companions import NAMES
from draftpair.errors import Usage
from draftpair.findings import Finding

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"

_MARKERS = (WEIGHTS, INDEX, CONFIG)


def check_destination(checkpoint: Checkpoint, output: Path, force: bool) -> list[str]:
    """The names of the files in `output`, sorted; none when it does not exist.

    Raises Usage when the output is the source, holds it, or may not be replaced; ToolError when it cannot
    be listed.
    """
    refuse_source(checkpoint, output)
    marker = next((name for name in _MARKERS if os.path.lexists(output / name)), None)
    if marker and not force:
        raise _occupied(output, marker)
    state = destination_state(output)
    names = sorted(entry[0] for entry in state[2]) if state else []
    weights = [name for name in names if name.endswith(".safetensors") and name != WEIGHTS]
    if weights and not force:
        raise _occupied(output, weights[0])
    if weights:
        raise Usage(
            f"{output} holds the weight file {weights[0]}; loaders would merge it with the drafter's, and "
            f"draftpair deletes no weight files",
            hint="move that file away, or choose another output folder",
        )
    return names


def is_superseded(name: str) -> bool:
    """Whether `--force` removes a file of this name even when the split does not write one.

    The tokenizer files of an earlier checkpoint would be taken for the new drafter's.
    """
    return name in (*_MARKERS, MANIFEST, *NAMES)


def replaced_note(present: Sequence[str], written: Sequence[str], force: bool) -> list[Finding]:
    """A note that names the files of the output folder that the split overwrites or removes."""
    names = [name for name in present if name in written or (force and is_superseded(name))]
    if not names:
        return []
    message = f"files in the output folder give way to the drafter's: {', '.join(names)}"
    return [Finding("SPLIT-OUTPUT-REPLACED", "note", message, found=names)]


def refuse_source(checkpoint: Checkpoint, output: Path) -> None:
    """Raises Usage when `output` is the folder of a checkpoint that is read, or holds one of its files."""
    target = Path(os.path.realpath(output))
    folder = checkpoint.storage.folder
    if folder is not None and target == Path(os.path.realpath(folder)):
        raise Usage(
            f"{output} is the source itself: its config.json, weights and tokenizer would be overwritten",
            hint="choose another output folder",
        )
    for path in _real_sources(checkpoint):
        if target in path.parents:
            raise Usage(
                f"{output} holds the source ({path})",
                hint="choose an output folder outside of it, or below it",
            )


def _real_sources(checkpoint: Checkpoint) -> Iterable[Path]:
    """The folder and the weight files as far as they are on this machine, every link followed."""
    paths = (checkpoint.storage.folder, *map(checkpoint.storage.path, sorted(checkpoint.files)))
    return (Path(os.path.realpath(path)) for path in paths if path is not None)


def _occupied(output: Path, marker: str) -> Usage:
    return Usage(
        f"{output} already looks like a checkpoint: it holds {marker}",
        hint="choose another output folder, or give --force to replace it",
    )
