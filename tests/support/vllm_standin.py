"""A small stand-in for the parts of vLLM 0.22 that a graph layer talks to.

It has vLLM's names, signatures and call protocol and none of its work, so that the protocol tests
run where vLLM is not installed. The same tests run against the real package where it is, which
keeps this file honest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import sys
import types
import weakref
from typing import Any, ClassVar

import torch


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
        self._candidates: list[list[BatchExecutionDescriptor]] = []
        self._capture_descs: dict[CUDAGraphMode, list[BatchExecutionDescriptor]] = {}
        self._init_candidates()

    def _init_candidates(self) -> None:
        sizes = sorted(self.compilation_config.cudagraph_capture_sizes or [])
        descs = {
            size: [
                BatchExecutionDescriptor(CUDAGraphMode.FULL, size, size, 1),
                BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, size, None),
            ]
            for size in sizes
        }
        self._candidates = [[] for _ in range(sizes[-1] + 1)]
        for tokens in range(sizes[-1] + 1):
            self._candidates[tokens] = descs[min(size for size in sizes if size >= tokens)]
        for index, mode in enumerate((CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)):
            self._capture_descs[mode] = [descs[size][index] for size in reversed(sizes)]

    def capture(self, create_forward_fn: Any, progress_bar_desc: str = "") -> Any:
        raise AssertionError("the stand-in has no graphs of its own")

    def dispatch(self, num_reqs: int, num_tokens: int, uniform_token_count: int | None) -> Any:
        if self._graphs_captured and 0 < num_tokens < len(self._candidates):
            for desc in self._candidates[num_tokens]:
                uniform = desc.uniform_token_count
                if uniform is not None and uniform != uniform_token_count:
                    continue
                if desc.num_reqs is None or desc.num_reqs >= num_reqs:
                    return desc
        return BatchExecutionDescriptor(CUDAGraphMode.NONE, num_tokens, num_reqs)

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> Any:
        self.graphs[desc].replay()


class ModelCudaGraphManager(CudaGraphManager):
    hidden_states: torch.Tensor | None = None

    def capture(
        self,
        model: Any,
        model_state: Any,
        input_buffers: Any,
        *args: Any,
        progress_bar_desc: str = "Capturing",
        **kwargs: Any,
    ) -> Any:
        from vllm.forward_context import set_forward_context

        def create_forward_fn(desc: BatchExecutionDescriptor) -> Any:
            count = desc.num_tokens
            utils = sys.modules["vllm.v1.worker.gpu.cudagraph_utils"]
            piecewise = desc.cg_mode == CUDAGraphMode.PIECEWISE
            metadata, slots = utils.prepare_inputs_to_capture(
                desc.num_reqs or count, count, model_state, input_buffers, skip_attn=piecewise
            )

            def forward_fn(cg_mode: CUDAGraphMode) -> None:
                descriptor = None
                if cg_mode == CUDAGraphMode.PIECEWISE:
                    descriptor = BatchDescriptor(num_tokens=count)
                with set_forward_context(
                    metadata,
                    self.vllm_config,
                    num_tokens=count,
                    cudagraph_runtime_mode=cg_mode,
                    slot_mapping=slots,
                    batch_descriptor=descriptor,
                ):
                    hidden = model(
                        input_ids=input_buffers.input_ids[:count],
                        positions=input_buffers.positions[:count],
                    )
                if cg_mode == CUDAGraphMode.PIECEWISE:
                    return
                if self.hidden_states is None:
                    self.hidden_states = torch.empty_like(hidden)
                self.hidden_states[:count] = hidden

            return forward_fn, (metadata, slots)

        return super().capture(create_forward_fn, progress_bar_desc)

    def run_fullgraph(self, desc: BatchExecutionDescriptor) -> torch.Tensor:
        super().run_fullgraph(desc)
        assert self.hidden_states is not None
        return self.hidden_states[: desc.num_tokens]


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


def modules() -> dict[str, types.ModuleType]:
    """Return fresh stand-in modules by name, for ``sys.modules``."""
    platform = type("StandInPlatform", (Platform,), {"_global": None})()
    group = types.SimpleNamespace(is_first_rank=True, is_last_rank=True)
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": "0.22.0"},
        "vllm.envs": {"VLLM_LOGGING_LEVEL": "INFO"},
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
            "BreakableCUDAGraphWrapper": BreakableCUDAGraphWrapper
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
            "CUDAGraphWrapper": CUDAGraphWrapper,
            "BreakableCUDAGraphWrapper": BreakableCUDAGraphWrapper,
        },
        "vllm.v1.worker.gpu_ubatch_wrapper": {"CUDAGraphWrapper": CUDAGraphWrapper},
        "vllm.v1.worker.gpu": {},
        "vllm.v1.worker.gpu.cudagraph_utils": {
            "CudaGraphManager": CudaGraphManager,
            "ModelCudaGraphManager": ModelCudaGraphManager,
            "BatchExecutionDescriptor": BatchExecutionDescriptor,
            "get_pp_group": lambda: group,
            "prepare_inputs_to_capture": None,
        },
        "vllm.v1.worker.gpu.model_runner": {"ModelCudaGraphManager": ModelCudaGraphManager},
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
