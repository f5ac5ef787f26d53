"""What holds for every family of `fixtures.tapped`: inventories of other implementations, and no false alarm."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.tapped import errors, expected_shapes, family_of, variants, write_drafter

FAMILIES = ("deepspec_dspark", "dflash", "dflash2", "eagle3", "lfm2_dspark", "speculators_mtp", "xpress")
REFUSED = {"xpress": ["FAMILY-UNSUPPORTED"]}
VARIANTS = pytest.mark.parametrize(
    ("family", "variant"), [(family, variant) for family in FAMILIES for variant in variants(family)]
)


@VARIANTS
def test_names_and_shapes_are_those_of_other_implementations(
    tmp_path: Path, family: str, variant: str
) -> None:
    drafter = write_drafter(tmp_path, family, variant)
    assert expected_shapes(drafter) == variants(family)[variant]["tensors"]


@VARIANTS
def test_a_whole_drafter_is_recognised_and_has_no_fault(tmp_path: Path, family: str, variant: str) -> None:
    drafter = write_drafter(tmp_path, family, variant)
    assert family_of(drafter) == family
    assert list(errors(drafter)) == REFUSED.get(family, [])
