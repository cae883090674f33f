"""What HIP runtimes do wrong, ordered from the fake one by one, and what becomes of it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.torchlike import node_graph as nodegraph
from devgraph.api.torchlike.nodes import RuntimeCallError
from devgraph.rocm import graph as rocm_graph
from devgraph.rocm.graph import LEAK_BUDGET_BYTES, LEAKED_BYTES_PER_NODE
from devgraph.rocm.guard import HostReadGuard
from tests.support.fake_hip import KEEP_ALL, check, on_fake, scaled, step

HIP_52 = 50221153
HIP_72 = 70226015
HIP_714 = 71400000


def noise() -> torch.Tensor:
    return torch.randn(4, 8)


def captured(be: Any, fn: Callable[..., Any], x: torch.Tensor, **options: Any) -> dg.Captured:
    options.setdefault("budget", KEEP_ALL)
    return dg.capture(fn, x, backend=be, host_args={"n": 2}, **options)


def recorded(be: Any, fn: Callable[..., Any], x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Capture ``fn`` with the raw calls; return graph and output."""
    graph = be.make_graph()
    with be.capture_context(graph, host_args={"n": 2}):
        out = fn(x, n=2)
    return graph, out


def assert_usable(be: Any) -> None:
    """Fail unless a new capture on this backend is right, and right again after updates."""
    x = noise()
    with captured(be, step, x) as cap:
        for n in (2, 3, 5, 3, 2):
            check(cap, step, x, n=n)


# Stale packets.


def test_stale_executable_is_detected_by_its_first_replay_and_refused():
    with on_fake() as be:
        x = noise()
        graph, out = recorded(be, step, x)
        graph.replay()
        assert torch.equal(out, step(x, n=2))
        with be.fake.with_settings(stale=-1):
            graph.update(n=3)
        with pytest.raises(dg.UpdateError, match=r"recording 1 instead of 2|0 instead of 2"):
            graph.replay()
        assert graph.state == "dirty"
        with pytest.raises(dg.StateError, match="reset"):
            graph.replay()
        graph.reset()


@pytest.mark.parametrize("replayed", [False, True])
def test_verification_that_was_interrupted_is_made_by_the_next_replay(
    replayed: bool, monkeypatch: pytest.MonkeyPatch
):
    def interrupt() -> torch.Tensor:
        raise KeyboardInterrupt

    with on_fake() as be:
        graph, _ = recorded(be, step, noise())
        if replayed:
            graph.replay()
        with be.fake.with_settings(stale=-1):
            graph.update(n=3)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(graph.pool, "make_word", interrupt)
            graph.replay()
        assert graph.state == "ready"
        with pytest.raises(dg.UpdateError, match="parameters of an earlier one"):
            graph.replay()


def test_first_launch_that_was_interrupted_leaves_its_verification_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
):
    find = nodegraph.NodeGraph._find_random

    def interrupted(self: Any) -> None:
        find(self)
        raise KeyboardInterrupt

    with on_fake() as be:
        graph, _ = recorded(be, step, noise())
        with be.fake.with_settings(stale=-1):
            graph.update(n=3)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(nodegraph.NodeGraph, "_find_random", interrupted)
            graph.replay()
        with pytest.raises(dg.UpdateError, match="parameters of an earlier one"):
            graph.replay()


def test_executable_at_the_address_of_one_that_is_gone_is_verified(
    monkeypatch: pytest.MonkeyPatch,
):
    with on_fake() as be:
        x = noise()
        graph, out = recorded(be, step, x)
        graph.replay()
        for n in (3, 2, 3, 2, 3):  # until the keys have executables
            graph.update(n=n)
            graph.replay()
            assert torch.equal(out, step(x, n=n))
        recording = graph._current
        address = recording.executable
        assert address
        monkeypatch.setattr(be.runtime, "destroy_executable", lambda executable: None)
        monkeypatch.setattr(be.runtime, "instantiate", lambda made: address)
        recording.shrink()
        monkeypatch.setattr(type(graph), "_deserves_executable", lambda self, recording: True)
        graph.update(n=2)
        graph.replay()
        graph.update(n=3)
        assert recording.executable == address
        looked: list[int] = []
        word = graph.pool.make_word()
        monkeypatch.setattr(graph.pool, "make_word", lambda: looked.append(1) or word)
        graph.replay()
        assert looked
        assert torch.equal(out, step(x, n=3))


