"""Speed of ``dg.graphed`` compared with eager, raw graphs and other graphed callables.

    python benchmarks/graphed.py [--quick] [--only SHAPE ...] [--contenders NAME ...] [--rounds N]
                                 [--backend cuda] [--small] [--json FILE]

eager       the model without graphs
graphed     ``dg.graphed``
raw         a graph of torch, replayed without copies
copies      a graph of torch with copies of inputs and outputs, as in ``graphed``
torch, dg   ``make_graphed_callables`` of torch and of devgraph
tensordict  ``CudaGraphModule`` of tensordict
whole       ``dg.capture`` of forward, backward and optimizer (training only)

In each round, each contender runs all shapes in a new process. The table has the median over the
rounds and the speedup over eager. ``=`` means that the outputs equal those of eager bit for bit.
``dropped`` tells whether ``min_speedup=1.05`` closed the graph. ``first`` has the seconds of the
first two calls. The last line has the host time of a call with a known key and four tensors, minus
the time of its copies and its launch.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import devgraph as dg

CONTENDERS = ("eager", "raw", "copies", "graphed", "torch", "dg", "tensordict", "whole")
QUICK = ("eager", "raw", "graphed", "torch", "tensordict")
SECONDS = {True: 0.2, False: 1.0}
"""Seconds of one timing, by ``--quick``."""


class Block(nn.Module):
    """A transformer block, with modulation by a condition if ``modulated``."""

    def __init__(self, width: int, heads: int, hidden: int, *, modulated: bool, gated: bool):
        super().__init__()
        self.heads, self.gated = heads, gated
        self.norms = nn.ModuleList(
            nn.LayerNorm(width, elementwise_affine=not modulated, eps=1e-6) for _ in range(2)
        )
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up = nn.Linear(width, hidden * (1 + gated))
        self.down = nn.Linear(hidden, width)
        self.modulation = nn.Linear(width, 6 * width) if modulated else None

    def forward(self, x: torch.Tensor, c: torch.Tensor | None = None, causal: bool = False) -> Any:
        change: list[Any] = [0, 0, 1, 0, 0, 1]
        if self.modulation is not None and c is not None:
            change = [*self.modulation(F.silu(c))[:, None].chunk(6, dim=-1)]
        h = self.norms[0](x) * (1 + change[1]) + change[0]
        q, k, v = self.qkv(h).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        x = x + change[2] * self.out(h.transpose(1, 2).flatten(2))
        h = self.up(self.norms[1](x) * (1 + change[4]) + change[3])
        if self.gated:
            gate, h = h.chunk(2, dim=-1)
            h = F.silu(gate) * h
        else:
            h = F.gelu(h, approximate="tanh")
        return x + change[5] * self.down(h)


class DiT(nn.Module):
    """A diffusion transformer over latents, or over tokens if ``patch`` is 0."""

    def __init__(self, depth: int, width: int, heads: int, *, hidden: int = 0, patch: int = 2):
        super().__init__()
        hidden = hidden or 4 * width
        self.patch = nn.Conv2d(4, width, patch, patch) if patch else None
        self.time = nn.Sequential(nn.Linear(256, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(
            Block(width, heads, hidden, modulated=True, gated=not patch) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.head = nn.Linear(width, 8 * patch * patch if patch else width)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(128, device=t.device, dtype=torch.float32)
        angles = t.float()[:, None] * torch.exp(steps * -0.07)
        c = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype))
        if self.patch is not None:
            x = self.patch(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, c)
        return self.head(self.norm(x))


class Stack(nn.Module):
    """A stack of transformer blocks without a condition."""

    def __init__(self, depth: int, width: int, heads: int, hidden: int):
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(width, heads, hidden, modulated=False, gated=True) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class GPT(nn.Module):
    """A language model that returns its loss."""

    def __init__(self, depth: int, width: int, heads: int, vocabulary: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, 4 * width, modulated=False, gated=False) for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, causal=True)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def mlp(width: int) -> nn.Module:
    layers = [layer for _ in range(3) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers)


SHAPES: dict[str, tuple[Callable[[bool], nn.Module], Callable[[bool], list[Any]]]] = {
    "mlp 3x256, batch 1": (lambda s: mlp(256), lambda s: [(1, 256)]),
    "DiT-XL/2 256px, batch 2": (
        lambda s: DiT(2, 64, 4) if s else DiT(28, 1152, 16),
        lambda s: [(2, 4, 8, 8) if s else (2, 4, 32, 32), (2,)],
    ),
    "DiT-B/2 256px, batch 2": (
        lambda s: DiT(2, 32, 4) if s else DiT(12, 768, 12),
        lambda s: [(2, 4, 8, 8) if s else (2, 4, 32, 32), (2,)],
    ),
    "action expert 18x1024, 50 tokens": (
        lambda s: Stack(2, 32, 4, 64) if s else Stack(18, 1024, 8, 4096),
        lambda s: [(1, 5, 32) if s else (1, 50, 1024)],
    ),
    "Z-Image 256px": (
        lambda s: DiT(2, 64, 4, patch=0) if s else DiT(30, 3840, 30, hidden=10240, patch=0),
        lambda s: [(1, 8, 64) if s else (1, 256 + 32, 3840), (1,)],
    ),
    "Z-Image 512px": (
        lambda s: DiT(2, 64, 4, patch=0) if s else DiT(30, 3840, 30, hidden=10240, patch=0),
        lambda s: [(1, 16, 64) if s else (1, 1024 + 32, 3840), (1,)],
    ),
    "video 30x1536, 32760 tokens": (
        lambda s: DiT(2, 32, 4, patch=0) if s else DiT(30, 1536, 12, hidden=8960, patch=0),
        lambda s: [(1, 64, 32) if s else (1, 32760, 1536), (1,)],
    ),
    "GPT 12x768 training, T=128": (
        lambda s: GPT(2, 32, 4, 64) if s else GPT(12, 768, 12, 50304),
        lambda s: [(1, 8) if s else (1, 128)] * 2,
    ),
    "GPT 12x768 training, T=512": (
        lambda s: GPT(2, 32, 4, 64) if s else GPT(12, 768, 12, 50304),
        lambda s: [(1, 16) if s else (1, 512)] * 2,
    ),
}
"""For each name, two functions with the argument ``small``: they return the model and the shapes of
its inputs."""


class Case:
    """A model with inputs on a device."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        make, shapes = SHAPES[name]
        self.backend = dg.get_backend(args.backend)
        device = self.backend.device
        self.dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.training = "training" in name
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with device:
                self.model = make(args.small).requires_grad_(self.training)
                self.inputs = [self._inputs(shapes(args.small)) for _ in range(2)]
        finally:
            torch.set_default_dtype(before)
        self.seconds = SECONDS[args.quick] / (20 if args.small else 1)
        on_device = device.type != "cpu"
        self.optimizer = (
            torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True, capturable=on_device)
            if self.training
            else None
        )

    def _inputs(self, shapes: list[Any]) -> tuple[torch.Tensor, ...]:
        if self.training:
            most = self.model.tokens.num_embeddings
            return tuple(torch.randint(most, shape) for shape in shapes)
        return tuple(torch.randn(shape) for shape in shapes)

    def step(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``run`` itself, or a training step around it."""
        if self.optimizer is None:
            return run
        optimizer = self.optimizer

        def train(*inputs: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = run(*inputs)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return train

    def digest(self, step: Callable[..., Any]) -> str:
        """Return a hash of the outputs for both inputs, and in training also of the gradients."""
        bits = hashlib.sha256()
        for inputs in self.inputs:
            if self.training:
                self.model.zero_grad()
                loss = step(*inputs)
                loss.backward()
                tensors = [loss.detach(), *(p.grad for p in self.model.parameters())]
            else:
                tensors = [step(*inputs)]
            for tensor in tensors:
                bits.update(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy())
        return bits.hexdigest()[:12]

    def time(self, step: Callable[..., Any]) -> float:
        """Return the microseconds of one call in the fastest of three timings."""
        synchronize, count = self.backend.synchronize, 1
        one, other = self.inputs
        step(*one)
        best = float("inf")
        for turn in range(4):
            synchronize()
            started = time.perf_counter()
            for _ in range(count):
                step(*one)
                step(*other)
            synchronize()
            seconds = (time.perf_counter() - started) / (2 * count)
            if turn == 0:  # Determine the number of calls of a timing.
                count = max(1, min(20000, int(self.seconds / 3 / (2 * seconds))))
                continue
            best = min(best, seconds)
            if seconds > self.seconds:
                break
        return best * 1e6


def raw_graph(case: Case, *, copies: bool) -> Callable[..., Any]:
    """Return the replay of a graph that torch's own API captured."""
    namespace: Any = getattr(torch, case.backend.device.type)
    static = tuple(tensor.clone() for tensor in case.inputs[0])
    side = namespace.Stream()
    side.wait_stream(namespace.current_stream())
    with namespace.stream(side):
        for _ in range(2):
            case.model(*static)
    namespace.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = case.model(*static)

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        if copies:
            for target, source in zip(static, inputs, strict=True):
                target.copy_(source)
        graph.replay()
        return output.clone() if copies else output

    def checked(*inputs: torch.Tensor) -> torch.Tensor:
        for target, source in zip(static, inputs, strict=True):
            target.copy_(source)
        return run(*inputs)

    run.checked = checked  # type: ignore[attr-defined]
    return run


def runner_of(contender: str, case: Case, **options: Any) -> Callable[..., Any]:
    """Return a callable that runs the model as the contender does.

    Raises:
        LookupError: the contender does not support this case.
    """
    model = case.model
    if contender == "eager":
        return model
    if contender == "graphed":
        return dg.graphed(model, backend=case.backend, **options)
    if contender in ("raw", "copies"):
        if case.training or case.backend.device.type == "cpu":
            raise LookupError("inference on a device only")
        return raw_graph(case, copies=contender == "copies")
    if contender == "dg" and case.training:
        return dg.make_graphed_callables(model, case.inputs[0])  # type: ignore[no-any-return]
    if contender == "torch":
        if case.backend.device.type == "cpu":
            raise LookupError("devices only")
        return torch.cuda.make_graphed_callables(model, case.inputs[0])  # type: ignore[no-any-return]
    if contender == "tensordict":
        if case.training or case.backend.device.type == "cpu":
            raise LookupError("inference on a device only")
        from tensordict.nn import CudaGraphModule

        return CudaGraphModule(model)  # type: ignore[no-any-return]
    raise LookupError("training only")


def measure(contender: str, case: Case) -> dict[str, Any]:
    """Return the results of one contender for one case."""
    figures: dict[str, Any] = {}
    if contender == "whole":
        if not case.training or case.backend.device.type == "cpu":
            raise LookupError("training on a device only")
        case.optimizer.zero_grad()
        captured = dg.capture(case.step(case.model), *case.inputs[0], backend=case.backend)
        return {"us": case.time(captured.replay)}
    case.backend.synchronize()
    started = time.perf_counter()
    run = runner_of(contender, case)
    for _ in range(2):
        case.step(run)(*case.inputs[0])
    case.backend.synchronize()
    figures["first"] = time.perf_counter() - started
    torch.manual_seed(1)
    for parameter in case.model.parameters() if case.training else ():
        parameter.data.normal_(std=0.02)  # The steps above changed the parameters.
    figures["bits"] = case.digest(getattr(run, "checked", run))
    figures["us"] = case.time(case.step(run))
    if contender == "graphed" and not case.training:
        run.close()  # type: ignore[attr-defined]
        dg.ungraphed(case.model)
        judged = dg.graphed(case.model, backend=case.backend, min_speedup=1.05)
        for _ in range(9):
            judged(*case.inputs[0])
        figures["dropped"] = judged.stats()["dropped"] > 0
        dg.ungraphed(case.model)
    return figures


def host_time(backend: Any) -> float:
    """Return the host microseconds of a known key with four tensors, without copies and launch."""
    device = backend.device
    inputs = tuple(torch.randn(16, device=device) for _ in range(4))
    step = dg.graphed(lambda a, b, c, d: a + b + c + d, backend=backend)
    for _ in range(4):
        output = step(*inputs)
    static, captured = (
        [tensor.clone() for tensor in inputs],
        dg.capture(lambda a, b, c, d: a + b + c + d, *inputs, backend=backend),
    )
    launch = captured.segments[0].launch

    def bare() -> torch.Tensor:
        torch._foreach_copy_(static, inputs)
        launch()
        return output.clone()

    def host(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(60):
            backend.synchronize()
            started = time.perf_counter()
            for _ in range(20):  # More calls would fill the queue of the stream and block.
                call()
            times.append((time.perf_counter() - started) / 20)
        return min(times) * 1e6

    with torch.no_grad():
        return host(lambda: step(*inputs)) - host(bare)


def alone(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the results of one contender for each shape."""
    [contender] = args.contenders
    for name in args.only:
        try:
            case = Case(name, args)
            with torch.set_grad_enabled(case.training):
                yield {name: measure(contender, case)}
        except LookupError:
            pass
        except Exception as error:
            yield {name: {"error": f"{type(error).__name__}: {error}"[:200]}}
        case = None  # type: ignore[assignment]
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if contender == "graphed":
        yield {"host": host_time(dg.get_backend(args.backend))}


def in_process(args: argparse.Namespace, contender: str) -> dict[str, Any]:
    """Run a contender in a new process, and return its results."""
    command = [sys.executable, __file__, "--alone", "--contenders", contender, "--only", *args.only]
    command += ["--backend", args.backend]
    command += [f"--{flag}" for flag in ("small", "quick") if getattr(args, flag)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    figures: dict[str, Any] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            figures.update(json.loads(line))
    if done.returncode:
        figures.update({name: {"error": f"ended with {done.returncode}"} for name in args.only})
    return figures


def median(rounds: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the results of one shape with the median time of the rounds."""
    figures = [found[name] for found in rounds if name in found]
    times = [found["us"] for found in figures if "us" in found]
    last = dict(figures[-1]) if figures else {}
    return {**last, "us": statistics.median(times)} if times else last


def table(report: dict[str, Any], contenders: list[str]) -> Iterator[str]:
    """Yield the lines of the table of results."""
    yield "| shape | " + " | ".join([*contenders, "dropped", "first"]) + " |"
    yield "| --- " * (len(contenders) + 3) + "|"
    for name, row in report["shapes"].items():
        cells, eager = [], row.get("eager", {})
        for contender in contenders:
            figures = row.get(contender, {})
            if "us" not in figures:
                cells.append("-")
                continue
            text = f"{figures['us']:.1f} us"
            if contender != "eager" and "us" in eager:
                text += f" {eager['us'] / figures['us']:.2f}x"
                if "bits" in figures:
                    text += " =" if figures["bits"] == eager.get("bits") else " differs"
            cells.append(text)
        own = row.get("graphed", {})
        extra = own.get("first", 0.0) - eager.get("first", 0.0)
        cells += [{True: "yes", False: "no"}.get(own.get("dropped"), "-"), f"{extra:+.2f} s"]
        yield f"| {name} | " + " | ".join(cells) + " |"
    if report["host"] is not None:
        yield f"known key of four tensors: {report['host']:.1f} us of host time without the replay"
    for name, row in report["shapes"].items():
        for contender, figures in row.items():
            if "error" in figures:
                yield f"{name}, {contender}: {figures['error']}"


def main(argv: list[str] | None = None) -> None:
    """Run the contenders alternately and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*SHAPES], default=[*SHAPES], metavar="SHAPE")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--quick", action="store_true", help="one round of short timings")
    parser.add_argument("--small", action="store_true", help="tiny models, for a quick test")
    parser.add_argument("--json")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.alone:
        for figures in alone(args):
            print(json.dumps(figures), flush=True)
        return
    contenders = list(args.contenders or (QUICK if args.quick else CONTENDERS))
    rounds: dict[str, list[dict[str, Any]]] = {contender: [] for contender in contenders}
    for turn in range(args.rounds or (1 if args.quick else 3)):
        for contender in (
            contenders[turn % len(contenders) :] + contenders[: turn % len(contenders)]
        ):
            rounds[contender].append(in_process(args, contender))
    shapes = {
        name: {contender: median(found, name) for contender, found in rounds.items()}
        for name in args.only
    }
    hosts = [found["host"] for found in rounds.get("graphed", []) if "host" in found]
    report = {"torch": torch.__version__, "shapes": shapes, "host": min(hosts, default=None)}
    print("\n".join(table(report, contenders)), flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(report, file, indent=2)


if __name__ == "__main__":
    main()
