"""Target adapters, one file a ``model_type``; ``load_target`` finds them by that name."""
