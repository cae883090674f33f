"""Policy piecewise with Inductor, compared with breakable and with torch.compile's own graphs.

    python benchmarks/piecewise.py [--json FILE] [--layers 28] [--seconds 160] [--only capture]

A decoder with the shape of Qwen3-0.6B (28 layers, width 1024, 16 query heads and 8 key-value heads
of size 128, random weights in bfloat16) runs prefill steps of one request. The region is attention:
causal SDPA over the tokens of the step, with the same call in every contender.

prefill   PrefillRunner with 30 buckets up to 4096 tokens: capture time, then host and wall time per
          step under breakable, piecewise+inductor, piecewise+eager and without graphs
fixed     one bucket compared with torch.compile(mode="reduce-overhead"), first with attention as a
          break in both, then with the whole step in one graph in both

Host time is the time of a call on an idle device. Wall time is the time per call of consecutive
calls. Contenders alternate, and results are medians. Parts that do not fit into --seconds are
skipped. The benchmark needs a CUDA device and Triton.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import devgraph as dg

HEADS, KV_HEADS, HEAD, WIDTH, INNER, VOCAB = 16, 8, 128, 1024, 3072, 151_936
LONGEST = 4096
BUCKETS = [128, 256, *range(288, 513, 32), *range(576, 1025, 64), *range(1280, LONGEST + 1, 256)]
SIZES = [512, 256, 1024, 2048, 4096]
FIXED = 512
REPEATS = 7


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
    """Write causal self-attention of the step's tokens to ``out``."""
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
    out.copy_(attended[0].transpose(0, 1))


attend_region = dg.region(mutates=("out",))(attend)
attend_break = torch.compiler.disable(attend)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary position embedding to ``x``, ``[tokens, heads, head_dim]``."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self) -> None:
        super().__init__()

        def linear(rows: int, columns: int) -> nn.Linear:
            return nn.Linear(rows, columns, bias=False)

        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.norm_q, self.norm_k = nn.RMSNorm(HEAD, eps=1e-6), nn.RMSNorm(HEAD, eps=1e-6)
        self.qkv = linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD)
        self.out = linear(HEADS * HEAD, WIDTH)
        self.gate_up = linear(WIDTH, 2 * INNER)
        self.down = linear(INNER, WIDTH)

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attention: Callable[..., None],
    ) -> torch.Tensor:
        tokens = x.shape[0]
        heads = self.qkv(self.norm1(x)).view(tokens, HEADS + 2 * KV_HEADS, HEAD)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        q, k = rotate(self.norm_q(q), cos, sin), rotate(self.norm_k(k), cos, sin)
        attended = torch.empty_like(q)
        attention(q, k, v, attended)
        x = x + self.out(attended.view(tokens, HEADS * HEAD))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    """A decoder with embedding, layers and norm, without logits."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        angles = torch.outer(torch.arange(LONGEST), 1e6 ** -(torch.arange(0, HEAD, 2) / HEAD))
        self.cos, self.sin = nn.Buffer(angles.cos()), nn.Buffer(angles.sin())

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attention: Callable[..., None] = attend_region,
    ) -> torch.Tensor:
        x = self.embed(ids)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        for layer in self.layers:
            x = layer(x, cos, sin, attention)
        return self.norm(x)


def make_model(layers: int, device: torch.device) -> Model:
    """Return the model with random weights in bfloat16."""
    torch.manual_seed(0)
    with device:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return Model(layers).requires_grad_(False)
        finally:
            torch.set_default_dtype(before)


class Report:
    """A report that is written to a file after each result; a failed part does not end the run."""

    def __init__(self, path: str | None) -> None:
        self._path = path
        self.data: dict[str, Any] = {}
        self.failed = False

    def attempt(self, name: str, part: Callable[[], None]) -> None:
        """Run a part; if it fails, report the error."""
        try:
            part()
        except Exception as error:
            traceback.print_exc()
            self.failed = True
            self.put(f"{name} failed", f"{type(error).__name__}: {error}"[:2000])

    def put(self, name: str, value: Any) -> None:
        """Add a result, print it and write the file."""
        self.data[name] = value
        print(name, json.dumps(value), flush=True)
        if self._path:
            with open(self._path, "w") as file:
                json.dump(self.data, file, indent=1)


def host_ms(call: Callable[[], Any], steps: int) -> list[float]:
    """Time ``steps`` calls, each on an idle device."""
    taken = []
    for _ in range(steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        taken.append((time.perf_counter() - started) * 1e3)
    torch.cuda.synchronize()
    return taken


def wall_ms(call: Callable[[], Any], steps: int) -> float:
    """Time ``steps`` consecutive calls; return milliseconds per call."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3 / steps


