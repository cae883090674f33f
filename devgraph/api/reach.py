"""State that a step can reach through its arguments, attributes, closures and globals.

A *place* is an attribute, an entry of a container, a closure cell or a global. An ``Entry`` is a
place with its value, ``walk`` finds everything reachable, and ``Named`` finds the places that the
code of a step uses by name.
"""

from __future__ import annotations

import array
import builtins
import contextvars
import ctypes
import dis
import functools
import gc
import inspect
import itertools
import operator
import os
import queue
import random
import re
import sys
import threading
import types
import warnings
import weakref
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeGuard

import torch
from torch._library.custom_ops import CustomOpDef
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from devgraph.api.errors import brief, counted
from devgraph.api.marks.source import is_machinery_module
from devgraph.api.tensors import has_place
from devgraph.api.trees import attributes_of, children_of, fields_of, slots_of, weakly_cached

_MOST = 4000
"""Maximum number of objects that ``walk`` visits, not counting torch modules."""

_MOST_NAMED = 300
"""Maximum number of objects that ``Named`` visits."""

_MOST_SPACES = 32
"""Number of compared mappings above which the attribute dictionaries of objects in module
containers are no longer compared."""

_MODULES = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_DEEPEST = 8
PLAIN = (bool, int, float, complex, str, type(None))
_INTERNAL = frozenset(vars(torch.nn.Module())) - {"training"}
"""Attributes of every torch module."""

_CELL, _POSITION = "cell_contents", "position"

POSITION = "position #"
"""Prefix of the text that stands for the position of an iterator or a random generator."""


class _Absent:
    """The value of an empty place."""

    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()


class Entry(NamedTuple):
    """A place and its value at the time of the search."""

    path: str
    holder: Any
    """A dictionary, a list, a closure cell or an object; None if the place is not assignable."""
    key: Any
    value: Any
    content: Any = None
    """The result of ``content_of`` for the value; None if it was not noted."""

    @property
    def place(self) -> tuple[int, Any]:
        """The ``id`` of the holder and the key, or the ``id`` of a value without a holder."""
        return id(self.value if self.holder is None else self.holder), self.key

    def now(self) -> Any:
        """Return the current value of the place."""
        return self.value if self.holder is None else _read(self.holder, self.key)

    def noted(self) -> Entry:
        """Return the entry with the current contents of its value."""
        return self._replace(content=content_of(self.value))

    @property
    def is_modified(self) -> bool:
        """Whether the contents of the value changed since they were noted."""
        return self.content is not None and content_of(self.value) != self.content

    @property
    def modification(self) -> str:
        """A description of the changed contents, for errors."""
        if isinstance(self.value, CONTAINERS):
            return f"has {counted(len(self.value), 'entry')} and had {self.content} at capture"
        return f"has different contents than at capture ({brief(self.value)})"

    def put_back(self) -> None:
        """Restore the value of the place."""
        _write(self.holder, self.key, self.value)


def content_of(value: Any) -> Any:
    """Return the length of a list, mapping or large set, or the contents of a small set or array.

    Return None for all other values.
    """
    if isinstance(value, CONTAINERS):
        try:
            return len(value)
        except Exception:  # a user's mapping may raise any error
            return None
    if isinstance(value, set):
        return frozenset(value) if len(value) <= SMALL else len(value)
    if isinstance(value, _BUFFERS) or is_array(value):
        view = memoryview(value)
        return view.tobytes() if view.nbytes <= 64 * SMALL else None
    return None


CONTAINERS = (Mapping, list, deque)
SMALL = 1024
"""Maximum number of elements of a set, or of keys of a mapping, that are compared one by one. The
contents of an array are compared up to 64 times this number of bytes."""

_BUFFERS = (bytearray, array.array, memoryview, ctypes._SimpleCData, ctypes.Array, ctypes.Structure)


