"""Compiled pieces on the CPU, as one operation each that a recorder can see.

A compiled piece writes memory through its own machine code, out of sight of torch's dispatcher.
Wrapped here, a call of it is one operation whose results are flat storages; what the piece
returns are views of these or of its inputs, as they would be without compilation.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

_LIBRARY = torch.library.Library("devgraph_cpu", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "compiled(int piece, Tensor[] read, Tensor(a!)[] written, int[] at, int[] numbers) -> Tensor[]"
)
_ids = itertools.count()
_pieces: weakref.WeakValueDictionary[int, CompiledPiece] = weakref.WeakValueDictionary()


@attrs.frozen
class _View:
    """Where one returned tensor lies."""

    storage: int
    """Index of a result storage; or, if negative, -1 minus the index of an input."""
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        base = results[self.storage] if self.storage >= 0 else inputs[-1 - self.storage]
        return base.as_strided(self.size, self.stride, self.offset)


@attrs.frozen
class _Shape:
    """What a piece returns for inputs of given layouts."""

    storages: tuple[tuple[int, torch.dtype], ...]
    """Elements and dtype of every storage that the piece makes."""
    written: tuple[int, ...]
    """The inputs that the piece writes."""
    leaves: tuple[Any, ...]
    """A ``_View`` per returned tensor; anything else is returned as it is."""
    spec: pytree.TreeSpec


class CompiledPiece:
    """A piece that a recording sees as one operation: ``run``, compiled from ``source``, takes and
    returns tensors and numbers."""

    def __init__(self, run: Callable[..., Any], source: torch.fx.GraphModule) -> None:
        self._run = run
        self._source = source
        self._shapes: dict[Any, _Shape] = {}
        self._order: list[bool] = []
        self._id = next(_ids)
        _pieces[self._id] = self

    def __call__(self, *args: Any) -> Any:
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        numbers = [int(a) for a in args if not isinstance(a, torch.Tensor)]
        self._order = [isinstance(a, torch.Tensor) for a in args]
        shape = self.shape(tensors, numbers)
        read = [t for i, t in enumerate(tensors) if i not in shape.written]
        written = [tensors[i] for i in shape.written]
        results = torch.ops.devgraph_cpu.compiled(
            self._id, read, written, list(shape.written), numbers
        )
        leaves = [
            leaf.of(results, tensors) if isinstance(leaf, _View) else leaf for leaf in shape.leaves
        ]
        return pytree.tree_unflatten(leaves, shape.spec)

    def shape(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> _Shape:
        """Return what the piece returns and which inputs it writes, for inputs like these."""
        key = (
            tuple((t.dtype, tuple(t.shape), t.stride(), t.storage_offset()) for t in tensors),
            tuple(numbers),
        )
        if key not in self._shapes:
            self._shapes[key] = self._learn(tensors, numbers)
        return self._shapes[key]

    def _learn(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> _Shape:
        # Version counters, which tell what was written, exist outside inference mode only.
        with torch.inference_mode(False), torch.no_grad(), FakeTensorMode():
            fakes = [
                torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu")
                for t in tensors
            ]
            versions = [t._version for t in fakes]
            result = self._source(*self.arguments(fakes, numbers))
        written = tuple(
            i for i, (t, v) in enumerate(zip(fakes, versions, strict=True)) if t._version != v
        )
        owner = {t.untyped_storage()._cdata: -1 - i for i, t in enumerate(fakes)}
        storages: list[tuple[int, torch.dtype]] = []
        leaves, spec = pytree.tree_flatten(result)
        out: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                out.append(leaf)
                continue
            storage = leaf.untyped_storage()
            if storage._cdata not in owner:
                owner[storage._cdata] = len(storages)
                storages.append((int(storage.nbytes()) // leaf.dtype.itemsize, leaf.dtype))
            at = owner[storage._cdata]
            offset = int(leaf.storage_offset())
            if at < 0:
                offset += int(tensors[-1 - at].storage_offset())
            out.append(_View(at, leaf.dtype, tuple(map(int, leaf.shape)), leaf.stride(), offset))
        return _Shape(tuple(storages), written, tuple(out), spec)

    def arguments(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> list[Any]:
        """Return tensors and numbers in the piece's own order of arguments."""
        left, right = iter(tensors), iter(numbers)
        return [next(left) if is_tensor else next(right) for is_tensor in self._order]

    def run(
        self, tensors: Sequence[torch.Tensor], numbers: Sequence[int], shape: _Shape
    ) -> list[torch.Tensor]:
        """Run the compiled code and return the storages it made."""
        leaves = pytree.tree_leaves(self._run(*self.arguments(tensors, numbers)))
        results = [torch.empty(count, dtype=dtype) for count, dtype in shape.storages]
        for leaf, view in zip(leaves, shape.leaves, strict=True):
            if isinstance(view, _View) and view.storage >= 0:
                view.of(results, ()).copy_(leaf)
        return results


def _called(
    piece: int,
    read: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
    at: Sequence[int],
    numbers: Sequence[int],
) -> tuple[CompiledPiece, list[torch.Tensor], _Shape]:
    """Return what a call of the operation is: the piece, its tensors in order, what it returns."""
    others, places = iter(read), dict(zip(at, written, strict=True))
    count = len(read) + len(written)
    tensors = [places[i] if i in places else next(others) for i in range(count)]
    return _pieces[piece], tensors, _pieces[piece].shape(tensors, numbers)


def _execute(*call: Any) -> list[torch.Tensor]:
    piece, tensors, shape = _called(*call)
    return piece.run(tensors, call[-1], shape)


def _describe(*call: Any) -> list[torch.Tensor]:
    _, tensors, shape = _called(*call)
    device = tensors[0].device
    return [torch.empty(count, dtype=dtype, device=device) for count, dtype in shape.storages]


_LIBRARY.impl("compiled", _execute, "CPU")  # type: ignore[no-untyped-call]
torch.library.register_fake("devgraph_cpu::compiled", _describe, lib=_LIBRARY)