@pytest.mark.parametrize("launched", [True, False])
def test_executable_that_was_made_anew_is_verified_again(
    launched: bool, monkeypatch: pytest.MonkeyPatch
):
    with on_fake() as be:
        x = noise()
        graph, out = recorded(be, step, x)
        graph.replay()
        monkeypatch.setattr(type(graph), "_deserves_executable", lambda self, recording: False)
        for n in (3, 5, 3, 5):
            graph.update(n=n)
            graph.replay()
            assert torch.equal(out, step(x, n=n))
        # The next write makes it anew, and only that one.
        monkeypatch.setattr(rocm_graph, "LEAK_BUDGET_BYTES", graph.leaked_bytes)
        before = graph.leaked_bytes
        with be.fake.with_settings(stale=-1):
            graph.update(n=3)
            assert graph.leaked_bytes < before
            if not launched:
                graph.update(n=5)
        with pytest.raises(dg.UpdateError, match="parameters of an earlier one"):
            graph.replay()


def test_runtime_that_was_found_stale_writes_into_no_executable_again():
    with on_fake() as be:
        x = noise()
        graph, _ = recorded(be, step, x)
        graph.replay()
        with be.fake.with_settings(stale=-1):
            graph.update(n=3)
        with pytest.raises(dg.UpdateError, match="executable of its own"):
            graph.replay()
        be.fake.set(stale=-1)  # it would be wrong again
        before = be.fake.get("writes")
        with captured(be, step, x) as cap:
            for n in (2, 3, 5, 3, 2, 7):
                check(cap, step, x, n=n)
            assert cap.stats()["copies"] == 0
        assert be.fake.get("writes") == before


def test_runtime_that_never_updates_is_found_out_before_the_first_capture():
    with on_fake(stale=-1) as be:
        x = noise()
        with captured(be, step, x) as cap:
            assert be.find_out().updates is False
            probing = be.fake.get("writes")
            for n in (2, 3, 5, 3, 2):
                check(cap, step, x, n=n)
        assert be.fake.get("writes") == probing


