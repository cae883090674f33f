"""``model.generate`` over device graphs: what transformers generates, and what falls back."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

import copy
import importlib
import logging
import pickle
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers integration")

from transformers import (
    DynamicCache,
    GenerationConfig,
    PegasusConfig,
    PegasusForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import utils
from transformers.generation.streamers import BaseStreamer

from devgraph.api.errors import DeviceGraphError, InputError, StateError
from devgraph.integrations.transformers import (
    UnsupportedModelError,
    accelerate,
    accelerated,
    generate_stats,
    unaccelerate,
)
from devgraph.integrations.transformers.names import CACHES, cache_name
from devgraph.integrations.transformers.probe import parameters_of
from devgraph.integrations.transformers.seat import seat_of
from tests.support.transformers_models import CACHE, FAMILIES, make_model, prompts
from tests.zoo.families import VOCABULARY, build, quiet

# The package's name for it is the function.
module = importlib.import_module("devgraph.integrations.transformers.accelerate")

MODE = {
    "decode": {"policy": "full", "buckets": [1, 3], "max_padding": 3},
    "prefill": {"buckets": [16], "max_padding": 16},
}
OPTIONS: dict[str, Any] = {
    "mode": MODE,
    "backend": "cpu",
    "max_requests": 3,
    "max_len": 128,
    "max_step_tokens": 16,
}


RETURNED = {"return_dict_in_generate": True}


@pytest.fixture
def model() -> Iterator[Any]:
    made = make_model("llama")
    yield made
    unaccelerate(made)


def padded(count: int = 3) -> dict[str, Any]:
    """Return a batch of prompts of different lengths, padded at the left."""
    rows = prompts(count)
    length = max(map(len, rows))
    return {
        "input_ids": torch.tensor([[0] * (length - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor(
            [[0] * (length - len(row)) + [1] * len(row) for row in rows]
        ),
    }


UNUSED = 10_000
"""An end-of-sequence token that no model here has; prompt lookup of transformers 5.10 needs one."""


def generated(model: Any, inputs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    """Generate eight tokens a row, greedily unless said otherwise."""
    values = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0} | kwargs
    return model.generate(**(inputs or padded()), **values)


def both(model: Any, inputs: dict[str, Any] | None = None, **kwargs: Any) -> tuple[Any, Any]:
    """Return what the model generates by itself and accelerated, which it stays."""
    plain = generated(model, inputs, **kwargs)
    accelerate(model, **OPTIONS)
    return plain, generated(model, inputs, **kwargs)


def close(got: Any, want: Any) -> None:
    """Other kernels round in another way, and weights are wide."""
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def steps(model: Any) -> int:
    """Return how many steps ran in graphs, of both phases."""
    engine = generate_stats(model).engine
    return engine.decode.stats().graph_steps + engine.prefill.stats().graph_steps


QUICK = {"llama", "mistral", "gemma2", "gpt_neox"}


@pytest.mark.parametrize(
    "family",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_padded_batch_gives_the_tokens_and_logits_of_plain_generate(family: str) -> None:
    model = make_model(family)
    plain, graphs = both(model, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(plain.sequences, graphs.sequences)
    close(torch.stack(graphs.logits), torch.stack(plain.logits))
    stats = generate_stats(model)
    assert (stats.requests, stats.fallbacks) == (1, {})
    # Seven decode steps, and the prompts in steps of at most 16 tokens.
    assert steps(model) == 7 + -(-int(padded()["attention_mask"].sum()) // 16)
    unaccelerate(model)


def test_sampling_draws_the_random_numbers_of_transformers(model: Any) -> None:
    def sample() -> tuple[Any, Any]:
        torch.manual_seed(3)
        out = generated(model, do_sample=True, top_k=20, temperature=1.5, num_return_sequences=1)
        return out, torch.rand(3)

    plain = sample()
    accelerate(model, **OPTIONS)
    for want, got in zip(plain, sample(), strict=True):
        assert torch.equal(want, got)


class Collected(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: Any) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


class StopsAfter(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def test_processors_criteria_and_streamers_are_those_of_transformers(model: Any) -> None:
    def run() -> tuple[Any, list[int], Any]:
        streamer = Collected()
        one = {"input_ids": torch.tensor([prompts(3)[2]])}
        end = len(prompts(3)[2]) + 5
        streamed = generated(
            model,
            one,
            streamer=streamer,
            repetition_penalty=1.7,
            no_repeat_ngram_size=2,
            stopping_criteria=StoppingCriteriaList([StopsAfter(end)]),
        )
        scored = generated(
            model,
            min_new_tokens=4,
            eos_token_id=list(range(0, 211, 2)),
            return_dict_in_generate=True,
            output_scores=True,
        )
        return streamed, streamer.tokens, (scored.sequences, torch.stack(scored.scores))

    plain = run()
    accelerate(model, **OPTIONS)
    graphs = run()
    assert torch.equal(plain[0], graphs[0])
    assert plain[1] == graphs[1]
    assert torch.equal(plain[2][0], graphs[2][0])
    close(graphs[2][1], plain[2][1])
    assert generate_stats(model).fallbacks == {}


@pytest.mark.parametrize("size", [1, 4])
def test_chunk_of_a_prompt_may_be_all_padding(model: Any, size: int) -> None:
    ids = {"input_ids": torch.tensor([[0] * 6 + [5, 6, 7]])}
    plain, graphs = both(model, ids, prefill_chunk_size=size)
    assert torch.equal(plain, graphs)
    assert generate_stats(model).fallbacks == {}


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_second_turn_runs_its_new_tokens_only_whoever_had_the_slots_since(family: str) -> None:
    model = make_model(family)
    rows = padded()

    def talk(between: bool) -> Any:
        first = generated(model, rows, return_dict_in_generate=True)
        if between:
            generated(model, {"input_ids": torch.tensor([prompts(3)[1]])})
        ids = torch.cat([first.sequences, torch.full((3, 2), 7)], dim=1)
        mask = torch.cat([rows["attention_mask"], torch.ones(3, 10, dtype=torch.int64)], dim=1)
        cache = first[CACHE]
        before = steps(model) if "generate" in vars(model) else 0
        second = generated(
            model,
            {"input_ids": ids, "attention_mask": mask},
            **{CACHE: cache},
            return_dict_in_generate=True,
        )
        assert second[CACHE] is cache
        assert cache.get_seq_length() == second.sequences.shape[1] - 1
        return second.sequences, before

    plain, _ = talk(between=False)
    accelerate(model, **OPTIONS)
    for between in (False, True):
        graphs, before = talk(between)
        assert torch.equal(plain, graphs)
        # Three tokens of three rows are one packed step, and seven decode.
        assert steps(model) - before == 8
    assert generate_stats(model).fallbacks == {}
    unaccelerate(model)


RECURRENT = {
    "Lfm2ForCausalLM": False,  # windows of convolutions only
    "Qwen3NextForCausalLM": True,  # a matrix for each head
    "Qwen3_5ForCausalLM": True,
    "Qwen3_5MoeForCausalLM": True,
    "FalconH1ForCausalLM": True,  # both kinds of state in each layer
    "KimiLinearForCausalLM": True,  # runs its own attention
    "ZambaForCausalLM": True,  # carries no state through several tokens
    "ZayaForCausalLM": True,
    "MambaForCausalLM": True,  # no keys and values
    "Mamba2ForCausalLM": True,
}
"""Classes with recurrent layers, and whether their tests are slow."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if s else n for n, s in RECURRENT.items()]
)
def test_model_with_recurrent_layers_generates_in_graphs(name: str) -> None:
    """Greedy and sampled, padded, over two turns, and with proposed tokens."""
    with quiet():
        model = build(name)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, VOCABULARY, (3, 21), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :9] = mask[2, :4] = 0
    text = {"input_ids": ids[1:2]}
    cache = cache_name(parameters_of(model))
    keyless = name.startswith("Mamba")

    def run(*, plain: bool, **proposed: int) -> list[Any]:
        torch.manual_seed(7)
        results = [
            generated(model, text, eos_token_id=None),
            generated(model, {"input_ids": ids * mask, "attention_mask": mask}, eos_token_id=None),
            generated(model, text, do_sample=True, top_k=20, eos_token_id=None),
        ]
        first = generated(model, text, eos_token_id=None, **RETURNED)
        more = {"input_ids": torch.cat([first.sequences, ids[:1, :5]], 1)}
        # Zamba's own second turn drops the state, so the reference is the whole text. A cache
        # without keys has no length, so that turn is transformers' own.
        turn = {} if plain and not keyless else {cache: first[CACHE]}
        results.append(generated(model, more, eos_token_id=None, **turn))
        twice = {"input_ids": ids[1:2].repeat(1, 2)}
        if CACHE == "past_key_values" and keyless:
            # Such a version proposes no tokens without keys and values, and says so.
            with pytest.raises(ValueError, match="assisted generation is not supported"):
                generated(model, twice, max_new_tokens=20, prompt_lookup_num_tokens=4)
            return results
        results.append(generated(model, twice, max_new_tokens=20, eos_token_id=UNUSED, **proposed))
        return results

    want = run(plain=True)
    with accelerated(model, **OPTIONS):
        got = run(plain=False, prompt_lookup_num_tokens=4)
        got = run(plain=False, prompt_lookup_num_tokens=4)  # with graphs of the first run
        assert all(map(torch.equal, got, want))
        stats = generate_stats(model)
        assert stats.fallbacks == ({"cache": 2} if keyless else {})
        assert stats.engine.decode.stats().eager_steps == 0
    assert model._is_stateful == type(model)._is_stateful


