"""``capture`` records a step as device graphs; ``Captured`` replays them under any policy."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch

from devgraph.api import html
from devgraph.api.backend import Backend, own_pool
from devgraph.api.device import raise_if_lost, refuse_foreign_capture
from devgraph.api.errors import (
    DeviceGraphError,
    InputError,
    InputTypeError,
    NestedCaptureError,
    StateError,
    brief,
    counted,
    did_you_mean,
    format_bytes,
    note,
    whole,
)
from devgraph.api.gates import Gates
from devgraph.api.graph import DeviceGraph, GraphInfo, summed
from devgraph.api.guard import LATE, Guard, change_in
from devgraph.api.inputs import Inputs, Pair, write, write_back
from devgraph.api.marks.gates import entered_gates
from devgraph.api.marks.host_values import HostSpec
from devgraph.api.marks.marks import current_scope
from devgraph.api.marks.names import Names, nodes_text
from devgraph.api.marks.source import warn
from devgraph.api.modes import Settings
from devgraph.api.owned import Gradients, Owned, refuse_fakes, without_history
from devgraph.api.policy import COMPILERS, compiles, get_policy
from devgraph.api.policy.job import Job, Plan, UpdateBudget
from devgraph.api.pool import Pool
from devgraph.api.process import identity, several_ranks
from devgraph.api.prove import Draw, Report, Terms, addresses, prove
from devgraph.api.registry import get_backend
from devgraph.api.results import Containers, Outputs
from devgraph.api.session import explained, session, supported_error_mode
from devgraph.api.snapshots import DEFAULT_LIMIT
from devgraph.api.tensors import has_place, tensors_in


class Captured:
    """A captured callable, returned by ``capture``.

    ``replay(**host_args)`` equals ``fn(*args, **host_args)`` on the current data of the bound
    tensors. ``replay(*inputs, **host_args)``, or a call of the capture, first copies new inputs
    into the bound tensors. ``outputs`` are the same tensors in every replay. The next replay of
    this capture overwrites them; replays of other captures do not. An output that is a view of an
    argument shares the memory of the bound tensor. New inputs of every capture that binds this
    tensor overwrite the output. Only tensors in containers that are registered with torch's pytree
    are outputs. An object of another class is returned as it was at capture, and replays of other
    captures may overwrite its tensors.
    """

    def __init__(self, job: Job, plan: Plan, policy: str, seconds: float, gates: Gates) -> None:
        self.policy = policy
        self.gates = gates
        """The gates of the step, by name."""
        self.backend = job.backend
        self.pool = job.pool
        self.exact = not compiles(policy) or job.compiler in (None, "eager")
        """Whether replays run the same kernels as eager runs, so that results are bitwise equal."""
        self.host_spec = job.spec
        self.settings = Settings.current()
        """torch's settings at the capture."""
        self._process = identity.token
        self._lock = job.pool.lock
        self._waits = job.check
        self._host_names = job.spec.declared.keys()
        self._recaptures = 0
        self._use(job, plan, seconds)

    def _use(self, job: Job, plan: Plan, seconds: float) -> None:
        """Let replays run ``plan``, a capture of ``job``."""
        self.capture_seconds = seconds
        self.phases: dict[str, float] = job.phases
        """Duration in seconds of each phase of the capture, such as "warm-up" and "capture"."""
        self._marks = self.gates.recorded
        self._job: Job | None = job
        self._plan = plan
        held = job.owned.everything()
        self.places: Mapping[str, int] = addresses(held)
        """Addresses at capture of the tensors that the step can reach, by name."""
        self._broken = [isinstance(segment, DeviceGraph) for segment in plan.segments] != [True]
        self._given, found = job.owned.watch()
        self._watched = [*self._given, *found]
        outside = (
            ("{}.token is {}", (identity, self._process)),
            ("{}() is None", (current_scope,)),
            ("not {}()", (torch._C._len_torch_dispatch_stack,)),
        )
        named = job.owned.watch_named(regions=job.regions)
        self.gradients = job.owned.gradients
        """The gradients that replays accumulate."""
        self.guard = Guard([*self._watched, *named, Containers(plan.outputs)], outside)
        """The comparison of the step's current state with its state at the capture."""
        self._inputs: Inputs | None = Inputs(job.owned, job.spec.declared, held)

    @property
    def outputs(self) -> Any:
        """The results of ``fn``, at fixed addresses."""
        return self._plan.outputs

    @property
    def segments(self) -> list[Any]:
        """The captured graphs and eager segments in launch order."""
        return self._plan.segments

    def replay(self, /, *inputs: Any, **named: Any) -> Any:
        """Run the captured work on the current stream and return ``outputs``.

        Args:
            *inputs: new data to copy into the bound arguments, in their order. Omitted arguments
                keep their data. Shapes, dtypes and devices must be those of the capture.
                A changed argument without tensors needs a new capture; see ``recaptures`` of
                ``capture``.
            **named: new data for bound arguments by name, and a value for each declared host
                argument without a default in the signature of ``fn``. Host arguments of earlier
                calls are not remembered.

        Raises:
            HostArgumentError: host arguments are missing, unknown or of a wrong type (a TypeError).
            InputError: new data does not match the bound arguments. No tensor was changed.
            StateError: the capture is closed or belongs to another process, a bound tensor has
                moved, was replaced or has a new layout, or other state differs from the capture
                and cannot be captured again; see ``recaptures`` of ``capture``.
            NestedCaptureError: the call is inside a capture.
        """
        kept = None if self.guard.same() else self._settled(inputs, named)
        pairs: Sequence[Pair] = ()
        if inputs or not named.keys() <= self._host_names:
            assert self._inputs is not None  # only close() sets it to None
            try:
                pairs, named = self._inputs.taken(inputs, named)
            except InputError as error:
                with self._lock:
                    kept = self._capture_again(inputs, named, error)
                pairs, named = self._inputs.taken(inputs, named)
        values = self.host_spec.fill(named)
        with self._lock:
            if self.pool.occupied:
                self.pool.require_free("replay a capture")
            self.pool.order()
            try:
                if pairs and kept is None:
                    kept = write(pairs, self._plan.outputs, self.written)
                self.run(values)
                if pairs:
                    write_back(pairs, self.written, kept or ())
            except Exception as error:
                raise_if_lost(self.backend, error)
                raise
        return self._plan.outputs

    def __call__(self, /, *inputs: Any, **named: Any) -> Any:
        """Run ``replay`` with new data for all arguments that contain tensors, or for none.

        Raises:
            InputError: only some of these arguments receive new data. ``replay`` lists the other
                errors.
        """
        if (inputs or named) and self._inputs is not None:
            self._inputs.require_all(inputs, named)
        return self.replay(*inputs, **named)

    def _settled(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> list[Pair] | None:
        """Return None if the state is unchanged, else the result of ``_capture_again``."""
        self._require_open()
        with self._lock:
            try:
                self.guard.settle()
                return None
            except StateError as error:
                for part in self._given:
                    part.check()
                return self._capture_again(inputs, named, error)

    def _capture_again(
        self, inputs: Sequence[Any], named: Mapping[str, Any], cause: DeviceGraphError
    ) -> list[Pair]:
        """Capture the step with its current state and inputs, or raise ``cause`` if not allowed.

        Return the bound tensors to restore after the replay, as ``write`` does.
        """
        job, bound = self._job, self._inputs
        assert job is not None and bound is not None
        values = bound.other_values(inputs, named)
        is_vain = isinstance(cause, InputError) and not values
        is_spent = self._recaptures >= job.recaptures or several_ranks() or not job.may_capture()
        if is_vain or is_spent:
            raise cause
        try:
            pairs, host = bound.holding(values).taken(inputs, named)
        except InputError as error:
            raise error from None  # If a tensor does not fit, ``cause`` has the same text.
        self.host_spec.fill(host)
        self.pool.require_free("capture")
        self.pool.order()
        kept = write(pairs, None)
        self._recaptures += 1
        owned = job.owned.renewed(values)
        outputs = Outputs(self.pool, (t for _, t in owned.tensors), job.outputs, self.outputs)
        job = attrs.evolve(job, owned=owned, outputs=outputs, phases={}, again=True)
        with self.settings.restored():
            plan, seconds = _planned(job, self.policy, self.gates, weights=True)
        self._plan.close()
        self._use(job, plan, seconds)
        warn(
            f"a replay captured the step again, because {change_in(cause)}. Keep state that "
            f"changes often in tensors, and write into them.{f' {LATE}' * (LATE in str(cause))} "
            f"Replays capture a step at most {job.recaptures} times (recaptures=)."
        )
        return kept

    def run(self, host: Mapping[str, Any]) -> None:
        """Replay without the checks of ``replay``.

        The capture must be open and belong to this process. The caller must be outside of captures,
        hold the pool's lock, have called ``pool.order()``, pass a value of the declared type for
        every host argument, and pass errors to ``raise_if_lost``.
        """
        if self._marks:
            with self.gates.launch(self._marks):
                self._run(host)
            if self._waits:
                self.gates.check()
        else:
            self._run(host)

    def _run(self, host: Mapping[str, Any]) -> None:
        plan = self._plan
        try:
            if plan.marks:
                plan.bind({mark: mark.host_kwargs(host) for mark in plan.marks})
            if self._broken and not self.settings.are_active():
                with self.settings.restored():
                    plan.run()
            else:
                plan.run()
            if self._waits:
                self.backend.synchronize()
        except Exception as error:
            note(error, f"in a replay of {self!r}")
            raise

    @property
    def launch(self) -> Callable[[], None] | None:
        """A callable that replays; None unless a replay is one launch without host arguments."""
        return None if self._plan.marks or self._broken or self._waits else self._plan.run

    def _require_open(self) -> None:
        if self._job is None:
            raise StateError("this capture is closed; capture again")
        if identity.token is not self._process:
            identity.require(self._process, "replay a capture")
        if current_scope() is not None:
            raise NestedCaptureError(
                "cannot replay a capture inside a capture: call its step instead, or mark the "
                "calling function @dg.no_graph and capture with policy='breakable'."
            )
        if torch._C._len_torch_dispatch_stack():
            refuse_fakes("replay a capture")

    @property
    def written(self) -> Collection[int]:
        """The ``id`` of each argument tensor that the step writes."""
        return () if self._job is None else self._job.owned.written

    @property
    def changed(self) -> list[torch.Tensor]:
        """The tensors, other than arguments and weights, that the step writes."""
        changed = () if self._job is None else self._job.owned.changed.values()
        return [tensor for tensor in changed if has_place(tensor)]

    def prove(
        self,
        cases: int = 3,
        host_args: Sequence[Mapping[str, Any]] | None = None,
        *,
        sample: Mapping[str, Draw] | None = None,
        state: bool = True,
        rtol: float | None = None,
        atol: float | None = None,
        snapshot_limit: int = DEFAULT_LIMIT,
    ) -> Report:
        """Compare replays with eager runs of ``fn`` on fresh inputs.

        Each case runs eagerly and as a graph from the same state: arguments, ``bound`` tensors,
        parameters and buffers, and random generators. Outputs and state are compared. The
        state is then restored bit for bit.

        Args:
            cases: number of cases per set of host arguments.
            host_args: sets of host arguments. By default the values at capture, and the smallest
                and the largest values that ``sample`` draws.
            sample: functions that return legal data, by names of parameters or host arguments. Each
                takes a shape and a ``torch.Generator`` on the host. Without a function,
                floating-point data is random, and integers keep their values.
            state: whether to compare state in addition to outputs.
            rtol: relative tolerance for results of a compiler whose kernels differ from those of
                eager runs; by default, torch's tolerance for the dtype. Other results must be equal
                bit for bit.
            atol: absolute tolerance for these results.
            snapshot_limit: maximum total size of the copies of the state, in bytes. Larger
                tensors are hashed.

        Returns:
            A report with ``ok``, ``failures``, ``causes`` and ``not_varied``.

        Raises:
            CaptureError: a case wrote a tensor above ``snapshot_limit``.
        """
        terms = Terms(
            cases=cases,
            host_args=host_args,
            sample=sample,
            state=state,
            rtol=rtol,
            atol=atol,
            snapshot_limit=snapshot_limit,
        )
        self._require_open()
        for part in self._watched:
            part.check()
        assert self._job is not None
        try:
            with self.gates.held_open(), self.uncounted_misses():
                return prove(self, self._job, terms)
        except Exception as error:
            raise_if_lost(self.backend, error)
            raise

    @contextlib.contextmanager
    def uncounted_misses(self) -> Iterator[None]:
        """Record new keys in the block without counting them against the budget of misses."""
        plan: Any = self._plan
        before, plan.free_misses = getattr(plan, "free_misses", True), True
        try:
            yield
        finally:
            plan.free_misses = before

    def info(self) -> GraphInfo:
        """Return the totals of all segments."""
        state = "closed" if self._job is None else "ready"
        return summed(self.segments, state=state, capture_seconds=self.capture_seconds)

    def pin(self, pinned: bool = True) -> None:
        """Prevent the eviction of the executables; with ``pinned=False``, allow it again."""
        for segment in self.segments:
            if isinstance(segment, DeviceGraph):
                segment.pinned = pinned

    def explain(self) -> str:
        """Return segments, regions, nodes and memory as text."""
        recordings = self.pool.recordings
        memory = f"{format_bytes(recordings.bytes)} with executables"
        pool = f"pool: {counted(len(recordings), 'recording')}, {memory}"
        return f"{self.summary()}\n  {pool}, {counted(recordings.evictions, 'eviction')}"

    def summary(self) -> str:
        """Return the part of ``explain`` that does not concern other captures of the pool."""
        size = counted(len(self.segments), "segment")
        lines = [f"policy {self.policy} on {self.backend.name}: {size}"]
        for index, segment in enumerate(self.segments):
            about = _about(segment) if isinstance(segment, DeviceGraph) else [repr(segment)]
            lines.append(f"  {index}: {about[0]}")
            lines.extend(f"  {line}" for line in about[1:])
        spent = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases.items())
        counts = ", ".join(f"{name}: {round(n, 3)}" for name, n in self.stats().items() if n)
        return "\n".join([*lines, f"  phases: {spent}", *[f"  {counts}"] * bool(counts)])

    def _repr_html_(self) -> str:
        rows: list[tuple[object, ...]] = []
        for index, segment in enumerate(self.segments):
            if isinstance(segment, DeviceGraph):
                info = segment.info()
                regions = ", ".join(call.mark.name for call in segment.calls)
                rows.append((index, "graph", info.nodes, regions or None, format_bytes(info.bytes)))
            else:
                rows.append((index, repr(segment).strip("<>"), None, None, None))
        spent = [(name, f"{seconds:.3f} s") for name, seconds in self.phases.items()]
        columns = ("#", "segment", "nodes", "updatable regions", "bytes")
        spent += [(name, value) for name, value in self.stats().items() if value]
        segments = html.table(f"policy {self.policy} on {self.backend.name}", columns, rows)
        return segments + html.table("time and counters", ("", ""), spent)

    def stats(self) -> dict[str, Any]:
        """Return the counters of the policy.

        With host arguments under ``full``, ``repeats`` counts replays with the previous key,
        ``hits`` those with an earlier key, ``misses`` recorded keys, ``copies`` topology copies,
        and ``broken_over_miss_budget`` and ``broken_over_copy_budget`` replays that ran as under
        ``breakable`` because a budget was empty.
        """
        in_breaks = self._marks.in_breaks
        return {**self._plan.notes, **({"gates_in_breaks": in_breaks} if in_breaks else {})}

    def close(self) -> None:
        """Free all segments. Idempotent."""
        with self.pool.lock:
            if self._job is None:
                return
            self.pool.require_free("close a capture")
            self._plan.close()
        self._job = self._inputs = None
        self._given, self._watched, self.guard = [], [], Guard(())
        self.gradients = Gradients(())

    def __enter__(self) -> Captured:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._job is None else counted(len(self.segments), "segment")
        return f"<Captured {self.policy} on {self.backend.name}: {state}>"

    def __reduce__(self) -> Any:
        raise InputTypeError("a capture owns device resources and cannot be pickled or copied")


