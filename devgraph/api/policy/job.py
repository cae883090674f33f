"""What a policy is asked for, and what it gives: a job, a plan, and the segments of that plan."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import attrs
import torch

from devgraph.api.backend import Backend
from devgraph.api.errors import InputTypeError, brief, finite, whole
from devgraph.api.marks.host_values import HostSpec, exact_types_refused
from devgraph.api.marks.marks import Mark
from devgraph.api.marks.names import Names
from devgraph.api.marks.source import SourceLine
from devgraph.api.owned import Owned
from devgraph.api.pool import Pool
from devgraph.api.results import Outputs
from devgraph.api.session import Session


@attrs.frozen(kw_only=True)
class UpdateBudget:
    """Limits of policy ``full`` on recording and capturing, in the middle of serving, for new host
    arguments.

    A recording costs about as much host time as two steps that break, and every later step with
    the same key saves nearly one. The defaults bound what a trace without repeated keys loses.

    Raises:
        InputError: a limit is out of range; InputTypeError: it is of another kind.
    """

    misses: int = 8
    """Keys that may be recorded when they are first seen; each replay of a recorded key earns one
    back. Past it, a key is recorded when it is seen again, and the step breaks until then."""
    copies: int = 4
    """Topology copies: whole-graph captures for keys that need other nodes."""
    copy_seconds: float = 2.0
    """Time that capturing them may take in all."""
    may_capture: Callable[[], bool] | None = None
    """Asked before a copy or a broken form is captured in a replay; it answers False while outputs
    of the pool are leased, or where ranks have to agree first. None allows it, unless the capture
    was given ``before_break``: then other ranks take part, and none captures alone."""

    def __attrs_post_init__(self) -> None:
        whole("misses", self.misses)
        whole("copies", self.copies)
        finite("copy_seconds", self.copy_seconds)
        if self.may_capture is not None and not callable(self.may_capture):
            raise InputTypeError(f"may_capture must be a function, got {brief(self.may_capture)}")


@attrs.frozen(kw_only=True)
class Job:
    """What a policy is asked to capture."""

    fn: Callable[..., Any]
    owned: Owned
    """The arguments of the step, and what else it can reach."""
    spec: HostSpec
    backend: Backend
    pool: Pool
    outputs: Outputs
    """Where the captured step leaves what it returns."""
    capture_error_mode: str
    compiler: str | None
    before_break: Callable[[], None] | None
    """Called before each break's eager body while capturing: a barrier between ranks."""
    budget: UpdateBudget | None = None
    """What may be spent on new host arguments in a replay; None for the defaults."""
    after_warmup: Callable[[], None] | None = None
    """Called after each warm-up run."""
    check: bool = False
    """Wait for the device after every segment of a replay, so that its error names it."""
    names: Names | None = None
    """What names the nodes of the graphs."""
    phases: dict[str, float] = attrs.field(factory=dict)
    """Seconds by phase, filled while the capture is made."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The bound tensors."""
        return tuple(tensor for _, tensor in self.owned.tensors)

    def call(self, host: Mapping[str, Any]) -> Any:
        """Run the step once with containers of its own.

        Raises:
            CaptureError: the step rebinds a tensor; see ``Owned.run``.
        """
        with self.owned.run() as (args, kwargs):
            return self.fn(*args, **kwargs, **host)

    def call_tracked(self, asked: dict[str, SourceLine] | None = None) -> Any:
        """Call the step with tracked host arguments; see ``HostSpec.tracked``."""
        if not self.spec.declared:
            return self.call({})
        with exact_types_refused():
            return self.call(self.spec.tracked(asked))

    def warmed_up(self) -> None:
        """Say that a warm-up run is done."""
        if self.after_warmup is not None:
            self.after_warmup()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time that the block takes, without phases inside it, to phase ``name``."""
        inside, started = sum(self.phases.values()), time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started - (sum(self.phases.values()) - inside)
            self.phases[name] = self.phases.get(name, 0.0) + spent


class Plan(Protocol):
    """A finished capture: segments in order, and the outputs that they write."""

    segments: list[Any]
    """Each with ``replay()``, which runs it once, and ``reset()``, which frees what it holds."""
    outputs: Any
    marks: list[Mark]
    """Marks whose host values must be resolved at each replay."""
    notes: dict[str, Any]
    """What else the policy has to say about the capture, for reports."""

    def bind(self, host: dict[Mark, dict[str, Any]]) -> None:
        """Make the next ``run`` use these host values."""

    def run(self) -> None:
        """Run all segments once in one flat loop, under the pool's lock and after its ``order``."""

    def close(self) -> None:
        """Free everything."""


class Policy(Protocol):
    """Turns a callable into a ``Plan``."""

    def warm_up(self, job: Job, runs: int) -> Job:
        """Run the step ``runs`` times as it will be captured; return the job to capture.

        Libraries set themselves up lazily in these runs, on the stream of the capture.
        """
        for _ in range(runs):
            job.outputs.hold(job.call(job.spec.declared))
            job.warmed_up()
        return job

    def capture(self, job: Job, session: Session) -> Plan:
        """Capture ``job.fn`` in ``session``; all or nothing."""
