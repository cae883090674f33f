"""Continuous batching: the tokens of transformers, in every mode, whoever joins and leaves."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers integration")

from devgraph.api.config.facts import EngineFacts
from devgraph.api.config.model import DeviceGraphConfig
from devgraph.api.errors import ConfigError, DeviceGraphError, StateError
from devgraph.integrations.transformers import (
    Engine,
    EngineStats,
    FinishReason,
    SamplingParams,
    TokenEvent,
)
from tests.support.transformers_models import FAMILIES, VOCABULARY, make_model, prompts, reference

EAGER = '{"decode": "disabled", "prefill": "disabled"}'
GRAPHS = '{"decode": {"policy": "full", "buckets": [2, 3]}, "prefill": {"buckets": [8, 16]}}'
BREAKABLE = (
    '{"decode": {"policy": "breakable", "buckets": [3], "max_padding": 9}, '
    '"prefill": {"buckets": [16], "max_padding": 16}}'
)
FULL = '{"decode": "full", "prefill": {"policy": "full", "buckets": [16], "max_padding": 16}}'


def make_engine(model: Any, mode: str = EAGER, **options: Any) -> Engine:
    """Return an engine with three slots and steps of 16 tokens, over a poisoned cache."""
    values = {"max_requests": 3, "max_len": 100, "max_step_tokens": 16, "backend": "cpu"} | options
    engine = Engine(model, config=DeviceGraphConfig.from_json(mode), **values)
    for layer in engine.model.cache.layers:
        layer.keys.fill_(math.nan)
        layer.values.fill_(math.nan)
    return engine


def finish(engine: Engine) -> dict[int, list[int]]:
    """Run until nothing waits or runs; tokens by request."""
    tokens: dict[int, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            tokens.setdefault(event.request_id, []).append(event.token)
    return tokens


@pytest.mark.parametrize("mode", [EAGER, GRAPHS], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_seven_prompts_in_three_slots_give_the_tokens_of_generate(family: str, mode: str) -> None:
    model = make_model(family)
    texts = prompts(7)
    want = [reference(model, text, 9) for text in texts]
    with make_engine(model, mode) as engine:
        done = engine.generate(texts, max_new_tokens=9)
        assert [list(one.token_ids) for one in done] == want
        assert {one.finish_reason for one in done} == {FinishReason.LENGTH}
        stats = engine.decode.stats(), engine.prefill.stats()
        in_graphs = sum(s.graph_steps for s in stats)
        assert in_graphs == (sum(s.steps for s in stats) if mode == GRAPHS else 0)


@pytest.mark.parametrize("mode", [BREAKABLE, FULL], ids=["breakable", "full"])
def test_other_modes_give_the_same_tokens(mode: str) -> None:
    model = make_model("gemma3")
    texts = prompts(5)
    want = [reference(model, text, 9) for text in texts]
    with make_engine(model, mode) as engine:
        engine.capture()
        done = engine.generate(texts, max_new_tokens=9)
        assert [list(one.token_ids) for one in done] == want
        decode, prefill = engine.decode.stats(), engine.prefill.stats()
        assert decode.graph_steps == decode.steps
        assert prefill.graph_steps + sum(prefill.eager.values()) == prefill.steps
        # Exact spans may need other kernels than those captured: counted then, never silent.
        assert set(prefill.eager) <= {"update_topology"} if mode == FULL else not prefill.eager


def test_no_prompt_waits_for_a_graph_unless_somebody_chose_graphs() -> None:
    model = make_model("gemma3")
    captured = []
    with make_engine(model, '{"decode": "full", "prefill": "breakable"}') as engine:
        engine.generate(
            [[1, 2, 3]],
            max_new_tokens=5,
            on_event=lambda _: captured.append(engine.decode.stats().captures),
        )
        assert captured == [0, 0, 1, 1, 1]
        engine.capture()
        assert len(engine.prefill.graphs.captured) == len(engine.prefill.graphs)
    chosen = '{"decode": {"policy": "full", "buckets": [1, 3]}, "prefill": "disabled"}'
    with make_engine(model, chosen) as engine:
        engine.generate([[1, 2, 3]], max_new_tokens=2)
        assert engine.decode.stats().captures == len(engine.decode.graphs)


def test_a_hook_stops_graphs_that_would_skip_it() -> None:
    model = make_model("llama")
    text = prompts(1)[0]
    want, seen = reference(model, text, 4), []
    model.model.layers[0].register_forward_hook(lambda *_: seen.append(1))
    with pytest.raises(ConfigError, match=r'decode.policy="full".*debug-hooks'):
        make_engine(model, GRAPHS)
    with Engine(model, backend="cpu", max_requests=1, max_len=64) as engine:
        seen.clear()
        [done] = engine.generate([text], max_new_tokens=4)
        assert list(done.token_ids) == want
        assert len(seen) == 4, "each step ran the hook"
        for runner in (engine.prefill, engine.decode):
            assert runner.stats().requested == "disabled"


def test_piecewise_is_refused_because_steps_replace_attributes_of_the_model() -> None:
    with pytest.raises(ConfigError, match="prefill.policy.*piecewise-traceable"):
        make_engine(make_model("llama"), '{"prefill": "piecewise"}', facts=EngineFacts())


def test_only_a_model_with_code_of_others_runs_before_each_capture() -> None:
    class Foreign(torch.nn.Linear):
        """A layer that may keep what it made in its first run of a size."""

    def steps(**decode: int) -> int:
        mode = {"decode": {"policy": "full", "buckets": [1, 2], **decode}, "prefill": "disabled"}
        options = {"max_requests": 2, "max_len": 64, "facts": EngineFacts()}
        with Engine(model, config=mode, backend="cpu", **options) as engine:
            ran.clear()
            engine.capture()
            return len(ran)

    model, ran = make_model("llama"), []
    model.model.layers[0].register_forward_hook(lambda *_: ran.append(1))
    assert steps() == 3, "one shows what it returns, and two are captured"
    assert steps(warmup=1) == 5
    model.model.layers[0].mlp.down_proj.__class__ = Foreign
    assert steps() == 5
    assert steps(warmup=0) == 3


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_many_prompts_through_one_bucket_of_a_full_prefill_give_the_same_tokens(
    family: str,
) -> None:
    """Each brings spans that were never recorded, until the budget of misses is spent."""
    model = make_model(family)
    texts = prompts(20, longest=16)
    want = [reference(model, text, 3) for text in texts]
    with make_engine(model, FULL) as engine:
        engine.capture()
        done = [engine.generate([text], max_new_tokens=3)[0] for text in texts]
        assert [list(one.token_ids) for one in done] == want


def test_model_runs_with_its_own_kernels_where_nothing_may_be_fused() -> None:
    model = make_model("llama")
    text = prompts(1)[0]
    with make_engine(model, GRAPHS, fuse=False) as engine:
        assert engine.model.fusion is None
        assert list(engine.generate([text], max_new_tokens=5)[0].token_ids) == reference(
            model, text, 5
        )


def test_late_requests_change_nothing_for_those_that_run() -> None:
    model = make_model("llama")
    texts = prompts(4, shortest=6, longest=30)
    want = [reference(model, text, 20) for text in texts]
    with make_engine(model, GRAPHS) as engine:
        engine.capture()
        tokens: dict[int, list[int]] = {}
        for number, text in enumerate(texts):
            assert engine.add_request(text, max_new_tokens=20) == number
            for _ in range(5):
                for event in engine.step():
                    tokens.setdefault(event.request_id, []).append(event.token)
        for number, rest in finish(engine).items():
            tokens.setdefault(number, []).extend(rest)
        assert [tokens[i] for i in range(4)] == want


def test_slots_are_used_again_after_requests_left_in_any_order() -> None:
    model = make_model("mistral")
    texts = prompts(9, longest=25)
    lengths = [3, 14, 1, 8, 2, 11, 5, 1, 6]
    want = {i: reference(model, t, n) for i, (t, n) in enumerate(zip(texts, lengths, strict=True))}
    with make_engine(model, GRAPHS) as engine:
        engine.capture()
        for text, count in zip(texts, lengths, strict=True):
            engine.add_request(text, max_new_tokens=count)
        assert finish(engine) == want


def test_chunks_of_any_size_give_the_same_tokens() -> None:
    model = make_model("gemma3")
    text = prompts(1, shortest=41, longest=41)[0]
    want = reference(model, text, 6)
    for budget in (1, 7, 16, 64):
        with make_engine(model, max_requests=1, max_step_tokens=budget) as engine:
            done = engine.generate([text], max_new_tokens=6)
            assert list(done[0].token_ids) == want
            steps = sum(runner.stats().steps for runner in engine.runners)
            assert steps == -(-41 // budget) + 5


def test_poison_that_a_request_leaves_behind_does_not_reach_the_next() -> None:
    model = make_model("llama")
    text = prompts(1, shortest=5, longest=5)[0]
    want = reference(model, text, 10)
    with make_engine(model, GRAPHS) as engine:
        engine.capture()
        for _ in range(2):
            request = engine.add_request(text, max_new_tokens=40)
            for _ in range(30):
                engine.step()
            engine.cancel(request)
            for layer in engine.model.cache.layers:
                layer.keys.fill_(math.nan)
                layer.values.fill_(math.nan)
            assert list(engine.generate([text], max_new_tokens=10)[0].token_ids) == want


def test_end_of_sequence_ends_a_request_and_frees_its_slot() -> None:
    model = make_model("llama")
    text = prompts(1, shortest=8, longest=8)[0]
    tokens = reference(model, text, 12)
    with make_engine(model, eos_token_ids=[tokens[4]]) as engine:
        done = engine.generate([text], max_new_tokens=12)[0]
        assert list(done.token_ids) == tokens[: tokens.index(tokens[4]) + 1]
        assert done.finish_reason is FinishReason.EOS
        assert not engine.has_work


def test_end_of_sequence_comes_from_the_model_by_default() -> None:
    model = make_model("llama")
    text = prompts(1, shortest=8, longest=8)[0]
    tokens = reference(model, text, 12)
    model.generation_config.eos_token_id = [tokens[2], VOCABULARY + 5]
    with make_engine(model) as engine:
        done = engine.generate([text], max_new_tokens=12)[0]
        assert done.token_ids[-1] == tokens[2]
        assert done.finish_reason is FinishReason.EOS


def test_stop_token_ends_only_the_request_that_asked() -> None:
    model = make_model("llama")
    text = prompts(1, shortest=8, longest=8)[0]
    tokens = reference(model, text, 12)
    with make_engine(model) as engine:
        engine.add_request(text, max_new_tokens=12, stop_token_ids=[tokens[3]])
        engine.add_request(text, max_new_tokens=12)
        done = finish(engine)
        assert done[0] == tokens[: tokens.index(tokens[3]) + 1]
        assert done[1] == tokens


class Letters:
    """A tokenizer of one letter a token."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) - 32 for c in text]}

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(t + 32) for t in tokens)


