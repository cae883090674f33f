"""Named state: globals, closures and attributes that a step reads, compared at each replay."""

from __future__ import annotations

import enum
import functools
import itertools
import logging
import operator
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from devgraph.api.buffers import AGAIN, is_equal, require_same, term_of
from devgraph.api.errors import CaptureError, StateError, brief
from devgraph.api.guard import Term, by_turns
from devgraph.api.marks.host_values import exact
from devgraph.api.reach import (
    OF_CODE,
    PLAIN,
    POSITION,
    SMALL,
    Entry,
    Named,
    content_of,
    has_state,
    is_array,
    rebinding,
)
from devgraph.api.tensors import Memory
from devgraph.api.trees import attributes_of

logger = logging.getLogger(__name__)

_FIRST, _EACH, _TURN = 128, 32, 8
"""Numbers of places that a replay compares, for entries of dictionaries and members of classes.

A replay compares the first ``_FIRST`` places, and ``_EACH`` of the rest in rotation. Objects with
few attributes come first; functions, classes and globals come last. Inside module containers, a
replay compares the first ``_TURN`` places, and as many others in rotation. It compares all other
places, and the lengths of containers outside of module containers.
"""


class NamedState:
    """The globals, closure cells, attributes and entries that a step reads, with their values.

    These locations are called *places*; ``reach.Named`` finds them from ``roots``. A replay
    compares identities. If an object was replaced, the search is repeated. The new object is
    accepted if it has the same tensors, equal plain values and the same code.

    Places for which ``is_changed`` returns True were changed by the step, and are not compared. An
    earlier search ``found`` is reused if it is current. ``plain`` are all places with plain values,
    except those that the step added.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]],
        is_changed: Callable[[Entry], bool] = lambda _: False,
        *,
        regions: bool = False,
        found: Named | None = None,
    ) -> None:
        self._walk, self._own = functools.partial(Named, [*roots], regions=regions), set[Any]()
        self._added = set[Any]()
        named = found if found is not None and found.is_current() else self._walk()
        self._own = {entry.place for entry in self._places(named) if is_changed(entry)}
        """The places that the step itself changed."""
        self._settle(named)

    def _places(self, named: Named) -> list[Entry]:
        return [entry for entry in named.places if entry.place not in self._own]

    def _settle(self, named: Named) -> None:
        self.modules, self._held, self.names = named.modules, self._places(named), named.names
        self.iterated = named.iterated
        self._keys = {entry.place for entry in named.places}
        plain = (entry for entry in named.places if isinstance(entry.value, PLAIN))
        self.plain = [entry for entry in plain if entry.place not in self._added]
        held = [entry.value for entry in self._held]
        self.tensors = [tensor for value in held for tensor in _tensors_in(value)]
        self._memory = Memory(self.tensors)
        self._spaces = named.spaces
        default = Entry("torch.default_generator", None, None, torch.default_generator)
        seeded = [*self._held, default] if "initial_seed" in named.names else []
        generators = [entry for entry in seeded if isinstance(entry.value, torch.Generator)]
        self._seeds = [(entry, entry.value.initial_seed()) for entry in generators]
        self._orders = [(mapping, [*mapping]) for mapping in named.whole if len(mapping) <= SMALL]
        self._tables = named.tables
        self._functions = named.functions()
        terms: dict[str, list[Term]] = {"each": [], "outer": [], "inner": []}
        wholes = [*_wholes(self._held)]
        terms["each"] += (("[*{}.values()] == {}", whole) for whole in wholes)
        compared = {id(mapping) for mapping, _ in wholes}
        counts = Counter(id(entry.holder) for entry in self._held)
        outer: list[Entry] = []
        for entry in self._held:
            if id(entry.holder) in compared:
                continue
            if entry.place in named.inner:
                terms["inner"].append(term_of(entry))
            elif isinstance(entry.holder, dict) or _is_code(entry):
                outer.append(entry)
            else:
                terms["each"].append(term_of(entry))
            if entry.content is not None and entry.holder is not None:
                terms["each"].append(term_of(entry._replace(holder=None)))
        for space in self._spaces:
            is_inner = (id(space.value), None) in named.inner
            terms["inner" if is_inner else "each"].append(term_of(space))
        terms["inner"] += map(term_of, self._tables)
        outer.sort(key=lambda entry: (_is_code(entry), counts[id(entry.holder)]))
        terms["outer"] = [*map(term_of, outer)]
        self.terms: list[Term] = [
            *(("[*{}] == {}", order) for order in self._orders),
            *terms["each"],
            *by_turns(terms["outer"], _FIRST, _EACH),
            *by_turns(terms["inner"], _TURN, _TURN),
            *by_turns([*_grouped(self._functions)], 2, 1),
            *self._memory.terms,
            *(("{}() == {}", (entry.value.initial_seed, seed)) for entry, seed in self._seeds),
        ]

    def __bool__(self) -> bool:
        return bool(self._held or self._seeds)

    def check(self) -> None:
        """Raise StateError if the value of a place differs from the value at capture."""
        for mapping, keys in self._orders:
            if [*mapping] != keys:
                raise StateError(
                    f"a {type(mapping).__name__} that the step iterates over has the keys "
                    f"{brief([*mapping])} and had {brief(keys)} at capture, but the graph uses the "
                    f"old keys in their order. Restore the keys, or {AGAIN}."
                )
        if any(table.is_modified for table in self._tables):
            raise StateError(
                f"a module whose tensors the step iterates over has different parameters or "
                f"buffers than at capture, but the graph uses the old tensors. Remove the new "
                f"tensors, or {AGAIN}."
            )
        require_same(self._functions)
        is_changed = False
        try:
            require_same(self._held)
        except StateError:
            is_changed = True
        if is_changed:  # Renew outside of the handler, so that a new error has no context.
            self._renew()
            require_same(self._held)
        if any(space.is_modified for space in self._spaces):
            self._renew()
        if not self._memory.is_kept():
            moved = {*map(id, self._memory.moved())}
            path = next((e.path for e in self._held if id(e.value) in moved), "a named tensor")
            raise StateError(_stale(f"{path} no longer has its captured memory or layout"))
        for entry, seed in self._seeds:
            if (now := entry.value.initial_seed()) != seed:
                _refuse(entry, f"has the initial seed {now} and had {seed} at capture")

    def constants(self) -> tuple[Any, ...]:
        """Return the current plain values in hashable form, or raise StateError."""
        values = []
        for entry in self.plain:
            value = entry.now()
            if not isinstance(value, PLAIN):
                _refuse(entry, f"is {brief(value)} and was {brief(entry.value)} at capture")
            values.append(exact(value))
        return tuple(values)

    def require_kept(self) -> None:
        """Raise CaptureError if the step replaced a tensor, after restoring the tensor.

        Other places that the step changed are no longer compared. A change of a plain value is
        logged.
        """
        tensors = [entry for entry in self._held if isinstance(entry.value, torch.Tensor)]
        replaced = [entry for entry in tensors if entry.now() is not entry.value]
        for entry in replaced:
            entry.put_back()
        if replaced:
            raise CaptureError(rebinding("replaces", replaced[0].path))
        plain = ((e.path, e.value, e.now()) for e in self._held if isinstance(e.value, PLAIN))
        changes = [change for change in plain if change[1] != change[2]]
        if changes := [*changes, *changed_contents(self._held)]:
            logger.warning(text_of_changes(changes))
        self.leave_out_changes()

    def leave_out_changes(self, *, keeps: type = torch.Tensor) -> None:
        """Stop comparing places whose contents or plain value the step changed.

        Other places that it changed or added are no longer compared, except values of ``keeps``.
        """
        changed = [
            entry
            for entry in self._held
            if entry.is_modified or not is_equal(entry.value, entry.now())
        ]
        if changed or any(space.is_modified for space in self._spaces):
            named = self._walk()
            added = {entry.place for entry in named.places} - self._keys
            self._added |= added
            kept = {entry.place for entry in named.places if isinstance(entry.value, keeps)}
            self._own |= ({entry.place for entry in changed} | added) - kept
            self._own |= {entry.place for entry in changed if _is_counted(entry)}
            self._settle(named)

    def _renew(self) -> None:
        """Accept objects that equal the captured objects of their places, or raise StateError."""
        named, after = self._walk(), dict[str, list[Entry]]()
        for entry in self._places(named):
            after.setdefault(entry.path, []).append(entry)
        for entry in self._held:
            others = after.get(entry.path)
            now = others.pop(0).value if others else entry.now()
            if isinstance(entry.value, torch.Tensor) and entry.value is not now:
                raise StateError(_stale(f"{entry.path} is no longer the captured tensor"))
            if not is_alike(entry.value, now):
                _refuse(entry, f"is {brief(now)} and was {brief(entry.value)} at capture")
            if entry.is_modified:
                _refuse(entry, entry.modification)
        spaces = {id(space.value) for space in named.spaces}
        for entry in itertools.chain(*after.values()):
            is_read = named.is_named(entry) or entry.key in named.texts
            if id(entry.holder) in spaces and (is_read or id(entry.holder) in named.probed):
                _refuse(entry, f"is {brief(entry.value)} and did not exist at capture")
        self._settle(named)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield a tensor, or the tensors of a tuple, which are not separate places."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        yield from itertools.chain.from_iterable(map(_tensors_in, value))


def _is_counted(entry: Entry) -> bool:
    """Whether the contents of a place changed, or its plain value to one of the same type."""
    is_plain = isinstance(entry.value, PLAIN) and type(entry.now()) is type(entry.value)
    return entry.is_modified or is_plain


def _is_code(entry: Entry) -> bool:
    """Whether a place is a global or contains code, which few programs replace."""
    holder, value = entry.holder, entry.value
    if entry.key in OF_CODE:
        return True
    if isinstance(holder, dict):
        is_global = "__builtins__" in holder
        return is_global or isinstance(value, types.FunctionType | types.ModuleType | type)
    return isinstance(holder, type) and not isinstance(value, (torch.Tensor, *PLAIN))


def _grouped(functions: Sequence[Entry]) -> Iterator[Term]:
    """Yield terms that compare up to ``_TURN`` functions of one module each."""
    for _, group in itertools.groupby(functions, lambda entry: id(entry.holder)):
        entries = [*group]
        for at in range(0, len(entries), _TURN):
            keys, values = zip(*((e.key, e.value) for e in entries[at : at + _TURN]), strict=True)
            wanted = values if len(values) > 1 else values[0]
            yield "{}({}) == {}", (operator.itemgetter(*keys), entries[0].holder, wanted)


def _wholes(held: Iterable[Entry]) -> Iterator[tuple[dict[Any, Any], list[Any]]]:
    """Yield each dictionary whose values are all in ``held`` and satisfy ``is_distinct``.

    A comparison of unequal tensors with several elements raises, which counts as a difference.
    """
    holders = {id(entry.holder): entry.holder for entry in held if type(entry.holder) is dict}
    counts = Counter(id(entry.holder) for entry in held if is_distinct(entry.value))
    for number, holder in holders.items():
        if 1 < counts[number] == len(holder):
            yield holder, [*holder.values()]


def is_distinct(value: Any) -> bool:
    """Whether ``value == other`` raises, or is true only for ``value`` itself."""
    kind: Any = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return bool(value.numel() > 1)
    return bool(kind.__eq__ is object.__eq__)


def changed_contents(held: Iterable[Entry]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the path, the old and the new contents of each container that has changed."""
    for entry in held:
        if entry.is_modified:
            now = content_of(entry.value)
            path = f"len({entry.path})" if isinstance(now, int) else entry.path
            yield path, entry.content, now


