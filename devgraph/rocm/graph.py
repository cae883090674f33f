"""RocmGraph: updates that are counted, verified, and avoided where the runtime cannot do them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from devgraph.api.errors import UpdateError, UpdateTopologyError
from devgraph.api.executable import Executable, Finding
from devgraph.api.graph import GraphState
from devgraph.api.marks.marks import Mark
from devgraph.api.torchlike.base import TorchPool
from devgraph.api.torchlike.node_graph import NodeGraph
from devgraph.api.torchlike.recording import NodeRecording

if TYPE_CHECKING:
    from devgraph.rocm.backend import RocmBackend, RocmPool

__all__ = ["LEAKED_BYTES_PER_NODE", "LEAK_BUDGET_BYTES", "RocmGraph"]

logger = logging.getLogger(__name__)

LEAKED_BYTES_PER_NODE = 5800
"""Device memory that a runtime keeps for every node it writes, until the executable goes: 2000
updates of 32 nodes took 354 MiB on an MI300X (ROCm/rocm-systems pull request 11434)."""

LEAK_BUDGET_BYTES = 32 * 2**20
"""What updates of one executable may leak before it is made anew: at 180 region nodes this is
every 32nd update, which spreads the 2-3 ms of making one to less than 0.1 ms."""


_State = tuple[int, int]
"""The number of a recording, and its executable; 0 for torch's own, which others share."""


class _Verified(Finding["RocmGraph"]):
    """Verifies in its first launch that the runtime uses the parameters that were written.

    Args:
        state: what is launched.
        executable: launches it.
    """

    def __init__(self, graph: RocmGraph, state: _State, executable: Executable) -> None:
        super().__init__(graph)
        self._state = state
        self._executable = executable

    def find(self) -> Executable:
        inner = self._executable
        if isinstance(inner, Finding):
            self._executable = inner.find()
        else:
            inner.launch()
        self.graph._verify(self._state)
        return self._executable


class RocmGraph(NodeGraph):
    """A graph of the ROCm build of torch.

    Behind the regions it records one more node, which writes the recording's number into the word
    of its pool. After the first launch of a recording that was written or built, the word tells
    whether the runtime used the new parameters; a stale one means that the launch was wrong. It
    tells of an executable, not of every node: see docs/rocm.md.
    """

    pool: RocmPool

    _torch: RocmBackend
    backend: RocmBackend

    def __init__(self, backend: RocmBackend, pool: TorchPool) -> None:
        super().__init__(backend, pool)
        self._written = 0
        self._as_captured = True
        self._verified: set[_State] = set()
        self._own_verified = False
        """Whether torch's executable, since it was made last, was seen to use what was written."""

    @property
    def leaked_bytes(self) -> int:
        """What updates of torch's executable may have leaked since it was made."""
        return self._written * LEAKED_BYTES_PER_NODE

    # Capture.

    def _make_native(self) -> Any:
        if self._updatable:
            self._torch.find_out()
            self.pool.make_word()
        return super()._make_native()

    def _begin(self, mode: str) -> None:
        super()._begin(mode)
        self._torch.guard_reads(True)

    def _end(self) -> Executable:
        self._torch.guard_reads(False)
        return super()._end()

    def _abort(self) -> None:
        self._torch.guard_reads(False)
        super()._abort()

    def _forget(self) -> None:
        super()._forget()
        self._written = 0
        self._as_captured = True
        self._verified.clear()
        self._own_verified = False

    def _close_regions(self, number: int) -> None:
        self.pool.make_word().fill_(number)

    # Updates.

    def _record(self, host: Mapping[Mark, dict[str, Any]]) -> NodeRecording:
        if self._stream.cuda_stream in self._torch.retired:
            self._stream = self.pool.stream
        recording = super()._record(host)
        if not self._torch.find_out().updates and self._random is not False:
            raise UpdateTopologyError(
                f"this HIP runtime ({self._torch.runtime.version}) does not use parameters that "
                f"are written into an executable, and only torch's own executable may run a graph "
                f"that draws random numbers or has not been replayed yet. Replay it once before "
                f"the first update, draw random numbers outside, or use policy='breakable'."
            )
        return recording

    def _deserves_executable(self, recording: NodeRecording) -> bool:
        if not self._torch.find_out().updates:
            return self._random is False
        return super()._deserves_executable(recording)

    def _write(self, recording: NodeRecording) -> None:
        more = len(recording.updates) * LEAKED_BYTES_PER_NODE
        if self._written and self.leaked_bytes + more > LEAK_BUDGET_BYTES:
            self._renew_executable()
        self._as_captured = False
        super()._write(recording)
        self._written += len(recording.updates)

    def _build(self, recording: NodeRecording) -> None:
        super()._build(recording)
        # A handle may be that of an executable which is gone.
        self._verified.discard((recording.number, recording.executable))

    def _renew_executable(self) -> None:
        """Make torch's executable anew, which frees what its updates leaked."""
        logger.debug("rocm: %d bytes leaked, making the executable anew", self.leaked_bytes)
        self._own_verified = False
        self._torch.instantiate(self._native)
        self._written = 0
        if self._random is not None:
            self._own = self._own_executable()

    def _apply(self, recording: NodeRecording) -> None:  # type: ignore[override]
        super()._apply(recording)
        state = (recording.number, recording.executable)
        if not recording.executable and self._as_captured:
            return  # torch's executable, into which nothing was written
        if state not in self._verified or not (recording.executable or self._own_verified):
            self.use(_Verified(self, state, self._executable))

    def _verify(self, state: _State) -> None:
        """Raise UpdateError unless the last launch was of ``state``."""
        number, executable = state
        found = int(self.pool.make_word().item())
        if found != number:
            self._refuse_stale(number, found)
        self._verified.add(state)
        self._own_verified = self._own_verified or not executable

    def _refuse_stale(self, number: int, found: int) -> None:
        self._leave_for(GraphState.DIRTY)
        self._torch.distrust_updates()
        raise UpdateError(
            f"the HIP runtime ({self._torch.runtime.version}) reported a successful update and "
            f"launched the graph with the parameters of an earlier one (recording {found} instead "
            f"of {number}). What this replay wrote is wrong, and the graph is dirty: "
            f"reset() and capture again. From now on this process gives every key an executable "
            f"of its own instead of updating one."
        )
