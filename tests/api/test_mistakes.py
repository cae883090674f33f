"""Mistakes of a newcomer: each ends in the right result, or in an error that says what to do."""

from __future__ import annotations

import copy
import enum
import functools
import logging
import numbers
import pickle
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg

POLICIES = ("full", "breakable", "piecewise")
WIDTH = 8


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class Mode(enum.Enum):
    CAUSAL = 1


# Host arguments.


@pytest.mark.parametrize("value", [None, Mode.CAUSAL], ids=["none", "enum"])
def test_host_argument_that_code_compares_with_is_is_refused(value: Any):
    with pytest.raises(dg.HostArgumentError, match="'is', which cannot be noticed"):
        dg.capture(lambda x, *, n: x * 2, torch.ones(2), backend="cpu", host_args={"n": value})


def test_default_that_code_compares_with_is_must_be_passed_to_each_replay():
    @dg.region(host_args=("n",))
    def scaled(x, *, n):
        return x * n

    def step(x, *, n=None):
        return scaled(x, n=7 if n is None else n)

    x = torch.ones(2)
    with dg.capture(step, x, backend="cpu", host_args={"n": 2}) as captured:
        with pytest.raises(dg.HostArgumentError, match="missing host arguments: n"):
            captured.replay()
        assert torch.equal(captured.replay(n=3), step(x, n=3))


@pytest.mark.parametrize("policy", POLICIES)
def test_host_argument_behind_a_tuple_is_named_where_torch_takes_it(policy: str):
    def step(x, *, kv_len):
        return x + torch.full((WIDTH,), kv_len)

    with pytest.raises(dg.FrozenValueError, match="host argument 'kv_len' was consumed by torch's"):
        dg.capture(step, torch.ones(WIDTH), backend="cpu", policy=policy, host_args={"kv_len": 3})


def test_copy_of_a_tracked_value_is_still_tracked_and_pickling_one_is_refused():
    @dg.region(host_args=("n",))
    def scaled(x, *, n):
        return x * n

    def step(x, *, n):
        return scaled(x, n=copy.deepcopy(copy.copy(n)))

    x = torch.ones(2)
    with dg.capture(step, x, backend="cpu", host_args={"n": 2}) as captured:
        assert torch.equal(captured.replay(n=3), step(x, n=3))
    with pytest.raises(dg.FrozenValueError, match="pickle"):
        dg.capture(lambda x, *, n: pickle.dumps(n), x, backend="cpu", host_args={"n": 2})


def test_context_that_may_change_inside_is_refused_where_it_makes_a_key():
    class Step:
        scale = 2.0

    current = Step()

    @dg.region(context=lambda: current)
    def scaled(x, *, context):
        return x * context.scale

    x = torch.ones(2)
    with pytest.raises(dg.HostArgumentError, match=r"the context of .*scaled is a Step.*identity"):
        dg.capture(scaled, x, backend="cpu")
    with dg.capture(lambda x: scaled(x) + 1, x, backend="cpu", policy="breakable") as captured:
        current.scale = 5.0
        assert torch.equal(captured.replay(), x * 5 + 1)


# Bound arguments.


@pytest.mark.parametrize("policy", POLICIES)
def test_replaced_entry_of_a_bound_list_or_dict_is_refused(policy: str):
    caches = [torch.randn(2, 2), torch.randn(2, 2)]
    named = {"scale": torch.randn(2, 2)}

    def step(caches, named):
        return caches[0] @ caches[1] * named["scale"]

    with dg.capture(step, caches, named, backend="cpu", policy=policy) as captured:
        caches[1].normal_()
        assert torch.equal(captured.replay(), step(caches, named))
        kept, caches[1] = caches[1], torch.randn(2, 2)
        with pytest.raises(dg.StateError, match=r"entry 1 of a list .* copy_\(\)"):
            captured.replay()
        caches[1] = kept
        del named["scale"]
        with pytest.raises(dg.StateError, match="entry 'scale' of a dict"):
            captured.replay()


def test_proof_without_bound_tensors_says_that_the_data_was_the_same():
    batch = types.SimpleNamespace(x=torch.ones(2))
    with dg.capture(lambda batch: batch.x * 2, batch, backend="cpu") as captured:
        report = captured.prove()
        assert report.varied == 0
        assert "on the same data: no argument is a tensor" in str(report)
    with dg.capture(lambda x: x * 2, batch.x, backend="cpu") as captured:
        report = captured.prove()
        assert report.varied == 1
        assert str(report) == "3 replays equal eager bit for bit"