@pytest.mark.parametrize("mode", [EAGER, GRAPHS], ids=["eager", "graphs"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_launches_of_several_steps_give_the_tokens_of_single_ones(family: str, mode: str) -> None:
    model = make_model(family)
    texts = prompts(7)
    want = [reference(model, text, 9) for text in texts]
    eos = want[3][4]
    with make_engine(model, mode, steps_per_launch=4, eos_token_ids=[eos]) as engine:
        done = engine.generate(texts, max_new_tokens=9)
        ended = [tokens[: tokens.index(eos) + 1] if eos in tokens else tokens for tokens in want]
        assert [list(one.token_ids) for one in done] == ended
        assert engine.several is not None
        several = engine.several.stats()
        assert several.steps and several.graph_steps == (several.steps if mode == GRAPHS else 0)
        if mode == GRAPHS:
            engine.capture()
            assert engine.several.prove().ok


def test_what_a_launch_made_behind_a_stop_is_dropped_and_the_place_is_free() -> None:
    model = make_model("llama")
    texts = prompts(4)
    want = [reference(model, text, 12) for text in texts]
    with make_engine(model, GRAPHS, steps_per_launch=4, max_requests=3) as engine:
        ids = [
            engine.add_request(text, max_new_tokens=12, stop_token_ids=[tokens[2]] * (i == 1))
            for i, (text, tokens) in enumerate(zip(texts, want, strict=True))
        ]
        made: dict[int, list[TokenEvent]] = {}
        while engine.has_work:
            events = engine.step()
            if len(events) > 3:  # step by step, as single steps would tell them
                order = [event.request_id for event in events]
                assert order[:2] == sorted(order[:2]) and len(set(order[:3])) > 1
            for event in events:
                made.setdefault(event.request_id, []).append(event)
        want[1] = want[1][: want[1].index(want[1][2]) + 1]
        assert [[event.token for event in made[i]] for i in ids] == want
        assert [made[i][-1].finish_reason for i in ids] == ["length", "stop", "length", "length"]


def test_a_request_that_draws_tokens_runs_step_by_step() -> None:
    model = make_model("llama")
    texts = prompts(2)
    sampling = [SamplingParams(), SamplingParams(temperature=1.0, seed=5)]
    with make_engine(model) as single, make_engine(model, steps_per_launch=4) as engine:
        want = single.generate(texts, max_new_tokens=9, sampling=sampling)
        got = engine.generate(texts, max_new_tokens=9, sampling=sampling)
        assert [one.token_ids for one in got] == [one.token_ids for one in want]
        assert engine.several is not None and engine.several.stats().steps == 0


def test_a_launch_is_made_for_half_of_its_tokens_and_no_fewer() -> None:
    model = make_model("llama")
    want = reference(model, [5, 6, 7], 5)
    with make_engine(model, steps_per_launch=8) as engine:
        assert engine.several is not None
        for count, launches in ((1, 0), (4, 0), (5, 1)):  # the first token is prefill's
            (done,) = engine.generate([[5, 6, 7]], max_new_tokens=count)
            assert list(done.token_ids) == want[:count]
            assert engine.several.stats().steps == launches


def test_an_engine_without_a_configuration_reads_the_mode_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DEVGRAPH_MODE", '{"decode": "disabled"}')
    with Engine(make_model("llama"), backend="cpu", max_len=100) as engine:
        assert engine.decode.stats().requested == "disabled"


@pytest.mark.parametrize("debug", ["1", ""])
def test_debugging_names_the_nodes_by_the_model_s_modules(
    debug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEVGRAPH_DEBUG", debug)
    with make_engine(make_model("llama"), GRAPHS) as engine:
        engine.decode.capture(everything=True)
        named = "model.layers.1.self_attn.o_proj, node" in engine.decode.explain()
        assert named is bool(debug)


def test_steps_of_a_launch_are_counted_from_one() -> None:
    with pytest.raises(DeviceGraphError, match="at least 1"):
        make_engine(make_model("llama"), steps_per_launch=0)


def test_text_streams_in_pieces() -> None:
    model = make_model("llama")
    tokens = reference(model, Letters()("hello")["input_ids"], 12)
    whole = Letters().decode(tokens, skip_special_tokens=True)
    seen: list[TokenEvent] = []
    with make_engine(model, tokenizer=Letters()) as engine:
        done = engine.generate(["hello"], max_new_tokens=12, on_event=seen.append)[0]
        assert done.text == whole == "".join(event.text for event in seen)
        assert [event.token for event in seen] == tokens
        assert [event.finish_reason for event in seen][-2:] == [None, FinishReason.LENGTH]


def test_seeded_sampling_does_not_depend_on_the_batch() -> None:
    model = make_model("llama")
    text, *others = prompts(4, shortest=7)
    params = SamplingParams(temperature=1.2, top_k=40, top_p=0.9, seed=7)
    with make_engine(model, GRAPHS) as engine:
        alone = engine.generate([text], max_new_tokens=10, sampling=params)[0]
        mixed = [SamplingParams(), params, SamplingParams(temperature=1.0), SamplingParams()]
        together = engine.generate(
            [others[0], text, others[1], others[2]], max_new_tokens=10, sampling=mixed
        )
        assert together[1].token_ids == alone.token_ids
        assert list(together[0].token_ids) == reference(model, others[0], 10)
        other = attrs.evolve(params, seed=8)
        assert engine.generate([text], max_new_tokens=10, sampling=other)[0] != alone


def test_cancel_ends_a_running_and_a_waiting_request() -> None:
    model = make_model("llama")
    texts = prompts(3, shortest=4)
    want = reference(model, texts[2], 8)
    with make_engine(model, max_requests=2) as engine:
        for text in texts:
            engine.add_request(text, max_new_tokens=8)
        engine.step()
        engine.cancel(0)
        assert finish(engine).keys() == {1, 2}
        request = engine.add_request(texts[2], max_new_tokens=8)
        engine.cancel(request)
        assert not engine.has_work
        assert list(engine.generate([texts[2]], max_new_tokens=8)[0].token_ids) == want


def test_failed_step_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    text = prompts(1, shortest=9, longest=9)[0]
    want = reference(model, text, 8)
    with make_engine(model) as engine:
        engine.add_request(text, max_new_tokens=8)
        engine.step()
        engine.step()
        with monkeypatch.context() as patch:
            patch.setattr(engine.model.model, "forward", lambda **_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                engine.step()
        first = list(engine._scheduler.find(0).generated)
        assert first + finish(engine)[0] == want


def test_counters_add_up() -> None:
    model = make_model("llama")
    texts = prompts(5)
    with make_engine(model, GRAPHS) as engine:
        engine.generate(texts, max_new_tokens=7)
        stats = engine.stats()
        assert 0 < stats.decode_tokens < 35  # a packed step makes the first of each
        assert 0 < stats.decode_seconds < stats.seconds
        engine.reset_stats()
        assert engine.stats() == EngineStats()


def test_runners_share_a_pool_and_prove_themselves() -> None:
    with make_engine(make_model("mixtral"), GRAPHS) as engine:
        engine.capture()
        assert engine.decode.pool is engine.prefill.pool is engine.pool
        assert engine.decode.prove().ok
        assert engine.prefill.prove().ok


def test_graphs_see_weights_overwritten_in_place_and_new_ones_after_invalidate() -> None:
    model, second, third = (make_model("llama", seed=seed) for seed in (0, 1, 2))
    text = prompts(1, shortest=9, longest=9)[0]
    with make_engine(model, GRAPHS) as engine:
        engine.capture()
        model.load_state_dict(second.state_dict())
        got = engine.generate([text], max_new_tokens=8)[0]
        assert list(got.token_ids) == reference(second, text, 8)
        for ours, new in zip(model.parameters(), third.parameters(), strict=True):
            ours.data = new.data.clone()
        engine.invalidate("weights")
        got = engine.generate([text], max_new_tokens=8)[0]
        assert list(got.token_ids) == reference(third, text, 8)
        assert engine.decode.stats().captures == 4


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda e: e.add_request([]), "empty"),
        (lambda e: e.add_request([1, VOCABULARY]), "vocabulary, which has 211"),
        (lambda e: e.add_request([-1]), "token id -1"),
        (lambda e: e.add_request([1] * 60, max_new_tokens=41), "101 positions"),
        (lambda e: e.add_request([1], max_new_tokens=0), "at least 1"),
        (lambda e: e.add_request("text"), "tokenizer"),
        (lambda e: e.cancel(3), "no request 3"),
        (lambda e: e.cancel([]), "request_id"),
        (lambda e: e.add_request([1], sampling={"temperature": 1.0}), "SamplingParams, got"),
        (lambda e: e.generate([[1], [2]], sampling=[SamplingParams()]), "1 sampling"),
        (lambda e: e.generate([[1]], sampling="greedy"), "SamplingParams, got 'greedy'"),
        (lambda e: e.generate("text"), "put a single prompt into"),
        (lambda e: e.generate([1, 2]), "list of token ids, got 1"),
        (lambda e: e.generate([[1.5, 2]]), "list of token ids"),
        (lambda e: e.generate([torch.ones(1, 2, dtype=torch.int64)]), "list of token ids"),
        (lambda e: e.generate([[1]], max_new_tokens=2.5), "max_new_tokens must be an int"),
    ],
)
def test_bad_requests_are_refused_and_leave_nothing_queued(call: Any, says: str) -> None:
    with make_engine(make_model("llama")) as engine:
        with pytest.raises(DeviceGraphError, match=says):
            call(engine)
        assert not engine.has_work


def test_one_bad_prompt_queues_none() -> None:
    with make_engine(make_model("llama")) as engine:
        with pytest.raises(DeviceGraphError, match="vocabulary"):
            engine.generate([[1], [VOCABULARY]])
        assert not engine.has_work


def test_closed_engine_says_so_and_closes_twice() -> None:
    engine = make_engine(make_model("llama"))
    engine.close()
    engine.close()
    with pytest.raises(StateError, match="closed"):
        engine.step()


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"max_step_tokens": 2}, "at least 3"),
        ({"max_step_tokens": "16"}, "max_step_tokens must be an int"),
        ({"max_len": 2.5}, "max_len must be an int"),
        ({"max_requests": 2.5}, "max_requests must be an int"),
    ],
)
def test_sizes_that_do_not_fit_or_are_none_are_refused(option: dict[str, Any], says: str) -> None:
    with pytest.raises(DeviceGraphError, match=says):
        make_engine(make_model("llama"), **option)


