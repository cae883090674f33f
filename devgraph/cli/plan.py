"""``devgraph plan``: what a mode configuration comes to here, or in a described cluster."""

from __future__ import annotations

import argparse
import json
from typing import Any

import attrs
import torch

from devgraph.api.backend import Backend
from devgraph.api.capabilities import Capabilities
from devgraph.api.config.cluster import Cluster, plan_cluster
from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import PHASES, PhaseConfig, phase_config
from devgraph.api.config.resolve import Resolution, resolve
from devgraph.api.errors import BackendUnavailableError
from devgraph.api.policy import WHOLE, registration
from devgraph.api.registry import declaration, get_backend
from devgraph.cli.arguments import by_name, mode_of
from devgraph.cli.tables import CommandError, print_json, print_table, ranges, say
from devgraph.runners.buckets import Buckets, Phase, spans
from devgraph.runners.options import settings_of
from devgraph.runners.report import format_bytes


def run(args: argparse.Namespace) -> int:
    """Print the plan; a choice that cannot work is an error."""
    config = mode_of(args)
    facts = _facts(args.fact)
    sizes = _sizes(args)
    if args.cluster is not None:
        rows, data = _cluster_plan(args, config, sizes)
    else:
        try:
            backend: Any = get_backend(args.backend)
        except BackendUnavailableError:
            backend = declaration(args.backend)
            if backend is None:
                raise
        resolution = resolve(config, facts.on_backend(backend))
        rows = [_row("", backend, resolution, args, sizes)]
        data = {
            **resolution.to_dict(),
            "device": None if isinstance(backend, type) else backend.device_name,
            "estimates": [attrs.asdict(one) for one in rows[0].estimates],
            "mode": config.to_dict(),
        }
    if args.json:
        print_json(data)
        return 0
    where = f"on {rows[0].backend.name}" if args.cluster is None else f"in {args.cluster}"
    if sizes is None:
        say("memory, and graphs between breaks, are estimated with --model")
    _print_phases(f"phases {where}" + (", graphs and memory estimated" if sizes else ""), rows)
    _print_rules(rows)
    for row in rows:
        _print_shortages(row)
    _print_declared(rows)
    return 0


def _print_declared(rows: list[_Row]) -> None:
    """Say which backends are planned with what they declare, and what that needs of a node."""
    for kind in {row.backend.name: row.backend for row in rows}.values():
        if not isinstance(kind, type):
            continue
        by_need: dict[str, list[str]] = {}
        for capability, need in kind.needs.items():
            by_need.setdefault(need, []).append(capability)
        needs = [f"; {', '.join(names)} where a node has {n}" for n, names in by_need.items()]
        name = kind.name or "a backend that is registered as a function"
        say(f"{name} is planned with what it declares{''.join(needs)}")


@attrs.frozen(kw_only=True)
class _Row:
    """What a configuration comes to for devices of one kind."""

    title: str
    """Empty where there is one kind only."""
    backend: Backend | type[Backend]
    """The class in a cluster and where the device is not on this machine: it declares what a node
    has."""
    resolution: Resolution
    estimates: list[Estimate]


def _cluster_plan(
    args: argparse.Namespace, config: DeviceGraphConfig, sizes: ModelSizes | None
) -> tuple[list[_Row], dict[str, Any]]:
    if args.backend != "auto":
        raise CommandError("--backend does not go with --cluster: groups name theirs")
    if args.fact:
        raise CommandError(
            f"--fact does not go with --cluster: state facts per group in {args.cluster}"
        )
    rows, groups = [], []
    for one in plan_cluster(config, Cluster.from_file(args.cluster)):
        backend = declaration(one.group.backend) or Backend
        title = f"{one.group.name}: {one.group.count} x {one.group.backend}"
        rows.append(_row(title, backend, one.resolution, args, sizes))
        estimates = [attrs.asdict(each) for each in rows[-1].estimates]
        groups.append({**one.to_dict(), "estimates": estimates})
    return rows, {"mode": config.to_dict(), "groups": groups}


