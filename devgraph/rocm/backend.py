"""The ROCm backend: capabilities, installation checks, and workarounds for HIP."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

from devgraph.api.errors import BackendUnavailableError
from devgraph.api.gates import GateChannel, Gates
from devgraph.api.torchlike.base import FULL_BUILD, TorchPool
from devgraph.api.torchlike.guards import MOST_STREAMS
from devgraph.api.torchlike.node_graph import NodeBackend, compilers
from devgraph.rocm.gates import ValueGates, captures_values
from devgraph.rocm.guards import HostReadGuard
from devgraph.rocm.runtime import Runtime
from devgraph.rocm.verification import Verification, VerifiedUpdates

_INSTALL = (
    "Install a ROCm build of torch: choose ROCm on https://pytorch.org/get-started/locally, and "
    "use the pip command given there. The command also installs Triton from PyTorch's index, "
    "because the package pytorch-triton-rocm on PyPI is an old placeholder."
)


class RocmBackend(NodeBackend):
    """AMD GPUs through the ROCm build of torch, whose namespace is also torch.cuda."""

    name = "rocm"
    device_type = "cuda"
    graph_class_name = "CUDAGraph"
    stream_handle_name = "cuda_stream"
    # hipError_t: uncorrectable memory error, illegal address, launch time-out, assertion, launch
    # failure, unknown (hip/hip_runtime_api.h).
    sticky_errors = frozenset({214, 700, 702, 710, 719, 999})
    capabilities = attrs.evolve(FULL_BUILD, gates=True)
    unproven = "never ran on hardware; it is tested over a simulated library"
    needs: Mapping[str, str] = {
        "concurrent_threads": "HIP 7.14 or newer",
        "gates": "a runtime that can capture waits for values",
        "compilers": "Triton from PyTorch's ROCm index for inductor",
    }
    runtime: Runtime

    def __init__(self) -> None:
        super().__init__()
        self.attach(Runtime.find())

    def attach(self, runtime: Runtime) -> None:
        self.use_runtime(runtime)
        self.retired: set[int] = set()
        """Streams that still capture after a failed capture; they are never used again."""
        self.verification = Verification(runtime, lambda: self.current_stream_id())
        self.update_strategy_type = functools.partial(VerifiedUpdates, self.verification)
        self._prepared: set[tuple[int, int]] = set()
        reports = runtime.version.reports_unsafe_calls
        self._guard = None if reports else HostReadGuard(lambda t: self.is_device_memory(t))
        self.capabilities = attrs.evolve(
            type(self).capabilities,
            concurrent_threads=reports,
            gates=captures_values(runtime, self._device),
            compilers=compilers(),
        )

    def check_available(self) -> None:
        if not torch.version.hip:
            raise BackendUnavailableError(
                f"torch {torch.__version__} is built without ROCm. {_INSTALL}"
            )
        if not torch.cuda.is_available():
            raise BackendUnavailableError(f"{self._why_no_device()} {_INSTALL}")
        super().check_available()

    @staticmethod
    def _why_no_device() -> str:
        build = f"torch {torch.__version__} (HIP {torch.version.hip}) sees no AMD GPU"
        if not os.path.exists("/dev/kfd"):
            return (
                f"{build}: /dev/kfd does not exist. Load the amdgpu driver, or pass the device to "
                f"the container."
            )
        if not os.access("/dev/kfd", os.R_OK | os.W_OK):
            return f"{build}: /dev/kfd is not accessible. Add the user to the group render."
        return (
            f"{build}. Check whether rocminfo lists a GPU, and whether HIP_VISIBLE_DEVICES or "
            f"ROCR_VISIBLE_DEVICES hides the GPU."
        )

    @property
    def version(self) -> str:
        return f"HIP {self.runtime.version}, torch {torch.__version__}"

    def details(self) -> dict[str, str]:
        details = {
            "library": self.runtime.path,
            "missing functions": ", ".join(sorted(self.runtime.missing)) or "none",
            "unsafe calls in a capture": "not reported before HIP 7.14; devgraph refuses host "
            "reads, and prove() finds the others"
            if self._guard
            else "reported by the runtime",
        }
        if (updates := self.verification.updates) is not None:
            details["updates"] = (
                "written into executables, verified at first use"
                if updates
                else "ignored by this runtime, so every key has its own executable"
            )
            reported = self.runtime.reports_copies
            details["copies in regions"] = (
                "updated" if reported else "refused: their addresses are not reported"
            )
        return details

    def _make_current_stream_id(self) -> Callable[[], int]:
        return functools.partial(torch._C._cuda_getCurrentRawStream, self._device.index)

    def fresh_stream(self) -> Any:
        # torch reuses its streams, so it may return a stream that is retired or still captures.
        for _ in range(MOST_STREAMS):
            stream = self.namespace.Stream(self._device)
            handle = stream.cuda_stream
            if handle not in self.retired and not self.runtime.capturing([handle]):
                return stream
        raise BackendUnavailableError(
            "all streams of torch are still capturing after failed captures. Start a new process, "
            "and make regions join the streams that they fork."
        )

    def retire_stream(self, stream: Any) -> None:
        self.retired.add(stream.cuda_stream)
        super().retire_stream(stream)

    def reopen_capture(self) -> None:
        stream = self.current_stream_id()
        if self.runtime.capture_of(stream) is not None:
            # On HIP 7.2, a second attempt to begin or end this capture crashes the process.
            raise RuntimeError(f"the capture on stream {stream:#x} could not be ended")
        super().reopen_capture()

    def captures_on(self, stream: Any) -> bool:
        return super().captures_on(stream) and stream.cuda_stream not in self.retired

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        if self._guard is None:
            return super().guard()
        self._guard.on = False
        return self._guard

    def make_gate_channel(self, gates: Gates) -> GateChannel:
        return ValueGates(self) if self.capabilities.gates else super().make_gate_channel(gates)

    def join(self, current: Any, side: Any) -> None:
        # A wait for a stream that still captures would join the current stream to that capture.
        if side.cuda_stream not in self.retired:
            super().join(current, side)

    def is_device_memory(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self.device_type

    def begin_native(self, native: Any, pool: TorchPool, mode: str) -> None:
        super().begin_native(native, pool, mode)
        if self._guard is not None:
            self._guard.on = True

    def end_native(self, native: Any) -> None:
        if self._guard is not None:
            self._guard.on = False
        super().end_native(native)

    def prepare_stream(self) -> None:
        # On first use, hipBLAS and hipBLASLt create a handle for each thread and stream, which a
        # capture forbids. A matrix product with a bias creates both handles.
        key = (threading.get_ident(), self.current_stream_id())
        if key in self._prepared:
            return
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
        square = torch.zeros(16, 16, dtype=torch.bfloat16, device=self._device)
        torch.addmm(square[0], square, square)
        self._prepared.add(key)
