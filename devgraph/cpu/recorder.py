"""The recorder, which writes the operations of a thread to a tape without executing them."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

from devgraph.api.errors import RegionError
from devgraph.api.marks.marks import Args, Kwargs
from devgraph.api.marks.source import is_machinery, user_line
from devgraph.api.session import SEEDING, SEEDING_CURE
from devgraph.api.tensors import describe, has_place, memory_of, tensors_in
from devgraph.api.torchlike.guards import draws
from devgraph.cpu import violations
from devgraph.cpu.memory import BlockPool, Hold
from devgraph.cpu.metadata import (
    DataDependentError,
    Layout,
    Metadata,
    OtherDeviceError,
    ResizeError,
    UnrecordableError,
    map_layouts,
    map_tensors,
)
from devgraph.cpu.modes import Dispatching, Functions, adapt_torch, restore_torch
from devgraph.cpu.ops import Kind, OpPlan, bind, bind_into, plan_of
from devgraph.cpu.randomness import Randomness
from devgraph.cpu.tape import Entry, Op, Span, Tape
from devgraph.cpu.violations import Refusal, Violation

# Dispatch keys above Python except autograd: off in a handler, but needed by decompositions.
_ABOVE = functools.reduce(
    lambda left, right: left | right,
    (
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
        for name in ("Conjugate", "Negative", "ZeroTensor")
    ),
)
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


class Recorder:
    """A recording of the operations of the current thread from ``__enter__`` to ``__exit__``.

    No operation is executed, and random generators are restored. Outputs are poisoned tensors of
    ``pool``, which every replay writes. Views are created immediately, because they are only
    aliases. Python code runs once, so replays repeat its control flow and its Python numbers.

    The code may use tensors of the other pools, ``others``. Memory outside of all pools must be at
    an address in ``bound``; None allows any memory. ``arguments`` and ``reached`` are the caller's
    tensors, and the code must not change the layout of ``arguments`` in place. A recording that
    ``continues`` follows others of the same step. ``states`` maps addresses of random generators to
    their latest states; the recording updates it. With ``on_violation``, violations are reported
    instead of raised, and the recording continues with assumed values and cannot be replayed.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        others: Sequence[BlockPool] = (),
        metadata: Metadata | None = None,
        bound: Collection[int] | None = None,
        arguments: Sequence[torch.Tensor] = (),
        reached: Sequence[torch.Tensor] = (),
        generators: Sequence[torch.Generator] = (),
        continues: bool = False,
        states: dict[int, torch.Tensor] | None = None,
        on_violation: Callable[[Violation], None] | None = None,
    ) -> None:
        self.parts: list[Entry | Span] = []
        """The recorded entries and finished spans."""
        self.open_span: Span | None = None
        self._inside: list[Entry] = []
        self.count = 0
        """Number of recorded operations."""
        self.touched: dict[int, torch.UntypedStorage] = {}
        """Memory outside the pools that the code used, by address."""
        self._bound = bound
        self._arguments, self._reached, self._generators = arguments, reached, generators
        self._versions: list[tuple[torch.Tensor, int]] = []
        """The caller's tensors with their version counters before the recording."""
        self._writes: Counter[int] = Counter()
        """Number of recorded writes, by the address of the memory."""
        self._made: dict[int, int] = {}
        """Version counter of the last tensor that was created at each address."""
        self._continues = continues
        self._pool = pool
        self._pools = (pool, *others)
        self._metadata = metadata or Metadata()
        self._refusal = Refusal(on_violation)
        self._function = ""
        self._autocast = False
        self._cached: bool | None = None
        """Whether autocast's cache was on before the recording; None outside a recording."""
        self._dispatching: Dispatching | None = None
        self._functions: Functions | None = None
        self._holds: list[Hold] = []
        self._identity = object()
        self._random: Randomness | None = None
        self._states = {} if states is None else states
        self._first_uses: list[tuple[torch.Tensor, int]] = []
        """The first tensor on each storage in ``touched``, and the number of earlier operations."""

    def __enter__(self) -> Recorder:
        assert self._cached is None, "a recorder cannot run two recordings at the same time"
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
            adapt_torch(self)
            if self._bound is None:
                # From here on, generation 0 contains the objects of this recording, and generation
                # 1 the objects of earlier segments.
                gc.collect(0 if self._continues else 1)
                self._random = Randomness(self._generators, self._states, self._refuse_seeding)
                tensors = (*self._arguments, *self._reached)
                self._versions = [(t, t._version) for t in tensors if not t.is_inference()]
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, failure: object = None, *_: object) -> None:
        try:
            if failure is None:
                self._finish()
        finally:
            try:
                self._leave()
            except BaseException:  # An interrupt must not leave modes on the thread.
                self._leave()
                raise

    def _finish(self) -> None:
        """Refuse unsupported work of a recording whose code did not fail."""
        try:
            if self._random is not None:
                self._random.refuse_set_states()
                for tensor, version in self._versions:
                    self._require_own_writes(tensor, version)
                self._refuse_foreign_results()
        except UnrecordableError as error:
            self._refusal.other("the step", str(error))

    def _leave(self) -> None:
        """Restore the state of the thread. Idempotent."""
        for mode in (self._dispatching, self._functions):
            if mode is not None:
                mode.remove(leftovers=[self._metadata.mode])
        restore_torch(self)
        if self._random is not None:
            self._random.end()
        if self._cached is not None:
            torch.set_autocast_cache_enabled(self._cached)
        self._cached = self._dispatching = self._functions = self._random = None
        self._first_uses, self._versions = [], []

    def tape(self) -> Tape:
        """Return the tape. The recording must have ended and must contain no assumed values."""
        assert self._cached is None and not self._refusal.collects
        return Tape(self.parts, self._holds)

    def append(self, run: Callable[[], object], op: Op) -> None:
        self.count += 1
        (self.parts if self.open_span is None else self._inside).append(Entry(run, op))

    @property
    def _entries(self) -> list[Entry]:
        """All entries except the entries inside loops."""
        spans = [[part] if isinstance(part, Entry) else part.entries for part in self.parts]
        return [entry for entries in spans for entry in entries]

    def begin_span(self, label: str) -> Span:
        """Begin and return the span of a region, which ``end_span`` ends; spans are not nested."""
        assert self.open_span is None, "spans cannot be nested"
        self.open_span, self._inside = Span(label), []
        return self.open_span

    def end_span(self, span: Span) -> None:
        span.entries = tuple(self._inside)
        self.parts.append(span)
        self.open_span = None

    def loop(self, body: Callable[[], None], going: torch.Tensor) -> int:
        """Record ``body`` as an entry that repeats while ``going``; return the node count."""
        outer, pool, op = self.parts, self._pool, self._op("a loop")
        # Use another pool: the next iteration may read older memory that this iteration frees.
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

    def call(
        self,
        name: str,
        run: Callable[[Any, Any], object],
        args: Sequence[Any],
        results: Sequence[tuple[int, torch.dtype]],
    ) -> list[torch.Tensor]:
        """Record ``run(results, args)`` as one operation and return its results.

        ``results`` lists the length and the dtype of each result, which is a flat tensor.
        """
        op = self._op(name)
        origin, empty = _Origin(self._identity, op), self._pool.empty
        made = [empty((count,), (1,), dtype, origin=origin) for count, dtype in results]
        self.append(functools.partial(run, self._hold(made), self._hold(tuple(args))), op)
        return made

    def escaping(self, outputs: Sequence[torch.Tensor] = ()) -> dict[int, Violation]:
        """Return violations for the blocks that outlive the recording, except for ``outputs``."""
        known = set(map(memory_of, outputs))
        return {
            block.address: Violation.at(
                block.origin.op.line,
                kind="escaping_allocation",
                op=block.origin.op.name,
                text=(
                    f"the result of {block.origin.op.name} is kept after the capture, but every "
                    f"replay overwrites it. Return it, or allocate it before the capture."
                ),
            )
            for block in self._pool.live()
            if isinstance(block.origin, _Origin)
            and block.origin.recording is self._identity
            and block.address not in known
        }

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Let ``escaping`` ignore the tensors that are allocated in the block."""
        identity, self._identity = self._identity, object()
        try:
            yield
        finally:
            self._identity = identity

    def _call_function(self, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """Run a torch function, or report that it reads tensors on the host."""
        self._autocast = torch.is_autocast_enabled("cpu")
        read = violations.HOST_READS.get(func)
        if read is not None and args[0].is_cpu and not _is_harmless(func, args, kwargs):
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

    def _call_operation(self, func: OpOverload, args: Args, kwargs: Kwargs) -> Any:
        plan = plan_of(func)
        try:
            for position in plan.writes:
                for tensor in tensors_in(plan.argument(position, args, kwargs)):
                    if tensor.is_cpu and has_place(tensor):
                        self._writes[memory_of(tensor)] += 1
            return _HANDLERS[plan.kind](self, plan, args, kwargs)
        except OtherDeviceError as error:
            if error.device.type == "meta":
                return func(*args, **kwargs)
            self._refusal.other(
                plan.name,
                f"{plan.name} works on {error.device}, but the CPU backend captures only work on "
                f"CPU tensors; move the model and its inputs to the CPU, or capture with the "
                f"backend of {error.device.type}",
            )
        except UnrecordableError as error:
            self._refusal.other(plan.name, str(error), cause=error.__cause__)

    def note_outputs(self, outputs: Iterable[torch.Tensor]) -> None:
        """Count returned tensors as uses of their memory."""
        for tensor in outputs:
            if tensor.is_cpu and has_place(tensor):
                self._alias_of(tensor)

    def _require_own_writes(self, tensor: torch.Tensor, version: int) -> None:
        """Refuse a tensor with more writes since ``version`` than the recording contains."""
        # Allow two increments per write, because some operations increase the version twice.
        if tensor._version - version > 2 * self._writes[memory_of(tensor)]:
            raise UnrecordableError(
                f"a tensor of the step ({describe(tensor)}) was written during the capture by "
                f"another thread, or by code that bypasses torch's dispatcher, and a replay would "
                f"not repeat the write. Write in the thread of the step, or in a function marked "
                f"@dg.no_graph under policy='breakable'"
            )

    def _run_now(self, plan: OpPlan, args: Args, kwargs: Kwargs) -> Any:
        return plan.func(*args, **kwargs)

    def _view(self, plan: OpPlan, args: Args, kwargs: Kwargs) -> Any:
        for tensor in tensors_in(args[:1]):
            if tensor.is_cpu and tensor.layout is torch.strided:
                self._touch(tensor)
        if plan.writes:
            self._require_own_layout(plan, args[0])
        view = self._run_now(plan, args, kwargs)
        if plan.writes and has_place(args[0]):  # set_() replaces the memory.
            self._writes[memory_of(args[0])] += 1
        return view

    def _require_own_layout(self, plan: OpPlan, tensor: torch.Tensor) -> None:
        """Refuse a layout change that no replay would repeat: the tensor outlives the step.

        Empty tensors and tensors of the capture may change.
        """
        if self._is_own(tensor, or_empty=True):
            return
        raise UnrecordableError(
            f"{plan.name} changes the layout of an argument of the step, or of a tensor that "
            f"outlives the step, in place. A replay would not repeat that change. Call it on a "
            f"view (tensor[...])"
        )

    def _is_own(self, tensor: torch.Tensor, *, or_empty: bool = False) -> bool:
        """Whether the step created ``tensor``; with ``or_empty``, also True for an empty tensor."""
        return not any(tensor is argument for argument in self._arguments) and (
            any(pool.alias(tensor) is not tensor for pool in self._pools)
            or (or_empty and not tensor.untyped_storage().nbytes())
            or any(tensor is other for n in (0, 1) for other in gc.get_objects(generation=n))
        )

    def _refuse_foreign_results(self) -> None:
        """Refuse tensors that another thread created during the recording.

        Such tensors are in generation 0 of the garbage collector, and no older object owns their
        memory. Known tensors are older, but stay there while another thread collects garbage.
        """
        known = {*map(id, self._arguments), *map(id, self._reached)}
        alive = (o for o in gc.get_objects(generation=0) if id(o) not in known)
        objects = [o for o in alive if issubclass(type(o), torch.Tensor)]
        young = set(map(id, objects))
        for tensor, count in self._first_uses:
            storage = tensor.untyped_storage()
            # Memory that torch did not allocate, such as a NumPy array, is constant host data.
            if id(tensor) not in young or not storage.resizable() or not storage.nbytes():
                continue
            owners = torch._C._storage_Use_Count(storage._cdata) - 1  # not counting ``storage``
            if owners <= sum(_is_on(other, storage) for other in objects):
                self._refusal.foreign(self._entries[min(count, self.count - 1)].op)

    def _decompose(self, plan: OpPlan, args: Args, kwargs: Kwargs) -> Any:
        hidden = _ABOVE | _AUTOCAST if self._autocast else _ABOVE
        include = torch._C._dispatch_tls_local_include_set()
        exclude = torch._C._dispatch_tls_local_exclude_set() - hidden
        assert self._dispatching is not None
        with torch._C._ForceDispatchKeyGuard(include, exclude), self._dispatching.again():
            return plan.func._op_dk(_COMPOSITE, *args, **kwargs)

    def _resize(self, plan: OpPlan, args: Args, kwargs: Kwargs) -> Any:
        target, wanted = args[0], args[1]
        size = wanted.shape if isinstance(wanted, torch.Tensor) else torch.Size(wanted)
        if target.shape != size:
            self._give_size(plan, target, size)
        return target

    def _give_size(self, plan: OpPlan, tensor: torch.Tensor, size: torch.Size) -> None:
        """Resize a tensor that the step created, and record a copy of its elements."""
        if not self._is_own(tensor) or tensor.storage_offset() or not tensor.is_contiguous():
            raise UnrecordableError(
                f"{plan.name} would resize a tensor from {tuple(tensor.shape)} to {tuple(size)}, "
                f"but memory has fixed addresses in a capture; allocate the final size first"
            )
        held, flat = self._hold(tensor).view(-1), (size.numel(),)
        made = self._make(plan, Layout(flat, (1,), tensor.dtype), None)
        if count := min(tensor.numel(), size.numel()):
            copied = self._hold(made)[:count], held[:count]
            self.append(functools.partial(torch.Tensor.copy_, *copied), self._op(plan.name))
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            tensor.set_(made.view(size))
        if not tensor.is_inference():
            self._made[memory_of(tensor)] = tensor._version
            self._writes[memory_of(tensor)] = 1  # the operation's own write

    def _allocate(self, plan: OpPlan, args: Args, kwargs: Kwargs) -> Any:
        return self._make(plan, self._metadata.infer(plan, args, kwargs), None)

    def _constant(self, plan: OpPlan, args: Args, kwargs: Kwargs) -> Any:
        if not args[0].is_cpu:
            return self._run_now(plan, args, kwargs)
        data = args[0].clone()  # The host may change the original.
        op = self._op(plan.name)
        out = self._make(plan, Layout.of(data), op)
        self.append(functools.partial(torch.Tensor.copy_, self._hold(out), data), op)
        if self._function != "__setitem__" and not _is_of_torch():
            self._refusal.note(
                "host_value",
                plan.name,
                "host data is copied into a tensor here, and replays use the captured data. Copy "
                "data that changes into an input tensor before the replay.",
            )
        return out

    def _host(self, plan: OpPlan, args: Args, kwargs: Kwargs) -> Any:
        name = violations.host_read_name(self._function, plan.name)
        is_torch = plan.func.namespace == "aten"
        if is_torch and not self._metadata.reads_data(plan, args, kwargs):
            return self._run_now(plan, args, kwargs)
        if not is_torch:
            raise UnrecordableError(
                f"{plan.name} needs the host while it runs; call it in a function marked "
                f"@dg.no_graph and capture with policy='breakable'"
            )
        assumed: Any = True
        if plan.func is torch.ops.aten._local_scalar_dense.default:
            assumed = violations.assumed_scalar(args[0].dtype)
        self._refusal.read(f"{name} ({plan.name})" if name != plan.name else name)
        return assumed

    def _index(self, plan: OpPlan, args: Args, kwargs: Kwargs) -> Any:
        masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        # A write of one host value, as in x[mask] = 0, needs no data-dependent shape.
        if masks and not (plan.writes and self._function == "__setitem__" and args[2].numel() == 1):
            self._refusal.shape(f"indexing with a boolean mask ({plan.name})", known=True)
            args = (args[0], [self._as_if_all(i) for i in args[1]], *args[2:])
        return self._compute(plan, args, kwargs)

    @staticmethod
    def _as_if_all(index: torch.Tensor | None) -> torch.Tensor | None:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            return index
        return torch.zeros(index.numel(), dtype=torch.int64, device=index.device)

    def _compute(self, plan: OpPlan, args: Args, kwargs: Kwargs) -> Any:
        if read := violations.read_by_backward(plan.name):
            self._refusal.shape(read, known=True)
        try:
            layouts = self._metadata.infer(plan, args, kwargs)
        except ResizeError as error:
            for tensor, size in error.wanted:
                self._give_size(plan, tensor, size)
            layouts = self._metadata.infer(plan, args, kwargs)
        except DataDependentError:
            layouts = violations.assumed_layouts(plan.name, args, kwargs)
            self._refusal.shape(plan.name, known=layouts is not None)
        op = self._op(plan.name)
        if self._note_random(plan, args, kwargs) and self._random is not None:
            self._random.draw(plan.generator(args, kwargs))
        held_args, held_kwargs = self._hold(args), self._hold(kwargs)
        run: Callable[[], object]
        outs = None
        if plan.returns and not (plan.writes and None not in plan.returns):
            outs = self._make(plan, layouts, op)
            run = bind_into(plan, held_args, held_kwargs, self._hold(outs))
        else:
            run = bind(plan.func, held_args, held_kwargs)
        given, made = tensors_in((args, kwargs)), tensors_in(outs)
        if any(t.is_floating_point() for t in made) and given and not any(map(_is_inexact, given)):
            run = _with_dtype(torch.get_default_dtype(), run)
        if plan.depends_on_grad and torch.is_grad_enabled():
            run = torch.enable_grad()(run)
        self.append(run, op)
        if outs is not None:
            return outs
        given = [plan.argument(p, args, kwargs) for p in plan.returns if p is not None]
        return tuple(given) if len(given) > 1 else next(iter(given), None)

    def _op(self, name: str) -> Op:
        return Op(name=name, line=user_line())

    def _make(self, plan: OpPlan, layouts: Any, op: Op | None) -> Any:
        origin = _Origin(self._identity, op or self._op(plan.name))

        def empty(layout: Layout) -> torch.Tensor:
            out = self._pool.empty(layout.size, layout.stride, layout.dtype, origin=origin)
            if not out.is_inference():
                self._made[address := memory_of(out)] = out._version
                self._writes[address] = 0
            return out

        return empty(layouts) if isinstance(layouts, Layout) else map_layouts(layouts, empty)

    def _alias_of(self, tensor: torch.Tensor) -> torch.Tensor:
        # A sparse or nested tensor has no single address.
        if tensor.layout is not torch.strided or tensor.is_nested:
            return tensor
        for pool in self._pools:
            alias = pool.alias(tensor)
            if alias is not tensor:
                version = self._made.get(memory_of(tensor))
                if version is not None and not tensor.is_inference():
                    self._require_own_writes(tensor, version)
                return alias
        self._touch(tensor)
        return tensor.detach()  # The user may change the layout of the original.

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
                f"{label} was run with new host arguments and used a tensor that the capture did "
                f"not use ({describe(tensor)} at {tensor.data_ptr():#x}), at {user_line()}. Its "
                f"address would stay in the recording when the tensor is replaced. Pass it to the "
                f"step as an argument, copy its data into an argument, or make its data_ptr() part "
                f"of the key (context=)."
            )
        self.touched[address] = storage
        self._first_uses.append((tensor, self.count))

    def _hold(self, value: Any) -> Any:
        if isinstance(value, dict) and not value:
            return value
        # Replays skip version counting for aliases that are created in inference mode.
        with torch._C._InferenceMode(True):
            aliases: dict[int, torch.Tensor] = {}  # One per tensor: kernels compare by identity.

            def held(tensor: torch.Tensor) -> torch.Tensor:
                if id(tensor) not in aliases:
                    aliases[id(tensor)] = self._alias_of(tensor)
                return aliases[id(tensor)]

            if isinstance(value, dict):
                return {name: map_tensors(item, held) for name, item in value.items()}
            return map_tensors(value, held)

    def _note_random(self, plan: OpPlan, args: Args, kwargs: Kwargs) -> bool:
        """Return whether an operation draws random numbers, and report it if so."""
        if not plan.seeded or not draws(plan.func, args, kwargs):
            return False
        if self.open_span is not None:
            raise UnrecordableError(
                f"{plan.name} draws random numbers inside the updatable "
                f"{self.open_span.label}, but a later recording could not continue the sequence; "
                f"draw the numbers before the region and pass them as arguments"
            )
        self._refusal.note(
            "rng",
            plan.name,
            f"{plan.name} draws random numbers; every replay draws new numbers, on backends with "
            f"the capability rng.",
        )
        return True

    def _refuse_seeding(self) -> None:
        self._refusal.note("seeding", "a random state", f"{SEEDING}. {SEEDING_CURE}.")
        if not self._refusal.collects:
            raise UnrecordableError(f"{SEEDING}. {SEEDING_CURE}")

    def _read(self, name: str, func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        self._refusal.read(name)
        tensor = args[0]
        if func is torch.Tensor.cpu:
            return tensor
        if func is torch.Tensor.__deepcopy__:
            return tensor.clone()
        with torch._C._DisableTorchDispatch():
            ones = torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device)
            return func(ones, *args[1:], **kwargs)


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _with_dtype(dtype: torch.dtype, run: Callable[[], object]) -> Callable[[], None]:
    """Return ``run`` under the default ``dtype``, that of float results of integer operations."""

    def run_with_dtype() -> None:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            run()
        finally:
            torch.set_default_dtype(before)

    return run_with_dtype


def _is_on(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    try:
        return bool(tensor.untyped_storage()._cdata == storage._cdata)
    except (NotImplementedError, RuntimeError):
        return False


def _is_of_torch() -> bool:
    """Whether torch code, not user code, called the function that is being recorded."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not Functions.__torch_function__.__code__:
        frame = frame.f_back
    return frame is not None and frame.f_back is not None and is_machinery(frame.f_back)


