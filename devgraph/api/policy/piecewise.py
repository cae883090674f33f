"""Policy ``piecewise``: the step is compiled in pieces, cut at marked functions.

``torch.compile`` traces the whole step once, for all sizes. Its graph is split at the calls of
marked functions, every piece between them is compiled (or left as it is), and the compiled step is
then captured like a breakable one: a graph per piece, the marked functions between them.

Host arguments enter the trace as tokens, zero-dimensional tensors that only the marked functions
may take. Whatever else would read one is found in the traced graph and refused with its line.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, cast

import attrs
import torch
import torch._dynamo
from torch._dynamo.exc import BackendCompilerFailed, TorchDynamoException
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.fx import GraphModule, Node
from torch.fx.passes.split_module import split_module
from torch.utils import _pytree as pytree

from devgraph.api import marks
from devgraph.api.errors import (
    CapabilityError,
    CaptureError,
    DeviceGraphError,
    FrozenValueError,
    InputError,
    did_you_mean,
)
from devgraph.api.hostargs import HostSpec
from devgraph.api.marks import Mark, entered
from devgraph.api.policy import Job, Plan, get_policy

__all__ = ["COMPILERS", "POLICY"]

logger = logging.getLogger(__name__)

COMPILERS = ("eager", "inductor")


@attrs.define
class _Activation:
    """One step being compiled or run: its host arguments and what compiling it took."""

    spec: HostSpec
    live: Mapping[str, Any]
    """What a marked function receives for a token: plain values, or tracked ones in a capture."""
    tokens: dict[str, torch.Tensor]
    wrap: Callable[[Callable[..., Any], GraphModule], Callable[..., Any]]
    job: Job | None = None
    """Set while capturing."""
    plan: Plan | None = None
    pieces: int = 0
    shared: int = 0
    seconds: float = 0.0


_activation: ContextVar[_Activation | None] = ContextVar("devgraph_piecewise", default=None)


@contextlib.contextmanager
def _activated(activation: _Activation) -> Iterator[None]:
    token = _activation.set(activation)
    try:
        yield
    finally:
        _activation.reset(token)


def _host_value(name: str) -> Any:
    """Return what the marked function that runs now receives for host argument ``name``."""
    activation = _activation.get()
    assert activation is not None, "a compiled step runs only inside its policy"
    return activation.live[name]


class _Tracing:
    """What marks mean while the step is traced, and in the eager run right after it."""

    def call(self, mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves = pytree.tree_leaves((args, kwargs))
        if not any(isinstance(leaf, FakeTensor) for leaf in leaves):
            with entered(None):
                return mark.call_eager(args, kwargs)
        with entered(None):
            return self._result_of(mark, args, kwargs)

    def graph_break(self) -> None:
        """Do nothing: the split finds the call."""

    @staticmethod
    def _result_of(mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        activation = _activation.get()
        assert activation is not None
        args, kwargs, given = mark.split(args, kwargs)
        host = mark.host_kwargs({n: activation.spec.declared.get(n) for n in given})
        if mark.fake is not None:
            return mark.fake(*args, **kwargs, **host)
        if mark.mutates:
            return None  # the usual shape of a region; a result would be refused when it runs
        try:
            return mark.fn(*args, **kwargs, **host)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise CaptureError(
                f"policy 'piecewise' must know what {mark.name} returns without running it, and "
                f"it depends on data ({error}). Give its mark fake=, a function of the same "
                f"arguments that returns empty tensors of the result's shape."
            ) from error


def _mark_of(node: Node) -> Mark | None:
    return getattr(node.target, "__devgraph_mark__", None) if node.op == "call_function" else None


def _is_cut(node: Node) -> bool:
    return node.op == "call_function" and (
        node.target is marks.graph_break or _mark_of(node) is not None
    )


def _where(node: Node) -> str:
    """Return file, line and text of the user's code that ``node`` stands for."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    at = max((i for i, line in enumerate(lines) if line.startswith("File ")), default=None)
    return str(node) if at is None else ": ".join(lines[at : at + 2])


