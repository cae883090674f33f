"""torch's modes and settings at a capture, restored when a replay runs Python code of the step."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import attrs
import torch
from torch._C._dynamo.guards import GlobalStateGuard
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from devgraph.api.guard import all_of

Autocast = tuple[tuple[str, torch.dtype], ...]
"""Device type and dtype of each enabled autocast."""

tracer = torch._C._get_dispatch_mode
"""Return this thread's tracing mode for the key ``FAKE`` or ``PROXY``, or None."""
FAKE, PROXY = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY


class Modes(NamedTuple):
    """Grad mode, inference mode and autocast: the modes that compiled code can switch."""

    grad: bool
    inference: bool
    autocast: Autocast

    @staticmethod
    def current() -> Modes:
        return Modes(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), current_autocast())

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with (
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.grad),
            autocast_of(self.autocast),
        ):
            yield


_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_overrideable_sdp_enabled, torch._C._set_sdp_use_overrideable),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
)
"""Settings of the whole process that choose kernels or dtypes, each with its getter and setter."""

_functions, _dispatches = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_UNGUARDED: tuple[Callable[[], Any], ...] = (
    torch.is_inference_mode_enabled,
    _functions,
    _dispatches,
    *(get for get, _ in _SWITCHES[:5]),
)
"""Getters of settings that ``GlobalStateGuard`` does not compare."""


def _unknown() -> bool:
    return False


@attrs.frozen(eq=False)
class Stack:
    """One of torch's stacks of modes on a thread, lowest mode first."""

    read: Callable[[], list[Any]]
    height: Callable[[], int]
    push: Callable[[Any], Any]
    pop: Callable[[], Any]

    def users(self) -> tuple[Any, ...]:
        """Return the user's modes on the stack, without devgraph's own."""
        return tuple(mode for mode in self.read() if not _is_own(mode)) if self.height() else ()

    @contextlib.contextmanager
    def holding(self, modes: Sequence[Any]) -> Iterator[None]:
        """Replace the user's modes with ``modes`` in the block."""
        before = self.read()
        if [mode for mode in before if not _is_own(mode)] == [*modes]:
            yield
            return
        below = list(itertools.takewhile(_is_own, before))
        above = filter(_is_own, before[len(below) :])  # These modes must see operations first.
        self.rebuild([*below, *modes, *above])
        try:
            yield
        finally:
            self.rebuild(before)

    def rebuild(self, modes: Sequence[Any]) -> None:
        """Replace all modes, and only then raise an interrupt."""
        try:
            self._rebuild(modes)
        except BaseException:
            self._rebuild(modes)
            raise

    def _rebuild(self, modes: Sequence[Any]) -> None:
        while self.height():
            self.pop()
        for mode in modes:
            self.push(mode)


def _is_own(mode: object) -> bool:
    return getattr(mode, "is_devgraph_mode", False)


STACKS = (
    Stack(
        _get_current_function_mode_stack,
        torch._C._len_torch_function_stack,
        _push_function_mode,
        _pop_function_mode,
    ),
    Stack(
        _get_current_dispatch_mode_stack,
        torch._C._len_torch_dispatch_stack,
        _push_dispatch_mode,
        _pop_dispatch_mode,
    ),
)
"""The stacks of function modes and of dispatch modes."""


class OwnMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Base class of devgraph's dispatch modes; ``take`` receives each operation."""

    is_devgraph_mode = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]

    def take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operation and return its result."""
        raise NotImplementedError

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.take(func, args, kwargs or {})


@attrs.define(eq=False)
class Settings:
    """torch's modes and process-wide switches at one moment, to be restored later.

    torch keeps a default device as a mode on the stack of function modes.
    """

    modes: Modes
    switches: tuple[Any, ...]
    stacks: tuple[tuple[Any, ...], ...]
    _same: Callable[[], bool] = _unknown
    """A faster ``are_active``, set once ``are_active`` has returned True."""

    @staticmethod
    def current() -> Settings:
        return Settings(
            Modes.current(),
            tuple([get() for get, _ in _SWITCHES]),
            tuple(stack.users() for stack in STACKS),
        )

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Settings)
            and self.modes == other.modes
            and self.switches == other.switches
            and all(
                len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))
                for ours, theirs in zip(self.stacks, other.stacks, strict=True)
            )
        )

    __hash__ = None  # type: ignore[assignment]

    def key(self) -> Any:
        """Return a hashable key, or None if modes other than a default device are active."""
        if not all(isinstance(mode, DeviceContext) for stack in self.stacks for mode in stack):
            return None
        switches = (tuple(v) if isinstance(v, list) else v for v in self.switches)
        return self.modes, *switches, *(mode.device for mode in self.stacks[0])

    def named(self) -> dict[str, Any]:
        """Return the settings that user code may change, by the names of their getters."""
        named = {get.__name__: v for (get, _), v in zip(_SWITCHES, self.switches, strict=True)}
        del named["_get_sdp_priority_order"]  # torch's first attention sets the order.
        return named

    def are_active(self) -> bool:
        """Whether these settings are active now."""
        if self._same():  # the fast path of replays with breaks
            return True
        if Settings.current() != self:
            return False
        if not (_functions() or _dispatches()):  # the guard does not compare modes
            rest = [("{}() == {}", (get, get())) for get in _UNGUARDED]
            self._same = all_of([("{}()", (GlobalStateGuard().check,)), *rest])
        return True

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run the block under these settings; process-wide settings change for all threads."""
        grad = torch.is_grad_enabled()
        try:
            with contextlib.ExitStack() as stack:
                for (get, put), value in zip(_SWITCHES, self.switches, strict=True):
                    if (now := get()) != value:
                        stack.callback(put, now)
                        put(value)
                for modes, users in zip(STACKS, self.stacks, strict=True):
                    stack.enter_context(modes.holding(users))
                stack.enter_context(self.modes.restored())
                yield
        finally:
            torch._C._set_grad_enabled(grad)  # An interrupt may skip the exit of a context.


def autocast_of(then: Autocast) -> AbstractContextManager[None]:
    """Return a context that runs a block under the autocast ``then``."""
    return contextlib.nullcontext() if then == current_autocast() else _under(dict(then))


@contextlib.contextmanager
def _under(then: dict[str, torch.dtype]) -> Iterator[None]:
    cached = torch.is_autocast_cache_enabled()
    with contextlib.ExitStack() as stack:
        for kind in {**dict(current_autocast()), **then}:
            dtype = then.get(kind)
            on = dtype is not None
            stack.enter_context(torch.autocast(kind, dtype, enabled=on, cache_enabled=cached))
        yield


@contextlib.contextmanager
def autocast_uncached() -> Iterator[None]:
    """Clear autocast's cache of casts, and disable the cache in the block.

    A cast computed in a capture is in the graph's memory and must not be used after the capture. A
    cast computed before the capture is not in the graph, so replays would read freed memory.
    """
    cached = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        torch.clear_autocast_cache()
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


@contextlib.contextmanager
def autocast_cached(enabled: bool) -> Iterator[None]:
    """If ``enabled``, let autocast cache casts in the block, and clear the cache at its end.

    A parameter that is cast once has one gradient in the lower precision, as in eager code. With
    one gradient per cast, the sum of the gradients would be rounded differently.
    """
    if not enabled:
        yield
        return
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(True)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(False)
        torch.clear_autocast_cache()


def current_autocast() -> Autocast:
    if not torch._C._is_any_autocast_enabled():
        return ()
    return tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in _device_types()
        if torch.is_autocast_enabled(kind)
    )


@functools.cache
def _device_types() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
