"""The check at start, which compares an engine's graphs with eager calls in its dummy steps."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import PHASES, verify_from_environment
from devgraph.api.device import raise_if_lost
from devgraph.api.environment import VERIFY_VARIABLE
from devgraph.api.errors import CapabilityError, CaptureError, ConfigError, DeviceLost, counted
from devgraph.api.process import keep_forever
from devgraph.api.prove import compare, compare_near
from devgraph.api.snapshots import Snapshot, differs, read, same_bytes
from devgraph.integrations.engine.memory import GraphMemory
from devgraph.integrations.engine.steps import tensors

logger = logging.getLogger(__name__)


def phases_to_check(config: DeviceGraphConfig | None = None) -> frozenset[str]:
    """Return the phases that are checked at start, from the key ``verify`` or DEVGRAPH_VERIFY."""
    default = verify_from_environment()
    given = {name: getattr(getattr(config, name, None), "verify", None) for name in PHASES}
    found = {name: verify or default for name, verify in given.items()}
    if any(verify is not None and verify.every is not None for verify in found.values()):
        raise ConfigError(
            f"{VERIFY_VARIABLE}, or the key verify: in engines, graphs are checked only at start. "
            f'Use "start" instead of "every".'
        )
    return frozenset(name for name, verify in found.items() if verify is not None)


class StartCheck:
    """The check at start of this process. ``failed`` describes how each wrong graph differs."""

    def __init__(self, engine: str, memory: GraphMemory, *, strict: bool = False) -> None:
        self.phases: frozenset[str] = frozenset()
        """The phases whose graphs are checked."""
        self.strict = strict
        self.running = False
        self.failed: dict[Hashable, str] = {}
        self.counts = {"checks": 0, "failed_checks": 0}
        """Numbers of replays that were compared with eager runs, and of graphs that differed."""
        self._engine = engine
        self._memory = memory
        self._began = 0.0
        self._before = 0
        self._pending: list[tuple[Hashable, Tensor]] | None = None
        """Compared graphs, each with a device bool that ``compare`` will read: whether it
        differs."""
        self._again: set[Hashable] = set()
        """Graphs that differed in a batch which runs again."""

    def skip(self, reason: str) -> None:
        """Log that nothing is checked, or raise CapabilityError under strict."""
        text = f"{self._engine}: the check at start is not possible with {reason}"
        if self.strict:
            raise CapabilityError(f"{text}. Unset {VERIFY_VARIABLE} or the key verify.")
        logger.warning("%s; graphs are not compared with eager", text)

    @contextlib.contextmanager
    def started(self, buffers: Iterable[Tensor]) -> Iterator[None]:
        """Run the check in the block, with noise in the floating-point ``buffers``.

        Afterwards, buffers are zero, as allocated by the engine, and random states are restored.
        """
        self.running, self.failed = True, {}
        self._began, self._before = time.perf_counter(), self.counts["checks"]
        with contextlib.ExitStack() as after:
            after.callback(setattr, self, "running", False)
            after.callback(Snapshot(self._memory.backend, ()).restore)
            for buffer in buffers:
                after.callback(buffer.zero_)
                if buffer.is_floating_point() and buffer.itemsize > 1:  # torch has no 8-bit noise.
                    buffer.normal_()
            try:
                yield
            except DeviceLost:
                keep_forever(after.pop_all())  # Their destructors would fail.
                raise

    def run(
        self,
        name: Hashable,
        eager: Callable[[], Any],
        replay: Callable[[], Any],
        inputs: Iterable[Tensor] = (),
        *,
        shared: bool = False,
    ) -> Any:
        """Compare a replay with an eager call on the same ``inputs``; return the replay's output.

        ``shared`` outputs are the same tensors in both runs. They are overwritten between the runs.
        """
        if self._again and name not in self._again:
            return replay()
        saved = [(tensor, tensor.clone()) for tensor in inputs]

        def reset() -> None:
            for tensor, value in saved:
                tensor.copy_(value)

        def run_eagerly() -> list[Tensor]:
            found = tensors(eager())
            copies = [tensor.clone() for tensor in found]
            for tensor in found if shared else ():
                tensor.fill_(torch.nan if tensor.is_floating_point() else -1)
            reset()
            return copies

        with self._named(name):
            want = run_eagerly()
            output = replay()
            pairs = [*zip(want, tensors(output), strict=True)]
            flags = [differs(one, other) for one, other in pairs]
            if self._pending is not None:
                self._pending += [(name, flag) for flag in flags]
            elif name not in self.failed and (any(read(flags)) or self._again):
                pairs = [(one, other.clone()) for one, other in pairs]
                reset()
                steady = all(map(same_bytes, want, run_eagerly()))
                # If two eager runs differ, the replay needs to be equal only within the tolerance.
                texts = [(compare if steady else compare_near)(*pair) for pair in pairs]
                once = "differs only in its first replay" if self._again and steady else ""
                if text := next(filter(None, [*texts, once]), ""):
                    self.failed[name] = text
                output = replay()
        self.counts["checks"] += not self._again
        return output

    def compare(self, batches: Iterable[Callable[[], object]]) -> None:
        """Run ``batches``, compare their replays with eager calls, and read all results at once.

        If a replay differs, its batch runs again, to find out whether two eager runs differ too.
        """
        found = list[tuple[Callable[[], object], Hashable, Tensor]]()
        try:
            for batch in batches:
                self._pending = []
                batch()
                found += ((batch, name, flag) for name, flag in self._pending)
        finally:
            self._pending = None
        with self._named(found[-1][1] if found else ""):
            wrong = read(flag for _, _, flag in found)
        again = dict[Callable[[], object], set[Hashable]]()
        for (batch, name, _), differing in zip(found, wrong, strict=True):
            if differing:
                again.setdefault(batch, set()).add(name)
        try:
            for batch, self._again in again.items():
                batch()
        finally:
            self._again = set()

    @contextlib.contextmanager
    def _named(self, name: Hashable) -> Iterator[None]:
        """Add the name of the graph to the error if the block loses the device."""
        try:
            yield
        except Exception as error:
            try:
                raise_if_lost(self._memory.backend, error)
            except DeviceLost as lost:
                raise DeviceLost(
                    f"{self._engine}: the check of graph {name} failed on the device. The graph "
                    f"probably reads memory of the captured batch, such as the metadata of an "
                    f"unmarked attention call. {lost}"
                ) from error
            raise

    def finish(self) -> None:
        """Log the result; under strict, raise CaptureError if a graph differs."""
        count = len(self.failed)
        self.counts["failed_checks"] += count
        took = time.perf_counter() - self._began
        text = "%s: compared %d replays with eager in %.2f s; %d graphs differ"
        logger.info(text, self._engine, self.counts["checks"] - self._before, took, count)
        for name, difference in self.failed.items():
            logger.warning("%s: dropped %s, because its graph %s", self._engine, name, difference)
        if self.failed and self.strict:
            name, difference = next(iter(self.failed.items()))
            raise CaptureError(
                f"{self._engine}: {counted(count, 'graph')} failed the check at start. The first, "
                f"{name}, {difference}. Mark the code that reads values of the batch on the host, "
                f"or run without strict, so that these steps run eagerly."
            )
