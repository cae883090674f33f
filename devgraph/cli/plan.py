"""``devgraph plan``, which shows the effective mode on this machine or in a described cluster."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
from collections.abc import Iterator
from typing import Any

import attrs
import torch

from devgraph import __version__
from devgraph.api.backend import Backend
from devgraph.api.capabilities import Capabilities
from devgraph.api.config.cluster import Cluster, plan_cluster
from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.flags import sources_of
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.older_flags import MODE
from devgraph.api.config.phase import PHASES, PhaseConfig, phase_config
from devgraph.api.config.resolve import Resolution, resolve
from devgraph.api.environment import MODE_VARIABLE, applied_by_runners
from devgraph.api.errors import BackendUnavailableError, ConfigError, format_bytes
from devgraph.api.policy import WHOLE, compiles, registration
from devgraph.api.registry import declaration, get_backend
from devgraph.cli.arguments import by_name, check_group, check_model
from devgraph.cli.tables import (
    CommandError,
    note,
    print_json,
    print_lines,
    print_table,
    ranges,
    say,
)
from devgraph.runners.buckets import Buckets, Phase, spans
from devgraph.runners.options import warn_above


def run(args: argparse.Namespace) -> int:
    """Print the plan; return 1 if a group, or this machine, cannot run the mode."""
    config = DeviceGraphConfig.from_args(args)
    names = [source.name for source in sources_of(argparse.Namespace())]
    # In a cluster, each node applies its own environment.
    if names := names + ([] if args.cluster else applied_by_runners()):
        note(f"devgraph: the mode includes settings from {' and '.join(names)}")
    sizes = _sizes(args)
    if args.emit and args.json:
        raise CommandError("--emit prints flags or variables, --json prints the plan: choose one")
    if args.emit and args.cluster is None:
        raise CommandError("--emit prints the settings of each node: add --cluster FILE")
    if args.group is not None and args.cluster is None:
        raise CommandError("--group names a group of a cluster: add --cluster FILE")
    log = logging.getLogger(resolve.__module__)
    # Do not log rules that the tables show.
    log.disabled = not (args.json or args.emit or getattr(args, "verbose", 0))
    try:
        if args.cluster is None:
            plans = [_plan_here(args, config, sizes)]
            data = {**plans[0].to_dict(), "mode": config.to_dict()}
        else:
            plans = list(_plan_groups(args, config, sizes))
            groups = [plan.to_dict() for plan in plans]
            data = {"devgraph": __version__, "mode": config.to_dict(), "groups": groups}
    finally:
        log.disabled = False
    failed = [plan for plan in plans if plan.error]
    if args.json:
        print_json(data)
    elif args.emit:
        _emit(plans, args.emit)
    else:
        _print(plans, estimated=sizes is not None)
    return 1 if failed else 0


@attrs.frozen(kw_only=True)
class _Plan:
    """The plan of this machine or of one group of a cluster."""

    title: str
    """Name, node count and backend of the group; without a cluster, only the backend."""
    backend: Backend | type[Backend]
    """The backend, or its class with the declared capabilities if there is no such device here."""
    facts: EngineFacts
    group: dict[str, Any] = attrs.field(factory=dict)
    """The group in the cluster, as JSON values."""
    resolution: Resolution | None = None
    estimates: list[Estimate] = attrs.field(factory=list)
    error: ConfigError | None = None

    def to_dict(self) -> dict[str, Any]:
        resolution = {} if self.resolution is None else self.resolution.to_dict()
        device = None if isinstance(self.backend, type) else self.backend.device_name
        return {
            **self.group,
            **({} if self.group else {"device": device}),
            **resolution,
            "error": None if self.error is None else str(self.error),
            "facts": attrs.asdict(self.facts),
            "estimates": [attrs.asdict(estimate) for estimate in self.estimates],
        }


def _plan_here(
    args: argparse.Namespace, config: DeviceGraphConfig, sizes: ModelSizes | None
) -> _Plan:
    facts = _facts(args.fact)
    try:
        backend: Any = get_backend(args.backend)
    except BackendUnavailableError:
        backend = declaration(args.backend)
        if backend is None:
            raise
    resolution = resolve(config, facts.on_backend(backend))
    plan = _Plan(title=backend.name, backend=backend, facts=facts, resolution=resolution)
    return _estimated(plan, args, sizes)


def _plan_groups(
    args: argparse.Namespace, config: DeviceGraphConfig, sizes: ModelSizes | None
) -> Iterator[_Plan]:
    if args.backend != "auto":
        raise CommandError("--backend is not allowed with --cluster: each group names its backend")
    if args.fact:
        way = f"state facts per group in {args.cluster}"
        raise CommandError(f"--fact is not allowed with --cluster: {way}")
    cluster = Cluster.from_file(args.cluster)
    check_group(args.group, [group.name for group in cluster.groups], args.cluster)
    groups = tuple(group for group in cluster.groups if args.group in (None, group.name))
    for planned in plan_cluster(config, attrs.evolve(cluster, groups=groups)):
        group = planned.group
        plan = _Plan(
            title=f"{group.name}: {group.count} x {group.backend}",
            backend=(not planned.error and declaration(group.backend)) or Backend,
            facts=group.facts,
            group=planned.to_dict(),
            resolution=None if planned.error else planned.resolution,
            error=planned.error,
        )
        yield plan if plan.error else _estimated(plan, args, sizes)


def _facts(given: list[str]) -> EngineFacts:
    values: dict[str, Any] = {}
    for name, value in by_name("--fact", given, "lora=true").items():
        if name == "backend":
            raise CommandError(f"--fact backend={value}: write --backend {value}")
        try:
            values[name] = json.loads(value.lower() if value in ("True", "False") else value)
        except (ValueError, RecursionError):  # an unquoted word, such as role=decode
            values[name] = value
    return EngineFacts.from_dict(values, path="--fact")


def _sizes(args: argparse.Namespace) -> ModelSizes | None:
    if args.model is None:
        return None
    check_model(args.model)
    from devgraph.integrations.transformers.loading import read_config

    config = read_config(args.model)
    return ModelSizes.from_config(config, getattr(torch, args.dtype).itemsize)


def _estimated(plan: _Plan, args: argparse.Namespace, sizes: ModelSizes | None) -> _Plan:
    """Return the plan with estimates, and with an error if the device has too few streams."""
    assert plan.resolution is not None
    resolution = plan.resolution if plan.group else plan.resolution.in_environment()
    capacities: dict[Phase, int] = {"decode": args.max_requests, "prefill": args.max_tokens}
    configs = {phase: resolution.effective.phase(phase) for phase in capacities}
    if args.encoder_budgets:
        capacities["encoder"] = max(args.encoder_budgets)
        configs["encoder"] = phase_config({"buckets": args.encoder_budgets}, "encoder")
    for phase, capacity in capacities.items():
        warn_above(capacity, phase, configs[phase])
    estimates = [
        estimate(
            phase,
            configs[phase],
            capacity=capacity,
            sizes=None if phase == "encoder" else sizes,  # only for decoders
            capabilities=plan.backend.capabilities,
            facts=plan.facts,
        )
        for phase, capacity in capacities.items()
    ]
    error = _stream_error(plan.backend, estimates)
    return attrs.evolve(plan, resolution=resolution, estimates=estimates, error=error)


def _stream_error(
    backend: Backend | type[Backend], estimates: list[Estimate]
) -> ConfigError | None:
    limit = backend.capabilities.max_streams
    streams = sum(estimate.streams or 0 for estimate in estimates)
    if limit is None or streams <= limit:
        return None
    mode = json.dumps({"backends": {backend.name: dict(backend.recommended_mode)}})
    advice = f"the recommended mode '{mode}'" if backend.recommended_mode else "the policy full"
    return ConfigError(
        f"the graphs need at least {streams:,} streams, and {backend.name} has {limit:,}; use "
        f"{advice}, or fewer buckets"
    )


def _emit(plans: list[_Plan], form: str) -> None:
    """Print the complete effective mode of each group, as flags or as environment variables."""
    modes = [
        None
        if plan.error or not plan.resolution
        else plan.resolution.effective.to_json(everything=True)
        for plan in plans
    ]
    if form == "env" and len(set(modes)) > 1:
        names = ", ".join(plan.group["group"] for plan in plans)
        why = "a shell would keep only the last one; add --group with the group of the node"
        raise CommandError(f"the groups {names} have different modes, and {why}")
    for plan, mode in zip(plans, modes, strict=True):
        if mode is None:
            reason = f"{plan.title}: cannot be planned: {' '.join(str(plan.error).split())}"
            print_lines(f"# {reason}")
            note(f"devgraph: {reason}")  # eval reads only standard output and ignores the exit code
            continue
        mode = shlex.quote(mode)
        line = f"{MODE} {mode}" if form == "flags" else f"export {MODE_VARIABLE}={mode}"
        print_lines(f"# {plan.title}", line)


def _print(plans: list[_Plan], *, estimated: bool) -> None:
    for plan in plans:
        if plan.resolution is None:
            say(f"{plan.title}: cannot be planned: {plan.error}", style="error")
            say()
            continue
        _print_phases(plan, estimated=estimated)
        _print_settings(plan.resolution)
        if plan.error is not None:
            say(f"{plan.title}: error: {plan.error}", style="error")
        for estimate in (one for one in plan.estimates if one.uncovered):
            why = "no bucket is at least as large and at most max_padding times as large"
            say(f"{estimate.phase} steps of {estimate.uncovered} run eagerly: {why}")
        say()
    if not estimated and any(plan.resolution for plan in plans):
        say("add --model for estimates of memory and of the graphs between breaks")
    for kind in {plan.backend.name: plan.backend for plan in plans if plan.resolution}.values():
        _print_origin(kind)


def _print_phases(plan: _Plan, *, estimated: bool) -> None:
    assert plan.resolution is not None
    columns = []
    for estimate in plan.estimates:
        asked = phase_config(None, estimate.phase)
        if estimate.phase in PHASES:
            asked = plan.resolution.requested.phase(estimate.phase)
        cells = (
            asked.policy + ("" if "policy" in asked.explicit else " (default)"),
            estimate.policy,
            ranges(estimate.buckets) or None,
            estimate.variants or None,  # A disabled phase has no variants.
            estimate.graphs or None,
            estimate.streams or None,
            format_bytes(estimate.bytes) if estimate.bytes else None,
        )
        columns.append(cells)
    title = plan.title + (", graphs and memory estimated" if estimated else "")
    rows = zip(_LINES, *columns, strict=True)
    print_table(title, ("", *(estimate.phase for estimate in plan.estimates)), rows)


_LINES = ("requested", "effective", "buckets", "variants", "graphs", "streams", "memory")


def _print_settings(resolution: Resolution) -> None:
    settings = [
        (phase, key, old, f"{new} (unused)" if _is_unused(resolution, phase, key) else new)
        for phase, key, old, new in resolution.rows()
        if key not in ("policy", "buckets") or _is_unused(resolution, phase, key)
    ]
    if settings:
        print_table("other settings", ("phase", "key", "requested", "effective"), settings)
    fired = [(rule.phase, rule.rule, rule.outcome, rule.reason) for rule in resolution.fired]
    if fired:
        print_table("rules that fired", ("phase", "rule", "outcome", "why"), fired)
    else:
        say("rules that fired: none")


def _is_unused(resolution: Resolution, phase: str, key: str) -> bool:
    """Whether ``key`` has no effect under the effective settings of the phase."""
    config = resolution.effective.phase(phase)
    if config.policy == "disabled":
        return True
    whole = WHOLE in registration(config.policy).promises
    reads = {
        "compiler": compiles(config.policy),
        "lazy_hits": config.capture == "lazy",
        "max_requests": whole and phase == "prefill",
        "miss_budget": whole,
        "verify": not config.emulate,
    }
    return not reads.get(key, True)


def _print_origin(kind: Backend | type[Backend]) -> None:
    """Print the source of a backend's capabilities, and whether the backend ran on hardware."""
    if kind.unproven:
        say(f"{kind.name} {kind.unproven}", style="error")
    if not isinstance(kind, type):
        return
    by_need: dict[str, list[str]] = {}
    for capability, need in kind.needs.items():
        by_need.setdefault(need, []).append(capability)
    name = kind.name or "a backend that is registered as a function"
    say(f"{name} is planned with its declared capabilities" + ", which need:" * bool(by_need))
    for need, names in by_need.items():
        say(f"- {need}, for {', '.join(names)}")


