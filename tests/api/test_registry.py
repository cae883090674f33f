"""Backends by name: what exists, what is missing, and what "auto" takes."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import re
import sys
from typing import Any

import pytest

import devgraph as dg
from devgraph.api import registry
from devgraph.api.marks.source import is_machinery_module
from devgraph.api.registry import _registry
from devgraph.cpu.backend import CpuBackend


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a test registers."""
    for kept in ("_factories", "_instances"):
        monkeypatch.setattr(_registry, kept, dict(getattr(_registry, kept)))


def _unavailable(reason: str) -> Any:
    def factory() -> CpuBackend:
        raise dg.BackendUnavailableError(reason)

    return factory


def _named(name: str) -> type[CpuBackend]:
    return type(name.title(), (CpuBackend,), {"name": name})


def test_unknown_name_lists_what_exists_and_the_nearest():
    """FAULTS 32."""
    with pytest.raises(dg.UnknownBackendError, match=r"cpu, cuda.*Did you mean 'cuda'") as caught:
        dg.get_backend("cudaa")
    assert isinstance(caught.value, ValueError)


def test_explicit_backend_that_is_absent_raises_with_its_reason():
    """FAULTS 32."""
    dg.register("absent", _unavailable("the driver is too old: install 2.0 or newer"))
    with pytest.raises(dg.BackendUnavailableError, match=r"too old: install 2\.0"):
        dg.get_backend("absent")
    listed = {info.name: info for info in dg.backends()}
    assert not listed["absent"].available
    assert "too old" in listed["absent"].reason


def test_factory_that_raises_anything_is_listed_and_passed_over(caplog: pytest.LogCaptureFixture):
    """FAULTS 32."""

    def broken() -> CpuBackend:
        raise OSError("libvendor.so.7: cannot open shared object file")

    for name in ("cuda", "npu", "rocm"):
        dg.register(name, broken, replace=True)
    dg.register("broken", broken)
    with caplog.at_level(logging.INFO, logger="devgraph"):
        assert dg.get_backend("auto") is dg.get_backend("cpu")
    told = "backend 'broken' failed to start: OSError: libvendor.so.7"
    assert f"auto skips broken: {told}" in caplog.text
    assert {i.name: i.reason for i in dg.backends()}["broken"].startswith(told)


def test_auto_passes_over_a_plugin_that_runs_on_the_host():
    dg.register("absolute", _named("absolute"))
    assert dg.get_backend("auto").name == "cpu"
    assert dg.get_backend("absolute") is not dg.get_backend("cpu")


def test_auto_takes_the_first_device_that_works():
    """FAULTS 32."""
    dg.register("cuda", _unavailable("no device"), replace=True)
    dg.register("npu", _named("npu"), replace=True)
    dg.register("rocm", _unavailable("must not be asked"), replace=True)
    assert dg.get_backend("auto") is dg.get_backend("npu")


def test_built_in_whose_vendor_package_is_missing_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
):
    """FAULTS 32."""
    real = importlib.import_module

    def missing(name: str, *rest: Any) -> Any:
        if name == "devgraph.npu":
            raise ModuleNotFoundError("No module named 'torch_npu'", name="torch_npu")
        return real(name, *rest)

    monkeypatch.setattr(registry.importlib, "import_module", missing)
    _registry._instances.pop("npu", None)
    with pytest.raises(dg.BackendUnavailableError, match=r"needs module 'torch_npu': install CANN"):
        dg.get_backend("npu")


def test_entry_point_is_loaded_on_first_use_only(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "late_vendor.py").write_text(
        "from devgraph.cpu.backend import CpuBackend\nclass Late(CpuBackend):\n    name = 'late'\n",
        encoding="utf-8",
    )
    info = tmp_path / "late_vendor-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: late-vendor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[devgraph.backends]\nlate = late_vendor:Late\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert "late" in registry.names()
    assert "late_vendor" not in sys.modules
    backend = dg.get_backend("late")
    assert backend.name == "late"
    assert dg.get_backend("late") is backend
    assert is_machinery_module("late_vendor.recorder")
    sys.modules.pop("late_vendor")


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (
            "no_such_vendor:make",
            "cannot be loaded from 'no_such_vendor:make' of the package 'odd-ven",
        ),
        ("odd_vendor:nothing", "AttributeError: module 'odd_vendor' has no attribute 'nothing'"),
        ("odd_vendor:number", "failed to start: TypeError: 'int' object is not callable"),
        ("odd_vendor:returns_number", "returned 3, which is not a devgraph.api.backend.Backend"),
        ("odd_vendor:raises", "failed to start: OSError: libodd.so.7"),
    ],
)
def test_package_whose_backend_is_broken_is_named_and_hides_no_other(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, target: str, told: str
):
    (tmp_path / "odd_vendor.py").write_text(
        "number = 3\n"
        "def returns_number():\n    return number\n"
        "def raises():\n    raise OSError('libodd.so.7')\n",
        encoding="utf-8",
    )
    info = tmp_path / "odd_vendor-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: odd-vendor\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[devgraph.backends]\nodd = {target}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    try:
        with pytest.raises(dg.BackendUnavailableError, match=re.escape(told)):
            dg.get_backend("odd")
        listed = {info.name: info for info in dg.backends()}
    finally:
        sys.modules.pop("odd_vendor", None)
    assert not listed["odd"].available and told in listed["odd"].reason
    assert listed["cpu"].available


def test_register_refuses_what_cannot_be_a_backend():
    for name, factory in ((3, CpuBackend), ("mine", None), ("mine", dg.DeviceGraph)):
        with pytest.raises(dg.InputTypeError, match="a name and a subclass of devgraph.api.backen"):
            dg.register(name, factory)
    for name in ("", "auto"):
        with pytest.raises(dg.InputError, match="cannot name a backend"):
            dg.register(name, CpuBackend)


def test_registering_again_replaces_the_backend_only_on_request():
    dg.register("mine", _named("mine"))
    first = dg.get_backend("mine")
    for name in ("mine", "cpu"):
        with pytest.raises(dg.InputError, match=f"'{name}' is registered already.*replace=True"):
            dg.register(name, _named(name))
    assert dg.get_backend("mine") is first
    dg.register("mine", _named("mine"), replace=True)
    assert dg.get_backend("mine") is not first


def test_a_backend_has_the_name_under_which_it_is_registered():
    """Else its part of a mode would not apply to it."""
    said = "Mine names itself 'mine', but is registered as 'other'"
    with pytest.raises(dg.InputError, match=said):
        dg.register("other", _named("mine"))
    with pytest.raises(dg.InputError, match="has no name; set name = 'other' in the class"):
        dg.register("other", _named(""))
    dg.register("other", lambda: _named("mine")())
    with pytest.raises(dg.BackendUnavailableError, match=said):
        dg.get_backend("other")
    assert said in {info.name: info.reason for info in dg.backends()}["other"]


def test_graph_type_without_its_hooks_is_refused(monkeypatch):
    monkeypatch.setattr(CpuBackend, "graph_type", dg.DeviceGraph)
    dg.register("plain", _named("plain"))
    with pytest.raises(dg.BackendUnavailableError, match="of Plain is DeviceGraph, .* _abort"):
        dg.get_backend("plain")


def test_name_in_another_case_is_suggested():
    with pytest.raises(dg.UnknownBackendError, match="Did you mean 'cpu'"):
        dg.get_backend("CPU")
