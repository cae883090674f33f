"""State rows of mixers: they carry one request each, whatever the rows held before."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers integration")

from transformers.cache_utils import Cache, DynamicCache

from devgraph.api.registry import get_backend
from devgraph.integrations.transformers import Engine
from devgraph.integrations.transformers.model import CausalModel
from devgraph.integrations.transformers.state import (
    RecurrentLayers,
    layer_with,
    run_packed,
    state_tensors,
)
from devgraph.runners.batch import Batch, StateViews
from devgraph.runners.slots import Size
from tests.sim.hip import unavailable_reason
from tests.sim.hip.backend import FakeBackend
from tests.sim.hip.fake import Fake
from tests.zoo.families import VOCABULARY, build, quiet

HIDDEN = 32
NO_FAKE = pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no fake library: {unavailable_reason()}"
)


def seeded(seed: int) -> Any:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def adapter() -> Any:
    with quiet():
        model = CausalModel(build("Lfm2ForCausalLM"), max_requests=3, max_len=64)
    yield model
    model.close()


def poisoned(states: RecurrentLayers, *clean: int) -> StateViews:
    """Return the state of three request slots, with NaN in all but the ``clean`` ones."""
    state = states.zeros(4, torch.device("cpu"))
    for slot in states.slots:
        for row in set(range(4)) - set(clean):
            getattr(state, slot.name)[row] = float("nan")
    return state


def tokens(count: int, seed: int = 0) -> Any:
    return torch.randn(1, count, HIDDEN, generator=seeded(seed))


def alone(mixer: Any, hidden: Any) -> Any:
    with torch.no_grad():
        return mixer.forward(hidden)


def packed(adapter: Any, state: StateViews, hidden: Any, *spans: int) -> Any:
    """Run packed requests; the mixer receives a cache, as in a model."""
    states, mixer = adapter.states, adapter.shape.mixers[0]
    out = torch.full_like(hidden, float("nan"))
    rows = states.rows(state, mixer.layer)
    with torch.no_grad():
        inputs = ((hidden, Cache(layers=[])), {})
        run_packed(states, mixer, rows, [], inputs, [out], spans=spans)
    return out


def decoded(adapter: Any, state: StateViews, hidden: Any, slots: list[int], width: int) -> Any:
    size = Size(len(slots), len(slots) * width, width)
    batch = Batch({"state_slots": torch.tensor(slots)}, size, host={}, variant={}, state=state)
    with torch.no_grad():
        mixer = adapter.shape.mixers[0]
        return adapter.states.decode(mixer, batch, width, (hidden, Cache(layers=[])), {})


def test_packed_requests_have_the_results_of_each_alone_and_leave_padding(adapter: Any) -> None:
    mixer = adapter.shape.mixers[0]
    first, second = tokens(5), tokens(7, seed=1)
    hidden = torch.cat([first, second, tokens(2, seed=2)], 1)
    out = packed(adapter, poisoned(adapter.states, 0, 2), hidden, 2, 0, 5, 0, 0, 7)
    torch.testing.assert_close(out[:, :5], alone(mixer, first))
    torch.testing.assert_close(out[:, 5:12], alone(mixer, second))
    assert out[:, 12:].isnan().all()


@pytest.mark.parametrize("carries", [True, False])
def test_chunks_carry_the_state(
    adapter: Any, carries: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if carries and not adapter.states.carries:
        pytest.skip("this version of the mixer carries no state through several tokens")
    monkeypatch.setattr(adapter.states, "carries", carries)
    state, hidden = poisoned(adapter.states, 1), tokens(11)
    parts = [
        packed(adapter, state, hidden[:, :4], 1, 0, 4),
        packed(adapter, state, hidden[:, 4:9], 1, 4, 5),
        packed(adapter, state, hidden[:, 9:], 1, 9, 2),
    ]
    torch.testing.assert_close(torch.cat(parts, 1), alone(adapter.shape.mixers[0], hidden))


def test_decode_reads_and_writes_the_rows_of_its_requests_only(adapter: Any) -> None:
    state, mixer = poisoned(adapter.states, 0, 2), adapter.shape.mixers[0]
    texts = [tokens(6, seed=s) for s in range(2)]
    for slot, text in zip((2, 0), texts, strict=True):
        packed(adapter, state, text[:, :5], slot, 0, 5)
    # The last row of the batch is padding, and slot 1 belongs to nobody.
    hidden = torch.cat([texts[0][:, 5:], texts[1][:, 5:], tokens(1, seed=9)])
    out = decoded(adapter, state, hidden, [2, 0, 3], 1)
    for row, text in zip(out, texts, strict=False):
        torch.testing.assert_close(row, alone(mixer, text)[0, 5:])
    assert all(row[1].isnan().all() for row in adapter.states.rows(state, mixer.layer))


def test_wide_decode_keeps_the_state_after_each_token(adapter: Any) -> None:
    state, mixer = poisoned(adapter.states, 0), adapter.shape.mixers[0]
    text, rest = tokens(8), tokens(1, seed=4)
    packed(adapter, state, text[:, :4], 0, 0, 4)
    earlier = [adapter.states.zeros(4, torch.device("cpu")) for _ in range(3)]
    names = [slot.name for slot in adapter.states.slots]
    versions = {name: [getattr(e, name) for e in (*earlier, state)] for name in names}
    wide = StateViews(
        {name: tensors[-1] for name, tensors in versions.items()}, StateViews(versions)
    )
    out = decoded(adapter, wide, text[:, 4:], [0], 4)
    torch.testing.assert_close(out, alone(mixer, text)[:, 4:])
    for kept, version in enumerate([*earlier, state], 1):
        out = decoded(adapter, version, rest, [0], 1)
        want = alone(mixer, torch.cat([text[:, : 4 + kept], rest], 1))
        torch.testing.assert_close(out, want[:, -1:])


def test_state_goes_to_a_cache_and_back(adapter: Any) -> None:
    states, mixer = adapter.states, adapter.shape.mixers[0]
    state, text = states.zeros(1, torch.device("cpu")), tokens(6)
    packed(adapter, state, text[:, :5], 0, 0, 5)
    row = {name: getattr(state, name)[0] for name in (s.name for s in states.slots)}
    layers = {i: states.layer(i, [row, row], carried=True) for i in states.layers}
    for index, layer in layers.items():
        assert type(layer) is type(DynamicCache(config=adapter.model.config).layers[index])
    twin = states.split({i: state_tensors(layer) for i, layer in layers.items()}, 1)
    state = StateViews({name: tensor[None] for name, tensor in twin.items()})
    out = decoded(adapter, state, text[:, 5:], [0], 1)
    torch.testing.assert_close(out, alone(mixer, text)[:, 5:])


def test_layer_with_other_tensors_leaves_its_template(adapter: Any) -> None:
    layer = next(iter(adapter.shape.states.values()))
    before = [tensor.clone() for tensor in state_tensors(layer).values()]
    tensors = [torch.zeros_like(tensor) for tensor in before]
    other = layer_with(layer, tensors, carried=False)
    assert all(a is b for a, b in zip(state_tensors(other).values(), tensors, strict=True))
    flags = other.has_previous_state
    assert not (any(flags.values()) if isinstance(flags, dict) else flags)
    assert all(map(torch.equal, state_tensors(layer).values(), before))


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(
    ("device", "rounds"),
    [
        ("cpu", 7),
        pytest.param("cpu", 334, marks=pytest.mark.slow),
        pytest.param("fake HIP", 2, marks=NO_FAKE),
        pytest.param("cuda", 334, marks=pytest.mark.cuda),
    ],
)
def test_requests_leave_no_trace_in_the_slots_that_they_had(
    device: str, rounds: int, steps: int
) -> None:
    """Free rows and the scratch row hold NaN before each step; a round is three requests."""
    backend = FakeBackend(Fake()) if device == "fake HIP" else get_backend(device)
    with quiet():
        model = build("Lfm2ForCausalLM").to(backend.device)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=seeded(n)).tolist() for n in (2, 5, 3)]
    options: dict[str, Any] = {"backend": backend, "max_requests": 2, "max_len": 32}
    options |= {"max_step_tokens": 8, "eos_token_ids": (), "steps_per_launch": steps}
    mode = {"decode": {"buckets": [1, 2]}, "prefill": {"buckets": [4, 8]}}
    with Engine(model, config="{}", **options) as engine:
        engine.suspend()
        want = [list(done.token_ids) for done in engine.generate(prompts, max_new_tokens=5)]
    with Engine(model, config=mode, **options) as engine:
        engine.capture()
        asked = {}
        for index in range(3 * rounds):
            request = engine.add_request(prompts[index % 3], max_new_tokens=5)
            asked[request] = want[index % 3]
        got: dict[int, list[int]] = {request: [] for request in asked}
        while engine.has_work:
            running = {request.slot for request in engine._scheduler.running}
            for buffer in engine.decode.state.buffers.values():
                for slot in {0, 1, 2} - running:
                    buffer[slot] = float("nan")
            for event in engine.step():
                got[event.request_id].append(event.token)
        assert got == asked
