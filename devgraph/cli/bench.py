"""``devgraph bench``, which times eager and every policy on the same work."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import torch

from devgraph import __version__
from devgraph.api.backend import Backend
from devgraph.api.policy import policies
from devgraph.api.registry import get_backend
from devgraph.cli.arguments import SIZES, check_compilers
from devgraph.cli.contenders import Peer, measure
from devgraph.cli.measure import Comparison
from devgraph.cli.tables import (
    CommandError,
    percent,
    print_json,
    print_table,
    ratio,
    say,
    time_text,
    write_file,
)
from devgraph.runners.report import format_bytes

_BUSY = 1.25
"""Ratio of the slowest to the fastest repeat on a busy machine."""


def run(args: argparse.Namespace, peers: Mapping[str, Peer] | None = None) -> int:
    """Time all contenders; return 1 if a policy fails or its outputs differ from eager.

    Args:
        args: the options of the command.
        peers: other packages to time on the same step, by name.
    """
    if args.plot is not None and not args.plot.endswith(".svg"):
        raise CommandError(
            f"cannot write the chart {args.plot}: charts are SVG, so the name must end in .svg"
        )
    if args.plot is not None and not Path(args.plot).absolute().parent.is_dir():
        raise CommandError(f"cannot write {args.plot}: there is no such folder")
    check_compilers(args, args.policy or policies())
    backend = get_backend(args.backend)
    with torch.inference_mode():
        work, compared = _decoder(backend, args, peers or {})
    return finish(backend, args, work, compared)


def finish(
    backend: Backend, args: argparse.Namespace, work: Mapping[str, Any], compared: Comparison
) -> int:
    """Print a comparison, write its chart if ``--plot`` asks for it, and return the exit code.

    Args:
        backend: the backend that ran the work.
        args: the options ``json``, ``plot``, ``steps`` and ``repeats``.
        work: the name of the work and its sizes, for the title.
        compared: the measured rows.
    """
    report = {
        "title": f"{work['work']} on {backend.device_name}",
        "devgraph": __version__,
        "torch": torch.__version__,
        "backend": backend.name,
        "device_type": backend.device.type,
        "device": backend.device_name,
        "threads": torch.get_num_threads(),
        **work,
        "steps": args.steps,
        "repeats": args.repeats,
        "rows": compared.rows,
        "absent": compared.absent,
        "failed": compared.failed,
    }
    if args.json:
        print_json(report)
    else:
        _print(report)
    if args.plot:
        write_file(args.plot, chart(report["title"], report["rows"]))
    return 0 if all(row["equal"] for row in compared.rows) and not compared.failed else 1


def _decoder(
    backend: Backend, args: argparse.Namespace, peers: Mapping[str, Peer]
) -> tuple[dict[str, Any], Comparison]:
    """Return the sizes of the decode step and the comparison."""
    sizes = {name: getattr(args, name) or size for name, (size, _) in SIZES.items()}
    kv_len = args.kv_len or sizes["window"] // 2 or 1
    if kv_len > sizes["window"]:
        raise CommandError(
            f"--kv-len must be from 1 to the window of {sizes['window']}, got {kv_len}"
        )
    work = {"work": "one decode step", "shape": {**sizes, "dtype": args.dtype}, "kv_len": kv_len}
    return work, measure(backend, sizes, kv_len, args, peers)


def _print(report: dict[str, Any]) -> None:
    rows = report["rows"]

    def column(key: str, shown: Callable[[Any], Any] = lambda value: value) -> list[Any]:
        return [None if row[key] is None else shown(row[key]) for row in rows]

    columns = {
        "": column("name"),
        "host": column("host", time_text),
        "wall": column("wall", time_text),
        "host vs eager": column("host_ratio", ratio),
        "wall vs eager": column("wall_ratio", ratio),
        "capture": column("capture_seconds", time_text),
        "memory": column("pool_bytes", format_bytes),
        "segments": column("segments"),
        "nodes": column("nodes"),
        "padding": column("padding", percent),
        "eager packs": column("eager_packs"),
        "equals eager": [
            row["equal"]
            if row["equal"] == (row["difference"] == 0)
            else f"to {row['difference']:.0e}"
            for row in rows
        ],
    }
    columns = {k: v for k, v in columns.items() if any(cell is not None for cell in v)}
    times = ["", "host", "wall", "host vs eager", "wall vs eager", "equals eager"]
    shape = {**report["shape"], **{k: report[k] for k in ("kv_len",) if k in report}}
    print_table(
        f"{report['work']} on {report['backend']} ({report['device']}, {report['threads']} CPU "
        f"threads, torch {report['torch']}): "
        + ", ".join(f"{name} {value}" for name, value in shape.items()),
        times,
        zip(*(columns[name] for name in times), strict=True),
        numbers=times[1:-1],
    )
    captures = ["", *(name for name in columns if name not in times)]
    print_table(
        "captures",
        captures,
        [row for row in zip(*(columns[name] for name in captures), strict=True) if any(row[1:])],
        numbers=captures[1:],
    )
    say(
        f"medians of {report['repeats']} repeats of {report['steps']} steps each; host: until the "
        f"call returns, wall: until the device has finished"
    )
    name, fastest, slowest = max(
        (
            (row["name"], *(pick(one["wall"] for one in row["repeats"]) for pick in (min, max)))
            for row in rows
        ),
        key=lambda spread: spread[2] / spread[1],
    )
    if slowest > _BUSY * fastest:
        say(
            f"repeats of {name} spread from {time_text(fastest)} to {time_text(slowest)}: this "
            f"machine is busy"
        )
    if report["device_type"] == "cpu":
        say(
            "on the CPU a graph is a list of calls that the host replays, so these figures show "
            "the overhead of devgraph and the Python time that it saves, not the speed of a device"
        )
    for name, why in report["absent"].items():
        say(f"{name}: not on this backend: {why}")
    for name, why in report["failed"].items():
        say(f"{name} FAILED: {why}")


_WIDTH, _LEFT, _RIGHT, _TOP, _BAR, _GAP = 820, 250, 90, 72, 18, 16
_KINDS = {
    "host": ("#4051b5", "host: until the call returns"),
    "wall": ("#f0a04b", "wall: until the device has finished"),
}


def chart(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG chart of host and wall times.

    Args:
        title: the title of the chart.
        rows: mappings with ``name`` and, in seconds, ``host``, ``wall`` or both, the same in every
            row. A line shows the range of ``repeats`` with the same figures, if a row has them.
    """
    kinds = [kind for kind in _KINDS if kind in rows[0]]
    timed = [one for row in rows for one in (row, *row.get("repeats", ()))]
    scale = (_WIDTH - _LEFT - _RIGHT) / max(one[kind] for one in timed for kind in kinds)
    step = len(kinds) * _BAR + _GAP
    height = _TOP + len(rows) * step
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#222">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="#fff"/>',
        f'<text x="20" y="28" font-size="16" font-weight="600">{escape(title)}</text>',
    ]
    for number, kind in enumerate(kinds):
        colour, meaning = _KINDS[kind]
        lines.append(
            f'<rect x="{20 + 230 * number}" y="42" width="12" height="12" fill="{colour}"/>'
            f'<text x="{38 + 230 * number}" y="53">{meaning}</text>'
        )
    for place, row in enumerate(rows):
        top = _TOP + place * step
        lines.append(
            f'<text x="{_LEFT - 12}" y="{top + len(kinds) * _BAR / 2 + 4:g}" text-anchor="end">'
            f"{escape(row['name'])}</text>"
        )
        for number, kind in enumerate(kinds):
            y, width = top + number * _BAR, row[kind] * scale
            spread = [one[kind] * scale for one in row.get("repeats", ())] or [width]
            lines += [
                f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 2}" '
                f'fill="{_KINDS[kind][0]}"/>',
                f'<path d="M{_LEFT + min(spread):.1f} {y + 8}H{_LEFT + max(spread):.1f}" '
                'stroke="#222"/>',
                f'<text x="{_LEFT + max(width, *spread) + 6:.1f}" y="{y + 13}" font-size="12">'
                f"{time_text(row[kind])}</text>",
            ]
    return "\n".join([*lines, "</svg>", ""])
