"""Requests: how tokens are chosen and become text, slots, budgets, chunks and moves."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="the transformers integration")

from devgraph.api.errors import DeviceGraphError, InputError, InputTypeError
from devgraph.integrations.transformers.requests import (
    FinishReason,
    Request,
    Sampler,
    SamplingParams,
    Scheduler,
    TextStream,
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


@pytest.mark.parametrize("seed", [-(2**63), 2**63 + 5, 2**64 - 1])
def test_seeds_that_torch_takes_are_taken(seed: int) -> None:
    assert SamplingParams(temperature=1.0, seed=seed).seed == seed


def test_unseeded_samplers_differ() -> None:
    logits = torch.zeros(100_000)
    drawn = {int(Sampler(SamplingParams(temperature=1.0), CPU).draw(logits)) for _ in range(4)}
    assert len(drawn) > 1


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"temperature": 10**400},
        {"top_k": -1},
        {"top_k": 2.5},
        {"top_p": 0.0},
        {"top_p": 1.5},
    ],
)
def test_bad_parameters_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(DeviceGraphError, match=next(iter(bad))) as error:
        SamplingParams(**bad)
    assert isinstance(error.value, ValueError | TypeError)


class ByteTokenizer:
    """One token per UTF-8 byte; a broken character decodes to U+FFFD, as real tokenizers do."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return bytes(tokens).decode("utf-8", errors="replace")


class WordTokenizer:
    """Like sentencepiece: the first word of what is decoded has no space before it."""

    words = ("the", "cat", "sat", "on", "mat")

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(self.words[t] for t in tokens)


def feed(stream: TextStream, tokens: list[int]) -> list[str]:
    return [stream.push(t) for t in tokens]


def test_characters_of_several_tokens_come_whole() -> None:
    text = "naïve 🙂 ok"
    stream = TextStream(ByteTokenizer())
    pieces = feed(stream, list(text.encode()))
    assert "".join(pieces) == text == stream.text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert "🙂" in pieces


def test_words_keep_the_space_before_them() -> None:
    stream = TextStream(WordTokenizer())
    assert feed(stream, [0, 1, 2]) == ["the", " cat", " sat"]


def test_broken_character_at_the_end_is_flushed_by_finish() -> None:
    stream = TextStream(ByteTokenizer())
    assert feed(stream, [ord("a"), 0xC3]) == ["a", ""]
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def request(number: int, length: int, **options: object) -> Request:
    values = {"max_new_tokens": 3, "eos": frozenset({99}), "stop": frozenset({98})} | options
    return Request(number, list(range(length)), sampler=None, stream=None, **values)


def advance(scheduler: Scheduler) -> list[tuple[int, int, int]]:
    """Run one step without a model; returns (request, slot, tokens) of each chunk."""
    scheduler.admit()
    scheduler.compact()
    chunks = scheduler.plan()
    seen = [(c.request.id, c.slot, c.count) for c in chunks]
    for chunk in chunks:
        completes = chunk.completes
        chunk.request.cached += chunk.count
        if completes:
            chunk.request.accept(7)
    return seen


def test_long_prompt_runs_in_chunks_of_the_budget() -> None:
    scheduler = Scheduler(2, max_step_tokens=8)
    scheduler.waiting.append(request(0, 19))
    assert [advance(scheduler) for _ in range(4)] == [
        [(0, 0, 8)],
        [(0, 0, 8)],
        [(0, 0, 3)],
        [(0, 0, 1)],
    ]


def test_decoding_requests_keep_running_beside_a_long_prompt() -> None:
    scheduler = Scheduler(2, max_step_tokens=4)
    scheduler.waiting.append(request(0, 2))
    advance(scheduler)
    scheduler.waiting.append(request(1, 5))
    assert advance(scheduler) == [(0, 0, 1), (1, 1, 3)]
    assert advance(scheduler) == [(0, 0, 1), (1, 1, 2)]


def test_budget_is_never_exceeded_and_first_come_is_first_served() -> None:
    scheduler = Scheduler(4, max_step_tokens=6)
    for number in range(4):
        scheduler.waiting.append(request(number, 5))
    assert advance(scheduler) == [(0, 0, 5), (1, 1, 1)]
    assert advance(scheduler) == [(0, 0, 1), (1, 1, 4), (2, 2, 1)]
    assert sum(count for *_, count in advance(scheduler)) == 6


