"""Deliberately broken backends: what the conformance suite must catch.

Each mutant is the CPU reference with one fault. As a pytest plugin (``-p mutants``) this module
registers every one of them as a backend named ``mutant-<name>``.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar

import attrs
import torch

import devgraph as dg
from devgraph.api.executable import Call, Executable, Recordings
from devgraph.api.gates import HostGates
from devgraph.api.marks.marks import Mark
from devgraph.cpu.backend import CpuBackend, CpuGraph, CpuPool, CpuRecording
from devgraph.cpu.memory import BlockPool
from devgraph.cpu.recorder import Recorder

__all__ = ["MUTANTS", "Mutant"]


@attrs.frozen
class Mutant:
    """One fault, and the test of the suite that must fail because of it."""

    name: str
    fault: str
    caught_by: str
    graph: type[CpuGraph] = CpuGraph
    pool: type[CpuPool] = CpuPool
    capabilities: Mapping[str, Any] = attrs.field(factory=dict)
    gates: type[HostGates] | None = None

    @property
    def backend(self) -> str:
        """The name under which it is registered."""
        return f"mutant-{self.name}"

    def make(self) -> CpuBackend:
        """Return the broken backend."""
        return _MutantBackend(self)


class _MutantBackend(CpuBackend):
    def __init__(self, mutant: Mutant) -> None:
        super().__init__()
        self.name = mutant.backend
        self.capabilities = attrs.evolve(CpuBackend.capabilities, **mutant.capabilities)
        self._mutant = mutant

    def make_pool(self, *, releasable: bool = False) -> CpuPool:
        return self._mutant.pool(self, releasable=releasable)

    def make_gate_channel(self, gates: dg.Gates) -> Any:
        channel = super().make_gate_channel(gates)
        if self._mutant.gates is not None:
            assert isinstance(channel, HostGates)
            channel.__class__ = self._mutant.gates
        return channel

    def make_graph(self, pool: dg.Pool | None = None) -> CpuGraph:
        pool = self.make_pool() if pool is None else pool
        pool.check(self)
        return self._mutant.graph(self, pool)


class GatesStandOpen(HostGates):
    def wait(self, place: int, timeout: float, recording: bool) -> None:
        pass


class _Launches(CpuGraph):
    """Launches by ``launch_as``, which is given the launch that would be right."""

    def _end(self) -> Executable:
        return Call(functools.partial(self.launch_as, super()._end().launch))

    def launch_as(self, launch: Callable[[], None]) -> None:
        raise NotImplementedError


class ReplayDoesNothing(_Launches):
    def launch_as(self, launch: Callable[[], None]) -> None:
        pass


class LaunchSwallowsErrors(_Launches):
    def launch_as(self, launch: Callable[[], None]) -> None:
        with contextlib.suppress(Exception):
            launch()


class LaunchReturnsEarly(_Launches):
    def launch_as(self, launch: Callable[[], None]) -> None:
        threading.Timer(0.2, launch).start()


class FreesNothing(CpuGraph):
    def _free(self) -> None:
        pass


class ClearedInSilence(CpuGraph):
    """Does not tell those who bound its executable that it is gone."""

    def _leave_for(self, state: dg.GraphState) -> None:
        epoch = self.pool.epoch
        super()._leave_for(state)
        self.pool.epoch = epoch


class CaptureExecutes(CpuGraph):
    def _end(self) -> Executable:
        executable = super()._end()
        executable.launch()
        return executable


class InputsAreCopiedAtCapture(_Launches):
    """Replays once, on the first launch, and never looks at its inputs again."""

    _launched = False

    def launch_as(self, launch: Callable[[], None]) -> None:
        if not self._launched:
            self._launched = True
            launch()


class CapturesShareNothing(CpuGraph):
    """Every graph has memory of its own."""

    def _begin(self, mode: str) -> None:
        assert isinstance(self.pool, ManyPools)
        own = BlockPool()
        recorder = Recorder(
            own,
            others=(self.pool.blocks, self.pool.regions, *self.pool.private),
            metadata=self._metadata,
        )
        recorder.__enter__()
        self.pool.private.append(own)
        self._recorder = recorder


class ManyPools(CpuPool):
    def __init__(self, backend: CpuBackend, **options: Any) -> None:
        super().__init__(backend, **options)
        self.private: list[BlockPool] = []

    @property
    def bytes(self) -> int:
        return super().bytes + sum(pool.reserved_bytes for pool in self.private)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        for pool in self.private:
            tensor = pool.alias(tensor)
        return super().alias(tensor)


class WeakPool(CpuPool):
    """Aliases every tensor, so that breaks keep nothing alive that they read."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        alias = super().alias(tensor)
        if alias is not tensor or tensor.layout is not torch.strided or not tensor.numel():
            return alias
        storage = tensor.untyped_storage()
        bare = torch._C._construct_storage_from_data_pointer(
            storage.data_ptr(), tensor.device, storage.nbytes()
        )
        with torch.no_grad():
            return torch.empty(0, dtype=tensor.dtype).set_(
                bare, tensor.storage_offset(), tensor.shape, tensor.stride()
            )


