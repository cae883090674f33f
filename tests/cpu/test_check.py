"""``check`` finds everything in one run: what a device would refuse or freeze, with lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from devgraph.api.errors import FrozenValueError
from devgraph.api.marks.marks import no_graph, region
from devgraph.cpu.backend import CpuBackend
from devgraph.cpu.violations import Violation
from tests.support.cpu_capture import same
from tests.support.refusals import READS, SHAPES, UNSUPPORTED, X

BACKEND = CpuBackend()


def violations_of(fn: Callable[..., Any], *args: Any, **named: Any) -> list[Violation]:
    return BACKEND.check(fn, args, **named)


@pytest.mark.parametrize("name", READS)
def test_check_reports_a_host_read(name: str) -> None:
    fn, _ = READS[name]
    (found, *_) = [v for v in violations_of(fn, X) if v.kind == "host_sync"]
    assert found.file == fn.__code__.co_filename or name == "deepcopy"
    assert found.line > 0 and "host" in found.text


@pytest.mark.parametrize("name", SHAPES)
def test_check_reports_a_data_dependent_shape(name: str) -> None:
    fn, _ = SHAPES[name]
    found = [v for v in violations_of(fn, X) if v.kind == "data_dependent_shape"]
    assert [(v.file, v.line) for v in found] == [
        (fn.__code__.co_filename, fn.__code__.co_firstlineno)
    ]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_check_reports_what_it_cannot_go_on_from(name: str) -> None:
    assert "refused" in {v.kind for v in violations_of(UNSUPPORTED[name][0], X)}


def test_check_places_a_seed_without_later_draws_at_the_step() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return x + 1

    (found,) = violations_of(step, X)
    assert (found.kind, found.file) == ("seeding", __file__)
    assert found.line == step.__code__.co_firstlineno


def test_check_goes_on_and_finds_everything_in_one_run() -> None:
    kept = []

    def step(x: torch.Tensor) -> torch.Tensor:
        scale = x.max().item()
        picked = x[x > scale]
        noise = torch.rand(4)
        table = torch.tensor([1.0, 2.0, 3.0, 4.0])
        kept.append(x * 2)
        for index in x.nonzero()[:2].tolist():
            x = x + float(index[0])
        return picked.sum() + noise + table + x

    before = X.clone()
    found = violations_of(step, X)
    first = step.__code__.co_firstlineno
    assert {(v.kind, v.line - first) for v in found} == {
        ("host_sync", 1),
        ("data_dependent_shape", 2),
        ("rng", 3),
        ("host_value", 4),
        ("escaping_allocation", 5),
        ("host_sync", 6),
        ("data_dependent_shape", 6),
    }
    assert same(X, before)


def test_check_of_a_clean_step_finds_nothing() -> None:
    weight = torch.randn(4, 4)
    assert violations_of(lambda x: F.softmax(x @ weight, -1), X) == []


MODULES: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "lstm": (lambda: torch.nn.LSTM(4, 4), (5, 2, 4)),
    "batch norm": (lambda: torch.nn.BatchNorm1d(4), (2, 4)),
    "spectral norm": (
        lambda: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4)),
        (2, 4),
    ),
    "encoder": (lambda: torch.nn.TransformerEncoderLayer(16, 2, dropout=0.0), (3, 2, 16)),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_check_of_a_module_finds_nothing(name: str, grad: bool) -> None:
    make, shape = MODULES[name]
    module = make()
    state = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    with torch.set_grad_enabled(grad):
        assert violations_of(module, torch.randn(shape)) == []
    assert all(same(tensor, state[key]) for key, tensor in module.state_dict().items())


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_check_leaves_attributes_alone_that_hooks_of_torch_set() -> None:
    module = torch.nn.utils.weight_norm(torch.nn.Linear(4, 4))
    with torch.no_grad():
        assert violations_of(module, torch.randn(2, 4)) == []


def test_check_of_a_training_step_finds_nothing_and_gives_gradients_back() -> None:
    net = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    assert violations_of(step, X) == []
    assert net.weight.grad is None


def test_check_leaves_no_graph_functions_alone_and_looks_into_regions() -> None:
    @no_graph
    def sample(x: torch.Tensor) -> int:
        return int(x.argmax())

    @region(host_args=("n",))
    def attend(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x[:n] * x.sum().item()

    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        sample(x)
        return attend(x, n=n).sum()

    found = violations_of(step, X, host_args={"n": 2})
    assert [v.kind for v in found] == ["host_sync"]
    assert "item" in found[0].op


def test_check_reports_a_consumed_host_argument() -> None:
    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        return x[: n // 2]

    (found,) = violations_of(step, X, host_args={"n": 2})
    assert (found.kind, found.line) == ("host_value", step.__code__.co_firstlineno + 1)
    assert FrozenValueError.__name__ not in found.text


def test_check_goes_on_behind_consumed_host_arguments() -> None:
    def step(x: torch.Tensor, n: int, sizes: list[int]) -> torch.Tensor:
        y = torch.zeros(n)
        z = x[: min(n, 2)] * n
        for size in sizes:
            z = z + size
        if type(n) is int and n and sizes:
            z = z * 2
        z = z + x.sum().item()
        return z + y.sum() + float(f"{n}")

    found = violations_of(step, X, host_args={"n": 2, "sizes": [1, 2]})
    first = step.__code__.co_firstlineno
    assert {(v.kind, v.line - first) for v in found} == {
        *(("host_value", line) for line in (1, 2, 3, 5, 8)),
        ("host_sync", 7),
    }
    assert all(v.file == __file__ for v in found)


def test_check_refuses_what_no_policy_can_run_again_inside_a_transform() -> None:
    @region(host_args=("n",))
    def dynamic(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x * n

    @region
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return torch.vmap(lambda row: dynamic(row, n=n))(x)

    x = torch.randn(3, 4)
    (found,) = violations_of(step, x, host_args={"n": 2})
    assert found.kind == "refused" and "dynamic was called inside a transform" in found.text
    assert violations_of(torch.vmap(plain), x) == []


def test_check_raises_errors_that_no_violation_explains() -> None:
    with pytest.raises(ZeroDivisionError):
        violations_of(lambda x: 1 // 0, X)


def test_check_takes_keyword_arguments_of_the_step() -> None:
    def step(x: torch.Tensor, scale: float) -> torch.Tensor:
        return x[x > scale] * x.max().item()

    found = BACKEND.check(step, (torch.randn(4),), kwargs={"scale": 0.5})
    assert {v.kind for v in found} == {"data_dependent_shape", "host_sync"}
