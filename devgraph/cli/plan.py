"""``devgraph plan``: what a mode configuration comes to here, or in a described cluster."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from devgraph.api.backend import Backend
from devgraph.api.capabilities import Capabilities
from devgraph.api.config.cluster import Cluster, plan_cluster
from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import PhaseConfig
from devgraph.api.config.resolve import Resolution, resolve
from devgraph.api.policy import WHOLE, registration
from devgraph.api.registry import backends, get_backend, names
from devgraph.cli.tables import CommandError, print_json, print_table, say
from devgraph.runners.buckets import Buckets, Phase
from devgraph.runners.report import format_bytes

__all__ = ["ModelSizes", "estimate", "ranges", "run"]


def run(args: argparse.Namespace) -> int:
    """Print the plan; a choice that cannot work is an error."""
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
    return ModelSizes.from_config(config, getattr(torch, args.dtype).itemsize)


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


@attrs.frozen(kw_only=True)
class ModelSizes:
    """The sizes of a decoder that the memory of its graphs depends on."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    item_bytes: int
    """Bytes of one number."""

    @classmethod
    def from_config(cls, config: Any, item_bytes: int) -> ModelSizes:
        """Read the configuration of a transformers model."""
        text = config.get_text_config()
        heads = text.num_attention_heads
        return cls(
            layers=text.num_hidden_layers,
            hidden=text.hidden_size,
            # Some older families leave the common factor out of their configuration.
            intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
            heads=heads,
            kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
            vocabulary=text.vocab_size,
            item_bytes=item_bytes,
        )

    @property
    def token_bytes(self) -> int:
        """Most memory that the intermediate results of one token take at one time.

        In attention: residual, its norm, query, key, value and the result. In the MLP: residual,
        its norm, gate, up and their product. Nothing of one layer outlives the next.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.hidden + 2 * queries + 2 * keys
        mlp = 2 * self.hidden + 3 * self.intermediate
        return max(attention, mlp) * self.item_bytes

    @property
    def logit_bytes(self) -> int:
        """Memory of the logits of one row."""
        return self.vocabulary * self.item_bytes


@attrs.frozen(kw_only=True)
class Estimate:
    """What one phase will capture."""

    phase: str
    policy: str
    buckets: tuple[int, ...]
    graphs_per_bucket: int | None
    """1 under ``full``; else the segments between the regions, one region a layer."""
    graphs: int | None
    streams: int | None
    """At least one a graph; None on a backend where captured graphs hold none."""
    bytes: int | None
    """Graph memory: the largest bucket where graphs share a pool, else the sum of all."""


def estimate(
    phase: Phase,
    config: PhaseConfig,
    *,
    capacity: int,
    sizes: ModelSizes | None,
    capabilities: Capabilities | None,
) -> Estimate:
    """Return what ``config`` will capture for a phase.

    Args:
        phase: "decode" or "prefill".
        config: what holds for it, after all rules.
        capacity: most requests (decode) or tokens (prefill) of a step.
        sizes: the model; None leaves out what depends on it.
        capabilities: of the backend; None takes the careful defaults.

    Raises:
        ConfigError: a bucket is over the capacity or not aligned.
    """
    if config.policy == "disabled":
        return Estimate(
            phase=phase,
            policy=config.policy,
            buckets=(),
            graphs_per_bucket=0,
            graphs=0,
            streams=0,
            bytes=0,
        )
    top = capacity if config.max_bs is None else min(config.max_bs, capacity)
    buckets = Buckets.of(config.buckets, phase=phase, maximum=top, multiple_of=config.align)
    each = (
        1
        if WHOLE in registration(config.policy).promises
        else None
        if sizes is None
        else sizes.layers + 1
    )
    graphs = None if each is None else each * len(buckets)
    able = capabilities or Capabilities()
    scarce = capabilities is None or capabilities.max_streams is not None
    return Estimate(
        phase=phase,
        policy=config.policy,
        buckets=tuple(buckets),
        graphs_per_bucket=each,
        graphs=graphs,
        streams=graphs if scarce else None,
        bytes=None if sizes is None else _bytes(phase, buckets, sizes, able),
    )


def _bytes(phase: Phase, buckets: Sequence[int], sizes: ModelSizes, able: Capabilities) -> int:
    rows = [buckets[-1]] if able.shared_pool else list(buckets)
    # Logits of every row are inside a decode graph; a prefill's tail runs after the replay.
    row_bytes = sizes.token_bytes + (sizes.logit_bytes if phase == "decode" else 0)
    return sum(rows) * row_bytes


def ranges(sizes: Sequence[int]) -> str:
    """Return ascending numbers for people: ``1 2 4..12 by 4 16..256 by 8``."""
    parts: list[str] = []
    at = 0
    while at < len(sizes):
        end = at + 1
        while end + 1 < len(sizes) and sizes[end + 1] - sizes[end] == sizes[at + 1] - sizes[at]:
            end += 1
        if end - at >= 3:
            parts.append(f"{sizes[at]}..{sizes[end]} by {sizes[at + 1] - sizes[at]}")
            at = end + 1
        else:
            parts.append(str(sizes[at]))
            at += 1
    return " ".join(parts)
