"""Replays that capture again: state that the step finds by itself changed since the capture."""

from __future__ import annotations

import collections
import configparser
import contextlib
import contextvars
import ctypes
import dataclasses
import enum
import functools
import logging
import multiprocessing
import operator
import os
import queue
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import devgraph as dg
from devgraph.api import capture as module_of_capture
from devgraph.api.errors import DeviceGraphWarning
from devgraph.api.trees import children_of

POLICIES = ("full", "breakable")
AGAIN = "captured the step again"
NOTHING = contextlib.nullcontext()

SCALE = 2.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0), nn.BatchNorm1d(4))
        self.gain = 1.5
        self.table = {"shift": torch.ones(4)}

    def forward(self, x: Any) -> Any:
        out = self.inner(x) * self.gain * SCALE + self.table["shift"]
        return torch.tanh(out) if self.training else out


def _other_global(module: Block) -> None:
    global SCALE
    SCALE += 1.0


def _doubled(_: Any, args: Any, output: Any) -> Any:
    return output * 2


def _hooked(module: Block) -> None:
    module.inner[0].register_forward_hook(_doubled)


def _other_forward(module: Block) -> None:
    module.forward = types.MethodType(lambda self, x: self.inner(x) * 5, module)  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Block], Any]] = {
    "parameter": lambda m: setattr(m.inner[0], "weight", nn.Parameter(torch.randn(4, 4))),
    "data": lambda m: setattr(m.inner[0].weight, "data", torch.randn(4, 4)),
    "buffer": lambda m: setattr(m.inner[2], "running_mean", torch.randn(4)),
    "submodule": lambda m: m.inner.__setitem__(0, nn.Linear(4, 4, bias=False)),
    "mode": lambda m: m.eval(),
    "hook": _hooked,
    "forward": _other_forward,
    "attribute": lambda m: setattr(m, "gain", 0.25),
    "entry": lambda m: m.table.update(shift=torch.randn(4)),
    "global": _other_global,
}


@pytest.fixture(params=POLICIES)
def cap(request: pytest.FixtureRequest) -> Iterator[Callable[..., dg.Captured]]:
    def make(fn: Any, *args: Any, **options: Any) -> dg.Captured:
        return dg.capture(fn, *args, policy=request.param, backend="cpu", **options)

    with torch.no_grad():
        yield make


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("how", ["module", "closure"])
def test_replay_captures_changed_state_again(cap: Any, change: str, how: str) -> None:
    module = Block()
    captured = cap(module if how == "module" else lambda x: module(x), torch.randn(3, 4))
    place = captured.replay().data_ptr()
    with pytest.warns(DeviceGraphWarning, match=AGAIN):
        CHANGES[change](module)
        captured.replay(torch.randn(3, 4))
    kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for _ in range(3):
        x = torch.randn(3, 4)
        got = captured.replay(x)
        assert got.data_ptr() == place
        moved = {name: buffer.clone() for name, buffer in module.named_buffers()}
        module.load_state_dict(kept, strict=False)
        assert torch.equal(got, module(x))
        kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
        assert all(torch.equal(kept[name], moved[name]) for name in kept)


def test_pruned_module_computes_its_weight_in_the_graph(cap: Any) -> None:
    module = nn.Linear(4, 4)
    captured = cap(module, torch.randn(2, 4))
    prune.l1_unstructured(module, "weight", amount=0.5)
    with pytest.warns(DeviceGraphWarning, match=AGAIN):
        captured.replay()
    for _ in range(3):
        module.weight_mask.copy_((torch.randn(4, 4) > 0).float())
        x = torch.randn(2, 4)
        assert torch.equal(captured.replay(x), module(x))


def test_replays_capture_again_a_few_times_only(cap: Any) -> None:
    state = {"gain": 1.0}
    captured = cap(lambda x: x * state["gain"], torch.ones(3), recaptures=2)
    for _ in range(2):
        state["gain"] += 1
        with pytest.warns(
            DeviceGraphWarning, match=rf"{AGAIN}.*'gain'\] is .* at most 2 times"
        ) as told:
            assert torch.equal(captured.replay(), torch.ones(3) * state["gain"])
        assert "apture again" not in str(told[0].message)  # which has just happened
    state["gain"] += 1
    with pytest.raises(dg.StateError, match=r"state\['gain'\] is 4.0 and was 3.0"):
        captured.replay()
    state["gain"] -= 1
    assert torch.equal(captured.replay(), torch.full((3,), 3.0))


def test_state_that_the_caller_gave_is_refused(cap: Any) -> None:
    """FAULTS 9: arguments and ``bound=`` are promises of the caller."""
    state, tensors = {"cache": torch.ones(3)}, [torch.ones(3)]
    bound = {"cache": lambda: state["cache"]}
    captured = cap(lambda tensors: sum(tensors) * state["cache"], tensors, bound=bound)
    captured.replay()
    tensors.append(torch.ones(3))
    with pytest.raises(dg.StateError, match="2 entries and had 1"):
        captured.replay()
    tensors.pop()
    state["cache"] = torch.zeros(3)
    with pytest.raises(dg.StateError, match="bound 'cache' returns different tensors"):
        captured.replay()


