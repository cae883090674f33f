"""Named state: what a replay compares, and what it lets pass."""

from __future__ import annotations

import array
import contextvars
import copy
import enum
import functools
import operator
import os
import types
from collections import ChainMap, Counter, UserDict
from collections.abc import Callable
from typing import Any, ClassVar

import numpy
import pytest
import torch

import devgraph as dg
from devgraph.api.guard import Guard
from devgraph.api.named import NamedState
from devgraph.testing.conformance.support import Kit


class Mode(enum.Enum):
    """Two ways of a step."""

    A = 1
    B = 2


class Flags:
    """A class whose attributes a step reads."""

    scale: Any = 2.0


class Engine:
    """An object whose method is a step; ``part`` is replaced."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply(x, self.part)

    def apply(self, x: torch.Tensor, part: Any) -> torch.Tensor:
        raise NotImplementedError


def engine(apply: Any, part: Any) -> Engine:
    """Return an engine that applies ``part`` to its input."""
    return type("Own", (Engine,), {"apply": lambda self, x, part: apply(x, part)})(part)


REPLACED: dict[str, tuple[Any, Any, Any]] = {
    "function": (lambda x, part: part(x), torch.relu, torch.sigmoid),
    "lambda": (lambda x, part: part(x), lambda x: x * 2, lambda x: x * 3),
    "object": (lambda x, part: x * part.k, types.SimpleNamespace(k=2), types.SimpleNamespace(k=3)),
    "class": (lambda x, part: part()(x), torch.nn.ReLU, torch.nn.Sigmoid),
    "enum": (lambda x, part: x * 2 if part is Mode.A else x, Mode.A, Mode.B),
    "dtype": (lambda x, part: x.to(part) * 2, torch.float32, torch.bfloat16),
    "tuple": (lambda x, part: x * part[0], (1.0, 2.0), (3.0, 2.0)),
    "set": (lambda x, part: x * 2 if "a" in part else x, {"a"}, {"b"}),
    "frozen set": (lambda x, part: x * 2 if "a" in part else x, frozenset("a"), frozenset()),
    "list": (lambda x, part: x * sum(part), [1.0], [1.0, 2.0]),
    "mapping": (lambda x, part: x * sum(part.values()), {"p": 1.0}, {"p": 2.0}),
    "partial": (lambda x, part: part(x), functools.partial(torch.add, other=1), functools.partial(
        torch.add, other=2)),
    "module": (lambda x, part: part(x), torch.nn.ReLU(), torch.nn.Sigmoid()),
}  # fmt: skip


@pytest.mark.parametrize("kind", REPLACED)
def test_replaced_object_is_refused(kit: Kit, kind: str) -> None:
    apply, old, new = REPLACED[kind]
    x, own = kit.tensor(3), engine(apply, old)
    captured = kit.capture(own.step, x)
    kit.same(captured.replay(), apply(x, old))
    own.part = new
    with pytest.raises(dg.StateError, match=r"self\.part.* at capture"):
        captured.replay()
    own.part = old
    kit.same(captured.replay(), apply(x, old))


EQUAL: dict[str, tuple[Any, Any, Any]] = {
    "lambda": (lambda x, part: part(x), *((lambda x, k=2: x * k) for _ in range(2))),
    "object": (lambda x, p: x * p.k, types.SimpleNamespace(k=2), types.SimpleNamespace(k=2, n=1)),
    "list": (lambda x, part: x * sum(part), [1.0, 2.0], [1.0, 2.0]),
    "mapping": (lambda x, part: x * part["k"], {"k": 2, "n": 1}, {"k": 2, "n": 3}),
    "tuple": (lambda x, part: x * part[0], (1.0, 2.0), (1.0, float(2))),
    "set": (lambda x, part: x * len(part), {"a"}, {"a"}),
    "partial": (lambda x, part: part(x), *(functools.partial(torch.add, other=1),) * 2),
}


@pytest.mark.parametrize("kind", EQUAL)
def test_equal_object_passes(kit: Kit, kind: str) -> None:
    apply, old, new = EQUAL[kind]
    x, own = kit.tensor(3), engine(apply, old)
    captured = kit.capture(own.step, x)
    for seed in (3, 4):
        own.part = new
        kit.refill(x, seed)
        kit.same(captured.replay(), apply(x, new))


def test_equal_object_with_another_tensor_is_refused(kit: Kit) -> None:
    x, weight = kit.tensor(3), kit.tensor(3, seed=1)
    own = engine(lambda x, part: x * part.weight, types.SimpleNamespace(weight=weight))
    captured = kit.capture(own.step, x)
    own.part = types.SimpleNamespace(weight=weight)
    kit.same(captured.replay(), x * weight)
    own.part = types.SimpleNamespace(weight=kit.tensor(3, seed=2))
    with pytest.raises(dg.StateError, match="weight is no longer the captured tensor"):
        captured.replay()


@pytest.mark.parametrize("holder", ["attribute", "key", "argument"])
def test_state_with_the_name_grad_is_compared(kit: Kit, holder: str) -> None:
    x, old, new = kit.tensor(3), kit.tensor(3, seed=1), kit.tensor(3, seed=2)
    own = types.SimpleNamespace(grad=old) if holder == "attribute" else {"grad": old}

    def named(x: torch.Tensor) -> torch.Tensor:
        return x * (own.grad if isinstance(own, types.SimpleNamespace) else own["grad"])

    def given(x: torch.Tensor, own: Any) -> torch.Tensor:
        return x * own["grad"]

    captured = kit.capture(given, x, own) if holder == "argument" else kit.capture(named, x)
    (vars(own) if isinstance(own, types.SimpleNamespace) else own)["grad"] = new
    with pytest.raises(dg.StateError, match="no longer the captured tensor"):
        captured.replay()


def _dropped(values: set[int]) -> None:
    values.discard(1)


CONTENTS: dict[str, tuple[Any, Any, Any]] = {
    "list": (lambda v, x: x * sum(v), lambda: [1.0], lambda v: v.append(2.0)),
    "set": (lambda v, x: x * len(v), lambda: {1, 2}, _dropped),
    "array": (lambda v, x: x * v[0], lambda: array.array("f", [2]), lambda v: v.append(1)),
    "bytes": (lambda v, x: x * v[0], lambda: bytearray(b"a"), lambda v: v.extend(b"b")),
    "numpy": (lambda v, x: x * float(v[1]), lambda: numpy.ones(3), lambda v: v.fill(2)),
    "table": (lambda v, x: x * float(v[1]), lambda: numpy.ones(4096), lambda v: v.fill(2)),
}


@pytest.mark.parametrize("kind", CONTENTS)
def test_container_with_other_contents_is_refused(kit: Kit, kind: str) -> None:
    read, make, change = CONTENTS[kind]
    x, values = kit.tensor(3), make()
    captured = kit.capture(lambda x: read(values, x), x)
    kit.same(captured.replay(), read(values, x))
    change(values)
    with pytest.raises(dg.StateError, match="entries and had|different contents|was"):
        captured.replay()


def test_class_and_environment_are_compared(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    x = kit.tensor(3)
    monkeypatch.setenv("DEVGRAPH_TEST_SCALE", "2")

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * Flags.scale * float(os.environ["DEVGRAPH_TEST_SCALE"])

    captured = kit.capture(step, x)
    kit.same(captured.replay(), x * 4)
    monkeypatch.setenv("DEVGRAPH_TEST_SCALE", "3")
    with pytest.raises(dg.StateError, match=r"os.environ\['DEVGRAPH_TEST_SCALE'\] is '3'"):
        captured.replay()
    monkeypatch.setenv("DEVGRAPH_TEST_SCALE", "2")
    captured.replay()
    monkeypatch.setattr(Flags, "scale", 5.0)
    with pytest.raises(dg.StateError, match=r"Flags\.scale is 5\.0 and was 2\.0"):
        captured.replay()


def test_method_that_an_attribute_comes_to_hide_is_refused(kit: Kit) -> None:
    x, own = kit.tensor(3), engine(lambda x, part: x * part, 2.0)
    captured = kit.capture(own.step, x)
    own.unrelated = 3  # type: ignore[attr-defined]
    kit.same(captured.replay(), x * 2)
    own.apply = lambda x, part: x * 7  # type: ignore[method-assign]
    with pytest.raises(dg.StateError, match=r"apply is .* did not exist at capture"):
        captured.replay()


class Tuned:
    """A class whose attributes and methods the methods of an object use."""

    factor: Any = 2.0
    table: Any = (1.0,)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor + self.table[-1] + self.shift

    @property
    def shift(self) -> float:
        return 0.5


TUNED: dict[str, Any] = {
    "class attribute": lambda kind, tuned: setattr(kind, "factor", 3.0),
    "attribute that hides it": lambda kind, tuned: setattr(tuned, "factor", 3.0),
    "method": lambda kind, tuned: setattr(kind, "run", lambda self, x: x),
    "attribute that hides a method": lambda kind, tuned: setattr(tuned, "run", lambda x: x),
    "tuple of a class": lambda kind, tuned: setattr(kind, "table", (2.0,)),
    "property": lambda kind, tuned: setattr(kind, "shift", property(lambda self: 1.0)),
}


@pytest.mark.parametrize("change", TUNED)
def test_class_of_an_object_is_compared(kit: Kit, change: str) -> None:
    kind = type("Kind", (Tuned,), {**vars(Tuned)})
    x, tuned = kit.tensor(3), kind()
    captured = kit.capture(lambda x: tuned.run(x) * 2, x)
    tuned.unrelated = kind.unrelated = 1
    kit.refill(x, 3)
    kit.same(captured.replay(), tuned.run(x) * 2)
    TUNED[change](kind, tuned)
    with pytest.raises(dg.StateError, match="at capture"):
        captured.replay()


class Read:
    """A descriptor that reads an attribute of its object."""

    def __get__(self, instance: Any, owner: Any) -> Any:
        return instance.raw * 2 if instance is not None else self


class Base:
    """A class whose method and attribute a derived class reaches through ``super()``."""

    factor: Any = 2.0
    doubled: Any = Read()
    raw: Any = 1.0

    @staticmethod
    def act(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @classmethod
    def made(cls, x: torch.Tensor) -> torch.Tensor:
        return x + 2

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def matched(x: torch.Tensor, kind: type) -> torch.Tensor | None:
    match kind():
        case object(factor=factor):
            return x * factor
    return None


HIDDEN: dict[str, tuple[Any, Any]] = {
    "class pattern": (matched, lambda kind: setattr(kind, "factor", 3.0)),
    "static method": (
        lambda x, kind: kind.act(x),
        lambda kind: setattr(kind, "act", staticmethod(lambda x: x * 5)),
    ),
    "class method": (
        lambda x, kind: kind.made(x),
        lambda kind: setattr(kind, "made", classmethod(lambda cls, x: x * 5)),
    ),
    "descriptor": (
        lambda x, kind: x * kind().doubled,
        lambda kind: setattr(kind, "raw", 3.0),
    ),
    "attribute that super() reads": (
        lambda x, kind: kind().run(x),
        lambda kind: setattr(kind, "factor", 3.0),
    ),
}


@pytest.mark.parametrize("way", HIDDEN)
def test_member_of_a_class_is_compared(kit: Kit, way: str) -> None:
    base = type("Base", (Base,), {**vars(Base), "run": lambda self, x: x * self.factor})

    class Kind(base):  # type: ignore[misc, valid-type]
        def run(self, x: torch.Tensor) -> torch.Tensor:
            return super().run(x) + 1  # type: ignore[no-any-return]

    x, (apply, change) = kit.tensor(3), HIDDEN[way]
    captured = kit.capture(lambda x: apply(x, Kind) * 2, x)
    kit.refill(x, 3)
    kit.same(captured.replay(), apply(x, Kind) * 2)
    change(base)
    with pytest.raises(dg.StateError, match="at capture"):
        captured.replay()


def scaled(x: torch.Tensor, *, factor: float = 2.0) -> torch.Tensor:
    return x * factor * scaled.gain  # type: ignore[attr-defined, no-any-return]


def test_attributes_and_keyword_defaults_of_functions_are_compared(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = kit.tensor(3)
    monkeypatch.setattr(scaled, "gain", 1.0, raising=False)
    captured = kit.capture(scaled, x)
    kit.same(captured.replay(), x * 2)
    monkeypatch.setattr(scaled, "unrelated", 1.0, raising=False)
    kit.same(captured.replay(), x * 2)
    monkeypatch.setattr(scaled, "gain", 3.0)
    with pytest.raises(dg.StateError, match=r"gain is 3\.0 and was 1\.0 at capture"):
        captured.replay()
    monkeypatch.setattr(scaled, "gain", 1.0)
    monkeypatch.setitem(scaled.__kwdefaults__, "factor", 4.0)
    with pytest.raises(dg.StateError, match=r"factor is 4\.0 and was 2\.0 at capture"):
        captured.replay()


def by_name(x: torch.Tensor) -> torch.Tensor:
    try:
        return x * GAIN  # type: ignore[name-defined, no-any-return]
    except NameError:
        return x * 1


def test_global_that_was_absent_is_compared(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    x = kit.tensor(3)
    captured = kit.capture(by_name, x)
    kit.same(captured.replay(), x)
    monkeypatch.setitem(globals(), "GAIN", 3.0)
    with pytest.raises(dg.StateError, match=r"GAIN is 3\.0 and was absent at capture"):
        captured.replay()


@pytest.mark.parametrize("kind", [ChainMap, UserDict])
def test_entry_of_a_mapping_of_the_library_is_compared(kit: Kit, kind: Any) -> None:
    x, table = kit.tensor(3), kind({"gain": 1.0})
    captured = kit.capture(lambda x: x * table["gain"], x)
    kit.same(captured.replay(), x)
    table["gain"] = 3.0
    with pytest.raises(dg.StateError, match=r"gain'\] is 3\.0 and was 1\.0 at capture"):
        captured.replay()


def test_number_of_numpy_is_compared(kit: Kit) -> None:
    x, own = kit.tensor(3), engine(lambda x, part: x * part.item(), numpy.float32(2))
    captured = kit.capture(own.step, x)
    own.part = numpy.float32(2)
    kit.same(captured.replay(), x * 2)
    own.part = numpy.float32(3)
    with pytest.raises(dg.StateError, match=r"self\.part is .*3.* at capture"):
        captured.replay()


def test_array_in_the_place_of_another_is_compared_by_its_numbers(kit: Kit) -> None:
    x, own = kit.tensor(3), engine(lambda x, part: x * float(part[1]), numpy.ones(3))
    captured = kit.capture(own.step, x)
    own.part = numpy.ones(3)
    kit.same(captured.replay(), x * 1)
    own.part = numpy.full(3, 2.0)
    with pytest.raises(dg.StateError, match=r"self\.part is .* at capture"):
        captured.replay()


def test_context_variable_with_a_default_is_compared(kit: Kit) -> None:
    x, scale = kit.tensor(3), contextvars.ContextVar("scale", default=2.0)
    captured = kit.capture(lambda x: x * scale.get(), x)
    kit.same(captured.replay(), x * 2)
    token = scale.set(3.0)
    with pytest.raises(dg.StateError, match=r"scale is 3\.0 and was 2\.0 at capture"):
        captured.replay()
    scale.reset(token)
    kit.same(captured.replay(), x * 2)


ITERATED: dict[str, Any] = {
    "values": lambda table: sum(table.values()),
    "items": lambda table: sum(value for _, value in table.items()),
    "loop": lambda table: sum(table[key] for key in table),
    "len": lambda table: sum(table[f"k{index}"] for index in range(len(table))),
}


@pytest.mark.parametrize("way", ITERATED)
def test_mapping_that_the_step_iterates_over_keeps_its_keys(kit: Kit, way: str) -> None:
    read, x = ITERATED[way], kit.tensor(3)
    table = {"k0": 1.0, "k1": 2.0}
    captured = kit.capture(lambda x: x * read(table), x)
    kit.same(captured.replay(), x * read(table))
    table["k2"] = 3.0
    with pytest.raises(dg.StateError, match=r"has the keys .*k2.* and had"):
        captured.replay()
    del table["k2"]
    kit.same(captured.replay(), x * read(table))


def test_mapping_that_the_step_looks_into_may_grow(kit: Kit) -> None:
    x, own = kit.tensor(3), types.SimpleNamespace(adapters={"a": 2.0}, active="a")
    captured = kit.capture(lambda x: x * own.adapters[own.active], x)
    own.adapters["b"] = 3.0
    kit.refill(x, 1)
    kit.same(captured.replay(), x * 2)
    own.active = "b"
    with pytest.raises(dg.StateError, match=r"active is 'b' and was 'a'"):
        captured.replay()


def test_module_of_the_user_in_an_attribute_is_compared(kit: Kit) -> None:
    settings = types.ModuleType("settings_of_a_user")
    settings.scale, settings.shift = 2.0, lambda x: x + 1  # type: ignore[attr-defined]
    x, own = kit.tensor(3), types.SimpleNamespace(settings=settings)
    captured = kit.capture(lambda x: own.settings.shift(x) * own.settings.scale, x)
    settings.other = 1  # type: ignore[attr-defined]
    kit.same(captured.replay(), (x + 1) * 2)
    settings.shift = lambda x: x - 1  # type: ignore[attr-defined]
    with pytest.raises(dg.StateError, match=r"settings_of_a_user\.shift"):
        captured.replay()


def test_state_that_the_step_only_writes_passes(kit: Kit) -> None:
    """Counters, statistics, logs and caches of others are no part of a graph."""
    table, seen = {3: kit.tensor(3, seed=1)}, Counter(calls=0)

    @functools.lru_cache
    def scale(size: int) -> float:
        return size * 2.0

    def step(x: torch.Tensor) -> torch.Tensor:
        seen["calls"] += 1
        return x * table[x.shape[0]] * scale(x.shape[0])

    x = kit.tensor(3)
    with pytest.warns(dg.DeviceGraphWarning, match=r"seen\['calls'\]"):
        captured = kit.capture(step, x)
    for size in (5, 6):
        seen["calls"] += 1
        seen[str(size)] += 1
        table[size] = kit.tensor(size)
        scale(size)
        kit.refill(x, size)
        kit.same(captured.replay(), x * table[3] * 6.0)


def test_name_of_a_called_method_is_no_attribute(kit: Kit) -> None:
    own = types.SimpleNamespace(sum=0, weight=kit.tensor(3), n=0)

    def step(x: torch.Tensor) -> torch.Tensor:
        own.n = 1  # which no line reads
        return x.sum() * own.weight

    x = kit.tensor(3)
    with pytest.warns(dg.DeviceGraphWarning, match=r"own\.n"):
        captured = kit.capture(step, x)
    own.sum, own.n = 5, 7
    kit.same(captured.replay(), x.sum() * own.weight)


def test_attribute_by_a_computed_name_is_compared(kit: Kit) -> None:
    own = types.SimpleNamespace(scale0=2.0, scale1=3.0)
    x = kit.tensor(3)
    captured = kit.capture(lambda x: x * getattr(own, f"scale{x.dim()}"), x)
    own.scale1 = 4.0
    with pytest.raises(dg.StateError, match=r"own\.scale1 is 4\.0"):
        captured.replay()


def _relu(x: torch.Tensor) -> torch.Tensor:
    return x.relu() * 2


class _Owner:
    act, way = "sq", "by_way"
    relu, sq = staticmethod(_relu), staticmethod(torch.square)

    def by_way(self, x: torch.Tensor) -> torch.Tensor:
        return self.sq(x)


COMPUTED: dict[str, Callable[[torch.Tensor, Any, Any, str], Any]] = {
    "value": lambda x, table, own, key: table[own.act](x),
    "get": lambda x, table, own, key: table.get(own.act)(x),
    "list": lambda x, table, own, key: [table][0][own.act](x),
    "getitem": lambda x, table, own, key: operator.getitem(table, own.act)(x),
    "getattr": lambda x, table, own, key: getattr(own, own.act)(x),
    "argument": lambda x, table, own, key: table[key](x),
    "text": lambda x, table, own, key: table[f"s{'xq'[x.dim()]}"](x),
    "sum": lambda x, table, own, key: table["s" + "xq"[x.dim()]](x),
    "method": lambda x, table, own, key: getattr(own, own.way)(x),
}


@pytest.mark.parametrize("way", COMPUTED)
def test_entry_of_a_computed_key_is_compared(kit: Kit, way: str) -> None:
    """The names of the step have a key of the table, so that it is not read whole."""
    table: dict[str, Any] = {"relu": _relu, "sq": torch.square}
    own, read, x = _Owner(), COMPUTED[way], kit.tensor(3)
    captured = kit.capture(lambda x, key: read(x, table, own, key), x, "sq")
    kit.same(captured.replay(), x.square())
    table["sq"] = own.sq = torch.sigmoid  # type: ignore[method-assign]
    with pytest.raises(dg.StateError, match=r"sq'?\]? is .*sigmoid.* and was "):
        captured.replay()


def test_entry_that_was_absent_under_a_computed_key_is_noticed(kit: Kit) -> None:
    table, own = {"small": 2.0, "dim": 3.0}, types.SimpleNamespace(size="large")
    x = kit.tensor(3)
    captured = kit.capture(lambda x: x * table.get(own.size, 5.0) * x.dim(), x)
    kit.same(captured.replay(), x * 5)
    table["tiny"] = 1.0
    kit.same(captured.replay(), x * 5)
    table["large"] = 7.0
    with pytest.raises(dg.StateError, match=r"large.* is 7\.0 and did not exist"):
        captured.replay()


class _Heir(_Owner):
    """A class that inherits all that a step reads."""


HEIRS: dict[str, Callable[[torch.Tensor, Any, Any], Any]] = {
    "object": lambda x, heir, table: heir.sq(x),
    "class": lambda x, heir, table: type(heir)().sq(x),
    "table": lambda x, heir, table: table[heir.way]().sq(x.relu()),
}


@pytest.mark.parametrize("way", HEIRS)
def test_member_that_comes_to_hide_an_inherited_one_is_noticed(kit: Kit, way: str) -> None:
    heir: Any = type("Heir", (_Heir,), {})()
    read, table, x = HEIRS[way], {"by_way": type(heir), "relu": None}, kit.tensor(3)
    captured = kit.capture(lambda x: read(x, heir, table), x)
    kit.same(captured.replay(), read(x, heir, table))
    type(heir).sq = staticmethod(torch.sigmoid)
    with pytest.raises(dg.StateError, match="sq is"):
        captured.replay()


class _Maker:
    bias: Any = 0.0
    settings: ClassVar[dict[str, float]] = {"k": 2.0}
    levels: ClassVar[dict[str, float]] = {"gain": 1.0}

    def __init__(self) -> None:
        self.k = _Maker.settings["k"]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.k * self.levels["gain"] + self.bias


MADE: dict[str, Callable[[], Any]] = {
    "init": lambda: _Maker.settings.update(k=3.0),
    "call": lambda: _Maker.levels.update(gain=3.0),
    "class": lambda: setattr(_Maker, "bias", 3.0),
}


@pytest.mark.parametrize("place", MADE)
def test_state_of_an_object_that_the_step_makes_is_compared(
    kit: Kit, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bias", "settings", "levels"):
        monkeypatch.setattr(_Maker, name, copy.copy(getattr(_Maker, name)))
    x = kit.tensor(3)
    captured = kit.capture(lambda x: _Maker()(x), x)
    kit.same(captured.replay(), x * 2)
    MADE[place]()
    with pytest.raises(dg.StateError, match=r"is 3\.0 and was"):
        captured.replay()


def test_weight_of_a_module_under_a_computed_key_is_compared(kit: Kit) -> None:
    head, x = torch.nn.Linear(3, 2).to(kit.device), kit.tensor(3)
    heads: dict[str, Any] = {"score": head, "relu": None}
    own = types.SimpleNamespace(task="score")
    captured = kit.capture(lambda x: heads[own.task](x.relu()), x)
    kit.same(captured.replay(), head(x.relu()))
    head.weight = torch.nn.Parameter(kit.tensor(2, 3))
    with pytest.raises(dg.StateError, match="'weight' of a module"):
        captured.replay()


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "no_grad": torch.no_grad(),
    "inference_mode": torch.inference_mode(),
    "autocast": torch.autocast("cpu", enabled=False),
    "compiler": torch.compiler.disable,
}


@pytest.mark.parametrize("method", [False, True], ids=["function", "method"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_state_of_a_function_that_torch_wraps_is_compared(
    kit: Kit, wrapper: str, method: bool
) -> None:
    own, x = types.SimpleNamespace(k=2.0), kit.tensor(3)
    step: Any = WRAPPERS[wrapper](lambda self, x: x * self.k)
    captured = kit.capture(types.MethodType(step, own) if method else lambda x: step(own, x), x)
    kit.same(captured.replay(), x * 2)
    own.k = 3.0
    with pytest.raises(dg.StateError, match=r"\.k is 3\.0 and was 2\.0|k is 3\.0"):
        captured.replay()


def test_region_is_part_of_a_full_graph(kit: Kit) -> None:
    values = {"scale": 2.0}

    @dg.region
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * values["scale"]

    x = kit.tensor(3)
    whole = kit.capture(lambda x: scaled(x) + 1, x, policy="full")
    alone = kit.capture(scaled, x, policy="full")
    broken = kit.capture(lambda x: scaled(x) + 1, x, policy="breakable")
    kit.same(whole.replay(), x * 2 + 1)
    values["scale"] = 3.0
    kit.same(broken.replay(), x * 3 + 1)
    for captured in (whole, alone):
        with pytest.raises(dg.StateError, match=r"values\['scale'\] is 3\.0 and was 2\.0"):
            captured.replay()


def test_graphed_captures_again_for_another_object(kit: Kit) -> None:
    x, own = kit.tensor(3), engine(lambda x, part: part(x), torch.relu)
    step = dg.graphed(own.step, backend=kit.backend)
    for part in (torch.relu, torch.sigmoid, lambda x: x * 2, lambda x: x * 3):
        own.part = part
        for seed in (1, 2, 3):
            kit.refill(x, seed)
            kit.same(step(x), part(x))
    assert step.stats()["graphs"] == 1


def test_region_with_host_arguments_reads_its_state_again(kit: Kit) -> None:
    if not kit.backend.capabilities.region_update:
        pytest.skip("the backend cannot update")
    values = {"scale": 2.0}

    @dg.region(host_args=("n",))
    def scaled(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x * (values["scale"] * n)

    x = kit.tensor(3)
    captured = kit.capture(lambda x, *, n: scaled(x, n=n) + 1, x, host_args={"n": 1})
    kit.same(captured.replay(n=1), x * 2 + 1)
    values["scale"] = 3.0
    kit.same(captured.replay(n=2), x * 6 + 1)
    kit.same(captured.replay(n=1), x * 3 + 1, "a known value")


def test_count_of_a_region_with_host_arguments_is_no_part_of_its_key(kit: Kit) -> None:
    if not kit.backend.capabilities.region_update:
        pytest.skip("the backend cannot update")
    calls = {"count": 0, "scale": 2.0}

    @dg.region(host_args=("n",))
    def scaled(x: torch.Tensor, *, n: int) -> torch.Tensor:
        calls["count"] += 1
        return x * (calls["scale"] * n)

    x = kit.tensor(3)
    with pytest.warns(dg.DeviceGraphWarning, match="count"):
        captured = kit.capture(lambda x, *, n: scaled(x, n=n) + 1, x, host_args={"n": 1})
    for n in (1, 2, 1, 2):
        kit.same(captured.replay(n=n), x * (2.0 * n) + 1)
    assert captured.stats()["misses"] == 1


X: Any = None


def test_global_with_the_name_of_an_attribute_may_change(kit: Kit) -> None:
    """The step reads ``batch.X``, and a script has a global of that name."""
    global X
    batch = types.SimpleNamespace(X=kit.tensor(3))
    captured = kit.capture(lambda: batch.X * 2)
    for seed in (1, 2):
        X = kit.tensor(3, seed=seed)
        kit.same(captured.replay(), batch.X * 2)


def _many_cells() -> tuple[Any, Any]:
    names = [f"c{index}" for index in range(60)]
    lines = [f"    {name} = 1.0" for name in names]
    step = f"    def step(x):\n        return x * ({' + '.join(names)})"
    change = "    def change():\n        nonlocal c59\n        c59 = 5.0"
    space: dict[str, Any] = {"__name__": __name__}
    exec("\n".join(["def make():", *lines, step, change, "    return step, change"]), space)
    pair: tuple[Any, Any] = space["make"]()
    return pair


def _many_entries() -> tuple[Any, Any]:
    factors = [float(index) for index in range(100)]
    return lambda x: x * sum(factors), lambda: factors.__setitem__(90, 5.0)


def _many_members() -> tuple[Any, Any]:
    kind = type("Factors", (), {f"f{index}": 1.0 for index in range(60)})
    kind.__module__ = __name__
    space: dict[str, Any] = {"__name__": __name__, "kind": kind}
    names = " + ".join(f"kind.f{index}" for index in range(60))
    exec(f"def step(x):\n    return x * ({names})", space)
    return space["step"], lambda: setattr(kind, "f59", 5.0)


def _longer_list() -> tuple[Any, Any]:
    factors, others = [float(index) for index in range(60)], [1.0]
    return lambda x: x * sum(factors) * sum(others), lambda: others.append(5.0)


MANY = {
    "cells": _many_cells,
    "entries": _many_entries,
    "members": _many_members,
    "length": _longer_list,
}


@pytest.mark.parametrize("kind", MANY)
def test_places_that_do_not_take_turns_are_compared_by_the_next_replay(kit: Kit, kind: str) -> None:
    step, change = MANY[kind]()
    captured = kit.capture(step, kit.tensor(3))
    for _ in range(3):
        captured.replay()
    change()
    with pytest.raises(dg.StateError):
        captured.replay()


@pytest.mark.parametrize("kind", ["attribute", "cell", "entry", "environment", "numpy", "tuple"])
def test_equal_value_leaves_the_guard_true(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FACTOR", "2000")
    own = types.SimpleNamespace(k=2000.5, n=numpy.float32(2))
    table, cell = [2000.5, (1.0, 2.0)], 2000.5

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x * float(own.n)
        return x * own.k * table[0] * table[1][0] * cell * float(os.environ["FACTOR"])

    named = NamedState([("step", step)])
    guard = Guard([named])
    guard.settle()
    assert guard.same()
    if kind == "attribute":
        own.k = float("2000.5")
    elif kind == "cell":
        cell = float("2000.5")
    elif kind == "entry":
        table[0] = float("2000.5")
    elif kind == "numpy":
        own.n = numpy.float32(2)
    elif kind == "tuple":
        table[1] = (float("1.0"), float("2.0"))
    assert guard.same()
    own.k = -2000.5
    assert not guard.same()
