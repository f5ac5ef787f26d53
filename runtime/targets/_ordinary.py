"""Any model that mlx-lm has, as a target without an adapter of its own: nothing is tapped, nothing is lent.

``decode`` and ``verify`` are mlx-lm's own forward, of one row and of K. Whether both give the same bytes is for the
exactness probe to measure: on a backend whose kernels depend on the number of rows they do not, and neither do
models that compute a single row in another way, such as those of latent attention.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP
from mlx_lm.utils import MODEL_REMAPPING

from draftpair.checkpoint import Checkpoint, ConfigView
from draftpair.errors import Refused, ToolError
from draftpair.runtime.libraries import reading
from draftpair.runtime.targets._layered import SORTED_FROM
from draftpair.runtime.targets._mlx_lm import MlxLmTarget, chunks, load_network
from draftpair.runtime.window import WindowCache
from draftpair.validate.geometry import HIDDEN, number

# A block has at most 64 rows, and a drafter takes its own in one by one.
WIDEST = 64


class Target(MlxLmTarget):
    """See ``draftpair.runtime.interfaces.Target``.

    ``experts_per_token`` bounds the rows of one call where the network has layers of experts; None leaves them alone.
    """

    def __init__(self, network: Any, hidden_size: int = 0, experts_per_token: int | None = None) -> None:
        self.network = network
        self.hidden_size = hidden_size
        self.rows_per_call = WIDEST
        if experts_per_token is not None and _has_experts(network):
            self.rows_per_call = max(1, (SORTED_FROM - 1) // experts_per_token)
        self.reset()
        self.vocab_size = _vocab_size(network, self.caches)
        self.reset()

    @classmethod
    def load(cls, checkpoint: Checkpoint, environ: Mapping[str, str]) -> Target:
        config = checkpoint.config
        network = _load_network(checkpoint)
        experts = number(config, "num_experts_per_tok")
        failed = f"{checkpoint.source}: mlx-lm's {config.model_type} cannot be run"
        with reading(failed, f"draftpair validate {checkpoint.source}"):
            return cls(network, number(config, *HIDDEN) or 0, experts)

    @property
    def offset(self) -> int:
        return self.resident

    def reset(self) -> None:
        self.caches, self.irreversible = _reversible(make_prompt_cache(self.network), self.network)
        self.probe_lengths = tuple(sorted({cache.window + 1 for cache in _windows(self.caches)}))
        self.resident = 0

    def prefill(self, tokens: Sequence[int], rows: int) -> tuple[mx.array, mx.array]:
        ids = mx.array([tokens])
        for begin, end in chunks(len(tokens)):
            logits = self.extend(ids[:, begin:end])
            mx.eval([cache.state for cache in self.caches])
        return logits[:, -1], mx.zeros((1, min(rows, len(tokens)), 0))

    def decode(self, token: mx.array) -> mx.array:
        return self.extend(token[None])[:, -1]

    def verify(self, tokens: Sequence[int]) -> tuple[mx.array, mx.array]:
        ids, step = mx.array([tokens]), self.rows_per_call
        parts = [self.extend(ids[:, begin : begin + step]) for begin in range(0, len(tokens), step)]
        return mx.concatenate(parts, axis=1), mx.zeros((1, len(tokens), 0))

    def rollback(self, rejected: int) -> None:
        if rejected:
            super().rollback(rejected)
            self.resident -= rejected

    def extend(self, ids: mx.array) -> mx.array:
        """Logits [1, L, V] after each of the ids [1, L], which become resident."""
        logits: mx.array = self.network(ids, self.caches)
        self.resident += ids.shape[1]
        return logits

    def embed(self, tokens: mx.array) -> mx.array:
        raise ToolError(_LENDS_NOTHING.format("embedding"))

    def head(self, normed: mx.array) -> mx.array:
        raise ToolError(_LENDS_NOTHING.format("output head"))


_LENDS_NOTHING = (
    "the drafter borrows the target's {}, and draftpair has no adapter for this type of target that lends it"
)


def _load_network(checkpoint: Checkpoint) -> Any:
    """mlx-lm's model, its weights not yet evaluated. Refused when mlx-lm cannot load it.

    Where a text model is wrapped in one that also sees or hears, and mlx-lm has a model under the wrapper's name,
    that is what knows the names of the tensors; it leaves out what is no text.
    """
    config, overrides = checkpoint.config, _rope(checkpoint.config)
    nested: dict[str, Any] = {}
    if config.text_key is not None and _known(config.root_model_type):
        text = {**config.text, **overrides}
        nested = {"model_type": config.root_model_type, config.text_key: text}
    return load_network(checkpoint, overrides, nested=nested)


def _known(model_type: str | None) -> bool:
    """Whether mlx-lm has a model of this type; names with a dot would be looked for in other packages."""
    if not model_type or "." in model_type:
        return False
    name = MODEL_REMAPPING.get(model_type, model_type)
    return importlib.util.find_spec(f"mlx_lm.models.{name}") is not None


def _rope(config: ConfigView) -> dict[str, Any]:
    """transformers 5 states the rotary settings in ``rope_parameters``, of which most models of mlx-lm read nothing."""
    rope = config.rope
    if config.get("rope_parameters") is None or rope.theta is None:
        return {}
    keys: dict[str, Any] = {"rope_theta": rope.theta, "rope_scaling": rope.scaling}
    if rope.partial is not None:
        keys["partial_rotary_factor"] = rope.partial
    sliding = rope.layer_types.get("sliding_attention")
    if sliding is not None and sliding.theta is not None:
        keys["rope_local_base_freq"] = sliding.theta
    return keys


def _vocab_size(network: Any, caches: list[Any]) -> int:
    """Width of the logits, by a forward that is built and never evaluated.

    Refused when the embedding has fewer rows: MLX would read other memory for an id without a row.
    """
    width = int(network(mx.array([[0]]), caches).shape[-1])
    tables = (nn.Embedding, nn.QuantizedEmbedding)
    rows = max(
        (module.weight.shape[0] for module in network.modules() if isinstance(module, tables)), default=width
    )
    if rows < width:
        raise Refused(
            f"the logits have {width} entries and the embedding has {rows} rows: some tokens could not be read back",
            hint="compare config.json's vocab_size with the original repository's",
        )
    return width


def _has_experts(network: Any) -> bool:
    return any(isinstance(module, (SwitchGLU, SwitchMLP)) for module in network.modules())


def _reversible(caches: list[Any], network: Any) -> tuple[list[Any], str | None]:
    """The caches in a form from which tokens can be taken back; or as they are, and why that cannot be."""
    for place, cache in enumerate(caches):
        if stuck := _stuck(cache):
            return (
                caches,
                f"cache {place} of {len(caches)} is mlx-lm's {stuck}, from which no token can be taken back",
            )
    replaced = [_replaced(cache) for cache in caches]
    if len(caches) < len(network.layers) and any(_windows(replaced)):
        return (
            caches,
            "layers share the sliding-window caches of others, from which no token can be taken back",
        )
    return replaced, None


def _stuck(cache: Any) -> str | None:
    """The class of the cache that cannot be cut back; None where it can, or where one of ours takes its place.

    What a cache says of itself does not count: some of mlx-lm's report a ``trim`` after which the rows are still there.
    """
    if type(cache) is CacheList:
        return next((stuck for part in cache.caches if (stuck := _stuck(part))), None)
    if type(cache) is RotatingKVCache:
        return "RotatingKVCache that keeps the first tokens" if cache.keep else None
    return None if type(cache) is KVCache else type(cache).__name__


def _replaced(cache: Any) -> Any:
    if type(cache) is CacheList:
        return CacheList(*(_replaced(part) for part in cache.caches))
    return WindowCache(cache.max_size, slack=WIDEST) if type(cache) is RotatingKVCache else cache


def _windows(caches: Sequence[Any]) -> Iterator[WindowCache]:
    for cache in caches:
        if type(cache) is CacheList:
            yield from _windows(cache.caches)
        elif isinstance(cache, WindowCache):
            yield cache