def test_capture_in_a_replay_does_not_move_parameters(cap: Any) -> None:
    def trained(graphed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        xs = [torch.randn(5, 4) for _ in range(6)]
        with torch.enable_grad():
            # Warm-up of a capture moves parameters, as in torch.
            call = cap(step, xs[0].clone()) if graphed else step
            if not graphed:
                start = [p.detach().clone() for p in net.parameters()]
            else:
                start = starts
                for parameter, value in zip(net.parameters(), start, strict=True):
                    parameter.data.copy_(value)
                for held in optimizer.state.values():
                    held["momentum_buffer"].zero_()
            starts[:] = start
            losses = []
            for index, x in enumerate(xs):
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + index // 2)
                losses.append(call(x).clone())
        return [*losses, *(p.detach().clone() for p in net.parameters())]

    starts: list[torch.Tensor] = []
    want = trained(False)
    with pytest.warns(DeviceGraphWarning, match=rf"{AGAIN}.* optimizer\.param_groups\[0\]\['lr'\]"):
        got = trained(True)
    assert all(map(torch.equal, got, want))


def test_new_inputs_are_there_when_a_replay_captures_again(cap: Any) -> None:
    """FAULTS 51: the old indices are no legal data for the new table."""
    state = {"table": torch.randn(9, 2)}
    captured = cap(lambda index: state["table"][index] * 1, torch.tensor([8, 7, 8]))
    state["table"] = torch.randn(3, 2)
    index = torch.tensor([2, 0, 1])
    with pytest.warns(DeviceGraphWarning, match=AGAIN):
        assert torch.equal(captured.replay(index), state["table"][index])


def test_input_that_views_the_bound_tensor_is_copied_once(cap: Any) -> None:
    state, x = {"gain": 1.0}, torch.randn(3, 3)
    captured = cap(lambda x: x * state["gain"], x)
    state["gain"] = 3.0
    want = x.T * 3.0
    with pytest.warns(DeviceGraphWarning, match=AGAIN):
        assert torch.equal(captured.replay(x.T), want)


def test_unfit_input_is_refused_before_anything_changed(cap: Any) -> None:
    module = nn.Linear(4, 4)
    x = torch.randn(2, 4)
    captured, before = cap(module, x), x.clone()
    module.double()
    with pytest.raises(dg.InputTypeError, match="torch.float64"):
        captured.replay(torch.randn(2, 4, dtype=torch.float64))
    assert torch.equal(x, before)
    module.float()
    with pytest.warns(DeviceGraphWarning, match=AGAIN):
        assert torch.equal(captured.replay(), module(x))


def test_step_that_can_no_longer_be_captured_keeps_its_graph(cap: Any) -> None:
    state = {"reads": False}
    captured = cap(lambda x: x * (x.sum().item() if state["reads"] else 2), torch.ones(3))
    state["reads"] = True
    with pytest.raises(dg.HostReadError):
        captured.replay()
    state["reads"] = False
    assert torch.equal(captured.replay(torch.full((3,), 4.0)), torch.full((3,), 8.0))


def test_error_of_the_step_itself_is_raised(cap: Any) -> None:
    state = {"table": [torch.ones(3)]}
    captured = cap(lambda x: x * state["table"][0], torch.ones(3))
    state["table"] = []
    with pytest.raises(IndexError):
        captured.replay()


def test_outputs_of_another_layout_and_of_other_captures(cap: Any) -> None:
    state: dict[str, Any] = {"rows": 2, "whole": False}
    pool = dg.get_backend("cpu").make_pool()

    def step(x: Any) -> Any:
        return x if state["whole"] else (x[: state["rows"]] * 2, x.shape)

    first = cap(step, torch.randn(4, 4), pool=pool)
    second = cap(lambda x: x @ x, torch.randn(4, 4), pool=pool)
    state["rows"] = 3
    x = torch.randn(4, 4)
    with pytest.warns(DeviceGraphWarning, match=AGAIN):
        out, shape = first.replay(x)
    want, kept = x[:3] * 2, out
    assert torch.equal(out, want) and type(shape) is torch.Size
    assert torch.equal(second.replay(x), x @ x)
    assert torch.equal(kept, want)


def test_outputs_that_shared_memory_get_memory_of_their_own(cap: Any) -> None:
    state = {"apart": False}

    def step(x: Any) -> Any:
        y = x * 2
        return (y, y + 1) if state["apart"] else (y, y)

    captured, x = cap(step, torch.randn(3)), torch.randn(3)
    captured.replay()
    state["apart"] = True
    with pytest.warns(DeviceGraphWarning, match=AGAIN):
        one, other = captured.replay(x)
    assert torch.equal(one, x * 2) and torch.equal(other, x * 2 + 1)


def test_argument_that_was_returned_is_not_overwritten(cap: Any) -> None:
    state = {"scaled": False}
    x = torch.ones(3)
    captured = cap(lambda x: (x * 2, x * 3 if state["scaled"] else x), x)
    captured.replay()
    state["scaled"] = True
    with pytest.warns(DeviceGraphWarning, match=AGAIN):
        captured.replay()
    assert torch.equal(captured.replay()[1], torch.full((3,), 3.0))
    assert torch.equal(x, torch.ones(3))


class Act(enum.Enum):
    TANH = "tanh"
    RELU = "relu"


def _by_name(x: Any, name: str) -> Any:
    return getattr(torch, name)(x)


PLAIN: dict[str, tuple[Any, list[Any]]] = {
    "number": (lambda x, t: x * t, [2, 0.5, -1.0]),
    "text": (_by_name, ["tanh", "relu", "sigmoid"]),
    "member": (lambda x, t: _by_name(x, t.value), [Act.TANH, Act.RELU, Act.TANH]),
    "none": (lambda x, t: x + 1 if t is None else x * t, [None, 3.0, None]),
    "array": (lambda x, t: x * float(t.sum()), [np.ones(2), np.ones(3), np.zeros(1)]),
    "sizes": (lambda x, t: x.split(t)[0] * 2, [[1, 3], [2, 2], [3, 1]]),
    "configuration": (lambda x, t: x * t["gain"], [{"gain": 1.0}, {"gain": 2.0}, {"gain": 3.0}]),
    "range": (lambda x, t: x * sum(t), [range(3), range(4), range(1, 3)]),
    "set": (lambda x, t: x * len(t), [frozenset({1}), frozenset({1, 2}), frozenset({2, 3, 4})]),
    "dtype": (lambda x, t: x.to(t) * 2, [torch.float32, torch.float64, torch.float32]),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_replay_captures_again_for_another_plain_argument(cap: Any, kind: str) -> None:
    step, values = PLAIN[kind]
    captured = cap(step, torch.randn(4), values[0])
    for value in values:
        x = torch.randn(4)
        is_other = value is not values[0]
        with pytest.warns(DeviceGraphWarning, match=AGAIN) if is_other else NOTHING:
            assert torch.equal(captured.replay(x, value), step(x, value))
        x = torch.randn(4)
        assert torch.equal(captured.replay(x, value), step(x, value))
        values[0] = value
    with pytest.raises(dg.InputError):
        captured.replay(torch.randn(5), values[1])
    with pytest.raises(dg.InputTypeError, match="the same structure"):
        captured.replay(torch.randn(4), 1 if children_of(values[0]) else [1])


def test_keyword_and_state_that_change_together(cap: Any) -> None:
    state = {"shift": 1.0}
    captured = cap(lambda x, *, gain: x * gain + state["shift"], torch.ones(3), kwargs={"gain": 1})
    state["shift"] = 2.0
    with pytest.warns(DeviceGraphWarning, match=AGAIN):
        assert torch.equal(captured.replay(gain=3), torch.full((3,), 5.0))
    assert captured.stats() == {}


def test_generator_that_is_an_argument_is_used(cap: Any) -> None:
    def step(x: Any, generator: torch.Generator) -> Any:
        return x + torch.rand(3, generator=generator)

    first, second, twin = (torch.Generator().manual_seed(seed) for seed in (1, 2, 2))
    captured = cap(step, torch.zeros(3), first)
    with pytest.warns(DeviceGraphWarning, match=AGAIN):
        captured.replay(torch.zeros(3), second)
    step(torch.zeros(3), twin)
    assert torch.equal(captured.replay(torch.zeros(3), second), step(torch.zeros(3), twin))


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Any
    options: dict[str, Any]
    scale: float = 1.0


def test_plain_values_in_a_tree_of_tensors(cap: Any) -> None:
    def step(batch: Batch) -> Any:
        out = batch.x * batch.scale
        for name, value in batch.options.items():
            out = out * value + len(name)
        return out

    def made(scale: float, *names: str) -> Batch:
        return Batch(torch.randn(3), {name: torch.randn(3) for name in names} | {"n": 2}, scale)

    captured = cap(step, made(1.0, "long", "short"))
    for batch in (made(3.0, "long", "short"), made(3.0, "short", "long")):
        with pytest.warns(DeviceGraphWarning, match=AGAIN):
            assert torch.equal(captured.replay(batch), step(batch))
    for batch in (made(3.0, "short", "long"), made(3.0, "short", "long")):
        assert torch.equal(captured.replay(batch), step(batch))
    for unfit in (made(3.0, "short"), Batch(torch.randn(4), batch.options, 5.0), (1, 2)):
        with pytest.raises(dg.InputError):
            captured.replay(unfit)
    assert torch.equal(captured.replay(batch), step(batch))


def test_plain_argument_that_the_step_changes_is_refused(cap: Any) -> None:
    def step(x: Any, counter: dict[str, int]) -> Any:
        counter["n"] += 1
        return x * counter["n"]

    with pytest.warns(DeviceGraphWarning, match="changed Python state"):
        captured = cap(step, torch.ones(3), {"n": 0})
    with pytest.raises(dg.InputError, match="is 5 and was 0"):
        captured.replay(torch.ones(3), {"n": 5})


def test_ranks_never_capture_alone(cap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"gain": 1.0}
    captured = cap(lambda x: x * state["gain"], torch.ones(3))
    monkeypatch.setattr(module_of_capture, "several_ranks", lambda: True)
    state["gain"] = 2.0
    with pytest.raises(dg.StateError, match="gain"):
        captured.replay()


def test_gates_are_recorded_again() -> None:
    state = {"gain": 1.0}
    module = nn.Linear(3, 3)

    def step(x: Any) -> Any:
        dg.wait("ready")
        y = module(x) * state["gain"]
        dg.signal("done")
        return y

    with torch.no_grad():
        x = torch.randn(2, 3)
        captured = dg.capture(step, x, backend="cpu", name_nodes=True)
        for gain in (1.0, 2.0, 2.0):
            changes, state["gain"] = gain != state["gain"], gain
            captured.gates["ready"].open()
            with pytest.warns(DeviceGraphWarning) if changes else contextlib.nullcontext():
                assert torch.equal(captured.replay(), module(x) * gain)
            captured.gates["done"].wait(timeout=5)


def test_name_may_begin_another_name_of_changed_state(cap: Any) -> None:
    class Counter:
        n = 0

    counter = Counter()

    def step(x: Any, c: float, counter: Counter) -> Any:
        counter.n += 1
        return x * c

    x = torch.randn(3)
    with pytest.warns(DeviceGraphWarning, match=r"counter\.n from 1 to 3"):
        captured = cap(step, x, 2.0, counter)
    moved = pytest.warns(DeviceGraphWarning, match=r"counter\.n")
    with moved, pytest.warns(DeviceGraphWarning, match=AGAIN):
        got = captured.replay(x, 3.0, counter)
    assert torch.equal(got, x * 3)


@pytest.mark.parametrize("warmup", [1, 3])
def test_each_run_of_a_new_capture_begins_from_the_same_state(cap: Any, warmup: int) -> None:
    table, position, gain = torch.arange(4.0), torch.tensor([0]), {"g": 1.0}

    def step(x: Any) -> Any:
        page = table.index_select(0, position)
        position.add_(1)
        return x * gain["g"] + page

    x = torch.randn(3)
    captured = cap(step, x, warmup=warmup)
    for page in range(3):
        assert torch.equal(captured.replay(), x + page)
    gain["g"] = 2.0
    with pytest.warns(DeviceGraphWarning, match=AGAIN):
        assert torch.equal(captured.replay(), x * 2 + 3)
    assert position.item() == 4


@dataclasses.dataclass
class _Batch:
    x: Any
    mask: Any = None


def test_argument_that_was_none_may_be_a_tensor(cap: Any) -> None:
    def step(batch: _Batch) -> Any:
        return batch.x * 2 if batch.mask is None else batch.x * batch.mask

    captured, was_none = cap(step, _Batch(torch.randn(3))), True
    for masks in ([None, None], [torch.randn(3), torch.randn(3)], [None], [torch.randn(3)] * 2):
        for mask in masks:
            batch = _Batch(torch.randn(3), mask)
            is_other, was_none = was_none is not (mask is None), mask is None
            with pytest.warns(DeviceGraphWarning, match=AGAIN) if is_other else NOTHING:
                got = captured.replay(batch)
            assert torch.equal(got, step(batch))
    with pytest.raises(dg.InputError, match="batch.x' is None"):
        captured.replay(_Batch(None, torch.randn(3)))


class _Options:
    """An object whose attributes come from a dictionary."""

    def __init__(self) -> None:
        self.held = {"gain": 2.0}

    def __getattr__(self, name: str) -> Any:
        held = self.__dict__.get("held", {})
        if name in held:
            return held[name]
        raise AttributeError(name)

    def step(self, x: Any) -> Any:
        return x * self.gain


class _Holder:
    """An object with a tensor."""

    def __init__(self) -> None:
        self.w = torch.full((3,), 2.0)


def _with_default(x: Any, w: Any = 2.0) -> Any:
    return x * w


def _of_attribute_getter() -> Any:
    holder, get = _Holder(), operator.attrgetter("w")
    return lambda x: x * get(holder), lambda: setattr(holder, "w", torch.full((3,), 5.0))


def _of_lookup_method() -> Any:
    options = _Options()
    return options.step, lambda: options.held.update(gain=5.0)


def _of_default() -> Any:
    step = types.FunctionType(_with_default.__code__, globals(), "step", (torch.full((3,), 2.0),))
    return step, lambda: setattr(step, "__defaults__", (torch.full((3,), 5.0),))


def _of_first_run() -> Any:
    held = types.SimpleNamespace()

    def step(x: Any) -> Any:
        if not hasattr(held, "gain"):
            held.gain = 2.0
        return x * held.gain

    return step, lambda: setattr(held, "gain", 5.0)


@pytest.mark.parametrize(
    "make", [_of_attribute_getter, _of_lookup_method, _of_default, _of_first_run]
)
@pytest.mark.parametrize("is_graphed", [False, True])
def test_state_that_is_found_without_its_name_in_the_step(
    cap: Any, make: Any, is_graphed: bool
) -> None:
    step, change = make()
    x = torch.randn(3)
    captured = dg.graphed(step, backend="cpu") if is_graphed else cap(step, x)
    for _ in range(3):
        assert torch.equal(captured(x), x * 2)
    change()
    with NOTHING if is_graphed else pytest.warns(DeviceGraphWarning, match=AGAIN):
        assert torch.equal(captured(x), x * 5)
    for _ in range(3):
        assert torch.equal(captured(x), x * 5)


GAIN = 2.0


class _Name:
    n = 0

    def __str__(self) -> str:
        return f"k{self.n}"


class _Meta(type):
    gain = 2.0

    @property
    def scale(cls) -> float:
        return cls.gain


class _WithMeta(metaclass=_Meta):
    pass


class _Scaled(torch.Tensor):
    scale = 2.0


class _OfBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.full((4,), 2.0))

    def forward(self, x: Any) -> Any:
        return x * sum(self.buffers())


def _of_text() -> Any:
    name, table = _Name(), {"k0": 2.0, "k1": 5.0}
    return lambda x: x * table[str(name)], lambda: setattr(name, "n", 1)


def _of_globals() -> Any:
    return lambda x: x * globals()["GAIN"], lambda: globals().update(GAIN=GAIN + 3)


def _of_vars() -> Any:
    held = types.SimpleNamespace()
    held.a = 1.0
    return lambda x: x * (1 + len(vars(held))), lambda: [setattr(held, n, 0) for n in "bcd"]


def _of_counter() -> Any:
    counter = collections.Counter(a=2)
    return lambda x: x * (counter["a"] + counter["b"]), lambda: counter.update(b=3)


def _of_metaclass() -> Any:
    return lambda x: x * _WithMeta.scale, lambda: setattr(_Meta, "gain", _Meta.gain + 3)


def _of_tensor_class() -> Any:
    ones = torch.ones(4).as_subclass(_Scaled)
    _Scaled.scale = 2.0
    step = lambda x: x * ones.as_subclass(torch.Tensor) * type(ones).scale  # noqa: E731
    return step, lambda: setattr(_Scaled, "scale", 5.0)


def _of_tensor_attribute() -> Any:
    ones: Any = torch.ones(4)
    ones.gain = 2.0
    return lambda x: x * ones * ones.gain, lambda: setattr(ones, "gain", 5.0)


def _of_buffers() -> Any:
    module = _OfBuffers()
    return module, lambda: module.register_buffer("b", torch.full((4,), 3.0))


class _Keyed:
    table = {"a": 2.0}  # noqa: RUF012
    base = 2.0

    def __new__(cls) -> _Keyed:
        made = object.__new__(cls)
        made.base = cls.base
        return made

    def __class_getitem__(cls, key: str) -> float:
        return cls.table[key]

    @functools.singledispatchmethod
    def scaled(self, kind: object, x: Any) -> Any:
        return x

    @scaled.register
    def _(self, kind: int, x: Any) -> Any:
        return x * kind * self.table["a"]


def _of_class_entry() -> Any:
    return lambda x: x * _Keyed["a"], lambda: _Keyed.table.update(a=_Keyed.table["a"] + 1)


def _of_new_object() -> Any:
    return lambda x: x * _Keyed().base, lambda: setattr(_Keyed, "base", _Keyed.base + 1)


def _of_single_dispatch() -> Any:
    keyed = _Keyed()
    return lambda x: keyed.scaled(3, x) * 1, lambda: keyed.table.update(a=keyed.table["a"] + 1)


def _of_weak_key() -> Any:
    key = _Name()
    table = weakref.WeakKeyDictionary({key: 2.0})
    return lambda x: x * table[key], lambda: table.update({key: 5.0})


def _of_proxy() -> Any:
    table = {"a": 2.0}
    proxy = types.MappingProxyType(table)
    return lambda x: x * proxy["a"], lambda: table.update(a=5.0)


def _of_number_of_c() -> Any:
    number = ctypes.c_float(2.0)
    return lambda x: x * number.value, lambda: setattr(number, "value", 5.0)


def _of_tuple() -> Any:
    steps = ([2.0],)
    return lambda x: x * sum(steps[0]), lambda: steps[0].append(5.0)


def _of_default_list() -> Any:
    return lambda x, steps=(factors := {2.0}): x * sum(steps), lambda: factors.add(5.0)


def _of_missing_number() -> Any:
    table = {2: 3.0}
    return lambda x: x * table.get(1, 1.0), lambda: table.update({1: 5.0})


def _of_new_implementation() -> Any:
    @functools.singledispatch
    def scaled(kind: object, x: Any) -> Any:
        return x * 2

    return lambda x: scaled(1, x), lambda: scaled.register(int, lambda kind, x: x * 3)


def _of_new_local() -> Any:
    held = threading.local()
    return lambda x: x * getattr(held, "gain", 2.0), lambda: setattr(held, "gain", 5.0)


def _of_large_table() -> Any:
    table = {f"w{index}": torch.ones(4) for index in range(80)}
    step = lambda x: x * sum(table.values())  # noqa: E731
    return step, lambda: table.update(w70=torch.zeros(4))


def _of_missing_text() -> Any:
    table = {"k0": 2.0}
    step = lambda x: x * sum(table[f"k{n}"] for n in range(3) if f"k{n}" in table)  # noqa: E731
    return step, lambda: table.update(k2=5.0)


def _of_local_name() -> Any:
    held = types.SimpleNamespace(table={"a": 2.0})

    def step(x: Any) -> Any:
        table = held.table
        for key in table:
            x = x * table[key]
        return x * 1

    return step, lambda: held.table.update(b=5.0)


def _of_default_entry() -> Any:
    table = collections.defaultdict(float, a=2.0)
    return lambda x: x * table["a"] + table["b"], lambda: table.update(b=5.0)


def _of_weak_set() -> Any:
    name = _Name()
    names = weakref.WeakSet([name])
    return lambda x: x * (name.n + len(names)), lambda: names.discard(name)


def _of_weak_value() -> Any:
    old, new = nn.Linear(4, 4), nn.Linear(4, 4)
    table = weakref.WeakValueDictionary(now=old)
    return lambda x: table["now"](x), lambda: (table.update(now=new), old)


def _of_empty_cell() -> Any:
    def define() -> None:
        nonlocal factor
        factor = 3.0

    def step(x: Any) -> Any:
        try:
            return x * factor
        except NameError:
            return x * 1

    if not callable(define):
        factor = 2.0
    return step, define


def _of_removed_hook() -> Any:
    module = nn.Sequential(*(nn.Linear(4, 4) for _ in range(12)))
    handle = module[9].register_forward_hook(_doubled)
    return module, handle.remove


def _of_metaclass_length() -> Any:
    class Items(type):
        held = [1.0]  # noqa: RUF012

        def __len__(cls) -> int:
            return len(cls.held)

    kind: Any = Items("Kind", (), {})
    return lambda x: x * len(kind), lambda: Items.held.append(1.0)


def _of_event() -> Any:
    event = threading.Event()
    return lambda x: x * 2 if event.is_set() else x + 1, event.set


def _of_configuration() -> Any:
    parser = configparser.ConfigParser()
    parser.read_dict({"train": {"gain": "2"}})
    step = lambda x: x * parser.getfloat("train", "gain")  # noqa: E731
    return step, lambda: parser.set("train", "gain", "5")


def _of_shared_number() -> Any:
    number = multiprocessing.Value("d", 2.0)
    return lambda x: x * number.value, lambda: setattr(number, "value", 5.0)


def _of_log_level() -> Any:
    log = logging.getLogger("tests.recaptures")
    log.setLevel(logging.INFO)
    step = lambda x: x * 2 if log.isEnabledFor(logging.DEBUG) else x + 1  # noqa: E731
    return step, lambda: log.setLevel(logging.DEBUG)


def _of_import() -> Any:
    def step(x: Any) -> Any:
        from tests.api.test_recaptures import SCALE as scale

        return x * scale

    return step, lambda: _other_global(Block())


class _Gain(nn.Module):
    gain = 1.0

    def forward(self, weight: Any) -> Any:
        return weight * self.gain


def _of_parametrization() -> Any:
    module, scaled = nn.Linear(4, 4), _Gain()
    nn.utils.parametrize.register_parametrization(module, "weight", scaled)
    return module, lambda: setattr(scaled, "gain", 5.0)


def _of_generated_class() -> Any:
    module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))

    def change() -> None:
        next(node for node in module.graph.nodes if node.target == "1").target = "0"
        module.recompile()

    return module, change


