"""``devgraph bench``: eager and every policy on the same work, in host and in wall time."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch

from devgraph import __version__
from devgraph.api.backend import Backend
from devgraph.api.capture import Captured, capture
from devgraph.api.errors import CapabilityError, CaptureError, UpdateError
from devgraph.api.policy import POLICIES
from devgraph.api.registry import get_backend
from devgraph.cli.dtypes import DTYPES, dtype_named
from devgraph.cli.measure import Timing, median, seconds_per_call
from devgraph.cli.public import public_breakable
from devgraph.cli.tables import (
    CommandError,
    print_json,
    print_table,
    ratio,
    say,
    time_text,
    working,
)
from devgraph.cli.workload import Decoder, Shape
from devgraph.runners.stats import format_bytes

__all__ = ["add_arguments", "run"]

logger = logging.getLogger(__name__)

_SIZES = {"layers": 8, "hidden": 256, "heads": 4, "vocabulary": 4096, "batch": 1, "window": 512}


@attrs.frozen(kw_only=True)
class Row:
    """One way to run the step, and what it costs."""

    name: str
    host: float
    """Seconds until the call returns, median of the repeats."""
    wall: float
    """Seconds until its work is done, in a row of steps."""
    repeats: tuple[Timing, ...]
    equal: bool
    """Whether its outputs were those of eager, bit for bit."""
    capture_seconds: float | None = None
    pool_bytes: int | None = None
    segments: int | None = None
    nodes: int | None = None


class _Contender:
    """One way to run the step: a call per step with the host argument of that step."""

    def __init__(
        self,
        name: str,
        call: Callable[..., torch.Tensor],
        lengths: Callable[[], Iterator[int]],
        captured: Captured | None = None,
    ) -> None:
        self.name = name
        self.memory = None if captured is None else captured.pool.bytes
        self.takes_lengths = (
            captured is None
            or captured.policy != "full"
            or captured.backend.capabilities.region_update
        )
        self.call = call
        self.captured = captured
        self.timings: list[Timing] = []
        self.equal = False
        self._lengths = lengths

    def time(self, backend: Backend, steps: int) -> None:
        """Time one repeat of ``steps`` steps."""
        lengths, call = self._lengths(), self.call
        self.timings.append(
            seconds_per_call(lambda: call(kv_len=next(lengths)), backend, calls=steps)
        )

    def row(self) -> Row:
        """Return the medians of all repeats."""
        timing = median(self.timings)
        captured = self.captured
        info = None if captured is None else captured.info()
        return Row(
            name=self.name,
            host=timing.host,
            wall=timing.wall,
            repeats=tuple(self.timings),
            equal=self.equal,
            capture_seconds=None if captured is None else captured.capture_seconds,
            pool_bytes=self.memory,
            segments=None if info is None else info.segments,
            nodes=None if info is None else info.nodes,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bench``."""
    parser.add_argument("--backend", default="auto", help="(default: auto)")
    for name, size in _SIZES.items():
        parser.add_argument(
            f"--{name}", type=int, default=size, metavar="N", help=f"(default: {size})"
        )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(default: float32)")
    parser.add_argument(
        "--kv-len", type=int, metavar="N", help="rows to attend over (default: half the window)"
    )
    parser.add_argument(
        "--steps", type=int, default=50, metavar="N", help="steps a repeat (default: 50)"
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=5,
        metavar="N",
        help="repeats, of which the median counts (default: 5)",
    )
    parser.add_argument(
        "--policy",
        action="append",
        choices=POLICIES,
        help="only this policy; may be repeated (default: all)",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads of torch")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--plot", metavar="FILE", help="write a chart (needs matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Time everything and print it; 1 when a policy fails or its outputs are not those of eager."""
    if args.plot and importlib.util.find_spec("matplotlib") is None:
        raise CommandError("--plot needs matplotlib: pip install 'devgraph[plot]'")
    for name in ("steps", "repeats"):
        if getattr(args, name) < 1:
            raise CommandError(f"--{name} must be at least 1, got {getattr(args, name)}")
    if args.threads:
        torch.set_num_threads(args.threads)
    shape = Shape(**{name: getattr(args, name) for name in _SIZES}, dtype=dtype_named(args.dtype))
    kv_len = shape.window // 2 or 1 if args.kv_len is None else args.kv_len
    if not 1 <= kv_len <= shape.window:
        raise CommandError(f"--kv-len must be from 1 to the window of {shape.window}, got {kv_len}")
    backend = get_backend(args.backend)
    absent: dict[str, str] = {}
    failed: dict[str, str] = {}
    with torch.inference_mode():
        rows = _measure(backend, shape, kv_len, args, absent, failed)
    report = {
        **_report(backend, shape, kv_len, args, rows),
        "absent": absent,
        "failed": failed,
    }
    if args.json:
        print_json(report)
    else:
        _print(report, rows)
    if args.plot:
        from devgraph.cli.plot import plot_rows

        plot_rows(rows, args.plot, title=f"decode step on {report['device']}")
    return 0 if all(row.equal for row in rows) and not failed else 1


def _measure(
    backend: Backend,
    shape: Shape,
    kv_len: int,
    args: argparse.Namespace,
    absent: dict[str, str],
    failed: dict[str, str],
) -> list[Row]:
    """Return a row for every way that can run; the others go into ``absent`` and ``failed``."""
    model = Decoder(shape, backend.device)
    ids = torch.arange(shape.batch, device=backend.device) % shape.vocabulary
    where = torch.zeros(1, dtype=torch.int64, device=backend.device)
    contenders = [
        _Contender("eager", lambda **h: model(ids, where, **h), lambda: itertools.repeat(kv_len))
    ]
    with working("capturing"):
        for policy in args.policy or POLICIES:
            try:
                captured = capture(
                    model, ids, where, policy=policy, backend=backend, host_args={"kv_len": kv_len}
                )
            except CapabilityError as error:
                absent[policy] = str(error)
                continue
            except CaptureError as error:
                failed[policy] = str(error)
                continue
            contenders += _contenders(captured, shape, kv_len)
        public = public_breakable(backend, model, ids, where, kv_len)
        if public is not None:
            contenders.append(
                _Contender(public.name, public.replay, lambda: itertools.repeat(kv_len))
            )
    model.fill_caches()  # steps during captures wrote there, and their tokens are no data
    try:
        ids.copy_((ids + 1) % shape.vocabulary)
        where.fill_(kv_len - 1)
        _check(contenders, kv_len)
        with working("timing"):
            running = _warm(contenders, backend, min(args.steps, 3), absent)
            for _ in range(args.repeats):
                for contender in running:
                    contender.time(backend, args.steps)
        return [contender.row() for contender in running]
    finally:
        for contender in contenders:
            if contender.captured is not None:
                contender.captured.close()


def _contenders(captured: Captured, shape: Shape, kv_len: int) -> list[_Contender]:
    """Return the ways to replay one capture: one length, a few that return, always a new one."""
    ways = [
        _Contender(
            captured.policy, captured.replay, lambda: itertools.repeat(kv_len), captured=captured
        )
    ]
    if captured.policy == "full" and ways[0].takes_lengths and shape.window > 1:
        known = [max(1, kv_len - i) for i in range(min(4, kv_len))]
        ways.append(
            _Contender(
                "full, 4 lengths in turn",
                captured.replay,
                lambda: itertools.cycle(known),
                captured=captured,
            )
        )
        fresh = itertools.cycle(range(1, shape.window + 1))
        ways.append(
            _Contender(
                "full, other length each step", captured.replay, lambda: fresh, captured=captured
            )
        )
    return ways


def _warm(
    contenders: list[_Contender], backend: Backend, steps: int, absent: dict[str, str]
) -> list[_Contender]:
    """Run every way a little, untimed; return those that can run, with the others in ``absent``."""
    running = []
    for contender in contenders:
        try:
            contender.time(backend, steps)
        except UpdateError as error:
            absent[contender.name] = str(error)
            continue
        contender.timings.clear()
        running.append(contender)
    return running


def _check(contenders: list[_Contender], kv_len: int) -> None:
    """Compare every way with eager, at another length than that of capture where it takes one."""
    other = max(1, kv_len - 1)
    eager = contenders[0].call
    expected = {length: eager(kv_len=length).clone() for length in (kv_len, other)}
    for contender in contenders:
        length = other if contender.takes_lengths else kv_len
        contender.equal = torch.equal(contender.call(kv_len=length), expected[length])


def _report(
    backend: Backend,
    shape: Shape,
    kv_len: int,
    args: argparse.Namespace,
    rows: list[Row],
) -> dict[str, Any]:
    eager = rows[0]
    return {
        "devgraph": __version__,
        "torch": torch.__version__,
        "backend": backend.name,
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
    print_table(
        f"one decode step on {report['backend']} ({report['device']}, {report['threads']} CPU "
        f"threads, torch {report['torch']}): "
        + ", ".join(f"{name} {value}" for name, value in shape.items())
        + f", kv_len {report['kv_len']}",
        (
            "",
            "host",
            "wall",
            "host vs eager",
            "wall vs eager",
            "capture",
            "memory",
            "segments",
            "nodes",
            "equals eager",
        ),
        [
            (
                row.name,
                time_text(row.host),
                time_text(row.wall),
                ratio(eager.host / row.host),
                ratio(eager.wall / row.wall),
                time_text(row.capture_seconds),
                None if row.pool_bytes is None else format_bytes(row.pool_bytes),
                row.segments,
                row.nodes,
                row.equal,
            )
            for row in rows
        ],
        numbers=(
            "host",
            "wall",
            "host vs eager",
            "wall vs eager",
            "capture",
            "memory",
            "segments",
            "nodes",
        ),
    )
    say(
        f"medians of {report['repeats']} repeats of {report['steps']} steps each; host: until the "
        f"call returns, wall: until the device is done"
    )
    for name, why in report["absent"].items():
        say(f"{name}: not on this backend: {why}")
    for name, why in report["failed"].items():
        say(f"{name} FAILED: {why}")
