"""Timing: what a call costs the host and how long the device's work takes, for several ways."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs
import torch
from torch import Tensor

from devgraph.api.backend import Backend
from devgraph.api.errors import CapabilityError, CaptureError, UpdateError

_T = TypeVar("_T")


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


Lengths = Callable[[], Iterator[int]]
"""Returns the host argument of each step of a repeat."""

FIGURES = ("capture_seconds", "pool_bytes", "segments", "nodes", "padding", "eager_packs")
"""What is known of some ways only; ``padding`` is the share of rows computed in graphs that hold no
data, ``eager_packs`` those that ran outside of a graph."""


class Contender:
    """One way to do the work, and what it costs.

    Args:
        call: does it once, with the host argument of that step.
        figures: of ``FIGURES``, those that are known of this way.
        exact: its outputs have to be eager's bit for bit; otherwise, as where a compiler chose
            other kernels, to half of the digits of the dtype.
        parts: what a call does so many times; times are of one.
    """

    def __init__(
        self,
        name: str,
        call: Callable[..., Tensor],
        lengths: Lengths,
        figures: Mapping[str, Any] | None = None,
        *,
        exact: bool = True,
        parts: int = 1,
    ) -> None:
        self.name, self.call, self.exact = name, call, exact
        self.figures = {**dict.fromkeys(FIGURES), **(figures or {})}
        self.timings: list[Timing] = []
        self._lengths, self._parts = lengths, parts

    def time(self, backend: Backend, steps: int) -> None:
        """Time one repeat of ``steps`` steps."""
        lengths, call = self._lengths(), self.call
        spent = seconds_per_call(lambda: call(kv_len=next(lengths)), backend, calls=steps)
        self.timings.append(Timing(spent.host / self._parts, spent.wall / self._parts))

    def compare(self, expected: Tensor, got: Tensor) -> None:
        """Note how far one result is from eager's, relative to the largest of that."""
        difference = ((got - expected).abs().max() / expected.abs().max()).item()
        close = difference <= torch.finfo(expected.dtype).eps ** 0.5
        equal = torch.equal(got, expected) if self.exact else close
        self.figures |= {"difference": difference, "equal": equal}

    def row(self, eager: Contender) -> dict[str, Any]:
        """Return the medians of all repeats, and how many times as long eager takes, as JSON has
        them."""
        mine, other = median(self.timings), median(eager.timings)
        return {
            "name": self.name,
            **attrs.asdict(mine),
            "repeats": [attrs.asdict(one) for one in self.timings],
            **self.figures,
            "host_ratio": other.host / mine.host,
            "wall_ratio": other.wall / mine.wall,
        }


class Comparison:
    """What ways to do some work cost on a backend."""

    def __init__(self, backend: Backend, args: argparse.Namespace) -> None:
        self.backend, self.args = backend, args
        self.rows: list[dict[str, Any]] = []
        """Of all ways that ran; ``against`` is the row of eager on the same work."""
        self.absent: dict[str, str] = {}
        """Why ways have no row that this backend or machine does not offer."""
        self.failed: dict[str, str] = {}
        """The same of ways that should have worked."""

    def attempt(self, name: str, make: Callable[[], _T]) -> _T | None:
        """Return what ``make`` captures for a way, or note why there is nothing."""
        try:
            return make()
        except CapabilityError as error:
            self.absent[name] = str(error)
        except CaptureError as error:
            self.failed[name] = str(error)
        return None

    def time(self, ways: Sequence[Contender]) -> None:
        """Let ways to do the same work take turns, eager first; add the rows of those that run."""
        running = [way for way in ways if self._runs(way)]
        for _ in range(self.args.repeats):
            for way in running:
                way.time(self.backend, self.args.steps)
        against = len(self.rows)
        self.rows += [{**way.row(running[0]), "against": against} for way in running]

    def _runs(self, way: Contender) -> bool:
        """Run a way a little, untimed."""
        try:
            way.time(self.backend, min(self.args.steps, 3))
        except UpdateError as error:
            self.absent[way.name] = str(error)
            return False
        way.timings.clear()
        return True
