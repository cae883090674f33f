"""Steps with updatable regions that the tests of the Ascend room share."""

from __future__ import annotations

import torch

import devgraph as dg

__all__ = ["picky_step", "step", "wanted"]


@dg.region(host_args=("factor",), mutates=("out",))
def scale(x: torch.Tensor, out: torch.Tensor, *, factor: float) -> None:
    torch.mul(x, factor, out=out)


def step(x: torch.Tensor, *, factor: float) -> torch.Tensor:
    out = torch.empty_like(x)
    for _ in range(3):
        scale(x, out, factor=factor)
        x = out + 1
    return x


def wanted(x: torch.Tensor, factor: float) -> torch.Tensor:
    x = x.cpu()
    for _ in range(3):
        x = x * factor + 1
    return x


@dg.region(host_args=("n",), mutates=("out",))
def picky(x: torch.Tensor, out: torch.Tensor, *, n: int) -> None:
    if n > 9:
        raise ValueError(f"{n} is too many")
    torch.mul(x, float(n), out=out)


def picky_step(x: torch.Tensor, *, n: int) -> torch.Tensor:
    out = torch.empty_like(x)
    picky(x, out, n=n)
    return out + 1
