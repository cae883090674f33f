"""What surrounds the graph of a runner: the notes of its errors, and leases of shared outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import BREAKING, WIDTH, Kit, runner_of, same


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


def test_a_lease_ends_with_the_run_of_a_runner_that_shares_the_outputs(kit: Kit) -> None:
    target = runner_of(kit, lambda batch: batch.x * 2, debug=True, max_requests=8, name="target")
    draft = runner_of(kit, lambda batch: batch.x * 3, debug=True, share=target, name="draft")
    x = kit.tensor(2, WIDTH)
    out = target.run({"x": x})
    same(out + 0, x * 2)
    draft.run({"x": x})
    with pytest.raises(dg.StaleOutputError, match="target and draft"):
        out + 0
