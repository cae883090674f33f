"""Calls of marked functions in a capture. Replays repeat these calls."""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from devgraph.api.errors import CaptureError, RegionError, note
from devgraph.api.marks.marks import Args, Kwargs, Mark
from devgraph.api.modes import Settings
from devgraph.api.results import ResultCheck
from devgraph.api.tensors import (
    Place,
    byte_range,
    describe,
    effective_strides,
    has_place,
    is_size,
    memory_of,
    place_of,
    rewrite,
    tensors_in,
    unexpanded,
    with_bits_of,
)

if TYPE_CHECKING:
    from devgraph.api.pool import Pool


def _memories_held(
    fn: Callable[..., Any], *, stored: bool = True, parameters: bool = False
) -> set[int]:
    """Return the storage addresses of tensors in the closure, globals and ``self`` of ``fn``.

    ``stored`` includes tensors in variables and attributes. ``parameters`` includes the parameters
    and buffers of modules.
    """
    fn = inspect.unwrap(fn)
    holders = [getattr(fn, "__self__", None if inspect.isroutine(fn) else fn)]
    for cell in getattr(fn, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # an empty cell
            holders.append(cell.cell_contents)
    names = getattr(getattr(fn, "__code__", None), "co_names", ())
    variables = getattr(fn, "__globals__", {})
    holders.extend(variables[name] for name in names if name in variables)
    tensors: list[torch.Tensor] = []
    for holder in holders:
        if parameters and isinstance(holder, torch.nn.Module):
            tensors.extend((*holder.parameters(), *holder.buffers()))
        if not stored:
            continue
        if isinstance(holder, torch.Tensor | list | tuple | dict):
            tensors.extend(tensors_in(holder))
        elif not isinstance(holder, _CODE):
            values = getattr(holder, "__dict__", {}).values()
            fields = (value for value in values if isinstance(value, torch.Tensor | list | dict))
            tensors.extend(tensor for field in fields for tensor in tensors_in(field))
    return {memory_of(tensor) for tensor in tensors if has_place(tensor)}


def _is_released(memory: Any) -> bool:
    """Whether a storage, given by a weak reference, is free or becomes free in a few seconds.

    After a collective, a thread of the communicator keeps its tensors alive for a moment.
    """
    deadline = time.monotonic() + (0 if _is_in_object(memory) else _RELEASE_S)
    while not memory.expired() and time.monotonic() < deadline:
        time.sleep(0.001)
    return bool(memory.expired())


def _is_in_object(memory: Any) -> bool:
    """Whether a Python object other than the frame of a running function refers to a storage."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    held = []
    with torch._C.DisableTorchFunction():  # user code must not see these queries
        for tensor in tensors:
            with contextlib.suppress(RuntimeError):  # raised by tensors without a storage
                if tensor.untyped_storage()._cdata == memory.cdata:
                    held.append(tensor)
    holders = gc.get_referrers(*held)
    return any(h is not tensors and h is not held and type(h) is not FrameType for h in holders)


_RELEASE_S = 10.0
"""Seconds within which other threads must release the result of a marked function."""

_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
"""Types of holders whose attributes are not searched."""


def _has_no_tensor(node: Any) -> bool:
    """Whether ``node`` contains no tensor. A body may change such a node, which is not copied."""
    return not tensors_in(node)


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of ``tensors`` that share memory with each other as the originals do."""
    first = tensors[0]
    if len(tensors) == 1:
        made = torch.empty_strided(
            first.shape, first.stride(), dtype=first.dtype, device=first.device
        )
        copies = [with_bits_of(first, made)]
    else:
        ranges = [byte_range(tensor) for tensor in tensors]
        start = min(begin for begin, _ in ranges) // _ALIGNMENT * _ALIGNMENT
        size = -(-(max(end for _, end in ranges) - start) // _ALIGNMENT) * _ALIGNMENT
        memory = torch.empty(size // first.itemsize, dtype=first.dtype, device=first.device)
        copies = [
            _view_like(tensor, memory, begin - start)
            for tensor, (begin, _) in zip(tensors, ranges, strict=True)
        ]
    for copy, tensor in zip(copies, tensors, strict=True):
        rewrite(copy, tensor)
    return copies


_ALIGNMENT = 16  # alignment in bytes that suits every dtype


def _view_like(tensor: torch.Tensor, memory: torch.Tensor, start: int) -> torch.Tensor:
    """Return a view of ``memory``, from byte ``start`` on, with the layout of ``tensor``."""
    flat = memory if memory.dtype is tensor.dtype else memory.view(tensor.dtype)
    seen = flat.as_strided(tensor.shape, tensor.stride(), start // tensor.itemsize)
    return with_bits_of(tensor, seen)


def _with_layout(place: Place, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, or a view with its original layout ``place`` if the layout changed."""
    memory, offset, size, stride = place
    now = place_of(tensor)
    if now[1:] == place[1:] or now[0]._cdata != memory._cdata:
        return tensor
    return tensor.detach().as_strided(size, stride, offset)


class _GradientStop(torch.autograd.Function):
    """An identity function that keeps ``requires_grad`` of a result. Its backward raises.

    A replay does not record the marked function for autograd, so gradients would be missing.
    """

    @staticmethod
    def forward(ctx: Any, name: str, result: torch.Tensor, *anchors: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(result)
        ctx.name = name
        return result

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise CaptureError(
            f"a backward pass reached the result of {ctx.name}, which runs outside of the recorded "
            f"work, so a replay would lack its gradients. Mark the function that runs forward and "
            f"backward instead, or detach() the result."
        )


class _Watched(NamedTuple):
    """A result in memory that the call allocated, with a weak reference to the memory."""

    position: int
    requires_grad: bool
    memory: Any


class _Passed(NamedTuple):
    """A result that is a view of an argument or of a tensor in the function's state."""

    address: int
    layout: tuple[Any, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Passed:
        layout = tensor.dtype, tensor.shape, effective_strides(tensor), tensor.device
        return cls(tensor.data_ptr(), (*layout, tensor.is_conj(), tensor.is_neg()))

    def __repr__(self) -> str:
        dtype, shape, *_ = self.layout
        place = f"with address {self.address:#x}"
        return f"a view {place} of an argument or of a stored tensor, {dtype} {tuple(shape)}"


class MarkedCall:
    """A recorded call: the mark, its arguments and its results at fixed addresses.

    Results that are views of arguments, or of tensors that existed before the call in the
    function's closure, globals or object, are returned unchanged. The call copies other results
    into *bridges*: buffers at fixed addresses, which share memory if the results do.
    """

    __slots__ = """
        _known _owned _places _pool _results _returned_none _sharing _spec args index kwargs mark
        nodes note settings
    """.split()

    def __init__(self, pool: Pool, mark: Mark, args: Args, kwargs: Kwargs, index: int) -> None:
        def alias(leaf: Any) -> Any:
            return pool.alias(leaf) if isinstance(leaf, torch.Tensor) else leaf

        self._pool = pool
        self.mark = mark
        self.index = index
        self.settings = Settings.current()
        """torch's settings at the call, restored for later runs."""
        self.note: Any = None
        """Vendor data: captured nodes, a tape span, or the event of a task group."""
        self.nodes: range | None = None
        """The nodes of the call in the graph, if the backend reports them."""
        with torch._C.DisableTorchFunction():  # user code must not see these queries
            self.args: Args = pytree.tree_map(alias, args, is_leaf=_has_no_tensor)
            self.kwargs: Kwargs = pytree.tree_map(alias, kwargs, is_leaf=_has_no_tensor)
            placed = [leaf for leaf in self.tensors if has_place(leaf)]
            self._places = {id(leaf): place_of(leaf) for leaf in placed}
            """Storage and layout of each argument at the call; empty after the first later run."""
            self._owned = frozenset(map(memory_of, placed))
        self._known: list[Any] = []  # bridge, ``_Passed`` or value of each result
        self._sharing: list[tuple[int, int, int]] = []
        self._spec: pytree.TreeSpec | None = None
        self._returned_none = False
        self._results = ResultCheck(mark.name)

    def first_run(
        self,
        args: Args,
        kwargs: Kwargs,
        host: dict[str, Any],
        body: Callable[..., Any] | None = None,
        memory: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> Any:
        """Run ``body`` (by default the function) during the capture, and return its results.

        Bridges are allocated in ``memory()``.
        """
        # A stub may return memory that the function would not, so only the function is checked.
        own = body is None or body is self.mark.fn
        before = _memories_held(self.mark.fn) if own else set()
        given = tensors_in((args, kwargs))
        result = (body or self.mark.fn)(*args, **kwargs, **host)
        if [*map(id, tensors_in((args, kwargs)))] != [*map(id, given)]:
            raise CaptureError(
                f"{self.mark.name} adds, removes or replaces a tensor in a container among its "
                f"arguments, but replays pass a copy of the container. Write into tensors with "
                f"copy_(), or let {self.mark.name} reach the container through a closure or an "
                f"attribute."
            )
        out, self._spec = pytree.tree_flatten(result, is_leaf=is_size)
        self._returned_none = result is None
        del result
        watched: dict[int, _Watched] = {}
        with torch._C.DisableTorchFunction():
            if own:
                watched = self._pass_held(out, before)
            self._sharing = self._shared(out)
            self._known = [_Passed.of(o) if isinstance(o, torch.Tensor) else o for o in out]
        memories: dict[int, list[int]] = {}
        for index, first, _ in self._sharing:
            memories.setdefault(first, []).append(index)
        for members in memories.values():
            results = [out[index] for index in members]
            with memory():
                copies = _copies(results)
            for index, copy in zip(members, copies, strict=True):
                self._known[index] = copy.detach()  # otherwise, autograd would record each run
            if torch.is_grad_enabled() and any(r.requires_grad for r in results):
                # Include the arguments: grad() runs only nodes between its outputs and its inputs.
                anchors = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
                anchors.append(torch.empty((), requires_grad=True, device="cpu"))
                copies = [
                    _GradientStop.apply(self.mark.name, copy, *anchors)  # type: ignore[no-untyped-call]
                    if result.requires_grad and not copy.requires_grad
                    else copy
                    for copy, result in zip(copies, results, strict=True)
                ]
            one: dict[int, torch.Tensor] = {}  # A tensor that is returned twice stays one tensor.
            for index, kept, copy in zip(members, results, copies, strict=True):
                out[index] = one.setdefault(id(kept), copy)
            del results, kept, one
        self._refuse_stored(watched)
        return pytree.tree_unflatten(out, self._spec)

    def _pass_held(self, leaves: Sequence[Any], before: set[int]) -> dict[int, _Watched]:
        """Return the results to copy, by memory; other results are views of earlier tensors."""
        watched = {
            memory_of(leaf): _Watched(
                index,
                leaf.requires_grad,
                StorageWeakRef(leaf.untyped_storage()),  # type: ignore[no-untyped-call]
            )
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and has_place(leaf) and leaf.numel()
        }
        for memory in self._owned:
            watched.pop(memory, None)
        if watched:
            held = before | _memories_held(self.mark.fn, parameters=True, stored=False)
            self._owned |= held.intersection(watched)
            watched = {memory: seen for memory, seen in watched.items() if memory not in held}
        return watched

    def _refuse_stored(self, watched: dict[int, _Watched]) -> None:
        """Raise RegionError if the memory of a result outlives the call.

        Autograd may keep a result that requires grad. Such a result is refused only if it is in the
        function's closure, globals or object.
        """
        alive = {memory: seen for memory, seen in watched.items() if not seen.memory.expired()}
        held = _memories_held(self.mark.fn) if alive else set[int]()
        alive = {m: seen for m, seen in alive.items() if not seen.requires_grad or m in held}
        if alive:
            gc.collect()  # A traceback may hold the frame of the function in a cycle.
        for memory, seen in alive.items():
            if seen.memory.expired() or (memory not in held and _is_released(seen.memory)):
                continue
            raise RegionError(
                f"{self.mark.name} returned a tensor (result {seen.position}) that is also stored "
                f"elsewhere, such as in a global, a closure, an attribute or a cache. Results have "
                f"fixed addresses, so later runs would update only one of the two tensors: return "
                f"a clone() of it."
            )

    def _shared(self, leaves: Sequence[Any]) -> list[tuple[int, int, int]]:
        """Return a tuple for each result that must be copied.

        It contains the position of the result, the position of the first result in the same memory,
        and the offset from this first result in bytes.
        """
        firsts: dict[int, tuple[int, int]] = {}
        shared = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and not has_place(leaf):
                raise RegionError(
                    f"{self.mark.name} returned a {leaf.layout} tensor, which has no fixed memory "
                    f"for later code to read. Return its parts, such as values(), or use the "
                    f"tensor only inside the marked function."
                )
            if isinstance(leaf, torch.Tensor) and memory_of(leaf) not in self._owned:
                # Use the offset in the storage: a tensor without elements has no address.
                place = int(leaf.storage_offset()) * leaf.itemsize
                first, at = firsts.setdefault(memory_of(leaf), (index, place))
                shared.append((index, first, place - at))
        return shared

    def alias_bridges(self) -> None:
        """Replace the bridges with aliases, so that the pool can reuse their memory."""
        self._known = [
            self._pool.alias(known) if isinstance(known, torch.Tensor) else known
            for known in self._known
        ]

    def run(self, host: dict[str, Any]) -> None:
        """Run the function again with other host values; write results to the fixed addresses."""
        self._settle()
        try:
            if self.settings.are_active():
                self._deliver_all(self.mark.fn(*self.args, **self.kwargs, **host))
            else:
                with self.settings.restored():
                    self._deliver_all(self.mark.fn(*self.args, **self.kwargs, **host))
        except Exception as error:
            note(error, f"in {self.mark.name}, marked call {self.index} of its capture")
            raise

    def _settle(self) -> None:
        """Use views with the original layout for arguments whose layout has changed."""
        places, self._places = self._places, {}
        if places:
            self.args, self.kwargs = pytree.tree_map(
                lambda leaf: _with_layout(places[id(leaf)], leaf) if id(leaf) in places else leaf,
                (self.args, self.kwargs),
                is_leaf=_has_no_tensor,
            )

    def _deliver_all(self, result: Any) -> None:
        if result is None and self._returned_none:
            return
        leaves, spec = pytree.tree_flatten(result, is_leaf=is_size)
        self._results.structure(spec, self._spec)
        sharing = self._shared(leaves)
        for leaf, known in zip(leaves, self._known, strict=True):
            self._check(leaf, known)
        if sharing != self._sharing:
            raise RegionError(
                f"{self.mark.name} returned tensors that share memory with each other, or with an "
                f"argument, differently than at capture. Later code reads fixed addresses: "
                f"return a clone() where tensors share memory for some values only."
            )
        for leaf, known in zip(leaves, self._known, strict=True):
            if isinstance(known, torch.Tensor):
                rewrite(known, leaf)

    def _check(self, leaf: Any, known: Any) -> None:
        if isinstance(known, torch.Tensor):
            self._results.layout(leaf, known)
            return
        now = _Passed.of(leaf) if isinstance(leaf, torch.Tensor) else leaf
        if known is not now and known != now:
            self._results.refuse(describe(leaf), repr(known))

    def bound_run(self, host: dict[str, Any]) -> Callable[[], Any]:
        """Return ``run`` bound to the dictionary ``host``, for the current torch modes.

        If the result is None or one tensor, the returned callable is faster than ``run``.
        """
        self._settle()
        assert self._spec is not None
        target = self._known[0] if self._spec.is_leaf() and not self._returned_none else None
        is_plain = isinstance(target, torch.Tensor) and unexpanded(target) is target
        if not self.settings.are_active() or not (is_plain or self._returned_none):
            return functools.partial(self.run, host)
        fn, args, kwargs, owned = self.mark.fn, self.args, self.kwargs, self._owned
        deliver, returned_none = self._deliver_all, self._returned_none
        bridge = target if isinstance(target, torch.Tensor) else torch.empty(0, device="cpu")
        shape, stride, dtype, device = bridge.shape, bridge.stride(), bridge.dtype, bridge.device
        copy = bridge.copy_

        def run_fast() -> None:
            result = fn(*args, **kwargs, **host)
            if result is None and returned_none:
                return
            if (
                type(result) is not torch.Tensor
                or returned_none
                or result.shape != shape
                or result.dtype is not dtype
                or result.stride() != stride
                or result.device != device
                or result.requires_grad
                or result.untyped_storage().data_ptr() in owned
            ):
                deliver(result)
            else:
                copy(result)

        return run_fast

    @property
    def tensors(self) -> Sequence[torch.Tensor]:
        return tensors_in((self.args, self.kwargs))