def capture(
    fn: Callable[..., Any],
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    policy: str = "full",
    backend: str | Backend = "auto",
    host_args: Mapping[str, Any] | None = None,
    warmup: int = 2,
    pool: Pool | None = None,
    compiler: str | None = None,
    capture_error_mode: str = "thread_local",
    before_break: Callable[[], None] | None = None,
    after_warmup: Callable[[], None] | None = None,
    budget: UpdateBudget | None = None,
    check: bool = False,
    name_nodes: bool | torch.nn.Module = False,
    bound: Mapping[str, Any] | None = None,
    snapshot_limit: int = DEFAULT_LIMIT,
    gate_timeout: float | None = None,
    gates: Gates | None = None,
    recaptures: int = 8,
) -> Captured:
    """Capture ``fn(*args, **kwargs, **host_args)``.

    The tensors in the arguments are bound: their addresses are in the graph, and new data is
    written into them. After the call, these tensors, and the buffers and random generators that the
    step can reach, have their old values. Parameters keep the values that the step wrote. A
    ``DeviceGraphWarning`` names Python state that the step changed.

    Args:
        fn: the step. It receives host arguments as keywords; see ``region`` for their rules.
        *args: the bound arguments of the step: tensors, plain values, and trees of lists, tuples,
            mappings, dataclasses, attrs classes, namespaces and registered pytrees. The step
            receives copies of the containers. The tensors in modules and other objects are bound.
        kwargs: bound arguments by name.
        policy: "full", "breakable" or "piecewise".
        backend: a backend or its name.
        host_args: the host arguments and their values at capture.
        warmup: number of runs of the step before the capture, on the capture stream. torch
            recommends two, which suffice for libraries that initialize lazily. "piecewise" runs the
            compiled step at least once. If other captures share the pool, the last run allocates
            memory for the outputs. With 0 runs, replays of earlier captures may overwrite the
            outputs.
        pool: graph memory to share with other captures; None creates a pool.
        compiler: compiler of the pieces of "piecewise". Other policies accept only None.
        capture_error_mode: see ``Backend.capture_context``.
        before_break: called before the eager body of each break of a breakable capture, for example
            a barrier of ranks.
        after_warmup: called after each warm-up run, for example to restore state.
        check: whether replays wait for the device after each segment. A device error is then raised
            by its segment, and the notes of the error name that segment.
        name_nodes: True, False or a module: whether to record the nodes of each marked function,
            for ``explain`` and for ``ranges`` of the graphs in ``segments``. If it is a module,
            hooks also record the nodes of its submodules, except under "piecewise".
        budget: budget of policy "full" for new host arguments in replays.
        bound: other state of the graph by name: random generators, trees of tensors, modules, and
            functions that return such trees (``lambda: model.cache``). Every replay compares the
            tensors, in about 0.1 us each, and raises StateError if one was replaced.
        snapshot_limit: maximum size in bytes of the copies that restore tensors in arguments and
            ``bound``, and buffers of modules, after the capture. A larger tensor in arguments or
            ``bound`` is hashed, and the capture fails if the step writes it.
        gate_timeout: seconds after which a closed gate invalidates a replay. By default the value
            of the environment variable DEVGRAPH_GATE_TIMEOUT, or 30.
        gates: gates to share with other captures of the pool, instead of ``gate_timeout``.
        recaptures: maximum number of new captures by replays. A replay captures again, with a
            warning, if state that the step reaches (weights, attributes, globals, closures, hooks,
            modes) or an input without tensors differs from the capture. Beyond this number, the
            replay raises an error.

    Returns:
        The captured step.

    Raises:
        CaptureError: the step cannot be captured. All effects are undone.
        InputError: an argument of this function is out of range.
        InputTypeError: an argument of this function has a wrong type.
        HostArgumentError: ``host_args`` does not match ``fn`` (a TypeError).
    """
    if not callable(fn) or isinstance(fn, type):
        raise InputTypeError(
            f"fn must be a function or a module, got {brief(fn)}. Pass the step and its inputs: "
            f"capture(step, x), not capture(step(x), x)."
        )
    for name, given in (("kwargs", kwargs), ("bound", bound)):
        is_mapping = isinstance(given, Mapping) and all(isinstance(key, str) for key in given)
        _require(name, given, given is None or is_mapping, "a mapping with strings as keys")
    for name, hook in (("before_break", before_break), ("after_warmup", after_warmup)):
        _require(name, hook, hook is None or callable(hook), "a function")
    _require("budget", budget, isinstance(budget, UpdateBudget | None), "an UpdateBudget")
    spec = HostSpec(host_args, fn)
    duplicates = sorted(set(kwargs or ()) & set(spec.declared))
    if duplicates:
        raise InputError(f"{', '.join(duplicates)}: given both in kwargs and in host_args")
    whole("warmup", warmup)
    whole("snapshot_limit", snapshot_limit)
    whole("recaptures", recaptures)
    refuse_fakes("capture")
    device = backend if isinstance(backend, Backend) else get_backend(backend)
    refuse_foreign_capture(device, "capture")
    get_policy(policy)
    memory = own_pool(device, pool)
    if compiler is not None and compiler not in COMPILERS:
        raise InputError(f"no compiler {compiler!r}. {did_you_mean(str(compiler), COMPILERS)}")
    owned = Owned(fn, args, kwargs or {}, bound)
    names = None if name_nodes is False else Names(name_nodes)
    if gates is None:
        gates = Gates(device, f"the capture of {_name(fn)}", timeout=gate_timeout)
    job = Job(
        fn=fn,
        owned=owned,
        spec=spec,
        backend=device,
        pool=memory,
        outputs=Outputs(memory, (tensor for _, tensor in owned.tensors)),
        capture_error_mode=supported_error_mode(device, capture_error_mode),
        compiler=compiler,
        before_break=before_break,
        budget=budget,
        check=check,
        after_warmup=after_warmup,
        names=names,
        warmup=warmup,
        snapshot_limit=snapshot_limit,
        recaptures=recaptures,
        regions=policy == "full",
    )
    try:
        plan, seconds = _planned(job, policy, gates)
    except TypeError as error:
        if str(error).startswith(f"{_name(fn)}() missing"):
            way = "pass inputs after the step: capture(step, x). Pass keyword arguments as"
            note(error, f"{way} kwargs={{...}} and host arguments as host_args={{...}}")
        raise
    return Captured(job, plan, policy, seconds, gates)


