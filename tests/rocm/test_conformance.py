"""The conformance suite on the ROCm backend over the fake libamdhip64, and the room's own rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.sim.hip import unavailable_reason
from tests.support.suite import run_suite

ROOT = Path(__file__).parents[2]

# What the fake cannot show, and why.
BEYOND_THE_FAKE = {
    "test_memory_is": "it keeps what was recorded, so that a use after the end is seen",
    "test_closed_capture_releases": "the same",
    "test_graph_that_was_freed": "the same",
    "test_many_buckets_cost": "its memory is the CPU allocator's, which pools nothing",
    "test_temporaries_of_a_step": "the same",
    "test_host_read_in_a_captured_body": "reading a CPU tensor is no call that anyone could see",
    "test_side_stream_that_is_not_joined": "the suite takes its streams from torch.cpu",
    "test_capture_from_the_default_stream": "the same",
    "test_result_that_a_region_also_keeps": "its tensors are not those that the region made",
    "test_layout_change_after_a_use": "it does no work while it records, not even on layouts",
    "test_step_that_changes_the_layout": "the same",
    "test_expanded_results_and_outputs": "the same",
}
"""The faults tests show refused host reads and unjoined streams with the fake's own streams."""


@pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no fake library: {unavailable_reason()}"
)
def test_suite_passes_on_the_fake(tmp_path: Path):
    result = run_suite(
        *("-p", "tests.sim.hip.plugin", "--devgraph-backend", "rocm"),
        *("--devgraph-skip-undeclared", "-k", f"not ({' or '.join(BEYOND_THE_FAKE)})"),
        cwd=tmp_path,
        DEVGRAPH_TEST_HIP_SIM="fake",
    )
    failed = [name for name, outcome in result.outcomes.items() if outcome == "failed"]
    assert failed == [], result.text[-6000:]
    assert result.exit_code == 0, result.text[-2000:]
    updates = [n for n, outcome in result.outcomes.items() if "update" in n and outcome == "passed"]
    assert len(updates) >= 10
    assert sum(outcome == "passed" for outcome in result.outcomes.values()) >= 180


@pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no fake library: {unavailable_reason()}"
)
def test_planted_faults_are_found_on_the_fake(tmp_path: Path):
    result = run_suite(
        *("-p", "tests.sim.hip.plugin", "--devgraph-backend", "rocm"),
        # The fake replays calls on tensor objects, which follow a new `.data`.
        *("--devgraph-skip-undeclared", "-k", "planted_fault_is_found and not data"),
        cwd=tmp_path,
        modules=["tests.api.test_planted"],
        DEVGRAPH_TEST_HIP_SIM="fake",
    )
    assert result.exit_code == 0, result.text[-4000:]
    assert sum(outcome == "passed" for outcome in result.outcomes.values()) == 16


@pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no fake library: {unavailable_reason()}"
)
def test_programs_of_other_people_run_on_the_fake(tmp_path: Path):
    without = ["closed_capture_keeps_no_gradient"]  # The fake keeps what was recorded.
    without.append("tensor_that_wraps_another")  # Its recorder needs the address of each tensor.
    result = run_suite(
        *("-p", "tests.sim.hip.plugin", "--devgraph-backend", "rocm"),
        *("--devgraph-skip-undeclared", "-k", f"not ({' or '.join(without)})"),
        cwd=tmp_path,
        modules=[f"tests.api.test_{name}" for name in ("cases_state", "owned", "named", "reach")],
        DEVGRAPH_TEST_HIP_SIM="fake",
    )
    assert result.exit_code == 0, result.text[-4000:]
    assert sum(outcome == "passed" for outcome in result.outcomes.values()) >= 300


@pytest.mark.skipif(
    unavailable_reason() is not None, reason=f"no fake library: {unavailable_reason()}"
)
def test_thread_stuck_beside_an_undeclared_capture_is_reported_and_left(tmp_path: Path):
    """The replay waits for the capture of the very thread that waits for the replay."""
    tried = "test_another_thread_replays_while_one_captures"
    result = run_suite(
        *("-p", "tests.sim.hip.plugin", "--devgraph-backend", "rocm", "-rs", "-k", tried),
        cwd=tmp_path,
        DEVGRAPH_TEST_HIP_SIM="fake",
    )
    assert result.outcomes == {tried: "skipped"}, result.text[-2000:]
    assert "does not declare concurrent_threads" in result.text


def test_documented_command_for_the_fake_leaves_out_what_it_is_tested_without():
    text = (ROOT / "tests/sim/hip/README.md").read_text(encoding="utf-8")
    (left_out,) = re.findall(r'-k "not \(([^)]*)\)"', text)
    assert re.findall(r"test_\w+", left_out) == list(BEYOND_THE_FAKE)


def statements(path: Path) -> list[str]:
    """Return the lines of a file that are code: no blanks, comments, imports or brackets alone."""
    text = re.sub(r'""".*?"""', "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line.strip() for line in text.splitlines()]
    return [
        line
        for line in lines
        if line and not line.startswith(("#", "import ", "from ")) and line.strip("()[]{},:")
    ]


def test_room_shares_no_run_of_six_lines_with_the_cuda_room():
    def runs(room: str) -> dict[tuple[str, ...], str]:
        found = {}
        for path in sorted((ROOT / "devgraph" / room).glob("*.py")):
            lines = statements(path)
            for at in range(len(lines) - 5):
                found[tuple(lines[at : at + 6])] = path.name
        return found

    ours, theirs = runs("rocm"), runs("cuda")
    assert len(ours) > 300, "the search is broken"
    shared = {run: (ours[run], theirs[run]) for run in ours.keys() & theirs.keys()}
    assert not shared


def test_room_imports_nothing_of_other_rooms_and_no_vendor_package():
    for path in (ROOT / "devgraph" / "rocm").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        imported = re.findall(r"^\s*(?:from|import) ([\w.]+)", text, re.MULTILINE)
        outside = [name for name in imported if name.split(".")[0] in ("cuda", "hip", "torch_npu")]
        rooms = [name for name in imported if re.match(r"devgraph\.(cuda|npu|cpu)\b", name)]
        assert not outside + rooms, path
