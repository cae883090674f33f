"""Helpers of the CPU backend's tests: record a function, replay it, compare with eager."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from devgraph.cpu.memory import BlockPool
from devgraph.cpu.metadata import Metadata
from devgraph.cpu.recorder import Recorder
from devgraph.cpu.tape import Span, Tape

METADATA = Metadata()


def record(fn: Callable[..., Any], *args: Any, pool: BlockPool | None = None) -> tuple[Tape, Any]:
    """Return the tape of ``fn(*args)`` and what the recording returned."""
    with Recorder(pool or BlockPool(), metadata=METADATA) as recorder:
        outputs = fn(*args)
    return recorder.tape(), outputs


@contextlib.contextmanager
def span(recorder: Recorder, label: str) -> Iterator[Span]:
    """Record the block as the part of one region."""
    begun = recorder.begin_span(label)
    yield begun
    recorder.end_span(begun)


def tensors(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in ``tree``."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, NaN included, in dtype, shape and layout.

    Strides of dimensions of size 1, and of empty tensors, address nothing and may differ.
    """
    if left.dtype is not right.dtype or left.shape != right.shape:
        return False
    if left.numel() == 0:
        return True
    for size, mine, others in zip(left.shape, left.stride(), right.stride(), strict=True):
        if size > 1 and mine != others:
            return False
    raw = [
        torch.empty_like(t, memory_format=torch.contiguous_format).copy_(t).reshape(-1)
        for t in (left.detach(), right.detach())
    ]
    first, second = [
        (torch.view_as_real(t).reshape(-1) if t.is_complex() else t).view(torch.uint8) for t in raw
    ]
    return torch.equal(first, second)


def copies(values: Sequence[Any]) -> list[Any]:
    """Return clones of the tensors among ``values``, with the same strides."""
    return [
        v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v
        for v in values
    ]


def assign(targets: Sequence[Any], values: Sequence[Any]) -> None:
    """Copy the tensors among ``values`` into those of ``targets``."""
    for target, value in zip(targets, values, strict=True):
        if isinstance(target, torch.Tensor):
            with torch.no_grad():
                target.copy_(value)


def check_replays(
    fn: Callable[..., Any], make: Callable[[int], Sequence[Any]], *, draws: bool = True
) -> Tape:
    """Check that replays of ``fn`` do what eager runs do, on other data than that of capture.

    Args:
        make: returns the arguments for a seed; layouts must not depend on it.
        draws: whether to seed the default generator, which other threads share.
    """
    bound = list(make(0))
    before = copies(bound)
    tape, outputs = record(fn, *bound)
    for value, old in zip(bound, before, strict=True):
        if isinstance(value, torch.Tensor):
            assert same(value, old), "the capture wrote an input"
    for seed in (1, 2):
        fresh = list(make(seed))
        mine = copies(fresh)
        if draws:
            torch.manual_seed(seed)
        expected = fn(*mine)
        assign(bound, fresh)
        if draws:
            torch.manual_seed(seed)
        tape.replay()
        got, wanted = tensors(outputs), tensors(expected)
        assert len(got) == len(wanted)
        for index, (left, right) in enumerate(zip(got, wanted, strict=True)):
            assert same(left, right), (
                f"output {index}: {left.dtype} {tuple(left.shape)} {left.stride()} against "
                f"{right.dtype} {tuple(right.shape)} {right.stride()}"
            )
        for index, (left, right) in enumerate(zip(bound, mine, strict=True)):
            if isinstance(left, torch.Tensor):
                assert same(left, right), f"argument {index} differs after the replay"
    return tape
