"""The pytest plugin: options, markers, skips, undeclared capabilities, lost devices, workers."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap

import pytest

import devgraph as dg
from devgraph.api.registry import _registry
from tests.support.suite import SUITE, environment, plugin_options, run_suite

pytest_plugins = ["pytester"]

ABSENT = next(
    (info for info in dg.backends() if not info.available and info.name in ("cuda", "npu", "rocm")),
    None,
)
"""A built-in backend that this machine cannot use."""

needs_absent = pytest.mark.skipif(ABSENT is None, reason="every built-in backend is usable here")

FAKE = """
import devgraph as dg
from devgraph.cpu.backend import CpuBackend

class Fake(CpuBackend):
    name = "fake"
    bound = []

    def bind_worker(self, index):
        self.bound.append(index)

    def lost_reason(self, error):
        return "illegal address" if "sticky" in str(error) else None

dg.register("fake", Fake, replace=True)
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Run one test file in this process and return what pytest said."""
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)  # this process may itself be a worker
    for kept in ("_factories", "_instances"):  # forget what a conftest registers
        monkeypatch.setattr(_registry, kept, dict(getattr(_registry, kept)))

    def runner(source, *options, conftest=FAKE):
        pytester.makeconftest(conftest)
        pytester.makepyfile(test_inner=textwrap.dedent(source))
        return pytester.runpytest_inprocess(
            *plugin_options(), "-p", "no:cacheprovider", "--strict-markers", *options
        )

    return runner


USES_BACKEND = """
import pytest

def test_named(devgraph_backend):
    assert devgraph_backend.name == "{name}"

def test_plain():
    pass
"""


def test_backend_is_cpu_unless_chosen(run):
    run(USES_BACKEND.format(name="cpu")).assert_outcomes(passed=2)


def test_option_chooses_the_backend(run):
    run(USES_BACKEND.format(name="fake"), "--devgraph-backend", "fake").assert_outcomes(passed=2)


def test_ini_chooses_the_backend_and_the_option_wins(run, pytester):
    pytester.makeini("[pytest]\ndevgraph_backend = fake")
    run(USES_BACKEND.format(name="fake")).assert_outcomes(passed=2)
    options = ("--devgraph-backend", "cpu")
    run(USES_BACKEND.format(name="cpu"), *options).assert_outcomes(passed=2)


def test_auto_takes_the_best_backend_of_this_machine(run):
    name = dg.get_backend("auto").name
    source, options = USES_BACKEND.format(name=name), ("--devgraph-backend", "auto")
    run(source, *options, conftest="").assert_outcomes(passed=2)


def test_tests_that_use_the_backend_carry_its_name_as_a_marker(run):
    run(USES_BACKEND.format(name="cpu"), "-m", "cpu").assert_outcomes(passed=1, deselected=1)
    options = ("--devgraph-backend", "fake", "-m", "fake")
    run(USES_BACKEND.format(name="fake"), *options).assert_outcomes(passed=1, deselected=1)


@needs_absent
def test_marked_test_is_skipped_with_the_reason_of_its_backend(run):
    result = run(
        f"""
        import pytest

        @pytest.mark.{ABSENT.name}
        def test_device(devgraph_backend):
            raise AssertionError("it ran")
        """,
        "-rs",
    )
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines([f"*backend '{ABSENT.name}': {ABSENT.reason[:30]}*"])


@needs_absent
def test_expression_of_one_backend_chooses_it(run):
    result = run(USES_BACKEND.format(name="cpu"), "-m", ABSENT.name, "-rs")
    result.assert_outcomes(skipped=1, deselected=1)
    result.stdout.fnmatch_lines([f"*backend '{ABSENT.name}'*"])


@needs_absent
def test_chosen_backend_that_is_absent_stops_the_session_with_the_way_to_get_it(run):
    """FAULTS 32."""
    result = run(USES_BACKEND.format(name="cpu"), "--devgraph-backend", ABSENT.name)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert ABSENT.reason[:30] in result.stderr.str() + result.stdout.str()


def test_unknown_backend_stops_the_session_with_the_nearest_name(run):
    """FAULTS 32."""
    result = run(USES_BACKEND.format(name="cpu"), "--devgraph-backend", "cpuu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "Did you mean 'cpu'?" in result.stderr.str() + result.stdout.str()


def test_header_shows_backend_device_version_and_capabilities(run):
    result = run(USES_BACKEND.format(name="fake"), "--devgraph-backend", "fake")
    backend = dg.get_backend("fake")
    result.stdout.fnmatch_lines(
        [
            f"devgraph {dg.__version__}: backend fake on cpu (*), {backend.version}",
            "declares: *region_update*capture_error_modes=*",
            "does not declare: *",
        ]
    )


def test_header_is_silent_in_sessions_that_are_not_about_devgraph(run):
    result = run("def test_nothing(): pass")
    assert "devgraph 0" not in result.stdout.str()


CAPABILITIES = """
import pytest

