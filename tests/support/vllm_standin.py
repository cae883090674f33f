"""A small stand-in for the parts of vLLM that a graph layer talks to.

It has the names, signatures and call protocol of vLLM 0.33, or of 0.22 where they differ, and none
of its work, so that the protocol tests run where vLLM is not installed. The same tests run against
the real package where it is, which keeps this file honest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import os
import sys
import threading
import types
import weakref
from typing import Any, ClassVar

import torch


class Environment:
    """What vLLM reads from the environment, once an engine has started by heart."""

    def __init__(self) -> None:
        self.known: bool | None = None
        self.values: dict[str, Any] = {
            "VLLM_LOGGING_LEVEL": "INFO",
            "__getattr__": self.look_up,
            "enable_envs_cache": lambda: vars(self).update(known=self.breakable),
            "disable_envs_cache": lambda: vars(self).update(known=None),
        }

    @property
    def breakable(self) -> bool:
        return os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH") == "1"

    def look_up(self, name: str) -> bool:
        if name != "VLLM_USE_BREAKABLE_CUDAGRAPH":
            raise AttributeError(name)
        return self.breakable if self.known is None else self.known


class CUDAGraphMode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)


@dataclasses.dataclass(frozen=True)
class BatchDescriptor:
    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0


@dataclasses.dataclass
class ForwardContext:
    no_compile_layers: dict[str, Any]
    attn_metadata: Any
    slot_mapping: Any
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE
    batch_descriptor: BatchDescriptor | None = None


class CompilationConfig:
    _attention_ops: ClassVar[list[str]] = ["vllm::unified_attention_with_output"]

    def __init__(self, cudagraph_mode: CUDAGraphMode | None = None) -> None:
        self.cudagraph_mode = cudagraph_mode
        self.cudagraph_capture_sizes: list[int] | None = None
        self.max_cudagraph_capture_size: int | None = None
        self.static_forward_context: dict[str, Any] = {}
        self.splitting_ops: list[str] = []
        self.supported = True

    def adjust_cudagraph_sizes_for_spec_decode(self, *args: Any) -> None:
        pass

    def resolve_cudagraph_mode_and_sizes(self, *args: Any, **kwargs: Any) -> CUDAGraphMode:
        assert self.cudagraph_mode is not None
        if not self.supported:
            self.cudagraph_mode = CUDAGraphMode.NONE
        return self.cudagraph_mode


class VllmConfig:
    def __init__(self, model_config: Any = None, compilation_config: Any = None) -> None:
        self.model_config = model_config
        self.compilation_config = compilation_config or CompilationConfig()
        self.__post_init__()

    def __post_init__(self) -> None:
        config = self.compilation_config
        if getattr(self.model_config, "enforce_eager", False):
            config.cudagraph_mode = CUDAGraphMode.NONE
        if config.cudagraph_mode is None:
            config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE


@dataclasses.dataclass
class CUDAGraphOptions:
    debug_log_enable: bool = True
    gc_disable: bool = False
    weak_ref_output: bool = True


class CUDAGraphWrapper:
    _all_instances: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()

    @classmethod
    def clear_all_graphs(cls) -> None:
        for instance in list(cls._all_instances):
            instance.clear_graphs()

    def __init__(
        self,
        runnable: Any,
        vllm_config: Any,
        runtime_mode: CUDAGraphMode,
        cudagraph_options: CUDAGraphOptions | None = None,
    ) -> None:
        raise AssertionError("the stand-in has no graphs of its own")


class BreakableCUDAGraphWrapper(CUDAGraphWrapper):
    _all_instances: ClassVar[weakref.WeakSet[Any]] = weakref.WeakSet()


class BreakableCUDAGraphCapture:
    _tls = threading.local()

    @classmethod
    def current(cls) -> Any:
        return getattr(cls._tls, "active", None)


def eager_break_during_capture(fn: Any) -> Any:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        capture = BreakableCUDAGraphCapture.current()
        if capture is None or not capture._capturing:
            return fn(*args, **kwargs)
        return capture.add_eager(lambda: fn(*args, **kwargs))

    return wrapper


class Offloader:
    def sync_prev_onload(self) -> None:
        pass

    def join_after_forward(self) -> None:
        pass


class Platform:
    device_type = "cpu"
    _handles = 0
    _global: Any = None

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        return "vllm.compilation.cuda_graph.CUDAGraphWrapper"

    def is_rocm(self) -> bool:
        return False

    def graph_pool_handle(self) -> Any:
        Platform._handles += 1
        return ("pool", Platform._handles)

    def get_global_graph_pool(self) -> Any:
        if Platform._global is None:
            Platform._global = self.graph_pool_handle()
        return Platform._global


@dataclasses.dataclass(frozen=True)
class BatchExecutionDescriptor:
    cg_mode: CUDAGraphMode
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None = None
    num_active_loras: int = 0


def _utils() -> Any:
    """The module that the managers believe to be in: what is replaced there, they use."""
    return sys.modules["vllm.v1.worker.gpu.cudagraph_utils"]


class CudaGraphManager:
    def __init__(self, vllm_config: Any, device: Any, cudagraph_mode: Any, query_len: int) -> None:
        self.vllm_config = vllm_config
        self.device = device
        self.compilation_config = vllm_config.compilation_config
        self.cudagraph_mode = cudagraph_mode
        self.max_num_reqs = vllm_config.scheduler_config.max_num_seqs
        self.graphs: dict[BatchExecutionDescriptor, Any] = {}
        self.pool = sys.modules["vllm.platforms"].current_platform.get_global_graph_pool()
        self._graphs_captured = False
        self._capture_mem_samples: list[int] | None = None
        self._candidates: dict[int, list[BatchExecutionDescriptor]] = {}
        self._capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]] = {}
        self.use_breakable_cg = os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH") == "1"
        self.breakable_cg_runner: Any = None
        sizes = sorted(self.compilation_config.cudagraph_capture_sizes or [])
        full = [BatchExecutionDescriptor(CUDAGraphMode.FULL, size, size, 1) for size in sizes]
        mixed = [BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, size, None) for size in sizes]
        for tokens in range(sizes[-1] + 1):
            at = next(index for index, size in enumerate(sizes) if size >= tokens)
            self._candidates[tokens] = [full[at], mixed[at]]
        self._capture_descs = {
            CUDAGraphMode.FULL: full[::-1],
            CUDAGraphMode.PIECEWISE: mixed[::-1],
        }

    def release_graphs(self) -> None:
        self.graphs.clear()
        self._graphs_captured = False
        if self.breakable_cg_runner is not None:
            _utils().BreakableCUDAGraphWrapper.clear_all_graphs()

    def capture(self, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
        with _utils().graph_capture(device=self.device):
            for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
                for desc in self._capture_descs[mode]:
                    forward_fn = create_forward_fn(desc, warmup=True)
                    forward_fn(CUDAGraphMode.NONE)
                    if mode == CUDAGraphMode.FULL or self.use_breakable_cg:
                        forward_fn = create_forward_fn(desc, warmup=False)
                    if mode == CUDAGraphMode.PIECEWISE:
                        forward_fn(CUDAGraphMode.PIECEWISE)
                        continue
                    self._capture_full(desc, lambda fn=forward_fn: fn(CUDAGraphMode.NONE))
        self._graphs_captured = True

    def _capture_full(self, desc: BatchExecutionDescriptor, forward_fn: Any) -> None:
        assert desc not in self.graphs
        torch = _utils().torch
        graph = torch.cuda.CUDAGraph()
        own = getattr(_utils(), "capture_pool", lambda pool, config: contextlib.nullcontext(pool))
        with own(self.pool, self.vllm_config) as pool, torch.cuda.graph(graph, pool, stream=None):
            forward_fn()
        self.graphs[desc] = graph
        if self._capture_mem_samples is not None:
            self._capture_mem_samples.append(0)
        sys.modules["vllm.compilation.counter"].compilation_counter.num_cudagraph_captured += 1

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int = 0,
        max_query_len: int | None = None,
        num_ubatches: int = 1,
    ) -> Any:
        if self._graphs_captured:
            for desc in self._candidates.get(num_tokens, []):
                uniform = desc.uniform_token_count
                if uniform is not None and uniform != uniform_token_count:
                    continue
                if desc.num_reqs is None or desc.num_reqs >= num_reqs:
                    return desc
        return BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens, num_reqs)

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        self.graphs[desc].replay()

    def init_breakable_cg_runner(self, model: Any, key_fn: Any = None) -> None:
        if self.breakable_cg_runner is None:
            self.breakable_cg_runner = _utils().BreakableCUDAGraphWrapper(
                model, self.vllm_config, key_fn=key_fn
            )

    def run_pw_graph(self, model: Any, model_inputs: dict[str, Any]) -> Any:
        if not self.use_breakable_cg:
            return model(**model_inputs)
        return self.breakable_cg_runner(**model_inputs)


class Worker:
    """What sleeps; its memory is not the stand-in's."""

    def sleep(self, level: int = 1) -> None: ...

    def wake_up(self, tags: list[str] | None = None) -> None: ...


