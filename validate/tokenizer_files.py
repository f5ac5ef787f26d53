"""One tokenizer as its files describe it, without running it.

`read_tokenizer` takes tokenizer.json when there is one, else vocab.json with merges.txt, else only a hash of
a SentencePiece or tiktoken file, which can show that two tokenizers are equal and nothing more.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from draftpair.checkpoint import Checkpoint
from draftpair.checkpoint.hashing import hash_of
from draftpair.checkpoint.memo import per_checkpoint
from draftpair.checkpoint.wording import printable
from draftpair.errors import Refused

MODEL_SETTINGS = "model settings"
PIPELINE = ("normalizer", "pre_tokenizer", "decoder", MODEL_SETTINGS)
FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")
SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")

_MAIN = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_OPAQUE = ("tokenizer.model", "tiktoken.model", "tekken.json", "spiece.model")
_MODEL_DATA = ("type", "vocab", "merges")
_MAX_DEPTH = 40
_HINT = "take the tokenizer files from the original repository again"


@dataclass(frozen=True)
class Tokenizer:
    """What a tokenizer's files say; None for what they leave open.

    ``file`` is the one the vocabulary came from. ``pieces`` is id to string, added tokens included, and
    ``added`` the ids of those with the `FLAGS` that are set. ``rules`` are BPE merges as "left right", or
    Unigram scores by position. ``pipeline`` has the parts in `PIPELINE` as tokenizer.json gives them, without
    keys that are null or false; model settings are all of the model but its type, vocabulary and merges.
    ``special`` is the text of the tokens in `SPECIAL` by tokenizer_config.json. ``digest`` is the
    SHA-256 of a file that is not read here.
    """

    file: str
    kind: str | None = None
    pieces: dict[int, str] | None = None
    added: dict[int, frozenset[str]] = field(default_factory=dict)
    rules: list[Any] | None = None
    pipeline: dict[str, Any] | None = None
    special: dict[str, str] = field(default_factory=dict)
    digest: str | None = None

    @property
    def length(self) -> int | None:
        """Highest id plus one: how many embedding rows the tokenizer needs."""
        return None if self.pieces is None else max(self.pieces, default=-1) + 1


@per_checkpoint
def read_tokenizer(checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer beside a checkpoint's weights, or None when there is no tokenizer file.

    Checkpoints with the same files get the same object. Raises Refused, naming the file, when one is malformed.
    """
    if checkpoint.has_file(_MAIN):
        return _of_contents(checkpoint)
    if checkpoint.has_file("vocab.json"):
        return _from_vocab_json(checkpoint)
    for name in _OPAQUE:
        if checkpoint.has_file(name):
            return Tokenizer(name, digest=hashlib.sha256(checkpoint.read_bytes(name)).hexdigest())
    return None


_RECENT: OrderedDict[tuple[str | None, ...], Tokenizer] = OrderedDict()
_KEPT = 8


def _of_contents(checkpoint: Checkpoint) -> Tokenizer:
    """What both files say; parsed once for the same bytes, of which a pair has two copies and a list of pairs many."""
    files = (_MAIN, _SETTINGS)
    key = tuple(hash_of(checkpoint.read_bytes(name)) if checkpoint.has_file(name) else None for name in files)
    if key not in _RECENT:
        _RECENT[key] = _with_settings(checkpoint, *_parsed(checkpoint))
        while len(_RECENT) > _KEPT:
            _RECENT.popitem(last=False)
    return _RECENT[key]


