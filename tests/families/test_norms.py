"""How a norm is stored, from its values: every bfloat16 number, the three releases, and the ways it goes wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftpair.checkpoint import open_checkpoint
from draftpair.families.norms import NormEvidence, converter, norm_conventions
from fixtures.qwen3_5 import PROFILES, write_checkpoint, write_mlx_checkpoint
from fixtures.qwen_parts import seeded
from fixtures.weights import on_bf16_grid

Vectors = dict[str, np.ndarray]
PLACES = {
    "input_layernorm": "layers.0.",
    "post_attention_layernorm": "layers.0.",
    "q_norm": "layers.0.self_attn.",
    "k_norm": "layers.0.self_attn.",
}
TINY, LARGE = (64, 64), (1024, 256)
STORED = {
    "bfloat16": on_bf16_grid,
    "float16": lambda values: values.astype("<f2").astype("<f4"),
    "float32": lambda values: values.astype("<f4"),
}


def norms(profile: str, hidden: int = LARGE[0], head_dim: int = LARGE[1]) -> Vectors:
    """The zero-centred norms of a head, as one of the releases has them."""
    widths = dict.fromkeys(PROFILES[profile], hidden) | {"q_norm": head_dim, "k_norm": head_dim}
    return {
        f"{PLACES.get(module, '')}{module}.weight": seeded(
            0, f"mtp.{module}.weight", (width,), PROFILES[profile]
        )
        for module, width in widths.items()
    }


def gains(vectors: Vectors, stored: str = "bfloat16") -> Vectors:
    return {name: STORED[stored](values + np.float32(1)) for name, values in vectors.items()}


def found(evidence: dict[str, NormEvidence]) -> set[str | None]:
    return {one.convention for one in evidence.values()}


def every_bfloat16() -> np.ndarray:
    values = (np.arange(65536, dtype="<u4") << 16).view("<f4")
    return values[np.isfinite(values) & (np.abs(values) <= 128)]


@pytest.mark.parametrize("stored", STORED)
def test_no_sum_of_one_and_a_bfloat16_number_is_taken_for_the_number(stored: str) -> None:
    """The ground that the bits stand on, shown for every bfloat16 number there is."""
    sums = STORED[stored](every_bfloat16() + np.float32(1))
    (evidence,) = norm_conventions({"norm.weight": sums}, converted=False).values()
    assert evidence.convention == "shifted", evidence.reason


@pytest.mark.parametrize("sizes", [TINY, LARGE], ids=["tiny", "1024 wide"])
@pytest.mark.parametrize("profile", PROFILES)
def test_norms_as_the_releases_have_them(profile: str, sizes: tuple[int, int]) -> None:
    raw = norms(profile, *sizes)
    assert found(norm_conventions(raw, converted=False)) == {"zero-centred"}
    for stored in STORED:
        assert found(norm_conventions(gains(raw, stored), converted=True)) == {"shifted"}


def test_a_raw_last_norm_with_gains_around_three_is_not_taken_for_gains() -> None:
    raw = norms("4B")
    assert raw["norm.weight"].mean() > 2.5
    evidence = norm_conventions(raw, converted=False)["norm.weight"]
    assert evidence.convention == "zero-centred"
    assert "all other norms of the head are zero-centred" in evidence.reason


def test_gains_below_a_half_are_not_taken_for_raw() -> None:
    """The norms before the fusion damp: their gains have means of 0.27 and 0.49."""
    shifted = gains(norms("35B-A3B"))
    assert shifted["pre_fc_norm_embedding.weight"].mean() < 0.3
    evidence = norm_conventions(shifted, converted=True)
    assert evidence["pre_fc_norm_embedding.weight"].convention == "shifted"
    assert evidence["pre_fc_norm_hidden.weight"].convention == "shifted"


def test_each_tensor_is_decided_for_itself() -> None:
    """A converter that missed the norms whose name does not end in norm: these are raw, the others are not."""
    raw = norms("27B")
    missed = {name: values for name, values in raw.items() if "pre_fc" in name}
    evidence = norm_conventions(gains(raw) | missed, converted=True)
    assert {
        name: e.convention for name, e in evidence.items() if e.convention == "zero-centred"
    }.keys() == missed.keys()
    assert evidence["layers.0.input_layernorm.weight"].convention == "shifted"


def test_a_last_norm_that_tells_nothing_follows_the_others() -> None:
    silent = on_bf16_grid(np.linspace(1.0, 4.0, 1024, dtype="<f4"))
    raw = norms("27B") | {"norm.weight": silent}
    assert norm_conventions(raw, converted=False)["norm.weight"].convention == "zero-centred"
    shifted = gains(norms("27B")) | {"norm.weight": silent}
    assert norm_conventions(shifted, converted=True)["norm.weight"].convention == "shifted"


def test_what_a_converter_may_have_changed_follows_nobody() -> None:
    """A bundle with its last norm as gains and the layer's norms raw exists: here nothing says which it is."""
    silent = on_bf16_grid(np.linspace(1.0, 4.0, 1024, dtype="<f4"))
    vectors = norms("27B") | {"norm.weight": silent}
    evidence = norm_conventions(vectors, converted=True)
    assert evidence["norm.weight"].convention is None
    assert "a converter may have changed it" in evidence["norm.weight"].reason
    assert evidence["pre_fc_norm_hidden.weight"].convention == "zero-centred"


