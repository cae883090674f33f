"""Steps of a runner: the engine's functions on the static buffers, in a graph or eagerly."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from devgraph.api.backend import Backend
from devgraph.api.errors import InputError, InputTypeError, brief, note
from devgraph.api.gates import Gates
from devgraph.api.guard import Guard
from devgraph.api.marks.gates import in_tail
from devgraph.api.marks.host_values import exact_types_allowed
from devgraph.api.modes import Autocast, autocast_of, current_autocast
from devgraph.api.named import NamedState
from devgraph.api.owned import roots_of, watched_in
from devgraph.api.pool import Pool
from devgraph.api.reach import reached
from devgraph.api.snapshots import Snapshot
from devgraph.runners.batch import Batch, HostArgs, HostValues, Live, StateViews, end_batch
from devgraph.runners.decisions import GraphKey, Variant, canonical_variant
from devgraph.runners.graphs import BucketGraph, Graphs
from devgraph.runners.inputs import InputArena
from devgraph.runners.load import CopyPlan
from devgraph.runners.options import Options
from devgraph.runners.outputs import LeaseClock, LeasedTensor, OutputStore
from devgraph.runners.slots import Size
from devgraph.runners.state import StateStore

_Replay = Callable[[Mapping[str, Any]], None]  # replays with the given host arguments

MAX_STEPS = 4096
"""Maximum number of cached steps. A step takes a few KiB of memory and about 20 us to bind."""


@attrs.define(kw_only=True, eq=False)
class Step:
    """The engine's functions with their inputs, outputs and host arguments."""

    function: Callable[[Batch], Any]
    """The captured part of the step."""
    whole: Callable[[Batch], Any]
    """The whole step, for eager runs."""
    tail: Callable[[Any, Batch], Any] | None
    """The part that runs eagerly after a replay, or None if the graph is the whole step."""
    inputs: InputArena
    outputs: OutputStore
    host: HostArgs
    clock: LeaseClock
    """A counter of runs, each of which overwrites the outputs of the previous run."""
    options: Options
    backend: Backend
    pool: Pool
    gates: Gates
    state: StateStore | None = None
    engine: Sequence[Callable[..., Any]] = ()
    """The engine's own functions, whose state captures and proofs restore."""
    addresses: Mapping[str, int] = attrs.field(factory=dict)
    """Addresses of the step's tensors at their first capture, by name."""
    named: NamedState | None = None
    """The state that the captured functions read by name; None before the first capture."""
    guard: Guard | None = None
    """A watch on changes of ``named`` since the captures."""
    types_checked: set[Variant] = attrs.field(factory=set)
    """Captured variants in which no function read the exact type of a host argument."""
    last: GraphStep | None = None
    """The step of the last replay, while its inputs are in the static buffers."""
    last_host: Mapping[str, Any] = attrs.field(factory=dict)
    """The host arguments that the caller passed to the last replay."""
    live: Live = attrs.field(factory=Live)
    """The current run, for eager bodies of graphs."""
    autocast: Autocast | None = None
    """Autocast settings of captures and later runs; before a capture, settings of the last step."""
    captured: bool = False
    _saved: Snapshot | None = attrs.field(default=None, init=False)
    """Snapshot of the state before the outermost trial."""

    @contextlib.contextmanager
    def names_kept(self, variant: Variant, *, first: bool) -> Iterator[None]:
        """Refuse named state that differs from earlier captures, and steps that replace tensors."""
        if first:
            self.forget_names()
        self.require_names()
        if self.named is None:
            captured = self.engine if self.function not in self.engine else [self.function]
            roots = (root for function in captured for root in roots_of(function))
            self.named = NamedState(roots, regions=self.options.config.policy == "full")
        with exact_types_allowed(variant in self.types_checked):
            yield
        self.types_checked.add(variant)
        self.named.require_kept()
        if self.guard is None:
            self.guard = Guard(watched_in(self.named))

    def require_names(self) -> None:
        """Raise StateError if named state has changed since the captures."""
        if self.guard is not None and not self.guard.same():
            self.guard.settle()

    def forget_names(self) -> None:
        """Stop checking named state until the next capture."""
        self.named = self.guard = None
        self.types_checked.clear()

    def settle_autocast(self) -> None:
        """Keep the autocast settings of the last step, or the caller's if there was no step."""
        if self.autocast is None:
            self.autocast = current_autocast()
        self.captured = True

    def called(self, function: Callable[..., Any], *args: Any, **host: Any) -> Any:
        """Call a function of the engine without gradients, with the autocast of captures."""
        now = current_autocast()
        if not self.captured:
            self.autocast = now
        with torch.no_grad():
            if self.autocast == now:
                return function(*args, **host)
            with autocast_of(self.autocast or ()):
                return function(*args, **host)

    @contextlib.contextmanager
    def trial(self) -> Iterator[Snapshot]:
        """Run the block without gradients and with the autocast of captures, then restore state.

        Random generators, bound tensors, the state of requests and tensors that the engine's
        functions reach are restored, even if the block fails; parameters are not. Above the limit,
        bound tensors and the state of requests are hashed, so that ``require_unwritten`` of the
        yielded snapshot detects writes. An inner trial uses the snapshot of the outer trial.
        """
        autocast = current_autocast() if self.autocast is None else self.autocast
        outer = self._saved
        saved = self._saved = self._snapshot() if outer is None else outer
        try:
            with torch.no_grad(), autocast_of(autocast):
                yield saved
        except BaseException as error:
            try:
                saved.restore()
            except Exception as lost:
                note(error, f"and the state of the step could not be restored: {lost}")
            raise
        else:
            saved.restore()
        finally:
            self._saved = outer

    def roots(self) -> list[tuple[str, Any]]:
        """Return the objects from which the search for the state of the engine starts."""
        functions = filter(None, (*self.engine, self.options.prepare))
        return [root for function in functions for root in roots_of(function)]

    def tensors(self, *, weights: bool = True) -> list[tuple[str, torch.Tensor]]:
        """Return reached tensors, bound tensors and the requests' state, each with its name.

        Parameters are left out unless ``weights`` is true.
        """
        named = [*self._reached()[0], *self._given()]
        return [item for item in named if weights or not isinstance(item[1], torch.nn.Parameter)]

    def _reached(self) -> tuple[list[tuple[str, torch.Tensor]], list[torch.Generator]]:
        tensors, generators = reached(self.roots())
        overlaps = self.inputs.buffers.overlaps
        return [(name, tensor) for name, tensor in tensors if not overlaps(tensor)], generators

    def _given(self) -> list[tuple[str, torch.Tensor]]:
        bound = self.inputs.buffers.bound.items()
        rows = {} if self.state is None else self.state.named
        return [*((f"bound tensor {name!r}", tensor) for name, tensor in bound), *rows.items()]

    def _snapshot(self) -> Snapshot:
        reached, generators = self._reached()
        given, optional = (
            [(name, tensor) for name, tensor in named if not isinstance(tensor, torch.nn.Parameter)]
            for named in (self._given(), reached)
        )
        limit = self.options.snapshot_limit
        return Snapshot(self.backend, given, generators, limit=limit, optional=optional)

    def reset_state(self) -> None:
        """Restore the contents of tensors inside a trial."""
        if self._saved is not None:
            self._saved.restore_contents()

    def run_eagerly(
        self,
        inputs: Mapping[str, Any],
        size: Size,
        host_args: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> Any:
        """Run the whole step on copies of ``inputs``; refuse invalid data before any change."""
        host = self.host.resolve(host_args, size, size)
        tensors = self.inputs.eager_inputs(inputs, size)
        self.clock.now += 1
        if self.gates:
            self.pool.order()  # Launches with gates must not overlap.
        with self.gates.launch():
            return self.call_eagerly(self.whole, tensors, size, host, options)

    def run_pads(
        self, function: Callable[[Batch], Any], size: Size, options: Mapping[str, Any]
    ) -> Any:
        """Run ``function`` eagerly on pad values and return its result."""
        tensors = self.inputs.views(size)
        self.last = None
        self.inputs.fill(tensors)
        return self.call_eagerly(function, tensors, size, self.host.at_capture(size), options)

    def replay_pads(self, graph: BucketGraph) -> None:
        assert graph.captured is not None
        values = StaticBatch(self, graph).prepared()
        self.clock.now += 1
        with self.gates.held_open():
            graph.captured.run(values)
        graph.used = self.clock.now  # All ranks must evict the same graph.
        graph.hits += 1

    def empty_result(self, options: Mapping[str, Any], smallest: Size) -> Any:
        """Return the result of a batch without requests: tensors without rows.

        A variant that never ran is first run once on pad values, to learn the shapes of its result.
        """

        def run() -> Any:
            with self.trial():
                return self.run_pads(self.function, smallest, options)

        variant = canonical_variant(options)
        result = self.outputs.empty(variant, run, smallest, self.inputs.device)
        if self.tail is None:
            return result
        size = Size(0, 0)
        host = self.host.at_capture(size)
        state = self.state_views(size)
        batch = Batch(self.inputs.views(size), size, host=host, variant=options, state=state)
        with in_tail():
            return self.called(self.tail, result, batch)

    def prepared(self, batch: Batch, host: Mapping[str, Any], size: Size) -> Mapping[str, Any]:
        """Call ``prepare`` with ``batch``; return ``host`` and the host arguments from it."""
        prepare = self.options.prepare
        if prepare is None:
            return host
        if not torch.is_grad_enabled():  # Switching gradients off takes 1 us.
            return self.host.completed(host, prepare(batch), size)
        with torch.no_grad():
            return self.host.completed(host, prepare(batch), size)

    def static_batch(self, graph: BucketGraph, host: Mapping[str, Any]) -> Batch:
        """Return the batch of ``graph``, which consists of static views."""
        return Batch(
            self.inputs.views(graph.size, self.inputs.graph_slots),
            graph.size,
            host=host,
            variant=graph.options,
            live=self.live,
            live_names=self.inputs.run_slots,
            state=self.state_views(graph.size),
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of requests; 0 if the state belongs to another runner."""
        if self.state is None or getattr(self.options.share, "state", None) is self.state:
            return 0
        return self.state.nbytes

    def state_views(self, size: Size) -> StateViews | None:
        """Return ``batch.state`` for a step of ``size``, or None for a runner without state."""
        return None if self.state is None else self.state.views(size.width)

    def call_eagerly(
        self,
        function: Callable[[Batch], Any],
        tensors: Mapping[str, torch.Tensor],
        size: Size,
        host: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> Any:
        """Call ``function`` with a batch that is invalid after the call."""
        run_slots = self.inputs.run_slots
        self.live.size = size
        self.live.tensors = {name: tensors[name] for name in run_slots}
        batch = Batch(
            {name: tensor for name, tensor in tensors.items() if name not in run_slots},
            size,
            host=host,
            variant=options,
            live=self.live if run_slots else None,
            live_names=run_slots,
            state=self.state_views(size),
        )
        try:
            batch.host = HostValues(self.prepared(batch, host, size))
            return self.called(function, batch)
        finally:
            end_batch(batch)


class StaticBatch:
    """The static views of one graph, filled with pad values; run slots have one request."""

    def __init__(self, step: Step, graph: BucketGraph) -> None:
        inputs = step.inputs
        run = Size(1, graph.size.tokens)
        self._graph = graph
        self._step = step
        self._run_size = run if inputs.run_slots else graph.size
        self._run_views = inputs.views(run, inputs.run_slots)
        self._views = {**inputs.views(graph.size, inputs.graph_slots), **self._run_views}
        self.refill()

    def refill(self) -> None:
        """Write pad values into every slot that the graph or its eager bodies can read."""
        self._step.last = None
        self._step.inputs.fill(self._views)
        self._step.live.size, self._step.live.tensors = self._run_size, self._run_views

    def prepared(self, given: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Call ``prepare`` with this batch, and return all host arguments."""
        size = self._graph.size
        host = self._step.host.at_capture(size) if given is None else given
        if self._step.options.prepare is None:
            return host
        return self._step.prepared(self.batch(host), host, size)

    def batch(self, host: Mapping[str, Any]) -> Batch:
        return self._step.static_batch(self._graph, host)


class GraphStep:
    """A graph bound to batches of one real size, so that a run needs no lookups."""

    def __init__(self, step: Step, graph: BucketGraph, real: Size, rows: int) -> None:
        assert graph.captured is not None
        inputs = step.inputs
        self.graph = graph
        self.real = real
        self.rows = rows
        self.tail = step.tail
        self.outputs: Callable[[], Any] = step.outputs.views(graph.key.variant, graph.size, real)
        """Callable that returns the real rows of the graph's outputs."""
        self._step = step
        self._name = step.options.name
        self._planned: Mapping[str, Any] = {}
        """Host arguments that ``prepare`` returned in the last run."""
        self._run_tensors = inputs.run_views(real)
        self._copy = CopyPlan(inputs, real, graph.size, self._run_tensors).load
        self.replay: _Replay = graph.captured.run
        if step.options.ranges:
            profiled = torch.profiler.record_function(f"{self._name} {graph.key}")
            self.replay = profiled(self.replay)
        if graph.timing is not None:
            self.replay = graph.timing.timed(self.replay)
        if step.options.prepare is not None:
            self.replay = self._planning(self.replay)
        parts = inputs.split(graph.size, real, inputs.graph_slots)
        self.tensors: Mapping[str, torch.Tensor] = {
            **{name: rows for name, (rows, _) in parts.items()},
            **self._run_tensors,
        }

    def run(self, inputs: Mapping[str, Any], host_args: Mapping[str, Any] | None) -> None:
        """Load a batch and replay the graph on it. The caller must hold the pool's lock.

        Raises the errors of ``CopyPlan.load`` and ``HostArgs.resolve`` before any change.
        """
        step, graph = self._step, self.graph
        host: Mapping[str, Any] = {}
        if host_args or step.host.declared:
            host = step.host.resolve(host_args, self.real, graph.size)
        self.load(inputs)
        step.clock.now += 1
        try:
            self.replay(host)
        except Exception as error:
            step.last = None  # Proofs must not use the inputs of a failed run.
            note(error, f"in {self._name}, bucket {graph.key}, {self.real}")
            raise
        step.last, step.last_host = self, host_args or {}
        graph.used = step.clock.now
        graph.hits += 1
        graph.real_rows += self.rows

    def _planning(self, replay: _Replay) -> _Replay:
        """Return a callable that calls ``prepare`` with the loaded batch before ``replay``."""
        step, size = self._step, self.graph.size
        batch = step.static_batch(self.graph, {})

        def plan_and_replay(given: Mapping[str, Any]) -> None:
            if step.host.declared:
                batch.host = HostValues(given)
            host = step.prepared(batch, given, size)
            if host is not given:
                self._planned = {n: v for n, v in host.items() if given.get(n) is not v}
            replay(host)

        return plan_and_replay

    def load(self, inputs: Mapping[str, Any]) -> None:
        """Copy and pad the inputs, after the pool's other work, and show them to eager bodies."""
        step = self._step
        step.pool.order()
        self._copy(inputs)
        step.live.size, step.live.tensors = self.real, self._run_tensors

    def loaded(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``inputs``; static views replace tensors that loading has overwritten."""
        overlaps = self._step.inputs.buffers.overlaps
        return {
            name: self.tensors[name]
            if isinstance(tensor, LeasedTensor) or overlaps(tensor)
            else tensor
            for name, tensor in inputs.items()
        }

    def result(self, host_args: Mapping[str, Any] | None) -> Any:
        """Return the real rows of the whole step's outputs after a replay."""
        if self.tail is None:
            return self.outputs()
        host = self._step.host.resolve(host_args, self.real, self.real)
        if self._planned:
            host = {**host, **self._planned}
        state = self._step.state_views(self.real)
        batch = Batch(self.tensors, self.real, host=host, variant=self.graph.options, state=state)
        try:
            with in_tail():
                return self._step.called(self.tail, self.outputs(), batch)
        except Exception as error:
            note(error, f"in the tail of {self._name}, bucket {self.graph.key}, {self.real}")
            raise


class BoundSteps:
    """A cache of bound steps, by size and variant of the batch."""

    def __init__(self, step: Step, graphs: Graphs) -> None:
        self._step = step
        self._graphs = graphs
        self._arena = step.inputs
        self._tokens = _lead(step.inputs, by_requests=False)
        self._requests = _lead(step.inputs, by_requests=True)
        self._bound: dict[Any, GraphStep] = {}

    def measured(self, inputs: Any) -> tuple[int | None, int | None]:
        """Return the numbers of requests and tokens of a batch, each None if no slot counts it."""
        return self._rows(inputs, self._requests), self._rows(inputs, self._tokens)

    def _rows(self, inputs: Any, lead: tuple[str, int, int] | None) -> int | None:
        if lead is None:
            return None
        name, axis, extra = lead
        try:
            if isinstance(inputs, torch.Tensor):
                raise TypeError  # An index by name would also warn.
            rows: int = inputs[name].shape[axis] - extra
        except (KeyError, TypeError, AttributeError, IndexError):
            self._arena.require(inputs, self._arena.given)
            value, dims = inputs[name], self._arena.slots[name].dims
            kind = InputError if isinstance(value, torch.Tensor) else InputTypeError
            raise kind(
                f"input {name!r} must be a tensor with the dims {dims}, got {brief(value)}"
            ) from None
        if rows < 0:
            raise InputError(f"input {name!r} has no rows; pass one row even without requests")
        return rows

    def find(self, inputs: Any, variant: Mapping[str, Any] | None) -> GraphStep | None:
        """Return the bound step for a batch, or None if there is none or the inputs are invalid."""
        try:
            asked = canonical_variant(variant) if variant else ()
            return self._bound.get((*self.measured(inputs), asked, None))
        except InputError:
            return None

    def get(
        self,
        shown: tuple[int | None, int | None],
        options: Mapping[str, Any],
        bucket: int | None,
        key: GraphKey,
        size: Size,
    ) -> GraphStep:
        """Return the step of graph ``key`` for batches of ``size``, and bind it if necessary."""
        # Ranks without requests may pass a different variant than the agreed one.
        variant = canonical_variant(options) if bucket is None else key.variant
        bound_key = (*shown, variant, bucket)
        step = self._bound.get(bound_key)
        if step is None:
            step = GraphStep(self._step, self._graphs[key], size, self._graphs.rows(size))
            if self._arena.holds(size):  # Do not cache larger steps, which own memory.
                if len(self._bound) >= MAX_STEPS:
                    del self._bound[next(iter(self._bound))]
                self._bound[bound_key] = step
        return step

    def clear(self) -> None:
        """Drop all steps, because decisions may have changed."""
        self._step.last = None
        self._bound.clear()


def _lead(arena: InputArena, *, by_requests: bool) -> tuple[str, int, int] | None:
    """Return the slot that counts tokens or requests: its name, axis and number of extra rows."""
    for slot in arena.given.values():
        if slot.axis is not None and slot.by_requests == by_requests:
            return slot.name, slot.axis, slot.shape(Size(0, 0))[slot.axis]
    return None
