"""The numbers a checkpoint's config.json gives under several names: one place that knows the names.

A value that is absent, or that differs from layer to layer (a list), is None: the caller then says "unknown".
A value that cannot be right (a string, a negative number) is refused with its JSON pointer, and so is one that
no model has: nothing may count through it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from draftpair.checkpoint import ConfigView
from draftpair.checkpoint.wording import printable
from draftpair.errors import Refused
from draftpair.families.specs import MOST

LAYERS = ("num_hidden_layers", "n_layers", "num_layers", "n_layer")
HIDDEN = ("hidden_size", "d_model", "dim", "model_dim", "n_embd")
HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "multi_query_group_num")
HEAD_DIM = ("head_dim", "head_size")
INTERMEDIATE = ("intermediate_size", "ffn_dim", "ffn_hidden_size")
VOCABULARY = ("vocab_size", "n_vocab")

LARGEST = 1 << 31


class Unlikely(Refused):
    """A size beyond every model; who only estimates may take it for unknown."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of a language model in elements; None where the config does not say."""

    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    intermediate: int | None
    vocabulary: int | None


def number(config: ConfigView, *keys: str, minimum: int = 1, maximum: int = LARGEST) -> int | None:
    """The first of ``keys`` the config has, as an integer of at least ``minimum``.

    None when no key is there or when the value is a list or an object (one value a layer).
    Raises Unlikely on one above ``maximum``, Refused on any other value.
    """
    for key in keys:
        value = config.get(key)
        if value is None:
            continue
        if isinstance(value, (list, dict)):
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise Refused(f"{_stated(config, key, value)}, expected an integer of at least {minimum}", _HINT)
        if value > maximum:
            raise Unlikely(f"{_stated(config, key, value)}; no model has more than {maximum:,}", _HINT)
        return value
    return None


_HINT = "correct the value, or take config.json from the original repository again"


def _stated(config: ConfigView, key: str, value: Any) -> str:
    return f"config.json: {config.where(key)} is {printable(repr(value), 60)}"


def geometry(config: ConfigView) -> Geometry:
    """Layers, widths and heads, with the defaults model code uses for absent keys.

    ``kv_heads`` falls back to 1 with ``multi_query: true``, else to ``heads``; ``head_dim`` to hidden over
    heads; ``intermediate`` to four times hidden.
    """
    hidden = number(config, *HIDDEN)
    heads = number(config, *HEADS)
    # GLM-5.3-Flash states 0: its attention has other sizes, for keys and values apart.
    head_dim = number(config, *HEAD_DIM, minimum=0)
    if not head_dim and hidden and heads:
        head_dim = hidden // heads
    return Geometry(
        layers=number(config, *LAYERS, maximum=MOST),
        hidden=hidden,
        heads=heads,
        kv_heads=_kv_heads(config, heads),
        head_dim=head_dim,
        intermediate=number(config, *INTERMEDIATE) or (4 * hidden if hidden else None),
        vocabulary=number(config, *VOCABULARY),
    )


def _kv_heads(config: ConfigView, heads: int | None) -> int | None:
    if any(isinstance(config.get(key), list) for key in KV_HEADS):
        return None
    if any(config.get(key) is not None for key in KV_HEADS):
        return number(config, *KV_HEADS)
    return 1 if config.get("multi_query") is True else heads
