"""State of the caller: containers, objects, modules, generators, and what a capture puts back."""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import random
import types
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Iterator
from typing import Any

import attrs
import numpy
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import devgraph as dg
from devgraph.testing.conformance.support import Kit

POLICIES = ("full", "breakable")
pytestmark = [
    pytest.mark.parametrize("policy", POLICIES),
]
Cap = Any


@pytest.fixture
def cap(kit: Kit, policy: str) -> Iterator[Cap]:
    """``dg.capture`` on the backend under test."""

    def make(fn: Any, *args: Any, **options: Any) -> dg.Captured:
        return kit.capture(fn, *args, policy=policy, **options)

    yield make


# Containers.


def test_replaced_entry_is_refused_and_the_caller_keeps_its_own(kit: Kit, cap: Cap) -> None:
    """FAULTS 45."""
    batch = {"h": kit.tensor(3), "x": kit.tensor(3, seed=1)}
    before = dict(batch)

    def step(d: dict[str, Any]) -> Any:
        d["h"] = torch.tanh(d["h"] + d["x"])
        return d["h"] * 1

    with pytest.raises(dg.CaptureError, match=r"replaces d\['h'\]: write into it with copy_"):
        cap(step, batch)
    assert all(batch[name] is before[name] for name in before)

    def in_place(d: dict[str, Any]) -> Any:
        d["h"].copy_(torch.tanh(d["h"] + d["x"]))
        return d["h"] * 1

    want = batch["h"].clone()
    captured = cap(in_place, batch)
    kit.same(batch["h"], want, "after the capture")
    for seed in (5, 6):
        kit.refill(batch["x"], seed)
        want = torch.tanh(want + batch["x"])
        kit.same(captured.replay(), want)


