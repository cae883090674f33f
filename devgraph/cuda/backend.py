"""The CUDA backend: identity, capabilities, and what differs from other torch namespaces."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from devgraph.api.capabilities import Capabilities
from devgraph.api.errors import BackendUnavailableError
from devgraph.api.torchlike import TorchBackend, TorchGraph, TorchPool
from devgraph.cuda.runtime import Runtime

__all__ = ["CudaBackend", "CudaGraph", "make_backend"]

# CUDA errors after which every later call of the process fails (CUDA Runtime API, cudaError:
# illegal address, launch timeout, assert, hardware stack, instruction, alignment, address space,
# program counter, launch failure, ECC, unknown).
_STICKY = frozenset({214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 999})


class CudaGraph(TorchGraph):
    """A torch.cuda.CUDAGraph."""

    _torch: CudaBackend

    def __init__(self, backend: CudaBackend, pool: TorchPool) -> None:
        super().__init__(backend, pool)
        self._nodes: int | None = None

    def _end(self) -> None:
        runtime = self._torch.runtime
        if runtime is not None:
            self._nodes = runtime.captured_nodes(self._torch.current_stream_id())
        super()._end()

    def _finish(self) -> None:
        runtime = self._torch.runtime
        if runtime is not None and self._nodes:
            runtime.upload(self._native.raw_cuda_graph_exec(), self._torch.current_stream_id())

    def _size(self) -> tuple[int | None, int]:
        return self._nodes, 0

    def _free(self) -> None:
        super()._free()
        self._nodes = None


class CudaBackend(TorchBackend):
    """NVIDIA GPUs through torch.cuda."""

    name = "cuda"
    device_type = "cuda"
    graph_class_name = "CUDAGraph"
    graph_type = CudaGraph

    def __init__(self) -> None:
        super().__init__()
        self.runtime = Runtime.find()
        self.capabilities = Capabilities(
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
        return lambda: raw(index)

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

    def prepare_stream(self) -> None:
        # cuBLAS cannot create its handle for this thread and stream inside a capture.
        torch.cuda.current_blas_handle()


def make_backend() -> CudaBackend:
    """Return the CUDA backend or raise BackendUnavailableError with the way to fix it."""
    return CudaBackend()
