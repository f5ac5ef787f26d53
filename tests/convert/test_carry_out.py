"""Carrying out a plan: what goes wrong on the way leaves the output as it was, and memory stays small."""

from __future__ import annotations

import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.checkpoint.writer import TensorFile
from draftpair.convert import carry_out, stream, write
from draftpair.errors import Refused, ToolError
from fixtures.glm4_moe_lite import write_checkpoint

HEAD = "model.layers.3."
NAN, INFINITY = 0x7FC0, 0xFF80


def poison(tools: Any, raw: Path, **places: tuple[int, ...]) -> None:
    """Put values that are not finite at flat places of head tensors; `__` in a name stands for a dot."""

    def change(tensors: dict[str, Any]) -> None:
        for name, where in places.items():
            full = HEAD + name.replace("__", ".")
            words = tensors[full][1].copy()
            words.reshape(-1)[list(where)] = [NAN, INFINITY][: len(where)]
            tensors[full] = ("BF16", words)

    tools.edit_tensors(raw, change)


@pytest.mark.parametrize("bits", [None, 4])
def test_values_that_are_not_finite_are_counted_by_tensor(
    raw: Path, tmp_path: Path, tools, bits: int | None
) -> None:
    if bits:
        pytest.importorskip("mlx.core")
    poison(tools, raw, eh_proj__weight=(7, 99), mlp__experts__5__up_proj__weight=(0,), enorm__weight=(3,))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(Refused) as caught:
        tools.split(raw, tmp_path / "out", q_bits=bits)
    message = caught.value.message
    for name, count in (("eh_proj.weight", 2), ("mlp.experts.5.up_proj.weight", 1), ("enorm.weight", 1)):
        assert f"{HEAD}{name} in model.safetensors ({count})" in message
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("place", [0, 40 * 64, -1], ids=["keys", "values", "last"])
def test_no_part_of_kv_b_proj_escapes_the_check(raw: Path, tmp_path: Path, tools, place: int) -> None:
    poison(tools, raw, self_attn__kv_b_proj__weight=(place,))
    with pytest.raises(Refused, match=r"self_attn\.kv_b_proj\.weight in model\.safetensors \(1\)"):
        tools.split(raw, tmp_path / "out")


def test_a_value_too_large_for_the_wanted_dtype_is_refused(tmp_path: Path, tools) -> None:
    raw = write_checkpoint(tmp_path / "raw", dtype="F32")
    name = f"{HEAD}hnorm.weight"
    tools.edit_tensors(raw, lambda tensors: large(tensors, name))
    tools.split(raw, tmp_path / "kept")
    with pytest.raises(Refused, match=r"hnorm\.weight in model\.safetensors \(1\)"):
        tools.split(raw, tmp_path / "out", dtype="bfloat16")


def large(tensors: dict[str, Any], name: str) -> None:
    values = tensors[name][1].view("<f4").copy()
    values[0] = np.finfo(np.float32).max
    tensors[name] = ("F32", values.view("<u4"))


def test_a_poisoned_trunk_is_none_of_our_business(raw: Path, tmp_path: Path, tools) -> None:
    def change(tensors: dict[str, Any]) -> None:
        tensors["lm_head.weight"] = ("BF16", np.full_like(tensors["lm_head.weight"][1], NAN))

    tools.edit_tensors(raw, change)
    tools.split(raw, tmp_path / "out")


