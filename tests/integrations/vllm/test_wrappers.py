"""The wrapper that takes the place of vLLM's: its call protocol, its memory, its counters."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.integrations import vllm
from devgraph.integrations.vllm import layer
from devgraph.integrations.vllm.wrappers import BreakableStep
from tests.support.vllm_engine import ENGINES, WIDTH, Engine, Step, engine_of


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with engine_of(request.param, pytest.skip) as found, torch.inference_mode():
        yield found


def wrapped(
    engine: Engine, mode: str = "PIECEWISE", step: Step | None = None, **options: Any
) -> tuple[Any, Step]:
    step = step or Step()
    chosen = engine.cuda_graph.CUDAGraphOptions(**options) if options else None
    wrapper = engine.Wrapper(
        runnable=step,
        vllm_config=engine.config(),
        runtime_mode=engine.Mode[mode],
        cudagraph_options=chosen,
    )
    return wrapper, step


def counts(mode: str = "piecewise") -> dict[str, Any]:
    found: dict[str, Any] = vllm.stats()["modes"][mode]
    return found


def test_call_without_forward_context_runs_the_runnable(engine: Engine) -> None:
    wrapper, step = wrapped(engine)
    x = torch.randn(3, WIDTH)
    assert torch.equal(wrapper(x), (x * 2 + 1).relu())
    assert step.runs == 1
    assert counts()["eager"] == {"no_forward_context": 1}


@pytest.mark.parametrize(("mode", "reason"), [("NONE", "mode_none"), ("FULL", "other_mode")])
def test_call_in_another_mode_runs_the_runnable(engine: Engine, mode: str, reason: str) -> None:
    wrapper, step = wrapped(engine)
    x = torch.randn(3, WIDTH)
    with engine.step(wrapper.vllm_config, engine.Mode[mode], engine.Descriptor(3)):
        for _ in range(2):
            assert torch.equal(wrapper(x), (x * 2 + 1).relu())
    assert step.runs == 2
    assert counts()["eager"] == {reason: 2}
    assert counts()["captures"] == 0


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_second_call_replays_with_what_the_buffers_hold_now(engine: Engine, mode: str) -> None:
    wrapper, step = wrapped(engine, mode)
    x = torch.randn(4, WIDTH)
    captured = engine.counter.num_cudagraph_captured
    with engine.step(wrapper.vllm_config, engine.Mode[mode], engine.Descriptor(4)):
        wrapper(x)
        for _ in range(3):
            x.copy_(torch.randn(4, WIDTH))
            first = wrapper(x)
            assert torch.equal(first, (x * 2 + 1).relu())
            assert wrapper(x) is first
    assert step.runs == 1
    found = counts(mode.lower())
    assert (found["captures"], found["replays"], found["graphs"]) == (1, 6, 1)
    assert engine.counter.num_cudagraph_captured == captured + 1


def test_each_batch_descriptor_has_its_own_graph(engine: Engine) -> None:
    wrapper, step = wrapped(engine, "FULL")
    keys = [
        engine.Descriptor(4),
        engine.Descriptor(4, num_reqs=4, uniform=True),
        engine.Descriptor(4, has_lora=True, num_active_loras=1),
        engine.Descriptor(4, has_lora=True, num_active_loras=2),
        engine.Descriptor(2),
    ]
    buffers = {key: torch.randn(key.num_tokens, WIDTH) for key in keys}
    for number, key in enumerate(keys):
        step.factor = number + 1.0
        with engine.step(wrapper.vllm_config, engine.Mode.FULL, key):
            wrapper(buffers[key])
    for number, key in reversed(list(enumerate(keys))):
        buffers[key].copy_(torch.randn(key.num_tokens, WIDTH))
        with engine.step(wrapper.vllm_config, engine.Mode.FULL, key):
            expected = (buffers[key] * (number + 1.0) + 1).relu()
            assert torch.equal(wrapper(buffers[key]), expected)
    assert step.runs == len(keys)


def test_clear_graphs_frees_them_and_captures_anew(engine: Engine) -> None:
    wrapper, step = wrapped(engine, "FULL")
    x = torch.randn(2, WIDTH)
    with engine.step(wrapper.vllm_config, engine.Mode.FULL, engine.Descriptor(2)):
        wrapper(x)
        (entry,) = wrapper.concrete_cudagraph_entries.values()
        wrapper.clear_graphs()
        assert entry.graph.state == "closed"
        assert counts("full")["graphs"] == 0
        wrapper(x)
        assert torch.equal(wrapper(x), (x * 2 + 1).relu())
    assert step.runs == 2


def test_clear_all_graphs_of_the_engine_class_clears_ours(engine: Engine) -> None:
    first, _ = wrapped(engine, "FULL")
    second, _ = wrapped(engine, "FULL")
    base = engine.cuda_graph.CUDAGraphWrapper
    assert isinstance(first, base)
    assert {first, second} <= set(base._all_instances)
    for wrapper in (first, second):
        with engine.step(wrapper.vllm_config, engine.Mode.FULL, engine.Descriptor(2)):
            wrapper(torch.randn(2, WIDTH))
    base.clear_all_graphs()
    assert not first.concrete_cudagraph_entries
    assert not second.concrete_cudagraph_entries


def test_memory_profiling_uses_its_own_pool_and_gives_it_back(engine: Engine) -> None:
    wrapper, _ = wrapped(engine, "FULL")
    own = wrapper.graph_pool
    memory = layer.current_layer().memory
    x = torch.randn(2, WIDTH)
    with engine.step(wrapper.vllm_config, engine.Mode.FULL, engine.Descriptor(2)):
        wrapper.graph_pool = "profiling"
        wrapper(x)
        (entry,) = wrapper.concrete_cudagraph_entries.values()
        assert entry.graph.pool is memory.pool("profiling")
        wrapper.clear_graphs()
        del entry
        gc.collect()
        assert not list(memory._pools.values())
        wrapper.graph_pool = own
        wrapper(x)
        (entry,) = wrapper.concrete_cudagraph_entries.values()
        assert entry.graph.pool is memory.pool(own)


def test_wrappers_of_one_handle_share_a_pool(engine: Engine) -> None:
    first, _ = wrapped(engine)
    second, _ = wrapped(engine)
    assert first.graph_pool == second.graph_pool
    for wrapper in (first, second):
        with engine.step(wrapper.vllm_config, engine.Mode.PIECEWISE, engine.Descriptor(2)):
            wrapper(torch.randn(2, WIDTH))
    pools = {
        entry.graph.pool
        for wrapper in (first, second)
        for entry in wrapper.concrete_cudagraph_entries.values()
    }
    assert len(pools) == 1


class Entered:
    """Counts the pools for which the backend gets ready to capture, and those left again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools: list[Any] = []
        self.left: list[Any] = []
        backend = layer.current_layer().memory.backend
        real = backend.side_stream

        @contextlib.contextmanager
        def side_stream(pool: Any, stream: Any = None) -> Iterator[None]:
            self.pools.append(pool)
            try:
                with real(pool, stream):
                    yield
            finally:
                self.left.append(pool)

        monkeypatch.setattr(backend, "side_stream", side_stream)


