"""Gates on Ascend: streams write values to device memory and wait for values there.

Streams cannot write host memory, so a copy to the host follows each write that the host must see.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int, c_size_t, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

from devgraph.api.torchlike.gates import CAPACITY, WRITE, FlagGates, Op
from devgraph.api.torchlike.node_calls import RuntimeCallError

if TYPE_CHECKING:
    from devgraph.npu.device import NpuDevice

_CALLS: dict[str, tuple[Any, ...]] = {
    "aclrtValueWait": (c_void_p, c_uint64, c_uint32, c_void_p),
    "aclrtValueWrite": (c_void_p, c_uint64, c_uint32, c_void_p),
    "aclrtMemcpyAsync": (c_void_p, c_size_t, c_void_p, c_size_t, c_int, c_void_p),
    "aclrtMemsetAsync": (c_void_p, c_size_t, c_int, c_size_t, c_void_p),
}

_TO_HOST = 2
"""ACL_MEMCPY_DEVICE_TO_HOST."""


def gate_calls() -> dict[str, Any] | None:
    """Return the driver's calls for gates, or None if the driver cannot wait for values."""
    library = ctypes.CDLL("libascendcl.so")  # already loaded by torch_npu
    calls = {name: getattr(library, name, None) for name in _CALLS}
    for name, function in calls.items():
        if function is None:
            return None
        function.argtypes = _CALLS[name]
    return calls


class ValueGates(FlagGates):
    """The gate channel of one capture or runner."""

    word = c_uint64
    handle = "npu_stream"  # Reading this attribute makes torch_npu issue all earlier work.
    _backend: NpuDevice

    def __init__(self, backend: NpuDevice, calls: dict[str, Any]) -> None:
        self._calls = calls
        super().__init__(backend)

    def _call(self, name: str, *args: Any) -> None:
        with self._backend.on_device():
            error = self._calls[name](*args)
        if error:
            raise RuntimeCallError(f"{name} failed, error code is {error}", error)

    def published(self, words: int) -> int:
        return self._flag + self._size * CAPACITY

    def current(self) -> int:
        return int(self._current_stream().npu_stream)

    def run(self, stream: int, ops: Sequence[Op]) -> None:
        for kind, address, value in ops:
            if kind == WRITE:
                self._call("aclrtValueWrite", address, value, 0, stream)
                if address >= self._published:
                    self._publish(stream, address, self._size)
            else:
                self._call("aclrtValueWait", address, value, kind, stream)

    def _publish(self, stream: int, address: int, size: int) -> None:
        """Copy words to the host after the stream's earlier work."""
        host = self._words.data_ptr() + address - self._published
        self._call("aclrtMemcpyAsync", host, size, address, size, _TO_HOST, stream)

    def fill(self, stream: int, address: int, value: int, count: int) -> None:
        if value:
            ends = range(address, address + self._size * count, self._size)
            self.run(stream, [Op(WRITE, word, value) for word in ends])
            return
        size = self._size * count
        self._call("aclrtMemsetAsync", address, size, 0, size, stream)
        if address >= self._published:
            self._publish(stream, address, size)

    def make_stream(self) -> Any:
        # Use a stream of torch_npu, which records events only on its own streams.
        return self._backend.namespace.SyncLaunchStream(self._backend.device.index)

    def free_stream(self, stream: Any) -> None:
        """Do nothing, because the stream belongs to torch_npu's pool."""
