"""What this HIP runtime really does, found out by capturing and updating small graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch

from devgraph.api.errors import UpdateTopologyError
from devgraph.api.torchlike.nodes import RegionPattern, RuntimeCallError

if TYPE_CHECKING:
    from devgraph.rocm.backend import RocmBackend

__all__ = ["Findings", "probe"]


@attrs.frozen(kw_only=True)
class Findings:
    """What a runtime was found to do."""

    reports_copies: bool
    """A captured copy tells its addresses. Before HIP 7 they are uninitialised memory."""
    updates: bool
    """A parameter that was written into an executable is used by its next launch."""


def probe(backend: RocmBackend) -> Findings:
    """Find out, on the current stream, which must not be capturing."""
    words = torch.zeros(4, dtype=torch.int64, device=backend.device)
    return Findings(
        reports_copies=_reports_copies(backend, words), updates=_updates(backend, words)
    )


def _captured(backend: RocmBackend, work: Any) -> int:
    stream = backend.current_stream_id()
    backend.runtime.begin_capture(stream)
    try:
        work()
    finally:
        graph = backend.runtime.end_capture(stream)
    return graph


def _reports_copies(backend: RocmBackend, words: torch.Tensor) -> bool:
    runtime = backend.runtime
    graph = _captured(backend, lambda: words[:2].copy_(words[2:]))
    try:
        (node,) = runtime.nodes(graph)
        if runtime.kind(node) != "memcpy":
            return False
        params = runtime.params("memcpy", node)
        addresses = (params.dstPtr.ptr, params.srcPtr.ptr, params.extent.width)
        return addresses == (words.data_ptr(), words[2:].data_ptr(), 2 * words.element_size())
    except UpdateTopologyError:
        return False
    finally:
        runtime.destroy(graph)


def _updates(backend: RocmBackend, words: torch.Tensor) -> bool:
    runtime, stream = backend.runtime, backend.current_stream_id()
    first = _captured(backend, lambda: words[:1].fill_(1))
    second = _captured(backend, lambda: words[:1].fill_(2))
    executable = runtime.instantiate(first)
    try:
        nodes = runtime.nodes(first)
        pattern = RegionPattern(runtime, first, [("probe", nodes)])
        (updates,) = pattern.match([0], second, [len(nodes)])
        runtime.write(updates, executable)
        runtime.bound(executable, stream)()
        return int(words[0].item()) == 2
    except RuntimeCallError:
        return False
    finally:
        runtime.destroy_executable(executable)
        runtime.destroy(second)
        runtime.destroy(first)
