"""Gradients, modules in reach and random numbers of the host, around a capture."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import queue
import random
import sys
import types
import weakref
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

import devgraph as dg
from devgraph.api.guard import Guard
from devgraph.api.owned import Weights
from devgraph.testing.conformance.support import Kit


@pytest.mark.parametrize("start", ["none", "zeros"])
def test_gradient_that_a_step_adds_to_begins_at_its_old_value(kit: Kit, start: str) -> None:
    """FAULTS 47."""
    weight = kit.tensor(3).requires_grad_()
    weight.grad = None if start == "none" else kit.tensor(3, seed=8)
    want = torch.zeros_like(weight) if start == "none" else weight.grad.clone()

    def step(x: Any) -> Any:
        (weight * x).sum().backward()
        return weight.grad * 1

    x = kit.tensor(3, seed=1)
    captured = kit.capture(step, x)
    for seed in (4, 5):
        kit.refill(x, seed)
        want += x
        kit.same(captured.replay(), want)
    assert captured.prove(cases=1).ok


def test_gradient_that_the_step_makes_anew_stays_with_the_graph_after_a_proof(kit: Kit) -> None:
    weight = kit.tensor(3).requires_grad_()

    def step(x: Any) -> None:
        weight.grad = None
        (weight * x).sum().backward()

    x = kit.tensor(3, seed=1)
    captured = kit.capture(step, x)
    captured.prove(cases=1)
    kit.refill(x, 4)
    captured.replay()
    kit.same(weight.grad, x)


def test_capture_keeps_no_copies_of_its_state(kit: Kit) -> None:
    x = kit.tensor(54321)
    captured = kit.capture(lambda x: (x * 2)[:1].clone(), x)
    alike = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == x.shape]
    memory = {t.untyped_storage().data_ptr() for t in alike} - {x.untyped_storage().data_ptr()}
    owned = captured._job.owned
    assert not owned._saved and owned._first is None
    assert len(memory) <= 1  # the result of the product


def test_gradient_that_the_caller_drops_begins_at_zero_again(kit: Kit) -> None:
    weight = kit.tensor(3).requires_grad_()

    def step(x: torch.Tensor) -> torch.Tensor:
        (weight * x).sum().backward()
        return x * 1

    captured = kit.capture(step, kit.tensor(3, seed=1))
    for seed in (2, 3, 4):
        x = kit.tensor(3, seed=seed)
        weight.grad = None  # as zero_grad() does
        captured.replay(x)
        kit.same(weight.grad, x)
    captured.replay(x)
    kit.same(weight.grad, 2 * x)
    weight.grad = torch.zeros_like(weight)
    with pytest.raises(dg.StateError, match=r"the gradient of .* is no longer the captured tensor"):
        captured.replay(x)


@pytest.mark.parametrize("inner", [False, True])
def test_hook_in_the_place_of_another_is_noticed(kit: Kit, inner: bool) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).to(kit.device)
    held, x = module[0] if inner else module, kit.tensor(2, 3)

    def doubled(module: Any, args: Any, output: Any) -> Any:
        return output * 2

    handle = held.register_forward_hook(doubled)
    captured = kit.capture(module, x)
    handle.remove()
    handle = held.register_forward_hook(doubled)
    kit.same(captured.replay(), module(x))
    handle.remove()
    held.register_forward_hook(lambda module, args, output: output * 3)
    with pytest.raises(dg.StateError, match="different hooks"):
        captured.replay()


def test_closed_capture_keeps_no_gradient(kit: Kit) -> None:
    weight = torch.nn.Parameter(kit.tensor(3))
    captured = kit.capture(lambda x: (weight * x).sum().backward(), kit.tensor(3))
    captured.replay()
    captured.close()
    assert weight.grad is not None
    held = weakref.ref(weight.grad)
    weight.grad = None
    gc.collect()
    assert held() is None


def test_failed_capture_leaves_no_gradient_behind(kit: Kit) -> None:
    weight = kit.tensor(3).requires_grad_()

    def step(x: Any) -> None:
        (weight * x).sum().backward()
        raise ValueError

    with pytest.raises(ValueError):
        kit.capture(step, kit.tensor(3))
    assert weight.grad is None


def test_refused_capture_leaves_python_state_as_it_was(kit: Kit) -> None:
    """FAULTS 1: also the number of runs, which eager runs count from."""
    count, holder, rng = [0], types.SimpleNamespace(calls=0), random.Random(7)
    first = rng.getstate()

    def step(x: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        holder.calls += 1
        rng.random()
        return x * float(x.sum())

    with pytest.raises(dg.CaptureError):
        kit.capture(step, kit.tensor(3))
    assert (count[0], holder.calls) == (0, 0)
    assert rng.getstate() != first  # which is not put back


def hooked(module: torch.nn.Module, kind: str, keep: Any) -> None:
    if kind == "forward":
        module.register_forward_hook(lambda m, args, out: keep("h", out))
    elif kind == "before":
        module.register_forward_pre_hook(lambda m, args: keep("h", args[0] * 2))
    elif kind == "partial":
        module.register_forward_hook(
            functools.partial(lambda name, m, a, out: keep(name, out), "h")
        )
    elif kind == "backward":
        module.register_full_backward_hook(lambda m, inputs, outs: keep("h", outs[0] * 2))
    else:
        module.weight.register_hook(lambda grad: keep("h", grad * 2))


@pytest.mark.parametrize("kind", ["forward", "before", "partial", "backward", "gradient"])
def test_hook_that_keeps_a_tensor_is_refused(kit: Kit, kind: str) -> None:
    """Later calls would find the tensor of the capture, in memory that the graph reuses."""
    module = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in "ab"]).to(kit.device)
    held: dict[str, torch.Tensor] = {}
    hooked(module[0], kind, held.__setitem__)

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(module(x).sum(), (x, *module.parameters()))[0]

    with pytest.raises(dg.CaptureError, match=r"the step (replaces|adds) keep\['h'\]"):
        kit.capture(step, kit.tensor(2, 3))


def test_queue_and_iterator_that_the_step_moves_are_refused(kit: Kit) -> None:
    kept: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    with pytest.raises(dg.CaptureError, match="the step adds kept"):
        kit.capture(lambda x: kept.put(x * 2) or x + 1, kit.tensor(3))
    turns = itertools.cycle([kit.tensor(3), kit.tensor(3, seed=1)])
    with pytest.raises(dg.CaptureError, match="the step advances turns.* pass it as an argument"):
        kit.capture(lambda x: x * next(turns), kit.tensor(3))


def test_hook_of_all_modules_is_in_reach(kit: Kit) -> None:
    module, on = torch.nn.Linear(3, 3).to(kit.backend.device), [False]
    handle = register_module_forward_hook(lambda m, args, out: out * 2 if on[0] else None)
    try:
        captured = kit.capture(lambda x: module(x), kit.tensor(2, 3))
        captured.replay()
        on[0] = True
        with pytest.raises(dg.StateError, match=r"on\[0\] is True and was False"):
            captured.replay()
    finally:
        handle.remove()


class Doubled(torch.nn.Linear):
    """A class that a module is given later."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_class_of_a_module_is_compared(kit: Kit) -> None:
    module = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in "ab"]).to(kit.device)
    captured = kit.capture(module, kit.tensor(2, 3))
    captured.replay()
    module[0].__class__ = Doubled
    with pytest.raises(dg.StateError, match="has a different class or forward"):
        captured.replay()
    module[0].__class__ = torch.nn.Linear
    captured.replay()


