"""LoRA adapters in graphs, with one variant for steps with adapters and one for steps without.

All adapters are rows of two static tensors. A step reads the adapter of each request, so one graph
works for any mix of adapters. Steps without adapters use the variant that computes no adapters.
Loading an adapter writes to its row and needs no new capture.
"""

from __future__ import annotations

import torch

import devgraph as dg

DIM, RANK, ADAPTERS = 64, 8, 4  # row 0 is zero, for requests without an adapter

torch.manual_seed(0)
torch.set_grad_enabled(False)
weight = torch.randn(DIM, DIM) * DIM**-0.5
down, up = torch.zeros(ADAPTERS, DIM, RANK), torch.zeros(ADAPTERS, RANK, DIM)


def load(row, seed):
    """Load an adapter into a row of the static tensors."""
    generator = torch.Generator().manual_seed(seed)
    down[row].copy_(torch.randn(DIM, RANK, generator=generator) * 0.1)
    up[row].copy_(torch.randn(RANK, DIM, generator=generator) * 0.1)


def step(batch):
    hidden = batch.x @ weight
    if batch.variant.get("lora"):  # each variant has its own graphs, so a branch is allowed
        low = torch.einsum("td,tdr->tr", batch.x, down[batch.adapter])
        hidden = hidden + torch.einsum("tr,trd->td", low, up[batch.adapter])
    return torch.tanh(hidden)


decode = dg.DecodeRunner(
    step,
    [
        dg.InputSlot("x", ("tokens", DIM), torch.float32, pad=dg.Pad.zero()),
        dg.InputSlot("adapter", ("tokens",), torch.int64, pad=dg.Pad.zero(), high=ADAPTERS),
    ],
    variants=[{}, {"lora": True}],
    bound={"down": down, "up": up},
    facts=dg.EngineFacts(lora=True),
    config={"policy": "full", "buckets": [1, 2, 4]},
    backend="cpu",
    max_requests=4,
    progress=False,
)
decode.capture()


def run(x, adapters):
    """Run one step; ``adapters`` contains the adapter row of each request (0: no adapter)."""
    variant = {"lora": True} if any(adapters) else {}
    return decode.run({"x": x, "adapter": torch.tensor(adapters)}, variant=variant, clone=True)


def eager(x, adapters):
    added = torch.stack([x[i] @ down[row] @ up[row] for i, row in enumerate(adapters)])
    return torch.tanh(x @ weight + added)


for number, adapters in enumerate(([0, 0, 0], [0, 1, 2], [3, 3], [1])):
    load(1 + number % 3, seed=number)  # replaces an adapter between steps, without a new capture
    x = torch.randn(len(adapters), DIM)
    close = torch.allclose(run(x, adapters), eager(x, adapters), atol=1e-5)
    print("adapters", adapters, "equal eager:", close)
assert decode.prove().ok
stats = decode.stats()
print(f"{stats.graph_steps} of {stats.steps} steps in graphs, {len(stats.buckets)} graphs")
