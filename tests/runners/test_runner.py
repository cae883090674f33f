"""Runner: steps, sharing, threads, reentrancy and lifecycle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph import Reason
from devgraph.runners import Decision, GraphKey, InputSlot, Pad
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
    CacheStep,
    X,
    decode_of,
    double,
    double_runner,
    rows_of_x,
)


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


def test_errors_of_the_step_tell_eager_runs_from_captures():
    def step(batch):
        if batch.requests != 8 or batch.variant:
            raise KeyError("step")
        return batch.x * 1

    runner = decode_of(step, (X,), captured=False)
    with pytest.raises(KeyError) as eager:
        runner.run({"x": rows_of_x(3)})
    assert "in an eager step of decode (not_captured), 3 requests" in eager.value.__notes__[0]
    with pytest.raises(KeyError) as captured:
        runner.capture()
    assert "in the capture of decode, bucket 4, which calls" in captured.value.__notes__[0]
    with pytest.raises(KeyError) as first:
        decode_of(step, (X,), variants=[{}, {"lora": True}], config={"buckets": [8]})
    assert first.value.__notes__[0] == "in the first run of decode, bucket 8 (lora=True)"


@pytest.mark.parametrize("sizes", [{}, {"buckets": [3, 999], "align": 5}])
def test_disabled_is_eager_by_choice_and_captures_nothing(sizes):
    runner = double_runner(config={"policy": "disabled", **sizes}, strict=True)
    assert torch.equal(runner.run({"x": rows_of_x(2)}), rows_of_x(2) * 2)
    assert runner.stats().requested == runner.effective_policy == "disabled"
    assert runner.stats().eager == {"disabled": 1}
    assert runner.plan().buckets == ()


def test_listed_buckets_are_kept_and_what_they_leave_out_is_said(
    caplog: pytest.LogCaptureFixture,
):
    runner = double_runner(config={"buckets": [2, 1]})
    assert list(runner.buckets) == [1, 2]
    assert runner.can_run(3).reason == "over_largest_bucket"
    said = [one.message for one in caplog.records if "run eagerly" in one.message]
    assert said == [
        "decode: steps of 3 to 8 requests run eagerly, because no bucket of [1, 2] is at least as "
        "large and at most 2 times as large"
    ]
    double_runner(config={"buckets": [2, 1]}, strict=True)
    assert "steps of 3 to 8 requests raise an error (strict), because" in caplog.text


def test_tensor_in_place_of_the_inputs_is_refused_without_a_warning_of_torch():
    with pytest.raises(dg.InputTypeError, match="must be a mapping of slot names to tensors, got"):
        double_runner().run(rows_of_x(2))  # type: ignore[arg-type]


def test_buckets_that_leave_nothing_out_say_nothing(caplog: pytest.LogCaptureFixture):
    for config in (None, {"buckets": [1, 2, 4, 8]}, {"policy": "disabled", "buckets": [2]}):
        double_runner(config=config, captured=False)
    assert "run eagerly" not in caplog.text


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


def test_a_refused_runner_changes_nothing_of_the_pool_of_others():
    pool = dg.get_backend("cpu").make_pool()
    for wrong in ({"outputs": 3}, {"host_args": {"self": 1}}, {"group": 3}):
        with pytest.raises(dg.ConfigError):
            decode_of(double, (X,), pool=pool, config={"executable_budget": 1000}, **wrong)
    assert pool.recordings.budget_bytes is None


def test_input_slots_may_come_from_a_generator():
    runner = decode_of(double, (X,), captured=False)
    made = dg.DecodeRunner(double, (slot for slot in (X,)), max_requests=8, backend="cpu")
    assert made.plan().input_bytes == runner.plan().input_bytes


def test_a_rank_without_requests_replays_the_decided_bucket():
    step = CacheStep()
    runner = decode_of(step)
    step.cache.zero_()
    assert runner.run(None, decision=runner.agree(runner.can_run(4))) is None
    assert step.cache[:31].eq(0).all()
    stats = runner.stats()
    assert (stats.graph_steps, stats.idle_steps) == (1, 1)
    assert runner.run(None, decision=runner.agree(None)) is None
    assert runner.run(None, decision=Decision(Reason.VOTED_EAGER)) is None
    assert runner.stats().eager == {"empty_batch": 1, "voted_eager": 1}
    with pytest.raises(dg.InputTypeError, match="pass the result of agree"):
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


def test_what_cannot_be_shared_is_refused_or_stays_its_own():
    first = double_runner(max_requests=4)
    with pytest.raises(dg.ConfigError, match="the runner with the larger batches first"):
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


def test_a_batch_without_rows_replays_the_variant_of_its_decision():
    runner = decode_of(double, (X,), config={"buckets": [4]}, variants=[{}, {"lora": True}])
    for variant in ((("lora", True),), ()):
        runner.run(
            {"x": rows_of_x(0)}, variant={}, decision=Decision(Reason.GRAPH, GraphKey(variant, 4))
        )
    assert {bucket.key: bucket.hits for bucket in runner.stats().buckets} == {
        "4": 1,
        "4 (lora=True)": 1,
    }


def test_replays_have_ranges_in_a_profile() -> None:
    plain, ranged = double_runner(), double_runner(ranges=True, name="target")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for runner in (plain, ranged):
            runner.run({"x": torch.ones(3, 3)})
    names = [event.name for event in profile.events()]
    assert names.count("target 4") == 1 and not any(name.startswith("decode") for name in names)