def containers(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    """Yield the containers in a tree, as pairs with their paths."""
    children = children_of(node)
    if children is not None:
        yield path, node
        for suffix, child in children:
            yield from containers(path + suffix, child)


def entries(roots: Iterable[tuple[str, Any]], *, weights: bool = True) -> Iterator[Entry]:
    """Yield every place below ``roots`` with a tensor, a generator, a tuple or a plain value.

    The gradient of a leaf tensor is a place as well.
    """
    for path, value in walk(roots, weights):
        for entry in _members(path, value, weights):
            if isinstance(entry.value, (torch.Tensor, torch.Generator, tuple, *PLAIN)):
                yield entry
                gradient = entry.value.grad if _has_gradient(entry.value) else None
                if gradient is not None:
                    yield Entry(f"{entry.path}.grad", entry.value, "grad", gradient)


def reached(
    roots: Iterable[tuple[str, Any]], *, weights: bool = True
) -> tuple[list[tuple[str, torch.Tensor]], list[torch.Generator]]:
    """Return the tensors with memory below ``roots``, each with its path, and the generators."""
    roots = [*roots]
    places = [(entry.path, entry.value) for entry in entries(roots, weights=weights)]
    tensors = [(p, v) for p, v in places if isinstance(v, torch.Tensor) and has_place(v)]
    generators = {id(v): v for _, v in (*roots, *places) if isinstance(v, torch.Generator)}
    return tensors, [*generators.values()]


def optimizer_state(roots: Iterable[tuple[str, Any]]) -> list[tuple[str, torch.Tensor]]:
    """Return the state tensors of optimizers below ``roots``, each with its name."""
    return [
        (f"{path}.state[...][{key!r}]", value)
        for path, optimizer in walk(roots, True)
        if isinstance(optimizer, torch.optim.Optimizer)
        for held in optimizer.state.values()
        for key, value in held.items()
        if isinstance(value, torch.Tensor) and has_place(value)
    ]


def walk(
    roots: Iterable[tuple[str, Any]], weights: bool, *, classes: bool = True
) -> Iterator[tuple[str, Any]]:
    """Yield ``roots`` and every object below them that can contain other objects, once each.

    Without ``classes``, attributes and methods of classes are not searched.
    """
    todo = deque((name, value, 0) for name, value in roots)
    seen: set[int] = set()
    left = _MOST
    while todo and left:
        path, value, depth = todo.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        is_module = isinstance(value, torch.nn.Module)
        left -= not is_module
        yield path, value
        todo.extend((path, hook, depth + 1) for hook in _hooks_of(value) if depth < _DEEPEST)
        if depth < _DEEPEST or is_module:
            todo.extend(
                (entry.path, entry.value, depth + (not is_module))
                for entry in _members(path, value, weights)
                if not isinstance(entry.value, (torch.Generator, *PLAIN))
                and (classes or not isinstance(entry.value, type))
                and (
                    not isinstance(entry.value, torch.Tensor)
                    or _is_wrapper(entry.value)
                    or any(_hooks_of(entry.value))
                )
            )


def _hooks_of(value: Any) -> Iterator[Any]:
    """Yield the user's hooks of a module or of a tensor."""
    if isinstance(value, torch.nn.Module | torch.Tensor):
        tables = [getattr(value, name, None) for name in _HOOKS]
        if isinstance(value, torch.nn.Module):
            tables += _OF_ALL_MODULES
        for hook in itertools.chain(*(table.values() for table in tables if table)):
            function = hook.func if isinstance(hook, functools.partial) else hook
            if not is_machinery_module(getattr(function, "__module__", None) or ""):
                yield hook


_HOOKS = """_forward_pre_hooks _forward_hooks _backward_pre_hooks _backward_hooks
    _post_accumulate_grad_hooks""".split()
_OF_ALL_MODULES = (_global_forward_pre_hooks, _global_forward_hooks)


def _members(path: str, value: Any, weights: bool) -> Iterator[Entry]:
    """Yield an entry for each value inside ``value``, in assignable and other places."""
    for part in _parts(path, value, weights):
        yield from (part,) if isinstance(part, Entry) else part.entries()


class _Place(NamedTuple):
    """All or some places of one object.

    ``form`` is the format of a place's path: ``{path}`` is the path of the object. ``holder`` is
    the object or its ``__dict__``. ``keys`` are keys or attribute names; None selects all keys.
    Keys in ``without`` are left out.
    """

    path: str
    form: str
    holder: Any
    keys: Sequence[Any] | None = None
    without: Collection[Any] = ()

    def values(self) -> dict[Any, Any]:
        """Return the current values by key."""
        holder = self.holder
        if self.keys is not None:
            return {key: _read(holder, key) for key in self.keys}
        if isinstance(holder, types.GeneratorType):
            if (frame := holder.gi_frame) is None:
                return {}
            held = frame.f_locals
            plain = [value for value in held.values() if isinstance(value, PLAIN)]
            return {**held, _POSITION: f"{POSITION}{hash(repr(plain))}:{frame.f_lasti}"}
        if isinstance(holder, dict):
            return dict(holder.items())  # ``{**holder}`` would call the user's ``__getitem__``.
        if isinstance(holder, list | deque):
            return dict(enumerate(holder))
        values = gc.get_referents(holder)  # the object does not expose its values
        # Changing the list inside a ``cycle`` is not safe, so return the list's values instead.
        if isinstance(holder, itertools.cycle):
            values = [v for held in values for v in (held if isinstance(held, list) else [held])]
        return {id(value): value for value in values}

    def entries(self) -> Iterator[Entry]:
        for key, value in self.values().items():
            if value is not ABSENT and key not in self.without:
                yield Entry(self._at(key), self.holder, key, value)

    def _at(self, key: Any) -> str:
        is_plain = all(isinstance(k, PLAIN) for k in (key if type(key) is tuple else [key]))
        shown = key if is_plain else brief(key)
        return self.form.format(path=self.path, key=shown)

    def changes(self, before: Mapping[Any, Any]) -> Iterator[tuple[str, Any, Any]]:
        """Yield the path, the old and the new value of each key that changed."""
        after = self.values()
        if len(after) == len(before) and all(map(operator.is_, after.values(), before.values())):
            return
        for key in {**before, **after}:
            old, new = before.get(key, ABSENT), after.get(key, ABSENT)
            if old is not new and key not in self.without:
                yield self._at(key), old, new

    def put_back(self, before: Mapping[Any, Any]) -> None:
        """Restore the values, unless the holder does not allow assignments."""
        holder = self.holder
        if isinstance(holder, list | deque | set):
            holder.clear()
            put = holder.update if isinstance(holder, set) else holder.extend
            put(before.values())
            return
        is_closed = isinstance(holder, _CLOSED) or is_iterator(holder)
        if is_closed or self.keys == (_POSITION,):
            return
        if self.keys is None:
            for key in [key for key in holder if key not in before]:
                del holder[key]
        for key, value in before.items():
            if _read(holder, key) is not value:
                _write(holder, key, value)


_ATTRIBUTE, _ITEM, _NAME, _WHOLE = "{path}.{key}", "{path}[{key!r}]", "{key}", "{path}"
_CLOSED: tuple[type, ...] = (types.GeneratorType, functools._lru_cache_wrapper, queue.SimpleQueue)
"""Types of objects that hold values which cannot be assigned from outside."""


def _parts(path: str, value: Any, weights: bool) -> Iterator[_Place | Entry]:
    """Yield the places of an object, and entries of values that are not in assignable places."""
    if isinstance(value, torch.optim.Optimizer):
        for index, group in enumerate(value.param_groups):
            keys = [*group.keys() - {"params"}]
            yield _Place(f"{path}.param_groups[{index}]", _ITEM, group, keys)
    if isinstance(value, torch.jit.ScriptModule):
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            yield _fixed(f"{path}.{name}", tensor)
    elif isinstance(value, torch.Tensor):
        if _is_wrapper(value):
            names, _ = value.__tensor_flatten__()  # type: ignore[attr-defined]
            yield _Place(path, _ATTRIBUTE, value, names)
    elif isinstance(value, torch.nn.Module):
        inner = vars(value)
        for table in ("_modules", "_parameters", "_buffers")[: 3 if weights else 1]:
            yield _Place(path, _ATTRIBUTE, inner.get(table, {}))
        yield _Place(path, _ATTRIBUTE, inner, without=_INTERNAL | set_by_hooks(value))
        yield _fixed(path, type(value))
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            yield _Place(path, name.replace("{", "{{"), cell, (_CELL,))
        space, uses = value.__globals__, _uses_of(value.__code__)
        if not is_machinery_module(space.get("__name__", "")):
            yield _Place(path, _NAME, space, sorted(uses.globals - _BUILTINS))
            yield _Place(path, _NAME, value.__kwdefaults__ or {})
            own = [name for name in vars(value) if not name.startswith("__")]
            yield _Place(path, _ATTRIBUTE, vars(value), own)
            modules = [(name, space[name]) for name in uses.globals & space.keys()]
            modules += [(entry.key, entry.value) for entry in _imported(value)]
            for name, module in modules:
                if isinstance(module, types.ModuleType) and _is_user_module(module):
                    used = sorted(uses.names & vars(module).keys())
                    yield _Place(name, _ATTRIBUTE, vars(module), used)
        defaults, code = value.__defaults__ or (), value.__code__
        names = code.co_varnames[code.co_argcount - len(defaults) :]
        yield from (_fixed(name, child) for name, child in zip(names, defaults, strict=False))
        if (wrapped := vars(value).get("__wrapped__")) is not None:
            yield _fixed(path, wrapped)
    elif isinstance(value, types.MethodType):
        yield _fixed("self", value.__self__)
        yield _fixed(path, value.__func__)
    elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
        if not isinstance(value.__self__, types.ModuleType | type):  # the method of an object
            yield _fixed(path, value.__self__)
    elif isinstance(value, functools.partial):
        yield from (_fixed(path, child) for child in (value.func, *value.args, value.keywords))
    elif isinstance(value, tuple):
        yield from (_fixed(f"{path}[{index}]", child) for index, child in enumerate(value))
    elif isinstance(value, dict | list | deque):
        yield _Place(path, _ITEM, value)
        if attributes := attributes_of(value):  # of a subclass
            yield _Place(path, _ATTRIBUTE, attributes)
    elif isinstance(value, types.MappingProxyType):
        yield from (_fixed(path, held) for held in gc.get_referents(value))
    elif isinstance(value, types.GeneratorType):
        yield _Place(path, _ATTRIBUTE, value)
    elif isinstance(value, (set, *_CLOSED)):
        yield _Place(path, _WHOLE, value)
    elif is_iterator(value):
        yield _Place(path, _WHOLE, value)
        yield _Place(path, _WHOLE, value, (_POSITION,))
    elif isinstance(value, contextvars.ContextVar):
        yield _Place(value.name, _WHOLE, value, (_CELL,))
    elif isinstance(value, random.Random) or _is_generator_of_numpy(value):
        yield _Place(path, _WHOLE, value, (_POSITION,))
    elif isinstance(value, threading.local):
        yield _Place(path, _ATTRIBUTE, vars(value))
        yield _fixed(path, type(value))
    elif (names := _STATE_OF.get(type(value).__module__)) is not None:
        space = attributes_of(value) or {}
        yield _Place(path, _ATTRIBUTE, space, [name for name in names if name in space])
    elif isinstance(value, weakref.ref):
        yield _fixed(path, value())
    elif isinstance(value, CustomOpDef):
        yield _fixed(path, value._init_fn)
    elif isinstance(value, type):
        if not is_machinery_module(value.__module__):
            held = vars(value).items()
            state = [name for name, v in held if name[:2] != "__" and isinstance(v, _STATE)]
            yield _Place(value.__name__, _ATTRIBUTE, value, state)
            functions = (types.FunctionType, classmethod, staticmethod)
            for _, child in held:
                if isinstance(child, functions):
                    yield _fixed(path, getattr(child, "__func__", child))
    elif not isinstance(value, (types.ModuleType, *PLAIN)) and has_state(value):
        if (attributes := attributes_of(value)) is not None:
            yield _Place(path, _ATTRIBUTE, attributes)
        yield _Place(path, _ATTRIBUTE, value, slots_of(type(value)))
        yield _fixed(path, type(value))


def _fixed(path: str, value: Any) -> Entry:
    return Entry(path, None, None, value)


_STATE = (torch.Tensor, torch.Generator, list, dict, tuple, deque, *PLAIN)
_BUILTINS = frozenset(vars(builtins))
_STATE_OF = {
    "configparser": ("_sections", "_defaults"),
    "logging": ("level", "disabled", "parent"),
    "multiprocessing.sharedctypes": ("_obj",),
    "threading": ("_flag", "_value"),
    "torch.utils.data.dataloader": ("_num_yielded",),
}
"""Attributes that hold the state of a library object, by the module of its class."""

_STATEFUL = frozenset({"argparse", "collections", "queue", "types", "weakref", "_weakrefset"})
"""Standard library modules. The attributes of instances of their classes are searched."""


def has_state(value: Any) -> bool:
    """Whether attributes of ``value`` are searched: its class is user-defined or a known container.

    The user's subclasses of devgraph classes (backends, runners, ...) do not count, because a
    capture changes their attributes.
    """
    if fields_of(value) or type(value) in pytree.SUPPORTED_NODES:
        return True
    if any(kind.__module__.startswith("devgraph.") for kind in type(value).__mro__):
        return False
    module = type(value).__module__
    if module in _STATEFUL or module in _STATE_OF or isinstance(value, torch.amp.GradScaler):
        return True
    return not is_machinery_module(module)


def _has_gradient(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _is_generator_of_numpy(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "bit_generator") and kind.__module__.startswith("numpy.")


def is_array(value: Any) -> bool:
    """Whether ``value`` is a NumPy array, whose values are constants of a graph."""
    return "numpy" in sys.modules and isinstance(value, sys.modules["numpy"].ndarray)


def _position(holder: Any) -> Any:
    """Return a plain value that changes when an iterator or a random generator advances."""
    if isinstance(holder, random.Random):
        return f"{POSITION}{hash(holder.getstate())}"
    if isinstance(holder, itertools.count):
        return repr(holder)
    if is_iterator(holder):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return f"{POSITION}{hash(_reduced(holder))}"
    return f"{POSITION}{hash(repr(holder.bit_generator.state))}"


def is_iterator(value: Any) -> bool:
    """Whether ``value`` is a built-in iterator, an iterator of itertools, or a generator."""
    kind = type(value)
    return kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")


def _reduced(value: Any) -> Any:
    """Return the position of an iterator as plain values and ids of objects."""
    if isinstance(value, list | tuple):
        return tuple(map(_reduced, value)) if isinstance(value, tuple) else len(value)
    if is_iterator(value) and not isinstance(value, types.GeneratorType):
        return _reduced(value.__reduce__()) if hasattr(type(value), "__reduce__") else repr(value)
    return value if isinstance(value, (range, *PLAIN)) else id(value)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, str | int) and one == other)