def compare(
    calls: dict[str, Callable[[], Any]], steps: int, repeats: int = REPEATS
) -> dict[str, dict[str, float]]:
    """Return median host and wall milliseconds of each call; calls alternate."""
    host: dict[str, list[float]] = {name: [] for name in calls}
    wall: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    for _ in range(repeats):
        for name, call in calls.items():
            wall[name].append(wall_ms(call, steps))
        for name, call in calls.items():
            host[name].extend(host_ms(call, min(steps, 10)))
    return {
        name: {
            "host_ms": statistics.median(host[name]),
            "wall_ms": statistics.median(wall[name]),
        }
        for name in calls
    }


class Contender:
    """A prefill runner over the model under one policy, captured for all buckets."""

    def __init__(self, model: Model, backend: Any, name: str) -> None:
        policy, _, compiler = name.partition("+")
        config = {
            "policy": policy,
            "buckets": BUCKETS,
            **({"compiler": compiler} if compiler else {}),
        }
        self.runner = dg.PrefillRunner(
            lambda batch: model(batch.ids, batch.positions),
            [
                dg.InputSlot("ids", ("tokens",), torch.int64, pad=dg.Pad.zero()),
                dg.InputSlot("positions", ("tokens",), torch.int64, pad=dg.Pad.zero()),
            ],
            config=config,
            backend=backend,
            max_tokens=LONGEST,
            max_requests=1,
            progress=False,
        )

    def capture(self) -> dict[str, Any]:
        """Capture twice, the second time with compiled code; return times, counts and memory."""
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        started = time.perf_counter()
        self.runner.capture()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        phases, counts = self.phases(), dict(self.runner.stats().updates)
        self.runner.invalidate("measured again")
        started = time.perf_counter()
        self.runner.capture()
        torch.cuda.synchronize()
        return {
            "buckets": len(BUCKETS),
            "seconds": seconds,
            "phases": phases,
            "after_compile_seconds": seconds - phases.get("compile", 0.0),
            "again_seconds": time.perf_counter() - started,
            "again_phases": self.phases(),
            "counts": counts,
            "mib": (torch.cuda.memory_reserved() - before) / 2**20,
        }

    def phases(self) -> dict[str, float]:
        """Return seconds by phase over all buckets."""
        return dict(self.runner.stats().phase_seconds)

    def captured(self, tokens: int) -> dg.Captured:
        """Return the captured step of one bucket."""
        entries = self.runner.graphs
        return next(e.captured for e in entries if e.key.bucket == tokens)