# Policy piecewise.


def test_host_read_in_a_compiled_piece_names_the_line_of_the_step():
    def step(x):
        return x * x.sum().item()  # the line

    with pytest.raises(dg.HostReadError, match=r"test_mistakes.py:\d+ in step: .*# the line"):
        dg.capture(step, torch.ones(2), backend="cpu", policy="piecewise")


def test_generator_in_a_traced_step_is_refused_with_the_line_of_the_call():
    generator = torch.Generator()

    def step(x):
        return x + torch.randn(2, generator=generator)  # the line

    with pytest.raises(dg.CaptureError, match="the call at .*# the line passes an object that no"):
        dg.capture(step, torch.ones(2), backend="cpu", policy="piecewise")


def test_object_handed_to_a_mark_is_refused_under_piecewise_with_what_it_takes():
    class Holder:
        scale = torch.ones(2)

    @dg.region(mutates=("out",))
    def scaled(x, holder, out):
        out.copy_(x * holder.scale)

    def step(x):
        out = torch.empty_like(x)
        scaled(x, Holder(), out)
        return out + 1

    with pytest.raises(dg.CaptureError, match=r"takes tensors, plain values.* use policy='break"):
        dg.capture(step, torch.ones(2), backend="cpu", policy="piecewise")


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")  # torch 2.11
def test_marked_method_is_refused_under_piecewise_with_what_a_mark_takes():
    class Layer:
        scale = torch.ones(2)

        @dg.region(mutates=("out",))
        def scaled(self, x, out):
            out.copy_(x * self.scale)

    layer = Layer()

    def step(x):
        out = torch.empty_like(x)
        layer.scaled(x, out)
        return out + 1

    with pytest.raises(dg.CaptureError, match=r"A marked function \(no method\) takes tensors"):
        dg.capture(step, torch.ones(2), backend="cpu", policy="piecewise")
    x = torch.ones(2)
    captured = dg.capture(step, x, backend="cpu", policy="breakable")
    x.fill_(3.0)
    assert captured.replay().tolist() == [4.0, 4.0]


# Runners.


def _decode(forward: Any, **options: Any) -> dg.DecodeRunner:
    slots = [
        dg.InputSlot("x", ("tokens", WIDTH), torch.float32, pad=dg.Pad.zero()),
        dg.InputSlot("scale", ("requests",), torch.float32, pad=dg.Pad.fill(1.0)),
    ]
    return dg.DecodeRunner(forward, slots, backend="cpu", max_requests=4, **options)


def _scaled(batch: Any) -> torch.Tensor:
    return batch.x * batch.scale[:, None]


@pytest.mark.parametrize("name", ["end", "over", "live"])
def test_slot_may_have_any_name_that_is_not_reserved(name: str):
    slot = dg.InputSlot(name, ("tokens",), torch.float32, pad=dg.Pad.zero())
    runner = dg.DecodeRunner(
        lambda batch: getattr(batch, name) * 2, [slot], backend="cpu", max_requests=2
    )
    runner.capture()
    for rows in (2, 5):  # in a graph, and eagerly
        assert torch.equal(runner.run({name: torch.ones(rows)}), torch.full((rows,), 2.0))
    runner.close()


def test_slots_that_disagree_about_the_batch_are_refused():
    runner = _decode(_scaled)
    runner.capture()
    with pytest.raises(dg.InputError, match="4 requests have only 3 tokens"):
        runner.run({"x": torch.ones(3, WIDTH), "scale": torch.ones(4)})
    runner.close()


def test_unknown_key_of_a_phase_lists_only_what_can_be_set():
    with pytest.raises(dg.ConfigError, match="Did you mean 'policy'") as caught:
        _decode(_scaled, config={"polcy": "full"})
    assert "explicit" not in str(caught.value)


def test_proof_of_a_runner_without_graphs_says_that_nothing_was_compared():
    runner = _decode(_scaled, config="disabled")
    runner.capture()
    report = runner.prove()
    assert not report.ok
    assert "nothing was compared" in str(report)
    runner.close()


def _alternate(runner: dg.DecodeRunner, **options: Any) -> None:
    batch = {"x": torch.ones(1, WIDTH), "scale": torch.ones(1)}
    runner.run(batch, **options)
    thread = threading.Thread(target=runner.run, args=(batch,), kwargs=options)
    thread.start()
    thread.join()
    runner.run(batch, **options)
    runner.run(batch, **options)


