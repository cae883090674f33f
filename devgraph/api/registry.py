"""The registry of backends: built-ins by name, others through entry points, loaded on demand."""

from __future__ import annotations

import dis
import importlib
import importlib.metadata
import itertools
import logging
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from devgraph.api.errors import (
    BackendUnavailableError,
    CapabilityError,
    DeviceGraphError,
    InputError,
    InputTypeError,
    UnknownBackendError,
    brief,
    did_you_mean,
    require_result,
)
from devgraph.api.marks.source import add_machinery

if TYPE_CHECKING:
    from devgraph.api.backend import Backend

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "devgraph.backends"

# Preference order of "auto": real devices first. Each value is (module, class, remedy).
BUILT_IN = {
    "cuda": ("devgraph.cuda", "CudaBackend", "install a CUDA build of torch"),
    "npu": ("devgraph.npu", "NpuBackend", "install CANN and torch-npu"),
    "rocm": ("devgraph.rocm", "RocmBackend", "install the ROCm build of torch from its own index"),
    "accelerator": (
        "devgraph.api.torchlike.accelerator",
        "AcceleratorBackend",
        "reinstall devgraph",
    ),
    "cpu": ("devgraph.cpu", "CpuBackend", "reinstall devgraph"),
}
_LAST = 2
"""Number of built-ins that "auto" tries after the backends of other packages."""

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Environment variable that decides whether ``import torch`` loads vendor packages."""

OTHER_NAMES = {
    **dict.fromkeys(("nvidia", "gpu"), "cuda"),
    **dict.fromkeys(("ascend", "huawei", "cann", "torch_npu"), "npu"),
    **dict.fromkeys(("amd", "hip"), "rocm"),
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "bs": "buckets",
    **dict.fromkeys(("none", "off", "eager"), "disabled"),
}
"""Other common names of built-in backends, keys, facts and policies, for hints in errors."""


@attrs.frozen(kw_only=True)
class BackendInfo:
    """A registered backend, as reported by ``dg.backends()``."""

    name: str
    available: bool
    reason: str
    """Reason why the backend is unavailable; empty if it is available."""
    device: str
    version: str


class _Registry:
    def __init__(self) -> None:
        self._factories: dict[str, Callable[[], Backend]] = {}
        self._instances: dict[str, Backend] = {}
        self.after_fork()

    def after_fork(self) -> None:
        """Replace the lock, because its owner may be a thread of the parent process."""
        self._lock = threading.RLock()

    def register(self, name: str, factory: Callable[[], Backend]) -> None:
        with self._lock:
            self._factories[name] = factory
            self._instances.pop(name, None)

    def names(self) -> list[str]:
        entry_points = {entry.name for entry in _entry_points()}
        others = sorted((entry_points | set(self._factories)) - set(BUILT_IN))
        return [*list(BUILT_IN)[:-_LAST], *others, *list(BUILT_IN)[-_LAST:]]

    def make(self, name: str) -> Backend:
        with self._lock:
            if name not in self._instances:
                self._instances[name] = _make(name, lambda: self.factory(name)())
            return self._instances[name]

    def factory(self, name: str) -> Callable[[], Backend]:
        """Return the factory of a backend, usually its class."""
        if name in self._factories:
            return self._factories[name]
        if name in BUILT_IN:
            return _load_built_in(name)
        for entry in _entry_points():
            if entry.name == name:
                return _load_plugin(entry)
        hint = did_you_mean(name, self.names(), OTHER_NAMES)
        raise UnknownBackendError(f"no backend {name!r}. {hint}")


def _entry_points() -> importlib.metadata.EntryPoints:
    return importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)


def _load_built_in(name: str) -> Callable[[], Backend]:
    module_name, class_name, cure = BUILT_IN[name]
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise BackendUnavailableError(
            f"backend {name!r} needs module {error.name!r}: {cure}."
        ) from error
    factory: type[Backend] = getattr(module, class_name)
    return factory


def _load_plugin(entry: importlib.metadata.EntryPoint) -> Callable[[], Backend]:
    try:
        factory: Callable[[], Backend] = entry.load()
    except Exception as error:
        package = f" of the package {entry.dist.name!r}" if entry.dist else ""
        raise BackendUnavailableError(
            f"backend {entry.name!r} cannot be loaded from {entry.value!r}{package}, which "
            f"declares it: {type(error).__name__}: {error}"
        ) from error
    add_machinery(entry.module.partition(".")[0])
    return factory


def installed_version(name: str) -> str | None:
    """Return the version of a package, or None if it is not installed.

    A loaded module takes precedence over the metadata, because its version identifies the build.
    """
    module = sys.modules.get(name)
    if hasattr(module, "__version__"):
        return str(module.__version__)  # type: ignore[union-attr]
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def cache_folder() -> Path:
    """Return the path of devgraph's folder in the user's cache; the folder may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "devgraph"


