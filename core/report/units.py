"""Numbers as people read them."""

from __future__ import annotations


def bytes_text(count: int) -> str:
    """``x.xx GiB (n bytes)``, ``x.x MiB (n bytes)`` from one MiB on, else ``n bytes``."""
    if count >= 1 << 30:
        return f"{count / (1 << 30):.2f} GiB ({count:,} bytes)"
    if count >= 1 << 20:
        return f"{count / (1 << 20):.1f} MiB ({count:,} bytes)"
    return f"{count:,} bytes"


def count_text(count: int) -> str:
    """A large count with its unit: ``29.9 B``, ``849.4 M``, ``12,345``."""
    for unit, name in ((10**9, "B"), (10**6, "M")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count:,}"
