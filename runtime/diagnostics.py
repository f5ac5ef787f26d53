"""What can be seen of the rounds when the environment asks for it: logit gaps, and seconds of each component.

Both stand around target, drafter and sampler and pass everything on, so the tokens are the same. Measuring makes the
host wait for every component, which is slower than letting it run ahead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
from mlx import nn

from draftpair.runtime.interfaces import Drafter, Target
from draftpair.runtime.options import is_on
from draftpair.runtime.sampling import Sampler
from draftpair.runtime.stats import Stats

GAP_VARIABLE = "MLXCEL_MTP_GAP_LOG"
PROFILE_VARIABLE = "MLXCEL_MTP_DRAFT_PROFILE"

COMPONENTS = ("prefill", "seed", "draft", "verify", "choose", "rollback", "accept", "decode")


def watched(
    target: Target, drafter: Drafter, sampler: Sampler, stats: Stats, environ: Mapping[str, str]
) -> tuple[Target, Drafter, Sampler]:
    """The three, with what ``environ`` asks for around them: seconds go to ``stats.draft_profile``, gaps to stderr."""
    if is_on(environ.get(PROFILE_VARIABLE)):
        target, drafter, sampler = profiled(target, drafter, sampler, stats)
    if is_on(environ.get(GAP_VARIABLE)):
        target, sampler = gap_logged(target, sampler, lambda line: sys.stderr.write(f"{line}\n"))
    return target, drafter, sampler


class _Around:
    """Stands for ``inner``, but for some ``methods`` and, where ``call`` is given, for what calling it does."""

    def __init__(
        self, inner: Any, call: Callable[..., Any] | None = None, **methods: Callable[..., Any]
    ) -> None:
        self._inner = inner
        self._call = call
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any) -> Any:
        return (self._call or self._inner)(*args)


def gap_logged(target: Target, sampler: Sampler, write: Callable[[str], object]) -> tuple[Target, Sampler]:
    """Target and sampler that write tab-separated lines about each verified block.

    ``MTPGAP pos id top second gap`` for each row: the position of the token that it decides, the id with the highest
    logit, that logit, the next one and their difference, as the target gave them. ``MTPWALK width accepted drafts
    targets`` for the block: its rows, the drafts that agreed, all drafts, and what the target decided at each row.
    """
    block: dict[str, Any] = {}

    def verify(tokens: Sequence[int]) -> tuple[mx.array, mx.array]:
        logits, hidden = target.verify(tokens)
        block.update(drafts=list(tokens[1:]), logits=logits[0])
        return logits, hidden

    def draw(logits: mx.array, position: int, before: mx.array | None = None) -> mx.array:
        decided = sampler(logits, position, before)
        if "decided" not in block and "logits" in block:
            block.update(position=position, decided=decided.tolist())
        return decided

    def rollback(rejected: int) -> None:
        target.rollback(rejected)
        drafts, decided = block["drafts"], block["decided"]
        for row, (token, top, second) in enumerate(_tops(block["logits"])):
            write(f"MTPGAP\t{block['position'] + row}\t{token}\t{top:.6g}\t{second:.6g}\t{top - second:.6g}")
        write(f"MTPWALK\t{len(decided)}\t{len(drafts) - rejected}\t{_listed(drafts)}\t{_listed(decided)}")
        block.clear()

    around = _Around(target, verify=verify, rollback=rollback)
    return cast(Target, around), cast(Sampler, _Around(sampler, draw))


def _tops(logits: mx.array) -> Iterator[tuple[int, float, float]]:
    """For each row of [K, V]: the first id of the highest logit, that logit, and the next one."""
    rows: Any = logits.astype(mx.float32)
    ids: Any = mx.argmax(rows, axis=-1).tolist()
    highest: Any = mx.topk(rows, min(2, rows.shape[-1]), axis=-1).tolist()
    for token, values in zip(ids, highest, strict=True):
        yield token, max(values), min(values)


def _listed(ids: Sequence[int]) -> str:
    return ",".join(map(str, ids))


def profiled(
    target: Target, drafter: Drafter, sampler: Sampler, stats: Stats
) -> tuple[Target, Drafter, Sampler]:
    """The three, waited for at every call; the seconds of each of `COMPONENTS` go to ``stats.draft_profile``.

    ``seed`` is the drafter's share of the prefill, ``choose`` drawing the target's tokens; what a drafter draws is part
    of ``draft``. ``decode`` is what follows speculation: the last token of the budget, or all when the drafter fails.
    """
    seconds = stats.draft_profile = dict.fromkeys(COMPONENTS, 0.0)
    running: list[str] = []

    def timed(component: str, call: Callable[..., Any], owner: object = None) -> Callable[..., Any]:
        def measured(*args: Any) -> Any:
            if running:
                return call(*args)
            running.append(component)
            started = time.perf_counter()
            try:
                result = call(*args)
                mx.eval(list(_arrays((result, owner))))
                return result
            finally:
                seconds[component] += time.perf_counter() - started
                running.clear()

        return measured

    around_target = _Around(
        target,
        prefill=timed("prefill", target.prefill),
        verify=timed("verify", target.verify),
        rollback=timed("rollback", target.rollback, target),
        decode=timed("decode", target.decode),
    )
    around_drafter = _Around(
        drafter,
        prefill=timed("seed", drafter.prefill, drafter),
        draft=timed("draft", drafter.draft),
        accept=timed("accept", drafter.accept, drafter),
    )
    choosing = _Around(sampler, timed("choose", sampler))
    return cast(Target, around_target), cast(Drafter, around_drafter), cast(Sampler, choosing)


def _arrays(*values: object) -> Iterator[mx.array]:
    """The arrays among the values, in containers and in the attributes of objects, those of networks left out."""
    left, seen = list(values), set[int]()
    while left:
        value = left.pop()
        if id(value) in seen or isinstance(value, (nn.Module, str, bytes)):
            continue
        seen.add(id(value))
        if isinstance(value, mx.array):
            yield value
        elif isinstance(value, Mapping):
            left += value.values()
        elif isinstance(value, (list, tuple, set, frozenset)):
            left += value
        elif hasattr(value, "__dict__") and not callable(value):
            left += vars(value).values()
