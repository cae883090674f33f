"""A round of captures, on either runner: with fewer runs before and less around each piece.

vLLM runs every step once before it captures it, though what a first run finds (compiled code,
modules to load, workspaces) is the same for most sizes. Here the first step of each kind is run.
Where another turns out to need a run of its own, its capture fails; nothing of the round is left,
and it is made anew as vLLM does it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterator
from typing import Any

logger = logging.getLogger(__name__)

_NEVER = 2**31 - 1
"""The largest threshold: so many collections of the middle generation do not happen."""


class Round:
    """Which steps of a round are run before their captures, and what undoes the round.

    Args:
        config: vLLM's.
    """

    def __init__(self, config: Any) -> None:
        compilation = config.compilation_config
        self._ends = [part.end for part in compilation.get_compile_ranges()]
        self._compiled_alone = frozenset(compilation.compile_sizes or ())
        # A rank that made its round anew would wait for others that do not.
        self._all = config.parallel_config.world_size_across_dp > 1
        self._seen: set[Hashable] = set()
        self._skipped = False
        self._undo = contextlib.ExitStack()

    def wants_run(self, desc: Any) -> bool:
        """Whether a step is to be run, given its descriptor; ask once for each."""
        kind = self._kind(desc)
        wanted = self._all or kind not in self._seen
        self._seen.add(kind)
        self._skipped |= not wanted
        return wanted

    def _kind(self, desc: Any) -> Hashable:
        """Return all of a descriptor that its size does not change, and of the size what code may
        be compiled for: a range, a size of its own, one, and what sixteen divides."""
        sizes = tokens, _ = desc.num_tokens, desc.num_reqs
        shapes = tuple(size is not None and (size == 1, size % 16 == 0) for size in sizes)
        alone = tokens if tokens in self._compiled_alone else None
        rest = dataclasses.replace(desc, num_tokens=0, num_reqs=None)
        return rest, shapes, bisect_left(self._ends, tokens), alone

    def on_failure(self, undo: Callable[[], object]) -> None:
        """Call ``undo`` if the round fails."""
        self._undo.callback(undo)

    def make(self, capture: Callable[[], Any]) -> Any:
        """Return ``capture()``, which captures all steps of the round; if it fails, nothing that
        was captured is left, and it is called once more if steps were not run."""
        with no_full_collections():
            while True:
                try:
                    with self._undo:
                        result = capture()
                        self._undo.pop_all()
                    return result
                except Exception as error:
                    if not self._skipped:
                        raise
                    logger.info("a step needs a run before its capture: captured anew (%s)", error)
                    self._all, self._skipped = True, False


@contextlib.contextmanager
def no_full_collections() -> Iterator[None]:
    """Let the collector visit young objects only. A full collection walks the whole heap (0.4 s in
    an engine of vLLM) and would come several times in a round of captures; one that the program
    asks for itself still does, and where Python collects in steps they stay as they are.

    Not by freezing the heap: thawing it afterwards would thaw what the program froze itself, and
    asking whether it did walks what is frozen.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(*thresholds[:2], _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
