"""Reversible replacement of an engine's attributes, and the switch that enables it."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from devgraph.api.environment import MODE_VARIABLE, warn_unknown
from devgraph.api.errors import ConfigError, DeviceGraphError

if TYPE_CHECKING:
    from devgraph.integrations.engine.memory import GraphMemory

logger = logging.getLogger(__name__)


class InstallError(DeviceGraphError):
    """This version of the engine lacks an attribute that devgraph replaces."""


class Changes:
    """The changed attributes of an engine; ``engine`` is its name with the tested versions."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._undo = contextlib.ExitStack()
        self.replaced: list[str] = []

    def require(self, owner: Any, *names: str) -> None:
        """Raise InstallError for the first of ``names`` that ``owner`` lacks."""
        for name in names:
            if not hasattr(owner, name):
                raise InstallError(
                    f"{getattr(owner, '__name__', owner)} has no {name}, which devgraph replaces. "
                    f"Use a tested version: {self._engine}."
                )

    def wrap(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace an attribute of ``owner`` with ``wrap(attribute)``; see ``change``."""
        self.require(owner, name)
        self.change(owner, name, wrap(getattr(owner, name)))

    def around(
        self,
        owner: Any,
        name: str,
        *,
        before: Callable[..., object] = lambda *_, **__: None,
        after: Callable[..., object] = lambda *_, **__: None,
    ) -> None:
        """Call ``before`` and ``after`` around a method of ``owner``, with the same arguments."""

        def wrap(method: Any) -> Any:
            @functools.wraps(method)
            def both(*args: Any, **kwargs: Any) -> Any:
                before(*args, **kwargs)
                result = method(*args, **kwargs)
                after(*args, **kwargs)
                return result

            return both

        self.wrap(owner, name, wrap)

    def change(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of ``owner``; raise InstallError if it does not exist."""
        self.require(owner, name)
        if name in vars(owner):
            self.on_undo(setattr, owner, name, vars(owner)[name])
        else:
            self.on_undo(delattr, owner, name)
        setattr(owner, name, value)
        self.replaced.append(f"{getattr(owner, '__name__', owner)}.{name}")

    def on_undo(self, call: Callable[..., object], *args: Any) -> None:
        """Register ``call(*args)`` as a part of ``undo``."""
        self._undo.callback(call, *args)

    def undo(self) -> None:
        """Undo all changes, newest first. Idempotent."""
        self._undo.close()
        self.replaced.clear()


class Installed:
    """The installation of devgraph in an engine of this process."""

    def __init__(self, engine: str, switch: str) -> None:
        self._engine = engine
        self._switch = switch
        self._asked: dict[str, str | None] = {}
        self.changes: Any = None

    def repeated(self, **asked: str | None) -> bool:
        """Return whether devgraph is installed; raise ConfigError if it has other settings."""
        for name, value in asked.items() if self.changes is not None else ():
            if value not in (None, self._asked[name]):
                raise ConfigError(
                    f"devgraph is already installed in {self._engine} with "
                    f"{name}={self._asked[name]}, but {name}={value} was requested. Call "
                    f"uninstall() first."
                )
        return self.changes is not None

    def put(
        self, changes: Changes, make: Callable[[], None], *, strict: bool, **asked: str | None
    ) -> bool:
        """Change the engine with ``make``; return False if ``make`` failed and was undone."""
        try:
            make()
        except BaseException as error:
            changes.undo()
            if not isinstance(error, Exception) or isinstance(error, ConfigError):
                raise
            if strict and isinstance(error, DeviceGraphError):
                raise
            if strict:
                raise InstallError(f"{type(error).__name__}: {error}") from error
            logger.warning(
                "devgraph is not used: its installation failed (%s: %s), so %s keeps its own graph "
                "layer. Set %s=strict to raise this error.",
                *(type(error).__name__, error, self._engine, self._switch),
            )
            return False
        self.changes, self._asked = changes, asked
        logger.info(
            "devgraph is the graph layer of %s: %s", self._engine, ", ".join(changes.replaced)
        )
        return True

    def take_out(self, memory: GraphMemory) -> None:
        """Map released memory again, and undo the changes. Idempotent."""
        if self.changes is not None:
            memory.restore()
            changes, self.changes = self.changes, None
            changes.undo()


def mode_text(mode: str | None) -> str | None:
    """Return ``mode``, or the mode configuration in the environment if ``mode`` is None."""
    warn_unknown()
    return mode if mode is not None else os.environ.get(MODE_VARIABLE) or None
