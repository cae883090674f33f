"""Graphed training: gradients equal eager, accumulate, and refuse what graphs cannot do."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import devgraph as dg


def graphed(fn: Any = None, **options: Any) -> Any:
    return dg.graphed(fn, backend=torch.get_default_device().type, **options)


@pytest.fixture(autouse=True)
def _default_device(devgraph_backend: Any) -> Iterator[None]:
    """Create tensors and modules on the device of the backend under test."""
    with torch.device(devgraph_backend.device):
        yield


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got, want)


def _train(make: Callable[[], nn.Module], run: Callable[[nn.Module], nn.Module], steps: int) -> Any:
    torch.manual_seed(0)
    module = run(make())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for index in range(steps):
        torch.manual_seed(index)
        x = torch.randn(8, 4)
        optimizer.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    return torch.stack(losses), [p.detach().clone() for p in module.parameters()]


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))


def _as_graphed(module: nn.Module) -> nn.Module:
    graphed(module)
    return module


def _as_torch_does(module: nn.Module) -> nn.Module:
    return dg.make_graphed_callables(module, (torch.randn(8, 4),))


@pytest.mark.parametrize("run", [_as_graphed, _as_torch_does])
def test_training_equals_eager_bit_for_bit(run: Callable[[nn.Module], nn.Module]) -> None:
    want, weights = _train(_mlp, lambda module: module, 6)
    got, ours = _train(_mlp, run, 6)
    same(got, want)
    for one, other in zip(ours, weights, strict=True):
        same(one, other)


def test_gradients_accumulate_over_calls() -> None:
    module, plain = _mlp(), _mlp()
    plain.load_state_dict(module.state_dict())
    graphed(module)
    for _ in range(4):
        x = torch.randn(8, 4)
        # sum() alone would give eager's kernels gradients of stride 0.
        module(x).square().sum().backward()
        plain(x).square().sum().backward()
        for one, other in zip(module.parameters(), plain.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            same(one.grad, other.grad)


def test_gradients_reach_inputs_and_earlier_layers() -> None:
    first, module, plain = nn.Linear(4, 4), _mlp(), _mlp()
    plain.load_state_dict(module.state_dict())
    graphed(module)
    for _ in range(4):
        x = torch.randn(8, 4, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        first.zero_grad()
        module(first(x)).sum().backward()
        ours = first.weight.grad
        first.weight.grad = None
        plain(first(y)).sum().backward()
        assert ours is not None and x.grad is not None and y.grad is not None
        same(ours, first.weight.grad)
        same(x.grad, y.grad)


def test_backward_after_a_later_forward_is_refused() -> None:
    module = _mlp()
    graphed(module)
    for _ in range(3):
        module(torch.randn(8, 4)).sum().backward()
    last = module(torch.randn(8, 4)).sum()
    last.backward(retain_graph=True)
    with pytest.raises(dg.StateError, match="overwritten by a later call"):
        last.backward()
    first = module(torch.randn(8, 4))
    module(torch.randn(8, 4))
    with pytest.raises(dg.StateError, match="by an earlier backward"):
        first.sum().backward()


def test_frozen_and_unfrozen_parameters_have_graphs_of_their_own() -> None:
    module, plain = _mlp(), _mlp()
    plain.load_state_dict(module.state_dict())
    graphed(module)
    for frozen in (False, False, False, True, True, True):
        for one in (module, plain):
            one[0].requires_grad_(not frozen)
            one.zero_grad()
        x = torch.randn(8, 4)
        # sum() alone would give eager's kernels gradients of stride 0.
        module(x).square().sum().backward()
        plain(x).square().sum().backward()
        for one, other in zip(module.parameters(), plain.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            if one.grad is not None and other.grad is not None:
                same(one.grad, other.grad)


def test_dropout_draws_afresh_in_each_step() -> None:
    module = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))
    graphed(module)
    x = torch.ones(1, 4)
    masks = {tuple((module(x) == 0).flatten().tolist()) for _ in range(6)}
    assert len(masks) == 6


def test_several_callables_share_a_pool_in_call_order() -> None:
    torch.manual_seed(0)
    parts, plain = [_mlp_part() for _ in range(3)], [_mlp_part() for _ in range(3)]
    for one, other in zip(plain, parts, strict=True):
        one.load_state_dict(other.state_dict())
    sample = (torch.randn(8, 4, requires_grad=True),)
    ours = dg.make_graphed_callables(tuple(parts), (sample,) * 3)
    for _ in range(4):
        x = torch.randn(8, 4)
        got, want = x.clone().requires_grad_(), x.clone().requires_grad_()
        one: Any = got
        other: Any = want
        for part, eager in zip(ours, plain, strict=True):
            one, other = part(one), eager(other)
        same(one, other)
        one.sum().backward(), other.sum().backward()
        same(got.grad, want.grad)
        for mine, theirs in zip(parts, plain, strict=True):
            same(mine[0].weight.grad, theirs[0].weight.grad)
            mine.zero_grad(), theirs.zero_grad()


def _mlp_part() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def test_graphed_callables_refuse_what_torch_refuses() -> None:
    with pytest.raises(dg.InputTypeError, match="tensors only"):
        dg.make_graphed_callables(lambda x: x, (1,))
    with pytest.raises(dg.InputTypeError, match="a tuple of tensors, got <Tensor"):
        dg.make_graphed_callables(lambda x: x, torch.ones(1))
    with pytest.raises(dg.InputError, match="2 callables need 2 tuples of sample_args, got 1"):
        dg.make_graphed_callables((_mlp(), _mlp()), ((torch.ones(1),),))
    module = nn.Linear(2, 2)
    module.register_buffer("odd", torch.ones(1, requires_grad=True))
    with pytest.raises(dg.InputError, match="'odd' requires gradients"):
        dg.make_graphed_callables(module, (torch.ones(1, 2),))
    step = dg.make_graphed_callables(_mlp(), (torch.randn(8, 4),))
    with pytest.raises(dg.InputError, match="captured for"):
        step(torch.randn(9, 4))


# The cases of torch's own tests of ``make_graphed_callables``.


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.drop = nn.Dropout(0.1)

    def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        x, unused = inputs["x"], inputs.get("unused")
        hidden = self.drop(self.second(torch.relu(self.first(x))))
        return {"output": hidden} if unused is None else {"output": hidden, "unused": unused * 0}


@pytest.mark.parametrize("with_amp", [False, True])
@pytest.mark.parametrize("allow_unused_input", [False, True])
def test_modules_and_a_loss_are_graphed_in_one_pool(
    with_amp: bool, allow_unused_input: bool
) -> None:
    device = torch.get_default_device()
    dtype = torch.get_autocast_dtype(device.type) if with_amp else torch.float32
    losses = []
    for is_graphed in (False, True):
        torch.manual_seed(5)
        trunk: Any = Trunk()
        head: Any = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
        loss_of: Any = nn.MSELoss()
        parameters = [*trunk.parameters(), *head.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        x, target = torch.randn(5, 6), torch.randn(5, 2)
        unused = {"unused": torch.randn(5, 6, requires_grad=True)} if allow_unused_input else {}
        context = torch.autocast(device.type, enabled=with_amp, cache_enabled=False)
        if is_graphed:
            with context:
                trunk, head, loss_of = dg.make_graphed_callables(
                    (trunk, head, loss_of),
                    (
                        ({"x": x.clone(), **unused},),
                        (torch.randn(5, 6, dtype=dtype, requires_grad=True),),
                        (torch.randn(5, 2, dtype=dtype, requires_grad=True), target.clone()),
                    ),
                    allow_unused_input=allow_unused_input,
                )
        found = []
        for step in range(6):
            optimizer.zero_grad(set_to_none=True)
            torch.manual_seed(step)
            with context:
                hidden = trunk({"x": x, **unused})["output"]
                loss = loss_of(head(hidden), target)
            loss.backward()
            optimizer.step()
            found += [loss.detach().clone(), *(p.detach().clone() for p in parameters)]
        losses.append(found)
    for ours, theirs in zip(losses[1], losses[0], strict=True):
        same(ours, theirs)


def test_modules_without_parameters_and_gradients_are_graphed() -> None:
    module = nn.Sequential(nn.ReLU(), nn.Flatten())
    graphed_module = dg.make_graphed_callables(module, (torch.randn(3, 2, 2),))
    for _ in range(3):
        x = torch.randn(3, 2, 2)
        result = graphed_module(x)
        same(result, x.relu().flatten(1))
        assert not result.requires_grad


def test_graphed_module_runs_eagerly_in_evaluation() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    graphed_module = dg.make_graphed_callables(module, (torch.randn(4, 3),))
    module.eval()
    x = torch.randn(2, 3)  # another shape, which a graph would refuse
    same(graphed_module(x), nn.functional.linear(x, module[0].weight, module[0].bias))


def test_proof_of_a_training_graph_compares_gradients() -> None:
    module = _mlp()
    step = graphed(module)
    for _ in range(3):
        module(torch.randn(8, 4)).sum().backward()
    assert step.prove().ok
    module[0].weight.data = torch.randn(8, 4)
    assert not step.prove().ok


class RandomDepth(nn.Module):
    """A module whose step depends on random numbers of Python, which a replay does not draw."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if random.random() < 0.5 else x
        return self.layers[0](x)


