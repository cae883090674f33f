"""Timing of calls, on the host and on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import attrs

from devgraph.api.backend import Backend
from devgraph.cli.tables import say, time_text

_BUSY = 1.25
"""Ratio of slowest to fastest repeat above which the machine counts as busy."""


@attrs.frozen
class Timing:
    """Seconds until a call returns (``host``) and until the device has finished (``wall``)."""

    host: float
    wall: float


def seconds_per_call(call: Callable[[], object], backend: Backend, *, calls: int) -> Timing:
    """Run ``call`` repeatedly on an idle device and return the mean time in seconds.

    As in an engine, only the last call is synchronized.
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
    return Timing(*map(statistics.median, zip(*map(attrs.astuple, timings), strict=True)))


def say_cautions(walls: Mapping[str, Sequence[float]], *, on_cpu: bool) -> None:
    """Print reasons why times may mislead: disturbed repeats, or no device."""
    spreads = [(max(times) / min(times), name) for name, times in walls.items()]
    if spreads and max(spreads)[0] > _BUSY:
        name = max(spreads)[1]
        spread = f"between {time_text(min(walls[name]))} and {time_text(max(walls[name]))}"
        say(f"repeats of {name} take {spread}: this machine is busy")
    if on_cpu:
        say(
            "on the CPU, a graph is a list of calls that the host replays. Therefore these figures "
            "show the overhead of devgraph and the saved Python time, not the speed of a device"
        )
