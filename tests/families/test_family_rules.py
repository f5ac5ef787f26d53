"""Every rule of every family on a drafter's config.json, one by one: what breaks it is told under its name.

The configs are those of sound drafters, under the keys that the family's rules are written for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from draftpair import api
from draftpair.checkpoint import ConfigView, open_checkpoint
from draftpair.families import family, load_families, load_splits
from draftpair.families.rules import apply_rules
from draftpair.families.views import canonical, of_layer, own_checks
from draftpair.schemas import load_schema
from fixtures import (
    deepseek_v3,
    deepseek_v4,
    gemma4_assistant,
    glm4_moe,
    glm4_moe_lite,
    glm5_next,
    glm_moe_dsa,
    hy_v4,
    inkling,
    laguna_dflash,
    muse_glimmer_assistant,
    nemotron_h,
    qwen3_5,
    qwen4_exp,
    tapped,
)

Config = dict[str, Any]
Changes = Mapping[str, Any]
GONE = object()
"""The value of a key that is not there."""

TARGETS: dict[str, Callable[[Path], Path]] = {
    "deepseek_v3_mtp": deepseek_v3.write_checkpoint,
    "deepseek_v4_mtp": deepseek_v4.write_checkpoint,
    "glm4_moe_lite_mtp": glm4_moe_lite.write_checkpoint,
    "glm4_moe_mtp": glm4_moe.write_checkpoint,
    "glm5_next_mtp": glm5_next.write_checkpoint,
    "glm_moe_dsa_mtp": glm_moe_dsa.write_checkpoint,
    "hy_v4_mtp": hy_v4.write_checkpoint,
    "inkling_mtp": inkling.write_checkpoint,
    "nemotron_h_mtp": nemotron_h.write_checkpoint,
    "qwen3_5_mtp": qwen3_5.write_checkpoint,
    "qwen4_exp_mtp": qwen4_exp.write_checkpoint,
}
PUBLISHED: dict[str, Config] = {
    "gemma4_assistant": gemma4_assistant.drafter_config(),
    "gemma4_unified_assistant": gemma4_assistant.drafter_config(family="gemma4_unified_assistant"),
    "laguna_dflash": laguna_dflash.drafter_config(),
    "muse_glimmer_assistant": muse_glimmer_assistant.drafter_config(),
    "full_model": {"vocab_size": 128},
    **{
        name: tapped.variants(name)[variant]["config"]
        for name, variant in {
            "dflash": "old_shape",
            "dflash2": "published",
            "deepspec_dspark": "qwen3",
            "eagle3": "speculators_qwen3",
            "lfm2_dspark": "published",
            "speculators_mtp": "qwen3",
            "xpress": "speculators",
        }.items()
    },
}
GEMMA = ("gemma4_assistant", "gemma4_unified_assistant")

# Every family's rules on config.json, without the CONFIG- that almost all begin with.
RULES_OF = {
    "deepseek_v3_mtp": (
        "TEXT-CONFIG TEXT-MODEL-TYPE DIMENSION ROPE-DIM NUMBER ROUTING ACTIVATION ROPE-SCALING "
        "EXPERTS-PER-TOKEN INDEXER BLOCK-SIZE QUANTIZATION TIED"
    ),
    "deepseek_v4_mtp": (
        "TEXT-CONFIG TEXT-MODEL-TYPE DIMENSION ROPE-DIM NUMBER ROUTING ACTIVATION ROPE-SCALING "
        "EXPERTS-PER-TOKEN DSPARK BLOCK-SIZE QUANTIZATION TIED"
    ),
    "deepspec_dspark": (
        "DIMENSION DRAFT-SIZES NUMBER ROPE-UNSTATED FLAG ACTIVATION LAYER-TYPES TAPS MASK-ID TARGET-LAYERS "
        "SPECULATIVE-TOKENS DRAFT-VOCABULARY BLOCK-SIZE RUNTIME-BLOCK-SIZE MARKOV-RANK MARKOV-HEAD "
        "MARKOV-HEAD-ENGINES GLOBAL-HEADS TIED CONFIDENCE-HEAD QUANTIZATION QUANTIZATION-MODULE"
    ),
    "dflash": (
        "DIMENSION DRAFT-SIZES NUMBER ROPE-UNSTATED FLAG ACTIVATION LAYER-TYPES SLIDING-WINDOW "
        "CAUSAL-UNSTATED TAPS MASK-ID TARGET-LAYERS SPECULATIVE-TOKENS BLOCK-SIZE RUNTIME-BLOCK-SIZE PROJECTOR "
        "SPECULATORS-TYPE QUANTIZATION QUANTIZATION-MODULE"
    ),
    "dflash2": (
        "DIMENSION DRAFT-SIZES NUMBER ROPE-UNSTATED FLAG ACTIVATION LAYER-TYPES SLIDING-WINDOW TAPS MASK-ID "
        "TARGET-LAYERS SPECULATIVE-TOKENS DRAFT-VOCABULARY BLOCK-SIZE RUNTIME-BLOCK-SIZE PROJECTOR "
        "SPECULATORS-TYPE CONVOLUTION SELECTOR CAUSAL QUANTIZATION QUANTIZATION-MODULE"
    ),
    "eagle3": (
        "DIMENSION DRAFT-SIZES NUMBER ROPE-UNSTATED FLAG ACTIVATION TAPS TARGET-LAYERS MASK-ID FUSION-NORMS "
        "SPECULATIVE-TOKENS DRAFT-VOCABULARY-ENGINES SPECULATORS-TYPE QUANTIZATION QUANTIZATION-MODULE"
    ),
    "full_model": "VOCABULARY",
    "gemma4_assistant": (
        "MODEL-TYPE TEXT-CONFIG TEXT-MODEL-TYPE BACKBONE DIMENSION LAYER-TYPES HEAD-DIM GLOBAL-HEADS ROPE "
        "NUMBER ACTIVATION BIAS PER-LAYER-INPUT PER-LAYER-VOCABULARY EXPERTS DOUBLE-WIDE CENTROIDS TIED "
        "BLOCK-SIZE QUANTIZATION-FOREIGN QUANTIZATION QUANTIZATION-MODULE"
    ),
    "gemma4_unified_assistant": (
        "MODEL-TYPE TEXT-CONFIG TEXT-MODEL-TYPE BACKBONE DIMENSION LAYER-TYPES HEAD-DIM GLOBAL-HEADS ROPE "
        "NUMBER ACTIVATION BIAS PER-LAYER-INPUT PER-LAYER-INPUT-UNSTATED EXPERTS DOUBLE-WIDE CENTROIDS TIED "
        "BLOCK-SIZE QUANTIZATION-FOREIGN QUANTIZATION QUANTIZATION-MODULE"
    ),
    "glm4_moe_lite_mtp": (
        "TEXT-CONFIG TEXT-MODEL-TYPE DIMENSION ROPE-DIM NUMBER ROUTING ACTIVATION ROPE-SCALING "
        "EXPERTS-PER-TOKEN BLOCK-SIZE QUANTIZATION TIED"
    ),
    "glm4_moe_mtp": (
        "TEXT-CONFIG TEXT-MODEL-TYPE DIMENSION NUMBER ROUTING ACTIVATION ROPE-SCALING EXPERTS-PER-TOKEN "
        "ATTENTION BLOCK-SIZE QUANTIZATION TIED"
    ),
    "glm5_next_mtp": (
        "TEXT-CONFIG TEXT-MODEL-TYPE DIMENSION NUMBER ROUTING ACTIVATION ROPE-SCALING EXPERTS-PER-TOKEN "
        "NO-ROPE BLOCK-SIZE QUANTIZATION TIED"
    ),
    "glm_moe_dsa_mtp": (
        "TEXT-CONFIG TEXT-MODEL-TYPE DIMENSION ROPE-DIM NUMBER ROUTING ACTIVATION ROPE-SCALING "
        "EXPERTS-PER-TOKEN ROPE-PARAMETERS ENGINE BLOCK-SIZE QUANTIZATION TIED"
    ),
    "hy_v4_mtp": (
        "TEXT-CONFIG TEXT-MODEL-TYPE DIMENSION HEAD-DEPTH ROPE-DIM NUMBER ROUTING ACTIVATION BIAS "
        "EXPERTS-PER-TOKEN BLOCK-SIZE QUANTIZATION"
    ),
    "inkling_mtp": (
        "TEXT-CONFIG TEXT-MODEL-TYPE DIMENSION HEAD-DEPTH LOCAL-LAYERS NUMBER CHAIN-NORM BLOCK-SIZE "
        "QUANTIZATION"
    ),
    "laguna_dflash": (
        "MODEL-TYPE ARCHITECTURE DFLASH DIMENSION HEAD-DIM LAYER-TYPES WINDOW GATING GATING-SPELLING "
        "EXPERTS ROPE ROPE-OBJECT TAPS MASK-TOKEN BLOCK-SIZE CAUSAL DRAFT-VOCABULARY AUX-LAYERS NUMBER "
        "ACTIVATION BIAS QUANTIZATION-FOREIGN QUANTIZATION QUANTIZATION-MODULE"
    ),
    "lfm2_dspark": (
        "DIMENSION DRAFT-SIZES NUMBER ROPE-UNSTATED FLAG ACTIVATION LAYER-TYPES SLIDING-WINDOW TAPS MASK-ID "
        "TARGET-LAYERS SPECULATIVE-TOKENS BLOCK-SIZE RUNTIME-BLOCK-SIZE PROJECTOR SPECULATORS-TYPE "
        "MARKOV-RANK MARKOV-HEAD MARKOV-HEAD-ENGINES ROPE-PAIRING QUANTIZATION QUANTIZATION-MODULE"
    ),
    "muse_glimmer_assistant": (
        "MODEL-TYPE DIMENSION LAYER-TYPES WINDOW TAPS MASK-TOKEN BLOCK-SIZE RUNTIME-BLOCK ROPE "
        "ROPE-UNSTATED NUMBER ACTIVATION BIAS QUANTIZATION-FOREIGN QUANTIZATION QUANTIZATION-MODULE"
    ),
    "nemotron_h_mtp": (
        "TEXT-CONFIG TEXT-MODEL-TYPE DIMENSION HEAD-DEPTH PATTERN NUMBER ROUTING ACTIVATION BIAS "
        "EXPERTS-PER-TOKEN BLOCK-SIZE QUANTIZATION"
    ),
    "qwen3_5_mtp": (
        "TEXT-CONFIG TEXT-MODEL-TYPE DIMENSION HEAD-DEPTH HEAD-LAYERS ROPE NUMBER ACTIVATION OUTPUT-GATE "
        "EXPERTS-PER-TOKEN EMBEDDINGS BLOCK-SIZE TIED QUANTIZATION QUANTIZATION-MODULE"
    ),
    "qwen4_exp_mtp": (
        "TEXT-CONFIG TEXT-MODEL-TYPE DIMENSION HEAD-DEPTH ROPE NUMBER ACTIVATION STREAMS INDEXER EMBEDDINGS "
        "BLOCK-SIZE TIED QUANTIZATION QUANTIZATION-MODULE"
    ),
    "speculators_mtp": (
        "DIMENSION NUMBER ROPE-UNSTATED FLAG ACTIVATION BACKBONE HEAD-DEPTH EXPERTS-PER-TOKEN "
        "SPECULATIVE-TOKENS SPECULATORS-TYPE QUANTIZATION QUANTIZATION-MODULE"
    ),
    "xpress": (
        "FAMILY-UNSUPPORTED DIMENSION DRAFT-SIZES NUMBER ROPE-UNSTATED FLAG ACTIVATION TAPS MASK-ID "
        "SPECULATIVE-TOKENS BLOCK-SIZE SPECULATORS-TYPE REFINER QUANTIZATION QUANTIZATION-MODULE"
    ),
}

# What breaks a rule. Keys are those of text_config where there is one, with a slash in front the root's.
BREAKS: dict[str, tuple[Changes, ...]] = {
    "CONFIG-TEXT-CONFIG": ({"/text_config": GONE}, {"/text_config": []}),
    "CONFIG-TEXT-MODEL-TYPE": ({"model_type": "other"}, {"model_type": GONE}),
    "CONFIG-DIMENSION": ({"hidden_size": 0}, {"num_attention_heads": GONE}, {"num_hidden_layers": 1.5}),
    "CONFIG-ROPE-DIM": ({"qk_rope_head_dim": 7},),
    "CONFIG-NUMBER": ({"rms_norm_eps": 0},),
    "CONFIG-ROUTING": ({"norm_topk_prob": "yes"}, {"topk_method": "greedy"}),
    "CONFIG-ACTIVATION": ({"hidden_act": "gelu"},),
    "CONFIG-ROPE-SCALING": ({"rope_scaling": {"factor": 2}}, {"rope_scaling": "yarn"}),
    "CONFIG-EXPERTS-PER-TOKEN": ({"num_experts_per_tok": 0},),
    "CONFIG-BLOCK-SIZE": ({"/block_size": 0}, {"/block_size": 99}),
    "CONFIG-QUANTIZATION": ({"/quantization": {"bits": 7, "group_size": 64}}, {"/quantization": 4}),
    "CONFIG-QUANTIZATION-MODULE": (
        {"/quantization": {"bits": 4, "group_size": 64, "fc": {"bits": 7, "group_size": 64}}},
    ),
    "CONFIG-QUANTIZATION-FOREIGN": ({"/quantization_config": {"quant_method": "fp8"}},),
    "CONFIG-TIED": ({"/tie_word_embeddings": "no"},),
    "CONFIG-DSPARK": ({"dspark_target_layer_ids": [1]},),
    "CONFIG-DRAFT-SIZES": ({"draft_vocab_size": "all"}, {"target_hidden_size": -1}),
    "CONFIG-ROPE-UNSTATED": ({"rope_theta": GONE, "rope_parameters": GONE},),
    "CONFIG-FLAG": ({"attention_bias": "no"},),
    "CONFIG-LAYER-TYPES": ({"layer_types": ["linear_attention"]},),
    "CONFIG-TAPS": ({"target_layer_ids": []}, {"target_layer_ids": GONE}, {"target_layer_ids": ["1"]}),
    "CONFIG-MASK-ID": ({"mask_token_id": GONE}, {"mask_token_id": -1}),
    "CONFIG-MASK-TOKEN": ({"mask_token_id": GONE}, {"mask_token_id": -1}),
    "CONFIG-TARGET-LAYERS": ({"num_target_layers": 0},),
    "CONFIG-RUNTIME-BLOCK-SIZE": ({"runtime_block_size": 1}, {"runtime_block_size": 33}),
    "CONFIG-RUNTIME-BLOCK": ({"runtime_block_size": 1}, {"runtime_block_size": 33}),
    "CONFIG-MARKOV-RANK": ({"markov_rank": -1}, {"markov_rank": GONE}),
    "CONFIG-MARKOV-HEAD": ({"markov_head_type": "other"},),
    "CONFIG-MARKOV-HEAD-ENGINES": ({"markov_head_type": "gated"},),
    "CONFIG-CONFIDENCE-HEAD": (
        {"enable_confidence_head": True, "markov_rank": 0, "confidence_head_with_markov": True},
    ),
    "CONFIG-SLIDING-WINDOW": (
        {"layer_types": ["sliding_attention"], "sliding_window": GONE, "is_causal": False},
    ),
    "CONFIG-CAUSAL-UNSTATED": ({"layer_types": ["sliding_attention"], "sliding_window": 8},),
    "CONFIG-PROJECTOR": ({"projector_type": "other"},),
    "CONFIG-SPECULATORS-TYPE": ({"speculators_model_type": "other"},),
    "CONFIG-CONVOLUTION": ({"conv_kernel_size": 0}, {"conv_group_size": GONE}),
    "CONFIG-SELECTOR": ({"selector_rank": 0}, {"selector_top_k": GONE}),
    "CONFIG-FUSION-NORMS": ({"norm_before_fc": 1, "fc_norm": 1},),
    "CONFIG-SPECULATIVE-TOKENS": ({"speculative_tokens": 0}, {"speculative_tokens": 32}),
    "CONFIG-DRAFT-VOCABULARY-ENGINES": ({"reduced": 1},),
    "CONFIG-DRAFT-VOCABULARY": ({"draft_vocab_size": 0}, {"draft_vocab_size": GONE}),
    "CONFIG-VOCABULARY": ({"/vocab_size": GONE}, {"/vocab_size": 0}),
    "CONFIG-MODEL-TYPE": ({"/model_type": "other"}, {"/model_type": GONE}),
    "CONFIG-BIAS": ({"attention_bias": True},),
    "CONFIG-PER-LAYER-INPUT": ({"hidden_size_per_layer_input": 8},),
    "CONFIG-PER-LAYER-INPUT-UNSTATED": ({"hidden_size_per_layer_input": GONE},),
    "CONFIG-PER-LAYER-VOCABULARY": ({"vocab_size_per_layer_input": 8},),
    "CONFIG-DOUBLE-WIDE": ({"use_double_wide_mlp": True},),
    "CONFIG-CENTROIDS": ({"/num_centroids": 0}, {"/use_ordered_embeddings": "no"}),
    "CONFIG-ATTENTION": ({"use_qk_norm": 1},),
    "CONFIG-NO-ROPE": ({"qk_rope_head_dim": 8}, {"mla_use_nope": False}),
    "CONFIG-ROPE-PARAMETERS": ({"rope_parameters": {}}, {"rope_parameters": {"rope_theta": 0}}),
    "CONFIG-ENGINE": ({"n_group": GONE}, {"scoring_func": GONE}),
    "CONFIG-HEAD-LAYERS": ({"mtp_num_hidden_layers": 2},),
    "CONFIG-LOCAL-LAYERS": ({"mtp_local_layer_ids": [8]}, {"mtp_local_layer_ids": GONE}),
    "CONFIG-CHAIN-NORM": ({"chain_hidden_post_norm": True},),
    "CONFIG-ARCHITECTURE": ({"/architectures": ["LagunaForCausalLM"]},),
    "CONFIG-DFLASH": ({"/dflash_config": {}}, {"/dflash_config": GONE}),
    "CONFIG-WINDOW": ({"sliding_window": 0}, {"sliding_window": GONE}),
    "CONFIG-GATING": ({"gating": "per-layer"}, {"gating": GONE}),
    "CONFIG-GATING-SPELLING": ({"gating": True},),
    "CONFIG-ROPE-OBJECT": ({"rope_parameters": {"rope_theta": 1e4}},),
    "CONFIG-AUX-LAYERS": ({"eagle_aux_hidden_state_layer_ids": GONE},),
    "CONFIG-ROPE-PAIRING": ({"rope_is_neox_style": GONE},),
    "CONFIG-PATTERN": ({"mtp_hybrid_override_pattern": "E*"},),
    "CONFIG-OUTPUT-GATE": ({"attn_output_gate": False},),
    "CONFIG-EMBEDDINGS": ({"mtp_use_dedicated_embeddings": True},),
    "CONFIG-STREAMS": ({"hc_count": 1},),
    "CONFIG-REFINER": ({"xpress_rank": 0}, {"xpress_mlp_ratio": GONE}),
}

# Where a family's rule is broken by something else.
OF_FAMILY: dict[tuple[str, str], tuple[Changes, ...]] = {
    ("nemotron_h_mtp", "CONFIG-NUMBER"): ({"layer_norm_epsilon": 0},),
    ("nemotron_h_mtp", "CONFIG-ACTIVATION"): ({"mlp_hidden_act": "silu"},),
    ("deepspec_dspark", "CONFIG-ACTIVATION"): (
        {"hidden_act": "relu"},
        {"backbone": "gemma4_text", "hidden_activation": "silu"},
    ),
    ("deepspec_dspark", "CONFIG-DRAFT-VOCABULARY"): ({"reduced": 1},),
    ("dflash2", "CONFIG-DRAFT-VOCABULARY"): ({"reduced": 1},),
    ("deepspec_dspark", "CONFIG-TIED"): ({"/tie_word_embeddings": True},),
    ("deepspec_dspark", "CONFIG-GLOBAL-HEADS"): (
        {"sandwich": 1},
        {"sandwich": 1, "global_head_dim": 32, "attention_k_eq_v": True},
    ),
    ("glm4_moe_lite_mtp", "CONFIG-TIED"): ({"/tie_word_embeddings": True},),
    ("qwen3_5_mtp", "CONFIG-EXPERTS-PER-TOKEN"): ({"num_experts": 4},),
    ("speculators_mtp", "CONFIG-EXPERTS-PER-TOKEN"): ({"num_experts": 4}, {"intermediate_size": GONE}),
    ("deepseek_v3_mtp", "CONFIG-INDEXER"): ({"model_type": "deepseek_v32"},),
    ("qwen4_exp_mtp", "CONFIG-INDEXER"): ({"indexer_kv_heads": 2},),
    ("eagle3", "CONFIG-TAPS"): (
        {"eagle_aux_hidden_state_layer_ids": []},
        {"eagle_aux_hidden_state_layer_ids": GONE},
    ),
    ("eagle3", "CONFIG-MASK-ID"): ({"parallel": 1},),
    ("dflash2", "CONFIG-CAUSAL"): ({"is_causal": True},),
    ("laguna_dflash", "CONFIG-CAUSAL"): ({"causal": False}, {"causal": GONE}),
    ("laguna_dflash", "CONFIG-HEAD-DIM"): ({"head_dim": 7},),
    ("laguna_dflash", "CONFIG-EXPERTS"): ({"num_experts": 4},),
    ("laguna_dflash", "CONFIG-ROPE"): ({"rope_theta": 0}, {"rope_theta": GONE}),
    ("muse_glimmer_assistant", "CONFIG-ROPE"): ({"rope_parameters": {"rope_type": "default"}},),
    ("speculators_mtp", "CONFIG-BACKBONE"): ({"backbone": "llama"},),
    **{
        (name, rule): changes
        for name in GEMMA
        for rule, changes in {
            "CONFIG-ACTIVATION": ({"hidden_activation": "silu"},),
            "CONFIG-GLOBAL-HEADS": ({"num_global_key_value_heads": 0},),
            "CONFIG-BACKBONE": ({"/backbone_hidden_size": 0}, {"/backbone_hidden_size": GONE}),
            "CONFIG-HEAD-DIM": ({"global_head_dim": GONE}, {"global_head_dim": 0}),
            "CONFIG-EXPERTS": ({"enable_moe_block": True},),
            "CONFIG-ROPE": ({"rope_parameters": GONE}, {"rope_parameters": {"full_attention": {}}}),
        }.items()
    },
    **{
        (name, "CONFIG-ROPE"): ({"rope_parameters": GONE}, {"rope_parameters": {"rope_theta": 1e4}})
        for name in ("qwen3_5_mtp", "qwen4_exp_mtp")
    },
    **{
        (name, "CONFIG-HEAD-DEPTH"): ({key: depth}, {key: 0})
        for name, key, depth in (
            ("hy_v4_mtp", "num_nextn_predict_layers", 2),
            ("nemotron_h_mtp", "num_nextn_predict_layers", 2),
            ("speculators_mtp", "num_nextn_predict_layers", 2),
            ("inkling_mtp", "num_mtp_layers", 9),
            ("qwen3_5_mtp", "mtp_num_hidden_layers", 9),
            ("qwen4_exp_mtp", "mtp_num_hidden_layers", 2),
        )
    },
}
UNSUPPORTED = "FAMILY-UNSUPPORTED"
ALWAYS = {("xpress", UNSUPPORTED)}
"""Rules that every drafter of the family breaks."""


def rules_of(name: str) -> list[str]:
    """The ids of a family's rules on config.json."""
    return [word if word == UNSUPPORTED else f"CONFIG-{word}" for word in RULES_OF[name].split()]


