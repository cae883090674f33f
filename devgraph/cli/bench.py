"""``devgraph bench``: eager and every policy on the same work, in host and in wall time."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch

from devgraph import __version__
from devgraph.api.backend import Backend
from devgraph.api.registry import get_backend
from devgraph.cli.arguments import SIZES
from devgraph.cli.chart import chart
from devgraph.cli.contenders import Row, Shape, measure
from devgraph.cli.tables import CommandError, print_json, print_table, ratio, say, time_text
from devgraph.runners.report import format_bytes

if TYPE_CHECKING:
    from devgraph.cli.contenders import Row


def run(args: argparse.Namespace) -> int:
    """Time everything and print it; 1 when a policy fails or its outputs are not those of eager."""
    if args.plot and not args.plot.endswith(".svg"):
        raise CommandError(f"cannot write the chart {args.plot}: charts are SVG, name it *.svg")
    if args.results:
        if not args.plot:
            raise CommandError("--results draws what was measured: add --plot FILE.svg")
        _plot(_earlier(args.results), args.plot)
        return 0
    if args.threads:
        torch.set_num_threads(args.threads)
    shape = Shape(**{name: getattr(args, name) for name in SIZES}, dtype=getattr(torch, args.dtype))
    kv_len = shape.window // 2 or 1 if args.kv_len is None else args.kv_len
    if not 1 <= kv_len <= shape.window:
        raise CommandError(f"--kv-len must be from 1 to the window of {shape.window}, got {kv_len}")
    backend = get_backend(args.backend)
    with torch.inference_mode():
        outcome = measure(backend, shape, kv_len, args)
    rows = outcome.rows
    report = {
        **_report(backend, shape, kv_len, args, rows),
        "absent": outcome.absent,
        "failed": outcome.failed,
    }
    if args.json:
        print_json(report)
    else:
        _print(report, rows)
    if args.plot:
        _plot(report, args.plot)
    return 0 if all(row.equal for row in rows) and not outcome.failed else 1


def _report(
    backend: Backend,
    shape: Shape,
    kv_len: int,
    args: argparse.Namespace,
    rows: list[Row],
) -> dict[str, Any]:
    eager = rows[0]
    return {
        "title": f"one decode step on {backend.device_name}",
        "devgraph": __version__,
        "torch": torch.__version__,
        "backend": backend.name,
        "device_type": backend.device.type,
        "device": backend.device_name,
        "threads": torch.get_num_threads(),
        "shape": shape.to_dict(),
        "kv_len": kv_len,
        "steps": args.steps,
        "repeats": args.repeats,
        "rows": [
            {
                **attrs.asdict(row),
                "host_ratio": eager.host / row.host,
                "wall_ratio": eager.wall / row.wall,
            }
            for row in rows
        ],
    }


def _print(report: dict[str, Any], rows: list[Row]) -> None:
    eager = rows[0]
    shape = report["shape"]
    columns = {
        "": [row.name for row in rows],
        "host": [time_text(row.host) for row in rows],
        "wall": [time_text(row.wall) for row in rows],
        "host vs eager": [ratio(eager.host / row.host) for row in rows],
        "wall vs eager": [ratio(eager.wall / row.wall) for row in rows],
        "capture": [time_text(row.capture_seconds) for row in rows],
        "memory": [
            None if row.pool_bytes is None else format_bytes(row.pool_bytes) for row in rows
        ],
        "segments": [row.segments for row in rows],
        "nodes": [row.nodes for row in rows],
        "equals eager": [
            row.equal if row.equal == (row.difference == 0) else f"to {row.difference:.0e}"
            for row in rows
        ],
    }
    print_table(
        f"one decode step on {report['backend']} ({report['device']}, {report['threads']} CPU "
        f"threads, torch {report['torch']}): "
        + ", ".join(f"{name} {value}" for name, value in shape.items())
        + f", kv_len {report['kv_len']}",
        list(columns),
        zip(*columns.values(), strict=True),
        numbers=list(columns)[1:-1],
    )
    say(
        f"medians of {report['repeats']} repeats of {report['steps']} steps each; host: until the "
        f"call returns, wall: until the device is done"
    )
    if report["device_type"] == "cpu":
        say(
            "on the CPU a graph is a list of calls that the host replays: these figures tell what "
            "devgraph adds to a step, or saves of Python's work, and nothing of a device"
        )
    for name, why in report["absent"].items():
        say(f"{name}: not on this backend: {why}")
    for name, why in report["failed"].items():
        say(f"{name} FAILED: {why}")


def _plot(report: dict[str, Any], path: str) -> None:
    """Draw the host and wall time of every row, with the spread of its repeats, into ``path``.

    Raises:
        CommandError: the file cannot be written.
    """
    try:
        Path(path).write_text(chart(report["title"], report["rows"]), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write the chart {path}: {error}") from error


def _earlier(path: str) -> dict[str, Any]:
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
        chart(report["title"], report["rows"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CommandError(f"{path} is no result of bench --json: {error!r}") from error
    return cast("dict[str, Any]", report)
