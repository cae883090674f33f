"""Policy piecewise: one compilation for all buckets, exact or near to eager in any order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import devgraph as dg
from devgraph.testing.conformance.support import Kit, declares, same

pytestmark = [
    declares("piecewise"),
    pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning"),  # a compiler's advice
]

WIDTH = 8
BUCKETS = (16, 8, 5)


@dg.region(host_args=("length",), mutates=("out",))
def prefix_mean(x: torch.Tensor, out: torch.Tensor, *, length: int) -> None:
    """Mean of the first ``length`` columns in every column: a host value decides the kernels."""
    out.copy_(x[:, :length].mean(1, keepdim=True).expand_as(out))


@dg.no_graph(fake=torch.empty_like)
def scaled_on_host(x: torch.Tensor) -> torch.Tensor:
    """Work that no capture can hold."""
    return x / max(1.0, float(x.detach().abs().max().cpu()))


def layered(kit: Kit, dtype: torch.dtype, layers: int = 3) -> Callable[..., Any]:
    """Return a step of equal layers around regions, with weights of noise."""
    weights = [kit.tensor(WIDTH, WIDTH, seed=70 + i, dtype=dtype) for i in range(layers)]

    def step(x: torch.Tensor, *, length: int) -> torch.Tensor:
        for weight in weights:
            h = torch.nn.functional.silu(x @ weight)
            out = torch.empty_like(h)
            prefix_mean(h, out, length=length)
            x = scaled_on_host(x + out) * 2 + h
        return x

    return step


def _in_every_order(
    kit: Kit, compiler: str, dtype: torch.dtype, check: Callable[[Any, Any], None]
) -> None:
    """Capture every bucket; replay them in every order and ``check`` each result."""
    step, pool = layered(kit, dtype), kit.backend.make_pool()
    bound = {rows: kit.tensor(rows, WIDTH, dtype=dtype) for rows in BUCKETS}
    captured = {
        rows: kit.capture(
            step, x, policy="piecewise", compiler=compiler, pool=pool, host_args={"length": 3}
        )
        for rows, x in bound.items()
    }
    compilations = [c.stats()["compilations"] for c in captured.values()]
    assert compilations[1:] == [0, 0], "a bucket compiled the step again"
    for seed, order in enumerate(itertools.permutations(BUCKETS)):
        for rows in order:
            kit.refill(bound[rows], seed)
            length = 1 + (seed + rows) % WIDTH
            want = step(bound[rows], length=length)
            got = captured[rows].replay(length=length)
            kit.backend.synchronize()
            check(got, want)


def test_every_bucket_in_any_order_equals_eager_bit_for_bit(kit: Kit) -> None:
    """FAULTS 35."""
    _in_every_order(kit, "eager", torch.float32, same)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_bucket_in_any_order_is_near_eager_when_compiled(
    kit: Kit, dtype: torch.dtype
) -> None:
    """FAULTS 35. Compilers that the backend does not declare are not tried."""
    for compiler in set(kit.backend.capabilities.compilers) - {"eager"}:
        _in_every_order(kit, compiler, dtype, torch.testing.assert_close)
