"""State of a captured step: its arguments, and everything that a capture restores and checks."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import operator
import random
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import (
    _global_forward_hooks,
    _global_forward_pre_hooks,
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.hooks import RemovableHandle

from devgraph.api.backend import Backend
from devgraph.api.buffers import AGAIN, CHECKED, Bound, Places, bound_in, is_equal, returns_tree
from devgraph.api.errors import (
    CaptureError,
    DeviceGraphError,
    InputTypeError,
    StateError,
    brief,
    note,
)
from devgraph.api.guard import Term, Watched, by_turns
from devgraph.api.marks.host_values import same_value
from devgraph.api.marks.marks import Mark, current_scope
from devgraph.api.marks.source import is_machinery_module, warn
from devgraph.api.modes import FAKE, PROXY, Settings, tracer
from devgraph.api.named import NamedState, changed_contents, text_of_changes
from devgraph.api.reach import (
    ABSENT,
    PLAIN,
    Change,
    Entry,
    Named,
    Watch,
    entries,
    is_array,
    is_iterator,
    optimizer_state,
    reached,
    rebinding,
)
from devgraph.api.snapshots import Snapshot, same_bytes
from devgraph.api.tensors import Memory, has_place, is_size
from devgraph.api.trees import Copied, change_in, leaves_of, own_copy

logger = logging.getLogger(__name__)

_TRAINING = operator.attrgetter("training")


class Owned:
    """The state of one step: its arguments, the trees in ``bound=``, and reachable state.

    ``tensors`` are the tensors in arguments and in ``bound``, with their names. A replay can copy
    new inputs into ``given``, the tensors in arguments. ``in_objects`` are the tensors inside
    objects in arguments, except parameters and buffers of modules.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        bound: Mapping[str, Any] | None = None,
    ) -> None:
        self._fn, self._kwargs = fn, [*kwargs]
        self._bound, generators = {}, []
        for name, value in (bound or {}).items():
            if isinstance(value, torch.Generator):
                generators.append((name, value))
            else:
                self._bound[name] = value
        names = parameter_names(fn, len(args), kwargs)
        self.arguments: dict[str, Any] = {**dict(zip(names, args, strict=True)), **kwargs}
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self._inner: list[Any] = []
        for name, argument in self.arguments.items():
            for path, leaf in leaves_of(name, argument):
                if isinstance(leaf, torch.Tensor):
                    require_place(path, leaf)
                    self.tensors.append((path, leaf))
                elif is_iterator(leaf):
                    raise InputTypeError(
                        f"{path} is a {type(leaf).__name__}, which one run of the step exhausts, "
                        f"but a capture runs the step several times. Pass a list."
                    )
                elif not isinstance(leaf, PLAIN):
                    self._inner.append((path, leaf))
        self.count = len(args)
        """Number of positional arguments."""
        self.given = [tensor for _, tensor in self.tensors]
        self.in_objects = reached(self._inner, weights=False)[0]
        self.tensors += self.in_objects
        self._bound_tensors = [pair for item in self._bound.items() for pair in bound_in(*item)]
        self.tensors += [(p, t) for p, t in self._bound_tensors if not _is_weight(t)]
        self.roots = [*self._inner, *generators, *roots_of(fn)]
        """Names and objects from which the search for the step's state starts."""
        self.written: set[int] = set()
        """The ``id`` of each argument tensor that the step writes."""
        self._others: dict[int, torch.Tensor] = {}
        """Tensors other than ``given`` and weights that the step can reach, by ``id``."""
        self.changed: dict[int, torch.Tensor] = {}
        """The tensors of ``_others`` that the step writes."""
        self.moved: dict[str, tuple[Any, Any]] = {}
        """Old and new values of plain values that the step changed, by path."""
        self._in_bodies: set[str] = set()
        """Paths of plain values that eager bodies changed and that each replay changes again."""
        self._added: dict[str, Any] = {}
        """Plain values that the first run added."""
        self._watch: Watch | None = None
        """The watch on the places that the step can reach; None outside of runs in a scope."""
        self._refuse: Callable[[list[Change]], None] = raise_rebinding
        """A function that receives the step's changes before an eager body."""
        self._settings: dict[str, tuple[Mark, tuple[Any, ...], Any]] = {}
        """Plain values that the step set before it called a mark: the mark, its arguments, and the
        value, by path."""
        self._has_run = False
        self._first: _FirstRun | None = None
        """The first run of a capture in progress, if this run created state for later runs."""
        self._saved: tuple[Snapshot, ...] = ()
        """The state before the first run of a capture in progress."""
        self._weights: list[tuple[torch.Tensor, int]] = []
        """Parameters and their version counters before the first run."""
        self._before: set[int] = set()
        """The ``id`` of each tensor that the step could reach before the first run."""
        self._named: Named | None = None
        """The search for named places before the first run."""
        self.gradients = Gradients(())
        """The gradients that the step writes."""
        self._is_first_captured = False
        """Whether the captured run was the first run."""
        self.iterated: Collection[str] = ()
        """Names of the values that the step iterates over."""
        self.names: Collection[str] = ()
        """The names in the code of the step."""
        self._after_run: list[Entry] = []
        """Named places with their contents after the first run."""

    def reached(self) -> tuple[list[tuple[str, torch.Tensor]], list[torch.Generator]]:
        """Return the tensors (including parameters) and generators that the step reaches now."""
        return reached(self.roots)

    def everything(self) -> list[tuple[str, torch.Tensor]]:
        """Return the bound and the reached tensors (including parameters), each with its name."""
        return [*self.tensors, *self._bound_tensors, *self.reached()[0]]

    def own_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any], list[Copied]]:
        """Return the arguments for one run, and the copies of the caller's containers in them."""
        copies: dict[int, Copied] = {}
        copied = {name: own_copy(name, value, copies) for name, value in self.arguments.items()}
        kwargs = {name: copied.pop(name) for name in self._kwargs}
        return tuple(copied.values()), kwargs, [*copies.values()]

    @contextlib.contextmanager
    def run(self, *, strict: bool = False) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Yield the arguments for one run, with copies of the caller's containers.

        A run inside a capture must not rebind a tensor, except in eager bodies: it must not
        replace, add or remove an entry or an attribute with a tensor. Runs before the capture may
        do so, because many steps initialize themselves in their first run. No run may change the
        containers in arguments.

        Args:
            strict: whether to refuse rebinding even in runs before the capture. The first run may
                still add entries.

        Raises:
            CaptureError: the step rebinds a tensor.
        """
        args, kwargs, copies = self.own_arguments()
        scope = current_scope()
        captured = scope is not None and scope.records
        is_first, self._has_run = not self._has_run, True
        is_checked = captured or strict or is_first or scope is not None
        watch = Watch(self.roots) if is_checked else None
        outer, self._watch = self._watch, watch if scope is not None else None
        self._settings.clear()
        before_bodies: list[Change] = []
        self._refuse = raise_rebinding if captured else before_bodies.extend
        counted = [t for t in (*self.given, *self._others.values()) if not t.is_inference()]
        versions = [tensor._version for tensor in counted]
        before = optimizer_state(self.roots) if captured and is_first else []
        # A run must compute parametrizations even if the caller's ``cached()`` holds their results.
        cache, parametrize._cache_enabled = parametrize._cache_enabled, 0
        try:
            yield args, kwargs
            changes = before_bodies
            if watch:
                # Runs in a scope record no plain values, because eager bodies hide some changes.
                notes = (self._note_state,) if scope is None else ()
                changes = [*before_bodies, *watch.changes(*notes, empty=True)]
            if watch and self._settings:
                self._require_settings(watch)
        finally:
            self._watch, parametrize._cache_enabled = outer, cache
        changed = {id(t): t for t, n in zip(counted, versions, strict=True) if t._version != n}
        given = {*map(id, self.given)}
        self.written |= changed.keys() & given
        self.changed |= {number: t for number, t in changed.items() if number not in given}
        self._is_first_captured |= captured and is_first
        if captured and is_first and len(made := optimizer_state(self.roots)) > len(before):
            raise CaptureError(
                f"the captured run is the first run and creates {made[-1][0]}, so each replay "
                f"would create it again. Capture with warmup=1 or more, or run the step once first."
            )
        if self._first is not None and not captured:
            trains = any(tensor._version != version for tensor, version in self._weights)
            self._first.require_settled(trains=trains)
        if is_first and self._named is not None:
            self._after_run = [entry.noted() for entry in self._named.places]
        if is_first and not captured:
            gone = [change for change in changes if change.verb == "removes"]
            # Later runs find nothing to remove.
            self.moved |= {change.path: (change.before[0], ABSENT) for change in gone}
            created = {path: tensor for item in changes for path, tensor in item.tensors}
            if created and self._saved:
                after = self._saved[0].beside(created.items())
                self.rewind()
                self._first = _FirstRun(created, after, self._before)
            changes = [item for item in changes if strict and item.verb != "adds"]
        elif not captured and not strict:  # This run checks a compiled step.
            changes = [item for item in changes if item.verb != "adds" or _is_written(item.tensors)]
        change = (changes[0].verb, changes[0].path) if changes else None
        for item in copies:
            change = change or change_in(item, self._note_state)
        if change is not None:
            raise CaptureError(rebinding(*change))

    def rewind(self) -> None:
        """Restore the state before the first run, so that each run begins from it."""
        # Compare contents, because a write through a raw pointer changes no version counter.
        for saved in self._saved if self._has_run else ():
            self.written |= {id(tensor) for tensor in saved.written(self.given)}
            saved.restore()

    @contextlib.contextmanager
    def eager_body(self, mark: Mark, args: tuple[Any, ...]) -> Iterator[None]:
        """Allow rebinding in the block, the eager body of ``mark``, which replays run again.

        Raises:
            CaptureError: the captured step rebound a tensor before the body.
        """
        if self._watch is not None:

            def note_setting(path: str, _: Any, value: Any) -> None:
                self._settings.setdefault(path, (mark, args, value))

            self._refuse(self._watch.changes(note_setting, empty=True))
        yield
        if self._watch is not None:
            self._watch.changes(lambda path, *_: self._in_bodies.add(path), empty=True)
            self._watch.settle()

    def _require_settings(self, watch: Watch) -> None:
        """Raise CaptureError if an eager body reads a value that the step changes afterwards."""
        ends: dict[str, Any] = {}
        watch.changes(lambda path, _, new: ends.update({path: new}), empty=True)
        for path, (mark, args, value) in self._settings.items():
            if path not in ends or same_value(ends[path], value):
                continue
            objects = (("self", arg) for arg in args if not isinstance(arg, torch.Tensor))
            named = Named([(mark.name, mark.fn), *objects])
            names = named.names | {e.path for e in named.places}
            names |= {
                getattr(e.value, "name", "")
                for e in named.places
                if isinstance(e.value, ContextVar)
            }
            if not names.isdisjoint(re.findall(r"\w+", path)):
                raise CaptureError(
                    f"the step sets {path} to {brief(value)} before it calls {mark.name}, and to "
                    f"{brief(ends[path])} afterwards. Replays do not repeat these assignments, so "
                    f"{mark.name} would read the second value. Pass the value as an argument."
                )

    def _note_state(self, path: str, old: Any, new: Any) -> None:
        if old is ABSENT:  # a value that the first run added may change in later runs
            old = self._added.setdefault(path, new)
        if path in self._in_bodies and self._named is not None:
            read = self._named.names.union(entry.path for entry in self._named.places)
            if re.split(r"\W", path)[0] not in {re.split(r"\W", name)[0] for name in read}:
                return  # Only eager bodies use the value.
        if new is not ABSENT and not same_value(old, new):
            self.moved[path] = (self.moved.get(path, (old,))[0], new)

    @property
    def is_unsettled(self) -> bool:
        """Whether the next warm-up run must check the tensors that the first run created."""
        return self._first is not None and not self._first.is_settled

    @property
    def _owner(self) -> torch.nn.Module | None:
        """The module that is the step, or whose method is the step."""
        owner = getattr(self._fn, "__self__", self._fn)
        return owner if isinstance(owner, torch.nn.Module) else None

    @property
    def ordered(self) -> list[str]:
        """The names of the keyword arguments over which the step iterates (``**kwargs``)."""
        parameters = _parameters_of(self._fn)
        if not any(p.kind is p.VAR_KEYWORD and p.name in self.iterated for p in parameters):
            return []
        known = {parameter.name for parameter in parameters}
        return [name for name in self._kwargs if name not in known]

    def renewed(self, arguments: Mapping[str, Any]) -> Owned:
        """Return the current state of the step, with some ``arguments`` replaced, by name."""
        values = [*{**self.arguments, **arguments}.values()]
        kwargs = dict(zip(self._kwargs, values[self.count :], strict=True))
        return Owned(self._fn, tuple(values[: self.count]), kwargs, self._bound)

    @contextlib.contextmanager
    def kept(
        self, backend: Backend, limit: int | None, *, weights: bool = False, regions: bool = False
    ) -> Iterator[Callable[[], None]]:
        """Restore tensors and random generators after the block, even on failure.

        With ``weights``, parameters and the state of optimizers are restored as well. Pass
        ``regions`` if regions are part of the graph.

        Yields a function that raises CaptureError if the step changed the memory or the layout of
        a tensor.
        """
        tensors, generators = self.reached()
        changing = [(path, tensor) for path, tensor in tensors if not _is_weight(tensor)]
        others = [*self.tensors[len(self.given) :], *changing]
        self._others = {id(tensor): tensor for _, tensor in others}
        snapshot = Snapshot(backend, self.tensors, generators, limit=limit, optional=changing)
        watch = Watch(self.roots, gradients=True)
        self._before = {id(tensor) for _, tensor in tensors}
        counted = [tensor for _, tensor in tensors if not tensor.is_inference()]
        self._weights = [(tensor, tensor._version) for tensor in counted if _is_weight(tensor)]
        leaves = [(t, t.grad) for t in counted if t.requires_grad and t.is_leaf]
        versions = [None if grad is None else grad._version for _, grad in leaves]
        memories = [(path, t, t.detach()) for path, t in tensors if _is_weight(t)]
        trained: list[tuple[str, torch.Tensor]] = []
        if weights:
            trained = [*((path, t) for path, t, _ in memories), *optimizer_state(self.roots)]
        parameters = Snapshot(backend, trained, limit=limit)

        def require_places() -> None:
            snapshot.require_places()
            for path, weight, before in memories:
                if weight.data_ptr() != before.data_ptr():
                    raise CaptureError(rebinding("replaces", f"{path}.data"))

        self._saved = snapshot, parameters
        self._named = Named(self.roots, regions=regions)
        numbers, settings = host_random(), Settings.current().named()
        try:
            yield require_places
            self.written |= {id(tensor) for tensor in snapshot.written(self.given)}
        except BaseException as error:
            # Plain values are restored after devgraph's errors only, because a step may count its
            # own failures on purpose.
            watch.put_back(plain=isinstance(error, DeviceGraphError))
            for _, weight, before in memories:
                if weight.data_ptr() != before.data_ptr():
                    weight.data = before
            try:
                with backend.on_working_stream():
                    snapshot.restore()
                    parameters.restore_contents()
            except Exception as lost:
                note(error, f"the contents of the arguments could not be restored: {lost}")
            raise
        finally:
            self._saved = ()  # frees the copies
        held = [
            (leaf, leaf.grad)
            for (leaf, grad), version in zip(leaves, versions, strict=True)
            if leaf.grad is not None and has_place(leaf.grad)
            if leaf.grad is not grad or grad._version != version
        ]
        clears = not self._named.names.isdisjoint(("zero_grad", "grad ="))
        made = {id(leaf) for leaf, grad in leaves if grad is None}
        self.gradients = Gradients(held, made if self._is_first_captured and not clears else ())
        first, self._first = self._first, None
        if first is not None:
            first.restore()
        snapshot.restore()
        parameters.restore_contents()
        for leaf, grad in leaves:
            if grad is None and leaf.grad is not None and has_place(leaf.grad):
                zero_gradient(leaf.grad)
        self.gradients.clear()
        for saved in (snapshot, parameters):
            saved.require_unwritten()
        watch.changes(self._note_state, empty=True)
        for name, value in Settings.current().named().items():
            self._note_state(name, settings[name], value)
        for name, state in host_random().items():
            if numbers.get(name, state) != state:
                self._note_state(name, numbers[name][-1], state[-1])
        changes = [(path, *values) for path, values in self.moved.items()]
        changes += [c for c in changed_contents(self._after_run) if c[0] not in self.moved]
        if self.moved:
            warn(text_of_changes(changes))
        elif changes:  # No warning: a step may append to a list that other code reads.
            logger.warning(text_of_changes(changes))

    def watch(self) -> tuple[list[Watched], list[Watched]]:
        """Return the watched arguments with ``bound=``, and modules; proofs check both, too."""
        modules = [leaf for _, leaf in self._inner if isinstance(leaf, torch.nn.Module)]
        # Functions in arguments are omitted: the step calls them, and they return no bound trees.
        owners = {n: v for n, v in self.arguments.items() if not returns_tree(v)}
        count = len(self.given) + len(self.in_objects)
        named = [(f"a tensor bound at capture ({p}, {t.dtype})", t) for p, t in self.tensors]
        given: list[Watched] = [Bound(named[:count], owners, values=True, weights=False)]
        found: list[Watched] = []
        if (owner := self._owner) is not None:
            modules.append(owner)
            found.append(Bound((), {"self": owner}, values=True, weights=False))
        if self._bound:
            inside = [v for v in self._bound.values() if isinstance(v, torch.nn.Module)]
            modules += inside
            held_by = {id(t) for m in inside for t in (*m.parameters(), *m.buffers())}
            rest = [(p, t) for p, t in self._bound_tensors if id(t) not in held_by]
            trees = {n: v for n, v in self._bound.items() if not isinstance(v, torch.nn.Module)}
            given.append(Bound(((f"bound tensor {p!r}", t) for p, t in rest), trees))
        if modules:
            names = () if self._named is None else self._named.names
            found.append(Weights(modules, modes=True, names=names))
        arrays = (Entry(path, None, None, leaf) for path, leaf in self._inner if is_array(leaf))
        given.append(Places(entry.noted() for entry in arrays))
        return given, found

    def watch_named(self, *, regions: bool) -> list[Watched]:
        """Return the state that only replays compare. Proofs report its changes instead."""
        before = {} if self._named is None else {entry.place: entry for entry in self._named.places}

        def has_changed(entry: Entry) -> bool:
            """Whether the step changed or created the value of a place; False for tensors."""
            old = before.get(entry.place, _EMPTY)
            if entry.path in self._added and entry.path not in self.moved:
                return not is_equal(self._added[entry.path], entry.value)
            is_same = old.content == entry.content and is_equal(old.value, entry.value)
            return not (is_same or isinstance(entry.value, torch.Tensor))

        state = NamedState(self.roots, has_changed, regions=regions, found=self._named)
        named = watched_in(state)
        self.iterated, self.names = state.iterated, state.names
        keys = [entry.key for entry in before.values()]
        used = (flag for flag, names in _FLAGS.items() if not state.names.isdisjoint(names))
        if flags := [flag for flag in used if flag not in keys]:
            leaves = {id(e.value): e for e in entries(self.roots)}.values()
            flagged = [e for e in leaves if isinstance(e.value, torch.Tensor)]
            moving = {id(tensor) for tensor, count in self._weights if tensor._version != count}
            moving |= self.changed.keys() | {id(e.value) for e in flagged if e.value.is_inference()}
            named.append(
                Places(
                    Entry(f"{e.path}.{flag}", e.value, flag, getattr(e.value, flag))
                    for flag, e in itertools.product(flags, flagged)
                    if flag != "_version" or id(e.value) not in moving
                )
            )
        if not state.names.isdisjoint(("backward", "grad")):
            named.append(TensorHooks(self.reached()[0]))
        return [*named, self.gradients] if self.gradients else named


class _FirstRun:
    """The first run of a step that creates tensors for later runs.

    ``made`` are these tensors by path, and ``after`` are their contents after the run. ``before``
    are the ids of the tensors that the step could reach before the run.
    """

    def __init__(
        self,
        made: Mapping[str, torch.Tensor],
        after: Snapshot,
        before: Collection[int],
    ) -> None:
        self._made, self._after, self._before = made, after, before
        self.is_settled = False
        """Whether a second run was compared with the first."""

    def require_settled(self, *, trains: bool) -> None:
        """Raise CaptureError if the second run changed tensors that the first run created.

        Both runs started from the same state, so a correct step computes the same values. Nothing
        is compared if the step ``trains``, because changed parameters are not restored between the
        runs.
        """
        parts = () if self.is_settled or trains else self._after.parts()
        self.is_settled = True
        for name, tensor, now, saved, _ in parts:
            if is_near(now, saved):
                continue
            if id(tensor) in self._before:
                raise CaptureError(
                    f"the step exchanges tensors: {name} is another tensor after each run, as "
                    f"with two alternating buffers, but a replay always uses the captured "
                    f"tensor. Copy the new contents into one buffer with copy_()."
                )
            raise CaptureError(
                f"the first run of the step creates {name}, and later runs continue from its "
                f"values, so replays would be one step ahead of eager runs. Create {name} "
                f"before the capture, which then restores its values."
            )

    def restore(self) -> None:
        """Restore the values of the tensors after the run, and warn if later runs wrote them."""
        written = {id(tensor) for tensor in self._after.written(self._made.values())}
        if not written:
            return
        self._after.restore()
        names = [path for path, tensor in self._made.items() if id(tensor) in written]
        warn(
            f"the first warm-up run created {', '.join(names)}, and later runs wrote to this "
            f"state. Its values after the first run were restored, and replays continue from them. "
            f"Create the state before the capture, so that the capture restores its values."
        )


_EMPTY = Entry("", None, None, ABSENT)
_FLAGS = {"requires_grad": ("backward", "grad", "requires_grad"), "_version": ("_version",)}
"""Attributes of tensors that replays compare if the step's code contains one of the names."""


