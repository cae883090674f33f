"""Which process this is: device handles do not survive a fork."""

from __future__ import annotations

import os

__all__ = ["identity"]


class _Identity:
    """Replaced in every forked child, so that comparing by ``is`` costs no system call."""

    def __init__(self) -> None:
        self.token = object()

    def renew(self) -> None:
        self.token = object()


identity = _Identity()
os.register_at_fork(after_in_child=identity.renew)
