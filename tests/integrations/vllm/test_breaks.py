"""Attention as regions: prefill in segments with live metadata, on both of vLLM's runners."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.marks.marks import is_capturing
from devgraph.integrations import vllm
from devgraph.integrations.vllm.layer import Layer, current_layer, no_full_collections
from devgraph.integrations.vllm.manager import own_pool
from devgraph.integrations.vllm.wrappers import BreakableStep, step_wrapper
from tests.support.vllm_engine import (
    ENGINES,
    MANAGERS,
    Attention,
    Engine,
    Model,
    engine_of,
    real_attention_op,
)
from tests.support.vllm_engine import rows as rows_of

TOKENS = 4


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with engine_of(request.param, pytest.skip) as found, torch.inference_mode():
        real_attention_op()
        yield found


def needs_kernels_in_capture() -> None:
    if real_attention_op():
        pytest.skip("the CPU reference records vLLM's registered op as one, and would re-run it")


class Setup:
    """A model, its attention layers, static buffers, and what eager computes from them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.model = Model()
        self.layers = {f"layers.{index}": Attention() for index in range(2)}
        self.config = engine.config(static_forward_context=self.layers)
        self.buffers = types.SimpleNamespace(
            input_ids=torch.zeros(TOKENS, dtype=torch.int64),
            positions=torch.zeros(TOKENS),
            is_padding=torch.zeros(TOKENS, dtype=torch.bool),
        )

    def fill(self, count: int = TOKENS) -> dict[str, torch.Tensor]:
        self.buffers.input_ids.copy_(torch.randint(0, 32, (TOKENS,)))
        self.buffers.positions.copy_(torch.rand(TOKENS))
        return self.inputs(count)

    def inputs(self, count: int = TOKENS) -> dict[str, torch.Tensor]:
        return {
            "input_ids": self.buffers.input_ids[:count],
            "positions": self.buffers.positions[:count],
        }

    def eager(self, rows: int, count: int = TOKENS) -> torch.Tensor:
        with self.engine.step(self.config, self.engine.Mode.NONE, None, rows_of(rows)):
            return type(self.model).forward(self.model, **self.inputs(count))


def test_prefill_replays_segments_with_the_metadata_of_each_batch(engine: Engine) -> None:
    setup = Setup(engine)
    step = BreakableStep(setup.model.forward, setup.config)
    mode, descriptor = engine.Mode.PIECEWISE, engine.Descriptor(TOKENS)
    with engine.step(setup.config, mode, descriptor, None):
        step(**setup.inputs())
    for rows in (3, 1, 4, 2):
        setup.fill()
        with engine.step(setup.config, mode, descriptor, rows_of(rows)):
            out = step(**setup.inputs())
        assert torch.equal(out[:rows], setup.eager(rows)[:rows])
    found = vllm.stats()["modes"]["breakable"]
    assert (found["captures"], found["replays"]) == (1, 4)
    assert (found["segments"], found["regions"]) == (5, 2)


def test_capture_runs_attention_without_metadata_and_keeps_nothing_of_it(engine: Engine) -> None:
    setup = Setup(engine)
    step = BreakableStep(setup.model.forward, setup.config)
    mode, descriptor = engine.Mode.PIECEWISE, engine.Descriptor(TOKENS)
    with engine.step(setup.config, mode, descriptor, None):
        step(**setup.inputs())
    assert all(attention.seen == [None, None] for attention in setup.layers.values())
    setup.fill()
    with engine.step(setup.config, mode, descriptor, rows_of(4)):
        step(**setup.inputs())
    assert all(attention.seen == [None, None, rows_of(4)] for attention in setup.layers.values())


def test_whole_step_records_attention_in_one_graph(engine: Engine) -> None:
    needs_kernels_in_capture()
    setup = Setup(engine)
    step = BreakableStep(setup.model.forward, setup.config)
    descriptor = engine.Descriptor(TOKENS, num_reqs=TOKENS, uniform=True)
    setup.fill()
    with engine.step(setup.config, engine.Mode.FULL, descriptor, rows_of(TOKENS)):
        step(**setup.inputs())
        setup.fill()
        out = step(**setup.inputs())
    assert torch.equal(out, setup.eager(TOKENS))
    assert all(len(attention.seen) == 2 for attention in setup.layers.values())  # one is eager's
    found = vllm.stats()["modes"]
    assert (found["full"]["graphs"], found["full"]["segments"]) == (1, 1)
    assert found["breakable"]["captures"] == 0


