# mypy: disable-error-code="import-not-found, no-untyped-call, untyped-decorator"
"""The drafter folders that no other MLX engine runs: renamed back, they are the head that transformers runs.

The head's own layers, as transformers' `MtpModel` loads them from the raw checkpoint, and layers filled from the folder
that split-mtp wrote compute the same numbers to the last bit. The renaming is written here once more, from
transformers' side. FP8 is judged by a twin of the checkpoint that holds the values the FP8 stands for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, DeepseekV3ForCausalLM, DeepseekV32ForCausalLM, Glm4MoeForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from draftpair import api
from fixtures import deepseek_v3, glm4_moe
from fixtures.weights import Array, read_weights

pytestmark = pytest.mark.parity
TOKENS = (1, 2, 3, 5, 8, 13, 21, 34, 55, 26, 18, 44)
LATENT = ("self_attn.embed_q.weight", "self_attn.unembed_out.weight")
EXPERTS = "mlp.switch_mlp."


@contextmanager
def _head_layers_known(model_class: Any, layers: int, depth: int) -> Iterator[None]:
    """transformers knows heads by the published layer numbers only; say which they are here."""
    patterns = [rf"model\.layers\.{layers + number}\..*" for number in range(depth)]
    with mock.patch.object(model_class, "_keys_to_ignore_on_load_unexpected", patterns):
        yield


def load_both(model_class: Any, folder: Path, layers: int, depth: int) -> tuple[Any, Any]:
    """The target in float32 with plain attention, and the head that its folder holds."""
    config = AutoConfig.from_pretrained(folder)
    if model_class is DeepseekV32ForCausalLM:
        config.num_mtp_layers = depth
        config.mtp_layer_types, config.mtp_mlp_layer_types = ["indexed_attention"] * depth, ["sparse"] * depth
    with _head_layers_known(model_class, layers, depth):
        options = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model = model_class.from_pretrained(folder, config=config, dtype=torch.float32, **options).eval()
        return model, MtpModel.from_pretrained(model).eval()


def renamed_back(drafter: dict[str, Array], depth: int) -> dict[str, Any]:
    """A drafter folder's tensors under transformers' names for its next-token-prediction layers."""
    state: dict[str, Any] = {}
    for layer in range(depth):
        prefix = f"layers.{layer}."
        mine = {
            n.removeprefix(prefix): torch.from_numpy(v.copy())
            for n, v in drafter.items()
            if n.startswith(prefix)
        }
        mine.pop("embed_tokens.weight", None)
        mine.pop("lm_head.weight", None)
        for name in ("enorm", "hnorm", "eh_proj"):
            state[f"{prefix}{name}.weight"] = mine.pop(f"{name}.weight")
        state[f"{prefix}post_norm.weight"] = mine.pop("shared_head_norm.weight")
        block = {name.removeprefix("mtp_block."): value for name, value in mine.items()}
        assert len(block) == len(mine)
        if LATENT[0] in block:
            keys, values = (block.pop(name) for name in LATENT)
            joined = torch.cat([keys.transpose(1, 2), values], dim=1)
            block["self_attn.kv_b_proj.weight"] = joined.reshape(-1, joined.shape[-1])
        gate, up, down = (block.pop(f"{EXPERTS}{name}_proj.weight") for name in ("gate", "up", "down"))
        block["mlp.experts.gate_up_proj"], block["mlp.experts.down_proj"] = torch.cat([gate, up], dim=1), down
        state |= {f"{prefix}mtp_block.{name}": value for name, value in block.items()}
    return state


def causal_mask(head: Any) -> Any:
    """transformers masks no indexed layer of a head by itself: a triangle in place of its masks, for either head."""
    if "indexed_attention" not in (getattr(head.config, "layer_types", None) or ()):
        return nullcontext()

    def masks(layer: int, embedded: Any, *_: Any) -> dict[str, Any]:
        length = embedded.shape[1]
        return {"attention_mask": torch.full((1, 1, length, length), -torch.inf).triu(1)}

    return mock.patch.object(head, "create_masks_for_mtp_layer", masks)


@torch.no_grad()
def hidden_states(head: Any, embedded: list[Any], hidden: Any) -> list[Any]:
    """What every layer gives, each fed with the one before it; `embedded` has each layer's own tokens."""
    cache, given = MtpCache(config=head.config), []
    for layer, tokens in enumerate(embedded):
        positions = torch.arange(1 + layer, 1 + layer + tokens.shape[1])[None]
        with causal_mask(head):
            hidden = head.forward_layer(layer, hidden, positions, cache, inputs_embeds=tokens)
        given.append(hidden)
    return given


