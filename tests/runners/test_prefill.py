"""PrefillRunner: bodies by tokens with any number of requests, tails, full graphs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import devgraph as dg
from devgraph import Reason
from devgraph.runners import InputSlot, OutputSlot, Pad, Size
from tests.support.runner_steps import IDS, OFFSETS, X, rows_of_x, tokens

DIM, ROWS = 4, 63
WRITE = InputSlot("write", ("tokens",), torch.int64, pad=Pad.fill(ROWS))
STARTS = InputSlot("starts", ("requests+1",), torch.int64, pad=Pad.last())
BASES = InputSlot("bases", ("requests",), torch.int64, pad=Pad.fill(ROWS))
SLOTS = (IDS, WRITE, STARTS, BASES)


class Model:
    """Embeds tokens, keeps them in a cache, and sums each request's cached rows so far.

    ``attend`` loops over the requests of the run, as ragged attention does; ``attend_static``
    does the same with masks only, so that it can stay in a graph.
    """

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        self.table = torch.randn(50, DIM, generator=generator)
        self.head = torch.randn(DIM, 5, generator=generator)
        self.cache = torch.zeros(ROWS + 1, DIM)
        self.counts: list[int] = []

        @dg.region(mutates=("out",))
        def attend(batch, out):
            starts = batch.starts.tolist()
            self.counts.append(batch.requests)
            for index, base in enumerate(batch.bases.tolist()):
                first, last = starts[index], starts[index + 1]
                rows = self.cache[base : base + last - first]
                out[first:last] = rows.cumsum(0)

        self.attend = attend

    def body(self, batch):
        hidden = self.table[batch.ids]
        self.cache.index_copy_(0, batch.write, hidden)
        out = torch.zeros_like(hidden)
        self.attend(batch, out)
        return hidden + out

    def static_body(self, batch):
        hidden = self.table[batch.ids]
        self.cache.index_copy_(0, batch.write, hidden)
        at = torch.arange(batch.tokens)
        owner = (at[:, None] >= batch.starts[None, 1:]).sum(1)
        same = (owner[:, None] == owner[None, :]) & (at[None, :] <= at[:, None])
        return hidden + same.to(hidden.dtype) @ hidden

    def tail(self, hidden, batch):
        last = batch.starts[1:] - 1
        return hidden[last.clamp(min=0)] @ self.head

    def expected(self, lengths, ids):
        out = []
        for chunk in ids.split(lengths):
            hidden = self.table[chunk]
            out.append((hidden[-1] + hidden.sum(0)) @ self.head)
        return torch.stack(out)


def ragged(lengths, seed=0):
    """Inputs of requests of the given lengths; request i owns cache rows from its start on."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return {
        "ids": torch.randint(50, (total,), generator=generator),
        "write": torch.arange(total),
        "starts": starts,
        "bases": starts[:-1].clone(),
    }


def prefill_of(model, **options):
    captured = options.pop("captured", True)
    config = {"policy": "breakable", "buckets": [4, 8, 16], **options.pop("config", {})}
    body = model.static_body if config["policy"] == "full" else model.body
    runner = dg.PrefillRunner(
        body,
        list(options.pop("slots", SLOTS)),
        tail=model.tail,
        config=config,
        backend="cpu",
        max_tokens=options.pop("max_tokens", 16),
        max_requests=options.pop("max_requests", 6),
        **options,
    )
    if captured:
        runner.capture()
    return runner


@pytest.fixture(scope="module")
def shared():
    """One model with a runner per policy, for property tests."""
    model = Model()
    return model, {p: prefill_of(model, config={"policy": p}) for p in ("breakable", "full")}


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=6),
    policy=st.sampled_from(["breakable", "full"]),
    seed=st.integers(0, 99),
)
def test_any_requests_give_what_each_gives_alone(shared, lengths, policy, seed):
    model, runners = shared
    runner = runners[policy]
    inputs = ragged(lengths, seed)
    decision = runner.can_run(len(lengths), sum(lengths))
    out = runner.run(inputs)
    torch.testing.assert_close(out, model.expected(lengths, inputs["ids"]))
    assert decision.ok == (sum(lengths) <= 16 and 2 * sum(lengths) >= (decision.bucket or 99))


def test_one_graph_serves_any_number_of_requests():
    model = Model()
    runner = prefill_of(model, config={"buckets": [8]}, max_tokens=8)
    model.counts.clear()
    for lengths in ([8], [2, 6], [1, 1, 1, 1, 1, 1], [3, 2]):
        inputs = ragged(lengths)
        torch.testing.assert_close(runner.run(inputs), model.expected(lengths, inputs["ids"]))
    assert model.counts == [1, 2, 6, 2]
    assert runner.stats().graph_steps == 4
    assert runner.stats().captures == 1


