"""Gates on CUDA: batched memory operations in graphs, opened from a stream of their own.

The device waits until a flag in its memory is 1. Before a launch, the launch stream clears the
flags, sets those of gates that are open already, and writes the number of the launch into pinned
memory. A gate that opens later is opened by the *opener* stream, which waits for
that number, so it never opens an earlier launch. Signals are words in pinned memory.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence
from ctypes import addressof, c_uint, c_uint32, c_uint64, c_void_p
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from devgraph.api.errors import CaptureError, GateError
from devgraph.api.gates import Fence
from devgraph.api.process import keep_forever
from devgraph.api.torchlike.node_calls import RuntimeCallError, structure

if TYPE_CHECKING:
    from devgraph.api.torchlike.node_graph import NodeBackend

CAPACITY = 4096
"""Maximum number of places, names times turns, of one capture or runner."""

MOST_OPS = 256
"""Maximum number of operations in one batch."""

_WAIT, _WRITE = 1, 2
"""CU_STREAM_MEM_OP_WAIT_VALUE_32 and CU_STREAM_MEM_OP_WRITE_VALUE_32."""

_AT_LEAST, _EQUAL = 0, 1
"""CU_STREAM_WAIT_VALUE_GEQ, which compares cyclically, and CU_STREAM_WAIT_VALUE_EQ."""

_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING."""

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
    "CUDA_BATCH_MEM_OP_NODE_PARAMS",
    context=c_void_p,
    count=c_uint,
    ops=c_void_p,
    flags=c_uint,
)


class _After:
    """A fence behind the work of a stream."""

    def __init__(self, event: Any, stream: Any) -> None:
        self.event, self.stream = event, stream

    def __call__(self) -> bool:
        return bool(self.event.query())


