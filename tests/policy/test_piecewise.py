"""The piecewise policy: split, compiled, captured, equal to eager.

These tests use the backend that is chosen with ``--devgraph-backend``.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import json
import numbers
import os
import re
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook

import devgraph as dg
from devgraph.api.backend import poison
from devgraph.runners import RankGroup
from tests.support.suite import printed_by

pytestmark = pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning")  # Inductor's advice

ROWS, WIDTH = 32, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        cache = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH).sin()
        self.cache = nn.Buffer(cache)

    def forward(self, x, kv_len):
        query = nn.functional.silu(self.first(x))
        out = torch.empty_like(query)
        attend(query, self.cache, out, kv_len=kv_len)
        return double(x + self.second(out)) / 2


@dg.region(host_args=("kv_len",), mutates=("out",))
def attend(query, cache, out, *, kv_len):
    rows = cache[:kv_len]
    out.copy_(torch.softmax(query @ rows.T, -1) @ rows)


@dg.region(fake=torch.empty_like)
def double(x):
    return x * 2


@dg.no_graph(fake=torch.empty_like)
def normalise_on_host(x):
    return x / max(1.0, float(x.abs().max()))


class Bench:
    """Tensors and captures on the backend under test."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.device = backend.device

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device)

    def capture(self, step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        with torch.no_grad():
            return dg.capture(
                step, *args, **{"policy": "piecewise", "backend": self.backend, **options}
            )

    def of_rows(self, step: Callable[..., Any], rows: int, **options: Any) -> Any:
        """Capture a step that takes ``kv_len`` at one size."""
        return self.capture(step, self.randn(rows, WIDTH), host_args={"kv_len": 3}, **options)

    def check(self, capture: Any, step: Callable[..., Any], *, near: bool = False, **host: Any):
        """Replay with new data in the first bound tensor and compare with eager."""
        bound = capture._job.owned.given[0]
        bound.normal_()
        with torch.no_grad():
            expected = step(bound, **host)
        got = capture.replay(**host)
        self.backend.synchronize()
        if near:
            torch.testing.assert_close(got, expected)
        else:
            assert torch.equal(got, expected)


@pytest.fixture
def bench(devgraph_backend):
    if not devgraph_backend.capabilities.piecewise:
        pytest.skip(f"backend {devgraph_backend.name} does not declare piecewise")
    yield Bench(devgraph_backend)
    assert not dg.is_capturing()


@pytest.fixture
def layers(bench):
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(3)).to(bench.device)


@pytest.fixture
def step(layers):
    def run(x, *, kv_len):
        for layer in layers:
            x = layer(x, kv_len)
        return x + 1

    return run


# Results.


def test_replay_equals_eager_in_every_order_after_all_buckets_are_captured(bench, step):
    pool = bench.backend.make_pool()
    buckets = {rows: bench.of_rows(step, rows, pool=pool) for rows in (16, 8, 5)}
    for order in itertools.permutations(buckets):
        for rows in order:
            for kv_len in (1, 3, 17, ROWS):
                bench.check(buckets[rows], step, kv_len=kv_len)


def test_prove_finds_nothing_with_compiler_eager(bench, step):
    with bench.of_rows(step, 6) as capture:
        assert capture.prove(host_args=[{"kv_len": n} for n in (1, 2, 30)]).ok


def test_prove_finds_a_difference_of_the_compiled_step(bench):
    offset = {"now": 1.0}

    def run(x):
        return x + offset["now"]

    with bench.capture(run, bench.randn(4, WIDTH)) as capture:
        assert capture.prove().ok
        offset["now"] = 2.0
        assert "output" in capture.prove().failures[0].where


@pytest.mark.slow
def test_inductor_is_near_eager_for_all_buckets_in_any_order(bench, step):
    pool = bench.backend.make_pool()
    buckets = [bench.of_rows(step, n, compiler="inductor", pool=pool) for n in (16, 8, 5)]
    assert [capture.stats()["compilations"] for capture in buckets] == [1, 0, 0]
    assert buckets[0].stats()["pieces"] == 7
    for order in itertools.permutations(buckets):
        for capture in order:
            bench.check(capture, step, near=True, kv_len=11)


@pytest.mark.slow
def test_proof_under_inductor_is_within_tolerance_and_still_finds_a_difference(bench, layers):
    offset = {"now": 0.0}

    def run(x, *, kv_len):
        for layer in layers:
            x = layer(x, kv_len)
        return x + offset["now"]

    with bench.of_rows(run, 6, compiler="inductor") as capture:
        assert not capture.exact
        report = capture.prove(host_args=[{"kv_len": n} for n in (1, 30)])
        assert report.ok, str(report)
        assert "within tolerance" in str(report)
        offset["now"] = 0.01
        assert not capture.prove().ok
        assert capture.prove(rtol=0, atol=0.1).ok


@pytest.mark.slow
def test_runner_under_inductor_proves_itself(bench, layers):
    with prefiller(bench, layers, compiler="inductor") as runner:
        runner.capture()
        assert runner.stats().updates["compilations"] == 1
        report = runner.prove(host_args=[{"kv_len": 7}])
        assert report.ok, str(report)