def _is_wrapper(tensor: torch.Tensor) -> bool:
    return type(tensor) not in _TENSORS and is_traceable_wrapper_subclass(tensor)


_TENSORS = (torch.Tensor, torch.nn.Parameter)


def _has_user_state(tensor: torch.Tensor) -> bool:
    return bool(vars(tensor)) or type(tensor) not in _TENSORS or any(_hooks_of(tensor))


def _is_user_module(module: types.ModuleType) -> bool:
    return not is_machinery_module(module.__name__)


def _read(holder: Any, key: Any) -> Any:
    try:
        if isinstance(holder, dict):  # without the user's ``__getitem__`` and ``__missing__``
            return dict.get(holder, key, ABSENT)
        if isinstance(holder, Mapping | list | deque):
            return holder[key]
        if isinstance(holder, types.GeneratorType):
            return _Place("", "", holder).values()[key]
        if isinstance(holder, contextvars.ContextVar):
            return holder.get()  # raises LookupError if there is neither a value nor a default
        if isinstance(holder, type):  # Return a descriptor itself, not its result.
            return inspect.getattr_static(holder, key)
        return _position(holder) if key == _POSITION else getattr(holder, key)
    except Exception:  # A ``__getattr__`` may raise any error.
        return ABSENT


def _write(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, dict):
        if value is ABSENT:
            holder.pop(key, None)
        else:
            holder[key] = value
    elif isinstance(holder, contextvars.ContextVar):
        holder.set(value) if value is not ABSENT else None
    elif isinstance(holder, types.CellType | type):
        setattr(holder, key, value) if value is not ABSENT else delattr(holder, key)
    elif isinstance(holder, torch.Tensor):
        setattr(holder, key, value)
    elif value is ABSENT:
        object.__delattr__(holder, key)
    else:
        object.__setattr__(holder, key, value)  # works for frozen classes too


