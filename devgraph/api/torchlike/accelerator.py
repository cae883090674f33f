"""A device that devgraph has no room for, through the graph that it registers with torch.

``torch.accelerator.Graph`` (torch 2.12 and newer) captures and replays on whatever device torch
calls the accelerator. What a graph may hold there is not known, so nothing is claimed of it.
"""

from __future__ import annotations

from typing import Any

import torch

from devgraph.api import registry
from devgraph.api.capabilities import Capabilities
from devgraph.api.errors import BackendUnavailableError
from devgraph.api.torchlike.base import TorchBackend


class _Graph:
    """The accelerator's graph with the calls of a vendor's own; the device chooses its mode."""

    def __init__(self) -> None:
        self._native = torch.accelerator.Graph()
        self.capture_end, self.replay = self._native.capture_end, self._native.replay
        self.reset = self._native.reset

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        self._native.graph_pool = pool
        self._native.capture_begin()


class AcceleratorBackend(TorchBackend):
    """Whatever device torch calls the accelerator, where no other backend is named after it."""

    name = "accelerator"
    graph_class_name = "MemPool"  # what the namespace must have; the graph is torch's own
    capabilities = Capabilities(capture_error_modes=("global",))

    def __init__(self) -> None:
        found = torch.accelerator.current_accelerator(check_available=True)
        self.device_type = "" if found is None else found.type
        super().__init__()

    def check_available(self) -> None:
        if not self.device_type:
            raise BackendUnavailableError("torch has no accelerator here: it sees the CPU only.")
        if self.device_type in registry.names():
            raise BackendUnavailableError(
                f"the accelerator {self.device_type!r} has a backend of its own: "
                f"get_backend({self.device_type!r}) says what it lacks."
            )
        super().check_available()
        try:
            _Graph()
        except Exception as error:
            raise BackendUnavailableError(
                f"torch.accelerator.Graph cannot be made for {self.device_type!r} "
                f"({type(error).__name__}: {error}): it takes torch 2.12 and a device that "
                f"registers its graph there (this is {torch.__version__})."
            ) from error

    def make_native_graph(self) -> Any:
        return _Graph()
