"""NodeBackend: a torch backend whose graphs are updated node by node."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from devgraph.api.torchlike.base import TorchBackend, TorchPool
from devgraph.api.torchlike.nodes import NodeRuntime, RuntimeCallError
from devgraph.api.torchlike.recording import ExecutableMeter
from devgraph.api.torchlike.side_streams import SideStreams

__all__ = ["NodeBackend"]


class NodeBackend(TorchBackend):
    """What graphs with node parameters need besides a torch namespace.

    A vendor calls ``use_runtime`` once; without a runtime there are neither updates nor counts.
    """

    runtime: NodeRuntime | None = None

    def use_runtime(self, runtime: NodeRuntime | None) -> None:
        """Take the driver's graph calls from ``runtime``."""
        self.runtime = runtime
        namespace = self.namespace
        self.meter = ExecutableMeter(lambda: int(namespace.mem_get_info(self._device)[0]))
        if runtime is not None:
            make = functools.partial(namespace.Stream, self._device)
            self.side_streams = SideStreams(runtime, make, self.stream_handle)
        self._lazy_generators: bool | None = None

    def bind_worker(self, index: int) -> None:
        super().bind_worker(index)
        self.use_runtime(self.runtime)  # streams and memory are those of the device

    # What the vendor's graph and stream objects are asked for.

    def make_kept_graph(self) -> Any:
        """Return a new, empty graph that keeps its nodes; ``instantiate`` makes it launchable."""
        return getattr(self.namespace, self.graph_class_name)(keep_graph=True)

    def instantiate(self, native: Any) -> None:
        """Make the executable of a kept graph, anew if it has one."""
        native.instantiate()

    def raw_graph(self, native: Any) -> int:
        """Return the driver's handle of a kept graph."""
        raise NotImplementedError

    def raw_executable(self, native: Any) -> int:
        """Return the driver's handle of the executable that ``native`` launches."""
        raise NotImplementedError

    def stream_handle(self, stream: Any) -> int:
        """Return the driver's handle of a stream."""
        raise NotImplementedError

    # What goes through the driver.

    def reopen_capture(self) -> None:
        if self.runtime is None:
            super().reopen_capture()
            return
        self.runtime.begin_capture(self.current_stream_id())

    def guarded(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Return ``launch`` made safe for a thread whose current device is another one."""
        elsewhere, on_device = self.elsewhere, self.on_device

        def run() -> None:
            if elsewhere():
                with on_device():
                    launch()
            else:
                launch()

        return run

    def draws_random(self, native: Any, pool: TorchPool) -> bool:
        """Replay ``native`` once; return whether that drew random numbers.

        A torch that registers generators with every capture tells by the default generator's
        offset (another generator could not be captured). One that registers them when they are
        first used refuses to replay such a graph, and no other, inside a capture.
        """
        generator = self.namespace.default_generators[self._device.index or 0]
        before = generator.get_offset()
        native.replay()
        if generator.get_offset() != before:
            return True
        if self._lazy_generators is None:
            self._lazy_generators = not self._refuses_in_capture(pool.keeper, pool)
        return self._lazy_generators and self._refuses_in_capture(native, pool)

    def _refuses_in_capture(self, native: Any, pool: TorchPool) -> bool:
        runtime = self.runtime
        if runtime is None:
            return True
        with self.exclusive(), self.namespace.stream(pool.stream):
            stream = self.current_stream_id()
            runtime.begin_capture(stream)
            try:
                native.replay()
            except RuntimeError:
                return True
            finally:
                with contextlib.suppress(RuntimeCallError):
                    runtime.destroy(runtime.end_capture(stream))
        return False

    def is_random_refusal(self, error: BaseException) -> bool:
        """Whether torch raised ``error`` because an operation drew random numbers in a capture
        that it does not know of."""
        return "generator" in str(error).lower()
