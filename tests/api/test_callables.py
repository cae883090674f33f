"""Graphed callables: keys, state, gradients, threads, and every reason for an eager call."""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import functools
import gc
import itertools
import pickle
import threading
import types
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import devgraph as dg
from devgraph.api.callables import EagerReason


def graphed(fn: Any = None, **options: Any) -> Any:
    return dg.graphed(fn, backend=torch.get_default_device().type, **options)


@pytest.fixture(autouse=True)
def _default_device(devgraph_backend: Any) -> Iterator[None]:
    """Create tensors and modules on the device of the backend under test."""
    with torch.device(devgraph_backend.device):
        yield


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got, want)


# Keys.


def test_second_call_is_captured_and_later_ones_replay_with_new_data() -> None:
    runs = []

    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x * 2 + y

    step = graphed(fn)
    for _ in range(5):
        x, y = torch.randn(4), torch.randn(4)
        same(step(x, y), x * 2 + y)
    calls = len(runs)
    for _ in range(5):
        step(torch.randn(4), torch.randn(4))
    assert len(runs) == calls
    stats = step.stats()
    assert (stats["captures"], stats["graphs"], stats["eager"]) == (1, 1, {"first_call": 1})


def test_shapes_dtypes_and_constants_have_graphs_of_their_own() -> None:
    step = graphed(lambda x, scale: x * scale)
    for _ in range(3):
        for x in (torch.ones(2), torch.ones(3), torch.ones(2, dtype=torch.float64)):
            for scale in (2, 2.0, True, 3):
                got = step(x, scale)
                assert got.dtype == (x * scale).dtype
                same(got, x * scale)
    assert step.stats()["keys"] == 12


class Doubled(torch.Tensor):
    """A subclass without behavior of its own."""


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_known_key_is_told_from_every_other_one() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor, c: Any = 1, d: Any = 0.5) -> Any:
        with torch.no_grad():
            return (x + y * 2).mul_(c) + d, type(c).__name__

    step = graphed(fn)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    calls: list[Any] = [
        lambda f: f(x, y),
        lambda f: f(x, y, 1),
        lambda f: f(x, y, True),
        lambda f: f(x, y, 1.0),
        lambda f: f(x, y, c=2, d=0.25),
        lambda f: f(x, y, d=2, c=0.25),
        lambda f: f(x, y, c=2),
        lambda f: f(x, y, d=2),
        lambda f: f(y=x, x=y),
        lambda f: f(x=y, y=x),
        lambda f: f(x, y, 0.0, -0.0),
        lambda f: f(x, y, -0.0, 0.0),
        lambda f: f(x.t(), y),
        lambda f: f(x[:2], y[:2]),
        lambda f: f(x.double(), y),
        lambda f: f(x, x),
        lambda f: f(x.as_subclass(Doubled), y),
        lambda f: f(x.clone().requires_grad_(), y),
    ]
    around: list[Any] = [
        contextlib.nullcontext,
        torch.no_grad,
        torch.inference_mode,
        Counting,
        lambda: torch.autocast(x.device.type, torch.bfloat16),
        lambda: default_dtype(torch.float64),
    ]
    for _ in range(3):
        for setting in around:
            for call in calls:
                with setting():
                    for _ in range(2):
                        (got, kind), (want, plain) = call(step), call(fn)
                        assert kind == plain
                        assert (got.dtype, got.stride()) == (want.dtype, want.stride())
                        same(got, want)
    assert step.stats()["replays"] > 300


def test_calls_of_a_known_key_take_part_in_transforms() -> None:
    step = graphed(lambda x: x.sin() * 2)
    x = torch.randn(3)
    for _ in range(4):
        same(step(x), x.sin() * 2)
        same(torch.func.vmap(step)(x.expand(2, 3)), (x.sin() * 2).expand(2, 3))
        same(torch.func.grad(lambda t: step(t).sum())(x), x.cos() * 2)


def test_parameters_that_are_frozen_or_released_change_the_key() -> None:
    module, plain = (nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)) for _ in range(2))
    plain.load_state_dict(module.state_dict())
    graphed(module)
    for turn in range(9):
        for net in (module, plain):
            net.zero_grad()
            net[0].requires_grad_(turn % 3 != 0)
            net[1].requires_grad_(turn % 3 != 1)
        x = torch.randn(5, 3)
        for _ in range(2):
            got, want = module(x), plain(x)
            same(got, want)
            got.square().sum().backward(), want.square().sum().backward()
        for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) is (theirs.grad is None)
            if theirs.grad is not None:
                same(ours.grad, theirs.grad)


def test_module_that_a_function_uses_is_part_of_the_key() -> None:
    module = nn.Dropout(0.5)
    step = graphed(lambda x: module(x) * 2)
    x = torch.ones(1000)
    for training in (True, False) * 4:
        module.train(training)
        assert bool((step(x) == 0).any()) is training


def test_negative_zero_and_nan_are_keys_by_their_bits() -> None:
    step = graphed(lambda x, c: torch.copysign(x, torch.full_like(x, c)) if c == c else x * c)
    x = torch.ones(2)
    for _ in range(3):
        assert step(x, 0.0).tolist() == [1.0, 1.0]
        assert step(x, -0.0).tolist() == [-1.0, -1.0]
        assert step(x, float("nan")).isnan().all()
    assert step.stats()["keys"] == 3


