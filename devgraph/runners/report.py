"""What a runner says about itself: statistics, plan and explanation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from devgraph.api.capture import Captured
from devgraph.runners.capturing import captured_seconds, sample_bytes
from devgraph.runners.parts import Parts
from devgraph.runners.stats import RunnerStats, format_bytes

__all__ = ["BucketPlan", "RunnerPlan", "explain_runner", "plan_runner", "runner_stats"]


@attrs.frozen(kw_only=True)
class BucketPlan:
    """One bucket under one variant."""

    key: str
    bucket: int
    requests: int | None
    """Request slots of the graph; None where they are no part of it."""
    tokens: int
    state: str
    """``captured``, ``pending``, or the reason why it was dropped."""
    bytes: int | None
    """Device memory: measured when captured, estimated after sampling, else None."""


@attrs.frozen(kw_only=True)
class RunnerPlan:
    """What a runner will capture or has captured."""

    name: str
    phase: str
    backend: str
    requested: str
    effective: str
    """``disabled`` while there is no graph to run."""
    capture: str
    """When buckets are captured: ``eager``, ``lazy`` or ``background``."""
    ranks: int
    variants: tuple[str, ...]
    buckets: tuple[BucketPlan, ...]
    """Largest first, which is the order of capture."""
    input_bytes: int
    output_bytes: int
    graph_bytes: int | None
    """All graphs together: measured, or estimated after sampling; None when neither is known."""
    estimated: bool

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain data for JSON."""
        return attrs.asdict(self)

    def __str__(self) -> str:
        sizes = sorted({bucket.bucket for bucket in self.buckets})
        memory = "unknown" if self.graph_bytes is None else format_bytes(self.graph_bytes)
        return "\n".join(
            [
                f"{self.name}: {self.requested} on {self.backend} (effective: {self.effective}), "
                f"captured {self.capture}, {self.ranks} rank(s)",
                f"  variants: {'; '.join(self.variants)}",
                f"  buckets: {', '.join(map(str, sizes)) or 'none'}",
                f"  memory: inputs {format_bytes(self.input_bytes)}, outputs "
                f"{format_bytes(self.output_bytes)}, graphs {memory}"
                + (" (estimated)" if self.estimated else ""),
            ]
        )


def plan_runner(parts: Parts, phase: str, effective: str, *, sample: bool) -> RunnerPlan:
    """Implement ``Runner.plan``."""
    entries = list(parts.entries)
    all_done = bool(entries) and all(entry.captured is not None for entry in entries)
    estimates: Sequence[int] = sample_bytes(parts) if sample and entries and not all_done else ()
    buckets = []
    for index, entry in enumerate(entries):
        known = entry.bytes if entry.captured is not None else None
        if known is None and estimates:
            known = estimates[min(index, len(estimates) - 1)]
        buckets.append(
            BucketPlan(
                key=str(entry.key),
                bucket=entry.key.bucket,
                requests=None if parts.run_slots else entry.size.requests,
                tokens=entry.size.tokens,
                state=entry.state,
                bytes=known,
            )
        )
    complete = all(bucket.bytes is not None for bucket in buckets)
    return RunnerPlan(
        name=parts.options.name,
        phase=phase,
        backend=parts.backend.name,
        requested=parts.config.policy,
        effective=effective,
        capture=parts.config.capture,
        ranks=parts.ranks.size,
        variants=tuple(str(dict(options)) for options in parts.entries.variants.values()),
        buckets=tuple(buckets),
        input_bytes=parts.arena.buffers.nbytes,
        output_bytes=parts.store.nbytes,
        graph_bytes=sum(bucket.bytes or 0 for bucket in buckets) if complete else None,
        estimated=bool(estimates),
    )


def runner_stats(parts: Parts, phase: str, effective: str) -> RunnerStats:
    """Implement ``Runner.stats``."""
    counters = parts.counters
    buckets = tuple(entry.stats() for entry in parts.entries)
    graph_steps = sum(bucket.hits for bucket in buckets)
    eager = {reason.value: count for reason, count in counters.reasons.items()}
    return RunnerStats(
        name=parts.options.name,
        phase=phase,
        backend=parts.backend.name,
        requested=parts.config.policy,
        effective=effective,
        steps=graph_steps + sum(eager.values()),
        graph_steps=graph_steps,
        eager=eager,
        idle_steps=counters.idle,
        real_rows=sum(bucket.real_rows for bucket in buckets),
        padded_rows=sum(bucket.padded_rows for bucket in buckets),
        eager_tokens=counters.eager_tokens,
        captures=counters.captures,
        recaptures=counters.recaptures,
        capture_seconds=captured_seconds(parts.entries),
        phase_seconds=_totals(e.phases for e in _captured(parts)),
        updates=_totals(e.stats() for e in _captured(parts)),
        graph_bytes=sum(bucket.bytes for bucket in buckets),
        input_bytes=parts.arena.buffers.nbytes,
        output_bytes=parts.store.nbytes,
        buckets=buckets,
    )


def _captured(parts: Parts) -> Iterator[Captured]:
    for entry in parts.entries.captured:
        assert entry.captured is not None
        yield entry.captured


def _totals(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for found in counts:
        for name, value in found.items():
            totals[name] = totals.get(name, 0) + value
    return totals


def explain_runner(parts: Parts, phase: str, effective: str) -> str:
    """Implement ``Runner.explain``."""
    plan = plan_runner(parts, phase, effective, sample=False)
    lines = [str(plan), "  inputs:"]
    for name, slot in parts.arena.slots.items():
        dims = ", ".join(map(str, slot.dims))
        where = "of the run" if name in parts.run_slots else "in the graph"
        lines.append(f"    {name}: {slot.dtype} ({dims}), {where}, pad {_pad_text(slot.pad)}")
    lines += [f"  output {path}: {text}" for path, text in parts.store.describe().items()]
    for entry in parts.entries:
        detail = f": {entry.detail}" if entry.detail else ""
        lines.append(f"  bucket {entry.key}: {entry.state}{detail}")
        if entry.captured is not None:
            lines += [f"    {line}" for line in entry.captured.explain().splitlines()]
    lines.append(f"  {runner_stats(parts, phase, effective).summary()}")
    return "\n".join(lines)


def _pad_text(pad: Any) -> str:
    if pad.kind == "fill":
        return str(pad.value)
    return {"last": "the last row", "ramp": f"ramp of {pad.step}"}.get(pad.kind, "a tensor's value")
