"""What the speed benchmarks print alike: a table for people, and one line of JSON with the versions for programs."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from big_checkpoint import machine


def versions(*packages: str) -> dict[str, str]:
    """Of Python and of these packages beside draftpair and MLX."""
    found = {name: metadata.version(name) for name in ("draftpair", "mlx", *packages)}
    return {"python": platform.python_version(), **found}


def show(benchmark: str, rows: Sequence[Mapping[str, Any]], *packages: str, **also: Any) -> None:
    """``rows`` as a table, and with ``also`` and the versions as one line of JSON."""
    print(machine())
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(map(cell, row.values())) + " |")
    print(
        json.dumps({"benchmark": benchmark, "versions": versions(*packages), **also, "rows": list(rows)}),
        flush=True,
    )


def cell(value: Any) -> str:
    """A number with three digits after the point, anything else as it is."""
    return f"{value:.3f}" if isinstance(value, float) else "-" if value is None else str(value)
