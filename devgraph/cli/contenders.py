"""What ``bench`` compares: a decode step run eagerly, under every policy and by another package,
and images of several sizes encoded one by one and packed in graphs."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from devgraph.api.backend import Backend
from devgraph.api.capture import Captured, capture
from devgraph.api.config.phase import RUNNER_POLICY
from devgraph.api.errors import InputError
from devgraph.api.marks.marks import region
from devgraph.api.policy import breaks, compiles, policies
from devgraph.cli.arguments import ENCODERS, IMAGES
from devgraph.cli.measure import Comparison, Contender, Lengths
from devgraph.cli.tables import working
from devgraph.runners.encoder import EncoderRunner
from devgraph.runners.slots import InputSlot, Pad


def measure(
    backend: Backend, sizes: Mapping[str, int], kv_len: int, args: argparse.Namespace
) -> Comparison:
    """Return what every way that can run costs for one step of a decoder of these sizes."""
    compared = Comparison(backend, args)
    model = Decoder(backend.device, getattr(torch, args.dtype), **sizes)
    ids = torch.arange(sizes["batch"], device=backend.device) % sizes["vocabulary"]
    row = torch.zeros(1, dtype=torch.int64, device=backend.device)
    ways = [Contender("eager", functools.partial(model, ids, row), _in_turn(kv_len))]
    frozen: list[Contender] = []  # at the length of the capture
    with contextlib.ExitStack() as captures:
        with working("capturing"):
            for policy in args.policy or policies():
                compilers = tuple(args.compiler or backend.capabilities.compilers)
                for compiler in compilers if compiles(policy) else (None,):
                    name = policy if compiler is None else f"{policy}, {compiler}"
                    how: dict[str, Any] = {"policy": policy, "compiler": compiler}
                    how |= {"backend": backend, "host_args": {"kv_len": kv_len}}
                    step = functools.partial(capture, model, ids, row, **how)
                    captured = compared.attempt(name, step)
                    if captured is None:
                        continue
                    captures.enter_context(captured)
                    exact = compiler in (None, "eager")
                    replays = _replays(name, captured, kv_len, sizes["window"], exact=exact)
                    if not _takes_lengths(captured):
                        frozen += replays
                    ways += replays
            public = public_breakable(backend, model, ids, row, kv_len)
            if public is not None:
                ways.append(Contender(_PUBLIC, public, _in_turn(kv_len)))
        # Data that no capture saw, and another length.
        model.fill_caches()  # steps during captures wrote there, and their tokens are no data
        ids.copy_((ids + 1) % sizes["vocabulary"])
        row.fill_(kv_len - 1)
        other = max(1, kv_len - 1)
        expected = {n: model(ids, row, kv_len=n).clone() for n in (kv_len, other)}
        for way in ways:
            length = kv_len if way in frozen else other
            way.compare(expected[length], way.call(kv_len=length))
        with working("timing"):
            compared.time(ways)
    return compared


def _in_turn(*lengths: int) -> Lengths:
    return lambda: itertools.cycle(lengths)


def _takes_lengths(captured: Captured) -> bool:
    return breaks(captured.policy) or captured.backend.capabilities.region_update


def _replays(
    name: str, captured: Captured, kv_len: int, window: int, *, exact: bool
) -> list[Contender]:
    """Return the ways to replay one capture: one length, a few that return, always a new one."""
    lengths: dict[str, Lengths] = {name: _in_turn(kv_len)}
    if not breaks(captured.policy) and _takes_lengths(captured) and window > 1:
        known = [max(1, kv_len - i) for i in range(min(4, kv_len))]
        fresh = itertools.cycle(range(1, window + 1))
        lengths[f"{name}, 4 lengths in turn"] = _in_turn(*known)
        lengths[f"{name}, other length each step"] = lambda: fresh
    info = captured.info()
    figures = {
        "capture_seconds": captured.capture_seconds,
        "pool_bytes": captured.pool.bytes,
        "segments": info.segments,
        "nodes": info.nodes,
    }
    return [
        Contender(one, captured.replay, turns, figures, exact=exact)
        for one, turns in lengths.items()
    ]


@region(host_args=("kv_len",), mutates=("out",))
def attention(query: Tensor, keys: Tensor, values: Tensor, out: Tensor, *, kv_len: int) -> None:
    """Attend over the first ``kv_len`` rows of the cache; all are ``[batch, heads, rows, dim]``."""
    scores = torch.matmul(query, keys[:, :, :kv_len].transpose(-1, -2))
    weights = torch.softmax(scores * query.shape[-1] ** -0.5, dim=-1)
    out.copy_(torch.matmul(weights, values[:, :, :kv_len]))


class _Layer(nn.Module):
    keys: Tensor
    values: Tensor

    def __init__(self, hidden: int, heads: int, batch: int, window: int) -> None:
        super().__init__()
        self.heads = heads
        self.before = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.project = nn.Linear(hidden, hidden, bias=False)
        self.after = nn.RMSNorm(hidden)
        self.up = nn.Linear(hidden, 8 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)
        rows = (batch, heads, window, hidden // heads)
        self.register_buffer("keys", torch.empty(rows))
        self.register_buffer("values", torch.empty(rows))

    def forward(self, x: Tensor, row: Tensor, *, attend: Callable[..., None]) -> Tensor:
        query, key, value = (
            part.view(x.shape[0], self.heads, 1, -1)
            for part in self.qkv(self.before(x)).chunk(3, dim=-1)
        )
        self.keys.index_copy_(2, row, key)
        self.values.index_copy_(2, row, value)
        out = torch.empty_like(query)
        attend(query, self.keys, self.values, out)
        x = x + self.project(out.view(x.shape[0], -1))
        gate, up = self.up(self.after(x)).chunk(2, dim=-1)
        down: Tensor = self.down(nn.functional.silu(gate) * up)
        return x + down


class Decoder(nn.Module):
    """``layers`` decoder layers with caches of ``window`` rows for each of ``batch`` requests, an
    embedding and a head; random weights, no autograd.

    Raises:
        InputError: the width is no multiple of the heads.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        layers: int,
        hidden: int,
        heads: int,
        vocabulary: int,
        batch: int,
        window: int,
    ) -> None:
        super().__init__()
        if hidden % heads:
            raise InputError(
                f"hidden {hidden} is no multiple of {heads} heads; choose another size"
            )
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(_Layer(hidden, heads, batch, window) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.requires_grad_(False)
        self.to(device=device, dtype=dtype)
        self.fill_caches()

    def fill_caches(self) -> None:
        """Put the same random keys and values into the caches every time."""
        generator = torch.Generator().manual_seed(0)
        for cache in self.buffers():
            cache.copy_(torch.randn(cache.shape, generator=generator))

    def forward(self, ids: Tensor, row: Tensor, *, kv_len: int) -> Tensor:
        """Return logits ``[batch, vocabulary]`` of one token for each request.

        Args:
            ids: ``[batch]``.
            row: ``[1]``, where in the caches the new keys and values go.
            kv_len: cache rows to attend over.
        """
        return self.step(ids, row, functools.partial(attention, kv_len=kv_len))

    def step(self, ids: Tensor, row: Tensor, attend: Callable[..., None]) -> Tensor:
        """Return what ``forward`` does, with ``attend`` in the place of ``attention``."""
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, row, attend=attend)
        logits: Tensor = self.head(self.norm(x))
        return logits