class _Uses(NamedTuple):
    """The names in a code object and in the code nested in it, by kind of use."""

    names: set[str]
    """Names of globals and attributes, and "grad =" for an assignment to a gradient."""
    globals: set[str]
    """Names of globals, not of attributes."""
    read: set[str]
    """Names with a use other than a call or an assignment."""
    iterated: set[str]
    """Names of values that the code iterates over (a loop, ``len``, ``values``)."""
    indexed: set[Any]
    """Names of values that the code indexes with a key that is not a constant."""
    probed: set[Any]
    """Names of mappings in which the code looks up a computed key (``in``, ``get``), unless it also
    stores entries in them."""
    imported: set[str]
    """Names of modules that the code imports."""
    strings: set[str]


@weakly_cached
def _uses_of(code: types.CodeType) -> _Uses:
    steps = [*dis.get_instructions(code)]
    matched = {  # by ``case Kind(name=value)``
        name
        for step, after in itertools.pairwise(steps)
        if after.opname == "MATCH_CLASS"
        for name in step.argval
    }
    uses = _Uses(
        names={
            *code.co_names,
            *matched,
            *("grad =" for step in steps if (step.opname, step.argval) == ("STORE_ATTR", "grad")),
        },
        globals={step.argval for step in steps if step.opname in _OF_GLOBALS},
        read={
            step.argval
            for step in steps
            if step.argval in code.co_names
            and not step.opname.startswith(("STORE", "LOAD_METHOD"))
            and not (sys.version_info >= (3, 12) and step.opname == "LOAD_ATTR" and step.arg & 1)
        }
        | matched,
        iterated={*_iterated_in(steps)},
        indexed={*_indexed_in(steps)},
        probed={*_probed_in(steps)},
        imported={step.argval for step in steps if step.opname == "IMPORT_NAME"},
        strings={
            text
            for const in code.co_consts
            if isinstance(const, str)
            for text in (const, *re.findall(r"\{\w*\.(\w+)", const))  # "{0.name}".format(x)
        },
    )
    aliases = {
        after.argval: step.argval
        for step, after in itertools.pairwise(steps)
        if after.opname == "STORE_FAST" and step.opname in {*_OF_STATE, "LOAD_FAST"}
    }
    for found in (uses.iterated, uses.indexed, uses.probed):
        found.update([aliases[name] for name in found if name in aliases])
    for nested in filter(inspect.iscode, code.co_consts):
        for own, inner in zip(uses, _uses_of(nested), strict=True):
            own.update(inner)
    return uses


_OF_STATE = {"LOAD_ATTR", "LOAD_DEREF", "LOAD_GLOBAL"}
_OF_GLOBALS = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME"}


def _iterated_in(steps: Sequence[dis.Instruction]) -> Iterator[str]:
    for at, (step, after) in enumerate(itertools.pairwise(steps)):
        is_method = after.argval in ("values", "items", "keys")
        is_counted = after.opname.startswith(("CALL", "PRECALL")) and any(
            before.argval in _ITERATING for before in steps[max(at - 4, 0) : at]
        )
        is_iterated = after.opname in ("GET_ITER", "LIST_EXTEND") or is_method or is_counted
        if isinstance(step.argval, str) and is_iterated:
            yield step.argval


_ITERATING = frozenset("len list tuple set dict sorted iter enumerate sum min max reversed".split())