def _make(name: str, factory: Callable[[], Backend]) -> Backend:
    try:
        backend = factory()
    except DeviceGraphError:
        raise
    except Exception as error:
        raise BackendUnavailableError(
            f"backend {name!r} failed to start: {type(error).__name__}: {error}"
        ) from error
    from devgraph.api.backend import Backend  # deferred, because it imports torch

    if not isinstance(backend, Backend):
        raise BackendUnavailableError(
            f"the factory of backend {name!r} returned {brief(backend)}, which is not a "
            f"devgraph.api.backend.Backend"
        )
    if backend.name != name:
        raise BackendUnavailableError(_other_name(name, type(backend), backend.name))
    _require_hooks(backend)
    for kind in type(backend).__mro__:
        if kind.__module__ != "__main__":  # this module may define steps too
            add_machinery(kind.__module__)
    return backend


def _other_name(name: str, kind: type, own: str) -> str:
    if not own:
        return f"{kind.__name__} has no name; set name = {name!r} in the class"
    return (
        f"{kind.__name__} names itself {own!r}, but is registered as {name!r}. The two names must "
        f"be equal, because modes, plans and statistics use the name of the class"
    )


def _require_hooks(backend: Backend) -> None:
    from devgraph.api.backend import Backend
    from devgraph.api.capabilities import Capabilities, hooks
    from devgraph.api.device import Device
    from devgraph.api.graph import DeviceGraph

    require_result(backend.capabilities, Capabilities, backend, "capabilities")
    graph_type = backend.graph_type
    own = graph_type if issubclass(graph_type, DeviceGraph) else DeviceGraph
    if absent := sorted(own.__abstractmethods__):
        raise BackendUnavailableError(
            f"graph_type of {type(backend).__name__} is {graph_type.__name__}, which does not "
            f"implement {', '.join(absent)}. Set it to a subclass that implements these methods."
        )
    for capability in ("region_update", "node_ranges", "loops", "gates"):
        named = [hook.rpartition(".")[2] for hook in hooks(capability)]
        kinds = (graph_type, DeviceGraph), (type(backend), Backend)
        kind, base = kinds[hasattr(Backend, named[0])]
        missing = [name for name in named if getattr(kind, name) is getattr(base, name)]
        if getattr(backend.capabilities, capability) and missing:
            raise CapabilityError(
                f"backend {backend.name!r} declares {capability}, but its "
                f"{'graph_type ' if kind is graph_type else 'class '}{kind.__name__} does not "
                f"implement {' and '.join(missing)}. Implement these methods as described in "
                f"docs/backends.md, or do not declare {capability}."
            )
    for leaf, owner in (graph_type, DeviceGraph), (type(backend), Device):
        state = {*_stored(owner.__init__)}
        for part in leaf.__mro__[: leaf.__mro__.index(owner)]:
            sets = {name for member in vars(part).values() for name in _stored(member)}
            if taken := sorted(state & (sets | vars(part).keys())):
                raise BackendUnavailableError(
                    f"{part.__name__}.{taken[0]} hides an attribute in which {owner.__name__} "
                    f"stores its own state. Rename it in {part.__name__}."
                )


