"""The pytest plugin: choice of the backend under test, markers, skips and lost devices.

Tests that use the fixture ``devgraph_backend`` get the name of the backend as a marker, so that
``-m cuda`` selects them. If the ``-m`` expression is just the name of a built-in backend, it also
chooses that backend. A test with its own backend marker uses the marked backend.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import textwrap
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import pytest

if TYPE_CHECKING:
    from devgraph.api.backend import Backend

DEVICE_MARKERS = ("cpu", "cuda", "npu", "rocm")
CAPABILITY_MARKER = "devgraph_capability"
_CORE = "the contract itself"
_LACKS = " does not declare "
_LOST_EXIT_CODE = 70  # exit status of a worker that lost its device (EX_SOFTWARE of sysexits.h)

_FAULTS = "devgraph_faults"
"""Name of the report property with the rows of docs/faults.md that a failed test covers."""

_missing_key = pytest.StashKey[tuple[str, ...]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("devgraph", "device graphs")
    group.addoption(
        "--devgraph-backend",
        metavar="NAME",
        default=None,
        help="backend for tests of devgraph: cpu, cuda, npu, rocm, a plugin's name, or auto",
    )
    group.addoption(
        "--devgraph-fail-on-skip",
        action="store_true",
        help="fail tests that are skipped for any reason but an undeclared capability",
    )
    group.addoption(
        "--devgraph-skip-undeclared",
        action="store_true",
        help="skip tests of undeclared capabilities instead of trying them",
    )
    group.addoption(
        "--devgraph-long",
        action="store_true",
        help="endurance tests at full length (ten thousand replays, a hundred captures)",
    )
    group.addoption(
        "--devgraph-report",
        metavar="FILE.json",
        default=None,
        help="write the results by capability as JSON, and a Markdown table of badges next to it",
    )
    parser.addini("devgraph_backend", "the default of --devgraph-backend (cpu)", default="")


def pytest_configure(config: pytest.Config) -> None:
    for name in DEVICE_MARKERS:
        config.addinivalue_line("markers", f"{name}: needs the backend {name!r}")
    config.addinivalue_line(
        "markers", f"{CAPABILITY_MARKER}(*names): needs these capabilities of the backend"
    )
    config.addinivalue_line("markers", "slow: takes more than ten seconds")
    plugin = _Plugin(config)
    if plugin.name not in DEVICE_MARKERS and plugin.name.isidentifier():
        config.addinivalue_line("markers", f"{plugin.name}: runs on the backend {plugin.name!r}")
    config.pluginmanager.register(plugin, "devgraph-session")


@pytest.fixture
def devgraph_backend(request: pytest.FixtureRequest) -> Backend:
    """The backend under test, on the device of this pytest-xdist worker if there is one."""
    plugin = request.config.pluginmanager.get_plugin("devgraph-session")
    assert isinstance(plugin, _Plugin)
    return plugin.backend(plugin.name_for(request.node))


@pytest.fixture(scope="session")
def devgraph_long(pytestconfig: pytest.Config) -> bool:
    """Whether endurance tests run at full length."""
    return bool(pytestconfig.getoption("--devgraph-long"))


class _Plugin:
    """The state of a pytest session: its backend, its markers, and the loss of its device."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._worker = os.environ.get("PYTEST_XDIST_WORKER", "")
        self._bound: set[str] = set()
        self._lost = ""
        given: str | None = config.getoption("--devgraph-backend")
        marked = str(config.getoption("markexpr", "")).strip()
        self._explicit = given is not None
        if given is None and marked in DEVICE_MARKERS:
            given = marked
        given = given or str(config.getini("devgraph_backend"))
        self.name: str = given or "cpu"
        # Do not import torch in sessions of other projects that merely have this plugin installed.
        self._concerned = bool(given) or any(
            "devgraph.testing" in argument.replace(os.sep, ".") for argument in config.args
        )
        self._fail_on_skip = bool(config.getoption("--devgraph-fail-on-skip"))
        self._report: str | None = config.getoption("--devgraph-report")
        self._skip_undeclared = bool(config.getoption("--devgraph-skip-undeclared"))

    def backend(self, name: str) -> Backend:
        """Return the backend ``name``. The first call binds it to the device of this worker."""
        from devgraph.api.registry import get_backend

        backend = get_backend(name)
        if name not in self._bound:
            self._bound.add(name)
            bind = getattr(backend, "bind_worker", None)
            if bind is not None and self._worker.startswith("gw"):
                bind(int(self._worker[2:]))
        return backend

    def name_for(self, item: pytest.Item) -> str:
        """Return the name of the backend in a marker of ``item``, or of the chosen backend."""
        return next((name for name in DEVICE_MARKERS if item.get_closest_marker(name)), self.name)

    def pytest_sessionstart(self) -> None:
        if self.name == "auto":
            self.name = self.backend("auto").name
        if self._report is not None and not self._worker:
            self._prepare_report(Path(self._report))
        if not self._explicit or self._worker:
            return
        from devgraph.api.errors import BackendError

        try:
            self.backend(self.name).make_graph().close()  # raises an error if hooks are missing
        except BackendError as error:
            raise pytest.UsageError(f"--devgraph-backend {self.name}: {error}") from error
        except Exception as error:
            raise pytest.UsageError(
                f"--devgraph-backend {self.name}: an empty graph cannot be made and closed: "
                f"{type(error).__name__}: {error}. Each __init__ of the backend, its pool and "
                f"its graph must call super().__init__()."
            ) from error

    def _prepare_report(self, path: Path) -> None:
        """Create the report's folder before the run, so that a bad path cannot lose the results."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix != ".json" or path.is_dir() or not os.access(path.parent, os.W_OK):
                raise OSError("expected the name of a .json file in a writable folder")
        except OSError as error:
            raise pytest.UsageError(f"--devgraph-report {path}: {error}") from error

    def pytest_report_header(self) -> list[str]:
        if not self._concerned:
            return []
        import devgraph

        try:
            backend = self.backend(self.name)
        except devgraph.BackendError as error:
            return [f"devgraph {devgraph.__version__}: backend {self.name}: {error}"]
        capabilities = attrs.asdict(backend.capabilities)
        has = [name for name, value in capabilities.items() if value is True]
        lacks = [name for name, value in capabilities.items() if value is False]
        rest = [f"{k}={v}" for k, v in capabilities.items() if not isinstance(v, bool)]
        return [
            f"devgraph {devgraph.__version__}: backend {backend.name} on {backend.device} "
            f"({backend.device_name}), {backend.version}",
            f"declares: {', '.join(has) or '(nothing)'}; {', '.join(rest)}",
            f"does not declare: {', '.join(lacks) or '(nothing)'}",
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: Sequence[pytest.Item]) -> None:
        if not self.name.isidentifier():
            return
        for item in items:
            own = any(item.get_closest_marker(name) for name in DEVICE_MARKERS)
            if "devgraph_backend" in getattr(item, "fixturenames", ()) and not own:
                item.add_marker(self.name)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        from devgraph.api.errors import BackendUnavailableError

        wanted = [name for name in DEVICE_MARKERS if item.get_closest_marker(name)]
        for name in wanted:
            try:
                self.backend(name)
            except BackendUnavailableError as error:
                pytest.skip(f"backend {name!r}: {error}")
        asked = [name for mark in item.iter_markers(CAPABILITY_MARKER) for name in mark.args]
        declared = self.backend(self.name_for(item)).capabilities if asked else None
        missing = tuple(name for name in asked if not getattr(declared, name))
        item.stash[_missing_key] = missing
        if "devgraph_backend" in getattr(item, "fixturenames", ()) and (
            self.name_for(item) == self.name
        ):
            item.user_properties.extend((CAPABILITY_MARKER, name) for name in asked or [_CORE])
        if missing and self._skip_undeclared:
            pytest.skip(self._lacks(item, missing))

    def _lacks(self, item: pytest.Item, missing: Sequence[str]) -> str:
        return f"backend {self.name_for(item)!r}{_LACKS}{', '.join(missing)}"

    def _reasons(self, row: _Row) -> str:
        """Return the reasons for skips; undeclared capabilities are merged into one list."""
        start = f"backend {self.name!r}{_LACKS}"
        others = [text for text in row.reasons if not text.startswith(start)]
        lacks = {name for t in {*row.reasons} - {*others} for name in t[len(start) :].split(", ")}
        names = ", ".join(sorted(lacks))
        return "; ".join([*[f"undeclared: {names}"] * bool(names), *others])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        missing = item.stash.get(_missing_key, ())
        if report.failed and call.excinfo is not None:
            self._lost = self._lost or self._lost_reason(item, call.excinfo.value)
            faults = re.match(r"FAULTS ([\d, ]+)", inspect.getdoc(getattr(item, "obj", None)) or "")
            numbers = re.findall(r"\d+", faults[1]) if faults else []
            report.user_properties.append((_FAULTS, [*map(int, numbers)]))
        if missing and report.failed:  # Tests of undeclared capabilities may fail.
            path, line, _ = item.location
            report.outcome = "skipped"
            report.longrepr = (path, (line or 0) + 1, f"Skipped: {self._lacks(item, missing)}")
        elif not missing and not hasattr(report, "wasxfail"):
            self._judge_skip(report)
        return report

    def _judge_skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.outcome == "skipped" and self._fail_on_skip:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
            report.outcome = "failed"
            report.longrepr = f"{reason} (--devgraph-fail-on-skip turns skips into failures)"

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self,
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        self._judge_skip(report)
        return report

    def _lost_reason(self, item: pytest.Item, error: BaseException | None) -> str:
        from devgraph.api.errors import DeviceLost

        backend: Backend | None = getattr(item, "funcargs", {}).get("devgraph_backend")
        while error is not None:
            if isinstance(error, DeviceLost):
                return str(error)
            reason = None if backend is None else backend.lost_reason(error)
            if reason is not None:
                return reason
            error = error.__cause__ or error.__context__
        return ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        result = yield
        if self._lost and self._worker:
            # No later test in this process can pass, so let xdist start a new worker. Skip the
            # normal exit, because destructors would wait for the device.
            os._exit(_LOST_EXIT_CODE)
        if self._lost:
            item.session.shouldfail = f"the device is lost: {self._lost}"
        return result

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Write a table of results by capability, and the hooks to fix for failed capabilities."""
        rows: dict[str, _Row] = {}
        failures: list[dict[str, Any]] = []
        for outcome, reports in terminalreporter.stats.items():
            for report in reports:
                properties = getattr(report, "user_properties", ())
                names = [name for kind, name in properties if kind == CAPABILITY_MARKER]
                for name in names:
                    rows.setdefault(name, _Row()).count(outcome, report)
                if names and outcome in ("failed", "error"):
                    failures.append(_failure(report, names))
        if not rows or not self._concerned:
            return
        capabilities = self.backend(self.name).capabilities
        rows = dict(sorted(rows.items(), key=lambda item: (item[0] != _CORE, item[0])))
        for name, row in rows.items():
            row.declared = name == _CORE or bool(getattr(capabilities, name))
        if self._report is not None:
            self._write_report(self._report, rows, failures)
        terminalreporter.section(f"devgraph: results of {self.name!r}", sep="-")
        width = terminalreporter.config.get_terminal_writer().fullwidth

        def write(text: str) -> None:
            for line in textwrap.wrap(text, width, subsequent_indent=" " * 21):
                terminalreporter.write_line(line)

        write(f"{'capability':<20} {'declared':<8} {'proved':>6} {'failed':>6} {'skipped':>7}")
        for name, row in rows.items():
            says = "yes" if row.declared else "no"
            figures = f"{row.proved:>6} {row.failed:>6} {row.skipped:>7}"
            write(f"{name:<20} {says:<8} {figures}  {self._reasons(row)}".rstrip())
            if row.failed:
                page = " (docs/backends.md#other-devices)" if name == _CORE else ""
                write(f"{'':<20} implement or fix: {', '.join(_hooks(name))}{page}")
                failed = [n for n, r in rows.items() if r.failed and r.declared and n != _CORE]
                if name == _CORE and failed:
                    write(f"{'':<20} may be the cause of the failures of {', '.join(failed)}")
                own = (one["faults"] for one in failures if name in one["capabilities"])
                if numbers := sorted({number for faults in own for number in faults}):
                    links = ", ".join(f"#row-{number}" for number in numbers)
                    write(f"{'':<20} faults of these tests: docs/faults.md {links}")
            elif not row.declared and row.proved and not row.skipped:
                write(f"{'':<20} passes all of its tests: consider declaring {name}")

    def _write_report(
        self, path: str, rows: Mapping[str, _Row], failures: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write the JSON file, and next to it a Markdown table with the suffix ``.md``."""
        import torch

        import devgraph

        backend = self.backend(self.name)
        report = {
            "devgraph": devgraph.__version__,
            "torch": torch.__version__,
            "backend": backend.name,
            "device": backend.device_name,
            "version": backend.version,
            "capabilities": {
                name: {**attrs.asdict(row), "reasons": [*row.reasons]} for name, row in rows.items()
            },
            "failures": failures,
        }
        Path(path).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        lines = [
            f"{backend.name} on {backend.device_name}, {backend.version}, devgraph "
            f"{devgraph.__version__}",
            "",
            "| capability | badge | proved | failed | skipped |",
            "| --- | --- | --- | --- | --- |",
        ]
        for name, row in rows.items():
            figures = f"{row.proved} | {row.failed} | {row.skipped}"
            lines.append(f"| {name} | {row.badge} | {figures} |")
        text = "\n".join(lines) + "\n"
        Path(path).with_suffix(".md").write_text(text, encoding="utf-8")


def _failure(report: Any, names: Sequence[str]) -> dict[str, Any]:
    """Describe a failed test of the capabilities ``names`` as JSON values."""
    lines = report.longreprtext.strip().splitlines()
    errors = [line for line in lines if line.startswith("E ")]
    return {
        "test": report.nodeid,
        "capabilities": names,
        "hooks": sorted({hook for name in names for hook in _hooks(name)}),
        "faults": next((v for kind, v in report.user_properties if kind == _FAULTS), []),
        "text": errors[:8] + lines[-1:],
    }


@attrs.define
class _Row:
    """Outcomes of the tests of one capability."""

    declared: bool = False
    proved: int = 0
    failed: int = 0
    skipped: int = 0
    reasons: dict[str, None] = attrs.field(factory=dict)

    @property
    def badge(self) -> str:
        if not self.declared:
            return "⚪ not declared"
        if self.failed:
            return "🔴 fails"
        is_run = all(_LACKS in reason for reason in self.reasons)
        return "🟢 proved" if self.proved and is_run else "🟡 not fully run"

    def count(self, outcome: str, report: Any) -> None:
        self.proved += outcome in ("passed", "xfailed")
        self.failed += outcome in ("failed", "error")
        self.skipped += outcome == "skipped"
        if outcome == "skipped" and isinstance(report.longrepr, tuple):
            self.reasons[str(report.longrepr[2]).removeprefix("Skipped: ")] = None


def _hooks(name: str) -> Sequence[str]:
    from devgraph.api.backend import Backend
    from devgraph.api.capabilities import hooks
    from devgraph.api.graph import DeviceGraph

    if name != _CORE:
        return hooks(name) or ("Capabilities",)
    return [
        f"{room.__name__}.{method}"
        for room in (DeviceGraph, Backend)
        for method in sorted(room.__abstractmethods__)
    ]
