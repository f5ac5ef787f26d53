"""MLX's affine quantization, applied to a tensor a few rows at a time.

Groups never cross a row, so the pieces together are bit for bit what `mx.quantize` makes of the whole
tensor. MLX is imported when the first row is quantized and not before; its CPU backend is used
everywhere, so that the bytes do not depend on the machine having a GPU.
"""

from __future__ import annotations

import importlib
import sys
import threading
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from draftpair.checkpoint.writer import Output
from draftpair.errors import ToolError, Usage

MODE = "affine"
BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
DEFAULT_GROUP_SIZE = 64
WORD_BITS = 32

# Storage type for numpy, and the MLX type, of what can be quantized.
_TYPES = {"BF16": (np.uint16, "bfloat16"), "F16": (np.uint16, "float16"), "F32": (np.uint32, "float32")}


@dataclass(frozen=True)
class Quantization:
    """Affine quantization: w is about scale * code + bias, one scale and one bias a group of a row.

    Raises Usage for a bit width or group size that MLX cannot make or that readers of the folder refuse.
    """

    bits: int
    group_size: int

    def __post_init__(self) -> None:
        for option, value, accepted in (
            ("--q-bits", self.bits, BITS),
            ("--q-group-size", self.group_size, GROUP_SIZES),
        ):
            if value not in accepted:
                raise Usage(f"{option} ({value}) must be one of {', '.join(map(str, accepted))}")

    def as_config(self) -> dict[str, Any]:
        """The object that config.json has under `quantization`."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": MODE}

    def outputs(self, tensor: Output) -> tuple[Output, Output, Output]:
        """What a dense tensor `X.weight` becomes: packed words, `X.scales` and `X.biases`."""
        *outer, columns = tensor.shape
        stem = tensor.name.removesuffix("weight")
        groups = (*outer, columns // self.group_size)
        return (
            Output(tensor.name, "U32", (*outer, columns * self.bits // WORD_BITS)),
            Output(f"{stem}scales", tensor.dtype, groups),
            Output(f"{stem}biases", tensor.dtype, groups),
        )

    def obstacle(self, tensor: Output) -> str | None:
        """Why the tensor must stay dense, None when it can be quantized."""
        if not tensor.name.endswith(".weight"):
            return "not a weight"
        if len(tensor.shape) < 2:
            return "a vector: too small to matter, and norms need full precision"
        if tensor.dtype not in _TYPES:
            return f"{tensor.dtype} cannot be quantized"
        if not prod(tensor.shape):
            return "empty"
        if tensor.shape[-1] % self.group_size:
            return f"its rows of {tensor.shape[-1]} are not a multiple of the group size {self.group_size}"
        return None


class Quantizer:
    """Quantizes rows; may be shared by threads. Raises ToolError when MLX is not installed."""

    def __init__(self, quantization: Quantization) -> None:
        self.quantization = quantization
        self._mx = load_mlx()
        self._streams = threading.local()

    @property
    def version(self) -> str:
        """The version of MLX at work."""
        return str(self._mx.__version__)

    def rows(self, data: bytes, dtype: str, columns: int) -> tuple[bytes, bytes, bytes]:
        """Packed words, scales and biases, as bytes, of whole rows of `columns` values of `dtype`."""
        mx = self._mx
        storage, name = _TYPES[dtype]
        unsigned = getattr(mx, np.dtype(storage).name)
        stored = np.frombuffer(data, storage).reshape(-1, columns)
        with mx.stream(self._stream()):
            values = mx.array(stored).view(getattr(mx, name))
            words, scales, biases = mx.quantize(
                values, group_size=self.quantization.group_size, bits=self.quantization.bits
            )
            # numpy has no bfloat16: scales and biases leave MLX as the integers they are stored as.
            scales, biases = scales.view(unsigned), biases.view(unsigned)
            mx.eval(words, scales, biases)
        return np.array(words).tobytes(), np.array(scales).tobytes(), np.array(biases).tobytes()

    def _stream(self) -> Any:
        """This thread's own CPU stream: threads that share one would take turns."""
        if not hasattr(self._streams, "stream"):
            self._streams.stream = self._mx.new_stream(self._mx.cpu)
        return self._streams.stream


def load_mlx() -> Any:
    """The module `mlx.core`. Raises ToolError, with the command that installs it, when it is absent."""
    try:
        return importlib.import_module("mlx.core")
    except ImportError as error:
        package = "draftpair" if sys.platform == "darwin" else '"draftpair[cpu]"'
        raise ToolError(
            f"--q-bits needs MLX, and it cannot be imported: {error}",
            hint=f"pip install {package}, or leave --q-bits out: an unquantized split needs no MLX",
        ) from error
