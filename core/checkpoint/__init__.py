"""Reads and writes checkpoints, in folders and on the Hub; knows nothing of drafters."""

from draftpair.checkpoint.checkpoint import Checkpoint, WeightFile
from draftpair.checkpoint.config import ConfigView
from draftpair.checkpoint.dtypes import (
    FLOAT_DTYPES,
    ITEM_BITS,
    PLAIN_DTYPES,
    from_float32,
    nbytes,
    nonfinite_count,
    to_float32,
)
from draftpair.checkpoint.header import Header, HeaderError, TensorInfo, parse_header, read_header
from draftpair.checkpoint.index import Index
from draftpair.checkpoint.opening import open_checkpoint
from draftpair.checkpoint.rope import Rope

__all__ = [
    "FLOAT_DTYPES",
    "ITEM_BITS",
    "PLAIN_DTYPES",
    "Checkpoint",
    "ConfigView",
    "Header",
    "HeaderError",
    "Index",
    "Rope",
    "TensorInfo",
    "WeightFile",
    "from_float32",
    "nbytes",
    "nonfinite_count",
    "open_checkpoint",
    "parse_header",
    "read_header",
    "to_float32",
]