def test_proposed_tokens_with_recurrent_state_are_refused_outside_of_graphs() -> None:
    with quiet():
        model = build("Qwen3NextForCausalLM")
    with (
        accelerated(model, **OPTIONS),
        pytest.raises(InputError, match="recurrent state"),
    ):
        ids = {"input_ids": torch.ones(1, 200, dtype=torch.int64)}
        generated(model, ids, prompt_lookup_num_tokens=3)


def test_cache_of_the_caller_is_filled_and_stays_the_callers(model: Any) -> None:
    inputs = {"input_ids": torch.tensor([prompts(3)[2]])}
    plain = DynamicCache()
    want = generated(model, inputs, **{CACHE: plain})
    accelerate(model, **OPTIONS)
    cache = DynamicCache()
    assert torch.equal(generated(model, inputs, **{CACHE: cache}), want)
    kept = copy.deepcopy(cache)
    assert [type(layer) for layer in cache.layers] == [type(layer) for layer in plain.layers]
    generated(model)  # whose rows go to the same slots
    unaccelerate(model)
    for one in (cache, kept):
        for layer, expected in zip(one.layers, plain.layers, strict=True):
            close(layer.keys, expected.keys)
            close(layer.values, expected.values)
    assert torch.equal(generated(model, {"input_ids": want}, **{CACHE: cache})[:, :-8], want)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_proposed_tokens_are_checked_in_steps_of_several_tokens(family: str) -> None:
    model = make_model(family)
    ids = torch.tensor([prompts(3)[2] * 2])
    plain, graphs = both(
        model,
        {"input_ids": ids},
        max_new_tokens=20,
        eos_token_id=UNUSED,
        prompt_lookup_num_tokens=3,
        return_dict_in_generate=True,
        output_logits=True,
    )
    assert torch.equal(plain.sequences, graphs.sequences)
    close(torch.stack(graphs.logits), torch.stack(plain.logits))
    assistant = make_model(family, num_hidden_layers=1)
    assisted = generated(model, {"input_ids": ids}, max_new_tokens=20, assistant_model=assistant)
    assert torch.equal(assisted, plain.sequences)
    engine = generate_stats(model).engine
    engine.suspend()
    before = [runner.stats().graph_steps for runner in engine.runners]
    proposed = {"max_new_tokens": 20, "eos_token_id": UNUSED, "prompt_lookup_num_tokens": 3}
    again = generated(model, {"input_ids": ids}, **proposed)
    assert torch.equal(again, plain.sequences)
    assert [runner.stats().graph_steps for runner in engine.runners] == before
    assert generate_stats(model).fallbacks == {}
    unaccelerate(model)