RULES = [(name, rule) for name in RULES_OF for rule in rules_of(name)]


def breaking(name: str, rule: str) -> tuple[Changes, ...]:
    return OF_FAMILY.get((name, rule)) or BREAKS.get(rule, ())


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    """Family -> the config of a sound drafter of it, under the keys of its rules."""
    folder = tmp_path_factory.mktemp("heads")
    read = dict(PUBLISHED)
    for name, write in TARGETS.items():
        api.split_mtp(write(folder / f"{name}-target"), folder / name)
        read[name] = json.loads((folder / name / "config.json").read_text(encoding="utf-8"))
    return {name: dict(canonical(family(name), ConfigView(config))[0].raw) for name, config in read.items()}


def changed(config: Config, changes: Changes) -> Config:
    copy = deepcopy(config)
    for key, value in changes.items():
        level = copy if key.startswith("/") else copy.get("text_config", copy)
        if value is GONE:
            level.pop(key.removeprefix("/"), None)
        else:
            level[key.removeprefix("/")] = value
    return copy


def broken(config: Config, name: str) -> set[str]:
    """The rules that a config breaks."""
    return {finding.rule for finding in apply_rules(config, name, "config", "config.json")}


def test_there_is_a_config_for_every_family_and_a_target_for_every_head() -> None:
    assert PUBLISHED.keys() | TARGETS.keys() == load_families().keys()
    assert TARGETS.keys() == load_splits().keys()


