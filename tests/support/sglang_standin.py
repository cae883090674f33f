"""What the SGLang tests run against: its interface files where installed, else a stand-in.

Importing SGLang needs a device. Its backend interface does not, so the installed files are loaded
with what they import from the rest of the engine replaced by the few names below. Where SGLang is
absent, small classes with the same protocol take the place of those files.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

import torch

MODEL = "sglang.srt.model_executor"
BREAKS = f"{MODEL}.runner_backend_utils.breakable_cuda_graph"


class Memory:
    """SGLang's handle of graph memory, and what was asked of its memory while capturing."""

    handle: Any = None
    asked: ClassVar[list[str]] = []

    @staticmethod
    @contextlib.contextmanager
    def capturing() -> Iterator[None]:
        Memory.asked.append("retire what is borrowed")
        yield


class Precarve:
    def measure(self) -> Any:
        Memory.asked.append("measure")
        return contextlib.nullcontext()

    def mint(self) -> None:
        Memory.asked.append("mint")


class PPProxyTensors:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors


class ForwardBatch(types.SimpleNamespace):
    """A batch as SGLang's runners get it; can be referred to weakly, as that can."""


class SRTPlatform:
    _enum: Any = None

    def is_out_of_tree(self) -> bool:
        return bool(self._enum == "oot")


@dataclasses.dataclass
class ServerArgs:
    """What SGLang is started with, and what it makes of it; ``allowed`` stands for its rules."""

    cuda_graph_config: dict[str, dict[str, Any]] | None = None
    disable_cuda_graph: bool = False
    disable_prefill_cuda_graph: bool = False
    cuda_graph_backend_prefill: str | None = None
    cuda_graph_bs_decode: list[int] | None = None
    allowed: str | None = None

    def __post_init__(self) -> None:
        pass

    def resolve_once(self) -> None:
        pass

    def resolved(self) -> Any:
        asked = self.cuda_graph_config or {}
        phases = {
            phase: types.SimpleNamespace(
                backend=self.allowed or asked.get(phase, {}).get("backend", "full")
            )
            for phase in ("decode", "prefill")
        }
        return types.SimpleNamespace(cuda_graph_config=types.SimpleNamespace(**phases))


class Group:
    barriers = 0

    def barrier(self) -> None:
        Group.barriers += 1


_batch: ContextVar[Any] = ContextVar("batch", default=None)


@contextlib.contextmanager
def _set_forward_batch(batch: Any) -> Iterator[None]:
    token = _batch.set(batch)
    try:
        yield
    finally:
        _batch.reset(token)


class TorchNativeAttnBackend:
    """Adds to each row the sum of what its request has seen, by lengths that the host reads."""

    def __init__(self, slots: torch.Tensor, cache: torch.Tensor) -> None:
        self._slots, self._cache = slots, cache

    def forward_extend(self, query: torch.Tensor, output: torch.Tensor, batch: Any) -> None:
        self._run_sdpa_forward_extend(query, output, batch)

    def _run_sdpa_forward_extend(
        self, query: torch.Tensor, output: torch.Tensor, batch: Any
    ) -> None:
        start = 0
        for index in range(batch.seq_lens.shape[0]):
            end = start + batch.extend_seq_lens[index]
            seen = self._slots[batch.req_pool_indices[index], : batch.seq_lens[index]]
            output[start:end] = query[start:end] + self._cache[seen].sum(dim=0)
            start = end


def _radix_attention(eager_on_graph: Any) -> type:
    class RadixAttention:
        def __init__(self, attention: TorchNativeAttnBackend) -> None:
            self._attention = attention

        def __call__(self, query: torch.Tensor) -> torch.Tensor:
            output = torch.empty_like(query)
            self._eager_attention(query, output)
            return output

        @eager_on_graph(True)
        def _eager_attention(self, query: torch.Tensor, output: torch.Tensor) -> None:
            batch = _batch.get()
            count = batch.global_num_token_non_padded_cpu
            self._attention.forward_extend(query[:count], output, batch)
            output[count:].zero_()

    return RadixAttention


def device_module() -> Any:
    """torch's namespace of the CPU, with streams that can be hooked."""
    return types.SimpleNamespace(
        synchronize=lambda: None,
        current_stream=lambda device=None: types.SimpleNamespace(stream_id=0),
        stream=lambda stream: contextlib.nullcontext(),
        Stream=_Stream,
    )


class _Stream:
    def wait_stream(self, other: Any) -> None:
        pass


class MemorySaver:
    """SGLang's, over what it pauses by itself."""

    def pause(self, tag: str) -> None:
        pass

    def resume(self, tag: str) -> None:
        pass