@pytest.mark.parametrize(("options", "times"), [({}, 1), ({"clone": True}, 0)])
def test_threads_that_take_turns_are_told_once_unless_they_copy(
    options: dict[str, bool], times: int, caplog: pytest.LogCaptureFixture
):
    runner = _decode(_scaled)
    runner.capture()
    with caplog.at_level(logging.WARNING, logger="devgraph"):
        _alternate(runner, **options)
    assert sum("clone=True" in record.getMessage() for record in caplog.records) == times
    runner.close()


def _prefill(policy: str, body: Any) -> dg.PrefillRunner:
    slots = [
        dg.InputSlot("x", ("tokens", WIDTH), torch.float32, pad=dg.Pad.zero()),
        dg.InputSlot("starts", ("requests+1",), torch.int64, pad=dg.Pad.last()),
    ]
    runner = dg.PrefillRunner(
        body,
        slots,
        tail=lambda hidden, batch: hidden[batch.starts[1:] - 1],
        config={"policy": policy, "buckets": [8, 16]},
        backend="cpu",
        max_tokens=16,
        max_requests=3,
    )
    runner.capture()
    return runner


SHAPES = ((3, 2), (20, 20), (5, 2, 9), (1, 2), (1, 1, 1, 1, 1), (2, 7))
"""Lengths of batches; (20, 20) has too many tokens for a graph, the ones too many requests."""


def _first_length_cases():
    """Yield inputs of batches, and their rows times the length of the first request."""
    for lengths in SHAPES:
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        x = torch.randn(sum(lengths), WIDTH)
        yield x, starts, (x * lengths[0])[starts[1:] - 1]


@pytest.mark.parametrize("policy", [*POLICIES, "disabled"])
def test_batch_that_a_step_keeps_shows_the_requests_of_the_run_after_eager_ones(policy: str):
    kept = {}

    @dg.region(mutates=("out",))
    def first_length(x, out):
        out.copy_(x * kept["batch"].starts[1])

    def body(batch):
        kept["batch"] = batch
        out = torch.empty_like(batch.x)
        first_length(batch.x, out)
        return out

    runner = _prefill(policy, body)
    for x, starts, expected in _first_length_cases():
        assert torch.equal(runner.run({"x": x, "starts": starts}), expected)
    runner.close()


@pytest.mark.parametrize("policy", ["breakable", "piecewise", "disabled"])
def test_region_reads_what_the_engine_keeps_of_the_step_by_context(policy: str):
    current = {"starts": torch.tensor([0, 1])}

    @dg.region(mutates=("out",), context=lambda: current["starts"])
    def first_length(x, out, *, context):
        out.copy_(x * context[1])

    def body(batch):
        out = torch.empty_like(batch.x)
        first_length(batch.x, out)
        return out

    runner = _prefill(policy, body)
    for x, starts, expected in _first_length_cases():
        current["starts"] = starts
        assert torch.equal(runner.run({"x": x, "starts": starts}), expected)
    runner.close()


def test_token_data_of_an_eager_step_that_is_over_is_refused():
    kept = {}

    @dg.region(mutates=("out",))
    def doubled(x, out):
        out.copy_(x + kept["batch"].x[: len(x)])

    def body(batch):
        kept["batch"] = batch
        out = torch.empty_like(batch.x)
        doubled(batch.x, out)
        return out

    runner = _prefill("breakable", body)
    over = {"x": torch.ones(20, WIDTH), "starts": torch.tensor([0, 20])}
    assert torch.equal(runner.run(over), torch.full((1, WIDTH), 2.0))
    with pytest.raises(dg.StateError, match="hand the batch, or the tensor, to the marked"):
        runner.run({"x": torch.ones(7, WIDTH), "starts": torch.tensor([0, 7])})
    runner.close()


# What an interactive session shows.


def test_captures_and_runners_show_what_they_are():
    captured = dg.capture(lambda x: x * 2, torch.ones(2), backend="cpu")
    assert repr(captured) == "<Captured full on cpu: 1 segment>"
    captured.close()
    assert repr(captured) == "<Captured full on cpu: closed>"
    runner = _decode(_scaled)
    assert repr(runner) == "<DecodeRunner decode: disabled on cpu, 0 of 3 graphs>"
    runner.capture()
    assert repr(runner) == "<DecodeRunner decode: full on cpu, 3 of 3 graphs>"
    runner.close()
    assert repr(runner) == "<DecodeRunner decode: closed on cpu, 0 of 3 graphs>"


