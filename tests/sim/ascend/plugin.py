"""pytest fixtures for tests that run torch_npu over the simulated driver.

A test file asks for them with ``pytest_plugins = ["tests.sim.ascend.plugin"]``, and what uses them
carries the marker ``npu``. Loading torch_npu
changes torch for the whole process, so these tests have a session of their own: ``make test-npu``,
or ``pytest -m npu -p tests.sim.ascend.activated``. In any other session they are skipped.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sim import ascend
from tests.support.forked import run_forked

__all__ = ["ascend_session", "driver", "pytest_collection_modifyitems", "run_python"]

_ROOT = Path(__file__).resolve().parents[3]


def _skip_reason(config: pytest.Config) -> str | None:
    if ascend.is_active():
        return None
    if reason := ascend.unavailable_reason():
        return f"no simulated Ascend driver: {reason}"
    if "torch_npu" in sys.modules:
        return "torch_npu runs over another driver here; this test needs the simulated one"
    if config.getoption("markexpr") != "npu":
        return "torch_npu needs a session of its own: make test-npu"
    return None


@pytest.hookimpl(tryfirst=True)  # before markers select
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the driver, and let pass what torch_npu itself warns about."""
    quiet = pytest.mark.filterwarnings("ignore:Cannot create tensor with internal format")
    for item in items:
        if isinstance(item, pytest.Function) and "ascend_session" in item.fixturenames:
            item.add_marker(pytest.mark.npu)
            item.add_marker(quiet)


@pytest.fixture(scope="session")
def ascend_session(request: pytest.FixtureRequest) -> ascend.Driver:
    """The simulated driver of this session, loaded under torch_npu; skips where it cannot be."""
    if reason := _skip_reason(request.config):
        pytest.skip(reason)
    driver = ascend.activate()
    gc.freeze()  # modules, which the collections of every test would look through again
    return driver


@pytest.fixture
def driver(ascend_session: ascend.Driver) -> Iterator[ascend.Driver]:
    """The driver with every setting and every device error of the test taken back afterwards."""
    gc.collect()  # freeing a pool of an earlier test would wait for streams that this one blocks
    old = ascend_session.settings()
    yield ascend_session
    ascend_session.set(**old)
    ascend_session.recover()


@pytest.fixture
def run_python(ascend_session: ascend.Driver) -> object:
    """Run code in a process of its own, where it may set the environment or lose its device.

    With ``fresh``, no library is loaded before the environment is set.
    """

    def run(code: str, *, timeout: float = 300, fresh: bool = False, **environment: str) -> str:
        paths = [str(_ROOT), os.environ.get("PYTHONPATH", "")]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        variables |= environment
        if fresh:
            done = subprocess.run(
                [sys.executable, "-u", "-c", code],  # it may end without flushing what it printed
                capture_output=True,
                text=True,
                timeout=timeout,
                env=variables,
                cwd=_ROOT,
            )
        else:
            done = run_forked("-c", code, env=variables, cwd=_ROOT, timeout=timeout)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return run
