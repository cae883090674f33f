"""Recording: nothing executes, memory is reused like a device's, foreign work is refused."""

from __future__ import annotations

import contextlib
import contextvars
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import devgraph as dg
from devgraph.api.errors import CaptureError
from devgraph.cpu.memory import BlockPool
from devgraph.cpu.recorder import Recorder
from tests.support.cpu_capture import METADATA, check_replays, record, same, span, tensors

torch.set_num_threads(1)


def test_capture_executes_nothing_and_poisons_outputs() -> None:
    x = torch.randn(4, 4)
    state = torch.zeros(4, 4)

    def step() -> tuple[torch.Tensor, ...]:
        state.add_(x)
        return x @ x, (x * 2).to(torch.int64), x > 0, state

    before = x.clone()
    tape, (product, doubled, positive, returned) = record(step)
    assert torch.equal(x, before) and not state.any() and returned is state
    assert product.isnan().all() and positive.all()
    assert (doubled > torch.iinfo(torch.int64).max // 4).all()
    tape.replay()
    assert same(product, x @ x) and same(doubled, (x * 2).long()) and same(state, x)


def test_replay_sees_what_tensors_hold_then() -> None:
    x, weight = torch.randn(2, 4), torch.nn.Linear(4, 4)
    with torch.inference_mode():
        tape, out = record(lambda: weight(x))
    for _ in range(2):
        with torch.no_grad():
            x.copy_(torch.randn(2, 4))
            weight.weight.mul_(1.5)
            tape.replay()
            assert same(out, weight(x))


def test_temporaries_share_blocks_within_a_capture() -> None:
    pool = BlockPool()
    x = torch.randn(256, 256)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(100):
            x = torch.tanh(x) + 0.1
        return x

    tape, out = record(chain, x, pool=pool)
    tape.replay()
    assert pool.reserved_bytes <= 8 * x.nbytes
    assert same(out, chain(x))


def test_graphs_of_one_pool_share_memory_and_stay_right_in_any_order() -> None:
    pool = BlockPool()
    weight = torch.randn(64, 64)

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = F.silu(x @ weight) + x
        return x.sum(-1)

    inputs = [torch.randn(rows, 64) for rows in (16384, 8192, 2048, 8)]
    captured = [record(chain, x, pool=pool) for x in inputs]
    one = BlockPool()
    largest = record(chain, inputs[0], pool=one)
    outputs = sum(out.nbytes for _, out in captured)
    assert pool.reserved_bytes <= 1.2 * one.reserved_bytes + outputs and largest
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)):
        for index in order:
            inputs[index].copy_(torch.randn_like(inputs[index]))
            captured[index][0].replay()
            assert same(captured[index][1], chain(inputs[index]))


def test_pool_tensor_of_an_earlier_capture_is_not_owned_by_a_later_one() -> None:
    pool = BlockPool()
    x = torch.randn(8, 8)
    first, middle = record(lambda: x * 2, pool=pool)
    second, out = record(lambda x: x + 1, middle, pool=pool)
    first.replay()
    second.replay()
    assert same(out, x * 2 + 1)
    address = middle.data_ptr()
    del middle
    _, other = record(lambda: x * 3, pool=pool)
    assert other.data_ptr() == address, "the second tape kept the block of a tensor it only read"


def test_outputs_keep_their_memory_when_all_else_is_gone() -> None:
    pool = BlockPool()
    x = torch.randn(8, 8)
    tape, out = record(lambda: x * 2, pool=pool)
    tape.replay()
    expected = out.clone()
    tape.close()
    del tape, pool
    gc.collect()
    junk = [torch.zeros(8, 8) for _ in range(20)]
    assert same(out, expected) and len(junk) == 20


