"""Loading a batch: inputs copied into static buffers and padded, in a few grouped launches.

What a run of a given size has to do (shapes to expect, views to write, templates to pad with) is
worked out once and kept as a ``CopyPlan``; ``CopyPlan.load`` is the hot path of every step. On a
device a launch costs about as much host time as six reinterpreted tensors, so slots of different
dtypes share one grouped copy, as words of four bytes, where that pays.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import torch

from devgraph.api.buffers import alike_to
from devgraph.api.errors import DeviceGraphError, DeviceLost
from devgraph.api.graph import DeviceGraph
from devgraph.api.pool import Pool
from devgraph.runners.inputs import InputArena, Staging
from devgraph.runners.slots import InputSlot, Pad, Padding, Size, cut

logger = logging.getLogger(__name__)

_PLACE = torch.Tensor.data_ptr
_WORD = torch.int32
_VIEWS_PER_LAUNCH = 6
"""Tensors that can be reinterpreted in the host time of one grouped launch: 0.8 us against 5 us,
measured on the host of an H200."""

MOST_PLACES = 16
"""Sets of addresses that a plan remembers having seen."""

USES_TO_CAPTURE = 100
"""At this use the copies from a set of addresses are captured, where a launch of a graph is
quicker: a capture takes as long as some hundred launches save."""

MOST_GRAPHS = 64
"""Graphs of copies that a runner has at a time: each took 120 KiB of an H200's memory."""

Values = tuple[torch.Tensor, ...]
"""The inputs of a batch, in the order of a plan's copies."""

