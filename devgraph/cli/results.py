"""How ``generate`` shows what came out: tables for people, data for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from devgraph.api.backend import Backend
from devgraph.api.config.resolve import Resolution
from devgraph.cli.generating import Run, Task, first_difference
from devgraph.cli.tables import number, percent, print_table, ratio, say, time_text
from devgraph.runners.report import RunnerStats, format_bytes

__all__ = ["print_runs", "report", "same_tokens"]

MOST_BUCKETS = 8
"""Buckets of a phase that the summary lists."""


def same_tokens(runs: Sequence[Run]) -> bool | None:
    """Return whether graphs and eager gave the same tokens; None if eager did not run."""
    eager = next((one for one in runs if one.name == "eager"), None)
    return None if eager is None else first_difference(runs[0], eager) is None


def report(
    backend: Backend,
    resolution: Resolution,
    network: Any,
    prompts: Sequence[str],
    runs: Sequence[Run],
) -> dict[str, Any]:
    """Return everything as JSON has it."""
    return {
        "mode": resolution.to_dict(),
        "backend": backend.name,
        "device": backend.device_name,
        "dtype": str(next(network.parameters()).dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "prompts": list(prompts),
        "same_tokens": same_tokens(runs),
        "runs": [one.to_dict() for one in runs],
    }


def print_runs(backend: Backend, resolution: Resolution, task: Task, runs: Sequence[Run]) -> None:
    """Print what ran in graphs, how fast everything was, and whether tokens are the same."""
    graphs = runs[0]
    _print_phases(backend, resolution, graphs)
    _print_speed(runs)
    captured = "; ".join(_buckets(stats) for stats in graphs.phases)
    say(f"buckets: {captured}")
    if graphs.capture_seconds is not None:
        say(f"captured in {time_text(graphs.capture_seconds)}, before the first token")
    if not task.greedy:
        say(f"drawn with --seed {task.sampling[0].seed}")
    eager = next((one for one in runs if one.name == "eager"), None)
    if eager is None:
        return
    difference = first_difference(graphs, eager)
    if difference is None:
        say("graphs and eager gave the same tokens")
        return
    prompt, token = difference
    mine, theirs = graphs.tokens[prompt][token:], eager.tokens[prompt][token:]
    say(
        f"graphs and eager DIFFER, first in prompt {prompt + 1} at its token {token + 1}: "
        f"{mine[0] if mine else 'end'} and {theirs[0] if theirs else 'end'}"
    )


def _print_phases(backend: Backend, resolution: Resolution, graphs: Run) -> None:
    columns = {
        "phase": [stats.phase for stats in graphs.phases],
        "requested": [resolution.requested.phase(stats.phase).policy for stats in graphs.phases],
        "effective": [stats.effective for stats in graphs.phases],
        "steps": [stats.steps for stats in graphs.phases],
        "in graphs": [stats.graph_steps for stats in graphs.phases],
        "hits": [percent(stats.hit_ratio) for stats in graphs.phases],
        "padding": [percent(stats.padding_ratio) for stats in graphs.phases],
        "eager, and why": [stats.eager for stats in graphs.phases],
        "graphs": [sum(b.state == "captured" for b in stats.buckets) for stats in graphs.phases],
        "capture": [time_text(stats.capture_seconds) for stats in graphs.phases],
        "memory": [format_bytes(stats.graph_bytes) for stats in graphs.phases],
    }
    print_table(
        f"what ran in graphs on {backend.name} ({backend.device_name})",
        list(columns),
        zip(*columns.values(), strict=True),
        numbers=("steps", "in graphs", "hits", "padding", "graphs", "capture", "memory"),
    )


def _buckets(stats: RunnerStats) -> str:
    """Return the captured buckets of a phase, the smallest first and all but a few of many."""
    keys = [bucket.key for bucket in reversed(stats.buckets) if bucket.state == "captured"]
    if len(keys) > MOST_BUCKETS:
        keys = [*keys[: MOST_BUCKETS - 1], "...", keys[-1]]
    unit = "tokens" if stats.phase == "prefill" else "requests"
    return f"{stats.phase} {', '.join(keys)} {unit}" if keys else f"{stats.phase} none"


def _print_speed(runs: Sequence[Run]) -> None:
    graphs = runs[0]
    eager = next((one for one in runs if one.name == "eager"), None)
    print_table(
        "speed",
        ("", "tokens", "time", "tokens/s", "decode tokens/s", "vs eager", "same tokens as graphs"),
        [
            (
                one.name,
                one.generated,
                time_text(one.seconds),
                number(one.rate),
                number(one.decode_rate),
                None if eager is None else ratio(one.rate / eager.rate),
                None if one is graphs else first_difference(graphs, one) is None,
            )
            for one in runs
        ],
        numbers=("tokens", "time", "tokens/s", "decode tokens/s", "vs eager"),
    )
