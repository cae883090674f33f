"""Proofs of runners: graphs against eager, on fresh data, with state."""

from __future__ import annotations

import itertools

import pytest
import torch

import devgraph as dg
from devgraph.runners import InputSlot, Pad
from tests.support.runner_steps import (
    IDS,
    ROWS,
    VOCAB,
    CacheStep,
    X,
    cache_inputs,
    decode_of,
    double_runner,
)

STARTS = InputSlot("starts", ("requests+1",), torch.int64, pad=Pad.last())
LENGTHS = InputSlot("lengths", ("requests",), torch.int64, pad=Pad.fill(1))


def sampled_slots():
    """The slots of ``CacheStep`` with legal random data for ``prove``."""
    return (
        InputSlot(
            "ids",
            ("tokens",),
            torch.int64,
            pad=IDS.pad,
            sample=lambda shape, g: torch.randint(VOCAB, shape, generator=g),
        ),
        InputSlot(
            "rows",
            ("tokens",),
            torch.int64,
            pad=ROWS.pad,
            sample=lambda shape, g: torch.randperm(30, generator=g)[: shape[0]],
        ),
    )


def test_prove_compares_every_bucket_on_fresh_data():
    step = CacheStep()
    step.cache.fill_(0.25)
    runner = decode_of(step, sampled_slots(), bound={"cache": step.cache})
    report = runner.prove(cases=3)
    assert report.ok, str(report)
    assert report.cases == 1 + 1 + 2 + 3  # buckets 1 and 2 serve one size, 4 two, 8 four
    assert report.not_varied == ()
    assert runner.stats().steps == 0


def test_ranged_tokens_whose_rows_all_write_the_scratch_row_are_no_failure():
    step = CacheStep()
    ids = InputSlot("ids", ("tokens",), torch.int64, pad=IDS.pad, low=0, high=VOCAB)

    def attend(batch):
        return step(batch) + step.cache[batch.rows] @ step.weight  # reads what the step wrote

    runner = decode_of(attend, (ids, ROWS), bound={"cache": step.cache})
    runner.run(cache_inputs(1))  # later cases of one request have these rows, and others pad values
    report = runner.prove(cases=3)
    assert report.ok, str(report)
    assert "rows within a batch (they write the same row of state)" in report.not_varied


def test_data_of_no_real_batch_is_named_as_a_cause():
    @dg.no_graph
    def attend(hidden, batch):
        sums = torch.empty_like(hidden).fill_(next(garbage))  # memory that offsets of 0 leave as is
        for first, last in itertools.pairwise(batch.starts.tolist()):
            sums[first:last] = hidden[first:last].cumsum(0)
        return sums

    def report_of(*slots):
        runner = dg.PrefillRunner(
            lambda batch: batch.x + attend(batch.x * 2, batch),
            [X, STARTS, *slots],
            max_tokens=8,
            max_requests=4,
            config={"policy": "breakable", "buckets": [4, 8]},
            backend="cpu",
        )
        runner.capture()
        return runner.prove()

    garbage = itertools.count(1.0)
    assert report_of().ok  # the proof divides the tokens among the requests
    report = report_of(LENGTHS)
    assert "eager differs from itself" in report.causes[0]
    assert "no real data: pad values in lengths, starts, in" in report.causes[1]
    assert not any("another bucket" in cause for cause in report.causes)


def test_size_that_matters_only_for_data_of_no_real_batch_is_not_the_first_cause():
    def mean(batch):
        return batch.x - batch.x.sum(0) * (batch.ids == 0).all()

    ids = InputSlot("ids", ("tokens",), torch.int64, pad=Pad.zero())
    runner = decode_of(mean, (X, ids), config={"buckets": [4]}, max_requests=4)
    first, *others = runner.prove().causes
    assert first.startswith("no real data: pad values in ids, in 1 case")
    assert all(cause.startswith("if failures remain with real data: ") for cause in others)
    assert runner.prove(sample={"ids": lambda shape, _: torch.arange(1, 1 + shape[0])}).ok