class RandomNumbersAreFrozen(_Launches):
    _seed: torch.Tensor | None = None

    def launch_as(self, launch: Callable[[], None]) -> None:
        state = torch.get_rng_state()
        if self._seed is None:
            self._seed = state
        torch.set_rng_state(self._seed)
        launch()
        torch.set_rng_state(state)


class FailedCaptureGoesOn(CpuGraph):
    """After an exception the thread is still recording."""

    def _abort(self) -> None:
        self._recorder = None
        self._free()


class FailedCaptureSpendsRandomNumbers(CpuGraph):
    def _abort(self) -> None:
        super()._abort()
        torch.rand(1)


class FailedCaptureKeepsMemory(CpuGraph):
    _leaked: ClassVar[list[Any]] = []

    def _abort(self) -> None:
        recorder = self._recorder
        super()._abort()
        if recorder is not None:
            self._leaked.append(self.pool.blocks.live())
            self._leaked.append(
                [self.pool.blocks.empty((64, 1024), (1024, 1), torch.float32) for _ in range(8)]
            )


class FailureIsReplaced(CpuGraph):
    """Cleaning up raises, and what the user's code raised is lost."""

    def cancel(self) -> None:
        super().cancel()
        raise RuntimeError("cleaning up")


class CloseFreesNothing(CpuGraph):
    _kept: ClassVar[list[Any]] = []

    def _free(self) -> None:
        self._kept.append((self._tape, [b.shared for b in self.pool.blocks.live()]))
        self._kept.append(torch.ones(1 << 18))
        self._tape = None


class EmptyCaptureIsAccepted(CpuGraph):
    def _size(self) -> tuple[int | None, int]:
        nodes, size = super()._size()
        return max(nodes or 0, 1), size


# Updates.


class UpdateIsIgnored(CpuGraph):
    def _apply(self, recording: CpuRecording) -> None:
        pass


class UpdateIsLost(_Launches):
    """An update is dropped if no launch used the one before."""

    _is_new = False

    def _apply(self, recording: CpuRecording) -> None:
        if not self._is_new:
            super()._apply(recording)
        self._is_new = True

    def launch_as(self, launch: Callable[[], None]) -> None:
        self._is_new = False
        launch()


class RecordApplies(CpuGraph):
    def _record(self, host: Mapping[Mark, dict[str, Any]]) -> CpuRecording:
        recording = super()._record(host)
        super()._apply(recording)
        return recording


class UpdateComesLate(_Launches):
    """The replay after the next one is the first to see an update."""

    _pending: CpuRecording | None = None

    def _apply(self, recording: CpuRecording) -> None:
        self._pending = recording

    def launch_as(self, launch: Callable[[], None]) -> None:
        launch()
        if self._pending is not None:
            pending, self._pending = self._pending, None
            super()._apply(pending)


class UpdateGoesToTheWrongRegion(CpuGraph):
    def _apply(self, recording: CpuRecording) -> None:
        spans = list(recording.changes)
        entries = list(recording.changes.values())
        turned = [*entries[1:], *entries[:1]]
        super()._apply(CpuRecording(changes=dict(zip(spans, turned, strict=True))))


class OnlyTheFirstRegionIsUpdated(CpuGraph):
    def _apply(self, recording: CpuRecording) -> None:
        first = next(iter(recording.changes.items()))
        super()._apply(CpuRecording(changes=dict([first])))


class RecordingsThatStay(Recordings):
    def drop(self, owner: object) -> None:
        pass


class PoolThatKeepsRecordings(CpuPool):
    def __init__(self, backend: CpuBackend, **options: Any) -> None:
        super().__init__(backend, **options)
        vars(self)["recordings"] = RecordingsThatStay()


class RecordingsOfAnyGraph(RecordingsThatStay):
    """A key finds what an earlier graph of the pool recorded for it."""

    def get(self, owner: object, key: Hashable) -> Any:
        for (known, other), kept in self._items.items():
            if other == key and known != id(owner):
                return kept.recording
        return super().get(owner, key)


