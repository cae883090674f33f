"""``devgraph check``, which lists code that a device capture would refuse or freeze."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from linecache import getline
from pathlib import Path
from typing import Any

import attrs
import torch

from devgraph import __version__
from devgraph.api.errors import counted, did_you_mean
from devgraph.api.registry import get_backend
from devgraph.cli.arguments import KINDS
from devgraph.cli.tables import CommandError, print_json, print_lines, say
from devgraph.cli.target import Target, find_target, user_code

_IGNORE = re.compile(r"#\s*devgraph:\s*ignore\[([\w\s,]+)\]")
"""A comment that suppresses the listed kinds of findings on its line."""


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if there are any."""
    ignored = [kind for text in args.ignore for kind in text.split(",")]
    for kind in ignored:
        if kind not in KINDS:
            raise CommandError(f"--ignore {kind}: no such kind. {did_you_mean(kind, KINDS)}")
    if args.json and args.output_format != "text":
        raise CommandError(f"--json and --output-format {args.output_format}: choose one of them")
    findings: dict[str, list[dict[str, Any]]] = {}
    for name in args.target:
        target = find_target(args, name)
        with torch.set_grad_enabled(args.grad), user_code(name):
            findings[name] = [
                finding
                for finding in check_target(target)
                if finding["kind"] not in {*ignored, *_ignored_kinds(finding["source"])}
            ]
    together = [{"target": name, **row} for name, rows in findings.items() for row in rows]
    if args.json:
        print_json({"targets": args.target, "ok": not together, "findings": together})
    elif args.output_format == "github":
        print_lines(*map(_github, together))
    elif args.output_format == "sarif":
        print_json(_sarif(together))
    else:
        for name, rows in findings.items():
            _print(name, rows)
    return 1 if together else 0


def check_target(target: Target) -> list[dict[str, Any]]:
    """Check ``target`` with the CPU reference and return the findings by line, as JSON values.

    No device work runs. After a host read, the run continues with an assumed value.
    """
    reference: Any = get_backend("cpu")  # Only the reference backend lists findings.
    options = {"kwargs": target.kwargs, "host_args": target.host_args}
    findings = [*map(attrs.asdict, reference.check(target.fn, target.args, **options))]
    for one in findings:
        one["see"] = _explanation(one["kind"])
        one["source"] = getline(one["file"], one["line"]).strip()
    return sorted(findings, key=lambda finding: (finding["file"], finding["line"]))


def _explanation(kind: str) -> str:
    section = KINDS[kind]
    in_page = "#" in section
    return f"{section} in the documentation" if in_page else f"devgraph troubleshoot {section}"


def _ignored_kinds(source: str) -> list[str]:
    comment = _IGNORE.search(source)
    return [] if comment is None else [kind.strip() for kind in comment.group(1).split(",")]


def _path(finding: Mapping[str, Any]) -> Path:
    """Return the path of a finding, relative if the file is in the current folder."""
    path = Path(finding["file"])
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _print(name: str, findings: Sequence[Mapping[str, Any]]) -> None:
    if not findings:
        say(f"{name}: a device capture would refuse or freeze nothing")
        return
    advice: dict[str, None] = {}
    for finding in findings:
        problem, _, rest = finding["text"].partition(". ")
        advice[f"{finding['kind']}: {rest} See {finding['see']}.".replace("  ", " ")] = None
        location = f"{_path(finding)}:{finding['line']}: {finding['kind']}"
        say(f"{location}: {problem.rstrip('.')}", style="location")
        print_lines(f"    {finding['source']}")
    say()
    for text in advice:
        say(f"- {text}")
    say()
    found = counted(len(findings), "operation")
    say(f"{name}: {found} that a device capture would refuse or freeze")


def _github(finding: Mapping[str, Any]) -> str:
    """Return a finding as a GitHub Actions annotation."""
    file = str(_path(finding)).replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
    text = " ".join(f"{finding['text']} See {finding['see']}.".replace("%", "%25").split())
    return f"::error file={file},line={finding['line']},title=devgraph {finding['kind']}::{text}"


def _sarif(findings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    results = []
    for finding in findings:
        path = _path(finding)
        file = {"uri": path.as_uri() if path.is_absolute() else path.as_posix()}
        location = {"artifactLocation": file, "region": {"startLine": finding["line"]}}
        result = {"ruleId": finding["kind"], "level": "error", "message": {"text": finding["text"]}}
        results.append({**result, "locations": [{"physicalLocation": location}]})
    rules = [{"id": kind, "help": {"text": _explanation(kind)}} for kind in KINDS]
    driver = {"name": "devgraph", "version": __version__, "rules": rules}
    runs = [{"tool": {"driver": driver}, "results": results}]
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return {"$schema": schema, "version": "2.1.0", "runs": runs}
