"""The drafter's config says the RoPE base where every engine looks for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftpair import api
from draftpair.checkpoint import open_checkpoint
from fixtures.glm4_moe_lite import write_checkpoint


@pytest.mark.parametrize("rope", ["flat", "nested"])
def test_the_flat_key_is_there_whatever_the_source_has(tmp_path: Path, rope: str) -> None:
    source = open_checkpoint(write_checkpoint(tmp_path / "raw", rope=rope))
    assert (source.config.raw.get("rope_theta") is None) == (rope == "nested")
    api.split_mtp(tmp_path / "raw", tmp_path / "drafter")
    drafter = open_checkpoint(tmp_path / "drafter")
    assert drafter.config.raw["text_config"]["rope_theta"] == source.config.rope.theta
    assert (drafter.config.rope.theta, drafter.config.rope.conflicts) == (source.config.rope.theta, ())
