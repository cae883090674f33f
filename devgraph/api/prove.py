"""Proofs: comparisons of replays with eager runs, and the report about them."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from devgraph.api.backend import Backend, poison
from devgraph.api.errors import (
    InputError,
    InputTypeError,
    brief,
    counted,
    did_you_mean,
    note,
    whole,
)
from devgraph.api.reach import Watch, optimizer_state, reached
from devgraph.api.snapshots import (
    DEFAULT_LIMIT,
    RowPlace,
    RowsOf,
    Snapshot,
    differs,
    read,
    row_at,
)
from devgraph.api.tensors import has_place, unexpanded
from devgraph.api.trees import leaves_of

if TYPE_CHECKING:
    from devgraph.api.policy.job import Job

Draw = Callable[[tuple[int, ...], torch.Generator], Any]
"""A function that takes a shape and a generator on the host, and returns legal data."""

NamedTensors = list[tuple[str, torch.Tensor]]
_Compare = Callable[[torch.Tensor, torch.Tensor], str]
_DRAWS = 16
"""Number of values drawn for a host argument. The smallest and the largest become cases."""


@attrs.frozen(kw_only=True)
class Terms:
    """The cases of a proof, and the settings of its comparison."""

    cases: int
    host_args: Sequence[Mapping[str, Any]] | None = None
    sample: Mapping[str, Draw] | None = None
    state: bool = True
    rtol: float | None = None
    atol: float | None = None
    snapshot_limit: int = DEFAULT_LIMIT
    quick: bool = False
    """Whether to omit parameters, poisoned padding, and comparisons with the unpadded batch."""

    def __attrs_post_init__(self) -> None:
        whole("cases", self.cases)
        whole("snapshot_limit", self.snapshot_limit)

    def near(self, expected: torch.Tensor, got: torch.Tensor) -> str:
        return compare_near(expected, got, self.rtol, self.atol)


@attrs.frozen(kw_only=True)
class Case:
    """One comparison of a graph with an eager run."""

    number: int
    host_args: Mapping[str, Any]
    bucket: str = ""
    """Bucket and size of the batch; empty for a capture without buckets."""
    padded: bool = False
    """Whether the batch is smaller than its bucket."""
    changed: bool = False
    """Whether host arguments differ from the values at capture."""
    updated: bool = False
    """Whether host arguments again have the values at capture, after cases with other values."""
    filled: tuple[str, ...] = ()
    """Input slots whose real rows are pad values, because no legal data is known for this size."""

    def failure(self, where: str, message: str, kind: str = "graph", **lasting: bool) -> Failure:
        own: dict[str, Any] = {"host_args": self.host_args, "bucket": self.bucket, **lasting}
        return Failure(case=self.number, where=where, message=message, kind=kind, **own)


@attrs.frozen(kw_only=True)
class Failure:
    """A difference between a replay and an eager run, or another fault of a case."""

    case: int
    host_args: Mapping[str, Any]
    where: str
    """Path of the output, argument or state that differs."""
    message: str
    kind: str = "graph"
    """``graph``, ``padding`` (padded rows affect real rows), ``size`` (the result depends on the
    size of the bucket) or ``eager`` (eager differs from itself)."""
    bucket: str = ""
    lasting: bool = True
    """Whether a second replay from the same state differs from the eager run as well."""

    @property
    def complete(self) -> bool:
        """Whether all elements differ."""
        share = re.search(r"(\d+) (?:of|/) (\d+)", self.message)
        return self.message.startswith("is ") or (share is not None and share[1] == share[2])

    def __str__(self) -> str:
        host = f", host arguments {dict(self.host_args)}" if self.host_args else ""
        bucket = f", {self.bucket}" if self.bucket else ""
        return f"case {self.case}{bucket}{host}: {self.where} {self.message}".rstrip()


@attrs.frozen(kw_only=True, repr=False)
class Report:
    """The result of ``prove`` on a capture or a runner."""

    cases: int
    """Number of cases that were compared."""
    failures: tuple[Failure, ...]
    exact: bool = True
    """Whether graphs were compared bit for bit, because no compiler chose other kernels."""
    not_varied: tuple[str, ...] = ()
    """Inputs, slots and host arguments that had the same data in all cases, because a proof does
    not invent integers. Declare ``sample=`` or a range for them."""
    near: tuple[str, ...] = ()
    """Outputs and state that were compared within torch's tolerance, because two eager runs from
    the same state differed in the last bits."""
    tried: tuple[Case, ...] = ()
    replaced: tuple[str, ...] = ()
    """Names of tensors whose memory differs from their memory at capture."""
    moved: tuple[str, ...] = ()
    """Names of Python values that eager runs changed."""
    changed: str = ""
    """A description of the first change of other watched state; empty without failures."""
    draws: bool = False
    """Whether the step draws random numbers from a default generator."""

    @property
    def ok(self) -> bool:
        """Whether at least one case ran and none failed. A report is true in this case only."""
        return self.cases > 0 and not self.failures

    def __bool__(self) -> bool:
        return self.ok

    @property
    def causes(self) -> tuple[str, ...]:
        """The likely cause of each group of failures, with its evidence."""
        return tuple(_causes(self))

    @classmethod
    def merged(cls, reports: Iterable[Report]) -> Report:
        """Return one report about the cases of all ``reports``."""
        cases, failures, tried = 0, list[Failure](), list[Case]()
        reports = [*reports]
        for report in reports:
            failures += (attrs.evolve(f, case=f.case + cases) for f in report.failures)
            tried += (attrs.evolve(c, number=c.number + cases) for c in report.tried)
            cases += report.cases
        return cls(
            cases=cases,
            failures=tuple(failures),
            exact=all(report.exact for report in reports),
            draws=any(report.draws for report in reports),
            changed=next((r.changed for r in reports if r.changed), ""),
            tried=tuple(tried),
            **{
                field: tuple(dict.fromkeys(name for r in reports for name in getattr(r, field)))
                for field in ("not_varied", "near", "replaced", "moved")
            },
        )

    def __repr__(self) -> str:
        return f"<Report: {str(self).splitlines()[0]}>"

    def __str__(self) -> str:
        if not self.cases:
            return "nothing was compared: no graph is captured, or no case was requested"
        same = ", ".join(self.not_varied)
        notes = [f"not varied: {same} (sample= or host_args= vary them)"] * bool(same)
        if self.near:
            notes.append(f"within tolerance, like two eager runs: {', '.join(self.near)}")
        if self.ok:
            how = "bit for bit" if self.exact else "within tolerance"
            cases = counted(self.cases, "case")
            return "; ".join([f"{cases}: graphs equal eager {how}", *notes])
        failures = counted(len(self.failures), "failure")
        first = "; ".join([f"{failures} in {counted(self.cases, 'case')}", *notes])
        causes = (f"cause: {cause}" for cause in self.causes)
        return "\n".join([first, *causes, *map(str, self.failures)])


def _causes(report: Report) -> Iterator[str]:
    kinds: dict[str, list[Failure]] = {"padding": [], "eager": [], "size": [], "graph": []}
    for failure in report.failures:
        kinds[failure.kind].append(failure)
    yield from dict.fromkeys(failure.message for failure in kinds["padding"])
    if unstable := kinds["eager"]:
        moved = f" (changed Python state: {', '.join(report.moved)})" if report.moved else ""
        yield (
            f"eager differs from itself in {_where(unstable)}: the step reads Python state or "
            f"uninitialized memory, or draws from an unregistered generator{moved}"
        )
    causes = []
    if sized := kinds["size"]:
        causes.append(
            f"{_where(sized)} of real rows depends on padding or on the size of the bucket, in "
            f"{_count(sized)}; graphs equal eager runs of the padded batch"
        )
    wavering = {failure.where for failure in unstable}
    graphs = [failure for failure in kinds["graph"] if failure.where not in wavering]
    causes += [_cause_in_graphs(report, graphs)] if graphs else []
    cases = {case.number: case for case in report.tried}
    filled = [cases[failure.case].filled for failure in report.failures]
    if filled and all(filled):
        names = sorted({name for names in filled for name in names})
        missing = (
            f"no real data: pad values in {', '.join(names)}, in {_count(report.failures)}. "
            f"Declare sample= or a range, or run batches of these sizes before the proof"
        )
        if (graphs or not sized) and all(failure.complete for failure in graphs):
            causes.append(missing)
        else:
            causes = [missing, *(f"if failures remain with real data: {c}" for c in causes)]
    yield from causes


def _cause_in_graphs(report: Report, failures: Sequence[Failure]) -> str:
    """Return the likely cause of ``failures``, whose replays differ from a stable eager run."""
    failed = {failure.case for failure in failures}
    wrong = [case for case in report.tried if case.number in failed]
    right = [case for case in report.tried if case.number not in failed]
    always = not any(case.number for case in right)  # the first case may be right by chance
    values = ", ".join(dict.fromkeys(str(dict(case.host_args)) for case in wrong))
    buckets, tried = _buckets(wrong), _buckets(report.tried)
    outputs = [failure for failure in failures if failure.where.startswith("output")]
    drawn = all(failure.where.startswith("random generator") for failure in failures)
    lost = (
        "a replay does not advance a generator as an eager run does"
        if drawn
        else "a write of the step is lost, is repeated, or changes other memory"
    )
    others = ", or updates reach other regions" * any(case.host_args for case in wrong)
    others += ", or the graph of another bucket or variant runs" * (len(tried) > 1)
    unknown = (
        "the step reads an unmarked host value, a setting of torch, or a tensor that was replaced"
        f"{others}"
    )
    changed = report.changed and f"the step reads an unmarked host value: {report.changed}"
    shared = (
        f"a branch taken at capture is in the graph, or memory is shared with other work{others}"
    )

    def only(field: str) -> bool:
        has = attrgetter(field)
        return all(map(has, wrong)) and not all(map(has, right))

    causes = {
        f"replaced weight or cache: {', '.join(report.replaced)} has different memory than at "
        "capture, but graphs use the old memory": report.replaced,
        "only the first replay of a case differs, not a second replay from the same state: the "
        "step reads memory before it is written, or leaves work on a side stream that is not "
        "joined": not any(failure.lasting for failure in failures),
        f"only with changed host arguments ({values}): a captured value is in the graph, or "
        "updates are lost. Read host arguments in marked functions": only("changed"),
        "only after an update: values of an earlier case stay in the graph, or an update reaches "
        "another region": only("updated"),
        "every case of a step that draws random numbers: a replay does not advance the generator "
        "as an eager run does": report.draws and always,
        "outputs that equal other outputs: the graph writes both into the same memory "
        f"({failures[0].where} {failures[0].message})": all(_EQUALS in f.message for f in failures),
        "only padded batches: real rows read padded rows": only("padded"),
        f"only state differs: {changed or lost}": (not outputs),
        f"only {', '.join(buckets)}: the graph of another bucket runs, or a value that depends on "
        "the size is in the graph": len(buckets) < len(tried),
        f"every element in every case: {changed or unknown}": always
        and all(failure.complete for failure in outputs),
        f"only some rows or outputs: {changed or shared}": True,
    }
    cause = next(cause for cause, holds in causes.items() if holds)
    return f"{cause} ({_where(failures)} differs in {_count(failures)} of {report.cases})"


_EQUALS = "and equals output"


def _buckets(cases: Iterable[Case]) -> dict[str, None]:
    return dict.fromkeys(case.bucket.partition(",")[0] for case in cases)


def _where(failures: Iterable[Failure]) -> str:
    return ", ".join(dict.fromkeys(failure.where for failure in failures))


def _count(failures: Iterable[Failure]) -> str:
    return counted(len({failure.case for failure in failures}), "case")


def randomize(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Replace the data of a floating-point or complex tensor with noise.

    Data between 0 and 1 becomes noise between 0 and 1, and other non-negative data becomes
    non-negative noise, because operators check probabilities and variances. Integers and bools keep
    their values, because they may be indices, offsets or counts.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return
    shape, cpu = tensor.shape, torch.device("cpu")
    with torch.inference_mode():
        if tensor.dtype is torch.float4_e2m1fn_x2:  # It has no kernels, and all bits are legal.
            bits = torch.randint(256, shape, generator=generator, dtype=torch.uint8, device=cpu)
            tensor.view(torch.uint8).copy_(bits)
            return
        if tensor.is_complex():
            noise = torch.randn(shape, generator=generator, dtype=torch.complex64, device=cpu)
        else:
            data = tensor.float()
            low, high = data.min().item(), data.max().item()
            draw = torch.rand if low >= 0 and high <= 1 else torch.randn
            noise = draw(shape, generator=generator, dtype=torch.float32, device=cpu)
            if low >= 0:
                noise = noise.abs()
        tensor.copy_(noise)


def compare(expected: torch.Tensor, got: torch.Tensor) -> str:
    """Return the difference between tensors as text, or "" if they are equal bit for bit.

    0.0 and -0.0 differ, and so do NaNs with different bits.
    """
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return (
            f"is {got.dtype} {tuple(got.shape)} and should be "
            f"{expected.dtype} {tuple(expected.shape)}"
        )
    a, b = _plain(expected), _plain(got)
    if not a.numel():
        return ""
    same = (_bytes(a) == _bytes(b)).all(1).view(a.shape)
    wrong = int((~same).sum())
    if not wrong:
        return ""
    where = tuple((~same).nonzero()[0].tolist())
    one, other = f"{b[where]}", f"{a[where]}"
    said = f"{one} not {other}" if one != other else f"{one} with different bits"
    return f"differs in {wrong} of {counted(a.numel(), 'element')}, first at {where}: {said}"


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8).view(-1, tensor.itemsize)


def compare_near(
    expected: torch.Tensor, got: torch.Tensor, rtol: float | None = None, atol: float | None = None
) -> str:
    """Return the difference between tensors as text, or "" if they are equal within tolerance.

    NaN equals NaN.
    """
    try:
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


@contextlib.contextmanager
def in_case(case: Case, inputs: Iterable[tuple[str, torch.Tensor]]) -> Iterator[None]:
    """Note the case and the ranges of its integer inputs on an error of the block."""
    try:
        yield
    except Exception as error:
        texts = [f"in case {case.number} of the proof"] + [case.bucket] * bool(case.bucket)
        for name, data in inputs:
            with contextlib.suppress(Exception):  # A lost device cannot be read.
                if not (data.is_floating_point() or data.is_complex()) and data.numel():
                    texts.append(f"input {name!r} from {data.min().item()} to {data.max().item()}")
        note(error, f"{', '.join(texts)}; sample= replaces the data of an input")
        raise


class State:
    """The tensors and generators that all cases of a proof start from."""

    def __init__(
        self,
        backend: Backend,
        named: Iterable[tuple[str, torch.Tensor]],
        roots: Iterable[tuple[str, Any]] = (),
        *,
        limit: int = DEFAULT_LIMIT,
    ) -> None:
        roots = [*roots]
        self.snapshot = Snapshot(backend, named, reached(roots)[1], limit=limit)
        self._watch = Watch(roots, gradients=True)
        self.rebound: set[int] = set()
        """The ``id`` of each tensor that an eager run replaced. Such tensors are not compared."""
        self.moved: dict[str, None] = {}
        """Names of Python values that eager runs changed."""
        self.written: set[str] = set()
        """Names of tensors that runs changed."""
        self.constant: dict[str, None] = {}
        """Names of written tensors that stay zero, because a proof gives them no other values."""
        self._fresh = False
        self._backend = backend
        self._random = self._next_random = self.snapshot.random

    def begin(self) -> None:
        """Restore the state that each run of a case starts from.

        The default random generator is not restored but continues from the end of the previous
        case. Otherwise, a graph that repeats the draws of its capture would pass.
        """
        if self._fresh:  # Nothing ran since the start of the case.
            self.snapshot.restore_random()
        else:
            self.snapshot.restore()
        self._fresh = False
        self._backend.set_rng_state(self._random)

    def begin_case(
        self,
        rows: torch.Tensor | None = None,
        disturbed: RowsOf | None = None,
    ) -> None:
        """Advance the default random generator, and prepare the first run of a case.

        ``rows`` of large tensors are saved, and the rows ``disturbed`` are changed.
        """
        self._random = self._next_random
        self.snapshot.settle()
        if rows is not None:
            self.snapshot.save_rows(rows)
        self.vary()
        if disturbed is not None:
            self.snapshot.disturb(self.written, disturbed)
        self.begin()
        self._fresh = True

    def vary(self) -> bool:
        """Give written tensors values other than zero. Return whether any were zero until now."""
        changed, constant = self.snapshot.vary(self.written)
        self.constant |= dict.fromkeys(constant)
        return changed

    def draws(self) -> bool:
        """Whether a run drew from the default random generator of the backend."""
        now = self._backend.get_rng_state()
        if torch.equal(now, self._random):
            return False
        self._next_random = now
        return True

    def settle(self) -> None:
        """Restore tensors that an eager run replaced, and record Python values that it changed."""
        for change in self._watch.changes(lambda path, *_: self.moved.setdefault(path), empty=True):
            self.rebound |= {*map(id, change.before)} - {id(tensor) for _, tensor in change.tensors}
        self._watch.put_back()

    def changes(self) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Return the state that differs from the start of the run, by name.

        Each value contains a copy of the contents, the contents at the start, and the row numbers
        if only rows are saved.
        """
        changed = {}
        for name, tensor, now, saved, rows in self.snapshot.changes():
            if id(tensor) not in self.rebound:
                changed[name] = (now.clone(), saved, rows)
        for index, (state, saved) in enumerate(self.snapshot.generator_states()):
            if not torch.equal(state, saved):
                changed[f"random generator {index}"] = (state, saved, None)
        self.written |= changed.keys()
        return changed


