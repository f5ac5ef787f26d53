"""Drafter folders as mlx-vlm sees them: does it load them, and do they draft what its own split of the source drafts?

One harness for every family that mlx-vlm runs. It imports nothing of draftpair, so that it also runs by itself,
in an environment that holds mlx-vlm 0.7.10 and little else:

    python tests/engines/mlx_vlm_drafters.py load DRAFTER             strictly loaded, run, logits finite
    python tests/engines/mlx_vlm_drafters.py compare SOURCE DRAFTER   against mlx-vlm's own split of SOURCE
    python tests/engines/mlx_vlm_drafters.py dequantized DRAFTER      quantized weights against their plain values

Each prints one JSON object and exits 1 when the folder does not hold; `--tolerance` (default 0: the same bits)
is the largest difference of two logits that `compare` lets pass.

From Python: `load(folder)` gives the model, `logits(model)` an array [steps, vocabulary], `split(source, folder)`
mlx-vlm's own drafter folder, `dense(folder)` the model with its quantized weights expanded, `compare(source, drafter)`
and `difference(a, b)` documents. A family whose drafters read anything but one hidden vector a token, or whose
target needs a name of its own, gets a line in `HIDDEN` or an attribute in `stand_in`; nothing else is specific.

Every model computes in float32, whatever its folder holds: MLX's CPU backend multiplies experts in no other type,
and the bytes alone are what two folders can differ in.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_vlm.speculative.drafters import load_drafter
from mlx_vlm.speculative.drafters.mtp_split import get_mtp_splitter
from mlx_vlm.utils import get_model_and_args

# Shape of the target's state for one token, by the drafter's model_type; one vector where nothing is said.
HIDDEN: dict[str, Callable[[Any], tuple[int, ...]]] = {
    "qwen4_exp_mtp": lambda text: (text.hc_count * text.hidden_size,),
    "deepseek_v4_mtp": lambda text: (text.hc_mult, text.hidden_size),
}

PROMPTS = (1, 2, 7, 20)
DRAFTED = 4


class NotLoaded(Exception):
    """mlx-vlm does not load the folder whole; says what it says."""


def load(folder: Path) -> Any:
    """The drafter of a folder, every parameter from its files, computing in float32.

    Raises NotLoaded when a tensor is missing, unknown or of another shape, and where mlx-vlm would go on
    without a module after a mere warning.
    """
    mx.set_default_device(mx.cpu)
    with _warnings() as heard:
        try:
            model, kind = load_drafter(str(folder))
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise NotLoaded(f"{type(error).__name__}: {error}") from error
    if dropped := [message for message in heard if "no weights for module" in message]:
        raise NotLoaded(dropped[0])
    if kind != "mtp":
        raise NotLoaded(f"taken for a {kind} drafter")
    model.set_dtype(mx.float32)
    return model


def dense(folder: Path) -> Any:
    """The same drafter with every quantized weight expanded by MLX, as config.json says it is packed."""
    config = _config(folder)
    # Scales in float32, so that what they scale is not rounded to their own dtype.
    tensors = {
        name: value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value
        for name, value in dict(mx.load(str(folder / "model.safetensors"))).items()
    }
    settings = config.pop("quantization", None) or {}
    config.pop("quantization_config", None)
    for name in [name for name in tensors if name.endswith(".scales")]:
        module = name.removesuffix(".scales")
        how = settings[module] if isinstance(settings.get(module), dict) else settings
        weight, scales = tensors[f"{module}.weight"], tensors.pop(name)
        tensors[f"{module}.weight"] = mx.dequantize(
            weight,
            scales,
            tensors.pop(f"{module}.biases", None),
            group_size=how["group_size"],
            bits=how["bits"],
            mode=how.get("mode", "affine"),
        )
    package, _ = get_model_and_args(config)
    model = package.Model(package.ModelConfig.from_dict(config))
    model.load_weights(list(tensors.items()), strict=True)
    model.set_dtype(mx.float32)
    return model


def split(source: Path, folder: Path, **options: Any) -> Path:
    """mlx-vlm's own split of a source checkpoint; `options` are its `q_bits`, `q_group_size` and `q_mode`."""
    mx.set_default_device(mx.cpu)
    splitter = get_mtp_splitter(source_config=_config(source))
    if splitter is None:
        raise NotLoaded(f"mlx-vlm splits no {_config(source).get('model_type')} checkpoint")
    return Path(splitter.split(str(source), str(folder), **options))


