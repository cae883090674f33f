"""``devgraph check``: what a device capture of a function would refuse or freeze."""

from __future__ import annotations

import argparse
import linecache
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import attrs
import torch

from devgraph.api.errors import CaptureError, did_you_mean
from devgraph.api.registry import get_backend
from devgraph.cli.arguments import KINDS
from devgraph.cli.tables import CommandError, print_json, say
from devgraph.cli.target import Target, find_target, user_code


@runtime_checkable
class _Checker(Protocol):
    """A backend that lists what a capture would refuse instead of stopping at the first."""

    def check(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        *,
        kwargs: Mapping[str, Any],
        host_args: Mapping[str, Any],
    ) -> Sequence[Any]: ...


@attrs.frozen(kw_only=True)
class Finding:
    """One thing that a capture would refuse or freeze."""

    kind: str
    op: str
    file: str
    line: int
    text: str

    @property
    def source(self) -> str:
        """The line itself."""
        return linecache.getline(self.file, self.line).strip()

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON has it."""
        return {**attrs.asdict(self), "source": self.source}


def run(args: argparse.Namespace) -> int:
    """Print what was found; 1 if it is anything."""
    for kind in args.ignore:
        if kind not in KINDS:
            raise CommandError(f"--ignore {kind}: no such kind. {did_you_mean(kind, KINDS)}")
    target = find_target(args)
    with torch.set_grad_enabled(args.grad), user_code(target.name):
        findings = [one for one in check_target(target) if one.kind not in args.ignore]
    if args.json:
        found = [one.to_dict() for one in findings]
        print_json({"target": target.name, "ok": not findings, "findings": found})
    else:
        _print(target, findings)
    return 1 if findings else 0


def check_target(target: Target) -> list[Finding]:
    """Run ``target`` under the CPU reference and return what it found, in order.

    No device work is executed: a value that would have to be read is assumed, and the run goes on
    as far as it can.
    """
    backend = get_backend("cpu")
    if not isinstance(backend, _Checker):
        raise CommandError(f"backend {backend.name!r} has no check(fn, args), which this needs")
    try:
        found = backend.check(
            target.fn, target.args, kwargs=target.kwargs, host_args=target.host_args
        )
    except CaptureError as error:
        return [_refused(error)]
    return [
        Finding(kind=one.kind, op=one.op, file=one.file, line=one.line, text=one.text)
        for one in found
    ]


def _refused(error: CaptureError) -> Finding:
    """Return the finding of an error that no value could be assumed for."""
    file, line = "?", 0
    for frame, number in traceback.walk_tb(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("torch", "devgraph"):
            file, line = frame.f_code.co_filename, number
    return Finding(kind="refused", op=type(error).__name__, file=file, line=line, text=str(error))


def _print(target: Target, findings: list[Finding]) -> None:
    if not findings:
        say(f"{target.name}: nothing that a device capture would refuse or freeze")
        return
    for one in findings:
        say(f"{one.file}:{one.line}: {one.kind}: {one.text}")
        say(f"    {one.source}")
    things = "1 thing" if len(findings) == 1 else f"{len(findings)} things"
    say(f"{target.name}: {things} that a device capture would refuse or freeze")