def test_both_modes_of_one_descriptor_are_kept_apart(engine: Engine) -> None:
    needs_kernels_in_capture()
    setup = Setup(engine)
    step = BreakableStep(setup.model.forward, setup.config)
    descriptor = engine.Descriptor(TOKENS)
    for mode in (engine.Mode.PIECEWISE, engine.Mode.FULL):
        with engine.step(setup.config, mode, descriptor, rows_of(4)):
            step(**setup.inputs())
    setup.fill()
    for mode in (engine.Mode.PIECEWISE, engine.Mode.FULL):
        with engine.step(setup.config, mode, descriptor, rows_of(4)):
            assert torch.equal(step(**setup.inputs()), setup.eager(4))


def test_buckets_replay_right_in_every_order_after_all_are_captured(engine: Engine) -> None:
    setup = Setup(engine)
    step = BreakableStep(setup.model.forward, setup.config)
    mode = engine.Mode.PIECEWISE
    for count in (4, 3, 2):
        with engine.step(setup.config, mode, engine.Descriptor(count), None):
            step(**setup.inputs(count))
    for count in (2, 4, 3, 4, 2, 3):
        setup.fill()
        with engine.step(setup.config, mode, engine.Descriptor(count), rows_of(count)):
            assert torch.equal(step(**setup.inputs(count)), setup.eager(count, count))


@pytest.mark.parametrize("mode", [None, "NONE"])
def test_step_without_a_graph_mode_runs_eagerly(engine: Engine, mode: str | None) -> None:
    setup = Setup(engine)
    step = BreakableStep(setup.model.forward, setup.config)
    setup.fill()
    if mode is None:
        with pytest.raises((AttributeError, AssertionError)):  # attention needs a context
            step(**setup.inputs())
    else:
        with engine.step(setup.config, engine.Mode.NONE, None, rows_of(2)):
            assert torch.equal(step(**setup.inputs())[:2], setup.eager(2)[:2])
    reason = "no_forward_context" if mode is None else "mode_none"
    assert vllm.stats()["modes"]["breakable"]["eager"] == {reason: 1}


def test_moved_input_runs_eagerly_and_is_counted(engine: Engine) -> None:
    setup = Setup(engine)
    step = BreakableStep(setup.model.forward, setup.config)
    mode, descriptor = engine.Mode.PIECEWISE, engine.Descriptor(TOKENS)
    with engine.step(setup.config, mode, descriptor, rows_of(4)):
        step(**setup.inputs())
        setup.fill()
        moved = {name: tensor.clone() for name, tensor in setup.inputs().items()}
        assert torch.equal(step(**moved), setup.eager(4))
    assert vllm.stats()["modes"]["breakable"]["eager"]["input_moved"] == 1


def test_arguments_without_tensors_do_not_keep_a_step_from_its_graph(engine: Engine) -> None:
    setup = Setup(engine)

    def forward(input_ids: torch.Tensor, positions: torch.Tensor, **_: object) -> torch.Tensor:
        return type(setup.model).forward(setup.model, input_ids, positions)

    step = BreakableStep(forward, setup.config)
    mode, descriptor = engine.Mode.PIECEWISE, engine.Descriptor(TOKENS)
    with engine.step(setup.config, mode, descriptor, rows_of(4)):
        step(**setup.inputs())
        # The second runner passes what a model may take at a step and leaves it out at a capture.
        again = dict(reversed(setup.fill().items()))
        assert torch.equal(step(inputs_embeds=None, **again), setup.eager(4))
    assert vllm.stats()["modes"]["breakable"]["replays"] == 1


def test_model_whose_attention_is_no_op_is_refused(engine: Engine) -> None:
    setup = Setup(engine)
    step = BreakableStep(lambda input_ids, positions: positions * 2, setup.config)
    with (
        engine.step(setup.config, engine.Mode.PIECEWISE, engine.Descriptor(TOKENS), None),
        pytest.raises(dg.CaptureError, match=r"2 layers.*'layers.0'.*opaque_attention_op"),
    ):
        step(**setup.inputs())
    assert not step.entries


