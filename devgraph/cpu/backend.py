"""The CPU reference as a backend: pool, graph, identity, and the check of a step."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from devgraph.api.backend import Backend, own_pool
from devgraph.api.capabilities import Capabilities
from devgraph.api.errors import (
    CaptureError,
    FrozenValueError,
    HostReadError,
    InputError,
    ResourceError,
    brief,
)
from devgraph.api.executable import Call, EvictableExecutable, Executable, Recording
from devgraph.api.gates import GateChannel, Gates, HostGates
from devgraph.api.graph import DeviceGraph
from devgraph.api.marks.calls import MarkedCall
from devgraph.api.marks.host_values import HostSpec, exact_types_refused
from devgraph.api.marks.marks import Mark, RegionScope, Scope, entered
from devgraph.api.marks.scopes import captured_call, refuse_break_in_backward
from devgraph.api.marks.source import line_of, raising_line, user_line
from devgraph.api.owned import Owned, host_random, without_history
from devgraph.api.pool import Pool
from devgraph.api.process import collector
from devgraph.api.reach import Change, Watch, modules_of, rebinding, set_by_hooks
from devgraph.api.results import refuse_host_values
from devgraph.api.tensors import has_place, memory_of, tensors_in
from devgraph.api.trees import Copied, own_copy
from devgraph.cpu.compiled import CompiledPiece
from devgraph.cpu.memory import BlockPool
from devgraph.cpu.modes import Dispatching, Functions, current_recorder
from devgraph.cpu.recorder import Knowledge, Recorder
from devgraph.cpu.tape import Entry, Op, Span, Tape, check_topology
from devgraph.cpu.violations import Violation

logger = logging.getLogger(__name__)

_TOO_LARGE = re.compile("DefaultCPUAllocator|Storage size calculation overflowed")
"""Texts of torch's errors about memory."""

ENTRY_BYTES = 2048
"""Memory of a tape entry, a bound call and about three tensors. Measured: 1932 bytes (a decode step
of 30 layers, 1277 entries, torch 2.13)."""


@attrs.frozen(kw_only=True, eq=False)
class CpuRecording(Recording):
    """The entries of every region for one key."""

    changes: Mapping[Span, tuple[Entry, ...]]

    @property
    def bytes(self) -> int:
        return ENTRY_BYTES * sum(len(entries) for entries in self.changes.values())


class CpuPool(Pool):
    """Blocks for graphs, and separate blocks for recordings of regions."""

    def __init__(self, backend: CpuBackend, *, releasable: bool = False) -> None:
        super().__init__(backend, releasable=releasable)
        self.blocks = BlockPool()
        self.regions = BlockPool()
        self.graphs_begun = 0  # in the current session

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
        self._knowledge = backend.knowledge
        self._recorder: Recorder | None = None
        self._tape: Tape | None = None
        self._touched: Mapping[int, torch.UntypedStorage] = {}

    def _begin(self, mode: str) -> None:
        recorder = Recorder(
            self.pool.blocks,
            others=(self.pool.regions,),
            knowledge=self._knowledge,
            arguments=self.arguments,
            reached=self.reached,
            generators=self.generators,
            continues=self.pool.graphs_begun > 0,
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
            self.pool.regions,
            others=(self.pool.blocks,),
            knowledge=self._knowledge,
            bound=bound,
        )
        changes: dict[Span, tuple[Entry, ...]] = {}
        with recorder:
            for call in self.calls:
                span = recorder.begin_span(call.note.label)
                with entered(RegionScope(call.mark, "full")):
                    call.run(host[call.mark])
                recorder.end_span(span)
                check_topology(call.note, span.entries)
                changes[call.note] = span.entries
        return CpuRecording(changes=changes)

    def _apply(self, recording: Recording) -> None:
        assert self._tape is not None
        assert isinstance(recording, CpuRecording)
        self._tape.replace(recording.changes)


