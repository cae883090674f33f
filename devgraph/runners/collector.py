"""The garbage collector during a round of captures; what the program set stays so."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collector_at_rest", "no_full_collections"]

_NEVER = 2**31 - 1
"""The largest threshold: so many collections of the middle generation do not happen."""


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


@contextlib.contextmanager
def collector_at_rest(*, sweep: bool) -> Iterator[None]:
    """Keep the garbage collector from running meanwhile; a collection may unload kernels.

    Args:
        sweep: collect young objects first, so that the memory of what was just dropped is free.
            A full collection takes longer than the captures of a small model.
    """
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    if sweep:
        gc.collect(1)
    if not frozen:  # thawing ours would thaw what the program froze as well
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()
        if enabled:
            gc.enable()
