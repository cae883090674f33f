"""Proofs of a runner: comparisons of its graphs with eager runs on new data."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
    RunResult,
    State,
    Terms,
    addresses,
    compare,
    copies_of,
    drawn,
    extremes,
    host_sets,
    in_case,
    no_rows,
    randomize,
    replaced,
    require_samples,
    rows_of,
)
from devgraph.api.snapshots import RowPlace, RowsOf, differs, read, row_at
from devgraph.runners.graphs import BucketGraph, Graphs
from devgraph.runners.loop import LOOP_SLOTS
from devgraph.runners.ranks import RankGroup
from devgraph.runners.slots import STATE_SLOTS, HostSlot, InputSlot, Size, raw
from devgraph.runners.step import GraphStep, StaticBatch, Step

_ENOUGH = 4096
"""Number of values drawn from a slot's sample to estimate whether real rows use its pad value."""

_COLLISION = "rows within a batch (they write the same row of state)"

Implied = Callable[[Size], Mapping[str, torch.Tensor]]
"""A function that returns interdependent inputs (ids and offsets) for a batch of a given size."""


class Proof:
    """A comparison of graphs with eager runs; see ``Runner.prove``."""

    def __init__(
        self, step: Step, terms: Terms, implied: Implied | None, ranks: RankGroup, tag: str
    ) -> None:
        self.step = step
        self.terms = terms
        self._implied = implied
        self._ranks = ranks
        self._tag = tag
        slots = [name for name, slot in step.inputs.slots.items() if slot.real is None]
        self._sample = {
            **{n: s.sample for n, s in step.inputs.slots.items() if s.sample is not None},
            **require_samples(step.options.sample, [*slots, *step.host.declared]),
            **require_samples(terms.sample, [*slots, *step.host.declared]),
        }
        self.generator = torch.Generator().manual_seed(0)
        self.loops = not step.inputs.slots.keys().isdisjoint(slot.name for slot in LOOP_SLOTS)
        self._varied: set[str] = set()
        self.notes: dict[str, None] = {}
        self.tried: list[tuple[Case, BucketGraph]] = []
        """The cases so far, each with its graph."""
        self._last = _last_inputs(step)
        self.extremes_of: dict[str, tuple[int, int]] = {}
        """Smallest and largest value in real rows, by slot."""

    def of(self, graphs: Graphs, chosen: Sequence[BucketGraph]) -> Report:
        """Compare the ``chosen`` graphs, which must be captured, with eager runs."""
        step, terms = self.step, self.terms
        keys = [str(graph.key) for graph in chosen]
        facts = {"prove": keys, "cases": terms.cases, "host_args": str(terms.host_args)}
        self._ranks.handshake(self._tag, facts)
        leaves = step.tensors(weights=not terms.quick)
        state = State(step.backend, leaves, step.roots(), limit=terms.snapshot_limit)
        now = step.tensors()
        names = replaced(step.addresses, addresses(now))
        # A graph may still read the old memory of a replaced tensor, which may have the same
        # contents. Therefore each case changes the contents of the new tensor.
        self.renewed = [leaf for name, leaf in now if name in names and not terms.quick]
        self.compared = Comparison(
            state,
            step.backend,
            terms.near,
            with_state=terms.state,
            loops=self.loops,
            agreed=self._agreed,
        )
        autocast = current_autocast() if step.autocast is None else step.autocast
        failures: list[Failure] = []
        try:
            reporting = self._ranks.reporting(f"{self._tag}/case")
            with reporting, torch.no_grad(), autocast_of(autocast):
                for graph in chosen:
                    for run in self._runs(graphs, graph):
                        with in_case(run.case, run.inputs.items()):
                            failures += run.failures()
        finally:
            state.snapshot.end_cases()
        state.snapshot.require_unwritten("a case of the proof")
        fixed = [n for n, s in step.inputs.slots.items() if s.fixed_in_proofs]
        return Report(
            cases=len(self.tried),
            failures=tuple(failures),
            exact=all(graph.captured is None or graph.captured.exact for graph in chosen),
            not_varied=tuple(
                [n for n in [*fixed, *step.host.declared] if n not in self._varied]
                + [*self.notes, *state.constant]
            ),
            near=tuple(self.compared.tolerated),
            tried=tuple(case for case, _ in self.tried),
            replaced=names,
            moved=tuple(state.moved),
            draws=self.compared.draws,
            changed=step.guard.difference() if failures and step.guard else "",
        )

    def _runs(self, graphs: Graphs, graph: BucketGraph) -> Iterator[_CaseRun]:
        for size, host, changed, updated in self._sizes(graphs, graph):
            inputs, marks, filled = self._inputs(size)
            case = Case(
                number=len(self.tried),
                host_args=host,
                bucket=f"bucket {graph.key}, {size}",
                padded=size != graph.size,
                changed=changed,
                updated=updated,
                filled=filled,
            )
            self.tried.append((case, graph))
            yield _CaseRun(self, graph, size, case, inputs, marks)

    def _agreed(self, differs: bool) -> bool:
        """Whether ``differs`` is true on any rank."""
        texts = self._ranks.gather(f"{self._tag}/case", "differs" if differs else "")
        for rank, text in enumerate(texts):
            if text.startswith("raised"):
                raise AgreementError(f"rank {rank} could not finish the proof: it {text}")
        return any(texts)

    def _sizes(
        self, graphs: Graphs, graph: BucketGraph
    ) -> Iterator[tuple[Size, dict[str, Any], bool, bool]]:
        """Yield the size and the host arguments of each case, ``Case.changed`` and ``updated``."""
        step, cases = self.step, self.terms.cases
        rows = _rows_to_try(graph, graphs.buckets, step.options.config.max_padding, cases)
        declared = step.host.at_capture(graph.size)
        ends = {
            name: extremes(self._sample[name], value, self.generator)
            for name, value in declared.items()
            if name in self._sample and not isinstance(value, tuple)
        }
        further: list[dict[str, Any]] = []
        if step.last_host:
            further.append({**declared, **step.last_host})
        if ends:
            further += [{**declared, **{n: v[k] for n, v in ends.items()}} for k in range(2)]
        sets = host_sets(declared, self.terms.host_args, further)
        for name, value in declared.items():
            if not isinstance(value, tuple) and len({str(v.get(name)) for v, *_ in sets}) > 1:
                self._varied.add(name)
        count = max(len(rows), len(sets)) if rows and sets else 0
        for index, row, (values, changed, updated) in zip(
            range(count), itertools.cycle(rows), itertools.cycle(sets)
        ):
            size = graphs.counting.some(row, graph.options, index)
            yield size, {**values, **self._sequences(values, size)}, changed, updated

    def _sequences(self, values: Mapping[str, Any], real: Size) -> dict[str, Any]:
        """Return the host arguments that are sequences, with one entry per row of ``real``."""
        sequences = {}
        for name, value in self.step.host.at_capture(real).items():
            slot, data = self.step.host.declared[name], values.get(name)
            if isinstance(value, tuple) and name in self._sample:
                data = self._sample[name]((len(value),), self.generator)
                data = data.tolist() if isinstance(data, torch.Tensor) else data
            elif not isinstance(slot, HostSlot) or not isinstance(data, Sequence):
                continue
            elif len(data) != len(value):
                # Offsets cannot be repeated, and values of the last run may need its inputs.
                repeats = self.terms.host_args is not None and slot.dim != "requests+1"
                data = itertools.islice(itertools.cycle(data), len(value)) if repeats else value
            sequences[name] = tuple(data)
            if sequences[name] != value:
                self._varied.add(name)
        return sequences

    def _inputs(
        self, real: Size
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], tuple[str, ...]]:
        """Return inputs, data of slots with ``real``, and slots without a source of legal data."""
        step = self.step
        implied = (self._implied or self._even_offsets)(real)
        last = self._last(real, self.generator)
        self._varied |= implied.keys() | self._sample.keys() | last.keys()
        inputs, filled = {}, []
        for name, slot in step.inputs.given.items():
            fixed = slot.fixed_in_proofs and name not in self._sample
            if fixed and name in last:
                inputs[name] = last[name]
            elif fixed and name in implied:
                inputs[name] = implied[name]
            else:
                inputs[name] = self.data(slot, real)
                filled += [name] if fixed else []
        marks = {
            name: self.data(slot, real)
            for name, slot in step.inputs.slots.items()
            if slot.real is not None and slot.sample is not None
        }
        return inputs, marks, tuple(filled)

    def _even_offsets(self, real: Size) -> dict[str, torch.Tensor]:
        """Return offsets of requests of similar lengths, unless other data may depend on them."""
        inputs, host = self.step.inputs, self.step.host.declared
        name = inputs.token_offsets
        rows = [s for s in inputs.given.values() if s.by_requests and s.dims[1:] == ()]
        numbers = {s.name for s in rows if not s.dtype.is_floating_point} - {STATE_SLOTS}
        if name is None or host or numbers != {name}:
            return {}
        slot = inputs.slots[name]
        ends = torch.arange(real.requests + 1, device=inputs.device) * real.tokens
        return {name: (ends // real.requests + slot.pad.value).to(slot.dtype)}

    def data(self, slot: InputSlot, real: Size) -> torch.Tensor:
        """Return new data for a slot; without a source of legal data, pad values."""
        device = self.step.inputs.device
        data = torch.full(slot.shape(real), slot.pad.value, dtype=slot.dtype, device=device)
        if slot.name in self._sample:
            data = drawn(slot.name, self._sample[slot.name], data, self.generator)
            self.step.inputs.require_ranges({slot.name: data})
            return data
        if slot.dtype.is_floating_point or slot.dtype.is_complex:
            randomize(data, self.generator)
        return data

    def is_real(self, slot: InputSlot, value: int, data: Sequence[int]) -> bool:
        """Whether real rows of ``slot`` may have ``value``, estimated from its sample or data."""
        name = slot.name
        if name not in self._sample:
            # A loop leaves pad values in the rows of finished requests.
            return value in data and name in self._varied and not self.loops
        if name not in self.extremes_of:
            shape = slot.shape(self.step.inputs.largest)
            with torch.device("cpu"):
                drawn = [self._sample[name](shape, self.generator).flatten()]
                if not drawn[0].numel():
                    return False
                for _ in range(_ENOUGH // drawn[0].numel()):
                    drawn.append(self._sample[name](shape, self.generator).flatten())
            values = torch.cat(drawn)
            self.extremes_of[name] = int(values.min()), int(values.max())
        low, high = self.extremes_of[name]
        return low <= value <= high or value in data


class _CaseRun:
    """The runs of one case: a padded batch eagerly and as a graph, and the real batch eagerly."""

    def __init__(
        self,
        proof: Proof,
        graph: BucketGraph,
        real: Size,
        case: Case,
        inputs: dict[str, torch.Tensor],
        marks: Mapping[str, torch.Tensor],
    ) -> None:
        step = proof.step
        assert graph.captured is not None
        self._proof, self._step, self._compared = proof, step, proof.compared
        self._graph, self._real, self.case = graph, real, case
        self.inputs, self._marks = inputs, marks
        self._exact = graph.captured.exact
        self._padded_host = step.host.resolve(case.host_args, real, graph.size)
        self._real_host = step.host.resolve(case.host_args, real, real)
        self._static = StaticBatch(step, graph)
        self._bound = GraphStep(step, graph, real, 0)
        self._write = step.outputs.writer(graph.key.variant, graph.size)
        self._has_equal_rows = False
        self._read: dict[torch.Tensor, list[int]] = {}
        # Change the rows that padding may write. Otherwise, a write of the value that an earlier
        # batch left would go unnoticed.
        used = functools.partial(_pad_rows, [*self._used_pads()])
        self._compared.state.begin_case(self._named_rows(), used if case.padded else None)
        self._renewed = [(leaf, leaf.detach().clone()) for leaf in proof.renewed]
        for _, value in self._renewed:
            randomize(value, proof.generator)

    def failures(self) -> list[Failure]:
        """Return the failures of the case. All ranks make the same runs, even if only one fails."""
        compared, terms = self._compared, self._proof.terms
        shared, scratch, unused = (functools.partial(_pad_rows, v) for v in self._shared_values())
        want, got, failures = self._on_padded_batch(shared, scratch)
        collides = functools.cache(lambda: self._collides(want, got))
        if compared.agreed(bool(failures) and collides()):
            self._equalize()
            want, got, failures = self._on_padded_batch(no_rows, scratch)
        failures += self._of_other_requests(want)
        stable = self.case.padded and all(failure.kind != "eager" for failure in failures)
        if not compared.agreed(stable and _writes(self._used_pads(), want)) and terms.quick:
            return failures
        alone = compared.result_of(self._unpadded)
        if compared.agreed(stable):
            failures += self._written_by_padding(want, alone)
            failures += [] if failures else self._left_by_padding(want, alone, unused)
        if terms.quick:
            return failures
        if self.case.padded:
            failures += self._on_poisoned_padding(got, collides)
        sized = [] if alone.draws or failures else self._sized(alone, got, unused)
        if alone.draws:
            self._proof.notes["the batch without padding (the step draws random numbers)"] = None
        collided = sized and not self._has_equal_rows and (collides() or self._collides(alone))
        if compared.agreed(bool(collided)):
            self._equalize()
            got, alone = compared.result_of(self._replay), compared.result_of(self._unpadded)
            sized = self._sized(alone, got, unused)
        how = "compared with an eager run of the real batch"
        return failures + [
            self.case.failure(where, f"{how} {message}", "size") for where, message in sized
        ]

    def _of_other_requests(self, want: RunResult) -> Iterator[Failure]:
        """Yield a failure for each state tensor in which the step wrote other requests' rows."""
        store = self._step.state
        if store is None:
            return
        for name in filter(want.state.__contains__, store.named):
            now, saved, numbers = want.state[name]
            written = _changed(saved, now).movedim(int(name.startswith("history")), 0)
            rows = written.reshape(len(written), -1).any(1).nonzero().flatten().tolist()
            others = {*rows}.difference(self._values(STATE_SLOTS), [store.rows])
            if others and numbers is None:
                message = (
                    f"the step writes {name} in rows that belong to no request of the batch; write "
                    f"only the rows in batch.state_slots"
                )
                where = f"slot {STATE_SLOTS!r}, row {min(others)}:"
                yield self.case.failure(where, message, "padding")

    def _eager(self, change: Callable[[], None] = lambda: None) -> NamedTensors:
        """Run the step on the padded batch, after ``change`` has modified the batch."""
        self._load()
        change()
        host = self._static.prepared(self._padded_host)
        self._write(self._step.function(self._static.batch(host)))
        return copies_of(self._bound.result(self.case.host_args))

    def _replay(self, change: Callable[[], None] = lambda: None) -> NamedTensors:
        self._load()
        self._step.outputs.poison(poison)
        change()
        self._bound.replay(self._padded_host)
        return copies_of(self._bound.result(self.case.host_args))

    def _filled(self, host: Mapping[str, Any], inputs: dict[str, torch.Tensor]) -> NamedTensors:
        """Run the step eagerly on a batch that fills the bucket."""
        self._renew()
        step, size = self._step, self._graph.size
        views, values = step.inputs.eager_inputs(inputs, size), step.host.resolve(host, size, size)
        return copies_of(step.call_eagerly(step.whole, views, size, values, self._graph.options))

    def _unpadded(self, values: Iterable[tuple[str, int, int | None]] = ()) -> NamedTensors:
        """Run the step on the real rows.

        Each of ``values`` consists of a slot, a value and a replacement. If the replacement is
        None, the first row of the slot is set to the value. Otherwise, every row with the value is
        set to the replacement.
        """
        self._renew()
        step, real = self._step, self._real
        views = step.inputs.eager_inputs(self.inputs, real)
        self._mark(views)
        for name, value, other in values:
            view, axis = views[name], step.inputs.slots[name].axis or 0
            if other is None:
                view.narrow(axis, 0, min(1, view.shape[axis])).fill_(value)
            else:
                view.masked_fill_(view == value, other)
        options = self._graph.options
        return copies_of(step.call_eagerly(step.whole, views, real, self._real_host, options))

    def _load(self) -> None:
        self._renew()
        self._bound.load(self.inputs)
        self._mark(self._step.inputs.views(self._real))
        if self._has_equal_rows:
            self._fill_padding(lambda slot: _first_row(slot, self.inputs[slot.name]))

    def _renew(self) -> None:
        for leaf, value in self._renewed:
            leaf.detach().copy_(value)

    def _mark(self, views: Mapping[str, torch.Tensor]) -> None:
        for name, data in self._marks.items():
            views[name].copy_(data)

    def _equalize(self) -> None:
        """Give all rows equal data, including padded rows.

        A device may write rows in any order. If several rows of the batch write the same row of
        state, only equal data makes the result independent of that order.
        """
        self._has_equal_rows = True
        for name, slot in self._step.inputs.given.items():
            if slot.axis is None or slot.row_dim == "requests+1":
                continue
            data = self.inputs[name]
            self.inputs[name] = (
                _first_row(slot, data).expand_as(data)
                if data.is_floating_point()
                else torch.full_like(data, slot.pad.value)
            )
        self._proof.notes[_COLLISION] = None

    def _on_padded_batch(
        self, shared: RowsOf, scratch: RowsOf
    ) -> tuple[RunResult, RunResult, list[Failure]]:
        """Return the results of an eager run and of the graph on the padded batch, and failures."""
        runs, exact = (self._eager, self._replay), self._exact
        return self._compared.failures(
            self.case, *runs, exact=exact, shared=shared, scratch=scratch
        )

    def _on_poisoned_padding(
        self, got: RunResult, collides: Callable[[], bool]
    ) -> Iterator[Failure]:
        """Yield a failure for each output that changes with other legal data in padding."""
        size = self._graph.size
        noise = functools.partial(self._fill_padding, lambda slot: self._proof.data(slot, size))
        poisoned = self._compared.result_of(lambda: self._replay(noise))
        for (name, one), (_, other) in zip(got.outputs, poisoned.outputs, strict=True):
            message = compare(one, other)
            if message and (collides() or self._collides(poisoned)):
                self._proof.notes[_COLLISION] = None
            elif message:
                yield self.case.failure(name, f"with other data in padding {message}", "size")

    def _sized(self, alone: RunResult, got: RunResult, unused: RowsOf) -> list[tuple[str, str]]:
        """Return the differences between the graph and an eager run of the unpadded batch.

        Only state that the unpadded batch wrote is compared. State rows that several rows of the
        batch write, or that only padding writes, are skipped.
        """
        state: dict[str, Any] = {}
        graphs: dict[str, Any] = {}
        for name, (now, saved, rows) in alone.state.items():
            other = got.state[name][0] if name in got.state else saved
            if now.dim():
                written = _changed(saved, now)
                for at in unused(now, rows):
                    row_at(written, at).fill_(False)
                # Not every device has ``where`` for unsigned integers.
                other = torch.where(written, raw(other), raw(now)).view(now.dtype)
            state[name], graphs[name] = (now, now, rows), (other, other, rows)
        return self._compared.differences(
            RunResult(outputs=alone.outputs, state=state),
            RunResult(outputs=got.outputs, state=graphs),
            lambda name: self._proof.terms.near,
        )

    def _integers(self) -> Iterator[tuple[InputSlot, list[int]]]:
        """Yield each integer slot with its real values."""
        for name, slot in self._step.inputs.given.items():
            is_integer = not (slot.dtype.is_floating_point or slot.dtype.is_complex)
            if is_integer and slot.dtype is not torch.bool and slot.axis is not None:
                yield slot, self._values(name)

    def _values(self, name: str) -> list[int]:
        data = self.inputs[name]
        if data not in self._read:
            self._read[data] = data.flatten().tolist()
        return self._read[data]

    def _named_rows(self) -> torch.Tensor:
        """Return all values of integer slots in the case, each of which may be a row number."""
        ends = self._proof.extremes_of
        rows = {row for slot, data in self._integers() for row in [*data, int(slot.pad.value)]}
        rows.update(row for slot, _ in self._integers() for row in ends.get(slot.name, ()))
        return torch.tensor(sorted(rows), dtype=torch.int64, device=self._step.inputs.device)

    def _fill_padding(self, row: Callable[[InputSlot], torch.Tensor]) -> None:
        """Fill the padded rows of floating-point slots with ``row(slot)``, one row or more."""
        for slot, part in self._padding():
            if slot.dtype.is_floating_point and slot.real is None:
                data, axis = row(slot), slot.axis or 0
                part.copy_(data.narrow(axis, 0, min(data.shape[axis], part.shape[axis])))

    def _padding(self) -> Iterator[tuple[InputSlot, torch.Tensor]]:
        """Yield the padded rows of each slot of the graph."""
        inputs = self._step.inputs
        parts = inputs.split(self._graph.size, self._real, inputs.graph_slots)
        return ((inputs.slots[name], rows) for name, (_, rows) in parts.items() if rows is not None)

    def _shared_values(self) -> tuple[list[_Pad], list[_Pad], list[_Pad]]:
        """Return three lists of pad values.

        The first list contains each value that occurs in several rows. The second contains such a
        value only if no real row uses it. The third contains each value that occurs in several rows
        or that no real row uses.
        """
        shared, scratch, unused = list[_Pad](), list[_Pad](), list[_Pad]()
        for pad, data in self._pads():
            axis = pad.slot.axis or 0
            padded = pad.slot.shape(self._graph.size)[axis] - pad.slot.shape(self._real)[axis]
            # Rows of finished requests in a loop are padding as well.
            is_shared = data.count(pad.value) + padded > 1 or self._proof.loops
            is_unused = not self._proof.is_real(pad.slot, pad.value, data)
            shared += [pad] * is_shared
            scratch += [pad] * (is_shared and is_unused)
            unused += [pad] * (is_shared or is_unused)
        return shared, scratch, unused

    def _pads(self) -> Iterator[tuple[_Pad, list[int]]]:
        """Yield the value in padded rows of each integer slot, and the slot's real values."""
        for slot, data in self._integers():
            value = int(slot.pad.value)
            if slot.pad.kind == "last":
                if not data or slot.row_dim == "requests+1":
                    continue
                value = data[-1]
            ends = self._proof.extremes_of.get(slot.name, ())
            yield _Pad(slot, value, max(map(abs, (value, *data, *ends)))), data

    def _collides(self, *seen: RunResult) -> bool:
        """Whether all rows of a slot contain its pad value, so that they write one row of state.

        Slots without a sample contain only pad values after the first step of a loop.
        """
        pads = [
            pad
            for pad, data in self._pads()
            if pad.slot.row_dim != "requests+1"
            if set(data) == {int(pad.slot.pad.value)}
            or (self._proof.loops and pad.slot.fixed_in_proofs)
            if len(data) > 1 or self.case.padded
        ]
        return any(_writes(pads, result) for result in seen)

    def _used_pads(self) -> Iterator[_Pad]:
        """Yield each pad value that real rows use."""
        return (pad for pad, data in self._pads() if self._proof.is_real(pad.slot, pad.value, data))

    def _written_by_padding(self, want: RunResult, alone: RunResult) -> Iterator[Failure]:
        """Yield a failure for each slot whose pad value lets padding write the state of real rows.

        The batch without padding runs once with that value in a real row, and once without. State
        that only the first of these runs writes belongs to the row with that number.
        """
        used = [pad for pad in self._used_pads() if pad.slot.row_dim != "requests+1"]
        values = [(pad.slot.name, pad.value, None) for pad in used]
        wrong = {
            name: (now, alone.state[name][0] if name in alone.state else saved)
            for name, (now, saved, _) in want.state.items()
        }
        flags = read(differs(*pair) for pair in wrong.values())
        wrong = dict(itertools.compress(wrong.items(), flags))
        if not self._compared.agreed(bool(wrong and used)):
            return
        real = self._compared.result_of(functools.partial(self._unpadded, values)).state
        for slot, pad, _ in used:
            data = self._values(slot.name)
            legal = [*self._proof.extremes_of.get(slot.name, ()), *data]
            free = [value for value in legal if value != pad]
            if not free:
                continue
            elsewhere = functools.partial(self._unpadded, [*values, (slot.name, pad, free[0])])
            moved = self._compared.result_of(elsewhere).state
            for name, (now, right) in wrong.items():
                if name not in real:
                    continue
                row = _changed(real[name][1], real[name][0])
                if name in moved:
                    row &= ~_changed(*moved[name][1::-1])
                if alone.draws and (written := alone.state.get(name)):
                    row &= ~_changed(*written[1::-1])
                if self._proof.terms.near(
                    *(rows_of(t.reshape(-1), row.reshape(-1)) for t in (right, now))
                ):
                    yield self.case.failure(
                        f"slot {slot.name!r}:",
                        f"padded rows write row {pad} of {name}, which real rows use: pad of slot "
                        f"{slot.name!r}",
                        "padding",
                    )

    def _left_by_padding(
        self, want: RunResult, alone: RunResult, unused: RowsOf
    ) -> Iterator[Failure]:
        """Yield a failure if values that only padding wrote change the results of a later batch.

        The later batch fills the bucket. It runs from the state of the case, and then again with
        the values that padding left in rows that the step derives from the size of the batch.
        """
        left: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name, (now, saved, rows) in want.state.items():
            only = _changed(saved, now)
            if name in alone.state:
                only &= ~_changed(saved, alone.state[name][0])
            for at in unused(now, rows):
                row_at(only, at).fill_(False)
            if rows is None and not name.startswith("random generator") and only.any():
                left[name] = only, now
        if not self._compared.agreed(bool(left)):
            return
        proof, size, values = self._proof, self._graph.size, self.case.host_args
        inputs = proof._inputs(size)[0]
        run = functools.partial(self._filled, {**values, **proof._sequences(values, size)}, inputs)
        first = self._compared.result_of(run)

        def after_padding() -> NamedTensors:
            for name, tensor in self._step.tensors():
                if name in left:
                    only, now = left[name]
                    _write_where(only, now, tensor.detach())
            return run()

        later = self._compared.result_of(after_padding)
        for name, (now, saved, _) in first.state.items():
            if name in later.state:
                _write_where(~_changed(saved, now), now, later.state[name][0])
        others = RunResult(
            outputs=later.outputs, state={n: v for n, v in later.state.items() if n in first.state}
        )
        if self._compared.differences(first, others, lambda _: self._proof.terms.near):
            for name, (only, _) in left.items():
                row = int(only.nonzero()[0, 0])
                yield self.case.failure(
                    f"{name}:",
                    f"padded rows write row {row} of {name}, which real rows of a later batch use: "
                    f"the step takes the row from the size of the batch",
                    "padding",
                )


def _first_row(slot: InputSlot, data: torch.Tensor) -> torch.Tensor:
    return data.narrow(slot.axis or 0, 0, 1)


class _Pad(NamedTuple):
    """The value in padded rows of an integer slot."""

    slot: InputSlot
    value: int
    reach: int
    """Largest absolute value in the slot. A dimension that the slot indexes is larger."""


def _pad_rows(
    pads: Iterable[_Pad], tensor: torch.Tensor, numbers: torch.Tensor | None
) -> Iterator[RowPlace]:
    """Yield the rows of ``tensor`` whose numbers are pad values in ``pads``.

    If ``numbers`` is given, the tensor has only these rows. Otherwise rows are along any dimension,
    or along two adjacent dimensions (pages of slots).
    """
    if numbers is not None:
        values = {pad.value for pad in pads}
        yield from ((0, (at,)) for at, row in enumerate(numbers.tolist()) if row in values)
        return
    for axis, (_, value, reach) in itertools.product(range(tensor.dim()), pads):
        size, *rest = tensor.shape[axis : axis + 2]
        if size > max(1, reach):
            yield axis, (value % size,)
        for width in rest:
            if size * width > max(1, reach):
                yield axis, divmod(value % (size * width), width)


def _writes(pads: Iterable[_Pad], seen: RunResult) -> bool:
    """Whether a run changed a row of state whose number is a pad value in ``pads``."""
    pads = [*pads]
    return any(
        read(
            differs(row_at(saved, at), row_at(now, at))
            for now, saved, numbers in seen.state.values()
            for at in _pad_rows(pads, now, numbers)
        )
    )


def _changed(saved: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Return a bool for each element: whether any of its bytes differs."""
    one, other = (t.contiguous().view(-1).view(torch.uint8) for t in (saved, now))
    return (one != other).view(*now.shape, now.element_size()).any(-1)


def _write_where(mask: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Write the masked elements of ``source`` to ``target``, in operations of fixed shapes."""
    raw(target).copy_(torch.where(mask, raw(source), raw(target)))


def _last_inputs(step: Step) -> Callable[[Size, torch.Generator], dict[str, torch.Tensor]]:
    """Return a callable that permutes whole requests of the last replay into new inputs."""
    # These inputs are indices into live state, which a proof can restore only if it is known.
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
    """Return row counts of batches for this bucket: the largest, the smallest, and others."""
    bucket = graph.key.bucket
    below = max((size for size in buckets if size < bucket), default=0)
    fewest = max(below + 1, -int(-bucket // most))
    picks = [bucket, fewest]
    picks += [fewest + (bucket - fewest) * k // cases for k in range(1, cases)]
    return list(dict.fromkeys(picks))[:cases]