_PUBLIC, _MODULE = "breakable-cuda-graphs", "breakable_cuda_graphs"
"""The public package for breaks, and what is imported of it."""


def public_breakable(
    backend: Backend, model: Decoder, ids: Tensor, where: Tensor, kv_len: int
) -> Callable[..., Tensor] | None:
    """Return the step as the package replays it, with its breaks at the same function.

    None without the package or its backend. The length, which the package hands to no eager body,
    is a variable that the body reads.
    """
    if backend.name != "cuda" or importlib.util.find_spec(_MODULE) is None:
        return None
    package = importlib.import_module(_MODULE)
    graph, length = package.BreakableCUDAGraph(), kv_len

    def attend(*tensors: Tensor) -> None:
        attention(*tensors, kv_len=length)

    def replay(*, kv_len: int) -> Tensor:
        nonlocal length
        length = kv_len
        graph.replay()
        return outputs

    streams = torch.get_device_module(ids.device)
    side = streams.Stream()
    side.wait_stream(streams.current_stream())
    with streams.stream(side):
        for _ in range(2):
            model(ids, where, kv_len=kv_len)
    streams.current_stream().wait_stream(side)
    with package.breakable_graph(graph):
        outputs = model.step(ids, where, package.no_graph(attend))
    return replay


MAX_ITEMS = 64
"""Images of a pack at most."""


