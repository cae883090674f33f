"""Checks for random numbers and unjoined streams in captures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from devgraph.api.errors import CaptureError, DeviceGraphError
from devgraph.api.marks.marks import is_capturing
from devgraph.api.marks.source import user_line
from devgraph.api.modes import OwnMode
from devgraph.api.torchlike.node_calls import Capture, NodeRuntime

MOST_STREAMS = 64
"""Number of stream requests after which every stream was returned; torch has 32 per priority."""


def draws(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of ``func`` draws random numbers. Dropout with p=0 does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            probability = args[index] if index < len(args) else kwargs.get("dropout_p")
            return bool(argument.default_value if probability is None else probability)
    return True


class RandomGuard(OwnMode):
    """A mode that refuses to draw random numbers in a capture, because replays would repeat them.

    Warm-up runs and the eager bodies of breaks may draw random numbers.
    """

    def __init__(self, why: str, error: type[DeviceGraphError] = CaptureError) -> None:
        super().__init__()
        self._why = why
        self._error = error

    def take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_capturing() and draws(func, args, kwargs):
            raise self._error(
                f"{func} draws random numbers inside a capture, at {user_line()}, and {self._why}"
            )
        return func(*args, **kwargs)


class SideStreams:
    """A search for the streams that a capture forked and did not join."""

    def __init__(
        self, runtime: NodeRuntime, make: Callable[..., Any], handle_of: Callable[[Any], int]
    ) -> None:
        self._runtime = runtime
        self._make = make
        self._handle_of = handle_of

    def unjoined(self, stream: int, capture: Capture) -> list[int]:
        """Return the streams that forked from ``capture``, on ``stream``, and have unjoined work.

        If there are none, return all forked streams. Call this before the end of the capture,
        because afterwards the driver does not know the streams.
        """
        capture_id, graph, joined = capture
        forked = {}
        for other in self._runtime.capturing(self._handles):
            other_capture = self._runtime.capture_of(other) if other != stream else None
            if other_capture is not None and other_capture[0] == capture_id:
                forked[other] = other_capture[2]
        if not forked:
            return []
        sources, _, _ = self._runtime.edges(graph)
        ends = set(self._runtime.nodes(graph)).difference(sources, joined)
        loose = [other for other, last in forked.items() if ends.intersection(last)]
        return loose or list(forked)

    @functools.cached_property
    def _handles(self) -> tuple[int, ...]:
        handles: dict[int, None] = {}
        for priority in (0, -1):
            for _ in range(MOST_STREAMS):
                handle = self._handle_of(self._make(priority=priority))
                if handle in handles:
                    break
                handles[handle] = None
        return tuple(handles)


def name_streams(streams: Sequence[int]) -> str:
    """Return the error message that names streams that were not joined."""
    names = ", ".join(f"{stream:#x}" for stream in streams)
    noun, pronoun = ("streams", "them") if len(streams) > 1 else ("stream", "it")
    return (
        f"side {noun} {names} forked inside the capture and did not join. Make the capturing "
        f"stream wait for {pronoun} (current_stream.wait_stream(side)) before the capture ends or "
        f"breaks."
    )