class _Strict:
    """An object and a mapping that raise errors of their own for absent attributes."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __len__(self) -> int:
        raise RuntimeError


class _Settings:
    strict = type("_Slots", (_Strict,), {"__slots__": ("x",)})()
    empty = type("_Mapping", (_Strict, dict), {})()
    gain = 2.0


def _of_strict_objects() -> Any:
    settings = _Settings()

    def step(x: Any) -> Any:
        return x * settings.gain if settings.strict is not settings.empty else x

    return step, lambda: setattr(settings, "gain", 5.0)


def _of_many_attributes() -> Any:
    held = types.SimpleNamespace(**{f"gain{index}": 1.0 for index in range(150)})
    step = lambda x: x * sum(getattr(held, f"gain{index}") for index in range(150))  # noqa: E731
    return step, lambda: setattr(held, "gain149", 5.0)


def _of_keyword_defaults() -> Any:
    def step(x: Any, *, gain: float = 2.0) -> Any:
        return x * gain

    return step, lambda: setattr(step, "__kwdefaults__", {"gain": 5.0})


def _of_computed_global() -> Any:
    return lambda x: x * globals()["GAI" + "xN"[x.dim()]], lambda: globals().update(GAIN=GAIN + 3)


def _of_queue() -> Any:
    waiting: Any = queue.Queue()
    return lambda x: x * waiting.qsize(), lambda: waiting.put(1)


def _of_attribute_of_a_dictionary() -> Any:
    held: Any = type("_Open", (dict,), {})(gain=1.0)
    held.gain = 2.0
    return lambda x: x * held.gain * held["gain"], lambda: setattr(held, "gain", 5.0)


class _OfAbsentBuffer(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * self.shift if hasattr(self, "shift") else x


def _of_absent_buffer() -> Any:
    module = _OfAbsentBuffer()
    return module, lambda: module.register_buffer("shift", torch.full((4,), 2.0))


def _of_function_mode() -> Any:
    held = types.SimpleNamespace(gain=2.0)

    class Scaling(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None):
            return function(*args, **(kwargs or {})) * held.gain

    def step(x: Any) -> Any:
        with Scaling():
            return torch.relu(x)

    return step, lambda: setattr(held, "gain", 5.0)


def _of_attribute_that_a_function_makes() -> Any:
    def step(x: Any) -> Any:
        if not hasattr(step, "table"):
            step.table = torch.ones(4)  # type: ignore[attr-defined]
        return x * step.table  # type: ignore[attr-defined]

    return step, lambda: setattr(step, "table", torch.full((4,), 5.0))


def _of_optimizer_hook() -> Any:
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.zeros(4)
    optimizer = torch.optim.SGD([weight], lr=0.0)

    def step(x: Any) -> Any:
        weight.grad.copy_(x)
        optimizer.step()
        return weight.grad * 1

    def clear(*_: Any) -> None:
        weight.grad.zero_()

    return step, lambda: optimizer.register_step_pre_hook(clear)


def _of_version() -> Any:
    weight = torch.ones(4)
    return lambda x: x * weight + weight._version, lambda: weight.mul_(1)


def _of_attribute_that_hides_one_of_the_metaclass() -> Any:
    kind = _Meta("_Hiding", (), {})
    return lambda x: x * kind.scale, lambda: setattr(kind, "gain", _Meta.gain + 3)


def _of_format() -> Any:
    name, table = types.SimpleNamespace(n=0), {"0": 2.0, "1": 5.0}
    return lambda x: x * table["{.n}".format(name)], lambda: setattr(name, "n", 1)  # noqa: UP032


def _of_layout() -> Any:
    matrix = torch.randn(4, 4)
    return lambda x: x @ matrix, matrix.t_


def _of_code() -> Any:
    def halved(x: Any) -> Any:
        return x / 2

    def third(x: Any) -> Any:
        return x / 3

    return lambda x: halved(x) + 1, lambda: setattr(halved, "__code__", third.__code__)


def _of_loaded_module() -> Any:
    sys.modules["_loaded"] = types.ModuleType("_loaded")
    sys.modules["_loaded"].gain = 2.0  # type: ignore[attr-defined]
    other = types.ModuleType("_loaded")
    other.gain = 5.0  # type: ignore[attr-defined]

    def step(x: Any) -> Any:
        from _loaded import gain

        return x * gain

    return step, lambda: sys.modules.update(_loaded=other)


class _Doubled:
    gain = 2.0


class _Tripled:
    gain = 3.0


def _of_assigned_class() -> Any:
    held = _Doubled()
    return lambda x: x * held.gain, lambda: setattr(held, "__class__", _Tripled)


def _of_environment() -> Any:
    os.environ["_DEVGRAPH_GAIN"] = "2"

    def read(name: str) -> float:
        return float(os.environ.get(f"_DEVGRAPH_{name}", 1.0))

    return lambda x: x * read("GAIN"), lambda: os.environ.update(_DEVGRAPH_GAIN="5")


def _of_new_environment() -> Any:
    step, _ = _of_environment()
    del os.environ["_DEVGRAPH_GAIN"]
    return step, lambda: os.environ.update(_DEVGRAPH_GAIN="5")


def _of_attribute_of_a_module() -> Any:
    module, held = types.ModuleType("_module"), {"gain": 2.0}
    module.__getattr__ = lambda name: held[name]  # type: ignore[method-assign]
    return lambda x: x * module.gain, lambda: held.update(gain=5.0)


def _of_computed_method() -> Any:
    class Held:
        def run_a(self, x: Any) -> Any:
            return x * 2

    held, name = Held(), "a"

    def change() -> None:
        Held.run_a = lambda self, x: x * 5  # type: ignore[assignment]

    return lambda x: getattr(held, "run_" + name)(x), change


class _Rows(dict[str, float]):
    def __getitem__(self, name: str) -> float:
        return super().__getitem__(name) * 2


def _of_mapping_with_other_entries() -> Any:
    rows = _Rows(gain=1.0)
    return lambda x: x * rows["gain"], lambda: rows.update(gain=5.0)


def _of_class_of_a_local() -> Any:
    class Local(threading.local):
        gain = 2.0

    local = Local()
    return lambda x: x * local.gain, lambda: setattr(Local, "gain", 5.0)


def _of_parameter_list() -> Any:
    listed = nn.ParameterList([torch.ones(4)]).requires_grad_(False)
    return lambda x: x * sum(listed), lambda: listed.append(torch.ones(4))


def _of_hook_of_a_tensor() -> Any:
    weight = torch.ones(4, requires_grad=True)

    @torch.enable_grad()
    def step(x: Any) -> Any:
        return torch.autograd.grad((x * weight).sum(), weight)[0]

    return step, lambda: weight.register_hook(lambda grad: grad * 2)


def _of_backward_hook_of_a_module() -> Any:
    module = nn.Linear(4, 4)

    @torch.enable_grad()
    def step(x: Any) -> Any:
        return torch.autograd.grad(module(x.clone().requires_grad_()).sum(), module.bias)[0]

    return step, lambda: module.register_full_backward_pre_hook(lambda _, out: (out[0] * 2,))


def _of_backward() -> Any:
    factor = types.SimpleNamespace(value=2.0)

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(_: Any, grad: Any) -> Any:
            return grad * factor.value

    weight = torch.ones(4, requires_grad=True)

    @torch.enable_grad()
    def step(x: Any) -> Any:
        return torch.autograd.grad(Scaled.apply(x * weight).sum(), weight)[0]

    return step, lambda: setattr(factor, "value", 5.0)


def _of_library_function() -> Any:
    def change() -> None:
        nn.functional.silu = torch.sin  # type: ignore[assignment]

    return lambda x: nn.functional.silu(x), change


def _of_unset_variable() -> Any:
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable")
    return lambda x: x * variable.get(2.0), lambda: variable.set(5.0)


def _of_unpacked_mapping() -> Any:
    scales = {"a": 2.0}
    return lambda x: x * sum([*{**scales}.values()]), lambda: scales.update(b=3.0)


class _Kind(enum.Enum):
    SCALED = types.SimpleNamespace(gain=2.0)


def _of_value_of_an_enum() -> Any:
    held = _Kind.SCALED.value
    return lambda x: x * _Kind.SCALED.value.gain, lambda: setattr(held, "gain", held.gain + 3)


UNNAMED = [
    _of_library_function,
    _of_unset_variable,
    _of_unpacked_mapping,
    _of_value_of_an_enum,
    _of_hook_of_a_tensor,
    _of_backward_hook_of_a_module,
    _of_backward,
    _of_assigned_class,
    _of_environment,
    _of_new_environment,
    _of_attribute_of_a_module,
    _of_computed_method,
    _of_mapping_with_other_entries,
    _of_class_of_a_local,
    _of_parameter_list,
    _of_layout,
    _of_code,
    _of_loaded_module,
    _of_attribute_that_hides_one_of_the_metaclass,
    _of_format,
    _of_keyword_defaults,
    _of_computed_global,
    _of_queue,
    _of_attribute_of_a_dictionary,
    _of_absent_buffer,
    _of_function_mode,
    _of_attribute_that_a_function_makes,
    _of_optimizer_hook,
    _of_version,
    _of_many_attributes,
    _of_event,
    _of_configuration,
    _of_shared_number,
    _of_log_level,
    _of_import,
    _of_parametrization,
    _of_generated_class,
    _of_strict_objects,
    _of_metaclass_length,
    _of_missing_text,
    _of_local_name,
    _of_default_entry,
    _of_weak_set,
    _of_weak_value,
    _of_empty_cell,
    _of_removed_hook,
    _of_tuple,
    _of_default_list,
    _of_missing_number,
    _of_new_implementation,
    _of_new_local,
    _of_large_table,
    _of_class_entry,
    _of_new_object,
    _of_single_dispatch,
    _of_weak_key,
    _of_proxy,
    _of_number_of_c,
    _of_text,
    _of_globals,
    _of_vars,
    _of_counter,
    _of_metaclass,
    _of_tensor_class,
    _of_tensor_attribute,
    _of_buffers,
]


@pytest.mark.parametrize("make", UNNAMED)
def test_state_that_code_reads_indirectly_is_compared(
    cap: Any, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.functional, "silu", nn.functional.silu)  # restored after the test
    step, change = make()
    x = torch.randn(4)
    captured = cap(step, x)
    for _ in range(2):
        assert torch.equal(captured(x), step(x))
    change()
    with pytest.warns(DeviceGraphWarning, match=AGAIN):
        assert torch.equal(captured(x), step(x))
    assert torch.equal(captured(x), step(x))


@pytest.mark.parametrize("is_graphed", [False, True])
def test_change_that_only_turns_find_is_said_to_be_late(cap: Any, is_graphed: bool) -> None:
    module, x = nn.Sequential(*(nn.Linear(4, 4) for _ in range(30))), torch.randn(4)
    with torch.no_grad():
        captured = dg.graphed(lambda x: module(x), backend="cpu") if is_graphed else cap(module, x)
        for _ in range(3):
            captured(x)
        module[20].forward = torch.relu
        with pytest.warns(DeviceGraphWarning, match="Earlier replays"):
            for _ in range(30):
                captured(x)


def test_replay_without_inputs_captures_a_step_that_reads_attributes_again(cap: Any) -> None:
    held, x = types.SimpleNamespace(gain=2.0), torch.randn(4)
    captured = cap(lambda x: x * getattr(held, "gain"), x)  # noqa: B009
    held.gain = 3.0
    with pytest.warns(DeviceGraphWarning, match=AGAIN):
        assert torch.equal(captured.replay(), x * 3)


def test_attribute_that_a_helper_of_a_module_reads_is_compared(cap: Any) -> None:
    conv = nn.Conv1d(1, 1, 2)
    captured = cap(lambda x: conv(x), torch.randn(1, 1, 6))
    conv.dilation = (2,)
    x = torch.randn(1, 1, 6)
    with pytest.warns(DeviceGraphWarning, match=AGAIN):
        assert torch.equal(captured(x), conv(x))


def test_other_function_or_slice_in_an_argument_is_captured(cap: Any) -> None:
    def step(x: torch.Tensor, act: Any, part: slice) -> torch.Tensor:
        return act(x)[part] * 2

    x = torch.randn(4)
    captured = cap(step, x, torch.relu, slice(0, 2))
    for act, part in ((torch.tanh, slice(0, 2)), (lambda t: -t, slice(1, 4, 2))):
        with pytest.warns(DeviceGraphWarning, match=AGAIN):
            out = captured(x, act, part)
        assert torch.equal(out, step(x, act, part))


def test_warning_names_the_change_and_is_at_the_line_of_the_user() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    factor = 2.0

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x) * factor

    captured = dg.capture(step, torch.ones(2, 4), backend="cpu")
    for call in (captured, captured.replay):
        factor += 1
        with pytest.warns(DeviceGraphWarning, match=AGAIN) as said:
            call()
        assert said[0].filename == __file__
        assert (
            f"because factor is {factor} and was {factor - 1} at capture. Keep state that changes "
            f"often in tensors, and write into them. Replays"
        ) in str(said[0].message)
    model.weight = nn.Parameter(torch.ones(4, 4), requires_grad=False)
    with pytest.warns(DeviceGraphWarning, match="other memory or another layout. Keep state"):
        captured()
    calls = [0]

    def counting(x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return x * 2

    with pytest.warns(DeviceGraphWarning, match="changed Python state") as said:
        dg.capture(counting, torch.ones(2), backend="cpu")
    assert said[0].filename == __file__


def test_queue_that_the_step_empties_is_named() -> None:
    held: queue.Queue[float] = queue.Queue()
    for index in range(20):
        held.put(float(index))
    with pytest.warns(
        DeviceGraphWarning, match=r"held\.queue\[0\] from 0\.0 to .* more\. A replay"
    ):
        dg.capture(lambda x: x * held.get(), torch.ones(3), backend="cpu").close()


def test_lists_that_grow_are_named(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []
    filled: list[float] = []
    count = [0]

    def logging_step(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        if not filled:
            filled.append(2.0)  # only the first run fills it
        return x * filled[0]

    def counting_step(x: torch.Tensor) -> torch.Tensor:
        seen.append(1)
        count[0] += 1
        return x * 2

    dg.capture(logging_step, torch.ones(2), backend="cpu")
    assert "changed Python state: len(seen) from 1 to 3. A replay" in caplog.text
    with pytest.warns(DeviceGraphWarning, match=r"count\[0\] from 0 to 3; len\(seen\) from 4 to 6"):
        dg.capture(counting_step, torch.ones(2), backend="cpu")


def test_change_that_is_refused_is_reported_once() -> None:
    group = {"lr": 0.5}
    captured = dg.capture(lambda x: x * group["lr"], torch.ones(3), backend="cpu", recaptures=0)
    group["lr"] = 0.25
    with pytest.raises(dg.StateError, match="0.25 and was 0.5") as refused:
        captured.replay()
    assert refused.value.__context__ is None or refused.value.__suppress_context__


def test_loaded_state_of_an_optimizer_is_captured_again() -> None:
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.5, momentum=0.5)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=False)
        (weight * x).sum().backward()
        optimizer.step()

    captured = dg.capture(step, torch.ones(2), backend="cpu")
    loaded = {0: {"momentum_buffer": torch.zeros(2)}}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": loaded})
    before = weight.detach().clone()
    with pytest.warns(DeviceGraphWarning, match=r"optimizer\.state.*'momentum_buffer'"):
        captured.replay()
    assert torch.equal(before - weight, torch.full((2,), 0.5))