class _Compiler:
    """The ``torch.compile`` backend of this policy.

    Args:
        name: "eager" leaves the pieces as they are, "inductor" compiles them.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._known: dict[Any, Callable[..., Any]] = {}

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        activation = _activation.get()
        assert activation is not None
        started = time.perf_counter()
        self._bind_tokens(graph, activation)
        split = self._split(graph)
        for name, piece in list(split.named_children()):
            assert isinstance(piece, GraphModule)
            if not any(_is_cut(node) for node in piece.graph.nodes):
                setattr(split, name, _Piece(self._compile(piece, activation)))
        activation.seconds += time.perf_counter() - started
        return _entry(split.forward)

    def _bind_tokens(self, graph: GraphModule, activation: _Activation) -> None:
        """Replace the tokens by reads of the live values; refuse every other use of one."""
        names = {id(token): name for name, token in activation.tokens.items()}
        tokens: dict[Node, str] = {}
        for node in graph.graph.find_nodes(op="placeholder"):
            argument = node.meta.get("grapharg")
            example = argument.example if argument is not None else None
            if id(example) in names:
                tokens[node] = names[id(example)]
        for node in graph.graph.nodes:
            mark = _mark_of(node)
            if mark is not None:
                self._bind_call(graph, node, mark, tokens)
        for token, name in tokens.items():
            for user in token.users:
                raise FrozenValueError(
                    f"host argument {name!r} was consumed outside a region, at {_where(user)}. The "
                    f"graph would keep the value of capture for ever. Move the line into a "
                    f"function marked @dg.region(host_args=({name!r},)), or declare "
                    f"derive={{'new_name': lambda {name}: ...}} on the mark."
                )

    @staticmethod
    def _bind_call(graph: GraphModule, node: Node, mark: Mark, tokens: dict[Node, str]) -> None:
        args, kwargs, host = mark.split(node.args, dict(node.kwargs))
        for name, value in host.items():
            found = tokens.get(value) if isinstance(value, Node) else None
            if found == name:
                with graph.graph.inserting_before(node):
                    kwargs[name] = graph.graph.call_function(_host_value, (name,))
                continue
            given = f"the value of {found!r}" if found else f"a computed or plain value ({value})"
            raise FrozenValueError(
                f"region {mark.name} takes host argument {name!r} and was given {given}, at "
                f"{_where(node)}. Pass the host argument on unchanged under its own name, or "
                f"declare derive={{{name!r}: ...}} on the mark."
            )
        node.args, node.kwargs = args, kwargs

    @staticmethod
    def _split(graph: GraphModule) -> GraphModule:
        part = 0
        parts: dict[Node, int] = {}
        for node in graph.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if _is_cut(node):
                part += 1
                parts[node] = part
                part += 1
            else:
                parts[node] = part
        # A live value is read in the part of the call that takes it.
        for node in parts:
            if node.target is _host_value:
                parts[node] = parts[next(iter(node.users))]
        return split_module(graph, graph, lambda node: parts[node], keep_original_order=True)

    def _compile(self, piece: GraphModule, activation: _Activation) -> Callable[..., Any]:
        activation.pieces += 1
        inputs = piece.graph.find_nodes(op="placeholder")
        examples = [node.meta["example_value"] for node in inputs]
        key = (self.name, _shape_of(piece, examples))
        known = self._known.get(key)
        if known is not None:
            activation.shared += 1
            return known
        if self.name == "eager":
            compiled: Callable[..., Any] = piece.forward
        else:
            compiled = self._with_inductor(piece, examples, activation)
        self._known[key] = compiled
        return compiled

    @staticmethod
    def _with_inductor(
        piece: GraphModule, examples: list[Any], activation: _Activation
    ) -> Callable[..., Any]:
        output = piece.graph.output_node()
        single = not isinstance(output.args[0], tuple | list)
        if single:  # Inductor compiles graphs that return a tuple
            output.args = ((output.args[0],),)
            piece.recompile()
        run = activation.wrap(cast(Callable[..., Any], compile_fx(piece, examples)), piece)
        return (lambda *args: run(*args)[0]) if single else run


def _entry(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return what the traced step calls: it runs the pieces, or captures them.

    A capture begins here, inside the traced step, because checking its guards is no work to
    record.
    """

    def entry(*inputs: Any) -> Any:
        activation = _activation.get()
        assert activation is not None, "a compiled step runs only inside its policy"
        if activation.job is None:
            return forward(*inputs)

        def pieces(*args: Any, **_: Any) -> Any:
            return forward(*args)

        job = attrs.evolve(activation.job, fn=pieces, args=inputs, kwargs={})
        activation.plan = get_policy("breakable").capture(job)
        return activation.plan.outputs

    return entry


