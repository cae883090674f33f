"""Time to encode images of five sizes with a SigLIP tower, one at a time and packed into graphs.

Weights are random. Eager encodes one image at a time, as transformers does. The policies pack all
images into the graphs of an ``EncoderRunner``.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import devgraph as dg
from devgraph.api.config.phase import RUNNER_POLICY
from devgraph.api.errors import format_bytes
from devgraph.api.policy import policies
from devgraph.cli.arguments import DTYPES
from devgraph.cli.bench import Contender, chart, time_in_turns
from devgraph.cli.tables import print_table, ratio, time_text, write_file

ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "siglip-base": {
        "layers": 12,
        "hidden": 768,
        "heads": 12,
        "inner": 3072,
        "patch": 16,
        "grids": (7, 10, 14, 21, 28),
        "budgets": (256, 512, 1024),
    },
    "tiny": {
        "layers": 2,
        "hidden": 32,
        "heads": 2,
        "inner": 64,
        "patch": 4,
        "grids": (2, 3, 4, 6, 8),
        "budgets": (40, 64),
    },
}
"""Vision towers by name. ``grids`` has the number of patches along one side of each image size; the
position table has the size of the middle grid. ``budgets`` has the token budgets."""

IMAGES = 64
"""Number of images."""

NOTHING = dict.fromkeys(("capture_seconds", "pool_bytes", "padding", "eager_packs"))
"""Capture results of a contender without graphs."""

MAX_ITEMS = 64
"""Maximum number of images in a pack."""


class PackedVision:
    """An encoder step: the SigLIP tower of transformers over packed images of any sizes.

    An item has a row of pixels and a row of interpolated positions for each patch. A mask limits
    attention to the patches of one item. Padded rows are zero.

    Args:
        model: a ``SiglipVisionModel``.
    """

    def __init__(self, model: Any) -> None:
        self._tower = getattr(model, "vision_model", model)
        self._embed = self._tower.embeddings
        self._positions: dict[tuple[int, ...], Tensor] = {}

    def runner(self, budgets: Sequence[int], **options: Any) -> dg.EncoderRunner:
        """Return a captured runner of the tower."""
        weight = self._embed.patch_embedding.weight
        slots = [
            dg.InputSlot(name, ("tokens", width), weight.dtype, pad=dg.Pad.zero())
            for name, width in (("patches", weight[0].numel()), ("positions", len(weight)))
        ]
        runner = dg.EncoderRunner(self, slots, budgets=budgets, max_items=MAX_ITEMS, **options)
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
    # This import raises an error with an install hint if transformers is missing.
    importlib.import_module("devgraph.integrations.transformers")
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


def measure_encoder(backend: dg.Backend, args: argparse.Namespace) -> dict[str, Any]:
    """Return the results of all contenders, for all images and for each size of images."""
    shape, dtype = ENCODERS[args.encoder], getattr(torch, args.dtype)
    model = siglip(shape).to(device=backend.device, dtype=dtype)
    vision = PackedVision(model)
    runners: dict[str, dg.EncoderRunner] = {}
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    sides = [side * shape["patch"] for side in shape["grids"]]
    sides = [sides[index % len(sides)] for index in range(args.images or IMAGES)]
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(3, side, side, generator=generator) for side in sides]
    images = [image.to(backend.device, dtype) for image in images]
    with contextlib.ExitStack() as stack:
        for policy in args.policy or (RUNNER_POLICY["encoder"],):
            options = {"config": policy, "backend": backend, "progress": False}
            try:
                runner = vision.runner(shape["budgets"], **options)
            except (dg.CapabilityError, dg.CaptureError) as error:
                failed[policy] = str(error)
            else:
                stack.callback(runner.close)
                runners[policy] = runner
        for side in (None, *dict.fromkeys(sides)):
            chosen = [image for image in images if side in (None, image.shape[1])]
            work = f"{len(chosen)} images" + (f", {side}x{side}" if side else "")
            ways = _ways(work, chosen, model, vision, runners)
            timed, _ = time_in_turns(backend, ways, steps=args.steps, repeats=args.repeats)
            rows += [_per_item(row, len(chosen)) for row in timed]
    return {"rows": rows, "failed": failed}


def _per_item(row: dict[str, Any], items: int) -> dict[str, Any]:
    repeats = [{kind: time / items for kind, time in one.items()} for one in row["repeats"]]
    return {**row, "host": row["host"] / items, "wall": row["wall"] / items, "repeats": repeats}


def _ways(
    work: str,
    images: Sequence[Tensor],
    model: Any,
    vision: PackedVision,
    runners: Mapping[str, dg.EncoderRunner],
) -> list[Contender]:
    """Return the contenders that encode ``images``, eager first, compared with eager."""

    def way(name: str, call: Callable[..., Tensor]) -> Contender:
        lengths = functools.partial(itertools.repeat, 0)
        return Contender(
            name=f"{work}: {name}", call=call, lengths=lengths, figures=NOTHING, exact=False
        )

    def alone(**_: int) -> Tensor:
        batches = (image[None] for image in images)
        states = (model(one, interpolate_pos_encoding=True).last_hidden_state for one in batches)
        return torch.cat([one[0] for one in states])

    def packing(runner: dg.EncoderRunner) -> Callable[..., Tensor]:
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
        ways[-1].figures = {
            **ways[-1].figures,
            "capture_seconds": now.capture_seconds,
            "pool_bytes": runner.pool.bytes,
            "padding": padded / max(1, padded + now.real_rows - then.real_rows),
            "eager_packs": now.eager_steps - then.eager_steps,
        }
    return ways


def _print(report: Mapping[str, Any]) -> None:
    columns = ("", "wall", "vs eager", "capture", "memory", "padding", "eager packs", "equal")
    rows = [
        (
            row["name"],
            time_text(row["wall"]),
            ratio(row["wall_ratio"]),
            time_text(row["capture_seconds"]),
            format_bytes(row["pool_bytes"]) if row["pool_bytes"] is not None else None,
            f"{row['padding']:.0%}" if row["padding"] is not None else None,
            row["eager_packs"],
            row["equal"],
        )
        for row in report["rows"]
    ]
    print_table(report["title"], columns, rows, numbers=columns[1:-1])
    if report["backend"] == "cpu":
        print("on the CPU, these figures show the overhead of devgraph, not the speed of a device")
    for name, why in report["failed"].items():
        print(f"{name} FAILED: {why}")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; return 1 if a result differs from eager or a capture fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--encoder", choices=[*ENCODERS], default="siglip-base")
    parser.add_argument("--images", type=int, default=IMAGES)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--policy", action="append", choices=policies())
    parser.add_argument("--plot", metavar="FILE.svg")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    backend = dg.get_backend(args.backend)
    with torch.inference_mode():
        measured = measure_encoder(backend, args)
    report = {
        "title": f"one image of SigLIP ({args.encoder}) on {backend.device_name}",
        "devgraph": dg.__version__,
        "torch": torch.__version__,
        "backend": backend.name,
        "device": backend.device_name,
        "threads": torch.get_num_threads(),
        "shape": {**ENCODERS[args.encoder], "dtype": args.dtype},
        **measured,
    }
    _print(report)
    if args.json:
        write_file(args.json, json.dumps(report, indent=2))
    if args.plot:
        write_file(args.plot, chart(report["title"], report["rows"]))
    return 0 if all(row["equal"] for row in report["rows"]) and not report["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
