"""Taking vLLM over and giving it back: the switch, the mode, and what happens when it fails."""

from __future__ import annotations

import importlib
import logging
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.environment import MODE_VARIABLE, VLLM_VARIABLE
from devgraph.integrations import vllm
from devgraph.integrations.vllm.install import engine_mode, here
from devgraph.integrations.vllm.manager import EngineGraph
from devgraph.integrations.vllm.wrappers import BreakableStep
from tests.support.vllm_engine import ENGINES, Engine, engine_of

BREAKABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    for name in (VLLM_VARIABLE, MODE_VARIABLE, BREAKABLE):
        monkeypatch.delenv(name, raising=False)
    with engine_of(request.param, pytest.skip) as found:
        yield found
        vllm.uninstall()


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    for name in (VLLM_VARIABLE, MODE_VARIABLE, BREAKABLE):
        monkeypatch.delenv(name, raising=False)
    with engine_of("standin", pytest.skip) as found:
        yield found
        vllm.uninstall()


def places(engine: Engine) -> list[Any]:
    """What every place that an installation may change holds now."""
    config = importlib.import_module("vllm.config")
    marks = importlib.import_module("vllm.compilation.breakable_cudagraph")
    microbatches = importlib.import_module("vllm.v1.worker.gpu_ubatch_wrapper")
    encoders = importlib.import_module("vllm.v1.worker.encoder_cudagraph")
    worker = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
    platform = engine.platforms.current_platform
    return [
        platform.get_static_graph_wrapper_cls(),
        engine.runner.CUDAGraphWrapper,
        engine.runner.BreakableCUDAGraphWrapper,
        marks.BreakableCUDAGraphWrapper,
        getattr(engine.managers, "BreakableCUDAGraphWrapper", None),
        microbatches.CUDAGraphWrapper,
        engine.v2.ModelCudaGraphManager,
        engine.managers.CudaGraphManager.capture,
        engine.managers.CudaGraphManager.dispatch,
        engine.runner.GPUModelRunner._capture_cudagraphs,
        engine.runner.GPUModelRunner._warmup_and_capture,
        getattr(engine.managers, "capture_pool", None),
        *(module.torch for module in (engine.managers, microbatches, encoders)),
        worker.__init__,
        worker.sleep,
        worker.wake_up,
        config.VllmConfig.__post_init__,
        config.CompilationConfig.resolve_cudagraph_mode_and_sizes,
        os.environ.get(BREAKABLE),
    ]


def test_install_puts_devgraph_at_every_place_and_uninstall_gives_all_back(
    engine: Engine,
) -> None:
    before = places(engine)
    assert vllm.install()
    assert vllm.install(), "a second call changes nothing"
    name = engine.platforms.current_platform.get_static_graph_wrapper_cls()
    module, _, attribute = name.rpartition(".")
    assert getattr(importlib.import_module(module), attribute) is engine.Wrapper
    assert engine.runner.CUDAGraphWrapper is engine.Wrapper
    assert engine.managers.torch.cuda.CUDAGraph is EngineGraph
    assert engine.managers.torch.Tensor is torch.Tensor
    newest = hasattr(engine.managers, "BreakableCUDAGraphWrapper")
    assert issubclass(engine.runner.BreakableCUDAGraphWrapper, BreakableStep)
    offloads = hasattr(engine.managers, "capture_pool")
    assert len(vllm.stats()["installed"]) == 15 + newest + offloads
    vllm.uninstall()
    assert places(engine) == before
    assert vllm.stats()["installed"] == []
    vllm.uninstall()


def test_second_install_asks_for_the_same_or_is_refused(engine: Engine) -> None:
    first = '{"decode": "full", "prefill": "disabled"}'
    assert vllm.install(mode=first, backend="cpu")
    assert vllm.install()
    assert vllm.install(mode=first)
    with pytest.raises(dg.ConfigError, match=r"mode=.*disabled.*mode=.*breakable.*uninstall\(\)"):
        vllm.install(mode='{"decode": "full", "prefill": "breakable"}')
    with pytest.raises(dg.ConfigError, match="backend=cpu.*backend=npu"):
        vllm.install(backend="npu")
    assert here.changes.mode.name == "FULL_DECODE_ONLY"


