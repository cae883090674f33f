"""State that a step reaches through objects of Python and torch."""

from __future__ import annotations

import contextvars
import functools
import gc
import itertools
import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.reach import Watch, entries
from devgraph.testing.conformance.support import Kit


def _generator(start: Any) -> Any:
    total = start
    while True:
        total = total + (yield total * 1)


def _holders(start: Any) -> dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]]:
    """Return steps that write a tensor in place, and steps that replace it, by the holder."""
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("variable")
    variable.set(start)
    local = threading.local()
    local.value = start

    class Key:
        pass

    key = Key()
    table: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary({key: start})
    running = _generator(start)
    next(running)
    group, reference = {start}, weakref.ref(start)

    def add(x: Any) -> Any:
        group.clear()
        group.add(start + x)
        return x * 1

    return {
        "context variable": (
            lambda x: variable.get().add_(x) * 1,
            lambda x: variable.set(variable.get() + x) and x * 1,
        ),
        "thread local": (
            lambda x: local.value.add_(x) * 1,
            lambda x: setattr(local, "value", local.value + x) or x * 1,
        ),
        "weak dictionary": (
            lambda x: table[key].add_(x) * 1,
            lambda x: table.update({key: table[key] + x}) or x * 1,
        ),
        "generator": (
            lambda x: running and start.add_(x) * 1,
            lambda x: running.send(x),
        ),
        "set": (lambda x: next(iter(group)).add_(x) * 1, add),
        "weak reference": (lambda x: reference().add_(x) * 1, lambda x: reference().set_(x * 2)),
    }


HOLDERS = sorted(_holders(torch.zeros(3)))


@pytest.mark.parametrize("holder", HOLDERS)
def test_tensor_in_an_object_of_python_is_put_back(kit: Kit, holder: str) -> None:
    """FAULTS 47."""
    start, x = kit.tensor(3), kit.tensor(3, seed=1)
    before, want = start.clone(), start.clone()
    captured = kit.capture(_holders(start)[holder][0], x)
    kit.same(start, before)
    for seed in (4, 5):
        kit.refill(x, seed)
        want += x
        kit.same(captured.replay(), want)
        kit.same(start, want)


@pytest.mark.parametrize("holder", HOLDERS)
def test_tensor_that_a_step_replaces_in_an_object_of_python_is_refused(
    kit: Kit, holder: str
) -> None:
    """FAULTS 45."""
    start = kit.tensor(3)
    with pytest.raises(dg.CaptureError, match="the step (replaces|removes|adds|changes)"):
        kit.capture(_holders(start)[holder][1], kit.tensor(3, seed=1))


def test_cached_function_keeps_a_constant_and_may_not_keep_state(kit: Kit) -> None:
    @functools.lru_cache
    def table() -> Any:
        return torch.ones(3, device=kit.device)

    x = kit.tensor(3)
    captured = kit.capture(lambda x: x + table(), x)
    kit.refill(x, 4)
    kit.same(captured.replay(), x + 1)
    table.cache_clear()
    with pytest.raises(dg.CaptureError, match="first run of the step creates table"):
        kit.capture(lambda x: table().add_(x) * 1, x)


def test_counter_of_python_is_named(kit: Kit) -> None:
    """FAULTS 47."""
    numbers = itertools.count()
    with pytest.warns(dg.DeviceGraphWarning, match=r"numbers from 'count\(0\)' to 'count\(3\)'"):
        kit.capture(lambda x: x * next(numbers), kit.tensor(3))


ITERATORS: dict[str, Any] = {
    "cycle": lambda: itertools.cycle([1.0, 2.0, 3.0]),
    "list": lambda: iter([1.0, 2.0, 3.0, 4.0, 5.0]),
    "map": lambda: map(float, range(9)),
    "keys": lambda: iter({1.0: 0, 2.0: 0, 3.0: 0, 4.0: 0}),
}


@pytest.mark.parametrize("kind", ITERATORS)
def test_iterator_that_the_step_advances_is_named(kit: Kit, kind: str) -> None:
    """FAULTS 47."""
    values = ITERATORS[kind]()
    with pytest.warns(dg.DeviceGraphWarning, match="values advanced"):
        kit.capture(lambda x: x * next(values), kit.tensor(3))


def test_rate_that_a_scheduler_in_the_step_changes_is_named(kit: Kit) -> None:
    """FAULTS 47."""
    weight = kit.tensor(3).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        (weight * x).sum().backward()
        optimizer.step()
        scheduler.step()
        return weight.detach() * 1

    with pytest.warns(dg.DeviceGraphWarning, match=r"param_groups\[0\]\['lr'\] from 0\.5 to"):
        kit.capture(step, kit.tensor(3))


def test_buffers_that_take_turns_are_refused(kit: Kit) -> None:
    """FAULTS 45."""
    buffers = [kit.tensor(3), kit.tensor(3, seed=1)]

    def step(x: torch.Tensor) -> torch.Tensor:
        buffers[1].copy_(buffers[0] + x)
        buffers.reverse()
        return buffers[0] * 1

    before = [*buffers]
    with pytest.raises(dg.CaptureError, match=r"exchanges tensors: buffers\[0\] .*copy_"):
        kit.capture(step, kit.tensor(3, seed=2))
    assert all(map(operator.is_, buffers, before))


def test_tensor_as_a_key_is_named_without_its_data(kit: Kit) -> None:
    key = kit.tensor(3)
    state = {key: {"n": kit.tensor(3)}}

    def step(x: torch.Tensor) -> torch.Tensor:
        state[key]["n"].add_(x)
        return state[key]["n"] * 1

    x = kit.tensor(3, seed=2)
    captured, want = kit.capture(step, x), state[key]["n"] + x
    kit.same(captured.replay(), want)
    state[key]["n"] = kit.tensor(3)
    with pytest.raises(dg.StateError):
        captured.replay()


class Wrapper(torch.Tensor):
    """A tensor that wraps another."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, *_: Any) -> Any:
        return Wrapper(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = torch.utils._pytree.tree_map_only(Wrapper, lambda t: t.inner, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        return Wrapper(out) if isinstance(out, torch.Tensor) else out


def test_tensor_that_wraps_another_is_taken_apart(kit: Kit) -> None:
    start = kit.tensor(3)
    weight, before, x = Wrapper(start), start.clone(), kit.tensor(3, seed=1)

    def step(x: Any) -> Any:
        weight.inner.mul_(2)
        return weight * x

    captured = kit.capture(step, x)
    kit.same(start, before)
    kit.refill(x, 4)
    kit.same(captured.replay().inner, before * 2 * x)
    assert captured.prove(cases=1).ok


def test_state_of_a_compiled_module_of_torchscript_is_found() -> None:
    module = torch.jit.script(torch.nn.Linear(3, 3))
    found = [entry.path for entry in entries([("m", module)])]
    assert {"m.weight", "m.bias"} <= set(found)
    Watch([("m", module)]).put_back()


def test_gradients_of_tensors_are_state() -> None:
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.zeros(3)
    assert [e.path for e in entries([("box", {"w": weight})])] == ["box['w']", "box['w'].grad"]


def test_searched_code_and_classes_are_freed(kit: Kit) -> None:
    source = "class Held:\n __slots__ = ()\n def run(self, x): return x * 2\nheld = Held()\n"
    space: dict[str, Any] = {}
    exec(f"{source}def step(x): return held.run(x)", space)
    kit.capture(space["step"], kit.tensor(2)).close()
    ended = [weakref.ref(item) for item in (space["Held"], space["step"].__code__)]
    space.clear()
    gc.collect()
    assert [end() for end in ended] == [None, None]