def test_prompts_of_a_generation_that_fails_do_not_stay_behind() -> None:
    model = make_model("llama")
    texts = prompts(5)
    with make_engine(model) as engine:

        def fails(event: Any) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            engine.generate(texts, max_new_tokens=4, on_event=fails)
        assert not engine.has_work and not engine.step()
        done = engine.generate(texts, max_new_tokens=4)
        assert [list(one.token_ids) for one in done] == [reference(model, t, 4) for t in texts]


def test_tokenizer_that_fails_on_one_request_ends_that_one_and_no_other() -> None:
    model = make_model("llama")
    texts = prompts(3)
    want = [reference(model, text, 6) for text in texts]

    class Tokenizer:
        failing: int | None = None

        def decode(self, tokens: Sequence[int], **_: Any) -> str:
            if self.failing in tokens:
                raise TypeError("no text")
            return " ".join(map(str, tokens))

    tokenizer = Tokenizer()
    with make_engine(model, tokenizer=tokenizer) as engine:
        ids = [engine.add_request(text, max_new_tokens=6) for text in texts]
        tokenizer.failing = want[1][2]
        events: list[TokenEvent] = []
        failures = []
        while engine.has_work:
            try:
                events += engine.step()
            except TypeError as error:
                failures.append(error)
        assert [str(error) for error in failures] == ["no text"]
        assert f"request {ids[1]}" in failures[0].__notes__[-1]
        tokens = {i: [e.token for e in events if e.request_id == i] for i in ids}
        assert [tokens[ids[0]], tokens[ids[2]]] == [want[0], want[2]]
        assert tokens[ids[1]] == want[1][:3]
        last = {event.request_id: event.finish_reason for event in events}
        assert last[ids[1]] is FinishReason.CANCELLED
        with pytest.raises(TypeError, match="no text"):
            engine.generate([texts[1]], max_new_tokens=6)
        assert not engine.has_work


