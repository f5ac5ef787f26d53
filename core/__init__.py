"""draftpair: cut out, check and run the drafters of speculative-decoding pairs on MLX."""

from draftpair.version import VERSION as __version__

__all__ = ["__version__"]
