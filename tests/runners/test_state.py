"""State of requests: right for every slot and batch, and free of earlier requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devgraph as dg
from tests.support.runner_steps import OFFSETS, decode_of

POLICIES = ("full", "breakable", "piecewise", "disabled")

X = dg.InputSlot("x", ("tokens", 3), torch.float32, pad=dg.Pad.fill(float("nan")))
STATE = [
    dg.StateSlot("total", (3,), torch.float64),
    dg.StateSlot("count", (), torch.int32),
]


def accumulate(batch: Any) -> torch.Tensor:
    """Add each token to the total of its request, after each token in steps of several."""
    width, slots = batch.width, batch.state_slots
    x = batch.x.view(-1, width, 3)
    total, count = batch.state.total[slots], batch.state.count[slots]
    means = []
    for token in range(width):
        total, count = total + x[:, token], count + 1
        means.append(total / count[:, None])
        if batch.state.history is not None:
            batch.state.history.total[token].index_copy_(0, slots, total)
            batch.state.history.count[token].index_copy_(0, slots, count)
    if batch.state.history is None:
        batch.state.total.index_copy_(0, slots, total)
        batch.state.count.index_copy_(0, slots, count)
    return torch.stack(means, 1).flatten(0, 1).float()


def test_a_step_of_several_tokens_that_keeps_no_history_is_refused():
    def step(batch: Any) -> torch.Tensor:
        batch.state.total.index_add_(0, batch.state_slots, batch.x[:: batch.width].double())
        return batch.x

    options = {"state": STATE[:1], "max_requests": 2, "variants": [{}, {"width": 2}]}
    with pytest.raises(dg.ConfigError, match=r"accepted= restores: batch.state.history.total\[t"):
        decode_of(step, (X,), outputs=dg.OutputSlot(rows="tokens"), **options)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_replaces_the_tensor_of_a_state_is_refused(policy: str):
    def step(batch: Any) -> torch.Tensor:
        batch.state.total += 0  # assigns the same tensor
        if replaces:
            batch.state.total = batch.state.total + 1
        return batch.x * 1

    replaces = policy == "disabled"
    options = {"state": STATE[:1], "max_requests": 2, "config": {"policy": policy}}
    runner = decode_of(step, (X,), **options)
    runner.assign(0)
    with pytest.raises(dg.CaptureError, match="state.total was replaced at .*test_state.py"):
        if replaces:
            runner.run({"x": rows_of(1)}, state_slots=[0])
        replaces = True
        decode_of(step, (X,), **options)


def runner_of(**options: Any) -> dg.DecodeRunner:
    options.setdefault("max_requests", 4)
    options.setdefault("outputs", dg.OutputSlot(rows="tokens"))
    runner = decode_of(accumulate, (X,), state=STATE, **options)
    for slot in range(runner.state.rows):
        runner.assign(slot)
    return runner


def rows(runner: dg.DecodeRunner, *values: float, **options: Any) -> list[float]:
    """Run a token of each value, and return the mean so far of each request."""
    return runner.run({"x": rows_of(*values)}, **options)[:, 0].tolist()


def rows_of(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)[:, None].repeat(1, 3)


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_follow_their_request_slots(policy: str):
    with runner_of(config=policy) as runner:
        assert rows(runner, 2, 4, state_slots=[3, 0]) == [2, 4]
        assert rows(runner, 8, 4, 6, state_slots=torch.tensor([0, 3, 1])) == [6, 3, 6]
        assert rows(runner, 0, state_slots=(1,)) == [3]
        runner.suspend()
        assert rows(runner, 3, 9, state_slots=[1, 0]) == [3, 7]
        runner.resume()
        assert rows(runner, 7, state_slots=[0]) == [7]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_slot_that_is_reused_never_shows_the_request_before_it(policy: str):
    """Poisoned state, a thousand times (fewer where a step is slow)."""
    generator = torch.Generator().manual_seed(0)
    times = 1000 if policy == "full" else 100
    with runner_of(config={"policy": policy, "buckets": [1, 4], "max_padding": 4}) as runner:
        for _ in range(times):
            for buffer in runner.state.buffers.values():
                buffer.fill_(7)
            slots = torch.randperm(4, generator=generator)[:2].tolist()
            for slot in slots:
                runner.assign(slot)
            a, b, c, d = torch.randint(9, (4,), generator=generator).tolist()
            assert rows(runner, a, b, state_slots=slots) == [a, b]
            assert rows(runner, c, d, state_slots=slots) == [(a + c) / 2, (b + d) / 2]


@pytest.mark.parametrize("policy", POLICIES)
def test_captures_leave_live_state_alone(policy: str):
    with runner_of(config=policy) as runner:
        rows(runner, 1, 2, 3, 4, state_slots=[0, 1, 2, 3])
        runner.state.buffers["total"][-1] = float("nan")  # the scratch row
        before = [buffer[:-1].clone() for buffer in runner.state.buffers.values()]
        runner.invalidate()
        runner.capture()
        if policy != "disabled":
            assert runner.prove().ok
        after = [buffer[:-1] for buffer in runner.state.buffers.values()]
        assert all(map(torch.equal, before, after))
        assert rows(runner, 3, 3, state_slots=[0, 2]) == [2, 3]


@pytest.mark.parametrize(
    "policy",
    [pytest.param(p, marks=[pytest.mark.slow] * (p == "piecewise")) for p in POLICIES],
)
def test_rows_roll_back_to_the_last_accepted_token(policy: str):
    with runner_of(config=policy, variants=[{}, {"width": 3}]) as runner:
        wide: dict[str, Any] = {"variant": {"width": 3}}
        assert rows(runner, 2, 4, state_slots=[2, 0]) == [2, 4]
        step = rows(runner, 4, 6, 8, 6, 8, 10, state_slots=[2, 0], **wide)
        assert step == [3, 4, 5, 5, 6, 7]
        # One token of slot 2, none of slot 0.
        step = rows(runner, 1, 2, 3, 0, 2, 4, state_slots=[0, 2], accepted=[0, 1], **wide)
        assert step == pytest.approx([2.5, 7 / 3, 2.5, 2, 2, 12 / 5])
        # All of slot 2, two of slot 0, and slot 1 begins.
        step = rows(runner, 7, 5, 12, state_slots=[1, 0, 2], accepted=[None, 2, 3])
        assert step == [7, 3, 4]
        # A step of one token is undone too.
        assert rows(runner, 9, state_slots=[0], accepted=[0]) == [4]
        state = runner.export_state(0, accepted=0)
        assert state["total"].tolist() == [7.0] * 3 and state["count"].item() == 3


def test_rollback_that_cannot_be_is_refused_before_anything_changed():
    with runner_of(variants=[{}, {"width": 3}]) as runner:
        wide: dict[str, Any] = {"variant": {"width": 3}}
        rows(runner, 1, 1, 1, state_slots=[0], **wide)
        for accepted, text in (
            ([4], "slot 0 has 4 accepted tokens, but only 3"),
            ([1, 1], "accepted has 2 entries, but needs one for each of the 1"),
            ([-1], "must be at least 0"),
            ([1.5], "must be an int"),
            (2, "accepted must be a list"),
        ):
            with pytest.raises(dg.InputError, match=text):
                rows(runner, 1, state_slots=[0], accepted=accepted)
        with pytest.raises(dg.InputError, match="but only 0 tokens of its last step"):
            rows(runner, 1, state_slots=[1], accepted=[1])
        assert rows(runner, 4, state_slots=[0], accepted=[2]) == [2]
        runner.assign(0)
        with pytest.raises(dg.InputError, match="but only 0 tokens of its last step"):
            rows(runner, 1, state_slots=[0], accepted=[1])
    with runner_of() as runner, pytest.raises(dg.InputError, match="steps of several tokens"):
        rows(runner, 1, state_slots=[0], accepted=[1])


@pytest.mark.parametrize("policy", ["full", "breakable", "disabled"])
def test_loop_leaves_requests_that_are_done_as_they_are(policy: str):
    def advance(batch: Any, outputs: Any) -> None:
        batch.x.add_(2)

    loop = dg.Loop(steps=4, advance=advance, done=lambda batch, outputs: outputs[:, 0] >= 5)
    with runner_of(config=policy, loop=loop) as runner:
        result = runner.run({"x": rows_of(1, 4)}, state_slots=[3, 1])
        assert result.taken.tolist() == [4, 2]
        assert result.outputs[:, :, 0].tolist() == [[1, 4], [2, 5], [3, 0], [4, 0]]
        assert runner.export_state(1)["count"].item() == 2
        assert runner.export_state(3)["total"][0].item() == 16
        with pytest.raises(dg.InputError, match="steps of several tokens"):
            runner.run({"x": rows_of(1)}, state_slots=[3], accepted=[1])


def last_total(hidden: torch.Tensor, batch: Any) -> torch.Tensor:
    return batch.state.total[batch.state_slots].float()


@dg.region(mutates=("x",))
def scan(x: torch.Tensor, batch: Any) -> None:
    starts = batch.offsets
    for index in range(len(starts) - 1):
        slot = batch.state_slots[index]
        mine = (torch.arange(len(x)) >= starts[index]) & (torch.arange(len(x)) < starts[index + 1])
        batch.state.total.index_add_(
            0, slot[None], (x * mine[:, None]).nan_to_num().sum(0)[None].double()
        )
        batch.state.count.index_add_(0, slot[None], mine.sum()[None].int())


def prefill_body(batch: Any) -> torch.Tensor:
    x = batch.x * 1
    scan(x, batch)
    return x


@pytest.mark.parametrize("policy", ["full", "breakable", "disabled"])
def test_prefill_by_chunks_hands_its_state_to_decode(policy: str):
    with (
        dg.PrefillRunner(
            prefill_body,
            [X, OFFSETS],
            tail=last_total,
            state=STATE,
            state_rows=4,
            config=policy,
            backend="cpu",
            max_tokens=8,
            max_requests=2,
        ) as prefill,
        runner_of(variants=[{}, {"width": 2}], share=prefill) as decode,
    ):
        prefill.capture()
        decode.assign(2)
        for chunk in ([1.0, 2.0, 3.0], [4.0]):
            prefill.run(
                {"x": rows_of(*chunk), "offsets": torch.tensor([0, len(chunk)])},
                state_slots=[2],
            )
        assert rows(decode, 10, 16, state_slots=[2], variant={"width": 2}) == [4, 6]
        # A second turn continues after the first of the two tokens.
        out = prefill.run(
            {"x": rows_of(5, 7), "offsets": torch.tensor([0, 1, 2])},
            state_slots=[2, 0],
            accepted=[1, None],
        )
        assert out[:, 0].tolist() == [25, 7]
        assert decode.stats().state_bytes == 0 < prefill.stats().state_bytes


def test_state_moves_to_another_runner_and_back():
    with runner_of() as runner, runner_of() as other:
        rows(runner, 1, 5, state_slots=[0, 2])
        rows(runner, 3, 5, state_slots=[0, 2])
        state = runner.export_state(0)
        assert {name: tensor.dtype for name, tensor in state.items()} == {
            "total": torch.float64,
            "count": torch.int32,
        }
        runner.assign(0)
        other.import_state(3, state)
        assert rows(other, 2, state_slots=[3]) == [2]
        assert rows(runner, 9, state_slots=[0]) == [9]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"total": None}, "'total' must be a tensor"),
        ({"total": torch.zeros(3)}, "'total' is .*; expected torch.float64"),
        ({"total": torch.zeros(4, dtype=torch.float64)}, "'total' is "),
        ({"total": torch.zeros(3, dtype=torch.float64, device="meta")}, "'total' is .* on meta"),
        ({"other": torch.zeros(3)}, "the state has count, other, total; this runner needs count"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_nothing_is_written(change: Any, text: str):
    with runner_of() as runner:
        rows(runner, 4, state_slots=[1])
        state = runner.export_state(1)
        with pytest.raises(dg.InputError, match=text):
            runner.import_state(1, {"count": torch.tensor(9, dtype=torch.int32), **state, **change})
        with pytest.raises(dg.InputTypeError, match="a mapping of names"):
            runner.import_state(1, [state])
        with pytest.raises(dg.InputError, match="has no names; this runner needs count, total"):
            runner.import_state(1, {})
        assert rows(runner, 2, state_slots=[1]) == [3]


def test_prove_finds_rows_of_other_requests_that_a_step_writes():
    def step(batch: Any) -> torch.Tensor:
        batch.state.count[: batch.requests].add_(1)
        return batch.x * 1

    with decode_of(step, (X,), state=STATE, max_requests=4) as runner:
        (cause,) = runner.prove().causes
        assert cause.startswith("the step writes state 'count' of requests in rows that belong to ")


def test_request_slot_that_was_never_assigned_is_refused():
    with decode_of(accumulate, (X,), state=STATE, max_requests=4) as runner:
        with pytest.raises(dg.InputError, match=r"missing input x; the runner has the slots x\."):
            runner.run({}, state_slots=[])
        runner.assign(1)
        for call in (
            lambda: rows(runner, 2, 4, state_slots=[1, 2]),
            lambda: runner.export_state(2),
        ):
            with pytest.raises(dg.InputError, match=r"slot 2 was never assigned; call assign\(2\)"):
                call()
        runner.import_state(2, runner.export_state(1))
        assert rows(runner, 2, 4, state_slots=[1, 2]) == [2, 4]


@pytest.mark.parametrize(
    ("slots", "kind", "text"),
    [
        (None, dg.InputError, "this runner has state; pass state_slots="),
        ([0, 0], dg.InputError, "contains a request slot twice"),
        ([0, 4], dg.InputError, "there is no request slot 4: the state has 4"),
        ([0, -1], dg.InputError, "at least 0, got -1"),
        ([0, "a"], dg.InputTypeError, "state_slots must be integers"),
        (3, dg.InputTypeError, "must be a list of integers"),
        (torch.zeros(2, 1), dg.InputTypeError, "must be a list of integers"),
        ([0], dg.InputError, "'x' is|'state_slots' is|width"),
    ],
)
def test_request_slots_that_cannot_be_are_refused(slots: Any, kind: Any, text: str):
    with runner_of(strict=True) as runner:
        rows(runner, 2, 4, state_slots=[1, 2])
        with pytest.raises(kind, match=text):
            rows(runner, 2, 4, state_slots=slots)
        assert rows(runner, 4, 4, state_slots=[1, 2]) == [3, 4]


def test_state_of_a_runner_without_any_is_refused():
    with decode_of(lambda batch: batch.x * 2, (X,)) as runner:
        for call in (
            lambda: runner.run({"x": rows_of(1)}, state_slots=[0]),
            lambda: runner.run({"x": rows_of(1)}, accepted=[1]),
            lambda: runner.assign(0),
            lambda: runner.export_state(0),
            lambda: runner.import_state(0, {}),
        ):
            with pytest.raises(
                dg.StateError, match=r"declares no state; pass state=\[dg.StateSlot"
            ):
                call()


def test_state_in_use_is_refused_after_close():
    runner = runner_of()
    runner.close()
    for call in (lambda: runner.assign(0), lambda: runner.export_state(0)):
        with pytest.raises(dg.StateError, match="closed"):
            call()


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (("1a", (), torch.float32), dg.ConfigError, "must be a Python identifier"),
        (("history", (), torch.float32), dg.ConfigError, "would hide batch.state.history"),
        (("h", (0,), torch.float32), dg.ConfigError, "at least 1, got 0"),
        (("h", ("tokens",), torch.float32), dg.ConfigTypeError, "must be an int"),
        (("h", (), "float32"), dg.ConfigTypeError, "needs a torch.dtype"),
    ],
)
def test_slot_that_cannot_be_is_refused(arguments: Any, kind: Any, text: str):
    with pytest.raises(kind, match=text):
        dg.StateSlot(*arguments)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"state": STATE[0]}, "state must be a list of StateSlot objects"),
        ({"state": ["total"]}, "state must contain StateSlot objects, got 'total'"),
        ({"state": [STATE[0], STATE[0]]}, "'total' is declared twice"),
        ({"state": STATE, "state_rows": 0}, "state_rows must be at least 8, got 0"),
    ],
)
def test_declarations_that_cannot_work_are_refused(options: Any, text: str):
    with pytest.raises(dg.ConfigError, match=text):
        decode_of(accumulate, (X,), captured=False, **options)


def test_runner_has_more_request_slots_than_a_batch_has_requests():
    with runner_of(state_rows=100, max_requests=2) as runner:
        assert rows(runner, 2, 4, state_slots=[99, 50]) == [2, 4]
        assert rows(runner, 4, state_slots=[99]) == [3]


def test_shared_state_is_the_same_or_refused():
    with runner_of() as runner:
        for state, options, text in (
            ([dg.StateSlot("total", (4,), torch.float64)], {}, "'total' is .* in the share="),
            (STATE, {"max_requests": 5}, "needs 5 request slots, but .* has 4"),
            ([*STATE, dg.StateSlot("more", (), torch.int8)], {}, "'more' is not in the share="),
        ):
            with pytest.raises(dg.ConfigError, match=text):
                decode_of(
                    accumulate, (X,), captured=False, state=state, share=runner,
                    **{"max_requests": 4, **options},
                )  # fmt: skip
        wide = runner_of(share=runner, variants=[{"width": 2}], max_requests=2)
        with pytest.raises(dg.ConfigError, match="needs 3 tokens of a step to roll back"):
            runner_of(share=runner, variants=[{"width": 3}], max_requests=1)
        rows(runner, 5, state_slots=[1])
        with pytest.raises(dg.InputError, match="but only 0 tokens of its last step"):
            rows(wide, 1, 1, state_slots=[1], accepted=[0])
        own = [dg.StateSlot("draft", (3,), torch.float64)]
        with decode_of(
            lambda batch: batch.state.draft[batch.state_slots].float() + batch.x,
            (X,), state=own, share=runner, max_requests=2,
        ) as draft:  # fmt: skip
            rows(runner, 5, state_slots=[0])
            draft.assign(0)
            assert rows(draft, 5, state_slots=[0]) == [5]
            assert draft.stats().state_bytes > 0


def test_unknown_state_is_named():
    with pytest.raises(AttributeError, match="no state 'totl'.* Did you mean 'total'"):
        decode_of(lambda batch: batch.state.totl, (X,), state=STATE)


def test_bytes_of_state_are_in_the_plan_and_in_the_budget():
    with runner_of() as runner:
        assert runner.plan().state_bytes == runner.state.nbytes >= 5 * (24 + 4)
        assert "state" in str(runner.stats())
    with runner_of(config={"graph_budget_bytes": 64}) as runner:
        assert {bucket.state for bucket in runner.plan().buckets} <= {"captured", "memory_budget"}
        assert runner.stats().eager == {}
        assert sum(bucket.state == "memory_budget" for bucket in runner.plan().buckets) >= 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint16], ids=str)
def test_state_has_a_dtype_of_its_own(dtype: torch.dtype):
    def step(batch: Any) -> torch.Tensor:
        bits = batch.state.h.view(torch.uint8 if dtype.itemsize == 1 else torch.int16)
        old = bits[batch.state_slots]
        bits.index_copy_(0, batch.state_slots, old + 1)
        for version in batch.state.history.h if batch.state.history else ():
            version.view(bits.dtype).index_copy_(0, batch.state_slots, old + 1)
        return old.float() + batch.x[:: batch.width, :2]

    state = [dg.StateSlot("h", 2, dtype)]
    with decode_of(step, (X,), state=state, max_requests=2, variants=[{}, {"width": 2}]) as runner:
        runner.assign(1)
        for turn in range(3):
            assert rows(runner, 0, state_slots=[1]) == [turn]
        moved = runner.export_state(1)
        assert moved["h"].dtype is dtype
        runner.import_state(0, moved)
        assert rows(runner, 0, state_slots=[0]) == [3]
        assert rows(runner, 0, state_slots=[0], accepted=[0]) == [3]
        runner.assign(0)
        assert rows(runner, 0, state_slots=[0]) == [0]