def test_name_in_another_case_is_suggested():
    with pytest.raises(dg.UnknownBackendError, match="Did you mean 'cpu'"):
        dg.get_backend("CPU")


def test_unknown_name_of_the_package_carries_what_a_traceback_suggests_from():
    with pytest.raises(AttributeError) as caught:
        _ = dg.DecodRunner
    assert caught.value.obj is dg
    assert caught.value.name == "DecodRunner"


@functools.singledispatch
def is_number(value: object) -> bool:
    """Ask for the type by dispatch."""
    return False


@is_number.register
def _(value: int) -> bool:
    return True


@pytest.mark.parametrize(
    "ask",
    [
        lambda n: isinstance(n, int),
        lambda n: isinstance(n, torch.Tensor),
        lambda n: isinstance(n, numbers.Number),
        torch.is_tensor,
        is_number,
    ],
)
def test_type_of_a_host_argument_is_not_asked_for_outside_a_region_under_piecewise(
    ask: Callable[[Any], bool],
):
    @dg.region(host_args=("kv_len",))
    def scaled(x, *, kv_len):
        return x * kv_len

    def step(x, *, kv_len):
        if ask(kv_len):
            x = x + 1
        return scaled(x, kv_len=kv_len)

    x = torch.randn(4)
    with pytest.raises(dg.FrozenValueError, match=r"isinstance\(\).*test_mistakes.py.*'kv_len'"):
        dg.capture(
            step, x, policy="piecewise", backend="cpu", compiler="eager", host_args={"kv_len": 2}
        )
    with dg.capture(step, x, policy="breakable", backend="cpu", host_args={"kv_len": 2}) as cap:
        assert torch.equal(cap.replay(kv_len=5), step(x, kv_len=5))


# Marks where a graph cannot run them again.


@dg.region(host_args=("n",))
def scaled_rows(x: torch.Tensor, *, n: int) -> torch.Tensor:
    """A region that returns a new tensor."""
    return x * n


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_region_inside_a_transform_is_refused_by_name(policy: str, transform: str):
    def vmap(x, *, n):
        return torch.vmap(lambda row: scaled_rows(row, n=n))(x)

    def grad(x, *, n):
        return torch.func.grad(lambda y: scaled_rows(y, n=n).sum())(x)

    step = {"vmap": vmap, "grad": grad}[transform]
    with pytest.raises(
        dg.CaptureError,
        match=rf"scaled_rows was called inside a transform .* in <lambda>.*{transform}",
    ):
        dg.capture(step, torch.ones(3, 4), policy=policy, backend="cpu", host_args={"n": 2})


