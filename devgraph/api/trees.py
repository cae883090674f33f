"""Trees of arguments: the containers that a capture traverses, copies and compares."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import types
import weakref
from collections import UserDict, UserList
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import attrs
import torch
from torch.utils import _pytree as pytree

from devgraph.api.errors import InputError

_Result = TypeVar("_Result")

Children = list[tuple[str, Any]]
"""Pairs of a path suffix, such as ``['key']`` or ``.name``, and a child of a container."""

_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size})
_DEEPEST = 200


def children_of(node: Any) -> Children | None:
    """Return the children of a container, or None for a leaf.

    Containers are lists, tuples, mappings, dataclasses, attrs classes, namespaces, and the classes
    that are registered with ``torch.utils._pytree``.
    """
    kind = type(node)
    if kind in _PLAIN or isinstance(node, torch.Tensor | torch.nn.Module | type):
        return None
    if kind is dict or (isinstance(node, Mapping) and not _registered(kind)):
        return [(f"[{key!r}]", child) for key, child in node.items()]
    if kind is list or kind is tuple:
        return [(f"[{index}]", child) for index, child in enumerate(node)]
    if isinstance(node, tuple) and hasattr(kind, "_fields"):
        return [(f".{name}", child) for name, child in zip(kind._fields, node, strict=True)]
    if _registered(kind):
        flatten = pytree.SUPPORTED_NODES[kind]
        if flatten.flatten_with_keys_fn is not None:
            pairs, _ = flatten.flatten_with_keys_fn(node)
            return [(str(key), child) for key, child in pairs]
        return [(f"[{index}]", child) for index, child in enumerate(flatten.flatten_fn(node)[0])]
    if isinstance(node, list | tuple | UserList):
        return [(f"[{index}]", child) for index, child in enumerate(node)]
    if names := fields_of(node):
        return [(f".{name}", getattr(node, name)) for name in names if hasattr(node, name)]
    return None


def fields_of(node: Any) -> list[str]:
    """Return the names of the attributes of a dataclass, an attrs class or a namespace."""
    kinds = (node if isinstance(node, type) else type(node)).__mro__
    # ``is_dataclass`` and ``attrs.has`` would call the ``__getattr__`` of a metaclass.
    if any("__dataclass_fields__" in vars(kind) for kind in kinds):
        names = [field.name for field in dataclasses.fields(node)]
    elif any("__attrs_attrs__" in vars(kind) for kind in type(node).__mro__):
        names = [field.name for field in attrs.fields(type(node))]
    else:
        return [*vars(node)] if isinstance(node, _NAMESPACES) else []
    others = () if isinstance(node, type) else attributes_of(node) or ()
    return [*names, *(name for name in others if name not in names and not _is_cached(node, name))]


def _is_cached(node: Any, name: str) -> bool:
    return isinstance(getattr(type(node), name, None), functools.cached_property)


def attributes_of(node: Any) -> dict[str, Any] | None:
    """Return the ``__dict__`` of an object, or None if there is none or an error is raised."""
    try:
        held: dict[str, Any] = vars(node)
    except Exception:
        return None
    return held


def weakly_cached(compute: Callable[[Any], _Result]) -> Callable[[Any], _Result]:
    """Return ``compute`` with a cache of its results, which keeps no argument alive."""
    results: weakref.WeakKeyDictionary[Any, _Result] = weakref.WeakKeyDictionary()

    @functools.wraps(compute)
    def cached(key: Any) -> _Result:
        result = results.get(key)
        if result is None:
            result = results[key] = compute(key)
        return result

    return cached


@weakly_cached
def slots_of(kind: type) -> tuple[str, ...]:
    """Return the names of the slots of a class and of its bases."""
    members = (member for base in kind.__mro__ for member in vars(base).values())
    names = (m.__name__ for m in members if isinstance(m, types.MemberDescriptorType))
    return tuple(name for name in names if name != "__dict__")  # a member of SimpleNamespace


def rebuilt(node: Any, children: Iterable[Any]) -> Any:
    """Return a container like ``node`` with other children, in the order of ``children_of``."""
    kind, children = type(node), list(children)
    if kind is list:
        return children
    if kind is dict:
        return dict(zip(node, children, strict=True))
    if isinstance(node, Mapping) and not _registered(kind):
        return _rebuilt_mapping(node, dict(zip(node.keys(), children, strict=True)))
    if isinstance(node, tuple) and not _registered(kind):
        made = tuple.__new__(kind, children)
        vars(made).update(vars(node)) if hasattr(made, "__dict__") else None
        return made
    if _registered(kind):
        registered = pytree.SUPPORTED_NODES[kind]
        return registered.unflatten_fn(children, registered.flatten_fn(node)[1])
    made = copy.copy(node)
    if isinstance(node, list | UserList):
        made[:] = children
        return made
    for name in [name for name in attributes_of(made) or () if _is_cached(node, name)]:
        object.__delattr__(made, name)  # The cached value belongs to the old children.
    names = [name for name in fields_of(node) if hasattr(node, name)]
    for name, child in zip(names, children, strict=True):
        object.__setattr__(made, name, child)  # works for frozen classes too
    return made


def mapped(change: Callable[[Any], Any], node: Any) -> Any:
    """Return a tree like ``node`` with each leaf replaced by ``change(leaf)``."""
    children = children_of(node)
    if children is None:
        return change(node)
    return rebuilt(node, [mapped(change, child) for _, child in children])


def _rebuilt_mapping(node: Any, items: dict[Any, Any]) -> Any:
    if isinstance(node, types.MappingProxyType):
        return types.MappingProxyType(items)
    made = copy.copy(node)
    if isinstance(made, UserDict):
        made.data = items
        return made
    try:
        for key, child in items.items():
            if isinstance(made, dict):
                dict.__setitem__(made, key, child)
            else:
                made[key] = child
    except TypeError:
        return node  # The step cannot change an immutable mapping either.
    return made


def same_kind(one: Any, other: Any) -> bool:
    """Whether two containers have the same class and, for registered classes, equal contexts."""
    kind = type(one)
    if type(other) is not kind:
        return False
    if kind in (list, tuple, dict) or not _registered(kind) or isinstance(one, Mapping):
        return True
    flatten = pytree.SUPPORTED_NODES[kind].flatten_fn
    return bool(flatten(one)[1] == flatten(other)[1])


def _registered(kind: type) -> bool:
    return kind in pytree.SUPPORTED_NODES


def leaves_of(path: str, node: Any, depth: int = 0) -> Iterable[tuple[str, Any]]:
    """Yield pairs of a path and a leaf of a tree, whose root is at level ``depth``."""
    children = children_of(node)
    if children is None:
        yield path, node
        return
    if depth > _DEEPEST:
        raise InputError(f"{path[:60]}... is nested too deeply, or contains itself")
    for suffix, child in children:
        yield from leaves_of(path + suffix, child, depth + 1)


class Copied(NamedTuple):
    """A copy of a caller's container that the step receives instead of the original."""

    path: str
    copy: Any
    children: Children