def test_graph_that_draws_random_numbers_is_copied_where_executables_cannot_be_updated():
    """Only torch's executable may run it, and that one cannot take the parameters."""

    def noisy(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return scaled(x, n=n) + torch.rand(4, 8)

    with on_fake(stale=-1) as be:
        x = noise()
        graph, _ = recorded(be, noisy, x)
        graph.replay()
        with pytest.raises(dg.UpdateTopologyError, match="draw random numbers outside"):
            graph.update(n=3)
        assert graph.state == "ready"
        graph.replay()


def test_executable_that_still_holds_its_capture_is_not_taken_for_stale():
    """Keys that need another kernel get executables of their own, and nothing is written."""

    @dg.region(host_args=("n",))
    def switching(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x * n if n < 10 else x + n

    with on_fake() as be:
        x = noise()
        with captured(be, switching, x) as cap:
            check(cap, switching, x, n=2)
            before = be.fake.get("writes")
            for n in (12, 13, 2, 12, 2):
                check(cap, switching, x, n=n)
            assert be.fake.get("writes") == before
            for n in (3, 2, 12, 2, 3):
                check(cap, switching, x, n=n)
            assert be.fake.get("writes") > before
            assert cap.stats()["copies"] == 0


def test_one_stale_packet_is_found_by_prove():
    """The word behind the regions tells of executables; a single node takes a comparison."""
    with on_fake() as be:
        x = noise()
        with captured(be, step, x) as cap:
            check(cap, step, x, n=2)
            be.fake.set(stale=1)
            report = cap.prove(host_args=[{"n": 3}])
            assert not report.ok
            assert "n" in str(report.failures[0])


# Leaks.


def test_executable_is_made_anew_before_updates_have_leaked_their_budget(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(nodegraph, "_USES_WHEN_FULL", 10**6)
    with on_fake() as be:
        x = noise()
        pool = be.make_pool()
        cap = captured(be, step, x, pool=pool)
        graph = cap.segments[0]
        for n in (2, 3):
            check(cap, step, x, n=n)
        pool.recordings.budget_bytes = pool.recordings.bytes  # no room for executables
        limit = LEAK_BUDGET_BYTES // LEAKED_BYTES_PER_NODE
        each = be.fake.get("leaked_slots")
        assert 0 < each < limit
        made, most = be.fake.get("instantiated"), 0
        turns = 4 * limit // each
        for turn in range(turns):
            cap.replay(n=2 + turn % 2)
            most = max(most, be.fake.get("leaked_slots"))
            assert graph.leaked_bytes <= LEAK_BUDGET_BYTES
        assert most <= limit
        assert 3 <= be.fake.get("instantiated") - made <= 8
        for n in (2, 3, 2):
            check(cap, step, x, n=n)
        cap.close()


def test_everything_is_given_back_when_captures_close():
    with on_fake() as be:
        x = noise()
        kept_alive = be.make_pool()
        captured(be, step, x, pool=kept_alive).close()
        gc.collect()
        graphs, executables = be.fake.get("live_graphs"), be.fake.get("live_execs")
        for _ in range(5):
            with captured(be, step, x, pool=kept_alive) as cap:
                for n in (2, 3, 5, 3, 5, 2):
                    cap.replay(n=n)
                assert be.fake.get("live_execs") > executables
            del cap
        gc.collect()
        assert be.fake.get("live_graphs") == graphs
        assert be.fake.get("live_execs") == executables


# Parameter memory.


def test_borrowed_parameters_live_as_long_as_what_launches_them():
    """Release 6.3.1 kept the caller's pointers; the fake poisons what is destroyed."""
    with on_fake(borrow=1) as be:
        x = noise()
        pool = be.make_pool()
        with captured(be, step, x, pool=pool) as cap:
            for n in (2, 3, 5, 3, 5, 7, 2, 9):
                check(cap, step, x, n=n)
                gc.collect()
            pool.recordings.budget_bytes = 1  # every recording but the one in use goes
            for n in (11, 3, 5, 5, 2, 3, 9, 9, 3):
                check(cap, step, x, n=n)
                gc.collect()
            assert pool.recordings.evictions > 0


# Writes and executables that are refused.


@pytest.mark.parametrize("at", [1, 2, 4])
def test_write_that_is_refused_raises_its_error_and_makes_the_graph_dirty(at: int):
    with on_fake() as be:
        x = noise()
        graph, _ = recorded(be, step, x)
        graph.replay()
        be.fake.set(refuse_write_at=at)
        with pytest.raises(RuntimeCallError, match=r"hipGraphExec\w+ failed \(2: hipErrorOut"):
            graph.update(n=3)
        assert graph.state == "dirty"
        graph.reset()
        assert_usable(be)


def test_executable_that_is_refused_is_done_without():
    with on_fake() as be:
        x = noise()
        with captured(be, step, x) as cap:
            for n in (2, 3, 5):
                check(cap, step, x, n=n)
            be.fake.set(refuse_instantiate=1)
            for n in (3, 5, 3):
                check(cap, step, x, n=n)  # by an update
        assert_usable(be)


# Unsafe calls.


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "nonzero": torch.nonzero,
    "bool": lambda x: bool((x > 0).any()),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "mask": lambda x: x[x > 0],
    "mask of rows": lambda x: x[x[:, 0] > 0].sum(),
    "mask of columns": lambda x: x[:, x[0] > 0],
    "mask of bytes": lambda x: x[(x > 0).byte()],
    "assignment under a mask": lambda x: x.index_put_((x > 0,), x[0, 0]),
    "assignment under a mask elsewhere": lambda x: x.index_put((x > 0,), x[0, 0]),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, (x[:, 0] > 0).long() + 1, dim=0),
    "bincount": lambda x: torch.bincount((x[:, 0] > 0).long()),
    "histc": lambda x: torch.histc(x, 4),
    "unique": torch.unique,
    "old unique": torch._unique,
    "unique rows": lambda x: torch.unique(x, dim=0),
    "unique neighbours": torch.unique_consecutive,
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "where": lambda x: torch.where(x > 0),
    "one_hot": lambda x: torch.nn.functional.one_hot((x > 0).long()),
    "errors of linalg": lambda x: torch.linalg.inv(x[:, :4]),
    "sparse": lambda x: x.to_sparse(),
    "host": lambda x: x.to("cpu", torch.float64),
}
READING = pytest.mark.parametrize("read", READS.values(), ids=READS)


@READING
@pytest.mark.parametrize("inside", ["body", "region"])
def test_host_read_that_the_runtime_lets_pass_is_refused_with_its_line(
    inside: str, read: Callable[[torch.Tensor], Any]
):
    @dg.region(host_args=("n",))
    def reading(x: torch.Tensor, *, n: int) -> torch.Tensor:
        if inside == "region":
            read(x)
        return x * n

    def body(x: torch.Tensor, *, n: int) -> torch.Tensor:
        y = x + 1
        if inside == "body":
            read(y)
        return reading(y, n=n)

    with on_fake(version=HIP_72, quiet=1) as be:
        graph = be.make_graph()
        with (
            pytest.raises(dg.HostReadError, match=r"test_faults\.py:\d+"),
            be.capture_context(graph, host_args={"n": 2}),
        ):
            body(noise(), n=2)
        assert graph.state == "empty"
        assert_usable(be)


@READING
def test_host_read_under_inference_mode_is_refused(read: Callable[[torch.Tensor], Any]):
    """Operations that torch makes of others reach a dispatch mode whole there."""
    with torch.inference_mode(), on_fake(version=HIP_72, quiet=1) as be:
        x, graph = noise(), be.make_graph()
        with pytest.raises(dg.HostReadError), be.capture_context(graph):
            read(x)
        assert graph.state == "empty"


NO_READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "numbers as indices": lambda x: x[(x[:, 0] > 0).long()],
    "list as index": lambda x: x[[0, 2]],
    "assignment at numbers": lambda x: x.clone().index_put_(((x[:, 0] > 0).long(),), x[0]),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.0),
    "where of two": lambda x: torch.where(x > 0, x, -x),
    "repeat_interleave of a known size": lambda x: torch.repeat_interleave(
        x, torch.full((4,), 2) + (x[:, 0] > 99), dim=0, output_size=8
    ),
    "repeat_interleave by a number": lambda x: torch.repeat_interleave(x, 2, dim=0),
    "histc with bounds": lambda x: torch.histc(x, 4, -1.0, 1.0),
    "linear": lambda x: torch.nn.functional.linear(x, x),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("fn", NO_READS.values(), ids=NO_READS)
