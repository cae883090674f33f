"""``devgraph plan``: what a mode configuration comes to here, or in a described cluster."""

from __future__ import annotations

import argparse
import json
from typing import Any

import attrs

from devgraph.api.backend import Backend
from devgraph.api.capabilities import Capabilities
from devgraph.api.config.cluster import Cluster, plan_cluster
from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.resolve import Resolution, resolve
from devgraph.api.registry import backends, get_backend, names
from devgraph.cli.dtypes import dtype_named
from devgraph.cli.estimate import Estimate, ModelSizes, estimate, ranges
from devgraph.cli.tables import CommandError, print_json, print_table, say
from devgraph.runners.report import format_bytes

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    """Print the plan; a choice that cannot work is an error."""
    for name in ("max_requests", "max_tokens"):
        if getattr(args, name) < 1:
            flag = name.replace("_", "-")
            raise CommandError(f"--{flag} must be at least 1, got {getattr(args, name)}")
    config = DeviceGraphConfig.from_args(args, backends=names())
    facts = _facts(args.fact)
    sizes = _sizes(args)
    if args.cluster:
        return _run_cluster(args, config, facts, sizes)
    backend = get_backend(args.backend)
    resolution = resolve(config, facts.on_backend(backend.name, backend.capabilities))
    estimates = _estimates(args, resolution, sizes, backend.capabilities)
    if args.json:
        print_json({**_data(resolution, estimates, backend), "mode": config.to_dict()})
        return 0
    say(f"backend {backend.name} ({backend.device_name}); {_sizes_text(sizes)}")
    _print_phases(f"phases on {backend.name}", [("", resolution, estimates)])
    _print_rules([("", resolution)])
    _print_warnings(estimates, backend.capabilities)
    say(_flag(config))
    return 0


def _run_cluster(
    args: argparse.Namespace,
    config: DeviceGraphConfig,
    facts: EngineFacts,
    sizes: ModelSizes | None,
) -> int:
    if facts != EngineFacts():
        raise CommandError(
            f"--fact does not go with --cluster: state facts per group in {args.cluster}"
        )
    known = {
        info.name: get_backend(info.name).capabilities for info in backends() if info.available
    }
    plan = plan_cluster(config, Cluster.from_file(args.cluster), capabilities=known)
    rows = []
    for member in plan.members:
        able = known.get(member.member.backend)
        title = f"{member.group.name}: {member.member.count} x {member.member.vendor}"
        rows.append((title, member.resolution, _estimates(args, member.resolution, sizes, able)))
    if args.json:
        data = plan.to_dict()
        for entry, (_, _, estimates) in zip(data["groups"], rows, strict=True):
            entry["estimates"] = [attrs.asdict(one) for one in estimates]
        print_json(data)
        return 0
    say(_sizes_text(sizes))
    _print_phases(f"phases in {args.cluster}", rows)
    _print_rules([(title, resolution) for title, resolution, _ in rows])
    unknown = sorted({m.member.backend for m in plan.members} - set(known))
    if unknown:
        say(
            f"not on this machine, so planned with the facts of the file and not with measured "
            f"capabilities: {', '.join(unknown)}"
        )
    say(_flag(config))
    return 0


def _flag(config: DeviceGraphConfig) -> str:
    if not config.to_dict():
        return "everything is the default: no flag is needed"
    return f"one flag for every node: --device-graph-mode '{config.to_json()}'"


def _facts(given: list[str]) -> EngineFacts:
    values: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise CommandError(f"--fact {text!r}: write NAME=VALUE, for example lora=true")
        try:
            values[name] = json.loads(value.lower() if value in ("True", "False") else value)
        except json.JSONDecodeError:
            values[name] = value  # a word without quotes: role=decode
    return EngineFacts.from_dict(values, path="--fact")


def _sizes(args: argparse.Namespace) -> ModelSizes | None:
    if args.model is None:
        return None
    from devgraph.cli.models import read_config

    config = read_config(args.model, args.gguf_file)
    return ModelSizes.from_config(config, dtype_named(args.dtype).itemsize)


def _sizes_text(sizes: ModelSizes | None) -> str:
    if sizes is None:
        return "memory, and graphs between breaks, are estimated with --model"
    return (
        f"model of {sizes.layers} layers, {sizes.hidden} wide, {sizes.vocabulary} tokens: graph "
        f"memory, graphs and streams are estimates"
    )


def _estimates(
    args: argparse.Namespace,
    resolution: Resolution,
    sizes: ModelSizes | None,
    capabilities: Capabilities | None,
) -> list[Estimate]:
    effective = resolution.effective
    return [
        estimate(
            "decode",
            effective.decode,
            capacity=args.max_requests,
            sizes=sizes,
            capabilities=capabilities,
        ),
        estimate(
            "prefill",
            effective.prefill,
            capacity=args.max_tokens,
            sizes=sizes,
            capabilities=capabilities,
        ),
    ]


def _data(resolution: Resolution, estimates: list[Estimate], backend: Backend) -> dict[str, Any]:
    return {
        **resolution.to_dict(),
        "device": backend.device_name,
        "estimates": [attrs.asdict(one) for one in estimates],
    }


def _print_phases(title: str, rows: list[tuple[str, Resolution, list[Estimate]]]) -> None:
    where = any(name for name, _, _ in rows)
    table = []
    for name, resolution, estimates in rows:
        for one in estimates:
            asked = resolution.requested.phase(one.phase)
            table.append(
                (
                    *((name,) if where else ()),
                    one.phase,
                    asked.policy + ("" if "policy" in asked.explicit else " (default)"),
                    one.policy,
                    ranges(one.buckets) or None,
                    one.graphs,
                    one.streams,
                    None if one.bytes is None else format_bytes(one.bytes),
                )
            )
    print_table(
        title,
        (
            *(("group",) if where else ()),
            "phase",
            "requested",
            "effective",
            "buckets",
            "graphs",
            "streams",
            "memory",
        ),
        table,
        numbers=("graphs", "streams", "memory"),
    )
    settings = [
        (*((name,) if where else ()), phase, key, asked, holds)
        for name, resolution, _ in rows
        for phase, key, asked, holds in resolution.rows()
        if key != "policy"
    ]
    if settings:
        print_table(
            "other settings",
            (*(("group",) if where else ()), "phase", "key", "requested", "effective"),
            settings,
        )


def _print_rules(resolutions: list[tuple[str, Resolution]]) -> None:
    rows = [
        (name or None, fired.phase, fired.rule, fired.outcome, fired.explanation)
        for name, resolution in resolutions
        for fired in resolution.fired
    ]
    if rows:
        print_table("rules that fired", ("group", "phase", "rule", "outcome", "why"), rows)
    else:
        say("rules that fired: none")


def _print_warnings(estimates: list[Estimate], capabilities: Capabilities) -> None:
    limit = capabilities.max_streams
    counts = [one.streams for one in estimates]
    if limit is None or None in counts:
        return
    streams = sum(count for count in counts if count is not None)
    if streams > limit:
        say(
            f"warning: {streams} graphs need at least as many streams, and this backend has "
            f"{limit}: use fewer buckets, or the policy full"
        )
