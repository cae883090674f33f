"""Runtimes of several releases, as the fake shows them."""

from __future__ import annotations

import pytest
import torch

import devgraph as dg
from devgraph.rocm.runtime import GATE_CALLS
from tests.support.fake_hip import (
    assert_usable,
    captured,
    check,
    noise,
    on_fake,
    recorded,
    step,
)

HIP_52 = 50221153
HIP_72 = 70226015


def test_release_without_attributes_still_updates():
    with on_fake("release52", version=HIP_52) as be:
        assert be.runtime.missing == {"hipGraphKernelNodeCopyAttributes"}
        assert_usable(be)


def test_runtime_without_gates_still_copies_launch_attributes(monkeypatch: pytest.MonkeyPatch):
    with on_fake(version=HIP_72) as be:
        monkeypatch.setattr(be.runtime, "missing", GATE_CALLS)
        made: list[str] = []
        monkeypatch.setattr(be.runtime, "call", lambda name, *_: made.append(name))
        be.runtime.copy_attributes(1, 2)
    assert made == ["GraphKernelNodeCopyAttributes"]


def test_runtime_without_required_functions_is_unavailable_and_names_them():
    with (
        pytest.raises(dg.BackendUnavailableError, match="lacks hipStreamGetCaptureInfo_v2"),
        on_fake("ancient"),
    ):
        pass


@pytest.mark.parametrize(("version", "first"), [(HIP_52, 1), (50300000, 0), (HIP_72, 0)])
def test_kinds_of_nodes_are_told_by_the_runtimes_version(version: int, first: int):
    @dg.region(host_args=("n",))
    def three(x: torch.Tensor, *, n: int) -> torch.Tensor:
        out = torch.empty_like(x)
        out.copy_(x)
        spare = torch.empty_like(x).zero_()
        return out * n + spare

    with on_fake(version=version) as be:
        assert min(be.runtime.kinds) == first
        x = noise()
        graph, _ = recorded(be, three, x)
        kinds = [be.runtime.kind(node) for node in be.runtime.nodes(graph._own.raw.graph)]
        assert kinds == ["memcpy", "memset", "kernel", "kernel", "memcpy", "kernel"]
        graph.close()
        with captured(be, three, x) as cap:
            for n in (2, 3, 2):
                check(cap, three, x, n=n)


def test_copies_in_regions_are_refused_where_the_runtime_does_not_report_them():
    @dg.region(host_args=("n",), mutates=("out",))
    def writing(x: torch.Tensor, out: torch.Tensor, *, n: int) -> None:
        torch.mul(x, n, out=out)

    def kernels(x: torch.Tensor, *, n: int) -> torch.Tensor:
        out = torch.empty_like(x)
        writing(x + 1, out, n=n)
        return out + 1

    with on_fake(reports_copies=0) as be:
        x = noise()
        with pytest.raises(dg.UpdateTopologyError, match=r"are copied too.*'breakable'"):
            captured(be, step, x)  # its region returns a tensor
        with captured(be, step, x, policy="breakable", budget=None) as cap:
            for n in (2, 3):
                check(cap, step, x, n=n)
        with captured(be, kernels, x) as cap:
            for n in (2, 3, 5, 3):
                check(cap, kernels, x, n=n)


def test_runtime_that_lists_nodes_in_another_order_is_refused():
    with on_fake(shuffle=1) as be:
        with pytest.raises(dg.CaptureError, match="not list captured nodes in capture order"):
            captured(be, step, noise())
        be.fake.set(shuffle=0)
        assert_usable(be)


def test_region_with_a_host_function_is_refused():
    with on_fake() as be:

        @dg.region(host_args=("n",))
        def calling(x: torch.Tensor, *, n: int) -> torch.Tensor:
            if be.namespace.is_current_stream_capturing():
                be.fake.host_function(be.current_stream_id())
            return x * n

        with pytest.raises(dg.UpdateError, match="calling contains a host node"):
            captured(be, lambda x, *, n: calling(x, n=n), noise())
        assert_usable(be)
