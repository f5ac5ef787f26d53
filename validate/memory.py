"""Does it fit: what running a model, alone or with a drafter, takes, and what the machine has.

The terms of a `MemoryEstimate` sum to its total; a term that cannot be known is None, and then so are the
total and the answer. Formulas (bytes, context and batch as asked):

- weights: the weight files' tensors;
- caches and states: `draftpair.validate.kvcache`;
- drafter: its weights and its own caches at the same context;
- verify block of K rows: K x batch x (vocabulary + taps x hidden) x 2 for logits and the hidden states of the
  layers that the drafter reads (one, for most), plus one copy of the target's recurrent state, which is what a
  rejected draft is rolled back to;
- activation: 2 x batch x min(context, 512) x (hidden + intermediate) x 2, plus batch x vocabulary x 2 for one
  row of logits (the factor 2 in front can be set with ``MLXCEL_ACTIVATION_MULT``);
- overhead of the allocator: 0.20 x (weights + caches + states + drafter); ``MLXCEL_HEADROOM_FACTOR``
  (default 1.20) minus one is the share, and a factor of at most one means none.

The last two and the names of the variables are mlxcel's, so that both tools judge alike.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from draftpair.checkpoint import ConfigView
from draftpair.errors import Refused, Usage
from draftpair.validate.geometry import Geometry, geometry
from draftpair.validate.kvcache import CacheSize

ACTIVATION_ROWS = 512
LIMIT_VARIABLE = "MLXCEL_MEMORY_LIMIT"

_LIMIT = re.compile(r"(\d{1,18}(?:\.\d+)?|\.\d+)\s*([KMG]B?)?", re.IGNORECASE | re.ASCII)
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_UNSET = frozenset({"", "0", "none"})


@dataclass(frozen=True)
class DrafterMemory:
    """A drafter beside the target: its weights (for an embedded head: the head's), caches, width K and taps."""

    weights_bytes: int
    cache: CacheSize
    block_size: int
    taps: int = 1

    @property
    def total_bytes(self) -> int | None:
        """Weights and caches; None when the caches are unknown."""
        return _total(self.weights_bytes, self.cache.kv_bytes, self.cache.state_bytes)


@dataclass(frozen=True)
class MemoryEstimate:
    """The ``memory`` object of an inspect report.

    The terms up to ``overhead_bytes``, without the rate ``kv_bytes_per_token``, sum to ``total_bytes``.
    """

    weights_bytes: int | None
    kv_bytes: int | None
    kv_bytes_per_token: int | None
    state_bytes: int | None
    drafter_bytes: int | None
    verify_bytes: int | None
    activation_bytes: int | None
    overhead_bytes: int | None
    total_bytes: int | None
    available_bytes: int | None
    fits: bool | None

    def as_dict(self) -> dict[str, int | bool | None]:
        """As the report has it: every key present, unknown values null."""
        return asdict(self)


def resident_weights(tensor_bytes: int, head_bytes: int, drafter: DrafterMemory | None) -> int:
    """Bytes of weights to count for the target, so that an embedded head is counted exactly once.

    Without a drafter the whole checkpoint counts. With one, the head does not: target code drops it, and
    either the drafter folder replaces it or `DrafterMemory.weights_bytes` is the head itself.
    """
    return tensor_bytes if drafter is None else tensor_bytes - head_bytes


def estimate_memory(
    config: ConfigView,
    weights_bytes: int | None,
    cache: CacheSize,
    context: int,
    batch: int = 1,
    drafter: DrafterMemory | None = None,
    available: int | None = None,
    environ: Mapping[str, str] = os.environ,
) -> MemoryEstimate:
    """The estimate for a target's ``config`` and ``cache`` (see `cache_size`), by the formulas above.

    ``weights_bytes`` comes from `resident_weights`, None when weight files are absent or damaged.
    Raises Usage when a factor in the environment is not a positive number.
    """
    drafter_bytes = drafter.total_bytes if drafter else 0
    resident = _total(weights_bytes, cache.kv_bytes, cache.state_bytes, drafter_bytes)
    sizes = _sizes(config)
    verify = _verify_bytes(sizes, drafter, batch, cache.state_bytes) if drafter else 0
    activation = _activation_bytes(sizes, context, batch, _factor(environ, "MLXCEL_ACTIVATION_MULT", 2.0))
    share = max(_factor(environ, "MLXCEL_HEADROOM_FACTOR", 1.20) - 1.0, 0.0)
    overhead = None if resident is None else round(share * resident)
    total = _total(resident, verify, activation, overhead)
    return MemoryEstimate(
        weights_bytes=weights_bytes,
        kv_bytes=cache.kv_bytes,
        kv_bytes_per_token=cache.bytes_per_token,
        state_bytes=cache.state_bytes,
        drafter_bytes=drafter_bytes,
        verify_bytes=verify,
        activation_bytes=activation,
        overhead_bytes=overhead,
        total_bytes=total,
        available_bytes=available,
        fits=None if total is None or available is None else total <= available,
    )


def parse_limit(text: str, source: str) -> int | None:
    """Bytes of a memory limit such as ``24GB``, ``1.5G``, ``512m`` or ``1073741824``; None when unset.

    K, M and G, with or without B and in any case, are powers of 1024; a fraction needs one of them; a bare
    number is bytes; ``0``, ``none`` and nothing mean unset. Raises Usage, naming ``source``, for the rest.
    """
    value = text.strip()
    if value.lower() in _UNSET:
        return None
    match = _LIMIT.fullmatch(value)
    if match is None or (match[2] is None and "." in match[1]):
        raise Usage(
            f"{source} is {text!r}; expected a size such as 24GB, 1.5G, 512MB or a whole number of bytes",
            hint="suffixes K, M and G (with or without B) count in 1024s; 0 or none means no limit",
        )
    return int(float(match[1]) * _UNITS[match[2][0].upper()]) if match[2] else int(match[1])


def available_memory(limit: str | None = None, environ: Mapping[str, str] = os.environ) -> int | None:
    """Bytes a run may use: an explicit limit, else ``MLXCEL_MEMORY_LIMIT``, else what the machine has.

    The machine's figure is all memory on macOS, where it is shared with the GPU, and the available memory on
    Linux; None elsewhere, or when it cannot be read. Raises Usage for a limit that does not parse.
    """
    for text, source in ((limit, "--memory"), (environ.get(LIMIT_VARIABLE), LIMIT_VARIABLE)):
        value = None if text is None else parse_limit(text, source)
        if value:
            return value
    return _mac_memory() if sys.platform == "darwin" else linux_memory(Path("/proc/meminfo"))


def linux_memory(meminfo: Path) -> int | None:
    """``MemAvailable`` of a meminfo file in bytes, else ``MemTotal``, else None."""
    try:
        lines = meminfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    values = {key: rest.split() for key, _, rest in (line.partition(":") for line in lines)}
    for key in ("MemAvailable", "MemTotal"):
        if values.get(key) and values[key][0].isdigit():
            return int(values[key][0]) * 1024
    return None


def _mac_memory() -> int | None:
    try:
        answer = subprocess.run(
            ["/usr/sbin/sysctl", "-n", "hw.memsize"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return int(answer.stdout) if answer.stdout.strip().isdigit() else None


def _sizes(config: ConfigView) -> Geometry | None:
    """The sizes, None where one of them cannot be right: then nothing is estimated from them."""
    try:
        return geometry(config)
    except Refused:
        return None


def _verify_bytes(
    sizes: Geometry | None, drafter: DrafterMemory, batch: int, state_bytes: int | None
) -> int | None:
    if sizes is None or sizes.vocabulary is None or sizes.hidden is None or state_bytes is None:
        return None
    row = (sizes.vocabulary + drafter.taps * sizes.hidden) * 2
    return drafter.block_size * batch * row + state_bytes


def _activation_bytes(sizes: Geometry | None, context: int, batch: int, factor: float) -> int | None:
    if sizes is None or sizes.vocabulary is None or sizes.hidden is None or sizes.intermediate is None:
        return None
    rows = batch * max(1, min(context, ACTIVATION_ROWS))
    return round(factor * rows * (sizes.hidden + sizes.intermediate) * 2) + batch * sizes.vocabulary * 2


def _factor(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value <= 0:
        raise Usage(f"{name} is {text!r}; expected a positive number", hint=f"unset it to use {default}")
    return value


def _total(*terms: int | None) -> int | None:
    """The sum, or None when a term is unknown."""
    known = [term for term in terms if term is not None]
    return sum(known) if len(known) == len(terms) else None
