"""Modes of torch around and inside a recording: kept, and as before after a refusal."""

from __future__ import annotations

import gc
import importlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.func import linearize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode

import devgraph as dg
from devgraph.cpu.memory import BlockPool
from devgraph.cpu.recorder import Recorder
from tests.support.cpu_capture import METADATA, check_replays, record, same
from tests.support.refusals import READS, SHAPES, X


def test_refusal_leaves_no_mode_behind_and_the_next_capture_works() -> None:
    pool = BlockPool()
    for fn in (READS["item"][0], SHAPES["nonzero"][0], lambda x: x + torch.ones(3)):
        with pytest.raises(Exception):  # noqa: B017 - any of three
            record(fn, X, pool=pool)
        assert torch._C._len_torch_dispatch_stack() == 0
        assert torch._C._len_torch_function_stack() == 0
    assert (X.sum() + 1).item() == 11
    x = X.clone()
    tape, out = record(lambda x: x + 1, x, pool=pool)
    tape.replay()
    assert torch.equal(out, X + 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, ValueError])
def test_exception_in_the_body_is_raised_and_all_is_undone(error: type[BaseException]) -> None:
    pool = BlockPool()
    random = torch.get_rng_state()

    def body(x: torch.Tensor) -> None:
        torch.rand(3)
        x.add_(1)
        raise error

    x = X.clone()
    with pytest.raises(error):
        record(body, x, pool=pool)
    assert torch.equal(x, X) and torch.equal(torch.get_rng_state(), random)
    assert torch._C._len_torch_dispatch_stack() == 0 and torch.is_autocast_cache_enabled()
    assert pool.live() == []


def _drop_inside(handler: str, backend: dg.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open a recording and drop it while ``handler`` runs its first operation."""
    real = getattr(Recorder, handler)

    def dropping(self: Recorder, *args: Any) -> Any:
        held.clear()
        return real(self, *args)

    monkeypatch.setattr(Recorder, handler, dropping)
    held: list[Any] = [backend.capture_context(backend.make_graph())]
    held[0].__enter__()
    X + 1
    assert not held


@pytest.mark.parametrize("handler", ["_call_function", "_call_operation"])
def test_recording_that_is_dropped_inside_an_operation_is_over(
    handler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 40: as a collection may drop what an interrupt left open."""
    want, backend = X + 1, dg.get_backend("cpu")
    _drop_inside(handler, backend, monkeypatch)
    assert not dg.is_capturing() and gc.isenabled()
    assert torch.equal(X + 1, want)
    x = X.clone()
    captured = dg.capture(lambda x: x + 1, x, backend=backend)
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    assert torch.equal(captured.replay(), want)


def test_piecewise_compiles_after_a_recording_that_was_dropped_inside_an_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    want, backend = X + 1, dg.get_backend("cpu")
    with monkeypatch.context() as patch:
        _drop_inside("_call_operation", backend, patch)
    captured = dg.capture(lambda x: x + 1, X.clone(), backend=backend, policy="piecewise")
    assert torch.equal(captured.replay(), want)


def test_users_modes_stay_above_and_are_kept() -> None:
    class Counting(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    x = X.clone()
    mode = Counting()
    with Recorder(BlockPool(), metadata=METADATA) as recorder, mode:
        out = x + 1
    with mode:
        with Recorder(BlockPool(), metadata=METADATA):
            x + 1
        assert torch._C._len_torch_dispatch_stack() == 1
    assert mode.seen == 2
    tape = recorder.tape()
    with mode:
        tape.replay()
    assert mode.seen == 2, "a replay is one piece of work, not operations"
    assert torch.equal(out, X + 1)


def test_recording_can_end_inside_a_mode_that_the_body_entered() -> None:
    first = Recorder(BlockPool(), metadata=METADATA)
    second = Recorder(BlockPool(), metadata=METADATA)
    first.__enter__()
    with torch.device("cpu"), TorchDispatchMode():
        first.__exit__(None, None, None)
        assert torch._C._len_torch_dispatch_stack() == 1
        second.__enter__()
    with torch.device("cpu"):
        second.__exit__(None, None, None)
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


def test_default_device_set_before_a_recording_is_kept() -> None:
    torch.set_default_device("cpu")
    try:
        with Recorder(BlockPool(), metadata=METADATA) as recorder:
            torch.set_default_device("cpu")
            out = torch.ones(3) + X[:3]
    finally:
        torch.set_default_device(None)
    recorder.tape().replay()
    assert torch.equal(out, 1 + X[:3])
    assert torch._C._len_torch_function_stack() == 0


ROWS = 2 * torch.arange(8.0).view(2, 4) - 7


def _layers() -> dict[str, Any]:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return {
        "layer": layer,
        "norm first": torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True),
        "encoder": torch.nn.TransformerEncoder(layer, 2),
        "attention": torch.nn.MultiheadAttention(8, 2, batch_first=True),
        "attention alone": torch.nn.MultiheadAttention(8, 2, batch_first=True),
    }


@pytest.mark.parametrize("name", _layers())
def test_fast_paths_of_transformer_layers_are_those_of_eager_execution(name: str) -> None:
    module = _layers()[name].eval()

    def step(x: torch.Tensor) -> Any:
        with torch.no_grad():
            if name.startswith("attention"):
                return module(x, x, x, need_weights=name == "attention")[0]
            return module(x)

    check_replays(
        step, lambda seed: [torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(seed))]
    )
    assert torch.overrides.has_torch_function.__module__ != "devgraph.cpu.modes"