def test_prove_says_which_slots_it_could_not_vary():
    report = decode_of(CacheStep()).prove()
    assert report.not_varied == ("ids", "rows")
    assert "not varied: ids, rows" in str(report)


def test_prove_finds_padding_that_reaches_real_rows():
    runner = decode_of(lambda b: b.x + b.x.sum(0), (X,), config={"buckets": [4]}, max_requests=4)
    report = runner.prove()
    assert not report.ok
    assert any("other data in padding" in f.message for f in report.failures)
    assert "bucket 4, 2 requests, 2 tokens" in str(report)


def test_prove_finds_a_value_that_froze_at_capture():
    scale = [1.0]
    runner = decode_of(lambda b: b.x * scale[0], (X,), config={"buckets": [2]}, max_requests=2)
    assert runner.prove().ok
    scale[0] = 2.0
    report = runner.prove()
    assert not report.ok
    assert {failure.kind for failure in report.failures} == {"graph"}
    assert (
        "the step reads an unmarked host value: scale[0] is 2.0 and was 1.0 at" in report.causes[0]
    )


def test_prove_finds_a_step_that_depends_on_the_size_of_its_bucket():
    runner = decode_of(lambda b: b.x * b.tokens, (X,), config={"buckets": [4]}, max_requests=4)
    report = runner.prove()
    assert {failure.kind for failure in report.failures} == {"size"}
    assert "depends on padding or on the size of the bucket" in report.causes[0]


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_prove_takes_host_arguments(policy):
    @dg.region(host_args=("length",), mutates=("out",))
    def window(x, out, *, length):
        out.copy_(x[:, :length].sum(1))

    def step(batch):
        out = torch.empty(batch.tokens)
        window(batch.x, out, length=batch.host.length)
        return out * 2

    runner = decode_of(step, (X,), host_args={"length": 1}, config=policy)
    assert runner.prove(host_args=[{"length": 3}]).ok
    with pytest.raises(dg.HostArgumentError):
        runner.prove(host_args=[{"size": 3}])


def test_repr_of_a_report_is_its_first_line():
    report = double_runner(config={"buckets": [2]}, max_requests=2).prove()
    assert repr(report) == "<Report: 2 cases: graphs equal eager bit for bit>"


def test_prove_without_graphs_is_not_ok():
    assert not double_runner(captured=False).prove().ok


def test_prove_of_a_prefill_runner_covers_its_tail():
    offsets = InputSlot("offsets", ("requests+1",), torch.int64, pad=Pad.last())
    runner = dg.PrefillRunner(
        lambda b: b.x * 2,
        [X, offsets],
        tail=lambda hidden, batch: hidden[: batch.requests] + batch.tokens,
        config={"buckets": [4, 8]},
        backend="cpu",
        max_tokens=8,
        max_requests=3,
    )
    runner.capture()
    assert runner.prove(cases=4).ok


def test_serving_goes_on_after_a_proof():
    """FAULTS 52."""
    step = CacheStep()
    runner = decode_of(step, sampled_slots())
    runner.prove()
    inputs = cache_inputs(3)
    want = step.expected(step.cache.clone(), **inputs)
    torch.testing.assert_close(runner.run(inputs), want)


def test_proof_orders_each_replay_behind_the_captures(monkeypatch):
    """Captures had bound a replay of several segments to their own stream.

    On devices, the proof then read outputs before they were written.
    """
    runner = double_runner(config={"policy": "breakable"})
    told = []
    pool, captured = type(runner.pool), type(runner.graphs.captured[0].captured)
    order, run = pool.order, captured.run
    monkeypatch.setattr(pool, "order", lambda self: (told.append("order"), order(self))[1])
    monkeypatch.setattr(
        captured, "run", lambda self, values: (told.append("replay"), run(self, values))[1]
    )
    assert runner.prove().ok
    replays = [i for i, what in enumerate(told) if what == "replay"]
    assert replays
    assert all("order" in told[max(0, i - 2) : i] for i in replays)


def slots_padded_with(pad, **range_of_rows):
    ids = InputSlot("ids", ("tokens",), torch.int64, pad=IDS.pad, low=0, high=VOCAB)
    return ids, InputSlot("rows", ("tokens",), torch.int64, pad=pad, **range_of_rows)