def test_generation_beside_queued_requests_is_refused_and_leaves_them() -> None:
    model = make_model("llama")
    first, second = prompts(2)
    with make_engine(model) as engine:
        queued = engine.add_request(first, max_new_tokens=3)
        with pytest.raises(StateError, match="has_work"):
            engine.generate([second])
        assert finish(engine) == {queued: reference(model, first, 3)}
        assert engine.stats().decode_tokens <= 3


_ODD = [5, -1, 0, "x", 1.5, math.nan, True, {"a": 1}, [None], ["x"], object(), b"x", {1: 2}]
_ODD += [torch.tensor([1, 2]), int]


@pytest.mark.parametrize(
    "name",
    "config backend max_requests max_len max_step_tokens eos_token_ids steps_per_launch fuse "
    "tokenizer model".split(),
)
def test_arguments_of_an_engine_are_taken_or_refused_with_their_names(name: str) -> None:
    options = {"max_requests": 2, "max_len": 64, "max_step_tokens": 16, "backend": "cpu"}
    model = make_model("llama")
    for value in _ODD:
        try:
            Engine(**{"model": model, **options, name: value}).close()
        except DeviceGraphError as error:
            words = {"config": "mode configuration", "model": "transformers model"}
            assert words.get(name, name) in str(error) or name == "backend", (value, error)


