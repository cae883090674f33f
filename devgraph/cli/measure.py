"""Timing of calls on the host and on the device, and of several contenders in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from devgraph.api.backend import Backend
from devgraph.api.errors import UpdateError


@attrs.frozen
class Timing:
    """Seconds per call, ``host`` until it returns and ``wall`` until the device has finished."""

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
    """Return the median host and wall times, each on its own."""
    return Timing(
        statistics.median(timing.host for timing in timings),
        statistics.median(timing.wall for timing in timings),
    )


@attrs.define(kw_only=True)
class Contender:
    """One implementation of the work and its timings."""

    name: str
    call: Callable[..., Tensor]
    """Runs the work once with the host argument ``kv_len`` of the step."""
    lengths: Callable[[], Iterator[int]]
    """Returns an iterator over the host arguments of a repeat."""
    figures: Mapping[str, Any] = attrs.field(factory=dict)
    exact: bool = True
    """Outputs must equal eager bit for bit. Otherwise they may differ by the square root of the
    precision of the dtype, because a compiler chose other kernels."""
    timings: list[Timing] = attrs.field(init=False, factory=list)

    def compare(self, expected: Tensor, got: Tensor) -> None:
        """Record the difference from eager, relative to the largest value of eager."""
        difference = ((got - expected).abs().max() / expected.abs().max()).item()
        close = difference <= torch.finfo(expected.dtype).eps ** 0.5
        equal = torch.equal(got, expected) if self.exact else close
        self.figures = {**self.figures, "difference": difference, "equal": equal}

    def time(self, backend: Backend, steps: int) -> None:
        """Time one repeat of ``steps`` steps."""
        lengths, call = self.lengths(), self.call
        self.timings.append(
            seconds_per_call(lambda: call(kv_len=next(lengths)), backend, calls=steps)
        )

    def row(self, eager: Contender) -> dict[str, Any]:
        """Return the medians over all repeats, and the ratios of eager to them, as JSON values."""
        own, other = median(self.timings), median(eager.timings)
        return {
            "name": self.name,
            **attrs.asdict(own),
            "repeats": [attrs.asdict(timing) for timing in self.timings],
            **self.figures,
            "host_ratio": other.host / own.host,
            "wall_ratio": other.wall / own.wall,
        }


def time_in_turns(
    backend: Backend, contenders: Sequence[Contender], *, steps: int, repeats: int
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Time contenders in turns, eager first."""
    running: list[Contender] = []
    refused: dict[str, str] = {}
    for contender in contenders:
        try:
            contender.time(backend, min(steps, 3))
        except UpdateError as error:
            refused[contender.name] = str(error)
        else:
            contender.timings.clear()
            running.append(contender)
    for _ in range(repeats):
        for contender in running:
            contender.time(backend, steps)
    return [contender.row(running[0]) for contender in running], refused
