"""An out-of-tree platform of SGLang whose decode and prefill graphs are devgraph's."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from devgraph.integrations.sglang.backends import MODEL, full_backend
from devgraph.integrations.sglang.install import install


@functools.cache
def platform_class() -> Any:
    """Return the class that an out-of-tree platform derives from."""
    interface: Any = importlib.import_module("sglang.srt.platforms.interface")

    class DeviceGraphPlatform(interface.SRTPlatform):  # type: ignore[misc]
        """A platform of SGLang that captures and replays through devgraph.

        Say the identity of the device, its memory and its attention backend, as for any platform
        of SGLang; the graph runners are SGLang's own, over devgraph's backend of the device.
        """

        _enum = interface.PlatformEnum.OOT
        capabilities = interface.PlatformCapabilities(graph_capture=True)

        def init_backend(self) -> None:
            """Called by SGLang in each worker, before it captures."""
            install()

        def get_graph_runner_cls(self) -> Any:
            return importlib.import_module(f"{MODEL}.runner").DecodeCudaGraphRunner

        def get_full_graph_backend_cls(self) -> Any:
            return full_backend()

    return DeviceGraphPlatform
