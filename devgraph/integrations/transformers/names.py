"""Names that differ between versions of transformers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import attrs
from transformers.modeling_outputs import CausalLMOutputWithPast


@attrs.frozen
class Names:
    """The names in the installed version of transformers."""

    caches: tuple[str, ...]
    """Names of the cache among arguments and outputs of forwards, most common first."""
    length: str
    """Parameter of position embeddings that receives the length of the cache."""

    def name_in(self, arguments: Collection[str]) -> str | None:
        """Return the name of the cache among the argument names of a forward, or None."""
        return next((name for name in self.caches if name in arguments), None)

    def cache_in(self, arguments: Mapping[str, Any]) -> Any:
        """Return the cache among the keyword arguments of a forward, or None."""
        given = (arguments.get(name) for name in self.caches)
        return next((cache for cache in given if cache is not None), None)


NAMES = Names(("past_key_values", "cache_params"), "past_key_values_length")
if "cache" in CausalLMOutputWithPast.__dataclass_fields__:
    # Since 5.24, forwards log a deprecation warning for the older names.
    NAMES = Names(("cache", *NAMES.caches), "cache_length")
