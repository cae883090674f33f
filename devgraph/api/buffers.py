"""StaticBuffers: tensors at fixed addresses that graphs read and write.

A graph keeps addresses, not tensors, so inputs must be copied into memory that does not move. All
buffers of an object share one allocation. Copies can therefore be grouped, and one range check
decides whether a tensor overlaps the buffers.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import numbers
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from devgraph.api.errors import (
    InputError,
    InputTypeError,
    ResourceError,
    StateError,
    brief,
    counted,
    did_you_mean,
)
from devgraph.api.guard import Guard, Term
from devgraph.api.marks.host_values import same_value
from devgraph.api.reach import (
    ABSENT,
    CONTAINERS,
    PLAIN,
    Entry,
    containers,
    content_of,
    entries,
)
from devgraph.api.tensors import (
    addressed,
    alike_term,
    alike_to,
    byte_range,
    has_place,
    layout_of,
    tensors_in,
)
from devgraph.api.trees import leaves_of

CHECKED = 4
"""Maximum number of weights, of modules and of a function's tensors that every replay compares."""

AGAIN = "capture again (in a runner: invalidate() and capture())"
"""Remedy for a graph that would use old state."""

_ALIGNMENT = 256
"""Alignment of buffers in bytes, as in device allocators.

Kernels that choose their vector width by address then behave as for separate tensors.
"""


