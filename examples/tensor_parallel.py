"""Tensor parallelism: a small Llama-like model on several ranks, with all-reduces in its graphs.

    torchrun --standalone --nproc-per-node 2 examples/tensor_parallel.py --check
    python examples/tensor_parallel.py            # the same tokens on one device

The weights of every layer are split by columns and by rows, so each rank computes partial sums, and
two all-reduces per layer add them. Device collectives are captured like kernels. Host collectives
(gloo) cannot be captured, so on the CPU they are marked with ``dg.no_graph``, and the mode string
sets ``breakable`` for the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import linear, rms_norm, silu

import devgraph as dg
from devgraph.runners import RankGroup

MODE = {
    "decode": {"policy": "full", "buckets": [2, 4, 8]},
    "prefill": {"policy": "breakable", "buckets": [32, 64]},
    "backends": {"cpu": {"decode": "breakable"}},
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the whole model, independent of the number of ranks."""

    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head: int = 32
    inner: int = 512
    vocab: int = 512
    length: int = 64
    """Maximum number of tokens of a request."""
    requests: int = 8
    tokens: int = 64
    """Number of tokens of the largest prefill step."""

    @property
    def width(self) -> int:
        return self.heads * self.head


def full_weights(shape: Shape, seed: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the full weights of each layer, then the embedding; they are equal on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    kv = shape.kv_heads * shape.head
    for _ in range(shape.layers):
        yield {
            "query": weight(shape.width, shape.width),
            "key": weight(kv, shape.width),
            "value": weight(kv, shape.width),
            "mixed": weight(shape.width, shape.width),
            "gate": weight(shape.inner, shape.width),
            "up": weight(shape.inner, shape.width),
            "down": weight(shape.width, shape.inner),
        }
    yield {"embedding": weight(shape.vocab, shape.width)}


BY_ROWS = ("mixed", "down")
"""Weights that are split along their inputs; the others, except the embedding, along outputs."""


@dg.region(mutates=("out",))  # reads lengths only from the device: static in a full graph
def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Compute attention of each token to its request's tokens up to its own position."""
    tokens, heads, head = query.shape
    seen, told = keys[slots], values[slots]  # (tokens, length, kv heads, head)
    grouped = query.view(tokens, seen.shape[2], -1, head)
    scores = torch.einsum("tkgd,tlkd->tkgl", grouped, seen) * head**-0.5
    future = torch.arange(keys.shape[1], device=keys.device) > positions[:, None]
    weights = scores.masked_fill(future[:, None, None], float("-inf")).softmax(-1)
    out.copy_(torch.einsum("tkgl,tlkd->tkgd", weights, told).reshape(tokens, heads, head))


class Model:
    """One rank's part of the model, with its KV cache.

    The cache has one row per request, and a scratch row to which padded tokens write.

    Args:
        rank, size: index of this part and number of parts; part 0 of 1 is the whole model.
        add_up: a function that sums a tensor over the ranks, in place.
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device,
        *,
        rank: int = 0,
        size: int = 1,
        add_up: Callable[[torch.Tensor], Any] = lambda part: None,
    ) -> None:
        if shape.kv_heads % size or shape.inner % size:
            raise SystemExit(f"{size} ranks cannot share {shape.kv_heads} KV heads evenly")
        self.shape, self.add_up = shape, add_up
        *layers, last = full_weights(shape)
        self.layers = [
            {
                name: full.chunk(size, dim=int(name in BY_ROWS))[rank].contiguous().to(device)
                for name, full in layer.items()
            }
            for layer in layers
        ]
        self.embedding = last["embedding"].to(device)
        rows = (shape.layers, shape.requests + 1, shape.length, shape.kv_heads // size, shape.head)
        self.keys = torch.zeros(rows, device=device)
        self.values = torch.zeros(rows, device=device)
        rates = 10000.0 ** (-torch.arange(0, shape.head, 2) / shape.head)
        angles = torch.arange(shape.length)[:, None] * rates
        self.turns = torch.stack([angles.cos(), angles.sin()]).to(device)

    def rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cos, sin = self.turns[:, positions, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def hidden(self, batch: Any) -> torch.Tensor:
        """Return one row per token, and write keys and values to the cache."""
        shape, positions, slots = self.shape, batch.positions, batch.slots
        x = self.embedding[batch.input_ids]
        for layer, keys, values in zip(self.layers, self.keys, self.values, strict=True):
            h = rms_norm(x, (shape.width,))
            query, key, value = (
                linear(h, layer[name]).unflatten(-1, (-1, shape.head))
                for name in ("query", "key", "value")
            )
            keys[slots, positions] = self.rotated(key, positions)
            values[slots, positions] = value
            out = torch.empty_like(query)
            attend(self.rotated(query, positions), keys, values, slots, positions, out)
            part = linear(out.flatten(1), layer["mixed"])
            self.add_up(part)
            x = x + part
            h = rms_norm(x, (shape.width,))
            part = linear(silu(linear(h, layer["gate"])) * linear(h, layer["up"]), layer["down"])
            self.add_up(part)
            x = x + part
        return rms_norm(x, (shape.width,))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return linear(hidden, self.embedding)

    def decode(self, batch: Any) -> torch.Tensor:
        return self.logits(self.hidden(batch))

    def last_logits(self, hidden: torch.Tensor, batch: Any) -> torch.Tensor:
        return self.logits(hidden[batch.ends])

    def forget(self) -> None:
        self.keys.zero_()
        self.values.zero_()


def token_slots(shape: Shape) -> list[dg.InputSlot]:
    """Return the slots with one row per token; padded tokens use the scratch row of the cache."""

    def each(of: Callable[[int], int]) -> Callable[..., torch.Tensor]:
        return lambda dims, generator: torch.tensor([of(i) for i in range(dims[0])])

    return [
        dg.InputSlot(
            "input_ids",
            ("tokens",),
            torch.int64,
            pad=dg.Pad.zero(),
            sample=lambda dims, generator: torch.randint(shape.vocab, dims, generator=generator),
        ),
        dg.InputSlot(
            "slots",
            ("tokens",),
            torch.int64,
            pad=dg.Pad.fill(shape.requests),
            sample=each(lambda i: i % shape.requests),
        ),
        dg.InputSlot(
            "positions",
            ("tokens",),
            torch.int64,
            pad=dg.Pad.zero(),
            sample=each(lambda i: i // shape.requests),
        ),
    ]


ENDS = dg.InputSlot("ends", ("requests",), torch.int64, pad=dg.Pad.zero())


class Engine:
    """A model with two runners, which all ranks capture and run together."""

    def __init__(
        self,
        model: Model,
        config: dg.DeviceGraphConfig,
        backend: dg.Backend,
        ranks: RankGroup | None = None,
    ) -> None:
        shape = model.shape
        self.model, self.backend, self.ranks, self.steps = model, backend, ranks, 0
        self.before_launch: Callable[[int], None] = lambda step: None
        mine = config.for_backend(backend.name)
        slots = token_slots(shape)
        common: dict[str, Any] = {
            "backend": backend,
            "pool": backend.make_pool(),
            "group": ranks,
            "max_requests": shape.requests,
            "bound": {"keys": model.keys, "values": model.values},
        }
        self.prefill = dg.PrefillRunner(
            model.hidden,
            [*slots, ENDS],
            tail=model.last_logits,
            max_tokens=shape.tokens,
            config=mine.prefill,
            **common,
        )
        self.decode = dg.DecodeRunner(model.decode, slots, config=mine.decode, **common)

    def capture(self) -> None:
        self.prefill.capture()
        self.decode.capture()

    def step(self, runner: Any, inputs: dict[str, Any], requests: int) -> list[int]:
        """Run one step on all ranks and return each request's next token."""
        device = self.backend.device
        data = {name: torch.tensor(rows, device=device) for name, rows in inputs.items()}
        decision = runner.agree(runner.can_run(requests, len(inputs["input_ids"])))
        self.before_launch(self.steps)
        tokens = runner.run(data, decision=decision).argmax(-1)
        self.steps += 1
        if self.ranks is not None:
            # Captured collectives have no timeout: without a fence, .tolist() could hang.
            self.ranks.wait(self.backend.fence(), "step")
        return tokens.tolist()

    def close(self) -> None:
        self.decode.close()
        self.prefill.close()


def generate(
    prompts: Sequence[Sequence[int]], new_tokens: int, step: Callable[..., list[int]]
) -> list[list[int]]:
    """Return the new tokens of each request; every second request gets half as many.

    Args:
        step: a function of "prefill" or "decode", the inputs and the number of requests.
    """
    inputs: dict[str, list[int]] = {"input_ids": [], "slots": [], "positions": [], "ends": []}
    for slot, prompt in enumerate(prompts):
        inputs["input_ids"] += prompt
        inputs["slots"] += [slot] * len(prompt)
        inputs["positions"] += range(len(prompt))
        inputs["ends"].append(len(inputs["input_ids"]) - 1)
    found = [[token] for token in step("prefill", inputs, len(prompts))]
    wanted = [new_tokens if slot % 2 == 0 else new_tokens // 2 for slot in range(len(prompts))]
    while active := [slot for slot, tokens in enumerate(found) if len(tokens) < wanted[slot]]:
        inputs = {
            "input_ids": [found[slot][-1] for slot in active],
            "slots": active,
            "positions": [len(prompts[slot]) + len(found[slot]) - 1 for slot in active],
        }
        for slot, token in zip(active, step("decode", inputs, len(active)), strict=True):
            found[slot].append(token)
    return found


def random_prompts(shape: Shape) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(shape.vocab, (4 + slot,), generator=generator).tolist()
        for slot in range(shape.requests - 1)
    ]


def alone(shape: Shape, device: torch.device, new_tokens: int) -> list[list[int]]:
    """Generate the same tokens eagerly on one device, without runners."""
    model = Model(shape, device)

    @torch.no_grad()
    def step(phase: str, inputs: dict[str, list[int]], requests: int) -> list[int]:
        data = {name: torch.tensor(rows, device=device) for name, rows in inputs.items()}
        batch = argparse.Namespace(**data)
        if phase == "decode":
            return model.decode(batch).argmax(-1).tolist()
        return model.last_logits(model.hidden(batch), batch).argmax(-1).tolist()

    return generate(random_prompts(shape), new_tokens, step)


@dg.no_graph(mutates=("part",))
def add_up_on_the_host(part: torch.Tensor) -> None:
    dist.all_reduce(part)


@dataclasses.dataclass
class World:
    """The group of processes that torchrun started, or this process alone."""

    rank: int
    size: int
    backend: dg.Backend
    ranks: RankGroup | None
    """The group for votes, which uses gloo on the host."""
    add_up: Callable[[torch.Tensor], Any]
    """A function that sums a tensor over the ranks, in place."""

    @classmethod
    def join(cls, backend_name: str, timeout_s: float) -> World:
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if devices := torch.accelerator.device_count():
            # Each rank uses its own device. A backend uses the device that is current at creation.
            local = int(os.environ.get("LOCAL_RANK", 0))
            torch.accelerator.set_device_index(local % devices)
        backend = dg.get_backend(backend_name)
        if size == 1:
            return cls(rank, size, backend, None, lambda part: None)
        device = backend.device
        limit = datetime.timedelta(seconds=timeout_s)
        # Do not pass device_id: with it, new_group(backend="gloo") raises an error on an NPU.
        dist.init_process_group(dist.get_default_backend_for_device(device), timeout=limit)
        control = dist.new_group(backend="gloo", timeout=limit)
        # The first collective creates the communicator. This allocates and synchronizes, which is
        # not allowed in a capture, so run one collective before.
        dist.all_reduce(torch.zeros(1, device=device))
        add_up: Callable[[torch.Tensor], Any] = dist.all_reduce
        if device.type == "cpu":
            add_up = add_up_on_the_host
        ranks = RankGroup.from_process_group(control, timeout_s=timeout_s)
        return cls(rank, size, backend, ranks, add_up)

    @staticmethod
    def leave() -> None:
        """Destroy the communicators; first close all graphs that contain their collectives."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @staticmethod
    def abandon() -> None:
        """End this process after other ranks have exited, without waiting for the device.

        Destructors would wait for collectives that are still pending on the device. A process that
        must continue has to abort the communicator first.
        """
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def leaving(rank: int, at: str | None) -> Callable[[int], None]:
    """Return a function that ends this process at a step, for ``--leave RANK:STEP``."""
    who, _, when = (at or "-1:0").partition(":")

    def before_launch(step: int) -> None:
        if rank == int(who) and step == int(when):
            print(f"rank {rank} leaves at step {step}", flush=True)
            os._exit(0)

    return before_launch


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--backend", default="auto", help="devgraph backend")
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for a rank")
    parser.add_argument(
        "--check", action="store_true", help="compare the tokens with an eager run on one device"
    )
    parser.add_argument("--save", metavar="FILE", help="write the tokens as JSON")
    parser.add_argument(
        "--leave",
        metavar="RANK:STEP",
        help="end a rank at a step, to test the reaction of the others",
    )
    dg.add_cli_args(parser)
    args = parser.parse_args()
    config = dg.DeviceGraphConfig.from_args(args, parser=parser)
    args.config = config if config.to_dict() else dg.DeviceGraphConfig.from_dict(MODE)
    return args


def main(args: argparse.Namespace) -> int:
    """Generate on all ranks; return the exit status."""
    shape = dataclasses.replace(Shape(), layers=args.layers)
    world = World.join(args.backend, args.timeout)
    backend, device = world.backend, world.backend.device
    model = Model(shape, device, rank=world.rank, size=world.size, add_up=world.add_up)
    engine = Engine(model, args.config, backend, world.ranks)
    engine.capture()
    proofs = {} if args.leave else {p: getattr(engine, p).prove() for p in ("decode", "prefill")}
    engine.before_launch = leaving(world.rank, args.leave)
    found = generate(
        random_prompts(shape),
        args.new_tokens,
        lambda phase, *rest: engine.step(getattr(engine, phase), *rest),
    )
    good = all(proof.ok for proof in proofs.values())
    if world.rank == 0:
        for phase, proof in proofs.items():
            runner = getattr(engine, phase)
            print(f"{phase} ({runner.effective_policy} on {backend.name}): {proof}")
            print(str(runner.stats()).splitlines()[0])
        if args.save:
            with open(args.save, "w", encoding="utf-8") as file:
                json.dump(found, file)
        if args.check:
            same = found == alone(shape, device, args.new_tokens)
            good = good and same
            print(f"{world.size} ranks generate the same tokens as one device: {same}")
    engine.close()
    world.leave()
    return 0 if good else 1


if __name__ == "__main__":
    try:
        status = main(parse())
    except Exception:
        traceback.print_exc()
        World.abandon()
    sys.exit(status)