class _Checking(Scope):
    """The scope of a check: regions belong to the step, ``no_graph`` functions are not reported."""

    def __init__(self, spec: HostSpec, recorder: Recorder, watch: Watch) -> None:
        self._spec, self._recorder, self._watch = spec, recorder, watch
        self._host: dict[Mark, dict[str, Any]] = {}
        self.muted = False
        self.changes: list[Change] = []
        """The places that hold other tensors than before the step."""
        self.state: dict[str, str] = {}
        """Changes of plain values, by path."""

    def note_changes(self) -> None:
        """Note the changes that the step made since the last eager body."""
        self.changes += self._watch.changes(self.note_state)

    def note_state(self, path: str, old: Any, new: Any) -> None:
        """Note a changed value."""
        self.state[path] = f"from {brief(old)} to {brief(new)}"

    def call(self, mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        host: dict[str, Any] = {}
        if mark.dynamic:
            args, kwargs, host = captured_call(mark, args, kwargs, self._spec, self._host)
        if mark.kind != "no_graph":
            return mark.fn(*args, **kwargs, **host)
        refuse_break_in_backward(mark.name)
        self.note_changes()
        self.muted = True
        try:
            with self._recorder.apart(), entered(None):
                return mark.fn(*args, **kwargs, **host)
        finally:
            self.muted = False
            self._watch.settle()

    def graph_break(self) -> None:
        refuse_break_in_backward("dg.graph_break()")


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
        self.knowledge = Knowledge()

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def make_pool(self, *, releasable: bool = False) -> CpuPool:
        return CpuPool(self, releasable=releasable)

    def make_graph(self, pool: Pool | None = None) -> CpuGraph:
        pool = own_pool(self, pool)
        assert isinstance(pool, CpuPool)
        return self.graph_type(self, pool)

    @contextlib.contextmanager
    def side_stream(self, pool: Pool, stream: Any = None) -> Iterator[None]:
        for kind in (Functions, Dispatching):
            kind.clear()
        if isinstance(pool, CpuPool):
            pool.graphs_begun = 0
        try:
            yield
        except BaseException as error:
            # An inference_mode block that an exception leaves after its recording has ended
            # switches torch's dispatcher back to recording. The exit of a mode switches it off.
            with TorchDispatchMode():  # type: ignore[no-untyped-call]
                pass
            if isinstance(error, RuntimeError) and _TOO_LARGE.search(str(error)):
                raise ResourceError(f"no memory for a tensor of the step: {error}") from error
            raise

    def make_gate_channel(self, gates: Gates) -> GateChannel:
        def record(name: str, step: Callable[[], object]) -> None:
            current_recorder().append(step, Op(name=name, line=user_line()))

        return HostGates(gates, self.fence, record)

    def synchronize(self) -> None:
        """Do nothing: work on the CPU is done when the call returns."""

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
        """Return the violations in a step: everything that a device capture refuses or freezes.

        They are in order of execution, one for each line and kind. No operation is executed. The
        check continues after a violation with an assumed value: a host read gives 1, and every
        element of a mask counts. If no value can be assumed, the check ends there. The step runs
        twice, because it may set itself up in its first run; tensors that it makes in objects of
        torch then, such as the state of an optimizer, stay there without data. Functions marked
        ``no_graph`` are never captured, so they are not reported.

        Args:
            fn: the step.
            args: positional arguments of the step.
            kwargs: keyword arguments of the step.
            host_args: declared host arguments; ``fn`` receives them as tracked values.
        """
        violations: dict[tuple[object, ...], Violation] = {}

        def note(violation: Violation) -> None:
            place = (violation.kind, violation.op, violation.file, violation.line)
            violations.setdefault(place, violation)

        spec = HostSpec(host_args, fn)
        try:
            owned = Owned(fn, tuple(args), kwargs or {})
        except InputError as error:
            note(Violation.at(line_of(fn), kind="refused", op="argument", text=str(error)))
            return [*violations.values()]
        original = Watch([*owned.roots, *owned.arguments.items()], gradients=True)
        try:
            for _ in range(2):
                violations.clear()
                self._check_run(fn, owned, spec, note)
        except FrozenValueError as error:
            line = raising_line(error) or user_line()
            note(Violation.at(line, kind="host_value", op="host argument", text=str(error)))
        except Exception as error:
            known = isinstance(error, CaptureError | ResourceError) or _TOO_LARGE.search(str(error))
            # A reported violation or its assumed value may have caused the error.
            if not violations and not known:
                raise
            logger.info("the check ended early", exc_info=True)
            explained = isinstance(error, HostReadError) or any(
                violation.kind in ("refused", "thread") for violation in violations.values()
            )
            if known and not explained:
                line, name = raising_line(error) or line_of(fn), type(error).__name__
                note(Violation.at(line, kind="refused", op=name, text=str(error)))
        finally:
            original.put_back()
        return list(violations.values())

    def _check_run(
        self,
        fn: Callable[..., Any],
        owned: Owned,
        spec: HostSpec,
        note: Callable[[Violation], None],
    ) -> None:
        """Run the step once, and note its violations."""
        reached, generators = owned.reached()
        recorder = Recorder(
            BlockPool(),
            knowledge=self.knowledge,
            arguments=[tensor for _, tensor in owned.tensors],
            reached=[tensor for _, tensor in reached],
            generators=generators,
            on_violation=lambda violation: None if scope.muted else note(violation),
        )
        copies: dict[int, Copied] = {}
        arguments = {n: own_copy(n, value, copies) for n, value in owned.arguments.items()}
        args = [arguments.pop(name) for name in [*arguments][: owned.count]]
        watch = Watch([*owned.roots, *((item.path, item.copy) for item in copies.values())])
        scope, numbers = _Checking(spec, recorder, watch), host_random()
        exact = exact_types_refused() if spec.declared else contextlib.nullcontext()
        with collector.paused(), recorder, entered(scope), exact:
            outputs = fn(*args, **arguments, **spec.tracked())
            refuse_host_values(outputs)
            recorder.note_outputs(tensors_in(outputs))
        outputs = without_history(outputs)  # which would keep other results alive
        scope.note_changes()
        for name, state in host_random().items():
            if numbers.get(name, state) != state:
                scope.note_state(name, numbers[name][-1], state[-1])
        modules = modules_of(fn)
        held = [tensor.grad for _, tensor in owned.everything() if tensor.is_leaf]
        held += [vars(module).get(name) for module in modules for name in set_by_hooks(module)]
        escaping = recorder.escaping(tensors_in((outputs, held)))
        where = line_of(fn)
        for verb, path, tensors in scope.changes:
            memories = [memory_of(tensor) for _, tensor in tensors if has_place(tensor)]
            allocated = [escaping[memory] for memory in memories if memory in escaping]
            if verb == "adds" and allocated:
                continue
            for memory in memories:
                escaping.pop(memory, None)
            text, kind = rebinding(verb, path), "rebinding"
            for source in allocated or [Violation.at(where, kind=kind, op=path, text=text)]:
                note(attrs.evolve(source, kind=kind, op=path, text=text))
        for violation in escaping.values():
            note(violation)
        for path, change in scope.state.items():
            text = (
                f"the step changes {path} {change}. A replay does not change it, and uses the "
                f"value of capture. Keep such state in tensors, or change it outside of the step."
            )
            note(Violation.at(where, kind="python_state", op=path, text=text))