@pytest.mark.parametrize(
    ("reason", "asked"),
    [
        ("generation_mode", {"num_beams": 2, "max_new_tokens": 4}),
        ("outputs", {"output_hidden_states": True, "return_dict_in_generate": True}),
        ("cache", {"use_cache": False}),
        ("cache", {"cache_implementation": "static"}),
        ("over_max_requests", {"num_return_sequences": 2, "num_beams": 2}),
        ("over_max_len", {"max_new_tokens": 120}),
    ],
)
def test_other_requests_run_transformers_own_code_counted_and_warned_about_once(
    model: Any, caplog: pytest.LogCaptureFixture, reason: str, asked: dict[str, Any]
) -> None:
    with caplog.at_level(logging.WARNING, logger="devgraph"):
        plain, graphs = both(model, **asked)
        generated(model, **asked)
    sequences = [getattr(out, "sequences", out) for out in (plain, graphs)]
    assert torch.equal(*sequences)
    expected = "generation_mode" if "num_beams" in asked else reason
    assert generate_stats(model).fallbacks == {expected: 2}
    said = [r for r in caplog.records if r.name.startswith("devgraph") and "own code" in r.message]
    assert len(said) == 1
    unaccelerate(model)
    accelerate(model, **OPTIONS | {"mode": MODE | {"decode": {"strict": True}}})
    with pytest.raises(DeviceGraphError, match="strict"):
        generated(model, **asked)


