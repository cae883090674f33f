"""Runners on the backend under test: buckets, padding, state, refusals and life."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import Kit, same

VOCAB, WIDTH, ROWS = 32, 8, 48
SCRATCH = ROWS
"""The row of the cache that padded rows write."""

POLICIES = ("full", "breakable")


@dg.region()
def mixed(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Work in the middle of a step that breaks a breakable graph."""
    return hidden @ weight


class Model:
    """A step with state. All numbers are small integers, so that every order of summing and every
    number of padded rows gives the same bits."""

    def __init__(self, kit: Kit) -> None:
        generator = torch.Generator().manual_seed(3)

        def integers(*shape: int) -> torch.Tensor:
            return torch.randint(-2, 3, shape, generator=generator).float().to(kit.device)

        self.table = integers(VOCAB, WIDTH)
        self.weight = integers(WIDTH, WIDTH)
        self.cache = torch.zeros(ROWS + 1, WIDTH, device=kit.device)

    def step(self, cache: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Add each token to its row of the cache and return what the row then gives."""
        hidden = self.table[ids] + cache[rows]
        cache.index_copy_(0, rows, hidden)
        out: torch.Tensor = mixed(hidden, self.weight)
        return out + hidden

    def decode(self, batch: Any) -> torch.Tensor:
        return self.step(self.cache, batch.ids, batch.rows)

    def summed(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Sum of the tokens of each request; ``starts`` are offsets, one more than requests."""
        position = torch.arange(hidden.shape[0], device=hidden.device)
        inside = (position >= starts[:-1, None]) & (position < starts[1:, None])
        return torch.where(inside[:, :, None], hidden, 0.0).sum(1)


SLOTS = (
    dg.InputSlot("ids", ("tokens",), torch.int64, pad=dg.Pad.zero()),
    dg.InputSlot("rows", ("tokens",), torch.int64, pad=dg.Pad.fill(SCRATCH)),
)
STARTS = dg.InputSlot("starts", ("requests+1",), torch.int64, pad=dg.Pad.last())


def batch_of(kit: Kit, count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens, each with a row of the cache of its own."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (count,), generator=generator)
    rows = torch.randperm(ROWS, generator=generator)[:count]
    return {"ids": ids.to(kit.device), "rows": rows.to(kit.device)}


def decoder(kit: Kit, model: Model, **options: Any) -> dg.DecodeRunner:
    """A captured decode runner with the buckets 1, 2, 4 and 8."""
    options = {"max_requests": 8, "backend": kit.backend, "progress": False, **options}
    runner = dg.DecodeRunner(model.decode, list(SLOTS), **options)
    runner.capture()
    return runner


def prefiller(kit: Kit, model: Model, **options: Any) -> dg.PrefillRunner:
    """A captured prefill runner whose tail sums the tokens of each request."""
    options = {
        "max_tokens": 16,
        "max_requests": 4,
        "backend": kit.backend,
        "progress": False,
        "tail": lambda hidden, batch: model.summed(hidden, batch.starts),
        **options,
    }
    config = options.pop("config", {"policy": "breakable", "buckets": [4, 8, 16]})
    runner = dg.PrefillRunner(model.decode, [*SLOTS, STARTS], config=config, **options)
    runner.capture()
    return runner


def check_decode(kit: Kit, runner: dg.DecodeRunner, model: Model, count: int, seed: int) -> None:
    """Run a batch and fail unless outputs and state are those of an eager step."""
    inputs = batch_of(kit, count, seed)
    state = model.cache.clone()
    want = model.step(state, inputs["ids"], inputs["rows"])
    out = runner.run(inputs)
    kit.backend.synchronize()
    same(out, want, f"the output of {count} requests")
    same(model.cache[:ROWS], state[:ROWS], f"the state after {count} requests")


def check_prefill(
    kit: Kit, runner: dg.PrefillRunner, model: Model, lengths: tuple[int, ...], seed: int
) -> None:
    """Run requests of these lengths and fail unless outputs and state are those of eager."""
    inputs = batch_of(kit, sum(lengths), seed)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], device=kit.device)
    state = model.cache.clone()
    want = model.summed(model.step(state, inputs["ids"], inputs["rows"]), starts)
    out = runner.run({**inputs, "starts": starts})
    kit.backend.synchronize()
    same(out, want, f"the output of requests of {lengths} tokens")
    same(model.cache[:ROWS], state[:ROWS], f"the state after requests of {lengths} tokens")


