"""Time of handoffs between two processes: of ``admit``, and of steps while handoffs arrive.

    python benchmarks/handoff.py --backends cpu cuda
    python benchmarks/handoff.py --backends cuda cuda          # two processes on one GPU
    python benchmarks/handoff.py --backends cuda cuda --direct # two GPUs, from device to device

The exporter runs a prompt and offers its handoff. The receiver decodes eight requests, first alone
and then while a thread fetches handoffs. *copy* is the time to transfer the same bytes to the
device and copy them once there, for comparison with ``admit``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import threading
import time
import uuid
from typing import Any

import attrs
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import devgraph as dg
from devgraph.integrations.transformers import Engine, Handoff, TorchTransport

DECODING, ARRIVING = 8, 8


def engine_of(args: argparse.Namespace, rank: int) -> Engine:
    backend = dg.get_backend(args.backends[rank])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192, hidden_size=args.hidden, intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers, num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 256), max_position_embeddings=4096,
        pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device("cpu"):
        model = LlamaForCausalLM(config).eval().to(getattr(torch, args.dtype))
    mode = {
        "decode": {"policy": "full", "buckets": [DECODING, DECODING + ARRIVING], "max_padding": 9},
        "prefill": "disabled",
    }
    return Engine(
        model.to(backend.device), config=mode, backend=backend, max_len=4096,
        max_requests=DECODING + ARRIVING, max_step_tokens=args.tokens,
    )  # fmt: skip


def export(args: argparse.Namespace, store: Any) -> None:
    """Offer one handoff for each request of the receiver."""
    engine = engine_of(args, 0)
    with TorchTransport() as transport:
        request = engine.add_request([1] * args.tokens, max_new_tokens=1024)
        while not engine.step():
            pass
        handoff = engine.export(request, timeout_s=3600)
        while store.queue_pop("want") == b"handoff":
            # A released offer ends its handoff, so each offer needs its own handoff.
            offer = transport.offer(fresh(handoff))
            store.queue_push("offers", offer)
        store.queue_push("bye", "")
        store.queue_pop("done")


def fresh(handoff: Handoff) -> Handoff:
    progress = type(handoff.progress)(handoff.layers)
    return attrs.evolve(handoff, id=uuid.uuid4().hex, progress=progress)


def receive(args: argparse.Namespace, store: Any) -> dict[str, Any]:
    """Measure admission, and decode steps with and without arriving handoffs."""
    engine = engine_of(args, 1)
    synchronize = engine.backend.synchronize
    transport = TorchTransport()

    def fetched() -> Handoff:
        store.queue_push("want", "handoff")
        offer = store.queue_pop("offers").decode()
        handoff = transport.fetch(offer)
        transport.release(offer)
        return handoff

    def seconds_of(work: Any) -> float:
        synchronize()
        begin = time.perf_counter()
        work()
        synchronize()
        return time.perf_counter() - begin

    handoff = fetched()
    results: dict[str, Any] = {"device": engine.backend.device_name, "bytes": handoff.nbytes}
    results["fetch_s"] = statistics.median(seconds_of(fetched) for _ in range(9))

    target = torch.empty_like(handoff.data, device=engine.backend.device)
    copies = [seconds_of(lambda: target.copy_(handoff.data.to(target.device))) for _ in range(30)]
    admits = []
    for _ in range(30):
        admitted: list[int] = []
        admits.append(seconds_of(lambda: admitted.append(engine.admit(handoff))))  # noqa: B023
        engine.cancel(admitted[0])
    results["copy_ms"] = statistics.median(copies[5:]) * 1e3
    results["admit_ms"] = statistics.median(admits[5:]) * 1e3
    results["admit_above_copy_ms"] = results["admit_ms"] - results["copy_ms"]

    for _ in range(DECODING):
        engine.admit(fresh(handoff))
    engine.decode.capture()
    for _ in range(5):
        engine.step()

    def steps(count: int) -> list[float]:
        times = []
        for _ in range(count):
            begin = time.perf_counter()
            engine.step()  # A step reads its tokens, so it waits for the device.
            times.append(time.perf_counter() - begin)
        return times

    alone, beside, stop = [], [], threading.Event()
    for _ in range(5):
        alone += steps(args.steps)
        arrived: list[Handoff] = []

        def arrive(arrived: list[Handoff] = arrived) -> None:
            while not stop.is_set():
                arrived.append(fetched())
                stop.wait(args.pause)

        stop.clear()
        thread = threading.Thread(target=arrive)
        thread.start()
        beside += steps(args.steps)
        stop.set()
        thread.join()
        results["arrived"] = results.get("arrived", 0) + len(arrived)
    results["step_ms"] = statistics.median(alone) * 1e3
    results["step_beside_ms"] = statistics.median(beside) * 1e3
    results["ratio"] = statistics.median(beside) / statistics.median(alone)
    results["mean_ratio"] = statistics.mean(beside) / statistics.mean(alone)
    stats = engine.decode.stats()
    results["decode_in_graphs"] = f"{stats.graph_steps} of {stats.steps}"
    store.queue_push("want", "stop")
    store.queue_pop("bye")
    transport.close()
    store.queue_push("done", "")
    return results


def rank_main(args: argparse.Namespace) -> None:
    limit = datetime.timedelta(seconds=300)
    store = dist.TCPStore("127.0.0.1", args.port, is_master=False, timeout=limit)
    accelerated = args.direct and "cpu" not in args.backends
    if accelerated:
        torch.accelerator.set_device_index(args.rank)
    name = "gloo"
    if accelerated:
        device = torch.accelerator.current_accelerator()
        name = f"cpu:gloo,{device}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(name, store=store, rank=args.rank, world_size=2, timeout=limit)
    words = dist.PrefixStore("words", store).clone()
    if args.rank == 0:
        export(args, words)
    else:
        results = {"backends": args.backends, "direct": args.direct} | receive(args, words)
        print(json.dumps(results, indent=2))
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(results, file)
    os._exit(0)  # The other rank may have ended, so connections cannot be closed.


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", nargs=2, default=["cpu", "cuda"])
    parser.add_argument("--direct", action="store_true", help="from device to device")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=100, help="decode steps in each of ten rounds")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds between two handoffs")
    parser.add_argument("--json", help="write the results to a file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args)
    limit = datetime.timedelta(seconds=300)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=limit)
    command = [sys.executable, *sys.argv, "--port", str(store.port), "--rank"]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    codes = [rank.wait() for rank in ranks]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