def distinct_rows(shape, generator):
    return torch.randperm(30, generator=generator)[: shape[0]]


@pytest.mark.parametrize("pad", [Pad.zero(), Pad.last()], ids=["zero", "last"])
def test_padding_that_writes_real_rows_is_a_failure_of_its_own(pad):
    step = CacheStep()
    runner = decode_of(step, slots_padded_with(pad, sample=distinct_rows))
    step.cache.normal_()
    before = step.cache.clone()
    with pytest.raises(dg.InputError, match="its slot declares the range 0 to"):
        runner.prove(sample={"ids": lambda shape, generator: torch.full(shape, VOCAB)})
    report = runner.prove()
    assert {failure.kind for failure in report.failures} == {"padding"}
    assert "which real rows use: pad of slot 'rows'" in report.causes[0]
    if pad == Pad.zero():
        assert report.causes[0].startswith("padded rows write row 0 of step.cache")
    assert step.cache.equal(before)


@pytest.mark.parametrize("limit", [2**30, 0], ids=["whole", "rows"])
@pytest.mark.parametrize("sample", [distinct_rows, None], ids=["sample", "last batch"])
def test_padding_is_found_after_it_wrote_a_real_row(sample, limit):
    """The row already had what padding writes to it, so the proof saw no write."""
    step = CacheStep()
    slots = slots_padded_with(Pad.zero(), sample=sample)
    runner = decode_of(step, slots, bound={"cache": step.cache})
    runner.run({"ids": torch.tensor([5, 6, 7]), "rows": torch.tensor([0, 1, 2])})
    before = step.cache.clone()
    report = runner.prove(snapshot_limit=limit)
    assert {failure.kind for failure in report.failures} == {"padding"}, str(report)
    assert step.cache.equal(before)


def test_padding_into_a_scratch_row_is_right():
    step = CacheStep()
    report = decode_of(step, slots_padded_with(ROWS.pad, sample=distinct_rows)).prove(cases=3)
    assert report.ok, str(report)


_writes = [0]


@torch.library.custom_op("devgraph_tests::put_in_any_order", mutates_args=("cache",))
def put_in_any_order(cache: torch.Tensor, rows: torch.Tensor, data: torch.Tensor) -> None:
    """Write ``data`` in order and in reverse order in turns, as a device may."""
    _writes[0] += 1
    step = 1 if _writes[0] % 2 else -1
    for row, value in [*zip(rows.tolist(), data, strict=True)][::step]:
        cache[row] = value


class UnorderedStep:
    """A step whose writes of one row have no order; each request has data of its own."""

    def __init__(self, *, reads=False):
        self.cache = torch.zeros(32, 3)
        self.reads = reads
        self.factor = 1.0

    def __call__(self, batch):
        position = torch.arange(batch.tokens, dtype=torch.float32)[:, None]
        data = batch.x * self.factor + (0 if self.reads else position)
        put_in_any_order(self.cache, batch.rows, data)
        return data + self.cache[batch.rows] if self.reads else data


