"""How ``generate`` shows what came out: tables for people, data for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from devgraph.api.backend import Backend
from devgraph.cli.generating import Run, Task, first_difference
from devgraph.cli.tables import number, percent, print_table, ratio, say, time_text
from devgraph.runners.stats import format_bytes

__all__ = ["print_runs", "report", "same_tokens"]


def same_tokens(runs: Sequence[Run]) -> bool | None:
    """Return whether graphs and eager gave the same tokens; None if eager did not run."""
    eager = next((one for one in runs if one.name == "eager"), None)
    return None if eager is None else first_difference(runs[0], eager) is None


def report(
    backend: Backend, network: Any, prompts: Sequence[str], runs: Sequence[Run]
) -> dict[str, Any]:
    return {
        "backend": backend.name,
        "device": backend.device_name,
        "dtype": str(next(network.parameters()).dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "prompts": list(prompts),
        "same_tokens": same_tokens(runs),
        "runs": [one.to_dict() for one in runs],
    }


def print_runs(backend: Backend, runs: Sequence[Run], task: Task) -> None:
    graphs = runs[0]
    print_table(
        f"what ran in graphs on {backend.name} ({backend.device_name})",
        (
            "phase",
            "requested",
            "effective",
            "steps",
            "in graphs",
            "hits",
            "padding",
            "eager, and why",
            "graphs",
            "capture",
            "memory",
        ),
        [
            (
                stats.phase,
                stats.requested,
                stats.effective,
                stats.steps,
                stats.graph_steps,
                percent(stats.hit_ratio),
                percent(stats.padding_ratio),
                stats.eager,
                sum(bucket.state == "captured" for bucket in stats.buckets),
                time_text(stats.capture_seconds),
                format_bytes(stats.graph_bytes),
            )
            for stats in graphs.phases
        ],
        numbers=("steps", "in graphs", "hits", "padding", "graphs", "capture", "memory"),
    )
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
    if graphs.capture_seconds is not None:
        say(f"captured in {time_text(graphs.capture_seconds)}, before the first token")
    if not task.greedy:
        say(f"drawn with --seed {task.sampling[0].seed}")
    if eager is not None:
        difference = first_difference(graphs, eager)
        if difference is None:
            say("graphs and eager gave the same tokens")
        else:
            prompt, token = difference
            say(
                f"graphs and eager DIFFER: first in prompt {prompt + 1} at its token {token + 1} "
                f"({graphs.tokens[prompt][token : token + 4]} not "
                f"{eager.tokens[prompt][token : token + 4]})"
            )
