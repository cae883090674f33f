"""Installation of devgraph in SGLang. All changes to SGLang are in this file."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import attrs

from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.config.phase import PhaseConfig
from devgraph.api.environment import MODE_VARIABLE, SGLANG_VARIABLE, switch
from devgraph.api.errors import ConfigError, DeviceGraphError
from devgraph.integrations.engine.installation import Changes, Installed, mode_text
from devgraph.integrations.engine.memory import GraphMemory
from devgraph.integrations.engine.verification import phases_to_check
from devgraph.integrations.sglang.backends import MODEL, breakable_backend, full_backend, shared
from devgraph.integrations.sglang.segments import BREAKS
from devgraph.integrations.sglang.updated import with_region
from devgraph.integrations.sglang.verification import check_at_start

SAVER = "sglang.srt.utils.torch_memory_saver_adapter"

# Attributes of SGLang that the backends use, by module.
_USED = {
    f"{MODEL}.runner_backend.full_cuda_graph_backend": "FullCudaGraphBackend.replay",
    f"{MODEL}.runner_backend.breakable_cuda_graph_backend": "BreakableCudaGraphBackend.replay",
    f"{MODEL}.runner_utils.pool": "get_global_graph_memory_pool set_global_graph_memory_pool",
    BREAKS: (
        "BreakableCUDAGraph.replay BreakableCUDAGraphCapture._begin_new_segment "
        "BreakableCUDAGraphCapture._end_current_segment _current_stream_var get_device_module"
    ),
    "sglang.srt.distributed.device_communicators.pynccl_allocator": "set_graph_pool_id",
    "sglang.srt.constants": "GPU_MEMORY_TYPE_CUDA_GRAPH",
    SAVER: "_TorchMemorySaverAdapterReal.pause _TorchMemorySaverAdapterReal.resume",
}

_KEYS = {
    "policy": "backend",
    "buckets": "bs",
    "max_bs": "max_bs",
    "max_requests": "full_prefill_max_req",
}
"""SGLang's names for the keys of a phase that it supports."""

_POLICIES = ("full", "breakable", "disabled")


@attrs.frozen
class EngineMode:
    """A mode configuration, translated into SGLang's options for each phase."""

    text: str
    phases: dict[str, dict[str, Any]]
    limits: tuple[float, ...] = ()
    """Executable budgets of the phases, for which SGLang has no option."""
    checked: frozenset[str] = frozenset()
    """Phases whose graphs are checked at start."""

    def put_into(self, arguments: Any) -> None:
        """Write the mode into SGLang's ``ServerArgs``, before SGLang resolves them."""
        from sglang.srt.model_executor import cuda_graph_config as engine

        given = arguments.cuda_graph_config or {}
        merged = dict(given if isinstance(given, dict) else given.to_dict())
        for phase, values in self.phases.items():
            for key, value in values.items():
                if key not in engine.ALLOWED_KEYS_PER_PHASE[phase]:
                    raise ConfigError(
                        f"{MODE_VARIABLE}={self.text}: this version has no {key} for {phase}. Use "
                        f"{', '.join(engine.ALLOWED_KEYS_PER_PHASE[phase])}."
                    )
                asked = merged.get(phase, {}).get(key)
                if asked is None:
                    asked = _option(arguments, phase, key)
                if asked is not None and asked != value:
                    raise ConfigError(
                        f"{MODE_VARIABLE}={self.text} asks for {phase} {key}={value}, but SGLang's "
                        f"own options ask for {asked}. Remove one of the two settings."
                    )
            merged[phase] = {**merged.get(phase, {}), **values}
        arguments.cuda_graph_config = merged

    def check(self, arguments: Any) -> None:
        """Raise ConfigError if SGLang resolved a backend other than the requested one."""
        for phase, values in self.phases.items():
            got = getattr(_resolved(arguments), phase).backend
            if values.get("backend", got) != got:
                raise ConfigError(
                    f"{MODE_VARIABLE}={self.text} asks for {phase}={values['backend']}, but "
                    f"SGLang allows only {got} with the other options of this engine (its log has "
                    f"the reason). Choose {got}, or change the option that SGLang's log names."
                )


