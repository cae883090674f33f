"""The runtime and driver calls that torch does not expose, through cuda-python where installed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn

from devgraph.api.errors import DeviceGraphError

__all__ = ["Runtime", "RuntimeCallError"]

logger = logging.getLogger(__name__)


class RuntimeCallError(DeviceGraphError):
    """A CUDA runtime or driver call failed; the message has the vendor's code and text."""

    def __init__(self, message: str, error_code: int) -> None:
        super().__init__(message)
        self.error_code = error_code


def _fail(name: str, error: Any) -> NoReturn:
    raise RuntimeCallError(f"{name} failed ({int(error)}: {error!s})", int(error))


class Runtime:
    """CUDA calls on raw handles, which are plain ints; errors become ``RuntimeCallError``.

    Node parameters go through the driver's functions: the runtime's getter can fail for kernels
    that the driver loaded (Triton, cuBLAS).

    Args:
        cudart: the module ``cuda.bindings.runtime``.
        driver: the module ``cuda.bindings.driver``.
    """

    def __init__(self, cudart: Any, driver: Any) -> None:
        self._cudart = cudart
        self.driver = driver
        self._active = cudart.cudaStreamCaptureStatus.cudaStreamCaptureStatusActive
        flags = cudart.cudaGraphInstantiateFlags
        # torch's own flags: another set would run other priorities and keep graph allocations.
        self._instantiate_flags = int(flags.cudaGraphInstantiateFlagAutoFreeOnLaunch) | int(
            flags.cudaGraphInstantiateFlagUseNodePriority
        )

    @staticmethod
    def find() -> Runtime | None:
        """Return the runtime, or None if cuda-python is not installed (``devgraph[cuda]``)."""
        try:
            from cuda.bindings import driver, runtime
        except ImportError:
            logger.info("cuda-python is not installed: no region update and no node counts")
            return None
        return Runtime(runtime, driver)

    def call(self, name: str, *args: Any) -> Any:
        """Call a runtime function; return its result without the error code.

        Raises:
            RuntimeCallError: the call failed.
        """
        error, *result = getattr(self._cudart, name)(*args)
        if error:
            _fail(name, error)
        return result[0] if len(result) == 1 else tuple(result)

    def drive(self, name: str, *args: Any) -> Any:
        """Call a driver function; otherwise like ``call``."""
        error, *result = getattr(self.driver, name)(*args)
        if error:
            _fail(name, error)
        return result[0] if len(result) == 1 else tuple(result)

    # Captures in progress.

    def capture_of(self, stream: int) -> tuple[int, int, list[int]] | None:
        """Return id, graph and last nodes of the capture that ``stream`` is part of, or None."""
        status, capture_id, graph, last, *_ = self.call("cudaStreamGetCaptureInfo", stream)
        if status != self._active:
            return None
        return int(capture_id), int(graph), [int(node) for node in last or ()]

    def is_capturing(self, stream: int) -> bool:
        """Whether ``stream`` is part of a capture."""
        return bool(self.call("cudaStreamIsCapturing", stream) == self._active)

    def captured_nodes(self, stream: int) -> int:
        """Return how many nodes the capture in progress on ``stream`` has recorded."""
        capture = self.capture_of(stream)
        return 0 if capture is None else self.count(capture[1])

    def begin_capture(self, stream: int) -> None:
        """Begin a thread-local capture on ``stream`` that torch does not know of."""
        mode = self._cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self.call("cudaStreamBeginCapture", stream, mode)

    def end_capture(self, stream: int) -> int:
        """End the capture on ``stream`` and return its graph, which the caller owns."""
        return int(self.call("cudaStreamEndCapture", stream))

    # Graphs.

    def count(self, graph: int) -> int:
        """Return the number of nodes."""
        return int(self.call("cudaGraphGetNodes", graph, 0)[-1])

    def nodes(self, graph: int) -> list[int]:
        """Return all nodes."""
        count = self.count(graph)
        if not count:
            return []
        return [int(node) for node in self.call("cudaGraphGetNodes", graph, count)[0]]

    def edges(self, graph: int) -> list[tuple[int, int, tuple[int, int, int]]]:
        """Return every edge as (from, to, (type, from port, to port))."""
        count = int(self.call("cudaGraphGetEdges", graph, 0)[-1])
        if not count:
            return []
        sources, targets, data, _ = self.call("cudaGraphGetEdges", graph, count)
        return [
            (int(source), int(target), (int(kind.type), int(kind.from_port), int(kind.to_port)))
            for source, target, kind in zip(sources, targets, data, strict=True)
        ]

    def clone(self, graph: int) -> int:
        """Return a copy of ``graph``, which the caller owns."""
        return int(self.call("cudaGraphClone", graph))

    def find_in_clone(self, node: int, clone: int) -> int:
        """Return the node of ``clone`` that stands for ``node`` of its original."""
        return int(self.call("cudaGraphNodeFindInClone", node, clone))

    def destroy(self, graph: int) -> None:
        """Free a graph."""
        self.call("cudaGraphDestroy", graph)

    # Executables.

    def instantiate(self, graph: int, stream: int) -> int:
        """Return an executable of ``graph``, made as torch makes its own and uploaded."""
        executable = int(self.call("cudaGraphInstantiate", graph, self._instantiate_flags))
        self.upload(executable, stream)
        return executable

    def upload(self, executable: int, stream: int) -> None:
        """Copy an executable graph to the device now, so that the first launch is like any."""
        self.call("cudaGraphUpload", executable, stream)

    def destroy_executable(self, executable: int) -> None:
        """Free an executable; one in flight is freed when it completes (cuGraphExecDestroy)."""
        self.call("cudaGraphExecDestroy", executable)

    def launcher(self, executable: int, current_stream: Callable[[], int]) -> Callable[[], None]:
        """Return a callable that launches ``executable`` on the current stream."""
        launch = self._cudart.cudaGraphLaunch
        handle = self._cudart.cudaGraphExec_t(init_value=executable)

        def run() -> None:
            (error,) = launch(handle, current_stream())
            if error:
                _fail("cudaGraphLaunch", error)

        return run