def _surroundings() -> dict[str, dict[str, Any]]:
    features = types.SimpleNamespace(enable_memory_saver=False)
    disabled = types.SimpleNamespace(enabled=False)
    return {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.compilation": {},
        "sglang.srt.compilation.weak_ref_tensor": {"weak_ref_tensors": lambda tensor: tensor},
        "sglang.srt.constants": {"GPU_MEMORY_TYPE_CUDA_GRAPH": "graph"},
        "sglang.srt.distributed": {},
        "sglang.srt.distributed.device_communicators": {},
        "sglang.srt.distributed.device_communicators.pynccl_allocator": {
            "set_graph_pool_id": lambda handle: None
        },
        "sglang.srt.environ": {
            "envs": types.SimpleNamespace(
                SGLANG_ENABLE_CUDA_GRAPH_DEDUP=types.SimpleNamespace(get=lambda: False)
            )
        },
        "sglang.srt.platforms": {"current_platform": types.SimpleNamespace(device_name="cpu")},
        "sglang.srt.platforms.interface": {
            "SRTPlatform": SRTPlatform,
            "PlatformEnum": types.SimpleNamespace(OOT="oot"),
            "PlatformCapabilities": types.SimpleNamespace,
        },
        "sglang.srt.server_args": {"ServerArgs": ServerArgs},
        "sglang.srt.runtime_context": {
            "get_parallel": lambda: types.SimpleNamespace(tp_group=Group()),
            "get_exec": lambda: types.SimpleNamespace(features=features),
        },
        "sglang.srt.utils": {
            "get_bool_env_var": lambda name: False,
            "get_device_module": device_module,
            "is_hip": lambda: False,
            "is_xpu": lambda: False,
        },
        "sglang.srt.utils.torch_memory_saver_adapter": {
            "TorchMemorySaverAdapter": types.SimpleNamespace(create=lambda enable: disabled),
            "_TorchMemorySaverAdapterReal": type("MemorySaver", (MemorySaver,), {}),
        },
        MODEL: {},
        f"{MODEL}.forward_batch_info": {
            "PPProxyTensors": PPProxyTensors,
            "ForwardBatch": ForwardBatch,
            "ForwardMode": types.SimpleNamespace(EXTEND="extend", DECODE="decode"),
            "CaptureHiddenMode": types.SimpleNamespace(NULL=0),
        },
        f"{MODEL}.cuda_graph_config": {
            "Backend": types.SimpleNamespace(BREAKABLE="breakable"),
            "ALLOWED_KEYS_PER_PHASE": {
                "decode": ("backend", "max_bs", "bs"),
                "prefill": ("backend", "max_bs", "bs", "full_prefill_max_req"),
            },
        },
        "sglang.srt.arg_groups": {},
        "sglang.srt.arg_groups.model_override_base": {"resolved_view": ServerArgs.resolved},
        "sglang.srt.layers": {},
        "sglang.srt.layers.attention": {},
        "sglang.srt.layers.attention.torch_native_backend": {
            "TorchNativeAttnBackend": TorchNativeAttnBackend
        },
        f"{MODEL}.runner": {"DecodeCudaGraphRunner": type("DecodeCudaGraphRunner", (), {})},
        f"{MODEL}.runner_utils": {},
        f"{MODEL}.runner_utils.forward_batch": {
            "get_forward_batch": _batch.get,
            "set_forward_batch": _set_forward_batch,
        },
        f"{MODEL}.runner_utils.prefill_graph": {
            "prefill_graph_scope": lambda *, full_graph, raw_num_tokens: contextlib.nullcontext()
        },
        f"{MODEL}.runner_utils.pool": {
            "GraphPoolPrecarve": Precarve,
            "get_or_create_global_graph_memory_pool": lambda module: ("handle", 0),
            "get_global_graph_memory_pool": lambda: Memory.handle,
            "set_global_graph_memory_pool": lambda handle: setattr(Memory, "handle", handle),
            "graph_pool_capture_scope": Memory.capturing,
            "graph_pool_replay_scope": contextlib.nullcontext,
        },
        f"{MODEL}.runner_backend": {},
    }


_FILES = (
    f"{MODEL}.runner.shape_key",
    f"{MODEL}.runner_backend_utils",
    f"{BREAKS}.cuda_utils",
    f"{BREAKS}.breakable_cuda_graph",
    f"{BREAKS}.context",
    f"{BREAKS}",
    f"{MODEL}.runner_backend.base_cuda_graph_backend",
    f"{MODEL}.runner_backend.cuda_graph_dedup_mixin",
    f"{MODEL}.runner_backend.full_cuda_graph_backend",
    f"{MODEL}.runner_backend.breakable_cuda_graph_backend",
)


