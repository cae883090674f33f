"""The graphs of a runner, one for each variant and bucket, and the choice of a graph."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import attrs

from devgraph.api.capture import Captured
from devgraph.api.errors import InputError, StateError, brief, did_you_mean
from devgraph.api.gates import Gates
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
    refusal,
)
from devgraph.runners.options import Options
from devgraph.runners.slots import Size
from devgraph.runners.timing import ReplayTimer


class EmulatedGraph:
    """A stand-in for a capture; each replay runs the step eagerly."""

    exact = True
    capture_seconds = 0.0
    phases: Mapping[str, float] = {}

    def __init__(self, run: Callable[..., Any], gates: Gates) -> None:
        self._step = run
        self._gates = gates

    def run(self, host: Mapping[str, Any]) -> None:
        """Run the step eagerly; like a graph, it writes its outputs to the static buffers."""
        with self._gates.launch():
            self._step(**host)

    def info(self) -> GraphInfo:
        return summed((), state="emulated", capture_seconds=0.0)

    def stats(self) -> dict[str, Any]:
        return {}

    def pin(self, pinned: bool) -> None:
        """Do nothing, because there is no executable."""

    def summary(self) -> str:
        return "emulated: the step runs eagerly, on the static buffers"

    def close(self) -> None:
        """Do nothing, because there is nothing to free."""


class BucketGraph:
    """One graph: its capture, or the ``reason`` for its absence, and its counters."""

    def __init__(self, key: GraphKey, size: Size, options: Mapping[str, Any]) -> None:
        self.key = key
        self.size = size
        self.options = options
        """The variant as the engine declared it."""
        self.captured: Captured | EmulatedGraph | None = None
        self.epoch: Hashable = None
        """The weights epoch of the capture."""
        self.reason = Reason.NOT_CAPTURED
        self.detail = ""
        """Explanation of the last failure, for ``explain``."""
        self.dropped = False
        self.pinned = False
        """Whether the executables of this graph are exempt from eviction."""
        self.wants = 0
        """Number of eager steps that needed this graph since it was last closed."""
        self.used = 0
        """The runner's count of runs at the last run or capture of this graph."""
        self.hits = 0
        self.real_rows = 0
        self.bytes = 0
        self.seconds = 0.0
        """Duration of the last capture of this graph. It counts against the time budget."""
        self.timing: ReplayTimer | None = None
        """Timer of the replays; None before the first ``stats(timing=True)``."""

    def drop(self, reason: Reason, detail: str) -> None:
        """Close the graph and do not capture it again before the next ``invalidate``."""
        self.close()
        self.reason, self.detail, self.dropped = reason, detail, True

    def forget(self, reason: Reason, detail: str) -> None:
        """Close the graph; it may be captured again."""
        self.reason, self.detail, self.dropped, self.wants = reason, detail, False, 0
        if reason is Reason.INVALIDATED:
            self.seconds = 0.0  # The time budget is available again.
        self.close()

    def close(self) -> None:
        """Free the graph. Idempotent."""
        captured, self.captured = self.captured, None
        self.bytes = 0
        if captured is not None:
            captured.close()

    @property
    def state(self) -> str:
        """``captured``, ``emulated``, ``pending``, or the reason why the graph was dropped."""
        if self.captured is not None:
            return "emulated" if isinstance(self.captured, EmulatedGraph) else "captured"
        return self.reason.value if self.dropped else "pending"


@attrs.define
class Counters:
    """Counters of a runner, in addition to the counters of its graphs."""

    reasons: collections.Counter[Reason] = attrs.field(factory=collections.Counter)
    """Number of steps outside a graph, by reason."""
    idle: int = 0
    captures: int = 0
    checks: int = 0
    failed_checks: int = 0