def test_request_waits_until_a_slot_is_free() -> None:
    scheduler = Scheduler(1, max_step_tokens=8)
    scheduler.waiting.append(request(0, 2))
    scheduler.waiting.append(request(1, 2))
    advance(scheduler)
    assert len(scheduler.waiting) == 1
    assert scheduler.release(scheduler.find(0)) == 0
    assert advance(scheduler) == [(1, 0, 2)]


def test_hole_goes_to_a_waiting_request_before_anything_is_moved() -> None:
    scheduler = Scheduler(3, max_step_tokens=16)
    for number in range(4):
        scheduler.waiting.append(request(number, 2))
    advance(scheduler)
    scheduler.release(scheduler.find(0))
    scheduler.admit()
    assert scheduler.compact() == []
    assert scheduler.find(3).slot == 0


def test_last_request_is_moved_into_a_hole_that_stays() -> None:
    scheduler = Scheduler(4, max_step_tokens=16)
    for number in range(4):
        scheduler.waiting.append(request(number, number + 2))
    advance(scheduler)
    scheduler.release(scheduler.find(0))
    scheduler.release(scheduler.find(2))
    assert scheduler.compact() == [(3, 0, 5)]
    assert [r.id for r in scheduler.running] == [3, 1]
    assert [r.slot for r in scheduler.running] == [0, 1]
    assert scheduler.compact() == []


def test_prompt_of_one_token_is_a_decode_step_at_once() -> None:
    scheduler = Scheduler(2, max_step_tokens=8)
    scheduler.waiting.append(request(0, 1))
    scheduler.admit()
    assert all(c.completes and c.count == 1 for c in scheduler.plan())


def test_packed_step_has_one_request_where_each_runs_alone() -> None:
    scheduler = Scheduler(3, max_step_tokens=8, alone=True)
    for number, length in enumerate((1, 5, 12)):
        scheduler.waiting.append(request(number, length))
    scheduler.admit()
    for wanted in ([(1, 5)], [(2, 7)], [(2, 5)], [(0, 1)]):
        chunks = scheduler.plan()
        assert [(c.request.id, c.count) for c in chunks] == wanted
        for chunk in chunks:
            chunk.request.cached += chunk.count


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [([1, 99], FinishReason.EOS), ([98], FinishReason.STOP), ([1, 2, 3], FinishReason.LENGTH)],
)
def test_request_ends_for_the_right_reason(tokens: list[int], reason: FinishReason) -> None:
    one = request(0, 2)
    for token in tokens:
        assert one.finish_reason is None
        one.accept(token)
    assert one.finish_reason is reason
    assert one.generated == tokens


def test_waiting_request_can_be_released() -> None:
    scheduler = Scheduler(1, max_step_tokens=8)
    scheduler.waiting.append(request(0, 2))
    assert scheduler.release(scheduler.find(0)) is None
    assert not scheduler


def test_budget_below_one_token_a_slot_is_refused() -> None:
    with pytest.raises(DeviceGraphError, match="at least 8"):
        Scheduler(8, max_step_tokens=7)


def test_unknown_request_is_named() -> None:
    scheduler = Scheduler(1, max_step_tokens=8)
    scheduler.waiting.append(request(12, 2))
    with pytest.raises(DeviceGraphError, match="no request 3"):
        scheduler.find(3)


@pytest.mark.parametrize("value", ["hot", None, True, b"1", [1.0], torch.tensor(0.5)])
@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "seed"])
def test_sampling_parameters_of_another_kind_are_named(name: str, value: object) -> None:
    if name == "seed" and value is None:
        return
    with pytest.raises(InputTypeError, match=name):
        SamplingParams(**{name: value})


def test_temperature_too_small_to_divide_by_is_refused() -> None:
    # Logits over it are infinite: every probability was nan, and the first token was taken.
    with pytest.raises(InputError, match="temperature"):
        SamplingParams(temperature=1e-40)
    sampler = Sampler(SamplingParams(temperature=1e-30, seed=1), torch.device("cpu"))
    assert int(sampler.draw(torch.tensor([1.0, 7.0, 3.0]))) == 1
