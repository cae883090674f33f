"""The public package breakable-cuda-graphs beside our policies, where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch

from devgraph.api.backend import Backend
from devgraph.cli.workload import Decoder, attention

__all__ = ["PublicBreakable", "public_breakable"]

_MODULE = "breakable_cuda_graphs"


class PublicBreakable:
    """A step of ``bench`` that the package captured with its breaks at the same function.

    The length, which the package hands to no eager body, is a field that the body reads.

    Args:
        package: the imported package.
        model, ids, where: the step and its bound tensors, on a device of the package.
        kv_len: the length at capture.
    """

    name = "breakable-cuda-graphs"

    def __init__(
        self, package: Any, model: Decoder, ids: torch.Tensor, where: torch.Tensor, kv_len: int
    ) -> None:
        self._kv_len = kv_len
        self._graph = package.BreakableCUDAGraph()

        def attend(*tensors: torch.Tensor) -> None:
            attention(*tensors, kv_len=self._kv_len)

        streams = torch.get_device_module(ids.device)
        side = streams.Stream()
        side.wait_stream(streams.current_stream())
        with streams.stream(side):
            for _ in range(2):
                model(ids, where, kv_len=kv_len)
        streams.current_stream().wait_stream(side)
        with package.breakable_graph(self._graph):
            self._outputs = model.step(ids, where, package.no_graph(attend))

    def replay(self, *, kv_len: int) -> torch.Tensor:
        """Run the step over ``kv_len`` rows."""
        self._kv_len = kv_len
        self._graph.replay()
        return self._outputs


def public_breakable(
    backend: Backend, model: Decoder, ids: torch.Tensor, where: torch.Tensor, kv_len: int
) -> PublicBreakable | None:
    """Return the step as the package runs it, or None without the package or its backend."""
    if backend.name != "cuda" or importlib.util.find_spec(_MODULE) is None:
        return None
    return PublicBreakable(importlib.import_module(_MODULE), model, ids, where, kv_len)
