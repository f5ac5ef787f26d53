"""The drafter's block width: the bonus token and the proposals that follow it."""

from __future__ import annotations

from dataclasses import dataclass

from draftpair.errors import Refused, Usage
from draftpair.families.record import SplitFamily
from draftpair.families.specs import BlockSizeSpec


@dataclass(frozen=True)
class BlockSize:
    """`value` counts the bonus token; `origin` says where it came from."""

    value: int
    origin: str


def choose_block_size(family: SplitFamily, depth: int, asked: int | None) -> BlockSize:
    """The width asked for, else the head's `depth` in layers plus the family's constant.

    Raises Usage for an option outside the family's bounds, Refused for a config outside of them.
    """
    spec = family.drafter.block_size
    if asked is not None:
        if problem := _problem(asked, spec):
            raise Usage(f"--block-size ({asked}) {problem}")
        return BlockSize(asked, "--block-size")
    more = spec.depth_plus or 0
    default = BlockSize(depth + more, f"{depth} head layer(s) + {more}")
    if problem := _problem(default.value, spec):
        raise Refused(
            f"the default block size {default.value} ({default.origin}) {problem}",
            hint=f"give --block-size {spec.minimum} to {spec.maximum}",
        )
    return default


def _problem(value: int, spec: BlockSizeSpec) -> str | None:
    if value > spec.maximum:
        return f"is above the maximum {spec.maximum}: it becomes the width of the block the target verifies"
    if value < spec.minimum:
        return f"is below the minimum {spec.minimum}: it counts the bonus token, so nothing would be proposed"
    return None
