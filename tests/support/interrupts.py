"""What KeyboardInterrupts hit in the tests: operations of one pool, and a check after them."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

import devgraph as dg

__all__ = ["OPERATIONS", "Bench", "interrupted"]

WIDTH = 16


@dg.region(host_args=("n",))
def head(x: torch.Tensor, *, n: int) -> torch.Tensor:
    return x[:, :n].sum(1, keepdim=True) * 2


def step(x: torch.Tensor, *, n: int) -> torch.Tensor:
    h = x * 0.5
    for _ in range(2):
        h = h + head(h + 1, n=n)
    return h


class Bench:
    """One pool with a capture of each kind, a graph and a runner."""

    def __init__(self, budget_bytes: int | None = None, backend: Any = None) -> None:
        self.backend = backend or dg.get_backend("cpu")
        self.pool = self.backend.make_pool()
        if budget_bytes is not None:
            self.pool.limit(budget_bytes)
        self.x = torch.randn(4, WIDTH).to(self.backend.device)
        self.captured = {policy: self.capture(policy) for policy in ("full", "breakable")}
        self.graph, self.y = self.record()
        self.runner = dg.DecodeRunner(
            lambda batch: step(batch.x, n=batch.host.n),
            [dg.InputSlot("x", ("tokens", WIDTH), torch.float32, pad=dg.Pad.zero())],
            host_args={"n": 3},
            backend=self.backend,
            pool=self.pool,
            max_requests=4,
            progress=False,
            config="full",
        )
        self.runner.capture()

    def capture(self, policy: str) -> dg.Captured:
        return dg.capture(
            step, self.x, policy=policy, backend=self.backend, pool=self.pool, host_args={"n": 3}
        )

    def record(self) -> tuple[dg.DeviceGraph, torch.Tensor]:
        graph = self.backend.make_graph(self.pool)
        with self.backend.capture_context(graph, host_args={"n": 3}) as host:
            y = step(self.x, n=host["n"])  # type: ignore[arg-type]
        return graph, y

    def run(self, n: int) -> Any:
        return self.runner.run({"x": self.x}, host_args={"n": n})

    def check(self, n: int) -> None:
        """Fail unless the thread is what it was, the locks are free and every result is right."""
        assert not dg.is_capturing()
        assert gc.isenabled()
        assert torch.is_grad_enabled()
        assert torch.is_autocast_cache_enabled()
        assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
        free, locks = [], [self.pool.lock, self.backend.capture_lock.lock]
        if hasattr(self.backend, "channel"):
            locks.append(self.backend.channel.order)

        def other() -> None:
            for lock in locks:
                free.append(lock.acquire(timeout=60))
                lock.release()

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert free == [True] * len(locks)
        want = step(self.x, n=n)
        if self.graph.state != "ready":
            self.graph.close()
            self.graph, self.y = self.record()
        self.graph.update(n=n)
        self.graph.replay()
        assert torch.equal(self.y, want)
        assert torch.equal(self.run(n), want)
        for captured in self.captured.values():
            assert torch.equal(captured.replay(n=n), want)

    def complete(self) -> None:
        """Make every recording and broken form that operations make on demand.

        The second check of a value records it; the first one only does within a budget.
        """
        for n in 2 * [*range(1, WIDTH + 4)]:
            self.check(n)


OPERATIONS: dict[str, tuple[Callable[[Bench, int], object], int]] = {
    "replay": (lambda bench, n: bench.captured["full"].replay(n=n), 1),
    "replay in segments": (lambda bench, n: bench.captured["breakable"].replay(n=n), 1),
    "replay of a graph": (lambda bench, n: bench.graph.replay(), 1),
    "update": (lambda bench, n: bench.graph.update(n=n), 1),
    "run": (lambda bench, n: bench.run(n), 1),
    "close": (lambda bench, n: bench.graph.close(), 5),
    "capture": (lambda bench, n: bench.capture("full"), 13),
    "capture in segments": (lambda bench, n: bench.capture("breakable"), 13),
    "capture context": (lambda bench, n: bench.record(), 13),
}
"""Each with how many of the places lie between two interrupts."""


def interrupted(work: Callable[[], object], place: int) -> bool:
    """Run ``work`` with an interrupt at the place of that number; return whether it has so many.

    A place is the begin of a Python function. Collections are off, because they swallow exceptions
    and would make the places differ between runs.
    """
    places = itertools.count(1)
    thresholds, callbacks = gc.get_threshold(), gc.callbacks.copy()
    hook, is_reached = sys.unraisablehook, False

    def profile(frame: FrameType, event: str, arg: object) -> None:
        nonlocal is_reached
        if event == "call" and next(places) == place:
            is_reached = True
            sys.setprofile(None)
            raise KeyboardInterrupt

    try:
        gc.set_threshold(0)
        gc.callbacks.clear()
        # Python ignores an interrupt in a generator that it closes; pytest would keep its frames.
        sys.unraisablehook = lambda _: None
        sys.setprofile(profile)
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
        sys.unraisablehook = hook
        gc.callbacks.extend(callbacks)
        gc.set_threshold(*thresholds)
    return is_reached
