"""Getting between a thread and torch: two modes at the bottom of torch's stacks of modes.

The bottom is where a device would be: whatever modes the user's code enters and leaves, before a
recording or across its ends, stay above these and see an ordinary device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as _push_dispatch_mode

from devgraph.api.errors import CaptureError
from devgraph.api.marks.source import user_line


class Listener(Protocol):
    """What the modes report to."""

    def call_function(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A function of torch was called; return what it returns."""

    def call_operation(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """An operation reached the dispatcher; return what it returns."""


def _move(
    mode: object,
    stack: list[Any],
    pop: Callable[[], Any],
    push: Callable[[Any], None],
    height: Callable[[], int],
    *,
    to_bottom: bool,
) -> None:
    """Move ``mode`` within a stack of modes: below all but the default device, or to the top."""
    stack.remove(mode)
    at = len(stack)
    if to_bottom:
        # torch insists that what set_default_device made is the lowest of all.
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        at = 1 if stack and stack[0] is default else 0
    stack.insert(at, mode)
    try:
        _rebuild(stack, pop, push, height)
    except BaseException:  # An interrupt: half a stack is none.
        _rebuild(stack, pop, push, height)
        raise


def _rebuild(
    stack: list[Any], pop: Callable[[], Any], push: Callable[[Any], None], height: Callable[[], int]
) -> None:
    while height():
        pop()
    for item in stack:
        push(item)


def _functions() -> list[Any]:
    """Return the modes that see torch's functions, lowest first."""
    stack: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return stack


class Dispatching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports every operation of the thread to ``listener``."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._listener = listener

    def install(self) -> None:
        """Start, at the bottom of the stack."""
        self.__enter__()  # type: ignore[no-untyped-call]
        self._move(to_bottom=True)

    def remove(self) -> None:
        """Stop, wherever in the stack the mode is now. Idempotent."""
        if self not in _get_current_dispatch_mode_stack():
            return
        self._move(to_bottom=False)
        flags = {name: kept.copy() for name, kept in vars(self).items() if isinstance(kept, deque)}
        try:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        except BaseException:  # An interrupt: the next try needs what torch has taken out of them.
            for name, kept in flags.items():
                setattr(self, name, kept)
            raise

    def _move(self, *, to_bottom: bool) -> None:
        stack, height = _get_current_dispatch_mode_stack(), torch._C._len_torch_dispatch_stack
        _move(self, stack, _pop_dispatch_mode, _push_dispatch_mode, height, to_bottom=to_bottom)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for kind in types:
            if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                return NotImplemented  # a tensor subclass: it makes plain operations of this one
        if not isinstance(func, OpOverload):
            raise CaptureError(
                f"{func} cannot be recorded, at {user_line()}; call it in a function marked "
                f"@dg.no_graph and capture with policy='breakable'."
            )
        return self._listener.call_operation(func, args, kwargs or {})


class Functions(TorchFunctionMode):
    """Reports every call of a torch function by the thread to ``listener``."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener

    def install(self) -> None:
        """Start, below all modes but a default device."""
        self.__enter__()  # type: ignore[no-untyped-call]
        self._move(to_bottom=True)

    def remove(self) -> None:
        """Stop, wherever in the stack the mode is now. Idempotent."""
        if self not in _functions():
            return
        self._move(to_bottom=False)
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _move(self, *, to_bottom: bool) -> None:
        stack, height = _functions(), torch._C._len_torch_function_stack
        _move(self, stack, _pop_function_mode, _push_function_mode, height, to_bottom=to_bottom)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._listener.call_function(func, args, kwargs or {})