def test_install_with_a_breakable_mode_and_back(engine: Engine) -> None:
    before = places(engine)
    assert vllm.install(mode='{"decode": "full", "prefill": "breakable"}')
    assert os.environ[BREAKABLE] == "1"
    assert here.changes.mode.name == "FULL_AND_PIECEWISE"
    vllm.uninstall()
    assert places(engine) == before


@pytest.mark.parametrize("prefill", ["breakable", "piecewise"])
def test_prefill_that_is_asked_for_is_what_the_engine_reads(engine: Engine, prefill: str) -> None:
    envs = importlib.import_module("vllm.envs")
    try:
        envs.enable_envs_cache()  # by an engine before, in this process
        assert not envs.VLLM_USE_BREAKABLE_CUDAGRAPH
        assert vllm.install(mode=f'{{"decode": "full", "prefill": "{prefill}"}}')
        assert envs.VLLM_USE_BREAKABLE_CUDAGRAPH is (prefill == "breakable")
        assert BREAKABLE in os.environ, "else vLLM chooses breakable itself for some models"
        envs.enable_envs_cache()
        vllm.uninstall()
        assert not envs.VLLM_USE_BREAKABLE_CUDAGRAPH
    finally:
        envs.disable_envs_cache()


@pytest.mark.parametrize(("prefill", "given"), [("breakable", "0"), ("piecewise", "1")])
def test_mode_against_the_variable_for_breaks_is_an_error(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, prefill: str, given: str
) -> None:
    monkeypatch.setenv(BREAKABLE, given)
    before = places(engine)
    with pytest.raises(dg.ConfigError, match=f"{prefill}.*{BREAKABLE}={given} contradict"):
        vllm.install(mode=f'{{"decode": "full", "prefill": "{prefill}"}}')
    assert places(engine) == before
    assert vllm.install(mode='{"decode": "full", "prefill": "full"}')