def test_trees_of_tensors_keep_their_structure() -> None:
    step = graphed(lambda batch, *, flag: {"sum": batch["a"] + batch["b"][0], "flag": flag})
    for _ in range(4):
        a, b = torch.randn(3), torch.randn(3)
        got = step({"a": a, "b": (b, 1)}, flag=None)
        same(got["sum"], a + b)
        assert got["flag"] is None
    assert step.stats()["captures"] == 1


def test_unhashable_constant_is_refused_by_name() -> None:
    step = graphed(lambda x, options: x)
    with pytest.raises(dg.InputTypeError, match=r"options is .*not hashable"):
        step(torch.ones(1), {1, 2})


def test_float_that_changes_with_each_call_is_named_once() -> None:
    step = graphed(lambda x, time: x * time)
    with pytest.warns(dg.DeviceGraphWarning, match=r"time of .* changes between calls"):
        for index in range(8):
            same(step(torch.ones(2), index / 8), torch.ones(2) * (index / 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(torch.ones(2), 0.99)


def test_least_recently_used_graph_is_closed_at_the_limit() -> None:
    step = graphed(lambda x: x + 1, max_graphs=2)
    for size in (1, 2, 1, 2, 3, 3, 1, 2):
        x = torch.randn(size)
        same(step(x), x + 1)
    stats = step.stats()
    assert stats["graphs"] == 2
    assert stats["evictions"] == 3


def test_one_tensor_in_two_places_is_another_key_than_two() -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * y

    step = graphed(fn)
    for _ in range(3):
        x, y = torch.ones(2), torch.ones(2)
        assert step(x, y).tolist() == [2, 2]
        assert x.tolist() == [2, 2]
        z = torch.ones(2)
        assert step(z, z).tolist() == [4, 4]


def test_arguments_that_the_step_writes_are_written() -> None:
    def fn(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        return cache.add_(x)

    step = graphed(fn)
    for index in range(4):
        cache = torch.full((2,), float(index))
        got = step(torch.ones(2), cache)
        assert got is cache
        assert cache.tolist() == [index + 1] * 2


def test_results_are_copies_unless_asked_otherwise() -> None:
    for clone in (True, False):
        step = graphed(lambda x: x * 2, clone=clone)
        results = [step(torch.full((2,), float(i))) for i in range(4)]
        assert (results[2].tolist() == [4, 4]) is clone
        assert results[3].tolist() == [6, 6]


# Modules and state.


def test_module_runs_in_graphs_and_gets_its_forward_back() -> None:
    module = nn.Linear(3, 2)
    step = graphed(module)
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(5, 3)
            same(module(x), nn.functional.linear(x, module.weight, module.bias))
    assert step.stats()["captures"] == 1
    with pytest.raises(dg.StateError, match="graphed already"):
        graphed(module)
    assert dg.ungraphed(step) is module
    assert "forward" not in vars(module)
    copy.deepcopy(module)
    with pytest.raises(dg.StateError, match="closed"):
        step(torch.randn(5, 3))
    with pytest.raises(dg.InputError, match="is not graphed"):
        dg.ungraphed(module)


@pytest.mark.parametrize("how", ["assign", "load", "data", "copy"])
def test_replaced_weights_are_used_at_the_next_call(how: str) -> None:
    module = nn.Linear(3, 2)
    step = graphed(module)
    x = torch.randn(5, 3)
    with torch.no_grad():
        for _ in range(3):
            module(x)
        new = torch.randn(2, 3)
        if how == "assign":
            module.weight = nn.Parameter(new)
        elif how == "load":
            module.load_state_dict({"weight": new, "bias": module.bias}, assign=True)
        elif how == "data":
            module.weight.data = new
        else:
            module.weight.copy_(new)
        for _ in range(3):
            same(module(x), nn.functional.linear(x, new, module.bias))
    assert step.stats()["recaptures"] == (0 if how == "copy" else 1)


def test_hook_of_the_time_of_the_capture_alone_is_followed() -> None:
    """The modules are compared from the creation on, before the first capture."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh())
    graphed, x = dg.graphed(lambda x: net(x) * 2), torch.ones(1, 3)
    graphed(x)
    hook = net[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert torch.equal(graphed(x), net(x) * 2)
    hook.remove()
    for _ in range(2):
        assert torch.equal(graphed(x), net(x) * 2)
    assert graphed.stats()["recaptures"] == 1


def test_graphs_of_two_keys_follow_weights_that_come_and_go() -> None:
    net, xs = torch.nn.Linear(3, 3, bias=False), (torch.ones(1, 3), torch.ones(2, 3))
    graphed, one, other = dg.graphed(net), net.weight, torch.nn.Parameter(torch.ones(3, 3))
    for weight, x in ((one, xs[0]), (other, xs[1]), (one, xs[1]), (other, xs[0])):
        net.weight = weight
        for _ in range(2):
            assert torch.equal(graphed(x), x @ weight.T)


@pytest.mark.parametrize("inner", [False, True])
def test_forward_of_a_class_that_changes_is_used_at_the_next_call(inner: bool) -> None:
    class Layer(nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.tanh(x)

    module: nn.Module = nn.Sequential(nn.ReLU(), Layer()) if inner else Layer()
    graphed(module)
    for call in range(8):
        if call == 4:
            Layer.forward = lambda self, x: torch.sigmoid(x) * 4  # type: ignore[method-assign]
        x = torch.randn(3)
        start = x.relu() if inner else x
        want = torch.tanh(start) if call < 4 else torch.sigmoid(start) * 4
        assert torch.equal(module(x), want)
    dg.ungraphed(module)
    assert "forward" not in vars(module)


def test_argument_in_the_memory_of_named_state_that_the_step_writes() -> None:
    """The static copy of the argument would not change with the state."""
    state, twin = torch.arange(6.0), torch.arange(6.0)

    def step(x: Any) -> Any:
        state.mul_(0.5)
        return x + 1

    def eager(x: Any) -> Any:
        twin.mul_(0.5)
        return x + 1

    graphed_step = graphed(step)
    for call in range(8):
        ours, theirs = (t[:3] if call % 3 else torch.ones(3) for t in (state, twin))
        assert torch.equal(graphed_step(ours), eager(theirs))
        assert torch.equal(state, twin)
    stats = graphed_step.stats()
    assert stats["eager"]["shared_memory"] == 5 and stats["replays"] == 2


def test_argument_in_the_memory_of_a_buffer_that_the_step_writes() -> None:
    class Adder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("sums", torch.arange(8.0))

        def forward(self, x: Any) -> Any:
            self.sums.add_(x.sum())
            return self.sums[:4] * 2 + x

    twin, module = Adder(), Adder()
    graphed_step = graphed(module)
    for call in range(8):
        ours, theirs = (m.sums[4:] if call % 3 else torch.ones(4) for m in (module, twin))
        assert torch.equal(graphed_step(ours), twin(theirs))
        assert torch.equal(module.sums, twin.sums)


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.ones(3))])
def test_scripted_module_is_graphed(make: Any) -> None:
    module = make(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    step = dg.graphed(module, backend="cpu")
    for _ in range(4):
        x = torch.randn(3)
        assert torch.equal(step(x), torch.relu(nn.functional.linear(x, *module.parameters())))


def test_cached_tensor_that_the_caller_drops_is_made_again() -> None:
    class Table:
        base = 2.0

        @functools.cached_property
        def rows(self) -> torch.Tensor:
            return torch.full((3,), self.base)

    table = Table()
    step = graphed(lambda x: x * table.rows)
    for call in range(9):
        if call in (3, 6):
            del table.rows
            table.base += 1
        x = torch.randn(3)
        assert torch.equal(step(x), x * (2.0 + call // 3))
    assert step.stats()["graphs"] == 1 and step.stats()["recaptures"] == 2


def test_replaced_weights_are_noticed_while_a_graph_is_timed() -> None:
    module = nn.Linear(3, 2)
    graphed(module, min_speedup=0.0001)
    with torch.no_grad():
        for _ in range(12):
            x = torch.randn(5, 3)
            module.weight = nn.Parameter(torch.randn(2, 3))
            same(module(x), nn.functional.linear(x, module.weight, module.bias))


def test_buffers_are_updated_once_a_call() -> None:
    ours, theirs = (nn.BatchNorm1d(3) for _ in range(2))
    graphed(ours)
    with torch.no_grad():
        for _ in range(5):
            x = torch.randn(6, 3)
            same(ours(x), theirs(x))
            for name, buffer in theirs.named_buffers():
                same(ours.get_buffer(name), buffer)


def test_training_and_evaluation_have_graphs_of_their_own() -> None:
    module, plain = (nn.Sequential(nn.BatchNorm1d(3)) for _ in range(2))
    graphed(module)
    with torch.no_grad():
        for training in (True, False, True, False, True, False):
            module.train(training), plain.train(training)
            x = torch.randn(6, 3)
            same(module(x), plain(x))
        plain[0].train(), module[0].train()
        for _ in range(3):
            x = torch.randn(6, 3)
            same(module(x), plain(x))


def test_method_has_graphs_for_each_instance_and_dies_with_it() -> None:
    class Policy:
        def __init__(self, scale: float) -> None:
            self.scale = torch.full((2,), scale)

        @dg.graphed(max_graphs=4)
        def act(self, x: torch.Tensor) -> torch.Tensor:
            """Scale."""
            return x * self.scale

    assert Policy.act.__doc__ == "Scale."
    one, two = Policy(2.0), Policy(3.0)
    for _ in range(4):
        x = torch.randn(2)
        same(one.act(x), x * 2)
        same(two.act(x), x * 3)
    assert one.act.stats()["captures"] == 1
    assert one.act is not two.act
    gone: list[int] = []
    import weakref

    weakref.finalize(one, gone.append, 1)
    del one
    gc.collect()
    assert gone == [1]


def test_method_of_an_instance_without_dict_is_refused() -> None:
    class Slotted:
        __slots__ = ()

        @dg.graphed()
        def act(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(dg.InputTypeError, match="__slots__"):
        Slotted().act(torch.ones(1))


# Eager calls.


def test_reasons_of_eager_calls_are_counted() -> None:
    step = graphed(lambda x: x + 1)
    x = torch.ones(2)
    for _ in range(3):
        step(x)
    with step.eager():
        step(x)
    outer = dg.capture(lambda x: step(x) * 2, x, backend=x.device.type)
    same(outer.replay(), (x + 1) * 2)
    assert step.stats()["eager"]["switched_off"] == 1
    assert step.stats()["eager"]["in_capture"] >= 1


def test_variable_switches_graphs_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEVGRAPH_EMULATE", "1")
    step = graphed(lambda x: x + 1)
    for _ in range(3):
        step(torch.ones(2))
    assert step.stats()["eager"] == {"switched_off": 3} and not step.stats()["graphs"]


def test_settings_of_torch_are_part_of_the_key() -> None:
    step = graphed(lambda x: x + torch.full((2,), 0.1).to(x.dtype))
    x = torch.ones(2, dtype=torch.float64)
    plain = x + torch.full((2,), 0.1).to(x.dtype)
    for _ in range(3):
        same(step(x), plain)
    try:
        torch.set_default_dtype(torch.float64)
        for _ in range(3):
            same(step(x), x + 0.1)
    finally:
        torch.set_default_dtype(torch.float32)
    same(step(x), plain)
    assert step.stats()["captures"] == 2


def test_equal_tuple_in_the_place_of_another_is_compared_later_too() -> None:
    own = types.SimpleNamespace(pair=(1.0, torch.ones(2)), bias=None, zero=0.0)

    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * own.pair[0] + own.pair[1]
        return torch.copysign(y, torch.full_like(y, own.zero)) if own.bias is None else y + own.bias

    step, x = graphed(fn), torch.rand(2)
    for _ in range(2):
        same(step(x), fn(x))
        own.pair = (1.0, own.pair[1])
    own.pair = (2.0, own.pair[1])
    for zero in (0.0, -0.0, float("nan")):
        own.zero = zero
        for _ in range(3):
            same(step(x), fn(x))
    own.bias = torch.ones(2)  # a tensor in a place of the key
    for _ in range(3):
        same(step(x), fn(x))
    assert step.stats()["captures"] == 5


def test_default_device_is_part_of_the_key() -> None:
    step = graphed(lambda x: x + torch.ones(()))
    x = torch.ones(2)
    for _ in range(2):
        same(step(x), x + 1)
    with torch.device("cpu"):
        for _ in range(2):
            same(step(x), x + 1)
    with torch.device("cpu"):  # another mode, the same device
        same(step(x), x + 1)
    assert step.stats()["captures"] == 2
    assert step.stats()["replays"] == 3


def test_calls_under_a_function_mode_run_eagerly() -> None:
    class Doubled(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.relu else result

    step, x = graphed(lambda x: torch.relu(x)), torch.ones(2)
    for _ in range(3):
        same(step(x), x)
    with Doubled():
        same(step(x), x * 2)
    assert step.stats()["eager"] == {"first_call": 1, "traced": 1}
    same(step(x), x)


def test_step_that_cannot_be_captured_runs_eagerly_and_says_why() -> None:
    step = graphed(lambda x: x * x.sum().item())
    x = torch.ones(2)
    step(x)
    with pytest.warns(dg.DeviceGraphWarning, match="cannot be captured"):
        same(step(x), x * 2)
    same(step(x), x * 2)
    assert step.stats()["eager"] == {"first_call": 1, "capture_failed": 2}
    strict = graphed(lambda x: x * x.sum().item(), strict=True)
    strict(x)
    with pytest.raises(dg.HostReadError):
        strict(x)


def test_graph_that_does_not_pay_is_dropped() -> None:
    step = graphed(lambda x: x + 1, min_speedup=1000.0)
    for _ in range(12):
        x = torch.randn(2)
        same(step(x), x + 1)
    stats = step.stats()
    assert (stats["graphs"], stats["dropped"]) == (0, 1)
    assert stats["eager"][EagerReason.TOO_SLOW] >= 4
    kept = graphed(lambda x: x + 1, min_speedup=0.0001)
    for _ in range(12):
        kept(torch.randn(2))
    assert kept.stats()["graphs"] == 1


def test_host_arguments_reach_marked_functions() -> None:
    @dg.region(host_args=("length",), mutates=("out",))
    def total(x: torch.Tensor, out: torch.Tensor, *, length: int) -> None:
        out.copy_(x[:length].sum())

    def fn(x: torch.Tensor, *, length: int) -> torch.Tensor:
        out = torch.empty(())
        total(x * 2, out, length=length)
        return out + 1

    step = graphed(fn, host_args={"length": 1})
    for length in (1, 2, 3, 4, 2):
        x = torch.randn(8)
        same(step(x, length=length), (x * 2)[:length].sum() + 1)
    assert step.stats()["keys"] == 1


def test_invalidated_graphs_are_captured_again_and_closed_ones_refuse() -> None:
    step = graphed(lambda x: x + 1)
    for _ in range(3):
        step(torch.ones(1))
    step.invalidate()
    assert step.stats()["graphs"] == 0
    for _ in range(3):
        assert step(torch.ones(1)).item() == 2
    assert step.stats()["captures"] == 2
    step.close()
    step.close()
    with pytest.raises(dg.StateError, match="closed"):
        step(torch.ones(1))


def test_graphed_is_not_copied_or_pickled() -> None:
    with pytest.raises(TypeError, match="ungraphed"):
        copy.deepcopy(graphed(lambda x: x))


@pytest.mark.parametrize(
    "options",
    [
        {"max_graphs": 0},
        {"warmup": -1},
        {"min_speedup": "fast"},
        {"pool": 3},
        {"host_args": ("kv_len",)},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(dg.DeviceGraphError):
        graphed(lambda x: x, **options)


def test_threads_that_share_a_graphed_callable_get_their_own_results() -> None:
    step, device = graphed(lambda x: (x + 1) * 2), torch.get_default_device()
    wrong: list[Any] = []

    def work(seed: int) -> None:
        for index in range(50):
            x = torch.full((16,), seed + index / 50, device=device)
            if not torch.equal(step(x), (x + 1) * 2):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_proof_covers_every_graph() -> None:
    step = graphed(lambda x: x + 1)
    with pytest.raises(dg.StateError, match="no graph to prove.*by reason"):
        step.prove()
    for _ in range(2):
        step(torch.ones(1)), step(torch.ones(2))
    report = step.prove()
    assert report.ok
    assert report.cases == 6


def test_proof_omits_graphs_of_other_states_of_the_function() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    scale = 1
    step = graphed(lambda x: module(x) * scale)
    for change in (lambda: None, module.eval, lambda: module.requires_grad_(False)):
        change()
        for _ in range(2):
            step(torch.ones(1, 2))
        assert step.prove().cases == 3
    scale = 2
    with pytest.raises(dg.StateError, match="no graph to prove"):
        step.prove()
    assert step.stats()["graphs"] == 3


def test_explanation_names_graphs_and_reasons() -> None:
    step = graphed(lambda x: x + 1)
    for _ in range(2):
        step(torch.ones(1))
    step(torch.ones(2))
    text = step.explain()
    assert "key 0, (1,): policy full" in text
    assert "key 1, (2,): not captured" in text
    module = torch.nn.Linear(1, 1)
    step = graphed(module)
    step(torch.ones(1))
    module.eval()
    step(torch.ones(1))
    assert "key 0, (1,), training: not" in step.explain() and "key 1, (1,): not" in step.explain()


def test_unknown_policy_is_refused_when_the_callable_is_made() -> None:
    with pytest.raises(dg.InputError, match="Did you mean 'full'"):
        dg.graphed(torch.nn.Linear(2, 2), policy="ful", backend="cpu")


def test_input_of_another_dtype_is_refused_with_the_conversion() -> None:
    captured = dg.capture(lambda x: x * 2, torch.ones(2))
    with captured, pytest.raises(dg.InputTypeError, match=r"x\.to\(torch\.float32\)"):
        captured(torch.ones(2).double())


class _Scaled:
    """An object whose graphed method uses a tensor and a flag of its own."""

    def __init__(self) -> None:
        self.weight, self.doubled, self.calls = torch.full((3,), 2.0), False, 0

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * (2 if self.doubled else 1)

    def counted(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.calls


def test_tensors_and_flags_of_the_object_of_a_method_are_part_of_the_key() -> None:
    scaled = _Scaled()
    step = graphed(scaled.plain)
    for turn in range(12):
        if turn == 4:
            scaled.weight = torch.full((3,), 7.0)
        scaled.doubled = turn % 8 > 5
        x = torch.randn(3)
        same(step(x), scaled.plain(x))
    assert step.stats()["replays"] >= 4


def test_globals_and_closures_that_change_are_part_of_the_key() -> None:
    weight, factor = torch.ones(3), 1

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * weight * factor

    step = graphed(plain)
    for turn in range(9):
        weight = torch.full((3,), float(turn // 3))
        factor = turn // 6
        x = torch.randn(3)
        same(step(x), plain(x))
        same(step(x), plain(x))


def _halves() -> Iterator[float]:
    value = 1.0
    while True:
        value /= 2
        yield value


def test_counter_of_the_step_keeps_it_out_of_graphs() -> None:
    scaled = _Scaled()
    step = graphed(scaled.counted)
    for turn in range(1, 6):
        x = torch.randn(3)
        same(step(x), x * turn)


@pytest.mark.parametrize("make", [itertools.count, lambda: itertools.cycle("ab"), _halves])
def test_iterator_that_the_step_advances_keeps_it_out_of_graphs(make: Any) -> None:
    values, wanted = make(), make()
    step = graphed(lambda x: x * ord(str(next(values))[-1]))
    for _ in range(5):
        x = torch.randn(3)
        same(step(x), x * ord(str(next(wanted))[-1]))


def test_graphed_inside_of_another_runs_in_its_graph() -> None:
    inner = graphed(lambda x: x * 2)
    outer = graphed(lambda x: inner(x) + 1)
    for _ in range(4):
        x = torch.randn(3)
        same(outer(x), x * 2 + 1)
    assert outer.stats()["replays"] == 3


def test_threads_capture_a_key_once(devgraph_backend: Any) -> None:
    step = graphed(lambda x: x * 2 + 1)
    ready = threading.Barrier(4)

    def work() -> None:
        ready.wait()
        for turn in range(5):
            x = torch.full((5,), float(turn), device=devgraph_backend.device)
            same(step(x), x * 2 + 1)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(work) for _ in range(4)]:
            job.result()
    assert step.stats()["captures"] == 1


def test_marks_of_gates_are_refused_because_nobody_could_open_them():
    def gated(x):
        dg.wait("kv")
        return x * 2

    step = dg.graphed(gated)
    x = torch.ones(3)
    step(x)
    with pytest.warns(dg.DeviceGraphWarning, match=r"gate marks \(kv\).*dg.capture"):
        assert step(x).tolist() == [2.0] * 3
    assert step.stats()["graphs"] == 0
    strict = dg.graphed(gated, strict=True)
    strict(x)
    with pytest.raises(dg.CaptureError, match="cannot be opened"):
        strict(x)


# Uses of tensordict's ``CudaGraphModule``, by ``graphed`` in its place.


def test_steps_of_tensordicts_graph_module_run_unchanged() -> None:
    draw = graphed(lambda x: x + torch.rand_like(x))
    results = [draw(torch.zeros(8)) for _ in range(5)]
    assert len({tuple(result.tolist()) for result in results}) == 5

    step = graphed(lambda x, *, y, names=("a",): {"sum": x + y, names[0]: x - y})
    for _ in range(4):
        x, y = torch.randn(3), torch.randn(3)
        got = step(x, y=y)
        same(got["sum"], x + y), same(got["a"], x - y)

    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    steps: list[Any] = []
    for weight in weights:
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def train(x: torch.Tensor, weight: Any = weight, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = (x * weight).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        steps.append(train)
    steps[0] = graphed(steps[0])
    for _ in range(5):
        x = torch.randn(3)
        same(steps[0](x), steps[1](x))
        same(weights[0].detach(), weights[1].detach())


def test_modules_of_tensordict_run_eagerly() -> None:
    tensordict = pytest.importorskip("tensordict", reason="tensordict is not installed")
    nets = tensordict.nn
    module = nets.TensorDictModule(lambda x: x * 2 + 1, in_keys=["x"], out_keys=["y"])
    step = graphed(module)
    for _ in range(4):
        data = tensordict.TensorDict(x=torch.randn(3))
        with warnings.catch_warnings():  # a module that writes its input runs eagerly
            warnings.simplefilter("ignore", dg.DeviceGraphWarning)
            same(step(data)["y"], data["x"] * 2 + 1)


def test_named_state_below_containers_and_objects_is_part_of_the_key():
    box, inner = {"k": 2.0}, types.SimpleNamespace(w=torch.ones(3))

    def step(x):
        return x * box["k"] * inner.w

    graphed_step = graphed(step)
    for index in range(10):
        if index == 3:
            box["k"] = 5.0
        if index == 6:
            inner.w = torch.full((3,), 7.0)
        x = torch.full((3,), float(index))
        assert torch.equal(graphed_step(x), step(x))


def test_call_with_data_that_shares_memory_is_refused_if_the_step_writes_it() -> None:
    step = graphed(lambda x, y: x.add_(1) * y)
    for _ in range(3):
        step(torch.ones(4), torch.ones(4))
    memory = torch.randn(6)
    with pytest.raises(dg.InputError, match="share memory"):
        step(memory[:4], memory[2:])
    with step.eager():
        step(memory[:4], memory[2:])


class Fixed(Mapping[str, torch.Tensor]):
    """A mapping that cannot be given other tensors."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        self._held = held

    def __getitem__(self, key: str) -> torch.Tensor:
        return self._held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)


def attributed(x: torch.Tensor) -> torch.Tensor:
    x.factor = float(x.sum())  # type: ignore[attr-defined]
    return x


UNCOPIED: dict[str, tuple[Any, Any, str]] = {
    "mapping": (lambda b: b["x"] * 2, lambda x: Fixed({"x": x}), "cannot be replaced"),
    "attribute": (lambda x: x * x.factor, attributed, r"has attributes \(factor\)"),
}


@pytest.mark.parametrize("kind", UNCOPIED)
def test_argument_that_cannot_be_copied_runs_eagerly(kind: str) -> None:
    fn, make, why = UNCOPIED[kind]
    step = graphed(fn)
    with pytest.warns(dg.DeviceGraphWarning, match=why):
        for _ in range(4):
            x = torch.randn(3)
            same(step(make(x)), fn(make(x)))


def test_replaced_weight_is_not_kept_alive() -> None:
    module = nn.Linear(3, 3)
    graphed(module)
    with torch.no_grad():
        for _ in range(4):
            module(torch.ones(2, 3))
        old = weakref.ref(module.weight)
        module.weight = nn.Parameter(torch.ones(3, 3))
        module(torch.ones(2, 3))
    gc.collect()
    assert old() is None


def test_lazy_module_is_captured_after_its_first_call() -> None:
    module = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    step = graphed(module)
    for _ in range(4):
        x = torch.randn(2, 4)
        same(module(x), module[1](module[0](x)))
    assert step.stats()["replays"] == 3


@pytest.mark.parametrize("optimizer", ["momentum", "scaled", "fused"])
def test_capture_of_a_whole_training_step_moves_nothing(optimizer: str) -> None:
    """The scaled step reads data on the host, so that its capture fails half-way."""

    def trained(wrap: Any) -> list[torch.Tensor]:
        weight = nn.Parameter(torch.ones(3))
        sgd = torch.optim.SGD([weight], lr=0.1, momentum=0.9, fused=optimizer == "fused")
        scaler = torch.amp.GradScaler(weight.device.type, init_scale=8.0)

        def fn(x: torch.Tensor) -> None:
            sgd.zero_grad()
            loss = (weight * x).square().sum()
            if optimizer == "scaled":
                scaler.scale(loss).backward()
                scaler.step(sgd)
                scaler.update()
            else:
                loss.backward()
                sgd.step()

        step, values = wrap(fn), []
        for index in range(5):
            step(torch.full((3,), float(index + 1)))
            values.append(weight.detach().clone())
        return values

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.DeviceGraphWarning)
        for got, want in zip(trained(graphed), trained(lambda fn: fn), strict=True):
            same(got, want)


def test_parameter_that_the_first_call_made_may_be_removed() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight: nn.Parameter | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.weight is None:
                self.weight = nn.Parameter(torch.ones(3))
            return x * self.weight

    module, x = Lazy(), torch.ones(3)
    graphed(module)
    with torch.no_grad():
        for index in range(3):
            same(module(x), x * 2**index)
            assert module.weight is not None
            module.weight.mul_(2)
        module.weight = None
        same(module(x), x)


def test_iterator_of_a_step_survives_a_failed_capture() -> None:
    weights = [torch.full((3,), float(index)) for index in range(3)]
    turns = itertools.cycle(weights)
    step = graphed(lambda x: x * next(turns))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.DeviceGraphWarning)
        for _ in range(9):
            assert isinstance(step(torch.ones(3)), torch.Tensor)
    assert {id(next(turns)) for _ in range(3)} == {*map(id, weights)}


