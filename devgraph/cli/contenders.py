"""The ways to run one decode step that ``bench`` compares: eager, every policy, other packages."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch

from devgraph.api.backend import Backend
from devgraph.api.capture import Captured, capture
from devgraph.api.errors import CapabilityError, CaptureError, UpdateError
from devgraph.api.policy import policies
from devgraph.cli.measure import Timing, median, seconds_per_call
from devgraph.cli.public import public_breakable
from devgraph.cli.tables import working
from devgraph.cli.workload import Decoder, Shape

__all__ = ["Outcome", "Row", "measure"]


@attrs.frozen(kw_only=True)
class Row:
    """One way to run the step, and what it costs."""

    name: str
    host: float
    """Seconds until the call returns, median of the repeats."""
    wall: float
    """Seconds until its work is done, in a row of steps."""
    repeats: tuple[Timing, ...]
    difference: float
    """Largest difference from eager's outputs, relative to the largest of those."""
    equal: bool
    """Whether the outputs are right: eager's bit for bit, or, where a compiler chose other kernels,
    to half of the digits of the dtype."""
    capture_seconds: float | None = None
    pool_bytes: int | None = None
    segments: int | None = None
    nodes: int | None = None


@attrs.frozen(kw_only=True)
class Outcome:
    """All rows, eager first, and why other ways have none."""

    rows: list[Row]
    absent: dict[str, str]
    """Ways that this backend or machine does not offer."""
    failed: dict[str, str]
    """Ways that should have worked."""


class _Contender:
    """One way to run the step: a call per step with the host argument of that step."""

    def __init__(
        self,
        name: str,
        call: Callable[..., torch.Tensor],
        lengths: Callable[[], Iterator[int]],
        captured: Captured | None = None,
        *,
        exact: bool = True,
    ) -> None:
        self.name = name
        self.exact = exact
        self.memory = None if captured is None else captured.pool.bytes
        self.takes_lengths = (
            captured is None
            or captured.policy != "full"
            or captured.backend.capabilities.region_update
        )
        self.call = call
        self.captured = captured
        self.timings: list[Timing] = []
        self.equal = False
        self.difference = float("nan")
        self._lengths = lengths

    def time(self, backend: Backend, steps: int) -> None:
        """Time one repeat of ``steps`` steps."""
        lengths, call = self._lengths(), self.call
        self.timings.append(
            seconds_per_call(lambda: call(kv_len=next(lengths)), backend, calls=steps)
        )

    def compare(self, expected: torch.Tensor, got: torch.Tensor) -> None:
        """Note how far one result is from eager's."""
        largest = expected.abs().max()
        self.difference = float(((got - expected).abs().max() / largest).item())
        if self.exact:
            self.equal = torch.equal(got, expected)
        else:
            self.equal = self.difference <= float(torch.finfo(expected.dtype).eps) ** 0.5

    def row(self) -> Row:
        """Return the medians of all repeats."""
        timing = median(self.timings)
        captured = self.captured
        info = None if captured is None else captured.info()
        return Row(
            name=self.name,
            host=timing.host,
            wall=timing.wall,
            repeats=tuple(self.timings),
            difference=self.difference,
            equal=self.equal,
            capture_seconds=None if captured is None else captured.capture_seconds,
            pool_bytes=self.memory,
            segments=None if info is None else info.segments,
            nodes=None if info is None else info.nodes,
        )