@pytest.mark.slow
def test_inductor_pieces_write_inputs_and_return_views(bench):
    state = torch.zeros(4, WIDTH, device=bench.device)

    def run(x):
        state.add_(x)
        pair = torch.cat([x, state])
        head = pair[:4]
        double(head)
        head.mul_(3)
        return pair, x.view(-1)

    x = bench.randn(4, WIDTH)
    capture = bench.capture(run, x, compiler="inductor")
    state.zero_()
    x.normal_()
    pair, flat = capture.replay()
    torch.testing.assert_close(pair, torch.cat([x * 3, x]))
    assert torch.equal(flat, x.view(-1))
    assert torch.equal(state, x)


@pytest.mark.slow
def test_equal_outputs_of_an_inductor_piece_are_written_apart(bench):
    @dg.region(mutates=("a", "b"))
    def write(x, a, b):
        a.add_(x)
        b.sub_(x)

    def run(x):
        a, b = torch.zeros_like(x), torch.zeros_like(x)
        write(x, a, b)
        return a * 2 + b

    x = bench.randn(4, WIDTH)
    bench.check(bench.capture(run, x, compiler="inductor"), run, near=True)


def test_program_of_torch_jit_is_refused() -> None:
    module = torch.jit.script(nn.Linear(3, 3))
    with pytest.raises(dg.CaptureError, match=r"does not accept torch\.jit programs"):
        dg.capture(module, torch.ones(2, 3), policy="piecewise", compiler="eager", backend="cpu")


def test_recapture_does_not_use_code_of_the_state_before() -> None:
    high: dict[str, float] = {}
    scales = collections.ChainMap(high, {"a": 2.0})
    x = torch.randn(3)
    captured = dg.capture(lambda x: x * scales["a"], x, backend="cpu", policy="piecewise")
    high["a"] = 3.0
    with pytest.warns(dg.DeviceGraphWarning, match="captured the step again"):
        assert torch.equal(captured.replay(), x * 3)


def test_capture_leaves_the_input_as_it_was(bench, step):
    x = bench.randn(4, WIDTH)
    before = x.clone()
    bench.capture(step, x, host_args={"kv_len": 3})
    assert torch.equal(x, before)


def test_no_graph_function_and_graph_break_cut_the_step(bench):
    def run(x):
        y = normalise_on_host(x + 1)
        dg.graph_break()
        return y * 2

    x = bench.randn(4, WIDTH)
    capture = bench.capture(run, x)
    assert len(capture.segments) == 3
    x.normal_().mul_(100)
    assert torch.equal(capture.replay(), run(x))


def test_steps_over_two_regions_of_one_code_are_told_apart(bench):
    def over(factor):
        @dg.region(fake=torch.empty_like)
        def scale(x):
            return x * factor

        def run(x):
            return scale(x + 1) + 1

        return run

    x = bench.randn(4, WIDTH)
    for run in (over(2), over(3)):
        bench.check(bench.capture(run, x), run)


class Stepper(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return {"y": self.layer(double(x)), "n": 3}

    def bound(self, x):
        return self(x)["y"]


@pytest.mark.parametrize("kind", ["module", "method", "function of a module", "region"])
def test_callable_of_any_kind_is_captured_as_the_one_that_was_given(bench, kind):
    module = Stepper().to(bench.device)
    step = {
        "module": module,
        "method": module.bound,
        "function of a module": lambda x: [module(x)["y"], 7],
        "region": double,
    }[kind]
    x = bench.randn(4, WIDTH)
    capture = bench.capture(step, x)
    x.normal_()
    with torch.no_grad():
        expected = step(x)
    got = capture.replay()
    bench.backend.synchronize()
    assert type(got) is type(expected)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


# One compilation.


def test_one_compilation_serves_all_sizes_and_equal_layers_share_code(bench, step):
    torch._dynamo.reset()
    # The first size equals the width: two sizes that agree by chance are still two sizes.
    first = bench.of_rows(step, WIDTH)
    assert first.stats() == {"pieces": 7, "pieces_compiled": 4, "compilations": 1}
    for rows in (16, 5, 24, 2, 4096):
        again = bench.of_rows(step, rows)
        assert again.stats()["compilations"] == 0
        assert again.stats()["pieces"] == 7
        assert "compile" not in again.phases
    assert "pieces_compiled: 4" in first.explain()


@dg.region()
def halves(x, *, turned):
    return (x.t() if turned else x + 0), [None, x * 2]


def twice_from_tuples(x):
    for turned in (False, True):
        half, (_, other) = halves(x, turned=turned)
        x = (half * 2 + other).sin()
    return x


def test_pieces_share_no_code_where_marks_return_tuples_of_other_layouts(bench):
    capture = bench.capture(twice_from_tuples, bench.randn(WIDTH, WIDTH))
    bench.check(capture, twice_from_tuples)
    assert (capture.stats()["pieces"], capture.stats()["pieces_compiled"]) == (2, 2)


@pytest.mark.slow
def test_inductor_compiles_what_takes_tuples_of_marks(bench):
    capture = bench.capture(twice_from_tuples, bench.randn(WIDTH, WIDTH), compiler="inductor")
    bench.check(capture, twice_from_tuples, near=True)


def test_many_models_are_compiled_by_one_process(bench):
    torch._dynamo.reset()
    for number in range(12):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(1 + number % 3)))
        model.to(bench.device)

        def run(x, model=model):
            return double(model(x))

        bench.check(bench.capture(run, bench.randn(4, WIDTH)), run)


