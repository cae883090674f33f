"""DecodeRunner: sizes, slots, host arguments and empty batches."""

from __future__ import annotations

import attrs
import pytest
import torch

import devgraph as dg
from devgraph import Reason
from devgraph.runners import Decision, HostSlot, InputSlot, Pad
from tests.support.runner_steps import (
    IDS,
    OFFSETS,
    CacheStep,
    X,
    decode_of,
    double_runner,
    rows_of_x,
    tokens,
)


def test_an_empty_batch_does_nothing():
    """FAULTS 5."""
    step = CacheStep()
    runner = decode_of(step)
    before, calls = step.cache.clone(), step.calls
    assert runner.run({"ids": tokens(), "rows": tokens()}).shape == (0, 4)
    assert torch.equal(before, step.cache)
    assert step.calls == calls
    assert runner.stats().eager == {"empty_batch": 1}


def test_an_empty_batch_runs_the_declared_dummy():
    """FAULTS 5."""
    step = CacheStep()
    runner = decode_of(step, idle_dummy=True)
    step.cache.zero_()
    assert runner.run({"ids": tokens(), "rows": tokens()}).shape == (0, 4)
    stats = runner.stats()
    assert (stats.graph_steps, stats.idle_steps, stats.real_rows) == (1, 1, 0)
    written = step.cache.any(dim=1).nonzero().flatten().tolist()
    assert written == [31]  # pad values only
    runner.suspend()
    runner.run({"ids": tokens(), "rows": tokens()})
    assert runner.stats().eager == {"empty_batch": 1}
    assert step.cache[:31].eq(0).all()


def test_slots_of_requests_and_offsets_are_padded_with_their_bucket():
    def step(batch):
        lengths = batch.offsets[1:] - batch.offsets[:-1]
        return lengths * batch.ids

    runner = decode_of(step, (IDS, OFFSETS), config={"buckets": [4]}, max_requests=4)
    out = runner.run({"ids": tokens(5, 6, 7), "offsets": tokens(0, 1, 2, 3)})
    assert out.tolist() == [5, 6, 7]
    assert runner.buffers["offsets"].tolist() == [0, 1, 2, 3, 3]


def test_requests_are_read_from_slots_of_requests_only():
    n = InputSlot("n", ("requests", 2), torch.float32, pad=Pad.zero())
    runner = decode_of(lambda b: b.n.sum(1), (n,))
    assert runner.run({"n": torch.ones(3, 2)}).tolist() == [2, 2, 2]
    assert runner.stats().graph_steps == 1


def test_tokens_that_are_no_whole_number_of_requests_are_refused():
    runner = double_runner(variants=[{"width": 4}], outputs=dg.OutputSlot(rows="tokens"))
    with pytest.raises(dg.InputError, match="6 tokens cannot be divided into requests of 4"):
        runner.run({"x": rows_of_x(6)}, variant={"width": 4})
    assert runner.run({"x": rows_of_x(8)}, variant={"width": 4}).shape == (8, 3)
    assert runner.stats().graph_steps == 1


def test_the_configured_maximum_is_the_largest_bucket():
    runner = double_runner(config={"max_bs": 5}, captured=False)
    assert list(runner.buckets) == [1, 2, 4, 5]
    with pytest.warns(dg.DeviceGraphWarning, match=r"decode\.max_bs=500 has no effect.*capacity"):
        runner = double_runner(config={"max_bs": 500}, captured=False)
    assert runner.buckets.maximum == 8


def test_aligned_buckets_hold_the_capacity():
    runner = double_runner(config={"align": 4}, max_requests=10)
    assert list(runner.buckets) == [4, 8, 12]
    assert torch.equal(runner.run({"x": rows_of_x(10)}), rows_of_x(10) * 2)
    assert runner.can_run(12).ok


@dg.region(host_args=("length",), mutates=("out",))
def windowed(x, out, *, length):
    out.copy_(x[:, :length].sum(1))


def windowed_step(batch):
    out = torch.empty(batch.tokens)
    windowed(batch.x, out, length=batch.host.length)
    return out + 0


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_host_arguments_reach_regions_under_every_policy(policy):
    runner = decode_of(windowed_step, (X,), host_args={"length": 1}, config=policy)
    x = rows_of_x(3)
    for length in (1, 3, 2, 1):
        out = runner.run({"x": x}, host_args={"length": length})
        assert torch.equal(out, x[:, :length].sum(1))
    assert runner.stats().graph_steps == 4
    big = rows_of_x(20)
    assert torch.equal(runner.run({"x": big}, host_args={"length": 2}), big[:, :2].sum(1))


