"""devgraph under SGLang: installed, refused, asked for by the environment, in which mode."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import devgraph as dg
from devgraph.integrations import sglang
from devgraph.integrations.sglang import backends
from devgraph.integrations.sglang.install import engine_mode
from tests.support.sglang_steps import module

ROOT = Path(__file__).parents[3]


def test_install_puts_both_classes_where_a_phase_chooses_and_back(engine: Any) -> None:
    choice = module("runner_backend.utils")
    before = (choice.FullCudaGraphBackend, choice.BreakableCudaGraphBackend)
    sglang.install()
    sglang.install()
    assert choice.FullCudaGraphBackend is sglang.full_backend()
    assert choice.BreakableCudaGraphBackend is sglang.breakable_backend()
    assert issubclass(choice.FullCudaGraphBackend, before[0])
    assert issubclass(choice.BreakableCudaGraphBackend, before[1])
    sglang.uninstall()
    assert (choice.FullCudaGraphBackend, choice.BreakableCudaGraphBackend) == before


def test_second_install_with_another_mode_is_refused(engine: Any) -> None:
    sglang.install(mode='{"decode": "full"}')
    sglang.install()
    with pytest.raises(dg.ConfigError, match=r"mode=.*full.*mode=.*disabled.*uninstall\(\)"):
        sglang.install(mode='{"decode": "disabled"}')


def test_an_sglang_without_the_places_is_refused_and_named(engine: Any) -> None:
    choice = module("runner_backend.utils")
    before = choice.FullCudaGraphBackend
    del module("runner_utils.pool").set_global_graph_memory_pool
    with pytest.raises(
        sglang.InstallError, match=r"no set_global_graph_memory_pool.*0\.5\.17 to 0\.5\.23"
    ):
        sglang.install()
    assert choice.FullCudaGraphBackend is before


SCHEDULER = """
import os, sys, types, torch
from importlib.metadata import EntryPoint
from tests.support.sglang_steps import Case, module, runner
from tests.support import sglang_standin

sglang_standin.load(None)
EntryPoint("devgraph", sys.argv[1], "sglang.srt.plugins").load()()
choice = module("runner_backend.utils")
backend = choice.FullCudaGraphBackend(runner())
case, key = Case(), module("runner.shape_key").ShapeKey(4)
with torch.inference_mode():
    with backend.capture_session(None):
        backend.capture_one(key, case.forward(4))
    for _ in range(3):
        backend.replay(key, None)
