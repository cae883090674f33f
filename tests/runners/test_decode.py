"""DecodeRunner: decisions, variants, eager steps with a reason, host arguments, loops."""

from __future__ import annotations

import gc
import math
from typing import Any
from unittest.mock import ANY

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import devgraph as dg
from devgraph import Reason
from devgraph.runners import Decision, GraphKey, HostSlot, InputSlot, Pad
from devgraph.runners import decode as decode_module
from devgraph.testing.conformance.support import (
    POLICIES,
    ROWS,
    WIDTH,
    Kit,
    Model,
    batch_of,
    check_run,
    decoder,
    mixed,
    runner_of,
)
from tests.support.runner_steps import (
    IDS,
    OFFSETS,
    CacheStep,
    X,
    cache_inputs,
    decode_of,
    double,
    double_runner,
    rows_of_x,
    tokens,
)
from tests.support.runner_steps import ROWS as CACHE_ROWS


def test_a_batch_takes_the_smallest_bucket_that_holds_it():
    runner = double_runner()
    assert list(runner.buckets) == [1, 2, 4, 8]
    assert [runner.can_run(n).bucket for n in range(1, 9)] == [1, 2, 4, 4, 8, 8, 8, 8]
    decision = runner.can_run(3)
    assert decision == Decision(True, 4, Reason.GRAPH, GraphKey((), 4))


def test_can_run_counts_nothing():
    runner = double_runner()
    for n in (0, 1, 5, 99):
        runner.can_run(n)
    assert runner.stats().steps == 0
    assert runner.stats().eager == {}


@settings(max_examples=60, deadline=None)
@given(requests=st.integers(1, 20), width=st.sampled_from([1, 2, 3]), lora=st.booleans())
def test_run_does_what_can_run_says(requests, width, lora):
    runner = shared_runner()
    variant = {"lora": True} if lora else {}
    before = runner.stats()
    decision = runner.can_run(requests, requests * width, variant)
    x = torch.randn(requests * width, 3)
    out = runner.run({"x": x, "n": torch.ones(requests)}, variant={**variant, "width": width})
    factor = (3 if lora else 2) * torch.ones(requests).repeat_interleave(width)[:, None]
    assert torch.equal(out, x * factor)
    after = runner.stats()
    assert after.steps == before.steps + 1
    assert after.graph_steps == before.graph_steps + decision.ok
    reason = decision.reason.value
    assert after.eager.get(reason, 0) == before.eager.get(reason, 0) + (not decision.ok)


_SHARED: list[dg.DecodeRunner] = []


def shared_runner() -> dg.DecodeRunner:
    """One runner with slots for tokens and requests and three variants, for property tests."""
    if not _SHARED:
        n = InputSlot("n", ("requests",), torch.float32, pad=Pad.fill(1))

        def step(batch):
            factor = 3 if batch.variant.get("lora") else 2
            return batch.x * factor * batch.n.repeat_interleave(batch.width or 1)[:, None]

        _SHARED.append(
            decode_of(
                step,
                (X, n),
                variants=[{}, {"width": 2}, {"lora": True}],
                outputs=dg.OutputSlot(rows="tokens"),
                config={"buckets": [2, 4, 8]},
            )
        )
    return _SHARED[0]


