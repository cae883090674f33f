"""``prove`` of a runner: its graphs against eager, on data that no capture saw."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from devgraph.api.backend import poison
from devgraph.api.errors import AgreementError
from devgraph.api.modes import autocast_of, current_autocast
from devgraph.api.owned import roots_of
from devgraph.api.prove import (
    Case,
    Comparison,
    Failure,
    NamedTensors,
    Report,
    Rows,
    RunResult,
    State,
    Terms,
    addresses,
    compare,
    copies_of,
    drawn,
    extremes,
    host_sets,
    no_rows,
    randomize,
    replaced,
    require_samples,
)
from devgraph.api.snapshots import same_bytes
from devgraph.runners.graphs import BucketGraph, Graphs
from devgraph.runners.ranks import RankGroup
from devgraph.runners.slots import InputSlot, Size
from devgraph.runners.step import GraphStep, StaticBatch, Step

_ENOUGH = 4096
"""Values of a slot that are drawn to learn whether real rows use its pad value."""

_NAN = torch.tensor(float("nan"))
_COLLISION = "rows within a batch, which write one row of state"

Implied = Callable[[Size], Mapping[str, torch.Tensor]]
"""Returns the inputs of a batch of a real size that belong together."""


class Proof:
    """Compares graphs of a runner with eager; see ``Runner.prove``."""

    def __init__(
        self, step: Step, terms: Terms, implied: Implied | None, ranks: RankGroup, tag: str
    ) -> None:
        self._step = step
        self._terms = terms
        self._implied = implied
        self._ranks = ranks
        self._tag = tag
        slots = [name for name, slot in step.inputs.slots.items() if slot.real is None]
        self._sample = {
            **{n: s.sample for n, s in step.inputs.slots.items() if s.sample is not None},
            **require_samples(terms.sample, [*slots, *step.host.declared]),
        }
        self._generator = torch.Generator().manual_seed(0)
        self._varied: set[str] = set()
        self._notes: dict[str, None] = {}
        self._tried: list[Case] = []
        self.tested: list[BucketGraph] = []
        """The graph of each case."""
        self._last = _last_inputs(step)
        self._uses: dict[str, tuple[int, int]] = {}
        """Smallest and largest value that real rows of a slot have."""

    def of(self, graphs: Graphs, chosen: Sequence[BucketGraph]) -> Report:
        """Compare the ``chosen`` graphs, which are captured, with eager."""
        step, terms = self._step, self._terms
        keys = [str(graph.key) for graph in chosen]
        facts = {"prove": keys, "cases": terms.cases, "host_args": str(terms.host_args)}
        self._ranks.handshake(self._tag, facts)
        self._state = State(
            step.backend,
            step.tensors(weights=not terms.quick),
            step.roots(),
            limit=terms.snapshot_limit,
        )
        now = step.tensors()
        names = replaced(step.places, addresses(now))
        # Contents change in each case, because the old memory may hold a copy of the new ones.
        self._renewed = [leaf for name, leaf in now if name in names and not terms.quick]
        self._compared = Comparison(
            self._state, step.backend, terms.near, with_state=terms.state, agreed=self._agreed
        )
        autocast = current_autocast() if step.autocast is None else step.autocast
        failures: list[Failure] = []
        try:
            with torch.no_grad(), autocast_of(autocast):
                for graph in chosen:
                    for size, host, changed, updated in self._sizes(graphs, graph):
                        inputs, marks, filled = self._inputs(size)
                        case = Case(
                            number=len(self._tried),
                            host_args=host,
                            bucket=f"bucket {graph.key}, {size.requests} requests, "
                            f"{size.tokens} tokens",
                            padded=size != graph.size,
                            changed=changed,
                            updated=updated,
                            filled=filled,
                        )
                        self._tried.append(case)
                        self.tested.append(graph)
                        failures += self._case(graph, size, case, inputs, marks)
        except BaseException as error:
            self._ranks.post(f"{self._tag}/case", f"raised {type(error).__name__}: {error}")
            raise
        finally:
            self._state.end()
        self._state.snapshot.require_unwritten("a case of the proof")
        fixed = [n for n, s in step.inputs.slots.items() if s.fixed_in_proofs]
        return Report(
            cases=len(self._tried),
            failures=tuple(failures),
            exact=all(graph.captured is None or graph.captured.exact for graph in chosen),
            not_varied=tuple(
                [n for n in [*fixed, *step.host.declared] if n not in self._varied] + [*self._notes]
            ),
            near=tuple(self._compared.tolerated),
            tried=tuple(self._tried),
            replaced=names,
            moved=tuple(self._state.moved),
            draws=self._compared.draws,
        )

    def _agreed(self, differs: bool) -> bool:
        """Whether the argument is true on any rank."""
        texts = self._ranks.gather(f"{self._tag}/case", "differs" if differs else "")
        for rank, text in enumerate(texts):
            if text.startswith("raised"):
                raise AgreementError(f"rank {rank} could not finish the proof: it {text}")
        return any(texts)

    def _sizes(
        self, graphs: Graphs, graph: BucketGraph
    ) -> Iterator[tuple[Size, dict[str, Any], bool, bool]]:
        """Yield real sizes of batches and host arguments, and what ``host_sets`` says of these."""
        step, cases = self._step, self._terms.cases
        rows = _rows_to_try(graph, graphs.buckets, step.options.config.max_padding, cases)
        declared = step.host.at_capture(graph.size)
        ends = {
            name: extremes(self._sample[name], value, self._generator)
            for name, value in declared.items()
            if name in self._sample and not isinstance(value, tuple)
        }
        further: list[dict[str, Any]] = []
        if step.last_host:
            further.append({**declared, **step.last_host})
        if ends:
            further += [{**declared, **{n: v[k] for n, v in ends.items()}} for k in range(2)]
        sets = host_sets(declared, self._terms.host_args, further)
        for name in declared:
            if len({str(values.get(name)) for values, *_ in sets}) > 1:
                self._varied.add(name)
        count = max(len(rows), len(sets)) if rows and sets else 0
        for index, row, (values, changed, updated) in zip(
            range(count), itertools.cycle(rows), itertools.cycle(sets)
        ):
            size = graphs.counting.some(row, graph.options, index)
            yield size, {**values, **self._sequences(values, size)}, changed, updated

    def _sequences(self, values: Mapping[str, Any], real: Size) -> dict[str, Any]:
        """Return sequences with one entry per row of ``real``, where ``values`` has others."""
        sequences = {}
        for name, value in self._step.host.at_capture(real).items():
            if isinstance(value, tuple) and name in values and len(values[name]) != len(value):
                sequences[name] = value
            if isinstance(value, tuple) and name in self._sample:
                data = self._sample[name]((len(value),), self._generator)
                sequences[name] = tuple(data.tolist() if isinstance(data, torch.Tensor) else data)
                self._varied.add(name)
        return sequences

    def _case(
        self,
        graph: BucketGraph,
        real: Size,
        case: Case,
        inputs: dict[str, torch.Tensor],
        marks: Mapping[str, torch.Tensor],
    ) -> list[Failure]:
        step, compared = self._step, self._compared
        assert graph.captured is not None
        given = case.host_args
        padded_host = step.host.resolve(given, real, graph.size)
        real_host = step.host.resolve(given, real, real)
        static = StaticBatch(step, graph)
        bound = GraphStep(step, graph, real, 0)
        write = step.outputs.writer(graph.key.variant, graph.size)
        self._state.begin_case()  # restores the rows of the last case
        self._state.snapshot.save_rows(self._rows(inputs))

        has_equal_rows = False
        renewed = [(leaf, leaf.detach().clone()) for leaf in self._renewed]
        for _, value in renewed:
            randomize(value, self._generator)

        def renew() -> None:
            for leaf, value in renewed:
                leaf.detach().copy_(value)

        def load() -> None:
            renew()
            bound.load(inputs)
            mark(step.inputs.views(real))
            if has_equal_rows:
                self._fill_padding(graph, real, lambda slot: _first_row(slot, inputs[slot.name]))

        def mark(views: Mapping[str, torch.Tensor]) -> None:
            for name, data in marks.items():
                views[name].copy_(data)

        def eager(change: Callable[[], None] = lambda: None) -> NamedTensors:
            load()
            change()
            write(step.function(static.batch(static.prepared(padded_host))))
            return copies_of(bound.result(given))

        def replay(change: Callable[[], None] = lambda: None) -> NamedTensors:
            load()
            step.outputs.poison(poison)
            change()
            bound.replay(padded_host)
            return copies_of(bound.result(given))

        def unpadded() -> NamedTensors:
            renew()
            views = step.inputs.eager_views(inputs, real)
            mark(views)
            return copies_of(step.call_eagerly(step.whole, views, real, real_host, graph.options))

        def equalize() -> None:
            # Devices write the row that all requests name in any order. With equal rows of data,
            # those of padding included, the order has no effect.
            nonlocal has_equal_rows
            has_equal_rows = True
            for name, slot in step.inputs.given.items():
                if slot.axis is None or slot.row_dim == "requests+1":
                    continue
                data = inputs[name]
                inputs[name] = (
                    _first_row(slot, data).expand_as(data)
                    if data.is_floating_point()
                    else torch.full_like(data, slot.pad.value)
                )
            self._notes[_COLLISION] = None

        shared, scratch = (
            functools.partial(_positions, values)
            for values in self._shared_values(inputs, graph, real)
        )

        def compared_with(shared: Rows) -> tuple[RunResult, RunResult, list[Failure]]:
            want, got = compared.result_of(eager), compared.result_of(replay)
            exact = bool(graph.captured and graph.captured.exact)
            failures = compared.failures(
                case, eager, replay, exact=exact, shared=shared, scratch=scratch, want=want, got=got
            )
            return want, got, failures

        want, got, failures = compared_with(shared)
        collides = self._collides(inputs, want) or self._collides(inputs, got)
        if compared.agreed(bool(failures) and collides):
            equalize()
            want, got, failures = compared_with(no_rows)
        suspects = [*self._suspects(want, inputs, graph, real)] if case.padded else []
        is_suspect = compared.agreed(bool(suspects))
        if self._terms.quick and not is_suspect:
            return failures
        alone = compared.result_of(unpadded)
        for name, row, slots in suspects:
            culprit = self._culprit(name, row, slots, want, alone, eager, graph, real, inputs)
            if culprit:
                message = (
                    f"padded rows write row {row} of {name}, which real rows use: pad of slot "
                    f"{culprit!r}"
                )
                failures.append(case.failure(f"slot {culprit!r}:", message, "padding"))
        if self._terms.quick:
            return failures
        if case.padded:
            nan = functools.partial(self._fill_padding, graph, real, lambda slot: _NAN)
            poisoned = compared.result_of(lambda: replay(nan))
            for (name, one), (_, other) in zip(got.outputs, poisoned.outputs, strict=True):
                message = compare(one, other)
                if message and collides:
                    self._notes[_COLLISION] = None
                elif message:
                    failures.append(
                        case.failure(name, f"with padding filled with NaN {message}", "size")
                    )
        if alone.draws:
            self._notes["the batch without padding (the step draws random numbers)"] = None
        sized = [] if alone.draws or failures else self._sized(alone, got, shared)
        collides = collides or self._collides(inputs, alone)
        if compared.agreed(bool(sized) and collides and not has_equal_rows):
            equalize()
            got, alone = compared.result_of(replay), compared.result_of(unpadded)
            sized = self._sized(alone, got, shared)
        failures += (
            case.failure(where, f"against eager on the real batch {message}", "size")
            for where, message in sized
        )
        return failures

    def _sized(self, alone: RunResult, got: RunResult, shared: Rows) -> list[tuple[str, str]]:
        """Return the differences of a graph from eager on the unpadded batch.

        Of state, only elements count that the unpadded batch wrote and that one row wrote alone.
        """
        state: dict[str, Any] = {}
        graphs: dict[str, Any] = {}
        for name, (now, saved, rows) in alone.state.items():
            other = got.state[name][0] if name in got.state else saved
            if now.dim():
                written = _changed(saved, now)
                written[[*shared(now, rows)]] = False
                now, other = now[written], other[written]
            state[name], graphs[name] = (now, now, rows), (other, other, rows)
        return self._compared.differences(
            RunResult(outputs=alone.outputs, state=state),
            RunResult(outputs=got.outputs, state=graphs),
            lambda name: self._terms.near,
        )

    # Inputs.

    def _inputs(
        self, real: Size
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], tuple[str, ...]]:
        """Return inputs of a batch, the marks of its real rows, and the slots without legal data.

        Proofs change these marks.
        """
        step = self._step
        implied = self._implied(real) if self._implied else {}
        last = self._last(real, self._generator)
        self._varied |= implied.keys() | self._sample.keys() | last.keys()
        inputs, filled = {}, []
        for name, slot in step.inputs.given.items():
            fixed = slot.fixed_in_proofs and name not in self._sample
            if name in implied:
                inputs[name] = implied[name]
            elif fixed and name in last:
                inputs[name] = last[name]
            else:
                inputs[name] = self._data(slot, real)
                filled += [name] if fixed else []
        marks = {
            name: self._data(slot, real)
            for name, slot in step.inputs.slots.items()
            if slot.real is not None and slot.sample is not None
        }
        return inputs, marks, tuple(filled)

    def _data(self, slot: InputSlot, real: Size) -> torch.Tensor:
        device = self._step.inputs.device
        data = torch.full(slot.shape(real), slot.pad.value, dtype=slot.dtype, device=device)
        if slot.name in self._sample:
            return drawn(self._sample[slot.name], data, self._generator)
        if slot.dtype.is_floating_point or slot.dtype.is_complex:
            randomize(data, self._generator)
        return data

    def _integers(
        self, inputs: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[InputSlot, list[int]]]:
        """Yield each integer slot of the graph with its real values."""
        for name, slot in self._step.inputs.given.items():
            is_integer = not (slot.dtype.is_floating_point or slot.dtype.is_complex)
            if is_integer and slot.dtype is not torch.bool and slot.axis is not None:
                yield slot, inputs[name].flatten().tolist()

    def _rows(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return all rows that integer slots of the case can name, those of padding included."""
        rows = {
            row for slot, data in self._integers(inputs) for row in [*data, int(slot.pad.value)]
        }
        return torch.tensor(sorted(rows), dtype=torch.int64, device=self._step.inputs.device)

    def _fill_padding(
        self, graph: BucketGraph, real: Size, row: Callable[[InputSlot], torch.Tensor]
    ) -> None:
        """Fill the padded rows of floating-point slots with a row, or a number, of each."""
        for slot, part in self._padding(graph, real):
            if slot.dtype.is_floating_point:
                part.copy_(row(slot))

    def _padding(self, graph: BucketGraph, real: Size) -> Iterator[tuple[InputSlot, torch.Tensor]]:
        """Yield the padded rows of each slot of the graph."""
        inputs = self._step.inputs
        for name, view in inputs.views(graph.size, inputs.graph_slots).items():
            slot = inputs.slots[name]
            if slot.axis is not None:
                rows = slot.shape(real)[slot.axis]
                yield slot, view.narrow(slot.axis, rows, view.shape[slot.axis] - rows)

    # Padding that writes.

    def _shared_values(
        self, inputs: Mapping[str, torch.Tensor], graph: BucketGraph, real: Size
    ) -> tuple[set[int], set[int]]:
        """Return the pad values that several rows of the batch have, and those no real row uses."""
        shared, scratch = set[int](), set[int]()
        for slot, data in self._integers(inputs):
            axis = slot.axis or 0
            padded = slot.shape(graph.size)[axis] - slot.shape(real)[axis]
            for pad in _pads(slot, data):
                if data.count(pad) + padded > 1:
                    shared.add(pad)
                    if not self._is_real(slot, pad, data):
                        scratch.add(pad)
        return shared, scratch

    def _collides(self, inputs: Mapping[str, torch.Tensor], seen: RunResult) -> bool:
        """Whether real rows write one row of state, because a slot has its pad value in all."""
        pads = {
            int(slot.pad.value)
            for slot, data in self._integers(inputs)
            if slot.row_dim != "requests+1" and len(data) > 1 and set(data) == {int(slot.pad.value)}
        }
        return any(
            not same_bytes(saved[row], now[row])
            for now, saved, numbers in seen.state.values()
            for row in _positions(pads, now, numbers)
        )

    def _suspects(
        self, want: RunResult, inputs: Mapping[str, torch.Tensor], graph: BucketGraph, real: Size
    ) -> Iterator[tuple[str, int, list[InputSlot]]]:
        """Yield rows of state that changed and that are pad values of slots.

        Only slots count whose real rows use that value. Each row comes with its state and slots.
        """
        for name, (now, saved, rows) in want.state.items():
            if not now.dim():
                continue
            changed = _changed_rows(saved, now)
            names = rows[changed] if rows is not None else changed.nonzero().flatten()
            written = set(names.tolist())
            by_row: dict[int, list[InputSlot]] = {}
            for slot, data in self._integers(inputs):
                for pad in _pads(slot, data):
                    row = pad + len(now) * (pad < 0 and rows is None)
                    if row in written and self._is_real(slot, pad, data):
                        by_row.setdefault(row, []).append(slot)
            yield from ((name, row, slots) for row, slots in by_row.items())

    def _is_real(self, slot: InputSlot, value: int, data: Sequence[int]) -> bool:
        """Whether real rows of ``slot`` may have ``value``, as its sample or its last data say."""
        name = slot.name
        if name not in self._sample:
            return value in data and name in self._varied
        if name not in self._uses:
            shape = slot.shape(self._step.inputs.largest)
            values: list[int] = []
            while len(values) < _ENOUGH:
                with torch.device("cpu"):
                    values += self._sample[name](shape, self._generator).flatten().tolist()
                if not values:
                    return False
            self._uses[name] = min(values), max(values)
        low, high = self._uses[name]
        return low <= value <= high or value in data

    def _culprit(
        self,
        name: str,
        row: int,
        slots: Sequence[InputSlot],
        want: RunResult,
        alone: RunResult,
        eager: Callable[..., NamedTensors],
        graph: BucketGraph,
        real: Size,
        inputs: Mapping[str, torch.Tensor],
    ) -> str | None:
        """Return the slot whose padding writes ``row`` of the state ``name``, or None.

        It is the slot with which the row stays as the unpadded batch leaves it, once its padding
        has another legal value.
        """
        now, saved, rows = want.state[name]
        at = row if rows is None else int((rows == row).nonzero()[0])
        right = alone.state[name][0][at] if name in alone.state else saved[at]
        if not self._terms.near(right, now[at]):
            return None
        for slot in slots:
            data = inputs[slot.name].flatten().tolist()
            others = [value for value in self._uses.get(slot.name, ()) if value != row]
            other = next((v for v in [*others, *data] if v != row), None)
            if other is None:
                continue

            def change(slot: InputSlot = slot, other: int = other) -> None:
                for padded_slot, part in self._padding(graph, real):
                    if padded_slot.name == slot.name:
                        part.fill_(other)

            moved = self._compared.result_of(functools.partial(eager, change))
            after = moved.state[name][0][at] if name in moved.state else saved[at]
            if not self._terms.near(right, after):
                return slot.name
        return None


