"""What the vLLM tests run against: the stand-in always, the real package where it is installed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from devgraph.integrations.vllm import layer, wrappers
from tests.support import vllm_standin

ENGINES = ("standin", "installed")
MANAGERS = ("standin", "standin-0.22", "installed")
"""With both protocols of the second runner's managers."""
WIDTH = 8


class Engine:
    """Short names for the modules of one vLLM, real or stand-in."""

    def __init__(self) -> None:
        config = importlib.import_module("vllm.config")
        context = importlib.import_module("vllm.forward_context")
        self.Mode: Any = config.CUDAGraphMode
        self.Descriptor: Any = context.BatchDescriptor
        self.context = context
        self.cuda_graph = importlib.import_module("vllm.compilation.cuda_graph")
        self.monitor = importlib.import_module("vllm.compilation.monitor")
        self.platforms = importlib.import_module("vllm.platforms")
        self.counter = importlib.import_module("vllm.compilation.counter").compilation_counter
        self.runner = importlib.import_module("vllm.v1.worker.gpu_model_runner")
        self.managers = importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils")
        self.v2 = importlib.import_module("vllm.v1.worker.gpu.model_runner")
        self.Wrapper: Any = wrappers.graph_wrapper()

    def config(self, **values: Any) -> Any:
        """A configuration with what a graph layer reads of it."""
        compilation = types.SimpleNamespace(
            static_forward_context={},
            splitting_ops=[],
            _attention_ops=["vllm::unified_attention_with_output"],
            cudagraph_capture_sizes=[2, 4],
            max_cudagraph_capture_size=4,
            adjust_cudagraph_sizes_for_spec_decode=lambda *_: None,
            fast_moe_cold_start=False,
            compile_sizes=[],
            get_compile_ranges=list,
            cudagraph_num_of_warmups=1,
        )
        vars(compilation).update(values)
        return types.SimpleNamespace(
            compilation_config=compilation,
            scheduler_config=types.SimpleNamespace(max_num_seqs=8),
            parallel_config=types.SimpleNamespace(
                data_parallel_size=1,
                tensor_parallel_size=1,
                world_size_across_dp=1,
                is_moe_model=False,
                use_sequence_parallel_moe=False,
            ),
            cache_config=types.SimpleNamespace(use_kda_recoverssm=False),
            lora_config=None,
            speculative_config=None,
            num_speculative_tokens=0,
            use_cumem_cudagraph_pool=False,
        )

    @contextlib.contextmanager
    def step(
        self, config: Any, mode: Any, descriptor: Any = None, metadata: Any = None
    ) -> Iterator[None]:
        """One forward step as the runner sets it up."""
        with self.context.set_forward_context(
            metadata, config, cudagraph_runtime_mode=mode, batch_descriptor=descriptor
        ):
            yield


class Step:
    """A body that counts how often Python runs it."""

    def __init__(self, factor: float = 2.0) -> None:
        self.runs = 0
        self.factor = factor
        self.extra = "own attribute"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.runs += 1
        return (x * self.factor + 1).relu()


@contextlib.contextmanager
def engine_of(name: str, skip: Callable[[str], Any]) -> Iterator[Engine]:
    """Make ``vllm`` the stand-in or the installed package for a block, with a fresh layer."""
    present = importlib.util.find_spec("vllm") is not None
    if name == "installed" and not present:
        skip("vLLM is not installed; its stand-in is tested")
    if name != "installed" and present:
        skip("vLLM is installed and tested itself: one process cannot register the ops of both")
    if name != "installed":
        sys.modules.update(vllm_standin.modules(name.partition("-")[2] or "0.33"))
    _forget_classes()
    before = layer.reset_layer(None)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of importing the real package
            engine = Engine()
        yield engine
    finally:
        layer.reset_layer(before)
        _forget_classes()
        if name != "installed":
            for key in [key for key in sys.modules if _is_vllm(key)]:
                del sys.modules[key]


def _is_vllm(name: str) -> bool:
    return name == "vllm" or name.startswith("vllm.")


def _forget_classes() -> None:
    wrappers.graph_wrapper.cache_clear()
    wrappers.step_wrapper.cache_clear()


def real_attention_op() -> bool:
    """Whether the attention op is that of the installed vLLM."""
    return attention_op() is None


@functools.cache
def attention_op() -> torch.library.Library | None:
    """Register the attention op of the stand-in's model, unless the real vLLM has."""
    if hasattr(torch.ops.vllm, "unified_attention_with_output"):
        return None
    library = torch.library.Library("vllm", "FRAGMENT")
    library.define(
        "unified_attention_with_output(Tensor query, Tensor key, Tensor value, Tensor(a!) output, "
        "str layer_name) -> ()"
    )

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
        layer_name: str,
    ) -> None:
        from vllm.forward_context import get_forward_context

        context = get_forward_context()
        layer = context.no_compile_layers[layer_name]
        metadata = context.attn_metadata
        layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata, output=output)

    # As on a device, a capture sees the kernels inside and not the op.
    library.impl("unified_attention_with_output", attention, "CompositeImplicitAutograd")
    return library


class Attention:
    """A layer that attends each row over as many rows as the metadata says, read on the host."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.impl = self
        self.kv_cache = torch.empty(0)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
        **_: Any,
    ) -> None:
        self.seen.append(metadata)
        if metadata is None:
            output.fill_(0)
            return
        rows = metadata.rows
        scores = torch.softmax(query[:rows] @ key[:rows].T, dim=-1)
        output[:rows] = scores @ value[:rows]


def rows(count: int) -> Any:
    """Attention metadata for ``count`` rows."""
    return types.SimpleNamespace(rows=count)


class Model(torch.nn.Module):
    """Two layers with attention between; the op is called as vLLM's layers call it."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.attends = True
        self.embed = torch.randn(32, WIDTH, generator=generator)
        self.weights = [torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(2)]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: None = None,
    ) -> torch.Tensor:
        hidden = self.embed[input_ids] + positions[:, None]
        for index, weight in enumerate(self.weights):
            query = hidden @ weight
            output = torch.empty_like(query) if self.attends else query.sin()
            if self.attends:
                torch.ops.vllm.unified_attention_with_output(
                    query, query, hidden, output, f"layers.{index}"
                )
            hidden = hidden + output.tanh()
        return hidden
