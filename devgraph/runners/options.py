"""Options of runners: the phase configuration and the engine's own keywords."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypedDict

import attrs
import torch

from devgraph.api.backend import Backend
from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import (
    KEYS,
    PHASES,
    PhaseConfig,
    count,
    in_environment,
    phase_config,
)
from devgraph.api.config.resolve import resolve
from devgraph.api.environment import DEBUG_VARIABLE, switch, warn_unknown
from devgraph.api.errors import ConfigError, ConfigTypeError, brief, did_you_mean, whole
from devgraph.api.marks.source import warn
from devgraph.api.policy import get_policy
from devgraph.api.pool import Pool
from devgraph.api.prove import Draw
from devgraph.api.registry import get_backend
from devgraph.api.snapshots import DEFAULT_LIMIT
from devgraph.runners.batch import Batch
from devgraph.runners.buckets import Phase
from devgraph.runners.decisions import Variant, check_variants
from devgraph.runners.state import StateSlot, StateStore


class RunnerOptions(TypedDict, total=False):
    """Keywords that all runners accept; see ``Options`` for their meaning."""

    variants: Sequence[Mapping[str, Any]]
    host_args: Mapping[str, Any] | None
    config: PhaseConfig | str | Mapping[str, Any] | None
    facts: EngineFacts | None
    backend: str | Backend
    pool: Pool | None
    group: Any
    name: str
    strict: bool | None
    debug: bool | None
    bound: Mapping[str, Any]
    weights_epoch: Callable[[], Hashable] | None
    state: Sequence[StateSlot]
    state_rows: int | None
    prepare: Callable[[Batch], Mapping[str, Any] | None] | None
    share: Any
    idle_dummy: bool
    ranges: bool
    name_nodes: bool | torch.nn.Module
    max_graphs: int | None
    sample: Mapping[str, Draw] | None
    snapshot_limit: int
    gate_timeout: float | None
    progress: bool


@attrs.frozen(kw_only=True)
class Options:
    """The keywords that all runners share, without the step and its slots.

    The docstrings describe the values that callers pass; the fields contain the checked values.
    """

    config: PhaseConfig
    """The mode of the phase: a ``PhaseConfig``, a policy name, or a mapping of configuration keys.
    Without a policy, the backend's recommendation applies. If there is none, the policy is ``full``
    for decode and encoders, and ``breakable`` for prefill."""
    variants: Mapping[Variant, Mapping[str, Any]]
    """A list of variants as mappings, ``[{}]`` by default. Every bucket has a graph for each
    variant. In a decode runner, the key ``width`` is the number of tokens per request."""
    host_args: Mapping[str, Any] | None = None
    """Host arguments and their values at capture (or ``HostSlot``s)."""
    facts: EngineFacts | None = None
    """Facts about the engine; by default, a plain engine. Compatibility rules replace defaults that
    do not suit these facts, and refuse explicit choices that do not, or warn about them. A variant
    of width n counts as n - 1 speculative tokens. The rules do not cover encoders."""
    backend: Backend
    """A backend or its name, ``"auto"`` by default."""
    pool: Pool | None = None
    """Graph memory to share with other runners; a new pool by default."""
    group: Any = None
    """The ranks that run each step together: None, a ``RankGroup`` or a gloo group."""
    name: str
    """Name in messages, logs and metrics; the phase by default."""
    strict: bool | None = None
    """Raise an error instead of running eagerly. If None, the configuration decides."""
    debug: bool | None = None
    """Return leased outputs, which detect reads after the next run, and synchronize with the device
    after every segment, so that errors name the segment. Check inputs against the ranges of their
    slots. If None, the environment variable DEVGRAPH_DEBUG decides."""
    bound: Mapping[str, Any] = attrs.field(factory=dict)
    """Tensors that graphs use in place (KV caches, weights), by name: trees of tensors, modules,
    and functions that return trees (``lambda: model.cache``). The runner keeps the tensors alive. A
    run raises StateError if a tensor was replaced, has moved or has another layout. Captures and
    proofs restore tensors within ``snapshot_limit`` and hash larger tensors."""
    weights_epoch: Callable[[], Hashable] | None = None
    """Callable whose result changes when weights are replaced. A graph is used only while the
    result equals the result at its capture."""
    state: Sequence[StateSlot] = ()
    """State of fixed size that each request carries from step to step, as ``StateSlot`` objects.
    ``run`` then takes ``state_slots``, and steps read and write ``batch.state``."""
    state_rows: int | None = None
    """Number of request slots of the state; ``max_requests`` by default. Additional slots are for
    the state of waiting requests."""
    prepare: Callable[[Batch], Mapping[str, Any] | None] | None = None
    """Callable that plans a step on the host. Before every launch, warm-up run, capture and eager
    step, it receives the batch with all slots filled, padded except in eager steps. It may write
    bound tensors and slots in place, and return host arguments, which callers of ``run`` then omit.
    Returned sequences must have an entry for each row of this batch."""
    share: Any = None
    """Runner whose pool and buffers this runner uses, for example a target model's runner for a
    draft model. Input slots with the same name, dtype and row shape, and outputs with the same
    dtype and row shape, use the same buffers, so a run of either runner overwrites the outputs of
    both. State slots with the same name use the same state."""
    idle_dummy: bool = False
    """Replay the smallest graph on pad values for an empty batch, as steps with collectives
    require. By default, an empty batch runs nothing."""
    ranges: bool = False
    """Enclose each replay in a ``torch.profiler.record_function`` range with the names of the
    runner and the bucket."""
    name_nodes: bool | torch.nn.Module = False
    """Record at capture the nodes of each marked function and each submodule of a module, for
    ``explain``; see ``capture``."""

    max_graphs: int | None = None
    """Maximum number of captured graphs with ``capture="lazy"``. A further capture closes the least
    recently used graph, whose batches run eagerly until it is captured again. Use this if few of
    many sizes occur at a time."""
    sample: Mapping[str, Draw] | None = None
    """Callables by name of a slot or host argument that draw legal data, for ``prove`` and checks
    (``verify``). Each takes a shape and a ``torch.Generator``. They override the samples of slots,
    and the ``sample`` of ``prove`` overrides them."""
    snapshot_limit: int = DEFAULT_LIMIT
    """Maximum size in bytes of the copies from which ``capture`` restores bound tensors and the
    state of requests. Padding must not write larger tensors: ``capture`` hashes them before its
    first and after its last graph, and raises if they differ."""
    gate_timeout: float | None = None
    """Seconds after which a closed gate invalidates a step; by default the value of the environment
    variable DEVGRAPH_GATE_TIMEOUT, or 30."""
    progress: bool = True
    """Show the progress of captures: a bar on a terminal, otherwise a line every few seconds."""

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigTypeError(
                f"the name of a runner must be a non-empty string, got {brief(self.name)}"
            )
        for key in ("strict", "debug", "idle_dummy", "ranges", "progress"):
            if getattr(self, key) is not None and not isinstance(getattr(self, key), bool):
                raise ConfigTypeError(
                    f"{key}: expected true or false, got {brief(getattr(self, key))}"
                )
        whole("snapshot_limit", self.snapshot_limit, kind=ConfigError)
        if self.max_graphs is not None:
            count(self.max_graphs, "max_graphs")
        if not isinstance(self.bound, Mapping) or not all(isinstance(n, str) for n in self.bound):
            raise ConfigTypeError(
                f"bound must be a mapping of names to tensors, got {brief(self.bound)}"
            )
        for key in ("weights_epoch", "prepare"):
            if getattr(self, key) is not None and not callable(getattr(self, key)):
                raise ConfigTypeError(f"{key} must be a function: {brief(getattr(self, key))}")

    def make_state(self, requests: int, width: int = 1) -> StateStore | None:
        """Return the store of the declared state, or None if no state is declared."""
        rows, backend, share = self.state_rows, self.backend, self.share
        return StateStore.of(
            self.state, requests, rows=rows, backend=backend, share=share, width=width
        )

    @classmethod
    def of(
        cls, phase: Phase, capacity: int, given: Mapping[str, Any], runner: Callable[..., Any]
    ) -> Options:
        """Check the keywords of a runner, and apply the environment and compatibility rules.

        Raises:
            ConfigError: a name is unknown, a value is invalid, or a choice is incompatible with
                ``facts``.
        """
        warn_unknown()
        names = [field.name for field in attrs.fields(cls)]
        for name in given:
            if name == "reset_state":
                raise ConfigError(
                    "reset_state= was removed: bind the tensors that a step changes (bound=), so "
                    "that they are restored after warm-up and capture, or declare the state of "
                    "requests (state=[dg.StateSlot(...)])"
                )
            if name in KEYS and name not in names:
                raise ConfigError(f"{name!r} is a key of config: pass config={{{name!r}: ...}}")
            if name not in names:
                known = {*names, *inspect.signature(runner).parameters} - {"options"}
                raise ConfigError(f"unknown runner option {name!r}. {did_you_mean(name, known)}")
        config = phase_config(given.get("config"), phase)
        variants = check_variants(given.get("variants", [{}]), with_width=phase == "decode")
        backend = given.get("backend", "auto")
        if not isinstance(backend, Backend):
            backend = get_backend(backend)
        config = config.for_backend(backend.name)
        settled = {"config": config, "variants": variants, "backend": backend}
        options = cls(**{"name": phase, **given, **settled})
        config = _compatible(options, phase)
        warn_above(capacity, phase, config)
        if options.strict is not None:
            config = attrs.evolve(config, strict=options.strict)
        config = in_environment(config)
        debug = bool(switch(DEBUG_VARIABLE)) if options.debug is None else options.debug
        options = attrs.evolve(options, config=config, debug=debug)
        options._require_possible()
        return options

    def _require_possible(self) -> None:
        """Raise ConfigError or CapabilityError for a configuration that cannot work."""
        config = self.config
        if config.policy != "disabled":
            get_policy(config.policy)
        if config.strict and config.capture != "eager":
            raise ConfigError(
                f"strict with capture={config.capture!r} would refuse every batch whose bucket is "
                f"not captured yet; use capture='eager' or strict=False"
            )
        if self.max_graphs is not None and config.capture != "lazy":
            raise ConfigError(
                f"max_graphs={self.max_graphs} needs capture='lazy', which captures graphs on "
                f"demand, not capture={config.capture!r}; set buckets to limit the graphs instead"
            )


def _compatible(options: Options, phase: Phase) -> PhaseConfig:
    """Apply the compatibility rules to the configuration, as ``devgraph plan`` does."""
    facts = EngineFacts() if options.facts is None else options.facts
    if not isinstance(facts, EngineFacts):
        raise ConfigTypeError(f"facts must be dg.EngineFacts(...), got {brief(facts)}")
    if phase not in PHASES:
        return options.config
    widths = [variant.get("width", 1) for variant in options.variants.values()]
    here = attrs.evolve(
        facts.on_backend(options.backend),
        speculative_tokens=max(facts.speculative_tokens, *(width - 1 for width in widths)),
    )
    mine: dict[str, Any] = {phase: options.config}
    resolution = resolve(DeviceGraphConfig(**mine), here, phases=(phase,))
    return resolution.effective.phase(phase)


def check_functions(step: object, tail: object = None) -> None:
    """Raise ConfigTypeError unless ``step``, and ``tail`` if given, are callable."""
    for role, function in (("step", step), ("tail", tail)):
        if not callable(function) and (function is not None or role == "step"):
            raise ConfigTypeError(f"the {role} of a runner must be callable: {brief(function)}")


def warn_above(capacity: int, phase: Phase, config: PhaseConfig) -> None:
    """Warn about a maximum size that exceeds the capacity of the runner."""
    if config.policy == "disabled":
        return
    if config.buckets is None and config.max_bs is not None and config.max_bs > capacity:
        warn(
            f"{phase}.max_bs={config.max_bs} has no effect: the capacity of the runner is "
            f"{capacity}"
        )
