"""``devgraph bench``, which times eager execution and every policy on the same work."""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

import attrs
import torch
from torch import Tensor

from devgraph import __version__
from devgraph.api.backend import Backend
from devgraph.api.capture import Captured, capture
from devgraph.api.errors import CapabilityError, CaptureError, UpdateError, counted, format_bytes
from devgraph.api.policy import breaks, compiles, policies
from devgraph.api.registry import get_backend
from devgraph.cli.arguments import SIZES, check_compilers
from devgraph.cli.decoder import Decoder
from devgraph.cli.tables import (
    CommandError,
    check_folder,
    on_device,
    print_json,
    print_table,
    progress,
    ratio,
    say,
    time_text,
    working,
    write_file,
)
from devgraph.cli.timing import Timing, median, say_cautions, seconds_per_call

Peer = Callable[[Backend, Decoder, Tensor, Tensor, int], Callable[..., Tensor] | None]
"""A function that captures with another package and returns the replay, or None if it is absent."""


@attrs.define(kw_only=True)
class Contender:
    """An implementation of the work, with its timings."""

    name: str
    call: Callable[..., Tensor]
    """A function that runs the work once, with the host argument ``kv_len``."""
    lengths: Callable[[], Iterator[int]]
    """A function that returns an iterator over the values of ``kv_len`` in a repeat."""
    figures: Mapping[str, Any] = attrs.field(factory=dict)
    exact: bool = True
    """Whether outputs must equal eager outputs bit for bit. Otherwise they may differ by the square
    root of the dtype's epsilon, because compiled kernels round differently."""
    timings: list[Timing] = attrs.field(init=False, factory=list)

    def compare(self, expected: Tensor, got: Tensor) -> None:
        """Record the difference from the eager output, relative to the largest eager value."""
        difference = ((got - expected).abs().max() / expected.abs().max()).item()
        close = difference <= torch.finfo(expected.dtype).eps ** 0.5
        equal = torch.equal(got, expected) if self.exact else close
        self.figures = {**self.figures, "difference": difference, "equal": equal}

    def time(self, backend: Backend, steps: int) -> None:
        lengths, call = self.lengths(), self.call
        timing = seconds_per_call(lambda: call(kv_len=next(lengths)), backend, calls=steps)
        self.timings.append(timing)

    def row(self, eager: Contender) -> dict[str, Any]:
        """Return the medians over all repeats and the speedups over eager, as JSON values."""
        own, other = median(self.timings), median(eager.timings)
        return {
            "name": self.name,
            **attrs.asdict(own),
            "repeats": [attrs.asdict(timing) for timing in self.timings],
            **self.figures,
            "host_ratio": other.host / own.host,
            "wall_ratio": other.wall / own.wall,
        }


