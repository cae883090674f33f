"""The errors that only this integration raises."""

from __future__ import annotations

from devgraph.api.errors import DeviceGraphError

__all__ = ["UnsupportedModelError"]


class UnsupportedModelError(DeviceGraphError, ValueError):
    """The model does something that this integration cannot run correctly; it says what."""
