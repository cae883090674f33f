"""SGLang's backend interface on DeviceGraph: capture, replay, breaks, outputs, clean-up."""

from __future__ import annotations

import dataclasses
import json
import sys
import types
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import devgraph as dg
from devgraph.integrations import sglang
from devgraph.integrations.engine.steps import tensors
from devgraph.integrations.sglang import backends
from devgraph.integrations.sglang.install import SAVER
from tests.support import sglang_standin
from tests.support.sglang_steps import WIDTH, Case, captured, module, runner, sharing


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
    assert case.runs == runs == 5  # two warm-ups of the first, one of the other, two captures
    found = sglang.stats()["modes"]["full"]
    assert (found["captures"], found["replays"], found["graphs"]) == (2, 3, 2)


def test_shapes_share_the_largest_output_buffer_when_asked(engine: Any) -> None:
    backend, case = sglang.full_backend()(runner(), **sharing()), Case()
    captured(engine, backend, case, 8, 4)
    large = backend.replay(engine.ShapeKey(8), None)
    assert torch.equal(large, case.expected(8))
    case.fill()
    small = backend.replay(engine.ShapeKey(4), None)
    assert torch.equal(small, case.expected(4))
    assert small.data_ptr() == large.data_ptr()


def test_output_that_is_no_tensor_comes_back_as_it_is(engine: Any) -> None:
    case = Case()
    backend = sglang.full_backend()(runner(), **sharing())
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
        captured(engine, backend, Case(), 8, 4, hook=lambda calls=calls: calls.append(None))
        assert len(calls) == 3  # two before the first shape of a session
        captured(engine, backend, Case(), 2, hook=lambda calls=calls: calls.append(None))
        assert len(calls) == sglang_standin.Group.barriers == 5


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


@pytest.mark.parametrize("kind", ["full_backend", "breakable_backend"])
def test_shapes_whose_executables_make_room_for_others_replay_all_the_same(
    engine: Any, kind: str
) -> None:
    backends.shared().memory.limits = (0,)
    marked = engine.eager(lambda hidden: hidden.sum(dim=-1, keepdim=True))
    backend, case = getattr(sglang, kind)()(runner()), Case(marked)
    captured(engine, backend, case, 8, 4)
    for size in (4, 8, 8, 4):
        case.fill()
        with backend.replay_session():
            out = backend.replay(engine.ShapeKey(size), None)
        assert torch.equal(out, case.expected(size))
    assert backend._devgraph_pool.recordings.residency().evicted > 0