@pytest.mark.parametrize(
    ("requests", "total", "variant", "reason"),
    [
        (3, 3, {}, Reason.GRAPH),
        (3, 6, {}, Reason.GRAPH),
        (3, 6, {"width": 2}, Reason.GRAPH),
        (3, 9, {}, Reason.UNKNOWN_WIDTH),
        (3, 7, {}, Reason.UNKNOWN_WIDTH),
        (3, 6, {"width": 1}, Reason.UNKNOWN_WIDTH),
        (3, 6, {"lora": True}, Reason.UNKNOWN_WIDTH),
        (3, 3, {"lora": True}, Reason.GRAPH),
        (3, 3, {"lora": False}, Reason.UNKNOWN_VARIANT),
        (9, 9, {}, Reason.OVER_LARGEST_BUCKET),
        (0, 0, {}, Reason.EMPTY_BATCH),
    ],
)
def test_width_and_variant_are_part_of_the_graph_key(requests, total, variant, reason):
    assert shared_runner().can_run(requests, total, variant).reason is reason


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda r: r.can_run(-1), dg.InputError),
        (lambda r: r.can_run(3, -3), dg.InputError),
        (lambda r: r.can_run(2.0), dg.InputTypeError),
        (lambda r: r.can_run(True), dg.InputTypeError),
        (lambda r: r.can_run("3"), dg.InputTypeError),
        (lambda r: r.can_run(3, None, {"lora": [1]}), dg.InputTypeError),
    ],
)
def test_a_size_that_is_no_count_is_refused(call, kind):
    """FAULTS 5."""
    with pytest.raises(kind) as caught:
        call(double_runner(captured=False, variants=[{}, {"lora": True}]))
    assert isinstance(caught.value, ValueError)


def test_an_over_large_batch_runs_eagerly_and_whole():
    step = CacheStep()
    runner = decode_of(step)
    inputs = cache_inputs(13)
    want = step.expected(step.cache.clone(), **inputs)
    torch.testing.assert_close(runner.run(inputs), want)
    assert runner.stats().eager == {"over_largest_bucket": 1}


def test_mostly_padding_runs_eagerly():
    runner = double_runner(config={"buckets": [1, 8]})
    assert runner.can_run(3).reason is Reason.PADDING
    assert runner.can_run(4).ok
    assert torch.equal(runner.run({"x": rows_of_x(3)}), rows_of_x(3) * 2)
    assert runner.stats().eager == {"padding": 1}
    assert double_runner(config={"buckets": [1, 8], "max_padding": 3}).can_run(3).ok


def test_an_eager_step_sees_real_sizes_and_its_own_copies():
    seen = []

    def step(batch):
        seen.append((batch.requests, batch.tokens, batch.width, batch.real.requests))
        batch.x.add_(1)
        return batch.x

    runner = decode_of(step, (X,), captured=False)
    x = rows_of_x(3)
    out = runner.run({"x": x})
    assert seen == [(3, 3, 1, 3)]
    assert torch.equal(x, rows_of_x(3))
    assert torch.equal(out, rows_of_x(3) + 1)
    second = runner.run({"x": x})
    assert out.data_ptr() != second.data_ptr()
    assert runner.stats().eager == {"not_captured": 2}


def test_eager_steps_run_without_grad():
    modes = []

    def step(batch):
        modes.append(torch.is_grad_enabled())
        return batch.x * 1

    runner = decode_of(step, (X,))
    runner.run({"x": rows_of_x(20)})
    assert set(modes) == {False}


@pytest.mark.parametrize("sizes", [{}, {"buckets": [3, 999], "align": 5}])
def test_disabled_is_eager_by_choice_and_captures_nothing(sizes):
    runner = double_runner(config={"policy": "disabled", **sizes}, strict=True)
    assert torch.equal(runner.run({"x": rows_of_x(2)}), rows_of_x(2) * 2)
    assert runner.stats().requested == runner.effective_policy == "disabled"
    assert runner.stats().eager == {"disabled": 1}
    assert runner.plan().buckets == ()


@pytest.mark.parametrize(
    ("prepare", "inputs", "kind", "text"),
    [
        (lambda r: None, 9, dg.InputError, "9 requests.*over largest bucket.*split the batch"),
        (lambda r: None, 3, dg.InputError, "padding.*max_padding"),
        (lambda r: r.suspend(), 1, dg.StateError, "suspended; call resume"),
        (lambda r: r.invalidate("new weights"), 1, dg.StateError, r"invalidated \(new weights\)"),
    ],
)
def test_strict_raises_what_would_run_eagerly(prepare, inputs, kind, text):
    """FAULTS 4."""
    runner = double_runner(config={"buckets": [1, 8]}, strict=True)
    prepare(runner)
    with pytest.raises(kind, match=text):
        runner.run({"x": rows_of_x(inputs)})
    assert runner.stats().steps == 0


