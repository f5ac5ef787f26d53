"""What the weight files say about each other without an index: shared tensors, gaps in their numbering."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from itertools import islice

from draftpair.checkpoint.header import Header, TensorInfo
from draftpair.checkpoint.index import Index
from draftpair.checkpoint.wording import count, printable, some
from draftpair.findings import Finding

SINGLE_NAME = "model.safetensors"

_NUMBERED = re.compile(r"(?P<stem>.*)-(?P<number>\d{1,9})-of-(?P<total>\d{1,9})\.safetensors", re.DOTALL)


def union(headers: Mapping[str, Header], index: Index | None) -> tuple[dict[str, TensorInfo], list[Finding]]:
    """All tensors by name, and one finding for each pair of files that share some.

    Of two copies the one that the index names counts, else that of the first file by name.
    """
    tensors: dict[str, TensorInfo] = {}
    shared: dict[tuple[str, str], list[str]] = {}
    for file in sorted(headers):
        held = headers[file].tensors
        for name in tensors.keys() & held.keys():
            shared.setdefault((tensors[name].file, file), []).append(name)
        tensors.update((name, tensor) for name, tensor in held.items() if name not in tensors)
    decided = _by_index([name for names in shared.values() for name in names], headers, index)
    tensors.update(decided)
    return tensors, [_duplicate(pair, sorted(names), decided) for pair, names in sorted(shared.items())]


def named_files(headers: Collection[str], index: Index | None) -> set[str]:
    """The files a reader takes: those the index names, else `model.safetensors`, else all there are."""
    if index is not None:
        return set(index.shards) & set(headers)
    return {SINGLE_NAME} if SINGLE_NAME in headers else set(headers)


def check_single(headers: Mapping[str, Header]) -> list[Finding]:
    """Files beside `model.safetensors` in a folder without an index."""
    if SINGLE_NAME not in headers:
        return []
    return [
        Finding(
            "FILE-UNINDEXED",
            "warning",
            f"there is no usable index, so readers that take {SINGLE_NAME} alone miss the "
            f"{count(len(headers[file].tensors), 'tensor')} of {printable(file)}",
            file,
            hint="Write an index that names both files, or move the other one away.",
        )
        for file in sorted(headers)
        if file != SINGLE_NAME
    ]


def check_numbering(present: Collection[str], index: Index | None) -> list[Finding]:
    """Gaps in `name-00001-of-00003` sets, as an interrupted download leaves them.

    With an index only the sets that it uses are looked at, and files that it names are left to it.
    """
    named = set(index.shards) if index is not None else set(present)
    sets: dict[tuple[str, int, int, int], set[int]] = {}
    for file in {*present, *named}:
        match = _NUMBERED.fullmatch(file)
        if match:
            stem, number, total = match["stem"], match["number"], match["total"]
            sets.setdefault((stem, len(number), len(total), int(total)), set()).add(int(number))
    return [
        _gap(key, numbers)
        for key, numbers in sorted(sets.items())
        if len(numbers) < key[3] and any(_name(key, number) in named for number in numbers)
    ]


def _by_index(names: list[str], headers: Mapping[str, Header], index: Index | None) -> dict[str, TensorInfo]:
    """The copies that the index names, for those of `names` that it decides."""
    weight_map = index.weight_map if index is not None else {}
    held = ((name, headers[weight_map[name]].tensors) for name in names if weight_map.get(name) in headers)
    return {name: tensors[name] for name, tensors in held if name in tensors}


def _duplicate(files: tuple[str, str], names: list[str], decided: Collection[str]) -> Finding:
    """An error unless the index says for each tensor which copy is meant."""
    both = f"{printable(files[0])} and {printable(files[1])}"
    open_question = [name for name in names if name not in decided]
    which = (
        "the index does not say which copy is meant"
        if open_question
        else "the copy that the index names counts"
    )
    return Finding(
        "TENSOR-DUPLICATE",
        "error" if open_question else "warning",
        f"{both} both hold {count(len(names), 'tensor')}, and {which}: {some(names)}",
        files[1],
        "each tensor in one file",
        names[:5],
        "Move the file that does not belong here away.",
    )


def _gap(key: tuple[str, int, int, int], numbers: Collection[int]) -> Finding:
    absent = [_name(key, number) for number in islice(_absent(numbers, key[3]), 5)]
    many = key[3] - len(numbers)
    more = f" and {many - len(absent):,} more" if many > len(absent) else ""
    return Finding(
        "INDEX-SHARD-MISSING",
        "error",
        f"incomplete download: the numbering promises {count(key[3], 'file')}, {many:,} of them "
        f"{'is' if many == 1 else 'are'} not here: {some(absent)}{more}",
        absent[0],
        key[3],
        len(numbers),
        "Download the checkpoint again, or fetch the missing files with `hf download`.",
    )


def _absent(numbers: Collection[int], total: int) -> Iterator[int]:
    first = 0 if 0 in numbers else 1
    return (number for number in range(first, first + total) if number not in numbers)


def _name(key: tuple[str, int, int, int], number: int) -> str:
    stem, number_width, total_width, total = key
    return f"{stem}-{number:0{number_width}d}-of-{total:0{total_width}d}.safetensors"