@pytest.mark.parametrize("with_sample", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_rows_that_are_written_in_any_order_are_no_failure(reads, with_sample):
    step = UnorderedStep(reads=reads)
    sample = distinct_rows if with_sample else None
    rows = InputSlot("rows", ("tokens",), torch.int64, pad=ROWS.pad, sample=sample)
    runner = decode_of(step, (X, rows), bound={"cache": step.cache})
    report = runner.prove(cases=3)
    assert report.ok, str(report)
    note = "rows within a batch (they write the same row of state)"
    assert (note in report.not_varied) is (reads and not with_sample)
    step.factor = 2.0
    assert not runner.prove(cases=3).ok


def test_state_is_afterwards_as_before_bit_for_bit():
    """FAULTS 52."""
    step = CacheStep()
    step.cache.normal_()
    step.cache[3] = float("nan")
    runner = decode_of(step, sampled_slots(), bound={"cache": step.cache})
    before, random = step.cache.clone(), torch.get_rng_state()
    for _ in range(3):
        assert runner.prove().ok
    assert step.cache.view(torch.int32).equal(before.view(torch.int32))
    assert torch.get_rng_state().equal(random)


def test_state_is_as_before_after_an_exception():
    """FAULTS 52."""
    step, calls = CacheStep(), []

    def failing(batch):
        out = step(batch)
        calls.append(batch)
        if len(calls) > limit[0]:
            raise RuntimeError("no more")
        return out

    limit = [100]
    runner = decode_of(failing, sampled_slots(), bound={"cache": step.cache})
    step.cache.normal_()
    before = step.cache.clone()
    limit[0] = len(calls) + 3
    with pytest.raises(RuntimeError, match="no more"):
        runner.prove()
    assert step.cache.equal(before)


def test_rows_of_a_large_cache_are_restored_and_the_rest_is_hashed():
    step = CacheStep()
    runner = decode_of(step, sampled_slots(), bound={"cache": step.cache})
    step.cache.normal_()
    before = step.cache.clone()
    assert runner.prove(snapshot_limit=0).ok
    assert step.cache.equal(before)
    stray = decode_of(
        lambda batch: step(batch) + step.cache[30].add_(1)[0],
        sampled_slots(),
        bound={"cache": step.cache},
    )
    with pytest.raises(
        dg.CaptureError,
        match="a case of the proof wrote bound tensor 'cache' outside of the rows that",
    ):
        stray.prove(snapshot_limit=0)


@pytest.mark.parametrize("shape", [(2, 32, 3), (8, 4, 3), (2, 8, 4, 3)], ids=str)
def test_rows_of_a_large_cache_are_found_behind_its_first_dimension(shape):
    cache = torch.randn(shape)
    shift = [0.0]

    def step(batch):
        slots = cache.view(-1, 32, 3)[-1]
        out = batch.x + slots[batch.rows]
        slots.index_copy_(0, batch.rows, out + shift[0])
        return out

    runner = decode_of(step, (X, sampled_slots()[1]), bound={"cache": cache})
    before = cache.clone()
    report = runner.prove(snapshot_limit=0)
    assert report.ok, str(report)
    assert cache.equal(before)
    shift[0] = 1.0
    report = runner.prove(snapshot_limit=0)
    assert any(failure.where.startswith("bound tensor 'cache'") for failure in report.failures)
    assert cache.equal(before)


def test_a_write_that_a_replay_loses_is_found_in_the_state():
    """FAULTS 52."""
    cache = torch.zeros(8)
    twice = [1.0]

    def step(batch):
        cache.add_(twice[0])
        return batch.x * 2

    runner = decode_of(step, (X,), bound={"cache": cache})
    assert runner.prove().ok
    twice[0] = 0.0
    report = runner.prove()
    assert {failure.where for failure in report.failures} == {"bound tensor 'cache'"}
    assert "only state differs" in report.causes[0]
    assert runner.prove(state=False).ok


def test_eager_that_differs_from_itself_is_a_failure_of_its_own():
    class Counting:
        def __init__(self):
            self.calls = 0

        def __call__(self, batch):
            self.calls += 1
            return batch.x * self.calls

    report = decode_of(Counting(), (X,)).prove()
    assert {failure.kind for failure in report.failures} == {"eager"}
    assert "eager differs from itself" in report.causes[0]
    assert report.moved == ("step.calls",)


def test_a_replaced_weight_is_named():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(3))

        def forward(self, batch):
            return batch.x * self.scale

    model = Scaled()
    runner = decode_of(model, (X,))
    assert runner.prove().ok
    model.scale.data = torch.full((3,), 3.0)
    report = runner.prove()
    assert report.replaced == ("self.scale",)
    assert "replaced weight or cache" in report.causes[0]


def test_inputs_of_the_last_batch_are_used_where_nothing_is_declared():
    """FAULTS 51."""
    step = CacheStep()
    runner = decode_of(step)
    assert runner.prove().not_varied == ("ids", "rows")
    runner.run(cache_inputs(8))
    before = step.cache.clone()
    report = runner.prove()
    assert report.ok, str(report)
    assert report.not_varied == ()
    assert step.cache.equal(before)