def _facts(given: list[str]) -> EngineFacts:
    values: dict[str, Any] = {}
    for name, value in by_name("--fact", given, "lora=true").items():
        if name == "backend":
            raise CommandError(f"--fact backend={value}: write --backend {value}")
        try:
            values[name] = json.loads(value.lower() if value in ("True", "False") else value)
        except (ValueError, RecursionError):  # a word without quotes: role=decode; or no value
            values[name] = value
    return EngineFacts.from_dict(values, path="--fact")


def _sizes(args: argparse.Namespace) -> ModelSizes | None:
    if args.model is None:
        return None
    from devgraph.integrations.transformers.loading import read_config

    config = read_config(args.model)
    return ModelSizes.from_config(config, getattr(torch, args.dtype).itemsize)


def _row(
    title: str,
    backend: Backend | type[Backend],
    resolution: Resolution,
    args: argparse.Namespace,
    sizes: ModelSizes | None,
) -> _Row:
    capacities: dict[Phase, int] = {"decode": args.max_requests, "prefill": args.max_tokens}
    configs = {phase: resolution.effective.phase(phase) for phase in capacities}
    if args.encoder_budgets:
        capacities["encoder"] = max(args.encoder_budgets)
        configs["encoder"] = phase_config({"buckets": args.encoder_budgets}, "encoder")
    estimates = [
        estimate(
            phase,
            settings_of(configs[phase], phase, capacity),
            capacity=capacity,
            sizes=None if phase == "encoder" else sizes,  # those of the decoder
            capabilities=backend.capabilities,
        )
        for phase, capacity in capacities.items()
    ]
    return _Row(title=title, backend=backend, resolution=resolution, estimates=estimates)


