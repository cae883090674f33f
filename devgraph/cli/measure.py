"""Timing of calls on the host and on the device, and comparisons of several contenders."""

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
    """Seconds per call, ``host`` until it returns and ``wall`` until the device has finished."""

    host: float
    wall: float


def seconds_per_call(call: Callable[[], object], backend: Backend, *, calls: int) -> Timing:
    """Run ``call`` repeatedly on an idle device and return the mean seconds.

    Only the last call is followed by a synchronisation, as in an engine.

    Args:
        call: the function.
        backend: the backend of its device.
        calls: number of calls.
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
    """Return the median host and wall times, each on its own."""
    return Timing(
        statistics.median(timing.host for timing in timings),
        statistics.median(timing.wall for timing in timings),
    )


Lengths = Callable[[], Iterator[int]]
"""Returns an iterator over the host argument of each step of a repeat."""

FIGURES = ("capture_seconds", "pool_bytes", "segments", "nodes", "padding", "eager_packs")
"""Optional figures. ``padding`` is the share of padded rows in graphs, ``eager_packs`` the number
of packs that ran outside of graphs."""


class Contender:
    """One implementation of the work and its timings.

    Args:
        name: the name of its row.
        call: runs the work once with the host argument of the step.
        lengths: returns the host arguments of a repeat.
        figures: values of ``FIGURES``.
        exact: outputs must equal eager bit for bit. Otherwise they may differ by the square root of
            the precision of the dtype, because a compiler chose other kernels.
        parts: number of parts of the work in one call; timings are per part.
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
        """Record the difference from eager, relative to the largest value of eager."""
        difference = ((got - expected).abs().max() / expected.abs().max()).item()
        close = difference <= torch.finfo(expected.dtype).eps ** 0.5
        equal = torch.equal(got, expected) if self.exact else close
        self.figures |= {"difference": difference, "equal": equal}

    def row(self, eager: Contender) -> dict[str, Any]:
        """Return the medians over all repeats, and the ratios of eager to them, as JSON values."""
        own, other = median(self.timings), median(eager.timings)
        return {
            "name": self.name,
            **attrs.asdict(own),
            "repeats": [attrs.asdict(one) for one in self.timings],
            **self.figures,
            "host_ratio": other.host / own.host,
            "wall_ratio": other.wall / own.wall,
        }


class Comparison:
    """The rows of several contenders on one backend."""

    def __init__(self, backend: Backend, args: argparse.Namespace) -> None:
        self.backend, self.args = backend, args
        self.rows: list[dict[str, Any]] = []
        """Rows of all contenders that ran; ``against`` is the index of the row of eager."""
        self.absent: dict[str, str] = {}
        """Reasons of contenders that this backend or machine does not offer, by name."""
        self.failed: dict[str, str] = {}
        """Errors of contenders that should have worked, by name."""

    def attempt(self, name: str, make: Callable[[], _T]) -> _T | None:
        """Return the result of ``make``, or record why it failed and return None."""
        try:
            return make()
        except CapabilityError as error:
            self.absent[name] = str(error)
        except CaptureError as error:
            self.failed[name] = str(error)
        return None

    def time(self, ways: Sequence[Contender]) -> None:
        """Time contenders in turns, eager first, and add their rows."""
        running = [way for way in ways if self._runs(way)]
        for _ in range(self.args.repeats):
            for way in running:
                way.time(self.backend, self.args.steps)
        against = len(self.rows)
        self.rows += [{**way.row(running[0]), "against": against} for way in running]

    def _runs(self, way: Contender) -> bool:
        """Run a few steps untimed; return False if updates are not supported."""
        try:
            way.time(self.backend, min(self.args.steps, 3))
        except UpdateError as error:
            self.absent[way.name] = str(error)
            return False
        way.timings.clear()
        return True
