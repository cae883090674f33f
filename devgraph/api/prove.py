"""``prove``: replay against eager on inputs that the capture never saw."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import torch
from torch.utils import _pytree as pytree

from devgraph.api.backend import poison
from devgraph.api.errors import InputTypeError, brief, whole
from devgraph.api.modes import Settings
from devgraph.api.snapshots import DEFAULT_LIMIT, Snapshot
from devgraph.api.tensors import unexpanded

if TYPE_CHECKING:
    from devgraph.api.policy.job import Job


@attrs.frozen(kw_only=True)
class Failure:
    """One tensor that a replay left different from eager."""

    case: int
    host_args: Mapping[str, Any]
    where: str
    """Which output or argument, as a path."""
    message: str

    def __str__(self) -> str:
        return (
            f"case {self.case}, host arguments {dict(self.host_args)}: {self.where} {self.message}"
        )


@attrs.frozen(kw_only=True)
class Report:
    """The outcome of ``prove``."""

    cases: int
    """Replays that were compared."""
    failures: tuple[Failure, ...]
    exact: bool
    """Whether bit for bit; else within tolerance, because a compiler chose other kernels."""
    varied: int
    """Bound tensors that held other data in each case. Tensors inside objects are not bound."""

    @staticmethod
    def merged(reports: Sequence[Report]) -> Report:
        """Return one report of several proofs."""
        return Report(
            cases=sum(report.cases for report in reports),
            failures=tuple(failure for report in reports for failure in report.failures),
            exact=all(report.exact for report in reports),
            varied=sum(report.varied for report in reports),
        )

    @property
    def ok(self) -> bool:
        """Whether at least one case ran and none differed."""
        return self.cases > 0 and not self.failures

    def __str__(self) -> str:
        if self.ok:
            how = "bit for bit" if self.exact else "within tolerance"
            note = (
                ""
                if self.varied
                else ", all on the same data: no argument holds floating-point data"
            )
            return f"{self.cases} replays equal eager {how}{note}"
        if not self.cases:
            return "no replay was compared"
        return "\n".join([f"{len(self.failures)} differences:", *map(str, self.failures)])


def randomize(tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Fill a floating-point tensor with noise of the kind of data that it holds.

    Values that could be probabilities stay probabilities, and values that are not negative stay so,
    because operators check them. Integers and bools keep their values: they may be indices, offsets
    or counts, and operators check those as well.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return
    shape, cpu = tensor.shape, torch.device("cpu")
    with torch.inference_mode():
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
    """Return "" if the tensors are equal bit for bit, else what differs.

    0.0 and -0.0 differ, and NaNs are equal where all their bits are.
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
    said = f"{one} not {other}" if one != other else f"{one} of other bits"
    return f"differs in {wrong} of {a.numel()} elements, first at {where}: {said}"


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the data of ``tensor`` on the host."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of each element as a row."""
    return tensor.reshape(-1).view(torch.uint8).view(-1, tensor.itemsize)


def compare_near(
    expected: torch.Tensor, got: torch.Tensor, rtol: float | None, atol: float | None
) -> str:
    """Return "" if the tensors are equal within tolerance (NaN equals NaN), else what differs."""
    try:
        torch.testing.assert_close(got, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())
    return ""


class Provable(Protocol):
    """A captured step, as ``Captured`` is one."""

    settings: Settings
    exact: bool

    @property
    def outputs(self) -> Any:
        """What a replay writes."""

    def replay(self, **host_args: Any) -> Any:
        """Run what was captured."""


class _Prover:
    def __init__(
        self, captured: Provable, job: Job, rtol: float | None, atol: float | None
    ) -> None:
        self._captured = captured
        self._job = job
        self._compare: Callable[[torch.Tensor, torch.Tensor], str] = (
            compare if captured.exact else functools.partial(compare_near, rtol=rtol, atol=atol)
        )
        self._bound = [
            (f"argument {path}", unexpanded(leaf))
            for path, leaf in job.owned.tensors[: len(job.owned.given)]
        ]
        given = sum(leaf.nbytes for _, leaf in self._bound)
        self._limit = DEFAULT_LIMIT + given
        self._generator = torch.Generator().manual_seed(0)

    @property
    def varied(self) -> int:
        """The number of bound tensors that ``randomize`` fills."""
        return sum(leaf.is_floating_point() or leaf.is_complex() for _, leaf in self._bound)

    def snapshot(self) -> Snapshot:
        return self._job.owned.snapshot(self._job.backend, self._limit)

    def case(self, index: int, host: Mapping[str, Any]) -> list[Failure]:
        backend = self._job.backend
        for _, leaf in self._bound:
            randomize(leaf, self._generator)
        begin = self.snapshot()
        with self._captured.settings.restored():
            result = self._job.call(host)
        expected = [(n, t.detach().clone()) for n, t in self._results(result)]
        begin.restore()
        self._poison_outputs()
        replayed = self._captured.replay(**host)
        backend.synchronize()
        failures = []
        for (name, want), (_, got) in zip(expected, self._results(replayed), strict=True):
            message = self._compare(want, got)
            if message:
                failures.append(Failure(case=index, host_args=host, where=name, message=message))
        return failures

    def _results(self, result: Any) -> list[tuple[str, torch.Tensor]]:
        return [*_named_tensors(result, "output "), *self._bound]

    def _poison_outputs(self) -> None:
        owned = {leaf.untyped_storage().data_ptr() for _, leaf in self._bound}
        for _, output in _named_tensors(self._captured.outputs, ""):
            if output.untyped_storage().data_ptr() not in owned:
                with torch.inference_mode():
                    poison(unexpanded(output))


def _named_tensors(tree: Any, prefix: str) -> list[tuple[str, torch.Tensor]]:
    leaves, _ = pytree.tree_flatten_with_path(tree)
    return [
        (prefix + (pytree.keystr(path) or "0"), leaf)
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor)
    ]


def prove(
    captured: Provable,
    job: Job,
    *,
    cases: int = 3,
    host_args: Sequence[Mapping[str, Any]] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> Report:
    """Implement ``Captured.prove``."""
    whole("cases", cases)
    sets: Any = [job.spec.declared] if host_args is None else host_args
    if not (isinstance(sets, Sequence) and all(isinstance(one, Mapping) for one in sets)):
        raise InputTypeError(
            f"host_args of prove is a list with one mapping per set of values to try, such as "
            f"[{{'kv_len': 777}}], got {brief(host_args)}"
        )
    for host in sets:
        job.spec.fill(host)  # Refuses what is missing or unknown before anything runs.
    prover = _Prover(captured, job, rtol, atol)
    failures: list[Failure] = []
    count = 0
    before = prover.snapshot()
    try:
        for host in sets:
            for _ in range(cases):
                failures.extend(prover.case(count, dict(host)))
                count += 1
                before.restore()
    finally:
        before.restore()
    return Report(cases=count, failures=tuple(failures), exact=captured.exact, varied=prover.varied)