@pytest.mark.devgraph_capability("region_update")
def test_declared(devgraph_backend):
    assert {declared}

@pytest.mark.devgraph_capability("streams")
def test_undeclared(devgraph_backend):
    assert {undeclared}

@pytest.mark.devgraph_capability("streams")
def test_undeclared_too(devgraph_backend):
    assert {undeclared_too}
"""


def _capabilities(declared=True, undeclared=True, undeclared_too=True):
    return CAPABILITIES.format(
        declared=declared, undeclared=undeclared, undeclared_too=undeclared_too
    )


def test_declared_and_failing_is_a_failure(run):
    result = run(_capabilities(declared=False), "--devgraph-backend", "fake")
    result.assert_outcomes(passed=2, failed=1)


def test_undeclared_and_failing_is_a_skip_that_names_the_capability(run):
    result = run(_capabilities(undeclared=False), "--devgraph-backend", "fake", "-rs")
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines(["*backend 'fake' does not declare streams*"])
    result.stdout.no_fnmatch_line("*consider declaring*")


def test_undeclared_and_working_is_reported(run):
    result = run(_capabilities(), "--devgraph-backend", "fake")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(
        ["*streams *no * 2 * 0 * 0", "*passes all of its tests: consider declaring streams"]
    )


def test_session_ends_with_what_was_proved_and_what_to_implement(run):
    source = _capabilities(declared=False, undeclared=False)
    core = "\n\ndef test_core(devgraph_backend):\n    pass\n"
    result = run(source + core, "--devgraph-backend", "fake")
    result.stdout.fnmatch_lines(
        [
            "capability *declared *proved *failed *skipped*",
            "the contract itself *yes * 1 * 0 * 0",
            "region_update *yes * 0 * 1 * 0",
            "*implement or fix: DeviceGraph._record, DeviceGraph._apply",
            "streams *no * 1 * 0 * 1  undeclared: streams",
        ]
    )
    table = result.stdout.str().partition("results of 'fake'")[2].partition("\n==")[0]
    assert max(map(len, table.splitlines()[1:])) <= 80


BREAKING = """
import devgraph as dg
from devgraph.api.graph import DeviceGraph as base
from devgraph.cpu.backend import CpuBackend, CpuGraph

def stores(self):
    self._state = {{}}

class Fake(CpuBackend):
    name = "fake"
    graph_type = type("Mine", (CpuGraph,), {{{attributes}}})