def test_weights_that_a_hook_computes_outside_of_the_graph_run_eagerly() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        modules = [nn.utils.spectral_norm(nn.Linear(4, 3)) for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    graphed(modules[0])
    with pytest.warns(dg.DeviceGraphWarning, match="a hook of the module computes weight"):
        for _ in range(4):
            x = torch.randn(2, 4)
            same(*(module(x) for module in modules))


def test_argument_that_the_step_makes_require_gradients_is_copied() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(x.requires_grad_().square().sum(), x)[0]

    step = graphed(fn)
    for _ in range(4):
        x = torch.randn(3)
        same(step(x), 2 * x)
    assert step.stats()["replays"] == 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_a_graphed_module_run_in_calls_of_the_callable(when: str) -> None:
    module, seen = nn.Linear(4, 4), list[int]()

    def register() -> None:
        module.register_forward_pre_hook(lambda _, args: (args[0] + 1,))
        module.register_forward_hook(lambda _, args, output: (seen.append(1), output * 2)[1])

    if when == "before":
        register()
    step = graphed(module)
    if when == "after":
        register()
    with torch.no_grad():
        for calls in range(1, 5):
            x = torch.randn(2, 4)
            same(step(x), nn.functional.linear(x + 1, module.weight, module.bias) * 2)
            assert len(seen) == calls
    assert step.stats()["replays"] == 3
    dg.ungraphed(module)
    with pytest.raises(dg.StateError, match="closed"):
        step(x)


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.ones(3)), 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.factor


