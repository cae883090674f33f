"""Policy ``compiled``: the step is compiled between its marked functions, and is one graph.

The step runs once as it is, and the operators of torch that it calls are noted. What Python does
around them (modules that are swapped, contexts, caches) is no part of that, as it is none of a
graph. The operators between two marked functions are compiled as the pieces of ``piecewise`` are;
the compiled step is then captured like any other under ``full``, marked functions included.

What is no operator of torch (a kernel that Python launches by itself) is not noted. A compiled step
whose results are not those of the step is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import attrs
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    PythonKeyTracer,
    disable_proxy_modes_tracing,
    get_innermost_proxy_mode,
    get_proxy_slot,
    make_fx,
    track_tensor_tree,
)
from torch.utils import _pytree as pytree

from devgraph.api.buffers import tensors_in
from devgraph.api.errors import CaptureError
from devgraph.api.marks.host_values import HostSpec
from devgraph.api.marks.marks import Mark, entered, marked_functions
from devgraph.api.marks.modes import Modes
from devgraph.api.marks.scopes import captured_call
from devgraph.api.policy import get_policy
from devgraph.api.policy.job import Job, Plan, Policy
from devgraph.api.policy.piecewise import Build, Part, compiler_of, is_cut, split_at_marks
from devgraph.api.session import Session

_PLAIN_MODES = Modes(grad=False, inference=False, autocast=())
"""Under which pieces are compiled and run: what autocast does is noted as operators."""

_PLAIN = (*fx.node.base_types, type(None))
"""What may stand in a trace as it is."""


def _marked(*args: Any, **kwargs: Any) -> Any:
    """Stand for the call of a marked function while a step is noted."""


fx.node.has_side_effect(_marked)


class _Noting:
    """What marks mean while a step is noted: they run, and the notes have one call of each."""

    def __init__(self, spec: HostSpec) -> None:
        self.calls: list[Callable[..., Any]] = []
        """What the calls of marked functions are to be, in order."""
        self.tokens: dict[str, Tensor] = {}
        """They stand for the host arguments in the notes."""
        self._spec = spec
        self._known: dict[Mark, dict[str, Any]] = {}

    def call(self, mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs, host = captured_call(mark, args, kwargs, self._spec, self._known)
        mode = get_innermost_proxy_mode()
        assert mode is not None, "a step is noted as it runs"
        tracer = cast(PythonKeyTracer, mode.tracer)

        def noted(value: Any) -> Any:
            known = get_proxy_slot(value, tracer, None) if isinstance(value, Tensor) else None
            if known is not None:
                return known.proxy
            if isinstance(value, _PLAIN) and not isinstance(value, Tensor):
                return value
            return tracer.create_proxy("get_attr", _kept(tracer, value), (), {})

        tokens = {name: self.tokens[name] for name in mark.host_args}
        given, named = pytree.tree_map(noted, (args, {**kwargs, **tokens}))
        proxy = tracer.create_proxy("call_function", _marked, given, named)
        self.calls.append(_as_called(mark))
        with disable_proxy_modes_tracing():
            with entered(None):
                result = mark.fn(*args, **kwargs, **host)
            return track_tensor_tree(result, proxy, constant=None, tracer=tracer)

    def graph_break(self) -> None:
        """Do nothing: the step is one graph."""


def _as_called(mark: Mark) -> Callable[..., Any]:
    """Return the marked function, under the modes of now: pieces leave none."""
    (function,) = (f for f in marked_functions() if f.__devgraph_mark__ is mark)  # type: ignore[attr-defined]
    modes = Modes.current()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with modes.restored():
            return function(*args, **kwargs)

    return call


def _kept(tracer: PythonKeyTracer, value: Any) -> str:
    """Keep what a marked function is given from outside of the step; return under what name."""
    name = f"_given_{len(vars(tracer.root))}"
    setattr(tracer.root, name, value)
    return name


class _Compiling(fx.Interpreter):
    """Runs a step that was split at its marks, and compiles each piece before it runs."""

    def __init__(self, split: fx.GraphModule, build: Build) -> None:
        super().__init__(split)
        self._build = build

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        piece = self.module.get_submodule(target)
        assert isinstance(piece, fx.GraphModule)
        if not any(map(is_cut, piece.graph.nodes)):
            run = self._build.piece(piece, _PLAIN_MODES, _examples(args))
            setattr(self.module, target, Part(run, None))
        return super().call_module(target, args, kwargs)


def _examples(inputs: Sequence[Any]) -> list[Any]:
    """Return tensors without data like ``inputs``, of one memory where those overlap only: static
    buffers lie in one memory, whatever their dtypes, and a piece may write several."""
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    places = [_place(tensor) for tensor in tensors]
    mode = FakeTensorMode()

    def example(tensor: Tensor) -> Tensor:
        first, end = _place(tensor)
        if sum(a < end and first < b for a, b in places) > 1:
            return mode.from_tensor(tensor)
        with mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            )

    return [example(value) if isinstance(value, Tensor) else value for value in inputs]


def _place(tensor: Tensor) -> tuple[int, int]:
    """Return where the memory of a tensor begins and ends."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (last + 1) * tensor.itemsize if tensor.numel() else first


