"""Marked steps under each policy: positions of breaks, host arguments and compiled pieces."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import BREAKING, POLICIES, Kit, declares, same


@dg.region()
def doubled(x: torch.Tensor) -> torch.Tensor:
    """Double ``x`` in a region without host arguments."""
    return x * 2


@dg.no_graph(fake=torch.empty_like)
def summed_on_host(x: torch.Tensor) -> torch.Tensor:
    """Read device data on the host, which a capture forbids."""
    return x + float(x.detach().cpu().sum())


def chain(x: torch.Tensor) -> torch.Tensor:
    h = doubled(x + 1)
    h = h * h
    return doubled(h) - 3


def with_breaks(x: torch.Tensor) -> torch.Tensor:
    h = x + 1
    dg.graph_break()
    h = h * 2
    dg.graph_break()
    dg.graph_break()
    return h - 1


@pytest.mark.parametrize("step", [chain, with_breaks])
@pytest.mark.parametrize("policy", POLICIES)
def test_empty_breaks_leave_no_segment(kit: Kit, policy: str, step: Callable[..., Any]) -> None:
    x = kit.tensor(8)
    captured = kit.capture(step, x, policy=policy)
    for seed in (20, 21):
        kit.check(captured, step, x, seed=seed)
    if step is with_breaks and policy != "full":
        nodes = [segment.info().nodes for segment in captured.segments]
        counts = None not in nodes or kit.backend.capabilities.node_counts
        # Without node counts, a backend cannot detect that the fourth segment is empty.
        assert len([count for count in nodes if count != 0]) == (3 if counts else 4)


class Layer(torch.nn.Module):
    """A module with three operations, of which the second is in a marked function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = doubled(x + 1)
        return x * x


@declares("node_ranges")
def test_nodes_have_the_names_of_modules_and_marks(kit: Kit) -> None:
    model = torch.nn.Sequential(Layer(), torch.nn.Identity(), Layer())
    captured = kit.capture(lambda x: model(x) - 3, kit.tensor(8), name_nodes=model)
    (graph,) = captured.segments
    known = all(one.first is not None for one in graph.ranges)
    assert known, "_nodes_so_far must return the number of recorded nodes"
    assert [(one.depth, one.name, one.first, one.stop) for one in graph.ranges] == [
        (0, "0", 0, 3),
        (1, "doubled", 1, 2),
        (0, "2", 3, 6),
        (1, "doubled", 4, 5),
    ]
    assert captured.info().nodes == 7
    assert "2, nodes 3 to 5" in captured.explain()


def test_names_are_ordered_without_known_nodes(kit: Kit) -> None:
    model = torch.nn.Sequential(Layer())
    (graph,) = kit.capture(model, kit.tensor(8), name_nodes=model).segments
    assert [one.name for one in graph.ranges] == ["0", "doubled"]
    known = kit.backend.capabilities.node_ranges
    assert all((one.first is None) == (one.stop is None) == (not known) for one in graph.ranges)


@declares("node_ranges")
def test_a_module_around_a_break_has_nodes_on_both_sides(kit: Kit) -> None:
    model = torch.nn.Sequential(Layer(), torch.nn.ReLU())
    captured = kit.capture(model, kit.tensor(8), policy="breakable", name_nodes=model)
    before, _, behind = captured.segments
    assert [str(one) for one in before.ranges] == ["0, node 0"]
    assert [str(one) for one in behind.ranges] == ["0, node 0", "1, node 1"]


def _adjacent_breaks(x: torch.Tensor) -> torch.Tensor:
    """Run two adjacent breaks, and a break at each end."""
    return doubled(summed_on_host(summed_on_host(doubled(x))))


@pytest.mark.parametrize("policy", BREAKING)
@pytest.mark.parametrize(("step", "breaks"), [(doubled, 1), (_adjacent_breaks, 4)])
def test_adjacent_breaks_work(kit: Kit, policy: str, step: Callable[..., Any], breaks: int) -> None:
    """FAULTS 26."""
    x = kit.tensor(8)
    captured = kit.capture(step, x, policy=policy)
    assert [isinstance(s, dg.DeviceGraph) for s in captured.segments].count(False) == breaks
    kit.check(captured, step, x)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("around", ["region", "capture"])
def test_region_keeps_the_autocast_of_capture(kit: Kit, policy: str, around: str) -> None:
    x, w = kit.tensor(4, 16), kit.tensor(16, 16, seed=1)
    autocast = functools.partial(torch.autocast, kit.device.type, torch.bfloat16)

    @dg.region(fake=lambda x, w: torch.empty_like(x))
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).float()

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with autocast(enabled=around == "region"):
            return product(x * 2, w) + 1

    with autocast(enabled=around == "capture"):
        captured = kit.capture(step, x, w, policy=policy)
    for seed in (5, 6):
        kit.refill(x, seed)
        with autocast(enabled=around == "capture"):
            got, want = captured.replay(), step(x, w)
        kit.same(got, want)


@dg.region(host_args=("length",))
def prefix_sum(x: torch.Tensor, *, length: int) -> torch.Tensor:
    return x[:, :length].sum(1)


def step(x: torch.Tensor, *, length: int) -> torch.Tensor:
    return prefix_sum(x * 2, length=length) + 1


LENGTHS = (3, 5, 1, 8, 5, 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_changed_host_argument_is_applied_or_refused(kit: Kit, policy: str) -> None:
    x = kit.tensor(4, 8)
    captured = kit.capture(step, x, policy=policy, host_args={"length": 3})
    for seed, length in enumerate(LENGTHS):
        if length in kit.usable(policy, LENGTHS):
            kit.check(captured, step, x, seed=seed, length=length)
        else:
            with pytest.raises(dg.UpdateUnsupportedError, match="breakable"):
                captured.replay(length=length)


@pytest.mark.parametrize("policy", POLICIES)
def test_context_is_read_once_per_replay_on_its_thread(kit: Kit, policy: str) -> None:
    ambient = threading.local()
    reads = []

    def snapshot() -> int:
        reads.append(threading.get_ident())
        return int(ambient.length)

    @dg.region(context=snapshot)
    def body(x: torch.Tensor, *, context: int = 0) -> torch.Tensor:
        return x[:, :context].sum(1)

    def ambiently(x: torch.Tensor) -> Any:
        h = x * 2
        return body(h), body(h + 1)

    x = kit.tensor(4, 8)
    ambient.length = 3
    captured = kit.capture(ambiently, x, policy=policy)
    for length in kit.usable(policy, (3, 5, 8, 3)):
        ambient.length = length
        reads.clear()
        out = captured.replay()
        assert reads == [threading.get_ident()]
        kit.backend.synchronize()
        h = x * 2
        same(out, (h[:, :length].sum(1), (h + 1)[:, :length].sum(1)))
