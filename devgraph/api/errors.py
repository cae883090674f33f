"""Every error of devgraph, in one tree.

::

    DeviceGraphError
    ├── StateError                    a call that the graph's state does not allow
    │   └── StaleOutputError          an output was read after a later replay overwrote it
    ├── CaptureError                  the body cannot be captured in its present form
    │   ├── HostReadError             it reads device data on the host
    │   ├── FrozenValueError          it consumes a host value, which would freeze (ValueError)
    │   ├── NotCapturableError        it calls a ``no_graph`` function where breaks are not allowed
    │   ├── NestedCaptureError        a capture or replay inside a capture
    │   ├── EmptyCaptureError         nothing was recorded
    │   ├── UnjoinedStreamError       a side stream was not joined
    │   └── CaptureBusyError          another thread is capturing on this device
    ├── UpdateError                   host arguments could not be applied
    │   ├── UpdateUnsupportedError    this backend cannot update regions
    │   └── UpdateTopologyError       the new arguments need other nodes
    ├── RegionError                   a marked function broke its contract
    ├── HostArgumentError             missing, unknown or ill-typed host arguments (TypeError)
    ├── InputError                    a tensor or number that does not fit (ValueError)
    │   └── InputTypeError            a value of the wrong type (TypeError)
    ├── ConfigError                   unusable mode configuration (ValueError)
    │   └── ConfigTypeError           configuration of the wrong type (TypeError)
    ├── BackendError                  the backend itself
    │   ├── UnknownBackendError       no backend of that name (ValueError)
    │   ├── BackendUnavailableError   known, but unusable on this machine
    │   └── CapabilityError           the backend does not declare the capability
    ├── ResourceError                 memory, streams or another budget is exhausted
    │   └── ExecutableError           no memory to make or rebuild an executable
    ├── GateError                     a gate was opened for a replay that is over
    │   └── GateTimeoutError          a gate was not opened, or a signal not given, in time
    ├── AgreementError                ranks differ, are late or are gone
    ├── HandoffError                  a request cannot move to another engine (ValueError)
    └── DeviceLost                    the device is in a sticky error state
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any


class DeviceGraphError(Exception):
    """Base of every error that devgraph raises.

    Each error has a note that names the command which prints advice for its public class. Python
    3.11 and later print the note below the message.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        public = next(kind for kind in type(self).__mro__ if kind.__module__ == __name__)
        self.__notes__ = [f"see: devgraph troubleshoot {public.__name__}"]


class DeviceGraphWarning(UserWarning):
    """A setting is overridden, deprecated or without effect, or a step changes Python state."""


class StateError(DeviceGraphError):
    """The state of the object does not allow the call; the message says what to do."""


class StaleOutputError(StateError):
    """An output was read after a later replay overwrote it."""


class CaptureError(DeviceGraphError):
    """The body cannot be captured in its present form."""


class HostReadError(CaptureError):
    """The body reads device data on the host, which a capture cannot record."""


class FrozenValueError(CaptureError, ValueError):
    """A host value was consumed where a replay would not see its new value."""


class NotCapturableError(CaptureError):
    """A ``no_graph`` function was called under a policy without breaks."""


class NestedCaptureError(CaptureError):
    """A capture or a replay was started inside a capture."""


class EmptyCaptureError(CaptureError):
    """The capture recorded nothing."""


def nothing_done(device: object) -> str:
    """Return the causes and remedies in the text of EmptyCaptureError."""
    return (
        f". Run the step on this backend's device ({device}), inside the with block if there is "
        f"one. Views of arguments are no work: return a clone() of them. Nor is the work that a "
        f"generator or a coroutine does after the step returned it."
    )


class UnjoinedStreamError(CaptureError):
    """A side stream was still running when a segment ended."""


class CaptureBusyError(CaptureError):
    """Another thread holds the device's capture lock."""


class UpdateError(DeviceGraphError):
    """New host arguments could not be applied to a graph."""


class UpdateUnsupportedError(UpdateError):
    """This backend cannot update regions; the message names the alternatives."""


class UpdateTopologyError(UpdateError):
    """The new host arguments need another number or kind of nodes."""


class RegionError(DeviceGraphError):
    """A marked function returned or used other tensors than at capture."""


class HostArgumentError(DeviceGraphError, TypeError):
    """Host arguments are missing, unknown or of the wrong type."""


class InputError(DeviceGraphError, ValueError):
    """A value does not fit what was declared."""


class InputTypeError(InputError, TypeError):
    """A value has another type than was declared."""


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
    """The backend does not declare the capability that was asked for."""


class ResourceError(DeviceGraphError):
    """Memory, streams or another budget is exhausted."""


class ExecutableError(ResourceError):
    """There is no memory to make or rebuild the executable of a graph.

    The graph stays ready: launch it again when there is memory.
    """

    partly = False
    """Whether a part of the step ran before the error."""


class GateError(DeviceGraphError):
    """A gate was opened, or waited for, in a replay that is over."""


class GateTimeoutError(GateError):
    """A gate was not opened in time, so its replay is invalid; or no signal came in time."""


class AgreementError(DeviceGraphError):
    """The ranks of a group differ, are late, or are gone."""


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
    """The device is in an error state that only a new process leaves."""


__all__ = sorted(
    name
    for name, kind in vars().items()
    if isinstance(kind, type) and issubclass(kind, DeviceGraphError)
)


def did_you_mean(name: str, known: Iterable[str], habits: Mapping[str, str] | None = None) -> str:
    """Return a sentence that lists the ``known`` names and suggests the one closest to ``name``."""
    names = sorted(known)
    spellings = {word: valid for word, valid in (habits or {}).items() if valid in names}
    spellings |= {valid.lower(): valid for valid in names}
    close = difflib.get_close_matches(name.lower(), spellings, n=1)
    suggestion = spellings[close[0]] if close else name
    hint = f" Did you mean {suggestion!r}?" if suggestion != name else ""
    return f"Known: {', '.join(names) if names else '(none)'}.{hint}"


def whole(
    what: str, value: object, least: int = 0, kind: type[DeviceGraphError] = InputError
) -> int:
    """Return ``value`` as an int if it is a whole number of at least ``least``."""
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
    """Return ``value`` if it is a finite number of at least 0."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise InputTypeError(f"{what} must be a number, got {brief(value)}")
    number: float = value  # type: ignore[assignment]  # numpy has numbers too
    if not 0 <= number < math.inf:
        raise InputError(f"{what} must be a finite number of at least 0, got {number}")
    return number


class _Brief(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 120

    def repr1(self, value: Any, level: int) -> str:
        if all(hasattr(type(value), name) for name in ("data_ptr", "dtype", "device", "shape")):
            shape = tuple(value.shape)
            return f"<{type(value).__name__} {shape} {value.dtype} on {value.device}>"
        return super().repr1(value, level)

    def repr_instance(self, value: Any, level: int) -> str:
        text = super().repr_instance(value, level)
        return f"<{type(value).__name__}>" if "tensor(" in text else text


brief = _Brief().repr
"""Return a short ``repr`` of a user's value for an error message.

A tensor is described by its type, shape, dtype and device, never by its data. Long texts and
collections are cut.
"""


def note(error: BaseException, text: str) -> None:
    """Add ``text`` to the notes of ``error``, which tracebacks show from Python 3.11 on."""
    error.__notes__ = [*getattr(error, "__notes__", ()), text]  # type: ignore[attr-defined]
