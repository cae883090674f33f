"""Gates as flags in device memory, for drivers whose streams can write words and wait for them.

The device waits until the flag of a gate is 1. Before a launch, the launch stream clears all flags,
sets the flags of gates that are already open, and writes the number of the launch to a word for the
host. After ``open_after``, the caller's stream sets the flag itself if the launch has begun. In all
other cases an *opener* stream waits for the number of the launch and sets the flag, so that it
never opens a gate of an earlier launch. Signals are words that the host reads.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_uint32, sizeof
from typing import Any, ClassVar, NamedTuple

import torch

from devgraph.api.errors import CaptureError, GateError
from devgraph.api.gates import Fence
from devgraph.api.process import keep_forever
from devgraph.api.torchlike.base import TorchBackend

CAPACITY = 4096
"""Maximum number of places (names times iterations) of one capture or runner."""

_BEGUN, _DONE, _SIGNALS, _OPENED = 0, 1, 2, 2 + CAPACITY
"""Indexes of the host's words: the launches that have begun and ended last, then for each place
the signal, and then for each place the last launch in which ``open_after`` opened the gate."""

WRITE, AT_LEAST, EQUAL = -1, 0, 1
"""Kinds of ``Op``: a write, and two waits, whose values are the drivers' comparison flags."""

_SPARES = 2
"""Number of openers to keep ready for new streams of ``open_after``."""

NON_BLOCKING = 1
"""The drivers' flag of streams that do not wait for the default stream."""


class Op(NamedTuple):
    """One operation of a stream on a word."""

    kind: int
    address: int
    value: int


class _After:
    """The fence of one ``open_after``. ``event`` is None if the stream itself opens the gate."""

    def __init__(self, done: Callable[[], bool], stream: int, number: int, event: Any) -> None:
        self.done, self.stream, self.number, self.event = done, stream, number, event

    def __call__(self) -> bool:
        return bool(self.done())


