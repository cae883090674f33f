"""The CUDA backend: identity, capabilities, and what differs from other torch namespaces."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from devgraph.api.capabilities import Capabilities
from devgraph.api.errors import BackendUnavailableError
from devgraph.api.torchlike import TorchBackend, TorchPool
from devgraph.cuda.graph import CudaGraph
from devgraph.cuda.recording import ExecutableMeter
from devgraph.cuda.runtime import Runtime, RuntimeCallError
from devgraph.cuda.streams import SideStreams

__all__ = ["CudaBackend", "make_backend"]

# CUDA errors after which every later call of the process fails (CUDA Runtime API, cudaError:
# illegal address, launch timeout, assert, hardware stack, instruction, alignment, address space,
# program counter, launch failure, ECC, unknown).
_STICKY = frozenset({214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 999})


class CudaBackend(TorchBackend):
    """NVIDIA GPUs through torch.cuda."""

    name = "cuda"
    device_type = "cuda"
    graph_class_name = "CUDAGraph"
    graph_type = CudaGraph

    def __init__(self) -> None:
        super().__init__()
        self.runtime = Runtime.find()
        self.meter = ExecutableMeter(lambda: int(torch.cuda.mem_get_info(self._device)[0]))
        if self.runtime is not None:
            self.side_streams = SideStreams(self.runtime, torch.cuda.Stream, self._device)
        self._lazy_generators: bool | None = None
        self.capabilities = Capabilities(
            region_update=self.runtime is not None,
            shared_pool=True,
            rng=True,
            refuses_host_reads=True,
            streams=True,
            capture_error_modes=("thread_local", "global", "relaxed"),
            concurrent_threads=True,
            collectives=True,
            node_counts=self.runtime is not None,
        )

    def check_available(self) -> None:
        if torch.version.hip:
            raise BackendUnavailableError(
                "this is the ROCm build of torch: use backend 'rocm' instead of 'cuda'."
            )
        if torch.version.cuda is None:
            raise BackendUnavailableError(
                f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch "
                f"(https://pytorch.org/get-started/locally) and devgraph[cuda]."
            )
        super().check_available()

    @property
    def version(self) -> str:
        return f"CUDA {torch.version.cuda}, torch {torch.__version__}"

    def _make_current_stream_id(self) -> Callable[[], int]:
        index = self._device.index
        raw = torch._C._cuda_getCurrentRawStream
        return functools.partial(raw, index)

    def lost_reason(self, error: BaseException) -> str | None:
        code = getattr(error, "error_code", None)
        return str(error).splitlines()[0] if code in _STICKY else None

    def end_native(self, native: Any) -> None:
        with warnings.catch_warnings():
            # Empty segments between two breaks are legal here; GraphInfo counts nodes instead.
            warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
            native.capture_end()

    def reopen_capture(self) -> None:
        if self.runtime is None:
            raise RuntimeError("cuda-python is not installed")
        self.runtime.begin_capture(self.current_stream_id())

    def guarded(self, launch: Callable[[], None]) -> Callable[[], None]:
        """Return ``launch`` made safe for a thread whose current device is another one."""
        elsewhere, on_device = self.elsewhere, self.on_device

        def run() -> None:
            if elsewhere():
                with on_device():
                    launch()
            else:
                launch()

        return run

    def elsewhere(self) -> bool:
        return bool(torch._C._cuda_getDevice() != self._device.index)

    def draws_random(self, native: Any, pool: TorchPool) -> bool:
        """Replay ``native`` once; return whether that drew random numbers.

        A torch that registers generators with every capture tells by the default generator's
        offset (another generator could not be captured). One that registers them when they are
        first used refuses to replay such a graph, and no other, inside a capture.
        """
        generator = torch.cuda.default_generators[self._device.index]
        before = generator.get_offset()
        native.replay()
        if generator.get_offset() != before:
            return True
        if self._lazy_generators is None:
            self._lazy_generators = not self._refuses_in_capture(pool.keeper, pool)
        return self._lazy_generators and self._refuses_in_capture(native, pool)

    def _refuses_in_capture(self, native: Any, pool: TorchPool) -> bool:
        runtime = self.runtime
        if runtime is None:
            return True
        with torch.cuda.stream(pool.stream):
            stream = self.current_stream_id()
            runtime.begin_capture(stream)
            try:
                native.replay()
            except RuntimeError:
                return True
            finally:
                with contextlib.suppress(RuntimeCallError):
                    runtime.destroy(runtime.end_capture(stream))
        return False

    def is_random_refusal(self, error: BaseException) -> bool:
        """Whether torch raised ``error`` because an operation drew random numbers in a capture
        that it does not know of."""
        return "generator" in str(error).lower()

    def prepare_stream(self) -> None:
        # cuBLAS cannot create its handle for this thread and stream inside a capture.
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]


def make_backend() -> CudaBackend:
    """Return the CUDA backend or raise BackendUnavailableError with the way to fix it."""
    return CudaBackend()