@pytest.mark.parametrize("count", [3, 20])
@pytest.mark.parametrize(
    ("host_args", "text"),
    [
        (None, "missing host arguments: length"),
        ({}, "missing host arguments: length"),
        ({"lenght": 2}, "unknown host argument 'lenght'.*Did you mean 'length'"),
        ({"length": 1, "lenght": 2}, "unknown host argument 'lenght'.*Did you mean 'length'"),
        ({"length": "two"}, "had the type int at capture, but now has the type str"),
    ],
)
def test_bad_host_arguments_are_refused_in_graphs_and_eagerly(count, host_args, text):
    runner = decode_of(windowed_step, (X,), host_args={"length": 1})
    with pytest.raises(dg.HostArgumentError, match=text) as caught:
        runner.run({"x": rows_of_x(count)}, host_args=host_args)
    assert isinstance(caught.value, TypeError)
    assert runner.stats().steps == 0


def test_host_arguments_that_nobody_declared_are_refused():
    with pytest.raises(dg.HostArgumentError, match="unknown host argument 'length'"):
        double_runner().run({"x": rows_of_x(1)}, host_args={"length": 1})


@dg.region(host_args=("lengths",), mutates=("out",))
def per_request(x, out, *, lengths):
    for row, length in enumerate(lengths):
        out[row] = x[row, :length].sum()


def per_request_step(batch):
    out = torch.empty(batch.requests)
    per_request(batch.x, out, lengths=batch.host.lengths)
    return out * 1


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_host_sequences_are_padded_to_the_bucket(policy):
    runner = decode_of(
        per_request_step,
        (X,),
        host_args={"lengths": HostSlot("requests", pad=Pad.fill(1))},
        config={"policy": policy, "buckets": [4]},
        max_requests=4,
    )
    x = rows_of_x(3)
    for lengths in ([1, 2, 3], [3, 3, 1]):
        out = runner.run({"x": x}, host_args={"lengths": lengths})
        assert out.tolist() == [x[i, :n].sum().item() for i, n in enumerate(lengths)]
    assert runner.stats().graph_steps == 2
    with pytest.raises(dg.InputError, match="'lengths' has 2 entries; expected 3 .* The first"):
        runner.run({"x": x}, host_args={"lengths": [1, 2]})
    with pytest.raises(dg.HostArgumentError, match="must be a sequence"):
        runner.run({"x": x}, host_args={"lengths": 3})


def test_a_backend_that_cannot_update_runs_such_steps_eagerly_with_the_reason():
    backend = type(dg.get_backend("cpu"))()

    backend.capabilities = attrs.evolve(backend.capabilities, region_update=False)
    options = {"host_args": {"length": 2}, "backend": backend}
    runner = decode_of(windowed_step, (X,), **options)
    x = rows_of_x(3)
    assert torch.equal(runner.run({"x": x}, host_args={"length": 2}), x[:, :2].sum(1))
    assert torch.equal(runner.run({"x": x}, host_args={"length": 3}), x.sum(1))
    assert runner.stats().eager == {"update_unsupported": 1}
    assert runner.stats().graph_steps == 1
    strict = decode_of(windowed_step, (X,), strict=True, **options)
    with pytest.raises(dg.UpdateUnsupportedError):
        strict.run({"x": x}, host_args={"length": 3})


def test_an_unknown_batch_attribute_lists_the_slots():
    with pytest.raises(AttributeError, match=r"no slot 'id'.*Did you mean 'ids'"):
        decode_of(lambda b: b.id, (IDS,))
    with pytest.raises(AttributeError, match="no host argument 'kv_len'.*Declare it in host_args"):
        decode_of(lambda b: b.ids + b.host.kv_len, (IDS,))


@pytest.mark.parametrize("loop", [None, dg.Loop(steps=2, advance=lambda batch, outputs: None)])
def test_a_default_device_of_the_program_changes_nothing(loop):
    slots = [X, InputSlot("y", ("tokens", 3), torch.float32, pad=Pad.zero(), sample=_noise)]
    inputs = {"x": rows_of_x(2), "y": rows_of_x(2)}
    with torch.device("meta"):
        runner = decode_of(lambda batch: batch.x + batch.y, slots, loop=loop)
        found = runner.run(inputs, clone=True)
        assert runner.prove().ok
    assert (found if loop is None else found.outputs[1]).equal(rows_of_x(2) * 2)


def _noise(shape, generator):
    return torch.randn(shape, generator=generator)