# Right results.


@pytest.mark.parametrize("policy", POLICIES)
def test_decode_equals_eager_for_every_size_in_any_order(kit: Kit, policy: str) -> None:
    """FAULTS 35."""
    model = Model(kit)
    runner = decoder(kit, model, config=policy)
    kit.churn()
    seed = 0
    for order in itertools.permutations((8, 1, 4, 2)):
        for count in order:
            seed += 1
            check_decode(kit, runner, model, count, seed)
    stats = runner.stats()
    assert stats.graph_steps == stats.steps == seed
    assert stats.padded_rows == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_padded_rows_change_neither_outputs_nor_state(kit: Kit, policy: str) -> None:
    """FAULTS 36."""
    model = Model(kit)
    runner = decoder(kit, model, config=policy)
    for seed, count in enumerate((3, 5, 7, 6, 8, 5, 3)):
        kit.backend.poison(model.cache[SCRATCH])  # what padded rows read reaches no real row
        check_decode(kit, runner, model, count, seed)
    assert runner.stats().padded_rows > 0
    assert runner.stats().eager == {}


@pytest.mark.parametrize("policy", POLICIES)
def test_capture_leaves_the_state_of_real_rows_alone(kit: Kit, policy: str) -> None:
    """FAULTS 36."""
    model = Model(kit)
    kit.refill(model.cache, 5)
    before = model.cache.clone()
    decoder(kit, model, config=policy)
    kit.backend.synchronize()
    same(model.cache[:ROWS], before[:ROWS], "the state after the capture")


@pytest.mark.parametrize("policy", POLICIES)
def test_prefill_equals_eager_for_any_requests(kit: Kit, policy: str) -> None:
    """FAULTS 36."""
    model = Model(kit)
    runner = prefiller(kit, model, config={"policy": policy, "buckets": [4, 8, 16]})
    cases = [(3,), (1, 2), (5, 2, 1), (4, 4, 4, 4), (16,), (1, 1, 1, 1), (7, 6)]
    for seed, lengths in enumerate([*cases, *reversed(cases)]):
        kit.backend.poison(model.cache[SCRATCH])
        check_prefill(kit, runner, model, lengths, seed)
    assert runner.stats().eager == {}


