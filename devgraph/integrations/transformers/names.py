"""Names that depend on the version of transformers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

CACHES: tuple[str, ...] = ("past_key_values", "cache_params")
"""Names of the cache in arguments and outputs of forwards, the most common name first."""

LENGTH = "past_key_values_length"
"""Name of the parameter of position embeddings that receives the length of the cache."""

if "cache" in CausalLMOutputWithPast.__dataclass_fields__:
    # Since 5.24, forwards warn that the older names are deprecated.
    CACHES, LENGTH = ("cache", *CACHES), "cache_length"


def cache_name(arguments: Collection[str]) -> str | None:
    """Return the name of the cache in ``arguments``, argument names of a forward, or None."""
    return next((name for name in CACHES if name in arguments), None)


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """Return the cache in the keyword arguments of a forward, or None."""
    given = map(arguments.get, CACHES)
    return next((cache for cache in given if cache is not None), None)