def own_copy(path: str, node: Any, copies: dict[int, Copied]) -> Any:
    """Return a copy of the tree ``node`` with new containers and the same leaves.

    Objects without tensors, such as a dataclass of plain values, are leaves. ``copies`` maps the id
    of each container to its copy, so that a container that occurs twice is copied once.
    """
    if id(node) in copies:
        return copies[id(node)].copy
    children = children_of(node)
    if children is None or _is_value(node):
        return node
    own = [(suffix, own_copy(path + suffix, child, copies)) for suffix, child in children]
    made = rebuilt(node, (child for _, child in own))
    copies[id(node)] = Copied(path, made, own)
    return made


def _is_value(node: Any) -> bool:
    """Whether ``node`` is an object without tensors, such as a configuration."""
    if isinstance(node, list | dict | tuple) or not fields_of(node):
        return False
    return not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves_of("", node))


def change_in(
    copied: Copied, note_state: Callable[[str, Any, Any], None]
) -> tuple[str, str] | None:
    """Return the step's first change to its copy of a container, as a verb and a path.

    Only changes of tensors and keys count; None if there are none. ``note_state`` is called with
    the path, old value and new value of each plain entry that changed before this change.
    """
    before, after = dict(copied.children), dict(children_of(copied.copy) or ())
    for suffix in [*before, *after]:
        path = copied.path + suffix
        if suffix not in after:
            return "removes", path
        if suffix not in before:
            return "adds", path
        old, new = before[suffix], after[suffix]
        if old is new:
            continue
        if holds_tensors(old) or holds_tensors(new):
            return "replaces", path
        note_state(path, old, new)
    return None


def holds_tensors(node: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for _, leaf in leaves_of("", node))
