"""Names that differ between versions of transformers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import attrs
import transformers
from packaging.version import Version


@attrs.frozen
class Names:
    """Names of one version of transformers."""

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


def names_of(version: str) -> Names:
    """Return the names in version ``version`` of transformers."""
    if Version(version) < Version("5.24.dev0"):
        return Names(("past_key_values", "cache_params"), "past_key_values_length")
    # Forwards log a deprecation warning for the older names.
    return Names(("cache", "past_key_values", "cache_params"), "cache_length")


NAMES = names_of(transformers.__version__)
