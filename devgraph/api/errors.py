"""The tree of devgraph's errors.

::

    DeviceGraphError
    ├── StateError                    a call that the graph's state does not allow
    │   └── StaleOutputError          an output was read after a later replay overwrote it
    ├── CaptureError                  the step cannot be captured in its present form
    │   ├── HostReadError             the step reads device data on the host
    │   ├── FrozenValueError          a host value would be frozen in the graph (ValueError)
    │   ├── NotCapturableError        a ``no_graph`` function under a policy without breaks
    │   ├── NestedCaptureError        a capture or replay inside a capture
    │   ├── EmptyCaptureError         nothing was recorded
    │   ├── UnjoinedStreamError       a side stream was not joined
    │   └── CaptureBusyError          another thread is capturing on this device
    ├── UpdateError                   host arguments could not be applied
    │   ├── UpdateUnsupportedError    this backend cannot update regions
    │   └── UpdateTopologyError       the new arguments need different nodes
    ├── RegionError                   a marked function broke its contract
    ├── HostArgumentError             missing, unknown or ill-typed host arguments (TypeError)
    ├── InputError                    a tensor or number is invalid (ValueError)
    │   └── InputTypeError            a value of the wrong type (TypeError)
    ├── ConfigError                   unusable mode configuration (ValueError)
    │   └── ConfigTypeError           configuration of the wrong type (TypeError)
    ├── BackendError                  the backend cannot be used as requested
    │   ├── UnknownBackendError       no backend of that name (ValueError)
    │   ├── BackendUnavailableError   known, but unusable on this machine
    │   └── CapabilityError           the backend does not declare the capability
    ├── ResourceError                 memory or another limited resource ran out
    │   └── ExecutableError           no memory to make or rebuild an executable
    ├── GateError                     a gate was used for a replay that has finished
    │   └── GateTimeoutError          a gate was not opened, or a signal not given, in time
    ├── AgreementError                ranks disagree, time out or have exited
    ├── HandoffError                  a request cannot move to another engine (ValueError)
    └── DeviceLost                    the device is in a sticky error state
"""

from __future__ import annotations

import difflib
import numbers
import operator
import reprlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class DeviceGraphError(Exception):
    """Base of every error that devgraph raises.

    A note on each error names the ``devgraph troubleshoot`` command that explains it. Python 3.11
    and later print notes below the message.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        public = next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        self.__notes__ = [f"see: devgraph troubleshoot {public.__name__}"]


class DeviceGraphWarning(UserWarning):
    """A setting is overridden, deprecated or without effect, or a step changes Python state."""


class StateError(DeviceGraphError):
    """The state of the object does not allow the call; the message states the remedy."""


class StaleOutputError(StateError):
    """An output was read after a later replay overwrote it."""


class CaptureError(DeviceGraphError):
    """The step cannot be captured in its present form."""


class HostReadError(CaptureError):
    """The step reads device data on the host, which a capture cannot record."""


class FrozenValueError(CaptureError, ValueError):
    """A host value was consumed where a replay would not see its new value."""


class NotCapturableError(CaptureError):
    """A ``no_graph`` function was called under a policy without breaks."""


class NestedCaptureError(CaptureError):
    """A capture or a replay was started inside a capture."""


class EmptyCaptureError(CaptureError):
    """The capture recorded nothing."""


def empty_capture(device: object) -> EmptyCaptureError:
    return EmptyCaptureError(
        f"the capture recorded no device work. Run the step on this backend's device ({device}), "
        f"inside the with block if there is one. A view of an argument records nothing: return a "
        f"clone() instead. Work of a generator or coroutine that runs after the step has returned "
        f"is not captured."
    )


class UnjoinedStreamError(CaptureError):
    """A side stream was not joined when a segment ended."""


class CaptureBusyError(CaptureError):
    """Another thread holds the device's capture lock for too long."""


class UpdateError(DeviceGraphError):
    """New host arguments could not be applied to a graph."""


class UpdateUnsupportedError(UpdateError):
    """This backend cannot update regions; the message names the alternatives."""


class UpdateTopologyError(UpdateError):
    """The new host arguments need a different number or kind of nodes."""


class RegionError(DeviceGraphError):
    """A marked function returned or used different tensors than during capture."""


class HostArgumentError(DeviceGraphError, TypeError):
    """Host arguments are missing, unknown or of the wrong type."""


class InputError(DeviceGraphError, ValueError):
    """A value does not match its declaration."""


class InputTypeError(InputError, TypeError):
    """A value does not have the declared type."""


class ConfigError(DeviceGraphError, ValueError):
    """The mode configuration cannot be used."""


class ConfigTypeError(ConfigError, TypeError):
    """A part of the mode configuration has the wrong type."""


class BackendError(DeviceGraphError):
    """A backend cannot be found, started or used as requested."""


class UnknownBackendError(BackendError, ValueError):
    """No backend of that name is registered."""


class BackendUnavailableError(BackendError):
    """The backend is known but cannot be used on this machine."""


class CapabilityError(BackendError):
    """The backend does not declare a required capability."""


