"""Host arguments of a runner: declared once, checked and padded per run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from devgraph.api.errors import ConfigError, HostArgumentError, InputError, did_you_mean
from devgraph.api.marks.host_values import HostSpec, declared_names
from devgraph.runners.slots import HostSlot, Size

__all__ = ["HostArgs"]


class HostArgs:
    """The declared host arguments.

    Args:
        declared: name to the value used at capture, or to a ``HostSlot`` for a sequence with one
            entry per request or token.
    """

    def __init__(self, declared: Mapping[str, Any] | None) -> None:
        self.declared = declared_names(declared)
        for name in self.declared:
            if not name.isidentifier():
                raise ConfigError(f"host argument {name!r} must be a Python identifier")
        self._slots = {n: v for n, v in self.declared.items() if isinstance(v, HostSlot)}
        self._plain = HostSpec({n: v for n, v in self.declared.items() if n not in self._slots})

    def __bool__(self) -> bool:
        """Whether any host argument is declared."""
        return bool(self.declared)

    def at_capture(self, size: Size) -> dict[str, Any]:
        """Return the values that a graph of ``size`` is captured with."""
        return {
            name: value.padded((), size) if isinstance(value, HostSlot) else value
            for name, value in self.declared.items()
        }

    def resolve(self, given: Mapping[str, Any] | None, real: Size, padded: Size) -> dict[str, Any]:
        """Return a value for every declared argument, sequences continued to ``padded``.

        Raises:
            HostArgumentError: a name is missing or unknown, or a value of another type than
                declared (a TypeError).
            InputError: a sequence has not one entry per row of ``real``.
        """
        if given is not None and not isinstance(given, Mapping):
            raise HostArgumentError(f"host_args of a run must be a mapping of names, got {given!r}")
        given = given or {}
        if not self.declared and not given:
            return {}
        missing = sorted(self.declared.keys() - given.keys())
        if missing:
            raise HostArgumentError(
                f"missing host arguments: {', '.join(missing)}. Each run needs all that the "
                f"runner declares: {', '.join(sorted(self.declared))}."
            )
        for name in given:
            if name not in self.declared:
                raise HostArgumentError(
                    f"unknown host argument {name!r}. {did_you_mean(str(name), self.declared)}"
                )
        if not self._slots:
            return self._plain.checked(given)
        resolved = self._plain.checked({n: v for n, v in given.items() if n not in self._slots})
        for name, slot in self._slots.items():
            resolved[name] = slot.padded(_checked(name, slot, given[name], real), padded)
        return resolved


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
