"""Getting between a thread and torch: two modes at the bottom of torch's stacks of modes.

The bottom is where a device would be: whatever modes the user's code enters and leaves, before a
recording or across its ends, stay above these and see an ordinary device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

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

Report = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Takes a call, its arguments and its keyword arguments, and returns what the caller receives."""


class _AtBottom:
    """A mode that starts at the bottom of its stack of modes.

    Subclasses are modes of torch and set the calls of their stack: ``stack`` returns the modes,
    lowest first.
    """

    stack: Callable[[], list[Any]]
    pop: Callable[[], Any]
    push: Callable[[Any], None]
    height: Callable[[], int]

    def __init__(self, report: Report, recorder: Any) -> None:
        super().__init__()
        self._report = report
        self.recorder = recorder
        """Whose ``report`` it is."""
        self.over = False
        """Whether it was to stop. Torch keeps a mode off its stack while it runs, and puts it back
        whatever became of it: where its recording is dropped meanwhile, it stays and does nothing
        until another one starts."""

    def install(self) -> None:
        """Start, below all modes but a default device."""
        self.clear()
        mode: Any = super()
        mode.__enter__()
        stack = self.stack()
        stack.remove(self)
        # torch insists that what set_default_device made is the lowest of all.
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        stack.insert(1 if stack and stack[0] is default else 0, self)
        self._arrange(stack)

    @classmethod
    def clear(cls) -> None:
        """Take off the thread's modes that were to stop: torch compiles nothing under them."""
        for mode in cls.stack():
            if isinstance(mode, _AtBottom) and mode.over:
                mode.remove()

    def remove(self) -> None:
        """Stop, wherever in the stack the mode is now. Idempotent."""
        self.over = True
        mode: Any = super()
        stack = self.stack()
        if self not in stack:
            return
        stack.remove(self)
        self._arrange([*stack, self])
        flags = {name: kept.copy() for name, kept in vars(self).items() if isinstance(kept, deque)}
        try:
            mode.__exit__(None, None, None)
        except BaseException:  # An interrupt: the next try needs what torch has taken out of them.
            vars(self).update(flags)
            raise

    def _arrange(self, stack: list[Any]) -> None:
        try:
            self._rebuild(stack)
        except BaseException:  # An interrupt: half a stack is none.
            self._rebuild(stack)
            raise

    def _rebuild(self, stack: list[Any]) -> None:
        while self.height():
            self.pop()
        for item in stack:
            self.push(item)


class Dispatching(_AtBottom, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports every operation of the thread."""

    stack = staticmethod(_get_current_dispatch_mode_stack)
    pop, push = staticmethod(_pop_dispatch_mode), staticmethod(_push_dispatch_mode)
    height = staticmethod(torch._C._len_torch_dispatch_stack)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.over:
            return func(*args, **(kwargs or {}))
        for kind in types:
            if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                return NotImplemented  # a tensor subclass: it makes plain operations of this one
        if not isinstance(func, OpOverload):
            raise CaptureError(
                f"{func} cannot be recorded, at {user_line()}; call it in a function marked "
                f"@dg.no_graph and capture with policy='breakable'."
            )
        return self._report(func, args, kwargs or {})


class Functions(_AtBottom, TorchFunctionMode):
    """Reports every call of a torch function by the thread."""

    stack = staticmethod(_get_current_function_mode_stack)
    pop, push = staticmethod(_pop_function_mode), staticmethod(_push_function_mode)
    height = staticmethod(torch._C._len_torch_function_stack)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.over:
            return func(*args, **(kwargs or {}))
        return self._report(func, args, kwargs or {})
