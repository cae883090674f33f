"""The verification word, which proves that HIP used the new parameters of an updated executable.

After its regions, a graph contains an additional node that writes the number of the recording into
a word of the pool. The word is checked after the first launch of an updated or rebuilt executable.
An old number means that the runtime ignored the new parameters, so the results are wrong. The check
covers the executable as a whole, not each node (see docs/rocm.md).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from devgraph.api.errors import UpdateError
from devgraph.api.executable import Executable, dereference
from devgraph.api.marks.marks import marked_with_context
from devgraph.api.pool import Pool
from devgraph.api.torchlike.node_calls import RuntimeCallError
from devgraph.api.torchlike.node_graph import NodeGraph, UpdateStrategy
from devgraph.api.torchlike.recording import NodeRecording, RegionPattern
from devgraph.rocm.runtime import Runtime

LEAKED_BYTES_PER_NODE = 5800
"""Bytes of device memory that HIP leaks per updated node until the executable is destroyed. On an
MI300X, 2000 updates of 32 nodes leaked 354 MiB (ROCm/rocm-systems pull request 11434)."""

LEAK_BUDGET_BYTES = 32 * 2**20
"""Bytes that updates of an executable may leak before it is rebuilt. With 180 region nodes, every
32nd update rebuilds it, so rebuilds of 2-3 ms add less than 0.1 ms per update."""


class Verification:
    """A one-time test of a runtime's updates, and the verification words of all pools."""

    def __init__(self, runtime: Runtime, current_stream: Callable[[], int]) -> None:
        self.runtime = runtime
        self._current_stream = current_stream
        self.updates: bool | None = None
        """Whether executables use newly written parameters, or None before ``find_out``."""
        self._words: weakref.WeakKeyDictionary[Pool, torch.Tensor] = weakref.WeakKeyDictionary()

    def word_of(self, pool: Pool) -> torch.Tensor:
        """Return the verification word of ``pool``, whose replays run one at a time."""
        word = self._words.get(pool)
        if word is None:
            word = torch.zeros(1, dtype=torch.int64, device=pool.backend.device)
            self._words[pool] = word
        return word

    def find_out(self, device: torch.device) -> None:
        """Test the runtime with small graphs, once. The current stream must not be capturing."""
        if self.updates is None:
            words = torch.zeros(4, dtype=torch.int64, device=device)
            self.runtime.reports_copies = self._reports_copies(words)
            self.updates = self._updates(words)

    def _captured(self, work: Callable[[], object]) -> int:
        stream = self._current_stream()
        self.runtime.begin_capture(stream)
        try:
            work()
        finally:
            graph = self.runtime.end_capture(stream)
        return graph

    def _reports_copies(self, words: torch.Tensor) -> bool:
        runtime = self.runtime
        graph = self._captured(lambda: words[:2].copy_(words[2:]))
        try:
            (node,) = runtime.nodes(graph)
            if runtime.kind(node) != "memcpy":
                return False
            params = runtime.params("memcpy", node)
            addresses = (params.dstPtr.ptr, params.srcPtr.ptr, params.extent.width)
            return addresses == (words.data_ptr(), words[2:].data_ptr(), 2 * words.element_size())
        finally:
            runtime.destroy(graph)

    def _updates(self, words: torch.Tensor) -> bool:
        runtime = self.runtime
        first = self._captured(lambda: words[:1].fill_(1))
        second = self._captured(lambda: words[:1].fill_(2))
        executable = runtime.instantiate(first)
        try:
            nodes = runtime.nodes(first)
            pattern = RegionPattern(runtime, first, [("probe", nodes)])
            updates = pattern.match(second, [len(nodes)])
            try:
                runtime.write(updates, executable)
            except RuntimeCallError:
                return False
            runtime.bound(executable, self._current_stream())()
            return int(words[0].item()) == 2
        finally:
            runtime.destroy_executable(executable)
            runtime.destroy(second)
            runtime.destroy(first)


class VerifiedUpdates(UpdateStrategy):
    """A strategy that verifies updates, and stops updating if the runtime ignores updates."""

    def __init__(self, verification: Verification) -> None:
        self._verification = verification
        self.leaked_bytes = 0
        """Bytes that updates of the graph's own executable may have leaked since it was built."""
        self._own: _VerifiedLaunch | None = None
        self._seen: weakref.WeakSet[NodeRecording] = weakref.WeakSet()
        """Recordings that a launch of the graph's own executable has verified."""

    def prepare(self, graph: NodeGraph) -> None:
        if not (graph.spec.declared or marked_with_context):
            return  # The capture cannot contain an updatable region.
        self._verification.find_out(graph.backend.device)
        self._verification.word_of(graph.pool)

    def close_regions(self, graph: NodeGraph, number: int) -> None:
        self._verification.word_of(graph.pool).fill_(number)

    def deserves_executable(self, graph: NodeGraph, recording: NodeRecording) -> bool:
        return not self._verification.updates or super().deserves_executable(graph, recording)

    def write(self, graph: NodeGraph, recording: NodeRecording) -> None:
        more = len(recording.updates) * LEAKED_BYTES_PER_NODE
        if self.leaked_bytes and self.leaked_bytes + more > LEAK_BUDGET_BYTES:
            graph.pool.recordings.drop_own(graph)
            self.leaked_bytes = 0
        super().write(graph, recording)
        self.leaked_bytes += more
        if self._own is not None:
            seen = self._own.verified and recording in self._seen
            self._own.expected = None if seen else recording

    def launches(
        self,
        graph: NodeGraph,
        executable: Executable,
        recording: NodeRecording | None,
        *,
        own: bool,
    ) -> Executable:
        if not graph.calls:
            return executable
        verified = _VerifiedLaunch(graph, self, executable, recording)
        if own:
            self._own = verified
            self.leaked_bytes = len(recording.updates) * LEAKED_BYTES_PER_NODE if recording else 0
        return verified

    def verify(self, graph: NodeGraph, launched: _VerifiedLaunch, recording: NodeRecording) -> None:
        """Raise UpdateError unless the last launch ran ``recording``."""
        number = int(self._verification.word_of(graph.pool).item())
        if number != recording.number:
            graph.mark_dirty()
            self._verification.updates = False
            raise UpdateError(
                f"the HIP runtime ({self._verification.runtime.version}) reported a successful "
                f"update, but launched the graph with earlier parameters (recording {number} "
                f"instead of {recording.number}). The results of this replay are wrong, and the "
                f"graph is dirty; call reset() and capture again. From now on, this process builds "
                f"an executable for every key instead of updating one."
            )
        launched.expected, launched.verified = None, True
        if launched is self._own:
            self._seen.add(recording)


class _VerifiedLaunch:
    """A launch target that verifies the first launch after each update."""

    def __init__(
        self,
        graph: NodeGraph,
        how: VerifiedUpdates,
        executable: Executable,
        recording: NodeRecording | None,
    ) -> None:
        self._graph = weakref.ref(graph)
        self._how = how
        self._launch = executable.launch
        self.expected = recording
        """The recording that the next launch must verify, or None if nothing was written."""
        self.verified = False
        """Whether a launch has proved that the runtime uses written parameters."""

    def launch(self) -> None:
        self._launch()
        if self.expected is not None:
            self._how.verify(dereference(self._graph), self, self.expected)

    def bound(self, stream: int | None) -> Callable[[], None]:
        """Return ``launch``, because graphs with regions cannot bind a stream."""
        return self.launch