def test_proof_after_a_failed_run_does_not_use_its_inputs():
    weight = torch.randn(10, 3)
    slot = InputSlot("ids", ("tokens",), torch.int64, pad=Pad.zero())
    runner = decode_of(lambda b: weight[b.ids] * 2, (slot,), max_requests=2)
    runner.run({"ids": torch.tensor([3, 4])})
    for ids in ([99], [99, 98]):
        with pytest.raises(IndexError):
            runner.run({"ids": torch.tensor(ids)})
        assert runner.prove().ok
    runner.run({"ids": torch.tensor([3, 4])})
    assert runner.prove().not_varied == ()


def test_error_of_the_step_in_a_proof_names_the_case_and_the_integers():
    weight = torch.randn(10, 3)
    slot = InputSlot("ids", ("tokens",), torch.int64, pad=Pad.zero())
    runner = decode_of(lambda b: weight[b.ids] * 2, (slot,), max_requests=2)
    with pytest.raises(IndexError) as caught:
        runner.prove(sample={"ids": lambda shape, _: torch.arange(98, 98 + shape[0])})
    (note,) = caught.value.__notes__
    assert note == (
        "in case 0 of the proof, bucket 2, 2 requests, 2 tokens, input 'ids' from 98 to 99; "
        "sample= replaces the data of an input"
    )


def test_sample_of_a_proof_overrides_the_slots():
    seen = []

    def ids(shape, generator):
        seen.append(shape)
        return torch.full(shape, 3)

    runner = decode_of(CacheStep(), sampled_slots())
    assert runner.prove(sample={"ids": ids}).ok
    assert seen
    with pytest.raises(dg.InputError, match="sample: there is no 'idz'"):
        runner.prove(sample={"idz": ids})
    for data in (torch.rand(1), torch.zeros(99, dtype=torch.int64), [0]):
        with pytest.raises(dg.InputTypeError, match="must return data for <Tensor"):
            runner.prove(sample={"ids": lambda shape, g, data=data: data})


def test_host_arguments_that_are_sampled_are_varied():
    lengths = []

    @dg.region(host_args=("length",), mutates=("out",))
    def window(x, out, *, length):
        lengths.append(length)
        out.copy_(x[:, :length].sum(1))

    def step(batch):
        out = torch.empty(batch.tokens)
        window(batch.x, out, length=batch.host.length)
        return out * 2

    runner = decode_of(step, (X,), host_args={"length": 1})
    assert runner.prove().not_varied == ("length",)
    sample = {"length": lambda shape, g: torch.randint(1, 5, shape, generator=g)}
    report = runner.prove(sample=sample)
    assert report.ok and report.not_varied == ()
    assert {1, 4} <= set(lengths)
    assert [case.updated for case in report.tried].count(True) == len(runner.graphs)
    with pytest.raises(dg.InputTypeError, match="a list with one mapping per set"):
        runner.prove(host_args={"length": 3})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_is_found_that_writes_one_to_a_row_of_zeros(dtype):
    """The row was changed to 1 before the case, which hid the write."""
    cache = torch.zeros(32, 3, dtype=dtype)

    def step(batch):
        cache.index_copy_(0, batch.rows, (batch.x + 1).to(dtype))
        return batch.x * 2

    rows = InputSlot("rows", ("tokens",), torch.int64, pad=Pad.zero(), sample=distinct_rows)
    report = decode_of(step, (X, rows), bound={"cache": cache}).prove()
    assert "padded rows write row 0 of bound tensor 'cache'" in report.causes[0]


def test_padding_in_proofs_is_legal_data():
    """FAULTS 51: NaN in padding was an illegal probability, and the process died on devices."""
    mask = InputSlot("mask", ("tokens",), torch.float32, pad=Pad.zero(), real=1.0)
    weight = torch.randn(3, 3)

    def step(batch):
        real = batch.x * batch.mask[:, None]
        mixed = torch.eye(batch.tokens) @ batch.x  # reads padding, but multiplies it by 0
        return torch.multinomial((mixed @ weight).softmax(-1), 1) * 0 + real.sum(0)

    report = decode_of(step, (X, mask)).prove(cases=3)
    assert report.ok, str(report)


