"""The sliding-window cache against a plain list of rows: what is seen, what can be taken back, how much is kept."""

from __future__ import annotations

import random

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache, can_trim_prompt_cache, trim_prompt_cache

from draftpair.runtime.window import STEP, Rows, WindowCache


def rows(values: list[int]) -> Rows:
    """Keys [1, 2, n, 3] and values [1, 2, n, 5] that tell their row."""
    row = mx.array(values, dtype=mx.float32)[None, None, :, None]
    return mx.broadcast_to(row, (1, 2, len(values), 3)), mx.broadcast_to(-row, (1, 2, len(values), 5))


def told(seen: Rows) -> list[int]:
    """The values of the rows; every number of a row has to agree."""
    keys, values = np.array(seen[0]), np.array(seen[1])
    assert (keys == keys[:, :1, :, :1]).all()
    assert (values == -keys[:, :1, :, :1]).all()
    return [int(value) for value in keys[0, 0, :, 0]]


@pytest.mark.parametrize("seed", range(12))
def test_a_random_course_of_appends_and_trims_equals_a_list_of_rows(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftpair.runtime.window.STEP", 16)  # rows are dropped often
    chance = random.Random(seed)
    window, slack = chance.randint(1, 12), chance.choice([0, 4, 32])
    cache, plain, furthest, fresh, last = WindowCache(window, slack), [], 0, 0, 0
    for _ in range(60):
        back = max(last, len(plain) - furthest + slack)
        if plain and back and chance.random() < 0.45:
            count = chance.randint(0, min(back, len(plain)))
            assert cache.trim(count) == count
            del plain[len(plain) - count :]
            last = max(0, last - count)
        else:
            last = chance.choice([1, 1, 1, chance.randint(2, 32), chance.randint(2, 80)])
            new = list(range(fresh, fresh + last))
            fresh += last
            before = plain[len(plain) - min(len(plain), window - 1) :]
            plain += new
            furthest = max(furthest, len(plain))
            seen = told(cache.update_and_fetch(*rows(new)))
            assert seen == (plain[-window:] if last == 1 else before + new)
        assert cache.offset == len(plain)
        assert cache.size() == min(len(plain), window)
        if plain:
            behind = chance.randint(0, min(last, len(plain) - 1))
            end = len(plain) - behind
            assert told(cache.visible(behind)) == plain[max(0, end - window) : end]


@pytest.mark.parametrize("width", [1, 8, 32])
@pytest.mark.parametrize("chunks", [[5], [30], [700, 700, 1]])
def test_a_verified_block_is_taken_back_after_the_window_has_slid(
    width: int, chunks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftpair.runtime.window.STEP", 16)
    cache, plain = WindowCache(8), []
    for count in [*chunks, *[1] * 40]:
        new = list(range(len(plain), len(plain) + count))
        cache.update_and_fetch(*rows(new))
        plain += new
    for rejected in range(width + 1):
        cache.append(*rows([-7] * width))
        assert cache.trim(rejected) == rejected
        plain += [-7] * (width - rejected)
        assert told(cache.visible()) == plain[-8:]


def test_many_single_rows_are_taken_back_as_far_as_the_slack() -> None:
    cache = WindowCache(8, slack=40)
    for row in range(3 * STEP):
        cache.update_and_fetch(*rows([row]))
    assert cache.trim(40) == 40
    assert told(cache.visible()) == list(range(3 * STEP - 48, 3 * STEP - 40))


def test_no_more_is_taken_back_than_leaves_the_window_whole() -> None:
    cache = WindowCache(8)
    for begin in (0, 600):
        cache.append(*rows(list(range(begin, begin + 600))))
    assert cache.trim(1000) == 632
    assert told(cache.visible()) == list(range(560, 568))
    assert WindowCache(8).trim(3) == 0


def test_all_rows_are_taken_back_while_none_was_dropped() -> None:
    cache = WindowCache(8)
    cache.append(*rows(list(range(20))))
    assert cache.trim(20) == 20
    assert told(cache.update_and_fetch(*rows([5]))) == [5]


def test_memory_is_bounded_by_window_slack_and_chunk() -> None:
    cache, row_bytes = WindowCache(8, slack=32), 4 * 2 * (3 + 5)
    for _ in range(6):
        cache.update_and_fetch(*rows(list(range(500))))
        assert cache.nbytes <= (8 + 32 + 500) * row_bytes
    for row in range(2 * STEP):
        cache.update_and_fetch(*rows([row]))
    assert cache.nbytes <= (8 + 32 + STEP) * row_bytes
    assert WindowCache(8).nbytes == 0
    assert WindowCache(8).empty()


def test_rows_of_an_empty_cache_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="empty cache"):
        WindowCache(8).visible()


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 20])
@pytest.mark.parametrize("before", [0, 3, 7, 8, 30])
@pytest.mark.parametrize("window", [None, 5, 8])
def test_masks_are_those_of_mlx_lms_cache_until_rows_are_taken_back(
    before: int, count: int, window: int | None
) -> None:
    ours, theirs = WindowCache(8), RotatingKVCache(8)
    if before:
        for cache in (ours, theirs):
            cache.update_and_fetch(*rows(list(range(before))))
    new, length = rows(list(range(before, before + count))), mx.zeros((1, count, 1))
    masks = [create_attention_mask(length, cache, window_size=window) for cache in (ours, theirs)]
    seen = [told(cache.update_and_fetch(*new)) for cache in (ours, theirs)]
    visible = [visibility(mask, count, row) for mask, row in zip(masks, seen, strict=True)]
    assert visible[0] == visible[1]
    if count > 1:
        as_array = ours.make_mask(count, window, return_array=True)
        assert isinstance(as_array, mx.array)


def visibility(mask: mx.array | str | None, count: int, seen: list[int]) -> list[set[int]]:
    """The rows that each query may attend to."""
    if mask is None:
        return [set(seen)] * count
    if isinstance(mask, str):
        return [set(seen[: len(seen) - count + query + 1]) for query in range(count)]
    table = np.array(mask).reshape(-1, len(seen))
    return [{row for row, open_ in zip(seen, line, strict=True) if open_} for line in table]


def test_a_saved_state_is_a_cache_again() -> None:
    cache, copy = WindowCache(8), WindowCache(8)
    cache.append(*rows(list(range(20))))
    copy.state = cache.state
    assert told(copy.visible()) == told(cache.visible())
    assert copy.offset == 20
    mx.eval([cache.state for cache in (cache, WindowCache(8))])


def test_mlx_lm_trims_it_among_other_caches() -> None:
    caches = [KVCache(), WindowCache(8)]
    for cache in caches:
        cache.update_and_fetch(*rows(list(range(20))))
    assert can_trim_prompt_cache(caches)
    assert trim_prompt_cache(caches, 5) == 5
    assert [cache.offset for cache in caches] == [15, 15]
