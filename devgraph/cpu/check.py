"""Checking a step: everything that a device capture would refuse or freeze, with source lines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from devgraph.api.buffers import tensors_in
from devgraph.api.errors import FrozenValueError
from devgraph.api.marks.host_values import HostSpec
from devgraph.api.marks.marks import Mark, Scope, entered
from devgraph.api.marks.scopes import captured_call
from devgraph.api.marks.source import raising_line, user_line
from devgraph.cpu.memory import BlockPool
from devgraph.cpu.recorder import Knowledge, Recorder
from devgraph.cpu.violations import Violation

logger = logging.getLogger(__name__)


def check(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    *,
    kwargs: Mapping[str, Any] | None = None,
    host_args: Mapping[str, Any] | None = None,
    knowledge: Knowledge | None = None,
) -> list[Violation]:
    """Run ``fn(*args, **kwargs)`` without executing an operation and return what is wrong with it:
    the violations in the order in which the code runs into them, each line and kind once.

    The run goes on after a violation with an assumed value (a host read gives 1, every element of
    a mask counts), so that one run finds as much as possible; where no value can be assumed, it
    ends there. What a ``no_graph`` function does is not reported, since it is never captured.

    Args:
        host_args: declared host arguments; ``fn`` receives them as tracked values.
        knowledge: what earlier recordings learned of torch's operations.
    """
    found: dict[tuple[object, ...], Violation] = {}

    def note(violation: Violation) -> None:
        if not scope.muted:
            place = (violation.kind, violation.op, violation.file, violation.line)
            found.setdefault(place, violation)

    spec = HostSpec(host_args, fn)
    scope = _Scope(spec)
    recorder = Recorder(BlockPool(), knowledge=knowledge, on_violation=note)
    try:
        with recorder, entered(scope):
            outputs = fn(*args, **(kwargs or {}), **spec.tracked())
    except FrozenValueError as error:
        line = raising_line(error) or user_line()
        note(Violation.at(line, kind="host_value", op="host argument", text=str(error)))
    except Exception:
        # Reported before it was raised, or a consequence of an assumed value.
        if not found:
            raise
        logger.info("the check ended early", exc_info=True)
    else:
        for violation in recorder.escaping(tensors_in(outputs)):
            note(violation)
    return list(found.values())


class _Scope(Scope):
    """What marks mean during a check: regions are part of the step, ``no_graph`` is let be."""

    def __init__(self, spec: HostSpec) -> None:
        self._spec = spec
        self._host: dict[Mark, dict[str, Any]] = {}
        self.muted = False

    def call(self, mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        host: dict[str, Any] = {}
        if mark.dynamic:  # Others may lie anywhere in one graph.
            args, kwargs, host = captured_call(mark, args, kwargs, self._spec, self._host)
        outer, self.muted = self.muted, self.muted or mark.kind == "no_graph"
        try:
            return mark.fn(*args, **kwargs, **host)
        finally:
            self.muted = outer