def test_operation_that_reads_nothing_on_the_host_is_captured(
    fn: Callable[[torch.Tensor], torch.Tensor], inference: bool
):
    with torch.inference_mode(inference), on_fake(version=HIP_72, quiet=1) as be:
        x = noise()
        with dg.capture(fn, x, backend=be) as cap:
            check(cap, fn, x)


def test_value_of_the_host_under_one_mask_is_a_fill_and_no_read():
    """As torch does it: ``x[x > 0] = 1.0``, whose value stays on the host."""
    x = noise()
    want = x.masked_fill(x > 0, 1.0)
    guard = HostReadGuard(lambda tensor: tensor.dim() > 0)
    guard.on = True
    with guard:
        x[x > 0] = 1.0
        with pytest.raises(dg.HostReadError):
            x.index_put_((x > 0,), torch.tensor(1.0), accumulate=True)
        with pytest.raises(dg.HostReadError):
            x.index_put_((x > 0,), torch.ones(1))
    assert torch.equal(x, want)


def test_eager_body_of_a_break_may_read_on_the_host():
    @dg.no_graph
    def shrink(x: torch.Tensor) -> torch.Tensor:
        return x * (0.5 if x.sum().item() > 0 else 0.25)

    def broken(x: torch.Tensor) -> torch.Tensor:
        return shrink(x + 1) * 3

    with on_fake(version=HIP_72, quiet=1) as be:
        x = noise()
        with dg.capture(broken, x, backend=be, policy="breakable") as cap:
            for sign in (1, -1, 1):
                x.copy_(torch.full((4, 8), 5.0 * sign))
                assert torch.equal(cap.replay(), broken(x))


