"""XPress drafters: recognised, checked, and refused by name; never taken for the DFlash whose backbone they have."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.tapped import (
    TensorChange,
    drop,
    errors,
    family_of,
    narrow,
    pair,
    top,
    without,
    write_drafter,
    write_target,
)

FAMILY = "xpress"
VARIANT = "speculators"


@pytest.mark.parametrize("missing", ["architectures", "speculators_model_type", "xpress_rank"])
def test_it_is_recognised_and_refused_by_name(tmp_path: Path, missing: str) -> None:
    drafter = write_drafter(tmp_path, FAMILY, VARIANT, without(missing))
    assert family_of(drafter) == FAMILY
    assert "XPress" in errors(drafter)["FAMILY-UNSUPPORTED"].message


def test_no_target_makes_it_safe(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    verdict = pair(target, write_drafter(tmp_path / "drafter", FAMILY, VARIANT))
    assert verdict.name == "unsafe"
    assert (verdict.pair or {})["drafter_family"] == FAMILY


def test_a_config_that_says_dflash_is_a_contradiction(tmp_path: Path) -> None:
    drafter = write_drafter(
        tmp_path, FAMILY, VARIANT, top(speculators_model_type="dflash", architectures=["DFlashDraftModel"])
    )
    assert family_of(drafter) == FAMILY
    assert "which is dflash" in errors(drafter)["DRAFTER-MODEL-TYPE"].message


@pytest.mark.parametrize("change", [drop("refiner_head.readout.weight"), narrow("refiner_head.mix_l")])
def test_it_stays_refused_whatever_its_tensors(tmp_path: Path, change: TensorChange) -> None:
    assert "FAMILY-UNSUPPORTED" in errors(write_drafter(tmp_path, FAMILY, VARIANT, tensors=change))
