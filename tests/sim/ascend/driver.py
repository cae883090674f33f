"""What a test sees of the simulated driver and does to it."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Driver"]


class Driver:
    """The loaded simulated driver: counters, settings, faults, the report.

    Settings and faults are named in ``src/control.cpp``; each can also be given in the environment
    before the start, as ``FAKEACL_`` and the name in capitals.
    """

    def __init__(self, library: ctypes.CDLL, folder: Path) -> None:
        self._library = library
        self.folder = folder
        library.fakeacl_set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
        library.fakeacl_fail_device.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_char_p]

    def _text(self, function: Callable[[object, int], int]) -> str:
        room = function(None, 0) + 4096  # it may grow between the two calls
        buffer = ctypes.create_string_buffer(room)
        function(buffer, room)
        return buffer.value.decode()

    def counters(self) -> dict[str, int]:
        """Return every counter so far. One that never counted is absent; see ``counter``.

        streams_created, streams_destroyed, hardware_streams (held now, by streams and graphs),
        events_created, events_destroyed, captures, captures_failed, captured_nodes, task_groups,
        graphs_destroyed, graphs_destroyed_in_flight (of them), replays, kernels (run, in graphs
        and outside), tasks (queued, updates among them), task_updates and group_updates (done),
        value_waits, mallocs, device_bytes (held now), device_errors.
        """
        return dict(json.loads(self._text(self._library.fakeacl_counters)))

    def counter(self, name: str) -> int:
        """Return one counter, 0 when nothing was counted under that name."""
        return self.counters().get(name, 0)

    @contextmanager
    def counting(self) -> Iterator[dict[str, int]]:
        """Yield a dict that holds, once the block has ended, how much each counter moved."""
        moved: dict[str, int] = {}
        before = self.counters()
        yield moved
        after = self.counters()
        moved.update({name: after[name] - before.get(name, 0) for name in after})

    def settings(self) -> dict[str, int]:
        """Return every setting and fault with its value now."""
        return dict(json.loads(self._text(self._library.fakeacl_settings)))

    def set(self, **values: int) -> None:
        """Change settings; a fault named ``..._in`` fires at the n-th such call from now, once."""
        for name, value in values.items():
            if self._library.fakeacl_set(name.encode(), value):
                raise ValueError(f"no setting {name!r}; known: {', '.join(self.settings())}")

    @contextmanager
    def setting(self, **values: int) -> Iterator[None]:
        """Change settings inside a block and put the old values back."""
        old = self.settings()
        self.set(**values)
        try:
            yield
        finally:
            self.set(**{name: old[name] for name in values})

    def report(self) -> list[str]:
        """Return what the driver reported: stubs called, functions missing, errors, faults."""
        return self._text(self._library.fakeacl_report).splitlines()

    def graphs(self) -> list[dict[str, int]]:
        """Return the graphs that exist, oldest first: id, device, nodes, task_groups, streams,
        replays."""
        graphs = json.loads(self._text(self._library.fakeacl_graphs))
        return sorted(graphs, key=lambda graph: graph["id"])

    def missing(self) -> list[str]:
        """Return the functions that this torch_npu knows by name and the simulation lacks."""
        return (self.folder / "missing.txt").read_text().split()

    def fail_device(self, device: int = 0, *, code: int = 507015, text: str = "injected") -> None:
        """Put a device into a sticky error; what waits on it stops waiting."""
        self._library.fakeacl_fail_device(device, code, text.encode())

    def recover(self) -> None:
        """Let what is queued drain, then forget all device errors, which no real device can."""
        self._library.fakeacl_recover()
