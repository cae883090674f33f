"""The recorder: notes what a thread asks of torch on a tape, and executes none of it."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Sequence
from types import FrameType
from typing import Any, NamedTuple

import attrs
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from devgraph.api.errors import RegionError
from devgraph.api.marks.source import user_line
from devgraph.api.tensors import describe
from devgraph.api.torchlike.guards import draws
from devgraph.cpu import violations
from devgraph.cpu.memory import BlockPool, Hold
from devgraph.cpu.metadata import (
    DataDependentError,
    Layout,
    Metadata,
    OtherDeviceError,
    UnrecordableError,
    map_layouts,
    map_tensors,
)
from devgraph.cpu.modes import Dispatching, Functions
from devgraph.cpu.ops import Binder, Kind, OpPlan, plan_of
from devgraph.cpu.tape import Entry, Op, Span, Tape
from devgraph.cpu.violations import Refusal, Violation

# What stands above Python in the dispatcher, apart from autograd. A handler runs with these
# switched off, and an operation that is made of others must see them again.
_ABOVE = functools.reduce(
    lambda left, right: left | right,
    (
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
        for name in ("Conjugate", "Negative", "ZeroTensor")
    ),
)
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


class Knowledge:
    """What recordings learn of torch's operations; shared by those of a backend."""

    def __init__(self) -> None:
        self.metadata = Metadata()
        self.binder = Binder()