def test_configuration_of_an_engine_may_be_a_dictionary_or_json() -> None:
    model = make_model("llama")
    for mode in ({"decode": "disabled"}, '{"decode": "disabled"}'):
        with Engine(model, config=mode, backend="cpu", max_len=64) as engine:
            assert engine.config.decode.policy == "disabled"


@pytest.mark.parametrize(
    "name", "prompt max_new_tokens sampling stop_token_ids on_event prompts".split()
)
def test_arguments_of_requests_are_taken_or_refused_with_their_names(name: str) -> None:
    class Tokenizer:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1, 2]}

        def decode(self, tokens: Sequence[int], **_: Any) -> str:
            return "a" * len(tokens)

    with make_engine(make_model("llama"), tokenizer=Tokenizer()) as engine:
        for value in _ODD:
            given = {"prompt": [1, 2], "max_new_tokens": 1, name: value}
            try:
                if name in ("on_event", "prompts"):
                    given["prompts"] = given.get("prompts", [given.pop("prompt")])
                    given.pop("prompt", None)
                    engine.generate(**given) if value is not int else None
                else:
                    engine.add_request(**given)
            except DeviceGraphError as error:
                assert name in str(error) or "token id" in str(error), (value, error)
        finish(engine)


def test_engine_that_gave_its_memory_back_before_a_capture_generates_eagerly() -> None:
    model = make_model("llama")
    releasable = {"releasable": True, "capture": "eager"}
    mode = {"decode": {**releasable, "buckets": [2]}, "prefill": releasable}
    texts = prompts(2)
    want = [reference(model, text, 5) for text in texts]
    with make_engine(model, json.dumps(mode)) as engine:
        engine.suspend(release="memory")
        for graphs in (False, True):
            done = engine.generate(texts, max_new_tokens=5)
            assert [list(one.token_ids) for one in done] == want
            assert (engine.decode.stats().graph_steps > 0) == graphs
            engine.resume()


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_engine_is_made_and_runs_whatever_the_default_device_is(family: str) -> None:
    model = make_model(family)
    texts = prompts(3)
    want = [reference(model, text, 4) for text in texts]
    with make_engine(model, GRAPHS) as plain:
        own = plain.model.own
    with torch.device("meta"):
        engine = make_engine(model, GRAPHS)
    with engine:
        assert engine.model.own == own
        done = engine.generate(texts, max_new_tokens=4)
        assert [list(one.token_ids) for one in done] == want


def test_steps_under_autocast_are_refused_and_wait() -> None:
    model = make_model("llama")
    text = prompts(1)[0]
    with make_engine(model, GRAPHS) as engine:
        request = engine.add_request(text, max_new_tokens=4)
        calls = (engine.step, engine.capture, engine.idle, lambda: engine.generate([text]))
        with torch.autocast("cpu", torch.bfloat16):
            for call in calls:
                with pytest.raises(StateError, match="autocast is on"):
                    call()
        assert finish(engine) == {request: reference(model, text, 4)}