CASES = {
    "glm4_moe": (glm4_moe, Glm4MoeForCausalLM, {}, "F32"),
    "glm4_moe plain": (
        glm4_moe,
        Glm4MoeForCausalLM,
        {"bias": False, "qk_norm": False, "own_head": False},
        "F32",
    ),
    "glm4_moe depth 2": (glm4_moe, Glm4MoeForCausalLM, {"depth": 2, "own_embedding": False}, "F32"),
    "deepseek_v3": (deepseek_v3, DeepseekV3ForCausalLM, {}, "F32"),
    "deepseek_v3 FP8": (deepseek_v3, DeepseekV3ForCausalLM, {}, "fp8"),
    "deepseek_v3 depth 2 FP8": (deepseek_v3, DeepseekV3ForCausalLM, {"depth": 2, "own_head": False}, "fp8"),
    "deepseek_v32 FP8": (deepseek_v3, DeepseekV32ForCausalLM, {"index_heads": 4}, "fp8"),
}


@pytest.mark.parametrize("name", CASES)
def test_the_split_head_computes_what_the_head_computes(name: str, tmp_path: Path) -> None:
    recipe, model_class, options, kept = CASES[name]
    raw = recipe.write_checkpoint(tmp_path / "raw", kept=kept, **options)
    twin = recipe.write_checkpoint(tmp_path / "twin", kept="decoded" if kept == "fp8" else kept, **options)
    api.split_mtp(raw, tmp_path / "drafter", dtype="float32")
    drafter, source = read_weights(tmp_path / "drafter"), read_weights(twin)
    layers, depth = 2, options.get("depth", 1)
    model, head = load_both(model_class, twin, layers, depth)

    shared = {
        "embed_tokens.weight": model.model.embed_tokens.weight,
        "shared_head.weight": model.lm_head.weight,
    }
    with torch.no_grad():
        second = MtpModel(model, depth).eval()
    second.load_state_dict(renamed_back(drafter, depth) | shared, strict=True)

    ids = torch.tensor([TOKENS])
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn((1, len(TOKENS), model.config.hidden_size), generator=generator)
    tables: dict[str, list[Any]] = {"raw": [], "drafter": []}
    for layer in range(depth):
        own = f"model.layers.{layers + layer}.embed_tokens.weight"
        mine = f"layers.{layer}.embed_tokens.weight"
        assert (own in source) == (mine in drafter) == options.get("own_embedding", True)
        trunk = source["model.embed_tokens.weight"]
        tables["raw"].append(torch.from_numpy(source.get(own, trunk).copy())[ids])
        tables["drafter"].append(torch.from_numpy(drafter.get(mine, trunk).copy())[ids])
    expected = hidden_states(head, tables["raw"], hidden)
    found = hidden_states(second, tables["drafter"], hidden)
    assert len(found) == depth
    for layer, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert float(one.abs().max()) > 0.1
        assert torch.equal(one, other)
        own, mine = f"model.layers.{layers + layer}.shared_head.head.weight", f"layers.{layer}.lm_head.weight"
        assert (own in source) == (mine in drafter) == options.get("own_head", True)
        if own in source:
            assert (source[own] == drafter[mine]).all()
