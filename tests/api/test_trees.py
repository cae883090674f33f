"""Trees of arguments: containers that are taken apart, rebuilt and compared."""

from __future__ import annotations

import types
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, namedtuple
from typing import Any

import attrs
import pytest

from devgraph.api.errors import InputError
from devgraph.api.trees import children_of, leaves_of, own_copy, rebuilt, same_kind

Pair = namedtuple("Pair", "a b")


@attrs.frozen
class Frozen:
    a: Any
    b: Any


CONTAINERS: dict[str, Any] = {
    "list": [1, 2],
    "tuple": (1, 2),
    "named tuple": Pair(1, 2),
    "dictionary": {"a": 1, "b": 2},
    "ordered": OrderedDict(a=1, b=2),
    "default": defaultdict(int, a=1, b=2),
    "user dictionary": UserDict(a=1, b=2),
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


def test_container_that_occurs_twice_is_copied_once() -> None:
    inner = [1]
    copy = own_copy("x", {"a": inner, "b": inner}, {})
    assert copy["a"] is copy["b"] and copy["a"] is not inner


def test_container_that_contains_itself_is_refused() -> None:
    node: list[Any] = []
    node.append(node)
    with pytest.raises(InputError, match="contains itself"):
        list(leaves_of("x", node))