class Recorder:
    """Records the operations of the current thread between ``__enter__`` and ``__exit__``.

    Nothing is executed and no random number is drawn; outputs are poisoned tensors in the pool's
    memory, which every replay of the tape writes. Views are made at once, since they are only
    aliases. Python runs once, so its control flow and its numbers are frozen.

    Args:
        pool: gives the memory of outputs.
        others: pools whose tensors may occur too; none of them is kept from reuse by the tape.
        knowledge: what earlier recordings learned; learned anew if None.
        bound: addresses of the only memory outside the pools that may be touched; any if None.
        arguments: tensors whose layout the code may not change in place.
        on_violation: called for everything that a device capture would refuse or freeze; the
            recording goes on with assumed values and cannot be replayed. Without it, what is
            refused raises.

    Raises:
        HostReadError: the code reads tensor data on the host or needs it for a shape.
        CaptureError: the code does something else that cannot be recorded.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        others: Sequence[BlockPool] = (),
        knowledge: Knowledge | None = None,
        bound: Collection[int] | None = None,
        arguments: Sequence[torch.Tensor] = (),
        on_violation: Callable[[Violation], None] | None = None,
    ) -> None:
        self.parts: list[Entry | Span] = []
        """What is recorded so far, in order, without an open span."""
        self.open_span: Span | None = None
        self._inside: list[Entry] = []
        self.count = 0
        """How many operations are recorded so far."""
        self.touched: dict[int, torch.UntypedStorage] = {}
        """Memory outside the pools that the recording touches, by address."""
        self._bound = bound
        self._arguments = arguments
        self._pool = pool
        self._pools = (pool, *others)
        knowledge = knowledge or Knowledge()
        self._metadata = knowledge.metadata
        self._binder = knowledge.binder
        self._refusal = Refusal(on_violation)
        self._function = ""
        self._autocast = False
        self._cached: bool | None = None
        """Whether autocast remembered its casts before the recording; None while none is made."""
        self._dispatching: Dispatching | None = None
        self._functions: Functions | None = None
        self._holds: list[Hold] = []
        self._mark = object()

    def __enter__(self) -> Recorder:
        assert self._cached is None, "a recorder records one thing at a time"
        self._cached = torch.is_autocast_cache_enabled()
        try:
            torch.set_autocast_cache_enabled(False)
            torch.clear_autocast_cache()
            self._autocast = torch.is_autocast_enabled("cpu")
            self._holds = [pool.hold() for pool in self._pools]
            self._pool.begin_recording()
            self._functions = Functions(self._call_function, self)
            self._dispatching = Dispatching(self._call_operation, self)
            self._functions.install()
            self._dispatching.install()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        try:
            self._leave()
        except BaseException:  # An interrupt; the thread must not go on with half of it.
            self._leave()
            raise

    def _leave(self) -> None:
        """Give the thread back what it was before. Idempotent."""
        for mode in (self._dispatching, self._functions):
            if mode is not None:
                mode.remove()
        if self._cached is not None:
            torch.set_autocast_cache_enabled(self._cached)
        self._cached = self._dispatching = self._functions = None

    def tape(self) -> Tape:
        """Return the recording, which has ended and assumed no values, as a tape."""
        assert self._cached is None and not self._refusal.collects
        return Tape(self.parts, self._holds)

    def append(self, run: Callable[[], object], op: Op) -> None:
        """Add one step."""
        self.count += 1
        (self.parts if self.open_span is None else self._inside).append(Entry(run, op))

    def begin_span(self, label: str) -> Span:
        """Start the part of one region; ``end_span`` ends it. Spans do not nest."""
        assert self.open_span is None, "a span inside a span"
        self.open_span, self._inside = Span(label), []
        return self.open_span

    def end_span(self, span: Span) -> None:
        """End ``span``: everything recorded since its begin is its entries."""
        span.entries = tuple(self._inside)
        self.parts.append(span)
        self.open_span = None

    def loop(self, body: Callable[[], None], going: torch.Tensor) -> int:
        """Record what ``body`` does as one step, which repeats it while ``going`` is true; return
        the number of operations in it."""
        outer, pool, op = self.parts, self._pool, self._op("a loop")
        # What was made before may come free in the body, whose next turn still reads it.
        self.parts, self._pool = [], self._pools[1]
        self._pool.begin_recording()
        try:
            body()
            tape = Tape(self.parts, ())
        finally:
            self.parts, self._pool = outer, pool
        held = self._hold(going)

        def run() -> None:
            while held.item():
                tape.replay()

        self.parts.append(Entry(run, op, tape))
        self.count += 1
        return len(tape)

    @staticmethod
    def current() -> Recorder | None:
        """Return what records the operations of this thread now."""
        modes = (mode for mode in Dispatching.stack() if isinstance(mode, Dispatching))
        return next((mode.recorder for mode in modes if not mode.over), None)

    def call(
        self,
        name: str,
        run: Callable[[Any, Any], object],
        args: Sequence[Any],
        results: Sequence[tuple[int, torch.dtype]],
    ) -> list[torch.Tensor]:
        """Record ``run(results, args)`` as one operation and return its results, flat tensors of so
        many elements of a dtype."""
        op = self._op(name)
        origin, empty = _Origin(self._mark, op), self._pool.empty
        made = [empty((count,), (1,), dtype, origin=origin) for count, dtype in results]
        self.append(functools.partial(run, self._hold(made), self._hold(tuple(args))), op)
        return made

    def escaping(self, outputs: Sequence[torch.Tensor] = ()) -> list[Violation]:
        """Return the allocations of this recording that outlive it and are not ``outputs``.

        The next replay, or another graph of the pool, overwrites what such a tensor holds.
        """
        known = {tensor.untyped_storage().data_ptr() for tensor in outputs}
        return [
            Violation.at(
                block.origin.op.line,
                kind="escaping_allocation",
                op=block.origin.op.name,
                text=(
                    f"the result of {block.origin.op.name} is kept after the capture; every replay "
                    f"overwrites it. Return it, or allocate it before the capture."
                ),
            )
            for block in self._pool.live()
            if isinstance(block.origin, _Origin)
            and block.origin.mark is self._mark
            and block.address not in known
        ]

    # What the modes call.

    def _call_function(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a function of torch, unless it reads tensors on the host without an operation."""
        self._autocast = torch.is_autocast_enabled("cpu")
        read = violations.HOST_READS.get(func)
        if read is not None and args[0].is_cpu:
            return self._read(read, func, args, kwargs)
        if func is torch._C._nn.one_hot:
            func = one_hot
        made = violations.CONSTRUCTORS.get(func)
        if made is not None and violations.reads_tensors(args, kwargs):
            self._refusal.read(made)
        outer, self._function = self._function, getattr(func, "__name__", "")
        try:
            return func(*args, **kwargs)
        finally:
            self._function = outer

    def _call_operation(
        self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Record one operation and return what it returns."""
        plan = plan_of(func)
        try:
            return _HANDLERS[plan.kind](self, plan, args, kwargs)
        except OtherDeviceError as error:
            if error.device.type == "meta":
                return func(*args, **kwargs)
            self._refusal.other(
                plan.name,
                f"{plan.name} works on {error.device}, and the CPU backend captures work on CPU "
                f"tensors only: move the model and its inputs to the CPU, or capture with the "
                f"backend of {error.device.type}",
            )
        except UnrecordableError as error:
            self._refusal.other(plan.name, str(error), cause=error.__cause__)

    # One method per kind of operation.

    def _run_now(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return plan.func(*args, **kwargs)

    def _view(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if plan.writes and self._outlives(args):
            raise UnrecordableError(
                f"{plan.name} changes in place the layout of an argument of the step, or of a "
                f"tensor that outlives it, and a replay would not. Call it on a view of the "
                f"tensor: tensor[...]"
            )
        return self._run_now(plan, args, kwargs)

    def _outlives(self, args: tuple[Any, ...]) -> bool:
        """Whether the first of ``args`` is an argument, or lies outside the recording and more
        than names of the step's own refer to it: an attribute, a closure, a container."""
        if any(args[0] is argument for argument in self._arguments):
            return True
        if any(pool.alias(args[0]) is not args[0] for pool in self._pools):
            return False
        # The arguments of calls are tuples, and what a frame knows of its names has no holder.
        holders = [h for h in gc.get_referrers(args[0]) if not isinstance(h, tuple | FrameType)]
        return any(map(self._is_held, holders))

    @staticmethod
    def _is_held(holder: object) -> bool:
        """Whether anything refers to ``holder`` besides the list that it was found in."""
        return len(gc.get_referrers(holder)) > 1

    def _decompose(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = _ABOVE | _AUTOCAST if self._autocast else _ABOVE
        include = torch._C._dispatch_tls_local_include_set()
        exclude = torch._C._dispatch_tls_local_exclude_set() - hidden
        assert self._dispatching is not None
        with torch._C._ForceDispatchKeyGuard(include, exclude), self._dispatching:
            return plan.func._op_dk(_COMPOSITE, *args, **kwargs)

    def _resize(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target, wanted = args[0], args[1]
        size = wanted.shape if isinstance(wanted, torch.Tensor) else torch.Size(wanted)
        if target.shape == size:
            return target
        raise UnrecordableError(
            f"{plan.name} would resize a tensor from {tuple(target.shape)} to {tuple(size)}; "
            f"memory has fixed addresses in a capture, so allocate the final size before"
        )

    def _allocate(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._make(plan, self._metadata.infer(plan, args, kwargs), None)

    def _constant(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args[0].is_cpu:
            return self._run_now(plan, args, kwargs)
        data = args[0].clone()  # frozen: what the host does with its own copy is not replayed
        op = self._op(plan.name)
        out = self._make(plan, Layout.of(data), op)
        self.append(functools.partial(torch.Tensor.copy_, self._hold(out), data), op)
        if self._function != "__setitem__":
            self._refusal.note(
                "host_value",
                plan.name,
                "host data becomes a tensor here; a replay sees the data of capture. Copy changing "
                "data into an input tensor before the replay.",
            )
        return out

    def _host(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = violations.host_read_name(self._function, plan.name)
        if plan.func.namespace != "aten":
            raise UnrecordableError(
                f"{plan.name} needs the host while it runs; call it in a function marked "
                f"@dg.no_graph and capture with policy='breakable'"
            )
        assumed: Any = True
        if plan.func is torch.ops.aten._local_scalar_dense.default:
            assumed = violations.assumed_scalar(args[0].dtype)
        self._refusal.read(f"{name} ({plan.name})" if name != plan.name else name)
        return assumed

    def _index(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        # One number put under a mask is a masked fill, whose shape does not depend on the mask.
        # The number itself must come from the host, as in x[mask] = 0.
        if masks and not (plan.writes and self._function == "__setitem__" and args[2].numel() == 1):
            self._refusal.shape(f"indexing with a boolean mask ({plan.name})", known=True)
            args = (args[0], [self._as_if_all(i) for i in args[1]], *args[2:])
        return self._compute(plan, args, kwargs)

    @staticmethod
    def _as_if_all(index: torch.Tensor | None) -> torch.Tensor | None:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return index
        return torch.zeros(index.numel(), dtype=torch.int64, device=index.device)

    def _compute(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            layouts = self._metadata.infer(plan, args, kwargs)
        except DataDependentError:
            layouts = violations.assumed_layouts(plan.name, args, kwargs)
            self._refusal.shape(plan.name, known=layouts is not None)
        op = self._op(plan.name)
        self._note_random(plan, args, kwargs)
        held_args, held_kwargs = self._hold(args), self._hold(kwargs)
        if plan.returns and not (plan.writes and None not in plan.returns):
            outs = self._make(plan, layouts, op)
            self.append(self._binder.compute(plan, held_args, held_kwargs, self._hold(outs)), op)
            return outs
        self.append(self._binder.bind(plan.func, held_args, held_kwargs), op)
        given = [plan.argument(p, args, kwargs) for p in plan.returns if p is not None]
        return tuple(given) if len(given) > 1 else next(iter(given), None)

    # Helpers.

    def _op(self, name: str) -> Op:
        return Op(name=name, line=user_line())

    def _make(self, plan: OpPlan, layouts: Any, op: Op | None) -> Any:
        origin, empty = _Origin(self._mark, op or self._op(plan.name)), self._pool.empty
        if isinstance(layouts, Layout):
            return empty(layouts.size, layouts.stride, layouts.dtype, origin=origin)
        return map_layouts(
            layouts, lambda one: empty(one.size, one.stride, one.dtype, origin=origin)
        )

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        for pool in self._pools:
            alias = pool.alias(tensor)
            if alias is not tensor:
                return alias
        self._touch(tensor)
        return tensor.detach()  # whose layout nobody changes

    def _touch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address in self.touched:
            return
        for pool in self._pools:
            if pool.covers(address):
                return
        places = {address, tensor.data_ptr()}
        if self._bound is not None and address and places.isdisjoint(self._bound):
            label = "the recording" if self.open_span is None else self.open_span.label
            raise RegionError(
                f"{label} was run with new host arguments and touched a tensor that the capture "
                f"did not ({describe(tensor)} at {tensor.data_ptr():#x}), at {user_line()}. Its "
                f"address would stay in the recording when the tensor is replaced. Hand it to the "
                f"step as an argument, copy its data into a tensor that is, or make its data_ptr() "
                f"part of the key (context=)."
            )
        self.touched[address] = storage

    def _hold(self, value: Any) -> Any:
        if isinstance(value, dict) and not value:
            return value
        # Replays run in inference mode, where aliases made in it need no version counting.
        with torch._C._InferenceMode(True):
            if isinstance(value, dict):
                return {name: map_tensors(item, self._held) for name, item in value.items()}
            return map_tensors(value, self._held)

    def _note_random(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not plan.seeded or not draws(plan.func, args, kwargs):
            return
        if self.open_span is not None:
            raise UnrecordableError(
                f"{plan.name} draws random numbers inside the updatable "
                f"{self.open_span.label}, and a recording made later could not continue the "
                f"sequence; draw them before the region and pass them in"
            )
        self._refusal.note(
            "rng",
            plan.name,
            f"{plan.name} draws random numbers; every replay draws new ones, on backends whose "
            f"capabilities say rng.",
        )

    def _read(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._refusal.read(name)
        tensor = args[0]
        if func is torch.Tensor.cpu:
            return tensor
        if func is torch.Tensor.__deepcopy__:
            return tensor.clone()
        with torch._C._DisableTorchDispatch():
            ones = torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            return func(ones, *args[1:], **kwargs)


@attrs.frozen
class _View:
    """Where one returned tensor lies."""

    storage: int
    """Index of a result storage; or, if negative, -1 minus the index of an argument."""
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, results: Sequence[torch.Tensor], args: Sequence[Any]) -> torch.Tensor:
        base = results[self.storage] if self.storage >= 0 else args[-1 - self.storage]
        view: torch.Tensor = base.as_strided(self.size, self.stride, self.offset)
        return view


@attrs.frozen
class _Shape:
    """What a piece returns for arguments of given layouts."""

    storages: tuple[tuple[int, torch.dtype], ...]
    """Elements and dtype of every storage that the piece makes."""
    leaves: tuple[Any, ...]
    """A ``_View`` per returned tensor; anything else is returned as it is."""
    spec: pytree.TreeSpec


def _place(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor):
        return int(argument)
    place = argument.shape, argument.stride(), argument.storage_offset()
    return argument.dtype, *place


class CompiledPiece:
    """A piece that a recording sees as one operation: ``run``, compiled from ``source``, takes and
    returns tensors and numbers.

    It writes memory through its own machine code, out of sight of torch's dispatcher. So its
    results are flat storages, and what it returns are views of these or of its inputs, as they
    would be without compilation.
    """

    def __init__(self, run: Callable[..., Any], source: torch.fx.GraphModule) -> None:
        self._run = run
        self._source = source
        self._shapes: dict[Any, _Shape] = {}

    def __call__(self, *args: Any) -> Any:
        key, recorder = tuple(map(_place, args)), Recorder.current()
        if key not in self._shapes:  # in a warm-up run
            self._shapes[key] = self._learn(args)
        if recorder is None:
            return self._run(*args)
        shape = self._shapes[key]
        write = functools.partial(self._write, shape.leaves)
        results = recorder.call("a compiled piece", write, args, shape.storages)
        leaves = [
            leaf.of(results, args) if isinstance(leaf, _View) else leaf for leaf in shape.leaves
        ]
        return pytree.tree_unflatten(leaves, shape.spec)

    def _learn(self, args: Sequence[Any]) -> _Shape:
        with torch.no_grad(), FakeTensorMode():
            fakes = [
                torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="cpu")
                if isinstance(a, torch.Tensor)
                else int(a)
                for a in args
            ]
            leaves, spec = pytree.tree_flatten(self._source(*fakes))
        owner = {
            fake.untyped_storage()._cdata: -1 - index
            for index, fake in enumerate(fakes)
            if isinstance(fake, torch.Tensor)
        }
        storages: list[tuple[int, torch.dtype]] = []
        out: list[Any] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                out.append(leaf)
                continue
            storage = leaf.untyped_storage()
            if storage._cdata not in owner:
                owner[storage._cdata] = len(storages)
                storages.append((int(storage.nbytes()) // leaf.dtype.itemsize, leaf.dtype))
            at = owner[storage._cdata]
            offset = int(leaf.storage_offset())
            if at < 0:
                offset += int(args[-1 - at].storage_offset())
            out.append(_View(at, leaf.dtype, tuple(map(int, leaf.shape)), leaf.stride(), offset))
        return _Shape(tuple(storages), tuple(out), spec)

    def _write(
        self, leaves: Sequence[Any], results: Sequence[torch.Tensor], args: Sequence[Any]
    ) -> None:
        """Run the compiled code, and leave what it made in ``results``."""
        returned = pytree.tree_leaves(self._run(*args))
        for leaf, view in zip(returned, leaves, strict=True):
            if isinstance(view, _View) and view.storage >= 0:
                view.of(results, ()).copy_(leaf)


def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """What one_hot does on a device: with a given number of classes it does not look at the data,
    while on the CPU torch looks for classes out of range."""
    if num_classes <= 0 or tensor.dtype is not torch.int64:
        return torch._C._nn.one_hot(tensor, num_classes)
    out = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
    return out.scatter_(-1, tensor.unsqueeze(-1), 1)


class _Origin(NamedTuple):
    """Which recording made a block, and for what. Names the recording by a mark: a block that
    lives on must not keep a whole recording."""

    mark: object
    op: Op


_HANDLERS: dict[Kind, Callable[[Recorder, OpPlan, tuple[Any, ...], dict[str, Any]], Any]] = {
    Kind.DECOMPOSE: Recorder._decompose,
    Kind.VIEW: Recorder._view,
    Kind.METADATA: Recorder._run_now,
    Kind.RESIZE: Recorder._resize,
    Kind.ALLOCATE: Recorder._allocate,
    Kind.CONSTANT: Recorder._constant,
    Kind.HOST: Recorder._host,
    Kind.BOOLEAN_INDEX: Recorder._index,
    Kind.MUTATE: Recorder._compute,
    Kind.COMPUTE: Recorder._compute,
}