def parameter_names(fn: Callable[..., Any], count: int, taken: Collection[str]) -> list[str]:
    """Return the names of the first ``count`` parameters of ``fn``, or "argument 0" and so on."""
    parameters = _parameters_of(fn)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [parameter.name for parameter in parameters if parameter.kind in kinds][:count]
    names += [""] * (count - len(names))
    return [
        name if name and name not in taken else f"argument {index}"
        for index, name in enumerate(names)
    ]


def _parameters_of(fn: Callable[..., Any]) -> list[inspect.Parameter]:
    target = fn.forward if isinstance(fn, torch.nn.Module) else fn
    try:
        return [*inspect.signature(target).parameters.values()]
    except (TypeError, ValueError):
        return []


def require_place(path: str, tensor: torch.Tensor) -> None:
    """Raise InputTypeError if a tensor has no memory of its own at a fixed address."""
    kind = type(tensor).__name__
    if isinstance(tensor, FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise InputTypeError(
            f"{path} is a {kind} of a tracer or of a transform of torch.func (vmap, grad, ...) "
            f"and has no memory. Capture and replay outside of the tracer or transform."
        )
    if is_traceable_wrapper_subclass(tensor):
        raise InputTypeError(
            f"{path} is a {kind}, a tensor subclass that wraps others and has no memory of its "
            f"own. Pass the tensors that it wraps, and create the {kind} in the step."
        )
    if tensor.is_meta:
        raise InputTypeError(
            f"{path} is on the device 'meta' and has no memory. Create it on the device of the "
            f"backend (torch.empty_like(x, device=...), module.to_empty(device=...))."
        )
    if not has_place(tensor):
        raise InputTypeError(
            f"{path} has layout {tensor.layout}{' (nested)' * tensor.is_nested}, but a replay "
            f"needs tensors at fixed addresses. Pass the parts of the tensor, and create the "
            f"tensor in a function marked @dg.no_graph."
        )


def refuse_fakes(what: str) -> None:
    """Raise CaptureError if torch is tracing with tensors that have no memory."""
    if any(tracer(key) is not None for key in (FAKE, PROXY)):
        raise CaptureError(
            f"cannot {what} under FakeTensorMode or make_fx (torch.compile and torch.export use "
            f"them), because tensors have no memory there. Leave the mode, or exclude the caller "
            f"from tracing with torch.compiler.disable."
        )


def watched_in(named: NamedState) -> list[Watched]:
    """Return the watched parts of named state: the state itself, and its modules."""
    weights = [Weights(named.modules, modes=True, names=named.names)] if named.modules else []
    return [named, *weights] if named else [*weights]


def zero_gradient(gradient: torch.Tensor) -> None:
    """Fill a gradient with -0.0, which does not change the bits of a sum."""
    with torch.no_grad():
        gradient.fill_(-0.0)


class Gradients:
    """The gradients that a graph writes. After ``grad = None``, they restart at zero.

    ``held`` are pairs of a leaf tensor and its gradient. The captured run created the gradients of
    the leaves with ids in ``made``. A replay creates these gradients again, so they must be None
    before the replay.
    """

    def __init__(
        self, held: Sequence[tuple[torch.Tensor, torch.Tensor]], made: Collection[int] = ()
    ) -> None:
        self._held = held
        self._made = [id(leaf) for leaf, _ in held if id(leaf) in made]
        self.terms: list[Term] = [("{}.grad is {}", pair) for pair in held]
        if self._made:
            self.terms = [("False", ())]

    def __bool__(self) -> bool:
        return bool(self._held)

    def clear(self) -> None:
        """Set each gradient to None if the captured run created it."""
        for leaf, _ in self._held if self._made else ():
            leaf.grad = None if id(leaf) in self._made else leaf.grad

    def check(self) -> None:
        """Reinstall gradients that were set to None; raise StateError if a tensor replaced one."""
        for leaf, gradient in self._held:
            if leaf.grad is None:
                zero_gradient(gradient)
                leaf.grad = gradient
            elif leaf.grad is not gradient:
                raise StateError(
                    f"the gradient of {brief(leaf)} is no longer the captured tensor, but the "
                    f"graph adds to the old tensor. Write into the old tensor with copy_(), set "
                    f"the gradient to None, or {AGAIN}."
                )
            elif id(leaf) in self._made:
                raise StateError(
                    f"the captured run, which was the first run, created the gradient of "
                    f"{brief(leaf)}, so a replay replaces the gradient and does not add to it. Set "
                    f"the gradient to None before the replay, or capture with warmup=1 or more."
                )


class TensorHooks:
    """The hooks of tensors, which the backward pass of a step calls."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = [tensor for _, tensor in named if tensor.requires_grad]
        self._held, self._seen = self._hooks(), [RemovableHandle.next_id]
        tables = [getattr(t, name) for t in self._tensors for name in _OF_TENSORS]
        self.terms: list[Term] = [("{}.next_id == {}[0]", (RemovableHandle, self._seen))]
        self.terms += [("len({}) == {}", (table, len(table))) for table in tables if table]

    def _hooks(self) -> list[list[int]]:
        return [[*(getattr(t, name) or ())] for t in self._tensors for name in _OF_TENSORS]

    def check(self) -> None:
        """Raise StateError if a hook of a tensor was added or removed."""
        seen = RemovableHandle.next_id
        if self._hooks() != self._held:
            raise StateError(
                f"a tensor of the step has different hooks than at capture, but the graph contains "
                f"the work of the old hooks. Restore them, or {AGAIN}."
            )
        self._seen[0] = seen


_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Weights:
    """The parameters and buffers of modules, which assignments can replace.

    torch's registration hooks report every assignment of a tensor to a module, but not assignments
    of None or deletions. After a report or a new hook, the next replay compares all tensors. Other
    replays compare the addresses of a few tensors (on the CPU: of all), the lengths of tables of
    hooks and, in rotation, layouts and a few modules; with ``modes``, also modes (train, eval). A
    new tensor is refused if its module is a ParameterList or ParameterDict, or ``names`` has its
    name.
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        *,
        modes: bool = False,
        names: Collection[str] = (),
    ) -> None:
        _report_assignments()
        self._names = names
        every = [*{id(module): module for module in modules}.values()]
        inner = [pair for module in every for pair in module.named_modules()]
        self.modules = [module for _, module in inner]
        self._roots, self._has_modes = every if modes else [], modes
        self._tables = [t for m in self._roots for t in (m._forward_hooks, m._forward_pre_hooks)]
        self._tables += [_global_forward_hooks, _global_forward_pre_hooks]
        self._modes = self.training() if modes else []
        needs_gradient = not names or not {"backward", "grad"}.isdisjoint(names)
        every_name = (*_TABLES, *_OF_BACKWARD) if needs_gradient else _TABLES
        tables = [(path, n, getattr(module, n, {})) for path, module in inner for n in every_name]
        tables += [("", "hooks", table) for table in self._tables[-2:]]
        containers = (torch.nn.ParameterList, torch.nn.ParameterDict)
        self._open = {id(vars(m)["_parameters"]) for _, m in inner if isinstance(m, containers)}
        self._held = [
            (path, name, table, dict(table.items()))
            for path, name, table in tables
            if isinstance(table, dict) or name == "_modules"  # skip the tensors of a ScriptModule
        ]
        hooked = [table for _, n, table, held in self._held if held and n.endswith("_hooks")]
        self._hooked = hooked[:CHECKED]
        self._kinds = [*map(_kind_of, self.modules)]
        kinds = {kind for kind, _ in self._kinds if not _is_fixed(kind)}
        forwards = ((kind, getattr(kind, "forward", None)) for kind in kinds)
        self._forwards = [pair for pair in forwards if pair[1] is not None]
        tensors = (t for m in every for t in (*m.parameters(), *m.buffers()))
        self._memory = Memory(tensors, CHECKED)
        self._seen = [_assignments[0], RemovableHandle.next_id]
        self._renew()

    def _renew(self) -> None:
        self._held = [(path, name, t, dict(t.items())) for path, name, t, _ in self._held]
        every = (table for _, name, table, _ in self._held if name in _TABLES)
        self._tables_held = [(t, dict(t)) for t in every if isinstance(t, dict) and t]
        self.terms = [*self._compared()]

    def _compared(self) -> Iterator[Term]:
        """Yield terms that become false after an assignment to a module or a new hook."""
        yield from (("{}.forward is {}", pair) for pair in self._forwards[:CHECKED])
        terms = [*map(self._term_of, self.modules)]
        terms += [("{}.forward is {}", pair) for pair in self._forwards[CHECKED:]]
        # A comparison of unequal tensors with several elements raises, and so counts as false.
        if self._has_modes:
            terms[CHECKED:CHECKED] = [("{} == {}", pair) for pair in self._tables_held]
        elif self._tables_held:
            yield "{} == {}", (*map(list, zip(*self._tables_held, strict=True)),)
        yield from by_turns(terms, CHECKED, _TURN)
        yield "{}[0] == {}[0]", (_assignments, self._seen)
        yield "{}.next_id == {}[1]", (RemovableHandle, self._seen)
        yield from self._memory.terms
        yield from (("{}.training == {}", (module, module.training)) for module in self._roots)
        every = (*self._tables, *self._hooked)
        yield from (("len({}) == {}", (table, len(table))) for table in every)

    def _term_of(self, module: torch.nn.Module) -> Term:
        kind, forward = _kind_of(module)
        text, values = (
            "{}.__class__ is {} and {}.get('forward') is {}",
            (module, kind, vars(module)),
        )
        if not self._has_modes:
            return text, (*values, forward)
        return text + " and {}.training == {}", (*values, forward, module, module.training)

    def training(self) -> list[bool]:
        return [*map(_TRAINING, self.modules)]

    def check(self) -> None:
        """Raise StateError if a tensor, a submodule, a hook or a mode differs from the capture."""
        seen = [_assignments[0], RemovableHandle.next_id]
        moved = {*map(id, self._memory.moved())}
        for path, name, table, held in self._held:
            if name in ("_parameters", "_buffers"):
                is_open = id(table) in self._open
                new = dict.fromkeys(key for key in table if is_open or key in self._names)
                for key, tensor in {**new, **held}.items():
                    if table.get(key) is not tensor or id(tensor) in moved:
                        self._refuse(repr(f"{path}.{key}" if path else key))
            elif name == "_modules" and dict(table.items()) != held:
                raise StateError(f"a submodule of the step was added, replaced or removed{_OLD}")
            elif name != "_modules" and [*table.values()] != [*held.values()]:
                raise StateError(
                    "a module of the step has different hooks than at capture, but the "
                    f"graph contains the work of the old hooks. Restore them, or {AGAIN}."
                )
        forwards = [(kind, getattr(kind, "forward", None)) for kind, _ in self._forwards]
        if [*map(_kind_of, self.modules)] != self._kinds or forwards != self._forwards:
            raise StateError(
                "a module of the step has a different class or forward than at capture, but the "
                f"graph runs the old forward. Restore it, or {AGAIN}."
            )
        if self._has_modes and self.training() != self._modes:
            raise StateError(
                "a module of the step was captured in training mode and is in evaluation mode "
                "now, or vice versa, but the graph uses the captured mode. Call train() or "
                f"eval() on the module, or {AGAIN}."
            )
        if not self._memory.is_kept():
            self._refuse("a parameter or buffer")
        # Renew the terms only after an assignment to one of these modules.
        try:
            same = all(len(table) == len(held) for _, _, table, held in self._held)
            same = same and all(itertools.starmap(operator.eq, self._tables_held))
        except RuntimeError:  # the tensors have several elements
            same = False
        if not same:
            self._renew()
        self._seen[:] = seen

    def _refuse(self, what: str) -> NoReturn:
        raise StateError(
            f"{what} of a module is no longer the captured tensor, or has other memory or another "
            f"layout{_OLD}"
        )


