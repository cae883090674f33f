"""Costs of devgraph's base layer on a device, compared with the same work without devgraph.

    python benchmarks/foundation.py [--only NAME ...] [--backend cuda] [--layers 36]
                                    [--repeats 7] [--json FILE]

replay      host time of DeviceGraph.replay() and of the vendor's native replay of the same graph
runner      host time of DecodeRunner.run() with six device-resident input slots and padding, minus
            that of the native replay of a graph of the same work
prepare     host time of DecodeRunner.run() with and without a ``prepare`` that does nothing, with
            gradients off and on; also on the CPU reference
capture     time and memory to capture the default decode buckets up to 256, with devgraph and by
            hand with torch
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import devgraph as dg

WIDTH = 512
BUCKET = 16


class Block(nn.Module):
    """One layer of a decoder without attention: about a dozen small kernels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.gate(self.norm(x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(a) * b).tanh()


class Model(nn.Module):
    """A model with embedding, layers and logits; it reads six inputs, like a decode step."""

    def __init__(self, layers: int, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.cache = nn.Buffer(torch.zeros(4096, width))

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        seq_lens: torch.Tensor,
        request_slots: torch.Tensor,
        scales: torch.Tensor,
    ) -> torch.Tensor:
        x = self.embed(input_ids) + self.embed(positions) * scales[:, None]
        x = x * (seq_lens[:, None] + request_slots[:, None]).to(x.dtype).rsqrt()
        self.cache.index_copy_(0, slot_mapping, x)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.T


SLOTS = [
    dg.InputSlot("input_ids", ("tokens",), torch.int64, pad=dg.Pad.zero()),
    dg.InputSlot("positions", ("tokens",), torch.int64, pad=dg.Pad.zero()),
    dg.InputSlot("slot_mapping", ("tokens",), torch.int64, pad=dg.Pad.fill(4095)),
    dg.InputSlot("seq_lens", ("requests",), torch.int32, pad=dg.Pad.fill(1)),
    dg.InputSlot("request_slots", ("requests",), torch.int32, pad=dg.Pad.fill(1)),
    dg.InputSlot("scales", ("tokens",), torch.float32, pad=dg.Pad.fill(1.0)),
]


def inputs(rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the inputs of a step of ``rows`` requests."""
    ids = torch.randint(1024, (rows,), device=device)
    return {
        "input_ids": ids,
        "positions": torch.arange(rows, device=device),
        "slot_mapping": torch.arange(rows, device=device),
        "seq_lens": torch.full((rows,), 7, dtype=torch.int32, device=device),
        "request_slots": torch.arange(rows, dtype=torch.int32, device=device),
        "scales": torch.rand(rows, device=device),
    }


def host_us(run: Callable[[], object], synchronize: Callable[[], None], steps: int = 200) -> float:
    """Return the median host time of a call on an idle device in microseconds."""
    times = []
    for _ in range(steps):
        synchronize()
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def interleaved(
    runs: dict[str, Callable[[], object]], synchronize: Callable[[], None], repeats: int
) -> dict[str, float]:
    """Return the median host time of each run; the runs alternate ``repeats`` times."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            samples[name].append(host_us(run, synchronize))
    return {name: statistics.median(values) for name, values in samples.items()}


def measure_replay(backend: Any, model: Model, repeats: int) -> dict[str, float]:
    """Measure the host time of native and devgraph replays of graphs of the same work."""
    data = inputs(BUCKET, backend.device)
    captured = dg.capture(model, *data.values(), backend=backend)
    graph = captured.segments[0]
    by_hand = capture_by_hand(backend, model, [BUCKET])
    runs = {"native": by_hand[0][0].replay, "devgraph": graph.replay}
    result = interleaved(runs, backend.synchronize, repeats)
    nodes = graph.info().nodes
    captured.close()
    return {**result, "ratio": result["devgraph"] / result["native"], "nodes": nodes}


def make_runner(
    backend: Any, model: Callable[..., Any], buckets: list[int] | None, **options: Any
) -> dg.DecodeRunner:
    """Return a captured decode runner over the model."""

    def forward(batch: Any) -> torch.Tensor:
        return model(*(getattr(batch, slot.name) for slot in SLOTS))

    config = dg.PhaseConfig(policy="full", buckets=buckets)
    runner = dg.DecodeRunner(
        forward,
        inputs=SLOTS,
        outputs=dg.OutputSlot(rows="requests"),
        config=config,
        backend=backend,
        max_requests=max(buckets) if buckets else 256,
        **options,
    )
    runner.capture()
    return runner


def measure_runner(backend: Any, model: Model, repeats: int) -> dict[str, float]:
    """Measure the host time of a padded run minus that of a native replay of the same work."""
    runner = make_runner(backend, model, [BUCKET])
    data = inputs(BUCKET - 3, backend.device)
    by_hand = capture_by_hand(backend, model, [BUCKET])
    runs = {"native": by_hand[0][0].replay, "run": lambda: runner.run(data)}
    result = interleaved(runs, backend.synchronize, repeats)
    runner.close()
    return {**result, "above": result["run"] - result["native"]}


def measure_prepare(backend: Any, model: Model, repeats: int) -> dict[str, float]:
    """Measure the host time that an empty ``prepare`` adds to a run of one operation.

    The difference is small, so calls with and without ``prepare`` alternate. Each repeat gives the
    difference of the lower quartiles, and the result is the median of these differences.
    """
    data = inputs(BUCKET - 3, backend.device)
    runners = [
        make_runner(backend, lambda *given: given[-1] + 1, [BUCKET], prepare=one)
        for one in (None, lambda batch: None)
    ]
    result = {}
    for gradients in (False, True):
        above = []
        for _ in range(repeats):
            times: list[list[float]] = [[], []]
            with torch.inference_mode(not gradients), torch.set_grad_enabled(gradients):
                for _ in range(1000):
                    for runner, taken in zip(runners, times, strict=True):
                        backend.synchronize()
                        started = time.perf_counter()
                        runner.run(data)
                        taken.append(time.perf_counter() - started)
            without, with_one = (statistics.quantiles(taken)[0] * 1e6 for taken in times)
            above.append(with_one - without)
        result["gradients on" if gradients else "gradients off"] = statistics.median(above)
    for runner in runners:
        runner.close()
    return result


def capture_by_hand(backend: Any, model: Model, buckets: list[int]) -> list[Any]:
    """Capture the buckets with torch alone, as engines do: one pool, one stream, largest first."""
    namespace = backend.namespace
    stream, pool = namespace.Stream(), namespace.graph_pool_handle()
    largest = inputs(max(buckets), backend.device)
    out = torch.empty(max(buckets), 1024, device=backend.device)
    graphs = []
    for rows in sorted(buckets, reverse=True):
        views = [value[:rows] for value in largest.values()]
        for _ in range(2):
            model(*views)
        namespace.synchronize()
        graph = getattr(namespace, backend.graph_class_name)()
        with namespace.graph(graph, pool=pool, stream=stream):
            out[:rows].copy_(model(*views))
        graphs.append(graph)
    return [graphs, out, largest]


def measure_capture(backend: Any, model: Model, repeats: int) -> dict[str, float]:
    """Measure the seconds and bytes of captures of the default buckets up to 256."""
    from devgraph.runners.buckets import default_buckets

    repeats = min(repeats, 5)
    buckets = list(default_buckets("decode", 256))

    def cost(make: Callable[[], Any]) -> tuple[float, int]:
        gc.collect()
        backend.namespace.empty_cache()
        backend.synchronize()
        free = backend.memory_info()[0]
        started = time.perf_counter()
        kept = make()
        backend.synchronize()
        seconds = time.perf_counter() - started
        gc.collect()
        backend.namespace.empty_cache()
        used = free - backend.memory_info()[0]
        del kept
        gc.collect()
        return seconds, used

    hand, ours = [], []
    for _ in range(repeats):
        hand.append(cost(lambda: capture_by_hand(backend, model, buckets)))
        ours.append(cost(lambda: make_runner(backend, model, buckets)))
    hand_s, ours_s = (statistics.median(s for s, _ in side) for side in (hand, ours))
    hand_b, ours_b = (statistics.median(b for _, b in side) for side in (hand, ours))
    return {
        "buckets": len(buckets),
        "hand_seconds": hand_s,
        "seconds": ours_s,
        "seconds_ratio": ours_s / hand_s,
        "hand_mib": hand_b / 2**20,
        "mib": ours_b / 2**20,
        "bytes_ratio": ours_b / max(hand_b, 1),
    }


MEASURES = {
    "replay": measure_replay,
    "runner": measure_runner,
    "prepare": measure_prepare,
    "capture": measure_capture,
}


def main() -> None:
    """Run the measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json")
    args = parser.parse_args()
    backend = dg.get_backend(args.backend)
    torch.manual_seed(0)
    report = {"device": backend.device_name, "version": backend.version, "layers": args.layers}
    with torch.inference_mode():
        model = Model(args.layers).to(backend.device)
        for name in args.only:
            report[name] = MEASURES[name](backend, model, args.repeats)
    print(json.dumps(report, indent=2))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