class FlagGates:
    """The channel of one capture or runner. A vendor implements the calls of the driver."""

    delayed = True
    word: ClassVar[Any] = c_uint32
    """The ctypes type of a word."""
    handle: ClassVar[str]
    """Attribute of a torch stream with the driver's handle."""

    def __init__(self, backend: TorchBackend) -> None:
        if backend.namespace.is_current_stream_capturing():
            raise CaptureError(
                "the first gate mark was reached in a capture, where no memory can be allocated. "
                "Run the step once before the capture: warmup=1."
            )
        self._backend = backend
        self._size, self._mask = sizeof(self.word), 256 ** sizeof(self.word) - 1
        dtype = torch.int32 if self._size == 4 else torch.int64
        self._flags = torch.zeros(3 * CAPACITY + 2, dtype=dtype, device=backend.device)
        """Flags of all places, then room for the words on drivers that cannot write host memory."""
        self._words = backend.pin(torch.zeros(2 * CAPACITY + 2, dtype=dtype, device="cpu"))
        backend.namespace.current_stream(backend.device).synchronize()
        self._host = (self.word * len(self._words)).from_address(self._words.data_ptr())
        """The words as the host reads them."""
        self._flag = self._flags.data_ptr()
        self._published = self.published(self._words.data_ptr())
        self._launched = self._used = 0
        self._spares: list[Any] = []
        """Openers that are not in use."""
        self._make_openers()
        self._openers: dict[Any, Any] = {None: self._spares.pop(0)}
        """Opener streams, by the stream passed to ``open_after``; the key None is for ``open``."""
        self._fences: dict[int, _After] = {}
        """The last fence of each stream. When it has finished, all earlier fences have finished
        too."""
        self._numbers = itertools.count()
        self._launch_stream: int | None = None
        self._dirty = False

    def begin(self, launch: int | None, opened: Iterable[int], signals: bool) -> None:
        stream = self.current()
        if stream != self._launch_stream:  # Keep the flags until this stream has used them.
            self._backend.hold(self._flags, self._current_stream())
            self._launch_stream = stream
        if self._dirty:
            self._settle()
        if self._used:
            self.fill(stream, self._flag, 0, self._used)
            if signals:
                self.fill(stream, self._word(_SIGNALS), 0, self._used)
        places = sorted(opened)
        for _, run in itertools.groupby(enumerate(places), lambda item: item[1] - item[0]):
            (_, first), *rest = run
            self.fill(stream, self._place(first), 1, 1 + len(rest))
        if launch is not None:
            if len(self._spares) < _SPARES and self.finished() >= self._launched:
                self._make_openers()
            self._launched = launch
            self.run(stream, [Op(WRITE, self._word(_BEGUN), launch & self._mask)])

    def end(self, launch: int) -> None:
        self.run(self.current(), [Op(WRITE, self._word(_DONE), launch & self._mask)])

    def wait(self, place: int, timeout: float, recording: bool) -> None:
        self._launch([Op(EQUAL, self._place(place), 1)], recording)

    def signal(self, place: int, recording: bool) -> None:
        self._place(place)
        self._launch([Op(WRITE, self._word(_SIGNALS + place), 1)], recording)

    def _launch(self, ops: list[Op], recording: bool) -> None:
        (self.record if recording else self.run)(self.current(), ops)

    def open(self, launch: int, places: Iterable[int], fence: Fence | None) -> None:
        if isinstance(fence, _After) and fence.event is None:
            return  # the stream of ``open_after`` writes the flag
        opener = self._opener(fence.stream if isinstance(fence, _After) else None)
        if isinstance(fence, _After):
            opener.wait_event(fence.event)
            self._note(fence)
        begun = Op(AT_LEAST, self._word(_BEGUN), launch & self._mask)
        writes = [Op(WRITE, self._place(place), 1) for place in places]
        self.run(getattr(opener, self.handle), [begun, *writes])

    def after(self, stream: Any) -> Fence:
        event = self._backend.namespace.Event()
        source = self._current_stream() if stream is None else stream
        event.record(source)
        key = getattr(source, self.handle)
        return _After(event.query, key, next(self._numbers), event)

    def source(self, stream: Any) -> int:
        return int(getattr(self._current_stream() if stream is None else stream, self.handle))

    def behind(
        self, launch: int, place: int, source: int
    ) -> tuple[Fence, Callable[[], None]] | None:
        value = launch & self._mask
        if self._host[_BEGUN] != value:
            return None
        index = _OPENED + place
        # Write the flag last, because the launch may then end and free the words.
        ops = [Op(WRITE, self._word(index), value), Op(WRITE, self._place(place), 1)]
        fence = _After(lambda: self._host[index] == value, source, next(self._numbers), None)
        self._note(fence)
        return fence, lambda: self.run(source, ops)

    def _note(self, fence: _After) -> None:
        last = self._fences.get(fence.stream)
        if last is None or last.number < fence.number:
            self._fences[fence.stream] = fence

    def clear(self) -> None:
        self._dirty = True

    def finished(self) -> int:
        return int(self._launched - ((self._launched - self._host[_DONE]) & self._mask))

    def signalled(self, place: int, launch: int) -> bool:
        has_begun = self._host[_BEGUN] == launch & self._mask
        return (has_begun and self._host[_SIGNALS + place] == 1) or self.finished() >= launch

    def _word(self, index: int) -> int:
        """Return the address at which streams write the host's word ``index``."""
        return self._published + self._size * index

    def _place(self, place: int) -> int:
        if place >= CAPACITY:
            raise CaptureError(f"a step has more than {CAPACITY} gates (names times iterations)")
        self._used = max(self._used, place + 1)
        return self._flag + self._size * place

    # Streams.

    def _current_stream(self) -> Any:
        return self._backend.namespace.current_stream(self._backend.device)

    def _opener(self, key: int | None) -> Any:
        """Return the opener for the stream ``key`` of ``open_after``; share one if none is spare.

        Openers are not torch's streams, because other code may launch on those.
        """
        if key not in self._openers:
            if not self._spares:
                return [*self._openers.values()][-1]
            self._openers[key] = self._spares.pop()
        return self._openers[key]

    def _make_openers(self) -> None:
        """Create openers while no launch waits.

        A driver may wait for all work before it creates a stream, which would deadlock if a launch
        waited for a gate that the new stream must open.
        """
        with self._backend.on_device():
            while len(self._spares) < _SPARES:
                self._spares.append(self.make_stream())

    def _settle(self) -> None:
        """Make the launch stream wait for operations that would open gates of the last launch."""
        if not all(fence() for fence in self._fences.values()):
            raise GateError(
                "a stream passed to open_after has not finished, although its replay is over and "
                "invalid, so it would open a gate of the next replay. Wait for the stream first."
            )
        current = self._current_stream()
        for opener in self._openers.values():
            current.wait_stream(opener)
        self._dirty = False

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            # Openers are idle after the end of the last launch, unless that launch was invalid.
            pending = self.finished() < self._launched or self._dirty
            if self._backend.keeps_memory or pending:
                keep_forever(self._words, self._flags)
            del self._flags
            for opener in (*self._openers.values(), *self._spares):
                self.free_stream(opener)

    # Calls of the driver.

    def published(self, words: int) -> int:
        """Return the address at which streams can write the host's ``words``."""
        return words

    def current(self) -> int:
        """Return the handle of the current stream, after torch has submitted its queued work."""
        return int(self._backend.current_stream_id())

    def run(self, stream: int, ops: Sequence[Op]) -> None:
        """Queue ``ops`` on a stream."""
        raise NotImplementedError

    def record(self, stream: int, ops: list[Op]) -> None:
        """Record ``ops`` in the capture of a stream."""
        self.run(stream, ops)

    def fill(self, stream: int, address: int, value: int, count: int) -> None:
        """Set ``count`` words to ``value`` on a stream."""
        raise NotImplementedError

    def external(self, handle: int) -> Any:
        """Return a torch stream that wraps a stream handle of the driver."""
        namespace: Any = self._backend.namespace
        return namespace.ExternalStream(handle, device=self._backend.device)

    def make_stream(self) -> Any:
        """Return a new stream that does not wait for the default stream."""
        raise NotImplementedError

    def free_stream(self, stream: Any) -> None:
        """Destroy a stream when its work has finished."""
        raise NotImplementedError
