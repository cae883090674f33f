"""devgraph under SGLang: installed, refused, asked for by the environment."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import devgraph as dg
from devgraph.integrations import sglang
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
    assert done.stderr.startswith("devgraph: DEVGRAPH_SGLANG='maybe' has no meaning")


def test_plugin_does_nothing_unless_asked(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = module("runner_backend.utils")
    before = choice.FullCudaGraphBackend
    monkeypatch.delenv("DEVGRAPH_SGLANG", raising=False)
    sglang.plugin()
    assert choice.FullCudaGraphBackend is before
    monkeypatch.setenv("DEVGRAPH_SGLANG", "maybe")
    with pytest.raises(SystemExit, match="DEVGRAPH_SGLANG='maybe' has no meaning"):
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
