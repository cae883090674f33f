"""``devgraph doctor`` on a ROCm host, over the fake libamdhip64."""

from __future__ import annotations

from typing import Any

import pytest

from devgraph.api.registry import BackendInfo
from devgraph.cli import doctor
from devgraph.cli.doctor import probe_backend
from devgraph.rocm import backend as rocm
from tests.support.cli_programs import run_cli, run_json
from tests.support.fake_hip import on_fake


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a backend the only one that doctor finds."""

    def show(backend: Any) -> None:
        info = BackendInfo(
            name="rocm", available=True, reason="", device="fake", version=backend.version
        )
        monkeypatch.setattr(doctor, "backends", lambda: [info])
        monkeypatch.setattr(doctor, "get_backend", lambda name: backend)

    return show


def test_report_tells_library_and_what_the_runtime_was_found_to_do(
    shown: Any, capsys: pytest.CaptureFixture[str]
):
    with on_fake("release52", version=50221153, reports_copies=0) as be:
        shown(be)
        result = run_cli(capsys, "doctor")
    said = " ".join(result.out.split())
    assert be.runtime.path in result.out.replace("\n", "")
    assert "hipGraphKernelNodeCopyAttributes" in said
    assert "not reported before HIP 7.14" in said
    assert "refused: their addresses are not reported" in said


def test_json_report_has_the_details_of_a_runtime_that_ignores_updates(
    shown: Any, capsys: pytest.CaptureFixture[str]
):
    with on_fake(stale=-1) as be:
        shown(be)
        data = run_json(capsys, "doctor")
    (rocm,) = data["backends"]
    assert rocm["details"]["updates"].startswith("ignored by this runtime")
    assert rocm["details"]["missing functions"] == "none"
    assert rocm["version"].startswith("HIP 7.2.26015")


def test_every_probe_of_what_is_declared_succeeds():
    with on_fake() as be:
        probes = {probe["name"]: probe for probe in probe_backend(be)}
    assert [name for name, probe in probes.items() if not probe["ok"]] == []
    assert probes["region_update"]["works"]
    assert probes["rng"]["works"]


@pytest.mark.parametrize("there", [True, False])
def test_missing_triton_is_told_with_the_index_it_comes_from(
    shown: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, there: bool
):
    monkeypatch.setattr(rocm, "compilers", lambda: ("eager", "inductor")[: 1 + there])
    with on_fake() as be:
        shown(be)
        (told,) = run_json(capsys, "doctor", "--no-probe")["backends"]
    assert ("compilers" in told["lacks"]) is not there
    assert there or "PyTorch's ROCm index" in told["lacks"]["compilers"]
