"""The step functions with plain batches: sizes, kernels, rules of slots, registry."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

import gc
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers integration")

from transformers import modeling_utils

from devgraph.api.errors import DeviceGraphError, StateError
from devgraph.integrations.transformers.model import CausalModel
from devgraph.runners.batch import Batch
from devgraph.runners.slots import Size
from tests.support.flash_standin import flash_on_cpu
from tests.support.transformers_models import FAMILIES, make_model, prompts, reference
from tests.zoo.families import build, quiet


def poison(model: CausalModel) -> None:
    for layer in model.cache.layers:
        layer.keys.fill_(math.nan)
        layer.values.fill_(math.nan)


def packed(model: CausalModel, work: list[tuple[int, int, list[int]]], padding: int = 3) -> Any:
    """Run (slot, cached, ids) as one packed step with padded tokens behind; best tokens.

    A model with its own attention runs one request a step, over cleared rows.
    """
    if model.own and len(work) > 1:
        return [packed(model, [request], padding)[0] for request in work]
    if model.own:
        slot, cached, new = work[0]
        model.cache.prepare(slot, cached + len(new), model.max_len)
    ids, positions, rows, last, spans = [], [], [], [], []
    for slot, cached, new in work:
        ids += new
        positions += range(cached, cached + len(new))
        rows += [slot * model.max_len + p for p in range(cached, cached + len(new))]
        last.append(len(ids) - 1)
        spans += [slot, cached, len(new)]
    ids += [0] * padding
    positions += [0] * padding
    rows += [model.cache.scratch_row] * padding
    tensors = {
        "input_ids": torch.tensor(ids),
        "position_ids": torch.tensor(positions),
        "slot_mapping": torch.tensor(rows),
        "last_tokens": torch.tensor(last),
    }
    size = Size(len(work), len(ids))
    batch = Batch(tensors, size, host={"spans": tuple(spans)}, variant={})
    return model.tail(model.packed(batch), batch)["tokens"].tolist()


def decode(model: CausalModel, texts: list[list[int]], width: int = 1, padding: int = 0) -> Any:
    """Run the last ``width`` tokens of each text; logits ``[requests, width, vocabulary]``."""
    ids, positions, rows = [], [], []
    for slot, text in enumerate(texts):
        first = len(text) - width
        ids += text[first:]
        positions += range(first, len(text))
        rows += [slot * model.max_len + p for p in range(first, len(text))]
    host = model.decode_host_values([len(t) - width for t in texts], width)
    for _ in range(padding * width):
        ids.append(0)
        positions.append(0)
        rows.append(model.cache.scratch_row)
    requests = len(texts) + padding
    tensors = {
        "input_ids": torch.tensor(ids),
        "position_ids": torch.tensor(positions),
        "slot_mapping": torch.tensor(rows),
    }
    batch = Batch(tensors, Size(requests, requests * width, width), host=host, variant={})
    out = model.decode(batch)
    assert torch.equal(out["tokens"], out["logits"].argmax(-1))
    return out["logits"].view(requests, width, -1)[: len(texts)]


@pytest.mark.parametrize("updatable", [True, False])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_steps_give_the_tokens_of_generate_over_a_poisoned_cache(
    family: str, updatable: bool
) -> None:
    reference_model = make_model(family)
    texts = prompts(3)
    want = [reference(reference_model, text, 14) for text in texts]
    model = CausalModel(reference_model, max_requests=4, max_len=100, updatable=updatable)
    poison(model)
    lengths = [len(t) for t in texts]
    # The longest prompt in three chunks, the others beside its first and last.
    a, b, c = texts
    packed(model, [(0, 0, a), (2, 0, c[:9])])
    packed(model, [(2, 9, c[9:10])])
    first_b, first_c = packed(model, [(1, 0, b), (2, 10, c[10:])])
    texts = [[*a], [*b, first_b], [*c, first_c]]
    texts[0].append(int(decode(model, [a])[0, 0].argmax()))
    for _ in range(13):
        for text, scores in zip(texts, decode(model, texts, padding=1), strict=True):
            text.append(int(scores[0].argmax()))
    assert [t[n:] for t, n in zip(texts, lengths, strict=True)] == want


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_wide_decode_gives_the_logits_of_single_tokens(family: str) -> None:
    model = CausalModel(make_model(family), max_requests=3, max_len=90)
    poison(model)
    texts = [t + t for t in prompts(3, shortest=5)]
    packed(model, [(i, 0, t[:-3]) for i, t in enumerate(texts)])
    wide = decode(model, texts, width=3)
    for keep in (2, 1, 0):
        single = decode(model, [t[: len(t) - keep] for t in texts])
        torch.testing.assert_close(single[:, 0], wide[:, 2 - keep], atol=1e-4, rtol=1e-4)


def test_padded_rows_change_no_real_row_and_no_result() -> None:
    model = CausalModel(make_model("llama"), max_requests=4, max_len=64)
    poison(model)
    texts = prompts(2, shortest=4)
    packed(model, [(i, 0, t[:-1]) for i, t in enumerate(texts)])
    alone = decode(model, texts, padding=2)
    kept = [layer.keys.clone() for layer in model.cache.layers]
    model.cache.layers[0].keys[:, model.cache.scratch_row] = math.nan
    again = decode(model, texts, padding=2)
    assert torch.equal(alone, again)
    for layer, before in zip(model.cache.layers, kept, strict=True):
        rows = slice(0, model.cache.scratch_row)
        assert torch.equal(layer.keys[:, rows].nan_to_num(7.0), before[:, rows].nan_to_num(7.0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_hybrid_model_is_accepted_where_the_device_reads_lengths(dtype: str) -> None:
    with flash_on_cpu(), quiet():
        inner = build("Qwen3_5ForCausalLM").to(getattr(torch, dtype))
        model = CausalModel(inner, max_requests=2, max_len=64)
    assert model.varlen
    assert model.states
    model.close()


def test_host_values_repeat_for_sixty_four_steps() -> None:
    model = CausalModel(make_model("gemma3"), max_requests=2, max_len=200)
    keys = [tuple(model.decode_host_values([p]).values()) for p in range(200)]
    assert keys[0] == keys[62]
    assert len(set(keys)) <= 8
    assert all(high >= p + 1 and low <= p for p, (high, low) in enumerate(keys))


def test_models_without_windows_have_one_varying_host_value() -> None:
    model = CausalModel(make_model("llama"), max_requests=2, max_len=200)
    assert {model.decode_host_values([p])["kv_from"] for p in range(0, 200, 7)} == {0}


def test_graphs_that_cannot_be_updated_get_no_host_arguments() -> None:
    model = CausalModel(make_model("llama"), max_requests=2, max_len=64, updatable=False)
    assert model.decode_host_args == {}
    assert model.decode_host_values([5]) == {}


def test_model_is_as_before_between_steps_and_after_close() -> None:
    inner = make_model("mixtral", pad_token_id=3)
    before = inner.config.to_dict(), inner.config._attn_implementation
    experts = inner.config._experts_implementation
    names = set(modeling_utils.ALL_ATTENTION_FUNCTIONS)
    model = CausalModel(inner, max_requests=1, max_len=64)
    packed(model, [(0, 0, [1, 2])])
    decode(model, [[1, 2, 3]])
    assert (inner.config.to_dict(), inner.config._attn_implementation) == before
    assert inner.config._experts_implementation == experts
    model.close()
    model.close()
    assert set(modeling_utils.ALL_ATTENTION_FUNCTIONS) == names


def test_dropped_adapter_leaves_the_registry() -> None:
    gc.collect()  # Adapters of other tests leave first.
    names = set(modeling_utils.ALL_ATTENTION_FUNCTIONS)
    CausalModel(make_model("llama"), max_requests=1, max_len=64)
    gc.collect()
    assert set(modeling_utils.ALL_ATTENTION_FUNCTIONS) == names


def test_two_adapters_over_one_model_do_not_mix() -> None:
    inner = make_model("llama")
    first = CausalModel(inner, max_requests=2, max_len=64)
    second = CausalModel(inner, max_requests=1, max_len=128)
    texts = prompts(1, shortest=9, longest=9)
    for model in (first, second):
        poison(model)
    assert packed(first, [(1, 0, texts[0])]) == packed(second, [(0, 0, texts[0])])


def test_error_in_a_step_leaves_the_next_one_working() -> None:
    model = CausalModel(make_model("llama"), max_requests=1, max_len=64)
    good = packed(model, [(0, 0, [4, 5])])
    with pytest.raises(IndexError):
        packed(model, [(0, 0, [4, 10_000])])
    assert packed(model, [(0, 0, [4, 5])]) == good


def test_attention_outside_a_step_is_refused() -> None:
    inner = make_model("llama")
    model = CausalModel(inner, max_requests=1, max_len=64)
    inner.config._attn_implementation = model._name
    with pytest.raises(KeyError, match="not a valid attention implementation"):
        inner(torch.tensor([[1, 2]]))
    with pytest.raises(StateError, match="without a preceding write"):
        model.cache.take()


def test_pad_token_of_the_configuration_causes_no_look_at_the_ids() -> None:
    """GPT-2 warns about padding after reading the ids on the host, which no graph can hold."""
    model = CausalModel(make_model("gpt2", pad_token_id=0), max_requests=1, max_len=64)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as seen:
        decode(model, [[1, 2, 0]])
    assert "aten::_local_scalar_dense" not in {event.name for event in seen.events()}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_requests": 0}, "max_requests"),
        ({"max_len": 0}, "max_len"),
        ({"max_len": 300}, "256 positions"),
    ],
)
def test_sizes_that_cannot_work_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(DeviceGraphError, match=says) as error:
        CausalModel(make_model("llama"), **options)
    assert isinstance(error.value, ValueError)


def test_length_is_what_the_model_allows_by_default() -> None:
    model = CausalModel(make_model("llama", max_position_embeddings=100), max_requests=1)
    assert (model.positions, model.max_len) == (100, 128)
