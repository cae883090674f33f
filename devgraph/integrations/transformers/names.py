"""Names that differ between versions of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import transformers
from packaging.version import Version


@attrs.frozen(kw_only=True)
class Names:
    """Names of one version of transformers."""

    since: Version
    """First version with these names."""
    cache: str
    """Argument of a forward, and field of its output, that holds the cache."""
    old_caches: tuple[str, ...] = ()
    """Deprecated names of that argument which this version still accepts."""
    length: str
    """Argument of an embedding of positions that holds the length of the cache."""

    def cache_in(self, arguments: Mapping[str, Any]) -> Any:
        """Return the cache in the keyword arguments of a forward, or None."""
        given = (arguments.get(name) for name in (self.cache, *self.old_caches))
        return next((cache for cache in given if cache is not None), None)


_TABLE = (
    Names(
        since=Version("5.24.dev0"),
        cache="cache",
        old_caches=("past_key_values",),
        length="cache_length",
    ),
    Names(since=Version("0"), cache="past_key_values", length="past_key_values_length"),
)
"""Newest version first."""


def names_of(version: str) -> Names:
    """Return the names that transformers has in `version`."""
    return next(names for names in _TABLE if Version(version) >= names.since)


NAMES = names_of(transformers.__version__)
"""Names of the installed version."""