def test_phases_are_timed_apart_and_reported(bench, step):
    torch._dynamo.reset()
    capture = bench.of_rows(step, 16)
    phases = capture.phases
    assert list(phases) == ["activate", "compile", "warm-up", "capture"]
    assert all(seconds > 0 for seconds in phases.values())
    assert phases["compile"] > phases["activate"]
    assert sum(phases.values()) <= capture.capture_seconds
    assert re.search(r"phases: activate [\d.]+ s, compile [\d.]+ s, warm-up", capture.explain())


CACHED = """
import sys, torch, devgraph as dg
from tests.policy.test_piecewise import Layer, WIDTH
backend = dg.get_backend({backend!r})
torch.manual_seed(0)
layer = Layer().to(backend.device)
with torch.no_grad():
    x = torch.randn(4, WIDTH, device=backend.device)
    capture = dg.capture(lambda x, kv_len: layer(x, kv_len), x, policy="piecewise",
                         backend=backend, host_args={{"kv_len": 3}}, compiler="inductor")
from torch._dynamo.utils import counters
hits = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]
print(hits, capture.stats()["pieces_compiled"])
"""


@pytest.mark.slow
def test_compiled_code_is_kept_between_processes(bench, tmp_path):
    root = Path(__file__).parents[2]
    code = CACHED.format(backend=bench.backend.name)
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    found = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        found.append([int(word) for word in done.stdout.split()])
    cold, warm = found
    assert cold[0] == 0
    assert warm[0] >= warm[1] == cold[1] > 0


# Lifetimes.


def test_replay_is_right_after_the_tracer_forgot_the_code(bench, step):
    capture = bench.of_rows(step, 6)
    torch._dynamo.reset()
    gc.collect()
    for kv_len in (2, 20):
        bench.check(capture, step, kv_len=kv_len)


@pytest.mark.slow
def test_inductor_replay_is_right_after_the_tracer_forgot_the_code(bench, step):
    capture = bench.of_rows(step, 6, compiler="inductor")
    torch._dynamo.reset()
    gc.collect()
    bench.check(capture, step, near=True, kv_len=20)


def test_tensor_that_only_the_capture_reads_lives_as_long_as_it(bench):
    holder = [bench.randn(4, WIDTH)]
    alive = weakref.ref(holder[0])

    def run(x):
        return double(x + holder[0]) + holder[0]

    x = bench.randn(4, WIDTH)
    kept = holder[0].clone()
    capture = bench.capture(run, x, recaptures=0)
    holder[0] = torch.zeros(1, 1, device=bench.device)
    gc.collect()
    for _ in range(8):
        poison(bench.randn(4, WIDTH))
    with pytest.raises(dg.StateError, match="no longer the captured tensor"):
        capture.replay()
    capture.run({})
    assert torch.equal(capture.outputs, (x + kept) * 2 + kept)
    assert alive() is not None
    capture.close()
    del capture
    gc.collect()
    assert alive() is None


# Tensors by closure.


def with_marked_module(linear, state):
    return dg.region(linear)


def with_parameters_by_closure(linear, state):
    @dg.region
    def body(x):
        return nn.functional.linear(x, linear.weight, state) * 2

    return body


def with_fake_over_parameters(linear, state):
    @dg.region(fake=lambda x: linear(x))
    def body(x):
        return linear(x) + state

    return body


def with_state_returned(linear, state):
    @dg.region
    def body(x):
        return state.copy_(linear(x).sum(0))

    return body


CLOSURES = [
    with_marked_module,
    with_parameters_by_closure,
    with_fake_over_parameters,
    with_state_returned,
]


@pytest.mark.parametrize(
    ("compiler", "make"),
    [
        *(("eager", make) for make in CLOSURES),
        ("inductor", with_marked_module),
        *(pytest.param("inductor", make, marks=pytest.mark.slow) for make in CLOSURES[1:]),
    ],
)
def test_region_over_tensors_by_closure_needs_no_fake_and_equals_eager(bench, make, compiler):
    torch._dynamo.reset()
    linear = nn.Linear(WIDTH, WIDTH).to(bench.device)
    marked = make(linear, bench.randn(WIDTH))

    def run(x):
        return marked(torch.sin(x)) * 3

    for rows in (4, 6):
        with bench.capture(run, bench.randn(rows, WIDTH), compiler=compiler) as capture:
            bench.check(capture, run, near=compiler == "inductor")
            with torch.no_grad():
                linear.weight.normal_()
            bench.check(capture, run, near=compiler == "inductor")


def test_tracing_a_region_leaves_what_it_writes_by_closure_alone(bench):
    torch._dynamo.reset()
    state = torch.zeros(WIDTH, device=bench.device)
    runs = []

    @dg.region
    def body(x):
        if not isinstance(x, FakeTensor):
            runs.append(1)
        state.add_(1)
        return x + state

    def run(x):
        return body(x + 1) * 2

    with bench.capture(run, bench.randn(4, WIDTH)) as capture:
        capture.replay()
    assert runs
    assert torch.equal(state, torch.ones_like(state)), "one replay; a capture puts its writes back"


