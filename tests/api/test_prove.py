"""What a proof says of the data that it had."""

from __future__ import annotations

import gc
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.prove import compare
from devgraph.testing.conformance.support import POLICIES, Kit, same


def test_report_names_what_was_not_varied():
    """FAULTS 51."""

    class Batch:
        def __init__(self) -> None:
            self.x = torch.ones(2)

    batch = Batch()
    with dg.capture(lambda batch: batch.x * 2, batch, backend="cpu") as captured:
        report = captured.prove()
        assert report.not_varied == ("batch.x",)
        assert (
            str(report) == "3 cases: graphs equal eager bit for bit; not varied: batch.x "
            "(sample= or host_args= vary them)"
        )
    with dg.capture(lambda x, ids: x * ids, batch.x, torch.arange(2), backend="cpu") as captured:
        assert captured.prove().not_varied == ("ids",)
        report = captured.prove(
            sample={"ids": lambda shape, g: torch.randint(9, shape, generator=g)}
        )
        assert report.not_varied == ()
        assert str(report) == "3 cases: graphs equal eager bit for bit"


def test_proof_of_integers_draws_on_the_host_whatever_the_default_device_is():
    table, rows, memory = torch.randn(8), torch.arange(8), torch.zeros(12)
    one, other = memory[0:6:2], memory[1:6:2]
    with torch.device("meta"):
        with dg.capture(lambda table, rows: table[rows], table, rows, backend="cpu") as captured:
            assert captured.prove().ok
        with dg.capture(lambda one, other: one + other, one, other, backend="cpu") as captured:
            assert captured(one, one.clone()).equal(one * 2)


def test_prove_finds_a_branch_on_data_that_was_frozen(kit: Kit) -> None:
    flag = {"negate": False}
    x = kit.tensor(8)

    def step(x: torch.Tensor) -> torch.Tensor:
        return -x if flag["negate"] else x + 0.0

    captured = kit.capture(step, x)
    assert captured.prove().ok
    flag["negate"] = True
    assert not captured.prove().ok


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_prove_finds_a_sign_of_zero_that_differs(kit: Kit, policy: str) -> None:
    zero = [0.0]

    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, zero[0])

    captured = kit.capture(step, kit.tensor(8), policy=policy)
    assert captured.prove().ok
    zero[0] = -0.0
    (failure,) = captured.prove(cases=1).failures
    assert failure.message == "differs in 8 of 8 elements, first at (0,): 0.0 not -0.0"


def test_tensors_are_compared_by_their_bits() -> None:
    zeros = torch.tensor([0.0, -0.0, 1.0])
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert compare(nans, nans.clone()) == ""
    assert compare(zeros, zeros.abs()).endswith("1 of 3 elements, first at (1,): 0.0 not -0.0")
    assert compare(nans, nans.flip(0)).endswith(
        "2 of 2 elements, first at (0,): nan with different bits"
    )
    turned = torch.complex(zeros, zeros).conj()
    assert compare(turned, turned.resolve_conj()) == compare(turned[:0], turned[:0]) == ""
    assert compare(zeros[:0].sum(), -zeros[:0].sum()).startswith("differs in 1 of 1")
    for narrow in (torch.float8_e4m3fn, torch.bfloat16, torch.bool, torch.int64):
        assert compare(zeros.to(narrow), zeros.to(narrow).clone()) == ""
    spread = zeros.expand(2, 3).t()
    assert compare(spread, spread.contiguous()) == ""


def test_prove_without_cases_is_not_ok(kit: Kit) -> None:
    captured = kit.capture(lambda x: x + 1, kit.tensor(8))
    report = captured.prove(cases=0)
    assert not report.ok and not report
    assert str(report) == "nothing was compared: no graph is captured, or no case was requested"
    assert not captured.prove(host_args=[]).ok


def test_prove_runs_every_set_of_host_arguments(kit: Kit) -> None:
    seen = []

    @dg.region(host_args=("n",))
    def body(x: torch.Tensor, *, n: int) -> torch.Tensor:
        seen.append(n)
        return x[:n].sum() + x

    def step(x: torch.Tensor, *, n: int) -> Any:
        return body(x * 2, n=n)

    captured = kit.capture(step, kit.tensor(8), policy="breakable", host_args={"n": 2})
    seen.clear()
    report = captured.prove(cases=2, host_args=[{"n": 3}, {"n": 7}])
    assert report.cases == 4
    assert report.ok and report, str(report)
    assert set(seen) == {3, 7}


