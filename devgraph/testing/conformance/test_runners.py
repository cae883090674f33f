"""Runners on the backend under test.

The tests cover buckets, padding, state, ``prepare``, emulated steps, shared buffers and loops.
"""

from __future__ import annotations

import itertools
import types
from typing import Any
from unittest.mock import ANY

import pytest
import torch

import devgraph as dg
from devgraph.api.backend import poison
from devgraph.testing.conformance.support import (
    POLICIES,
    SCRATCH,
    VOCAB,
    WIDTH,
    Kit,
    Model,
    X,
    check_run,
    declares,
    decoder,
    mixed,
    prefiller,
    runner_of,
    same,
)


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
            check_run(kit, runner, model, count, seed)
    stats = runner.stats()
    assert stats.graph_steps == stats.steps == seed
    assert stats.padded_rows == 0


@dg.region(host_args=("length",), mutates=("cache", "out"))
def attended(cache: torch.Tensor, x: torch.Tensor, out: torch.Tensor, *, length: int) -> None:
    """Write ``x`` into the cache, and write the sum of the cache so far into ``out``."""
    cache[length - 1].copy_(x[0])
    out.copy_(cache[:length].sum(0, keepdim=True) + x)


@pytest.mark.parametrize("policy", POLICIES)
def test_host_argument_beyond_every_budget_equals_eager(kit: Kit, policy: str) -> None:
    """FAULTS 43."""
    cache = torch.zeros(64, WIDTH, device=kit.device)

    def forward(batch: Any) -> torch.Tensor:
        x: torch.Tensor = batch.x
        for _ in range(3):
            hidden = x + 1
            query = hidden * 2
            del hidden
            out = torch.empty_like(query)
            attended(cache, query, out, length=batch.host.length)
            x = (x + out) * 0.5
        return x

    def outputs(config: str) -> list[torch.Tensor]:
        runner = runner_of(kit, forward, max_requests=1, host_args={"length": 1}, config=config)
        cache.zero_()
        return [
            runner.run({"x": kit.tensor(1, WIDTH, seed=n)}, host_args={"length": n}, clone=True)
            for n in range(1, 33)
        ]

    for got, want in zip(outputs(policy), outputs("disabled"), strict=True):
        same(got, want)


def accumulated(batch: Any) -> torch.Tensor:
    """Add each token to the state of its request, and return the state after each token."""
    slots, width = batch.state_slots, batch.width
    state = batch.state.total[slots]
    after: list[torch.Tensor] = []
    for token in batch.x.view(-1, width, WIDTH).unbind(1):
        state = state + token
        if batch.state.history is not None:
            batch.state.history.total[len(after)].index_copy_(0, slots, state)
        after.append(state)
    if batch.state.history is None:
        batch.state.total.index_copy_(0, slots, state)
    return torch.stack(after, 1).flatten(0, 1)


def accumulator(kit: Kit, policy: str, **options: Any) -> Any:
    x = dg.InputSlot("x", ("tokens", WIDTH), torch.float32, pad=dg.Pad.fill(float("nan")))
    state = [dg.StateSlot("total", (WIDTH,), torch.float32)]
    options = {"outputs": dg.OutputSlot(rows="tokens"), "config": policy, **options}
    return runner_of(kit, accumulated, [x], state=state, **options)


@pytest.mark.parametrize("policy", POLICIES)
def test_request_slot_shows_no_earlier_request(kit: Kit, policy: str) -> None:
    runner = accumulator(kit, policy)
    rounds = 1000 if policy == "full" else 50
    for seed in range(rounds):
        slots = [seed % 4, (seed + 1 + seed % 3) % 4]
        for buffer in runner.state.buffers.values():
            poison(buffer)
        for slot_of_request in slots:
            runner.assign(slot_of_request)
        x, y = kit.tensor(2, WIDTH, seed=seed), kit.tensor(2, WIDTH, seed=seed + rounds)
        same(runner.run({"x": x}, state_slots=slots, clone=True), x)
        same(runner.run({"x": y}, state_slots=slots, clone=True), x + y)
    assert runner.stats().graph_steps == 2 * rounds