class StaticBuffers(Mapping[str, torch.Tensor]):
    """Named tensors in one allocation, and bound tensors of the caller that must not move.

    Buffers start as zeros. Indexing returns the whole buffer; ``view`` returns a smaller contiguous
    tensor at the same address.

    Args:
        specs: (shape, dtype) by name.
        device: device of the memory.
        shared: contiguous tensors by name, at least as large as the buffers, whose memory the
            buffers use instead.

    Raises:
        InputError: a shape or dtype cannot be allocated (a ValueError).
        InputTypeError: ``specs`` has a wrong type.
        ResourceError: the device does not have enough memory.
    """

    def __init__(
        self,
        specs: Mapping[str, tuple[Sequence[int], torch.dtype]],
        *,
        device: torch.device | str,
        shared: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        shared = shared or {}
        starts: dict[str, int] = {}
        total = 0
        _require_specs(specs)
        for name, (shape, dtype) in specs.items():
            starts[name] = total
            if name not in shared:
                total += -(-_nbytes(name, shape, dtype) // _ALIGNMENT) * _ALIGNMENT
        # Inference tensors could not be written outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self._memory = _zeros(total, device)
            self._flat = {
                name: shared[name].view(-1)[: math.prod(shape)]
                if name in shared
                else self._memory[starts[name] : starts[name] + _nbytes(name, shape, dtype)].view(
                    dtype
                )
                for name, (shape, dtype) in specs.items()
            }
            self._full = {name: self._flat[name].view(tuple(s)) for name, (s, _) in specs.items()}
        self._trees: dict[str, Any] = {}
        self.bound: dict[str, torch.Tensor] = {}
        """The bound tensors by name."""
        self._guard = Guard(())
        own = [self._memory] if total or not shared else []
        self._ranges = [byte_range(memory) for memory in (*own, *shared.values())]
        self.start = min(first for first, _ in self._ranges)
        """Address of the first byte."""
        self.stop = max(last for _, last in self._ranges)
        """Address after the last byte. The range may contain other memory."""

    @property
    def device(self) -> torch.device:
        """The device of the buffers, with its index."""
        return self._memory.device

    @property
    def nbytes(self) -> int:
        """Bytes of the allocation with alignment, without shared memory."""
        return self._memory.nbytes

    def view(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Return a contiguous tensor of ``shape`` at the address of buffer ``name``.

        Raises:
            InputError: there is no such buffer, or the shape is invalid or too large.
        """
        flat = self._flat.get(name)
        if flat is None:
            raise InputError(f"no buffer {name!r}. {did_you_mean(name, self._flat)}")
        if not _is_shape(shape):
            raise InputError(f"buffer {name!r} cannot have the shape {brief(shape)}")
        count = math.prod(shape)
        if count > flat.numel():
            raise InputError(
                f"buffer {name!r} has {counted(flat.numel(), 'element')}, but the shape "
                f"{tuple(shape)} needs {count}"
            )
        return flat[:count].view(tuple(shape))

    def bind(self, name: str, tree: Any) -> None:
        """Register tensors of the caller that graphs use in place, such as a KV cache.

        The tensors are kept alive. ``check`` raises if their memory moves, their layout changes, or
        another tensor replaces them in their container.

        Args:
            name: name of the tree in errors.
            tree: a tensor, a tree of tensors (a cache per layer), a module (its parameters and
                buffers are bound), or a function without arguments that returns a tree
                (``lambda: model.cache``). Modules and functions are compared at each run, which
                takes about 0.1 us per tensor. A tensor of a tree is named ``name[0]`` or
                ``name['key']``.

        Raises:
            InputError: the name is taken.
            InputTypeError: a leaf is not a strided tensor.
        """
        if not isinstance(name, str):
            raise InputTypeError(f"names of bound tensors must be strings, got {brief(name)}")
        if name in self._flat or name in self._trees:
            raise InputError(f"there is already a buffer {name!r}; choose another name")
        self._trees[name] = tree
        try:
            self.rebind()
        except BaseException:
            del self._trees[name]
            raise

    def rebind(self) -> None:
        """Look up the bound tensors again, for all later checks."""
        self.bound = {k: t for name, tree in self._trees.items() for k, t in bound_in(name, tree)}
        named = ((f"bound tensor {name!r}", tensor) for name, tensor in self.bound.items())
        self._guard = Guard([Bound(named, self._trees)])

    def check(self) -> None:
        """Raise StateError if a bound tensor was moved, replaced or given a new layout."""
        if self.bound and not self._guard.same():
            self._guard.settle()

    def overlaps(self, tensor: torch.Tensor) -> bool:
        first, last = byte_range(tensor)
        return any(first < stop and last > start for start, stop in self._ranges)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._full[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._full)

    def __len__(self) -> int:
        return len(self._full)

    def __reduce__(self) -> Any:
        raise InputTypeError("StaticBuffers hold addresses of this process and cannot be pickled")

    def __repr__(self) -> str:
        named = ", ".join(f"{n} {tuple(t.shape)} {t.dtype}" for n, t in self._full.items())
        return f"<StaticBuffers on {self.device}, {self.nbytes} bytes: {named}>"


class Bound:
    """A check that tensors, and the attributes and containers that contain them, are unchanged.

    ``named`` are the tensors and their names for errors. ``owners`` are trees, modules and
    functions that return trees, by name. ``values`` adds the plain values in the owners to the
    comparison, and ``weights`` adds parameters and buffers of modules.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, torch.Tensor]],
        owners: Mapping[str, Any],
        *,
        values: bool = False,
        weights: bool = True,
    ) -> None:
        self._known = [(what, tensor, layout_of(tensor)) for what, tensor in named]
        self.tensors = [*{id(tensor): tensor for _, tensor, *_ in self._known}.values()]
        """The tensors without duplicates."""
        self._alike: dict[bool, Callable[..., bool]] = {}
        """Guards that compare the tensors, by inference mode."""
        trees = {name: fn() for name, fn in owners.items() if returns_tree(fn)}
        self._sources = [(n, owners[n], tree, tensors_in(tree)) for n, tree in trees.items()]
        returned = {id(tensor) for *_, tensors in self._sources for tensor in tensors}
        split = [[t for t in self.tensors if (id(t) in returned) is kind] for kind in (False, True)]
        self._placed = [*split[0], *split[1][:CHECKED]]  # tensors whose addresses are compared
        self._places = [*map(torch.Tensor.data_ptr, self._placed)]
        held = {**owners, **trees}
        kept = (torch.Tensor, tuple, *PLAIN) if values else (torch.Tensor, tuple)
        nodes = [pair for name, owner in held.items() for pair in containers(name, owner)]
        own = {id(space) for _, node in nodes for space in (node, getattr(node, "__dict__", None))}
        self._entries = [
            entry
            for entry in entries(held.items(), weights=weights)
            if entry.holder is not None
            if isinstance(entry.value, kept if id(entry.holder) in own else torch.Tensor)
            if not (entry.key == "grad" and isinstance(entry.holder, torch.Tensor))
        ]
        sized = (Entry(path, None, None, node) for path, node in nodes)
        self._entries += [entry.noted() for entry in sized if isinstance(entry.value, CONTAINERS)]
        self.terms = [*self._compared()]

    def _compared(self) -> Iterator[Term]:
        if self.tensors and all(type(tensor) in _PLAIN for tensor in self.tensors):
            yield alike_term(self.tensors, self._alike)
        else:
            yield from (("{}({}) == {}", (layout_of, t, layout)) for _, t, layout in self._known)
        yield from addressed(self._placed, self._places)
        yield from map(term_of, self._entries)
        yield from (("{}({}, {}, {})", (_returns, *source[1:])) for source in self._sources)

    def check(self) -> None:
        """Raise StateError if a tensor was moved, replaced or given a new layout."""
        if self.tensors:
            self._check_each()
        require_same(self._entries)
        for name, *source in self._sources:
            if not _returns(*source):
                raise StateError(
                    f"bound {name!r} returns different tensors than at capture, but the graph uses "
                    f"the old tensors. Write new data into these with copy_(), or {AGAIN}."
                )

    def _check_each(self) -> None:
        """Check each tensor, then build a guard for all of them."""
        for what, tensor, layout in self._known:
            if (now := layout_of(tensor)) != layout:
                raise StateError(
                    f"{what} has moved or has a new layout: it was {_text(*layout)} and is "
                    f"{_text(*now)}. Graphs use the old memory and layout: write new data with "
                    f"copy_(), undo the in-place change (t_(), resize_(), ...), or {AGAIN}."
                )
        if all(type(tensor) in _PLAIN for tensor in self.tensors):
            self._alike[torch.is_inference_mode_enabled()] = alike_to(self.tensors)


