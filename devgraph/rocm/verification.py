"""The verification word: whether HIP used what it says that it wrote into an executable.

Behind its regions a graph records one more node, which writes the recording's number into the word
of its pool. After the first launch of a recording that was written or built, the word tells whether
the runtime used the new parameters; a stale one means that the launch was wrong. It tells of an
executable, not of every node: see docs/rocm.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from devgraph.api.errors import UpdateError
from devgraph.api.executable import Executable, dereference
from devgraph.api.marks.marks import marked_functions
from devgraph.api.pool import Pool
from devgraph.api.torchlike.node_calls import RuntimeCallError
from devgraph.api.torchlike.node_graph import NodeGraph, UpdateStrategy
from devgraph.api.torchlike.recording import NodeRecording, RegionPattern
from devgraph.rocm.runtime import Runtime

LEAKED_BYTES_PER_NODE = 5800
"""Device memory that a runtime keeps for every node it writes, until the executable goes: 2000
updates of 32 nodes took 354 MiB on an MI300X (ROCm/rocm-systems pull request 11434)."""

LEAK_BUDGET_BYTES = 32 * 2**20
"""What updates of one executable may leak before it is made anew: at 180 region nodes this is
every 32nd update, which spreads the 2-3 ms of making one to less than 0.1 ms."""


class Verification:
    """What updates of one runtime are good for, found out once, and the word of each pool."""

    def __init__(self, runtime: Runtime, current_stream: Callable[[], int]) -> None:
        self.runtime = runtime
        self._current_stream = current_stream
        self.updates: bool | None = None
        """Whether executables that exist use parameters that are written into them; None until a
        graph with regions is begun."""
        self._words: weakref.WeakKeyDictionary[Pool, torch.Tensor] = weakref.WeakKeyDictionary()

    def word_of(self, pool: Pool) -> torch.Tensor:
        """Return the word into which graphs of ``pool`` write which recording they ran.

        One is enough, because replays of a pool come one after the other.
        """
        word = self._words.get(pool)
        if word is None:
            word = torch.zeros(1, dtype=torch.int64, device=pool.backend.device)
            self._words[pool] = word
        return word

    def find_out(self, device: torch.device) -> None:
        """Capture and update two small graphs, once, on a stream that is not capturing."""
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
    """Updates that are counted, verified, and avoided where the runtime cannot do them."""

    def __init__(self, verification: Verification) -> None:
        self._verification = verification
        self.leaked_bytes = 0
        """What updates of the graph's own executable may have leaked since it was made."""
        self._own: _VerifiedLaunch | None = None
        self._seen: weakref.WeakSet[NodeRecording] = weakref.WeakSet()
        """Recordings that an own executable was seen to run."""

    def prepare(self, graph: NodeGraph) -> None:
        marks = (fn.__devgraph_mark__ for fn in marked_functions())  # type: ignore[attr-defined]
        if not graph.spec.declared and all(mark.context is None for mark in marks):
            return  # no region of the capture can be updated
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
        if not graph.hits:
            return executable
        found = _VerifiedLaunch(graph, self, executable, recording)
        if own:
            self._own = found
            self.leaked_bytes = len(recording.updates) * LEAKED_BYTES_PER_NODE if recording else 0
        return found

    def verify(self, graph: NodeGraph, launched: _VerifiedLaunch, recording: NodeRecording) -> None:
        """Raise UpdateError unless the last launch was of ``recording``."""
        found = int(self._verification.word_of(graph.pool).item())
        if found != recording.number:
            graph.mark_dirty()
            self._verification.updates = False
            raise UpdateError(
                f"the HIP runtime ({self._verification.runtime.version}) reported a successful "
                f"update and launched the graph with the parameters of an earlier one (recording "
                f"{found} instead of {recording.number}). What this replay wrote is wrong, and the "
                f"graph is dirty: reset() and capture again. From now on this process gives every "
                f"key an executable of its own instead of updating one."
            )
        launched.expected, launched.verified = None, True
        if launched is self._own:
            self._seen.add(recording)


class _VerifiedLaunch:
    """Launches an executable, and verifies in the launch behind each change of it that the runtime
    uses the parameters that were written."""

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
        """What the next launch has to be seen to run; None if nothing was written since."""
        self.verified = False
        """Whether it was seen to use what was written."""

    def launch(self) -> None:
        """Launch once.

        Raises:
            UpdateError: the runtime used other parameters.
        """
        self._launch()
        if self.expected is not None:
            self._how.verify(dereference(self._graph), self, self.expected)

    def bound(self, stream: int | None) -> Callable[[], None]:
        """Return the launch: of a graph with regions nothing else is bound."""
        return self.launch
