"""The cache of one generation in the slots of an engine, also with recurrent state."""

# ruff: noqa: E402  (imports follow the skip where transformers is missing)

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", reason="the transformers integration")

from transformers.cache_utils import DynamicCache

from devgraph.api.errors import StateError
from devgraph.integrations.transformers import Engine
from devgraph.integrations.transformers.names import CACHES
from devgraph.integrations.transformers.seat import Seat, seat_of
from devgraph.integrations.transformers.state import state_tensors
from tests.zoo.families import VOCABULARY, build, quiet

WIDTHS = (1, 2, 4)
MODE = {"decode": {"buckets": [1, 2], "max_padding": 4}, "prefill": {"buckets": [8]}}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with quiet():
        model = build("Lfm2ForCausalLM")
    with Engine(
        model, config=MODE, backend="cpu", max_requests=2, max_len=64, max_step_tokens=8
    ) as made:
        yield made


@pytest.fixture(scope="module")
def checking(engine: Engine) -> Any:
    variants = [{"width": width} if width > 1 else {} for width in WIDTHS]
    phase = attrs.evolve(engine.config.decode, buckets=(1,))
    runner = engine.make_decode(phase, max_requests=1, variants=variants, name="checking")
    engine.runners.append(runner)
    return runner


def ids_of(count: int, rows: int = 1, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, count), generator=generator)


def empty(engine: Engine) -> DynamicCache:
    return DynamicCache(config=engine.model.model.config)


def seated(engine: Engine, ids: Any) -> tuple[Seat, DynamicCache]:
    cache = empty(engine)
    seat = Seat(engine, cache, [0] * len(ids))
    seat.packed(ids)
    return seat, cache


@torch.no_grad()
def alone(engine: Engine, ids: Any, cache: Any = None) -> tuple[Any, Any]:
    """Return the last logits of the model without an engine, and its cache."""
    cache = empty(engine) if cache is None else cache
    out = engine.model.model(input_ids=ids, use_cache=True, **{CACHES[0]: cache})
    return out.logits[:, -1], cache


def test_left_cache_has_the_layers_and_the_state_of_plain_transformers(engine: Engine) -> None:
    ids = ids_of(13, rows=2)
    seat, cache = seated(engine, ids)
    assert seat_of(cache) is seat and cache.get_seq_length() == 13
    twin = copy.deepcopy(cache)
    seat.leave()
    _, plain = alone(engine, ids)
    for left in (cache, twin):
        assert seat_of(left) is None
        for got, want in zip(left.layers, plain.layers, strict=True):
            assert type(got) is type(want)
            torch.testing.assert_close(
                state_tensors(got), state_tensors(want), atol=1e-4, rtol=1e-4
            )
    more = ids_of(1, rows=2, seed=2)
    got = alone(engine, more, cache)[0]
    torch.testing.assert_close(got, alone(engine, more, plain)[0], atol=1e-4, rtol=1e-4)


def test_filled_cache_continues_in_slots_that_held_other_rows(engine: Engine) -> None:
    for buffer in engine.decode.state.buffers.values():
        buffer.fill_(float("nan"))
    first, more = ids_of(9, rows=2), ids_of(1, rows=2, seed=3)
    _, cache = alone(engine, first)
    assert Seat.fits(engine, cache, 2) and not Seat.fits(engine, cache, 1)
    seat = Seat(engine, cache, [0, 0])
    got = seat.decode(more, engine.decode)[:, -1]
    want = alone(engine, torch.cat([first, more], 1))[0]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    seat.leave()


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_refused_tokens_leave_no_trace_in_the_state(
    engine: Engine, checking: Any, kept: int
) -> None:
    """Steps that check proposals have a state of their own; the state goes there and back."""
    text, proposed, more = ids_of(11), ids_of(3, seed=5), ids_of(1, seed=6)
    seat, _ = seated(engine, text)
    seat.decode(proposed, checking, WIDTHS)  # padded to four tokens
    seat.crop(kept - 3 or 3 + 11)
    kept_ids = torch.cat([text, proposed[:, :kept], more], 1)
    for runner, widths in ((checking, WIDTHS), (engine.decode, (1,))):
        got = seat.decode(more, runner, widths)[:, -1]
        torch.testing.assert_close(got, alone(engine, kept_ids)[0], atol=1e-4, rtol=1e-4)
        kept_ids = torch.cat([kept_ids, more], 1)
    assert seat.length == kept_ids.shape[1] - 1
    seat.leave()


def test_tokens_before_the_last_step_cannot_be_removed(engine: Engine, checking: Any) -> None:
    seat, _ = seated(engine, ids_of(6))
    with pytest.raises(StateError, match="only tokens of the last step"):
        seat.crop(-1)
    assert not seat.croppable
    seat.decode(ids_of(2), checking, WIDTHS)
    assert seat.croppable
    with pytest.raises(StateError, match="cannot remove 3 tokens"):
        seat.crop(-3)
    assert seat.length == 8
    seat.leave()


def test_cache_with_other_layers_or_states_does_not_fit(engine: Engine) -> None:
    _, cache = alone(engine, ids_of(3))
    assert Seat.fits(engine, cache, 1) and Seat.fits(engine, empty(engine), 1)
    assert not Seat.fits(engine, DynamicCache(), 1)
    other = copy.deepcopy(cache)
    other.layers.reverse()
    assert not Seat.fits(engine, other, 1)
    other = copy.deepcopy(cache)
    for layer in other.layers:
        for name, value in vars(layer).items():
            if isinstance(value, torch.Tensor) and name not in ("keys", "values"):
                setattr(layer, name, value.double())
            elif isinstance(value, dict):
                for key, tensor in value.items():
                    value[key] = tensor.double() if isinstance(tensor, torch.Tensor) else tensor
    assert not Seat.fits(engine, other, 1)


def test_positions_are_compared_on_the_host_whatever_the_default_device_is() -> None:
    seat: Any = SimpleNamespace(length=3, pads=[0, 2])
    right, wrong = torch.tensor([[3], [1]]), torch.tensor([[3], [0]])
    with torch.device("meta"):
        assert Seat.are_next(seat, right, 1) and not Seat.are_next(seat, wrong, 1)
