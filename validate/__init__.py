"""Checks from the files alone, without MLX: integrity, heads, drafters, pairs, and sizes."""

from draftpair.validate.pairing import ValidatedPair, require_pair, validate_pair, validated_pair
from draftpair.validate.single import validate_one
from draftpair.validate.verdict import Verdict

__all__ = ["ValidatedPair", "Verdict", "require_pair", "validate_one", "validate_pair", "validated_pair"]