def _is_fixed(kind: type) -> bool:
    """Whether a torch module defines the class; torch creates other classes at run time."""
    module = sys.modules.get(kind.__module__)
    return is_machinery_module(kind.__module__) and getattr(module, kind.__name__, None) is kind


def _kind_of(module: torch.nn.Module) -> tuple[type, Any]:
    """Return the class of a module, and the forward that was assigned to it, if any."""
    return type(module), vars(module).get("forward")


_OF_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
_TABLES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
_TURN = 4
"""Number of modules or tables that a replay compares in rotation."""

_OLD = (
    ", but the graph uses the old state. Write new data into the old tensors with copy_() (as "
    f"load_state_dict() without assign=True does), or {AGAIN}."
)

_assignments = [0]
"""Number of assignments to modules that torch reported."""


def assignment_count() -> int:
    """Return a number that changes whenever a parameter, buffer or submodule is assigned."""
    _report_assignments()
    return _assignments[0]


@functools.cache
def _report_assignments() -> None:
    def count(*_: Any) -> None:
        _assignments[0] += 1

    register_module_parameter_registration_hook(count)
    register_module_buffer_registration_hook(count)
    register_module_module_registration_hook(count)


def host_random() -> dict[str, tuple[Any, ...]]:
    """Return the states of the global generators of Python and NumPy, by their names in warnings.

    The last item of each state is the generator's position.
    """
    _, numbers, _ = random.getstate()
    states: dict[str, tuple[Any, ...]] = {"the position of Python's random": numbers}
    if "numpy" in sys.modules:
        _, keys, position, *rest = sys.modules["numpy"].random.get_state()
        states["the position of numpy.random"] = (keys.tobytes(), *rest, position)
    return states


