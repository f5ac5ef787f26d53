"""The assistant of Gemma 4 without towers (``gemma4_unified_assistant``): tensors and steps of ``gemma4_assistant``."""

from draftpair.runtime.drafters.gemma4_assistant import Drafter

__all__ = ["Drafter"]
