"""What a backend really does: small captures, replayed and compared with eager."""

from __future__ import annotations

import logging
from collections.abc import Callable

import attrs
import torch

from devgraph.api.backend import Backend
from devgraph.api.capture import Captured, capture
from devgraph.api.errors import DeviceGraphError, HostReadError, UpdateUnsupportedError
from devgraph.api.marks.marks import no_graph, region
from devgraph.cli.measure import seconds_per_call
from devgraph.cli.tables import time_text

__all__ = ["Probe", "probe_backend"]

logger = logging.getLogger(__name__)

_SIZE = 64


@attrs.frozen(kw_only=True)
class Probe:
    """The outcome of one small capture."""

    name: str
    """A field of ``Capabilities``, or a policy for what every backend must do."""
    declared: bool
    works: bool
    detail: str

    @property
    def ok(self) -> bool:
        """Whether what is declared works."""
        return self.works or not self.declared

    @property
    def verdict(self) -> str:
        """The outcome in a word or two."""
        if self.works:
            return "works" if self.declared else "works, not declared"
        return "FAILS" if self.declared else "no"


def probe_backend(backend: Backend) -> list[Probe]:
    """Capture, replay and compare on ``backend``; a probe that raises is one that failed."""
    able = backend.capabilities
    probes = [
        _probe("full", True, lambda: _policy(backend, "full")),
        _probe("breakable", True, lambda: _policy(backend, "breakable")),
        _probe("region_update", able.region_update, lambda: _region_update(backend)),
        _probe("rng", able.rng, lambda: _rng(backend)),
        _probe("refuses_host_reads", able.refuses_host_reads, lambda: _host_read(backend)),
        _probe("shared_pool", able.shared_pool, lambda: _shared_pool(backend)),
        _probe("node_counts", able.node_counts, lambda: _node_counts(backend)),
    ]
    if able.piecewise:
        probes.append(_probe("piecewise", True, lambda: _policy(backend, "piecewise")))
    return probes


class _AnswerIsNo(Exception):
    """The backend does not do it; the text says what it does instead."""


def _probe(name: str, declared: bool, run: Callable[[], str]) -> Probe:
    try:
        detail = run()
    except _AnswerIsNo as answer:
        return Probe(name=name, declared=declared, works=False, detail=str(answer))
    except Exception as error:
        logger.info("probe %s", name, exc_info=True)
        text = str(error).strip().splitlines() or [""]
        detail = f"{type(error).__name__}: {text[0]}"
        return Probe(name=name, declared=declared, works=False, detail=detail)
    return Probe(name=name, declared=declared, works=True, detail=detail)


def _tensors(backend: Backend) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, _SIZE, generator=generator).to(backend.device)
    weight = torch.randn(_SIZE, _SIZE, generator=generator).to(backend.device)
    return x, weight


def _require_equal(captured: Captured, host_args: list[dict[str, float]] | None = None) -> None:
    report = captured.prove(cases=2, host_args=host_args)
    if not report.ok:
        raise _AnswerIsNo(str(report.failures[0]))


def _policy(backend: Backend, policy: str) -> str:
    x, weight = _tensors(backend)

    @no_graph()
    def halve(value: torch.Tensor) -> torch.Tensor:
        return value * 0.5

    def step(value: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(value @ weight)
        if policy != "full":
            hidden = halve(hidden)
        return hidden + value

    with capture(step, x, policy=policy, backend=backend) as captured:
        _require_equal(captured)
        replay = seconds_per_call(captured.replay, backend, calls=20)
        return (
            f"{len(captured.segments)} segments, capture {time_text(captured.capture_seconds)}, "
            f"replay {time_text(replay.wall)}"
        )


def _region_update(backend: Backend) -> str:
    x, _ = _tensors(backend)

    @region(host_args=("factor",), mutates=("out",))
    def scale(value: torch.Tensor, out: torch.Tensor, *, factor: float) -> None:
        torch.mul(value, factor, out=out)

    def step(value: torch.Tensor, *, factor: float) -> torch.Tensor:
        out = torch.empty_like(value)
        scale(value, out, factor=factor)
        return out + 1

    with capture(step, x, backend=backend, host_args={"factor": 2.0}) as captured:
        try:
            captured.replay(factor=3.0)
        except UpdateUnsupportedError:
            raise _AnswerIsNo(
                "new host arguments are refused; policy breakable takes them"
            ) from None
        _require_equal(captured, [{"factor": 2.0}, {"factor": 5.0}])
        return "new host arguments change the next replay"


def _rng(backend: Backend) -> str:
    x, _ = _tensors(backend)

    def step(value: torch.Tensor) -> torch.Tensor:
        return value + torch.rand_like(value)

    with capture(step, x, backend=backend) as captured:
        first = captured.replay().clone()
        if torch.equal(first, captured.replay()):
            raise _AnswerIsNo("every replay draws the same numbers")
        _require_equal(captured)
        return "replays draw the numbers that eager would"


def _host_read(backend: Backend) -> str:
    x, weight = _tensors(backend)

    def step(value: torch.Tensor) -> torch.Tensor:
        return value @ weight * value[0, 0].item()

    try:
        captured = capture(step, x, backend=backend, warmup=0)
    except Exception as error:
        named = isinstance(error, HostReadError)
        _policy(backend, "full")  # a refused capture must leave nothing behind
        return "refused, with the source line" if named else "refused by the driver"
    captured.close()
    raise _AnswerIsNo("a host read inside a capture freezes its value")


def _shared_pool(backend: Backend) -> str:
    x = torch.zeros(1 << 16, device=backend.device)
    pool = backend.make_pool()

    def step(value: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            value = value.repeat(16).view(16, -1).sum(0)  # 4 MiB that the graph needs for a while
        return value

    captures = []
    try:
        sizes = []
        for _ in range(3):
            captures.append(capture(step, x, backend=backend, pool=pool))
            sizes.append(pool.bytes)
    finally:
        for captured in captures:
            captured.close()
    if sizes[0] == 0:
        raise DeviceGraphError("the pool reports no memory")
    growth = sizes[-1] / sizes[0]
    if growth > 1.5:
        raise _AnswerIsNo(f"three equal captures take {growth:.1f} times the memory of one")
    return f"three equal captures take {growth:.2f} times the memory of one"


def _node_counts(backend: Backend) -> str:
    x, weight = _tensors(backend)
    with capture(lambda value: value @ weight + 1, x, backend=backend) as captured:
        nodes = captured.info().nodes
    if nodes is None:
        raise _AnswerIsNo("graphs do not tell how many nodes they have")
    return f"a step of two operations has {nodes} nodes"