def _print_phases(title: str, rows: list[_Row]) -> None:
    numbers = ("graphs", "streams", "memory")
    group = ("group",) if any(row.title for row in rows) else ()
    table = []
    for row in rows:
        for one in row.estimates:
            asked = phase_config(None, one.phase)
            if one.phase in PHASES:
                asked = row.resolution.requested.phase(one.phase)
            table.append(
                (
                    *((row.title,) if group else ()),
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
        (*group, "phase", "requested", "effective", "buckets", *numbers),
        table,
        numbers=numbers,
    )
    settings = [
        (*((row.title,) if group else ()), phase, key, asked, holds)
        for row in rows
        for phase, key, asked, holds in row.resolution.rows()
        if key != "policy"
    ]
    if settings:
        print_table("other settings", (*group, "phase", "key", "requested", "effective"), settings)


def _print_rules(rows: list[_Row]) -> None:
    fired = [
        (row.title or None, one.phase, one.rule, one.outcome, one.explanation)
        for row in rows
        for one in row.resolution.fired
    ]
    if fired:
        print_table("rules that fired", ("group", "phase", "rule", "outcome", "why"), fired)
    else:
        say("rules that fired: none")


def _print_shortages(row: _Row) -> None:
    """Say what runs eagerly for want of a bucket, and which streams there are too few of."""
    where = f"{row.title}: " if row.title else ""
    for one in row.estimates:
        if one.uncovered:
            say(
                f"{where}{one.phase} steps of {one.uncovered} run eagerly: no bucket holds them "
                f"with little enough padding"
            )
    limit = row.backend.capabilities.max_streams
    counts = [one.streams for one in row.estimates if one.streams is not None]
    if limit is None or sum(counts) <= limit:
        return
    name, better = row.backend.name, row.backend.recommended_mode
    mode = json.dumps({"backends": {name: dict(better)}})
    advice = f"the mode that is recommended there, '{mode}'" if better else "the policy full"
    say(
        f"{where}warning: {sum(counts):,} graphs need at least as many streams, and {name} has "
        f"{limit:,}: use {advice}, or fewer buckets"
    )


@attrs.frozen(kw_only=True)
class ModelSizes:
    """The sizes of a decoder that the memory of its graphs depends on."""

    layers: int
    token_bytes: int
    """Most memory that the intermediate results of one token take at one time."""
    logit_bytes: int
    """Memory of the logits of one row."""

    @classmethod
    def from_config(cls, config: Any, item_bytes: int) -> ModelSizes:
        """Read the configuration of a transformers model, of numbers of so many bytes.

        Raises:
            CommandError: it lacks a size, as that of a model without attention does.
        """
        text = config.get_text_config(decoder=True)
        count, vocabulary = _size(text, "num_hidden_layers"), _size(text, "vocab_size")
        # One for each layer, where the version of transformers lets them differ.
        layers = getattr(text, "per_layer_config", None) or [text]
        return cls(
            layers=count,
            token_bytes=max(map(_numbers, layers)) * item_bytes,
            logit_bytes=vocabulary * item_bytes,
        )


def _size(config: Any, name: str, default: int = 0) -> int:
    """Return a size, of a list of one for each layer the largest."""
    found = getattr(config, name, None) or default
    size = max(found) if isinstance(found, (list, tuple)) else found
    if not isinstance(size, int) or size < 1:
        raise CommandError(
            f"nothing can be estimated for a model of the kind {config.model_type}, whose "
            f"configuration has no {name}: leave --model out"
        )
    return size


def _numbers(layer: Any) -> int:
    """Return how many numbers the intermediate results of one token are at one time, at most.

    In attention: residual, its norm, query, key, value and the result. In the MLP: residual, its
    norm, gate, up and their product. Nothing of one layer outlives the next.
    """
    hidden, heads = _size(layer, "hidden_size"), _size(layer, "num_attention_heads")
    kv_heads = _size(layer, "num_key_value_heads", heads)
    head_dim = _size(layer, "head_dim", hidden // heads)
    # Some older families leave the common factor out of their configuration.
    mlp = 3 * _size(layer, "intermediate_size", 4 * hidden)
    return 2 * hidden + max(2 * (heads + kv_heads) * head_dim, mlp)


@attrs.frozen(kw_only=True)
class Estimate:
    """What one phase will capture."""

    phase: str
    policy: str
    buckets: tuple[int, ...] = ()
    graphs: int | None = 0
    """A bucket has one under ``full``; else one between the regions, of which a layer has one."""
    streams: int | None = 0
    """At least one a graph; None on a backend where captured graphs hold none."""
    uncovered: str = ""
    """The sizes of steps within the capacity that no bucket holds, in words."""
    bytes: int | None = 0
    """Graph memory: the largest bucket where graphs share a pool, else the sum of all."""


def estimate(
    phase: Phase,
    config: PhaseConfig,
    *,
    capacity: int,
    sizes: ModelSizes | None,
    capabilities: Capabilities,
) -> Estimate:
    """Return what ``config`` will capture for a phase.

    Args:
        phase: "decode", "prefill" or "encoder".
        config: what holds for it, after all rules.
        capacity: most requests (decode) or tokens of a step.
        sizes: the model; None leaves out what depends on it.
        capabilities: of the backend.

    Raises:
        ConfigError: a bucket is over the capacity or not aligned.
    """
    if config.policy == "disabled":
        return Estimate(phase=phase, policy=config.policy)
    top = capacity if config.max_bs is None else min(config.max_bs, capacity)
    buckets = Buckets.of(config.buckets, phase=phase, maximum=top, multiple_of=config.align)
    each = None if sizes is None else sizes.layers + 1
    if WHOLE in registration(config.policy).promises:
        each = 1
    graphs = None if each is None else each * len(buckets)
    missing = buckets.uncovered(capacity, config.max_padding)
    counted = "requests" if phase == "decode" else "tokens"
    taken = None
    if sizes is not None:
        # Logits of every row are inside a decode graph; a prefill's tail runs after the replay.
        row_bytes = sizes.token_bytes + (sizes.logit_bytes if phase == "decode" else 0)
        taken = (buckets.maximum if capabilities.shared_pool else sum(buckets)) * row_bytes
    return Estimate(
        phase=phase,
        policy=config.policy,
        buckets=tuple(buckets),
        graphs=graphs,
        streams=None if capabilities.max_streams is None else graphs,
        uncovered=f"{spans(missing)} {counted}" if missing else "",
        bytes=taken,
    )
