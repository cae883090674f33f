"""Names of nodes: the modules and marked functions that launched the nodes of a graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from threading import get_ident
from typing import Any

import attrs
import torch

from devgraph.api.errors import InputTypeError, brief


@attrs.define
class NodeRange:
    """The nodes ``first`` to ``stop - 1`` of one graph, which one call launched.

    Nodes are numbered in capture order; the nodes of a loop count once. ``first`` and ``stop`` are
    None if the backend lacks the capability ``node_ranges``.
    """

    name: str
    depth: int
    """Number of enclosing named calls."""
    first: int | None
    stop: int | None = None

    def __str__(self) -> str:
        return f"{self.name}, {nodes_text(self.first, self.stop)}"


def nodes_text(first: int | None, stop: int | None) -> str:
    if first is None or stop is None:
        return "? nodes"
    if stop - first < 2:
        return f"node {first}" if stop > first else "no nodes"
    return f"nodes {first} to {stop - 1}"


class Names:
    """The assignment of the nodes in one capture's graphs to named calls."""

    def __init__(self, asked: object) -> None:
        self._root = asked if isinstance(asked, torch.nn.Module) else None
        if self._root is None and asked is not True:
            raise InputTypeError(
                f"name_nodes must be True, False or a torch.nn.Module, got {brief(asked)}"
            )
        self._running: list[str] = []  # the current named calls, outermost first
        self._ranges: list[NodeRange] = []  # ranges of the running calls in the current graph
        self._found: list[NodeRange] = []  # all ranges of the current graph
        self._recorded: Callable[[], int | None] | None = None

    @contextlib.contextmanager
    def hooked(self) -> Iterator[None]:
        """Name the nodes of submodules in the block with hooks, which ignore other threads."""
        thread = get_ident()

        def entering(name: str) -> Callable[..., None]:
            return lambda *_: self._enter(name) if get_ident() == thread else None

        def leave(*_: Any) -> None:
            if get_ident() == thread:
                self._leave()

        with contextlib.ExitStack() as undo:
            for name, module in self._root.named_modules() if self._root is not None else ():
                if name and not isinstance(module, torch.jit.ScriptModule):  # no hooks
                    enter = entering(name)
                    undo.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                    undo.callback(module.register_forward_hook(leave, always_call=True).remove)
            yield

    def begin(self, recorded: Callable[[], int | None]) -> list[NodeRange]:
        """Begin a graph, and return the list to which its ranges will be appended.

        ``recorded`` returns the number of nodes so far.
        """
        self._recorded, self._found = recorded, []
        self._ranges = [self._begun(name, depth) for depth, name in enumerate(self._running)]
        return self._found

    def end(self) -> None:
        """End all ranges of the current graph. Call this before its recording ends."""
        while self._ranges:
            self._close()
        self._recorded = None

    @contextlib.contextmanager
    def named(self, name: str) -> Iterator[None]:
        self._enter(name)
        try:
            yield
        finally:
            self._leave()

    def _enter(self, name: str) -> None:
        if self._recorded is not None:
            self._ranges.append(self._begun(name, len(self._running)))
        self._running.append(name)

    def _leave(self) -> None:
        self._running.pop()
        if self._recorded is not None:
            self._close()

    def _close(self) -> None:
        assert self._recorded is not None
        one = self._ranges.pop()
        one.stop = self._recorded()
        if one.stop is not None and one.stop == one.first and self._found[-1] is one:
            self._found.pop()

    def _begun(self, name: str, depth: int) -> NodeRange:
        assert self._recorded is not None
        self._found.append(NodeRange(name, depth, self._recorded()))
        return self._found[-1]