def _option(arguments: Any, phase: str, key: str) -> Any:
    """Return the value of SGLang's flag for a key of a phase, or None if the flag is unset."""
    value = getattr(arguments, f"cuda_graph_{key}_{phase}", None)
    off = ("disable_cuda_graph", f"disable_{phase}_cuda_graph")
    if value is None and key == "backend" and any(getattr(arguments, name, 0) for name in off):
        return "disabled"
    return value


def _resolved(arguments: Any) -> Any:
    try:
        from sglang.srt.arg_groups.model_override_base import resolved_view
    except ImportError:  # Some versions of SGLang resolve the arguments in place.
        return arguments.cuda_graph_config
    return resolved_view(arguments).cuda_graph_config


def engine_mode(text: str, backend: str) -> EngineMode:
    """Translate a mode configuration into SGLang's options. Unset keys keep SGLang's values."""
    config = DeviceGraphConfig.from_json(text).for_backend(backend)
    phases = {"decode": config.decode, "prefill": config.prefill}
    budgets = (value.executable_budget for value in phases.values())
    limits = tuple(budget for budget in budgets if budget is not None)
    values = {name: _values(name, value) for name, value in phases.items()}
    return EngineMode(text, values, limits, phases_to_check(config))


def _values(phase: str, config: PhaseConfig) -> dict[str, Any]:
    extra = sorted(config.changed - {*_KEYS, "executable_budget", "verify"})
    if extra:
        raise ConfigError(
            f"{MODE_VARIABLE}: SGLang has no equivalent of {', '.join(extra)} for {phase}. A mode "
            f"for SGLang may have {', '.join(_KEYS)}, verify and executable_budget. Use SGLang's "
            f"options for the rest."
        )
    if "policy" in config.explicit and config.policy not in _POLICIES:
        raise ConfigError(
            f"{MODE_VARIABLE}: devgraph does not support the policy {config.policy} for {phase} in "
            f"SGLang. Choose {', '.join(_POLICIES[:-1])} or {_POLICIES[-1]}."
        )
    chosen = config.changed | (config.explicit & {"policy"})
    values = {name: getattr(config, key) for key, name in _KEYS.items() if key in chosen}
    if values.get("bs") is not None:
        values["bs"] = list(values["bs"])
    return values


_here = Installed("SGLang", SGLANG_VARIABLE)


def install(*, mode: str | None = None, strict: bool = True) -> None:
    """Replace SGLang's full and breakable backends with backends of devgraph.

    Call ``install`` in each process before the engine is created, or set DEVGRAPH_SGLANG=1.
    Idempotent. On devices with special backends in SGLang, SGLang still uses these backends.

    Args:
        mode: mode configuration as JSON; None reads the variable DEVGRAPH_MODE. Without either,
            SGLang's own options apply.
        strict: whether to raise an error, instead of logging a warning, if devgraph cannot be
            installed (SGLang is then unchanged), or if the check at start fails.

    Raises:
        ConfigError: the mode is invalid or unknown to SGLang, or devgraph is already installed with
            another mode.
        InstallError: under ``strict``, devgraph cannot be installed. Nothing is changed.
    """
    if not _here.repeated(mode=mode):
        text, changes = mode_text(mode), Changes("SGLang 0.5.17 to 0.5.23")
        _here.put(changes, lambda: _change(changes, text, strict), strict=strict, mode=text)


