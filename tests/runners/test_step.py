"""What surrounds the graph of a runner: the notes of its errors, and leases of shared outputs."""

from __future__ import annotations

import functools
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import BREAKING, WIDTH, Kit, runner_of, same
from tests.support.runner_steps import OFFSETS, X, decode_of, rows_of_x


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("policy", BREAKING)
def test_an_error_in_a_replay_names_segment_mark_and_bucket(
    kit: Kit, policy: str, debug: bool
) -> None:
    broken: list[Exception] = []

    @dg.no_graph(mutates=("x",))
    def fragile(x: torch.Tensor) -> None:
        if broken:
            raise broken[0]
        x.add_(1)

    def forward(batch: Any) -> torch.Tensor:
        x: torch.Tensor = batch.x * 2
        fragile(x)
        return x * 3

    runner = runner_of(kit, forward, config=policy, debug=debug)
    x = kit.tensor(3, WIDTH)
    same(runner.run({"x": x}, clone=True), (x * 2 + 1) * 3)
    broken.append(ValueError("a fault of the engine"))
    with pytest.raises(ValueError, match="a fault of the engine") as caught:
        runner.run({"x": x})
    assert caught.value is broken.pop()
    notes = "\n".join(caught.value.__notes__)  # type: ignore[attr-defined]
    assert "segment 1 of 3, <eager " in notes and "fragile" in notes
    assert "decode, bucket 4" in notes
    same(runner.run({"x": x}, clone=True), (x * 2 + 1) * 3)


def test_a_lease_ends_with_the_run_of_a_runner_that_shares_the_outputs(kit: Kit) -> None:
    target = runner_of(kit, lambda batch: batch.x * 2, debug=True, max_requests=8, name="target")
    draft = runner_of(kit, lambda batch: batch.x * 3, debug=True, share=target, name="draft")
    x = kit.tensor(2, WIDTH)
    out = target.run({"x": x})
    same(out + 0, x * 2)
    draft.run({"x": x})
    with pytest.raises(dg.StaleOutputError, match="target and draft"):
        out + 0


