"""Loop: several decode steps in one launch."""

from __future__ import annotations

import gc
from typing import Any
from unittest.mock import ANY

import pytest
import torch

import devgraph as dg
from devgraph.runners import loop as loop_module
from tests.support.runner_steps import (
    IDS,
    X,
    decode_of,
)
from tests.support.runner_steps import ROWS as CACHE_ROWS


def _stay(batch: Any, outputs: Any) -> None:
    """Leave the inputs as they are."""


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"steps": 0}, "at least 1"),
        ({"steps": 1.5}, "must be an int"),
        ({"advance": None}, "advance of a loop"),
        ({"done": 3}, "done of a loop"),
    ],
)
def test_a_loop_that_cannot_work_is_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(dg.ConfigError, match=match):
        dg.Loop(**{"steps": 2, "advance": _stay, **options})


@pytest.mark.parametrize("found", [None, torch.zeros(2), torch.zeros(9, dtype=torch.bool)])
def test_done_must_return_a_bool_for_each_request(found: Any) -> None:
    loop = dg.Loop(steps=2, advance=_stay, done=lambda batch, out: found)
    with pytest.raises(dg.ConfigTypeError, match="done of a loop must return"):
        decode_of(lambda batch: batch.x * 2, [X], loop=loop)


def test_a_batch_of_several_widths_cannot_loop() -> None:
    n = dg.InputSlot("n", ("requests",), torch.int64, pad=dg.Pad.zero())
    runner = decode_of(lambda batch: batch.x * 2, [X, n], loop=dg.Loop(steps=2, advance=_stay))
    with pytest.raises(dg.InputError, match="split the batch by width"):
        runner.run({"x": torch.ones(5, 3), "n": torch.ones(2, dtype=torch.int64)})


def test_a_batch_without_requests_loops_with_the_others() -> None:
    runner = decode_of(lambda batch: batch.x * 2, [X], loop=dg.Loop(steps=2, advance=_stay))
    for decision in (runner.can_run(2), dg.Decision(dg.Reason.VOTED_EAGER)):
        found = runner.run({"x": torch.ones(0, 3)}, decision=decision)
        assert found.outputs.shape == (2, 0, 3)


@pytest.mark.parametrize("loop", [3, dg.Loop])
def test_a_loop_is_a_loop(loop: Any) -> None:
    with pytest.raises(dg.ConfigError, match="loop of a decode runner must be a dg.Loop"):
        decode_of(lambda batch: batch.x * 2, [X], loop=loop)


@pytest.mark.parametrize("name", ["x", "running"])
def test_another_tensor_in_the_place_of_a_slot_is_refused(name: str) -> None:
    def advance(batch: Any, outputs: Any) -> None:
        setattr(batch, name, getattr(batch, name).clone())

    with pytest.raises(dg.InputError, match=rf"use batch.{name}.copy_"):
        decode_of(lambda b: b.x * 2, [X], loop=dg.Loop(steps=2, advance=advance))


def test_the_slots_of_a_loop_are_its_own() -> None:
    running = dg.InputSlot("running", ("requests",), torch.bool, pad=dg.Pad.zero())
    loop = dg.Loop(steps=2, advance=_stay)
    with pytest.raises(dg.ConfigError, match="'running' is declared twice"):
        decode_of(lambda batch: batch.x * 2, [X, running], loop=loop)
    runner = decode_of(lambda batch: batch.x * 2, [X], loop=loop)
    with pytest.raises(dg.InputError, match="unknown input running"):
        runner.run({"x": torch.ones(2, 3), "running": torch.ones(2, dtype=torch.bool)})


def test_reports_say_how_many_steps_a_launch_takes() -> None:
    loop = dg.Loop(steps=3, advance=_stay)
    runner = decode_of(lambda batch: batch.x * 2, [X], loop=loop)
    runner.run({"x": torch.ones(2, 3)})
    assert runner.stats().steps_per_launch == 3 and runner.stats().graph_steps == 1