class GPUModelRunner:
    """What the V1 runner has around captures."""

    _dummy_run: Any
    compilation_config: Any

    def _capture_cudagraphs(
        self, batch_descriptors: list[BatchDescriptor], cudagraph_runtime_mode: CUDAGraphMode
    ) -> None:
        for desc in batch_descriptors:
            self._warmup_and_capture(desc, cudagraph_runtime_mode=cudagraph_runtime_mode)

    def _warmup_and_capture(
        self,
        desc: BatchDescriptor,
        cudagraph_runtime_mode: CUDAGraphMode,
        num_warmups: int | None = None,
    ) -> None:
        if num_warmups is None:
            num_warmups = self.compilation_config.cudagraph_num_of_warmups
        for mode in (*[CUDAGraphMode.NONE] * num_warmups, cudagraph_runtime_mode):
            self._dummy_run(desc.num_tokens, cudagraph_runtime_mode=mode)


class SecondModelRunner:
    """What the V2 runner has of the check at start."""

    def capture_model(self, *, profile_only: bool = False) -> int:
        return 0


class ModelCudaGraphManager(CudaGraphManager):
    hidden_states: torch.Tensor | None = None

    def capture(
        self, model: Any, model_state: Any, input_buffers: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.use_breakable_cg:
            self.init_breakable_cg_runner(model)

        def create_forward_fn(desc: BatchExecutionDescriptor, warmup: bool) -> Any:
            full = desc.cg_mode == CUDAGraphMode.FULL
            return self._forward(model, desc, model_state, input_buffers, full_cudagraph=full)[0]

        return super().capture(create_forward_fn)

    def _forward(
        self, model: Any, desc: Any, model_state: Any, input_buffers: Any, **kind: bool
    ) -> Any:
        count = desc.num_tokens
        metadata, slots = state = _utils().prepare_inputs_to_capture(
            desc.num_reqs or count, count, model_state, input_buffers, None, [], None, **kind
        )

        def forward_fn(cg_mode: CUDAGraphMode) -> None:
            descriptor, run = None, lambda **inputs: model(**inputs)
            if cg_mode == CUDAGraphMode.PIECEWISE:
                descriptor = BatchDescriptor(num_tokens=count)
                run = lambda **inputs: self.run_pw_graph(model, inputs)  # noqa: E731
            with sys.modules["vllm.forward_context"].set_forward_context(
                metadata,
                self.vllm_config,
                num_tokens=count,
                cudagraph_runtime_mode=cg_mode,
                slot_mapping=slots,
                batch_descriptor=descriptor,
            ):
                hidden = run(
                    input_ids=input_buffers.input_ids[:count],
                    positions=input_buffers.positions[:count],
                )
            if cg_mode == CUDAGraphMode.PIECEWISE:
                return
            if self.hidden_states is None:
                self.hidden_states = torch.empty_like(hidden)
            self.hidden_states[:count] = hidden

        return forward_fn, state

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> torch.Tensor:
        super().run_fullgraph(desc)
        assert self.hidden_states is not None
        return self.hidden_states[: desc.num_tokens]


class OldCudaGraphManager(CudaGraphManager):
    """As in vLLM 0.22: no breakable mode, and a forward comes with the state of attention."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.use_breakable_cg = False

    def capture(self, create_forward_fn: Any, progress_bar_desc: str = "") -> Any:
        states = {}
        with _utils().graph_capture(device=self.device):
            for mode in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
                for desc in self._capture_descs[mode]:
                    forward_fn, states[desc] = create_forward_fn(desc)
                    forward_fn(CUDAGraphMode.NONE)
                    if mode == CUDAGraphMode.PIECEWISE:
                        forward_fn(CUDAGraphMode.PIECEWISE)
                        continue
                    forward_fn, states[desc] = create_forward_fn(desc)
                    self._capture_full(desc, lambda fn=forward_fn: fn(CUDAGraphMode.NONE))
        self._graphs_captured = True
        return states

    def dispatch(self, num_reqs: int, num_tokens: int, uniform_token_count: int | None) -> Any:
        return super().dispatch(num_reqs, num_tokens, uniform_token_count)


class OldModelCudaGraphManager(OldCudaGraphManager, ModelCudaGraphManager):
    def capture(
        self, model: Any, model_state: Any, input_buffers: Any, *args: Any, **kwargs: Any
    ) -> Any:
        def create_forward_fn(desc: BatchExecutionDescriptor) -> Any:
            piecewise = desc.cg_mode == CUDAGraphMode.PIECEWISE
            return self._forward(model, desc, model_state, input_buffers, skip_attn=piecewise)

        return OldCudaGraphManager.capture(self, create_forward_fn)


def _forward_context(module: Any) -> None:
    module._forward_context = None
    module.BatchDescriptor, module.ForwardContext = BatchDescriptor, ForwardContext
    module.is_forward_context_available = lambda: module._forward_context is not None
    module.get_forward_context = lambda: module._forward_context

    @contextlib.contextmanager
    def set_forward_context(
        attn_metadata: Any,
        vllm_config: Any,
        num_tokens: int | None = None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
        batch_descriptor: BatchDescriptor | None = None,
        slot_mapping: Any = None,
        **_: Any,
    ) -> Any:
        if cudagraph_runtime_mode != CUDAGraphMode.NONE and num_tokens is not None:
            batch_descriptor = batch_descriptor or BatchDescriptor(num_tokens=num_tokens)
        layers = vllm_config.compilation_config.static_forward_context
        before = module._forward_context
        module._forward_context = ForwardContext(
            layers, attn_metadata, slot_mapping or {}, cudagraph_runtime_mode, batch_descriptor
        )
        try:
            yield
        finally:
            module._forward_context = before

    module.set_forward_context = set_forward_context


def _monitor(module: Any) -> None:
    module.enabled = True

    def set_cudagraph_capturing_enabled(enabled: bool) -> None:
        module.enabled = enabled

    def validate_cudagraph_capturing_enabled() -> None:
        if not module.enabled:
            raise RuntimeError("CUDA graph capturing detected at an inappropriate time")

    module.set_cudagraph_capturing_enabled = set_cudagraph_capturing_enabled
    module.validate_cudagraph_capturing_enabled = validate_cudagraph_capturing_enabled


def modules(version: str = "0.33") -> dict[str, types.ModuleType]:
    """Return fresh stand-in modules by name, for ``sys.modules``: of vLLM 0.33 or 0.22."""
    platform = type("StandInPlatform", (Platform,), {"_global": None})()
    group = types.SimpleNamespace(is_first_rank=True, is_last_rank=True)
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": f"{version}.0"},
        "vllm.envs": Environment().values,
        "vllm.config": {
            "CUDAGraphMode": CUDAGraphMode,
            "CompilationConfig": CompilationConfig,
            "VllmConfig": VllmConfig,
        },
        "vllm.config.compilation": {"CUDAGraphMode": CUDAGraphMode},
        "vllm.forward_context": {},
        "vllm.compilation": {},
        "vllm.compilation.counter": {
            "compilation_counter": types.SimpleNamespace(num_cudagraph_captured=0)
        },
        "vllm.compilation.monitor": {},
        "vllm.compilation.cuda_graph": {
            "CUDAGraphWrapper": CUDAGraphWrapper,
            "CUDAGraphOptions": CUDAGraphOptions,
        },
        "vllm.compilation.breakable_cudagraph": {
            "BreakableCUDAGraphCapture": BreakableCUDAGraphCapture,
            "BreakableCUDAGraphWrapper": BreakableCUDAGraphWrapper,
            "eager_break_during_capture": eager_break_during_capture,
        },
        "vllm.platforms": {"current_platform": platform},
        "vllm.distributed": {},
        "vllm.distributed.parallel_state": {
            "graph_capture": lambda device: contextlib.nullcontext(),
            "is_global_first_rank": lambda: False,
        },
        "vllm.distributed.device_communicators": {},
        "vllm.distributed.device_communicators.pynccl_allocator": {
            "set_graph_pool_id": lambda handle: None
        },
        "vllm.model_executor": {},
        "vllm.model_executor.offloader": {},
        "vllm.model_executor.offloader.base": {"get_offloader": lambda: Offloader()},
        "vllm.v1": {},
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu_model_runner": {
            "GPUModelRunner": GPUModelRunner,
            "is_global_first_rank": lambda: False,
            "CUDAGraphWrapper": CUDAGraphWrapper,
            "BreakableCUDAGraphWrapper": BreakableCUDAGraphWrapper,
        },
        "vllm.v1.worker.gpu_worker": {"Worker": Worker},
        "vllm.v1.worker.gpu_ubatch_wrapper": {"CUDAGraphWrapper": CUDAGraphWrapper, "torch": torch},
        "vllm.v1.worker.encoder_cudagraph": {"torch": torch},
        "vllm.v1.worker.gpu": {},
        "vllm.v1.worker.gpu.cudagraph_utils": {
            "CudaGraphManager": CudaGraphManager,
            "ModelCudaGraphManager": ModelCudaGraphManager,
            "BatchExecutionDescriptor": BatchExecutionDescriptor,
            "BreakableCUDAGraphWrapper": BreakableCUDAGraphWrapper,
            "graph_capture": None,
            "get_pp_group": lambda: group,
            "prepare_inputs_to_capture": None,
            "capture_pool": lambda pool, config: contextlib.nullcontext(pool),
            "torch": torch,
        },
        "vllm.v1.worker.gpu.model_runner": {
            "ModelCudaGraphManager": ModelCudaGraphManager,
            "GPUModelRunner": SecondModelRunner,
        },
    }
    if version == "0.22":
        managers = contents["vllm.v1.worker.gpu.cudagraph_utils"]
        managers["CudaGraphManager"] = OldCudaGraphManager
        managers["ModelCudaGraphManager"] = OldModelCudaGraphManager
        del managers["BreakableCUDAGraphWrapper"], managers["capture_pool"]
        contents["vllm.v1.worker.gpu.model_runner"] = {
            "GPUModelRunner": SecondModelRunner,
            "ModelCudaGraphManager": OldModelCudaGraphManager,
        }
    made: dict[str, types.ModuleType] = {}
    for name, values in contents.items():
        module = types.ModuleType(name)
        module.__path__ = []
        vars(module).update(values)
        made[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(made[parent], leaf, module)
    _forward_context(made["vllm.forward_context"])
    _monitor(made["vllm.compilation.monitor"])
    return made