def _indexed_in(steps: Sequence[dis.Instruction]) -> Iterator[Any]:
    for end, step in enumerate(steps):
        at, missing = end - 1, 1
        if step.opname != "BINARY_SUBSCR" and step.argrepr != "[]":
            continue
        while at > 0 and missing > 0:  # Find the instruction before the key.
            missing -= dis.stack_effect(steps[at].opcode, steps[at].arg)
            at -= 1
        if steps[end - 1].opname != "LOAD_CONST" or at < end - 2:
            held = steps[at + (missing < 0)].argval  # a pair if one instruction loads two names
            yield held[0] if isinstance(held, tuple) and held else held


def _probed_in(steps: Sequence[dis.Instruction]) -> Iterator[Any]:
    stored = {
        before.argval
        for at, step in enumerate(steps)
        if step.opname == "STORE_SUBSCR"
        for before in steps[max(at - 6, 0) : at]
    }
    for at, step in enumerate(steps):
        first, held = at - 1, steps[at - 1].argval
        if step.opname == "CONTAINS_OP":
            while steps[first].opname == "LOAD_ATTR":
                first -= 1
            key = steps[first - 1]
        elif step.opname in ("DICT_MERGE", "DICT_UPDATE"):  # f(**mapping), {**mapping}
            yield held[-1] if isinstance(held, tuple) and held else held
            continue
        elif step.argval == "get":
            key = steps[at + 2 if steps[at + 2].opname == "LOAD_ATTR" else at + 1]
        else:
            continue
        # Literal keys are in ``_Uses.strings``, and keys that the code reads in ``Named.texts``.
        is_read = key.opname in _OF_STATE and "NULL" not in key.argrepr  # not a call
        is_read |= key.opname == "LOAD_CONST" and isinstance(key.argval, str)
        is_pair = isinstance(held, tuple)  # one instruction loads the key as well
        if (is_pair or not is_read) and held not in stored:
            yield held[-1] if is_pair else held