dg.register("fake", Fake, replace=True)
"""


def test_report_has_results_failures_and_badges(run, tmp_path):
    source = """
    import pytest

    def test_core(devgraph_backend): pass

    @pytest.mark.devgraph_capability("rng")
    def test_draws(devgraph_backend):
        \"\"\"FAULTS 12, 13: a replay draws the numbers of its capture.\"\"\"
        assert False, "the same numbers"

    @pytest.mark.devgraph_capability("loops")
    def test_loops(devgraph_backend): assert False

    @pytest.mark.devgraph_capability("piecewise")
    def test_pieces(devgraph_backend): pass

    @pytest.mark.devgraph_capability("piecewise", "loops")
    def test_loops_of_pieces(devgraph_backend): assert False
    """
    path = tmp_path / "out.json"
    conftest = FAKE + "\nfrom attrs import evolve\n" + (
        "Fake.capabilities = evolve(Fake.capabilities, rng=True, loops=False)\n"
    )  # fmt: skip
    options = ("--devgraph-backend", "fake", "--devgraph-report", str(path))
    result = run(source, *options, conftest=conftest)
    result.assert_outcomes(passed=2, failed=1, skipped=2)
    result.stdout.fnmatch_lines(["*faults of these tests: docs/faults.md #row-12, #row-13"])
    report = json.loads(path.read_text())
    assert report["backend"] == "fake" and report["devgraph"] == dg.__version__
    found = {
        n: (r["declared"], r["proved"], r["failed"]) for n, r in report["capabilities"].items()
    }
    assert found == {
        "the contract itself": (True, 1, 0), "loops": (False, 0, 0), "rng": (True, 0, 1),
        "piecewise": (True, 1, 0),
    }  # fmt: skip
    (failure,) = report["failures"]
    assert failure["capabilities"] == ["rng"] and failure["faults"] == [12, 13]
    assert failure["test"].endswith("::test_draws") and failure["hooks"]
    assert "the same numbers" in failure["text"][0] and "AssertionError" in failure["text"][-1]
    table = path.with_suffix(".md").read_text()
    assert "| rng | 🔴 fails | 0 | 1 | 0 |" in table
    assert "| the contract itself | 🟢 proved | 1 | 0 | 0 |" in table
    assert "| loops | ⚪ not declared | 0 | 0 | 2 |" in table
    assert "| piecewise | 🟢 proved | 1 | 0 | 1 |" in table


def test_report_is_prepared_before_the_tests_run(run, tmp_path):
    source = """
    import pytest

    def test_core(devgraph_backend): assert False

    @pytest.mark.devgraph_capability("rng")
    def test_draws(devgraph_backend): assert False
    """
    path = tmp_path / "new" / "folder" / "out.json"
    chosen = ("--devgraph-backend", "fake", "--devgraph-report")
    result = run(source, *chosen, str(path))
    result.stdout.fnmatch_lines(["*implement or fix: DeviceGraph._abort, DeviceGraph._begin,"])
    result.stdout.fnmatch_lines(["*may be the cause of the failures of rng"])
    assert [one["faults"] for one in json.loads(path.read_text())["failures"]] == [[], []]
    (tmp_path / "folder.json").mkdir()
    for wrong in (path / "below.json", tmp_path / "folder.json", tmp_path / "out.md"):
        result = run(source, *chosen, str(wrong))
        assert result.ret == pytest.ExitCode.USAGE_ERROR
        assert f"--devgraph-report {wrong}: " in result.stderr.str()


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ("'_record': base._record, '_apply': base._apply",
         "declares region_update, but its graph_type Mine does not implement _record and _apply. "
         "Implement these methods as described in docs/backends.md"),
        ("'_nodes_so_far': base._nodes_so_far",
         "declares node_ranges, but its graph_type Mine does not implement _nodes_so_far"),
        ("'__init__': lambda *_: None", "Each __init__ of the backend, its pool and its graph"),
        ("'calls': len", "Mine.calls hides an attribute in which DeviceGraph"),
        ("'_end': stores", "Mine._state hides an attribute in which DeviceGraph"),
    ],
)  # fmt: skip
def test_backend_that_breaks_the_contract_is_one_error_that_names_it(run, attributes, text):
    conftest = BREAKING.format(attributes=attributes)
    result = run(_capabilities(), "--devgraph-backend", "fake", conftest=conftest)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert result.stderr.str().count(text) == 1


def test_undeclared_is_not_tried_on_request(run):
    source = _capabilities(undeclared="1 / 0")
    result = run(source, "--devgraph-backend", "fake", "--devgraph-skip-undeclared")
    result.assert_outcomes(passed=1, skipped=2)


def test_unknown_capability_is_an_error(run):
    result = run(
        """
        import pytest

        @pytest.mark.devgraph_capability("telepathy")
        def test_typo(devgraph_backend):
            pass
        """
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*telepathy*"])


SKIPS = """
import pytest

