"""Lines of the user's code, for error messages."""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import sys
import warnings
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import attrs

from devgraph.api.errors import DeviceGraphWarning

# Code of these packages, except in ``_ON_TOP``, is machinery: a user cannot change it, so messages
# do not name its lines.
_MACHINERY = {"torch", "devgraph", *sys.stdlib_module_names}
_ON_TOP = ("devgraph.integrations", "devgraph.testing")


@attrs.frozen
class SourceLine:
    """One line of source code: file, line number from 1, function, and text without indentation."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        tail = f": {self.text}" if self.text else ""
        return f"{self.file}:{self.line} in {self.function}{tail}"


def is_machinery(frame: FrameType) -> bool:
    """Whether ``frame`` runs torch, devgraph or standard library code."""
    # The lambdas that make_fx evaluates have no module.
    default = "torch" if frame.f_code.co_filename == "<string>" else ""
    return is_machinery_module(frame.f_globals.get("__name__", default))


def traced_line(error: BaseException) -> SourceLine | None:
    """Return the innermost line of user code in the trace of a torch.compile error, or None."""
    for frame in reversed(getattr(error, "real_stack", None) or []):
        if not _is_machinery_file(frame.filename):
            text = _text(frame.filename, frame.lineno or 0)
            return SourceLine(frame.filename, frame.lineno, frame.name, text)
    return None


def _is_machinery_file(file: str) -> bool:
    """Whether a file contains torch, devgraph or standard library code."""
    path, torch_folder = Path(file), Path(str(sys.modules["torch"].__file__)).parent
    for folder in (torch_folder.parent, Path(__file__).parents[3], Path(functools.__file__).parent):
        if path.is_relative_to(folder):
            return is_machinery_module(".".join(path.relative_to(folder).parts))
    return False


def add_machinery(module: str) -> None:
    """Treat a vendor's torch extension, or the module of a backend, as machinery."""
    _MACHINERY.add(module)
    is_machinery_module.cache_clear()


@functools.cache
def is_machinery_module(module: str) -> bool:
    is_ours = module in _MACHINERY or module.partition(".")[0] in _MACHINERY
    return is_ours and not module.startswith(_ON_TOP)


def user_line() -> SourceLine:
    """Return the innermost line of user code in the call stack."""
    frame: FrameType | None = sys._getframe(1)
    outermost = frame
    while frame is not None and is_machinery(frame):
        outermost, frame = frame, frame.f_back
    found = frame or outermost
    assert found is not None
    return line_in(found, found.f_lineno)


def warn(text: str) -> None:
    """Issue a ``DeviceGraphWarning`` at the innermost line of user code in the call stack."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (is_machinery(frame) or _is_on_top(frame)):
        frame = frame.f_back
    space = frame.f_globals
    warnings.warn_explicit(
        text,
        DeviceGraphWarning,
        frame.f_code.co_filename,
        frame.f_lineno,
        space.get("__name__"),
        space.setdefault("__warningregistry__", {}),
    )


def _is_on_top(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(_ON_TOP[0])


def raising_line(error: BaseException) -> SourceLine | None:
    """Return the innermost line of user code in the traceback of ``error``."""
    step: TracebackType | None = error.__traceback__
    found = None
    while step is not None:
        if not is_machinery(step.tb_frame):
            found = line_in(step.tb_frame, step.tb_lineno)
        step = step.tb_next
    return found


@functools.lru_cache(maxsize=4096)
def _text(file: str, number: int) -> str:
    return linecache.getline(file, number).strip()


def line_of(fn: Any) -> SourceLine:
    """Return the first line of a function, or of the ``forward`` of a module."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = inspect.unwrap(getattr(fn, "forward", fn))
    fn = getattr(fn, "__func__", fn if hasattr(fn, "__code__") else type(fn).__call__)
    code = getattr(fn, "__code__", None)
    if code is None:
        return SourceLine("<unknown>", 0, repr(fn), "")
    line = code.co_firstlineno
    return SourceLine(code.co_filename, line, code.co_name, _text(code.co_filename, line))


def line_in(frame: FrameType, number: int) -> SourceLine:
    """Return line ``number`` of the file of ``frame``."""
    code = frame.f_code
    text = _text(code.co_filename, number)
    if code.co_filename.startswith("<eval_with_key>"):
        traced = _traced_line(frame.f_locals.get("self"), text)
        if traced is not None:
            return traced
    return SourceLine(code.co_filename, number, code.co_name, text)


def _traced_line(module: object, text: str) -> SourceLine | None:
    """Return the line of user code for ``text``, a line of code that torch.fx generated."""
    nodes, named = getattr(getattr(module, "graph", None), "nodes", ()), re.match(r"\w+", text)
    found = (node for node in nodes if named is not None and node.name == named.group())
    return next(filter(None, map(node_line, found)), None)


def node_line(node: Any) -> SourceLine | None:
    """Return the line of user code that produced a node of a trace."""
    torch_folder = Path(str(sys.modules["torch"].__file__)).parent
    stack = re.findall(r'File "(.+)", line (\d+), in (.+)', node.stack_trace or "")
    for file, line, function in reversed(stack):
        if not Path(file).is_relative_to(torch_folder):
            return SourceLine(file, int(line), function, _text(file, int(line)))
    return None
