"""The batch that a step function receives: its tensors and its host arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from devgraph.api.errors import (
    CaptureError,
    ConfigError,
    HostArgumentError,
    InputError,
    StateError,
    brief,
    counted,
    did_you_mean,
)
from devgraph.api.marks.host_values import HostSpec, declared_names, require_declared
from devgraph.api.marks.marks import is_capturing
from devgraph.api.marks.source import user_line
from devgraph.runners.slots import HostSlot, Size


class HostValues(Mapping[str, Any]):
    """Host arguments by attribute or key. In a capture they are tracked values."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(
                f"the batch has no host argument {name!r}. {did_you_mean(name, self._values)} "
                f"Declare it in host_args of the runner."
            ) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_"):
            raise HostArgumentError(
                f"batch.host.{name} cannot be set, because a replay does not run the step's Python "
                f"code and would always use this value. Keep values that a step changes (lengths) "
                f"in a device tensor, and pass a host argument that is valid for all steps"
            )
        super().__setattr__(name, value)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Live:
    """The size and the run slots of the current run, which all graphs of a runner share."""

    __slots__ = ("size", "tensors")

    def __init__(self) -> None:
        self.size = Size(0, 0)
        self.tensors: Mapping[str, torch.Tensor] = {}


class StateViews:
    """``batch.state``: the current state by name, each ``[request slots + 1, *shape]``.

    Attributes:
        history: None in a step of one token. A step of several tokens writes the state after each
            token into ``history.<name>[token]``. The last of these tensors is the current state.
    """

    def __init__(self, tensors: Mapping[str, Any], history: StateViews | None = None) -> None:
        for name, tensor in tensors.items():
            object.__setattr__(self, name, tensor)
        self._history = history
        self._is_read = False

    @property
    def history(self) -> StateViews | None:
        if not torch.compiler.is_compiling():
            self._is_read = True
        return self._history

    def must_read_history(self, step: Callable[[], Any]) -> Any:
        """Call ``step``, and raise ConfigError if it does not read ``history``."""
        self._is_read = False
        result = step()
        if not self._is_read:
            names = ", ".join(f"batch.state.history.{name}[t]" for name in self._names())
            raise ConfigError(
                f"a step of several tokens must also write the state after each token t, which "
                f"accepted= restores: {names}"
            )
        return result

    def _names(self) -> list[str]:
        return [name for name in vars(self) if name[0] != "_"]

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the batch has no state {name!r}. {did_you_mean(name, self._names())}"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        # ``state.name += 1`` writes in place and then assigns the same tensor.
        if name[0] != "_" and value is not getattr(self, name):
            raise CaptureError(
                f"batch.state.{name} was replaced at {user_line()}, but the state stays in the old "
                f"tensor. Write the rows of the batch in place: "
                f"batch.state.{name}.index_copy_(0, batch.state_slots, new)"
            )
        object.__setattr__(self, name, value)


class Batch:
    """The data of one step: ``batch.<slot>`` tensors, ``batch.host``, and the sizes.

    In a graph the tensors are static views of the bucket's size. In an eager step they have the
    real size. If a graph depends only on the number of tokens (breakable prefill), slots with a row
    per request are *run slots*, which change from run to run. Read them in a region, in a
    ``no_graph`` function or in the tail.

    The batch of an eager step is valid only in that step. Reading a stored batch
    (``self.batch = batch``) in a later step raises StateError.

    Attributes:
        host: The host arguments.
        tokens: Rows of the ``"tokens"`` slots, padding included.
        width: Tokens per request; None if requests differ in length.
        variant: The variant of this step.
        state: The state of requests, if the runner declares any. ``state_slots`` contains the
            request slot of each row.
    """

    host: HostValues
    state: StateViews
    state_slots: torch.Tensor

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        size: Size,
        *,
        host: Mapping[str, Any],
        variant: Mapping[str, Any],
        live: Live | None = None,
        live_names: frozenset[str] = frozenset(),
        state: StateViews | None = None,
    ) -> None:
        for name, tensor in tensors.items():  # A plain loop, so that compilers can trace it.
            setattr(self, name, tensor)
        if state is not None:
            self.state = state
        self.host = HostValues(host)
        self.tokens = size.tokens
        self.width = size.width
        self.variant = MappingProxyType(dict(variant))
        self._size = size
        self._live = live
        self._live_names = live_names
        self._over = False

    @property
    def requests(self) -> int:
        """Number of requests, including padding; with run slots, the number in the current run."""
        if self._live_names:
            return self._of_run("requests").size.requests
        return self._size.requests

    @property
    def real(self) -> Size:
        """Size without padding, which changes between runs and cannot be read in a graph."""
        return self._size if self._live is None else self._of_run("real").size

    def _of_run(self, name: str) -> Live:
        if is_capturing():
            raise CaptureError(
                f"batch.{name} changes between runs, but was read inside a graph, at "
                f"{user_line()}. Pass the batch to a function marked @dg.region() or @dg.no_graph "
                f"and read it there, or move the line into the runner's tail."
            )
        assert self._live is not None
        return self._live

    def __getattr__(self, name: str) -> torch.Tensor:
        # Python calls this only for run slots and unknown names.
        if name in self.__dict__.get("_live_names", frozenset()):
            return self._of_run(name).tensors[name]
        if self.__dict__.get("_over") and not name.startswith("_"):
            raise StateError(
                f"batch.{name} was read after the eager step of the batch. A replay does not run "
                f"the step's Python code, so a stored batch is outdated; pass the batch or the "
                f"tensor as an argument to the marked function"
            )
        raise AttributeError(f"the batch has no slot {name!r}. {did_you_mean(name, self._names())}")

    def _names(self) -> list[str]:
        static = [n for n, v in self.__dict__.items() if isinstance(v, torch.Tensor)]
        return [*static, *sorted(self.__dict__.get("_live_names", ()))]

    def __repr__(self) -> str:
        return f"<Batch of {self._size}: {', '.join(self._names())}>"


