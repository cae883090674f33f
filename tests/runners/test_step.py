"""What surrounds the graph of a runner: the hook before it, the step in its place, the notes of its
errors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.steps import VOCAB, WIDTH, X, runner_of, slot
from devgraph.testing.conformance.support import BREAKING, POLICIES, Kit, declares, same

IDS = slot("ids", ("tokens",), torch.int64, dg.Pad.zero())


class Planned:
    """A step that gathers rows by a plan, which ``prepare`` writes for the whole bucket."""

    def __init__(self, kit: Kit) -> None:
        self.table: torch.Tensor = kit.tensor(VOCAB, WIDTH)
        self.plan = torch.full((16,), -1, device=kit.device)
        self.planned: list[tuple[int, int]] = []

    def prepare(self, batch: Any) -> None:
        self.planned.append((batch.tokens, batch.real.tokens))
        rows = [3 * one % VOCAB for one in batch.ids.tolist()]  # on the host, as planners do
        self.plan[: batch.tokens].copy_(torch.tensor(rows))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.table[self.plan[: batch.tokens]] + 1

    def expected(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[3 * ids % VOCAB] + 1


@pytest.mark.parametrize("policy", [*POLICIES, "disabled"])
def test_prepare_plans_every_step_over_its_padded_batch(kit: Kit, policy: str) -> None:
    model = Planned(kit)
    runner = runner_of(kit, model.forward, [IDS], prepare=model.prepare, config=policy)
    before = len(model.planned)
    assert before == 0 if policy == "disabled" else before >= 2 * len(runner.graphs)
    for count in (3, 1, 4, 9):
        ids = torch.arange(count, device=kit.device) + count
        same(runner.run({"ids": ids}), model.expected(ids))
    padded = [3, 1, 4, 9] if policy == "disabled" else [4, 1, 4, 9]
    assert model.planned[before:] == list(zip(padded, [3, 1, 4, 9], strict=True))
    if policy != "disabled":
        assert runner.prove().ok


@dg.region(host_args=("length",), mutates=("out",))
def summed(x: torch.Tensor, out: torch.Tensor, *, length: int) -> None:
    out.copy_(x[:, :length].sum(1, keepdim=True) + x)


@declares("region_update")
@pytest.mark.parametrize("policy", POLICIES)
def test_prepare_returns_host_arguments(kit: Kit, policy: str) -> None:
    lengths = [1]

    def forward(batch: Any) -> torch.Tensor:
        out = torch.empty_like(batch.x)
        summed(batch.x, out, length=batch.host.length)
        return out

    runner = runner_of(
        kit,
        forward,
        config=policy,
        host_args={"length": 1},
        prepare=lambda batch: {"length": lengths[-1]},
    )
    x = kit.tensor(3, WIDTH)
    for length in (2, 5, 2):
        lengths.append(length)
        same(runner.run({"x": x}), x[:, :length].sum(1, keepdim=True) + x)


@pytest.mark.parametrize("policy", POLICIES)
def test_emulated_graphs_give_what_graphs_give(kit: Kit, policy: str) -> None:
    model = Planned(kit)
    config = {"policy": policy, "emulate": True}
    runner = runner_of(kit, model.forward, [IDS], prepare=model.prepare, config=config)
    for count in (3, 2, 4):
        ids = torch.arange(count, device=kit.device)
        same(runner.run({"ids": ids}), model.expected(ids))
    assert [planned for planned, _ in model.planned[-3:]] == [4, 2, 4]
    stats = runner.stats()
    assert (stats.graph_steps, stats.effective) == (3, "emulated")
    assert runner.prove().ok and "emulated" in runner.explain()


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("policy", BREAKING)
def test_an_error_in_a_replay_names_segment_mark_and_bucket(
    kit: Kit, policy: str, debug: bool
) -> None:
    broken: list[Exception] = []

    @dg.no_graph(mutates=("x",))
    def fragile(x: torch.Tensor) -> None:
        if broken:
            raise broken[0]
        x.add_(1)

    def forward(batch: Any) -> torch.Tensor:
        x: torch.Tensor = batch.x * 2
        fragile(x)
        return x * 3

    runner = runner_of(kit, forward, config=policy, debug=debug)
    x = kit.tensor(3, WIDTH)
    same(runner.run({"x": x}, clone=True), (x * 2 + 1) * 3)
    broken.append(ValueError("a fault of the engine"))
    with pytest.raises(ValueError, match="a fault of the engine") as caught:
        runner.run({"x": x})
    assert caught.value is broken.pop()
    notes = "\n".join(caught.value.__notes__)  # type: ignore[attr-defined]
    assert "segment 1 of 3, <eager " in notes and "fragile" in notes
    assert "decode, bucket 4" in notes
    same(runner.run({"x": x}, clone=True), (x * 2 + 1) * 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_runners_that_share_buffers_give_what_each_gives_alone(kit: Kit, policy: str) -> None:
    """Poison stands for what the other left: a run may read only what it was given."""
    y = slot("y", ("tokens",), torch.float32, dg.Pad.zero())
    target = runner_of(
        kit, lambda batch: batch.x * 2 + batch.y[:, None], [X, y], config=policy, max_requests=8
    )
    draft = runner_of(kit, lambda batch: batch.x * 3, config=policy, share=target)
    assert draft.pool is target.pool
    assert draft.buffers["x"].data_ptr() == target.buffers["x"].data_ptr()
    outputs: dict[dg.DecodeRunner, int] = {}
    for seed, (runner, count) in enumerate(
        itertools.product((target, draft, draft, target), (3, 1, 4))
    ):
        kit.backend.poison(target.buffers["x"])
        inputs = {"x": kit.tensor(count, WIDTH, seed=seed)}
        want = inputs["x"] * 3
        if runner is target:
            inputs["y"] = kit.tensor(count, seed=seed + 99)
            want = inputs["x"] * 2 + inputs["y"][:, None]
        out = runner.run(inputs)
        same(out, want, f"run {seed}")
        outputs[runner] = out.data_ptr()
    assert outputs[target] == outputs[draft]
    assert target.prove().ok and draft.prove().ok
    fed = draft.run({"x": target.run({"x": inputs["x"], "y": inputs["y"]})})
    same(fed, want * 3, "an output of one that is an input of the other")


def test_a_lease_ends_with_the_run_of_a_runner_that_shares_the_outputs(kit: Kit) -> None:
    target = runner_of(kit, lambda batch: batch.x * 2, debug=True, max_requests=8, name="target")
    draft = runner_of(kit, lambda batch: batch.x * 3, debug=True, share=target, name="draft")
    x = kit.tensor(2, WIDTH)
    out = target.run({"x": x})
    same(out + 0, x * 2)
    draft.run({"x": x})
    with pytest.raises(dg.StaleOutputError, match="target and draft"):
        out + 0