def test_a_body_has_its_breaks_and_its_real_rows():
    runner = prefill_of(Model(), config={"buckets": [8]}, max_tokens=8)
    (entry,) = runner.graphs
    assert len(entry.captured.segments) == 3


def test_a_slot_of_requests_inside_the_graph_is_refused_with_the_way_out():
    model = Model()
    with pytest.raises(dg.CaptureError, match=r"batch.starts changes between runs.*tail"):
        dg.PrefillRunner(
            lambda b: model.table[b.ids] + b.starts.sum(),
            list(SLOTS),
            backend="cpu",
            max_tokens=8,
            max_requests=2,
        ).capture()
    with pytest.raises(dg.CaptureError, match=r"batch.requests changes"):
        dg.PrefillRunner(
            lambda b: model.table[b.ids] * b.requests,
            list(SLOTS),
            backend="cpu",
            max_tokens=8,
            max_requests=2,
        ).capture()


def test_the_tail_receives_real_rows_sizes_and_host_values():
    seen = []

    def tail(hidden, batch):
        seen.append((hidden.shape, batch.requests, batch.tokens, batch.real, batch.host.scale))
        assert batch.offsets.tolist() == [0, 2, 5]
        return hidden.sum(0, keepdim=True) * batch.host.scale

    runner = dg.PrefillRunner(
        lambda b: b.x * 2,
        [X, OFFSETS],
        tail=tail,
        host_args={"scale": 1},
        backend="cpu",
        max_tokens=8,
        max_requests=4,
    )
    runner.capture()
    assert seen == []  # the tail is no part of the graph
    out = runner.run({"x": rows_of_x(5), "offsets": tokens(0, 2, 5)}, host_args={"scale": 3})
    assert seen == [((5, 3), 2, 5, Size(2, 5), 3)]
    assert torch.equal(out, rows_of_x(5).sum(0, keepdim=True) * 6)


def test_an_error_of_the_tail_names_the_bucket_and_the_next_run_is_right():
    wrong = []

    def tail(hidden, batch):
        if wrong:
            raise KeyError("tail")
        return hidden * 3

    runner = dg.PrefillRunner(
        lambda b: b.x * 2, [X], tail=tail, backend="cpu", max_tokens=8, max_requests=4
    )
    runner.capture()
    wrong.append(True)
    with pytest.raises(KeyError) as caught:
        runner.run({"x": rows_of_x(3)})
    assert "in the tail of prefill, bucket 4" in caught.value.__notes__[0]
    wrong.clear()
    assert torch.equal(runner.run({"x": rows_of_x(3)}), rows_of_x(3) * 6)


@pytest.mark.parametrize("policy", ["full", "breakable", "disabled"])
@pytest.mark.parametrize("rows", [5, 8])
def test_the_tail_reads_slots_whose_tokens_are_not_the_first_dim(policy, rows):
    position = InputSlot("position", (3, "tokens"), torch.int64, pad=Pad.zero())
    runner = dg.PrefillRunner(
        lambda batch: batch.x * 2,
        [X, position, STARTS],
        tail=lambda hidden, batch: batch.position.T[batch.starts[1:] - 1] + 0,
        outputs=OutputSlot(rows="requests"),
        config={"policy": policy, "buckets": [8]},
        backend="cpu",
        max_tokens=8,
        max_requests=4,
    )
    runner.capture()
    positions = torch.arange(3 * rows).reshape(3, rows)
    inputs = {"x": rows_of_x(rows), "position": positions, "starts": tokens(0, 2, rows)}
    assert torch.equal(runner.run(inputs), positions[:, [1, rows - 1]].T)


def test_tail_and_body_run_without_grad():
    modes = []
    weight = torch.ones(3, requires_grad=True)

    @dg.no_graph(mutates=("out",))
    def note(out):
        modes.append(torch.is_grad_enabled())

    def body(batch):
        out = batch.x * weight
        note(out)
        return out + 0

    def tail(hidden, batch):
        modes.append(torch.is_grad_enabled())
        return hidden * weight

    runner = dg.PrefillRunner(body, [X], tail=tail, backend="cpu", max_tokens=4, max_requests=4)
    runner.capture()
    for count in (4, 9):
        assert not runner.run({"x": rows_of_x(count)}).requires_grad
    assert set(modes) == {False}


def test_what_was_planned_for_one_batch_is_not_the_tail_s_of_the_next():
    planned = [{"scale": 1}]
    runner = dg.PrefillRunner(
        lambda batch: batch.x + 0,
        [X],
        tail=lambda hidden, batch: hidden * batch.host.scale,
        prepare=lambda batch: planned[-1],
        host_args={"scale": 1},
        config={"policy": "breakable", "buckets": [4]},
        backend="cpu",
        max_tokens=4,
        max_requests=4,
    )
    runner.capture()
    x = rows_of_x(3)
    planned.append({"scale": 5})
    assert torch.equal(runner.run({"x": x}), x * 5)
    planned.append(None)
    assert torch.equal(runner.run({"x": x}, host_args={"scale": 2}), x * 2)


