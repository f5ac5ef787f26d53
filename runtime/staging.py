"""Gives mlx-lm exactly the checkpoint that was opened and checked, and nothing that lies beside it.

mlx-lm reads every ``model*.safetensors`` of a folder, whatever the index says, and the last one read wins. So it is
shown a temporary folder of links to the files that count, with a config.json of known content: no ``model_file``, which
older releases would run as code, and the rotary keys in the one form that it reads.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from draftpair.checkpoint import Checkpoint
from draftpair.errors import Refused, ToolError


@contextmanager
def loadable_folder(checkpoint: Checkpoint, overrides: Mapping[str, Any]) -> Iterator[Path]:
    """A folder for ``mlx_lm.utils.load_model``, for as long as the block runs; its tensors stay readable after.

    ``overrides`` replace keys of the config. Refused when a tensor is in two files that are both needed.
    """
    config = {**checkpoint.config.raw, **checkpoint.config.text, **overrides}
    config.pop("model_file", None)
    config.pop("text_config", None)
    with ExitStack() as stack:
        try:
            name = stack.enter_context(tempfile.TemporaryDirectory(prefix="draftpair-"))
        except OSError as error:
            raise ToolError(
                f"no temporary folder can be made: {error}", hint="set TMPDIR to a folder that can be written"
            ) from error
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for number, file in enumerate(needed_files(checkpoint)):
            os.symlink(os.path.abspath(checkpoint.root / file), folder / f"model-{number:05d}.safetensors")
        yield folder


def needed_files(checkpoint: Checkpoint) -> list[str]:
    """The weight files that hold the checkpoint's tensors, sorted: those the index names, if it names any."""
    indexed = [name for name, file in checkpoint.files.items() if file.indexed]
    candidates = set(indexed or checkpoint.files)
    needed = sorted({t.file for t in checkpoint.tensors.values()} & candidates)
    for file in needed:
        for tensor in checkpoint.files[file].header.tensors:
            chosen = checkpoint.tensors[tensor].file
            if chosen != file and chosen in needed:
                raise Refused(
                    f"{checkpoint.source}: {tensor} is in {chosen} and in {file}, and other tensors of both are needed",
                    hint="keep one copy: a loader would take whichever file it reads last",
                )
    return needed
