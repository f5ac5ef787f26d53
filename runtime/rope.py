"""The rotary keys of a checkpoint in the one form that mlx-lm reads."""

from __future__ import annotations

from typing import Any

from draftpair.checkpoint import ConfigView
from draftpair.errors import Refused


def rope_overrides(config: ConfigView) -> dict[str, Any]:
    """``rope_theta`` and ``rope_scaling`` as mlx-lm's model arguments want them.

    transformers 5 saves ``rope_parameters`` and no flat key; mlx-lm's glm4_moe_lite does not read that and
    takes its own default base without a word, transformers another one (1e6 and 1e4). So a config that
    names no base at all is refused.
    """
    rope = config.rope
    if rope.theta is None:
        raise Refused(
            "config.json names no RoPE base: neither rope_theta nor rope_parameters.rope_theta",
            hint="add the rope_theta of the original checkpoint; libraries disagree about the default",
        )
    return {"rope_theta": rope.theta, "rope_scaling": rope.scaling}