@attrs.frozen(kw_only=True)
class RunResult:
    """Outputs of a run, and the state that it changed."""

    outputs: NamedTensors
    state: Mapping[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]
    draws: bool = False
    """Whether the run drew random numbers."""


Run = Callable[[], NamedTensors]


def no_rows(tensor: torch.Tensor, numbers: torch.Tensor | None) -> Iterable[RowPlace]:
    return ()


class Comparison:
    """A comparison of runs of one step that start from the same state."""

    def __init__(
        self,
        state: State,
        backend: Backend,
        near: _Compare,
        *,
        with_state: bool = True,
        loops: bool = False,
        agreed: Callable[[bool], bool] = bool,
    ) -> None:
        self.state = state
        self._backend = backend
        self._near = near
        self._with_state = with_state
        self._loops = loops
        self.agreed = agreed
        self.draws = False
        self.tolerated: dict[str, None] = {}
        """Names that were compared within tolerance, because two eager runs differed."""

    def result_of(self, run: Run) -> RunResult:
        """Return the outputs of ``run`` and the state that it changed."""
        self.state.begin()
        outputs = run()
        self._backend.synchronize()
        self.state.settle()
        draws = self.state.draws()
        self.draws |= draws
        state = self.state.changes() if self._with_state else {}
        draws |= any(name.startswith("random generator") for name in state)
        return RunResult(outputs=outputs, state=state, draws=draws)

    def failures(
        self,
        case: Case,
        eager: Run,
        graph: Run,
        *,
        exact: bool,
        shared: RowsOf = no_rows,
        scratch: RowsOf = no_rows,
    ) -> tuple[RunResult, RunResult, list[Failure]]:
        """Return the results of both runs and the failures. If results differ, repeat the runs.

        With ``exact``, results must be equal bit for bit. Two kinds of state rows are exempt.
        ``shared`` rows, which several rows of the batch write, are not compared if two eager runs
        differ. ``scratch`` rows are also written by several rows, but no real row reads them. The
        order of these writes is undefined, so the check only requires that both runs write the
        rows. If the step ``loops``, the check does not even require this.
        """

        def how(name: str) -> _Compare:
            return compare_near if name in unstable else compare if exact else self._near

        def differ(
            other: RunResult, how: Callable[[str], _Compare] = how, shared: RowsOf = no_rows
        ) -> list[tuple[str, str]]:
            return self.differences(expected, other, how, shared, scratch)

        unstable: set[str] = set()
        expected, got = self.result_of(eager), self.result_of(graph)
        differing = differ(got)
        if not self.agreed(bool(differing)):
            if not self.agreed(self.state.vary()):
                return expected, got, []
            # The first runs started from zeros, which may hide a wrong factor.
            return self.failures(case, eager, graph, exact=exact, shared=shared, scratch=scratch)
        again = self.result_of(eager)
        if not differ(again, lambda _: compare):
            shared = no_rows
        differing = differ(got, how, shared)
        repeats = differ(again, lambda _: compare, shared)
        beyond = differ(again, lambda _: compare_near, shared)
        repeated = self.result_of(graph)

        if beyond:
            unlike = [case.failure(where, message, "eager") for where, message in beyond]
            return expected, got, unlike
        if exact and repeats:
            unstable |= {where for where, _ in repeats}
            self.tolerated |= dict.fromkeys(unstable)
            differing = differ(got, how, shared)
        lasting = {where for where, _ in differ(repeated, how, shared)}
        twins = _twins(expected.outputs, got.outputs)
        return (
            expected,
            got,
            [
                case.failure(where, message + twins.get(where, ""), lasting=where in lasting)
                for where, message in differing
            ],
        )

    def differences(
        self,
        want: RunResult,
        got: RunResult,
        how: Callable[[str], _Compare],
        shared: RowsOf = no_rows,
        scratch: RowsOf = no_rows,
    ) -> list[tuple[str, str]]:
        """Return the names of outputs and state that differ, each with a description."""
        names = [name for name, _ in want.outputs]
        others = [name for name, _ in got.outputs]
        if names != others:
            return [("outputs", f"are {', '.join(others)} and should be {', '.join(names)}")]
        pairs = [
            (name, one, other)
            for (name, one), (_, other) in zip(want.outputs, got.outputs, strict=True)
        ]
        rows_of_state: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}
        for name in {**want.state, **got.state}:
            _, saved, rows = want.state.get(name) or got.state[name]
            rows_of_state[name] = saved, rows
            one = want.state[name][0] if name in want.state else saved
            other = got.state[name][0] if name in got.state else saved
            pairs.append((name, one, other))
        flags = read(differs(one, other) for _, one, other in pairs)
        for index, flag in enumerate(flags):
            name, one, other = pairs[index]
            if flag and name in rows_of_state:
                saved, rows = rows_of_state[name]
                other = other.clone()
                for place in shared(one, rows):
                    row_at(other, place).copy_(row_at(one, place))
                for place in scratch(one, rows):
                    row, now, then = (row_at(tensor, place) for tensor in (one, other, saved))
                    # A loop in a graph may end before it writes padding.
                    if self._loops or all(read([differs(then, row), differs(then, now)])):
                        now.copy_(row)
                pairs[index] = name, one, other
        named = (
            (name, how(name)(one, other)) for name, one, other in itertools.compress(pairs, flags)
        )
        return [(name, message) for name, message in named if message]


