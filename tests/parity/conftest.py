"""Parity tests need torch, so they are collected only when asked for: `-m parity`, or DRAFTPAIR_PARITY=1."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave this folder's tests out unless asked for; None lets pytest decide as usual."""
    expression = config.getoption("markexpr")
    asked = "parity" in expression and "not parity" not in expression
    return None if asked or os.environ.get("DRAFTPAIR_PARITY") == "1" else True
