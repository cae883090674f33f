"""The pace of graphs: the time between two consecutive kernels of a replay.

On Hopper, ordinary launches slow down all graphs of the process. If too many of the latest launches
on a stream were ordinary, each kernel of a graph starts later. Every capture leaves ordinary
launches on its stream. Empty kernels, launched on that stream with programmatic serialization,
restore the pace. docs/fast-replay.md describes the experiments.
"""

from __future__ import annotations

import logging
from ctypes import addressof, c_int
from typing import Any

import torch

from devgraph.api.torchlike.node_calls import RuntimeCallError, structure
from devgraph.cuda.runtime import LaunchConfig, Runtime

logger = logging.getLogger(__name__)

LAUNCHES = 8
"""Number of empty kernels per recovery. In processes with one stream besides the engine's, eight
always restored the pace, but four did not (one H200, driver 580.159)."""

_KERNELS = 128
"""Number of kernels in the timed graph: 0.93 us per kernel at full pace, 1.10 us at slow pace."""

_EMPTY_KERNEL = b""".version 8.0
.target sm_90
.address_size 64
.visible .entry empty() { ret; }
"""
_PROGRAMMATIC_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

_Attribute = structure("CUlaunchAttribute", id=c_int, pad=c_int, value=c_int * 16)


class PaceKeeper:
    """An object that restores and measures the pace of graphs on ``device``."""

    def __init__(self, runtime: Runtime, device: torch.device) -> None:
        self._runtime = runtime
        self._device = device
        self._function = 0
        self._attribute = _Attribute(_PROGRAMMATIC_SERIALIZATION, 0, (c_int * 16)(1))
        self._config = LaunchConfig((1, 1, 1), (32, 1, 1), 0, None, addressof(self._attribute), 1)
        self._probe: Any = None
        self._event: Any = torch.cuda.Event
        # Programmatic serialization requires Hopper or a newer GPU.
        self._works = torch.cuda.get_device_capability(device) >= (9, 0)

    def recover(self, stream: int) -> None:
        """Launch empty kernels on ``stream`` to restore the pace; log a warning on failure."""
        if not self._works:
            return
        try:
            if not self._function:
                self._function = self._runtime.kernel(_EMPTY_KERNEL, b"empty")
            self._config.stream = stream
            config = addressof(self._config)
            for _ in range(LAUNCHES):
                self._runtime.call("LaunchKernelEx", config, self._function, None, None)
        except RuntimeCallError as error:
            logger.warning("graphs may stay at a slower pace after captures: %s", error)

    def measure(self, stream: Any) -> float:
        """Return the pace of a graph of tiny kernels, in microseconds.

        The call takes about a millisecond and blocks until the device is idle. The first call
        captures the graph on the torch stream ``stream``.
        """
        if self._probe is None:
            self._probe = self._captured(stream)
        graph, _ = self._probe
        graph.replay()
        taken: list[float] = []
        for _ in range(3):
            start, end = (self._event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(3):
                graph.replay()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) * 1e3 / 3 / _KERNELS)
        return min(taken)

    def _captured(self, stream: Any) -> tuple[Any, torch.Tensor]:
        graph, word = torch.cuda.CUDAGraph(), torch.zeros(1, device=self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            word.add_(1)
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(_KERNELS):
                word.add_(1)
            graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self.recover(stream.cuda_stream)
        return graph, word