def test_segments_are_not_launched_while_capturing(engine: Any) -> None:
    # As in SGLang's own: what its marks see in a capture is not defined, and no executable is made.
    seen: list[torch.Tensor] = []

    def look(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(hidden.clone())
        return hidden.tanh()

    backend, case = sglang.breakable_backend()(runner()), Case(engine.eager(look))
    captured(engine, backend, case, 4)
    assert len(seen) == 3
    with backend.replay_session():
        backend.replay(engine.ShapeKey(4), None)
    written = case.x[:4] @ case.weight
    assert [torch.equal(found, written) for found in seen] == [True, True, False, True]


def test_error_of_marked_code_names_its_segment_and_the_next_replay_works(engine: Any) -> None:
    state = {"broken": False}

    def body(hidden: torch.Tensor) -> torch.Tensor:
        if state["broken"]:
            raise KeyError("of the model")
        return hidden + 1

    backend, case = sglang.breakable_backend()(runner()), Case(engine.eager(body))
    captured(engine, backend, case, 4)
    state["broken"] = True
    with pytest.raises(KeyError, match="of the model") as raised:
        backend.replay(engine.ShapeKey(4), None)
    assert raised.value.__notes__ == ["in segment 1 of 3, <eager code of SGLang>"]
    state["broken"] = False
    case.fill()
    assert torch.equal(backend.replay(engine.ShapeKey(4), None), case.expected(4))


def test_marked_code_cannot_replay_graphs_whose_memory_is_in_use(engine: Any) -> None:
    inner: list[int] = []

    def body(hidden: torch.Tensor) -> torch.Tensor:
        for size in inner:
            backend.replay(engine.ShapeKey(size), None)
        return hidden + 1

    backend, case = sglang.breakable_backend()(runner()), Case(engine.eager(body))
    captured(engine, backend, case, 8, 4)
    inner.append(4)
    with pytest.raises(dg.StateError, match="replay a graph of SGLang inside an eager body"):
        backend.replay(engine.ShapeKey(8), None)


def test_marked_code_that_returns_nothing_is_called_without_looking_for_a_result(
    engine: Any,
) -> None:
    frames: list[str] = []

    def body(hidden: torch.Tensor, *, out: torch.Tensor) -> None:
        frames.append(sys._getframe(1).f_code.co_name)
        torch.tanh(hidden, out=out)

    marked = engine.eager(body)

    def attend(hidden: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(hidden)
        marked(hidden, out=out)
        return out

    backend, case = sglang.breakable_backend()(runner()), Case(attend)
    captured(engine, backend, case, 4)
    case.fill()
    out = backend.replay(engine.ShapeKey(4), None)
    assert frames.pop() == "run"  # the loop over the segments
    assert torch.equal(out, case.expected(4))


def test_segments_without_device_work_are_dropped(engine: Any) -> None:
    marked = engine.eager(lambda hidden: hidden * 2)
    backend, case = sglang.breakable_backend()(runner()), Case(lambda x: marked(marked(x)))
    captured(engine, backend, case, 4)
    found = sglang.stats()["modes"]["breakable"]
    assert (found["regions"], found["segments"]) == (2, 4)
    case.fill()
    assert torch.equal(backend.replay(engine.ShapeKey(4), None), case.expected(4))


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
        if (
            where == "inside"
            and backends.shared().memory.backend_in_use is not None
            and len(seen) >= 2
        ):
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


@pytest.fixture
def saver(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's memory saver, which is to pause the memory of graphs."""
    asked = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
    monkeypatch.setattr(sys.modules["sglang.srt.utils"], "get_bool_env_var", asked.__eq__)
    sglang.install()
    return sys.modules[SAVER]._TorchMemorySaverAdapterReal()


@pytest.mark.parametrize("kind", ["full_backend", "breakable_backend"])
def test_memory_saver_takes_the_memory_of_graphs_and_gives_it_again(
    engine: Any, saver: Any, kind: str
) -> None:
    graphs = sys.modules["sglang.srt.constants"].GPU_MEMORY_TYPE_CUDA_GRAPH
    backend = getattr(sglang, kind)()(runner(), enable_memory_saver=True)
    case = Case(engine.eager(lambda hidden: hidden + 1))
    captured(engine, backend, case, 8, 4)
    assert torch.equal(backend.replay(engine.ShapeKey(8), None), case.expected(8))
    saver.pause("weights")
    assert sglang.stats()["pool_bytes"] > 0
    saver.pause(graphs)
    assert sglang.stats()["pool_bytes"] == 0
    with pytest.raises(dg.ExecutableError, match="was released"):
        backend.replay(engine.ShapeKey(4), None)
    saver.resume(graphs)
    for size in (4, 8):
        case.fill()
        assert torch.equal(backend.replay(engine.ShapeKey(size), None), case.expected(size))


def test_memory_saver_leaves_graphs_alone_unless_it_is_to_pause_them(engine: Any) -> None:
    sglang.install()
    backend, case = sglang.full_backend()(runner(), enable_memory_saver=True), Case()
    captured(engine, backend, case, 8)
    sys.modules[SAVER]._TorchMemorySaverAdapterReal().pause(
        sys.modules["sglang.srt.constants"].GPU_MEMORY_TYPE_CUDA_GRAPH
    )
    assert torch.equal(backend.replay(engine.ShapeKey(8), None), case.expected(8))


def test_memory_saver_is_refused_where_memory_cannot_go(
    engine: Any, saver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backends.shared().memory.backend
    lacking = attrs.evolve(backend.capabilities, releasable_memory=False)
    monkeypatch.setattr(backend, "capabilities", lacking)
    with pytest.raises(dg.CapabilityError, match="SGLANG_MEMORY_SAVER_CUDA_GRAPH"):
        sglang.full_backend()(runner(), enable_memory_saver=True)


@dataclasses.dataclass
class StepOutput:
    """What a decode step returns: tensors of different row counts, absent ones, other values."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, torch.Tensor] | None = None
    scale: torch.Tensor | None = None
    note: str = ""


def step_output(case: Case, size: int) -> Any:
    """A step of ``size`` requests of two tokens each, marked code in it."""
    forward = case.forward(2 * size)

    def run() -> StepOutput:
        out = forward()
        return StepOutput(out[::2], (out + 1, out.mean(dim=-1)), out.sum(), f"of {size}")

    return run


@pytest.mark.parametrize("kind", ["full_backend", "breakable_backend"])
def test_outputs_are_trees_of_tensors_in_objects(engine: Any, kind: str) -> None:
    backend, case = getattr(sglang, kind)()(runner()), Case(engine.eager(lambda x: x.tanh()))
    with backend.capture_session(None):
        for size in (4, 2):
            backend.capture_one(engine.ShapeKey(size), step_output(case, size))
    addresses = set()
    for size in (2, 4, 2):
        case.fill()
        out = backend.replay(engine.ShapeKey(size), None)
        expected = step_output(case, size)()
        assert isinstance(out, StepOutput)
        assert (out.note, len(out.logits), len(out.hidden[0])) == (f"of {size}", size, 2 * size)
        for got, wanted in zip(tensors(out), tensors(expected), strict=True):
            torch.testing.assert_close(got, wanted)
        addresses.add(out.hidden[0].data_ptr())
    assert len(addresses) == (1 if kind == "breakable_backend" else 2)


@pytest.mark.parametrize("kind", ["full_backend", "breakable_backend"])
def test_stage_of_a_pipeline_hands_on_its_proxy_tensors(engine: Any, kind: str) -> None:
    proxy = module("forward_batch_info").PPProxyTensors
    backend, case = getattr(sglang, kind)()(runner()), Case()
    forward = case.forward(4)
    with backend.capture_session(None):
        backend.capture_one(
            engine.ShapeKey(4), lambda: proxy({"hidden": forward(), "residual": case.x[:4] + 1})
        )
    case.fill()
    out = backend.replay(engine.ShapeKey(4), None)
    assert isinstance(out, proxy)
    assert torch.equal(out.tensors["hidden"], case.expected(4))
    assert torch.equal(out.tensors["residual"], case.x[:4] + 1)


@pytest.mark.parametrize("kind", ["full_backend", "breakable_backend"])
def test_variants_of_a_size_have_graphs_of_their_own(engine: Any, kind: str) -> None:
    backend, case = getattr(sglang, kind)()(runner()), Case()
    with backend.capture_session(None):
        for label, factor in (("lora", 2), ("nolora", 3)):
            backend.capture_one(
                engine.ShapeKey(4, variant_label=label), lambda factor=factor: case.x[:4] * factor
            )
    case.fill()
    for label, factor in (("nolora", 3), ("lora", 2)):
        out = backend.replay(engine.ShapeKey(4, variant_label=label), None)
        assert torch.equal(out, case.x[:4] * factor)


@pytest.mark.parametrize("kind", ["full_backend", "breakable_backend"])
def test_weights_that_moved_are_read_after_a_recapture(engine: Any, kind: str) -> None:
    backend, case = getattr(sglang, kind)()(runner()), Case()
    captured(engine, backend, case, 4)
    backend.cleanup()
    case.weight = torch.randn(WIDTH, WIDTH)
    captured(engine, backend, case, 4)
    case.fill()
    assert torch.equal(backend.replay(engine.ShapeKey(4), None), case.expected(4))


def test_inputs_that_a_capture_owns_are_kept_until_clean_up(engine: Any) -> None:
    for backend in (sglang.full_backend()(runner()), sglang.breakable_backend()(runner())):
        captured(engine, backend, Case(), 4)
        assert backend._capture_inputs == {engine.ShapeKey(4): "owners"}
        backend.cleanup()
        assert not backend._capture_inputs


def test_debug_mode_of_prefill_is_refused_for_it_would_replay_itself(engine: Any) -> None:
    prefill = runner()
    prefill.layer_model = None  # SGLang's runner of prefill has one, and of decode has not
    with pytest.raises(dg.CapabilityError, match="Add --disable-prefill-cuda-graph"):
        sglang.breakable_backend()(prefill, debug_eager=True)


def test_debug_mode_fills_the_outputs_of_objects(engine: Any) -> None:
    backend, case = sglang.breakable_backend()(runner(), debug_eager=True), Case()
    with backend.capture_session(None):
        backend.capture_one(engine.ShapeKey(4), step_output(case, 4))
    case.fill()
    out = backend.replay(engine.ShapeKey(4), None)
    assert torch.equal(out.logits, step_output(case, 4)().logits)


def test_marked_code_is_led_past_differentiation_where_that_is_off(engine: Any) -> None:
    past: list[bool] = []

    def body(hidden: torch.Tensor) -> torch.Tensor:
        past.append(
            torch._C._dispatch_tls_is_dispatch_key_excluded(
                torch._C.DispatchKey.AutogradFunctionality
            )
        )
        return hidden + 1

    backend, case = sglang.breakable_backend()(runner()), Case(engine.eager(body))
    with torch.inference_mode(False), torch.no_grad():
        captured(engine, backend, case, 8)
        backend.replay(engine.ShapeKey(8), None)
        assert past == [True] * 4  # two warm-ups, the capture and the replay
        expected = case.expected(8)
        assert not past.pop()
    assert torch.equal(backend.replay(engine.ShapeKey(8), None), expected)


def test_runner_says_how_many_rows_of_outputs_count(engine: Any) -> None:
    asked = runner()
    asked.cuda_graph_output_rows = lambda output: 3
    asked.cuda_graph_output_capacity_rows = lambda output: 6
    backend, case = sglang.breakable_backend()(asked), Case()
    captured(engine, backend, case, 4)
    case.fill()
    out = backend.replay(engine.ShapeKey(4), None)
    assert torch.equal(out, case.expected(4)[:3])
    assert out.untyped_storage().nbytes() == 6 * WIDTH * 4


@pytest.mark.parametrize("kind", ["full_backend", "breakable_backend"])
def test_memory_is_measured_carved_and_unborrowed_and_the_profiler_stepped(
    engine: Any, kind: str
) -> None:
    profiled = runner()
    profiled.enable_profile_cuda_graph = True
    profiled._profiler = types.SimpleNamespace(step=lambda: asked.append("step"))
    asked = sglang_standin.Memory.asked
    backend = getattr(sglang, kind)()(profiled)
    if backend._precarve is None:
        pytest.skip("this SGLang neither carves nor borrows graph memory")
    captured(engine, backend, Case(), 4)
    measured = ["measure", "step", "measure", "step"]
    assert asked == [*measured, "retire what is borrowed", "mint", "step"]


def test_graph_memory_is_where_sglang_looks_for_it(engine: Any) -> None:
    backend = sglang.full_backend()(runner())
    captured(engine, backend, Case(), 4)
    assert sglang_standin.Memory.handle is backend._pool
    other = sglang.breakable_backend()(runner())
    captured(engine, other, Case(), 4)
    assert other._devgraph_pool is backend._devgraph_pool
    sglang_standin.Memory.handle = None  # what SGLang does before it captures everything anew
    captured(engine, other, Case(), 4)
    assert other._devgraph_pool is not backend._devgraph_pool


@pytest.mark.parametrize("name", ["stats.json", "stats.prom"])
def test_counters_are_in_a_file_after_captures(
    engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "made" / name
    monkeypatch.setenv("DEVGRAPH_STATS_FILE", str(path))
    backend = sglang.full_backend()(runner())
    captured(engine, backend, Case(), 8, 4)
    text = path.read_text()
    backend.replay(engine.ShapeKey(4), None)
    backends.shared().publisher.write()
    if name.endswith(".json"):
        assert json.loads(text)["modes"]["full"]["captures"] == 2
        assert json.loads(path.read_text())["modes"]["full"]["replays"] == 1
    else:
        labels = '{engine="sglang",backend="cpu",mode="full"}'
        assert f"devgraph_captures_total{labels} 2" in text.splitlines()
        assert f"devgraph_graph_steps_total{labels} 1" in path.read_text().splitlines()
    assert [found.name for found in path.parent.iterdir()] == [name]


def test_file_that_cannot_be_written_is_warned_of_once(
    engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("DEVGRAPH_STATS_FILE", str(tmp_path / "file" / "stats.json"))
    captured(engine, sglang.full_backend()(runner()), Case(), 4)
    captured(engine, sglang.full_backend()(runner()), Case(), 4)
    assert caplog.text.count("cannot be written") == 1