def test_where_the_others_disagree_nothing_is_followed() -> None:
    silent = on_bf16_grid(np.linspace(1.0, 4.0, 1024, dtype="<f4"))
    raw = norms("27B")
    missed = {name: values for name, values in raw.items() if "pre_fc" in name}
    evidence = norm_conventions(gains(raw) | missed | {"norm.weight": silent}, converted=True)
    assert evidence["norm.weight"].convention is None
    assert "disagree" in evidence["norm.weight"].reason


def test_a_tensor_that_contradicts_itself_is_undecided() -> None:
    """Gains that were trained on after the 1 was added: the mean says one thing, the bits the other."""
    trained = on_bf16_grid(np.linspace(0.3, 1.9, 1024, dtype="<f4"))
    vectors = gains(norms("27B")) | {"layers.0.input_layernorm.weight": trained}
    evidence = norm_conventions(vectors, converted=True)["layers.0.input_layernorm.weight"]
    assert evidence.convention is None
    assert "as if zero-centred" in evidence.reason
    assert "as if shifted" in evidence.reason


def test_bits_alone_do_not_stand_against_all_the_others() -> None:
    trained = on_bf16_grid(np.linspace(0.1, 0.6, 1024, dtype="<f4"))
    vectors = gains(norms("27B")) | {"pre_fc_norm_hidden.weight": trained}
    evidence = norm_conventions(vectors, converted=True)["pre_fc_norm_hidden.weight"]
    assert evidence.convention is None
    assert "all other norms of the head are shifted" in evidence.reason


def test_weights_that_never_were_bfloat16_are_told_by_their_means() -> None:
    random = np.random.RandomState(0).uniform
    raw = {
        "layers.0.input_layernorm.weight": random(-0.3, 0.3, 64).astype("<f4"),
        "layers.0.self_attn.q_norm.weight": random(-0.1, 0.5, 64).astype("<f4"),
        "pre_fc_norm_hidden.weight": random(-0.6, -0.1, 64).astype("<f4"),
    }
    assert found(norm_conventions(raw, converted=False)) == {"zero-centred"}
    assert found(norm_conventions({name: values + 1 for name, values in raw.items()}, converted=False)) == {
        "shifted"
    }


@pytest.mark.parametrize(("value", "convention"), [(0.0, "zero-centred"), (1.0, "shifted")])
def test_untrained_norms(value: float, convention: str) -> None:
    """Constants have no digits to look at: layer norms have a mean, and the rest follows them."""
    names = ("layers.0.input_layernorm.weight", "layers.0.self_attn.k_norm.weight", "norm.weight")
    vectors = {name: np.full(64, value, "<f4") for name in names}
    assert found(norm_conventions(vectors, converted=False)) == {convention}


def test_a_one_that_was_added_twice_is_neither() -> None:
    for profile in PROFILES:
        twice = gains(gains(norms(profile)))
        evidence = norm_conventions(twice, converted=True)
        assert evidence["layers.0.input_layernorm.weight"].convention == "doubled"
        assert not found(evidence) & {"zero-centred"}


def test_nothing_at_all_is_told_of_a_lone_last_norm() -> None:
    vectors = {"norm.weight": on_bf16_grid(np.linspace(1.0, 4.0, 64, dtype="<f4"))}
    (evidence,) = norm_conventions(vectors, converted=False).values()
    assert evidence.convention is None
    assert "do not tell either" in evidence.reason


def test_a_converter_is_known_by_header_or_by_the_axes_of_the_convolution(tmp_path: Path) -> None:
    raw = open_checkpoint(write_checkpoint(tmp_path / "raw"))
    assert converter(raw, ["mtp.norm.weight"]) is None
    mlx = open_checkpoint(write_mlx_checkpoint(tmp_path / "mlx"))
    assert "format mlx" in str(converter(mlx, ["language_model.mtp.norm.weight"]))
    side = tmp_path / "side"
    write_mlx_checkpoint(side, files="side")
    write_checkpoint(tmp_path / "other", files="side")
    (side / "mtp.safetensors").write_bytes((tmp_path / "other" / "mtp.safetensors").read_bytes())
    reason = converter(open_checkpoint(side), ["mtp.norm.weight"])
    assert "MLX's order of axes" in str(reason)
