"""The caches of models that mlx-lm does not have, by mlx-vlm's own classes."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from draftpair.checkpoint import ConfigView
from draftpair.validate.kvcache import cache_size
from fixtures import deepseek_v4, glm5_next, hy_v4, inkling, qwen4_exp

CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v4": deepseek_v4.config_document(deepseek_v4.Geometry()) | {"compress_ratios": [0, 4, 128, 0]},
    "glm5_next": glm5_next.config_document(),
    "qwen4_exp": qwen4_exp.config_document(qwen4_exp.Geometry()),
    "hy_v4": hy_v4.config_document(),
    "inkling": inkling.config_document(inkling.Geometry()),
}


@pytest.fixture(autouse=True)
def sound(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-vlm's Inkling imports three functions for sound from mlx-audio, which nothing here calls."""
    if importlib.util.find_spec("mlx_audio") is None:
        package, dsp = ModuleType("mlx_audio"), ModuleType("mlx_audio.dsp")
        for name in ("hanning", "mel_filters", "stft"):
            setattr(dsp, name, None)
        monkeypatch.setitem(sys.modules, "mlx_audio", package)
        monkeypatch.setitem(sys.modules, "mlx_audio.dsp", dsp)


def model_of(name: str) -> Any:
    package = importlib.import_module(f"mlx_vlm.models.{name}")
    config = package.ModelConfig.from_dict(dict(CONFIGS[name]))
    language = importlib.import_module(f"mlx_vlm.models.{name}.language").LanguageModel
    if name == "qwen4_exp":
        return language(config.text_config, config)
    return language(getattr(config, "text_config", config))


def nbytes(name: str, cache: Any) -> int:
    """Bytes of a cache; GLM's last one holds the expanded keys and values of a prompt, which are not counted."""
    parts = getattr(cache, "caches", (cache,))
    if name == "glm5_next" and len(parts) > 1:
        parts = parts[:-1]
    return sum(int(part.nbytes) for part in parts)


@pytest.mark.parametrize(("context", "batch", "dtype"), [(10, 1, "float32"), (300, 2, "bfloat16")])
@pytest.mark.parametrize("name", CONFIGS)
def test_mlx_vlm_allocates_what_the_formula_says(
    name: str, context: int, batch: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = mx.gather_mm

    def widened(a: mx.array, b: mx.array, *rest: Any, **more: Any) -> mx.array:
        return gather(a.astype(mx.float32), b.astype(mx.float32), *rest, **more).astype(a.dtype)

    # The CPU back end multiplies by experts in float32 alone.
    monkeypatch.setattr(mx, "gather_mm", widened)
    model = model_of(name)
    model.set_dtype(getattr(mx, dtype))
    caches = model.make_cache()
    for tokens in (context - 1, 1):
        mx.eval(model(mx.zeros((batch, tokens), mx.int32), cache=caches).logits)
    size = cache_size(ConfigView(CONFIGS[name]), context, batch, kv_bits=32 if dtype == "float32" else 16)
    assert (size.kv_bytes or 0) + (size.state_bytes or 0) == sum(nbytes(name, cache) for cache in caches)