def test_prepare_may_return_declared_host_arguments_only():
    with pytest.raises(dg.HostArgumentError, match="unknown host argument 'length'"):
        double_runner(prepare=lambda batch: {"length": 3})
    with pytest.raises(dg.ConfigTypeError, match="prepare must be a function"):
        double_runner(prepare=3)


def test_prepare_runs_without_gradients_which_are_on_again_behind_it():
    modes, fails = [], []

    def plan(batch):
        modes.append(torch.is_grad_enabled())
        if fails:
            raise ValueError("no plan")

    runner = double_runner(prepare=plan)
    for inputs in (rows_of_x(3), rows_of_x(500)):  # in a graph, and eagerly
        runner.run({"x": inputs})
        assert torch.is_grad_enabled()
    fails.append(True)
    with pytest.raises(ValueError, match="no plan"):
        runner.run({"x": rows_of_x(3)})
    assert torch.is_grad_enabled() and not any(modes)


def test_sequences_that_prepare_returns_have_the_length_of_the_bucket():
    seen = []

    def step(batch):
        seen.append(batch.host.lengths)
        return batch.x * 2

    runner = decode_of(
        step,
        (X,),
        host_args={"lengths": HostSlot("requests", pad=Pad.fill(1))},
        prepare=lambda batch: {"lengths": [5] * batch.x.shape[0]},
        config={"emulate": True},
    )
    assert runner.run({"x": rows_of_x(3)}).tolist() == (rows_of_x(3) * 2).tolist()
    assert seen[-1] == (5, 5, 5, 5)


def test_pads_run_under_a_declared_variant():
    factors = {"a": 2, "b": 3}
    slot = InputSlot("x", ("tokens", 2), torch.float32, pad=Pad.zero())
    runner = dg.DecodeRunner(
        lambda batch: batch.x * factors[batch.variant["mode"]],
        [slot],
        outputs=dg.OutputSlot(rows="tokens"),
        variants=[{"mode": mode, "width": 2} for mode in factors],
        config={"buckets": [1, 4]},
        backend="cpu",
        max_requests=4,
        idle_dummy=True,
    )
    runner.capture()
    runner.run({"x": torch.zeros(0, 2)})
    runner.run(None, decision=Decision(Reason.VOTED_EAGER))
    assert runner.stats().idle_steps == 1
    assert runner.stats().eager == {"voted_eager": 1}


def test_a_real_value_needs_rows_and_a_constant_pad() -> None:
    for dims, pad, real in (((3,), dg.Pad.zero(), 1), (("tokens",), dg.Pad.last(), 1)):
        with pytest.raises(dg.ConfigError, match="marks real rows"):
            dg.InputSlot("m", dims, torch.int64, pad=pad, real=real)
    with pytest.raises(dg.ConfigError, match="marks real rows"):
        dg.InputSlot("m", ("tokens",), torch.bool, pad=dg.Pad.zero(), real=3)


@pytest.mark.parametrize("policy", ["full", "breakable", "disabled"])
def test_a_slot_with_a_real_value_tells_real_rows(policy: str) -> None:
    marks = [
        dg.InputSlot("a", ("requests",), torch.int64, pad=dg.Pad.fill(-2), real=5),
        dg.InputSlot("b", ("tokens", 2), torch.float32, pad=dg.Pad.zero(), real=0.5),
    ]
    runner = decode_of(
        lambda batch: batch.a[:, None] * batch.x[:, :2] + batch.b, [X, *marks], config=policy
    )
    for count in (3, 1, 4, 9):
        x = torch.randn(count, 3)
        assert torch.equal(runner.run({"x": x}), 5 * x[:, :2] + 0.5)
    if policy != "disabled":
        assert runner.prove().ok


def test_more_requests_than_buffers_hold_are_told_from_padding_too() -> None:
    live = dg.InputSlot("live", ("requests",), torch.int64, pad=dg.Pad.zero(), real=1)
    runner = dg.PrefillRunner(
        lambda batch: batch.x * 2,
        [X, OFFSETS, live],
        tail=lambda hidden, batch: batch.live.cumsum(0),
        config={"policy": "breakable", "buckets": [8]},
        backend="cpu",
        max_tokens=8,
        max_requests=2,
    )
    runner.capture()
    for requests in (1, 2, 5):
        starts = torch.arange(requests + 1)
        starts[-1] = 6
        out = runner.run({"x": torch.ones(6, 3), "offsets": starts})
        assert out.tolist() == list(range(1, requests + 1))
    assert runner.stats().graph_steps == 3