def test_region_without_host_values_may_lie_inside_a_transform_in_one_graph():
    @dg.region
    def doubled(x):
        return x * 2

    x = torch.randn(3, 4)
    with dg.capture(torch.vmap(doubled), x, policy="full", backend="cpu") as captured:
        x.copy_(torch.randn(3, 4))
        assert torch.equal(captured.replay(), x * 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_transform_inside_a_region_is_right(policy: str):
    @dg.region(host_args=("n",))
    def rows(x, *, n):
        return torch.vmap(lambda row: row * n + row.sum())(x)

    def step(x, *, n):
        return rows(x, n=n) + 1

    x = torch.randn(3, 4)
    with dg.capture(step, x, policy=policy, backend="cpu", host_args={"n": 2}) as captured:
        x.copy_(torch.randn(3, 4))
        assert torch.equal(captured.replay(n=5), step(x, n=5))


def test_region_that_reads_a_value_is_asked_for_a_description_of_its_result_under_piecewise():
    @dg.region(host_args=("n",))
    def read(x, *, n):
        return x * n * x.sum().item()

    def step(x, *, n):
        return read(x, n=n) + 1

    x = torch.randn(3, 4)
    options = {"policy": "piecewise", "backend": "cpu", "host_args": {"n": 2}}
    with pytest.raises(
        dg.CaptureError, match=r"read returns .*reads device data.* Give its mark fake="
    ):
        dg.capture(step, x, **options)

    @dg.region(host_args=("n",), fake=lambda x, *, n: torch.empty_like(x))
    def told(x, *, n):
        return x * n * x.sum().item()

    def other(x, *, n):
        return told(x, n=n) + 1

    with dg.capture(other, x, **options) as captured:
        x.copy_(torch.randn(3, 4))
        assert torch.equal(captured.replay(n=5), other(x, n=5))


@pytest.mark.parametrize(
    ("policy", "kind", "message"),
    [
        ("full", dg.CaptureError, "fast raised NotImplementedError"),
        ("breakable", dg.CaptureError, "fast raised NotImplementedError"),
        ("piecewise", NotImplementedError, "too small"),  # no trace holds the step's except
    ],
)
def test_step_that_catches_what_a_region_raises_is_refused(
    policy: str, kind: type[Exception], message: str
):
    @dg.region(host_args=("n",), fake=lambda y, *, n: torch.empty_like(y))
    def fast(y, *, n):
        raise NotImplementedError("too small")

    def step(x, n):
        y = x + 1
        try:
            y = fast(y, n=n)
        except NotImplementedError:
            y = y * 7
        return y + 1

    x = torch.ones(2)
    with pytest.raises(kind, match=message):
        dg.capture(step, x, policy=policy, backend="cpu", host_args={"n": 2})
    with dg.capture(lambda x: x + 1, x, policy=policy, backend="cpu") as captured:
        assert torch.equal(captured.replay(), x + 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_positional_arguments_before_a_host_argument_by_keyword_all_arrive(policy: str):
    @dg.region(host_args=("n",), derive={"half": lambda n: n // 2})
    def total(x, *rest, n, half):
        return x * n + sum(rest) + half

    def step(x, *, n):
        return total(x, 1.0, 10.0, n=n) + 1

    x = torch.randn(2)
    with dg.capture(step, x, policy=policy, backend="cpu", host_args={"n": 4}) as captured:
        want = x * 6 + 11.0 + 3 + 1
        assert torch.equal(captured.replay(n=6), want)
        assert torch.equal(step(x, n=6), want)


def test_host_argument_by_position_before_nameless_ones_is_refused():
    @dg.region(host_args=("n",))
    def total(x, n, *rest):
        return x * n + sum(rest)

    @dg.region(host_args=("n",))
    def scaled(x, n, y, /):
        return x * n + y

    x = torch.randn(2)
    for step in (lambda x, n: total(x, n, 1.0), lambda x, n: scaled(x, n, x)):
        with pytest.raises(dg.HostArgumentError, match="'n' by position.*keyword"):
            dg.capture(step, x, backend="cpu", host_args={"n": 4})


def test_what_can_be_marked_needs_parameters_and_no_module():
    with pytest.raises(dg.InputTypeError, match="Mark a function of your own"):
        dg.region(torch.relu)
    names: dict[str, Any] = {}
    exec("def f(x):\n    return x * 2", names)
    assert torch.equal(dg.region(names["f"])(torch.ones(2)), torch.full((2,), 2.0))


@pytest.mark.parametrize("policy", POLICIES)
def test_trainable_region_is_captured_and_proven_under_an_outer_autocast(policy: str):
    linear = torch.nn.Linear(WIDTH, WIDTH)

    @dg.region
    def project(x):
        return linear(x)

    def step(x):
        return project(x * 2) + 1

    x = torch.randn(4, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        captured = dg.capture(step, x, policy=policy, backend="cpu")
        x.copy_(torch.randn(4, WIDTH))
        assert torch.equal(captured.replay(), step(x))
        with torch.no_grad():
            linear.weight.fill_(1.0)
            torch.clear_autocast_cache()
        assert torch.equal(captured.replay(), step(x))
    assert captured.prove().ok
    captured.close()


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_torch_works_on_after_a_region_raised_in_an_inference_block(policy: str):
    runs = []

    @dg.region
    def body(x):
        runs.append(1)
        if len(runs) == 2:
            raise MemoryError("out of memory")
        return x * 2

    def step(x):
        with torch.inference_mode():
            return body(x + 1) + 1

    x = torch.randn(3)
    with pytest.raises(MemoryError):
        dg.capture(step, x, policy=policy, backend="cpu", warmup=1)
    assert torch.equal(x + 1, x.clone().add_(1))
    with dg.capture(step, x, policy=policy, backend="cpu") as captured:
        assert torch.equal(captured.replay(), step(x))
