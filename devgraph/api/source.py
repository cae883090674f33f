"""Where in the user's code something happened: the file and line that errors name."""

from __future__ import annotations

import linecache
import sys
from types import FrameType

import attrs

# Frames of these packages are machinery, not the code whose author can act on the message.
_MACHINERY = (
    "torch",
    "contextlib",
    "functools",
    "devgraph.api",
    "devgraph.cpu",
    "devgraph.cuda",
    "devgraph.npu",
    "devgraph.rocm",
    "devgraph.runners",
)


@attrs.frozen
class SourceLine:
    """One line of source: ``file``, ``line`` (from 1), the function and the stripped text."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        tail = f": {self.text}" if self.text else ""
        return f"{self.file}:{self.line} in {self.function}{tail}"


def _is_machinery(frame: FrameType) -> bool:
    module = frame.f_globals.get("__name__", "")
    return any(module == name or module.startswith(name + ".") for name in _MACHINERY)


def user_line() -> SourceLine:
    """Return the innermost line of the calling stack outside torch and devgraph's own rooms."""
    frame: FrameType | None = sys._getframe(1)
    outermost = frame
    while frame is not None and _is_machinery(frame):
        outermost, frame = frame, frame.f_back
    found = frame or outermost
    assert found is not None
    code = found.f_code
    text = linecache.getline(code.co_filename, found.f_lineno).strip()
    return SourceLine(code.co_filename, found.f_lineno, code.co_name, text)