def test_strict_before_capture_says_to_capture():
    with pytest.raises(dg.StateError, match="not captured; call capture"):
        double_runner(strict=True, captured=False).run({"x": rows_of_x(1)})


def test_strictness_comes_from_the_configuration_unless_the_engine_says():
    assert_raises = double_runner(config={"strict": True}, captured=False)
    with pytest.raises(dg.StateError):
        assert_raises.run({"x": rows_of_x(1)})
    lenient = double_runner(config={"strict": True}, strict=False, captured=False)
    assert lenient.run({"x": rows_of_x(1)}).shape == (1, 3)


def test_every_reason_but_graph_and_by_choice_has_an_error_with_a_way_out():
    from devgraph.runners.decisions import refusal

    for reason in Reason:
        if reason in (Reason.GRAPH, Reason.EMPTY_BATCH):
            continue
        error = refusal(Decision.eager(reason), "a batch")
        assert isinstance(error, dg.DeviceGraphError)
        assert "a batch cannot run in a graph" in str(error)
        assert ";" in str(error)


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
    with pytest.raises(dg.InputError, match="6 tokens are not a whole number of requests of 4"):
        runner.run({"x": rows_of_x(6)}, variant={"width": 4})
    assert runner.run({"x": rows_of_x(8)}, variant={"width": 4}).shape == (8, 3)
    assert runner.stats().graph_steps == 1


def test_sequences_over_the_configured_length_run_eagerly():
    runner = double_runner(config={"max_seq_len": 100})
    with pytest.raises(dg.InputError, match="pass longest="):
        runner.run({"x": rows_of_x(1)})
    runner.run({"x": rows_of_x(1)}, longest=100)
    runner.run({"x": rows_of_x(1)}, longest=101)
    assert runner.stats().eager == {"over_max_seq_len": 1}
    assert runner.can_run(1, longest=101).reason is Reason.OVER_MAX_SEQ_LEN


def test_the_configured_maximum_is_the_largest_bucket():
    runner = double_runner(config={"max_bs": 5}, captured=False)
    assert list(runner.buckets) == [1, 2, 4, 5]
    with pytest.warns(dg.DeviceGraphWarning, match=r"decode\.max_bs=500 has no effect.*capacity"):
        runner = double_runner(config={"max_bs": 500}, captured=False)
    assert runner.buckets.maximum == 8


def test_listed_buckets_are_kept_and_what_they_leave_out_is_said(
    caplog: pytest.LogCaptureFixture,
):
    runner = double_runner(config={"buckets": [2, 1]})
    assert list(runner.buckets) == [1, 2]
    assert runner.can_run(3).reason == "over_largest_bucket"
    said = [one.message for one in caplog.records if "run eagerly" in one.message]
    assert said == [
        "decode: steps of 3 to 8 requests run eagerly: no bucket of [1, 2] holds them with at most "
        "2 times their rows"
    ]


def test_buckets_that_leave_nothing_out_say_nothing(caplog: pytest.LogCaptureFixture):
    for config in (None, {"buckets": [1, 2, 4, 8]}, {"policy": "disabled", "buckets": [2]}):
        double_runner(config=config, captured=False)
    assert "run eagerly" not in caplog.text


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"max_requests": 4}, "decode.max_requests=4 has no effect: decode is sized by"),
        ({"lazy_hits": 3}, "decode.lazy_hits=3 has no effect: only capture='lazy' counts"),
        ({"policy": "breakable", "miss_budget": 3}, "decode.miss_budget=3 has no effect"),
    ],
)
def test_settings_without_effect_are_warned_about(config: dict[str, Any], said: str):
    with pytest.warns(dg.DeviceGraphWarning) as caught:
        double_runner(config=config, captured=False)
    [one] = caught
    assert said in str(one.message)


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
        ({"length": 1, "lenght": 2}, "unknown host argument 'lenght'.*Did you mean 'length'"),
        ({"length": "two"}, "was a int at capture and is a str"),
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
    with pytest.raises(dg.InputError, match="'lengths' has 2 entries; expected 3"):
        runner.run({"x": x}, host_args={"lengths": [1, 2]})
    with pytest.raises(dg.HostArgumentError, match="must be a sequence"):
        runner.run({"x": x}, host_args={"lengths": 3})


