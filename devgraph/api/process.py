"""Which process this is, for device handles do not survive a fork, and where it may keep files."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Protocol

from devgraph.api.errors import StateError


class Renewed(Protocol):
    """What holds state that a forked child must not inherit."""

    def after_fork(self) -> None:
        """Forget it, in a child that has no other thread yet."""


class _Identity:
    """Replaced in every forked child, so that comparing by ``is`` costs no system call."""

    def __init__(self) -> None:
        self.token = object()
        self.renewed: weakref.WeakSet[Renewed] = weakref.WeakSet()
        """Told of every fork, in the child."""

    def renew(self) -> None:
        self.token = object()
        for thing in list(self.renewed):
            thing.after_fork()

    def require(self, token: object, call: str) -> None:
        """Raise StateError unless ``token`` is that of this process."""
        if token is not self.token:
            raise StateError(
                f"cannot {call} in a forked process: graphs, captures, pools and runners belong "
                f"to the process that made them. Start workers with 'spawn' and capture there."
            )


def cache_folder() -> Path:
    """Return the folder of devgraph among the user's caches, which may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "devgraph"


identity = _Identity()
os.register_at_fork(after_in_child=identity.renew)
