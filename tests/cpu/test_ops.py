"""Replays of single operations against eager runs, bit for bit, in every gradient mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from tests.support.cpu_capture import check_replays, record, same

torch.set_num_threads(1)

MODES = {
    "inference": lambda: torch.inference_mode(),
    "no_grad": lambda: torch.no_grad(),
    "grad": lambda: torch.enable_grad(),
}


def f(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[torch.Generator], Any]:
    return lambda g: torch.randn(shape, generator=g).to(dtype)


def pos(*shape: int) -> Callable[[torch.Generator], Any]:
    return lambda g: torch.rand(shape, generator=g) + 0.1


def ints(high: int, *shape: int) -> Callable[[torch.Generator], Any]:
    return lambda g: torch.randint(0, high, shape, generator=g)


def mask(*shape: int) -> Callable[[torch.Generator], Any]:
    return lambda g: torch.rand(shape, generator=g) > 0.4


def transposed(*shape: int) -> Callable[[torch.Generator], Any]:
    return lambda g: torch.randn(shape, generator=g).t()


def perm(n: int) -> Callable[[torch.Generator], Any]:
    return lambda g: torch.randperm(n, generator=g)


def inplace_chain(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.add_(1).mul_(y).clamp_(-3, 3)
    y[1].zero_()
    y[:, 0] = 7.0
    y[0, 1:3] = x[0, 2:4]
    return y


def write_argument(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(y)
    x[0].fill_(3.0)
    return x.sum()


def out_arguments(x: torch.Tensor, y: torch.Tensor) -> Any:
    into = torch.empty(3, 4)
    torch.add(x, y, alpha=2, out=into)
    values, indices = torch.empty(3), torch.empty(3, dtype=torch.int64)
    torch.max(x, 1, out=(values, indices))
    lifted = torch.ops.aten.lift.out(x, out=torch.empty(3, 4))
    return into, values, indices, lifted


def constants(x: torch.Tensor) -> Any:
    one = torch.tensor([1.0, 2.0, 3.0, 4.0])
    one.add_(1)  # must start from the data again at each replay
    return x * one, torch.tensor(3), x + torch.tensor(0.5), torch.as_tensor([1, 2])


def metadata_changes(x: torch.Tensor) -> torch.Tensor:
    y = x * 1.5
    y.unsqueeze_(0).transpose_(1, 2).squeeze_(0)
    y.t_()
    return y + 1


def chunks(x: torch.Tensor) -> Any:
    a, b = x.chunk(2, dim=1)
    a.mul_(3)
    return torch.cat([b, a], dim=1), x.split([1, 3], dim=1)[1] + 1, torch.stack(x.unbind(0))


def index_writes(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> Any:
    a = x.clone()
    a.index_copy_(0, i, v)
    b = x.clone()
    b.index_add_(0, i, v, alpha=2)
    c = x.clone()
    c[i] = v
    d = x.clone()
    d.index_put_((i,), v, accumulate=True)
    e = torch.index_fill(x, 0, i, 9.0)
    return a, b, c, d, e


def masked_writes(x: torch.Tensor, m: torch.Tensor) -> Any:
    y = x.clone()
    y[m] = 0.0
    return y, x.masked_fill(m, float("-inf")), torch.where(m, x, -x), torch.where(m, x, 1.0)


def masked_scatter(x: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return x.masked_scatter(m, v)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=m, enable_gqa=True)


def conjugates(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = torch.complex(x, y)
    return z.conj() * z, z.conj().imag + 1, torch.view_as_real(z.conj().resolve_conj()), z.abs()


def batch_norm(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(x, mean, var, training=True, momentum=0.3)


def foreach(x: torch.Tensor, y: torch.Tensor) -> Any:
    a = [x * 1, y * 1]
    torch._foreach_add_(a, 1.0)
    torch._foreach_mul_(a, [2.0, 3.0])
    b = torch._foreach_sqrt(torch._foreach_abs(a))
    torch._foreach_copy_(a, b)
    return a, b, torch._foreach_norm(a)


def allocations(x: torch.Tensor) -> Any:
    a = torch.empty(3, 4)
    a.copy_(x)
    b = x.new_empty(4, 3).copy_(x.t())
    c = torch.empty_like(x).copy_(a)
    d = torch.empty_strided((3, 4), (1, 3)).copy_(x)
    return a, b, c, d


def fills(x: torch.Tensor) -> Any:
    return (
        torch.zeros(2, 3),
        torch.ones(2, dtype=torch.int64),
        torch.full((2, 2), 3.5),
        torch.full((2,), True),
        torch.zeros_like(x, dtype=torch.bool),
        torch.ones_like(x),
        torch.full_like(x, -1),
        x.new_zeros(3),
        x.new_ones(2, 2),
        x.new_full((1,), 2.0),
        torch.arange(5),
        torch.arange(1, 2, 0.25),
        torch.linspace(0, 1, 7),
        torch.eye(3),
        torch.tril(torch.ones(3, 3)),
    )


# name: (function, makers of its arguments)
CASES: dict[str, tuple[Callable[..., Any], Sequence[Callable[[torch.Generator], Any]]]] = {
    "add": (lambda x, y: x + y, [f(3, 4), f(4)]),
    "add alpha": (lambda x, y: torch.add(x, y, alpha=3), [f(3, 4), f(3, 4)]),
    "wrapped scalars": (lambda x: (x * 2.5, 1 - x, x / 3, x // 0.7, x % 2, x**2), [f(3, 4)]),
    "integer scalars": (lambda i: (i + 1, i * 2.5, i / 2, i // 2, -i, i**2), [ints(9, 5)]),
    "zero dim": (lambda x, s: (x * s, s + 1, x + s.sum()), [f(3, 4), f()]),
    "mixed dtypes": (lambda x, i: (x + i, i + True, x.double() * x), [f(3), ints(9, 3)]),
    "comparisons": (lambda x, y: (x > y, x <= 0, x == y, (x > 0) & (y > 0)), [f(9), f(9)]),
    "unary": (lambda x: (x.neg(), x.exp(), x.sin(), x.cos(), x.tanh(), x.abs()), [f(3, 4)]),
    "roots": (lambda x: (x.rsqrt(), x.sqrt(), x.log(), x.pow(0.3)), [pos(3, 4)]),
    "activations": (
        lambda x: (F.silu(x), F.gelu(x), F.gelu(x, approximate="tanh"), F.relu(x), x.sigmoid()),
        [f(3, 5)],
    ),
    "more activations": (
        lambda x: (F.elu(x), F.leaky_relu(x), F.softplus(x), F.mish(x), F.hardswish(x), F.glu(x)),
        [f(3, 6)],
    ),
    "softmax": (lambda x: (x.softmax(-1), x.log_softmax(0), x.logsumexp(1)), [f(4, 7)]),
    "softmax float": (
        lambda x: x.softmax(-1, dtype=torch.float32),
        [f(4, 7, dtype=torch.bfloat16)],
    ),
    "reductions": (
        lambda x: (x.sum(), x.mean(-1, keepdim=True), x.amax(0), x.var(1), x.std(), x.prod(1)),
        [f(5, 6)],
    ),
    "norms": (lambda x: (x.norm(), x.norm(dim=1), torch.linalg.vector_norm(x, 3)), [f(5, 6)]),
    "reductions with indices": (
        lambda x: (x.max(1), x.min(0), x.argmax(-1), x.median(1), x.kthvalue(2, 1), x.aminmax()),
        [f(5, 6)],
    ),
    "boolean reductions": (lambda m: (m.any(), m.all(1), m.sum(), m.int().sum(0)), [mask(4, 5)]),
    "scans": (lambda x: (x.cumsum(1), x.cumprod(0), x.cummax(1), x.logcumsumexp(1)), [f(4, 5)]),
    "sorting": (
        lambda x: (
            x.sort(1),
            x.sort(dim=0, descending=True, stable=True),
            x.topk(3, 1),
            x.argsort(1),
        ),
        [f(4, 6)],
    ),
    "mm": (lambda x, y: (x @ y, torch.mm(x, y)), [f(5, 6), f(6, 7)]),
    "mm transposed": (lambda x, y: x @ y, [f(1, 6), transposed(7, 6)]),
    "matmul batched": (lambda x, y: x @ y, [f(2, 3, 4, 5), f(2, 1, 5, 6)]),
    "matmul vector": (lambda x, y: (x @ y, y @ y), [f(2, 3, 4), f(4)]),
    "linear": (lambda x, w, b: (F.linear(x, w, b), F.linear(x, w)), [f(2, 3, 4), f(5, 4), f(5)]),
    "linear strided": (lambda x, w: F.linear(x.transpose(0, 1), w), [f(2, 3, 4), f(5, 4)]),
    "addmm": (lambda b, x, w: torch.addmm(b, x, w, beta=0.5, alpha=2), [f(5), f(3, 4), f(4, 5)]),
    "baddbmm": (lambda c, x, y: torch.baddbmm(c, x, y), [f(2, 3, 5), f(2, 3, 4), f(2, 4, 5)]),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), [f(2, 3, 4), f(2, 4, 5)]),
    "outer and dot": (
        lambda x, y: (torch.outer(x, y), x.dot(y), torch.mv(torch.outer(x, y), y)),
        [f(4), f(4)],
    ),
    "bfloat16": (
        lambda x, y: (x @ y, x.float().sum(), (x * 2).softmax(-1)),
        [f(4, 4, dtype=torch.bfloat16), f(4, 4, dtype=torch.bfloat16)],
    ),
    "float16": (lambda x: (x * 3, x.to(torch.float32), x.mean(1)), [f(4, 4, dtype=torch.float16)]),
    "float64": (lambda x: (x @ x, x.float()), [f(4, 4, dtype=torch.float64)]),
    "casts": (
        lambda x: (x.to(torch.int64), x.bool(), x.half(), x.type(torch.float64), x.to(x.dtype)),
        [f(4, 4)],
    ),
    "copies": (
        lambda x: (x.clone(), x.t().contiguous(), x.contiguous(), x.t().clone()),
        [f(3, 4)],
    ),
    "memory formats": (
        lambda x: (x.to(memory_format=torch.channels_last), x.clone(), x.contiguous()),
        [f(2, 3, 4, 5)],
    ),
    "views": (
        lambda x: (
            x.view(4, 3) + 1,
            x.t() * 2,
            x[1:, ::2] + 1,
            x.expand(2, 3, 4).sum(0),
            x.unfold(1, 2, 1) * 1,
            x.diagonal() + 0,
            x.as_strided((2, 2), (1, 2)) + 0,
            x.movedim(0, 1) + 0,
            x.flatten() + 0,
            x.narrow(1, 1, 2) + 0,
        ),
        [f(3, 4)],
    ),
    "reshape that copies": (lambda x: (x.t().reshape(-1), x.reshape(2, 6)), [f(3, 4)]),
    "reshape writes through": (lambda x: (x.clone().reshape(-1).add_(1), x), [f(3, 4)]),
    "returned views": (lambda x: ((y := x + 1), y.t(), y[0], y.view(-1)[2:]), [f(3, 4)]),
    "repeat": (
        lambda x: (x.repeat(2, 3), x.repeat_interleave(2, 1), x.tile(2), x.roll(1, 0), x.flip(1)),
        [f(3, 4)],
    ),
    "joining": (
        lambda x, y: (
            torch.cat([x, y]),
            torch.stack([x, y], -1),
            torch.hstack([x, y]),
            F.pad(x, (1, 2), value=3.0),
        ),
        [f(3, 4), f(3, 4)],
    ),
    "chunks": (chunks, [f(4, 4)]),
    "meshgrid": (lambda x, y: torch.meshgrid(x, y, indexing="ij"), [f(3), f(4)]),
    "triangles": (lambda x: (x.tril(), x.triu(1), torch.diag(x)), [f(4, 4)]),
    "embedding": (
        lambda i, w: (F.embedding(i, w), w[i], w.index_select(0, i[0])),
        [ints(9, 2, 3), f(9, 4)],
    ),
    "embedding strided": (lambda i, w: F.embedding(i.t(), w), [ints(9, 2, 3), f(9, 4)]),
    "gather": (
        lambda x, i: (x.gather(1, i), x.take(i), torch.take_along_dim(x, i, 1)),
        [f(3, 4), ints(4, 3, 2)],
    ),
    "indexing": (lambda x, i: (x[i], x[:, i[:2]], x[i, 1], x[None, ..., 2]), [f(4, 4), ints(4, 3)]),
    "scatter": (
        lambda x, i, v: (
            x.scatter(1, i, v),
            x.scatter_add(1, i, v),
            x.scatter_reduce(1, i, v, "amax"),
            x.scatter(1, i, 5.0),
        ),
        [f(3, 4), ints(4, 3, 2), f(3, 2)],
    ),
    "index writes": (index_writes, [f(5, 3), perm(5), f(5, 3)]),
    "masked writes": (masked_writes, [f(4, 5), mask(4, 5)]),
    "masked scatter": (masked_scatter, [f(4, 5), mask(4, 5), f(20)]),
    "one hot": (lambda i: (F.one_hot(i, 9), F.one_hot(i, num_classes=12)), [ints(9, 4)]),
    "bucketize": (lambda x, e: torch.searchsorted(e.sort()[0], x), [f(6), f(4)]),
    "layer norm": (
        lambda x, w, b: (F.layer_norm(x, (6,), w, b), F.layer_norm(x, (6,))),
        [f(2, 3, 6), f(6), f(6)],
    ),
    "rms norm": (lambda x, w: F.rms_norm(x, (6,), w, 1e-5), [f(2, 3, 6), f(6)]),
    "group norm": (lambda x: F.group_norm(x, 2), [f(2, 4, 3)]),
    "batch norm": (batch_norm, [f(4, 3, 5), f(3), pos(3)]),
    "conv1d": (
        lambda x, w, b: F.conv1d(x, w, b, padding=2, groups=4),
        [f(2, 4, 9), f(4, 1, 3), f(4)],
    ),
    "conv2d": (lambda x, w: F.conv2d(x, w, stride=2), [f(2, 3, 9, 9), f(5, 3, 3, 3)]),
    "pooling": (
        lambda x: (F.max_pool2d(x, 2), F.avg_pool2d(x, 2), F.adaptive_avg_pool2d(x, 1)),
        [f(2, 3, 8, 8)],
    ),
    "interpolate": (lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), [f(1, 2, 4, 4)]),
    "attention causal": (sdpa, [f(1, 2, 5, 8), f(1, 2, 5, 8), f(1, 2, 5, 8)]),
    "attention masked": (
        sdpa_mask,
        [f(1, 4, 1, 8), f(1, 2, 9, 8), f(1, 2, 9, 8), mask(1, 1, 1, 9)],
    ),
    "losses": (lambda x, i: (F.cross_entropy(x, i), F.mse_loss(x, x * 2)), [f(4, 7), ints(7, 4)]),
    "complex": (conjugates, [f(3, 4), f(3, 4)]),
    "fft": (lambda x: (torch.fft.rfft(x), torch.fft.fft(x).real), [f(3, 8)]),
    "linalg": (
        lambda x: (torch.linalg.qr(x), torch.linalg.inv(x @ x.t() + 9 * torch.eye(4))),
        [f(4, 4)],
    ),
    "svd": (lambda x: torch.linalg.svd(x), [f(4, 3)]),
    "clamp": (lambda x, y: (x.clamp(-1, 1), x.clamp(min=y), torch.maximum(x, y)), [f(5), f(5)]),
    "lerp": (
        lambda x, y: (x.lerp(y, 0.3), torch.addcmul(x, x, y), torch.addcdiv(x, y, y)),
        [f(5), f(5)],
    ),
    "rounding": (lambda x: (x.round(), x.floor(), x.trunc(), x.frac(), x.sign()), [f(9)]),
    "bits": (lambda i, j: (i & j, i | j, i ^ 3, ~i, i << 2, i >> 1), [ints(99, 5), ints(99, 5)]),
    "nan to num": (lambda x: (x.log().nan_to_num(), x.log().isnan(), x.isfinite()), [f(9)]),
    "in place": (inplace_chain, [f(3, 4)]),
    "argument written": (write_argument, [f(3, 4), f(3, 4)]),
    "out arguments": (out_arguments, [f(3, 4), f(3, 4)]),
    "metadata changes": (metadata_changes, [f(3, 4)]),
    "constants": (constants, [f(3, 4)]),
    "allocations": (allocations, [f(3, 4)]),
    "fills": (fills, [f(3, 4)]),
    "foreach": (foreach, [pos(3), pos(2, 2)]),
    "detach": (lambda x: (x.detach() + 1, x.data * 2), [f(3)]),
    "empty tensors": (lambda x: (x.sum(), torch.cat([x, x]), x.view(0, 2) + 1), [f(0, 2)]),
    "input as output": (lambda x: (x, x[0], x + 1), [f(3, 4)]),
    "var mean": (lambda x: torch.var_mean(x, 1), [f(4, 5)]),
    "histc": (lambda x: torch.histc(x, 5, -2, 2), [f(20)]),
    "cdist": (lambda x, y: torch.cdist(x, y), [f(3, 4), f(5, 4)]),
    "kron": (lambda x, y: torch.kron(x, y), [f(2, 2), f(3, 3)]),
    "float8": (lambda x: x.to(torch.float8_e4m3fn).to(torch.float32), [f(16)]),
}

# Where torch records a gradient, in-place writes of its inputs would be refused by autograd.
NOT_WITH_GRAD = {"out arguments", "argument written", "chunks"}


def make_arguments(
    makers: Sequence[Callable[[torch.Generator], Any]],
) -> Callable[[int], list[Any]]:
    def make(seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        return [maker(generator) for maker in makers]

    return make


@pytest.mark.parametrize("mode", ["inference", "no_grad"])
@pytest.mark.parametrize("name", CASES)
def test_replay_equals_eager_for_an_operation(name: str, mode: str) -> None:
    fn, makers = CASES[name]
    with MODES[mode]():
        check_replays(fn, make_arguments(makers))


@pytest.mark.parametrize("name", sorted(set(CASES) - NOT_WITH_GRAD))
def test_replay_equals_eager_for_an_operation_under_grad(name: str) -> None:
    fn, makers = CASES[name]
    make = make_arguments(makers)

    def requiring(seed: int) -> list[Any]:
        return [
            v.requires_grad_() if v.is_floating_point() and name not in ("batch norm",) else v
            for v in make(seed)
        ]

    def detached(*args: Any) -> Any:
        return fn(*[a * 1 if a.is_floating_point() else a for a in args])

    with torch.enable_grad():
        check_replays(detached, requiring)


def test_outputs_require_grad_as_eager_ones_do() -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    _, (with_grad, without) = record(lambda: (torch.eye(3) @ weight, torch.eye(3) + 1))
    assert with_grad.requires_grad and not without.requires_grad


def test_backward_pass_is_recorded() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(2, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        (grad,) = torch.autograd.grad(F.gelu(x @ weight).square().mean(), weight)
        return grad

    tape, grad = record(step, x)
    x.copy_(torch.randn(2, 4))
    tape.replay()
    assert same(grad, step(x))


SEEDED: dict[str, tuple[Callable[..., Any], Sequence[Callable[[torch.Generator], Any]]]] = {
    "rand": (lambda x: (torch.rand(4), torch.randn(3, 3), torch.randint(0, 99, (5,))), [f(3)]),
    "like": (
        lambda x: (torch.rand_like(x), torch.randn_like(x), torch.randint_like(x, 9)),
        [f(40)],
    ),
    "in place": (lambda x: x.clone().normal_() + x.clone().uniform_(), [f(40)]),
    "bernoulli": (
        lambda p: (torch.bernoulli(p), p.clone().bernoulli_(0.3)),
        [lambda g: torch.rand(40, generator=g)],
    ),
    "exponential": (lambda x: x.clone().exponential_(), [f(40)]),
    "multinomial": (lambda p: torch.multinomial(p, 3), [pos(9)]),
    "dropout": (lambda x: (F.dropout(x, 0.4), F.dropout(x, 0.4, training=False)), [f(8, 8)]),
    "permutation": (lambda x: torch.randperm(17), [f(1)]),
    "sampling": (
        lambda x: torch.argmax(x.softmax(-1) / torch.empty_like(x).exponential_(1), -1),
        [f(2, 50)],
    ),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SEEDED)
def test_replay_draws_what_eager_draws_from_the_same_state(name: str, mode: str) -> None:
    fn, makers = SEEDED[name]
    with MODES[mode]():
        check_replays(fn, make_arguments(makers))


def test_random_state_is_untouched_by_capture_and_advances_with_replays() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    tape, out = record(lambda: torch.rand(8) + F.dropout(torch.ones(8), 0.5))
    assert torch.equal(torch.get_rng_state(), before)
    tape.replay()
    first = out.clone()
    tape.replay()
    assert not torch.equal(first, out)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: F.linear(x, w),
        lambda x, w: torch.einsum("ij,kj->ik", x, w),
        lambda x, w: (x @ w.t()).softmax(-1),
        lambda x, w: F.layer_norm(x, (6,), w[0]),
    ],
)
def test_autocast_inside_the_capture_is_recorded(fn: Callable[..., Any], mode: str) -> None:
    def step(x: torch.Tensor, w: torch.Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return fn(x, w), fn(x, w)

    with MODES[mode]():
        check_replays(step, make_arguments([f(4, 6), f(5, 6)]))


def test_autocast_around_capture_and_replay_casts_once() -> None:
    x, w = torch.randn(4, 6), torch.randn(5, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tape, out = record(lambda: F.linear(x, w) @ torch.ones(5, 2))
        expected = F.linear(x, w) @ torch.ones(5, 2)
        tape.replay()
        assert same(out, expected)
    out.zero_()
    tape.replay()
    assert same(out, expected)


def test_autocast_remembers_no_weight_of_a_capture() -> None:
    w = torch.randn(5, 6, requires_grad=True)
    x = torch.randn(4, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        eager = F.linear(x, w)
        record(lambda: F.linear(x, w))
        assert torch.is_autocast_cache_enabled()
        assert same(F.linear(x, w), eager)


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64]),
)
def test_random_programs_replay_as_they_run(
    data: st.DataObject, shape: list[int], dtype: torch.dtype
) -> None:
    binary = [torch.add, torch.sub, torch.mul, torch.maximum, lambda a, b: torch.where(a > b, a, b)]
    unary = [
        torch.neg,
        torch.abs,
        lambda a: a.transpose(0, -1),
        lambda a: a.flip(0),
        lambda a: a.reshape(-1).view(a.shape) if a.is_contiguous() else a.contiguous(),
        lambda a: a.cumsum(0),
        lambda a: a.clone().add_(3),
        lambda a: a.sum(0, keepdim=True).expand(a.shape),
        lambda a: a[:1].repeat([a.shape[0]] + [1] * (a.dim() - 1)),
    ]
    steps = data.draw(st.lists(st.tuples(st.integers(0, 13), st.integers(0, 9)), max_size=12))

    def program(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        values = [x, y]
        for op, pick in steps:
            a, b = values[pick % len(values)], values[-1]
            if op < len(binary):
                values.append(binary[op](a, b) if a.shape == b.shape else a + 1)
            else:
                values.append(unary[op - len(binary)](a))
        return values[2:]

    def make(seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(-9, 9, shape, generator=generator).to(dtype) for _ in range(2)]

    with torch.inference_mode(data.draw(st.booleans())):
        check_replays(program, make)


def test_operations_without_device_work_are_no_host_reads() -> None:
    """Ranges of a profiler, as in every step of an optimizer, and questions about metadata."""
    weight = torch.nn.Parameter(torch.ones(4))
    optimizers = [torch.optim.SGD([weight], lr=0.1, momentum=0.9), torch.optim.RMSprop([weight])]

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for optimizer in optimizers:
            optimizer.zero_grad()
            (weight * x).sum().backward()
            optimizer.step()
        with torch.profiler.record_function("a range"):
            same_memory = x.is_set_to(x) and not x.is_set_to(x * 1)
        _, tangent = torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))
        with forward_ad.dual_level():
            dual = torch.tanh(forward_ad.make_dual(x, torch.ones_like(x)))
            slope = forward_ad.unpack_dual(dual).tangent
        return weight.detach() * 1, tangent * (2 if same_memory else 3), slope * 1

    x = torch.arange(4.0)
    step(x)
    tape, outputs = record(step, x)
    names = {op.name for op in tape.ops}
    assert not any("profiler" in name or "set_to" in name for name in names)
    tensors = [weight, *(t for o in optimizers for t in o.state[weight].values() if t is not None)]
    before = [t.detach().clone() for t in tensors]
    with torch.no_grad():
        x.copy_(torch.arange(4.0) - 2)
    tape.replay()
    with torch.no_grad():
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
    got = [out.clone() for out in outputs]
    assert all(same(left, right) for left, right in zip(got, step(x), strict=True))
