"""Cost of gates, overlap of a step with a transfer, and gates compared with breaks.

    python benchmarks/gates.py --json gates.json

Each row runs in its own process, which alternates between two graphs of the same step. ``with``
has gates. ``without`` has none; in rows of kind ``breaks``, it has breaks instead.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import devgraph as dg

LAYERS = 36
SHAPES = {"small": (1024, 2816, 8, 8), "8b": (4096, 12288, 32, 8)}
"""Hidden size, inner size, heads and KV heads."""

HEAD = 128
REPLAYS, ROUNDS, SEQUENCE = 20, 9, 8
ROWS = (
    *(("cost", "small", t, v) for t in (64, 2048) for v in ("waits", "both", "both_during")),
    *(("overlap", "small", t, v) for t in (64, 2048) for v in ("one", "sequence")),
    *(("breaks", "8b", t, v) for t in (64, 512, 2048) for v in ("loads", "sends")),
)
"""Kind, shape, tokens and variant of each row."""


class Model:
    """A model whose layers write keys and values to a cache and attend to the cache."""

    def __init__(self, shape: str, tokens: int, backend: str) -> None:
        hidden, inner, heads, kv_heads = SHAPES[shape]
        self.backend = dg.get_backend(backend)
        device = self.backend.device
        options: Any = {"device": device, "dtype": torch.bfloat16}
        self.heads, self.kv_heads = heads, kv_heads
        widths = (hidden, (heads + 2 * kv_heads) * HEAD), (heads * HEAD, hidden)
        sizes = (*widths, (hidden, 2 * inner), (inner, hidden))
        self.layers = [[torch.randn(s, **options) * 0.02 for s in sizes] for _ in range(LAYERS)]
        self.norm = torch.ones(hidden, **options)
        self.cache = torch.zeros(LAYERS, 2, tokens, kv_heads * HEAD, **options)
        self.x = torch.randn(tokens, hidden, **options)

    def layer(self, number: int, x: torch.Tensor) -> torch.Tensor:
        qkv, out, up, down = self.layers[number]
        mixed = F.rms_norm(x, self.norm.shape, self.norm) @ qkv
        q, k, v = mixed.split([self.heads * HEAD, *[self.kv_heads * HEAD] * 2], -1)
        for part, target in zip((k, v), self.cache[number], strict=True):
            target.copy_(part)
        k, v = (t.unflatten(-1, (self.kv_heads, HEAD)).transpose(0, 1) for t in self.cache[number])
        q = q.unflatten(-1, (self.heads, HEAD)).transpose(0, 1)
        seen = F.scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, enable_gqa=self.heads != self.kv_heads
        )
        x = x + seen[0].transpose(0, 1).flatten(1) @ out
        gate, value = (F.rms_norm(x, self.norm.shape, self.norm) @ up).chunk(2, -1)
        return x + (F.silu(gate) * value) @ down

    def step(self, before: Callable[[int], None], after: Callable[[int], None]) -> Any:
        """Return the step with a call of ``before`` and of ``after`` around each layer."""

        def run(x: torch.Tensor) -> torch.Tensor:
            for number in range(LAYERS):
                before(number)
                x = self.layer(number, x)
                after(number)
            return x

        return run

    def capture(
        self,
        before: Callable[[int], None] = lambda layer: None,
        after: Callable[[int], None] = lambda layer: None,
        **options: Any,
    ) -> dg.Captured:
        return dg.capture(self.step(before, after), self.x, backend=self.backend, **options)

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds from the call of ``run`` until the device has finished."""
        self.backend.synchronize()
        begin = time.perf_counter()
        run()
        self.backend.synchronize()
        return time.perf_counter() - begin

    def compare(
        self,
        new: Callable[[], None],
        old: Callable[[], None],
        count: int,
        prepare: Callable[[], None] = lambda: None,
    ) -> Any:
        """Return the median microseconds per replay of ``new`` and of ``old``, and their ratio.

        Each call of ``new`` or ``old`` runs ``count`` replays. ``prepare`` is called before each
        call of ``new`` and is not timed.
        """
        pairs = []
        for _ in range(ROUNDS + 1):
            prepare()
            pairs.append((self.seconds(new), self.seconds(old)))
        columns = zip(*pairs[1:], strict=True)
        ours, theirs = (statistics.median(column) / count * 1e6 for column in columns)
        return {"with": ours, "without": theirs, "ratio": ours / theirs}


def wait(layer: int) -> None:
    dg.wait(f"kv.{layer}")


def signal(layer: int) -> None:
    dg.signal(f"kv.{layer}")


def gates_of(captured: dg.Captured) -> list[dg.Gate]:
    return [captured.gates[f"kv.{layer}"] for layer in range(LAYERS)]


def same(one: dg.Captured, other: dg.Captured) -> None:
    """Exit unless one replay of each returns the same bits."""
    for gate in gates_of(one) if one.gates else ():
        if "wait" in gate.kinds:
            gate.open()
    want = other.replay().clone()
    if not torch.equal(one.replay(), want):
        raise SystemExit("the results differ")