@pytest.mark.parametrize("name", load_families())
def test_a_sound_config_breaks_no_rule(sound: dict[str, Config], name: str) -> None:
    assert broken(sound[name], name) == {rule for other, rule in ALWAYS if other == name}


@pytest.mark.parametrize(("name", "rule"), RULES, ids=[f"{name}-{rule}" for name, rule in RULES])
def test_what_breaks_a_rule_is_told_under_its_name(sound: dict[str, Config], name: str, rule: str) -> None:
    if (name, rule) in ALWAYS:
        assert rule in broken(sound[name], name)
        return
    assert breaking(name, rule), "no case for this rule"
    for changes in breaking(name, rule):
        assert rule in broken(changed(sound[name], changes), name), changes


@pytest.mark.parametrize("name", load_families())
def test_the_rules_are_those_of_the_schema(name: str) -> None:
    schema = load_schema(f"families/{name}")["$defs"]["config"]["allOf"]
    assert sorted(rules_of(name)) == sorted(rule["rule"]["id"] for rule in schema)


def test_no_case_is_for_a_rule_that_is_gone() -> None:
    known = set(RULES)
    assert OF_FAMILY.keys() | ALWAYS <= known
    assert BREAKS.keys() <= {rule for pair in known for rule in pair[1:]}


# What views read where a test of a whole drafter would not show it.


