"""Runs a pair that has passed validation; the only room that imports MLX at module level."""