def _change(changes: Changes, mode: str | None, strict: bool) -> None:
    for module, names in _USED.items():
        owner = importlib.import_module(module)
        for name in names.split():
            kind, _, attribute = name.partition(".")
            changes.require(owner, kind)
            changes.require(getattr(owner, kind), *filter(None, [attribute]))
    choice = importlib.import_module(f"{MODEL}.runner_backend.utils")
    changes.change(choice, "FullCudaGraphBackend", full_backend())
    changes.change(choice, "BreakableCudaGraphBackend", breakable_backend())
    radix = importlib.import_module("sglang.srt.layers.radix_attention").RadixAttention
    marked = getattr(radix, "_eager_attention", None)
    if marked is not None:  # SGLang 0.5.17 lacks this method, so prefill is not updated.
        changes.change(radix, "_eager_attention", with_region(marked))
    saver = importlib.import_module(SAVER)
    for name, ours in (("pause", GraphMemory.release), ("resume", GraphMemory.restore)):
        after = functools.partial(_with_graphs, ours)
        changes.around(saver._TorchMemorySaverAdapterReal, name, after=after)
    phases = phases_to_check()
    if mode is not None:
        platform = importlib.import_module("sglang.srt.platforms").current_platform
        parsed = engine_mode(mode, platform.device_name)
        phases = parsed.checked
        _put_mode(changes, parsed)
    for phase in sorted(phases):
        runners = importlib.import_module(f"{MODEL}.runner.{phase}_cuda_graph_runner")
        runner = getattr(runners, f"{phase.title()}CudaGraphRunner")
        changes.around(runner, "capture", after=functools.partial(check_at_start, phase))
    if phases:
        changes.change(shared().check, "phases", phases)
        changes.change(shared().check, "strict", strict)


def _with_graphs(ours: Callable[[GraphMemory], None], saver: Any, tag: str) -> None:
    """After a method of SGLang's memory saver, call ``ours`` if ``tag`` includes graph memory."""
    if tag == importlib.import_module("sglang.srt.constants").GPU_MEMORY_TYPE_CUDA_GRAPH:
        ours(shared().memory)


def _put_mode(changes: Changes, mode: EngineMode) -> None:
    arguments = importlib.import_module("sglang.srt.server_args").ServerArgs
    # Since 0.5.18, SGLang resolves the arguments after their creation, once and in one process.
    name = "resolve_once" if hasattr(arguments, "resolve_once") else "__post_init__"

    def put(self: Any, *_: Any, **__: Any) -> None:
        if not getattr(self, "_resolution_finished", False):
            mode.put_into(self)

    changes.around(arguments, name, before=put, after=lambda self, *_, **__: mode.check(self))
    changes.change(shared().memory, "limits", mode.limits)


def uninstall() -> None:
    """Undo ``install``, so that new engines use SGLang's own backends. Idempotent.

    Graph memory that the engine has released is restored first.
    """
    _here.take_out(shared().memory)


def plugin() -> None:
    """Install devgraph if DEVGRAPH_SGLANG is on. Entry point for ``sglang.srt.plugins``.

    Raises:
        SystemExit: DEVGRAPH_SGLANG or DEVGRAPH_MODE is invalid, or, with ``strict``, installation
            fails. SGLang would log any other exception and continue without devgraph.
    """
    try:
        asked = switch(SGLANG_VARIABLE)
        if asked:
            install(strict=asked == "strict")
    except DeviceGraphError as error:
        raise SystemExit(f"devgraph: {error}") from error


@functools.cache
def platform_class() -> Any:
    """Return the base class for out-of-tree platforms."""
    interface: Any = importlib.import_module("sglang.srt.platforms.interface")

    class DeviceGraphPlatform(interface.SRTPlatform):  # type: ignore[misc]
        """An SGLang platform that captures and replays with devgraph.

        Like any platform of SGLang, a subclass defines the device, its memory and its attention
        backend. The graph runners are SGLang's own, and use devgraph's backend for the device.
        """

        _enum = interface.PlatformEnum.OOT
        capabilities = interface.PlatformCapabilities(graph_capture=True)

        def init_backend(self) -> None:
            """Install devgraph. SGLang calls this method in each worker before captures."""
            install()

        def get_graph_runner_cls(self) -> Any:
            return importlib.import_module(f"{MODEL}.runner").DecodeCudaGraphRunner

        def get_full_graph_backend_cls(self) -> Any:
            return full_backend()

    return DeviceGraphPlatform