def during_write(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Run `action` once, when the first tensor bytes are written."""
    usual, pending = TensorFile.write, [action]

    def write_and_act(self: TensorFile, name: str, offset: int, data: bytes) -> None:
        if pending:
            pending.pop()()
        usual(self, name, offset, data)

    monkeypatch.setattr(TensorFile, "write", write_and_act)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


@pytest.mark.parametrize(
    "change",
    [grow, lambda path: os.truncate(path, 5000), lambda path: os.utime(path), lambda path: path.unlink()],
    ids=["grown", "truncated", "touched", "deleted"],
)
def test_a_source_that_changes_meanwhile_is_refused(
    raw: Path, tmp_path: Path, tools, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    plan = tools.plan(raw, tmp_path / "out")
    during_write(monkeypatch, lambda: change(raw / "model.safetensors"))
    with pytest.raises(ToolError, match=r"model\.safetensors"):
        carry_out(plan)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw"]


def test_a_source_that_changed_between_opening_and_planning_is_refused(
    raw: Path, tmp_path: Path, tools
) -> None:
    from draftpair.convert import Request, plan_split
    from draftpair.families.heads import find_head

    checkpoint = open_checkpoint(raw)
    grow(raw / "model.safetensors")
    with pytest.raises(Refused, match=r"model\.safetensors in the source changed"):
        plan_split(checkpoint, find_head(checkpoint), Request(tmp_path / "out"))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError, OSError])
def test_an_exception_or_interrupt_leaves_nothing(
    raw: Path, tmp_path: Path, tools, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def fail() -> None:
        raise kind(28, "No space left on device")

    during_write(monkeypatch, fail)
    with pytest.raises(ToolError if kind is OSError else kind, match="No space left"):
        tools.split(raw, tmp_path / "parent" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw"]


def test_an_interrupt_while_replacing_leaves_the_old_drafter(
    raw: Path, tmp_path: Path, tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools.split(raw, tmp_path / "out")
    before = tools.state(tmp_path)

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(write, "refuse_changes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tools.split(raw, tmp_path / "out", force=True, block_size=4)
    assert tools.state(tmp_path) == before


def test_bytes_that_read_back_differently_are_noticed(
    raw: Path, tmp_path: Path, tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = os.pwrite

    def damage(fd: int, data: Any, offset: int) -> int:
        # The header is written first, at the beginning of the file.
        damaged = bytes(data) if offset == 0 else bytes([data[0] ^ 1]) + bytes(data[1:])
        return usual(fd, damaged, offset)

    monkeypatch.setattr(os, "pwrite", damage)
    with pytest.raises(
        ToolError, match=r"model\.safetensors was not stored as it was written: .* differently"
    ):
        tools.split(raw, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_disk_that_is_too_full_is_noticed_before_writing(
    raw: Path, tmp_path: Path, tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(write.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ToolError, match="has 1,000 free"):
        tools.split(raw, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_of_two_runs_into_one_output_the_first_to_finish_wins(raw: Path, tmp_path: Path, tools) -> None:
    other = write_checkpoint(tmp_path / "other", seed=1)
    tools.split(other, tmp_path / "expected")

    def finish_another(stage: str, done: int, total: int) -> None:
        if stage == "write" and done == total:
            tools.split(other, tmp_path / "out")

    with pytest.raises(ToolError, match="changed while this run was writing"):
        tools.split(raw, tmp_path / "out", progress=finish_another)
    expected, found = tools.state(tmp_path / "expected"), tools.state(tmp_path / "out")
    assert {n: s[3] for n, s in found.items()} == {n: s[3] for n, s in expected.items()}
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_two_processes_at_once_leave_one_whole_drafter(tmp_path: Path, tools) -> None:
    code = (
        "import sys; from pathlib import Path; from draftpair import api; from draftpair.errors import ToolError\n"
        "try: api.split_mtp(Path(sys.argv[1]), Path(sys.argv[2]), force=True)\n"
        "except ToolError as error: sys.exit(error.exit_code)"
    )
    sources = [write_checkpoint(tmp_path / f"raw{seed}", seed=seed) for seed in (0, 1)]
    for source in sources:
        tools.split(source, tmp_path / f"{source.name}-expected")
    out = tmp_path / "out"
    runs = [subprocess.Popen([sys.executable, "-c", code, str(source), str(out)]) for source in sources]
    codes = [run.wait() for run in runs]
    assert 0 in codes
    assert set(codes) <= {0, 3}
    found = {n: s[3] for n, s in tools.state(out).items()}
    wholes = [
        {n: s[3] for n, s in tools.state(tmp_path / f"{source.name}-expected").items()} for source in sources
    ]
    assert found in wholes


def test_progress_counts_every_byte(raw: Path, tmp_path: Path, tools) -> None:
    seen: dict[str, list[tuple[int, int]]] = {}
    plan = tools.split(
        raw,
        tmp_path / "out",
        progress=lambda stage, done, total: seen.setdefault(stage, []).append((done, total)),
    ).plan
    assert set(seen) == {"write"}
    assert [done for done, _ in seen["write"]] == sorted(done for done, _ in seen["write"])
    assert seen["write"][-1] == (plan.dense_size, plan.dense_size)


def test_memory_does_not_grow_with_the_tensors(
    tmp_path: Path, tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head of 9 MB passes through pieces of 32 KiB: a few of them a worker, and no tensor whole."""
    raw = write_checkpoint(tmp_path / "raw", vocab=16384, hidden=128)
    monkeypatch.setattr(stream, "PIECE_BYTES", 32 << 10)
    plan = tools.plan(raw, tmp_path / "out")
    assert plan.bytes_read > 8 << 20
    tracemalloc.start()
    try:
        carry_out(plan)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