@attrs.frozen(kw_only=True)
class ModelSizes:
    """The sizes of a decoder that determine the memory cost of its graphs."""

    layers: int
    token_bytes: int
    """Peak memory of intermediate results per token."""
    logit_bytes: int
    """Memory of logits per row."""

    @classmethod
    def from_config(cls, config: Any, item_bytes: int) -> ModelSizes:
        """Read the sizes from the configuration of a transformers model."""
        text = config.get_text_config(decoder=True)
        count, vocabulary = _size(text, "num_hidden_layers"), _size(text, "vocab_size")
        # In newer versions of transformers, the list has one entry per layer if layers differ.
        layers = getattr(text, "per_layer_config", None) or [text]
        return cls(
            layers=count,
            token_bytes=max(map(_numbers, layers)) * item_bytes,
            logit_bytes=vocabulary * item_bytes,
        )


def _size(config: Any, name: str, default: int = 0) -> int:
    """Return a size, or the largest size if the configuration lists one for each layer."""
    value = getattr(config, name, None) or default
    size = max(value) if isinstance(value, (list, tuple)) else value
    if not isinstance(size, int) or size < 1:
        kind = f"models of type {config.model_type}, whose configuration has no {name}"
        raise CommandError(f"no estimate is possible for {kind}: remove --model")
    return size


