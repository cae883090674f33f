"""SGLang's backend interface on DeviceGraph: capture, replay, breaks, outputs, clean-up."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.integrations import sglang
from tests.support import sglang_standin

WIDTH = 8
FOLDER = sglang_standin.root()


@pytest.fixture(params=["standin", "installed"])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    if request.param == "installed" and FOLDER is None:
        pytest.skip("SGLang is not installed; its stand-in is tested")
    sglang_standin.load(FOLDER if request.param == "installed" else None)
    _forget()
    with torch.inference_mode():
        yield types.SimpleNamespace(
            ShapeKey=module("runner.shape_key").ShapeKey,
            base=module("runner_backend.base_cuda_graph_backend").BaseCudaGraphBackend,
            eager=sys.modules[f"{sglang_standin.BREAKS}.breakable_cuda_graph"].eager_on_graph,
        )
    sglang.uninstall()
    _forget()
    sglang_standin.unload()


def _forget() -> None:
    sglang._Holder.shared = None
    for cached in (sglang.full_backend, sglang.breakable_backend, sglang._segment_classes):
        cached.cache_clear()


def module(name: str) -> Any:
    return importlib.import_module(f"{sglang_standin.MODEL}.{name}")


def runner() -> Any:
    return types.SimpleNamespace(
        device_module=sglang_standin.device_module(),
        model_runner=None,
        cuda_graph_output_rows=lambda output: None,
        cuda_graph_output_capacity_rows=lambda output: None,
    )


class Case:
    """A step over a static buffer of eight rows, with the eager part that the test gives it."""

    def __init__(self, eager: Any = None) -> None:
        self.x = torch.randn(8, WIDTH)
        self.weight = torch.randn(WIDTH, WIDTH)
        self.runs = 0
        self.eager = eager or (lambda hidden: hidden.tanh())

    def forward(self, size: int) -> Any:
        def run() -> torch.Tensor:
            self.runs += 1
            hidden = self.x[:size] @ self.weight
            return self.eager(hidden) * 2 + hidden

        return run

    def fill(self) -> None:
        self.x.copy_(torch.randn(8, WIDTH))

    def expected(self, size: int) -> torch.Tensor:
        hidden = self.x[:size] @ self.weight
        return self.eager(hidden) * 2 + hidden


def captured(engine: Any, backend: Any, case: Case, *sizes: int, hook: Any = None) -> None:
    with backend.capture_session(None):
        for size in sizes:
            backend.capture_one(engine.ShapeKey(size), case.forward(size), "owners", hook)


def test_full_backend_replays_each_shape_with_new_data(engine: Any) -> None:
    backend, case = sglang.full_backend()(runner()), Case()
    assert isinstance(backend, engine.base)
    captured(engine, backend, case, 8, 4)
    assert backend.can_run(None, engine.ShapeKey(4))
    assert not backend.can_run(None, engine.ShapeKey(4, variant_label="lora"))
    runs = case.runs
    for size in (4, 8, 4):
        case.fill()
        with backend.replay_session():
            out = backend.replay(engine.ShapeKey(size), None)
        assert torch.equal(out, case.expected(size))
    assert case.runs == runs == 6  # two warm-ups and one capture each
    found = sglang.stats()["modes"]["full"]
    assert (found["captures"], found["replays"], found["graphs"]) == (2, 3, 2)


def test_shapes_share_the_largest_output_buffer_when_asked(engine: Any) -> None:
    backend, case = sglang.full_backend()(runner(), reuse_output_buffer=True), Case()
    captured(engine, backend, case, 8, 4)
    large = backend.replay(engine.ShapeKey(8), None)
    assert torch.equal(large, case.expected(8))
    case.fill()
    small = backend.replay(engine.ShapeKey(4), None)
    assert torch.equal(small, case.expected(4))
    assert small.data_ptr() == large.data_ptr()


def test_output_that_is_no_tensor_comes_back_as_it_is(engine: Any) -> None:
    case = Case()
    backend = sglang.full_backend()(runner(), reuse_output_buffer=True)
    forward = case.forward(4)
    with backend.capture_session(None):
        backend.capture_one(
            engine.ShapeKey(4), lambda: types.SimpleNamespace(next_token_logits=forward())
        )
    case.fill()
    out = backend.replay(engine.ShapeKey(4), None)
    assert torch.equal(out.next_token_logits, case.expected(4))


def test_warm_ups_synchronise_ranks_and_call_the_hook(engine: Any) -> None:
    for backend in (sglang.full_backend()(runner()), sglang.breakable_backend()(runner())):
        sglang_standin.Group.barriers = 0
        calls: list[None] = []
        captured(engine, backend, Case(), 4, hook=lambda calls=calls: calls.append(None))
        assert len(calls) == 2
        assert sglang_standin.Group.barriers == 2


def test_breakable_backend_runs_marked_code_with_live_state(engine: Any) -> None:
    state = {"scale": 1.0}
    marked = engine.eager(lambda hidden: hidden.sum(dim=-1, keepdim=True) * state["scale"])
    backend, case = sglang.breakable_backend()(runner()), Case(marked)
    captured(engine, backend, case, 8, 4)
    runs = case.runs
    for size, scale in ((4, 3.0), (8, 0.5), (4, -1.0)):
        state["scale"] = scale
        case.fill()
        with backend.replay_session():
            out = backend.replay(engine.ShapeKey(size), None)
        assert torch.equal(out, case.expected(size))
    assert case.runs == runs
    found = sglang.stats()["modes"]["breakable"]
    assert (found["captures"], found["replays"], found["regions"]) == (2, 3, 2)
    assert found["segments"] == 6


def test_eager_part_sees_written_inputs_while_capturing(engine: Any) -> None:
    seen: list[torch.Tensor] = []

    def look(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.clone())
        return hidden.tanh()

    backend, case = sglang.breakable_backend()(runner()), Case(engine.eager(look))
    captured(engine, backend, case, 4)
    assert len(seen) == 3
    assert torch.equal(seen[2], case.x[:4] @ case.weight)


def test_debug_mode_runs_the_whole_step_eagerly(engine: Any) -> None:
    backend, case = sglang.breakable_backend()(runner(), debug_eager=True), Case()
    captured(engine, backend, case, 4)
    runs = case.runs
    case.fill()
    assert torch.equal(backend.replay(engine.ShapeKey(4), None), case.expected(4))
    assert case.runs == runs + 1


@pytest.mark.parametrize("where", ["between", "inside"])
def test_failed_capture_leaves_nothing_and_the_next_works(engine: Any, where: str) -> None:
    broken = [True]

    def fail() -> None:
        if broken[0]:
            raise KeyError("of the model")

    def body(hidden: torch.Tensor) -> torch.Tensor:
        if where == "inside" and sglang._shared().memory.made is not None and len(seen) >= 2:
            fail()
        seen.append(None)
        return hidden.tanh()

    seen: list[None] = []
    marked = engine.eager(body)
    case = Case(marked)
    forward = case.forward(4)

    def run() -> torch.Tensor:
        out = forward()
        if where == "between" and len(seen) >= 3:
            fail()
        return out

    backend = sglang.breakable_backend()(runner())
    with backend.capture_session(None):
        with pytest.raises(KeyError, match="of the model"):
            backend.capture_one(engine.ShapeKey(4), run)
        assert not backend.can_run(None, engine.ShapeKey(4))
        broken[0] = False
        backend.capture_one(engine.ShapeKey(4), run)
    case.fill()
    assert torch.equal(backend.replay(engine.ShapeKey(4), None), case.expected(4))


@pytest.mark.parametrize("kind", ["full_backend", "breakable_backend"])
def test_cleanup_frees_every_graph(engine: Any, kind: str) -> None:
    backend = getattr(sglang, kind)()(runner())
    captured(engine, backend, Case(engine.eager(lambda hidden: hidden + 1)), 8, 4)
    mode = "full" if kind == "full_backend" else "breakable"
    assert sglang.stats()["modes"][mode]["graphs"] == 2
    backend.cleanup()
    assert sglang.stats()["modes"][mode]["graphs"] == 0
    assert not backend.can_run(None, engine.ShapeKey(8))
    with pytest.raises(dg.StateError, match="outside capture_session"):
        backend.capture_one(engine.ShapeKey(8), Case().forward(8))


def test_both_backends_share_graph_memory(engine: Any) -> None:
    full, breakable = sglang.full_backend()(runner()), sglang.breakable_backend()(runner())
    captured(engine, full, Case(), 4)
    captured(engine, breakable, Case(), 4)
    assert full._devgraph_pool is breakable._devgraph_pool


def test_memory_saver_is_refused(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = types.SimpleNamespace(
        create=lambda *args, **kwargs: types.SimpleNamespace(enabled=True)
    )
    full = module("runner_backend.full_cuda_graph_backend")
    monkeypatch.setattr(full, "TorchMemorySaverAdapter", adapter, raising=False)
    place = sys.modules["sglang.srt.utils.torch_memory_saver_adapter"]
    monkeypatch.setattr(place, "TorchMemorySaverAdapter", adapter)
    with pytest.raises(dg.CapabilityError, match="SGLANG_MEMORY_SAVER_CUDA_GRAPH"):
        sglang.full_backend()(runner(), enable_memory_saver=True)


def test_install_puts_both_classes_where_a_phase_chooses_and_back(engine: Any) -> None:
    choice = module("runner_backend.utils")
    before = (choice.FullCudaGraphBackend, choice.BreakableCudaGraphBackend)
    sglang.install()
    sglang.install()
    assert choice.FullCudaGraphBackend is sglang.full_backend()
    assert choice.BreakableCudaGraphBackend is sglang.breakable_backend()
    assert issubclass(choice.FullCudaGraphBackend, before[0])
    assert issubclass(choice.BreakableCudaGraphBackend, before[1])
    sglang.uninstall()
    assert (choice.FullCudaGraphBackend, choice.BreakableCudaGraphBackend) == before