def test_rows_masks_and_inputs_that_slots_cannot_hold_fall_back(model: Any) -> None:
    five = padded(5)
    gaps = padded()
    gaps["attention_mask"][2, 3] = 0
    embedded = {"inputs_embeds": model.get_input_embeddings()(torch.tensor([[1, 2, 3]]))}
    wants = [generated(model, inputs) for inputs in (five, gaps, embedded)]
    accelerate(model, **OPTIONS)
    for inputs, want in zip((five, gaps, embedded), wants, strict=True):
        assert torch.equal(generated(model, inputs), want)
    assert generate_stats(model).fallbacks == {"over_max_requests": 1, "mask": 1, "inputs": 1}
    with pytest.raises(RuntimeError):
        generated(model, {"input_ids": torch.tensor([[1.5, 2.5]])})


def test_forward_outside_generate_is_the_models_own(model: Any) -> None:
    ids = torch.tensor([prompts(3)[2]])
    want = model(ids).logits
    accelerate(model, **OPTIONS)
    out = generated(
        model, {"input_ids": ids[:, :-1]}, max_new_tokens=1, return_dict_in_generate=True
    )
    cache = out[CACHE]
    got = model(input_ids=ids[:, -1:], **{CACHE: cache}).logits
    close(got, want[:, -1:])
    # The slots do not hold its last row.
    more = torch.cat([ids, ids[:, :1]], dim=1)
    again = generated(model, {"input_ids": more}, **{CACHE: cache})
    assert torch.equal(again, generated(model, {"input_ids": more}))
    assert generate_stats(model).fallbacks == {}


def test_batches_of_requests_run_in_the_engine(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = prompts(5)
    wants = [generated(model, {"input_ids": torch.tensor([row])})[0].tolist() for row in rows]
    accelerate(model, **OPTIONS)
    config = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=wants[0][-2])
    out = model.generate_batch(list(map(torch.tensor, rows)), generation_config=config)
    for i, (row, want) in enumerate(zip(rows, wants, strict=True)):
        new = want[len(row) :]
        if config.eos_token_id in new:
            new = new[: new.index(config.eos_token_id) + 1]
        assert out[f"req_{i}"].generated_tokens == new
        assert out[f"req_{i}"].is_finished()
    sampled = GenerationConfig(
        max_new_tokens=8, do_sample=True, top_k=5, top_p=0.9, temperature=0.7
    )
    assert len(model.generate_batch(rows, generation_config=sampled)["req_4"].generated_tokens) == 8
    # What the engine has not goes to transformers with the same arguments.
    hook = vars(model)["generate_batch"]
    monkeypatch.setattr(hook, "own", lambda *args, **kwargs: (args, kwargs))
    penal = GenerationConfig(max_new_tokens=8, repetition_penalty=1.5)
    args, kwargs = model.generate_batch(rows, generation_config=penal, progress_bar=True)
    assert args == (rows,)
    assert kwargs == {"generation_config": penal, "progress_bar": True}
    model.generate_batch(rows, max_new_tokens=200)
    stats = generate_stats(model)
    assert stats.requests == 10
    assert stats.fallbacks == {"generation_config": 1, "over_max_len": 1}

    def inside(ids: Any, scores: Any) -> Any:
        model.generate_batch(rows[:1], max_new_tokens=2)
        return scores

    got = generated(model, max_new_tokens=1, logits_processor=[inside])
    assert torch.equal(got, generated(model, max_new_tokens=1))
    assert generate_stats(model).fallbacks == stats.fallbacks | {"nested": 1}