def inputs(tokens: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the inputs of a step."""
    generator = torch.Generator(device).manual_seed(tokens)
    ids = torch.randint(VOCAB, (tokens,), device=device, generator=generator)
    return {"ids": ids, "positions": torch.arange(tokens, device=device)}


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of ``want``."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def measure_prefill(model: Model, contenders: dict[str, Contender], report: Report) -> None:
    """Report times of all contenders at every size, and distances of their outputs from eager."""
    result: dict[int, Any] = {}
    for tokens in SIZES:
        result[tokens] = measure_size(model, contenders, tokens)
        report.put("prefill", result)


def measure_size(model: Model, contenders: dict[str, Contender], tokens: int) -> dict[str, Any]:
    """Return times of all contenders at one size, and distances of their outputs from eager."""
    data = inputs(tokens, model.embed.weight.device)
    want = model(**data)
    calls: dict[str, Callable[[], Any]] = {
        name: lambda c=c: c.runner.run(data) for name, c in contenders.items()
    }
    distances = {name: distance(call(), want) for name, call in calls.items()}
    calls["eager"] = lambda: model(**data)
    times = compare(calls, steps=20)
    ratio = times["piecewise+inductor"]["wall_ms"] / times["breakable"]["wall_ms"]
    return {**times, "inductor_to_breakable": ratio, "distance": distances}


def measure_fixed(
    model: Model, ours: dg.Captured, attention: Callable[..., None], name: str, report: Report
) -> None:
    """Compare one bucket with torch.compile's own graphs, with ``attention`` in both."""
    data = inputs(FIXED, model.embed.weight.device)
    want = model(**data, attention=attend)
    theirs = torch.compile(model, mode="reduce-overhead", dynamic=False)

    def reduce_overhead() -> torch.Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return theirs(**data, attention=attention)

    started = time.perf_counter()
    for _ in range(4):
        got = reduce_overhead()
    torch.cuda.synchronize()
    compiled = time.perf_counter() - started
    times = compare({"piecewise": ours.replay, "reduce-overhead": reduce_overhead}, steps=30)
    report.put(
        name,
        {
            **times,
            "host_ratio": times["piecewise"]["host_ms"] / times["reduce-overhead"]["host_ms"],
            "wall_ratio": times["piecewise"]["wall_ms"] / times["reduce-overhead"]["wall_ms"],
            "segments": len(ours.segments),
            "reduce_overhead_first_seconds": compiled,
            "reduce_overhead_distance": distance(got, want),
        },
    )


def whole_step(model: Model, backend: Any) -> dg.Captured:
    """Capture the step as one piece that includes attention."""
    data = inputs(FIXED, backend.device)

    def step(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return model(ids, positions, attend)

    return dg.capture(
        step, *data.values(), policy="piecewise", compiler="inductor", backend=backend
    )


def fixed_breaks(model: Model, contenders: dict[str, Contender], report: Report) -> None:
    """Compare one bucket with attention between graphs in both."""
    ours = contenders["piecewise+inductor"].captured(FIXED)
    torch._dynamo.reset()
    measure_fixed(model, ours, attend_break, "fixed, attention breaks", report)


def fixed_whole(model: Model, backend: Any, report: Report) -> None:
    """Compare one bucket with the whole step in one graph in both."""
    whole = whole_step(model, backend)
    report.put("whole step", {"phases": whole.phases, **whole.stats()})
    measure_fixed(model, whole, attend, "fixed, one graph", report)


def with_eager(model: Model, contenders: dict[str, Contender], report: Report) -> None:
    """Measure the prefill sizes again, with uncompiled pieces as an additional contender."""
    eager = Contender(model, dg.get_backend("cuda"), "piecewise+eager")
    report.put("capture piecewise+eager", eager.capture())
    measure_prefill(model, {**contenders, "piecewise+eager": eager}, report)


def main() -> None:
    """Run the parts that fit into the time limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--seconds", type=float, default=160.0)
    parser.add_argument("--only", choices=["capture"], help="stop after the captures")
    args = parser.parse_args()
    started = time.perf_counter()
    backend = dg.get_backend("cuda")
    report = Report(args.json)
    report.put("device", f"{backend.device_name}, {backend.version}, {args.layers} layers")

    def left() -> float:
        return args.seconds - (time.perf_counter() - started)

    with torch.no_grad():
        model = make_model(args.layers, backend.device)
        contenders: dict[str, Contender] = {}
        for name in ("breakable", "piecewise+inductor"):
            contenders[name] = Contender(model, backend, name)
            report.put(f"capture {name}", contenders[name].capture())
        captures = [report.data[f"capture {name}"] for name in contenders]
        report.put(
            "capture ratios",
            {
                "after compile": captures[1]["after_compile_seconds"] / captures[0]["seconds"],
                "again": captures[1]["again_seconds"] / captures[0]["again_seconds"],
            },
        )
        if args.only == "capture":
            return
        report.attempt("prefill", lambda: measure_prefill(model, contenders, report))
        if left() > 20:
            report.attempt("piecewise+eager", lambda: with_eager(model, contenders, report))
        # Run these last: graph trees of torch.compile free cuBLAS workspaces that captures use.
        if left() > 20:
            report.attempt("breaks", lambda: fixed_breaks(model, contenders, report))
        if left() > 30:
            report.attempt("one graph", lambda: fixed_whole(model, backend, report))
        report.put("seconds", time.perf_counter() - started)
    sys.exit(report.failed)


if __name__ == "__main__":
    main()
