"""Text comes in whole characters, all of it up to a stop string, and however the tokens were grouped."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.runtime.load import load_text_codec
from draftpair.runtime.session import Output
from draftpair.runtime.text import StopStrings, TextStream
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


SENTENCE_PIECES = {
    "<unk>": 0,
    "<0xE6>": 1,
    "<0x97>": 2,
    "<0xA5>": 3,
    "\u2581a": 4,
    "b": 5,
    "\u2581": 6,
    "\u2581c": 7,
}
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": False}
LLAMA = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}


def sentence_pieces(folder: Path, decoder: dict[str, Any]) -> Any:
    """A tokenizer as SentencePiece's are: a blank is part of the word after it, the first one is dropped."""
    write_target(folder)
    document = json.loads((folder / "tokenizer.json").read_text())
    document["model"] = {
        "type": "BPE",
        "vocab": SENTENCE_PIECES,
        "merges": [],
        "unk_token": "<unk>",
        "byte_fallback": True,
    }
    document |= {"decoder": decoder, "added_tokens": [], "pre_tokenizer": None}
    (folder / "tokenizer.json").write_text(json.dumps(document))
    return load_text_codec(open_checkpoint(folder))


@pytest.mark.parametrize(
    ("decoder", "ids", "text"),
    [
        (LLAMA, [4, 5, 7, 1, 2, 3, 1, 2, 3, 7], "ab c\u65e5\u65e5 c"),
        (LLAMA, [6, 7, 5], " cb"),
        (LLAMA, [4, 290, 7], "a c"),
        (METASPACE, [4, 5, 7, 4], "ab c a"),
        (METASPACE, [6, 7, 290, 4], " c a"),
    ],
    ids=["bytes of characters", "a blank at first", "an id without a token", "blanks", "both"],
)
def test_blanks_and_bytes_of_sentence_pieces(
    tmp_path: Path, decoder: dict[str, Any], ids: list[int], text: str
) -> None:
    codec = sentence_pieces(tmp_path / "target", decoder)
    stream = TextStream(codec)
    pieces = [stream.add([token]) for token in ids]
    assert "".join(pieces) + stream.finish() == text == codec.decode(ids)
    assert all("\ufffd" not in piece for piece in pieces)


def offline(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first stop string, found by trying every prefix in turn."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


def grouped(chance: random.Random, items: Sequence[Any]) -> list[Sequence[Any]]:
    cuts = sorted(chance.sample(range(len(items) + 1), chance.randrange(min(len(items), 6) + 1)))
    return [items[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(items)], strict=True)]


def test_a_text_is_cut_alike_however_it_is_pieced() -> None:
    chance, cut = random.Random(0), 0
    for _ in range(2000):
        text = "".join(chance.choices("ab", k=chance.randrange(30)))
        stops = ["".join(chance.choices("abc", k=chance.randrange(1, 6))) for _ in range(chance.randrange(4))]
        search = StopStrings(stops)
        told = "".join(search.add(piece) for piece in grouped(chance, text)) + search.finish()
        assert (told, search.found) == offline(text, stops), (text, stops)
        cut += search.found
    assert 500 < cut < 1500


def test_text_is_held_back_no_longer_than_it_could_begin_a_stop_string() -> None:
    search = StopStrings(["</end>"])
    assert [search.add(piece) for piece in ("a<", "/en", "c", "</e", "nd")] == ["a", "", "</enc", "", ""]
    assert not search.found
    assert search.finish() == "</end"


def test_of_several_stop_strings_the_first_to_end_counts() -> None:
    search = StopStrings(["abc", "b"])
    assert (search.add("xabc"), search.add("y"), search.finish(), search.found) == ("xa", "", "", True)
    longest = StopStrings(["c", "bc", "abcd"])
    assert (longest.add("ab"), longest.add("cd"), longest.found) == ("", "a", True)


def test_tokens_end_with_the_one_that_completes_a_stop_string(tokenizer: Any) -> None:
    """Any tokens, in any groups, against the whole text cut at once and the fewest tokens that hold that cut."""
    chance, eos = random.Random(1), frozenset({256})
    letters = "a\u00e9\u65e5"
    for _ in range(300):
        ids = list("".join(chance.choices(letters, k=12)).encode())[: chance.randrange(1, 30)]
        stops = ["".join(chance.choices(letters, k=chance.randrange(1, 4))) for _ in range(2)]
        pieces: list[str] = []
        output = Output(tokenizer, eos, stops, pieces.append)
        for group in grouped(chance, ids):
            if not output.stopped:
                output.take(group)
        output.finish()
        text, found = offline(tokenizer.decode(ids), stops)
        assert "".join(pieces) == output.text == text
        assert output.tokens == ids[: len(output.tokens)]
        if found:
            assert offline(tokenizer.decode(output.tokens), stops) == (text, True)
            assert not offline(tokenizer.decode(output.tokens[:-1]), stops)[1]
        else:
            assert output.tokens == ids


def test_an_interruption_loses_no_text(tokenizer: Any) -> None:
    """It may come after a token was taken and before its text was told."""
    ids = list("ab\u65e5cd".encode())
    for taken in range(len(ids) + 1):
        pieces: list[str] = []
        output = Output(tokenizer, frozenset(), ["d"], pieces.append)
        output.take(ids[:2])
        output.tokens += ids[2:taken]
        output.finish_interrupted()
        whole = bytes(ids[: max(taken, 2)]).decode(errors="replace")
        assert "".join(pieces) == output.text == whole.partition("d")[0]
