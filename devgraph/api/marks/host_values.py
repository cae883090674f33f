"""Host values: tracked in a capture, and resolved once per mark and replay.

A graph must not contain a host value that should change between replays. In a capture, the step
therefore receives ``Tracked`` values. Only regions may use them, as the argument of the same name.
Any other use raises ``FrozenValueError`` with its line.
"""

from __future__ import annotations

import contextlib
import dis
import enum
import functools
import inspect
import numbers
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_map

from devgraph.api.errors import FrozenValueError, HostArgumentError, brief, did_you_mean
from devgraph.api.marks.marks import refused
from devgraph.api.marks.source import SourceLine, is_machinery, line_in, user_line
from devgraph.api.trees import slots_of

# Special methods that return plain values, which would be frozen in the graph.
_CONSUMING = """
    abs add and bool bytes ceil complex contains delitem divmod eq float floor floordiv format
    ge getitem gt hash index int invert iter le len lshift lt matmul mod mul ne neg next or pos
    pow radd rand rdivmod reversed rfloordiv rlshift rmatmul rmod rmul ror round rpow rrshift
    rshift rsub rtruediv rxor setitem str sub truediv trunc xor
""".split()


class Tracked:
    """A host value during capture, which can only be passed to regions.

    ``isinstance(value, int)`` is true for a tracked int. Every use of the value raises an error,
    for example ``kv_len // 2``, ``range(kv_len)``, ``sizes[kv_len]`` and ``torch.zeros(kv_len)``.
    Under ``devgraph check``, the use is reported instead, and the step continues with the plain
    value.
    """

    __slots__ = ("_devgraph_name", "_devgraph_value")

    def __init__(self, name: str, value: Any) -> None:
        object.__setattr__(self, "_devgraph_name", name)
        object.__setattr__(self, "_devgraph_value", value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._devgraph_value)

    def __repr__(self) -> str:
        return f"<tracked host argument {self._devgraph_name}>"

    def _devgraph_consumed(self, how: str, at: SourceLine | None = None) -> None:
        raise refused(frozen(self._devgraph_name, how, at or user_line()))

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._devgraph_consumed("copy or pickle")
        return self._devgraph_value.__reduce_ex__(protocol)

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        self._devgraph_consumed(f".{attribute}")
        return getattr(self._devgraph_value, attribute)

    def __setattr__(self, attribute: str, value: object) -> None:
        self._devgraph_consumed(f".{attribute} = ...")
        setattr(self._devgraph_value, attribute, value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def plain(value: Any) -> Any:
            if not is_tracked(value):
                return value
            value._devgraph_consumed(f"torch's {getattr(func, '__name__', func)}()")
            return value._devgraph_value

        args, kwargs = tree_map(plain, (args, kwargs or {}))
        return func(*args, **kwargs)

    __hash__: Any


def taken_from(own: str, name: str) -> str:
    """Return advice for a mark that receives host argument ``own`` as its parameter ``name``."""
    return (
        f"Declare {own!r} on its mark with host_args=({own!r},), and compute {name!r} there with "
        f"derive={{{name!r}: lambda {own}: {own}}}."
    )


def frozen(name: str, how: str, at: object = "") -> FrozenValueError:
    """Return the error for a line that would freeze host argument ``name``."""
    by, where = f" by {how}" * bool(how), f", at {at}" * bool(at)
    return FrozenValueError(
        f"host argument {name!r} was consumed{by} outside a region{where}. Every "
        f"replay would use the captured value. Move the line into a function "
        f"marked @dg.region(host_args=({name!r},)), or, if a region needs a value computed from "
        f"it, declare derive={{'new_name': lambda {name}: ...}} on that mark."
    )


def _consuming(dunder: str) -> Callable[..., Any]:
    def method(self: Tracked, *args: object) -> Any:
        self._devgraph_consumed(dunder)
        value = self._devgraph_value
        return bool(value) if dunder == "__bool__" else getattr(value, dunder)(*args)

    method.__name__ = dunder
    return method


for _name in _CONSUMING:
    setattr(Tracked, f"__{_name}__", _consuming(f"__{_name}__"))
del _name


def is_tracked(value: object) -> bool:
    """Whether ``value`` is tracked. ``isinstance`` reports the class of the plain value."""
    return issubclass(type(value), Tracked)


_PREDICATES = frozenset({"abc", "functools", "torch"})
"""Modules that read the type of a value for their callers (``functools`` in singledispatch)."""


class _Watched(Tracked):
    """A tracked value that records reads of its type by user code."""

    __slots__ = ("_devgraph_asked",)

    def __init__(self, name: str, value: Any, asked: dict[str, SourceLine]) -> None:
        super().__init__(name, value)
        object.__setattr__(self, "_devgraph_asked", asked)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        asking: FrameType | None = sys._getframe(1)
        while asking is not None and asking.f_globals.get("__name__") in _PREDICATES:
            asking = asking.f_back
        if asking is not None and not is_machinery(asking):
            self._devgraph_asked.setdefault(self._devgraph_name, user_line())
        return type(self._devgraph_value)


_types_allowed: ContextVar[bool] = ContextVar("devgraph_types_allowed", default=False)


@contextlib.contextmanager
def exact_types_allowed(allowed: bool) -> Iterator[None]:
    """If ``allowed``, turn ``exact_types_refused`` off in the block.

    The check slows down all Python calls, so a runner performs it once for all sizes of a step.
    """
    token = _types_allowed.set(allowed)
    try:
        yield
    finally:
        _types_allowed.reset(token)


@contextlib.contextmanager
def exact_types_refused() -> Iterator[None]:
    """Refuse calls of ``type()`` on a tracked value by user functions in the block.

    ``type(n) is int`` is false for a tracked value and cannot be overridden, so the graph would
    contain the wrong branch. Each function is checked when it is called. Nothing is checked while
    a debugger or a coverage tool traces the thread.
    """
    if _types_allowed.get() or sys.gettrace() is not None:
        yield
        return
    # Do not use a profile function: Python would call it after ``__enter__`` of a lock, where an
    # interrupt would leave the lock held.
    sys.settrace(_refuse_exact_types)
    try:
        yield
    finally:
        if sys.gettrace() is _refuse_exact_types:
            sys.settrace(None)


def _refuse_exact_types(frame: FrameType, event: str, argument: object) -> None:
    if event != "call" or not (asked := _exact_types(frame.f_code)) or is_machinery(frame):
        return
    for name, number in asked.items():
        value: Any = frame.f_locals.get(name)
        if is_tracked(value):
            sys.settrace(None)
            how = f"type({name}) (use isinstance(), or decide by type before the step)"
            value._devgraph_consumed(how, line_in(frame, number))


@functools.lru_cache(maxsize=4096)
def _exact_types(code: CodeType) -> dict[str, int]:
    """Return the variables that ``code`` passes to ``type()``, with the line of each call."""
    if "type" not in code.co_names:
        return {}
    asked, window, number = {}, ("", "", "", ""), code.co_firstlineno
    lines = dict(dis.findlinestarts(code))
    for step in dis.get_instructions(code):
        number = lines.get(step.offset) or number
        if step.opname in ("PRECALL", "PUSH_NULL", "CACHE"):
            continue
        kind, name = step.opname.partition("_")[0], str(step.argval)
        if kind == "CALL" and step.arg == 1 and window[:3] == ("LOAD", "type", "LOAD"):
            asked[window[3]] = number
        window = (*window[2:], kind, name)
    return asked


class HostSpec:
    """The declared host arguments of one capture: names, values at capture and defaults."""

    def __init__(
        self, declared: Mapping[str, Any] | None = None, fn: Callable[..., Any] | None = None
    ) -> None:
        self.declared: dict[str, Any] = declared_names(declared)
        for name, value in self.declared.items():
            if _is_singleton(value):
                raise HostArgumentError(
                    f"host argument {name!r} is {brief(value)} at capture. Code tests such a value "
                    f"with 'is', which cannot be detected, so every replay would take the captured "
                    f"branch. Pass a number, string or list, or capture each case separately (a "
                    f"variant of a runner)."
                )
            if isinstance(value, torch.Tensor):
                raise HostArgumentError(
                    f"host argument {name!r} is {brief(value)} at capture, but a host argument is "
                    f"a value of the host. Pass a number, such as {name}.item(), or pass the "
                    f"tensor as an input."
                )
        self.defaults = _signature_defaults(fn, self.declared) if fn is not None else {}
        self._kinds = {name: type(value) for name, value in self.declared.items()}
        self.required = frozenset(self.declared) - frozenset(self.defaults)

    def tracked(self, asked: dict[str, SourceLine] | None = None) -> dict[str, Tracked]:
        """Return a tracked value for each declared argument.

        ``asked`` collects the lines of user code that read the type of a value (isinstance()).
        """
        make = Tracked if asked is None else functools.partial(_Watched, asked=asked)
        return {name: make(name, value) for name, value in self.declared.items()}

    def fill(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a value for each declared argument, from ``given`` and the defaults."""
        if not self.declared and not given:
            return {}
        missing = self.required.difference(given)
        if missing:
            self.checked(given)  # A misspelled name is reported first, with a hint.
            names = ", ".join(sorted(missing))
            raise HostArgumentError(
                f"missing host arguments: {names}. Every declared host argument without a default "
                f"must be passed to each replay; declared: {', '.join(sorted(self.declared))}."
            )
        for name, value in given.items():
            if type(value) is not self._kinds.get(name):
                return {**self.defaults, **self.checked(given)}
        return {**self.defaults, **given}

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Check names and types of ``given``, and return the values in the declared types."""
        require_declared(given, self.declared)
        return {name: _same_kind(name, self.declared[name], given[name]) for name in given}


def require_declared(given: Iterable[Any], declared: Mapping[str, Any]) -> None:
    """Raise HostArgumentError for a name that is not declared."""
    for name in given:
        if name not in declared:
            raise HostArgumentError(
                f"unknown host argument {name!r}. {did_you_mean(str(name), declared)} Declare "
                f"others in host_args=."
            )


def declared_names(declared: object) -> dict[str, Any]:
    """Check the argument ``host_args``, and return it as a new dict."""
    if declared is None:
        return {}
    if not isinstance(declared, Mapping):
        raise HostArgumentError(
            f"host_args must map names to values at capture, got {brief(declared)}"
        )
    for name in declared:
        if not isinstance(name, str):
            raise HostArgumentError(f"names of host arguments must be strings, got {brief(name)}")
    return dict(declared)


def _is_singleton(value: object) -> bool:
    return value is None or isinstance(value, enum.Enum)


def _signature_defaults(fn: Callable[..., Any], names: Iterable[str]) -> dict[str, Any]:
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    defaults = {}
    for name in names:
        found = parameters.get(name)
        if found is None or found.kind not in by_name:
            if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
                known = [p.name for p in parameters.values() if p.kind in by_name]
                raise HostArgumentError(
                    f"{getattr(fn, '__qualname__', fn)} takes no keyword argument {name!r}, which "
                    f"host_args declares. {did_you_mean(name, known)}"
                )
        elif found.default is not inspect.Parameter.empty and not _is_singleton(found.default):
            defaults[name] = found.default
    return defaults


def _same_kind(name: str, captured: Any, value: Any) -> Any:
    kind = type(captured)
    if type(value) is kind:
        return value
    if kind is int and not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    elif kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    elif isinstance(captured, list | tuple) and isinstance(value, list | tuple):
        return kind(value)
    elif isinstance(value, kind) and not isinstance(value, bool):
        return value
    raise HostArgumentError(
        f"host argument {name!r} had the type {kind.__name__} at capture, but now has the type "
        f"{type(value).__name__} ({brief(value)}); convert it, or capture again"
    )


NO_HOST_ARGS = HostSpec()
"""The declaration of a capture without host arguments."""

_BY_IDENTITY: Any = object.__hash__


def exact(value: Any) -> Any:
    """Return the part of a key for ``value``; raise TypeError if it cannot be a key.

    Values such as 1, True and 1.0, or 0.0 and -0.0, are equal in Python but have different keys.
    """
    kind = type(value)
    if kind is int or kind is str:
        return value
    if kind is float:
        return kind, value.hex()
    if kind is tuple:
        return value if {int}.issuperset(map(type, value)) else tuple(map(exact, value))
    if isinstance(value, torch.Tensor):
        raise TypeError(
            "its data can change unnoticed; pass tensors to the region as ordinary arguments, or "
            "use their data_ptr() as the value"
        )
    if kind.__hash__ is _BY_IDENTITY and hasattr(value, "__dict__") and not callable(value):
        raise TypeError("it is compared by identity, so a change inside it would go unnoticed")
    return kind, value, _alike(value, ())


def same_value(one: object, other: object) -> bool:
    """Whether two host values have equal keys."""
    try:
        return one is other or bool(exact(one) == exact(other))
    except (TypeError, ValueError, RuntimeError):  # not hashable, or compared by element
        return False


def _alike(value: Any, around: tuple[int, ...]) -> Any:
    """Return the types and numbers in ``value``, because ``==`` ignores types and signs of zeros.

    Objects that are compared by identity count only by type. ``around`` contains the ids of the
    objects that contain ``value``.
    """
    kind = type(value)
    if kind is int or kind is str or isinstance(value, torch.Tensor) or id(value) in around:
        return kind
    if isinstance(value, numbers.Number):
        return kind, None if kind is float and value else repr(value)
    around = (*around, id(value))
    if isinstance(value, set | frozenset):
        return kind, frozenset(_alike(item, around) for item in value)
    parts: list[Any] = []
    if isinstance(value, tuple | list | dict):
        parts.extend(value)
    if isinstance(value, dict):
        parts.extend(value.values())
    if kind.__hash__ is not _BY_IDENTITY:
        parts.extend(getattr(value, "__dict__", {}).values())
        parts.extend(getattr(value, name, None) for name in slots_of(kind))
    return kind, tuple(_alike(part, around) for part in parts)
