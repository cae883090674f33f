"""The CUDA backend: capabilities, and code that no other torch-like backend needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from devgraph.api.errors import BackendUnavailableError
from devgraph.api.gates import GateChannel, Gates
from devgraph.api.torchlike.base import FULL_BUILD, Pages, TorchPool
from devgraph.api.torchlike.node_calls import NodeRuntime
from devgraph.api.torchlike.node_graph import NodeBackend, compilers
from devgraph.cuda.gates import DeviceGates
from devgraph.cuda.pace import PaceKeeper
from devgraph.cuda.pages import MappedPages, compiler
from devgraph.cuda.runtime import Runtime

_OF_NODES = ("region_update", "node_counts", "node_ranges", "remakes_executables", "loops", "gates")
"""Capabilities that need the driver's calls for graph nodes."""

_FREES_WORKSPACES = hasattr(torch.backends.cuda, "cublas_workspace_size")
"""Whether this torch may free cuBLAS workspaces at the end of a capture, as torch 2.14 does."""


class CudaBackend(NodeBackend):
    """NVIDIA GPUs through torch.cuda."""

    name = "cuda"
    device_type = "cuda"
    graph_class_name = "CUDAGraph"
    stream_handle_name = "cuda_stream"
    # cudaError: illegal address, launch timeout, assert, hardware stack, instruction, alignment,
    # address space, program counter, launch failure, ECC, unknown (CUDA Runtime API).
    sticky_errors = frozenset({214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 999})
    capabilities = attrs.evolve(FULL_BUILD, releasable_memory=True, loops=True, gates=True)
    needs: Mapping[str, str] = {
        **dict.fromkeys(_OF_NODES, "a driver of CUDA 12.3 or newer"),
        "releasable_memory": "a driver of CUDA 12.3 or newer and a C compiler, on Linux",
        "compilers": "Triton for inductor",
    }

    def __init__(self) -> None:
        super().__init__()
        self.use_runtime(Runtime.find(lambda: torch.cuda.mem_get_info(self._device)))
        updates = self.runtime is not None
        of_nodes: Any = dict.fromkeys(_OF_NODES, updates)
        self.capabilities = attrs.evolve(
            type(self).capabilities,
            **of_nodes,
            releasable_memory=updates and compiler() is not None,
            compilers=compilers(),
        )

    def use_runtime(self, runtime: NodeRuntime | None) -> None:
        super().use_runtime(runtime)
        self._pace = PaceKeeper(runtime, self._device) if isinstance(runtime, Runtime) else None

    def check_available(self) -> None:
        if torch.version.hip:
            raise BackendUnavailableError(
                "this is the ROCm build of torch: use backend 'rocm' instead of 'cuda'."
            )
        if torch.version.cuda is None:
            raise BackendUnavailableError(
                f"torch {torch.__version__} is built without CUDA: install a CUDA build of torch "
                f"(https://pytorch.org/get-started/locally)."
            )
        super().check_available()

    @property
    def version(self) -> str:
        return f"CUDA {torch.version.cuda}, torch {torch.__version__}"

    def _make_current_stream_id(self) -> Callable[[], int]:
        return functools.partial(torch._C._cuda_getCurrentRawStream, self._device.index)

    def is_host_read(self, error: BaseException) -> bool:
        # cudaErrorStreamCaptureUnsupported, or torch's own refusal of a copy to pageable memory. If
        # torch provides no error code, only the text identifies the error.
        text = str(error)
        return (
            getattr(error, "error_code", None) == 900
            or "not permitted when stream is capturing" in text
            or "during CUDA graph capture unless the CPU tensor is pinned" in text
        )

    def join(self, current: Any, side: Any) -> None:
        super().join(current, side)
        # Engines run warm-ups on the current stream, often a temporary stream. Those launches also
        # slow graphs down, so recover the pace on both streams.
        for stream in (side, current):
            self.recover_pace(stream)

    def recover_pace(self, stream: Any) -> None:
        """Restore the full pace of graphs after launches on the torch stream ``stream``.

        Engines that capture on their own should call this method after each capture.
        """
        if self._pace is not None:
            self._pace.recover(stream.cuda_stream)

    def details(self) -> dict[str, str]:
        pace = self.after_captures()
        text = "unknown" if pace is None else f"{pace:.2f} us from kernel to kernel"
        return {"pace of graphs": text}

    def after_captures(self) -> float | None:
        if self._pace is None:
            return None
        with self.exclusive(), self.on_device():
            return self._pace.measure(self.capture_stream)

    def make_gate_channel(self, gates: Gates) -> GateChannel:
        return DeviceGates(self) if self.capabilities.gates else super().make_gate_channel(gates)

    def make_pages(self) -> Pages:
        return MappedPages.of_process()

    def is_current(self) -> bool:
        return bool(torch._C._cuda_getDevice() == self._device.index)

    def begin_native(self, native: Any, pool: TorchPool, mode: str) -> None:
        if _FREES_WORKSPACES:
            # At the end of a capture, torch frees the stream's cuBLAS workspace, even if the
            # workspace is older than the capture and the graph uses it. End an empty capture first,
            # so that this capture allocates a workspace in its own pool.
            empty = self.make_native_graph()
            empty.capture_begin(capture_error_mode=mode)  # The empty graph frees its own pool.
            self.end_native(empty)
            empty.reset()
        super().begin_native(native, pool, mode)

    def prepare_stream(self) -> None:
        # Create cuBLAS's handle for this thread and stream, because a capture cannot create it.
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
