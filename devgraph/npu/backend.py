"""The Ascend backend: capabilities, installation checks, and fused attention."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec

import attrs
import torch

from devgraph.api.environment import AUTOLOAD_WAS_ON
from devgraph.api.errors import BackendUnavailableError
from devgraph.api.gates import GateChannel, Gates
from devgraph.api.marks.source import add_machinery
from devgraph.api.registry import AUTOLOAD, installed_version
from devgraph.api.torchlike.base import FULL_BUILD
from devgraph.npu.attention import BLOCK, DTYPES, HEAD_DIMS, FusedSlotAttention
from devgraph.npu.device import GRAPH_STREAMS, NpuDevice
from devgraph.npu.errors import HOST_READS, UNJOINED, error_code, lost_reason
from devgraph.npu.gates import ValueGates, gate_calls
from devgraph.npu.graph import NpuGraph, NpuPool

NEWEST = "2.14"
"""Newest torch version with a matching torch_npu on PyPI (as of 2026)."""


class NpuBackend(NpuDevice):
    """Ascend NPUs through torch_npu."""

    name = "npu"
    device_type = "npu"
    graph_class_name = "NPUGraph"
    graph_type = NpuGraph
    pool_type = NpuPool
    capabilities = attrs.evolve(
        FULL_BUILD,
        async_update=True,
        collectives=True,  # captures of HCCL are tested only in a simulation
        compilers=("eager",),
        gates=True,
        node_ranges=False,  # The driver lists nodes only after the capture, without their regions.
        remakes_executables=False,
        max_streams=GRAPH_STREAMS,
    )
    # A breakable prefill holds one stream per segment, but a full prefill only one stream.
    recommended_mode: Mapping[str, str] = {"prefill": "full"}
    needs: Mapping[str, str] = {"gates": "a CANN release that supports waits for values"}
    unproven = "never ran on hardware; it is tested over a simulated driver"

    attention_version: int = 2
    """Version of torch_npu's fused attention that engines use: 1 or 2."""

    def __init__(self) -> None:
        super().__init__()
        self.extensions = {"slot_attention": self.slot_attention}
        self._gate_calls = gate_calls()
        gates = self._gate_calls is not None
        self.capabilities = attrs.evolve(type(self).capabilities, gates=gates)

    def make_gate_channel(self, gates: Gates) -> GateChannel:
        calls = self._gate_calls
        return super().make_gate_channel(gates) if calls is None else ValueGates(self, calls)

    def check_available(self) -> None:
        if self.namespace is None or "torch_npu" not in sys.modules:
            _import_torch_npu()
            self.namespace = getattr(torch, self.device_type, None)
        add_machinery("torch_npu")
        super().check_available()
        if os.environ.get("TASK_QUEUE_ENABLE") == "2":
            raise BackendUnavailableError(
                "TASK_QUEUE_ENABLE=2 is set, but torch_npu cannot capture graphs in that mode; set "
                "TASK_QUEUE_ENABLE to 1 (the default) or 0."
            )

    @property
    def version(self) -> str:
        npu = sys.modules["torch_npu"]
        return f"CANN {_cann_version()}, torch_npu {npu.__version__}, torch {torch.__version__}"

    def details(self) -> dict[str, str]:
        diagnosis = Diagnosis.of_host()
        return {
            "CANN": diagnosis.toolkit or "libraries found, but set_env.sh was not sourced",
            AUTOLOAD: "1: 'import torch' loads torch_npu" if diagnosis.autoload else "0",
            "streams": self.streams_held,
        }

    def lost_reason(self, error: BaseException) -> str | None:
        return lost_reason(error)

    def is_host_read(self, error: BaseException) -> bool:
        return error_code(error) in HOST_READS

    def is_unjoined(self, error: BaseException) -> bool:
        return error_code(error) == UNJOINED

    def slot_attention(
        self, *, slots: int, rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> FusedSlotAttention | None:
        """Return fused attention over a cache of slots, or None for an unsupported shape.

        Args:
            slots: number of requests in the cache.
            rows: number of positions in a slot; the cache rounds it up to a multiple of
                ``row_multiple``.
            heads: number of query heads.
            kv_heads: number of key and value heads.
            head_dim: number of elements in a head of keys and values.
            dtype: dtype of queries, keys and values.
        """
        if dtype not in DTYPES or head_dim not in HEAD_DIMS or heads % kv_heads:
            return None
        rows = -(-rows // BLOCK) * BLOCK
        return FusedSlotAttention(slots, rows, version=self.attention_version, device=self._device)


@attrs.frozen(kw_only=True)
class Diagnosis:
    """The Ascend software on this host, detected without importing torch_npu.

    If CANN is missing, importing torch_npu breaks even ``import torch``.
    """

    torch: str
    torch_npu: str | None
    """The installed version, or None if torch_npu is not installed."""
    missing_libraries: tuple[str, ...]
    """CANN libraries that the loader cannot find."""
    toolkit: str | None
    """The folder of CANN according to environment variables."""
    autoload: bool
    """Whether ``import torch`` also imports torch_npu."""

    @staticmethod
    def of_host() -> Diagnosis:
        """Inspect the packages, libraries and environment of this host."""
        libraries = "libascendcl.so", "libhccl.so"  # torch_npu needs both.
        return Diagnosis(
            torch=torch.__version__,
            torch_npu=installed_version("torch_npu") if find_spec("torch_npu") else None,
            missing_libraries=tuple(name for name in libraries if not _loadable(name)),
            toolkit=os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME"),
            autoload=os.environ.get(AUTOLOAD, "1") == "1" or AUTOLOAD_WAS_ON in os.environ,
        )

    @property
    def problems(self) -> list[str]:
        """Problems that prevent the import of torch_npu, each with a solution."""
        problems, version = [], _minor(self.torch)
        published = [*map(int, version.split("."))] <= [*map(int, NEWEST.split("."))]
        if self.torch_npu is None:
            matching = f"torch-npu=={version}.*"
            newest = f"torch=={NEWEST}.* torch-npu=={NEWEST}.* (none is known for torch {version})"
            problems.append(
                f"torch_npu is not installed: pip install {matching if published else newest}, and "
                f"install CANN"
            )
        elif version != _minor(self.torch_npu):
            alternative = f" or torch-npu=={version}.*" if published else ""
            problems.append(
                f"torch_npu {self.torch_npu} does not match torch {self.torch}: install "
                f"torch=={_minor(self.torch_npu)}.*{alternative}"
            )
        if self.torch_npu is not None and self.missing_libraries:
            workaround = f"; until then set {AUTOLOAD}=0, or 'import torch' fails as well"
            problems.append(
                f"{' and '.join(self.missing_libraries)} cannot be loaded: install CANN and run "
                f"'source set_env.sh' of its folder ({self.toolkit or 'not set up'})"
                f"{workaround if self.autoload else ''}"
            )
        return problems

    def __str__(self) -> str:
        state = "; ".join(self.problems) or "torch_npu and CANN are installed"
        return (
            f"{state} (torch {self.torch}, torch_npu {self.torch_npu or 'not installed'}, "
            f"CANN {self.toolkit or 'not set up'}, {AUTOLOAD}={'1' if self.autoload else '0'})"
        )


def _import_torch_npu() -> None:
    diagnosis = Diagnosis.of_host()
    if diagnosis.problems:
        raise BackendUnavailableError(f"backend 'npu' cannot be used: {diagnosis}")
    old = os.environ.get(AUTOLOAD)
    try:
        importlib.import_module("torch_npu")
    except Exception as error:
        raise BackendUnavailableError(
            f"importing torch_npu failed ({error}); {diagnosis}. Check that CANN's set_env.sh was "
            f"sourced and that this torch_npu supports this version of CANN."
        ) from error
    finally:
        # The import changes this variable for the whole process, so restore it.
        if old is not None:
            os.environ[AUTOLOAD] = old


def _cann_version() -> str:
    with contextlib.suppress(Exception):
        utils = importlib.import_module("torch_npu.npu.utils")
        return str(utils.get_cann_version())
    return "unknown"


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _loadable(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
