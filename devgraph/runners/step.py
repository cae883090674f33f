"""One step: what the engine wrote, over the buffers that its graphs read and write."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch

from devgraph.api.backend import Backend
from devgraph.api.errors import InputError, InputTypeError, brief, note
from devgraph.api.marks.modes import Autocast, autocast_of, current_autocast
from devgraph.api.pool import Pool
from devgraph.runners.batch import Batch, HostArgs, HostValues, Live, end_batch
from devgraph.runners.decisions import GraphKey, canonical_variant
from devgraph.runners.graphs import BucketGraph, Graphs
from devgraph.runners.inputs import InputArena
from devgraph.runners.load import CopyPlan, Values
from devgraph.runners.options import Options
from devgraph.runners.outputs import LeaseClock, LeasedTensor, OutputStore
from devgraph.runners.slots import Size

_Replay = Callable[[Mapping[str, Any]], None]
"""A replay with these host arguments."""

MAX_STEPS = 4096
"""Bound steps that are kept; a step is a few KiB and costs some 20 us to bind again."""


@attrs.define(kw_only=True, eq=False)
class Step:
    """The engine's functions, and the inputs, outputs and host arguments that they are given."""

    function: Callable[[Batch], Any]
    """What one graph does."""
    whole: Callable[[Batch], Any]
    """The whole step, for eager runs."""
    tail: Callable[[Any, Batch], Any] | None
    """What follows a replay; None where the graph is the whole step."""
    inputs: InputArena
    outputs: OutputStore
    host: HostArgs
    reset_state: Callable[[], None]
    """Undoes what runs on pad values did; see ``Options.reset_state``."""
    clock: LeaseClock
    """Counts the runs, each of which overwrites the outputs of the one before."""
    options: Options
    backend: Backend
    pool: Pool
    """The memory of its graphs."""
    live: Live = attrs.field(factory=Live)
    """What eager bodies of graphs see of the run that is under way."""
    autocast: Autocast | None = None
    """That of the captures, under which everything runs then; before, that of the last step."""
    captured: bool = False
    """Whether there was a capture."""

    def settle_autocast(self) -> None:
        """Let all captures and steps from here on have the autocast of the last step, or that of
        the caller where there was none."""
        if self.autocast is None:
            self.autocast = current_autocast()
        self.captured = True

    def called(self, function: Callable[..., Any], *args: Any, **host: Any) -> Any:
        """Call a function of the engine as captures do: without gradients, and under their
        autocast."""
        now = current_autocast()
        if not self.captured:
            self.autocast = now
        with torch.no_grad():
            if self.autocast == now:
                return function(*args, **host)
            with autocast_of(self.autocast or ()):
                return function(*args, **host)

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Run the step for no request: without gradients, under the autocast of captures, and
        random numbers and the engine's state are afterwards as they were, also where it fails."""
        autocast = current_autocast() if self.autocast is None else self.autocast
        rng = self.backend.get_rng_state()

        def restore() -> None:
            self.backend.set_rng_state(rng)
            self.reset_state()

        try:
            with torch.no_grad(), autocast_of(autocast):
                yield
        except BaseException as error:
            try:
                restore()
            except Exception as lost:
                note(error, f"and what the step changed could not be put back: {lost}")
            raise
        restore()

    def run_eagerly(
        self,
        inputs: Mapping[str, Any],
        size: Size,
        host_args: Mapping[str, Any] | None,
        options: Mapping[str, Any],
    ) -> Any:
        """Run the whole step on copies of ``inputs`` and return what it returns.

        Raises as ``InputArena.admit`` and ``HostArgs.resolve``, before anything is changed.
        """
        host = self.host.resolve(host_args, size, size)
        tensors = self.inputs.eager_views(inputs, size)
        self.clock.now += 1
        return self.call_eagerly(tensors, size, host, options)

    def run_pads(self, size: Size, options: Mapping[str, Any]) -> None:
        """Run the whole step eagerly on pad values."""
        tensors = self.inputs.views(size)
        self.inputs.fill(tensors)
        self.clock.now += 1
        self.call_eagerly(tensors, size, self.host.at_capture(size), options)

    def replay_pads(self, graph: BucketGraph) -> None:
        """Replay ``graph`` on pad values."""
        assert graph.captured is not None
        values = StaticBatch(self, graph).prepared()
        self.clock.now += 1
        graph.captured.run(values)
        graph.used = self.clock.now  # as on the ranks that have requests
        graph.hits += 1

    def prepared(self, batch: Batch, host: Mapping[str, Any], size: Size) -> Mapping[str, Any]:
        """Let the engine plan over ``batch``; return ``host`` with the host arguments it returned.

        Raises as ``HostArgs.resolve``, for a batch of ``size``, or whatever ``prepare`` does.
        """
        prepare = self.options.prepare
        if prepare is None:
            return host
        with torch.no_grad():
            return self.host.completed(host, prepare(batch), size)

    def static_batch(self, graph: BucketGraph, host: Mapping[str, Any]) -> Batch:
        """Return the batch of ``graph``, over the static views."""
        return Batch(
            self.inputs.views(graph.size, self.inputs.graph_slots),
            graph.size,
            host=host,
            variant=graph.options,
            live=self.live,
            live_names=self.inputs.run_slots,
        )

    def call_eagerly(
        self,
        tensors: Mapping[str, torch.Tensor],
        size: Size,
        host: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> Any:
        """Call the whole step with a batch that is over when the step is.

        Slots of the run are read as in a graph: whatever batch a step kept, they are the current
        ones.
        """
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
        )
        try:
            batch.host = HostValues(self.prepared(batch, host, size))
            return self.called(self.whole, batch)
        finally:
            end_batch(batch)


