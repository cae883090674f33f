"""Runners on the backend under test: buckets, padding and state."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import (
    POLICIES,
    SCRATCH,
    WIDTH,
    Kit,
    Model,
    check_run,
    decoder,
    prefiller,
    runner_of,
    same,
)


@pytest.mark.parametrize("policy", POLICIES)
def test_decode_equals_eager_for_every_size_in_any_order(kit: Kit, policy: str) -> None:
    """FAULTS 35."""
    model = Model(kit)
    runner = decoder(kit, model, config=policy)
    kit.churn()
    seed = 0
    for order in itertools.permutations((8, 1, 4, 2)):
        for count in order:
            seed += 1
            check_run(kit, runner, model, count, seed)
    stats = runner.stats()
    assert stats.graph_steps == stats.steps == seed
    assert stats.padded_rows == 0


@dg.region(host_args=("length",), mutates=("cache", "out"))
def attended(cache: torch.Tensor, x: torch.Tensor, out: torch.Tensor, *, length: int) -> None:
    """Append the rows of ``x`` to the cache, and sum all that it then holds."""
    cache[length - 1].copy_(x[0])
    out.copy_(cache[:length].sum(0, keepdim=True) + x)


@pytest.mark.parametrize("policy", POLICIES)
def test_host_argument_that_grows_past_every_budget_is_right_at_each_step(
    kit: Kit, policy: str
) -> None:
    """FAULTS 43."""
    cache = torch.zeros(64, WIDTH, device=kit.device)

    def forward(batch: Any) -> torch.Tensor:
        x: torch.Tensor = batch.x
        for _ in range(3):
            hidden = x + 1
            query = hidden * 2
            del hidden
            out = torch.empty_like(query)
            attended(cache, query, out, length=batch.host.length)
            x = (x + out) * 0.5
        return x

    def outputs(config: str) -> list[torch.Tensor]:
        runner = runner_of(kit, forward, max_requests=1, host_args={"length": 1}, config=config)
        cache.zero_()
        return [
            runner.run({"x": kit.tensor(1, WIDTH, seed=n)}, host_args={"length": n}, clone=True)
            for n in range(1, 33)
        ]

    for got, want in zip(outputs(policy), outputs("disabled"), strict=True):
        same(got, want)


@pytest.mark.parametrize("policy", POLICIES)
def test_padded_rows_change_neither_outputs_nor_state(kit: Kit, policy: str) -> None:
    """FAULTS 36."""
    model = Model(kit)
    runner = decoder(kit, model, config=policy)
    for seed, count in enumerate((3, 5, 7, 6, 8, 5, 3)):
        kit.backend.poison(model.cache[SCRATCH])  # what padded rows read reaches no real row
        check_run(kit, runner, model, count, seed)
    assert runner.stats().padded_rows > 0
    assert runner.stats().eager == {}


@pytest.mark.parametrize("policy", POLICIES)
def test_prefill_equals_eager_for_any_requests(kit: Kit, policy: str) -> None:
    """FAULTS 36."""
    model = Model(kit)
    runner = prefiller(kit, model, policy)
    cases = [(3,), (1, 2), (5, 2, 1), (4, 4, 4, 4), (16,), (1, 1, 1, 1), (7, 6)]
    for seed, lengths in enumerate([*cases, *reversed(cases)]):
        kit.backend.poison(model.cache[SCRATCH])
        check_run(kit, runner, model, lengths, seed)
    assert runner.stats().eager == {}


def test_prefill_and_decode_share_a_pool_and_take_turns(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 35."""
    model = Model(kit)
    prefill = prefiller(kit, model, pool=pool)
    decode = decoder(kit, model, pool=pool)
    for seed, (lengths, count) in enumerate([((5, 3), 2), ((16,), 8), ((3,), 1), ((2, 9), 4)]):
        check_run(kit, prefill, model, lengths, 2 * seed)
        check_run(kit, decode, model, count, 2 * seed + 1)
    assert prefill.stats().eager == decode.stats().eager == {}


def test_inputs_of_host_and_device_that_come_back_to_their_places_are_read_anew(kit: Kit) -> None:
    slots = [
        dg.InputSlot("ids", ("tokens",), torch.int64, pad=dg.Pad.fill(-1)),
        dg.InputSlot("scale", ("requests",), torch.float32, pad=dg.Pad.zero()),
    ]
    runner = runner_of(kit, lambda batch: batch.ids * batch.scale, slots)
    inputs = {"ids": torch.arange(3), "scale": torch.ones(3)}
    there = {name: tensor.to(kit.device) for name, tensor in inputs.items()}
    for given in (there, there, there, inputs, there, inputs, there, there):
        given["ids"].add_(1)
        kit.same(runner.run(given), given["ids"].to(kit.device) * there["scale"])