# The stand-in of those files.

_current: ContextVar[Any] = ContextVar("current", default=None)
_current_stream: ContextVar[Any] = ContextVar("current stream", default=None)


@dataclasses.dataclass(frozen=True)
class ShapeKey:
    size: int
    stream_idx: int | None = None
    variant_label: str | None = None
    attention_variant: str | None = None


class BaseCudaGraphBackend(abc.ABC):
    @abc.abstractmethod
    def capture_session(self, stream: Any) -> Any: ...

    @abc.abstractmethod
    def capture_one(
        self, shape_key: Any, forward_fn: Any, capture_inputs: Any = None, hook: Any = None
    ) -> None: ...

    @abc.abstractmethod
    def can_run(self, forward_batch: Any, shape_key: Any) -> bool: ...

    @abc.abstractmethod
    def replay_session(self) -> Any: ...

    @abc.abstractmethod
    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any: ...

    @abc.abstractmethod
    def cleanup(self) -> None: ...


class _Kept(BaseCudaGraphBackend):
    def __init__(self, cuda_graph_runner: Any, *, enable_memory_saver: bool = False) -> None:
        self._graphs: dict[Any, Any] = {}
        self._outputs: dict[Any, Any] = {}
        self._pool: Any = None
        self._cuda_graph_runner = cuda_graph_runner
        self._device_module = cuda_graph_runner.device_module
        self._tp_group = Group()
        adapter = sys.modules["sglang.srt.utils.torch_memory_saver_adapter"]
        self._memory_saver_adapter = adapter.TorchMemorySaverAdapter.create(enable_memory_saver)

    @contextlib.contextmanager
    def capture_session(self, stream: Any) -> Iterator[None]:
        self._pool = ("handle", 0)
        with self.replay_session():
            yield

    def can_run(self, forward_batch: Any, shape_key: Any) -> bool:
        return shape_key in self._graphs

    @contextlib.contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    def replay(self, shape_key: Any, static_forward_batch: Any, **kwargs: Any) -> Any:
        self._graphs[shape_key].replay()
        return self._outputs[shape_key]

    def capture_one(
        self, shape_key: Any, forward_fn: Any, capture_inputs: Any = None, hook: Any = None
    ) -> None:
        raise AssertionError("the stand-in has no graphs of its own")

    def cleanup(self) -> None:
        self._graphs.clear()
        self._outputs.clear()


class FullCudaGraphBackend(_Kept):
    def __init__(self, runner: Any, *, reuse_output_buffer: bool = False, **options: Any) -> None:
        super().__init__(runner, **options)
        self._reuse_output_buffer = reuse_output_buffer
        self._output_buffer: Any = None

    def cleanup(self) -> None:
        for graph in self._graphs.values():
            graph.reset()
        super().cleanup()


def _allocate_output_buffer(output: Any) -> Any:
    return torch.empty_like(output) if isinstance(output, torch.Tensor) else None


def _copy_output_to_buffer(output: torch.Tensor, buffer: torch.Tensor) -> Any:
    if output.shape[1:] != buffer.shape[1:] or len(output) > len(buffer):
        return None
    return buffer[: len(output)].copy_(output)


class BreakableCudaGraphBackend(_Kept):
    def __init__(self, runner: Any, *, debug_eager: bool = False, **options: Any) -> None:
        super().__init__(runner, **options)
        self._debug_eager = debug_eager
        self._capture_inputs: dict[Any, Any] = {}
        self._shared_output_buffer: Any = None

    def _output_rows(self, output: torch.Tensor, cap: int) -> int:
        return min(cap, output.shape[0])

    def _alloc_full_buffer(self, output: torch.Tensor, size: int) -> torch.Tensor:
        return output.new_empty((size, *output.shape[1:]))

    def _slice_output(self, output: torch.Tensor, rows: int) -> torch.Tensor:
        return output[:rows]

    def _copy_output_to_buffer(self, output: Any, buffer: Any, rows: int) -> None:
        buffer[:rows].copy_(output[:rows])


def eager_on_graph(enable: bool) -> Any:
    return _broken if enable else lambda inner: inner


