"""What a runner learnt of its buckets, kept in a file for the next start."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from devgraph.runners.graphs import BucketGraph

logger = logging.getLogger(__name__)


class Learned:
    """How often buckets were hit in earlier processes, and which could not be captured.

    The file is a help and never a fault: one that is missing, broken or not writable is as if
    nothing had been learnt. It holds what several runners, versions and devices learnt, each apart.

    Args:
        path: the file; None keeps nothing.
        identity: what must be the same for the numbers to mean anything again.
    """

    def __init__(self, path: str | None, identity: Mapping[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        text = json.dumps(dict(identity), sort_keys=True, default=str)
        self._key = hashlib.sha256(text.encode()).hexdigest()[:16]
        hits = self._read().get(self._key)
        self._hits = {
            name: count
            for name, count in (hits if isinstance(hits, dict) else {}).items()
            if isinstance(count, int)
        }
        counts = sorted({0, *self._hits.values()}, reverse=True)
        self._places = {count: at for at, count in enumerate(counts)}

    def place(self, graph: BucketGraph) -> int:
        """Return where ``graph`` comes in the order of use, from 0; those that were not used are
        alike, and after them come those that could not be captured."""
        return self._places[self._hits.get(str(graph.key), 0)]

    def write(self, graphs: Iterable[BucketGraph]) -> None:
        """Keep what is known now, in place of what was known at the start."""
        if self._path is None:
            return
        found = {str(g.key): -1 if g.dropped else g.hits + g.missed for g in graphs}
        if not any(found.values()):
            return  # it served nothing
        new = Path(f"{self._path}.{os.getpid()}")
        try:
            new.write_text(json.dumps({**self._read(), self._key: found}), encoding="utf-8")
            new.replace(self._path)
        except (OSError, ValueError) as error:
            logger.warning("what was learnt of the buckets is not kept: %s", error)
            with contextlib.suppress(OSError, ValueError):
                new.unlink()

    def _read(self) -> dict[str, Any]:
        if self._path is None or not self._path.exists():
            return {}
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s tells nothing of the buckets: %s", self._path, error)
            return {}
        return found if isinstance(found, dict) else {}
