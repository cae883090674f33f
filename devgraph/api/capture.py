"""``capture``: a callable, captured under a policy, with one meaning of replay for all of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from devgraph.api import html
from devgraph.api.backend import Backend, own_pool
from devgraph.api.device import raise_if_lost
from devgraph.api.errors import (
    CaptureError,
    InputError,
    InputTypeError,
    NestedCaptureError,
    StateError,
    brief,
    did_you_mean,
    note,
    whole,
)
from devgraph.api.gates import Gates
from devgraph.api.graph import DeviceGraph, GraphInfo, summed
from devgraph.api.inputs import Inputs, Pair, write, write_back
from devgraph.api.marks.gates import entered_gates
from devgraph.api.marks.host_values import HostSpec
from devgraph.api.marks.marks import current_scope
from devgraph.api.marks.names import Names, nodes_text
from devgraph.api.modes import Settings
from devgraph.api.owned import Owned, refuse_fakes, without_history
from devgraph.api.policy import COMPILERS, compiles, get_policy
from devgraph.api.policy.job import Job, Plan, UpdateBudget
from devgraph.api.pool import Pool
from devgraph.api.process import identity
from devgraph.api.prove import Draw, Report, addresses, prove
from devgraph.api.registry import get_backend
from devgraph.api.results import Outputs
from devgraph.api.session import session, supported_error_mode
from devgraph.api.snapshots import DEFAULT_LIMIT


class Captured:
    """A captured callable; made by ``capture``.

    ``replay(**host_args)`` does what ``fn(*args, **host_args)`` does, with the data that the
    bound tensors hold now. ``replay(*inputs, **host_args)``, or a call of the capture, copies new
    inputs into the bound tensors first. ``outputs`` are the same tensors every time: the next
    replay of this capture overwrites them, and no other capture of the pool does. Only what torch's
    pytrees find counts as output: an object of an unregistered class is returned as it is, and the
    tensors in it are overwritten by replays of other captures as well.
    """

    def __init__(self, job: Job, plan: Plan, policy: str, seconds: float, gates: Gates) -> None:
        self.policy = policy
        self.gates = gates
        """The gates of the step, by name."""
        self._marks = gates.recorded
        self.backend = job.backend
        self.pool = job.pool
        self.capture_seconds = seconds
        self.phases: dict[str, float] = job.phases
        """Seconds that each phase of the capture took: warm-up, capture, and under ``piecewise``
        activate and compile before them."""
        self._job: Job | None = job
        self.exact = not compiles(policy) or job.compiler in (None, "eager")
        """Whether replays run the kernels of eager, and so equal it bit for bit."""
        self._plan = plan
        self._spec = job.spec
        self.settings = Settings.current()
        """The settings of torch at the capture."""
        self.places: Mapping[str, int] = addresses(job.owned.everything())
        """Addresses at capture of the tensors that the step reaches, by name."""
        self._process = identity.token
        self._lock = job.pool.lock
        self._waits = job.check
        self._broken = len(plan.segments) > 1 or not isinstance(plan.segments[0], DeviceGraph)
        self._checks = job.owned.watch()
        self._host_names = job.spec.declared.keys()
        self._inputs: Inputs | None = Inputs(job.owned, job.spec.declared)

    @property
    def outputs(self) -> Any:
        """What ``fn`` returned, at fixed addresses."""
        return self._plan.outputs

    @property
    def segments(self) -> list[Any]:
        """The captured graphs and eager segments in launch order."""
        return self._plan.segments

    def replay(self, /, *inputs: Any, **named: Any) -> Any:
        """Run the captured work on the current stream and return ``outputs``.

        Args:
            *inputs: new data for the first of the bound arguments, copied into them: what stays
                out keeps the data that it has. Shapes, dtypes, devices and everything that is no
                tensor must be those of capture.
            **named: a value for every declared host argument without a default in ``fn``'s
                signature; nothing is remembered from earlier calls. And new data for bound
                arguments by their names.

        Raises:
            HostArgumentError: host arguments are missing, unknown or ill-typed (a TypeError).
            InputError: new data does not fit what is bound; nothing was changed.
            StateError: closed, in a forked process, or a bound tensor has moved, was replaced or
                has another layout.
            NestedCaptureError: inside a capture.
        """
        self._check()
        pairs: Sequence[Pair] = ()
        if inputs or not named.keys() <= self._host_names:
            assert self._inputs is not None  # only close takes it
            pairs, named = self._inputs.taken(inputs, named)
        values = self._spec.fill(named)
        with self._lock:
            if self.pool.occupied:
                self.pool.require_free("replay a capture")
            self.pool.order()
            try:
                if pairs:
                    write(pairs)
                self.run(values)
                if pairs:
                    assert self._job is not None
                    write_back(pairs, self._job.owned.written)
            except Exception as error:
                raise_if_lost(self.backend, error)
                raise
        return self._plan.outputs

    __call__ = replay

    def run(self, host: Mapping[str, Any]) -> None:
        """Do what ``replay`` does for a caller that has checked already what it would check.

        The caller is in the process of the capture and outside of captures, has not closed it,
        holds the pool's lock, has called ``pool.order()``, gives a value of the declared type for
        every host argument, and asks ``raise_if_lost`` about errors.
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
                values = {}
                for mark in plan.marks:  # a comprehension is one call more in each replay
                    values[mark] = mark.host_kwargs(host)
                plan.bind(values)
            if self._broken and not self.settings.hold():
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
        """``run`` without host arguments, if it is nothing but one launch."""
        return None if self._plan.marks or self._broken or self._waits else self._plan.run

    def _check(self) -> None:
        if self._job is None:
            raise StateError("this capture is closed; capture again")
        if identity.token is not self._process:
            identity.require(self._process, "replay a capture")
        if current_scope() is not None:
            raise NestedCaptureError("cannot replay a capture inside a capture")
        refuse_fakes("replay a capture")
        for check in self._checks:
            check()

    @property
    def host_spec(self) -> HostSpec:
        """The declared host arguments."""
        return self._spec

    @property
    def written(self) -> Collection[int]:
        """Identities of the tensors in arguments that the step writes."""
        return () if self._job is None else self._job.owned.written

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
        """Replay against eager runs of ``fn`` on fresh inputs.

        Each case runs eagerly and as a graph from the same state: arguments, ``bound`` tensors,
        parameters and buffers, and random generators. Outputs and state are compared. Afterwards
        the state has its contents from before the proof, bit for bit.

        Args:
            cases: number of cases per set of host arguments.
            host_args: the sets to try. By default those of capture, and the smallest and largest
                values that ``sample`` draws.
            sample: functions of a shape and a ``torch.Generator`` on the host that return legal
                data, by names of parameters or host arguments. Without one, floating-point data is
                random, and integers keep their values.
            state: compare state as well as outputs.
            rtol, atol: tolerances where a compiler chose other kernels than eager; those of torch
                for the dtype by default. Everything else must be equal bit for bit.
            snapshot_limit: bytes of copies of the state. Larger tensors are hashed.

        Returns:
            a report with ``ok``, ``failures``, ``causes`` and ``not_varied``.

        Raises:
            CaptureError: a case wrote a tensor above ``snapshot_limit``, or replaced a tensor.
        """
        self._check()
        assert self._job is not None
        with self.gates.held_open():
            return prove(
                self,
                self._job,
                cases=cases,
                host_args=host_args,
                sample=sample,
                state=state,
                rtol=rtol,
                atol=atol,
                snapshot_limit=snapshot_limit,
            )

    def info(self) -> GraphInfo:
        """Return the sums over all segments."""
        state = "closed" if self._job is None else "ready"
        return summed(self.segments, state=state, capture_seconds=self.capture_seconds)

    def pin(self, pinned: bool = True) -> None:
        """Keep the executables of all segments, whatever the budget of the pool is, or no more."""
        for segment in self.segments:
            if isinstance(segment, DeviceGraph):
                segment.pinned = pinned

    def explain(self) -> str:
        """Return segments, regions and nodes as text."""
        size = _counted(len(self.segments), "segment")
        lines = [f"policy {self.policy} on {self.backend.name}: {size}"]
        for index, segment in enumerate(self.segments):
            if isinstance(segment, DeviceGraph):
                first, *rest = _about(segment)
                lines.append(f"  {index}: {first}")
                lines.extend(f"  {line}" for line in rest)
            else:
                lines.append(f"  {index}: {segment!r}")
        recordings = self.pool.recordings
        lines.append(
            f"  recordings: {len(recordings)} in the pool, {recordings.bytes} bytes with "
            f"executables, {recordings.hits} hits, {recordings.misses} misses, "
            f"{recordings.evictions} evictions"
        )
        spent = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in self.phases.items())
        lines.append(f"  phases: {spent}")
        lines.extend(f"  {name}: {value}" for name, value in self.stats().items())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the segments and counters as tables, for notebooks."""
        rows: list[tuple[object, ...]] = []
        for index, segment in enumerate(self.segments):
            if isinstance(segment, DeviceGraph):
                info = segment.info()
                regions = ", ".join(hit.mark.name for hit in segment.hits)
                rows.append((index, "graph", info.nodes, regions or None, info.bytes))
            else:
                rows.append((index, repr(segment).strip("<>"), None, None, None))
        spent = [(name, f"{seconds:.3f} s") for name, seconds in self.phases.items()]
        columns = ("#", "segment", "nodes", "updatable regions", "bytes")
        return html.table(
            f"policy {self.policy} on {self.backend.name}", columns, rows
        ) + html.table("time and counters", ("", ""), [*spent, *self.stats().items()])

    def stats(self) -> dict[str, Any]:
        """Return what the policy counted, by name; see the policies for the names."""
        in_breaks = self._marks.in_breaks
        return {**self._plan.notes, **({"gates_in_breaks": in_breaks} if in_breaks else {})}

    def close(self) -> None:
        """Free all segments. Idempotent."""
        if self._job is None:
            return
        with self.pool.lock:
            self.pool.require_free("close a capture")
            self._plan.close()
        self._job = self._inputs = None
        self._checks = []

    def __enter__(self) -> Captured:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        what = "closed" if self._job is None else _counted(len(self.segments), "segment")
        return f"<Captured {self.policy} on {self.backend.name}: {what}>"

    def __reduce__(self) -> Any:
        raise TypeError("a capture owns device resources and cannot be pickled or copied")


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
) -> Captured:
    """Capture ``fn(*args, **kwargs, **host_args)`` and return what replays it.

    The tensors in the arguments are bound: their addresses are in the graph, and new data is
    written into them. After the call, they, the buffers of modules that the step reaches, and the
    random generators that it reaches have their old values. Parameters keep what the step wrote.
    Python state that the step changed is named in a ``DeviceGraphWarning``.

    Args:
        fn: the step. It receives host arguments as keywords; see ``region`` for their rules.
        args, kwargs: its bound arguments: tensors, plain values, and trees of lists, tuples,
            mappings, dataclasses, attrs classes, namespaces and registered pytrees. The step gets
            containers of its own. Of modules and other objects the tensors are bound.
        policy: "full", "breakable" or "piecewise".
        backend: a name or a backend.
        host_args: names and capture values of the host arguments.
        warmup: runs of the step before the capture, on the capture stream (2 as torch recommends
            for libraries that set themselves up lazily). "piecewise" runs the compiled step, and
            once at least after it compiled. The last gives the outputs their memory where other
            captures share the pool: with 0 runs a replay of an earlier capture overwrites them.
        pool: graph memory to share with other captures; a new one if None.
        compiler: what compiles the pieces of "piecewise"; the other policies have none.
        capture_error_mode: see ``Backend.capture_context``.
        before_break: called before the eager body of each break during a breakable capture, for
            example a barrier between ranks.
        after_warmup: called after each warm-up run, for example to put back what the step wrote.
        check: wait for the device after every segment of a replay, so that an error of the device
            is raised by the segment that made it; the notes of an error name it.
        name_nodes: note which nodes each marked function launches, and with a module which nodes
            its submodules do, for ``explain`` and for ``ranges`` of the graphs among ``segments``.
            Submodules are hooked for the time of the capture; pieces of "piecewise" call none.
        budget: what policy "full" may spend in a replay on host arguments that are new.
        bound: what else the graph uses, by name: trees of tensors, modules, and functions that
            return such trees (``lambda: model.cache``). Every replay compares them, in about
            0.1 us a tensor, and refuses to run with a tensor that was replaced.
        snapshot_limit: bytes of copies that the capture may take of tensors in arguments and in
            ``bound`` and of buffers of modules, to give them their values back. Larger tensors in
            arguments and in ``bound`` are hashed, and must not be written.
        gate_timeout: seconds after which a replay counts as invalid if one of its gates is closed;
            by default those of the environment variable DEVGRAPH_GATE_TIMEOUT, or 30.
        gates: gates to share with other captures of the pool; ``gate_timeout`` is theirs.

    Raises:
        CaptureError: the step cannot be captured; nothing is left behind.
        InputError: an argument of this function is out of range; InputTypeError: of another kind.
        HostArgumentError: ``host_args`` does not fit ``fn`` (a TypeError).
    """
    _require("fn", fn, callable(fn), "a callable")
    for what, given in (("kwargs", kwargs), ("bound", bound)):
        is_mapping = isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
        _require(what, given, given is None or is_mapping, "a mapping with strings as keys")
    for what, called in (("before_break", before_break), ("after_warmup", after_warmup)):
        _require(what, called, called is None or callable(called), "a function")
    _require("budget", budget, isinstance(budget, UpdateBudget | None), "an UpdateBudget")
    spec = HostSpec(host_args, fn)
    twice = sorted(set(kwargs or ()) & set(spec.declared))
    if twice:
        raise InputError(f"{', '.join(twice)}: given both in kwargs and in host_args")
    whole("warmup", warmup)
    whole("snapshot_limit", snapshot_limit)
    refuse_fakes("capture")
    device = backend if isinstance(backend, Backend) else get_backend(backend)
    chosen = get_policy(policy)
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
    )
    started = time.perf_counter()
    with (
        entered_gates(gates),
        session(memory, mode=job.capture_error_mode) as held,
        owned.kept(device, snapshot_limit) as same,
    ):
        with job.phase("warm-up"):
            ready = chosen.warm_up(job, warmup)
            device.synchronize()
            same()
        hooked = names.hooked() if names and not compiles(policy) else contextlib.nullcontext()
        with job.phase("capture"), hooked:
            plan = chosen.capture(ready, held)
            try:
                same()
            except CaptureError:
                plan.close()
                raise
            plan.outputs = without_history(plan.outputs)
    gates.complete = True
    return Captured(job, plan, policy, time.perf_counter() - started, gates)


def _name(fn: Callable[..., Any]) -> str:
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))


def _require(what: str, value: object, fits: bool, wanted: str) -> None:
    if not fits:
        raise InputTypeError(f"{what} must be {wanted}, got {brief(value)}")


def _about(graph: DeviceGraph) -> list[str]:
    """Return one line about the graph, one about each of its regions, and one about each call
    whose nodes have a name."""
    info = graph.info()
    line = f"graph, {_counted(info.nodes, 'node')}, {info.bytes} bytes"
    if graph.hits:
        line += f", {_counted(info.recordings, 'recording')}"
    lines = [line]
    for hit in graph.hits:
        nodes = "? nodes" if hit.nodes is None else nodes_text(hit.nodes.start, hit.nodes.stop)
        lines.append(f"    region {hit.index}: {hit.mark.name}, {nodes}")
    return [*lines, *(f"    {'  ' * one.depth}{one}" for one in graph.ranges)]


def _counted(number: int | None, what: str) -> str:
    return f"{'?' if number is None else number} {what}{'' if number == 1 else 's'}"