def test_a_full_graph_holds_a_fixed_number_of_request_slots_with_sentinels():
    model = Model()
    runner = prefill_of(model, config={"policy": "full", "buckets": [8]}, max_tokens=8)
    inputs = ragged([3, 4])
    torch.testing.assert_close(runner.run(inputs), model.expected([3, 4], inputs["ids"]))
    assert runner.buffers["starts"].tolist() == [0, 3, 7, 7, 7, 7, 7]
    assert runner.buffers["bases"].tolist() == [0, 3, ROWS, ROWS, ROWS, ROWS]
    (entry,) = runner.graphs
    assert len(entry.captured.segments) == 1
    assert runner.plan().buckets[0].requests == 6


def test_more_requests_than_a_full_graph_has_slots_run_eagerly():
    model = Model()
    runner = prefill_of(model, config={"policy": "full"}, max_requests=2)
    inputs = ragged([2, 1, 3])
    assert runner.can_run(3, 6).reason is Reason.OVER_MAX_REQUESTS
    torch.testing.assert_close(runner.run(inputs), model.expected([2, 1, 3], inputs["ids"]))
    assert runner.stats().eager == {"over_max_requests": 1}


def test_any_number_of_requests_stays_on_a_graph_that_depends_on_tokens_only():
    model = Model()
    runner = prefill_of(model, config={"strict": True}, max_requests=2)
    for lengths in ([2, 1, 3], [4, 2], [1] * 6, [1] * 7, [3], [2, 1, 3]):
        inputs = ragged(lengths)
        assert runner.can_run(len(lengths), sum(lengths)).ok
        logits = runner.run(inputs)
        torch.testing.assert_close(logits, model.expected(lengths, inputs["ids"]))
    assert runner.stats().graph_steps == 6
    assert runner.buffers["bases"].shape == (2,)
    assert all(
        step.real.requests <= 2 for step in runner._steps._bound.values()
    )  # the others keep memory


def test_the_configured_request_slots_bound_a_full_graph():
    runner = prefill_of(Model(), config={"policy": "full", "max_requests": 3})
    assert runner.can_run(4, 8).reason is Reason.OVER_MAX_REQUESTS
    assert runner.buffers["bases"].shape == (3,)


def test_padding_beyond_the_factor_and_sizes_beyond_the_largest_run_eagerly():
    model = Model()
    runner = prefill_of(model)
    for lengths, reason in (([1], "padding"), ([9, 9], "over_largest_bucket")):
        inputs = ragged(lengths)
        torch.testing.assert_close(runner.run(inputs), model.expected(lengths, inputs["ids"]))
        assert runner.stats().eager[reason] == 1
    assert runner.can_run(1, 2).ok


def test_capture_and_padding_write_the_scratch_row_only():
    model = Model()
    runner = prefill_of(model)
    assert model.cache[:ROWS].eq(0).all()
    runner.run(ragged([3, 2]))
    assert model.cache[:5].ne(0).all()
    assert model.cache[5:ROWS].eq(0).all()


def test_a_body_alone_returns_its_hidden_rows():
    runner = dg.PrefillRunner(
        lambda b: {"h": b.x + 1, "t": b.x.t() + 1},
        [X],
        hidden={"h": OutputSlot(rows="tokens"), "t": OutputSlot(rows="tokens", dim=1)},
        backend="cpu",
        max_tokens=8,
        max_requests=2,
    )
    runner.capture()
    out = runner.run({"x": rows_of_x(5)})
    assert torch.equal(out["h"], rows_of_x(5) + 1)
    assert torch.equal(out["t"], rows_of_x(5).t() + 1)
    assert runner.stats().graph_steps == 1


def test_outputs_by_requests_from_a_body_are_refused():
    with pytest.raises(dg.ConfigError, match=r"cannot return a result with rows='requests'"):
        dg.PrefillRunner(
            lambda b: b.x,
            [X],
            hidden=OutputSlot(rows="requests"),
            backend="cpu",
            max_tokens=8,
            max_requests=2,
        )


def test_a_prefill_runner_needs_tokens_and_takes_no_width():
    with pytest.raises(dg.ConfigError, match="dim 'tokens'"):
        dg.PrefillRunner(lambda b: b.offsets, [OFFSETS], max_tokens=4, max_requests=2)
    with pytest.raises(dg.ConfigError, match="width is only for decode"):
        dg.PrefillRunner(lambda b: b.x, [X], variants=[{"width": 2}], max_tokens=4, max_requests=2)
    runner = dg.PrefillRunner(lambda b: b.x, [X], backend="cpu", max_tokens=4, max_requests=2)
    with pytest.raises(dg.InputError, match="number of tokens"):
        runner.can_run(2)


