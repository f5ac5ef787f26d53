"""The drafter's config.json: the target's text config, and what the drafter's own loaders look for.

What a record cannot say in a table is a function here, which the record names under `config_edits`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftpair.convert.block_size import BlockSize
from draftpair.errors import Refused, ToolError
from draftpair.families.heads import HeadMatch

_QUANTIZATION_KEYS = ("quantization", "quantization_config", "compression_config")

Edit = Callable[[dict[str, Any], HeadMatch], None]
"""Changes a drafter's config.json in place."""


def drafter_config(match: HeadMatch, block_size: BlockSize) -> dict[str, Any]:
    """The config.json of the drafter cut from `match`, without its quantization.

    Its depth is the number of layers that the tensors have, whatever the source's config.json says.
    """
    spec, source = match.family.drafter, match.config
    text = {key: value for key, value in source.text.items() if key not in _QUANTIZATION_KEYS}
    theta = source.rope.theta
    if text.get("rope_theta") is None and theta is not None:
        # Engines that know only the flat key would take their own default without a word.
        text["rope_theta"] = theta
    text |= {key: value for key, value in spec.text_defaults.items() if text.get(key) is None}
    if spec.depth:
        text[spec.depth] = match.layers_found
    config: dict[str, Any] = {
        "model_type": spec.model_type,
        spec.block_size.key: block_size.value,
        "tie_word_embeddings": _tied(match),
        "text_config": text,
    }
    for name in spec.config_edits:
        if name not in EDITS:
            raise ToolError(f"family record {match.family.name}: there is no config edit called {name!r}")
        EDITS[name](config, match)
    return config


def _tied(match: HeadMatch) -> bool:
    """Whether the head that the drafter borrows is the target's embedding; one that it owns never is.

    Where config.json does not say, a target that has an output head is not tied, even when the head's file is absent.
    """
    if "head" not in match.family.drafter.borrows or "head" in {m.rule.role for m in match.matched}:
        return False
    checkpoint = match.checkpoint
    stated = checkpoint.config.get("tie_word_embeddings")
    listed = checkpoint.index.weight_map if checkpoint.index else {}
    return (
        bool(stated) if stated is not None else not any(map(_is_output_head, {*checkpoint.tensors, *listed}))
    )


def _is_output_head(name: str) -> bool:
    return name.endswith(("lm_head.weight", ".unembed.weight")) or name == "head.weight"


def rope_parameters(config: dict[str, Any], match: HeadMatch) -> None:
    """States the rotary settings as one object as well, for loaders that read them nowhere else."""
    text, rope = config["text_config"], match.checkpoint.config.rope
    if not isinstance(text.get("rope_parameters"), dict) and rope.theta is not None:
        text["rope_parameters"] = {"rope_type": "default", **(rope.scaling or {}), "rope_theta": rope.theta}


def without_dspark(config: dict[str, Any], match: HeadMatch) -> None:
    """Drops the keys of DSpark stages: mlx-vlm would take them for what the folder holds."""
    text = config["text_config"]
    for key in [key for key in text if key.startswith("dspark_")]:
        del text[key]


def qwen_text_config(config: dict[str, Any], match: HeadMatch) -> None:
    """States in text_config what Qwen loaders read only there: the tie, and all rotary settings in one object.

    A flat config, as Qwen3-Next has, says nothing of sections: a text model rotates by one position in all of them.
    """
    text, source = config["text_config"], match.checkpoint.config
    if text.get("tie_word_embeddings") is None:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    theta, partial, width = source.rope.theta, source.rope.partial, source.get("head_dim")
    if theta is None or partial is None or type(width) is not int:
        return
    stated = text.get("rope_parameters")
    scaling = source.rope.scaling or {"rope_type": "default"}
    text["rope_parameters"] = {
        "mrope_section": [int(width * partial) // 2, 0, 0],
        **({} if isinstance(stated, dict) and "type" in stated else scaling),
        **(stated if isinstance(stated, dict) else {}),
        "rope_theta": theta,
        "partial_rotary_factor": partial,
    }


# What the layers within a window have of their own, and what the others have.
_INKLING_SIZES = (
    ("swa_num_attention_heads", "num_attention_heads"),
    ("swa_num_key_value_heads", "num_key_value_heads"),
    ("swa_head_dim", "head_dim"),
    ("sliding_window_size", "rel_extent"),
)


def inkling_layers(config: dict[str, Any], match: HeadMatch) -> None:
    """States how many of Inkling's layers there are and which attend within a window, by their shapes.

    Where a layer of either kind has the same shapes, config.json decides. Loaders without the list take the one of
    the target's own layers. Raises Refused where shapes and config.json disagree.
    """
    source, family = match.checkpoint.config, match.family
    stated = source.get("mtp_config.local_layer_ids", source.get("mtp_local_layer_ids"))
    local = sorted({m.layer for m in match.matched if (m.rule.choice or "").endswith(", local")})
    if all(family.number(ours, source) == family.number(theirs, source) for ours, theirs in _INKLING_SIZES):
        local = stated if stated is not None else []
    elif stated is not None and stated != local:
        raise Refused(
            f"config.json says that head layers {stated} attend within a window (mtp_config.local_layer_ids); by their "
            f"shapes these are layers {local}",
            hint="config.json and the tensors do not belong together",
        )
    config["text_config"]["mtp_local_layer_ids"] = local
    config |= {"num_mtp_layers": match.layers_found, "mtp_local_layer_ids": local}


EDITS: dict[str, Edit] = {
    f.__name__: f for f in (rope_parameters, without_dspark, qwen_text_config, inkling_layers)
}