def _with_eval(module: Any) -> None:
    module[1].eval()


def _with_weight(module: Any) -> None:
    module[0].weight = nn.Parameter(torch.full((3,), 4.0))


def _with_factor(module: Any) -> None:
    module[0].factor = 5.0


@pytest.mark.parametrize("change", [_with_eval, _with_weight, _with_factor])
@pytest.mark.parametrize("is_bound", [False, True], ids=["module", "method"])
@pytest.mark.parametrize("with_gradients", [False, True], ids=["inference", "training"])
def test_change_of_an_object_in_the_arguments_is_noticed(
    change: Any, is_bound: bool, with_gradients: bool
) -> None:
    """FAULTS 46."""
    module = nn.Sequential(_Scale(), nn.Dropout(1.0))
    step = graphed(lambda model, x: model(x))
    with torch.set_grad_enabled(with_gradients):
        for turn in range(8):
            if turn == 4:
                change(module)
            x = torch.randn(3)
            same(step(module.forward if is_bound else module, x), module(x))
    counts = step.stats()
    assert counts["replays"] > 4 and counts["captures"] > 1


def test_writes_through_data_are_undone_after_a_capture() -> None:
    """FAULTS 47."""
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]

    @torch.no_grad()
    def update(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        weight.data.mul_(0.5).add_(x)
        return weight * 2

    steps = [lambda x: update(weights[0], x), graphed(lambda x: update(weights[1], x))]
    for _ in range(4):
        x = torch.randn(3)
        same(*(step(x) for step in steps))
        same(*weights)
    assert steps[1].stats()["replays"] == 3


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copy_of_a_graphed_module_has_no_graphs(how: Any) -> None:
    """FAULTS 29."""
    module, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(2, 3)
    step = graphed(module)
    with torch.no_grad():
        want = [module(x) for _ in range(3)][-1]
        twin = how(module)
        twin[0].weight.add_(1)
        same(twin(x), nn.Sequential(*twin)(x))
        same(module(x), want)
        again = graphed(twin)
        for _ in range(3):
            same(again(x), nn.Sequential(*twin)(x))
    for take in (copy.deepcopy, pickle.dumps):
        with pytest.raises(dg.InputTypeError, match="ungraphed"):
            take(step)


def test_slice_is_a_key() -> None:
    step, x = graphed(lambda x, part: x[part] * 2), torch.randn(6)
    for part in (slice(0, 2), slice(3, 5)) * 3:
        same(step(x, part), x[part] * 2)
    assert step.stats()["replays"] == 4


def test_methods_of_one_name_have_graphs_of_their_own() -> None:
    class Base:
        scale = 2.0

        @dg.graphed()
        def act(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

        shift = dg.graphed(lambda self, x: x + self.scale)
        back = dg.graphed(lambda self, x: x - self.scale)

    class Child(Base):
        @dg.graphed()
        def act(self, x: torch.Tensor) -> torch.Tensor:
            return super().act(x) * 3

    child = Child()
    for _ in range(4):
        x = torch.randn(2)
        same(child.act(x), x * 2.0 * 3)
        same(child.shift(x), x + 2.0)
        same(child.back(x), x - 2.0)


class Scaled:
    """An instance with a graphed method, to be copied."""

    def __init__(self) -> None:
        self.scale = 2.0

    @dg.graphed()
    def act(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    @classmethod
    @dg.graphed()
    def twice(cls, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))]
)
def test_copy_of_an_instance_has_its_own_graphs(copied: Any) -> None:
    one, x = Scaled(), torch.randn(3)
    for _ in range(3):
        one.act(x)
    other = copied(one)
    other.scale = 5.0
    for _ in range(3):
        same(other.act(x), x * 5.0)
        same(one.act(x), x * 2.0)
        same(Scaled.twice(x), x * 2)


