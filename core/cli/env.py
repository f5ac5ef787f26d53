"""``draftpair env``: what a bug report needs."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import click

from draftpair.cli._common import emit, json_option
from draftpair.version import VERSION

_PACKAGES = (
    "mlx",
    "mlx-lm",
    "safetensors",
    "huggingface-hub",
    "numpy",
    "blake3",
    "click",
    "jsonschema",
    "transformers",
)


@click.command("env")
@json_option
def command(as_json: bool) -> None:
    """Versions, device and cache, for bug reports."""
    facts: dict[str, Any] = {
        "draftpair": VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "mlx_device": _device(),
        **_hub_facts(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }
    emit(facts, as_json, _text)


def _text(facts: Mapping[str, Any]) -> Iterator[str]:
    for name, value in {**facts, **facts["packages"]}.items():
        if name != "packages":
            yield f"{name:<18}{'not installed' if value is None else value}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device() -> str | None:
    try:
        import mlx.core as mx
    except ImportError:
        return None
    return str(mx.default_device())


def _hub_facts() -> dict[str, Any]:
    from huggingface_hub import constants

    return {"hub_cache": str(constants.HF_HUB_CACHE), "hub_offline": bool(constants.HF_HUB_OFFLINE)}
