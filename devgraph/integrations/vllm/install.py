"""Put devgraph under vLLM, and take it out again: every place that is changed is in this file."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import attrs

from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.errors import ConfigError
from devgraph.integrations.engine.installation import (
    MODE_VARIABLE,
    Changes,
    Installed,
    mode_text,
    switched,
)
from devgraph.integrations.engine.memory import GraphMemory
from devgraph.integrations.vllm import manager
from devgraph.integrations.vllm.layer import Layer, current_layer, reset_layer
from devgraph.integrations.vllm.wrappers import graph_wrapper, step_wrapper

SWITCH = "DEVGRAPH_VLLM"
"""Environment variable: unset or 0 leaves vLLM alone, 1 installs, strict installs or refuses."""

WRAPPER = "devgraph.integrations.vllm.DeviceGraphWrapper"
_BREAKABLE_VARIABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
MANAGERS = "vllm.v1.worker.gpu.cudagraph_utils"
"""The managers of the V2 runner, which make graphs by themselves."""
MICROBATCHES = "vllm.v1.worker.gpu_ubatch_wrapper"
"""Those of the V1 runner, whose threads launch on the stream that is current at a capture."""
V1_RUNNER = "vllm.v1.worker.gpu_model_runner"


# (decode policy, prefill policy) -> vLLM's CUDAGraphMode and whether prefill breaks at attention.
_MODES = {
    ("full", "piecewise"): ("FULL_AND_PIECEWISE", False),
    ("full", "breakable"): ("FULL_AND_PIECEWISE", True),
    ("full", "full"): ("FULL", False),
    ("full", "disabled"): ("FULL_DECODE_ONLY", False),
    ("piecewise", "piecewise"): ("PIECEWISE", False),
    ("breakable", "breakable"): ("PIECEWISE", True),
    ("disabled", "disabled"): ("NONE", False),
}

_SEEN = "_devgraph_mode"


@attrs.frozen(kw_only=True)
class EngineMode:
    """A mode configuration in vLLM's terms."""

    name: str
    """Of vLLM's ``CUDAGraphMode``."""
    breakable: bool
    """Prefill runs in segments around attention, without torch.compile."""
    text: str
    """The configuration that it came from, for messages."""

    def put_into(self, config: Any) -> None:
        """Write it into vLLM's ``CompilationConfig``, before that is resolved.

        Raises:
            ConfigError: vLLM's own options ask for something else.
        """
        from vllm.config import CUDAGraphMode

        if vars(config).get(_SEEN) == self:
            return  # vLLM builds a configuration again when it changes a part of it.
        setattr(config, _SEEN, self)
        wanted, given = CUDAGraphMode[self.name], config.cudagraph_mode
        if given not in (None, wanted):
            raise ConfigError(
                f"{MODE_VARIABLE}={self.text} asks for cudagraph_mode={wanted} and the compilation "
                f"configuration of vLLM for {given}. Give one of them."
            )
        config.cudagraph_mode = wanted

    def check(self, config: Any, who: str) -> None:
        """Raise ConfigError if vLLM resolved another graph mode than it was asked for."""
        got = config.cudagraph_mode
        if got.name != self.name:
            raise ConfigError(
                f"{MODE_VARIABLE}={self.text} asks for vLLM's graph mode {self.name}, and {who} "
                f"allows only {got.name} (vLLM's log has the reason: enforce_eager, the "
                f"compilation mode, or what the attention backend can capture). Choose a mode that "
                f"it allows."
            )


def engine_mode(text: str, backend: str | None = None) -> EngineMode:
    """Return what the mode configuration ``text`` (JSON, as for --device-graph-mode) means.

    vLLM has one mode for uniform decode and one for everything else.

    Args:
        backend: lay the overlay of this backend over the rest.

    Raises:
        ConfigError: the text is wrong, or vLLM has nothing like it.
    """
    config = DeviceGraphConfig.from_json(text)
    if backend is not None:
        config = config.for_backend(backend)
    for phase, value in (("decode", config.decode), ("prefill", config.prefill)):
        if extra := sorted(value.explicit - {"policy"}):
            raise ConfigError(
                f"{MODE_VARIABLE}: devgraph gives vLLM the policy of {phase} and not "
                f"{', '.join(extra)}. Use vLLM's own options for that, such as "
                f"--cudagraph-capture-sizes, which decode and prefill share."
            )
    wanted = (config.decode.policy, config.prefill.policy)
    if wanted not in _MODES:
        known = "; ".join(f"decode {decode}, prefill {prefill}" for decode, prefill in _MODES)
        raise ConfigError(
            f"{MODE_VARIABLE}={text}: vLLM cannot run decode {wanted[0]} with prefill {wanted[1]}. "
            f"It can run: {known}."
        )
    name, breakable = _MODES[wanted]
    return EngineMode(name=name, breakable=breakable, text=text)


