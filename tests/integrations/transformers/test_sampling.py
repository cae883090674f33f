"""Choosing tokens: filters as transformers has them, seeds, one transfer."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the transformers integration")

from devgraph.api.errors import DeviceGraphError
from devgraph.integrations.transformers.sampling import (
    Sampler,
    SamplingParams,
    draw_rows,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.6), (0.9, 12, 0.35), (1.0, 1, 1.0), (2.0, 0, 1e-6)],
)
def test_filters_keep_what_transformers_keeps(temperature: float, top_k: int, top_p: float) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 3
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    want = transformers.TemperatureLogitsWarper(temperature)(None, logits[None].clone())
    if top_k:
        want = transformers.TopKLogitsWarper(top_k)(None, want)
    if top_p < 1:
        want = transformers.TopPLogitsWarper(top_p)(None, want)
    got = Sampler(params, CPU).kept(logits)
    assert torch.equal(got.isinf(), want[0].isinf())
    assert not got.isinf().all()
    torch.testing.assert_close(got, want[0])


def test_best_token_stays_when_it_alone_passes_top_p() -> None:
    logits = torch.tensor([0.0, 9.0, 1.0])
    kept = Sampler(SamplingParams(temperature=1.0, top_p=0.01), CPU).kept(logits)
    assert kept.isinf().tolist() == [True, False, True]


def test_draws_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.2, 0.0])
    sampler = Sampler(SamplingParams(temperature=1.0, seed=11), CPU)
    logits = probabilities.log()
    counts = torch.zeros(4)
    for _ in range(4000):
        counts[int(sampler.draw(logits))] += 1
    assert counts[3] == 0
    # Three standard deviations of the rarest class are 0.019.
    torch.testing.assert_close(counts / 4000, probabilities, atol=0.025, rtol=0)


def test_same_seed_gives_same_draws_and_another_seed_others() -> None:
    logits = torch.zeros(1000)

    def draws(seed: int) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), CPU)
        return [int(sampler.draw(logits)) for _ in range(6)]

    assert draws(5) == draws(5)
    assert draws(5) != draws(6)


def test_unseeded_samplers_differ() -> None:
    logits = torch.zeros(100_000)
    drawn = {int(Sampler(SamplingParams(temperature=1.0), CPU).draw(logits)) for _ in range(4)}
    assert len(drawn) > 1


def test_rows_mix_greedy_and_sampled_requests() -> None:
    logits = torch.full((3, 8), -math.inf)
    logits[0, 2] = logits[1, 5] = logits[2, 7] = 0.0
    sampler = Sampler(SamplingParams(temperature=1.0, seed=0), CPU)
    assert draw_rows(logits, torch.tensor([2, 0, 1]), [None, sampler, None]) == [2, 5, 1]


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
    ],
)
def test_bad_parameters_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(DeviceGraphError, match=next(iter(bad))) as error:
        SamplingParams(**bad)
    assert isinstance(error.value, ValueError)
