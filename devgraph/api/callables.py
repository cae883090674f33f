"""``graphed``: run a callable in graphs, one for each key of its calls.

A key consists of the structure of the arguments, the shape, dtype, device and layout of each
tensor, all other values, the grad mode and autocast of the call, and plain values that the function
reads by name (globals, closures, attributes). The first call with a key runs eagerly, and the
second call captures. With gradients, one autograd function runs a forward and a backward graph
(``training.py``).
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import logging
import statistics
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import torch
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy

from devgraph.api.backend import Backend
from devgraph.api.buffers import term_of
from devgraph.api.capture import Captured, capture
from devgraph.api.device import raise_if_lost
from devgraph.api.environment import EMULATE_VARIABLE, switch
from devgraph.api.errors import (
    CaptureError,
    DeviceGraphError,
    DeviceLost,
    InputError,
    InputTypeError,
    NestedCaptureError,
    StateError,
    brief,
    finite,
    whole,
)
from devgraph.api.guard import LATE, Guard, all_of, change_in
from devgraph.api.marks.marks import current_scope
from devgraph.api.marks.source import warn
from devgraph.api.modes import Settings
from devgraph.api.named import NamedState
from devgraph.api.owned import (
    Weights,
    assignment_count,
    parameter_names,
    roots_of,
)
from devgraph.api.policy import registration
from devgraph.api.pool import Pool
from devgraph.api.process import identity
from devgraph.api.prove import Report
from devgraph.api.reach import PLAIN, modules_of, optimizer_state, set_by_hooks
from devgraph.api.registry import get_backend
from devgraph.api.tensors import alike_to, has_place, memory_of, overwrite, share_memory
from devgraph.api.training import (
    StaticInputs,
    TrainingGraphs,
    capture_steps,
    differentiable_leaves,
    results_of,
    tensors_of,
)
from devgraph.api.trees import children_of, leaves_of

logger = logging.getLogger(__name__)

_is_compiling = torch.compiler.is_compiling
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack
_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_NO_HOST: dict[str, Any] = {}


_PLAIN = frozenset({type(None), bool, int, complex, str, bytes, torch.dtype, torch.device})
_TIMED = 3
"""Number of calls that are timed before and after a capture if ``min_speedup`` is given."""

_RECENT = 4
"""Maximum number of fast paths, each of which recognizes one key without computing it."""

_MAX_KEYS = 1024
"""Maximum number of keys. A further key replaces the oldest key that has no graph."""

_FLOAT_KEYS = 4
"""Number of keys that differ only in floats at which a warning names the float arguments."""


class EagerReason(str, enum.Enum):
    """Reason for a call without a graph; a key of ``stats()["eager"]``."""

    FIRST_CALL = "first_call"
    """The key is new, or eager calls are being timed before its capture (``min_speedup``)."""
    TOO_SLOW = "too_slow"
    """The graph did not reach ``min_speedup``."""
    CAPTURE_FAILED = "capture_failed"
    """The step cannot be captured; a warning states the cause."""
    OTHER_DEVICE = "other_device"
    """A tensor is not on the device of the backend."""
    IN_CAPTURE = "in_capture"
    """The call is inside another capture or its warm-up, or other code is capturing."""
    TRACED = "traced"
    """A torch mode, a ``torch.func`` transform, forward AD or a saved-tensor hook is active."""
    SWITCHED_OFF = "switched_off"
    """The call is inside ``with step.eager()``, or DEVGRAPH_EMULATE is on."""
    SHARED_MEMORY = "shared_memory"
    """An argument shares memory with a tensor that the step writes but does not take."""
    BREAKS_WITH_GRADIENTS = "breaks_with_gradients"
    """Gradients need policy ``full`` and no host arguments."""

    def __str__(self) -> str:
        return self.value


@attrs.frozen(kw_only=True)
class _Options:
    backend: str | Backend
    policy: str
    max_graphs: int
    warmup: int
    min_speedup: float | None
    host_args: Mapping[str, Any] | None
    pool: Pool | None
    strict: bool
    clone: bool


@attrs.define(eq=False)
class _Entry:
    """The state of one key."""

    calls: int = 0
    graph: _Inference | TrainingGraphs | None = None
    reason: EagerReason | None = None
    """Reason why the key always runs eagerly."""
    has_gradients: bool = False
    """Whether results of the first call required gradients."""
    written: list[torch.Tensor] = attrs.field(factory=list)
    """Leaf tensors that the step writes, such as parameters in an optimizer step."""
    state: dict[int, list[torch.Tensor]] = attrs.field(factory=dict)
    """Tensors that the step finds by name and writes, by the address of their storage."""
    guard: Guard | None = None
    """A check that modules, functions and other objects in the arguments are unchanged since the
    capture; None if there are no such objects."""
    used: int = 0
    """Stamp of the last use."""
    repeat: Callable[[Graphed, tuple[Any, ...], dict[str, Any]], Any] | None = None
    """A fast path for calls with this key; it returns ``_OTHER`` for all other calls."""
    eager_seconds: list[float] = attrs.field(factory=list)
    graph_seconds: list[float] = attrs.field(factory=list)


class _Call(NamedTuple):
    """One call that no fast path recognized."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    host: dict[str, Any]
    tensors: list[torch.Tensor]
    needs_gradient: tuple[bool, ...]
    with_gradients: bool
    settings: Settings


