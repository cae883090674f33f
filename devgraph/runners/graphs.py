"""The graphs of a runner, one for each variant and bucket, the choice of one for a batch, and what
is known of each: the device's time of its replays, and its use in earlier processes."""

from __future__ import annotations

import bisect
import collections
import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from devgraph.api.backend import Backend
from devgraph.api.capture import Captured
from devgraph.api.errors import InputError, brief, did_you_mean, whole
from devgraph.api.graph import GraphInfo, summed
from devgraph.api.pool import Pool
from devgraph.runners.buckets import Buckets, ByTokens
from devgraph.runners.decisions import (
    Decision,
    GraphKey,
    Reason,
    Variant,
    check_mapping,
    check_values,
)
from devgraph.runners.options import Options
from devgraph.runners.slots import Size

logger = logging.getLogger(__name__)

BOUNDS = tuple(base * 10.0**power for power in range(-5, 1) for base in (1, 2.5, 5))
"""Upper bounds of the histogram's bins in seconds, from 10 us to 5 s; longer ones have the last."""

MOST_OPEN = 64
"""Replays whose end the device may not have reached before somebody looks for the first ones."""


class Emulated:
    """The step itself in the place of its capture: a replay calls it.

    Args:
        run: the step over the static buffers; takes host arguments as keywords.
    """

    exact = True
    capture_seconds = 0.0
    phases: Mapping[str, float] = {}

    def __init__(self, run: Callable[..., Any]) -> None:
        self._step = run

    def run(self, host: Mapping[str, Any]) -> None:
        """Run the step and leave its outputs where a graph would."""
        self._step(**host)

    def info(self) -> GraphInfo:
        """Return what it is made of: nothing."""
        return summed((), state="emulated", capture_seconds=0.0)

    def stats(self) -> dict[str, Any]:
        """Return no counters."""
        return {}

    def pin(self, pinned: bool) -> None:
        """Do nothing: there is no executable."""

    def explain(self) -> str:
        """Return one line."""
        return "emulated: the step runs eagerly, over the static buffers"

    def close(self) -> None:
        """Free nothing."""


@attrs.frozen(kw_only=True)
class ReplayTimes:
    """How long the device took for the replays of one graph."""

    count: int
    seconds: float
    """All together."""
    bins: tuple[int, ...]
    """How many took at most as long as each of ``BOUNDS``, and last how many took longer."""


class Timing:
    """Times the replays of one graph by the clock of ``backend``."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._open: collections.deque[Callable[[], float | None]] = collections.deque()
        self._bins = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0

    def over(self, replay: Callable[[Mapping[str, Any]], None]) -> Callable[..., None]:
        """Return ``replay``, timed."""

        def timed(values: Mapping[str, Any]) -> None:
            stop = self._backend.stopwatch()
            replay(values)
            self._open.append(stop())
            if len(self._open) > MOST_OPEN:
                self.read()

        return timed

    def read(self) -> None:
        """Count the replays that the device has done, without waiting; under the pool's lock."""
        while self._open and (seconds := self._open[0]()) is not None:
            self._open.popleft()
            self._bins[bisect.bisect_left(BOUNDS, seconds)] += 1
            self._seconds += seconds

    @property
    def times(self) -> ReplayTimes:
        """What was read so far."""
        return ReplayTimes(count=sum(self._bins), seconds=self._seconds, bins=tuple(self._bins))


class BucketGraph:
    """What is known of one graph.

    ``reason`` says why the graph cannot be used while ``captured`` is None; ``dropped`` whether
    that is for good (until the next ``invalidate``).
    """

    def __init__(self, key: GraphKey, size: Size, options: Mapping[str, Any]) -> None:
        self.key = key
        self.size = size
        self.options = options
        """The variant as the engine wrote it."""
        self.captured: Captured | Emulated | None = None
        self.epoch: Hashable = None
        """The weights epoch of the capture."""
        self.reason = Reason.NOT_CAPTURED
        self.detail = ""
        self.dropped = False
        self.pinned = False
        """Whether its executables stay, whatever the budget of the pool is."""
        self.warm = 0
        """Warm-up runs that the first look at the outputs already was."""
        self.wants = 0
        """Steps that ran eagerly because the graph was not captured, since it was closed last."""
        self.missed = 0
        """All of those steps."""
        self.used = 0
        """When it was captured or ran last, by the runner's clock."""
        self.hits = 0
        self.real_rows = 0
        self.bytes = 0
        self.seconds = 0.0
        self.speedup: float | None = None
        """How many times as fast as eager it was when it was captured, where that is timed."""
        self.timing: Timing | None = None
        """Of its replays, from the first call of ``stats(timing=True)`` on."""

    def drop(self, reason: Reason, detail: str) -> None:
        """Give the graph up, with the reason that steps which wanted it will count."""
        self.close()
        self.reason, self.detail, self.dropped = reason, detail, True

    def forget(self, reason: Reason, detail: str) -> None:
        """Close the graph; it may be captured again."""
        self.reason, self.detail, self.dropped, self.wants = reason, detail, False, 0
        if reason is Reason.INVALIDATED:
            self.seconds = 0.0  # what comes back has the time of a first start
        self.close()

    def close(self) -> None:
        """Free the graph. Idempotent."""
        captured, self.captured = self.captured, None
        self.bytes = 0
        if captured is not None:
            captured.close()

    @property
    def state(self) -> str:
        if self.captured is not None:
            return "captured"
        return self.reason.value if self.dropped else "pending"


