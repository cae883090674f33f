"""What the tests of the suite build with."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import devgraph as dg
from devgraph.api.backend import Backend, poison
from devgraph.api.prove import compare

declares = pytest.mark.devgraph_capability
"""Marks a test as one of a declared capability: ``@declares("rng")``."""

BREAKING = ("breakable", pytest.param("piecewise", marks=declares("piecewise")))
"""The policies that break a step at its marks, for ``parametrize``."""

POLICIES = ("full", *BREAKING)
"""Every policy, for ``parametrize``."""


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
    """Tensors on the device of the backend under test, captures there, and comparisons."""

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
            noise = torch.randint(97, tensor.shape, generator=generator)
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
        """Fail unless eager work, random numbers and new captures of ``pool`` are right."""
        assert not dg.is_capturing()
        assert gc.isenabled()

        def step(x: torch.Tensor) -> torch.Tensor:
            return x * 2 + 1

        x = self.tensor(32)
        same(step(x).cpu(), step(x.cpu()), "eager work")
        torch.rand(4, device=self.device)
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
                poison(tensor)
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


VOCAB, WIDTH, ROWS = 32, 8, 48
SCRATCH = ROWS
"""The row of the cache that padded rows write."""


@dg.region()
def mixed(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Work in the middle of a step that breaks a breakable graph."""
    return hidden @ weight


class Model:
    """A step with state. All numbers are small integers, so that every order of summing and every
    number of padded rows gives the same bits."""

    def __init__(self, kit: Kit) -> None:
        generator = torch.Generator().manual_seed(3)

        def integers(*shape: int) -> torch.Tensor:
            return torch.randint(-2, 3, shape, generator=generator).float().to(kit.device)

        self.table = integers(VOCAB, WIDTH)
        self.weight = integers(WIDTH, WIDTH)
        self.cache = torch.zeros(ROWS + 1, WIDTH, device=kit.device)

    def step(self, cache: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Add each token to its row of the cache and return what the row then gives."""
        hidden = self.table[ids] + cache[rows]
        cache.index_copy_(0, rows, hidden)
        out: torch.Tensor = mixed(hidden, self.weight)
        return out + hidden

    def decode(self, batch: Any) -> torch.Tensor:
        return self.step(self.cache, batch.ids, batch.rows)

    def summed(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Sum of the tokens of each request; ``starts`` are offsets, one more than requests."""
        position = torch.arange(hidden.shape[0], device=hidden.device)
        inside = (position >= starts[:-1, None]) & (position < starts[1:, None])
        return torch.where(inside[:, :, None], hidden, 0.0).sum(1)


def slot(name: str, dims: Any, dtype: torch.dtype, pad: dg.Pad) -> dg.InputSlot:
    return dg.InputSlot(name, dims, dtype, pad=pad)


SLOTS = (
    slot("ids", ("tokens",), torch.int64, dg.Pad.zero()),
    slot("rows", ("tokens",), torch.int64, dg.Pad.fill(SCRATCH)),
)
STARTS = slot("starts", ("requests+1",), torch.int64, dg.Pad.last())
X = slot("x", ("tokens", WIDTH), torch.float32, dg.Pad.zero())


def batch_of(kit: Kit, count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tokens, each with a row of the cache of its own."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (count,), generator=generator)
    rows = torch.randperm(ROWS, generator=generator)[:count]
    return {"ids": ids.to(kit.device), "rows": rows.to(kit.device)}


def runner_of(
    kit: Kit,
    forward: Any,
    slots: Sequence[dg.InputSlot] = (X,),
    kind: type[Any] = dg.DecodeRunner,
    **options: Any,
) -> Any:
    """A captured runner, for four requests if nothing else is said, whose input is ``X``."""
    if kind is not dg.EncoderRunner:
        options.setdefault("max_requests", 4)
    runner = kind(forward, list(slots), backend=kit.backend, progress=False, **options)
    runner.capture()
    return runner


def decoder(kit: Kit, model: Model, **options: Any) -> dg.DecodeRunner:
    """A captured decode runner with the buckets 1, 2, 4 and 8."""
    runner: dg.DecodeRunner = runner_of(kit, model.decode, SLOTS, max_requests=8, **options)
    return runner


def prefiller(kit: Kit, model: Model, policy: str = "breakable", **options: Any) -> Any:
    """A captured prefill runner whose tail sums the tokens of each request."""
    options = {
        "max_tokens": 16,
        "tail": lambda hidden, batch: model.summed(hidden, batch.starts),
        "config": {"policy": policy, "buckets": [4, 8, 16]},
        **options,
    }
    return runner_of(kit, model.decode, [*SLOTS, STARTS], dg.PrefillRunner, **options)


def check_run(
    kit: Kit, runner: Any, model: Model, lengths: tuple[int, ...] | int, seed: int
) -> None:
    """Run requests of these lengths, or so many of one token each, and fail unless outputs and
    state are those of an eager step."""
    inputs = batch_of(kit, lengths if isinstance(lengths, int) else sum(lengths), seed)
    state = model.cache.clone()
    want = model.step(state, **inputs)
    if not isinstance(lengths, int):
        inputs["starts"] = torch.tensor([0, *itertools.accumulate(lengths)], device=kit.device)
        want = model.summed(want, inputs["starts"])
    kit.same(runner.run(inputs), want, f"the output of {lengths}")
    same(model.cache[:ROWS], state[:ROWS], f"the state after {lengths}")
