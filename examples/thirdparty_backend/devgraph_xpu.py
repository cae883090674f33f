"""A backend for Intel GPUs, as a package of its own: ``torch.xpu.XPUGraph`` behind devgraph.

Everything that torch's device namespaces share is in ``TorchBackend``: streams, pools, aliases,
capture, replay, clean failure. What is left is identity, capabilities, and what differs here.
The capabilities are the careful defaults until the conformance suite has passed on a device:

    pytest --pyargs devgraph.testing.conformance --devgraph-backend xpu

reports each one that works and is not declared.
"""

from __future__ import annotations

from typing import Any

from devgraph.api.capabilities import Capabilities
from devgraph.api.torchlike.base import TorchBackend


class _Graph:
    """A native graph whose capture has one error mode, so that the argument is not passed on."""

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