CHANGES: dict[str, tuple[Any, str]] = {
    "added": (lambda d, x: d.update(y=x * 2), r"adds d\['y'\]"),
    "removed": (lambda d, x: d.pop("h"), r"removes d\['h'\]"),
    "list": (lambda d, x: d["l"].append(x * 2), r"adds d\['l'\]\[1\]"),
    "list entry": (lambda d, x: d["l"].__setitem__(0, x * 2), r"replaces d\['l'\]\[0\]"),
    "field": (lambda d, x: setattr(d["n"], "t", x * 2), r"replaces d\['n'\]\.t"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_container_is_refused_by_its_name(kit: Kit, cap: Cap, change: str) -> None:
    """FAULTS 45."""
    edit, words = CHANGES[change]
    d = {"h": kit.tensor(3), "l": [kit.tensor(3)], "n": types.SimpleNamespace(t=kit.tensor(3))}
    before = {**d, "l0": d["l"][0], "t": d["n"].t}

    def step(d: dict[str, Any], x: Any) -> Any:
        edit(d, x)
        return x + 1

    with pytest.raises(dg.CaptureError, match=words):
        cap(step, d, kit.tensor(3))
    assert {*d} == {"h", "l", "n"} and len(d["l"]) == 1
    assert d["h"] is before["h"] and d["l"][0] is before["l0"] and d["n"].t is before["t"]


def test_list_that_grows_at_the_caller_is_refused(kit: Kit, cap: Cap) -> None:
    tensors = [kit.tensor(3), kit.tensor(3, seed=1)]
    captured = cap(lambda ts: sum(ts) * 2, tensors)
    kit.same(captured.replay(), sum(tensors) * 2)
    tensors.append(kit.tensor(3, seed=2))
    with pytest.raises(dg.StateError, match="3 entries and had 2 at capture"):
        captured.replay()
    tensors.pop()
    captured.replay()
    del tensors[1]
    with pytest.raises(dg.StateError):
        captured.replay()


def test_plain_entry_that_the_caller_changes_is_refused(kit: Kit, cap: Cap) -> None:
    d = {"x": kit.tensor(3), "n": 2}
    captured = cap(lambda d: d["x"] * d["n"], d)
    kit.same(captured.replay(), d["x"] * 2)
    d["n"] = 3
    with pytest.raises(dg.StateError, match=r"d\['n'\] is 3 and was 2"):
        captured.replay()


# Objects as arguments.


@dataclasses.dataclass
class Plain:
    x: Any
    scale: float = 2.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    scale: float = 2.0


@dataclasses.dataclass(slots=True)
class Slots:
    x: Any
    scale: float = 2.0


@attrs.define
class Attrs:
    x: Any
    scale: float = 2.0


@attrs.frozen
class FrozenAttrs:
    x: Any
    scale: float = 2.0


class Registered:
    def __init__(self, x: Any, scale: float) -> None:
        self.x, self.scale = x, scale


pytree.register_pytree_node(
    Registered, lambda r: ([r.x], r.scale), lambda c, scale: Registered(c[0], scale)
)
Pair = namedtuple("Pair", ["x", "scale"])
KINDS: dict[str, Any] = {
    "dataclass": Plain,
    "frozen dataclass": Frozen,
    "dataclass with slots": Slots,
    "attrs": Attrs,
    "frozen attrs": FrozenAttrs,
    "registered": Registered,
    "namedtuple": Pair,
    "namespace": lambda x, scale: types.SimpleNamespace(x=x, scale=scale),
    "nested": lambda x, scale: types.SimpleNamespace(x=x, scale=scale, inner=[Plain(x)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_object_is_a_tree_of_its_fields(kit: Kit, cap: Cap, kind: str) -> None:
    """FAULTS 46."""
    make = KINDS[kind]
    given = make(kit.tensor(3), 2.0)

    def step(batch: Any) -> Any:
        return batch.x * batch.scale

    captured = cap(step, given)
    other = make(kit.tensor(3, seed=4), 2.0)
    kit.same(captured.replay(other), other.x * 2.0)
    kit.refill(given.x, 9)
    kit.same(captured.replay(), given.x * 2.0)
    with pytest.raises(dg.InputError):
        captured.replay(make(kit.tensor(3), 3.0))
    with pytest.raises(dg.InputError):
        captured.replay(make(kit.tensor(4), 2.0))
    with pytest.raises(dg.InputTypeError, match="structure"):
        captured.replay((other.x, 2.0))
    if kind in ("dataclass", "dataclass with slots", "attrs", "registered", "namespace"):
        given.x = kit.tensor(3, seed=8)
        with pytest.raises(dg.StateError, match="no longer the captured tensor"):
            captured.replay()


@pytest.mark.parametrize("kind", [UserDict, OrderedDict, types.MappingProxyType])
def test_mapping_is_a_tree_whatever_its_order(kit: Kit, cap: Cap, kind: Any) -> None:
    x, y = kit.tensor(3), kit.tensor(3, seed=1)
    captured = cap(lambda m: m["x"] - m["y"], kind({"x": x, "y": y}))
    new = kind({"y": kit.tensor(3, seed=2), "x": kit.tensor(3, seed=3)})
    kit.same(captured.replay(new), new["x"] - new["y"])


def test_keywords_over_which_the_step_iterates_keep_their_order(kit: Kit, cap: Cap) -> None:
    tensors = [kit.tensor(3, seed=seed) for seed in range(4)]
    step = lambda **given: functools.reduce(lambda sum_, x: sum_ * 2 + x, given.values())  # noqa: E731
    captured = cap(step, kwargs={"x": tensors[0], "y": tensors[1]})
    kit.same(captured.replay(x=tensors[2], y=tensors[3]), tensors[2] * 2 + tensors[3])
    with pytest.raises(dg.InputError, match=r"in the order \['y', 'x'\]"):
        captured.replay(y=tensors[3], x=tensors[2])


class Holder:
    """An object of the user's that is not a tree."""

    def __init__(self, x: Any) -> None:
        self.x = x
        self.length = 0


def test_other_object_is_bound_with_its_tensors(kit: Kit, cap: Cap) -> None:
    """FAULTS 46."""
    holder = Holder(kit.tensor(3))
    captured = cap(lambda h: h.x * 2, holder)
    kit.refill(holder.x, 5)
    kit.same(captured.replay(holder), holder.x * 2)
    with pytest.raises(dg.InputError, match="register the class .*, or pass the tensors"):
        captured.replay(Holder(kit.tensor(3)))
    holder.x = kit.tensor(3, seed=6)
    with pytest.raises(dg.StateError, match="no longer the captured tensor"):
        captured.replay()


def test_object_whose_tensor_the_step_replaces_is_refused(kit: Kit, cap: Cap) -> None:
    """FAULTS 45."""
    holder = Holder(kit.tensor(3))
    before = holder.x

    def step(h: Any) -> Any:
        h.x = h.x + 1
        return h.x * 2

    with pytest.raises(dg.CaptureError, match=r"replaces h\.x: .* write in place"):
        cap(step, holder)
    assert holder.x is before


def test_python_state_that_warm_up_moves_is_named(kit: Kit, cap: Cap) -> None:
    """FAULTS 47."""
    holder = Holder(kit.tensor(3))

    def step(h: Any) -> Any:
        h.length += 1
        return h.x * 2

    with pytest.warns(dg.DeviceGraphWarning, match=r"h\.length from 0 to"):
        cap(step, holder)


def test_state_that_alternates_between_runs_is_named(kit: Kit, cap: Cap) -> None:
    """FAULTS 47."""
    holder = Holder(kit.tensor(3))

    def step(h: Any) -> Any:
        h.length = 1 - h.length
        return h.x * h.length

    for warmup in (1, 2):
        with pytest.warns(dg.DeviceGraphWarning, match=r"h\.length from 0 to"):
            cap(step, holder, warmup=warmup)


def test_written_argument_is_written_for_the_caller_too(kit: Kit, cap: Cap) -> None:
    def step(x: Any, cache: Any) -> Any:
        cache.add_(x)
        return cache * 1

    x, cache = kit.tensor(3), kit.tensor(3, seed=1)
    captured = cap(step, x, cache)
    other = kit.tensor(3, seed=2)
    for _ in range(2):
        want = other + x
        kit.same(captured.replay(x, other), want)
        kit.same(other, want, "the caller's own cache")


def test_windows_that_overlap_take_new_data(kit: Kit, cap: Cap) -> None:
    def windows(seed: int) -> Any:
        return kit.tensor(6, seed=seed).unfold(0, 3, 1)

    bound = windows(0)
    captured = cap(lambda w: w * 2, bound)
    kit.same(captured.replay(), bound * 2)
    new = windows(4)
    want = new * 2
    kit.same(captured.replay(new), want)
    with pytest.raises(dg.InputError, match="overlapping windows"):
        captured.replay(new.contiguous())
    assert captured.prove().ok


# Modules.


class Counter(torch.nn.Module):
    n: torch.Tensor

    def __init__(self, start: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("n", start)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n = self.n + 1
        return x * self.n


@pytest.mark.parametrize("how", ["module", "method", "closure", "argument", "attribute"])
def test_attribute_that_the_step_replaces_is_refused(kit: Kit, cap: Cap, how: str) -> None:
    """FAULTS 45."""
    module = Counter(kit.tensor(3))
    if how == "attribute":
        del module.n
        module.n = kit.tensor(3)
    before, x = module.n, kit.tensor(3, seed=1)
    fns = {
        "module": module,
        "attribute": module,
        "method": module.forward,
        "closure": lambda x: module(x),
        "argument": lambda x, m: m(x),
    }
    args = (x, module) if how == "argument" else (x,)
    with pytest.raises(dg.CaptureError, match=r"replaces \w+\.n: .* write in place"):
        cap(fns[how], *args)
    assert module.n is before


_h = torch.zeros(3)


def test_global_that_the_step_replaces_is_refused(kit: Kit, cap: Cap) -> None:
    """FAULTS 45."""
    global _h
    _h = before = kit.tensor(3)

    def step(x: Any) -> Any:
        global _h
        _h = _h + x
        return _h * 1

    with pytest.raises(dg.CaptureError, match="replaces _h"):
        cap(step, kit.tensor(3, seed=1))
    assert _h is before


@pytest.mark.parametrize("how", ["module", "closure", "argument"])
def test_buffers_and_written_tensors_are_put_back(kit: Kit, cap: Cap, how: str) -> None:
    """FAULTS 47."""
    norm = torch.nn.BatchNorm1d(4).to(kit.device)
    twin = torch.nn.BatchNorm1d(4).to(kit.device)
    x = kit.tensor(8, 4)
    fns = {"module": norm, "closure": lambda x: norm(x), "argument": lambda x, m: m(x)}
    captured = cap(fns[how], *((x, norm) if how == "argument" else (x,)))
    kit.same(dict(norm.named_buffers()), dict(twin.named_buffers()), "after the capture")
    for seed in (3, 4):
        kit.refill(x, seed)
        kit.same(captured.replay(), twin(x).detach())
        kit.same(dict(norm.named_buffers()), dict(twin.named_buffers()), "after a replay")


def test_state_is_put_back_after_a_failed_capture(kit: Kit, cap: Cap) -> None:
    """FAULTS 47."""
    norm, x, count = torch.nn.BatchNorm1d(4).to(kit.device), kit.tensor(8, 4), kit.tensor(4)
    before = {name: t.clone() for name, t in norm.named_buffers()}
    kept = count.clone()

    def step(x: Any, count: Any) -> Any:
        count.add_(1)
        if dg.is_capturing():
            raise KeyError("broken")
        return norm(x)

    with pytest.raises(KeyError):
        cap(step, x, count)
    kit.same(dict(norm.named_buffers()), before)
    kit.same(count, kept)


def test_tensor_above_the_limit_must_not_be_written(kit: Kit, cap: Cap) -> None:
    """FAULTS 47."""
    x, cache = kit.tensor(3), kit.tensor(1000)

    def step(x: Any, cache: Any) -> Any:
        cache[:3].add_(x)
        return cache[:3] * 1

    with pytest.raises(dg.CaptureError, match=r"wrote cache. .*pad rule"):
        cap(step, x, cache, snapshot_limit=100)
    captured = cap(lambda x, cache: cache[:3] + x, x, cache, snapshot_limit=100)
    kit.same(captured.replay(), cache[:3] + x)


EXCHANGES: dict[str, Any] = {
    "parameter": lambda m, t: setattr(m, "weight", torch.nn.Parameter(t)),
    "data": lambda m, t: setattr(m.weight, "data", t),
    "load": lambda m, t: m.load_state_dict({"weight": t, "bias": m.bias}, assign=True),
}


def test_parameter_that_the_step_gives_other_memory_is_refused(kit: Kit, cap: Cap) -> None:
    """FAULTS 45."""
    weight, x = torch.nn.Parameter(kit.tensor(3)), kit.tensor(3, seed=1)
    before, place = weight.detach().clone(), weight.data_ptr()

    def step(x: Any) -> Any:
        weight.data = weight.data - x
        return weight.detach() * 1

    with pytest.raises(dg.CaptureError, match=r"replaces weight\.data: write into it with copy_"):
        cap(step, x)
    assert weight.data_ptr() == place
    kit.same(weight.detach(), before)


@pytest.mark.parametrize("given", ["module", "argument", "bound", "bound method", "bound source"])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_exchanged_weights_are_noticed(kit: Kit, cap: Cap, exchange: str, given: str) -> None:
    """FAULTS 10."""
    module, x = torch.nn.Linear(3, 3).to(kit.device), kit.tensor(2, 3)
    with torch.no_grad():
        captured = {
            "module": lambda: cap(module, x),
            "argument": lambda: cap(lambda x, m: m(x), x, module),
            "bound": lambda: cap(lambda x: module(x), x, bound={"weights": module}),
            "bound method": lambda: cap(module.forward, x),
            "bound source": lambda: cap(
                lambda x: module(x), x, bound={"weights": lambda: [module.weight, module.bias]}
            ),
        }[given]()
        kit.same(captured.replay(), module(x))
        kept = module.weight
        EXCHANGES[exchange](module, kit.tensor(3, 3, seed=3))
        with pytest.raises(dg.StateError):
            captured.replay()
        if exchange == "parameter":
            module.weight = kept
            kit.same(captured.replay(), module(x))


DEEP: dict[str, Any] = {
    "assignment": lambda layer, t: setattr(layer, "bias", torch.nn.Parameter(t)),
    "data": lambda layer, t: setattr(layer.bias, "data", t),
}


@pytest.mark.parametrize("how", DEEP)
def test_assignment_deep_in_a_large_module_is_noticed(kit: Kit, cap: Cap, how: str) -> None:
    """FAULTS 10."""
    layers = [torch.nn.Linear(3, 3) for _ in range(8)]
    module, x = torch.nn.Sequential(*layers).to(kit.device), kit.tensor(2, 3)
    captured = cap(module, x)
    torch.nn.Linear(3, 3)  # of no concern
    captured.replay()
    DEEP[how](layers[-1], kit.tensor(3))
    with pytest.raises(dg.StateError, match=r"'7\.bias' of a module"):
        captured.replay()


def test_outputs_of_a_replay_claim_no_gradients(kit: Kit, cap: Cap) -> None:
    module, x = torch.nn.Linear(3, 3).to(kit.device), kit.tensor(2, 3)
    captured = cap(lambda x: {"y": module(x), "w": module.weight}, x)
    out = captured(kit.tensor(2, 3, seed=1))
    assert not out["y"].requires_grad and out["y"].grad_fn is None
    assert out["w"] is module.weight


@pytest.mark.parametrize("where", ["inner", "everywhere"])
def test_new_hook_of_an_inner_module_is_noticed(kit: Kit, cap: Cap, where: str) -> None:
    """FAULTS 10."""
    inner = torch.nn.Linear(3, 3).to(kit.device)
    module, x = torch.nn.Sequential(inner, torch.nn.ReLU()), kit.tensor(2, 3)
    captured = cap(module, x)
    kit.tensor(2).requires_grad_().register_hook(lambda g: g)  # of no concern
    captured.replay()
    register = torch.nn.modules.module.register_module_forward_hook
    hook = lambda *_: _[-1] * 3  # noqa: E731
    handle = inner.register_forward_hook(hook) if where == "inner" else register(hook)
    try:
        with pytest.raises(dg.StateError, match="has different hooks"):
            captured.replay()
    finally:
        handle.remove()
    captured.replay()


# Settings of the user around a mark.


class Setting:
    """A setting of the user's."""

    on = False


variable = contextvars.ContextVar("variable", default=False)
SETTINGS: dict[str, Any] = {
    "context": (variable, "variable", True),
    "class": (Setting, "on", True),
    "object": (types.SimpleNamespace(on=False), "on", True),
    "entry": ({"on": False}, "on", True),
}


@pytest.mark.parametrize("kind", [*SETTINGS, "stack"])
def test_value_that_the_step_sets_for_a_mark_alone_is_refused(
    kit: Kit, cap: Cap, policy: str, kind: str
) -> None:
    """FAULTS 50."""
    if policy == "full":
        pytest.skip("policy full has no eager bodies")
    owner, name, value = SETTINGS.get(kind, ([], 0, 1))
    read = (lambda: owner.get(name)) if isinstance(owner, dict) else (lambda: len(owner))
    if kind in ("class", "object"):
        read = lambda: owner.on  # noqa: E731
    if kind == "context":
        read = lambda: variable.get()  # noqa: E731

    @dg.no_graph
    def body(x: Any) -> Any:
        return x * 5 if read() else x

    def put(value: Any) -> None:
        if isinstance(owner, list):
            owner.append(value) if value else owner.pop()
        elif isinstance(owner, dict):
            owner[name] = value
        elif kind == "context":
            variable.set(value)
        else:
            setattr(owner, name, value)

    def step(x: Any) -> Any:
        put(value)
        y = body(x) + 1
        put(False)
        return y

    with pytest.raises(dg.CaptureError, match="before it calls .* as an argument"):
        cap(step, kit.tensor(3))
    if kind == "object" and kit.backend.capabilities.piecewise:
        with pytest.raises(dg.CaptureError, match="before it calls .* as an argument"):
            kit.capture(step, kit.tensor(3), policy="piecewise", compiler="eager")

    @dg.no_graph
    def other(x: Any) -> Any:
        return x * 2

    def scoped(x: Any) -> Any:
        put(value)
        y = other(x) + 1
        put(False)
        return y

    x = kit.tensor(3)
    kit.same(cap(scoped, x).replay(), x * 2 + 1)


# Random numbers.


@pytest.mark.parametrize("how", ["closure", "argument", "object"])
def test_own_generator_is_put_back_and_replays_draw_from_it(kit: Kit, cap: Cap, how: str) -> None:
    """FAULTS 48."""
    if not kit.backend.capabilities.rng:
        pytest.skip("the backend replays no random numbers")
    generator = torch.Generator(kit.device).manual_seed(7)
    holder = types.SimpleNamespace(g=generator)
    twin = torch.Generator(kit.device).manual_seed(7)
    x = kit.tensor(4)

    def draw(x: Any, g: Any) -> Any:
        return x + torch.rand(4, generator=g, device=kit.device)

    captured = {
        "closure": lambda: cap(lambda x: draw(x, generator), x),
        "argument": lambda: cap(draw, x, generator),
        "object": lambda: cap(lambda x, h: draw(x, h.g), x, holder),
    }[how]()
    assert torch.equal(generator.get_state(), twin.get_state())
    for _ in range(3):
        kit.same(captured.replay(), draw(x, twin))
    state = generator.get_state()
    assert captured.prove().ok
    assert torch.equal(generator.get_state(), state)


# Small.


@pytest.mark.parametrize("make", [iter, lambda t: zip(t, t, strict=True), lambda t: (x for x in t)])
def test_iterator_among_the_arguments_is_refused(kit: Kit, cap: Cap, make: Any) -> None:
    """FAULTS 46."""
    values = make([kit.tensor(3)])
    with pytest.raises(dg.InputTypeError, match=r"values is a .*exhausts.*Pass a list"):
        cap(lambda values: [*values], values)
    assert next(values) is not None


def test_argument_names_of_any_kind_are_refused_well(kit: Kit, cap: Cap) -> None:
    captured = cap(lambda x: x + 1, kit.tensor(3))
    with pytest.raises(dg.HostArgumentError, match="unknown host argument 'self'"):
        captured.replay(self=3)
    with pytest.raises(dg.InputTypeError, match="kwargs must be a mapping with strings"):
        cap(lambda x: x + 1, kit.tensor(3), kwargs={1: 2})


def test_replay_under_vmap_and_capture_of_fake_tensors_are_refused(kit: Kit, cap: Cap) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    captured = cap(lambda x: x + 1, kit.tensor(3))
    with pytest.raises(dg.DeviceGraphError, match="vmap"):
        torch.func.vmap(lambda row: captured.replay(row))(kit.tensor(2, 3))
    with FakeTensorMode(), pytest.raises(dg.DeviceGraphError, match="FakeTensorMode"):
        cap(lambda x: x + 1, torch.ones(3))
    with FakeTensorMode(), pytest.raises(dg.DeviceGraphError, match="FakeTensorMode"):
        captured.replay()
    kit.same(captured.replay(), captured.outputs.clone())


# Places that a step rebinds, wherever they are.


class Recurrent(torch.nn.Module):
    """Keeps its state in one of many ways."""

    shared: Any = None

    def __init__(self, how: str, start: Any) -> None:
        super().__init__()
        self.how, self.h = how, None
        self.box: Any = types.SimpleNamespace(h=start)
        self.states, self.pair, self.window = [start], (start, start), deque([start], 2)
        self.start = start

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "lazy":
            self.h = x * 1 if self.h is None else self.h + x
            return self.h * 1
        if self.how == "new attribute":
            self.last = x * 2
            return x * 1
        if self.how == "tuple":
            self.pair = (self.pair[0] + x, self.pair[1])
            return self.pair[0] * 1
        if self.how == "list":
            self.states = [self.states[0] + x]
            return self.states[0] * 1
        if self.how == "append":
            self.states.append(self.states[-1] + x)
            return self.states[-1] * 1
        if self.how == "deque":
            self.window.append(self.window[-1] + x)
            return self.window[-1] * 1
        if self.how == "object":
            self.box = types.SimpleNamespace(h=self.box.h + x)
            return self.box.h * 1
        if self.how == "inner":
            self.box.h = self.box.h + x
            return self.box.h * 1
        Recurrent.shared = self.start + x
        return Recurrent.shared * 1


REBOUND = (
    "lazy",
    "new attribute",
    "tuple",
    "list",
    "append",
    "deque",
    "object",
    "inner",
    "class",
)


@pytest.mark.parametrize("warmup", [0, 1, 2])
@pytest.mark.parametrize("how", REBOUND)
def test_rebound_place_is_refused_and_put_back(kit: Kit, cap: Cap, how: str, warmup: int) -> None:
    """FAULTS 45."""
    start = kit.tensor(3)
    module = Recurrent(how, start)
    Recurrent.shared = start if how == "class" else None
    box = module.box
    with pytest.raises(dg.CaptureError, match=r"the step (replaces|adds|removes)"):
        cap(module, kit.tensor(3, seed=1), warmup=warmup)
    assert module.h is None and not hasattr(module, "last")
    assert module.pair[0] is start and module.box is box and box.h is start
    assert module.states == [start] and [*module.window] == [start]
    assert Recurrent.shared is (start if how == "class" else None)


def test_tensor_that_the_first_run_makes_is_right(kit: Kit, cap: Cap) -> None:
    holder = types.SimpleNamespace(table=None)

    def step(x: Any) -> Any:
        if holder.table is None:
            holder.table = x.new_ones(3) * 3
        return x * holder.table

    x = kit.tensor(3)
    captured = cap(step, x)
    for seed in (4, 5):
        kit.refill(x, seed)
        kit.same(captured.replay(), x * 3)


@pytest.mark.parametrize("warmup", [1, 2, 3])
def test_tensor_that_the_first_run_makes_and_later_ones_advance_is_refused(
    kit: Kit, cap: Cap, warmup: int
) -> None:
    """FAULTS 47."""
    holder = types.SimpleNamespace(n=None)

    def step(x: Any) -> Any:
        if holder.n is None:
            holder.n = torch.zeros_like(x)
        holder.n.add_(1)
        return x * holder.n

    with pytest.raises(dg.CaptureError, match=r"first run of the step creates holder\.n"):
        cap(step, kit.tensor(3), warmup=warmup)
    assert holder.n is None


@pytest.mark.parametrize("warmup", [1, 2])
def test_scratch_memory_that_the_first_run_makes_is_right(kit: Kit, cap: Cap, warmup: int) -> None:
    holder = types.SimpleNamespace(scratch=None, total=kit.tensor(3))

    def step(x: Any) -> Any:
        if holder.scratch is None:
            holder.scratch = torch.empty_like(x)
        holder.scratch.copy_(x + holder.total + torch.rand(3, device=x.device))
        holder.total.add_(x)
        return holder.scratch * 0 + x

    x = kit.tensor(3)
    captured = cap(step, x, warmup=warmup)
    kit.refill(x, 7)
    kit.same(captured.replay(), x)


@pytest.mark.parametrize("options", [{"momentum": 0.9}, {}], ids=["state", "none"])
def test_state_that_an_optimizer_makes_in_the_captured_run_is_refused(
    kit: Kit, cap: Cap, options: dict[str, float]
) -> None:
    """FAULTS 47: without warm-up, each replay would make the state again."""
    weight = torch.nn.Parameter(kit.tensor(3))
    optimizer, x = torch.optim.SGD([weight], lr=0.1, **options), kit.tensor(3)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight * x).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    if options:
        with pytest.raises(dg.CaptureError, match="momentum_buffer.*warmup=1"):
            cap(step, x, warmup=0)
        step(x)
    cap(step, x, warmup=0).replay()


def test_gradient_that_the_captured_run_made_is_replaced_only_where_eager_makes_it(
    kit: Kit, cap: Cap
) -> None:
    weight, x = torch.nn.Parameter(kit.tensor(3)), kit.tensor(3, seed=1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (weight * x).sum()
        loss.backward()
        return loss.detach()

    captured = cap(step, x, warmup=0)
    for _ in range(2):
        weight.grad = None
        captured.replay()
        kit.same(weight.grad, x)
    with pytest.raises(dg.StateError, match="a replay replaces the gradient.*warmup=1 or more"):
        captured.replay()
    kit.same(weight.grad, x)
    weight.grad = None
    with pytest.warns(dg.DeviceGraphWarning, match="captured the step again"):
        captured = cap(step, x, warmup=0, recaptures=1)
        for _ in range(3):
            captured.replay()
    kit.same(weight.grad, x + x + x)


def test_eager_body_may_rebind(kit: Kit, policy: str) -> None:
    if policy == "full":
        pytest.skip("policy full has no eager bodies")
    holder = types.SimpleNamespace(seen=[], last=kit.tensor(3))

    @dg.no_graph
    def log(h: Any) -> None:
        holder.seen.append(h.clone())
        holder.last = h + 1

    x = kit.tensor(3)

    def step(x: Any) -> Any:
        log(x * 2)
        return x + 1

    captured = kit.capture(step, x, policy=policy)
    count = len(holder.seen)
    kit.refill(x, 7)
    kit.same(captured.replay(), x + 1)
    assert len(holder.seen) == count + 1
    kit.same(holder.last, x * 2 + 1)


# What the caller changes between replays, in places that the step names.


class Engine:
    """An engine with state of every kind."""

    def __init__(self, kit: Kit) -> None:
        self.scale, self.inner = 2.0, types.SimpleNamespace(kv=kit.tensor(3))
        self.caches = [kit.tensor(3, seed=1), kit.tensor(3, seed=2)]

    def step(self, x: Any) -> Any:
        return self.scaled(x) + self.inner.kv + self.caches[1]

    def scaled(self, x: Any) -> Any:
        return x * self.scale


class Shared:
    weight: Any = None


def _renew(kit: Kit, place: str) -> tuple[Any, Any]:
    """Return a step and a function that changes what it names."""
    box: dict[str, Any] = {"w": kit.tensor(3), "scale": 2.0}
    listed, holder = [kit.tensor(3)], Engine(kit)
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)).to(kit.device)
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("w", default=None)
    variable.set(kit.tensor(3))
    Shared.weight = kit.tensor(3)
    dropout = torch.nn.Dropout(0.5)
    new = kit.tensor(3, seed=9)
    hooked = torch.nn.Sequential(torch.nn.Linear(3, 3)).to(kit.device)
    hooked[0].register_forward_hook(lambda *args: args[-1] * box["scale"])
    cases: dict[str, tuple[Any, Any]] = {
        "entry": (lambda x: x * box["w"], lambda: box.update(w=new)),
        "memory of an entry": (lambda x: x * box["w"], lambda: setattr(box["w"], "data", new)),
        "memory in a list": (lambda x: x + listed[0], lambda: listed[0].set_(new)),
        "setting": (lambda x: x * box["scale"], lambda: box.update(scale=3.0)),
        "list": (lambda x: x + listed[0], lambda: listed.__setitem__(0, new)),
        "attribute below": (holder.step, lambda: setattr(holder.inner, "kv", new)),
        "cache in a list": (holder.step, lambda: holder.caches.__setitem__(1, new)),
        "value in a method": (holder.step, lambda: setattr(holder, "scale", 3.0)),
        "class": (lambda x: x * Shared.weight, lambda: setattr(Shared, "weight", new)),
        "context": (lambda x: x * variable.get(), lambda: variable.set(new)),
        "mode": (lambda x: module(x), lambda: module.eval()),
        "dtype": (lambda x: module(x), lambda: module.double()),
        "hook": (lambda x: module(x), lambda: module.register_forward_hook(lambda *_: None)),
        "closure of a hook": (lambda x: hooked(x), lambda: box.update(scale=4.0)),
        "probability": (dropout, lambda: setattr(dropout, "p", 0.1)),
    }
    return cases[place]


PLACES = ["entry", "setting", "list", "attribute below", "cache in a list", "value in a method"]
PLACES += ["class", "context", "mode", "dtype", "hook", "probability"]
PLACES += ["memory of an entry", "memory in a list", "closure of a hook"]


@pytest.mark.parametrize("place", PLACES)
def test_named_state_that_the_caller_changes_is_refused_by_replays(
    kit: Kit, cap: Cap, place: str
) -> None:
    step, change = _renew(kit, place)
    captured = cap(step, kit.tensor(3))
    captured.replay()
    change()
    with pytest.raises(dg.StateError):
        captured.replay()


def test_object_argument_with_another_plain_value_is_refused(kit: Kit, cap: Cap) -> None:
    holder = Engine(kit)
    captured = cap(lambda holder, x: x * holder.scale, holder, kit.tensor(3))
    captured.replay()
    holder.scale = 3.0
    with pytest.raises(dg.StateError, match=r"holder\.scale is 3\.0 and was 2\.0"):
        captured.replay()


def test_learning_rate_that_changes_is_refused(kit: Kit, cap: Cap) -> None:
    weight = kit.tensor(3).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: Any) -> Any:
        optimizer.zero_grad(set_to_none=False)
        (weight * x).sum().backward()
        optimizer.step()
        return weight * 1

    captured = cap(step, kit.tensor(3))
    captured.replay()
    groups = [{**optimizer.param_groups[0], "lr": 0.2, "params": [0]}]
    optimizer.load_state_dict({"state": {}, "param_groups": groups})  # a new list
    with pytest.raises(dg.StateError, match=r"\['lr'\] is 0\.2 and was 0\.1"):
        captured.replay()
    optimizer.param_groups[0]["lr"] = 0.3
    with pytest.raises(dg.StateError, match=r"\['lr'\] is 0\.3 and was 0\.1"):
        captured.replay()


def test_array_of_numpy_whose_numbers_change_is_refused(kit: Kit, cap: Cap) -> None:
    array = numpy.arange(3, dtype="float32")
    captured = cap(lambda x, array: x * float(array[0] + 2), kit.tensor(3), array)
    captured.replay()
    array[0] = 5
    with pytest.raises(dg.StateError, match="array has different contents"):
        captured.replay()


@pytest.mark.filterwarnings("ignore::devgraph.DeviceGraphWarning")
def test_counters_of_the_step_and_unnamed_state_may_change(kit: Kit, cap: Cap) -> None:
    """The step names the first, and eager runs advance it; the others are none of its business."""
    holder, counts = Engine(kit), {"steps": 0}

    def step(x: Any) -> Any:
        counts["steps"] += 1
        return holder.step(x)

    x = kit.tensor(3)
    captured = cap(step, x)
    holder.outputs, holder.tokens = captured.replay(), 1  # type: ignore[attr-defined]
    for seed in (3, 4):
        kit.refill(x, seed)
        want = step(x)
        kit.same(captured.replay(), want)
        holder.tokens += 1  # type: ignore[attr-defined]


def _counting() -> Iterator[int]:
    number = 1
    while True:
        number += 1
        yield number


@pytest.mark.parametrize("kind", ["python", "numpy", "generator"])
def test_numbers_of_the_users_own_generators_are_named_in_a_warning(
    kit: Kit, cap: Cap, kind: str
) -> None:
    own, drawn, counting = random.Random(0), numpy.random.default_rng(0), _counting()
    steps: dict[str, Any] = {
        "python": lambda x: x * own.random(),
        "numpy": lambda x: x * float(drawn.random()),
        "generator": lambda x: x * next(counting),
    }
    name = {"python": "own", "numpy": "drawn", "generator": "counting.position"}[kind]
    with pytest.warns(dg.DeviceGraphWarning, match=f"changed Python state: .*{name} advanced"):
        cap(steps[kind], kit.tensor(3))


# Changes that torch does not report.


@pytest.mark.parametrize("change", ["none", "removed", "mode", "number"])
def test_change_of_a_module_that_torch_does_not_report_is_refused(
    kit: Kit, cap: Cap, change: str
) -> None:
    """FAULTS 46."""
    device = kit.backend.device
    inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.0))
    model = torch.nn.Sequential(inner, torch.nn.ReLU()).to(device).requires_grad_(False)
    x = kit.tensor(3, 4)
    captured = cap(model, x)
    kit.same(captured.replay(), model(x))
    if change == "none":
        inner[0].bias = None
    elif change == "removed":
        del inner[0].bias
        inner[0].register_parameter("bias", None)
    elif change == "mode":
        inner[1].eval()
    else:
        inner[1].p = 1.0
    with pytest.raises(dg.StateError):
        captured.replay()


def test_queue_among_the_arguments_that_grows_is_refused(kit: Kit, cap: Cap) -> None:
    """FAULTS 45."""
    window = deque([kit.tensor(3), kit.tensor(3, seed=1)])
    captured = cap(lambda items: sum(items) * 2, window)
    kit.same(captured.replay(), sum(window) * 2)
    window.append(kit.tensor(3, seed=2))
    with pytest.raises(dg.DeviceGraphError):
        captured.replay()


def test_seed_that_the_step_reads_is_compared(kit: Kit, cap: Cap) -> None:
    """FAULTS 47."""
    x, before = kit.tensor(3), torch.get_rng_state()
    torch.manual_seed(3)
    captured = cap(lambda x: x * torch.initial_seed(), x)
    kit.same(captured.replay(), x * 3)
    torch.manual_seed(4)
    with pytest.raises(dg.StateError, match="initial seed 4 and had 3"):
        captured.replay()
    torch.set_rng_state(before)


def test_capture_while_make_fx_traces_is_refused(kit: Kit, cap: Cap) -> None:
    x = kit.tensor(3)
    with pytest.raises(dg.CaptureError, match="make_fx"):
        make_fx(lambda x: cap(lambda y: y * 2, x).replay())(x)


def test_windows_that_overlap_the_static_memory_are_copied_whole(kit: Kit, cap: Cap) -> None:
    series = kit.tensor(8)
    captured = cap(lambda w: w.sum(1), series[:6].unfold(0, 3, 1))
    later = series[2:].unfold(0, 3, 1)
    want = later.sum(1)
    kit.same(captured.replay(later), want)


def test_proof_restores_the_state_of_an_optimizer(kit: Kit, cap: Cap) -> None:
    model = torch.nn.Linear(3, 3).to(kit.backend.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = kit.tensor(2, 3)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step(x)
    captured = cap(step, x)
    held = [state["momentum_buffer"] for state in optimizer.state.values()]
    before = [tensor.clone() for tensor in held]
    captured.prove(cases=2)
    assert all(torch.equal(a, b) for a, b in zip(held, before, strict=True))


class Inner(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.lin = torch.nn.Dropout(0.5), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(self.drop(x))


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


def _other_mode(inner: Inner) -> None:
    inner.drop.train()


def _other_forward(inner: Inner) -> None:
    inner.lin.forward = lambda x: x * 2  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [_other_mode, _other_forward])
def test_changed_mode_or_forward_of_an_inner_module_is_noticed(
    kit: Kit, cap: Cap, change: Any
) -> None:
    model = Outer().eval().to(kit.device)
    x = kit.tensor(2, 4)
    captured = cap(model, x)
    kit.same(captured.replay(), model(x))
    change(model.inner)
    with pytest.raises(dg.StateError, match=r"training mode|different class or forward"):
        captured.replay()
    with pytest.raises(dg.StateError):
        captured.replay()


class Activations(OrderedDict):
    """As ``ACT2FN`` of transformers: an item is a new module of the class in the table."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


ACTIVATIONS = Activations(relu=torch.nn.ReLU, prelu=torch.nn.PReLU)


def test_table_whose_items_are_made_on_access_keeps_its_contents(kit: Kit, cap: Cap) -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = ACTIVATIONS["relu"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(x)

    x, layer = kit.tensor(3), Layer()
    kit.same(cap(layer, x).replay(), layer(x))
    assert [*ACTIVATIONS.values()] == [torch.nn.ReLU, torch.nn.PReLU]