class _CompiledStep:
    """What a step computes, in compiled pieces; made in two runs of the step.

    Attributes:
        outputs: what the second run returned.
    """

    def __init__(self, job: Job, compiler: str) -> None:
        self._names = list(job.spec.declared)
        noting = _Noting(job.spec)

        def step(*tokens: Tensor) -> list[Any]:
            noting.tokens = dict(zip(self._names, tokens, strict=True))
            outputs = job.fn(*job.args, **job.kwargs, **job.spec.tracked())
            leaves, self._layout = pytree.tree_flatten(outputs)
            return leaves

        with entered(noting), torch.no_grad():
            noted = make_fx(step, _allow_non_fake_inputs=True)(
                *(torch.zeros(()) for _ in self._names)
            )
        job.warmed_up()
        calls = noted.graph.find_nodes(op="call_function", target=_marked)
        for node, function in zip(calls, noting.calls, strict=True):
            node.target = function
        self._inputs = _lifted(noted)
        self._split, _ = split_at_marks(noted)
        self.build = Build(compiler, job.backend.wrap_compiled)
        compiling = _Compiling(self._split, self.build)
        with _PLAIN_MODES.restored(), entered(None):
            self.outputs = self._unflattened(
                compiling.run(*job.spec.declared.values(), *self._inputs)
            )
        job.warmed_up()

    def __call__(self, *_: Any, **given: Any) -> Any:
        """Run the pieces on what the step is bound to, with these host arguments."""
        with _PLAIN_MODES.restored():
            leaves = self._split(*map(given.get, self._names), *self._inputs)
        return self._unflattened(leaves)

    def _unflattened(self, leaves: Any) -> Any:
        return pytree.tree_unflatten(leaves, self._layout)


def _lifted(noted: fx.GraphModule) -> list[Any]:
    """Turn what ``noted`` reads from outside into inputs of it, and return that: equal pieces over
    other weights are then equal."""
    first = next(node for node in noted.graph.nodes if node.op != "placeholder")
    values: list[Any] = []
    inputs: dict[int, fx.Node] = {}
    for node in noted.graph.find_nodes(op="get_attr"):
        value = getattr(noted, node.target)
        if id(value) not in inputs:
            with noted.graph.inserting_before(first):
                inputs[id(value)] = noted.graph.placeholder(f"given_{len(values)}")
            inputs[id(value)].meta = node.meta
            values.append(value)
        node.replace_all_uses_with(inputs[id(value)])
        if node is not first:
            noted.graph.erase_node(node)
    if first.op == "get_attr":
        noted.graph.erase_node(first)
    return values


class _Compiled(Policy):
    def warm_up(self, job: Job, runs: int) -> Job:
        compiler = compiler_of(job, "full")
        before, last = [self._run(job) for _ in range(max(runs, 2))][-2:]
        with job.phase("compile"):
            step = _CompiledStep(job, compiler)
        # A step that returns something else each time cannot be compared.
        if all(map(torch.equal, before, last)) and not _near(last, _floats(step.outputs)):
            raise CaptureError(
                "compiled, the step returns something else. What it computes with other than "
                "operators of torch (a kernel that Python launches) is not seen by policy "
                "'compiled': move that into a function marked @dg.region, or use policy='full'."
            )
        job.outputs.hold(step.outputs)
        return attrs.evolve(job, fn=step)

    def _run(self, job: Job) -> list[Tensor]:
        found = _floats(job.fn(*job.args, **job.kwargs, **job.spec.declared))
        job.warmed_up()
        return found

    def capture(self, job: Job, session: Session) -> Plan:
        assert isinstance(job.fn, _CompiledStep), "a step is warmed up before it is captured"
        plan = get_policy("full").capture(job, session)
        plan.notes.update(job.fn.build.notes())
        return plan


def _floats(outputs: Any) -> list[Tensor]:
    return [t.detach().clone() for t in tensors_in(outputs) if t.is_floating_point()]


def _near(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether results are equal but for what rounding makes of a deep model: of one with random
    weights, in bfloat16, other kernels change the logits by 4 percent."""
    return len(some) == len(others) and all(
        a.shape == b.shape
        and torch.allclose(a, b, rtol=0.0, atol=0.3 * float(a.abs().max()), equal_nan=True)
        for a, b in zip(some, others, strict=True)
        if a.numel()
    )


POLICY = _Compiled()
