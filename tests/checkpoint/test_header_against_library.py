"""Files written by the safetensors library read the same through our parser, and through `safe_open`."""

from __future__ import annotations

import numpy as np
import pytest
import safetensors
from safetensors.numpy import save_file

from draftpair.checkpoint import ITEM_BITS, HeaderError, read_header
from fixtures.safetensors_files import layout, pack, write_weights


def opened(path) -> dict:
    with safetensors.safe_open(path, "numpy") as file:
        slices = {name: file.get_slice(name) for name in list(file.keys())}
        return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}


def ours(path) -> dict:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in read_header(path).tensors.items()}


def test_a_file_that_the_library_wrote(tmp_path):
    rng = np.random.default_rng(3)
    arrays = {
        "half": rng.random((3, 5)).astype("f2"),
        "scalar": np.array(7, "i8"),
        "none": np.zeros((0, 4), "f4"),
        "mask": np.array([True, False]),
        "words": rng.integers(0, 2**32, (2, 2, 2), dtype="u4"),
    }
    path = tmp_path / "w.safetensors"
    save_file(arrays, path, metadata={"format": "np"})
    header = read_header(path)
    data = path.read_bytes()
    assert header.metadata == {"format": "np"}
    assert ours(path) == opened(path)
    for name, array in arrays.items():
        tensor = header.tensors[name]
        assert data[tensor.begin : tensor.end] == array.tobytes()


@pytest.mark.parametrize("dtype", sorted(ITEM_BITS))
def test_every_dtype(tmp_path, dtype):
    path = tmp_path / "w.safetensors"
    write_weights(path, {"a": (dtype, (2, 4)), "b": (dtype, (0,))})
    assert ours(path) == opened(path) == {"a": (dtype, (2, 4)), "b": (dtype, (0,))}


def test_the_library_knows_no_other_dtype(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(pack({"a": {**layout({"a": ("U8", (0,))})["a"], "dtype": "?"}}))
    with pytest.raises(safetensors.SafetensorError) as caught:
        safetensors.safe_open(path, "numpy").__enter__()
    assert all(f"`{dtype}`" in str(caught.value) for dtype in ITEM_BITS)
    assert str(caught.value).count("`") == 2 * (len(ITEM_BITS) + 1)


@pytest.mark.parametrize("kept", [0, 7, 8, 40, -1])
def test_a_truncated_file_is_refused_by_both(tmp_path, kept):
    path = tmp_path / "w.safetensors"
    write_weights(path, {"a": ("F32", (4,))})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(HeaderError):
        read_header(path)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(path, "numpy").__enter__()
