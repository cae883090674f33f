"""Executable: what a graph launches.

A graph holds one at a time in its slot, swaps it with ``use`` and refers to it strongly. So an
executable holds what it launches and never the graph: that cycle would keep device memory until a
collection.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from devgraph.api.errors import StateError


class Executable(Protocol):
    """What a graph launches; called in legal states only, under the lock of the graph's pool."""

    def launch(self) -> None:
        """Launch once on the current stream, whichever device is this thread's own."""

    def bound(self, stream: int | None) -> Callable[[], None]:
        """Return the launch as one call, for threads on the graph's device.

        Args:
            stream: the stream that is current whenever it is called; None if that is not known.
        """


class Call:
    """An executable that is one call.

    Args:
        launch: launches once on the current stream.
    """

    def __init__(self, launch: Callable[[], None]) -> None:
        self.launch = launch

    def bound(self, stream: int | None) -> Callable[[], None]:
        """Return the call."""
        return self.launch


class LaunchSlot:
    """The one place that says what the next replay of a graph launches.

    Args:
        executable: what to launch first.
    """

    def __init__(self, executable: Executable) -> None:
        self.executable = executable
        """What the next replay launches."""
        self.calls = [executable.launch]
        """Its launch, alone; what was bound beforehand calls ``calls[0]`` and holds no graph."""

    def launcher(self) -> Callable[[], None]:
        """Return a call that launches what the slot then holds."""
        calls = self.calls

        def launch() -> None:
            calls[0]()

        return launch


class Launches(Protocol):
    """A graph, as an executable that replaces itself sees it."""

    def use(self, executable: Executable) -> None:
        """Launch ``executable`` from now on."""


_Graph = TypeVar("_Graph", bound=Launches)


class Finding(abc.ABC, Generic[_Graph]):
    """An executable that finds something out in its first launch and then replaces itself.

    Args:
        graph: the graph that uses it.
    """

    def __init__(self, graph: _Graph) -> None:
        self._graph = weakref.ref(graph)

    @property
    def graph(self) -> _Graph:
        """The graph that uses it."""
        return held(self._graph)

    @abc.abstractmethod
    def find(self) -> Executable:
        """Launch once, and return what takes this one's place.

        If it raises, this one stays, unless it gave the graph another.
        """

    def launch(self) -> None:
        """Launch once, and let the graph use what was found."""
        self.graph.use(self.find())

    def bound(self, stream: int | None) -> Callable[[], None]:
        """Return the launch; what replaces it is asked for anew."""
        return self.launch


_Held = TypeVar("_Held")


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """Return a call of a graph's method that does not keep the graph."""
    reference = weakref.WeakMethod(method)
    return lambda: held(reference)()


def held(reference: Callable[[], _Held | None]) -> _Held:
    """Return the graph, or its method, that a ``replay`` which was kept refers to."""
    found = reference()
    if found is None:
        raise StateError("cannot replay a graph that is gone: keep the graph, not its replay.")
    return found
