"""The pace of graphs: what is launched for it, over a stub driver, and the effect on a device."""

from __future__ import annotations

import ctypes
import logging

import pytest
import torch

import devgraph as dg
from devgraph.cuda import pace as pace_module
from devgraph.cuda.pace import LAUNCHES, PaceKeeper
from devgraph.cuda.runtime import Runtime
from tests.support.stub_driver import StubDriver

FUNCTION, STREAM = 4242, 77


class Driver(StubDriver):
    """Loads a module and launches from it; ``refused`` launches fail."""

    refused = False

    def ModuleLoadData(self, module: int, text: int) -> int:
        assert b".entry empty()" in ctypes.string_at(text)
        ctypes.c_uint64.from_address(module).value = 99
        return self.note("load")

    def ModuleGetFunction(self, function: int, module: int, name: int) -> int:
        assert (module, ctypes.string_at(name)) == (99, b"empty")
        ctypes.c_uint64.from_address(function).value = FUNCTION
        return 0

    def LaunchKernelEx(self, config: int, function: int, params: None, extra: None) -> int:
        if self.refused:
            return 1
        words = (ctypes.c_uint32 * 14).from_address(config)
        stream, attribute = (ctypes.c_uint64 * 2).from_address(config + 32)
        kind, _, value = (ctypes.c_int * 3).from_address(attribute)
        return self.note("launch", function, stream, list(words[:7]), words[12], kind, value)

    def CtxGetCurrent(self, context: int) -> int:
        ctypes.c_uint64.from_address(context).value = 1
        return 0

    def GetErrorName(self, error: int, text: int) -> int:
        self._text = ctypes.create_string_buffer(b"CUDA_ERROR_INVALID_VALUE")
        ctypes.c_uint64.from_address(text).value = ctypes.addressof(self._text)
        return 0


def keeper(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, capability: tuple[int, int] = (9, 0)
) -> PaceKeeper:
    library = driver.library(Runtime)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    return PaceKeeper(Runtime(library, library, lambda: None), torch.device("cuda", 0))


def test_stream_that_captured_gets_empty_programmatic_launches(monkeypatch):
    driver = Driver()
    kept = keeper(monkeypatch, driver)
    kept.recover(STREAM)
    kept.recover(STREAM + 1)
    one_warp = [1, 1, 1, 32, 1, 1, 0]
    launches = [("launch", FUNCTION, s, one_warp, 1, 6, 1) for s in (STREAM, STREAM + 1)]
    assert driver.calls == [("load",), *[launches[0]] * LAUNCHES, *[launches[1]] * LAUNCHES]


def test_launch_that_the_driver_refuses_is_told_and_tried_again(monkeypatch, caplog):
    driver = Driver()
    driver.refused = True
    kept = keeper(monkeypatch, driver)
    with caplog.at_level(logging.WARNING, logger=pace_module.__name__):
        kept.recover(STREAM)
    driver.refused = False
    kept.recover(STREAM)
    assert len(driver.calls) == 1 + LAUNCHES
    assert [record.getMessage() for record in caplog.records] == [
        "graphs may stay at a slower pace after captures: cuLaunchKernelEx failed (1: "
        "CUDA_ERROR_INVALID_VALUE)"
    ]


def test_processor_without_programmatic_launches_is_left_alone(monkeypatch):
    driver = Driver()
    keeper(monkeypatch, driver, (8, 0)).recover(STREAM)
    assert driver.calls == []


@pytest.mark.cuda
def test_captures_leave_the_pace_of_every_graph_as_it_was():
    """Without the launches the third capture costs each kernel of each graph 0.17 us."""
    backend = dg.get_backend("cuda")
    before = backend.after_captures()
    x = torch.ones(64, device=backend.device)
    pool = backend.make_pool()
    graphs = []
    for _ in range(12):
        graph = backend.make_graph(pool)
        with backend.capture_context(graph):
            x.add_(0)
        graph.replay()
        graphs.append(graph)
    after = backend.after_captures()
    assert after < 1.08 * before, (before, after)
    for graph in graphs:
        graph.close()


@pytest.mark.cuda
def test_runner_says_how_fast_graphs_go_after_its_captures():
    runner = dg.DecodeRunner(
        lambda batch: batch.x + 1,
        inputs=[dg.InputSlot("x", ("tokens",), torch.float32, pad=dg.Pad.zero())],
        backend=dg.get_backend("cuda"),
        max_requests=8,
    )
    runner.capture()
    pace = runner.stats().replay_pace
    assert 0.5 < pace.microseconds < 3
    assert "replay_pace_microseconds" in runner.stats().to_prometheus()
    runner.close()


@pytest.mark.cuda
def test_stream_that_a_capture_began_on_is_brought_back_as_well(monkeypatch):
    """An engine runs its warm-ups there, and never comes back to it."""
    backend = dg.get_backend("cuda")
    x, pool = torch.ones(64, device=backend.device), backend.make_pool()
    graph, engine = backend.make_graph(pool), torch.cuda.Stream()
    recovered: list[torch.cuda.Stream] = []
    monkeypatch.setattr(backend, "recover_pace", recovered.append)
    with torch.cuda.stream(engine), backend.capture_context(graph):
        x.add_(0)
    assert recovered == [pool.stream, engine]
    graph.close()