def _first_row(slot: InputSlot, data: torch.Tensor) -> torch.Tensor:
    return data.narrow(slot.axis or 0, 0, 1)


def _pads(slot: InputSlot, data: Sequence[int]) -> list[int]:
    """Return the values that padded rows of ``slot`` have in a batch with ``data``."""
    if slot.pad.kind == "last":
        return [int(data[-1])] if data and slot.row_dim != "requests+1" else []
    return [int(slot.pad.value)]


def _positions(
    values: set[int], tensor: torch.Tensor, numbers: torch.Tensor | None
) -> Sequence[int]:
    """Return the positions of the rows ``values`` in a tensor, or in saved rows of it."""
    if numbers is not None:
        return [index for index, row in enumerate(numbers.tolist()) if row in values]
    size = len(tensor) if tensor.dim() else 0
    return [value % size for value in values if size > 1 and -size <= value < size]


def _changed(saved: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Return a bool for each element: whether any byte of it differs."""
    one, other = (t.contiguous().view(torch.uint8) for t in (saved, now))
    return (one != other).view(*now.shape, now.element_size()).any(-1)


def _changed_rows(saved: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Return a bool for each row: whether any byte of it differs."""
    return _changed(saved, now).flatten(1).any(1) if now.dim() > 1 else _changed(saved, now)


def _last_inputs(
    step: Step,
) -> Callable[[Size, torch.Generator], dict[str, torch.Tensor]]:
    """Return a callable that gives the integer inputs of the last replay for batches of a size.

    Requests are permuted, so that the values of one request stay together.
    """
    # Rows of these inputs are live state. They need a step whose state is known, to be put back.
    is_known = step.options.bound or all(map(roots_of, step.engine))
    last = step.last if is_known and not step.inputs.is_shared else None
    held = {} if last is None else {n: t.clone() for n, t in last.tensors.items()}

    def inputs(real: Size, generator: torch.Generator) -> dict[str, torch.Tensor]:
        if last is None or (real != last.real and real.width is None):
            return {}
        if real.width != last.real.width or real.requests > last.real.requests:
            return {}
        order = torch.randperm(real.requests, generator=generator, device="cpu")
        width = real.width or 0
        tokens = (order[:, None] * width + torch.arange(width, device="cpu")).flatten()
        result = {}
        for name, slot in step.inputs.given.items():
            data = held[name]
            if slot.row_dim == "requests+1" or slot.axis is None or not width:
                rows = slot.shape(real)[slot.axis] if slot.axis is not None else 0
                result[name] = data if slot.axis is None else data.narrow(slot.axis, 0, rows)
                continue
            index = (tokens if slot.row_dim == "tokens" else order).to(data.device)
            result[name] = data.index_select(slot.axis, index)
        return result

    return inputs


def _rows_to_try(graph: BucketGraph, buckets: Sequence[int], most: float, cases: int) -> list[int]:
    """Return row counts that this bucket serves: the bucket itself, the fewest, and between.

    A batch may be padded to ``most`` times its rows.
    """
    bucket = graph.key.bucket
    below = max((size for size in buckets if size < bucket), default=0)
    fewest = max(below + 1, -int(-bucket // most))
    picks = [bucket, fewest]
    picks += [fewest + (bucket - fewest) * k // cases for k in range(1, cases)]
    return list(dict.fromkeys(picks))[:cases]