@pytest.mark.parametrize("policy", POLICIES)
def test_state_rolls_back_to_the_last_accepted_token(kit: Kit, policy: str) -> None:
    runner = accumulator(kit, policy, variants=[{}, {"width": 3}])
    # Use whole numbers, so that the order of additions does not matter.
    x, y = ((kit.tensor(n, WIDTH, seed=n) * 8).round() for n in (6, 2))
    sums = torch.cat([part.cumsum(0) for part in x.split(3)])
    runner.assign(3)
    runner.assign(0)
    same(runner.run({"x": x}, state_slots=[3, 0], variant={"width": 3}, clone=True), sums)
    out = runner.run({"x": y}, state_slots=[0, 3], accepted=[1, 2], clone=True)
    same(out, torch.stack([sums[3], sums[1]]) + y)
    same(runner.export_state(0, accepted=0)["total"], sums[3])
    moved = runner.export_state(3)
    runner.assign(3)
    runner.import_state(1, moved)
    same(runner.run({"x": y}, state_slots=[3, 1], clone=True), torch.stack([y[0], out[1] + y[1]]))


@pytest.mark.parametrize("policy", POLICIES)
def test_padded_rows_change_neither_outputs_nor_state(kit: Kit, policy: str) -> None:
    """FAULTS 36."""
    model = Model(kit)
    runner = decoder(kit, model, config=policy)
    for seed, count in enumerate((3, 5, 7, 6, 8, 5, 3)):
        poison(model.cache[SCRATCH])  # Data that padded rows read must not affect real rows.
        check_run(kit, runner, model, count, seed)
    assert runner.stats().padded_rows > 0
    assert runner.stats().eager == {}


@pytest.mark.parametrize("policy", POLICIES)
def test_prefill_equals_eager_for_any_requests(kit: Kit, policy: str) -> None:
    """FAULTS 36."""
    model = Model(kit)
    runner = prefiller(kit, model, policy)
    cases = [(3,), (1, 2), (5, 2, 1), (4, 4, 4, 4), (16,), (1, 1, 1, 1), (7, 6)]
    for seed, lengths in enumerate([*cases, *reversed(cases)]):
        poison(model.cache[SCRATCH])
        check_run(kit, runner, model, lengths, seed)
    assert runner.stats().eager == {}