def time_in_turns(
    backend: Backend, contenders: Sequence[Contender], *, steps: int, repeats: int
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Time contenders alternately, eager first; return rows of figures, and errors by name."""
    running: list[Contender] = []
    refused: dict[str, str] = {}
    for contender in contenders:
        try:
            contender.time(backend, min(steps, 3))
        except UpdateError as error:
            refused[contender.name] = str(error)
        else:
            contender.timings.clear()
            running.append(contender)
    for _ in range(repeats):
        for contender in running:
            contender.time(backend, steps)
    return [contender.row(running[0]) for contender in running], refused


def run(args: argparse.Namespace, peers: Mapping[str, Peer] | None = None) -> int:
    """Time all contenders; return 1 if a policy fails or its outputs differ from eager."""
    if args.plot is not None and not args.plot.endswith(".svg"):
        why = "charts are SVG, so the name must end in .svg"
        raise CommandError(f"cannot write the chart {args.plot}: {why}")
    check_folder(args.plot)
    check_compilers(args, args.policy or policies())
    backend = get_backend(args.backend)
    sizes = {name: getattr(args, name) or size for name, (size, _) in SIZES.items()}
    kv_len = args.kv_len or sizes["window"] // 2 or 1
    if kv_len > (most := sizes["window"]):
        raise CommandError(f"--kv-len must be from 1 to the window of {most}, got {kv_len}")
    with torch.inference_mode():
        measured = _measure(backend, sizes, kv_len, args, peers or {})
    report = {
        "title": f"one decode step on {backend.device_name}",
        "devgraph": __version__,
        "torch": torch.__version__,
        "backend": backend.name,
        "device": backend.device_name,
        "device_type": backend.device.type,
        "threads": torch.get_num_threads(),
        "work": "one decode step",
        "shape": {**sizes, "dtype": args.dtype},
        "kv_len": kv_len,
        "steps": args.steps,
        "repeats": args.repeats,
        **measured,
    }
    if args.json:
        print_json(report)
    else:
        _print(report)
    if args.plot:
        write_file(args.plot, chart(report["title"], report["rows"]))
    return 0 if all(row["equal"] for row in report["rows"]) and not report["failed"] else 1


def _measure(
    backend: Backend,
    sizes: Mapping[str, int],
    kv_len: int,
    args: argparse.Namespace,
    peers: Mapping[str, Peer],
) -> dict[str, Any]:
    """Time one step of a decoder with all contenders that can run here."""
    model = Decoder(backend.device, getattr(torch, args.dtype), **sizes)
    ids = torch.arange(sizes["batch"], device=backend.device) % sizes["vocabulary"]
    row = torch.zeros(1, dtype=torch.int64, device=backend.device)
    step = functools.partial(model, ids, row)
    contenders = [Contender(name="eager", call=step, lengths=_in_turn(kv_len), figures=_NOTHING)]
    frozen: list[Contender] = []  # contenders that replay only at the captured length
    absent: dict[str, str] = {}
    failed: dict[str, str] = {}
    record = functools.partial(capture, model, ids, row, host_args={"kv_len": kv_len})
    with contextlib.ExitStack() as captures:
        with working("capturing") as status:
            for name, policy, compiler in _ways(backend, args):
                progress(status, f"capturing {name}")
                try:
                    captured = record(policy=policy, compiler=compiler, backend=backend)
                except CapabilityError as error:
                    absent[name] = str(error)
                except CaptureError as error:
                    failed[name] = str(error)
                else:
                    captures.enter_context(captured)
                    exact = compiler in (None, "eager")
                    replays = _replays(name, captured, kv_len, sizes["window"], exact=exact)
                    contenders += replays
                    frozen += [] if _takes_lengths(captured) else replays
            for name, make in peers.items():
                replay = make(backend, model, ids, row, kv_len)
                if replay is not None:
                    peer = Contender(name=name, call=replay, lengths=_in_turn(kv_len))
                    peer.figures = _NOTHING
                    contenders.append(peer)
        # Compare outputs on new data and at another length.
        model.fill_caches()  # Captures wrote into the caches.
        ids.copy_((ids + 1) % sizes["vocabulary"])
        row.fill_(kv_len - 1)
        other = max(1, kv_len - 1)
        expected = {length: step(kv_len=length).clone() for length in (kv_len, other)}
        for contender in contenders:
            length = kv_len if contender in frozen else other
            contender.compare(expected[length], contender.call(kv_len=length))
        lasting = {"steps": args.steps, "repeats": args.repeats}
        with working("timing") as status:
            progress(status, f"timing {counted(args.repeats, 'repeat')}")
            rows, refused = time_in_turns(backend, contenders, **lasting)
    return {"rows": rows, "absent": absent | refused, "failed": failed}


_NOTHING = dict.fromkeys(("capture_seconds", "pool_bytes", "segments", "nodes"))
"""The figures of a contender that captures nothing."""


def _ways(backend: Backend, args: argparse.Namespace) -> Iterator[tuple[str, str, str | None]]:
    """Yield name, policy and compiler of each capture."""
    for policy in args.policy or policies():
        if compiles(policy):
            for compiler in args.compiler or backend.capabilities.compilers:
                yield f"{policy}, {compiler}", policy, compiler
        else:
            yield policy, policy, None


def _in_turn(*lengths: int) -> Callable[[], Iterator[int]]:
    return lambda: itertools.cycle(lengths)


def _takes_lengths(captured: Captured) -> bool:
    return breaks(captured.policy) or captured.backend.capabilities.region_update


def _replays(
    name: str, captured: Captured, kv_len: int, window: int, *, exact: bool
) -> list[Contender]:
    """Return contenders for replays at one length, four alternating lengths, and new lengths."""
    lengths = {name: _in_turn(kv_len)}
    if not breaks(captured.policy) and _takes_lengths(captured) and window > 1:
        fresh = itertools.cycle(range(1, window + 1))
        turns = [max(1, kv_len - i) for i in range(min(4, kv_len))]
        lengths[f"{name}, 4 lengths in turn"] = _in_turn(*turns)
        lengths[f"{name}, new length in each step"] = lambda: fresh
    info, seconds = captured.info(), captured.capture_seconds
    numbers = seconds, captured.pool.bytes, info.segments, info.nodes
    figures = dict(zip(_NOTHING, numbers, strict=True))
    return [
        Contender(name=name, call=captured.replay, lengths=turns, figures=figures, exact=exact)
        for name, turns in lengths.items()
    ]


def _print(report: dict[str, Any]) -> None:
    rows = report["rows"]
    shape = {**report["shape"], "kv_len": report["kv_len"]}
    print_table(
        f"{report['work']} on {on_device(report['backend'], report['device'])}, "
        f"{report['threads']} CPU threads, torch {report['torch']}: "
        + ", ".join(f"{name} {value}" for name, value in shape.items()),
        ("", "host", "wall", "host vs eager", "wall vs eager", "equals eager"),
        [
            (
                row["name"],
                time_text(row["host"]),
                time_text(row["wall"]),
                ratio(row["host_ratio"]),
                ratio(row["wall_ratio"]),
                row["equal"]
                if row["equal"] == (row["difference"] == 0)
                else f"to {row['difference']:.0e}",
            )
            for row in rows
        ],
        numbers=("host", "wall", "host vs eager", "wall vs eager"),
    )
    captures = {row["name"]: [row[figure] for figure in _NOTHING] for row in rows}
    print_table(
        "captures",
        ("", "capture", "memory", "segments", "nodes"),
        [
            (name, time_text(seconds), format_bytes(size), segments, nodes)
            for name, (seconds, size, segments, nodes) in captures.items()
            if segments is not None
        ],
        numbers=("capture", "memory", "segments", "nodes"),
    )
    say(
        f"medians of {counted(report['repeats'], 'repeat')} of "
        f"{counted(report['steps'], 'step')} each; host: until the call returns, wall: until the "
        f"device has finished"
    )
    walls = {row["name"]: [repeat["wall"] for repeat in row["repeats"]] for row in rows}
    say_cautions(walls, on_cpu=report["device_type"] == "cpu")
    for name, why in report["absent"].items():
        say(f"{name} is not available on this backend: {why}")
    for name, why in report["failed"].items():
        say(f"{name} FAILED: {why}")


_WIDTH, _EDGE, _FIGURE, _BAR, _STEP = 480, 16, 64, 14, 18
_KINDS = {"host": "host: until the call returns", "wall": "wall: until the device has finished"}
_STYLE = """
.page { fill: #fff } text { fill: #1d2330; font: 13px system-ui, sans-serif }
.title { font-weight: 600; font-size: 14px } path { stroke: #1d2330 }
.host { fill: #4f62c8 } .wall { fill: #f0a04b }
@media (prefers-color-scheme: dark) {
  .page { fill: #1f2430 } text { fill: #e9ecf3 } path { stroke: #e9ecf3 }
  .host { fill: #7f90ee } .wall { fill: #c77f2c }
}
"""


def chart(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG chart of host and wall times for light and dark pages and narrow screens."""
    kinds = [kind for kind in _KINDS if kind in rows[0]]
    timed = [times for row in rows for times in (row, *row.get("repeats", ()))]
    scale = (_WIDTH - 2 * _EDGE - _FIGURE) / max(times[kind] for times in timed for kind in kinds)
    row_height = len(kinds) * _STEP + 28
    titles = textwrap.wrap(title, 58)
    legend = 30 + 20 * len(titles)
    top = legend + 18 * len(kinds)
    height = top + len(rows) * row_height + 8
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH * 1.25:g}" height="{height * 1.25:g}">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{_WIDTH}" height="{height}" rx="8"/>',
        *(
            f'<text class="title" x="{_EDGE}" y="{26 + 20 * number}">{escape(line)}</text>'
            for number, line in enumerate(titles)
        ),
    ]
    for number, kind in enumerate(kinds):
        y = legend + 18 * number
        lines.append(
            f'<rect class="{kind}" x="{_EDGE}" y="{y - 10}" width="12" height="12"/>'
            f'<text x="{_EDGE + 18}" y="{y}">{_KINDS[kind]}</text>'
        )
    for row in rows:
        lines.append(f'<text x="{_EDGE}" y="{top + 13}">{escape(row["name"])}</text>')
        for number, kind in enumerate(kinds):
            y, width = top + 18 + number * _STEP, row[kind] * scale
            spread = [repeat[kind] * scale for repeat in row.get("repeats", ())] or [width]
            lines += [
                f'<rect class="{kind}" x="{_EDGE}" y="{y}" width="{width:.1f}" height="{_BAR}"/>',
                f'<path d="M{_EDGE + min(spread):.1f} {y + 7}H{_EDGE + max(spread):.1f}"/>',
                f'<text x="{_EDGE + max(width, *spread) + 6:.1f}" y="{y + 12}">'
                f"{time_text(row[kind])}</text>",
            ]
        top += row_height
    return "\n".join([*lines, "</svg>", ""])
