"""A pair whose head is always right, split for the commands that run it."""

from __future__ import annotations

import pytest

from draftpair import api
from fixtures.glm4_moe_lite_copy import CopyPair, write_copy_pair


@pytest.fixture(scope="session")
def copying(tmp_path_factory: pytest.TempPathFactory) -> CopyPair:
    """Every token is followed by its successor, a cycle through all 31 but end of text, and the head knows it.

    Target and drafter lie beside each other, as ``target`` and ``drafter``; no test writes there.
    """
    folder = tmp_path_factory.mktemp("copying")
    pair = write_copy_pair(folder / "raw", folder / "target")
    api.split_mtp(pair.raw, folder / "drafter")
    return pair
