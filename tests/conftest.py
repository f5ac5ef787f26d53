"""What all tests share: no network, no switches of the user's shell, and a tiny pair that is split once."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fixtures.folders import Folders

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"

# Switches of a user's shell would change what is tested.
for name in [name for name in os.environ if name.startswith(("MLXCEL_", "LLAMA_ARG_"))]:
    del os.environ[name]

_connect = socket.socket.connect


def _only_loopback(self: socket.socket, address: object) -> None:
    host = address[0] if isinstance(address, tuple) else ""
    if self.family in (socket.AF_INET, socket.AF_INET6) and host not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(f"a test tried to reach {address!r}")
    _connect(self, address)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "connect", _only_loopback)


@pytest.fixture(autouse=True)
def reports_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every report that a test gets from the library or the command line is held against its schema."""
    from draftpair import api
    from draftpair.schemas import check, load_schema

    envelope = api.envelope

    def checked(name: str, inputs: Mapping[str, Any], body: Mapping[str, Any]) -> dict[str, Any]:
        report = envelope(name, inputs, body)
        assert check(report, load_schema(name)) == []
        return report

    monkeypatch.setattr(api, "envelope", checked)


@pytest.fixture(scope="session")
def _made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from draftpair import api
    from fixtures.glm4_moe_lite import write_checkpoint, write_target

    folder = tmp_path_factory.mktemp("pair")
    write_checkpoint(folder / "raw", shards=3)
    write_target(folder / "target")
    api.split_mtp(folder / "raw", folder / "drafter")
    api.split_mtp(folder / "raw", folder / "drafter-4bit", q_bits=4, q_group_size=32)
    return folder


@pytest.fixture
def folders(_made: Path, tmp_path: Path) -> Folders:
    copy = tmp_path / "pair"
    shutil.copytree(_made, copy)
    return Folders(copy / "raw", copy / "target", copy / "drafter", copy / "drafter-4bit")
