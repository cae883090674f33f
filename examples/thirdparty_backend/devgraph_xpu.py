"""A backend for Intel GPUs in a separate package, based on ``torch.xpu.XPUGraph``.

``TorchBackend`` implements everything that torch's device namespaces have in common: streams,
pools, aliases, capture, replay and cleanup after failures. This module declares the name and the
capabilities, and overrides one method. The capabilities have conservative defaults until the
conformance suite has passed on a device. Declare others one at a time, and test each with this
command:

    pytest --pyargs devgraph.testing.conformance --devgraph-backend xpu
"""

from __future__ import annotations

from typing import Any

from devgraph.api.capabilities import Capabilities
from devgraph.api.torchlike.base import TorchBackend


class _Graph:
    """A native graph that ignores the error mode, because XPU captures have only one."""

    def __init__(self, native: Any) -> None:
        self._begin = native.capture_begin
        self.capture_end, self.replay, self.reset = native.capture_end, native.replay, native.reset

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        self._begin(pool=pool)


class XpuBackend(TorchBackend):
    name = "xpu"
    device_type = "xpu"
    graph_class_name = "XPUGraph"
    capabilities = Capabilities(capture_error_modes=("global",))

    def make_native_graph(self) -> Any:
        return _Graph(super().make_native_graph())
