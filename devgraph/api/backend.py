"""Backend: captures, replays and updates on a vendor's device."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from devgraph.api.device import Device
from devgraph.api.errors import InputTypeError, brief, require_result
from devgraph.api.gates import GateChannel, Gates, HostGates
from devgraph.api.graph import DeviceGraph
from devgraph.api.marks.host_values import HostSpec, Tracked
from devgraph.api.marks.scopes import GraphScope
from devgraph.api.pool import Pool
from devgraph.api.session import session


class Backend(Device):
    """The base class of every vendor's backend.

    ``make_graph`` and ``capture_context`` have the signatures of PyTorch's device-graph proposal.
    """

    graph_type: type[DeviceGraph] = DeviceGraph  # type: ignore[type-abstract]
    """Class of the graphs that ``make_graph`` returns."""

    compiled_piece_type: type[Any] | None = None
    """Class that wraps a compiled piece so that a capture can record it; None if not needed.

    Its constructor takes the compiled function and the function's ``torch.fx.GraphModule``.
    """

    needs: Mapping[str, str] = {}
    """The requirement of each capability that the class declares but some machines lack."""

    unproven: str = ""
    """Untested parts of the backend, for reports, such as "never ran on hardware"."""
    recommended_mode: Mapping[str, str] = {}
    """Policies by phase that suit this backend better than the default policies."""

    extensions: Mapping[str, Callable[..., Any]] = {}
    """Functions that only some vendors provide, by name."""

    def make_graph(self, pool: Pool | None = None) -> DeviceGraph:
        """Return an empty graph in ``pool``, or in a new pool if ``pool`` is None."""
        return self.graph_type(self, own_pool(self, pool))

    def fence(self, stream: Any = None) -> Callable[[], bool]:
        """Return a callable that reports, without blocking, whether the work so far has finished.

        Only work on ``stream`` counts; None means the current stream. The base class has no
        streams: all work has finished when a call returns.
        """
        return lambda: True

    def stopwatch(self) -> Callable[[], Callable[[], float | None]]:
        """Start timing the current stream and return a callable that stops it.

        Stopping returns a callable that reports the seconds without blocking, or None until the
        device has finished. The base class has no streams and measures host time.
        """
        begin = time.perf_counter()

        def stop() -> Callable[[], float | None]:
            seconds = time.perf_counter() - begin
            return lambda: seconds

        return stop

    def make_gate_channel(self, gates: Gates) -> GateChannel:
        """Return the channel of ``gates``. The base class waits on the host, between segments."""
        return HostGates(gates, self.fence)

    @property
    def version(self) -> str:
        """Version of the vendor's runtime, for reports and rank agreement."""
        return torch.__version__

    @property
    def device_name(self) -> str:
        """Product name of the device."""
        return str(self.device)

    def details(self) -> dict[str, str]:
        """Return additional facts about the runtime for reports, by topic."""
        return {}

    def make_pool(self, *, releasable: bool = False) -> Pool:
        """Return a new pool; ``Pool.release`` can return the memory of a ``releasable`` pool.

        Raises:
            CapabilityError: this backend has no releasable pools.
        """
        return Pool(self, releasable=releasable)

    def get_rng_state(self) -> torch.Tensor:
        """Return the state of the device's default random generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state that ``get_rng_state`` returned."""
        torch.set_rng_state(state)

    def after_captures(self) -> float | None:
        """Measure the pace of replays; return None if captures cannot slow replays down.

        The pace is the time from one kernel to the next in a graph of tiny kernels, in
        microseconds. Runners call this before the first round of captures and after each round. The
        measurement takes some milliseconds and waits for the device.
        """
        return None

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a host tensor in pinned memory; without streams, the tensor itself."""
        return tensor

    @contextlib.contextmanager
    def capture_context(
        self,
        graph: DeviceGraph,
        stream: Any = None,
        pool: Pool | None = None,
        capture_error_mode: str = "thread_local",
        *,
        host_args: Mapping[str, Any] | None = None,
    ) -> Iterator[dict[str, Tracked]]:
        """Capture the device work of the block into ``graph`` without running it.

        Tensors that the block allocates are in the pool's memory, so replays of earlier graphs of
        the pool may overwrite them. ``dg.capture`` copies its outputs to separate memory.

        Args:
            graph: an empty graph of this backend.
            stream: the stream to capture on; None and the default stream select the pool's stream.
            pool: the pool to allocate from instead of the graph's pool.
            capture_error_mode: the threads whose unsafe calls make the capture fail: "global",
                "thread_local" or "relaxed".
            host_args: host arguments of regions in the block and their values at capture.

        Yields:
            the tracked host arguments by name, to pass to regions. Regions also accept a plain
            value that equals the declared value.

        Raises:
            StateError: the graph is not empty.
            CaptureError: the block cannot be captured. The graph stays empty.
        """
        if not isinstance(graph, DeviceGraph):
            raise InputTypeError(f"graph must come from backend.make_graph(), got {brief(graph)}")
        if not (stream is None or hasattr(stream, "wait_stream")):
            raise InputTypeError(f"stream must be a stream of the device, got {brief(stream)}")
        graph_pool = graph.pool
        pool = own_pool(self, graph_pool if pool is None else pool)
        spec = HostSpec(host_args)
        scope = GraphScope(graph, accept_equal=True)
        with session(pool, scope, stream=stream, mode=capture_error_mode) as recording:
            if pool is not graph_pool:
                graph.use_pool(pool)
                recording.on_failure(functools.partial(graph.use_pool, graph_pool))
            recording.begin(graph, spec=spec)
            yield spec.tracked()
            recording.end()


def new_graph(backend: Backend, pool: Pool) -> DeviceGraph:
    """Return an empty graph of ``backend``."""
    return require_result(backend.make_graph(pool), DeviceGraph, backend, "make_graph")


def own_pool(backend: Backend, pool: Pool | None, *, releasable: bool = False) -> Pool:
    """Return ``pool``, or a new pool of ``backend`` if ``pool`` is None."""
    if pool is None:
        pool = backend.make_pool(releasable=True) if releasable else backend.make_pool()
        return require_result(pool, Pool, backend, "make_pool")
    if not isinstance(pool, Pool):
        raise InputTypeError(f"pool must come from backend.make_pool(), got {brief(pool)}")
    pool.check(backend)
    return pool


def poison(tensor: torch.Tensor) -> None:
    """Fill ``tensor`` with values that are unlikely results: NaN, large integers, or True."""
    if tensor.dtype is torch.float4_e2m1fn_x2:  # fill_ does not support it
        tensor = tensor.view(torch.uint8)
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 3)