def test_one_real_row_and_padding_that_write_the_scratch_row_are_no_failure():
    cache = torch.zeros(32, 3)

    def step(batch):
        cache.index_copy_(0, batch.rows, batch.x)
        return batch.x + cache[batch.rows]

    report = decode_of(step, (X, ROWS), bound={"cache": cache}, config={"buckets": [2]}).prove()
    assert report.ok, str(report)


def test_cause_is_found_beside_written_rows_and_missing_data():
    step, factor = CacheStep(), [1.0]
    runner = decode_of(lambda batch: step(batch) + factor[0], sampled_slots())
    prefill = dg.PrefillRunner(
        lambda batch: batch.x + factor[0],
        [X, STARTS, LENGTHS],
        config={"buckets": [4, 8]},
        backend="cpu",
        max_tokens=8,
        max_requests=4,
    )
    prefill.capture()
    factor[0] = 2.0
    for proven in (runner, prefill):
        assert "every element in every case" in proven.prove().causes[0]
    assert "no real data: pad values in lengths, starts" in prefill.prove().causes[1]


def test_a_step_may_draw_from_its_own_generator():
    own = torch.Generator().manual_seed(0)
    report = decode_of(
        lambda batch: batch.x + torch.rand(len(batch.x), 1, generator=own), (X,)
    ).prove()
    assert report.ok, str(report)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.float32], ids=str)
def test_state_that_only_shared_rows_write_is_compared(dtype, devgraph_backend):
    """No element was left to compare, and a mask without true elements failed on a device."""
    cache = torch.zeros(32, 4, dtype=torch.uint8, device=devgraph_backend.device).view(dtype)

    def step(batch):
        cache.view(torch.uint8).index_fill_(0, batch.rows, 1)
        return batch.x * 2

    runner = decode_of(step, (X, ROWS), bound={"cache": cache}, backend=devgraph_backend)
    assert runner.prove().ok


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("shape", [(2, 32, 3), (32, 3), (2, 8, 4, 3)], ids=str)
def test_rows_that_only_padding_writes_are_no_failure(shape, looped, seed):
    """The last batch has no data for some sizes, and a loop in a graph may end early.

    With seed 7, two requests finish in the first run.
    """
    torch.manual_seed(seed)
    cache = torch.zeros(shape)

    def step(batch):
        slots = cache.view(-1, 32, 3)
        out = batch.x * 0.5 + slots[0][batch.rows]
        for index, layer in enumerate(slots):
            layer.index_copy_(0, batch.rows, out + index)
        return out

    loop = dg.Loop(
        steps=3,
        advance=lambda batch, out: batch.x.copy_(out),
        done=lambda batch, out: out.sum(-1) > 0,
    )
    rows = InputSlot("rows", ("tokens",), torch.int64, pad=Pad.fill(31))
    runner = decode_of(step, (X, rows), loop=loop if looped else None, bound={"cache": cache})
    runner.run({"x": torch.randn(3, 3), "rows": torch.tensor([0, 4, 2])})
    report = runner.prove(cases=3)
    assert report.ok, str(report)
    report = runner.prove(cases=3, sample={"rows": distinct_rows})
    assert report.ok, str(report)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8], ids=str)
def test_data_in_scratch_rows_is_not_the_state_of_real_rows(dtype):
    """The pad value of a slot may decide what is written, but not where."""
    flags = torch.zeros(32, dtype=dtype)

    def step(batch):
        flags[batch.rows] = (batch.ids < 2).to(dtype)
        return batch.ids * 2

    report = decode_of(step, slots_padded_with(ROWS.pad, sample=distinct_rows)).prove()
    assert report.ok and report.not_varied == ("flags",), str(report)