def test_change_of_another_module_leaves_the_guard_as_it_is(kit: Kit) -> None:
    """A new guard of a large model takes milliseconds, and hooks of tensors are counted as well."""
    module, x = torch.nn.Linear(3, 3).to(kit.device), kit.tensor(2, 3)
    weights = Weights([module], modes=True)
    guard = Guard([weights])
    guard.settle()
    same = guard.same
    assert same()
    other = torch.nn.Linear(2, 2)
    x.requires_grad_().register_hook(lambda gradient: gradient)
    assert other.weight is not None
    assert not same()
    guard.settle()
    assert guard.same is same
    assert same()
    module.extra = torch.nn.Parameter(kit.tensor(3))  # the graph does not use it
    guard.settle()
    assert guard.same()
    module.weight = torch.nn.Parameter(kit.tensor(3, 3))
    assert not guard.same()
    with pytest.raises(dg.StateError, match="'weight' of a module"):
        guard.settle()


def test_module_that_the_step_names_is_compared_after_assignments(kit: Kit) -> None:
    """FAULTS 10."""
    module, x = torch.nn.Linear(3, 3).to(kit.device), kit.tensor(2, 3)
    captured = kit.capture(lambda x: module(x), x)
    module.weight = torch.nn.Parameter(kit.tensor(3, 3))
    with pytest.raises(dg.StateError, match="'weight' of a module"):
        captured.replay()


def test_tensor_that_the_step_names_is_compared(kit: Kit) -> None:
    """FAULTS 10."""
    weight, x = kit.tensor(3), kit.tensor(3, seed=1)

    def step(x: Any) -> Any:
        return x * weight

    captured = kit.capture(step, x)
    kit.same(captured.replay(), x * weight)
    weight = kit.tensor(3, seed=5)
    with pytest.raises(dg.StateError, match="weight is no longer the captured tensor"):
        captured.replay()