_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Places:
    """A check that places still have the values of their entries."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = [*entries]
        self.terms = [*map(term_of, self._entries)]

    def check(self) -> None:
        """Raise StateError if a value differs."""
        require_same(self._entries)


def require_same(entries: Iterable[Entry]) -> None:
    """Raise StateError if a place has a different tensor, plain value or number of entries."""
    for entry in entries:
        now = entry.now()
        if entry.is_modified:
            raise StateError(
                f"{entry.path} {entry.modification}, but the graph uses the old entries. Capture "
                f"again."
            )
        if now is entry.value:
            continue
        if isinstance(entry.value, tuple) and is_equal(entry.value, now):
            continue
        if isinstance(entry.value, torch.Tensor) or tensors_in(entry.value):
            raise StateError(
                f"{entry.path} among the bound tensors is no longer the captured tensor, but the "
                f"graph uses the old tensor. Write new data into the old tensor with copy_(), "
                f"or {AGAIN}."
            )
        if not same_value(now, entry.value):
            raise StateError(
                f"{entry.path} is {brief(now)} and was {brief(entry.value)} at capture, but "
                f"the graph uses the old value. Make the value a host argument of a marked "
                f"function, or {AGAIN}."
            )


def term_of(entry: Entry) -> Term:
    """Return a guard term that is true while the place has its value or an equal plain value.

    Without a holder, the term compares the contents of the value.
    """
    holder, key, value = entry.holder, entry.key, entry.value
    if holder is None:
        read_content = len if isinstance(entry.content, int) else content_of
        return "{}({}) == {}", (read_content, value, entry.content)
    read, place = "{}()", tuple[Any, ...]((entry.now,))
    if value is ABSENT:
        if type(holder) is dict:
            return "{} not in {}", (key, holder)
    elif isinstance(holder, types.CellType):
        read, place = "{}.cell_contents", (holder,)
    elif type(holder) in (dict, list):
        read, place = "{}[{}]", (holder, key)
    elif isinstance(holder, type) and key in vars(holder):
        read, place = "{}[{}]", (vars(holder), key)
    elif not isinstance(holder, CONTAINERS) and getattr(holder, key, ABSENT) is value:
        read, place = "getattr({}, {})", (holder, key)
    if isinstance(value, _RENEWED):
        text = f"({read} is {{}} or {{}}({{}}, {read}))"
        return text, (*place, value, is_equal, value, *place)
    return f"{read} is {{}}", (*place, value)


_RENEWED = (numbers.Number, str, tuple)
"""Types whose equal values are often distinct objects."""


def _returns(source: Callable[[], Any], tree: Any, then: Sequence[torch.Tensor]) -> bool:
    """Whether ``source`` still returns ``tree``, or tensors like ``then``."""
    now = source()
    if now is tree:
        return True
    tensors = tensors_in(now)
    return len(tensors) == len(then) and all(map(_is_alike, tensors, then))


def is_equal(old: Any, new: Any) -> bool:
    """Whether two values are one object, equal plain values, or tuples of such values."""
    if isinstance(old, tuple) and type(new) is type(old):
        return len(old) == len(new) and all(map(is_equal, old, new))
    return old is new or (not isinstance(old, torch.Tensor) and same_value(old, new))


def returns_tree(owner: Any) -> bool:
    """Whether ``owner`` is a function or a partial, whose result is the tree."""
    return inspect.isroutine(owner) or isinstance(owner, functools.partial)


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or layout_of(one) == layout_of(other)


def _text(place: int, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> str:
    return f"{tuple(shape)} strides {stride} of {dtype} at {place:#x}"


def bound_in(name: str, owner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the named tensors of a tree, a module or the result of a function."""
    if returns_tree(owner):
        owner = owner()
    for path, leaf in leaves_of(name, owner):
        if isinstance(leaf, torch.nn.Module):
            state = itertools.chain(leaf.named_parameters(), leaf.named_buffers())
            yield from ((f"{path}.{key}", tensor) for key, tensor in state if has_place(tensor))
        elif isinstance(leaf, torch.Tensor) and has_place(leaf):
            yield path, leaf
        elif leaf is not None:
            layout = f" of layout {leaf.layout}" if isinstance(leaf, torch.Tensor) else ""
            raise InputTypeError(
                f"bound buffer {path!r} must be a tensor at a fixed address, a list or dictionary "
                f"of tensors, a module, or a function that returns one of these, got "
                f"{brief(leaf)}{layout}"
            )


