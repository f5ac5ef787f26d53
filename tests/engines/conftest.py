"""These tests need mlx-vlm 0.7.10 beside draftpair, so they are collected only when asked for: DRAFTPAIR_ENGINES=1."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave this folder's tests out unless asked for; None lets pytest decide as usual."""
    return None if os.environ.get("DRAFTPAIR_ENGINES") == "1" else True


@pytest.fixture(scope="session")
def engine() -> ModuleType:
    """The harness `mlx_vlm_drafters.py` of this folder, which also runs by itself."""
    name = "mlx_vlm_drafters"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
