"""Gemma 4 without towers (``gemma4_unified``, 12B) as a target: its text model is that of ``gemma4``."""

from draftpair.runtime.targets.gemma4 import Target

__all__ = ["Target"]
