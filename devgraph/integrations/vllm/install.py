"""Installation of devgraph in vLLM. All changes to vLLM are in this file."""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import attrs

from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.environment import MODE_VARIABLE, VLLM_VARIABLE, switch
from devgraph.api.errors import ConfigError
from devgraph.integrations.engine.installation import Changes, Installed, mode_text
from devgraph.integrations.engine.memory import GraphMemory
from devgraph.integrations.engine.verification import phases_to_check
from devgraph.integrations.vllm import manager, verification
from devgraph.integrations.vllm.layer import Layer, current_layer, reset_layer
from devgraph.integrations.vllm.wrappers import graph_wrapper, step_wrapper

WRAPPER = "devgraph.integrations.vllm.DeviceGraphWrapper"
_BREAKABLE_VARIABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
MANAGERS = "vllm.v1.worker.gpu.cudagraph_utils"
"""Module of the V2 runner's managers, which create graphs without a wrapper."""
MICROBATCHES = "vllm.v1.worker.gpu_ubatch_wrapper"
"""Module of the V1 runner's micro-batches, which run in threads on the capture stream."""
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
    """A mode configuration, translated into vLLM's graph mode."""

    name: str
    """Name of a member of vLLM's ``CUDAGraphMode``."""
    breakable: bool
    """Whether prefill runs in segments around attention, without torch.compile."""
    text: str
    """The original configuration, for error messages."""
    checked: frozenset[str] = frozenset()
    """Phases whose graphs are checked at start."""

    def put_into(self, config: Any) -> None:
        """Write the mode into vLLM's ``CompilationConfig`` before vLLM resolves it."""
        from vllm.config import CUDAGraphMode

        if vars(config).get(_SEEN) == self:
            return  # vLLM calls __post_init__ again after each change of the configuration.
        setattr(config, _SEEN, self)
        wanted, given = CUDAGraphMode[self.name], config.cudagraph_mode
        if given not in (None, wanted):
            raise ConfigError(
                f"{MODE_VARIABLE}={self.text} asks for cudagraph_mode={wanted}, but vLLM's "
                f"compilation configuration asks for {given}. Remove one of the two settings."
            )
        config.cudagraph_mode = wanted

    def check(self, config: Any, who: str) -> None:
        """Raise ConfigError if vLLM resolved a graph mode other than the requested one."""
        got = config.cudagraph_mode
        if got.name != self.name:
            raise ConfigError(
                f"{MODE_VARIABLE}={self.text} asks for vLLM's graph mode {self.name}, but {who} "
                f"allows only {got.name}. vLLM's log states the reason: enforce_eager, the "
                f"compilation mode, or the limits of the attention backend. Choose a mode that is "
                f"allowed."
            )


def engine_mode(text: str, backend: str | None = None) -> EngineMode:
    """Translate a mode configuration into vLLM's graph mode."""
    config = DeviceGraphConfig.from_json(text)
    if backend is not None:
        config = config.for_backend(backend)
    for phase, value in (("decode", config.decode), ("prefill", config.prefill)):
        if extra := sorted(value.changed - {"verify"}):
            raise ConfigError(
                f"{MODE_VARIABLE}: devgraph passes the policy of {phase} to vLLM, but not "
                f"{', '.join(extra)}. Use vLLM's own options instead, such as "
                f"--cudagraph-capture-sizes, which applies to decode and prefill."
            )
    wanted = (config.decode.policy, config.prefill.policy)
    if wanted not in _MODES:
        known = "; ".join(f"decode {decode}, prefill {prefill}" for decode, prefill in _MODES)
        raise ConfigError(
            f"{MODE_VARIABLE}={text}: vLLM cannot run decode {wanted[0]} with prefill {wanted[1]}. "
            f"Choose one of: {known}."
        )
    name, breakable = _MODES[wanted]
    checked = phases_to_check(config)
    return EngineMode(name=name, breakable=breakable, text=text, checked=checked)


