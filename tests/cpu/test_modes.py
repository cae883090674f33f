"""Modes of torch around and inside a recording: kept, and as before after a refusal."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import devgraph as dg
from devgraph.cpu.memory import BlockPool
from devgraph.cpu.recorder import Recorder
from tests.support.cpu_capture import KNOWLEDGE, record
from tests.support.refusals import READS, SHAPES, X


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


def _drop_inside(handler: str, backend: dg.Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open a recording and drop it while ``handler`` runs its first operation."""
    real = getattr(Recorder, handler)

    def dropping(self: Recorder, *args: Any) -> Any:
        held.clear()
        return real(self, *args)

    monkeypatch.setattr(Recorder, handler, dropping)
    held: list[Any] = [backend.capture_context(backend.make_graph())]
    held[0].__enter__()
    X + 1
    assert not held


@pytest.mark.parametrize("handler", ["_call_function", "_call_operation"])
def test_recording_that_is_dropped_inside_an_operation_is_over(
    handler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAULTS 40: as a collection may drop what an interrupt left open."""
    want, backend = X + 1, dg.get_backend("cpu")
    _drop_inside(handler, backend, monkeypatch)
    assert not dg.is_capturing() and gc.isenabled()
    assert torch.equal(X + 1, want)
    x = X.clone()
    captured = dg.capture(lambda x: x + 1, x, backend=backend)
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
    assert torch.equal(captured.replay(), want)


def test_piecewise_compiles_after_a_recording_that_was_dropped_inside_an_operation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    want, backend = X + 1, dg.get_backend("cpu")
    with monkeypatch.context() as patch:
        _drop_inside("_call_operation", backend, patch)
    captured = dg.capture(lambda x: x + 1, X.clone(), backend=backend, policy="piecewise")
    assert torch.equal(captured.replay(), want)


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
