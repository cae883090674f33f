"""The CPU reference backend: pool, graph, capabilities, and the check of a step."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from devgraph.api.backend import Backend
from devgraph.api.capabilities import Capabilities
from devgraph.api.errors import CaptureError, ResourceError
from devgraph.api.executable import Call, EvictableExecutable, Executable, Recording
from devgraph.api.gates import GateChannel, Gates, HostGates
from devgraph.api.graph import DeviceGraph
from devgraph.api.marks.calls import MarkedCall
from devgraph.api.marks.marks import Mark, RegionScope, entered
from devgraph.api.marks.source import user_line
from devgraph.api.pool import Pool
from devgraph.cpu.check import check_step
from devgraph.cpu.compiled import CompiledPiece
from devgraph.cpu.memory import BlockPool, is_shortage
from devgraph.cpu.metadata import Metadata
from devgraph.cpu.modes import Dispatching, Functions, current_recorder
from devgraph.cpu.recorder import Recorder
from devgraph.cpu.tape import Entry, Op, Span, Tape, check_topology
from devgraph.cpu.violations import Violation

logger = logging.getLogger(__name__)

ENTRY_BYTES = 2048
"""Estimated bytes of a tape entry, including its bound call and about three tensors. A decode step
of 30 layers took 1932 bytes per entry (1277 entries, torch 2.13)."""


@attrs.define(kw_only=True, eq=False)
class CpuRecording(Recording):
    """The tape entries of all regions for one key."""

    changes: Mapping[Span, tuple[Entry, ...]]

    @property
    def bytes(self) -> int:
        return ENTRY_BYTES * sum(len(entries) for entries in self.changes.values())


class CpuPool(Pool):
    """A pool with separate blocks for graphs and for recordings of regions."""

    def __init__(self, backend: CpuBackend, *, releasable: bool = False) -> None:
        super().__init__(backend, releasable=releasable)
        self.blocks = BlockPool()
        self.regions = BlockPool()
        self.graphs_begun = 0  # in the current session
        self.states: dict[int, torch.Tensor] = {}
        """Latest states of random generators in the session, by generator address."""

    @property
    def bytes(self) -> int:
        return self.blocks.reserved_bytes + self.regions.reserved_bytes

    def note_outputs(self, outputs: Iterable[torch.Tensor]) -> None:
        recorder = current_recorder()
        if recorder is not None:
            recorder.note_outputs(outputs)

    def _release(self) -> None:
        self.blocks.release()

    def _restore(self) -> None:
        self.blocks.restore()

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided or not tensor.is_cpu:
            return tensor
        return self.regions.alias(self.blocks.alias(tensor))


class CpuGraph(DeviceGraph):
    """A graph that replays a tape."""

    applies_at_once = True
    pool: CpuPool

    def __init__(self, backend: CpuBackend, pool: CpuPool) -> None:
        super().__init__(backend, pool)
        self._metadata = backend.metadata
        self._recorder: Recorder | None = None
        self._tape: Tape | None = None
        self._touched: Mapping[int, torch.UntypedStorage] = {}

    def _begin(self, mode: str) -> None:
        recorder = Recorder(
            self.pool.blocks,
            others=(self.pool.regions,),
            metadata=self._metadata,
            arguments=self.arguments,
            reached=self.reached,
            generators=self.generators,
            continues=self.pool.graphs_begun > 0,
            states=self.pool.states,
        )
        self.pool.graphs_begun += 1
        self._recorder = recorder
        recorder.__enter__()

    def _end(self) -> Executable:
        recorder = self._leave()
        assert recorder is not None
        self._tape = tape = recorder.tape()
        self._touched = recorder.touched if self.calls else {}
        tape.drop()

        def make() -> Executable:
            tape.make()
            return Call(tape.replay)

        return EvictableExecutable(
            self, self.pool.recordings, make=make, drop=tape.drop, nbytes=len(tape) * ENTRY_BYTES
        )

    def _abort(self) -> None:
        self._leave(failure=CaptureError)
        self._free()

    def _leave(self, failure: type[BaseException] | None = None) -> Recorder | None:
        recorder = self._recorder
        if recorder is not None:
            recorder.__exit__(failure)
        self._recorder = None
        return recorder

    def _free(self) -> None:
        tape, self._tape = self._tape, None
        self._touched = {}
        if tape is not None:
            tape.close()

    def _size(self) -> tuple[int | None, int]:
        count = 0 if self._tape is None else len(self._tape)
        return count, count * ENTRY_BYTES

    def _region_begin(self, call: MarkedCall) -> None:
        assert self._recorder is not None
        call.note = self._recorder.begin_span(f"region {call.mark.name}")

    def _region_end(self, call: MarkedCall) -> None:
        assert self._recorder is not None
        self._recorder.end_span(call.note)
        count = self._recorder.count
        call.nodes = range(count - len(call.note.entries), count)

    def _loop(self, body: Callable[[], None], going: torch.Tensor) -> int:
        assert self._recorder is not None
        return self._recorder.loop(body, going)

    def _nodes_so_far(self) -> int | None:
        return None if self._recorder is None else self._recorder.count

    def _own_recording(self) -> Recording:
        return CpuRecording(changes={call.note: call.note.entries for call in self.calls})

    def _record(self, host: Mapping[Mark, dict[str, Any]]) -> Recording:
        tensors = [*self.arguments, *self.pool.registered]
        for call in self.calls:
            tensors.extend(call.tensors)
        keyed = {value for value in pytree.tree_leaves(list(host.values())) if type(value) is int}
        bound = {*self._touched, *keyed, *(t.untyped_storage().data_ptr() for t in tensors)}
        recorder = Recorder(
            self.pool.regions, others=(self.pool.blocks,), metadata=self._metadata, bound=bound
        )
        changes: dict[Span, tuple[Entry, ...]] = {}
        with recorder:
            for call in self.calls:
                span = recorder.begin_span(call.note.label)
                with entered(RegionScope(call.mark)):
                    call.run(host[call.mark])
                recorder.end_span(span)
                check_topology(call.note, span.entries)
                changes[call.note] = span.entries
        return CpuRecording(changes=changes)

    def _apply(self, recording: Recording) -> None:
        assert self._tape is not None
        assert isinstance(recording, CpuRecording)
        self._tape.replace(recording.changes)


class CpuBackend(Backend):
    """Device graphs on the CPU, for development, tests and machines without a device."""

    name = "cpu"
    graph_type = CpuGraph
    compiled_piece_type = CompiledPiece
    capabilities = Capabilities(
        region_update=True,
        shared_pool=True,
        rng=True,
        refuses_host_reads=True,
        capture_error_modes=("thread_local",),
        concurrent_threads=True,
        node_counts=True,
        node_ranges=True,
        remakes_executables=True,
        releasable_memory=True,
        piecewise=True,
        compilers=("eager", "inductor"),
        loops=True,
        gates=True,
    )

    def after_fork(self) -> None:
        super().after_fork()
        self.metadata = Metadata()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def make_pool(self, *, releasable: bool = False) -> CpuPool:
        return CpuPool(self, releasable=releasable)

    @contextlib.contextmanager
    def side_stream(self, pool: Pool, stream: Any = None) -> Iterator[None]:
        for kind in (Functions, Dispatching):
            kind.clear()
        if isinstance(pool, CpuPool):
            pool.graphs_begun = 0
            pool.states.clear()
        try:
            yield
        except BaseException as error:
            # If an inference_mode block of the step ends only now, its exit leaves Python dispatch
            # enabled in this thread, although no mode is active. Leaving a mode disables the
            # dispatch again.
            with TorchDispatchMode():  # type: ignore[no-untyped-call]
                pass
            if isinstance(error, RuntimeError) and is_shortage(error):
                raise ResourceError(f"no memory for a tensor of the step: {error}") from error
            raise

    def make_gate_channel(self, gates: Gates) -> GateChannel:
        def record(name: str, step: Callable[[], object]) -> None:
            current_recorder().append(step, Op(name=name, line=user_line()))

        return HostGates(gates, self.fence, record)

    def synchronize(self) -> None:
        """Do nothing, because each operation on the CPU has finished when its call returns."""

    def memory_info(self) -> tuple[int, int] | None:
        names = ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")
        if not all(name in os.sysconf_names for name in names):
            return None
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = (os.sysconf(name) * page for name in names)
        return free, total

    def check(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        *,
        kwargs: Mapping[str, Any] | None = None,
        host_args: Mapping[str, Any] | None = None,
    ) -> list[Violation]:
        """Return the violations in a step: code that a device capture refuses or freezes.

        Violations are in order of execution, at most one per line, kind and operation. The Python
        code of the step runs twice, because the first run may initialize state, but no operation is
        executed.
        Tensors that the step stores in torch objects, such as optimizer state, contain no data.
        After a violation, the check continues with an assumed value: a host read returns 1, and a
        mask selects every element. The check ends if no value can be assumed. Functions marked
        ``no_graph`` are not checked. ``fn`` receives ``host_args`` as tracked values.
        """
        return check_step(self.metadata, fn, args, kwargs or {}, host_args)
