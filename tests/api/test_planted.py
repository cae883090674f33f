"""Planted faults: `prove` finds each with its cause, or the capture refuses it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import devgraph as dg
from tests.support.mutants import MUTANTS

PAGE = Path(__file__).parents[2] / "docs" / "proof.md"
BACKENDS = ("cpu", "cuda", "rocm", "npu")
WIDTH = 4


@attrs.frozen
class Plant:
    """A fault, and the beginning of the cause or of the refusal that names it."""

    name: str
    text: str
    run: Callable[[Any, pytest.MonkeyPatch], dg.Report]
    is_refused: bool = False
    absent: str = ""
    """Why the CPU reference has no such fault."""


PLANTS: list[Plant] = []


def plant(name: str, text: str, **options: Any) -> Callable[..., Any]:
    def add(run: Callable[[Any, pytest.MonkeyPatch], dg.Report]) -> Any:
        PLANTS.append(Plant(name, text, run, **options))
        return run

    return add


def capture(backend: Any, step: Callable[..., Any], **options: Any) -> dg.Captured:
    x = torch.arange(WIDTH, dtype=torch.float32).add(1).to(backend.device)
    captured = dg.capture(step, x, backend=backend, **options)
    report = captured.prove(cases=1)
    assert report.ok, str(report)
    return captured


def decoder(backend: Any, step: Callable[..., Any], *slots: dg.InputSlot, **options: Any) -> Any:
    x = dg.InputSlot("x", ("tokens", WIDTH), torch.float32, pad=dg.Pad.zero())
    runner = dg.DecodeRunner(
        step,
        [x, *slots],
        backend=backend,
        max_requests=4,
        config={"buckets": [2, 4]},
        progress=False,
        **options,
    )
    runner.capture()
    return runner


EVERY = "every element in every case: the step reads an unmarked host value"


@plant("host value that is not marked", EVERY)
def _(backend: Any, monkeypatch: pytest.MonkeyPatch) -> dg.Report:
    scale = [2.0]
    captured = capture(backend, lambda x: x * scale[0])
    scale[0] = 3.0
    return captured.prove()


class Scaled(torch.nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH, device=device))


def stale_weight(how: str) -> Callable[[Any, pytest.MonkeyPatch], dg.Report]:
    def run(backend: Any, monkeypatch: pytest.MonkeyPatch) -> dg.Report:
        model = Scaled(backend.device)
        held = {"model": model}  # no owner that a replay could compare
        captured = capture(backend, lambda x: x * held["model"].weight)
        new = torch.full((WIDTH,), 3.0, device=backend.device)
        if how == "data":
            model.weight.data = new
        elif how == "assignment":
            model.weight = torch.nn.Parameter(new)
        else:
            model.load_state_dict({"weight": new}, assign=True)
        return captured.prove()

    return run


for how, name in [
    ("assignment", "weight that is replaced by assignment"),
    ("data", "weight with replaced `.data`"),
    ("load", "`load_state_dict(assign=True)`"),
]:
    plant(name, "replaced weight or cache: ")(stale_weight(how))


@dg.region(host_args=("n",))
def first(x: torch.Tensor, *, n: int) -> torch.Tensor:
    return x * n


@dg.region(host_args=("m",))
def second(x: torch.Tensor, *, m: int) -> torch.Tensor:
    return x + m


def regions(x: torch.Tensor, *, n: int, m: int) -> torch.Tensor:
    return second(first(x, n=n) * 0.5, m=m) + 0


def changed_update(
    backend: Any, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Callable[[Any], None]]
) -> dg.Report:
    captured = capture(backend, regions, host_args={"n": 2, "m": 2})
    sets = [{"n": 2, "m": 2}, {"n": 5, "m": 3}]
    assert captured.prove(host_args=sets).ok
    monkeypatch.setattr(captured._plan, "bind", change(captured._plan.bind))
    captured.replay(n=2, m=2)
    return captured.prove(host_args=sets)


CHANGED = "only with changed host arguments ({'n': 5, 'm': 3})"


@plant("update that is lost", CHANGED)
def _(backend: Any, monkeypatch: pytest.MonkeyPatch) -> dg.Report:
    return changed_update(
        backend,
        monkeypatch,
        lambda bind: (
            lambda host: bind({mark: dict.fromkeys(kwargs, 2) for mark, kwargs in host.items()})
        ),
    )


@plant("update that is applied to the wrong region", CHANGED)
def _(backend: Any, monkeypatch: pytest.MonkeyPatch) -> dg.Report:
    def swapped(host: Any) -> Any:
        values = [next(iter(kwargs.values())) for kwargs in host.values()]
        return {
            mark: dict.fromkeys(kwargs, value)
            for (mark, kwargs), value in zip(host.items(), reversed(values), strict=True)
        }

    return changed_update(backend, monkeypatch, lambda bind: lambda host: bind(swapped(host)))


def padded_rows(backend: Any, step: Callable[[Any], torch.Tensor], **options: Any) -> dg.Report:
    """Prove a step whose padded rows have row number 0, as real rows may."""

    def rows(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.randperm(31, generator=generator)[: shape[0]]

    slot = dg.InputSlot("rows", ("tokens",), torch.int64, pad=dg.Pad.zero(), sample=rows)
    return decoder(backend, step, slot, **options).prove(cases=3)


PADDING = "padded rows write row 0 of "


@plant("padding that writes state", PADDING)
def _(backend: Any, monkeypatch: pytest.MonkeyPatch) -> dg.Report:
    cache = torch.zeros(32, WIDTH, device=backend.device)

    def step(batch: Any) -> torch.Tensor:
        out = batch.x + cache[batch.rows]
        cache.index_copy_(0, batch.rows, out + 1)
        return out

    return padded_rows(backend, step)


@plant("padding that writes rows along a later dimension", PADDING)
def _(backend: Any, monkeypatch: pytest.MonkeyPatch) -> dg.Report:
    layers = torch.zeros(3, 32, WIDTH, device=backend.device)

    def step(batch: Any) -> torch.Tensor:
        for index, cache in enumerate(layers):
            cache.index_copy_(0, batch.rows, batch.x + index)
        return batch.x * 2

    return padded_rows(backend, step)


@plant("padding that writes rows by their position", "padded rows write row 1 of ")
def _(backend: Any, monkeypatch: pytest.MonkeyPatch) -> dg.Report:
    state = torch.zeros(4, WIDTH, device=backend.device)

    def step(batch: Any) -> torch.Tensor:
        held = state[: batch.tokens]
        held.copy_(held * 0.5 + batch.x)
        return held + 1

    return decoder(backend, step, bound={"state": state}).prove(cases=3)


@plant("padding that writes state in a loop", PADDING)
def _(backend: Any, monkeypatch: pytest.MonkeyPatch) -> dg.Report:
    cache = torch.zeros(32, WIDTH, device=backend.device)

    def step(batch: Any) -> torch.Tensor:
        cache.index_copy_(0, batch.rows, batch.x + 1)
        return batch.x * 2

    loop = dg.Loop(steps=2, advance=lambda batch, outputs: batch.x.copy_(outputs))
    return padded_rows(backend, step, loop=loop)


@plant(
    "state that is written twice", "only state differs: a write of the step is lost, is repeated"
)
def _(backend: Any, monkeypatch: pytest.MonkeyPatch) -> dg.Report:
    state = torch.zeros(WIDTH, device=backend.device)

    def step(x: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return x * 2

    captured = capture(backend, step)
    run = captured._plan.run
    monkeypatch.setattr(captured._plan, "run", lambda: (run(), run()))
    return captured.prove()


@plant("wrong decay of state that is zero", EVERY)
def _(backend: Any, monkeypatch: pytest.MonkeyPatch) -> dg.Report:
    decay = [0.9]

    def step(batch: Any) -> torch.Tensor:
        rows = batch.state.h[batch.state_slots] * decay[0] + batch.x
        batch.state.h.index_copy_(0, batch.state_slots, rows)
        return rows

    runner = decoder(backend, step, state=[dg.StateSlot("h", (WIDTH,), torch.float32)])
    assert runner.prove().ok
    decay[0] *= decay[0]
    return runner.prove()


@plant("output that shares memory with another", "outputs that equal other outputs")
def _(backend: Any, monkeypatch: pytest.MonkeyPatch) -> dg.Report:
    captured = capture(backend, lambda x: (x * 2, x + 1))
    monkeypatch.setattr(captured._plan, "outputs", (captured.outputs[1], captured.outputs[1]))
    return captured.prove()


@plant("generator that replays do not advance", "every case of a step that draws random numbers")
def _(backend: Any, monkeypatch: pytest.MonkeyPatch) -> dg.Report:
    old = backend.get_rng_state()
    torch.rand(WIDTH, device=backend.device)
    captured = capture(backend, lambda x: x + torch.rand_like(x))
    run = captured._plan.run
    monkeypatch.setattr(captured._plan, "run", lambda: (backend.set_rng_state(old), run()))
    return captured.prove()


@plant(
    "side stream that is not joined",
    "stream",
    is_refused=True,
    absent="no streams",
)
def _(backend: Any, monkeypatch: pytest.MonkeyPatch) -> dg.Report:
    side = torch.Stream(backend.device)

    def step(x: torch.Tensor) -> torch.Tensor:
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            return x * 2

    return capture(backend, step).prove()


@plant("graph of the wrong bucket", "only bucket 4: the graph of another bucket runs")
def _(backend: Any, monkeypatch: pytest.MonkeyPatch) -> dg.Report:
    runner = decoder(backend, lambda batch: batch.x * 2)
    assert runner.prove().ok
    large, small = runner.graphs.captured
    large.captured, small.captured = small.captured, large.captured
    return runner.prove()


@plant("capture with a different autocast setting", EVERY)
def _(backend: Any, monkeypatch: pytest.MonkeyPatch) -> dg.Report:
    weight = torch.randn(WIDTH, WIDTH, device=backend.device)
    with torch.autocast(backend.device.type, torch.bfloat16):
        runner = decoder(backend, lambda batch: (batch.x @ weight).float())
    assert runner.prove().ok
    runner._step.autocast = ()
    return runner.prove()


@plant(
    "eager body of a break that is captured",
    "is marked @dg.no_graph and was called under policy 'full'",
    is_refused=True,
)
def _(backend: Any, monkeypatch: pytest.MonkeyPatch) -> dg.Report:
    @dg.no_graph
    def broken(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    return capture(backend, lambda x: broken(x) + 1).prove()


@pytest.mark.parametrize("planted", PLANTS, ids=lambda planted: planted.name.replace(" ", "-"))
def test_planted_fault_is_found_with_its_cause(
    planted: Plant, devgraph_backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if planted.absent and devgraph_backend.device.type == "cpu":
        pytest.skip(f"{devgraph_backend.name} has no such fault: {planted.absent}")
    if planted.is_refused:
        with pytest.raises(dg.CaptureError, match=planted.text):
            planted.run(devgraph_backend, monkeypatch)
        return
    report = planted.run(devgraph_backend, monkeypatch)
    assert any(cause.startswith(planted.text) for cause in report.causes), str(report)


def mixed_step(
    x: torch.Tensor, state: torch.Tensor, *, n: int, m: int
) -> tuple[torch.Tensor, torch.Tensor]:
    state.add_(x)
    return regions(x, n=n, m=m), torch.rand_like(x)


MUTANTS_FOUND = {
    "replay-does-nothing": "every case of a step that draws random numbers",
    "inputs-copied": "every case of a step that draws random numbers",
    "rng-frozen": "every case of a step that draws random numbers",
    "update-ignored": "only with changed host arguments",
    "update-late": "only the first replay of a case differs",
    "update-wrong-region": "only with changed host arguments",
    "update-first-region-only": "only with changed host arguments",
}
"""Broken backends whose replays differ from eager; the conformance suite finds the others."""


@pytest.mark.parametrize("name", MUTANTS_FOUND)
def test_broken_backend_is_found_with_the_cause(name: str) -> None:
    [mutant] = [mutant for mutant in MUTANTS if mutant.name == name]
    captured = dg.capture(
        mixed_step,
        torch.ones(WIDTH),
        torch.zeros(WIDTH),
        backend=mutant.make(),
        host_args={"n": 2, "m": 2},
    )
    report = captured.prove(host_args=[{"n": 2, "m": 2}, {"n": 5, "m": 3}, {"n": 4, "m": 1}])
    assert report.causes[0].startswith(MUTANTS_FOUND[name]), str(report)


def table() -> str:
    """Return the table of the documentation."""
    lines = [f"| planted fault | {' | '.join(BACKENDS)} |", "| --- " * (1 + len(BACKENDS)) + "|"]
    for planted in PLANTS:
        outcome = "refused" if planted.is_refused else "found"
        cells = [
            planted.absent if planted.absent and name == "cpu" else outcome for name in BACKENDS
        ]
        lines.append(f"| {planted.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_page_has_the_table_of_planted_faults() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), table()
