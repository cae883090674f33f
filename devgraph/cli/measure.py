"""Timing: what a call costs the host, and how long the device's work takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import attrs

from devgraph.api.backend import Backend


@attrs.frozen
class Timing:
    """Seconds a call: ``host`` until the call returns, ``wall`` until its work is done."""

    host: float
    wall: float


def seconds_per_call(call: Callable[[], object], backend: Backend, *, calls: int) -> Timing:
    """Run ``call`` ``calls`` times in a row on an idle device and return the mean seconds.

    The calls follow each other without waiting for the device, as steps of an engine do, and the
    last one is waited for.
    """
    backend.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    returned = time.perf_counter()
    backend.synchronize()
    done = time.perf_counter()
    return Timing((returned - begin) / calls, (done - begin) / calls)


def median(timings: Sequence[Timing]) -> Timing:
    """Return the median of each figure on its own."""
    return Timing(
        statistics.median(timing.host for timing in timings),
        statistics.median(timing.wall for timing in timings),
    )
