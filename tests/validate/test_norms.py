"""Norms that hold another number than the engine expects: each alone among right ones, and all of them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftpair import api
from draftpair.checkpoint import open_checkpoint
from draftpair.families import family
from draftpair.findings import Finding
from draftpair.validate.norms import check_norms, wanted_norms
from fixtures import glm4_moe, qwen3_5, qwen4_exp
from fixtures.split_heads import Words, edit_tensors, split
from fixtures.weights import Array, bell, bf16_bits, on_bf16_grid

FAMILIES: dict[str, Callable[..., Path]] = {
    "qwen3_5_mtp": qwen3_5.write_checkpoint,
    "qwen4_exp_mtp": qwen4_exp.write_checkpoint,
}
# What has to be added to a norm of a drafter as it ought to be, for it to be w - 1.
TO_DIMINISHED = {"qwen3_5_mtp": -2, "qwen4_exp_mtp": -1}
NORMS = [
    (name, output.name.format(layer=0))
    for name in FAMILIES
    for rule in family(name).rules
    if rule.norm
    for output in rule.outputs
]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("norms")
    return {name: split(write(folder / f"raw {name}"), folder / name) for name, write in FAMILIES.items()}


def added(by: float, *names: str) -> Callable[[Words], None]:
    def change(tensors: Words) -> None:
        for name in names:
            values = (tensors[name][0].astype("<u4") << 16).view("<f4") + np.float32(by)
            tensors[name] = (bf16_bits(values), "BF16")

    return change


def finding(drafter: Path, folder: Path, change: Callable[[Words], None]) -> dict[str, Any] | None:
    shutil.copytree(drafter, folder)
    (folder / "draftpair-manifest.json").unlink()
    edit_tensors(folder, change)
    report = api.validate(folder)
    found = [f for f in report["findings"] if f["rule"] == "DRAFTER-NORMS"]
    assert (report["verdict"] == "unsafe") == bool(found)
    return found[0] if found else None


@pytest.mark.parametrize(("name", "norm"), NORMS)
def test_one_norm_that_1_was_taken_off_too_often(
    drafters: dict[str, Path], tmp_path: Path, name: str, norm: str
) -> None:
    found = finding(drafters[name], tmp_path / "drafter", added(TO_DIMINISHED[name], norm))
    assert found
    assert found["where"] == norm
    # These do not tell w - 1 from w by their mean: both are wrong where the gain is wanted.
    unsure = name == "qwen3_5_mtp" and norm.split(".")[-2] in ("norm", "q_norm", "k_norm")
    assert found["found"] in (("reduced", "zero-centred", "diminished") if unsure else ("diminished",))


@pytest.mark.parametrize("name", FAMILIES)
def test_all_norms_that_1_was_taken_off_too_often(
    drafters: dict[str, Path], tmp_path: Path, name: str
) -> None:
    norms = [norm for owner, norm in NORMS if owner == name]
    found = finding(drafters[name], tmp_path / "drafter", added(TO_DIMINISHED[name], *norms))
    assert found
    assert found["message"].count(".weight") >= 5


@pytest.mark.parametrize("profile", qwen3_5.PROFILES)
@pytest.mark.parametrize("seed", range(3))
def test_norms_as_they_ought_to_be_pass(tmp_path: Path, profile: str, seed: int) -> None:
    raw = qwen3_5.write_checkpoint(tmp_path / "raw", profile=profile, seed=seed)
    assert api.validate(split(raw, tmp_path / "drafter"))["findings"] == []


@pytest.mark.parametrize("seed", range(6))
def test_zero_centred_norms_as_they_ought_to_be_pass(tmp_path: Path, seed: int) -> None:
    raw = qwen4_exp.write_checkpoint(tmp_path / "raw", seed=seed)
    assert api.validate(split(raw, tmp_path / "drafter"))["findings"] == []


@pytest.mark.parametrize(
    ("name", "by", "words"),
    [
        ("qwen3_5_mtp", -1, "stored as w where"),
        ("qwen3_5_mtp", 1, "1 added twice"),
        ("qwen4_exp_mtp", 1, "stored as 1 + w where"),
    ],
)
def test_the_message_says_how_they_are_stored(
    drafters: dict[str, Path], tmp_path: Path, name: str, by: int, words: str
) -> None:
    norms = [norm for owner, norm in NORMS if owner == name]
    found = finding(drafters[name], tmp_path / "drafter", added(by, *norms))
    assert found
    assert words in found["message"]


# Families whose norms are plain: the gain is stored as it was trained.

PLAIN = "glm4_moe_mtp"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    return split(glm4_moe.write_checkpoint(folder / "raw"), folder / "drafter")


def found_in(
    drafter: Path, folder: Path, change: Callable[[Words], object], name: str = PLAIN
) -> list[Finding]:
    shutil.copytree(drafter, folder)
    edit_tensors(folder, change)
    return list(check_norms(open_checkpoint(folder), family(name)))


def norms_of(drafter: Path, name: str = PLAIN) -> list[str]:
    return sorted(wanted_norms(open_checkpoint(drafter), family(name)))


def gains(values: Callable[[str, tuple[int, ...]], Array], *names: str, dtype: str = "BF16") -> Any:
    """Gives norms other values, by their name and shape."""

    def change(tensors: Words) -> None:
        for name in names:
            new = values(name, tensors[name][0].shape)
            words = bf16_bits(new) if dtype == "BF16" else np.ascontiguousarray(new, "<f4").view("<u4")
            tensors[name] = (words, dtype)

    return change


def test_every_norm_of_a_plain_family_is_looked_at(plain: Path) -> None:
    assert set(wanted_norms(open_checkpoint(plain), family(PLAIN)).values()) == {"plain"}
    assert len(norms_of(plain)) >= 5
    assert found_in(plain, plain.with_name("same"), lambda tensors: None) == []


def test_every_norm_of_a_family_with_rules_is_as_the_rules_say(drafters: dict[str, Path]) -> None:
    for name, how in (("qwen3_5_mtp", "shifted"), ("qwen4_exp_mtp", "zero-centred")):
        wanted = wanted_norms(open_checkpoint(drafters[name]), family(name))
        assert [wanted[norm] for owner, norm in NORMS if owner == name and norm in wanted] == [how] * len(
            [norm for owner, norm in NORMS if owner == name and norm in wanted]
        )


def test_bits_show_a_1_that_was_taken_off_one_plain_norm(plain: Path, tmp_path: Path) -> None:
    for place, norm in enumerate(norms_of(plain)):
        (finding,) = found_in(plain, tmp_path / str(place), added(-1, norm))
        assert (finding.rule, finding.level, finding.where) == ("DRAFTER-NORMS", "error", norm)
        assert finding.found == "reduced"


def test_small_gains_less_1_are_negative_and_seen(plain: Path, tmp_path: Path) -> None:
    """Gains as small as those of SmolLM2, around 0.3."""
    names = norms_of(plain)
    trained = gains(lambda name, shape: 0.3 + bell(2, name, shape, 0.05), *names)
    assert found_in(plain, tmp_path / "sound", trained) == []
    less = gains(lambda name, shape: on_bf16_grid(0.3 + bell(2, name, shape, 0.05)) - 1, *names)
    (finding,) = found_in(plain, tmp_path / "less", less)
    assert (finding.level, finding.found) == ("error", "negative")


@pytest.mark.parametrize("share", [0.90, 1.0])
def test_gains_that_turn_nearly_every_sign(plain: Path, tmp_path: Path, share: float) -> None:
    norm = norms_of(plain)[0]

    def turned(name: str, shape: tuple[int, ...]) -> Array:
        values = 1 + bell(3, name, shape, 0.2)
        values[: round(share * values.size)] *= -1
        return values

    found = found_in(plain, tmp_path / "turned", gains(turned, norm))
    assert [(finding.level, finding.where) for finding in found] == ([("error", norm)] if share == 1 else [])


def around_zero(name: str, shape: tuple[int, ...]) -> Array:
    """As the first norm of SmolLM2 is, and as gains less 1 are; not on the grid that taking 1 off leaves."""
    return bell(4, name, shape, 0.1)


def test_one_plain_norm_around_0_may_be_so_and_most_may_not(plain: Path, tmp_path: Path) -> None:
    names = norms_of(plain)
    assert found_in(plain, tmp_path / "one", gains(around_zero, names[0])) == []
    (finding,) = found_in(plain, tmp_path / "most", gains(around_zero, *names))
    assert (finding.level, finding.found) == ("error", "around 0")
    assert "% of it negative" in finding.message


def test_a_1_added_to_plain_norms_in_float32_shows_in_the_bits(plain: Path, tmp_path: Path) -> None:
    norm = norms_of(plain)[0]

    def raised(name: str, shape: tuple[int, ...]) -> Array:
        return on_bf16_grid(0.4 + bell(5, name, shape, 0.1)) + 1

    (finding,) = found_in(plain, tmp_path / "raised", gains(raised, norm, dtype="F32"))
    assert (finding.level, finding.where, finding.found) == ("error", norm, "raised")

    def half(name: str, shape: tuple[int, ...]) -> Array:
        """Gains that were trained in float16, close to 1: less 1 they are bfloat16 numbers as well."""
        return (1 + bell(5, name, shape, 0.03)).astype("<f2").astype("<f4")

    assert found_in(plain, tmp_path / "half", gains(half, norm, dtype="F32")) == []


def test_no_gain_below_1_in_any_plain_norm_is_doubtful(plain: Path, tmp_path: Path) -> None:
    names = norms_of(plain)
    (finding,) = found_in(plain, tmp_path / "all", added(1, *names))
    assert (finding.rule, finding.level, finding.found) == ("DRAFTER-NORMS", "warning", "raised")
    assert found_in(plain, tmp_path / "all but one", added(1, *names[1:])) == []


def test_norms_that_do_not_tell_are_said_to_be_undecided(drafters: dict[str, Path], tmp_path: Path) -> None:
    """Values that fit w and gains alike, and are of no grid that would tell."""
    name = "qwen3_5_mtp"
    names = norms_of(drafters[name], name)
    unclear = {"layers.0.self_attn.q_norm.weight": 0.9, "norm.weight": 2.3}

    def between(norm: str, shape: tuple[int, ...]) -> Array:
        return unclear.get(norm, 0.6) + bell(6, norm, shape, 0.01).astype("<f4")

    change = gains(between, *names, dtype="F32")
    (finding,) = found_in(drafters[name], tmp_path / "unclear", change, name)
    assert (finding.rule, finding.level) == ("DRAFTER-NORMS-UNDECIDED", "note")
    assert finding.found == len(names)


def test_gains_of_1_plus_w_that_turn_nearly_every_sign(drafters: dict[str, Path], tmp_path: Path) -> None:
    name, norm = "qwen4_exp_mtp", next(norm for owner, norm in NORMS if owner == "qwen4_exp_mtp")
    turned = gains(lambda own, shape: -2.2 + bell(7, own, shape, 0.1), norm)
    (finding,) = found_in(drafters[name], tmp_path / "turned", turned, name)
    assert (finding.level, finding.where) == ("error", norm)
    assert finding.found in ("diminished", "negative")


def test_norms_of_one_number_say_nothing(plain: Path, tmp_path: Path) -> None:
    change = gains(lambda name, shape: np.ones(shape), *norms_of(plain))
    assert found_in(plain, tmp_path / "ones", change) == []
