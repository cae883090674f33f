"""Gates on HIP: writes of values and waits for values, if the runtime can capture both."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from devgraph.api.errors import DeviceGraphError
from devgraph.api.torchlike.gates import EQUAL, NON_BLOCKING, WRITE, FlagGates, Op
from devgraph.rocm.runtime import GATE_CALLS

if TYPE_CHECKING:
    from devgraph.api.torchlike.node_calls import NodeRuntime
    from devgraph.api.torchlike.node_graph import NodeBackend

_ALL_BITS = 0xFFFFFFFF


class ValueGates(FlagGates):
    """The gate channel of one capture or runner."""

    handle = "cuda_stream"

    def __init__(self, backend: NodeBackend) -> None:
        self._runtime = backend.driver
        super().__init__(backend)

    def run(self, stream: int, ops: Sequence[Op]) -> None:
        with self._backend.on_device():
            queue(self._runtime, stream, ops)

    def fill(self, stream: int, address: int, value: int, count: int) -> None:
        self._runtime.call("MemsetD32Async", address, value, count, stream)

    def make_stream(self) -> Any:
        return self.external(self._runtime.make("StreamCreateWithFlags", NON_BLOCKING))

    def free_stream(self, stream: Any) -> None:
        self._runtime.call("StreamDestroy", stream.cuda_stream)


def queue(runtime: NodeRuntime, stream: int, ops: Sequence[Op]) -> None:
    for kind, address, value in ops:
        if kind == WRITE:
            runtime.call("StreamWriteValue32", stream, address, value, 0)
        else:
            runtime.call("StreamWaitValue32", stream, address, value, kind, _ALL_BITS)


def captures_values(runtime: NodeRuntime, device: torch.device) -> bool:
    """Whether the runtime captures waits and writes as nodes, tested with one wait and one write.

    The test waits for the current value of a word, so an uncaptured wait cannot hang. If the
    capture fails, the stream is not destroyed, because it may still be capturing.
    """
    if runtime.missing & GATE_CALLS:
        return False
    words = torch.tensor([1, 0], dtype=torch.int32, device=device)
    first, second = words.data_ptr(), words.data_ptr() + words.element_size()
    with contextlib.suppress(DeviceGraphError):
        stream = runtime.make("StreamCreateWithFlags", NON_BLOCKING)
        runtime.begin_capture(stream)
        try:
            queue(runtime, stream, [Op(EQUAL, first, 1), Op(WRITE, second, 1)])
        finally:
            graph = runtime.end_capture(stream)
        try:
            if runtime.count(graph) != 2 or words.tolist() != [1, 0]:
                return False
            executable = runtime.instantiate(graph)
            runtime.bound(executable, stream)()
            runtime.call("StreamSynchronize", stream)
            runtime.destroy_executable(executable)
        finally:
            runtime.destroy(graph)
            runtime.call("StreamDestroy", stream)
        return bool(words.tolist() == [1, 1])
    return False
