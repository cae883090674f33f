"""The Ascend backend: identity, capabilities, and what differs from other torch namespaces."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping

import attrs
import torch

from devgraph.api.errors import BackendUnavailableError
from devgraph.api.registry import AUTOLOAD
from devgraph.api.torchlike.base import FULL_BUILD
from devgraph.npu.attention import BLOCK, DTYPES, HEAD_DIMS, FusedSlotAttention
from devgraph.npu.device import GRAPH_STREAMS, NpuDevice
from devgraph.npu.diagnose import diagnose
from devgraph.npu.errors import UNJOINED, error_code, lost_reason
from devgraph.npu.graph import NpuGraph, NpuPool


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
        collectives=False,
        compilers=("eager",),
        node_ranges=False,  # the driver tells of nodes behind a capture, and not whose they are
        remakes_executables=False,
        max_streams=GRAPH_STREAMS,
    )
    # A breakable prefill holds a stream for each of its segments; a full one needs a stream.
    recommended_mode: Mapping[str, str] = {"prefill": "full"}

    attention_version: int = 2
    """The version of torch_npu's fused attention that engines get: 1 or 2."""

    def check_available(self) -> None:
        if self.namespace is None or "torch_npu" not in sys.modules:
            _import_torch_npu()
            self.namespace = getattr(torch, self.device_type, None)
        super().check_available()
        if os.environ.get("TASK_QUEUE_ENABLE") == "2":
            raise BackendUnavailableError(
                "TASK_QUEUE_ENABLE=2 is set, and torch_npu captures no graph in that mode: set it "
                "to 1 (the default) or 0."
            )

    @property
    def version(self) -> str:
        npu = sys.modules["torch_npu"]
        return f"CANN {_cann_version()}, torch_npu {npu.__version__}, torch {torch.__version__}"

    def details(self) -> dict[str, str]:
        found = diagnose()
        order = "first the replay, then its update" if self.replay_first else "update, then replay"
        return {
            "CANN": found.toolkit or "libraries found, but set_env.sh was not sourced",
            f"{AUTOLOAD}": "1: 'import torch' loads torch_npu" if found.autoload else "0",
            "updates": f"{order}; stuck after {self.channel.timeout:g} s",
            "streams": f"graphs hold {self.budget.held} of at most {self.budget.limit}",
            "attention": f"npu_fused_infer_attention_score, version {self.attention_version}",
        }

    def lost_reason(self, error: BaseException) -> str | None:
        return lost_reason(error)

    def is_unjoined(self, error: BaseException) -> bool:
        return error_code(error) == UNJOINED

    def slot_attention(
        self, *, slots: int, rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> FusedSlotAttention | None:
        if dtype not in DTYPES or head_dim not in HEAD_DIMS or heads % kv_heads:
            return None
        rows = -(-rows // BLOCK) * BLOCK
        return FusedSlotAttention(slots, rows, version=self.attention_version, device=self._device)


def _import_torch_npu() -> None:
    found = diagnose()
    if found.problems:
        raise BackendUnavailableError(f"backend 'npu' cannot be used: {found}")
    old = os.environ.get(AUTOLOAD)
    try:
        importlib.import_module("torch_npu")
    except Exception as error:
        raise BackendUnavailableError(
            f"importing torch_npu failed ({error}); {found}. Check that CANN's set_env.sh was "
            f"sourced and that its version is one that this torch_npu supports."
        ) from error
    finally:
        # torch_npu changes it for the whole process while it is imported.
        if old is not None:
            os.environ[AUTOLOAD] = old


def _cann_version() -> str:
    with contextlib.suppress(Exception):
        utils = importlib.import_module("torch_npu.npu.utils")
        return str(utils.get_cann_version())
    return "unknown"