def test_a_backend_that_cannot_update_runs_such_steps_eagerly_with_the_reason():
    backend = type(dg.get_backend("cpu"))()
    import attrs

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


def test_a_graph_that_reads_the_real_size_is_refused():
    with pytest.raises(dg.CaptureError, match="batch.real changes between runs"):
        decode_of(lambda b: b.x * b.real.requests, (X,))


def test_an_eager_body_reads_the_real_size():
    seen = []

    @dg.no_graph(mutates=("out",))
    def note(batch, out):
        seen.append(batch.real.requests)
        out.fill_(batch.real.requests)

    def step(batch):
        out = torch.empty(batch.requests)
        note(batch, out)
        return out + 0

    runner = decode_of(step, (X,), config={"policy": "breakable", "buckets": [4]}, max_requests=4)
    seen.clear()
    assert runner.run({"x": rows_of_x(3)}).tolist() == [3, 3, 3]
    assert runner.run({"x": rows_of_x(2)}).tolist() == [2, 2]
    assert seen == [3, 2]


def test_a_run_inside_a_capture_is_refused_before_anything_is_copied():
    """FAULTS 13."""
    runner = double_runner()
    runner.run({"x": rows_of_x(2)})
    before = runner.buffers["x"].clone()
    with pytest.raises(dg.NestedCaptureError, match="decode cannot run inside a capture"):
        dg.capture(lambda: runner.run({"x": rows_of_x(2, 50)}), backend="cpu", warmup=0)
    assert torch.equal(before, runner.buffers["x"])


def test_a_decision_may_be_handed_over():
    runner = double_runner()
    larger = runner.can_run(8)
    assert torch.equal(runner.run({"x": rows_of_x(2)}, decision=larger), rows_of_x(2) * 2)
    eager = Decision.eager(Reason.VOTED_EAGER)
    runner.run({"x": rows_of_x(2)}, decision=eager)
    stats = runner.stats()
    assert {b.key: b.hits for b in stats.buckets}["8"] == 1
    assert stats.eager == {"voted_eager": 1}
    runner.run({"x": rows_of_x(2)})
    assert {b.key: b.hits for b in runner.stats().buckets}["2"] == 1


def test_a_decision_brings_the_variant_that_it_was_made_for():
    def step(batch):
        return batch.x * (10 if batch.variant.get("lora") else 2)

    runner = decode_of(step, (X,), variants=[{}, {"lora": True}])
    x = rows_of_x(3)
    for _ in range(2):  # in graphs, and eagerly
        lora, plain = runner.can_run(3, variant={"lora": True}), runner.can_run(3)
        assert runner.run({"x": x}, decision=lora).eq(x * 10).all()
        assert runner.run({"x": x}, decision=plain).eq(x * 2).all()
        runner.invalidate()
    runner.capture()
    with pytest.raises(dg.InputError, match=r"bucket 4 \(lora=True\), and the batch .* variant {}"):
        runner.run({"x": x}, decision=runner.can_run(3, variant={"lora": True}), variant={})
    with pytest.raises(dg.InputError, match="no declared variant has 'width2'"):
        runner.run({"x": x}, decision=Decision.graph(GraphKey((("width2", 1),), 4)))


def test_a_decision_for_wide_requests_counts_them_by_its_width():
    runner = decode_of(lambda batch: batch.x.view(-1, 4, 3).sum(1), (X,), variants=[{"width": 4}])
    x = rows_of_x(8)
    decision = runner.can_run(2, variant={"width": 4})
    assert runner.run({"x": x}, decision=decision).shape == (2, 3)


