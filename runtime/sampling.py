"""Draws tokens from logits so that the draw depends on the logits, the seed and the position, and on nothing else.

Whether a position is decided by a single-token step or inside a verify block, and in a block of which width,
makes no difference to its draw. So with a drafter the same tokens are drawn as without.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from draftpair.errors import Usage

# Outside of these, logits divided by the temperature leave float32, and filtered tokens are drawn.
COLDEST, HOTTEST = 1e-4, 1e4


class Sampler:
    """Temperature 0 takes the most likely token; otherwise mlx-lm's filters and categorical draw.

    ``top_p`` and ``min_p`` 0 and ``top_k`` 0 mean no such filter; so does a ``top_k`` of the vocabulary's
    size or more. Of ``seed`` the lower 32 bits count. Sampling reseeds MLX's global random state.
    """

    def __init__(
        self,
        vocab_size: int,
        temperature: float = 0.0,
        top_p: float = 0.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int = 0,
    ) -> None:
        if temperature != 0 and not COLDEST <= temperature <= HOTTEST:
            raise Usage(
                f"temperature is {temperature}; expected 0 (greedy), or a number from {COLDEST} to {HOTTEST}"
            )
        for name, value in (("top-p", top_p), ("min-p", min_p)):
            if not 0 <= value <= 1:
                raise Usage(f"{name} is {value}; expected a number from 0 to 1")
        if top_k < 0:
            raise Usage(f"top-k is {top_k}; expected 0 (off) or more")
        self.greedy = temperature == 0
        self.seed = seed
        self._draw = make_sampler(
            temp=temperature, top_p=top_p, min_p=min_p, top_k=top_k if top_k < vocab_size else 0
        )

    def __call__(self, logits: mx.array, position: int) -> mx.array:
        """Tokens [n] for the consecutive positions that start at ``position``, from logits [n, V]."""
        if self.greedy:
            return mx.argmax(logits, axis=-1)
        rows = range(logits.shape[0])
        return mx.concatenate([self._sample(logits[row : row + 1], position + row) for row in rows])

    def _sample(self, logits: mx.array, position: int) -> mx.array:
        """MLX makes a key's two words of the upper and lower half of the number it is seeded with."""
        mx.random.seed((self.seed & 0xFFFFFFFF) << 32 | position)
        drawn: mx.array = self._draw(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        return drawn