def end_batch(batch: Batch) -> None:
    """Remove the data of ``batch`` after its eager step."""
    for name in [name for name, held in vars(batch).items() if isinstance(held, torch.Tensor)]:
        delattr(batch, name)
    del batch.host
    batch._over = True


class HostArgs:
    """The declared host arguments; with ``partly``, runs may omit those from ``prepare``."""

    def __init__(self, declared: Mapping[str, Any] | None, *, partly: bool = False) -> None:
        self.declared = declared_names(declared)
        self._partly = partly
        for name in self.declared:
            if not name.isidentifier() or name == "self" or hasattr(HostValues, name):
                raise ConfigError(
                    f"host argument {name!r} must be a Python identifier that is not an attribute "
                    f"of batch.host; choose another name"
                )
        self._slots = {n: v for n, v in self.declared.items() if isinstance(v, HostSlot)}
        self._plain = HostSpec({n: v for n, v in self.declared.items() if n not in self._slots})
        self._kinds = {n: None if n in self._slots else type(v) for n, v in self.declared.items()}

    def at_capture(self, size: Size) -> dict[str, Any]:
        """Return the declared values; a ``HostSlot`` becomes a sequence of pad values."""
        return {
            name: value.padded((), size) if isinstance(value, HostSlot) else value
            for name, value in self.declared.items()
        }

    def resolve(
        self, given: Mapping[str, Any] | None, real: Size, padded: Size
    ) -> Mapping[str, Any]:
        """Check the given host arguments, and pad sequences from ``real`` to ``padded``."""
        # Fast path for every step: values of exactly the declared types need no further check.
        if type(given) is dict:
            kinds = zip(given, map(type, given.values()), strict=True)
            if dict(kinds) == self._kinds:
                return given
        if given is not None and not isinstance(given, Mapping):
            raise HostArgumentError(
                f"host_args of a run must be a mapping of names to values, got {brief(given)}"
            )
        given = given or {}
        require_declared(given, self.declared)
        if not self._partly:
            self._require_all(given)
        if not self._slots:
            return self._plain.checked(given)
        resolved = self._plain.checked({n: v for n, v in given.items() if n not in self._slots})
        for name, slot in self._slots.items():
            if name in given:
                resolved[name] = slot.padded(_checked(name, slot, given[name], real), padded)
        return resolved

    def completed(
        self, host: Mapping[str, Any], planned: Mapping[str, Any] | None, size: Size
    ) -> Mapping[str, Any]:
        """Return ``host`` with the results of ``prepare``; refuse a missing argument."""
        if planned is None and not self.declared:
            return host
        values = {**host, **self.resolve(planned, size, size)}
        self._require_all(values)
        return values

    def _require_all(self, given: Mapping[str, Any]) -> None:
        missing = sorted(self.declared.keys() - given.keys())
        if missing:
            raise HostArgumentError(
                f"missing host arguments: {', '.join(missing)}. Each run needs all declared "
                f"arguments in host_args=: {', '.join(sorted(self.declared))}."
            )


def _checked(name: str, slot: HostSlot, values: Any, real: Size) -> Sequence[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise HostArgumentError(
            f"host argument {name!r} must be a sequence with one entry per row of {slot.dim!r}, "
            f"got {type(values).__name__}"
        )
    if len(values) != real.rows(slot.dim):
        raise InputError(
            f"host argument {name!r} has {counted(len(values), 'entry')}; expected "
            f"{real.rows(slot.dim)} ({slot.dim} of {real}). The first input with a row per "
            f"request and the first with a row per token determine the size of the batch."
        )
    return values