def _broken(inner: Any) -> Any:
    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        capture = _current.get()
        if capture is None:
            return inner(*args, **kwargs)
        capture._end_current_segment()
        if capture._barrier_fn is not None:
            capture._barrier_fn()
        output = inner(*args, **kwargs)
        captured_inner, captured_args, captured_kwargs = inner, args, kwargs
        captured_output = output

        def replay_fn() -> None:
            fresh = captured_inner(*captured_args, **captured_kwargs)
            if isinstance(captured_output, torch.Tensor):
                captured_output.copy_(fresh)

        capture.cuda_graph._break_fns.append(replay_fn)
        capture._begin_new_segment()
        return output

    return wrapper


class BreakableCUDAGraph:
    def __init__(self, deduped_cuda_graph: Any = None) -> None:
        self._segments: list[Any] = []
        self._break_fns: list[Any] = []

    def replay(self) -> None:
        for index, segment in enumerate(self._segments):
            segment.replay()
            if index < len(self._break_fns):
                self._break_fns[index]()


class BreakableCUDAGraphCapture:
    def __init__(
        self, cuda_graph: Any, pool: Any = None, stream: Any = None, barrier_fn: Any = None
    ) -> None:
        self.cuda_graph = cuda_graph
        self._barrier_fn = barrier_fn
        self._current_graph: Any = None

    def __enter__(self) -> Any:
        self._token = _current.set(self)
        self._begin_new_segment()
        return self

    def __exit__(self, *error: Any) -> bool:
        try:
            self._end_current_segment()
        finally:
            _current.reset(self._token)
        return False

    def _begin_new_segment(self) -> None:
        raise AssertionError("the stand-in has no graphs of its own")

    def _end_current_segment(self) -> None:
        graph = self._current_graph
        graph.capture_end()
        self.cuda_graph._append_segment(graph, False)
        self._current_graph = None


def _standin_files() -> dict[str, dict[str, Any]]:
    breaks = {
        "_current_capture_var": _current,
        "_current_stream_var": _current_stream,
        "get_device_module": device_module,
        "eager_on_graph": eager_on_graph,
        "BreakableCUDAGraph": BreakableCUDAGraph,
        "BreakableCUDAGraphCapture": BreakableCUDAGraphCapture,
    }
    return {
        f"{MODEL}.runner.shape_key": {"ShapeKey": ShapeKey},
        f"{MODEL}.runner_backend_utils": {},
        BREAKS: breaks,
        f"{BREAKS}.breakable_cuda_graph": breaks,
        f"{MODEL}.runner_backend.base_cuda_graph_backend": {
            "BaseCudaGraphBackend": BaseCudaGraphBackend
        },
        f"{MODEL}.runner_backend.full_cuda_graph_backend": {
            "FullCudaGraphBackend": FullCudaGraphBackend,
            "_allocate_output_buffer": _allocate_output_buffer,
            "_copy_output_to_buffer": _copy_output_to_buffer,
        },
        f"{MODEL}.runner_backend.breakable_cuda_graph_backend": {
            "BreakableCudaGraphBackend": BreakableCudaGraphBackend,
            "eager_on_graph": eager_on_graph,
        },
    }


def root() -> Path | None:
    """Return the folder of the installed SGLang, or None."""
    spec = importlib.util.find_spec("sglang")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    return Path(places[0]) if places else None


def load(folder: Path | None) -> None:
    """Put the interface into ``sys.modules``: from the files under ``folder``, or the stand-in."""
    contents = _surroundings()
    if folder is None:
        contents.update(_standin_files())
    for name, values in contents.items():
        module = types.ModuleType(name)
        parts = name.split(".")[1:]
        module.__path__ = [] if folder is None else [str(folder.joinpath(*parts))]
        vars(module).update(values)
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
    if folder is not None:
        for name in _FILES:
            importlib.import_module(name)
    radix: Any = types.ModuleType("sglang.srt.layers.radix_attention")
    breaks = sys.modules[f"{BREAKS}.breakable_cuda_graph"]
    radix.RadixAttention = _radix_attention(breaks.eager_on_graph)
    sys.modules[radix.__name__] = radix
    choice = types.ModuleType(f"{MODEL}.runner_backend.utils")
    for leaf, name in (
        ("full_cuda_graph_backend", "FullCudaGraphBackend"),
        ("breakable_cuda_graph_backend", "BreakableCudaGraphBackend"),
    ):
        setattr(choice, name, getattr(sys.modules[f"{MODEL}.runner_backend.{leaf}"], name))
    sys.modules[choice.__name__] = choice


def unload() -> None:
    """Remove all of it."""
    Memory.handle = None
    Memory.asked.clear()
    for name in [name for name in sys.modules if name == "sglang" or name.startswith("sglang.")]:
        del sys.modules[name]