def _planned(job: Job, policy: str, gates: Gates, *, weights: bool = False) -> tuple[Plan, float]:
    """Capture ``job``; return the plan and the seconds. ``weights`` restores parameters too."""
    chosen, names, owned = get_policy(policy), job.names, job.owned
    job.require_device(owned.tensors)
    started = time.perf_counter()
    with (
        entered_gates(gates),
        session(job.pool, mode=job.capture_error_mode) as recording,
        owned.kept(
            job.backend, job.snapshot_limit, weights=weights, regions=job.regions
        ) as require_places,
        explained(job.backend),  # inside ``kept``, which restores more after devgraph's errors
    ):
        with job.phase("warm-up"):
            ready = chosen.warm_up(job, job.warmup)
            job.backend.synchronize()
            require_places()
        owned.rewind()
        hooked = names.hooked() if names and not compiles(policy) else contextlib.nullcontext()
        with job.phase("capture"), hooked:
            plan = chosen.capture(ready, recording)
            try:
                require_places()
                job.require_device(("an output", tensor) for tensor in tensors_in(plan.outputs))
            except DeviceGraphError:
                plan.close()
                raise
            plan.outputs = without_history(plan.outputs)
    gates.complete = True
    return plan, time.perf_counter() - started


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))


def _require(name: str, value: object, fits: bool, wanted: str) -> None:
    if not fits:
        raise InputTypeError(f"{name} must be {wanted}, got {brief(value)}")


def _about(graph: DeviceGraph) -> list[str]:
    """Return a line for the graph, and one for each region and each named range of nodes."""
    info = graph.info()
    line = f"graph, {counted(info.nodes, 'node')}, {format_bytes(info.bytes)}"
    if graph.calls:
        line += f", {counted(info.recordings, 'recording')}"
    lines = [line]
    for call in graph.calls:
        nodes = "? nodes" if call.nodes is None else nodes_text(call.nodes.start, call.nodes.stop)
        lines.append(f"    region {call.index}: {call.mark.name}, {nodes}")
    return [*lines, *(f"    {'  ' * one.depth}{one}" for one in graph.ranges)]
