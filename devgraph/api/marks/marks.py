"""Marks: declarations of code that depends on the host.

``region`` and ``no_graph`` decorate functions; ``graph_break`` is a call. Outside a capture, a
marked function reads one context variable and calls the original. Inside a capture, the scope of
the policy decides how the function runs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn, ParamSpec, TypeVar, overload

from devgraph.api.errors import (
    CaptureError,
    HostArgumentError,
    InputTypeError,
    NotCapturableError,
    brief,
    did_you_mean,
    note,
    without_first_frame,
)
from devgraph.api.marks.source import user_line

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=CaptureError)

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Scope:
    """The rules of a policy for marks in the capturing thread."""

    records = True
    """Whether the scope records the step instead of running it."""
    thread: int | None = None
    """The thread that is inside the scope, or None."""
    refusal: CaptureError | None = None
    """Error to raise when the thread leaves the scope."""

    def call(self, mark: Mark, args: Args, kwargs: Kwargs) -> Any:
        """Run a call of a marked function under the current policy."""
        raise NotImplementedError

    def graph_break(self) -> None:
        """Break the capture here, if the policy has breaks."""

    def records_gates(self, call: str) -> bool:
        """Return whether the gate mark ``call`` is recorded; raise if that is impossible."""
        return False

    def refuse_elsewhere(self, name: str) -> NoReturn:
        """Refuse a mark in another thread that runs in a copy of the capturing context."""
        self.refusal = CaptureError(
            f"{name} was called in thread {threading.current_thread().name!r}, at {user_line()}, "
            f"for a step that another thread captures. A capture records only the thread that runs "
            f"the step, so a replay would omit this call. Call {name} in the step's thread, or "
            f"mark the function that starts the thread @dg.no_graph and capture with "
            f"policy='breakable'."
        )
        raise self.refusal


_scope: ContextVar[Scope | None] = ContextVar("devgraph_scope", default=None)
current_scope = _scope.get


@contextlib.contextmanager
def entered(scope: Scope | None) -> Iterator[None]:
    """Enter ``scope`` on this thread; None means not capturing."""
    outer = _scope.get()
    try:
        if scope is not None:
            scope.thread = threading.get_ident()
        _scope.set(scope)
        yield
        if scope is not None and scope.refusal is not None:
            raise scope.refusal
    except Exception as error:
        # The step may have caught the refusal of a mark, or another thread may have raised it.
        if scope is not None and scope.refusal not in (None, error):
            raise scope.refusal from without_first_frame(error)
        raise
    except GeneratorExit:
        # After an interrupt, the generator was closed without ``__exit__``. Then the outer scopes
        # have ended too.
        outer = None
        raise
    finally:
        _scope.set(outer)
        if scope is not None:
            scope.thread = None
            if outer is not scope:
                scope.refusal = None  # breaks a reference cycle through frames of the step


def refused(error: E) -> E:
    """Return ``error``, and make this thread's capture raise it even if the step catches it."""
    scope = _scope.get()
    if scope is not None and scope.thread == threading.get_ident():
        scope.refusal = scope.refusal or error
    return error


def is_capturing() -> bool:
    """Whether this thread is inside a devgraph capture (False in the eager body of a break)."""
    return _scope.get() is not None


def graph_break() -> None:
    """End the current graph and begin another. No effect under ``full`` or outside a capture."""
    scope = _scope.get()
    if scope is not None and is_here(scope, "dg.graph_break()"):
        scope.graph_break()


def is_here(scope: Scope, name: str) -> bool:
    """Return whether this thread captures under ``scope``; raise if another thread does.

    Return False if the capture has ended: a thread that was started in a capture keeps a copy of
    its context.
    """
    if scope.thread == threading.get_ident():
        return True
    if scope.thread is not None:
        scope.refuse_elsewhere(name)
    return False


