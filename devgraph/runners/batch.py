"""The batch that a step function receives: its tensors and its host arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    did_you_mean,
)
from devgraph.api.marks.host_values import HostSpec, declared_names
from devgraph.api.marks.marks import is_capturing
from devgraph.api.marks.source import user_line
from devgraph.runners.slots import HostSlot, Size


class HostValues(Mapping[str, Any]):
    """Host arguments by attribute or key; tracked values while a capture records."""

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
                f"batch.host.{name} cannot be set: a replay runs no Python of the step, so it "
                f"would keep this value for ever. Keep what a step changes (lengths) in a device "
                f"tensor, and pass a host argument that holds for every step of a launch"
            )
        super().__setattr__(name, value)

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Live:
    """The part of a batch that changes from run to run although graphs stay the same.

    One object is shared by every batch that a runner's graphs were captured with; the runner
    stores the size and the tensors of a run here just before it replays.
    """

    __slots__ = ("size", "tensors")

    def __init__(self) -> None:
        self.size = Size(0, 0)
        self.tensors: Mapping[str, torch.Tensor] = {}


class Batch:
    """One step's data: ``batch.<slot>`` tensors, ``batch.host``, and the sizes.

    In a graph the tensors are static views of the bucket's size; run eagerly they have the real
    size. Where a graph's body depends on tokens only (breakable prefill), slots that count
    requests belong to the run and not to the graph: read them in a region, in a ``no_graph``
    function or in the tail, through the batch itself.

    Attributes:
        host: the host arguments.
        tokens: rows of the ``"tokens"`` slots, padding included.
        width: tokens per request, or None.
        variant: the variant that this step belongs to.

    A batch that ran eagerly is over with its step: whoever kept it (``self.batch = batch``) and
    reads it in a later step gets a StateError.
    """

    host: HostValues

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        size: Size,
        *,
        host: Mapping[str, Any],
        variant: Mapping[str, Any],
        live: Live | None = None,
        live_names: frozenset[str] = frozenset(),
    ) -> None:
        for name, tensor in tensors.items():  # one by one, as tracers of code understand it
            setattr(self, name, tensor)
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
        """Requests of this batch, padding included; of the current run where they are its own."""
        if self._live_names:
            return self._of_run("requests").size.requests
        return self._size.requests

    @property
    def real(self) -> Size:
        """Sizes without padding. They change from run to run, so a graph cannot read them."""
        return self._size if self._live is None else self._of_run("real").size

    def _of_run(self, name: str) -> Live:
        if is_capturing():
            raise CaptureError(
                f"batch.{name} changes from run to run and was read inside a graph, at "
                f"{user_line()}. Hand the batch to a function marked @dg.region() or "
                f"@dg.no_graph and read it there, or move the line into the runner's tail."
            )
        assert self._live is not None
        return self._live

    def __getattr__(self, name: str) -> torch.Tensor:
        # Reached for names that are no static tensor: slots of the run, or mistakes.
        known = self.__dict__.get("_live_names", frozenset())
        if name in known:
            return self._of_run(name).tensors[name]
        if self.__dict__.get("_over") and not name.startswith("_"):
            raise StateError(
                f"batch.{name} was read in a batch whose step ran eagerly and is over. A replay "
                f"runs no Python of the step, so it stores no newer batch: hand the batch, or the "
                f"tensor, to the marked function as an argument"
            )
        raise AttributeError(f"the batch has no slot {name!r}. {did_you_mean(name, self._names())}")

    def _names(self) -> list[str]:
        static = [n for n, v in self.__dict__.items() if isinstance(v, torch.Tensor)]
        return [*static, *sorted(self.__dict__.get("_live_names", ()))]

    def __repr__(self) -> str:
        return f"<Batch of {self._size}: {', '.join(self._names())}>"


def end_batch(batch: Batch) -> None:
    """Make ``batch`` forget the data of its step, which ran eagerly and is over."""
    for name in [name for name, held in vars(batch).items() if isinstance(held, torch.Tensor)]:
        delattr(batch, name)
    del batch.host
    batch._over = True


class HostArgs:
    """The declared host arguments.

    Args:
        declared: name to the value used at capture, or to a ``HostSlot`` for a sequence with one
            entry per request or token.
        partly: runs may leave names out, for the engine to plan.
    """

    def __init__(self, declared: Mapping[str, Any] | None, *, partly: bool = False) -> None:
        self.declared = declared_names(declared)
        self._partly = partly
        for name in self.declared:
            if not name.isidentifier() or name == "self" or hasattr(HostValues, name):
                raise ConfigError(
                    f"host argument {name!r} must be a Python identifier for which batch.host has "
                    f"no use of its own; choose another name"
                )
        self._slots = {n: v for n, v in self.declared.items() if isinstance(v, HostSlot)}
        self._plain = HostSpec({n: v for n, v in self.declared.items() if n not in self._slots})
        self._kinds = {n: None if n in self._slots else type(v) for n, v in self.declared.items()}

    def at_capture(self, size: Size) -> dict[str, Any]:
        """Return the values that a graph of ``size`` is captured with."""
        return {
            name: value.padded((), size) if isinstance(value, HostSlot) else value
            for name, value in self.declared.items()
        }

    def resolve(
        self, given: Mapping[str, Any] | None, real: Size, padded: Size
    ) -> Mapping[str, Any]:
        """Return a value for every declared argument, sequences continued to ``padded``; where
        runs may leave names out, for those that are given.

        Args:
            given: values by name.
            real: the size that sequences have.

        Raises:
            HostArgumentError: a name is missing or unknown, or a value of another type than
                declared (a TypeError).
            InputError: a sequence has not one entry per row of ``real``.
        """
        # This runs in every step: values of exactly the declared types need no closer look.
        if type(given) is dict:
            kinds = zip(given, map(type, given.values()), strict=True)
            if dict(kinds) == self._kinds:
                return given
        if given is not None and not isinstance(given, Mapping):
            raise HostArgumentError(
                f"host_args of a run must be a mapping of names, got {brief(given)}"
            )
        given = given or {}
        if not self._partly:
            self._require_all(given)
        for name in given:
            if name not in self.declared:
                raise HostArgumentError(
                    f"unknown host argument {name!r}. {did_you_mean(str(name), self.declared)}"
                )
        if not self._slots:
            return self._plain.checked(given)
        resolved = self._plain.checked({n: v for n, v in given.items() if n not in self._slots})
        for name, slot in self._slots.items():
            if name in given:
                resolved[name] = slot.padded(_checked(name, slot, given[name], real), padded)
        return resolved

    def completed(
        self, host: Mapping[str, Any], found: Mapping[str, Any] | None, size: Size
    ) -> Mapping[str, Any]:
        """Return ``host`` with what the engine planned for a batch of ``size``; raises as
        ``resolve``, also for a name that neither has."""
        values = {**host, **self.resolve(found, size, size)}
        self._require_all(values)
        return values

    def _require_all(self, given: Mapping[str, Any]) -> None:
        """Raise HostArgumentError for a declared argument without a value."""
        missing = sorted(self.declared.keys() - given.keys())
        if missing:
            raise HostArgumentError(
                f"missing host arguments: {', '.join(missing)}. Each run needs all that the "
                f"runner declares: {', '.join(sorted(self.declared))}."
            )


def _checked(name: str, slot: HostSlot, values: Any, real: Size) -> Sequence[Any]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise HostArgumentError(
            f"host argument {name!r} must be a sequence with one entry per row of {slot.dim!r}, "
            f"got {type(values).__name__}"
        )
    if len(values) != real.rows(slot.dim):
        raise InputError(
            f"host argument {name!r} has {len(values)} entries; expected {real.rows(slot.dim)} "
            f"({slot.dim} of {real.requests} requests, {real.tokens} tokens)"
        )
    return values
