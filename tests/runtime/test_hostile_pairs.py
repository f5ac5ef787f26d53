"""Odd models, options, drafters and machines: told as errors or decoded as without a drafter, never a crash."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.cli import run as command
from draftpair.errors import ToolError, Usage
from draftpair.runtime import exactness
from draftpair.runtime.interfaces import Pick
from draftpair.runtime.load import load_target, load_text_codec
from draftpair.runtime.options import Options
from draftpair.runtime.session import lookup_width, open_lookup
from draftpair.runtime.targets._ordinary import Target
from draftpair.runtime.text import TextStream
from fixtures.glm4_moe_lite import write_target
from fixtures.ordinary import EMBEDDING, write_model
from fixtures.pairs import run

START = ["-p", "t1", "--no-chat-template", "-n", "3"]


class Proposing:
    """A drafter that proposes the same in every round."""

    prompt_rows = 0
    widens = False

    def __init__(self, drafts: Any) -> None:
        self.drafts = drafts

    def reset(self) -> None: ...

    def prefill(self, prompt: Sequence[int], hidden: mx.array, bonus: int) -> None: ...

    def draft(self, count: int, pick: Pick) -> Any:
        return self.drafts

    def accept(self, accepted: int, bonus: int, hidden: mx.array) -> None: ...


def change(file: Path, **keys: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def llama(folder: Path, **options: Any) -> Target:
    loaded: Any = load_target(open_checkpoint(write_model(folder, **options)), environ={})
    return loaded


def test_a_model_that_was_changed_on_disk_is_probed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[str] = []
    probe = exactness.probe

    def counted(target: Any, *sizes: int) -> exactness.Exactness:
        probed.append(type(target.network).__module__)
        return probe(target, *sizes)

    monkeypatch.setattr(exactness, "probe", counted)
    for recipe in ("llama", "qwen3"):
        model = write_model(tmp_path / recipe, recipe).rename(tmp_path / "model")
        open_lookup(open_checkpoint(model), 2, Options(), {}).gate({})
        model.rename(tmp_path / f"{recipe}-before")
    assert probed == ["mlx_lm.models.llama", "mlx_lm.models.qwen3"]


def test_what_a_rejected_draft_makes_of_the_target_stays_in_its_own_row(tmp_path: Path) -> None:
    """One token's embedding is not a number, and plain decoding never comes to it."""
    target = llama(tmp_path / "model")
    expected = run(target, None, [1], tokens=8).ids
    unused = next(token for token in range(16) if token not in (1, *expected))
    embedding = target.network.model.embed_tokens
    embedding.weight = mx.where(mx.arange(16)[:, None] == unused, mx.array(float("nan")), embedding.weight)
    assert run(target, None, [1], tokens=8).ids == expected, EMBEDDING
    drafter: Any = Proposing([unused])
    assert run(target, drafter, [1], 2, tokens=8).ids == expected


def test_a_config_that_transformers_does_not_take_is_the_files_fault(tmp_path: Path) -> None:
    """It wants a float there; mlx-lm takes a whole number too, but the tokenizer is loaded by transformers."""
    model = write_target(tmp_path / "model")
    change(model / "config.json", routed_scaling_factor=1)
    with pytest.raises(ToolError, match=r"tokenizer cannot be loaded: .*routed_scaling_factor"):
        load_text_codec(open_checkpoint(model))


@pytest.mark.parametrize("drafts", [[], [3]], ids=["plainly", "with drafts"])
def test_a_target_whose_logits_become_no_numbers_says_so(tmp_path: Path, drafts: list[int]) -> None:
    """The first token's are numbers, those after the token that it decides are not."""
    target = llama(tmp_path / "model")
    first = run(target, None, [1], tokens=1).ids[0]
    embedding = target.network.model.embed_tokens
    embedding.weight = mx.where(mx.arange(16)[:, None] == first, mx.array(float("nan")), embedding.weight)
    drafter: Any = Proposing(drafts) if drafts else None
    with pytest.raises(ToolError, match="the target's logits are not numbers"):
        run(target, drafter, [1], 2, tokens=8)


def test_a_malformed_tokenizer_is_the_files_fault(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    change(model / "tokenizer.json", model="x")
    with pytest.raises(ToolError, match="tokenizer"):
        load_text_codec(open_checkpoint(model))


@pytest.mark.parametrize(
    "options",
    [
        ["--repetition-penalty", "1.3", "--repetition-context-size", str(2**40)],
        ["--logit-bias", json.dumps({"3": 10**400})],
    ],
    ids=["context size", "bias"],
)
def test_huge_numbers_of_the_command_line_are_taken_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    code = command(["generate", "-m", str(write_model(tmp_path / "model")), *START, *options])
    assert (code in (0, 2), "bug in draftpair" in capsys.readouterr().err) == (True, False)


def test_a_machine_without_a_place_for_temporary_files_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert command(["generate", "-m", str(model), *START]) == 3
    error = capsys.readouterr().err
    assert "nowhere" in error
    assert "bug in draftpair" not in error


@pytest.mark.parametrize(
    "wrong",
    [
        {"temp": "1"},
        {"temp": None},
        {"top_p": None},
        {"top_k": 1.5},
        {"top_k": "3"},
        {"seed": 1.5},
        {"seed": None},
        {"repetition_penalty": "2"},
        {"presence_penalty": "x"},
        {"logit_bias": {3: "x"}},
        {"logit_bias": {3: 10**400}},
        {"logit_bias": [1]},
        {"stop": None},
        {"stop": (None,)},
        {"prompt_lookup_ngram_max": "2"},
    ],
    ids=str,
)
def test_options_of_another_type_are_wrong_usage(wrong: dict[str, Any]) -> None:
    with pytest.raises(Usage):
        Options(**wrong)


@pytest.mark.parametrize("width", ["4", 2.5])
def test_a_width_that_is_no_whole_number_is_wrong_usage(width: Any) -> None:
    with pytest.raises(Usage):
        lookup_width(width, {})


@pytest.mark.parametrize(
    "drafts",
    [lambda: [np.int64(2)], lambda: np.array([2, 3]), lambda: [2.0], lambda: iter([2])],
    ids=["numpy id", "numpy array", "float", "iterator"],
)
def test_proposals_of_another_type_end_no_request(tmp_path: Path, drafts: Callable[[], Any]) -> None:
    target, drafter = llama(tmp_path / "model"), Proposing(drafts())
    proposing: Any = drafter
    assert run(target, proposing, [1], 4, tokens=8).ids == run(target, None, [1], tokens=8).ids


class Bytes:
    """A tokenizer of single bytes that counts the ids it is asked to decode."""

    decoded = 0

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded += len(ids)
        return bytes(ids).decode("utf-8", "replace")


def test_bytes_that_make_no_character_are_not_decoded_over_and_over() -> None:
    tokenizer = Bytes()
    stream = TextStream(tokenizer)
    text = stream.add([0x80] * 1000) + stream.finish()
    assert text == "\ufffd" * 1000
    assert tokenizer.decoded < 50_000
