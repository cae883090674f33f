"""Leases: in debug mode, outputs that notice when they are read too late.

An output is a view of memory that the next run overwrites. A leased output behaves like that
tensor until then; afterwards every operation on it, or on a view taken from it, raises
``StaleOutputError``. Copies (``clone``, ``cpu`` to another device, arithmetic) are free of it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from devgraph.api.errors import StaleOutputError

logger = logging.getLogger(__name__)


class LeaseClock:
    """Counts the runs of one runner.

    Attributes:
        caller: the thread whose outputs the last run returned, without copying them.
    """

    __slots__ = ("_callers", "caller", "name", "now")

    def __init__(self, name: str) -> None:
        self.name = name
        self.now = 0
        self.caller: int | None = None
        self._callers: set[int] | None = set()

    def called_by(self, thread: int) -> None:
        """Note that another thread runs steps; say once that threads take turns at it.

        A runner may be handed from one thread to the next. Threads that take turns overwrite each
        other's outputs, which nobody sees in the numbers.
        """
        self.caller = thread
        if self._callers is None:
            return
        if thread in self._callers:
            self._callers = None
            logger.warning(
                "threads take turns at running %s without clone=True: each run overwrites the "
                "outputs that another thread may still read. Pass clone=True, or debug=True to the "
                "runner to find late reads",
                self.name,
            )
        else:
            self._callers.add(thread)

    def joined(self, name: str) -> LeaseClock:
        """Return this clock for another runner too, whose runs overwrite the same outputs."""
        self.name = f"{self.name} and {name}"
        return self

    def tick(self) -> None:
        """Expire every lease that was given out so far."""
        self.now += 1


class LeasedTensor(torch.Tensor):
    """A tensor that may be read until its runner runs again."""

    _clock: LeaseClock
    _until: int
    _path: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        leased = [
            leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, LeasedTensor)
        ]
        if getattr(func, "__name__", "") not in _ALWAYS:
            for tensor in leased:
                _require_current(tensor, func)
        args, kwargs = pytree.tree_map(_plain, (args, kwargs))
        result = func(*args, **kwargs)
        return pytree.tree_map(lambda leaf: _inherit(leaf, leased), result)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        if self._clock.now != self._until:
            return f"<expired output {self._path} of {self._clock.name}>"
        return f"leased {_plain(self)!r}"


# Metadata does not touch the memory, and an error message may want to show it.
_ALWAYS = frozenset({"size", "dim", "numel", "is_contiguous", "stride", "type", "__len__"})


def lease(tree: Any, clock: LeaseClock) -> Any:
    """Return ``tree`` with every tensor leased until ``clock`` ticks."""
    leaves, spec = pytree.tree_flatten_with_path(tree)
    leased = [
        _wrap(leaf, clock, clock.now, pytree.keystr(path) or "(the tensor itself)")
        if isinstance(leaf, torch.Tensor)
        else leaf
        for path, leaf in leaves
    ]
    return pytree.tree_unflatten(leased, spec)


def released(tensor: LeasedTensor) -> torch.Tensor:
    """Return the plain tensor of a lease that has not expired.

    Raises:
        StaleOutputError: it has.
    """
    _require_current(tensor, None)
    return _plain(tensor)  # type: ignore[no-any-return]


def _wrap(tensor: torch.Tensor, clock: LeaseClock, until: int, path: str) -> LeasedTensor:
    wrapped = tensor.as_subclass(LeasedTensor)
    wrapped._clock = clock
    wrapped._until = until
    wrapped._path = path
    return wrapped


def _plain(leaf: Any) -> Any:
    if not isinstance(leaf, LeasedTensor):
        return leaf
    with torch._C.DisableTorchFunctionSubclass():
        return leaf.as_subclass(torch.Tensor)


def _inherit(leaf: Any, sources: list[LeasedTensor]) -> Any:
    """Lease ``leaf`` as well if it shares memory with one of ``sources``."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
        return leaf
    address = leaf.untyped_storage().data_ptr()
    for source in sources:
        if _plain(source).untyped_storage().data_ptr() == address:
            return _wrap(leaf, source._clock, source._until, source._path)
    return leaf


def _require_current(tensor: LeasedTensor, func: Callable[..., Any] | None) -> None:
    clock = tensor._clock
    if clock.now != tensor._until:
        by = f" by {getattr(func, '__name__', func)}()" if func is not None else ""
        raise StaleOutputError(
            f"output {tensor._path} of {clock.name} was read{by} after {clock.now - tensor._until} "
            f"more run(s), which overwrote it. Use it before the next run, copy it, or call "
            f"run(..., clone=True)."
        )