@pytest.mark.parametrize("policy", ["breakable", "piecewise"])
def test_marked_function_of_torch_runs_between_graphs(bench, policy):
    silu = dg.region(nn.functional.silu)

    def run(x):
        return silu(x + 1) * 2

    with bench.capture(run, bench.randn(4, WIDTH), policy=policy) as capture:
        bench.check(capture, run)
        assert [repr(s) for s in capture.segments][1:2] == ["<eager silu>"]


# Modes.


def all_inference(x):
    return normalise_on_host(double(torch.sin(x)) + 1) * 2


def inference_inside(x):
    x = x.cos()
    with torch.inference_mode():
        y = double(x + 1)
        with torch.autocast(x.device.type, dtype=torch.bfloat16), torch.no_grad():
            y = double(y @ y.T).float()
        with torch.inference_mode():
            y = normalise_on_host(y.sin())
        y = y - 1
    z = double(y)
    with torch.no_grad(), torch.inference_mode():
        z = double(z)
    return z + y


@pytest.mark.parametrize("run", [torch.inference_mode()(all_inference), inference_inside])
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_inference_mode_around_marks_replays_as_eager_at_every_size(bench, run, compiler):
    for rows in (6, 4):
        with bench.capture(run, bench.randn(rows, WIDTH), compiler=compiler) as capture:
            bench.check(capture, run, near=compiler == "inductor")
            if compiler == "eager":
                assert capture.replay().is_inference() == (run is not inference_inside)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("grad", [True, False])
def test_mark_sees_the_modes_of_its_call_also_in_a_piecewise_capture(bench, compiler, grad):
    seen = []
    device = bench.randn(1, 1).device.type

    def modes():
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), autocast

    @dg.no_graph(fake=torch.empty_like)
    def look(x):
        seen.append(modes())
        return x * 2

    half, bfloat = (torch.autocast(device, dtype) for dtype in (torch.float16, torch.bfloat16))

    def run(x):
        x = look(x + 1)
        with torch.inference_mode():
            x = look(look(x - 1) + 1)
            with bfloat, torch.enable_grad():
                x = look(x + 1)
                with torch.inference_mode(False), half:
                    x = look(x + 1)
                x = look(x + 1)
        x = look(x + 1) * 3
        with bfloat:
            x = look(x)
            with torch.no_grad(), torch.inference_mode():
                x = look(x + 1)
            x = look(x + 1)
        return look(x + 1) * 3

    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        before = modes()
        x = bench.randn(4, WIDTH)
        expected = run(x)
        wanted = seen.copy()
        options = {"policy": "piecewise", "backend": bench.backend, "compiler": compiler}
        with dg.capture(run, x, **options) as capture:
            assert modes() == before
            seen.clear()
            capture.replay()
            assert modes() == before
            assert seen == wanted
            assert torch.allclose(capture.outputs, expected)


def autocast(device):
    return torch.autocast(device, torch.float16, cache_enabled=False)


MODES = {
    "inference_mode": lambda device: torch.inference_mode(),
    "no_grad": lambda device: torch.no_grad(),
    "autocast": autocast,
}


def assert_no_mode_is_open(device):
    # Blocks that are open by torch's count: while there are any, it keeps weights that it has cast.
    assert (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()) == (1, 0)
    assert not torch.is_autocast_enabled(device) and torch.is_autocast_cache_enabled()
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("raises_at", [1, 2, 3, 4])  # warm-up, check, warm-up, capture
def test_modes_are_those_of_before_when_a_mark_raises_inside_a_block(bench, mode, raises_at):
    torch._dynamo.reset()
    runs = []
    x = bench.randn(4, WIDTH)
    enter = functools.partial(MODES[mode], x.device.type)

    @dg.no_graph(fake=torch.empty_like)
    def body(x):
        runs.append(1)
        if len(runs) == raises_at:
            raise KeyError("of the mark")
        return x * 2

    def run(x):
        with enter(), enter():
            x = body(x + 1)
        return x * 3

    with pytest.raises(KeyError, match="of the mark") as caught:
        dg.capture(run, x, policy="piecewise", backend=bench.backend)
    assert caught.value.__traceback__ is not None  # It holds the frames, and what they hold.
    assert_no_mode_is_open(x.device.type)


@pytest.mark.parametrize("mode", MODES)
def test_modes_are_those_of_before_when_a_compiler_fails_inside_a_block(mode, monkeypatch):
    compiled = []

    class Compiler(torch.fx.Interpreter):
        """Goes through a piece, as compilers do, and does not know one operation."""

        def call_method(self, target, args, kwargs):
            if target != "sin":
                return super().call_method(target, args, kwargs)
            assert not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
            compiled.append(target)
            raise NotImplementedError("sin")

    def compile_piece(piece, examples, **_):
        return Compiler(piece).run(*examples)

    monkeypatch.setattr("devgraph.api.policy.piecewise.compile_fx", compile_piece)
    enter = MODES[mode]

    def run(x):
        with enter("cpu"), enter("cpu"):
            return (x + 1).sin()

    x = torch.randn(4, WIDTH)
    with pytest.raises(dg.CaptureError, match="sin"):
        dg.capture(run, x, policy="piecewise", backend="cpu", compiler="inductor")
    assert compiled == ["sin"]
    assert_no_mode_is_open("cpu")


# Refusals.


