"""Gates on CUDA: memory operations of streams, batched so that several share one graph node.

A kernel that polls the flag would cost half as much. However, a stream that must then launch a
kernel for the first time waits for all running kernels, because the driver loads code lazily, and
the gate is never opened (seen on two H200s).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_uint, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

from devgraph.api.torchlike.gates import NON_BLOCKING, WRITE, FlagGates, Op
from devgraph.api.torchlike.node_calls import RuntimeCallError, structure

if TYPE_CHECKING:
    from devgraph.api.torchlike.node_graph import NodeBackend

MOST_OPS = 256
"""Maximum number of operations in one batch."""

_WAIT_VALUE, _WRITE_VALUE = 1, 2
"""CU_STREAM_MEM_OP_WAIT_VALUE_32 and CU_STREAM_MEM_OP_WRITE_VALUE_32."""

MemOp = structure(
    "CUstreamBatchMemOpParams",
    operation=c_uint,
    reserved0=c_uint,
    address=c_uint64,
    value=c_uint64,
    flags=c_uint,
    reserved1=c_uint,
    alias=c_uint64,
    reserved2=c_uint64,
)
NodeParams = structure(
    "CUDA_BATCH_MEM_OP_NODE_PARAMS", context=c_void_p, count=c_uint, ops=c_void_p, flags=c_uint
)


class DeviceGates(FlagGates):
    """The gate channel of one capture or runner."""

    handle = "cuda_stream"

    def __init__(self, backend: NodeBackend) -> None:
        self._runtime = backend.driver
        super().__init__(backend)
        self._last: tuple[int, list[int], list[Op]] | None = None
        """Capture, nodes and operations of the batch that was recorded last."""

    def run(self, stream: int, ops: Sequence[Op]) -> None:
        backend = self._backend
        with backend.on_device():
            for start in range(0, len(ops), MOST_OPS):
                batch = _batch(ops[start : start + MOST_OPS])
                self._runtime.call("StreamBatchMemOp", stream, len(batch), addressof(batch), 0)

    def record(self, stream: int, ops: list[Op]) -> None:
        """Add ``ops`` to the previous node if that node is a batch, otherwise to a new node.

        A signal and the wait of the next layer therefore share a node.
        """
        capture = self._runtime.capture_of(stream)
        if capture is not None and self._last is not None:
            number, nodes, earlier = self._last
            if (number, nodes) == (capture[0], capture[2]) and self._extend(nodes, earlier + ops):
                self._last = number, nodes, earlier + ops
                return
        self.run(stream, ops)
        if (now := self._runtime.capture_of(stream)) is not None:
            self._last = now[0], now[2], ops

    def _extend(self, nodes: Sequence[int], ops: Sequence[Op]) -> bool:
        """Replace the operations of the last node; return whether the driver accepts them."""
        if len(nodes) != 1 or len(ops) > MOST_OPS:
            return False
        batch = _batch(ops)
        params = NodeParams(self._runtime.context()[0], len(batch), addressof(batch), 0)
        try:
            self._runtime.call("GraphBatchMemOpNodeSetParams", nodes[0], addressof(params))
        except RuntimeCallError:
            return False
        return True

    def fill(self, stream: int, address: int, value: int, count: int) -> None:
        self._runtime.call("MemsetD32Async", address, value, count, stream)

    def make_stream(self) -> Any:
        return self.external(self._runtime.make("StreamCreate", NON_BLOCKING))

    def free_stream(self, stream: Any) -> None:
        self._runtime.call("StreamDestroy", stream.cuda_stream)


def _batch(ops: Sequence[Op]) -> Any:
    array = (MemOp * len(ops))()
    for item, (kind, address, value) in zip(array, ops, strict=True):
        item.operation = _WRITE_VALUE if kind == WRITE else _WAIT_VALUE
        item.address, item.value, item.flags = address, value, max(kind, 0)
    return array
