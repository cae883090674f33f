"""One call of a marked function inside a capture, and how to run it again later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch.utils import _pytree as pytree

from devgraph.api.buffers import tensors_in
from devgraph.api.errors import RegionError
from devgraph.api.marks.marks import Mark
from devgraph.api.marks.modes import Modes

if TYPE_CHECKING:
    from devgraph.api.pool import Pool

__all__ = ["BoundCall", "RegionHit", "describe"]

BoundCall = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function, its arguments and its keyword arguments, which may change between calls."""


def describe(tensor: torch.Tensor) -> str:
    """Return dtype, shape, stride and device of ``tensor`` for a message."""
    return f"{tensor.dtype} {tuple(tensor.shape)} strides {tensor.stride()} on {tensor.device}"


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return (tensor.dtype, tensor.shape, tensor.stride(), tensor.device)


class _Passed(NamedTuple):
    """A view of an argument that a region handed back."""

    address: int
    layout: tuple[object, ...]

    def __str__(self) -> str:
        return f"a view of an argument at address {self.address:#x}"


class RegionHit:
    """A recorded call: the mark, its tensors at fixed addresses, and where results go.

    Results that are views of argument tensors are handed back as they are. Every other returned
    tensor is copied, as part of the call, into a *bridge* buffer whose address never changes.

    Args:
        pool: aliases what is its own.
        mark: the marked function.
        args, kwargs: its arguments without the host arguments. Pool tensors among them are
            aliased, not owned, so that a later part of the capture may reuse their memory.
        index: position among the regions of the capture.
    """

    __slots__ = (
        "_bridges",
        "_leaves",
        "_pool",
        "_returned_none",
        "_spec",
        "args",
        "index",
        "kwargs",
        "mark",
        "modes",
        "note",
    )

    def __init__(
        self,
        pool: Pool,
        mark: Mark,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        index: int,
    ) -> None:
        def alias(leaf: Any) -> Any:
            return pool.alias(leaf) if isinstance(leaf, torch.Tensor) else leaf

        self._pool = pool
        self.mark = mark
        self.args: tuple[Any, ...] = pytree.tree_map(alias, args)
        self.kwargs: dict[str, Any] = pytree.tree_map(alias, kwargs)
        self.index = index
        self.modes = Modes.current()
        """The modes of the call; later runs see the same."""
        self.note: Any = None
        """The vendor's own note: node set, tape span, task-group handle."""
        self._leaves: list[Any] = []
        self._bridges: list[torch.Tensor | None] = []
        self._spec: pytree.TreeSpec | None = None
        self._returned_none = False

    def first_run(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        host: dict[str, Any],
        body: Callable[..., Any] | None = None,
    ) -> Any:
        """Run the body for the first time and return what the caller of the mark receives.

        Args:
            args, kwargs: the caller's own arguments. What is handed back must own its memory as
                they do, so the aliases of later runs will not serve.
            host: the host keyword arguments of the mark.
            body: replaces the marked function for this run (a capture stub).
        """
        result = (body or self.mark.fn)(*args, **kwargs, **host)
        leaves, self._spec = pytree.tree_flatten(result)
        owned = {
            leaf.untyped_storage().data_ptr()
            for leaf in tensors_in((args, kwargs))
            if leaf.layout is torch.strided
        }
        out = []
        for leaf in leaves:
            bridge = None
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in owned:
                bridge = torch.empty_strided(
                    leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device
                )
                bridge.copy_(leaf)
            self._bridges.append(bridge)
            out.append(leaf if bridge is None else bridge)
        self._leaves = [self._remembered(leaf) for leaf in out]
        self._returned_none = result is None
        return pytree.tree_unflatten(out, self._spec)

    @staticmethod
    def _remembered(leaf: Any) -> Any:
        # The layout only: holding a passed-through pool tensor would keep its block from reuse.
        if isinstance(leaf, torch.Tensor):
            return _Passed(leaf.data_ptr(), _layout(leaf))
        return leaf

    def alias_bridges(self) -> None:
        """Keep the bridges as aliases: they live in the graph's pool and are its to reuse."""
        self._bridges = [None if b is None else self._pool.alias(b) for b in self._bridges]

    def run(self, host: dict[str, Any]) -> None:
        """Run the body again with other host values, writing the same result addresses.

        Raises:
            RegionError: the result has another structure, shape, dtype, stride, device or address.
        """
        if Modes.current() == self.modes:
            self._deliver_all(self.mark.fn(*self.args, **self.kwargs, **host))
        else:
            with self.modes.restored():
                self._deliver_all(self.mark.fn(*self.args, **self.kwargs, **host))

    def _deliver_all(self, result: Any) -> None:
        if result is None and self._returned_none:
            return
        leaves, spec = pytree.tree_flatten(result)
        if spec != self._spec:
            raise RegionError(
                f"{self.mark.name} returned {spec} and returned {self._spec} at capture; a region "
                f"must return the same structure every time."
            )
        for leaf, bridge, known in zip(leaves, self._bridges, self._leaves, strict=True):
            self._deliver(leaf, bridge, known)

    def _deliver(self, leaf: Any, bridge: torch.Tensor | None, known: Any) -> None:
        if bridge is not None:
            if not isinstance(leaf, torch.Tensor) or _layout(leaf) != _layout(bridge):
                self._refuse(leaf, describe(bridge))
            bridge.copy_(leaf)
        elif isinstance(known, _Passed) or isinstance(leaf, torch.Tensor):
            if known != self._remembered(leaf):
                self._refuse(leaf, str(known))
        elif known is not leaf and known != leaf:
            self._refuse(leaf, repr(known))

    def _refuse(self, leaf: Any, expected: str) -> NoReturn:
        got = describe(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf)
        raise RegionError(
            f"{self.mark.name} returned {got}; at capture it returned {expected}. What the code "
            f"after it reads is fixed, so a marked function must return the same layout every "
            f"time (write into a preallocated output of the largest size instead)."
        )

    def bound_run(self, host: dict[str, Any]) -> BoundCall:
        """Return ``run`` as a call that is bound to the live ``host``.

        What it returns goes to ``refuse`` unless it is None. Ask for it under the modes of torch
        that replays will run in.
        """
        if Modes.current() == self.modes:
            if self._returned_none:
                if not self.kwargs:
                    return self.mark.fn, self.args, host
                fn, args, kwargs = self.mark.fn, self.args, self.kwargs
                return lambda: fn(*args, **kwargs, **host), (), {}
            assert self._spec is not None
            if self._spec.is_leaf() and self._bridges[0] is not None:
                return self._runner_of_one(host, self._bridges[0]), (), {}
        return self.run, (host,), {}

    def refuse(self, result: Any) -> NoReturn:
        """Raise RegionError for what a function returned that returned None at capture."""
        self._refuse(result, "None")

    def _runner_of_one(self, host: dict[str, Any], bridge: torch.Tensor) -> Callable[[], None]:
        fn, args, kwargs = self.mark.fn, self.args, self.kwargs
        shape, stride, dtype, device = bridge.shape, bridge.stride(), bridge.dtype, bridge.device
        copy = bridge.copy_

        def run_one() -> None:
            result = fn(*args, **kwargs, **host)
            if (
                type(result) is not torch.Tensor
                or result.shape != shape
                or result.dtype is not dtype
                or result.stride() != stride
                or result.device != device
            ):
                self._refuse(result, describe(bridge))
            copy(result)

        return run_one

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        """Every tensor among the arguments."""
        return tensors_in((self.args, self.kwargs))