def test_prefill_and_decode_share_a_pool_and_take_turns(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 35."""
    model = Model(kit)
    prefill = prefiller(kit, model, pool=pool)
    decode = decoder(kit, model, pool=pool)
    for seed, (lengths, count) in enumerate([((5, 3), 2), ((16,), 8), ((3,), 1), ((2, 9), 4)]):
        check_run(kit, prefill, model, lengths, 2 * seed)
        check_run(kit, decode, model, count, 2 * seed + 1)
    assert prefill.stats().eager == decode.stats().eager == {}


def test_reused_input_tensors_are_read_again(kit: Kit) -> None:
    slots = [
        dg.InputSlot("ids", ("tokens",), torch.int64, pad=dg.Pad.fill(-1)),
        dg.InputSlot("scale", ("requests",), torch.float32, pad=dg.Pad.zero()),
    ]
    runner = runner_of(kit, lambda batch: batch.ids * batch.scale, slots)
    inputs = {"ids": torch.arange(3), "scale": torch.ones(3)}
    there = {name: tensor.to(kit.device) for name, tensor in inputs.items()}
    for given in (there, there, there, inputs, there, inputs, there, there):
        given["ids"].add_(1)
        kit.same(runner.run(given), given["ids"].to(kit.device) * there["scale"])


IDS = dg.InputSlot("ids", ("tokens",), torch.int64, pad=dg.Pad.zero())
LAST_ROW, MOST = 64, 8
ROWS_OF_CACHE = dg.InputSlot("rows", ("tokens",), torch.int64, pad=dg.Pad.fill(LAST_ROW))


class Planned:
    """A step that gathers rows by a plan. ``prepare`` writes the plan for the whole bucket."""

    def __init__(self, kit: Kit) -> None:
        self.table: torch.Tensor = kit.tensor(VOCAB, WIDTH)
        self.plan = torch.full((16,), -1, device=kit.device)
        self.planned: list[tuple[int, int]] = []

    def prepare(self, batch: Any) -> None:
        self.planned.append((batch.tokens, batch.real.tokens))
        rows = [3 * one % VOCAB for one in batch.ids.tolist()]  # planned on the host
        self.plan[: batch.tokens].copy_(torch.tensor(rows))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.table[self.plan[: batch.tokens]] + 1

    def expected(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[3 * ids % VOCAB] + 1


@pytest.mark.parametrize("policy", [*POLICIES, "disabled"])
def test_prepare_plans_every_step_over_its_padded_batch(kit: Kit, policy: str) -> None:
    model = Planned(kit)
    runner = runner_of(kit, model.forward, [IDS], prepare=model.prepare, config=policy)
    before = len(model.planned)
    assert before == 0 if policy == "disabled" else before > len(runner.graphs)
    for count in (3, 1, 4, 9):
        ids = torch.arange(count, device=kit.device) + count
        same(runner.run({"ids": ids}), model.expected(ids))
    padded = [3, 1, 4, 9] if policy == "disabled" else [4, 1, 4, 9]
    assert model.planned[before:] == list(zip(padded, [3, 1, 4, 9], strict=True))
    if policy != "disabled":
        assert runner.prove().ok


@dg.region(host_args=("length",), mutates=("out",))
def summed(x: torch.Tensor, out: torch.Tensor, *, length: int) -> None:
    out.copy_(x[:, :length].sum(1, keepdim=True) + x)


def summing(batch: Any) -> torch.Tensor:
    out = torch.empty_like(batch.x)
    summed(batch.x, out, length=batch.host.length)
    return out


@declares("region_update")
@pytest.mark.parametrize("policy", POLICIES)
def test_prepare_returns_host_arguments(kit: Kit, policy: str) -> None:
    planned = {"length": 1}
    runner = runner_of(
        kit, summing, config=policy, host_args={"length": 1}, prepare=lambda batch: planned
    )
    x = kit.tensor(3, WIDTH)
    for length in (2, 5, 2):
        planned = {"length": length}
        same(runner.run({"x": x}), x[:, :length].sum(1, keepdim=True) + x)


@pytest.mark.parametrize("policy", POLICIES)
def test_emulated_graphs_equal_graphs(kit: Kit, policy: str) -> None:
    model = Planned(kit)
    config = {"policy": policy, "emulate": True}
    runner = runner_of(kit, model.forward, [IDS], prepare=model.prepare, config=config)
    for count in (3, 2, 4):
        ids = torch.arange(count, device=kit.device)
        same(runner.run({"ids": ids}), model.expected(ids))
    assert [planned for planned, _ in model.planned[-3:]] == [4, 2, 4]
    stats = runner.stats()
    assert (stats.emulated_steps, stats.graph_steps, stats.effective) == (3, 0, "emulated")
    assert runner.prove().ok and "emulated" in runner.explain()


@pytest.mark.parametrize("policy", POLICIES)
def test_runners_that_share_buffers_equal_separate_runners(kit: Kit, policy: str) -> None:
    """The data of the other runner is poisoned, because a run must not read that data."""
    y = dg.InputSlot("y", ("tokens",), torch.float32, pad=dg.Pad.zero())
    target = runner_of(
        kit, lambda batch: batch.x * 2 + batch.y[:, None], [X, y], config=policy, max_requests=8
    )
    draft = runner_of(kit, lambda batch: batch.x * 3, config=policy, share=target)
    assert draft.pool is target.pool
    assert draft.buffers["x"].data_ptr() == target.buffers["x"].data_ptr()
    outputs: dict[dg.DecodeRunner, int] = {}
    for seed, (runner, count) in enumerate(
        itertools.product((target, draft, draft, target), (3, 1, 4))
    ):
        poison(target.buffers["x"])
        inputs = {"x": kit.tensor(count, WIDTH, seed=seed)}
        want = inputs["x"] * 3
        if runner is target:
            inputs["y"] = kit.tensor(count, seed=seed + 99)
            want = inputs["x"] * 2 + inputs["y"][:, None]
        out = runner.run(inputs)
        same(out, want, f"run {seed}")
        outputs[runner] = out.data_ptr()
    assert outputs[target] == outputs[draft]
    assert target.prove().ok and draft.prove().ok
    fed = draft.run({"x": target.run({"x": inputs["x"], "y": inputs["y"]})})
    same(fed, want * 3, "an output of one that is an input of the other")


class Generating:
    """A step that updates a cache and chooses the next token, until a certain token or row."""

    def __init__(self, kit: Kit, width: int = 1) -> None:
        generator = torch.Generator().manual_seed(7)
        weight = torch.randint(-2, 3, (WIDTH, VOCAB), generator=generator)
        table = torch.randint(-2, 3, (VOCAB, WIDTH), generator=generator)
        self.weight, self.table = weight.float().to(kit.device), table.float().to(kit.device)
        self.cache = torch.zeros(LAST_ROW + 1, WIDTH, device=kit.device)
        self.width = width

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        hidden = self.table[batch.ids] + self.cache[batch.rows - 1]
        self.cache.index_copy_(0, batch.rows, hidden)
        tokens = (mixed(hidden, self.weight) * 3).argmax(1)
        return {"tokens": tokens, "sum": hidden.view(batch.requests, -1).sum(1)}

    def advance(self, batch: Any, outputs: dict[str, torch.Tensor]) -> None:
        batch.ids.copy_(outputs["tokens"])
        batch.rows.add_(1)

    def done(self, batch: Any, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        ends: torch.Tensor = (outputs["tokens"] == 3) | (batch.rows % MOST == MOST - 1)
        return ends.view(batch.requests, -1).any(1)

    def one_by_one(
        self, inputs: dict[str, torch.Tensor], steps: int
    ) -> tuple[dict[str, torch.Tensor], list[int]]:
        """Return the results of single steps, with zeros after the last step of each request."""
        ids, rows = (inputs[name].view(-1, self.width) for name in ("ids", "rows"))
        tokens = ids.new_zeros(steps, *ids.shape)
        sums, taken = self.cache.new_zeros(steps, len(ids)), [0] * len(ids)
        for one in range(len(ids)):
            batch = types.SimpleNamespace(ids=ids[one].clone(), rows=rows[one].clone(), requests=1)
            ended = False
            while not ended and taken[one] < steps:
                out = self.forward(batch)
                tokens[taken[one], one], sums[taken[one], one] = out["tokens"], out["sum"]
                taken[one] += 1
                self.advance(batch, out)
                ended = bool(self.done(batch, out))
        return {"tokens": tokens.flatten(1), "sum": sums}, taken


def _of_generating(kit: Kit, requests: int, width: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCAB, (requests, width), generator=generator)
    first = torch.randint(1, MOST - 1, (requests,), generator=generator)
    rows = torch.arange(requests * width).view(requests, width) * MOST + first[:, None]
    return {"ids": ids.flatten().to(kit.device), "rows": rows.flatten().to(kit.device)}


PIECEWISE = {"policy": "piecewise", "buckets": [4], "max_padding": 4}
LOOPS = [
    *itertools.product(("full", "breakable", "disabled"), (1, 2), (4,)),
    pytest.param(PIECEWISE, 1, 2, marks=[pytest.mark.slow, declares("piecewise")]),
]


@pytest.mark.parametrize(("config", "width", "steps"), LOOPS)
def test_a_loop_equals_single_steps(kit: Kit, config: Any, width: int, steps: int) -> None:
    model = Generating(kit, width)
    runner = runner_of(
        kit,
        model.forward,
        [IDS, ROWS_OF_CACHE],
        outputs={"tokens": dg.OutputSlot(rows="tokens"), "sum": dg.OutputSlot()},
        variants=[{"width": width}],
        loop=dg.Loop(steps=steps, advance=model.advance, done=model.done),
        config=config,
    )
    for seed, requests in enumerate((3, 1, 4, 2)):
        inputs = _of_generating(kit, requests, width, seed)
        state = kit.tensor(LAST_ROW + 1, WIDTH, seed=seed).round()
        model.cache.copy_(state)
        want, taken = model.one_by_one(inputs, steps)
        after = model.cache[:LAST_ROW].clone()
        model.cache.copy_(state)
        out = runner.run(inputs, variant={"width": width})
        kit.same(out.outputs, want, f"the outputs of {requests} requests")
        assert (out.steps.dtype, out.steps.device) == (torch.int64, model.cache.device)
        assert (int(out.steps), out.taken.tolist()) == (max(taken), taken)
        same(model.cache[:LAST_ROW], after, f"the state after {requests} requests")
    if config != "disabled":
        assert runner.stats().graph_steps == 4 and runner.prove().ok
        same(model.cache[:LAST_ROW], after, "the state after a proof")


@pytest.mark.parametrize(
    "options", [{"config": {"policy": "full", "emulate": True}}, {"debug": True}, {"share": True}]
)
def test_a_loop_works_with_other_features_of_a_runner(kit: Kit, options: dict[str, Any]) -> None:
    single = runner_of(kit, lambda batch: batch.x * 2, max_requests=8, name="single")
    if options.pop("share", None):
        options = {"share": single}
    planned: list[int] = []
    factor = torch.ones(1, device=kit.device)

    def plan(batch: Any) -> None:
        planned.append(batch.real.requests)
        factor.fill_(2)

    runner = runner_of(
        kit,
        lambda batch: batch.x * factor,
        prepare=plan,
        loop=dg.Loop(steps=3, advance=lambda batch, out: batch.x.copy_(out)),
        **options,
    )
    x = kit.tensor(3, WIDTH)
    before = len(planned)
    out = runner.run({"x": x})
    kit.same(out.outputs, torch.stack([x * 2, x * 4, x * 8]), "all steps")
    assert planned[before:] == [3] and out.taken.tolist() == [3, 3, 3]
    assert runner.prove().ok


LEFT = dg.InputSlot("left", ("requests",), torch.int64, pad=dg.Pad.zero())


class Counting:
    """A step that counts its own runs, for requests with ``left`` remaining steps."""

    def __init__(self, kit: Kit) -> None:
        self.turns = torch.zeros(1, dtype=torch.int64, device=kit.device)

    def forward(self, batch: Any) -> dict[str, torch.Tensor]:
        self.turns.add_(1)
        # Temporary memory must not overlap output rows of earlier steps.
        grown = (batch.x.repeat(1, 4).cumsum(1) * 2).view(-1, 4, WIDTH)[:, 0] - batch.x.cumsum(1)
        return {"grown": grown, "odd": batch.left % 2 == 1}

    def runner(self, kit: Kit, **options: Any) -> Any:
        """Return a runner whose loops have at most five steps."""

        def advance(batch: Any, found: dict[str, torch.Tensor]) -> None:
            batch.x.add_(1)
            batch.left.sub_(1)

        loop = dg.Loop(steps=5, advance=advance, done=lambda batch, found: batch.left <= 0)
        outputs = {"grown": dg.OutputSlot(), "odd": dg.OutputSlot()}
        return runner_of(kit, self.forward, [X, LEFT], outputs=outputs, loop=loop, **options)

    def check(self, kit: Kit, runner: dg.DecodeRunner, left: list[int], seed: int) -> None:
        """Fail unless a run executes exactly the remaining steps."""
        x = kit.tensor(len(left), WIDTH, seed=seed).round()
        given = torch.tensor(left, device=kit.device)
        self.turns.zero_()
        out = runner.run({"x": x, "left": given}, clone=True)
        kit.backend.synchronize()
        taken = [min(one, 5) for one in left]
        assert (int(self.turns), int(out.steps)) == (max(taken), max(taken))
        assert out.taken.tolist() == taken
        for step in range(5):
            went = (torch.tensor(taken) > step).to(kit.device)
            want = (x + step).cumsum(1).masked_fill(~went[:, None], 0)
            kit.same(out.outputs["grown"][step], want, f"step {step} of {left}")
            odd = ((given - step) % 2 == 1) & went
            kit.same(out.outputs["odd"][step], odd, f"the bools of {left}")


@declares("loops")
def test_a_loop_ends_when_every_request_is_done(kit: Kit) -> None:
    model = Counting(kit)
    runner = model.runner(kit)
    assert runner.stats().updates == {"loops": 3, "loop_nodes": ANY}
    batches = [[1], [2, 9, 4], [1, 1, 1, 1], [5, 2], [3], [7, 6, 5, 4], [9], [2, 3]]
    for seed, left in enumerate([*batches, *reversed(batches)]):
        model.check(kit, runner, left, seed)
    assert runner.prove().ok


@declares("loops", "node_ranges")
def test_nodes_of_a_loop_have_names(kit: Kit) -> None:
    model = torch.nn.Sequential(torch.nn.ReLU())
    loop = dg.Loop(steps=3, advance=lambda batch, out: batch.x.copy_(out))
    runner = runner_of(kit, lambda batch: model(batch.x - 1), loop=loop, name_nodes=model)
    for graph in runner.graphs.captured:
        assert isinstance(graph.captured, dg.Captured)
        (segment,) = graph.captured.segments
        (one,) = segment.ranges
        assert one.name == "0" and 0 < one.first == one.stop - 1 < segment.info().nodes - 1


@declares("loops", "streams")
def test_a_loop_may_fork_to_other_streams(kit: Kit) -> None:
    side = kit.side_stream()

    def forward(batch: Any) -> torch.Tensor:
        current = kit.streams.current_stream()
        side.wait_stream(current)
        with kit.streams.stream(side):
            doubled: torch.Tensor = batch.x * 2
        other: torch.Tensor = batch.x + 1
        current.wait_stream(side)
        return doubled + other

    loop = dg.Loop(steps=3, advance=lambda batch, out: batch.x.copy_(out))
    runner = runner_of(kit, forward, loop=loop)
    assert runner.stats().updates == {"loops": 3, "loop_nodes": ANY}
    for count in (3, 1, 4):
        x = kit.tensor(count, WIDTH, seed=count).round()
        want = torch.stack([3 * x + 1, 9 * x + 4, 27 * x + 13])
        kit.same(runner.run({"x": x}).outputs, want, f"{count} requests")


@declares("loops", "remakes_executables")
def test_dropped_executable_of_a_loop_is_rebuilt(kit: Kit) -> None:
    model = Counting(kit)
    runner = model.runner(kit, config={"policy": "full", "executable_budget": 0})
    for seed, left in enumerate([[3], [2, 9, 4], [1, 1, 1, 1], [5, 2], [3]]):
        model.check(kit, runner, left, seed)
    kept = runner.stats().executables
    assert kept is not None and kept.made >= 5 and kept.evicted >= 4


@declares("rng")
def test_a_loop_draws_as_single_steps_do(kit: Kit) -> None:
    def forward(batch: Any) -> Any:
        return batch.x + torch.rand_like(batch.x)

    loop = dg.Loop(steps=3, advance=lambda batch, out: batch.x.copy_(out))
    single, looped = runner_of(kit, forward), runner_of(kit, forward, loop=loop)
    x = kit.tensor(2, WIDTH)
    rng = kit.backend.get_rng_state()
    drawn = [single.run({"x": x}, clone=True)]
    for _ in range(2):
        drawn.append(single.run({"x": drawn[-1]}, clone=True))
    kit.backend.set_rng_state(rng)
    kit.same(looped.run({"x": x}).outputs, torch.stack(drawn), "the random numbers")


@declares("region_update")
def test_a_host_argument_holds_for_every_step_of_a_loop(kit: Kit) -> None:
    def grow(batch: Any, out: torch.Tensor) -> None:
        batch.host.length = 2

    def copy(batch: Any, out: torch.Tensor) -> None:
        batch.x.copy_(out)

    runner = runner_of(kit, summing, host_args={"length": 1}, loop=dg.Loop(steps=2, advance=copy))
    x = kit.tensor(3, WIDTH)
    for length in (2, 5, 2):
        first = x[:, :length].sum(1, keepdim=True) + x
        second = first[:, :length].sum(1, keepdim=True) + first
        out = runner.run({"x": x}, host_args={"length": length})
        kit.same(out.outputs, torch.stack([first, second]), f"the steps with {length}")
    with pytest.raises(dg.HostArgumentError, match="lengths"):
        runner_of(kit, summing, host_args={"length": 1}, loop=dg.Loop(steps=2, advance=grow))


def test_replays_are_timed_on_request(kit: Kit) -> None:
    runner = runner_of(kit, lambda batch: batch.x * 2)
    x = kit.tensor(3, WIDTH)
    runner.run({"x": x})
    assert all(bucket.times is None for bucket in runner.stats().buckets)
    runner.stats(timing=True)
    for _ in range(3):
        same(runner.run({"x": x}, clone=True), x * 2)
    kit.backend.synchronize()
    stats = runner.stats(timing=True)
    times = next(bucket.times for bucket in stats.buckets if bucket.key == "4")
    assert times is not None and times.seconds >= 0
    assert times.count == sum(times.bins) == 3
    assert 'replay_seconds_count{runner="decode",' in stats.to_prometheus()


def encode(batch: Any) -> torch.Tensor:
    """Sum the rows of each item. With integer values, sums are exact."""
    x = torch.where(batch.item_ids[:, None] >= 0, batch.x, 0)
    same_item: torch.Tensor = batch.item_ids[:, None] == batch.item_ids[None]
    return same_item.to(x.dtype) @ x


def check_items(kit: Kit, runner: dg.EncoderRunner, lengths: tuple[int, ...]) -> None:
    """Run items of these lengths, and fail unless each output depends only on its own item."""
    items = [kit.tensor(n, WIDTH, seed=i).round() for i, n in enumerate(lengths)]
    outputs = runner.run([{"x": item} for item in items])
    for item, output in zip(items, outputs, strict=True):
        same(output, item.sum(0).expand_as(item), f"an item of {len(item)} rows")


@pytest.mark.parametrize("policy", [*POLICIES, "disabled"])
def test_packed_items_equal_single_items(kit: Kit, policy: str) -> None:
    seen: list[tuple[list[int], list[int]]] = []
    runner = runner_of(
        kit,
        encode,
        kind=dg.EncoderRunner,
        budgets=[4, 8],
        max_items=3,
        config=policy,
        prepare=lambda batch: seen.append((batch.item_ids.tolist(), batch.offsets.tolist())),
    )
    for lengths in ((3, 2, 1), (1, 5, 2, 4, 3), (9, 8)):
        check_items(kit, runner, lengths)
    ids, starts = ([0, 0, 0, 1, 1, 2, -1, -1], [0, 3, 5, 6])
    assert ((ids, starts) in seen) == (policy != "disabled")
    if policy != "disabled":
        assert runner.stats().eager == {"over_largest_bucket": 1}
        assert runner.prove().ok


def test_least_recently_used_graph_is_evicted(kit: Kit) -> None:
    options: dict[str, Any] = {"budgets": [2, 4, 8], "max_graphs": 2, "max_items": 3}
    config = {"capture": "lazy", "lazy_hits": 1}
    runner = runner_of(kit, encode, kind=dg.EncoderRunner, config=config, **options)
    for length in (2, 4, 2, 8, 8, 2, 4):  # 8 evicts 4, then 4 evicts 8
        check_items(kit, runner, (length,))
    assert [graph.key.bucket for graph in runner.graphs.captured] == [4, 2]
    assert runner.stats().eager == {"not_captured": 3, "evicted": 1}