def optional_object(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """The JSON object in a file, {} when there is no such file. Raises Refused when it is anything else."""
    return _object(checkpoint, name) if checkpoint.has_file(name) else {}


def as_ids(value: Any) -> list[int]:
    """The ids in a JSON value, one or a list of them, in ascending order; anything else is left out."""
    return sorted(item for item in (value if isinstance(value, list) else [value]) if _is_id(item))


def _parsed(checkpoint: Checkpoint) -> tuple[Tokenizer, dict[int, _Added]]:
    """What tokenizer.json says by itself, and its added tokens."""
    document, name = _object(checkpoint, _MAIN), _place(checkpoint, _MAIN)
    model = document.get("model")
    if not isinstance(model, dict):
        raise _bad(name, "/model", model, "an object")
    kind, vocab, merges = model.get("type"), model.get("vocab"), model.get("merges")
    rules = None if merges is None else _merges(name, merges)
    if isinstance(vocab, list):
        pieces, rules = _unigram(name, vocab)
    else:
        pieces = _inverted(name, "/model/vocab", vocab)
    # Older files have "" where newer ones have null.
    settings = {key: value for key, value in model.items() if key not in _MODEL_DATA and value != ""}
    parts = {**document, MODEL_SETTINGS: settings}
    return Tokenizer(
        _MAIN,
        kind if isinstance(kind, str) else None,
        pieces,
        rules=rules,
        pipeline={part: _without_defaults(name, f"/{part}", parts.get(part)) for part in PIPELINE},
    ), _added_list(name, document.get("added_tokens"))


def _from_vocab_json(checkpoint: Checkpoint) -> Tokenizer:
    vocab, more = _object(checkpoint, "vocab.json"), optional_object(checkpoint, "added_tokens.json")
    pieces = _inverted(_place(checkpoint, "vocab.json"), "", vocab)
    listed = _inverted(_place(checkpoint, "added_tokens.json"), "", more)
    added = {number: _Added(content) for number, content in listed.items()}
    rules = _merges_txt(checkpoint) if checkpoint.has_file("merges.txt") else None
    return _with_settings(checkpoint, Tokenizer("vocab.json", None, pieces, rules=rules), added)


def _with_settings(checkpoint: Checkpoint, tokenizer: Tokenizer, added: dict[int, _Added]) -> Tokenizer:
    """With all added tokens, and the texts of the special ones."""
    settings = optional_object(checkpoint, _SETTINGS)
    listed = settings.get("added_tokens_decoder")
    if isinstance(listed, dict):
        added = _added_decoder(_place(checkpoint, _SETTINGS), listed) | added
    return replace(
        tokenizer,
        pieces={**(tokenizer.pieces or {}), **{number: token.content for number, token in added.items()}},
        added={number: token.flags for number, token in added.items()},
        special=_special_tokens(settings),
    )


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Text of each special token that is named, as a string or as an object with ``content``."""
    named = ((name, settings.get(name)) for name in SPECIAL)
    texts = ((name, value.get("content") if isinstance(value, dict) else value) for name, value in named)
    return {name: text for name, text in texts if isinstance(text, str)}


def _inverted(name: str, where: str, vocab: Any) -> dict[int, str]:
    """String to id, turned into id to string. Raises Refused when a value is no id."""
    if not isinstance(vocab, dict):
        raise _bad(name, where, vocab, "an object of strings to ids")
    # All at once: a vocabulary has hundreds of thousands of entries.
    if not set(map(type, vocab.values())) <= {int} or min(vocab.values(), default=0) < 0:
        piece, number = next((piece, number) for piece, number in vocab.items() if not _is_id(number))
        raise _bad(name, f"{where}/{piece}", number, "an id")
    return dict(zip(vocab.values(), vocab.keys(), strict=True))


def _unigram(name: str, vocab: list[Any]) -> tuple[dict[int, str], list[Any]]:
    """Pieces by position, and their scores."""
    for number, entry in enumerate(vocab):
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str):
            raise _bad(name, f"/model/vocab/{number}", entry, "a [piece, score] pair")
    return {number: entry[0] for number, entry in enumerate(vocab)}, [entry[1] for entry in vocab]


def _merges(name: str, merges: Any) -> list[Any]:
    """Merges as "left right", whether tokenizer.json has strings (older files) or pairs."""
    if not isinstance(merges, list):
        raise _bad(name, "/model/merges", merges, "a list")
    return [_merge(name, number, merge) for number, merge in enumerate(merges)]


def _merge(name: str, number: int, merge: Any) -> str:
    if type(merge) is str:
        return merge
    if type(merge) is list and len(merge) == 2 and type(merge[0]) is str and type(merge[1]) is str:
        return f"{merge[0]} {merge[1]}"
    raise _bad(name, f"/model/merges/{number}", merge, "two strings")


def _merges_txt(checkpoint: Checkpoint) -> list[Any]:
    """The lines of merges.txt without its version line and blank lines."""
    place = _place(checkpoint, "merges.txt")
    try:
        text = checkpoint.read_bytes("merges.txt").decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"{place} is not UTF-8 at byte {error.start}", hint=_HINT) from error
    lines = (line.rstrip("\r") for line in text.removeprefix("\ufeff").split("\n"))
    return [line for line in lines if line and not line.startswith("#version:")]


@dataclass(frozen=True)
class _Added:
    """An added token: its text, and which of `FLAGS` are set."""

    content: str
    flags: frozenset[str] = frozenset()


def _added(entry: Any) -> _Added | None:
    """An added token from the object that either file has for it, or from its bare text; None when it is neither."""
    fields = entry if isinstance(entry, dict) else {"content": entry}
    content = fields.get("content")
    if not isinstance(content, str):
        return None
    return _Added(content, frozenset(flag for flag in FLAGS if fields.get(flag) is True))


def _added_list(name: str, entries: Any) -> dict[int, _Added]:
    """``added_tokens`` of tokenizer.json: objects with ``id`` and ``content``."""
    if entries is None:
        return {}
    if not isinstance(entries, list):
        raise _bad(name, "/added_tokens", entries, "a list")
    added = {}
    for number, entry in enumerate(entries):
        token = _added(entry)
        if token is None or not isinstance(entry, dict) or not _is_id(entry.get("id")):
            raise _bad(name, f"/added_tokens/{number}", entry, "an object with id and content")
        added[entry["id"]] = token
    return added


def _added_decoder(name: str, entries: Mapping[str, Any]) -> dict[int, _Added]:
    """``added_tokens_decoder`` of tokenizer_config.json: id (as text) to an object with ``content``."""
    added = {}
    for number, entry in entries.items():
        token = _added(entry)
        if not (number.isascii() and number.isdigit() and len(number) <= 10) or token is None:
            raise _bad(name, f"/added_tokens_decoder/{number}", entry, "an id and an object with content")
        added[int(number)] = token
    return added


def _without_defaults(name: str, where: str, value: Any) -> Any:
    """The value without keys that are null or false: libraries write such defaults when they save again."""
    if where.count("/") > _MAX_DEPTH:
        raise _bad(name, where, None, f"at most {_MAX_DEPTH} levels")
    if isinstance(value, dict):
        items = ((key, _without_defaults(name, f"{where}/{key}", item)) for key, item in value.items())
        return {key: item for key, item in items if item is not None and item is not False}
    if isinstance(value, list):
        return [_without_defaults(name, f"{where}/{number}", item) for number, item in enumerate(value)]
    return value


def _object(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    document = checkpoint.read_json(name)
    if not isinstance(document, dict):
        raise _bad(_place(checkpoint, name), "", document, "an object")
    return document


def _place(checkpoint: Checkpoint, name: str) -> str:
    """A file as messages name it: with its folder, for there are two tokenizers in a pair."""
    return checkpoint.shown(name)


def _is_id(value: Any) -> bool:
    return type(value) is int and value >= 0


def _bad(name: str, where: str, found: Any, expected: str) -> Refused:
    place = printable(where) if where else "the document"
    return Refused(f"{name}: {place} is {printable(repr(found), 60)}, expected {expected}", hint=_HINT)