class Installation(Changes):
    """The changes to vLLM, in order."""

    mode: EngineMode | None = None
    """The requested mode, or None if vLLM's own options apply."""

    def put(self, layer: Layer, mode: str | None, backend: str | None) -> None:
        """Change vLLM; see ``install`` for ``mode`` and ``backend``."""
        if mode is not None:
            self.mode = engine_mode(mode, backend or _platform_backend())
        self.on_undo(reset_layer, reset_layer(layer))
        self._put_wrappers()
        layer.check.phases = phases_to_check() if self.mode is None else self.mode.checked
        self._put_managers(layer)
        self._put_breaks()
        self._put_sleep(layer.memory)
        if self.mode is not None:
            self._put_mode(self.mode)

    def _put_wrappers(self) -> None:
        platform = type(importlib.import_module("vllm.platforms").current_platform)
        self.require(platform, "get_global_graph_pool")
        # Both runners resolve this name when vLLM compiles the pieces for PIECEWISE.
        self.change(platform, "get_static_graph_wrapper_cls", classmethod(lambda cls: WRAPPER))
        # The V1 runner and micro-batches use this name for FULL.
        for name in (V1_RUNNER, MICROBATCHES):
            self.change(importlib.import_module(name), "CUDAGraphWrapper", graph_wrapper())

    def _put_managers(self, layer: Layer) -> None:
        for name in (MANAGERS, "vllm.v1.worker.encoder_cudagraph", MICROBATCHES):
            overlay = functools.partial(manager.graph_making_torch, threads=name == MICROBATCHES)
            self.wrap(importlib.import_module(name), "torch", overlay)
        managers = importlib.import_module(MANAGERS)
        if hasattr(managers, "capture_pool"):
            self.change(managers, "capture_pool", manager.own_pool)
        base = managers.CudaGraphManager
        self.wrap(base, "capture", manager.sparing_capture)
        self.wrap(base, "dispatch", manager.counting_dispatch)
        if layer.check.phases:
            second = importlib.import_module("vllm.v1.worker.gpu.model_runner").GPUModelRunner
            self.wrap(base, "run_fullgraph", verification.comparing_run)
            self.around(second, "capture_model", after=verification.check_at_start)
        first = importlib.import_module(V1_RUNNER).GPUModelRunner
        self.wrap(first, "_capture_cudagraphs", manager.sparing_round)
        self.wrap(first, "_warmup_and_capture", manager.sparing_step)

    def _put_breaks(self) -> None:
        wrapper = step_wrapper()
        # Models that are imported later get the wrapper from its original module.
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
        """Release graph memory when vLLM sleeps, at either level; restore it when vLLM wakes up."""
        worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker

        def prepare(self: Any, vllm_config: Any, *_: Any, **__: Any) -> None:
            # Collectives register the physical memory behind an address with other ranks, but sleep
            # replaces that memory. vLLM's own pool for sleep mode is not registered.
            alone = vllm_config.parallel_config.world_size_across_dp == 1
            registers = not (alone or getattr(vllm_config, "use_cumem_cudagraph_pool", False))
            memory.releasable = vllm_config.model_config.enable_sleep_mode and not registers

        self.around(worker, "__init__", before=prepare)
        self.around(worker, "sleep", after=lambda *_, **__: memory.release())
        # Restore for all tags. If memory is short, vLLM stays asleep and can be woken up later.
        self.around(worker, "wake_up", before=lambda *_, **__: memory.restore())

    def _put_mode(self, mode: EngineMode) -> None:
        config = importlib.import_module("vllm.config")

        def put_in(self: Any, *_: Any, **__: Any) -> None:
            if self.model_config is not None:  # Placeholders have no model.
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
            # vLLM reads this variable when it creates a configuration. If the variable is set, vLLM
            # allows PIECEWISE without compilation. For some models, vLLM sets the variable itself.
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
    # The first engine of the process may have made vLLM cache the environment.
    forget = getattr(importlib.import_module("vllm.envs"), "disable_envs_cache", None)
    if forget is not None:
        forget()


here = Installed("vLLM", VLLM_VARIABLE)


def install(*, mode: str | None = None, backend: str | None = None, strict: bool = False) -> bool:
    """Make devgraph the graph layer of vLLM in this process, before the engine is created.

    Idempotent. Nothing runs on the device until vLLM captures.

    Args:
        mode: mode configuration as JSON; None reads the variable DEVGRAPH_MODE. Without either,
            vLLM's own options apply.
        backend: name of the backend; None selects the backend of vLLM's platform.
        strict: whether to raise an error, instead of logging a warning, if devgraph cannot be
            installed (vLLM then keeps its own layer), and later if the check at start fails or a
            step receives tensors at new addresses.

    Returns:
        Whether devgraph is the graph layer now.

    Raises:
        ConfigError: the mode is invalid or unknown to vLLM, or devgraph is already installed with
            another mode or backend.
        InstallError: under ``strict``, devgraph cannot be installed.
    """
    if here.repeated(mode=mode, backend=backend):
        return True
    text, new = mode_text(mode), Installation("vLLM 0.22 to 0.33")
    layer = Layer(backend=backend, strict=strict)
    make = functools.partial(new.put, layer, text, backend)
    return here.put(new, make, strict=strict, mode=text, backend=backend)


def _platform_backend() -> str | None:
    """Return the name of the platform's backend without creating the backend.

    Its creation would initialize the device before vLLM forks its workers.
    """
    from vllm.platforms import current_platform

    return "rocm" if current_platform.is_rocm() else current_platform.device_type or None


def uninstall() -> None:
    """Undo ``install``. Idempotent.

    New engines use vLLM's own layer, but existing wrappers remain in use. If the engine sleeps,
    graph memory is restored first.
    """
    here.take_out(current_layer().memory)


def plugin() -> None:
    """Install devgraph if DEVGRAPH_VLLM is on. Entry point for ``vllm.general_plugins``.

    Raises:
        ConfigError: DEVGRAPH_VLLM or DEVGRAPH_MODE is invalid.
        InstallError: DEVGRAPH_VLLM is ``strict``, but devgraph cannot be installed.
    """
    asked = switch(VLLM_VARIABLE)
    if asked:
        install(strict=asked == "strict")