@pytest.mark.parametrize("grad", [True, False])
def test_weights_that_are_swapped_without_an_assignment_are_noticed(grad: bool) -> None:
    """``functional_call`` and None reach tables of a module without a report of torch."""
    module = nn.Sequential(*[nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4)])
    plain, x = copy.deepcopy(module), torch.randn(2, 3)
    graphed(module)
    swapped = {name: torch.randn_like(p) for name, p in plain.named_parameters()}
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            same(module(x), plain(x))
            expected = torch.func.functional_call(plain, swapped, (x,))
            same(torch.func.functional_call(module, swapped, (x,)), expected)
        same(module(x), plain(x))
        for each in (module, plain):
            each[3][0].bias = None
        same(module(x), plain(x))


def test_removed_hook_of_all_modules_is_noticed() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    graphed(module)
    x = torch.randn(2, 3)
    with torch.no_grad():
        before = module(x)
        hook = nn.modules.module.register_module_forward_hook(lambda m, i, out: out * 2)
        for _ in range(3):
            module(x)
        hook.remove()
        for _ in range(3):
            same(module(x), before)


def test_calls_that_torch_records_run_eagerly() -> None:
    """Forward differentiation and a checkpoint around the call need the operations of the call."""
    module = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    plain = copy.deepcopy(module)
    step = graphed(module)
    x, tangent = torch.randn(2, 3), torch.randn(2, 3)

    def forward(each: nn.Module) -> torch.Tensor:
        with forward_ad.dual_level():
            dual = each(forward_ad.make_dual(x, tangent))
            return forward_ad.unpack_dual(dual).tangent.detach()

    for _ in range(4):
        same(forward(module), forward(plain))
        found = []
        for each in (module, plain):
            given = x.clone().requires_grad_()
            checkpoint(each, given, use_reentrant=False).sum().backward()
            found.append(given.grad)
        same(*found)
        module(x).sum().backward()
    assert step.stats()["replays"] == 3


