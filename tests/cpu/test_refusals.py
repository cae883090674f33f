"""What a recording refuses, in the user's words, and what ``check`` finds without raising."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from devgraph.api.errors import CaptureError, FrozenValueError, HostReadError, StateError
from devgraph.api.marks.marks import no_graph, region
from devgraph.cpu.check import check
from devgraph.cpu.memory import BlockPool
from devgraph.cpu.recorder import Recorder
from devgraph.cpu.violations import Violation
from tests.support.cpu_capture import KNOWLEDGE, record, same

X = torch.arange(1.0, 5.0)
INDEX = torch.tensor(1)
MASK = torch.tensor([True, False, True, True])


def branch(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return -x


# name: (function, what the message must say)
READS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "item": (lambda x: x.sum().item(), r"\.item\(\)"),
    "float": (lambda x: float(x.sum()), r"float\(\) of a tensor"),
    "int": (lambda x: int(INDEX + 1), r"int\(\) of a tensor"),
    "bool": (branch, r"bool\(\) of a tensor"),
    "index": (lambda x: x[: INDEX + 1], "index"),
    "scalar index": (lambda x: x[INDEX], "indexing with a scalar tensor"),
    "range": (lambda x: list(range(INDEX + 1)), "index or length"),
    "contains": (lambda x: 1.0 in x, "'in' on a tensor"),
    "max of tensors": (lambda x: max(x[0] * 1, x[1] * 1), r"bool\(\)"),
    "tolist": (lambda x: (x * 2).tolist(), r"\.tolist\(\)"),
    "numpy": (lambda x: x.detach().numpy(), r"\.numpy\(\)"),
    "asarray": (lambda x: memoryview(x.detach().__array__()), "numpy"),
    "cpu": (lambda x: x.cpu(), r"\.cpu\(\)"),
    "print": (lambda x: str(x), r"print\(\)"),
    "repr": (lambda x: repr(x[0]), r"repr\(\)"),
    "format": (lambda x: f"{x[0]:.3f}", "formatting"),
    "equal": (lambda x: torch.equal(x, x), r"torch\.equal"),
    "allclose": (lambda x: torch.allclose(x, x), r"torch\.allclose"),
    "deepcopy": (lambda x: copy.deepcopy(x), "deepcopy"),
    "dlpack": (lambda x: x.__dlpack__(), "DLPack"),
    "tensor of tensors": (lambda x: torch.tensor([x[0], x[1]]), "list of tensors"),
    "as_tensor of tensors": (lambda x: torch.as_tensor([[x[0]], [x[1]]]), "list of tensors"),
    "is_nonzero": (lambda x: torch.is_nonzero(x[0]), "is_nonzero"),
    "one hot without classes": (lambda x: F.one_hot(INDEX.view(1)), "one_hot"),
    "tensor bound": (lambda x: x.narrow(0, INDEX, 2), "narrow"),
}

SHAPES: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "where": (lambda x: torch.where(x > 2), "nonzero"),
    "argwhere": (lambda x: torch.argwhere(x), "nonzero"),
    "masked_select": (lambda x: x.masked_select(MASK), "masked_select"),
    "mask index": (lambda x: x[MASK], "boolean mask"),
    "mask assignment": (lambda x: (x * 1).__setitem__(MASK, x[1:]), "boolean mask"),
    "unique": (lambda x: torch.unique(x), "unique"),
    "unique_consecutive": (lambda x: torch.unique_consecutive(x), "unique_consecutive"),
    "repeat_interleave": (lambda x: x.repeat_interleave(INDEX.view(1)), "repeat_interleave"),
    "bincount": (lambda x: torch.bincount(INDEX.view(1)), "bincount"),
}

UNSUPPORTED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "resize": (lambda x: (x * 1).resize_(9), "resize"),
    "resizing out": (lambda x: torch.add(x, 1, out=torch.empty(2)), "resize its output"),
    "sparse result": (lambda x: x.to_sparse(), "sparse"),
    "sparse argument": (lambda x: SPARSE + 1, "sparse"),
}

SPARSE = torch.eye(3).to_sparse()


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("name", [*READS, *SHAPES])
def test_host_read_is_refused_with_the_line(name: str, mode: Callable[[], Any]) -> None:
    fn, words = {**READS, **SHAPES}[name]
    with mode(), pytest.raises(HostReadError, match=words) as caught:
        record(fn, X)
    text = str(caught.value)
    line = fn.__code__.co_firstlineno + (fn is branch)
    assert f"{__file__}:{line}" in text or name == "deepcopy"
    assert "@dg.region" in text and "@dg.no_graph" in text and "breakable" in text


def test_refusal_names_the_innermost_line_of_the_user() -> None:
    with pytest.raises(HostReadError, match=r"in branch: if x\.sum\(\) > 0:"):
        record(lambda x: F.relu(branch(x)), X)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_has_no_fixed_memory_is_refused(name: str) -> None:
    fn, words = UNSUPPORTED[name]
    with torch.inference_mode(), pytest.raises(CaptureError, match=words) as caught:
        record(fn, X)
    assert __file__ in str(caught.value)


def test_resize_to_the_same_shape_is_no_resize() -> None:
    _, out = record(lambda x: (x * 2).resize_(4), X)
    assert out.shape == (4,)


def test_operation_without_known_shapes_is_refused() -> None:
    with torch.library._scoped_library("devgraph_test", "DEF") as library:
        library.define("opaque(Tensor x) -> Tensor")
        library.impl("opaque", lambda x: x + 1, "CPU")
        with pytest.raises(CaptureError, match="register_fake"):
            record(lambda x: torch.ops.devgraph_test.opaque(x), X)


def test_shape_errors_of_the_user_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError) as caught:
        record(lambda x: x + torch.ones(3), X)
    assert not isinstance(caught.value, CaptureError)


def test_refusal_leaves_no_mode_behind_and_the_next_capture_works() -> None:
    pool = BlockPool()
    for fn in (READS["item"][0], SHAPES["nonzero"][0], lambda x: x + torch.ones(3)):
        with pytest.raises(Exception):  # noqa: B017 - any of three
            record(fn, X, pool=pool)
        assert torch._C._len_torch_dispatch_stack() == 0
        assert torch._C._len_torch_function_stack() == 0
    assert (X.sum() + 1).item() == 11
    x = X.clone()
    tape, out = record(lambda x: x + 1, x, pool=pool)
    tape.replay()
    assert torch.equal(out, X + 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit, ValueError])
def test_exception_in_the_body_is_raised_and_all_is_undone(error: type[BaseException]) -> None:
    pool = BlockPool()
    random = torch.get_rng_state()

    def body(x: torch.Tensor) -> None:
        torch.rand(3)
        x.add_(1)
        raise error

    x = X.clone()
    with pytest.raises(error):
        record(body, x, pool=pool)
    assert torch.equal(x, X) and torch.equal(torch.get_rng_state(), random)
    assert torch._C._len_torch_dispatch_stack() == 0 and torch.is_autocast_cache_enabled()
    assert pool.live() == []


def test_users_modes_stay_above_and_are_kept() -> None:
    class Counting(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    x = X.clone()
    mode = Counting()
    with Recorder(BlockPool(), knowledge=KNOWLEDGE) as recorder, mode:
        out = x + 1
    with mode:
        with Recorder(BlockPool(), knowledge=KNOWLEDGE):
            x + 1
        assert torch._C._len_torch_dispatch_stack() == 1
    assert mode.seen == 2
    tape = recorder.tape()
    with mode:
        tape.replay()
    assert mode.seen == 2, "a replay is one piece of work, not operations"
    assert torch.equal(out, X + 1)


def test_recording_can_end_inside_a_mode_that_the_body_entered() -> None:
    first = Recorder(BlockPool(), knowledge=KNOWLEDGE)
    second = Recorder(BlockPool(), knowledge=KNOWLEDGE)
    first.__enter__()
    with torch.device("cpu"), TorchDispatchMode():
        first.__exit__(None, None, None)
        assert torch._C._len_torch_dispatch_stack() == 1
        second.__enter__()
    with torch.device("cpu"):
        second.__exit__(None, None, None)
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


def test_default_device_set_before_a_recording_is_kept() -> None:
    torch.set_default_device("cpu")
    try:
        with Recorder(BlockPool(), knowledge=KNOWLEDGE) as recorder:
            torch.set_default_device("cpu")
            out = torch.ones(3) + X[:3]
    finally:
        torch.set_default_device(None)
    recorder.tape().replay()
    assert torch.equal(out, 1 + X[:3])
    assert torch._C._len_torch_function_stack() == 0


def violations_of(fn: Callable[..., Any], *args: Any, **named: Any) -> list[Violation]:
    return check(fn, args, knowledge=KNOWLEDGE, **named)


@pytest.mark.parametrize("name", READS)
def test_check_reports_a_host_read(name: str) -> None:
    fn, _ = READS[name]
    (found, *_) = [v for v in violations_of(fn, X) if v.kind == "host_sync"]
    assert found.file == __file__ or name == "deepcopy"
    assert found.line > 0 and "host" in found.text


@pytest.mark.parametrize("name", SHAPES)
def test_check_reports_a_data_dependent_shape(name: str) -> None:
    fn, _ = SHAPES[name]
    found = [v for v in violations_of(fn, X) if v.kind == "data_dependent_shape"]
    assert [(v.file, v.line) for v in found] == [(__file__, fn.__code__.co_firstlineno)]


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_check_reports_what_it_cannot_go_on_from(name: str) -> None:
    assert "refused" in {v.kind for v in violations_of(UNSUPPORTED[name][0], X)}


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
    with pytest.raises(CaptureError, match="dynamic was called inside a transform"):
        violations_of(step, x, host_args={"n": 2})
    assert violations_of(torch.vmap(plain), x) == []


def test_check_raises_errors_that_no_violation_explains() -> None:
    with pytest.raises(ZeroDivisionError):
        violations_of(lambda x: 1 // 0, X)


def test_recording_with_assumed_values_gives_no_tape() -> None:
    with Recorder(BlockPool(), on_violation=lambda v: None) as recorder:
        X.sum().item()
    with pytest.raises(StateError, match="assumed"):
        recorder.tape()
