"""Backends: what every one of them refuses, and what its graphs, pools and captures cannot do."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import devgraph as dg
from devgraph.cpu.backend import CpuBackend, CpuGraph
from devgraph.testing.conformance.support import Kit


def test_unknown_error_mode_is_refused_with_those_that_exist(kit: Kit) -> None:
    graph = kit.backend.make_graph()
    with (
        pytest.raises(dg.InputError, match="thread_local"),
        kit.backend.capture_context(graph, capture_error_mode="strict"),
    ):
        pytest.fail("the body ran")
    assert graph.state == "empty"


class _Endless(CpuGraph):
    def _end(self):
        super()._end()


class _Sizeless(CpuGraph):
    def _size(self):
        return 3


@pytest.mark.parametrize(
    ("members", "said"),
    [
        (
            {"make_graph": lambda self, pool=None: None},
            "Odd.make_graph returned None; expected: DeviceGraph",
        ),
        (
            {"make_pool": lambda self, releasable=False: None},
            "Odd.make_pool returned None; expected: Pool",
        ),
        ({"graph_type": _Endless}, "_Endless._end returned None; expected: Executable"),
        ({"graph_type": _Sizeless}, "_Sizeless._size returned 3; expected: tuple"),
    ],
)
@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_a_hook_with_a_result_of_another_type_is_named(members, said, policy):
    backend = type("Odd", (CpuBackend,), members)()
    with pytest.raises(dg.BackendError, match=said):
        dg.capture(lambda x: x + 1, torch.ones(2), backend=backend, policy=policy)


def test_what_is_no_stream_is_refused_before_a_capture(kit: Kit) -> None:
    graph = kit.backend.make_graph()
    with (
        pytest.raises(dg.InputTypeError, match="stream must be a stream of the device, got 5"),
        kit.backend.capture_context(graph, stream=5),
    ):
        pytest.fail("the body ran")
    x = kit.tensor(2)
    with kit.backend.capture_context(graph, stream=torch.Stream(kit.device)):
        y = x + 1
    graph.replay()
    kit.same(y, x + 1)


def test_pool_given_to_the_context_is_used(kit: Kit, pool: dg.Pool) -> None:
    graph = kit.backend.make_graph()
    x = kit.tensor(4)
    with kit.backend.capture_context(graph, None, pool):
        y = x + 1
    assert graph.pool is pool
    graph.replay()
    kit.same(y, x + 1)


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("what", ["graph", "pool", "captured"])
def test_things_that_own_device_memory_cannot_be_copied(
    kit: Kit, pool: dg.Pool, what: str, how: object
) -> None:
    """FAULTS 29."""
    x = kit.tensor(4)
    graph, _ = kit.record(lambda: x + 1, pool=pool)
    captured = kit.capture(lambda x: x + 1, x)
    thing = {"graph": graph, "pool": pool, "captured": captured}[what]
    with pytest.raises(dg.InputTypeError, match=r"pickled|copied"):
        how(thing)  # type: ignore[operator]
    graph.replay()  # a refused copy harms nothing


def test_failed_capture_into_another_pool_leaves_the_graph_in_its_own():
    backend = dg.get_backend("cpu")
    graph, other = backend.make_graph(), backend.make_pool()
    own = graph.pool
    with pytest.raises(KeyError), backend.capture_context(graph, pool=other):
        raise KeyError
    assert graph.pool is own
    with backend.capture_context(graph, pool=other):
        torch.ones(2)
    assert graph.pool is other
