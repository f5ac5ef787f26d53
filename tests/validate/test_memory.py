"""The memory estimate: terms, limits, and what a machine has."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from draftpair.checkpoint import ConfigView
from draftpair.errors import Usage
from draftpair.validate.kvcache import CacheSize
from draftpair.validate.memory import (
    DrafterMemory,
    MemoryEstimate,
    available_memory,
    estimate_memory,
    linux_memory,
    parse_limit,
    resident_weights,
)

CONFIG = ConfigView({"hidden_size": 10, "intermediate_size": 30, "vocab_size": 100})
CACHE = CacheSize(kv_bytes=4_000, bytes_per_token=10, state_bytes=600, note="")
HEAD = DrafterMemory(weights_bytes=900, cache=CacheSize(100, 1, 0, ""), block_size=3)


def estimate(**changes: Any) -> MemoryEstimate:
    arguments: dict[str, Any] = {"weights_bytes": 10_000, "cache": CACHE, "context": 64, "environ": {}}
    return estimate_memory(CONFIG, **(arguments | changes))


def terms(made: MemoryEstimate) -> list[int | None]:
    names = ("weights", "kv", "state", "drafter", "verify", "activation", "overhead")
    return [getattr(made, f"{name}_bytes") for name in names]


def test_a_model_alone() -> None:
    made = estimate()
    activation = 2 * 64 * (10 + 30) * 2 + 100 * 2
    assert terms(made) == [10_000, 4_000, 600, 0, 0, activation, 2_920]
    assert made.total_bytes == sum(filter(None, terms(made)))
    assert (made.kv_bytes_per_token, made.available_bytes, made.fits) == (10, None, None)


def test_a_drafter_counts_its_weights_its_cache_and_the_verify_block() -> None:
    made = estimate(drafter=HEAD, batch=2)
    assert made.drafter_bytes == 1_000
    assert made.verify_bytes == 3 * 2 * (100 + 10) * 2 + 600
    assert made.overhead_bytes == round(0.2 * (10_000 + 4_000 + 600 + 1_000))
    assert made.total_bytes == sum(filter(None, terms(made)))


def test_an_embedded_head_is_counted_once() -> None:
    assert resident_weights(10_000, 900, None) == 10_000
    assert resident_weights(10_000, 900, HEAD) + HEAD.weights_bytes == 10_000


def test_activation_stops_growing_at_512_tokens() -> None:
    assert estimate(context=512).activation_bytes == estimate(context=100_000).activation_bytes


@pytest.mark.parametrize(("available", "fits"), [(10**9, True), (20_000, False), (None, None)])
def test_fits_compares_the_total_with_what_there_is(available: int | None, fits: bool | None) -> None:
    made = estimate(available=available)
    assert (made.available_bytes, made.fits) == (available, fits)


def test_it_fits_to_the_last_byte() -> None:
    total = estimate().total_bytes or 0
    assert estimate(available=total).fits is True
    assert estimate(available=total - 1).fits is False


def test_an_unknown_cache_makes_total_and_answer_unknown() -> None:
    made = estimate(cache=CacheSize(None, None, None, "unknown"), available=10**9)
    assert (made.kv_bytes, made.overhead_bytes, made.total_bytes, made.fits) == (None, None, None, None)


def test_a_config_without_sizes_makes_the_activation_unknown() -> None:
    made = estimate_memory(ConfigView({}), 10, CACHE, 64, drafter=HEAD, environ={})
    assert (made.activation_bytes, made.verify_bytes, made.total_bytes) == (None, None, None)


def test_a_size_that_no_model_has_makes_the_activation_unknown() -> None:
    config = ConfigView({"hidden_size": 10, "intermediate_size": 30, "vocab_size": 10**30})
    made = estimate_memory(config, 1, CACHE, 64, drafter=HEAD, environ={})
    assert (made.activation_bytes, made.verify_bytes, made.total_bytes) == (None, None, None)


def test_factors_from_the_environment() -> None:
    made = estimate(environ={"MLXCEL_HEADROOM_FACTOR": "1.5", "MLXCEL_ACTIVATION_MULT": "1"})
    assert made.overhead_bytes == 7_300
    assert made.activation_bytes == 64 * 40 * 2 + 200
    assert estimate(environ={"MLXCEL_HEADROOM_FACTOR": "0.9"}).overhead_bytes == 0


@pytest.mark.parametrize("value", ["0", "-1", "inf", "nan", "much"])
def test_a_factor_that_is_no_positive_number_is_a_usage_error(value: str) -> None:
    with pytest.raises(Usage, match="MLXCEL_HEADROOM_FACTOR is"):
        estimate(environ={"MLXCEL_HEADROOM_FACTOR": value})


def test_the_report_has_every_key() -> None:
    assert list(estimate().as_dict()) == [field.name for field in dataclasses.fields(MemoryEstimate)]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GB", 24 << 30),
        ("24g", 24 << 30),
        ("1.5G", 3 << 29),
        (".5k", 512),
        ("512mb", 512 << 20),
        ("512 MB", 512 << 20),
        ("10kB", 10 << 10),
        (" 1073741824 ", 1 << 30),
        ("0", None),
        ("none", None),
        ("None", None),
        ("", None),
    ],
)
def test_limits(text: str, count: int | None) -> None:
    assert parse_limit(text, "--memory") == count


@pytest.mark.parametrize(
    "text", ["24TB", "1.5", "-1G", "GB", "1,5G", "1e9", "24GiB", "inf", "٣GB", "1.G", "9" * 400 + "G"]
)
def test_limits_that_are_none_say_so(text: str) -> None:
    with pytest.raises(Usage, match="--memory is ") as caught:
        parse_limit(text, "--memory")
    assert "24GB" in caught.value.message


def test_the_option_wins_over_the_environment_and_zero_passes_on() -> None:
    environ = {"MLXCEL_MEMORY_LIMIT": "2G"}
    assert available_memory("1G", environ) == 1 << 30
    assert available_memory(None, environ) == available_memory("0", environ) == 2 << 30


def test_a_bad_limit_in_the_environment_is_named() -> None:
    with pytest.raises(Usage, match="MLXCEL_MEMORY_LIMIT is 'lots'"):
        available_memory(None, {"MLXCEL_MEMORY_LIMIT": "lots"})


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("MemTotal:  8 kB\nMemFree: 1 kB\nMemAvailable:  6 kB\n", 6 << 10),
        ("MemTotal:  8 kB\n", 8 << 10),
        ("MemAvailable: much\n", None),
        ("", None),
    ],
)
def test_linux_memory(tmp_path: Path, text: str, count: int | None) -> None:
    (tmp_path / "meminfo").write_text(text)
    assert linux_memory(tmp_path / "meminfo") == count


def test_linux_memory_without_the_file_is_unknown(tmp_path: Path) -> None:
    assert linux_memory(tmp_path / "meminfo") is None
