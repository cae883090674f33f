"""Vendors' subclasses that would overwrite the state of their base class."""

from __future__ import annotations

from typing import Any

import pytest

import devgraph as dg
from devgraph.api.backend import Backend
from devgraph.api.graph import DeviceGraph
from devgraph.api.pool import Pool


def _begin(self: Any, mode: str) -> None:
    self.mode, self.calls = mode, []


def _begin_only(self: Any, mode: str) -> None:
    pass


def _free(self: Any) -> None:
    self.mode = None
    self.mode.key = 3  # an attribute of another object


def _init(self: Any, backend: Any, pool: Any) -> None:
    self._state = "new"
    DeviceGraph.__init__(self, backend, pool)


@pytest.mark.parametrize(
    ("base", "members", "said"),
    [
        (DeviceGraph, {"_begin": _begin}, "Mine sets calls, which DeviceGraph uses"),
        (DeviceGraph, {"key": None, "pinned": True}, "sets key, pinned, which DeviceGraph"),
        (DeviceGraph, {"__init__": _init}, "Mine sets _state, which DeviceGraph"),
        (type(dg.get_backend("cpu")).graph_type, {"_begin": _begin}, "which DeviceGraph uses"),
        (Pool, {"recordings": ()}, "Mine sets recordings, which Pool uses"),
        (Backend, {"graphs": ()}, "Mine sets graphs, which Device uses"),
    ],
)
def test_an_attribute_of_the_base_class_is_refused_when_the_class_is_made(
    base: type, members: dict[str, Any], said: str
) -> None:
    with pytest.raises(dg.InputTypeError, match=said):
        type("Mine", (base,), members)


def test_a_class_without_a_required_member_is_refused_when_it_is_used() -> None:
    backend = type("Mine", (Backend,), {"name": "mine"})
    with pytest.raises(dg.BackendError, match=r"Mine does not implement device, synchronize\."):
        backend()
    cpu = type(dg.get_backend("cpu"))
    graph = type("Graph", (DeviceGraph,), {"_begin": _begin_only})
    with pytest.raises(dg.BackendError, match="Graph does not implement _abort, _end, _free, _s"):
        type("Mine", (cpu,), {"graph_type": graph})().make_graph()


def test_other_attributes_and_hooks_are_free() -> None:
    members = {"_free": _free, "_size": lambda self: (0, 0), "recorder": None}
    assert issubclass(type("Mine", (DeviceGraph,), members), DeviceGraph)