def rows_of(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the rows where ``mask`` is true; bytes are indexed, because some dtypes cannot be."""
    flat = tensor.reshape(len(tensor), -1).contiguous().view(torch.uint8)
    return flat[mask].view(tensor.dtype).reshape(-1, *tensor.shape[1:])


def _twins(want: NamedTensors, got: NamedTensors) -> dict[str, str]:
    """Return a text for each output that equals another one in the replay, but not in eager."""
    expected, twins = dict(want), {}
    for (name, one), (twin, other) in itertools.permutations(got, 2):
        if not compare(one, other) and compare(expected[name], expected[twin]):
            twins[name] = f" {_EQUALS} {twin.removeprefix('output ')}"
    return twins


def addresses(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in named}


def replaced(then: Mapping[str, int], now: Mapping[str, int]) -> tuple[str, ...]:
    """Return the names of the tensors whose memory was replaced."""
    return tuple(name for name, address in then.items() if now.get(name, address) != address)


def host_sets(
    captured: Mapping[str, Any],
    given: Sequence[Mapping[str, Any]] | None,
    further: Iterable[Mapping[str, Any]],
) -> list[tuple[dict[str, Any], bool, bool]]:
    """Return host arguments, ``Case.changed`` and ``Case.updated`` for each case of a proof.

    The host arguments come from ``given`` or, if it is None, from ``captured`` and ``further``.
    """
    if given is not None and not (
        isinstance(given, Sequence) and all(isinstance(values, Mapping) for values in given)
    ):
        raise InputTypeError(
            f"host_args of prove must be a list with one mapping per set of values, such as "
            f"[{{'kv_len': 777}}], got {brief(given)}"
        )
    sets = [dict(values) for values in ([captured, *further] if given is None else given)]
    unique: list[dict[str, Any]] = []
    for values in sets:
        if values not in unique:
            unique.append(values)
    marked = [(values, values != captured, False) for values in unique]
    if given is None and len(unique) > 1:
        marked.append((dict(captured), False, True))
    return marked


def extremes(draw: Draw, like: Any, generator: torch.Generator) -> list[Any]:
    """Draw ``_DRAWS`` values for a host argument; return the smallest and the largest.

    If ``like``, a value of the argument, is not a number, return the first two drawn values.
    """
    drawn = [draw((), generator) for _ in range(_DRAWS)]
    values = [value.item() if isinstance(value, torch.Tensor) else value for value in drawn]
    return [min(values), max(values)] if isinstance(like, int | float) else values[:2]


def require_samples(sample: object, names: Iterable[str]) -> Mapping[str, Draw]:
    """Return the argument ``sample`` of a proof, after checking that its keys are in ``names``."""
    if sample is None:
        return {}
    if not isinstance(sample, Mapping) or not all(map(callable, sample.values())):
        raise InputTypeError(
            f"sample of prove must map names to functions of a shape and a generator, got "
            f"{brief(sample)}"
        )
    known = [*names]
    for name in sample:
        if name not in known:
            raise InputError(f"sample: there is no {name!r}. {did_you_mean(str(name), known)}")
    return sample


def drawn(name: str, draw: Draw, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return new data for ``tensor``, drawn with ``draw`` on the host.

    Raises:
        InputTypeError: the data has another shape, or a fraction that integers would lose.
    """
    with torch.device("cpu"):
        try:
            data: torch.Tensor = draw(tuple(tensor.shape), generator)
        except Exception as error:
            note(error, f"in the sample of {name!r}, which gets a shape and a torch.Generator")
            raise
    real = tensor.is_floating_point() or tensor.is_complex()
    if (
        not isinstance(data, torch.Tensor)
        or data.shape != tensor.shape
        or (data.is_floating_point() and not real)
    ):
        raise InputTypeError(
            f"sample={{{name!r}: ...}} must return data for {brief(tensor)}, but returned "
            f"{brief(data)}"
        )
    return data.to(device=tensor.device, dtype=tensor.dtype)


class _Prover:
    def __init__(self, captured: Any, job: Job, sample: Mapping[str, Draw], limit: int) -> None:
        self._captured = captured
        self._job = job
        self._generator = torch.Generator().manual_seed(0)
        owned = job.owned
        self._sample = {
            path: sample[name]
            for name in sample
            for path, _ in owned.tensors
            if path == name or re.match(rf"{re.escape(name)}[.\[]", path)
        }
        self.inputs = [(path, unexpanded(leaf)) for path, leaf in owned.tensors[: len(owned.given)]]
        now = owned.everything()
        self.replaced = replaced(captured.places, addresses(now))
        # Each case writes new data into replaced tensors, because the old memory, which the graph
        # uses, may hold the same data.
        self._renewed = [(name, leaf) for name, leaf in now if name in self.replaced]
        arguments = [(f"argument {path}", leaf) for path, leaf in owned.tensors]
        # The last name of a tensor takes precedence.
        self._state = [*optimizer_state(owned.roots), *owned.reached()[0], *arguments]
        given = sum(leaf.nbytes for _, leaf in self.inputs)
        self.state = State(job.backend, self._state, owned.roots, limit=limit + given)

    def not_varied(self) -> list[str]:
        """Return the names of bound tensors whose data is the same in all cases."""
        rest = [path for path, _ in self._job.owned.in_objects]
        given = {f"argument {path}" for path, _ in self.inputs}
        rest += [name for name in self.state.constant if name not in given]
        return rest + [
            path
            for path, leaf in self.inputs
            if path not in self._sample and not (leaf.is_floating_point() or leaf.is_complex())
        ]

    def runs(self, host: Mapping[str, Any]) -> tuple[Run, Run]:
        """Return an eager run and a replay as functions, both on one set of new inputs."""
        data = []
        for path, leaf in [*self.inputs, *self._renewed]:
            if path in self._sample:
                value = drawn(path, self._sample[path], leaf, self._generator)
            else:
                value = leaf.detach().clone()
                randomize(value, self._generator)
            data.append((leaf, value))

        def enter() -> None:
            with torch.inference_mode():
                for leaf, value in data:
                    leaf.copy_(value)

        def eager() -> NamedTensors:
            enter()
            with self._captured.settings.restored():
                return copies_of(self._job.call(host))

        def graph() -> NamedTensors:
            enter()
            self._poison_outputs()
            pool = self._job.pool
            with pool.lock:
                pool.require_free("prove a capture")
                pool.order()
                self._captured.run(self._job.spec.fill(host))
            return copies_of(self._captured.outputs)

        return eager, graph

    def _poison_outputs(self) -> None:
        kept = {leaf.untyped_storage().data_ptr() for _, leaf in self._state}
        for _, output in _named_tensors(self._captured.outputs):
            if has_place(output) and output.untyped_storage().data_ptr() not in kept:
                with torch.inference_mode():
                    poison(unexpanded(output))


def copies_of(outputs: Any) -> NamedTensors:
    return [(name, tensor.detach().clone()) for name, tensor in _named_tensors(outputs)]


def _named_tensors(outputs: Any) -> NamedTensors:
    """Return the tensors in outputs by name; wrapper subclasses are split into inner tensors."""
    named: NamedTensors = []
    for path, leaf in leaves_of("", outputs):
        name = f"output {path or 0}"
        if is_traceable_wrapper_subclass(leaf):
            inner, _ = leaf.__tensor_flatten__()
            named += ((f"{name}.{part}", getattr(leaf, part)) for part in inner)
        elif isinstance(leaf, torch.Tensor):
            named.append((name, leaf))
    return named


def prove(captured: Any, job: Job, terms: Terms) -> Report:
    declared = job.spec.declared
    paths = [path for path, _ in job.owned.tensors]
    sample = require_samples(terms.sample, [*declared, *job.owned.arguments, *paths])
    generator = torch.Generator().manual_seed(0)
    ends = {
        name: extremes(sample[name], declared[name], generator)
        for name in declared
        if name in sample
    }
    further = [
        {**declared, **{n: values[k] for n, values in ends.items()}} for k in range(2) if ends
    ]
    sets = host_sets(declared, terms.host_args, further)
    for values, *_ in sets:
        job.spec.fill(values)  # refuses missing and unknown names before anything runs
    prover = _Prover(captured, job, sample, terms.snapshot_limit)
    comparison = Comparison(prover.state, job.backend, terms.near, with_state=terms.state)
    failures: list[Failure] = []
    tried: list[Case] = []
    try:
        for host, changed, updated in sets:
            for _ in range(min(terms.cases, 1) if updated else terms.cases):
                prover.state.begin_case()
                case = Case(number=len(tried), host_args=host, changed=changed, updated=updated)
                tried.append(case)
                runs = prover.runs(host)
                with in_case(case, prover.inputs):
                    failures += comparison.failures(case, *runs, exact=captured.exact)[-1]
    finally:
        prover.state.snapshot.end_cases()
    prover.state.snapshot.require_unwritten("a case of the proof")
    fixed = [name for name in declared if len({str(host[name]) for host, *_ in sets}) < 2]
    return Report(
        cases=len(tried),
        failures=tuple(failures),
        exact=captured.exact,
        not_varied=(*prover.not_varied(), *fixed),
        near=tuple(comparison.tolerated),
        tried=tuple(tried),
        replaced=prover.replaced,
        moved=tuple(prover.state.moved),
        draws=comparison.draws,
        changed=captured.guard.difference() if failures else "",
    )