"""


def scheduler(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process that SGLang would spawn, with the plugin that is declared for it."""
    text = (ROOT / "pyproject.toml").read_text()
    group = re.search(r'\[project.entry-points."sglang.srt.plugins"\]\ndevgraph = "(\S+)"', text)
    assert group is not None
    kept = {k: v for k, v in os.environ.items() if not k.startswith("DEVGRAPH_")}
    return subprocess.run(
        [sys.executable, "-c", SCHEDULER, group[1]],
        env={**kept, "PYTHONPATH": str(ROOT), **environment},
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow  # starts a process; its quick sibling is the next but one
def test_spawned_process_captures_with_devgraph_and_says_so_outside(tmp_path: Path) -> None:
    done = scheduler(
        tmp_path, DEVGRAPH_SGLANG="strict", DEVGRAPH_STATS_FILE=str(tmp_path / "{pid}.json")
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert path.name == f"{found['pid']}.json"
    full = found["modes"]["full"]
    assert (found["engine"], full["captures"], full["replays"]) == ("sglang", 1, 3)


@pytest.mark.slow  # starts two processes; its quick sibling is the next
def test_spawned_process_is_left_alone_unless_asked(tmp_path: Path) -> None:
    done = scheduler(tmp_path)
    assert "the stand-in has no graphs of its own" in done.stderr
    done = scheduler(tmp_path, DEVGRAPH_SGLANG="maybe")
    assert done.returncode == 1
    assert done.stderr.startswith("devgraph: DEVGRAPH_SGLANG='maybe' is invalid")


def test_plugin_does_nothing_unless_asked(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = module("runner_backend.utils")
    before = choice.FullCudaGraphBackend
    monkeypatch.delenv("DEVGRAPH_SGLANG", raising=False)
    sglang.plugin()
    assert choice.FullCudaGraphBackend is before
    monkeypatch.setenv("DEVGRAPH_SGLANG", "maybe")
    with pytest.raises(SystemExit, match="DEVGRAPH_SGLANG='maybe' is invalid"):
        sglang.plugin()
    monkeypatch.setenv("DEVGRAPH_SGLANG", "1")
    sglang.plugin()
    assert choice.FullCudaGraphBackend is sglang.full_backend()


@pytest.mark.parametrize("asked", ["1", "strict"])
def test_plugin_tells_of_an_sglang_that_fails_in_its_own_way(
    engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: str,
) -> None:
    def fail() -> None:
        raise RuntimeError("no driver")

    monkeypatch.setitem(sglang.install.__globals__, "full_backend", fail)
    monkeypatch.setenv("DEVGRAPH_SGLANG", asked)
    if asked == "1":
        sglang.plugin()
        assert "RuntimeError: no driver" in caplog.text
    else:
        with pytest.raises(SystemExit, match="no driver"):
            sglang.plugin()


@pytest.mark.parametrize("asked", ["1", "strict"])
def test_plugin_warns_of_an_sglang_that_it_cannot_take_over_or_refuses(
    engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    asked: str,
) -> None:
    del module("runner_utils.pool").set_global_graph_memory_pool
    monkeypatch.setenv("DEVGRAPH_SGLANG", asked)
    if asked == "1":
        sglang.plugin()
        assert "no set_global_graph_memory_pool" in caplog.text
    else:
        # SGLang only logs an Exception of a plugin.
        with pytest.raises(SystemExit, match="no set_global_graph_memory_pool"):
            sglang.plugin()


@pytest.fixture(params=["when made", "later"])
def made(engine: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make resolved arguments, as 0.5.17 does when they are made, and later versions afterwards."""
    arguments = module("server_args", "sglang.srt").ServerArgs
    if request.param == "when made":
        monkeypatch.delattr(arguments, "resolve_once")

    def make(**given: Any) -> Any:
        found = arguments(**given)
        if request.param == "later":
            found.resolve_once()
        return found

    return make


def test_named_phases_are_put_in_and_the_others_left_to_sglang(made: Any) -> None:
    sglang.install(mode='{"prefill": {"policy": "full", "buckets": [64, 512], "max_requests": 8}}')
    assert made(cuda_graph_bs_decode=[1, 2]).cuda_graph_config == {
        "decode": {},
        "prefill": {"backend": "full", "bs": [64, 512], "full_prefill_max_req": 8},
    }
    sglang.uninstall()
    assert made().cuda_graph_config is None


def test_memory_is_the_budget_of_what_graphs_launch(engine: Any) -> None:
    sglang.install(
        mode='{"decode": {"executable_budget": 4096}, "prefill": {"executable_budget": 8192}}'
    )
    first, _ = backends.shared().memory.shared(None)
    assert first.recordings.budget_bytes == 4096
    sglang.uninstall()
    second, _ = backends.shared().memory.shared(None)
    assert (first is not second, second.recordings.budget_bytes) == (True, None)


@pytest.mark.parametrize(
    "given",
    [
        {"cuda_graph_backend_prefill": "breakable"},
        {"disable_cuda_graph": True},
        {"disable_prefill_cuda_graph": True},
        {"cuda_graph_config": {"prefill": {"backend": "breakable"}}},
    ],
)
def test_option_of_sglang_that_contradicts_is_refused(made: Any, given: dict[str, Any]) -> None:
    sglang.install(mode='{"prefill": "full"}')
    with pytest.raises(
        dg.ConfigError, match="prefill backend=full, but SGLang's own options ask for"
    ):
        made(**given)
    assert made(cuda_graph_backend_prefill="full").cuda_graph_config["prefill"] == {
        "backend": "full"
    }


def test_backend_that_sglang_resolves_otherwise_is_refused(made: Any) -> None:
    sglang.install(mode='{"prefill": "full"}')
    with pytest.raises(dg.ConfigError, match="SGLang allows only disabled"):
        made(allowed="disabled")


def test_arguments_that_were_resolved_in_another_process_stay_as_they_are(engine: Any) -> None:
    sglang.install(mode='{"prefill": "full"}')
    arguments = module("server_args", "sglang.srt").ServerArgs()
    arguments._resolution_finished = True
    arguments.resolve_once()
    assert arguments.cuda_graph_config is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prefill": "piecewise"}', "does not support the policy piecewise for prefill"),
        ('{"decode": {"warmup": 3}}', "no equivalent of warmup for decode"),
        ('{"decode": "ful"}', "Did you mean"),
    ],
)
def test_mode_that_sglang_cannot_do_is_refused(text: str, message: str) -> None:
    with pytest.raises(dg.ConfigError, match=message):
        engine_mode(text, "cpu")


def test_key_that_this_sglang_lacks_is_refused(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"decode": {"backend"}, "prefill": {"backend"}}
    monkeypatch.setattr(module("cuda_graph_config"), "ALLOWED_KEYS_PER_PHASE", keys)
    mode = engine_mode('{"prefill": {"max_bs": 64}}', "cpu")
    with pytest.raises(dg.ConfigError, match="no max_bs for prefill"):
        mode.put_into(types.SimpleNamespace(cuda_graph_config=None))


def test_defaults_that_are_written_out_leave_the_engine_its_own_values() -> None:
    config = dg.DeviceGraphConfig(decode={"buckets": [2]})
    phases = engine_mode(config.to_json(everything=True), "cpu").phases
    assert phases["decode"] == {"backend": "full", "bs": [2]}
    assert phases["prefill"] == {"backend": "breakable"}


def test_overlay_of_the_platform_counts() -> None:
    text = '{"prefill": "full", "backends": {"cpu": {"prefill": "breakable"}}}'
    assert engine_mode(text, "cpu").phases["prefill"] == {"backend": "breakable"}
    assert engine_mode(text, "cuda").phases["prefill"] == {"backend": "full"}
