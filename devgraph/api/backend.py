"""Backend: how one capture is made, replayed and updated on one vendor's device."""

from __future__ import annotations

import abc
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import attrs
import torch

from devgraph.api.device import Device
from devgraph.api.errors import InputTypeError, brief
from devgraph.api.graph import DeviceGraph
from devgraph.api.marks.host_values import HostSpec, Tracked
from devgraph.api.marks.scopes import GraphScope
from devgraph.api.pool import Pool
from devgraph.api.session import session

logger = logging.getLogger(__name__)

_SLOW = 1.08
"""Two measurements of the same pace differed by less than 0.02, the two paces by 0.17."""


@attrs.frozen(kw_only=True)
class ReplayPace:
    """How fast graphs go from kernel to kernel; some devices have a slower pace that lasts."""

    microseconds: float
    """From one kernel to the next in a graph of tiny ones."""
    fastest: float
    """The least that was measured in this process."""

    @property
    def slow(self) -> bool:
        """Whether graphs went faster in this process before."""
        return self.microseconds > _SLOW * self.fastest


class SlotAttention(Protocol):
    """A backend's own attention over slots, as an updatable region.

    The graph holds it under the policy ``full``, whatever the number of requests: only the
    lengths in it change. It is an eager segment under ``breakable``.
    """

    row_multiple: int
    """What the rows of a slot must be a multiple of."""

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
        *,
        scale: float,
        spans: tuple[int, ...],
    ) -> None:
        """Attend the packed tokens of requests causally to the rows that each of them owns.

        Args:
            query: ``[tokens, heads, dim]``, requests one after another, padding behind them.
            keys, values: ``[slots * rows, kv_heads, dim]``, contiguous.
            out: written, ``[tokens, heads, dim]``; zero for padding.
            spans: three numbers a request: its slot, the tokens it has cached, its new tokens;
                slots ascend. A host argument: hand it over as it was received.
        """
        ...


class Backend(Device):
    """One vendor's device. Subclasses give identity, capabilities and a graph class.

    ``make_graph`` and ``capture_context`` have the signatures of PyTorch's device-graph proposal.
    """

    needs: Mapping[str, str] = {}
    """What a node must have for some of the capabilities that the class declares, by their name;
    ``capabilities`` of an instance are those of its node."""
    recommended_mode: Mapping[str, str] = {}
    """Policies by phase that are better here than those of the default mode."""
    _fastest = math.inf

    @abc.abstractmethod
    def make_graph(self, pool: Pool | None = None) -> DeviceGraph:
        """Return an empty graph in ``pool`` (in a pool of its own if None)."""

    def fence(self) -> Callable[[], bool]:
        """Return what tells, without waiting, whether the current stream's work so far is done.

        The base class has no streams: what was called has been done.
        """
        return lambda: True

    def stopwatch(self) -> Callable[[], Callable[[], float | None]]:
        """Begin to time the current stream's work and return what ends that.

        The end returns what tells the seconds between, without waiting: None while the device has
        not come there. The base class has no streams: it takes the host's time.
        """
        begin = time.perf_counter()

        def stop() -> Callable[[], float | None]:
            seconds = time.perf_counter() - begin
            return lambda: seconds

        return stop

    @property
    def version(self) -> str:
        """Version of the vendor's runtime, for reports and rank agreement."""
        return torch.__version__

    @property
    def device_name(self) -> str:
        """The product name of the device."""
        return str(self.device)

    def details(self) -> dict[str, str]:
        """Return what else a report should tell of this backend's runtime, by topic."""
        return {}

    def make_pool(self, *, releasable: bool = False) -> Pool:
        """Return a new pool.

        Args:
            releasable: make one whose memory ``Pool.release`` can give back to the device.

        Raises:
            CapabilityError: there are no releasable ones here.
        """
        return Pool(self, releasable=releasable)

    def poison(self, tensor: torch.Tensor) -> None:
        """Fill ``tensor`` with values that no correct result contains."""
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max // 3)

    def get_rng_state(self) -> torch.Tensor:
        """Return the state of the device's default random generator."""
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore what ``get_rng_state`` returned."""
        torch.set_rng_state(state)

    def replay_pace(self) -> ReplayPace | None:
        """Measure how fast graphs go now, or return None where that never changes.

        Takes some milliseconds and waits for the device.
        """
        measured = self._measured_pace()
        if measured is None:
            return None
        self._fastest = min(self._fastest, measured)
        return ReplayPace(microseconds=measured, fastest=self._fastest)

    def note_pace(self) -> None:
        """Measure the pace that captures must leave, unless it was measured before."""
        if self._fastest == math.inf:
            self.replay_pace()

    def _measured_pace(self) -> float | None:
        """Return the microseconds from kernel to kernel of a graph."""
        return None

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``'s data in host memory from which copies to the device are async."""
        return tensor

    def slot_attention(
        self, *, slots: int, rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> SlotAttention | None:
        """Return the device's own attention over a cache of slots, or None where it has none.

        Args:
            slots: requests that the cache holds.
            rows: positions of a slot; the cache rounds them up to the result's ``row_multiple``.
            heads, kv_heads: of queries, and of keys and values.
            head_dim: elements of a head, the same for keys and values.
            dtype: of queries, keys and values.
        """
        return None

    def wrap_compiled(self, run: Callable[..., Any], source: Any) -> Callable[..., Any]:
        """Return ``run``, a compiled piece of a step, in a form that a capture can record.

        Args:
            run: takes and returns tensors.
            source: the ``torch.fx.GraphModule`` that it was compiled from.
        """
        return run

    def own_pool(self, pool: Pool | None, *, releasable: bool = False) -> Pool:
        """Return ``pool``, or a new one for None.

        Raises:
            InputTypeError: it is no pool. StateError: it belongs to another backend.
            CapabilityError: as ``make_pool``.
        """
        if pool is None:
            return self.make_pool(releasable=True) if releasable else self.make_pool()
        if not isinstance(pool, Pool):
            raise InputTypeError(f"pool must come from backend.make_pool(), got {brief(pool)}")
        pool.check(self)
        return pool

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

        A tensor that the block leaves lies in the pool's memory: replays of graphs of the pool
        that were captured earlier may overwrite it. ``dg.capture`` gives its outputs their own.

        Args:
            graph: an empty graph of this backend.
            stream: the stream to capture on; None, or the default stream, means the pool's own.
            pool: the pool to allocate from, if it is not the graph's.
            capture_error_mode: which threads' unsafe calls make the capture fail: "global",
                "thread_local" or "relaxed".
            host_args: host arguments of regions in the block and their values at capture.

        Yields:
            the tracked host arguments by name, to hand to regions. A plain value equal to the
            declared one is taken as well.

        Raises:
            StateError: the graph is not empty.
            CaptureError: the block cannot be captured. The graph stays empty.
        """
        if not isinstance(graph, DeviceGraph):
            raise InputTypeError(f"graph must come from backend.make_graph(), got {brief(graph)}")
        if not (stream is None or hasattr(stream, "wait_stream")):
            raise InputTypeError(f"stream must be a stream of the device, got {brief(stream)}")
        own = graph.pool
        pool = self.own_pool(own if pool is None else pool)
        spec = HostSpec(host_args)
        scope = GraphScope(graph, accept_equal=True)
        with session(pool, scope, stream=stream, mode=capture_error_mode) as recording:
            if pool is not own:
                graph.use_pool(pool)
                recording.on_failure(functools.partial(graph.use_pool, own))
            recording.begin(graph, spec=spec)
            yield spec.tracked()
            recording.end()