_SHOWN = 8


def text_of_changes(changes: Iterable[tuple[str, Any, Any]]) -> str:
    """Return a warning about places that the step changed, each with its old and new value."""
    every = [
        f"{path} and back"
        if is_equal(old, new)
        else f"{path} advanced"
        if str(new).startswith(POSITION)
        else f"{path} from {brief(old)} to {brief(new)}"
        for path, old, new in changes
    ]
    shown = "; ".join(every[:_SHOWN]) + f" and {len(every) - _SHOWN} more" * (len(every) > _SHOWN)
    return (
        f"warm-up and capture changed Python state: {shown}. A replay does not change it, and uses "
        f"the captured values. Keep such state in tensors, or change it outside the step."
    )


def _stale(what: str) -> str:
    return (
        f"{what}, but the graph uses the old memory. Write new data into the old tensor with "
        f"copy_(), or {AGAIN}."
    )


def _refuse(entry: Entry, what: str) -> NoReturn:
    raise StateError(
        f"{entry.path} {what}, but the graph uses the captured state. Keep changing numbers in a "
        f"tensor, make the value a host argument of a marked function, or {AGAIN}."
    )


def is_alike(old: Any, new: Any) -> bool:
    """Whether two values are equal. Parts that are separate places are not compared."""
    if old is new:
        return True
    if isinstance(old, torch.Tensor | torch.nn.Module) or type(old) is not type(new):
        return False
    if isinstance(old, types.FunctionType):
        return old.__code__ is new.__code__ and is_alike(old.__defaults__, new.__defaults__)
    if isinstance(old, weakref.ref):
        return is_alike(old(), new())
    if isinstance(old, functools.partial):
        parts = [(p.func, *p.args, *itertools.chain(*p.keywords.items())) for p in (old, new)]
        return is_alike(*parts)
    if isinstance(old, tuple):
        return len(old) == len(new) and all(map(is_alike, old, new))
    if isinstance(old, list | deque):
        return len(old) == len(new)
    if is_array(old):
        kinds = ((a.dtype, a.shape, a.tobytes()) for a in (old, new))
        return next(kinds) == next(kinds)
    if isinstance(old, staticmethod | classmethod):
        return is_alike(old.__func__, new.__func__)
    # NumPy numbers have neither, so their values are compared.
    is_open = attributes_of(old) is not None or hasattr(type(old), "__slots__")
    if isinstance(old, dict) or (is_open and has_state(old) and not isinstance(old, enum.Enum)):
        return True
    return is_equal(old, new)