def test_an_output_of_other_rows_than_declared_is_named() -> None:
    with pytest.raises(dg.ConfigError, match="output .* rows='tokens'"):
        decode_of(
            lambda batch: batch.rows[:1],
            [IDS, CACHE_ROWS],
            outputs=dg.OutputSlot(rows="tokens"),
            loop=dg.Loop(steps=2, advance=_stay),
        )


def test_variants_of_a_loop_return_what_they_return() -> None:
    def step(batch: Any) -> Any:
        return batch.x.double() * 2 if batch.variant.get("wide") else batch.x * 2

    loop = dg.Loop(steps=2, advance=lambda batch, out: batch.x.add_(1))
    runner = decode_of(step, [X], loop=loop, variants=[{}, {"wide": True}], config={"buckets": [2]})
    x = torch.ones(2, 3)
    for variant, dtype in (({}, torch.float32), ({"wide": True}, torch.float64)):
        found = runner.run({"x": x}, variant=variant).outputs
        assert torch.equal(found, torch.stack([x * 2, x * 2 + 2]).to(dtype))
    assert runner.stats().updates == {"loops": 2, "loop_nodes": ANY}


@pytest.mark.parametrize("pad", [dg.Pad.fill(2), dg.Pad.last()], ids=["fill", "last"])
def test_a_loop_pads_what_advance_leaves_alone(pad: dg.Pad) -> None:
    held = dg.InputSlot("held_back", ("tokens", 3), torch.int32, pad=pad)
    loop = dg.Loop(
        steps=2, advance=lambda batch, out: batch.x.sub_(1), done=lambda batch, _: batch.x[:, 0] < 1
    )
    runner = decode_of(lambda b: b.held_back.clone(), [X, held], loop=loop, config={"buckets": [4]})
    given = torch.tensor([[1], [2], [4]]).expand(3, 3).int()
    found = runner.run({"x": torch.tensor([[1.0], [2], [1]]).expand(3, 3), "held_back": given})
    assert found.outputs[..., 0].tolist() == [[1, 2, 4], [0, 2, 0]]
    assert runner.prove().ok and runner.stats().eager == {}


def test_a_loop_of_several_ranks_is_unrolled() -> None:
    def steps(**options: Any) -> Any:
        runner = decode_of(
            lambda batch: batch.x * 2, [X], loop=dg.Loop(steps=2, advance=_stay), **options
        )
        with runner:
            runner.run({"x": torch.ones(2, 3)})
            return runner.stats().updates

    graphs = steps()["loops"]
    group = dg.RankGroup(torch.distributed.HashStore(), 0, size=1, timeout_s=10)
    assert steps(group=group) == {"loops_unrolled_ranks": graphs}


def test_what_advance_leaves_to_python_is_not_repeated() -> None:
    calls: list[int] = []

    def advance(batch: Any, outputs: Any) -> None:
        calls.append(batch.requests)

    with decode_of(lambda batch: batch.x * 2, [X], loop=dg.Loop(steps=7, advance=advance)) as one:
        assert calls.count(1) % 7 == 1, "one step in the capture, seven in each warm-up"
        assert one.run({"x": torch.ones(1, 3)}).outputs.shape == (7, 1, 3)


def test_a_loop_keeps_the_layouts_of_some_undeclared_variants_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_module, "_MAX_LAYOUTS", 4)
    runner = decode_of(
        lambda batch: batch.x * 2,
        (X,),
        loop=dg.Loop(steps=2, advance=_stay),
        variants=[{}, {"adapter": -1}],
        config={"buckets": [4]},
    )

    def layouts() -> int:
        gc.collect()
        found = (each for each in gc.get_objects() if type(each) is torch.Tensor)
        return sum(each.device.type == "meta" for each in found)

    before = layouts()
    for adapter in range(30):
        runner.run({"x": torch.ones(2, 3)}, variant={"adapter": adapter})
    assert layouts() <= before + 4
    assert runner.stats().eager == {"unknown_variant": 30}