def test_offsets_without_a_row_are_of_no_batch():
    runner = decode_of(lambda batch: batch.x + batch.offsets[1:, None], (X, OFFSETS))
    with pytest.raises(dg.InputError, match="'offsets' has no rows"):
        runner.run({"x": rows_of_x(2), "offsets": tokens()})
    assert runner.run({"x": rows_of_x(0), "offsets": tokens(0)}).shape == (0, 3)


def test_a_refused_runner_changes_nothing_of_the_pool_of_others():
    pool = dg.get_backend("cpu").make_pool()
    for wrong in ({"outputs": 3}, {"host_args": {"self": 1}}, {"group": 3}):
        with pytest.raises(dg.ConfigError):
            decode_of(double, (X,), pool=pool, config={"memory": 1000}, **wrong)
    assert pool.recordings.budget_bytes is None


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


def test_input_slots_may_come_from_a_generator():
    runner = decode_of(double, (X,), captured=False)
    made = dg.DecodeRunner(double, (slot for slot in (X,)), max_requests=8, backend="cpu")
    assert made.plan().input_bytes == runner.plan().input_bytes


@pytest.mark.parametrize("pad", [Pad.zero(), Pad.last()])
def test_a_decision_for_a_graph_takes_a_batch_without_rows(pad):
    runner = decode_of(double, (attrs.evolve(X, pad=pad),))
    decision = runner.can_run(2)
    assert runner.run({"x": rows_of_x(0)}, decision=decision).shape[0] == 0
    assert runner.stats().graph_steps == 1


def test_a_decision_that_does_not_fit_is_refused():
    runner = double_runner()
    with pytest.raises(dg.InputError, match="bucket 2, and the batch has 3 requests"):
        runner.run({"x": rows_of_x(3)}, decision=runner.can_run(2))
    with pytest.raises(dg.StateError, match="here decode .*not captured"):
        runner.run({"x": rows_of_x(1)}, decision=Decision.graph(GraphKey((), 3)))
    with pytest.raises(dg.InputError, match="for an empty batch, and the batch has 1 requests"):
        runner.run({"x": rows_of_x(1)}, decision=runner.can_run(0))
    assert runner.stats().steps == 0


def test_a_rank_without_requests_replays_the_decided_bucket():
    step = CacheStep()
    runner = decode_of(step)
    step.cache.zero_()
    assert runner.run(None, decision=runner.agree(runner.can_run(4))) is None
    assert step.cache[:31].eq(0).all()
    stats = runner.stats()
    assert (stats.graph_steps, stats.idle_steps) == (1, 1)
    assert runner.run(None, decision=runner.agree(None)) is None
    assert runner.run(None, decision=Decision.eager(Reason.VOTED_EAGER)) is None
    assert runner.stats().eager == {"empty_batch": 1, "voted_eager": 1}
    with pytest.raises(dg.InputTypeError, match="pass decision="):
        runner.run(None)


def test_threads_that_share_a_runner_get_their_own_results():
    import threading

    runner = double_runner()
    wrong: list[int] = []

    def work(seed):
        for index in range(50):
            x = rows_of_x(1 + (seed + index) % 8, start=seed * 1000)
            if not torch.equal(runner.run({"x": x}, clone=True), x * 2):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert runner.stats().graph_steps == 200


def test_a_name_that_no_variant_declares_is_refused_with_the_nearest():
    runner = double_runner(variants=[{}, {"lora": True}])
    for ask in (lambda v: runner.can_run(2, variant=v), lambda v: run_x(runner, v)):
        with pytest.raises(dg.InputError, match=r"has 'lorra'. .*Did you mean 'lora'\?"):
            ask({"lorra": True})
    assert runner.can_run(2, variant={"lora": "other"}).reason is Reason.UNKNOWN_VARIANT
    assert runner.stats().steps == 0


