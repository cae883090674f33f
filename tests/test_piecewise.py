"""The piecewise policy on the CPU reference: split, compiled, captured, equal to eager."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import devgraph as dg

ROWS, WIDTH = 32, 8
CACHE = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH).sin()


@dg.region(host_args=("kv_len",), mutates=("out",))
def attend(query, out, *, kv_len):
    rows = CACHE[:kv_len]
    out.copy_(torch.softmax(query @ rows.T, -1) @ rows)


@dg.region(fake=lambda x: torch.empty_like(x))
def double(x):
    return x * 2


@dg.no_graph(fake=lambda x: torch.empty_like(x))
def normalise_on_host(x):
    return x / max(1.0, float(x.abs().max()))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, kv_len):
        query = nn.functional.silu(self.first(x))
        out = torch.empty_like(query)
        attend(query, out, kv_len=kv_len)
        return double(x + self.second(out)) / 2


@pytest.fixture(scope="module")
def layers():
    torch.manual_seed(0)
    return nn.ModuleList(Layer() for _ in range(3))


@pytest.fixture
def step(layers):
    def run(x, *, kv_len):
        for layer in layers:
            x = layer(x, kv_len)
        return x + 1

    return run


def captured(step: Any, rows: int, compiler: str = "eager", **options: Any) -> Any:
    x = torch.randn(rows, WIDTH)
    with torch.no_grad():
        return dg.capture(
            step,
            x,
            policy="piecewise",
            backend="cpu",
            host_args={"kv_len": 3},
            compiler=compiler,
            **options,
        )


def test_replay_equals_eager_in_every_order_after_all_buckets_are_captured(step):
    pool = dg.get_backend("cpu").make_pool()
    buckets = {rows: captured(step, rows, pool=pool) for rows in (16, 8, 5)}
    for order in itertools.permutations(buckets):
        for rows in order:
            bound = buckets[rows]._bound[0][0]
            bound.normal_()
            for kv_len in (1, 3, 17, ROWS):
                expected = step(bound, kv_len=kv_len)
                assert torch.equal(buckets[rows].replay(kv_len=kv_len), expected)


def test_prove_finds_nothing_with_compiler_eager(step):
    with captured(step, 6) as capture:
        assert capture.prove(host_args=[{"kv_len": n} for n in (1, 2, 30)]).ok


@pytest.mark.slow
def test_inductor_is_near_eager_for_all_buckets(step):
    pool = dg.get_backend("cpu").make_pool()
    buckets = [captured(step, rows, "inductor", pool=pool) for rows in (16, 8, 5)]
    for capture in reversed(buckets):
        bound = capture._bound[0][0]
        bound.normal_()
        expected = step(bound, kv_len=11)
        torch.testing.assert_close(capture.replay(kv_len=11), expected)
    assert buckets[0].stats()["pieces"] == 7


@pytest.mark.slow
def test_inductor_pieces_write_inputs_and_return_views():
    state = torch.zeros(4, WIDTH)

    def run(x):
        state.add_(x)
        pair = torch.cat([x, state])
        head = pair[:4]
        double(head)
        head.mul_(3)
        return pair, x.view(-1)

    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        capture = dg.capture(run, x, policy="piecewise", backend="cpu", compiler="inductor")
        state.zero_()
        x.normal_()
        pair, flat = capture.replay()
    torch.testing.assert_close(pair, torch.cat([x * 3, x]))
    assert torch.equal(flat, x.view(-1))
    assert torch.equal(state, x)


def test_one_compilation_serves_all_sizes_and_equal_layers_share_code(step):
    torch._dynamo.reset()
    first = captured(step, 16)
    assert first.stats()["pieces"] == 7
    assert first.stats()["pieces_shared"] > 0
    assert first.stats()["compile_seconds"] > 0
    for rows in (8, 5, 24):
        assert captured(step, rows).stats()["pieces"] == 0
    assert "pieces" in first.explain()


def test_capture_leaves_the_input_as_it_was(step):
    x = torch.randn(4, WIDTH)
    before = x.clone()
    with torch.no_grad():
        dg.capture(step, x, policy="piecewise", backend="cpu", host_args={"kv_len": 3})
    assert torch.equal(x, before)


def test_no_graph_function_and_graph_break_cut_the_step():
    def run(x):
        y = normalise_on_host(x + 1)
        dg.graph_break()
        return y * 2

    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        capture = dg.capture(run, x, policy="piecewise", backend="cpu")
        assert len(capture.segments) == 3
        x.normal_().mul_(100)
        assert torch.equal(capture.replay(), run(x))


@pytest.mark.parametrize(
    "consume",
    [
        lambda x, n: x[:n],
        lambda x, n: x * n,
        lambda x, n: x + (n // 2),
        lambda x, n: torch.zeros_like(x) + min(n, 4096),
    ],
    ids=["index", "multiply", "derive", "min"],
)
def test_host_argument_consumed_outside_a_region_is_refused_with_its_line(consume):
    def run(x, *, kv_len):
        return consume(x, kv_len)

    with pytest.raises(dg.FrozenValueError, match=re.escape(Path(__file__).name)):
        captured(run, 4)


def test_derived_value_given_to_a_region_is_refused():
    def run(x, *, kv_len):
        out = torch.empty_like(x)
        attend(x, out, kv_len=min(kv_len, 4096))
        return out

    with pytest.raises(dg.FrozenValueError, match="derive"):
        captured(run, 4)


def test_branch_on_data_outside_a_mark_names_the_line_and_the_cure():
    def run(x, *, kv_len):
        if x.sum() > 0:
            return x + 1
        return x - 1

    with pytest.raises(dg.CaptureError, match=r"(?s)test_piecewise.*@dg\.region"):
        captured(run, 4)


def test_failed_compilation_leaves_nothing_and_the_next_capture_works(step):
    def broken(x, *, kv_len):
        print(x.sum().item())
        return x

    with pytest.raises(dg.CaptureError):
        captured(broken, 4)
    with captured(step, 4) as capture:
        assert capture.prove().ok


def test_unknown_compiler_is_refused_with_the_nearest():
    with pytest.raises(dg.InputError, match="inductor"):
        captured(lambda x, *, kv_len: x + 1, 4, "inducter")


def test_backend_without_piecewise_refuses_it(step):
    backend = type(dg.get_backend("cpu"))()
    backend.capabilities = attrs.evolve(backend.capabilities, piecewise=False)
    x = torch.randn(4, WIDTH)
    with pytest.raises(dg.CapabilityError, match="piecewise"):
        dg.capture(step, x, policy="piecewise", backend=backend, host_args={"kv_len": 3})


def test_runner_serves_piecewise_from_one_compilation(layers):
    def forward(batch):
        x = batch.x
        for layer in layers:
            x = layer(x, batch.host.kv_len)
        return x

    runner = dg.PrefillRunner(
        forward,
        inputs=[dg.InputSlot("x", ("tokens", WIDTH), torch.float32, pad=dg.Pad.zero())],
        outputs=dg.OutputSlot(rows="tokens"),
        host_args={"kv_len": 1},
        config=dg.PhaseConfig(policy="piecewise", buckets=(4, 8, 16)),
        backend=dg.get_backend("cpu"),
        max_tokens=16,
        max_requests=4,
    )
    with torch.no_grad():
        runner.capture()
        for tokens, kv_len in ((3, 5), (16, 9), (7, 32), (8, 1)):
            x = torch.randn(tokens, WIDTH)
            out = runner.run({"x": x}, host_args={"kv_len": kv_len})
            expected = x
            for layer in layers:
                expected = layer(expected, kv_len)
            torch.testing.assert_close(out, expected)
    stats = runner.stats()
    assert stats.graph_steps == 4
    assert not stats.eager
    runner.close()


def test_only_the_piecewise_file_imports_the_compiler():
    root = Path(dg.__file__).parent
    pattern = re.compile(r"^\s*(?:import|from)\s+torch\.(?:_dynamo|fx|_inductor)\b", re.M)
    found = [p.relative_to(root) for p in root.rglob("*.py") if pattern.search(p.read_text())]
    assert found == [Path("api/policy/piecewise.py")]