class Installation(Changes):
    """What was changed in vLLM, in order, so that it can be undone."""

    mode: EngineMode | None = None
    """What the mode configuration asked for; None leaves the choice to vLLM's own options."""

    def put(self, layer: Layer, mode: str | None, backend: str | None) -> None:
        """Change vLLM; see ``install`` for ``mode`` and ``backend``.

        Raises:
            ConfigError: vLLM cannot do what the mode says. InstallError: a place is missing.
        """
        if mode is not None:
            self.mode = engine_mode(mode, backend or _platform_backend())
        self.on_undo(reset_layer, reset_layer(layer))
        self._put_wrappers()
        self._put_managers()
        self._put_breaks()
        self._put_sleep(layer.memory)
        if self.mode is not None:
            self._put_mode(self.mode)

    def _put_wrappers(self) -> None:
        platform = type(importlib.import_module("vllm.platforms").current_platform)
        self.require(platform, "get_global_graph_pool")
        # PIECEWISE on both runners: vLLM resolves this name where it compiles pieces.
        self.change(platform, "get_static_graph_wrapper_cls", classmethod(lambda cls: WRAPPER))
        # FULL on V1, and microbatches, whose whole-batch steps use it.
        for name in (V1_RUNNER, MICROBATCHES):
            self.change(importlib.import_module(name), "CUDAGraphWrapper", graph_wrapper())

    def _put_managers(self) -> None:
        for name in (MANAGERS, "vllm.v1.worker.encoder_cudagraph", MICROBATCHES):
            overlay = functools.partial(manager.graph_making_torch, threads=name == MICROBATCHES)
            self.wrap(importlib.import_module(name), "torch", overlay)
        managers = importlib.import_module(MANAGERS)
        if hasattr(managers, "capture_pool"):
            self.change(managers, "capture_pool", manager.own_pool)
        base = managers.CudaGraphManager
        self.wrap(base, "capture", manager.sparing_capture)
        self.wrap(base, "dispatch", manager.counting_dispatch)
        first = importlib.import_module(V1_RUNNER).GPUModelRunner
        self.wrap(first, "_capture_cudagraphs", manager.sparing_round)
        self.wrap(first, "_warmup_and_capture", manager.sparing_step)

    def _put_breaks(self) -> None:
        wrapper = step_wrapper()
        # Models that are imported later, with managers of their own, take it from where it is made.
        for name in ("vllm.compilation.breakable_cudagraph", V1_RUNNER):
            self.change(importlib.import_module(name), "BreakableCUDAGraphWrapper", wrapper)
        managers = importlib.import_module(MANAGERS)
        if hasattr(managers, "BreakableCUDAGraphWrapper"):
            self.change(managers, "BreakableCUDAGraphWrapper", wrapper)
        elif self.mode is not None and self.mode.breakable:
            runner = importlib.import_module("vllm.v1.worker.gpu.model_runner")
            breaking = manager.breaking_manager(managers.ModelCudaGraphManager)
            self.change(runner, "ModelCudaGraphManager", breaking)

    def _put_sleep(self, memory: GraphMemory) -> None:
        """Of both levels: the memory of graphs goes with what vLLM itself gives back, and comes
        back with it at the same addresses."""
        worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker

        def prepare(self: Any, vllm_config: Any, *_: Any, **__: Any) -> None:
            # Collectives register with other ranks what lies behind an address, and that changes;
            # vLLM's own option for graphs that sleep keeps them from it.
            alone = vllm_config.parallel_config.world_size_across_dp == 1
            registers = not (alone or getattr(vllm_config, "use_cumem_cudagraph_pool", False))
            memory.releasable = vllm_config.model_config.enable_sleep_mode and not registers

        self.around(worker, "__init__", before=prepare)
        self.around(worker, "sleep", after=lambda *_, **__: memory.release())
        # Whatever is to wake up. If there is no memory, vLLM still sleeps and can be woken again.
        self.around(worker, "wake_up", before=lambda *_, **__: memory.restore())

    def _put_mode(self, mode: EngineMode) -> None:
        config = importlib.import_module("vllm.config")

        def put_in(self: Any, *_: Any, **__: Any) -> None:
            if self.model_config is not None:  # else a placeholder, which runs nothing
                mode.put_into(self.compilation_config)

        def check(self: Any, *_: Any, **__: Any) -> None:
            if self.model_config is not None:
                mode.check(self.compilation_config, "the configuration of this engine")

        def check_resolved(self: Any, *_: Any, **__: Any) -> None:
            mode.check(self, "the attention backend")

        compilation = config.CompilationConfig
        self.around(config.VllmConfig, "__post_init__", before=put_in, after=check)
        self.around(compilation, "resolve_cudagraph_mode_and_sizes", after=check_resolved)
        if "PIECEWISE" in mode.name:
            # vLLM reads it when it makes a configuration, and lets PIECEWISE be uncompiled then;
            # for some models it sets it itself where it is not set.
            before = os.environ.get(_BREAKABLE_VARIABLE)
            if before is not None and (before == "1") is not mode.breakable:
                raise ConfigError(
                    f"{MODE_VARIABLE}={mode.text} and {_BREAKABLE_VARIABLE}={before} contradict "
                    f"each other. Unset one of them."
                )
            self.on_undo(_set_breakable, before)
            _set_breakable(str(int(mode.breakable)))