class Graphs:
    """All graphs of a runner (none if ``disabled``), and the choice of a graph for each batch."""

    def __init__(self, options: Options, buckets: Buckets, counting: ByTokens, pool: Pool) -> None:
        self._pool = pool
        self._name = options.name
        self.suspended = False
        self.counters = Counters()
        self.buckets = buckets
        self.variants = variants = dict(options.variants)
        self.counting = counting
        self._config = config = options.config
        self._weights_epoch = options.weights_epoch
        self._option_names = {"width"}.union(*variants.values())
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
        """Iterate over the graphs, largest first."""
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, key: GraphKey) -> BucketGraph:
        return self._by_key[key]

    def get(self, key: GraphKey | None) -> BucketGraph | None:
        """Return the graph of ``key``, or None if there is none."""
        return None if key is None else self._by_key.get(key)

    def each(self, do: Callable[[BucketGraph], None]) -> None:
        """Call ``do`` for every graph, smallest first, even if it fails for some of them."""
        with contextlib.ExitStack() as stack:
            for graph in self:
                stack.callback(do, graph)

    @property
    def captured(self) -> list[BucketGraph]:
        """The captured graphs, largest first."""
        return [graph for graph in self._order if graph.captured is not None]

    @property
    def pending(self) -> list[BucketGraph]:
        """The graphs that may still be captured, largest first."""
        return [g for g in self._order if g.captured is None and not g.dropped]

    def rows(self, size: Size) -> int:
        """Return the number of rows of a batch, in the unit of the buckets."""
        return size.rows(self.counting.counts)

    def largest(self, variant: Variant) -> BucketGraph:
        return self._by_key[GraphKey(variant, self.buckets.maximum)]

    def checked_variant(self, variant: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Check the variant of a batch and return it; None becomes an empty mapping."""
        if variant is None:
            return {}
        check_mapping(variant)
        for name in variant:
            if name not in self._option_names:
                raise InputError(
                    f"variant {brief(dict(variant))}: no declared variant has {name!r}. "
                    f"{did_you_mean(name, self._option_names)} Declare it in variants=."
                )
        check_values(variant, InputError)
        return variant

    def pad_variant(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return ``options``, or the first declared variant if empty options are not declared."""
        return options if options or () in self.variants else next(iter(self.variants.values()))

    def decide(self, size: Size, options: Mapping[str, Any]) -> Decision:
        """Return the decision for a batch without running it."""
        if size.is_empty:
            return Decision(Reason.EMPTY_BATCH)
        if self._config.policy == "disabled":
            return Decision(Reason.DISABLED)
        if self.suspended:
            return Decision(Reason.SUSPENDED)
        variant = self.counting.variant(size, options, self.variants)
        if isinstance(variant, Reason):
            return Decision(variant)
        if not self.counting.fits(size):
            return Decision(Reason.OVER_MAX_REQUESTS)
        return self.launchable(self._choose(variant, size))

    def unusable(self) -> Reason | None:
        """Return the reason why a captured graph cannot be launched now, or None if all can."""
        for graph in self.captured or self._order[:1]:
            decision = self.launchable(Decision(Reason.GRAPH, graph.key))
            if not decision.ok:
                return decision.reason
        return None

    def launchable(self, decision: Decision) -> Decision:
        """Return ``decision``, or an eager decision if its graph cannot be launched now."""
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
        return Decision(reason, decision.key)

    def require_fit(self, decision: Decision, size: Size, options: Mapping[str, Any]) -> None:
        """Raise an error unless the graph of ``decision`` can run a batch of ``size`` now."""
        graph, now = self.get(decision.key), self.launchable(decision)
        if graph is None or not now.ok:
            raise StateError(
                f"the decision is for graph {decision.key}, but on this rank "
                f"{refusal(now, self._name)}, or decide again on all ranks"
            )
        is_variant = (
            not size.requests  # A batch without requests has no width.
            or self.counting.variant(size, options, self.variants) == graph.key.variant
        )
        if not (is_variant and self.counting.fits(size) and self.rows(size) <= graph.key.bucket):
            raise InputError(
                f"the decision is for bucket {graph.key}, but the batch has {size} and "
                f"needs the variant {dict(options)}; decide again"
            )

    def _choose(self, variant: Variant, size: Size) -> Decision:
        """Return the decision for a batch of a declared variant.

        If the batch's bucket was dropped, use the next larger graph within the padding factor. If
        the bucket is still to be captured, run eagerly, because eager steps trigger its capture.
        """
        rows = self.rows(size)
        exact = self.buckets.fitting(rows)
        if exact is None:
            return Decision(Reason.OVER_LARGEST_BUCKET)
        graph = self._by_key[GraphKey(variant, exact)]
        if exact > self._config.max_padding * rows:
            return Decision(Reason.PADDING, graph.key)
        if graph.captured is not None:
            return Decision(Reason.GRAPH, graph.key)
        if graph.dropped:
            for bucket in self.buckets.at_least(exact + 1):
                if bucket > self._config.max_padding * rows:
                    break
                if self._by_key[GraphKey(variant, bucket)].captured is not None:
                    return Decision(Reason.GRAPH, GraphKey(variant, bucket))
        return Decision(graph.reason, graph.key)