def _scan(x: torch.Tensor) -> Any:
    scan = importlib.import_module("torch._higher_order_ops.scan").scan
    return scan(lambda carry, row: (carry + row, carry * row), torch.zeros(4), x)


def _attention(x: torch.Tensor) -> Any:
    heads = x.view(1, 2, 2, 2)
    return flex_attention(heads, heads + 1, heads, score_mod=lambda s, b, h, i, j: s + (i - j))


def _masked_attention(x: torch.Tensor) -> Any:
    heads = x.view(1, 2, 2, 2)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 2, 2, device="cpu")
    return flex_attention(heads, heads + 1, heads, block_mask=mask)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("fn", [_scan, _attention, _masked_attention])
@pytest.mark.parametrize("warmup", [0, 2])
def test_higher_order_operators_are_recorded_and_stay_usable(fn: Any, warmup: int) -> None:
    captured = dg.capture(fn, ROWS.clone(), backend="cpu", warmup=warmup)
    for factor in (0.5, -1.0):
        got, want = captured.replay(ROWS * factor), fn(ROWS * factor)
        torch.utils._pytree.tree_map(lambda a, b: same(a, b) or pytest.fail("differs"), got, want)


def test_branch_on_data_is_refused_with_its_line_and_harms_nothing() -> None:
    def step(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    with pytest.raises(dg.HostReadError, match=r"torch\.cond\(x\.sum\(\) > 0"):
        dg.capture(step, X.clone(), backend="cpu")
    assert torch.equal(step(X), X.sin()) and torch.equal(step(-X), X.cos())


@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_function_is_recorded_uncompiled_and_compiled_elsewhere(fullgraph: bool) -> None:
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: (x * 2).sin(), backend=backend, fullgraph=fullgraph)
    other = torch.compile(lambda x: x.cos(), backend=backend, fullgraph=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(lambda: torch.equal(other(X), X.cos())).result()
        return compiled(x) + 1

    captured = dg.capture(step, X.clone(), backend="cpu", warmup=0)
    assert len(graphs) == 1
    assert torch.equal(captured.replay(X * 3), step(X * 3)) and len(graphs) == 2


def test_machine_code_that_rounds_otherwise_is_refused() -> None:
    compiled = torch.compile(lambda x: (x * 2).sin(), fullgraph=True)
    with pytest.raises(dg.CaptureError, match="Pass the function itself"):
        dg.capture(lambda x: compiled(x) + 1, X.clone(), backend="cpu", warmup=0)


def test_mode_that_an_interrupt_left_on_the_stack_is_taken_off() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        METADATA.mode.__enter__()
        raise KeyboardInterrupt

    record(lambda x: x + 1, X)
    with pytest.raises(KeyboardInterrupt):
        record(step, X)
    assert type(X + 1) is torch.Tensor and torch._C._len_torch_dispatch_stack() == 0


def test_export_in_a_step_is_no_device_work_and_its_result_is_recorded() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.export.export(torch.nn.ReLU(), (x,)).module()(x) * 2

    x = torch.randn(3)
    captured = dg.capture(step, x, backend="cpu")
    x.copy_(-x)
    assert torch.equal(captured.replay(), torch.relu(x) * 2)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.parametrize(
    "trace", [lambda x: make_fx(torch.sin)(x)(x), lambda x: linearize(torch.sin, x)[1](x)]
)
def test_tracer_of_real_tensors_in_a_step_is_refused(trace: Any) -> None:
    with pytest.raises(dg.CaptureError, match="traces a function, at "):
        dg.capture(lambda x: trace(x), torch.ones(3), backend="cpu")


def test_storage_of_a_result_has_the_size_of_eager() -> None:
    state = torch.zeros(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        state.untyped_storage().copy_((x * 2).untyped_storage())
        return state + (x + 1).untyped_storage().nbytes()

    x = torch.randn(3)
    captured = dg.capture(step, x, backend="cpu")
    x.add_(1)
    assert torch.equal(captured.replay(), x * 2 + 12)