class DeviceGates:
    """The channel of one capture or runner."""

    delayed = True

    def __init__(self, backend: NodeBackend) -> None:
        if backend.namespace.is_current_stream_capturing():
            raise CaptureError(
                "the first mark of a gate was met in a capture, where no memory can be allocated. "
                "Run the step once before the capture: warmup=1."
            )
        self._backend, self._runtime = backend, backend.driver
        with _disable_current_modes():  # torch.compile may meet the first mark with fake tensors
            self._flags = torch.zeros(CAPACITY, dtype=torch.int32, device=backend.device)
            self._words = torch.zeros(CAPACITY + 2, dtype=torch.int32).pin_memory()
        backend.namespace.current_stream(backend.device).synchronize()
        self._flag, word = self._flags.data_ptr(), self._words.data_ptr()
        self._begun, self._done, self._signal = word, word + 4, word + 8
        self._launched = self._used = 0
        self._streams: dict[Any, Any] = {}
        """Openers, by the stream of ``open_after``; None for gates without one."""
        self._fences: list[_After] = []
        self._launch_stream: int | None = None
        self._last: tuple[int, list[int], list[Any]] | None = None
        """Capture, node and operations of the last node with operations."""
        self._dirty = False

    def begin(self, launch: int | None, opened: Iterable[int], signals: bool) -> None:
        stream = self._backend.current_stream_id()
        if stream != self._launch_stream:  # frees of the flags wait for it
            self._flags.record_stream(self._current())
            self._launch_stream = stream
        if self._dirty:
            self._settle()
        self._fill(self._flag, 0, self._used, stream)
        if signals:
            self._fill(self._signal, 0, self._used, stream)
        places = sorted(opened)
        for _, run in itertools.groupby(enumerate(places), lambda item: item[1] - item[0]):
            (_, first), *rest = run
            self._fill(self._place(first), 1, 1 + len(rest), stream)
        if launch is not None:
            self._launched = launch
            self._run(stream, [self._write(self._begun, launch)])

    def end(self, launch: int) -> None:
        self._run(self._backend.current_stream_id(), [self._write(self._done, launch)])

    def wait(self, place: int, timeout: float, recording: bool) -> None:
        self._launch([MemOp(_WAIT, 0, self._place(place), 1, _EQUAL)], recording)

    def signal(self, place: int, recording: bool) -> None:
        self._place(place)
        self._launch([self._write(self._signal + 4 * place, 1)], recording)

    def open(self, launch: int, places: Iterable[int], fence: Fence | None) -> None:
        opener = self._opener(fence)
        if isinstance(fence, _After):
            opener.wait_event(fence.event)
            self._fences = [other for other in self._fences if not other()] + [fence]
        begun = MemOp(_WAIT, 0, self._begun, launch & 0xFFFFFFFF, _AT_LEAST)
        writes = [self._write(self._place(place), 1) for place in places]
        self._run(opener.cuda_stream, [begun, *writes])

    def after(self, stream: Any) -> Fence:
        event = self._backend.namespace.Event()
        source = self._current() if stream is None else stream
        event.record(source)
        return _After(event, source.cuda_stream)

    def clear(self) -> None:
        self._dirty = True

    def finished(self) -> int:
        done = c_uint32.from_address(self._done).value
        return self._launched - ((self._launched - done) & 0xFFFFFFFF)

    def signalled(self, place: int, launch: int) -> bool:
        begun = c_uint32.from_address(self._begun).value == launch & 0xFFFFFFFF
        given = begun and c_uint32.from_address(self._signal + 4 * place).value == 1
        return given or self.finished() >= launch

    # Operations.

    def _place(self, place: int) -> int:
        if place >= CAPACITY:
            raise CaptureError(f"a step has more than {CAPACITY} gates (names times turns)")
        self._used = max(self._used, place + 1)
        return self._flag + 4 * place

    def _write(self, address: int, value: int) -> Any:
        # The flag for writes without a barrier is an error in this version of the calls.
        return MemOp(_WRITE, 0, address, value & 0xFFFFFFFF, 0)

    def _run(self, stream: int, ops: Sequence[Any]) -> None:
        on_device = self._backend.on_device if self._backend.elsewhere() else contextlib.nullcontext
        with on_device():
            for start in range(0, len(ops), MOST_OPS):
                part = ops[start : start + MOST_OPS]
                array = (MemOp * len(part))(*part)
                self._runtime.call("StreamBatchMemOp", stream, len(part), addressof(array), 0)

    def _launch(self, ops: list[Any], recording: bool) -> None:
        """Run ``ops`` on the current stream; in a capture, add them to the node before if it can.

        A signal and the wait of the next layer then take one node.
        """
        stream = self._backend.current_stream_id()
        capture = self._runtime.capture_of(stream) if recording else None
        if capture is not None and self._last is not None:
            number, nodes, earlier = self._last
            if (number, nodes) == (capture[0], capture[2]) and self._extend(nodes, earlier + ops):
                self._last = number, nodes, earlier + ops
                return
        self._run(stream, ops)
        if capture is not None and (now := self._runtime.capture_of(stream)) is not None:
            self._last = now[0], now[2], ops

    def _extend(self, nodes: Sequence[int], ops: Sequence[Any]) -> bool:
        """Give the last node these operations; return whether the driver accepts them."""
        if len(nodes) != 1 or len(ops) > MOST_OPS:
            return False
        array = (MemOp * len(ops))(*ops)
        params = NodeParams(self._runtime.context()[0], len(ops), addressof(array), 0)
        try:
            self._runtime.call("GraphBatchMemOpNodeSetParams", nodes[0], addressof(params))
        except RuntimeCallError:
            return False
        return True

    def _fill(self, address: int, value: int, count: int, stream: int) -> None:
        if count:
            self._runtime.call("MemsetD32Async", address, value, count, stream)

    # Streams.

    def _current(self) -> Any:
        return self._backend.namespace.current_stream(self._backend.device)

    def _opener(self, fence: Fence | None) -> Any:
        """Return the stream that opens gates behind ``fence``.

        A stream of torch may be the launch stream of somebody else, which must not wait.
        """
        key = fence.stream if isinstance(fence, _After) else None
        if key not in self._streams:
            with self._backend.on_device():
                handle = self._runtime.make("StreamCreate", _NON_BLOCKING)
            namespace: Any = self._backend.namespace
            opener = namespace.ExternalStream(handle, device=self._backend.device)
            self._flags.record_stream(opener)
            self._streams[key] = opener
        return self._streams[key]

    def _settle(self) -> None:
        """Let the launch stream wait for the opens that the last launch did not use."""
        if any(not fence() for fence in self._fences):
            raise GateError(
                "a stream of open_after has not finished, although the replay that it was for is "
                "over and invalid. It would open a gate of the next replay. Wait for it first."
            )
        current = self._current()
        for opener in self._streams.values():
            current.wait_stream(opener)
        self._dirty = False

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            if self._backend.keeps_memory or self.finished() < self._launched:
                keep_forever(self._words, self._flags)
            del self._flags
            for opener in self._streams.values():
                self._runtime.call("StreamDestroy", opener.cuda_stream)
