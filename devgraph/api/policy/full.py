"""Policy ``full``: the whole callable is one graph, and dynamic regions are updated in place.

A replay runs in one of three ways, which write the same outputs:

1. The recording for the key (the host values) is applied to a graph with the same nodes.
2. A *topology copy* runs if the key needs other nodes. It is another capture of the callable.
3. If the budget is exhausted, the step runs *broken*: in segments, as under ``breakable``.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree

from devgraph.api.errors import CaptureError, UpdateTopologyError, brief
from devgraph.api.graph import DeviceGraph
from devgraph.api.marks.marks import Mark
from devgraph.api.marks.scopes import GraphScope, LoopError
from devgraph.api.modes import Settings, autocast_cached
from devgraph.api.policy.breakable import BreakablePlan, capture_segments
from devgraph.api.policy.job import Job, Policy, UpdateBudget
from devgraph.api.session import Session, session
from devgraph.api.tensors import is_size

logger = logging.getLogger(__name__)

HostKwargs = dict[Mark, dict[str, Any]]

_COUNTED = """
    repeats hits misses copies copy_seconds broken_over_miss_budget broken_over_copy_budget
""".split()


_RECENT = 64  # maximum number of remembered keys without a recording


class _MissBudget:
    """The remaining number of new keys that may be recorded; see ``UpdateBudget.misses``."""

    def __init__(self, misses: int) -> None:
        self._misses = self._left = misses
        self._seen: OrderedDict[Hashable, None] = OrderedDict()

    def earn(self) -> None:
        if self._left < self._misses:
            self._left += 1

    def spend(self, key: Hashable) -> bool:
        """Return whether to record ``key`` now; if not, remember it."""
        if key in self._seen:
            del self._seen[key]
            return True
        if self._left > 0:
            self._left -= 1
            return True
        self._seen[key] = None
        if len(self._seen) > _RECENT:
            self._seen.popitem(last=False)
        return False


class FullPlan:
    """One graph with its topology copies and its broken form.

    ``notes`` counts replays with host arguments: ``repeats`` of the previous key, ``hits`` and
    ``misses`` of recordings, captured ``copies``, and broken steps by reason (``broken_...``).
    """

    def __init__(self, job: Job, graph: DeviceGraph, outputs: Any) -> None:
        self.segments: list[Any] = [graph]
        self.outputs = outputs
        # Separate tensors over the same memory, whose layout the user cannot change.
        self._targets = pytree.tree_map_only(
            torch.Tensor, torch.Tensor.detach, outputs, is_leaf=is_size
        )
        self.marks: list[Mark] = graph.marks
        self.run = graph.launch
        self.notes: dict[str, Any] = dict.fromkeys(_COUNTED if graph.calls else (), 0)
        self._job = job
        self._settings = Settings.current()
        self._budget = job.budget or UpdateBudget()
        self._misses = _MissBudget(self._budget.misses)
        # Asynchronous updates run the host code of regions for known keys too, so misses are free.
        self.free_misses = job.budget is None and job.backend.capabilities.async_update
        self._graphs = [graph]
        self._current: DeviceGraph | None = graph
        """The graph that ``run`` launches; None means the broken form."""
        self._broken: BreakablePlan | None = None
        self._host: HostKwargs = {}

    def bind(self, host: HostKwargs) -> None:
        key = self._graphs[0].key_of(host)
        if self._current is not None and self._current.key == key:
            self.notes["repeats"] += 1
            self._misses.earn()
            return
        recordings = self._job.pool.recordings
        for graph in self._graphs:
            if graph.key == key or recordings.holds(graph, key):
                graph.select(host, key)
                self._use(graph)
                self.notes["hits"] += 1
                self._misses.earn()
                return
        if self.free_misses or self._misses.spend(key) or not self._can_break():
            self.notes["misses"] += 1
            self._record(key, host)
        else:
            self._break(host, "broken_over_miss_budget")

    def close(self) -> None:
        self.outputs = self._targets = None
        for graph in self._graphs:
            graph.close()
        if self._broken is not None:
            self._broken.close()
            self._broken = None
        del self._job  # last, because ``close`` is called again if it fails

    # Graphs.

    def _use(self, graph: DeviceGraph) -> None:
        self._current, self.run = graph, graph.launch

    def _record(self, key: Hashable, host: HostKwargs) -> None:
        refusal: UpdateTopologyError | None = None
        for graph in self._graphs:
            try:
                graph.select(host, key)
            except UpdateTopologyError as error:
                refusal = refusal or error
            else:
                self._use(graph)
                return
        assert refusal is not None
        within = (
            len(self._graphs) <= self._budget.copies
            and self.notes["copy_seconds"] < self._budget.copy_seconds
        )
        copy = self._copy(host) if within and self._job.may_capture() else None
        if copy is not None:
            self._use(copy)
        elif self._can_break():
            self._break(host, "broken_over_copy_budget")
        else:
            raise refusal

    def _copy(self, host: HostKwargs) -> DeviceGraph | None:
        """Capture the whole callable with ``host``; return None on failure."""
        job, started = self._job, time.perf_counter()
        graph = job.make_graph()
        scope = GraphScope(graph, host=host)
        try:
            with (
                self._settings.restored(),
                session(job.pool, scope, mode=job.capture_error_mode) as recording,
            ):
                recording.begin(graph, spec=job.spec, arguments=job.tensors)
                outputs = job.call_tracked()
                self._deliver(outputs)
                recording.end()
        except (CaptureError, torch.OutOfMemoryError) as error:
            logger.warning("no topology copy for %s: %s", brief(list(host.values())), error)
            return None
        finally:
            seconds = time.perf_counter() - started
            self.notes["copy_seconds"] += seconds
        self.notes["copies"] += 1
        self._graphs.append(graph)
        logger.info(
            "captured a topology copy in %.3f s for %s", seconds, brief(list(host.values()))
        )
        return graph

    # The broken form.

    def _can_break(self) -> bool:
        return self._broken is not None or self._job.may_capture()

    def _break(self, host: HostKwargs, reason: str) -> None:
        self.notes[reason] += 1
        self._host = host
        self._current, self.run = None, self._run_broken

    def _run_broken(self) -> None:
        with self._settings.restored():
            if self._broken is None:
                # This capture also runs the step.
                with session(self._job.pool, mode=self._job.capture_error_mode) as held:
                    self._broken = capture_segments(
                        self._job, held, host=self._host, finish=self._deliver
                    )
                logger.info("captured the broken form: %d segments", len(self._broken.segments))
            else:
                self._broken.bind(self._host)
                self._broken.run()

    def _deliver(self, outputs: Any) -> None:
        self._job.outputs.deliver(self._targets, outputs)


class _Full(Policy):
    def capture(self, job: Job, session: Session) -> FullPlan:
        if not job.backend.capabilities.loops:
            return self._captured(job, session, unroll_reason="backend")
        outputs = copy.copy(job.outputs)  # for a second attempt, because a capture consumes them
        try:
            return self._captured(job, session)
        except LoopError as error:
            logger.info("captured with its loop unrolled: %s", error)
            reason = error.reason
        return self._captured(attrs.evolve(job, outputs=outputs), session, unroll_reason=reason)

    def _captured(self, job: Job, session: Session, *, unroll_reason: str = "") -> FullPlan:
        graph = job.make_graph()
        scope = GraphScope(graph, unroll_reason=unroll_reason)
        with session.recording(scope):
            session.begin(graph, spec=job.spec, arguments=job.tensors, names=job.names)
            # A region must not use casts that autocast cached for other code, because an update
            # runs only the region.
            caches = session.caches_casts and bool(job.owned.roots) and not job.spec.declared
            with autocast_cached(caches):
                outputs = job.call_tracked()
            outputs = job.outputs.filled(outputs)
            session.end(allow_empty=True)
            if graph.recorded_nothing:
                session.on_failure(graph.close)
                job.require_given(outputs)
        plan = FullPlan(job, graph, outputs)
        plan.notes.update(scope.loops)
        return plan


POLICY = _Full()
