"""Tensors, steps, runners and comparisons for the tests of the suite."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch.utils import _pytree as pytree

import devgraph as dg
from devgraph.api.backend import Backend, poison
from devgraph.api.prove import compare

declares = pytest.mark.devgraph_capability
"""A marker for the capabilities that a test needs, as in ``@declares("rng")``."""

BREAKING = ("breakable", pytest.param("piecewise", marks=declares("piecewise")))
"""Parameters for the policies that break a step at its marks."""

POLICIES = ("full", *BREAKING)


def difference(got: Any, want: Any) -> str:
    """Describe the first difference between two trees; return "" if they are bitwise equal."""
    ours, theirs = pytree.tree_leaves(got), pytree.tree_leaves(want)
    if len(ours) != len(theirs):
        return f"has {len(ours)} leaves, but should have {len(theirs)}"
    for a, b in zip(ours, theirs, strict=True):
        if isinstance(b, torch.Tensor):
            if message := compare(b, a):
                return message
        elif a != b:
            return f"is {a!r}, but should be {b!r}"
    return ""


def same(got: Any, want: Any, what: str = "the result") -> None:
    """Fail unless ``got`` and ``want`` are equal, their tensors bit for bit."""
    if message := difference(got, want):
        pytest.fail(f"{what} {message}")


def copied(tree: Any) -> Any:
    return pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, tree)


class Kit:
    """Tensors, captures and comparisons on the device of the backend under test."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.device = backend.device

    def tensor(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
        """Return a tensor of noise that depends only on the seed."""
        out = torch.empty(shape, dtype=dtype, device=self.device)
        self.refill(out, seed)
        return out

    def refill(self, tensor: torch.Tensor, seed: int) -> None:
        """Overwrite ``tensor`` with noise that depends only on the seed."""
        generator = torch.Generator().manual_seed(seed)
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
        elif tensor.dtype is torch.bool:
            noise = torch.rand(tensor.shape, generator=generator) < 0.5
        else:
            noise = torch.randint(97, tensor.shape, generator=generator)
        tensor.copy_(noise)

    def record(
        self,
        body: Callable[[], Any],
        *,
        pool: dg.Pool | None = None,
        host_args: Mapping[str, Any] | None = None,
        warm: bool = True,
    ) -> tuple[dg.DeviceGraph, Any]:
        """Capture ``body`` without a policy and return the graph and the result of ``body``.

        With ``warm``, run ``body`` first, because libraries initialize on first use.
        """
        if warm:
            body()
            self.backend.synchronize()
        graph = self.backend.make_graph(pool)
        with self.backend.capture_context(graph, host_args=host_args):
            result = body()
        return graph, result

    def capture(self, fn: Callable[..., Any], *args: Any, **options: Any) -> dg.Captured:
        """Capture ``fn``. Replays refuse changed state instead of capturing again."""
        options.setdefault("recaptures", 0)
        return dg.capture(fn, *args, backend=self.backend, **options)

    def check(
        self,
        captured: dg.Captured,
        fn: Callable[..., Any],
        *args: Any,
        seed: int = 100,
        **host_args: Any,
    ) -> None:
        """Replay on fresh data in ``args``, and fail unless the result equals an eager run.

        ``fn`` must not write its arguments.
        """

        def refill(seed: int) -> None:
            for index, leaf in enumerate(pytree.tree_leaves(args)):
                if isinstance(leaf, torch.Tensor):
                    self.refill(leaf, seed + index)

        refill(seed)
        want = copied(fn(*args, **host_args))
        got = captured.replay(**host_args)
        if message := self.difference(got, want):
            stale, declared = copied(got), captured.host_spec.declared
            if declared != host_args and not self.difference(stale, fn(*args, **declared)):
                message += (
                    f". It is the result for {declared}, the values of the capture, so _record or "
                    f"_apply of the graph does not use the new values"
                )
            refill(seed + 1000)
            if not self.difference(captured.replay(**host_args), stale):
                message += (
                    ". A replay with other inputs has the same result, so launch() of the "
                    "executable does not run the recorded work, or the work writes to different "
                    "memory than in the capture"
                )
            what = f"the replay with {host_args}" if host_args else "the replay"
            pytest.fail(f"{what} {message}")

    def works(self, pool: dg.Pool) -> None:
        """Fail unless eager work, random numbers and new captures in ``pool`` succeed."""
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
        """Wait for the device, then fail unless the tensors are bitwise equal."""
        if message := self.difference(got, want):
            pytest.fail(f"{what} {message}")

    def difference(self, got: Any, want: Any) -> str:
        """Wait for the device, then describe the first difference; return "" if there is none."""
        self.backend.synchronize()
        message = difference(got, want)
        if message:
            time.sleep(0.1)
            if not difference(got, want):
                message += (
                    ". It is correct 0.1 s later, so synchronize() returned before the work of the "
                    "replay had finished, or a stream did not wait for that work"
                )
        return message

    def usable(self, policy: str, values: Sequence[Any]) -> Sequence[Any]:
        """Return the ``values`` that replays may use; the first is the value at capture.

        Without region updates, a full graph can replay only the captured value.
        """
        updates = policy != "full" or self.backend.capabilities.region_update
        return values if updates else values[:1]

    def churn(self) -> None:
        """Allocate, poison and free memory blocks of many sizes outside captures."""
        held = []
        for size in (64, 256, 1024, 4096, 16384, 65536):
            for _ in range(8):
                tensor = torch.empty(size, device=self.device)
                poison(tensor)
                held.append(tensor)
        self.backend.synchronize()

    @property
    def streams(self) -> Any:
        """The torch module of this device, such as ``torch.cuda``."""
        return torch.get_device_module(self.device)

    def side_stream(self) -> Any:
        """Return a stream that is not the capture stream.

        torch cycles through a small pool of streams, so a new stream may be the capture stream.
        """
        stream = self.streams.Stream()
        taken = stream == getattr(self.backend, "capture_stream", None)
        return self.streams.Stream() if taken else stream

    def own_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager for work that does not wait for the current stream."""
        if not self.backend.capabilities.streams:
            return contextlib.nullcontext()
        return cast(contextlib.AbstractContextManager[Any], self.streams.stream(self.side_stream()))


@contextlib.contextmanager
def beside(act: Callable[[], Any]) -> Iterator[None]:
    """Run ``act`` on another thread during the block, then raise its exception, if any."""
    with ThreadPoolExecutor(1) as threads:
        done = threads.submit(act)
        yield
        done.result()


VOCAB, WIDTH, ROWS = 32, 8, 48
SCRATCH = ROWS
"""Index of the cache row to which padded rows write."""


@dg.region()
def mixed(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply in a marked function, which breaks a step in the middle."""
    return hidden @ weight


class Model:
    """A step with state.

    All values are small integers, so the order of summation and the number of padded rows do not
    change the results.
    """

    def __init__(self, kit: Kit) -> None:
        generator = torch.Generator().manual_seed(3)

        def integers(*shape: int) -> torch.Tensor:
            return torch.randint(-2, 3, shape, generator=generator).float().to(kit.device)

        self.table = integers(VOCAB, WIDTH)
        self.weight = integers(WIDTH, WIDTH)
        self.cache = torch.zeros(ROWS + 1, WIDTH, device=kit.device)

    def step(self, cache: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Add each token to its cache row and return a function of the new row."""
        hidden = self.table[ids] + cache[rows]
        cache.index_copy_(0, rows, hidden)
        out: torch.Tensor = mixed(hidden, self.weight)
        return out + hidden

    def decode(self, batch: Any) -> torch.Tensor:
        return self.step(self.cache, batch.ids, batch.rows)

    def summed(self, hidden: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        """Return the sum over the tokens of each request; ``starts`` are the requests' offsets."""
        position = torch.arange(hidden.shape[0], device=hidden.device)
        inside = (position >= starts[:-1, None]) & (position < starts[1:, None])
        return torch.where(inside[:, :, None], hidden, 0.0).sum(1)


SLOTS = (
    dg.InputSlot("ids", ("tokens",), torch.int64, pad=dg.Pad.zero()),
    dg.InputSlot("rows", ("tokens",), torch.int64, pad=dg.Pad.fill(SCRATCH)),
)
STARTS = dg.InputSlot("starts", ("requests+1",), torch.int64, pad=dg.Pad.last())
X = dg.InputSlot("x", ("tokens", WIDTH), torch.float32, pad=dg.Pad.zero())


def batch_of(kit: Kit, count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return a batch of random tokens, each with its own cache row."""
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
    """Return a captured runner, by default a decode runner for four requests."""
    if kind is not dg.EncoderRunner:
        options.setdefault("max_requests", 4)
    runner = kind(forward, list(slots), backend=kit.backend, progress=False, **options)
    runner.capture()
    return runner


def decoder(kit: Kit, model: Model, **options: Any) -> dg.DecodeRunner:
    """Return a captured decode runner with buckets 1, 2, 4 and 8."""
    runner: dg.DecodeRunner = runner_of(kit, model.decode, SLOTS, max_requests=8, **options)
    return runner


def prefiller(kit: Kit, model: Model, policy: str = "breakable", **options: Any) -> Any:
    """Return a captured prefill runner with a tail that sums the tokens of each request."""
    options = {
        "max_tokens": 16,
        "tail": lambda hidden, batch: model.summed(hidden, batch.starts),
        "config": {"policy": policy, "buckets": [4, 8, 16]},
        # Without this fact, backends that recommend another policy would warn.
        "facts": dg.EngineFacts(recommended={"prefill": policy}),
        **options,
    }
    return runner_of(kit, model.decode, [*SLOTS, STARTS], dg.PrefillRunner, **options)


def check_run(
    kit: Kit, runner: Any, model: Model, lengths: tuple[int, ...] | int, seed: int
) -> None:
    """Run a batch, and fail unless outputs and state equal the results of an eager step.

    ``lengths`` are the token counts of the requests, or the number of single-token requests.
    """
    inputs = batch_of(kit, lengths if isinstance(lengths, int) else sum(lengths), seed)
    state = model.cache.clone()
    want = model.step(state, **inputs)
    if not isinstance(lengths, int):
        inputs["starts"] = torch.tensor([0, *itertools.accumulate(lengths)], device=kit.device)
        want = model.summed(want, inputs["starts"])
    kit.same(runner.run(inputs), want, f"the output of {lengths}")
    same(model.cache[:ROWS], state[:ROWS], f"the state after {lengths}")