def cost(model: Model, variant: str) -> Any:
    """Compare a graph with gates to the same graph without gates."""
    plain = model.capture()
    gated = model.capture(wait) if variant == "waits" else model.capture(wait, signal)
    same(gated, plain)
    gates = gates_of(gated)

    during = variant.endswith("during")

    def open_all() -> None:
        for gate in gates:
            gate.open()

    def with_gates() -> None:
        for _ in range(REPLAYS):
            gated.replay()
            if during:
                open_all()

    def without() -> None:
        for _ in range(REPLAYS):
            plain.replay()

    def before() -> None:
        for _ in range(0 if during else REPLAYS):
            open_all()

    counts = {"nodes": [gated.info().nodes, plain.info().nodes]}
    return {**model.compare(with_gates, without, REPLAYS, before), **counts}


def overlap(model: Model, variant: str) -> Any:
    """Return the share of a transfer that overlaps with the step; both take equally long.

    ``one`` step is launched on an idle device. In a ``sequence``, the host launches each step while
    the device executes the previous one.
    """
    namespace = torch.get_device_module(model.backend.device)
    steps = SEQUENCE if variant == "sequence" else 1
    plain, gated = model.capture(), model.capture(wait)
    same(gated, plain)
    gates, stream = gates_of(gated), namespace.Stream()

    def seconds(run: Callable[[], object]) -> float:
        """Return the median of the seconds for a call of ``run``."""

        def runs() -> None:
            for _ in range(steps):
                run()

        return statistics.median(model.seconds(runs) for _ in range(ROUNDS)) / steps

    def transfer(cycles: int, *, opens: bool) -> None:
        with namespace.stream(stream):
            for gate in gates:
                namespace._sleep(cycles)
                if opens:
                    gate.open_after(stream)

    def layerwise() -> None:
        gated.replay()
        transfer(cycles, opens=True)

    plain.replay()
    alone = seconds(plain.replay)
    trial = 100_000
    cycles = int(trial * alone / seconds(lambda: transfer(trial, opens=False)))
    layerwise()
    sent = seconds(lambda: transfer(cycles, opens=False))
    both = seconds(layerwise)
    return {
        "step": alone * 1e6,
        "transfer": sent * 1e6,
        "layerwise": both * 1e6,
        "hidden": (alone + sent - both) / sent,
    }


def breaks(model: Model, variant: str) -> Any:
    """Compare ``full`` with gates to ``breakable`` with a host wait in each layer."""
    return (loads if variant == "loads" else sends)(model)


def loads(model: Model) -> Any:
    """Wait in each layer for a finished transfer, like an engine that loads a cache."""
    namespace = torch.get_device_module(model.backend.device)
    stream = namespace.Stream()
    events = [namespace.Event() for _ in range(LAYERS)]

    @dg.no_graph
    def host_wait(layer: int) -> None:
        events[layer].synchronize()

    broken = model.capture(host_wait, policy="breakable")
    gated = model.capture(wait)
    same(gated, broken)
    gates = gates_of(gated)

    def with_gates() -> None:
        gated.replay()
        for gate in gates:
            gate.open_after(stream)

    def with_breaks() -> None:
        for event in events:
            event.record(stream)
        broken.replay()

    return model.compare(with_gates, with_breaks, 1)


def sends(model: Model) -> Any:
    """Send the cache of each layer when the host knows that the layer has finished."""
    namespace = torch.get_device_module(model.backend.device)
    stream = namespace.Stream()
    sent = torch.zeros(model.cache.shape, dtype=model.cache.dtype, pin_memory=True)

    def send(layer: int) -> None:
        with namespace.stream(stream):
            sent[layer].copy_(model.cache[layer], non_blocking=True)

    @dg.no_graph
    def host_send(layer: int) -> None:
        namespace.current_stream().synchronize()
        send(layer)

    broken = model.capture(after=host_send, policy="breakable")
    gated = model.capture(after=signal)
    same(gated, broken)
    gates = gates_of(gated)

    def with_gates() -> None:
        gated.replay()
        for layer, gate in enumerate(gates):
            gate.wait()
            send(layer)

    return model.compare(with_gates, broken.replay, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--json", help="file for the rows")
    parser.add_argument("--only", help="kind of rows: cost, overlap or breaks")
    parser.add_argument("--row", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        kind, shape, tokens, variant = args.row
        torch.manual_seed(0)
        with torch.inference_mode():
            model = Model(shape, int(tokens), args.backend)
            row = {"cost": cost, "overlap": overlap, "breaks": breaks}[kind](model, variant)
        print(json.dumps(row))
        return
    rows = []
    for kind, shape, tokens, variant in ROWS:
        if args.only not in (None, kind):
            continue
        command = [sys.executable, __file__, "--backend", args.backend]
        command += ["--row", kind, shape, str(tokens), variant]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            row: dict[str, Any] = {"error": done.stderr.strip().splitlines()[-1:]}
            print(done.stderr[-2000:], file=sys.stderr)
        else:
            row = json.loads(done.stdout.splitlines()[-1])
        rows.append({"kind": kind, "shape": shape, "tokens": tokens, "variant": variant, **row})
        figures = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in row.items()
        )
        print(f"{kind:8} {shape:6} {tokens:5} {variant:12} {figures}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
