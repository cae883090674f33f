"""Requests that move between engines: equal tokens, refusals by name, and slots that come back."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

import gc
import itertools
import json
import logging
import random
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers integration")

import devgraph as dg
from devgraph.api.errors import InputError, StateError
from devgraph.integrations.transformers import Engine, Handoff, SamplingParams
from tests.integrations.transformers.test_engine import EAGER, FULL, GRAPHS, make_engine
from tests.support.transformers_models import make_model, prompts, reference
from tests.zoo.families import build, quiet

TEXT = prompts(3)[2]


def begin(engine: Engine, text: list[int] = TEXT, **options: Any) -> tuple[int, list[int]]:
    """Run a prompt until its first token; return the request and its tokens."""
    request = engine.add_request(text, **({"max_new_tokens": 9} | options))
    tokens: list[int] = []
    while not tokens:
        tokens += [event.token for event in engine.step() if event.request_id == request]
    return request, tokens


def travelled(handoff: Handoff) -> Handoff:
    """Return the handoff as a transport delivers it."""
    received = Handoff.from_json(handoff.to_json())
    received.data.copy_(handoff.data)
    return received


def rest(engine: Engine, request: int) -> list[int]:
    """Run until the request has ended; return its tokens."""
    tokens: list[int] = []
    while engine.has_work:
        tokens += [event.token for event in engine.step() if event.request_id == request]
    return tokens


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "mixtral"])
def test_request_continues_in_another_engine_with_the_tokens_of_one(family: str) -> None:
    model = make_model(family)
    want = reference(model, TEXT, 9)
    with (
        make_engine(model) as first,
        make_engine(model, GRAPHS, max_requests=5, max_len=180) as second,
    ):
        second.capture()
        request, tokens = begin(first)
        handoff = first.export(request)
        assert handoff.cached == len(TEXT)
        assert handoff.token_ids == (*TEXT, *tokens)
        continued = second.admit(travelled(handoff))
        first.release(request)
        assert tokens + rest(second, continued) == want
        stats = second.decode.stats()
        assert stats.graph_steps == stats.steps == 8


def test_recurrent_state_travels_by_name() -> None:
    with quiet():
        model = build("Lfm2ForCausalLM")
    text = [token % 40 for token in TEXT]
    options: dict[str, Any] = {"backend": "cpu", "max_len": 64, "config": EAGER}
    with Engine(model, **options) as first, Engine(model, max_requests=2, **options) as second:
        (alone,) = second.generate([text], max_new_tokens=9)
        request, tokens = begin(first, text)
        handoff = travelled(first.export(request))
        layer = next(index for index, states in enumerate(handoff.states) if states)
        name = next(iter(handoff.states[layer]))
        assert handoff.tensors[f"{layer}.{name}"].abs().sum() > 0
        assert tokens + rest(second, second.admit(handoff)) == list(alone.token_ids)


def test_sampled_request_continues_its_random_stream_on_the_same_backend() -> None:
    model = make_model("llama")
    sampling = SamplingParams(temperature=0.8, top_k=50)  # A seed is drawn.
    with make_engine(model) as first, make_engine(model) as second:
        request, tokens = begin(first, sampling=sampling)
        handoff = travelled(first.export(request))
        assert handoff.draws == 1
        assert handoff.sampling.seed is not None
        tokens += rest(second, second.admit(handoff))
        (alone,) = second.generate([TEXT], max_new_tokens=9, sampling=handoff.sampling)
        assert tokens == list(alone.token_ids)
        elsewhere = [attrs.evolve(handoff, backend="other", draws=draws) for draws in (1, 1, 2)]
        same, again, later = (rest(second, second.admit(one)) for one in elsewhere)
        assert same == again
        assert len({tuple(same), tuple(later), tuple(tokens[1:])}) == 3


def test_request_that_already_decoded_moves_back_and_forth() -> None:
    model = make_model("gemma3")
    want = reference(model, TEXT, 9)
    with make_engine(model, GRAPHS) as first, make_engine(model, GRAPHS) as second:
        request, tokens = begin(first)
        engines = [first, second] * 4
        for source, target in itertools.pairwise(engines):
            handoff = source.export(request)
            source.release(request)
            request = target.admit(travelled(handoff))
            assert torch.equal(target.export(request).data, handoff.data)
            target.release(request)
            request = target.admit(handoff)
            tokens += [event.token for event in target.step()]
        assert tokens == want[: len(tokens)]
        assert len(tokens) == 8


CHANGES = {
    "model": "0-0",
    "dtype": "float16",
    "layers": 4,
    "kv_heads": (2, 4, 2),
    "head_dim": (12, 12, 16),
    "windows": (None, 8, None),
    "states": ({}, {}, {"conv": ("float32", (4,))}),
}


@pytest.mark.parametrize("fields", [*([name] for name in CHANGES), list(CHANGES)], ids=str)
def test_other_geometry_is_refused_with_every_field_that_differs(fields: list[str]) -> None:
    """FAULTS 54."""
    model = make_model("llama")
    with make_engine(model) as engine:
        handoff = engine.export(begin(engine)[0])
        changed = attrs.evolve(handoff, **{name: CHANGES[name] for name in fields})
        with pytest.raises(dg.HandoffError) as raised:
            engine.admit(changed)
        assert set(raised.value.fields) == set(fields)
        assert all(f"\n  {name}: " in str(raised.value) for name in fields)
        assert not raised.value.retriable
        assert not engine.has_work


def test_weights_and_configuration_belong_to_the_digest() -> None:
    """FAULTS 54."""
    model, other = make_model("llama"), make_model("llama", seed=1)
    scaled = make_model("llama", rms_norm_eps=0.5)
    with make_engine(model) as engine, make_engine(other) as second, make_engine(scaled) as third:
        handoff = engine.export(begin(engine)[0])
        for receiver, parts in ((second, "only the weights"), (third, "the configurations")):
            with pytest.raises(dg.HandoffError, match=f"{parts} differ") as raised:
                receiver.admit(handoff)
            assert raised.value.fields == ("model",)


def test_longer_request_than_the_slots_of_the_receiver_is_refused() -> None:
    model = make_model("llama")
    with make_engine(model) as first, make_engine(model, max_len=30) as second:
        handoff = first.export(begin(first)[0])
        with pytest.raises(dg.HandoffError, match="max_len: 32 in the handoff, 30 here") as raised:
            second.admit(handoff)
        assert raised.value.fields == ("max_len",)


def test_other_dtype_is_admitted_with_conversion_only() -> None:
    """FAULTS 54."""
    model = make_model("llama")
    half = make_model("llama").to(torch.bfloat16)
    other = make_model("llama", num_key_value_heads=4).to(torch.bfloat16)
    with make_engine(model) as first, make_engine(half) as second, make_engine(other) as third:
        request, _ = begin(first)
        handoff = first.export(request)
        with pytest.raises(dg.HandoffError, match="pass convert=True") as raised:
            second.admit(handoff)
        assert set(raised.value.fields) == {"model", "dtype"}
        with pytest.raises(dg.HandoffError, match="this engine:"):
            third.admit(handoff)
        continued = second.admit(travelled(handoff), convert=True)
        exported = second.export(continued)
        for name, tensor in exported.tensors.items():
            assert torch.equal(tensor, handoff.tensors[name].to(torch.bfloat16))
        with pytest.raises(dg.HandoffError) as raised:
            third.admit(handoff, convert=True)
        assert set(raised.value.fields) == {"model", "kv_heads"}


@pytest.mark.parametrize("name", ["Mamba2ForCausalLM", "Qwen3NextForCausalLM"])
@pytest.mark.parametrize(
    ("there", "here"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "bfloat16")]
)
def test_recurrent_state_is_converted(name: str, there: str, here: str) -> None:
    with quiet():
        models = [build(name).to(getattr(torch, dtype)) for dtype in (there, here)]
    text = [token % 40 for token in TEXT]
    options: dict[str, Any] = {"backend": "cpu", "max_len": 64, "config": EAGER}
    with Engine(models[0], **options) as first, Engine(models[1], **options) as second:
        handoff = travelled(first.export(begin(first, text)[0]))
        assert handoff.dtype == there
        with pytest.raises(dg.HandoffError, match="pass convert=True") as raised:
            second.admit(handoff)
        assert {"model", "dtype", "states"} == set(raised.value.fields)
        assert "\n  states: {" in str(raised.value)
        assert f"'{here}'" in str(raised.value)
        assert len(str(raised.value)) < 600  # One layer stands for all.
        continued = second.admit(handoff, convert=True)
        exported = second.export(continued)
        for key, tensor in exported.tensors.items():
            assert torch.equal(tensor, handoff.tensors[key].to(tensor.dtype))
        second.release(continued)
        assert len(rest(second, second.admit(handoff, convert=True))) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "version differs: 3 in the handoff, 2 here"),
        ({"layers": 3}, "kv_heads: 2 entries for 3 layers"),
        ({"kv_heads": "many"}, "kv_heads: expected a list"),
        ({"token_ids": [1.5]}, "token_ids: expected int, got 1.5"),
        ({"sampling": {"temperature": -1}}, "sampling: temperature"),
        ({"sampling": None}, "sampling: expected an object, got None"),
        ({"sampling": {"temperatures": 1}}, "sampling: there is no .* mean 'temperature'"),
        ({"dtype": "load"}, "unknown dtype load"),
        ({"states": [{}, {}, 3]}, "states: "),
        ({"layers": None}, "kv_heads: 2 entries for None layers"),
        ({"cached": -1}, "cannot be allocated"),
        ({"cached": 1 << 80}, "cannot be allocated"),
        ({"head_dim": [1 << 50, 1 << 50]}, "cannot be allocated"),
    ],
    ids=str,
)
def test_header_that_cannot_be_read_is_refused(change: dict[str, Any], message: str) -> None:
    """FAULTS 54."""
    with make_engine(make_model("llama")) as engine:
        header = json.loads(engine.export(begin(engine)[0]).to_json())
    with pytest.raises(dg.HandoffError, match=message):
        Handoff.from_json(json.dumps(header | change))
    with pytest.raises(dg.HandoffError, match="not readable"):
        Handoff.from_json(b"\x80\x04K\x01.")  # a pickle
    with pytest.raises(dg.HandoffError, match="wrong fields:\n  id: missing"):
        Handoff.from_json('{"version": 2}')


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_header_without_its_tensors_is_refused(family: str) -> None:
    model = make_model(family)
    with make_engine(model) as sender, make_engine(model) as receiver:
        handoff = sender.export(begin(sender)[0])
        received = Handoff.from_json(handoff.to_json())
        with pytest.raises(dg.HandoffError, match="not received.*copy the sender's handoff.data"):
            receiver.admit(received)
        received.data.copy_(handoff.data)
        receiver.admit(received)


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": (1, 2, 3)},
        {"token_ids": ()},
        {"prompt_length": 99},
        {"token_ids": (*TEXT[:-1], 9999, 1)},
        {"max_new_tokens": 1},
    ],
    ids=["short", "none", "prompt", "vocabulary", "ended"],
)
def test_tokens_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    with make_engine(make_model("llama")) as engine:
        handoff = engine.export(begin(engine)[0])
        with pytest.raises(dg.HandoffError):
            engine.admit(attrs.evolve(handoff, **change))
        assert not engine.has_work


@pytest.mark.parametrize(
    "changed",
    [
        lambda data: data[:-1],
        lambda data: torch.cat([data, data]),
        lambda data: torch.cat([data, data])[::2],
        lambda data: data.view(torch.float32),
        lambda data: None,
    ],
    ids=["short", "long", "strided", "float32", "none"],
)
def test_buffer_of_another_size_is_refused(changed: Any) -> None:
    with make_engine(make_model("llama")) as engine:
        handoff = engine.export(begin(engine)[0])
        with pytest.raises(dg.HandoffError, match="the buffer of the handoff is") as raised:
            engine.admit(attrs.evolve(handoff, data=changed(handoff.data)))
        assert raised.value.fields == ("data",)
        assert not engine.has_work


def test_random_state_of_another_generator_is_refused_by_name() -> None:
    with make_engine(make_model("llama")) as engine:
        request, _ = begin(engine, sampling=SamplingParams(temperature=1.0))
        for state in ("", "00" * 7, "not hexadecimal"):
            with pytest.raises(dg.HandoffError) as raised:
                engine.admit(attrs.evolve(engine.export(request), random_state=state))
            assert raised.value.fields == ("random_state",)


def test_handoff_waits_for_a_slot_or_is_refused_until_there_is_one() -> None:
    model = make_model("llama")
    want = reference(model, TEXT, 9)
    with make_engine(model) as first, make_engine(model, max_requests=1) as second:
        request, tokens = begin(first)
        handoff = travelled(first.export(request))
        begin(second, max_new_tokens=5)
        with pytest.raises(dg.HandoffError, match="no slot is free: 1 request running") as raised:
            second.admit(handoff, wait=False)
        assert raised.value.retriable
        queued = second.admit(handoff)
        with pytest.raises(dg.HandoffError, match=f"request {queued} already continues"):
            second.admit(travelled(handoff))
        cancelled = second.admit(attrs.evolve(handoff, id="other"))
        second.cancel(cancelled)
        assert tokens + rest(second, queued) == want
        assert tokens + rest(second, second.admit(handoff, wait=False)) == want


def test_exported_request_takes_no_part_and_keeps_its_slot_until_release() -> None:
    model = make_model("llama")
    texts = prompts(3)
    want = [reference(model, text, 9) for text in texts]
    with make_engine(model, max_requests=2) as engine:
        request, _ = begin(engine)
        other, tokens = begin(engine, texts[0])
        handoff = engine.export(request)
        assert engine.export(request) is handoff
        waiting = engine.add_request(texts[1], max_new_tokens=9)
        got: dict[int, list[int]] = {other: tokens, waiting: []}
        for _ in range(8):
            for event in engine.step():
                got[event.request_id].append(event.token)
        assert got[other] == want[0]
        assert not got[waiting]
        engine.release(request)
        with pytest.raises(InputError, match=f"request {request} is not held"):
            engine.release(request)
        assert got[waiting] + rest(engine, waiting) == want[1]


@pytest.mark.parametrize("mode", [EAGER, GRAPHS, FULL], ids=["eager", "graphs", "full"])
def test_layerwise_export_gives_the_handoff_of_a_plain_one(mode: str) -> None:
    model = make_model("llama", num_hidden_layers=3)
    want = reference(model, TEXT, 9)
    with make_engine(model, mode, layerwise=True) as first, make_engine(model) as second:
        first.prefill.capture()
        for _ in range(2):
            request = first.add_request(TEXT, max_new_tokens=9)
            assert not first.step()  # The prompt is longer than a step.
            handoff = first.export(request, layerwise=True)
            assert handoff.progress.ready == 0
            assert not handoff.is_complete
            with pytest.raises(dg.HandoffError, match="must cache the prompt"):
                second.admit(handoff)
            (event,) = first.step()
            assert handoff.progress.ready == 3
            complete = first.export(request)
            assert complete is handoff.progress.handoff
            assert complete.token_ids == (*TEXT, event.token)
            plain, _ = begin(second)
            for name, tensor in second.export(plain).tensors.items():
                torch.testing.assert_close(complete.tensors[name], tensor)
            second.cancel(plain)
            assert [event.token, *rest(second, second.admit(travelled(complete)))] == want
            first.release(request)


def test_layer_is_ready_before_the_last_layer_runs() -> None:
    model = make_model("llama", num_hidden_layers=3)
    with make_engine(model, layerwise=True, max_step_tokens=64) as engine:
        request = engine.add_request(TEXT)
        handoff = engine.export(request, layerwise=True)
        ready: list[int] = []
        hook = model.model.layers[-1].register_forward_pre_hook(
            lambda *_: ready.append(handoff.progress.wait(0, 20))
        )
        engine.step()
        hook.remove()
        assert ready[0] >= 1
        first, *_, last = handoff.progress.ready_at
        assert first < last
        assert len(handoff.progress.ready_at) == handoff.progress.ready == 3


def test_layerwise_export_ends_with_a_request_that_ends_at_its_first_token() -> None:
    with make_engine(make_model("llama"), layerwise=True, max_requests=1) as engine:
        request = engine.add_request([1, 2, 3], max_new_tokens=1)
        handoff = engine.export(request, layerwise=True)
        engine.step()
        assert handoff.progress.ended == "finished"
        request = engine.add_request([1, 2, 3])
        handoff = engine.export(request, layerwise=True)
        engine.cancel(request)
        assert handoff.progress.ended == "cancelled"
        assert not engine.has_work
        request, _ = begin(engine)
        with pytest.raises(StateError, match="has run; export it without layerwise"):
            engine.export(request, layerwise=True)
    with make_engine(make_model("llama")) as engine:
        request = engine.add_request([1, 2, 3])
        with pytest.raises(StateError, match="create it with layerwise=True"):
            engine.export(request, layerwise=True)


def test_release_of_a_transport_frees_the_slot_at_the_next_step() -> None:
    with make_engine(make_model("llama"), max_requests=1) as engine:
        handoff = engine.export(begin(engine)[0])
        engine.add_request([1, 2])
        assert not engine.step()
        handoff.progress.end("released")
        assert engine.step()


def test_timeout_frees_the_slot_and_names_request_and_receiver(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """FAULTS 54."""
    with make_engine(make_model("llama"), max_requests=1) as engine:
        request, _ = begin(engine)
        handoff = engine.export(request, timeout_s=0.0)
        handoff.progress.receiver = "rank 7"
        engine.add_request([1, 2])
        with caplog.at_level(logging.WARNING):
            assert engine.step()
        assert f"request {request} was exported" in caplog.text
        assert "rank 7" in caplog.text
        with pytest.raises(dg.HandoffError, match="freed after its timeout"):
            engine.admit(handoff)
        with pytest.raises(InputError, match="after its timeout"):
            engine.release(request)


def test_request_that_is_cancelled_in_transfer_ends_its_handoff() -> None:
    with make_engine(make_model("llama"), max_requests=1) as engine:
        request, _ = begin(engine)
        handoff = engine.export(request)
        ended: list[str | None] = []
        handoff.progress.when_ended(lambda: ended.append(handoff.progress.ended))
        engine.cancel(request)
        handoff.progress.when_ended(lambda: ended.append("late"))
        assert ended == ["cancelled", "late"]
        with pytest.raises(dg.HandoffError, match="it was cancelled"):
            engine.admit(handoff)
        assert begin(engine)


def test_engine_that_closes_ends_its_own_handoffs_only() -> None:
    model = make_model("llama")
    with make_engine(model) as first:
        handoff = first.export(begin(first)[0])
        with make_engine(model, max_requests=1) as second:
            begin(second)
            second.admit(handoff)  # waits for a slot
        assert handoff.progress.ended is None
    assert handoff.progress.ended == "closed with its engine"


def test_only_a_request_with_a_token_can_be_exported() -> None:
    with make_engine(make_model("llama")) as engine:
        request = engine.add_request(prompts(1, shortest=20, longest=20)[0])
        for left in (20, 4):
            with pytest.raises(StateError, match=f"{left} tokens? to go"):
                engine.export(request)
            engine.step()
        engine.step()
        assert engine.export(request)
        with pytest.raises(InputError, match="no request 77"):
            engine.export(77)


def test_copy_that_fails_leaves_the_slot_free(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_engine(make_model("llama"), max_requests=1) as engine:
        request, _ = begin(engine)
        handoff = engine.export(request)
        engine.release(request)

        def failing(*_: Any) -> None:
            raise MemoryError("no memory")

        with monkeypatch.context() as patch:
            patch.setattr("devgraph.integrations.transformers.engine.copy_layers", failing)
            with pytest.raises(MemoryError):
                engine.admit(handoff)
        assert not engine.has_work
        assert len(rest(engine, engine.admit(handoff))) == 8


class Letters:
    """A tokenizer of single letters, with characters of two tokens from 200 on."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, tokens: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


