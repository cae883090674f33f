"""Padding: what rows hold that no request owns, from the start and behind the steps of a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.runners.padding import Pad, Padding, pad_rows
from tests.support.runner_steps import decode_of


@pytest.mark.parametrize(
    ("pad", "expected"),
    [
        (Pad.zero(), [0, 0, 0, 0]),
        (Pad.fill(-1), [-1, -1, -1, -1]),
        (Pad.last(5), [5, 5, 5, 5]),
        (Pad.ramp(3), [0, 3, 6, 9]),
        (Pad.ramp(3, start=1), [1, 4, 7, 10]),
        (Pad.value_of(torch.tensor(9)), [9, 9, 9, 9]),
    ],
)
def test_a_slot_without_real_rows_holds_its_pad_values(pad: Pad, expected: list[int]) -> None:
    view = torch.full((4,), 77)
    padding = Padding()
    padding.add(view, pad, 0)
    padding.write()
    assert view.tolist() == expected


@pytest.mark.parametrize("pad", [Pad.fill(0.1), Pad.last(0.1)])
def test_a_pad_value_is_as_exact_as_its_slot(pad: Pad) -> None:
    view = torch.zeros(2, dtype=torch.float64)
    padding = Padding()
    padding.add(view, pad, 0)
    padding.write()
    assert view.tolist() == [0.1, 0.1]


def test_a_pad_source_that_autograd_follows_is_read_all_the_same() -> None:
    source = torch.ones(3, requires_grad=True)
    slot = dg.InputSlot("x", ("tokens", 3), torch.float32, pad=Pad.value_of(source))
    runner = decode_of(lambda batch: batch.x * 2, [slot])
    assert runner.run({"x": torch.zeros(3, 3)}).eq(0).all()
    assert not runner.buffers["x"].requires_grad
    assert runner.buffers["x"][3].tolist() == [1, 1, 1]


REAL = torch.tensor([False, True, True, False, True, False])


@pytest.mark.parametrize(
    ("pad", "want"),
    [
        (Pad.fill(-1), [-1, 11, 12, -1, 14, -1]),
        (Pad.value_of(torch.tensor(7)), [7, 11, 12, 7, 14, 7]),
        (Pad.last(5), [5, 11, 12, 12, 14, 14]),
        (Pad.ramp(3, 1), [1, 11, 12, 15, 14, 17]),
    ],
)
def test_rows_that_are_not_real_get_their_pad_values(pad: Pad, want: list[int]) -> None:
    rows = torch.arange(10, 16)
    pad_rows(rows, pad, 0, REAL)
    assert rows.tolist() == want
    wide = torch.arange(10, 16).repeat(2, 1)
    pad_rows(wide, pad, 1, REAL)
    assert wide.tolist() == [want, want]


def _padded_behind(slot: dg.InputSlot, first: Any, done: list[bool], width: int = 1) -> list[Any]:
    """Return what ``slot`` holds in the second step of a loop, after ``done`` of the first."""
    ids = dg.InputSlot("ids", ("tokens",), torch.int64, pad=Pad.zero())
    slots = [slot] if slot.name == "ids" else [ids, slot]
    runner = decode_of(
        lambda batch: getattr(batch, slot.name).clone(),
        slots,
        outputs=dg.OutputSlot(rows=None),
        variants=[{"width": width}],
        config={"buckets": [len(done)]},
        loop=dg.Loop(
            steps=2, advance=lambda batch, out: None, done=lambda batch, out: torch.tensor(done)
        ),
    )
    tokens = torch.arange(len(done) * width)
    inputs = {"ids": tokens, slot.name: torch.tensor(first)}
    outputs = runner.run(inputs, variant={"width": width}).outputs
    return list(outputs[1].tolist())


def test_the_tokens_of_a_request_are_padded_together() -> None:
    slot = dg.InputSlot("ids", ("tokens",), torch.int64, pad=Pad.fill(-1))
    assert _padded_behind(slot, list(range(6)), [False, True, False], 2) == [0, 1, -1, -1, 4, 5]


def test_offsets_stay_up_to_the_last_request_that_goes_on() -> None:
    slot = dg.InputSlot("starts", ("requests+1",), torch.int64, pad=Pad.last())
    done = REAL.logical_not().tolist()
    found = _padded_behind(slot, list(range(0, 14, 2)), done)
    assert found == [0, 2, 4, 6, 8, 10, 10]


def test_a_slot_without_rows_is_left_alone() -> None:
    slot = dg.InputSlot("scale", (2,), torch.float32, pad=Pad.zero())
    assert _padded_behind(slot, [1.0, 1.0], [True, False]) == [1, 1]