def test_unaccelerated_model_is_as_it_was(model: Any) -> None:
    before = dict(vars(model))
    want = generated(model)
    with accelerated(model, **OPTIONS) as same:
        assert same is model
        with pytest.raises(StateError, match="already"):
            accelerate(model)
        for call in (accelerate, unaccelerate, generate_stats):
            with pytest.raises(UnsupportedModelError, match="attribute 'model'"):
                call(SimpleNamespace(model=model))
        assert torch.equal(generated(model), want)
        check = getattr(utils, "DeferredStopCheck", utils.GenerationMixin)  # not in 5.10
        assert check.__module__ == utils.__name__
        twin = copy.deepcopy(model)
        assert generate_stats(model).requests == 1
    assert vars(model) == before
    assert torch.equal(generated(model), want)
    with pytest.raises(StateError, match="not accelerated"):
        generate_stats(model)
    # A copy of an accelerated model is not: its methods are its own.
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(generated(twin), want)
    with pytest.raises(StateError, match="not accelerated"):
        generate_stats(twin)
    assert unaccelerate(model) is model


def test_weights_that_moved_get_new_graphs(model: Any) -> None:
    accelerate(model, **OPTIONS)
    generated(model)
    other = make_model("llama", seed=5)
    want = generated(other)
    for own, new in zip(model.parameters(), other.parameters(), strict=True):
        own.data = new.data
    assert torch.equal(generated(model), want)
    assert generate_stats(model).fallbacks == {}
    model.train()
    generated(model)
    assert generate_stats(model).fallbacks == {"model": 1}


