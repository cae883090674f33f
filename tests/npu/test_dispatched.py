"""Operators that torch_npu records for updates by itself, over the simulated driver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import devgraph as dg
from tests.sim.ascend import Driver

pytest_plugins = ["tests.sim.ascend.plugin"]
pytestmark = [
    pytest.mark.npu,
    pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format"),
]

HEADS, SIZE, ROWS = 2, 8, 16


class Attending:
    """A graph of two attentions over the same keys, one after the other."""

    def __init__(self, backend: Any, version: int) -> None:
        import torch_npu

        generator = torch.Generator().manual_seed(1)
        shapes = ((2, HEADS, 1, SIZE), (2, HEADS, ROWS, SIZE), (2, HEADS, ROWS, SIZE))
        self.tensors = [torch.randn(s, generator=generator).half().npu() for s in shapes]
        suffix = "_v2" if version == 2 else ""
        self.operator = getattr(torch_npu, f"npu_fused_infer_attention_score{suffix}")
        self.name = "actual_seq_kvlen" if version == 2 else "actual_seq_lengths_kv"
        heads, scale = ("num_query_heads", "softmax_scale") if suffix else ("num_heads", "scale")
        self.fixed = {"input_layout": "BNSD", heads: HEADS, scale: 0.5}
        self.backend = backend
        self.graph = backend.make_graph()

    def __call__(self, first: list[int], second: list[int]) -> torch.Tensor:
        query, keys, values = self.tensors
        for lengths in (first, second):
            query, _ = self.operator(query, keys, values, **self.fixed, **{self.name: lengths})
        return query * 2

    def capture(self) -> torch.Tensor:
        self.graph.auto_dispatch = True
        with self.backend.capture_context(self.graph):
            return self([4, 4], [4, 4])


@pytest.fixture(params=[1, 2])
def attending(driver: Driver, request: pytest.FixtureRequest) -> Iterator[Attending]:
    made = Attending(dg.get_backend("npu"), request.param)
    yield made
    made.graph.close()


def test_lengths_of_each_operator_are_updated_before_the_next_replay(
    driver: Driver, attending: Attending
) -> None:
    out = attending.capture()
    with driver.counting() as moved:
        for first, second in (([3, 9], [16, 1]), ([5, 5], [2, 7]), ([16, 16], [1, 1])):
            attending.graph.update_inputs([{attending.name: first}, {attending.name: second}])
            for _ in range(2):  # the second replay repeats the first one's values
                attending.graph.replay()
                attending.backend.synchronize()
                assert torch.equal(out, attending(first, second))
    assert moved["group_updates"] == 6
    assert moved["replays"] == 6


def test_one_mapping_serves_all_operators(driver: Driver, attending: Attending) -> None:
    out = attending.capture()
    attending.graph.update_inputs([{attending.name: [7, 2]}])
    attending.graph.replay()
    attending.backend.synchronize()
    assert torch.equal(out, attending([7, 2], [7, 2]))


def test_replay_without_an_update_repeats_the_values_of_capture(
    driver: Driver, attending: Attending
) -> None:
    out = attending.capture()
    attending.graph.replay()
    attending.backend.synchronize()
    assert torch.equal(out, attending([4, 4], [4, 4]))


def test_unknown_name_and_wrong_count_are_refused_and_change_nothing(
    driver: Driver, attending: Attending
) -> None:
    out = attending.capture()
    with pytest.raises(dg.HostArgumentError, match=attending.name):
        attending.graph.update_inputs([{attending.name + "s": [1, 1]}])
    with pytest.raises(dg.HostArgumentError, match="2 operators to update and got 3"):
        attending.graph.update_inputs([{attending.name: [1, 1]}] * 3)
    attending.graph.replay()
    attending.backend.synchronize()
    assert torch.equal(out, attending([4, 4], [4, 4]))


def test_graph_without_operators_to_update_says_what_to_do(driver: Driver) -> None:
    backend: Any = dg.get_backend("npu")
    graph, x = backend.make_graph(), torch.ones(2).npu()
    with backend.capture_context(graph):
        x + 1
    with pytest.raises(dg.HostArgumentError, match="auto_dispatch = True before"):
        graph.update_inputs([{"scale": 1.0}])


def test_failed_capture_leaves_no_dispatch_mode_behind(
    driver: Driver, attending: Attending
) -> None:
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    before = _get_current_dispatch_mode_stack()
    attending.graph.auto_dispatch = True
    with pytest.raises(KeyError), attending.backend.capture_context(attending.graph):
        attending([1, 1], [1, 1])
        raise KeyError
    assert _get_current_dispatch_mode_stack() == before
    out = attending.capture()
    attending.graph.replay()
    attending.backend.synchronize()
    assert torch.equal(out, attending([4, 4], [4, 4]))
