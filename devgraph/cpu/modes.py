"""Interception of torch calls by two modes at the bottom of the thread's mode stacks.

User code may enter and leave modes at any time, even across the start and end of a recording. The
two modes stay below all others, so they see the calls that would reach a device.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from types import FrameType
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from devgraph.api.errors import CaptureError
from devgraph.api.marks.marks import Args
from devgraph.api.marks.source import user_line
from devgraph.api.modes import FAKE, PROXY, STACKS, Stack, tracer

Report = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""A callable that receives a function and its arguments, and returns the result of the call."""


class _BottomMode:
    """A mode that stays at the bottom of its mode stack. Subclasses are torch modes."""

    is_devgraph_mode = True
    stack: Stack

    def __init__(self, report: Report, recorder: Any) -> None:
        super().__init__()
        self._report = report
        self.recorder = recorder  # the owner of the method ``report``
        self.is_over = False
        """Whether the mode was removed. torch pops a mode while its handler runs, and pushes it
        afterwards. So a mode that its own handler removes returns to the stack. It then only
        forwards calls, until the thread's next recording clears it from the stack."""

    def install(self) -> None:
        """Insert this mode into the stack, below all modes except the default-device mode."""
        self.clear()
        stack = self.stack.read()
        # torch requires the mode of set_default_device to be the lowest.
        default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
        stack.insert(1 if stack and stack[0] is default else 0, self)
        self.stack.rebuild(stack)

    @classmethod
    def clear(cls) -> None:
        """Take removed modes off the thread's stack, because they prevent compilation by torch."""
        stack = cls.stack.read()
        rest = [mode for mode in stack if not (isinstance(mode, _BottomMode) and mode.is_over)]
        if len(rest) < len(stack):
            cls.stack.rebuild(rest)

    def remove(self, leftovers: Collection[object] = ()) -> None:
        """Take this mode and ``leftovers`` off the stack. Idempotent."""
        self.is_over = True
        stack = self.stack.read()
        rest = [mode for mode in stack if mode is not self and mode not in leftovers]
        if len(rest) < len(stack):
            self.stack.rebuild(rest)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Push this mode again while a block inside the mode's own handler runs."""
        self.stack.push(self)
        try:
            yield
        finally:
            self.stack.pop()


def _scan(function: Any, init: Any, inputs: Any, additional_inputs: Any) -> Any:
    scan = importlib.import_module("torch._higher_order_ops.scan").generic_scan
    return scan(function, init, inputs, additional_inputs=additional_inputs)


_RULES: dict[str, Callable[..., Any]] = {
    "cond": lambda predicate, yes, no, operands: (yes if predicate else no)(*operands),
    "scan": _scan,
    "strict_mode": lambda function, operands: function(*operands),
    "invoke_subgraph": lambda graph, identifier, *operands: graph(*operands),
}
"""Replacements for eager kernels that refuse modes, by name of the higher-order operator."""


class Dispatching(_BottomMode, TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that reports every operation of the thread."""

    stack = STACKS[1]
    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.is_over or tracer(FAKE) is not None:  # Fake tensors need no recording.
            return func(*args, **kwargs)
        if tracer(PROXY) is not None:
            raise CaptureError(
                f"the step traces a function, at {user_line()}, but a capture cannot record work "
                f"that a tracer records. Trace before the capture (make_fx, torch.func.linearize), "
                f"and call the result in the step."
            )
        for kind in types:
            if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
                # The subclass then calls operations on plain tensors, which are reported.
                return NotImplemented
        if isinstance(func, OpOverload):
            return self._report(func, args, kwargs)
        if isinstance(func, HigherOrderOperator):
            # The eager kernel runs the operator's functions as plain Python, which is reported.
            kernel = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
            kernel = _RULES.get(func.name(), kernel)  # type: ignore[no-untyped-call]
            if kernel is not None:
                with self.again():
                    return kernel(*args, **kwargs)
        raise CaptureError(
            f"{func} cannot be recorded, at {user_line()}; call it in a function marked "
            f"@dg.no_graph and capture with policy='breakable'."
        )


class Functions(_BottomMode, TorchFunctionMode):
    """A mode that reports every call of a torch function by the thread."""

    stack = STACKS[0]

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Any = None) -> Any:
        if self.is_over:
            return func(*args, **(kwargs or {}))
        return self._report(func, args, kwargs or {})


class _Stance:
    """A torch.compile stance that runs compiled functions eagerly on recording threads.

    Compiled code bypasses the dispatcher, so no mode would see its writes.
    """

    def __init__(self, own: Any) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        if name == "stance" and is_recording():
            _refuse_machine_code(sys._getframe(1))
            return "force_eager"
        return getattr(self.own, name)


def _refuse_machine_code(frame: FrameType) -> None:
    """Refuse a function compiled by Inductor with ``fullgraph``: its eager results may differ."""
    callback, caller = frame.f_locals.get("callback"), frame.f_back
    if caller is None or not getattr(caller.f_locals.get("self"), "fullgraph", False):
        return
    backend: Any = getattr(callback, "_torchdynamo_orig_backend", None)
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    name = getattr(backend, "compiler_name", getattr(backend, "__name__", ""))
    if name == "inductor":
        raise CaptureError(
            f"a function compiled by torch.compile is called in the step, at {user_line()}. The "
            f"CPU reference would run it uncompiled, which rounds differently. Pass the function "
            f"itself, or capture with policy='piecewise'."
        )


_has_torch_function = torch.overrides.has_torch_function


def _has_override(values: Any) -> bool:
    """Act as ``torch.overrides.has_torch_function``, but ignore the mode of the recording.

    torch.nn's transformer layers take their fast paths only if no mode is active. A device capture
    has no active mode.
    """
    stack = Functions.stack.read()
    if len(stack) == 1 and isinstance(stack[0], Functions):
        mode = Functions.stack.pop()
        try:
            return _has_torch_function(values)
        finally:
            Functions.stack.push(mode)
    return _has_torch_function(values)


_lock = threading.RLock()
_recordings: set[object] = set()


def adapt_torch(recording: object) -> None:
    """Adapt torch's compiler and fast paths to recording threads until ``restore_torch``."""
    with _lock:
        _recordings.add(recording)
        torch.overrides.has_torch_function = _has_override  # type: ignore[assignment]
        compiler: Any = importlib.import_module("torch._dynamo.eval_frame")  # Takes seconds.
        if not isinstance(compiler._stance, _Stance):
            compiler._stance = _Stance(compiler._stance)


def restore_torch(recording: object) -> None:
    """Undo ``adapt_torch``. Idempotent."""
    with _lock:
        _recordings.discard(recording)
        if _recordings:
            return
        torch.overrides.has_torch_function = _has_torch_function
        compiler: Any = sys.modules.get("torch._dynamo.eval_frame")
        if compiler is not None and isinstance(compiler._stance, _Stance):
            compiler._stance = compiler._stance.own


def current_recorder() -> Any:
    """Return the recorder of this thread's operations, or None."""
    modes = (mode for mode in Dispatching.stack.read() if isinstance(mode, Dispatching))
    return next((mode.recorder for mode in modes if not mode.is_over), None)


def is_recording() -> bool:
    return any(
        isinstance(mode, _BottomMode) and not mode.is_over
        for mode in (*Functions.stack.read(), *Dispatching.stack.read())
    )
