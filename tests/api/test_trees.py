"""Trees of arguments: containers that are taken apart, rebuilt and compared."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, namedtuple
from typing import Any

import attrs
import pytest
import torch

import devgraph as dg
from devgraph.api.errors import InputError
from devgraph.api.trees import children_of, fields_of, leaves_of, own_copy, rebuilt, same_kind

Pair = namedtuple("Pair", "a b")


@attrs.frozen
class Frozen:
    a: Any
    b: Any


class Batch(UserDict[str, Any]):
    """A mapping over whose rows, and not keys, its iterator runs, as that of tensordict."""

    def __iter__(self) -> Any:
        raise TypeError("iteration over a batch without rows")

    def keys(self) -> Any:
        return self.data.keys()

    def values(self) -> Any:
        return self.data.values()

    def items(self) -> Any:
        return self.data.items()


@dataclasses.dataclass
class Fields:
    """A dataclass whose fields are properties, as those of tensordict's ``tensorclass``."""

    a: Any
    b: Any

    def __getattribute__(self, name: str) -> Any:
        if name in ("a", "b"):
            return object.__getattribute__(self, "__dict__")["stored"][name]
        return object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self).setdefault("stored", {})[name] = value


CONTAINERS: dict[str, Any] = {
    "list": [1, 2],
    "tuple": (1, 2),
    "named tuple": Pair(1, 2),
    "dictionary": {"a": 1, "b": 2},
    "ordered": OrderedDict(a=1, b=2),
    "default": defaultdict(int, a=1, b=2),
    "user dictionary": UserDict(a=1, b=2),
    "batch": Batch(a=1, b=2),
    "user list": UserList([1, 2]),
    "chain": ChainMap({"a": 1, "b": 2}),
    "proxy": types.MappingProxyType({"a": 1, "b": 2}),
    "namespace": types.SimpleNamespace(a=1, b=2),
    "frozen": Frozen(1, 2),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_container_is_taken_apart_and_rebuilt(name: str) -> None:
    """FAULTS 46."""
    node = CONTAINERS[name]
    children = children_of(node)
    assert children is not None and [child for _, child in children] == [1, 2]
    other = rebuilt(node, [3, 4])
    assert same_kind(node, other) and other is not node
    assert [child for _, child in children_of(other) or ()] == [3, 4]
    assert [child for _, child in children_of(node) or ()] == [1, 2]


def test_mapping_with_an_iterator_over_rows_is_an_argument() -> None:
    """FAULTS 46."""
    batch = Batch(x=torch.ones(2))
    with dg.capture(lambda batch: batch["x"] + 1, batch, backend="cpu") as captured:
        assert captured.replay(Batch(x=torch.full((2,), 5.0))).tolist() == [6, 6]


def test_dataclass_whose_fields_are_properties_is_an_argument() -> None:
    """FAULTS 46."""
    fields = Fields(torch.ones(2), torch.ones(2))
    with dg.capture(lambda pair: pair.a + pair.b, fields, backend="cpu") as captured:
        assert captured.replay(Fields(torch.full((2,), 5.0), torch.ones(2))).tolist() == [6, 6]


@dataclasses.dataclass
class Measured:
    """A dataclass with attributes beside its fields."""

    x: torch.Tensor

    def __post_init__(self) -> None:
        self.norm = self.x.norm()

    @functools.cached_property
    def double(self) -> torch.Tensor:
        return self.x * 2


def test_attributes_beside_the_fields_of_a_dataclass_are_arguments() -> None:
    """FAULTS 46."""

    def step(m: Measured) -> torch.Tensor:
        return m.double / m.norm

    first, other = Measured(torch.ones(2)), Measured(torch.full((2,), 5.0))
    assert first.double.tolist() == [2, 2]
    with dg.capture(step, first, backend="cpu") as captured:
        assert torch.equal(captured.replay(other), step(Measured(other.x)))


def test_container_that_occurs_twice_is_copied_once() -> None:
    inner = [1]
    copy = own_copy("x", {"a": inner, "b": inner}, {})
    assert copy["a"] is copy["b"] and copy["a"] is not inner


def test_container_that_contains_itself_is_refused() -> None:
    node: list[Any] = []
    node.append(node)
    with pytest.raises(InputError, match="contains itself"):
        list(leaves_of("x", node))


def test_class_that_computes_its_attributes_has_no_fields() -> None:
    class Computed(type):
        def __getattr__(cls, name: str) -> float:
            return {"gain": 2.0}[name]  # KeyError for other names

    kind = Computed("Kind", (), {})
    assert children_of(kind()) is None
    assert fields_of(kind) == []
