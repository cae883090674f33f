"""Runners on the backend under test: the CPU reference, or a device where one is asked for."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

import devgraph as dg
from devgraph.api.backend import poison
from devgraph.runners import InputSlot, Pad, Size
from devgraph.runners.inputs import InputArena, Staging
from devgraph.runners.load import CopyPlan

SCRATCH = 63
SLOTS = (
    InputSlot("ids", ("tokens",), torch.int64, pad=Pad.zero()),
    InputSlot("rows", ("tokens",), torch.int64, pad=Pad.fill(SCRATCH)),
    InputSlot("lens", ("requests",), torch.int32, pad=Pad.fill(1)),
    InputSlot("offsets", ("requests+1",), torch.int32, pad=Pad.last()),
    InputSlot("scales", ("tokens",), torch.float32, pad=Pad.fill(1.0)),
    InputSlot("bias", ("tokens", 8), torch.bfloat16, pad=Pad.zero()),
)


class Step:
    """A little of everything that a decode step does, with state in a cache."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(4)
        self.table = torch.randn(64, 8, generator=generator).to(device)
        self.cache = torch.zeros(SCRATCH + 1, 8, device=device)

    def __call__(self, batch):
        hidden = self.table[batch.ids] * batch.scales[:, None] + batch.bias.float()
        hidden = hidden + self.cache[batch.rows]
        self.cache.index_copy_(0, batch.rows, hidden)
        return hidden * batch.lens[:, None] + (batch.offsets[1:] - batch.offsets[:-1])[:, None]


