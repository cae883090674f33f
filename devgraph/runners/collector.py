"""The garbage collector during a round of captures; what the program set stays so."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collector_at_rest", "heap_frozen"]


@contextlib.contextmanager
def heap_frozen() -> Iterator[None]:
    """Keep collections from walking the objects that are there already.

    Nothing is done where the program froze some itself: thawing ours would thaw those as well.
    """
    frozen = gc.get_freeze_count()
    if not frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not frozen:
            gc.unfreeze()


@contextlib.contextmanager
def collector_at_rest(*, sweep: bool) -> Iterator[None]:
    """Keep the garbage collector from running meanwhile; a collection may unload kernels.

    Args:
        sweep: collect young objects first, so that the memory of what was just dropped is free.
            A full collection takes longer than the captures of a small model.
    """
    enabled = gc.isenabled()
    gc.disable()
    if sweep:
        gc.collect(1)
    try:
        with heap_frozen():
            yield
    finally:
        if enabled:
            gc.enable()
