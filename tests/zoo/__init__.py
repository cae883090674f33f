"""Every causal language model of transformers, tiny, on the engine and by its own ``generate``."""