@pytest.mark.parametrize("limit", [2**30, 0], ids=["whole", "rows"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=lambda dtype: str(dtype)
)
def test_zeros_in_state_are_varied(dtype, limit):
    """A decay that was lost did not change zeros."""
    bits, decay = torch.zeros(32, 3, dtype=dtype).view(torch.uint8), [0.5]

    def step(batch):
        rows = bits[batch.rows].view(dtype).float() * decay[0]
        bits.index_copy_(0, batch.rows, rows.to(dtype).view(torch.uint8))
        return batch.x * 2

    state = bits.view(dtype)
    rows = InputSlot("rows", ("tokens",), torch.int64, pad=ROWS.pad, sample=distinct_rows)
    runner = decode_of(step, (X, rows), bound={"state": state}, config={"buckets": [1]})
    assert runner.prove(cases=1, snapshot_limit=limit).ok
    decay[0] = 1.0
    report = runner.prove(cases=1, snapshot_limit=limit)
    assert "only state differs" in report.causes[0], str(report)
    assert not bits.any()


def stacked(layers):
    """Return a runner with a cache of each layer."""
    caches = [torch.zeros(32, 3) for _ in range(layers)]

    def step(batch):
        out = batch.x
        for cache in caches:
            out = out + cache[batch.rows]
            cache.index_copy_(0, batch.rows, out)
        return out

    rows = InputSlot("rows", ("tokens",), torch.int64, pad=ROWS.pad, sample=distinct_rows)
    bound = {f"cache{index}": cache for index, cache in enumerate(caches)}
    return decode_of(step, (X, rows), bound=bound)


def test_reads_of_the_device_do_not_grow_with_the_state(monkeypatch):
    reads = []

    def counting(owner, name):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            reads.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    few, many = stacked(2), stacked(20)
    for name in ("tolist", "item", "__bool__", "__int__", "__float__"):
        counting(torch.Tensor, name)
    counting(torch, "equal")
    found = []
    for runner in (few, many):
        reads.clear()
        assert runner.prove(cases=3).ok
        found.append(len(reads) - reads.count("__bool__"))  # zeros are looked for once
    assert found[0] == found[1]


def test_state_that_overlaps_other_state_starts_all_runs_alike():
    base = torch.zeros(2, 32, 3)
    layers = [base[0], base[1]]

    def step(batch):
        out = batch.x
        for cache in layers:
            out = out + cache[batch.rows]
            cache.index_copy_(0, batch.rows, out)
        return out

    rows = InputSlot("rows", ("tokens",), torch.int64, pad=ROWS.pad, sample=distinct_rows)
    runner = decode_of(step, (X, rows), bound={"base": base, "bits": base[0].view(torch.int32)})
    report = runner.prove(cases=3)
    assert report.ok, str(report)
    assert not base.any()


def test_scratch_row_that_one_padded_row_writes_is_no_failure():
    history = torch.zeros(3, 5, 3)
    slots = InputSlot("slots", ("tokens",), torch.int64, pad=Pad.fill(4), low=0, high=4)

    def step(batch):
        history.copy_(history.roll(1, 0))
        history[0].index_copy_(0, batch.slots, batch.x)
        return batch.x * 2

    assert decode_of(step, (X, slots), bound={"history": history}).prove().ok


def test_rows_by_position_that_no_later_batch_reads_are_no_failure():
    memory = torch.zeros(8, 3)

    def step(batch):
        held = memory[: batch.tokens]
        held.copy_(batch.x * 2)
        return held + 1

    assert decode_of(step, (X,), bound={"memory": memory}).prove().ok


def test_padding_is_found_that_counts_for_the_last_of_all_items():
    def step(batch):
        ends = batch.offsets[1:].clone()
        ends[-1] = batch.tokens  # wrong: padding is no part of the last item
        item = torch.bucketize(torch.arange(batch.tokens), ends, right=True)
        sums = torch.zeros(batch.requests + 1, 3).index_add_(0, item, torch.ones_like(batch.x))
        return batch.x + sums[item]

    runner = dg.EncoderRunner(step, [X], budgets=[8, 16], max_items=4, backend="cpu")
    runner.capture()
    assert not runner.prove().ok