class Mark:
    """The declarations of a marked function; see ``region`` for the fields."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        kind: str,
        host_args: str | Iterable[str] = (),
        mutates: str | Iterable[str] = (),
        derive: Mapping[str, Callable[..., Any]] | None = None,
        reduce: Mapping[str, Callable[[Any], Any]] | None = None,
        context: Callable[[], Any] | None = None,
        fake: Callable[..., Any] | None = None,
        capture_stub: Callable[..., Any] | None = None,
    ) -> None:
        if not callable(fn):
            raise InputTypeError(
                f"@dg.{kind} marks a function, got {brief(fn)}. Pass declarations as keywords: "
                f"@dg.{kind}(mutates=('out',))"
            )
        later = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
        if any(works_later(fn) for works_later in later):
            raise InputTypeError(
                f"@dg.{kind} marks a function whose work is done when it returns, but "
                f"{getattr(fn, '__qualname__', fn)} is a generator or async: its body would run "
                f"outside of the mark. Mark a function that it calls."
            )
        for what, rules in (("derive", derive), ("reduce", reduce)):
            fits = isinstance(rules, Mapping) and all(map(callable, rules.values()))
            if rules is not None and not fits:
                raise InputTypeError(
                    f"{what} of a mark is a mapping of names to functions, got {brief(rules)}"
                )
        for what, function in (
            ("context", context),
            ("fake", fake),
            ("capture_stub", capture_stub),
        ):
            if function is not None and not callable(function):
                raise InputTypeError(f"{what} of a mark must be a function, got {brief(function)}")
        self.fn = fn
        self.raises_before_launch = False
        """Whether the function can raise only before it launches device work. If so, new host
        values need no trial run."""
        self.name = getattr(fn, "__qualname__", repr(fn))
        self.kind = kind
        self.host_args = _names("host_args", host_args)
        self.mutates = _names("mutates", mutates)
        self.derive = dict(derive or {})
        self.reduce = dict(reduce or {})
        self.context = context
        self.fake = fake
        self.capture_stub = capture_stub
        self.dynamic = bool(self.host_args or context)
        """Whether the work of the function depends on the host."""
        self.fills = bool(derive or reduce or context)
        """Whether devgraph adds or changes arguments of each call."""
        self.signature = _signature(fn)
        self._positional = [
            p
            for p in self.signature.parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        self._derive_inputs = {
            name: tuple(_signature(rule).parameters) for name, rule in self.derive.items()
        }
        self._check()

    def _check(self) -> None:
        parameters = self.signature.parameters
        if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
            known = [n for n, p in parameters.items() if p.kind is not p.VAR_POSITIONAL]
            context = ["context"] if self.context is not None else []
            wanted = [*self.host_args, *self.mutates, *self.derive, *context]
            self._require(wanted, known, "parameter")
        self._require(self.reduce, [*self.host_args, *self.derive, "context"], "host argument")
        for inputs in self._derive_inputs.values():
            self._require(inputs, self.host_args, "host argument")

    def _require(self, names: Iterable[str], known: Iterable[str], what: str) -> None:
        for name in names:
            if name not in known:
                raise HostArgumentError(
                    f"{self.name} has no {what} {name!r}, which its mark declares. "
                    f"{did_you_mean(name, known)}"
                )

    def host_kwargs(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the host keyword arguments of one replay, from ``values`` of host arguments.

        ``derive=``, ``context=`` and ``reduce=`` of the mark are applied.
        """
        out = {name: values[name] for name in self.host_args}
        try:
            for name, rule in self.derive.items():
                out[name] = rule(*(values[source] for source in self._derive_inputs[name]))
            if self.context is not None:
                out["context"] = self.context()
            for name, rule in self.reduce.items():
                out[name] = rule(out[name])
        except Exception as error:
            note(error, f"in a derive=, context= or reduce= function of the mark of {self.name}")
            raise
        return out

    def split(
        self, args: Args, kwargs: Kwargs
    ) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """Return ``args`` and ``kwargs`` without host arguments, and the host arguments by name."""
        if not self.host_args:
            return args, kwargs, {}
        bound = self.signature.bind_partial(*args, **kwargs)
        for name in self.derive:
            if name in bound.kwargs or name in bound.arguments:
                raise HostArgumentError(
                    f"{self.name} was given {name!r}, which its mark derives; do not pass it."
                )
        bound.apply_defaults()
        given = {**bound.arguments, **bound.kwargs}  # including names in **kwargs
        host = {n: given[n] for n in self.host_args if n in given}
        missing = [n for n in self.host_args if n not in host]
        if missing:
            raise HostArgumentError(f"{self.name} needs its host arguments {', '.join(missing)}.")
        # Arguments after a positional host argument become keywords, so that they do not shift.
        rest = {k: v for k, v in kwargs.items() if k not in host}
        named = self._positional[: len(args)]
        cut = next((i for i, p in enumerate(named) if p.name in host), len(args))
        behind = named[cut:]
        if (len(args) > len(named) and behind) or any(p.kind is p.POSITIONAL_ONLY for p in behind):
            raise HostArgumentError(
                f"{self.name} was given its host argument {named[cut].name!r} by position, before "
                f"arguments that cannot be passed by name. Pass it as a keyword argument."
            )
        rest.update(
            (p.name, a) for p, a in zip(behind, args[cut:], strict=True) if p.name not in host
        )
        return args[:cut], rest, host

    def call_eager(self, args: Args, kwargs: Kwargs) -> Any:
        """Run the function now, with the host keyword arguments of its mark."""
        if not self.fills:
            return self.fn(*args, **kwargs)
        args, kwargs, host = self.split(args, kwargs)
        return self.fn(*args, **kwargs, **self.host_kwargs(host))

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name}>"