def stand_in(model: Any) -> Any:
    """What a drafter borrows of its target: an embedding and an output matrix, random but the same for all."""
    text = model.config.text_config
    embedding = nn.Embedding(text.vocab_size, text.hidden_size)
    embedding.weight = _random("embedding", (text.vocab_size, text.hidden_size))
    head = nn.Linear(text.hidden_size, text.vocab_size, bias=False)
    head.weight = _random("head", (text.vocab_size, text.hidden_size)) / text.hidden_size**0.5
    inner = SimpleNamespace(embed_tokens=embedding)
    backbone = SimpleNamespace(embeddings=embedding)
    return SimpleNamespace(model=inner, backbone=backbone, lm_head=head, args=text, config=text)


def logits(model: Any) -> np.ndarray:
    """Every row of logits that the drafter hands to its sampler, [steps, vocabulary] in float32.

    Prompts of several lengths are read in, then tokens are drafted one after the other; ids and hidden states
    are the same for every model, and so are the tokens that are taken, whatever the logits say.
    """
    text = model.config.text_config
    shape = HIDDEN.get(model.config.model_type, lambda text: (text.hidden_size,))(text)
    # Whether the target fits is not asked: the stand-in is no model.
    model.validate_target_compatibility = lambda target: None
    rows: list[np.ndarray] = []

    def sampler(row: mx.array) -> mx.array:
        rows.append(np.array(row.astype(mx.float32)).reshape(-1, row.shape[-1])[-1])
        return mx.array([[(7 * len(rows) + 1) % text.vocab_size]])

    for length in PROMPTS:
        model.reset(stand_in(model))
        ids = np.random.RandomState(length).randint(0, text.vocab_size, (1, length))
        hidden = _random(f"hidden {length}", (1, length, *shape))
        bonus = mx.array([3 % text.vocab_size])
        model.prefill_from_target_hidden(mx.array(ids), hidden, bonus, sampler)
        model.draft_block(bonus, hidden[:, -1:], None, DRAFTED, sampler)
    return np.stack(rows)


def weights(model: Any) -> dict[str, mx.array]:
    """Every parameter by name."""
    return dict(tree_flatten(model.parameters()))


def difference(expected: Any, found: Any) -> dict[str, Any]:
    """How two drafters differ: in the names and values of their parameters, and in what they draft."""
    left, right = weights(expected), weights(found)
    both = sorted(left.keys() & right.keys())
    changed = {name: _distance(left[name], right[name]) for name in both}
    ours, theirs = logits(found), logits(expected)
    return {
        "only_expected": sorted(left.keys() - right.keys()),
        "only_found": sorted(right.keys() - left.keys()),
        "parameters_differing": {name: value for name, value in changed.items() if value},
        "steps": len(ours),
        "finite": bool(np.isfinite(ours).all()),
        "largest_logit": float(np.abs(theirs).max()),
        "largest_difference": float(np.abs(ours - theirs).max()),
    }


def compare(source: Path, drafter: Path) -> dict[str, Any]:
    """`difference` of mlx-vlm's own split of `source` and the folder `drafter`."""
    with tempfile.TemporaryDirectory() as folder:
        return difference(load(split(source, Path(folder) / "drafter")), load(drafter))


def _distance(left: mx.array, right: mx.array) -> float:
    """The largest difference of two arrays, infinity when their shapes differ."""
    if left.shape != right.shape:
        return float("inf")
    return float(mx.abs(left.astype(mx.float32) - right.astype(mx.float32)).max().item())


def _random(name: str, shape: tuple[int, ...]) -> mx.array:
    seed = [ord(letter) for letter in name]
    return mx.array(np.random.RandomState(seed).uniform(-1, 1, shape).astype(np.float32))


def _config(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    return document


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """The warnings that the root logger is given meanwhile."""
    heard: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        yield heard
    finally:
        logging.getLogger().removeHandler(handler)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name, folders in (("load", 1), ("compare", 2), ("dequantized", 1)):
        command = commands.add_parser(name)
        command.add_argument("folders", nargs=folders, type=Path)
        command.add_argument("--tolerance", type=float, default=0.0)
    options = parser.parse_args(arguments)
    try:
        if options.command == "load":
            rows = logits(load(options.folders[0]))
            document = {
                "steps": len(rows),
                "finite": bool(np.isfinite(rows).all()),
                "largest_difference": 0.0,
            }
        elif options.command == "dequantized":
            document = difference(dense(options.folders[0]), load(options.folders[0]))
        else:
            document = compare(*options.folders)
    except NotLoaded as error:
        document = {"error": str(error)}
    print(json.dumps(document, indent=2))
    same = document.get("finite") and document["largest_difference"] <= options.tolerance
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