def _stored(member: object) -> Iterator[str]:
    """Yield the names of the attributes that a method assigns on its first parameter."""
    if isinstance(member, types.FunctionType):
        for before, after in itertools.pairwise(dis.get_instructions(member)):
            loaded = before.argval if isinstance(before.argval, tuple) else (before.argval,)
            if after.opname == "STORE_ATTR" and loaded[-1:] == member.__code__.co_varnames[:1]:
                yield after.argval


_registry = _Registry()
os.register_at_fork(after_in_child=_registry.after_fork)
names = _registry.names


def declaration(name: str) -> type[Backend] | None:
    """Return the class of a backend, to read its declarations on a machine without the device.

    Return None if the backend is registered as a function or its package cannot be loaded.
    """
    from devgraph.api.backend import Backend  # deferred, because it imports torch

    try:
        factory = _registry.factory(name)
    except BackendUnavailableError:
        return None
    return factory if isinstance(factory, type) and issubclass(factory, Backend) else None


def register(name: str, factory: Callable[[], Backend], *, replace: bool = False) -> None:
    """Register a backend in this process. A package declares an entry point instead.

    Args:
        name: name of the backend in ``get_backend``, in modes and on the command line. It must
            equal the attribute ``name`` of the backend.
        factory: returns the backend, or raises BackendUnavailableError with a remedy.
        replace: whether to replace a registered backend of that name.

    Raises:
        InputError: the name is empty, reserved or taken, or differs from the backend's own name.
        InputTypeError: an argument has the wrong type.
    """
    from devgraph.api.backend import Backend  # deferred, because it imports torch

    is_other = isinstance(factory, type) and not issubclass(factory, Backend)
    if not isinstance(name, str) or not callable(factory) or is_other:
        raise InputTypeError(
            f"register takes a name and a subclass of devgraph.api.backend.Backend, or a function "
            f"that returns a backend, got {brief(name)} and {brief(factory)}"
        )
    if not name or name == "auto":
        raise InputError(
            f"{name!r} cannot name a backend. Pass a non-empty name other than 'auto', which "
            f"selects the best backend."
        )
    if not replace and name in _registry.names():
        raise InputError(
            f"a backend {name!r} is registered already. Choose another name, or pass replace=True "
            f"to replace it in this process."
        )
    own = getattr(factory, "name", name)
    if isinstance(factory, type) and own != name:
        raise InputError(_other_name(name, factory, own))
    _registry.register(name, factory)


def backends() -> list[BackendInfo]:
    """Return all registered backends, usable or not, in the order in which "auto" tries them."""
    infos = []
    for name in _registry.names():
        reason = device = version = ""
        try:
            backend = _registry.make(name)
            device, version = backend.device_name, backend.version
        except Exception as error:
            logger.debug("backend %s is not available", name, exc_info=True)
            reason = str(error) or type(error).__name__
        infos.append(
            BackendInfo(
                name=name, available=not reason, reason=reason, device=device, version=version
            )
        )
    return infos


def get_backend(name: str = "auto") -> Backend:
    """Return a backend by name. "auto" prefers a device and otherwise returns "cpu".

    "auto" never returns another package's backend that runs on the host.

    Raises:
        UnknownBackendError: no backend of that name is registered (a ValueError).
        BackendUnavailableError: the backend cannot be used here; the message states the remedy.
    """
    if not isinstance(name, str):
        raise InputTypeError(
            f"the name of a backend must be a string, got {brief(name)}. "
            f"{did_you_mean('', _registry.names())}"
        )
    if name != "auto":
        return _registry.make(name)
    for candidate in _registry.names():
        try:
            backend = _registry.make(candidate)
        except Exception as error:
            logger.info("auto skips %s: %s", candidate, error)
            continue
        if candidate in BUILT_IN or backend.device.type != "cpu":
            return backend
    raise BackendUnavailableError("no backend is available, not even the CPU reference")
