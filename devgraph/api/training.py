"""Graphed training: a forward and a backward graph in one autograd function."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from devgraph.api.backend import new_graph
from devgraph.api.errors import (
    CaptureError,
    InputError,
    InputTypeError,
    StateError,
    brief,
    counted,
    whole,
)
from devgraph.api.graph import DeviceGraph
from devgraph.api.guard import Guard
from devgraph.api.marks.scopes import GraphScope
from devgraph.api.modes import autocast_cached
from devgraph.api.owned import Owned, require_place, without_history
from devgraph.api.pool import Pool
from devgraph.api.prove import Case, Failure, Report, compare, randomize
from devgraph.api.reach import entries
from devgraph.api.registry import get_backend
from devgraph.api.session import session
from devgraph.api.snapshots import DEFAULT_LIMIT
from devgraph.api.tensors import (
    overlaps_itself,
    overwrite,
    share_memory,
    unexpanded,
)
from devgraph.api.trees import leaves_of, mapped

_GROUPED = frozenset(
    getattr(torch, name) for name in "float64 float32 float16 bfloat16 int64 int32 bool".split()
)
"""Dtypes that a grouped copy supports on every device."""


class StaticInputs:
    """Copies of a step's arguments in static tensors, which receive the data of later calls."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self._by_id: dict[int, torch.Tensor] = {}
        self.args = tuple([mapped(self._own, argument) for argument in args])
        self.kwargs = {name: mapped(self._own, argument) for name, argument in kwargs.items()}
        self._copied = [
            (index, tensor)
            for index, tensor in enumerate(self.tensors)
            if not isinstance(tensor, torch.nn.Parameter)
        ]
        own = {*map(id, self.tensors)}
        for path, leaf in leaves_of("argument", [*self.args, self.kwargs]):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in own:
                raise CaptureError(
                    f"{path} is in a container whose tensors cannot be replaced. Register the "
                    f"class with torch.utils._pytree.register_pytree_node, or pass a dict."
                )
        if all(t.dtype in _GROUPED and not overlaps_itself(t) for _, t in self._copied):
            self._copy = self._grouped_copy()
        else:
            self._copy = self._copy_each

    def _own(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        static: torch.Tensor = leaf
        if not isinstance(leaf, torch.nn.Parameter):
            require_place("a tensor of the call", leaf)
            if leaf.is_quantized:
                raise CaptureError("a tensor of the call is quantized: pass q.int_repr() instead")
            if names := [n for n in vars(leaf) if n[0] != "_"]:
                raise CaptureError(
                    f"a tensor of the call has attributes ({', '.join(names)}), which its static "
                    f"copy in the graph does not have. Pass them as arguments."
                )
            if id(leaf) not in self._by_id:
                self._by_id[id(leaf)] = _copy_of(leaf).requires_grad_(leaf.requires_grad)
            static = self._by_id[id(leaf)]
        self.tensors.append(static)
        return static

    def arguments_with(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
        """Return the arguments with their tensors replaced by ``tensors``, in order."""
        replaced = functools.partial(mapped, _in_order(tensors))
        args = [replaced(argument) for argument in self.args]
        return args, {name: replaced(argument) for name, argument in self.kwargs.items()}

    @functools.cached_property
    def _needs_no_grad(self) -> bool:
        # The step may have set ``requires_grad`` after the constructor.
        return any(static.requires_grad for _, static in self._copied)

    def load(self, tensors: Sequence[torch.Tensor]) -> None:
        if self._needs_no_grad and torch.is_grad_enabled():
            with torch.no_grad():
                self._copy(tensors)
        else:
            self._copy(tensors)

    def _grouped_copy(self) -> Callable[[Sequence[torch.Tensor]], Any]:
        targets, indices = [t for _, t in self._copied], [index for index, _ in self._copied]
        copy = torch._foreach_copy_
        if not targets:
            return lambda tensors: None
        if indices == [*range(len(self.tensors))]:
            return lambda tensors: copy(targets, tensors)  # type: ignore[arg-type]
        return lambda tensors: copy(targets, [tensors[index] for index in indices])

    def _copy_each(self, tensors: Sequence[torch.Tensor]) -> None:
        for index, static in self._copied:
            if tensors[index] is not static:
                overwrite(static, tensors[index])

    def require_apart(self, tensors: Sequence[torch.Tensor], written: Collection[int]) -> None:
        """Raise InputError if a tensor that the step writes shares memory with another tensor."""
        for index, static in self._copied:
            for at, other in self._copied if id(static) in written else ():
                if static is not other and share_memory(tensors[index], tensors[at]):
                    raise InputError(
                        f"{brief(tensors[index])} and {brief(tensors[at])} share memory, and the "
                        f"step writes one of them. Pass a clone(), or run this call eagerly "
                        f"(with step.eager())."
                    )

    def store(self, tensors: Sequence[torch.Tensor], written: Collection[int]) -> None:
        """Copy the static tensors with an id in ``written`` back to the tensors of the call."""
        for index, static in self._copied:
            if id(static) in written and tensors[index] is not static:
                overwrite(tensors[index], static)


def _copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the strides of ``tensor``, because a step may branch on strides."""
    plain = tensor.detach()
    copy = plain.clone()
    if copy.stride() != plain.stride() and not overlaps_itself(unexpanded(plain)):
        copy = plain.new_empty_strided(plain.shape, plain.stride())
        overwrite(copy, plain)
    return copy


def results_of(
    outputs: Any, static_inputs: StaticInputs, *, clone: bool
) -> Callable[[Sequence[torch.Tensor]], Any]:
    """Return a function that takes the tensors of a call and returns its results.

    With ``clone``, results are copies, except arguments and parameters that the step returns.
    """
    positions: dict[int, int] = {}
    for index, static in enumerate(static_inputs.tensors):
        positions.setdefault(id(static), index)

    def is_copied(node: Any) -> bool:
        is_other = isinstance(node, torch.Tensor) and not isinstance(node, torch.nn.Parameter)
        return clone and is_other and id(node) not in positions

    def results(tensors: Sequence[torch.Tensor]) -> Any:
        copies: dict[int, torch.Tensor] = {}  # A tensor that is returned twice is copied once.

        def result(leaf: Any) -> Any:
            if (position := positions.get(id(leaf))) is not None:
                return tensors[position]  # the step returns its argument
            if is_copied(leaf) and id(leaf) not in copies:
                copies[id(leaf)] = leaf.clone()
            return copies.get(id(leaf), leaf)

        return mapped(result, outputs)

    kind = type(outputs)
    if is_copied(outputs):
        clone_one = outputs.clone
        return lambda tensors: clone_one()
    is_flat = kind in (tuple, list) and len({*map(id, outputs)}) == len(outputs)
    if is_flat and all(map(is_copied, outputs)):
        return lambda tensors: kind([output.clone() for output in outputs])
    return results


class TrainingGraphs:
    """The forward and the backward graph of one key.

    The backward graph reads activations of the forward graph, so between the two only graphs of
    other callables of the same step may run in their pool, in call order.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        static_inputs: StaticInputs,
        pool: Pool,
        parameters: Sequence[torch.Tensor],
        *,
        clone: bool,
        allow_unused: bool = True,
    ) -> None:
        self.fn, self.static_inputs, self.pool = fn, static_inputs, pool
        self.lock = pool.lock
        self._clone, self._allow_unused = clone, allow_unused
        self.owned = Owned(fn, static_inputs.args, static_inputs.kwargs)
        self._given = list({id(t): t for t in static_inputs.tensors}.values())
        self._parameters = [p for p in parameters if all(p is not t for t in self._given)]
        self._wanted = [t for t in [*self._given, *self._parameters] if t.requires_grad]
        self._leaves = {
            id(p): _leaf_of(p) for p in self._parameters if type(p) is torch.nn.Parameter
        }
        """A separate leaf tensor for each parameter, by the parameter's id. The parameter itself
        may be in the autograd history of an earlier call, which belongs to another stream."""
        backend: Any = pool.backend
        self._forward: DeviceGraph = new_graph(backend, pool)
        self._backward: DeviceGraph = new_graph(backend, pool)
        self._outputs: Any = None
        self._differentiable: list[torch.Tensor] = []
        self._output_grads: list[torch.Tensor] = []
        self.shared: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """Leaf tensors with their gradients in graph memory, by ``index``, for each backward graph
        that ran since the last forward. All callables of a step share this dictionary."""
        self.index = 0
        self._leaf_grads: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._input_grads: list[tuple[int, torch.Tensor | None]] = []
        """The ``id`` of each input, and its gradient at its first position, or None."""
        self._used_by: list[set[int]] = []
        """For each differentiable output, the ``id`` of each wanted tensor that it depends on."""
        self._weight_grads: list[tuple[int, torch.Tensor | None]] = []
        self._epoch = 0
        """Number of forward replays, negated after the backward of the last replay."""

    # Capture, in a session.

    def warm_up(self) -> None:
        with self.owned.run() as (args, kwargs):
            with self._own_leaves():
                outputs = tensors_of(self.fn(*args, **kwargs))
            with_grad = [tensor for tensor in outputs if tensor.requires_grad]
            if with_grad:
                self._gradients(with_grad, [torch.ones_like(t) for t in with_grad])

    def capture_forward(self, held: Any) -> None:
        with held.recording(GraphScope(self._forward)):
            held.begin(self._forward, arguments=tuple(self._given))
            with (
                self.owned.run() as (args, kwargs),
                self._own_leaves(),
                autocast_cached(held.caches_casts),
            ):
                self._outputs = self.fn(*args, **kwargs)
            held.end()
        self._tensors = tensors_of(self._outputs)
        self._differentiable = [tensor for tensor in self._tensors if tensor.requires_grad]
        self._output_grads = [torch.zeros_like(t) for t in self._differentiable]

    def capture_backward(self, held: Any) -> None:
        grads: list[torch.Tensor | None] = [None] * len(self._wanted)
        wanted = {id(self._leaves.get(id(tensor), tensor)): id(tensor) for tensor in self._wanted}
        leaves = [*map(_leaves_below, self._differentiable)]
        self._used_by = [{wanted[leaf] for leaf in below & wanted.keys()} for below in leaves]
        if self._differentiable:
            with held.recording(GraphScope(self._backward)):
                held.begin(self._backward, arguments=tuple(self._output_grads))
                with self.owned.run():  # Hooks must not change state: replays do not run them.
                    grads = self._gradients(self._differentiable, self._output_grads)
                held.end()
        self._leaf_grads = [
            (tensor, grad)
            for tensor, grad in zip(self._wanted, grads, strict=True)
            if grad is not None and tensor.is_leaf
        ]
        left = dict(zip(map(id, self._wanted), grads, strict=True))
        self._input_grads = [(id(t), left.pop(id(t), None)) for t in self.static_inputs.tensors]
        self._weight_grads = [(id(p), left.get(id(p))) for p in self._parameters]
        self._needs_grad = [tensor.requires_grad for tensor in self._tensors]
        # Drop the autograd history: a live AccumulateGrad node of the capture stream would make
        # later backward passes of the caller synchronize with that stream.
        fresh = self._tensors = [tensor.detach() for tensor in self._tensors]
        self._outputs, self._differentiable = without_history(self._outputs), []
        self._results_of = results_of(fresh, self.static_inputs, clone=self._clone)

    def _gradients(
        self, outputs: list[torch.Tensor], grads: list[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        wanted = [self._leaves.get(id(tensor), tensor) for tensor in self._wanted]
        try:
            return [*torch.autograd.grad(outputs, wanted, grads, allow_unused=self._allow_unused)]
        except RuntimeError as error:
            raise CaptureError(
                f"the backward of the step's results cannot run: {error}. If the step calls "
                f"backward() itself, return detached results (loss.detach())."
            ) from error

    @contextlib.contextmanager
    def _own_leaves(self) -> Iterator[None]:
        """Replace the parameters of modules with ``_leaves`` in the block."""
        places = [
            entry
            for entry in entries(self.owned.roots)
            if id(entry.value) in self._leaves and isinstance(entry.holder, dict)
        ]
        try:
            for entry in places:
                entry.holder[entry.key] = self._leaves[id(entry.value)]
            yield
        finally:
            for entry in places:
                entry.holder[entry.key] = entry.value

    # Calls.

    def run(self, tensors: Sequence[torch.Tensor], host: Mapping[str, Any]) -> Any:
        """Run the step as an autograd function: replay the forward now, the backward later."""
        apply: Any = _Function.apply
        outputs = self._outputs  # Another thread may close the graphs in the meantime.
        return mapped(_in_order(apply(self, *tensors, *self._parameters)), outputs)

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[int, tuple[torch.Tensor, ...]]:
        """Replay the forward graph; return the epoch and the output tensors in order."""
        with self.lock:
            self.pool.order()
            if self.shared:
                _copy_gradients(self.shared)
            if self.owned.written:
                self.static_inputs.require_apart(tensors, self.owned.written)
            self.static_inputs.load(tensors)
            self._forward.replay()
            self._epoch = abs(self._epoch) + 1
            if self.owned.written:
                self.static_inputs.store(tensors, self.owned.written)
            return self._epoch, tuple(self._results_of(tensors))

    @property
    def constant(self) -> list[int]:
        """Positions of outputs that need no gradients."""
        return [index for index, needed in enumerate(self._needs_grad) if not needed]

    def backward(self, epoch: int, grads: Sequence[Any]) -> list[torch.Tensor | None]:
        """Replay the backward graph; return the gradients of the inputs of ``_Function``."""
        with self.lock:
            if epoch != self._epoch:
                raise StateError(
                    "the backward of this graphed call cannot run, because its activations were "
                    "overwritten by a later call with the same shapes or by an earlier backward. "
                    "Call backward once and before the next call, or use a separate graphed "
                    "callable for each call."
                )
            self._epoch = -epoch
            self.pool.order()
            _copy_gradients(self.shared, before=self.index)
            self.shared[self.index] = self._leaf_grads
            given = [grad for grad, needed in zip(grads, self._needs_grad, strict=True) if needed]
            for target, grad in zip(self._output_grads, given, strict=True):
                if grad is None:
                    target.zero_()
                else:
                    overwrite(target, grad)
            self._backward.replay()
            pairs = zip(given, self._used_by, strict=True)
            used = set[int]().union(*(ids for grad, ids in pairs if grad is not None))
            inputs, weights = (
                [grad if key in used else None for key, grad in grads]
                for grads in (self._input_grads, self._weight_grads)
            )
            copies = [None if grad is None else grad.clone() for grad in inputs]
            return copies + [None if grad is None else grad.detach() for grad in weights]

    # Reports.

    @property
    def guard(self) -> Guard:
        """A new comparison of later states of the step with its current state."""
        given, found = self.owned.watch()
        return Guard([*given, *found, *self.owned.watch_named(regions=True)])

    def prove(self, cases: int) -> Report:
        """Compare outputs and gradients with eager runs on fresh inputs."""
        generator, failures = torch.Generator().manual_seed(0), list[Failure]()
        tried = [Case(number=index, host_args={}) for index in range(cases)]
        for case in tried:
            tensors = [tensor.detach().clone() for tensor in self.static_inputs.tensors]
            for tensor, static in zip(tensors, self.static_inputs.tensors, strict=True):
                randomize(tensor, generator)
                tensor.requires_grad_(static.requires_grad)
            replay = functools.partial(self.run, host={})
            eager, graph = (self._results(run, tensors) for run in (self._run_eagerly, replay))
            for name in {**eager, **graph}:
                message = "is computed by only one of the two runs"
                if name in eager and name in graph:
                    message = compare(eager[name], graph[name])
                if message:
                    failures.append(case.failure(name, message))
        return Report(cases=cases, failures=tuple(failures), tried=tuple(tried))

    def _results(
        self, run: Callable[[list[torch.Tensor]], Any], tensors: list[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the outputs and gradients of a run by name, and restore the state of the step."""
        wanted = [*(t for t in tensors if t.requires_grad), *self._parameters]
        backend: Any = self.pool.backend
        with self.owned.kept(backend, None), torch.enable_grad():
            outputs = tensors_of(run(tensors))
            differentiable = [tensor for tensor in outputs if tensor.requires_grad]
            ones = [torch.ones_like(tensor) for tensor in differentiable]
            grads = torch.autograd.grad(differentiable, wanted, ones, allow_unused=True)
            # Copy before the block restores the state, with which the results may share memory.
            named = [(f"output {index}", t.detach().clone()) for index, t in enumerate(outputs)]
            found = [(f"gradient {i}", g.clone()) for i, g in enumerate(grads) if g is not None]
        return dict(named + found)

    def _run_eagerly(self, tensors: list[torch.Tensor]) -> Any:
        args, kwargs = self.static_inputs.arguments_with(tensors)
        return self.fn(*args, **kwargs)

    def explain(self) -> str:
        forward, backward = (graph.info().nodes for graph in (self._forward, self._backward))
        return f"forward {counted(forward, 'node')}, backward {counted(backward, 'node')}"

    def close(self) -> None:
        self._outputs, self._tensors, self._differentiable = None, [], []
        self._leaf_grads, self._input_grads, self._weight_grads = [], [], []
        for graph in (self._forward, self._backward):
            graph.close()


def _copy_gradients(
    shared: dict[int, list[tuple[torch.Tensor, torch.Tensor]]], before: int | None = None
) -> None:
    """Replace gradients that are in graph memory with copies, for all or for smaller indices.

    Autograd stores the first gradient of a leaf without a copy. Each forward would overwrite this
    gradient, and so would the backward of a callable with a larger index, which was captured
    earlier.
    """
    for index in [index for index in shared if before is None or index < before]:
        for leaf, grad in shared.pop(index):
            held = leaf.grad
            if held is not None and held.data_ptr() == grad.data_ptr():
                leaf.grad = held.clone()


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, step: TrainingGraphs, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.step, ctx.tensors = step, tensors
        ctx.set_materialize_grads(False)
        ctx.epoch, outputs = step.forward(tensors[: len(step.static_inputs.tensors)])
        ctx.mark_non_differentiable(*[outputs[index] for index in step.constant])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            found = ctx.step.backward(ctx.epoch, grads)
        if torch.is_grad_enabled():  # create_graph=True
            found = _Final.apply(len(ctx.tensors), *ctx.tensors, *found)  # type: ignore[no-untyped-call]
        ctx.tensors = ()
        return (None, *found)


class _Final(torch.autograd.Function):
    """The identity on gradients. Its backward raises, because second derivatives do not exist."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Any) -> tuple[torch.Tensor | None, ...]:
        return tuple([None if grad is None else grad.detach() for grad in tensors[count:]])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise StateError(
            "the gradients of a graphed function have no second derivative. Run the calls for "
            "create_graph=True eagerly: with step.eager()."
        )


def _leaves_below(output: torch.Tensor) -> set[int]:
    """Return the ids of the leaf tensors whose gradients a backward from ``output`` changes."""
    if output.grad_fn is None:
        return {id(output)}
    todo, seen, leaves = [output.grad_fn], set(), set()
    while todo:
        node: Any = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo.extend(function for function, _ in node.next_functions)
            if type(node).__name__ == "AccumulateGrad":
                leaves.add(id(node.variable))
    return leaves


def _leaf_of(parameter: torch.Tensor) -> torch.Tensor:
    leaf = torch.nn.Parameter(parameter.detach(), parameter.requires_grad)
    vars(leaf).update(vars(parameter))
    return leaf


def _in_order(tensors: Iterable[torch.Tensor]) -> Callable[[Any], Any]:
    """Return a function that replaces each tensor with the next of ``tensors``."""
    left = iter(tensors)
    return lambda leaf: next(left) if isinstance(leaf, torch.Tensor) else leaf


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for _, leaf in leaves_of("", tree) if isinstance(leaf, torch.Tensor)]


def capture_steps(steps: Sequence[TrainingGraphs], warmup: int) -> None:
    """Capture forwards in order and backwards in reverse order; close all steps on failure."""
    pool = steps[0].pool
    backend: Any = pool.backend
    try:
        for index, step in enumerate(steps):
            step.index, step.shared = index, steps[0].shared
        with contextlib.ExitStack() as stack:
            held = stack.enter_context(session(pool))
            for step in steps:
                stack.enter_context(step.owned.kept(backend, DEFAULT_LIMIT))
            for step in steps:
                for _ in range(warmup):
                    step.owned.rewind()
                    step.warm_up()
            backend.synchronize()
            for step in steps:
                step.capture_forward(held)
            for step in reversed(steps):
                step.capture_backward(held)
    except BaseException:
        for step in steps:
            step.close()
        raise


def make_graphed_callables(
    callables: Any,
    sample_args: Any,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    pool: Pool | None = None,
) -> Any:
    """Return graphed versions of callables for training, like torch's function of the same name.

    Forward graphs are captured in the order of ``callables`` and backward graphs in reverse order,
    so that the callables of one step share a pool. A module is graphed in place: its ``forward``
    runs in graphs in the captured training mode, and eagerly otherwise.

    Args:
        callables: a function or module, or a tuple of them.
        sample_args: tensors for each callable, with the shapes, dtypes, devices and
            ``requires_grad`` of later calls: a tuple, or a tuple of tuples for several callables.
        num_warmup_iters: number of eager runs before the capture.
        allow_unused_input: whether outputs may be independent of some inputs.
        pool: memory to share with other captures; None creates a pool of the device's backend.

    Raises:
        InputTypeError: a sample argument is not a tree of tensors.
        InputError: a module has buffers that require gradients, or the lengths of the tuples
            differ.
        CaptureError: a callable cannot be captured.
    """
    whole("num_warmup_iters", num_warmup_iters)
    if not (pool is None or isinstance(pool, Pool)):
        raise InputTypeError(f"pool must be a Pool or None, got {brief(pool)}")
    single = not isinstance(callables, tuple)
    functions = (callables,) if single else callables
    samples = (sample_args,) if single else sample_args
    if len(functions) != len(samples):
        raise InputError(
            f"{len(functions)} callables need {len(functions)} tuples of sample_args, got "
            f"{len(samples)}"
        )
    steps: list[TrainingGraphs] = []
    for function, sample in zip(functions, samples, strict=True):
        if isinstance(sample, torch.Tensor):
            raise InputTypeError(f"sample_args must be a tuple of tensors, got {brief(sample)}")
        leaves = [*leaves_of("sample_args", sample)]
        for path, leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise InputTypeError(f"{path} is {brief(leaf)}; sample_args takes tensors only")
        target = function
        if isinstance(function, torch.nn.Module):
            target = function.forward
            wrong = [name for name, b in function.named_buffers() if b.requires_grad]
            if wrong:
                raise InputError(f"buffer {wrong[0]!r} requires gradients; make it a parameter")
        if pool is None:  # The device of the first tensor determines the backend.
            backend = get_backend("auto")
            if leaves and leaves[0][1].device.type != backend.device.type:
                backend = get_backend(leaves[0][1].device.type)
            pool = backend.make_pool()
        parameters = [leaf for leaf in differentiable_leaves(target) if leaf.requires_grad]
        inputs, unused = StaticInputs(tuple(sample), {}), allow_unused_input
        steps.append(
            TrainingGraphs(target, inputs, pool, parameters, clone=False, allow_unused=unused)
        )
    capture_steps(steps, num_warmup_iters)
    graphed = tuple(map(_callable_of, functions, steps))
    return graphed[0] if single else graphed


def _callable_of(function: Any, step: TrainingGraphs) -> Any:
    """Return a graphed function, or the module with its ``forward`` graphed."""
    plain = step.fn
    training = function.training if isinstance(function, torch.nn.Module) else None

    @functools.wraps(plain)
    def graphed_call(*args: Any) -> Any:
        if training is not None and function.training is not training:
            return plain(*args)
        tensors = tensors_of(args)
        wanted = [(t.shape, t.dtype, t.device, t.requires_grad) for t in step.static_inputs.tensors]
        given = [(t.shape, t.dtype, t.device, t.requires_grad) for t in tensors]
        if given != wanted:
            raise InputError(
                f"a graphed callable was captured for {wanted}, got {given} (shape, dtype, device, "
                f"requires_grad). Pass matching tensors, or use dg.graphed for several shapes."
            )
        return step.run(tensors, {})

    if training is None:
        return graphed_call
    function.forward = graphed_call
    return function


def differentiable_leaves(fn: Callable[..., Any]) -> list[torch.Tensor]:
    """Return the leaf tensors that ``fn`` can reach and that can have gradients."""
    reached = [entry.value for entry in entries([("", fn)])]
    tensors = {id(value): value for value in reached if isinstance(value, torch.Tensor)}
    return [
        tensor
        for tensor in tensors.values()
        if tensor.is_leaf and (tensor.is_floating_point() or tensor.is_complex())
    ]