def test_proof_reports_gradients_that_only_one_run_has() -> None:
    step = graphed(RandomDepth())
    with pytest.warns(dg.DeviceGraphWarning, match="Python's random"):
        for _ in range(2):
            step(torch.ones(1, 2)).sum().backward()
        report = step.prove()
    assert any("only one of the two runs" in str(failure) for failure in report.failures)


def test_proof_may_follow_a_backward_whose_gradients_are_kept() -> None:
    module = _as_graphed(_mlp())
    for _ in range(3):
        module.zero_grad()
        module(torch.randn(8, 4)).square().sum().backward()
    held = [parameter.grad.clone() for parameter in module.parameters()]
    assert module.forward.prove().ok
    for parameter, grad in zip(module.parameters(), held, strict=True):
        same(parameter.grad, grad)


def test_function_that_switches_gradients_off_needs_no_backward() -> None:
    module = nn.Linear(4, 4)
    step = graphed(torch.no_grad()(lambda x: module(x).argmax(-1)))
    for _ in range(3):
        x = torch.randn(2, 4)
        same(step(x), module(x).argmax(-1))
    assert step.stats()["captures"] == 1


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("caches", [False, True])
def test_gradients_of_a_weight_that_is_cast_twice(whole: bool, outer: bool, caches: bool) -> None:
    """One cast has one gradient in the lower precision; two casts have two."""

    def trained(in_graphs: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Linear(16, 16, bias=False)
        options = {} if caches else {"cache_enabled": False}
        device = torch.get_default_device().type
        made = functools.partial(torch.autocast, device, torch.bfloat16, **options)

        def loss(x: Any) -> Any:
            with contextlib.nullcontext() if outer else made():
                return (net(x) + net(x * 2).tanh()).float().square().mean()

        def step(x: Any) -> Any:
            result = loss(x)
            (gradient,) = torch.autograd.grad(result, [net.weight])
            return result.detach(), gradient

        torch.clear_autocast_cache()
        xs = [torch.randn(8, 16) for _ in range(4)]
        results = []
        with made() if outer else contextlib.nullcontext():
            call = step
            if in_graphs and whole:
                call = dg.capture(step, xs[0].clone(), backend=device)
            elif in_graphs:
                loss = graphed(loss)
            for x in xs:
                results += [t.clone() for t in call(x)]
                net.weight.data.mul_(0.5)
                torch.clear_autocast_cache()
        return results

    assert all(map(torch.equal, trained(True), trained(False)))


def test_autocast_of_the_call_is_part_of_the_key() -> None:
    module = nn.Linear(4, 4)
    graphed(module)
    x = torch.randn(2, 4)
    with torch.no_grad():
        for _ in range(3):
            assert module(x).dtype == torch.float32
            with torch.autocast(x.device.type, torch.bfloat16):
                assert module(x).dtype == torch.bfloat16


def test_second_derivative_is_refused_and_not_zero() -> None:
    module = _as_graphed(_mlp())
    module(torch.randn(8, 4, requires_grad=True))  # eagerly
    for _ in range(3):
        x = torch.randn(8, 4, requires_grad=True)
        (grad,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        with pytest.raises(dg.StateError, match="no second derivative"):
            (grad.square().sum() + x.sum()).backward(retain_graph=True)
        with pytest.raises(dg.StateError, match="no second derivative"):
            torch.autograd.grad(grad.sum(), [*module.parameters()], allow_unused=True)


def test_backward_hook_that_keeps_gradients_runs_eagerly() -> None:
    module, kept = _as_graphed(_mlp()), []
    module[0].register_full_backward_hook(lambda m, inputs, outs: kept.append(outs[0] * 1))
    with pytest.warns(dg.DeviceGraphWarning, match=r"the step adds kept"):
        for _ in range(4):
            kept.clear()
            module(torch.randn(8, 4, requires_grad=True)).sum().backward()
            assert len(kept) == 1


def test_result_with_a_spent_history_runs_eagerly() -> None:
    weight = nn.Parameter(torch.ones(3))

    def fn(x: torch.Tensor) -> torch.Tensor:
        loss = (weight * x).square().sum()
        loss.backward()
        return loss  # not detached

    step = graphed(fn)
    with pytest.warns(dg.DeviceGraphWarning, match="cannot be captured"):
        for index in range(4):
            weight.grad = None
            x = torch.full((3,), float(index))
            step(x)
            same(weight.grad, 2 * x.square())


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.other, self.unused = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.first(x)
        return hidden.relu(), self.second(hidden) * 2, self.other(y), x


@pytest.mark.parametrize("used", [(0,), (1,), (2,), (3,), (0, 2), (0, 1, 2, 3)])
def test_gradients_of_unused_outputs_are_none_as_in_eager(used: tuple[int, ...]) -> None:
    module, plain = _Branches(), _Branches()
    plain.load_state_dict(module.state_dict())
    graphed(module)
    for _ in range(4):
        pair = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
        found = []
        for one in (module, plain):
            leaves = [*one.parameters(), *pair]
            for leaf in leaves:
                leaf.grad = None
            outputs = one(*pair)
            torch.stack([outputs[index].sum() for index in used]).sum().backward()
            found.append([leaf.grad for leaf in leaves])
        for ours, eager in zip(*found, strict=True):
            assert (ours is None) is (eager is None)
            if ours is not None and eager is not None:
                same(ours, eager)
