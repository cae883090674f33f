"""Policy ``piecewise``: the step is compiled in pieces, cut at marked functions.

``torch.compile`` traces the whole step once for all sizes. The trace is split at calls of marked
functions, and each piece is compiled, except with compiler "eager". The step is then captured as
under ``breakable``: one graph for each piece, with the marked functions between them.

The tracer treats a marked function as one opaque operation, whose results ``fake`` describes.
Marked functions are not torch.library operations, which may not return views of their arguments and
accept few types. Compilers see no marks, because pieces end at each mark.

Host arguments enter the trace as *tokens*: zero-dimensional tensors that only marked functions use.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, cast

import attrs
import torch
import torch._dynamo
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import compile_fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode
from torch.fx import GraphModule, Node
from torch.fx.experimental import _config as shape_config
from torch.fx.passes.split_module import split_module
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks
from torch.utils import _pytree as pytree

from devgraph.api.errors import (
    CapabilityError,
    CaptureError,
    DeviceGraphError,
    EmptyCaptureError,
    FrozenValueError,
    HostReadError,
    RegionError,
    brief,
)
from devgraph.api.marks import gates, marks
from devgraph.api.marks.host_values import frozen, taken_from
from devgraph.api.marks.marks import Args, Kwargs, Mark, Scope, entered
from devgraph.api.marks.scopes import split_host_args
from devgraph.api.marks.source import SourceLine, node_line, traced_line, user_line, warn
from devgraph.api.modes import Modes, OwnMode, Settings, autocast_uncached
from devgraph.api.owned import Owned, is_near
from devgraph.api.policy.breakable import BreakablePlan, capture_segments
from devgraph.api.policy.job import Job, Plan, Policy
from devgraph.api.results import refuse_host_values
from devgraph.api.session import Session
from devgraph.api.tensors import describe, tensors_in

logger = logging.getLogger(__name__)

RECOMPILE_LIMIT = 2**20
"""Maximum number of compiled versions of a function.

