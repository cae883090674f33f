"""The error for device data that is read on the host inside a capture."""

from __future__ import annotations

import sys
from types import FrameType

from devgraph.api.errors import HostReadError
from devgraph.api.marks.marks import RegionScope, current_scope, refused
from devgraph.api.marks.source import SourceLine, is_machinery, user_line


def host_read_error(what: str, at: SourceLine | None = None, vendor: str = "") -> HostReadError:
    line = at or user_line()
    text = f"{what}, at {line}. A replay would not repeat this. {host_read_cure()} {vendor}"
    return refused(HostReadError(text.rstrip()))


def host_read_cure() -> str:
    """Return the remedy for a host read in the current capture, as sentences."""
    if isinstance(scope := current_scope(), RegionScope):
        return (
            f"Region {scope.outer.name} is part of the graph under policy 'full': keep the value "
            f"in a device tensor, or capture with policy='breakable', which runs regions eagerly."
        )
    return _cure_for_library() + (
        "Read the data after the replay, keep it in a device tensor, or move the read into a "
        "function marked @dg.region or @dg.no_graph and capture with policy='breakable'."
    )


_CURES = {
    "asyncio.runners": (
        "asyncio.run() formats the result of its coroutine: use asyncio.new_event_loop() and "
        "run_until_complete(). Otherwise: "
    ),
    "torch.distributions": "Pass validate_args=False to the distribution. Otherwise: ",
    "torch.optim": (
        "Pass fused=True to the optimizer, and on a device capturable=True, if it has these "
        "options. Otherwise: "
    ),
}
"""Remedies for host reads in modules of libraries."""


def _cure_for_library() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_machinery(frame):
        module = ".".join(frame.f_globals.get("__name__", "").split(".")[:2])
        if module in _CURES:
            return _CURES[module]
        frame = frame.f_back
    return ""