def batch_of(count, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = {
        "ids": torch.randint(64, (count,), generator=generator),
        "rows": torch.randperm(SCRATCH, generator=generator)[:count],
        "lens": torch.randint(1, 9, (count,), generator=generator, dtype=torch.int32),
        "offsets": torch.arange(count + 1, dtype=torch.int32) * 2,
        "scales": torch.rand(count, generator=generator),
        "bias": torch.randn(count, 8, generator=generator).to(torch.bfloat16),
    }
    return {name: tensor.to(device) for name, tensor in made.items()}


def runner_on(backend, step, **options):
    config = {"buckets": [2, 4, 8], **options.pop("config", {})}
    runner = dg.DecodeRunner(step, SLOTS, backend=backend, max_requests=8, config=config, **options)
    runner.capture()
    return runner


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_graphs_follow_eager_through_a_sequence_of_batches(devgraph_backend, policy):
    device = devgraph_backend.device
    step, reference = Step(device), Step(device)
    runner = runner_on(devgraph_backend, step, config={"policy": policy})
    step.cache.zero_()
    eager = runner_on(devgraph_backend, reference, config={"policy": "disabled"})
    for seed in range(12):
        inputs = batch_of(1 + seed % 8, device, seed)
        assert torch.equal(runner.run(inputs), eager.run(inputs)), seed
        assert torch.equal(step.cache[:SCRATCH], reference.cache[:SCRATCH]), seed
    assert runner.stats().graph_steps == 12


def test_host_inputs_give_what_device_inputs_give(devgraph_backend):
    device = devgraph_backend.device
    results = []
    for place in (device, torch.device("cpu")):
        step = Step(device)
        runner = runner_on(devgraph_backend, step)
        step.cache.zero_()
        outs = [runner.run(batch_of(n, place, n), clone=True) for n in (3, 8, 1, 3)]
        inputs = batch_of(5, place, 9)
        inputs["scales"] = inputs["scales"].to(device)  # some from here, some from there
        outs.append(runner.run(inputs, clone=True))
        outs.append(runner.run(batch_of(12, place, 12), clone=True))  # over the largest: eager
        results.append([*outs, step.cache[:SCRATCH].clone()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_host_inputs_may_change_as_soon_as_run_returns(devgraph_backend):
    device = devgraph_backend.device
    weight = torch.eye(3, device=device)
    runner = dg.DecodeRunner(
        lambda b: b.x @ weight,
        [InputSlot("x", ("tokens", 3), torch.float32, pad=Pad.zero())],
        backend=devgraph_backend,
        max_requests=4,
    )
    runner.capture()
    x = torch.empty(4, 3)
    kept = []
    for value in range(50):
        x.fill_(value)
        kept.append(runner.run({"x": x}, clone=True))
        x.fill_(-1)
    for value, out in enumerate(kept):
        assert out.eq(value).all(), value


def test_runs_from_several_streams_and_threads_follow_each_other(devgraph_backend):
    device = devgraph_backend.device
    runner = dg.DecodeRunner(
        lambda b: (b.x @ torch.eye(64, device=device)).cumsum(1),
        [InputSlot("x", ("tokens", 64), torch.float32, pad=Pad.zero())],
        backend=devgraph_backend,
        max_requests=64,
        config={"buckets": [64]},
    )
    runner.capture()
    wrong = []

    def work(seed):
        x = torch.full((60, 64), float(seed), device=device)
        want = x.cumsum(1)
        stream = None if device.type == "cpu" else torch.Stream(device)
        if stream is not None:
            stream.wait_stream(torch.accelerator.current_stream())  # which fills x
        for _ in range(20):
            if stream is None:
                out = runner.run({"x": x}, clone=True)
            else:
                with stream:
                    out = runner.run({"x": x}, clone=True)
                stream.synchronize()
            if not torch.equal(out, want):
                wrong.append(seed)

    devgraph_backend.synchronize()
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_prove_holds_on_the_device(devgraph_backend):
    step = Step(devgraph_backend.device)
    runner = runner_on(devgraph_backend, step, bound={"cache": step.cache})
    report = runner.prove(cases=3)
    assert report.ok, str(report)


def test_a_breakable_prefill_serves_any_requests(devgraph_backend):
    device = devgraph_backend.device
    table = torch.randn(64, 8, device=device)

    @dg.region(mutates=("out",))
    def sums(batch, hidden, out):
        starts = batch.starts.tolist()
        for first, last in itertools.pairwise(starts):
            out[first:last] = hidden[first:last].cumsum(0)

    def body(batch):
        hidden = table[batch.ids]
        out = torch.zeros_like(hidden)
        sums(batch, hidden, out)
        return hidden + out

    runner = dg.PrefillRunner(
        body,
        [
            InputSlot("ids", ("tokens",), torch.int64, pad=Pad.zero()),
            InputSlot("starts", ("requests+1",), torch.int64, pad=Pad.last()),
        ],
        tail=lambda hidden, batch: hidden[batch.starts[1:] - 1],
        backend=devgraph_backend,
        max_tokens=16,
        max_requests=4,
    )
    runner.capture()
    for lengths in ([7], [2, 5], [1, 1, 1, 6]):
        ids = torch.randint(64, (sum(lengths),), device=device)
        starts = torch.tensor([0, *lengths], device=device).cumsum(0)
        want = [table[chunk][-1] + table[chunk].sum(0) for chunk in ids.split(lengths)]
        out = runner.run({"ids": ids, "starts": starts})
        torch.testing.assert_close(out, torch.stack(want))
    assert runner.stats().graph_steps == 3


def test_a_plan_samples_memory_and_capture_measures_it(devgraph_backend):
    step = Step(devgraph_backend.device)
    runner = dg.DecodeRunner(step, SLOTS, backend=devgraph_backend, max_requests=8)
    estimate = runner.plan(sample=True).graph_bytes
    runner.capture()
    measured = runner.plan().graph_bytes
    assert estimate and measured
    assert measured <= 2 * estimate


def test_staged_tensors_arrive_in_one_transfer(devgraph_backend, monkeypatch):
    pins = []
    real = devgraph_backend.pin
    monkeypatch.setattr(devgraph_backend, "pin", lambda t: (pins.append(t), real(t))[1])
    staging = Staging(devgraph_backend, devgraph_backend.device)
    layouts = [((3,), torch.int64), ((2, 5), torch.bfloat16), ((), torch.bool), ((4,), torch.int8)]
    tensors = [torch.ones(shape).to(dtype) for shape, dtype in layouts]
    strided = torch.arange(6)[::2]
    tensors[0] = strided
    transfer = staging.transfer(layouts)
    for _ in range(2):
        sent = transfer(tensors)
        assert all(s.device == devgraph_backend.device for s in sent)
        assert [s.tolist() for s in sent] == [t.tolist() for t in tensors]
    assert len(pins) == 2


def test_staging_memory_grows_and_older_users_stay_right(devgraph_backend):
    staging = Staging(devgraph_backend, devgraph_backend.device)
    small = staging.transfer([((2,), torch.int32)])
    large = staging.transfer([((200,), torch.int32)])
    again = staging.transfer([((3,), torch.int32)])
    assert large([torch.full((200,), 5, dtype=torch.int32)])[0].eq(5).all()
    assert small([torch.full((2,), 6, dtype=torch.int32)])[0].eq(6).all()
    assert again([torch.full((3,), 7, dtype=torch.int32)])[0].eq(7).all()


@pytest.mark.parametrize("join", [False, True])
def test_a_joined_copy_writes_what_separate_copies_write(devgraph_backend, join):
    arena = InputArena({slot.name: slot for slot in SLOTS}, Size(8, 8, 1), devgraph_backend)
    plan = CopyPlan(arena, Size(5, 5, 1), Size(8, 8, 1), {}, join=join)
    inputs = batch_of(5, devgraph_backend.device)
    for buffer in arena.buffers.values():
        poison(buffer)
    plan.load(inputs)
    for name, view in arena.views(Size(8, 8, 1)).items():
        real = inputs[name]
        assert torch.equal(view[: real.shape[0]], real), name
        last = real[-1].item() if name == "offsets" else arena.slots[name].pad.value
        assert view[real.shape[0] :].eq(last).all(), name


@pytest.mark.parametrize("away", [(), ("ids", "bias"), tuple(slot.name for slot in SLOTS)])
def test_copies_from_the_host_and_the_device_are_right(devgraph_backend, away):
    device = devgraph_backend.device
    arena = InputArena({slot.name: slot for slot in SLOTS}, Size(8, 8, 1), devgraph_backend)
    plan = CopyPlan(arena, Size(5, 5, 1), Size(8, 8, 1), {})
    inputs = {n: t.cpu() if n in away else t for n, t in batch_of(5, device).items()}
    for seed in range(3):
        for name, data in batch_of(5, device, seed).items():
            inputs[name].copy_(data)
        for buffer in arena.buffers.values():
            poison(buffer)
        plan.load(inputs)
        for name, view in arena.views(Size(8, 8, 1)).items():
            real = inputs[name].to(device)
            assert torch.equal(view[: len(real)], real), name
            last = real[-1] if name == "offsets" else arena.slots[name].pad.value
            assert view[len(real) :].eq(last).all(), name


@pytest.mark.cuda
def test_fence_asks_a_busy_device_without_waiting_for_it():
    backend = dg.get_backend("cuda")
    x = torch.randn(8192, 8192, device=backend.device)
    torch.mm(x, x)
    backend.synchronize()
    for _ in range(20):  # each takes the fastest device some 15 ms
        torch.mm(x, x)
    done = backend.fence()
    assert done() is False
    backend.synchronize()
    assert done() is True
