"""Timing of calls on the host and on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import attrs

from devgraph.api.backend import Backend


@attrs.frozen
class Timing:
    """Seconds until a call returns (``host``) and until the device has finished (``wall``)."""

    host: float
    wall: float


def seconds_per_call(call: Callable[[], object], backend: Backend, *, calls: int) -> Timing:
    """Run ``call`` repeatedly on an idle device and return the mean seconds.

    Only the last call is followed by a synchronisation, as in an engine.
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
    """Return the median of the host times and the median of the wall times."""
    return Timing(
        statistics.median(timing.host for timing in timings),
        statistics.median(timing.wall for timing in timings),
    )