def test_switch_between_training_and_evaluation_is_noticed(kit: Kit) -> None:
    module, x = torch.nn.Dropout(0.5).eval(), kit.tensor(3)
    captured = kit.capture(torch.nn.Sequential(torch.nn.ReLU(), module).eval(), x)
    kit.same(captured.replay(), x.relu())
    outer = torch.nn.Sequential(torch.nn.ReLU(), module).eval()
    captured = kit.capture(outer, x)
    outer.train()
    with pytest.raises(dg.StateError, match=r"in training mode"):
        captured.replay()


def test_parameter_that_is_frozen_or_released_is_noticed(kit: Kit) -> None:
    net, x = torch.nn.Linear(4, 2).to(kit.device), kit.tensor(3, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        return loss.detach()

    captured = kit.capture(step, x)
    captured.replay()
    net.bias.requires_grad_(False)
    with pytest.raises(dg.StateError, match="requires_grad is False and was True"):
        captured.replay()
    net.bias.requires_grad_(True)
    captured.replay()


def test_flag_of_a_tensor_that_the_step_reads_is_noticed(kit: Kit) -> None:
    weight, x = kit.tensor(3), kit.tensor(3)
    captured = kit.capture(lambda x: x * (weight if weight.requires_grad else 2), x)
    kit.same(captured.replay(), x * 2)
    weight.requires_grad_(True)
    with pytest.raises(dg.StateError, match="requires_grad is True and was False"):
        captured.replay()


def test_lazy_module_is_captured(kit: Kit) -> None:
    module, x = torch.nn.LazyLinear(2).to(kit.device), kit.tensor(3, 4)
    with pytest.warns(dg.DeviceGraphWarning, match="in_features"):
        captured = kit.capture(module, x)
    kit.refill(x, 4)
    kit.same(captured.replay(), module(x))


@pytest.mark.parametrize("source", ["random", "numpy.random"])
def test_random_numbers_of_the_host_are_named(kit: Kit, source: str) -> None:
    if source == "numpy.random":
        pytest.importorskip("numpy")
    draw = random.random if source == "random" else sys.modules["numpy"].random.rand
    with pytest.warns(dg.DeviceGraphWarning, match=f"position of .*{source.rpartition('.')[0]}"):
        kit.capture(lambda x: x * float(draw()), kit.tensor(3))


def test_input_that_a_kernel_writes_without_a_new_version_gets_its_new_contents() -> None:
    """The fuzzer found it: a write through a raw pointer changes no version counter."""

    def step(x: torch.Tensor) -> torch.Tensor:
        version = x._version
        x.add_(1)
        torch._C._autograd._unsafe_set_version_counter((x,), (version,))
        return x * 2

    x = torch.zeros(3)
    with dg.capture(step, x, backend="cpu", warmup=2) as captured:
        new = torch.full((3,), 5.0)
        captured.replay(new)
        assert new.tolist() == [6.0] * 3


def test_parametrization_that_the_caller_caches_is_part_of_the_graph(kit: Kit) -> None:
    parametrize = torch.nn.utils.parametrize
    module = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3))
    module.requires_grad_(False).to(kit.device)
    with parametrize.cached():
        module(kit.tensor(2, 3))
        captured = kit.capture(module, kit.tensor(2, 3))
    module.parametrizations.weight.original0.mul_(2)
    kit.same(captured.replay(), module(kit.tensor(2, 3)))


@pytest.mark.parametrize("is_read", [False, True])
def test_state_that_only_eager_bodies_use_causes_no_warning(is_read: bool) -> None:
    calls = [0]

    @dg.no_graph
    def count(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return x * 2

    def reading(x: torch.Tensor) -> torch.Tensor:
        return count(x) + calls[0]

    step = reading if is_read else lambda x: count(x) + 1
    with (
        pytest.warns(dg.DeviceGraphWarning, match=r"calls\[0\] from 0 to 1")
        if is_read
        else contextlib.nullcontext()
    ):
        captured = dg.capture(step, torch.ones(2), policy="breakable", backend="cpu", warmup=0)
    before = calls[0]
    captured.replay()
    assert calls[0] == before + 1


@pytest.mark.parametrize("kind", [list, dict])
def test_tensor_that_only_the_first_run_removes_is_named(kit: Kit, kind: type) -> None:
    """FAULTS 47."""
    held = kind([(0, kit.tensor(2))]) if kind is dict else [kit.tensor(2)]

    def step(x: torch.Tensor) -> torch.Tensor:
        held.clear()
        return x * 2

    with pytest.warns(dg.DeviceGraphWarning, match=r"held\[0\] from .* to absent"):
        dg.capture(step, kit.tensor(2), backend=kit.backend).close()