def test_runtime_that_reports_unsafe_calls_needs_no_guard():
    with on_fake(version=HIP_714, quiet=0) as be:
        graph = be.make_graph()
        with (
            pytest.raises(RuntimeError, match="hipErrorStreamCaptureUnsupported"),
            be.capture_context(graph),
        ):
            (noise() + 1).sum().item()
        assert graph.state == "empty"
        assert be.capabilities.concurrent_threads
        assert_usable(be)


def test_synchronisation_that_the_runtime_lets_pass_leaves_the_graph_right():
    with on_fake(version=HIP_72, quiet=1) as be:
        x = noise()

        def impatient(x: torch.Tensor, *, n: int) -> torch.Tensor:
            y = scaled(x, n=n)
            if be.namespace.is_current_stream_capturing():
                be.namespace.synchronize()
            return y + 1

        with captured(be, impatient, x) as cap:
            for n in (2, 3, 2):
                check(cap, impatient, x, n=n)
        assert not be.capabilities.concurrent_threads


def test_threads_beside_a_capture_work_where_the_runtime_reports_unsafe_calls():
    with on_fake(version=HIP_714, quiet=0) as be:
        x, other = noise(), noise()
        seen: list[torch.Tensor] = []
        with captured(be, step, other) as cap:
            check(cap, step, other, n=3)  # to record it would wait for the capture below

            def work() -> None:
                seen.extend([cap.replay(n=3).clone(), step(other, n=3)])

            graph = be.make_graph()
            with be.capture_context(graph, host_args={"n": 2}):
                out = step(x, n=2)
                thread = threading.Thread(target=work, daemon=True)
                thread.start()
                thread.join(20)
            assert len(seen) == 2
            assert torch.equal(*seen)
        x.copy_(noise())
        graph.replay()
        assert torch.equal(out, step(x, n=2))


# Captures that cannot be ended.


def fork_and_forget(be: Any, x: torch.Tensor) -> torch.Tensor:
    side = be.namespace.Stream()
    side.wait_stream(be.namespace.current_stream())
    with be.namespace.stream(side):
        return x * 2


@pytest.mark.parametrize("raising", [False, True], ids=["alone", "with an error"])
def test_capture_with_an_unjoined_fork_is_ended_once_and_its_stream_retired(raising: bool):
    with on_fake() as be:
        pool = be.make_pool()
        stuck = pool.stream
        graph = be.make_graph(pool)
        expected: Any = ZeroDivisionError if raising else dg.UnjoinedStreamError
        with pytest.raises(expected), be.capture_context(graph):
            fork_and_forget(be, noise() + 1)
            if raising:
                raise ZeroDivisionError
        assert graph.state == "empty"
        assert stuck.cuda_stream in be.retired
        assert pool.stream != stuck
        assert be.fake.get("second_ends") == 0
        x = noise()
        for _ in range(40):  # torch hands out the retired stream again; nobody takes it
            with dg.capture(lambda x: x * 2, x, backend=be) as cap:
                assert torch.equal(cap.replay(), x * 2)
                assert cap.pool.stream != stuck
        with captured(be, step, x, pool=pool) as cap:
            for n in (2, 3, 5):
                check(cap, step, x, n=n)