def run_x(runner, variant):
    return runner.run({"x": rows_of_x(2)}, variant=variant)


def test_runner_of_the_pool_is_refused_inside_an_eager_body(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 38."""
    draft_model, model = Model(kit), Model(kit)
    draft = decoder(kit, draft_model, pool=pool)
    refused: list[dg.StateError] = []
    nested: list[bool] = []

    @dg.no_graph
    def drafted(x: torch.Tensor) -> torch.Tensor:
        if nested:
            for use in (lambda: draft.run(batch_of(kit, 2)), draft.close, runner.invalidate):
                with pytest.raises(dg.StateError, match="inside an eager body") as caught:
                    use()
                refused.append(caught.value)
        return x * 1

    decode = model.decode
    model.decode = lambda batch: drafted(decode(batch))  # type: ignore[method-assign]
    runner = decoder(kit, model, config="breakable", pool=pool)
    nested.append(True)
    check_run(kit, runner, model, 3, seed=1)
    assert len(refused) >= 3
    nested.clear()
    check_run(kit, draft, draft_model, 3, seed=2)


@pytest.mark.parametrize("policy", ["breakable", "disabled"])
def test_runner_is_refused_inside_its_own_step(kit: Kit, policy: str) -> None:
    """FAULTS 38."""
    model = Model(kit)
    nested: list[bool] = []

    @dg.no_graph
    def again(x: torch.Tensor) -> torch.Tensor:
        if nested:
            nested.clear()
            for use in (lambda: runner.run(batch_of(kit, 2)), runner.close):
                with pytest.raises(dg.StateError, match="inside"):
                    use()
        return x * 1

    decode = model.decode
    model.decode = lambda batch: again(decode(batch))  # type: ignore[method-assign]
    runner = decoder(kit, model, config=policy)
    check_run(kit, runner, model, 3, seed=1)
    nested.append(True)
    runner.run(batch_of(kit, 3))
    assert not nested
    check_run(kit, runner, model, 3, seed=1)


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


def test_the_environment_makes_every_runner_emulate(monkeypatch):
    monkeypatch.setenv("DEVGRAPH_EMULATE", "1")
    runner = double_runner()
    runner.run({"x": rows_of_x(3)})
    assert runner.effective_policy == "emulated" and runner.stats().graph_steps == 1


def test_what_cannot_be_shared_is_refused_or_stays_its_own():
    first = double_runner(max_requests=4)
    with pytest.raises(dg.ConfigError, match="the runner of the larger batches first"):
        double_runner(share=first, max_requests=8)
    with pytest.raises(dg.ConfigError, match="leave pool= out"):
        double_runner(share=first, pool=first.backend.make_pool())
    with pytest.raises(dg.ConfigTypeError, match="must be another runner"):
        double_runner(share=3)
    wide = InputSlot("x", ("tokens", 5), torch.float32, pad=Pad.zero())
    other = decode_of(lambda batch: batch.x * 2, (wide,), share=first, max_requests=4)
    assert not other.buffers.overlaps(first.buffers["x"])
    out = first.run({"x": rows_of_x(2)})
    other.run({"x": torch.ones(2, 5)})
    assert out.tolist() == (rows_of_x(2) * 2).tolist()


@pytest.mark.parametrize("hook", ["prepare", "tail"])
def test_a_runner_is_refused_inside_a_step_that_uses_its_buffers(hook):
    others = []

    def use(*args):
        for other in others:
            with pytest.raises(dg.StateError, match="cannot run draft inside a step of prefill"):
                other.run({"x": torch.full((2, 3), 9.0)})
        return args[0] if hook == "tail" else None

    runner = dg.PrefillRunner(
        lambda batch: batch.x * 2,
        [X],
        max_tokens=8,
        max_requests=4,
        backend="cpu",
        **({"tail": use} if hook == "tail" else {"prepare": use}),
    )
    others.append(double_runner(share=runner, name="draft", captured=False))
    runner.capture()
    assert runner.run({"x": rows_of_x(2)}).equal(rows_of_x(2) * 2)
    assert runner.prove().ok
    assert others[0].run({"x": rows_of_x(2)}).equal(rows_of_x(2) * 2)


def test_a_runner_without_graphs_shares_its_inputs_only():
    off = decode_of(double, (X,), config="disabled")
    runner = decode_of(double, (X,), share=off)
    assert runner.buffers["x"].data_ptr() == off.buffers["x"].data_ptr()
    assert runner.run({"x": rows_of_x(2)}).eq(rows_of_x(2) * 2).all()


def test_sharing_learns_first_what_the_other_runner_returns():
    first = double_runner(captured=False)
    second = double_runner(share=first)
    assert first.stats().captures == 0 and first.stats().output_bytes > 0
    first.capture()
    a, b = (runner.run({"x": rows_of_x(2)}) for runner in (first, second))
    assert a.data_ptr() == b.data_ptr()
    first.close()
    with pytest.raises(dg.StateError, match="closed"):
        double_runner(share=first)
    assert run_x(second, None).tolist() == (rows_of_x(2) * 2).tolist()


@pytest.mark.parametrize("policy", POLICIES)
def test_capture_leaves_the_state_of_real_rows_alone(kit: Kit, policy: str) -> None:
    """FAULTS 36."""
    model = Model(kit)
    kit.refill(model.cache, 5)
    before = model.cache.clone()
    decoder(kit, model, config=policy)
    kit.same(model.cache[:ROWS], before[:ROWS], "the state after the capture")


@pytest.mark.parametrize("policy", POLICIES)
def test_runner_proves_itself(kit: Kit, policy: str) -> None:
    """FAULTS 36."""
    weight = kit.tensor(WIDTH, WIDTH)

    def forward(batch: Any) -> torch.Tensor:
        return mixed(torch.tanh(batch.x), weight)

    with runner_of(kit, forward, config=policy) as runner:
        report = runner.prove()
        assert report.ok, str(report)


@pytest.mark.parametrize("policy", POLICIES)
def test_host_arguments_reach_the_step_of_a_runner(kit: Kit, policy: str) -> None:
    @dg.region(host_args=("length",))
    def prefix(x: torch.Tensor, *, length: int) -> torch.Tensor:
        return x[:, :length].sum(1)

    def forward(batch: Any) -> torch.Tensor:
        return prefix(batch.x * 2, length=batch.host.length) + 1

    runner = runner_of(kit, forward, host_args={"length": 1}, config=policy)
    for seed, length in enumerate((3, 7, 1, 3)):
        x = kit.tensor(4, WIDTH, seed=seed)
        out = runner.run({"x": x}, host_args={"length": length})
        kit.same(out, (x * 2)[:, :length].sum(1) + 1, f"length={length} under {policy}")
    assert runner.stats().eager == {}


def test_batch_over_the_largest_bucket_runs_eagerly_and_whole(kit: Kit) -> None:
    """FAULTS 4."""
    model = Model(kit)
    runner = decoder(kit, model)
    decision = runner.can_run(requests=11)
    assert not decision.ok
    assert decision.reason == "over_largest_bucket"
    check_run(kit, runner, model, 11, seed=1)
    assert runner.stats().eager == {"over_largest_bucket": 1}
    check_run(kit, runner, model, 8, seed=2)


def test_strided_and_overlapping_inputs_are_copied_in(kit: Kit) -> None:
    """FAULTS 8."""
    runner = runner_of(kit, lambda batch: batch.x * 2)
    base = kit.tensor(WIDTH, 16)
    for x in (
        base.t()[:4],
        base.t()[1:8:2],
        base.view(-1)[: 4 + WIDTH].unfold(0, WIDTH, 1)[:4],
        base[:1, :WIDTH].expand(4, WIDTH),
    ):
        want = x.clone() * 2
        kit.same(runner.run({"x": x}), want)


def test_bound_tensor_that_lies_in_the_outputs_is_refused(kit: Kit) -> None:
    """FAULTS 8."""
    table = kit.tensor(8, WIDTH)
    bound = table.detach()
    runner = runner_of(
        kit, lambda batch: batch.x + bound[:1], max_requests=8, bound={"bound": bound}
    )
    out = runner.run({"x": kit.tensor(8, WIDTH)})
    with torch.no_grad():
        bound.set_(out)
    runner.invalidate("the bound tensor moved")
    with pytest.raises(dg.InputError, match=r"'bound' overlaps the runner's output"):
        runner.capture()
    with torch.no_grad():
        bound.set_(table)
    runner.invalidate("and moved back")
    runner.capture()
    x = kit.tensor(3, WIDTH, seed=5)
    kit.same(runner.run({"x": x}), x + table[:1])


def test_invalidated_graphs_are_captured_again_with_the_new_weights(kit: Kit) -> None:
    """FAULTS 10."""
    model = Model(kit)
    runner = decoder(kit, model)
    check_run(kit, runner, model, 3, seed=1)
    model.weight = model.weight.clone() + 1  # other memory: the graphs do not know it
    runner.invalidate("weights")
    check_run(kit, runner, model, 3, seed=2)
    assert runner.stats().eager == {"invalidated": 1}
    runner.capture()
    check_run(kit, runner, model, 3, seed=3)
    assert runner.stats().graph_steps == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_output_fed_back_as_the_next_input_is_read_before_it_is_overwritten(
    kit: Kit, policy: str
) -> None:
    """FAULTS 12."""

    @dg.region()
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5

    runner = runner_of(kit, lambda batch: halved(batch.x) + 1, config=policy)
    for count in (4, 3):
        x = kit.tensor(count, WIDTH)
        want, fed = x, x
        for _ in range(4):
            want = want * 0.5 + 1
            fed = runner.run({"x": fed})
        kit.same(fed, want, "the chained output")


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
    runner.run(None, decision=Decision.eager(Reason.VOTED_EAGER))
    assert runner.stats().idle_steps == 1
    assert runner.stats().eager == {"voted_eager": 1}


def test_a_batch_without_rows_replays_the_variant_of_its_decision():
    runner = decode_of(double, (X,), config={"buckets": [4]}, variants=[{}, {"lora": True}])
    for variant in ((("lora", True),), ()):
        runner.run({"x": rows_of_x(0)}, variant={}, decision=Decision.graph(GraphKey(variant, 4)))
    assert {bucket.key: bucket.hits for bucket in runner.stats().buckets} == {
        "4": 1,
        "4 (lora=True)": 1,
    }


def test_declared_variants_are_the_runners_own():
    lora = {"lora": True}
    runner = dg.DecodeRunner(
        lambda batch: batch.x * 2 if batch.variant.get("lora") else batch.x,
        [X],
        variants=[{}, lora],
        config={"buckets": [4]},
        backend="cpu",
        max_requests=4,
    )
    lora["lora"] = False
    runner.capture()
    out = runner.run({"x": rows_of_x(3)}, variant={"lora": True})
    assert torch.equal(out, rows_of_x(3) * 2)


@pytest.mark.parametrize("value", [torch.tensor(1), torch.tensor([1, 2]), math.nan])
def test_values_of_a_variant_that_equal_nothing_are_refused(value):
    with pytest.raises(dg.InputTypeError, match="lora="):
        double_runner(variants=[{}, {"lora": value}], captured=False)
    with double_runner(variants=[{}, {"lora": True}]) as runner:
        with pytest.raises(dg.InputTypeError, match="lora="):
            runner.can_run(2, variant={"lora": value})
        with pytest.raises(dg.InputTypeError, match="lora="):
            runner.run({"x": rows_of_x(2)}, variant={"lora": value})


# Several steps in one launch.


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
    for decision in (runner.can_run(2), dg.Decision.eager(dg.Reason.VOTED_EAGER)):
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
    monkeypatch.setattr(decode_module, "_MOST_SEEN", 4)
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