class PackedVision:
    """The SigLIP tower of transformers over packed images of any sizes: the step of an encoder.

    An item has a row of pixels and a row of the interpolated positions for each patch.
    Attention is kept within items by a mask; padded rows are zero, so that nothing of them counts.

    Args:
        model: a ``SiglipVisionModel``.
    """

    def __init__(self, model: Any) -> None:
        self._tower = getattr(model, "vision_model", model)
        self._embed = self._tower.embeddings
        self._positions: dict[tuple[int, ...], Tensor] = {}

    def runner(self, budgets: Sequence[int], **options: Any) -> EncoderRunner:
        """Return a captured runner of the tower."""
        weight = self._embed.patch_embedding.weight
        slots = [
            InputSlot(name, ("tokens", width), weight.dtype, pad=Pad.zero())
            for name, width in (("patches", weight[0].numel()), ("positions", len(weight)))
        ]
        runner = EncoderRunner(self, slots, budgets=budgets, max_items=MAX_ITEMS, **options)
        runner.capture()
        return runner

    def item(self, image: Tensor) -> dict[str, Tensor]:
        """Return the item of an image ``[channels, height, width]``."""
        size, height, width = self._embed.patch_size, *image.shape[1:]
        patches = image.unfold(1, size, size).unfold(2, size, size).permute(1, 2, 0, 3, 4)
        rows = patches.reshape(-1, self._embed.patch_embedding.weight[0].numel())
        found = self._positions.get((height, width))
        if found is None:
            found = self._embed.interpolate_pos_encoding(
                rows.new_empty(1, len(rows), self._embed.embed_dim), height, width
            )[0].contiguous()
            self._positions[height, width] = found
        return {"patches": rows, "positions": found}

    def __call__(self, batch: Any) -> Tensor:
        """Return the hidden states of all rows, ``[tokens, hidden]``."""
        patch = self._embed.patch_embedding
        x = F.linear(batch.patches, patch.weight.flatten(1), patch.bias) + batch.positions
        x = torch.where(batch.item_ids[:, None] >= 0, x, 0)
        apart = batch.item_ids[:, None] != batch.item_ids[None]
        mask = torch.zeros_like(apart, dtype=x.dtype).masked_fill(apart, float("-inf"))
        hidden = self._tower.encoder(inputs_embeds=x[None], attention_mask=mask[None, None])
        out: Tensor = self._tower.post_layernorm(hidden.last_hidden_state)[0]
        return out


def siglip(shape: Mapping[str, Any]) -> Any:
    """Return a ``SiglipVisionModel`` of ``shape`` with random weights, on the host."""
    importlib.import_module("devgraph.integrations.transformers")  # says what is to be installed
    from transformers import SiglipVisionConfig, SiglipVisionModel

    torch.manual_seed(0)
    config = SiglipVisionConfig(
        hidden_size=shape["hidden"],
        intermediate_size=shape["inner"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        patch_size=shape["patch"],
        image_size=shape["patch"] * shape["grids"][len(shape["grids"]) // 2],
        vision_use_head=False,
    )
    return SiglipVisionModel(config).eval().requires_grad_(False)


def measure_encoder(backend: Backend, args: argparse.Namespace) -> Comparison:
    """Return what all images cost in every way, and those of each size alone."""
    shape, dtype = ENCODERS[args.encoder], getattr(torch, args.dtype)
    model = siglip(shape).to(device=backend.device, dtype=dtype)
    vision = PackedVision(model)
    compared = Comparison(backend, args)
    runners: dict[str, EncoderRunner] = {}
    sides = [side * shape["patch"] for side in shape["grids"]]
    sides = [sides[index % len(sides)] for index in range(args.images or IMAGES)]
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(3, side, side, generator=generator) for side in sides]
    images = [image.to(backend.device, dtype) for image in images]
    with contextlib.ExitStack() as stack:
        for policy in args.policy or (RUNNER_POLICY["encoder"],):
            options = {"config": policy, "backend": backend, "progress": False}
            make = functools.partial(vision.runner, shape["budgets"], **options)
            runner = compared.attempt(policy, make)
            if runner is not None:
                stack.callback(runner.close)
                runners[policy] = runner
        for side in (None, *dict.fromkeys(sides)):
            chosen = [one for one in images if side in (None, one.shape[1])]
            work = f"{len(chosen)} images" + (f", {side}x{side}" if side else "")
            compared.time(_ways(work, chosen, model, vision, runners))
    return compared


def _ways(
    work: str,
    images: Sequence[Tensor],
    model: Any,
    vision: PackedVision,
    runners: Mapping[str, EncoderRunner],
) -> list[Contender]:
    """Return every way to encode ``images``, eager first, compared with it."""

    def way(name: str, call: Callable[..., Tensor]) -> Contender:
        lengths = functools.partial(itertools.repeat, 0)
        return Contender(f"{work}: {name}", call, lengths, exact=False, parts=len(images))

    def alone(**_: int) -> Tensor:
        batches = (image[None] for image in images)
        states = (model(one, interpolate_pos_encoding=True).last_hidden_state for one in batches)
        return torch.cat([one[0] for one in states])

    def packing(runner: EncoderRunner) -> Callable[..., Tensor]:
        return lambda **_: torch.cat(runner.run([vision.item(image) for image in images]))

    expected = alone()
    ways = [way("eager", alone)]
    ways[0].compare(expected, alone())
    for name, runner in runners.items():
        ways.append(way(name, packing(runner)))
        then = runner.stats()
        ways[-1].compare(expected, ways[-1].call())
        now = runner.stats()
        padded = now.padded_rows - then.padded_rows
        ways[-1].figures |= {
            "capture_seconds": now.capture_seconds,
            "pool_bytes": runner.pool.bytes,
            "padding": padded / max(1, padded + now.real_rows - then.real_rows),
            "eager_packs": now.eager_steps - then.eager_steps,
        }
    return ways
