"""Text comes in whole characters, and all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.runtime.load import load_text_codec
from draftpair.runtime.text import TextStream
from fixtures.glm4_moe_lite import write_target

TEXT = "plain, äöü, 日本語, \U0001f600\U0001f468\u200d\U0001f469, trailing blank "


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_target(tmp_path_factory.mktemp("bytes") / "target", vocab=300)
    return load_text_codec(open_checkpoint(folder))


@pytest.mark.parametrize("step", [1, 2, 3, 5, 1000])
def test_pieces_join_to_the_text_and_split_no_character(tokenizer: Any, step: int) -> None:
    ids = list(TEXT.encode())
    stream = TextStream(tokenizer)
    pieces = [stream.add(ids[begin : begin + step]) for begin in range(0, len(ids), step)]
    assert "".join([*pieces, stream.finish()]) == TEXT
    assert all("\ufffd" not in piece for piece in pieces)


def test_bytes_that_make_no_character_come_at_the_end(tokenizer: Any) -> None:
    stream = TextStream(tokenizer)
    assert stream.add([0xE6, 0x97]) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_invalid_bytes_do_not_hold_later_text_back_for_ever(tokenizer: Any) -> None:
    stream = TextStream(tokenizer)
    pieces = [stream.add([token]) for token in [0xFF, *b"abc"]]
    assert "".join(pieces) + stream.finish() == "\ufffdabc"


def test_ids_without_a_token_do_no_harm(tokenizer: Any) -> None:
    stream = TextStream(tokenizer)
    text = stream.add([ord("a"), 298, ord("b")]) + stream.finish()
    assert text.startswith("a")
    assert text.endswith("b")


def test_word_level_text_keeps_its_blanks(tmp_path: Path) -> None:
    codec = load_text_codec(open_checkpoint(write_target(tmp_path / "target")))
    stream = TextStream(codec)
    pieces = [stream.add([token]) for token in [1, 2, 3]]
    assert "".join(pieces) + stream.finish() == codec.decode([1, 2, 3])
