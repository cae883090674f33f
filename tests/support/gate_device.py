"""A device in Python at whose gates a stream waits: what a vendor's channel does, on a thread."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

from devgraph.api.gates import Fence, Gates
from devgraph.cpu.backend import CpuBackend


class GateDevice:
    """A stream that runs work in order on a thread, and flags that waits close again."""

    delayed = True

    def __init__(self, gates: Gates) -> None:
        self.gates = gates
        self.flags: dict[int, bool] = {}
        self.begun = self.done = 0
        self.signals: set[int] = set()
        self.passed: list[tuple[int, int]] = []
        """Launch and place of each wait that passed."""
        self.recorded: list[Callable[[], None]] = []
        """The nodes of a graph; each call launches one."""
        self._changed = threading.Condition()
        self._dirty = False
        self._opens: list[tuple[int, list[int], Fence | None]] = []
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._work.get()()

    def _queue(self, act: Callable[[], None]) -> None:
        def run() -> None:
            with self._changed:
                act()
                self._changed.notify_all()

        self._work.put(run)

    def begin(self, launch: int | None, opened: Iterable[int], signals: bool) -> None:
        places, dirty, self._dirty = list(opened), self._dirty, False

        def run() -> None:
            if dirty:
                self.flags.clear()
            assert not any(self.flags.values()), "a gate of an earlier launch is open"
            self.flags.update(dict.fromkeys(places, True))
            if launch is not None:
                self.begun = launch
                self.signals.clear()
                self._serve()

        self._queue(run)

    def _serve(self) -> None:
        """Do the opens whose launch has begun and whose fence is over."""
        for item in list(self._opens):
            launch, places, fence = item
            if launch <= self.begun and (fence is None or fence()):
                self._opens.remove(item)
                self.flags.update(dict.fromkeys(places, True))

    def end(self, launch: int) -> None:
        self._queue(lambda: setattr(self, "done", launch))

    def wait(self, place: int, timeout: float, recording: bool) -> None:
        def run() -> None:
            while not self.flags.get(place):
                self._changed.wait(0.001)
                self._serve()
            self.flags[place] = False
            self.passed.append((self.begun, place))

        self._launch(run, recording)

    def signal(self, place: int, recording: bool) -> None:
        self._launch(lambda: self.signals.add(place), recording)

    def _launch(self, act: Callable[[], None], recording: bool) -> None:
        if recording:
            self.recorded.append(lambda: self._queue(act))
        else:
            self._queue(act)

    def open(self, launch: int, places: Iterable[int], fence: Fence | None) -> None:
        if not isinstance(fence, functools.partial):  # no stream writes it itself
            self._open(launch, places, fence)

    def _open(self, launch: int, places: Iterable[int], fence: Fence | None) -> None:
        with self._changed:
            self._opens.append((launch, list(places), fence))
            self._serve()
            self._changed.notify_all()

    def after(self, stream: Any) -> Fence:
        return stream

    def source(self, stream: Any) -> Any:
        return stream

    def behind(
        self, launch: int, place: int, source: Any
    ) -> tuple[Fence, Callable[[], None]] | None:
        if self.begun != launch:
            return None
        return functools.partial(source), lambda: self._open(launch, [place], source)

    def clear(self) -> None:
        self._dirty = True

    def finished(self) -> int:
        return self.done

    def signalled(self, place: int, launch: int) -> bool:
        return self.done >= launch or (self.begun == launch and place in self.signals)

    def synchronize(self) -> None:
        """Wait until the stream is idle."""
        idle = threading.Event()
        self._work.put(idle.set)
        assert idle.wait(20)


class GatedBackend(CpuBackend):
    """The CPU reference with gates on such a device, for eager steps."""

    def make_gate_channel(self, gates: Gates) -> GateDevice:  # type: ignore[override]
        return GateDevice(gates)
