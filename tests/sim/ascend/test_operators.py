"""Every simulated operator gives what the CPU gives, in the dtypes that inference uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree

from tests.sim.ascend import Driver

pytest_plugins = ["tests.sim.ascend.plugin"]

# Expressions over x, y (3x4 floats), i (a permutation of 3), m (bools), q (0..11), s (3x3 floats).
ARITHMETIC = """
x+y; x-y; x*y; x/y; x//y; x%y; 2-x; 2*x; x/3; 3/x; x**2; x.abs()**y; 2**x; -x; torch.fmod(x, y)
x.abs().sqrt(); x.abs().rsqrt(); x.exp(); x.sin(); x.cos(); x.tan(); x.tanh(); x.sigmoid(); x.sinh()
F.silu(x); F.gelu(x); F.relu(x); F.softplus(x); F.leaky_relu(x)
F.glu(x); x.abs(); x.floor(); x.ceil(); x.round(); x.trunc(); x.sign(); x.square(); x.reciprocal()
x.abs().log(); x.abs().log1p(); x.erf(); x.expm1(); x.isfinite(); x.isnan(); x.isinf()
x.clamp(-1, 1); x.clamp(min=0); x.clamp(max=0); x.clamp(y.abs() * -1, y.abs()); x.nan_to_num()
x==y; x!=y; x>y; x>=0; x<0; x<=y; x.eq(0); x.isclose(y); torch.equal(x, x); torch.equal(x, y)
~m; m&m; m|m; m^m; q&3; q|q; q^5; q<<1; q>>1; q//2; q%3; q+1; q*2; q/2; ~q
torch.logical_and(m, x>0); torch.logical_or(m, x>0); torch.logical_xor(m, x>0); torch.logical_not(m)
torch.where(m, x, y); torch.where(m, x, 0.0); x.masked_fill(m, -100.0); torch.maximum(x, y)
torch.minimum(x, y); torch.addcmul(x, y, y); torch.addcdiv(x, y, x.abs() + 1); torch.lerp(x, y, 0.3)
x.to(torch.int32); x.half(); x.bfloat16(); q.float(); m.int(); q.to(torch.int32); x.type(torch.bool)
x.clone().add_(y); x.clone().mul_(2); x.clone().clamp_(0, 1); x.clone().div_(2); x.clone().sub_(1)
x.clone().zero_(); x.clone().fill_(2); x.clone().copy_(y); x.clone().masked_fill_(m, 0)
x.clone().copy_(y.T.contiguous().T); torch._foreach_add([x, y], [y, x])
torch._foreach_mul([x], 2.0)
torch._foreach_add_([x.clone()], 1.0); torch._foreach_copy_([x.clone()], [y])
"""
REDUCTIONS = """
x.sum(); x.sum(-1); x.sum((0, 1)); x.mean(-1, keepdim=True); x.mean(); x.prod(); x.prod(1); x.max()
x.min(); x.max(1); x.min(0); x.amax(1); x.amin(0); x.argmax(-1); x.argmin(0); x.argmax(); m.any()
m.all(); m.any(1); m.all(0); x.var(1); x.std(1); x.norm(); x.norm(dim=1); x.logsumexp(1); x.median()
torch.aminmax(x); x.cumsum(1); q.cumsum(0); x.cumprod(1); x.cummax(1); x.topk(2); x.sort(1)
x.sort(descending=True); x.argsort(1); x.softmax(-1); x.log_softmax(-1); q.flatten().bincount()
x.softmax(-1, dtype=torch.float32); x.kthvalue(2); F.layer_norm(x, (4,)); F.rms_norm(x, (4,))
x.diff()
x.pow(2).mean(-1, keepdim=True); x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
"""
PRODUCTS = """
x@y.T; torch.matmul(x[None], y.T[None]); torch.bmm(x[None], y.T[None]); torch.addmm(s, x, y.T)
torch.baddbmm(s[None], x[None], y.T[None]); torch.mv(x, y[0]); torch.dot(x[0], y[0]); F.linear(x, y)
F.linear(x, y, s[0]); torch.einsum("ij,kj->ik", x, y); torch.outer(x[0], y[0])
F.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None])
F.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None], is_causal=True)
"""
INDEXING = """
torch.cat([x, y]); torch.cat([x, y], 1); torch.stack([x, y]); x.repeat(2, 1)
x.repeat_interleave(2, 0)
x.expand(2, 3, 4).clone(); x.flip(0); x.roll(1, 0); x.T.contiguous(); x.permute(1, 0).clone()
F.pad(x, (1, 1)); x.tril(); x.triu(1); x[1:, ::2].clone(); x[:, None].clone(); x.unbind(0)
x.chunk(2, 1); x.unfold(1, 2, 1).clone(); x.diagonal().clone(); x.view(2, 6).clone()
x[i]; x[i, i]; x[:, i]; x[m]; x[x>0]; x.index_select(1, i); x.gather(1, q%4); F.embedding(i, x)
x.take(q); torch.nonzero(m); torch.nonzero(x>0, as_tuple=True); x.masked_select(m); torch.isin(q, i)
m.nonzero(); (q==3).nonzero(); F.one_hot(i, 3); x.clone().index_copy_(0, i, y)
x.index_copy(0, i, y)
x.clone().index_add_(0, i, y); x.index_add(0, i, y); x.index_fill(0, i, 2.0); x.scatter(1, q%4, y)
x.scatter(1, q%4, 2.0); x.scatter_add(1, q%4, y); x.clone().scatter_(1, q%4, y)
x.clone().index_put_((i,), y); x.clone().index_put_((i, i), y[:, 0])
x.clone().index_put_((i,), y, accumulate=True); x.clone().masked_scatter_(m, y)
torch.arange(3, device=x.device); torch.zeros(3, device=x.device); torch.ones_like(x)
torch.full_like(x, 3); torch.eye(3, device=x.device); torch.linspace(0, 1, 5, device=x.device)
torch.full((2,), 7, device=x.device); torch.tril(torch.ones(3, 3, device=x.device))
x.new_zeros(2, 2)
torch.meshgrid(x[0], y[0], indexing="ij"); torch.block_diag(x, y)
torch.tensor(3.0, device=x.device)*x
"""


def _cases() -> list[str]:
    text = ARITHMETIC + REDUCTIONS + PRODUCTS + INDEXING
    return [part.strip() for part in text.replace("\n", ";").split(";") if part.strip()]


def _arguments(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "x": floats(3, 4),
        "y": floats(3, 4),
        "i": torch.tensor([2, 0, 1]),
        "m": torch.tensor([[True, False, True, True]] * 3),
        "q": torch.arange(12).reshape(3, 4),
        "s": floats(3, 3),
    }


@pytest.mark.parametrize("expression", _cases())
def test_operator_equals_the_cpu_in_every_dtype(driver: Driver, expression: str) -> None:
    names = ", ".join(_arguments(torch.float32))
    function: Callable[..., Any] = eval(f"lambda {names}: {expression}", {"torch": torch, "F": F})
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        arguments = _arguments(dtype)
        want = pytree.tree_leaves(function(**arguments))
        on_device = {name: value.to("npu") for name, value in arguments.items()}
        got = pytree.tree_leaves(function(**on_device))
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            if not isinstance(other, torch.Tensor):
                assert one == other
                continue
            torch.testing.assert_close(one.cpu(), other, rtol=1e-2, atol=1e-2, equal_nan=True)
            if one.is_floating_point() and dtype is torch.float32:
                torch.testing.assert_close(one.cpu(), other, equal_nan=True)
    assert not [line for line in driver.report() if line.startswith(("stub", "missing"))]