def test_memory_is_flat_over_captures_and_replays() -> None:
    pool = BlockPool()
    x = torch.randn(32, 32)

    def step(x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(torch.cat([x, x]) @ x, (32,)).softmax(-1)

    sizes = []
    entries = None
    for _ in range(100):
        tape, out = record(step, x, pool=pool)
        tape.replay()
        entries = weakref.ref(tape)
        tape.close()
        del tape, out
        sizes.append(pool.reserved_bytes)
    assert set(sizes) == {0} and entries() is None
    known = len(METADATA._known)
    record(step, x)
    assert len(METADATA._known) == known


def test_inference_tensor_is_returned_under_inference_mode_only() -> None:
    x = torch.randn(3)
    with torch.inference_mode():
        _, inside = record(lambda: x + 1)
    _, outside = record(lambda: x + 1)
    assert inside.is_inference() and not outside.is_inference()
    outside.add_(1)


def test_captured_under_inference_mode_and_replayed_outside() -> None:
    x = torch.randn(3)
    cache = torch.zeros(3)
    with torch.inference_mode():
        tape, out = record(lambda: cache.add_(x) * 2)
    tape.replay()
    assert same(out, x * 2)


def test_other_threads_are_not_recorded() -> None:
    results: list[torch.Tensor] = []
    with Recorder(BlockPool(), metadata=METADATA) as recorder:
        thread = threading.Thread(target=lambda: results.append(torch.ones(3).sum()))
        thread.start()
        thread.join()
        mine = torch.ones(3)
    assert results[0].item() == 3 and mine.isnan().all()
    assert [op.name for op in recorder.tape().ops] == ["aten::ones"]


def test_two_threads_record_at_once() -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for _ in range(5):
                check_replays(
                    lambda x: F.softmax(x @ x.t(), -1).sum(0),
                    lambda n: [
                        torch.randn(seed + 2, 5, generator=torch.Generator().manual_seed(n))
                    ],
                    draws=False,
                )
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def test_operations_carry_names_and_lines() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        return F.linear(y, x)

    with torch.inference_mode():
        tape, _ = record(step, torch.randn(3, 3))
    first = step.__code__.co_firstlineno
    assert [(op.name, op.line.line - first) for op in tape.ops] == [
        ("aten::mul.Tensor", 1),
        ("aten::mm", 2),
    ]
    assert all(op.line.file == __file__ and op.line.function == "step" for op in tape.ops)
    assert "y = x * 2" in str(tape.ops[0])


def test_views_cost_no_entry() -> None:
    x = torch.randn(2, 6, 4)
    tape, _ = record(lambda: x.transpose(0, 1).view(6, 2, 2, 2)[1:].permute(1, 0, 2, 3).unbind(0))
    assert len(tape) == 0


def test_outputs_may_be_written_and_are_overwritten_by_the_next_replay() -> None:
    x = torch.randn(3)
    tape, out = record(lambda: x * 2)
    tape.replay()
    out.zero_()
    tape.replay()
    assert same(out, x * 2)


def test_output_fed_back_as_input() -> None:
    x = torch.randn(3)
    tape, out = record(lambda: x * 2 + 1)
    expected = x.clone()
    for _ in range(3):
        tape.replay()
        x.copy_(out)
        expected = expected * 2 + 1
    assert same(x, expected)


def test_buffer_donated_by_set_is_followed() -> None:
    x, y = torch.randn(3), torch.randn(3)

    def step() -> torch.Tensor:
        handle = torch.empty(3)
        handle.set_(y)
        return handle + x

    tape, out = record(step)
    tape.replay()
    assert same(out, x + y)


def test_meta_tensors_pass_through() -> None:
    tape, outs = record(
        lambda: (torch.empty(3, device="meta") + 1, torch.tensor(1.0, device="meta"))
    )
    assert all(out.device.type == "meta" for out in outs) and len(tape) == 0


def test_tensor_subclass_is_unwrapped() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    a, b = torch.randn(3), torch.randn(3)
    with torch.no_grad():
        tape, out = record(lambda: TwoTensor(a, b) * 2)
    tape.replay()
    assert same(out.a, a * 2) and same(out.b, b * 2)


def test_custom_operation_with_a_fake_is_recorded() -> None:
    with torch.library._scoped_library("devgraph_test", "DEF") as library:

        def store(into: torch.Tensor, x: torch.Tensor) -> None:
            into.copy_(x)

        library.define("scale(Tensor x, float by) -> Tensor")
        library.define("store(Tensor(a!) into, Tensor x) -> ()")
        library.impl("scale", lambda x, by: x * by, "CPU")
        library.impl("store", store, "CPU")
        library.impl("scale", lambda x, by: torch.empty_like(x), "Meta")
        library.impl("store", lambda into, x: None, "Meta")
        x, into = torch.randn(3), torch.zeros(3)

        def step() -> torch.Tensor:
            out = torch.ops.devgraph_test.scale(x, 3.0)
            torch.ops.devgraph_test.store(into, out)
            return out

        tape, out = record(step)
        assert not into.any()
        tape.replay()
        assert same(out, x * 3) and same(into, x * 3)


def test_compiled_function_is_recorded_operation_by_operation() -> None:
    x = torch.randn(4)
    compiled = torch.compile(lambda x: (x * 2).sin() + 1, backend="eager")
    expected = compiled(x)  # compiled before the capture, called inside it
    tape, out = record(compiled, x)
    assert out.isnan().all()
    tape.replay()
    assert same(out, expected) and len(tape) == 3


def test_decomposed_operations_are_those_of_eager_execution() -> None:
    x, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    with torch.inference_mode():
        tape, _ = record(lambda: F.linear(x, weight).reshape(-1).contiguous().to(torch.float32))
    assert [op.name for op in tape.ops] == ["aten::mm"]


# Spans.


def test_recording_a_span_again_changes_nothing_before_it_is_applied() -> None:
    pool, regions = BlockPool(), BlockPool()
    x, out = torch.randn(8, 4), torch.zeros(4)
    with Recorder(pool, metadata=METADATA) as recorder, span(recorder, "r"):
        out.copy_((x[:2] * 3).sum(0))
    tape = recorder.tape()
    tape.replay()
    expected = out.clone()
    with Recorder(regions, others=(pool,), metadata=METADATA):
        out.copy_((x[:8] * 3).sum(0))
    assert same(out, expected)
    tape.replay()
    assert same(out, expected)


def test_random_numbers_in_an_updatable_span_are_refused() -> None:
    x = torch.ones(3)
    recorder = Recorder(BlockPool(), metadata=METADATA)
    with recorder, span(recorder, "region f"):
        F.scaled_dot_product_attention(
            *[torch.randn_like(x.view(1, 1, 1, 3)) for _ in ()] or [x.view(1, 1, 1, 3)] * 3
        )
        with pytest.raises(CaptureError, match=r"rand.* region f"):
            x + torch.rand(3)


def test_escaping_allocations_are_named() -> None:
    kept = []

    def step(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 3)
        return x * 2

    pool = BlockPool()
    x = torch.randn(3)
    earlier = record(lambda: x + 1, pool=pool)
    with Recorder(pool, metadata=METADATA) as recorder:
        out = step(x)
    (found,) = recorder.escaping(tensors(out)).values()
    assert found.kind == "escaping_allocation" and found.file == __file__
    assert found.line == step.__code__.co_firstlineno + 1
    assert earlier and kept


def test_layout_of_what_outlives_the_step_may_change_on_a_view_only() -> None:
    """FAULTS 42."""
    weight, held = torch.randn(2, 3), [torch.randn(2, 3)]
    layer = torch.nn.Linear(3, 2).requires_grad_(False)

    def views() -> torch.Tensor:
        turned = weight.view(2, 3)
        turned.t_()
        return turned + held[0].view(3, 2).unsqueeze_(0)

    tape, out = record(views)
    tape.replay()
    assert same(out, views())
    for change in (lambda: weight.t_(), lambda: held[0].unsqueeze_(0), layer.weight.t_):
        with pytest.raises(CaptureError, match="outlives the step"):
            record(change)
    assert weight.shape == held[0].shape == layer.weight.shape == (2, 3)


def _in_thread(fn: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn).result()


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("policy", ["full", "breakable"])
def test_result_of_another_thread_is_refused(policy: str, grad: bool) -> None:
    weight, kept = torch.randn(4, 4), {}
    factor = torch.ones(4).requires_grad_(grad)

    def kept_outside(x: torch.Tensor) -> torch.Tensor:
        kept["h"] = _in_thread(lambda: x @ weight)
        return kept["h"] + x

    steps: list[Callable[[torch.Tensor], Any]] = [
        lambda x: _in_thread(lambda: x @ weight) * factor + x,
        lambda x: x + _in_thread(lambda: x @ weight)[0].sum(),
        lambda x: sum(_in_thread(lambda: [x * 2, x * 3])),
    ]
    for step in steps:
        with pytest.raises(CaptureError, match=r"by another thread.*test_recorder"):
            dg.capture(step, torch.randn(4, 4), backend="cpu", policy=policy)
    with pytest.raises(CaptureError, match=r"by another thread.*test_recorder"):
        record(kept_outside, torch.randn(4, 4))


@pytest.mark.parametrize("how", ["argument", "closure", "output", "memory of the step"])
def test_work_of_another_thread_on_tensors_of_the_caller_is_refused(how: str) -> None:
    """FAULTS 49."""
    total, x = torch.zeros(3), torch.ones(3)

    def step(x: torch.Tensor) -> Any:
        results: list[Any] = []
        own = x * 2
        work = {
            "memory of the step": lambda: own.mul_(2),
            "argument": lambda: x.mul_(2),
            "closure": lambda: total.copy_(x),
            "output": lambda: results.append(x * 2),
        }[how]
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return (total.add_(0) if how == "output" else total) + x + own, *results

    with pytest.raises(dg.CaptureError, match="by another thread, or by code that bypasses"):
        dg.capture(step, x, backend="cpu")


def test_arguments_are_not_mistaken_for_results_while_another_thread_collects_garbage() -> None:
    collecting, captured = threading.Event(), threading.Event()

    def hold(phase: str, _: Any) -> None:
        if phase == "start" and threading.current_thread() is collector:
            collecting.set()
            captured.wait(60)

    x, weight = torch.ones(3), torch.ones(3)
    collector = threading.Thread(target=gc.collect)
    gc.callbacks.append(hold)
    try:
        collector.start()
        assert collecting.wait(60)
        graph = dg.capture(lambda x: x * 2 + weight, x, backend="cpu")
    finally:
        gc.callbacks.remove(hold)
        captured.set()
        collector.join()
    same(graph.replay(), x * 3)


def test_mark_in_another_thread_is_refused_although_the_step_fails_afterwards() -> None:
    """FAULTS 49."""

    @dg.no_graph
    def mark(x: Any) -> Any:
        return x * 3

    def step(x: torch.Tensor) -> Any:
        results: list[Any] = []
        context = contextvars.copy_context()

        def work() -> None:
            with contextlib.suppress(dg.CaptureError):
                results.append(context.run(mark, x))

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return results[0] + 1

    with pytest.raises(dg.CaptureError, match="was called in thread"):
        dg.capture(step, torch.ones(3), backend="cpu", policy="breakable", warmup=0)


def test_tensor_that_cannot_exist_is_a_resource_error() -> None:
    with pytest.raises(dg.ResourceError, match="overflowed"):
        dg.capture(lambda x: torch.zeros(2**62) + x, torch.ones(3), backend="cpu", warmup=0)


def test_tensors_of_before_and_constants_of_the_step_are_no_other_threads_work() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))
    weight.sum().backward()  # makes a gradient that Python has not seen
    table = torch.randn(4)

    def step(x: torch.Tensor) -> torch.Tensor:
        number = _in_thread(lambda: 3)
        host = torch.from_numpy(np.arange(4, dtype=np.float32))
        with torch.no_grad():
            return weight.data @ x * number + weight.grad + table.data[1:3].sum() + host

    captured = dg.capture(step, torch.randn(4, 4), backend="cpu")
    other = torch.randn(4, 4)
    assert same(captured.replay(other), step(other))


def test_operands_that_are_one_tensor_stay_one() -> None:
    """Kernels take other paths for attention of a tensor with itself."""
    module = torch.nn.MultiheadAttention(8, 2, batch_first=True).eval()

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return module(x, x, x)[0]

    check_replays(
        step, lambda seed: [torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(seed))]
    )


def test_default_dtype_of_an_operation_holds_in_replays() -> None:
    """FAULTS 50."""
    x = torch.arange(1, 4)

    def step() -> torch.Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return x / 3
        finally:
            torch.set_default_dtype(before)

    tape, result = record(step)
    tape.replay()
    same(result, step())
    assert torch.get_default_dtype() is torch.float32


def test_wrong_fake_of_a_custom_operation_is_named() -> None:
    @torch.library.custom_op("devgraph_tests::wrong_fake", mutates_args=())
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x.sum(0)

    wrong.register_fake(torch.empty_like)
    x = torch.randn(2, 3)
    tape, _ = record(lambda: wrong(x))
    with pytest.raises(dg.DeviceGraphError, match="that was registered with register_fake"):
        tape.replay()
