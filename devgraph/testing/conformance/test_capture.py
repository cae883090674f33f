"""Captures record without execution; replays use current data and fresh random numbers."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import devgraph as dg
from devgraph.testing.conformance.support import POLICIES, Kit, copied, declares, same

Step = Callable[..., Any]


def test_capture_does_not_execute(kit: Kit) -> None:
    x, *written = (kit.tensor(8, seed=seed) for seed in range(4))
    target, out, item = written
    before = copied(written)
    graph = kit.backend.make_graph()
    with kit.backend.capture_context(graph):
        target.copy_(x * 2)
        torch.add(x, 1, out=out)
        torch._foreach_add_([item], [x])
    kit.same(written, before, "a buffer after the capture")
    assert graph.executable is not graph, "_end must return an Executable, such as Call(launch)"
    graph.replay()
    kit.same(written, [x * 2, x + 1, before[2] + x])


def test_every_replay_runs_the_work_once(kit: Kit) -> None:
    count = torch.zeros(4, device=kit.device)
    graph, _ = kit.record(lambda: count.add_(1), warm=False)
    for expected in range(1, 6):
        graph.replay()
        kit.same(count, torch.full((4,), float(expected)))


def test_replay_reads_current_data(kit: Kit) -> None:
    x, count = kit.tensor(4, 16), torch.zeros(1, device=kit.device)
    graph, y = kit.record(lambda: (count.add_(1), torch.relu(x) * 3)[1], warm=False)
    native = graph.bound()
    for seed, launch in enumerate((native, graph.replay, native, graph.bound())):
        kit.refill(x, seed)
        launch()
        kit.same(y, torch.relu(x) * 3)
    same(count, torch.full((1,), 4.0))


def test_error_of_a_launch_is_raised(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    planted: list[Exception] = []
    lost: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: lost.append(str(report.exc_value)))

    def doubled(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        if planted:
            raise planted.pop()
        return x * 2

    x = kit.tensor(8)
    with torch.library._scoped_library("devgraph_conformance", "DEF") as library:
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", doubled, "CompositeExplicitAutograd")
        library.impl("doubled", torch.empty_like, "Meta")
        graph, y = kit.record(lambda: torch.ops.devgraph_conformance.doubled(x))
        before = len(calls)
        graph.replay()
        if len(calls) == before:
            pytest.skip("replays run no host code on this backend, so no test can make one fail")
        planted.append(RuntimeError("a planted failure"))
        with contextlib.suppress(RuntimeError):
            graph.replay()
        if lost:
            pytest.skip("the driver of this backend calls host code from C, which loses its errors")
        for launch in (graph.replay, graph.bound()):
            planted.append(RuntimeError("a planted failure"))
            with pytest.raises(RuntimeError, match="a planted failure"):
                launch()
            launch()
            kit.same(y, x * 2, "the replay after a failed one")


def test_outputs_stay_at_their_addresses(kit: Kit) -> None:
    x = kit.tensor(8)
    captured = kit.capture(lambda x: (x + 1, {"double": x * 2}), x)
    first, second = captured.outputs[0], captured.outputs[1]["double"]
    addresses = (first.data_ptr(), second.data_ptr())
    for seed in (3, 4):
        kit.refill(x, seed)
        out = captured.replay()
        assert (out[0].data_ptr(), out[1]["double"].data_ptr()) == addresses
        assert out is captured.outputs
        kit.same(out, (x + 1, {"double": x * 2}))


def test_outputs_keep_their_values_until_the_next_replay(kit: Kit) -> None:
    x = kit.tensor(64)
    graph, y = kit.record(lambda: x + 1)
    graph.replay()
    kit.backend.synchronize()
    want = x + 1
    kit.refill(x, 9)
    kit.churn()
    same(y, want, "the output after unrelated work")


def test_output_fed_back_as_input_sees_the_previous_replay(kit: Kit) -> None:
    """FAULTS 12."""
    x = kit.tensor(16)
    captured = kit.capture(lambda x: torch.tanh(x * 1.5) + 0.1, x)
    want = x.clone()
    for _ in range(5):
        want = torch.tanh(want * 1.5) + 0.1
        x.copy_(captured.replay())
    kit.same(x, want)


def test_input_that_is_an_output_of_the_step_is_updated_in_place(kit: Kit) -> None:
    """FAULTS 12."""
    x = kit.tensor(16)
    start = x.clone()
    captured = kit.capture(lambda x: x.mul_(0.5).add_(1), x)
    same(x, start, "the bound tensor after the capture")
    want = start.clone()
    for _ in range(3):
        captured.replay()
        want.mul_(0.5).add_(1)
    kit.same(x, want)


@pytest.mark.parametrize("policy", POLICIES)
def test_capture_restores_bound_tensors_and_random_state(kit: Kit, policy: str) -> None:
    x = kit.tensor(16)
    before, state = x.clone(), kit.backend.get_rng_state()
    kit.capture(lambda x: x.add_(1), x, policy=policy)
    kit.same(x, before, "the bound tensor")
    same(kit.backend.get_rng_state(), state, "the random state")


def _attention(x: Any, w: Any, i: Any) -> Any:
    q = x.view(1, 8, 2, 8).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def _in_place(x: Any, w: Any, i: Any) -> Any:
    h = x.clone()
    h[2:4] = w[2:4]
    h[:, 0] *= 2
    h.index_copy_(0, i[:2].clamp(max=0) + torch.arange(2, device=x.device), w[:2])
    return h.masked_fill_(h > 1, 0.5)


def _foreach(x: Any, w: Any, i: Any) -> Any:
    items = [x.clone(), w.clone()]
    torch._foreach_add_(items, 1.0)
    torch._foreach_copy_([items[0]], [x[:8] * 2])
    return items


STEPS: dict[str, Step] = {
    "elementwise": lambda x, w, i: torch.sigmoid(x) * torch.tanh(w[:8]) - x / 3,
    "matmul": lambda x, w, i: x @ w,
    "linear": lambda x, w, i: F.linear(x, w, w[0]),
    "views": lambda x, w, i: x.t()[1:5, ::2].reshape(-1).unsqueeze(0).expand(3, -1) + 1,
    "strides": lambda x, w, i: (x.t() + 1).as_strided((8,), (1,)),
    "cat_and_stack": lambda x, w, i: torch.cat([x, torch.stack([x[0], w[0]])]),
    "split": lambda x, w, i: [part + 1 for part in x.split(3)],
    "reductions": lambda x, w, i: (x.sum(), x.mean(0), x.amax(1), x.argmax(1), x.cumsum(1)),
    "softmax": lambda x, w, i: F.softmax(x, -1),
    "layer_norm": lambda x, w, i: F.layer_norm(x, (16,), w[0], w[1]),
    "embedding": lambda x, w, i: F.embedding(i % 16, w),
    "gather": lambda x, w, i: x.gather(1, (i % 16).view(8, 1)),
    "index_select": lambda x, w, i: x.index_select(0, i % 8),
    "where": lambda x, w, i: torch.where(x > 0, x, w[:8]),
    "topk": lambda x, w, i: x.topk(3, dim=1),
    "sort": lambda x, w, i: x.sort(dim=1),
    "casts": lambda x, w, i: (x.to(torch.bfloat16) * 2).float() + x.to(torch.int64),
    "integers": lambda x, w, i: (i * 3 + 1) // 2 % 5,
    "factories": lambda x, w, i: (
        torch.zeros_like(x) + torch.arange(16, device=x.device) + torch.full_like(x, 2.0)
    ),
    "attention": _attention,
    "in_place": _in_place,
    "foreach": _foreach,
}


@pytest.mark.parametrize("name", STEPS)
def test_replay_equals_eager_bit_for_bit(kit: Kit, pool: dg.Pool, name: str) -> None:
    step = STEPS[name]
    x, w = kit.tensor(8, 16), kit.tensor(16, 16, seed=1)
    i = kit.tensor(8, seed=2, dtype=torch.int64)
    with torch.no_grad():
        captured = kit.capture(step, x, w, i, pool=pool)
        for seed in (50, 60):
            kit.check(captured, step, x, w, i, seed=seed)


def _two_layers(x: Any, w1: Any, w2: Any) -> Any:
    for w in (w1, w2):
        h = F.silu(x @ w)
        x = x + F.layer_norm(h, (16,))
    return x


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_replay_equals_eager_in_every_gradient_mode(kit: Kit, mode: Callable[[], Any]) -> None:
    args = [kit.tensor(4, 16), kit.tensor(16, 16, seed=1), kit.tensor(16, 16, seed=2)]
    with mode():
        captured = kit.capture(_two_layers, *args)
        kit.check(captured, _two_layers, *args)
    kit.check(captured, _two_layers, *args, seed=200)


def test_inference_tensors_can_be_bound(kit: Kit) -> None:
    with torch.inference_mode():
        x = kit.tensor(4, 4)
        captured = kit.capture(lambda x: x.reshape(2, 8) * 2, x)
        kit.check(captured, lambda x: x.reshape(2, 8) * 2, x)


def test_weights_of_a_module_that_require_grad_are_read_in_place(kit: Kit) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()).to(kit.device)
    x = kit.tensor(4, 16)
    with torch.no_grad():
        captured = kit.capture(model, x)
        kit.check(captured, model, x)
        kit.refill(next(model.parameters()), 77)
        kit.check(captured, model, x)


def _dropout(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.5, training=True) + 1


def _drawn(x: torch.Tensor) -> Any:
    return torch.rand_like(x) + x, torch.randn(x.shape, device=x.device), x * 2


def _filled(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).uniform_(0, 1) + torch.empty_like(x).exponential_()


@dg.region(fake=torch.empty_like)
def _shifted(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


def _around_a_break(x: torch.Tensor) -> torch.Tensor:
    shifted: torch.Tensor = _shifted(x + torch.rand_like(x))
    return shifted * torch.rand_like(x)


DRAWS: list[Callable[[torch.Tensor], Any]] = [_dropout, _drawn, _filled, _around_a_break]


@declares("rng")
def test_bound_replay_draws_like_eager_steps(kit: Kit) -> None:
    x = kit.tensor(64)
    graph, y = kit.record(lambda: _dropout(x))
    native = graph.bound()
    state = kit.backend.get_rng_state()
    eager = [_dropout(x) for _ in range(3)]
    kit.backend.set_rng_state(state)
    for want in eager:
        native()
        kit.same(y, want)


@declares("rng")
@pytest.mark.parametrize("step", DRAWS)
@pytest.mark.parametrize("policy", POLICIES)
def test_replays_draw_like_eager_steps(kit: Kit, policy: str, step: Callable[..., Any]) -> None:
    x = kit.tensor(64)
    captured = kit.capture(step, x, policy=policy)
    state = kit.backend.get_rng_state()
    eager = [copied(step(x)) for _ in range(3)]
    after = torch.rand(4, device=kit.device)
    kit.backend.set_rng_state(state)
    for index, want in enumerate(eager):
        kit.same(captured.replay(), want, f"replay {index}")
    same(torch.rand(4, device=kit.device), after, "the random numbers after the replays")


@declares("rng")
def test_own_generator_is_advanced_or_refused(kit: Kit) -> None:
    generator = torch.Generator(kit.device).manual_seed(5)

    def step(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(64, generator=generator, device=kit.device)

    x = kit.tensor(64)
    try:
        captured = kit.capture(step, x)
    except dg.CaptureError:
        return
    state = generator.get_state()
    eager = [step(x) for _ in range(3)]
    generator.set_state(state)
    for index, want in enumerate(eager):
        kit.same(captured.replay(), want, f"replay {index} with the caller's generator")


def test_random_numbers_are_replayed_or_refused(kit: Kit, pool: dg.Pool) -> None:
    """FAULTS 22."""
    x = kit.tensor(16)
    if kit.backend.capabilities.rng:
        captured = kit.capture(_dropout, x, pool=pool)
        assert captured.prove(cases=1).ok
        return
    state = kit.backend.get_rng_state()
    with pytest.raises(dg.CaptureError, match=r"dropout|random|rand"):
        kit.capture(_dropout, x, pool=pool)
    same(kit.backend.get_rng_state(), state, "the random state after the refusal")
    kit.works(pool)