class Named:
    """The places that a step uses by name, in its own code or in functions that it calls.

    These are closure cells, globals, attributes that the code names, container entries whose key
    is named in the code or is not a string, and parameter groups of optimizers. Functions of torch
    and devgraph are not searched, so the state of eager bodies of marks is not compared.

    The search starts from ``roots``, pairs of a name and an object. With ``regions``, it includes
    regions, except those with host arguments or a context, whose host code an update runs again.

    - ``places``: the places, except modules of Python libraries.
    - ``spaces``: mappings, and the ``__dict__`` of torch modules and user objects, with lengths.
    - ``inner``: (``id`` of the holder, key) of places inside module containers; the key of a
      mapping in ``spaces`` is None.
    - ``whole`` and ``tables``: mappings, and tensor tables of modules, that the step iterates over.
    - ``texts``: strings that the step reads and may use as keys (``ACTIVATIONS[config.act]``).
    - ``probed``: the ``id`` of each mapping in which the step may look up missing keys.
    - ``libraries``: modules of libraries that the step names.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]], *, regions: bool = False) -> None:
        self._regions, roots = regions, [*roots]
        self._receivers = {id(v.__self__) for _, v in roots if isinstance(v, types.MethodType)}
        """The ``id`` of each object whose method is a root. Its ``__call__`` is not searched unless
        the code names it."""
        methods = (v for _, v in roots if isinstance(v, types.MethodType))
        self._inside = {id(v.__self__) for v in methods if v.__name__ == "forward"}
        """The ``id`` of each module whose ``forward`` is a root. Its hooks run outside the step."""
        self._search(roots, _INSTANCE)
        if not self._is_complete:
            self._search(roots, frozenset())

    def is_current(self) -> bool:
        """Whether every place, and the size of every mapping, is unchanged since the search."""
        return all(e.now() is e.value and not e.is_modified for e in self.places) and all(
            not space.is_modified for space in self.spaces
        )

    def _search(self, roots: Iterable[tuple[str, Any]], called: frozenset[str]) -> None:
        """Search, assuming that the step calls the methods ``called`` of each class it names."""
        self._called = called
        self.names: set[str] = {_CELL, "forward", "parametrizations", "_value_"}
        self._read: set[str] = {_CELL}
        self.iterated: set[str] = set()
        self._indexed: set[str] = set()
        self._probed: set[Any] = set()
        self.texts: set[str] = set()
        self._strings: set[str] = set()
        self._beginnings: tuple[str, ...] = ()
        count = -1
        while count < len(self.names) + len(self.texts):  # a name can lead to more names
            count = len(self.names) + len(self.texts)
            self.places: list[Entry] = []
            self.spaces: list[Entry] = []
            self.tables: list[Entry] = []
            self.inner = set[tuple[int, Any]]()
            self.whole: list[dict[Any, Any]] = []
            self.probed = set[int]()
            self.modules: list[torch.nn.Module] = []
            self.libraries: dict[str, types.ModuleType] = {}
            self._computed: list[Entry] = []  # places with computed names, searched last
            self._walk(deque(roots))

    def functions(self) -> list[Entry]:
        """Return the functions of library modules that the step names, which users may patch."""
        found, todo, seen = list[Entry](), [*self.libraries.values()], set[str]()
        while todo:
            module = todo.pop()
            held = vars(module)
            seen.add(module.__name__)
            for name in sorted(held.keys() & self.names):
                value = held[name]
                if isinstance(value, types.FunctionType | types.BuiltinFunctionType):
                    found.append(Entry(f"{module.__name__}.{name}", held, name, value))
                elif isinstance(value, types.ModuleType) and value.__name__ not in seen:
                    todo.append(value)
        return found

    def _walk(self, todo: deque[tuple[str, Any]]) -> None:
        seen: set[int] = set()
        places = set[tuple[int, Any]]()
        children = deque[tuple[str, Any]]()
        is_first = True
        while (todo or children or self._computed) and len(seen) < _MOST_NAMED:
            is_first = is_first and bool(todo)
            if not (todo or children):
                value, entries = None, iter(self._computed)
                self._computed = []
            else:
                path, value = (todo or children).popleft()
                if id(value) in seen:
                    continue
                entries = self._below(path, value)
            seen.add(id(value))
            is_open = isinstance(value, torch.nn.Module | threading.local) or has_state(value)
            if isinstance(value, types.FunctionType):  # It may keep state in its own attributes.
                code = value.__code__
                is_open = value.__name__ in {*code.co_freevars, *_uses_of(code).globals}
            for space in (value, attributes_of(value) if is_open else None):
                is_compared = is_first or space is value or len(self.spaces) < _MOST_SPACES
                if isinstance(space, dict) and is_compared:
                    self.spaces.append(_fixed("", space).noted())
                    if not is_first:
                        self.inner.add((id(space), None))
            for entry in entries:
                is_leaf = isinstance(entry.value, (torch.Tensor, *PLAIN)) or entry.key in OF_CODE
                if isinstance(entry.value, types.ModuleType) and not _is_user_module(entry.value):
                    self.libraries[entry.value.__name__] = entry.value
                    continue
                noted = entry if isinstance(entry.value, dict) else entry.noted()
                if (
                    (entry.holder is not None or noted.content is not None)
                    and entry.place not in places
                    and _is_same(entry.now(), entry.value)
                ):
                    places.add(entry.place)
                    self.places.append(noted)
                    if not is_first:
                        self.inner.add(entry.place)
                if is_leaf:
                    if isinstance(entry.value, str) and not str(entry.key).startswith("__"):
                        self.texts.add(entry.value)
                    elif isinstance(entry.value, torch.Tensor) and _has_user_state(entry.value):
                        todo.append((entry.path, entry.value))
                    continue
                is_child = isinstance(entry.value, torch.nn.Module) and isinstance(value, _MODULES)
                is_own = is_first or value is None
                if is_own and not is_child and isinstance(entry.value, torch.nn.Module):
                    self.modules.append(entry.value)
                (children if is_child else todo).append((entry.path, entry.value))
        self._is_complete = len(seen) < _MOST_NAMED

    def _below(self, path: str, value: Any) -> Iterator[Entry]:
        if isinstance(value, torch.optim.Optimizer):
            for name in _OF_OPTIMIZERS:
                yield Entry(f"{path}.{name}", vars(value), name, getattr(value, name))
            self.whole += (getattr(value, name) for name in _OF_OPTIMIZERS if "hooks" in name)
            self._read = self._read.union({"param_groups"}, *value.param_groups)
            self.names |= self._read
            return
        if isinstance(value, types.FunctionType):
            if is_machinery_module(value.__globals__.get("__name__", "")):
                mark: Any = getattr(value, "__devgraph_mark__", None)
                is_region = self._regions and mark is not None and mark.kind == "region"
                if is_region and not mark.dynamic:
                    yield _fixed(path, mark.fn)
                elif mark is None and hasattr(value, "__wrapped__"):  # @torch.no_grad(), ...
                    yield _fixed(path, value.__wrapped__)
                if isinstance(functions := vars(value).get("registry"), Mapping):  # singledispatch
                    self.probed.update(map(id, gc.get_referents(functions)))
                    yield _fixed(path, functions)
                return
            self._use(value)
            for name in ("__code__", "__defaults__", "__kwdefaults__"):
                if getattr(value, name):
                    yield Entry(f"{path}.{name}", value, name, getattr(value, name))
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                if _read(cell, _CELL) is ABSENT:
                    yield Entry(name, cell, _CELL, ABSENT)
            yield from self._environment(value.__code__)
            yield from _imported(value)
            space, uses = value.__globals__, _uses_of(value.__code__)
            for name in sorted(uses.globals - space.keys() - _BUILTINS):
                yield Entry(name, space, name, ABSENT)
            if not uses.names.isdisjoint(_INDIRECT):  # globals()["name"]
                known = uses.names | uses.strings
                computed = uses.strings if "globals" in uses.names else ()
                beginnings = tuple(filter(str.isidentifier, computed))
                for name in sorted(n for n in space if n in known or n.startswith(beginnings)):
                    yield Entry(name, space, name, space[name])
        elif isinstance(value, torch.nn.Module):
            forward: Any = getattr(type(value), "forward", None)
            self._use(forward)
            if is_machinery_module(type(value).__module__) and hasattr(forward, "__code__"):
                for name in _uses_of(forward.__code__).names:  # such as _conv_forward
                    self._use(getattr(type(value), name, None))
            if not self.names.isdisjoint(_OF_TENSORS):
                tables = (t for m in value.modules() for t in (m._parameters, m._buffers))
                dicts = (table for table in tables if isinstance(table, dict))
                self.tables += [_fixed("", table).noted() for table in dicts]
            called = (m for m in value.modules() if id(m) not in self._inside)
            own = (getattr(m, name, None) or {} for m in called for name in _HOOKS)
            for table in itertools.chain(_OF_ALL_MODULES, own):
                yield from (_fixed(path, hook) for hook in table.values())
        elif isinstance(value, operator.attrgetter | operator.methodcaller):
            self._read.update(*(str(name).split(".") for name in value.__reduce__()[1]))
            self.names |= self._read
            return
        elif isinstance(value, types.ModuleType):
            held = vars(value)
            names = sorted(held.keys() & (self.names | {"__getattr__"}))
            yield from (Entry(f"{value.__name__}.{name}", held, name, held[name]) for name in names)
            return
        elif isinstance(value, torch.Tensor):
            held = vars(value)
            yield from (_fixed(path, part) for part in (type(value), *_hooks_of(value)))
            yield Entry(f"{path}.__class__", value, "__class__", type(value))
            for name in sorted(held.keys() & self._read):
                yield Entry(f"{path}.{name}", held, name, held[name])
            return
        elif isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            return
        elif isinstance(value, contextvars.ContextVar) and _read(value, _CELL) is ABSENT:
            yield Entry(value.name, value, _CELL, ABSENT)
            return
        is_function = isinstance(value, types.FunctionType)
        if isinstance(value, type):
            is_operator = issubclass(value, torch.autograd.Function)
            special = {"backward", "setup_context"} if is_operator else {"__class_getitem__"}
            yield from self._of_class(value, special)
            yield from self._of_class(type(value), _IMPLICIT, value)
            self._computed += self._members_of(value, self._called - self.names, self._called)
            return
        if isinstance(value, _MODULES):
            for name, child in value._modules.items():
                yield Entry(f"{path}.{name}", None, None, child)
        is_whole = is_function or self._reads_all(path, value)
        takes_texts = isinstance(value, dict) or "getattr" in self.names
        is_indexed = isinstance(value, dict) and path.rpartition(".")[2] in self._indexed
        for entry in _members(path, value, False):
            if isinstance(entry.value, type) and entry.holder is None and not is_function:
                if not isinstance(value, torch.nn.Module):
                    yield Entry(f"{path}.__class__", value, "__class__", entry.value)
                implicit = _IMPLICIT - ({"__call__"} if id(value) in self._receivers else set())
                yield from self._of_class(entry.value, implicit)
            elif (
                not isinstance(entry.key, str)
                or self.is_named(entry)
                or (is_whole and not (is_function and entry.holder is vars(value)))
            ):
                yield entry
            elif is_indexed or (takes_texts and entry.key in self.texts):
                self._computed.append(entry)

    def is_named(self, entry: Entry) -> bool:
        """Whether the step's code names the attribute or the key of an entry."""
        if not isinstance(entry.key, str):
            return False
        is_leaf = isinstance(entry.value, (torch.Tensor, *PLAIN))  # Such values cannot be called.
        names = self._read if is_leaf else self.names
        return entry.key in names or entry.key.startswith(self._beginnings)

    def _reads_all(self, path: str, value: Any) -> bool:
        """Whether the step reads entries or attributes of ``value`` without naming them."""
        if isinstance(value, dict):
            name = path.rpartition(".")[2]
            if name in self.iterated:
                self.whole.append(value)
                return True
            if name in self._probed:
                self.probed.add(id(value))
                return True
            return self.names.isdisjoint(key for key in value if isinstance(key, str))
        # The methods of these classes are not searched, so they may read every attribute.
        is_library = isinstance(value, _OF_LIBRARY) or type(value).__module__ in _STATE_OF
        if is_library or is_iterator(value):
            return True
        is_whole = not self.names.isdisjoint(("vars", "__dict__", "asdict", "dir"))
        held = attributes_of(value) if is_whole else None
        if held is not None and not isinstance(value, torch.nn.Module):
            self.whole.append(held)
        return is_whole

    def _of_class(
        self, kind: type, implicit: Iterable[str] = (), instance: type | None = None
    ) -> Iterator[Entry]:
        """Yield the named attributes and methods of a user class and of its bases.

        For a metaclass ``kind``, attributes of its class ``instance`` may hide those of ``kind``.
        """
        named = self.names.union(implicit)
        if "getattr" in self.names:
            self._computed += self._members_of(kind, self.texts - named, self.texts)
        return self._members_of(kind, named, self._read, instance)

    def _members_of(
        self, kind: type, wanted: Set[str], read: Set[str], instance: type | None = None
    ) -> Iterator[Entry]:
        holders = dict[tuple[str, str], type]()
        for base in reversed(kind.__mro__):
            which = base.__qualname__ if "super" in self.names else ""
            if not is_machinery_module(base.__module__):
                names = vars(base).keys() & wanted
                names |= {name for name in vars(base) if name.startswith(self._beginnings)}
                holders |= {(name, which): base for name in names}
        for (name, _), base in sorted(holders.items(), key=operator.itemgetter(0)):
            path, member = f"{base.__name__}.{name}", vars(base)[name]
            ways = (_read(member, way) for way in ("fget", "__func__", "func"))
            function = next(filter(callable, ways), member)  # A property wraps a function.
            if isinstance(function, types.FunctionType) and function is not member:
                yield _fixed(path, getattr(member, "dispatcher", function))
            is_leaf = isinstance(member, (torch.Tensor, *PLAIN))
            if not is_leaf or name in read or name.startswith(self._beginnings):
                # An assignment to ``kind`` would hide the inherited value, except from super().
                own = instance or kind
                if "super" in self.names or isinstance(member, torch.Tensor):
                    own = base
                yield Entry(path, own, name, member)

    def _environment(self, code: types.CodeType) -> Iterator[Entry]:
        """Yield the environment variables that ``code`` may read.

        These are variables whose names begin with a text of the step, and names that are not set.
        """
        if {"environ", "getenv"}.isdisjoint(code.co_names):
            return
        if id(os.environ) not in self.probed:
            self.probed.add(id(os.environ))
            self.spaces.append(_fixed("", os.environ).noted())
        beginnings = tuple(text for text in self._strings | self.texts if len(text) > 2)
        absent = {name for name in _uses_of(code).strings if name.isupper()}
        for name in sorted({*absent, *(n for n in os.environ if n.startswith(beginnings))}):
            value = os.environ.get(name, ABSENT)
            yield Entry(f"os.environ[{name!r}]", os.environ, name, value)

    def _use(self, function: Any) -> None:
        code = getattr(function, "__code__", None)
        if code is not None:
            uses = _uses_of(code)
            self.names |= uses.names | uses.strings
            self._strings |= uses.strings
            self._read |= uses.read | uses.strings
            self.iterated |= uses.iterated
            self._indexed |= uses.indexed
            self._probed |= uses.probed
            if "getattr" in uses.names:  # getattr(x, f"s{i}")
                self._beginnings += tuple(filter(str.isidentifier, uses.strings))


