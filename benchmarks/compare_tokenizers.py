"""Time to read and compare two tokenizers of real size: ``python benchmarks/compare_tokenizers.py``."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from draftpair.checkpoint import Checkpoint, open_checkpoint
from draftpair.validate.tokenizer import compare
from draftpair.validate.tokenizer_files import read_tokenizer

SIZES = (154_880, 248_320)


def synthetic(folder: Path, size: int, swapped: int) -> Checkpoint:
    """A BPE tokenizer of ``size`` ids with as many merges; ids ``swapped`` and the next change places."""
    pieces = [f"p{number:x}q" for number in range(size)]
    pieces[swapped : swapped + 2] = reversed(pieces[swapped : swapped + 2])
    merges = [["p", f"{number:x}q"] for number in range(size)]
    model = {"type": "BPE", "vocab": {piece: number for number, piece in enumerate(pieces)}, "merges": merges}
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text(json.dumps({"model": model}))
    return open_checkpoint(folder)


def main() -> None:
    """Print one line a size: seconds for reading both and for comparing them."""
    for size in SIZES:
        with tempfile.TemporaryDirectory() as root:
            sides = [
                synthetic(Path(root, name), size, at) for name, at in (("target", 0), ("drafter", size // 2))
            ]
            begin = time.perf_counter()
            target, drafter = (read_tokenizer(checkpoint) for checkpoint in sides)
            read = time.perf_counter()
            result = compare(target, drafter)
            end = time.perf_counter()
        print(f"{size:,} ids: reading {read - begin:.3f} s, comparing {end - read:.3f} s, {result.relation}")


if __name__ == "__main__":
    main()