def _set_breakable(value: str | None) -> None:
    if value is None:
        os.environ.pop(_BREAKABLE_VARIABLE, None)
    else:
        os.environ[_BREAKABLE_VARIABLE] = value
    # Since its first engine vLLM may know the environment by heart.
    forget = getattr(importlib.import_module("vllm.envs"), "disable_envs_cache", None)
    if forget is not None:
        forget()


here = Installed("vLLM", SWITCH)


def install(*, mode: str | None = None, backend: str | None = None, strict: bool = False) -> bool:
    """Make devgraph the graph layer of vLLM in this process; call it before the engine is made.

    Idempotent. Nothing runs on the device until vLLM captures.

    Args:
        mode: a mode configuration as JSON; None for the environment's DEVGRAPH_MODE, and without
            that vLLM's own options choose.
        backend: name of the backend; None for the one of vLLM's platform.
        strict: raise if this vLLM cannot be taken over, and later where a step could not use its
            graph; else warn once, and vLLM keeps its own layer.

    Returns:
        whether devgraph is the graph layer now.

    Raises:
        ConfigError: the mode is wrong, is something that vLLM cannot do, or it or the backend is
            another one than devgraph was installed with; always.
        InstallError: with ``strict``, what is missing in this vLLM.
    """
    if here.repeated(mode=mode, backend=backend):
        return True
    text, new = mode_text(mode), Installation("vLLM 0.22 to 0.33")
    layer = Layer(backend=backend, strict=strict)
    make = functools.partial(new.put, layer, text, backend)
    return here.put(new, make, strict=strict, mode=text, backend=backend)


def _platform_backend() -> str | None:
    """Return the name of the platform's backend, for overlays; makes none, as that would touch the
    device before vLLM forks its workers."""
    from vllm.platforms import current_platform

    return "rocm" if current_platform.is_rocm() else current_platform.device_type or None


def uninstall() -> None:
    """Undo ``install``: engines made afterwards use vLLM's own layer, and wrappers that exist stay
    devgraph's. Idempotent; takes the memory of graphs back first, if the engine sleeps."""
    here.take_out(current_layer().memory)


def plugin() -> None:
    """The entry point of group ``vllm.general_plugins``: inert unless DEVGRAPH_VLLM asks for it.

    Raises:
        ConfigError: DEVGRAPH_VLLM or DEVGRAPH_MODE has no meaning.
        InstallError: under DEVGRAPH_VLLM=strict, when devgraph cannot be installed.
    """
    asked = switched(SWITCH)
    if asked is not None:
        install(strict=asked == "strict")