def test_pieces_of_one_step_share_what_is_around_a_capture(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = [wrapped(engine, step=Step(factor=n + 2.0))[0] for n in range(3)]
    config, x = pieces[0].vllm_config, torch.randn(2, WIDTH)
    entered = Entered(monkeypatch)

    def step() -> torch.Tensor:
        out = x
        with engine.step(config, engine.Mode.PIECEWISE, engine.Descriptor(2)):
            for piece in pieces:
                out = piece(out)
        return out

    with layer.current_layer().one_step():
        step()
        assert (len(entered.pools), len(entered.left)) == (1, 0)
    assert len(entered.left) == 1
    for _ in range(2):
        x.copy_(torch.randn(2, WIDTH))
        want = x
        for n in range(3):
            want = (want * (n + 2.0) + 1).relu()
        assert torch.equal(step(), want)
    pieces[0].clear_graphs()
    step()
    assert len(entered.pools) == 2, "outside of such a block each capture gets ready by itself"


def test_pieces_of_another_pool_in_the_same_step_are_captured_there(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = wrapped(engine)
    second, _ = wrapped(engine)
    second.graph_pool = "another"
    entered = Entered(monkeypatch)
    x = torch.randn(2, WIDTH)
    with (
        layer.current_layer().one_step(),
        engine.step(first.vllm_config, engine.Mode.PIECEWISE, engine.Descriptor(2)),
    ):
        second(first(x))
    memory = layer.current_layer().memory
    assert entered.pools == [memory.pool(first.graph_pool), memory.pool("another")]
    assert entered.left == entered.pools


def test_thread_beside_a_step_and_a_capture_inside_a_piece_get_ready_by_themselves(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer, _ = wrapped(engine)
    inner, _ = wrapped(engine)
    pool = layer.current_layer().memory.pool(outer.graph_pool)
    entered = Entered(monkeypatch)
    within = layer.current_layer().within
    seen: list[bool] = []
    with layer.current_layer().one_step():
        thread = threading.Thread(
            target=lambda: seen.append(isinstance(within(pool), contextlib.nullcontext))
        )
        thread.start()
        thread.join()
        assert seen == [False]
        outer.runnable = lambda x: inner(x)
        with (
            engine.step(outer.vllm_config, engine.Mode.PIECEWISE, engine.Descriptor(2)),
            pytest.raises(dg.NestedCaptureError),
        ):
            outer(torch.randn(2, WIDTH))
    assert len(entered.left) == len(entered.pools)


def test_step_of_another_thread_leaves_what_is_held_here(engine: Engine) -> None:
    """Engines may capture on threads of their own."""
    pieces = [wrapped(engine, step=Step(factor=n + 2.0))[0] for n in range(2)]
    layer_here, x = layer.current_layer(), torch.randn(2, WIDTH)

    def elsewhere() -> None:
        with layer_here.one_step():
            layer_here.capture_round(engine.config(), lambda made: None)

    def capture(made: Any) -> None:
        step = engine.step(pieces[0].vllm_config, engine.Mode.PIECEWISE, engine.Descriptor(2))
        with layer_here.one_step(), step:
            out = pieces[0](x)
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            pieces[1](out)
        layer_here.capture_round(engine.config(), lambda inner: None)
        assert layer_here.round is made

    layer_here.capture_round(engine.config(), capture)
    assert layer_here.round is None


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("how", ["clear_graphs", "new entries"])
def test_round_that_fails_after_graphs_were_cleared_raises_what_failed(
    engine: Engine, how: str, again: bool
) -> None:
    wrapper, _ = wrapped(engine)
    x, captured = torch.randn(2, WIDTH), engine.counter.num_cudagraph_captured
    step = (wrapper.vllm_config, engine.Mode.PIECEWISE, engine.Descriptor(2))

    def capture(made: Any) -> None:
        with engine.step(*step):
            wrapper(x)
            if how == "clear_graphs":
                wrapper.clear_graphs()
            else:  # as elastic expert parallelism does
                wrapper.concrete_cudagraph_entries = {}
            if again:
                wrapper(x)
        raise ValueError("no kernel")

    with pytest.raises(ValueError, match="no kernel"):
        layer.current_layer().capture_round(engine.config(), capture)
    assert not wrapper.concrete_cudagraph_entries
    assert engine.counter.num_cudagraph_captured == captured
    with engine.step(*step):
        wrapper(x)
        assert torch.equal(wrapper(x), (x * 2 + 1).relu())


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_graph_mode_without_a_descriptor_is_refused(engine: Engine, mode: str) -> None:
    """One graph would serve batches of every size."""
    whole, step = wrapped(engine, mode)
    for wrapper in (whole, BreakableStep(step, engine.config())):
        with (
            engine.step(wrapper.vllm_config, engine.Mode[mode], None),
            pytest.raises(dg.StateError, match="without a batch descriptor"),
        ):
            wrapper(torch.randn(2, WIDTH))


def test_closed_whole_step_says_so(engine: Engine) -> None:
    wrapper, _ = wrapped(engine, "FULL")
    with engine.step(wrapper.vllm_config, engine.Mode.FULL, engine.Descriptor(2)):
        wrapper(torch.randn(2, WIDTH))
    (entry,) = wrapper.concrete_cudagraph_entries.values()
    entry.replay()
    entry.reset()
    for replay in (entry.replay, entry.launch):
        with pytest.raises(dg.StateError, match="closed"):
            replay()


def test_pool_that_cannot_be_captured_into_leaves_none_held(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = layer.current_layer().memory
    first, second = memory.pool("first"), memory.pool("second")
    entered = Entered(monkeypatch)
    working = memory.backend.side_stream

    def busy(pool: Any, stream: Any = None) -> Any:
        if pool is second:
            raise dg.CaptureBusyError("another thread captures")
        return working(pool, stream)

    monkeypatch.setattr(memory.backend, "side_stream", busy)
    within = layer.current_layer().within
    with layer.current_layer().one_step():
        within(first)
        with pytest.raises(dg.CaptureBusyError):
            within(second)
        assert entered.left == [first]
        within(first)
    assert entered.pools == entered.left == [first, first]


def test_failed_piece_of_a_step_leaves_nothing_open(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, _ = wrapped(engine)

    def fail(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no kernel")

    bad = engine.Wrapper(fail, good.vllm_config, engine.Mode.PIECEWISE)
    x = torch.randn(2, WIDTH)
    step = engine.step(good.vllm_config, engine.Mode.PIECEWISE, engine.Descriptor(2))
    entered = Entered(monkeypatch)
    with pytest.raises(ValueError, match="no kernel"), layer.current_layer().one_step(), step:
        bad(good(x))
    assert len(entered.pools) == len(entered.left) == 1
    assert not bad.concrete_cudagraph_entries
    other, _ = wrapped(engine)
    with engine.step(good.vllm_config, engine.Mode.PIECEWISE, engine.Descriptor(2)):
        other(x)
        assert torch.equal(other(x), (x * 2 + 1).relu())
    assert len(entered.pools) == len(entered.left) == 2


@pytest.mark.parametrize("release", [True, False])
def test_output_memory_is_free_for_the_next_capture_if_weak(engine: Engine, release: bool) -> None:
    wrapper, _ = wrapped(engine, debug_log_enable=False, gc_disable=True, weak_ref_output=release)
    x, y = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    config = wrapper.vllm_config
    with engine.step(config, engine.Mode.PIECEWISE, engine.Descriptor(2)):
        first = wrapper(x)
    with engine.step(config, engine.Mode.PIECEWISE, engine.Descriptor(2, has_lora=True)):
        second = wrapper(y)
    assert (first.data_ptr() == second.data_ptr()) is release


def test_stored_output_does_not_keep_its_memory(engine: Engine) -> None:
    wrapper, _ = wrapped(engine, debug_log_enable=False, gc_disable=True, weak_ref_output=False)
    config, x = wrapper.vllm_config, torch.randn(2, WIDTH)
    with engine.step(config, engine.Mode.PIECEWISE, engine.Descriptor(2)):
        live = wrapper(x)
        address = live.data_ptr()
        del live
        assert wrapper(x).data_ptr() == address
    with engine.step(config, engine.Mode.PIECEWISE, engine.Descriptor(2, has_lora=True)):
        assert wrapper(x).data_ptr() == address


@pytest.mark.parametrize("kind", [list, tuple])
def test_sequences_of_outputs_come_back_as_they_were(engine: Engine, kind: type) -> None:
    step = Step()
    wrapper = engine.Wrapper(lambda x: kind([step(x), x + 3]), engine.config(), engine.Mode.FULL)
    x = torch.randn(2, WIDTH)
    with engine.step(wrapper.vllm_config, engine.Mode.FULL, engine.Descriptor(2)):
        wrapper(x)
        x.copy_(torch.randn(2, WIDTH))
        out = wrapper(x)
    assert type(out) is kind
    assert torch.equal(out[0], (x * 2 + 1).relu())
    assert torch.equal(out[1], x + 3)


@dataclasses.dataclass
class Result:
    rows: torch.Tensor
    left_out: torch.Tensor = dataclasses.field(init=False)


class Named(dict[str, torch.Tensor]):
    @property
    def rows(self) -> torch.Tensor:
        return self["rows"]


@pytest.mark.parametrize("kind", [Result, Named])
@pytest.mark.parametrize("broken", [False, True])
def test_outputs_of_a_class_come_back_as_one_of_it(engine: Engine, kind: Any, broken: bool) -> None:
    config, x = engine.config(), torch.randn(2, WIDTH)
    step = lambda x: kind(rows=x * 2)  # noqa: E731
    mode = engine.Mode.PIECEWISE
    wrapper = BreakableStep(step, config) if broken else engine.Wrapper(step, config, mode)
    with engine.step(config, mode, engine.Descriptor(2)):
        wrapper(x)
        x.copy_(torch.randn(2, WIDTH))
        out = wrapper(x)
    assert type(out) is kind
    assert torch.equal(out.rows, x * 2)


def test_piece_without_device_work_is_replayed_as_nothing(engine: Engine) -> None:
    wrapper = engine.Wrapper(lambda x: x, engine.config(), engine.Mode.PIECEWISE)
    x = torch.randn(2, WIDTH)
    with engine.step(wrapper.vllm_config, engine.Mode.PIECEWISE, engine.Descriptor(2)):
        wrapper(x)
        assert torch.equal(wrapper(x), x)


def test_moved_input_of_a_whole_step_runs_eagerly_and_is_counted(engine: Engine) -> None:
    wrapper, step = wrapped(engine, "FULL")
    x = torch.randn(2, WIDTH)
    with engine.step(wrapper.vllm_config, engine.Mode.FULL, engine.Descriptor(2)):
        wrapper(x)
        other = torch.randn(2, WIDTH)
        assert torch.equal(wrapper(other), (other * 2 + 1).relu())
        assert torch.equal(wrapper(x), (x * 2 + 1).relu())
    assert step.runs == 2
    assert counts("full")["eager"] == {"input_moved": 1}


def test_moved_input_in_a_container_runs_eagerly_and_is_counted(engine: Engine) -> None:
    """As of a stage of a pipeline."""
    wrapper = engine.Wrapper(lambda stage: stage["x"] * 2, engine.config(), engine.Mode.FULL)
    x = torch.randn(2, WIDTH)
    with engine.step(wrapper.vllm_config, engine.Mode.FULL, engine.Descriptor(2)):
        wrapper(stage={"x": x})
        other = torch.randn(2, WIDTH)
        assert torch.equal(wrapper(stage={"x": other}), other * 2)
        x.copy_(other)
        assert torch.equal(wrapper(stage={"x": x}), x * 2)
    assert counts("full")["eager"] == {"input_moved": 1}
    assert counts("full")["replays"] == 1


def test_moved_input_is_refused_under_strict(engine: Engine) -> None:
    layer.reset_layer(layer.Layer(strict=True))
    wrapper, _ = wrapped(engine, "FULL")
    x = torch.randn(2, WIDTH)
    with engine.step(wrapper.vllm_config, engine.Mode.FULL, engine.Descriptor(2)):
        for _ in range(3):
            wrapper(x)
        with pytest.raises(dg.StateError, match="has moved since the capture"):
            wrapper(torch.randn(2, WIDTH))


def test_capture_at_a_forbidden_time_is_refused_by_the_engine(engine: Engine) -> None:
    wrapper, _ = wrapped(engine)
    engine.monitor.set_cudagraph_capturing_enabled(False)
    try:
        with (
            engine.step(wrapper.vllm_config, engine.Mode.PIECEWISE, engine.Descriptor(2)),
            pytest.raises(RuntimeError, match="inappropriate"),
        ):
            wrapper(torch.randn(2, WIDTH))
    finally:
        engine.monitor.set_cudagraph_capturing_enabled(True)
    assert not wrapper.concrete_cudagraph_entries


def test_failed_capture_leaves_nothing_and_the_next_works(engine: Engine) -> None:
    step = Step()
    broken = [True]

    def run(x: torch.Tensor) -> torch.Tensor:
        out = step(x)
        if broken[0]:
            raise KeyError("of the model")
        return out

    wrapper = engine.Wrapper(run, engine.config(), engine.Mode.FULL)
    x = torch.randn(2, WIDTH)
    with engine.step(wrapper.vllm_config, engine.Mode.FULL, engine.Descriptor(2)):
        with pytest.raises(KeyError, match="of the model"):
            wrapper(x)
        assert not wrapper.concrete_cudagraph_entries
        broken[0] = False
        wrapper(x)
        assert torch.equal(wrapper(x), (x * 2 + 1).relu())


def test_nested_whole_step_captures_its_pieces_with_it(engine: Engine) -> None:
    piece, inner = wrapped(engine, "PIECEWISE")
    whole = engine.Wrapper(lambda x: piece(x) * 3, engine.config(), engine.Mode.FULL)
    x = torch.randn(2, WIDTH)
    with engine.step(whole.vllm_config, engine.Mode.FULL, engine.Descriptor(2)):
        whole(x)
        x.copy_(torch.randn(2, WIDTH))
        assert torch.equal(whole(x), (x * 2 + 1).relu() * 3)
    assert inner.runs == 1
    assert not piece.concrete_cudagraph_entries


def test_wrapper_shows_the_runnable_behind_it(engine: Engine) -> None:
    wrapper, step = wrapped(engine)
    assert wrapper.unwrap() is step
    assert wrapper.cudagraph_wrapper is wrapper
    assert wrapper.extra == "own attribute"
    assert not hasattr(wrapper, "no_such_attribute")


def test_wrapper_for_no_mode_is_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match="FULL or PIECEWISE"):
        wrapped(engine, "NONE")


def test_class_is_found_under_the_name_that_platforms_give(engine: Engine) -> None:
    assert vllm.DeviceGraphWrapper is engine.Wrapper
    with pytest.raises(AttributeError, match="DeviceGraphWraper"):
        vllm.DeviceGraphWraper  # noqa: B018


def test_stats_tell_backend_and_memory(engine: Engine) -> None:
    wrapper, _ = wrapped(engine, "FULL")
    assert vllm.stats()["backend"] is None
    with engine.step(wrapper.vllm_config, engine.Mode.FULL, engine.Descriptor(2)):
        wrapper(torch.randn(2, WIDTH))
    found = vllm.stats()
    assert found["backend"] == "cpu"
    assert found["installed"] == []
    assert found["pool_bytes"] > 0
    assert found["modes"]["full"]["capture_seconds"] > 0


def test_device_without_backend_is_a_clear_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(engine.platforms.current_platform), "device_type", "abacus")
    wrapper, _ = wrapped(engine, "FULL")
    with (
        engine.step(wrapper.vllm_config, engine.Mode.FULL, engine.Descriptor(2)),
        pytest.raises(dg.BackendUnavailableError, match="'abacus'.*devgraph doctor"),
    ):
        wrapper(torch.randn(2, WIDTH))