class PoolThatMixesRecordings(CpuPool):
    def __init__(self, backend: CpuBackend, **options: Any) -> None:
        super().__init__(backend, **options)
        vars(self)["recordings"] = RecordingsOfAnyGraph()


class RecordingsOutliveTheCapture(CpuGraph):
    """A recording of an earlier capture is applied to the present one, region by region."""

    def _apply(self, recording: CpuRecording) -> None:
        entries = recording.changes.values()
        spans = [call.note for call in self.calls]
        super()._apply(CpuRecording(changes=dict(zip(spans, entries, strict=False))))


class LoopsAreNotRepeated(CpuGraph):
    def _loop(self, body: Callable[[], None], going: torch.Tensor) -> int:
        body()
        return 0


class FailedUpdateLosesTheExecutable(CpuGraph):
    def _record(self, host: Mapping[Mark, dict[str, Any]]) -> CpuRecording:
        tape, self._tape = self._tape, None
        recording = super()._record(host)
        self._tape = tape
        return recording


class HalfAnUpdateIsApplied(CpuGraph):
    """Applies each region as soon as it is recorded, and stays ready when a later one fails."""

    def _record(self, host: Mapping[Mark, dict[str, Any]]) -> CpuRecording:
        calls = self.calls
        changes = {}
        try:
            for call in calls:
                vars(self)["calls"] = [call]
                recording = super()._record(host)
                super()._apply(recording)
                changes.update(recording.changes)
        finally:
            vars(self)["calls"] = calls
        return CpuRecording(changes=changes)


class RegionsRecordIntoTheGraphsMemory(CpuGraph):
    def _record(self, host: Mapping[Mark, dict[str, Any]]) -> CpuRecording:
        pool = self.pool
        kept, pool.regions = pool.regions, pool.blocks
        try:
            return super()._record(host)
        finally:
            pool.regions = kept


class RegionsRunAtEveryReplay(CpuGraph):
    """Host code of the regions runs although nothing changed: no key equals an earlier one."""

    _count = 0

    def key_of(self, host: Mapping[Mark, dict[str, Any]]) -> Hashable:
        self._count += 1
        return (super().key_of(host), self._count)


class ReplaysOfAPoolOverlap(CpuPool):
    """The memory of one graph is handed to another while the first one's outputs are in use."""

    def order(self) -> None:
        gc.collect()
        for block in self.blocks.live():
            torch.empty(0, dtype=torch.uint8).set_(block.shared).fill_(0xFF)


_UPDATED = "test_update_is_seen_by_the_next_replay_and_by_later_ones"