def test_strides_of_an_argument_decide_the_branch_of_the_step() -> None:
    step = graphed(lambda x: x.view(-1) if x.is_contiguous() else x.t().reshape(-1))
    for _ in range(4):
        wide = torch.randn(3, 8)
        for x in (wide, wide[:, ::2], wide.t(), torch.randn(1, 8).expand(3, 8)):
            same(step(x), x.view(-1) if x.is_contiguous() else x.t().reshape(-1))


def test_tensor_that_is_returned_twice_is_one_tensor() -> None:
    def twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y, y

    step = graphed(twice)
    for _ in range(3):
        one, other = step(torch.randn(3))
        assert one is other


def test_old_keys_without_graphs_are_forgotten(monkeypatch: Any) -> None:
    monkeypatch.setattr("devgraph.api.callables._MAX_KEYS", 8)
    step = graphed(lambda x, k: x * k)
    for k in range(40):
        step(torch.ones(2), k)
    assert step.stats()["keys"] == 8


def test_graphs_that_other_threads_close_are_captured_again() -> None:
    step = graphed(lambda x, k: x * k, max_graphs=2)
    xs = [torch.randn(4) for _ in range(120)]

    def call(i: int) -> torch.Tensor:
        if i % 20 == 0:
            step.invalidate()
        return step(xs[i], i % 4)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for i, found in enumerate(pool.map(call, range(len(xs)))):
            same(found, xs[i] * (i % 4))