_OF_LIBRARY = (
    *(ChainMap, UserDict, UserList, queue.Queue),
    *(weakref.WeakKeyDictionary, weakref.WeakSet, weakref.WeakValueDictionary),
)
"""Containers that keep their entries in attributes."""

_OF_OPTIMIZERS = (
    *("param_groups", "state"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
)

_IMPLICIT = frozenset(
    """__call__ __get__ __getattr__ __getattribute__ __getitem__ __missing__ __iter__ __next__
    __len__ __contains__ __bool__ __int__ __float__ __index__ __enter__ __exit__ __eq__ __lt__
    __gt__ __le__ __ge__ __neg__ __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__
    __rtruediv__ __matmul__ __rmatmul__ __pow__ __torch_function__ __str__ __repr__ __format__
    __hash__ __abs__ __invert__ __mod__ __floordiv__ __and__ __or__ __xor__ __reversed__""".split()
)
"""Special methods that Python calls although no code names them."""

OF_CODE = ("__code__", "__class__")
"""Attributes whose values are compared, but not searched."""

_INDIRECT = frozenset({"globals", "modules", "import_module"})
"""Names whose use means that code may read globals that it does not name."""

_OF_TENSORS = frozenset(
    "parameters named_parameters buffers named_buffers state_dict parameters_to_vector".split()
)
"""Names of functions that iterate over tensors of modules."""

_INSTANCE = frozenset(
    "__new__ __init__ __post_init__ __call__ __enter__ __exit__ __torch_function__".split()
)
"""Special methods that may run if a step creates an object of a class that it names."""


def _imported(function: types.FunctionType) -> Iterator[Entry]:
    """Yield the modules that a function imports, or looks up in ``sys.modules``, by name."""
    uses = _uses_of(function.__code__)
    names = uses.imported if uses.names.isdisjoint(_INDIRECT) else uses.imported | uses.strings
    package = f"{function.__globals__.get('__package__')}."
    for name in sorted({*names, *(package + name for name in names)} & sys.modules.keys()):
        yield Entry(f"sys.modules[{name!r}]", sys.modules, name, sys.modules[name])


def set_by_hooks(module: torch.nn.Module) -> set[str]:
    """Return the attributes that hooks of ``torch.nn.utils`` compute before each forward.

    weight_norm, spectral_norm and pruning install such hooks.
    """
    hooks = module._forward_pre_hooks.values()
    own = (hook for hook in hooks if type(hook).__module__.startswith("torch.nn.utils."))
    names = (getattr(hook, "name", getattr(hook, "_tensor_name", None)) for hook in own)
    return {name for name in names if isinstance(name, str)}


class Change(NamedTuple):
    """A place whose tensors changed."""

    verb: str
    """``replaces``, ``adds``, ``removes`` or, for an iterator, ``advances``."""
    path: str
    tensors: list[tuple[str, torch.Tensor]]
    """The current tensors of the place, as pairs with their paths."""
    before: list[torch.Tensor]
    """The previous tensors of the place."""


def rebinding(verb: str, path: str) -> str:
    """Return the error text for a step that changes the tensors of a place."""
    if verb == "replaces":
        return (
            f"the step replaces {path}: write into it with copy_(), or pass the new tensor as an "
            f"argument. A replay repeats the work of the device but no assignments, so a step must "
            f"write in place."
        )
    way = "Return the tensor, or write in place into a tensor that exists before the capture."
    if verb == "advances":
        way = "Take its tensor before the replay and pass it as an argument."
    return f"the step {verb} {path}: a replay would not. {way}"


class Watch:
    """A comparison of all places that a step can reach, before and after a run."""

    def __init__(self, roots: Iterable[tuple[str, Any]], *, gradients: bool = False) -> None:
        places: list[_Place] = []
        for path, value in walk(roots, True):
            places += (p for p in _parts(path, value, True) if isinstance(p, _Place))
            if gradients:
                leaves = (e for e in _members(path, value, True) if _has_gradient(e.value))
                places += [_Place(e.path, _ATTRIBUTE, e.value, ("grad",)) for e in leaves]
        self._held = [(place, place.values()) for place in places]

    def changes(
        self,
        note_state: Callable[[str, Any, Any], object] = lambda *_: None,
        *,
        empty: bool = False,
    ) -> list[Change]:
        """Return the places whose tensors changed.

        Args:
            note_state: called with the path, the old and the new value of a changed plain value.
            empty: whether plain values that were added or deleted count as changed.
        """
        changes, plain = [], (_Absent, *PLAIN) if empty else PLAIN
        for place, values in self._held:
            for path, old, new in place.changes(values):
                before = [tensor for _, tensor in tensors_below(path, old)]
                after = tensors_below(path, new)
                if [*map(id, before)] != [id(tensor) for _, tensor in after]:
                    verb = "adds" if not before else "replaces" if after else "removes"
                    if is_iterator(place.holder) and not isinstance(place.holder, _CLOSED):
                        verb = "advances"
                    changes.append(Change(verb, path, after, before))
                elif isinstance(old, plain) and isinstance(new, plain) and old != new:
                    note_state(path, old, new)
        return changes

    def put_back(self, *, plain: bool = False) -> None:
        """Restore every place whose tensors changed; with ``plain``, restore plain values too."""
        kinds = (_Absent, *PLAIN)
        for place, values in self._held:
            if any(
                tensors_below(path, old)
                or tensors_below(path, new)
                or (plain and isinstance(old, kinds) and isinstance(new, kinds))
                for path, old, new in place.changes(values)
            ):
                place.put_back(values)

    def settle(self) -> None:
        """Store the current values for later comparisons."""
        self._held = [(place, place.values()) for place, _ in self._held]


def tensors_below(path: str, value: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in ``value``, as pairs with their paths."""
    if isinstance(value, torch.Tensor):
        return [(path, value)]
    if value is ABSENT or isinstance(value, (type, types.FunctionType, *PLAIN)):
        return []
    inner = entries([(path, value)])
    return [(e.path, e.value) for e in inner if isinstance(e.value, torch.Tensor)]


def modules_of(fn: Callable[..., Any]) -> list[torch.nn.Module]:
    """Return the modules that a function can reach, without submodules of those modules."""
    reached_objects = walk([("", fn)], False, classes=False)
    modules = [value for _, value in reached_objects if isinstance(value, torch.nn.Module)]
    inside = {id(child) for module in modules for child in [*module.modules()][1:]}
    return [module for module in modules if id(module) not in inside]