class RegionScope(Scope):
    """The scope inside a region of a graph. Marks in it call their functions directly."""

    def __init__(self, outer: Mark, around: Scope | None = None) -> None:
        self.outer = outer
        self._around = around

    def call(self, mark: Mark, args: Args, kwargs: Kwargs) -> Any:
        if mark.kind == "no_graph":
            refuse_no_graph(mark, f" inside region {self.outer.name}")
        return mark.call_eager(args, kwargs)

    def records_gates(self, call: str) -> bool:
        if self.outer.dynamic:
            raise CaptureError(
                f"{call} was called inside region {self.outer.name}, at {user_line()}, but updates "
                f"replace the nodes of the region. Call it before or after the region."
            )
        return self._around is not None and self._around.records_gates(call)


def refuse_no_graph(mark: Mark, where: str = "") -> NoReturn:
    """Raise the error of a ``no_graph`` function under a policy that cannot break."""
    raise refused(
        NotCapturableError(
            f"{mark.name} is marked @dg.no_graph and was called{where} under policy 'full', "
            f"which captures everything in one graph (at {user_line()}). Capture with "
            f"policy='breakable' or 'piecewise', which run the function eagerly between segments, "
            f"or move the call out of the step."
        )
    )


_marked: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()  # for tracers

marked_with_context: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
"""Marked functions with ``context=``, which are dynamic even without host arguments."""


def marked_functions() -> list[Callable[..., Any]]:
    return list(_marked)


def _wrap(mark: Mark) -> Callable[..., Any]:
    fn = mark.call_eager if mark.fills else None
    direct = mark.fn

    @functools.wraps(direct)
    def marked(*args: Any, **kwargs: Any) -> Any:
        scope = current_scope()
        if scope is not None and is_here(scope, mark.name):
            return scope.call(mark, args, kwargs)
        return direct(*args, **kwargs) if fn is None else fn(args, kwargs)

    # Tracers compare functions by their code objects. If all marks had the same code object, a
    # tracer would reuse the trace of a step for the same step with another region.
    marked.__code__ = marked.__code__.replace(co_name=mark.name)  # type: ignore[attr-defined]
    # Otherwise, code generated from a trace would call torch's function of this name, unmarked.
    if (marked.__module__ or "").partition(".")[0] == "torch":
        marked.__module__ = __name__
    marked.__devgraph_mark__ = mark  # type: ignore[attr-defined]
    _marked.add(marked)
    if mark.context is not None:
        marked_with_context.add(marked)
    return marked