_TAKE_APART = torch.Tensor._reduce_ex_internal.__code__


def _is_harmless(func: Any, args: Args, kwargs: Kwargs) -> bool:
    """Whether a call of a function in ``HOST_READS`` reads no tensor on the host."""
    frame: FrameType | None = sys._getframe(1)
    if func is torch.Tensor.untyped_storage:
        codes = set()
        while frame is not None and is_machinery(frame):
            codes.add(frame.f_code)
            frame = frame.f_back
        # copy.copy() shares the memory and reads nothing.
        return _TAKE_APART not in codes or copy.copy.__code__ in codes
    if func is torch.Tensor.to:
        # A variable may contain the device of the backend; only a literal "cpu" means the host.
        devices = (*args[1:2], kwargs.get("device"))
        if not any(isinstance(device, str) and device == "cpu" for device in devices):
            return True
        while frame is not None and is_machinery(frame):
            frame = frame.f_back
        return frame is None or "cpu" not in frame.f_code.co_consts
    if func in (torch.tensor_split, torch.Tensor.tensor_split):
        return not any(isinstance(value, torch.Tensor) for value in (*args[1:], *kwargs.values()))
    return False


def one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Compute ``F.one_hot`` as devices do, without the range check of the CPU."""
    if num_classes <= 0 or tensor.dtype is not torch.int64:
        return torch._C._nn.one_hot(tensor, num_classes)
    out = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
    return out.scatter_(-1, tensor.unsqueeze(-1), 1)


class _Origin(NamedTuple):
    """The operation for which a block was allocated, and the identity of its recording."""

    recording: object
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
