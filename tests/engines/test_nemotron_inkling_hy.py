"""Nemotron-H, Inkling and HY-V4 drafters in mlx-vlm: strictly loaded, and drafting what its own split drafts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fixtures import hy_v4, inkling, nemotron_h
from fixtures.split_heads import copied, edit_config, edit_tensors, removed, split

SOURCES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Nemotron-H": (nemotron_h, {}),
    "Nemotron-H, latent experts": (nemotron_h, {"latent": 64}),
    "Nemotron-H omni": (nemotron_h, {"omni": True}),
    "Inkling": (inkling, {}),
    "Inkling, eight layers in a file of their own": (
        inkling,
        {"depth": 8, "local": (0, 2, 4, 5, 6, 7), "shards": 2},
    ),
    "Inkling, other layers within a window": (inkling, {"local": (1,)}),
}
FAMILIES: dict[str, Any] = {"Nemotron-H": nemotron_h, "Inkling": inkling, "HY-V4": hy_v4}
MODES = {
    "affine 4": {"q_bits": 4, "q_group_size": 32},
    "affine 8": {"q_bits": 8, "q_group_size": 32},
    "mxfp4": {"q_mode": "mxfp4"},
    "nvfp4": {"q_mode": "nvfp4"},
    "mxfp8": {"q_mode": "mxfp8"},
}


@pytest.fixture(autouse=True)
def sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-vlm's Inkling imports three functions for sound from mlx-audio, which no drafter calls."""
    if importlib.util.find_spec("mlx_audio") is None:
        package, dsp = ModuleType("mlx_audio"), ModuleType("mlx_audio.dsp")
        for name in ("hanning", "mel_filters", "stft"):
            setattr(dsp, name, None)
        monkeypatch.setitem(sys.modules, "mlx_audio", package)
        monkeypatch.setitem(sys.modules, "mlx_audio.dsp", dsp)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("source", SOURCES)
def test_it_drafts_what_the_engine_s_own_split_drafts(
    tmp_path: Path, engine: ModuleType, source: str, dtype: str
) -> None:
    family, options = SOURCES[source]
    raw = family.write_checkpoint(tmp_path / "raw", dtype=dtype, **options)
    found = engine.compare(raw, split(raw, tmp_path / "drafter"))
    assert found["only_expected"] == found["only_found"] == []
    assert found["parameters_differing"] == {}
    assert found["finite"]
    assert found["largest_difference"] == 0, found
    assert found["largest_logit"] > 0.5


def test_hy_v4_in_mxfp8_stands_for_the_values_of_the_engine_s_split(
    tmp_path: Path, engine: ModuleType
) -> None:
    """mlx-vlm keeps MXFP8 as it is, and splits nothing else of this family."""
    raw = hy_v4.write_checkpoint(tmp_path / "raw", kept="mxfp8")
    theirs = engine.split(raw, tmp_path / "theirs")
    found = engine.difference(engine.dense(theirs), engine.load(split(raw, tmp_path / "ours")))
    assert found["only_expected"] == found["only_found"] == []
    assert found["parameters_differing"] == {}
    assert found["largest_difference"] == 0, found
    packed = engine.difference(engine.load(theirs), engine.load(tmp_path / "ours"))
    assert packed["largest_difference"] < 1e-4, packed
    assert packed["largest_logit"] > 0.5


def test_inkling_tells_the_engine_which_layers_attend_within_a_window(
    tmp_path: Path, engine: ModuleType
) -> None:
    """Without the list mlx-vlm takes the target's own layers, whose numbers are others; so it does in its split."""
    raw = inkling.write_checkpoint(tmp_path / "raw", local=())
    drafter = split(raw, tmp_path / "drafter")
    engine.load(drafter)
    with pytest.raises(engine.NotLoaded, match="shape"):
        engine.load(engine.split(raw, tmp_path / "theirs"))
    edit_config(drafter, lambda config: config.pop("mtp_local_layer_ids"))
    with pytest.raises(engine.NotLoaded, match="shape"):
        engine.load(drafter)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantized_drafter_loads_and_drafts_what_its_expanded_weights_draft(
    tmp_path: Path, engine: ModuleType, family: str, mode: str
) -> None:
    raw = FAMILIES[family].write_checkpoint(tmp_path / "raw")
    drafter = split(raw, tmp_path / "drafter", **MODES[mode])
    found = engine.difference(engine.dense(drafter), engine.load(drafter))
    assert found["finite"]
    assert found["largest_difference"] < 1e-4, found
    assert found["largest_logit"] > 0.5
    assert any(name.endswith(".scales") for name in found["only_found"])


@pytest.mark.parametrize("fault", ["a norm missing", "a tensor too many"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_is_held_to_every_tensor(
    tmp_path: Path, engine: ModuleType, family: str, fault: str
) -> None:
    drafter = split(FAMILIES[family].write_checkpoint(tmp_path / "raw"), tmp_path / "drafter")
    norm = {"Nemotron-H": "layers.0.enorm.weight", "Inkling": "norm.weight", "HY-V4": "enorm.weight"}[family]
    edit_tensors(drafter, removed(norm) if "missing" in fault else copied(norm, f"stray_{norm}"))
    with pytest.raises(engine.NotLoaded):
        engine.load(drafter)