class StaticBatch:
    """The static views of one graph, in which every slot holds pad values from here on.

    Slots of the run hold one request on pad values meanwhile.
    """

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
        """Put pad values into every slot that the graph or its eager bodies can see."""
        self._step.inputs.fill(self._views)
        self._step.live.size, self._step.live.tensors = self._run_size, self._run_views

    def prepared(self, given: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Let the engine plan over this batch, with the host arguments ``given`` or those of
        capture; return all of them."""
        size = self._graph.size
        host = self._step.host.at_capture(size) if given is None else given
        if self._step.options.prepare is None:
            return host
        return self._step.prepared(self.batch(host), host, size)

    def batch(self, host: Mapping[str, Any]) -> Batch:
        """Return the batch that the step receives."""
        return self._step.static_batch(self._graph, host)


class GraphStep:
    """A replay of one graph for batches of one real size, bound: a run looks nothing up.

    Args:
        graph: a captured graph.
        real: the size of the batches.
        rows: what buckets count of it.
    """

    def __init__(self, step: Step, graph: BucketGraph, real: Size, rows: int) -> None:
        assert graph.captured is not None
        inputs = step.inputs
        self.graph = graph
        self.real = real
        self.rows = rows
        self.outputs: Callable[[], Any] = step.outputs.views(graph.key.variant, graph.size, real)
        """Returns the graph's outputs, real rows only."""
        self._padded = graph.size
        self._host_of = step.host.resolve
        self._planned: Mapping[str, Any] = {}
        """Host arguments that the engine planned in the last run."""
        self._declares_host = bool(step.host.declared)
        self._order = step.pool.order
        self._name = step.options.name
        self._clock, self._live, self.tail = step.clock, step.live, step.tail
        self._called = step.called
        self._run_tensors = inputs.run_views(real)
        plan = CopyPlan(inputs, real, graph.size, self._run_tensors, pool=step.pool)
        self._copy, self.alike = plan.load, plan.alike
        self.replay: _Replay = graph.captured.run
        """Replays the graph on what was loaded."""
        if step.options.ranges:
            shown = torch.profiler.record_function(f"{self._name} {graph.key}")
            self.replay = shown(self.replay)
        if graph.timing is not None:
            self.replay = graph.timing.over(self.replay)
        if step.options.prepare is not None:
            self.replay = self._planning(step, self.replay)
        self._tensors = {
            **inputs.real_views(graph.size, real, inputs.graph_slots),
            **self._run_tensors,
        }
        self._overlaps = inputs.buffers.overlaps

    def run(
        self,
        inputs: Mapping[str, Any],
        host_args: Mapping[str, Any] | None,
        values: Values | None = None,
    ) -> None:
        """Load a batch and replay the graph on it. Called under the pool's lock.

        Raises as ``CopyPlan.load`` and ``HostArgs.resolve``, before anything is changed.

        Args:
            values: what ``alike`` returned for the inputs, where the caller knows it.
        """
        # Everything is bound beforehand: this is host time of every step.
        host: Mapping[str, Any] = {}
        if host_args or self._declares_host:
            host = self._host_of(host_args, self.real, self._padded)
        self.load(inputs, values)
        self._clock.now += 1
        try:
            self.replay(host)
        except Exception as error:
            note(error, f"in {self._name}, bucket {self.graph.key}, {self.real}")
            raise
        graph = self.graph
        graph.used = self._clock.now
        graph.hits += 1
        graph.real_rows += self.rows

    def _planning(self, step: Step, replay: _Replay) -> _Replay:
        """Return what lets the engine plan over the loaded batch, and replays the graph then."""
        batch = step.static_batch(self.graph, {})
        prepare, seen = step.options.prepare, vars(batch.host)
        declared = len(step.host.declared)
        assert prepare is not None
        with_grad, enable_grad = torch.is_grad_enabled, torch._C._set_grad_enabled

        def planned(given: Mapping[str, Any]) -> None:
            # ``torch.no_grad`` and an attribute of ``batch.host`` would take longer than all else.
            if grad := with_grad():
                enable_grad(False)
            try:
                seen["_values"] = given
                found, self._planned = prepare(batch), {}
                if found is not None or len(given) != declared:
                    values = step.host.completed(given, found, self._padded)
                    self._planned = {n: v for n, v in values.items() if given.get(n) is not v}
                    given = values
                replay(given)
            finally:
                if grad:
                    enable_grad(True)

        return planned

    def load(self, inputs: Mapping[str, Any], values: Values | None = None) -> None:
        """Order what follows behind the pool's other work, copy and pad the inputs, and make this
        run the one that eager bodies see."""
        self._order()
        self._copy(inputs, values)
        self._live.size, self._live.tensors = self.real, self._run_tensors

    def loaded(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``inputs``, and what was loaded of those that this overwrote or made stale."""
        return {
            name: self._tensors[name]
            if isinstance(tensor, LeasedTensor) or self._overlaps(tensor)
            else tensor
            for name, tensor in inputs.items()
        }

    def result(self, host_args: Mapping[str, Any] | None) -> Any:
        """Return the whole step's outputs after a replay, real rows only."""
        if self.tail is None:
            return self.outputs()
        host = self._host_of(host_args, self.real, self.real)
        if self._planned:
            host = {**host, **self._planned}
        batch = Batch(self._tensors, self.real, host=host, variant=self.graph.options)
        try:
            return self._called(self.tail, self.outputs(), batch)
        except Exception as error:
            note(error, f"in the tail of {self._name}, bucket {self.graph.key}, {self.real}")
            raise


class BoundSteps:
    """The steps that are bound to graphs, by what tells them apart.

    Args:
        step: what is bound.
        graphs: what it is bound to.
    """

    def __init__(self, step: Step, graphs: Graphs) -> None:
        self._step = step
        self._graphs = graphs
        self._arena = step.inputs
        self._tokens = _lead(step.inputs, by_requests=False)
        self._requests = _lead(step.inputs, by_requests=True)
        self._bound: dict[Any, GraphStep] = {}
        self._last: GraphStep | None = None
        """What the last batch ran that asked for no variant."""

    def measured(self, inputs: Any) -> tuple[int | None, int | None]:
        """Return requests and tokens of a batch as its inputs show them; raises InputError where
        one does not show them."""
        found: list[int | None] = []
        for lead in (self._tokens, self._requests):
            if lead is None:
                found.append(None)
                continue
            name, axis, more = lead
            try:
                rows = inputs[name].shape[axis] - more
            except (KeyError, TypeError, AttributeError, IndexError):
                self._arena.require(inputs, self._arena.given)
                value, dims = inputs[name], self._arena.slots[name].dims
                kind = InputError if isinstance(value, torch.Tensor) else InputTypeError
                raise kind(
                    f"input {name!r} must be a tensor with the dims {dims}, got {brief(value)}"
                ) from None
            if rows < 0:
                raise InputError(f"input {name!r} has no rows; that of no requests has one")
            found.append(rows)
        tokens, requests = found
        return requests, tokens

    def known(
        self, inputs: Any, variant: Mapping[str, Any] | None
    ) -> tuple[GraphStep, Values | None] | None:
        """Return the step for a batch of which one of the same size and variant was bound, and
        the inputs in its order if they are like those of the last batch."""
        plain = type(inputs) is dict
        if plain and not variant and (last := self._last) is not None:
            values = last.alike(inputs)
            if values is not None:
                return last, values
        if not plain and not isinstance(inputs, Mapping):
            return None
        requests = tokens = None
        try:  # as ``measured``, without a loop
            if (lead := self._requests) is not None:
                requests = inputs[lead[0]].shape[lead[1]] - lead[2]
            if (lead := self._tokens) is not None:
                tokens = inputs[lead[0]].shape[lead[1]]
        except (KeyError, TypeError, AttributeError, IndexError):
            return None
        key = canonical_variant(variant) if variant else ()
        step = self._bound.get((requests, tokens, key, None))
        if step is None:
            return None
        if not variant:
            self._last = step
        return step, None

    def get(
        self,
        shown: tuple[int | None, int | None],
        options: Mapping[str, Any],
        bucket: int | None,
        key: GraphKey,
        size: Size,
    ) -> GraphStep:
        """Return the step of graph ``key`` for batches of ``size``, bound now if need be.

        Args:
            shown: the size as ``measured``.
            options: the variant that the batch asks for.
            bucket: the one that ranks agreed on, if they did.
        """
        # Ranks without requests may ask for another variant than the one agreed on.
        place = *shown, canonical_variant(options) if bucket is None else key.variant, bucket
        step = self._bound.get(place)
        if step is None:
            step = GraphStep(self._step, self._graphs[key], size, self._graphs.rows(size))
            if self._arena.holds(size):  # Any other step has memory of its own.
                if len(self._bound) >= MAX_STEPS:
                    del self._bound[next(iter(self._bound))]
                self._bound[place] = step
        return step

    def clear(self) -> None:
        """Forget all of them, because a decision could be another now."""
        self._bound.clear()
        self._last = None


def _lead(arena: InputArena, *, by_requests: bool) -> tuple[str, int, int] | None:
    """Return (name, axis, rows beyond the count) of the slot that shows tokens or requests."""
    for slot in arena.given.values():
        if slot.axis is not None and slot.by_requests == by_requests:
            return slot.name, slot.axis, slot.shape(Size(0, 0))[slot.axis]
    return None
