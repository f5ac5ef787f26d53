"""Comparing tokenizers from their files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from draftpair.checkpoint import Checkpoint, open_checkpoint
from draftpair.errors import Refused
from draftpair.validate import tokenizer_files
from draftpair.validate.tokenizer import IdDifference, TokenizerComparison, compare, special_ids
from draftpair.validate.tokenizer_files import read_tokenizer

BPE: dict[str, Any] = {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False},
    "decoder": {"type": "ByteLevel"},
    "added_tokens": [
        {"id": 5, "content": "<eos>", "special": True},
        {"id": 6, "content": "<pad>", "special": True},
    ],
    "model": {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "c": 2, "ab": 3, "abc": 4},
        "merges": ["a b", "ab c"],
    },
}
UNIGRAM: dict[str, Any] = {"model": {"type": "Unigram", "vocab": [["a", -1.0], ["b", -2.0], ["ab", -2.5]]}}
WORDS: dict[str, Any] = {"model": {"type": "WordLevel", "vocab": {"yes": 0, "no": 1}}}


def side(folder: Path, files: dict[str, Any]) -> Checkpoint:
    """A checkpoint folder with a config and the given files; strings are written as they are."""
    folder.mkdir()
    for name, content in ({"config.json": {}} | files).items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text, encoding="utf-8")
    return open_checkpoint(folder)


def compared(tmp_path: Path, target: dict[str, Any], drafter: dict[str, Any]) -> TokenizerComparison:
    return compare(
        *map(read_tokenizer, (side(tmp_path / "target", target), side(tmp_path / "drafter", drafter)))
    )


def changed(document: dict[str, Any], pointer: str, value: Any) -> dict[str, Any]:
    """A copy of the document with the value at a pointer such as ``model/vocab/a`` replaced or added."""
    document = copy.deepcopy(document)
    *parents, last = pointer.split("/")
    place: Any = document
    for key in parents:
        place = place[int(key) if isinstance(place, list) else key]
    if isinstance(place, list) and int(last) == len(place):
        place.append(value)
    else:
        place[int(last) if isinstance(place, list) else last] = value
    return document


@pytest.mark.parametrize("document", [BPE, UNIGRAM, WORDS], ids=["BPE", "Unigram", "WordLevel"])
def test_equal_files_are_identical(tmp_path: Path, document: dict[str, Any]) -> None:
    result = compared(tmp_path, {"tokenizer.json": document}, {"tokenizer.json": document})
    assert result.relation == "identical"
    assert (result.sections, result.pipeline, result.special, result.different) == ((), (), (), ())


def test_a_file_saved_again_by_a_newer_library_is_identical(tmp_path: Path) -> None:
    again = changed(BPE, "model/merges", [["a", "b"], ["ab", "c"]])
    again = changed(again, "pre_tokenizer", {"type": "ByteLevel", "trim_offsets": None, "use_regex": False})
    result = compared(tmp_path, {"tokenizer.json": BPE}, {"tokenizer.json": again})
    assert (result.relation, result.pipeline) == ("identical", ())


def test_added_tokens_may_stand_in_either_file(tmp_path: Path) -> None:
    bare = changed(BPE, "added_tokens", [])
    listed = {"added_tokens_decoder": {"5": {"content": "<eos>"}, "6": {"content": "<pad>"}}}
    result = compared(
        tmp_path, {"tokenizer.json": BPE}, {"tokenizer.json": bare, "tokenizer_config.json": listed}
    )
    assert result.relation == "identical"


def test_vocab_and_merges_files_stand_in_for_tokenizer_json(tmp_path: Path) -> None:
    old = {
        "vocab.json": BPE["model"]["vocab"],
        "merges.txt": "#version: 0.2\na b\r\nab c\n\n",
        "added_tokens.json": {"<eos>": 5, "<pad>": 6},
    }
    assert compared(tmp_path, {"tokenizer.json": BPE}, old).relation == "identical"


@pytest.mark.parametrize("longer", ["target", "drafter"])
def test_ids_added_at_the_end_are_padding(tmp_path: Path, longer: str) -> None:
    more = changed(BPE, "added_tokens/2", {"id": 9, "content": "<think>"})
    sides = ({"tokenizer.json": more}, {"tokenizer.json": BPE})
    result = compared(tmp_path, *(sides if longer == "target" else sides[::-1]))
    assert (result.relation, result.sections, result.different_ids) == ("padded", (), 0)
    assert ("10 ids in the target" if longer == "target" else "10 in the drafter") in result.detail


def test_a_vocabulary_that_grew_with_its_merges_is_padding(tmp_path: Path) -> None:
    grown = changed(changed(BPE, "model/vocab/abcb", 7), "model/merges/2", "abc b")
    assert compared(tmp_path, {"tokenizer.json": BPE}, {"tokenizer.json": grown}).relation == "padded"


@pytest.mark.parametrize(
    ("pointer", "value", "sections"),
    [
        ("model/vocab", {"a": 0, "b": 2, "c": 1, "ab": 3, "abc": 4}, ("vocabulary",)),
        ("model/vocab/abc", 8, ("vocabulary",)),
        ("added_tokens/0/content", "<end>", ("added_tokens",)),
        ("model/merges", ["ab c", "a b"], ("merges",)),
        ("model/merges", ["a b"], ("merges",)),
        ("model/type", "WordPiece", ("model",)),
    ],
    ids=["ids swapped", "a hole", "an added token", "merge order", "a merge gone", "the model"],
)
def test_what_makes_a_tokenizer_different(
    tmp_path: Path, pointer: str, value: Any, sections: tuple[str, ...]
) -> None:
    result = compared(tmp_path, {"tokenizer.json": BPE}, {"tokenizer.json": changed(BPE, pointer, value)})
    assert (result.relation, result.sections) == ("different", sections)


def test_unigram_scores_are_compared(tmp_path: Path) -> None:
    other = changed(UNIGRAM, "model/vocab/1/1", -2.25)
    result = compared(tmp_path, {"tokenizer.json": UNIGRAM}, {"tokenizer.json": other})
    assert (result.relation, result.sections) == ("different", ("scores",))


def test_the_first_five_ids_that_differ_are_shown(tmp_path: Path) -> None:
    mine = {"model": {"vocab": {f"t{number}": number for number in range(40)}}}
    theirs = {"model": {"vocab": {f"t{39 - number}": number for number in range(40)}}}
    result = compared(tmp_path, {"tokenizer.json": mine}, {"tokenizer.json": theirs})
    assert result.different_ids == 40
    assert result.different == tuple(IdDifference(n, f"t{n}", f"t{39 - n}") for n in range(5))
    assert 'id 0 is "t0" in the target and "t39" in the drafter' in result.detail


def test_an_id_one_side_lacks_is_shown_as_none(tmp_path: Path) -> None:
    gap = changed(WORDS, "model/vocab", {"yes": 0, "no": 2})
    full = changed(WORDS, "model/vocab", {"yes": 0, "perhaps": 1, "no": 2})
    result = compared(tmp_path, {"tokenizer.json": full}, {"tokenizer.json": gap})
    assert result.different == (IdDifference(1, "perhaps", None),)


def test_text_handling_is_reported_without_making_ids_differ(tmp_path: Path) -> None:
    other = changed(BPE, "normalizer", {"type": "NFKC"})
    result = compared(tmp_path, {"tokenizer.json": BPE}, {"tokenizer.json": other})
    assert (result.relation, result.pipeline) == ("identical", ("normalizer",))


@pytest.mark.parametrize("flag", ["special", "lstrip", "rstrip", "normalized", "single_word"])
def test_a_flag_of_an_added_token_is_reported(tmp_path: Path, flag: str) -> None:
    pad = {"id": 6, "content": "<pad>", "special": True}
    other = changed(BPE, "added_tokens/1", pad | {flag: not pad.get(flag, False)})
    result = compared(tmp_path, {"tokenizer.json": BPE}, {"tokenizer.json": other})
    assert (result.relation, result.pipeline) == ("identical", ("added_tokens",))


def test_an_added_token_that_became_an_ordinary_one_is_reported(tmp_path: Path) -> None:
    other = changed(changed(BPE, "model/vocab/<pad>", 6), "added_tokens", BPE["added_tokens"][:1])
    result = compared(tmp_path, {"tokenizer.json": BPE}, {"tokenizer.json": other})
    assert (result.relation, result.pipeline) == ("identical", ("added_tokens",))


def test_flags_that_are_off_need_not_be_written(tmp_path: Path) -> None:
    off = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False)
    other = changed(BPE, "added_tokens", [token | off for token in BPE["added_tokens"]])
    assert compared(tmp_path, {"tokenizer.json": BPE}, {"tokenizer.json": other}).pipeline == ()


def test_padding_changes_no_text_handling(tmp_path: Path) -> None:
    more = changed(BPE, "added_tokens/2", {"id": 9, "content": "<think>", "lstrip": True})
    assert compared(tmp_path, {"tokenizer.json": more}, {"tokenizer.json": BPE}).pipeline == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("byte_fallback", True),
        ("fuse_unk", True),
        ("ignore_merges", True),
        ("unk_token", "<unk>"),
        ("continuing_subword_prefix", "##"),
        ("end_of_word_suffix", "</w>"),
    ],
)
def test_a_setting_of_the_model_is_reported(tmp_path: Path, key: str, value: Any) -> None:
    other = changed(BPE, f"model/{key}", value)
    result = compared(tmp_path, {"tokenizer.json": BPE}, {"tokenizer.json": other})
    assert (result.relation, result.pipeline) == ("identical", ("model settings",))


def test_settings_at_their_defaults_need_not_be_written(tmp_path: Path) -> None:
    settings = {"dropout": None, "byte_fallback": False, "unk_token": None, "end_of_word_suffix": ""}
    other = changed(BPE, "model", BPE["model"] | settings)
    assert compared(tmp_path, {"tokenizer.json": BPE}, {"tokenizer.json": other}).pipeline == ()


def test_settings_that_only_one_side_describes_are_not_compared(tmp_path: Path) -> None:
    old = {"vocab.json": BPE["model"]["vocab"], "added_tokens.json": {"<eos>": 5, "<pad>": 6}}
    whole = changed(BPE, "model/byte_fallback", True)
    assert compared(tmp_path, {"tokenizer.json": whole}, old).pipeline == ()


@pytest.mark.parametrize("same", [True, False])
def test_a_file_that_is_the_same_on_both_sides_is_parsed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    parsed: list[str] = []
    merges = tokenizer_files._merges

    def counted(name: str, value: Any) -> list[Any]:
        parsed.append(name)
        return merges(name, value)

    monkeypatch.setattr(tokenizer_files, "_merges", counted)
    settings = {"tokenizer_config.json": {"eos_token": "<eos>"}}
    other = BPE if same else changed(BPE, "model/vocab/z", 7)
    target = side(tmp_path / "target", {"tokenizer.json": BPE} | settings)
    drafter = side(tmp_path / "drafter", {"tokenizer.json": other} | settings)
    tokenizer_files._RECENT.clear()
    mine, theirs = read_tokenizer(target), read_tokenizer(drafter)
    assert (read_tokenizer(target), read_tokenizer(drafter)) == (mine, theirs)
    assert len(parsed) == (1 if same else 2)
    assert (mine is theirs) == same


def test_special_tokens_are_reported_when_both_sides_name_them(tmp_path: Path) -> None:
    files = [
        {"tokenizer.json": BPE, "tokenizer_config.json": {"eos_token": "<eos>", "bos_token": "a"}},
        {"tokenizer.json": BPE, "tokenizer_config.json": {"eos_token": {"content": "<pad>"}}},
    ]
    result = compared(tmp_path, *files)
    assert (result.relation, result.special) == ("identical", ("eos_token",))


def test_special_ids_say_which_file_they_are_from(tmp_path: Path) -> None:
    files = {
        "config.json": {"text_config": {"eos_token_id": 5}, "bos_token_id": None, "pad_token_id": "x"},
        "generation_config.json": {"eos_token_id": [6, 5]},
    }
    assert special_ids(side(tmp_path / "target", files)) == {
        "generation_config.json eos_token_id": [5, 6],
        "config.json eos_token_id": [5],
    }


def test_length_is_the_highest_id_plus_one(tmp_path: Path) -> None:
    tokenizer = read_tokenizer(side(tmp_path / "target", {"tokenizer.json": BPE}))
    assert tokenizer is not None
    assert tokenizer.length == 7


@pytest.mark.parametrize(
    ("target", "drafter", "part"),
    [
        ({}, {"tokenizer.json": BPE}, "no tokenizer file beside the target"),
        ({}, {}, "the target and the drafter"),
        ({"tokenizer.json": BPE}, {"tokenizer.model": "piece"}, "tokenizer.model cannot be compared"),
        ({"tokenizer.model": "one"}, {"tokenizer.model": "two"}, "cannot be compared"),
    ],
    ids=["target", "both", "kinds", "bytes"],
)
def test_missing_or_unread_files_are_unknown(
    tmp_path: Path, target: dict[str, Any], drafter: dict[str, Any], part: str
) -> None:
    result = compared(tmp_path, target, drafter)
    assert result.relation == "unknown"
    assert part in result.detail


def test_equal_sentencepiece_files_are_identical(tmp_path: Path) -> None:
    assert compared(tmp_path, {"tokenizer.model": "x"}, {"tokenizer.model": "x"}).relation == "identical"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": '{"model": '}, r"/target/tokenizer\.json is not JSON"),
        ({"tokenizer.json": []}, r"/target/tokenizer\.json: the document is \[\], expected an object"),
        ({"tokenizer.json": {}}, r"/model is None"),
        ({"tokenizer.json": {"model": {}}}, r"/model/vocab is None"),
        ({"tokenizer.json": {"model": {"vocab": {"a": -1}}}}, r"/model/vocab/a is -1, expected an id"),
        ({"tokenizer.json": {"model": {"vocab": {"a": True}}}}, r"/model/vocab/a is True"),
        ({"tokenizer.json": {"model": {"vocab": [["a"]]}}}, r"/model/vocab/0"),
        ({"tokenizer.json": changed(BPE, "model/merges", {"a": 1})}, r"/model/merges is"),
        ({"tokenizer.json": changed(BPE, "model/merges/1", ["a"])}, r"/model/merges/1 is \['a'\]"),
        ({"tokenizer.json": changed(BPE, "added_tokens", {})}, r"/added_tokens is"),
        ({"tokenizer.json": changed(BPE, "added_tokens/0", {"id": 5})}, r"/added_tokens/0 is"),
        (
            {"tokenizer.json": BPE, "tokenizer_config.json": {"added_tokens_decoder": {"five": {}}}},
            r"tokenizer_config\.json: /added_tokens_decoder/five",
        ),
        ({"vocab.json": {"a": "0"}}, r"vocab\.json: /a is '0'"),
        ({"tokenizer.json": changed(BPE, "decoder", json.loads("[" * 50 + "]" * 50))}, "at most 40 levels"),
    ],
    ids=lambda value: value.replace("\\", "") if isinstance(value, str) else "",
)
def test_malformed_files_are_refused_by_name(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        compared(tmp_path, files, {})


def test_merges_that_are_no_text_are_refused(tmp_path: Path) -> None:
    checkpoint = side(tmp_path / "target", {"vocab.json": {"a": 0}})
    (tmp_path / "target" / "merges.txt").write_bytes(b"a \xff\n")
    with pytest.raises(Refused, match=r"merges\.txt is not UTF-8 at byte 2"):
        read_tokenizer(checkpoint)