def test_the_default_policy_is_breakable_and_the_default_buckets_are_tokens():
    runner = dg.PrefillRunner(lambda b: b.x, [X], backend="cpu", max_tokens=100, max_requests=2)
    assert runner.stats().requested == "breakable"
    assert list(runner.buckets) == [*range(4, 33, 4), 48, 64, 80, 96, 100]


def test_an_empty_batch_and_an_idle_rank_touch_no_state():
    model = Model()
    runner = prefill_of(model)
    assert runner.run(ragged([])).shape == (0, 5)
    assert runner.run(None, decision=runner.can_run(2, 7)) is None
    assert model.cache[:ROWS].eq(0).all()
    assert runner.stats().eager == {"empty_batch": 1}
    assert runner.stats().idle_steps == 1
    runner.run(None, decision=dg.Decision(Reason.VOTED_EAGER))
    assert model.cache[:ROWS].eq(0).all()


def test_prefill_and_decode_share_pool_and_state():
    model = Model()
    prefill = prefill_of(model)

    def step(batch):
        hidden = model.table[batch.ids]
        model.cache.index_copy_(0, batch.write, hidden)
        return (hidden + model.cache[batch.base + 0]) @ model.head

    base = InputSlot("base", ("requests",), torch.int64, pad=Pad.fill(ROWS))
    decode = dg.DecodeRunner(
        step, [IDS, WRITE, base], backend="cpu", pool=prefill.pool, max_requests=4
    )
    decode.capture()
    inputs = ragged([3, 2])
    prefill.run(inputs)
    out = decode.run({"ids": tokens(7, 8), "write": tokens(10, 11), "base": tokens(0, 3)})
    first = model.table[inputs["ids"][[0, 3]]]
    torch.testing.assert_close(out, (model.table[[7, 8]] + first) @ model.head)
    assert torch.equal(model.cache[10], model.table[7])


@pytest.mark.parametrize("policy", ["breakable", "full"])
def test_a_debug_runner_leases_what_its_tail_returns(policy):
    model = Model()
    runner = prefill_of(model, config={"policy": policy}, debug=True)
    out = runner.run(ragged([3, 2]))
    assert out.shape == (2, 5)
    runner.run(ragged([4]))
    with pytest.raises(dg.StaleOutputError, match="of prefill"):
        out.sum()


def test_a_wrong_number_of_offsets_is_refused():
    runner = prefill_of(Model())
    inputs = ragged([3, 2])
    with pytest.raises(dg.InputError, match=r"'bases' is <Tensor \(3,\) .*; expected .*\(2,\)"):
        runner.run({**inputs, "bases": tokens(0, 1, 2)})
    with pytest.raises(dg.InputError, match=r"input 'bases' is <Tensor \(2,\)"):
        runner.run({**inputs, "starts": tokens(0, 1, 2, 5)})


@pytest.mark.parametrize("policy", ["full", "breakable"])
@pytest.mark.parametrize("part", ["body", "tail"])
def test_a_body_or_tail_that_is_no_function_is_refused(policy, part):
    given = {"body": lambda batch: batch.x, "tail": lambda hidden, batch: hidden, part: 7}
    with pytest.raises(dg.ConfigTypeError, match="must be callable"):
        dg.PrefillRunner(
            given["body"],
            [InputSlot("x", ("tokens", 2), torch.float32, pad=Pad.zero())],
            tail=given["tail"],
            outputs=OutputSlot(rows="tokens"),
            config=policy,
            backend="cpu",
            max_tokens=8,
            max_requests=2,
        )


@pytest.mark.parametrize("policy", ["full", "breakable", "disabled"])
def test_marks_of_gates_in_a_tail_are_refused_under_all_policies(policy):
    class Gated(Model):
        def tail(self, hidden, batch):
            dg.signal("tail")
            return super().tail(hidden, batch)

    with pytest.raises(dg.CaptureError, match="in the tail of a prefill runner"):
        runner = prefill_of(Gated(), config={"policy": policy}, captured=False)
        if policy == "full":
            runner.capture()
        runner.run(ragged([3, 2]))


def test_outputs_without_a_tail_are_refused():
    with pytest.raises(dg.ConfigError, match="outputs= declares the results of a tail.*hidden="):
        dg.PrefillRunner(
            lambda batch: batch.x,
            [X],
            outputs=OutputSlot(rows="requests"),
            backend="cpu",
            max_tokens=4,
            max_requests=2,
        )
