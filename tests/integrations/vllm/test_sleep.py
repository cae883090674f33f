"""Graphs through vLLM's sleep: their memory goes with it and is there again after it."""

from __future__ import annotations

import contextlib
import importlib
import logging
import types
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch

import devgraph as dg
from devgraph.integrations import vllm
from tests.support.vllm_engine import ENGINES, WIDTH, Engine, Step, engine_of


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    for name in ("DEVGRAPH_MODE", "VLLM_USE_BREAKABLE_CUDAGRAPH"):
        monkeypatch.delenv(name, raising=False)
    with engine_of(request.param, pytest.skip) as found, torch.inference_mode():
        yield found
        vllm.uninstall()


class Sleeper:
    """A worker of vLLM under devgraph that may sleep, with one step captured."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
        self.engine, self.calls = engine, []
        kind: Any = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
        for name in ("__init__", "sleep", "wake_up"):
            monkeypatch.setattr(kind, name, self._noting(name))
        assert vllm.install(strict=True)
        parallel = types.SimpleNamespace(world_size_across_dp=config.pop("ranks", 1))
        model = types.SimpleNamespace(enable_sleep_mode=config.pop("may_sleep", True))
        self.worker = kind(
            types.SimpleNamespace(parallel_config=parallel, model_config=model, **config)
        )
        self.x = torch.randn(2, WIDTH)
        self.wrapper = engine.Wrapper(Step(), engine.config(), engine.Mode.FULL)
        self.run()
        self.bytes = self.held

    def _noting(self, name: str) -> Any:
        def call(worker: Any, *args: Any, **kwargs: Any) -> None:
            self.calls.append((name, *args[name == "__init__" :]))

        return call

    @property
    def held(self) -> int:
        """Bytes that graphs hold of the device."""
        found: int = vllm.stats()["pool_bytes"]
        return found

    def run(self) -> torch.Tensor:
        self.x.copy_(torch.randn(2, WIDTH))
        with self.engine.step(self.wrapper.vllm_config, self.engine.Mode.FULL, "step"):
            out: torch.Tensor = self.wrapper(self.x)
        return out

    def replays(self) -> bool:
        """Whether a step is right."""
        return torch.equal(self.run(), (self.x * 2 + 1).relu())

    @contextlib.contextmanager
    def short_of_memory(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Have no memory to wake up with."""

        def refuse(pool: Any) -> None:
            raise dg.ResourceError("no memory")

        with monkeypatch.context() as short:
            short.setattr(type(self.wrapper._memory()), "_restore", refuse)
            yield


@pytest.mark.parametrize("level", [1, 2])
def test_graphs_give_their_memory_back_and_replay_after_waking(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, level: int
) -> None:
    sleeper = Sleeper(engine, monkeypatch)
    for _ in range(2):
        assert sleeper.replays()
        sleeper.worker.sleep(level)
        assert sleeper.held == 0
        with pytest.raises(dg.DeviceGraphError, match="was released"):
            sleeper.run()
        sleeper.worker.wake_up(["weights"])
        assert sleeper.held == sleeper.bytes > 0
        sleeper.worker.wake_up(["kv_cache"])
        assert sleeper.replays()
    turn = [("sleep", level), ("wake_up", ["weights"]), ("wake_up", ["kv_cache"])]
    assert sleeper.calls == [("__init__",), *turn, *turn]
    assert vllm.stats()["modes"]["full"]["captures"] == 1


def test_waking_without_memory_changes_nothing_of_the_engine_and_can_be_done_again(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = Sleeper(engine, monkeypatch)
    sleeper.worker.sleep(1)

    with sleeper.short_of_memory(monkeypatch), pytest.raises(dg.ResourceError):
        sleeper.worker.wake_up()
    assert sleeper.calls == [("__init__",), ("sleep", 1)]
    sleeper.worker.wake_up()
    assert sleeper.replays()


def test_uninstalling_while_the_engine_sleeps_wakes_graphs_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = Sleeper(engine, monkeypatch)
    sleeper.worker.sleep(1)

    with sleeper.short_of_memory(monkeypatch):
        with pytest.raises(dg.ResourceError):
            vllm.uninstall()
        assert vllm.stats()["installed"]
    vllm.uninstall()
    sleeper.worker.wake_up()
    assert sleeper.replays()


@pytest.mark.parametrize(
    "config",
    [
        {"may_sleep": False},
        {"ranks": 2},
        {"ranks": 2, "use_cumem_cudagraph_pool": False},
    ],
)
def test_memory_stays_where_the_engine_does_not_sleep_or_registers_it_with_other_ranks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    sleeper = Sleeper(engine, monkeypatch, **config)
    sleeper.worker.sleep(1)
    assert sleeper.held == sleeper.bytes
    assert sleeper.replays()


def test_engine_that_does_not_sleep_runs_on_beside_one_that_does(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = Sleeper(engine, monkeypatch)
    parallel = types.SimpleNamespace(world_size_across_dp=1)
    model = types.SimpleNamespace(enable_sleep_mode=False)
    type(sleeper.worker)(types.SimpleNamespace(parallel_config=parallel, model_config=model))
    wrapper, x = engine.Wrapper(Step(), engine.config(), engine.Mode.FULL), torch.ones(2, WIDTH)
    assert wrapper.graph_pool == sleeper.wrapper.graph_pool
    with engine.step(wrapper.vllm_config, engine.Mode.FULL, "step"):
        wrapper(x)
        sleeper.worker.sleep(1)
        assert torch.equal(wrapper(x), (x * 2 + 1).relu())
        sleeper.worker.wake_up()
        assert torch.equal(wrapper(x), (x * 2 + 1).relu())
    assert sleeper.replays()


def test_several_ranks_that_register_nothing_give_memory_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    sleeper = Sleeper(engine, monkeypatch, ranks=2, use_cumem_cudagraph_pool=True)
    sleeper.worker.sleep(1)
    assert sleeper.held == 0


def test_backend_that_cannot_give_memory_back_says_so_and_keeps_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    backend = dg.get_backend("cpu")
    lesser = attrs.evolve(backend.capabilities, releasable_memory=False)
    monkeypatch.setattr(backend, "capabilities", lesser)
    with caplog.at_level(logging.WARNING, "devgraph"):
        sleeper = Sleeper(engine, monkeypatch)
    assert "cannot release graph memory" in caplog.text
    sleeper.worker.sleep(1)
    assert sleeper.held == sleeper.bytes
    sleeper.worker.wake_up()
    assert sleeper.replays()