def _zeros(nbytes: int, device: torch.device | str) -> torch.Tensor:
    try:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)
    except (RuntimeError, TypeError) as error:  # TypeError: the size exceeds 64 bits
        if not isinstance(error, (TypeError, torch.OutOfMemoryError)) and "alloc" not in str(error):
            raise
        what = str(error).partition("\n")[0]
        raise ResourceError(
            f"static buffers of {nbytes} bytes do not fit into memory on {device}; reduce the "
            f"size of the largest batch ({what})"
        ) from error


def _require_specs(specs: object) -> None:
    fits = isinstance(specs, Mapping) and all(
        isinstance(spec, Sequence) and len(spec) == 2 and isinstance(spec[0], Sequence)
        for spec in specs.values()
    )
    if not fits:
        raise InputTypeError(f"specs must map names to (shape, dtype), got {brief(specs)}")


def _nbytes(name: str, shape: Sequence[int], dtype: torch.dtype) -> int:
    if not isinstance(dtype, torch.dtype):
        raise InputTypeError(f"buffer {name!r} needs a torch.dtype, got {brief(dtype)}")
    if not _is_shape(shape):
        raise InputError(f"buffer {name!r} has shape {tuple(shape)}; use ints of at least 0")
    return math.prod(shape) * dtype.itemsize


def _is_shape(shape: object) -> bool:
    return isinstance(shape, Sequence) and all(
        isinstance(n, numbers.Integral) and not isinstance(n, bool) and int(n) >= 0 for n in shape
    )
