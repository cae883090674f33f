"""Statistics of a runner, as data, as text and for Prometheus."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from devgraph.api import html
from devgraph.api.errors import InputError, counted, format_bytes
from devgraph.api.executable import Residency
from devgraph.runners.graphs import Graphs
from devgraph.runners.timing import BOUNDS, ReplayTimes

_SLOW = 1.08
"""Ratio to the fastest pace above which a pace is slow. Repeated measurements of one pace differed
by less than 2%; the two paces of Hopper differ by 18%."""


@attrs.frozen(kw_only=True)
class ReplayPace:
    """Pace of replays, on a device whose graphs can become slower."""

    microseconds: float
    """Time from one kernel to the next in a graph of tiny kernels."""
    fastest: float
    """Shortest time measured in this process."""

    @property
    def slow(self) -> bool:
        """Whether graphs ran faster earlier in this process."""
        return self.microseconds > _SLOW * self.fastest


@attrs.frozen(kw_only=True)
class BucketStats:
    """Statistics of one graph: its size, its replays and their rows."""

    key: str
    """Bucket and variant."""
    bucket: int
    requests: int | None
    """Request slots of the graph; None if the graph does not depend on requests."""
    tokens: int
    state: str
    """``captured``, ``emulated``, ``pending``, or the reason why the graph was dropped."""
    hits: int
    real_rows: int
    padded_rows: int
    bytes: int
    """Device memory that the capture added; before the capture, the estimate of ``plan``."""
    capture_seconds: float
    times: ReplayTimes | None
    """Device time of replays since the first ``stats(timing=True)``; None before that call."""


@attrs.frozen(kw_only=True)
class RunnerStats:
    """A snapshot of a runner's statistics.

    ``steps == graph_steps + emulated_steps + sum(eager.values())`` always holds.
    """

    name: str
    phase: str
    backend: str
    requested: str
    """The policy of the configuration."""
    effective: str
    """The policy in effect; ``disabled`` while there is no graph to run."""
    steps_per_launch: int
    """Number of engine steps in one counted step; above 1 for a ``Loop``."""
    input_bytes: int
    output_bytes: int
    state_bytes: int
    """Bytes of the state of requests; 0 in a runner that uses the state of another runner."""
    executables: Residency
    """Executables of the pool, including executables of other runners that share the pool."""
    steps: int
    graph_steps: int
    emulated_steps: int
    """Number of steps that ran eagerly in place of a graph; see the key ``emulate``."""
    eager: Mapping[str, int]
    """Number of other steps outside a graph, by ``Reason`` value."""
    idle_steps: int
    """Number of graph steps on pad values only, for requests of other ranks or ``idle_dummy``."""
    real_rows: int
    padded_rows: int
    captures: int
    checks: int
    """Number of cases in which checks of the key ``verify`` compared a graph with eager runs."""
    failed_checks: int
    """Number of graphs that were dropped because a check found a difference."""
    capture_seconds: float
    phase_seconds: Mapping[str, float]
    """Seconds spent on the current graphs, by phase: ``warm-up`` and ``capture``; under
    ``piecewise`` also ``activate`` and ``compile``."""
    updates: Mapping[str, float]
    """Counters of the policy, summed over the current graphs: updates of host arguments by kind,
    loops and the reasons for unrolling them; under ``piecewise`` also pieces and compilations."""
    graph_bytes: int
    estimated: bool
    """Whether ``graph_bytes`` includes estimates of ``plan(sample=True)``."""
    replay_pace: ReplayPace | None
    """Pace of graphs after the last capture; None on a device with only one pace."""
    buckets: tuple[BucketStats, ...]
    """Statistics of the graphs, largest first, which is the order of capture."""

    @classmethod
    def of(
        cls,
        graphs: Graphs,
        *,
        emulated: bool,
        per_request: bool,
        estimates: Sequence[int],
        **facts: Any,
    ) -> RunnerStats:
        """Return the snapshot of a runner.

        ``estimates`` contains the bytes of graphs, largest first, for graphs that are not captured.
        Its last number also applies to all smaller graphs. ``facts`` are the remaining fields.
        """
        sizes = estimates or (0,)
        buckets = tuple(
            BucketStats(
                key=str(graph.key),
                bucket=graph.key.bucket,
                requests=graph.size.requests if per_request else None,
                tokens=graph.size.tokens,
                state=graph.state,
                hits=graph.hits,
                real_rows=graph.real_rows,
                padded_rows=graph.hits * graph.key.bucket - graph.real_rows,
                bytes=graph.bytes if graph.captured else sizes[min(index, len(sizes) - 1)],
                capture_seconds=graph.seconds,
                times=graph.timing.times if graph.timing else None,
            )
            for index, graph in enumerate(graphs)
        )
        counters = graphs.counters
        hits = sum(bucket.hits for bucket in buckets)
        eager = {reason.value: count for reason, count in counters.reasons.items()}
        captured = [graph.captured for graph in graphs if graph.captured is not None]
        return cls(
            **facts,
            steps=hits + sum(eager.values()),
            graph_steps=0 if emulated else hits,
            emulated_steps=hits if emulated else 0,
            eager=eager,
            idle_steps=counters.idle,
            real_rows=sum(bucket.real_rows for bucket in buckets),
            padded_rows=sum(bucket.padded_rows for bucket in buckets),
            captures=counters.captures,
            checks=counters.checks,
            failed_checks=counters.failed_checks,
            capture_seconds=sum(bucket.capture_seconds for bucket in buckets),
            phase_seconds=_totals(capture.phases for capture in captured),
            updates=_totals(capture.stats() for capture in captured),
            graph_bytes=sum(bucket.bytes for bucket in buckets),
            estimated=bool(estimates),
            buckets=buckets,
        )

    @property
    def eager_steps(self) -> int:
        return sum(self.eager.values())

    @property
    def static_bytes(self) -> int:
        """Bytes of all static buffers: inputs, outputs and state."""
        return self.input_bytes + self.output_bytes + self.state_bytes

    @property
    def padding_ratio(self) -> float:
        """Share of padding in the rows of graphs and emulated steps: at least 0 and below 1."""
        total = self.real_rows + self.padded_rows
        return self.padded_rows / total if total else 0.0

    @property
    def hit_ratio(self) -> float:
        """Share of steps that ran in a graph, from 0 to 1."""
        return self.graph_steps / self.steps if self.steps else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return all statistics as plain data for JSON."""
        return {
            **attrs.asdict(self),
            "eager_steps": self.eager_steps,
            "padding_ratio": self.padding_ratio,
            "hit_ratio": self.hit_ratio,
        }

    def to_prometheus(self, *others: RunnerStats, **labels: str) -> str:
        """Return the counters in the Prometheus text format.

        Args:
            *others: statistics of the other runners of the engine, for one page about all of them.
            **labels: labels of every sample, for example ``rank="0"``.

        Raises:
            InputError: two runners have the same labels.
        """
        page, known = Page({}), []
        for stats in (self, *others):
            own = {"runner": stats.name, "phase": stats.phase, "backend": stats.backend}
            page.labels = {**own, **labels}
            if page.labels in known:  # A scraper rejects a page with two equal samples.
                raise InputError(
                    f"two runners have the labels {page.labels}; create each with its own name="
                )
            known.append(page.labels)
            stats._add_to(page)
        return page.text()

    def _add_to(self, page: Page) -> None:
        pool = self.executables
        page.metric("eager_steps_total", "counter", "Steps outside a graph, by reason.")
        for reason, count in sorted(self.eager.items()):
            page.sample("eager_steps_total", count, reason=reason)
        page.metric("bucket_hits_total", "counter", "Graph or emulated steps by bucket.")
        for bucket in self.buckets:
            page.sample("bucket_hits_total", bucket.hits, bucket=bucket.key)
        for name, kind, text, value in (
            ("graph_steps_total", "counter", "Steps that replayed a graph.", self.graph_steps),
            ("emulated_steps_total", "counter", "Emulated steps.", self.emulated_steps),
            ("real_rows_total", "counter", "Rows of real requests in buckets.", self.real_rows),
            ("padded_rows_total", "counter", "Padded rows in buckets.", self.padded_rows),
            ("captures_total", "counter", "Graphs captured.", self.captures),
            ("checks_total", "counter", "Cases compared with eager runs.", self.checks),
            ("failed_checks_total", "counter", "Graphs that checks dropped.", self.failed_checks),
            ("capture_seconds_total", "counter", "Time spent capturing.", self.capture_seconds),
            ("graph_bytes", "gauge", "Device memory of the graphs.", self.graph_bytes),
            ("static_bytes", "gauge", "Static buffers.", self.static_bytes),
            ("executable_bytes", "gauge", "Executables of the pool.", pool.bytes),
            ("executables_made_total", "counter", "Executables built.", pool.made),
            ("executables_evicted_total", "counter", "Executables dropped.", pool.evicted),
            ("executable_seconds_total", "counter", "Time to build executables.", pool.seconds),
        ):
            page.metric(name, kind, text, value)
        timed = [(bucket.key, bucket.times) for bucket in self.buckets if bucket.times]
        if timed:
            name = "replay_seconds"
            page.metric(name, "histogram", "Device time of replays.")
            for key, times in timed:
                bounds = *map(str, BOUNDS), "+Inf"
                for bound, below in zip(bounds, itertools.accumulate(times.bins), strict=True):
                    page.sample(f"{name}_bucket", below, bucket=key, le=bound)
                page.sample(f"{name}_sum", times.seconds, bucket=key)
                page.sample(f"{name}_count", times.count, bucket=key)
        if self.replay_pace is not None:
            text, pace = "Time between kernels of a graph.", self.replay_pace
            page.metric("replay_pace_microseconds", "gauge", text, pace.microseconds)

    def _repr_html_(self) -> str:
        summary = [line.strip().partition(": ")[::2] for line in str(self).splitlines()]
        columns = ("bucket", "state", "hits", "memory")
        rows = [(b.key, b.state, b.hits, format_bytes(b.bytes)) for b in self.buckets]
        return html.table("runner", ("", ""), summary) + html.table("buckets", columns, rows)

    def __str__(self) -> str:
        """Return a summary of a few lines; ``to_dict`` returns all statistics."""
        captured = [bucket for bucket in self.buckets if bucket.state == "captured"]
        emulated = f", {self.emulated_steps} emulated" if self.emulated_steps else ""
        pool = self.executables
        budget = "" if pool.budget_bytes is None else f" of {format_bytes(pool.budget_bytes)}"
        if pool.budget_bytes is not None and pool.bytes > pool.budget_bytes:
            budget += ", because pinned executables and each graph's next recording are kept"
        eager = ", ".join(f"{reason} {count}" for reason, count in sorted(self.eager.items()))
        states = {bucket.state for bucket in self.buckets}
        is_pending = states == {"pending"} and not self.captures
        effective = "not captured yet" if is_pending else f"effective: {self.effective}"
        graphs = format_bytes(self.graph_bytes) + " (estimated)" * self.estimated
        if is_pending and not self.estimated:
            graphs = "unknown (plan(sample=True) estimates them)"
        return "\n".join(
            [
                f"{self.name}: {counted(self.steps, 'step')}, {self.graph_steps} in graphs "
                f"({100 * self.hit_ratio:.0f} %){emulated}, "
                f"padding {100 * self.padding_ratio:.0f} %"
                + (f", eager: {eager}" if eager else ""),
                f"  policy: {self.requested} on {self.backend} ({effective}), "
                f"{len(captured)} of {counted(len(self.buckets), 'graph')} captured in "
                f"{self.capture_seconds:.2f} s",
                f"  memory: graphs {graphs}, inputs {format_bytes(self.input_bytes)}, "
                f"outputs {format_bytes(self.output_bytes)}, "
                f"state {format_bytes(self.state_bytes)}, "
                f"executables {format_bytes(pool.bytes)}{budget} (made {pool.made} in "
                f"{pool.seconds:.2f} s, evicted {pool.evicted})",
            ]
        )


def _totals(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for part in counts:
        for name, value in part.items():
            totals[name] = totals.get(name, 0) + value
    return totals


class Page:
    """A page of Prometheus text, in which every new sample has ``labels``."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.labels = labels
        self._samples: list[str] = []
        self._families: dict[str, list[str]] = {}

    def metric(self, name: str, kind: str, text: str, value: float | None = None) -> None:
        """Begin or continue a metric; ``value`` is its only sample with these labels, if given."""
        head = f"# HELP devgraph_{name} {text}\n# TYPE devgraph_{name} {kind}"
        self._samples = self._families.setdefault(head, [])
        if value is not None:
            self.sample(name, value)

    def sample(self, name: str, value: float, **labels: str) -> None:
        inner = ",".join(f'{k}="{_escape(v)}"' for k, v in {**self.labels, **labels}.items())
        self._samples.append(f"devgraph_{name}{{{inner}}} {value}")

    def text(self) -> str:
        return "".join(
            f"{line}\n" for head, rows in self._families.items() for line in (head, *rows)
        )


def _escape(value: str) -> str:
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