_Copy = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Targets and sources of one grouped copy."""


@attrs.define
class _Kept:
    """Copies from a set of addresses that inputs came back to.

    They own no memory, and serve inputs of exactly their layout at these addresses.
    """

    copies: list[_Copy]
    uses: int = 0
    graph: DeviceGraph | None = None
    """The same, captured."""


@attrs.frozen
class _Group:
    """One grouped copy: ``sources[first:last]`` and the pads go to ``targets``."""

    targets: list[torch.Tensor]
    first: int
    last: int
    pads: list[torch.Tensor]


class CopyPlan:
    """Everything that loading a batch of one real size into one padded size needs.

    Args:
        arena: where the data goes.
        real: the size of the caller's batch.
        padded: the size of the graph.
        run_tensors: where the slots go that belong to the run and not to the graph, at the real
            size.
        pool: of the graphs; None keeps nothing of the addresses that inputs come from.
        join: copy slots of different dtypes together where that pays; by default on devices, where
            a copy is a launch.
    """

    def __init__(
        self,
        arena: InputArena,
        real: Size,
        padded: Size,
        run_tensors: Mapping[str, torch.Tensor],
        *,
        pool: Pool | None = None,
        join: bool | None = None,
    ) -> None:
        self._arena = arena
        self._pool = pool
        self._real = real
        self._padded = padded
        self._run_tensors = run_tensors
        self._device = arena.device
        self._start, self._stop = arena.buffers.start, arena.buffers.stop
        if join is None:
            join = arena.device.type != "cpu"
        joined = _joined(list(arena.given.values())) if join else set()

        def kind(slot: InputSlot) -> str:
            return "" if slot.name in joined else str(slot.dtype)

        # Sorted by group, so that the sources of each are one slice.
        self._order = sorted(arena.given.values(), key=kind)
        self._count = len(self._order)
        self._names = [slot.name for slot in self._order]
        self._of: Callable[[Any], Any] = operator.itemgetter(*self._names)
        self._alike: Callable[..., bool] = _never
        """Whether inputs are like the last ones that were looked at: in shapes, strides, dtypes,
        devices, and in that no autograd takes part."""
        self._away: tuple[int, ...] = ()
        """Which of those inputs come from the host."""
        self._seen: set[tuple[int, ...]] = set()
        self._known: dict[tuple[int, ...], _Kept] = {}
        """Copies by the addresses of their inputs."""
        self._words = [
            i for i, s in enumerate(self._order) if s.name in joined and s.dtype is not _WORD
        ]
        self._stagings: dict[tuple[int, ...], Staging] = {}
        """By which inputs come from the host; made when first needed."""
        self._groups: list[_Group] = []
        self._padding = Padding()
        """What no template holds, and the marks of real rows."""
        for group, slots in itertools.groupby(self._order, kind):
            self._add_group(list(slots), as_words=not group)
        for slot in arena.slots.values():
            if slot.real is not None:
                rules = Pad.fill(slot.real), slot.pad
                for part, pad in zip(self._split(slot), rules, strict=True):
                    if part is not None:
                        template = arena.template(slot, pad)
                        self._padding.add(part, pad, template=template)
        self._pads_apart = bool(self._padding)

    def _add_group(self, slots: Sequence[InputSlot], *, as_words: bool) -> None:
        heads, tails, pads = [], [], []
        for slot in slots:
            head, tail = self._split(slot)
            heads.append(head)
            if tail is None:
                continue
            template = self._arena.template(slot, slot.pad)
            if template is None:
                assert slot.axis is not None
                rows = head.shape[slot.axis]
                last = head.narrow(slot.axis, rows - 1, 1) if rows else None
                self._padding.add(tail, slot.pad, last=last)
            else:
                tails.append(tail)
                pads.append(cut(template, tail))
        targets = [*heads, *tails]
        if as_words:
            targets, pads = [*map(_words, targets)], [*map(_words, pads)]
        first = self._groups[-1].last if self._groups else 0
        self._groups.append(_Group(targets, first, first + len(slots), pads))

    def _split(self, slot: InputSlot) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the part of the slot that real rows fill, and the padded rest if there is any."""
        view = self._run_tensors.get(slot.name)
        if view is None:
            view = self._arena.buffers.view(slot.name, slot.shape(self._padded))
        axis = slot.axis
        if axis is None:
            return view, None
        rows = slot.shape(self._real)[axis]
        missing = view.shape[axis] - rows
        if not missing:
            return view, None
        return view.narrow(axis, 0, rows), view.narrow(axis, rows, missing)

    def alike(self, inputs: Mapping[str, Any]) -> Values | None:
        """Return the inputs in the order of the copies if they are like those that were looked at
        closely; they are of the plan's size then."""
        try:
            values: Any = self._of(inputs)
            if self._count == 1:
                values = (values,)
            return values if len(inputs) == self._count and self._alike(*values) else None
        except (KeyError, TypeError):
            return None

    def load(self, inputs: Mapping[str, Any], values: Values | None = None) -> None:
        """Copy ``inputs`` into the static buffers and pad the rest, on the current stream.

        Nothing is written when an input is refused. Raises as ``InputArena.admit``.

        Args:
            values: what ``alike`` returned for the inputs, where the caller knows it.
        """
        values = values or self.alike(inputs)
        if values is None:
            _copy(self._admitted(inputs))
        else:
            found = self._send(values) if self._away else values
            places = tuple(map(_PLACE, found))
            kept = self._known.get(places)
            if kept is None:
                _copy(self._copies(found, places) or self._admitted(inputs))
            elif kept.graph is None:
                self._again(kept)
            else:
                kept.graph.launch()
        if self._pads_apart:
            self._padding.write()

    def _again(self, kept: _Kept) -> None:
        """Make copies that were made before, and capture them if they are made all the time."""
        _copy(kept.copies)
        kept.uses += 1
        backend, pool = self._arena.backend, self._pool
        assert pool is not None
        budgeted = pool.recordings.budget_bytes is not None  # others need its room more
        wanted = kept.uses >= USES_TO_CAPTURE and backend.launches_quickly and not budgeted
        # No step waits for the captures of another thread.
        if not wanted or backend.recording or len(self._arena.copies) >= MOST_GRAPHS:
            return
        graph, kept.uses = backend.make_graph(pool), 0
        try:
            with backend.capture_context(graph):
                _copy(kept.copies)
        except DeviceLost:
            raise
        except (DeviceGraphError, RuntimeError, MemoryError) as error:
            logger.info("the copies of inputs stay out of a graph: %s", error)
        else:
            kept.graph = graph
            self._arena.copies.add(graph)

    def _keep(self, copies: list[_Copy], places: tuple[int, ...], pool: Pool) -> None:
        """Keep ``copies`` of what lies at ``places``, if inputs come back to them.

        Engines hand over the same buffers again and again, and reinterpreting tensors takes longer
        than all else here.
        """
        if places not in self._seen:
            if len(self._seen) >= MOST_PLACES:
                self._seen.clear()
                self._known.clear()
            self._seen.add(places)
            return
        sources = [source for _, found in copies for source in found]
        if pool.bare(sources[0]) is sources[0]:
            self._pool = None  # the device has no tensors without memory
        elif {*places}.issubset(map(_PLACE, sources)):
            self._known[places] = _Kept([(to, [*map(pool.bare, found)]) for to, found in copies])

    def _admitted(self, inputs: Mapping[str, Any]) -> list[_Copy]:
        """Return the copies of inputs after a close look at them; later ones that are alike need
        none."""
        admitted = dict(zip(self._arena.given, self._arena.admit(inputs, self._real), strict=True))
        values = [admitted[slot.name] for slot in self._order]
        self._away = tuple(i for i, value in enumerate(values) if value.device != self._device)
        self._known.clear()
        self._seen.clear()
        self._alike = _never
        if all(map(operator.is_, values, map(inputs.__getitem__, self._names))):
            self._alike = alike_to(values)
        return self._copies(self._send(values)) or []

    def _copies(
        self, values: Sequence[torch.Tensor], places: tuple[int, ...] = ()
    ) -> list[_Copy] | None:
        """Return what is to be copied where, of values that are on the device.

        Args:
            places: addresses of inputs that are like those before; None is returned where one lies
                in the static buffers.
        """
        for place in places:
            if self._start <= place < self._stop:
                return None
        sources = list(values)
        for index in self._words:
            try:
                sources[index] = sources[index].view(_WORD)
            except RuntimeError:  # Its rows are no whole words where they lie.
                whole = sources[index].clone(memory_format=torch.contiguous_format)
                sources[index] = whole.view(_WORD)
        copies = []
        for group in self._groups:
            copies.append((group.targets, sources[group.first : group.last] + group.pads))
        if places and self._pool is not None:
            self._keep(copies, places, self._pool)
        return copies

    def _send(self, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return ``values`` with those that are on the host sent to fixed places on the device."""
        away = self._away
        if not away:
            return values
        staging = self._stagings.get(away)
        if staging is None:
            slots = [self._order[i] for i in away]
            layouts = [(slot.shape(self._real), slot.dtype) for slot in slots]
            staging = self._stagings[away] = Staging(self._arena.staging, layouts)
        sent = list(values)
        for index, tensor in zip(away, staging.send([values[i] for i in away]), strict=True):
            sent[index] = tensor
        return sent


def _copy(copies: list[_Copy]) -> None:
    for targets, sources in copies:
        torch._foreach_copy_(targets, sources)


def _never(*values: object) -> bool:
    return False


def _joined(slots: Sequence[InputSlot]) -> set[str]:
    """Return the names of the slots to copy together as words; none where that does not pay."""
    fitting = [slot for slot in slots if _fits_words(slot)]
    saved = len({slot.dtype for slot in fitting}) - 1
    views = sum(slot.dtype is not _WORD for slot in fitting)
    return {slot.name for slot in fitting} if views <= saved * _VIEWS_PER_LAUNCH else set()


def _fits_words(slot: InputSlot) -> bool:
    """Whether any number of rows of the slot is a whole number of words."""
    if not slot.dims or slot.dtype.is_complex:
        return False
    innermost = slot.dims[-1] if isinstance(slot.dims[-1], int) else 1
    return innermost * slot.dtype.itemsize % _WORD.itemsize == 0


def _words(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):  # in which it could not be written outside of that mode
        return tensor if tensor.dtype is _WORD else tensor.view(_WORD)