class _Bench:
    """One model, its bound arguments, and every way to run it."""

    def __init__(self, backend: Backend, shape: Shape, kv_len: int) -> None:
        self.backend, self.shape, self.kv_len = backend, shape, kv_len
        self.model = Decoder(shape, backend.device)
        self.ids = torch.arange(shape.batch, device=backend.device) % shape.vocabulary
        self.row = torch.zeros(1, dtype=torch.int64, device=backend.device)
        self.absent: dict[str, str] = {}
        self.failed: dict[str, str] = {}
        eager = _Contender("eager", self._eager, lambda: itertools.repeat(kv_len))
        self.contenders = [eager]

    def _eager(self, **host: Any) -> torch.Tensor:
        logits: torch.Tensor = self.model(self.ids, self.row, **host)
        return logits

    def add_policies(self, policies: Sequence[str], compilers: Sequence[str]) -> None:
        """Capture the step under each policy, and piecewise with each compiler."""
        for policy in policies:
            declared = self.backend.capabilities.compilers
            chosen = tuple(compilers) or declared
            for compiler in chosen if policy == "piecewise" else (None,):
                name = policy if compiler is None else f"{policy}, {compiler}"
                try:
                    captured = capture(
                        self.model,
                        self.ids,
                        self.row,
                        policy=policy,
                        backend=self.backend,
                        host_args={"kv_len": self.kv_len},
                        compiler=compiler,
                    )
                except CapabilityError as error:
                    self.absent[name] = str(error)
                except CaptureError as error:
                    self.failed[name] = str(error)
                else:
                    self._add(name, captured, exact=compiler in (None, "eager"))

    def _add(self, name: str, captured: Captured, *, exact: bool) -> None:
        """Add the ways to replay one capture: one length, a few that return, always a new one."""
        kv_len, window = self.kv_len, self.shape.window

        def add(name: str, lengths: Callable[[], Iterator[int]]) -> None:
            way = _Contender(name, captured.replay, lengths, captured, exact=exact)
            self.contenders.append(way)

        add(name, lambda: itertools.repeat(kv_len))
        if captured.policy == "full" and self.contenders[-1].takes_lengths and window > 1:
            known = [max(1, kv_len - i) for i in range(min(4, kv_len))]
            fresh = itertools.cycle(range(1, window + 1))
            add("full, 4 lengths in turn", lambda: itertools.cycle(known))
            add("full, other length each step", lambda: fresh)

    def add_public(self) -> None:
        """Capture the step with the public package for breaks, where it is installed."""
        public = public_breakable(self.backend, self.model, self.ids, self.row, self.kv_len)
        if public is not None:
            way = _Contender(public.name, public.replay, lambda: itertools.repeat(self.kv_len))
            self.contenders.append(way)

    def check(self) -> None:
        """Compare every way with eager on data that no capture saw, and at another length."""
        self.model.fill_caches()  # steps during captures wrote there, and their tokens are no data
        self.ids.copy_((self.ids + 1) % self.shape.vocabulary)
        self.row.fill_(self.kv_len - 1)
        other = max(1, self.kv_len - 1)
        expected = {n: self._eager(kv_len=n).clone() for n in (self.kv_len, other)}
        for contender in self.contenders:
            length = other if contender.takes_lengths else self.kv_len
            contender.compare(expected[length], contender.call(kv_len=length))

    def time(self, steps: int, repeats: int) -> list[Row]:
        """Let all take turns and return their medians."""
        running = self._warm(min(steps, 3))
        for _ in range(repeats):
            for contender in running:
                contender.time(self.backend, steps)
        return [contender.row() for contender in running]

    def _warm(self, steps: int) -> list[_Contender]:
        """Run every way a little, untimed; return those that can run."""
        running = []
        for contender in self.contenders:
            try:
                contender.time(self.backend, steps)
            except UpdateError as error:
                self.absent[contender.name] = str(error)
                continue
            contender.timings.clear()
            running.append(contender)
        return running

    def close(self) -> None:
        """Free all captures."""
        for contender in self.contenders:
            if contender.captured is not None:
                contender.captured.close()


def measure(backend: Backend, shape: Shape, kv_len: int, args: argparse.Namespace) -> Outcome:
    """Return what every way that can run costs."""
    bench = _Bench(backend, shape, kv_len)
    try:
        with working("capturing"):
            bench.add_policies(args.policy or policies(), args.compiler or ())
            bench.add_public()
        bench.check()
        with working("timing"):
            rows = bench.time(args.steps, args.repeats)
    finally:
        bench.close()
    return Outcome(rows=rows, absent=bench.absent, failed=bench.failed)
