"""``dg.capture``: one meaning under every policy, and what it watches of its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import POLICIES, Kit
from devgraph.testing.conformance.test_memory import check


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
        with pytest.raises(dg.StateError, match=r"caches\[1\] among .* copy_\(\)"):
            captured.replay()
        caches[1] = kept
        del named["scale"]
        with pytest.raises(dg.StateError, match=r"named\['scale'\] among"):
            captured.replay()


def test_capture_shows_what_it_is():
    captured = dg.capture(lambda x: x * 2, torch.ones(2), backend="cpu")
    assert repr(captured) == "<Captured full on cpu: 1 segment>"
    captured.close()
    assert repr(captured) == "<Captured full on cpu: closed>"


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_capture_has_one_meaning_under_every_policy(policy: str):
    @dg.region(host_args=("kv_len",), derive={"half": lambda kv_len: kv_len // 2})
    def attention(x: Any, *, kv_len: int, half: int) -> Any:
        return x[:, :kv_len].sum(1) - x[:, :half].sum(1)

    def fn(x: Any, scale: Any, *, kv_len: int = 512) -> Any:
        return {"y": attention(x * 2, kv_len=kv_len) * scale}

    x = torch.randn(4, 1024)
    cap = dg.capture(
        fn,
        x,
        kwargs={"scale": torch.tensor(3.0)},
        policy=policy,
        backend="cpu",
        host_args={"kv_len": 512},
    )
    out = cap.replay(kv_len=777)
    assert out["y"] is cap.outputs["y"]
    assert torch.equal(out["y"], fn(x, torch.tensor(3.0), kv_len=777)["y"])
    cap.replay()  # the default of fn, and not the value before
    assert torch.equal(cap.outputs["y"], fn(x, torch.tensor(3.0))["y"])
    assert len(cap.segments) == (1 if policy == "full" else 3)
    assert policy in cap.explain()
    assert cap.explain().count("hits") <= 1  # once at most: the counters that are not zero
    report = cap.prove(cases=3, host_args=[{"kv_len": 5}, {"kv_len": 1000}])
    assert report.ok
    assert report.failures == ()
    assert report.cases == 6
    cap.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_replay_takes_new_inputs_by_place_and_by_name(policy: str):
    def step(x, state, *, scale):
        return x * scale + state["bias"][0]

    x, bias, scale = torch.ones(3), torch.zeros(3), torch.tensor(2.0)
    with dg.capture(
        step, x, {"bias": [bias]}, kwargs={"scale": scale}, backend="cpu", policy=policy
    ) as captured:
        assert captured.replay(torch.full((3,), 5.0)).tolist() == [10, 10, 10]
        assert captured.replay(x=torch.arange(3.0), scale=torch.tensor(3.0)).tolist() == [0, 3, 6]
        assert captured.replay(x, {"bias": [torch.ones(3)]}).tolist() == [1, 4, 7]
        assert captured.replay().tolist() == [1, 4, 7] and x.tolist() == [0, 1, 2]
        assert captured.replay(captured.outputs).tolist() == [4, 13, 22]


def test_new_inputs_that_are_bound_tensors_arrive_as_they_were():
    x, y = torch.zeros(2), torch.ones(2)
    captured = dg.capture(lambda x, y: x - y, x, y, backend="cpu")
    assert captured(y, x).tolist() == [1, 1] and y.tolist() == [0, 0]


MISFITS: dict[str, tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "shape": ((torch.ones(2),), {}, dg.InputError, r"'x' is <Tensor \(2,\).*\(3,\).* is bound"),
    "dtype": ((torch.ones(3).int(),), {}, dg.InputError, "torch.int32 on cpu>"),
    "no tensor": ((3,), {}, dg.InputTypeError, "input 'x' is 3"),
    "value": ((torch.ones(3), 3), {}, dg.InputError, "'factor' is 3 and was 2 at capture"),
    "structure": (([torch.ones(3)],), {}, dg.InputTypeError, "the same structure"),
    "too many": (
        (torch.ones(3), 2, 3),
        {},
        dg.InputError,
        "more inputs .3. than bound arguments .2.",
    ),
    "twice": ((torch.ones(3),), {"x": torch.ones(3)}, dg.InputError, "given twice"),
    "name": ((), {"X": torch.ones(3)}, dg.HostArgumentError, "Known: factor, x. Did you mean 'x'"),
    "no argument": ((), {"scale": 2}, dg.HostArgumentError, "that were passed to the capture: by"),
}


@pytest.mark.parametrize("case", MISFITS)
def test_new_inputs_that_do_not_fit_are_refused_and_change_nothing(case: str):
    given, named, kind, words = MISFITS[case]
    x = torch.arange(3.0)
    captured = dg.capture(lambda x, factor: x * factor, x, 2, backend="cpu", recaptures=0)
    with pytest.raises(kind, match=words):
        captured.replay(*given, **named)
    assert x.tolist() == [0, 1, 2] and captured.replay().tolist() == [0, 2, 4]


def test_shape_that_does_not_fit_is_one_error_that_names_the_ways_out():
    captured = dg.capture(lambda x: x * 2, torch.ones(3), backend="cpu")
    with pytest.raises(dg.InputError, match="use dg.graphed, which captures each") as refused:
        captured(torch.ones(2))
    assert refused.value.__suppress_context__


def test_one_bound_tensor_cannot_take_two_inputs():
    x = torch.ones(2)
    captured = dg.capture(lambda a, b: a + b, x, x, backend="cpu")
    assert captured(both := torch.full((2,), 3.0), both).tolist() == [6, 6]
    with pytest.raises(dg.InputError, match="several arguments of the step"):
        captured(torch.ones(2), torch.zeros(2))


@pytest.mark.parametrize("warmup", [-1, 1.5, True, "2"])
def test_warmup_that_is_no_count_is_refused(kit: Kit, warmup: Any) -> None:
    with pytest.raises(dg.InputError, match="warmup"):
        kit.capture(lambda x: x + 1, kit.tensor(4), warmup=warmup)


@pytest.mark.parametrize("name", ["before_break", "after_warmup"])
def test_what_is_called_and_is_no_function_is_refused_before_any_run(name: str) -> None:
    ran: list[int] = []
    with pytest.raises(dg.InputTypeError, match=f"{name} must be a function, got 5"):
        dg.capture(lambda x: ran.append(1), torch.ones(2), backend="cpu", **{name: 5})
    assert not ran


def test_missing_argument_of_the_step_is_an_error_with_a_remedy() -> None:
    def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x * n

    with pytest.raises(TypeError, match="missing 1 required") as caught:
        dg.capture(step, torch.ones(2), backend="cpu")
    assert "host_args={...}" in caught.value.__notes__[0]  # type: ignore[attr-defined]


def test_python_runs_once_and_its_numbers_are_frozen(kit: Kit) -> None:
    x = kit.tensor(8)
    factor = {"value": 2.0, "calls": 0}

    def body() -> Any:
        factor["calls"] += 1
        return x * factor["value"]

    graph, y = kit.record(body, warm=False)
    factor["value"] = 3.0
    graph.replay()
    graph.replay()
    kit.same(y, x * 2.0)
    assert factor["calls"] == 1


@pytest.mark.parametrize("policy", POLICIES)
def test_kwargs_and_nested_arguments_are_bound(kit: Kit, policy: str) -> None:
    x, y = kit.tensor(8), kit.tensor(8, seed=1)

    def step(batch: dict[str, Any], *, scale: Any) -> Any:
        return {"sum": batch["x"][0] + scale, "none": None, "text": "kept"}

    captured = kit.capture(step, {"x": [x]}, kwargs={"scale": y}, policy=policy)
    kit.refill(x, 7)
    kit.refill(y, 8)
    kit.same(captured.replay(), {"sum": x + y, "none": None, "text": "kept"})


def test_a_tensor_that_is_an_input_may_be_returned(kit: Kit) -> None:
    x = kit.tensor(4, 4)
    captured = kit.capture(lambda x: (x, x[1:], x.t() + 1), x)
    kit.check(captured, lambda x: (x, x[1:], x.t() + 1), x)


@pytest.mark.parametrize("policy", ["full", "breakable"])
@pytest.mark.parametrize("move", ["set_", "data"])
def test_bound_tensor_that_moved_is_refused(kit: Kit, policy: str, move: str) -> None:
    """FAULTS 9."""
    x = kit.tensor(8)
    captured = kit.capture(lambda x: x + 1, x, policy=policy)
    kept = x.detach()
    if move == "data":
        x.data = kit.tensor(8, seed=3)
    else:
        with torch.no_grad():
            x.set_(kit.tensor(8, seed=3))
    with pytest.raises(dg.StateError, match=r"moved .*copy_"):
        captured.replay()
    with torch.no_grad():
        x.set_(kept)
    captured.replay()
    kit.same(captured.outputs, kept + 1)


@pytest.mark.parametrize("warmup", [0, 1, 3])
def test_warmup_runs_the_step_so_often_before_the_capture(kit: Kit, warmup: int) -> None:
    x = kit.tensor(4)
    calls = []

    def step(x: torch.Tensor) -> torch.Tensor:
        calls.append(dg.is_capturing())
        return x + 1

    captured = kit.capture(step, x, warmup=warmup)
    assert calls == [False] * warmup + [True]
    kit.check(captured, lambda x: x + 1, x)


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_bound_tensor_of_another_layout_is_refused_until_it_is_back(kit: Kit, policy: str) -> None:
    """FAULTS 9."""
    x = kit.tensor(2, 3)
    captured = kit.capture(lambda x: x * 2, x, policy=policy)
    x.t_()
    with pytest.raises(dg.StateError, match="a new layout"):
        captured.replay()
    x.t_()
    kit.check(captured, lambda x: x * 2, x)


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_result_that_requires_grad_remembers_no_replay(kit: Kit, policy: str) -> None:
    """FAULTS 37."""
    weight = torch.nn.Parameter(kit.tensor(4))

    @dg.region(host_args=("factor",))
    def body(x: torch.Tensor, *, factor: int) -> torch.Tensor:
        return x * weight * factor

    captured = check(kit, lambda x, *, factor: body(x, factor=factor), kit.tensor(4), policy)

    def nodes() -> int:
        seen, new = set(), [captured.outputs.grad_fn]
        while new:
            node = new.pop()
            if node is not None and node not in seen:
                seen.add(node)
                new.extend(after for after, _ in node.next_functions)
        return len(seen)

    before = nodes()
    for _ in range(20):
        captured.replay(factor=2)
    assert nodes() == before


def test_closed_capture_refuses_and_closes_twice(kit: Kit) -> None:
    """FAULTS 28."""
    x = kit.tensor(4)
    with kit.capture(lambda x: x + 1, x) as captured:
        assert captured.info().state == "ready"
    assert captured.info().state == "closed"
    captured.close()
    for use in (captured.replay, captured.prove):
        with pytest.raises(dg.StateError, match="closed"):
            use()


@pytest.mark.parametrize("policy", POLICIES)
def test_host_argument_among_the_outputs_is_refused(policy: str):
    @dg.region(host_args=("n",))
    def scaled(x: Any, *, n: int) -> Any:
        return x * n

    def step(x: Any, *, n: int) -> Any:
        return scaled(x, n=n), n

    with pytest.raises(dg.FrozenValueError, match="returned host argument 'n'"):
        dg.capture(step, torch.ones(3), policy=policy, backend="cpu", host_args={"n": 3})


def test_different_data_for_bound_tensors_that_share_memory_is_refused():
    buffer = torch.zeros(4, 8)
    left, right, across = buffer[:, :4], buffer[:, 4:], buffer[:, 3:5]

    def step(one: Any, other: Any) -> Any:
        return one.sum() + 10 * other.sum()

    with dg.capture(step, left, right, backend="cpu") as apart:
        assert apart(torch.ones(4, 4), torch.zeros(4, 4)) == 16
    with dg.capture(step, left, across, backend="cpu") as captured:
        with pytest.raises(dg.InputError, match="share memory"):
            captured(torch.ones(4, 4), torch.zeros(4, 2))
        assert captured(left, across) == step(left, across)
        new = torch.ones(4, 8)
        assert captured(new[:, :4], new[:, 3:5]) == 16 + 80
    row = torch.randn(4, 16)
    with dg.capture(step, row[:1, :8], row[0, :8], backend="cpu") as captured:
        new = torch.ones(1, 8)
        assert captured(new, new[0]) == step(new, new[0])  # a stride of one row says nothing
    turned = torch.randn(4, dtype=torch.complex64)
    with dg.capture(step, turned, turned.conj(), backend="cpu") as captured:
        new = torch.full((4,), 1j)
        with pytest.raises(dg.InputError, match="share memory"):
            captured(new, new)
        assert captured(new, new.conj()) == step(new, new.conj())


def test_new_data_for_a_bound_tensor_that_requires_grad_is_no_step_of_autograd():
    weight = torch.nn.Parameter(torch.ones(3))
    history = (weight * 1).requires_grad_()
    before = history.grad_fn
    with dg.capture(lambda w, h: (w + h).detach(), weight, history, backend="cpu") as captured:
        assert captured(torch.full((3,), 5.0), torch.nn.Parameter(torch.ones(3))).eq(6).all()
    assert weight.eq(5).all() and weight.is_leaf and history.grad_fn is before


def test_input_that_is_no_tensor_is_compared_by_kind_and_value():
    x = torch.arange(3)
    with dg.capture(lambda x, by: x * by, x, 1, backend="cpu", recaptures=0) as captured:
        assert captured(x.clone(), 1).equal(x)
        for other in (1.0, True, [1]):
            with pytest.raises(dg.InputError):
                captured(x.clone(), other)
    with dg.capture(lambda x, by: x * by, x, float("nan"), backend="cpu") as captured:
        assert captured(x.clone(), float("nan")).isnan().all()


def test_bound_tensor_of_another_dtype_at_its_address_is_refused():
    x = torch.ones(3)
    with dg.capture(lambda x: x * 2, x, backend="cpu") as captured:
        captured.replay()
        x.data = x.view(torch.int32)
        with pytest.raises(
            dg.StateError, match=r"a new layout: it was .*float32 .* is .* of torch.i"
        ):
            captured.replay()


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_argument_without_an_address_is_refused(policy: str):
    with pytest.raises(dg.InputTypeError, match="layout torch.sparse_coo, but a replay"):
        dg.capture(lambda x: x * 2, torch.eye(3).to_sparse(), policy=policy, backend="cpu")
