"""Runners on the backend under test: batches and inputs that do not fit, and the end of life."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.steps import (
    WIDTH,
    Model,
    X,
    batch_of,
    check_decode,
    decoder,
)
from devgraph.testing.conformance.support import Kit, same


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
    runner = dg.DecodeRunner(
        lambda batch: batch.x * 2, [X], backend=kit.backend, max_requests=4, progress=False
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
        model.cache.set_(torch.zeros_like(kept).untyped_storage(), 0, kept.shape, kept.stride())
    with pytest.raises(dg.StateError, match="cache"):
        runner.run(batch_of(kit, 3))
    with torch.no_grad():
        model.cache.set_(kept.untyped_storage(), 0, kept.shape, kept.stride())
    check_decode(kit, runner, model, 3, seed=2)


def test_bound_tensor_that_lies_in_the_outputs_is_refused(kit: Kit) -> None:
    """FAULTS 8."""
    table = kit.tensor(8, WIDTH)
    bound = table.detach()
    runner = dg.DecodeRunner(
        lambda batch: batch.x + bound[:1],
        [X],
        backend=kit.backend,
        max_requests=8,
        progress=False,
        bound={"bound": bound},
    )
    runner.capture()
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
    got = runner.run({"x": x})
    kit.backend.synchronize()
    same(got, x + table[:1])


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
    check_decode(kit, runner, model, 3, seed=1)
    assert len(refused) >= 3
    nested.clear()
    check_decode(kit, draft, draft_model, 3, seed=2)


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
    check_decode(kit, runner, model, 3, seed=1)
    nested.append(True)
    runner.run(batch_of(kit, 3))
    assert not nested
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
