"""The scope of marks inside one graph, for ``capture_context`` and policy ``full``."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from devgraph.api.errors import CaptureError, FrozenValueError, brief
from devgraph.api.marks.host_values import HostSpec, is_tracked, taken_from
from devgraph.api.marks.marks import (
    Args,
    Kwargs,
    Mark,
    RegionScope,
    Scope,
    current_scope,
    entered,
    refuse_no_graph,
    refused,
)
from devgraph.api.marks.source import user_line
from devgraph.api.tensors import tensors_in

if TYPE_CHECKING:
    from devgraph.api.graph import DeviceGraph


def split_host_args(
    mark: Mark,
    args: Args,
    kwargs: Kwargs,
    spec: HostSpec,
    known: dict[Mark, dict[str, Any]],
    *,
    accept_equal: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """Check the host arguments of a marked call, and split them from ``args`` and ``kwargs``.

    The third result contains the host keyword arguments. ``known`` keeps them for later calls of
    the mark. With ``accept_equal``, a plain value is accepted if it equals the declared value.
    """
    _refuse_transformed(mark, args, kwargs)
    args, kwargs, host = mark.split(args, kwargs)
    plain = {}
    for name, value in host.items():
        tracked = is_tracked(value)
        plain[name] = value._devgraph_value if tracked else value
        if tracked and (own := value._devgraph_name) != name:
            raise refused(
                FrozenValueError(
                    f"{mark.name} takes host argument {name!r} and was given the tracked value of "
                    f"{own!r}, at {user_line()}. {taken_from(own, name)}"
                )
            )
        declared = name in spec.declared
        if not (tracked or (declared and accept_equal and value == spec.declared[name])):
            cure = "" if declared else f"declare it (host_args={{{name!r}: {brief(value)}}}) and "
            raise refused(
                FrozenValueError(
                    f"region {mark.name} was given a plain {type(value).__name__} "
                    f"({brief(value)}) for host argument {name!r}, at {user_line()}, so every "
                    f"replay would use this value. To use other values in replays, {cure}pass the "
                    f"tracked host argument itself, or compute the value with derive={{...}} on "
                    f"the mark."
                )
            )
    if mark not in known:
        known[mark] = mark.host_kwargs(plain)
    return args, kwargs, known[mark]


def swallowed(mark: Mark, error: BaseException) -> CaptureError:
    """Return the error for a step that catches ``error``, which a marked function raised."""
    return CaptureError(
        f"{mark.name} raised {type(error).__name__} ({error}), and the step caught it and "
        f"continued; a graph cannot do that. Decide before the call which function runs, or catch "
        f"the error inside the marked function."
    )


def refuse_break_in_backward(name: str) -> None:
    """Raise CaptureError inside a backward pass, where a graph cannot end."""
    if torch._C._current_graph_task_id() != -1:
        raise CaptureError(
            f"{name} was called in a backward pass (by a hook, or by a checkpointed block that is "
            f"computed again), at {user_line()}, but a graph cannot end inside a backward pass. "
            f"Call {name} outside the backward pass, do not checkpoint the block that calls "
            f"{name}, or mark the function that runs the whole backward pass @dg.no_graph."
        )


def _refuse_transformed(mark: Mark, args: Args, kwargs: Kwargs) -> None:
    """Raise CaptureError for tensors of a torch.func transform, which a replay cannot use."""
    if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors_in((args, kwargs)))):
        raise CaptureError(
            f"{mark.name} was called inside a transform of torch.func (vmap, grad, ...), at "
            f"{user_line()}, so a replay cannot run it again. Call {mark.name} outside of the "
            f"transform, or apply the transform inside the marked function."
        )


Repeat = Callable[[Callable[[], None], torch.Tensor], None]
"""A function that records a loop, given its body and a bool tensor of one element.

The function calls the body once. A replay repeats the work of the body while the tensor is true.
State that iterations share must be in tensors that were allocated before the loop.
"""


class LoopError(CaptureError):
    """The step cannot be captured with a loop, but may be captured with the loop unrolled."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def repeater(unroll_reason: str = "") -> Repeat | None:
    """Return the loop recorder of this thread's capture, or None if the caller must unroll.

    ``unroll_reason`` is the caller's reason to unroll, if any. Captures count unrolled loops by
    reason.
    """
    scope = current_scope()
    return scope.repeater(unroll_reason) if isinstance(scope, GraphScope) else None


class GraphScope(Scope):
    """The scope that captures all work into one graph, with its dynamic regions updatable."""

    def __init__(
        self,
        graph: DeviceGraph,
        *,
        accept_equal: bool = False,
        host: Mapping[Mark, dict[str, Any]] | None = None,
        unroll_reason: str = "here",
    ) -> None:
        self._graph = graph
        self._accept_equal = accept_equal
        self._host_of: dict[Mark, dict[str, Any]] = dict(host or {})
        self._unroll_reason = unroll_reason
        self._repeating = False
        self.loops: Counter[str] = Counter()
        """Numbers of loops and of their nodes, for ``Captured.stats``."""

    def repeater(self, unroll_reason: str) -> Repeat | None:
        if reason := self._unroll_reason or unroll_reason:
            self.loops[f"loops_unrolled_{reason}"] += 1
            return None
        return self._repeat

    def _repeat(self, body: Callable[[], None], going: torch.Tensor) -> None:
        self._repeating = True
        try:
            nodes = self._graph.capture_loop(body, going)
        except LoopError:
            raise
        except Exception as error:
            raise LoopError("failed", f"a loop could not be captured: {error}") from error
        finally:
            self._repeating = False
        self.loops.update(loops=1, loop_nodes=nodes)

    def records_gates(self, call: str) -> bool:
        self._refuse_in_loop("gates", call)
        return True

    def _refuse_in_loop(self, reason: str, call: str) -> None:
        if self._repeating:
            self._graph.spoiled = LoopError(reason, f"{call} was called in a loop")
            raise self._graph.spoiled

    def call(self, mark: Mark, args: Args, kwargs: Kwargs) -> Any:
        if mark.kind == "no_graph":
            refuse_no_graph(mark)
        names = self._graph.names
        name = contextlib.nullcontext() if names is None else names.named(mark.name)
        with entered(RegionScope(mark, self)), name:
            if not mark.dynamic:
                return mark.fn(*args, **kwargs)
            self._refuse_in_loop("region", f"updatable region {mark.name}")
            args, kwargs, host = split_host_args(
                mark, args, kwargs, self._graph.spec, self._host_of, accept_equal=self._accept_equal
            )
            try:
                return self._graph.capture_region(mark, args, kwargs, host)
            except Exception as error:
                if self._graph.spoiled is None:
                    self._graph.spoiled = swallowed(mark, error)
                raise
