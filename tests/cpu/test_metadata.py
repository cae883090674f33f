"""Metadata of results: remembered, from fake tensors, and learnt on scratch data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.cpu.backend import CpuBackend
from devgraph.cpu.memory import BlockPool
from devgraph.cpu.metadata import Metadata
from devgraph.cpu.recorder import Recorder
from tests.support.cpu_capture import check_replays, record


def test_metadata_forgets_at_its_limit() -> None:
    metadata = Metadata()
    metadata.LIMIT = 10
    for size in range(1, 40):
        with Recorder(BlockPool(), metadata=metadata):
            torch.ones(size) + 1
    assert len(metadata._known) <= 10


def test_fake_tensors_are_made_for_the_first_recording() -> None:
    metadata = CpuBackend().metadata
    assert "mode" not in vars(metadata)
    with Recorder(BlockPool(), metadata=metadata):
        torch.ones(3, 3) + 1
    assert "mode" in vars(metadata)


def test_dtypes_that_fake_tensors_do_not_know_are_learnt_on_scratch_data() -> None:
    numbers, one = torch.randn(4, dtype=torch.complex64), torch.ones(()).to(torch.float8_e4m3fn)
    assert (numbers + one).dtype is torch.complex64
    captured = dg.capture(lambda x, y: x + y, numbers, one, backend="cpu")
    other = torch.randn(4, dtype=torch.complex64)
    assert torch.equal(captured.replay(other, one), other + one)


def _define(library: Any, schema: str, fn: Callable[..., Any]) -> Any:
    library.define(schema)
    library.impl(schema.partition("(")[0], fn, "CPU")
    return getattr(torch.ops.devgraph_test, schema.partition("(")[0])


def test_operations_without_a_fake_are_learnt_on_scratch_data() -> None:
    before = torch.get_rng_state()
    with torch.library._scoped_library("devgraph_test", "DEF") as library:
        pair = _define(
            library,
            "pair(Tensor x, int count) -> (Tensor, Tensor)",
            lambda x, count: (x[:count].clone(), x.sum()),
        )
        parts = _define(library, "parts(Tensor x) -> Tensor[]", lambda x: [x * 2, x * 3])
        noisy = _define(library, "noisy(Tensor x) -> Tensor", lambda x: x + torch.rand_like(x))
        check_replays(
            lambda x: (*pair(x * 2, 2), *parts(x + 1), noisy(x)),
            lambda seed: [torch.randn(4, generator=torch.Generator().manual_seed(seed))],
        )
        torch.set_rng_state(before)
        record(noisy, torch.ones(4))
    assert torch.equal(torch.get_rng_state(), before)


def test_sizes_that_depend_on_data_are_found_on_scratch_data() -> None:
    with torch.library._scoped_library("devgraph_test", "DEF") as library:
        positive = _define(library, "positive(Tensor x) -> Tensor", lambda x: x[x > 0].clone())
        with pytest.raises(dg.HostReadError, match="positive has an output whose shape depends"):
            record(positive, torch.ones(4))


def test_custom_operation_without_register_fake_is_learnt_or_refused_by_that_name() -> None:
    @torch.library.custom_op("devgraph_test::doubled", mutates_args=())
    def doubled(x: torch.Tensor, scale: float) -> torch.Tensor:
        if scale < 0:
            raise ValueError("a scale below zero")
        return x * 2 * scale

    check_replays(lambda x: doubled(x, 3.0) + 1, lambda seed: [torch.full((4,), float(seed))])
    with pytest.raises(RuntimeError, match="register_fake"):
        record(lambda x: doubled(x, -1.0), torch.ones(4))


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("grad", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize(
    "layer",
    [
        torch.nn.LSTM(4, 4),
        torch.nn.LSTM(4, 4, num_layers=2, bidirectional=True, bias=False),
        torch.nn.LSTM(4, 4, proj_size=2),
        torch.nn.GRU(4, 4, bidirectional=True),
        torch.nn.RNN(4, 4, nonlinearity="relu"),
        torch.nn.LSTMCell(4, 4),
    ],
    ids=str,
)
def test_recurrent_layers_equal_eager(layer: torch.nn.Module, grad: Callable[[], Any]) -> None:
    def step(x: torch.Tensor) -> Any:
        with grad():
            return layer(x)

    size = (2, 4) if isinstance(layer, torch.nn.LSTMCell) else (3, 2, 4)
    check_replays(
        step, lambda seed: [torch.randn(size, generator=torch.Generator().manual_seed(seed))]
    )


def test_backward_of_an_lstm_equals_eager() -> None:
    layer = torch.nn.LSTM(4, 4)

    def step(x: torch.Tensor) -> Any:
        out, _ = layer(x)
        return torch.autograd.grad(out.sum(), list(layer.parameters()))

    check_replays(
        step, lambda seed: [torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(seed))]
    )


@pytest.mark.parametrize(
    "norm", [torch.nn.LayerNorm(8), torch.nn.GroupNorm(2, 8), torch.nn.BatchNorm1d(8)], ids=repr
)
def test_norms_under_autocast_keep_statistics_in_the_dtype_of_their_weights(norm):
    linear, x = torch.nn.Linear(8, 8), torch.randn(4, 8)

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = norm(linear(x))
        return y, *torch.autograd.grad(y.float().square().sum(), [linear.weight, norm.weight])

    captured = dg.capture(step, x, backend="cpu")
    x.copy_(torch.randn(4, 8))
    for got, want in zip(captured.replay(), step(x), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm(4), torch.nn.BatchNorm1d(4)])
def test_gradient_that_is_expanded_is_no_hindrance(norm: torch.nn.Module) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(norm(x).sum(), x)
        return grad

    x = torch.randn(3, 4)
    captured = dg.capture(step, x, backend="cpu")
    x.copy_(torch.randn(3, 4))
    assert torch.equal(captured.replay(), step(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fn", [torch.add, torch.maximum, lambda a, b: torch.where(a > b, a, b)])
def test_strides_of_expanded_operands_equal_eager(
    fn: Callable[..., Any], dtype: torch.dtype
) -> None:
    def step(row: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return fn(row.expand(3, 4), x.t())

    check_replays(step, lambda seed: [torch.ones(1, 4, dtype=dtype), torch.ones(4, 3, dtype=dtype)])


def test_strides_of_dimensions_of_size_1_choose_the_kernels_of_eager() -> None:
    def step(pixels: torch.Tensor) -> torch.Tensor:
        image = pixels.t()[None].view(1, 8, 8, 8) / 2  # as after attention over the pixels
        return torch.nn.functional.group_norm(image, 4)

    x = torch.randn(64, 8)
    captured = dg.capture(step, x, backend="cpu")
    assert captured.prove().ok and torch.equal(captured.replay(), step(x))
    assert captured.outputs.stride() == step(x).stride()


@pytest.mark.parametrize(
    "fn", [lambda x: x.roll(1, 2), lambda x: torch.nn.functional.unfold(x.transpose(2, 3), 1)]
)
def test_strides_of_images_in_channels_last_equal_eager(fn: Callable[..., Any]) -> None:
    x = torch.randn(2, 8, 6, 4).to(memory_format=torch.channels_last)
    for image in (x, x.permute(1, 0, 2, 3)):
        captured = dg.capture(fn, image, backend="cpu")
        assert torch.equal(captured.replay(), fn(image))
        assert captured.outputs.stride() == fn(image).stride()
