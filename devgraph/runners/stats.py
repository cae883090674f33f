"""What a runner did: counters as data, as Prometheus text, and as one line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from devgraph.runners.decision import Reason

__all__ = ["BucketStats", "Counters", "RunnerStats", "format_bytes"]


class Counters:
    """The live counters of a runner; ``snapshot`` reads them."""

    __slots__ = ("captures", "eager_tokens", "idle", "reasons", "recaptures")

    def __init__(self) -> None:
        self.reasons: dict[Reason, int] = {}
        self.eager_tokens = 0
        self.idle = 0
        self.captures = 0
        self.recaptures = 0

    def count(self, reason: Reason) -> None:
        """Count one step that did not run in a graph."""
        self.reasons[reason] = self.reasons.get(reason, 0) + 1


@attrs.frozen(kw_only=True)
class BucketStats:
    """One graph: its key, how often it ran, and the rows it was given and held."""

    key: str
    state: str
    """``captured``, ``pending`` or the reason why it was dropped."""
    hits: int
    real_rows: int
    padded_rows: int
    """Rows beyond the real ones, summed over all hits."""
    bytes: int
    """Device memory that this capture added: measured for the first of a round and under a memory
    budget, else an equal share of what the round's others added."""
    capture_seconds: float


@attrs.frozen(kw_only=True)
class RunnerStats:
    """A snapshot of a runner.

    ``steps == graph_steps + sum(eager.values())`` always holds.
    """

    name: str
    phase: str
    backend: str
    requested: str
    """The policy of the configuration."""
    effective: str
    """The policy that graphs run under now; ``disabled`` while there is none to run."""
    steps: int
    graph_steps: int
    eager: Mapping[str, int]
    """Steps that ran outside a graph, by ``Reason`` value."""
    idle_steps: int
    """Graph steps among ``graph_steps`` without a real request, for the other ranks' sake."""
    real_rows: int
    padded_rows: int
    eager_tokens: int
    captures: int
    recaptures: int
    """Captures after an ``invalidate``."""
    capture_seconds: float
    phase_seconds: Mapping[str, float]
    """Time that the present graphs took to make, by phase: warm-up and capture, and under
    ``piecewise`` activate and compile before them."""
    updates: Mapping[str, float]
    """What the policy counted over the present graphs: how host arguments were applied, or, under
    ``piecewise``, pieces and compilations."""
    graph_bytes: int
    input_bytes: int
    output_bytes: int
    buckets: tuple[BucketStats, ...]

    @property
    def eager_steps(self) -> int:
        """Steps that ran eagerly, whatever the reason."""
        return sum(self.eager.values())

    @property
    def padding_ratio(self) -> float:
        """Padded rows per row computed in graphs, from 0 to below 1."""
        total = self.real_rows + self.padded_rows
        return self.padded_rows / total if total else 0.0

    @property
    def hit_ratio(self) -> float:
        """Graph steps per step, from 0 to 1."""
        return self.graph_steps / self.steps if self.steps else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON."""
        found: dict[str, Any] = attrs.asdict(self)
        return {
            **found,
            "eager_steps": self.eager_steps,
            "padding_ratio": self.padding_ratio,
            "hit_ratio": self.hit_ratio,
        }

    def to_prometheus(self, **labels: str) -> str:
        """Return the counters in the Prometheus text format.

        Args:
            **labels: added to every sample, for example ``rank="0"``.
        """
        base = {"runner": self.name, "phase": self.phase, "backend": self.backend, **labels}
        page = _Page(base)
        page.metric("graph_steps_total", "counter", "Steps that replayed a graph.")
        page.sample("graph_steps_total", self.graph_steps)
        page.metric("eager_steps_total", "counter", "Steps outside a graph, by reason.")
        for reason, count in sorted(self.eager.items()):
            page.sample("eager_steps_total", count, reason=reason)
        page.metric("bucket_hits_total", "counter", "Replays by bucket.")
        for bucket in self.buckets:
            page.sample("bucket_hits_total", bucket.hits, bucket=bucket.key)
        for name, kind, text, value in (
            ("real_rows_total", "counter", "Rows of real requests in graphs.", self.real_rows),
            ("padded_rows_total", "counter", "Padded rows in graphs.", self.padded_rows),
            ("captures_total", "counter", "Graphs captured.", self.captures),
            ("capture_seconds_total", "counter", "Time spent capturing.", self.capture_seconds),
            ("graph_bytes", "gauge", "Device memory of the graphs.", self.graph_bytes),
            ("static_bytes", "gauge", "Static buffers.", self.input_bytes + self.output_bytes),
        ):
            page.metric(name, kind, text)
            page.sample(name, value)
        return page.text()

    def summary(self) -> str:
        """Return one line about the steps so far."""
        eager = ", ".join(f"{reason} {count}" for reason, count in sorted(self.eager.items()))
        return (
            f"{self.name}: {self.steps} steps, {self.graph_steps} in graphs "
            f"({100 * self.hit_ratio:.0f} %), padding {100 * self.padding_ratio:.0f} %"
            + (f", eager: {eager}" if eager else "")
        )


class _Page:
    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self._lines: list[str] = []

    def metric(self, name: str, kind: str, text: str) -> None:
        self._lines += [f"# HELP devgraph_{name} {text}", f"# TYPE devgraph_{name} {kind}"]

    def sample(self, name: str, value: float, **labels: str) -> None:
        inner = ",".join(f'{k}="{_escape(v)}"' for k, v in {**self._labels, **labels}.items())
        self._lines.append(f"devgraph_{name}{{{inner}}} {value}")

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


def _escape(value: str) -> str:
    return str(value).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def format_bytes(count: int) -> str:
    """Return a byte count for people: ``"1.5 GiB"``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
