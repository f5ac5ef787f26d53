"""Drafters, one file a family; found by that name."""
