"""Names that differ between versions of transformers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import attrs
import transformers
from packaging.version import Version


@attrs.frozen(kw_only=True)
class Names:
    """Names of one version of transformers."""

    since: Version
    """First version with these names."""
    caches: tuple[str, ...]
    """Names of the cache in arguments of forwards and in their outputs, the common one first."""
    length: str
    """Argument of an embedding of positions that holds the length of the cache."""

    @property
    def cache(self) -> str:
        """Common name of the cache."""
        return self.caches[0]

    def name_in(self, arguments: Collection[str]) -> str | None:
        """Return the name of the cache among arguments or parameters of a forward, or None."""
        return next((name for name in self.caches if name in arguments), None)

    def cache_in(self, arguments: Mapping[str, Any]) -> Any:
        """Return the cache in keyword arguments of a forward, or None."""
        given = (arguments.get(name) for name in self.caches)
        return next((cache for cache in given if cache is not None), None)


_TABLE = (
    Names(
        since=Version("5.24.dev0"),
        # A forward with the other names warns that they are deprecated.
        caches=("cache", "past_key_values", "cache_params"),
        length="cache_length",
    ),
    Names(
        since=Version("0"),
        caches=("past_key_values", "cache_params"),
        length="past_key_values_length",
    ),
)
"""Newest version first."""


def names_of(version: str) -> Names:
    """Return the names in version ``version`` of transformers."""
    return next(names for names in _TABLE if Version(version) >= names.since)


NAMES = names_of(transformers.__version__)
"""Names in the installed version."""