def _is_written(named: Iterable[tuple[str, torch.Tensor]]) -> bool:
    return any(not tensor.is_inference() and tensor._version for _, tensor in named)


def is_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether contents are equal except for rounding. True for ``uint8``, without a comparison."""
    if one.dtype is torch.uint8 or same_bytes(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    one, other = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (one, other))
    size = float(other.abs().nan_to_num(0.0, 0.0, 0.0).max())
    return torch.allclose(one, other, rtol=0.01, atol=0.01 * size, equal_nan=True)


def _is_weight(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter)


def roots_of(fn: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Return the named roots of the search for the state of ``fn``; none for code of devgraph."""
    target = fn
    while isinstance(target, functools.partial):
        target = target.func
    space = getattr(getattr(target, "__func__", target), "__globals__", {})
    is_mark = hasattr(target, "__devgraph_mark__")
    if str(space.get("__name__", "")).startswith("devgraph.") and not is_mark:
        return []
    return [("self" if isinstance(fn, torch.nn.Module) else "step", fn)]


def raise_rebinding(changes: Iterable[Change]) -> None:
    for change in changes:
        raise CaptureError(rebinding(change.verb, change.path))


def without_history(outputs: Any) -> Any:
    """Return outputs detached from autograd, except leaf tensors: a replay has no backward."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: t.detach() if t.grad_fn is not None else t, outputs, is_leaf=is_size
    )
