"""A drafter's family when only its config speaks: told, or left open, and never the first that might do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.families.drafters import find_drafter


def family_of(folder: Path, config: dict[str, Any]) -> str | None:
    (folder / "config.json").write_text(json.dumps(config))
    found = find_drafter(open_checkpoint(folder))
    return found.family.name if found else None


@pytest.mark.parametrize(
    ("config", "family"),
    [
        ({"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 1}}, "dflash"),
        ({"architectures": ["DFlash2DraftModel"], "dflash_config": {"mask_token_id": 1}}, "dflash2"),
        ({"model_type": "qwen3", "dflash_config": {"mask_token_id": 1}}, None),
        (
            {
                "architectures": ["DFlashLagunaForCausalLM"],
                "dflash_config": {"x": 1},
                "draft_vocab_size": 8,
                "eagle_aux_hidden_state_layer_ids": [2],
            },
            "laguna_dflash",
        ),
        ({"model_type": "gemma4_assistant"}, "gemma4_assistant"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"model_type": "qwen3"}, None),
        ({"architectures": "DFlashDraftModel"}, None),
        ({"architectures": [["DFlashDraftModel"], {}]}, None),
        ({"speculators_model_type": ["eagle3"]}, None),
    ],
    ids=[
        "dflash",
        "dflash2",
        "one of several",
        "named",
        "type",
        "speculators",
        "ordinary",
        "text",
        "nested",
        "list",
    ],
)
def test_a_config_alone(tmp_path: Path, config: dict[str, Any], family: str | None) -> None:
    assert family_of(tmp_path, config) == family