class _Piece(torch.nn.Module):
    """A compiled piece in the place of the module it was compiled from."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self._run = run

    def forward(self, *args: Any) -> Any:
        return self._run(*args)


def _shape_of(piece: GraphModule, examples: Sequence[Any]) -> Any:
    """Return what makes two pieces equal: the same operations on inputs of the same layouts."""
    numbers = {node: index for index, node in enumerate(piece.graph.nodes)}

    def plain(value: Any) -> Any:
        return torch.fx.node.map_arg(value, lambda node: f"%{numbers[node]}")

    nodes = tuple(
        (
            node.op,
            "" if node.op == "placeholder" else str(node.target),
            repr(plain(node.args)),
            repr(plain(dict(node.kwargs))),
        )
        for node in piece.graph.nodes
    )
    layouts = tuple(
        (str(e.dtype), str(tuple(e.shape)), str(e.stride()), str(e.device))
        if isinstance(e, torch.Tensor)
        else str(e)
        for e in examples
    )
    attributes = tuple(
        id(getattr(piece, n.target)) for n in piece.graph.nodes if n.op == "get_attr"
    )
    return (nodes, layouts, attributes)


class _Piecewise:
    name = "piecewise"

    def __init__(self) -> None:
        self._compilers = {name: _Compiler(name) for name in COMPILERS}

    def capture(self, job: Job) -> Plan:
        compiler = self._compiler(job)
        activation = _Activation(
            spec=job.spec,
            live=job.spec.declared,
            tokens={name: torch.zeros((), dtype=torch.int64) for name in job.spec.declared},
            wrap=job.backend.wrap_compiled,
        )
        step = torch.compile(job.fn, backend=compiler, fullgraph=True, dynamic=True)

        def compiled(*args: Any, **kwargs: Any) -> Any:
            plain = {k: v for k, v in kwargs.items() if k not in activation.tokens}
            return step(*args, **plain, **activation.tokens)

        with _activated(activation):
            started = time.perf_counter()
            self._trace(job, compiled)
            seconds = time.perf_counter() - started
            job.backend.synchronize()
            activation.live, activation.job = job.spec.tracked(), job
            outputs = compiled(*job.args, **job.kwargs)
        plan = activation.plan
        assert plan is not None
        plan.outputs = outputs
        plan.notes.update(
            pieces=activation.pieces,
            pieces_shared=activation.shared,
            compile_seconds=round(seconds if activation.pieces else 0.0, 3),
        )
        return plan

    def _compiler(self, job: Job) -> _Compiler:
        capabilities = job.backend.capabilities
        if not capabilities.piecewise:
            raise CapabilityError(
                f"backend {job.backend.name!r} does not declare piecewise; use 'full' or "
                f"'breakable'"
            )
        name = job.compiler or "eager"
        if name not in COMPILERS:
            raise InputError(f"no compiler {name!r}. {did_you_mean(name, COMPILERS)}")
        if name not in capabilities.compilers:
            raise CapabilityError(
                f"backend {job.backend.name!r} cannot use compiler {name!r}; it has "
                f"{', '.join(capabilities.compilers)}"
            )
        return self._compilers[name]

    @staticmethod
    def _trace(job: Job, compiled: Callable[..., Any]) -> None:
        """Compile the step for all sizes by running it once."""
        _allow_marks()
        try:
            with entered(_Tracing()):
                compiled(*job.args, **job.kwargs)
        except BackendCompilerFailed as error:
            inner = error.inner_exception
            if isinstance(inner, DeviceGraphError):
                raise inner from error
            raise
        except TorchDynamoException as error:
            raise _explained(error) from error


def _explained(error: TorchDynamoException) -> DeviceGraphError:
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, DeviceGraphError):
            return inner
        inner = inner.__cause__ or inner.__context__
    return CaptureError(
        "policy 'piecewise' needs the whole step in one trace, and torch.compile broke it: "
        f"{error}\nMark the function that holds this line with @dg.region, or @dg.no_graph if it "
        "can never be captured, or use policy='breakable', which does not trace."
    )


def _allow_marks() -> None:
    """Let the tracer put calls of marked functions into its graph without looking into them."""
    torch._dynamo.allow_in_graph(marks.graph_break)  # type: ignore[no-untyped-call]
    torch._dynamo.assume_constant_result(  # type: ignore[no-untyped-call]
        marks.is_capturing
    )
    for marked in marks.marked_functions():
        torch._dynamo.allow_in_graph(marked)  # type: ignore[no-untyped-call]


POLICY = _Piecewise()