MUTANTS = (
    Mutant(
        "replay-does-nothing",
        "a replay runs nothing",
        "test_every_replay_runs_the_work_once",
        ReplayDoesNothing,
    ),
    Mutant(
        "launch-swallows-errors",
        "a replay that fails returns as if it had run",
        "test_error_of_a_launch_is_raised",
        LaunchSwallowsErrors,
    ),
    Mutant(
        "launch-returns-early",
        "a replay runs later, and the fence does not know it",
        "test_fence_follows_earlier_work",
        LaunchReturnsEarly,
    ),
    Mutant(
        "nothing-freed",
        "a graph that is closed keeps what it recorded",
        "test_graph_that_was_freed_releases_the_tensors_that_it_used",
        FreesNothing,
    ),
    Mutant(
        "cleared-in-silence",
        "a graph that is cleared leaves the pool's epoch as it is",
        "test_bound_steps_do_not_launch_a_cleared_graph",
        ClearedInSilence,
    ),
    Mutant(
        "capture-executes",
        "the captured work also runs during the capture",
        "test_capture_does_not_execute",
        CaptureExecutes,
    ),
    Mutant(
        "inputs-copied",
        "replays repeat the result of the first one",
        "test_replay_reads_current_data",
        InputsAreCopiedAtCapture,
    ),
    Mutant(
        "pool-not-shared",
        "every graph has memory of its own",
        "test_many_buckets_cost_little_memory",
        CapturesShareNothing,
        ManyPools,
    ),
    Mutant(
        "pool-overwritten",
        "a replay destroys memory that other graphs' outputs hold",
        "test_output_survives_replays_of_the_other_buckets",
        pool=ReplaysOfAPoolOverlap,
    ),
    Mutant(
        "weak-break-inputs",
        "breaks do not keep alive what they read",
        "test_breaks_keep_outside_tensors_alive",
        pool=WeakPool,
    ),
    Mutant(
        "loops-not-repeated",
        "a loop takes one turn",
        "test_a_loop_ends_when_every_request_is_done",
        LoopsAreNotRepeated,
    ),
    Mutant(
        "rng-frozen",
        "every replay draws the same numbers",
        "test_replays_draw_like_eager_steps",
        RandomNumbersAreFrozen,
    ),
    Mutant(
        "failed-capture-goes-on",
        "after an exception the thread is still capturing",
        "test_exception_of_a_body_is_raised",
        FailedCaptureGoesOn,
    ),
    Mutant(
        "failed-capture-spends-random-numbers",
        "a failed capture moves the random generator",
        "test_exception_of_a_body_is_raised",
        FailedCaptureSpendsRandomNumbers,
    ),
    Mutant(
        "failed-capture-keeps-memory",
        "a failed capture keeps its memory",
        "test_failed_captures_leak_nothing",
        FailedCaptureKeepsMemory,
    ),
    Mutant(
        "failure-replaced",
        "an error of the clean-up hides the user's exception",
        "test_exception_of_a_body_is_raised",
        FailureIsReplaced,
    ),
    Mutant(
        "close-frees-nothing",
        "closed graphs keep their memory",
        "test_memory_is_flat_over_many_captures",
        CloseFreesNothing,
    ),
    Mutant(
        "empty-capture-accepted",
        "a capture without work makes a graph",
        "test_empty_capture_is_refused_and_the_next_one_works",
        EmptyCaptureIsAccepted,
    ),
    Mutant(
        "declares-streams",
        "side streams are declared and do not work",
        "test_side_stream_that_is_not_joined_is_refused",
        capabilities={"streams": True},
    ),
    Mutant(
        "update-ignored",
        "new host arguments change nothing",
        _UPDATED,
        UpdateIsIgnored,
    ),
    Mutant(
        "update-lost",
        "an update is dropped if no launch used the one before",
        _UPDATED,
        UpdateIsLost,
    ),
    Mutant(
        "record-applies",
        "recording new host arguments changes the graph",
        "test_recording_is_not_used_before_it_is_applied",
        RecordApplies,
    ),
    Mutant(
        "update-late",
        "an update is seen one replay too late",
        _UPDATED,
        UpdateComesLate,
    ),
    Mutant(
        "update-wrong-region",
        "regions get each other's recordings",
        "test_each_region_gets_its_own_argument",
        UpdateGoesToTheWrongRegion,
    ),
    Mutant(
        "update-first-region-only",
        "only the first region is updated",
        "test_each_region_gets_its_own_argument",
        OnlyTheFirstRegionIsUpdated,
    ),
    Mutant(
        "stale-recordings",
        "recordings survive the reset of their graph",
        "test_reset_forgets_recordings",
        RecordingsOutliveTheCapture,
        PoolThatKeepsRecordings,
    ),
    Mutant(
        "stale-recordings-after-invalidate",
        "graphs captured after invalidate use recordings of those before",
        "test_invalidated_runner_forgets_recordings",
        RecordingsOutliveTheCapture,
        PoolThatMixesRecordings,
    ),
    Mutant(
        "failed-update-loses-the-executable",
        "after a failed update nothing can be replayed",
        "test_failed_update_keeps_the_old_result_or_refuses_to_replay",
        FailedUpdateLosesTheExecutable,
    ),
    Mutant(
        "half-an-update",
        "a failed update is half applied and the graph stays ready",
        "test_failed_update_keeps_the_old_result_or_refuses_to_replay",
        HalfAnUpdateIsApplied,
    ),
    Mutant(
        "scratch-in-the-graphs-pool",
        "re-recorded regions take memory that the graph believes to be its own",
        "test_region_temporaries_do_not_touch_the_memory_of_the_graph",
        RegionsRecordIntoTheGraphsMemory,
    ),
    Mutant(
        "update-every-replay",
        "host code of regions runs although no host argument changed",
        "test_unchanged_key_runs_no_host_code",
        RegionsRunAtEveryReplay,
    ),
    Mutant(
        "gates-stand-open",
        "a replay never waits at a gate",
        "test_forgotten_gate_is_named_and_the_next_replay_works",
        gates=GatesStandOpen,
    ),
)

SOUND = Mutant("none", "no fault: the suite must pass", "")


def _factory(mutant: Mutant) -> Callable[[], CpuBackend]:
    return mutant.make


for _mutant in (*MUTANTS, SOUND):
    dg.register(_mutant.backend, _factory(_mutant))