def _signature(fn: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(fn)
    except ValueError as error:
        raise InputTypeError(
            f"a mark needs the names of the parameters, but {fn!r} has no signature. Mark a "
            f"function of your own that calls it."
        ) from error


def _names(what: str, value: str | Iterable[str]) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    if not all(isinstance(name, str) for name in names):
        raise InputTypeError(f"{what} of a mark must be parameter names, got {brief(value)}")
    return names


def _marking(kind: str, fn: Callable[..., Any] | None, **declared: Any) -> Any:
    """Return the marked ``fn``, or a decorator if ``fn`` is None."""

    def mark(target: Callable[..., Any]) -> Callable[..., Any]:
        return _wrap(Mark(target, kind=kind, **declared))

    return mark if fn is None else mark(fn)


@overload
def region(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def region(
    *,
    host_args: str | Iterable[str] = ...,
    mutates: str | Iterable[str] = ...,
    derive: Mapping[str, Callable[..., Any]] | None = ...,
    reduce: Mapping[str, Callable[[Any], Any]] | None = ...,
    context: Callable[[], Any] | None = ...,
    fake: Callable[..., Any] | None = ...,
    capture_stub: Callable[..., Any] | None = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def region(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    host_args: str | Iterable[str] = (),
    mutates: str | Iterable[str] = (),
    derive: Mapping[str, Callable[..., Any]] | None = None,
    reduce: Mapping[str, Callable[[Any], Any]] | None = None,
    context: Callable[[], Any] | None = None,
    fake: Callable[..., Any] | None = None,
    capture_stub: Callable[..., Any] | None = None,
) -> Any:
    """Mark a function that depends on the host, or that should run eagerly where possible.

    Under ``full`` the function is part of the graph and is updated for new host arguments. Under
    ``breakable`` and ``piecewise`` it runs eagerly between captured segments.

    Args:
        fn: the function; None returns a decorator.
        host_args: names of parameters that are host values (ints, lists, ...). In a capture, the
            step must pass the tracked host argument of the same name.
        mutates: names of tensor parameters that the function writes.
        derive: functions of host arguments, by the parameter that receives the result. The step
            does not pass these parameters.
        reduce: functions of one value, by host argument. The region receives the reduced value,
            which is also part of the recording's key.
        context: called once for each replay on the replaying thread. Its immutable result is
            passed as the keyword argument ``context``.
        fake: a function that takes the arguments with fake tensors and returns fake results. Policy
            ``piecewise`` needs it if ``fn`` fails with them, or has ``mutates`` and a result.
        capture_stub: called instead of the function during a capture with breaks. It takes the same
            arguments, whose data may be uninitialized, and returns results of the same shapes.

    Raises:
        HostArgumentError: a name is not a parameter of the function.
        InputTypeError: an argument has a wrong type, or the function is a generator or async.
    """
    return _marking(
        "region",
        fn,
        host_args=host_args,
        mutates=mutates,
        derive=derive,
        reduce=reduce,
        context=context,
        fake=fake,
        capture_stub=capture_stub,
    )


@overload
def no_graph(fn: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def no_graph(
    *,
    mutates: str | Iterable[str] = ...,
    fake: Callable[..., Any] | None = ...,
    capture_stub: Callable[..., Any] | None = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def no_graph(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mutates: str | Iterable[str] = (),
    fake: Callable[..., Any] | None = None,
    capture_stub: Callable[..., Any] | None = None,
) -> Any:
    """Mark a function that can never be captured, such as one with a host sync.

    Under ``breakable`` and ``piecewise`` the function runs eagerly between segments. Under ``full``
    the capture raises ``NotCapturableError``. See ``region`` for the arguments.
    """
    return _marking("no_graph", fn, mutates=mutates, fake=fake, capture_stub=capture_stub)