def test_what_the_engine_marks_as_a_break_runs_anew_at_every_replay(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many models of vLLM mark a method of theirs, and call no op that it lists as attention."""
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")  # vLLM 0.22 marks nothing without
    marks = importlib.import_module("vllm.compilation.breakable_cudagraph")
    setup = Setup(engine)
    active: list[Any] = []

    @marks.eager_break_during_capture
    def attend(layer: str, query: torch.Tensor, out: torch.Tensor) -> None:
        metadata = engine.context.get_forward_context().attn_metadata
        active.append(marks.BreakableCUDAGraphCapture.current())
        out.copy_(query * (0 if metadata is None else metadata.rows))

    def forward(input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        for number in range(2):
            query, out = positions + 1, torch.empty_like(positions)
            attend(f"layers.{number}", query, out)
            positions = out.tanh()
        return positions

    step = BreakableStep(forward, setup.config)
    mode, descriptor = engine.Mode.PIECEWISE, engine.Descriptor(TOKENS)
    # vLLM's own weak references are in its compiled parts.
    for name in ("weak_ref_tensor", "weak_ref_tensors", "_weak_ref_capture_arg"):
        monkeypatch.setattr(marks, name, lambda value: value, raising=False)
    with engine.step(setup.config, mode, descriptor, None):
        step(**setup.inputs())
    assert all(active), "vLLM asks for the capture to keep to one stream"
    assert marks.BreakableCUDAGraphCapture.current() is None
    for rows in (3, 1):
        setup.fill()
        with engine.step(setup.config, mode, descriptor, rows_of(rows)):
            out = step(**setup.inputs())
            assert torch.equal(out, forward(**setup.inputs()))
    found = vllm.stats()["modes"]["breakable"]
    assert (found["captures"], found["replays"], found["segments"]) == (1, 2, 5)


def test_step_for_one_mode_leaves_the_other_to_the_wrapper_around_it(engine: Engine) -> None:
    setup = Setup(engine)
    setup.model.attends = False
    setup.layers.clear()
    inner = step_wrapper()(setup.model, setup.config, runtime_mode=engine.Mode.PIECEWISE)
    outer = engine.Wrapper(inner, setup.config, engine.Mode.FULL)
    assert outer.unwrap() is setup.model
    descriptor = engine.Descriptor(TOKENS)
    for mode in (engine.Mode.FULL, engine.Mode.PIECEWISE):
        with engine.step(setup.config, mode, descriptor, rows_of(4)):
            outer(**setup.inputs())
            setup.fill()
            assert torch.equal(outer(**setup.inputs()), setup.eager(4))
    assert [len(wrapper.concrete_cudagraph_entries) for wrapper in (outer, inner)] == [1, 1]
    found = vllm.stats()["modes"]
    assert (found["full"]["replays"], found["breakable"]["replays"]) == (1, 1)


def test_step_in_segments_is_captured_after_a_piece_of_the_same_step(engine: Engine) -> None:
    """As a draft behind a compiled model."""
    setup = Setup(engine)
    setup.layers.clear()
    positions = setup.buffers.positions
    piece = engine.Wrapper(lambda x: x * 2, setup.config, engine.Mode.PIECEWISE)
    draft = BreakableStep(lambda x: x + 1, setup.config)
    for captures in (True, False):
        step = engine.step(setup.config, engine.Mode.PIECEWISE, engine.Descriptor(TOKENS))
        with current_layer().one_step(), step:
            out = draft(piece(positions))
            if not captures:
                assert torch.equal(out, positions * 2 + 1)
        positions.copy_(torch.rand(TOKENS))


def test_what_else_names_a_step_has_a_graph_of_its_own(engine: Engine) -> None:
    setup = Setup(engine)
    setup.layers.clear()

    def draft(positions: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        return positions * (spec_step_idx % 2 + 1)

    step = BreakableStep(draft, setup.config, None, lambda **inputs: inputs["spec_step_idx"] % 2)
    positions = setup.buffers.positions
    with engine.step(setup.config, engine.Mode.PIECEWISE, engine.Descriptor(TOKENS), None):
        for number in (0, 1):
            step(positions=positions, spec_step_idx=number)
        for number in (2, 3, 2):
            positions.copy_(torch.rand(TOKENS))
            out = step(positions=positions, spec_step_idx=number)
            assert torch.equal(out, draft(positions, number))
    assert len(step.entries) == 2
    assert vllm.stats()["modes"]["breakable"]["replays"] == 3


def test_wrapper_of_the_first_runner_is_one_of_the_engine(engine: Engine) -> None:
    setup = Setup(engine)
    wrapper = step_wrapper()(setup.model, setup.config)
    module = importlib.import_module("vllm.compilation.breakable_cudagraph")
    base = module.BreakableCUDAGraphWrapper
    assert isinstance(wrapper, base)
    assert wrapper in set(base._all_instances)
    assert wrapper.unwrap() is setup.model
    assert wrapper.weights is setup.model.weights
    with engine.step(setup.config, engine.Mode.PIECEWISE, engine.Descriptor(TOKENS), None):
        wrapper(**setup.inputs())
    assert len(wrapper.entries) == 1
    base.clear_all_graphs()
    assert not wrapper.entries


@pytest.fixture(params=MANAGERS)
def second(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """The engine whose second runner's managers are tried, taken over by ``Managed``."""
    for name in ("DEVGRAPH_MODE", "VLLM_USE_BREAKABLE_CUDAGRAPH"):
        monkeypatch.delenv(name, raising=False)
    with engine_of(request.param, pytest.skip) as found, torch.inference_mode():
        real_attention_op()
        yield found
        vllm.uninstall()


class Managed(Setup):
    """The same under a graph manager of the second runner, which captures 4 and 2 tokens."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, *, breakable: bool) -> None:
        super().__init__(engine)
        self.prepared: list[tuple[int, bool]] = []
        self.breakable = breakable
        if real_attention_op():
            # The CPU reference would record the registered op as one, and re-run it at replay.
            self.model.attends = False
            self.layers.clear()
        managers = engine.managers

        def prepare(
            requests: int, tokens: int, *_: Any, full_cudagraph: bool = True, **old: bool
        ) -> Any:
            skipped = old.get("skip_attn", not (full_cudagraph or self.own_breaks))
            self.prepared.append((tokens, skipped))
            return None if skipped else rows_of(tokens), {}

        group = types.SimpleNamespace(is_first_rank=True, is_last_rank=True)
        monkeypatch.setattr(managers, "graph_capture", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(managers, "is_global_first_rank", lambda: False, raising=False)
        monkeypatch.setattr(managers, "get_pp_group", lambda: group)
        monkeypatch.setattr(managers, "current_stream", lambda: None, raising=False)
        monkeypatch.setattr(managers, "has_compiled_submodule", lambda model: True, raising=False)
        platform = engine.platforms.current_platform  # of a machine without a device: no handles
        monkeypatch.setattr(platform, "get_global_graph_pool", lambda: "handle", raising=False)
        monkeypatch.setattr(managers, "prepare_inputs_to_capture", prepare)
        self.own_breaks = breakable and hasattr(managers, "BreakableCUDAGraphWrapper")
        mode = {"decode": "full", "prefill": "breakable" if breakable else "piecewise"}
        assert vllm.install(mode=json.dumps(mode), strict=True)
        cls = engine.v2.ModelCudaGraphManager
        self.manager = cls(self.config, torch.device("cpu"), engine.Mode.FULL_AND_PIECEWISE, 1)

    @property
    def segments(self) -> Any:
        """What captures and replays PIECEWISE."""
        return self.manager.breakable_cg_runner if self.own_breaks else self.model.forward

    def capture(self) -> None:
        state = types.SimpleNamespace(prepare_dummy_inputs=lambda *_: {})
        self.manager.capture(self.model, state, self.buffers, None, None, [], None)

    def dispatch(self, requests: int, tokens: int, uniform: int | None) -> Any:
        names = inspect.signature(self.manager.dispatch).parameters
        loras = {"num_active_loras": 0} if "num_active_loras" in names else {}
        return self.manager.dispatch(requests, tokens, uniform, **loras)

    def run(self, requests: int, tokens: int, rows: int) -> torch.Tensor:
        """One step as the runner runs it: dispatch, then a whole graph or the model."""
        uniform = 1 if requests == tokens else None
        desc = self.dispatch(requests, tokens, uniform)
        if desc.cg_mode == self.engine.Mode.FULL:
            return self.manager.run_fullgraph(desc)
        descriptor = self.engine.Descriptor(desc.num_tokens)
        inputs = self.inputs(desc.num_tokens)
        with self.engine.step(self.config, desc.cg_mode, descriptor, rows_of(rows)):
            if self.own_breaks:
                return self.manager.run_pw_graph(self.model, inputs)
            return self.model(**inputs)


def test_manager_captures_whole_decode_steps_and_replays_them(
    second: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Managed(second, monkeypatch, breakable=False)
    setup.capture()
    for tokens in (4, 2, 4, 1):
        setup.fill()
        padded = 2 if tokens == 1 else tokens
        out = setup.run(tokens, tokens, tokens)
        assert torch.equal(out, setup.eager(padded, padded))
    found = vllm.stats()["modes"]["full"]
    assert (found["captures"], found["graphs"], found["replays"]) == (2, 2, 4)
    # Pieces come first, without attention; whole steps prepare attention for warm-up and capture.
    assert setup.prepared == [(4, True), (2, True), *[(4, False)] * 2, *[(2, False)] * 2]


def test_manager_with_breaks_runs_prefill_in_segments_on_the_same_model(
    second: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Managed(second, monkeypatch, breakable=True)
    setup.capture()
    for requests, tokens in ((1, 4), (1, 3), (2, 4), (1, 2)):
        setup.fill()
        out = setup.run(requests, tokens, tokens)
        padded = 2 if tokens == 2 else 4
        assert torch.equal(out[:tokens], setup.eager(tokens, padded)[:tokens])
    setup.fill()
    assert torch.equal(setup.run(4, 4, 4), setup.eager(4))
    found = vllm.stats()["modes"]
    assert (found["breakable"]["captures"], found["breakable"]["replays"]) == (2, 4)
    assert (found["full"]["captures"], found["full"]["replays"]) == (2, 1)
    assert isinstance(setup.model, Model)  # vLLM asks the model itself for its interfaces


def test_only_the_first_step_of_a_kind_is_run_before_its_capture(
    second: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, runs = Managed(second, monkeypatch, breakable=False), []
    setup.model.register_forward_pre_hook(
        lambda model, args, kwargs: runs.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    setup.capture()
    # Of both sizes in pieces and whole; before these the larger of each.
    assert runs == [4, 4, 2, 4, 4, 2]


def test_every_step_is_run_before_its_capture_where_other_ranks_capture_too(
    second: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, runs = Managed(second, monkeypatch, breakable=False), []
    setup.config.parallel_config.world_size_across_dp = 2
    setup.model.register_forward_pre_hook(
        lambda model, args, kwargs: runs.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    setup.capture()
    assert runs == [4, 4, 2, 2, 4, 4, 2, 2]


def test_step_whose_capture_needs_a_run_is_captured_anew(
    second: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, loaded = Managed(second, monkeypatch, breakable=True), set()

    def load(model: Any, args: Any, kwargs: Any) -> None:
        rows = len(kwargs["input_ids"])
        if is_capturing() and rows not in loaded:
            raise RuntimeError("a kernel cannot be loaded inside a capture")
        loaded.add(rows)

    setup.model.register_forward_pre_hook(load, with_kwargs=True)
    captured = second.counter.num_cudagraph_captured
    setup.capture()
    gc.collect()
    assert second.counter.num_cudagraph_captured - captured == 4
    found = vllm.stats()["modes"]
    assert (found["breakable"]["graphs"], found["full"]["graphs"]) == (2, 2)
    for requests, tokens in ((1, 4), (1, 2), (4, 4), (2, 2)):
        setup.fill()
        assert torch.equal(setup.run(requests, tokens, tokens), setup.eager(tokens, tokens))


def test_profiling_measures_no_graph_of_a_round_that_was_made_anew(
    second: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup, failed = Managed(second, monkeypatch, breakable=False), []
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (0, 0))
    if not hasattr(setup.manager, "_capture_mem_samples"):
        pytest.skip("this vLLM does not profile graphs of its second runner")
    setup.manager._capture_mem_samples = samples = []

    def fail_once(model: Any, args: Any, kwargs: Any) -> None:
        if is_capturing() and len(kwargs["input_ids"]) == 2 and not failed:
            failed.append(len(samples))
            raise RuntimeError("a kernel cannot be loaded inside a capture")

    setup.model.register_forward_pre_hook(fail_once, with_kwargs=True)
    setup.capture()
    assert failed == [1]
    assert len(samples) == len(setup.manager.graphs) == 2


def test_capture_that_fails_after_a_run_raises_and_leaves_no_graph(
    second: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Managed(second, monkeypatch, breakable=True)

    def fail(model: Any, args: Any, kwargs: Any) -> None:
        if is_capturing() and len(kwargs["input_ids"]) == 2:
            raise ValueError("no kernel")

    setup.model.register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(ValueError, match="no kernel"):
        setup.capture()
    gc.collect()
    modes = vllm.stats()["modes"]
    assert (modes["full"]["graphs"], modes["breakable"]["graphs"]) == (0, 0)


def capture_on_the_first_runner(
    second: Engine, monkeypatch: pytest.MonkeyPatch, run: Callable[..., None], *sizes: int
) -> None:
    """Make a round of the V1 runner, PIECEWISE, whose steps ``run`` stands for."""
    Managed(second, monkeypatch, breakable=False)
    cls = second.runner.GPUModelRunner
    monkeypatch.setattr(second.runner, "is_global_first_rank", lambda: False)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    config = second.config()
    config.parallel_config.use_ubatching = False
    runner = types.SimpleNamespace(
        **vars(config),
        vllm_config=config,
        maybe_remove_all_loras=lambda config: None,
        _dummy_run=run,
    )
    runner._warmup_and_capture = types.MethodType(cls._warmup_and_capture, runner)
    descriptors = [second.Descriptor(size) for size in sizes]
    cls._capture_cudagraphs(runner, descriptors, cudagraph_runtime_mode=second.Mode.PIECEWISE)


@pytest.mark.parametrize("needs_run", [False, True])
def test_first_runner_runs_the_first_step_of_a_kind_and_what_fails_without(
    second: Engine, monkeypatch: pytest.MonkeyPatch, needs_run: bool
) -> None:
    runs: list[tuple[int, str]] = []

    def run(tokens: int, cudagraph_runtime_mode: Any, **_: Any) -> None:
        runs.append((tokens, cudagraph_runtime_mode.name))
        if needs_run and (tokens, "NONE") not in runs:
            raise RuntimeError("a kernel cannot be loaded inside a capture")

    capture_on_the_first_runner(second, monkeypatch, run, 4, 2, 1)
    first, again, last = ([(size, "NONE"), (size, "PIECEWISE")] for size in (4, 2, 1))
    anew = [*first, *again] if needs_run else []
    assert runs == [*first, (2, "PIECEWISE"), *anew, *last]


def test_first_runner_replays_a_step_that_was_not_run_and_keeps_memory(
    second: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[tuple[int, str]] = []

    def run(tokens: int, cudagraph_runtime_mode: Any, **_: Any) -> None:
        runs.append((tokens, cudagraph_runtime_mode.name))

    monkeypatch.setattr(Layer, "allocated", lambda layer: sum(run[0] == 16 for run in runs))
    capture_on_the_first_runner(second, monkeypatch, run, 48, 32, 16, 4)
    pieces = [(size, "PIECEWISE") for size in (48, 32, 16, 16)]
    assert runs == [(48, "NONE"), *pieces, (4, "NONE"), (4, "PIECEWISE")]


def test_what_a_step_that_was_not_run_keeps_is_written(
    second: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM keeps tensors by the number of tokens, made when the first layer asks for them."""
    setup = Managed(second, monkeypatch, breakable=True)
    kept: dict[Any, torch.Tensor] = {}
    monkeypatch.setattr(Layer, "allocated", lambda layer: len(kept))

    def scale(model: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        mode = second.context.get_forward_context().cudagraph_runtime_mode.name
        key = len(output), mode
        if key not in kept:
            kept[key] = torch.full((len(output), 1), 3.0)
        return output * kept[key]

    setup.model.register_forward_hook(scale)
    setup.capture()
    assert {size for size, _ in kept} == {4, 2}
    for (size, _), tensor in kept.items():
        assert torch.equal(tensor, torch.full((size, 1), 3.0))


def test_capturing_again_drops_the_segments_of_before(
    second: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Managed(second, monkeypatch, breakable=True)
    setup.capture()
    setup.manager.graphs.clear()
    before = setup.segments
    setup.capture()
    assert setup.segments is before
    found = vllm.stats()["modes"]["breakable"]
    assert (found["captures"], found["graphs"]) == (4, 2)


@pytest.mark.usefixtures("thawed_heap")
def test_capturing_again_leaves_the_heap_that_the_engine_has_frozen(
    second: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Managed(second, monkeypatch, breakable=False)
    setup.capture()
    assert gc.get_freeze_count() == 0
    setup.manager.graphs.clear()
    gc.freeze()  # as vLLM does when an engine has started
    before = gc.get_freeze_count()
    setup.capture()
    assert gc.get_freeze_count() > 0.9 * before > 0


def test_dropped_whole_steps_are_freed_without_a_collection(
    second: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Managed(second, monkeypatch, breakable=False)
    setup.capture()
    graphs = [weakref.ref(made.step.graph) for made in setup.manager.graphs.values()]
    assert {graph().state for graph in graphs} == {"ready"}
    gc.disable()
    try:
        setup.manager.graphs.clear()
        assert {graph() for graph in graphs} == {None}
    finally:
        gc.enable()


def test_captures_defer_full_collections_and_nothing_else(
    second: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Managed(second, monkeypatch, breakable=False)
    prepare = second.managers.prepare_inputs_to_capture
    before, during = gc.get_threshold(), []

    def watching(*args: Any, **options: Any) -> Any:
        during.append(gc.get_threshold())
        return prepare(*args, **options)

    monkeypatch.setattr(second.managers, "prepare_inputs_to_capture", watching)
    setup.capture()
    assert during
    assert all(now[:2] == before[:2] and now[2] > 10**9 for now in during)
    assert gc.get_threshold() == before


def test_manager_counts_why_a_step_has_no_graph(
    second: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Managed(second, monkeypatch, breakable=False)
    setup.dispatch(2, 2, 1)
    setup.capture()
    setup.dispatch(1, 400, None)
    setup.dispatch(4, 4, 1)
    eager = vllm.stats()["modes"]["full"]["eager"]
    assert eager == {"not_captured_yet": 1, "over_largest_size": 1}


def test_whole_steps_share_the_pool_of_pieces_where_the_engine_offloads_graphs(
    second: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(second.managers, "capture_pool"):
        pytest.skip("this vLLM has no pools that sleep")

    @contextlib.contextmanager
    def offloading(pool: Any, config: Any) -> Iterator[str]:
        yield "of vLLM's allocator"

    platform = second.platforms.current_platform
    monkeypatch.setattr(platform, "graph_pool_handle", lambda: "handle", raising=False)
    monkeypatch.setattr(second.managers, "capture_pool", offloading)
    setup = Managed(second, monkeypatch, breakable=True)
    setup.capture()
    whole = {made.step.graph.pool for made in setup.manager.graphs.values()}
    assert whole == {setup.segments._memory()}


def test_released_graphs_are_freed_and_captured_anew(
    second: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Managed(second, monkeypatch, breakable=True)
    if not (setup.own_breaks and hasattr(setup.manager, "release_graphs")):
        pytest.skip("this vLLM cannot release the graphs of a manager")
    setup.capture()
    setup.manager.release_graphs()
    gc.collect()
    modes = vllm.stats()["modes"]
    assert (modes["full"]["graphs"], modes["breakable"]["graphs"]) == (0, 0)
    setup.capture()
    setup.fill()
    assert torch.equal(setup.run(1, 4, 4), setup.eager(4))


def test_graphs_that_the_engine_makes_elsewhere_are_of_devgraph(second: Engine) -> None:
    """As its encoders make them, and its micro-batches."""
    assert vllm.install()
    x, y = torch.randn(4), torch.zeros(4)
    for name in ("encoder_cudagraph", "gpu_ubatch_wrapper"):
        theirs = importlib.import_module(f"vllm.v1.worker.{name}").torch
        graph = theirs.cuda.CUDAGraph()
        with pytest.raises(dg.StateError, match="before its capture"):
            graph.replay()
        with theirs.inference_mode(), theirs.cuda.graph(graph, pool=None, stream=None):
            theirs.mul(x, 3, out=y)
        x.copy_(torch.randn(4))
        graph.replay()
        assert torch.equal(y, x * 3)
    with pytest.raises(ValueError, match="no kernel"), theirs.cuda.graph(theirs.cuda.CUDAGraph()):
        raise ValueError("no kernel")
    found = vllm.stats()["modes"]["full"]
    assert (found["captures"], found["replays"], found["eager"]) == (2, 2, {})


@pytest.mark.parametrize(
    ("module", "given"), [("gpu_ubatch_wrapper", True), ("encoder_cudagraph", False)]
)
def test_only_what_threads_launch_is_recorded_on_the_stream_that_is_current(
    second: Engine, monkeypatch: pytest.MonkeyPatch, module: str, given: bool
) -> None:
    """Threads of the V1 runner's micro-batches launch on the stream of who starts them."""
    assert vllm.install(strict=True)
    stream, backend = types.SimpleNamespace(stream_id=7), current_layer().memory.backend
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda: stream)
    recorded_on = []

    @contextlib.contextmanager
    def side_stream(pool: Any, stream: Any = None) -> Iterator[None]:
        recorded_on.append(stream)
        yield

    monkeypatch.setattr(backend, "side_stream", side_stream)
    theirs = importlib.import_module(f"vllm.v1.worker.{module}").torch
    with theirs.cuda.graph(theirs.cuda.CUDAGraph(), stream=stream, pool=None):
        pass
    assert recorded_on == [stream if given else None]


@pytest.mark.usefixtures("thawed_heap")
def test_no_full_collection_comes_where_they_are_deferred():
    def generations():
        found = []
        note = lambda phase, info: found.append(info["generation"])  # noqa: E731
        gc.callbacks.append(note)
        try:
            kept = [[] for _ in range(20_000)]
        finally:
            gc.callbacks.remove(note)
        assert kept
        return found

    thresholds = gc.get_threshold()
    gc.freeze()
    gc.collect()  # a full collection comes when enough is new beside what the last one left
    gc.set_threshold(10, 2, 2)
    try:
        if 2 not in generations():
            pytest.skip("this Python has no full collections of its own accord")
        with no_full_collections():
            found = generations()
        assert 1 in found
        assert 2 not in found
        assert gc.get_threshold() == (10, 2, 2)
    finally:
        gc.set_threshold(*thresholds)


def test_collectives_know_the_pool_before_a_whole_step_is_captured(second: Engine) -> None:
    """As in vLLM's own capture_pool."""
    seen: list[Any] = []
    name = "vllm.distributed.device_communicators.pynccl_allocator"
    pools = importlib.import_module(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "set_graph_pool_id", seen.append)
        with own_pool("handle", None) as pool:
            assert (pool, seen) == ("handle", ["handle"])


def test_manager_without_whole_steps_captures_its_pieces(
    second: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Managed(second, monkeypatch, breakable=True)
    manager = setup.manager
    del manager.graphs, manager.vllm_config
    manager._capture_descs[second.Mode.FULL] = []
    calls: list[Any] = []

    def create(desc: Any, warmup: bool) -> Any:
        return lambda mode: calls.append((warmup, mode))

    base = next(kind for kind in type(manager).__mro__ if kind.__name__ == "CudaGraphManager")
    base.capture(manager, create)
    modes = second.Mode.NONE, second.Mode.PIECEWISE
    assert [mode for _, mode in calls] == [*modes, *modes]
    assert [warmup for warmup, _ in calls] == [True, not setup.own_breaks] * 2
