"""The gate marks in a step: ``wait`` for the host and ``signal`` to the host.

The marks use the gates of the capture or runner whose step is running. Elsewhere they do nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from devgraph.api.errors import CaptureError, InputTypeError, brief
from devgraph.api.marks.marks import current_scope, is_here, no_graph
from devgraph.api.marks.source import user_line

current_gates: ContextVar[Any] = ContextVar("devgraph_gates", default=None)
"""The ``Gates`` of the capture or runner whose step is running."""
_refuses: ContextVar[bool] = ContextVar("devgraph_refuses_gates", default=False)
current_turn: ContextVar[int] = ContextVar("devgraph_turn", default=0)


@contextlib.contextmanager
def _set(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def entered_gates(gates: Any) -> AbstractContextManager[None]:
    """Return a context in which marks use ``gates``."""
    return _set(current_gates, gates)


def in_tail() -> AbstractContextManager[None]:
    """Return a context that refuses gate marks: only some policies have the tail in the graph."""
    return _set(_refuses, True)


def turns(count: int) -> Iterator[int]:
    """Yield the number of each iteration of a loop. Gates have one epoch per iteration."""
    for turn in range(count):
        with _set(current_turn, turn):
            yield turn


def recording_gates() -> AbstractContextManager[None]:
    """Return a context in which the current gates, if any, record their marks."""
    gates = current_gates.get()
    recording: AbstractContextManager[None] = (
        contextlib.nullcontext() if gates is None else gates.recording()
    )
    return recording


def open_recorded() -> None:
    """Let the capture replay its finished segments without waiting at their gates."""
    if (gates := current_gates.get()) is not None:
        gates.open_recorded()


def wait(name: str, *, timeout: float | None = None) -> None:
    """Make the device wait here until the host opens the gate ``name`` for this replay.

    Gates are open in warm-up runs, captures and proofs. In eager code without a runner the mark
    does nothing.

    Args:
        name: unique among the waits of a capture, for example ``f"kv.{layer}"``.
        timeout: seconds after which a closed gate invalidates the replay; by default
            ``gate_timeout`` of the capture or runner.

    Raises:
        CaptureError: a gate is not possible here, or the name occurs twice.
        GateTimeoutError: on the CPU reference, the gate was not opened in time. Other devices
            report this error later.
    """
    _reach("wait", name, timeout)


def signal(name: str) -> None:
    """Signal to the host when the device has finished the work before this call.

    ``gates[name].wait()`` waits for the signal. See ``wait`` for the rules.
    """
    _reach("signal", name, None)


def _reach(kind: str, name: str, timeout: float | None) -> None:
    gates, scope = current_gates.get(), current_scope()
    call, recording = f"dg.{kind}({name!r})", False
    if scope is not None and is_here(scope, call):
        recording = scope.records_gates(call)
        if recording and gates is None:
            raise CaptureError(
                f"{call} was called at {user_line()} in a capture that has no gates. Capture the "
                f"step with dg.capture or a runner, which have gates."
            )
    if _refuses.get():
        raise CaptureError(
            f"{call} was called at {user_line()} in the tail of a prefill runner, which is part "
            f"of the graph only under some policies. Move the mark to the end of the body."
        )
    if gates is None:
        return
    if not isinstance(name, str):
        raise InputTypeError(f"the name of a gate must be a string, got {brief(name)}")
    if recording and gates.breaks:
        _gate(kind, name, timeout)
    else:
        gates.reach(kind, name, timeout, recording=recording)


def _gate(kind: str, name: str, timeout: float | None) -> Any:
    """Run a gate mark in a break, on a backend without gates inside graphs."""
    if (gates := current_gates.get()) is not None:
        gates.reach(kind, name, timeout, recording=False)


_gate.__qualname__ = "dg.wait or dg.signal (a break without the capability gates)"
_gate = no_graph(_gate)
