"""What a capture must not hold: random numbers that replays do not draw, streams left unjoined."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from devgraph.api.errors import CaptureError, DeviceGraphError
from devgraph.api.marks.marks import is_capturing
from devgraph.api.marks.source import user_line
from devgraph.api.torchlike.node_calls import Capture, NodeRuntime

MOST_STREAMS = 64
"""torch hands out 32 streams per priority in turn; this many requests see each of them."""


def draws(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether this call of an operation draws random numbers; a dropout of 0 does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[index] if index < len(args) else kwargs.get("dropout_p")
            return bool(argument.default_value if given is None else given)
    return True


class RandomGuard(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that draw random numbers while this thread captures.

    A graph would draw the numbers of capture for ever. Warm-up runs and the eager bodies of breaks
    draw as ever. ``why``, the reason and what to do instead, ends the message of ``error``.
    """

    def __init__(self, why: str, error: type[DeviceGraphError] = CaptureError) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._why = why
        self._error = error

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if is_capturing() and draws(func, args, kwargs or {}):
            raise self._error(
                f"{func} draws random numbers inside a capture, at {user_line()}, and {self._why}"
            )
        return func(*args, **(kwargs or {}))


class SideStreams:
    """The streams of one device, which ``make`` hands out in turn for each priority, searched for
    forks of a capture."""

    def __init__(
        self, runtime: NodeRuntime, make: Callable[..., Any], handle_of: Callable[[Any], int]
    ) -> None:
        self._runtime = runtime
        self._make = make
        self._handle_of = handle_of
        self._handles: tuple[int, ...] = ()

    def unjoined(self, stream: int, capture: Capture) -> list[int]:
        """Return the streams that forked from ``capture``, the one on ``stream``, and hold work of
        it that ``stream`` does not wait for.

        A fork without work counts only if no other is found: the driver tells them apart, and
        this is asked before it does, because it knows no stream of a capture that it has ended.
        """
        capture_id, graph, joined = capture
        forked = {}
        for other in self._runtime.capturing(self._known()):
            found = self._runtime.capture_of(other) if other != stream else None
            if found is not None and found[0] == capture_id:
                forked[other] = found[2]
        if not forked:
            return []
        sources, _, _ = self._runtime.edges(graph)
        ends = set(self._runtime.nodes(graph)).difference(sources, joined)
        loose = [other for other, last in forked.items() if ends.intersection(last)]
        return loose or list(forked)

    def _known(self) -> tuple[int, ...]:
        if not self._handles:
            found: dict[int, None] = {}
            for priority in (0, -1):
                for _ in range(MOST_STREAMS):
                    handle = self._handle_of(self._make(priority=priority))
                    if handle in found:
                        break
                    found[handle] = None
            self._handles = tuple(found)
        return self._handles


def name_streams(streams: Sequence[int]) -> str:
    """Return the message for streams that were not joined."""
    names = ", ".join(f"{stream:#x}" for stream in streams)
    which = "streams" if len(streams) > 1 else "stream"
    return (
        f"side {which} {names} forked inside the capture and did not join. Make the capturing "
        f"stream wait for it (current_stream.wait_stream(side)) before the capture ends or breaks."
    )