class ResourceError(DeviceGraphError):
    """Memory, streams or another limited resource ran out."""


class ExecutableError(ResourceError):
    """There is no memory to make or rebuild the executable of a graph.

    The graph stays ready: launch it again when there is memory.
    """

    partly = False
    """Whether part of the step ran before the error."""


class GateError(DeviceGraphError):
    """A gate was opened or awaited for a replay that has finished."""


class GateTimeoutError(GateError):
    """A gate was not opened in time (the replay is invalid), or a signal was not given in time."""


class AgreementError(DeviceGraphError):
    """Ranks of a group disagree, do not answer in time, or have exited."""


class HandoffError(DeviceGraphError, ValueError):
    """A request cannot move to another engine, or its transfer failed.

    Args:
        message: the text of the error.
        fields: fields of the header that differ.
        retriable: whether the same call can succeed later, for example when a slot is free.
    """

    def __init__(
        self, message: str, *, fields: tuple[str, ...] = (), retriable: bool = False
    ) -> None:
        super().__init__(message)
        self.fields = fields
        self.retriable = retriable


class DeviceLost(DeviceGraphError):
    """The device is in an error state that only a new process can clear."""


__all__ = sorted(
    name
    for name, kind in vars().items()
    if isinstance(kind, type) and issubclass(kind, DeviceGraphError)
)


def did_you_mean(name: str, known: Iterable[str], habits: Mapping[str, str] | None = None) -> str:
    """Return a sentence that lists the ``known`` names, and a suggestion if ``name`` is close.

    ``habits`` maps other common names to known names.
    """
    names = sorted(set(known))
    spellings = {word: valid for word, valid in (habits or {}).items() if valid in names}
    spellings |= {valid.lower(): valid for valid in names}
    word = name.lower()
    close = difflib.get_close_matches(word, spellings, n=1)
    close = close or [other for other in spellings if len(word) > 1 and other.startswith(word)]
    suggestion = spellings[close[0]] if close else name
    hint = f" Did you mean {suggestion!r}?" if suggestion != name else ""
    return f"Known: {', '.join(names) if names else '(none)'}.{hint}"


def counted(number: float | None, noun: str) -> str:
    """Return a number with its noun, such as ``"1 graph"``; None means an unknown number."""
    plural = f"{noun[:-1]}ies" if noun.endswith("ry") else f"{noun}s"
    return f"{'?' if number is None else number} {noun if number == 1 else plural}"


def format_bytes(count: int) -> str:
    """Return a byte count with a unit, for example ``"1.5 GiB"``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def require_result(value: T, kind: Any, owner: object, hook: str) -> T:
    """Return ``value``, the result of a vendor's method, or raise unless it is a ``kind``."""
    if isinstance(value, kind):
        return value
    name = f"{type(owner).__name__}.{hook}"
    raise BackendError(f"{name} returned {brief(value)}; expected: {kind.__name__}")


def whole(
    what: str, value: object, least: int = 0, kind: type[DeviceGraphError] = InputError
) -> int:
    """Return ``value`` as an int, or raise unless it is a whole number of at least ``least``."""
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        type_error = ConfigTypeError if kind is ConfigError else InputTypeError
        raise type_error(f"{what} must be an int, got {brief(value)}")
    if number < least:
        raise kind(f"{what} must be at least {least}, got {number}")
    return number


def finite(what: str, value: object) -> float:
    """Return ``value``, or raise unless it is a finite number of at least 0."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise InputTypeError(f"{what} must be a number, got {brief(value)}")
    number: float = value  # type: ignore[assignment]  # the value may be a NumPy number
    if not 0 <= number <= sys.float_info.max:  # An int can exceed the largest float.
        raise InputError(f"{what} must be a finite number of at least 0, got {brief(number)}")
    return number


class _Brief(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 120

    def repr1(self, value: Any, level: int) -> str:
        if all(hasattr(type(value), name) for name in ("__len__", "dtype", "shape")):
            place = f" on {value.device}" if hasattr(value, "device") else ""
            return f"<{type(value).__name__} {tuple(value.shape)} {value.dtype}{place}>"
        return super().repr1(value, level)

    def repr_instance(self, value: Any, level: int) -> str:
        text = super().repr_instance(value, level)
        return f"<{type(value).__name__}>" if "tensor(" in text else text


brief = _Brief().repr
"""Return a short ``repr`` of a user's value for an error message.

A tensor is described by its type, shape, dtype and device, never by its data. Long strings and
collections are truncated.
"""


def without_first_frame(error: Exception) -> Exception:
    """Return ``error`` without the first frame of its traceback.

    A context manager must use this before it raises another error from ``error``. Since Python
    3.12, its own frame leads back to ``error``, and the cycle would keep the frames of the step
    alive.
    """
    first = error.__traceback__
    return error if first is None else error.with_traceback(first.tb_next)


def note(error: BaseException, text: str) -> None:
    """Add ``text`` to the notes of ``error``, which tracebacks show from Python 3.11 on."""
    error.__notes__ = [*getattr(error, "__notes__", ()), text]  # type: ignore[attr-defined]