def test_prefill_and_decode_share_a_pool_and_take_turns(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 35."""
    model = Model(kit)
    prefill = prefiller(kit, model, pool=pool)
    decode = decoder(kit, model, pool=pool)
    for seed, (lengths, count) in enumerate([((5, 3), 2), ((16,), 8), ((3,), 1), ((2, 9), 4)]):
        check_prefill(kit, prefill, model, lengths, 2 * seed)
        check_decode(kit, decode, model, count, 2 * seed + 1)
    assert prefill.stats().eager == decode.stats().eager == {}


@pytest.mark.parametrize("policy", POLICIES)
def test_runner_proves_itself(kit: Kit, policy: str) -> None:
    """FAULTS 36."""
    weight = kit.tensor(WIDTH, WIDTH)

    def forward(batch: Any) -> torch.Tensor:
        return mixed(torch.tanh(batch.x), weight)

    slot = dg.InputSlot("x", ("tokens", WIDTH), torch.float32, pad=dg.Pad.zero())
    with dg.DecodeRunner(
        forward, [slot], config=policy, backend=kit.backend, max_requests=4, progress=False
    ) as runner:
        runner.capture()
        report = runner.prove()
        assert report.ok, str(report)


def test_host_arguments_reach_the_step_of_a_runner(kit: Kit) -> None:
    @dg.region(host_args=("length",))
    def prefix(x: torch.Tensor, *, length: int) -> torch.Tensor:
        return x[:, :length].sum(1)

    def forward(batch: Any) -> torch.Tensor:
        return prefix(batch.x * 2, length=batch.host.length) + 1

    slot = dg.InputSlot("x", ("tokens", WIDTH), torch.float32, pad=dg.Pad.zero())
    for policy in POLICIES:
        runner = dg.DecodeRunner(
            forward,
            [slot],
            host_args={"length": 1},
            config=policy,
            backend=kit.backend,
            max_requests=4,
            progress=False,
        )
        runner.capture()
        for seed, length in enumerate((3, 7, 1, 3)):
            x = kit.tensor(4, WIDTH, seed=seed)
            out = runner.run({"x": x}, host_args={"length": length})
            kit.backend.synchronize()
            same(out, (x * 2)[:, :length].sum(1) + 1, f"length={length} under {policy}")
        updates = policy == "breakable" or kit.backend.capabilities.region_update
        assert runner.stats().eager == ({} if updates else {"update_unsupported": 3})


@pytest.mark.parametrize("policy", POLICIES)
def test_output_fed_back_as_the_next_input_is_read_before_it_is_overwritten(
    kit: Kit, policy: str
) -> None:
    """FAULTS 12."""
    @dg.region()
    def halved(x: torch.Tensor) -> torch.Tensor:
        return x * 0.5

    slot = dg.InputSlot("x", ("tokens", WIDTH), torch.float32, pad=dg.Pad.zero())
    runner = dg.DecodeRunner(
        lambda batch: halved(batch.x) + 1,
        [slot],
        config=policy,
        backend=kit.backend,
        max_requests=4,
        progress=False,
    )
    runner.capture()
    for count in (4, 3):
        x = kit.tensor(count, WIDTH)
        want, fed = x, x
        for _ in range(4):
            want = want * 0.5 + 1
            fed = runner.run({"x": fed})
        kit.backend.synchronize()
        same(fed, want, "the chained output")


# Batches that do not fit.


def test_batch_over_the_largest_bucket_runs_eagerly_and_whole(kit: Kit) -> None:
    """FAULTS 4."""
    model = Model(kit)
    runner = decoder(kit, model)
    decision = runner.can_run(requests=11)
    assert not decision.ok
    assert decision.reason == "over_largest_bucket"
    check_decode(kit, runner, model, 11, seed=1)
    assert runner.stats().eager == {"over_largest_bucket": 1}
    check_decode(kit, runner, model, 8, seed=2)


def test_batch_over_the_largest_bucket_is_refused_where_strict(kit: Kit) -> None:
    """FAULTS 4."""
    model = Model(kit)
    runner = decoder(kit, model, strict=True)
    before = model.cache.clone()
    with pytest.raises(dg.InputError, match="over largest bucket"):
        runner.run(batch_of(kit, 11))
    same(model.cache, before, "the state after the refusal")
    check_decode(kit, runner, model, 8, seed=2)


def test_empty_batch_does_nothing(kit: Kit) -> None:
    """FAULTS 5."""
    model = Model(kit)
    runner = decoder(kit, model)
    before = model.cache.clone()
    assert runner.run(batch_of(kit, 0)) is None
    kit.backend.synchronize()
    same(model.cache, before, "the state after an empty batch")
    assert runner.can_run(requests=0).reason == "empty_batch"


@pytest.mark.parametrize("requests", [-1, 2.5, "3", True])
def test_number_of_requests_that_is_no_count_is_refused(kit: Kit, requests: Any) -> None:
    """FAULTS 5."""
    runner = decoder(kit, Model(kit))
    with pytest.raises(ValueError, match="requests") as caught:
        runner.can_run(requests=requests)
    assert isinstance(caught.value, dg.InputError)


@pytest.mark.parametrize(
    ("buckets", "found"),
    [([8, 2, 2, 4], [2, 4, 8]), ([3], [3, 8]), ([1, 8, 1], [1, 8])],
)
def test_buckets_are_sorted_unique_and_hold_the_maximum(
    kit: Kit, buckets: list[int], found: list[int]
) -> None:
    """FAULTS 6."""
    model = Model(kit)
    runner = decoder(kit, model, config={"buckets": buckets})
    assert list(runner.buckets) == found
    check_decode(kit, runner, model, 7, seed=1)


@pytest.mark.parametrize("buckets", [[0], [-2], [9], [2, 0], ["4"], [2.5], [None], []])
def test_bad_buckets_are_refused(kit: Kit, buckets: list[Any]) -> None:
    """FAULTS 6."""
    with pytest.raises(dg.ConfigError, match="bucket") as caught:
        decoder(kit, Model(kit), config={"buckets": buckets})
    assert not buckets or str(buckets[-1]) in str(caught.value)


# Inputs that do not fit.


def _without(inputs: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in inputs.items() if key != name}


BAD_INPUTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "dtype": lambda i: {**i, "rows": i["rows"].to(torch.int32)},
    "shape": lambda i: {**i, "rows": i["rows"][:-1]},
    "rank": lambda i: {**i, "rows": i["rows"][:, None]},
    "meta device": lambda i: {**i, "rows": i["rows"].to("meta")},
    "missing": lambda i: _without(i, "rows"),
    "none": lambda i: {**i, "rows": None},
    "list": lambda i: {**i, "rows": i["rows"].tolist()},
    "extra": lambda i: {**i, "row": i["rows"]},
    "sparse": lambda i: {**i, "rows": i["rows"].to_sparse()},
}


@pytest.mark.parametrize("count", [3, 11])
@pytest.mark.parametrize("name", BAD_INPUTS)
def test_mismatched_input_is_refused_by_name_and_changes_nothing(
    kit: Kit, name: str, count: int
) -> None:
    """FAULTS 7."""
    model = Model(kit)
    runner = decoder(kit, model)
    before = model.cache.clone()
    with pytest.raises(dg.InputError, match="row"):
        runner.run(BAD_INPUTS[name](batch_of(kit, count)))
    kit.backend.synchronize()
    same(model.cache, before, "the state after the refusal")
    assert runner.stats().steps == 0
    check_decode(kit, runner, model, 3, seed=1)


def test_strided_and_overlapping_inputs_are_copied_in(kit: Kit) -> None:
    """FAULTS 8."""
    slot = dg.InputSlot("x", ("tokens", WIDTH), torch.float32, pad=dg.Pad.zero())
    runner = dg.DecodeRunner(
        lambda batch: batch.x * 2, [slot], backend=kit.backend, max_requests=4, progress=False
    )
    runner.capture()
    base = kit.tensor(WIDTH, 16)
    for x in (
        base.t()[:4],
        base.t()[1:8:2],
        base.view(-1)[: 4 + WIDTH].unfold(0, WIDTH, 1)[:4],
        base[:1, :WIDTH].expand(4, WIDTH),
    ):
        want = x.clone() * 2
        out = runner.run({"x": x})
        kit.backend.synchronize()
        same(out, want)


def test_inputs_on_the_host_are_brought_to_the_device(kit: Kit) -> None:
    model = Model(kit)
    runner = decoder(kit, model)
    inputs = batch_of(kit, 3, seed=4)
    want = model.step(model.cache.clone(), inputs["ids"], inputs["rows"])
    out = runner.run({name: tensor.cpu() for name, tensor in inputs.items()})
    kit.backend.synchronize()
    same(out, want)


def test_bound_tensor_that_moved_is_refused(kit: Kit) -> None:
    """FAULTS 9."""
    model = Model(kit)
    runner = decoder(kit, model, bound={"cache": model.cache})
    check_decode(kit, runner, model, 3, seed=1)
    kept = model.cache.detach()
    with torch.no_grad():
        model.cache.set_(torch.zeros_like(kept))
    with pytest.raises(dg.StateError, match="cache"):
        runner.run(batch_of(kit, 3))
    with torch.no_grad():
        model.cache.set_(kept)
    check_decode(kit, runner, model, 3, seed=2)


# Outputs and life.


def test_output_read_after_the_next_run_is_detected_in_debug_mode(kit: Kit) -> None:
    """FAULTS 11."""
    runner = decoder(kit, Model(kit), debug=True)
    first = runner.run(batch_of(kit, 3, seed=1))
    held = first.clone()
    runner.run(batch_of(kit, 3, seed=2))
    with pytest.raises(dg.StaleOutputError, match="clone=True"):
        first + 1
    assert held.shape == (3, WIDTH)


def test_cloned_output_survives_the_next_run(kit: Kit) -> None:
    """FAULTS 11."""
    model = Model(kit)
    runner = decoder(kit, model)
    first = runner.run(batch_of(kit, 3, seed=1), clone=True)
    kept = first.clone()
    runner.run(batch_of(kit, 3, seed=2))
    kit.backend.synchronize()
    same(first, kept)


def test_invalidated_graphs_are_captured_again_with_the_new_weights(kit: Kit) -> None:
    """FAULTS 10."""
    model = Model(kit)
    runner = decoder(kit, model)
    check_decode(kit, runner, model, 3, seed=1)
    model.weight = model.weight.clone() + 1  # other memory: the graphs do not know it
    runner.invalidate("weights")
    check_decode(kit, runner, model, 3, seed=2)
    assert runner.stats().eager == {"invalidated": 1}
    runner.capture()
    check_decode(kit, runner, model, 3, seed=3)
    assert runner.stats().graph_steps == 2


def test_suspended_runner_is_eager_until_resumed(kit: Kit) -> None:
    """FAULTS 10."""
    model = Model(kit)
    runner = decoder(kit, model)
    runner.suspend()
    check_decode(kit, runner, model, 3, seed=1)
    runner.resume()
    check_decode(kit, runner, model, 3, seed=2)
    assert runner.stats().eager == {"suspended": 1}
    assert runner.stats().graph_steps == 1


def test_closed_runner_refuses_and_closes_twice(kit: Kit) -> None:
    """FAULTS 28."""
    runner = decoder(kit, Model(kit))
    runner.close()
    runner.close()
    with pytest.raises(dg.StateError, match="closed"):
        runner.run(batch_of(kit, 3))
    with pytest.raises(dg.StateError, match="closed"):
        runner.capture()


def test_runner_inside_a_capture_is_refused(kit: Kit) -> None:
    """FAULTS 13."""
    model = Model(kit)
    runner = decoder(kit, model)
    x = kit.tensor(4)
    inputs = batch_of(kit, 3)
    with kit.backend.capture_context(kit.backend.make_graph()):
        x + 1
        with pytest.raises(dg.NestedCaptureError):
            runner.run(inputs)
    check_decode(kit, runner, model, 3, seed=1)


def test_step_that_raises_at_replay_leaves_the_runner_usable(kit: Kit) -> None:
    """FAULTS 25."""
    model = Model(kit)
    failing: list[int] = []

    @dg.no_graph
    def checked(x: torch.Tensor) -> torch.Tensor:
        if failing:
            raise ValueError("from the step")
        return x * 1

    decode = model.decode
    model.decode = lambda batch: checked(decode(batch))  # type: ignore[method-assign]
    runner = decoder(kit, model, config="breakable")
    failing.append(1)
    with pytest.raises(ValueError, match="from the step"):
        runner.run(batch_of(kit, 3))
    failing.clear()
    check_decode(kit, runner, model, 3, seed=1)
