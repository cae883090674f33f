"""A torch device namespace without a device: what backends over torch namespaces ask of theirs.

Captured work runs as it is captured and replays do nothing: this is for the life of captures, not
for results. Faults are injected by name.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

from devgraph.api.capabilities import Capabilities
from devgraph.api.torchlike.base import TorchBackend

__all__ = ["FakeBackend", "FakeNamespace"]


class FakeStream:
    """A stream that remembers what it waited for."""

    _ids = itertools.count(1)

    def __init__(self, device: Any = None) -> None:
        self.stream_id = next(self._ids)
        self.waited_for: list[FakeStream] = []
        self.capturing = False

    def wait_stream(self, other: FakeStream) -> None:
        self.waited_for.append(other)


class FakeMemPool:
    """Memory that counts the captures which use it, as torch counts them."""

    def __init__(self) -> None:
        self.id = (0, id(self))
        self.uses = 1

    def use_count(self) -> int:
        return self.uses


class FakeNamespace:
    """One device, a current stream, and graphs that can be told to fail.

    Attributes:
        failing_begins: so many of the next captures cannot begin.
        failing_ends: so many of the next ends are refused; the stream then stays in capture mode
            and the memory in use, until an end succeeds.
        reopens: whether a refused end can be undone.
        failing_snapshots: so many of the next snapshots of a pool fail.
        drops_references: whether snapshots drop a reference to each value that they are given, as
            those of torch do (pytorch/pytorch#196366).
    """

    def __init__(self) -> None:
        self.failing_begins = 0
        self.failing_ends = 0
        self.failing_snapshots = 0
        self.drops_references = True
        self.reopens = True
        self.refusal = "the driver refused to end"
        self.default = FakeStream()
        self.current = self.default
        self.pools: dict[Any, FakeMemPool] = {}
        self.made: list[Any] = []
        namespace = self

        class Graph:
            def __init__(self) -> None:
                self.ended = 0
                self.was_reset = False
                self.memory: FakeMemPool | None = None
                namespace.made.append(self)

            def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
                if namespace.failing_begins:
                    namespace.failing_begins -= 1
                    raise RuntimeError("the driver refused to begin")
                if namespace.current.capturing:
                    raise RuntimeError("the stream is capturing already")
                self.memory = namespace.pools[pool]
                self.memory.uses += 1
                namespace.current.capturing = True

            def capture_end(self) -> None:
                self.ended += 1
                if namespace.failing_ends:
                    namespace.failing_ends -= 1
                    raise RuntimeError(namespace.refusal)
                namespace.current.capturing = False
                assert self.memory is not None
                self.memory.uses -= 1

            def replay(self) -> None:
                if namespace.current.capturing:
                    raise RuntimeError("a replay while the stream captures")

            def reset(self) -> None:
                self.was_reset = True

        self.Graph = Graph

    Stream = FakeStream

    def MemPool(self) -> FakeMemPool:
        pool = FakeMemPool()
        self.pools[pool.id] = pool
        return pool

    def memory_snapshot(
        self, mempool_id: tuple[int, int], include_traces: bool = True
    ) -> list[dict[str, Any]]:
        given = (*mempool_id, include_traces)
        if self.drops_references:
            for value in given:
                ctypes.pythonapi.Py_DecRef(ctypes.py_object(value))
        if self.failing_snapshots:
            self.failing_snapshots -= 1
            raise RuntimeError(f"no snapshot of {given}")
        return [{"address": 0, "total_size": 0, "stream": 0, "is_expandable": False}]

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def synchronize(self, device: Any = None) -> None:
        pass

    def current_stream(self, device: Any = None) -> FakeStream:
        return self.current

    def default_stream(self, device: Any = None) -> FakeStream:
        return self.default

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def is_current_stream_capturing(self) -> bool:
        return self.current.capturing

    def get_rng_state(self, device: Any = None) -> Any:
        import torch

        return torch.get_rng_state()

    def set_rng_state(self, state: Any, device: Any = None) -> None:
        import torch

        torch.set_rng_state(state)


class FakeBackend(TorchBackend):
    """``TorchBackend`` over a ``FakeNamespace``; its tensors are those of the CPU."""

    name = "fake"
    device_type = "cpu"
    graph_class_name = "Graph"
    capabilities = Capabilities()

    def check_available(self) -> None:
        self.namespace = FakeNamespace()
        super().check_available()

    def reopen_capture(self) -> None:
        if not self.namespace.reopens:
            raise RuntimeError("cannot reopen")
        self.namespace.current.capturing = True
