"""A graph over torch.npu.NPUGraph whose regions are task groups, which are updated in replays."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from devgraph.api.errors import UpdateError
from devgraph.api.executable import Call, Executable, Recording, call_weakly
from devgraph.api.graph import GraphState
from devgraph.api.marks.calls import MarkedCall
from devgraph.api.marks.marks import Args, Kwargs, Mark
from devgraph.api.tensors import with_bits_of
from devgraph.api.torchlike.base import TorchGraph, TorchPool
from devgraph.api.torchlike.guards import RandomGuard
from devgraph.npu.channel import Job
from devgraph.npu.device import NpuDevice
from devgraph.npu.task_groups import Group, Host, TaskGroups

logger = logging.getLogger(__name__)


@attrs.define(eq=False)
class _Recording(Recording):
    """Host values of one key for the task groups of a graph."""

    host: Mapping[Mark, dict[str, Any]]
    bytes: int = 512


class NpuPool(TorchPool):
    """A pool that frees its memory later, in the order that torch_npu requires."""

    backend: NpuDevice

    def bare(self, tensor: torch.Tensor) -> torch.Tensor:
        # A plain torch storage would lack the memory format that torch_npu's operators read.
        return with_bits_of(tensor, self.backend.native_module._weak_ref_tensor(tensor))

    def fence(self) -> Callable[[], bool]:
        """Return a callable that reports, without blocking, whether all replays have ended."""
        if self._last_stream is None:
            return lambda: True
        return self.backend.fence(self._last_stream)

    def __del__(self) -> None:
        take = self.__dict__.pop
        try:
            if "_memory" in self.__dict__:  # False if the constructor failed
                # The last entry is freed first, because the pool object frees its memory only if
                # nothing else uses it. Pass a list, because a caller's frame may keep arguments
                # alive until the call ends, as under Dynamo.
                keys = ("_stuck", "_memory", "_region_memory", "keeper")
                self.backend.bury_memory([take(key, None) for key in keys])
        except Exception:  # Modules may be gone at interpreter exit.
            pass


class NpuGraph(TorchGraph):
    """A graph whose task groups are updated during its replays."""

    applies_at_once = True
    pool: NpuPool
    backend: NpuDevice

    def __init__(self, backend: NpuDevice, pool: TorchPool) -> None:
        super().__init__(backend, pool)
        self._regions: TaskGroups | None = None
        self._group_open: Any = None
        self._launched: Callable[[], None] = call_weakly(self._refuse_replay)
        self._wanted: Host = {}  # host values that the groups need in the next replay
        self._job: Job | None = None
        self._has_raised_failure = False
        self._nodes: int | None = None

    @property
    def state(self) -> GraphState:
        regions = self._regions
        broken = regions is not None and regions.failure is not None
        if broken and self._state is GraphState.READY:
            self._leave_for(GraphState.DIRTY)
        return self._state

    def bound(self, stream: int | None = None) -> Callable[[], None]:
        launch = super().bound(stream)
        if self.calls or stream is not None:
            return launch
        order = self.pool.order

        def ordered() -> None:
            order()  # Note the stream, so that closing waits for the replay.
            launch()

        return ordered

    def _end(self) -> Executable:
        executable = super()._end()
        self._nodes = self.backend.count_nodes(self._native)
        if self._regions is None:
            return executable
        self._regions.applied = self._regions.planned = self._wanted = self._host
        # Call the compiled replay() of the base class. After an interrupt in torch_npu's Python
        # method, the graph may or may not have been launched.
        self._launched = super(self.backend.native_class, self._native).replay
        return Call(call_weakly(self._launch_and_signal))

    def _abort(self) -> None:
        group, self._group_open = self._group_open, None
        if group is not None:
            with contextlib.suppress(Exception):
                self.backend.namespace.graph_task_group_end(group)
        native = self._native
        super()._abort()
        if native is not None:
            self.backend.streams.pop(native, None)
        self._drop_regions()

    def _recover(self, native: Any) -> None:
        # torch_npu restores its allocator before it reports the failure, but leaves the use count
        # of the pool too high, which would keep the memory forever.
        while self.pool.uses > self._uses:
            self.backend.release_pool(self.pool)

    def capture_region(self, mark: Mark, args: Args, kwargs: Kwargs, host: dict[str, Any]) -> Any:
        reason = (
            f"an update runs region {mark.name} again, where random numbers would not continue the "
            f"sequence of the replays. Draw them outside the region and pass them as a tensor."
        )
        with RandomGuard(reason):
            return super().capture_region(mark, args, kwargs, host)

    def _region_begin(self, call: MarkedCall) -> None:
        backend = self.backend
        if self._regions is None:
            backend.channel.start()
            self._regions = TaskGroups(backend.channel, backend.namespace, self.pool.region_memory)
        stream = backend.namespace.current_stream(backend.device)
        call.note = event = backend.take_event()
        event.wait(stream)
        event.reset(stream)
        backend.namespace.graph_task_group_begin(stream)
        self._group_open = stream

    def _region_end(self, call: MarkedCall) -> None:
        stream, self._group_open = self._group_open, None
        handle = self.backend.namespace.graph_task_group_end(stream)
        assert self._regions is not None
        self._regions.groups.append(Group(call, call.note, handle))

    def _own_recording(self) -> _Recording:
        return _Recording(self._host)

    def _record(self, host: Mapping[Mark, dict[str, Any]]) -> _Recording:
        """Apply new values now; if a region raises, restore the old values and re-raise.

        The launch applies the values instead if ``backend.try_new_values`` is false. It also does
        so if regions can raise only before they launch work, as the backend's attention does.
        """
        regions = self._settled()
        if self.backend.try_new_values and not all(mark.raises_before_launch for mark in host):
            self.pool.order()
            self.backend.drain()
            regions.try_values(host, f"the update of {self!r}")
            self._refuse_broken(regions)
        return _Recording(host)

    def _apply(self, recording: _Recording) -> None:  # type: ignore[override]
        self._wanted = recording.host

    def _launch_and_signal(self) -> None:
        regions = self._settled()
        regions.make_room()
        self._refuse_broken(regions)
        backend, host = self.backend, self._wanted
        channel = backend.channel
        backend.free_buried()
        stream = backend.namespace.current_stream(backend.device)
        job = regions.signal(host)
        with channel.launching():
            channel.require_alive()
            if not backend.replay_first:
                self._issue(regions, job)
            try:
                self._launched()
                self._follow(regions, job, host, stream)
            except RuntimeError as error:  # The driver refused the launch.
                if not backend.replay_first:
                    regions.failure = error
                raise
            except BaseException:  # After an interrupt, a launched replay still needs its records.
                self._follow(regions, job, host, stream)
                raise

    def _follow(self, regions: TaskGroups, job: Job, host: Host, stream: Any) -> None:
        self._job = job
        regions.launched(job, host, stream)

    def _issue(self, regions: TaskGroups, job: Job) -> None:
        """Record the events of the next replay, and wait until these records are issued.

        If the replay is not launched afterwards, the state of the events is unknown.
        """
        self.backend.drain()
        try:
            self.backend.channel.queue(job)
            self.backend.channel.finish(job, f"the update of {self!r}")
        except BaseException as error:
            if not isinstance(error, Exception):
                error = UpdateError(
                    "an interrupt occurred while the events of a replay were recorded, so their "
                    "state is unknown; call reset() and capture again"
                )
            regions.failure = regions.failure or error
            raise

    def _settled(self) -> TaskGroups:
        """Wait until the last update has been issued; raise its exception or return the regions."""
        regions, job = self._regions, self._job
        assert regions is not None
        if job is not None:
            try:
                self.backend.channel.finish(job, f"the last update of {self!r}")
            except Exception:
                self._job = None
                self._leave_for(GraphState.DIRTY)
                self._has_raised_failure = True
                raise
            self._job = None
        self._refuse_broken(regions)
        return regions

    def _refuse_broken(self, regions: TaskGroups) -> None:
        """Raise the failure of the regions the first time, and then the error for a dirty graph."""
        if regions.failure is not None:
            self._leave_for(GraphState.DIRTY)
            self.backend.channel.unwatch(regions)
            if self._has_raised_failure:
                self.require_ready()
            self._has_raised_failure = True
            raise regions.failure

    def _size(self) -> tuple[int | None, int]:
        return self._nodes, 0

    def _free(self) -> None:
        native, self._native = self._native, None
        self._nodes = None
        regions = self._drop_regions()
        if native is not None:
            self.backend.retire(native, self.pool.fence, regions)

    def _drop_regions(self) -> TaskGroups | None:
        regions, self._regions = self._regions, None
        self._job = None
        self._wanted = {}
        self._launched = call_weakly(self._refuse_replay)
        self._has_raised_failure = False
        return regions

    def __del__(self) -> None:
        try:
            if self._regions is not None and self.backend.channel.on_thread():
                self._end_later()  # The update thread must not wait for locks.
                return
        except Exception:  # The constructor failed, or the interpreter exits.
            pass
        super().__del__()
