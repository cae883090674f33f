"""The interface of policies: a policy turns a job into a plan."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import attrs
import torch

from devgraph.api.backend import Backend, new_graph
from devgraph.api.errors import (
    InputError,
    InputTypeError,
    brief,
    empty_capture,
    finite,
    whole,
)
from devgraph.api.graph import DeviceGraph
from devgraph.api.marks.host_values import HostSpec, exact_types_refused
from devgraph.api.marks.marks import Mark
from devgraph.api.marks.names import Names
from devgraph.api.marks.source import SourceLine
from devgraph.api.owned import Owned
from devgraph.api.pool import Pool
from devgraph.api.results import Outputs
from devgraph.api.session import Session
from devgraph.api.tensors import memory_of, tensors_in


@attrs.frozen(kw_only=True)
class UpdateBudget:
    """Limits of policy ``full`` for new host arguments during serving.

    A *broken* step runs in segments, as under ``breakable``. Recording a key takes about the host
    time of two broken steps, and each later step with this key saves almost the time of one broken
    step. The defaults bound the loss if no key is repeated.

    Raises:
        InputError: a limit is out of range.
        InputTypeError: a limit has a wrong type.
    """

    misses: int = 8
    """Number of keys that may be recorded at their first step.

    Each such key takes one from the remaining number, and each replay of a recorded key adds one,
    up to the limit. At 0, a new key is recorded at its second step, and its first step runs broken.
    """
    copies: int = 4
    """Maximum number of topology copies."""
    copy_seconds: float = 2.0
    """Maximum total time of capturing copies, in seconds."""
    may_capture: Callable[[], bool] | None = None
    """A callable that returns whether a replay may capture now.

    It should return False while outputs of the pool are in use, or if ranks must agree first. None
    allows captures, unless ``before_break`` is given: then all ranks must capture together.
    """

    def __attrs_post_init__(self) -> None:
        whole("misses", self.misses)
        whole("copies", self.copies)
        finite("copy_seconds", self.copy_seconds)
        if self.may_capture is not None and not callable(self.may_capture):
            raise InputTypeError(f"may_capture must be a function, got {brief(self.may_capture)}")


@attrs.frozen(kw_only=True)
class Job:
    """A request to a policy: the step and the settings of its capture."""

    fn: Callable[..., Any]
    owned: Owned
    """The arguments of the step and its reachable state."""
    spec: HostSpec
    backend: Backend
    pool: Pool
    outputs: Outputs
    """Memory for the outputs of the captured step."""
    capture_error_mode: str
    compiler: str | None
    before_break: Callable[[], None] | None
    """A function to call before each eager body in the capture, for example a barrier of ranks."""
    budget: UpdateBudget | None = None
    """Budget for new host arguments in replays; None means the defaults."""
    after_warmup: Callable[[], None] | None = None
    """A function to call after each warm-up run."""
    check: bool = False
    """Whether replays wait for the device after each segment, so that errors name the segment."""
    names: Names | None = None
    """The named calls to which nodes are assigned, if requested."""
    warmup: int
    """Number of warm-up runs."""
    snapshot_limit: int
    """Maximum total size of the copies of the state, in bytes."""
    recaptures: int
    """Maximum number of times that replays capture the step again because state changed."""
    regions: bool
    """Whether regions are part of the graph."""
    again: bool = False
    """Whether a replay requested this capture, because state changed."""
    phases: dict[str, float] = attrs.field(factory=dict)
    """Duration of each phase in seconds, filled during the capture."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for _, tensor in self.owned.tensors)

    def may_capture(self) -> bool:
        """Whether a replay may capture; see ``UpdateBudget.may_capture``."""
        if self.budget is not None and self.budget.may_capture is not None:
            return self.budget.may_capture()
        return self.before_break is None

    def require_given(self, outputs: Any) -> None:
        """Raise EmptyCaptureError unless a step without work returned existing tensors."""
        tensors, known = tensors_in(outputs), {memory_of(t) for _, t in self.owned.everything()}
        if not tensors or not known.issuperset(map(memory_of, tensors)):
            raise empty_capture(self.backend.device)

    def require_device(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise InputError if a tensor is on another device of the backend's type."""
        device = self.backend.device
        for name, tensor in tensors:
            near = tensor.device.type == device.type
            if near and tensor.device.index not in (None, device.index):
                raise InputError(
                    f"{name} is on {tensor.device}, but backend {self.backend.name!r} captures "
                    f"work on {device}, the current device when the process first used the "
                    f"backend. Move the tensor, or select the device before the first use."
                )

    def make_graph(self) -> DeviceGraph:
        """Return an empty graph with the reachable state of the step."""
        graph = new_graph(self.backend, self.pool)
        reached, graph.generators = self.owned.reached()
        graph.reached = [tensor for _, tensor in reached]
        return graph

    def call(self, host: Mapping[str, Any]) -> Any:
        """Run the step once with copies of the caller's containers."""
        with self.owned.run() as (args, kwargs):
            return self.fn(*args, **kwargs, **host)

    def call_tracked(self, asked: dict[str, SourceLine] | None = None) -> Any:
        """Call the step with tracked host arguments; see ``HostSpec.tracked``."""
        if not self.spec.declared:
            return self.call({})
        with exact_types_refused():
            return self.call(self.spec.tracked(asked))

    def finish_warmup_run(self) -> None:
        """Call ``after_warmup``, if given."""
        if self.after_warmup is not None:
            self.after_warmup()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block, without inner phases, to phase ``name``."""
        inside, started = sum(self.phases.values()), time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - started - (sum(self.phases.values()) - inside)
            self.phases[name] = self.phases.get(name, 0.0) + spent


class Plan(Protocol):
    """A finished capture: segments in order and their outputs."""

    segments: list[Any]
    """Objects with ``replay()``, which runs a segment once, and ``reset()``, which frees it."""
    outputs: Any
    marks: list[Mark]
    """Marks with host values to resolve at each replay."""
    notes: dict[str, Any]
    """Counters of the policy for ``Captured.stats``."""

    def bind(self, host: dict[Mark, dict[str, Any]]) -> None:
        """Set the host values of the next ``run``."""

    def run(self) -> None:
        """Run all segments once. The caller holds the pool's lock and has called ``order``."""

    def close(self) -> None:
        """Free everything."""


class Policy(Protocol):
    """A strategy that turns a callable into a ``Plan``."""

    def warm_up(self, job: Job, runs: int) -> Job:
        """Run the step ``runs`` times on the capture stream; return the job to capture.

        If the first run creates tensors for later runs, the step runs at least twice.
        """
        while runs > 0 or job.owned.is_unsettled:
            runs -= 1
            job.owned.rewind()
            job.outputs.hold(job.call(job.spec.declared))
            job.finish_warmup_run()
        return job

    def capture(self, job: Job, session: Session) -> Plan:
        """Capture ``job.fn`` in ``session``. After a failure, all graphs are freed."""