def _numbers(layer: Any) -> int:
    """Return the peak number of intermediate values per token in a layer.

    Attention needs residual, norm, query, key, value and result. The MLP needs residual, norm,
    gate, up and their product. No intermediate result outlives its layer.
    """
    hidden, heads = _size(layer, "hidden_size"), _size(layer, "num_attention_heads")
    kv_heads = _size(layer, "num_key_value_heads", heads)
    head_dim = _size(layer, "head_dim", hidden // heads)
    # The configuration of some older families lacks intermediate_size. Their common factor is 4.
    mlp = 3 * _size(layer, "intermediate_size", 4 * hidden)
    return 2 * hidden + max(2 * (heads + kv_heads) * head_dim, mlp)


@attrs.frozen(kw_only=True)
class Estimate:
    """The graphs that one phase will capture."""

    phase: str
    policy: str
    buckets: tuple[int, ...] = ()
    variants: int = 0
    """Graphs per bucket and segment: one for each width, both with and without adapters."""
    graphs: int | None = 0
    """Total number of graphs. Under ``full``, each variant of a bucket has one graph. Other
    policies have graphs before, between and after the regions, and one region per layer."""
    streams: int | None = 0
    """Minimum number of streams: one per graph, and another for the graph's collectives. None if
    graphs of the backend hold no streams."""
    uncovered: str = ""
    """Step sizes above all buckets or with too much padding, as text."""
    bytes: int | None = 0
    """Memory of the largest bucket if graphs share a pool, otherwise of all buckets."""


def estimate(
    phase: Phase,
    config: PhaseConfig,
    *,
    capacity: int,
    sizes: ModelSizes | None,
    capabilities: Capabilities,
    facts: EngineFacts | None = None,
) -> Estimate:
    if config.policy == "disabled":
        return Estimate(phase=phase, policy=config.policy)
    if config.emulate:
        return Estimate(phase=phase, policy="emulated")
    facts = EngineFacts() if facts is None else facts
    drafts = facts.speculative_tokens if phase == "decode" else 0
    widths = [1, 1 + drafts] if drafts else [1]
    adapters = 2 if facts.lora and phase != "encoder" else 1
    variants = adapters * len(widths)
    top = capacity if config.max_bs is None else min(config.max_bs, capacity)
    buckets = Buckets.of(config.buckets, phase=phase, maximum=top, multiple_of=config.align)
    segments = None if sizes is None else sizes.layers + 1
    if WHOLE in registration(config.policy).promises:
        segments = 1
    graphs = None if segments is None else segments * len(buckets) * variants
    # Default buckets omit small sizes on purpose, so report only gaps in explicit buckets.
    chosen = config.changed & {"buckets", "max_bs"}
    missing = buckets.uncovered(capacity, config.max_padding) if chosen else ()
    counted = "requests" if phase == "decode" else "tokens"
    streams = None
    if graphs is not None and capabilities.max_streams is not None:
        streams = graphs * (1 + facts.collectives)
    memory = None
    if sizes is not None:
        # Decode computes logits for every row, but prefill only for each request's last token.
        row_bytes = sizes.token_bytes + (sizes.logit_bytes if phase == "decode" else 0)
        rows = buckets.maximum * max(widths)
        if not capabilities.shared_pool:
            rows = sum(buckets) * sum(widths) * adapters
        memory = rows * row_bytes
    return Estimate(
        phase=phase,
        policy=config.policy,
        buckets=tuple(buckets),
        variants=variants,
        graphs=graphs,
        streams=streams,
        uncovered=f"{spans(missing)} {counted}" if missing else "",
        bytes=memory,
    )
