"""A backend for devices that have no other backend and register a graph class with torch.

``torch.accelerator.Graph`` (torch 2.12 and newer) captures and replays on torch's current
accelerator. The features of such a graph are unknown, so the backend declares no capabilities.
"""

from __future__ import annotations

from typing import Any

import torch

from devgraph.api import registry
from devgraph.api.capabilities import Capabilities
from devgraph.api.errors import BackendUnavailableError
from devgraph.api.torchlike.base import TorchBackend


class _Graph:
    """An adapter of ``torch.accelerator.Graph`` to the interface of a vendor's graph class."""

    def __init__(self) -> None:
        self._native = torch.accelerator.Graph()
        self.capture_end, self.replay = self._native.capture_end, self._native.replay
        self.reset = self._native.reset

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        self._native.graph_pool = pool
        self._native.capture_begin()


class AcceleratorBackend(TorchBackend):
    """torch's current accelerator, if no other backend has its name."""

    name = "accelerator"
    graph_class_name = "MemPool"  # required in the namespace; the graph is ``torch.accelerator``'s
    capabilities = Capabilities(capture_error_modes=("global",))

    def __init__(self) -> None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None:
            raise BackendUnavailableError("torch has no accelerator here: it sees the CPU only.")
        self.device_type = accelerator.type
        super().__init__()

    def check_available(self) -> None:
        if self.device_type in registry.names():
            raise BackendUnavailableError(
                f"the accelerator {self.device_type!r} has a backend of its own: "
                f"get_backend({self.device_type!r}) reports why it is unavailable."
            )
        super().check_available()
        try:
            _Graph()
        except Exception as error:
            raise BackendUnavailableError(
                f"torch.accelerator.Graph cannot be created for {self.device_type!r} "
                f"({type(error).__name__}: {error}). It needs torch 2.12 or newer and a device "
                f"that registers its graph (this is torch {torch.__version__})."
            ) from error

    def make_native_graph(self) -> Any:
        return _Graph()
