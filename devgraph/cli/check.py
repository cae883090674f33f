"""``devgraph check``, which lists places that a device capture would refuse or freeze."""

from __future__ import annotations

import argparse
from linecache import getline
from typing import Any

import attrs
import torch

from devgraph.api.errors import CaptureError, did_you_mean
from devgraph.api.marks.source import raising_line, user_line
from devgraph.api.registry import get_backend
from devgraph.cli.arguments import KINDS
from devgraph.cli.tables import CommandError, print_json, print_lines, say
from devgraph.cli.target import Target, find_target, user_code


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if there are any."""
    for kind in args.ignore:
        if kind not in KINDS:
            raise CommandError(
                f"--ignore {kind}: there is no such kind. {did_you_mean(kind, KINDS)}"
            )
    target = find_target(args)
    with torch.set_grad_enabled(args.grad), user_code(target.name):
        findings = [one for one in check_target(target) if one["kind"] not in args.ignore]
    if args.json:
        print_json({"target": target.name, "ok": not findings, "findings": findings})
    else:
        _print(target, findings)
    return 1 if findings else 0


def check_target(target: Target) -> list[dict[str, Any]]:
    """Run ``target`` under the CPU reference and return its findings in order, as JSON values.

    No device work runs. The run continues with an assumed value after each read of a device value.
    """
    reference: Any = get_backend("cpu")  # only the reference lists findings
    try:
        found = [
            attrs.asdict(one)
            for one in reference.check(
                target.fn, target.args, kwargs=target.kwargs, host_args=target.host_args
            )
        ]
    except CaptureError as error:  # no value can be assumed here
        where = raising_line(error) or user_line()
        finding = {"kind": "refused", "op": type(error).__name__, "text": str(error)}
        found = [{**finding, "file": where.file, "line": where.line}]
    return [{**one, "source": getline(one["file"], one["line"]).strip()} for one in found]


def _print(target: Target, findings: list[dict[str, Any]]) -> None:
    if not findings:
        say(f"{target.name}: a device capture would refuse or freeze nothing")
        return
    for one in findings:
        say("{file}:{line}: {kind}: {text}".format(**one), style="place")
        print_lines(f"    {one['source']}")
    things = "1 thing" if len(findings) == 1 else f"{len(findings)} things"
    say(f"{target.name}: {things} that a device capture would refuse or freeze")
