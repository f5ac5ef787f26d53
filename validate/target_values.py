"""What the values of a target's norms show: damage, and gains that a loader would take for something else.

Converters that add the 1 of 1 + w leave names, shapes and dtypes as they are. What shows a loader that a trunk was
converted is the order of axes of its convolutions, and some take a head for proof of a raw export. So a trunk that
contradicts its convolutions, and a head of the other form than its trunk, become garbage without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from draftpair.checkpoint import Checkpoint, to_float32
from draftpair.checkpoint.memo import per_checkpoint
from draftpair.checkpoint.wording import some
from draftpair.families import family_of_target
from draftpair.families.heads import HeadMatch
from draftpair.families.norms import MEANS, norm_conventions
from draftpair.families.record import Family
from draftpair.findings import Finding, Level
from draftpair.validate.norms import is_norm
from draftpair.validate.samples import is_remote, read_samples, spread

if TYPE_CHECKING:
    import numpy as np

TARGET_NORMS, REMOTE_TARGET_NORMS = 128, 32
"""How many norms of a target are read, besides those of its head."""


@per_checkpoint
def trunk_values(checkpoint: Checkpoint) -> tuple[Finding, ...]:
    """What the values of a target's own norms show, its head left out."""
    return tuple(check_target_values(checkpoint, None))


def check_target_values(checkpoint: Checkpoint, head: HeadMatch | None) -> Iterator[Finding]:
    """What the values of a target's norms show, and of those of its own head if it is given.

    Norms that are not finite are an error, norms of zeros a warning. Where the family publishes w, the gain being
    1 + w, the trunk's norms are told by bits and means: a 1 added twice, and gains or w in a file whose convolutions
    say the opposite to a loader, are errors; a head that is stored the other way than the trunk is a warning. A raw
    trunk with a raw head is sound, and so is a converted one with a converted head. `TARGET_NORMS` norms are read,
    evenly spaced, and the head's.
    """
    family = head.family if head else family_of_target(checkpoint.config)
    inside = {tensor.name for tensor in head.tensors} if head else _own_prefix(checkpoint, family)
    norms = [tensor for tensor in checkpoint.tensors.values() if is_norm(tensor)]
    most = REMOTE_TARGET_NORMS if is_remote(checkpoint) else TARGET_NORMS
    trunk = spread([t for t in norms if t.name not in inside], most)
    own = [t for t in norms if t.name in inside]
    vectors = {
        sample.tensor.name: to_float32(sample.data, sample.tensor.dtype)
        for sample in read_samples(checkpoint, [*trunk, *own])
    }
    yield from _target_damage(vectors)
    if family is not None and any(rule.norm == "zero_centred" for rule in family.rules):
        telling = {name: v for name, v in vectors.items() if _tells(name, v) and name not in inside}
        trunk_is = _agreed(telling)
        yield from _trunk_convention(checkpoint, family, trunk_is, telling)
        yield from _mixed(head, trunk_is, vectors) if head else ()


def _target_damage(vectors: Mapping[str, np.ndarray]) -> Iterator[Finding]:
    import numpy as np

    checks: tuple[tuple[Level, str, Callable[[np.ndarray], bool]], ...] = (
        ("error", "hold values that are not finite", lambda values: not np.isfinite(values).all()),
        ("warning", "hold nothing but zeros", lambda values: not values.any()),
    )
    for level, what, is_bad in checks:
        if bad := [name for name, values in vectors.items() if is_bad(values)]:
            yield Finding(
                "TARGET-NORM-VALUES",
                level,
                f"norms {what}: {some(bad)}",
                where=bad[0],
                found=len(bad),
                hint="download the checkpoint again",
            )


# Modules whose norms hold the gain where those of the layers hold w.
_PLAIN_PARTS = frozenset({"linear_attn", "visual", "vision_tower", "vision_model", "audio_tower"})


def _tells(name: str, values: np.ndarray) -> bool:
    """Whether a norm of the trunk is of those whose mean is known for w and for gains."""
    *path, module, _ = ("", "", *name.split("."))
    return module in MEANS and _PLAIN_PARTS.isdisjoint(path) and bool(values.size and values.any())


def _own_prefix(checkpoint: Checkpoint, family: Family | None) -> set[str]:
    """The tensors below the prefixes of a head that has its own: they are not the trunk's."""
    if family is None or family.head is None or not family.head.owns_prefix:
        return set()
    return {name for name in checkpoint.tensors if name.startswith(family.head.prefixes)}


def _agreed(vectors: Mapping[str, np.ndarray]) -> str | None:
    """How norms are stored, when two or more tell and none of them tells otherwise.

    Of norms with a 1 too many not all show more than that they are no w.
    """
    found = [e.convention for e in norm_conventions(vectors, converted=True).values() if e.convention]
    if found.count("doubled") > 1 and set(found) <= {"doubled", "shifted"}:
        return "doubled"
    return found[0] if len(found) > 1 and len(set(found)) == 1 else None


_SPOKEN = {"zero-centred": "w", "shifted": "1 + w", "doubled": "2 + w"}


def _trunk_convention(
    checkpoint: Checkpoint, family: Family, trunk_is: str | None, vectors: Iterable[str]
) -> Iterator[Finding]:
    axes = _axes(checkpoint)
    expected = {"mlx": "shifted", "raw": "zero-centred"}.get(axes[0]) if axes else None
    if trunk_is is None or (trunk_is != "doubled" and expected in (None, trunk_is)):
        return
    reason = f", and {axes[1]}" if axes and trunk_is != "doubled" else ", the 1 added twice"
    yield Finding(
        "TARGET-NORMS",
        "error",
        f"the target's norms hold {_SPOKEN[trunk_is]}{reason}: a loader would make other gains of them",
        where=min(vectors),
        expected=expected or "shifted",
        found=trunk_is,
        hint=f"convert it again from {family.target.source}",
    )


def _axes(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """In whose order the axes of the trunk's convolutions are, by which loaders tell a conversion; and in words."""
    for tensor in checkpoint.tensors.values():
        if tensor.name.endswith("conv1d.weight") and len(tensor.shape) == 3:
            _, before, after = tensor.shape
            shape = f"{tensor.name} of shape {list(tensor.shape)}"
            if after == 1 < before:
                return "mlx", f"{shape} is in MLX's order of axes"
            if before == 1 < after:
                return "raw", f"{shape} is in the order of a raw export"
    return None


def _mixed(head: HeadMatch, trunk_is: str | None, vectors: Mapping[str, np.ndarray]) -> Iterator[Finding]:
    names = [
        stored.tensors[0].name
        for matched in head.matched
        for stored in matched.sources
        if matched.rule.norm == "zero_centred" and stored.tensors[0].name in vectors
    ]
    own = norm_conventions({name: vectors[name] for name in names}, converted=True)
    said = {name: evidence for name, evidence in own.items() if evidence.convention}
    other = [name for name, evidence in said.items() if evidence.convention != trunk_is]
    doubled = [name for name in other if said[name].convention == "doubled"]
    wrong = doubled or (other if trunk_is else [])
    if wrong:
        first = said[wrong[0]]
        yield Finding(
            "HEAD-NORMS",
            "warning",
            f"the head's norms hold {_SPOKEN[str(first.convention)]} and the target's "
            f"{_SPOKEN.get(str(trunk_is), 'do not tell')}: {some(wrong)} ({first.reason})",
            where=wrong[0],
            expected=trunk_is,
            found=first.convention,
            hint="a loader that treats both alike gets one of them wrong; split-mtp looks at the head's own values",
        )