def test_region_that_forks_and_forgets_is_refused():
    with on_fake() as be:

        @dg.region(host_args=("n",))
        def loose(x: torch.Tensor, *, n: int) -> torch.Tensor:
            return fork_and_forget(be, x) * n

        with pytest.raises(dg.CaptureError):
            captured(be, lambda x, *, n: loose(x, n=n), noise(), warmup=0)
        assert_usable(be)


def test_region_that_forgets_to_join_for_a_new_value_is_refused_and_its_stream_retired():
    """FAULTS 15."""
    with on_fake() as be:

        @dg.region(host_args=("n",))
        def loose(x: torch.Tensor, *, n: int) -> torch.Tensor:
            return (fork_and_forget(be, x) if n > 3 else x * 2) * n

        def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
            return loose(x, n=n)

        x = noise()
        with captured(be, step, x) as cap:
            for n in (2, 3, 5, 2, 4, 3):
                if n <= 3:
                    check(cap, step, x, n=n)
                    continue
                stuck = cap.pool.stream
                with pytest.raises(dg.UpdateError, match="must join every stream"):
                    cap.replay(n=n)
                assert stuck.cuda_stream in be.retired
                assert cap.pool.stream != stuck
        assert_usable(be)


def test_process_whose_streams_are_all_stuck_says_so():
    with on_fake() as be:
        be.retired.update(stream.cuda_stream for stream in be.namespace._streams)
        with pytest.raises(dg.BackendUnavailableError, match="start a new process"):
            be.make_pool().stream  # noqa: B018


# Old runtimes.


def test_release_without_attributes_still_updates():
    with on_fake("release52", version=HIP_52) as be:
        assert be.runtime.missing == {"hipGraphKernelNodeCopyAttributes"}
        assert_usable(be)


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
        assert be.runtime.version.first_kind == first
        x = noise()
        graph, _ = recorded(be, three, x)
        kinds = [be.runtime.kind(node) for node in be.runtime.nodes(graph._native.raw_cuda_graph())]
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
        with pytest.raises(dg.UpdateTopologyError, match=r"is copied as well.*'breakable'"):
            captured(be, step, x)  # its region returns a tensor
        with captured(be, step, x, policy="breakable", budget=None) as cap:
            for n in (2, 3):
                check(cap, step, x, n=n)
        with captured(be, kernels, x) as cap:
            for n in (2, 3, 5, 3):
                check(cap, kernels, x, n=n)


def test_runtime_that_lists_nodes_in_another_order_is_refused():
    with on_fake(shuffle=1) as be:
        with pytest.raises(dg.CaptureError, match="another order"):
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

        with pytest.raises(dg.UpdateError, match="calling holds a host node"):
            captured(be, lambda x, *, n: calling(x, n=n), noise())
        assert_usable(be)


# Other things.


def test_capture_in_another_thread_is_recorded():
    with on_fake() as be:
        x, found = noise(), []

        def work() -> None:
            with captured(be, step, x) as cap:
                found.append(torch.equal(cap.replay(n=3), step(x, n=3)))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert found == [True]


def test_sticky_errors_mean_that_the_device_is_lost():
    with on_fake() as be:
        lost = RuntimeCallError("hipGraphLaunch failed (719: hipErrorLaunchFailure, x)", 719)
        assert be.lost_reason(lost) == "hipGraphLaunch failed (719: hipErrorLaunchFailure, x)"
        assert be.lost_reason(RuntimeCallError("out of memory", 2)) is None
        assert be.lost_reason(ValueError("no code")) is None