class Graphed:
    """A callable that runs in graphs, returned by ``graphed``."""

    def __init__(self, fn: Callable[..., Any], module: torch.nn.Module | None, options: Any):
        self._given = fn
        self._module = module
        self._is_method = False
        """Whether ``fn`` is the ``forward`` of the module's class."""
        self._options: _Options = options
        self._entries: dict[Any, _Entry] = {}
        self._recent: list[_Entry] = []
        """Entries with a ``repeat``, most recently used first."""
        self._clock = itertools.count(1)
        self._counts: Counter[str] = Counter()
        self._eager_counts: Counter[EagerReason] = Counter()
        self._float_keys: Counter[Any] = Counter()
        self._switched_off = int(switch(EMULATE_VARIABLE))
        self._capturing = threading.Lock()
        self._closed = False
        self._process = identity.token
        self._pool = options.pool
        self._backend: Backend | None = None
        self._watch_weights()
        self._replays = 0
        self._named: NamedState | None = None
        self._names = Guard(())
        self._constants: tuple[Any, ...] = ()
        self._constants_same: Callable[[], bool] = lambda: False
        self._host_names = frozenset(options.host_args or ())
        functools.update_wrapper(self, fn, updated=())

    @property
    def _fn(self) -> Callable[..., Any]:
        """The function to run. For a graphed module, the current ``forward`` of its class."""
        module = self._module
        if self._is_method and module is not None and self._is_forward_of(module):
            return types.MethodType(type(module).forward, module)
        return self._given

    def _is_forward_of(self, module: torch.nn.Module) -> bool:
        return getattr(vars(module).get("forward"), "__dict__", None) is vars(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, in a graph if there is a graph for the key of the call."""
        if _is_compiling():
            if self._is_method:  # torch.compile does not trace a new bound method
                kind: Any = type(self._module)
                return kind.forward(self._module, *args, **kwargs)
            return self._fn(*args, **kwargs)
        if current_scope() is None and identity.token is self._process and not self._switched_off:
            for entry in self._recent:
                if entry.repeat is None:  # The previous ``repeat`` dropped all graphs.
                    break
                try:
                    result = entry.repeat(self, args, kwargs)
                except NestedCaptureError:
                    if not self._backend_in_use().capture_lock.is_foreign_here:
                        raise
                    break
                if result is not _OTHER:
                    return result
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the graph for the key of a call, or the function if there is no graph."""
        if self._closed:
            raise StateError(
                f"{self!r} is closed. Call the module itself after dg.ungraphed(module), or create "
                f"a new graphed callable with dg.graphed()."
            )
        if identity.token is not self._process:
            identity.require(self._process, "call a graphed function")
        if current_scope() is not None:
            return self._run_eagerly(EagerReason.IN_CAPTURE, args, kwargs)
        if self._switched_off:
            return self._run_eagerly(EagerReason.SWITCHED_OFF, args, kwargs)
        settings = Settings.current()
        if _is_transformed() or (shown := settings.key()) is None:
            return self._run_eagerly(EagerReason.TRACED, args, kwargs)
        host = _NO_HOST
        if self._host_names:
            host = {name: kwargs.pop(name) for name in self._host_names if name in kwargs}
        key: list[Any] = []
        tensors: list[torch.Tensor] = []
        for argument in args:
            _flatten(argument, key, tensors)
        for name, argument in kwargs.items():
            key.append(name)
            _flatten(argument, key, tensors)
        needs_gradient = self._needs_gradient()
        with_gradients = True in needs_gradient or (
            torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        )
        key += (needs_gradient, with_gradients, shown)
        key += (tuple(self._watched.training()), self._named_constants())
        try:
            entry = self._entries.get(tuple(key))
        except TypeError:
            self._refuse_unhashable(args, kwargs)
            raise
        if entry is not None and entry.state and _share_memory(entry.state, tensors):
            return self._run_eagerly(EagerReason.SHARED_MEMORY, args, {**kwargs, **host})
        call = _Call(args, kwargs, host, tensors, needs_gradient, with_gradients, settings)
        if entry is None or entry.graph is None or entry.graph_seconds is not _NO_TIMES:
            return self._slow_call(tuple(key), entry, call)
        if self._backend_in_use().capture_lock.is_foreign_here:
            return self._run_eagerly(EagerReason.IN_CAPTURE, args, {**kwargs, **host})
        entry.used = next(self._clock)
        graph = entry.graph
        with graph.lock:
            # Another thread may have closed the graph before this thread got the lock.
            holds = entry.graph is graph and self._weights_hold()
            if holds and (entry.guard is None or self._objects_hold(entry)):
                self._replays += 1
                result = graph.run(tensors, host)
                self._keep_repeat(entry, call)
                return result
        # Captures acquire ``_capturing`` before the pool's lock; the reverse order could deadlock.
        return self._slow_call(tuple(key), entry, call)

    def _keep_repeat(self, entry: _Entry, call: _Call) -> None:
        """Make the entry the most recent one if its calls allow a fast path."""
        others = [other for other in self._recent if other is not entry]
        # If the entry is already recent, its fast path refused this call and must be renewed.
        if entry.repeat is None or len(others) < len(self._recent):
            entry.repeat = None if self._host_names else self._repeat_of(entry, call)
        if entry.repeat is not None:
            self._recent = [entry, *others[: _RECENT - 1]]

    def _repeat_of(
        self, entry: _Entry, call: _Call
    ) -> Callable[[Graphed, tuple[Any, ...], dict[str, Any]], Any] | None:
        """Return a fast path for calls like ``call``, or None if there is none.

        Trees, parameters and repeated tensors have none. The fast path does not refer to the
        ``Graphed``, so that dropping the last reference to that object frees the graphs.
        """
        flat, names, graph = (*call.args, *call.kwargs.values()), (*call.kwargs,), entry.graph
        needs_gradient = call.needs_gradient
        places = [index for index, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)]
        constants = [
            (index, type(leaf), leaf)
            for index, leaf in enumerate(flat)
            if not isinstance(leaf, torch.Tensor)
        ]
        tensors = [flat[index] for index in places]
        if (
            graph is None
            or not tensors
            or len({*map(id, tensors)}) < len(tensors)
            or any(isinstance(tensor, torch.nn.Parameter) for tensor in tensors)
            or not all(kind in _PLAIN or (kind is float and c) for _, kind, c in constants)
        ):
            return None
        lock, run, count, state = graph.lock, graph.run, len(flat), entry.state
        alike, same_settings = alike_to(tensors), call.settings.are_active
        required = [tensor.requires_grad for tensor in tensors]
        training, named = self._watched.training(), self._named_constants()
        grad = call.with_gradients

        def repeat(step: Graphed, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            flat: Sequence[Any] = args
            if kwargs or names:
                if tuple(kwargs) != names:
                    return _OTHER
                flat = (*args, *kwargs.values())
            if len(flat) != count:
                return _OTHER
            if constants:
                for index, kind, value in constants:
                    if type(flat[index]) is not kind or flat[index] != value:
                        return _OTHER
                flat = [flat[index] for index in places]
            if not (alike(*flat) and same_settings()):
                return _OTHER
            if forward_ad._current_level >= 0 or (grad and _saved_tensors_hooks(True) is not None):
                return _OTHER
            watched = step._watched
            if training and watched.training() != training:
                return _OTHER
            if not (step._names.same() and step._constants_same()):
                if step._named_constants() != named:
                    return _OTHER
            elif step._constants is not named and step._constants != named:
                return _OTHER
            if [tensor.requires_grad for tensor in flat] != required:
                return _OTHER
            if state and _share_memory(state, flat):
                return _OTHER
            if needs_gradient and step._needs_gradient() != needs_gradient:
                return _OTHER
            with lock:
                if entry.graph is not graph or not step._guard.same():
                    return _OTHER
                entry.used = next(step._clock)
                step._replays += 1
                return run(flat, _NO_HOST)

        return repeat

    def _weights_hold(self) -> bool:
        """Return whether the weights are unchanged since the captures; if not, drop the graphs."""
        try:
            if not self._guard.same():
                self._guard.settle()
        except StateError as error:
            self._watch_weights()
            self._named, self._names = None, Guard(())
            self._drop_all(error)
            return False
        return True

    def _objects_hold(self, entry: _Entry) -> bool:
        """Return whether objects in the arguments are unchanged; if not, drop the graph."""
        assert entry.guard is not None
        try:
            if not entry.guard.same():
                entry.guard.settle()
        except StateError:
            self._drop(entry, "recaptures")
            return False
        return True

    def _watch_weights(self) -> None:
        self._watched = Weights(modules_of(self._fn))
        self._guard = Guard([self._watched])
        self._leaves: tuple[int, list[torch.Tensor]] | None = None

    # Keys.

    def _named_constants(self) -> tuple[Any, ...]:
        """Return the plain values that the function reads by name. They are part of the key.

        If another object that the function reads by name was replaced, drop all graphs.
        """
        if self._names.same() and self._constants_same():
            return self._constants
        try:
            self._names.settle()
            named = self._find_named() if self._named is None else self._named
            constants = named.constants()
        except StateError as error:
            self._drop_all(error)
            named = self._find_named()
            constants = named.constants()
        plain = (entry._replace(value=entry.now()) for entry in named.plain)
        self._constants, self._constants_same = constants, all_of(map(term_of, plain))
        return constants

    def _find_named(self) -> NamedState:
        """Find and return the state that the function reads by name."""
        self._named = NamedState(roots_of(self._fn), lambda entry: isinstance(entry.value, PLAIN))
        self._names = Guard([self._named])
        return self._named

    def _needs_gradient(self) -> tuple[bool, ...]:
        """Return ``requires_grad`` of each of ``_parameters``, or () without grad mode."""
        if not torch.is_grad_enabled():
            return ()
        return tuple([parameter.requires_grad for parameter in self._parameters()])

    def _parameters(self) -> list[torch.Tensor]:
        """Return the leaf tensors that the function can reach, in a fixed order."""
        if self._leaves is None or self._leaves[0] != assignment_count():
            self._leaves = assignment_count(), differentiable_leaves(self._fn)
        return self._leaves[1]

    def _refuse_unhashable(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        for path, leaf in self._named_leaves(args, kwargs):
            if not isinstance(leaf, torch.Tensor):
                try:
                    hash(leaf)
                except TypeError:
                    raise InputTypeError(
                        f"{path} is {brief(leaf)}, which is not hashable, so no graph can be "
                        f"chosen by its value. Pass a hashable value or a tensor, or register the "
                        f"class with torch.utils._pytree.register_pytree_node."
                    ) from None

    def _named_leaves(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        names = parameter_names(self._fn, len(args), kwargs)
        for name, argument in [*zip(names, args, strict=True), *kwargs.items()]:
            yield from leaves_of(name, argument)

    # Calls without a graph.

    def _run_eagerly(self, reason: EagerReason, args: Any, kwargs: Any) -> Any:
        self._eager_counts[reason] += 1
        return self._fn(*args, **kwargs)

    def _slow_call(self, key: tuple[Any, ...], entry: _Entry | None, call: _Call) -> Any:
        """Run a call that is eager, timed, or preceded by a capture."""
        options, args, with_gradients = self._options, call.args, call.with_gradients
        kwargs = {**call.kwargs, **call.host}
        if entry is None:
            unused = (k for k, e in [*self._entries.items()] if e.graph is None)
            if len(self._entries) >= _MAX_KEYS and (oldest := next(unused, None)) is not None:
                self._entries.pop(oldest, None)
            entry = self._entries.setdefault(key, _Entry())
            self._note_floats(key, call)
        if entry.reason is None:
            entry.reason = self._obstacle(call.tensors, with_gradients)
        entry.calls += 1
        timed = options.min_speedup is not None and not with_gradients
        wanted = 1 + (_TIMED if timed else 0)
        if entry.reason is not None or entry.calls <= wanted:
            reason = entry.reason or EagerReason.FIRST_CALL
            if options.strict and reason is not EagerReason.FIRST_CALL:
                raise CaptureError(f"{self!r} cannot run in a graph (strict=True): {reason}")
            leaves = [p for p in self._parameters() if not (is_lazy(p) or p.is_inference())]
            versions = [leaf._version for leaf in leaves] if entry.calls == 1 else []
            with self._timed(entry.eager_seconds if timed and entry.calls > 1 else None):
                result = self._run_eagerly(reason, args, kwargs)
            if self._named is not None:
                before = {*map(id, self._named.tensors)}
                self._named.leave_out_changes(keeps=object)
                if self._live and before - {*map(id, self._named.tensors)}:
                    self._drop_all(StateError("a call replaced tensors that other graphs read"))
            # Writes through ``.data`` and by fused optimizers change no version counter.
            names = () if self._named is None else self._named.names
            is_hidden = not {"data", "param_groups"}.isdisjoint(names)
            pairs = zip(leaves, versions, strict=False)
            entry.written += [leaf for leaf, v in pairs if is_hidden or leaf._version != v]
            if self._named is not None and entry.written:
                named = {*map(id, self._named.tensors)}
                for tensor in entry.written:
                    if id(tensor) in named:
                        entry.state.setdefault(memory_of(tensor), []).append(tensor)
            if with_gradients and entry.calls == 1:
                entry.has_gradients = any(t.requires_grad for t in tensors_of(result))
            return result
        if (graph := entry.graph) is not None:  # Its replays are still being timed.
            with graph.lock:
                self._weights_hold()
        if entry.graph is None:
            lock = self._backend_in_use().capture_lock
            if lock.is_recording_here or lock.is_stream_capturing():  # Other code is capturing.
                return self._run_eagerly(EagerReason.IN_CAPTURE, args, kwargs)
            try:
                with self._capturing:
                    self._weights_hold()  # All graphs must use the same parameters and buffers.
                    state = optimizer_state(roots_of(self._fn)) if entry.written else ()
                    changing = [*entry.written, *(tensor for _, tensor in state)]
                    saved = [(tensor, tensor.detach().clone()) for tensor in changing]
                    try:
                        if entry.graph is None:
                            self._capture(entry, call)
                            if self._named is not None:
                                self._named.leave_out_changes(keeps=object)
                    finally:
                        for leaf, content in saved:
                            overwrite(leaf, content)
            except DeviceLost:
                raise
            except Exception as error:
                if options.strict or not isinstance(error, DeviceGraphError):
                    raise
                entry.reason = EagerReason.CAPTURE_FAILED
                warn(
                    f"{self!r} runs eagerly for these arguments, which cannot be captured: {error}"
                )
            if entry.reason is not None:  # The error and its autograd nodes are freed now.
                return self._run_eagerly(entry.reason, args, kwargs)
        if entry.state and _share_memory(entry.state, call.tensors):
            return self._run_eagerly(EagerReason.SHARED_MEMORY, args, kwargs)
        graph = entry.graph
        if not timed:
            entry.graph_seconds = _NO_TIMES
        entry.used = next(self._clock)
        with contextlib.nullcontext() if graph is None else graph.lock:
            if graph is None or entry.graph is not graph:  # Another thread closed the graph.
                return self._run_eagerly(EagerReason.FIRST_CALL, args, kwargs)
            with self._timed(entry.graph_seconds if timed else None):
                self._replays += 1
                result = graph.run(call.tensors, call.host)
        if timed and len(entry.graph_seconds) >= _TIMED:
            self._judge(entry)
        return result

    def _obstacle(self, tensors: list[torch.Tensor], with_gradients: bool) -> EagerReason | None:
        kind = self._backend_in_use().device.type
        if any(tensor.device.type != kind for tensor in tensors):
            return EagerReason.OTHER_DEVICE
        if with_gradients and (self._options.policy != "full" or self._host_names):
            return EagerReason.BREAKS_WITH_GRADIENTS
        return None

    def _note_floats(self, key: tuple[Any, ...], call: _Call) -> None:
        masked = tuple(float if isinstance(part, _Float) else part for part in key)
        if masked == key:
            return
        self._float_keys[masked] += 1
        if self._float_keys[masked] == _FLOAT_KEYS:
            leaves = self._named_leaves(call.args, call.kwargs)
            names = [path for path, leaf in leaves if isinstance(leaf, float)]
            warn(
                f"{' or '.join(names)} of {self!r} changes between calls, and each value needs a "
                f"separate graph. Pass a tensor, or declare the value in host_args= if only "
                f"marked functions use it."
            )

    @contextlib.contextmanager
    def _timed(self, seconds: list[float] | None) -> Iterator[None]:
        if seconds is None:
            yield
            return
        backend = self._backend_in_use()
        backend.synchronize()
        started = time.perf_counter()
        yield
        backend.synchronize()
        seconds.append(time.perf_counter() - started)

    def _judge(self, entry: _Entry) -> None:
        """Close a graph that does not reach ``min_speedup``; its key then stays eager."""
        eager, graph = map(statistics.median, (entry.eager_seconds, entry.graph_seconds))
        assert self._options.min_speedup is not None
        if eager < graph * self._options.min_speedup:
            self._drop(entry, "dropped")
            entry.reason = EagerReason.TOO_SLOW
            logger.info("%r: graph %.1f us, eager %.1f us", self, graph * 1e6, eager * 1e6)
        else:
            entry.graph_seconds = _NO_TIMES

    # Graphs.

    def _backend_in_use(self) -> Backend:
        if self._backend is None:
            if self._options.pool is not None:
                self._backend = self._options.pool.backend  # type: ignore[assignment]
            else:
                given = self._options.backend
                self._backend = given if isinstance(given, Backend) else get_backend(given)
            assert self._backend is not None
        return self._backend

    def _capture(self, entry: _Entry, call: _Call) -> None:
        backend = self._backend_in_use()
        if self._pool is None:
            self._pool = backend.make_pool()
        while len(live := self._live) >= self._options.max_graphs:
            self._drop(min(live, key=lambda other: other.used), "evictions")
        if self._module is not None and (computed := set_by_hooks(self._module)):
            raise CaptureError(
                f"a hook of the module computes {', '.join(sorted(computed))} before each forward, "
                f"outside of the graph. Use torch.nn.utils.parametrizations, or graph a module "
                f"that contains this one."
            )
        static_inputs = StaticInputs(call.args, call.kwargs)
        if entry.has_gradients:
            parameters = [p for p in self._parameters() if p.requires_grad]
            # Activations live from the forward to the backward graph, so no other graph may share
            # their pool.
            pool = backend.make_pool()
            graph = TrainingGraphs(
                self._fn, static_inputs, pool, parameters, clone=self._options.clone
            )
            capture_steps([graph], self._options.warmup)
            entry.graph = graph
        else:
            declared = {**(self._options.host_args or {}), **call.host}
            captured = capture(
                self._fn,
                *static_inputs.args,
                kwargs=static_inputs.kwargs,
                policy=self._options.policy,
                backend=backend,
                host_args=declared or None,
                warmup=self._options.warmup,
                pool=self._pool,
            )
            if captured.gates:
                captured.close()
                raise CaptureError(
                    f"{self!r} has gate marks ({', '.join(captured.gates)}), which cannot be "
                    f"opened, because a graphed callable creates and closes graphs on demand. "
                    f"Capture the step with dg.capture or a runner, which have gates."
                )
            for tensor in captured.changed:
                entry.state.setdefault(memory_of(tensor), []).append(tensor)
            entry.graph = _Inference(captured, static_inputs, clone=self._options.clone)
        leaves = (leaf for _, leaf in self._named_leaves(call.args, call.kwargs))
        kinds = (torch.Tensor, float, *_PLAIN)
        if not all(isinstance(leaf, kinds) for leaf in leaves):
            entry.guard = entry.graph.guard
        self._counts["captures"] += 1

    def _drop(self, entry: _Entry, counter: str) -> None:
        graph, entry.graph, entry.repeat, entry.guard = entry.graph, None, None, None
        self._recent = [other for other in self._recent if other is not entry]
        entry.graph_seconds = []
        self._counts[counter] += 1
        if graph is not None:
            graph.close()

    @property
    def _live(self) -> list[_Entry]:
        return [entry for entry in [*self._entries.values()] if entry.graph is not None]

    def _drop_all(self, cause: StateError) -> None:
        """Drop all graphs, because state was replaced. The next call of each key is eager."""
        if LATE in str(cause):
            warn(f"{self!r} captures again, because {change_in(cause)}. {LATE}")
        for entry in self._live:
            self._drop(entry, "recaptures")
        for entry in [*self._entries.values()]:
            entry.calls = 0

    # Reports.

    def stats(self) -> dict[str, Any]:
        """Return counters: captures, replays, evictions, eager calls by reason, bytes."""
        live = [graph for entry in [*self._entries.values()] if (graph := entry.graph) is not None]
        pools = {graph.pool for graph in live}
        return {
            "keys": len(self._entries),
            "graphs": len(live),
            "replays": self._replays,
            **{n: self._counts[n] for n in ("captures", "recaptures", "evictions", "dropped")},
            "eager": {str(reason): count for reason, count in self._eager_counts.items()},
            "pool_bytes": sum(pool.bytes for pool in pools),
        }

    def explain(self) -> str:
        """Return the graphs, or the reason for eager calls, of each key as text."""
        lines = [repr(self)]
        for number, (key, entry) in enumerate(self._entries.items()):
            text = entry.graph.explain() if entry.graph else entry.reason or "not captured"
            parts = (part[1] for part in key if isinstance(part, tuple) and len(part) > 1)
            shapes = [str(tuple(size)) for size in parts if isinstance(size, torch.Size)]
            mode = ", training" * (True in key[-2])
            lines.append(f"key {number}, {' '.join(shapes) or 'no tensors'}{mode}: {text}")
        return "\n".join(lines)

    def prove(self, cases: int = 3) -> Report:
        """Compare each graph with eager runs on fresh inputs; see ``Captured.prove``.

        A graph is omitted if its training flags, constants or frozen parameters are not current.

        Raises:
            StateError: no graph is captured yet.
        """
        reports = [
            entry.graph.prove(cases)
            for key, entry in self._entries.items()
            if entry.graph and self._is_current(key)
        ]
        if not reports:
            raise StateError(
                f"{self!r} has no graph to prove; call it twice with the same shapes. Eager calls "
                f"by reason: {self.stats()['eager']}"
            )
        return Report.merged(reports)

    def _is_current(self, key: tuple[Any, ...]) -> bool:
        """Whether a call can have ``key`` in the current state of the function."""
        needs_gradient, _, _, training, constants = key[-5:]
        try:
            present = self._named.constants() if self._named is not None else ()
        except StateError:  # The proof names the object that was replaced.
            present = constants
        with torch.enable_grad():
            needed = ((), self._needs_gradient())
        return (tuple(self._watched.training()), present) == (training, constants) and (
            needs_gradient in needed
        )

    def invalidate(self) -> None:
        """Close all graphs. Each key is captured again at its second call."""
        for entry in self._live:
            self._drop(entry, "invalidated")
        self._entries.clear()
        self._float_keys.clear()

    def close(self) -> None:
        """Free all graphs. Later calls raise StateError. Idempotent."""
        self.invalidate()
        self._closed = True

    @contextlib.contextmanager
    def eager(self) -> Iterator[None]:
        """Run all calls in the block eagerly."""
        self._switched_off += 1
        try:
            yield
        finally:
            self._switched_off -= 1

    def __repr__(self) -> str:
        return f"<Graphed {getattr(self._fn, '__qualname__', brief(self._fn))}>"

    def __deepcopy__(self, memo: Any) -> Any:
        copied = memo.get(id(self._module)) if self._is_method else None
        if copied is None:
            raise InputTypeError(
                "a graphed callable owns device resources and cannot be copied or pickled: call "
                "dg.ungraphed(module) first"
            )
        return types.MethodType(type(copied).forward, copied)  # A copied module has no graphs.

    def __reduce__(self) -> Any:
        if isinstance(self, _GraphedModule) or not self._is_method:
            self.__deepcopy__({})
        # The result is the forward of the class, because the module's state is unpickled later.
        return getattr, (self._module, "forward")


class _GraphedFunction(Graphed):
    """A graphed function, which binds as a method if it is a class attribute.

    A graphed module must not be a descriptor: torch.compile binds descriptors that instances store.
    """

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Return the graphed method of an instance, which is stored in its ``__dict__``."""
        if instance is None:
            return self
        if _is_compiling():
            return functools.partial(self._given, instance)  # The tracer skips bound methods.
        return self._method_of(instance, owner)

    def _method_of(self, instance: Any, owner: Any) -> Any:
        name = f"_graphed_{id(self)}"
        space = getattr(instance, "__dict__", None)
        if space is None:
            raise InputTypeError(
                f"{type(instance).__name__} has __slots__ and no __dict__ to hold the graphs of "
                f"its graphed method. Graph a function instead: dg.graphed(instance.method)."
            )
        method = space.get(name)
        if method is None or method.instance is not instance:  # The instance may be a copy.
            method = _GraphedMethod(self._given.__get__(instance, owner), instance, self._options)
            if isinstance(instance, type):  # A class method is bound to its class.
                setattr(instance, name, method)
            else:
                space[name] = method
        return method


class _GraphedMethod(Graphed):
    """The graphed method of one instance; a copy of the instance creates its own on first use."""

    def __init__(self, fn: Callable[..., Any], instance: Any, options: _Options) -> None:
        super().__init__(fn, instance if isinstance(instance, torch.nn.Module) else None, options)
        self.instance = instance

    def __deepcopy__(self, memo: Any) -> Any:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class _GraphedModule(Graphed):
    """A graphed module, whose calls run its hooks and then ``forward``."""

    def __init__(self, forward: Graphed) -> None:
        self.__dict__ = vars(forward)  # Both objects share one state.

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        if module is None or not self._is_forward_of(module):
            return super().__call__(*args, **kwargs)
        return module(*args, **kwargs)


_OTHER = object()
"""Returned by a ``repeat`` that cannot run the call."""

_NO_TIMES: list[float] = []
"""The ``graph_seconds`` of an entry that is not being timed."""


class _Float(str):
    """A float in a key, as text: -0.0 and 0.0 differ, and nan equals itself."""

    __slots__ = ()


def _flatten(node: Any, key: list[Any], tensors: list[torch.Tensor]) -> None:
    """Append the key of ``node`` to ``key`` and its tensors to ``tensors``."""
    kind = type(node)
    if kind is torch.Tensor or isinstance(node, torch.Tensor):
        if isinstance(node, torch.nn.Parameter):
            key.append(id(node))  # parameters are bound, not copied
        else:
            first = next((i for i, other in enumerate(tensors) if other is node), -1)
            layout = None if node.is_contiguous() else node.stride()
            key.append(
                (kind, node.shape, node.dtype, node.device, layout, node.requires_grad, first)
            )
        tensors.append(node)
    elif kind in _PLAIN:
        key.append((kind, node))
    elif kind is float:
        key.append(_Float(node.hex()))
    else:
        children = children_of(node)
        if children is None:
            key.append((kind, node.__reduce__()[1] if kind is slice else node))
        else:
            key.append((kind, tuple([suffix for suffix, _ in children])))
            for _, child in children:
                _flatten(child, key, tensors)


def _is_transformed() -> bool:
    """Whether torch changes or records the operations of calls, so that a replay would differ."""
    return bool(
        _dispatch_modes()
        or _transform() is not None
        or forward_ad._current_level >= 0
        or _saved_tensors_hooks(True) is not None  # A checkpoint around the call sets them.
    )


def _share_memory(state: Mapping[int, list[torch.Tensor]], tensors: Sequence[torch.Tensor]) -> bool:
    return any(
        share_memory(tensor, written)
        for tensor in tensors
        if has_place(tensor)
        for written in state.get(memory_of(tensor), ())
    )


class _Inference:
    """The graph of one key without gradients."""

    def __init__(self, captured: Captured, static_inputs: StaticInputs, *, clone: bool) -> None:
        self._captured = captured
        self._launch = captured.launch
        self._load, self._store = static_inputs.load, static_inputs.store
        self._require_apart, self._gradients = static_inputs.require_apart, captured.gradients
        self.pool, self.guard = captured.pool, captured.guard
        self.lock = captured.pool.lock
        self._order = captured.pool.order
        spec = captured.host_spec
        self._fill = spec.fill if spec.declared else None
        self._written = captured.written
        self._results = results_of(captured.outputs, static_inputs, clone=clone)

    def run(self, tensors: Sequence[torch.Tensor], host: Mapping[str, Any]) -> Any:
        """Replay with the tensors of a call. The caller must hold the pool's lock."""
        self._order()
        if self._written:
            self._require_apart(tensors, self._written)
        self._gradients.check()
        self._load(tensors)
        try:
            if self._launch is not None:
                self._launch()
            else:
                self._captured.run(host if self._fill is None else self._fill(host))
        except Exception as error:
            raise_if_lost(self._captured.backend, error)
            raise
        if self._written:
            self._store(tensors, self._written)
        return self._results(tensors)

    def prove(self, cases: int) -> Report:
        return self._captured.prove(cases)

    def explain(self) -> str:
        return self._captured.summary()

    def close(self) -> None:
        self._captured.close()


def graphed(
    fn_or_module: Callable[..., Any] | None = None,
    *,
    backend: str | Backend = "auto",
    policy: str = "full",
    max_graphs: int = 8,
    warmup: int = 1,
    min_speedup: float | None = None,
    host_args: Mapping[str, Any] | None = None,
    pool: Pool | None = None,
    strict: bool = False,
    clone: bool = True,
) -> Any:
    """Return a callable that runs ``fn_or_module`` in graphs.

    There is one graph for each key: shapes, dtypes and devices of tensors, the structure of the
    arguments, and all other values. A key is captured at its second call, and again after a
    parameter or buffer was replaced. In-place changes need no new capture.

    For a module, the callable also replaces its ``forward``, which ``ungraphed`` restores. Without
    ``fn_or_module``, the result is a decorator for functions and methods. A decorated method has
    separate graphs for each instance.

    Args:
        fn_or_module: a function, a bound method or a module.
        backend: name of the backend, or a backend.
        policy: "full", "breakable" or "piecewise". Gradients need "full".
        max_graphs: maximum number of graphs, above which the least recently used graph is closed.
        warmup: number of eager runs before each capture.
        min_speedup: minimum ratio of eager time to graph time, such as 1.05. The first calls of a
            key are timed, and a graph below the ratio is closed. None keeps all graphs.
        host_args: the host arguments and their values at capture; see ``capture``.
        pool: memory to share with other captures; None creates a pool.
        strict: whether to raise if a key cannot have a graph, instead of running it eagerly.
        clone: whether to return copies of the outputs. Without copies, later calls may overwrite
            the outputs.

    Raises:
        InputError: an argument is out of range.
        InputTypeError: an argument has a wrong type.
        StateError: the module is graphed already.
    """
    registration(policy)  # refuses an unknown name
    for name, given, kind in (("pool", pool, Pool), ("host_args", host_args, Mapping)):
        if not (given is None or isinstance(given, kind)):
            raise InputTypeError(f"{name} must be a {kind.__name__} or None, got {brief(given)}")
    options = _Options(
        backend=backend,
        policy=policy,
        max_graphs=whole("max_graphs", max_graphs, 1),
        warmup=whole("warmup", warmup),
        min_speedup=None if min_speedup is None else finite("min_speedup", min_speedup),
        host_args=host_args,
        pool=pool,
        strict=strict,
        clone=clone,
    )
    if fn_or_module is None:
        return lambda fn: graphed(fn, **attrs.asdict(options, recurse=False))
    if not callable(fn_or_module) or isinstance(fn_or_module, type):
        raise InputTypeError(f"graphed takes a function or a module, got {brief(fn_or_module)}")
    if isinstance(fn_or_module, torch.nn.Module):
        if isinstance(vars(fn_or_module).get("forward"), Graphed):
            raise StateError("the module is graphed already; call dg.ungraphed(module) first")
        step = Graphed(fn_or_module.forward, fn_or_module, options)
        own = getattr(type(fn_or_module), "forward", None)  # None for a scripted module
        step._is_method = own is not None and getattr(step._given, "__func__", None) is own
        fn_or_module.forward = step
        step._watch_weights()  # The assignment of ``forward`` changed the watched state.
        return _GraphedModule(step)
    receiver = getattr(fn_or_module, "__self__", None)
    module = receiver if isinstance(receiver, torch.nn.Module) else None
    return _GraphedFunction(fn_or_module, module, options)


def ungraphed(module: torch.nn.Module | Graphed) -> torch.nn.Module:
    """Close the graphs of a graphed module and restore its ``forward``; return the module.

    Args:
        module: the module, or the callable that ``graphed`` returned for it.

    Raises:
        InputError: the module is not graphed.
    """
    owner: Any = module._module if isinstance(module, _GraphedModule) else module
    step = getattr(owner, "__dict__", {}).get("forward")
    if not isinstance(step, Graphed):
        raise InputError(f"{type(owner).__name__} is not graphed")
    step.close()
    fn = step._fn
    if getattr(fn, "__func__", None) is getattr(
        type(owner).forward, "__func__", type(owner).forward
    ):
        del owner.forward
    else:
        owner.forward = fn
    restored: torch.nn.Module = owner
    return restored
