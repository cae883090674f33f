"""State of requests: rows of fixed size that persist from one run to the next.

Each state slot has a buffer with a row for every request slot and a scratch row, which padded rows
read and write. To roll back steps of up to W tokens, a second buffer holds versions 0 to W - 1 of
these rows; version W is the current state. After a step of w tokens, version W - w is the state
before the step, and version W - w + n the state after n of its tokens.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import torch

from devgraph.api.backend import Backend
from devgraph.api.buffers import StaticBuffers
from devgraph.api.errors import (
    ConfigError,
    ConfigTypeError,
    InputError,
    InputTypeError,
    brief,
    counted,
    whole,
)
from devgraph.api.tensors import has_place
from devgraph.runners.batch import Batch, StateViews
from devgraph.runners.slots import STATE_SLOTS, InputSlot, Pad, as_dims, raw, require_name

_NO_STEP = -1  # number of tokens if no step can be rolled back

MOST_CACHED = 64
"""Maximum number of sequences of request slots that are cached on the device."""


@attrs.frozen
class StateSlot:
    """State of fixed size that each request carries from step to step.

    Args:
        name: Attribute of ``batch.state``.
        shape: Shape of the state of one request.
        dtype: Dtype of the state, which may differ from the dtype of the weights.

    Raises:
        ConfigError: A name, shape or dtype is invalid (a ValueError).
    """

    name: str
    shape: tuple[int, ...] = attrs.field(converter=as_dims)
    dtype: torch.dtype

    def __attrs_post_init__(self) -> None:
        name = self.name
        require_name("state slot", name)
        if name == "history":
            raise ConfigError("state slot 'history' would hide batch.state.history; rename it")
        for dim in self.shape:
            whole(f"a dim of state slot {name!r}", dim, 1, ConfigError)
        if not isinstance(self.dtype, torch.dtype):
            raise ConfigTypeError(f"state slot {name!r} needs a torch.dtype: {brief(self.dtype)}")


class StateStore:
    """The state buffers of a runner, and of the runners that share them."""

    def __init__(self, slots: Mapping[str, StateSlot], rows: int, backend: Backend) -> None:
        self.slots = dict(slots)
        self.rows = rows
        self._backend = backend
        self.buffers = StaticBuffers(
            {name: ((rows + 1, *slot.shape), slot.dtype) for name, slot in slots.items()},
            device=backend.device,
        )
        """The current state, by name."""
        self.width = 0
        """Tokens of the widest step that can be rolled back, or 0."""
        self.earlier: StaticBuffers | None = None
        """Versions 0 to W - 1 of the state, by name."""
        self._steps: list[tuple[int, int]] = [(0, _NO_STEP)] * rows
        """The version before the last step of each request slot, and the tokens of the step."""
        self._unassigned = set(range(rows))
        """Request slots whose row was never cleared or loaded."""
        self._cached: dict[tuple[int, ...], torch.Tensor] = {}

    @classmethod
    def of(
        cls,
        slots: Sequence[StateSlot],
        requests: int,
        *,
        rows: int | None,
        backend: Backend,
        share: Any,
        width: int,
    ) -> StateStore | None:
        """Return the store for the declared ``slots``, or None if there are none."""
        if isinstance(slots, StateSlot) or not isinstance(slots, Iterable):
            raise ConfigTypeError(f"state must be a list of StateSlot objects, got {brief(slots)}")
        by_name: dict[str, StateSlot] = {}
        for slot in slots:
            if not isinstance(slot, StateSlot):
                raise ConfigTypeError(f"state must contain StateSlot objects, got {brief(slot)}")
            if slot.name in by_name:
                raise ConfigError(f"state slot {slot.name!r} is declared twice")
            by_name[slot.name] = slot
        if rows is not None:
            requests = whole("state_rows", rows, requests, ConfigError)
        if not by_name:
            return None
        store: StateStore | None = getattr(share, "state", None)
        if store is None or not store.slots.keys() & by_name.keys():
            store = cls(by_name, requests, backend)
        else:
            store._require_shareable(by_name, requests, width)
        if width > 1 and store.earlier is None:
            store._keep_versions(width)
        return store

    def _require_shareable(self, slots: Mapping[str, StateSlot], requests: int, width: int) -> None:
        for name, slot in slots.items():
            own = self.slots.get(name)
            if own is None:
                raise ConfigError(
                    f"state slot {name!r} is not in the share= runner, but other state slots of "
                    f"this runner are; declare it there too"
                )
            if own != slot:
                raise ConfigError(
                    f"state slot {name!r} is {slot.dtype} {slot.shape}, but {own.dtype} "
                    f"{own.shape} in the share= runner; declare equal slots, or rename one of them "
                    f"if the state belongs to another model"
                )
        for unit, needed, available in (
            ("request slots", requests, self.rows),
            ("tokens of a step to roll back", width, self.width or width),
        ):
            if needed > available:
                raise ConfigError(
                    f"state needs {needed} {unit}, but the share= runner has {available}; create "
                    f"the runner that needs more first, and pass it as share= to the other "
                    f"(state_rows= sets the number of request slots)"
                )

    def _keep_versions(self, width: int) -> None:
        self.width = width
        self.earlier = StaticBuffers(
            {n: ((width, *b.shape), b.dtype) for n, b in self.buffers.items()},
            device=self._backend.device,
        )
        self._steps[:] = [(width, _NO_STEP)] * self.rows

    @property
    def memory(self) -> list[StaticBuffers]:
        return [self.buffers] if self.earlier is None else [self.buffers, self.earlier]

    @property
    def named(self) -> dict[str, torch.Tensor]:
        named = {f"state {name!r} of requests": b for name, b in self.buffers.items()}
        earlier = () if self.earlier is None else self.earlier.items()
        return named | {f"history of state {name!r}": versions for name, versions in earlier}

    @property
    def nbytes(self) -> int:
        return sum(buffers.nbytes for buffers in self.memory)

    @property
    def input(self) -> InputSlot:
        """The input slot for the request slot of each row. Proofs use request slots in order."""

        def in_order(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
            return torch.arange(*shape).clamp(max=self.rows)

        pad = Pad.fill(self.rows)
        return InputSlot(STATE_SLOTS, ("requests",), torch.int64, pad=pad, sample=in_order)

    def views(self, width: int | None) -> StateViews:
        """Return ``batch.state`` for a step of ``width`` tokens per request."""
        if width is None or self.earlier is None or not 1 < width <= self.width:
            return StateViews(self.buffers)
        first = self.width - width + 1
        earlier = {name: versions[first:].unbind(0) for name, versions in self.earlier.items()}
        return StateViews(
            self.buffers, StateViews({n: (*v, self.buffers[n]) for n, v in earlier.items()})
        )

    def around(self, forward: Callable[[Batch], Any]) -> Callable[[Batch], Any]:
        """Return a function that saves the state for rollback and then calls ``forward``."""
        earlier = self.earlier
        if earlier is None:
            return forward

        def step(batch: Batch) -> Any:
            slots, width = batch.state_slots, batch.width
            if width is not None and width <= self.width:
                for name, current in self.buffers.items():
                    rows = raw(current).index_select(0, slots)
                    raw(earlier[name])[self.width - width].index_copy_(0, slots, rows)
                if width > 1 and not torch.compiler.is_compiling():
                    return batch.state.must_read_history(functools.partial(forward, batch))
            return forward(batch)

        return step

    def admit(self, slots: Any) -> tuple[int, ...]:
        """Check the request slots of a batch and return them."""
        rows = _integers(slots)
        if rows not in self._cached:
            for slot in rows:
                self.check(slot, used=True)
            if len(set(rows)) < len(rows):
                raise InputError(
                    f"state_slots {list(rows)} contains a request slot twice; each request of a "
                    f"batch needs its own slot"
                )
            if len(self._cached) >= MOST_CACHED:
                self._cached.clear()
            self._cached[rows] = self._sent(rows)
        return rows

    def tensor(self, slots: tuple[int, ...]) -> torch.Tensor:
        """Return a device tensor of request slots that ``admit`` has checked."""
        return self._cached[slots]

    def _sent(self, numbers: Sequence[int]) -> torch.Tensor:
        tensor = self._backend.pin(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
        return tensor.to(self._backend.device, non_blocking=True)

    def roll_back(self, slots: tuple[int, ...], accepted: Any) -> None:
        """Restore the state after the accepted tokens of each request's last step."""
        if isinstance(accepted, torch.Tensor) or not isinstance(accepted, Sequence):
            raise InputTypeError(f"accepted must be a list of integers or None: {brief(accepted)}")
        if len(accepted) != len(slots):
            raise InputError(
                f"accepted has {counted(len(accepted), 'entry')}, but needs one for each of the "
                f"{counted(len(slots), 'request')} in state_slots"
            )
        versions = dict(zip(slots, map(self._version, slots, accepted), strict=True))
        for slot, tokens in zip(slots, accepted, strict=True):
            if tokens is not None:  # Later tokens are lost, even if the next step is refused.
                self._steps[slot] = versions[slot] - tokens, tokens
        changed = {slot: version for slot, version in versions.items() if version < self.width}
        if not changed or self.earlier is None:
            return
        stride = self.rows + 1
        sources = self._sent([version * stride + slot for slot, version in changed.items()])
        targets = self._sent([*changed])
        for name, earlier in self.earlier.items():
            rows = raw(earlier).flatten(0, 1).index_select(0, sources)
            raw(self.buffers[name]).index_copy_(0, targets, rows)

    def _version(self, slot: int, accepted: int | None) -> int:
        """Return the version of a row after ``accepted`` tokens of the last step."""
        if accepted is None:
            return self.width
        if not self.width:
            raise InputError(
                "accepted needs a runner with steps of several tokens: declare a variant with a "
                "width, such as variants=[{}, {'width': 4}]"
            )
        before, tokens = self._steps[slot]
        if whole(f"accepted of request slot {slot}", accepted) > tokens:
            raise InputError(
                f"request slot {slot} has {counted(accepted, 'accepted token')}, but only "
                f"{counted(max(tokens, 0), 'token')} of its last step can be rolled back; pass "
                f"None for a request without such a step"
            )
        return before + accepted

    def note(self, slots: Iterable[int], width: int) -> None:
        """Record the width of the last step of ``slots``; 0 means that it cannot be rolled back."""
        step = (self.width - width, width) if 0 < width <= self.width else (self.width, _NO_STEP)
        for slot in slots:
            self._steps[slot] = step

    def check(self, slot: object, *, used: bool = False) -> int:
        """Return ``slot`` if it is a valid request slot; with ``used``, it must be assigned."""
        number = whole("a request slot", slot)
        if number >= self.rows:
            raise InputError(
                f"there is no request slot {number}: the state has {self.rows}; raise "
                f"max_requests or state_rows"
            )
        if used and number in self._unassigned:
            raise InputError(
                f"request slot {number} was never assigned; call assign({number}) for a new "
                f"request. If another runner assigned it, pass that runner as share=, or copy the "
                f"state with import_state"
            )
        return number

    def clear(self, slot: int) -> None:
        self._unassigned.discard(slot)
        self.note([slot], 0)
        torch._foreach_zero_([raw(buffer)[slot] for buffer in self.buffers.values()])

    def export(self, slot: int, accepted: int | None) -> dict[str, torch.Tensor]:
        """Return copies of the state of a request slot, by name."""
        version = self._version(slot, accepted)
        rows = self.buffers
        if version == self.width or self.earlier is None:
            tensors = {name: buffer[slot] for name, buffer in rows.items()}
        else:
            tensors = {name: versions[version, slot] for name, versions in self.earlier.items()}
        return {n: raw(tensor).clone().view(tensor.dtype) for n, tensor in tensors.items()}

    def load(self, slot: int, rows: object) -> None:
        """Load the result of ``export`` into a request slot."""
        if not isinstance(rows, Mapping):
            raise InputTypeError(f"state must be a mapping of names to tensors, got {brief(rows)}")
        if rows.keys() != self.slots.keys():
            given = ", ".join(sorted(map(str, rows))) or "no names"
            raise InputError(
                f"the state has {given}; this runner needs {', '.join(sorted(self.slots))}"
            )
        for name, declared in self.slots.items():
            value = rows[name]
            if not isinstance(value, torch.Tensor):
                raise InputTypeError(f"state {name!r} must be a tensor, got {brief(value)}")
            given_as = value.dtype, tuple(value.shape), has_place(value)
            if given_as != (declared.dtype, declared.shape, True):
                raise InputError(
                    f"state {name!r} is {brief(value)}; expected {declared.dtype} {declared.shape}"
                )
        self._unassigned.discard(slot)
        self.note([slot], 0)
        targets = [raw(buffer)[slot] for buffer in self.buffers.values()]
        torch._foreach_copy_(targets, [raw(rows[name].detach()) for name in self.buffers])


def _integers(values: Any) -> tuple[int, ...]:
    if isinstance(values, torch.Tensor) and values.device.type == "cpu" and values.dim() == 1:
        values = values.tolist()
    if values is None:
        raise InputError(
            "this runner has state; pass state_slots=, the request slot of each request"
        )
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise InputTypeError(
            f"state_slots must be a list of integers, or a tensor on the host: {brief(values)}"
        )
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise InputTypeError(f"state_slots must be integers, got {brief(values)}") from None