class GraphedForward(nn.Module):
    @graphed
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class GraphedRun:
    @graphed
    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def graphed_module() -> nn.Module:
    module = nn.Linear(3, 3)
    graphed(module)
    return module


@pytest.mark.parametrize("make", [graphed_module, GraphedForward, lambda: GraphedRun().run])
def test_graphed_callable_is_compiled_as_one_graph(make: Any) -> None:
    called, x = make(), torch.randn(2, 3)
    compiled = torch.compile(lambda x: called(x) + 1, backend="eager", fullgraph=True)
    same(compiled(x), called(x) + 1)


def test_hooks_and_attributes_of_tensors_are_state_of_the_step() -> None:
    """A hook may write its parameter, and another argument may have another attribute."""
    weights = [nn.Parameter(torch.arange(3.0)) for _ in range(2)]
    rate = [-0.1]

    def descend(p: Any) -> None:
        p.data.add_(p.grad, alpha=rate[0])
        p.grad = None

    for weight in weights:
        weight.register_post_accumulate_grad_hook(descend)

    def step_of(weight: torch.Tensor) -> Any:
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = (weight * x).square().sum()
            loss.backward()
            return loss.detach()

        return step

    called, plain = graphed(step_of(weights[0])), step_of(weights[1])
    for at in range(6):
        rate[0] = -0.1 if at < 3 else -0.2
        same(called(torch.ones(3)), plain(torch.ones(3)))
    scaled = graphed(lambda x: x * x.scale)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.DeviceGraphWarning)
        for at in range(4):
            x = torch.ones(3)
            x.scale = torch.full((3,), float(at))  # type: ignore[attr-defined]
            same(scaled(x), x * at)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x, x), lambda x: [x]], ids=type)
def test_an_eager_call_that_replaces_a_tensor_drops_the_graphs_that_read_it(wrap):
    cache = {}

    def denoise(x, step):
        if step == 0:
            cache["features"] = wrap(x * 2)
        features = cache["features"]
        return x + (features if isinstance(features, torch.Tensor) else features[0])

    run = graphed(denoise)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the key of step 0 cannot be captured
        for _ in range(4):
            first = torch.randn(4)
            for step in (0, 1, 1, 1):
                x = torch.randn(4) if step else first
                torch.testing.assert_close(run(x, step), x + first * 2)
    assert run.stats()["replays"] >= 4
