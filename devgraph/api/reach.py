"""State that a step can reach: attributes, entries, closures and globals that hold tensors."""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from devgraph.api.marks.source import is_machinery_module
from devgraph.api.trees import children_of, fields_of

_MOST = 4000
"""Objects that one walk looks into. Modules of torch do not count."""

_DEEPEST = 8
PLAIN = (bool, int, float, complex, str, type(None))
_INTERNAL = frozenset(vars(torch.nn.Module())) - {"training"}
"""Attributes of a module that are torch's own."""

_CELL = "cell_contents"


class Entry(NamedTuple):
    """One place that holds a value, and the value that it held."""

    path: str
    holder: Any
    """A dictionary, a list, a cell of a closure, or an object with slots."""
    key: Any
    value: Any

    @property
    def is_item(self) -> bool:
        """Whether the place is an entry of a container and not an attribute."""
        return self.path.endswith("]")

    def now(self) -> Any:
        """Return the value that the place holds now, or None if there is none."""
        try:
            if isinstance(self.holder, Mapping | list):
                return self.holder[self.key]
            return getattr(self.holder, self.key)
        except (LookupError, AttributeError, ValueError):
            return None

    def put_back(self) -> None:
        """Let the place hold its value again."""
        if isinstance(self.holder, dict | list):
            self.holder[self.key] = self.value
        elif isinstance(self.holder, types.CellType):
            self.holder.cell_contents = self.value
        else:
            object.__setattr__(self.holder, self.key, self.value)  # also of a frozen class


_Found = tuple[str, Any, Any, Any]


def tree_entries(path: str, node: Any) -> Iterator[Entry]:
    """Yield the places of a tree that hold leaves, as far as they can come to hold others."""
    children = children_of(node)
    if children is None:
        return
    keys: Iterable[Any]
    holder, keys = node, range(len(children))
    if isinstance(node, Mapping):
        keys = [*node]
    elif names := fields_of(node):
        holder, keys = getattr(node, "__dict__", node), [n for n in names if hasattr(node, n)]
    elif not isinstance(node, list):
        holder = None
    for key, (suffix, child) in zip(keys, children, strict=True):
        if children_of(child) is not None:
            yield from tree_entries(path + suffix, child)
        elif holder is not None:
            yield Entry(path + suffix, holder, key, child)
    if holder is None:  # a registered class, whose attributes can come to hold others
        held = getattr(node, "__dict__", {})
        yield from (Entry(f"{path}.{name}", held, name, value) for name, value in held.items())