The default of torch.compile is 8, which runners that share one step function would exceed.
"""

INDUCTOR_OPTIONS = {"triton.cudagraphs": False}
"""Settings that prevent Inductor from capturing the pieces itself."""


_running: ContextVar[_CompiledStep | None] = ContextVar("devgraph_piecewise", default=None)


def _active() -> _CompiledStep:
    step = _running.get()
    assert step is not None, "a compiled step runs only inside its policy"
    return step


def _host_value(name: str) -> Any:
    """Return the value of host argument ``name`` in the current run of the step."""
    return _active().live[name]


# Claims of marks. The compiler must know the results and writes of a marked function without
# running it. An eager run checks these claims.


def _claimed_results(mark: Mark, args: Args, kwargs: Kwargs, host: dict[str, Any]) -> Any:
    """Return the fake results that a mark claims for fake arguments."""
    if mark.fake is None and mark.mutates:
        return None  # the usual result of a region that writes; the eager run refuses others
    claim = mark.fn if mark.fake is None else mark.fake
    try:
        with autocast_uncached(), _unknown_sizes_allowed(), _FakeClosures() as closed:
            result = closed.stand_in(claim(*args, **kwargs, **host))
            if _of_unknown_shape(result):
                raise HostReadError("the shape of its result depends on device data")
            return result
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "no message")
        reason = f"{type(error).__name__}: {reason}"
        if mark.fake is not None:
            raise CaptureError(
                f"policy 'piecewise' must know the results of {mark.name} without running it, and "
                f"its fake= raised {reason}. fake= receives all arguments of the function, "
                f"including host arguments ({', '.join(host) or 'none'}); their tensors have no "
                f"data."
            ) from error
        raise CaptureError(
            f"policy 'piecewise' must know the results of {mark.name} without running it, and its "
            f"body does not run without data ({reason}). Declare fake= on its mark: a function of "
            f"the same arguments that returns empty tensors of the result's shape, or None."
        ) from error


def _of_unknown_shape(result: Any) -> bool:
    return any(
        isinstance(size, torch.SymInt) and not size.node.has_hint()
        for tensor in tensors_in(result)
        for size in tensor.shape
    )


def _unknown_sizes_allowed() -> contextlib.AbstractContextManager[None]:
    """Return a context in which a body may create tensors of data-dependent size as temporaries."""
    mode = detect_fake_mode()
    if mode is None or mode.shape_env is None:
        return contextlib.nullcontext()
    return mode.shape_env.ignore_fresh_unbacked_symbols()


class _FakeClosures(OwnMode):
    """A mode that replaces real tensors in closures with fake tensors.

    FakeTensorMode can accept real tensors itself, but then writes to some of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def take(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            # A tracer's mode would create a symbol that the step does not define.
            raise HostReadError("the function reads device data on the host")
        args, kwargs = pytree.tree_map(self._leaf, (args, kwargs))
        return func(*args, **kwargs)

    def stand_in(self, result: Any) -> Any:
        """Return ``result`` with its real tensors replaced by tensors without data."""
        if type(result) in (tuple, list):  # Marks return no other trees; torch.Size is a leaf.
            return type(result)(map(self.stand_in, result))
        return self._leaf(result)

    def _leaf(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        if id(leaf) not in self._known:
            made = torch.empty_strided(
                leaf.shape,
                leaf.stride(),
                dtype=leaf.dtype,
                device=leaf.device,
                requires_grad=leaf.requires_grad,
            )
            self._known[id(leaf)] = (leaf, made)  # the reference to ``leaf`` keeps its id valid
        return self._known[id(leaf)][1]


_Versions = dict[str, list[tuple[int, int]]]
"""Storage address and version counter of the tensors in each argument, except inference tensors."""


class _ClaimCheckScope(Scope):
    """The scope of the eager run that checks the claims of marks.

    Host arguments are tracked, as in a capture under another policy.
    """

    records = False

    def __init__(self, job: Job) -> None:
        self._spec, self._owned = job.spec, job.owned
        self._host: dict[Mark, dict[str, Any]] = {}
        self._stacks = Settings.current().stacks

    def call(self, mark: Mark, args: Args, kwargs: Kwargs) -> Any:
        if Settings.current().stacks != self._stacks:
            raise CaptureError(
                f"{mark.name} was called inside a mode of torch (a TorchFunctionMode, a "
                f"TorchDispatchMode or a default device), at {user_line()}. A trace does not keep "
                f"such modes for marked functions. Enter the mode inside the marked function or "
                f"around the whole capture, or use policy='breakable'."
            )
        first = mark not in self._host
        args, kwargs, host = split_host_args(mark, args, kwargs, self._spec, self._host)
        versions = _versions(mark, args, kwargs) if first else {}
        with entered(None), self._owned.eager_body(mark, args):
            result = mark.fn(*args, **kwargs, **host)
            if first:
                self._compare_writes(mark, versions, _versions(mark, args, kwargs))
            if first and (mark.fake is not None or mark.mutates):
                self._compare(mark, args, kwargs, host, result)
        return result

    @staticmethod
    def _compare_writes(mark: Mark, before: _Versions, after: _Versions) -> None:
        """Raise RegionError if the function wrote arguments that its mark does not declare."""
        declared = {memory for name in mark.mutates for memory, _ in before.get(name, ())}
        for name, versions in before.items():
            if any(v not in after[name] and v[0] not in declared for v in versions):
                raise RegionError(
                    f"{mark.name} wrote its argument {name!r}, but its mark declares writes to "
                    f"{', '.join(mark.mutates) or 'none'}. Policy 'piecewise' needs "
                    f"mutates={(*mark.mutates, name)!r}."
                )

    @staticmethod
    def _compare(mark: Mark, args: Args, kwargs: Kwargs, host: dict[str, Any], result: Any) -> None:
        """Raise RegionError unless the result has the layout that the mark claims."""
        mode = FakeTensorMode()

        def fake(leaf: Any) -> Any:
            return mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf

        args, kwargs = pytree.tree_map(fake, (args, kwargs))
        with mode:
            claimed = _claimed_results(mark, args, kwargs, host)
        said, got = (str(pytree.tree_map(describe, tree)) for tree in (claimed, result))
        if said != got:
            source = "the fake= of its mark returns" if mark.fake else "a mark with mutates= claims"
            raise RegionError(
                f"{mark.name} returned {got}, but {source} {said}. Under policy 'piecewise' later "
                f"code is compiled for the claimed layout: declare a fake= that returns empty "
                f"tensors of the result's layout."
            )


def _versions(mark: Mark, args: Args, kwargs: Kwargs) -> _Versions:
    bound = mark.signature.bind_partial(*args, **kwargs).arguments
    for name, parameter in mark.signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound.update(bound.pop(name, {}))
    return {
        name: [
            (leaf.untyped_storage().data_ptr(), leaf._version)
            for leaf in tensors_in(value)
            if leaf.layout is torch.strided and not leaf.is_inference()
        ]
        for name, value in bound.items()
    }


# The step, traced and cut.


class _TraceScope(Scope):
    """The scope of the trace. Marks return fake results without running their functions."""

    def call(self, mark: Mark, args: Args, kwargs: Kwargs) -> Any:
        args, kwargs, given = mark.split(args, kwargs)
        declared = _active().job.spec.declared
        host = mark.host_kwargs({name: declared.get(name) for name in given})
        with entered(None):
            result = _claimed_results(mark, args, kwargs, host)
        refused = _untraceable(result)
        if refused is not None:
            raise CaptureError(
                f"{mark.name} returned {refused}. Under policy 'piecewise' a marked function "
                f"returns a tensor, None, or a tuple or list of tensors, None, and numbers and "
                f"bools that do not depend on sizes. Compute other values from its arguments "
                f"after the call, or use policy='breakable'."
            )
        return result


def _untraceable(result: Any, index: str = "") -> str | None:
    """Return a description of the first leaf of ``result`` that a trace cannot contain, or None."""
    if type(result) in (tuple, list):
        found = (_untraceable(item, f"{index}[{at}]") for at, item in enumerate(result))
        return next(filter(None, found), None)
    number = isinstance(result, bool | int | float)  # allowed in a trace only inside a tuple
    if result is None or isinstance(result, torch.Tensor) or (number and index):
        return None
    kind = f"a {type(result).__qualname__}"
    if isinstance(result, torch.SymInt | torch.SymFloat | torch.SymBool):
        kind = "a number that depends on a size"
    return f"{kind} as element {index} of its result" if index else kind


def _mark_of(node: Node) -> Mark | None:
    return getattr(node.target, "__devgraph_mark__", None) if node.op == "call_function" else None


_CALLS: tuple[Callable[..., Any], ...] = (marks.graph_break, gates.wait, gates.signal)
"""Marks that are functions to call, not decorators."""


def _is_cut(node: Node) -> bool:
    return node.op == "call_function" and (node.target in _CALLS or _mark_of(node) is not None)


class _Compiler:
    """The ``torch.compile`` backend of this policy, which splits the trace and compiles pieces."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> _Entry:
        step = _active()
        _bind_tokens(graph, step.tokens)
        outside = Modes.current()
        split, modes = _split(graph)
        build = _Build(self.name, step.job.backend.compiled_piece_type)
        for name, piece in list(split.named_children()):
            assert isinstance(piece, GraphModule)
            own, marked = modes[int(name.rpartition("_")[2])], any(map(_is_cut, piece.graph.nodes))
            if self.name != "eager" and not marked:
                # Compiled code never creates inference tensors, and Inductor of torch 2.11 fails
                # on views in inference mode.
                own = own._replace(inference=outside.inference)
            run = piece.forward if marked else build.piece(piece, own)
            setattr(split, name, _Part(run, None if own == outside else own))
        step.build = build
        return _Entry(split.forward, build.pieces)


def _bind_tokens(graph: GraphModule, values: Mapping[str, torch.Tensor]) -> None:
    """Replace tokens in marked calls with reads of host values; refuse other uses of tokens."""
    names = {id(token): name for name, token in values.items()}
    tokens: dict[Node, str] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        argument = node.meta.get("grapharg")
        example = argument.example if argument is not None else None
        if id(example) in names:
            tokens[node] = names[id(example)]
    for node in graph.graph.nodes:
        mark = _mark_of(node)
        if mark is not None:
            _bind_call(graph, node, mark, tokens)
    for token, name in tokens.items():
        for user in token.users:
            raise frozen(name, "", node_line(user) or user)


def _bind_call(graph: GraphModule, node: Node, mark: Mark, tokens: Mapping[Node, str]) -> None:
    args, kwargs, host = mark.split(node.args, dict(node.kwargs))
    for name, value in host.items():
        found = tokens.get(value) if isinstance(value, Node) else None
        if found == name:
            with graph.graph.inserting_before(node):
                kwargs[name] = graph.graph.call_function(_host_value, (name,))
            continue
        if found:
            given, way = f"the value of {found!r}", taken_from(found, name)
        else:
            given = f"a computed or plain value ({value})"
            way = f"Pass the host argument itself, or compute with derive={{{name!r}: ...}}."
        raise FrozenValueError(
            f"region {mark.name} takes host argument {name!r} and was given {given}, at "
            f"{node_line(node) or node}. {way}"
        )
    node.args, node.kwargs = args, kwargs


def _is_mark_element(node: Node) -> bool:
    """Whether ``node`` takes an element from a tuple that a marked function returned."""
    whole = node.args[0] if node.target is operator.getitem else None
    if not isinstance(whole, Node) or not isinstance(whole.meta.get("example_value"), tuple | list):
        return False
    return _is_cut(whole) or _is_mark_element(whole)


_OPENING = {_enter_inference_mode, _enter_autocast}
_CLOSING = {_exit_inference_mode, _exit_autocast}
_MODE_FUNCTIONS = {*_OPENING, *_CLOSING, torch._C._set_grad_enabled}
"""Functions that switch modes in a trace."""


def _split(graph: GraphModule) -> tuple[GraphModule, list[Modes]]:
    """Split ``graph`` into parts at marked functions and where modes change.

    A part must not switch modes, because parts run separately and an exception may end one early.
    Return the split graph, and the modes of each part by the number in the part's name.
    """
    parts: dict[Node, int] = {}
    modes = [Modes.current()]
    opened: dict[Node, Any] = {}
    try:
        for node in graph.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            if node.target in _OPENING:
                opened[node] = node.target(*node.args)
            elif node.target in _CLOSING:
                node.target(opened.pop(node.args[0]))
            elif node.target in _MODE_FUNCTIONS:
                node.target(*node.args)
            elif _is_cut(node):
                parts[node] = len(modes)
                modes.append(modes[-1])
            elif _is_mark_element(node):
                # Keep the node with the marked call: a piece cannot take a tuple as input.
                parts[node] = parts[node.all_input_nodes[0]]
                continue
            else:
                parts[node] = len(modes) - 1
                continue
            modes.append(Modes.current())
    finally:
        for guard in reversed(opened.values()):
            guard.__exit__(None, None, None)
        torch.set_grad_enabled(modes[0].grad)
    for node in reversed(graph.graph.nodes):
        if node.target in _MODE_FUNCTIONS:
            graph.graph.erase_node(node)
    # Read the value of a host argument in the part that uses it.
    for node in parts:
        if node.target is _host_value:
            parts[node] = parts[next(iter(node.users))]
    split = split_module(graph, graph, lambda node: parts[node], keep_original_order=True)
    return split, modes


class _Build:
    """The pieces of one compilation. Equal pieces share compiled code.

    Compilations do not share code, because their guards on sizes differ.
    """

    def __init__(self, compiler: str, piece_type: type[Any] | None) -> None:
        self._compiler = compiler
        self._piece_type = piece_type
        self.known: dict[Any, Callable[..., Any]] = {}  # compiled code by signature of the piece
        self.pieces = 0

    def piece(self, piece: GraphModule, modes: Modes) -> Callable[..., Any]:
        """Return a callable that runs ``piece`` in ``modes``."""
        if not any(_computes(node) for node in piece.graph.nodes):
            return piece.forward
        self.pieces += 1
        inputs = piece.graph.find_nodes(op="placeholder")
        examples = [node.meta["example_value"] for node in inputs]
        key = modes, _signature_of(piece, examples)
        if key not in self.known:
            if self._compiler == "eager":
                self.known[key] = piece.forward
            else:
                with modes.restored():
                    self.known[key] = self._with_inductor(piece, examples)
        return self.known[key]

    def _with_inductor(self, piece: GraphModule, examples: list[Any]) -> Callable[..., Any]:
        output = piece.graph.output_node()
        single = not isinstance(output.args[0], tuple | list)
        if single:  # Inductor needs graphs that return a tuple
            output.args = ((output.args[0],),)
        piece.recompile()
        compiled = compile_fx(piece, examples, config_patches=INDUCTOR_OPTIONS)
        run = cast(Callable[..., Any], compiled)
        if self._piece_type is not None:
            run = self._piece_type(run, piece)
        return (lambda *args: run(*args)[0]) if single else run


def _computes(node: Node) -> bool:
    """Whether ``node`` computes tensors, so that its piece must be compiled."""
    return node.op.startswith("call_") and isinstance(
        node.meta.get("example_value"), torch.Tensor | tuple | list
    )


class _Entry:
    """The code that torch.compile calls after its guards: it runs or captures the pieces.

    The capture begins here, so that it does not record work of the guards.
    """

    def __init__(self, forward: Callable[..., Any], pieces: int) -> None:
        self._forward = forward
        self.pieces = pieces

    def __call__(self, *inputs: Any) -> Any:
        step = _active()
        step.entered_at = time.perf_counter()
        step.entry = self
        if step.session is None:
            with entered(None):
                outputs = self._forward(*inputs)
                step.job.outputs.hold(outputs)
                return outputs
        owned = Owned(self._captured, inputs, {})
        job = attrs.evolve(step.job, fn=self._captured, owned=owned)
        step.plan = plan = capture_segments(job, step.session)
        # The plan keeps the code, which the tracer may drop, and the inputs of this call.
        plan.held = (self, inputs)
        return plan.outputs

    def _captured(self, *inputs: Any, **_: Any) -> Any:
        return self._forward(*inputs)


class _Part(torch.nn.Module):
    """A module that runs one part in its modes; None means the modes of the step."""

    def __init__(self, run: Callable[..., Any], modes: Modes | None) -> None:
        super().__init__()
        self._run = run
        self._modes = modes

    def forward(self, *args: Any) -> Any:
        if self._modes is None:
            return self._run(*args)
        with self._modes.restored():
            return self._run(*args)


def _signature_of(piece: GraphModule, examples: Sequence[Any]) -> Any:
    """Return the signature of a piece: its operations, and the layouts of its inputs."""
    numbers = {node: index for index, node in enumerate(piece.graph.nodes)}

    def plain(value: Any) -> str:
        # Represent a node by its class and position, so that it differs from a number.
        return repr(torch.fx.node.map_arg(value, lambda node: cast(Node, (Node, numbers[node]))))

    def target(node: Node) -> Any:
        if node.op == "get_attr":
            return id(getattr(piece, str(node.target)))
        return None if node.op == "placeholder" else node.target

    nodes = tuple(
        (node.op, target(node), plain(node.args), plain(dict(node.kwargs)))
        for node in piece.graph.nodes
    )
    storages: dict[int, int] = {}

    def layout(example: Any) -> Any:
        if not isinstance(example, torch.Tensor):
            return str(example)
        storage = example.untyped_storage()._cdata
        return (
            type(example),
            example.dtype,
            example.device,
            example.requires_grad,
            str((example.shape, example.stride(), example.storage_offset())),
            storages.setdefault(storage, len(storages)),
        )

    return nodes, tuple(map(layout, examples))


class _CompiledStep:
    """A step that can be compiled, run or captured with its bound arguments."""

    def __init__(self, job: Job, compiler: _Compiler) -> None:
        self.job = job
        self.tokens = {name: torch.zeros((), dtype=torch.int64) for name in job.spec.declared}
        self.live: Mapping[str, Any] = job.spec.declared
        """Host values by name, which replace tokens: plain, or tracked in a capture."""
        self.session: Session | None = None  # the session, during a capture
        self.plan: BreakablePlan | None = None
        self.entry: _Entry | None = None  # the compiled step that ran
        self.entered_at = 0.0
        self.build: _Build | None = None
        """The compilation that this step caused; None if it reuses compiled code."""
        self._compiler = compiler
        if isinstance(job.fn, torch.jit.ScriptModule | torch.jit.ScriptFunction):
            raise CaptureError(
                "policy 'piecewise' compiles the step with torch.compile, which does not accept "
                "torch.jit programs. Pass the original function or module, or capture with "
                "policy='full' or policy='breakable'."
            )
        is_wrapped = hasattr(job.fn, "__devgraph_mark__") or _has_hooks(job.fn)
        fn = _plain_function(job.fn) if is_wrapped else job.fn
        self._step = torch.compile(fn, backend=compiler, fullgraph=True, dynamic=True)

    def __call__(self) -> Any:
        """Call the compiled step. torch.compile compiles it first if its guards fail."""
        job, before, started = self.job, self.build, time.perf_counter()
        outer = _running.set(self)
        try:
            with job.owned.run(strict=True) as (args, kwargs), _settings(), entered(_TraceScope()):
                result = self._step(*args, **kwargs, **self.tokens)
        finally:
            _running.reset(outer)
        if self.build is not before:
            seconds = self.entered_at - started
            job.phases["compile"] = job.phases.get("compile", 0.0) + seconds
        stand_ins = job.spec.tracked()
        names = {id(token): name for name, token in self.tokens.items()}
        given = [stand_ins[names[id(leaf)]] for leaf in tensors_in(result) if id(leaf) in names]
        refuse_host_values((result, given))
        return result

    def warm_up(self) -> None:
        """Run the step once. After a compilation, check it with an eager run."""
        before, failure, result = self.build, None, None
        try:
            result = self()
        except Exception as error:
            if self.entry is not None:
                raise  # Compilation has succeeded, so the error is the step's own.
            failure = error
        if failure is not None:
            # An eager run may raise the step's own exception, or report the line of a host read.
            self._check()
            _raise_explained(failure, self._compiler.name)
        self.job.finish_warmup_run()
        if self.entry is None:
            raise EmptyCaptureError(
                "torch.compile compiled nothing. If the step does no work on tensors, capture a "
                "step that computes with tensors on the backend's device. If torch.compile is off, "
                "unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE, or use policy='breakable'."
            )
        if self.build is not before:
            with self.job.phase("compile"):
                self.job.owned.rewind()
                self._require_alike(tensors_in(result), tensors_in(self._check()))

    def _require_alike(self, traced: list[torch.Tensor], eager: list[torch.Tensor]) -> None:
        """Refuse results of another form than in the eager run; warn of other values.

        Values may differ because a step returns memory that it does not write, and compilers other
        than eager round.
        """
        for one, other in zip(traced, eager, strict=True):
            text = (
                f"the step that torch.compile traced returns {brief(one)} {{}} of an eager run. "
                f"torch.compile may freeze other plain values than the eager run reads, and it "
                f"ignores functools caches. Use policy='breakable', which compiles nothing."
            )
            if (one.dtype, one.shape) != (other.dtype, other.shape):
                raise CaptureError(text.format(f"instead of {brief(other)}, the result"))
            if self._compiler.name == "eager" and not is_near(one, other):
                warn(text.format("with other values than the result"))

    def _check(self) -> Any:
        """Run the step eagerly with tracked host arguments, and check the claims of all marks.

        Return its result.
        """
        job = self.job
        asked: dict[str, SourceLine] = {}
        with entered(_ClaimCheckScope(job)):
            result = job.call_tracked(asked)
        for name, line in asked.items():
            raise FrozenValueError(
                f"policy 'piecewise' traces the step with a tensor for host argument {name!r}, "
                f"so isinstance() sees a different type, at {line}, and the graph would contain "
                f"the wrong branch. Move the line into a function marked "
                f"@dg.region(host_args=({name!r},)), or choose the branch before the step."
            )
        job.finish_warmup_run()
        return result

    def capture(self, session: Session) -> Plan:
        self.live, self.session = self.job.spec.tracked(), session
        outputs = self()
        plan, entry, build = self.plan, self.entry, self.build
        assert plan is not None and entry is not None
        plan.outputs = outputs
        plan.notes.update(
            pieces=entry.pieces,
            pieces_compiled=len(build.known) if build else 0,
            compilations=1 if build else 0,
        )
        return plan


def _plain_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function that calls ``fn``, whose mark or hooks the tracer must not see."""

    def step(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return step


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Configure the tracer to compile once for all sizes."""
    with (
        torch._dynamo.config.patch(
            recompile_limit=RECOMPILE_LIMIT,
            accumulated_recompile_limit=RECOMPILE_LIMIT,
            # Otherwise a float of the model becomes a tensor that is read on the host.
            specialize_float=True,
            # Otherwise code compiled before a hook was added would run without it.
            skip_nnmodule_hook_guards=False,
        ),
        # Otherwise two sizes that are equal now would be treated as one.
        shape_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
    ):
        yield


class _Piecewise(Policy):
    def __init__(self) -> None:
        # The tracer finds compiled code by the identity of the compiler. Each backend has its own
        # compilers, because backends with the same device type may wrap pieces differently.
        self._compilers: dict[tuple[Any, ...], tuple[_Compiler, list[weakref.ref[Any]]]] = {}

    def warm_up(self, job: Job, runs: int) -> Job:
        with job.phase("activate"):
            compiler = self._compiler(job)
            _refuse_compiled(job.fn)
            _refuse_hooks_of_all_modules()
            _allow_marks()
            step = _CompiledStep(job, compiler)
        runs = max(runs, 1)
        while runs > 0 or job.owned.is_unsettled:
            runs -= 1
            job.owned.rewind()
            step.warm_up()
        return attrs.evolve(job, fn=step)

    def capture(self, job: Job, session: Session) -> Plan:
        assert isinstance(job.fn, _CompiledStep), "a step is warmed up before it is captured"
        return job.fn.capture(session)

    def _compiler(self, job: Job) -> _Compiler:
        capabilities = job.backend.capabilities
        if not capabilities.piecewise:
            raise CapabilityError(
                f"backend {job.backend.name!r} does not declare piecewise; use 'full' or "
                f"'breakable'"
            )
        name = job.compiler or "eager"
        if name not in capabilities.compilers:
            raise CapabilityError(
                f"backend {job.backend.name!r} cannot use compiler {name!r}; it supports "
                f"{', '.join(capabilities.compilers)}"
            )
        hooks = _hooks_of(job.fn)
        key = name, type(job.backend), *map(id, hooks)
        for other, (_, held) in [*self._compilers.items()]:
            if any(hook() is None for hook in held):  # a new hook may reuse its id
                del self._compilers[other]
        if job.again:  # The tracer does not guard some state, such as the state of a ChainMap.
            self._compilers.pop(key, None)
        return self._compilers.setdefault(key, (_Compiler(name), [*map(weakref.ref, hooks)]))[0]


def _hooks_of(step: Any) -> tuple[Any, ...]:
    """Return the hooks of the module of ``step``, or of modules in its closure.

    The tracer guards only the number of hooks, so it would reuse code compiled for another hook.
    """
    cells = getattr(step, "__closure__", None) or ()
    holders = [step, getattr(step, "__self__", None), getattr(step, "func", None)]
    with contextlib.suppress(ValueError):  # an empty cell
        holders.extend(cell.cell_contents for cell in cells)
    modules = (holder for holder in holders if isinstance(holder, torch.nn.Module))
    return tuple(
        hook
        for module in modules
        for part in module.modules()
        for hooks in (part._forward_pre_hooks, part._forward_hooks)
        for hook in hooks.values()
    )


def _has_hooks(fn: Any) -> bool:
    """Whether ``fn`` is a module with hooks; the tracer ignores hooks of the outermost module."""
    return isinstance(fn, torch.nn.Module) and bool(fn._forward_pre_hooks or fn._forward_hooks)


def _refuse_hooks_of_all_modules() -> None:
    if _global_forward_pre_hooks or _global_forward_hooks:
        raise CaptureError(
            "hooks are registered for the forward of all modules, but torch.compile ignores them. "
            "Register them on the modules that need them, or use policy='breakable'."
        )


def _refuse_compiled(step: Callable[..., Any]) -> None:
    """Raise CaptureError for a step that torch.compile returned: its tracer would enter marks."""
    wrapped = getattr(step, "_torchdynamo_orig_callable", None) is not None
    disabled = getattr(step, "_torchdynamo_disable", False)
    in_place = isinstance(step, torch.nn.Module) and step._compiled_call_impl is not None
    if (wrapped and not disabled) or in_place:
        raise CaptureError(
            "the step is already compiled by torch.compile. Pass the function or module itself: "
            "policy 'piecewise' compiles it in pieces, with compiler=."
        )


def _raise_explained(error: Exception, compiler: str) -> NoReturn:
    """Raise a CaptureError for a failed compilation, with the user's line and a remedy."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, DeviceGraphError):
            raise inner  # without "from error", because ``inner`` caused ``error``
        inner = inner.__cause__ or inner.__context__
    line = traced_line(error)
    if line is None:
        cure = "" if compiler == "eager" else "compiler='eager' if the compiler failed, or "
        raise CaptureError(
            f"torch.compile could not compile the step for policy 'piecewise': {error}\n"
            f"Use {cure}policy='breakable', which compiles nothing."
        ) from error
    reason = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
    # The tracer raises the last two of these when it traces the mark of a marked method.
    if any(sign in reason for sign in ("args/kwargs to proxy", "ContextVar", "get_ident")):
        raise CaptureError(
            f"policy 'piecewise' needs the whole step in one trace, but the call at {line} passes "
            f"an object that a trace cannot contain. A marked function (not a method) accepts "
            f"tensors, plain values, and tuples, lists and dicts of them. Pass only these, read "
            f"the object with context= on its mark, or use policy='breakable', which accepts any "
            f"object."
        ) from error
    raise CaptureError(
        f"policy 'piecewise' needs the whole step in one trace, but torch.compile cannot trace "
        f"{line} ({reason}). Move the line into a function marked @dg.region, or @dg.no_graph if "
        f"it can never be captured, or use policy='breakable', which does not trace."
    ) from error


_allowed: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def _allow_marks() -> None:
    """Make the tracer treat calls of marked functions as opaque operations."""
    for marked in (*_CALLS, *marks.marked_functions()):
        if marked not in _allowed:
            torch._dynamo.allow_in_graph(marked)  # type: ignore[no-untyped-call]
            _allowed.add(marked)
    torch._dynamo.assume_constant_result(  # type: ignore[no-untyped-call]
        marks.is_capturing
    )


POLICY = _Piecewise()