@pytest.mark.skip(reason="not today")
def test_marked(): pass

def test_called():
    pytest.skip("nor now")

@pytest.mark.xfail(strict=True)
def test_expected(): assert False

@pytest.mark.devgraph_capability("streams")
def test_undeclared(devgraph_backend): assert False
"""


def test_skips_are_skips_by_default(run):
    run(SKIPS).assert_outcomes(skipped=3, xfailed=1)


def test_skips_fail_on_request_unless_the_capability_is_not_declared(run):
    result = run(SKIPS, "--devgraph-fail-on-skip")
    result.assert_outcomes(errors=1, failed=1, skipped=1, xfailed=1)
    result.stdout.fnmatch_lines(["*not today*", "*nor now*"])


def test_skipped_module_fails_on_request(run):
    source = "import pytest\npytest.importorskip('no_such_module')"
    assert run(source).ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result = run(source, "--devgraph-fail-on-skip")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*no_such_module*"])


LOST = """
import pytest
import devgraph as dg

def test_first(devgraph_backend): pass

def test_lost(devgraph_backend):
    raise {raised}

def test_after(devgraph_backend): pass
def test_later(devgraph_backend): pass
"""


@pytest.mark.parametrize("raised", ["dg.DeviceLost('gone')", "RuntimeError('sticky')"])
def test_lost_device_ends_the_session(run, raised):
    """FAULTS 34."""
    result = run(LOST.format(raised=raised), "--devgraph-backend", "fake")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*the device is lost: *"])


def test_expected_loss_ends_nothing(run):
    """FAULTS 34."""
    result = run(
        """
        import pytest
        import devgraph as dg

        def test_raises(devgraph_backend):
            with pytest.raises(dg.DeviceLost):
                raise dg.DeviceLost("gone")

        def test_after(devgraph_backend): pass
        """
    )
    result.assert_outcomes(passed=2)


def test_lost_device_ends_its_worker_and_a_new_one_goes_on(pytester):
    """FAULTS 34."""
    pytest.importorskip("xdist")
    pytester.makeconftest(FAKE)
    pytester.makepyfile(test_inner=LOST.format(raised="RuntimeError('sticky')"))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", *plugin_options(), "-n", "1", "-v"),
            *("-p", "no:cacheprovider", "--devgraph-backend", "fake"),
        ],
        cwd=pytester.path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "replacing crashed worker gw0" in done.stdout, done.stdout + done.stderr
    assert "3 passed" in done.stdout
    assert "RuntimeError: sticky" in done.stdout


def test_worker_is_bound_to_the_device_of_its_number(run, monkeypatch):
    source = """
        import devgraph as dg

        def test_first(devgraph_backend):
            assert devgraph_backend.bound == [3]

        def test_once_only(devgraph_backend):
            assert devgraph_backend.bound == [3]
        """
    options = ("--devgraph-backend", "fake")
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    run(source, *options, "-p", "no:xdist").assert_outcomes(passed=2)


def test_process_without_workers_is_not_bound(run):
    source = "def test_unbound(devgraph_backend): assert devgraph_backend.bound == []"
    run(source, "--devgraph-backend", "fake").assert_outcomes(passed=1)


def test_loading_the_plugin_imports_no_torch(tmp_path):
    test = tmp_path / "test_other.py"
    test.write_text("import sys\n\ndef test_other():\n    assert 'torch' not in sys.modules\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *plugin_options(), "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_suite_runs_where_it_is_installed(tmp_path):
    result = run_suite(
        *("--devgraph-backend", "cpu", "--devgraph-fail-on-skip", "-v"),
        cwd=tmp_path,
        modules=[f"{SUITE}.test_concurrency"],
    )
    assert result.exit_code == 0, result.text
    assert "backend cpu on cpu" in result.text
