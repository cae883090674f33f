"""``devgraph explain``, which shows the segments of a capture."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import statistics
from typing import Any

import attrs
import torch

from devgraph.api import html
from devgraph.api.capture import Captured, capture
from devgraph.api.errors import counted, format_bytes
from devgraph.api.graph import DeviceGraph
from devgraph.api.marks.names import NodeRange, nodes_text
from devgraph.api.registry import get_backend
from devgraph.cli.arguments import check_compilers
from devgraph.cli.tables import (
    check_folder,
    on_device,
    print_json,
    print_table,
    say,
    time_text,
    write_file,
)
from devgraph.cli.target import Target, find_target, user_code
from devgraph.cli.timing import say_cautions, seconds_per_call

_RUNS = 10


@attrs.frozen(kw_only=True)
class _Part:
    """One segment of the report."""

    index: int
    kind: str
    """``graph`` or ``eager``."""
    name: str
    nodes: int | None = None
    regions: tuple[str, ...] = ()
    ranges: tuple[NodeRange, ...] = ()
    bytes: int = 0
    seconds: float
    """Median time of a few replays, from the launch until the device has finished."""
    spread: tuple[float, ...]
    """Times of the replays in seconds, without the fastest and the slowest quarter."""


def run(args: argparse.Namespace) -> int:
    """Capture and print the report; return 0."""
    check_compilers(args, [args.policy])
    for path in (args.dot, args.chrome_trace, args.html):
        check_folder(path)
    backend = get_backend(args.backend)
    target = find_target(args, args.target)
    owner = getattr(target.fn, "__self__", target.fn)
    with contextlib.ExitStack() as stack:
        with torch.set_grad_enabled(args.grad), user_code(target.name):
            way: dict[str, Any] = {
                "policy": args.policy,
                "compiler": args.compiler,
                "backend": backend,
            }
            way["name_nodes"] = owner if isinstance(owner, torch.nn.Module) else True
            way |= {"kwargs": target.kwargs, "host_args": target.host_args}
            captured = capture(target.fn, *target.args, **way)
            stack.enter_context(captured)
            parts = list(map(_part, itertools.count(), captured.segments, _timed(captured, target)))
        if args.dot is not None:
            write_file(args.dot, _dot(target, parts))
        if args.chrome_trace is not None:
            write_file(args.chrome_trace, json.dumps(_trace(captured, parts)))
        if args.html is not None:
            write_file(args.html, _page(captured, target, parts))
        if args.json:
            print_json(_data(captured, parts))
        else:
            _print(captured, target, parts)
    return 0


def _timed(captured: Captured, target: Target) -> list[list[float]]:
    """Return the ascending times of each segment in seconds, with a synchronization per segment."""
    captured.replay(**target.host_args)
    time = functools.partial(seconds_per_call, backend=captured.backend, calls=1)
    runs = [[time(one.replay).wall for one in captured.segments] for _ in range(_RUNS)]
    return [sorted(column) for column in zip(*runs, strict=True)]


def _part(index: int, segment: Any, walls: list[float]) -> _Part:
    quarter = _RUNS // 4
    part = functools.partial(
        _Part, index=index, seconds=statistics.median(walls), spread=tuple(walls[quarter:-quarter])
    )
    if not isinstance(segment, DeviceGraph):
        return part(kind="eager", name=repr(segment).strip("<>"))
    info = segment.info()
    regions = tuple(call.mark.name for call in segment.calls)
    work: dict[str, Any] = {"nodes": info.nodes, "bytes": info.bytes, "regions": regions}
    return part(kind="graph", name=f"graph {index}", ranges=tuple(segment.ranges), **work)


def _data(captured: Captured, parts: list[_Part]) -> dict[str, Any]:
    return {
        "policy": captured.policy,
        "backend": captured.backend.name,
        "device": captured.backend.device_name,
        "info": attrs.asdict(captured.info()),
        "phases": captured.phases,
        "pool_bytes": captured.pool.bytes,
        "segments": [attrs.asdict(part) for part in parts],
    }


def _page(captured: Captured, target: Target, parts: list[_Part]) -> str:
    longest = max(part.seconds for part in parts)
    times = [
        (part.index, part.name, time_text(part.seconds), "█" * round(30 * part.seconds / longest))
        for part in parts
    ]
    ranges = [
        (part.index, "\u2003" * span.depth + span.name, nodes_text(span.first, span.stop))
        for part in parts
        for span in part.ranges
    ]
    memory = [
        ("pool", format_bytes(captured.pool.bytes)),
        ("recordings, with executables", format_bytes(captured.pool.recordings.bytes)),
        *((part.name, format_bytes(part.bytes)) for part in parts if part.kind == "graph"),
    ]
    return html.page(
        f"{target.name} on {captured.backend.device_name}",
        captured._repr_html_(),
        html.table("one replay", ("#", "segment", "median", ""), times),
        html.table("nodes", ("#", "module or region", "nodes"), ranges),
        html.table("memory", ("", ""), memory),
    )


def _print(captured: Captured, target: Target, parts: list[_Part]) -> None:
    info = captured.info()
    print_table(
        f"{target.name}: policy {captured.policy} on "
        f"{on_device(captured.backend.name, captured.backend.device_name)}",
        ("#", "segment", "nodes", "updatable regions", "bytes", "replay"),
        [
            (p.index, "graph", p.nodes, _counted(p.regions) or None, format_bytes(p.bytes), time)
            if p.kind == "graph"
            else (p.index, p.name, None, None, None, time)
            for p, time in ((part, time_text(part.seconds)) for part in parts)
        ],
        numbers=("#", "nodes", "bytes", "replay"),
    )
    for part in parts:
        for span in part.ranges:
            say(f"{part.index}: {'  ' * span.depth}{span}")
    say(
        f"{counted(info.segments, 'segment')}, {counted(info.nodes, 'node')}, "
        f"captured in {time_text(info.capture_seconds)}, "
        f"pool {format_bytes(captured.pool.bytes)}, {counted(info.recordings, 'recording')} "
        f"({format_bytes(captured.pool.recordings.bytes)} with executables)"
    )
    say_cautions({part.name: part.spread for part in parts}, on_cpu=False)


def _counted(names: tuple[str, ...]) -> str:
    return ", ".join(f"{name} x{names.count(name)}" for name in dict.fromkeys(names))


def _dot(target: Target, parts: list[_Part]) -> str:
    lines = [
        "digraph capture {",
        "  rankdir=TB;",
        "  node [shape=box, style=filled];",
        f"  label={json.dumps(target.name, ensure_ascii=False)};",
    ]
    for part in parts:
        if part.kind == "graph":
            body, color = [part.name, counted(part.nodes, "node"), *part.regions], "lightblue"
        else:
            body, color = [part.name], "lightyellow"
        label = json.dumps("\n".join([*body, str(time_text(part.seconds))]), ensure_ascii=False)
        lines.append(f"  s{part.index} [label={label}, fillcolor={color}];")
    lines += [f"  s{left.index} -> s{left.index + 1};" for left in parts[:-1]]
    return "\n".join([*lines, "}", ""])


def _trace(captured: Captured, parts: list[_Part]) -> dict[str, Any]:
    """Return the segments in sequence as a Chrome trace, whose times are in microseconds."""
    where = {"pid": 0, "tid": 0}
    title = {"name": f"{captured.backend.name}: policy {captured.policy}"}
    events = [{"ph": "M", **where, "name": "process_name", "args": title}]
    start = 0.0
    for part in parts:
        times = {"ts": start * 1e6, "dur": part.seconds * 1e6}
        about = {"nodes": part.nodes, "regions": list(part.regions), "bytes": part.bytes}
        event = {"ph": "X", **where, "cat": part.kind, "name": part.name, **times, "args": about}
        events.append(event)
        start += part.seconds
    return {"traceEvents": events, "displayTimeUnit": "ms"}
