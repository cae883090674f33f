"""Gates on CUDA: memory operations on streams, and a kernel in graphs.

A graph with 36 nodes of memory operations takes 120 us longer to launch than one with 36 kernels,
and each wait takes twice as long on the device (one H100).
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_uint, c_uint64
from typing import Any

from devgraph.api.torchlike.gates import NON_BLOCKING, WRITE, FlagGates, Op
from devgraph.api.torchlike.node_calls import Capture, RuntimeCallError, structure
from devgraph.cuda.runtime import KernelParams, Runtime, arguments_of

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
KERNEL = b""".version 6.4
.target sm_70
.address_size 64
.visible .entry gate(.param .u64 signal, .param .u64 flag)
{
    .reg .pred %p;
    .reg .b32 %value;
    .reg .b64 %address;
    ld.param.u64 %address, [signal];
    setp.eq.u64 %p, %address, 0;
    @%p bra wait;
    mov.u32 %value, 1;
    st.release.sys.u32 [%address], %value;
wait:
    ld.param.u64 %address, [flag];
    setp.eq.u64 %p, %address, 0;
    @%p bra done;
again:
    ld.acquire.sys.u32 %value, [%address];
    setp.ne.u32 %p, %value, 1;
    @%p bra again;
done:
    ret;
}
"""
"""A kernel of one thread: set the word ``signal`` to 1, and wait until the word ``flag`` is 1.

It skips an address of 0."""


class DeviceGates(FlagGates):
    """The gate channel of one capture or runner."""

    handle = "cuda_stream"

    def __init__(self, backend: Any) -> None:
        self._runtime: Runtime = backend.driver
        super().__init__(backend)
        self._kernel = self._runtime.kernel(KERNEL, b"gate")
        self._last: tuple[int, list[int], int] | None = None
        """Capture, nodes and address of the last recorded signal."""

    def run(self, stream: int, ops: Sequence[Op]) -> None:
        backend = self._backend
        with backend.on_device():
            for start in range(0, len(ops), MOST_OPS):
                batch = _batch(ops[start : start + MOST_OPS])
                self._runtime.call("StreamBatchMemOp", stream, len(batch), addressof(batch), 0)

    def record(self, stream: int, ops: list[Op]) -> None:
        """Record a kernel that signals or waits; a wait shares the kernel of a signal before it."""
        ((kind, address, _),) = ops
        capture, last = self._runtime.capture_of(stream), self._last
        self._last = None
        if kind == WRITE:
            self._runtime.launch(self._kernel, stream, address, 0)
            if (now := self._runtime.capture_of(stream)) is not None:
                self._last = now[0], now[2], address
        elif capture is None or last is None or not self._extend(last, capture, address):
            self._runtime.launch(self._kernel, stream, 0, address)

    def _extend(self, signal: tuple[int, list[int], int], capture: Capture, flag: int) -> bool:
        """Make the kernel of the last signal wait, too; return whether the driver accepts that."""
        number, nodes, address = signal
        if (number, nodes) != (capture[0], capture[2]) or len(nodes) != 1:
            return False
        arguments = arguments_of(address, flag)
        params = KernelParams(self._kernel, (1, 1, 1), (1, 1, 1), 0, addressof(arguments))
        try:
            self._runtime.call("GraphKernelNodeSetParams", nodes[0], addressof(params))
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
