"""Compiled pieces of the policy ``piecewise``, each recorded as one operation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from devgraph.cpu.modes import current_recorder


@attrs.frozen
class _View:
    """The memory and the layout of one returned tensor."""

    storage: int
    """Index of the result storage, or ``-1 - i`` for a view of argument ``i``."""
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, results: Sequence[torch.Tensor], args: Sequence[Any]) -> torch.Tensor:
        base = results[self.storage] if self.storage >= 0 else args[-1 - self.storage]
        view: torch.Tensor = base.as_strided(self.size, self.stride, self.offset)
        return view


@attrs.frozen
class _Shape:
    """The layouts of a piece's results for one combination of argument layouts."""

    storages: tuple[tuple[int, torch.dtype], ...]
    """Number of elements and dtype of every storage that the piece allocates."""
    leaves: tuple[Any, ...]
    """A ``_View`` for each returned tensor; other values are returned unchanged."""
    spec: pytree.TreeSpec


def _layout_key(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor):
        return int(argument)
    return argument.dtype, argument.shape, argument.stride(), argument.storage_offset()


class CompiledPiece:
    """A compiled function of tensors and numbers that a recording treats as one operation.

    The machine code bypasses torch's dispatcher, so the recording allocates flat storages for the
    results. The piece returns views of these storages or of its inputs. The views have the layouts
    that ``source``, the uncompiled piece, returns.
    """

    def __init__(self, run: Callable[..., Any], source: torch.fx.GraphModule) -> None:
        self._run = run
        self._source = source
        self._shapes: dict[Any, _Shape] = {}

    def __call__(self, *args: Any) -> Any:
        key, recorder = tuple(map(_layout_key, args)), current_recorder()
        if key not in self._shapes:
            self._shapes[key] = self._learn(args)
        if recorder is None:
            return self._run(*args)
        shape = self._shapes[key]
        write = functools.partial(self._write, shape.leaves)
        results = recorder.call("a compiled piece", write, args, shape.storages)
        leaves = [
            leaf.of(results, args) if isinstance(leaf, _View) else leaf for leaf in shape.leaves
        ]
        return pytree.tree_unflatten(leaves, shape.spec)

    def _learn(self, args: Sequence[Any]) -> _Shape:
        with torch.no_grad(), FakeTensorMode():
            fakes = [
                torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="cpu")
                if isinstance(a, torch.Tensor)
                else int(a)
                for a in args
            ]
            leaves, spec = pytree.tree_flatten(self._source(*fakes))
        owner = {
            fake.untyped_storage()._cdata: -1 - index
            for index, fake in enumerate(fakes)
            if isinstance(fake, torch.Tensor)
        }
        storages: list[tuple[int, torch.dtype]] = []
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
                offset += int(args[-1 - at].storage_offset())
            out.append(_View(at, leaf.dtype, tuple(map(int, leaf.shape)), leaf.stride(), offset))
        return _Shape(tuple(storages), tuple(out), spec)

    def _write(
        self, leaves: Sequence[Any], results: Sequence[torch.Tensor], args: Sequence[Any]
    ) -> None:
        """Run the compiled code and copy its results into ``results``."""
        returned = pytree.tree_leaves(self._run(*args))
        for leaf, view in zip(returned, leaves, strict=True):
            if isinstance(view, _View) and view.storage >= 0:
                view.of(results, ()).copy_(leaf)