def containers(roots: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the lists and mappings in trees, each behind its path."""
    for path, node in roots:
        children = children_of(node)
        if children is None:
            continue
        if isinstance(node, list | Mapping):
            yield path, node
        yield from containers((path + suffix, child) for suffix, child in children)


def entries(roots: Iterable[tuple[str, Any]], *, weights: bool = True) -> Iterator[Entry]:
    """Yield every place below ``roots`` that holds a tensor, a generator or a plain value.

    Args:
        roots: functions, modules, objects and containers, each behind its name. A function reaches
            its closure, its defaults and the globals that it names.
        weights: with the parameters and buffers of modules.
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
        for name, holder, key, child in _members(path, value, weights):
            if isinstance(child, (torch.Tensor, torch.Generator, *PLAIN)):
                yield Entry(name, holder, key, child)
            elif depth < _DEEPEST or is_module:
                todo.append((name, child, depth + (not is_module)))


def _members(path: str, value: Any, weights: bool) -> Iterator[_Found]:
    if isinstance(value, torch.nn.Module):
        inner = vars(value)
        for table in ("_modules", "_parameters", "_buffers")[: 3 if weights else 1]:
            held = inner.get(table, {})
            yield from ((f"{path}.{name}", held, name, child) for name, child in held.items())
        hooked = _set_by_hooks(value)
        yield from (
            (f"{path}.{name}", inner, name, child)
            for name, child in [*inner.items()]
            if name not in _INTERNAL and name not in hooked
        )
    elif isinstance(value, types.FunctionType):
        yield from _members_of_function(path, value)
    elif isinstance(value, types.MethodType):
        yield "self", None, None, value.__self__
        yield path, None, None, value.__func__
    elif isinstance(value, functools.partial):
        for child in (value.func, *value.args):
            yield path, None, None, child
        yield path, None, None, value.keywords
    elif isinstance(value, dict):
        yield from ((f"{path}[{key!r}]", value, key, child) for key, child in [*value.items()])
    elif isinstance(value, list):
        yield from ((f"{path}[{at}]", value, at, child) for at, child in enumerate(value))
    elif isinstance(value, tuple):
        yield from ((f"{path}[{at}]", None, None, child) for at, child in enumerate(value))
    elif not isinstance(value, type | types.ModuleType) and (
        fields_of(value) or not is_machinery_module(type(value).__module__)
    ):
        held = getattr(value, "__dict__", {})
        yield from ((f"{path}.{key}", held, key, child) for key, child in [*held.items()])
        for name in _slots_of(type(value)):  # type: ignore[arg-type]
            yield f"{path}.{name}", value, name, getattr(value, name, None)


def _members_of_function(path: str, fn: types.FunctionType) -> Iterator[_Found]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell, _CELL, cell.cell_contents
        except ValueError:  # an empty cell
            continue
    for child in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
        yield path, None, None, child
    if (inner := vars(fn).get("__wrapped__")) is not None:
        yield path, None, None, inner
    space = fn.__globals__
    if not is_machinery_module(space.get("__name__", "")):
        for name in names_in(fn.__code__):
            if name in space:
                yield name, space, name, space[name]


@functools.lru_cache(maxsize=1024)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of globals and attributes that ``code`` and the code in it use."""
    inner = (names_in(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return frozenset(code.co_names).union(*inner)


def _set_by_hooks(module: torch.nn.Module) -> set[str]:
    """Return the attributes that hooks of torch compute before each forward: weight_norm, ..."""
    hooks = module._forward_pre_hooks.values()
    own = (hook for hook in hooks if type(hook).__module__.startswith("torch.nn.utils."))
    return {name for hook in own if isinstance(name := getattr(hook, "name", None), str)}


@functools.lru_cache(maxsize=1024)
def _slots_of(kind: type) -> tuple[str, ...]:
    members = (member for base in kind.__mro__ for member in vars(base).values())
    return tuple(m.__name__ for m in members if isinstance(m, types.MemberDescriptorType))


class Watch:
    """The places that a step can reach, as they are before a run of it."""

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        self._entries = [*entries(roots)]

    def rebound(self, note_state: Callable[[str, Any, Any], None]) -> str | None:
        """Put the tensors back that were replaced, and return the path of the first one.

        Args:
            note_state: called with the path, the old and the new value of a plain value that
                changed.
        """
        first = None
        for entry in self._entries:
            if entry.holder is None or (now := entry.now()) is entry.value:
                continue
            if isinstance(entry.value, torch.Tensor):
                entry.put_back()
                first = first or entry.path
            elif isinstance(now, PLAIN) and now != entry.value:
                note_state(entry.path, entry.value, now)
        return first


def modules_of(fn: Callable[..., Any]) -> list[torch.nn.Module]:
    """Return the modules that a function can reach."""
    todo: deque[tuple[Any, int]] = deque([(fn, 0)])
    seen: set[int] = set()
    modules: list[torch.nn.Module] = []
    while todo and len(seen) < _MOST:
        value, depth = todo.popleft()
        if id(value) in seen or isinstance(value, torch.Tensor):
            continue
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            modules.append(value)
        elif depth < _DEEPEST:
            todo.extend((child, depth + 1) for _, _, _, child in _members("", value, True))
    return modules
