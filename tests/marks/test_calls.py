"""Calls of marked functions that run again: which tensors they may touch."""

from __future__ import annotations

import functools
import queue
import threading
import time
import warnings
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.api.marks import calls


def captured_ambient(state: dict[str, Any], context: Any) -> tuple[dg.Captured, Any]:
    @dg.region(context=context, mutates=("out",))
    def read(x: torch.Tensor, out: torch.Tensor, *, context: Any) -> None:
        out.copy_(x + state["table"])

    def step(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        read(x * 2, out)
        return out * 3

    x = torch.randn(4)
    return dg.capture(step, x, torch.zeros(4), backend="cpu"), x


def test_recording_that_touches_a_tensor_the_capture_did_not_is_refused() -> None:
    first, state = torch.randn(4), {"step": 0}
    state["table"] = first
    cap, x = captured_ambient(state, lambda: state["step"])
    state["step"] = 1
    assert torch.equal(cap.replay(), (x * 2 + first) * 3)
    state.update(step=2, table=torch.randn(4))
    with pytest.raises(dg.RegionError, match=r"used a tensor that the capture did not.*x \+ stat"):
        cap.replay()
    state["table"] = first
    assert torch.equal(cap.replay(), (x * 2 + first) * 3)


def test_recording_may_touch_a_tensor_whose_address_is_in_the_key() -> None:
    tables = [torch.randn(9), torch.randn(9)[5:], torch.randn(4)]
    tables[0] = tables[0][1:5]
    state = {"table": tables[0]}
    cap, x = captured_ambient(state, lambda: (7, state["table"].data_ptr()))
    for index in (0, 1, 2, 1, 0):
        state["table"] = tables[index]
        x.copy_(torch.randn(4))
        assert torch.equal(cap.replay(), (x * 2 + tables[index]) * 3)


def test_recording_may_touch_what_is_bound_though_the_capture_did_not() -> None:
    @dg.region(host_args=("n",))
    def pick(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x + pages[n]

    x, pages = torch.randn(4), [torch.randn(4), torch.randn(4)]
    step = lambda x, pages, *, n: pick(x, n=n) * 2  # noqa: E731
    cap = dg.capture(step, x, pages, backend="cpu", host_args={"n": 0})
    assert torch.equal(cap.replay(n=1), (x + pages[1]) * 2)
    slot = dg.InputSlot("x", ("requests", 4), torch.float32, pad=dg.Pad.zero())
    with dg.DecodeRunner(
        lambda batch: pick(batch.x, n=batch.host.n) * 2,
        [slot],
        host_args={"n": 0},
        bound={"first": pages[0], "second": pages[1]},
        max_requests=1,
        backend="cpu",
        strict=True,
    ) as runner:
        runner.capture()
        got = runner.run({"x": x[None]}, host_args={"n": 1})
        assert torch.equal(got, (x[None] + pages[1]) * 2)


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_results_without_elements_share_no_memory(policy: str) -> None:
    """They have no address: memory for them and the other was asked for from address 0 on."""

    @dg.region(host_args=("n",))
    def split(x: torch.Tensor, *, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = x * n
        return out[:0], out

    x = torch.randn(4)
    fn = lambda x, *, n: split(x, n=n)  # noqa: E731
    with dg.capture(fn, x, policy=policy, backend="cpu", host_args={"n": 2}) as cap:
        for n in (3, 2):
            empty, out = cap.replay(n=n)
            assert empty.shape == (0,)
            assert torch.equal(out, x * n)


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_tensor_that_a_region_returns_twice_stays_one(policy: str) -> None:
    """FAULTS 41, 42. A change of layout in place is seen through both names."""

    @dg.region(host_args=("n",))
    def twice(x: torch.Tensor, *, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = x + n
        return out, out

    def fn(x: torch.Tensor, *, n: int) -> torch.Tensor:
        one, other = twice(x, n=n)
        other.t_()
        return one * 2

    x = torch.randn(2, 3)
    with dg.capture(fn, x, policy=policy, backend="cpu", host_args={"n": 1}) as cap:
        for n in (3, 1):
            x.copy_(torch.randn(2, 3))
            assert torch.equal(cap.replay(n=n), fn(x, n=n))


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_result_of_a_region_stays_conjugated(policy: str) -> None:
    # Kernels that resolve it first sum its rows in another order than those of a plain tensor.
    @dg.region(host_args=("gain",))
    def turned(x: torch.Tensor, *, gain: float) -> torch.Tensor:
        return (x * complex(0, gain)).conj()

    def step(x: torch.Tensor, *, gain: float) -> tuple[torch.Tensor, torch.Tensor]:
        y = turned(x, gain=gain)
        return y, y[:, :5].sum()

    x = torch.randn(2, 8, dtype=torch.complex64)
    with dg.capture(step, x, host_args={"gain": 1.0}, policy=policy, backend="cpu") as captured:
        for _ in range(20):
            x.copy_(torch.randn(2, 8, dtype=torch.complex64))
            y, total = captured.replay(gain=2.5)
            assert y.is_conj()
            assert torch.equal(total, step(x, gain=2.5)[1])


@pytest.mark.parametrize("policy", ["full", "breakable"])
@pytest.mark.parametrize("place", ["list", "attribute", "global"])
def test_result_that_is_also_stored_is_refused(policy: str, place: str) -> None:
    """FAULTS 41."""
    stored: list[torch.Tensor] = []

    class Holder:
        pass

    holder: Any = Holder()

    @dg.region(host_args=("n",))
    def body(x: torch.Tensor, *, n: int) -> torch.Tensor:
        out = x * n
        if place == "list":
            stored.append(out)
        elif place == "attribute":
            holder.last = out
        else:
            globals()["_last"] = out
            _ = _last  # noqa: F821
        return out[1:]

    fn = lambda x, *, n: body(x, n=n) + 1  # noqa: E731
    # The watch over the state of a step may refuse the assignment first.
    refusals = dg.RegionError, dg.CaptureError
    with pytest.raises(refusals, match=r"return a clone\(\)|with copy_\(\)"):
        dg.capture(fn, torch.randn(4), policy=policy, backend="cpu", host_args={"n": 2})


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_result_in_memory_that_a_cache_hides_is_refused(policy: str) -> None:
    """FAULTS 41."""
    state = functools.cache(lambda: torch.zeros(4))
    state()  # The capture refuses state that the first run makes.

    @dg.region(host_args=("n",))
    def body(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return state().add_(n)

    fn = lambda x, *, n: body(x, n=n) + x  # noqa: E731
    with pytest.raises(dg.RegionError, match=r"return a clone\(\)"):
        dg.capture(fn, torch.randn(4), policy=policy, backend="cpu", host_args={"n": 2})


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_result_that_a_traceback_holds_in_a_cycle_is_not_stored(policy: str) -> None:
    @dg.region(host_args=("n",))
    def body(x: torch.Tensor, *, n: int) -> torch.Tensor:
        y = x * n
        try:
            raise ValueError
        except ValueError as error:
            kept = [error]  # error -> traceback -> frame -> kept
            kept.append(kept)  # type: ignore[arg-type]
        return y

    def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return body(x, n=n) + 1

    x = torch.ones(3)
    captured = dg.capture(step, x, backend="cpu", policy=policy, host_args={"n": 2})
    for n in (3, 2, 5):
        assert torch.equal(captured.replay(n=n), step(x, n=n))


@pytest.mark.parametrize("released", [True, False])
def test_result_that_another_thread_holds_for_a_moment_is_not_stored(
    released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread of gloo holds the tensors of a collective after the collective has returned."""
    monkeypatch.setattr(calls, "_RELEASE_S", 10.0 if released else 0.1)
    sent: queue.Queue[torch.Tensor | None] = queue.Queue()

    def work() -> None:
        while True:
            x = sent.get()
            sent.task_done()
            if x is None:
                return
            if released:
                time.sleep(0.2)
                del x  # otherwise held until the next item

    @dg.no_graph
    def body(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        sent.put(y)
        sent.join()
        return y

    def step(x: torch.Tensor) -> torch.Tensor:
        return body(x * 2) + 1

    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise AssertionError("user code sees a query of devgraph")

    others = [torch.ones(3).as_subclass(Refusing), torch.ones(3).to_sparse()]
    thread = threading.Thread(target=work)
    thread.start()
    x = torch.ones(3)
    try:
        if released:
            with dg.capture(step, x, backend="cpu", policy="breakable") as captured:
                assert captured.replay().tolist() == [3, 3, 3]
        else:
            with pytest.raises(dg.RegionError, match=r"return a clone\(\)"):
                dg.capture(step, x, backend="cpu", policy="breakable")
    finally:
        sent.put(None)
        thread.join()
    assert len(others) == 2


@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_parameter_that_a_region_returns_stays_itself(policy: str) -> None:
    module = torch.nn.Linear(3, 3)

    @dg.region(host_args=("n",))
    def weight(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return module.weight.detach()

    fn = lambda x, *, n: (x @ weight(x, n=n)) * 2  # noqa: E731
    x = torch.randn(2, 3)
    with dg.capture(fn, x, policy=policy, backend="cpu", host_args={"n": 1}) as captured:
        for n in (2, 1):
            with torch.no_grad():
                module.weight.normal_()
            assert torch.equal(captured.replay(n=n), fn(x, n=n))


def test_changed_number_in_a_result_is_refused_with_a_remedy() -> None:
    @dg.no_graph
    def largest(x: torch.Tensor) -> int:
        return int(x.argmax())

    x = torch.tensor([0.0, 2.0, 1.0])
    captured = dg.capture(lambda x: x * largest(x), x, backend="cpu", policy="breakable")
    with pytest.raises(dg.RegionError, match=r"returned 2; .* returned 1\..*values as tensors"):
        captured(torch.tensor([0.0, 1.0, 2.0]))


def test_view_of_another_size_is_refused_with_both_sizes() -> None:
    @dg.region(host_args=("n",))
    def head(x: torch.Tensor, *, n: int) -> torch.Tensor:
        return x[:n]

    x, fn = torch.randn(8, 4), lambda x, *, n: head(x, n=n)
    captured = dg.capture(fn, x, backend="cpu", host_args={"n": 2})
    with pytest.raises(dg.RegionError, match=r"returned .*\(3, 4\).* at capture .*\(2, 4\)"):
        captured.replay(n=3)


def test_container_without_tensors_is_passed_as_it_is() -> None:
    notes: list[int] = []
    options = {"gain": 2.0}

    @dg.no_graph
    def scaled(x: torch.Tensor, notes: list[int], options: dict[str, float]) -> torch.Tensor:
        notes.append(len(notes))
        return x * options["gain"]

    x = torch.ones(3)
    captured = dg.capture(
        lambda x: scaled(x, notes, options) + 1, x, policy="breakable", backend="cpu"
    )
    before = len(notes)
    assert captured.replay().tolist() == [3, 3, 3] and len(notes) == before + 1
    options["gain"] = 5.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dg.DeviceGraphWarning)  # The capture may be made again.
        assert captured.replay().tolist() == [6, 6, 6]


def test_tensor_that_a_body_adds_to_a_container_is_refused() -> None:
    outputs: list[torch.Tensor] = []

    @dg.no_graph
    def kept(x: torch.Tensor, outputs: list[torch.Tensor]) -> None:
        outputs.append(x.clone())

    with pytest.raises(dg.CaptureError, match="replaces a tensor in a container .* closure"):
        dg.capture(
            lambda x: (kept(x * 2, outputs), x + 1)[1],
            torch.ones(3),
            policy="breakable",
            backend="cpu",
        )
