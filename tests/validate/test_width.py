"""The width of a verify block: who may decide it, in which order, and within which bounds."""

from __future__ import annotations

from typing import Any

import pytest

from draftpair.checkpoint import ConfigView
from draftpair.errors import Refused, Usage
from draftpair.families import load_families
from draftpair.validate.width import block_width

FAMILY = load_families()["glm4_moe_lite_mtp"]
DECLARED = {"block_size": 3, "text_config": {"num_nextn_predict_layers": 1}}


def width(config: dict[str, Any], explicit: int | None = None, **environ: str) -> tuple[int, str]:
    decided = block_width(explicit, environ, ConfigView(config), FAMILY)
    proposals = "1 proposal" if decided.rows == 2 else f"{decided.rows - 1} proposals"
    assert decided.meaning == f"{decided.rows} rows to verify: the last accepted token and {proposals}"
    return decided.rows, decided.source


def test_the_option_wins() -> None:
    assert width(DECLARED, 5, LLAMA_ARG_DRAFT_BLOCK_SIZE="6", MLXCEL_DRAFT_BLOCK_SIZE="7") == (
        5,
        "--draft-block-size",
    )


def test_then_the_options_own_variable_then_mlxcels() -> None:
    both = {"LLAMA_ARG_DRAFT_BLOCK_SIZE": "6", "MLXCEL_DRAFT_BLOCK_SIZE": "7"}
    assert width(DECLARED, **both) == (6, "LLAMA_ARG_DRAFT_BLOCK_SIZE")
    assert width(DECLARED, MLXCEL_DRAFT_BLOCK_SIZE="7") == (7, "MLXCEL_DRAFT_BLOCK_SIZE")


def test_then_what_the_drafter_declares() -> None:
    assert width(DECLARED) == (3, "block_size of the drafter")
    assert width({"text_config": {"num_nextn_predict_layers": 1}}) == (
        2,
        "num_nextn_predict_layers + 1 of the drafter",
    )
    assert width(DECLARED | {"block_size": None})[0] == 2


def test_then_the_default_of_the_kind() -> None:
    assert width({}) == (4, "default for mtp")


def test_an_empty_variable_counts_as_unset() -> None:
    assert width(DECLARED, LLAMA_ARG_DRAFT_BLOCK_SIZE="", MLXCEL_DRAFT_BLOCK_SIZE="")[0] == 3


def test_text_in_mlxcels_variable_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert width(DECLARED, MLXCEL_DRAFT_BLOCK_SIZE="wide")[0] == 3
    assert "MLXCEL_DRAFT_BLOCK_SIZE is 'wide', not a whole number" in caplog.text


def test_text_in_the_options_variable_is_wrong_usage() -> None:
    with pytest.raises(Usage, match="LLAMA_ARG_DRAFT_BLOCK_SIZE is 'wide'; expected a whole number"):
        width(DECLARED, LLAMA_ARG_DRAFT_BLOCK_SIZE="wide")


@pytest.mark.parametrize("explicit", [-1, 0, 1, 17])
def test_a_requested_width_outside_the_bounds_is_wrong_usage(explicit: int) -> None:
    with pytest.raises(
        Usage, match=rf"--draft-block-size is {explicit}; expected 2 to 16 for glm4_moe_lite_mtp"
    ):
        width(DECLARED, explicit)


@pytest.mark.parametrize("declared", [0, 1, 17])
def test_a_declared_width_outside_the_bounds_is_refused(declared: int) -> None:
    with pytest.raises(Refused, match=rf"block width of {declared} \(block_size of the drafter\)"):
        width(DECLARED | {"block_size": declared})


def test_a_declared_width_that_is_no_number_is_refused() -> None:
    with pytest.raises(Refused, match="block_size"):
        width(DECLARED | {"block_size": "2"})