def test_text_continues_inside_a_character() -> None:
    model = make_model("llama")
    with (
        make_engine(model, tokenizer=Letters()) as first,
        make_engine(model, tokenizer=Letters()) as second,
    ):
        (alone,) = second.generate(["abc"], max_new_tokens=12)
        request = first.add_request("abc", max_new_tokens=12)
        text = "".join(event.text for event in first.step())
        for _ in range(5):
            text += "".join(event.text for event in first.step())
        second.admit(travelled(first.export(request)))
        while second.has_work:
            text += "".join(event.text for event in second.step())
        assert text == alone.text


def test_two_hundred_handoffs_leave_slots_and_memory_flat() -> None:
    model = make_model("llama", num_hidden_layers=2)
    draw = random.Random(0)
    with make_engine(model) as first, make_engine(model, GRAPHS) as second:
        engines = [first, second]

        def handoff() -> None:
            draw.shuffle(engines)
            source, target = engines
            length, new = draw.randint(1, 30), draw.randint(2, 5)
            request, tokens = begin(
                source, [draw.randrange(211) for _ in range(length)], max_new_tokens=new
            )
            exported = source.export(request)
            ended = draw.choice(["release", "cancel", "transport", "expire"])
            if ended == "release":
                continued = target.admit(travelled(exported))
                assert len(tokens + rest(target, continued)) == new
                source.release(request)
            elif ended == "cancel":
                source.cancel(request)
            else:
                exported.progress.end("released" if ended == "transport" else "expired")

        def tensors() -> int:
            gc.collect()
            return sum(1 for one in gc.get_objects() if issubclass(type(one), torch.Tensor))

        for _ in range(20):
            handoff()
        before = tensors()
        for _ in range(180):
            handoff()
        for engine in engines:
            engine.step()
            assert not engine.has_work
            assert engine._scheduler.free == 3
            assert not engine._scheduler.held
        assert tensors() <= before + 4  # held data of the last handoffs may be gone now or then