@pytest.mark.parametrize(
    "consume",
    [
        lambda x, n: x[:n],
        lambda x, n: x * n,
        lambda x, n: x + (n // 2),
        lambda x, n: torch.zeros_like(x) + min(n, 4096),
        lambda x, n: x + 1 if n > 2 else x,
        lambda x, n: x + len(range(n)),
    ],
    ids=["index", "multiply", "derive", "min", "branch", "range"],
)
def test_host_argument_consumed_outside_a_region_is_refused_with_its_line(bench, consume):
    def run(x, *, kv_len):
        return consume(x, kv_len)

    with pytest.raises(dg.FrozenValueError, match=re.escape(Path(__file__).name)):
        bench.of_rows(run, 4)


def test_derived_value_given_to_a_region_is_refused(bench, layers):
    def run(x, *, kv_len):
        out = torch.empty_like(x)
        attend(x, layers[0].cache, out, kv_len=kv_len // 2)
        return out

    with pytest.raises(dg.FrozenValueError, match="derive"):
        bench.of_rows(run, 4)


def test_untraceable_line_outside_a_mark_is_named_with_the_fix(bench):
    def run(x, *, kv_len):
        if x.sum() > 0:  # the line
            return x + 1
        return x - 1

    with pytest.raises(dg.CaptureError) as caught:
        bench.of_rows(run, 4)
    message = str(caught.value)
    assert re.search(r"test_piecewise\.py:\d+ in run: if x\.sum\(\) > 0:  # the line", message)
    assert "@dg.region" in message
    assert "breakable" in message
    assert "\n" not in message


def test_exception_of_the_step_is_raised_unchanged(bench):
    raised = ValueError("from the step")

    def run(x):
        if x.shape[0] == 4:
            raise raised
        return x

    with pytest.raises(ValueError, match="from the step") as caught:
        bench.capture(run, bench.randn(4, WIDTH))
    assert caught.value is raised


def test_failed_compilation_leaves_nothing_and_the_next_capture_works(bench, step):
    def broken(x, *, kv_len):
        print(x.sum().item())
        return x

    with pytest.raises(dg.CaptureError):
        bench.of_rows(broken, 4)
    with bench.of_rows(step, 4) as capture:
        assert capture.prove().ok


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_failed_compilation_names_another_compiler_only_where_there_is_one(
    bench, step, monkeypatch, compiler
):
    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("no split")

    torch._dynamo.reset()
    monkeypatch.setattr("devgraph.api.policy.piecewise.split_module", fail)
    with pytest.raises(dg.CaptureError, match="no split") as caught:
        bench.of_rows(step, 4, compiler=compiler)
    assert ("compiler='eager'" in str(caught.value)) == (compiler == "inductor")
    assert "policy='breakable'" in str(caught.value)


WRONG = {
    "shape": lambda x: torch.empty_like(x)[:1],
    "dtype": lambda x: torch.empty_like(x, dtype=torch.float16),
    "stride": lambda x: torch.empty_like(x).t(),
    "structure": lambda x: (torch.empty_like(x),),
}


def test_step_is_checked_once_for_each_compilation(bench):
    torch._dynamo.reset()
    eager = []

    @dg.region(fake=torch.empty_like)
    def body(x):
        eager.append(1)
        return x * 2

    def run(x):
        return body(x + 1)

    for rows, runs in ((8, 3 + 1 + 1), (4, 3 + 1)):  # warm-up, check, capture
        eager.clear()
        bench.capture(run, bench.randn(rows, WIDTH), warmup=3)
        assert len(eager) == runs


@pytest.mark.parametrize("name", WRONG)
def test_fake_that_claims_another_layout_is_refused(bench, name):
    @dg.region(fake=WRONG[name])
    def body(x):
        return x * 2

    def run(x):
        result = body(x)
        return result[0] if isinstance(result, tuple) else result + 1

    with pytest.raises(dg.RegionError, match=r"body returned .* fake="):
        bench.capture(run, bench.randn(WIDTH, WIDTH))


def test_result_of_a_mark_that_only_claims_to_mutate_is_refused(bench):
    @dg.region(mutates=("x",))
    def body(x):
        return x.mul_(2)

    def run(x):
        y = x + 1
        body(y)
        return y * 3

    with pytest.raises(dg.RegionError, match="fake="):
        bench.capture(run, bench.randn(4, WIDTH))


def test_numbers_and_bools_among_the_results_of_a_mark_reach_the_step(bench):
    @dg.region
    def body(x):
        return x + 1, [x * 2, None], 3, 1.5, True

    def run(x):
        more, (twice, nothing), whole, part, flag = body(x - 1)
        assert nothing is None
        return more * whole + twice * part if flag else x

    with bench.capture(run, bench.randn(4, WIDTH)) as capture:
        bench.check(capture, run)


RETURNED = {
    "text": (lambda x: (x + 1, "a"), r"a str as element \[1\] of its result\."),
    "rows": (
        lambda x: (x, [x, x.shape[0]]),
        r"a number that depends on a size as element \[1\]\[1\]",
    ),
    "dtype": (lambda x: [x, x.dtype], r"a dtype as element \[1\] of its result\."),
    "shape": (lambda x: (x.shape, x), r"a Size as element \[0\] of its result\."),
    "dict": (lambda x: (x, {"a": x}), r"a dict as element \[1\] of its result\."),
    "number": (lambda x: 3, r"a int\."),
    "size": (lambda x: x.numel(), r"a number that depends on a size\."),
}


@pytest.mark.parametrize("name", RETURNED)
def test_result_that_no_trace_holds_is_refused_and_its_element_named(bench, name):
    body, said = RETURNED[name]
    body.__qualname__ = "body"
    marked = dg.region(body)
    with pytest.raises(dg.CaptureError, match=f"^body returned {said}"):
        bench.capture(lambda x: (marked(x - 1), x + 1), bench.randn(4, WIDTH))


def test_write_that_the_mark_does_not_tell_of_is_refused(bench):
    @dg.region(mutates=("out",))
    def body(x, out, state):
        out.copy_(x)
        state.add_(1)

    state = torch.zeros(WIDTH, device=bench.device)

    def run(x):
        out = torch.empty_like(x)
        body(x, out, state)
        return out + 1

    with pytest.raises(dg.RegionError, match=r"body wrote its argument 'state'.*writes to out"):
        bench.capture(run, bench.randn(4, WIDTH))


def test_region_that_cannot_run_without_data_asks_for_fake(bench):
    @dg.region()
    def body(x):
        return x * float(x.sum())

    with pytest.raises(dg.CaptureError, match=r"body .*fake="):
        bench.capture(lambda x: body(x) + 1, bench.randn(4, WIDTH))


def test_fake_that_does_not_take_the_host_argument_is_refused_with_the_name_of_the_mark(bench):
    @dg.region(host_args="kv_len", fake=torch.empty_like)
    def body(x, *, kv_len):
        return x * kv_len

    def run(x, *, kv_len):
        return body(x + 1, kv_len=kv_len)

    with pytest.raises(dg.CaptureError, match=r"body .* raised TypeError: .*\(kv_len\)"):
        bench.of_rows(run, 4)


def test_step_without_tensor_work_is_refused(bench):
    with pytest.raises(dg.EmptyCaptureError):
        bench.capture(lambda: None)


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


ALREADY = {
    "function": lambda module: torch.compile(lambda x: module(x), backend="eager"),
    "module": lambda module: torch.compile(module, backend="eager"),
    "method": lambda module: torch.compile(module, backend="eager").forward,
    "in place": compiled_in_place,
}


@pytest.mark.parametrize("kind", ALREADY)
def test_step_that_is_compiled_already_is_refused_with_what_to_pass(bench, kind):
    class Doubling(nn.Module):
        def forward(self, x):
            return double(torch.sin(x)) + 1

    module = Doubling()
    x = bench.randn(4, WIDTH)
    with pytest.raises(dg.CaptureError, match=r"already compiled.* function or module itself"):
        bench.capture(ALREADY[kind](module), x)
    if kind != "in place":
        with bench.capture(module, x) as capture:
            bench.check(capture, module)


def test_disabled_tracer_is_named(bench, step, monkeypatch):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(dg.CaptureError, match="TORCHDYNAMO_DISABLE"):
        bench.of_rows(step, 4)


def test_unknown_compiler_is_refused_with_the_nearest(bench):
    with pytest.raises(dg.InputError, match="inductor"):
        bench.of_rows(lambda x, *, kv_len: x + 1, 4, compiler="inducter")


def test_backend_without_piecewise_refuses_it(bench, step):
    backend = type(bench.backend)()
    backend.capabilities = attrs.evolve(backend.capabilities, piecewise=False)
    with pytest.raises(dg.CapabilityError, match="piecewise"):
        bench.of_rows(step, 4, backend=backend)


# Runners.


def prefiller(bench, layers, **config):
    def forward(batch):
        x = batch.x
        for layer in layers:
            x = layer(x, batch.host.kv_len)
        return x

    return dg.PrefillRunner(
        forward,
        inputs=[dg.InputSlot("x", ("tokens", WIDTH), torch.float32, pad=dg.Pad.zero())],
        hidden=dg.OutputSlot(rows="tokens"),
        host_args={"kv_len": 1},
        config=dg.PhaseConfig(policy="piecewise", buckets=(4, 8, 16), **config),
        backend=bench.backend,
        max_tokens=16,
        max_requests=4,
        progress=False,
    )


def test_runner_serves_all_buckets_from_one_compilation(bench, layers):
    torch._dynamo.reset()
    runner = prefiller(bench, layers)
    runner.capture()
    stats = runner.stats()
    assert stats.updates["compilations"] == 1
    assert stats.updates["pieces"] == 3 * 7
    assert set(stats.phase_seconds) == {"activate", "compile", "warm-up", "capture"}
    assert stats.phase_seconds["compile"] > 0
    for tokens, kv_len in ((3, 5), (16, 9), (7, 32), (8, 1)):
        x = bench.randn(tokens, WIDTH)
        out = runner.run({"x": x}, host_args={"kv_len": kv_len})
        expected = x
        with torch.no_grad():
            for layer in layers:
                expected = layer(expected, kv_len)
        torch.testing.assert_close(out, expected)
    assert runner.stats().graph_steps == 4
    assert not runner.stats().eager
    assert "compilations: 1" in runner.explain()
    assert runner.prove(host_args=[{"kv_len": 7}]).ok
    runner.close()


def test_runner_captures_again_without_compiling_again(bench, layers):
    runner = prefiller(bench, layers)
    runner.capture()
    runner.invalidate("weights")
    runner.capture()
    assert runner.stats().updates["compilations"] == 0
    assert "compile" not in runner.stats().phase_seconds
    assert runner.prove(host_args=[{"kv_len": 7}]).ok
    runner.close()


def test_ranks_capture_the_same_pieces_in_lockstep(bench):
    if bench.backend.name != "cpu":
        pytest.skip("two ranks on one device")
    store = torch.distributed.HashStore()
    results: dict[int, Any] = {}

    def work(rank):
        def forward(batch):
            return double(batch.x + 1) + 1

        runner = dg.DecodeRunner(
            forward,
            inputs=[dg.InputSlot("x", ("tokens",), torch.float32, pad=dg.Pad.zero())],
            config=dg.PhaseConfig(policy="piecewise", buckets=(2, 4)),
            backend=type(bench.backend)(),
            group=RankGroup(store, rank, size=2, timeout_s=60),
            max_requests=4,
            progress=False,
        )
        runner.capture()
        decision = runner.agree(runner.can_run(1 + rank))
        x = torch.arange(1.0 + rank)
        out = runner.run({"x": x}, decision=decision)
        results[rank] = (decision.bucket, torch.equal(out, (x + 1) * 2 + 1))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: (2, True), 1: (2, True)}


def test_step_that_writes_its_inputs_finds_pad_values_in_every_run(bench):
    seen = []

    @dg.region(mutates=("x",))
    def look(x):
        seen.append(x.detach().cpu().clone())

    def forward(batch):
        look(batch.x)
        out = batch.x * 2
        batch.x.add_(1)
        return out

    runner = dg.DecodeRunner(
        forward,
        inputs=[dg.InputSlot("x", ("tokens",), torch.float32, pad=dg.Pad.fill(5))],
        config=dg.PhaseConfig(policy="piecewise", buckets=(4,)),
        backend=bench.backend,
        max_requests=4,
        progress=False,
    )
    runner.capture()
    assert len(seen) >= 3
    assert all(torch.equal(x, torch.full((4,), 5.0)) for x in seen)
    runner.close()


# The room.


def test_only_the_piecewise_file_imports_the_compiler():
    root = Path(dg.__file__).parent
    pattern = re.compile(r"^\s*(?:import|from)\s+torch\.(?:_dynamo|fx|_inductor)\b", re.M)
    found = [p.relative_to(root) for p in root.rglob("*.py") if pattern.search(p.read_text())]
    assert found == [Path("api/policy/piecewise.py")]


def test_nothing_imports_the_piecewise_file():
    root = Path(dg.__file__).parent
    pattern = re.compile(r"^\s*(?:import|from)\s.*\bpiecewise\b", re.M)
    assert not [p for p in root.rglob("*.py") if pattern.search(p.read_text())]


def test_importing_devgraph_and_the_other_policies_loads_no_compiler():
    code = (
        "import sys, json, devgraph, devgraph.runners\n"
        "from devgraph.api.policy import get_policy\n"
        "get_policy('full'), get_policy('breakable')\n"
        "print(json.dumps('devgraph.api.policy.piecewise' in sys.modules))"
    )
    assert json.loads(printed_by(code)) is False


def test_host_read_in_a_compiled_piece_names_the_line_of_the_step():
    def step(x):
        return x * x.sum().item()  # the line

    with pytest.raises(dg.HostReadError, match=r"test_piecewise.py:\d+ in step: .*# the line"):
        dg.capture(step, torch.ones(2), backend="cpu", policy="piecewise")


def test_generator_in_a_traced_step_is_refused_with_the_line_of_the_call():
    generator = torch.Generator()

    def step(x):
        return x + torch.randn(2, generator=generator)  # the line

    with pytest.raises(dg.CaptureError, match="the call at .*# the line passes an object that a"):
        dg.capture(step, torch.ones(2), backend="cpu", policy="piecewise")


def test_object_handed_to_a_mark_is_refused_under_piecewise_with_what_it_takes():
    class Holder:
        scale = torch.ones(2)

    @dg.region(mutates=("out",))
    def scaled(x, holder, out):
        out.copy_(x * holder.scale)

    def step(x):
        out = torch.empty_like(x)
        scaled(x, Holder(), out)
        return out + 1

    with pytest.raises(dg.CaptureError, match=r"accepts tensors, plain values.* use policy='break"):
        dg.capture(step, torch.ones(2), backend="cpu", policy="piecewise")


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # torch 2.11
def test_marked_method_is_refused_under_piecewise_with_what_a_mark_takes():
    class Layer:
        scale = torch.ones(2)

        @dg.region(mutates=("out",))
        def scaled(self, x, out):
            out.copy_(x * self.scale)

    layer = Layer()

    def step(x):
        out = torch.empty_like(x)
        layer.scaled(x, out)
        return out + 1

    with pytest.raises(
        dg.CaptureError, match=r"A marked function \(not a method\) accepts tensors"
    ):
        dg.capture(step, torch.ones(2), backend="cpu", policy="piecewise")
    x = torch.ones(2)
    captured = dg.capture(step, x, backend="cpu", policy="breakable")
    x.fill_(3.0)
    assert captured.replay().tolist() == [4.0, 4.0]


@functools.singledispatch
def is_number(value: object) -> bool:
    """Ask for the type by dispatch."""
    return False


@is_number.register
def _(value: int) -> bool:
    return True


@pytest.mark.parametrize(
    "ask",
    [
        lambda n: isinstance(n, int),
        lambda n: isinstance(n, torch.Tensor),
        lambda n: isinstance(n, numbers.Number),
        torch.is_tensor,
        is_number,
    ],
)
def test_type_of_a_host_argument_is_not_asked_for_outside_a_region_under_piecewise(
    ask: Callable[[Any], bool],
):
    @dg.region(host_args=("kv_len",))
    def scaled(x, *, kv_len):
        return x * kv_len

    def step(x, *, kv_len):
        if ask(kv_len):
            x = x + 1
        return scaled(x, kv_len=kv_len)

    x = torch.randn(4)
    with pytest.raises(dg.FrozenValueError, match=r"isinstance\(\).*test_piecewise.py.*'kv_len'"):
        dg.capture(
            step, x, policy="piecewise", backend="cpu", compiler="eager", host_args={"kv_len": 2}
        )
    with dg.capture(step, x, policy="breakable", backend="cpu", host_args={"kv_len": 2}) as cap:
        assert torch.equal(cap.replay(kv_len=5), step(x, kv_len=5))


def test_region_that_reads_a_value_is_asked_for_a_description_of_its_result_under_piecewise():
    @dg.region(host_args=("n",))
    def read(x, *, n):
        return x * n * x.sum().item()

    def step(x, *, n):
        return read(x, n=n) + 1

    x = torch.randn(3, 4)
    options = {"policy": "piecewise", "backend": "cpu", "host_args": {"n": 2}}
    with pytest.raises(
        dg.CaptureError,
        match=r"read without running it.*reads device data.* Declare fake= on its mark",
    ):
        dg.capture(step, x, **options)

    select = dg.region(lambda x: x[x > 0])
    with pytest.raises(
        dg.CaptureError,
        match=r"without running it.*shape of its result depends.* Declare fake= on its mark",
    ):
        dg.capture(lambda x: select(x) + 1, x, policy="piecewise", backend="cpu")
    count = dg.region(lambda x: x[x > 0].sum())
    captured = dg.capture(lambda x: count(x) + 1, x, policy="piecewise", backend="cpu")
    for _ in range(2):
        assert torch.equal(captured.replay(), count(x) + 1)
        x.neg_()

    @dg.region(host_args=("n",), fake=lambda x, *, n: torch.empty_like(x))
    def told(x, *, n):
        return x * n * x.sum().item()

    def other(x, *, n):
        return told(x, n=n) + 1

    with dg.capture(other, x, **options) as captured:
        x.copy_(torch.randn(3, 4))
        assert torch.equal(captured.replay(n=5), other(x, n=5))


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_hook_that_was_added_after_a_capture_runs(compiler: str):
    """The tracer reuses code of the class, and does not look at hooks by itself."""

    @dg.region
    def doubled(x):
        return x * 2

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x):
            return doubled(self.linear(x)) + 1

    model, x = Model(), torch.randn(2, 3)

    def check() -> None:
        with dg.capture(model, x, policy="piecewise", backend="cpu", compiler=compiler) as captured:
            x.copy_(torch.randn(2, 3))
            torch.testing.assert_close(captured.replay(), model(x))

    with torch.no_grad():
        check()
        for module in (model.linear, model):
            for factor in (3, 5):
                hook = module.register_forward_hook(lambda *call, f=factor: call[2] * f)
                check()
                hook.remove()
            hook = module.register_forward_pre_hook(lambda module, given: (given[0] * 7,))
            check()
            hook.remove()
        hook = register_module_forward_hook(lambda *call: call[2] * 2)
        try:
            with pytest.raises(dg.CaptureError, match="hooks are registered for the forward"):
                check()
        finally:
            hook.remove()
        check()


def test_code_of_earlier_captures_keeps_no_hooks(bench):
    def captured_with_hook():
        module = torch.nn.Linear(WIDTH, WIDTH, device=bench.device)

        def hook(module, args, output):
            return output * 2

        module.register_forward_hook(hook)
        x = bench.randn(4, WIDTH)
        with torch.no_grad():
            assert torch.equal(bench.capture(module, x).replay(), module(x))
        return weakref.ref(hook)

    hook = captured_with_hook()
    gc.collect()
    assert hook() is None


@pytest.mark.parametrize("kind", ["values", "dtype"])
def test_traced_step_that_differs_from_the_eager_one_is_named(bench, kind: str) -> None:
    """torch.compile ignores the caches of functools."""
    held = {"values": 2.0, "dtype": torch.float32}
    cached = functools.lru_cache(None)(lambda: held[kind])
    cached()
    held.update(values=5.0, dtype=torch.bfloat16)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * cached() if kind == "values" else x.to(cached()) * 2

    with (
        warnings.catch_warnings(),
        pytest.warns(dg.DeviceGraphWarning, match="with other values")
        if kind == "values"
        else pytest.raises(dg.CaptureError, match="bfloat16.* instead of .*float32"),
    ):
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        bench.capture(step, bench.randn(4))