class Graphs:
    """All graphs of a runner, none where it is ``disabled``, and the choice of one for a batch."""

    def __init__(self, options: Options, buckets: Buckets, counting: ByTokens, pool: Pool) -> None:
        self._pool = pool
        self.suspended = False
        self.buckets = buckets
        self.variants = variants = dict(options.variants)
        self.counting = counting
        self._config = config = options.config
        self._weights_epoch = options.weights_epoch
        self._names = {"width"}.union(*variants.values())
        self._by_key = {
            key: BucketGraph(key, counting.padded(key.bucket, named), named)
            for variant, named in variants.items()
            for key in (GraphKey(variant, bucket) for bucket in buckets)
            if config.policy != "disabled"
        }
        self._order = sorted(
            self._by_key.values(), key=lambda g: (g.size.tokens, g.size.requests), reverse=True
        )

    def __iter__(self) -> Iterator[BucketGraph]:
        """Iterate largest first."""
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, key: GraphKey) -> BucketGraph:
        return self._by_key[key]

    def get(self, key: GraphKey | None) -> BucketGraph | None:
        return None if key is None else self._by_key.get(key)

    def each(self, do: Callable[[BucketGraph], None]) -> None:
        """Do it to every graph, smallest first, also to those behind one for which it fails."""
        with contextlib.ExitStack() as stack:
            for graph in self:
                stack.callback(do, graph)

    @property
    def captured(self) -> list[BucketGraph]:
        return [graph for graph in self._order if graph.captured is not None]

    @property
    def pending(self) -> list[BucketGraph]:
        """What may still be captured, largest first."""
        return [g for g in self._order if g.captured is None and not g.dropped]

    def rows(self, size: Size) -> int:
        """Return what buckets count of a batch."""
        return size.rows(self.counting.counts)

    def largest(self, variant: Variant) -> BucketGraph:
        return self._by_key[GraphKey(variant, self.buckets.maximum)]

    def asked(self, variant: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Return the variant that a batch asks for as a mapping; None asks for none of its own.

        Raises:
            InputError: no declared variant has a name of it, or its ``width`` is none.
            InputTypeError: it is no mapping, or a value cannot be compared.
        """
        if variant is None:
            return {}
        check_mapping(variant)
        for name in variant:
            if name not in self._names:
                raise InputError(
                    f"variant {brief(dict(variant))}: no declared variant has {name!r}. "
                    f"{did_you_mean(name, self._names)}"
                )
        check_values(variant, InputError)
        return variant

    def of_pads(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the variant of a step without requests: ``options``, or the first that is declared
        where it asks for none and there is none without names."""
        return options if options or () in self.variants else next(iter(self.variants.values()))

    def decide(self, size: Size, options: Mapping[str, Any], longest: int | None) -> Decision:
        """Return how a batch would run now: the only rule of eligibility. Changes nothing.

        Raises:
            InputError: ``longest`` is needed and was not given, or is negative.
        """
        config = self._config
        if not size.requests or not size.tokens:
            return Decision.eager(Reason.EMPTY_BATCH)
        if config.policy == "disabled":
            return Decision.eager(Reason.DISABLED)
        if self.suspended:
            return Decision.eager(Reason.SUSPENDED)
        if config.max_seq_len is not None:
            if longest is None:
                raise InputError(
                    f"max_seq_len={config.max_seq_len} is configured: pass longest=, the tokens "
                    f"of the longest sequence of the batch"
                )
            if whole("longest", longest) > config.max_seq_len:
                return Decision.eager(Reason.OVER_MAX_SEQ_LEN)
        variant = self.counting.variant(size, options, self.variants)
        if isinstance(variant, Reason):
            return Decision.eager(variant)
        if not self.counting.fits(size):
            return Decision.eager(Reason.OVER_MAX_REQUESTS)
        return self.launchable(self._choose(variant, size))

    def unusable(self) -> Reason | None:
        """Return why some captured graph cannot be launched now, or that there is none; None if all
        can."""
        some = self.captured or self._order[:1]
        found = (self.launchable(Decision.graph(graph.key)) for graph in some)
        return next((one.reason for one in found if not one.ok), None)

    def launchable(self, decision: Decision) -> Decision:
        """Return ``decision``, or that to run eagerly where its graph cannot be launched now: it is
        not captured, the runner is suspended, another gave the memory of the pool back, or weights
        were replaced."""
        if not decision.ok:
            return decision
        graph = self.get(decision.key)
        if self.suspended:
            reason = Reason.SUSPENDED
        elif graph is None or graph.captured is None:
            reason = graph.reason if graph else Reason.NOT_CAPTURED
        elif self._pool.recordings.released:
            reason = Reason.EXECUTABLE_MEMORY
        elif self._weights_epoch is not None and graph.epoch != self._weights_epoch():
            reason = Reason.WEIGHTS_CHANGED
        else:
            return decision
        return Decision.eager(reason, decision.key)

    def _choose(self, variant: Variant, size: Size) -> Decision:
        """Return the decision for a batch of a declared variant that no rule keeps from graphs.

        A bucket that was dropped lets its batches use the next larger graph, within the padding
        factor, unless eager was faster. One that is only not captured yet does not: its batches are
        what gets it captured.
        """
        rows = self.rows(size)
        exact = self.buckets.fitting(rows)
        if exact is None:
            return Decision.eager(Reason.OVER_LARGEST_BUCKET)
        wanted = self._by_key[GraphKey(variant, exact)]
        if exact > self._config.max_padding * rows:
            return Decision.eager(Reason.PADDING, wanted.key)
        if wanted.captured is not None:
            return Decision.graph(wanted.key)
        if wanted.dropped and wanted.reason is not Reason.TOO_SLOW:
            for bucket in self.buckets.at_least(exact + 1):
                if bucket > self._config.max_padding * rows:
                    break
                if self._by_key[GraphKey(variant, bucket)].captured is not None:
                    return Decision.graph(GraphKey(variant, bucket))
        return Decision.eager(wanted.reason, wanted.key)


class Learned:
    """How often buckets were hit in earlier processes, and which could not be captured.

    The file is a help and never a fault: one that is missing, broken or not writable is as if
    nothing had been learnt, and what is no regular file is neither read nor replaced. It holds
    what several runners, versions and devices learnt, each apart.

    Args:
        path: the file; None keeps nothing.
        identity: what must be the same for the numbers to mean anything again.
    """

    def __init__(self, path: str | None, identity: Mapping[str, Any]) -> None:
        self._path = None if path is None else Path(path)
        text = json.dumps(dict(identity), sort_keys=True, default=str)
        self._key = hashlib.sha256(text.encode()).hexdigest()[:16]
        hits = self._read().get(self._key)
        self._hits = {
            name: count
            for name, count in (hits if isinstance(hits, dict) else {}).items()
            if isinstance(count, int)
        }
        counts = sorted({0, *self._hits.values()}, reverse=True)
        self._places = {count: at for at, count in enumerate(counts)}

    def place(self, graph: BucketGraph) -> int:
        """Return where ``graph`` comes in the order of use, from 0; those that were not used are
        alike, and after them come those that could not be captured."""
        return self._places[self._hits.get(str(graph.key), 0)]

    def write(self, graphs: Iterable[BucketGraph]) -> None:
        """Keep what is known now, in place of what was known at the start."""
        if self._path is None:
            return
        found = {str(g.key): -1 if g.dropped else g.hits + g.missed for g in graphs}
        if not any(found.values()):
            return  # it served nothing
        new = Path(f"{self._path}.{os.getpid()}")
        try:
            if self._path.exists() and not self._path.is_file():
                raise OSError(f"{self._path} is no regular file")
            new.write_text(json.dumps({**self._read(), self._key: found}), encoding="utf-8")
            new.replace(self._path)
        except (OSError, ValueError) as error:
            logger.warning("what was learnt of the buckets is not kept: %s", error)
            with contextlib.suppress(OSError, ValueError):
                new.unlink()

    def _read(self) -> dict[str, Any]:
        try:
            if self._path is not None and self._path.is_file():
                found = json.loads(self._path.read_text(encoding="utf-8"))
                return found if isinstance(found, dict) else {}
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s tells nothing of the buckets: %s", self._path, error)
        return {}