@pytest.mark.parametrize("keys_are_values", [False, True])
def test_global_heads_count_only_where_keys_are_values(keys_are_values: bool) -> None:
    config = changed(
        PUBLISHED["gemma4_assistant"],
        {"num_global_key_value_heads": 1, "attention_k_eq_v": keys_are_values},
    )
    sliding, full = (of_layer(family("gemma4_assistant"), ConfigView(config), layer) for layer in (0, 3))
    assert sliding.get("num_key_value_heads") == 2
    assert full.get("num_key_value_heads") == (1 if keys_are_values else 2)


@pytest.mark.parametrize(("hidden", "width"), [(64, 16), (66, None)])
def test_a_head_width_is_taken_from_the_hidden_width_only_where_it_is_whole(
    hidden: int, width: int | None
) -> None:
    config = deepcopy(PUBLISHED["eagle3"])
    config["transformer_layer_config"] |= {"hidden_size": hidden, "head_dim": None}
    assert canonical(family("eagle3"), ConfigView(config))[0].get("head_dim") == width


# The last number that fits, and the first that does not.
EDGES: list[tuple[str, str, str, int, int]] = [
    ("dflash2", "CONFIG-CONVOLUTION", "conv_group_size", 32, 24),
    ("dflash2", "CONFIG-SELECTOR", "selector_top_k", 128, 129),
    ("dflash", "CONFIG-SPECULATIVE-TOKENS", "speculative_tokens", 7, 8),
    ("dflash", "CONFIG-RUNTIME-BLOCK-SIZE", "runtime_block_size", 8, 9),
    ("dflash", "CONFIG-MASK-VOCABULARY", "mask_token_id", 127, 128),
    ("dflash", "CONFIG-MASK-SPECIAL", "pad_token_id", 119, 120),
    ("dflash", "CONFIG-HEADS", "num_key_value_heads", 4, 3),
    ("eagle3", "CONFIG-DRAFT-VOCABULARY", "draft_vocab_size", 128, 129),
]


@pytest.mark.parametrize(
    ("name", "rule", "key", "last", "first"), EDGES, ids=[f"{edge[0]}-{edge[2]}" for edge in EDGES]
)
def test_the_first_number_too_many(
    tmp_path: Path, sound: dict[str, Config], name: str, rule: str, key: str, last: int, first: int
) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    empty = open_checkpoint(tmp_path)

    def told(value: int) -> set[str]:
        config = ConfigView({**sound[name], key: value})
        return {finding.rule for finding in own_checks(family(name), empty, config, values=False)}

    assert rule not in told(last)
    assert rule in told(first)
