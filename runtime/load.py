"""From checkpoints to a loaded pair: adapters are found by name, the compute dtype is decided here."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_map_with_path
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import load_tokenizer

from draftpair.checkpoint import Checkpoint
from draftpair.errors import Refused, ToolError, Usage
from draftpair.runtime import drafters, targets
from draftpair.runtime.interfaces import ModelDrafter, Target
from draftpair.runtime.libraries import reading
from draftpair.validate.pairing import ValidatedPair

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}

# Added to float32 scores to choose experts; rounded, it would choose others.
ALWAYS_FLOAT32 = ("e_score_correction_bias",)


@dataclass(frozen=True)
class Pair:
    """A validated pair, loaded. ``eos`` are the ids that end generation."""

    target: Target
    drafter: ModelDrafter
    tokenizer: Any
    eos: frozenset[int]


def load_pair(validated: ValidatedPair, dtype: str = "auto", environ: Mapping[str, str] = os.environ) -> Pair:
    """Load target, drafter and tokenizer of a pair that passed validation; the drafter has what it borrows."""
    target = load_target(validated.target, dtype, environ)
    if target.irreversible:
        raise Refused(
            f"{validated.target.source} cannot verify drafts: {target.irreversible}",
            hint="run it without a drafter",
        )
    drafter = load_drafter(validated.drafter, validated.family.name, target, dtype, environ)
    tokenizer = load_text_codec(validated.target)
    return Pair(target, drafter, tokenizer, eos_ids(validated.target, tokenizer))


def load_target(
    checkpoint: Checkpoint, dtype: str = "auto", environ: Mapping[str, str] = os.environ
) -> Target:
    """The target with its weights in memory. ``dtype``: auto, float32, bfloat16 or float16.

    A model type without an adapter of its own is loaded as whatever mlx-lm has for it.
    """
    name = (checkpoint.config.model_type or "").removesuffix("_text")
    adapter = _module(targets, name if name in _names(targets) else "_ordinary")
    target: Target = adapter.Target.load(checkpoint, environ)
    _settle(target.network, dtype, checkpoint.source)
    return target


def load_drafter(
    checkpoint: Checkpoint,
    family: str,
    target: Target,
    dtype: str = "auto",
    environ: Mapping[str, str] = os.environ,
) -> ModelDrafter:
    """The drafter with its weights in memory, bound to its target; ``family`` is the name of its family record."""
    if family not in _names(drafters):
        raise ToolError(
            f"drafters of family {family} cannot be run yet; draftpair runs {', '.join(_names(drafters))}"
        )
    drafter: ModelDrafter = _module(drafters, family).Drafter.load(checkpoint, environ)
    _settle(drafter.network, dtype, checkpoint.source)
    drafter.bind(target)
    return drafter


def load_text_codec(checkpoint: Checkpoint) -> Any:
    """mlx-lm's tokenizer of the checkpoint. Refused when there is none that loads."""
    stated_eos(checkpoint)  # mlx-lm reads the same file, and says less when it is malformed
    hint = "copy tokenizer.json and tokenizer_config.json from the original checkpoint"
    # transformers checks all of config.json on the way; tokenizers raises bare exceptions for what it cannot read.
    with reading(f"{checkpoint.source}: its tokenizer cannot be loaded", hint, also=Exception):
        return load_tokenizer(checkpoint.root)


def eos_ids(checkpoint: Checkpoint, tokenizer: Any) -> frozenset[int]:
    """The ids that end a text: those that the checkpoint states, else the tokenizer's."""
    stated = stated_eos(checkpoint)
    return frozenset(tokenizer.eos_token_ids) if stated is None else stated


def stated_eos(checkpoint: Checkpoint) -> frozenset[int] | None:
    """generation_config.json's ``eos_token_id``, else config.json's, else None.

    Refused, naming file and value, when it is neither an id nor a list of ids.
    """
    name = "generation_config.json"
    generation = checkpoint.read_json(name) if checkpoint.has_file(name) else {}
    if not isinstance(generation, dict):
        raise Refused(f"{checkpoint.source}: {name} is not a JSON object", hint=_EOS_HINT)
    stated = ((name, generation.get("eos_token_id")), ("config.json", checkpoint.config.get("eos_token_id")))
    file, found = next(((file, value) for file, value in stated if value is not None), (name, None))
    if found is None:
        return None
    ids = found if isinstance(found, list) else [found]
    if not all(type(number) is int and number >= 0 for number in ids):
        raise Refused(f"{checkpoint.source}: {file} gives {found!r} as eos_token_id", hint=_EOS_HINT)
    return frozenset(ids)


_EOS_HINT = "eos_token_id is a token id or a list of them: compare the file with the original repository's"


def on_cpu() -> bool:
    """Whether MLX computes on the CPU here."""
    return bool(mx.default_device() == mx.cpu)


def _names(package: ModuleType) -> list[str]:
    """The modules of a package that are one family's or one model type's; those with an underscore are shared."""
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return [name for name in names if not name.startswith("_")]


def _module(package: ModuleType, name: str) -> ModuleType:
    return importlib.import_module(f"{package.__name__}.{name}")


def _settle(network: nn.Module, dtype: str, source: str) -> None:
    """Cast the floating-point parameters if asked to, and bring all into memory."""
    wanted = _compute_dtype(network, dtype, source)
    if wanted is not None:
        cast_parameters(network, wanted)
    mx.eval(network.parameters())


def _compute_dtype(network: nn.Module, dtype: str, source: str) -> mx.Dtype | None:
    """The dtype to cast to, None for the checkpoint's own.

    On the CPU that is float32: MLX has no 16-bit ``gather_mm`` there, which experts that are not quantized
    need, and its 16-bit quantized products are about ten times slower.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise Usage(f"dtype is {dtype!r}; expected auto, {', '.join(DTYPES)}")
    if not on_cpu():
        return DTYPES.get(dtype)
    wanted = DTYPES.get(dtype, mx.float32)
    if wanted != mx.float32 and any(isinstance(module, SwitchLinear) for module in network.modules()):
        raise ToolError(
            f"{source}: its experts are not quantized, and MLX multiplies those on the CPU in float32 only, "
            f"not in {dtype}",
            hint="leave out --dtype, or quantize the model",
        )
    return wanted


def cast_parameters(network: nn.Module, dtype: mx.Dtype) -> None:
    """Cast floating-point parameters, quantization scales included; routing biases stay float32.

    So does what mlx-lm's model itself keeps from being cast, such as the decay rates of a gated delta net.
    """
    castable = getattr(network, "cast_predicate", lambda path: True)

    def cast(path: str, value: mx.array) -> mx.array:
        if not mx.issubdtype(value.dtype, mx.floating):
            return value
        stays = path.endswith(ALWAYS_FLOAT32) or not castable(path)
        return value.astype(mx.float32 if stays else dtype)

    network.update(tree_map_with_path(cast, network.parameters()))