@pytest.mark.parametrize("policy", POLICIES)
def test_prove_is_ok_for_a_right_capture(kit: Kit, policy: str) -> None:
    x, w = kit.tensor(4, 16), kit.tensor(16, 16, seed=1)
    captured = kit.capture(lambda x, w: {"y": torch.relu(x @ w)}, x, w, policy=policy)
    report = captured.prove(cases=3)
    assert report.ok, str(report)
    assert report.cases == 3
    assert report.failures == ()


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_bound_views_of_any_layout_are_read_where_they_lie(kit: Kit, policy: str) -> None:
    base = kit.tensor(4, 4)
    row = base[0]
    views = [base.t(), base[::2, 1:], row.expand(3, 4), row[:, None].expand(4, 2), base[1, 2]]
    captured = kit.capture(lambda *views: [view * 2 for view in views], *views, policy=policy)
    kit.refill(base, 7)
    kit.same(captured.replay(), [view * 2 for view in views])
    assert captured.prove(cases=2).ok
    same(captured.replay(), [view * 2 for view in views])


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_prove_finds_a_frozen_number_and_names_the_output(kit: Kit, policy: str) -> None:
    factor = [2.0]

    def step(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"right": x + 1, "wrong": x * factor[0]}

    captured = kit.capture(step, kit.tensor(8), policy=policy)
    factor[0] = 3.0
    report = captured.prove(cases=2)
    assert not report.ok
    assert len(report.failures) == 2
    assert {failure.where for failure in report.failures} == {"output ['wrong']"}
    assert "wrong" in str(report)


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_prove_finds_a_written_argument_that_differs(kit: Kit, policy: str) -> None:
    step_size = [1.0]

    def step(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count.add_(step_size[0])
        return x + 1

    captured = kit.capture(step, kit.tensor(8), kit.tensor(4, seed=1), policy=policy)
    step_size[0] = 2.0
    report = captured.prove(cases=1)
    assert [failure.where.split()[0] for failure in report.failures] == ["argument"]


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_prove_gives_bound_tensors_their_data_back(kit: Kit, policy: str) -> None:
    x, count = kit.tensor(8), kit.tensor(4, seed=1)
    before = x.clone(), count.clone()

    def step(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * 2

    captured = kit.capture(step, x, count, policy=policy)
    assert captured.prove(cases=2).ok
    kit.same((x, count), before, "the bound tensors after prove")


def test_error_of_the_step_in_a_proof_names_the_case_and_the_integers() -> None:
    weight = torch.randn(10, 4)
    captured = dg.capture(lambda ids: weight[ids] * 2, torch.tensor([1]), backend="cpu")
    with pytest.raises(IndexError):
        captured(torch.tensor([99]))
    with pytest.raises(IndexError) as caught:
        captured.prove()
    assert (
        "in case 0 of the proof, input 'ids' from 99 to 99; sample=" in caught.value.__notes__[-1]
    )


@pytest.mark.parametrize("where", ["every element in every case", "only state differs"])
def test_changed_state_is_named_as_the_cause(where: str) -> None:
    scale, state = [2.0], torch.zeros(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        state.add_(x * scale[0])
        return x * (scale[0] if "every" in where else 1)

    captured = dg.capture(step, torch.ones(4), backend="cpu")
    scale[0] = 3.0
    (cause,) = captured.prove().causes
    assert cause.startswith(f"{where}: the step reads an unmarked host value: scale[0] is 3.0")


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4))


@pytest.mark.parametrize("how", ["data", "assignment", "load_state_dict"])
def test_planted_stale_weight_is_named(how: str) -> None:
    model = Linear()
    held = {"model": model}  # no owner in the capture's hand
    captured = dg.capture(lambda x: x * held["model"].weight, torch.ones(4), backend="cpu")
    assert captured.prove().ok
    new = torch.full((4,), 3.0)
    if how == "data":
        model.weight.data = new
    elif how == "assignment":
        model.weight = torch.nn.Parameter(new)
    else:
        model.load_state_dict({"weight": new}, assign=True)
    (cause,) = captured.prove().causes
    assert cause.startswith("replaced weight or cache: ")
    assert "weight" in cause


def test_planted_lost_update_differs_only_with_changed_host_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dg.region(host_args=("n",))
    def scale(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x * n

    def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return scale(x, n=n) + 1

    captured = dg.capture(step, torch.ones(4), backend="cpu", host_args={"n": 2})
    sample = {"n": lambda shape, g: torch.randint(1, 9, shape, generator=g)}
    report = captured.prove(sample=sample)
    assert report.ok and report.not_varied == ()
    assert captured.prove().not_varied == ("n",)
    run = captured.run
    monkeypatch.setattr(captured, "run", lambda host: run({"n": 2}))
    (cause,) = captured.prove(sample=sample).causes
    assert cause.startswith("only with changed host arguments")


def test_planted_stale_generator_is_found_in_the_state() -> None:
    generator = torch.Generator()
    is_drawing = [False]

    def step(x: torch.Tensor) -> torch.Tensor:
        if is_drawing[0]:
            torch.rand(1, generator=generator)
        return x * 2

    captured = dg.capture(step, torch.ones(4), backend="cpu")
    is_drawing[0] = True
    report = captured.prove()
    assert {failure.where for failure in report.failures} == {"random generator 0"}
    assert "only state differs" in report.causes[0]


def test_planted_first_replay_is_told_from_a_lasting_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    captured = dg.capture(lambda x: x * 2, torch.ones(4), backend="cpu")
    run, runs = captured.run, itertools.count()

    def first_is_wrong(host: Any) -> None:
        run(host)
        if next(runs) % 2 == 0:
            captured.outputs.add_(1)

    monkeypatch.setattr(captured, "run", first_is_wrong)
    (cause,) = captured.prove(cases=1).causes
    assert cause.startswith("only the first replay")


def test_replays_of_other_threads_are_checked_during_a_proof() -> None:
    state = {"scale": 2.0}

    def draw(shape: Any, generator: torch.Generator) -> torch.Tensor:
        state["scale"] = 3.0
        with ThreadPoolExecutor(1) as threads, pytest.raises(dg.StateError, match="scale"):
            threads.submit(captured.replay).result()
        state["scale"] = 2.0
        return torch.ones(shape)

    x = torch.ones(4)
    captured = dg.capture(lambda x: x * state["scale"], x, backend="cpu", recaptures=0)
    assert captured.prove(cases=1, sample={"x": draw}).ok
    state["scale"] = 3.0
    assert not captured.prove(cases=1).ok


def test_an_error_of_a_sample_names_its_arguments() -> None:
    captured = dg.capture(lambda x: x * 2, torch.ones(4), backend="cpu")
    with pytest.raises(TypeError) as raised:
        captured.prove(sample={"x": lambda shape: torch.ones(shape)})
    assert "in the sample of 'x', which gets a shape and a torch.Gen" in raised.value.__notes__[0]


def test_state_is_bit_identical_and_memory_flat_after_a_hundred_proofs(
    devgraph_backend: Any,
) -> None:
    kit = Kit(devgraph_backend)
    state, x = kit.tensor(8), kit.tensor(8)
    state[0] = -0.0
    captured = kit.capture(lambda x: state.add_(x).clone() + torch.rand_like(x), x)
    before, random = state.clone(), kit.backend.get_rng_state()

    def used() -> tuple[int, int]:
        gc.collect()
        kit.backend.synchronize()
        tensors = sum(issubclass(type(held), torch.Tensor) for held in gc.get_objects())
        if kit.device.type == "cpu":
            return tensors, captured.pool.bytes
        return tensors, torch.accelerator.memory_allocated()

    assert captured.prove(cases=1).ok
    at_first = used()
    for _ in range(100):
        assert captured.prove(cases=1).ok
    assert used() == at_first
    assert state.view(torch.uint8).equal(before.view(torch.uint8))
    assert random.equal(kit.backend.get_rng_state())


def test_packed_floats_without_kernels_are_varied() -> None:
    packed = torch.zeros(8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    captured = dg.capture(lambda x: (x.view(torch.uint8) + 1).view(x.dtype), packed, backend="cpu")
    report = captured.prove(cases=2)
    assert report.ok and report.not_varied == ()
    assert packed.view(torch.uint8).eq(0).all()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_are_compared() -> None:
    """A comparison with a view of their bytes ended the process."""

    def quantized() -> torch.Tensor:
        return torch.quantize_per_tensor(torch.randn(4), 0.1, 10, torch.quint8)

    held = quantized()
    captured = dg.capture(lambda q: q.dequantize() + held.dequantize(), quantized(), backend="cpu")
    assert captured.prove(cases=1).ok
