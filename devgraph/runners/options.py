"""What a runner is configured with, from a phase configuration and the engine's own options."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypedDict

import attrs
import torch

from devgraph.api.backend import Backend
from devgraph.api.config.phase import DeviceGraphWarning, PhaseConfig, count, phase_config
from devgraph.api.config.unused import unused
from devgraph.api.errors import ConfigError, ConfigTypeError, brief, did_you_mean
from devgraph.api.pool import Pool
from devgraph.runners.batch import Batch
from devgraph.runners.buckets import Phase
from devgraph.runners.decisions import Variant, check_variants

DEBUG_VARIABLE = "DEVGRAPH_DEBUG"
"""Environment variable that switches ``debug`` on where the engine does not say."""


EMULATE_VARIABLE = "DEVGRAPH_EMULATE"
"""Environment variable that makes every runner emulate its graphs."""


def switched_on(variable: str) -> bool:
    """Whether an environment variable is set to something other than no."""
    return os.environ.get(variable, "").lower() not in ("", "0", "false", "no")


class RunnerOptions(TypedDict, total=False):
    """Options that all runners take as keywords; see ``Options`` for their meaning."""

    variants: Sequence[Mapping[str, Any]]
    host_args: Mapping[str, Any] | None
    config: PhaseConfig | str | Mapping[str, Any] | None
    backend: str | Backend
    pool: Pool | None
    group: Any
    name: str
    strict: bool | None
    debug: bool | None
    bound: Mapping[str, Any]
    weights_epoch: Callable[[], Hashable] | None
    reset_state: Callable[[], None] | None
    prepare: Callable[[Batch], Mapping[str, Any] | None] | None
    share: Any
    idle_dummy: bool
    ranges: bool
    name_nodes: bool | torch.nn.Module
    max_graphs: int | None
    progress: bool


@attrs.frozen(kw_only=True)
class Options:
    """What all runners are told as keywords, besides their step and its data."""

    config: PhaseConfig
    """The mode of the phase: a ``PhaseConfig``, a policy name, or a mapping of configuration keys;
    ``full`` by default for decode and encoders, and ``breakable`` for prefill."""
    variants: Mapping[Variant, Mapping[str, Any]]
    """What besides the bucket distinguishes graphs: a list of mappings, ``[{}]`` by default. In
    those of a decode runner ``width`` is tokens per request."""
    host_args: Mapping[str, Any] | None = None
    """Host arguments and their values at capture (or ``HostSlot``s)."""
    backend: str | Backend = "auto"
    """A backend or its name."""
    pool: Pool | None = None
    """Graph memory to share with other runners; a new one by default."""
    group: Any = None
    """The ranks that run each step together: None, a ``RankGroup`` or a gloo group."""
    name: str
    """Name in messages, logs and metrics; the phase by default."""
    strict: bool | None = None
    """Raise instead of running eagerly; None takes it from the configuration."""
    debug: bool | None = None
    """Hand out leased outputs, which notice being read after the next run, and wait for the device
    after every segment, so that its errors name it. None asks the environment variable
    DEVGRAPH_DEBUG."""
    bound: Mapping[str, Any] = attrs.field(factory=dict)
    """Tensors that graphs use in place (KV caches, weights), each a tensor or a tree of them (a
    cache per layer): kept alive, and every run refuses when one has moved or
    has another layout."""
    weights_epoch: Callable[[], Hashable] | None = None
    """Returns a value that changes when weights are replaced. A graph is only used while it equals
    the one of its capture."""
    reset_state: Callable[[], None] | None = None
    """Undoes what warm-up runs did to the engine's state; called after the warm-up runs and after
    each capture. Pad values should make it unnecessary; recurrent state may need it."""
    prepare: Callable[[Batch], Mapping[str, Any] | None] | None = None
    """Plans a step on the host: called with the batch, padded to its bucket, after every slot is
    filled and before the launch; before every warm-up run, capture and eager step too. It may
    write bound tensors and slots in place, and return host arguments, which callers then leave
    out of ``run``. Sequences that it returns have the length of the bucket."""
    share: Any = None
    """Another runner of the pool: input slots of the same name, dtype and row shape, and outputs of
    the same dtype and row shape, use its buffers (draft and target, prefill and decode). A run of
    either then overwrites the outputs of both."""
    idle_dummy: bool = False
    """An empty batch replays the smallest graph on pad values, as engines whose steps hold
    collectives need; otherwise it does nothing."""
    ranges: bool = False
    """Surround each replay by a range of ``torch.profiler.record_function`` with the runner's name
    and the bucket, for profiles."""
    name_nodes: bool | torch.nn.Module = False
    """Note at captures which nodes marked functions and the submodules of a module launch, for
    ``explain``; see ``capture``."""

    max_graphs: int | None = None
    """The most graphs that are captured at a time, with ``capture="lazy"``: one more closes the one
    that ran longest ago, whose batches run eagerly until it is captured again. For steps with many
    sizes, of which few are in use at a time."""
    progress: bool = True
    """Show how far captures are: a bar on a terminal, else a line every few seconds."""

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ConfigTypeError(f"name of a runner must be a text, got {brief(self.name)}")
        for key in ("strict", "debug", "idle_dummy", "ranges", "progress"):
            if getattr(self, key) is not None and not isinstance(getattr(self, key), bool):
                raise ConfigTypeError(
                    f"{key}: expected true or false, got {brief(getattr(self, key))}"
                )
        if self.max_graphs is not None:
            count(self.max_graphs, "max_graphs")
        if not isinstance(self.bound, Mapping) or not all(isinstance(n, str) for n in self.bound):
            raise ConfigTypeError(
                f"bound must be a mapping of names to tensors: {brief(self.bound)}"
            )
        for key in ("weights_epoch", "reset_state", "prepare"):
            if getattr(self, key) is not None and not callable(getattr(self, key)):
                raise ConfigTypeError(f"{key} must be a function: {brief(getattr(self, key))}")

    @classmethod
    def of(cls, phase: Phase, capacity: int, given: Mapping[str, Any]) -> Options:
        """Check the options of a runner whose largest batch is ``capacity``, and settle those that
        the environment or another of them decides.

        Raises:
            ConfigError: a name is unknown (lists what exists), or a value cannot work.
        """
        known = [field.name for field in attrs.fields(cls)]
        for name in given:
            if name not in known:
                raise ConfigError(f"unknown runner option {name!r}. {did_you_mean(name, known)}")
        config = settings_of(given.get("config"), phase, capacity)
        variants = check_variants(given.get("variants", [{}]), with_width=phase == "decode")
        options = cls(**{"name": phase, **given, "config": config, "variants": variants})
        if options.strict is not None:
            config = attrs.evolve(config, strict=options.strict)
        if switched_on(EMULATE_VARIABLE):
            config = attrs.evolve(config, emulate=True)
        debug = switched_on(DEBUG_VARIABLE) if options.debug is None else options.debug
        return attrs.evolve(options, config=config, debug=debug)


def check_functions(step: object, tail: object = None) -> None:
    """Raise ConfigTypeError unless a runner can call ``step``, and ``tail`` if there is one."""
    for what, given in (("step", step), ("tail", tail)):
        if not callable(given) and (given is not None or what == "step"):
            raise ConfigTypeError(f"the {what} of a runner must be callable: {brief(given)}")


def settings_of(
    config: PhaseConfig | str | Mapping[str, Any] | None, phase: Phase, capacity: int
) -> PhaseConfig:
    """Return the configuration of a phase, and warn of what has no effect in a runner of it."""
    settings = phase_config(config, phase)
    if settings.policy == "disabled":  # graphs may be switched off with all else left as it is
        return settings
    # Configurations that were read from text or flags have reported their unused keys already.
    reasons = unused(phase, settings) if isinstance(config, Mapping) else {}
    if settings.buckets is None and settings.max_bs is not None and settings.max_bs > capacity:
        reasons.setdefault("max_bs", f"the capacity of the runner is {capacity}")
    for key, because in reasons.items():
        text = f"{phase}.{key}={getattr(settings, key)!r} has no effect: {because}"
        warnings.warn(text, DeviceGraphWarning, stacklevel=4)
    return settings