def test_threads_that_generate_with_one_model_wait_for_each_other(model: Any) -> None:
    rows = prompts(4, shortest=9)
    wants = [generated(model, {"input_ids": torch.tensor([row])}) for row in rows]
    accelerate(model, **OPTIONS)
    found: dict[int, Any] = {}

    def run(i: int) -> None:
        found[i] = generated(model, {"input_ids": torch.tensor([rows[i]])})

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(rows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, want in enumerate(wants):
        assert torch.equal(found[i], want)


def forwards_beside(calls: list[Any], generate: Any) -> list[list[Any]]:
    """Call functions in another thread, again and again, until ``generate`` has returned."""
    results: list[list[Any]] = []
    began, over = threading.Event(), threading.Event()

    def run() -> None:
        with torch.no_grad():
            while not over.is_set():
                results.append([call() for call in calls])
                began.set()

    other = threading.Thread(target=run)
    other.start()
    try:
        generate()
        assert began.wait(60)
    finally:
        over.set()
        other.join()
    return results


def test_forwards_in_another_thread_are_right_beside_a_generation(model: Any) -> None:
    """Also those of the base model, whose attention and projections the steps replace."""
    ids = torch.tensor([prompts(3)[2]])
    calls = [lambda: model(ids).logits, lambda: model.model(ids).last_hidden_state]
    with torch.no_grad():
        want = [call() for call in calls]
    tokens = generated(model, {"input_ids": ids})
    eager = {"decode": "disabled", "prefill": "disabled"}
    accelerate(model, **OPTIONS | {"mode": eager})

    def generate() -> None:
        for _ in range(3):
            assert torch.equal(generated(model, {"input_ids": ids}), tokens)

    for results in forwards_beside(calls, generate):
        for got, wanted in zip(results, want, strict=True):
            close(got, wanted)


def test_models_that_share_layers_wait_for_each_other() -> None:
    first, second = make_model("llama"), make_model("llama", seed=1)
    second.model.layers = first.model.layers
    ids = {"input_ids": torch.tensor([prompts(3)[2]])}
    want = [generated(model, ids) for model in (first, second)]
    eager = {"decode": "disabled", "prefill": "disabled"}
    options = OPTIONS | {"mode": eager}
    with accelerated(first, **options), accelerated(second, **options):
        results = forwards_beside(
            [lambda: generated(second, ids)],
            lambda: [generated(first, ids) for _ in range(3)],
        )
        assert torch.equal(generated(first, ids), want[0])
    assert all(torch.equal(got, want[1]) for (got,) in results)


def test_int32_ids_and_masks_of_floats_are_those_of_plain_generate(model: Any) -> None:
    rows = padded()
    asked = [
        {"input_ids": torch.tensor([[5]], dtype=torch.int32)},
        rows | {"attention_mask": rows["attention_mask"].float()},
    ]
    wants = [generated(model, inputs) for inputs in asked]
    accelerate(model, **OPTIONS)
    assert all(
        torch.equal(generated(model, inputs), want)
        for inputs, want in zip(asked, wants, strict=True)
    )
    assert generate_stats(model).fallbacks == {}


def test_cache_that_slots_cannot_continue_falls_back(model: Any) -> None:
    """It is longer than a slot, or its next positions begin anew."""
    ids = torch.arange(1, 151)[None]

    def run() -> list[Any]:
        cache = DynamicCache()
        with torch.no_grad():
            model(input_ids=ids[:, :-2], **{CACHE: cache})
        first = generated(model, {"input_ids": ids[:, :9]}, max_new_tokens=1, **RETURNED)
        again = {"input_ids": ids[:, 20:29], CACHE: first[CACHE]}
        return [
            generated(model, {"input_ids": ids}, **{CACHE: cache}),
            generated(model, again),
        ]

    want = run()
    accelerate(model, **OPTIONS)
    assert all(map(torch.equal, run(), want))
    assert generate_stats(model).fallbacks == {"over_max_len": 1, "mask": 1}


def test_model_told_to_have_fewer_layers_falls_back_and_gets_its_methods_back() -> None:
    """Its cache has fewer layers than slots do."""
    model = make_model("llama")
    accelerate(model, **OPTIONS)
    model.config.num_hidden_layers = 1
    got = generated(model)
    assert generate_stats(model).fallbacks == {"cache": 1}
    assert torch.equal(got, generated(unaccelerate(model)))


def test_returned_cache_has_the_layers_that_it_came_with() -> None:
    model = make_model("mistral")
    inputs = {"input_ids": torch.tensor([prompts(3)[2]])}

    def run() -> tuple[Any, ...]:
        cache = DynamicCache()  # which keeps all rows of sliding windows too
        out = generated(model, inputs, **{CACHE: cache})
        cache.crop(-5)
        kinds = [type(layer) for layer in cache.layers]
        return out.tolist(), kinds, cache.layers[0].keys.shape, cache.layer_class_to_replicate

    want = run()
    accelerate(model, **OPTIONS)
    assert run() == want
    unaccelerate(model)


@pytest.mark.parametrize("written", ["keys", "values"])
def test_cache_written_between_two_turns_is_copied_to_the_slots(model: Any, written: str) -> None:
    def talk() -> Any:
        first = generated(model, {"input_ids": torch.tensor([prompts(3)[2]])}, **RETURNED)
        layer = first[CACHE].layers[1]
        if written == "keys":
            layer.keys.mul_(-1)
        else:
            layer.values = -layer.values
        ids = torch.cat([first.sequences, torch.full((1, 2), 7)], dim=1)
        return generated(model, {"input_ids": ids}, **{CACHE: first[CACHE]})

    want = talk()
    accelerate(model, **OPTIONS)
    assert torch.equal(talk(), want)


def test_copy_of_a_cache_during_a_generation_has_its_rows(model: Any) -> None:
    cache, copies = DynamicCache(), []

    class Copies(Collected):
        def put(self, value: Any) -> None:
            super().put(value)
            if len(self.tokens) > 26:
                copies[:] = [copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]

    ids = torch.tensor([prompts(3)[2]])
    accelerate(model, **OPTIONS)
    out = generated(model, {"input_ids": ids}, **{CACHE: cache}, streamer=Copies())
    assert generate_stats(model).fallbacks == {}
    for one in copies:
        assert [type(layer) for layer in one.layers] == [type(layer) for layer in cache.layers]
        rows = one.layers[1].values
        assert torch.equal(rows, cache.layers[1].values[:, :, : rows.shape[2]])
        assert rows.shape[2] == out.shape[1] - 1


class Adapter(torch.nn.Module):
    """Adds to a projection, as adapters do, and can be switched off."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base, self.on = base, True
        self.more = torch.nn.Linear(base.in_features, base.out_features, bias=False)

    def forward(self, hidden: Any) -> Any:
        return self.base(hidden) + (self.more(hidden) if self.on else 0)


def test_changed_model_generates_what_it_then_does(model: Any) -> None:
    attention, rotary = model.model.layers[1].self_attn, model.model.rotary_emb
    adapter = Adapter(attention.q_proj).eval()

    def changes() -> Iterator[None]:
        yield
        attention.q_proj = adapter
        yield
        adapter.on = False
        yield
        model.model.layers[0].mlp.act_fn = torch.nn.Tanh().eval()
        yield
        rotary.inv_freq = rotary.inv_freq * 1.7
        yield

    got = []
    with accelerated(model, **OPTIONS):
        got = [generated(model).tolist() for _ in changes()]
        assert generate_stats(model).fallbacks == {}
    assert len({str(one) for one in got}) == 4  # an adapter that is off changes nothing
    assert got[0] == got[2]
    assert generated(model).tolist() == got[-1]


def test_hooks_layers_in_training_and_autocast_fall_back(
    model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    layer, seen = model.model.layers[1], []
    want = generated(model)
    accelerate(model, **OPTIONS)
    for observed in (model, layer):
        handle = observed.register_forward_hook(lambda *args: seen.append(1))
        assert torch.equal(generated(model), want)
        handle.remove()
        assert len(seen) == 8
        seen.clear()
    layer.train()
    generated(model)
    model.eval()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = generated(model)
    assert generate_stats(model).fallbacks == {"model": 4}
    for obstacle in ("with hooks", "in training mode", "under autocast"):
        assert caplog.text.count(f"{obstacle}: such requests run transformers' own code") == 1
    # Hooks by which transformers collects outputs stay, and do nothing.
    generated(model, output_hidden_states=True, **RETURNED)
    assert torch.equal(generated(model), want)
    assert generate_stats(model).fallbacks == {"model": 4, "outputs": 1}
    model.config.max_position_embeddings = 64
    generated(model.double())
    assert generate_stats(model).fallbacks == {"model": 5, "outputs": 1}
    unaccelerate(model.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(generated(model), cast)


def test_model_accelerated_in_inference_mode_generates_outside_of_it(model: Any) -> None:
    want = generated(model)
    with torch.inference_mode():
        accelerate(model, **OPTIONS)
        first = generated(model, **RETURNED)
    assert torch.equal(first.sequences, want)
    assert torch.equal(generated(model), want)
    # Joined weights still are what may be written.
    unaccelerate(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1)
    assert torch.equal(generated(model), want)


def test_loops_of_callers_over_a_seated_cache_get_what_the_model_gives(model: Any) -> None:
    def loop(model: Any, input_ids: Any, **kwargs: Any) -> Any:
        cache = kwargs[CACHE]
        embedded = model.get_input_embeddings()(input_ids)
        return (
            model(input_ids=input_ids[:, :3], **{CACHE: cache}, logits_to_keep=1).logits,
            model(inputs_embeds=embedded[:, 3:5], **{CACHE: cache}).logits,
            model(input_ids=input_ids[:, 5:], **{CACHE: cache}, return_dict=False)[0],
        )

    ids = {"input_ids": torch.tensor([prompts(3)[2]])}
    want, got = both(model, ids, custom_generate=loop)
    for one, other in zip(got, want, strict=True):
        close(one, other)
    assert generate_stats(model).fallbacks == {"inputs": 1}


@pytest.mark.parametrize("name", CACHES)
def test_forward_over_a_seated_cache_takes_its_deprecated_names(model: Any, name: str) -> None:
    def loop(model: Any, input_ids: Any, **kwargs: Any) -> Any:
        return model(input_ids=input_ids, **{name: kwargs[CACHE]}, logits_to_keep=1).logits

    ids = {"input_ids": torch.tensor([prompts(3)[2]])}
    accelerate(model, **OPTIONS)
    got = generated(model, ids, custom_generate=loop)
    close(got, model(input_ids=ids["input_ids"], logits_to_keep=1).logits)
    assert generate_stats(model).fallbacks == {}


def test_tokens_added_to_a_step_have_positions_that_the_model_has() -> None:
    """A table of learned positions may end before the rows of a slot do."""
    model = make_model("gpt2", max_position_embeddings=13)

    def loop(model: Any, input_ids: Any, **kwargs: Any) -> Any:
        cache = kwargs[CACHE]
        model(input_ids=input_ids[:, :10], **{CACHE: cache}, logits_to_keep=1)
        return model(input_ids=input_ids[:, 10:], **{CACHE: cache}).logits

    ids = {"input_ids": torch.arange(1, 14)[None]}
    want = generated(model, ids, custom_generate=loop)
    with accelerated(model, **OPTIONS | {"max_len": 13}):
        close(generated(model, ids, custom_generate=loop), want)
        assert generate_stats(model).fallbacks == {}


def test_loops_of_callers_that_drop_the_mask_or_ask_for_padding_run_the_model(model: Any) -> None:
    def without(model: Any, input_ids: Any, **kwargs: Any) -> Any:
        cache = kwargs[CACHE]
        model(input_ids=input_ids[:, :7], **{CACHE: cache}, logits_to_keep=1)
        return model(input_ids=input_ids[:, 7:], **{CACHE: cache}).logits

    def whole(model: Any, input_ids: Any, **kwargs: Any) -> Any:
        cache, mask = kwargs[CACHE], kwargs["attention_mask"]
        out = model(input_ids=input_ids, attention_mask=mask, **{CACHE: cache})
        return out.logits[:, 3:]

    ids = {"input_ids": torch.tensor([[0, 0, 0, 5, 6, 7, 8, 9]])}
    for loop, reason in ((without, "mask"), (whole, "all_logits")):
        want, got = both(model, ids, custom_generate=loop)
        close(got, want)
        assert generate_stats(model).fallbacks == {reason: 1}
        unaccelerate(model)


class Reached:
    """An event that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


@pytest.mark.skipif(
    not hasattr(utils, "DeferredStopCheck"), reason="this transformers waits in every step"
)
@pytest.mark.parametrize("returned", [False, True])
def test_step_too_many_of_a_deferred_check_is_taken_back(
    model: Any, monkeypatch: pytest.MonkeyPatch, returned: bool
) -> None:
    monkeypatch.setattr(torch, "Event", Reached)
    ends = {"eos_token_id": list(range(0, 211, 2)), "return_dict_in_generate": True}
    plain = generated(model, **ends)
    accelerate(model, **OPTIONS)
    deferred: list[bool] = []
    own = module._deferral._supported

    def supported(device: Any, cache: Any, *args: Any, **kwargs: Any) -> bool:
        seat = seat_of(cache)
        assert seat is not None
        device = torch.device("meta")
        assert own(device, cache, *args, **kwargs) == seat.can_defer
        assert not own(device, cache, *args, **kwargs | {"is_assistant": True})
        deferred.append(seat.can_defer)
        return seat.can_defer

    monkeypatch.setattr(module._deferral, "_supported", supported)
    graphs = generated(model, **ends | {"return_dict_in_generate": returned})
    assert torch.equal(getattr(graphs, "sequences", graphs), plain.sequences)
    if returned:
        assert graphs[CACHE].get_seq_length() == plain.sequences.shape[1] - 1
    generated(model, do_sample=True)
    assert deferred == [True, False]
    assert utils.DeferredStopCheck is module._deferral._own


def test_model_that_no_engine_runs_is_refused_and_left_alone() -> None:
    model = make_model("llama").train()
    before = dict(vars(model))
    with pytest.raises(UnsupportedModelError, match="training mode"):
        accelerate(model, **OPTIONS)
    assert vars(model) == before


def test_model_that_attends_itself_is_accelerated_and_keeps_its_padding_to_itself() -> None:
    """It counts padding as positions."""
    torch.manual_seed(0)
    config = PegasusConfig(
        vocab_size=211,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=32,
        max_position_embeddings=128,
        init_std=0.3,
        is_decoder=True,
        is_encoder_decoder=False,
        forced_eos_token_id=None,
    )
    model = PegasusForCausalLM(config).eval()
    ids = torch.tensor(prompts(2)[:1] * 2)
    inputs = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)}, padded()]
    want = [generated(model, one) for one in inputs]
    accelerate(model, **OPTIONS)
    try:
        got = [generated(model, one) for one in inputs]
        assert all(map(torch.equal, got, want))
        assert generate_stats(model).fallbacks == {"padding": 1}
    finally:
        unaccelerate(model)


@pytest.mark.parametrize("value", [5, None, "model", object(), torch.tensor([1, 2])])
def test_what_is_no_model_is_refused(value: object) -> None:
    for call in (accelerate, generate_stats, unaccelerate):
        with pytest.raises(UnsupportedModelError, match="transformers model"):
            call(value)  # type: ignore[operator]