class _Engine:
    """What a step names: a tensor, a number and a counter of its own."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight, self.scale, self.calls, self.replaces = weight, 2.0, 0, False

    def forward(self, batch: Any) -> torch.Tensor:
        self.calls += 1
        if self.replaces:
            self.weight = self.weight + 1
        result: torch.Tensor = batch.x * self.weight * self.scale
        return result

    def __call__(self, runner: Any, x: torch.Tensor) -> torch.Tensor:
        """Run a step, and change what only the engine around the step uses."""
        self.steps = getattr(self, "steps", 0) + 1
        self.last: torch.Tensor = runner.run({"x": x}, clone=True)
        return self.last


@pytest.mark.parametrize("name", ["weight", "scale"])
@pytest.mark.parametrize("policy", BREAKING)
def test_what_a_step_names_must_not_change_between_replays(
    kit: Kit, policy: str, name: str
) -> None:
    engine = _Engine(kit.tensor(WIDTH, seed=1))
    runner = runner_of(kit, engine.forward, config=policy)
    x, old = kit.tensor(3, WIDTH), getattr(engine, name)
    for _ in range(3):
        same(engine(runner, x), engine.forward(SimpleNamespace(x=x)))
    setattr(engine, name, old * 3)
    for _ in range(2):
        with pytest.raises(dg.StateError, match=rf"{name}.*invalidate\(\) and capture\(\)"):
            runner.run({"x": x})
    setattr(engine, name, old)
    same(runner.run({"x": x}, clone=True), engine.forward(SimpleNamespace(x=x)))
    setattr(engine, name, old * 3)
    runner.invalidate()
    runner.capture()
    same(runner.run({"x": x}, clone=True), engine.forward(SimpleNamespace(x=x)))


def test_wrapped_step_is_watched_like_others(kit: Kit) -> None:
    """A history of state and a tail under ``full`` put a function of devgraph around the step."""
    engine = _Engine(kit.tensor(WIDTH, seed=1))
    x = {"x": kit.tensor(2, WIDTH)}
    state = [dg.StateSlot("h", (1,), torch.float32)]

    def with_history(batch: Any) -> torch.Tensor:
        if batch.variant:
            for history in batch.state.history.h:
                history.index_fill_(0, batch.state_slots, 0)
        return engine.forward(batch)

    variants, tokens = [{}, {"width": 2}], dg.OutputSlot(rows="tokens")
    decode = runner_of(kit, with_history, state=state, variants=variants, outputs=tokens)
    decode.assign(0)
    decode.assign(1)
    prefill = dg.PrefillRunner(
        engine.forward,
        [dg.InputSlot("x", ("tokens", WIDTH), torch.float32, pad=dg.Pad.zero()), OFFSETS],
        tail=lambda hidden, batch: hidden[batch.offsets[1:] - 1],
        backend=kit.backend,
        config={"policy": "full", "buckets": [4]},
        max_tokens=4,
        max_requests=2,
    )
    prefill.capture()
    engine.scale = 3.0
    with pytest.raises(dg.StateError, match="scale is 3.0 and was 2.0"):
        decode.run(x, state_slots=[0, 1])
    with pytest.raises(dg.StateError, match="scale is 3.0 and was 2.0"):
        prefill.run(x | {"offsets": torch.tensor([0, 1, 2])})


def test_python_state_that_a_step_changes_is_named_once(
    kit: Kit, caplog: pytest.LogCaptureFixture
) -> None:
    engine = _Engine(kit.tensor(WIDTH, seed=1))
    with caplog.at_level(logging.WARNING):
        runner_of(kit, engine.forward).capture()
    assert caplog.text.count("changed Python state: self.calls from ") == 1


def test_list_that_grows_in_captures_is_named(kit: Kit, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []

    def step(batch: Any) -> torch.Tensor:
        seen.append(1)
        result: torch.Tensor = batch.x * 2
        return result

    runner_of(kit, step, config={"buckets": [2]}).capture()
    assert "changed Python state: len(seen) from " in caplog.text


@pytest.mark.parametrize("policy", BREAKING)
def test_step_that_replaces_a_tensor_which_it_names_is_refused(kit: Kit, policy: str) -> None:
    engine = _Engine(kit.tensor(WIDTH, seed=1))
    engine.replaces = True
    with pytest.raises(dg.CaptureError, match=r"replaces .*weight"):
        runner_of(kit, engine.forward, config=policy)


_CAST = functools.partial(torch.autocast, "cpu", torch.bfloat16)
_HALVES = ("full", "breakable", "emulated")


def _product(batch):
    return batch.x @ torch.linspace(-1, 1, 12).reshape(3, 4).sin()


def _cast_runner(how, **options):
    config = {"buckets": [2, 4], "policy": "breakable" if how == "breakable" else "full"}
    if how == "emulated":
        config["emulate"] = True
    return decode_of(_product, (X,), config=config | options, captured=False)


@pytest.mark.parametrize("how", _HALVES)
@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("running", [False, True])
def test_all_steps_run_under_the_autocast_of_capture(how, capturing, running):
    x = rows_of_x(2).sin()
    with _CAST(enabled=capturing):
        want = _product(SimpleNamespace(x=x))
    with _cast_runner(how) as runner:
        with _CAST(enabled=capturing):
            runner.capture()
        with _CAST(enabled=running):
            graph = runner.run({"x": x}, clone=True)
            runner.suspend()
            eager = runner.run({"x": x}, clone=True)
            runner.resume()
            torch.testing.assert_close([graph, eager], [want, want], rtol=0, atol=0)
            assert runner.prove().ok
            assert torch.is_autocast_enabled("cpu") == running


@pytest.mark.parametrize(
    "options", [{"capture": "lazy", "lazy_hits": 1}, {"capture": "background"}]
)
def test_captures_between_steps_have_the_autocast_of_the_steps(options):
    x = rows_of_x(2).sin()
    with _cast_runner("full", **options) as runner:
        with _CAST():
            want = _product(SimpleNamespace(x=x))
            first = runner.run({"x": x}, clone=True)
        while runner.idle():
            pass
        later = [runner.run({"x": x}, clone=True)]
        with _CAST():
            later.append(runner.run({"x": x}, clone=True))
        torch.testing.assert_close([first, *later], [want] * 3, rtol=0, atol=0)


def test_captures_anew_have_the_autocast_of_their_caller():
    def step(batch):
        return _product(batch).float()

    x = rows_of_x(2).sin()
    with decode_of(step, (X,), config={"buckets": [2]}) as runner:
        plain = runner.run({"x": x}, clone=True)
        runner.invalidate()
        with _CAST():
            assert torch.equal(runner.run({"x": x}, clone=True), plain)
            runner.capture()
            want = step(SimpleNamespace(x=x))
        assert not torch.equal(want, plain)
        assert torch.equal(runner.run({"x": x}, clone=True), want)


def test_tail_runs_under_the_autocast_of_capture():
    weight = torch.linspace(-1, 1, 12).reshape(3, 4).sin()
    with dg.PrefillRunner(
        lambda batch: batch.x * 2,
        [X, OFFSETS],
        tail=lambda hidden, batch: hidden @ weight,
        outputs=dg.OutputSlot(rows="tokens"),
        config={"buckets": [4]},
        backend="cpu",
        max_tokens=4,
        max_requests=2,
    ) as runner:
        inputs = {"x": rows_of_x(4).sin(), "offsets": torch.tensor([0, 4])}
        runner.capture()
        plain = runner.run(inputs, clone=True)
        assert plain.dtype is torch.float32
        with _CAST():
            assert torch.equal(runner.run(inputs, clone=True), plain)
            assert runner.stats().graph_steps == 2
            runner.suspend()
            assert torch.equal(runner.run(inputs, clone=True), plain)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("dummy", [False, True])
@pytest.mark.parametrize("policy", ["full", "breakable", "disabled"])
def test_empty_batch_has_an_empty_result(policy, dummy, captured):
    """FAULTS 5."""
    calls = []

    def step(batch):
        calls.append(batch.requests)
        return {"y": batch.x[:, :2] * 2, "total": batch.x.sum()}

    outputs = {"y": dg.OutputSlot(), "total": dg.OutputSlot(rows=None)}
    options = {"config": policy, "idle_dummy": dummy, "outputs": outputs, "captured": captured}
    with decode_of(step, (X,), **options) as runner:
        before = len(calls)
        for _ in range(2):
            result = runner.run({"x": torch.ones(0, 3)})
            assert [tuple(result[n].shape) for n in ("y", "total")] == [(0, 2), ()]
            assert result["y"].dtype is torch.float32
        if captured and not dummy and policy != "disabled":
            assert len(calls) == before
        assert runner.run({"x": torch.ones(2, 3)})["y"].tolist() == [[2, 2], [2, 2]]


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_empty_result_goes_through_the_tail(policy):
    with dg.PrefillRunner(
        lambda batch: batch.x * 2,
        [X, OFFSETS],
        tail=lambda hidden, batch: hidden[batch.offsets[1:] - 1, :2],
        config={"buckets": [4], "policy": policy},
        backend="cpu",
        max_tokens=4,
        max_requests=2,
    ) as runner:
        for _ in range(2):  # before and after the capture
            empty = runner.run({"x": torch.ones(0, 3), "offsets": torch.tensor([0])})
            assert empty.shape == (0, 2)
            runner.capture()
