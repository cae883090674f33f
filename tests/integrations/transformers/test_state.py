"""State rows of mixers: they carry one request each, whatever the rows held before."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers integration")

from transformers.cache_utils import Cache

from devgraph.integrations.transformers.model import CausalModel
from devgraph.integrations.transformers.state import RecurrentStates, layer_with, state_tensors
from tests.zoo.families import build, quiet

HIDDEN = 32


@pytest.fixture(scope="module")
def adapter() -> Any:
    with quiet():
        model = CausalModel(build("Lfm2ForCausalLM"), max_requests=3, max_len=64)
    yield model
    model.close()


def states_of(adapter: Any) -> tuple[RecurrentStates, Any]:
    states = RecurrentStates(adapter.shape.states, 3)
    for rows in states.rows.values():
        for row in rows:
            row.fill_(float("nan"))
    return states, adapter.shape.mixers[0]


def tokens(count: int, seed: int = 0) -> Any:
    return torch.randn(1, count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def alone(mixer: Any, hidden: Any) -> Any:
    with torch.no_grad():
        return mixer.forward(hidden)


def packed(states: RecurrentStates, mixer: Any, hidden: Any, *spans: int) -> Any:
    """Run packed requests; the mixer receives a cache, as in a model."""
    out = torch.full_like(hidden, float("nan"))
    with torch.no_grad():
        states.run(mixer, ((hidden, Cache(layers=[])), {}), [out], spans)
    return out


def test_packed_requests_have_the_results_of_each_alone_and_leave_padding(adapter: Any) -> None:
    states, mixer = states_of(adapter)
    states.clear(2)
    states.clear(0)
    first, second = tokens(5), tokens(7, seed=1)
    hidden = torch.cat([first, second, tokens(2, seed=2)], 1)
    out = packed(states, mixer, hidden, 2, 0, 5, 0, 0, 7)
    torch.testing.assert_close(out[:, :5], alone(mixer, first))
    torch.testing.assert_close(out[:, 5:12], alone(mixer, second))
    assert out[:, 12:].isnan().all()


@pytest.mark.parametrize("carries", [True, False])
def test_chunks_carry_the_state(adapter: Any, carries: bool) -> None:
    states, mixer = states_of(adapter)
    states.carries = carries
    states.clear(1)
    hidden = tokens(11)
    parts = [
        packed(states, mixer, hidden[:, :4], 1, 0, 4),
        packed(states, mixer, hidden[:, 4:9], 1, 4, 5),
        packed(states, mixer, hidden[:, 9:], 1, 9, 2),
    ]
    if carries is adapter.states.carries or not carries:
        torch.testing.assert_close(torch.cat(parts, 1), alone(mixer, hidden))


def decoded(states: RecurrentStates, mixer: Any, hidden: Any, slots: list[int], width: int) -> Any:
    with torch.no_grad():
        return states.decode(mixer, torch.tensor(slots), width, (hidden, Cache(layers=[])), {})


def test_decode_reads_and_writes_the_rows_of_its_requests_only(adapter: Any) -> None:
    states, mixer = states_of(adapter)
    texts = [tokens(6, seed=s) for s in range(2)]
    for slot, text in zip((2, 0), texts, strict=True):
        states.clear(slot)
        packed(states, mixer, text[:, :5], slot, 0, 5)
    # The last row of the batch is padding, and slot 1 belongs to nobody.
    hidden = torch.cat([texts[0][:, 5:], texts[1][:, 5:], tokens(1, seed=9)])
    out = decoded(states, mixer, hidden, [2, 0, 3], 1)
    for row, text in zip(out, texts, strict=False):
        torch.testing.assert_close(row, alone(mixer, text)[0, 5:])
    assert all(row[1].isnan().all() for row in states.rows[mixer.layer])


@pytest.mark.parametrize("kept", [1, 3])
def test_state_returns_to_an_accepted_token(adapter: Any, kept: int) -> None:
    states, mixer = states_of(adapter)
    states.keep_history(4)
    states.clear(0)
    text, rest = tokens(8), tokens(1, seed=4)
    packed(states, mixer, text[:, :4], 0, 0, 4)
    out = decoded(states, mixer, text[:, 4:], [0], 4)
    torch.testing.assert_close(out, alone(mixer, text)[:, 4:])
    # A capture runs on padding and writes its own row.
    decoded(states, mixer, tokens(4, seed=5), [3], 4)
    for index in states.rows:
        if index != mixer.layer:
            for row in states.rows[index]:
                row.zero_()
    states.settle(kept - 1)
    out = decoded(states, mixer, rest, [0], 1)
    want = alone(mixer, torch.cat([text[:, : 4 + kept], rest], 1))
    torch.testing.assert_close(out, want[:, -1:])


def test_moved_state_goes_on_in_its_new_slot(adapter: Any) -> None:
    states, mixer = states_of(adapter)
    text = tokens(6)
    states.clear(2)
    packed(states, mixer, text[:, :5], 2, 0, 5)
    states.move(2, 0)
    out = decoded(states, mixer, text[:, 5:], [0], 1)
    torch.testing.assert_close(out, alone(mixer, text)[:, 5:])


def test_slot_reused_a_thousand_times_shows_no_trace(adapter: Any) -> None:
    states, mixer = states_of(adapter)
    text = tokens(3)
    states.clear(0)
    want = packed(states, mixer, text, 0, 0, 3)
    for _ in range(1000):
        for row in states.rows[mixer.layer]:
            row[0] = float("nan")
        states.clear(0)
        assert torch.equal(packed(states, mixer, text, 0, 0, 3), want)


def test_layer_with_other_tensors_leaves_its_template(adapter: Any) -> None:
    layer = next(iter(adapter.shape.states.values()))
    before = [tensor.clone() for tensor in state_tensors(layer)]
    tensors = [torch.zeros_like(tensor) for tensor in before]
    other = layer_with(layer, tensors, carried=False)
    assert all(a is b for a, b in zip(state_tensors(other), tensors, strict=True))
    flags = other.has_previous_state
    assert not (any(flags.values()) if isinstance(flags, dict) else flags)
    assert all(map(torch.equal, state_tensors(layer), before))