@pytest.mark.parametrize("value", [None, "", "0", "off"])
def test_plugin_changes_nothing_unless_asked(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is not None:
        monkeypatch.setenv(VLLM_VARIABLE, value)
    before = places(engine)
    vllm.plugin()
    assert places(engine) == before
    assert here.changes is None


@pytest.mark.parametrize("value", ["1", "yes", "strict"])
def test_plugin_installs_when_asked(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(VLLM_VARIABLE, value)
    vllm.plugin()
    assert engine.runner.CUDAGraphWrapper is engine.Wrapper


def test_plugin_refuses_a_value_without_meaning(
    standin: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VLLM_VARIABLE, "maybe")
    with pytest.raises(dg.ConfigError, match=f"{VLLM_VARIABLE}='maybe'.*off or no, strict"):
        vllm.plugin()


def test_missing_place_leaves_the_engine_alone_with_one_warning(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(engine.managers.CudaGraphManager, "dispatch")
    config = importlib.import_module("vllm.config")
    before = [engine.runner.CUDAGraphWrapper, config.VllmConfig.__post_init__]
    with caplog.at_level(logging.WARNING, logger="devgraph"):
        assert not vllm.install(mode='{"decode": "full", "prefill": "breakable"}')
    (record,) = caplog.records
    assert "vLLM keeps its own graph layer" in record.message
    assert "CudaGraphManager has no dispatch" in record.message
    assert [engine.runner.CUDAGraphWrapper, config.VllmConfig.__post_init__] == before
    assert BREAKABLE not in os.environ
    assert here.changes is None


def test_missing_place_is_refused_under_strict(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(engine.managers.CudaGraphManager, "dispatch")
    with pytest.raises(vllm.InstallError, match="has no dispatch.*vLLM 0.22 to 0.33"):
        vllm.install(strict=True)
    assert here.changes is None


def test_absent_engine_is_refused_under_strict(
    standin: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    with pytest.raises(vllm.InstallError, match=r"vllm\.platforms"):
        vllm.install(strict=True)


@pytest.mark.parametrize(
    ("decode", "prefill", "name", "breakable"),
    [
        ("full", "piecewise", "FULL_AND_PIECEWISE", False),
        ("full", "breakable", "FULL_AND_PIECEWISE", True),
        ("full", "full", "FULL", False),
        ("full", "disabled", "FULL_DECODE_ONLY", False),
        ("piecewise", "piecewise", "PIECEWISE", False),
        ("breakable", "breakable", "PIECEWISE", True),
        ("disabled", "disabled", "NONE", False),
    ],
)
def test_mode_configuration_becomes_the_mode_of_the_engine(
    decode: str, prefill: str, name: str, breakable: bool
) -> None:
    text = f'{{"decode": "{decode}", "prefill": "{prefill}"}}'
    written_out = dg.DeviceGraphConfig.from_json(text).to_json(everything=True)
    for mode in (engine_mode(text), engine_mode(written_out)):
        assert (mode.name, mode.breakable) == (name, breakable)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"decode": "breakable", "prefill": "full"}',
            "decode breakable with prefill full.*Choose",
        ),
        ('{"decode": "disabled", "prefill": "piecewise"}', "cannot run decode disabled"),
        ('{"decode": {"warmup": 4}}', "decode to vLLM, but not warmup"),
        (
            '{"prefill": {"buckets": [2]}}',
            "prefill to vLLM, but not buckets.*--cudagraph-capture-sizes",
        ),
        ('{"prefil": "full"}', "prefill"),
    ],
)
def test_mode_that_the_engine_cannot_do_is_an_error(text: str, message: str) -> None:
    with pytest.raises(dg.ConfigError, match=message):
        engine_mode(text)


def test_mode_from_the_environment_is_put_into_the_configuration(
    standin: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '{"decode": "full", "prefill": "disabled"}'
    monkeypatch.setenv(MODE_VARIABLE, text)
    vllm.install()
    config = importlib.import_module("vllm.config")
    made = config.VllmConfig(model_config=types.SimpleNamespace(enforce_eager=False))
    assert made.compilation_config.cudagraph_mode is standin.Mode.FULL_DECODE_ONLY
    placeholder = config.VllmConfig()
    assert placeholder.compilation_config.cudagraph_mode is standin.Mode.FULL_AND_PIECEWISE


def test_overlay_of_the_platforms_backend_is_laid_over_the_rest(standin: Engine) -> None:
    text = (
        '{"decode": "full", "prefill": "piecewise", '
        '"backends": {"cpu": {"prefill": "disabled"}, "npu": {"prefill": "full"}}}'
    )
    vllm.install(mode=text)
    assert here.changes.mode.name == "FULL_DECODE_ONLY"


def test_mode_against_an_option_of_the_engine_is_an_error(standin: Engine) -> None:
    vllm.install(mode='{"decode": "full", "prefill": "disabled"}')
    config = importlib.import_module("vllm.config")
    model = types.SimpleNamespace(enforce_eager=False)
    given = config.CompilationConfig(cudagraph_mode=standin.Mode.PIECEWISE)
    with pytest.raises(dg.ConfigError, match="cudagraph_mode.*PIECEWISE.*Remove one"):
        config.VllmConfig(model, given)
    eager = types.SimpleNamespace(enforce_eager=True)
    with pytest.raises(dg.ConfigError, match="allows only NONE.*enforce_eager"):
        config.VllmConfig(eager)


def test_mode_that_attention_cannot_capture_is_an_error(standin: Engine) -> None:
    vllm.install(mode='{"decode": "full", "prefill": "full"}')
    config = importlib.import_module("vllm.config")
    made = config.VllmConfig(types.SimpleNamespace(enforce_eager=False)).compilation_config
    assert made.resolve_cudagraph_mode_and_sizes() is standin.Mode.FULL
    made.supported = False
    with pytest.raises(dg.ConfigError, match="the attention backend allows only NONE"):
        made.resolve_cudagraph_mode_and_sizes()


def test_wrong_mode_is_an_error_without_strict_too(standin: Engine) -> None:
    before = places(standin)
    with pytest.raises(dg.ConfigError, match="vLLM cannot run"):
        vllm.install(mode='{"decode": "piecewise", "prefill": "full"}')
    assert places(standin) == before


def test_entry_point_is_the_inert_plugin() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    group = re.search(r'\[project.entry-points."vllm.general_plugins"\]\n(\S+) = "(\S+)"', text)
    assert group is not None
    module, _, name = group[2].partition(":")
    assert getattr(importlib.import_module(module), name) is vllm.plugin


def test_loading_the_plugin_imports_nothing_of_the_engine() -> None:
    code = (
        "import sys; from devgraph.integrations.vllm import plugin; plugin(); "
        "assert not [m for m in sys.modules if m == 'vllm' or m.startswith('vllm.')]"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop(VLLM_VARIABLE, None)
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
