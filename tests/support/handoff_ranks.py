"""The other process of ``test_transport.py``.

``python -m tests.support.handoff_ranks PORT`` reads orders from its input, one JSON list ``[part,
prefix]`` a line, and forks itself for each. So the imports are paid once, and a part may be killed.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from devgraph.integrations.transformers import Handoff, SamplingParams, TorchTransport


def made_handoff(seed: int = 0) -> Handoff:
    """Return a handoff of two layers with random numbers."""
    tokens = 5 + seed % 7
    handoff = Handoff.allocated(
        backend="cpu",
        model="0-0",
        dtype="float32",
        layers=2,
        kv_heads=(2, 4),
        head_dim=(8, 8),
        value_dim=(8, 4),
        windows=(None, 3),
        states=({}, {"conv": ("bfloat16", (3, 5))}),
        cached=tokens,
        token_ids=tuple(range(tokens + 1)),
        prompt_length=tokens,
        max_new_tokens=9,
        stop_token_ids=(),
        eos_token_ids=(2,),
        sampling=SamplingParams(temperature=0.5, seed=seed),
        draws=1,
        random_state="00ff",
    )
    generator = torch.Generator().manual_seed(seed)
    for tensor in handoff.tensors.values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return handoff


def same(one: Handoff, other: Handoff) -> bool:
    """Return whether all tensors are equal."""
    pairs = zip(one.tensors.items(), other.tensors.items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@contextlib.contextmanager
def joined(store: Any, prefix: str, rank: int, size: int) -> Iterator[None]:
    """Join a default group of gloo for a block."""
    dist.distributed_c10d._world.group_count = 0  # It is part of the keys of both processes.
    prefixed = dist.PrefixStore(prefix, store)
    limit = datetime.timedelta(seconds=120)
    dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=limit)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def offers_and_dies(transport: TorchTransport, store: Any) -> None:
    store.set("offer", transport.offer(made_handoff()))
    _die()


def dies_in_transfer(transport: TorchTransport, store: Any) -> None:
    handoff = made_handoff()
    handoff.progress.ready = 1
    store.set("offer", transport.offer(handoff))
    while not handoff.progress.receiver:
        time.sleep(0.01)
    time.sleep(0.2)
    _die()


def dies_after_transfer(transport: TorchTransport, store: Any) -> None:
    store.set("offer", transport.offer(made_handoff()))
    store.wait(["fetched"])
    _die()


def fetches_and_dies(transport: TorchTransport, store: Any) -> None:
    offer = store.get("offer").decode()
    threading.Thread(target=transport.fetch, args=(offer,), daemon=True).start()
    store.wait(["sending"])
    _die()


def main(port: int) -> None:
    for line in sys.stdin:
        part, prefix = json.loads(line)
        if os.fork():
            continue
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        with joined(store, prefix, 1, 2), TorchTransport(timeout_s=5) as transport:
            globals()[part](transport, dist.PrefixStore(prefix, store))
        os._exit(0)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


if __name__ == "__main__":
    main(int(sys.argv[1]))
