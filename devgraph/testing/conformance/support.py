"""What the tests of the suite build with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import devgraph as dg
from devgraph.api.backend import Backend
from devgraph.api.prove import compare

declares = pytest.mark.devgraph_capability
"""Marks a test as one of a declared capability: ``@declares("rng")``."""

BREAKING = ("breakable", pytest.param("piecewise", marks=declares("piecewise")))
"""The policies that break a step at its marks, for ``parametrize``."""

POLICIES = ("full", *BREAKING)
"""Every policy, for ``parametrize``."""

INTEGERS = 97
"""Integer tensors hold numbers below this, so that they may serve as indices."""


def same(got: Any, want: Any, what: str = "the result") -> None:
    """Fail unless all tensors in ``got`` equal those in ``want`` bit for bit."""
    ours, theirs = pytree.tree_leaves(got), pytree.tree_leaves(want)
    if len(ours) != len(theirs):
        pytest.fail(f"{what} has {len(ours)} leaves and should have {len(theirs)}")
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, torch.Tensor):
            message = compare(b, a)
            if message:
                pytest.fail(f"{what} {message}")
        elif a != b:
            pytest.fail(f"{what} is {a!r} and should be {b!r}")


def copied(tree: Any) -> Any:
    """Return ``tree`` with every tensor cloned."""
    return pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)


class Kit:
    """Tensors on the device of one backend, captures there, and comparisons.

    Args:
        backend: the backend under test.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.device = backend.device

    # Data.

    def tensor(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
        """Return a tensor of reproducible noise."""
        out = torch.empty(shape, dtype=dtype, device=self.device)
        self.refill(out, seed)
        return out

    def refill(self, tensor: torch.Tensor, seed: int) -> None:
        """Write other reproducible noise into ``tensor``."""
        generator = torch.Generator().manual_seed(seed)
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
        elif tensor.dtype is torch.bool:
            noise = torch.rand(tensor.shape, generator=generator) < 0.5
        else:
            noise = torch.randint(INTEGERS, tensor.shape, generator=generator)
        tensor.copy_(noise)

    # Captures.

    def record(
        self,
        body: Callable[[], Any],
        *,
        pool: dg.Pool | None = None,
        host_args: Mapping[str, Any] | None = None,
        warm: bool = True,
    ) -> tuple[dg.DeviceGraph, Any]:
        """Capture ``body`` with the raw calls and return the graph and what ``body`` returned.

        Args:
            warm: run it eagerly first, because libraries set themselves up on first use.
        """
        if warm:
            body()
            self.backend.synchronize()
        graph = self.backend.make_graph(pool)
        with self.backend.capture_context(graph, host_args=host_args):
            result = body()
        return graph, result

    def capture(self, fn: Callable[..., Any], *args: Any, **options: Any) -> dg.Captured:
        """``dg.capture`` on this backend."""
        return dg.capture(fn, *args, backend=self.backend, **options)

    def check(
        self,
        captured: dg.Captured,
        fn: Callable[..., Any],
        *args: Any,
        seed: int = 100,
        **host_args: Any,
    ) -> None:
        """Replay with fresh data in ``args`` and fail unless it equals ``fn`` run eagerly.

        ``fn`` must not write its arguments.
        """
        for index, leaf in enumerate(pytree.tree_leaves(args)):
            if isinstance(leaf, torch.Tensor):
                self.refill(leaf, seed + index)
        want = copied(fn(*args, **host_args))
        got = captured.replay(**host_args)
        self.same(got, want, f"the replay with {host_args}" if host_args else "the replay")

    def works(self, pool: dg.Pool) -> None:
        """Fail unless new captures of ``pool`` are right."""

        def step(x: torch.Tensor) -> torch.Tensor:
            return x * 2 + 1

        x = self.tensor(32)
        for policy in ("full", "breakable"):
            self.check(self.capture(step, x, pool=pool, policy=policy), step, x)

    def same(self, got: Any, want: Any, what: str = "the result") -> None:
        """Wait for the device, and fail unless all tensors equal each other bit for bit."""
        self.backend.synchronize()
        same(got, want, what)

    # Other things.

    def usable(self, policy: str, values: Sequence[Any]) -> Sequence[Any]:
        """Return the host arguments of ``values`` that replays may take, the first at capture.

        Without update, a full graph knows no other.
        """
        updates = policy != "full" or self.backend.capabilities.region_update
        return values if updates else values[:1]

    def churn(self) -> None:
        """Allocate, poison and free memory of many sizes outside every capture."""
        held = []
        for size in (64, 256, 1024, 4096, 16384, 65536):
            for _ in range(8):
                tensor = torch.empty(size, device=self.device)
                self.backend.poison(tensor)
                held.append(tensor)
        self.backend.synchronize()

    @property
    def streams(self) -> Any:
        """torch's module of this device, for its streams."""
        return torch.get_device_module(self.device)

    def side_stream(self) -> Any:
        """Return a stream that captures do not run on.

        torch hands streams out of a small pool in turn, so the next one can be that of captures.
        """
        stream = self.streams.Stream()
        taken = stream == getattr(self.backend, "capture_stream", None)
        return self.streams.Stream() if taken else stream
